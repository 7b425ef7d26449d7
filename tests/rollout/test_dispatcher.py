"""Tests of the dispatcher: which groups start and when, in which order they are returned, and how failures end the
run.

Each episode waits for a future that the test sets, so the test decides the order of all events. A test that hangs fails
after a deadline of 10 s. The tests at the end of this file use a simulated clock (class VirtualRunner).
"""

import asyncio
import heapq
import logging
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.dispatcher import BatchTaskDispatcher, DispatchState, logger
from rollout.runner import AsyncTaskRunner, TimedResult
from staleness import RolloutStat, StalenessError, StalenessManager

DEADLINE = 10.0


@dataclass(frozen=True)
class Prompt:
    task_id: int


@dataclass(frozen=True)
class Group:
    task_id: int
    version: int


def prompts(first: int = 0) -> Iterator[Prompt]:
    return map(Prompt, count(first))


class Version:
    """A fake engine that only holds the current version."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._version = 0

    def get_version(self) -> int:
        with self._lock:
            return self._version

    def set_version(self, version: int) -> None:
        with self._lock:
            self._version = version


class Stage:
    """A dispatcher whose episodes end when the test calls finish(i), reject(i) or crash(i)."""

    def __init__(
        self,
        eta: int = 0,
        batch: int = 2,
        concurrent: int = 100,
        max_queue_size: int = 100,
        **kwargs,
    ):
        self.version = Version()
        self.manager = StalenessManager(self.version, concurrent, batch, eta)
        self.events: list[tuple[str, int]] = []
        self.cleaned_up: list[int] = []
        self._started: queue.Queue[int] = queue.Queue()
        self._outcomes: dict[int, Future] = {}
        self.state: DispatchState[Prompt, Group] = DispatchState(
            self.manager,
            lambda group: group.version,
            max_queue_size,
            trace=lambda event, task_id: self.events.append((event, task_id)),
            **kwargs,
        )
        self.dispatcher = BatchTaskDispatcher(self._episode, self.state)

    async def _episode(self, task: Prompt) -> Group | None:
        outcome = self._outcome(task.task_id)
        version = self.version.get_version()
        self._started.put(task.task_id)
        try:
            accepted = await asyncio.wrap_future(outcome)
        finally:
            self.cleaned_up.append(task.task_id)
        return Group(task.task_id, version) if accepted else None

    def _outcome(self, task_id: int) -> Future:
        return self._outcomes.setdefault(task_id, Future())

    def submit(self, *task_ids: int) -> None:
        for task_id in task_ids:
            self.dispatcher.submit_task_input(Prompt(task_id))

    def started(self, number: int) -> list[int]:
        """Wait until `number` more episodes have started, and return their ids."""
        return [self._started.get(timeout=DEADLINE) for _ in range(number)]

    def finish(self, *task_ids: int) -> None:
        for task_id in task_ids:
            self._outcome(task_id).set_result(True)

    def reject(self, task_id: int) -> None:
        self._outcome(task_id).set_result(False)

    def crash(self, task_id: int, error: BaseException) -> None:
        self._outcome(task_id).set_exception(error)

    def new_version(self, version: int) -> None:
        self.version.set_version(version)
        self.dispatcher.on_new_version()

    def take(self, number: int, **kwargs) -> list[int]:
        kwargs = {"timeout": DEADLINE, **kwargs}
        return [group.task_id for group in self.dispatcher.wait_results(number, **kwargs)]


class Background:
    """Run `call` in a thread. The method `result` waits for the end of the call, and returns its value or raises its
    exception."""

    def __init__(self, call: Callable[[], Any]):
        self._future: Future = Future()
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._future.set_result(call())
        except BaseException as error:
            self._future.set_exception(error)

    def result(self) -> Any:
        try:
            return self._future.result(DEADLINE)
        finally:
            self._thread.join(DEADLINE)


@pytest.fixture
def make_stage() -> Iterator[Callable[..., Stage]]:
    stages: list[Stage] = []

    def make(**kwargs) -> Stage:
        stages.append(Stage(**kwargs))
        return stages[-1]

    yield make
    for stage in stages:
        stage.dispatcher.destroy()


@pytest.fixture
def log() -> Iterator[queue.Queue[str]]:
    """A queue of the messages that the dispatcher logs."""
    messages: queue.Queue[str] = queue.Queue()
    handler = logging.Handler()
    handler.emit = lambda record: messages.put(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


async def value(x: Any) -> Any:
    return x


# ---- order of the groups, the gate, and versions


def test_results_come_in_order_of_start(make_stage):
    """The trainer consumes groups in the order in which they started, even if they finish in another order."""
    stage = make_stage(batch=3)
    stage.submit(10, 11, 12)
    assert stage.started(3) == [10, 11, 12]
    stage.finish(12, 10, 11)
    assert stage.take(3) == [10, 11, 12]


def test_a_straggler_holds_up_its_batch(make_stage):
    """A batch waits for its slowest group, even if groups that started later have finished."""
    stage = make_stage(eta=1, batch=2)
    stage.submit(0, 1, 2, 3)
    stage.started(4)
    stage.finish(1, 2, 3)
    assert (
        stage.dispatcher.wait_for_task(3, timeout=DEADLINE).task_id == 3
    )  # now groups 1, 2 and 3 have finished
    with pytest.raises(TimeoutError, match="the next 2 tasks"):
        stage.take(2, timeout=0)
    stage.finish(0)
    assert stage.take(2) == [0, 1]


def test_a_timeout_consumes_nothing(make_stage):
    """If `take` times out, it consumes no group, and the next successful `take` returns all groups in order of
    start."""
    stage = make_stage(batch=2)
    stage.submit(0, 1)
    stage.finish(0)
    with pytest.raises(TimeoutError):
        stage.take(2, timeout=0)
    stage.finish(1)
    assert stage.take(2) == [0, 1]
    with pytest.raises(ValueError, match="count"):
        stage.take(0)


def test_a_new_version_alone_wakes_the_producer(make_stage):
    """When the version rises, the dispatcher starts the tasks that the gate admits at the new version, and waits for no
    other event."""
    stage = make_stage(eta=0, batch=2)
    stage.submit(0, 1, 2, 3)
    assert stage.started(2) == [0, 1]
    assert stage.manager.get_capacity() == 0
    stage.new_version(1)
    assert stage.started(2) == [2, 3]


def test_a_waiting_trainer_is_woken_by_a_new_version(make_stage, log):
    """If the gate admits no group, a trainer that waits for a batch keeps waiting until the version rises. The
    dispatcher logs that the trainer waits."""
    stage = make_stage(eta=0, batch=1)
    stage.submit(0, 1)
    stage.finish(0, 1)
    assert stage.take(1) == [0]
    waiting = Background(lambda: stage.take(1, timeout=None))
    assert "at a closed gate for a new version" in log.get(timeout=DEADLINE)
    stage.new_version(1)
    assert waiting.result() == [1]


def test_waiting_for_what_was_never_submitted_is_logged(make_stage, log):
    """If the trainer waits before any task is submitted, the dispatcher logs a warning. The trainer keeps waiting until
    a different thread has submitted a task and the task's group has finished."""
    stage = make_stage()
    waiting = Background(lambda: stage.take(1, timeout=None))
    assert "waiting for a new task" in log.get(timeout=DEADLINE)
    stage.submit(0)
    stage.finish(0)
    assert waiting.result() == [0]


