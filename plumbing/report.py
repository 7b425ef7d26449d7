"""What a run says about itself when it is over: success before and after, staleness, and the task's own picture of
what was learnt, asked from the trained policy on its server. No concept of its own."""

import asyncio
from pathlib import Path
from typing import Any

from engine import RemoteInfEngine
from io_struct import ModelRequest
from plumbing.logger import Logger


def ask_greedily(rollout: RemoteInfEngine, conversations: list[list[dict]]) -> list[str]:
    """What the trained policy, on its server, answers at temperature 0."""
    assert rollout.executor is not None
    tokenizer, gconfig = rollout.executor.tokenizer, rollout.executor.gconfig

    async def ask(messages: list[dict]) -> str:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        request = ModelRequest(ids, gconfig=gconfig.new(n_samples=1, greedy=True), tokenizer=tokenizer)
        response = await rollout.agenerate(request)
        return tokenizer.decode(response.output_tokens, skip_special_tokens=True)

    async def ask_all() -> list[str]:
        return list(await asyncio.gather(*map(ask, conversations)))

    return asyncio.run(ask_all())


def summarise(logger: Logger, rollout: RemoteInfEngine, task: Any, run_dir: Path) -> None:
    """What was learnt, how stale the data was, and where everything is."""
    history, say = logger.history, logger.say
    final = [line["success"] for line in history[-5:]]
    say(f"\nsuccess {history[0]['success']:.3f} in the first step, {sum(final) / len(final):.3f} in the last five")
    oldest = max(line["staleness_max"] for line in history)
    mean = sum(line["staleness_mean"] for line in history) / len(history)
    total = sum(logger.lag_counts.values())
    lags = ", ".join(f"lag {lag} {n / total:.0%}" for lag, n in sorted(logger.lag_counts.items()))
    say(f"staleness mean {mean:.2f}, max {oldest:.0f}; {total} trained tokens by version lag: {lags}")
    if hasattr(task, "summary"):
        task.summary(lambda messages: ask_greedily(rollout, [messages])[0], logger.console)
    say(f"{len(history)} steps in {history[-1]['wall_s']:.0f} s; everything is in {run_dir}")
