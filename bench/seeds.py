"""Train one run for each seed, one after another, and print a table that shows what each learnt.

    python bench/seeds.py 1 2 3 4 5 31 32 33 34 35
    python bench/seeds.py --config maze 101 102 103
    python bench/seeds.py --config tool --evaluate --goal 0.9 1 2 3

Runs that exist (runs/seeds/<experiment>/seed<k>) are not repeated. `first` is the success in step
1, before any training, and `last five` the mean of the last five steps. `seconds to goal` is the
time of training until the mean success of five successive steps reaches --goal; the last line has
its median and its maximum. `load` is the machine's one-minute load average at the start: above 2, a
machine with two cores was busy with something else. With --evaluate, `base` and `held out` are the
successes of greedy answers to the validation prompts, before and after training.
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


def train(config: str, seed: int, folder: Path, root: Path, callbacks: str) -> None:
    """Run train.py and write the load average to the run's folder. Do nothing if the run's metrics
    exist already."""
    if (folder / "metrics.jsonl").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "load.txt").write_text(f"{os.getloadavg()[0]:.1f}")
    words = [f"seed={seed}", f"trial_name={folder.name}", f"fileroot={root}"]
    words += [f"callbacks=[{callbacks}]"]
    command = [sys.executable, "train.py", "--config", config, *words]
    with (folder / "output.txt").open("w") as out:
        subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, check=True)


def seconds(lines: list[dict], k: int) -> float:
    """Return the seconds from the beginning of step 1 to the end of step k. The base model was
    evaluated before."""
    return lines[k - 1]["wall_s"] - lines[0]["wall_s"] + lines[0]["step_s"]


def seconds_to(lines: list[dict], goal: float) -> float:
    """Return the seconds of training until the mean success of five successive steps reaches
    `goal`. Return infinity if no five steps reach `goal`."""
    ends = (
        k
        for k in range(5, len(lines) + 1)
        if mean(line["success"] for line in lines[k - 5 : k]) >= goal
    )
    return next((seconds(lines, k) for k in ends), math.inf)


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
        f"{seconds(lines, len(lines)):.0f}",
        f"{reached:.0f}",
        load_file.read_text() if load_file.exists() else "?",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seeds", nargs="*", type=int, default=[1])
    parser.add_argument("--config", default="demo")
    parser.add_argument("--goal", type=float, default=0.95)
    parser.add_argument("--evaluate", action="store_true", help="before and after training")
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
        *(["base", "held out"] if args.evaluate else []),
    ]
    callbacks = "extras.before_after.BeforeAfter" if args.evaluate else ""
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    times = []
    for seed in args.seeds:
        folder = args.fileroot / name / f"seed{seed}"
        train(args.config, seed, folder, args.fileroot, callbacks)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        times.append(seconds_to(lines, args.goal))
        evaluations = [folder / f"eval_{name}.json" for name in ("base", "trained")]
        found = [json.loads(file.read_text()) for file in evaluations if args.evaluate]
        cells = [f" {one['eval_success']:.3f} |" for one in found]
        print(row(seed, folder, lines, times[-1]) + "".join(cells), flush=True)
    print(f"seconds to {args.goal}: median {median(times):.0f}, largest {max(times):.0f}")


if __name__ == "__main__":
    main()
