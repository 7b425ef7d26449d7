"""The kit that measures a GPU box (bench/gpu) is tried on a CPU, with tiny sizes."""

import json
import os
import sys
from pathlib import Path

import pytest
from runs import finish

CELLS = ["push", "packed", "tree", "decode", "gsm8k_tiny"]


@pytest.mark.runs
def test_the_cells_leave_a_page_and_json(tmp_path: Path) -> None:
    """On a CPU the figures mean nothing, but the trainer's log-probabilities are right."""
    folders = {name: str(tmp_path / name.lower()) for name in ("OUT", "WORK", "SITE")}
    env = {**os.environ, **folders, "PY": sys.executable}
    finish(["bash", "bench/gpu/box.sh", "--cpu", "--budget", "58", *CELLS], env=env)
    page = (tmp_path / "out/summary.md").read_text()
    cells = {c["cell"]: c for c in json.loads((tmp_path / "out/summary.json").read_text())}
    assert [c["rc"] for c in cells.values()] == [0] * (len(CELLS) + 2), page  # info, make-model
    assert all(f"\n| {name} | 0 | " in page for name in cells)
    for name in ("packed", "tree"):
        assert cells[name]["figures"][-1]["trainer_vs_fp32"]["max"] < 1e-5
    assert cells["gsm8k-tiny"]["figures"][-1]["steps"] == 2
