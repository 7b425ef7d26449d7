"""One thread, one loop, one lock: tasks go in, results come out, and nothing that goes wrong stays inside."""

import asyncio
import contextvars
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from runner import AsyncTaskRunner, TaskQueueFullError, TimedResult

DEADLINE = 10.0  # seconds; it only turns a hang into a failure


@pytest.fixture
def runner() -> Iterator[AsyncTaskRunner]:
    runner = AsyncTaskRunner(max_queue_size=3)
    runner.initialize()
    yield runner
    runner.destroy()


async def value(x: Any) -> Any:
    return x


async def crash(error: BaseException) -> None:
    raise error


def test_runner_returns_in_order_of_completion(runner):
    """The runner knows no order but that in which tasks end."""
    first: Future[str] = Future()

    async def slow() -> str:
        return await asyncio.wrap_future(first)

    assert runner.submit(slow) == 0
    assert runner.submit(value, "fast") == 1
    assert runner.wait(1, timeout=DEADLINE) == ["fast"]
    first.set_result("slow")
    assert runner.wait(1, timeout=DEADLINE) == ["slow"]


def test_runner_reports_when_a_task_started_and_how_it_ended(runner):
    """A task that raises yields None, and its TimedResult holds the exception."""
    before = time.monotonic_ns()
    error = ValueError("no")
    runner.submit(crash, error, task_id=7)
    (result,) = runner.wait(1, timeout=DEADLINE, with_timing=True)
    assert before <= result.create_time <= time.monotonic_ns()
    assert (result.task_id, result.data, result.error) == (7, None, error)
    runner.submit(crash, error)
    assert runner.wait(1, timeout=DEADLINE) == [None]


def test_runner_refuses_a_duplicate_and_a_full_queue(runner):
    """An id is used once at a time, and what was not fetched takes room."""
    runner.pause()
    runner.submit(value, "a", task_id=0)
    with pytest.raises(ValueError, match="task 0 is already active"):
        runner.submit(value, "b", task_id=0)
    assert [runner.submit(value, x) for x in "bc"] == [1, 2], "a free id is found"
    with pytest.raises(TaskQueueFullError, match="max_queue_size=3"):
        runner.submit(value, "d")
    runner.resume()
    assert runner.wait(3, timeout=DEADLINE) == ["a", "b", "c"]
    runner.submit(value, "d", task_id=0)


def test_a_paused_runner_starts_nothing_but_finishes_what_runs(runner):
    """pause() is about starting: results of running tasks still arrive."""
    began = threading.Event()
    release: Future = Future()

    async def running() -> str:
        began.set()
        return await asyncio.wrap_future(release)

    runner.submit(running)
    assert began.wait(DEADLINE)
    runner.pause()
    runner.submit(value, "later")
    release.set_result("now")
    assert runner.wait(1, timeout=DEADLINE) == ["now"]
    with pytest.raises(TimeoutError):
        runner.wait(1, timeout=0)
    runner.resume()
    assert runner.wait(1, timeout=DEADLINE) == ["later"]


def test_a_timeout_takes_nothing(runner):
    """Two results wanted, one there: TimeoutError, and the one is still there."""
    runner.submit(value, "a")
    assert runner.wait_for(lambda: len(runner._results) == 1, DEADLINE)
    with pytest.raises(TimeoutError, match="fewer than 2"):
        runner.wait(2, timeout=0)
    assert runner.wait(1, timeout=0) == ["a"]
    with pytest.raises(ValueError, match="count"):
        runner.wait(0)


def test_our_own_error_in_the_thread_reaches_the_caller(runner):
    """What our own code raises there is raised in every waiting and later call, with its cause."""
    error = OSError("disk full")

    def broken(result: TimedResult) -> None:
        raise error

    runner.on_done = broken
    runner.submit(value, 1)
    with pytest.raises(RuntimeError, match="the runner has ended") as info:
        runner.wait(1, timeout=DEADLINE)
    assert info.value.__cause__ is error
    with pytest.raises(RuntimeError, match="disk full"):
        runner.submit(value, 1)


def test_a_task_that_exits_is_a_failed_task(runner):
    """sys.exit() in an agent ends that episode, not the thread of all the others."""
    runner.submit(crash, SystemExit(3))
    (result,) = runner.wait(1, timeout=DEADLINE, with_timing=True)
    assert isinstance(result.error, SystemExit)
    runner.submit(value, "alive")
    assert runner.wait(1, timeout=DEADLINE) == ["alive"]


def test_a_task_may_be_submitted_before_the_thread_runs():
    """initialize() starts what was submitted earlier."""
    runner = AsyncTaskRunner(3)
    runner.submit(value, 1)
    runner.initialize()
    assert runner.wait(1, timeout=DEADLINE) == [1]
    runner.destroy()


def test_a_runner_without_room_is_refused():
    """max_queue_size = 0 could never run anything."""
    with pytest.raises(ValueError, match="max_queue_size"):
        AsyncTaskRunner(0)


def test_a_task_starts_in_a_fresh_context(runner):
    """Context variables of one episode never leak into the one that takes its place."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="clean")

    async def first() -> None:
        variable.set("dirty")
        runner.submit(second)

    async def second() -> str:
        return variable.get()

    runner.submit(first)
    assert runner.wait(2, timeout=DEADLINE) == [None, "clean"]


def test_destroy_before_initialize_and_twice():
    """Shutting down is always allowed; afterwards every call says so."""
    runner = AsyncTaskRunner(1)
    runner.destroy()
    runner.destroy()
    with pytest.raises(RuntimeError, match="the runner has ended: 'destroyed'"):
        runner.initialize()
    with pytest.raises(RuntimeError, match="the runner has ended: 'destroyed'"):
        runner.wait(1)


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
