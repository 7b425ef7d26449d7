"""DispatchMachine is the state machine of the dispatcher.

It calls the real DispatchState and StalenessManager, and the real _draw, state_dict and
load_state_dict of WorkflowExecutor. Groups start, end, fail and are rejected in every order. The
trainer consumes batches, makes versions, and may write a checkpoint with a version. The process may
be killed. The trainer may also slip, which means that it makes a version without a batch. A group
has tokens of every version from its start to its end. The properties:

    `age`         No trained token is more than eta versions old.
    `gate`        When a group has started, accepted + running <= (eta + version + 1) B.
    `counters`    submitted = enqueued + running + accepted + rejected + dropped + withdrawn.
    `starvation`  No group waits more than eta versions for its step, counted from its start with
                  wait, and from its end with mask and drop.
    `lost`        Only drop, or mask after a slip, drops groups. A fetch by id gets its group.
    `kept`        A batch that the age check refuses is still there.
    `restart`     After a kill, min(concurrent, (eta + 1) B) groups may start at once.
    `data`        Every position of the data is drawn once, and again only if a kill has undone it.
    `deadlock`    From every state the trainer can reach the last version, or has refused a batch.

The search proves this only within bounds, such as two groups in a batch and two kills.
"""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from types import ModuleType
from typing import Any, NamedTuple

import rollout.dispatcher
import rollout.executor
import staleness

from .search import Broken, Event

METHODS = ("_new_id", "_draw", "state_dict", "load_state_dict")  # WorkflowExecutor's


def clone(thing: Any) -> Any:
    """A shallow copy, faster than copy.copy."""
    new = object.__new__(type(thing))
    new.__dict__.update(thing.__dict__)
    return new


class Prompt(NamedTuple):
    task_id: int


class Group(NamedTuple):
    """A finished group, whose trained tokens have the versions `oldest` to `newest`."""

    oldest: int
    newest: int


def without_older(group: Group, oldest: int) -> Group | None:
    return Group(max(group.oldest, oldest), group.newest) if group.newest >= oldest else None


@dataclass
class World:
    """A state of the whole system: the real dispatcher, a trainer, episodes and a checkpoint."""

    state: Any = None  # DispatchState
    cursor: Any = None  # what WorkflowExecutor knows about its data
    version: int = 0
    training: bool = False  # a batch is consumed, and the next version not yet made
    started: dict[int, int] = field(default_factory=dict)  # task id -> version
    drawn: int = 0  # samples that this process has read from the dataloader
    closed: frozenset[int] = frozenset()  # positions that were consumed or rejected
    submitted: int = 0
    masked: int = 0
    rejections: int = 0
    kills: int = 0
    slips: int = 0
    refused: bool = False  # the age check has refused a batch, so the run has ended
    saved: Any = None  # the checkpoint: (version, closed positions, state_dict)

    def get_version(self) -> int:
        return self.version

    def __str__(self) -> str:
        parts = [f"version {self.version}" + ", the trainer trains" * self.training]
        for i, data in self.state.order.items():
            since = f"runs since version {self.started.get(i)}"
            parts.append(f"group {i} {since if data is None else f'has tokens of {tuple(data)}'}")
        dropped = self.state.gate.get_stats().dropped
        counts = {"rejected": self.rejections, "dropped": dropped, "kills": self.kills}
        return "; ".join(parts + [f"{name}: {n}" for name, n in counts.items() if n])


class Bounds(NamedTuple):
    """How far the search goes."""

    eta: int = 1
    batch: int = 1
    concurrent: int = 2
    versions: int = 2  # the last version
    rejections: int = 1  # groups that are rejected or fail, at most
    kills: int = 0
    withdrawals: int = 0
    slips: int = 0


