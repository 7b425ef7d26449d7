"""Who starts next, who is trained on next: BatchTaskDispatcher (write-up, section 3).

A training step wants B finished prompt groups now; an episode takes seconds to minutes. Between them stands this
dispatcher: it keeps as many episodes running as the staleness gate allows, and hands them out in order of start.

**From pure to impure.**
- DispatchState decides. It holds what is pending, what was started and what is finished, takes events (a task came,
  ended, is asked for) and returns actions (start these; here is your batch). It knows no thread and no clock.
- BatchTaskDispatcher is the shell: it takes the lock, tells the state, carries out what the state answers.
- The runner (rollout/runner.py) has the thread, the clock, the lock and the waiting; it is the only seam to them.

**Nothing polls.** Section 3 has a producer and a consumer thread. Here they are two methods, _commit and _fetch,
and whoever brings an event runs them: the caller who submits, the loop's thread when a task ends, the trainer
when a version is new. An event that could open the gate therefore opens it at once and cannot be missed.

**Order of start.** A batch is the oldest B groups by start, so a straggler holds up the batch it belongs to while
younger groups run on and wait behind it. A rejected group leaves the order, its place is free, and
active_submit_and_wait refills it from the generator. staleness.py proves why this order keeps every group's age
within max_head_offpolicyness; take() checks it.

**Failure.** A task that returns None is rejected; one that raises is rejected and counted as failed. When max_failures
tasks raise and none returns in between, the run stops with the first traceback as the cause: a bug that hits every
episode ends the run instead of being refilled for ever. As many rejected in a row are a warning in the log, once for
each such series: a filter may be strict and right. fail() stops the run from outside (a watcher sees a dead server),
and so does what our own code raises in the thread. In each case every waiting and every later call raises RuntimeError.

**Locks.** One lock, the runner's, re-entrant; inside it the staleness manager's and whatever get_version() takes.
So: never call the dispatcher while holding a lock that get_version() needs; set the version, let go, then
call on_new_version(). Episodes and the task generator run without the lock; trace and head_version run under
it and must be short.

**Not promised.** A batch size other than the gate's B: the proof, and the supply of places, count on B groups a
version. For groups beside the batches there is wait_for_task.

**Beside AReaL.** Same names. There threads poll (0.05 s and 1 s) and a new version alone wakes nobody; a batch is
shuffled; a failing workflow is refilled for ever; wait_results hands out rejected groups as None, here they
leave the order, and only wait_for_task says None.
"""

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, Protocol, TypeVar

from rollout.runner import AsyncTaskRunner, TimedResult
from staleness import StalenessManager

logger = logging.getLogger("nano_areal.dispatcher")


class WithTaskID(Protocol):
    @property
    def task_id(self) -> int: ...


T = TypeVar("T")
TInput = TypeVar("TInput", bound=WithTaskID)
TResult = TypeVar("TResult")


def untraced(event: str, task_id: int) -> None:
    """What hears of every event when nobody wants to."""


