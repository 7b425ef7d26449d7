"""A run owns its folder, says early what is wrong, and always ends all that it has started."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import runs
from conftest import rest_of
from runs import SMALL_GUESS, assert_gone, command, finish, start_until_step, wait_gone

from run.config import ConfigError, load
from run.start import Run, revision


@pytest.fixture
def claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    """A function that makes a Run in {tmp_path}/e/t, which claims its folder and starts nothing."""
    monkeypatch.setattr("run.start.find_model", lambda config: None)
    monkeypatch.setattr(Run, "start", lambda self, children: [])
    words = [f"fileroot={tmp_path}", "experiment_name=e", "trial_name=t", "callbacks=[]"]
    made = list[Run]()

    def make(*more: str, force: bool = False) -> Run:
        made.append(Run(load([*words, *more])[0], force=force))
        return made[-1]

    yield make
    for run in made:
        run.stack.close()


def test_a_folder_belongs_to_one_process(tmp_path: Path, claim: Callable[..., Run]) -> None:
    """A second process with the same folder is refused, even one that an agent has forked."""
    claim()
    if not (child := os.fork()):
        try:
            claim()
        except ConfigError as error:
            os._exit("belongs to a running process" in str(error))
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_run_goes_on_under_its_own_code(tmp_path: Path, claim: Callable[..., Run]) -> None:
    """Other code, or another order of prompts, is refused unless --force is given."""
    claim().record()
    record, metrics = (tmp_path / "e/t" / name for name in ("config.yaml", "metrics.jsonl"))
    record.write_text(record.read_text().replace(revision(), "0123", 1))
    claim()  # it has no step that other code could have made
    metrics.write_text("{}\n")
    with pytest.raises(ConfigError, match=r"other code, seed or data \(revision 0123, seed 1,"):
        claim()
    claim(force=True).record()
    claim()
    for other in ("seed=2", "train_dataset.shuffle=false", "train_dataset.path=tasks.maze.dataset"):
        with pytest.raises(ConfigError, match="other code, seed or data"):
            claim(other)
    with pytest.raises(ConfigError, match="other code, seed or data"):
        claim("model_path=other")
    record.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="was started with other code, seed or data"):
        claim()
    record.unlink()
    claim()  # nothing says which code it was


def test_a_folder_that_cannot_be_made(tmp_path: Path, claim: Callable[..., Run]) -> None:
    """The error is one line."""
    (tmp_path / "e").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        claim()


def test_a_run_that_was_started_with_sigchld_ignored() -> None:
    """Some shells and services start programs like this. A run still sees its children's exit
    codes."""
    code = "import signal, subprocess, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    code += "from run.start import begin; child = sys.executable, '-c', 'exit(3)'\n"
    code += "sys.exit(begin([], lambda *_, **__: subprocess.run(child)).returncode)"
    finish([sys.executable, "-c", code], code=3)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--help"], 0, "usage: python train.py"),
        (["actor.eps_clp=1"], 2, "error: unknown key"),
        (["task=tasks.gues"], 2, "error: task=tasks.gues: "),
    ],
)
def test_help_and_mistakes_need_no_torch(tmp_path: Path, words: list, code: int, says: str) -> None:
    """Help and errors are printed in half a second. With the import of torch it would take five
    seconds."""
    python = [sys.executable, "-X", "importtime", "train.py"]
    done = finish([*python, *words, f"fileroot={tmp_path}"], code)
    assert (done.stdout if code == 0 else done.stderr.splitlines()[-1]).startswith(says)
    assert not re.search(r"\| +(torch|transformers)$", done.stderr, re.MULTILINE)


# ---- whole runs


SUBPROC = ["rollout.openai.mode=subproc", "rollout.openai.subproc_max_workers=2"]
SUBPROC += ["train_dataset.batch_size=2"]
FORKS = ["workflow=sick_agents.ForkingAgent"]


@pytest.mark.parametrize("words", [[], pytest.param(SUBPROC, marks=pytest.mark.runs)])
def test_ctrl_c(tmp_path: Path, words: list[str]) -> None:
    """Ctrl-C ends a run at once, with exit code 130 and the command that goes on; no process is
    left, not even an agent's."""
    process, pids = start_until_step(tmp_path, *SMALL_GUESS, *words, "max_steps=10000")
    assert {"inference.tiny.server", "proxy"} <= set(pids)
    assert len([name for name in pids if "workers.serve" in name]) in ((1, 2) if words else (0,))
    runs.check_metrics(runs.metrics_of(tmp_path)[:1], eta=2)
    process.send_signal(signal.SIGINT)
    output = rest_of(process, 60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    *_, where, go_on = output.splitlines()
    assert where == f"the run's folder is {tmp_path / 'e' / 't'}"
    assert go_on.startswith(f"to go on from the last checkpoint: {sys.executable}")
    assert go_on.endswith(" trial_name=t")
    assert_gone(pids)


def test_ctrl_c_while_a_run_begins(tmp_path: Path) -> None:
    """A run that is interrupted before torch is imported prints no traceback."""
    words = runs.signalled(command(tmp_path, *SMALL_GUESS), "starting server-0", signal.SIGINT)
    assert finish(words, code=130).stderr == ""


@pytest.mark.runs
@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGTERM, FORKS), (signal.SIGKILL, FORKS), (signal.SIGKILL, SUBPROC)],
)
def test_a_run_that_is_ended_leaves_no_process(
    tmp_path: Path, number: signal.Signals, words: list[str]
) -> None:
    """Even `kill -9` of train.py ends servers, proxies and the agents' processes, whatever an agent
    has forked."""
    process, pids = start_until_step(tmp_path, *SMALL_GUESS, *words, "max_steps=10000")
    process.send_signal(number)
    rest_of(process, 60)
    assert process.returncode == (143 if number == signal.SIGTERM else -9)
    for pid in pids.values():
        wait_gone(pid)


