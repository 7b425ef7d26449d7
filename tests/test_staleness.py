"""Two rules together bound the age of every group that a step trains on. The gate limits how many groups start. The
trainer consumes groups in the order in which they started.

In these tests a version is a plain number, and hypothesis draws the order of the events. No episode runs, and no test
waits.
"""

import threading
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.dispatcher import DispatchState
from rollout.runner import TimedResult
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
    version: int  # version of the group's oldest token


def make_manager(
    eta: int = 0, batch: int = 2, concurrent: int = 100, version: int = 0
) -> StalenessManager:
    return StalenessManager(Version(version), concurrent, batch, eta)


def run(manager: StalenessManager, count: int) -> None:
    """Enqueue and start `count` groups."""
    for _ in range(count):
        manager.on_rollout_enqueued()
        manager.on_rollout_submitted()


# ---- the gate's capacity and the life cycle of a group


@pytest.mark.parametrize(
    ("eta", "batch", "concurrent", "version", "accepted", "running", "capacity"),
    [
        (0, 4, 100, 0, 0, 0, 4),  # synchronous training admits one batch
        (0, 4, 100, 0, 3, 1, 0),
        (0, 4, 100, 1, 4, 0, 4),  # the four groups of version 0 still count as accepted
        (2, 4, 100, 0, 0, 0, 12),
        (2, 4, 100, 5, 20, 3, 9),
        (2, 4, 8, 5, 20, 3, 5),  # the concurrency limit is below the staleness limit
        (2, 4, 3, 5, 20, 3, 0),
        (0, 4, 100, 0, 4, 2, -2),
        (4, 4, 0, 0, 0, 0, 1),  # max_concurrent_rollouts=0 counts as 1
        (1, 0, 100, 0, 0, 0, 2),  # consumer_batch_size=0 counts as 1
        (
            10**12,
            4,
            64,
            0,
            10**6,
            0,
            64,
        ),  # in an evaluation, the capacity depends only on the concurrency limit
    ],
)
def test_capacity_is_the_smaller_of_two_limits(
    eta, batch, concurrent, version, accepted, running, capacity
):
    """Capacity = min(max_concurrent - running, (eta + v + 1) * B - (accepted + running))."""
    manager = make_manager(eta, batch, concurrent, version)
    manager._stat = RolloutStat(accepted=accepted, running=running)
    assert manager.get_capacity() == capacity


def test_a_rejected_rollout_gives_its_place_back():
    """If a running group is accepted, the gate's capacity stays unchanged. If a group is rejected, dropped or
    withdrawn, the capacity rises by one."""
    manager = make_manager(eta=0, batch=4)
    run(manager, 4)
    assert manager.get_capacity() == 0
    manager.on_rollout_accepted()
    assert manager.get_capacity() == 0
    manager.on_rollout_rejected()
    assert manager.get_capacity() == 1
    manager.on_rollout_rejected(failed=True)
    assert manager.get_capacity() == 2
    manager.on_rollout_accepted()
    manager.on_rollout_dropped()
    assert manager.get_capacity() == 3
    manager.on_rollout_withdrawn()
    assert manager.get_capacity() == 4
    assert manager.get_stats() == RolloutStat(rejected=2, failed=1, dropped=1, withdrawn=1)


def test_the_pending_limit_is_one_gate_full():
    """Between two batches the gate admits at most (eta + 1) * B groups."""
    assert make_manager(eta=2, batch=4).get_pending_limit() == 12


def test_an_impossible_event_is_an_error():
    """If an event is impossible, for example if a rollout is accepted before it runs, the manager raises an error. No
    counter becomes negative."""
    manager = make_manager()
    with pytest.raises(RuntimeError, match="became accepted, but none was running"):
        manager.on_rollout_accepted()
    with pytest.raises(RuntimeError, match="became running, but none was enqueued"):
        manager.on_rollout_submitted()
    with pytest.raises(RuntimeError, match="became dropped, but none was accepted"):
        manager.on_rollout_dropped()
    assert manager.get_stats() == RolloutStat()


EVENTS = ["enqueued", "submitted", "accepted", "rejected", "dropped", "withdrawn"]


@settings(deadline=None)
@given(st.lists(st.sampled_from(EVENTS), max_size=40))
def test_counters_are_never_negative_and_lose_nobody(events):
    """For any sequence of events, even an impossible one, no counter is negative, and the sum of all counters is the
    number of enqueued rollouts. If an event raises an error, for example a start while the gate is closed, the sum of
    the counters stays correct."""
    manager = make_manager()
    entered = 0
    for event in events:
        try:
            getattr(manager, f"on_rollout_{event}")()
            entered += event == "enqueued"
        except (RuntimeError, StalenessError):
            pass
        s = manager.get_stats()
        assert min(s.enqueued, s.running, s.accepted, s.rejected, s.dropped, s.withdrawn) >= 0
        assert s.enqueued + s.running + s.accepted + s.rejected + s.dropped + s.withdrawn == entered


