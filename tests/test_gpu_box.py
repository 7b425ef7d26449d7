"""The kit that measures a GPU box (bench/gpu) is tried on a CPU, with tiny sizes."""

import json
import os
import re
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from runs import finish

CELLS = ["push", "packed", "tree", "decode", "gsm8k_tiny"]


@pytest.mark.runs
def test_the_cells_leave_a_page_and_json(tmp_path: Path) -> None:
    """On a CPU the figures mean nothing, but the trainer's log-probabilities are right."""
    folders = {name: str(tmp_path / name.lower()) for name in ("OUT", "WORK", "SITE")}
    env = {**os.environ, **folders, "PY": sys.executable}
    finish(["bash", "bench/gpu/box.sh", "--cpu", "--budget", "58", *CELLS], env=env)
    page = (tmp_path / "out/summary.md").read_text()
    title, cells = json.loads((tmp_path / "out/summary.json").read_text()).values()
    assert [c["rc"] for c in cells] == [0] * (len(CELLS) + 2), page  # info, make-model
    assert page.startswith(f"# {title}\n")
    assert all(f"\n| {c['cell']} | 0 | " in page for c in cells)
    last = {c["cell"]: c["figures"][-1] for c in cells if c["figures"]}
    assert max(last[name]["trainer_vs_fp32"]["max"] for name in ("packed", "tree")) < 1e-5
    assert last["gsm8k-tiny"]["steps"] == 2


def test_the_box_has_every_package_that_its_packages_require() -> None:
    """Without a network, one missing wheel would stop every run."""
    listed = re.search(r'"(fastapi .*?)"', (ROOT / "bench/gpu/prepare.sh").read_text(), re.DOTALL)
    names = {canonicalize_name(name) for name in str(listed and listed[1]).split()}
    needed = [Requirement(text) for name in names for text in requires(name) or []]
    missing = {canonicalize_name(r.name) for r in needed if not r.marker or r.marker.evaluate({})}
    image = {"annotated-doc", "click", "markdown-it-py", "pygments"}  # the box's Python has these
    assert missing - names == image