@pytest.mark.runs
@pytest.mark.parametrize("victim", ["inference.tiny.server", "proxy"])
def test_a_run_that_loses_a_process_ends_at_once(tmp_path: Path, victim: str) -> None:
    """The run names the process and the end of its log, and the command that goes on."""
    process, pids = start_until_step(tmp_path, *SMALL_GUESS, "max_steps=10000")
    os.kill(pids[victim], signal.SIGKILL)
    output = rest_of(process, 60)
    assert process.returncode == 1, output
    name = "server-0" if victim != "proxy" else "proxy"
    assert f"error: {name} ended with code -9; the end of " in output
    assert output.splitlines()[-1].startswith("to go on from ")
    assert_gone(pids)


REASONS = [("RaisingAgent", "OSError('no board"), ("NoneAgent", "none was accepted")]


@pytest.mark.runs
@pytest.mark.parametrize(("agent", "reason"), REASONS)
def test_an_agent_that_never_works_ends_the_run(tmp_path: Path, agent: str, reason: str) -> None:
    """The run ends with a line that names the first failure, and with the command that goes on."""
    words = [*SMALL_GUESS, f"workflow=sick_agents.{agent}", "max_steps=3"]
    done = finish(command(tmp_path, *words, "callbacks=[extras.failures.Failures]"), code=1)
    assert reason in done.stderr
    assert "to go on from " in done.stderr
    assert (tmp_path / "e/t/logs/failures.log").exists() or agent == "NoneAgent"


@pytest.mark.runs
def test_the_core_runs_without_extras(tmp_path: Path) -> None:
    """The demo trains even if extras/ cannot be imported."""
    code = "import sys, runpy; sys.modules['extras'] = None; sys.argv = sys.argv[1:];"
    code += "runpy.run_path('train.py', run_name='__main__')"
    _, _, *script = command(tmp_path, *SMALL_GUESS, "max_steps=2", "callbacks=[]")
    finish([sys.executable, "-c", code, *script])
    assert len((tmp_path / "e/t/metrics.jsonl").read_text().splitlines()) == 2