def test_the_concurrency_limit_is_kept_and_refilled(make_stage):
    """With a limit of two running tasks, the third task starts when one of the first two ends."""
    stage = make_stage(eta=5, concurrent=2)
    stage.submit(0, 1, 2)
    assert stage.started(2) == [0, 1]
    assert stage.manager.get_stats() == RolloutStat(enqueued=1, running=2)
    stage.finish(1)
    assert stage.started(1) == [2]


def test_the_runners_bound_holds_back_instead_of_raising(make_stage):
    """Any number of tasks may be pending. The option max_queue_size limits only the number of running tasks."""
    stage = make_stage(eta=10, max_queue_size=1)
    stage.submit(*range(5))
    for task_id in range(5):
        assert stage.started(1) == [task_id]
        stage.finish(task_id)
    assert stage.take(5) == [0, 1, 2, 3, 4]


def test_pause_starts_nothing_and_resume_goes_on(make_stage):
    """While the dispatcher is paused, no group starts. Groups that are already running can finish, and the trainer can
    take these groups."""
    stage = make_stage(batch=2)
    stage.submit(0)
    stage.started(1)
    stage.dispatcher.pause()
    stage.submit(1)
    stage.finish(0)
    assert stage.take(1) == [0]
    assert stage.manager.get_stats() == RolloutStat(enqueued=1, accepted=1)
    stage.dispatcher.resume()
    assert stage.started(1) == [1]


