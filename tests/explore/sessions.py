"""SessionMachine: the shipped SessionTable and Session under a trainer, agents and a clock.

`Work` stands for a turn; time passes in halves of a session's idle time. From every state all
sessions and turns can end. The properties:

    grants    A session starts if and only if there is an unused grant.
    expiry    Sessions leave by export, by discard, or after their idle time, and only then.
    ended     A call gets 410 from an ended session, and 404 from one that has left.
    stopped   All turns of a session that has ended are told to stop.
    access    The id of a session leads to this session.
    limit     A session never generates more answers at once than its limit.
"""

import contextlib
import copy
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import calls.sessions
from calls.messages import Refusal

from .search import Broken, Event

TIMEOUT = calls.sessions.SESSION_SECONDS
TICK = TIMEOUT / 2


@dataclass(eq=False)
class Work:
    """A running turn."""

    ids: range
    told: bool = False

    def fail(self) -> None:
        self.told = True


@dataclass(eq=False)
class World:
    """The real table, and what it must contain."""

    table: Any = None
    sessions: list[Any] = field(default_factory=list)  # also those that have left
    now: float = 0.0
    used: dict[int, float] = field(default_factory=dict)  # session in the table -> last use
    ended: frozenset[int] = frozenset()
    grants: int = 0  # unused
    granted: int = 0
    crashes: int = 0

    def __str__(self) -> str:
        rows = []
        for k, session in enumerate(self.sessions):
            state = ("ended" if k in self.ended else "open") if k in self.used else "forgotten"
            told = [work.told for work in session.running]
            idle = f" idle {self.now - self.used[k]:g} s" if k in self.used else ""
            rows.append(f"{k}: {state} runs {len(told)} ({sum(told)} told to stop){idle}")
        return f"grants {self.grants}, sessions [{'; '.join(rows)}]"


class SessionBounds(NamedTuple):
    sessions: int = 2
    answers: int = 2  # a call asks for 1 or 2 parts in so many of the limit
    grants: int = 3
    crashes: int = 0


