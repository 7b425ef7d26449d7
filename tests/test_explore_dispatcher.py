"""tests/explore runs the shipped dispatcher through every order of events in a small system.

It finds no broken property, but it finds every error that is planted into these modules.
"""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from explore import dispatcher
from explore.conform import Record, check_versions, conform, read_events
from explore.dispatcher import MODES, Bounds, DispatchMachine
from explore.planted import find_error, mutant
from explore.search import Broken, explore, walk
from runs import run

import rollout.dispatcher as DISPATCHER
import rollout.executor as EXECUTOR
import staleness as STALENESS


def dropped(graph: Any) -> int:
    return max(world.state.gate.get_stats().dropped for world in graph)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bounds", dispatcher.SMALL, ids=str)
def test_every_order_of_events_keeps_every_property(mode: str, bounds: Bounds) -> None:
    """The search also reaches the last version, kills, dropped groups and refused batches, where
    the bounds and the mode permit them."""
    states = explore(DispatchMachine(mode, bounds)).states
    assert any(world.version == bounds.versions for world in states)
    assert len(states) > 30
    old = bounds.slips if mode == "mask" else mode == "drop" and (bounds.slips or bounds.eta > 0)
    assert bool(dropped(states)) == (bool(old) and not bounds.kills)
    assert any(world.refused for world in states) == (mode == "wait" and bounds.slips > 0)
    assert max(world.kills for world in states) == bounds.kills


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bounds", dispatcher.FAR, ids=str)
def test_random_walks_far_beyond_the_bounds_keep_every_property(mode: str, bounds: Bounds) -> None:
    """The walks have many groups and versions. If few groups are rejected, many become old."""
    states = walk(DispatchMachine(mode, bounds), 0, 1000)
    assert len(states) > 50
    if bounds.rejections < 10**6:
        assert dropped(states) > 3 or mode != "drop"
        assert max(world.masked for world in states) > 3 or mode != "mask"


CHECK = "            self.gate.check_age(self.head_version(data))\n"
LOOP = f"{CHECK}        for task_id in batch:\n"
POPS = "            self.order.popitem(last=False)\n"
REJECTED = "self.gate.on_rollout_rejected(failed=error is not None)"
MUTANTS = [  # property, mode, module, code, changed code
    ("gate", "wait", STALENESS, "(self.max_staleness + version + 1) *", "(version + 9) *"),
    ("gate", "mask", STALENESS, "(stat.accepted + stat.running)", "stat.accepted"),
    ("age", "drop", STALENESS, "age <= self.max_staleness", "age <= self.max_staleness + 1"),
    ("age", "mask", STALENESS, "_version() - self.max_staleness\n", "_version() - 9\n"),
    ("counters", "wait", DISPATCHER, REJECTED, "pass"),
    ("counters", "drop", DISPATCHER, "self.gate.on_rollout_dropped()", "pass"),
    ("counters", "wait", DISPATCHER, "self.gate.on_rollout_withdrawn()", "pass"),
    ("starvation", "wait", DISPATCHER, "waits or ", ""),
    ("starvation", "drop", DISPATCHER, "move_to_end(task_id)", "move_to_end(task_id, last=False)"),
    ("lost", "mask", DISPATCHER, "if data is None]\n", "if data != self.order[i]]\n"),
    ("lost", "mask", STALENESS, "_version() - self.max_staleness\n", "_version()\n"),
    ("kept", "wait", DISPATCHER, f"{LOOP}            del self.order[task_id]\n", f"{POPS}{LOOP}"),
    ("kept", "wait", DISPATCHER, CHECK, f"            self.order.move_to_end(max(batch))\n{CHECK}"),
    ("restart", "wait", STALENESS, "accepted = version *", "accepted = (version + 9) *"),
    ("restart", "drop", EXECUTOR, "self.gate.on_version_recovered(version)", "pass"),
    ("data", "wait", EXECUTOR, " - self.dispatcher.in_flight()", ""),
    ("data", "mask", EXECUTOR, "sorted(closed | self._closed)", "sorted(closed)"),
    ("data", "drop", EXECUTOR, "if task_id not in self._closed", "if True"),
    ("deadlock", "wait", STALENESS, "(self.max_staleness + version + 1) *", "(1 + version * 0) *"),
    ("deadlock", "mask", STALENESS, "rollouts - stat.running", "rollouts - stat.accepted"),
]


