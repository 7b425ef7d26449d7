"""Evaluate the model before and after training, on the same validation prompts. Print up to three
conversations of each evaluation, both success rates with Wilson intervals, and pass@k.

    callbacks: [extras.before_after.BeforeAfter]

The results go to eval_base.json and eval_trained.json. A restarted run does not evaluate the base
model again.
"""

import json
import re
from typing import Any

from extras import printable, read_records
from rollout.evaluate import evaluate
from run.inputs import load_dataset

SHOWN = 3  # conversations


class BeforeAfter:
    def __init__(self, config: Any) -> None:
        self.run: Any = None  # stays None on ranks above 0

    def on_start(self, run: Any) -> None:
        if run.rank:
            return
        self.run = run
        self.file = run.run_dir / "eval_base.json"
        inputs = run.inputs
        path = run.config.valid_dataset.path
        inputs.validation = inputs.validation or load_dataset(path, inputs.task, "valid")
        if not self.file.exists() and run.step == 0:
            print(f"evaluating the base model: {len(inputs.validation)} held-out prompts")
            self.file.write_text(json.dumps(evaluate(run.executor, inputs)))

    def on_end(self, error: BaseException | None) -> None:
        run = self.run
        if error is not None or run is None:
            return
        # The last step may have evaluated the same weights.
        after = {k: x for k, x in run.history[-1].items() if k.startswith("eval_")}
        if not after:
            print("\nevaluating the trained model")
            after = evaluate(run.executor, run.inputs)
        (run.run_dir / "eval_trained.json").write_text(json.dumps(after))
        samples = run.inputs.validation
        for i in range(0, len(samples), -(-len(samples) // SHOWN)):
            print("\n" + "  ".join(f"{key}: {value}" for key, value in samples[i].items()))
            for title, version in (("before", 0), ("after", run.step)):
                file = run.run_dir / "eval-rollout" / str(version) / f"{i}.jsonl"
                for row in read_records(file)[-1:]:
                    print(f"  {title}, reward {row['reward']:.1f}: {as_line(row['completion'])}")
        print()
        # If this callback is new in a continued run, there is no eval_base.json.
        before = {"before": json.loads(self.file.read_text())} if self.file.exists() else {}
        for title, found in (before | {"after": after}).items():
            line = f"success on held-out prompts {title}: {found['eval_success']:.3f}"
            line += f" ({found['eval_success_low']:.3f} to {found['eval_success_high']:.3f}"
            line += f", {found['eval_episodes']} episodes)"
            for key, share in found.items():
                if key.startswith("eval_pass_at_"):
                    line += f", pass@{key.rpartition('_')[2]} {share:.3f}"
            print(line, flush=True)


def as_line(text: str) -> str:
    bars = re.sub(r"(\s*<\|[^|]*\|>)+\s*", " | ", text)
    return printable(" ".join(bars.split()).strip("| "))
