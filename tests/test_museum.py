"""The museum's patches apply, and the tests and rules that its solutions name find the bugs."""

import json
import re
import runpy
import subprocess
import sys
from typing import Any

import pytest
from conftest import ROOT

from extras.doctor import RULES
from run.config import load
from tasks import maze

MUSEUM: dict[str, Any] = runpy.run_path(str(ROOT / "museum" / "run.py"))
EXHIBITS: list[str] = MUSEUM["EXHIBITS"]


def page(name: str, file: str) -> str:
    return (ROOT / "museum" / name / file).read_text()


def test_there_are_twelve_exhibits() -> None:
    """README.md lists each of them."""
    assert len(EXHIBITS) == 12
    listed = re.findall(r"^\| \[([\w-]+)\]", (ROOT / "museum/README.md").read_text(), re.MULTILINE)
    assert listed == EXHIBITS


@pytest.mark.parametrize("name", EXHIBITS)
def test_every_patch_applies(name: str) -> None:
    """museum/README.md says how to renew a patch that no longer applies."""
    command = ["git", "apply", "--check", f"museum/{name}/bug.patch"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", EXHIBITS)
def test_every_exhibit_has_its_pages(name: str) -> None:
    """An exhibit has a source, a command and three questions. Its solution names a test, a rule and
    a guard that exist."""
    exhibit, solution = page(name, "exhibit.md"), page(name, "solution.md")
    [source] = re.findall(r"\((https://github\.com/\S+/(?:pull|issues)/\d+)\)", exhibit)
    assert source in solution
    assert source.endswith("/" + name.rpartition("-")[2])
    assert MUSEUM["commands"](name)
    assert len(re.findall(r"^\d\. ", exhibit, re.MULTILINE)) == 3
    file, _, test = MUSEUM["in_solution"](name, "Unit test").partition("::")
    assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE)
    assert MUSEUM["in_solution"](name, "Doctor") in {rule.name for rule in RULES}
    guards = re.findall(r"`([\w/]+\.py)::([\w.]+)`", solution.partition("## Guard in the code")[2])
    assert guards
    for module, attribute in guards:
        last = attribute.split(".")[-1]
        assert re.search(rf"\b(def|class) {last}\b", (ROOT / module).read_text()), attribute


def test_every_bug_breaks_its_unit_test() -> None:
    """The test passes in the suite, and fails in a copy with the bug."""
    command = [sys.executable, "museum/run.py", "--tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert json.loads(done.stdout) == dict.fromkeys(EXHIBITS, 1), done.stderr


def test_the_longest_way_of_the_maze_fits_into_an_answer() -> None:
    """An answer names every cell of a walk, and the limit allows twice the cells of the longest
    way."""
    limit = load(["--config", "maze"])[0].gconfig.max_new_tokens
    ways = [maze.distances(row["home"])[maze.CELLS[row["start"]]] for row in maze.dataset()]
    assert limit >= 2 * (max(ways) + 1)


@pytest.mark.runs
@pytest.mark.parametrize("name", ["trl-2824", "trl-3029", "verl-7495"])
def test_the_doctor_ends_a_run_with_a_bug(name: str) -> None:
    """The run ends within five steps, by the rule that the solution names. The command prints the
    rule's text."""
    words = [sys.executable, "museum/run.py", name]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    said = MUSEUM["finding"](name)
    assert said["rule"] == MUSEUM["in_solution"](name, "Doctor")
    assert said["step"] <= 5
    assert f"The doctor has ended the run:\n{said['text']}" in done.stdout
    assert "to go on" not in done.stdout + done.stderr  # that would train on without the bug
