"""Guess the number: a game of several turns whose best play is binary search, the task of the demo.

The rule: a secret in 1..6; the agent says a number; the game answers "higher", "lower", or is over because it was
found; three guesses. Nobody tells the agent how to search, and only the end pays: 1 if found, 0 if not. Playing
at random finds about half of the secrets, binary search all of them, so the whole distance is the run's to learn.

**The agent** below is an ordinary program on the unmodified OpenAI SDK. It knows nothing of training, tokens or
versions: it takes a `base_url`, plays, and returns a number. That is the project's claim, in thirty lines.

**Why six numbers.** With seven, binary search has one optimal first guess, and early in training it is the one that
pays *least* (it leaves triples, which pay only if the next guess is exactly their middle). The first guess is
made in every game, so it is learnt first, and wrongly: a true local optimum, in which most seeds stay. With six,
3 and 4 are both optimal, each leaves a pair and a triple, and there is no such trap.

**What it does not promise**: that the greedy policy equals binary search move by move. Several trees find every
secret; `summary` counts secrets, and draws the tree that was learnt beside the one that also needs the fewest guesses.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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
WORKFLOW_KWARGS: dict = {}
Ask = Callable[[list[list[dict]]], list[str]]  # conversations -> the greedy answer to each


def parse(answer: str | None) -> int | None:
    """The number in the answer; None unless it is one number in range and nothing else."""
    word = (answer or "").strip()
    return int(word) if word in WORDS and word.isdigit() else None


def feedback(guess: int, secret: int) -> str:
    return "higher" if secret > guess else "lower"


class GuessAgent:
    """Plays one game through a chat-completions endpoint. Returns 1.0 if it found the secret, else 0.0."""

    async def run(self, data: dict, **extra_kwargs) -> float:
        client = AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
            max_retries=0,
        )
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


def success(reward: float) -> bool:
    """Found."""
    return reward > 0.5


# ---------------------------------------------------------------- the base model


def play_at_random(rng: random.Random) -> list[str]:
    """What is said in one game. Half of the players say any number, half one that the answers have not excluded."""
    secret, possible, listens, said = rng.choice(SECRETS), SECRETS, rng.random() < 0.5, [QUESTION]
    for _ in range(GUESSES):
        guess = rng.choice(possible if listens else SECRETS)
        said += [str(guess), feedback(guess, secret)]
        if guess == secret:
            break
        possible = (
            range(possible[0], min(guess, possible.stop))
            if secret < guess
            else range(max(guess + 1, possible[0]), possible.stop)
        )
    return said[:-1]  # the last guess is not answered


def make_model(path: Path, seed: int, warmup_steps: int = 600) -> None:
    """Write a two-layer Qwen3 (135k parameters) that plays at random to `path`, the same for the same seed."""
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


@dataclass(frozen=True)
class Node:
    """A strategy: the guess (None: no number), whether it can be right, and what follows "lower" and "higher"."""

    guess: int | None
    hit: bool
    lower: "Node | None" = None
    higher: "Node | None" = None

    def found(self, turn: int = 1) -> list[int]:
        """For each secret that this strategy finds, the number of guesses."""
        below = [n for child in (self.lower, self.higher) if child for n in child.found(turn + 1)]
        return [turn] * self.hit + below


@cache
def optimal_tree(secrets: range = SECRETS, guesses: int = GUESSES) -> Node | None:
    """By exhaustion: finds the most of these secrets, with the fewest guesses among equals."""
    if not secrets or not guesses:
        return None
    nodes = [
        Node(
            g,
            True,
            optimal_tree(range(secrets[0], g), guesses - 1),
            optimal_tree(range(g + 1, secrets.stop), guesses - 1),
        )
        for g in secrets
    ]
    return max(nodes, key=lambda node: (len(node.found()), -sum(node.found())))


def learnt_tree(
    ask: Ask, messages: list[dict] = START, secrets: range = SECRETS, guesses: int = GUESSES
) -> Node | None:
    """The greedy policy, asked in every situation that it can meet; `secrets` are those still possible in this one."""
    if not secrets or not guesses:
        return None
    [answer] = ask([messages])
    guess = parse(answer)
    if guess is None:
        return Node(None, False)

    def after(word: str, rest: range) -> Node | None:
        more = [{"role": "assistant", "content": answer}, {"role": "user", "content": word}]
        return learnt_tree(ask, messages + more, rest, guesses - 1)

    lower = after("lower", range(secrets[0], min(guess, secrets.stop)))
    higher = after("higher", range(max(guess + 1, secrets[0]), secrets.stop))
    return Node(guess, guess in secrets, lower, higher)


def draw(node: Node, label: str = "") -> Tree:
    """A strategy as a rich tree."""
    tree = Tree(f"{label}[bold]{node.guess or '?'}[/bold]")
    for word, child in (("lower", node.lower), ("higher", node.higher)):
        if child:
            tree.children.append(draw(child, f"[dim]{word}:[/dim] "))
    return tree


def summary(ask: Ask, console: Console) -> None:
    """Print the greedy policy as a tree beside the optimal one."""
    panels = []
    for title, tree in (("learnt", learnt_tree(ask)), ("binary search", optimal_tree())):
        assert tree is not None, "somebody guesses first"
        found = tree.found()
        score = f"finds {len(found)} of {len(SECRETS)}" + (
            f", mean {sum(found) / len(found):.2f} guesses" if found else ""
        )
        panels.append(Panel(Group(draw(tree), f"[dim]{score}[/dim]"), title=title, width=36))
    console.print(Columns(panels))
