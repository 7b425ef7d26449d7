"""A run is its configuration and its schedule: what is recorded, how a replay follows it, and which
differences it finds.

The last tests record and repeat whole runs.
"""

import asyncio
import hashlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest
import torch
import yaml
from conftest import Session
from runs import command, finish, metrics_of, signalled
from safetensors.torch import save_file
from scripted import Echo, ScriptedEngine, loader

from engine import RemoteInfEngine
from extras import replay
from extras.replay import FILE, Differs, Hooks, Replay, Schedule, check, compare, digest, spans_of
from inference.io_struct import EngineError, GenerationHyperparameters, ModelRequest, ModelResponse
from rollout.executor import WorkflowExecutor
from run.config import ConfigError, RolloutConfig, load
from staleness import StalenessManager

pytestmark = pytest.mark.anyio
Fact = dict[str, Any]
PROMPT = [5, 6]
CODE = {"code": "c", "torch": "t", "ranks": 1}
START: Fact = {"start": 7, "version": 0}
TOKENS = [2, 3, 14, 15, 16]


def call(name: str, spans: list[Any], prompt: list[int] = PROMPT, **more: Any) -> Fact:
    return {"call": name, "prompt": digest(prompt), "spans": spans, **more}


RECORDED = call("7-0.0", [(0, 2, digest(TOKENS[:2])), (1, 5, digest(TOKENS))], stop="stop")


def write(path: Path, *facts: Fact) -> Path:
    """A schedule with these lines after the beginning of the run."""
    lines = [orjson.dumps(fact) + b"\n" for fact in ({"run": CODE, "step": 0}, *facts)]
    path.write_bytes(b"".join(lines))
    return path


# ---- the record


def test_a_call_is_recorded_as_spans() -> None:
    """There is one span for each version, and its hash covers all tokens before its end."""
    response = ModelResponse(PROMPT, [7, 8, 9], [-1.0] * 3, [2, 2, 3], "length")
    assert spans_of(response) == [(2, 2, digest([7, 8])), (3, 3, digest([7, 8, 9]))]
    assert digest([7, 8]) != digest([7, 9])


def test_a_restart_cancels_what_was_lost(tmp_path: Path) -> None:
    """A line "run" cancels the steps after its checkpoint, and "start" the calls of its task."""
    lost: list[Fact] = [{"start": task, "version": 0} for task in range(4)]
    lost += [call(f"{task}-0.0", []) for task in range(4)]
    lost += [{"consume": 0, "version": 0}, {"pushed": 1}, {"consume": 2, "version": 1}]
    again = call("3-0.0", [(1, 4, "t")])
    kept: list[Fact] = [{"run": CODE, "step": 1}, {"start": 3, "version": 1}, again]
    kept += [{"consume": 3, "version": 1}, {"pushed": 2}]
    schedule = Schedule(write(tmp_path / FILE, *lost, *kept)).read()
    assert (schedule.steps, schedule.version) == ({0: [0], 1: [3]}, 2)
    assert schedule.starts == {0: 0, 1: 0, 2: 0, 3: 1}
    assert schedule.calls[3] == {"3-0.0": again}
    assert schedule.runs == [CODE, CODE]
    assert schedule.check(1, 0) == 2
    with pytest.raises(ValueError, match="an impossible step 1"):  # the gate has a place less
        schedule.check(1, -1)


def test_an_incomplete_line_is_read_later(tmp_path: Path) -> None:
    """Another process may be about to write the rest of a line; no line is read twice."""
    path = write(tmp_path / FILE, {"consume": 4, "version": 0})
    with path.open("ab", buffering=0) as file:
        file.write(b'{"consume":5,"ver')
        schedule = Schedule(path).read()
        assert schedule.steps == {0: [4]}
        file.write(b'sion":0}\n')
    assert schedule.read().read().steps == {0: [4, 5]}


# A run of one step: task 0 is consumed, task 1 is not finished.
GOOD: list[Fact] = [
    {"run": CODE, "step": 0},
    {"start": 0, "version": 0},
    {"start": 1, "version": 0},
    call("0-0.0", [(0, 2, "a")], stop="stop"),
    call("0-1.0", [], failed=503),
    {"finish": 0, "version": 0},
    {"consume": 0, "version": 0},
    {"pushed": 1},
]


