"""Helpers for tests of whole runs: start train.py as a user does, and look at its processes."""

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

SMALL_GUESS = ["--config", "demo", "gconfig.n_samples=4", "callbacks=[]"]
STRADDLING_MAZE = [  # the maze with a workflow whose completions every weight update interrupts
    *("--config", "maze", "workflow=walkers.WalkUntilUpdated", "callbacks=[]"),
    *("workflow_kwargs.batch_size=8", "workflow_kwargs.reward_fn=tasks.maze.reward"),
]
WITH_TEST_MODULES = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}  # finds walkers.py


def command(folder: Path, *words: str) -> list[str]:
    """The command that runs train.py in the run folder {folder}/e/t."""
    fixed = [f"fileroot={folder}", "experiment_name=e", "trial_name=t"]
    return [sys.executable, "-u", "train.py", *words, *fixed]


def signalled(command: list[str], line: str, number: signal.Signals) -> list[str]:
    """A run's command, with one addition: when the run prints a line that begins with `line`, it
    sends itself the signal."""
    python, unbuffered, *script = command
    return [python, unbuffered, "tests/signalled.py", line, str(int(number)), *script]


def finish(command: list[str], code: int = 0, env: Any = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with the tests' modules importable, and check its exit code."""
    options: Any = {"cwd": ROOT, "env": env or WITH_TEST_MODULES, "timeout": 600}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def begin(command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    """Start a command, with its output and errors in one pipe."""
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=env, **streams)


def metrics_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "e/t/metrics.jsonl").read_text().splitlines()]


def run(folder: Path, *words: str) -> list[dict]:
    """Run train.py to its end and return the lines of its metrics.jsonl."""
    finish(command(folder, *words))
    return metrics_of(folder)


def start_until_step(folder: Path, *words: str) -> tuple[subprocess.Popen[str], dict[str, int]]:
    """Start a run and wait for its first step. Return its process and {module: pid} of its
    children.

    The run stops itself after that step (SIGSTOP), so that its children are seen while it lives.
    """
    held = signalled(command(folder, *words), "step 1 ", signal.SIGSTOP)
    process: Any = begin(held, WITH_TEST_MODULES)
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("step 1 "):
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), "the run ended after its first step"
            pids = children(process.pid)
            process.send_signal(signal.SIGCONT)
            return process, pids
    pytest.fail("the run ended before its first step:\n" + "".join(seen))


def children(pid: int) -> dict[str, int]:
    """{module or command: pid} of the children of a process."""
    words = ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="]
    table = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = {}
    for child, parent, args in (line.split(None, 2) for line in table.splitlines()):
        if int(parent) == pid:
            modules = (m for m in ("inference.tiny.server", "proxy") if f"-m {m} " in args)
            found[next(modules, args)] = int(child)
    return found


def assert_gone(pids: dict[str, int]) -> None:
    for name, pid in pids.items():
        with suppress(ProcessLookupError):
            os.kill(pid, 0)
            pytest.fail(f"{name} ({pid}) is still there")


def wait_gone(pid: int) -> None:
    """Wait for the end of a process that is no child of this one: its pidfd becomes readable."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([handle], [], [], 20)[0], f"{pid} is still there"
    os.close(handle)


NAMES = {
    *("step", "version", "reward", "success", "loss", "staleness_mean", "staleness_max"),
    *("lag_counts", "mixed_version_share", "accepted", "rejected", "failed", "dropped"),
    *("truncated", "entropy", "kl", "clip_frac", "behave_weight_mean", "grad_norm"),
    *("logp_mismatch", "tokens", "step_s", "rollout_wait_s", "train_s", "sync_s", "wall_s"),
}


def check_metrics(metrics: list[dict], eta: int) -> None:
    """No metric is missing, no token is older than eta versions, and no episode failed."""
    for step, line in enumerate(metrics, start=1):
        assert line.keys() >= NAMES
        assert (line["step"], line["version"]) == (step, step - 1)
        assert line["tokens"] > 0
        assert 0 <= line["staleness_max"] <= eta
        assert line["logp_mismatch"] < 1e-4
        assert line["failed"] == line["failed_members"] == line["dropped"] == 0
