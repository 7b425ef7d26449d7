"""Claim: asynchronous training overlaps generation and training, at the reward of synchronous training.

    python bench/overlap.py --steps 60 --repeats 5
    python bench/overlap.py --quick

Each run trains the maze (configs/maze.yaml) for the same number of steps, so all runs train on the same number of
samples. The trainer has one core and the inference server another. eta = 0 is synchronous training. For each eta the
benchmark tries several values of max_concurrent_rollouts (`groups`). The runs of one repeat follow each other, so that
a change of the machine's load meets all of them. The first SKIP steps of a run do not count.

    s/step      seconds per step; with several repeats the median, also in all other columns
    generation  CPU seconds of the server per step
    training    seconds per step in which the trainer trains or pushes weights
    wait        seconds per step in which the trainer waits for the groups that started first
    ideal       the larger of generation and training: the time of a step with perfect overlap; with eta = 0 their sum
    of ideal    ideal / (s/step)
    speed       s/step of synchronous training / (s/step), within one repeat
    reward      mean reward of the last ten steps

The updates of `drain` let all running generations finish before the trainer pushes weights. The other updates interrupt
the running generations. `drain` exists only in this benchmark.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SKIP = 5  # steps at the start of a run that do not count
COLUMNS = ["generation", "training", "wait", "ideal", "of ideal", "speed", "reward"]


def server_pid() -> int:
    """Return the process id of the inference server that this process has started."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        parent = path.read_text().rpartition(")")[2].split()[1]
        if parent == str(os.getpid()) and b"inference.tiny.server" in path.with_name("cmdline").read_bytes():
            return int(path.parent.name)
    raise RuntimeError("no server process")


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def train(drain: bool, log: Path, words: list[str]) -> int:
    """Run train.py in this process. Write the server's CPU seconds before each push of weights to `log`."""
    from engine import RemoteInfEngine
    from run.command import main as run_main
    from train import PPOTrainer

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    pause, initialize = RemoteInfEngine.pause, RemoteInfEngine.initialize
    pids: list[int] = []

    def initialize_on_a_core(self: RemoteInfEngine) -> None:
        pids.append(server_pid())
        for thread in os.listdir(f"/proc/{pids[0]}/task"):
            os.sched_setaffinity(int(thread), cores[-1:])
        initialize(self)

    def pause_and_note(self: RemoteInfEngine) -> None:
        if drain:
            self.executor.pause()  # starts no further episode
            while "running=0" not in self.servers.post_all("/model_info")[0]["state"]:
                time.sleep(0.01)
        with log.open("a") as out:
            out.write(f"{cpu_seconds(pids[0])}\n")
        pause(self)

    setattr(RemoteInfEngine, "initialize", initialize_on_a_core)  # noqa: B010
    setattr(RemoteInfEngine, "pause", pause_and_note)  # noqa: B010
    return run_main(lambda config: PPOTrainer(config).train(), words)


def measure(eta: int, groups: int, update: str, steps: int, seed: int) -> dict[str, float]:
    """Make one run and return its columns, without `speed`."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--config", "configs/maze.yaml", f"seed={seed}", f"max_steps={steps}", "logger.live=false"]
        words += [f"rollout.max_head_offpolicyness={eta}", f"rollout.max_concurrent_rollouts={groups}"]
        words += [f"fileroot={folder}", "trial_name=run", "recover_interval=0"]
        log = Path(folder, "cpu")
        command = [sys.executable, __file__, "--run", update, str(log), *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        lines = [json.loads(line) for line in Path(folder, "maze", "run", "metrics.jsonl").read_text().splitlines()]
        cpu = [float(line) for line in log.read_text().split()]
    counted, n = lines[SKIP:], steps - SKIP
    row = {"s/step": (lines[-1]["wall_s"] - lines[SKIP - 1]["wall_s"]) / n}
    row["generation"] = (cpu[-1] - cpu[SKIP - 1]) / n
    row["training"] = mean(line["train_s"] + line["sync_s"] for line in counted)
    row["wait"] = mean(line["rollout_wait_s"] for line in counted)
    parts = row["generation"], row["training"]
    row["ideal"] = max(parts) if eta else sum(parts)
    return row | {"of ideal": row["ideal"] / row["s/step"], "reward": mean(line["reward"] for line in lines[-10:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--groups", type=int, nargs="+", default=[3, 8, 16], help="values of max_concurrent_rollouts")
    parser.add_argument("--etas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="15 steps, eta 0 and 2, one value of groups")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.etas, args.groups = 15, [2], [8]
    plans: list[tuple[int, int, str]] = [(0, 8, "interrupt")]
    plans += [(eta, groups, "interrupt") for eta in args.etas for groups in args.groups]
    plans += [(2, groups, "drain") for groups in args.groups if 2 in args.etas]
    found: dict[tuple[int, int, str], list[dict[str, Any]]] = {plan: [] for plan in plans}
    for repeat in range(args.repeats):
        sync = 0.0
        for plan in plans:
            row = measure(*plan, args.steps, args.seed + repeat)
            sync = sync or row["s/step"]
            found[plan].append(row | {"speed": sync / row["s/step"]})
            print(plan, {key: round(value, 3) for key, value in found[plan][-1].items()}, file=sys.stderr, flush=True)
    print(f"load {os.getloadavg()[0]:.1f}, {args.steps} steps, {args.repeats} repeats\n")
    names = ["eta", "groups", "update", "s/step", *COLUMNS]
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for plan, rows in found.items():
        cells = [f"{median(row[key] for row in rows):.2f}" for key in ["s/step", *COLUMNS]]
        print("| " + " | ".join([*map(str, plan), *cells]) + " |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        sys.exit(train(sys.argv[2] == "drain", Path(sys.argv[3]), sys.argv[4:]))
    main()
