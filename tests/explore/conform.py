"""Check that the events of a real run are possible in the dispatcher's state machine.

`conform` repeats the events that walkers.Events wrote, each with the version at which it happened,
and checks every property after each. For example

    `start 0`, `start 1`              the machine starts twice
    `finish 1`, `accept 1`            `end 1`: group 1 is finished
    `consume 0`, `consume 1`          `take`, whose batch is groups 0 and 1, in this order
    `start 2` at version 1            `version`, then `start`

It raises Broken if the machine does not allow an event, or answers it with other events.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .dispatcher import Bounds, DispatchMachine, Group
from .search import Broken, Event

EVENTS = ("start", "finish", "accept", "fail", "reject", "drop", "consume")
OUTCOMES = {"accept": "end", "fail": "fail", "reject": "reject"}
Record = tuple[str, int, int, dict[str, Any]]  # event, task, version, details


def read_events(path: Path) -> list[Record]:
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()]


def check_versions(records: Sequence[Record]) -> None:
    """A group's tokens have versions from its start to the step that consumes it."""
    starts = {task: version for event, task, version, _ in records if event == "start"}
    steps = {task: version for event, task, version, _ in records if event == "consume"}
    for event, task, _, details in records:
        if event == "reward":
            versions = [starts[task], *details["versions"]]
            versions.append(steps.get(task, versions[-1]))
            if versions != sorted(versions):
                raise Broken("falls", f"group {task} has the versions {versions}")


def conform(records: Sequence[Record], mode: str, bounds: Bounds) -> int:
    """Repeat a run's events, and return their number."""
    check_versions(records)
    groups = {
        task: Group(*details["versions"])
        for event, task, _, details in records
        if event == "reward"
    }
    real = [(event, task) for event, task, *_ in records if event in EVENTS]
    versions = [version for event, _, version, _ in records if event in EVENTS]
    machine = DispatchMachine(mode, bounds)
    [world] = machine.initial()
    done: list[tuple[str, int]] = []  # what the machine's dispatcher reports
    world.state.trace = lambda event, task_id: done.append((event, task_id))

    def step(world: Any, event: Event) -> Any:
        if event not in machine.events(world):
            raise Broken("walk", f"{event} is not possible in {world}")
        after = machine.apply(world, event)
        machine.check(after)
        return after

    position = 0
    while position < len(real):
        name, task = real[position]
        if versions[position] > world.version and name in ("start", "consume"):
            world = step(world, ("version",))
            continue
        done.clear()
        if name == "start":
            world = step(world, ("start",))
        elif name == "finish":
            following = real[position + 1 :] or [("", 0)]
            world = step(world, (OUTCOMES.get(following[0][0], "end"), task))
            if task in groups and world.state.order.get(task):
                world.state.order[task] = groups[task]
        else:
            world = step(world, ("take",))
        expected = [event for event in done if event[0] in EVENTS]
        found = real[position : position + len(expected)]
        if found != expected or not expected:
            raise Broken("walk", f"the run has {found or real[position]}, the machine {expected}")
        position += len(expected)
    return len(real)
