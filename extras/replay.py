"""Record the schedule of a run, and repeat the run token by token, bit for bit.

    python -m extras.replay runs/guess/one                all steps
    python -m extras.replay runs/guess/one --until 7      the first seven

Two runs with the same seed differ, because a weight update may interrupt a completion at token 57
in one and at token 61 in the other. The rest is fixed. The seed determines the prompts. Seed, call
name and token position determine every random number. In float32 on one thread, the small server
computes the same bits for a completion, whatever else runs and however often updates interrupt it.
A training step depends only on the weights and the batch. So configuration and schedule.jsonl
determine a run:

    {"run":{"code":"c0c3d02","torch":"2.13.0","ranks":1},"step":0}     begins after step 0
    {"start":7,"version":2}                                            task 7 starts at version 2
    {"call":"7-3.1","prompt":"8da1","spans":[[2,57,"2e9c"],[3,120,"f1c4"]],"stop":"stop"}
    {"call":"7-3.2","prompt":"51bb","spans":[],"failed":503}
    {"finish":7,"version":3}                                           its episodes have ended
    {"consume":7,"version":4}                                          step 5 trains on its group
    {"pushed":5}                                                       servers have version 5

A **span** is a stretch of tokens that one version computed. In 7-3.1, call 1 of task 7's member 3,
version 2 computed tokens 1 to 57, and version 3 the next 63. At version 2, a replay starts the same
tasks as the recorded run, and waits for all tokens of version 2. The replay then trains, pushes
version 3 and continues with token 58. It generates only groups that the recorded run consumed, and
stops at the first difference. Agent and server must be deterministic. Evaluations are not recorded.
"""

import argparse
import asyncio
import hashlib
import importlib.metadata
import os
import re
import sys
from itertools import islice
from pathlib import Path
from typing import Any, Self

import orjson
from pydantic import TypeAdapter

import engine
from inference.io_struct import EngineError, ModelRequest, ModelResponse
from run.config import ROOT, ConfigError, list_keys, load

Fact = dict[str, Any]
Spans = list[tuple[int, int, str]]  # (version, end, hash of the call's first `end` tokens)
SPANS = TypeAdapter(Spans)
FILE = "schedule.jsonl"
CALL = re.compile(r"(\d+)(-\d+)?\.\d+")  # training calls; evaluations have "eval-7-3.1"
# A server repeats bits only with this backend, device, dtype and number of threads.
EXACT = ("tiny", "cpu", "float32", 1)
CLOSED = 499  # the status of a call whose agent has hung up
POLL = 0.02  # seconds between two looks at the schedule
# No token and no weight depends on these keys, so a replay may change them.
FREE = {"fileroot", "experiment_name", "trial_name", "callbacks", "saver.interval"}


class Differs(RuntimeError):
    """The replay differs from the recorded run."""

    is_verdict = True  # the message says everything: no traceback


# ---- the schedule


def digest(ids: list[int]) -> str:
    return hashlib.blake2b(str(ids).encode(), digest_size=6).hexdigest()


def spans_of(response: ModelResponse) -> Spans:
    # Versions never fall, so the last token of a version ends its span.
    ends = {version: end for end, version in enumerate(response.output_versions, 1)}
    return [(version, end, digest(response.output_tokens[:end])) for version, end in ends.items()]


def task_of(call: str) -> int | None:
    """The task of a training call, 7 for "7-3.1"; None for other calls."""
    match = CALL.fullmatch(call)
    return int(match[1]) if match else None


