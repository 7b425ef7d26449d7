"""Explore every order of events of a small system, and check each state that the system can reach.

    python -m tests.explore           explore the dispatcher at large bounds; print the states and the seconds
    python -m tests.explore --show    draw every state of the smallest case as text

A **machine** describes a system: its initial states, the events that are possible in a state, and the properties that
every state must have. `explore` visits all states, breadth first. Two states with the same key count as one state. So
if two orders of events lead to the same situation, the search continues from there only once. If a property is broken,
the error shows the shortest series of events that breaks the property. After the search, `explore` checks that a goal
can be reached from every state. If no goal can be reached from a state, the state is a deadlock or part of a loop
without a way out.

**DispatchMachine** explores the real classes DispatchState (rollout/dispatcher.py) and StalenessManager (staleness.py),
not a model of them. Groups start, end, fail and are rejected in every order. The trainer consumes batches and makes new
versions, with or without a checkpoint, and the process may be killed. A group has tokens of every version between its
start and its end. The properties:

    age          no trained token is older than eta
    counters     submitted = enqueued + running + accepted + rejected + dropped, and each counter is right
    starvation   no group waits longer than eta versions: mode wait: after its start; modes mask, drop: after its end
    lost         modes wait and mask drop no group
    deadlock     from every state the trainer can reach the last version

The search proves the properties only for the given bounds, for example two versions of lag, two groups in a batch, one
rejected group and one kill.
"""

import copy
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeVar

import rollout.dispatcher
import staleness
from rollout.runner import TimedResult

S = TypeVar("S")
Event = tuple[Any, ...]  # the name of an event and its arguments


# ---------------------------------------------------------------- the search


class Machine(Protocol[S]):
    """A system whose states `explore` visits."""

    def initial(self) -> Iterable[S]: ...

    def events(self, state: S) -> Iterable[Event]:
        """Return the events that are possible in this state."""
        ...

    def apply(self, state: S, event: Event) -> S:
        """Return the state after an event, and leave `state` as it is. May raise Broken."""
        ...

    def key(self, state: S) -> Hashable:
        """Return what distinguishes this state from others."""
        ...

    def check(self, state: S) -> None:
        """Raise Broken if the state lacks a property."""
        ...

    def is_goal(self, state: S) -> bool:
        """Return whether this state is a goal. From every state the system must be able to reach a goal."""
        ...


