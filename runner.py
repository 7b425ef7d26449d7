"""The one thread, the one event loop, the one lock: AsyncTaskRunner (write-up, section 3.1), and the seam it fills.

Episodes are coroutines; hundreds of them wait for tokens at once, so one loop in one daemon thread runs them all.
A caller submits an async function, and hears in the loop's thread of each that ends, in order of completion:

    runner.submit(async_fn, *args, task_id=7)   the loop starts it
    runner.on_done(result)                      the runner calls this with what it returned or raised

**Every change of state happens under one lock, and every wait is a wait on it.** wait_for(attempt) looks again
whenever something ended, and only then: no thread sleeps for a while and looks. Work reaches the loop by
call_soon_threadsafe, once for a burst of submissions.

**The seam.** The dispatcher knows threads and time through the Runner protocol alone. AsyncTaskRunner is the
real one; a runner that keeps a virtual clock, or one that lets a seeded scheduler choose who ends next, runs the
same dispatcher (tests/test_dispatcher.py: VirtualRunner).

**What a task raises is its result; what our own code raises ends the runner**: then every waiting and later call
raises RuntimeError from it. destroy() cancels what runs, lets it clean up, and joins the thread.

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
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

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


class Runner(Protocol):
    """The seam: all that the dispatcher knows of threads and time.

    Under `lock` the runner calls on_done with the TimedResult of every task that ends, then wake(); on_failure with
    an exception that means that no more will come.
    """

    on_done: Callable[[TimedResult], None]
    on_failure: Callable[[BaseException], None]

    @property
    def lock(self) -> AbstractContextManager[Any]: ...  # re-entrant
    def initialize(self) -> None: ...
    def submit(self, async_fn: AsyncFn, *args: Any, task_id: int) -> None: ...
    def wake(self) -> None: ...
    def wait_for(self, attempt: Callable[[], T], timeout: float | None) -> T: ...
    def destroy(self) -> None: ...


class AsyncTaskRunner:
    """Runs coroutines on one event loop in one daemon thread, at most max_queue_size at once."""

    def __init__(self, max_queue_size: int):
        if max_queue_size < 1:
            raise ValueError(f"max_queue_size must be 1 or more, not {max_queue_size}")
        self.max_queue_size = max_queue_size
        # all mutable state, guarded by the lock
        self.lock = threading.Condition()
        self.failure: BaseException | None = None  # what ended the thread, or our own code in it
        self._closed = False
        self._inputs: deque[tuple[int, AsyncFn, tuple]] = deque()  # submitted, not started
        self._active: dict[int, asyncio.Task | None] = {}  # submitted, not finished
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self.on_done: Callable[[TimedResult], None] = lambda result: None
        self.on_failure: Callable[[BaseException], None] = lambda error: None

    def __repr__(self) -> str:
        return f"AsyncTaskRunner({'closed' if self._closed or self.failure else 'open'}, active={len(self._active)})"

    def initialize(self) -> None:
        """Starts the thread. Tasks may be submitted before."""
        with self.lock:
            self._check_alive()
            if self._thread is None:
                self._thread = threading.Thread(target=self._thread_main, name="rollout", daemon=True)
                self._thread.start()

    def submit(self, async_fn: AsyncFn, *args: Any, task_id: int) -> None:
        """Runs async_fn(*args) soon. ValueError: the id is in use; TaskQueueFullError: no room."""
        with self.lock:
            self._check_alive()
            if task_id in self._active:
                raise ValueError(f"task {task_id} is already active")
            if len(self._active) >= self.max_queue_size:
                raise TaskQueueFullError(f"{self!r} is full: max_queue_size={self.max_queue_size}")
            self._active[task_id] = None
            self._inputs.append((task_id, async_fn, args))
            if len(self._inputs) == 1:  # else a call of _start_tasks is on its way
                self._call_in_loop(self._start_tasks)

    def wake(self) -> None:
        """Lets every waiting call look again."""
        with self.lock:
            self.lock.notify_all()

    def wait_for(self, attempt: Callable[[], T], timeout: float | None) -> T:
        """Calls attempt(), under the lock, now and after every wake() until it returns something true.

        Returns its last value, a false one when `timeout` seconds have passed. What it raises is raised. Without
        a timeout the main thread still takes a KeyboardInterrupt at once.
        """
        with self.lock:
            return self.lock.wait_for(attempt, timeout)

    def destroy(self, timeout: float = 10.0) -> None:
        """Cancels what runs, lets it clean up, and joins the thread. Safe to call twice, and from any thread."""
        with self.lock:
            self._closed = True
            self._call_in_loop(self._stop.set)
            self.lock.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
            if self._thread.is_alive():
                logger.warning("tasks %s ignored their cancellation for %s s", sorted(self._active), timeout)

    # ---- the thread

    def _thread_main(self) -> None:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            try:
                runner.run(self._main())
            except BaseException as error:
                self._fail(error)
        # Leaving the Runner has cancelled what the episodes had left behind, and closed the loop.

    async def _main(self) -> None:
        with self.lock:
            self._loop = asyncio.get_running_loop()
            self._start_tasks()
            if self._closed:
                self._stop.set()
        try:
            await self._stop.wait()
            # The episodes first, and only then the loop: they may have to say farewell to a server.
            episodes = [task for task in self._active.values() if task]
            for episode in episodes:
                episode.cancel()
            await asyncio.gather(*episodes, return_exceptions=True)
        finally:
            with self.lock:
                self._loop = None

    def _start_tasks(self) -> None:
        with self.lock:
            while self._loop and self._inputs and not (self._closed or self.failure):
                task_id, async_fn, args = self._inputs.popleft()
                episode = self._supervise(task_id, async_fn, args)
                # A fresh context: a task must not inherit the variables of the one that made room for it.
                self._active[task_id] = self._loop.create_task(episode, context=contextvars.Context())

    async def _supervise(self, task_id: int, async_fn: AsyncFn, args: tuple) -> None:
        """The one supervisor: what a task raises is its result; what our own code raises ends the run."""
        create_time = time.monotonic_ns()
        try:
            result = TimedResult(task_id, create_time, await async_fn(*args))
        except (Exception, asyncio.CancelledError, SystemExit) as error:
            result = TimedResult(task_id, create_time, None, error)
        try:
            with self.lock:
                del self._active[task_id]
                self.on_done(result)
                self.lock.notify_all()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self.lock:
            self.failure = self.failure or error
            self.on_failure(error)
            self.lock.notify_all()

    def _check_alive(self) -> None:
        if self.failure or self._closed:
            raise RuntimeError(f"the runner has ended: {self.failure or 'destroyed'!r}") from self.failure

    def _call_in_loop(self, callback: Callable[[], object]) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(callback)
