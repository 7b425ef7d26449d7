"""Rewards: what counts as one, and functions that compute them off the event loop, on a clock that ends them.

`parse_rewards` reads what an agent returned. `AsyncRewardWrapper` runs the reward functions of the other workflows.

The rule: one slow reward must not slow the others down, and a hanging one must not stay. All episodes of a run share
one event loop, so a function that computes for a second would stop every agent for a second. `AsyncRewardWrapper`
therefore gives plain functions to a worker process (rollout/workers.py) and awaits them there. A call that exceeds its
time is ended by killing the process it runs in. The clock starts when a worker takes the call, so waiting in the queue
costs nobody their reward. An episode that is cancelled takes its reward computation with it in the same way. A
coroutine function is awaited where it is, under the same clock.

A reward that raises is the failure of its episode, and so is one that ran out of time: neither is a reward of 0.
A wrong number would be learnt; a failure is counted.

How it differs from AReaL, which retries a timed-out reward three times while the first call still occupies its
process, and then returns 0.
"""

import inspect
import numbers
import os
from collections.abc import Callable
from typing import Any

from cache import finite
from inference.wire import PerLoop
from rollout.workers import WorkerPool, check_importable, time_limit


def parse_rewards(value: Any) -> dict[str, float] | float | None:
    """What an agent returned, as floats. Raises TypeError for what is no reward, ValueError for nan and inf."""
    if value is None:
        return None
    if isinstance(value, dict):
        return {name: _number(reward) for name, reward in value.items()}
    return _number(value)


def _number(value: Any) -> float:
    scalar = value.item() if getattr(value, "shape", None) == () else value  # numpy and torch scalars
    if not isinstance(scalar, numbers.Real):
        hint = "an agent may also return {completion id: number}, or None"
        raise TypeError(f"a reward is a number, not {type(value).__name__} ({value!r:.80}); {hint}")
    return finite(scalar)


_pool = PerLoop(lambda: WorkerPool(min(4, os.cpu_count() or 1)))  # shared by all wrappers of an event loop


class AsyncRewardWrapper:
    """`await wrapper(prompt, completion, prompt_ids, completion_ids, **data)` -> float, whatever kind of function.

    Raises what the function raises, TimeoutError (which names the function and its seconds) when it takes longer
    than `timeout_seconds`, and ValueError at once for a plain function that another process could not import.
    """

    def __init__(self, reward_fn: Callable[..., Any], timeout_seconds: float = 15.0) -> None:
        self.reward_fn = reward_fn
        self.timeout_seconds = timeout_seconds
        self.name = getattr(reward_fn, "__qualname__", type(reward_fn).__name__)
        self.is_async = inspect.iscoroutinefunction(reward_fn)
        if not callable(reward_fn):
            raise TypeError(f"reward_fn={reward_fn!r} is no function")
        if not self.is_async:
            remedy = "define it with `def` at the top of a module, or make it `async def`"
            check_importable(reward_fn, f"reward function {self.name}", remedy)

    async def __call__(self, *args: Any, **kwargs: Any) -> float:
        words = f"reward function {self.name} took longer than {self.timeout_seconds:g} s and was ended"
        if self.is_async:
            async with time_limit(self.timeout_seconds, words):
                return _number(await self.reward_fn(*args, **kwargs))
        pool = await _pool.get()
        async with pool.worker() as worker, time_limit(self.timeout_seconds, words):
            return _number(await worker.call(self.reward_fn, *args, **kwargs))
