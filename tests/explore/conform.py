"""Check that the events in the trace of a real run are possible in the dispatcher's state machine (dispatcher.py).

`conform` reads the files of a finished run and replays the run's events in the state machine. After each event,
`conform` checks the properties of the state machine. `conform` raises Broken if the state machine does not allow an
event of the run. `conform` raises Broken if an event has different consequences in the state machine and in the run.
The following examples show records of a trace and the events that the state machine executes for these records:

    For `start 0` and `start 1`, the machine executes `start` twice, so groups 0 and 1 run.
    For `finish 1` and `accept 1`, the machine executes `end 1`, so group 1 is finished.
    For `finish 0` and `accept 0`, the machine executes `end 0`, so group 0 is finished.
    For `consume 0` and `consume 1`, the machine executes `take`, whose batch has groups 0 and 1 in this order.
    For `start 2` at version 1, the machine executes `version` and then `start`, so group 2 runs.

The trace records a new version only after the gate has begun to use the version. Therefore `conform` does not learn
from the trace, but from the file schedule.jsonl, between which two events each version began. `conform` does not
support a run that was killed and then continued.
"""

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from run.schedule import FILE, Schedule

from .dispatcher import Bounds, DispatchMachine, Group
from .search import Broken, Event

EVENTS = ("start", "finish", "accept", "fail", "reject", "drop", "consume")
OUTCOMES = {
    "accept": "end",
    "fail": "fail",
    "reject": "reject",
}  # events of the trace -> events of the machine


def read_trace(run: Path) -> tuple[list[tuple[str, int]], dict[int, Group]]:
    """Return the events of a run's groups, and the oldest and the newest version of each group's tokens."""
    names = {"b": "start", "e": "finish"}
    records = [
        one for one in json.loads((run / "trace.json").read_bytes()) if one.get("cat") == "rollout"
    ]
    events = [(names.get(one["ph"], one["name"]), one["args"]["task"]) for one in records]
    groups = {
        one["args"]["task"]: Group(*one["args"]["versions"])
        for one in records
        if one["name"] == "reward"
    }
    return [event for event in events if event[0] in EVENTS], groups


def check_calls(schedule: Schedule, consumed_at: dict[int, int]) -> None:
    """Check the versions of each call's tokens. Versions never decrease within a call. All versions of a call lie
    between the version at which the call's group started and the version at which a step consumed the group."""
    for task, calls in schedule.calls.items():
        for name, call in calls.items():
            versions = [schedule.starts[task], *(version for version, *_ in call["spans"])]
            if versions != sorted(versions) or versions[-1] > consumed_at.get(task, versions[-1]):
                raise Broken(
                    "falls",
                    f"call {name} has the versions {versions}, group {task} is consumed in {consumed_at}",
                )


def conform(run: Path, trace: tuple[list[tuple[str, int]], dict[int, Group]] | None = None) -> int:
    """Replay a run's trace in the state machine, and return the number of events. If `trace` is given, replay `trace`
    instead of the run's own trace. Raises Broken."""
    config: Any = OmegaConf.load(run / "config.yaml")
    schedule, (real, groups) = Schedule(run / FILE).read(), trace or read_trace(run)
    consumed_at = {task: version for version, tasks in schedule.steps.items() for task in tasks}
    check_calls(schedule, consumed_at)
    rollout, many = config.rollout, 10**9
    eta, batch = rollout.max_head_offpolicyness, config.train_dataset.batch_size
    bounds = Bounds(eta, batch, rollout.max_concurrent_rollouts or (eta + 1) * batch, many, many)
    machine = DispatchMachine(rollout.stale, bounds)
    [world] = machine.initial()
    done: list[tuple[str, int]] = []  # events that the state machine's dispatcher reports
    world.state.trace = lambda event, task_id, **_: done.append((event, task_id))

    def step(event: Event) -> Any:
        if event not in machine.events(world):
            raise Broken("walk", f"{event} is not possible in this state: {world}")
        after = machine.apply(world, event)
        machine.check(after)
        return after

    position = 0
    while position < len(real):
        name, task = real[position]
        version = (
            schedule.starts if name == "start" else consumed_at if name == "consume" else {}
        ).get(task, 0)
        if version > world.version:
            world = step(("version",))
            continue
        done.clear()
        world.next_id = task
        if name == "start":
            world = step(("start",))
        elif name == "finish":
            world = step((OUTCOMES.get(real[position + 1][0], "end"), task))
            if task in groups and world.state.order.get(task):
                world.state.order[task] = groups[task]
        else:
            world = step(("take",))
        expected = [event for event in done if event[0] in EVENTS]
        found = real[position : position + len(expected)]
        if found != expected or not expected:
            raise Broken(
                "walk",
                f"the run has {found or real[position]}, and the machine has {expected} in {world}",
            )
        position += len(expected)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if [line["version"] for line in lines] != [*range(world.version + world.training)]:
        raise Broken("walk", f"metrics.jsonl has {len(lines)} steps, and the machine is in {world}")
    return len(real)
