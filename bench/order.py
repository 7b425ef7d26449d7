"""Claim: if a few episodes are very long, rollout.stale=wait costs time, mask costs tokens, and
drop costs groups.

    python bench/order.py                                  # a run for each value of rollout.stale
    python bench/order.py --seeds 1 2 3 --modes wait mask  # three with wait, three with mask

The simulation bench/clusters.py estimates the costs of wait, mask and drop in virtual time. The
benchmark bench/order.py measures the costs of wait, mask and drop in real runs.

Each run trains a model on the maze (configs/maze.yaml) for the same number of steps and on the same
number of samples. In the maze, the time of an episode depends only on the length of its walk. A
real agent also waits for tools and for people, so the benchmark adds a pause to each walk. Each
walk pauses after its first 12 tokens, and all walks of a group pause for the same time. The pause
has a lognormal distribution with sigma 1.5 and a mean of --pause seconds. The pause depends only on
the group's number, so all runs have the same pauses. While a walk pauses, the trainer makes new
policy versions. After the pause, a newer policy version samples the rest of the walk.

The table shows the seconds up to the last step, and the seconds that the trainer waited. The table
also shows the mean reward of the first ten steps and of the last ten steps. Three more columns show
the share of masked tokens, the number of dropped groups, and the largest age of a group.
"""

import argparse
import asyncio
import json
import math
import random
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from inference.io_struct import ModelRequest  # noqa: E402
from workflow import RLVRWorkflow, to_row, workflow_context  # noqa: E402

SIGMA, FIRST = (
    1.5,
    12,
)  # standard deviation of the pause's logarithm; number of tokens before the pause
MODES = ("wait", "mask", "drop")


def pause(task_id: int, mean_s: float) -> float:
    """Return the pause of a group in seconds. Over many groups the mean pause is `mean_s`, and the
    median pause is a third of the mean."""
    return random.Random(task_id).lognormvariate(math.log(mean_s) - SIGMA**2 / 2, SIGMA)


class PausingWalk(RLVRWorkflow):
    """Generate a walk in two parts, with a pause after FIRST tokens."""

    def __init__(self, reward_fn: str, gconfig: Any, tokenizer: Any, pause_s: float) -> None:
        super().__init__(reward_fn, gconfig, tokenizer)
        self.pause_s = pause_s

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        context, prompt = workflow_context.get(), self.prompt_ids(data["messages"])
        whole = None
        for turn, limit in enumerate((FIRST, self.gconfig.max_new_tokens - FIRST)):
            ids = prompt + (whole.output_tokens if whole else [])
            gconfig = self.gconfig.for_call(
                n_samples=1, seed=context.seed_of(turn), max_new_tokens=limit
            )
            part = await engine.agenerate(
                ModelRequest(ids, gconfig=gconfig, call=f"{context.name}.{turn}")
            )
            if whole is not None:
                part = replace(
                    part,
                    input_tokens=prompt,
                    output_tokens=whole.output_tokens + part.output_tokens,
                    output_logprobs=whole.output_logprobs + part.output_logprobs,
                    output_versions=whole.output_versions + part.output_versions,
                )
            whole = part
            if part.stop_reason != "length":
                break
            if turn == 0:
                await asyncio.sleep(pause(context.task_id, self.pause_s))
        assert whole is not None
        return to_row([whole], await self.reward(whole, data))


def train(mode: str, seed: int, root: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train one run and return its metrics."""
    words = [
        f"rollout.stale={mode}",
        f"seed={seed}",
        f"max_steps={args.steps}",
        f"rollout.max_head_offpolicyness={args.eta}",
        "rollout.max_concurrent_rollouts=null",
        f"train_dataset.batch_size={args.batch}",
        "gconfig.n_samples=4",
        "workflow=bench.order.PausingWalk",
        f"workflow_kwargs.pause_s={args.pause}",
        "workflow_kwargs.reward_fn=tasks.maze.reward",
        f"trial_name={mode}-{seed}",
        f"fileroot={root}",
        "callbacks=[]",
    ]
    command = [sys.executable, "train.py", "--config", "configs/maze.yaml", *words]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return [
        json.loads(line)
        for line in (root / "maze" / f"{mode}-{seed}" / "metrics.jsonl").read_text().splitlines()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", nargs="*", default=MODES, choices=MODES)
    parser.add_argument("--seeds", nargs="*", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--eta", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="groups in a batch (B)")
    parser.add_argument(
        "--pause", type=float, default=6.0, help="mean pause of a group, in seconds"
    )
    args = parser.parse_args()
    names = (
        "rollout.stale",
        "seed",
        "seconds",
        "waited",
        "first reward",
        "last reward",
        "masked",
        "dropped",
        "max age",
    )
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for mode, seed in [(mode, seed) for seed in args.seeds for mode in args.modes]:
            lines = train(mode, seed, Path(folder), args)
            assert max(line["staleness_max"] for line in lines) <= args.eta
            masked, tokens = (sum(line[key] for line in lines) for key in ("masked", "tokens"))
            cells = (
                mode,
                f"{seed}",
                f"{lines[-1]['wall_s']:.0f}",
                f"{sum(line['rollout_wait_s'] for line in lines):.0f}",
                f"{mean(line['reward'] for line in lines[:10]):.3f}",
                f"{mean(line['reward'] for line in lines[-10:]):.3f}",
                f"{masked / (masked + tokens):.1%}",
                f"{sum(line['dropped'] for line in lines)}",
                f"{max(line['staleness_max'] for line in lines):.0f}",
            )
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
