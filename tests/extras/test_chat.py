"""`python -m extras.chat`, without a model; tests/tasks/test_smollm2.py talks to a trained one."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from extras import chat


@pytest.mark.parametrize("made", ["nothing", "no checkpoint"])
def test_no_model_is_one_line(tmp_path: Path, capsys, made: str) -> None:
    """Without a run or a checkpoint, one line asks for the folder of a run that has checkpoints."""
    folder = tmp_path / "run"
    if made == "no checkpoint":
        folder.mkdir()
        (folder / "config.yaml").write_text("gconfig: {max_new_tokens: 4}\n")
    assert chat.main([str(folder)]) == chat.main([]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "give the folder of a run that has checkpoints" in first
    assert second.startswith("error: no model in ")


def test_words_that_a_small_model_does_not_know(tiny_tokenizer: Any) -> None:
    """With a vocabulary of words, `unknown_words` returns all other words. With a vocabulary of
    bytes, every word is known."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "guess": 1, "a": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    small = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    assert chat.unknown_words(small, "guess a number now") == ["number", "now"]
    assert chat.unknown_words(small, "guess a") == []
    assert chat.unknown_words(tiny_tokenizer, "Wörter") == []
