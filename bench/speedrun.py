"""Measure how fast the demo learns: seconds of training until the mean success of five successive steps is .95.

    python bench/speedrun.py 401 402 403                       one run of this checkout for each seed
    python bench/speedrun.py --against 39d5181 1 2 3           for each seed, first 39d5181 and then this checkout

Each run is the whole demo (train.py with the recipe of its own revision) in new processes. The table shows three
durations, in seconds. `start` is the time from the command to the end of the first training step. `to .95` is the time
from the start of training until the mean success reaches .95 (`seconds_to` in bench/seeds.py). `whole` is the time of
the whole command. The base models of the seeds are made before the measurement. `load` is the machine's one-minute load
average before a run.

At the end the benchmark prints the medians of the three times, and the largest `to .95`. With `--against` the benchmark
also divides each run's times by the times of the earlier revision, and prints the medians of these ratios. A run that
does not reach .95 counts as infinitely slow.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.seeds import seconds_to  # noqa: E402


class Times(NamedTuple):
    """The times of one run in seconds, and the number of steps until the mean success reached .95."""

    start: float
    to_goal: float
    whole: float
    steps: float


def extract(revision: str, folder: Path) -> None:
    """Write the source tree of a revision into a new folder."""
    folder.mkdir()
    archive = subprocess.run(
        ["git", "archive", revision], cwd=ROOT, capture_output=True, check=True
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)


def command(config: str, seed: int, *words: str) -> list[str]:
    """Return the command of a run."""
    return [
        sys.executable,
        "train.py",
        "--config",
        config,
        f"seed={seed}",
        "logger.live=false",
        *words,
    ]


def train(tree: Path, config: str, seed: int, folder: Path) -> Times:
    """Run the demo of a source tree in a new folder, and return its times."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    # If the base model does not exist yet, the dry run makes the base model.
    subprocess.run(
        command(config, seed, "--dry-run"),
        cwd=tree,
        env=environment,
        capture_output=True,
        check=True,
    )
    begin, start = time.monotonic(), math.nan
    words = command(
        config, seed, f"fileroot={folder}", "experiment_name=speedrun", f"trial_name={seed}"
    )
    with subprocess.Popen(
        words, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout or ():
            if line.startswith("step 1 "):
                start = time.monotonic() - begin
    whole = time.monotonic() - begin
    if process.returncode:
        raise SystemExit(f"{' '.join(words)}: ended with code {process.returncode}")
    lines = [
        json.loads(line)
        for line in (folder / f"speedrun/{seed}/metrics.jsonl").read_text().splitlines()
    ]
    reached = seconds_to(lines)
    return Times(start, reached, whole, sum(line["wall_s"] <= reached for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seeds", nargs="*", type=int, default=[1])
    parser.add_argument(
        "--config", default="configs/demo.yaml", help="the recipe, in both source trees"
    )
    parser.add_argument(
        "--against", help="an earlier revision, which runs before this checkout, seed by seed"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        trees = {"now": ROOT}
        if args.against:
            trees = {"before": Path(scratch) / "earlier", **trees}
            extract(args.against, trees["before"])
        found: dict[str, list[Times]] = {name: [] for name in trees}
        print(
            "| revision | seed | start | to .95 | whole | steps to .95 | load |\n|---|---|---|---|---|---|---|"
        )
        for seed in args.seeds:
            for name, tree in trees.items():
                load = os.getloadavg()[0]
                times = train(tree, args.config, seed, Path(scratch) / name)
                found[name].append(times)
                cells = [
                    name,
                    str(seed),
                    *(f"{value:.1f}" for value in times[:3]),
                    f"{times.steps:.0f}",
                    f"{load:.1f}",
                ]
                print("| " + " | ".join(cells) + " |", flush=True)
    for name, runs in found.items():
        middle = Times(*map(median, zip(*runs, strict=True)))
        reached = sum(math.isfinite(times.to_goal) for times in runs)
        print(
            f"{name}: {reached} of {len(runs)} reach .95; medians: start {middle.start:.1f}, to .95 "
            f"{middle.to_goal:.1f}, whole {middle.whole:.1f}; largest to .95: {max(t.to_goal for t in runs):.1f}"
        )
    if args.against:
        pairs = zip(found["before"], found["now"], strict=True)
        ratios = [[now / before for before, now in zip(*pair, strict=True)] for pair in pairs]
        start, to_goal, whole, _ = map(median, zip(*ratios, strict=True))
        print(
            f"now / before, medians of the pairs: start {start:.2f}, to .95 {to_goal:.2f}, whole {whole:.2f}"
        )


if __name__ == "__main__":
    main()
