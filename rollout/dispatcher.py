"""The dispatcher decides which prompt group starts next, and which groups form the next batch.

A training step needs B finished prompt groups. An episode takes seconds to minutes, so BatchTaskDispatcher keeps as
many groups running as the staleness gate allows.

**Three parts.** DispatchState makes all decisions. DispatchState records which tasks are pending, running and finished.
DispatchState has one method for each event, such as `finish` for the end of a task. `DispatchState.start` returns the
tasks that must start. DispatchState has no thread and no clock. BatchTaskDispatcher calls the methods of DispatchState
while it holds the lock, and carries out the decisions. AsyncTaskRunner (runner.py) has the thread, the event loop and
the lock. Callers wait in `AsyncTaskRunner.wait_for`.

**Producer and consumer.** In the write-up (docs/companion.md) the producer and the consumer are threads that poll. In
this module, the producer is the method `_produce`, and the consumer is the method `_consume`. `_produce` starts the
tasks that the gate admits. `_consume` records the result of a task. The dispatcher calls `_produce` at every event that
may open the gate: a caller submits a task, a task ends, or the trainer sets a new version.

**Which groups form a batch.** The key rollout.stale chooses one of three rules. With `wait`, a batch has the B
unconsumed groups that started first, so a slow group delays its batch. With `mask` and `drop`, a batch has the B
unconsumed groups that finished first: with `mask`, take() masks the tokens that are too old, and with `drop`, take()
drops the groups that are too old. With each rule, no trained token is more than max_head_offpolicyness versions old.
The proof of this age bound is in staleness.py, and take() checks the age of each group. When a group is rejected, its
place at the gate becomes free, and active_submit_and_wait draws a new task.

**Failure.** A task that returns None is rejected. A task that raises an exception is rejected and also counted as
failed. The run stops if max_failures consecutive tasks raise an exception. The run also stops if a caller calls fail(),
for example because a server ended, or if the dispatcher's own code raises an exception. After a stop, every call that
submits a task, waits for results or reads `in_flight` raises RuntimeError, whose cause is the first exception. Methods
such as pause still work after a stop. If max_failures consecutive tasks are rejected without an exception, the run
continues and the dispatcher logs a warning.

**Locks.** The runner's lock, which is re-entrant, guards the dispatcher's state. The dispatcher holds the lock while it
calls get_version(), head_version and trace, so these functions must return quickly. Episodes and the task generator run
without the lock. If get_version() takes a lock, a thread that holds this lock must not call the dispatcher, because two
threads could deadlock.

**What is not promised.** The age bound holds only if each batch has consumer_batch_size groups. Groups that
wait_for_task returns belong to no batch, and the dispatcher does not check their age.
"""

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, Literal, Protocol, TypeVar

from rollout.runner import AsyncTaskRunner, TimedResult
from staleness import StalenessManager

logger = logging.getLogger("pocket_areal.dispatcher")

REMEMBERED = 1_000_000  # number of rejected tasks whose ids are kept, so that memory stays bounded in a long run


class ServerRestarted(Exception):
    """An inference server was restarted and needs the current weights. A waiting method that raises ServerRestarted has
    consumed no task."""


class WithTaskID(Protocol):
    """A task with an id."""

    @property
    def task_id(self) -> int: ...


T = TypeVar("T")
TInput = TypeVar("TInput", bound=WithTaskID)
TResult = TypeVar("TResult")


def untraced(event: str, task_id: int, **args: Any) -> None:
    """Ignore an event. `untraced` is the default trace callback."""