@dataclass
class SessionMachine:
    """A crash of the proxy leaves an empty table."""

    bounds: SessionBounds
    module: ModuleType = calls.sessions

    def initial(self) -> Iterable[World]:
        world = World()
        self.start_proxy(world)
        return [world]

    def start_proxy(self, world: World) -> None:
        world.table = self.module.SessionTable(lambda: world.now)
        world.used, world.grants, world.ended = {}, 0, frozenset(range(len(world.sessions)))
        for session in world.sessions:
            session.running, session.ended = set(), True

    def events(self, world: World) -> Iterator[Event]:
        if world.granted < self.bounds.grants:
            yield ("grant",)
        if len(world.sessions) < self.bounds.sessions:
            yield ("start",)
        if world.crashes < self.bounds.crashes:
            yield ("the proxy dies",)
        yield ("look",)
        yield ("time passes",)
        for k, session in enumerate(world.sessions):
            for name in ("call 1", "call 2", "end", "export", "discard"):
                yield name, k
            if session.running:
                yield "turn ends", k

    def apply(self, world: World, event: Event) -> World:
        world = self.copy(world)
        name, *args = event
        if name == "grant":
            world.granted, world.grants = world.granted + 1, world.grants + 1
            world.table.capacity += 1
        elif name == "start":
            self.start(world)
        elif name == "the proxy dies":
            world.crashes += 1
            self.start_proxy(world)
        elif name == "look":
            self.look(world)
            world.table.expire()
        elif name == "time passes":
            world.now += TICK
        elif name == "turn ends":
            session = world.sessions[args[0]]
            first = min(session.running, key=lambda work: (not work.told, len(work.ids)))
            session.running.remove(first)
            world.table.touch(session)
            if args[0] in world.used:
                world.used[args[0]] = world.now
        else:
            self.request(world, name, *args)
        return world

    def look(self, world: World) -> None:
        """Which sessions expire, without a look at the table."""
        for k, used in list(world.used.items()):
            if world.now - used >= TIMEOUT and world.sessions[k].running:
                world.used[k] = world.now
            elif world.now - used >= TIMEOUT:
                del world.used[k]

    def start(self, world: World) -> None:
        expected, session = world.grants > 0, None
        if expected:
            self.look(world)
        with contextlib.suppress(Refusal):
            session = world.table.start(f"task {len(world.sessions)}")
        if (session is not None) != expected:
            raise Broken("grants", f"with {world.grants} grants: {session}")
        if session is not None:
            world.used[len(world.sessions)] = world.now
            world.sessions.append(session)
            world.grants -= 1

    def request(self, world: World, name: str, k: int) -> None:
        """Send a request to session k, and compare the status."""
        session, table, is_call = world.sessions[k], world.table, name.startswith("call")
        self.look(world)
        expected = 404 if k not in world.used else 410 if k in world.ended and is_call else 200
        if k in world.used:
            world.used[k] = world.now
        try:
            found, status = (table.open if is_call else table.find)(session.session_id), 200
        except Refusal as refusal:
            found, status = session, refusal.status
        if status != expected:
            broken = "ended" if {status, expected} & {410} else "expiry"
            raise Broken(broken, f"{name}: {status}, not {expected}")
        if found is not session or found.task_id != f"task {k}":
            raise Broken("access", f"the id of session {k} leads to {found.task_id}")
        if status == 200 and is_call:
            n = int(name[-1]) * calls.sessions.ANSWERS // self.bounds.answers
            ask: Any = SimpleNamespace(n=n)
            with contextlib.suppress(Refusal):
                session.check(ask)
                session.running.add(Work(range(n)))
        elif status == 200:
            leaves = name == "discard" or (name == "export" and session.ended)
            if leaves or name == "end":
                world.ended |= {k}
                (table.forget if leaves else table.end)(session)
            if leaves:
                del world.used[k]

    def copy(self, world: World) -> World:
        new = copy.copy(world)
        new.used = dict(world.used)
        new.sessions = [copy.copy(session) for session in world.sessions]
        for session in new.sessions:
            session.running = {copy.copy(work) for work in session.running}
        number = {session.session_id: k for k, session in enumerate(world.sessions)}
        new.table = type(world.table)(lambda: new.now)
        new.table.capacity = world.table.capacity
        for name in world.table:
            new.table[name] = new.sessions[number[name]]
        return new

    def key(self, world: World) -> Hashable:
        number = {session.session_id: k for k, session in enumerate(world.sessions)}
        sessions = tuple(
            (
                session.ended,
                min(world.now - session.last_used, TIMEOUT)
                if session.session_id in world.table
                else -1,
                min(world.now - world.used[k], TIMEOUT) if k in world.used else -1,
                k in world.ended,
                tuple(sorted((work.told, len(work.ids)) for work in session.running)),
            )
            for k, session in enumerate(world.sessions)
        )
        order = tuple(number[name] for name in world.table)
        counts = world.table.capacity, world.grants, world.granted, world.crashes
        return sessions, order, counts

    def check(self, world: World) -> None:
        number = {session.session_id: k for k, session in enumerate(world.sessions)}
        for session in world.sessions:
            if world.table.get(session.session_id, session) is not session:
                raise Broken("access", "the id of a session leads to another session")
        if (found := {number[name] for name in world.table}) != world.used.keys():
            raise Broken("expiry", f"the table has {found}, not {[*world.used]}")
        for k, session in enumerate(world.sessions):
            if session.ended != (k in world.ended or k not in world.used):
                raise Broken("ended", f"session {k} has ended: {session.ended}")
            if session.ended and not all(work.told for work in session.running):
                raise Broken("stopped", f"session {k} has ended, but a turn of it runs on")
            if sum(len(work.ids) for work in session.running) > calls.sessions.ANSWERS:
                raise Broken("limit", f"session {k} generates too many answers")
        if world.table.capacity != world.grants:
            raise Broken("grants", f"{world.table.capacity} may start, not {world.grants}")

    def is_goal(self, world: World) -> bool:
        return not world.table and not any(session.running for session in world.sessions)


SMALL = (
    SessionBounds(sessions=2, answers=2, grants=2),
    SessionBounds(sessions=2, answers=2, grants=2, crashes=1),
)
LARGE = (
    SessionBounds(sessions=3, answers=2, grants=3),
    SessionBounds(sessions=2, answers=4, grants=4),
    SessionBounds(sessions=2, answers=2, grants=3, crashes=1),
)
FAR = (SessionBounds(sessions=40, answers=5, grants=10**6), SessionBounds(40, 5, 10**6, crashes=20))
