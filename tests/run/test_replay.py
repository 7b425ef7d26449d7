"""Tests of the schedule and of replays: what a schedule records, how a replay follows a schedule, and which differences
a replay finds.

The first tests check the record, the engine and the comparison. The last tests record and replay whole runs.
"""

import asyncio
import hashlib
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest
import torch
from conftest import ROOT
from runs import WITH_TEST_MODULES, signalled
from safetensors.torch import save_file

from inference.io_struct import GenerationHyperparameters, ModelRequest, ModelResponse
from inference.wire import EngineError
from run import replay
from run.load import ConfigError, load
from run.replay import Differs, ReplayExecutor, check_replay, compare
from run.schedule import FILE, Schedule, ScheduledEngine, digest, spans_of

PROMPT = [5, 6]
CODE = {"revision": "r", "torch": "t", "ranks": 1}


def call(name: str, spans: list[Any], prompt: list[int] = PROMPT, **more: Any) -> dict[str, Any]:
    """Return the line that a schedule has for a call."""
    return {"call": name, "prompt": digest(prompt), "spans": spans, **more}


def write(path: Path, *facts: dict[str, Any]) -> Path:
    """Write a schedule with one line for each of `facts`, and return the schedule's path."""
    path.write_bytes(
        b"".join(orjson.dumps(fact) + b"\n" for fact in ({"run": CODE, "step": 0}, *facts))
    )
    return path


# ---- the record


def test_a_call_is_recorded_as_spans() -> None:
    """A schedule records a completion as one span for each version of its tokens. The hash of a span covers all tokens
    up to the end of the span."""
    response = ModelResponse(PROMPT, [7, 8, 9], [-1.0] * 3, [2, 2, 3], "length")
    assert spans_of(response) == [[2, 2, digest([7, 8])], [3, 3, digest([7, 8, 9])]]
    assert digest([7, 8]) != digest([7, 9])


def test_a_restart_cancels_what_was_lost(tmp_path: Path) -> None:
    """When a run continues from a checkpoint, the schedule gets a line "run", which cancels the steps after this
    checkpoint. A line "start" cancels the earlier calls of the task that it names."""
    first: list[dict[str, Any]] = [{"start": task, "version": 0} for task in range(4)]
    first += [call(f"{task}-0.0", []) for task in range(4)]
    steps = [
        {"consume": 0, "version": 0},
        {"consume": 2, "version": 1},
        {"consume": 3, "version": 2},
    ]
    again: list[dict[str, Any]] = [
        {"run": CODE, "step": 1},
        {"start": 3, "version": 1},
        call("3-0.0", [[1, 4, "t"]]),
    ]
    last = [{"consume": 2, "version": 1}, {"consume": 3, "version": 2}]
    schedule = Schedule(write(tmp_path / FILE, *first, *steps, *again, *last)).read()
    assert schedule.steps == {0: [0], 1: [2], 2: [3]}
    assert schedule.starts == {0: 0, 1: 0, 2: 0, 3: 1}
    assert schedule.calls[3] == {"3-0.0": call("3-0.0", [[1, 4, "t"]])}
    assert schedule.runs == [CODE, CODE]
    schedule.cut(1)  # a replay that ends after step 1 also calls `cut(1)`
    assert schedule.steps == {0: [0]}


def test_an_incomplete_line_is_read_later(tmp_path: Path) -> None:
    """The method `read` skips an incomplete last line. After the rest of an incomplete line has been written, the next
    call of `read` reads the line. No call of `read` reads a line that an earlier call has read."""
    path = write(tmp_path / FILE, {"consume": 4, "version": 0})
    with path.open("ab", buffering=0) as file:
        file.write(b'{"consume":5,"ver')
        schedule = Schedule(path).read()
        assert schedule.steps == {0: [4]}
        file.write(b'sion":0}\n')
    assert schedule.read().read().steps == {0: [4, 5]}


@pytest.mark.parametrize("cut", [0, 1, 9, 10**6])
def test_a_continued_run_cuts_an_incomplete_line(tmp_path: Path, cut: int) -> None:
    """After a kill or on a full disk, the last line of the schedule may be incomplete. When the run continues, it
    removes the incomplete line and keeps all complete lines."""
    path = write(tmp_path / FILE, {"consume": 4, "version": 0}, {"consume": 5, "version": 1})
    content = path.read_bytes()
    path.write_bytes(content[: max(0, len(content) - cut)])
    ScheduledEngine(["http://a"], schedule=path).record_run(CODE, 1)
    schedule = Schedule(path).read()
    assert schedule.runs == [CODE, CODE][cut == 10**6 :]
    assert schedule.steps == ({} if cut == 10**6 else {0: [4]})


