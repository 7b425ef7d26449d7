"""The dispatcher decides which prompt group starts next, and which groups form the next batch.

Each group is the result of one task. A training step consumes B groups. A group's episodes take
seconds to minutes, so the dispatcher runs as many groups at once as the staleness gate allows.
`DispatchState` makes all decisions without a clock, thread or lock. So bench/simulate.py can use it
in virtual time, and tests/explore can try every order of events. `BatchTaskDispatcher` carries out
the decisions in one event loop. Only the event loop changes the state.

With rollout.stale=wait, a batch takes the B unconsumed groups that started first. One slow group
can delay the batch, but no group is more than eta versions old (staleness.py). With
rollout.stale=mask or drop, a batch takes the B groups that finished first, and `trainable` leaves
out tokens or groups that are too old.

A task that returns None or raises is rejected, and another task takes its place. The run stops
after `max_failures` exceptions in a row, or if `max_failures` groups are rejected before any is
accepted.

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

    is_verdict = True  # no traceback is printed


@dataclass(eq=False, repr=False)
class DispatchState:
    """Decides which tasks start, and which groups a step consumes. A task is any object with a
    `task_id`."""

    gate: StalenessManager
    head_version: Callable[[Any], int | None]  # oldest version among a result's trained tokens
    stale: str = "wait"  # wait, mask or drop
    # for stale=mask: takes tokens older than `oldest` out of the loss
    without_older: Callable[[Any, int], Any] = lambda data, oldest: data
    max_failures: int = 0  # 0 means max(8, 2 B)
    trace: Callable[[str, int], None] = lambda event, task_id: None

    pending: OrderedDict[int, Any] = field(default_factory=OrderedDict)  # submitted tasks
    # started, unconsumed tasks and their results (None while a task runs)
    order: OrderedDict[int, Any] = field(default_factory=OrderedDict)
    rejected: set[int] = field(default_factory=set)
    paused: bool = False
    errors: list[BaseException] = field(default_factory=list)  # the latest failures in a row

    # ---- questions

    def may_start(self) -> int:
        """How many tasks may start now; 0 or less means none."""
        return 0 if self.paused else self.gate.get_capacity()

    def in_flight(self) -> set[int]:
        return {*self.pending, *self.order}

    def next_groups(self, count: int) -> dict[int, Any]:
        """Return {task id: group} for the next `count` groups, or {} until all of them have
        finished."""
        waits = self.stale == "wait"  # for running groups; mask and drop pass them over
        chosen = (x for x in self.order.items() if waits or x[1] is not None)
        batch = dict(islice(chosen, count))
        return batch if len(batch) == count and None not in batch.values() else {}

    def trainable(self, data: Any) -> Any:
        """Return a finished group, or None if it must be dropped as too old. With stale=mask, its
        old tokens are taken out of the loss. With stale=wait, no group is dropped."""
        if self.stale == "mask":
            return self.without_older(data, self.gate.oldest_version())
        fresh = self.stale == "wait" or self.gate.is_fresh(self.head_version(data))
        return data if fresh else None

    # ---- events

    def enqueue(self, task: Any) -> None:
        self.pending[task.task_id] = task
        self.gate.on_rollout_enqueued()
        self.trace("submit", task.task_id)

    def start(self) -> list[Any]:
        count = min(self.may_start(), len(self.pending))
        started = [self.pending.popitem(last=False)[1] for _ in range(count)]
        for task in started:
            self.order[task.task_id] = None
            self.gate.on_rollout_submitted()
            self.trace("start", task.task_id)
        return started

    def finish(self, task_id: int, data: Any, error: BaseException | None = None) -> None:
        """Record that a task has ended. A task without data is rejected. A task with an `error`
        also counts as failed. Raises RolloutsFail after too many failures or rejections."""
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

        Groups for which `trainable` returns None are dropped first. Raises StalenessError, and
        consumes no group, if a remaining group is too old.
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

        Raises KeyError if the id is unknown or was already taken.
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
    """Runs the tasks that `state` starts, in an event loop of its own. `task_factory(task)` makes a
    task's coroutine, which returns a prompt group, or None to reject the task."""

    task_factory: Callable[[Any], Coroutine[Any, Any, Any]]
    state: DispatchState

    def __post_init__(self) -> None:
        self.stopped: Future = Future()  # its exception, once set, ends every wait
        self._news = asyncio.Event()  # set briefly when a task ends
        self._running: set[asyncio.Task] = set()  # the loop has only weak references to tasks
        self._loop = uvloop.new_event_loop()
        self.call_soon = self._loop.call_soon_threadsafe
        self.thread = threading.Thread(target=self._main, name="rollout", daemon=True)
        self.thread.start()

    def submit_task_input(self, task: Any) -> None:
        self.change(self.state.enqueue, task)

    def wait_results(self, count: int, timeout: float | None = None) -> list[Any]:
        """Wait for the next `count` groups, and consume them. Raises TimeoutError or
        StalenessError, and in both cases consumes none."""
        return self._wait(lambda: self.state.take(count), timeout)

    def wait_for_task(self, task_id: int, timeout: float | None = None) -> Any:
        """Wait for a task, and return its result, or None if the task was rejected.

        A returned group frees its place at the gate. Raises TimeoutError after `timeout` seconds,
        and KeyError for an unknown id.
        """
        return self._wait(lambda: self.state.take_task(task_id), timeout)[0]

    def active_submit_and_wait(self, tasks: Iterator[Any], batch_size: int) -> list[Any]:
        """Return the next batch. While waiting, keep (eta + 1) B tasks in the queue. `tasks` is
        endless."""

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
        self.change(lambda: None)

    def change(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(*args)` in the loop, and start the tasks that the gate then admits."""
        return self._wait(lambda: [function(*args)])[0]

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the loop, and wait for its result. Ctrl-C ends the wait.

        After `fail(error)`, `run` raises `error`, even if an episode blocks the loop.
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
        """Call `attempt` in the loop, now and whenever a task ends, until it returns a true
        value."""

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
        """Stop the run: every running or later `run` raises `error`. Later errors are ignored."""
        if not self.stopped.done():
            self.stopped.set_exception(error)

    def destroy(self) -> None:
        self.fail(RuntimeError("the rollout is destroyed"))
        if self.thread.is_alive():
            self.call_soon(self._finish)
            self.thread.join(timeout=10)

    # ---- in the loop

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            while True:
                with suppress(SystemExit, KeyboardInterrupt):  # from an agent's task
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
        except BaseException as raised:  # also an agent's SystemExit
            error = raised
        if self.stopped.done():  # the run has stopped, so the task stays unfinished
            return
        try:
            self.state.finish(task.task_id, data, error)
            self._produce()
            self._news.set()
            self._news.clear()
        except Exception as reason:  # too many failures, or a broken listener
            self.fail(reason)
