"""At the end of a run, print its success, the lags of its tokens, and how to use the model.

A task's `summary(ask, console)` can draw what the policy does: `ask(messages)` returns the trained
policy's greedy answer.
"""

import shlex
import sys
from collections import Counter
from statistics import fmean
from typing import Any

from rich.console import Console

from extras import printable
from inference.io_struct import ModelRequest


class Summary:
    def __init__(self, config: Any) -> None:
        pass

    def on_start(self, run: Any) -> None:
        self.run = run

    def on_end(self, error: BaseException | None) -> None:
        if error is not None or not self.run.history:  # only rank 0 has a history
            return
        run = self.run
        history = run.history
        last = fmean(line["success"] for line in history[-5:])
        first = history[0]["success"]
        print(
            f"\nsuccess at temperature {run.config.gconfig.temperature:g}: {first:.3f} in step 1,"
            f" {last:.3f} in the last five steps"
        )
        counts = Counter[int]()  # trained tokens of each lag
        for line in history:
            counts.update(dict(enumerate(line["lag_counts"])))
        total = counts.total()
        lags = ", ".join(f"{n / total:.0%} lag {lag}" for lag, n in sorted(counts.items()) if n)
        print(f"{total} trained tokens: {lags}")
        if hasattr(run.inputs.task, "summary"):
            run.inputs.task.summary(self.ask, Console())
        model = run.run_dir / "checkpoints" / f"step{run.step:05d}"
        talk = shlex.join([sys.executable, "-m", "extras.chat", str(run.run_dir)])
        print(f"talk to the model:\n  {talk}", flush=True)
        has_data = run.config.task or run.config.valid_dataset.path
        if has_data and sys.argv[0].endswith("train.py"):
            words = run.command("mode=eval", f"model_path={model}")
            print(f"evaluate it:\n  {words}", flush=True)

    def ask(self, messages: list[dict]) -> str:
        run = self.run
        tokenizer = run.inputs.tokenizer
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        gconfig = run.config.gconfig.new(n_samples=1, greedy=True)
        response = run.executor.dispatcher.run(
            run.engine.agenerate(ModelRequest(ids, gconfig=gconfig))
        )
        return printable(tokenizer.decode(response.output_tokens, skip_special_tokens=True))
