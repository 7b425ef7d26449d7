"""The examples of AReaL's documents run here (docs/companion.md), with as few changes as possible.

The environment variable AREAL_DOCS names a folder with the four texts. Without it, the tests that
read the texts are skipped. `block` cuts an example out of a text. It renames the imports, writes
`{}` for `{...}` (the reader's own arguments), and restores an indentation that the text has lost. A
test executes the example, and supplies only the names that the example uses without defining them.
"""

import __future__

import ast
import asyncio
import inspect
import json
import os
import random
import re
import signal
import sys
import textwrap
import threading
import uuid
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import httpx
import pytest
import torch
import yaml
from conftest import ROOT, StartServer
from harness import ADMIN, HELLO, Harness, ScriptedEngine
from openai.types.chat import ChatCompletion
from scripted import loader

from cache import Interaction, InteractionCache, InteractionWithTokenLogpReward
from calls.client import OpenAIProxyClient
from engine import RemoteInfEngine
from extras.direct import ArealOpenAI
from inference.io_struct import GenerationHyperparameters, ModelRequest, ModelResponse
from inference.servers import Servers
from inference.weights import WeightUpdateMeta
from ppo import describe_mode, ppo_actor_loss_fn
from proxy import ProxyAddress
from rollout import trajectory
from rollout.dispatcher import DispatchState
from rollout.evaluate import evaluate
from rollout.executor import WorkflowExecutor
from rollout.reward import AsyncRewardWrapper
from rollout.trajectory import check_trajectory_format, complete, concat_padded_tensors, dump
from run.config import ALIASES, PPOActorConfig, RolloutConfig, load
from run.inputs import Inputs
from staleness import RolloutStat, StalenessManager
from train import PPOTrainer
from training.actor import FSDPEngine, FSDPPPOActor
from workflow import (
    GroupedRolloutWorkflow,
    OpenAIProxyWorkflow,
    RLVRWorkflow,
    RolloutWorkflow,
    WorkflowContext,
    resolve_workflow,
    to_row,
    workflow_context,
)

pytestmark = pytest.mark.anyio