class Schedule:
    """The facts of a schedule.jsonl, without those that a restart has cancelled.

    A line "run" cancels steps after its `step`. A line "start" cancels its task's earlier calls.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = path
        self.size = 0  # bytes read so far
        self.runs: list[Fact] = []
        self.starts: dict[int, int] = {}  # the version at which each task started
        # the last line of each call, by task and name
        self.calls: dict[int | None, dict[str, Fact]] = {}
        self.ended: set[int] = set()  # tasks
        self.steps: dict[int, list[int]] = {}  # the tasks consumed at each version
        self.version = 0  # the newest that was pushed

    def read(self) -> Self:
        """Read the new complete lines. Raises ValueError for an invalid line."""
        with open(self.path, "rb") as file:
            file.seek(self.size)
            lines = file.read().rpartition(b"\n")[0]
        self.size += len(lines) + bool(lines)
        for line in lines.splitlines():
            try:
                self.add(orjson.loads(line))
            except (ValueError, KeyError) as error:
                raise ValueError(f"{self.path} has the wrong line {line[:100]!r}") from error
        return self

    def add(self, fact: Any) -> None:
        match fact:
            case {"run": dict(run), "step": int(step)}:
                self.runs.append(run)
                self.steps = {v: tasks for v, tasks in self.steps.items() if v < step}
                self.version = step
            case {"start": int(task), "version": int(version)}:
                self.starts[task] = version
                self.calls[task] = {}
            case {"call": str(name), "prompt": str(), "spans": spans}:
                spans = SPANS.validate_python(spans)
                self.calls[task_of(name)][name] = {**fact, "spans": spans}
            case {"finish": int(task)}:
                self.ended.add(task)
            case {"consume": int(task), "version": int(version)}:
                self.steps.setdefault(version, []).append(task)
            case {"pushed": int(version)}:
                self.version = version
            case _:
                raise ValueError

    def find(self, call: str) -> Fact:
        return self.calls.get(task_of(call), {}).get(call, {})

    def check(self, batch_size: int, eta: int) -> int:
        """Return how many steps a replay can repeat.

        Raises ValueError for an impossible step, for which a replay would wait for ever.
        """
        steps = [self.steps.get(v, []) for v in range(min(self.version, len(self.steps) + 1))]
        used = {task for step in steps for task in step}
        seen = set[int]()
        for version, step in enumerate(steps):
            seen.update(step)
            sound = len(step) == batch_size and len(seen) == batch_size * (version + 1)
            for task in step:
                start = self.starts.get(task, version + 1)
                calls = self.calls.get(task, {})
                spans = [span for call in calls.values() for span in call["spans"]]
                sound &= task < len(self.starts)  # tasks start in order
                sound &= all(0 <= start <= v <= version for v in [version, *(v for v, *_ in spans)])
            # By this version, the gate has admitted at most (eta + version + 1) B groups.
            admitted = sum(self.starts.get(task, 0) <= version for task in used)
            sound &= admitted <= (eta + version + 1) * batch_size
            if not sound:
                raise ValueError(f"{self.path} has an impossible step {version + 1}")
        return len(steps)


# ---- the engine's side, in the trainer and in the proxy


class Hooks(engine.Hooks):
    """Records training calls. In a replay, each token is generated under its recorded version.

    The trainer and the proxy append to one file. Each line is a single write, so lines never mix.
    """

    def __init__(self, schedule: str, replay: str = "") -> None:
        self.file = os.open(schedule, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self.own = Schedule(schedule)
        self.recorded = Schedule(Path(replay) / FILE if replay else os.devnull).read()

    def record(self, **fact: Any) -> None:
        os.write(self.file, orjson.dumps(fact) + b"\n")

    async def before_segment(self, req: ModelRequest, response: ModelResponse) -> int:
        """Wait until the servers have the version of the next recorded span. Return the span's end.

        Raises EngineError if the recorded call failed.
        """
        known = self.recorded.find(req.call)
        if "failed" in known:
            raise EngineError(f"call {req.call} failed in the recorded run", known["failed"])
        for version, end, _ in known.get("spans", ()):
            if response.output_len < end:
                while self.own.read().version < version:
                    await asyncio.sleep(POLL)
                return end
        return req.gconfig.max_new_tokens

    def after_segment(
        self, req: ModelRequest, response: ModelResponse, error: BaseException | None
    ) -> None:
        """Record the spans so far. If a replay has made only a part of the recorded spans, it sets
        stop_reason to "abort", so that the engine asks for the next span."""
        if task_of(req.call) is None:
            return
        fact = {"call": req.call, "prompt": digest(req.input_ids)}
        if error is not None:
            self.record(**fact, spans=[], failed=getattr(error, "status", None) or CLOSED)
            return
        known = self.recorded.find(req.call)
        made = spans_of(response)
        if known and made == known["spans"][: len(made)]:
            response.stop_reason = known["stop"] if made == known["spans"] else "abort"
        self.record(**fact, spans=made, stop=response.stop_reason)


# ---- the trainer's side


def code_digest() -> str:
    seven = "cache engine ppo proxy staleness train workflow"
    rooms = ("calls", "inference", "rollout", "training", "run", "tasks", "extras")
    files = [ROOT / f"{name}.py" for name in seven.split()]
    files += [file for room in rooms for file in (ROOT / room).rglob("*.py")]
    content = b"".join(file.read_bytes() for file in sorted(files))
    return hashlib.blake2b(content, digest_size=6).hexdigest()


def facts() -> Fact:
    """What a run depends on besides its configuration."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    return {"code": code_digest(), "torch": importlib.metadata.version("torch"), "ranks": ranks}