def test_every_event_is_traced(make_stage):
    """The dispatcher calls the trace callback for each event of a task, in order."""
    stage = make_stage(eta=5)
    stage.submit(0)
    stage.finish(0)
    stage.take(1)
    stage.submit(1, 2)
    stage.reject(1)
    assert stage.dispatcher.wait_for_task(1, DEADLINE) is None
    stage.crash(2, ValueError("no"))
    assert stage.dispatcher.wait_for_task(2, DEADLINE) is None
    lives = {i: [event for event, task_id in stage.events if task_id == i] for i in range(3)}
    assert lives == {
        0: ["submit", "start", "finish", "accept", "consume"],
        1: ["submit", "start", "finish", "reject"],
        2: ["submit", "start", "finish", "fail", "reject"],
    }
    assert stage.manager.get_stats() == RolloutStat(accepted=1, rejected=2, failed=1)


def test_an_id_is_used_once_at_a_time(make_stage):
    """A task id may be used again only after the earlier task with this id was consumed."""
    stage = make_stage(eta=5, concurrent=1)
    stage.submit(0, 1)
    for task_id in (0, 1):
        with pytest.raises(ValueError, match="already in the dispatcher"):
            stage.submit(task_id)
    stage.finish(0, 1)
    assert stage.take(2) == [0, 1]
    stage.submit(0)
    assert stage.take(1) == [0]


# ---- rejected, replaced and dropped groups


def test_rejected_groups_are_refilled(make_stage):
    """active_submit_and_wait replaces rejected prompts with new prompts until the batch is complete."""
    stage = make_stage(eta=0, batch=2)
    batch = Background(lambda: stage.dispatcher.active_submit_and_wait(prompts(), 2))
    assert stage.started(2) == [0, 1]
    stage.reject(0)
    assert stage.started(1) == [2]
    stage.crash(2, ValueError("one failing episode"))
    assert stage.started(1) == [3]
    stage.finish(3, 1)
    assert [group.task_id for group in batch.result()] == [1, 3]
    assert stage.manager.get_stats().rejected == 2
    assert stage.manager.get_stats().failed == 1


def test_the_gate_is_kept_supplied_while_the_trainer_trains(make_stage):
    """When a batch is taken, the queue already contains all prompts that the gate will admit at the next version."""
    stage = make_stage(eta=1, batch=2)
    source = prompts()
    stage.finish(*range(4))
    assert len(stage.dispatcher.active_submit_and_wait(source, 2)) == 2
    assert stage.manager.get_stats().enqueued == stage.manager.get_pending_limit() == 4
    stage.started(4)
    stage.new_version(1)
    assert stage.started(2) == [4, 5]


