"""Check the rewards of agents, and run a reward function without delaying other episodes.

`parse_rewards` checks the rewards that an agent returned. `AsyncRewardWrapper` runs the reward function of a workflow.

All episodes of a run share one event loop. If a function computes for one second in the event loop, no agent can
continue during this second. AsyncRewardWrapper runs a plain function in a worker process (workers.py), so that the
function does not block the event loop. A coroutine function runs in the event loop itself.

Plain functions and coroutine functions have a time limit. If a plain function takes too long, its process is killed. If
a coroutine function takes too long, it is cancelled. The time limit of a plain function starts when a worker takes the
call, so the time in the queue does not count. Example: with timeout_seconds=15 and four workers, the fifth call waits
until a worker is free, and then has 15 seconds. If an episode is cancelled, its reward computation ends as well.

If a reward function raises an exception or takes too long, its episode fails. The policy does not learn from a failed
episode, because a failed episode gets no reward, not even 0.
"""

import inspect
import numbers
import os
from collections.abc import Callable
from typing import Any

from cache import finite
from inference.wire import PerLoop
from rollout.workers import WorkerPool, check_importable, within


def parse_rewards(value: Any) -> dict[str, float] | float | None:
    """Check the value that an agent returned, and return its rewards as floats.

    Raises TypeError for a value that is not a number, and ValueError for nan and inf.
    """
    if isinstance(value, dict):
        return {name: _number(reward) for name, reward in value.items()}
    return None if value is None else _number(value)


def _number(value: Any) -> float:
    """Return a Python, numpy or torch scalar as a float.

    Raises TypeError for a value that is not a number, and ValueError for nan and inf.
    """
    scalar = (
        value.item() if getattr(value, "shape", None) == () else value
    )  # a scalar of numpy or torch
    if not isinstance(scalar, numbers.Real):
        hint = "an agent may also return {completion id: number}, or None"
        raise TypeError(f"a reward is a number, not {type(value).__name__} ({value!r:.80}); {hint}")
    return finite(scalar)


_pool = PerLoop(
    lambda: WorkerPool(min(4, os.cpu_count() or 1))
)  # all wrappers of one event loop share one pool


class AsyncRewardWrapper:
    """Makes a reward function awaitable with `await wrapper(prompt, completion, prompt_ids, completion_ids, **data)`.

    If a coroutine function raises an exception, the call raises the same exception. If a plain function raises an
    exception, the call raises a RuntimeError (workers.py). If a call takes longer than `timeout_seconds`, it raises
    TimeoutError. The constructor raises ValueError for a plain function that another process cannot import.
    """

    def __init__(self, reward_fn: Callable[..., Any], timeout_seconds: float = 15.0) -> None:
        self.reward_fn, self.timeout_seconds = reward_fn, timeout_seconds
        self.name = getattr(reward_fn, "__qualname__", type(reward_fn).__name__)
        self.is_async = inspect.iscoroutinefunction(reward_fn)
        if not callable(reward_fn):
            raise TypeError(f"reward_fn={reward_fn!r} is not a function")
        if not self.is_async:
            remedy = "define it with `def` at the top of a module, or make it `async def`"
            check_importable(reward_fn, f"reward function {self.name}", remedy)

    async def __call__(self, /, *args: Any, **kwargs: Any) -> float:
        words = (
            f"reward function {self.name} took longer than {self.timeout_seconds:g} s and was ended"
        )
        if self.is_async:
            return _number(
                await within(self.timeout_seconds, self.reward_fn(*args, **kwargs), words)
            )
        pool = await _pool.get()
        async with pool.worker() as worker:
            call = worker.call(self.reward_fn, *args, **kwargs)
            return _number(await within(self.timeout_seconds, call, words))
