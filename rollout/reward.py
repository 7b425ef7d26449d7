"""Rewards are finite numbers, and computing one delays no other episode.

All episodes share one event loop, where a second of computing is a second in which no agent goes
on. So AsyncRewardWrapper runs a plain function in a process (workers.py), and kills it at the time
limit, which counts from when the process takes the call. A coroutine function runs in the loop.

A reward that fails or takes too long fails its episode. It does not become 0, from which the policy
would learn.
"""

import inspect
import math
import pickle
from collections.abc import Callable
from typing import Any

from rollout.workers import pools, within

PROCESSES = 4


def parse_rewards(value: Any, whose: str = "an agent") -> dict[str, float] | float | None:
    """What an agent returned, as floats. Raises ValueError, which names `whose`."""
    if isinstance(value, dict):
        return {name: as_number(reward, whose) for name, reward in value.items()}
    return None if value is None else as_number(value, whose)


def as_number(value: Any, whose: str) -> float:
    """A Python, numpy or torch scalar as a float. Raises ValueError."""
    scalar = value.item() if getattr(value, "shape", None) == () else value
    if not isinstance(scalar, int | float) or not math.isfinite(scalar):
        raise ValueError(f"{whose} returned {value!r:.80}; a reward is a finite number")
    return float(scalar)


class AsyncRewardWrapper:
    """Makes a reward function awaitable: `await wrapper(prompt, completion, prompt_ids,
    completion_ids, **data)`.

    A coroutine function's exception is raised as it is, a plain function's as RuntimeError, and a
    time limit as TimeoutError. A plain function must be one that a process can import.
    """

    def __init__(self, reward_fn: Callable[..., Any], timeout_seconds: float = 15.0) -> None:
        self.reward_fn, self.timeout_seconds = reward_fn, timeout_seconds
        self.name = f"reward function {getattr(reward_fn, '__qualname__', reward_fn)}"
        self.is_async = inspect.iscoroutinefunction(reward_fn)
        if not self.is_async:
            pickle.dumps(reward_fn)  # fails now rather than in every episode

    async def __call__(self, /, *args: Any, **kwargs: Any) -> float:
        words = f"{self.name} took longer than {self.timeout_seconds:g} s and was ended"
        if self.is_async:
            work = self.reward_fn(*args, **kwargs)
            return as_number(await within(self.timeout_seconds, work, words), self.name)
        async with (await pools(PROCESSES).get()).worker() as worker:
            work = worker.call(self.reward_fn, *args, **kwargs)
            return as_number(await within(self.timeout_seconds, work, words), self.name)
