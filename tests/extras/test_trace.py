"""trace.json says, at every moment, what became of every group and what the trainer did."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from extras.report import Report, read_timeline
from extras.trace import Trace


def start(
    kind: type[Trace], folder: Path, rank: int = 0, listeners: Any = (), step: int = 0
) -> tuple[Trace, Any]:
    """Return a started trace of the run in `folder`, and the run."""
    trace = kind(SimpleNamespace(run_dir=folder))
    run = SimpleNamespace(rank=rank, step=step, executor=SimpleNamespace(listeners=[*listeners]))
    trace.on_start(run)
    return trace, run


def read(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "trace.json").read_text())


SECONDS = {"step_s": 10.0, "rollout_wait_s": 3.0, "train_s": 4.0, "sync_s": 2.0}


def test_the_trace_is_json_after_every_record(tmp_path: Path) -> None:
    """A killed run leaves a trace that a viewer opens."""
    _, run = start(Trace, tmp_path)
    [listener] = run.executor.listeners
    for task in range(3):
        listener("start", task, {})
        assert read(tmp_path)[-1]["args"] == {"task": task, "event": "start"}
    listener("reward", 0, {"versions": [3, 4], "rewards": [1.0]})
    listener("finish", 0, {})
    *_, reward, finish = read(tmp_path)
    assert reward["args"] == {"task": 0, "event": "reward", "versions": [3, 4], "rewards": [1.0]}
    assert (reward["ph"], finish["ph"], finish["name"]) == ("n", "e", "group")
    assert {record["tid"] for record in read(tmp_path)} == {1, 2}, "two tracks"


def test_a_step_is_a_row_of_phases(tmp_path: Path) -> None:
    """The phases lie end to end and fill the step; the weights arrive at the end of the push."""
    trace, _ = start(Trace, tmp_path)
    trace.on_step({"step": 4, **SECONDS})
    trace.on_step({"step": 5, **SECONDS, "eval_reward": None})
    records = [record for record in read(tmp_path) if record["ph"] != "M"]
    names = ["rollout_wait", "train", "sync", "weights", "log"]
    assert [record["name"] for record in records] == [*names, *names[:-1], "evaluate"]
    wait, train, sync, weights, log = records[:5]
    for phase, after in ((wait, train), (train, sync), (sync, log), (sync, weights)):
        assert phase["ts"] + phase["dur"] == pytest.approx(after["ts"], abs=10)
    assert sum(phase["dur"] for phase in (wait, train, sync, log)) == pytest.approx(10e6)
    assert weights["args"] == {"version": 4}


def test_a_restart_ends_what_the_kill_interrupted(tmp_path: Path) -> None:
    """Lost groups end with their process, the server has the checkpoint's version, and the run has
    not "ended early"."""
    first, _ = start(Trace, tmp_path)
    first.on_event("start", 7, {})
    first.on_end(KeyboardInterrupt())
    start(Trace, tmp_path, step=3)
    found = read_timeline(read(tmp_path))
    assert found["groups"][0]["end"] < found["weights"][0][0]
    assert (found["end"], found["weights"][0][1]) == ("", 3)


def test_a_failure_is_the_last_record(tmp_path: Path) -> None:
    """The trace says why a run ended. Events after the end are ignored."""
    trace, run = start(Trace, tmp_path)
    trace.on_end(ValueError("no"))
    run.executor.listeners[0]("start", 0, {})
    assert read(tmp_path)[-1]["args"] == {"error": "ValueError('no')"}


def test_a_continued_run_keeps_its_earlier_records(tmp_path: Path) -> None:
    """A cut line is left out, and the trace is valid JSON again."""
    trace, _ = start(Trace, tmp_path)
    trace.on_step({"step": 1, **SECONDS})
    path = tmp_path / "trace.json"
    path.write_bytes(path.read_bytes()[:-20])
    start(Trace, tmp_path)
    names = [record["name"] for record in read(tmp_path)]
    assert names == ["thread_name"] * 2 + ["rollout_wait", "train", "sync", "weights"] + names[-2:]
    assert names[-2:] == ["thread_name"] * 2


def test_only_the_first_rank_and_the_first_trace_write(tmp_path: Path) -> None:
    """A report traces the run as well, so one of the two must leave the file alone."""
    start(Trace, tmp_path, rank=1)
    assert not (tmp_path / "trace.json").exists()
    _, run = start(Report, tmp_path)
    second, run = start(Trace, tmp_path, listeners=run.executor.listeners)
    second.on_step({"step": 1, **SECONDS})
    assert len(run.executor.listeners) == 1
    assert len(read(tmp_path)) == 2


def test_a_pipe_in_the_place_of_the_trace_stops_nothing(tmp_path: Path) -> None:
    """What is for display never stops training."""
    os.mkfifo(tmp_path / "trace.json")
    trace, run = start(Trace, tmp_path)
    run.executor.listeners[0]("start", 0, {})
    trace.on_end(None)
