"""These tests run the tour (docs/lifecycle.py) again, and compare its numbers with those of
docs/lifecycle.md."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.fixture(scope="module")
def tour() -> str:
    """The text of docs/lifecycle.md with the numbers of a new run of the tour."""
    command = [sys.executable, "docs/lifecycle.py"]
    return subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=400, check=True
    ).stdout


def blocks(page: str) -> list[list[str]]:
    """Return a list of lines for each block of `page` that is marked as text."""
    return [block.splitlines() for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL)]


def test_the_page_is_the_output_of_the_tour(tour: str) -> None:
    """A new run of the tour prints the page docs/lifecycle.md. Another processor rounds
    differently, so measured numbers may differ a little from those of the page. If the tour makes a
    different base model on this machine, nothing in the blocks has to agree."""
    page = (ROOT / "docs/lifecycle.md").read_text()
    model, committed = (re.findall(r"has the hash\s`(\w+)`", text) for text in (tour, page))
    if model == committed:
        number = re.compile(r"-?\d+\.\d+")
        words = [number.sub("", text) for text in (tour, page)]
        assert words[0] == words[1], "run `python docs/lifecycle.py --write`"
        ours, written = (list(map(float, number.findall(text))) for text in (tour, page))
        assert ours == pytest.approx(written, abs=0.05)
    without_blocks = (re.sub(r"(?s)```text.*?```|`\w{8}`", "", text) for text in (tour, page))
    assert len(set(without_blocks)) == 1


def test_the_tour_shows_an_update_in_the_middle_of_a_game(tour: str) -> None:
    """Two groups start at version 0 and a third one at version 1. The game that the tour shows has
    tokens of both versions."""
    gate, _, (_, versions, _), *_ = blocks(tour)
    assert [line.split()[-4:] for line in gate[1:]] == [list("0202"), list("0220"), list("1330")]
    assert versions.split() == ["version", "0", "0", *"1" * (len(versions.split()) - 3)]
    assert "1" in versions.split()


def test_the_numbers_by_hand_equal_the_numbers_of_the_code(tour: str) -> None:
    """The advantages and the loss that the tour computes by hand equal the trainer's."""
    *_, advantages, loss = blocks(tour)
    by_hand = [float(line.split()[-1]) for line in advantages[:-1]]
    code = [float(x) for x in advantages[-1].split()[2:]]
    assert code == pytest.approx([A for A in by_hand for _ in range(2)], abs=1e-3)
    assert any(by_hand), "a group in which every advantage is 0 shows nothing"
    assert "A = (1 - " in advantages[-2], "the game has found the number"
    assert float(loss[-2].split()[-1]) == pytest.approx(float(loss[-1].split()[-1]), abs=1e-5)
