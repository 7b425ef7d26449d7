"""The dispatcher decides which prompt group starts next, and which groups form the next batch.

A training step needs B finished groups, and the episodes of a group take seconds to minutes, so as
many groups run at once as the staleness gate allows. `DispatchState` makes all decisions without a
clock, thread or lock, so bench/simulate.py can use it in virtual time, and tests/explore can try
every order of events. `BatchTaskDispatcher` carries the decisions out in one event loop, where
hundreds of episodes wait for tokens at the same time. Only this loop changes the state; the
trainer's thread hands in work and waits.

`_produce` starts the tasks (one per group) that the gate admits, and `_run` runs one to its end.

With rollout.stale=wait a batch takes the B unconsumed groups that started first, so one slow group
delays the batch. With mask or drop it takes the B groups that finished first. No group is more than
eta versions old: with wait by the proof in staleness.py, with mask or drop because `trainable`
leaves out what is older. In each case, `take` checks every group.

If a task returns None or raises, it is rejected and another task is drawn. The run stops after
`max_failures` exceptions in a row, or if `max_failures` groups are rejected before any is accepted.
From then on, every call raises the error that stopped the run.

A group that wait_for_task returns belongs to no batch, and its age is not checked.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import uvloop

from staleness import StalenessManager


class RolloutsFail(RuntimeError):
    """Too many tasks failed or were rejected."""

    is_verdict = True  # the message says everything: no traceback


@dataclass(eq=False, repr=False)
class DispatchState:
    """Holds the tasks, and decides which tasks start and which groups a step consumes. A task is
    any object with a `task_id`."""

    gate: StalenessManager
    head_version: Callable[[Any], int | None]  # oldest version among a result's trained tokens
    stale: str = "wait"  # wait, mask or drop
    # for stale=mask: takes tokens older than `oldest` out of the loss, and returns None if no
    # trained token remains
    without_older: Callable[[Any, int], Any] = lambda data, oldest: data
    max_failures: int = 0  # 0 means max(8, 2 B)
    trace: Callable[[str, int], None] = lambda event, task_id: None

    pending: OrderedDict[int, Any] = field(default_factory=OrderedDict)  # submitted tasks
    # the started, unconsumed tasks with their results (None while a task runs)
    order: OrderedDict[int, Any] = field(default_factory=OrderedDict)
    rejected: set[int] = field(default_factory=set)
    paused: bool = False
    errors: list[BaseException] = field(default_factory=list)  # of the latest failures in a row

    # ---- questions

    def may_start(self) -> int:
        """How many tasks may start now. A negative number means none."""
        return 0 if self.paused else self.gate.get_capacity()

    def in_flight(self) -> set[int]:
        """The ids of the tasks that wait, run, or are finished but not yet consumed."""
        return {*self.pending, *self.order}

    def next_groups(self, count: int) -> dict[int, Any]:
        """Return {task id: group} for the next `count` groups, or {} until all are finished."""
        finished = ((i, data) for i, data in self.order.items() if data is not None)
        chosen = self.order.items() if self.stale == "wait" else finished
        batch = {i: data for i, data in islice(chosen, count) if data is not None}
        return batch if len(batch) == count else {}

    def trainable(self, data: Any) -> Any:
        """Return a finished group, or None if it is too old. With stale=mask, first leave tokens
        that are too old out of its loss."""
        if self.stale == "mask":
            return self.without_older(data, self.gate.oldest_version())
        fresh = self.stale == "wait" or self.gate.is_fresh(self.head_version(data))
        return data if fresh else None

    # ---- events

    def enqueue(self, task: Any) -> None:
        """Add a task, whose id must be new."""
        self.pending[task.task_id] = task
        self.gate.on_rollout_enqueued()
        self.trace("submit", task.task_id)

    def start(self) -> list[Any]:
        """Start as many tasks as the gate admits, in order of submission, and return them."""
        count = min(self.may_start(), len(self.pending))
        started = [self.pending.popitem(last=False)[1] for _ in range(count)]
        for task in started:
            self.order[task.task_id] = None
            self.gate.on_rollout_submitted()
            self.trace("start", task.task_id)
        return started

    def finish(self, task_id: int, data: Any, error: BaseException | None = None) -> None:
        """Record that a task ended. A task without data is rejected; with an `error`, it also
        counts as failed. Raises RolloutsFail after too many failures or rejections.
        """
        self.trace("finish", task_id)
        self.errors = [*self.errors, error] if error else []
        if data is not None:
            self.order[task_id] = data
            if self.stale != "wait":
                self.order.move_to_end(task_id)  # keeps finished groups in order of finish
            self.gate.on_rollout_accepted()
            self.trace("accept", task_id)
            return
        del self.order[task_id]
        self.rejected.add(task_id)
        self.gate.on_rollout_rejected(failed=error is not None)
        if error:
            self.trace("fail", task_id)
        self.trace("reject", task_id)
        stat = self.gate.get_stats()
        most = self.max_failures or max(8, 2 * self.gate.consumer_batch_size)
        if len(self.errors) >= most:
            raise RolloutsFail(
                f"{most} tasks failed one after another, the first by {self.errors[0]!r}"
            ) from self.errors[0]
        if stat.rejected >= most and stat.accepted + stat.dropped + stat.withdrawn == 0:
            raise RolloutsFail(
                f"{stat.rejected} groups were rejected and none was accepted: look at "
                "should_accept_fn, and at why the workflow returns None (an agent: no reward)"
            )

    def take(self, count: int) -> list[Any]:
        """Consume the next `count` groups, or return [] if one of them is unfinished.

        First, groups for which `trainable` returns None are dropped. If a group still exceeds the
        bound on the age, `take` raises StalenessError and consumes no group.
        """
        while True:
            batch = {i: self.trainable(data) for i, data in self.next_groups(count).items()}
            too_old = [i for i, data in batch.items() if data is None]
            if not too_old:
                break
            for task_id in too_old:
                del self.order[task_id]
                self.gate.on_rollout_dropped()
                self.trace("drop", task_id)
        for data in batch.values():
            self.gate.check_age(self.head_version(data))
        for task_id in batch:
            del self.order[task_id]
            self.trace("consume", task_id)
        return [*batch.values()]

    def take_task(self, task_id: int) -> list[Any]:
        """Return [result] for a finished task, [None] for a rejected one, else [].

        An unknown id, or one already taken, raises KeyError.
        """
        if task_id in self.rejected:
            self.rejected.remove(task_id)
            return [None]
        if task_id in self.pending or self.order[task_id] is None:
            return []
        self.gate.on_rollout_withdrawn()
        return [self.order.pop(task_id)]


@dataclass(eq=False, repr=False)
class BatchTaskDispatcher:
    """Run tasks in an event loop, and return results that are not too old.

    `task_factory(task)` makes a task's coroutine, which returns a prompt group, or None to reject
    the task.
    """

    task_factory: Callable[[Any], Coroutine[Any, Any, Any]]
    state: DispatchState

    def __post_init__(self) -> None:
        self.stopped: Future = Future()  # its exception ends every call
        self._news = asyncio.Event()  # set for a moment when a task has ended
        self._running: set[asyncio.Task] = set()  # the loop has only weak references to tasks
        self._loop = uvloop.new_event_loop()
        self.call_soon = self._loop.call_soon_threadsafe
        self.thread = threading.Thread(target=self._main, name="rollout", daemon=True)
        self.thread.start()

    def submit_task_input(self, task: Any) -> None:
        """Enqueue a task, which starts as soon as the gate admits it."""
        self.change(self.state.enqueue, task)

    def wait_results(self, count: int, timeout: float | None = None) -> list[Any]:
        """Wait for the next `count` results, in the order of `next_groups`.

        If this raises TimeoutError or StalenessError, nothing is consumed.
        """
        return self._wait(lambda: self.state.take(count), timeout)

    def wait_for_task(self, task_id: int, timeout: float | None = None) -> Any:
        """Wait for a task, and return its result, or None if it was rejected.

        The task then belongs to no batch, and its place at the gate is free. Raises TimeoutError
        after `timeout` seconds, and KeyError for an unknown id.
        """
        return self._wait(lambda: self.state.take_task(task_id), timeout)[0]

    def active_submit_and_wait(self, tasks: Iterator[Any], batch_size: int) -> list[Any]:
        """Return the next batch. Meanwhile, keep (eta + 1) B of the endless `tasks` waiting for
        their start."""

        def take() -> list[Any]:
            batch = self.state.take(batch_size)
            missing = self.state.gate.get_pending_limit() - len(self.state.pending)
            for task in islice(tasks, max(0, missing)):
                self.state.enqueue(task)
            return batch

        return self._wait(take)

    def in_flight(self) -> set[int]:
        return self.change(self.state.in_flight)

    def pause(self) -> None:
        """Start nothing until `resume`. Running tasks continue."""
        self.change(setattr, self.state, "paused", True)

    def resume(self) -> None:
        self.change(setattr, self.state, "paused", False)

    def on_new_version(self) -> None:
        """Start the tasks that the gate admits at the new version."""
        self.change(lambda: None)  # `change` starts what the gate admits

    def change(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in the loop, start what the gate then admits, and return the function's
        result."""
        return self._wait(lambda: [function(*args)])[0]

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run `work` in the loop and wait for its result; Ctrl-C ends the wait.

        After a call of `fail(error)`, `run` raises `error`, even if an episode blocks the loop.
        """
        if self.stopped.done():
            work.close()
            return self.stopped.result()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            wait([future, self.stopped], return_when=FIRST_COMPLETED)
            return (self.stopped if self.stopped.done() else future).result()
        finally:
            future.cancel()

    def _wait(self, attempt: Callable[[], Any], timeout: float | None = None) -> Any:
        """Call `attempt` in the loop, and again whenever a task ends, until `attempt` returns a
        true value."""

        async def until() -> Any:
            async with asyncio.timeout(timeout):
                while True:
                    result = attempt()
                    self._produce()  # the gate may have opened
                    if result:
                        return result
                    await self._news.wait()

        return self.run(until())

    # ---- for any thread

    def fail(self, error: BaseException) -> None:
        """Stop the run: from now on, every call raises `error`. Later errors are ignored."""
        if not self.stopped.done():
            self.stopped.set_exception(error)

    def destroy(self) -> None:
        """Cancel the episodes, let them clean up, and end the thread."""
        self.fail(RuntimeError("the rollout is destroyed"))
        if self.thread.is_alive():
            self.call_soon(self._finish)
            self.thread.join(timeout=10)

    # ---- in the loop

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            while True:
                with suppress(SystemExit, KeyboardInterrupt):  # of a task that an agent has made
                    runner.get_loop().run_forever()
                    break  # `_finish` has stopped it

    def _finish(self) -> None:
        tasks = asyncio.all_tasks()
        for task in tasks:
            task.cancel()
        cleaned_up = asyncio.gather(*tasks, return_exceptions=True)
        cleaned_up.add_done_callback(lambda _: self._loop.stop())

    def _produce(self) -> None:
        for task in self.state.start():
            running = asyncio.create_task(self._run(task))
            self._running.add(running)
            running.add_done_callback(self._running.discard)

    async def _run(self, task: Any) -> None:
        data = error = None
        try:
            data = await self.task_factory(task)
        except BaseException as raised:  # also the SystemExit of an agent
            error = raised
        if self.stopped.done():  # the run has stopped, so the task stays unfinished
            return
        try:
            self.state.finish(task.task_id, data, error)
            self._produce()
            self._news.set()
            self._news.clear()
        except Exception as reason:  # too many have failed, or a listener is broken
            self.fail(reason)
