"""Claim: a pretrained model learns a tool faster if training and generation overlap.

    make compare                                      two runs, one table, one figure
    python bench/compare.py --seeds 1 2 3 --steps 20

Each seed trains twice on the same problems: synchronously (eta 0) and asynchronously (eta 1). The
trainer and the small server have one thread each, so that both runs have the same two cores.
Finished runs (runs/compare) are not repeated. The columns of the table:

    seconds    of training, without the start of the processes and the first evaluation
    waiting    share of these seconds in which the trainer waited for a batch
    success    among the episodes of the last five steps
    held out   success on the held-out problems after training, with its Wilson interval
    factor     seconds of the synchronous run / seconds of this one

docs/compare.svg shows the first steps of the first seed's two runs on one time axis, and the
success of both runs over the whole time.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from docs import figures  # noqa: E402

MODES = {0: "synchronous", 1: "asynchronous"}  # by eta
SHOWN = 5  # steps in the timelines


def train(folder: Path, eta: int, seed: int, steps: int) -> None:
    """Make the run unless it is there."""
    if (folder / "checkpoints" / f"step{steps:05d}").is_dir():
        return
    words = [f"fileroot={folder.parent.parent}", f"experiment_name={folder.parent.name}"]
    words += [f"trial_name={folder.name}", f"seed={seed}", f"max_steps={steps}"]
    words += [f"rollout.max_head_offpolicyness={eta}", "rollout.enable_tracing=true"]
    words += ["server.threads=1", "actor.threads=1", "recover_interval=0"]
    words += ["callbacks=[extras.before_after.BeforeAfter]"]
    subprocess.run([sys.executable, "train.py", "--config", "tool", *words], cwd=ROOT, check=True)


def read(folder: Path) -> dict[str, Any]:
    """What the table and the figure need from a finished run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    begin = lines[0]["wall_s"] - lines[0]["step_s"]  # the base model was evaluated before
    seconds = lines[-1]["wall_s"] - begin
    return {
        "seconds": seconds,
        "waiting": sum(line["rollout_wait_s"] for line in lines) / seconds,
        "success": mean(line["success"] for line in lines[-5:]),
        "held_out": json.loads((folder / "eval_trained.json").read_text()),
        "curve": [[line["wall_s"] - begin, line["success"]] for line in lines],
        "run": figures.read_run(folder, SHOWN),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--fileroot", type=Path, default=Path("runs"))
    args = parser.parse_args()
    found: dict[int, dict[int, Any]] = {}
    for seed in args.seeds:
        for eta in MODES:
            folder = args.fileroot / "compare" / f"eta{eta}-seed{seed}"
            train(folder, eta, seed, args.steps)
            found.setdefault(seed, {})[eta] = read(folder)
    print("| seed | run | seconds | waiting | success | held out | factor |\n" + "|---" * 7 + "|")
    for seed, pair in found.items():
        for eta, one in pair.items():
            held = "{eval_success:.2f} ({eval_success_low:.2f} to {eval_success_high:.2f})"
            cells = [MODES[eta], f"{one['seconds']:.0f}", f"{one['waiting']:.0%}"]
            cells += [f"{one['success']:.2f}", held.format(**one["held_out"])]
            print(
                f"| {seed} |", " | ".join(cells), f"| {pair[0]['seconds'] / one['seconds']:.2f} |"
            )
    figures.keep(compare={MODES[eta]: one for eta, one in found[args.seeds[0]].items()})
    print(figures.compared(found[args.seeds[0]][1], found[args.seeds[0]][0]))


if __name__ == "__main__":
    main()
