"""Tests of whole runs of `python train.py`: staleness, repeatability, the files that a run writes, and how a run ends.

Each test starts the command as a user does, reads the files of the run, and checks that no process is left behind.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, rest_of
from runs import (
    SMALL_GUESS,
    STRADDLING_MAZE,
    assert_gone,
    check_metrics,
    command,
    run,
    start_and_wait_for_step,
    wait_gone,
)
from safetensors.torch import load_file
from tracker_of_a_test import CALLS
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo import ppo_actor_loss_fn
from run.recover import newest_checkpoint
from training.config import PPOActorConfig


@pytest.fixture(scope="module")
def guess_run(tmp_path_factory: pytest.TempPathFactory):
    """Return a function `get(eta, name)` that runs the demo and returns the run's folder and metrics. `get` runs the
    demo only once for each pair of arguments."""
    made: dict[tuple[int, str], tuple[Path, list[dict]]] = {}

    def get(eta: int, name: str = "") -> tuple[Path, list[dict]]:
        if (eta, name) not in made:
            folder = tmp_path_factory.mktemp(f"guess{eta}{name}")
            words = [
                "max_steps=5",
                f"rollout.max_head_offpolicyness={eta}",
                "logger.tracker=tracker_of_a_test",
            ]
            words += ["evaluator.interval=5", "eval_gconfig.greedy=true"]
            made[eta, name] = folder, run(folder, *SMALL_GUESS, *words)
        return made[eta, name]

    return get


@pytest.mark.parametrize("eta", [0, pytest.param(2, marks=pytest.mark.runs)])
def test_guess_staleness(guess_run, eta: int) -> None:
    """In the demo no trained token is older than eta versions. With eta = 0 every trained token has the current
    version. After each update the canary (run/mismatch.py) finds that the servers have the trainer's weights."""
    _, metrics = guess_run(eta)
    assert len(metrics) == 5
    assert max(line["staleness_max"] for line in metrics) <= eta
    check_metrics(metrics, eta)
    assert [line["step"] for line in metrics if line.get("canary_mismatch", 1) < 1e-4] == [
        2,
        3,
        4,
        5,
    ]
    assert all(line["canary_unchanged"] == 0 for line in metrics[1:])


def test_evaluation_is_greedy_and_training_samples(guess_run) -> None:
    """With `eval_gconfig.greedy` every evaluation episode begins with the same guess, because the demo's prompt is
    always the same. The training episodes of a run begin with different guesses."""
    folder, metrics = guess_run(0)

    def first_answers(kind: str) -> set[str]:
        """Return the first answer of each episode in the folder `kind`, as a set. The folder "rollout" has the episodes
        of training, and "eval-rollout" has those of evaluation."""
        lines = [
            line
            for path in (folder / "e/t" / kind).glob("*/*.jsonl")
            for line in path.read_text().splitlines()
        ]
        return {json.loads(line)["completion"].partition("<end>")[0] for line in lines}

    assert metrics[-1]["eval_episodes"] == 6
    assert len(first_answers("eval-rollout")) == 1 < len(first_answers("rollout"))


def test_a_tracker_gets_the_metrics(guess_run) -> None:
    """A tracker gets the configuration, the numbers of each step, and the end of the run. The tracker does not get the
    servers' key."""
    folder, metrics = guess_run(0)
    calls = [json.loads(line) for line in (folder / CALLS).read_text().splitlines()]
    assert [call[:-1] for call in calls] == [
        ["init", "e", "t", "allow"],
        *(["log", k] for k in range(1, 6)),
        [],
    ]
    config, *tracked, end = [call[-1] for call in calls]
    assert config["max_steps"] == 5
    assert "server_key" not in config["rollout"]
    assert tracked == [
        {k: v for k, v in line.items() if isinstance(v, int | float)} for line in metrics
    ]
    assert end == "finish"


def test_the_readme_of_a_run_names_its_files(guess_run) -> None:
    """A run writes a README to its folder. The README names every file and folder of the run."""
    folder, _ = guess_run(0)
    names = {path.name for path in (folder / "e" / "t").iterdir()} - {"README.md"}
    text = (folder / "e" / "t" / "README.md").read_text()
    assert {"metrics.jsonl", "checkpoints"} <= names
    assert [name for name in names if f"`{name}" not in text] == []