@dataclass
class DispatchMachine:
    """The modules may be copies with a planted error."""

    mode: str  # rollout.stale
    bounds: Bounds
    dispatcher: ModuleType = rollout.dispatcher
    staleness: ModuleType = staleness
    executor: ModuleType = rollout.executor

    def __post_init__(self) -> None:
        methods = vars(self.executor.WorkflowExecutor)
        self.Cursor = type("Cursor", (), {name: methods[name] for name in METHODS})

    def initial(self) -> Iterable[World]:
        world = World()
        self.build(world)
        return [world]

    def build(self, world: World) -> None:
        """A process that has just started."""
        b = self.bounds
        gate = self.staleness.StalenessManager(world, b.concurrent, b.batch, b.eta)
        how: Any = (lambda group: group.oldest, self.mode, without_older, 10**6)
        world.state = self.dispatcher.DispatchState(gate, *how)
        world.cursor = self.Cursor()
        start = {"_next_id": 0, "_closed": frozenset(), "gate": gate}
        vars(world.cursor).update(start, dispatcher=world.state)
        world.started, world.drawn = {}, 0

    def events(self, world: World) -> Iterator[Event]:
        state, b = world.state, self.bounds
        if self.is_goal(world):
            return
        if state.may_start() > 0:
            yield ("start",)
        for task_id, data in state.order.items():
            if data is None:
                yield "end", task_id
                if world.rejections < b.rejections:
                    yield "reject", task_id
                    yield "fail", task_id
            elif state.gate.get_stats().withdrawn < b.withdrawals:
                yield "withdraw", task_id
        if world.training:
            yield ("version",)
            if b.kills:
                yield ("version, checkpoint",)
        else:
            yield ("take",)
            if world.slips < b.slips:
                yield ("slip",)
        if world.kills < b.kills:
            yield ("kill",)

    def apply(self, world: World, event: Event) -> World:
        world, (name, *args) = self.copy(world), event
        try:
            getattr(self, name.partition(",")[0])(world, name, *args)
        except self.staleness.StalenessError as error:
            raise Broken("age", str(error)) from error
        except RuntimeError as error:
            raise Broken("counters", str(error)) from error
        return world

    def start(self, world: World, name: str) -> None:
        state, cursor = world.state, world.cursor
        cursor._streams = {"data": count(world.drawn)}
        task_id, sample = next(cursor._draw("data"))
        world.drawn = sample + 1
        used = world.closed | state.in_flight()
        expected = next(i for i in count() if i not in used)
        if (task_id, sample) != (expected, expected):
            raise Broken("data", f"sample {sample} is task {task_id}, and {expected} is next")
        state.enqueue(Prompt(task_id))
        world.submitted += 1
        [task] = state.start()
        world.started[task.task_id] = world.version
        stat, b = state.gate.get_stats(), self.bounds
        if stat.accepted + stat.running > (b.eta + world.version + 1) * b.batch:
            raise Broken("gate", f"a group starts at version {world.version}: {stat}")

    def version(self, world: World, name: str) -> None:
        world.version, world.training = world.version + 1, False
        if name.endswith("checkpoint"):
            world.saved = world.version, world.closed, world.cursor.state_dict()

    def slip(self, world: World, name: str) -> None:
        world.version, world.slips = world.version + 1, world.slips + 1

    def end(self, world: World, name: str, task_id: int) -> None:
        world.state.finish(task_id, Group(world.started[task_id], world.version))

    def reject(self, world: World, name: str, task_id: int) -> None:
        world.rejections += 1
        world.closed |= {task_id}
        world.state.finish(task_id, None, ValueError("a bug") if name == "fail" else None)

    fail = reject

    def withdraw(self, world: World, name: str, task_id: int) -> None:
        expected = world.state.order[task_id]
        world.closed |= {task_id}
        if world.state.take_task(task_id) != [expected]:
            raise Broken("lost", f"group {task_id} is not what was fetched")

    def take(self, world: World, name: str) -> None:
        state, before = world.state, world.state.order.copy()
        try:
            groups = state.take(self.bounds.batch)
        except self.staleness.StalenessError:
            if not world.slips:
                raise
            if state.order != before:
                raise Broken("kept", f"{before} became {state.order}") from None
            world.refused = True
            return
        world.closed |= before.keys() - state.order.keys()
        world.masked += sum(group not in before.values() for group in groups)
        world.training = bool(groups)
        if len(groups) not in (0, self.bounds.batch):
            raise Broken("counters", f"a batch of {len(groups)} groups")
        for group in groups:
            if world.version - group.oldest > self.bounds.eta:
                raise Broken("age", f"version {group.oldest} trains at version {world.version}")

    def kill(self, world: World, name: str) -> None:
        """Kill the process. The next one continues from the checkpoint, or begins anew if there is
        none."""
        b, kills = self.bounds, world.kills + 1
        version, closed, saved = world.saved or (0, frozenset(), None)
        world.version, world.training, world.kills, world.closed = version, False, kills, closed
        self.build(world)
        if saved:
            world.cursor.load_state_dict(saved, version)
            world.cursor._closed = frozenset(world.cursor._closed)
        world.submitted = version * b.batch
        if world.state.may_start() != min(b.concurrent, (b.eta + 1) * b.batch):
            raise Broken("restart", f"{world.state.may_start()} groups may start at {version}")

    def copy(self, world: World) -> World:
        new, state, gate = clone(world), clone(world.state), clone(world.state.gate)
        new.started, new.state, new.cursor = dict(world.started), state, clone(world.cursor)
        state.pending, state.order = state.pending.copy(), state.order.copy()
        state.rejected = state.rejected.copy()
        state.gate, gate.version_provider, gate._stat = gate, new, clone(gate._stat)
        new.cursor.gate, new.cursor.dispatcher = gate, state
        return new

    def key(self, world: World) -> Hashable:
        cursor, stat = world.cursor, world.state.gate.get_stats()
        groups = [data or world.started[i] for i, data in world.state.order.items()]
        ended = stat.accepted, stat.rejected, stat.dropped, stat.withdrawn
        counts = stat.enqueued, stat.running, ended, world.submitted
        now = world.version, world.training, world.refused, tuple(groups), counts
        spent = world.rejections, world.kills, world.slips
        if not self.bounds.kills:
            return now, spent
        # With kills, positions matter; they count from the next one, or from the first open one.
        version, _, saved = world.saved or (0, (), {"closed": ()})
        first = next(i for i in count() if i not in saved["closed"])
        beyond = tuple(i - first for i in saved["closed"] if i > first)
        numbers = tuple(i - cursor._next_id for i in world.state.order)
        ahead = tuple(i - cursor._next_id for i in sorted(cursor._closed) if i >= cursor._next_id)
        return now, spent, version, beyond, numbers, ahead

    def check(self, world: World) -> None:
        stat, b, order = world.state.gate.get_stats(), self.bounds, world.state.order
        finished = [data for data in order.values() if data is not None]
        ended = stat.accepted + stat.rejected + stat.dropped + stat.withdrawn
        consumed = (world.version - world.slips + world.training) * b.batch
        if stat.enqueued + stat.running + ended != world.submitted:
            raise Broken("counters", f"{world.submitted} groups were submitted: {stat}")
        if (stat.running, stat.accepted) != (len(order) - len(finished), consumed + len(finished)):
            raise Broken("counters", f"{len(order)} groups, {len(finished)} finished: {stat}")
        if stat.dropped and self.mode != "drop" and not (self.mode == "mask" and b.slips):
            raise Broken("lost", f"{stat.dropped} groups were dropped")
        for task_id, data in order.items() if not b.slips else ():
            since = data.newest if data else world.version
            since = world.started[task_id] if self.mode == "wait" else since
            if world.version - since > b.eta:
                raise Broken("starvation", f"a group waits since version {since}")

    def is_goal(self, world: World) -> bool:
        return world.refused or world.version >= self.bounds.versions