def bounds(config: Any) -> tuple[int, int]:
    return config.train_dataset.batch_size, config.rollout.max_head_offpolicyness


def check(config: Any, folder: str) -> None:
    """Raise ConfigError if this code cannot repeat the run in `folder` with this configuration."""
    try:
        recorded = Schedule(Path(folder) / FILE).read()
        steps = recorded.check(*bounds(config))
    except (OSError, ValueError) as error:
        raise ConfigError(f"no replay: {error}") from error
    if not steps:
        raise ConfigError(f"no replay: {folder} lacks a finished step")
    server = config.server
    if (server.backend, server.device, server.dtype, server.threads) != EXACT:
        raise ConfigError(f"no replay: only the server {'/'.join(map(str, EXACT))} repeats bits")
    then = load(["--config", f"{folder}/config.yaml"])[0]
    keys = {name: value for name, value, _ in list_keys(then)}
    now = {name: value for name, value, _ in list_keys(config)} | facts()
    differ = {
        f"{key}={value} -> {now.get(key)}"
        for run in recorded.runs
        for key, value in (keys | run).items()
        if key not in FREE and value != now.get(key)
    }
    if differ:
        raise ConfigError(f"a replay needs the same code and keys: {', '.join(sorted(differ))}")


class Replay:
    """The callback that records a run. In a replay, it also replaces the engine's `prepare_batch`.

    `replaying` is the folder of the run to repeat.
    """

    def __init__(self, config: Any, replaying: str = "", until: int | None = None) -> None:
        self.config, self.replaying, self.until = config, replaying, until

    def hooks(self, run: Any) -> Fact:
        arguments = {"schedule": str(run.run_dir / FILE), "replay": self.replaying}
        return {"extras.replay.Hooks": arguments}

    def on_start(self, run: Any) -> None:
        self.run = run
        if self.replaying:
            self.recorded = Schedule(Path(self.replaying) / FILE).read()
            steps = self.recorded.check(*bounds(self.config))
            run.last_step = min(self.until or run.last_step, steps)
        if run.rank > 0:
            return
        # Remove a last line that a kill has cut off.
        path = run.run_dir / FILE
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self.record = run.engine.hooks.record
        self.record(run=facts(), step=run.step)
        run.executor.listeners.append(self.on_event)
        if self.replaying:
            self.own = Schedule(path)
            consumed = self.recorded.steps
            self.step_of = {task: v + 1 for v in range(run.last_step) for task in consumed[v]}
            self.running: list[int] = []  # started, and not consumed
            self.samples: list[Any] = []  # of task 0, 1, ...
            run.engine.prepare_batch = self.prepare_batch

    def on_event(self, name: str, task: int, details: Fact) -> None:
        if name in ("start", "finish", "consume"):
            self.record(**{name: task}, version=self.run.engine.get_version())

    def on_step(self, metrics: Fact) -> None:
        step = metrics["step"]
        if self.run.rank == 0:
            self.record(pushed=step)
            if self.replaying:
                compare(Path(self.replaying), self.run.run_dir, step)
                if step == self.run.last_step:
                    print(
                        f"no batch and no model up to step {step} differs from {self.replaying}",
                        flush=True,
                    )

    def prepare_batch(self, dataloader: Any, **how: Any) -> Any:
        """Return the batch that the recorded run consumed at this version. Raises Differs."""
        from rollout.executor import cycle
        from rollout.trajectory import concat_padded_tensors

        executor = self.run.executor
        version = self.run.engine.get_version()
        # 1. Start the tasks that the recorded run started at this version, in the same order. Leave
        #    out tasks that no repeated step consumes.
        starts = self.recorded.starts.items()
        due = [task for task, v in starts if v == version and task in self.step_of]
        self.samples = self.samples or [*islice(cycle(dataloader), max(self.step_of) + 1)]
        for task in due:
            executor._next_id = task
            executor.submit(self.samples[task], **how)
        self.running += due

        # 2. Wait for all tokens of this version, because the next push replaces the version.
        executor.dispatcher.run(self.until_generated(version))

        # 3. Consume the groups in the recorded order.
        tasks = self.recorded.steps[version]
        groups = [executor.wait_for_task(task) for task in tasks]
        executor.dispatcher.run(self.until_generated(version))  # finds missing and new calls
        for task, group in zip(tasks, groups):
            if group is None:
                raise self.differs(task, "its group is rejected")
            self.running.remove(task)
            executor._tell("consume", task)
        return concat_padded_tensors([executor.dispatcher.state.trainable(x) for x in groups])

    async def until_generated(self, version: int) -> None:
        while any(self.lacks_tokens(task, version) for task in self.running):
            await asyncio.sleep(POLL)

    def lacks_tokens(self, task: int, version: int) -> bool:
        """Whether the task still lacks recorded tokens of versions up to `version`. Raises
        Differs."""
        recorded = self.recorded.calls[task]
        own = self.own.read().calls.get(task, {})
        lacking = False
        for name in recorded | own:
            known = recorded.get(name, {"prompt": "", "spans": []})
            made = own.get(name, known | {"spans": []})
            done = len(made["spans"])
            todo = any(v <= version for v, *_ in known["spans"][done:])
            if made["prompt"] != known["prompt"]:
                raise self.differs(task, f"call {name} has another prompt, or is new")
            if made["spans"] != known["spans"][:done]:
                raise self.differs(task, f"call {name} has other tokens")
            if todo and task in self.own.ended:
                raise self.differs(task, f"call {name} was not made")
            lacking |= todo
        return lacking

    def differs(self, task: int, why: str) -> Differs:
        whose = f"task {task} of step {self.step_of[task]}"
        return Differs(f"{whose} differs: {why}; are agent and server deterministic?")


