"""The complete task of docs/agents.md works as printed."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

PAGE = (ROOT / "docs/agents.md").read_text().partition("## A complete task")[2]


def block(language: str) -> str:
    """The first code block of the task's section in this language."""
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found
    return found[1]


@pytest.mark.runs
def test_the_page(tmp_path: Path) -> None:
    """The test writes the page's files, runs its commands in order, and checks what the page
    promises."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/box_task.py").write_text(block("python"))
    (tmp_path / "own/box.yaml").write_text(block("yaml"))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for line in block("sh").splitlines():
        words = line.replace("python train.py", f"{sys.executable} {ROOT}/train.py")
        words = words.replace("python -m", f"{sys.executable} -m")
        done = subprocess.run(
            words, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    talk = r'tool: (\d)\nassistant: open\({"box": \1}\)\ntool: (\d)\nassistant: \2\n'
    assert re.search(talk, done.stdout)
    files = (tmp_path / f"runs/box/{name}/eval.json" for name in ("before", "after"))
    before, after = (json.loads(file.read_text())["eval_success"] for file in files)
    assert before < 0.6 < 0.8 < after
    metrics = (tmp_path / "runs/box/first/metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics[-1])["success"] > 0.9
