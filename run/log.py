"""Write metrics.jsonl and tokens/, and print one line per step.

metrics.jsonl has one line per step (docs/observe.md). tokens/{step}.safetensors holds the batch of
a step: every token with its version, its advantage, and its log-probabilities under pi_behav and
pi_theta. If the step computed log pi_prox and log pi_ref, the file holds them, too.
"""

import json
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

# Counts of groups since the previous step; failed_members counts episodes.
COUNTS = ("accepted", "rejected", "failed", "dropped", "failed_members")


class Log:
    """Writes a run's metrics and tokens, on rank 0 only."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.path = run.run_dir / "metrics.jsonl"
        self.path.touch()
        # Remove damaged lines, and those of steps after the checkpoint.
        for line in self.path.read_bytes().splitlines():
            with suppress(ValueError, TypeError, KeyError):
                if (metrics := json.loads(line))["step"] <= run.step:
                    run.history.append(metrics)
        self.path.write_text("".join(json.dumps(line) + "\n" for line in run.history))
        self.start = time.monotonic() - (run.history or [{}])[-1].get("wall_s", 0.0)
        self.counts = asdict(run.executor.stats)

    def write(self, batch: dict[str, Tensor], metrics: dict[str, Any]) -> dict[str, Any]:
        run = self.run
        counts = asdict(run.executor.stats)
        rewards = batch["rewards"][batch["side_conversations"] == 0].tolist()
        metrics["success"] = run.inputs.count_successes(rewards) / len(rewards)
        metrics |= {key: counts[key] - self.counts[key] for key in COUNTS}
        metrics["wall_s"] = time.monotonic() - self.start
        self.counts = counts
        # Save the tokens' texts with the batch, so that readers of the file need no tokenizer.
        path = run.run_dir / "tokens" / f"{metrics['step']:05d}.safetensors"
        path.parent.mkdir(exist_ok=True)
        ids = batch["input_ids"].unique().tolist()
        words = json.dumps({i: run.inputs.tokenizer.decode([i]) for i in ids})
        save_file({k: v.clone().contiguous() for k, v in batch.items()}, path, {"words": words})
        with self.path.open("a") as file:
            file.write(json.dumps(metrics, default=lambda scalar: scalar.item()) + "\n")
        run.history.append(metrics)
        if run.prints_steps:
            print(
                f"step {metrics['step']} of {run.last_step}  reward {metrics['reward']:.2f}"
                f"  success {metrics['success']:.2f}  lag {metrics['staleness_mean']:.2f}"
                f"  max {metrics['staleness_max']:.0f}  {metrics['step_s']:.1f} s"
                f"  waits {metrics['rollout_wait_s']:.1f} s",
                flush=True,
            )
        return metrics