@pytest.mark.parametrize(
    ("place", "line", "words"),
    [
        (3, call("0-0.0", [(99, 2, "a")]), "an impossible step 1"),
        (6, {"consume": 10**9, "version": 0}, "an impossible step 1"),
        (5, {"consume": 0, "version": 0}, "an impossible step 1"),
        (5, {"consume": 1, "version": 0}, "an impossible step 1"),
        (7, {"pushed": 10**9}, "an impossible step 2"),
        (3, call("0-0.0", [(0, "2", None)]), "wrong line .*0-0.0"),
        (3, {"start": 0, "vers": 0}, "wrong line .*vers"),
        (3, "cut", "wrong line .*cut"),
    ],
)
def test_a_tampered_schedule_is_refused(tmp_path: Path, place: int, line: Any, words: str) -> None:
    """What no run writes is an error in one line, because a replay would wait for it for ever."""
    lines = [orjson.dumps(fact) for fact in GOOD]
    lines[place] = orjson.dumps(line)
    (tmp_path / FILE).write_bytes(b"\n".join([*lines, b""]))
    with pytest.raises(ConfigError, match=words, check=lambda error: "\n" not in str(error)):
        check(load(["train_dataset.batch_size=1"])[0], str(tmp_path))


# ---- the engine


class Servers:
    """The token at position p has the id 10 * version + p. Only max_new_tokens ends an answer."""

    def __init__(self) -> None:
        self.version, self.asked = 0, list[tuple[int, int]]()  # (version, tokens) of each request

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = orjson.loads(request.content)
        start, n = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        self.asked.append((self.version, n))
        ids = [10 * self.version + position for position in range(start, start + n)]
        meta: Fact = {"finish_reason": {"type": "length"}, "weight_version": str(self.version)}
        meta["output_token_logprobs"] = [[-1.0, token, None] for token in ids]
        return httpx.Response(200, json={"output_ids": ids, "meta_info": meta})


@pytest.fixture
def follow(tmp_path: Path) -> Callable[..., tuple[RemoteInfEngine, Hooks, Servers]]:
    """follow(*facts) makes an engine that repeats the calls of a schedule with these lines."""

    def make(*facts: Fact) -> tuple[RemoteInfEngine, Hooks, Servers]:
        write(tmp_path / FILE, START, *facts)
        hooks = Hooks(str(write(tmp_path / "own.jsonl", START)), str(tmp_path))
        servers = Servers()
        session: Any = Session(httpx.MockTransport(servers))
        return RemoteInfEngine(["http://a"], hooks=hooks, session=session), hooks, servers

    return make


def request(name: str = "7-0.0", ids: list[int] = PROMPT) -> ModelRequest:
    g = GenerationHyperparameters(max_new_tokens=50)
    return ModelRequest(list(ids), gconfig=g, call=name)


async def test_each_span_waits_for_its_version(follow: Any) -> None:
    """A replay asks for the tokens of a span when the servers have its version, and records the
    span."""
    engine, hooks, servers = follow(RECORDED)
    running = asyncio.ensure_future(engine.agenerate(request()))
    while not hooks.own.read().calls[7]:
        await asyncio.sleep(0.001)
    assert hooks.own.find("7-0.0")["spans"] == RECORDED["spans"][:1]
    assert servers.asked == [(0, 2)]
    servers.version = 1
    hooks.record(pushed=1)
    response = await running
    assert servers.asked == [(0, 2), (1, 3)]
    assert (response.output_tokens, response.output_versions) == (TOKENS, [0, 0, 1, 1, 1])
    assert (response.stop_reason, response.input_tokens) == ("stop", PROMPT)
    assert hooks.own.read().find("7-0.0") == RECORDED


@pytest.mark.parametrize("name", ["7-0.0", "7.0"])
async def test_a_failed_call_fails_again(follow: Any, name: str) -> None:
    """The status is the same, so the agent behaves the same. The name of a lone episode has no
    member."""
    engine, hooks, servers = follow(call(name, [], failed=503))
    with pytest.raises(EngineError) as failed:
        await engine.agenerate(request(name))
    assert (failed.value.status, servers.asked) == (503, [])
    assert hooks.own.read().find(name) == call(name, [], failed=503)


