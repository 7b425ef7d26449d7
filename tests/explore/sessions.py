"""SessionMachine is the state machine of the sessions.

SessionMachine calls the real classes SessionTable and Limits (calls/sessions.py), not models of them. The trainer adds
grants to the session table. The trainer starts, ends, exports and discards sessions. Agents send calls, turns end, and
time passes in steps of 30 seconds. The class Work replaces Turn, and has only the two attributes of a turn that
SessionTable and Limits use. From every state, all sessions and turns can end. The properties:

    `grants`   A session starts if and only if an unexpired grant is left.
    `expiry`   An export or a discard removes a session from the table. When the table looks for idle sessions, the
               table removes exactly the sessions that have been idle for 60 seconds.
    `ended`    A session accepts calls until the session ends. A call to an ended session gets status 410, and a call to
               a removed session gets status 404.
    `stopped`  When a session ends or is removed, all of its turns are told to stop.
    `access`   A request with the id of a session reaches this session.
    `limit`    A session never has more answers in flight than its limit.
"""

import copy
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import calls.sessions
from calls.messages import Refusal

from .search import Broken, Event

TICK, TIMEOUT = (
    30,
    60,
)  # time step, and time after which idle sessions and unused grants expire, in seconds


@dataclass(eq=False)
class Work:
    """A stand-in for a running turn."""

    ids: tuple[int, ...]
    told: bool = False  # whether the session has told the turn to stop

    def end_with_session(self) -> None:
        self.told = True


@dataclass(eq=False)
class World:
    """A state of the system: the real session table, and the expected contents of the table."""

    table: Any = None  # SessionTable
    sessions: list[Any] = field(
        default_factory=list
    )  # all sessions, also those that the table has removed
    now: int = 0
    used: dict[int, int] = field(
        default_factory=dict
    )  # for each session that must be in the table, the time of its last use
    ended: frozenset[int] = frozenset()
    lapses: tuple[int, ...] = ()  # the times at which the unused grants expire
    granted: int = 0
    crashes: int = 0  # number of crashes of the proxy

    def __str__(self) -> str:
        rows = []
        for k, session in enumerate(self.sessions):
            state = ("ended" if k in self.ended else "open") if k in self.used else "forgotten"
            told = sum(work.told for work in session.running)
            runs = f" runs {len(session.running)} ({told} told to stop)" if session.running else ""
            rows.append(
                f"{k}: {state}{runs}"
                + (f" idle {self.now - self.used[k]} s" if k in self.used else "")
            )
        return f"grants {[lapse - self.now for lapse in self.lapses]}, sessions [{'; '.join(rows)}]"


class SessionBounds(NamedTuple):
    """The bounds within which the search explores the state machine."""

    sessions: int = 2
    answers: int = 2  # maximum number of answers in flight for one session (Limits.answers)
    grants: int = 3
    crashes: int = 0  # maximum number of crashes of the proxy