@pytest.mark.parametrize(("name", "mode", "module", "line", "changed"), MUTANTS)
def test_a_planted_error_is_found_by_name(
    name: str, mode: str, module: ModuleType, line: str, changed: str
) -> None:
    """The search names the broken property, and lists the events that break it."""
    wrong = {"dispatcher": DISPATCHER, "staleness": STALENESS, "executor": EXECUTOR}
    wrong[module.__name__.rpartition(".")[2]] = mutant(module, line, changed)
    kills, slips = 2 * (name in ("restart", "data")), 2 * (name == "kept")
    eta, concurrent = 1 + (name == "data"), 9 if name == "restart" else 2
    rejections, withdrawals = int(not kills and not slips), int("withdrawn" in line)
    bounds = Bounds(eta, 1, concurrent, 4, rejections, kills, withdrawals, slips)
    story = find_error(DispatchMachine(mode, bounds, **wrong), name)
    assert "1. start" in story
    assert "in  version 0" in story


# ---- the events of real runs


@pytest.mark.runs
@pytest.mark.parametrize(("mode", "batch"), [("wait", 3), ("drop", 1), ("mask", 1)])
def test_a_real_run_is_a_walk_of_the_machine(tmp_path: Path, mode: str, batch: int) -> None:
    """The machine can repeat the events of a real run. If the events are changed, the machine
    refuses them: groups consumed in the opposite order, a start before the gate opens, a group
    consumed twice, and a lost event."""
    words = ["--config", "configs/maze.yaml", f"rollout.stale={mode}", "gconfig.n_samples=2"]
    words += [f"train_dataset.batch_size={batch}", "rollout.max_head_offpolicyness=1"]
    words += ["gconfig.max_new_tokens=100", "actor.ppo_n_minibatches=1", "max_steps=8"]
    words += ["should_accept_fn=walkers.has_signal", "callbacks=[walkers.Events]"]
    words += ["rollout.max_concurrent_rollouts=null"]
    run(tmp_path, *words)
    events = read_events(tmp_path / "e" / "t" / "events.jsonl")
    bounds = Bounds(1, batch, 2 * batch, 10**9, 10**9)
    assert conform(events, mode, bounds) > 8 * batch * 4
    consumed = [k for k, (event, *_) in enumerate(events) if event == "consume"]
    starts = [k for k, (event, *_) in enumerate(events) if event == "start"]
    accepted = [record[:2] for record in events].index(("accept", events[consumed[0]][1]))
    swapped, early = [*events], [*events]
    swapped[consumed[0]], swapped[consumed[-1]] = events[consumed[-1]], events[consumed[0]]
    early.insert(starts[1], early.pop(starts[-1]))
    twice = [*events[: consumed[-1]], events[consumed[0]], *events[consumed[-1] :]]
    lost = events[:accepted] + events[accepted + 1 :]
    for records in (swapped, early, twice, lost):
        with pytest.raises(Broken):
            conform(records, mode, bounds)


WRONG = [(0, [2, 1], 3), (2, [1, 2], 3), (2, [2, 4], 3)]


@pytest.mark.parametrize(("start", "versions", "consumed"), WRONG)
def test_a_version_outside_of_its_group_is_found(start: int, versions: list, consumed: int) -> None:
    """Tokens have versions from the start of their group to its step."""

    def records(start: int, versions: list, consumed: int) -> list[Record]:
        reward = ("reward", 7, 0, {"versions": versions})
        return [("start", 7, start, {}), reward, ("consume", 7, consumed, {})]

    with pytest.raises(Broken, match="group 7 has the versions"):
        check_versions(records(start, versions, consumed))
    check_versions(records(1, [1, 3], 3))