async def test_a_closed_call_is_recorded_as_failed(follow: Any) -> None:
    """An agent that hangs up cancels its call, which has no answer in a replay either."""
    engine, hooks, _ = follow(RECORDED)
    running = asyncio.ensure_future(engine.agenerate(request()))
    while not hooks.own.read().calls[7]:
        await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert hooks.own.read().find("7-0.0")["failed"] == 499


@pytest.mark.parametrize("name", ["eval-7-0.0", "7b.0", ".0", ""])
async def test_only_training_is_recorded(follow: Any, name: str) -> None:
    """Calls of evaluations, and of sessions without a task's number, run freely and leave no
    line."""
    engine, hooks, _ = follow(RECORDED)
    before = hooks.own.path, Path(hooks.own.path).read_bytes()
    assert (await engine.agenerate(request(name))).output_len == 50
    assert (hooks.own.path, Path(hooks.own.path).read_bytes()) == before


# ---- the trainer


def start(
    folder: Path,
    batch_size: int = 1,
    repeats: bool = True,
    engine: Any = None,
    executor: Any = None,
    step: int = 0,
) -> Replay:
    """The callback of a run that repeats the schedule in `folder`, or only records its own."""
    own, replaying = folder / "own", str(folder) if repeats else ""
    own.mkdir(exist_ok=True)
    engine = engine or SimpleNamespace()
    engine.hooks = Hooks(str(own / FILE), replaying)
    executor = executor or SimpleNamespace(listeners=[])
    parts: Fact = {"rank": 0, "step": step, "last_step": 9, "run_dir": own}
    words = [f"train_dataset.batch_size={batch_size}", "rollout.max_head_offpolicyness=4"]
    config, _ = load(words)
    callback = Replay(config, replaying)
    callback.on_start(SimpleNamespace(**parts, engine=engine, executor=executor))
    return callback


def consumed(*calls: Fact) -> list[Fact]:
    """The facts of a run whose step 3 consumes task 7."""
    facts: list[Fact] = [{"start": task, "version": 0} for task in range(8)]
    facts += [*calls, *({"consume": task, "version": v} for v, task in enumerate([0, 1, 7]))]
    return [*facts, {"pushed": 3}]


@pytest.mark.parametrize("cut", [0, 1, 9, 10**6])
def test_a_continued_run_cuts_an_incomplete_line(tmp_path: Path, cut: int) -> None:
    """A kill may leave half a line. It is cut, so the record "run" begins a new line."""
    path = tmp_path / "own" / FILE
    path.parent.mkdir()
    path = write(path, {"consume": 4, "version": 0}, {"consume": 5, "version": 1})
    content = path.read_bytes()
    path.write_bytes(content[: max(0, len(content) - cut)])
    start(tmp_path, repeats=False, step=1)
    schedule = Schedule(path).read()
    assert [run for run in schedule.runs if run == CODE] == [CODE][cut == 10**6 :]
    assert schedule.runs[-1] == replay.facts()
    assert (schedule.steps, schedule.version) == ({} if cut == 10**6 else {0: [4]}, 1)


def test_a_version_is_over_when_its_tokens_are_there(tmp_path: Path) -> None:
    """A replay does not wait for tokens of later versions. A task that ends without its recorded
    tokens counts as different."""
    write(tmp_path / FILE, *consumed(RECORDED))
    found = start(tmp_path)
    found.record(**START)
    for spans, lacks in ((0, [True, True]), (1, [False, True]), (2, [False, False])):
        if spans:
            found.record(**RECORDED | {"spans": RECORDED["spans"][:spans]})
        found.own.read()
        assert [found.lacks_tokens(7, version) for version in (0, 1)] == lacks
    found.record(**START)
    found.record(finish=7, version=0)
    found.own.read()
    with pytest.raises(Differs, match=r"task 7 of step 3 differs: call 7-0\.0 was not made"):
        found.lacks_tokens(7, 1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (call("7-0.0", [], [5, 7], failed=400), r"call 7-0\.0 has another prompt, or is new"),
        (call("7-0.1", [], failed=400), r"call 7-0\.1 has another prompt, or is new"),
        (call("7-0.0", [(0, 2, "other")]), r"call 7-0\.0 has other tokens"),
    ],
)
def test_the_first_different_call_is_named(tmp_path: Path, line: Fact, words: str) -> None:
    """The message names the call, its task and the step that consumed it."""
    write(tmp_path / FILE, *consumed(RECORDED))
    found = start(tmp_path)
    found.record(**START)
    found.record(**line)
    found.own.read()
    with pytest.raises(Differs, match=f"task 7 of step 3 differs: {words}"):
        found.lacks_tokens(7, 0)


