"""The one thread, the one event loop, the one lock: AsyncTaskRunner (write-up, section 3.1), the seam to all three.

Episodes are coroutines; hundreds of them wait for tokens at once, so one loop in one daemon thread runs them all.
A caller submits an async function, and hears in the loop's thread of each that ends, in order of completion:

    runner.submit(async_fn, *args, task_id=7)   the loop starts it
    runner.on_done(result)                      the runner calls this with what it returned or raised

**Every change of state happens under one lock, and every wait is a wait on it.** wait_for(attempt) looks again
whenever something ended, and only then: no thread sleeps for a while and looks. Work reaches the loop by
call_soon_threadsafe.

**The seam.** The dispatcher knows threads and time through the public names of AsyncTaskRunner alone. A subclass with a
virtual clock, or one that lets a seeded scheduler choose who ends next, runs the same dispatcher
(tests/rollout/test_dispatcher.py: VirtualRunner).

**What a task raises is its result; what our own code raises is told to on_failure**: it means that no more will come,
and whoever listens (the dispatcher) ends the run. destroy() cancels what runs, lets it clean up, and joins the thread.

**Not promised.** A task that blocks the loop blocks all; one that swallows its cancellation outlives destroy(),
which names it in the log.

**Beside AReaL.** Same names. There the runner keeps results for a thread that polls for them, a full output queue
kills its own thread, a paused runner looks every 0.5 s and collects nothing, and the exception of a failed task is
lost. Here nothing is kept, and pausing is a decision, hence the dispatcher's.
"""

import asyncio
import contextvars
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
with suppress(ImportError):  # faster, and not there on Windows
    import uvloop

    new_event_loop = uvloop.new_event_loop

logger = logging.getLogger("nano_areal.runner")
T = TypeVar("T")
AsyncFn = Callable[..., Awaitable[Any]]


class TaskQueueFullError(RuntimeError):
    """The runner holds max_queue_size tasks already."""


@dataclass
class TimedResult(Generic[T]):
    """How a task ended: its data (None: rejected), or the exception that it raised."""

    task_id: int
    create_time: int  # time.monotonic_ns() when the coroutine started
    data: T | None
    error: BaseException | None = None


class AsyncTaskRunner:
    """Runs coroutines on one event loop in one daemon thread, at most max_queue_size at once.

    Under `lock` it calls on_done with the TimedResult of every task that ends, and then lets every wait look again.
    """

    def __init__(self, max_queue_size: int):
        if max_queue_size < 1:
            raise ValueError(f"max_queue_size must be 1 or more, not {max_queue_size}")
        self.max_queue_size = max_queue_size
        self.lock = threading.Condition()  # re-entrant
        self.on_done: Callable[[TimedResult], None] = lambda result: None
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        # all mutable state; _active is guarded by the lock
        self._active: dict[int, asyncio.Task | None] = {}  # submitted, not finished
        self._stop = asyncio.Event()
        self._runner = asyncio.Runner(loop_factory=new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._thread_main, name="rollout", daemon=True)
        self._thread.start()

    def submit(self, async_fn: AsyncFn, *args: Any, task_id: int) -> None:
        """Runs async_fn(*args) soon. TaskQueueFullError: no room. The id must not be in use."""
        with self.lock:
            if len(self._active) >= self.max_queue_size:
                raise TaskQueueFullError(f"max_queue_size={self.max_queue_size} tasks are submitted and not finished")
            self._active[task_id] = None
            # A fresh context: a task must not inherit the variables of the one that made room for it.
            context = contextvars.Context()
            self._loop.call_soon_threadsafe(self._start, task_id, async_fn, args, context=context)

    def wait_for(self, attempt: Callable[[], T], timeout: float | None) -> T:
        """Calls attempt(), under the lock, now and after every `lock.notify_all()` until it returns something true.

        Returns its last value, a false one when `timeout` seconds have passed. What it raises is raised. Without
        a timeout the main thread still takes a KeyboardInterrupt at once.
        """
        with self.lock:
            return self.lock.wait_for(attempt, timeout)

    def destroy(self, timeout: float = 10.0) -> None:
        """Cancels what runs, lets it clean up, and joins the thread. Safe to call twice."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("tasks %s ignored their cancellation for %s s", sorted(self._active), timeout)

    # ---- the thread

    def _thread_main(self) -> None:
        with self._runner:  # leaving it cancels what the episodes have left behind, and closes the loop
            try:
                self._runner.run(self._main())
            except BaseException as error:
                self.on_failure(error)

    async def _main(self) -> None:
        await self._stop.wait()
        # The episodes first, and only then the loop: they may have to say farewell to a server.
        episodes = [task for task in self._active.values() if task]
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)

    def _start(self, task_id: int, async_fn: AsyncFn, args: tuple) -> None:
        self._active[task_id] = self._loop.create_task(self._supervise(task_id, async_fn, args))

    async def _supervise(self, task_id: int, async_fn: AsyncFn, args: tuple) -> None:
        """The one supervisor: what a task raises is its result; what our own code raises ends the run."""
        create_time = time.monotonic_ns()
        try:
            result = TimedResult(task_id, create_time, await async_fn(*args))
        except (KeyboardInterrupt, GeneratorExit):  # the interpreter's: the loop ends, or has ended
            raise
        except BaseException as error:  # sys.exit(), and what libraries raise that is no Exception (Rust's panics)
            result = TimedResult(task_id, create_time, None, error)
        with self.lock:
            del self._active[task_id]
            try:
                self.on_done(result)
            except Exception as error:
                self.on_failure(error)
            self.lock.notify_all()
