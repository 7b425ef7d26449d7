"""One thread, one loop, one lock: tasks go in, results come out, and nothing that goes wrong stays inside."""

import asyncio
import contextvars
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from runner import AsyncTaskRunner, TaskQueueFullError, TimedResult

DEADLINE = 10.0  # seconds; it only turns a hang into a failure


class Ended:
    """What on_done hears, in order."""

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
def idle(ended: Ended) -> Iterator[AsyncTaskRunner]:
    """A runner whose thread does not run yet."""
    runner = AsyncTaskRunner(max_queue_size=3)
    runner.on_done = ended.results.put
    yield runner
    runner.destroy()


@pytest.fixture
def runner(idle: AsyncTaskRunner) -> AsyncTaskRunner:
    idle.initialize()
    return idle


async def value(x: Any) -> Any:
    return x


async def crash(error: BaseException) -> None:
    raise error


def test_runner_returns_in_order_of_completion(runner, ended):
    """The runner knows no order but that in which tasks end."""
    first: Future[str] = Future()

    async def slow() -> str:
        return await asyncio.wrap_future(first)

    runner.submit(slow, task_id=0)
    runner.submit(value, "fast", task_id=1)
    assert ended.data() == ["fast"]
    first.set_result("slow")
    assert ended.data() == ["slow"]


def test_runner_reports_when_a_task_started_and_how_it_ended(runner, ended):
    """A task that raises yields None, and its TimedResult holds the exception."""
    before = time.monotonic_ns()
    error = ValueError("no")
    runner.submit(crash, error, task_id=7)
    result = ended.next()
    assert before <= result.create_time <= time.monotonic_ns()
    assert (result.task_id, result.data, result.error) == (7, None, error)


def test_runner_refuses_a_duplicate_and_a_full_queue(idle, ended):
    """An id is used once at a time, and what waits for the thread takes room."""
    idle.submit(value, "a", task_id=0)
    with pytest.raises(ValueError, match="task 0 is already active"):
        idle.submit(value, "b", task_id=0)
    idle.submit(value, "b", task_id=1)
    idle.submit(value, "c", task_id=2)
    with pytest.raises(TaskQueueFullError, match="max_queue_size=3"):
        idle.submit(value, "d", task_id=3)
    idle.initialize()
    assert ended.data(3) == ["a", "b", "c"]
    idle.submit(value, "d", task_id=0)
    assert ended.data() == ["d"]


def test_our_own_error_in_the_thread_reaches_the_caller(runner):
    """What our own code raises there is told to on_failure, and raised in every later call, with its cause."""
    error = OSError("disk full")
    failures: queue.Queue[BaseException] = queue.Queue()

    def broken(result: TimedResult) -> None:
        raise error

    runner.on_done, runner.on_failure = broken, failures.put
    runner.submit(value, 1, task_id=0)
    assert failures.get(timeout=DEADLINE) is error
    with pytest.raises(RuntimeError, match=r"the runner has ended.*disk full") as info:
        runner.submit(value, 1, task_id=1)
    assert info.value.__cause__ is error


def test_a_task_that_exits_is_a_failed_task(runner, ended):
    """sys.exit() in an agent ends that episode, not the thread of all the others."""
    runner.submit(crash, SystemExit(3), task_id=0)
    assert isinstance(ended.next().error, SystemExit)
    runner.submit(value, "alive", task_id=1)
    assert ended.data() == ["alive"]


def test_a_task_may_be_submitted_before_the_thread_runs(idle, ended):
    """initialize() starts what was submitted earlier."""
    idle.submit(value, 1, task_id=0)
    idle.initialize()
    assert ended.data() == [1]


def test_a_runner_without_room_is_refused():
    """max_queue_size = 0 could never run anything."""
    with pytest.raises(ValueError, match="max_queue_size"):
        AsyncTaskRunner(0)


def test_a_task_starts_in_a_fresh_context(runner, ended):
    """Context variables of one episode never leak into the one that takes its place."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="clean")

    async def first() -> None:
        variable.set("dirty")
        runner.submit(second, task_id=1)

    async def second() -> str:
        return variable.get()

    runner.submit(first, task_id=0)
    assert ended.data(2) == [None, "clean"]


def test_destroy_before_initialize_and_twice():
    """Shutting down is always allowed; afterwards every call says so."""
    runner = AsyncTaskRunner(1)
    runner.destroy()
    runner.destroy()
    with pytest.raises(RuntimeError, match="the runner has ended: 'destroyed'"):
        runner.initialize()
    with pytest.raises(RuntimeError, match="the runner has ended: 'destroyed'"):
        runner.submit(value, 1, task_id=0)


def test_a_task_that_ignores_its_cancellation_is_named(runner, caplog):
    """destroy() waits a bounded time, then says which task holds the thread."""
    began = threading.Event()
    release: Future = Future()

    async def stubborn() -> None:
        began.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            await asyncio.wrap_future(release)

    runner.submit(stubborn, task_id=7)
    assert began.wait(DEADLINE)
    runner.destroy(timeout=0)
    assert "tasks [7] ignored their cancellation for 0 s" in caplog.text
    release.set_result(None)
    runner.destroy()
    assert not runner._thread.is_alive()
