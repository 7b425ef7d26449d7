"""Claim: on two cores, asynchronous training of the maze needs less time than synchronous training,
at equal reward.

    python bench/overlap.py                  # all runs: eta 0, 1, 2, 4, and eta 2 with `drain`
    python bench/overlap.py --seconds 200    # start no run after 200 s; call again for the rest
    python bench/overlap.py --etas 0 2 --steps 60 --seeds 301

Every run trains a model with configs/maze.yaml for the same number of steps and on the same number
of samples. The trainer's process runs on one core, and the inference server on another. Finished
runs stay in runs/overlap, and are not repeated.

The column `concurrent` shows rollout.max_concurrent_rollouts. The first seed tries several values
of this key, and the later seeds use only the fastest of them.

The column `update` tells how new weights reach the server. With `interrupt`, an update interrupts
the running walks, which then continue with the new weights. With `drain`, the trainer starts no new
groups, waits until all running ones have finished, and then sends the weights. train.py does not
have this mode; the class `Drained` below implements it.

The remaining columns of the table come from each run's files trace.json, cpu.json and
metrics.jsonl. All times are in seconds.

    `seconds`      time of the whole training, without the start of the processes
    `factor`       `seconds` of the synchronous run with the same seed / `seconds` of this run
    `generation`   CPU time of the inference server
    `training`     CPU time of the trainer's process, which also runs the episodes and the logger
    `oldest`       time that the trainer waited for an older group although B others had finished
    `ideal`        max(generation, training + oldest), the least possible time of the run
    `share`        `ideal` / `seconds`
    `reward`       mean reward in the last ten steps
    `mixed`        share of the walks that an update interrupted

`ideal` includes the time `oldest`, because a step waits for its oldest group even if enough other
groups have finished. For the synchronous run, `ideal` is the time with a perfect overlap of
generation and training. Each cell of the table is the median over the seeds.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

BATCH = 8  # prompt groups in a batch of configs/maze.yaml
CONCURRENT = {
    0: (8,),
    1: (4, 8),
    2: (4, 8),
    4: (4, 8),
}  # for each eta, the values of max_concurrent_rollouts to try
TABLE = "eta,update,concurrent,seconds,factor,generation,training,oldest,ideal,share,reward,mixed"


class Mode(NamedTuple):
    """One mode of training that the benchmark compares."""

    eta: int
    update: str = "interrupt"  # interrupt or drain


def folder_of(root: Path, mode: Mode, concurrent: int, seed: int, steps: int) -> Path:
    return root / "overlap" / f"eta{mode.eta}-{mode.update}-{concurrent}-steps{steps}-seed{seed}"


def cores() -> list[int]:
    """The core of the trainer, and that of the server."""
    return sorted(os.sched_getaffinity(0))[:2]


class Cores:
    """A callback that gives the servers a core of their own, and writes CPU times to cpu.json."""

    def __init__(self, config: Any) -> None:
        self.path = config.run_dir / "cpu.json"
        self.marks: list[dict[str, float]] = []

    def on_start(self, run: Any) -> None:
        self.run, self.pids = run, [x.process.pid for x in run.children if x.name != "proxy"]
        for thread in (t for pid in self.pids for t in Path(f"/proc/{pid}/task").iterdir()):
            os.sched_setaffinity(int(thread.name), {int(os.environ["SERVER_CORE"])})
        self.mark()

    def on_step(self, metrics: dict) -> None:
        if metrics["step"] == self.run.last_step:
            self.mark()
            self.path.write_text(json.dumps(self.marks))

    def mark(self) -> None:
        fields = (Path(f"/proc/{pid}/stat").read_text().split()[13:15] for pid in self.pids)
        ticks = sum(int(ticks) for pair in fields for ticks in pair)
        generation = ticks / os.sysconf("SC_CLK_TCK")
        used = {"training": time.process_time(), "generation": generation}
        self.marks.append({"seconds": time.time(), **used})


def train(update: str, words: list[str]) -> int:
    """Train in this process, with the inference server on another core. Return the exit code."""
    trainer, os.environ["SERVER_CORE"] = cores()[0], str(cores()[-1])
    os.sched_setaffinity(0, {trainer})
    from run.start import begin, main

    begun = begin(words)
    from train import PPOTrainer

    class Drained(PPOTrainer):
        """Lets all running groups finish before it sends new weights."""

        def push(self, version: int) -> None:
            executor = self.run.executor
            executor.dispatcher.pause()
            while executor.stats.running:
                time.sleep(0.001)
            super().push(version)
            executor.dispatcher.resume()

    kind = {"interrupt": PPOTrainer, "drain": Drained}[update]
    return main(begun, lambda run: kind(run.config, run).train())


def behind_the_oldest(trace: list[dict]) -> float:
    """Return the seconds that the trainer waited for a batch although at least BATCH groups had
    finished."""
    points = []  # (time, change of `ready`, change of `waits`)
    for event in trace:
        if event.get("name") == "rollout_wait":
            points += [(event["ts"], 0, 1), (event["ts"] + event["dur"], 0, -1)]
        elif event.get("name") in ("accept", "consume"):
            points.append((event["ts"], 1 if event["name"] == "accept" else -1, 0))
    seconds, ready, waits, last = 0.0, 0, 0, 0.0
    for now, groups, wait in sorted(points):
        if waits and ready >= BATCH:
            seconds += (now - last) / 1e6
        ready, waits, last = ready + groups, waits + wait, now
    return seconds


def measure(folder: Path) -> dict[str, float]:
    """Return the numbers of one run by the names of the table's columns."""
    trace = json.loads((folder / "trace.json").read_text())
    begin, end = json.loads((folder / "cpu.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {name: end[name] - begin[name] for name in begin} | {"oldest": behind_the_oldest(trace)}
    found["ideal"] = max(found["generation"], found["training"] + found["oldest"])
    found["share"] = found["ideal"] / found["seconds"]
    found["reward"] = mean(line["reward"] for line in lines[-10:])
    return found | {"mixed": mean(line["mixed_version_share"] for line in lines)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--etas", nargs="*", type=int, default=[0, 1, 2, 4])
    parser.add_argument(
        "--drain", nargs="*", type=int, default=[2], help="values of eta, with drained servers"
    )
    parser.add_argument("--seeds", nargs="*", type=int, default=[301, 302, 303, 304, 305])
    parser.add_argument("--steps", type=int, default=240, help="training steps of a run")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no run after this time"
    )
    parser.add_argument("--fileroot", type=Path, default=Path("runs"))
    parser.add_argument("--train", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        return train(args.train[0], args.train[1:])

    start = time.monotonic()

    def run(mode: Mode, concurrent: int, seed: int) -> dict[str, float]:
        """Return the numbers that the table shows for a run, which is first made if it does not
        exist."""
        folder = folder_of(args.fileroot, mode, concurrent, seed, args.steps)
        if not (folder / "done").exists():
            if time.monotonic() - start > args.seconds:
                return {}
            folder.mkdir(parents=True, exist_ok=True)
            words = [
                *("--config", "maze", f"seed={seed}", f"max_steps={args.steps}"),
                f"rollout.max_head_offpolicyness={mode.eta}",
                f"rollout.max_concurrent_rollouts={concurrent}",
                "callbacks=[overlap.Cores, extras.trace.Trace]",
                *(f"fileroot={args.fileroot}", "experiment_name=overlap"),
                f"trial_name={folder.name}",
            ]
            command = [sys.executable, __file__, "--train", mode.update, *words]
            with (folder / "output.txt").open("w") as out:
                subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, check=True)
            (folder / "done").write_text(f"load {os.getloadavg()[0]:.1f}\n")
        return measure(folder)

    modes = [*(Mode(eta) for eta in args.etas), *(Mode(eta, "drain") for eta in args.drain)]
    best = {}
    for mode in modes:
        tried = {
            concurrent: run(mode, concurrent, args.seeds[0]) for concurrent in CONCURRENT[mode.eta]
        }
        if all(tried.values()):
            best[mode] = min(tried, key=lambda concurrent: tried[concurrent]["seconds"])
        print(
            mode,
            {
                concurrent: f"{found['seconds']:.0f} s"
                for concurrent, found in tried.items()
                if found
            },
            flush=True,
        )
    # The runs of one seed are made one after another, so that all its modes meet a similar load.
    runs = {mode: list[dict[str, float]]() for mode in best}
    for seed in args.seeds:
        found = {mode: run(mode, concurrent, seed) for mode, concurrent in best.items()}
        for mode, numbers in found.items():
            if numbers:
                sync = found.get(Mode(0)) or {"seconds": float("nan")}
                runs[mode].append(numbers | {"factor": sync["seconds"] / numbers["seconds"]})
    columns = TABLE.split(",")
    print(f"\nmedians of {[len(found) for found in runs.values()]} runs of {args.steps} steps\n")
    print(f"| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|")
    for mode, found in runs.items():
        middle = (
            {name: median(numbers[name] for numbers in found) for name in columns[3:]}
            if found
            else {}
        )
        formats = {"factor": ".2f", "share": ".2f", "reward": ".3f", "mixed": ".0%"}
        cells = [f"{value:{formats.get(name, '.1f')}}" for name, value in middle.items()]
        print(f"| {mode.eta} | {mode.update} | {best[mode]} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
