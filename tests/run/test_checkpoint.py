"""A run that is killed goes on from its last checkpoint. Each step is recorded once, no prompt is
skipped, and none is trained twice."""

import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch.distributed as dist
from runs import SMALL_GUESS, command, finish, metrics_of, signalled
from safetensors.torch import load_file

from run.checkpoint import load_checkpoint, save_checkpoint
from run.config import ConfigError
from training.ranks import join_ranks

SMALL = [*SMALL_GUESS, "actor.ppo_epochs=1", "recover_interval=1", "train_dataset.batch_size=3"]


class Part:
    """A trainer whose state is one number, and an executor that has consumed some prompts."""

    def __init__(self) -> None:
        self.state: Any = 0

    def save_state(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model").write_text(str(self.state))

    def load_state(self, folder: Path) -> None:
        self.state = int((folder / "model").read_text())

    def state_dict(self) -> dict[str, Any]:
        return {"next_id": self.state, "open": []}

    def load_state_dict(self, state: dict[str, Any], version: int) -> None:
        self.state = state["next_id"], version


def save(run_dir: Path, step: int) -> None:
    actor, executor = Part(), Part()
    actor.state, executor.state = 10 * step, step
    save_checkpoint(run_dir, step, actor, executor)


@pytest.fixture
def ranks():
    join_ranks()
    yield
    dist.destroy_process_group()


def test_a_checkpoint_is_everything_that_a_run_goes_on_with(ranks: None, tmp_path: Path) -> None:
    """Trainer and executor go on where they were. The last two checkpoints are kept."""
    assert load_checkpoint(tmp_path, Part(), Part()) == 0
    for step in (9, 10, 11):
        save(tmp_path, step)
    names = sorted(path.name for path in (tmp_path / "recover").iterdir())
    assert names == ["step00010", "step00011"]
    actor, executor = Part(), Part()
    assert load_checkpoint(tmp_path, actor, executor) == 11
    assert (actor.state, executor.state) == (110, (11, 11))


def flip(path: Path) -> None:
    """Change one bit in the middle of the file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model", "rollout.json", "sums.json"])
@pytest.mark.parametrize("damage", [partial(os.truncate, length=1), flip, Path.unlink])
def test_a_damaged_checkpoint_means_the_one_before(
    ranks: None, tmp_path: Path, name: str, damage: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line names the file. The run then writes the damaged checkpoint anew. If no checkpoint is
    whole, an error asks the user to decide."""
    for step in (9, 10):
        save(tmp_path, step)
    recover = tmp_path / "recover"
    damage(recover / "step00010" / name)
    assert load_checkpoint(tmp_path, Part(), Part()) == 9
    [line] = capsys.readouterr().out.splitlines()
    assert re.match(rf"{recover}/step00010/\S+ is missing or damaged", line)
    assert name in line or (name, damage) == ("sums.json", flip)
    save(tmp_path, 10)
    assert load_checkpoint(tmp_path, Part(), Part()) == 10
    for folder in recover.iterdir():
        damage(folder / name)
    with pytest.raises(ConfigError, match=f"remove {recover}"):
        load_checkpoint(tmp_path, Part(), Part())


# ---- whole runs


def run_until(folder: Path, line: str, *words: str) -> None:
    """Start a run that kills itself (SIGKILL) when it prints `line`, and wait for its end."""
    finish(signalled(command(folder, *SMALL, *words), line, signal.SIGKILL), -signal.SIGKILL)


def check_lineage(folder: Path, batch: int, eta: int) -> None:
    """Check that each step is there once, and each group in exactly one step, none skipped or too
    old."""
    metrics, trained = metrics_of(folder), []
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
    for line in metrics:
        tokens = load_file(folder / f"e/t/tokens/{line['step']:05d}.safetensors")
        trained += sorted(set(tokens["group_ids"].tolist()))
        assert line["staleness_max"] <= eta
        assert int(tokens["versions"].max()) <= line["version"]
    assert trained == list(range(batch * len(metrics))), "in order of the data, without a gap"


@pytest.mark.runs
def test_a_synchronous_run_repeats_through_kills(tmp_path: Path) -> None:
    """A run that was killed twice has the metrics of one that was not."""
    words = ("max_steps=4", "rollout.max_head_offpolicyness=0")
    finish(command(tmp_path / "whole", *SMALL, *words))
    for line in ("step 2 ", "starting server-0"):
        run_until(tmp_path / "killed", line, *words)
    finish(command(tmp_path / "killed", *SMALL, *words))
    check_lineage(tmp_path / "killed", batch=3, eta=0)
    for one, two in zip(*(metrics_of(tmp_path / name) for name in ("whole", "killed"))):
        for key in ("reward", "tokens", "staleness_max", "version"):
            assert one[key] == two[key], (one["step"], key)
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-5)


@pytest.mark.runs
def test_an_asynchronous_run_survives_kills_anywhere(tmp_path: Path) -> None:
    """Damaged files that are for display, and a damaged checkpoint, stop none of its restarts. A
    finished run that is started again has nothing to do."""
    words = ["max_steps=6", "rollout.max_head_offpolicyness=2"]
    words += ["callbacks=[extras.doctor.Doctor,extras.report.Report]"]
    for line in ("step 1 ", "starting server-0", "step 3 ", "step 4 "):
        run_until(tmp_path, line, *words)
        for name in ("metrics.jsonl", "trace.json", "doctor.jsonl"):
            with (tmp_path / "e/t" / name).open("ab") as file:
                file.write(b'\xff\n{}\n{"cut')
    flip(max((tmp_path / "e/t/recover").glob("step*/__0_0.distcp")))
    for more in ([], ["actor.optimizer.lr=1"]):
        said = finish(command(tmp_path, *SMALL, *words, *more)).stdout
        check_lineage(tmp_path, batch=3, eta=2)
    assert len(metrics_of(tmp_path)) == 6
    assert not re.search("^step ", said, re.M)
    assert "lr: 1.0" not in (tmp_path / "e/t/config.yaml").read_text()


@pytest.mark.runs
@pytest.mark.parametrize("left", ["ready", "in the middle of an update"])
def test_running_servers_get_the_weights_of_the_next_run(
    tmp_path: Path, start_tiny_server, left: str
) -> None:
    """Servers that outlive their run may be paused and have other weights, but step 1 still trains
    on tokens of version 0."""
    from tasks import guess

    guess.make_model(tmp_path / "base", 1)
    guess.make_model(tmp_path / "other", 2)
    url = start_tiny_server("--model-path", str(tmp_path / "other"), "--weight-version", "3")
    if left != "ready":
        httpx.post(f"{url}/pause_generation", json={"mode": "retract"})
        httpx.post(f"{url}/update_weight_version", json={"new_version": "4-incomplete"})
    words = [f"rollout.server_addrs=[{url}]", f"model_path={tmp_path / 'base'}", "max_steps=1"]
    finish(command(tmp_path, *SMALL, *words))
    [line] = metrics_of(tmp_path)
    assert line["staleness_max"] == 0
    assert line["logp_mismatch"] < 1e-4
