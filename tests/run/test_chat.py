"""Tests of `python -m run.chat` without a model, and of the option --help. A test in tests/test_train.py chats with a
trained model."""

from pathlib import Path
from typing import Any

import pytest

from run import chat, doctor, report
from run.chat import main


@pytest.mark.parametrize("made", ["nothing", "no checkpoint"])
def test_no_model_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], made: str
) -> None:
    """Without a run or without a checkpoint, the command prints one line that asks for a run's folder with
    checkpoints."""
    folder = tmp_path / "run"
    if made == "no checkpoint":
        folder.mkdir()
        (folder / "config.yaml").write_text("gconfig: {max_new_tokens: 4}\n")
    assert main([str(folder)]) == 2
    assert main([]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "give the folder of a run that has checkpoints" in first
    assert second.startswith("error: no model in ")


@pytest.mark.parametrize("tool", [chat, doctor, report])
def test_help_explains_the_tool(capsys: pytest.CaptureFixture[str], tool: Any) -> None:
    """With --help, a command for finished runs prints the docstring of its module, which shows how to call the
    command."""
    assert tool.main(["--help"]) == 0
    assert f"python -m {tool.__name__} runs/" in capsys.readouterr().out
