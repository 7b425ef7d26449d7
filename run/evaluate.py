"""Evaluation runs one episode per validation prompt, and summarises the rewards.

During training these episodes bypass the staleness gate, and use the newest weights. `python
train.py mode=eval` evaluates a model without training; with evaluator.base_url=URL it evaluates
another endpoint instead (extras/endpoint.py).
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


def wilson(p: float, n: int) -> tuple[float, float]:
    """The Wilson interval of a share `p` of n samples. With a probability of 95 % it contains the
    true share, also near 0 and 1, where p +- 1.96 sqrt(p (1 - p) / n) is wrong."""
    # (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)
    z = 1.96
    middle, width = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return (middle - width) / (1 + z**2 / n), (middle + width) / (1 + z**2 / n)


def describe(rewards: Sequence[float | None], inputs: Inputs) -> Evaluation:
    """Return and print the metrics. An episode without a reward (None) is no success, and does not
    count in the mean reward."""
    found = [reward for reward in rewards if reward is not None]
    n = len(found)
    success = inputs.success(found) * n / len(rewards) if n else 0.0
    low, high = wilson(success, len(rewards))
    metrics: Evaluation = {
        "eval_reward": fmean(found) if n else None,
        "eval_reward_sem": stdev(found) / math.sqrt(n) if n > 1 else None,
        "eval_success": success,
        "eval_success_low": low,
        "eval_success_high": high,
        "eval_episodes": len(rewards),
        "eval_rejected": len(rewards) - n,
    }
    print("  ".join(f"{k} {v:.4g}" for k, v in metrics.items() if v is not None), flush=True)
    return metrics


def conclude(run_dir: Path, found: Evaluation) -> None:
    """Write eval.json, and exit with an error if no episode has a reward."""
    (run_dir / "eval.json").write_text(json.dumps(found))
    if found["eval_episodes"] == found["eval_rejected"]:
        sys.exit("error: no episode of the evaluation has a reward")
