"""The documents are true: commands, files, keys, metrics, sizes and imports are checked here.

A teaching codebase is its text. What README.md and docs/ claim about the code is claimed again below, as a test.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest
from conftest import ROOT
from test_structure import MODULES, SEVEN

from run.config import list_keys, load

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]


def code_lines(path: Path) -> int:
    """Lines that hold code: no blank line, no comment, no docstring."""
    source = path.read_text()
    lines: set[int] = set()
    prose = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in prose:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def test_budget() -> None:
    """A module is at most 300 lines of code, the seven together 1,500, everything 6,510 (docs/log.md says why)."""
    sizes = {path.relative_to(ROOT): code_lines(path) for path in MODULES}
    assert {path: n for path, n in sizes.items() if n > 300} == {}
    assert sum(sizes[Path(f"{name}.py")] for name in SEVEN) <= 1500
    assert sum(sizes.values()) <= 6525


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.name)
def test_essay(path: Path) -> None:
    """Every module opens by saying what it is about; the concepts' modules say it at length."""
    if path.name == "__init__.py":
        return
    essay = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert len(essay.split()) >= (100 if path.parent == ROOT else 20), f"{path.name} needs an essay"


def test_every_key_has_a_meaning() -> None:
    """`--help` explains every key; a key without a word of meaning does not ship."""
    keys = list_keys()
    assert len({key.name for key in keys}) == len(keys)
    assert [key.name for key in keys if len(key.meaning) < 5] == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.yaml")), ids=lambda p: p.name)
def test_recipes_load(path: Path) -> None:
    """Every recipe holds known keys and valid values only."""
    load(["--config", str(path)])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_named_files_exist(page: Path) -> None:
    """What a page names exists: files, links, and the function behind every `module.function`."""
    text = page.read_text()
    for name in re.findall(r"\b((?:[\w.]+/)*\w+\.(?:py|yaml|md|sh|toml))\b", re.sub(r"https?://\S+", "", text)):
        if (
            name == "config.yaml"
            or name.startswith(("areal/", "runs/"))
            or "areal/" in text.split(name)[0].splitlines()[-1]
        ):
            continue
        candidates = [ROOT / name, page.parent / name]
        assert any(c.exists() for c in candidates), f"{page.name} names {name}"
    for module, attribute in re.findall(r"`([\w/]+\.py)::([\w.]+)`", text):
        source = (ROOT / module).read_text()
        assert re.search(rf"\b(def|class) {attribute.split('.')[-1]}\b", source), f"{page.name}: {module}::{attribute}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_named_targets_exist(page: Path) -> None:
    """Every `make target` that a page shows is in the Makefile."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([\w-]+)", page.read_text(), re.MULTILINE)) <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_named_keys_exist(page: Path) -> None:
    """Every `key=value` that a page shows after train.py is a key of the configuration."""
    known = {key.name for key in list_keys()}
    for line in re.findall(r"train\.py ([^`\n#]*)", page.read_text()):
        for key in re.findall(r"([\w.]+)=", line):
            assert key in known or key.startswith("workflow_kwargs."), f"{page.name}: {key}"
