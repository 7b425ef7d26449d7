"""Evaluation runs one episode per validation prompt, and summarises the rewards.

During training these episodes run beside the staleness gate, under the newest weights. `python
train.py mode=eval` evaluates a model alone; with evaluator.base_url=URL it evaluates another
endpoint instead (extras/endpoint.py).
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from run.inputs import Inputs

Evaluation = dict[str, float | None]


def evaluate(executor: Any, inputs: Inputs) -> Evaluation:
    """Run the validation prompts. The reward of an episode is that of its last row."""
    groups = executor.evaluate(inputs.validation, inputs.evaluated)
    return describe([None if g is None else g["rewards"][-1].item() for g in groups], inputs)


def describe(rewards: Sequence[float | None], inputs: Inputs) -> Evaluation:
    """Return and print the mean reward, its standard error, the share of successes among all
    episodes, the number of episodes, and how many had no reward (None)."""
    found = [reward for reward in rewards if reward is not None]
    n = len(found)
    metrics: Evaluation = {
        "eval_reward": fmean(found) if n else None,
        "eval_reward_sem": stdev(found) / math.sqrt(n) if n > 1 else None,
        "eval_success": inputs.success(found) * n / len(rewards) if n else 0.0,
        "eval_episodes": len(rewards),
        "eval_rejected": len(rewards) - n,
    }
    print("  ".join(f"{k} {v:.4g}" for k, v in metrics.items() if v is not None), flush=True)
    return metrics


def conclude(run_dir: Path, found: Evaluation) -> None:
    """Write eval.json. Exits with an error if no episode has a reward."""
    (run_dir / "eval.json").write_text(json.dumps(found))
    if found["eval_episodes"] == found["eval_rejected"]:
        sys.exit("error: no episode of the evaluation has a reward")
