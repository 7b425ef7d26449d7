"""The dispatcher: which groups start and when, in which order they come back, and how a run stops.

Each episode waits for a future that the test sets, so the test decides the order of all events. The
deadline of 10 s is for tests that hang.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from rollout.dispatcher import BatchTaskDispatcher, DispatchState
from staleness import RolloutStat, StalenessManager

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


class Stage:
    """A dispatcher whose episodes end when the test calls finish(i), reject(i) or crash(i)."""

    def __init__(self, eta: int = 0, batch: int = 2, concurrent: int = 100, **options: Any) -> None:
        self.version = 0
        self.gate = StalenessManager(self, concurrent, batch, eta)
        self.events: list[tuple[str, int]] = []
        self.cleaned_up: list[int] = []
        self._started: queue.Queue[int] = queue.Queue()
        self._outcomes: dict[int, Future] = {}
        options = {"trace": lambda *event: self.events.append(event)} | options
        self.state = DispatchState(self.gate, lambda group: group.version, **options)
        self.dispatcher = BatchTaskDispatcher(self._episode, self.state)

    def get_version(self) -> int:
        return self.version

    async def _episode(self, task: Prompt) -> Group | None:
        version = self.version
        self._started.put(task.task_id)
        try:
            accepted = await asyncio.wrap_future(self.outcome(task.task_id))
        finally:
            self.cleaned_up.append(task.task_id)
        return Group(task.task_id, version) if accepted else None

    def outcome(self, task_id: int) -> Future:
        return self._outcomes.setdefault(task_id, Future())

    def submit(self, *task_ids: int) -> None:
        for task_id in task_ids:
            self.dispatcher.submit_task_input(Prompt(task_id))

    def started(self, number: int) -> list[int]:
        """Wait until `number` more episodes have started, and return their ids."""
        return [self._started.get(timeout=DEADLINE) for _ in range(number)]

    def finish(self, *task_ids: int) -> None:
        for task_id in task_ids:
            self.outcome(task_id).set_result(True)

    def reject(self, task_id: int) -> None:
        self.outcome(task_id).set_result(False)

    def crash(self, task_id: int, error: BaseException) -> None:
        self.outcome(task_id).set_exception(error)

    def new_version(self, version: int) -> None:
        self.version = version
        self.dispatcher.on_new_version()

    def take(self, number: int, timeout: float | None = DEADLINE) -> list[int]:
        return [group.task_id for group in self.dispatcher.wait_results(number, timeout)]

    def wait_for(self, task_id: int) -> Group | None:
        return self.dispatcher.wait_for_task(task_id, DEADLINE)


@pytest.fixture
def make_stage() -> Iterator[Callable[..., Stage]]:
    stages: list[Stage] = []

    def make(**options: Any) -> Stage:
        stages.append(Stage(**options))
        return stages[-1]

    yield make
    for stage in stages:
        stage.dispatcher.destroy()


@pytest.fixture
def background() -> Iterator[Callable[..., Future]]:
    """Starts a call in another thread."""
    with ThreadPoolExecutor() as pool:
        yield pool.submit


# ---- order of the groups, the gate, and versions


def test_results_come_in_order_of_start_and_a_straggler_holds_up_its_batch(make_stage):
    """A batch consists of the next groups in order of start, whichever finish first."""
    stage = make_stage(eta=1, batch=2)
    stage.submit(10, 11, 12, 13)
    assert stage.started(4) == [10, 11, 12, 13]
    stage.finish(12, 11, 13)
    assert stage.wait_for(13) == Group(13, 0)  # so the others have finished, too
    with pytest.raises(TimeoutError):
        stage.take(2, timeout=0)
    stage.finish(10)
    assert stage.take(3) == [10, 11, 12]


def test_a_timeout_consumes_nothing(make_stage):
    """After a timeout, every group is still there. A batch that is finished can be taken with
    timeout 0."""
    stage = make_stage(batch=2)
    stage.submit(0, 1)
    stage.finish(0)
    with pytest.raises(TimeoutError):
        stage.take(2, timeout=0)
    with pytest.raises(TimeoutError):
        stage.dispatcher.wait_for_task(1, timeout=0)
    stage.finish(1)
    stage.wait_for(1)
    assert stage.take(1, timeout=0) == [0]


def test_a_new_version_alone_wakes_producer_and_trainer(make_stage, background):
    """When the version rises, the groups that the gate now admits start, and a waiting trainer gets
    them."""
    stage = make_stage(eta=0, batch=1)
    stage.submit(0, 1)
    stage.finish(0, 1)
    assert stage.take(1) == [0]
    waiting = background(stage.take, 1, None)
    assert stage.gate.get_capacity() == 0
    stage.new_version(1)
    assert waiting.result(DEADLINE) == [1]


def test_pause_starts_nothing_and_resume_goes_on(make_stage):
    """During a pause, running groups finish and can be taken, but none starts."""
    stage = make_stage(batch=2)
    stage.submit(0)
    stage.started(1)
    stage.dispatcher.pause()
    stage.submit(1)
    stage.finish(0)
    assert stage.take(1) == [0]
    assert stage.gate.get_stats() == RolloutStat(enqueued=1, accepted=1)
    stage.dispatcher.resume()
    assert stage.started(1) == [1]


# ---- rejected, replaced and dropped groups


def test_the_gate_is_kept_supplied_while_the_trainer_trains(make_stage):
    """When a batch is taken, the prompts that the gate will admit at the next version are already
    enqueued."""
    stage = make_stage(eta=1, batch=2)
    stage.finish(*range(4))
    assert len(stage.dispatcher.active_submit_and_wait(prompts(), 2)) == 2
    assert stage.gate.get_stats().enqueued == stage.gate.get_pending_limit() == 4
    stage.started(4)
    stage.new_version(1)
    assert stage.started(2) == [4, 5]


def test_the_same_error_again_and_again_ends_the_run(make_stage):
    """If every episode fails, the run ends with an error that names the first exception."""
    stage = make_stage(eta=0, batch=2, concurrent=1, max_failures=3)
    errors = [ValueError(f"bug {i}") for i in range(10)]
    for task_id, error in enumerate(errors):
        stage.crash(task_id, error)
    said = r"3 tasks failed one after another, the first by ValueError\('bug 0'\)"
    with pytest.raises(RuntimeError, match=said, check=lambda it: it.__cause__ is errors[0]):
        stage.dispatcher.active_submit_and_wait(prompts(), 2)
    assert errors[0].__traceback__ is not None
    with pytest.raises(RuntimeError, match=said):
        stage.submit(99)


@pytest.mark.parametrize(("batch", "limit"), [(1, 8), (32, 64)])
def test_nothing_but_rejections_is_a_bug(make_stage, batch, limit):
    """The run ends after max(8, 2 B) rejections, if no group was accepted before."""
    state = make_stage(batch=batch, eta=10**6).state
    for task_id in range(limit):
        state.enqueue(Prompt(task_id))
        state.start()
        if task_id < limit - 1:
            state.finish(task_id, None)
    with pytest.raises(RuntimeError, match=f"{limit} groups were .*should_accept_fn"):
        state.finish(limit - 1, None)


def test_one_success_ends_a_row_of_failures(make_stage):
    """Only failures in a row stop the run, and rejections only before the first accepted group."""
    stage = make_stage(eta=100, concurrent=1, max_failures=2)
    stage.finish(0, 21)
    for task_id in range(1, 21, 2):
        stage.crash(task_id, ValueError("now and then"))
        stage.reject(task_id + 1)
    stage.submit(*range(22))
    assert stage.take(2) == [0, 21]
    assert stage.gate.get_stats() == RolloutStat(accepted=2, rejected=20, failed=10)


# ---- one task


def test_wait_for_one_task(make_stage):
    """A fetched group is in no batch, cannot be fetched again, and leaves its place to another
    group."""
    stage = make_stage(eta=0, batch=2)
    stage.submit(0, 1, 2)
    stage.finish(1)
    assert stage.wait_for(1) == Group(1, 0)
    assert stage.started(3) == [0, 1, 2], "the place of the fetched task was not used"
    with pytest.raises(KeyError, match="1"):
        stage.wait_for(1)
    stage.finish(0, 2)
    assert stage.take(2) == [0, 2]
    assert stage.gate.get_stats() == RolloutStat(accepted=2, withdrawn=1)


# ---- failures and the end of a run


def test_fail_reaches_a_waiting_caller(make_stage, background):
    """A failure from outside ends the trainer's wait, and every later call raises it. A second
    failure does not replace the first."""
    stage = make_stage()
    stage.submit(0)
    waiting = background(stage.take, 1, None)
    stage.dispatcher.fail(ConnectionError("server 1 is gone"))
    stage.dispatcher.fail(ValueError("a later failure"))
    with pytest.raises(ConnectionError, match="server 1 is gone"):
        waiting.result(DEADLINE)
    for call in (stage.submit, stage.take, stage.wait_for):
        with pytest.raises(ConnectionError, match="server 1 is gone"):
            call(1)
    with pytest.raises(ConnectionError, match="server 1 is gone"):
        stage.dispatcher.in_flight()


def test_fail_ends_a_wait_even_if_an_episode_blocks_the_loop(make_stage, background):
    """A blocking agent cannot keep the doctor from ending the run."""
    stage = make_stage()
    blocked, release = threading.Event(), threading.Event()

    async def blocks(task: Prompt) -> None:
        await asyncio.sleep(0)  # so that `submit` returns
        blocked.set()
        release.wait(DEADLINE)

    stage.dispatcher.task_factory = blocks
    stage.submit(0)
    assert blocked.wait(DEADLINE)
    waiting = background(stage.take, 1, None)
    stage.dispatcher.fail(RuntimeError("an agent blocks the loop"))
    with pytest.raises(RuntimeError, match="an agent blocks the loop"):
        waiting.result(DEADLINE / 2)
    release.set()


def test_a_broken_listener_ends_the_run(make_stage):
    """An exception in the trace reaches the caller."""

    def broken(event: str, task_id: int) -> None:
        if event == "finish":
            raise OSError("disk full")

    stage = make_stage(trace=broken)
    stage.submit(0)
    stage.finish(0)
    with pytest.raises(OSError, match="disk full"):
        stage.take(1)


class Panic(BaseException):
    """Libraries written in Rust may raise exceptions that are not subclasses of Exception."""


@pytest.mark.parametrize(
    "error",
    [ValueError(), SystemExit(3), KeyboardInterrupt(), Panic(), asyncio.CancelledError()],
    ids=repr,
)
def test_whatever_an_episode_raises_is_its_own_failure(make_stage, error):
    """The loop and the other tasks go on."""
    stage = make_stage()

    def factory(task: Prompt) -> Any:
        async def crash() -> None:
            raise error

        return crash() if task.task_id == 0 else stage._episode(task)

    stage.dispatcher.task_factory = factory
    stage.submit(0, 1)
    assert stage.wait_for(0) is None
    assert stage.gate.get_stats() == RolloutStat(running=1, rejected=1, failed=1)
    stage.finish(1)
    assert stage.take(1) == [1]


def test_destroy_cancels_cleans_up_and_leaves_no_thread(background):
    """Running episodes clean up, nothing starts in their place, and the thread ends, even if an
    agent has made tasks that call sys.exit or raise KeyboardInterrupt."""

    async def exits(seconds: float, error: type[BaseException] = SystemExit) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            raise error

    stage = Stage(eta=5, concurrent=2)
    tasks = [exits(0), exits(0, KeyboardInterrupt), *map(exits, [60] * 8)]
    exiting = [stage.dispatcher.change(asyncio.ensure_future, task) for task in tasks]
    stage.submit(0, 1, 2)
    stage.started(2)
    waiting = background(stage.take, 1, None)
    stage.dispatcher.destroy()
    stage.dispatcher.destroy()
    with pytest.raises(RuntimeError, match=r"^the rollout is destroyed$"):
        waiting.result(DEADLINE)
    assert sorted(stage.cleaned_up) == [0, 1]
    assert not stage.dispatcher.thread.is_alive()
    assert stage.gate.get_stats() == RolloutStat(enqueued=1, running=2), "a stop fails nothing"
    ends = SystemExit | KeyboardInterrupt
    assert all(isinstance(task.exception(), ends) for task in exiting)
    with pytest.raises(RuntimeError, match="destroyed"):
        stage.submit(3)