MODES = ("wait", "mask", "drop")
SMALL = (
    Bounds(eta=1, batch=1, concurrent=2, versions=3, rejections=1),
    Bounds(eta=0, batch=2, concurrent=3, versions=2, rejections=1),
    Bounds(eta=1, batch=1, concurrent=2, versions=2, rejections=1, kills=2),
    Bounds(eta=1, batch=1, concurrent=2, versions=3, rejections=0, withdrawals=1),
    Bounds(eta=0, batch=2, concurrent=2, versions=2, rejections=0, slips=1),
)
LARGE = (
    Bounds(eta=1, batch=2, concurrent=3, versions=3, rejections=1),
    Bounds(eta=2, batch=1, concurrent=3, versions=4, rejections=2),
    Bounds(eta=2, batch=1, concurrent=3, versions=3, rejections=1, kills=1),
    Bounds(eta=1, batch=2, concurrent=4, versions=4, rejections=0),
    Bounds(eta=1, batch=2, concurrent=3, versions=3, rejections=1, withdrawals=2),
    Bounds(eta=1, batch=2, concurrent=3, versions=3, rejections=0, slips=2),
    Bounds(eta=2, batch=2, concurrent=4, versions=5, rejections=2),
)
# The last two limit rejections, so that many finished groups wait for a step and become old.
FAR = (
    Bounds(eta=3, batch=4, concurrent=9, versions=10**6, rejections=10**6),
    Bounds(eta=2, batch=2, concurrent=9, versions=10**6, rejections=20),
    Bounds(eta=2, batch=2, concurrent=5, versions=10**6, rejections=5, kills=20),
)
