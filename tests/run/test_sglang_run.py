"""Runs that train on a CPU with the real SGLang as their server (`make test-sglang`).

The task is the maze, whose answers are long enough to be interrupted by updates. SGLang computes in
bfloat16 and the trainer in float32, so their log-probabilities differ, by at most 0.07 nats in
200,000 measured tokens.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, variance

import httpx
import pytest
from conftest import ROOT, SGLANG, rest_of, run_sglang
from runs import STRADDLING_MAZE, assert_gone, command, finish, metrics_of, run, start_until_step

from tasks import maze

pytestmark = pytest.mark.skipif(not SGLANG, reason="needs SGLang: make test-sglang")

STEPS, ETA, MISMATCH = 30, 2, 0.2
DATA = "tests/data/gsm8k.jsonl"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("maze") / "model"
    maze.make_model(path, seed=1)
    return path


@pytest.fixture(scope="module")
def sglang(model_dir: Path) -> Iterator[str]:
    """The URL of an SGLang server, which every run of this file gives its own weights."""
    sizes = ("--dtype", "bfloat16", "--max-total-tokens", "32768", "--max-running-requests", "32")
    with run_sglang(model_dir, model_dir.parent / "sglang.log", *sizes) as url:
        yield url


def train(url: str, model_dir: Path, folder: Path, *words: str) -> list[dict]:
    where = [f"rollout.server_addrs=[{url}]", f"model_path={model_dir}"]
    where += [f"rollout.max_head_offpolicyness={ETA}"]
    metrics = run(folder, *STRADDLING_MAZE, *words, *where)
    for step, line in enumerate(metrics, start=1):
        assert (line["step"], line["version"]) == (step, step - 1)
        assert 0 <= line["staleness_max"] <= ETA
        assert line["logp_mismatch"] < MISMATCH
        assert line["failed"] == line["failed_members"] == line["dropped"] == 0
    assert httpx.get(url + "/model_info").json()["weight_version"] == str(len(metrics))
    return metrics


def test_a_run_on_sglang_learns(sglang: str, model_dir: Path, tmp_path: Path) -> None:
    """The reward rises by more than two standard errors, and updates interrupt some answers."""
    metrics = train(sglang, model_dir, tmp_path, f"max_steps={STEPS}")
    rewards = [line["reward"] for line in metrics]
    first, last = rewards[:5], rewards[-5:]
    error = (variance(first) / 5 + variance(last) / 5) ** 0.5
    print(f"reward {mean(first):.3f} -> {mean(last):.3f}, standard error {error:.3f}")
    assert mean(last) - mean(first) > 2 * error
    assert any(line["mixed_version_share"] > 0 for line in metrics)
    assert any(line["staleness_max"] > 0 for line in metrics)


def test_weights_move_without_a_file(sglang: str, model_dir: Path, tmp_path: Path) -> None:
    """Mode distributed, with gloo in place of NCCL."""
    train(sglang, model_dir, tmp_path, "max_steps=4", "weight_update.mode=distributed")
    assert not [*(tmp_path / "e/t").glob("weights*")]


def recipe(model_dir: Path) -> list[str]:
    """A small run of the recipe gsm8k that starts the real SGLang on a CPU."""
    words = ["--config", "gsm8k", f"model={model_dir}", f"data={DATA}"]
    words += [f"valid_dataset.path={DATA}"]
    words += ["server.backend=sglang", "max_steps=3", "callbacks=[]", "actor.dtype=float32"]
    words += ["gconfig.n_samples=2", "gconfig.max_new_tokens=12", "train_dataset.batch_size=3"]
    return [*words, "server.max_total_tokens=16384", "server.max_running_requests=16"]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs start SGLang by the launcher that makes it run without a GPU."""
    monkeypatch.setenv("POCKET_AREAL_SGLANG", f"{SGLANG} {ROOT}/tests/sglang_cpu/launch.py")
    monkeypatch.setattr("runs.WITH_TEST_MODULES", {**os.environ, "PYTHONPATH": str(ROOT / "tests")})


def check_three_steps(folder: Path) -> None:
    metrics = metrics_of(folder)
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert all(line["failed"] == 0 and line["logp_mismatch"] < MISMATCH for line in metrics)


def test_two_ranks_start_sglang(on_cpu: None, tiny_model_dir: Path, tmp_path: Path) -> None:
    """Rank 0 starts it, and both ranks train."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = command(tmp_path, *recipe(tiny_model_dir), "evaluator.interval=0")
    finish([*torchrun, *words[2:]])
    check_three_steps(tmp_path)


def test_the_gsm8k_recipe_starts_sglang(on_cpu: None, tiny_model_dir: Path, tmp_path: Path) -> None:
    """A plan names its processes and starts none; the run ends all of them."""
    whole = command(tmp_path, *recipe(tiny_model_dir), "evaluator.interval=2")
    plan = finish([sys.executable, "-m", "extras.plan", *whole[3:]]).stdout
    for part in ("rank 0", "sglang_cpu/launch.py", "proxy", "GiB"):
        assert part in plan
    assert not (tmp_path / "e").exists()
    process, pids = start_until_step(tmp_path, *whole[3:])
    output = rest_of(process, 300)
    assert process.returncode == 0, output[-3000:]
    check_three_steps(tmp_path)
    assert "eval_reward" in metrics_of(tmp_path)[1]
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
    """If NCCL_CUMEM_ENABLE is unset, both set it to 0; with different values, their group may
    hang."""
    here = {name: text for name, text in os.environ.items() if name != "NCCL_CUMEM_ENABLE"}
    here |= {"PYTHONPATH": str(ROOT / "tests/sglang_cpu"), **inherited}
    words = [SGLANG, "-c", ENVIRONMENT, str(model_dir)]
    done = subprocess.run(words, env=here, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == [f"CUMEM {value}"], done.stderr[-2000:]