class Broken(AssertionError):
    """A property does not hold. `name` is the property."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.name, self.why = name, why


class Graph(NamedTuple):
    """All states that were reached, and the transitions between them."""

    states: dict[Hashable, Any]  # the first state found with each key, in the order of the search
    edges: dict[Hashable, list[tuple[Event, Hashable]]]  # the events of each state and the keys that they lead to
    came_by: dict[Hashable, tuple[Hashable, Event] | None]  # the shortest way to each state; None: initial
    seconds: float


def explore(machine: Machine[S]) -> Graph:
    """Visit all states of a machine. If a property does not hold, raise Broken with the shortest series of events that
    breaks it."""
    began, graph = time.monotonic(), Graph({}, {}, {}, 0.0)
    queue: deque[Hashable] = deque()

    def visit(state: S, way: tuple[Hashable, Event] | None) -> Hashable:
        key = machine.key(state)
        if key not in graph.states:
            graph.states[key], graph.came_by[key] = state, way
            machine.check(state)
            queue.append(key)
        return key

    here: Hashable = None
    event: Event = ()
    try:
        for first in machine.initial():
            visit(first, None)
        while queue:
            here = queue.popleft()
            state, graph.edges[here] = graph.states[here], []
            for event in machine.events(state):
                graph.edges[here].append((event, visit(machine.apply(state, event), (here, event))))
    except Broken as broken:
        raise Broken(broken.name, f"{broken.why}\n{story(graph, (here, event))}") from broken
    if lost := stuck(machine, graph):
        ends = [key for key in lost if all(after == key for _, after in graph.edges[key])]
        key = (ends or lost)[0]  # a state where nothing more happens explains a deadlock best
        why = f"no goal can be reached from here: {graph.states[key]}"
        raise Broken("deadlock", f"{why}\n{story(graph, graph.came_by[key])}")
    return graph._replace(seconds=time.monotonic() - began)


def stuck(machine: Machine[S], graph: Graph) -> list[Hashable]:
    """Return the states from which no goal can be reached, in the order of the search."""
    before: dict[Hashable, list[Hashable]] = {}
    for key, edges in graph.edges.items():
        for _, after in edges:
            before.setdefault(after, []).append(key)
    alive = {key for key, state in graph.states.items() if machine.is_goal(state)}
    queue = [*alive]
    while queue:
        for key in before.get(queue.pop(), []):
            if key not in alive:
                alive.add(key)
                queue.append(key)
    return [key for key in graph.states if key not in alive]


def story(graph: Graph, way: tuple[Hashable, Event] | None) -> str:
    """Return the events that lead to a state, one on each line, with the state before each event."""
    events: list[str] = []
    while way is not None:
        before, event = way
        events.append(f"{' '.join(map(str, event)):<20} in  {graph.states.get(before, 'the beginning')}")
        way = graph.came_by.get(before)
    return "\n".join(f"{number:>4}. {line}" for number, line in enumerate(reversed(events), start=1))


def show(graph: Graph) -> str:
    """Return all states and transitions as text."""
    number = {key: i for i, key in enumerate(graph.states)}
    lines = []
    for key, state in graph.states.items():
        lines.append(f"{number[key]:>3}  {state}")
        lines += [f"       {' '.join(map(str, event))} -> {number[after]}" for event, after in graph.edges[key]]
    return "\n".join(lines)


# ---------------------------------------------------------------- the dispatcher


@dataclass(frozen=True)
class Prompt:
    task_id: int


@dataclass(frozen=True)
class Group:
    """A finished group, whose trained tokens have the versions `oldest` to `newest`."""

    oldest: int
    newest: int


def without_older(group: Group, oldest: int) -> Group | None:
    """Return the group without the tokens older than version `oldest`, or None if no token is left."""
    return replace(group, oldest=max(group.oldest, oldest)) if group.newest >= oldest else None


@dataclass
class World:
    """A state of the whole system: the real dispatcher, and what the trainer, the episodes and the files remember."""

    state: Any  # DispatchState
    version: int = 0
    training: bool = False  # whether the trainer has consumed a batch but not yet made the next version
    next_id: int = 0
    started: dict[int, int] = field(default_factory=dict)  # task id -> version at the start
    submitted: int = 0  # number of groups that the counters must add up to
    rejections: int = 0
    kills: int = 0
    saved: tuple[int, frozenset[int]] = (0, frozenset())  # the checkpoint: its version, and the ids of the open tasks
    files: dict[int, Group] = field(default_factory=dict)  # the files of finished groups

    def get_version(self) -> int:
        return self.version

    def __str__(self) -> str:
        groups = [
            f"{self.started[i]}.." if data is None else f"{data.oldest}..{data.newest}"
            for i, data in self.state.order.items()
        ]
        trains = ", trains" if self.training else ""
        killed = f", killed {self.kills} times" if self.kills else ""
        rejected = f", {self.rejections} rejected" if self.rejections else ""
        return f"version {self.version}{trains}; groups [{' '.join(groups)}]{rejected}{killed}"


class Bounds(NamedTuple):
    """How far the search goes."""

    eta: int = 1
    batch: int = 1  # groups in a batch (B)
    concurrent: int = 2  # maximum number of running groups
    versions: int = 2  # the trainer stops at this version
    rejections: int = 1  # rejected and failed groups
    kills: int = 0


@dataclass
class DispatchMachine:
    """DispatchState and StalenessManager, with a trainer, episodes, checkpoints and kills around them."""

    mode: str  # rollout.stale
    bounds: Bounds
    dispatcher: ModuleType = rollout.dispatcher  # the module to explore; a test passes a mutant
    staleness: ModuleType = staleness

    def initial(self) -> Iterable[World]:
        world = World(None)
        self.build(world)
        return [world]

    def build(self, world: World) -> None:
        """Give the world a new dispatcher and staleness manager, as a process makes them when it starts."""
        b = self.bounds
        manager = self.staleness.StalenessManager(world, b.concurrent, b.batch, b.eta)
        oldest: Callable[[Group], int] = lambda group: group.oldest  # noqa: E731
        world.state = self.dispatcher.DispatchState(manager, oldest, 10**6, self.mode, without_older, 10**6)
        world.started = {}

    def events(self, world: World) -> Iterator[Event]:
        state, b = world.state, self.bounds
        if world.version == b.versions:
            return
        if state.may_start() > 0:
            yield ("start",)
        for task_id, data in state.order.items():
            if data is None:
                yield "end", task_id
                if world.rejections < b.rejections:
                    yield "reject", task_id
                    yield "fail", task_id
        if world.training:
            yield ("version",)
            if b.kills:
                yield ("version, checkpoint",)
        else:
            yield ("take",)
        if world.kills < b.kills:
            yield ("kill",)

    def apply(self, world: World, event: Event) -> World:
        world = self.copy(world)
        name, *args = event
        try:
            {"start": self.start, "take": self.take, "kill": self.kill}.get(name, self.other)(world, name, *args)
        except self.staleness.StalenessError as error:
            raise Broken("age", str(error)) from error
        except RuntimeError as error:
            raise Broken("counters", str(error)) from error
        return world

    def start(self, world: World, name: str) -> None:
        world.state.enqueue(Prompt(world.next_id))
        world.submitted += 1
        world.next_id += 1
        for task in world.state.start():
            world.started[task.task_id] = world.version

    def other(self, world: World, name: str, task_id: int = -1) -> None:
        if name.startswith("version"):
            world.version, world.training = world.version + 1, False
            if name.endswith("checkpoint"):
                world.saved = world.version, frozenset(world.state.in_flight())
            return
        if name == "end":
            world.files[task_id] = Group(world.started[task_id], world.version)
            world.state.finish(TimedResult(task_id, 0, world.files[task_id]))
            return
        world.rejections += 1
        world.state.finish(TimedResult(task_id, 0, None, ValueError("a bug") if name == "fail" else None))

    def take(self, world: World, name: str) -> None:
        groups = world.state.take(self.bounds.batch)
        world.training = bool(groups)
        if len(groups) not in (0, self.bounds.batch):
            raise Broken("counters", f"a batch of {len(groups)} groups")
        for group in groups:
            if world.version - group.oldest > self.bounds.eta:
                raise Broken("age", f"a token of version {group.oldest} is trained at version {world.version}")

    def kill(self, world: World, name: str) -> None:
        """End the process, and continue from the checkpoint as WorkflowExecutor.load_state_dict does."""
        b, (version, open_tasks) = self.bounds, world.saved
        kept: dict[int, Group] = {}
        for task_id in sorted(open_tasks & world.files.keys()):
            group = world.files[task_id]
            head = group.newest if self.mode == "mask" else group.oldest
            if group.newest <= version and version + len(kept) // b.batch - head <= b.eta:
                kept[task_id] = group
        world.version, world.training, world.kills, world.files = version, False, world.kills + 1, dict(kept)
        self.build(world)
        world.state.manager.on_version_recovered(version, len(kept))
        world.state.order.update(kept)
        world.submitted, world.started = version * b.batch + len(kept), {i: kept[i].oldest for i in kept}
        world.rejections = 0 if b.kills else world.rejections

    def copy(self, world: World) -> World:
        """Return a copy of a world, with copies of its dispatcher and its staleness manager."""
        new = replace(world, started=dict(world.started), files=dict(world.files))
        new.state = copy.copy(world.state)
        for name in ("pending", "order", "rejected"):
            setattr(new.state, name, copy.copy(getattr(world.state, name)))
        new.state.manager = copy.copy(world.state.manager)
        new.state.manager.version_provider = new
        new.state.manager._stat = world.state.manager.get_stats()
        return new

    def key(self, world: World) -> Hashable:
        saved_version, open_tasks = world.saved
        groups = [
            (data or world.started[task_id], task_id in open_tasks) for task_id, data in world.state.order.items()
        ]
        stat = world.state.manager.get_stats()
        counters = (stat.enqueued, stat.running, stat.accepted, stat.rejected, stat.dropped, world.submitted)
        used = sorted((i, group) for i, group in world.files.items() if i in open_tasks) if self.bounds.kills else ()
        files = tuple((group.oldest, group.newest) for _, group in used)
        spent = (world.rejections, world.kills, saved_version, files, len(open_tasks))
        return world.version, world.training, tuple(groups), counters, spent

    def check(self, world: World) -> None:
        stat, b = world.state.manager.get_stats(), self.bounds
        order = world.state.order
        finished = [data for data in order.values() if data is not None]
        known = stat.enqueued + stat.running + stat.accepted + stat.rejected + stat.dropped
        consumed = (world.version + world.training) * b.batch
        if known != world.submitted:
            raise Broken("counters", f"{world.submitted} groups were submitted: {stat}")
        if (stat.running, stat.accepted) != (len(order) - len(finished), consumed + len(finished)):
            raise Broken("counters", f"{len(order)} groups, {len(finished)} of them finished: {stat}")
        if stat.dropped and self.mode != "drop":
            raise Broken("lost", f"{stat.dropped} groups were dropped")
        for task_id, data in order.items():
            since = world.started[task_id] if self.mode == "wait" else data.newest if data else world.version
            if world.version - since > b.eta:
                raise Broken("starvation", f"a group waits since version {since} at version {world.version}")

    def is_goal(self, world: World) -> bool:
        return world.version == self.bounds.versions


MODES = ("wait", "mask", "drop")
SMALLEST = Bounds(eta=0, batch=1, concurrent=1, versions=1, rejections=1)
LARGE = (
    Bounds(eta=1, batch=2, concurrent=3, versions=3, rejections=1),
    Bounds(eta=2, batch=1, concurrent=3, versions=4, rejections=2),
    Bounds(eta=1, batch=1, concurrent=2, versions=3, rejections=1, kills=1),
    Bounds(eta=1, batch=2, concurrent=4, versions=4, rejections=0),
    Bounds(eta=2, batch=2, concurrent=4, versions=4, rejections=1),
)


def main(argv: list[str]) -> None:
    if "--show" in argv:
        for mode in MODES:
            print(f"rollout.stale={mode}, {SMALLEST}\n{show(explore(DispatchMachine(mode, SMALLEST)))}\n")
        return
    for bounds in LARGE:
        for mode in MODES:
            graph = explore(DispatchMachine(mode, bounds))
            events = sum(map(len, graph.edges.values()))
            print(
                f"{mode}  {bounds}: {len(graph.states):,} states, {events:,} events, {graph.seconds:.1f} s", flush=True
            )


if __name__ == "__main__":
    main(sys.argv[1:])
