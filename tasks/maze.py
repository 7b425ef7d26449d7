"""A task with long answers of very different lengths: the drunkard's walk home. An answer is a path
through a maze.

The maze never changes. Its 12 x 12 cells have names like the squares of a chessboard. Two corners
of the maze, a1 and l12, are homes. A prompt such as "from b7 to l12" names the first cell and the
home. The answer lists every cell of the walk, from the first to the last. The reward is SPL, a
navigation metric: the length of the shortest way, divided by the length of the walk. A walk that
goes through a wall or does not end at the home earns 0.

**Why this task.** Answer lengths vary by a factor of ten, so some walks are unfinished when new
weights arrive. The lengths also depend on the policy: the base model's walk can reach the limit of
240 tokens, but the shortest way has only 54 moves on average. Generation takes about as long as
training. So this task shows interruptions, staleness, and the overlap of generation and training.

**The base model** imitates a drunk. With probability 0.4, the drunk's next move follows the
shortest way. Otherwise the drunk goes in a random open direction. The imitated walks are cut off
after 64 moves. A perfect imitation of the drunk, whose walks are cut off only at 240 tokens, has a
mean SPL of 0.36. Any higher SPL was learnt by reinforcement.

**No generalisation.** Every split has the same 286 prompts, so the model learns this one maze by
heart.
"""

import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.text import Text

# Processes that compute rewards import this module, and torch would slow their start. So nothing
# that needs torch is imported here: WORKFLOW is a string, and only make_model imports base_model.

SIDE = 12
MAZE_SEED = 96
HOMES = ("a1", "l12")
SOBER = 0.4  # probability that a drunk's move is not random
CURFEW = 64  # limit on a drunk's moves
Cell = tuple[int, int]  # (column, row); the cell (0, 0) is a1, at the bottom left
WORKFLOW = "workflow.RLVRWorkflow"
WORKFLOW_KWARGS = {"reward_fn": "tasks.maze.reward"}


# ---------------------------------------------------------------- maze


def name(cell: Cell) -> str:
    return f"{chr(ord('a') + cell[0])}{cell[1] + 1}"


CELLS = {name((x, y)): (x, y) for x in range(SIDE) for y in range(SIDE)}


@cache
def passages() -> dict[Cell, set[Cell]]:
    """Map each cell to the neighbours that no wall separates from it. Exactly one path joins any
    two cells."""
    rng = random.Random(MAZE_SEED)
    open_to: dict[Cell, set[Cell]] = {cell: set() for cell in CELLS.values()}
    trail = [(0, 0)]
    while trail:
        x, y = here = trail[-1]
        unseen = [
            n for n in ((x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)) if open_to.get(n) == set()
        ]
        if unseen:
            there = rng.choice(unseen)
            open_to[here].add(there)
            open_to[there].add(here)
            trail.append(there)
        else:
            trail.pop()
    return open_to


@cache
def distances(home: str) -> dict[Cell, int]:
    moves = {CELLS[home]: 0}
    queue = [CELLS[home]]
    for here in queue:  # the loop also visits the cells that it appends
        for there in passages()[here] - moves.keys():
            moves[there] = moves[here] + 1
            queue.append(there)
    return moves


# ---------------------------------------------------------------- task


def dataset(split: str = "train") -> list[dict]:
    """Return 286 prompts: one for each pair of a home and another cell."""
    pairs = [(start, home) for home in HOMES for start in CELLS if start != home]
    return [
        {"messages": [{"role": "user", "content": f"from {a} to {b}"}], "start": a, "home": b}
        for a, b in pairs
    ]


def walk_of(answer: str, start: str) -> list[Cell] | None:
    """Return the cells of the walk, or None if it does not begin at `start`, names an unknown cell
    or goes through a wall."""
    words = answer.removesuffix("<end>").split()
    if not words or words[0] != start or any(word not in CELLS for word in words):
        return None
    walk = [CELLS[word] for word in words]
    return walk if all(there in passages()[here] for here, there in pairwise(walk)) else None


