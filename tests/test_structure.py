"""The house: which module may import which.

Each of the seven modules at the top level draws in few others, the core never imports extras/, and
only train.py and run/ import the modules that launch and log. Imports inside functions count.
"""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from conftest import ROOT

SEVEN = ("staleness", "engine", "cache", "proxy", "workflow", "ppo", "train")
ABOVE = {"run.start", "run.log", "run.checkpoint", "run.inputs", "rollout.launch", "train"}
ROOMS = ("rollout", "calls", "inference", "training", "run")  # and the seven: the core
PATHS = [ROOT / f"{name}.py" for name in SEVEN]
PATHS += [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
BESIDE = [path for room in ("tasks", "extras") for path in sorted((ROOT / room).glob("*.py"))]
MODULES = PATHS + BESIDE


def name_of(path: Path) -> str:
    """The dotted name of a module: calls.messages, or calls for calls/__init__.py."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """All modules of the project that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found & NAMES - {name_of(path)}


NAMES = {name_of(path) for path in MODULES}
GRAPH = {name_of(path): imports(path) for path in MODULES}
PACKAGES = {name_of(path) for path in MODULES if path.name == "__init__.py"}


def closure(name: str) -> set[str]:
    """All modules that importing `name` draws in."""
    seen: set[str] = set()
    todo = [name]
    while todo:
        for module in GRAPH[todo.pop()] - seen:
            seen.add(module)
            todo.append(module)
    return seen - PACKAGES - {name}


@pytest.mark.parametrize(
    ("name", "most"),
    [("staleness", 0), ("ppo", 2), ("cache", 3), ("engine", 4), ("proxy", 14), ("workflow", 14)],
)
def test_an_idea_draws_in_little(name: str, most: int) -> None:
    """A reader of one of the seven must read at most this many other modules."""
    assert len(closure(name)) <= most, sorted(closure(name))


def test_train_wires_the_six() -> None:
    """train.py imports the other six, and no other module of the core does."""
    six = set(SEVEN) - {"train"}
    assert six <= GRAPH["train"]
    others = [name_of(path) for path in PATHS if name_of(path) != "train"]
    assert [name for name in others if six <= GRAPH[name]] == []


def test_the_core_imports_no_extras() -> None:
    """What observes or extends a run plugs in by a name; the core does not know it."""
    for path in PATHS:
        assert not [module for module in imports(path) if module.split(".")[0] == "extras"], path


def test_nothing_below_train_launches_or_logs() -> None:
    """Only train.py and run/ import run.start, rollout.launch and run.log."""
    for path in PATHS:
        name = name_of(path)
        if name != "train" and not name.startswith("run"):
            assert not GRAPH[name] & ABOVE, name


def test_the_servers_know_nothing_of_the_rest() -> None:
    """inference/ imports only itself."""
    for name in NAMES:
        if name.split(".")[0] == "inference":
            assert {module.split(".")[0] for module in GRAPH[name]} <= {"inference"}, name


def test_no_module_imports_itself_through_others() -> None:
    """The imports form no circle."""
    assert list(TopologicalSorter(GRAPH).static_order())


def test_importing_some_does_not_load_torch() -> None:
    """The proxy starts without torch, and so do the ideas that need no tensors."""
    modules = "engine, cache, proxy, run.start, staleness"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