@pytest.fixture
def repeat(tmp_path: Path) -> Iterator[Callable[..., Replay]]:
    """repeat(*facts) makes the callback of a replay with an executor and a scripted engine."""
    made: list[WorkflowExecutor] = []

    def repeat(*facts: Fact, batch_size: int = 2) -> Replay:
        write(tmp_path / FILE, *facts)
        engine = ScriptedEngine(None)
        gate = StalenessManager(engine, 100, batch_size, 4)
        made.append(WorkflowExecutor(engine, RolloutConfig(), gate))
        return start(tmp_path, batch_size, engine=engine, executor=made[-1])

    yield repeat
    for executor in made:
        executor.dispatcher.destroy()


def test_groups_start_and_are_consumed_as_recorded(repeat: Any) -> None:
    """A group starts at its recorded version, and belongs to its recorded step. What no step
    consumed is not generated: tasks 1, 3 and 4 here."""
    starts, steps = [0, 0, 0, 0, 0, 1, 1], [[2, 0], [6, 5]]
    facts: list[Fact] = [{"start": i, "version": v} for i, v in enumerate(starts)]
    facts += [{"consume": i, "version": v} for v, tasks in enumerate(steps) for i in tasks]
    found = repeat(*facts, {"pushed": 2}, {"start": 7, "version": 2})
    assert found.run.last_step == 2  # not the nine of the configuration
    data, batches = loader([{"n": n} for n in range(10)]), []
    for step in (1, 2):
        batches.append(found.run.engine.prepare_batch(data, workflow=Echo()))
        found.run.engine.set_version(step)
        found.on_step({"step": step})
    assert [batch["input_ids"][:, 0].tolist() for batch in batches] == [[3, 1], [7, 6]]
    assert [batch["group_ids"].tolist() for batch in batches] == steps
    own = found.own.read()
    assert own.starts == {0: 0, 2: 0, 5: 1, 6: 1}
    assert own.ended == {0, 2, 5, 6}
    assert (own.steps, own.version) == (dict(enumerate(steps)), 2)


def test_a_rejected_group_differs(repeat: Any) -> None:
    """The recorded run accepted every group that it consumed."""
    facts = {"start": 0, "version": 0}, {"consume": 0, "version": 0}, {"pushed": 1}
    found = repeat(*facts, batch_size=1)
    with pytest.raises(Differs, match="task 0 of step 1 differs: its group is rejected"):
        found.prepare_batch(loader([{"n": 0}]), workflow=Echo(rejects=(0,)))


def test_the_first_different_step_is_told_with_its_size(tmp_path: Path) -> None:
    """The error says which tensor differs, in how many elements, and by how much."""
    for name, change in (("one", 0.0), ("same", 0.0), ("two", 0.25)):
        (tmp_path / name / "tokens").mkdir(parents=True)
        batch = {"logprobs": torch.tensor([1.0, 2.0 + change]), "rewards": torch.ones(2)}
        save_file(batch, tmp_path / name / "tokens" / "00003.safetensors")
    compare(tmp_path / "one", tmp_path / "same", 3)
    with pytest.raises(Differs, match=r"(?s)step 3 is the first .*1 / 2.*ence: 0\.25.*logprobs"):
        compare(tmp_path / "one", tmp_path / "two", 3)