def reward(
    prompt: str,
    completions: str,
    prompt_ids: list,
    completion_ids: list,
    start: str,
    home: str,
    **_,
) -> float:
    """Return SPL (Anderson et al. 2018). AReaL's reward functions have the same parameters."""
    walk = walk_of(completions, start)
    if walk is None or walk[-1] != CELLS[home]:
        return 0.0
    return distances(home)[CELLS[start]] / (len(walk) - 1)


# ---------------------------------------------------------------- base model


def stagger(rng: random.Random, start: str, home: str) -> list[Cell]:
    walk = [CELLS[start]]
    moves_home = distances(home)
    while walk[-1] != CELLS[home] and len(walk) <= CURFEW:
        ways = sorted(passages()[walk[-1]])
        walk.append(
            min(ways, key=moves_home.__getitem__) if rng.random() < SOBER else rng.choice(ways)
        )
    return walk


def make_model(path: Path, seed: int, warmup_steps: int = 1300) -> None:
    """Make a one-layer Qwen3 (85k parameters) that walks like a drunk, and save it in the folder
    `path`."""
    from tasks import base_model

    tokenizer = base_model.make_tokenizer(["from", "to", *CELLS])
    model = base_model.make_qwen3(tokenizer, layers=1, context=256, seed=seed)
    rng = random.Random(seed)
    instances = dataset()

    def one_walk() -> list[int]:
        instance = rng.choice(instances)
        walk = stagger(rng, instance["start"], instance["home"])
        answer = {"role": "assistant", "content": " ".join(map(name, walk))}
        ids = base_model.render(tokenizer, [*instance["messages"], answer])
        # A walk that is cut off has no end token.
        return ids if walk[-1] == CELLS[instance["home"]] else ids[:-1]

    base_model.imitate(
        model, tokenizer, lambda: [one_walk() for _ in range(8)], warmup_steps, lr=1e-2
    )
    base_model.save_atomically(path, model, tokenizer)


# ---------------------------------------------------------------- summary of the learnt policy


def square(a: Cell, b: Cell) -> tuple[int, int]:
    """Return (column, line) of the passage between cells a and b in the picture. For a == b, this
    is the place of the cell."""
    return a[0] + b[0] + 1, 2 * SIDE - 1 - a[1] - b[1]  # line 0 is at the top


def draw(walk: list[Cell], home: str) -> Text:
    """Draw the maze. Dots show the walk, S its start and H the home.

    Cells lie in odd columns and lines of the picture. The square between two neighbours is a
    passage or a wall.
    """
    picture = {
        square(cell, other): ("  ", "")
        for cell, ways in passages().items()
        for other in (cell, *ways)
    }
    steps = [*pairwise(walk), *zip(walk, walk)]
    picture |= {square(here, there): ("• ", "green") for here, there in steps}
    for cell, mark, style in ((walk[0], "S ", "bold yellow"), (CELLS[home], "H ", "bold green")):
        picture[square(cell, cell)] = mark, style
    size = range(2 * SIDE + 1)
    lines = (Text.assemble(*(picture.get((x, y), ("██", "dim")) for x in size)) for y in size)
    return Text("\n").join(lines)


def typical() -> dict:
    ways = sorted(dataset(), key=lambda d: distances(d["home"])[CELLS[d["start"]]])
    return ways[len(ways) // 2]


def summary(ask: Callable[[list[dict]], str], console: Console) -> None:
    """Draw the greedy policy's walk for a typical prompt."""
    instance = typical()
    start, home = instance["start"], instance["home"]
    walk = walk_of(ask(instance["messages"]), start)
    shortest = distances(home)[CELLS[start]]
    console.print(f"A typical way home, from {start} (S) to {home} (H): {shortest} moves at best.")
    moves = f"makes {len(walk) - 1} moves" if walk else "gives an answer that is no walk from S"
    console.print(
        f"The greedy policy {moves} and is"
        f" {'' if walk and walk[-1] == CELLS[home] else 'not '}home."
    )
    console.print(draw(walk or [CELLS[start]], home))