# ---- the engine


class Servers:
    """Simulated servers. The token at position p has the id 10 * version + p, and a completion ends only at
    max_new_tokens."""

    def __init__(self) -> None:
        self.version, self.asked = (
            0,
            list[tuple[int, int]](),
        )  # (version, number of tokens) of each request

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = orjson.loads(request.content)
        start, n = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        self.asked.append((self.version, n))
        ids = [10 * self.version + position for position in range(start, start + n)]
        meta: dict[str, Any] = {
            "finish_reason": {"type": "length"},
            "weight_version": str(self.version),
        }
        meta["output_token_logprobs"] = [[-1.0, token, None] for token in ids]
        return httpx.Response(200, json={"output_ids": ids, "meta_info": meta})


@pytest.fixture
def follow(tmp_path: Path) -> Callable[..., tuple[ScheduledEngine, Servers]]:
    """Return a function make(*facts) that makes an engine and its servers. The engine follows a schedule with one line
    for each of `facts`."""

    def make(*facts: dict[str, Any]) -> tuple[ScheduledEngine, Servers]:
        write(tmp_path / FILE, {"start": 7, "version": 0}, *facts)
        servers = Servers()
        own, network = (
            write(tmp_path / "own.jsonl", {"start": 7, "version": 0}),
            httpx.MockTransport(servers),
        )
        engine = ScheduledEngine(
            ["http://a"], transport=network, schedule=own, replay=str(tmp_path)
        )
        engine.servers.limit = 0
        return engine, servers

    return make


def request(name: str = "7-0.0", ids: list[int] = PROMPT) -> ModelRequest:
    return ModelRequest(
        list(ids), gconfig=GenerationHyperparameters(max_new_tokens=50, seed=1), call=name
    )


TOKENS = [2, 3, 14, 15, 16]
RECORDED = call("7-0.0", [[0, 2, digest(TOKENS[:2])], [1, 5, digest(TOKENS)]], stop="stop")


@pytest.mark.anyio
async def test_each_span_waits_for_its_version(follow: Any) -> None:
    """In a replay, the engine requests the tokens of a span only when the servers have the span's version, and records
    each span."""
    engine, servers = follow(RECORDED)
    running = asyncio.ensure_future(engine.agenerate(request()))
    own = Schedule(engine.schedule)
    while not own.read().calls[7]:
        await asyncio.sleep(0.001)
    assert own.calls[7]["7-0.0"]["spans"] == RECORDED["spans"][:1]
    assert servers.asked == [(0, 2)]
    servers.version = engine.servers.limit = 1
    response = await running
    assert servers.asked == [(0, 2), (1, 3)]
    assert (response.output_tokens, response.output_versions) == (TOKENS, [0, 0, 1, 1, 1])
    assert (response.stop_reason, response.input_tokens) == ("stop", PROMPT)
    assert own.read().calls[7]["7-0.0"] == RECORDED


@pytest.mark.anyio
async def test_after_other_tokens_a_task_is_free(follow: Any) -> None:
    """If the server generates other tokens than in the recorded run, the replay generates the later calls of the same
    task without the recorded schedule."""
    engine, _ = follow(call("7-0.0", [[0, 2, "other"]], stop="stop"))
    await engine.agenerate(request())
    assert (await engine.agenerate(request("7-0.1", [9]))).output_len == 50


@pytest.mark.anyio
@pytest.mark.parametrize(("name", "ids"), [("7-0.0", [5, 7]), ("7-0.1", PROMPT)])
async def test_another_call_is_refused_and_recorded(follow: Any, name: str, ids: list[int]) -> None:
    """A replay refuses a call with status 400 if the call's prompt differs from the recorded prompt, or if the recorded
    run did not make the call."""
    engine, servers = follow(RECORDED)
    with pytest.raises(EngineError, match=name) as refused:
        await engine.agenerate(request(name, ids))
    assert (refused.value.status, servers.asked) == (400, [])
    assert Schedule(engine.schedule).read().calls[7][name]["prompt"] == digest(ids)


@pytest.mark.anyio
async def test_a_failed_call_fails_again(follow: Any) -> None:
    """If a call failed in the recorded run, it also fails in the replay, with the same status, so the agent reacts in
    the same way."""
    engine, servers = follow(call("7-0.0", [], failed=503))
    with pytest.raises(EngineError) as failed:
        await engine.agenerate(request())
    assert (failed.value.status, servers.asked) == (503, [])


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["eval-7-0.0", "7b.0", ".0", ""])
async def test_only_training_is_recorded(follow: Any, name: str) -> None:
    """In a replay, calls of evaluations do not follow the recorded schedule and get no line in the new schedule. If the
    name of a session contains no task number, the session's calls are treated like calls of evaluations."""
    engine, _ = follow(RECORDED)
    before = engine.schedule.read_bytes()
    assert (await engine.agenerate(request(name))).output_len == 50
    assert engine.schedule.read_bytes() == before


