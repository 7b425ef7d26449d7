"""Claim: a model learns at least as fast with one baseline per turn as with one baseline for all
turns of a group.

    python bench/baselines.py train --seeds 1 2 3          # success with each baseline
    python bench/baselines.py signal runs/guess/NAME ...   # turns with advantage 0 in runs

`actor.adv_norm.per_turn=true` compares the k-th turn of a game with the k-th turns of the other
games in its group. Games differ in length, so some late turns have no other turn to be compared
with. Such a turn has advantage 0 and teaches nothing. The same holds for compared turns that all
have the same final reward. `per_turn=false` compares a turn with all turns of its group. In the
demo and in the maze, every turn of an episode has the episode's reward. So with `per_turn=false`
the baseline is a mean of these rewards, in which an episode with k turns has weight k.

The command `train` repeats runs of bench/staleness.py at eta = 1 and changes only the baseline. The
command `signal` reads the batches that a run wrote to its folder tokens/ and computes the
advantages with each baseline. If all members of a group have the same reward, all its advantages
are 0 with both baselines, so `signal` leaves the group out. For the other groups, it prints the
share of turns with advantage 0. The share depends on the group size, so it is computed among the
first 4 members, the first 8 members and all members of each group. The results are in
docs/algorithm.md.
"""

import argparse
import os
import sys
from itertools import product
from pathlib import Path
from statistics import mean

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import Tensor  # noqa: E402

from bench import staleness  # noqa: E402
from ppo import compute_advantages  # noqa: E402
from tasks import guess  # noqa: E402

BASELINES = {"per turn": True, "all turns": False}
STEPS = (16, 32, 64)
MEMBERS = (4, 8, None)  # group sizes that `signal` compares; None stands for the whole group


def silent_turns(batch: dict[str, Tensor], per_turn: bool) -> tuple[int, int]:
    """Return the number of trained turns with advantage 0, and the number of all trained turns.

    A group is left out if all its members have the same reward.
    """
    how = {"mean_level": "group", "std_level": "none", "reward_scaling": 1.0}
    A = compute_advantages(batch, per_turn=per_turn, **how)
    trained = batch["loss_mask"] > 0
    silent = total = 0
    for group in batch["group_ids"].unique():
        rows = batch["group_ids"] == group
        rewards = batch["turn_rewards"][rows][trained[rows]]
        if len(rewards.unique()) > 1:
            for row in rows.nonzero()[:, 0]:
                for turn in batch["turn_ids"][row][trained[row]].unique():
                    total += 1
                    silent += not A[row][trained[row] & (batch["turn_ids"][row] == turn)].any()
    return silent, total


def first_members(batch: dict[str, Tensor], members: int | None) -> dict[str, Tensor]:
    """Return the rows of a batch that belong to the first `members` members of their group."""
    ids = batch["group_ids"]
    number = torch.stack([(ids[:row] == ids[row]).sum() for row in range(len(ids))])  # (B,)
    return {key: x[number < (members or len(ids))] for key, x in batch.items()}


def print_signal(runs: list[Path]) -> None:
    """Print, for each recorded run and each baseline, the share of turns with advantage 0."""
    print(
        "| run | members | turns | "
        + " | ".join(BASELINES)
        + " |\n"
        + "|---" * (3 + len(BASELINES))
        + "|"
    )
    for run, members in product(runs, MEMBERS):
        batches = [load_file(path) for path in sorted((run / "tokens").glob("*.safetensors"))]
        batches = [first_members(batch, members) for batch in batches]
        counts = [
            [silent_turns(batch, per_turn) for batch in batches] for per_turn in BASELINES.values()
        ]
        turns = sum(total for _, total in counts[0])
        shares = [sum(silent for silent, _ in count) / max(turns, 1) for count in counts]
        cells = [str(run), str(members or "all"), str(turns), *(f"{share:.1%}" for share in shares)]
        print("| " + " | ".join(cells) + " |", flush=True)


def train(seeds: list[int]) -> None:
    """Train one run for each seed and each baseline. Print the mean, the lowest and the highest
    success over the seeds."""
    recipe = staleness.load_recipe()
    found: dict[tuple[str, int], list[float]] = {}
    for seed in seeds:
        base = staleness.BASES / f"base-{seed}"
        guess.make_model(base, seed)
        for name, per_turn in BASELINES.items():
            changed = recipe.model_copy(deep=True)
            changed.adv_norm.per_turn = per_turn
            line = staleness.run("1", "decoupled", seed, base, changed)
            for step in STEPS:
                found.setdefault((name, step), []).append(line[f"success_{step}"])
            print(
                f"seed {seed}, {name}: " + ", ".join(f"{line[f'success_{s}']:.3f}" for s in STEPS),
                flush=True,
            )
    print(
        "| baseline | "
        + " | ".join(f"step {step}" for step in STEPS)
        + " |\n"
        + "|---" * (1 + len(STEPS))
        + "|"
    )
    for name in BASELINES:
        cells = [found[name, step] for step in STEPS]
        print(
            f"| {name} | "
            + " | ".join(f"{mean(c):.3f} ({min(c):.3f} to {max(c):.3f})" for c in cells)
            + " |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", default="train", choices=["train", "signal"])
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what == "signal":
        print_signal(args.runs)
    else:
        train(args.seeds)


if __name__ == "__main__":
    main()
