"""These tests run the examples in AReaL's documents (docs/companion.md) with as few changes as possible.

The environment variable AREAL_DOCS names a folder with the texts of the four documents. If AREAL_DOCS is not set, the
tests that read a document are skipped.

The function `block` cuts an example out of a document and makes three changes to the example. `block` replaces imports
of AReaL by imports of this project. `block` replaces `{...}`, which stands for the reader's own arguments, by `{}`.
`block` restores indentation that the text of the document has lost. A test executes an example, and supplies only those
names that the example uses without defining them.
"""

import __future__

import ast
import asyncio
import inspect
import json
import multiprocessing
import os
import random
import re
import threading
import uuid
from abc import ABC, abstractmethod
from collections import deque
from copy import deepcopy
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import httpx
import pytest
import torch
from conftest import StartServer
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion
from scripted import loader
from transformers import AutoTokenizer

from cache import Interaction, InteractionWithTokenLogpReward
from calls.client import ArealOpenAI, OpenAIProxyClient
from engine import RemoteInfEngine
from inference.io_struct import GenerationHyperparameters, ModelRequest, ModelResponse
from inference.weights import WeightUpdateMeta
from ppo import describe_mode
from rollout.executor import ProxyAddress, WorkflowExecutor
from rollout.reward import AsyncRewardWrapper
from rollout.runner import TaskQueueFullError
from rollout.trajectory import check_trajectory_format, complete, concat_padded_tensors, dump_lines
from run.keys import PPOActorConfig, RolloutConfig
from run.load import load
from run.recover import save_model
from staleness import RolloutStat, StalenessManager
from train import PPOTrainer
from training.actor import FSDPPPOActor
from workflow import (
    GroupedRolloutWorkflow,
    OpenAIProxyWorkflow,
    RLVRWorkflow,
    RolloutWorkflow,
    WorkflowContext,
    is_interactions,
    resolve_workflow,
    to_tensors,
    workflow_context,
)

pytestmark = pytest.mark.anyio

