"""Record the schedule of a run: which policy version computed which tokens, and which step consumed which prompt group.

**Why an asynchronous run can be repeated.** Two runs with the same configuration and the same seed have different
results, because events happen at different times in the two runs. For example, a weight update interrupts a completion
at token 57 in one run, and at token 61 in the other run. The following four parts of a run do not depend on the times
of events:

(1) The seed determines the order of the prompts, and therefore the prompt of each task number (DataCursor in
rollout/executor.py).
(2) The seed of a call is a hash of the run's seed, the episode and the number of the call (`call_seed`). The random
number that chooses a token is a hash of the call's seed and of the token's position. No random number depends on time.
(3) The small server computes the same bits for a row, whatever other rows are in the batch ("Bits" in
inference/tiny/model.py). After a weight update the small server recomputes all keys and values of its cache. An
interrupted completion has the same bits as a completion that an engine requests in two parts.
(4) A training step is a function of the weights and of the batch.

Apart from its schedule, a run is deterministic. A run writes its schedule to schedule.jsonl, one fact in each line,
with about 200 bytes for each call:

    {"run":{"revision":"c0c3d02","torch":"2.13.0","ranks":1},"step":0}      the run begins after step 0
    {"start":7,"version":2}                                                 task 7 starts at version 2
    {"call":"7-3.1","prompt":"8da1","spans":[[2,57,"2e9c"],[3,120,"f1c4"]],"stop":"stop"}
    {"call":"7-3.2","prompt":"51bb","spans":[],"failed":503}                the call failed with status 503
    {"finish":7,"version":3}                                                all episodes of task 7 have ended
    {"consume":7,"version":4}                                               step 5 consumes the group of task 7

The name "7-3.1" stands for call 1 of member 3 of task 7. A **span** consists of consecutive tokens of a completion, all
of which one version computed. For each span, the schedule records the version, the end, and a hash of the completion's
tokens up to the end. In call "7-3.1", version 2 computed the first 57 tokens, and version 3 computed the next 63
tokens.

**Restarts.** When a killed run continues after step 40, it writes a new line "run" with "step":40. The new line "run"
cancels all earlier lines "consume" of steps above 40. After a line "start", the earlier calls of its task do not count.
Without the cancelled lines, the schedule describes a run that was never interrupted.

**Who writes.** The trainer and the proxies append to the same file. A process writes each line with one system call, so
lines of different processes never mix. The trainer and each proxy have a `ScheduledEngine`, which records each call. In
a replay (replay.py) the engine requests the tokens of a span when the servers have the span's version.
"""

import asyncio
import hashlib
import os
import re
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from engine import OnTokens, RemoteInfEngine
from inference.io_struct import ModelRequest, ModelResponse
from inference.wire import EngineError

Fact = dict[str, Any]
FILE = "schedule.jsonl"
EVENTS = ("start", "finish", "consume")  # the events of a task in a schedule
TRAINING_CALL = re.compile(
    r"(\d+)(-\d+)?\.\d+"
)  # "7.1" is call 1 of task 7; "7-3.1" is call 1 of member 3 of task 7
GONE = 499  # the recorded status of a call whose client closed the connection
POLL = 0.02  # seconds between two checks whether the version or the schedule has changed


def digest(ids: list[int]) -> str:
    """Return a hash of token ids, as 12 hexadecimal digits."""
    return hashlib.blake2b(str(ids).encode(), digest_size=6).hexdigest()


def spans_of(response: ModelResponse) -> list[list[Any]]:
    """Return the spans of a completion. For each span, return [version, end, hash of the completion's tokens before
    index `end`]."""
    ends = {
        version: k + 1 for k, version in enumerate(response.output_versions)
    }  # versions never fall
    return [[version, end, digest(response.output_tokens[:end])] for version, end in ends.items()]


def task_of(call: str) -> int:
    """Return the task number of a training call: 7 for the call "7-3.1"."""
    return int(re.split(r"[-.]", call)[0])