AGENT, ROLLOUT, OPENAI = "agent_workflow", "rollout_workflow", "openai_workflows"
WRITE_UP = "offpolicyness_and_partial_rollout"
QUESTION = {"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}
SHORT = GenerationHyperparameters(max_new_tokens=4)
GREEDY = SHORT.new(greedy=True)

# The blocks of the three pages, in order: how the first line begins, the last words, and, where the
# text has lost the indentation, each line's level as a digit. The write-up marks its code.
BLOCKS: dict[str, tuple[str, ...]] = {
    "agent": (AGENT, "class MyAgent", 'return compute_reward(response, data["answer"])'),
    "direct": (AGENT, "from areal.experimental", 'export_interactions(style="individual")'),
    "inline": (AGENT, "rollout:", "mode: inline"),
    "subproc": (AGENT, "rollout:", "subproc_max_workers: 4"),
    "sync agent": (AGENT, "import os", 'return compute_reward(response, data["answer"])'),
    "endpoints": (AGENT, "POST /grant_capacity", "/export_trajectories"),
    "interaction": (AGENT, "@dataclass", "completion: ChatCompletion | None"),
    "tensors": (AGENT, '{\n    "input_ids"', "[reward], dtype=torch.float32),\n}"),
    "assignment": (AGENT, "    client.set_last", "client.set_reward(completion_id, 0.5)"),
    "backpropagation": (AGENT, "C.reward = 1.0", "A.reward = 0 + 0.9 × 0.9 = 0.81"),
    "discount": (AGENT, "client.apply_reward", 'export_interactions(style="individual")'),
    "resolution": (AGENT, "def _resolve_workflow", "return resolved"),
    "proxy workflow": (AGENT, "class OpenAIProxy", "style=self.export_style,\n        )"),
    "public": (AGENT, "from areal.experimental.openai import (", ")\n"),
    "interface": (ROLLOUT, "from areal.api", 'the workflow."""\n...', "00111122"),
    "example value": (ROLLOUT, "return {", "}"),
    "context": (ROLLOUT, "from areal.infra", "workflow_context.stat_scope()", "001111221111"),
    "dumps": (ROLLOUT, "rollout:", "# Required for text decoding", "0111"),
    "dump line": (ROLLOUT, '{\n"task_id"', "\n}"),
    "submit": (ROLLOUT, "engine.submit(", "\n)"),
    "group size": (ROLLOUT, "rollout:", "group_size: 4", "01"),
    "grouped": (ROLLOUT, "class Grouped", "tensors(valid_results)", "0122222222322323"),
    "custom": (ROLLOUT, "from areal", "tensor_dict(resp, reward)", "0012212222222222222232"),
    "train": (ROLLOUT, "trainer.train(", "\n)"),
    "client": (OPENAI, "from areal.experimental.openai", "max_completion_tokens=100\n)"),
    "reward": (OPENAI, "client.set_reward(", "export_completions(turn_discount=0.9)"),
    "older workflow": (OPENAI, "from areal.api", "return client.export_completions()"),
    "multi turn": (OPENAI, "async def _run_one", "export_completions(), comp_data"),
    "tools": (OPENAI, "tools = [{", 'tool_choice="auto"  # or "none" to disable\n)'),
    "trees": (OPENAI, "# Example 1", "part of the role sequence)"),
    "export": (OPENAI, "completions = client.export", "# Convert to training format"),
}
WRITE_UP_BLOCKS = (
    *("staleness", "capacity", "life cycle", "response", "generation", "turns", "dispatcher"),
    *("producer", "consumer", "objective", "mode", "loss", "debugging", "throughput", "stability"),
    *("initialisation", "loop", "one turn"),
)
EXCEPTIONS = {  # blocks that no test can run, and why
    "resolution": "not Python: an argument `...` follows keyword arguments",
    "dispatcher": "locks and queues of threads, which rollout/dispatcher.py does not have",
    "initialisation": "AReaL's configuration objects; docs/differences.md replaces its lines",
}


def read(document: str) -> str:
    folder = os.environ.get("AREAL_DOCS")
    if not folder:
        pytest.skip("AREAL_DOCS does not name a folder with AReaL's documents")
    (path,) = Path(folder).glob(document + ".*")
    return path.read_text()


def spans(document: str) -> dict[str, tuple[int, int]]:
    """Where the blocks of a document begin and end, each after the end of the one before."""
    text, end, found = read(document), 0, {}
    if document == WRITE_UP:  # A.1 is one piece of code, and its loop begins with a comment
        marks = r"(?:```(?:python|yaml)|# 训练循环)\n(.*?)(?=```|# 训练循环)"
        code = re.finditer(marks, text, re.DOTALL)
        return dict(zip(WRITE_UP_BLOCKS, [match.span(1) for match in code], strict=True))
    for name, (where, first, last, *_) in BLOCKS.items():
        if where == document:
            start = text.index("\n" + first, end) + 1
            end = text.index(last, start) + len(last)
            found[name] = start, end
    return found


# What the documents import.
THINGS: tuple[Any, ...] = (ArealOpenAI, OpenAIProxyClient, InteractionWithTokenLogpReward)
THINGS += (ModelRequest, ModelResponse, AsyncRewardWrapper, OpenAIProxyWorkflow, RolloutWorkflow)
NAMES = {thing.__name__: thing for thing in (*THINGS, workflow_context)}
LIBRARIES = """import asyncio, torch, uuid
from abc import ABC, abstractmethod
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal
from openai import AsyncOpenAI
"""
# Allow `await` outside of a function, and leave annotations unevaluated.
FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | __future__.annotations.compiler_flag


def rename_imports(text: str) -> str:
    def rename(match: re.Match) -> str:
        names = re.findall(r"^\s*(\w+)", re.sub(r"#.*|[(),]", "\n", match[1]), re.MULTILINE)
        return "\n".join(f"from {NAMES[name].__module__} import {name}" for name in names)

    return re.sub(r"^from areal[\w.]* import (\([^)]*\)|.*)", rename, text, flags=re.MULTILINE)


def block(name: str) -> str:
    """The text of an example, ready to be executed."""
    document, _, _, *indent = BLOCKS.get(name, (WRITE_UP, "", ""))
    start, end = spans(document)[name]
    lines = read(document)[start:end].splitlines()
    for levels in indent:
        lines = [" " * 4 * int(n) + line for n, line in zip(levels, lines, strict=True)]
    return rename_imports(inspect.cleandoc("\n" + "\n".join(lines))).replace("{...}", "{}")


def execute(name: str, code: Any = None, **names: Any) -> dict[str, Any]:
    """Execute an example, and return the names that it has defined. If the example contains
    `await`, the value of "running" is a coroutine, and the example runs when this coroutine is
    awaited."""
    namespace: dict[str, Any] = {"__name__": __name__, **NAMES}
    exec(LIBRARIES, namespace)
    namespace |= names
    compiled = compile(code or block(name), f"<{name}>", "exec", flags=FLAGS, dont_inherit=True)
    namespace["running"] = eval(compiled, namespace)
    return namespace


def locals_of(function: Callable, *args: Any) -> dict[str, Any]:
    """Call a function, or a coroutine function that never waits, and return its local variables."""
    found: dict[str, Any] = {}

    def watch(frame: Any, event: str, _: Any) -> None:
        if event == "return" and frame.f_code is function.__code__:
            found.update(frame.f_locals)

    sys.setprofile(watch)
    try:
        result = function(*args)
        if inspect.iscoroutine(result):
            with pytest.raises(StopIteration):
                result.send(None)
    finally:
        sys.setprofile(None)
    return found


def stands_for(listing: type, **attributes: Any) -> Any:
    """An object of a listing's class, with attributes that the listing leaves out."""
    made = listing()
    vars(made).update(attributes)
    return made


# Lines of code, in a text that does not mark its code.
CODE = re.compile(
    r"\s*(@\w+$|(async )?def \w|class \w+[:(]|from [\w.]+ import|import \w+$|return .*[\])]|await |"
    r"[\w.]+ = )"
)


@pytest.mark.parametrize("document", [AGENT, ROLLOUT, OPENAI, WRITE_UP])
def test_every_block_is_listed(document: str):
    """Every line of code of a document belongs to a block."""
    text = read(document)
    for start, end in reversed(spans(document).values()):
        text = text[:start] + text[end:]
    assert [line for line in text.splitlines() if CODE.match(line)] == []


def test_every_block_runs_somewhere():
    """Some test of this file executes or reads each block, with three exceptions."""
    nodes = ast.walk(ast.parse(Path(__file__).read_text()))
    calls = [node for node in nodes if isinstance(node, ast.Call) and node.args]
    names = [call.args[0] for call in calls if ast.unparse(call.func) in ("block", "execute")]
    used = {name.value for name in names if isinstance(name, ast.Constant)} | {*CONFIGURATIONS}
    assert used == {*BLOCKS, *WRITE_UP_BLOCKS} - EXCEPTIONS.keys()
    assert len(EXCEPTIONS) == 3


# ---- configurations

CONFIGURATIONS = (
    *("inline", "subproc", "dumps", "group size", "staleness", "objective", "debugging"),
    *("throughput", "stability"),
)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_is_a_recipe(name: str, tmp_path: Path):
    """A YAML example is a preset for use on top of a recipe, and the presets of configs/ set
    exactly the keys and values of the write-up."""
    preset = tmp_path / "preset.yaml"
    preset.write_text(block(name))
    if (ours := ROOT / f"configs/{name}.yaml").exists():
        assert yaml.safe_load(ours.read_text()) == yaml.safe_load(block(name))
    config, _ = load(["--config", "demo", "--config", str(preset)])
    todo: list[tuple[str, Any]] = [*yaml.safe_load(preset.read_text()).items()]
    for key, value in todo:
        if isinstance(value, dict):
            todo += [(f"{key}.{name}", inner) for name, inner in value.items()]
        else:
            assert attrgetter(ALIASES.get(key, key))(config) == value


# ---- agents


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with both agents of the page; no vendor's API key is set."""
    head = "from openai import AsyncOpenAI\ndef compute_reward(response, answer): return 0.5\n"
    name = f"agents_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(f"{head}{block('agent')}\n{block('sync agent')}\n")
    monkeypatch.syspath_prepend(tmp_path)
    for variable in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    return name


@pytest.mark.parametrize(("agent", "mode"), [("MyAgent", "inline"), ("MySyncAgent", "subproc")])
async def test_the_agents_run(agents: str, proxy: ProxyAddress, agent: str, mode: str):
    """Both agents make their clients as the page shows. Their interactions have the fields and the
    tensors of the page, with the page's types."""
    workflow: Any = resolve_workflow(f"{agents}.{agent}", proxy=proxy._asdict() | {"mode": mode})
    (turn,) = (await workflow.arun_episode(None, QUESTION)).values()
    response, row = turn.model_response, turn.to_tensor_dict()
    assert turn.reward == 0.5
    assert row["loss_mask"].sum() == response.output_len > 0
    assert row["input_ids"][0].tolist() == response.input_tokens + response.output_tokens
    assert turn.completion.id == turn.interaction_id
    if mode == "inline":
        assert os.environ["OPENAI_API_KEY"] == "DUMMY"
        assert "OPENAI_BASE_URL" not in os.environ

    named = execute("interaction")["InteractionWithTokenLogpReward"]
    for name, kind in get_type_hints(named, {**NAMES, "ChatCompletion": ChatCompletion}).items():
        options = get_args(kind) if isinstance(kind, UnionType) else [kind]
        plain = tuple(get_origin(option) or option for option in options)
        assert isinstance(getattr(turn, name), plain), name
    dtypes = {name: lambda *_, dtype: dtype for name in ("tensor", "ones")}
    names = {"torch": SimpleNamespace(**vars(torch) | dtypes), "input_len": 1, "output_len": 1}
    tensors = eval(block("tensors"), names | {"output_logprobs": [0.0], "reward": 1.0})
    assert {key: row[key].dtype for key in tensors} == tensors


async def test_the_listing_of_the_proxy_workflow(proxy: ProxyAddress):
    """AReaL's OpenAIProxyWorkflow runs with this project's OpenAIProxyClient."""
    async with httpx.AsyncClient(trust_env=False) as http:
        client = OpenAIProxyClient(Servers(*proxy), "task")
        names = {"OpenAIProxyClient": lambda _: client, "http_session": http}
        listing: Any = execute("proxy workflow", **names)["OpenAIProxyWorkflow"]

        async def run_agent(url: str, data: dict) -> float:
            body = {"messages": data["messages"], "max_completion_tokens": 4}
            assert (await http.post(f"{url}/chat/completions", json=body)).status_code == 200
            return 0.5

        made = {"discount": 0.9, "export_style": "individual", "_run_agent": run_agent}
        made["_grant_capacity"] = lambda session: client.grant_capacity()
        (turn,) = (await stands_for(listing, **made).arun_episode(None, QUESTION)).values()
    assert turn.reward == 0.5


async def test_the_table_of_endpoints(start: Callable[..., Harness]):
    """The rows of the page's table are, in order, the life of a session, and each row works."""
    last, one, export = map(ast.literal_eval, re.findall(r"Body: (\{.*\})", read(AGENT)))
    bodies: dict[str, list[dict[str, Any]]] = {
        "/grant_capacity": [{}],
        "/rl/start_session": [{"task_id": "task"}],
        "/{session_id}/v1/chat/completions": [{"messages": HELLO}],
        "/{session_id}/v1/responses": [{"input": "hello"}],
        "/{session_id}/v1/messages": [{"messages": HELLO, "max_tokens": 9}],
        "/{session_id}/rl/set_reward": [last, one],
        "/{session_id}/rl/end_session": [{}],
        "/export_trajectories": [export],
    }
    rows = re.findall(r"^(\w+) (/\S+)$", block("endpoints"), re.MULTILINE)
    assert rows == [("POST", path) for path in bodies]
    harness, known, answer = start(), {"session_id": ""}, {}
    for method, path in rows:
        for body in bodies[path]:
            known["interaction_id"] = known.get("id", "")
            body |= {key: known[key] for key in ("session_id", "interaction_id") if key in body}
            url = path.format(**known)
            sent = await harness.http.request(method, url, json=body, headers=ADMIN)
            assert sent.status_code == 200, (path, sent.text)
            answer = sent.json()
            known |= {key: answer[key] for key in ("session_id", "id") if key in answer}
    assert [turn["reward"] for turn in answer["interactions"].values()] == [0.0, 0.0, 0.5]


# ---- the direct approach


async def test_the_direct_approach(real_engine: RemoteInfEngine, tiny_tokenizer: Any):
    """ArealOpenAI is a public name, and the page's workflow with it returns a turn and its
    reward."""
    assert execute("public")["ArealOpenAI"] is ArealOpenAI
    names = execute("direct", compute_reward=lambda response, answer: len(response.choices) / 2)
    workflow = stands_for(names["MyWorkflow"], tokenizer=tiny_tokenizer)
    rows = await workflow.arun_episode(real_engine, QUESTION)
    assert [row.reward for row in rows.values()] == [0.5]
    check_trajectory_format(trajectory.to_tensors(rows))


async def test_the_client_and_its_rewards(real_engine: RemoteInfEngine, tiny_tokenizer: Any):
    """ArealOpenAI answers as the SDK does, takes rewards and tools, and exports in three ways."""

    async def answered() -> tuple[ArealOpenAI, ChatCompletion]:
        names = execute("client", engine=real_engine, tokenizer=tiny_tokenizer)
        await names["running"]
        return names["client"], names["completion"]

    client, completion = await answered()
    assert isinstance(completion, ChatCompletion)
    turn = client.get_completions(completion.id)
    assert turn.completion == completion
    execute("assignment", client=client, completion_id=completion.id)
    assert turn.reward == 0.5
    assert [*execute("discount", client=client)["interactions"]] == [completion.id]

    client, completion = await answered()
    names = execute("reward", client=client, completion=completion, reward_value=2.0)
    assert names["completions_with_rewards"][completion.id].reward == 2.0

    client, _ = await answered()
    client.set_last_reward(3.0)
    names = execute("export", client=client)
    assert names["reward"] == 3.0
    check_trajectory_format(names["tensor_dict"])

    client = ArealOpenAI(real_engine, tiny_tokenizer, sampling={"max_new_tokens": 4})
    names = execute("tools", client=client, messages=HELLO)
    await names["running"]
    assert names["completion"].choices


async def test_the_older_method(real_engine: RemoteInfEngine, tiny_tokenizer: Any):
    """A class that has only `_run_one_episode` is a workflow. AReaL's multi-turn example asks the
    model again until the reward is 1."""
    listing = execute("older workflow")["MyOpenAIWorkflow"]
    kwargs = {"reward_fn": print, "gconfig": SHORT, "tokenizer": tiny_tokenizer}
    assert await resolve_workflow(listing, kwargs).arun_episode(real_engine, QUESTION) == {}

    stub = {"prompt": "", "response": "", "input_tokens": [], "output_tokens": []}
    method = execute("multi turn", **stub)["_run_one_episode"]
    rewards = iter([0.0, 0.0, 1.0])

    async def reward_fn(*texts: Any, **data: Any) -> float:
        return next(rewards)

    again = {"role": "user", "content": "Try again."}
    inside = {"max_turns": 5, "turn_discount": 0.5, "reflection_msg": again}
    inside |= {"tokenizer": tiny_tokenizer, "gconfig": SHORT, "async_reward_fn": reward_fn}
    listing = type("Workflow", (RolloutWorkflow,), {"_run_one_episode": method})
    workflow = stands_for(listing, **inside)
    rows = (await workflow.arun_episode(real_engine, QUESTION)).values()
    assert [(row.turn_id, row.reward) for row in rows] == [(0, 0.25), (1, 0.25), (2, 0.25)]


async def test_backpropagation(tiny_tokenizer: Any):
    """A chain of three turns gets the discounted rewards of the page."""
    client = ArealOpenAI(ScriptedEngine(tiny_tokenizer, "a", "b", "c"), tiny_tokenizer)
    messages: list = list(QUESTION["messages"])
    for _ in range(3):
        reply = await client.chat.completions.create(messages=messages)  # type: ignore[call-overload]
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "user", "content": "more"})
    client.set_last_reward(1.0)
    rewards = [row.reward for row in client.export_completions(turn_discount=0.9).values()]
    page = re.findall(r"^(\w)\.reward = .*?([\d.]+)$", block("backpropagation"), re.MULTILINE)
    assert {name: float(x) for name, x in page} == dict(zip("ABC", map(pytest.approx, rewards)))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_examples_of_trees(number: int):
    """The trees of the page arise if each completion continues the conversation of its parent.
    Equal roles alone make no parent."""
    example = re.split(r"# Example \d", block("trees"))[number]
    completions = re.findall(r"# Completion (\w): \[(.*?)\]", example)
    tree = re.search(r"# Tree: ([^(\n]*)", example)
    assert tree is not None
    chain = re.findall(r"\w(?!\w)", tree[1])
    parents = dict(zip(chain, [None, *chain])) | {"C": "A"}  # C hangs on a line of its own
    cache = InteractionCache()
    for name, listed in completions:
        parent, roles = cache.get(parents[name] or ""), listed.split(", ")
        messages = list(parent.conversation) if parent else []
        for role in roles[len(messages) :]:
            messages.append({"role": role, "content": f"{role} of {name}"})
        assert [message["role"] for message in messages] == roles
        others = [message | {"content": "another text"} for message in messages]
        assert cache.find_parent(messages)[0] is parent, name
        assert cache.find_parent(others)[0] is None
        output = {"role": "assistant", "content": f"the answer to {name}"}
        call = cache.enter(Interaction(messages, name))
        assert call.parent is parent
        cache.finish(call, ModelResponse([1], [2], [-0.5], [0]), output)


