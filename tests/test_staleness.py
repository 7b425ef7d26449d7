"""The gate and the order of start together bound the age of every group that a step trains on.

A version is a plain number here, and hypothesis draws the order of the events.
"""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.dispatcher import DispatchState
from staleness import RolloutStat, StalenessError, StalenessManager


@dataclass
class Version:
    version: int = 0

    def get_version(self) -> int:
        return self.version


@dataclass(frozen=True)
class Prompt:
    task_id: int


@dataclass(frozen=True)
class Group:
    task_id: int
    version: int  # of its oldest token


def make_manager(
    eta: int = 0, batch: int = 2, concurrent: int = 100, version: int = 0
) -> StalenessManager:
    return StalenessManager(Version(version), concurrent, batch, eta)


def run(manager: StalenessManager, count: int) -> None:
    """Enqueue and start `count` groups."""
    for _ in range(count):
        manager.on_rollout_enqueued()
        manager.on_rollout_submitted()


# ---- the gate's capacity and the life of a group


@pytest.mark.parametrize(
    ("eta", "batch", "concurrent", "version", "accepted", "running", "capacity"),
    [
        (0, 4, 100, 0, 0, 0, 4),  # synchronous training admits one batch
        (0, 4, 100, 0, 3, 1, 0),
        (0, 4, 100, 1, 4, 0, 4),  # the four groups of version 0 still hold their places
        (2, 4, 100, 0, 0, 0, 12),
        (2, 4, 100, 5, 20, 3, 9),
        (2, 4, 8, 5, 20, 3, 5),  # the concurrency is the smaller limit
        (2, 4, 3, 5, 20, 3, 0),
        (0, 4, 100, 0, 4, 2, -2),
        (10**12, 4, 64, 0, 10**6, 0, 64),  # an evaluation
    ],
)
def test_capacity_is_the_smaller_of_two_limits(
    eta, batch, concurrent, version, accepted, running, capacity
):
    """Capacity = min(max_concurrent - running, (eta + v + 1) B - (accepted + running))."""
    manager = make_manager(eta, batch, concurrent, version)
    manager._stat = RolloutStat(accepted=accepted, running=running)
    assert manager.get_capacity() == capacity


def test_a_rejected_rollout_gives_its_place_back():
    """So does a dropped or a withdrawn one; an accepted one keeps it."""
    manager = make_manager(eta=0, batch=4)
    run(manager, 4)
    events: list[tuple[Any, int]] = [
        (manager.on_rollout_accepted, 0),
        (manager.on_rollout_rejected, 1),
        (lambda: manager.on_rollout_rejected(failed=True), 2),
        (manager.on_rollout_accepted, 2),
        (manager.on_rollout_dropped, 3),
        (manager.on_rollout_withdrawn, 4),
    ]
    for event, capacity in events:
        event()
        assert manager.get_capacity() == capacity
    assert manager.get_stats() == RolloutStat(rejected=2, failed=1, dropped=1, withdrawn=1)


EVENTS = ["enqueued", "submitted", "accepted", "rejected", "dropped", "withdrawn"]


@settings(deadline=None)
@given(st.lists(st.sampled_from(EVENTS), max_size=40))
def test_counters_are_never_negative_and_lose_nobody(events):
    """An impossible event raises and counts nothing; nobody is lost in any order of events."""
    manager, entered = make_manager(), 0
    for event in events:
        try:
            getattr(manager, f"on_rollout_{event}")()
            entered += event == "enqueued"
        except RuntimeError:
            pass
        s = manager.get_stats()
        counts = s.enqueued, s.running, s.accepted, s.rejected, s.dropped, s.withdrawn
        assert min(counts) >= 0
        assert sum(counts) == entered


def test_an_impossible_event_says_what_is_wrong():
    """A group cannot be accepted before it runs."""
    with pytest.raises(RuntimeError, match="became accepted, but none was running"):
        make_manager().on_rollout_accepted()


def test_recovery_restores_what_was_consumed():
    """At version 10 the gate admits (eta + 1) B groups, and not (eta + 11) B (AReaL #1388)."""
    manager = make_manager(eta=2, batch=4, version=10)
    assert manager.get_capacity() == 52
    manager.on_version_recovered(10)
    assert manager.get_capacity() == 12
    run(manager, 2)
    assert manager.get_capacity() == 10


def test_the_age_check():
    """Age eta may train, and eta + 1 may not; a version from the future is an error."""
    manager = make_manager(eta=2, version=7)
    assert [manager.is_fresh(version) for version in (5, 4, None)] == [True, False, True]
    manager.check_age(5)
    said = r"version 4 is consumed at version 7.*rollout.stale=mask"
    with pytest.raises(StalenessError, match=said):
        manager.check_age(4)
    for check in (manager.check_age, manager.is_fresh):
        with pytest.raises(StalenessError, match="version 8 is newer than the policy"):
            check(8)


