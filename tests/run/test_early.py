"""Tests of run/early.py. An early process imports a module, and waits for an order on its standard input. The order
contains the command line of the module."""

import sys
from pathlib import Path

import pytest
from conftest import ROOT

from run import early
from run.launch import Fleet, Planned
from run.load import load

MODULE = """
import os, sys

def main(words):
    print(words, sys.argv[1:] == words, sys.stdin.readline().strip(), os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
    print("an error", file=sys.stderr)
    return len(words)

if __name__ == "__main__":
    print("an ordinary process")
    sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a new module that prints its arguments, a line of its standard input and an environment
    variable."""
    (tmp_path / "printing.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(early, "waiting", {})
    return "printing"


def started(module: str, folder: Path, gpus: list[str]) -> tuple[int, str]:
    """Start `module` as a child of a run. Return the child's exit code and log."""
    fleet = Fleet(folder)
    child = fleet.start(
        Planned("x", [sys.executable, "-P", "-m", module, "--a", "b c"], gpus, 7, keys=("secret",))
    )
    code = child.process.wait(timeout=60)
    fleet.close()
    return code, child.log.read_text()


@pytest.mark.parametrize("is_early", [True, False])
def test_an_order_does_what_the_command_does(module: str, tmp_path: Path, is_early: bool) -> None:
    """After it has read its order, an early process does what the ordinary command does: it gets the same arguments and
    keys, writes the same log, and ends with the same exit code."""
    if is_early:
        early.start(module)
    code, log = started(module, tmp_path, gpus=[])
    ordinary = "" if is_early else "an ordinary process\n"
    assert log == f"{ordinary}['--a', 'b c', '--port', '7'] True secret \nan error\n"
    assert code == 4
    assert early.waiting == {}


def test_a_process_with_gpus_is_ordinary(module: str, tmp_path: Path) -> None:
    """An early process cannot use a GPU, so a child that needs GPUs is started as an ordinary process."""
    early.start(module)
    _, log = started(module, tmp_path, gpus=["3"])
    assert log.startswith("an ordinary process")
    assert "secret 3" in log
    early.kill_waiting()


def test_a_dead_early_process_is_replaced(module: str, tmp_path: Path) -> None:
    """If the early process has ended before it gets an order, an ordinary process is started instead."""
    early.start(module)
    early.kill_waiting()
    assert early.waiting[module].returncode
    _, log = started(module, tmp_path, gpus=[])
    assert log.startswith("an ordinary process")


def test_without_an_order_the_process_ends(module: str) -> None:
    """An early process ends if its standard input is closed, for example because train.py has ended."""
    early.start(module)
    process = early.waiting[module]
    assert process.stdin
    process.stdin.close()
    assert process.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("words", "modules"),
    [
        ([], ["inference.tiny.server", "proxy"]),
        (["rollout.server_addrs=[http://127.0.0.1:9]"], ["proxy"]),
        (["--dry-run"], []),
        (["--config", str(ROOT / "configs" / "gsm8k.yaml"), "model_path=DIR"], ["proxy"]),
    ],
)
def test_a_run_prepares_what_it_starts(
    words: list[str], modules: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run starts an early process of a small server only if the run itself needs small servers. A dry run starts no
    early process."""
    prepared: list[str] = []
    monkeypatch.setattr(early, "start", prepared.append)
    early.prepare(load(words))
    assert prepared == modules
