"""Run the validation prompts and summarise the rewards. Each prompt gets eval_gconfig.n_samples
episodes, by default 1. During training, evaluation episodes bypass the staleness gate and use the
newest weights. `python train.py mode=eval` evaluates a model without training. Add
evaluator.base_url=URL to evaluate an OpenAI endpoint instead (extras/endpoint.py).
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

Evaluation = dict[str, float | None]


def evaluate(executor: Any, inputs: Any) -> Evaluation:
    """Evaluate the model on the validation prompts, and return the metrics. An episode's reward is
    that of its last row."""
    samples = inputs.validation * executor.eval_gconfig.n_samples
    groups = executor.evaluate(samples, inputs.eval_workflow)
    return describe([None if g is None else g["rewards"][-1].item() for g in groups], inputs)


def wilson(p: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % confidence interval for a share `p` of n samples. Near 0 or 1, the
    simpler interval p +- 1.96 sqrt(p (1 - p) / n) contains the true share too rarely."""
    # (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)
    z = 1.96
    middle, width = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return (middle - width) / (1 + z**2 / n), (middle + width) / (1 + z**2 / n)


def pass_at(k: int, n: int, right: int) -> float:
    """Estimate the probability that k answers include a right one, if `right` of n answers were
    right. The estimate is unbiased, unlike 1 - (1 - right / n)^k (Chen et al. 2021)."""
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def describe(rewards: Sequence[float | None], inputs: Any) -> Evaluation:
    """Return and print the metrics. An episode without a reward (None) counts as a failure, and is
    left out of the mean reward.

    With P prompts, rewards[i], rewards[i + P], rewards[i + 2 P] and so on belong to prompt i. The
    episodes of one prompt are correlated, so the standard error of the reward and the interval of
    the success count each prompt as one sample. The interval may therefore be too wide, but not too
    narrow.
    """
    prompts = len(inputs.validation)
    n = len(rewards) // prompts
    found = [[x for x in rewards[i::prompts] if x is not None] for i in range(prompts)]
    means = [fmean(group) for group in found if group]
    right = [round(inputs.count_successes(group)) for group in found]
    success = sum(right) / len(rewards)
    low, high = wilson(success, prompts)
    metrics: Evaluation = {
        "eval_reward": fmean(means) if means else None,
        "eval_reward_sem": stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None,
        "eval_success": success,
        "eval_success_low": low,
        "eval_success_high": high,
        "eval_episodes": len(rewards),
        "eval_rejected": len(rewards) - sum(map(len, found)),
    }
    for k in (2**i for i in range(1, n.bit_length())):
        metrics[f"eval_pass_at_{k}"] = fmean(pass_at(k, n, count) for count in right)
    print(f"eval_success {success:.4g} ({low:.4g} to {high:.4g} with a probability of 95 %)")
    shown = {k: v for k, v in metrics.items() if v is not None and "success" not in k}
    print("  ".join(f"{k} {v:.4g}" for k, v in shown.items()), flush=True)
    return metrics


def conclude(run_dir: Path, found: Evaluation) -> None:
    (run_dir / "eval.json").write_text(json.dumps(found))
    if found["eval_episodes"] == found["eval_rejected"]:
        sys.exit("error: no episode of the evaluation has a reward")
