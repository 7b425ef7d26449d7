"""A user's modules may have nearly any name, because most modules of this project are in packages. If a user's
module has the name of one of this project's modules, the run logs a warning."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

AGENT = """
{imports}

class Agent:
    async def run(self, data, **extra_kwargs):
        return 1.0
"""


def dry_run(folder: Path, model: Path, names: list[str]) -> subprocess.CompletedProcess[str]:
    """Run train.py --dry-run with an agent that imports modules with these names from its own folder."""
    for name in names:
        (folder / f"{name}.py").write_text("MINE = True\n")
    imports = "\n".join(f"import {name}; assert {name}.MINE" for name in names)
    (folder / "my_agent.py").write_text(AGENT.format(imports=imports))
    (folder / "mine.jsonl").write_text('{"question": "?"}\n')
    words = [f"model_path={model}", "workflow=my_agent.Agent", f"train_dataset.path={folder}/mine.jsonl"]
    command = [sys.executable, "train.py", "--config", "configs/own.yaml", "--dry-run", *words]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)


def test_own_modules_beside_an_agent(tmp_path: Path, tiny_model_dir: Path) -> None:
    """A user's modules may be named like modules in this project's packages, for example tools, messages or
    config."""
    done = dry_run(tmp_path, tiny_model_dir, ["tools", "messages", "client", "config", "server", "actor"])
    assert done.returncode == 0, done.stderr
    assert "rename" not in done.stderr


@pytest.mark.parametrize("name", ["cache", "engine"])
def test_a_name_of_the_seven_is_taken(tmp_path: Path, tiny_model_dir: Path, name: str) -> None:
    """If a user's module has the name of one of the seven files, Python imports this project's file instead. A warning
    asks the user to rename the module."""
    done = dry_run(tmp_path, tiny_model_dir, [name])
    assert done.returncode == 2
    assert f"`import {name}` finds this project's module first; rename your module" in done.stderr
