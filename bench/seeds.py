"""Train one run for each seed, one after another, and print a table of what each learnt.

    python bench/seeds.py 1 2 3 4 5 31 32 33 34 35
    python bench/seeds.py --config maze 101 102 103
    python bench/seeds.py --config tool --evaluate 20 --goal 0.9 1 2 3

Runs that exist (runs/seeds/<experiment>/seed<k>) are not repeated. `first` is the success in step
1, before any training, and `last five` the mean of the last five steps. `seconds` are those of
training: waiting, learning and updating the servers. `seconds to goal` counts them until the mean
success of five successive steps reaches --goal, and the last line has its median and maximum.
`load` is the machine's one-minute load average at the start. If it is above 2, a machine with two
cores was busy with something else. With --evaluate N, `held out` is the success on the validation
prompts after every N steps, and this success must reach the goal.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from run.config import load  # noqa: E402


def train(config: str, seed: int, folder: Path, root: Path, interval: int) -> None:
    """Run train.py and write the load average to the run's folder. Do nothing if the run's metrics
    exist already."""
    if (folder / "metrics.jsonl").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "load.txt").write_text(f"{os.getloadavg()[0]:.1f}")
    words = [f"seed={seed}", f"trial_name={folder.name}", f"fileroot={root}"]
    words += ["callbacks=[]", f"evaluator.interval={interval}"]
    command = [sys.executable, "train.py", "--config", config, *words]
    with (folder / "output.txt").open("w") as out:
        subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, check=True)


def seconds(lines: list[dict]) -> float:
    """Return the seconds of training, without evaluations and checkpoints."""
    return sum(line[part] for line in lines for part in ("rollout_wait_s", "train_s", "sync_s"))


def seconds_to(lines: list[dict], goal: float) -> float:
    """Return the seconds of training until the success on validation prompts, or without
    evaluations the mean success of five successive steps, reaches `goal`. Return infinity if it
    does not."""
    found = {k: line["eval_success"] for k, line in enumerate(lines, 1) if "eval_success" in line}
    ends = range(5, len(lines) + 1)
    found = found or {k: mean(line["success"] for line in lines[k - 5 : k]) for k in ends}
    return next((seconds(lines[:k]) for k, success in found.items() if success >= goal), math.inf)


def row(seed: int, folder: Path, lines: list[dict], reached: float) -> str:
    """Return the table row of a run that reached the goal after `reached` seconds."""
    load_file = folder / "load.txt"
    cells = [
        str(seed),
        f"{lines[0]['success']:.3f}",
        f"{mean(line['success'] for line in lines[-5:]):.3f}",
        f"{mean(line['reward'] for line in lines[-5:]):.3f}",
        f"{mean(line['staleness_mean'] for line in lines):.2f}",
        f"{max(line['staleness_max'] for line in lines):.0f}",
        f"{mean(line['mixed_version_share'] for line in lines):.0%}",
        f"{max(line['logp_mismatch'] for line in lines):.0e}",
        f"{len(lines)}",
        f"{seconds(lines):.0f}",
        f"{reached:.0f}",
        load_file.read_text() if load_file.exists() else "?",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seeds", nargs="*", type=int, default=[1])
    parser.add_argument("--config", default="demo")
    parser.add_argument("--goal", type=float, default=0.95)
    parser.add_argument("--evaluate", type=int, default=0, help="after so many steps each")
    parser.add_argument("--fileroot", type=Path, default=Path("runs/seeds"))
    args = parser.parse_args()
    name = load(["--config", args.config])[0].experiment_name
    names = [
        "seed",
        "first",
        "last five",
        "reward",
        "staleness",
        "max",
        "mixed",
        "mismatch",
        "steps",
        "seconds",
        f"seconds to {args.goal}",
        "load",
        *(["held out"] if args.evaluate else []),
    ]
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    times = []
    for seed in args.seeds:
        folder = args.fileroot / name / f"seed{seed}"
        train(args.config, seed, folder, args.fileroot, args.evaluate)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        times.append(seconds_to(lines, args.goal))
        found = [f"{line['eval_success']:.2f}" for line in lines if "eval_success" in line]
        held_out = f" {', '.join(found)} |" if args.evaluate else ""
        print(row(seed, folder, lines, times[-1]) + held_out, flush=True)
    print(f"seconds to {args.goal}: median {median(times):.0f}, largest {max(times):.0f}")


if __name__ == "__main__":
    main()
