"""A run owns its folder, says early what is wrong, and always ends all that it has started."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, rest_of
from runs import SMALL_GUESS, assert_gone, command, start_and_wait_for_step, wait_gone

from run.config import ConfigError, TrainConfig, load
from run.start import Run, code_digest


def config_in(folder: Path, **keys: Any) -> TrainConfig:
    """A configuration whose run needs no process: its servers and proxies are never started."""
    config, _ = load([f"fileroot={folder}", "experiment_name=e", "trial_name=t"])
    config.model_path = "."  # claim() looks at the folder only
    return config.model_copy(update=keys)


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that claim their folder and stop there."""
    monkeypatch.setattr("run.start.find_model", lambda config: False)


def test_a_folder_belongs_to_one_process(tmp_path: Path, claims: None) -> None:
    """A second run with the same folder is refused, until the first has ended."""
    run = Run(config_in(tmp_path))
    with pytest.raises(ConfigError, match="belongs to a running process"):
        Run(config_in(tmp_path))
    run.stack.close()
    Run(config_in(tmp_path)).stack.close()


def test_what_a_run_forked_does_not_hold_its_folder(tmp_path: Path, claims: None) -> None:
    """An agent may leave a process behind; the run can be started again all the same."""
    run = Run(config_in(tmp_path))
    told, tell = os.pipe()
    if not (child := os.fork()):
        os.read(told, 1)
        os._exit(0)
    run.stack.close()
    Run(config_in(tmp_path)).stack.close()
    os.write(tell, b".")
    os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("keys", "recorded", "force", "refusal"),
    [
        ({}, code_digest(), False, None),
        ({}, "0123", False, "was started with other code"),
        ({}, "0123", True, None),
        ({"recover_interval": 0}, code_digest(), False, "without checkpoints"),
    ],
)
def test_what_may_go_on(
    tmp_path: Path, claims: None, keys: dict, recorded: str, force: bool, refusal: str | None
) -> None:
    """A run goes on under the code that it began with, unless told otherwise, and not without
    checkpoints."""
    config = config_in(tmp_path, **keys)
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "metrics.jsonl").write_text("{}\n")
    (config.run_dir / "config.yaml").write_text(
        yaml.safe_dump({"code": recorded, "revision": "abc"})
    )
    options = load(["--force"] if force else [])[1]
    if refusal is None:
        Run(config, options)
    else:
        with pytest.raises(ConfigError, match=refusal):
            Run(config, options)


def test_a_folder_that_cannot_be_made(tmp_path: Path, claims: None) -> None:
    """The line names fileroot."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="fileroot: cannot write"):
        Run(config_in(tmp_path / "file"))


@pytest.mark.parametrize("damage", ["", "[", "\x00", "- 1"])
def test_a_damaged_record_does_not_end_a_resume(tmp_path: Path, claims: None, damage: str) -> None:
    """config.yaml is for display: a broken one is written anew."""
    config = config_in(tmp_path)
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "metrics.jsonl").write_text("{}\n")
    (config.run_dir / "config.yaml").write_text(damage)
    Run(config).record()
    assert yaml.safe_load((config.run_dir / "config.yaml").read_text())["seed"] == 1


def test_help_needs_no_torch() -> None:
    """--help answers at once."""
    words = [sys.executable, "-X", "importtime", "train.py", "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: python train.py")
    assert "| torch\n" not in done.stderr


# ---- whole runs


def test_ctrl_c(tmp_path: Path) -> None:
    """Ctrl-C ends a run with a checkpoint, exit code 130 and the command that goes on; no process
    is left."""
    process, pids = start_and_wait_for_step(tmp_path, *SMALL_GUESS, "max_steps=10000")
    assert {"inference.tiny.server", "proxy"} <= set(pids)
    process.send_signal(signal.SIGINT)
    output = rest_of(process, 60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    folder = tmp_path / "e" / "t"
    last = len((folder / "metrics.jsonl").read_text().splitlines())
    *_, where, go_on = output.splitlines()
    assert where == f"the run's folder is {folder}"
    assert go_on.startswith(f"to go on from the checkpoint of step {last}: {sys.executable}")
    assert go_on.endswith(" trial_name=t")
    assert_gone(pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    """Even `kill -9` of train.py ends servers and proxies, whatever an agent has forked."""
    words = [*SMALL_GUESS, "max_steps=10000", "workflow=sick_agents.ForkingAgent"]
    process, pids = start_and_wait_for_step(tmp_path, *words)
    process.send_signal(number)
    rest_of(process, 60)
    assert process.returncode == (143 if number == signal.SIGTERM else -9)
    for pid in pids.values():
        wait_gone(pid)


@pytest.mark.parametrize("victim", ["inference.tiny.server", "proxy"])
def test_a_run_that_loses_a_process_ends_at_once(tmp_path: Path, victim: str) -> None:
    """The run names the process and the end of its log, and the command that goes on."""
    process, pids = start_and_wait_for_step(tmp_path, *SMALL_GUESS, "max_steps=10000")
    os.kill(pids[victim], signal.SIGKILL)
    output = rest_of(process, 60)
    assert process.returncode == 1, output
    name = "server-0" if victim != "proxy" else "proxy-0"
    assert f"error: {name} ended with code -9; the end of " in output
    assert output.splitlines()[-1].startswith("to go on from ")
    assert_gone(pids)


@pytest.mark.runs
@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        ("NaNAgent", "is NaN"),
        ("RaisingAgent", "OSError: no board"),
        ("NoneAgent", "none was accepted"),
        ("ExitingAgent", "sys.exit"),
    ],
)
def test_an_agent_that_never_works_ends_the_run(tmp_path: Path, agent: str, reason: str) -> None:
    """The first failure is shown as it is, with its place, and counted."""
    words = command(tmp_path, *SMALL_GUESS, f"workflow=sick_agents.{agent}", "max_steps=3")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1, done.stderr
    assert reason in done.stderr
    assert done.stderr.count("Traceback") == 0
    assert (tmp_path / "e/t/logs/failures.log").exists() or agent == "NoneAgent"


def test_evaluation_by_itself(tmp_path: Path) -> None:
    """mode=eval runs the validation prompts and writes eval.json."""
    words = command(tmp_path, "mode=eval")
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "e/t/eval.json").read_text())
    assert (found["eval_episodes"], found["eval_rejected"]) == (6, 0)
    assert f"eval_reward {found['eval_reward']:.4g}" in done.stdout
    assert list((tmp_path / "e/t").glob("eval-rollout/0/*.jsonl"))


def test_the_core_runs_without_extras(tmp_path: Path) -> None:
    """The demo trains with extras/ made unimportable."""
    code = (
        "import sys, runpy; sys.modules['extras'] = None; sys.argv = sys.argv[1:];"
        "runpy.run_path('train.py', run_name='__main__')"
    )
    _, _, script, *words = command(tmp_path, *SMALL_GUESS, "max_steps=2", "callbacks=[]")
    whole = [sys.executable, "-c", code, script, *words]
    done = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "e/t/metrics.jsonl").read_text().splitlines()) == 2