def test_the_same_error_again_and_again_ends_the_run(make_stage):
    """If a bug makes every episode fail, the run stops with an error. The error's cause is the first exception."""
    stage = make_stage(eta=0, batch=2, concurrent=1, max_failures=3)
    errors = [ValueError(f"bug {i}") for i in range(10)]
    for task_id, error in enumerate(errors):
        stage.crash(task_id, error)
    with pytest.raises(RuntimeError, match="3 tasks failed one after another") as info:
        stage.dispatcher.active_submit_and_wait(prompts(), 2)
    assert info.value.__cause__ is errors[0]
    assert errors[0].__traceback__ is not None
    with pytest.raises(RuntimeError, match="3 tasks failed one after another"):
        stage.submit(99)


def test_how_many_failures_are_a_bug():
    """By default the run stops after max(8, 2 * batch size) consecutive failures."""
    for batch, limit in ((1, 8), (32, 64)):
        manager = StalenessManager(Version(), 1, batch, 0)
        state: DispatchState = DispatchState(manager, lambda _: None, max_queue_size=1)
        assert state.max_failures == limit


def test_one_success_ends_a_row_of_failures(make_stage):
    """Only consecutive failures stop the run. A rejected episode resets the count of failures, because it raised no
    exception."""
    stage = make_stage(eta=100, concurrent=1, max_failures=2)
    for task_id in range(0, 20, 2):
        stage.crash(task_id, ValueError("now and then"))
        stage.reject(task_id + 1)
    stage.finish(20)
    stage.submit(*range(21))
    assert stage.take(1) == [20]
    assert stage.manager.get_stats() == RolloutStat(accepted=1, rejected=20, failed=10)


def test_a_row_of_rejections_is_logged_once(make_stage, caplog):
    """If many consecutive groups are rejected, the dispatcher logs one warning. An accepted group resets the count of
    rejections."""
    stage = make_stage(eta=100, concurrent=1, max_failures=3)
    accepted = (2, 10)  # series of 2, 7 and 3 rejections
    for task_id in range(14):
        stage.finish(task_id) if task_id in accepted else stage.reject(task_id)
    stage.submit(*range(14))
    assert stage.dispatcher.wait_for_task(13, timeout=DEADLINE) is None
    assert (
        caplog.text.count(
            "3 tasks in a row were rejected and none was accepted: look at should_accept_fn"
        )
        == 2
    )


def test_an_exhausted_generator_is_an_error(make_stage):
    """If the task generator ends, active_submit_and_wait raises an error, because the batch can never be complete."""
    stage = make_stage(eta=0, batch=2)
    with pytest.raises(RuntimeError, match="generator is exhausted"):
        stage.dispatcher.active_submit_and_wait(iter([Prompt(0)]), 2)


def test_a_stale_group_is_an_error(make_stage):
    """If a batch contains a group older than eta, the dispatcher raises StalenessError and consumes no group."""
    stage = make_stage(eta=0, batch=1)
    stage.submit(0)
    stage.started(1)
    stage.finish(0)
    stage.new_version(1)
    with pytest.raises(StalenessError, match=r"rollout\.stale=mask"):
        stage.take(1)
    stage.version.set_version(0)
    assert stage.take(1) == [0]


def test_a_stale_group_can_be_dropped_and_replaced(make_stage):
    """With stale=drop a group that is too old is dropped and counted, and a fresh group replaces the dropped
    group."""
    stage = make_stage(eta=0, batch=1, stale="drop")
    stage.submit(0, 1, 2, 3)
    assert stage.started(1) == [0]
    stage.new_version(1)
    assert stage.started(1) == [1]
    stage.new_version(2)
    assert stage.started(1) == [2]
    stage.finish(0, 1, 2)
    assert stage.take(1) == [2]
    assert stage.started(1) == [3], "no task started in the place of a dropped group"
    assert stage.manager.get_stats() == RolloutStat(running=1, accepted=1, dropped=2)
    assert [event for event in stage.events if event[0] == "drop"] == [("drop", 0), ("drop", 1)]
    assert stage.manager.get_capacity() == 1


