"""Compute rewards without delaying other episodes.

In the episodes' shared event loop, a plain reward function would make every agent wait. So
AsyncRewardWrapper runs the function in a process (workers.py), and kills the process at the time
limit. Waiting for a free process does not count towards the limit. A coroutine function runs in the
event loop itself.

If a reward function fails, the episode fails, because a reward of 0 would mislead the policy.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inference.fields import finite
from inference.servers import PerLoop
from rollout.workers import WorkerPool, within


@functools.cache
def pools(users: str, size: int) -> PerLoop:
    """Return the worker pools (one per event loop) of agents or of rewards, as `users` says. With a
    common pool, a reward could wait for an agent that holds its process for an hour."""
    return PerLoop(lambda: WorkerPool(size), WorkerPool.aclose)


@dataclass(eq=False)
class AsyncRewardWrapper:
    """Makes a reward function awaitable: `await wrapper(prompt, completion, prompt_ids,
    completion_ids, **data)`.

    Raises RuntimeError if a plain function raises, and TimeoutError after the time limit. A
    coroutine function's own exception is raised unchanged. A reward that is not a finite number
    raises Refusal. A plain function must be importable in another process.
    """

    reward_fn: Callable[..., Any]
    timeout_seconds: float = 15.0

    async def __call__(self, /, *args: Any, **kwargs: Any) -> float:
        name = getattr(self.reward_fn, "__qualname__", self.reward_fn)
        words = f"reward function {name} took longer than {self.timeout_seconds:g} s and was ended"
        if inspect.iscoroutinefunction(self.reward_fn):
            work = self.reward_fn(*args, **kwargs)
            return finite(await within(self.timeout_seconds, work, words))
        async with (await pools("rewards", 4).get()).worker() as call:
            work = call(self.reward_fn, *args, **kwargs)
            return finite(await within(self.timeout_seconds, work, words))
