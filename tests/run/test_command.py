"""Tests of the start of a run, in this process: what `open_run` sets for its block."""

import os
from pathlib import Path

import pytest
import torch

from run.command import open_run
from run.config import load


@pytest.mark.parametrize(("offload", "threads"), [("true", 3), ("false", 1)])
def test_an_offloaded_optimizer_gets_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offload: str, threads: int
) -> None:
    """With actor.offload two ranks share six cores. Without actor.offload a rank has one thread."""
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    torch.set_num_threads(1)
    try:
        with open_run(load([f"actor.offload={offload}", f"fileroot={tmp_path}", "trial_name=t"])):
            seen = torch.get_num_threads()
    finally:
        torch.set_num_threads(1)
    assert seen == threads
