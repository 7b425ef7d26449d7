"""The structure is what docs/structure.md says: its table is read here and every import statement held against it.

Three rules keep the ideas apart. A module imports what its row names and nothing else of this project. No chain of
imports leads back to where it began. The core of the idea and the proxy start without torch.
"""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from conftest import ROOT

SEVEN = ("staleness", "engine", "proxy", "cache", "workflow", "ppo", "train")
ROOMS = ("rollout", "calls", "inference", "inference/tiny", "training", "run", "tasks")
MODULES = [ROOT / f"{name}.py" for name in SEVEN] + [
    path for room in ROOMS for path in sorted((ROOT / room).glob("*.py"))
]


def name_of(path: Path) -> str:
    """The dotted name of a module of ours: calls.messages; of a room's __init__.py the room."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {name_of(path) for path in MODULES}


def imports(source: str) -> set[str]:
    """Every module that a source imports, wherever the statement stands: `from inference import weights` is
    inference.weights."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & NAMES
            found |= inner or {node.module}
    return found


def read_table() -> dict[str, set[str]]:
    """docs/structure.md's table: for each module or room what it may import."""
    rows = re.findall(r"^\| `([\w/.]+)` \|(.*)\|(.*)\|$", (ROOT / "docs/structure.md").read_text(), re.MULTILINE)
    return {
        who.removesuffix(".py").replace("/", "."): {*re.findall(r"`([\w.]+)`", ours), *re.findall(r"\w+", packages)}
        for who, ours, packages in rows
    }


TABLE = read_table()


def forbidden(name: str, source: str) -> set[str]:
    """The imports of module `name` that its row in the table does not name."""
    who = name if name in TABLE else name.rpartition(".")[0]
    allowed = TABLE[who] | {who}

    def is_allowed(module: str) -> bool:
        parts = module.split(".")
        if parts[0] in sys.stdlib_module_names:
            return True
        if who == "inference" and module.startswith("inference.tiny"):  # a room inside a room is another room
            return False
        return any(".".join(parts[:k]) in allowed for k in range(1, len(parts) + 1))

    return {module for module in imports(source) if not is_allowed(module)}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports(path: Path) -> None:
    """A module imports what its row of the table names, and nothing else."""
    assert forbidden(name_of(path), path.read_text()) == set()


@pytest.mark.parametrize(
    ("name", "statement"),
    [
        ("staleness", "import torch"),
        ("engine", "from proxy import create_app"),
        ("inference.servers", "from calls.messages import canonical"),
        ("inference.servers", "def late():\n    import rollout.executor"),
        ("inference.weights", "from inference.tiny.server import main"),
        ("inference.tiny.server", "from inference.weights import send"),
        ("training.layout", "from rollout import runner"),
        ("run.config", "import train"),
    ],
)
def test_a_planted_import_is_found(name: str, statement: str) -> None:
    """The check above sees an import that the table forbids, at the top of a module and inside a function."""
    source = (ROOT / f"{name.replace('.', '/')}.py").read_text()
    assert forbidden(name, f"{source}\n{statement}\n")


def test_no_circles() -> None:
    """No chain of imports, those inside functions included, leads back to where it began."""
    graph = {name_of(path): imports(path.read_text()) & NAMES for path in MODULES}
    TopologicalSorter(graph).prepare()
    with pytest.raises(ValueError, match="cycle"):
        TopologicalSorter(graph | {"staleness": {"train"}}).prepare()


def test_light_imports() -> None:
    """Neither the core of the idea nor the proxy loads torch: they start in a moment."""
    modules = "staleness, rollout.dispatcher, engine, calls.messages, cache, calls.client, proxy"
    check = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT, timeout=100).returncode == 0


def test_every_room_says_what_is_in_it() -> None:
    """A room's __init__.py is one paragraph and no code: what is in here, in which order to read it."""
    for room in ROOMS:
        tree = ast.parse((ROOT / room / "__init__.py").read_text())
        assert [type(node) for node in tree.body] == [ast.Expr], room
        assert len((ast.get_docstring(tree) or "").split()) >= 20, room
