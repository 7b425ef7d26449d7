"""Compare the training step of this checkout and of an earlier revision: the CPU time of each part,
and the gradients.

    python train.py max_steps=8 trial_name=short              # a run keeps its batches
    python bench/step.py runs/guess/short --against 7827978   # compare with revision 7827978

The code of each source tree, with its own version of the recipe file, trains the newest model of a
finished run on the newest batch of this run. Each pair of measurements runs one process of each
tree, one after the other. A process makes several steps and reports the median CPU time of its
training thread. The table shows medians over the pairs, in milliseconds. The last line shows the
largest difference between the gradients of the two trees, computed with the whole batch as one
mini-batch.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

PARTS = ("prox_logp", "ref_logp", "ppo_update", "step")
COMPUTED = {
    "prox_logp",
    "ref_logp",
    "advantages",
    "theta_logp",
    "step_fraction",
}  # keys that a step adds to a batch


def measure(tree: Path, config: str, run: Path, steps: int, gradients: Path) -> None:
    """Measure the training step of the source tree `tree`. Print the CPU time of each of its parts
    as JSON, and write the gradients of the whole batch to the file `gradients`."""
    sys.path.insert(0, str(tree))
    import torch
    from safetensors.torch import load_file, save_file

    from training.actor import FSDPEngine, FSDPPPOActor

    try:
        from run.config import load
    except ImportError:  # a revision before the keys were pydantic models
        from run.load import load  # type: ignore[no-redef]

    torch.set_num_threads(1)
    batch = load_file(max((run / "tokens").iterdir()))
    batch = {key: x for key, x in batch.items() if key not in COMPUTED}
    model = max((run / "checkpoints").glob("step*"))
    times: dict[str, list[float]] = {name: [] for name in PARTS}
    options = [
        "actor.ppo_epochs=1",
        "actor.ppo_n_minibatches=1",
        "actor.optimizer.gradient_clipping=0",
    ]
    for words, count in ((options, 1), ([], steps)):
        loaded = load(["--config", str(tree / config), *words])
        actor_config = (loaded[0] if isinstance(loaded, tuple) else loaded).actor
        actor = FSDPPPOActor(actor_config, model)
        actor.create_process_group()
        actor.initialize(max_steps=1000)
        ref = FSDPEngine(actor_config, model) if actor_config.kl_ctl else None
        if ref:
            ref.initialize()
        for _ in range(count):
            filled, at = dict(batch), [time.thread_time()]
            filled["prox_logp"] = actor.compute_logp(filled)
            at.append(time.thread_time())
            if ref:
                filled["ref_logp"] = ref.compute_logp(filled)
            at.append(time.thread_time())
            actor.compute_advantages(filled)
            actor.ppo_update(filled)
            at.append(time.thread_time())
            for name, begin, end in zip(PARTS, (0, 1, 2, 0), (1, 2, 3, 3), strict=True):
                times[name].append(1e3 * (at[end] - at[begin]))
        if words:
            found = {name: p.grad for name, p in actor.model.named_parameters()}
            save_file(
                {name: getattr(g, "full_tensor", g.clone)() for name, g in found.items()}, gradients
            )
        actor.destroy()
    print(json.dumps({name: median(values[2:]) for name, values in times.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--against", default="HEAD", help="an earlier revision")
    parser.add_argument(
        "--config", default="configs/demo.yaml", help="the recipe of the run, in both trees"
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="steps of a process")
    parser.add_argument("--measure", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return measure(args.measure[0], args.config, args.run, args.steps, args.measure[1])

    from safetensors.torch import load_file

    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as scratch:
        earlier = Path(scratch) / "earlier"
        earlier.mkdir()
        archive = subprocess.run(
            ["git", "archive", args.against], cwd=root, stdout=subprocess.PIPE, check=True
        ).stdout
        subprocess.run(["tar", "-x", "-C", str(earlier)], input=archive, check=True)
        found: dict[Path, list[dict[str, float]]] = {earlier: [], root: []}
        for tree in list(found) * args.pairs:
            command = [sys.executable, __file__, str(args.run.resolve()), "--config", args.config]
            command += [
                "--steps",
                str(args.steps),
                "--measure",
                str(tree),
                f"{scratch}/{tree.name}.safetensors",
            ]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                command, cwd=tree, env=environment, capture_output=True, text=True, check=True
            )
            found[tree].append(json.loads(done.stdout.splitlines()[-1]))
        print(
            f"{args.pairs} pairs; load {os.getloadavg()[0]:.1f}\n\n| part | before | now | now / before |\n|---|---|---|---|"
        )
        for name in PARTS:
            a, b = ([times[name] for times in found[tree]] for tree in (earlier, root))
            ratio = median(now / max(before, 1e-9) for before, now in zip(a, b, strict=True))
            print(f"| {name} | {median(a):.0f} | {median(b):.0f} | {ratio:.2f} |")
        a, b = (load_file(f"{scratch}/{tree.name}.safetensors") for tree in (earlier, root))
        print(
            f"\nlargest difference between gradients: {max((a[name] - b[name]).abs().max().item() for name in a):.1e}"
        )


if __name__ == "__main__":
    main()
