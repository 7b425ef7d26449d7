"""The two tasks are what their pages say: solvable, honestly paid, and made on the spot the same way every time."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import client
from tasks import base_model, guess, maze

TASKS = pytest.mark.parametrize("task", [guess, maze], ids=["guess", "maze"])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Base models after two steps of warm-up: {(task, seed, copy): directory}."""
    made = {}
    for task in (guess, maze):
        for seed, copy in ((1, 0), (1, 1), (2, 0)):
            path = tmp_path_factory.mktemp("models") / "base"
            task.make_model(path, seed, warmup_steps=2)
            made[task, seed, copy] = path
    return made


def weights_of(path: Path) -> dict:
    return AutoModelForCausalLM.from_pretrained(path).state_dict()


@TASKS
def test_base_model_is_deterministic(models: dict, task) -> None:
    """The same seed makes the same base model, another seed another one, and the caller's generator is not touched."""
    state = torch.random.get_rng_state()
    first, again, other = (weights_of(models[task, *key]) for key in ((1, 0), (1, 1), (2, 0)))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    task.make_model(models[task, 1, 0].parent / "third", 1, warmup_steps=0)
    assert torch.equal(state, torch.random.get_rng_state())


@TASKS
def test_base_model_is_an_ordinary_one(models: dict, task) -> None:
    """The Auto classes load it, the end token agrees everywhere, and a file others may read holds the weights."""
    path = models[task, 1, 0]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert [file.name for file in path.parent.iterdir()] == ["base"]  # nothing half-made is left beside it


def test_processes_may_race(models: dict) -> None:
    """Whoever comes second finds the directory there and leaves it alone; a directory of something else is an error."""
    path = models[guess, 1, 0]
    before = (path / "model.safetensors").stat().st_mtime_ns
    guess.make_model(path, 1, warmup_steps=0)
    assert (path / "model.safetensors").stat().st_mtime_ns == before
    other = path.parent / "holiday-photos"
    other.mkdir()
    (other / "beach.jpg").touch()
    with pytest.raises(OSError, match="holiday-photos"):
        guess.make_model(other, 1, warmup_steps=0)


@given(data=st.data())
def test_template_splices(models: dict, data) -> None:
    """A conversation's rendering is its parent's ids, the ids that were sampled, and the rendered tail."""
    tokenizer = AutoTokenizer.from_pretrained(models[guess, 1, 0])
    words = st.lists(st.sampled_from(guess.WORDS), max_size=4).map(" ".join)
    texts = data.draw(st.lists(words, min_size=3, max_size=7).filter(lambda texts: len(texts) % 2))
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]

    def ids(part: list[dict]) -> list[int]:
        return tokenizer.apply_chat_template(part, add_generation_prompt=True, return_dict=False)

    parent, answer, tail = messages[:-2], texts[-2], messages[-1:]
    sampled = tokenizer.encode(answer, add_special_tokens=False) + [tokenizer.eos_token_id]
    assert ids(parent) + sampled + ids(tail) == ids(messages)
    assert tokenizer.decode(sampled, skip_special_tokens=True) == answer


def test_only_answers_are_imitated(models: dict) -> None:
    """The warm-up's loss is on what the assistant says and on the end of its turn, never on what it is told."""
    tokenizer = AutoTokenizer.from_pretrained(models[guess, 1, 0])
    said = [guess.QUESTION, "3", "higher", "5"]
    ids = base_model.render(tokenizer, [{"role": ("user", "assistant")[i % 2], "content": s} for i, s in enumerate(said)])
    labels = [label for label in base_model.answers_only(tokenizer, ids) if label != base_model.IGNORED]
    assert tokenizer.decode(labels) == "3 <end> 5 <end>"


# ---------------------------------------------------------------- guess the number


def test_three_guesses_find_one_of_six() -> None:
    """Binary search finds every secret in 2.33 guesses on average; with one number more it still would, with two not."""
    best = guess.optimal_tree()
    assert best is not None
    assert best.guess in (3, 4)
    assert sorted(best.found()) == [1, 2, 2, 3, 3, 3]
    for size, found in ((7, 7), (8, 7)):
        tree = guess.optimal_tree(range(1, size + 1))
        assert tree is not None
        assert len(tree.found()) == found


@given(rng=st.randoms(use_true_random=False))
def test_a_strategy_is_judged_as_it_plays(rng: random.Random) -> None:
    """The secrets that the drawn tree finds are exactly those that the same answers find in the game."""
    answers: dict[str, str] = {}

    def ask(conversations: list[list[dict]]) -> list[str]:
        numbers = [*map(str, guess.SECRETS), "9", "higher"]
        return [answers.setdefault(str(c), rng.choice(numbers)) for c in conversations]

    tree = guess.learnt_tree(ask)
    assert tree is not None
    found = []
    for secret in guess.SECRETS:
        messages = list(guess.START)
        for turn in range(1, guess.GUESSES + 1):
            [answer] = ask([messages])
            number = guess.parse(answer)
            if number == secret:
                found.append(turn)
            if number is None or number == secret:
                break
            word = guess.feedback(number, secret)
            messages = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": word}]
    assert sorted(tree.found()) == sorted(found)


@pytest.mark.parametrize("answer", ["", None, "3 4", "7", "0", "-3", "03", "three", "higher", "3.0", "³", "3 <end>"])
def test_what_is_no_guess(answer: str | None) -> None:
    """An answer is one number in range and nothing else."""
    assert guess.parse(answer) is None
    assert guess.parse(" 3 ") == 3


class ScriptedSDK:
    """Stands where the OpenAI SDK stands: answers from a list, and remembers what it was asked."""

    def __init__(self, answers: list[str | None]) -> None:
        self.answers, self.asked = list(answers), list[list[dict]]()
        self.chat = SimpleNamespace(completions=self)

    async def create(self, messages: list[dict], **_) -> SimpleNamespace:
        self.asked.append(list(messages))
        message = SimpleNamespace(content=self.answers.pop(0))
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])
