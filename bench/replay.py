"""Claim: a replay of an asynchronous run ends with the run's weights, bit for bit, for every seed,
even on a busy machine.

    python bench/replay.py        # for each task: ten runs at eta 4, one of each other variant
    python bench/replay.py --variants eta=4 --tasks maze --runs 2   # two runs of the maze at eta 4

Each run trains 20 steps, and a replay then repeats the run. The batches are smaller than in the
recipes, so that a run takes less time. A group whose members have equal rewards is rejected. Each
line of the table shows the share of trained rows that a weight update has interrupted. Each line
also counts the rejected groups, the dropped groups, and the tokens that were masked because of
their age. The last two columns show the first 12 characters of two SHA-256 hashes: of the run's
last model, and of the replay's last model. The exit code is 1 if the two hashes of any run differ.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECIPES = {
    "guess": ["--config", "configs/demo.yaml", "gconfig.n_samples=4"],
    "maze": ["--config", "configs/maze.yaml", "gconfig.n_samples=2", "gconfig.max_new_tokens=150"],
}
FIXED = [
    "rollout.max_concurrent_rollouts=5",
    "logger.report_interval=0",
    "train_dataset.batch_size=3",
]
FIXED += [
    "actor.ppo_n_minibatches=2",
    "actor.ppo_epochs=1",
    "should_accept_fn=bench.replay.has_signal",
]
# With one group in a batch and eta = 1, some slow groups become too old before a step consumes
# them.
OVERTAKEN = ["rollout.max_head_offpolicyness=1", "train_dataset.batch_size=1"]
VARIANTS: dict[
    str, tuple[int, list[str]]
] = {  # maps a name to (number of ranks, configuration keys)
    "eta=4": (1, ["rollout.max_head_offpolicyness=4"]),
    "eta=0": (1, ["rollout.max_head_offpolicyness=0"]),
    "eta=2": (1, ["rollout.max_head_offpolicyness=2"]),
    "two ranks": (2, ["rollout.max_head_offpolicyness=4"]),
    "stale=mask": (1, [*OVERTAKEN, "rollout.stale=mask"]),
    "stale=drop": (1, [*OVERTAKEN, "rollout.stale=drop"]),
}


def has_signal(group: dict) -> bool:
    """Return whether the rewards of a group differ. If all rewards of a group are equal, all
    advantages of the group are 0."""
    return len(set(group["rewards"].tolist())) > 1


def train(folder: Path, ranks: int, *words: str) -> str:
    """Run train.py in mode train or replay. Return the SHA-256 hash of the model after the last
    step."""
    named = [
        f"fileroot={folder.parent.parent}",
        f"experiment_name={folder.parent.name}",
        f"trial_name={folder.name}",
    ]
    torchrun = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        if ranks > 1
        else []
    )
    command = [sys.executable, *torchrun, "train.py", *words, *named, "logger.live=false"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    newest = max(folder.glob("checkpoints/step*/model.safetensors"))
    return hashlib.sha256(newest.read_bytes()).hexdigest()


def measure(task: str, variant: str, seed: int, steps: int) -> bool:
    """Train one run and replay it. Print the run's line of the table. Return whether the last model
    of the run equals the last model of the replay."""
    ranks, keys = VARIANTS[variant]
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / task / "run"
        made = train(
            run, ranks, *RECIPES[task], *FIXED, *keys, f"seed={seed}", f"max_steps={steps}"
        )
        again = train(run.with_name("replay"), ranks, "--replay", str(run))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    mixed = sum(line["mixed_version_share"] for line in lines) / len(lines)
    lost = " | ".join(
        str(sum(line[name] for line in lines)) for name in ("rejected", "dropped", "masked")
    )
    print(
        f"| {task} | {variant} | {seed} | {mixed:.0%} | {lost} | {made[:12]} | {again[:12]} |",
        flush=True,
    )
    return made == again


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument(
        "--runs", type=int, default=10, help="runs of each task at eta 4; other variants: 1 run"
    )
    parser.add_argument("--first", type=int, default=1, help="seed of the first run")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    print(
        "| task | variant | seed | interrupted | rejected | dropped | masked | model of the run | model of the replay |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    cases = [
        (task, variant, seed)
        for variant in args.variants
        for task in args.tasks
        for seed in range(args.first, args.first + (args.runs if variant == "eta=4" else 1))
    ]
    unequal = sum(not measure(*case, args.steps) for case in cases)
    print(f"{unequal} of {len(cases)} unequal", flush=True)
    return bool(unequal)


if __name__ == "__main__":
    sys.exit(main())
