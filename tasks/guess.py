"""Guess the number: a game of several turns whose best play is binary search, the task of the demo.

The rule: a secret in 1..6; the agent says a number; the game answers "higher", "lower", or is over because it was
found; three guesses. Nobody tells the agent how to search, and only the end pays: 1 if found, 0 if not. Playing
at random finds about half of the secrets, binary search all of them, so the whole distance is the run's to learn.

**The agent** below is an ordinary program on the unmodified OpenAI SDK. It knows nothing of training, tokens or
versions: it takes a `base_url`, plays, and returns a number. That is the project's claim, in thirty lines.

**Why six numbers.** With seven, binary search has one optimal first guess, and early in training it is the one that
pays *least* (it leaves triples, which pay only if the next guess is exactly their middle). The first guess is
made in every game, so it is learnt first, and wrongly: a true local optimum, in which most seeds stay. With six,
3 and 4 are both optimal, and each leaves a pair and a triple. Some of the trap is left: 2 or 5 first finds five of
six, and from some base models that looks best for long. A penalty on the distance to the base model
(configs/demo.yaml) keeps the others open until they are learnt.

**What it does not promise**: that the greedy policy equals binary search move by move. Several trees find every
secret; `summary` counts secrets, and draws the tree that was learnt beside that of binary search, which also needs the
fewest guesses.
"""

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from rich.columns import Columns
from rich.console import Console, Group
from rich.panel import Panel
from rich.tree import Tree

from tasks import base_model

SECRETS, GUESSES = range(1, 7), 3
QUESTION = "guess a number"
START = [{"role": "user", "content": QUESTION}]
WORDS = (*QUESTION.split(), "higher", "lower", *map(str, SECRETS))
Ask = Callable[[list[dict]], str]  # conversation -> the greedy answer
Play = Callable[[list[dict], Sequence[int]], str]  # conversation, secrets that are still possible -> what is said


def parse(answer: str | None) -> int | None:
    """The number in the answer; None unless it is one number in range and nothing else."""
    word = (answer or "").strip()
    return int(word) if word in WORDS and word.isdigit() else None


def feedback(guess: int, secret: int) -> str:
    return "higher" if secret > guess else "lower"


def possible_after(possible: Sequence[int], guess: int, word: str) -> list[int]:
    """The secrets that are left when `guess` was answered with `word`."""
    return [secret for secret in possible if secret != guess and feedback(guess, secret) == word]


class GuessAgent:
    """Plays one game through a chat-completions endpoint. Returns 1.0 if it found the secret, else 0.0."""

    async def run(self, data: dict, base_url: str, api_key: str, http_client: Any, **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
        messages: list = list(START)
        for _ in range(GUESSES):
            reply = await client.chat.completions.create(model="default", messages=messages, max_completion_tokens=4)
            answer = reply.choices[0].message.content
            guess = parse(answer)
            if guess is None:
                return 0.0
            if guess == data["secret"]:
                return 1.0
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": feedback(guess, data["secret"])})
        return 0.0


WORKFLOW = GuessAgent


def dataset(split: str = "train") -> list[dict]:
    """The secrets. There is nothing to hold out: the same six for every split."""
    return [{"secret": secret} for secret in SECRETS]


# ---------------------------------------------------------------- the base model


def play_at_random(rng: random.Random) -> list[str]:
    """What is said in one game. Half of the players say any number, half one that the answers have not excluded."""
    secret, listens = rng.choice(SECRETS), rng.random() < 0.5
    possible: Sequence[int] = SECRETS
    said = [QUESTION]
    for _ in range(GUESSES):
        guess = rng.choice(possible if listens else SECRETS)
        word = feedback(guess, secret)
        said += [str(guess), word]
        if guess == secret:
            break
        possible = possible_after(possible, guess, word)
    return said[:-1]  # the last guess is not answered


def make_model(path: Path, seed: int, warmup_steps: int = 600) -> None:
    """Write a two-layer Qwen3 (134k parameters) that plays at random to `path`, the same for the same seed."""
    tokenizer = base_model.make_tokenizer(WORDS)
    model = base_model.make_qwen3(tokenizer, layers=2, context=64, seed=seed)
    rng = random.Random(seed)

    @cache
    def ids_of(*said: str) -> list[int]:
        roles = ("user", "assistant")
        return base_model.render(tokenizer, [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)])

    base_model.imitate(model, tokenizer, lambda: [ids_of(*play_at_random(rng)) for _ in range(16)], warmup_steps, 5e-3)
    base_model.save_atomically(path, model, tokenizer)


# ---------------------------------------------------------------- what was learnt


def binary_search(messages: list[dict], possible: Sequence[int]) -> str:
    """The middle of what is possible."""
    return str(possible[(len(possible) - 1) // 2])


def explore(
    play: Play, found: list[int], messages: list[dict] = START, possible: Sequence[int] = SECRETS, label: str = ""
) -> Tree:
    """How somebody plays in every situation that there can be, as a tree: a guess, and below it what follows each
    answer to it. `found` gets, for each secret that is found, the number of guesses."""
    answer, turn = play(messages, possible), len(messages) // 2 + 1
    guess = parse(answer)
    tree = Tree(f"{label}[bold]{guess or '?'}[/bold]")
    if guess is None:
        return tree
    found += [turn] * (guess in possible)
    for word in ("lower", "higher"):
        rest = possible_after(possible, guess, word)
        if rest and turn < GUESSES:
            more = [{"role": "assistant", "content": answer}, {"role": "user", "content": word}]
            tree.children.append(explore(play, found, messages + more, rest, f"[dim]{word}:[/dim] "))
    return tree


def summary(ask: Ask, console: Console) -> None:
    """Print the greedy policy as a tree beside binary search."""
    panels = []
    players: dict[str, Play] = {"learnt": lambda messages, _: ask(messages), "binary search": binary_search}
    for title, play in players.items():
        found: list[int] = []
        tree = explore(play, found)
        mean = f", mean {sum(found) / len(found):.2f} guesses" if found else ""
        score = f"finds {len(found)} of {len(SECRETS)}{mean}"
        panels.append(Panel(Group(tree, f"[dim]{score}[/dim]"), title=title, width=36))
    console.print(Columns(panels))