@pytest.mark.anyio
async def test_a_task_without_a_group_is_recorded(follow: Any) -> None:
    """If a prompt has only one episode, the names of its calls contain no member number. For example, "7.0" is call 0
    of task 7."""
    engine, _ = follow(call("7.0", [], failed=503))
    with pytest.raises(EngineError):
        await engine.agenerate(request("7.0"))
    assert Schedule(engine.schedule).read().calls[7]["7.0"]["failed"] == 503


# ---- the comparison


def executor(tmp_path: Path, *own: dict[str, Any]) -> ReplayExecutor:
    """Return the executor of a replay. The recorded schedule has one call of task 7, and step 3 consumed task 7. The
    replay's own schedule has the start of task 7 and then the lines of the argument `own`."""
    recorded = write(
        tmp_path / FILE, {"start": 7, "version": 0}, RECORDED, {"consume": 7, "version": 2}
    )
    made = object.__new__(ReplayExecutor)
    made.recorded, made.step_of = Schedule(recorded).read(), {7: 3}
    made.own = Schedule(write(tmp_path / "own.jsonl", {"start": 7, "version": 0}, *own)).read()
    return made


def test_a_version_is_over_when_its_tokens_are_there(tmp_path: Path) -> None:
    """`missing_calls` lists a call if the call lacks recorded tokens of the given version or of an older version.
    `missing_calls` ignores missing tokens of later versions."""
    assert executor(tmp_path).missing_calls(7, 0) == ["7-0.0"]
    half = executor(tmp_path, call("7-0.0", RECORDED["spans"][:1]))
    assert (half.missing_calls(7, 0), half.missing_calls(7, 1)) == ([], ["7-0.0"])
    assert executor(tmp_path, RECORDED).missing_calls(7, 1) == []


@pytest.mark.parametrize(
    "line", [call("7-0.0", [], [5, 7], failed=400), call("7-0.1", [], failed=400)]
)
def test_the_first_different_call_is_named(tmp_path: Path, line: dict[str, Any]) -> None:
    """The message about a nondeterministic agent names the call, its task and the step that consumed the task."""
    with pytest.raises(
        Differs, match=f"task 7 of step 3 differs: call {line['call']} has another prompt"
    ):
        executor(tmp_path, line).missing_calls(7, 0)


def test_other_tokens_end_no_replay(tmp_path: Path) -> None:
    """If a call has the recorded prompt but other tokens, the server is not deterministic. After a call with other
    tokens, the replay generates the rest of the call's task without the recorded schedule, and `compare` reports the
    step that consumes the task."""
    assert executor(tmp_path, call("7-0.0", [[0, 2, "other"]])).missing_calls(7, 5) == []


def test_the_first_different_step_is_told_with_its_size(tmp_path: Path) -> None:
    """`compare` accepts equal tensors. For unequal tensors, the error says which tensor differs, in how many elements,
    and by how much."""
    for name, change in (("one", 0.0), ("same", 0.0), ("two", 0.25)):
        (tmp_path / name / "tokens").mkdir(parents=True)
        batch = {"logprobs": torch.tensor([1.0, 2.0 + change]), "rewards": torch.ones(2)}
        save_file(batch, tmp_path / name / "tokens" / "00003.safetensors")
    config = SimpleNamespace(
        replay=str(tmp_path / "one"), run_dir=tmp_path / "same", replay_until=9
    )
    compare(config, 3)  # type: ignore[arg-type]
    config.run_dir = tmp_path / "two"
    with pytest.raises(
        Differs, match=r"(?s)step 3 is the first .*1 / 2.*difference: 0\.25.*logprobs"
    ):
        compare(config, 3)  # type: ignore[arg-type]


