"""All that the pages name exists, and the house keeps its size."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest
from conftest import ROOT
from test_structure import BESIDE, MODULES, PATHS, SEVEN

from run.config import TrainConfig, list_keys

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "museum/README.md"]
MARKDOWN = [*ROOT.glob("*.md"), *(p for f in ("docs", "museum") for p in (ROOT / f).rglob("*.md"))]
PROSE = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def name_in_project(path: Path) -> str:
    return str(path.relative_to(ROOT))


def measure(path: Path) -> tuple[int, int, int]:
    """A file's lines of code, its tokens, and the words of its docstrings and comments."""
    source, words, tokens = path.read_text(), 0, 0
    lines, prose = set[int](), set[int]()
    for node in ast.walk(ast.parse(source)):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and (text := ast.get_docstring(node, clean=False)):
            words += len(text.split())
            prose |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            words += len(token.string.strip("# ").split())
        elif token.type not in PROSE and token.start[0] not in prose:
            tokens += 1
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines), tokens, words


def total(paths: list[Path], column: int) -> int:
    return sum(measure(path)[column] for path in paths)


def test_the_house_keeps_its_size() -> None:
    """Small is the feature. A line that is added takes the place of another one (docs/log.md)."""
    extras = [path for path in BESIDE if path.parent.name == "extras"]
    assert total(PATHS, 1) <= 52_000
    assert total(PATHS, 2) <= 24_000
    assert total(extras, 1) <= 20_000
    assert total(sorted((ROOT / "tests").rglob("*.py")), 0) <= 13_000
    assert sum(len(page.read_text().split()) for page in MARKDOWN) <= 34_000
    assert len((ROOT / "README.md").read_text().split()) <= 1_300
    assert len([*ROOT.glob("docs/*.md")]) <= 12


@pytest.mark.parametrize("path", MODULES, ids=name_in_project)
def test_essay(path: Path) -> None:
    """Every module begins with an essay of at most 25 lines, or 35 in the seven at the top."""
    essay = ast.get_docstring(ast.parse(path.read_text())) or ""
    if path.name != "__init__.py":
        assert len(essay.split()) >= (100 if path.stem in SEVEN else 15), "it needs an essay"
    assert len(essay.splitlines()) <= (35 if path.parent == ROOT else 25), "its essay is too long"


@pytest.mark.parametrize("page", PAGES, ids=name_in_project)
def test_named_files_exist(page: Path) -> None:
    """Every file that a page names exists, and every `module.py::name` is in that module."""
    text = re.sub(r"https?://\S+", "", page.read_text())
    for name in re.findall(r"\b((?:[\w.-]+/)*\w+\.(?:py|yaml|md|sh|toml))\b", text):
        theirs = (
            name == "config.yaml"
            or "NAME" in name
            or "NAME/" + name in text
            or name.startswith(("areal/", "runs/", "my_", "own/"))
        )
        line = next(line for line in text.splitlines() if name in line)
        found = (ROOT / name).exists() or (page.parent / name).exists()
        assert theirs or "areal/" in line or found, f"{page.name} names {name}"
    for module, attribute in re.findall(r"`([\w/]+\.py)::([\w.]+)`", text):
        pattern = rf"\b(def|class) {attribute.split('.')[-1]}\b"
        assert re.search(pattern, (ROOT / module).read_text()), f"{module}::{attribute}"


@pytest.mark.parametrize("page", PAGES, ids=name_in_project)
def test_named_keys_exist(page: Path) -> None:
    """Every `group.key` that a page names exists, if the group does."""
    keys = {name for name, _, _ in list_keys(TrainConfig())}
    groups = {name.partition(".")[0] for name in keys if "." in name}
    for name in re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)[=`]", page.read_text()):
        if name.partition(".")[0] in groups and not name.endswith((".py", ".md", ".jsonl")):
            assert name in keys or any(key.startswith(f"{name}.") for key in keys), name


@pytest.mark.parametrize("page", PAGES, ids=name_in_project)
def test_named_targets_exist(page: Path) -> None:
    """Every `make target` that a page names is in the Makefile."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?\bmake ([a-z][\w-]+)`", page.read_text())) <= targets


@pytest.mark.parametrize("path", [*PAGES, *MODULES], ids=name_in_project)
def test_documents_are_cited_by_title(path: Path) -> None:
    """AReaL's pages are cited by their titles, because no reader finds them by a file name."""
    text = re.sub(r"https?://\S+", "", path.read_text())
    assert re.findall(r"\b(?:agent|rollout|openai)_workflows?\.(?:txt|md)\b", text) == []
