"""In these tests, training runs on a CPU with the real SGLang as inference server. `make test-sglang` runs these tests.

The task is the maze (tasks/maze.py), because its answers are long enough to be interrupted by weight updates. SGLang
computes in bfloat16 and the trainer computes in float32, so the logprobs of SGLang and of the trainer differ. For each
token, the logprobs of SGLang and of the trainer must differ by less than MISMATCH nats. In a measurement with 200,000
tokens, the logprobs of SGLang and of the trainer differed by at most 0.07 nats.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, variance

import httpx
import pytest
from conftest import ROOT, SGLANG, rest_of, run_sglang
from runs import STRADDLING_MAZE, WITH_TEST_MODULES, assert_gone, command, start_and_wait_for_step

from tasks import maze

pytestmark = pytest.mark.skipif(not SGLANG, reason="needs SGLang: make test-sglang")

STEPS, ETA, MISMATCH = 30, 2, 0.2


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("maze") / "model"
    maze.make_model(path, seed=1)
    return path


@pytest.fixture(scope="module")
def sglang(model_dir: Path) -> Iterator[str]:
    """Yield the URL of an SGLang server with the maze's base model. After a run the server still has the weights of the
    run's last step."""
    sizes = ("--dtype", "bfloat16", "--max-total-tokens", "32768", "--max-running-requests", "32")
    with run_sglang(model_dir, model_dir.parent / "sglang.log", *sizes) as url:
        yield url