AGENT, ROLLOUT, OPENAI, WRITE_UP = (
    "agent_workflow",
    "rollout_workflow",
    "openai_workflows",
    "offpolicyness_and_partial_rollout",
)
QUESTION = {"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}
SHORT = GenerationHyperparameters(max_new_tokens=4)


class Block(NamedTuple):
    """The place of an example: the document, the beginning of the example's first line, the example's last words, and
    the indentation of the example's lines."""

    document: str
    first: str
    last: str
    indent: str = (
        ""  # the indentation level of each line as a digit, if the text has lost its indentation
    )


# Every block of code of the documents, in the order of the documents.
BLOCKS = {
    "agent": Block(AGENT, "class MyAgent", 'return compute_reward(response, data["answer"])'),
    "direct": Block(
        AGENT,
        "from areal.experimental.openai import ArealOpenAI",
        'export_interactions(style="individual")',
    ),
    "inline": Block(AGENT, "rollout:", "mode: inline"),
    "subproc": Block(AGENT, "rollout:", "subproc_max_workers: 4"),
    "sync agent": Block(AGENT, "import os", 'return compute_reward(response, data["answer"])'),
    "interaction": Block(AGENT, "@dataclass", "completion: ChatCompletion | None"),
    "tensors": Block(
        AGENT, '{\n    "input_ids": torch.tensor([...]', "[reward], dtype=torch.float32),\n}"
    ),
    "assignment": Block(
        AGENT, "    client.set_last_reward(1.0)", "client.set_reward(completion_id, 0.5)"
    ),
    "backpropagation": Block(AGENT, "C.reward = 1.0", "A.reward = 0 + 0.9 × 0.9 = 0.81"),
    "discount": Block(
        AGENT, "client.apply_reward_discount", 'export_interactions(style="individual")'
    ),
    "resolution": Block(AGENT, "def _resolve_workflow", "return resolved"),
    "proxy workflow": Block(
        AGENT, "class OpenAIProxyWorkflow", "style=self.export_style,\n        )"
    ),
    "public": Block(AGENT, "from areal.experimental.openai import (", ")\n"),
    "interface": Block(ROLLOUT, "from areal.api.workflow_api", 'the workflow."""\n...', "00111122"),
    "example value": Block(ROLLOUT, "return {", "}"),
    "context": Block(
        ROLLOUT, "from areal.infra import", "workflow_context.stat_scope()", "001111221111"
    ),
    "dumps": Block(ROLLOUT, "rollout:", "# Required for text decoding", "0111"),
    "dump line": Block(ROLLOUT, '{\n"task_id"', "\n}"),
    "submit": Block(ROLLOUT, "engine.submit(", "\n)"),
    "group size": Block(ROLLOUT, "rollout:", "group_size: 4", "01"),
    "grouped": Block(
        ROLLOUT,
        "class GroupedRolloutWorkflow",
        "return concat_padded_tensors(valid_results)",
        "0122222222322323",
    ),
    "custom": Block(
        ROLLOUT,
        "from areal.api.workflow_api",
        "return self.build_tensor_dict(resp, reward)",
        "0012212222222222222232",
    ),
    "train": Block(ROLLOUT, "trainer.train(", "\n)"),
    "client": Block(
        OPENAI, "from areal.experimental.openai import ArealOpenAI", "max_completion_tokens=100\n)"
    ),
    "reward": Block(
        OPENAI, "client.set_reward(completion.id", "export_completions(turn_discount=0.9)"
    ),
    "older workflow": Block(
        OPENAI, "from areal.api.workflow_api", "return client.export_completions()"
    ),
    "multi turn": Block(
        OPENAI, "async def _run_one_episode", "return client.export_completions(), comp_data"
    ),
    "tools": Block(OPENAI, "tools = [{", 'tool_choice="auto"  # or "none" to disable\n)'),
    "export": Block(
        OPENAI, "completions = client.export_completions", "# Convert to training format"
    ),
    "staleness": Block(WRITE_UP, "rollout:", "max_head_offpolicyness: 4"),
    "capacity": Block(WRITE_UP, "def get_capacity", "return capacity"),
    "life cycle": Block(WRITE_UP, "class StalenessManager", "self.rollout_stat.rejected += 1"),
    "response": Block(WRITE_UP, "@dataclass", '= "stop"'),
    "generation": Block(WRITE_UP, "async def agenerate", "stop_reason=stop_reason\n    )"),
    "turns": Block(WRITE_UP, "class MultiTurnWorkflow", "unsqueeze(0),\n        }"),
    "dispatcher": Block(
        WRITE_UP, "class BatchTaskDispatcher", "threading.Condition(self._result_lock)"
    ),
    "producer": Block(WRITE_UP, "def _commit_loop", "self._input_cv.wait()\n    return None"),
    "consumer": Block(
        WRITE_UP, "def _fetch_loop", "self._set_thread_exception(e)\n            break"
    ),
    "objective": Block(WRITE_UP, "actor:", 'prox_logp_method: "recompute"'),
    "mode": Block(WRITE_UP, "class PPOActor", 'FORWARD PASS (current policy)")'),
    "loss": Block(WRITE_UP, "def ppo_actor_loss_fn", "policy_loss = -torch.min(surr1, surr2)\n```"),
    "debugging": Block(WRITE_UP, "rollout:", "recompute_logprob: true"),
    "throughput": Block(WRITE_UP, "rollout:", 'prox_logp_method: "loglinear"'),
    "stability": Block(WRITE_UP, "rollout:", 'prox_logp_method: "recompute"'),
    "initialisation": Block(
        WRITE_UP, "rollout = RemoteSGLangEngine", "connect_engine(rollout, weight_update_meta)"
    ),
    "loop": Block(WRITE_UP, "for global_step", "saver.save(actor, global_step)"),
    "one turn": Block(WRITE_UP, "class CustomWorkflow", "unsqueeze(0),\n        }"),
}

# Each entry names a code block that no test can run, and says why no test can run the block.
EXCEPTIONS = {
    "resolution": "not Python: an argument `...` follows keyword arguments",
    "dispatcher": "AReaL's threads and locks; this project decides without threads (rollout/dispatcher.py)",
    "consumer": "AReaL's thread that polls; here a method runs when a task ends (rollout/dispatcher.py)",
    "loss": "not Python: the list of parameters is `...`",
    "initialisation": "the arguments are of AReaL's classes; docs/differences.md goes through the lines",
}


def read(document: str) -> str:
    """Return the text of a document, or skip the test if AREAL_DOCS is not set."""
    folder = os.environ.get("AREAL_DOCS")
    if not folder:
        pytest.skip("AREAL_DOCS does not name a folder with AReaL's documents")
    (path,) = Path(folder).glob(document + ".*")
    return path.read_text()


def spans(document: str) -> dict[str, tuple[int, int]]:
    """Return where each block of a document begins and ends. A block begins after the end of the previous block."""
    text, end, found = read(document), 0, {}
    for name, block in BLOCKS.items():
        if block.document == document:
            start = text.index("\n" + block.first, end) + 1
            end = text.index(block.last, start) + len(block.last)
            found[name] = start, end
    return found


# These flags of `compile` allow `await` outside of a function, and leave annotations unevaluated.
FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | __future__.annotations.compiler_flag

# The names that the documents import, and the modules of this project that define these names.
PLACES: dict[str, Any] = {
    "calls.client": (ArealOpenAI, OpenAIProxyClient),
    "cache": (InteractionWithTokenLogpReward,),
    "inference.io_struct": (ModelRequest, ModelResponse),
    "rollout.reward": (AsyncRewardWrapper,),
    "workflow": (OpenAIProxyWorkflow, RolloutWorkflow, workflow_context),
}
NAMES = {thing.__name__: thing for things in PLACES.values() for thing in things}


def rename_imports(text: str) -> str:
    """Replace each import of AReaL by imports of the same names from this project's modules."""

    def rename(match: re.Match) -> str:
        names = re.findall(r"^\s*(\w+)", re.sub(r"#.*|[(),]", "\n", match[1]), re.MULTILINE)
        where = {thing.__name__: module for module, things in PLACES.items() for thing in things}
        return "\n".join(f"from {where[name]} import {name}" for name in names)

    return re.sub(r"^from areal[\w.]* import (\([^)]*\)|.*)", rename, text, flags=re.MULTILINE)


def block(name: str) -> str:
    """Return the text of an example after the three changes that make the example executable."""
    start, end = spans(BLOCKS[name].document)[name]
    lines = read(BLOCKS[name].document)[start:end].splitlines()
    if indent := BLOCKS[name].indent:
        assert len(indent) == len(lines), (name, len(lines))
        lines = [" " * 4 * int(digit) + line for digit, line in zip(indent, lines)]
    return rename_imports(inspect.cleandoc("\n" + "\n".join(lines))).replace("{...}", "{}")


async def execute(name: str, **names: Any) -> dict[str, Any]:
    """Execute an example, and return the names that the example has defined. The example may contain `await`."""
    libraries: dict[str, Any] = {
        "asyncio": asyncio,
        "torch": torch,
        "uuid": uuid,
        "deepcopy": deepcopy,
    }
    libraries |= {
        "dataclass": dataclass,
        "field": field,
        "Literal": Literal,
        "AsyncOpenAI": AsyncOpenAI,
        "Any": Any,
    }
    namespace = {"__name__": __name__, **libraries, **NAMES, **names}
    code = compile(block(name), f"<{name}>", "exec", flags=FLAGS)
    result = eval(code, namespace)
    if inspect.iscoroutine(result):
        await result
    return namespace


# This pattern finds lines of code in a document that does not mark its code.
CODE = re.compile(
    r"\s*(@\w+$|(async )?def \w|class \w+[:(]|from [\w.]+ import|import \w+$|return .*[\])]|await |[\w.]+ = )"
)


@pytest.mark.parametrize("document", [AGENT, ROLLOUT, OPENAI, WRITE_UP])
def test_every_block_is_listed(document: str) -> None:
    """Every line of code of a document belongs to a block of BLOCKS. EXCEPTIONS contains at most five blocks."""
    text = read(document)
    for start, end in reversed(spans(document).values()):
        text = text[:start] + text[end:]
    assert [line for line in text.splitlines() if CODE.match(line)] == []
    assert EXCEPTIONS.keys() <= BLOCKS.keys()
    assert len(EXCEPTIONS) <= 5


def test_every_block_runs_somewhere() -> None:
    """Every block is executed or read by a test of this file, unless EXCEPTIONS contains the block."""
    calls = [
        node
        for node in ast.walk(ast.parse(Path(__file__).read_text()))
        if isinstance(node, ast.Call)
    ]
    used = {
        ast.literal_eval(call.args[0])
        for call in calls
        if ast.unparse(call.func) in ("block", "execute")
        if isinstance(call.args[0], ast.Constant)
    }
    used |= set(CONFIGURATIONS)
    assert used == BLOCKS.keys() - EXCEPTIONS.keys()


# ---------------------------------------------------------------- configurations

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "inline": {"rollout.openai.mode": "inline"},
    "subproc": {"rollout.openai.mode": "subproc", "rollout.openai.subproc_max_workers": 4},
    "dumps": {
        "rollout.dump_to_file": True,
        "fileroot": "/path/to/logs",
        "tokenizer_path": "model/tokenizer",
    },
    "group size": {"rollout.group_size": 4, "gconfig.n_samples": 4},
    "staleness": {"rollout.max_head_offpolicyness": 4},
    "objective": {"actor.use_decoupled_loss": True, "actor.recompute_logprob": True},
    "debugging": {"rollout.max_concurrent_rollouts": 1, "actor.use_decoupled_loss": False},
    "throughput": {"rollout.max_head_offpolicyness": 6, "actor.prox_logp_method": "loglinear"},
    "stability": {"rollout.max_concurrent_rollouts": 32, "actor.prox_logp_method": "recompute"},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_is_a_recipe(name: str, tmp_path: Path) -> None:
    """Each YAML example can be loaded as a preset after the demo's recipe, and sets the expected values."""
    recipe = tmp_path / "documents.yaml"
    recipe.write_text(block(name))
    words = {
        "throughput": ["train_dataset.batch_size=32"],
        "group size": ["gconfig.n_samples=1"],
    }.get(name, [])
    config = load(["--config", "configs/demo.yaml", "--config", str(recipe), *words])
    for key, value in CONFIGURATIONS[name].items():
        assert attrgetter(key)(config) == value


# ---------------------------------------------------------------- agents


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module with the two agents from AReaL's page Agent Workflow. The environment has no vendor's
    API key."""
    head = "from openai import AsyncOpenAI\n\n\ndef compute_reward(response, answer):\n    return 0.5\n\n\n"
    name = f"agents_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(head + block("agent") + "\n\n\n" + block("sync agent"))
    monkeypatch.syspath_prepend(tmp_path)
    for variable in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    return name


@pytest.mark.parametrize(("agent", "mode"), [("MyAgent", "inline"), ("MySyncAgent", "subproc")])
async def test_the_agents_run(agents: str, proxy: ProxyAddress, agent: str, mode: str) -> None:
    """Both agents from AReaL's page Agent Workflow make their clients as the page shows, and each gets an answer. In
    mode `inline` the environment variable OPENAI_API_KEY is DUMMY, and OPENAI_BASE_URL is not set."""
    workflow: Any = resolve_workflow(f"{agents}.{agent}", proxy=vars(proxy) | {"mode": mode})
    (turn,) = (await workflow.arun_episode(None, QUESTION)).values()
    assert turn.reward == 0.5
    assert turn.to_tensor_dict()["loss_mask"].sum() == turn.model_response.output_len > 0
    if mode == "inline":
        assert os.environ["OPENAI_API_KEY"] == "DUMMY"
        assert "OPENAI_BASE_URL" not in os.environ


async def test_an_interaction_of_the_proxy_has_the_documents_fields(
    agents: str, proxy: ProxyAddress
) -> None:
    """An exported interaction has each field of the dataclass on AReaL's page Agent Workflow, and each value has the
    type that the page gives."""
    workflow: Any = resolve_workflow(f"{agents}.MyAgent", proxy=vars(proxy))
    (turn,) = (await workflow.arun_episode(None, QUESTION)).values()
    named = (await execute("interaction"))["InteractionWithTokenLogpReward"]
    hints = get_type_hints(named, {**NAMES, "ChatCompletion": ChatCompletion})
    for name, kind in hints.items():
        options = (
            [kind] if get_origin(kind) is list else get_args(kind) or [kind]
        )  # X and None for the type `X | None`
        assert isinstance(
            getattr(turn, name), tuple(get_origin(option) or option for option in options)
        ), name
    assert turn.completion.id == turn.interaction_id
    assert (
        turn.model_response.output_tokens
        == turn.to_lists()["input_ids"][turn.model_response.input_len :]
    )
    spec = SimpleNamespace(
        **vars(torch) | {name: lambda *_, dtype: dtype for name in ("tensor", "ones")}
    )
    given = {
        "torch": spec,
        "input_len": 1,
        "output_len": 1,
        "output_logprobs": [0.0],
        "reward": 1.0,
    }
    tensors = eval(block("tensors"), given)
    assert {key: turn.to_tensor_dict()[key].dtype for key in tensors} == tensors


async def test_the_listing_of_the_proxy_workflow_runs(proxy: ProxyAddress) -> None:
    """AReaL's listing of OpenAIProxyWorkflow runs with this project's OpenAIProxyClient."""
    async with httpx.AsyncClient(trust_env=False) as http:
        client = OpenAIProxyClient(http._transport, proxy.proxy_addr, proxy.admin_key, "task")  # type: ignore[arg-type]
        names = {"OpenAIProxyClient": lambda _: client, "http_session": http}
        listing: Any = (await execute("proxy workflow", **names))["OpenAIProxyWorkflow"]

        class Workflow(listing):
            discount, export_style = 0.9, "individual"

            async def _grant_capacity(self, session: Any) -> None:
                await client.grant_capacity()

            async def _run_agent(self, url: str, data: dict) -> float:
                body = {"messages": data["messages"], "max_completion_tokens": 4}
                assert (await http.post(f"{url}/chat/completions", json=body)).status_code == 200
                return 0.5

        (turn,) = (await Workflow().arun_episode(None, QUESTION)).values()
    assert turn.reward == 0.5


def test_the_page_names_the_routes_and_the_body_of_an_export() -> None:
    """On AReaL's page Agent Workflow, the fields in the body of an export request are the arguments of
    OpenAIProxyClient.export_interactions."""
    body = re.search(r'Body: (\{"session_id".*\})', read(AGENT))
    assert body is not None
    fields = ast.literal_eval(body[1]).keys() - {"session_id"}
    assert fields == inspect.signature(OpenAIProxyClient.export_interactions).parameters.keys() - {
        "self"
    }


# ---------------------------------------------------------------- AReaL's examples of the direct approach


async def test_the_public_names(tiny_tokenizer: Any) -> None:
    """The four public names on AReaL's page Agent Workflow can be imported from this project."""
    names = await execute("public")
    assert names["ArealOpenAI"] is ArealOpenAI
    assert names["OpenAIProxyWorkflow"] is OpenAIProxyWorkflow


async def test_the_direct_approach(real_engine: RemoteInfEngine, tiny_tokenizer: Any) -> None:
    """The workflow MyWorkflow from AReaL's page Agent Workflow returns one interaction with its reward."""
    names = await execute(
        "direct", compute_reward=lambda response, answer: len(response.choices) / 2
    )
    workflow = names["MyWorkflow"]()
    workflow.tokenizer = tiny_tokenizer
    rows = await workflow.arun_episode(real_engine, QUESTION)
    assert [row.reward for row in rows.values()] == [0.5]
    check_trajectory_format(to_tensors(rows))


async def test_the_client_and_its_rewards(
    real_engine: RemoteInfEngine, tiny_tokenizer: Any
) -> None:
    """ArealOpenAI answers a call that names no model, accepts rewards, and exports tensors. The answer has the SDK's
    type ChatCompletion."""
    names = await execute("client", engine=real_engine, tokenizer=tiny_tokenizer)
    client, completion = names["client"], names["completion"]
    assert isinstance(completion, ChatCompletion)
    turn = client.get_completions(completion.id)
    assert turn.completion == completion
    await execute("assignment", client=client, completion_id=completion.id)
    assert turn.reward == 0.5
    names = await execute("reward", client=client, completion=completion, reward_value=2.0)
    assert names["completions_with_rewards"][completion.id].reward == 2.0
    client.cache._discounted = (
        False  # the cache discounts the rewards only if `_discounted` is False
    )
    names = await execute("export", client=client)
    assert names["reward"] == 2.0
    check_trajectory_format(names["tensor_dict"])
    client.cache._discounted = False
    names = await execute("discount", client=client)
    assert list(names["interactions"]) == [completion.id]


async def test_tools(real_engine: RemoteInfEngine, tiny_tokenizer: Any) -> None:
    """In AReaL's example of a call with a tool, the client gets an answer from the model."""
    client = ArealOpenAI(real_engine, tiny_tokenizer, sampling={"max_new_tokens": 4})
    names = await execute("tools", client=client, messages=QUESTION["messages"])
    assert names["completion"].choices


@pytest.mark.parametrize("name", ["older workflow", "multi turn"])
async def test_a_workflow_with_the_older_method(
    name: str, real_engine: RemoteInfEngine, tiny_tokenizer: Any
) -> None:
    """A class that has only the method `_run_one_episode` is accepted as a workflow. AReaL's multi-turn example asks
    the model again until the reward is 1."""
    stub = {"prompt": "", "response": "", "input_tokens": [], "output_tokens": []}
    names = await (
        execute("older workflow") if name == "older workflow" else execute("multi turn", **stub)
    )
    namespace = {"_run_one_episode": names["_run_one_episode"]} if name == "multi turn" else {}
    cls = type("Workflow", (names.get("MyOpenAIWorkflow", RolloutWorkflow),), namespace)
    if name == "older workflow":
        workflow: Any = resolve_workflow(
            cls, {"reward_fn": print, "gconfig": SHORT, "tokenizer": tiny_tokenizer}
        )
        assert await workflow.arun_episode(real_engine, QUESTION) == {}
        return
    workflow, rewards = cls(), iter([0.0, 0.0, 1.0])

    async def reward_fn(*texts: Any, **data: Any) -> float:
        return next(rewards)

    vars(workflow).update(tokenizer=tiny_tokenizer, gconfig=SHORT, max_turns=5, turn_discount=0.5)
    workflow.async_reward_fn, workflow.reflection_msg = (
        reward_fn,
        {"role": "user", "content": "Try again."},
    )
    rows = await workflow.arun_episode(real_engine, QUESTION)
    assert [row.reward for row in rows.values()] == [0.25] * 3
    assert [row.turn for row in rows.values()] == [0, 1, 2]


async def test_backpropagation(tiny_tokenizer: Any) -> None:
    """In a chain of three turns, this project computes the same discounted rewards as AReaL's page Agent Workflow."""
    from harness import ScriptedEngine

    client = ArealOpenAI(ScriptedEngine(tiny_tokenizer, "a", "b", "c"), tiny_tokenizer)
    messages: list = list(QUESTION["messages"])
    for _ in range(3):
        reply = await client.chat.completions.create(messages=messages)  # type: ignore[call-overload]
        messages += [
            reply.choices[0].message.model_dump(exclude_none=True),
            {"role": "user", "content": "more"},
        ]
    client.set_last_reward(1.0)
    rewards = [row.reward for row in client.export_completions(turn_discount=0.9).values()]
    computed = re.findall(r"^(\w)\.reward = .*?([\d.]+)$", block("backpropagation"), re.MULTILINE)
    assert dict(zip("ABC", map(pytest.approx, rewards))) == {
        name: float(value) for name, value in computed
    }


# ---------------------------------------------------------------- workflows


async def test_the_interface(tiny_tokenizer: Any) -> None:
    """RolloutWorkflow.arun_episode has the same parameters as on AReaL's page Rollout Workflow."""
    names = {"ABC": ABC, "abstractmethod": abstractmethod}
    theirs = (await execute("interface", **names))["RolloutWorkflow"].arun_episode
    assert list(inspect.signature(theirs).parameters) == ["self", "engine", "data"]
    assert (
        inspect.signature(theirs).parameters.keys()
        == inspect.signature(RolloutWorkflow.arun_episode).parameters.keys()
    )


def test_the_example_value() -> None:
    """The trajectory on AReaL's page Rollout Workflow passes check_trajectory_format, and `complete` adds its missing
    tensors."""
    namespace: dict[str, Any] = {"torch": torch}
    exec(
        "def example():\n"
        + "\n".join("    " + line for line in block("example value").splitlines()),
        namespace,
    )
    trajectory = namespace["example"]()
    check_trajectory_format(trajectory)
    assert complete(trajectory, task_id=0)["turn_ids"].tolist() == [[-1, -1, 0, 0, 0]]


async def test_the_context(tiny_tokenizer: Any) -> None:
    """The episode on AReaL's page Rollout Workflow reads the workflow context, both in training and in an
    evaluation."""
    episode = (await execute("context"))["arun_episode"]
    for is_eval in (False, True):
        workflow_context.set(WorkflowContext(is_eval=is_eval, task_id=3))
        assert await episode(None, None, {}) is None


def test_a_dump_line(tiny_tokenizer: Any) -> None:
    """A line of a dump has the same keys as the line on AReaL's page Rollout Workflow, in the same order."""
    trajectory = complete(
        {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2, dtype=torch.bool)},
        task_id=42,
    )
    (line,) = dump_lines(trajectory, 42, tiny_tokenizer)
    assert list(line) == list(ast.literal_eval(block("dump line")))