@dataclass(eq=False)
class DispatchState(Generic[TInput, TResult]):
    """Makes all decisions of the dispatcher, in methods that use no thread, lock or clock."""

    manager: StalenessManager
    head_version: Callable[
        [TResult], int | None
    ]  # oldest version in a result, or None if the result has no tokens
    max_queue_size: int  # maximum number of running tasks
    stale: Literal["wait", "mask", "drop"] = "wait"  # how take() keeps the age bound (staleness.py)
    # function that masks tokens that are too old; the default returns the result unchanged
    without_older: Callable[[TResult, int], TResult | None] = lambda data, oldest: data
    max_failures: int = 0  # number of consecutive failures that stops the run; 0 means max(8, 2 * consumer_batch_size)
    trace: Callable[..., None] = untraced  # function of (name of an event, task id)

    # Mutable state of the dispatcher:
    pending: OrderedDict[int, TInput] = field(
        default_factory=OrderedDict
    )  # submitted tasks that have not started
    order: OrderedDict[int, TResult | None] = field(
        default_factory=OrderedDict
    )  # task id -> result, None if running
    rejected: OrderedDict[int, None] = field(
        default_factory=OrderedDict
    )  # ids of the last REMEMBERED rejected tasks
    paused: bool = False
    failure: tuple[str, BaseException] | None = (
        None  # message and cause of the stop; None while the run goes on
    )
    interrupts: set[type[BaseException]] = field(
        default_factory=set
    )  # exceptions that the next waiting calls raise
    errors_in_a_row: int = 0
    first_error: BaseException | None = (
        None  # the first of the consecutive errors that `errors_in_a_row` counts
    )
    rejected_in_a_row: int = 0

    def __post_init__(self) -> None:
        self.max_failures = self.max_failures or max(8, 2 * self.manager.consumer_batch_size)

    def __repr__(self) -> str:
        state = "failed" if self.failure else "paused" if self.paused else "open"
        return f"DispatchState({state}, pending={len(self.pending)}, started={len(self.order)}, {self.manager})"

    # ---- methods that change nothing

    def may_start(self) -> int:
        """Return how many tasks may start now if enough tasks are pending."""
        if self.paused or self.failure:
            return 0
        return max(
            0,
            min(
                self.manager.get_capacity(), self.max_queue_size - self.manager.get_stats().running
            ),
        )

    def is_stalled(self) -> bool:
        """Return True if the run is active (neither paused nor stopped) and no task runs."""
        return not (self.manager.get_stats().running or self.paused or self.failure)

    def in_flight(self) -> set[int]:
        """Return the ids of the tasks that a later step may consume: the pending, running and finished tasks."""
        return {*self.pending, *self.order}

    def next_groups(self, count: int) -> dict[int, TResult]:
        """Return the `count` groups to consume next as {task id: result}, or {} if one of them is not finished.

        With stale=wait, the groups that started first are consumed first. With stale=mask or drop, the groups that
        finished first are consumed first.
        """
        finished = [(task_id, data) for task_id, data in self.order.items() if data is not None]
        chosen = islice(self.order.items(), count) if self.stale == "wait" else finished[:count]
        batch = {task_id: data for task_id, data in chosen if data is not None}
        return batch if len(batch) == count else {}

    def trainable(self, data: TResult) -> TResult | None:
        """Return the part of a finished group on which a step may train, or None if the group must be dropped."""
        if self.stale == "mask":
            return self.without_older(data, self.manager.oldest_version())
        return (
            data if self.stale == "wait" or self.manager.is_fresh(self.head_version(data)) else None
        )

    # ---- events

    def enqueue(self, task: TInput) -> None:
        """Add a pending task. Raises ValueError if the task's id is in use."""
        if task.task_id in self.pending or task.task_id in self.order:
            raise ValueError(
                f"task {task.task_id} is already in the dispatcher; give each task an id of its own"
            )
        self.pending[task.task_id] = task
        self.manager.on_rollout_enqueued()
        self.trace("submit", task.task_id)

    def start(self) -> list[TInput]:
        """Return the tasks that must start now, in order of start, and count them as running."""
        count = min(self.may_start(), len(self.pending))
        started = [
            self.pending.popitem(last=False)[1] for _ in range(count)
        ]  # the oldest pending tasks
        for task in started:
            self.order[task.task_id] = None
            self.manager.on_rollout_submitted()
            self.trace("start", task.task_id)
        return started

    def finish(self, result: TimedResult[TResult]) -> None:
        """Record how a task ended. A task that returned data is accepted, and every other task is rejected."""
        task_id = result.task_id
        self.trace("finish", task_id)
        if result.data is not None:
            self.order[task_id] = result.data
            if self.stale != "wait":
                self.order.move_to_end(
                    task_id
                )  # finished groups stay in the order in which they finished
            self.manager.on_rollout_accepted()
            self.trace("accept", task_id)
        else:
            del self.order[task_id]
            self.rejected[task_id] = None
            if len(self.rejected) > REMEMBERED:
                self.rejected.popitem(last=False)
            failed = (
                result.error is not None and self.failure is None
            )  # after a stop no task counts as failed
            self.manager.on_rollout_rejected(failed)
            if failed:
                self.trace("fail", task_id)
            self.trace("reject", task_id)
        self._count_in_a_row(result)

    def take(self, count: int) -> list[TResult]:
        """Consume and return the next `count` groups, or return [] if one of them is not finished.

        With stale=drop, a group that is too old is dropped, and the next finished group takes its place. With
        stale=mask, the tokens that are too old are masked. If a group of the resulting batch exceeds the age bound, the
        method raises StalenessError and consumes no group.
        """
        while batch := {
            task_id: self.trainable(data) for task_id, data in self.next_groups(count).items()
        }:
            if not (too_old := [task_id for task_id, data in batch.items() if data is None]):
                break
            for task_id in too_old:
                del self.order[task_id]
                self.manager.on_rollout_dropped()
                self.trace("drop", task_id)
        groups = [data for data in batch.values() if data is not None]
        for data in groups:
            self.manager.check_age(self.head_version(data))
        for task_id in batch:
            del self.order[task_id]
            self.trace("consume", task_id)
        return groups

    def take_task(self, task_id: int) -> list[TResult | None]:
        """Return [result] for a finished task, [None] for a rejected task, and [] for a task that has not ended.

        If the task is finished or rejected, the method removes the task from the state. Raises ValueError if the task
        was never submitted, or if its result was already taken.
        """
        if task_id in self.rejected:
            del self.rejected[task_id]
            return [None]
        if task_id not in self.pending and task_id not in self.order:
            raise ValueError(f"task {task_id} was never submitted, or its result was taken")
        data = self.order.get(task_id)
        if data is None:  # pending or running
            return []
        del self.order[task_id]
        self.manager.on_rollout_withdrawn()
        return [data]

    def fail(self, message: str, cause: BaseException) -> None:
        """Stop the run, so that no task starts any more. If `fail` is called twice, the first message and cause
        stay."""
        self.failure = self.failure or (message, cause)

    def _count_in_a_row(self, result: TimedResult[TResult]) -> None:
        """Stop the run after max_failures consecutive errors. Log a warning after max_failures consecutive
        rejections."""
        if result.error is None:
            self.errors_in_a_row, self.first_error = 0, None
        else:
            self.errors_in_a_row += 1
            self.first_error = self.first_error or result.error
            if self.errors_in_a_row >= self.max_failures:
                message = f"{self.errors_in_a_row} tasks failed one after another; the first: {self.first_error!r}"
                self.fail(message, self.first_error)
        self.rejected_in_a_row = 0 if result.data is not None else self.rejected_in_a_row + 1
        if self.rejected_in_a_row == self.max_failures and not self.failure:
            hint = "look at should_accept_fn, and at why the workflow returns None (an agent: because it set no reward)"
            logger.warning(
                "%d tasks in a row were rejected and none was accepted: %s", self.max_failures, hint
            )


