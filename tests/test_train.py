"""Whole runs of `python train.py`: how old their tokens are, that they repeat, what they write.

Each test starts the command as a user does and reads the run's folder.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from runs import SMALL_GUESS, STRADDLING_MAZE, check_metrics, command, finish, metrics_of, run
from safetensors.torch import load_file

from ppo import ppo_actor_loss_fn


@pytest.fixture(scope="module")
def guess_run(tmp_path_factory: pytest.TempPathFactory):
    """A function get(eta) that runs the demo, once for each eta, and returns the run's folder and
    metrics."""
    made: dict[int, tuple[Path, list[dict]]] = {}

    def get(eta: int) -> tuple[Path, list[dict]]:
        if eta not in made:
            folder = tmp_path_factory.mktemp(f"guess{eta}")
            words = ["max_steps=5", "rollout.enable_tracing=true", "evaluator.interval=5"]
            words += [f"rollout.max_head_offpolicyness={eta}", "eval_gconfig.greedy=true"]
            every = "callbacks=[extras.doctor.Doctor,extras.report.Report,extras.summary.Summary]"
            made[eta] = folder, run(folder, *SMALL_GUESS, *words, every)
        return made[eta]

    return get


@pytest.mark.parametrize("eta", [0, pytest.param(2, marks=pytest.mark.runs)])
def test_no_token_is_older_than_eta(guess_run, eta: int) -> None:
    """With eta = 0 every trained token has the current version. After each update the canary finds
    the trainer's weights in the servers."""
    _, metrics = guess_run(eta)
    assert len(metrics) == 5
    check_metrics(metrics, eta)
    assert all(line["canary_mismatch"] < 1e-4 for line in metrics[1:])
    assert all(line["canary_unchanged"] == 0 for line in metrics[1:])


def test_evaluation_is_greedy_and_training_samples(guess_run) -> None:
    """The demo's prompt is always the same. So all greedy episodes begin with the same answer, but
    sampled episodes with different ones."""
    folder, metrics = guess_run(0)

    def first_answers(kind: str) -> set[str]:
        files = (folder / "e/t" / kind).glob("*/*.jsonl")
        lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
        return {line["completion"].partition("<end>")[0] for line in lines}

    assert metrics[-1]["eval_episodes"] == 6
    assert len(first_answers("eval-rollout")) == 1 < len(first_answers("rollout"))


@pytest.mark.runs
@pytest.mark.parametrize("eta", [0, 2])
def test_updates_interrupt_completions(tmp_path: Path, eta: int) -> None:
    """With eta = 2, completions have tokens of several versions; with eta = 0, none has."""
    words = ["max_steps=5", f"rollout.max_head_offpolicyness={eta}"]
    metrics = run(tmp_path, *STRADDLING_MAZE, *words)
    check_metrics(metrics, eta)
    assert (max(line["mixed_version_share"] for line in metrics) > 0) == (eta > 0)


def test_decoupled_is_standard_where_the_data_is_fresh(guess_run) -> None:
    """With eta = 0, pi_prox and pi_behav are one policy, computed by trainer and server.

    So the losses differ per token by at most about c |A| |log pi_prox - log pi_behav|, because c =
    c_clip = 2 is the largest factor of A in the objective. The test allows 2.5.
    """
    folder, metrics = guess_run(0)
    clip: dict[str, Any] = {"eps_clip": 0.2, "eps_clip_higher": 0.28, "c_clip": 2.0}
    for line in metrics:
        t = load_file(folder / "e/t/tokens" / f"{line['step']:05d}.safetensors")
        theta, prox, old = t["theta_logp"], t["prox_logp"], t["logprobs"]
        rest = (t["advantages"], t["loss_mask"])
        loss, stats = ppo_actor_loss_fn(theta, prox, old, *rest, **clip)
        plain, _ = ppo_actor_loss_fn(theta, old, old, *rest, **clip)
        apart, trained = line["logp_mismatch"], t["loss_mask"] > 0
        assert (prox - old)[trained].abs().max().item() <= apart < 1e-4
        bound = 2.5 * apart * t["advantages"][trained].abs().mean().item() + 1e-7
        assert abs(loss - plain).item() <= bound
        assert abs(stats["behave_weight_mean"].item() - 1) <= 2 * apart + 1e-6


def test_what_a_run_writes(guess_run) -> None:
    """A configuration, a trace, a report, trajectories as text and as tokens, and a model that
    transformers loads."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = guess_run(0)[0] / "e" / "t"
    config = (folder / "config.yaml").read_text()
    assert "max_head_offpolicyness: 0" in config
    assert config.startswith("# revision ")
    events = json.loads((folder / "trace.json").read_text())
    told = {event.get("args", {}).get("event") for event in events}
    assert {"submit", "start", "finish", "accept", "consume"} <= told
    assert '"max_steps":5' in (folder / "report.html").read_text().replace(": ", ":")
    files = [*folder.glob("rollout/*/*.jsonl")]
    dumps = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    keys = ["task_id", "sample_idx", "seqlen", "prompt_len", "head_version", "tail_version"]
    assert dumps
    assert all(list(dump) == [*keys, "reward", "prompt", "completion"] for dump in dumps)
    tokens = load_file(folder / "tokens" / "00001.safetensors")
    three = {"logprobs", "prox_logp", "theta_logp"}
    assert three | {"input_ids", "versions", "loss_mask", "turn_ids", "turn_rewards"} <= set(tokens)
    assert [log.name for log in folder.glob("logs/*.log") if "Traceback" in log.read_text()] == []
    last = folder / "checkpoints" / "step00005"
    AutoModelForCausalLM.from_pretrained(last)
    AutoTokenizer.from_pretrained(last)


@pytest.mark.runs
@pytest.mark.parametrize("name", ["checkpoints", "recover"])
def test_an_error_of_the_trainer_is_told(tmp_path: Path, name: str) -> None:
    """Python's exception is printed, and the last line says how to continue the run, even if torch
    raises what is no Exception."""
    folder = tmp_path / "e" / "t"
    folder.mkdir(parents=True)
    (folder / name).write_text("in the way")
    words = [*SMALL_GUESS, "saver.interval=2", "recover_interval=2", "max_steps=50"]
    done = finish(command(tmp_path, *words), code=1)
    assert "NotADirectoryError" in done.stderr or "FileExistsError" in done.stderr
    assert "to go on from " in done.stderr.splitlines()[-1]
    assert len(metrics_of(tmp_path)) == 1 + (name == "recover")
