"""The dispatcher decides which prompt group starts next, and which groups form the next batch.

A training step needs B finished groups, and an episode takes seconds to minutes, so as many groups
run as the staleness gate allows. `DispatchState` makes all decisions, in methods without clock,
thread or lock: the simulator runs them in virtual time, and the exploration runs through every
order of events (docs/protocol.md). `BatchTaskDispatcher` carries them out in the event loop.

The write-up has a producer and a consumer thread that poll. Here they are what happens at an event:
when the gate may have opened, `_produce` starts tasks; when a task ends, `_run` records how.

Which groups a batch takes is rollout.stale. With `wait` they are the B unconsumed groups that
started first, so one slow group delays its batch. With `mask` and `drop` they are those that
finished first, without the tokens, or the groups, that are too old. No trained token is ever more
than eta versions old: staleness.py has the proof, and `take` checks it.

A task that returns None is rejected and another one is drawn; one that raises has also failed. The
run stops after `max_failures` failures in a row, or when as many were rejected and none was ever
accepted. Every call raises RuntimeError then, from the first error.

Not promised: what wait_for_task returns belongs to no batch, and its age is not checked.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rollout.loop import RolloutLoop
from staleness import StalenessManager


@dataclass(eq=False, repr=False)
class DispatchState:
    """All decisions, and all that they depend on. A task is anything with a `task_id`."""

    manager: StalenessManager
    head_version: Callable[[Any], int | None]  # oldest version in a result
    stale: str = "wait"  # wait, mask or drop
    # for mask: a result without the tokens older than a version, None if nothing is left
    without_older: Callable[[Any, int], Any] = lambda data, oldest: data
    max_failures: int = 0  # 0: max(8, 2 B)
    trace: Callable[[str, int], None] = lambda event, task_id: None

    pending: OrderedDict[int, Any] = field(default_factory=OrderedDict)  # submitted tasks
    order: OrderedDict[int, Any] = field(default_factory=OrderedDict)  # results; None: running
    rejected: set[int] = field(default_factory=set)
    paused: bool = False
    failure: tuple[str, BaseException] | None = None  # why the run stops
    errors_in_a_row: int = 0
    first_error: Any = None  # of those in a row: (task id, exception)

    def __post_init__(self) -> None:
        self.max_failures = self.max_failures or max(8, 2 * self.manager.consumer_batch_size)

    # ---- questions

    def may_start(self) -> int:
        """How many tasks may start now."""
        return 0 if self.paused or self.failure else max(0, self.manager.get_capacity())

    def in_flight(self) -> set[int]:
        """The tasks that a later step may consume."""
        return {*self.pending, *self.order}

    def next_groups(self, count: int) -> dict[int, Any]:
        """The `count` groups to consume next, by task id; {} if one of them is not finished."""
        finished = ((i, data) for i, data in self.order.items() if data is not None)
        chosen = self.order.items() if self.stale == "wait" else finished
        batch = {i: data for i, data in islice(chosen, count) if data is not None}
        return batch if len(batch) == count else {}

    def trainable(self, data: Any) -> Any:
        """What a step may train of a finished group; None: nothing."""
        if self.stale == "mask":
            return self.without_older(data, self.manager.oldest_version())
        fresh = self.stale == "wait" or self.manager.is_fresh(self.head_version(data))
        return data if fresh else None

    # ---- events

    def enqueue(self, task: Any) -> None:
        """Add a task, whose id is new."""
        self.pending[task.task_id] = task
        self.manager.on_rollout_enqueued()
        self.trace("submit", task.task_id)

    def start(self) -> list[Any]:
        """The tasks that start now, oldest first."""
        count = min(self.may_start(), len(self.pending))
        started = [self.pending.popitem(last=False)[1] for _ in range(count)]
        for task in started:
            self.order[task.task_id] = None
            self.manager.on_rollout_submitted()
            self.trace("start", task.task_id)
        return started

    def finish(self, task_id: int, data: Any, error: BaseException | None = None) -> None:
        """A task has ended: accepted with data, else rejected, and with an error also failed."""
        self.trace("finish", task_id)
        self.errors_in_a_row = self.errors_in_a_row + 1 if error else 0
        self.first_error = self.first_error if error else None
        if data is not None:
            self.order[task_id] = data
            if self.stale != "wait":
                self.order.move_to_end(task_id)  # finished groups are in order of finish
            self.manager.on_rollout_accepted()
            self.trace("accept", task_id)
            return
        del self.order[task_id]
        self.rejected.add(task_id)
        self.manager.on_rollout_rejected(failed=error is not None)
        if error:
            self.trace("fail", task_id)
            self.first_error = self.first_error or (task_id, error)
        self.trace("reject", task_id)
        stat = self.manager.get_stats()
        if self.errors_in_a_row >= self.max_failures:
            first, cause = self.first_error
            words = f"{self.errors_in_a_row} tasks failed one after another"
            self.failure = f"{words}, first task {first}: {cause!r}", cause
        elif stat.rejected >= self.max_failures and not (
            stat.accepted + stat.dropped + stat.withdrawn
        ):
            words = f"{stat.rejected} groups were rejected and none was accepted: look at"
            hint = "should_accept_fn, and at why the workflow returns None (an agent: no reward)"
            self.failure = f"{words} {hint}", ValueError("no group was accepted")

    def take(self, count: int) -> list[Any]:
        """Consume the next `count` groups, or return [] if one of them is not finished.

        What is too old is dropped or masked. Raises StalenessError, and consumes nothing, if a
        group still exceeds the bound.
        """
        while batch := {i: self.trainable(data) for i, data in self.next_groups(count).items()}:
            if not (too_old := [i for i, data in batch.items() if data is None]):
                break
            for task_id in too_old:
                del self.order[task_id]
                self.manager.on_rollout_dropped()
                self.trace("drop", task_id)
        for data in batch.values():
            self.manager.check_age(self.head_version(data))
        for task_id in batch:
            del self.order[task_id]
            self.trace("consume", task_id)
        return [*batch.values()]

    def take_task(self, task_id: int) -> list[Any]:
        """[result] of a finished task, [None] of a rejected one, [] while it runs.

        A result is given once. Raises ValueError for an unknown id.
        """
        if task_id in self.rejected:
            self.rejected.remove(task_id)
            return [None]
        if task_id not in self.pending and task_id not in self.order:
            raise ValueError(f"task {task_id} was never submitted, or its result was taken")
        if self.order.get(task_id) is None:
            return []
        self.manager.on_rollout_withdrawn()
        return [self.order.pop(task_id)]


class BatchTaskDispatcher:
    """Runs submitted tasks in the loop, and returns results that are not too old.

    `task_factory(task)` makes the coroutine of a task, whose result is a prompt group, or None to
    reject it. The methods are for the trainer's thread.
    """

    def __init__(
        self,
        task_factory: Callable[[Any], Coroutine[Any, Any, Any]],
        state: DispatchState,
        loop: RolloutLoop,
    ) -> None:
        self.task_factory, self.state, self.loop = task_factory, state, loop
        self._news = asyncio.Event()  # set for a moment at every event
        self._interrupts: list[type[BaseException]] = []

    def submit_task_input(self, task: Any) -> None:
        """Enqueue a task, which starts as soon as the gate admits it."""
        self._do(self.state.enqueue, task)

    def wait_results(self, count: int, timeout: float | None = None) -> list[Any]:
        """Wait for the next `count` results, in the order of `next_groups`.

        Raises TimeoutError or StalenessError, and then consumes nothing.
        """
        return self._wait(self.state.take, count, timeout)

    def wait_for_task(self, task_id: int, timeout: float | None = None) -> Any:
        """Wait for one task: its result, or None if it was rejected.

        It is in no batch then, and its place at the gate is free. Raises TimeoutError, and
        ValueError for an unknown id.
        """
        return self._wait(self.state.take_task, task_id, timeout)[0]

    def active_submit_and_wait(self, tasks: Iterator[Any], batch_size: int) -> list[Any]:
        """Return a batch. Tasks are drawn from an endless iterator, so that enough are ready to
        start, also while the trainer trains on this batch."""

        def take(count: int) -> Any:
            return self.state.take(count) or not self.state.pending

        batch: Any = True
        while batch is True:  # nothing is pending
            self._top_up(tasks)
            batch = self._wait(take, batch_size)
        self._top_up(tasks)
        return batch

    def in_flight(self) -> set[int]:
        """The tasks that a later step may consume."""
        return self._do(self.state.in_flight)

    def pause(self) -> None:
        """Start nothing until `resume`. What runs goes on."""
        self._do(setattr, self.state, "paused", True)

    def resume(self) -> None:
        self._do(setattr, self.state, "paused", False)

    def on_new_version(self) -> None:
        """The version has grown, so the gate may admit more."""
        self._do(self.state.may_start)

    def interrupt(self, error: type[BaseException]) -> None:
        """Raise `error` in the call that waits now, or in the next one."""
        self.loop.call_soon(self._event, self._interrupts.append, error)

    def fail(self, error: BaseException, message: str = "") -> None:
        """Stop the run: from now on, every call raises RuntimeError(message) from `error`."""
        self.loop.fail(message or f"the rollout cannot go on: {error!r}", error)

    def _do(self, change: Callable[..., Any], *args: Any) -> Any:
        async def act() -> Any:
            return self._event(change, *args)

        return self.loop.run(act())

    def _wait(self, attempt: Callable[[int], Any], arg: int, timeout: float | None = None) -> Any:
        """Call `attempt(arg)` in the loop after every event, until its result is true."""

        async def until() -> Any:
            async with asyncio.timeout(timeout):
                while not self._interrupts:
                    result = attempt(arg)
                    self._produce()  # what was dropped or withdrawn has freed places
                    if result:
                        return result
                    await self._news.wait()

        if result := self.loop.run(until()):
            return result
        raise self._interrupts.pop()  # not in the loop, which a KeyboardInterrupt would end

    def _top_up(self, tasks: Iterator[Any]) -> None:
        """Submit tasks until enough are pending. How many that is is counted once, because a task
        may start at once."""
        missing = self.state.manager.get_pending_limit() - len(self.state.pending)
        for task in islice(tasks, max(0, missing)):
            self.submit_task_input(task)

    # ---- in the loop

    def _event(self, change: Callable[..., Any], *args: Any) -> Any:
        """Change the state, start what may start now, and wake who waits."""
        result = change(*args)
        self._produce()
        self._news.set()
        self._news.clear()
        return result

    def _produce(self) -> None:
        for task in self.state.start():
            self.loop.start(self._run(task))
        if self.state.failure:
            self.loop.fail(*self.state.failure)

    async def _run(self, task: Any) -> None:
        data, error = None, None
        try:
            data = await self.task_factory(task)
        except BaseException as raised:  # also the SystemExit of an agent
            error = raised
        if not self.loop.failed.done():  # else this task was cancelled, and stays open
            try:
                self._event(self.state.finish, task.task_id, data, error)
            except Exception as broken:  # in a listener
                self.fail(broken)