class BatchTaskDispatcher(Generic[TInput, TResult]):
    """Runs submitted tasks, and returns results that are not too old (write-up, section 3.1).

    task_factory(task) makes the coroutine that runs one task. The coroutine returns one prompt group, or None to reject
    the task.
    """

    def __init__(
        self,
        task_factory: Callable[[TInput], Awaitable[TResult | None]],
        state: DispatchState[TInput, TResult],
        runner: AsyncTaskRunner | None = None,
    ):
        self.task_factory = task_factory
        self._state = state  # all mutable state, guarded by runner.lock
        self.runner = runner or AsyncTaskRunner(state.max_queue_size)
        self.runner.on_done, self.runner.on_failure = self._consume, self.fail

    def submit_task_input(self, task: TInput) -> None:
        """Enqueue a task, which starts as soon as the gate admits it. Raises ValueError if the task's id is in use.

        Any number of tasks may be pending.
        """
        with self.runner.lock:
            self.check_alive()
            self._state.enqueue(task)
            self._produce()

    def wait_results(self, count: int, timeout: float | None = None) -> list[TResult]:
        """Wait for the next `count` results, and return them in order (DispatchState.next_groups).

        Raises TimeoutError after `timeout` seconds; None means no limit. Raises StalenessError if a result is too old
        (DispatchState.take). If the method raises an exception, it consumes no result.
        """
        if count < 1:
            raise ValueError(f"count must be 1 or more, not {count}")
        return self._wait(f"the next {count} tasks", lambda: self._state.take(count), timeout)

    def wait_for_task(self, task_id: int, timeout: float | None = None) -> TResult | None:
        """Wait for one task. Return the task's result, or None if the task was rejected.

        No batch will contain this result, and the task's place at the gate becomes free. The age of the result is not
        checked, because no step trains on the result. Raises ValueError if the id is unknown, and TimeoutError after
        `timeout` seconds.
        """
        return self._wait(f"task {task_id}", lambda: self._state.take_task(task_id), timeout)[0]

    def active_submit_and_wait(
        self, task_generator: Iterator[TInput], batch_size: int
    ) -> list[TResult]:
        """Return a batch of accepted results, and draw the tasks for the batch from a generator. The generator must
        never end."""
        batch: list[TResult] = []
        while not batch:
            # 1. Draw tasks, so that the producer can start them.
            self._top_up(task_generator)
            # 2. Wait until `next_groups` returns a batch. If no task is pending, stop waiting and draw more tasks.
            self._wait(
                "a batch", lambda: self._state.next_groups(batch_size) or not self._state.pending
            )
            # 3. Take the groups. The batch is empty if the next groups are not finished, or if too many groups were
            #    dropped for their age.
            with self.runner.lock:
                batch = self._state.take(batch_size)
                self._produce()
        # 4. Draw the tasks that will start while the trainer trains on this batch.
        self._top_up(task_generator)
        return batch

    def in_flight(self) -> set[int]:
        """Return the ids of the tasks that may still be consumed. Raises RuntimeError if the run has stopped."""
        with self.runner.lock:
            self.check_alive()
            return self._state.in_flight()

    def check_alive(self) -> None:
        """Raise RuntimeError if the run has stopped."""
        if failure := self._state.failure:  # reading one attribute needs no lock
            raise RuntimeError(failure[0]) from failure[1]

    def restore(self, results: dict[int, TResult]) -> None:
        """Add the finished results of an earlier process. `results` maps task ids to results, in order of start.

        Call `restore` before any task is submitted. The caller of `restore` must also call `on_version_recovered` of
        the staleness manager.
        """
        with self.runner.lock:
            assert not self._state.in_flight(), (
                f"restore results before any task is submitted: {self._state}"
            )
            self._state.order.update(results)

    def pause(self) -> None:
        """Let no task start until `resume` is called. Running tasks continue, and callers can still take finished
        results."""
        with self.runner.lock:
            self._state.paused = True

    def resume(self) -> None:
        """Undo `pause`, and start the tasks that the gate admits."""
        with self.runner.lock:
            self._state.paused = False
            self.on_new_version()

    def on_new_version(self) -> None:
        """Start the tasks that the gate admits at the new version. Call `on_new_version` after the version has
        increased."""
        with self.runner.lock:
            self._produce()
            self.runner.lock.notify_all()

    def interrupt(self, error: type[BaseException]) -> None:
        """Raise `error` in the caller that waits now or, if no caller waits, in the next caller that waits. The running
        tasks continue."""
        with self.runner.lock:
            self._state.interrupts.add(error)
            self.runner.lock.notify_all()

    def fail(self, error: BaseException, message: str = "") -> None:
        """Stop the run. After `fail`, every method that submits a task, waits for results or reads `in_flight` raises
        RuntimeError(message) from `error`."""
        with self.runner.lock:
            self._state.fail(message or f"the rollout cannot go on: {error!r}", error)
            self.runner.lock.notify_all()

    def destroy(self) -> None:
        """Stop the run, cancel the running tasks, let them clean up, and join the thread.

        A second call of `destroy` does nothing.
        """
        reason = "the dispatcher is destroyed"
        self.fail(RuntimeError(reason), reason)
        self.runner.destroy()

    # ---- producer and consumer; callers of these methods hold the lock

    def _produce(self) -> None:
        """Start the pending tasks that the gate admits (the producer of the write-up, section 3.2)."""
        for task in self._state.start():
            self.runner.submit(self.task_factory, task, task_id=task.task_id)

    def _consume(self, result: TimedResult[TResult]) -> None:
        """Record how a task ended, then start the next tasks (the consumer of the write-up, section 3.3)."""
        self._state.finish(result)
        self._produce()

    # ---- waiting

    def _top_up(self, task_generator: Iterator[TInput]) -> None:
        """Submit tasks from the generator, so that up to (eta + 1) * B tasks are pending.

        The method first computes how many tasks it submits. A loop that submits tasks until enough are pending might
        never end, because a submitted task can start at once. The method does not hold the lock, because the generator
        may be slow. Raises RuntimeError if the generator ends.
        """
        limit = min(self._state.manager.get_pending_limit(), self._state.max_queue_size)
        for _ in range(limit - len(self._state.pending)):
            task = next(task_generator, None)
            if task is None:
                raise RuntimeError("the task generator is exhausted; give one that never ends")
            self.submit_task_input(task)

    def _wait(self, what: str, attempt: Callable[[], T], timeout: float | None = None) -> T:
        """Call `attempt` after every event until its result is true, and return the result. Raises TimeoutError."""

        def attempt_while_alive() -> T:
            self.check_alive()
            if self._state.interrupts:
                raise self._state.interrupts.pop()
            result = attempt()
            self._produce()  # if attempt() dropped or withdrew groups, their places at the gate are free
            if not result and timeout is None and self._state.is_stalled():
                logger.warning(
                    "waiting for a new task, or at a closed gate for a new version: %s", self._state
                )
            return result

        result = self.runner.wait_for(attempt_while_alive, timeout)
        if not result:
            raise TimeoutError(f"{what} did not finish within {timeout} s: {self._state}")
        return result