# ---- workflows


def test_names_and_defaults():
    """`arun_episode` has the parameters of the page, and ModelResponse the write-up's defaults."""
    theirs = execute("interface")["RolloutWorkflow"].arun_episode
    for method in (theirs, RolloutWorkflow.arun_episode):
        assert [*inspect.signature(method).parameters] == ["self", "engine", "data"]
    defaults = vars(execute("response")["ModelResponse"]())
    assert {name: getattr(ModelResponse(), name) for name in defaults} == defaults


def test_the_example_value():
    """The page's trajectory has the right format, and `complete` adds what it lacks."""
    code = "def example():\n" + textwrap.indent(block("example value"), "    ")
    trajectory = execute("example value", code)["example"]()
    check_trajectory_format(trajectory)
    assert complete(trajectory, task_id=0)["turn_ids"].tolist() == [[-1, -1, 0, 0, 0]]


@pytest.mark.parametrize(("is_eval", "scope"), [(False, "rollout"), (True, "eval-rollout")])
async def test_the_context(is_eval: bool, scope: str):
    """The page's episode reads its task's id, and whether it belongs to an evaluation."""
    workflow_context.set(WorkflowContext(is_eval=is_eval, task_id=3))
    found = locals_of(execute("context")["arun_episode"], None, None, {})
    assert (found["ctx"].is_eval, found["task_id"], found["scope"]) == (is_eval, 3, scope)