@pytest.mark.runs
@pytest.mark.parametrize("eta", [0, 2])
def test_maze_staleness(tmp_path: Path, eta: int) -> None:
    """With eta = 2 weight updates interrupt completions. With eta = 0 no weight update interrupts a completion. No
    trained token is older than eta versions."""
    metrics = run(
        tmp_path, *STRADDLING_MAZE, "max_steps=5", f"rollout.max_head_offpolicyness={eta}"
    )
    check_metrics(metrics, eta)
    mixed = max(line["mixed_version_share"] for line in metrics)
    assert (mixed > 0) == (eta > 0)


@pytest.mark.runs
def test_synchronous_runs_repeat(guess_run) -> None:
    """Two runs with eta = 0 and the same seed have the same metrics, except for the metric `accepted`.

    A step's metric `accepted` counts the groups that were accepted since the previous step, which may include groups of
    the next batch.
    """
    (_, first), (_, second) = guess_run(0), guess_run(0, "again")
    exact = ("reward", "success", "tokens", "staleness_max", "rejected")
    for one, two in zip(first, second, strict=True):
        assert [one[k] for k in exact] == [two[k] for k in exact]
        for lines in (first, second):
            accepted = sum(line["accepted"] for line in lines[: one["step"]])
            assert 0 <= accepted - 6 * one["step"] <= 6
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-5)


def test_decoupled_is_standard_where_the_data_is_fresh(guess_run) -> None:
    """With eta = 0 the decoupled loss equals the standard loss, apart from rounding errors of the server and the
    trainer.

    With eta = 0 pi_behav and pi_prox are the same policy, but the server computes log pi_behav and the trainer computes
    log pi_prox. For each token the decoupled and the standard loss differ by at most
    |log pi_prox - log pi_behav| * (1 + eps) * |A|.
    """
    folder, metrics = guess_run(0)
    decoupled = PPOActorConfig(eps_clip=0.2, eps_clip_higher=0.28, c_clip=2.0)
    standard = replace(decoupled, use_decoupled_loss=False)
    for line in metrics:
        t = load_file(folder / "e" / "t" / "tokens" / f"{line['step']:05d}.safetensors")
        of = (t["theta_logp"], t["prox_logp"], t["logprobs"], t["advantages"], t["loss_mask"])
        (loss, stats), (plain, _) = (
            ppo_actor_loss_fn(*of, decoupled),
            ppo_actor_loss_fn(*of, standard),
        )
        apart = line["logp_mismatch"]
        trained = t["loss_mask"] > 0
        assert (t["prox_logp"] - t["logprobs"])[trained].abs().max().item() <= apart < 1e-4
        assert (
            abs(loss - plain).item()
            <= 2.5 * apart * t["advantages"][trained].abs().mean().item() + 1e-7
        )
        assert abs(stats["behave_weight_mean"].item() - 1) <= 2 * apart + 1e-6


def test_what_a_run_writes(guess_run) -> None:
    """A run writes its configuration, a trace, its trajectories as text and as tokens, and a model that transformers
    loads."""
    folder = guess_run(2)[0] / "e" / "t"
    assert "max_head_offpolicyness: 2" in (folder / "config.yaml").read_text()
    events = json.loads((folder / "trace.json").read_text())
    assert {"submit", "accept", "consume", "start", "train", "sync", "log", "end"} <= {
        e["name"] for e in events
    }
    assert [e["args"]["version"] for e in events if e["name"] == "weights"] == [1, 2, 3, 4, 5]
    assert all(
        e["args"]["versions"] and e["args"]["rewards"] for e in events if e["name"] == "reward"
    )
    report = (folder / "report.html").read_text()
    assert len(report) < 5e6
    assert '"max_steps":5' in report
    dumps = [
        json.loads(line)
        for path in folder.glob("rollout/*/*.jsonl")
        for line in path.read_text().splitlines()
    ]
    keys = [
        "task_id",
        "sample_idx",
        "seqlen",
        "prompt_len",
        "head_version",
        "tail_version",
        "reward",
        "prompt",
    ]
    assert dumps
    assert all(list(dump) == [*keys, "completion"] for dump in dumps)
    tokens = load_file(folder / "tokens" / "00001.safetensors")
    three = {"logprobs", "prox_logp", "theta_logp"}
    assert three | {"input_ids", "versions", "loss_mask", "turn_ids", "turn_rewards"} <= set(tokens)
    assert [log.name for log in folder.glob("logs/*.log") if "Traceback" in log.read_text()] == []
    last = folder / "checkpoints" / "step00005"
    AutoModelForCausalLM.from_pretrained(last)
    AutoTokenizer.from_pretrained(last)