def train(url: str, model_dir: Path, folder: Path, *words: str) -> list[dict]:
    """Load the base model into the server, run train.py to the end, and return the lines of metrics.jsonl."""
    base = {"model_path": str(model_dir), "weight_version": "0"}
    assert (
        httpx.post(url + "/update_weights_from_disk", json=base, timeout=60).json()["success"]
        is True
    )
    fixed = [
        f"rollout.server_addrs=[{url}]",
        f"model_path={model_dir}",
        f"fileroot={folder}",
        "logger.live=false",
    ]
    named = ["experiment_name=e", "trial_name=t", f"rollout.max_head_offpolicyness={ETA}"]
    command = [sys.executable, "train.py", *STRADDLING_MAZE, *words, *fixed, *named]
    done = subprocess.run(
        command, cwd=ROOT, env=WITH_TEST_MODULES, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    metrics = [
        json.loads(line) for line in (folder / "e" / "t" / "metrics.jsonl").read_text().splitlines()
    ]
    for step, line in enumerate(metrics, start=1):
        assert (line["step"], line["version"]) == (step, step - 1)
        assert 0 <= line["staleness_max"] <= ETA
        assert line["logp_mismatch"] < MISMATCH
        assert line["failed"] == line["failed_members"] == line["dropped"] == 0
    assert httpx.get(url + "/model_info").json()["weight_version"] == str(len(metrics))
    return metrics


def test_a_run_on_sglang_learns(sglang: str, model_dir: Path, tmp_path: Path) -> None:
    """In a run with SGLang the reward rises by more than two standard errors, and weight updates interrupt some
    answers."""
    metrics = train(sglang, model_dir, tmp_path, f"max_steps={STEPS}")
    assert len(metrics) == STEPS
    rewards = [line["reward"] for line in metrics]
    first, last = rewards[:5], rewards[-5:]
    error = (variance(first) / 5 + variance(last) / 5) ** 0.5
    worst = max(line["logp_mismatch"] for line in metrics)
    print(
        f"reward {mean(first):.3f} -> {mean(last):.3f}, standard error {error:.3f}, worst mismatch {worst:.3f} nats"
    )
    assert mean(last) - mean(first) > 2 * error
    assert any(line["mixed_version_share"] > 0 for line in metrics)
    assert any(line["staleness_max"] > 0 for line in metrics)


@pytest.mark.parametrize("mode", ["distributed", "tensor"])
def test_a_run_moves_its_weights_without_a_file(
    sglang: str, model_dir: Path, tmp_path: Path, mode: str
) -> None:
    """In the update modes distributed and tensor, the server's logprobs stay close to the trainer's logprobs for four
    steps."""
    train(
        sglang,
        model_dir,
        tmp_path,
        "max_steps=4",
        f"weight_update.mode={mode}",
        "weight_update.bucket_mb=0.25",
    )
    assert not (tmp_path / "e" / "t" / "weights").exists()


def recipe(model_dir: Path) -> list[str]:
    """Return the command-line words for a small run of configs/gsm8k.yaml that starts the real SGLang on a CPU."""
    words = ["--config", "configs/gsm8k.yaml", f"model={model_dir}", "data=tests/data/gsm8k.jsonl"]
    words += [
        "server.backend=sglang",
        f"server.command={SGLANG} tests/sglang_cpu/launch.py",
        "max_steps=3",
    ]
    words += [
        "gconfig.n_samples=2",
        "gconfig.max_new_tokens=12",
        "train_dataset.batch_size=3",
        "evaluator.interval=2",
    ]
    return [
        *words,
        "actor.dtype=float32",
        "server.max_total_tokens=16384",
        "server.max_running_requests=16",
    ]


def check_three_steps(folder: Path) -> list[dict]:
    """Check that the run in folder/e/t made three steps without a failure, and return the lines of its
    metrics.jsonl."""
    metrics = [json.loads(line) for line in (folder / "e/t/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert all(line["failed"] == 0 and line["logp_mismatch"] < MISMATCH for line in metrics)
    return metrics


def test_two_ranks_of_torchrun_launch_sglang(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Under torchrun with two ranks, train.py starts SGLang and trains three steps."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = command(tmp_path, *recipe(tiny_model_dir), "evaluator.interval=0")[2:]
    done = subprocess.run(
        [*torchrun, *script], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    check_three_steps(tmp_path)


def test_the_gsm8k_recipe_launches_its_own_sglang(tiny_model_dir: Path, tmp_path: Path) -> None:
    """train.py starts SGLang, trains, and ends every process that it started.

    With --dry-run, train.py only prints the processes that it would start.
    """
    words = recipe(tiny_model_dir)
    whole = command(tmp_path, *words)
    plan = subprocess.run(
        [*whole, "--dry-run"], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert plan.returncode == 0, plan.stderr
    for part in ("rank 0", "sglang_cpu/launch.py", "proxy.py", "GPUs", "port", "GiB"):
        assert part in plan.stdout
    assert not (tmp_path / "e").exists()

    process, pids = start_and_wait_for_step(tmp_path, *words)
    output = rest_of(process, 300)
    assert process.returncode == 0, output[-3000:]
    metrics = check_three_steps(tmp_path)
    assert "eval_reward" in metrics[1]
    assert pids
    assert_gone(pids)


ENVIRONMENT = """
import os, sys
import launch
from sglang.srt.entrypoints.engine import _set_envs_and_config
from sglang.srt.server_args import prepare_server_args
options = [word for option in launch.DEFAULTS.items() for word in option]
_set_envs_and_config(prepare_server_args(["--model-path", sys.argv[1], *options, *launch.FLAGS]))
print("CUMEM", os.environ["NCCL_CUMEM_ENABLE"])
"""


@pytest.mark.parametrize(("inherited", "value"), [({}, "0"), ({"NCCL_CUMEM_ENABLE": "1"}, "1")])
def test_sglang_configures_nccl_like_the_trainer(
    model_dir: Path, inherited: dict[str, str], value: str
) -> None:
    """If the environment does not set NCCL_CUMEM_ENABLE, SGLang and the trainer (training/ranks.py) set it to 0. If
    SGLang and the trainer have different values of NCCL_CUMEM_ENABLE, the NCCL group of the update mode distributed may
    hang."""
    here = {name: text for name, text in os.environ.items() if name != "NCCL_CUMEM_ENABLE"}
    here |= {"PYTHONPATH": str(ROOT / "tests/sglang_cpu"), **inherited}
    shown = [SGLANG, "-c", ENVIRONMENT, str(model_dir)]
    done = subprocess.run(shown, env=here, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-1] == f"CUMEM {value}"
