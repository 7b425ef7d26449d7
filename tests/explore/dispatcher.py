"""DispatchMachine is the state machine of the dispatcher.

DispatchMachine calls the real classes DispatchState (rollout/dispatcher.py) and StalenessManager (staleness.py), not
models of them. After a kill, the state machine restores the checkpoint with WorkflowExecutor.load_state_dict
(rollout/executor.py). Groups start, end, fail and are rejected in every order. The trainer consumes batches, makes new
versions, and may write a checkpoint with a new version. The training process can be killed. A group has tokens of each
version from the group's start to the group's end. The properties:

    `age`         No token is trained if it is more than eta versions old.
    `gate`        When a group starts, accepted + running <= (eta + version + 1) * B.
    `counters`    Each counter has the correct value. The counters obey the equation
                  submitted = enqueued + running + accepted + rejected + dropped + withdrawn.
    `starvation`  No group waits more than eta versions for its step. In mode `wait`, the waiting time begins at the
                  group's start. In the modes `mask` and `drop`, the waiting time begins at the group's end.
    `lost`        No group is dropped in the modes wait and mask.
    `deadlock`    From every state the trainer can reach the last version.

The search proves the properties only within the given bounds, for example with two groups in a batch and at most one
kill.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import rollout.dispatcher
import rollout.executor
import staleness
from rollout.runner import TimedResult

from .search import Broken, Event


def clone(thing: Any) -> Any:
    """Return a shallow copy of an object. `clone` is faster than copy.copy."""
    new = object.__new__(type(thing))
    new.__dict__.update(thing.__dict__)
    return new


@dataclass(frozen=True)
class Prompt:
    task_id: int


class Group(NamedTuple):
    """A finished group, whose trained tokens have the versions `oldest` to `newest`."""

    oldest: int
    newest: int


def without_older(group: Group, oldest: int) -> Group | None:
    """Return the group without the tokens older than version `oldest`, or None if no token is left."""
    return Group(max(group.oldest, oldest), group.newest) if group.newest >= oldest else None


@dataclass
class World:
    """A state of the whole system, which consists of the real dispatcher, a trainer, episodes and files."""

    state: Any  # DispatchState
    version: int = 0
    training: bool = (
        False  # whether the trainer has consumed a batch but not yet made the next version
    )
    next_id: int = 0
    started: dict[int, int] = field(
        default_factory=dict
    )  # for each task id, the version at which the group started
    submitted: int = 0  # number of submitted groups, which must be equal to the sum of all counters
    masked: int = 0  # number of groups whose old tokens were masked when a step consumed the group
    rejections: int = 0
    kills: int = 0
    saved: tuple[int, frozenset[int]] = (
        0,
        frozenset(),
    )  # version of the checkpoint, and ids of its open tasks
    files: dict[int, Group] = field(
        default_factory=dict
    )  # for each task id, the file of the finished group

    def get_version(self) -> int:
        return self.version

    def __str__(self) -> str:
        parts = [f"version {self.version}" + ", the trainer trains" * self.training]
        parts += [
            f"group {i} runs since version {self.started[i]}"
            if data is None
            else f"group {i} has tokens of version{'' if data.oldest == data.newest else f's {data.oldest} to'} {data.newest}"
            for i, data in self.state.order.items()
        ]
        counts = {
            "rejected": self.rejections,
            "dropped": self.state.manager.get_stats().dropped,
            "kills": self.kills,
        }
        return "; ".join(parts + [f"{name}: {count}" for name, count in counts.items() if count])


class Bounds(NamedTuple):
    """The bounds within which the search explores the state machine."""

    eta: int = 1
    batch: int = 1  # number of groups in a batch (B)
    concurrent: int = 2  # maximum number of running groups
    versions: int = 2  # the last version that the trainer makes
    rejections: int = 1  # maximum number of groups that are rejected or fail
    kills: int = 0
    withdrawals: int = 0  # maximum number of groups that are fetched with wait_for_task


@dataclass
class DispatchMachine:
    """The state machine of DispatchState and StalenessManager. The events come from a trainer, episodes, checkpoints
    and kills."""

    mode: str  # rollout.stale
    bounds: Bounds
    dispatcher: ModuleType = (
        rollout.dispatcher
    )  # module with DispatchState, or a copy with a planted error
    staleness: ModuleType = staleness
    executor: ModuleType = rollout.executor

    def initial(self) -> Iterable[World]:
        world = World(None)
        self.build(world)
        return [world]

    def build(self, world: World) -> None:
        """Put a new dispatcher and a new staleness manager into `world`, as in a process that has just started."""
        b = self.bounds
        manager = self.staleness.StalenessManager(world, b.concurrent, b.batch, b.eta)
        oldest: Callable[[Group], int] = lambda group: group.oldest  # noqa: E731
        world.state = self.dispatcher.DispatchState(
            manager, oldest, 10**6, self.mode, without_older, 10**6
        )
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
            elif state.manager.get_stats().withdrawn < b.withdrawals:
                yield "withdraw", task_id
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
            {"start": self.start, "take": self.take, "kill": self.kill}.get(name, self.other)(
                world, name, *args
            )
        except self.staleness.StalenessError as error:
            raise Broken("age", str(error)) from error
        except RuntimeError as error:
            raise Broken("counters", str(error)) from error
        return world

    def start(self, world: World, name: str) -> None:
        world.state.enqueue(Prompt(world.next_id))
        world.submitted += 1
        world.next_id += 1
        try:
            tasks = world.state.start()
        except self.staleness.StalenessError as error:
            raise Broken("gate", str(error)) from error
        for task in tasks:
            world.started[task.task_id] = world.version
            stat, b = world.state.manager.get_stats(), self.bounds
            if stat.accepted + stat.running > (b.eta + world.version + 1) * b.batch:
                raise Broken("gate", f"a group starts at version {world.version}: {stat}")

    def other(self, world: World, name: str, task_id: int = -1) -> None:
        if name.startswith("version"):
            world.version, world.training = world.version + 1, False
            if name.endswith("checkpoint"):
                world.saved = world.version, frozenset(world.state.in_flight())
            return
        if name == "withdraw":
            [group] = world.state.take_task(task_id)
            if group != world.files[task_id]:
                raise Broken("lost", f"group {task_id} became {group}")
            return
        if name == "end":
            world.files[task_id] = Group(world.started[task_id], world.version)
            world.state.finish(TimedResult(task_id, 0, world.files[task_id]))
            return
        world.rejections += 1
        world.state.finish(
            TimedResult(task_id, 0, None, ValueError("a bug") if name == "fail" else None)
        )

    def take(self, world: World, name: str) -> None:
        finished = [*world.state.order.values()]
        groups = world.state.take(self.bounds.batch)
        world.masked += sum(group not in finished for group in groups)
        world.training = bool(groups)
        if len(groups) not in (0, self.bounds.batch):
            raise Broken("counters", f"a batch of {len(groups)} groups")
        for group in groups:
            if world.version - group.oldest > self.bounds.eta:
                raise Broken(
                    "age",
                    f"a token of version {group.oldest} is trained at version {world.version}",
                )

    def kill(self, world: World, name: str) -> None:
        """Kill the process, and continue from the checkpoint in a new process."""
        b, (version, open_tasks) = self.bounds, world.saved
        files = {i: world.files[i] for i in sorted(open_tasks & world.files.keys())}
        finished = {
            i: group for i, group in files.items() if group.newest <= version
        }  # as GroupLog.read does
        world.version, world.training, world.kills = version, False, world.kills + 1
        self.build(world)
        gate, restore, config = (
            world.state.manager,
            world.state.order.update,
            SimpleNamespace(stale=self.mode),
        )
        stub = SimpleNamespace(
            config=config, staleness_manager=gate, dispatcher=SimpleNamespace(restore=restore)
        )
        checkpoint = {
            "next_id": world.next_id,
            "drawn": world.next_id,
            "open": dict.fromkeys(open_tasks),
        }
        self.load_state_dict(stub, checkpoint, finished, version)
        world.files = dict(world.state.order)
        world.submitted = version * b.batch + len(world.files)
        world.started = {i: group.oldest for i, group in world.files.items()}
        world.rejections = 0 if b.kills else world.rejections

    @cached_property
    def load_state_dict(self) -> Callable[..., None]:
        """Return a copy of WorkflowExecutor.load_state_dict that reads a group's versions from `oldest` and `newest`,
        because the groups of the state machine have no tensors."""
        code = self.executor.WorkflowExecutor.load_state_dict.__code__
        versions = SimpleNamespace(
            head_version=lambda group: group.oldest, tail_version=lambda group: group.newest
        )
        return FunctionType(code, vars(self.executor) | {"trajectory": versions})

    def copy(self, world: World) -> World:
        """Return a copy of `world`, with copies of its dispatcher and its staleness manager."""
        new, state, manager = clone(world), clone(world.state), clone(world.state.manager)
        new.started, new.files, new.state = dict(world.started), dict(world.files), state
        state.pending, state.order, state.rejected = (
            state.pending.copy(),
            state.order.copy(),
            state.rejected.copy(),
        )
        state.manager, manager.version_provider, manager._stat = manager, new, clone(manager._stat)
        return new

    def key(self, world: World) -> Hashable:
        saved_version, open_tasks = world.saved
        groups = [
            (data or world.started[task_id], task_id in open_tasks)
            for task_id, data in world.state.order.items()
        ]
        stat = world.state.manager._stat
        counters = (
            stat.enqueued,
            stat.running,
            stat.accepted,
            stat.rejected,
            stat.dropped,
            stat.withdrawn,
        )
        used = (
            sorted((i, group) for i, group in world.files.items() if i in open_tasks)
            if self.bounds.kills
            else ()
        )
        files = tuple((group.oldest, group.newest) for _, group in used)
        spent = (world.rejections, world.kills, saved_version, files, len(open_tasks))
        return world.version, world.training, tuple(groups), counters, world.submitted, spent

    def check(self, world: World) -> None:
        stat, b = world.state.manager._stat, self.bounds
        order = world.state.order
        finished = [data for data in order.values() if data is not None]
        known = (
            stat.enqueued
            + stat.running
            + stat.accepted
            + stat.rejected
            + stat.dropped
            + stat.withdrawn
        )
        consumed = (world.version + world.training) * b.batch
        if known != world.submitted:
            raise Broken("counters", f"{world.submitted} groups were submitted: {stat}")
        if (stat.running, stat.accepted) != (len(order) - len(finished), consumed + len(finished)):
            raise Broken(
                "counters", f"{len(order)} groups, {len(finished)} of them finished: {stat}"
            )
        if stat.dropped and self.mode != "drop":
            raise Broken("lost", f"{stat.dropped} groups were dropped")
        for task_id, data in order.items():
            since = (
                world.started[task_id]
                if self.mode == "wait"
                else data.newest
                if data
                else world.version
            )
            if world.version - since > b.eta:
                raise Broken(
                    "starvation", f"a group waits since version {since} at version {world.version}"
                )

    def is_goal(self, world: World) -> bool:
        return world.version == self.bounds.versions


MODES = ("wait", "mask", "drop")
SMALLEST = Bounds(eta=0, batch=1, concurrent=1, versions=1, rejections=1)
SMALL = (
    Bounds(eta=1, batch=1, concurrent=2, versions=3, rejections=1),
    Bounds(eta=0, batch=2, concurrent=3, versions=2, rejections=1),
    Bounds(eta=1, batch=1, concurrent=2, versions=2, rejections=0, kills=1),
    Bounds(eta=1, batch=1, concurrent=2, versions=3, rejections=0, withdrawals=1),
)
LARGE = (
    Bounds(eta=1, batch=2, concurrent=3, versions=3, rejections=1),
    Bounds(eta=2, batch=1, concurrent=3, versions=4, rejections=2),
    Bounds(eta=1, batch=1, concurrent=2, versions=3, rejections=1, kills=1),
    Bounds(eta=1, batch=2, concurrent=4, versions=4, rejections=0),
    Bounds(eta=1, batch=2, concurrent=3, versions=3, rejections=1, withdrawals=2),
    Bounds(eta=2, batch=2, concurrent=4, versions=5, rejections=2),
)
# The last two cases of FAR limit the number of rejected groups, so that many finished groups wait for a step and become
# old.
FAR = (
    Bounds(eta=3, batch=4, concurrent=9, versions=10**6, rejections=10**6),
    Bounds(eta=2, batch=2, concurrent=9, versions=10**6, rejections=20),
    Bounds(eta=2, batch=2, concurrent=5, versions=10**6, rejections=5, kills=20),
)
