"""The properties that tests/explore checks, the errors that its tests plant, and the documents name
the same."""

import re
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import test_explore_calls
import test_explore_dispatcher
import test_explore_updates
from conftest import ROOT
from explore import dispatcher, turns, updates


@pytest.mark.parametrize(
    ("machine", "tests"),
    [
        (dispatcher, test_explore_dispatcher),
        (turns, test_explore_calls),
        (updates, test_explore_updates),
    ],
)
def test_each_property_has_two_planted_errors(machine: ModuleType, tests: Any) -> None:
    """docs/results.md names only explored properties, and not all of the calls'."""
    planted = Counter(name for name, *_ in tests.MUTANTS)
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
