"""Kill random processes of a run, start it again, and check that each step was trained once.

    python bench/soak.py                               # 60 kills in 200 steps (`make soak`)
    python bench/soak.py --kills 5 --steps 12 --seed 7 # kill 5 processes in 12 steps
    python bench/soak.py --damage 20                   # and damage 20 checkpoints between kills
    python bench/soak.py --freezes 10 --steps 20       # suspend processes, kill none
    python bench/soak.py --steps 170 --usage docs/episodes   # measure memory

After a random number of steps, or during the start, the trainer, the proxy or the server is killed
(kill -9). The run must end and leave no process behind. Then the same command starts it again.

In the end metrics.jsonl must have every step once. Every step must have trained 6 prompt groups
(the batch size), and no group may be in two steps. Of the groups, numbered from 0, every one below
(steps - eta - 1) * 6 must be trained, and none from (steps + eta + 1) * 6 on. No group may be older
than eta, and no token may have a later version than its step.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from load import usage, write_usage
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"trainer": r"train\.py", "proxy": r"-m proxy\b", "server": r"inference\.tiny\.server\b"}
BATCH = 6  # prompt groups in a step
ETA = 2  # largest allowed age of a group
GAMES = 20  # games in a group


def pids(run: subprocess.Popen) -> dict[str, int]:
    """Return the pids of the run's living processes, by role."""
    table = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout
    found = {"trainer": run.pid}
    for pid, parent, args in (line.split(None, 2) for line in table.splitlines()):
        if int(parent) == run.pid:
            found |= {role: int(pid) for role, script in SCRIPTS.items() if re.search(script, args)}
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process is running. A zombie has ended and does not count."""
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True
    ).stdout.strip()
    return bool(state) and not state.startswith("Z")


def start(command: list[str], log: TextIO) -> subprocess.Popen:
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)


def end(run: subprocess.Popen, up: set[int], log: TextIO, seconds: float | None = 120) -> int:
    """Wait until the run and all its processes have ended. Return its exit code."""
    log.write(run.communicate(timeout=seconds)[0])
    deadline = (
        time.monotonic() + 120
    )  # a server that is still importing modules takes longer to end
    while left := [pid for pid in up if is_alive(pid)]:
        if time.monotonic() > deadline:
            raise SystemExit(f"processes {left} outlived the run")
        time.sleep(0.05)
    return run.returncode


def damage(recover: Path, rng: random.Random) -> str:
    """Remove, cut, or change one bit of a file of the newest checkpoint. Return what was done, or
    "" if there is no checkpoint before it."""
    folders = sorted(recover.glob("step*"))
    if len(folders) < 2:
        return ""
    file = rng.choice(sorted(folders[-1].iterdir()))
    content, way = bytearray(file.read_bytes()), rng.choice(["removed", "cut", "changed"])
    place = rng.randrange(len(content))
    if way == "removed":
        file.unlink()
    elif way == "cut":
        os.truncate(file, place)
    else:
        content[place] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
    return f"{folders[-1].name}/{file.name} {way}"


def kill(command: list[str], rng: random.Random, kills: int, damages: int, run_dir: Path) -> None:
    """Kill random processes of the run, and start the run again whenever it has ended; before some
    starts, damage the newest checkpoint. After the last kill, let the run finish."""
    with (run_dir / "soak.log").open("a") as log:
        run, up, done = start(command, log), set[int](), 0
        while done < kills:
            kind, number, moment = (
                rng.choice(["line", *["step"] * 4]),
                rng.randint(1, 6),
                rng.uniform(0, 0.5),
            )
            assert run.stdout is not None
            while number and (line := run.stdout.readline()):
                log.write(line)
                number -= kind == "line" or line.startswith("step ")
            if number:  # the output ended, so the run has ended
                code = end(run, up, log)
                print(f"the run ended with exit code {code}", flush=True)
                if not code:
                    raise SystemExit(
                        f"the run trained its last step before kill {done + 1}; give more --steps"
                    )
                if code == 2:
                    raise SystemExit(f"the run could not start; see {log.name}")
                if damages and (what := damage(run_dir / "recover", rng)):
                    damages -= 1
                    print(f"damage: {what}", flush=True)
                run, up = start(command, log), set()
                continue
            time.sleep(moment)  # wait for a random time before the kill
            now = pids(run)
            up |= {*now.values()}
            victim = rng.choice(sorted(now))
            if run.poll() is not None:
                continue
            with suppress(ProcessLookupError):  # the process has already ended by itself
                os.kill(now[victim], signal.SIGKILL)
                done += 1
                lines = (
                    (run_dir / "metrics.jsonl").read_text().count("\n")
                    if (run_dir / "metrics.jsonl").exists()
                    else 0
                )
                print(f"kill {done}: {victim}, {lines} lines in metrics.jsonl", flush=True)
        if code := end(run, up, log, None):
            print(f"the run ended with exit code {code}", flush=True)
            assert not damages, f"{damages} checkpoints were not damaged; give more --kills"
            if end(start(command, log), up, log, None):
                raise SystemExit(f"the last start failed; see {log.name}")


def freeze(command: list[str], rng: random.Random, freezes: int, log: Path) -> None:
    """Run the command to its end. From step 1 on, after each of the next `freezes` lines of output,
    suspend one random process of the run for up to 10 seconds."""
    with log.open("a") as out, start(command, out) as run:
        assert run.stdout is not None
        seen, steps = 0, 0
        for line in run.stdout:
            out.write(line)
            steps += line.startswith("step ")
            if not steps or seen == freezes:
                continue
            up, seconds = pids(run), rng.uniform(0, 10)
            victim = rng.choice(sorted(up))
            os.kill(up[victim], signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(up[victim], signal.SIGCONT)
            seen += 1
            print(f"freeze {seen}: {victim} for {seconds:.1f} s after {steps} steps", flush=True)
    assert (run.returncode, seen) == (0, freezes), f"exit code {run.returncode}; see {log}"


def watch(command: list[str], log: Path, steps: int, path: Path) -> None:
    """Run the command to its end. At about 40 of its steps, measure the memory and the open
    descriptors of its processes, and write them to `path`."""
    samples, begin = list[list[float]](), time.monotonic()
    with log.open("a") as out, start(command, out) as run:
        assert run.stdout is not None
        for line in run.stdout:
            out.write(line)
            step = int(line.split()[1].split("/")[0]) if line.startswith("step ") else 0
            if (
                step and step % max(steps // 40, 1) == 0 and step < steps
            ):  # after the last step, the processes end
                up = pids(run)
                (mb, files) = zip(*(usage(up[role]) for role in SCRIPTS))
                samples.append(
                    [BATCH * GAMES * step, round(time.monotonic() - begin, 1), *mb, *files]
                )
    assert run.returncode == 0, f"exit code {run.returncode}; see {log}"
    columns = [
        "episodes",
        "seconds",
        *(f"{role}_{unit}" for unit in ("mb", "files") for role in SCRIPTS),
    ]
    write_usage(path, columns, samples)
    for row in (columns, *samples):
        print(f"| {' | '.join(map(str, row))} |")


def check(run_dir: Path, steps: int) -> None:
    """Check the trained samples of all steps, and print a summary."""
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == list(range(1, steps + 1)), "every step once"
    seen: dict[int, int] = {}
    for line in metrics:
        ledger = load_file(run_dir / "tokens" / f"{line['step']:05d}.safetensors")
        groups = set(ledger["task_ids"].tolist())
        assert len(groups) == BATCH, f"step {line['step']} trained {len(groups)} groups"
        assert not groups & seen.keys(), f"step {line['step']} trained {groups & seen.keys()} again"
        assert line["staleness_max"] <= ETA, f"step {line['step']} trained a group that is too old"
        assert int(ledger["versions"].max()) <= line["version"], (
            f"step {line['step']} trained a token of the future"
        )
        seen |= dict.fromkeys(groups, line["step"])
    assert max(seen) < (steps + ETA + 1) * BATCH, "the gate opened too wide"
    missing = set(range((steps - ETA - 1) * BATCH)) - seen.keys()
    assert not missing, f"groups {sorted(missing)} were drawn and never trained on"
    print(
        f"{steps} steps, each once; {len(seen)} groups, none twice, none missing; max age {ETA} kept"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--damage", type=int, default=0, help="checkpoints to damage")
    parser.add_argument(
        "--freezes", type=int, default=0, help="stop processes for a time, and kill none"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--usage", type=Path, help="measure memory and descriptors, kill none; path without suffix"
    )
    parser.add_argument("--fileroot", type=Path, default=Path("runs/soak"))
    args = parser.parse_args()
    rng, name = random.Random(args.seed), time.strftime("%Y%m%d-%H%M%S")
    run_dir = args.fileroot / "guess" / name
    run_dir.mkdir(parents=True)
    words = [f"fileroot={args.fileroot}", f"trial_name={name}", "callbacks=[]"]
    words += [
        f"max_steps={args.steps}",
        f"rollout.max_head_offpolicyness={ETA}",
        "recover_interval=2",
    ]
    if not args.usage:
        words += ["gconfig.n_samples=4", "actor.ppo_n_minibatches=2", "actor.ppo_epochs=1"]
    command = [sys.executable, "-u", "train.py", *words]
    print(f"seed {args.seed}; {' '.join(command[1:])}", flush=True)
    if args.usage:
        watch(command, run_dir / "soak.log", args.steps, args.usage)
    elif args.freezes:
        freeze(command, rng, args.freezes, run_dir / "soak.log")
    else:
        kill(command, rng, args.kills, args.damage, run_dir)
    check(run_dir, args.steps)


if __name__ == "__main__":
    main()
