"""Helpers for tests of whole runs: start train.py as a user does, wait for a step, and check that the child processes
of train.py end."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

SMALL_GUESS = ["--config", "configs/demo.yaml", "gconfig.n_samples=4", "actor.ppo_n_minibatches=2"]
MAZE_BATCH = 8  # prompt groups per step in configs/maze.yaml
STRADDLING_MAZE = [  # the maze task with a workflow whose completions are interrupted by weight updates
    *("--config", "configs/maze.yaml", "workflow=walkers.WalkUntilUpdated"),
    *(f"workflow_kwargs.batch_size={MAZE_BATCH}", "workflow_kwargs.reward_fn=tasks.maze.reward"),
]
WITH_TEST_MODULES = {
    **os.environ,
    "PYTHONPATH": str(ROOT / "tests"),
}  # PYTHONPATH lets train.py import walkers.py


def command(tmp_path: Path, *words: str) -> list[str]:
    """Return the command that runs train.py with the run folder tmp_path/e/t."""
    fixed = [f"fileroot={tmp_path}", "experiment_name=e", "trial_name=t", "logger.live=false"]
    return [sys.executable, "-u", "train.py", *words, *fixed]


def signalled(command: list[str], line: str, number: signal.Signals) -> list[str]:
    """Return a run's command with one addition: when the run prints a line that begins with `line`, the run sends
    itself the signal `number`."""
    python, unbuffered, *script = command
    return [python, unbuffered, "tests/signalled.py", line, str(int(number)), *script]


def run(tmp_path: Path, *words: str) -> list[dict]:
    """Run train.py to its end and return the lines of its metrics.jsonl."""
    done = subprocess.run(
        command(tmp_path, *words),
        cwd=ROOT,
        env=WITH_TEST_MODULES,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = (tmp_path / "e" / "t" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def start_and_hold(tmp_path: Path, *words: str) -> tuple[subprocess.Popen[str], dict[str, int]]:
    """Start a run that suspends itself (SIGSTOP) after its first step, and wait until it is suspended. Return the run's
    process and {script: pid} of the run's child processes.

    The run continues when it receives SIGCONT.
    """
    held = signalled(command(tmp_path, *words), "step 1 ", signal.SIGSTOP)
    process = subprocess.Popen(
        held,
        cwd=ROOT,
        env=WITH_TEST_MODULES,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("step 1 "):
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), "the run ended after its first step"
            return process, children(process.pid)
    pytest.fail("the run ended before its first step:\n" + "".join(seen))


def start_and_wait_for_step(
    tmp_path: Path, *words: str
) -> tuple[subprocess.Popen[str], dict[str, int]]:
    """Start a run and wait for its first step. Return the run's process and {script: pid} of the run's child
    processes."""
    process, pids = start_and_hold(tmp_path, *words)
    process.send_signal(signal.SIGCONT)
    return process, pids


def children(pid: int) -> dict[str, int]:
    """Return {script: pid} for the child processes of a process."""
    table = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(None, 2) for line in table.splitlines()]
    found = {}
    for child, parent, args in rows:
        if int(parent) == pid:
            # If a process was started early (run/early.py), its command line ends with the name of its module.
            modules = ("inference.tiny.server", "proxy")
            script = next(
                (name for name in modules if f"-m {name} " in args or args.endswith(f" {name}")),
                args,
            )
            found[script] = int(child)
    return found


def assert_gone(pids: dict[str, int]) -> None:
    """Check that all processes in `pids` have ended."""
    for name, pid in pids.items():
        assert not is_alive(pid), f"{name} ({pid}) is still there"


def is_alive(pid: int) -> bool:
    """Return whether a process with this pid exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def check_metrics(metrics: list[dict], eta: int) -> None:
    """Check the metrics of each step: no metric is missing, no token is older than eta versions, and no episode
    failed."""
    names = [
        "step",
        "version",
        "reward",
        "success",
        "loss",
        "staleness_mean",
        "staleness_max",
        "mixed_version_share",
        "accepted",
        "rejected",
        "failed",
        "dropped",
        "truncated",
        "regenerated",
        "entropy",
        "kl",
        "clip_frac",
        "behave_weight_mean",
        "grad_norm",
        "logp_mismatch",
        "tokens",
        "step_s",
        "rollout_wait_s",
        "train_s",
        "sync_s",
        "wall_s",
    ]
    for step, line in enumerate(metrics, start=1):
        assert set(names) <= set(line), set(names) - set(line)
        assert (line["step"], line["version"]) == (step, step - 1)
        assert line["tokens"] > 0
        assert 0 <= line["staleness_max"] <= eta
        assert line["logp_mismatch"] < 1e-4
        assert line["failed"] == line["failed_members"] == line["dropped"] == 0


def wait_gone(pid: int) -> None:
    """Wait for the end of a process that is not a child of this process. When a process ends, Linux makes its pidfd
    readable."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([handle], [], [], 20)[0], f"{pid} is still there"
    os.close(handle)