def test_a_dump_line(tiny_tokenizer: Any, tmp_path: Path):
    """A line of a dump has the keys of the page, in their order."""
    row = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2).bool()}
    dump(complete(row, task_id=42), 42, tmp_path, 0, tiny_tokenizer)
    line = json.loads((tmp_path / "0/42.jsonl").read_text())
    assert [*line] == [*ast.literal_eval(block("dump line"))]


@pytest.fixture
def custom() -> type:
    """The page's custom workflow, with the two methods that it leaves to its reader."""
    page: Any = execute("custom")["MyWorkflow"]

    class MyWorkflow(page):
        def compute_reward(self, resp: ModelResponse, data: dict) -> float:
            return data.get("reward", 1.0)

        def build_tensor_dict(self, resp: ModelResponse, reward: float) -> dict[str, torch.Tensor]:
            return to_row([resp], reward)

    return MyWorkflow


def test_a_custom_workflow_runs(custom: type, real_engine: RemoteInfEngine, tiny_tokenizer: Any):
    """`engine.submit` runs the page's workflow as a group. A negative reward rejects it."""
    gate = StalenessManager(real_engine, 9, 9, 0)
    executor = WorkflowExecutor(real_engine, RolloutConfig(), gate, tiny_tokenizer, SHORT)
    try:
        for reward in (1.0, -1.0):
            sample = {"prompt": "hi", "reward": reward}
            execute("submit", engine=real_engine, sample=sample, MyWorkflow=custom)
        first: Any = executor.wait_for_task(0, timeout=60)
        assert first["rewards"].tolist() == [1.0] * 4
        assert executor.wait_for_task(1, timeout=60) is None
    finally:
        executor.dispatcher.destroy()


