"""Tests of run/command.py: the number of threads in a run, the output of `--help`, and the effect of Ctrl-C. One test
sends Ctrl-C while a checkpoint is written."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import ROOT
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter

from run.command import interruptible, open_run, say_how_to_go_on
from run.load import ConfigError, load
from run.recover import unwrapped


@pytest.mark.parametrize(("offload", "threads"), [("true", 3), ("false", 1)])
def test_an_offloaded_optimizer_gets_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offload: str, threads: int
) -> None:
    """With actor.offload, each of two ranks on a machine with six cores has three threads. Without actor.offload, a
    rank has one thread."""
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    torch.set_num_threads(1)
    try:
        with open_run(load([f"actor.offload={offload}", f"fileroot={tmp_path}", "trial_name=t"])):
            seen = torch.get_num_threads()
    finally:
        torch.set_num_threads(1)
    assert seen == threads


def test_two_runs_that_start_in_the_same_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default name of a run is its start time. A second run with the same start time gets a name of its own."""
    monkeypatch.setattr("time.strftime", lambda _: "now")
    torch.set_num_threads(1)
    names = []
    with ExitStack() as stack:
        for _ in range(2):
            run = stack.enter_context(open_run(load([f"fileroot={tmp_path}"])))
            names.append(run.config.trial_name)
    assert names == ["now", f"now-{os.getpid()}"]


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    """If the run's folder cannot be made, the run ends with one line before it starts a process."""
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"fileroot: cannot write to .*NotADirectoryError"),
        open_run(load([f"fileroot={tmp_path / 'file'}"])),
    ):
        pass


def test_sigterm_while_the_inputs_load(tmp_path: Path) -> None:
    """SIGTERM ends a run with exit code 143 even if the run is still loading its inputs."""
    (tmp_path / "slow_task.py").write_text(
        "import os, signal\n\ndef dataset(_):\n    os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    words = ["task=slow_task", "workflow=tasks.guess.GuessAgent", f"fileroot={tmp_path}"]
    path = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "train.py", *words]
    done = subprocess.run(command, cwd=ROOT, env=path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 143
    assert "Traceback" not in done.stderr
    assert "to go on from the beginning" in done.stderr


def run_without_torch(*words: str) -> subprocess.CompletedProcess[str]:
    """Run train.py with `words`, and check that it ends before it imports torch. Return the ended process; its `stderr`
    also lists the imported modules."""
    command = [sys.executable, "-X", "importtime", "train.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "run.config" in imported
    assert "torch" not in imported
    return done


def test_help_does_not_wait_for_torch() -> None:
    """`python train.py --help` prints every key without importing torch."""
    done = run_without_torch("--help")
    assert done.returncode == 0
    assert "rollout.max_head_offpolicyness" in done.stdout


def test_a_wrong_key_does_not_wait_for_torch() -> None:
    """If the command line has an unknown key, train.py ends at once with one line, without importing torch."""
    done = run_without_torch("lr=0.1")
    assert (done.returncode, done.stdout) == (2, "")
    [said] = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert said == "error: unknown key 'lr' in the command line; did you mean 'actor.optimizer.lr'?"


def test_ctrl_c_during_the_imports() -> None:
    """If Ctrl-C arrives while train.py imports torch, train.py ends without a traceback."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "train.py"], cwd=ROOT, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "pocket-areal: importing torch and transformers\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=100)
    assert (process.returncode, out, err) == (130, "", "\n")


def test_a_second_ctrl_c_ends_at_once() -> None:
    """The first Ctrl-C calls the function that was passed to `on_ctrl_c`. The second Ctrl-C ends the process at once,
    without a traceback."""
    begin = "import os; from run.command import on_ctrl_c; on_ctrl_c(lambda *_: print('first', flush=True))"
    code = f"{begin}; os.kill(os.getpid(), 2); print('goes on', flush=True); os.kill(os.getpid(), 2); print('not here')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 130
    assert done.stdout == "first\ngoes on\n"
    assert done.stderr.strip() == ""


def test_without_checkpoints_no_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a run with recover=off ends early, its last lines do not name a command that continues it."""
    say_how_to_go_on(load(["recover=off", f"fileroot={tmp_path}", "trial_name=t"]))
    assert capsys.readouterr().err.splitlines()[1:] == [
        "the run has no checkpoints, because recover=off was set, so it cannot continue"
    ]
    say_how_to_go_on(load([f"fileroot={tmp_path}", "trial_name=t"]))
    assert "to go on from the beginning" in capsys.readouterr().err


def test_ctrl_c_after_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a run trains, Ctrl-C lets the current step end. If a step has failed, Ctrl-C interrupts the clean-up."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(RuntimeError, match="a step failed"), interruptible(None, lambda: None):
            raise RuntimeError("a step failed")
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


class InterruptedWriter(FileSystemWriter):
    """A checkpoint writer that calls `act` instead of writing a file. `act` raises a signal or an error."""

    def __init__(self, path: Path, act: Callable[[], Any]) -> None:
        super().__init__(path)
        self.act = act

    def write_data(self, *args: Any) -> Any:
        self.act()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_ctrl_c_during_a_checkpoint_ends_the_run_as_usual(tmp_path: Path) -> None:
    """If Ctrl-C arrives while torch writes a checkpoint, torch raises CheckpointException instead of KeyboardInterrupt.
    After Ctrl-C, `unwrapped` replaces CheckpointException with KeyboardInterrupt, so the run ends with exit code 130.
    After SIGTERM, `unwrapped` replaces CheckpointException with SystemExit.
    If an error interrupts the write of a checkpoint, `unwrapped` does not replace the CheckpointException."""

    def full() -> None:
        raise OSError("No space left on device")

    ways: dict[type[BaseException], Callable[[], Any]] = {
        KeyboardInterrupt: lambda: signal.raise_signal(signal.SIGINT),
        SystemExit: lambda: sys.exit(143),  # the handler of SIGTERM
        CheckpointException: full,
    }
    for expected, act in ways.items():
        with pytest.raises(expected), unwrapped():
            dcp.save({"x": torch.ones(2)}, storage_writer=InterruptedWriter(tmp_path, act))