# ---- the bound


def make_state(manager: StalenessManager, **options: Any) -> DispatchState:
    return DispatchState(manager, lambda group: group.version, **{"max_failures": 10**9, **options})


def feed(state: DispatchState, next_id: int, version: int, started: dict[int, int]) -> int:
    """Start as many groups as the gate admits. Return the next id."""
    while state.may_start() > 0:
        state.enqueue(Prompt(next_id))
        next_id += 1
        started |= {task.task_id: version for task in state.start()}
    return next_id


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 9), st.data())
def test_age_is_bounded_whatever_happens(eta, batch, concurrent, data):
    """In whatever order groups end, no age exceeds eta, and training never hangs."""
    clock = Version()
    manager = StalenessManager(clock, concurrent, batch, eta)
    state = make_state(manager)
    started: dict[int, int] = {}  # task id -> version at the start
    ended: set[int] = set()
    consumed: list[int] = []
    training, next_id = False, 0
    for _ in range(data.draw(st.integers(1, 60), label="events")):
        next_id = feed(state, next_id, clock.version, started)
        running = sorted(started.keys() - ended)
        stat = manager.get_stats()
        assert stat.running == len(running) <= concurrent
        assert stat.accepted + stat.running <= (eta + clock.version + 1) * batch

        choices: list[tuple] = [(how, i) for i in running for how in ("finish", "reject")]
        if training:
            choices.append(("new version", None))
        elif state.next_groups(batch):
            choices.append(("consume", None))
        assert choices, "a deadlock"
        event, task_id = data.draw(st.sampled_from(choices), label="event")
        if event == "consume":
            groups = state.take(batch)  # it checks the ages, too
            assert all(clock.version - started[group.task_id] <= eta for group in groups)
            consumed += [group.task_id for group in groups]
            training = True
        elif event == "new version":
            clock.version += 1
            training = False
        else:
            ended.add(task_id)
            state.finish(task_id, Group(task_id, started[task_id]) if event == "finish" else None)
    assert consumed == sorted(consumed), "groups are not consumed in order of start"


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2), st.integers(1, 3), st.integers(1, 7), st.data())
def test_dropping_never_ends_in_a_deadlock(eta, batch, concurrent, data):
    """Even if the trainer skips batches, old groups are dropped and fresh ones come."""
    clock = Version()
    state = make_state(StalenessManager(clock, concurrent, batch, eta), stale="drop")
    started: dict[int, int] = {}
    finished: set[int] = set()
    next_id = 0
    for _ in range(data.draw(st.integers(1, 60), label="events")):
        next_id = feed(state, next_id, clock.version, started)
        running = sorted(started.keys() - finished)
        taken = ["take"] if state.next_groups(batch) else []
        assert running or taken, "a deadlock"
        event = data.draw(st.sampled_from([*running, *taken, "skip"]), label="event")
        if event == "take":
            groups = state.take(batch)
            assert len(groups) in (0, batch)
            assert all(clock.version - group.version <= eta for group in groups)
            clock.version += bool(groups)
        elif event == "skip":
            clock.version += 1
        else:
            finished.add(event)
            state.finish(event, Group(event, started[event]))


@pytest.mark.parametrize(("stale", "age"), [("unbounded", 5), ("wait", 1)])
def test_the_gate_alone_bounds_nothing(stale, age):
    """eta = 1, B = 2, and group 0 ends only when the trainer needs it, or at version 5. In order
    of finish it trains at age 5; in order of start the first batch waits for it."""
    clock, ages, next_id = Version(), list[int](), 0
    state = make_state(StalenessManager(clock, 100, 2, 1), stale=stale)
    state.manager.check_age = state.manager.is_fresh = lambda version: True  # type: ignore[assignment]
    started: dict[int, int] = {}
    for version in range(6):
        clock.version, first = version, next_id
        next_id = feed(state, next_id, version, started)
        for i in range(max(1, first), next_id):
            state.finish(i, Group(i, version))
        if state.order.get(0, 0) is None and not (version < 5 and state.next_groups(2)):
            state.finish(0, Group(0, 0))
            state.order.move_to_end(0, last=False)
        ages += [version - started[group.task_id] for group in state.take(2)]
    assert max(ages) == age


def test_a_trainer_that_forgets_to_consume_is_caught():
    """Two versions without a batch, with eta = 1: `take` raises and consumes nothing."""
    clock = Version()
    state = make_state(StalenessManager(clock, 100, 2, 1))
    started: dict[int, int] = {}
    feed(state, 0, 0, started)
    for task_id in started:
        state.finish(task_id, Group(task_id, 0))
    clock.version = 2
    with pytest.raises(StalenessError, match="version 0 is consumed at version 2"):
        state.take(2)
    assert len(state.next_groups(4)) == 4
