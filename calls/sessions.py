r"""Who may start, who is known, who has expired: the decisions behind the proxy's URLs.

An episode is a session. One grant admits one session: the dispatcher decides what may start, and a grant is how
that decision reaches the proxy. A start that fails keeps its grant for the next try, and one that nobody claims
lapses after GRANT_SECONDS, so that neither kind of failure moves the number of sessions for good (AReaL counts a
grant whose start never came for ever).

    start --> open --> ended --> forgotten        ended: no more work, waits for its export
                \_______________/^                forgotten: exported, discarded, or idle for too long

A session is idle from the end of its last request on, and never while it generates (AReaL counts from the start of
the last request, and only looks when somebody starts a session). Nobody watches the clock: whenever a session is
started or asked for, those that were idle for too long are forgotten first. A session that is forgotten takes its tree
with it. Nothing here does I/O or reads a clock of its own: `clock` is the one seam, and each method is one decision.

A session also remembers which request it answered with which turn, so that a client's retry is recognised
(calls/turn.py).

It does not promise that an ended session is exported: who fails to ask in time finds it expired.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from cache import InteractionCache
from calls.messages import Found, Refusal
from calls.side_conversations import PATTERNS

GRANT_SECONDS = 60.0  # a grant that nobody claims for this long lapses


@dataclass(eq=False)
class Session:
    """One episode. All of its state is here."""

    session_id: str
    task_id: str
    last_used: float  # clock of the last request's start or end
    cache: InteractionCache
    calls: int = 0  # completions asked for
    running: set[asyncio.Task] = field(default_factory=set)  # turns in flight
    turns: dict[bytes, list[Any]] = field(default_factory=dict)  # turns by the request body that asked for them
    ended: bool = False

    def finished(self, interaction_id: str) -> Found | None:
        """A call that has its answer, for those that refer to it."""
        found = self.cache.get(interaction_id)
        return (found.messages + found.output_message_list, found.tools) if found and found.complete else None


class SessionTable:
    """Who may start, who is known, who has expired: decisions only, the time comes from `clock`."""

    def __init__(self, timeout: float, clock: Callable[[], float], side_patterns: Collection[str] = PATTERNS) -> None:
        self.timeout = timeout
        self.clock = clock
        self.side_patterns = side_patterns
        self._sessions: dict[str, Session] = {}
        self._grants: deque[float] = deque()  # when each unclaimed grant lapses

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def capacity(self) -> int:
        """How many sessions may start now."""
        while self._grants and self._grants[0] <= self.clock():
            self._grants.popleft()
        return len(self._grants)

    def find(self, session_id: str) -> Session:
        """The session, used just now. Raises Refusal 404 for one that is unknown, exported or expired."""
        self.expire()
        session = self._sessions.get(session_id)
        if session is None:
            raise Refusal("session: unknown, already exported, or expired; start a new one", 404)
        self.touch(session)
        return session

    def open(self, session_id: str) -> Session:
        """`find` for work. Raises Refusal 410 after the session's end."""
        session = self.find(session_id)
        if session.ended:
            raise Refusal("session: it has ended and takes no more work; start a new one", 410)
        return session

    def grant(self) -> int:
        """One more session may start. The new capacity."""
        self._grants.append(self.clock() + GRANT_SECONDS)
        return self.capacity

    def start(self, task_id: str) -> Session:
        """A new session for one grant. Raises Refusal 429 without one."""
        if not self.capacity:
            raise Refusal("session: none may start; POST /grant_capacity first", 429)
        self._grants.popleft()
        self.expire()
        session = Session(secrets.token_urlsafe(16), task_id, self.clock(), InteractionCache(self.side_patterns))
        self._sessions[session.session_id] = session
        return session

    def touch(self, session: Session) -> None:
        """It was used just now: its timeout begins anew."""
        session.last_used = self.clock()

    def end(self, session: Session) -> None:
        """No more work: what is being generated is given up."""
        session.ended = True
        for generation in session.running:
            generation.cancel()

    def forget(self, session: Session) -> None:
        self.end(session)
        self._sessions.pop(session.session_id, None)

    def expire(self) -> None:
        """Forget what was idle for longer than the timeout; a session that generates is not idle."""
        oldest = self.clock() - self.timeout
        for session in list(self._sessions.values()):
            if session.last_used <= oldest and not session.running:
                self.forget(session)

    def __repr__(self) -> str:
        running = sum(len(session.running) for session in self._sessions.values())
        return f"SessionTable({len(self)} sessions, {running} generations, capacity {self.capacity})"