def test_another_code_or_configuration_is_refused(tmp_path: Path, monkeypatch) -> None:
    """The message names what differs. A run without a finished step has nothing to repeat."""
    words = ["--config", str(tmp_path / "config.yaml")]
    keys = load(["train_dataset.batch_size=1", "fileroot=elsewhere"])[0].model_dump(mode="json")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(keys))
    monkeypatch.setattr(replay, "facts", lambda: CODE)

    def ask(*more: str) -> None:
        check(load([*words, *more])[0], str(tmp_path))

    with pytest.raises(ConfigError, match=r"No such file.*schedule\.jsonl"):
        ask()
    write(tmp_path / FILE, START)
    with pytest.raises(ConfigError, match="lacks a finished step"):
        ask()
    (tmp_path / FILE).write_bytes(b"".join(orjson.dumps(fact) + b"\n" for fact in GOOD))
    ask("fileroot=here", "callbacks=[]", "saver.interval=3")
    with pytest.raises(ConfigError, match=r"actor\.eps_clip=0\.2 -> 0\.3"):
        ask("actor.eps_clip=0.3")
    monkeypatch.setattr(replay, "facts", lambda: CODE | {"code": "later"})
    with pytest.raises(ConfigError, match="code=c -> later"):
        ask()


# ---- whole runs

MAZE = ["--config", "maze", "gconfig.n_samples=4", "train_dataset.batch_size=4"]
MAZE += ["rollout.max_head_offpolicyness=4", "rollout.max_concurrent_rollouts=5"]
MAZE += ["callbacks=[extras.replay.Replay]", "actor.optimizer.warmup_steps=0"]


def repeat_run(folder: Path, name: str, *words: str, code: int = 0) -> tuple[Path, Any]:
    """Replay the run in {folder}/e/t; return the replay's folder and how its process ended."""
    fixed = [f"fileroot={folder}", f"experiment_name={name}"]
    recorded = ["-m", "extras.replay", str(folder / "e/t")]
    done = finish([sys.executable, "-u", *recorded, *words, *fixed], code)
    return next((folder / name).glob("*"), folder), done


def hash_of(run: Path, step: int) -> str:
    """A hash of the model that a run has saved after a step."""
    saved = run / f"checkpoints/step{step:05d}/model.safetensors"
    return hashlib.sha256(saved.read_bytes()).hexdigest()


@pytest.mark.runs
def test_a_run_with_everything_is_repeated_bit_by_bit(tmp_path: Path) -> None:
    """The run has interrupted completions and rejected groups, is killed, loses the end of its
    schedule, and goes on. A replay with --until starts no group of a later step."""
    words = [*MAZE, "max_steps=12", "recover_interval=5", "saver.interval=6"]
    run = command(tmp_path, *words, "should_accept_fn=walkers.has_signal")
    finish(signalled(run, "step 8 ", signal.SIGKILL), -signal.SIGKILL)
    recorded = tmp_path / "e/t" / FILE
    recorded.write_bytes(recorded.read_bytes()[:-9])
    finish(run)
    assert max(line["mixed_version_share"] for line in metrics_of(tmp_path)) > 0
    assert max(line["rejected"] for line in metrics_of(tmp_path)) > 0

    again, done = repeat_run(tmp_path, "again")
    assert "no batch and no model up to step 12 differs" in done.stdout
    assert hash_of(again, 12) == hash_of(tmp_path / "e/t", 12)
    part, _ = repeat_run(tmp_path, "part", "--until", "6")
    assert hash_of(part, 6) == hash_of(tmp_path / "e/t", 6)
    assert not (part / "tokens/00007.safetensors").exists()
    own = Schedule(part / FILE).read()
    assert own.starts.keys() == {task for tasks in own.steps.values() for task in tasks}
    _, refused = repeat_run(tmp_path, "other", "actor.eps_clip=0.3", code=2)
    assert "actor.eps_clip=0.2 -> 0.3" in refused.stderr


@pytest.mark.runs
def test_an_agent_that_is_not_deterministic_is_named(tmp_path: Path) -> None:
    """The agent draws the prompt of task 9 at random, and the replay says so."""
    moody = ["workflow=walkers.Moody", "workflow_kwargs.moody=9"]
    reward = "workflow_kwargs.reward_fn=tasks.maze.reward"
    finish(command(tmp_path, *MAZE, "max_steps=4", *moody, reward))
    _, done = repeat_run(tmp_path, "again", code=1)
    assert "task 9 of step 3 differs: call 9-" in done.stderr
