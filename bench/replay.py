"""Claim: a replay of an asynchronous run makes the same weights, bit by bit, at every seed and every load.

    python bench/replay.py                            ten runs of each task
    python bench/replay.py --runs 2 --steps 5         a smaller table
    python bench/replay.py --tasks maze

Each run trains 20 steps at eta 4, with another seed, and its replay repeats it. The batches are smaller than in the
recipes, so that a run takes less time. Groups without a signal are rejected. A line of the table shows how many
of the trained rows a weight update has interrupted, how many groups were rejected, and whether the SHA-256 hashes of
the two models of the last step are equal. The exit code is 1 if two hashes differ.
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
FIXED = ["rollout.max_head_offpolicyness=4", "rollout.max_concurrent_rollouts=5", "logger.report_interval=0"]
FIXED += ["train_dataset.batch_size=3", "actor.ppo_n_minibatches=2", "actor.ppo_epochs=1"]
FIXED += ["should_accept_fn=bench.replay.has_signal"]


def has_signal(group: dict) -> bool:
    """Return whether the rewards of a group differ, so that the group teaches something."""
    return len(set(group["rewards"].tolist())) > 1


def train(folder: Path, *words: str) -> str:
    """Run train.py in mode train or replay. Return the SHA-256 hash of the model of its last step."""
    named = [f"fileroot={folder.parent.parent}", f"experiment_name={folder.parent.name}", f"trial_name={folder.name}"]
    command = [sys.executable, "train.py", *words, *named, "logger.live=false"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    newest = max(folder.glob("checkpoints/step*/model.safetensors"))
    return hashlib.sha256(newest.read_bytes()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--runs", type=int, default=10, help="runs of each task")
    parser.add_argument("--first", type=int, default=1, help="seed of the first run")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    unequal = 0
    print("| task | seed | interrupted rows | rejected groups | model of the run | model of the replay |", flush=True)
    print("|---|---|---|---|---|---|", flush=True)
    for task in args.tasks:
        for seed in range(args.first, args.first + args.runs):
            with tempfile.TemporaryDirectory() as temporary:
                run = Path(temporary) / task / "run"
                made = train(run, *RECIPES[task], *FIXED, f"seed={seed}", f"max_steps={args.steps}")
                again = train(run.with_name("replay"), "--replay", str(run))
                steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            mixed = sum(step["mixed_version_share"] for step in steps) / len(steps)
            rejected = sum(step["rejected"] for step in steps)
            unequal += made != again
            print(f"| {task} | {seed} | {mixed:.0%} | {rejected} | {made[:12]} | {again[:12]} |", flush=True)
    print(f"{unequal} unequal", flush=True)
    return bool(unequal)


if __name__ == "__main__":
    sys.exit(main())
