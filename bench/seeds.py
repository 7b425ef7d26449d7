"""Train one run for each seed, one after another, and print a table that shows whether each run has learnt.

    python bench/seeds.py 1 2 3 4 5 31 32 33 34 35
    python bench/seeds.py --config configs/maze.yaml 101 102 103

If a run exists already (runs/seeds/<experiment>/seed<k>), the script uses its metrics and does not train again. `first`
is the success in the first step, in which the policy is still untrained. `last five` is the mean success in the last
five steps. `load` is the machine's one-minute load average at the start of the run. On a machine with two cores, a load
above 2 means that other programs were running.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from run.config import load  # noqa: E402


def train(config: str, seed: int, folder: Path, root: Path) -> None:
    """Run train.py and write the load average to the run's folder. Do nothing if the run's metrics exist already."""
    if (folder / "metrics.jsonl").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "load.txt").write_text(f"{os.getloadavg()[0]:.1f}")
    words = [f"seed={seed}", f"trial_name={folder.name}", f"fileroot={root}", "logger.live=false"]
    command = [sys.executable, "train.py", "--config", config, *words]
    with (folder / "output.txt").open("w") as out:
        subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, check=True)


def row(seed: int, folder: Path) -> str:
    """Return the table row of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
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
        f"{lines[-1]['wall_s']:.0f}",
        load_file.read_text() if load_file.exists() else "?",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seeds", nargs="*", type=int, default=[1])
    parser.add_argument("--config", default="configs/demo.yaml")
    parser.add_argument("--fileroot", type=Path, default=Path("runs/seeds"))
    args = parser.parse_args()
    name = load(["--config", args.config]).experiment_name
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
        "load",
    ]
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for seed in args.seeds:
        folder = args.fileroot / name / f"seed{seed}"
        train(args.config, seed, folder, args.fileroot)
        print(row(seed, folder), flush=True)


if __name__ == "__main__":
    main()