def test_stats_are_a_copy():
    """A change to the result of get_stats does not change the manager."""
    manager = make_manager()
    manager.get_stats().running = 7
    assert manager.get_stats().running == 0


def test_counters_survive_many_threads():
    """If four threads each report two thousand rollouts at the same time, the manager counts all eight thousand."""
    manager = make_manager(batch=8000)

    def live() -> None:
        for _ in range(2000):
            run(manager, 1)
            manager.on_rollout_accepted()

    threads = [threading.Thread(target=live) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert manager.get_stats() == RolloutStat(accepted=8000)


def test_recovery_restores_what_was_consumed():
    """After a restart at version 10 the gate admits (eta + 1) * B groups, and not (eta + 11) * B. (AReaL's issue #1388
    describes the error that too many groups are admitted after a restart.)"""
    manager = make_manager(eta=2, batch=4, version=10)
    assert (
        manager.get_capacity() == 52
    )  # the capacity is too large until on_version_recovered is called
    manager.on_version_recovered(10)
    assert manager.get_capacity() == 12
    manager.on_version_recovered(10, finished_untrained=3)
    assert manager.get_capacity() == 9
    run(manager, 2)
    assert manager.get_capacity() == 7


def test_recovery_counts_what_runs():
    """If groups are running when a run recovers its version, each of these groups reduces the gate's capacity by
    one."""
    manager = make_manager(eta=1, batch=4, version=3)
    run(manager, 5)
    manager.on_version_recovered(3)
    assert manager.get_capacity() == 8 - 5


def test_the_age_check():
    """A group of age eta is allowed. A group of age eta + 1 raises an error that suggests rollout.stale."""
    manager = make_manager(eta=2, version=7)
    assert manager.is_fresh(5)
    assert not manager.is_fresh(4)
    assert manager.is_fresh(None)
    manager.check_age(5)
    with pytest.raises(
        StalenessError, match=r"version 4 is consumed at version 7.*rollout.stale=mask"
    ):
        manager.check_age(4)


def test_a_group_newer_than_the_policy_is_an_error():
    """A group of a version that the trainer has not made yet raises StalenessError, even with stale=drop."""
    manager = make_manager(eta=2, version=7)
    with pytest.raises(StalenessError, match="its age is -992"):
        manager.check_age(999)
    with pytest.raises(StalenessError, match="newer than the policy"):
        manager.is_fresh(8)


def test_a_negative_bound_is_refused():
    """A negative eta raises an error, because the gate would never admit a group."""
    with pytest.raises(ValueError, match="max_staleness"):
        make_manager(eta=-1)


# ---- the bound


def make_state(manager: StalenessManager, **kwargs) -> DispatchState[Prompt, Group]:
    return DispatchState(manager, lambda group: group.version, max_queue_size=10**6, **kwargs)


def feed(state: DispatchState, next_id: int, version: int, started: dict[int, int]) -> int:
    """Enqueue and start as many groups as the gate admits. Return the id of the next group."""
    while state.may_start() > 0:
        state.enqueue(Prompt(next_id))
        next_id += 1
        for task in state.start():
            started[task.task_id] = version
    return next_id


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 9), st.data())
def test_age_is_bounded_whatever_happens(eta, batch, concurrent, data):
    """For every order in which groups finish or are rejected, no age exceeds eta and training never hangs."""
    clock = Version()
    manager = StalenessManager(clock, concurrent, batch, eta)
    state = make_state(manager)
    started: dict[int, int] = {}  # task id -> version at the start
    running: set[int] = set()
    consumed: list[int] = []
    training = False
    next_id = 0
    for _ in range(data.draw(st.integers(1, 60), label="events")):
        before = set(started)
        next_id = feed(state, next_id, clock.version, started)
        running |= set(started) - before
        stat = manager.get_stats()
        assert stat.running == len(running) <= concurrent
        assert stat.accepted + stat.running <= (eta + clock.version + 1) * batch

        choices: list[tuple] = [("finish", i) for i in sorted(running)] + [
            ("reject", i) for i in sorted(running)
        ]
        if training:
            choices.append(("new version", None))
        elif state.next_groups(batch):
            choices.append(("consume", None))
        assert choices, f"a deadlock: {state}"
        event, task_id = data.draw(st.sampled_from(choices), label="event")
        if event == "consume":
            groups = state.take(batch)  # `take` raises StalenessError if a group is too old
            assert all(clock.version - started[group.task_id] <= eta for group in groups)
            consumed += [group.task_id for group in groups]
            training = True
        elif event == "new version":
            clock.version += 1
            training = False
        else:
            running.remove(task_id)
            group = Group(task_id, started[task_id]) if event == "finish" else None
            state.finish(TimedResult(task_id, 0, group))
    assert consumed == sorted(consumed), "groups are not consumed in order of start"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2), st.integers(1, 3), st.integers(1, 7), st.data())
