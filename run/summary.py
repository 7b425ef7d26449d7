"""Print the summary at the end of a run: the success rate, the staleness and a drawing of what the trained policy does.

The task's function `summary` draws what the trained policy does. For the drawing, `summary` may send prompts to the
inference server, which answers with the trained policy at temperature 0.
"""

import asyncio
import shlex
from collections import Counter
from functools import partial
from statistics import fmean
from typing import Any

from rich.console import Console

from inference.io_struct import GenerationHyperparameters, ModelRequest
from inference.wire import EngineError
from run.logger import Logger
from run.recover import best_step, folders_of_steps
from run.terminal import before_results


def ask_greedily(
    engine: Any, tokenizer: Any, gconfig: GenerationHyperparameters, messages: list[dict]
) -> str:
    """Return the answer that the inference server generates with the trained policy at temperature 0."""
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    request = ModelRequest(ids, gconfig=gconfig.new(n_samples=1, greedy=True), tokenizer=tokenizer)
    response = asyncio.run(engine.agenerate(request))
    return tokenizer.decode(response.output_tokens, skip_special_tokens=True)


def summarise(logger: Logger, task: Any) -> None:
    """Print the success rate, the staleness, the task's own summary, and the folder with the run's files."""
    before_results.close()
    history = logger.history
    final = fmean(line["success"] for line in history[-5:])
    print(f"\nsuccess {history[0]['success']:.3f} in the first step, {final:.3f} in the last five")
    oldest = max(line["staleness_max"] for line in history)
    mean = fmean(line["staleness_mean"] for line in history)
    counts = Counter[int]()  # number of trained tokens for each lag
    for line in history:
        counts.update(dict(enumerate(line["lag_counts"])))
    lags = ", ".join(
        f"lag {lag} {n / counts.total():.0%}" for lag, n in sorted(counts.items()) if n
    )
    counted = f"; {counts.total()} trained tokens by version lag: {lags}" if lags else ""
    print(f"staleness mean {mean:.2f}, max {oldest:.0f}{counted}", flush=True)
    if hasattr(task, "summary"):
        run = logger.executor
        run.engine.wait_for_servers = (
            False  # a restarted server would wait for weights, and no step follows
        )
        try:
            task.summary(partial(ask_greedily, run.engine, run.tokenizer, run.gconfig), Console())
        except EngineError as error:
            print(f"what the policy does is not drawn: {error}")
    folder, model = (
        logger.config.run_dir,
        logger.config.run_dir / "checkpoints" / f"step{history[-1]['step']:05d}",
    )
    if (best := best_step(history, folders_of_steps(folder / "checkpoints"))) and best != history[
        -1
    ]["step"]:
        print(
            f"the best model by evaluation is that of step {best}: {folder / 'checkpoints' / f'step{best:05d}'}"
        )
    print(f"{len(history)} steps in {history[-1]['wall_s']:.0f} s; everything is in {folder}")
    print(f"look at the run in a browser: {folder / 'report.html'}")
    print(f"talk to the model: python -m run.chat {shlex.quote(str(folder))}")
    print(
        f"evaluate the model: the command of this run with mode=eval model_path={model}", flush=True
    )
