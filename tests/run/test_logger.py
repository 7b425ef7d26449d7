"""Tests of what the logger prints: the table of the steps, and a message about the first side conversation. A side
conversation is not trained."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from cache import InteractionCache, InteractionWithTokenLogpReward
from calls.messages import PLACEHOLDER
from inference.io_struct import ModelResponse
from rollout.trajectory import complete, concat_padded_tensors
from run.load import load
from run.logger import COLUMNS, Logger, as_text, describe_batch
from staleness import RolloutStat


@pytest.fixture
def logger(tmp_path: Path) -> Logger:
    """Return a logger whose last step is step 12 of 64. In step 12, one group was rejected, and 131 episodes of other
    groups failed."""
    words = [
        "experiment_name=e",
        "trial_name=t",
        "logger.live=false",
        "max_steps=64",
        "gconfig.n_samples=20",
    ]
    config = load([f"fileroot={tmp_path}", *words])
    config.run_dir.mkdir(parents=True)
    logger = Logger(config, SimpleNamespace(stats=RolloutStat(), ended=34))
    line = {key: 0 if text == "{:d}" else 0.5 for key, _, text in COLUMNS}
    logger.history = [line | {"step": 12, "wall_s": 60.0, "rejected": 1, "failed_members": 131}]
    return logger


@pytest.mark.parametrize(("width", "last"), [(80, "wait s"), (160, "sync s")])
def test_the_table_fits_the_terminal(
    logger: Logger, monkeypatch: pytest.MonkeyPatch, width: int, last: str
) -> None:
    """On a terminal of 80 columns, the table shows reward, staleness, time and failures without cutting any text. A
    wide terminal shows every column."""
    monkeypatch.setenv("COLUMNS", str(width))
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(logger._screen())
    file: Any = console.file
    head, row, *_, status = [line.rstrip() for line in file.getvalue().splitlines()]
    shown = [title for _, title, _ in COLUMNS]
    shown = shown[: shown.index(last) + 1]
    assert " ".join(head.split()) == " ".join(shown)
    assert {"reward", "stale", "time s", "rejected", "failed", "members"} <= set(shown)
    assert row.split()[shown.index("members")] == "131"
    assert "…" not in file.getvalue()
    assert "\n 1 of 64 steps; time 0:01:00, 0:04:20 left" in file.getvalue()
    assert status.endswith("; 0 of 6 groups; 34 episodes, 120 a batch")


def test_reports_take_a_small_share_of_the_time(
    logger: Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this test a step takes 1 s, and writing a report takes 1 s. A report is skipped if the earlier reports took
    more than 1/50 of the run's time."""
    seconds, written = [0.0], []

    def write(_: Path) -> None:
        written.append(step)
        seconds[0] += 1

    monkeypatch.setattr("run.logger.time", SimpleNamespace(monotonic=lambda: seconds[0]))
    monkeypatch.setattr("run.logger.write_report", write)
    for step in range(1, 121):
        logger._report(step, wall_s=step)
    assert written == [10, 50, 100]


def test_what_a_client_sends_unasked_is_counted_and_said_once(
    tiny_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of two steps has a request for a title, a call with `store: false` and an image. The metrics of both steps
    count the requests for a title, the calls with `store: false` and the images. Only in the first step, the logger
    prints a message about titles, a message about `store: false` and a message about images. The messages about
    requests for a title and about `store: false` name the configuration key."""
    cache = InteractionCache()
    for name, system in (("work", "You code."), ("title", "You write titles.")):
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": f"hello {PLACEHOLDER}"},
        ]
        ids = tiny_tokenizer.apply_chat_template(messages, return_dict=False)
        response = ModelResponse(ids, [5], [-0.5], [0], "stop")
        said = [{"role": "assistant", "content": "x"}]
        turn = InteractionWithTokenLogpReward(
            messages, model_response=response, output_message_list=said
        )
        turn.unstored = "ignore" if name == "work" else ""
        cache.enter(name, turn)
    cache.set_last_reward(1.0)
    cache.apply_reward_discount()
    rows = [i.to_tensor_dict() for i in cache.export_interactions("concat").values()]
    batch = complete(concat_padded_tensors(rows), 0)
    batch["advantages"] = torch.zeros(batch["input_ids"].shape)
    words = [
        f"fileroot={tmp_path}",
        "experiment_name=e",
        "trial_name=t",
        "logger.live=false",
        "logger.sample_interval=0",
    ]
    config = load([*words, "logger.tokens_interval=0"])
    config.run_dir.mkdir(parents=True)
    logger = Logger(config, SimpleNamespace(tokenizer=tiny_tokenizer, stats=RolloutStat()))
    keys = (
        "success",
        "entropy",
        "clip_frac",
        "logp_mismatch",
        "step_s",
        "rollout_wait_s",
        "train_s",
        "sync_s",
    )
    for step in (1, 2):
        logger.log(
            batch,
            {"step": step, "version": 0} | describe_batch(batch, 0) | dict.fromkeys(keys, 0.0),
        )
    lines = [
        json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["side_conversations"] for line in lines] == [1, 1]
    assert [line["unstored"] for line in lines] == [1, 1]
    assert [line["placeholders"] for line in lines] == [2, 2]
    assert torch.equal(batch["loss_mask"].sum(1), torch.tensor([1, 0]))
    side, unstored, image = [
        line for line in capsys.readouterr().out.splitlines() if " has the first " in line
    ]
    assert "rollout.openai.side_conversations" in side
    assert "You write titles." in side
    assert "rollout.openai.store" in unstored
    assert "You code." in unstored
    assert "image" in image


def test_a_mismatch_of_no_token_is_a_hyphen() -> None:
    """If a batch has no token of the current version, the metric `logp_mismatch` compares no tokens and is 0. For a
    `logp_mismatch` of 0 the terminal shows "-", because "0e+00" would look like a perfect match."""
    assert as_text({"logp_mismatch": 0.0}, "logp_mismatch", "{:.0e}") == "-"
    assert as_text({"logp_mismatch": 3e-6}, "logp_mismatch", "{:.0e}") == "3e-06"
    assert as_text({"failed": 0}, "failed", "{:d}") == "0"
