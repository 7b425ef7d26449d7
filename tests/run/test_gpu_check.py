"""On a CPU with a tiny model, bench/gpu_check.sh runs, reports that it found no GPU, and reports every failure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.runs


def test_the_script_on_a_cpu(tmp_path: Path) -> None:
    """The page shows a row of numbers for each successful run, and a row with the reason for each failed run."""
    work = tmp_path / "work"
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "SHAPE": "tiny",
        "STEPS": "2",
        "CELLS": "async-disk",
        "CHECKS": "",
        "WORK": str(work),
        "OUT": str(tmp_path / "gpu.md"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    failed = work / "cell-failed"
    failed.mkdir(parents=True)
    (failed / "code").write_text("1\n")
    (failed / "log").write_text("Traceback\nRuntimeError: out of luck\n")
    script = ["bash", "bench/gpu_check.sh"]
    done = subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "gpu.md").read_text()
    assert "no GPU" in page
    good, bad = (line for line in page.splitlines() if line.startswith("| cell-"))
    assert "| ok | inference/tiny/server.py |" in good
    assert float(good.split("|")[4]) > 0
    assert "failed: RuntimeError: out of luck" in bad


def test_the_page_claims_nothing_that_was_not_measured() -> None:
    """docs/gpu.md either states that nothing has been measured on a GPU, or names the GPU of its measurements."""
    page = (ROOT / "docs/gpu.md").read_text()
    assert "Nothing has been measured" in page or "every number was measured on: " in page
    assert "a check of the script, not a result" not in page