def test_a_straggler_is_dropped_and_holds_up_no_batch(make_stage):
    """With stale=drop a batch does not wait for a slow group. The slow group finishes too late and is dropped."""
    stage = make_stage(eta=1, batch=2, stale="drop")
    stage.submit(*range(8))
    assert stage.started(4) == [0, 1, 2, 3]
    stage.finish(3, 2)
    assert stage.take(2) == [3, 2], "the groups that finished first are not consumed first"
    stage.new_version(1)
    stage.finish(*stage.started(2))
    assert stage.take(2) == [4, 5]
    stage.new_version(2)
    stage.finish(0, *stage.started(2))
    assert stage.take(2) == [6, 7]
    assert stage.manager.get_stats() == RolloutStat(running=1, accepted=6, dropped=1)


def test_a_straggler_is_masked_and_holds_up_no_batch(make_stage):
    """With stale=mask a batch does not wait for a slow group, and the slow group is consumed without its old tokens. If
    the mask function does not remove the old tokens, the dispatcher raises StalenessError."""
    masks: list[int] = []

    def without_older(group: Group, oldest: int) -> Group | None:
        masks.append(oldest)
        return Group(group.task_id, max(group.version, oldest))

    stage = make_stage(eta=0, batch=1, stale="mask", without_older=without_older)
    stage.submit(*range(4))
    assert stage.started(1) == [0]
    stage.new_version(1)
    assert stage.started(1) == [1]
    stage.finish(1)
    assert stage.take(1) == [1]
    stage.new_version(2)
    stage.finish(0)
    assert stage.take(1) == [0]
    assert masks[-1] == 2
    assert stage.manager.get_stats().dropped == 0
    stage.state.without_older = lambda group, oldest: group
    stage.finish(*stage.started(1))
    stage.new_version(3)
    with pytest.raises(StalenessError, match="version 2 is consumed at version 3"):
        stage.take(1)


# ---- one task


def test_wait_for_one_task(make_stage):
    """`wait_for_task` returns the group with a given id. The gate admits a new group in place of the returned group,
    and no later batch contains the returned group."""
    stage = make_stage(eta=0, batch=2)
    stage.submit(0, 1, 2)
    stage.finish(1)
    assert stage.dispatcher.wait_for_task(1, DEADLINE) == Group(1, 0)
    assert stage.started(3) == [0, 1, 2], "the place of the fetched task was not used"
    with pytest.raises(TimeoutError, match="task 0"):
        stage.dispatcher.wait_for_task(0, timeout=0)
    with pytest.raises(ValueError, match="task 1 was never submitted, or its result was taken"):
        stage.dispatcher.wait_for_task(1)
    stage.finish(0, 2)
    assert stage.take(2) == [0, 2]
    assert stage.manager.get_stats() == RolloutStat(accepted=2, withdrawn=1)


def test_many_single_tasks_pass_a_narrow_gate(make_stage):
    """When `wait_for_task` returns a group, the gate has a free place for a new task. For a rejected task
    `wait_for_task` returns None."""
    stage = make_stage(eta=0, batch=2)
    stage.submit(*range(6))
    stage.finish(0, 1, 2, 4, 5)
    stage.reject(3)
    results = [stage.dispatcher.wait_for_task(task_id, DEADLINE) for task_id in range(6)]
    assert [group and group.task_id for group in results] == [0, 1, 2, None, 4, 5]


def test_evaluation_returns_in_order_of_submission(make_stage):
    """Without a staleness limit, results are returned in order of submission, in whatever order the tasks finish."""
    stage = make_stage(eta=10**12, batch=2, concurrent=3)
    stage.submit(*range(10))
    stage.finish(*reversed(range(10)))
    assert stage.take(10) == list(range(10))


# ---- failures and the end of a run


