"""Tests of the museum's exhibits: every patch applies to this code, and with the patch the unit test of the exhibit's
solution fails.

The reader's exercise is to find an exhibit's bug from a run's report (museum/README.md).
"""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from test_docs import running_tests

from run.doctor import TEXTS

MUSEUM: dict[str, Any] = runpy.run_path(str(ROOT / "museum" / "run.py"))
EXHIBITS: list[str] = MUSEUM["EXHIBITS"]


def page(name: str, file: str) -> str:
    return (ROOT / "museum" / name / file).read_text()


@pytest.mark.parametrize("name", EXHIBITS)
def test_every_patch_applies(name: str) -> None:
    """The exhibit's patch applies to the current code. If a patch no longer applies, museum/README.md says how to
    refresh the patch."""
    command = ["git", "apply", "--check", f"museum/{name}/bug.patch"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", EXHIBITS)
def test_every_exhibit_has_its_pages(name: str) -> None:
    """An exhibit has a source, a command and questions. The exhibit's solution names a unit test, a rule of
    run/doctor.py and a place in the code. All three exist. README.md lists the exhibit."""
    exhibit, solution = page(name, "exhibit.md"), page(name, "solution.md")
    [source] = re.findall(r"\((https://github\.com/\S+/(?:pull|issues)/\d+)\)", exhibit)
    assert source in solution
    assert source.endswith("/" + name.rpartition("-")[2])
    assert MUSEUM["RUN"].findall(exhibit)
    assert len(re.findall(r"^\d\. ", exhibit, re.MULTILINE)) >= 3
    file, _, test = MUSEUM["find_in_solution"](name, "Unit test").partition("::")
    assert test in running_tests(ROOT / file)
    assert MUSEUM["find_in_solution"](name, "Doctor") in {*TEXTS, "none"}
    guards = re.findall(r"`([\w/]+\.py)::([\w.]+)`", solution.partition("## Guard in the code")[2])
    assert guards
    for module, attribute in guards:
        assert re.search(
            rf"\b(def|class) {attribute.split('.')[-1]}\b", (ROOT / module).read_text()
        ), attribute
    assert f"[{name}]({name}/exhibit.md)" in (ROOT / "museum" / "README.md").read_text()


def test_every_bug_breaks_its_unit_test() -> None:
    """Each exhibit's solution names a unit test. The unit test passes in the test suite, and fails in a copy of the
    project that has the exhibit's bug."""
    command = [sys.executable, "museum/run.py", "--tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert json.loads(done.stdout) == dict.fromkeys(EXHIBITS, 1), done.stderr


@pytest.mark.runs
@pytest.mark.parametrize("name", ["trl-2824", "trl-3029", "verl-7495"])
def test_the_doctor_finds_a_bug_within_five_steps(name: str) -> None:
    """In a short run with the bug, the doctor reports the rule that the solution names."""
    folder: Path = MUSEUM["show"](name, seconds=200)
    assert MUSEUM["findings"](folder).get(MUSEUM["find_in_solution"](name, "Doctor"), 99) <= 5
