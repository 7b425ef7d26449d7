"""Agents in twelve frameworks call the proxy, and every token that the model samples is trained
exactly once.

`make agents` installs the frameworks into .venv-agents and runs this file there with AGENTS=1. An
agent's test is skipped if its framework is not installed. With AGENTS=1, it fails if a Python
framework is missing, but is still skipped if a node framework is, because `make agents` may be
unable to install it. The inference server and the proxy are real processes, and
examples/calculator.py makes the model.
"""

import asyncio
import gc
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, forward_logprobs, server_process
from transformers import AutoTokenizer

from cache import extends_parent
from examples.calculator import conversation, dataset, make_model
from rollout.trajectory import is_interactions
from workflow import WorkflowContext, resolve_workflow, workflow_context

# The frameworks cause warnings about connections that are not closed and about deprecated names.
NOT_OURS = ["ResourceWarning", "DeprecationWarning", "UserWarning"]
NOT_OURS += ["pytest.PytestUnraisableExceptionWarning"]
IGNORED = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in NOT_OURS]
pytestmark = [pytest.mark.runs, *IGNORED]
EXAMPLES = {  # module of the agent -> (its framework's package, prefix of the interaction ids)
    "openai_sdk": ("openai", "chatcmpl-"),
    "openai_agents_sdk": ("agents", "resp_"),
    "langgraph_agent": ("langgraph", "chatcmpl-"),
    "pydantic_ai_agent": ("pydantic_ai", "chatcmpl-"),
    "anthropic_sdk": ("anthropic", "msg_"),
    "camel_agent": ("camel", "chatcmpl-"),
    "autogen_agent": ("autogen_agentchat", "chatcmpl-"),
    "mcp_agent": ("mcp", "chatcmpl-"),
}
IN_NODE = {"vercel_ai": "resp_", "codex_cli": "resp_", "opencode_cli": "resp_"}
TOOLS_CHANGE = ("autogen_agent", "vercel_ai")  # agents whose last call has no tools


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """Run the garbage collector after this file's tests. Otherwise the connections that the
    frameworks left open would cause warnings in later tests."""
    yield
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("calculator") / "model")


@contextmanager
def serving(model_dir: Path) -> Iterator[dict[str, str]]:
    """The URLs of a small server and of a proxy."""
    python, model = (sys.executable, "-m"), ("--model-path", str(model_dir), "--exit-with-parent")
    tiny = (*python, "inference.tiny.server", *model, "--weight-version", "0")
    with server_process(*tiny) as (server, _):
        options = ["--server", server, "--admin-key", "secret", "--seed", "1"]
        options += ["--sampling", '{"max_new_tokens": 64}']
        with server_process(*python, "proxy", *model, *options) as (proxy, _):
            yield {"inference.tiny.server": server, "proxy": proxy}


@pytest.fixture(scope="module")
def servers(model_dir: Path) -> Iterator[dict[str, str]]:
    with serving(model_dir) as urls:
        yield urls


def needs(module: str) -> Any:
    """The parameter of a test that is skipped if the example's framework is not installed."""
    if module in (*IN_NODE, "claude_code"):
        absent = not (ROOT / "examples/node/node_modules/ready").exists()
        why = f"{module} needs node: `make agents` installs it where there is npm"
    else:
        package = EXAMPLES[module][0]
        absent = importlib.util.find_spec(package) is None and "AGENTS" not in os.environ
        why = f"{package} is not installed; run `make agents`"
    return pytest.param(module, marks=pytest.mark.skipif(absent, reason=why))


SAMPLES = [dataset()[0], dataset()[37], dataset()[63]]


def episodes(
    module: str, proxy_addr: str, samples: Any = (0, 1, 2), kwargs: Any = None, **options: Any
) -> list[Any]:
    """Run the episodes of some samples concurrently, and return their results."""
    agent = f"examples.{module}.Agent"
    proxy = {"proxy_addr": proxy_addr, "admin_key": "secret", "export_style": "concat"} | options
    workflow = resolve_workflow(agent, kwargs, proxy=proxy)

    async def episode(k: int) -> Any:
        workflow_context.set(WorkflowContext(task_id=k))
        return await workflow.arun_episode(None, dict(SAMPLES[k]))

    async def run() -> list[Any]:
        return await asyncio.gather(*map(episode, samples))

    return asyncio.run(run())


def check_conversation(interactions: Any, sample: dict, model_dir: Path, prefix: str) -> None:
    """Check that the conversation has three turns and two tool calls, and that every sampled token
    is trained and rewarded."""
    assert is_interactions(interactions)
    ((interaction_id, leaf),) = interactions.items()  # a conversation without branches is one row
    assert interaction_id.startswith(prefix)
    calls = [call["function"]["name"] for m in leaf.messages for call in m.get("tool_calls", [])]
    assert calls == ["add", "multiply"]
    assert leaf.output_message_list[-1]["content"] == f"the answer is {sample['answer']}"
    tensors = leaf.to_tensor_dict().items()
    row = {key: values[0].tolist() for key, values in tensors if values.ndim == 2}
    trained = [turn for turn, mask in zip(row["turn_ids"], row["loss_mask"], strict=True) if mask]
    assert sorted(set(trained)) == [0, 1, 2]
    assert trained == [turn for turn in row["turn_ids"] if turn >= 0]
    assert {reward for reward, mask in zip(row["turn_rewards"], row["loss_mask"]) if mask} == {1.0}
    scored = forward_logprobs(model_dir, row["input_ids"])
    for logprob, score, mask in zip(row["logprobs"], scored, row["loss_mask"]):
        assert not mask or logprob == pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize("module", [needs(x) for x in EXAMPLES if x not in TOOLS_CHANGE])
