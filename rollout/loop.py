"""One event loop in one thread runs everything that rolls out.

Episodes are coroutines, and hundreds of them wait for tokens at the same time. The dispatchers'
state changes in this loop alone, so nothing guards it. The trainer's thread hands work in by `run`,
and waits.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextvars import Context
from typing import Any

import uvloop


class RolloutLoop:
    def __init__(self) -> None:
        self.failed: Future = Future()  # its exception ends every wait
        self._episodes: set[asyncio.Task] = set()  # the loop itself keeps no task alive
        self._loop, self._stop = uvloop.new_event_loop(), asyncio.Event()
        self.thread = threading.Thread(target=self._main, name="rollout", daemon=True)
        self.thread.start()

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stop.wait())  # then it cancels the episodes and waits for them

    def start(self, episode: Coroutine[Any, Any, None]) -> None:
        """Start an episode. Call this in the loop."""
        # Its context is empty, not that of whoever opened the gate.
        task = asyncio.create_task(episode, context=Context())
        self._episodes.add(task)
        task.add_done_callback(self._episodes.discard)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run `work` in the loop and wait for its result; Ctrl-C ends the wait.

        Raises RuntimeError after `fail`, even if an episode blocks the loop.
        """
        if self.failed.done():
            work.close()
            return self.failed.result()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            wait([future, self.failed], return_when=FIRST_COMPLETED)
            return (self.failed if self.failed.done() else future).result()
        finally:
            future.cancel()

    def call_soon(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function in the loop, and do not wait for it."""
        self._loop.call_soon_threadsafe(function, *args)

    def fail(self, message: str, cause: BaseException) -> None:
        """Make `run` raise RuntimeError(message), now and later. The first reason stays."""
        error = RuntimeError(message)
        error.__cause__ = cause
        if not self.failed.done():
            self.failed.set_exception(error)

    def destroy(self) -> None:
        """Cancel the episodes, let them clean up, and end the thread. May be repeated."""
        self.fail("the rollout is destroyed", RuntimeError("destroyed"))
        if self.thread.is_alive():
            self.call_soon(self._stop.set)
            self.thread.join(timeout=10)
