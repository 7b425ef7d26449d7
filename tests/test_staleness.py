"""The gate and the order of start together bound the age of every group that a step trains on.

Here a test sets the policy version itself, without a trainer. tests/explore checks the same bound
in every order of events of a small system.
"""

from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.dispatcher import DispatchState
from staleness import RolloutStat, StalenessError, StalenessManager


@dataclass
class Version:
    version: int = 0

    def get_version(self) -> int:
        return self.version


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
    """A dropped or withdrawn group gives its place back, too. An accepted group keeps its place."""
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


@given(st.lists(st.sampled_from(EVENTS), max_size=40))
def test_counters_are_never_negative_and_lose_nobody(events):
    """After any series of events, possible or not, no counter is negative, and every group that was
    enqueued is counted in exactly one state."""
    manager, entered = make_manager(), 0
    for event in events:
        with suppress(RuntimeError):
            getattr(manager, f"on_rollout_{event}")()
            entered += event == "enqueued"
        s = manager.get_stats()
        counts = s.enqueued, s.running, s.accepted, s.rejected, s.dropped, s.withdrawn
        assert min(counts) >= 0
        assert sum(counts) == entered


def test_an_impossible_event_says_what_is_wrong():
    """A group cannot be accepted before it runs."""
    with pytest.raises(RuntimeError, match="became accepted, but none was running"):
        make_manager().on_rollout_accepted()


def test_recovery_restores_what_was_consumed():
    """After a restart at version 10 the gate admits (eta + 1) B groups, and not (eta + 11) B (AReaL
    #1388)."""
    manager = make_manager(eta=2, batch=4, version=10)
    assert manager.get_capacity() == 52
    manager.on_version_recovered(10)
    assert manager.get_capacity() == 12
    run(manager, 2)
    assert manager.get_capacity() == 10


def test_the_age_check():
    """A group of age eta may be consumed, and a group of age eta + 1 may not. A version that the
    trainer has not made is an error."""
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


@pytest.mark.parametrize(("stale", "age"), [("unbounded", 5), ("wait", 1)])
def test_the_gate_alone_bounds_nothing(stale, age):
    """Here eta = 1 and B = 2, and the age check is off. Group 0 ends when no batch can be made
    without it, at the latest at version 5. If steps take the groups that finished first, group 0 is
    trained at age 5. If they take the groups that started first, the first batch waits for group
    0."""
    clock, ages, started = Version(), list[int](), dict[int, int]()
    state = DispatchState(StalenessManager(clock, 100, 2, 1), lambda task: started[task], stale)
    state.gate.check_age = state.gate.is_fresh = lambda version: True  # type: ignore[assignment]
    for clock.version in range(6):
        for task_id in range(len(started), len(started) + state.may_start()):
            state.enqueue(SimpleNamespace(task_id=task_id))
            started |= {task.task_id: clock.version for task in state.start()}
            if task_id > 0:
                state.finish(task_id, task_id)
        if state.order.get(0, 1) is None and not (clock.version < 5 and state.next_groups(2)):
            state.finish(0, 0)
            state.order.move_to_end(0, last=False)
        ages += [clock.version - started[task_id] for task_id in state.take(2)]
    assert max(ages) == age