@pytest.fixture
def custom() -> type:
    """Return the custom workflow from AReaL's page Rollout Workflow. The returned class adds the two methods that the
    page leaves for its reader to write."""
    exec(block("custom"), names := {"uuid": uuid, **NAMES})
    page: Any = names["MyWorkflow"]

    class MyWorkflow(page):
        def compute_reward(self, resp: ModelResponse, data: dict) -> float:
            return data.get("reward", 1.0)

        def build_tensor_dict(self, resp: ModelResponse, reward: float) -> dict[str, torch.Tensor]:
            return to_tensors({"": Interaction([], model_response=resp, reward=reward)})

    return MyWorkflow


async def test_a_custom_workflow_is_submitted_and_trained(
    custom: type, real_engine: RemoteInfEngine, tiny_tokenizer: Any
) -> None:
    """`engine.submit(data=..., workflow=..., workflow_kwargs=..., group_size=4)` runs the custom workflow from AReaL's
    page in a group. A negative reward rejects the sample."""
    executor = WorkflowExecutor(
        real_engine, RolloutConfig(max_head_offpolicyness=9), tiny_tokenizer, SHORT
    )
    try:
        for reward in (1.0, -1.0):
            names = {
                "engine": real_engine,
                "sample": {"prompt": "hi", "reward": reward},
                "MyWorkflow": custom,
            }
            await execute("submit", **names)
        first = await asyncio.to_thread(real_engine.wait_for_task, 0, 60)
        assert first is not None
        assert first["rewards"].tolist() == [1.0] * 4
        assert await asyncio.to_thread(real_engine.wait_for_task, 1, 60) is None
    finally:
        executor.destroy()


