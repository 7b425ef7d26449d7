"""AsyncTaskRunner runs all episodes in one thread, with one event loop and one lock.

Episodes are coroutines, and hundreds of episodes wait for tokens at the same time. One event loop in one daemon thread
runs all episodes.

    runner.submit(async_fn, *args, task_id=7)   starts async_fn(*args) in the loop
    runner.on_done(result)                      is called in the loop's thread when the task has ended

**Every change of state happens under one lock.** `wait_for(attempt)` calls `attempt` after each change of state, so no
thread has to poll. Example: three tasks run and the trainer waits for two results. The runner calls `attempt` when the
first task ends, and again when the second task ends.

**A runner for tests.** The dispatcher uses threads and time only through the public methods of AsyncTaskRunner. The
tests replace the runner with a subclass that has a virtual clock (tests/rollout/test_dispatcher.py).

**Errors.** If a task raises an exception, the task's TimedResult contains this exception. If code of the dispatcher or
the runner raises an exception in the thread, the runner calls `on_failure`, and the dispatcher then stops the run. The
method destroy() cancels the running tasks, lets them clean up, and joins the thread.

**What is not promised.** If a task blocks the event loop, no other task can continue. If a task ignores its
cancellation, it continues after destroy(), and destroy() writes the task's id to the log.
"""

import asyncio
import contextvars
import logging
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

import uvloop

logger = logging.getLogger("pocket_areal.runner")
T = TypeVar("T")
AsyncFn = Callable[..., Awaitable[Any]]
LIBRARY = sysconfig.get_path("stdlib")


class TaskQueueFullError(RuntimeError):
    """The runner already holds max_queue_size tasks."""


class TimedResult(NamedTuple, Generic[T]):
    """How a task ended: with the returned data (None: rejected), or with the raised exception."""

    task_id: int
    create_time: int  # time.monotonic_ns() when the coroutine started
    data: T | None
    error: BaseException | None = None


def own_frames(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """Return the frames of a stack that are neither in Python's library nor in an installed package."""
    return [
        f
        for f in stack
        if not f.filename.startswith((LIBRARY, "<")) and "-packages" not in f.filename
    ]


class AsyncTaskRunner:
    """Runs at most max_queue_size coroutines at once, on one event loop in one daemon thread.

    When a task ends, the runner takes `lock`, calls on_done with the TimedResult, and wakes all threads in `wait_for`.
    """

    def __init__(self, max_queue_size: int):
        if max_queue_size < 1:
            raise ValueError(f"max_queue_size must be 1 or more, not {max_queue_size}")
        self.max_queue_size = max_queue_size
        self.lock = (
            threading.Condition()
        )  # re-entrant lock for the state of the runner and of the dispatcher
        self.on_done: Callable[[TimedResult], None] = lambda result: None
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        # mutable state of this object; `lock` guards _active
        self._active: dict[
            int, asyncio.Task | None
        ] = {}  # unfinished tasks; None for a task that has not started
        self._stop = asyncio.Event()
        self._runner = asyncio.Runner(
            loop_factory=uvloop.new_event_loop
        )  # uvloop is faster than asyncio's own loop
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._thread_main, name="rollout", daemon=True)
        self._thread.start()

    def submit(self, async_fn: AsyncFn, *args: Any, task_id: int) -> None:
        """Start async_fn(*args) in the loop. `task_id` must differ from the ids of all unfinished tasks.

        Raises TaskQueueFullError if max_queue_size tasks are already submitted and not finished.
        """
        with self.lock:
            if len(self._active) >= self.max_queue_size:
                raise TaskQueueFullError(
                    f"max_queue_size={self.max_queue_size} tasks are submitted and not finished"
                )
            self._active[task_id] = None
            # The task gets a new context, so that it does not inherit the context variables of the caller of `submit`.
            self._loop.call_soon_threadsafe(
                self._start, task_id, async_fn, args, context=contextvars.Context()
            )

    def wait_for(self, attempt: Callable[[], T], timeout: float | None) -> T:
        """Call attempt() under the lock until its result is true, and return this result.

        The method calls attempt() immediately, and again after each `lock.notify_all()`. After `timeout` seconds (None:
        no limit), the method returns the last result even if it is false. If attempt() raises an exception, the method
        raises it. Ctrl-C ends a wait of the main thread immediately.
        """
        with self.lock:
            return self.lock.wait_for(attempt, timeout)

    def is_alive(self) -> bool:
        """Return whether the thread is running. The thread ends soon after destroy() is called."""
        return self._thread.is_alive()

    def find_blocker(self, seconds: float) -> str | None:
        """Return the function that has blocked the event loop for at least `seconds`, as "name (file:line)". Return
        None if no function blocks the event loop.

        Functions of Python's library and of installed packages are skipped. Call `find_blocker` from a thread that does
        not run the event loop.
        """
        ran = threading.Event()
        try:
            self._loop.call_soon_threadsafe(ran.set)
        except RuntimeError:  # the loop is closed
            return None
        # If the whole process was suspended during the first wait, the second wait gives the loop time to answer.
        if ran.wait(seconds) or ran.wait(seconds / 10) or not self.is_alive():
            return None
        stack = traceback.extract_stack(sys._current_frames().get(self._thread.ident or 0))
        ours = own_frames(stack)
        if (
            not ours or ours[-1].name == "_thread_main"
        ):  # the loop is not blocked: it waits for events
            return None
        return f"{ours[-1].name} ({ours[-1].filename}:{ours[-1].lineno})"

    def destroy(self, timeout: float = 10.0) -> None:
        """Cancel the running tasks, let them clean up, and join the thread. A second call of `destroy` does nothing."""
        with suppress(RuntimeError):  # the loop is already closed
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout)
        if self._thread.is_alive():
            some = sorted(self._active)[:5]
            logger.warning(
                "%d tasks, such as %s, ignored their cancellation for %s s",
                len(self._active),
                some,
                timeout,
            )

    # ---- the thread

    def _thread_main(self) -> None:
        with self._runner:  # the end of this block cancels all remaining tasks and closes the loop
            try:
                self._runner.run(self._main())
            except BaseException as error:
                self.on_failure(error)

    async def _main(self) -> None:
        """Keep the loop running until destroy() is called, then cancel the running tasks."""
        await self._stop.wait()
        # Wait for the episodes, because a cancelled episode may still have to send a request to its server.
        episodes = [task for task in self._active.values() if task]
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)

    def _start(self, task_id: int, async_fn: AsyncFn, args: tuple) -> None:
        self._active[task_id] = self._loop.create_task(self._supervise(task_id, async_fn, args))

    async def _supervise(self, task_id: int, async_fn: AsyncFn, args: tuple) -> None:
        """Run one task to its end and report its result. If on_done raises, pass the exception to on_failure."""
        create_time = time.monotonic_ns()
        try:
            result = TimedResult(task_id, create_time, await async_fn(*args))
        except KeyboardInterrupt:  # the interpreter raises KeyboardInterrupt to end the loop
            raise
        except (
            BaseException
        ) as error:  # a task may raise SystemExit, which does not inherit from Exception
            result = TimedResult(task_id, create_time, None, error)
        with self.lock:
            del self._active[task_id]
            try:
                self.on_done(result)
            except Exception as error:
                self.on_failure(error)
            self.lock.notify_all()
