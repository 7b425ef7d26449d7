"""Rewards: what counts as one, and functions that compute them off the event loop, on a clock that ends them.

`parse_rewards` reads what an agent returned. `AsyncRewardWrapper` runs the reward functions of the other workflows.

The rule: one slow reward must not slow the others down, and a hanging one must not stay. All episodes of a run share
one event loop, so a function that computes for a second would stop every agent for a second. `AsyncRewardWrapper`
therefore sends plain functions to a pool of processes, shared by all wrappers of this process, and awaits them there.
A call that exceeds its time is ended by killing the process it runs in; a fresh one takes the place. The clock starts
when a worker takes the call, so waiting in the queue costs nobody their reward. An episode that is cancelled takes
its reward computation with it in the same way. A coroutine function is awaited where it is, under the same clock.

A reward that raises is the failure of its episode, and so is one that ran out of time: neither is a reward of 0.
A wrong number would be learnt; a failure is counted.

What a worker costs. Processes are spawned, not forked (the trainer has threads and a GPU), and a spawned process
imports the module of the reward function, found by its name. It does not run the trainer's own script a second time,
as Python would have it by default, because that would import torch in every worker: hence `_LeanProcess`. So keep
heavy imports out of a reward's module, and the function out of `__main__`. A worker ends when the process that
started it is gone, however that ended and whatever the worker computes.

How it differs from AReaL, which retries a timed-out reward three times while the first call still occupies its
process, and then returns 0.
"""

import asyncio
import inspect
import math
import numbers
import os
import pickle
import sys
import threading
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from pebble import ProcessPool


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
    if not math.isfinite(scalar):
        raise ValueError(f"a reward is finite, not {value!r}")
    return float(scalar)


_lock = threading.Lock()
_pool: ProcessPool | None = None


class _LeanProcess(SpawnProcess):
    """A spawned process that does not import the parent's `__main__`."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        main = sys.modules["__main__"]
        file, spec = getattr(main, "__file__", None), main.__spec__
        main.__file__, main.__spec__ = None, None  # what spawn would tell the child to run first
        try:
            return SpawnProcess._Popen(process_obj)
        finally:
            main.__file__, main.__spec__ = file, spec


class _LeanContext(SpawnContext):
    Process = _LeanProcess


def _end_with_parent() -> None:
    """In a new worker: a thread that ends it when its parent is gone, which kill -9 leaves no other way to learn."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def _shared_pool() -> ProcessPool:
    global _pool
    with _lock:
        if _pool is None:
            workers = min(4, os.cpu_count() or 1)
            _pool = ProcessPool(workers, initializer=_end_with_parent, context=_LeanContext())
        return _pool


def close_pool() -> None:
    """End the workers and what they compute. The next reward starts a new pool; the interpreter's end closes it too."""
    global _pool
    with _lock:
        pool, _pool = _pool, None
    if pool is not None:
        pool.stop()
        pool.join()


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
        if not self.is_async:
            self._check_importable()

    def _check_importable(self) -> None:
        try:
            pickle.dumps(self.reward_fn)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"reward function {self.name} runs in another process, which must be able to import it: "
                f"define it with `def` at the top of a module, or make it `async def` ({error})"
            ) from error
        if self.reward_fn.__module__ == "__main__":
            raise ValueError(
                f"reward function {self.name} is defined in the script itself; move it to a module of its own, "
                "so that the processes that run it do not run the script"
            )

    async def __call__(self, *args: Any, **kwargs: Any) -> float:
        try:
            if self.is_async:
                reward = await asyncio.wait_for(self.reward_fn(*args, **kwargs), self.timeout_seconds)
            else:
                future = _shared_pool().schedule(self.reward_fn, args, kwargs, timeout=self.timeout_seconds)
                reward = await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise TimeoutError(
                f"reward function {self.name} took longer than {self.timeout_seconds:g} s and was ended"
            ) from error
        return _number(reward)

    def __repr__(self) -> str:
        where = "event loop" if self.is_async else "process pool"
        return f"AsyncRewardWrapper({self.name}, {self.timeout_seconds:g} s, {where})"