def test_a_custom_workflow_is_given_to_the_trainer(
    custom: type, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """`trainer.train(workflow=..., workflow_kwargs=...)` runs a whole training run and ends all its processes."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "hi"}\n')
    words = [
        "task=null",
        f"model_path={tiny_model_dir}",
        f"train_dataset.path={data}",
        "train_dataset.batch_size=2",
    ]
    words += [
        f"fileroot={tmp_path}",
        "experiment_name=e",
        "trial_name=t",
        "logger.live=false",
        "max_steps=1",
    ]
    config = load(
        [*words, "gconfig.n_samples=2", "gconfig.max_new_tokens=4", "actor.ppo_n_minibatches=1"]
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    trainer = PPOTrainer(config)
    assert not config.run_dir.exists(), "the constructor starts nothing"
    exec(
        block("train"),
        {"trainer": trainer, "MyWorkflow": custom, "tokenizer": tokenizer, "config": config},
    )
    (line,) = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["tokens"] > 0
    assert json.loads(line)["success"] == 1.0
    assert not torch.distributed.is_initialized()
    assert not multiprocessing.active_children()


async def test_the_listing_of_groups_gives_the_same_rows(
    real_engine: RemoteInfEngine, tiny_tokenizer: Any
) -> None:
    """AReaL's listing of GroupedRolloutWorkflow and this project's class return equal tensors."""
    names = {
        "all_interaction_dicts": lambda results: all(map(is_interactions, results)),
        "concat_padded_tensors": concat_padded_tensors,
    }
    theirs = (await execute("grouped", **names))["GroupedRolloutWorkflow"]()
    greedy = SHORT.new(greedy=True)
    theirs.workflow, theirs.group_size = RLVRWorkflow(reward_of_one, greedy, tiny_tokenizer), 2
    ours = GroupedRolloutWorkflow(theirs.workflow, 2)
    one: Any = await theirs.arun_episode(real_engine, QUESTION)
    two: Any = await ours.arun_episode(real_engine, QUESTION)
    assert torch.equal(one["input_ids"], two["input_ids"])
    assert one["input_ids"].shape[0] == 2


async def reward_of_one(*texts: Any, **data: Any) -> float:
    return 1.0


# ---------------------------------------------------------------- the write-up


class Version:
    """An object with the method get_version, which returns the policy version that the test has set."""

    value = 0

    def get_version(self) -> int:
        return self.value


async def test_the_listing_of_the_gate_agrees(tiny_tokenizer: Any) -> None:
    """After the same events, this project's StalenessManager and the gate in the write-up on AReaL have the same counts
    and the same capacity."""
    rng, version = random.Random(0), Version()
    ours = StalenessManager(
        version, max_concurrent_rollouts=7, consumer_batch_size=3, max_staleness=2
    )
    names = await execute("life cycle")
    listing = type(
        "Listing",
        (names["StalenessManager"],),
        {"get_capacity": (await execute("capacity"))["get_capacity"]},
    )
    theirs: Any = listing()
    vars(theirs).update(lock=threading.Lock(), rollout_stat=RolloutStat(), version_provider=version)
    vars(theirs).update(max_concurrent_rollouts=7, consumer_batch_size=3, max_staleness=2)
    for _ in range(300):
        stat = ours.get_stats()
        events = (
            ["enqueued"]
            + ["submitted"] * (stat.enqueued > 0)
            + ["accepted", "rejected"] * (stat.running > 0)
        )
        event = rng.choice(events)
        for gate in (ours, theirs):
            getattr(gate, f"on_rollout_{event}")()
        version.value += rng.random() < 0.1
        assert theirs.get_capacity() == ours.get_capacity()
        assert theirs.rollout_stat == ours.get_stats()


async def test_a_response_without_arguments() -> None:
    """`ModelResponse()` has the same default values as in the write-up on AReaL."""
    theirs, ours = (await execute("response"))["ModelResponse"](), ModelResponse()
    assert {name: getattr(ours, name) for name in vars(theirs)} == vars(theirs)


async def test_the_listing_of_generation_gives_the_same_tokens(
    real_engine: RemoteInfEngine,
) -> None:
    """For a greedy request, the function agenerate from the write-up on AReaL and this project's engine return the same
    tokens and versions."""
    request = ModelRequest([5, 6, 7], gconfig=SHORT.new(greedy=True))
    ours = await real_engine.agenerate(request)

    async def arequest_with_retry(
        addr: str, endpoint: str, payload: dict, method: str
    ) -> dict[str, Any]:
        body = {"input_ids": payload["input_ids"], "return_logprob": True}
        body["sampling_params"] = {"temperature": 0, **payload["sample_params"]}
        async with httpx.AsyncClient(trust_env=False) as http:
            answer = (await http.request(method, addr + endpoint, json=body)).json()
        meta = answer["meta_info"]
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        return {
            "output_ids": answer["output_ids"],
            "logprobs": logprobs,
            "stop_reason": meta["finish_reason"]["type"],
        }

    payload = {"input_ids": [5, 6, 7], "sample_params": {"max_new_tokens": 4}}
    names = {
        "payload": payload,
        "server_addr": real_engine.addresses[0],
        "arequest_with_retry": arequest_with_retry,
    }
    theirs = await (await execute("generation", **names))["agenerate"](real_engine, request)
    assert theirs.output_tokens == ours.output_tokens
    assert theirs.output_versions == ours.output_versions
    assert theirs.output_logprobs == pytest.approx(ours.output_logprobs, abs=1e-4)


async def test_several_turns(real_engine: RemoteInfEngine, tiny_tokenizer: Any) -> None:
    """The class MultiTurnWorkflow from the write-up on AReaL returns a valid trajectory."""
    asked = ModelRequest([5, 6, 7], gconfig=SHORT)
    names = {"ModelRequest": lambda _: asked, "reward": 1.0}
    workflow = (await execute("turns", **names))["MultiTurnWorkflow"]()
    workflow.max_turns = 3
    trajectory = await workflow.arun_episode(real_engine, QUESTION)
    check_trajectory_format(trajectory)
    assert (trajectory["versions"][0] >= 0).sum() == trajectory["loss_mask"].sum() > 0


async def test_one_turn(real_engine: RemoteInfEngine, tiny_tokenizer: Any) -> None:
    """The class CustomWorkflow from the write-up on AReaL works with the value that apply_chat_template returns in
    transformers 5."""
    workflow = (await execute("one turn"))["CustomWorkflow"]()
    workflow.tokenizer, workflow.gconfig, workflow.async_reward_fn = (
        tiny_tokenizer,
        SHORT,
        reward_of_one,
    )
    trajectory = await workflow.arun_episode(real_engine, QUESTION)
    check_trajectory_format(trajectory)
    assert trajectory["rewards"].tolist() == [1.0]


async def test_the_listing_of_the_mode_reads_our_configuration() -> None:
    """The class PPOActor from the write-up on AReaL reads this project's keys, and logs the same mode as
    `describe_mode`."""
    for method, word in (
        ("recompute", "forward pass"),
        ("loglinear", "no forward pass"),
        ("metrics", "guesses"),
    ):
        for decoupled in (True, False):
            config, lines = (
                PPOActorConfig(use_decoupled_loss=decoupled, prox_logp_method=method),
                [],
            )  # type: ignore[arg-type, var-annotated]
            names = await execute("mode", config=config, logger=SimpleNamespace(info=lines.append))
            actor = names["PPOActor"]()
            actor.config = config
            actor._log_configuration()
            assert lines[0].split()[1].lower() == describe_mode(config).split()[0]
            assert not decoupled or word in describe_mode(config)


async def test_the_listing_of_the_producer_starts_tasks(tiny_tokenizer: Any) -> None:
    """The producer from the write-up on AReaL starts tasks in order, and exactly as many tasks as this project's gate
    admits."""
    gate, started = StalenessManager(Version(), 8, 2, 1), list[int]()
    names = await execute("producer", TaskQueueFullError=TaskQueueFullError)
    lock, over = threading.Lock(), threading.Event()
    runner = SimpleNamespace(
        paused=threading.Event(), submit=lambda task, task_id: started.append(task_id)
    )
    dispatcher = SimpleNamespace(
        _shutdown_event=over,
        _input_cv=threading.Condition(lock),
        _pending_inputs=deque(SimpleNamespace(task_id=k) for k in range(9)),
        runner=runner,
        staleness_manager=gate,
        task_factory=lambda task: task,
    )
    for _ in range(9):
        gate.on_rollout_enqueued()
    dispatcher._get_next_task_for_submission = lambda: names["_get_next_task_for_submission"](
        dispatcher
    )
    producer = threading.Thread(target=names["_commit_loop"], args=(dispatcher,))
    producer.start()
    while gate.get_stats().running < 4:
        await asyncio.sleep(0)
    with dispatcher._input_cv:
        over.set()
        dispatcher._input_cv.notify()
    producer.join()
    assert started == [0, 1, 2, 3]
    assert gate.get_capacity() == 0


def test_the_loop(
    start_tiny_server: StartServer, tiny_model_dir: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """The loop from appendix A.1 of the write-up on AReaL trains two steps with eta = 0, and the server gets the
    versions 1 and 2."""
    server, saved, evaluated = start_tiny_server(), tmp_path / "saved", list[int]()
    config = load(
        [
            "gconfig.n_samples=2",
            "gconfig.max_new_tokens=4",
            "actor.ppo_n_minibatches=1",
            "actor.kl_ctl=0",
        ]
    )
    rollout = RemoteInfEngine([server])
    rollout.initialize()
    options = RolloutConfig(max_head_offpolicyness=0, consumer_batch_size=2)
    executor = WorkflowExecutor(rollout, options, tiny_tokenizer, config.gconfig)
    actor = FSDPPPOActor(config=config.actor, model_path=tiny_model_dir)
    actor.create_process_group()
    actor.initialize(max_steps=2)
    meta = WeightUpdateMeta(path=str(tmp_path / "weights"))
    actor.connect_engine(rollout, meta)
    try:
        names: dict[str, Any] = {
            "config": config,
            "rollout": rollout,
            "actor": actor,
            "ref": None,
            "weight_update_meta": meta,
        }
        names |= {"train_dataloader": loader([QUESTION] * 4), "valid_dataloader": None}
        names |= {"max_steps": 2, "eval_interval": 1}
        names["workflow"] = RLVRWorkflow(reward_of_one, config.gconfig, tiny_tokenizer)
        names["evaluator"] = SimpleNamespace(
            evaluate=lambda actor, loader, step: evaluated.append(step)
        )
        names["saver"] = SimpleNamespace(
            save=lambda actor, step: save_model(actor, saved, step, keep=1)
        )
        exec(block("loop"), names)
        assert rollout.get_version() == actor.get_version() == 2
        assert httpx.get(server + "/model_info", trust_env=False).json()["weight_version"] == "2"
        assert names["batch"]["versions"].max() == 1  # step 2 trains on tokens of version 1
        assert evaluated == [0, 1]
        assert [path.name for path in saved.iterdir()] == ["step00001"]
        with pytest.raises(ValueError, match="version 2 is not newer than 2"):
            rollout.update_weights(meta.with_version(2))
    finally:
        executor.destroy()
        rollout.destroy()
        actor.destroy()
