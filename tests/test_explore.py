"""Every property that tests/explore checks has planted errors, and docs/results.md names no other
property."""

import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import ROOT
from explore import dispatcher, turns, updates
from test_explore_calls import MUTANTS as of_calls
from test_explore_dispatcher import MUTANTS as of_dispatcher
from test_explore_updates import MUTANTS as of_updates

TESTS: dict[ModuleType, Any] = {dispatcher: of_dispatcher, turns: of_calls, updates: of_updates}


@pytest.mark.parametrize("machine", TESTS)
def test_each_property_has_two_planted_errors(machine: ModuleType) -> None:
    """docs/results.md names every property of the dispatcher and of weight updates, and some of the
    properties of calls."""
    planted = Counter(error[0] for error in TESTS[machine])
    assert min(planted.values()) >= 2
    source = Path(str(machine.__file__)).read_text()
    reported = set(re.findall(r"(?:Broken|self\.fail)\(\s*\"(\w+)\"", source))
    assert reported | {"deadlock"} == planted.keys()
    kind = machine.__name__.rpartition(".")[2]
    page = (ROOT / "docs/results.md").read_text()
    rows = re.findall(rf"\| {kind}: ([\w, ]+) \|$", page, re.MULTILINE)
    named = {name for names in rows for name in names.split(", ")}
    assert named <= planted.keys()
    assert named == planted.keys() or machine is turns
