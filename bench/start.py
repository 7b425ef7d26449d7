"""Measure when train.py prints its first words, how long its longest silence is, and how long `--help` takes.

    python bench/start.py

For comparison, the script also measures the time of `python -c 'import torch'`. Each round measures all commands once.
Each run trains the demo for two steps, on a pseudo-terminal (pty) of 80 columns. A silence is the time between two
successive outputs of a run. The first run also makes a base model. The later runs load an existing base model from the
cache.
"""

import argparse
import itertools
import os
import pty
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent


def time_of(*words: str) -> float:
    """Return how many seconds a command takes."""
    begin = time.monotonic()
    subprocess.run([sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - begin


def watch(*words: str) -> tuple[float, float, bytes]:
    """Run a command on a pseudo-terminal. Return the seconds until the first words, the longest later silence in
    seconds, and the output."""
    begin = time.monotonic()
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.execve(
            sys.executable,
            [sys.executable, *words],
            {**os.environ, "COLUMNS": "80", "TERM": "xterm"},
        )
    times, output = [begin], b""
    while True:
        try:
            output += os.read(terminal, 65536)
        except OSError:  # the terminal is closed, because the process has ended
            break
        times.append(time.monotonic())
    os.waitpid(child, 0)
    gaps = [after - before for before, after in itertools.pairwise(times[1:])]
    return times[1] - begin, max(gaps), output


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="number of times that each command runs"
    )
    parser.add_argument(
        "--show", type=Path, help="file for what the terminal received in the last run"
    )
    args = parser.parse_args()
    rows, runs = [], Path(tempfile.mkdtemp())
    for k in range(args.repeats):
        imported, helped = time_of("-c", "import torch"), time_of("train.py", "--help")
        # Only this script uses the seed 1,000,007. The script deletes an old base model of the seed 1,000,007, so that
        # the first run has to make the base model.
        shutil.rmtree(
            next((ROOT / ".cache").glob("tasks.guess-1000007-*"), runs / "none"), ignore_errors=True
        )
        seed = "seed=1000007" if k == 0 else "seed=1"
        words = ("train.py", "max_steps=2", f"fileroot={runs}", f"trial_name={k}", seed)
        first, silence, output = watch(*words)
        rows.append((imported, helped, first, silence))
        print(
            "import torch {:.1f} s, --help {:.1f} s, first words {:.1f} s, longest silence {:.1f} s".format(
                *rows[-1]
            )
        )
    if args.show:
        args.show.write_bytes(output)
    print("medians", *(f"{median(column):.1f}" for column in zip(*rows, strict=True)))
    shutil.rmtree(runs)


if __name__ == "__main__":
    main()
