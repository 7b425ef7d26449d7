"""These tests compare every import statement of the project with the table in docs/structure.md.

A module may import the modules in its row of the table, and no other module of this project. No two modules import each
other, directly or through others. Importing the proxy, the engine or the staleness gate does not load torch. The
picture docs/structure.svg shows the current modules and imports.
"""

import ast
import re
import runpy
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import ROOT

SEVEN = ("staleness", "engine", "proxy", "cache", "workflow", "ppo", "train")
ROOMS = ("rollout", "calls", "inference", "inference/tiny", "training", "run", "tasks")
MODULES = [ROOT / f"{name}.py" for name in SEVEN] + [
    path for room in ROOMS for path in sorted((ROOT / room).glob("*.py"))
]


def name_of(path: Path) -> str:
    """Return the dotted name of a module, such as calls.messages. For calls/__init__.py the name is calls."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {name_of(path) for path in MODULES}


def imports(source: str) -> set[str]:
    """Return all modules that a source file imports, including imports inside functions.

    The statement `from inference import weights` counts as an import of inference.weights.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & NAMES
            found |= inner or {node.module}
    return found


def read_table() -> dict[str, set[str]]:
    """Return the modules and packages that each row of the table in docs/structure.md allows."""
    rows = re.findall(
        r"^\| `([\w/.]+)` \|(.*)\|(.*)\|$", (ROOT / "docs/structure.md").read_text(), re.MULTILINE
    )
    return {
        who.removesuffix(".py").replace("/", "."): {
            *re.findall(r"`([\w.]+)`", ours),
            *re.findall(r"\w+", packages),
        }
        for who, ours, packages in rows
    }


TABLE = read_table()


def forbidden(name: str, source: str) -> set[str]:
    """Return the imports of module `name` that its row in the table does not allow."""
    who = name if name in TABLE else name.rpartition(".")[0]
    allowed = TABLE[who] | {who}

    def is_allowed(module: str) -> bool:
        parts = module.split(".")
        if parts[0] in sys.stdlib_module_names:
            return True
        if who == "inference" and module.startswith(
            "inference.tiny"
        ):  # inference/tiny has its own row in the table
            return False
        return any(".".join(parts[:k]) in allowed for k in range(1, len(parts) + 1))

    return {module for module in imports(source) if not is_allowed(module)}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports(path: Path) -> None:
    """A module imports only the modules and packages that the module's row of the table names."""
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
    """The function `forbidden` finds a forbidden import at the top of a module and inside a function."""
    source = (ROOT / f"{name.replace('.', '/')}.py").read_text()
    assert forbidden(name, f"{source}\n{statement}\n")


def test_no_circles() -> None:
    """No module imports itself through a chain of other modules, even if imports inside functions are counted."""
    graph = {name_of(path): imports(path.read_text()) & NAMES for path in MODULES}
    TopologicalSorter(graph).prepare()
    with pytest.raises(ValueError, match="cycle"):
        TopologicalSorter(graph | {"staleness": {"train"}}).prepare()


def test_light_imports() -> None:
    """The proxy, the engine, the staleness gate, the dispatcher and the conversation tree do not import torch."""
    modules = "staleness, rollout.dispatcher, engine, calls.messages, cache, calls.client, proxy"
    check = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT, timeout=100).returncode == 0


def test_every_room_says_what_is_in_it() -> None:
    """The __init__.py of each folder of modules has a docstring of at least 20 words and no code."""
    for room in ROOMS:
        tree = ast.parse((ROOT / room / "__init__.py").read_text())
        assert [type(node) for node in tree.body] == [ast.Expr], room
        assert len((ast.get_docstring(tree) or "").split()) >= 20, room


def test_the_picture_names_todays_modules() -> None:
    """In docs/structure.svg the box of each folder shows exactly the names of the folder's modules."""
    shown, room = set(), ""
    for text in ElementTree.parse(ROOT / "docs/structure.svg").iter(
        "{http://www.w3.org/2000/svg}text"
    ):
        label = text.text or ""
        if label.endswith("/"):  # a folder's label comes before the labels of its modules
            room = label.replace("/", ".")
        elif label.endswith(".py"):
            shown.add(label.removesuffix(".py"))
        else:
            shown.add(room + label)
    assert shown == {name_of(path) for path in MODULES if path.name != "__init__.py"}, (
        "run `make structure`"
    )


def test_the_picture_is_drawn_from_todays_imports() -> None:
    """The file docs/structure.svg is identical to the picture that `make structure` draws from the current import
    statements."""
    draw = runpy.run_path(str(ROOT / "docs/structure.py"))["draw"]
    assert (ROOT / "docs/structure.svg").read_text() == draw(), "run `make structure`"
