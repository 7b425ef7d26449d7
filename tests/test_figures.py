"""These tests check the figures of the pages: docs/figures.py draws the figures from numbers that
the repository keeps."""

import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from conftest import ROOT
from safetensors.torch import save_file

sys.path.insert(0, str(ROOT / "docs"))

import figures

from cache import InteractionCache


@pytest.fixture(scope="module")
def pictures() -> dict[str, str]:
    """Draw every figure again, and return each figure's name and SVG text."""
    return figures.draw_all()


def test_every_figure_is_what_its_command_draws(pictures: dict[str, str]) -> None:
    """Each committed figure is identical to the figure that `python docs/figures.py` draws."""
    docs = ROOT / "docs"
    changed = [name for name in pictures if (docs / name).read_text() != pictures[name]]
    assert changed == [], "run `python docs/figures.py`"


def test_every_figure_has_a_title_and_stays_inside(pictures: dict[str, str]) -> None:
    """A figure is well-formed, and has a title for screen readers and colours for dark mode. No
    rectangle of a figure extends beyond the picture's edges."""
    for name, picture in pictures.items():
        root = ElementTree.fromstring(picture)
        width, height = map(float, root.attrib["viewBox"].split()[2:])
        assert root[0].tag.endswith("title"), name
        assert root[0].text, name
        assert "prefers-color-scheme: dark" in picture, name
        for box in root.iter("{http://www.w3.org/2000/svg}rect"):
            x, y, w, h = (float(box.attrib.get(side, 0)) for side in ("x", "y", "width", "height"))
            assert 0 <= x <= x + w <= width, (name, box.attrib)
            assert 0 <= y <= y + h <= height, (name, box.attrib)


def test_every_figure_is_on_a_page(pictures: dict[str, str]) -> None:
    """README.md or a page of docs/ shows each figure."""
    pages = "".join(path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")])
    assert [
        name
        for name in pictures
        if not re.search(rf"!\[[^]]+\]\((docs/)?{re.escape(name)}\)", pages)
    ] == []


def test_the_tree_shows_the_rewards_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure of the tree shows the rewards that cache.py computes. In this tree turn B has the
    reward 0.5 * mean(1, 0) = 0.25, and turn A has the reward 0.5 * mean(0.25, 0.5) = 0.1875."""
    assert figures.compute_rewards() == {"A": 0.1875, "B": 0.25, "C": 0.5, "D": 1.0, "E": 0.0}
    before = figures.draw_tree()
    monkeypatch.setattr(InteractionCache, "apply_reward_discount", lambda self, discount: None)
    assert figures.draw_tree() != before


def test_the_times_of_a_run_are_read(tmp_path: Path) -> None:
    """`read_run` takes groups, steps and updates from trace.json, and the versions of trained
    tokens from tokens/."""
    events: list[dict[str, Any]] = [
        {"ph": "b", "name": "group", "id": "1:0", "ts": 1e6},
        {"ph": "e", "name": "group", "id": "1:0", "ts": 3e6},
        {"ph": "X", "name": "rollout_wait", "ts": 1e6, "dur": 2e6},
        {"ph": "X", "name": "train", "ts": 3e6, "dur": 1e6},
        {"ph": "X", "name": "sync", "ts": 4e6, "dur": 5e5},
    ]
    (tmp_path / "trace.json").write_text("[\n" + ",\n".join(map(json.dumps, events)) + "\n]\n")
    (tmp_path / "tokens").mkdir()
    batch = {"versions": torch.tensor([[-1, 0, 0, 1]]), "turn_ids": torch.tensor([[-1, 0, 0, 0]])}
    save_file(batch, tmp_path / "tokens" / "00001.safetensors")
    assert figures.read_run(tmp_path, 1) == {
        "groups": [[0.0, 2.0]],
        "waits": [[0.0, 2.0]],
        "trains": [[2.0, 3.0]],
        "updates": [[3.0, 3.5]],
        "trained": [{0: 2, 1: 1}],
    }
