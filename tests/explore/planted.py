"""Copies of modules with one planted error, which the search must find."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .search import Broken, explore


def mutant(module: ModuleType, line: str = "", changed: str = "") -> ModuleType:
    """A copy of a module in which one piece of code is changed."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert not line or source.count(line) == 1, f"{line!r} is not in {module.__name__} one time"
    spec = importlib.util.spec_from_loader(module.__name__, loader=None)
    assert spec is not None
    copy = importlib.util.module_from_spec(spec)
    exec(compile(source.replace(line, changed), module.__file__, "exec"), vars(copy))
    return copy


def with_mutant(
    modules: Iterable[ModuleType], module: ModuleType, line: str, changed: str
) -> list[ModuleType]:
    """Copies of the modules, which use each other instead of the originals. The copy of `module`
    has the error. In `modules`, each module comes after those that it imports."""
    copies: dict[ModuleType, ModuleType] = {}
    for original in modules:
        changes = (line, changed) if original is module else ()
        copies[original] = copy = mutant(original, *changes)
        for before, twin in copies.items():
            for name in vars(copy).keys() & vars(before).keys():
                if vars(copy)[name] is vars(before)[name]:
                    setattr(copy, name, vars(twin)[name])
        for name, value in list(vars(copy).items()):
            if isinstance(value, ModuleType) and value in copies:
                setattr(copy, name, copies[value])
    return list(copies.values())


def find_error(machine: Any, name: str) -> str:
    """Explore a machine with a planted error that breaks property `name`. Return the story."""
    with pytest.raises(Broken) as caught:
        explore(machine, keep=False)
    assert caught.value.name == name, caught.value
    assert "\n   1. " in str(caught.value)
    return str(caught.value)
