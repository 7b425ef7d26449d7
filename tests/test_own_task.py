"""The test writes the files that docs/own_task.md shows, and runs the commands of this page.

The test runs in a new folder that contains this project's modules and no file from an earlier run.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
from conftest import ROOT

PAGE = (ROOT / "docs" / "own_task.md").read_text()
FILES = re.findall(r"(own/\w+\.\w+)[^`]*:\n\n```(?:python|yaml)\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = "".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)).splitlines()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the files of the page and with this project's modules."""
    folder = tmp_path_factory.mktemp("project")
    for path in ROOT.glob("[a-z]*"):
        if path.is_dir() and path.name not in ("runs", "own"):
            (folder / path.name).symlink_to(path)
        elif (
            path.suffix == ".py"
        ):  # the file is copied, because with a link Python would import from ROOT
            shutil.copy(path, folder)
    (folder / "own").mkdir()
    for name, text in FILES:
        (folder / name).write_text(text)
    return folder


def shell(command: str, folder: Path) -> str:
    """Run a command in the folder and return its output."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_the_page_has_its_files_and_commands() -> None:
    """The page shows two files and all commands, from preparing the data to chatting with the trained model."""
    assert [name for name, _ in FILES] == ["own/sort_task.py", "own/sort.yaml"]
    words = [
        "own.sort_task",
        "run.episode",
        "mode=eval",
        "trial_name=first",
        "checkpoints",
        "run.chat",
        "reward_fn",
    ]
    assert len(COMMANDS) == len(words)
    assert [
        word for word, command in zip(words, COMMANDS, strict=True) if word not in command
    ] == []


@pytest.mark.runs
def test_the_page(project: Path) -> None:
    """The commands of the page train one model with an agent and one with a reward function, and both models learn to
    sort."""
    said = [shell(command, project) for command in COMMANDS]
    assert "1 turns" in said[1]
    before, after = (float(re.findall(r"eval_success ([\d.]+)", said[i])[0]) for i in (2, 4))
    assert before < 0.5 < 0.9 < after
    assert said[5].splitlines()[-1].split() == ["2", "4", "5"]
    for trial in ("first", "second"):
        lines = (project / f"runs/sort/{trial}/metrics.jsonl").read_text().splitlines()
        history = [json.loads(line) for line in lines]
        assert len(history) == 30
        assert history[0]["success"] < 0.3
        assert fmean(line["success"] for line in history[-5:]) > 0.9
