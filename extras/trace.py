"""Write trace.json, a Chrome trace for chrome://tracing, ui.perfetto.dev and the report.

The trace has two tracks. On "rollout" each prompt group is a bar from start to finish. Points on a
bar give the group's versions and rewards, and what became of it. On "trainer" each step is a
sequence of phases:

    rollout_wait | train | sync | log

The last phase is called "evaluate" in a step that evaluates. A point "weights" marks the end of
sync. The executor reports the groups' events as they happen. The lengths of the phases come from
the step's metrics, and the last phase gets the rest of the step's time.
"""

import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from extras import Record, read_records

TRAINER, ROLLOUT = 1, 2  # the ids of the tracks
END = b"\n]\n"
PHASES = ("rollout_wait", "train", "sync")


class Trace:
    """Writes the trace during the run. Times are microseconds since 1970.

    Each record overwrites the closing bracket and writes a new one, so a killed run leaves valid
    JSON.
    """

    def __init__(self, config: Any) -> None:
        self.path: Path = config.run_dir / "trace.json"
        self.lock = threading.Lock()  # the event loop's thread writes, too
        self.file: int | None = None
        self.is_rank_0 = False

    def on_start(self, run: Any) -> None:
        self.is_rank_0 = run.rank == 0
        if run.rank or any(
            getattr(f, "__func__", f) is Trace.on_event for f in run.executor.listeners
        ):
            return  # a Report is a Trace, too, and only one of the two may write
        earlier = read_records(self.path)
        with suppress(OSError):
            self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            self.size = os.write(self.file, b"[")  # bytes without END
        for record in earlier:
            self.write(record)
        for tid, name in ((TRAINER, "trainer"), (ROLLOUT, "rollout")):
            self.write({"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}})
        run.executor.listeners.append(self.on_event)
        if run.step:  # a run that continues has the weights of its checkpoint
            self.mark("weights", time.time(), version=run.step)

    def on_event(self, name: str, task_id: int, details: Record) -> None:
        """Write a group's event. All bars have the same name, so a viewer draws them in one
        track."""
        phase = {"start": "b", "finish": "e"}.get(name, "n")
        record = {"ph": phase, "cat": "rollout", "id": f"{os.getpid()}:{task_id}", "tid": ROLLOUT}
        args = {"task": task_id, "event": name, **details}
        self.write(record | {"name": name if phase == "n" else "group", "args": args})

    def on_step(self, metrics: Record) -> None:
        at = time.time() - metrics["step_s"]
        seconds = {name: metrics[f"{name}_s"] for name in PHASES}
        rest = "evaluate" if "eval_reward" in metrics else "log"
        seconds[rest] = metrics["step_s"] - sum(seconds.values())
        for name, duration in seconds.items():
            span = {"ph": "X", "cat": "trainer", "name": name, "tid": TRAINER}
            self.write(span | {"ts": at * 1e6, "dur": max(duration, 0.0) * 1e6})
            at += duration
            if name == "sync":
                self.mark("weights", at, version=metrics["step"])

    def on_end(self, error: BaseException | None) -> None:
        if error is not None:
            self.mark("end", time.time(), error=repr(error))
        with self.lock:
            if self.file is not None:
                os.close(self.file)
            self.file = None

    def mark(self, name: str, at: float, **args: Any) -> None:
        instant = {"ph": "i", "s": "g", "cat": "trainer", "name": name, "tid": TRAINER}
        self.write(instant | {"ts": at * 1e6, "args": args})

    def write(self, record: Record) -> None:
        record = {"pid": 1, "ts": time.time() * 1e6, **record}
        with self.lock, suppress(OSError):  # a full disk costs only the trace
            if self.file is not None:
                line = (b",\n" if self.size > 1 else b"\n") + json.dumps(record).encode()
                os.pwrite(self.file, line + END, self.size)
                self.size += len(line)