@pytest.mark.runs
def test_talk_to_the_trained_model(guess_run) -> None:
    """`python -m run.chat` sends each line of the input to the run's newest checkpoint, and prints the answer. An empty
    line begins a new conversation. If a conversation becomes too long, a new conversation begins."""
    folder = guess_run(0)[0] / "e" / "t"
    words = [sys.executable, "-m", "run.chat", str(folder)]
    talk = "guess a number\nhigher\n\nguess a number\n" + "higher " * 100 + "\nguess a number\n"
    done = subprocess.run(words, cwd=ROOT, input=talk, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    head, first, second, again, too_long, after = done.stdout.splitlines()
    assert head.startswith("the model of step 5;")
    assert {first, second} <= {*"123456", "higher", "lower", ""}
    assert again == after == first
    assert too_long.startswith("error: prompt is too long")


@pytest.mark.runs
def test_a_refused_restart_changes_nothing(guess_run, tmp_path: Path) -> None:
    """If a run cannot continue because its metrics.jsonl lacks lines, its config.yaml is not changed. Its report does
    not say that the run ended early."""
    shutil.copytree(guess_run(0)[0], tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "e" / "t"
    before = (folder / "config.yaml").read_text()
    (folder / "metrics.jsonl").write_text("")
    words = command(
        tmp_path,
        *SMALL_GUESS,
        "max_steps=6",
        "rollout.max_head_offpolicyness=0",
        "actor.eps_clip=0.3",
    )
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "does not hold steps 1 to 5" in done.stderr
    assert (folder / "config.yaml").read_text() == before
    assert "ConfigError" not in (folder / "report.html").read_text()


@pytest.mark.runs
def test_a_finished_run_stays_as_it_is(guess_run, tmp_path: Path) -> None:
    """If a run has trained its last step, a second start prints that, and does not change the run's config.yaml. If the
    run's last model is missing, for example because max_steps was lowered, the second start saves this model."""
    shutil.copytree(guess_run(0)[0], tmp_path, dirs_exist_ok=True)
    config, models = tmp_path / "e" / "t" / "config.yaml", tmp_path / "e" / "t" / "checkpoints"
    before = config.read_text()
    shutil.rmtree(models)
    words = command(
        tmp_path,
        *SMALL_GUESS,
        "max_steps=5",
        "rollout.max_head_offpolicyness=0",
        "actor.eps_clip=0.3",
    )
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert (
        "nothing is left to train: step 5 is done, and the last step is 5; raise max_steps"
        in done.stdout
    )
    assert config.read_text() == before
    assert [path.name for path in models.iterdir()] == ["step00005"]


def test_ctrl_c(tmp_path: Path) -> None:
    """Ctrl-C ends a run with a message, a report and exit code 130, and no process is left behind."""
    process, pids = start_and_wait_for_step(tmp_path, *SMALL_GUESS, "max_steps=10000")
    assert {"inference.tiny.server", "proxy"} <= set(pids)
    process.send_signal(signal.SIGINT)
    output = rest_of(process, 30)
    assert process.returncode == 130
    assert "interrupted" in output
    assert "Traceback" not in output
    folder = tmp_path / "e" / "t"
    last = len((folder / "metrics.jsonl").read_text().splitlines())
    assert newest_checkpoint(folder) == last
    *_, where, command_line = output.splitlines()
    assert where == f"the run's folder is {folder}"
    assert command_line.startswith(f"to go on from the checkpoint of step {last}: {sys.executable}")
    assert command_line.endswith(" trial_name=t")
    assert "KeyboardInterrupt()" in (folder / "report.html").read_text()
    assert_gone(pids)


@pytest.mark.runs
def test_sigterm_of_2000_tasks(tmp_path: Path) -> None:
    """SIGTERM ends a run that has 2,000 tasks in flight. After SIGTERM the run prints at most three lines and no
    warning of the doctor. The last line is the command that continues the run. No process is left behind."""
    words = [
        "max_steps=10000",
        "rollout.max_concurrent_rollouts=2000",
        "rollout.max_head_offpolicyness=400",
    ]
    words += [
        "gconfig.n_samples=2"
    ]  # 2,000 groups have 4,000 episodes, which the limit of open files allows
    words += [
        "workflow=walkers.FirstBatchAgent"
    ]  # no task after the first batch ends before SIGTERM
    process, pids = start_and_wait_for_step(tmp_path, *SMALL_GUESS, *words)
    process.send_signal(signal.SIGTERM)
    lines = rest_of(process, 60).splitlines()
    assert process.returncode == 143, lines[-20:]
    last = [line for line in lines if not line.startswith("step ")]
    assert len(last) <= 3, last
    assert last[-1].startswith("to go on from "), last
    assert all(len(line) < 300 and "doctor" not in line for line in last[:-1]), last
    events = json.loads((tmp_path / "e/t/trace.json").read_text())
    ended = sum(event["name"] in ("accept", "reject", "fail") for event in events)
    assert sum(event["name"] == "submit" for event in events) - ended > 1900
    assert_gone(pids)


@pytest.mark.runs
@pytest.mark.parametrize("victim", ["inference.tiny.server", "proxy"])
def test_killed_server(tmp_path: Path, victim: str) -> None:
    """If the proxy's process ends, the run ends. If the process of the only inference server ends and
    server.max_restarts is 0, the run ends. The run's last message contains the ended process's name and exit code."""
    process, pids = start_and_wait_for_step(
        tmp_path, *SMALL_GUESS, "max_steps=10000", "server.max_restarts=0"
    )
    os.kill(pids[victim], signal.SIGKILL)
    output = rest_of(process, 30)
    assert process.returncode == 1
    name = {"inference.tiny.server": "server-0", "proxy": "proxy-0"}[victim]
    assert f"{name} ended with code -9" in output
    assert_gone(pids)


@pytest.mark.runs
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd")
def test_killed_trainer(tmp_path: Path) -> None:
    """If the trainer is killed with kill -9, the server and the proxy end as well, because their pipes from the trainer
    close."""
    process, pids = start_and_wait_for_step(tmp_path, *SMALL_GUESS, "max_steps=10000")
    process.kill()
    process.communicate(timeout=30)
    for pid in pids.values():
        wait_gone(pid)


@pytest.mark.runs
def test_exception_in_the_trainer(tmp_path: Path) -> None:
    """An exception in the trainer ends the run with a report, and no process is left behind. In this test the trainer
    cannot create the checkpoint folder, because a file has the folder's name."""
    folder = tmp_path / "e" / "t"
    folder.mkdir(parents=True)
    (folder / "checkpoints").write_text("in the way")
    process, pids = start_and_wait_for_step(
        tmp_path, *SMALL_GUESS, "saver.interval=2", "max_steps=50"
    )
    output = rest_of(process, 60)
    assert process.returncode == 1
    assert "Error" in output
    assert "checkpoints" in output
    assert "NotADirectoryError" in (tmp_path / "e/t/report.html").read_text()
    assert_gone(pids)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model_path=/nowhere"], "no model at model_path=/nowhere"),
        pytest.param(["workflow=nowhere.Agent"], "nowhere", marks=pytest.mark.runs),
        pytest.param(["workflow_kwargs.typo=1"], "typo", marks=pytest.mark.runs),
    ],
)
def test_bad_configuration(tmp_path: Path, words: list[str], says: str) -> None:
    """train.py reports a wrong configuration in one line, starts no process and writes no file."""
    done = subprocess.run(
        command(tmp_path, *words), cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout) == (2, "pocket-areal: importing torch and transformers\n")
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
