"""Tests of the start of a run, in this process: what `start_run` sets before it calls the training function."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from run.command import start_run
from run.config import load
from training.ranks import join_ranks, leave_ranks


@pytest.mark.parametrize(("offload", "threads"), [("true", 3), ("false", 1)])
def test_an_offloaded_optimizer_gets_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offload: str, threads: int
) -> None:
    """With actor.offload two ranks share six cores. Without actor.offload a rank has one thread."""
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    nothing: Any = None
    config, seen = load([f"actor.offload={offload}", f"fileroot={tmp_path}", "trial_name=t"]), []
    config.run_dir.mkdir(parents=True)
    torch.set_num_threads(1)
    join_ranks()
    try:
        with ExitStack() as stack:
            start_run(config, nothing, [], stack, lambda run: seen.append(torch.get_num_threads()))
    finally:
        leave_ranks()
        torch.set_num_threads(1)
    assert seen == [threads]