def test_fail_reaches_a_waiting_caller(make_stage):
    """A call of `fail` from a second thread ends the wait of the trainer, and every later call raises the error."""
    stage = make_stage()
    stage.submit(0)
    stage.started(1)
    waiting = Background(lambda: stage.take(1, timeout=None))
    error = ConnectionError("server 1 is gone")
    stage.dispatcher.fail(error)
    stage.dispatcher.fail(ValueError("a later failure does not hide the first"))
    with pytest.raises(RuntimeError, match="server 1 is gone") as info:
        waiting.result()
    assert info.value.__cause__ is error
    for call in (
        lambda: stage.submit(1),
        lambda: stage.take(1),
        lambda: stage.dispatcher.wait_for_task(0),
    ):
        with pytest.raises(RuntimeError, match="server 1 is gone"):
            call()


def test_an_error_of_our_own_in_the_thread_reaches_the_caller(make_stage):
    """If the trace callback raises an exception in the event loop's thread, the run stops and the caller gets the
    exception."""
    stage = make_stage()

    def broken(event: str, task_id: int) -> None:
        if event == "finish":
            raise OSError("disk full")

    stage.state.trace = broken
    stage.submit(0)
    stage.finish(0)
    with pytest.raises(RuntimeError, match="the rollout cannot go on") as info:
        stage.take(1)
    assert isinstance(info.value.__cause__, OSError)


def test_a_broken_task_factory_is_a_failed_task(make_stage):
    """If task_factory raises an exception, the task counts as failed."""
    stage = make_stage(batch=1)

    def broken(task: Prompt) -> Any:
        raise ValueError("no workflow of that name")

    stage.dispatcher.task_factory = broken
    stage.submit(0)
    assert stage.dispatcher.wait_for_task(0, DEADLINE) is None
    assert stage.manager.get_stats() == RolloutStat(rejected=1, failed=1)


def test_destroy_cancels_cleans_up_and_leaves_no_thread(make_stage):
    """`destroy` cancels the running episodes, waits until the episodes have cleaned up, and ends the dispatcher's
    thread. A second call of `destroy` has no effect."""
    before = set(threading.enumerate())
    stage = make_stage(eta=5)
    stage.submit(0, 1)
    stage.started(2)
    waiting = Background(lambda: stage.take(1, timeout=None))
    stage.dispatcher.destroy()
    stage.dispatcher.destroy()
    with pytest.raises(RuntimeError, match=r"^the dispatcher is destroyed$"):
        waiting.result()
    assert sorted(stage.cleaned_up) == [0, 1]
    assert set(threading.enumerate()) == before
    assert stage.manager.get_stats() == RolloutStat(rejected=2), "a cancelled episode did not fail"
    with pytest.raises(RuntimeError, match="destroyed"):
        stage.submit(2)


def test_ctrl_c_gets_through_to_a_waiting_trainer(make_stage):
    """Ctrl-C ends the main thread's wait at once, even if the wait has no timeout."""
    stage = make_stage()
    lock, main_thread, through = (
        stage.dispatcher.runner.lock,
        threading.get_ident(),
        threading.Event(),
    )

    async def interrupt(task: Prompt) -> None:
        with lock:  # the main thread releases the lock when it begins to wait
            pass
        while (
            not through.is_set()
        ):  # the first signal may come before the main thread waits, so the loop repeats it
            signal.pthread_kill(main_thread, signal.SIGINT)
            await asyncio.sleep(1)
        await asyncio.get_running_loop().create_future()

    stage.dispatcher.task_factory = interrupt
    with lock:
        stage.submit(0)
        with pytest.raises(KeyboardInterrupt):
            stage.dispatcher.wait_results(1)
        through.set()


def test_repr_shows_the_state(make_stage):
    """The repr of a DispatchState contains the numbers of pending and started groups."""
    stage = make_stage(eta=0, batch=2)
    stage.submit(0, 1, 2)
    stage.started(2)
    assert repr(stage.state).startswith(
        "DispatchState(open, pending=1, started=2, StalenessManager(version=0,"
    )