@dataclass(eq=False)
class DispatchState(Generic[TInput, TResult]):
    """Every decision of the dispatcher: events in, actions out; no thread, no lock, no clock."""

    manager: StalenessManager
    head_version: Callable[[TResult], int | None]  # of a result's oldest token; None: it has none
    max_queue_size: int  # tasks that the runner takes at once
    drop_stale: bool = False
    max_failures: int = 0  # one after another that end the run; 0: two batches of them, and at least eight
    trace: Callable[[str, int], None] = untraced  # hears of every submit, start, finish, accept, reject, fail, drop
    # all mutable state
    pending: OrderedDict[int, TInput] = field(default_factory=OrderedDict)  # enqueued, not started
    order: OrderedDict[int, TResult | None] = field(default_factory=OrderedDict)  # by start; None: still running
    rejected: set[int] = field(default_factory=set)  # for wait_for_task: one int for each
    paused: bool = False
    failure: tuple[str, BaseException | None] | None = None  # why everything ended
    errors_in_a_row: int = 0
    first_error: BaseException | None = None  # of that row
    rejected_in_a_row: int = 0

    def __post_init__(self) -> None:
        self.max_failures = self.max_failures or max(8, 2 * self.manager.consumer_batch_size)

    def __repr__(self) -> str:
        state = "failed" if self.failure else "paused" if self.paused else "open"
        return f"DispatchState({state}, pending={len(self.pending)}, started={len(self.order)}, {self.manager})"

    # ---- questions

    def may_start(self) -> int:
        """How many tasks may start now, if there are any."""
        if self.paused or self.failure:
            return 0
        return max(0, min(self.manager.get_capacity(), self.max_queue_size - self.manager.get_stats().running))

    def is_stalled(self) -> bool:
        """Only a caller can make anything happen: by a new task, or by a new version."""
        return not (self.manager.get_stats().running or self.paused or self.failure)

    def in_flight(self) -> set[int]:
        """The ids of the tasks that may still be consumed: pending, running, and finished."""
        return {*self.pending, *self.order}

    def oldest(self, count: int) -> dict[int, TResult]:
        """The `count` oldest by start; none while one of them is not finished."""
        finished = {task_id: data for task_id, data in islice(self.order.items(), count) if data is not None}
        return finished if len(finished) == count else {}

    # ---- events

    def enqueue(self, task: TInput) -> None:
        if task.task_id in self.pending or task.task_id in self.order:
            raise ValueError(f"task {task.task_id} is already in the dispatcher")
        self.rejected.discard(task.task_id)
        self.pending[task.task_id] = task
        self.manager.on_rollout_enqueued()
        self.trace("submit", task.task_id)

    def start(self) -> list[TInput]:
        """The tasks to start now, in this order; from here on they count as running."""
        started = []
        for _ in range(min(self.may_start(), len(self.pending))):
            task_id, task = self.pending.popitem(last=False)
            self.order[task_id] = None
            self.manager.on_rollout_submitted()
            self.trace("start", task_id)
            started.append(task)
        return started

    def finish(self, result: TimedResult[TResult]) -> None:
        """A task ended: accepted if it brought data, else rejected."""
        task_id = result.task_id
        self.trace("finish", task_id)
        if result.data is not None:
            self.order[task_id] = result.data
            self.manager.on_rollout_accepted()
            self.trace("accept", task_id)
        else:
            del self.order[task_id]
            self.rejected.add(task_id)
            failed = result.error is not None and self.failure is None  # after the end it is our cancellation
            self.manager.on_rollout_rejected(failed)
            if failed:
                self.trace("fail", task_id)
            self.trace("reject", task_id)
        self._count_in_a_row(result)

    def take(self, count: int) -> list[TResult]:
        """The `count` oldest by start, consumed; [] while one of them is not finished.

        A group too old: with drop_stale it is dropped and the next one steps up, else StalenessError, and then
        nothing is consumed.
        """
        while oldest := self.oldest(count):
            stale = [i for i, data in oldest.items() if not self.manager.is_fresh(self.head_version(data))]
            if not stale:
                for task_id in oldest:
                    del self.order[task_id]
                return list(oldest.values())
            if not self.drop_stale:
                self.manager.check_age(self.head_version(oldest[stale[0]]))  # raises
            for task_id in stale:
                del self.order[task_id]
                self.manager.on_rollout_dropped()
                self.trace("drop", task_id)
        return []

    def take_task(self, task_id: int) -> list[TResult | None]:
        """[result] of one task, [None] if it was rejected, [] while it is not finished. It leaves the order.

        ValueError for an id that was never submitted, or whose result was taken.
        """
        if task_id in self.rejected:
            self.rejected.remove(task_id)
            return [None]
        if (data := self.order.get(task_id)) is not None:
            del self.order[task_id]
            self.manager.on_rollout_withdrawn()
            return [data]
        if task_id in self.order or task_id in self.pending:
            return []
        raise ValueError(f"task {task_id} was never submitted, or its result was taken")

    def fail(self, message: str, cause: BaseException | None) -> None:
        """Nothing starts any more; the first failure is the one that is reported."""
        self.failure = self.failure or (message, cause)

    def _count_in_a_row(self, result: TimedResult[TResult]) -> None:
        """How many failed, and were rejected, one after another."""
        if result.error is None:
            self.errors_in_a_row, self.first_error = 0, None
        else:
            self.errors_in_a_row += 1
            first = self.first_error = self.first_error or result.error
            if self.errors_in_a_row >= self.max_failures:
                self.fail(f"{self.errors_in_a_row} tasks failed one after another; the first: {first!r}", first)
        self.rejected_in_a_row = 0 if result.data is not None else self.rejected_in_a_row + 1
        if self.rejected_in_a_row == self.max_failures and not self.failure:
            hint = "look at should_accept_fn, and at why the workflow returns None (of an agent: it set no reward)"
            logger.warning("%d tasks in a row were rejected and none was accepted: %s", self.max_failures, hint)


