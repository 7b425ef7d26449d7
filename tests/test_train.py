"""The whole system, for real: `python train.py` as a user runs it, with its servers, its agents and its ending.

Nothing is replaced here: each test starts the command line, reads what the run wrote, and looks for processes that
were left behind.
"""

import json
import os
import signal
import subprocess
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
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo import ppo_actor_loss_fn
from run.config import PPOActorConfig


@pytest.fixture(scope="module")
def guess_run(tmp_path_factory: pytest.TempPathFactory):
    """Runs of the demo by eta (and a name, for a second one), each made once."""
    made: dict[tuple[int, str], tuple[Path, list[dict]]] = {}

    def get(eta: int, name: str = "") -> tuple[Path, list[dict]]:
        if (eta, name) not in made:
            folder = tmp_path_factory.mktemp(f"guess{eta}{name}")
            made[eta, name] = folder, run(folder, *SMALL_GUESS, "max_steps=5", f"rollout.max_head_offpolicyness={eta}")
        return made[eta, name]

    return get


@pytest.mark.parametrize("eta", [0, 2])
def test_guess_staleness(guess_run, eta: int) -> None:
    """Whatever eta is, no token that is trained on is older than eta versions; at 0 every token is of this version."""
    _, metrics = guess_run(eta)
    assert len(metrics) == 5
    check_metrics(metrics, eta)


@pytest.mark.runs
@pytest.mark.parametrize("eta", [0, 2])
def test_maze_staleness(tmp_path: Path, eta: int) -> None:
    """Long answers straddle weight updates at eta = 2, never at 0, and the age bound holds for every token."""
    metrics = run(tmp_path, *STRADDLING_MAZE, "max_steps=5", f"rollout.max_head_offpolicyness={eta}")
    check_metrics(metrics, eta)
    mixed = max(line["mixed_version_share"] for line in metrics)
    assert (mixed > 0) == (eta > 0)


def test_synchronous_runs_repeat(guess_run) -> None:
    """At eta = 0 the seed decides everything: data, sampling, training."""
    (_, first), (_, second) = guess_run(0), guess_run(0, "again")
    exact = ("reward", "success", "tokens", "staleness_max", "accepted", "rejected")
    for one, two in zip(first, second, strict=True):
        assert [one[k] for k in exact] == [two[k] for k in exact]
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-5)


def test_decoupled_is_standard_where_the_data_is_fresh(guess_run) -> None:
    """At eta = 0 pi_behav and pi_prox are the same weights, computed by two programs. On the tokens of
    every step of a real run the two objectives differ by no more than those logprobs do: each token's by
    that, times 1 + eps and |A|."""
    folder, metrics = guess_run(0)
    decoupled = PPOActorConfig(eps_clip=0.2, eps_clip_higher=0.28, c_clip=2.0)
    standard = replace(decoupled, use_decoupled_loss=False)
    for line in metrics:
        t = load_file(folder / "e" / "t" / "tokens" / f"{line['step']:05d}.safetensors")
        of = (t["theta_logp"], t["prox_logp"], t["logprobs"], t["advantages"], t["loss_mask"])
        (loss, stats), (plain, _) = ppo_actor_loss_fn(*of, decoupled), ppo_actor_loss_fn(*of, standard)
        apart = line["logp_mismatch"]
        trained = t["loss_mask"] > 0
        assert (t["prox_logp"] - t["logprobs"])[trained].abs().max().item() <= apart < 1e-4
        assert abs(loss - plain).item() <= 2.5 * apart * t["advantages"][trained].abs().mean().item() + 1e-7
        assert abs(stats["behave_weight_mean"].item() - 1) <= 2 * apart + 1e-6


def test_what_a_run_writes(guess_run) -> None:
    """A run leaves its resolved config, metrics, a trace, the dumps, its tokens and a model that transformers loads."""
    folder = guess_run(2)[0] / "e" / "t"
    assert "max_head_offpolicyness: 2" in (folder / "config.yaml").read_text()
    events = json.loads((folder / "trace.json").read_text())
    assert {"submit", "accept", "train", "sync"} <= {event.get("name") for event in events}
    dumps = [json.loads(line) for path in folder.glob("rollout/*/*.jsonl") for line in path.read_text().splitlines()]
    keys = ["task_id", "sample_idx", "seqlen", "prompt_len", "head_version", "tail_version", "reward", "prompt"]
    assert dumps
    assert all(list(dump) == [*keys, "completion"] for dump in dumps)
    tokens = load_file(folder / "tokens" / "00001.safetensors")
    three = {"logprobs", "prox_logp", "theta_logp"}
    assert three | {"input_ids", "versions", "loss_mask", "turn_ids", "turn_rewards"} <= set(tokens)
    last = folder / "checkpoints" / "step00005"
    AutoModelForCausalLM.from_pretrained(last)
    AutoTokenizer.from_pretrained(last)


def test_ctrl_c(tmp_path: Path) -> None:
    """Ctrl-C ends the run with a word, exit code 130 and no process left."""
    process, pids = start_and_wait_for_step(tmp_path, *SMALL_GUESS, "max_steps=10000")
    assert {"inference.tiny.server", "proxy"} <= set(pids)
    process.send_signal(signal.SIGINT)
    output = rest_of(process, 30)
    assert process.returncode == 130
    assert "interrupted" in output
    assert_gone(pids)


@pytest.mark.parametrize("victim", ["inference.tiny.server", "proxy"])
def test_killed_server(tmp_path: Path, victim: str) -> None:
    """A server that dies ends the run at once, and the message says which one, how, and what it last said."""
    process, pids = start_and_wait_for_step(tmp_path, *SMALL_GUESS, "max_steps=10000")
    os.kill(pids[victim], signal.SIGKILL)
    output = rest_of(process, 30)
    assert process.returncode == 1
    assert "ended with code -9" in output
    assert_gone(pids)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd")
def test_killed_trainer(tmp_path: Path) -> None:
    """Not even kill -9 of the trainer leaves a server behind: each child ends when its parent's pipe closes."""
    process, pids = start_and_wait_for_step(tmp_path, *SMALL_GUESS, "max_steps=10000")
    process.kill()
    process.communicate(timeout=30)
    for pid in pids.values():
        wait_gone(pid)


def test_exception_in_the_trainer(tmp_path: Path) -> None:
    """A training step that fails (here: a file lies where checkpoints go) ends the run with its error, nothing left."""
    folder = tmp_path / "e" / "t"
    folder.mkdir(parents=True)
    (folder / "checkpoints").write_text("in the way")
    process, pids = start_and_wait_for_step(tmp_path, *SMALL_GUESS, "saver.interval=2", "max_steps=50")
    output = rest_of(process, 60)
    assert process.returncode == 1
    assert "Error" in output
    assert "checkpoints" in output
    assert_gone(pids)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model_path=/nowhere"], "no model at model_path=/nowhere"),
        (["workflow=nowhere.Agent"], "nowhere"),
        (["workflow_kwargs.typo=1"], "typo"),
    ],
)
def test_bad_configuration(tmp_path: Path, words: list[str], says: str) -> None:
    """What cannot run is refused in one line that says what to do, and nothing has been started or written."""
    done = subprocess.run(command(tmp_path, *words), cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
