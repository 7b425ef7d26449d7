"""Claim: the demo learns within seconds. The speedrun measures how long training takes until the policy has learnt.

    python bench/speedrun.py 301 302 303                  one run for each seed
    python bench/speedrun.py 301 302 303 --before DIR     each run beside a run of the checkout DIR, in turn

The time of a run is `wall_s` (docs/metrics.md) of the first step after which the mean success of the last five steps is
at least THRESHOLD. The script ends a run when it has reached the threshold. A run that ends without reaching it counts
as infinitely long. With --before, both checkouts train with the same seed, one directly after the other, and the last
column is the ratio of their times. Only this ratio can be compared between machines. `load` is the machine's one-minute
load average at the start of a run. docs/speedrun.md records the results.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
THRESHOLD = 0.95  # mean success of the last five steps


def seconds_to_learn(metrics: Path) -> float:
    """Return the seconds until the success of the last five steps was at least THRESHOLD, or infinity."""
    text = metrics.read_text() if metrics.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    for k in range(5, len(lines) + 1):
        if sum(line["success"] for line in lines[k - 5 : k]) / 5 >= THRESHOLD:
            return lines[k - 1]["wall_s"]
    return math.inf


def train(checkout: Path, seed: int, words: list[str], folder: Path) -> float:
    """Train in `checkout` until the policy has learnt. Return the seconds, or infinity if the run ends before."""
    folder.mkdir()
    settings = [f"seed={seed}", "experiment_name=speedrun", f"trial_name={seed}", f"fileroot={folder}", *words]
    command = [sys.executable, "train.py", "logger.live=false", *settings]
    with (folder / "output.txt").open("w") as out:
        process = subprocess.Popen(command, cwd=checkout, stdout=out, stderr=subprocess.STDOUT)
        metrics = folder / "speedrun" / str(seed) / "metrics.jsonl"
        while process.poll() is None and math.isinf(seconds_to_learn(metrics)):
            time.sleep(1)
        process.send_signal(signal.SIGINT)
        process.wait()
    return seconds_to_learn(metrics)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seeds", nargs="*", type=int, default=[1])
    parser.add_argument("--before", type=Path, help="another checkout of this project, to compare with")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a configuration key of each run"
    )
    args = parser.parse_args()
    print("| seed | load | seconds | before, seconds | ratio |\n|---|---|---|---|---|")
    times: list[float] = []
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            load = os.getloadavg()[0]
            checkouts = [ROOT, args.before] if args.before else [ROOT]
            took = [train(root, seed, args.set, Path(folder, f"{seed}-{k}")) for k, root in enumerate(checkouts)]
            times.append(took[0])
            ratios += [took[0] / took[1]] if args.before else []
            cells = [str(seed), f"{load:.1f}", *(f"{t:.1f}" for t in took), *(f"{r:.2f}" for r in ratios[-1:])]
            print("| " + " | ".join(cells + [""] * (5 - len(cells))) + " |", flush=True)
    print(
        f"\n{sum(map(math.isfinite, times))} of {len(times)} learnt; median {median(times):.1f} s, worst {max(times):.1f} s"
    )
    if ratios:
        print(f"time / time before: median {median(ratios):.2f}, worst {max(ratios):.2f}")


if __name__ == "__main__":
    main()
