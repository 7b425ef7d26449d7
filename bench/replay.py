"""Claim: a replay of an asynchronous run ends with the run's weights, bit for bit, for every seed,
after a kill and a restart, and on a busy machine.

    python bench/replay.py        # each task: ten runs at eta 4, and one run of each other variant
    python bench/replay.py --variants eta=4 --tasks maze --runs 2

Each run trains 20 steps in small batches. It is killed after step 10, and continues from the
checkpoint of step 8. A group whose members have equal rewards is rejected. A line of the table
shows the share of rows that an update interrupted, and the numbers of rejected groups, dropped
groups and masked tokens. Then come the beginnings of two SHA-256 hashes, of the run's last model
and of the replay's. The exit code is 1 if two hashes of a line differ.
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
    "guess": ["--config", "demo", "gconfig.n_samples=4"],
    "maze": ["--config", "maze", "gconfig.n_samples=2", "gconfig.max_new_tokens=150"],
}
FIXED = ["callbacks=[extras.replay.Replay]", "should_accept_fn=bench.replay.has_signal"]
FIXED += ["rollout.max_concurrent_rollouts=5", "train_dataset.batch_size=3", "recover_interval=4"]
FIXED += ["actor.ppo_n_minibatches=2", "actor.ppo_epochs=1", "experiment_name=e", "trial_name=run"]
# With one group in a batch and eta = 1, slow groups become too old before a step consumes them.
OVERTAKEN = ["rollout.max_head_offpolicyness=1", "train_dataset.batch_size=1"]
VARIANTS: dict[str, tuple[int, list[str]]] = {  # number of ranks, keys
    "eta=4": (1, ["rollout.max_head_offpolicyness=4"]),
    "eta=0": (1, ["rollout.max_head_offpolicyness=0"]),
    "eta=2": (1, ["rollout.max_head_offpolicyness=2"]),
    "two ranks": (2, ["rollout.max_head_offpolicyness=4"]),
    "stale=mask": (1, [*OVERTAKEN, "rollout.stale=mask"]),
    "stale=drop": (1, [*OVERTAKEN, "rollout.stale=drop"]),
}


def has_signal(group: dict) -> bool:
    """Whether the rewards of a group differ, because equal ones teach nothing."""
    return len(set(group["rewards"].tolist())) > 1


def train(ranks: int, *words: str, kill_at: str = "") -> None:
    """Run `words` to their end, or kill them at a printed line that begins with `kill_at`."""
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    start = ["-m", *torchrun] if ranks > 1 else ["-u"]
    command = [sys.executable, *start, *words]
    seen = []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        for line in process.stdout:
            seen.append(line)
            if kill_at and line.startswith(kill_at):
                process.kill() if ranks == 1 else process.terminate()  # torchrun ends its ranks
    if process.returncode and not kill_at:
        sys.exit(f"{' '.join(command)}\n{''.join(seen[-40:])}")


def hash_of_last_model(folder: Path) -> str:
    newest = max(folder.glob("checkpoints/step*/model.safetensors"))
    return hashlib.sha256(newest.read_bytes()).hexdigest()


def measure(task: str, variant: str, seed: int, steps: int) -> bool:
    """Train one run, replay it and print a line. Return whether both end with the same model."""
    ranks, keys = VARIANTS[variant]
    with tempfile.TemporaryDirectory() as temporary:
        run, copies = Path(temporary) / "e" / "run", Path(temporary) / "copies"
        words = [*RECIPES[task], *FIXED, *keys, f"seed={seed}", f"max_steps={steps}"]
        words.append(f"fileroot={temporary}")
        train(ranks, "train.py", *words, kill_at=f"step {steps // 2} ")
        train(ranks, "train.py", *words)
        train(ranks, "-m", "extras.replay", str(run), f"fileroot={copies}")
        [copy] = copies.glob("e/*")
        made, again = hash_of_last_model(run), hash_of_last_model(copy)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    mixed = sum(line["mixed_version_share"] for line in lines) / len(lines)
    names = "rejected", "dropped", "masked"
    lost = " | ".join(str(sum(line[name] for line in lines)) for name in names)
    models = f"{made[:12]} | {again[:12]}"
    print(f"| {task} | {variant} | {seed} | {mixed:.0%} | {lost} | {models} |", flush=True)
    return made == again


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--runs", type=int, default=10, help="of each task at eta 4; others: one")
    parser.add_argument("--first", type=int, default=1, help="seed of the first run")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    print("| task | variant | seed | interrupted | rejected | dropped | masked | run | replay |")
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