def test_another_code_or_configuration_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay needs the code revision and the configuration keys of the recorded run. A run without a finished step
    cannot be replayed. The error message names the revision or the keys that differ."""
    (tmp_path / "config.yaml").write_text(
        "actor: {eps_clip: 0.2}\ntrain_dataset: {batch_size: 1}\ngconfig: {n_samples: 2}\nrevision: r\n"
    )
    monkeypatch.setattr(replay, "facts", lambda: CODE)
    words = ["--replay", str(tmp_path)]
    with pytest.raises(ConfigError, match="needs a finished step"):
        check_replay(load(words))
    write(tmp_path / FILE, {"start": 7, "version": 0}, RECORDED, {"consume": 7, "version": 0})
    config = load([*words, "--replay-until", "7", "logger.live=false", "--quiet", "--dry-run"])
    check_replay(config)
    assert config.replay_until == 1
    with pytest.raises(ConfigError, match=r"actor\.eps_clip=0\.2 -> 0\.3"):
        check_replay(load([*words, "actor.eps_clip=0.3"]))
    monkeypatch.setattr(replay, "facts", lambda: {**CODE, "revision": "later"})
    with pytest.raises(ConfigError, match="revision=r -> later"):
        check_replay(load(words))


# ---- whole runs

MAZE = ["--config", "configs/maze.yaml", "gconfig.n_samples=4", "train_dataset.batch_size=4"]
MAZE += ["rollout.max_head_offpolicyness=4", "rollout.max_concurrent_rollouts=5"]


def train(folder: Path, *words: str, dies_at: str = "") -> subprocess.CompletedProcess[str]:
    """Run train.py to its end, or until it prints a line that begins with `dies_at`."""
    fixed = [f"fileroot={folder}", "experiment_name=e", "logger.live=false"]
    command = [sys.executable, "-u", "train.py", *words, *fixed]
    command = signalled(command, dies_at, signal.SIGKILL) if dies_at else command
    return subprocess.run(
        command, cwd=ROOT, env=WITH_TEST_MODULES, capture_output=True, text=True, timeout=900
    )


def hash_of(run: Path, step: int) -> str:
    """Return a hash of the model that a run has saved after a step."""
    return hashlib.sha256(
        (run / f"checkpoints/step{step:05d}/model.safetensors").read_bytes()
    ).hexdigest()


@pytest.mark.runs
def test_a_run_with_everything_is_repeated_bit_by_bit(tmp_path: Path) -> None:
    """The recorded run has eta = 4, interrupted completions and rejected groups. The recorded run is killed, loses the
    end of its schedule, and continues. The replay is not killed. The replay's batches and models are equal to the
    batches and models of the recorded run. A replay with --replay-until ends earlier and starts no group of a later
    step. A replay with another configuration is refused."""
    words = [*MAZE, "trial_name=t", "max_steps=12", "recover_interval=5", "saver.interval=6"]
    words += ["should_accept_fn=walkers.has_signal"]
    assert train(tmp_path, *words, dies_at="step 8 ").returncode == -signal.SIGKILL
    recorded = tmp_path / "e/t" / FILE
    recorded.write_bytes(recorded.read_bytes()[:-9])
    done = train(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    metrics = [
        orjson.loads(line) for line in (tmp_path / "e/t/metrics.jsonl").read_text().splitlines()
    ]
    assert max(line["mixed_version_share"] for line in metrics) > 0
    assert max(line["rejected"] for line in metrics) > 0

    done = train(tmp_path, "--replay", str(tmp_path / "e/t"), "trial_name=again")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "no batch and no model up to step 12 differs" in done.stdout
    assert hash_of(tmp_path / "e/again", 12) == hash_of(tmp_path / "e/t", 12)
    done = train(
        tmp_path, "--replay", str(tmp_path / "e/t"), "--replay-until", "6", "trial_name=part"
    )
    assert done.returncode == 0, done.stderr
    assert hash_of(tmp_path / "e/part", 6) == hash_of(tmp_path / "e/t", 6)
    assert not (tmp_path / "e/part/tokens/00007.safetensors").exists()
    part = Schedule(tmp_path / "e/part" / FILE).read()
    assert part.starts.keys() == {task for tasks in part.steps.values() for task in tasks}, (
        "a later group started"
    )
    done = train(tmp_path, "--replay", str(tmp_path / "e/t"), "actor.eps_clip=0.3")
    assert done.returncode == 2
    assert "actor.eps_clip=0.2 -> 0.3" in done.stderr


@pytest.mark.runs
def test_an_agent_that_is_not_deterministic_is_named(tmp_path: Path) -> None:
    """In this test, the agent draws the prompt of task 9 at random. The replay ends with an error that names a call of
    task 9 and the step that consumed the task."""
    words = [
        *MAZE,
        "trial_name=t",
        "max_steps=4",
        "workflow=walkers.Moody",
        "workflow_kwargs.moody=9",
    ]
    done = train(tmp_path, *words, "workflow_kwargs.reward_fn=tasks.maze.reward")
    assert done.returncode == 0, done.stderr
    done = train(tmp_path, "--replay", str(tmp_path / "e/t"), "trial_name=again")
    assert done.returncode == 1
    assert "task 9 of step 3 differs: call 9-" in done.stderr