@dataclass
class SessionMachine:
    """The state machine of SessionTable. The events come from a trainer, agents and a clock. The proxy may crash. After
    a crash, a new proxy starts with an empty table."""

    bounds: SessionBounds
    module: ModuleType = (
        calls.sessions
    )  # module with SessionTable, or a copy of the module with a planted error

    def initial(self) -> Iterable[World]:
        world = World()
        self.start_proxy(world)
        return [world]

    def start_proxy(self, world: World) -> None:
        """Make the empty table of a proxy that has just started."""
        world.table = self.module.SessionTable(TIMEOUT, lambda: world.now)
        world.table.limits.answers = self.bounds.answers
        world.used, world.lapses, world.ended = {}, (), frozenset(range(len(world.sessions)))
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
        yield ("30 s pass",)
        for k, session in enumerate(world.sessions):
            for name in ("call 1", "call 2", "end", "export", "discard"):
                yield name, k
            if session.running:
                yield "turn ends", k

    def apply(self, world: World, event: Event) -> World:
        world = self.copy(world)
        name, *args = event
        if name == "grant":
            world.granted += 1
            world.lapses += (world.now + TIMEOUT,)
            world.table.grant()
        elif name == "start":
            self.start(world)
        elif name == "the proxy dies":
            world.crashes += 1
            self.start_proxy(world)
        elif name == "look":
            self.look(world)
            world.table.expire()
        elif name == "30 s pass":
            world.now += TICK
            world.lapses = tuple(lapse for lapse in world.lapses if lapse > world.now)
        elif name == "turn ends":
            session = world.sessions[args[0]]
            session.running.remove(
                min(session.running, key=lambda work: (not work.told, len(work.ids)))
            )
            world.table.touch(session)
            if args[0] in world.used:
                world.used[args[0]] = world.now
        else:
            self.request(world, name, *args)
        return world

    def look(self, world: World) -> None:
        """Compute which sessions expire, without reading the table."""
        for k, used in list(world.used.items()):
            if world.now - used >= TIMEOUT:
                if world.sessions[k].running:
                    world.used[k] = world.now
                else:
                    del world.used[k]

    def start(self, world: World) -> None:
        expected = bool(world.lapses)
        if expected:
            self.look(world)
        try:
            session = world.table.start(f"task {len(world.sessions)}")
        except Refusal:
            session = None
        if (session is not None) != expected:
            raise Broken(
                "grants",
                f"a session was {'refused' if expected else 'started'} with {world.lapses}",
            )
        if session is not None:
            world.used[len(world.sessions)] = world.now
            world.sessions.append(session)
            world.lapses = world.lapses[1:]

    def request(self, world: World, name: str, k: int) -> None:
        """Send a request to session k, and compare the answer's status with the expected status."""
        session, table = world.sessions[k], world.table
        self.look(world)
        expected = (
            404
            if k not in world.used
            else 410
            if k in world.ended and name.startswith("call")
            else 200
        )
        if k in world.used:
            world.used[k] = world.now
        try:
            found = (table.open if name.startswith("call") else table.find)(session.session_id)
            status = 200
        except Refusal as refusal:
            found, status = session, refusal.status
        if status != expected:
            raise Broken(
                "ended" if {status, expected} & {410} else "expiry",
                f"{name}: {status}, not {expected}",
            )
        if found is not session or found.task_id != f"task {k}":
            raise Broken("access", f"the id of session {k} leads to {found.task_id}")
        if status != 200:
            return
        if name.startswith("call"):
            ask: Any = SimpleNamespace(sampling={}, n=int(name[-1]), messages=[])
            try:
                table.limits.check(session, ask)
                session.running.add(Work(tuple(range(ask.n))))
            except Refusal:
                pass
        elif name == "end" or (name == "export" and session.ended):
            world.ended |= {k}
            (table.end if name == "end" else table.forget)(session)
        elif name == "discard":
            world.ended |= {k}
            table.forget(session)
        if name == "discard" or (name == "export" and session.ended):
            del world.used[k]

    def copy(self, world: World) -> World:
        new = copy.copy(world)
        new.used = dict(world.used)
        new.sessions = []
        for session in world.sessions:
            twin = copy.copy(session)
            twin.running = {copy.copy(work) for work in session.running}
            new.sessions.append(twin)
        number = {session.session_id: k for k, session in enumerate(world.sessions)}
        new.table = type(world.table)(TIMEOUT, lambda: new.now)
        new.table.limits = world.table.limits
        new.table._grants = deque(world.table._grants)
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
        grants = tuple(lapse - world.now for lapse in world.table._grants if lapse > world.now)
        lapses = tuple(lapse - world.now for lapse in world.lapses)
        return sessions, order, grants, lapses, world.granted, world.crashes

    def check(self, world: World) -> None:
        number = {session.session_id: k for k, session in enumerate(world.sessions)}
        if any(
            world.table.get(session.session_id, session) is not session
            for session in world.sessions
        ):
            raise Broken("access", "the id of a session leads to another session")
        if {number[name] for name in world.table} != world.used.keys():
            raise Broken(
                "expiry",
                f"the table has {[number[name] for name in world.table]}, not {[*world.used]}",
            )
        for k, session in enumerate(world.sessions):
            if session.ended != (k in world.ended or k not in world.used):
                raise Broken("ended", f"session {k} has ended: {session.ended}")
            if session.ended and not all(work.told for work in session.running):
                raise Broken("stopped", f"session {k} has ended, but a turn of it runs on")
            if sum(len(work.ids) for work in session.running) > self.bounds.answers:
                raise Broken(
                    "limit", f"session {k} has more than {self.bounds.answers} answers in flight"
                )
        if world.table.capacity != len(world.lapses):
            raise Broken(
                "grants", f"{world.table.capacity} sessions may start, not {len(world.lapses)}"
            )

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