def test_an_agent_of_another_framework_trains(
    module: str, servers: dict[str, str], model_dir: Path
) -> None:
    """With each framework the agent's conversation becomes a single row, and the row ends with the
    tokens of the expected conversation."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    for sample, interactions in zip(SAMPLES, episodes(module, servers["proxy"]), strict=True):
        check_conversation(interactions, sample, model_dir, EXAMPLES[module][1])
        (leaf,) = interactions.values()
        said = conversation(sample, random.Random())
        talk = [message for message in said if message["role"] != "system"]
        spoken = tokenizer.apply_chat_template(talk, return_dict=False)
        assert leaf.to_tensor_dict()["input_ids"][0].tolist()[-len(spoken) :] == list(spoken)


@pytest.mark.parametrize("module", [needs(x) for x in (*IN_NODE, "autogen_agent")])
def test_an_agent_that_changes_its_tools_or_stores_nothing_trains(
    module: str, servers: dict[str, str], model_dir: Path
) -> None:
    """Vercel's AI SDK and AutoGen (with reflection) omit the tools when they ask for the last
    answer."""
    style = {"export_style": "individual", "episode_timeout_seconds": 300}
    (exported,) = episodes(module, servers["proxy"], [1], **style)
    rows = {turn: turn.to_lists() for turn in exported.values()}
    titles = [turn for turn in rows if rows[turn]["side_conversations"]]
    assert len(titles) == (module == "opencode_cli")
    assert not any(sum(rows[title]["loss_mask"]) for title in titles)
    turns = [turn for turn in rows if turn not in titles]
    assert [turn.parent for turn in turns] == [None, *turns[:2]]
    assert turns[-1].output_message_list[-1]["content"] == f"the answer is {SAMPLES[1]['answer']}"
    for turn in turns:
        assert turn.interaction_id.startswith(IN_NODE.get(module, "chatcmpl-"))
        row = rows[turn]
        assert row["loss_mask"] == [0] * turn.tokens.input_len + [1] * turn.tokens.output_len
        assert turn.reward == 1.0
        start, scored = turn.tokens.input_len, forward_logprobs(model_dir, row["input_ids"])
        assert row["logprobs"][start:] == pytest.approx(scored[start:], abs=1e-4)
    assert [extends_parent(turn) for turn in turns[1:]] == [True, module not in TOOLS_CHANGE]


@pytest.mark.parametrize("module", [needs("codex_cli"), needs("claude_code")])
def test_a_coding_agent_replaces_its_history_by_a_summary(
    module: str, model_dir: Path, tmp_path: Path
) -> None:
    """The agent makes a summary at 40 tokens, which is after each call. Every new conversation
    reads the last summary, so the reward at the end reaches all calls. Only Claude Code's model has
    learned to continue after a summary."""
    goes_on = module == "claude_code"
    model = make_model(tmp_path / "model", kinds=["Bash"]) if goes_on else model_dir
    style = {"export_style": "individual", "discount": 0.9}
    with serving(model) as servers:
        (exported,) = episodes(module, servers["proxy"], [1], {"compact_at": 40}, **style)
    first, *others = exported.values()
    assert (first.reads, [call for call in others if not call.reads]) == ([], [])
    assert sum(call.parent is None for call in others) >= 1
    assert all(sum(call.to_lists()["loss_mask"]) == call.tokens.output_len for call in others)
    end = others[-1]
    assert not goes_on or (end.parent, end.reward, first.reward > 0) == (None, 1.0, True)


@pytest.mark.parametrize("module", [needs(x) for x in ("openai_sdk", "anthropic_sdk")])
def test_an_example_in_a_process(module: str, servers: dict[str, str], model_dir: Path) -> None:
    """An agent also works in mode `subproc`, in which a worker process runs the agent."""
    results = episodes(module, servers["proxy"], mode="subproc", subproc_max_workers=2)
    for sample, interactions in zip(SAMPLES, results, strict=True):
        check_conversation(interactions, sample, model_dir, EXAMPLES[module][1])


class Silent:
    """An agent that returns a reward and never calls the model."""

    async def run(self, data: dict, **extra_kwargs: Any) -> float:
        return 1.0


def test_one_command_shows_an_episode(servers: dict[str, str], model_dir: Path) -> None:
    """`python -m extras.episode` prints the conversation tree with rewards and token counts."""
    command = [sys.executable, "-m", "extras.episode", "--model-path", str(model_dir)]
    command += ["--discount", "0.5", "--data", json.dumps(SAMPLES[0])]
    command += ["--server", servers["inference.tiny.server"]]

    def run(*words: str) -> subprocess.CompletedProcess:
        wide = os.environ | {"COLUMNS": "200", "PYTHONPATH": str(ROOT / "tests")}
        options: Any = {"cwd": ROOT, "env": wide, "capture_output": True, "text": True}
        return subprocess.run([*command, *words], timeout=100, **options)

    shown = run("examples.openai_sdk.Agent")
    assert shown.returncode == 0, shown.stderr
    lines = [line.strip("│├└─ ") for line in shown.stdout.splitlines()]
    rewards = [line.split(",")[0] for line in lines if line.startswith("reward")]
    assert rewards == ["reward 0.25", "reward 0.50", "reward 1.00"]
    assert 'assistant: add({"a": 1, "b": 1})' in lines
    assert "assistant: the answer is 2" in lines
    assert "14 + 12 tokens, 12 trained, chatcmpl-" in shown.stdout  # no temperature where it is 1
    for agent, code, said in (
        ("test_examples.Silent", 1, "error: .*no call of this session has succeeded"),
        ("examples.nowhere.Agent", 2, "error: .*nowhere"),
    ):
        ended = run(agent)
        assert (ended.returncode, ended.stdout) == (code, "")
        assert re.match(said, ended.stderr)
        assert "Traceback" not in ended.stderr