# ---- virtual time


class VirtualRunner(AsyncTaskRunner):
    """A runner in virtual time: only `wait_for` changes the time. The function durations(task_id) returns how many
    seconds a task takes."""

    def __init__(
        self, durations: Callable[[int], float]
    ):  # a virtual runner starts neither a thread nor an event loop
        self.lock = threading.Condition()
        self.durations = durations
        self.now = 0.0
        self._ends: list[tuple[float, int, TimedResult]] = []

    def submit(self, async_fn, *args, task_id: int) -> None:
        try:
            async_fn(*args).send(None)
        except StopIteration as end:
            result = TimedResult(task_id, int(self.now), end.value)
        heapq.heappush(self._ends, (self.now + self.durations(task_id), task_id, result))

    def wait_for(self, attempt, timeout=None):
        deadline = float("inf") if timeout is None else self.now + timeout
        while not (result := attempt()):
            assert self._ends or timeout is not None, "the wait can never end"
            if not self._ends or self._ends[0][0] > deadline:
                self.now = deadline
                return result
            self.now, _, done = heapq.heappop(self._ends)
            self.on_done(done)
        return result


def virtual_training(
    eta: int, batch: int, durations: Callable[[int], float], steps: int, train_s: float
):
    """Train with the real dispatcher in virtual time. Return the ages of each step's groups, and the duration of the
    training in seconds of virtual time."""
    version = Version()
    runner = VirtualRunner(durations)
    state: DispatchState[Prompt, Group] = DispatchState(
        StalenessManager(version, 1000, batch, eta),
        lambda group: group.version,
        max_queue_size=1000,
    )
    dispatcher = BatchTaskDispatcher(
        lambda task: value(Group(task.task_id, version.get_version())), state, runner
    )
    source, ages = prompts(), []
    for step in range(steps):
        groups = dispatcher.active_submit_and_wait(source, batch)
        ages.append([step - group.version for group in groups])
        runner.wait_for(lambda: False, timeout=train_s)  # training takes train_s seconds
        version.set_version(step + 1)
        dispatcher.on_new_version()
    return ages, runner.now


def test_the_dispatcher_runs_in_virtual_time():
    """A step needs 10 s of rollout and 10 s of training. Ten steps take 200 s with eta = 0 and 110 s with eta = 1."""
    ages, seconds = virtual_training(0, 4, lambda task_id: 10.0, steps=10, train_s=10.0)
    assert seconds == 200.0
    assert max(map(max, ages)) == 0
    ages, seconds = virtual_training(1, 4, lambda task_id: 10.0, steps=10, train_s=10.0)
    assert seconds == 110.0
    assert max(map(max, ages)) == 1


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 3),
    st.integers(1, 4),
    st.lists(st.integers(0, 50), min_size=60, max_size=60),
    st.integers(0, 30),
)
def test_no_choice_of_durations_breaks_the_bound(eta, batch, durations, train_s):
    """No group that the dispatcher returns is older than eta versions, however long the episodes take."""
    ages, _ = virtual_training(eta, batch, lambda i: durations[i % 60], steps=12, train_s=train_s)
    assert max(map(max, ages)) <= eta


def test_an_interrupt_leaves_every_group_where_it_was() -> None:
    """`interrupt(KeyboardInterrupt)` makes the next waiting call raise KeyboardInterrupt, and no group is consumed or
    cancelled."""
    stage = Stage()
    stage.submit(0, 1)
    stage.started(2)
    stage.finish(0)
    stage.dispatcher.wait_for_task(0, DEADLINE)
    stage.dispatcher.interrupt(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        stage.take(1)
    assert stage.dispatcher.in_flight() == {1}
    assert stage.cleaned_up == [0]
    stage.dispatcher.destroy()