def test_dropping_never_ends_in_a_deadlock(eta, batch, concurrent, data):
    """If the trainer skips batches, groups that are too old are dropped, fresh groups are consumed, and training
    never hangs."""
    clock = Version()
    state = make_state(StalenessManager(clock, concurrent, batch, eta), stale="drop")
    started: dict[int, int] = {}  # task id -> version at the start
    finished: set[int] = set()
    next_id = 0
    for _ in range(data.draw(st.integers(1, 60), label="events")):
        next_id = feed(state, next_id, clock.version, started)
        running = sorted(started.keys() - finished)
        assert running or state.next_groups(batch), f"a deadlock: {state}"
        taken = ["take"] if state.next_groups(batch) else []
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
            state.finish(TimedResult(event, 0, Group(event, started[event])))


def largest_age(eta: int, batch: int, late: int, in_order_of_start: bool) -> int:
    """Simulate training in which group 0 is much slower than all other groups, and return the largest age of a group.

    Every group except group 0 ends as soon as it has started. If groups are consumed in order of start, the first batch
    waits for group 0. If groups are consumed in order of finish, no batch waits for group 0, which ends at version
    `late`. The gate is a real StalenessManager.
    """
    clock = Version()
    manager = StalenessManager(clock, 100, batch, eta)
    started: list[int] = []  # started[i] is the version at which group i started
    finished: list[int] = []  # indices of the groups that are ready to be consumed
    ages: list[int] = []
    while clock.version <= late:
        for number in range(len(started), len(started) + manager.get_capacity()):
            run(manager, 1)
            started.append(clock.version)
            if number > 0:
                manager.on_rollout_accepted()
                finished.append(number)
        if clock.version == (0 if in_order_of_start else late):
            manager.on_rollout_accepted()
            finished.insert(0, 0)
        consumed, finished = finished[:batch], finished[batch:]
        ages += [clock.version - started[number] for number in consumed]
        clock.version += 1
    return max(ages)


def test_order_of_completion_breaks_the_bound():
    """If groups are consumed in order of finish (eta = 1, B = 2), training uses a slow group at age 5, which exceeds
    eta."""
    assert largest_age(eta=1, batch=2, late=5, in_order_of_start=False) == 5


def test_order_of_start_keeps_the_bound():
    """If groups are consumed in order of start, the first batch waits for the slow group, and no age exceeds eta."""
    assert largest_age(eta=1, batch=2, late=5, in_order_of_start=True) == 1


def test_rejections_are_not_remembered_for_ever(monkeypatch):
    """The dispatcher keeps the ids of only the newest rejected tasks, so its memory stays bounded in a long run."""
    monkeypatch.setattr("rollout.dispatcher.REMEMBERED", 10_000)
    state = make_state(make_manager(eta=0, batch=100))
    for task_id in range(10_009):
        state.enqueue(Prompt(task_id))
        state.start()
        state.finish(TimedResult(task_id, 0, None))
    assert [*state.rejected] == [*range(9, 10_009)]
    assert state.take_task(10_008) == [None]


def test_a_trainer_that_forgets_to_consume_is_caught():
    """If the version rises twice and no batch is consumed (eta = 1), `take` raises StalenessError."""
    clock = Version()
    manager = StalenessManager(clock, 100, 2, 1)
    state = make_state(manager)
    started: dict[int, int] = {}
    feed(state, 0, 0, started)
    for task_id in started:
        state.finish(TimedResult(task_id, 0, Group(task_id, 0)))
    clock.version = 2  # the version rises twice, and no batch is consumed
    with pytest.raises(StalenessError, match="version 0 is consumed at version 2"):
        state.take(2)
    assert len(state.next_groups(4)) == 4, "the failed check consumed a group"


def test_what_was_dropped_is_replaced():
    """With stale=drop, a group that is too old is dropped and counted, and its place becomes free."""
    clock = Version()
    manager = StalenessManager(clock, 100, 2, 0)
    state = make_state(manager, stale="drop")
    started: dict[int, int] = {}
    feed(state, 0, 0, started)
    for task_id in list(started):
        state.finish(TimedResult(task_id, 0, Group(task_id, 0)))
    clock.version = 1
    assert manager.get_capacity() == 2
    assert state.take(2) == []
    assert manager.get_stats() == RolloutStat(dropped=2)
    assert manager.get_capacity() == 4