@dataclass
class Schedule:
    """The facts of a schedule, without the facts that a restart has cancelled."""

    path: Path | str
    size: int = 0  # number of bytes that `read` has read
    runs: list[Fact] = field(
        default_factory=list
    )  # each start of the run: code revision, torch version, ranks
    starts: dict[int, int] = field(
        default_factory=dict
    )  # for each task, the version at which it started
    calls: dict[int, dict[str, Fact]] = field(
        default_factory=dict
    )  # for each task and call, the call's recorded line
    ended: set[int] = field(default_factory=set)  # the tasks whose episodes have ended
    steps: dict[int, list[int]] = field(
        default_factory=dict
    )  # for each version v, the tasks that step v + 1 consumed

    def read(self) -> "Schedule":
        """Add the facts of all lines that were written since `read` was last called. Return this object."""
        with open(self.path, "rb") as file:
            file.seek(self.size)
            lines = file.read().rpartition(b"\n")[
                0
            ]  # a later call of `read` reads a last line that is incomplete now
        self.size += len(lines) + bool(lines)
        for fact in map(orjson.loads, lines.splitlines()):
            match fact:
                case {"run": run, "step": step}:
                    self.runs.append(run)
                    self.cut(step)
                case {"start": task, "version": version}:
                    self.starts[task], self.calls[task] = version, {}
                case {"call": call}:
                    self.calls[task_of(call)][call] = fact
                case {"finish": task}:
                    self.ended.add(task)
                case {"consume": task, "version": version}:
                    self.steps.setdefault(version, []).append(task)
        return self

    def cut(self, step: int) -> None:
        """Forget all steps after step `step`."""
        self.steps = {version: tasks for version, tasks in self.steps.items() if version < step}


@dataclass(eq=False)
class ScheduledEngine(RemoteInfEngine):
    """An engine that records the calls of training episodes. In a replay this engine generates each call with the
    recorded versions."""

    schedule: Path | str = os.devnull  # the file to which the engine appends the schedule
    replay: str = ""  # folder of the run to repeat

    def __post_init__(self) -> None:
        super().__post_init__()
        # The schedule's file stays open as long as the engine exists, so that a call needs no free file descriptor.
        self._file = os.open(self.schedule, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        weakref.finalize(self, os.close, self._file)
        self.recorded = Schedule(Path(self.replay) / FILE if self.replay else os.devnull).read()

    def record(self, **fact: Any) -> None:
        """Append one fact to the schedule."""
        os.write(self._file, orjson.dumps(fact) + b"\n")

    def record_run(self, run: Fact, step: int) -> None:
        """Record that the run begins after step `step`. Call this method before any other process writes to the
        schedule.

        If a kill has left the last line incomplete, the method removes this line, so that the next fact starts a new
        line. A checkpoint is written only after all facts on which it depends. The incomplete line is newer than the
        checkpoint, so the continued run does not need the line. The continued run generates all unfinished groups
        again.
        """
        os.truncate(self.schedule, Path(self.schedule).read_bytes().rfind(b"\n") + 1)
        self.record(run=run, step=step)

    def recorded_call(self, name: str) -> Fact | None:
        """Return the recorded line of a call, {} if the call has no line, or None if the call's task is not in the
        schedule."""
        calls = self.recorded.calls.get(task_of(name)) if name else None
        return None if calls is None else calls.get(name, {})

    async def agenerate(
        self, req: ModelRequest, on_tokens: OnTokens | None = None
    ) -> ModelResponse:
        """Generate a completion. In a replay, refuse a call that the recorded run did not make with this prompt.

        If a call failed in the recorded run, the call fails again in the replay, with the same status.
        """
        # Only calls of training are recorded. A replay repeats the calls of an evaluation without a record, because no
        # weight update interrupts these calls.
        if not TRAINING_CALL.fullmatch(req.call):
            return await super().agenerate(replace(req, call=""), on_tokens)
        prompt, known = digest(req.input_ids), self.recorded_call(req.call)
        try:
            if known is not None and ("failed" in known or known.get("prompt") != prompt):
                raise EngineError(
                    f"call {req.call} failed in the recorded run, or differs",
                    known.get("failed", 400),
                )
            return await super().agenerate(req, on_tokens)
        except BaseException as error:
            self.record(
                call=req.call, prompt=prompt, spans=[], failed=getattr(error, "status", GONE)
            )
            raise

    async def _generate_segment(
        self,
        server: str,
        rid: str,
        req: ModelRequest,
        response: ModelResponse,
        on_tokens: OnTokens | None,
    ) -> None:
        """Generate one segment, and record the spans of the completion so far.

        In a replay, wait until the servers have the version of the next recorded span, and then generate this span.
        """
        known = self.recorded_call(req.call)
        if known:
            version, end, _ = next(span for span in known["spans"] if response.output_len < span[1])
            while self.servers.limit < version:
                await asyncio.sleep(POLL)
            req = replace(req, gconfig=req.gconfig.new(max_new_tokens=end))
        await super()._generate_segment(server, rid, req, response, on_tokens)
        made = spans_of(response)
        # The stop reason "abort" makes agenerate request the next span.
        if known and made == known["spans"][: len(made)]:
            response.stop_reason = known["stop"] if made == known["spans"] else "abort"
        # If the new tokens differ from the recorded tokens, the rest of the task is generated without the schedule.
        elif known:
            self.recorded.calls.pop(task_of(req.call), None)
        if req.call:
            self.record(
                call=req.call, prompt=digest(req.input_ids), spans=made, stop=response.stop_reason
            )