class BatchTaskDispatcher(Generic[TInput, TResult]):
    """Section 3's dispatcher: submit inputs, get batches back in order of start, within the staleness bound.

    task_factory(task) makes the coroutine whose result is one prompt group, or None: rejected.
    """

    def __init__(
        self,
        task_factory: Callable[[TInput], Awaitable[TResult | None]],
        state: DispatchState[TInput, TResult],
        runner: AsyncTaskRunner | None = None,
    ):
        self.task_factory = task_factory
        self._state = state  # all mutable state, under runner.lock
        self.runner = runner or AsyncTaskRunner(state.max_queue_size)
        self.runner.on_done, self.runner.on_failure = self._fetch, self.fail

    def submit_task_input(self, task: TInput) -> None:
        """Enqueues without bound; starts as soon as the gate admits it. ValueError: the id is in use."""
        with self.runner.lock:
            self.check_alive()
            self._state.enqueue(task)
            self._commit()

    def wait_results(self, count: int, timeout: float | None = None) -> list[TResult]:
        """The `count` oldest by start that were not rejected, in order of start.

        TimeoutError after `timeout` seconds (None: never); then nothing is consumed. StalenessError if one of them
        is older than max_head_offpolicyness and drop_stale is off.
        """
        if count < 1:
            raise ValueError(f"count must be 1 or more, not {count}")
        return self._wait(f"the {count} oldest tasks", lambda: self._state.take(count), timeout)

    def wait_for_task(self, task_id: int, timeout: float | None = None) -> TResult | None:
        """The result of one task, None if it was rejected; it leaves the order and gives its place back.

        For what is done beside the batches, as evaluation: its age is not checked. ValueError: unknown id.
        """
        return self._wait(f"task {task_id}", lambda: self._state.take_task(task_id), timeout)[0]

    def active_submit_and_wait(self, task_generator: Iterator[TInput], batch_size: int) -> list[TResult]:
        """A batch of accepted results, while the endless generator keeps the gate supplied and refills the rejected."""
        while True:
            self._top_up(task_generator)
            results = self._wait("a batch", lambda: self._state.take(batch_size) or not self._state.pending)
            if isinstance(results, list):  # else more tasks are needed first
                self._top_up(task_generator)  # what starts while the trainer trains
                return results

    def in_flight(self) -> set[int]:
        """The ids of the tasks that may still be consumed. RuntimeError after the end."""
        with self.runner.lock:
            self.check_alive()
            return self._state.in_flight()

    def check_alive(self) -> None:
        """Raises RuntimeError once everything has ended."""
        with self.runner.lock:
            if self._state.failure is not None:
                message, cause = self._state.failure
                raise RuntimeError(message) from cause

    def restore(self, results: dict[int, TResult]) -> None:
        """Results of an earlier process, by task id and in their order of start: the oldest of this one, which has no
        tasks yet. The staleness manager is told by the caller (on_version_recovered)."""
        with self.runner.lock:
            assert not self._state.in_flight(), f"results are put back only where nothing was submitted: {self._state}"
            self._state.order.update(results)

    def pause(self) -> None:
        """Starts nothing more; what runs goes on, and results can be taken."""
        with self.runner.lock:
            self._state.paused = True

    def resume(self) -> None:
        with self.runner.lock:
            self._state.paused = False
            self.on_new_version()

    def on_new_version(self) -> None:
        """The version provider's version rose: what the gate now admits starts at once."""
        with self.runner.lock:
            self._commit()
            self.runner.lock.notify_all()

    def fail(self, error: BaseException) -> None:
        """Ends everything from outside: every waiting and later call raises RuntimeError from `error`."""
        with self.runner.lock:
            self._state.fail(f"the rollout cannot go on: {error!r}", error)
            self.runner.lock.notify_all()

    def destroy(self) -> None:
        """1. waiting calls raise; 2. running tasks are cancelled and clean up; 3. the thread is joined."""
        with self.runner.lock:
            self._state.fail("the dispatcher is destroyed", None)
            self.runner.lock.notify_all()
        self.runner.destroy()

    # ---- producer and consumer; under the lock, in the thread of whoever brought the event

    def _commit(self) -> None:
        """The producer (section 3.2): starts what the gate admits."""
        for task in self._state.start():
            self.runner.submit(self.task_factory, task, task_id=task.task_id)

    def _fetch(self, result: TimedResult[TResult]) -> None:
        """The consumer (section 3.3): takes in a result; the place it may give back is used at once."""
        self._state.finish(result)
        self._commit()

    # ---- waiting

    def _top_up(self, task_generator: Iterator[TInput]) -> None:
        """Draws what the gate can use before we are back here. Not under the lock: it may be slow.

        The number of draws is fixed beforehand: without a staleness limit, tasks could end as fast as we draw.
        """
        limit = min(self._state.manager.get_pending_limit(), self._state.max_queue_size)
        for _ in range(limit - len(self._state.pending)):
            task = next(task_generator, None)
            if task is None:
                raise RuntimeError("the task generator is exhausted")
            self.submit_task_input(task)

    def _wait(self, what: str, attempt: Callable[[], T], timeout: float | None = None) -> T:
        def attempt_while_alive() -> T:
            self.check_alive()
            result = attempt()
            self._commit()  # what was dropped or withdrawn gave its place back
            if not result and timeout is None and self._state.is_stalled():
                logger.warning("waiting for a new task, or at a closed gate for a new version: %s", self._state)
            return result

        result = self.runner.wait_for(attempt_while_alive, timeout)
        if not result:
            raise TimeoutError(f"{what} did not finish within {timeout} s: {self._state}")
        return result
