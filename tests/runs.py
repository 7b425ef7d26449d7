"""Runs of train.py as a user starts them: the command, its first step, its children, and that none of them is left."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

SMALL_GUESS = ["--config", "configs/demo.yaml", "gconfig.n_samples=4", "actor.ppo_n_minibatches=2"]


SMALL_MAZE = ["--config", "configs/maze.yaml"]


def command(tmp_path: Path, *words: str) -> list[str]:
    fixed = [f"fileroot={tmp_path}", "experiment_name=e", "trial_name=t", "logger.live=false"]
    return [sys.executable, "-u", "train.py", *words, *fixed]


def run(tmp_path: Path, *words: str) -> list[dict]:
    """The lines of metrics.jsonl of a finished run."""
    done = subprocess.run(command(tmp_path, *words), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = (tmp_path / "e" / "t" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def start_and_wait_for_step(tmp_path: Path, *words: str) -> tuple[subprocess.Popen[str], dict[str, int]]:
    """A run that has finished its first step, and the pids of its children by script."""
    process = subprocess.Popen(
        command(tmp_path, *words), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("step 1 "):
            break
    else:
        pytest.fail("the run ended before its first step:\n" + "".join(seen))
    return process, children(process.pid)


def children(pid: int) -> dict[str, int]:
    table = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(None, 2) for line in table.splitlines()]
    found = {}
    for child, parent, args in rows:
        if int(parent) == pid:
            script = next((name for name in ("inference.tiny.server", "proxy") if f"-m {name} " in args), args)
            found[script] = int(child)
    return found


def assert_gone(pids: dict[str, int]) -> None:
    for name, pid in pids.items():
        assert not is_alive(pid), f"{name} ({pid}) is still there"


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def check_metrics(metrics: list[dict], eta: int) -> None:
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
        assert 0 <= line["staleness_max"] <= eta
        assert line["logp_mismatch"] < 1e-4
        assert line["failed"] == line["failed_members"] == line["dropped"] == 0


def wait_gone(pid: int) -> None:
    """Wait for the end of a process that is not a child of ours: a pidfd becomes readable then (Linux)."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([handle], [], [], 20)[0], f"{pid} is still there"
    os.close(handle)