@pytest.mark.anyio
async def test_a_custom_workflow_is_trained(
    custom: type,
    tiny_model_dir: Path,
    tiny_tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """`trainer.train` makes a whole run of the page's workflow, and ends all that it started. A
    notebook runs an event loop in the thread that calls it."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pytest keeps its own Ctrl-C
    (tmp_path / "data.jsonl").write_text('{"prompt": "hi"}\n')
    words = f"task=null model_path={tiny_model_dir} fileroot={tmp_path} callbacks=[] max_steps=1"
    words += f" train_dataset.path={tmp_path}/data.jsonl train_dataset.batch_size=2"
    words += " gconfig.n_samples=2 gconfig.max_new_tokens=4 actor.ppo_n_minibatches=1"
    config, _ = load(words.split())
    trainer = PPOTrainer(config)
    names = {"trainer": trainer, "tokenizer": tiny_tokenizer, "config": config}
    execute("train", MyWorkflow=custom, **names)
    (line,) = (trainer.config.run_dir / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["tokens"] > 0
    assert json.loads(line)["success"] == 1.0
    assert not torch.distributed.is_initialized()
    assert trainer.run.children
    assert all(child.process.poll() is not None for child in trainer.run.children)


async def reward_of_one(*texts: Any, **data: Any) -> float:
    return 1.0


async def test_the_listing_of_groups(real_engine: RemoteInfEngine, tiny_tokenizer: Any):
    """AReaL's GroupedRolloutWorkflow and this project's make equal rows."""
    one = RLVRWorkflow(reward_of_one, GREEDY, tiny_tokenizer)
    names = {"all_interaction_dicts": lambda results: all(map(trajectory.is_interactions, results))}
    listing = execute("grouped", **names, concat_padded_tensors=concat_padded_tensors)
    theirs = stands_for(listing["GroupedRolloutWorkflow"], workflow=one, group_size=2)
    results: list[Any] = [
        await workflow.arun_episode(real_engine, QUESTION)
        for workflow in (theirs, GroupedRolloutWorkflow(one, 2))
    ]
    assert torch.equal(*(rows["input_ids"] for rows in results))
    assert results[0]["input_ids"].shape[0] == 2


# ---- the write-up


class Version:
    """Tells the gate the policy version, which a test sets."""

    value = 0

    def get_version(self) -> int:
        return self.value


def test_the_listing_of_the_gate():
    """After the same events, both gates have the same counts and the same capacity."""
    rng, version = random.Random(0), Version()
    limits = {"max_concurrent_rollouts": 7, "consumer_batch_size": 3, "max_staleness": 2}
    ours = StalenessManager(version, **limits)
    listing = execute("life cycle")["StalenessManager"]
    listing.get_capacity = execute("capacity")["get_capacity"]
    inside = {"lock": threading.Lock(), "rollout_stat": RolloutStat(), "version_provider": version}
    theirs = stands_for(listing, **limits, **inside)
    for _ in range(300):
        stat = ours.get_stats()
        events = ["enqueued"]
        events += ["submitted"] * (stat.enqueued > 0 and ours.get_capacity() > 0)
        events += ["accepted", "rejected"] * (stat.running > 0)
        event = rng.choice(events)
        for gate in (ours, theirs):
            getattr(gate, f"on_rollout_{event}")()
        version.value += rng.random() < 0.1
        assert theirs.get_capacity() == ours.get_capacity()
        assert theirs.rollout_stat == ours.get_stats()


async def test_the_listing_of_generation_is_interrupted(
    start_tiny_server: StartServer, tiny_model_dir: Path, tmp_path: Path
):
    """A weight update interrupts AReaL's agenerate, which goes on under the new version. The new
    weights equal the old ones, so the tokens are those of an uninterrupted generation."""
    engine = RemoteInfEngine([start_tiny_server()], "abort")
    await asyncio.to_thread(engine.initialize)
    (tmp_path / "v1").symlink_to(tiny_model_dir, target_is_directory=True)
    asked = ModelRequest([5, 6, 7], gconfig=GREEDY.new(max_new_tokens=400))
    whole = await engine.agenerate(asked)
    waits: list[float] = []

    async def arequest_with_retry(addr: str, endpoint: str, payload: dict, method: str) -> dict:
        body = {"input_ids": payload["input_ids"], "return_logprob": True}
        body["sampling_params"] = {"temperature": 0, **payload["sample_params"]}
        request = asyncio.create_task(http.request(method, addr + endpoint, json=body))
        if not waits:
            running = False
            while not (running or request.done()):
                running = (await http.get(f"{addr}/model_info")).json()["running"] == 1
            await asyncio.to_thread(engine.pause)
        answer = (await request).json()
        logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        reason = answer["meta_info"]["finish_reason"]["type"]
        return {"output_ids": answer["output_ids"], "logprobs": logprobs, "stop_reason": reason}

    async def sleep(seconds: float) -> None:  # where the listing waits for the update
        waits.append(seconds)
        meta = WeightUpdateMeta(path=str(tmp_path), version=1)
        await asyncio.to_thread(engine.update_weights, meta)
        engine.set_version(1)
        await asyncio.to_thread(engine.resume)

    sampling = {"max_new_tokens": asked.gconfig.max_new_tokens}
    names: dict[str, Any] = {"payload": {"input_ids": [5, 6, 7], "sample_params": sampling}}
    names |= {"server_addr": engine.addresses[0], "arequest_with_retry": arequest_with_retry}
    names["asyncio"] = SimpleNamespace(sleep=sleep)
    async with httpx.AsyncClient(trust_env=False) as http:
        theirs = await execute("generation", **names)["agenerate"](engine, asked)
    engine.destroy()
    assert waits == [0.5]
    assert theirs.output_tokens == whole.output_tokens
    assert theirs.output_logprobs == pytest.approx(whole.output_logprobs, abs=1e-4)
    assert theirs.output_versions == sorted(theirs.output_versions)
    assert {*theirs.output_versions} == {0, 1}


async def test_several_turns(real_engine: RemoteInfEngine):
    """The listing MultiTurnWorkflow joins three turns into one valid row."""
    ids = [5, 6, 7]

    async def agenerate(_: Any) -> ModelResponse:
        response = await real_engine.agenerate(ModelRequest(ids, gconfig=SHORT))
        ids[:] = response.input_tokens + response.output_tokens + [8]
        return response

    names = execute("turns", ModelRequest=lambda _: None, reward=0.0)
    workflow = stands_for(names["MultiTurnWorkflow"], max_turns=3)
    engine = SimpleNamespace(agenerate=agenerate)
    trajectory = await workflow.arun_episode(engine, QUESTION)
    check_trajectory_format(trajectory)
    assert trajectory["input_ids"][0].tolist() == ids[:-1]
    assert (trajectory["loss_mask"][0].diff() > 0).sum() == 3
    assert torch.equal(trajectory["versions"] >= 0, trajectory["loss_mask"] > 0)


async def test_one_turn(real_engine: RemoteInfEngine, tiny_tokenizer: Any):
    """The listing CustomWorkflow takes what apply_chat_template returns in transformers 5."""
    inside = {"tokenizer": tiny_tokenizer, "gconfig": SHORT, "async_reward_fn": reward_of_one}
    workflow = stands_for(execute("one turn")["CustomWorkflow"], **inside)
    trajectory = await workflow.arun_episode(real_engine, QUESTION)
    check_trajectory_format(trajectory)
    assert trajectory["rewards"].tolist() == [1.0]


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("method", ["recompute", "loglinear", "metrics"])
def test_the_listing_of_the_mode(method: Any, decoupled: bool):
    """The listing PPOActor reads this project's keys, and names the same mode as
    `describe_mode`."""
    config = PPOActorConfig(use_decoupled_loss=decoupled, prox_logp_method=method)
    lines: list[str] = []
    names = execute("mode", config=config, logger=SimpleNamespace(info=lines.append))
    stands_for(names["PPOActor"], config=config)._log_configuration()
    ours = describe_mode(config)
    assert lines[0].split()[1].lower() == ours.split()[0]
    for words in ("no forward pass", "metrics"):
        theirs = decoupled and words in "".join(lines).lower()
        assert theirs == ({"metrics": "guesses"}.get(words, words) in ours)


def test_the_loops_of_producer_and_consumer():
    """AReaL's producer starts the tasks that this project's dispatcher starts, in the same order,
    even after a full queue; its consumer collects the same results, and ends with an error."""
    over, broken = threading.Event(), RuntimeError("broken")
    running, refused, errors = list[int](), [2], list[Exception]()
    ends = [broken, TimeoutError()]

    def submit(task: Any, task_id: int) -> None:
        if task_id in refused:
            refused.remove(task_id)
            raise asyncio.QueueFull
        running.append(task_id)

    def wait(count: int, timeout: float, with_timing: bool) -> list[Any]:
        if not running:
            raise ends.pop()
        return [SimpleNamespace(task_id=running.pop(0)) for _ in range(count)]

    class Condition(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            over.set()  # nothing is left to do, and no other thread would wake this one
            return True

    tasks = [SimpleNamespace(task_id=k) for k in range(9)]
    gate = StalenessManager(Version(), 8, 2, 1)
    runner = SimpleNamespace(paused=threading.Event(), submit=submit, wait=wait)
    runner.get_output_queue_size = lambda: len(running)
    listing = execute("producer", TaskQueueFullError=asyncio.QueueFull)
    listing |= execute("consumer", _MAX_FETCH_BATCH_SIZE=3)
    loops = ("_get_next_task_for_submission", "_commit_loop", "_fetch_loop")
    theirs = stands_for(
        type("Dispatcher", (), {name: listing[name] for name in loops}),
        **{"_shutdown_event": over, "_input_cv": Condition(), "_result_cv": Condition()},
        **{"_pending_inputs": deque(tasks), "_pending_results": {}, "runner": runner},
        **{"staleness_manager": gate, "task_factory": lambda task: task},
        **{"_has_runner_capacity": lambda: True, "_set_thread_exception": errors.append},
        logger=SimpleNamespace(error=lambda *_, exc_info: None),
    )
    ours = DispatchState(StalenessManager(Version(), 8, 2, 1), lambda data: 0)
    for task in tasks:
        gate.on_rollout_enqueued()
        ours.enqueue(task)

    theirs._commit_loop()
    started = [task.task_id for task in ours.start()]
    assert running == started == [0, 1, 2, 3]
    assert gate.get_capacity() == ours.may_start() == 0

    over.clear()
    theirs._fetch_loop()
    for task_id in started:
        ours.finish(task_id, task_id)
    assert [*theirs._pending_results] == [*ours.order]
    assert errors == [broken]


def test_the_listing_of_the_loss():
    """The write-up's loss equals ours in standard PPO and for fresh tokens. Otherwise its clipped
    branch lacks the weight w, which ours has in both branches."""
    arguments = "(logp_theta, log_p_behave, prox_logp, old_logp, advantages)"
    code = block("loss").replace("(...)", arguments)
    # four tokens: a fresh one above the clip; with w = 1.5, one within, one above, one with A < 0
    behave = torch.tensor([0.3, 0.2, 0.2, 0.2]).log()
    newest = torch.tensor([0.3, 0.3, 0.3, 0.3]).log()
    theta = torch.tensor([0.45, 0.33, 0.45, 0.45]).log()
    A = torch.tensor([1.0, 1.0, 1.0, -1.0])
    for decoupled, prox, wanted, ours in (
        (True, newest, [-1.2, -1.1, -1.2, 2.25], [-1.2, -1.65, -1.8, 2.25]),
        (False, behave, [-1.2, -1.2, -1.2, 2.25], [-1.2, -1.2, -1.2, 2.25]),
    ):
        listing = execute("loss", code, eps_clip=0.2, use_decoupled_loss=decoupled)
        found = locals_of(listing["ppo_actor_loss_fn"], theta, behave, prox, behave, A)
        assert found["policy_loss"].tolist() == pytest.approx(wanted)
        tokens = zip(theta, prox, behave, A, torch.ones(4))
        assert [ppo_actor_loss_fn(*token)[0].item() for token in tokens] == pytest.approx(ours)


def test_the_loop(
    start_tiny_server: StartServer, tiny_model_dir: Path, tiny_tokenizer: Any, tmp_path: Path
):
    """The loop of A.1 trains two steps with eta = 0, evaluates and saves both, and the server gets
    versions 1 and 2."""
    words = "gconfig.n_samples=2 gconfig.max_new_tokens=4 actor.ppo_n_minibatches=1 callbacks=[]"
    config, _ = load(words.split())
    rollout = RemoteInfEngine([server := start_tiny_server()])
    rollout.initialize()
    gate = StalenessManager(rollout, 2, 2, 0)
    executor = WorkflowExecutor(rollout, RolloutConfig(), gate, tiny_tokenizer, config.gconfig)
    actor = FSDPPPOActor(config.actor, tiny_model_dir)
    actor.create_process_group()
    actor.initialize(max_steps=2)
    meta = WeightUpdateMeta(path=str(tmp_path / "weights"))
    actor.connect_engine(rollout, meta)
    ref = FSDPEngine(config.actor, tiny_model_dir)
    ref.initialize()
    workflow = RLVRWorkflow(reward_of_one, config.gconfig, tiny_tokenizer)
    history: list[dict[str, Any]] = []

    def evaluate_step(actor: Any, samples: list[dict], step: int) -> None:
        inputs = Inputs(None, [], samples, tiny_tokenizer, workflow, workflow)
        history.append({"step": step} | evaluate(executor, inputs))

    def save(actor: Any, step: int) -> None:
        actor.save(tmp_path / "checkpoints" / f"step{step:05d}")

    names: dict[str, Any] = {"config": config, "rollout": rollout, "actor": actor, "ref": ref}
    names |= {"train_dataloader": loader([QUESTION] * 4), "valid_dataloader": [QUESTION] * 3}
    names |= {"max_steps": 2, "eval_interval": 1, "workflow": workflow, "weight_update_meta": meta}
    names["evaluator"] = SimpleNamespace(evaluate=evaluate_step)
    names["saver"] = SimpleNamespace(save=save)
    try:
        batch = execute("loop", **names)["batch"]
        assert rollout.get_version() == actor.get_version() == 2
        assert httpx.get(server + "/model_info", trust_env=False).json()["weight_version"] == "2"
        assert batch["versions"].max() == 1  # step 2 trains on tokens of version 1
        assert [(x["step"], x["eval_episodes"]) for x in history] == [(0, 3), (1, 3)]
        saved = (tmp_path / "checkpoints").iterdir()
        assert sorted(path.name for path in saved) == ["step00000", "step00001"]
    finally:
        rollout.destroy()
        actor.destroy()
