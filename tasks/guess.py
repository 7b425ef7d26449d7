"""The demo's task: guess a number in several turns.

The secret is a number from 1 to 6, and the agent has three guesses. After a wrong guess the game
answers "higher" or "lower". The reward is 1 if the secret was found, else 0. The prompt does not
say how to search. Random guesses find about half of the secrets, and binary search finds all six.

**The agent** is an ordinary program with the unmodified OpenAI SDK, and knows nothing of training,
tokens or versions.

**Why six numbers.** With seven numbers, an agent can find every secret only if it begins with 4. If
4 is wrong, three numbers and two guesses are left, so the second guess must be the middle of the
three numbers. The model learns this second guess late, because not every game reaches it. By then,
with most seeds, the model has settled on another first guess, which is a local optimum. With six
numbers, 3 and 4 are equally good first guesses. But an agent that begins with 2 or 5 can find five
of six secrets, so the model could settle on 2 or 5. A penalty on the distance to the base model
(configs/demo.yaml) keeps every first guess likely until the later guesses are learnt.

**Several strategies find every secret**, so the trained model may guess differently from binary
search. `summary` draws both strategies side by side.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from rich.columns import Columns
from rich.console import Console, Group
from rich.panel import Panel
from rich.tree import Tree

from tasks import base_model

SECRETS = range(1, 7)
GUESSES = 3
QUESTION = "guess a number"
START = [{"role": "user", "content": QUESTION}]
WORDS = (*QUESTION.split(), "higher", "lower", *map(str, SECRETS))
Play = Callable[[list[dict], Sequence[int]], str]  # (conversation, possible secrets) -> answer


def parse(answer: str | None) -> int | None:
    """Return the guess, or None if the answer is not exactly one number from 1 to 6."""
    word = (answer or "").strip()
    return int(word) if word in WORDS and word.isdigit() else None


def feedback(guess: int, secret: int) -> str:
    return "higher" if secret > guess else "lower"


def possible_after(possible: Sequence[int], guess: int, word: str) -> list[int]:
    return [secret for secret in possible if secret != guess and feedback(guess, secret) == word]


class GuessAgent:
    """Plays one game through a chat-completions endpoint."""

    async def run(self, data: dict, **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(max_retries=0, **extra_kwargs)  # base_url, api_key, http_client
        messages: list = list(START)
        for _ in range(GUESSES):
            reply = await client.chat.completions.create(
                model="default", messages=messages, max_completion_tokens=4
            )
            answer = reply.choices[0].message.content
            guess = parse(answer)
            if guess is None:
                return 0.0
            if guess == data["secret"]:
                return 1.0
            word = feedback(guess, data["secret"])
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": word},
            ]
        return 0.0


WORKFLOW = GuessAgent


def dataset(split: str = "train") -> list[dict]:
    return [{"secret": secret} for secret in SECRETS]


# ---------------------------------------------------------------- base model


def play_at_random(rng: random.Random) -> list[dict]:
    """Return the messages of a game with random guesses. In half of the games, the player guesses
    only numbers that the game's earlier answers allow."""
    secret = rng.choice(SECRETS)
    listens = rng.random() < 0.5
    possible: Sequence[int] = SECRETS
    messages = list(START)
    for _ in range(GUESSES):
        guess = rng.choice(possible if listens else SECRETS)
        word = feedback(guess, secret)
        messages += [
            {"role": "assistant", "content": str(guess)},
            {"role": "user", "content": word},
        ]
        if guess == secret:
            break
        possible = possible_after(possible, guess, word)
    return messages[:-1]  # the game does not answer the last guess


def make_model(path: Path, seed: int, warmup_steps: int = 600) -> None:
    """Make a two-layer Qwen3 (134k parameters) that plays at random, and save it in the folder
    `path`."""
    tokenizer = base_model.make_tokenizer(WORDS)
    model = base_model.make_qwen3(tokenizer, layers=2, context=64, seed=seed)
    rng = random.Random(seed)

    def next_batch() -> list[list[int]]:
        return [base_model.render(tokenizer, play_at_random(rng)) for _ in range(16)]

    base_model.imitate(model, tokenizer, next_batch, warmup_steps, lr=5e-3)
    base_model.save_atomically(path, model, tokenizer)


# ---------------------------------------------------------------- summary of the learnt policy


def binary_search(messages: list[dict], possible: Sequence[int]) -> str:
    return str(possible[(len(possible) - 1) // 2])


def explore(
    play: Play, found: list[int], messages: list[dict] = START, possible: Sequence[int] = SECRETS
) -> Tree:
    """Draw a player's strategy as a tree. Below each guess are the next guesses after the answers
    "lower" and "higher".

    For every secret that the player finds, append the number of guesses to `found`.
    """
    answer = play(messages, possible)
    guess = parse(answer)
    turn = len(messages) // 2 + 1
    label = "" if turn == 1 else f"[dim]{messages[-1]['content']}:[/dim] "
    tree = Tree(f"{label}[bold]{guess or '?'}[/bold]")
    if guess is None:
        return tree
    if guess in possible:
        found.append(turn)
    for word in ("lower", "higher"):
        rest = possible_after(possible, guess, word)
        if rest and turn < GUESSES:
            more = [{"role": "assistant", "content": answer}, {"role": "user", "content": word}]
            tree.children.append(explore(play, found, messages + more, rest))
    return tree


def summary(ask: Callable[[list[dict]], str], console: Console) -> None:
    """Print the greedy policy's strategy next to binary search."""
    panels = []
    for title, play in (
        ("learnt", lambda messages, _: ask(messages)),
        ("binary search", binary_search),
    ):
        found: list[int] = []
        tree = explore(play, found)
        mean = f", mean {sum(found) / len(found):.2f} guesses" if found else ""
        score = f"[dim]finds {len(found)} of {len(SECRETS)}{mean}[/dim]"
        panels.append(Panel(Group(tree, score), title=title, width=36))
    console.print(Columns(panels))
    print(
        "to train on GSM8K with a GPU:"
        " python train.py --config gsm8k model_path=Qwen/Qwen2.5-1.5B-Instruct"
    )