def compare(recorded: Path, repeated: Path, step: int) -> None:
    """Raise Differs if the two runs have saved different batches or models of this step."""
    import torch
    from safetensors.torch import load_file

    for name in (f"tokens/{step:05d}.safetensors", f"checkpoints/step{step:05d}/model.safetensors"):
        paths = recorded / name, repeated / name
        if all(path.exists() for path in paths):
            before, now = map(load_file, paths)
            try:
                torch.testing.assert_close(now, before, rtol=0, atol=0, equal_nan=True)
            except AssertionError as error:
                first = f"step {step} is the first that differs, in {name}"
                raise Differs(f"{first}: {error}") from None


def main(argv: list[str]) -> Any:
    from run import start

    parser = argparse.ArgumentParser(prog="python -m extras.replay", allow_abbrev=False)
    parser.add_argument("folder", help="of the run to repeat; key=value words may follow")
    parser.add_argument("--until", type=int, metavar="N", help="stop after step N")
    options, words = parser.parse_known_args(argv)

    def make(config: Any, force: bool) -> start.Run:
        check(config, options.folder)
        config.callbacks = [name for name in config.callbacks if name != "extras.replay.Replay"]
        config.recover_interval = 0  # a replay is never resumed
        run = start.Run(config)
        run.callbacks.append(Replay(config, options.folder, options.until))
        return run

    recipe = f"{options.folder}/config.yaml"
    run = start.begin(["--config", recipe, "trial_name=auto", *words], make)
    from train import train_or_evaluate

    return start.main(run, train_or_evaluate)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
