"""The runner reports the result of every task, and an error in one task does not harm the other tasks."""

import asyncio
import contextvars
import queue
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from rollout.runner import AsyncTaskRunner, TaskQueueFullError, TimedResult

DEADLINE = 10.0  # seconds after which a hanging test fails


class Ended:
    """A queue of the results that the runner passes to on_done."""

    def __init__(self) -> None:
        self.results: queue.Queue[TimedResult] = queue.Queue()

    def next(self) -> TimedResult:
        return self.results.get(timeout=DEADLINE)

    def data(self, number: int = 1) -> list[Any]:
        return [self.next().data for _ in range(number)]


@pytest.fixture
def ended() -> Ended:
    return Ended()


@pytest.fixture
def runner(ended: Ended) -> Iterator[AsyncTaskRunner]:
    runner = AsyncTaskRunner(max_queue_size=3)
    runner.on_done = ended.results.put
    yield runner
    runner.destroy()


async def value(x: Any) -> Any:
    return x


async def crash(error: BaseException) -> None:
    raise error


def test_runner_returns_in_order_of_completion(runner, ended):
    """The runner reports results in the order in which the tasks end."""
    first: Future[str] = Future()

    async def slow() -> str:
        return await asyncio.wrap_future(first)

    runner.submit(slow, task_id=0)
    runner.submit(value, "fast", task_id=1)
    assert ended.data() == ["fast"]
    first.set_result("slow")
    assert ended.data() == ["slow"]


def test_runner_reports_when_a_task_started_and_how_it_ended(runner, ended):
    """A TimedResult contains the task's start time, and the exception if the task raised one."""
    before = time.monotonic_ns()
    error = ValueError("no")
    runner.submit(crash, error, task_id=7)
    result = ended.next()
    assert before <= result.create_time <= time.monotonic_ns()
    assert (result.task_id, result.data, result.error) == (7, None, error)


def test_runner_refuses_what_it_has_no_room_for(runner, ended):
    """A runner that already has max_queue_size tasks refuses a new task. After a task has ended, the runner accepts a
    new task."""
    gate: Future[str] = Future()

    async def waits() -> str:
        return await asyncio.wrap_future(gate)

    for task_id in range(3):
        runner.submit(waits, task_id=task_id)
    with pytest.raises(TaskQueueFullError, match="max_queue_size=3"):
        runner.submit(value, "d", task_id=3)
    gate.set_result("a")
    assert ended.data(3) == ["a"] * 3
    runner.submit(value, "d", task_id=0)
    assert ended.data() == ["d"]


def test_our_own_error_in_the_thread_is_told(runner):
    """If on_done raises an exception, the runner calls on_failure with this exception, and the runner's thread
    continues."""
    error = OSError("disk full")
    failures: queue.Queue[BaseException] = queue.Queue()

    def broken(result: TimedResult) -> None:
        raise error

    runner.on_done, runner.on_failure = broken, failures.put
    for task_id in range(2):
        runner.submit(value, 1, task_id=task_id)
        assert failures.get(timeout=DEADLINE) is error


async def leaves_an_exit() -> None:
    asyncio.get_running_loop().call_soon(sys.exit, 3)


async def interrupts() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("episode", "error"), [(leaves_an_exit, SystemExit), (interrupts, KeyboardInterrupt)]
)
def test_a_loop_that_ends_is_told(runner, episode, error):
    """If a sys.exit() or a KeyboardInterrupt ends the event loop, the runner calls on_failure with the exception."""
    failures: queue.Queue[BaseException] = queue.Queue()
    runner.on_failure = failures.put
    runner.submit(episode, task_id=0)
    assert isinstance(failures.get(timeout=DEADLINE), error)


class Panic(BaseException):
    """An exception that is not a subclass of Exception. Libraries written in Rust raise exceptions that do not inherit
    from Exception."""


@pytest.mark.parametrize(
    "error", [SystemExit(3), Panic("unwrap on None"), asyncio.CancelledError()], ids=repr
)
def test_whatever_a_task_raises_ends_that_task_alone(runner, ended, error):
    """If a task raises SystemExit or any other BaseException, only this task ends, and the runner's thread
    continues."""
    runner.submit(crash, error, task_id=0)
    assert ended.next().error is error
    runner.submit(value, "alive", task_id=1)
    assert ended.data() == ["alive"]


def test_a_runner_without_room_is_refused():
    """A max_queue_size of 0 raises an error, because the runner could never run a task."""
    with pytest.raises(ValueError, match="max_queue_size"):
        AsyncTaskRunner(0)


def test_a_task_starts_in_a_fresh_context(runner, ended):
    """A task does not inherit the context variables of the task that submitted it."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="clean")

    async def first() -> None:
        variable.set("dirty")
        runner.submit(second, task_id=1)

    async def second() -> str:
        return variable.get()

    runner.submit(first, task_id=0)
    assert ended.data(2) == [None, "clean"]


def test_destroy_twice_is_once(runner):
    """A second destroy() has no effect. After destroy(), `submit` raises an error."""
    runner.destroy()
    runner.destroy()
    with pytest.raises(RuntimeError, match="closed"):
        runner.submit(value, 1, task_id=0)


@pytest.mark.parametrize("count", [1, 2000])
def test_tasks_that_ignore_their_cancellation_are_named(caplog, count):
    """destroy() stops waiting after its timeout. If tasks have ignored their cancellation, one short line of the log
    gives the number of these tasks and the ids of the first five."""
    runner = AsyncTaskRunner(max_queue_size=count)
    began = threading.Semaphore(0)
    release: Future = Future()

    async def stubborn() -> None:
        began.release()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            await asyncio.wrap_future(release)

    for task_id in range(count):
        runner.submit(stubborn, task_id=task_id)
    for _ in range(count):
        assert began.acquire(timeout=DEADLINE)
    runner.destroy(timeout=0)
    (record,) = [record for record in caplog.records if record.name == "pocket_areal.runner"]
    ids = list(range(count))[:5]
    assert record.message == f"{count} tasks, such as {ids}, ignored their cancellation for 0 s"
    release.set_result(None)
    runner.destroy()
    assert not runner._thread.is_alive()
