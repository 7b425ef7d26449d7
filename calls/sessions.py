"""The proxy's sessions: one an episode, each started with one grant.

The trainer sends a grant when the dispatcher lets an episode start. A start that fails leaves the
grant for the next.

    state      | meaning
    -----------+-------------------------------------------------------------------
    open       | takes calls
    ended      | takes no more calls, and waits for its export
    forgotten  | exported, discarded at its end, or idle for SESSION_SECONDS

A session is idle while it generates nothing and no request names it. The table looks for idle ones
when a session starts, at every request, and at GET /health; the longest idle one comes first, so it
looks at no other. No method does input or output, and the time comes from `clock`.
"""

import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cache import PATTERNS, Interaction, InteractionCache
from calls.messages import AgentRequest, Refusal
from inference.io_struct import SAMPLING_KEYS

# The limits of a session. An agent that behaves meets none of them.
BODY_BYTES = 2**24
ANSWERS = 512  # generated at once
SESSION_SECONDS = 3600.0  # idle


class ProxyAddress(NamedTuple):
    """Where the proxies of a run are."""

    proxy_addr: str | tuple[str, ...]
    admin_key: str


@dataclass(eq=False)
class Session:
    """The record of one episode."""

    session_id: str
    task_id: str
    last_used: float
    cache: InteractionCache
    sampling: dict[str, Any] = field(default_factory=dict)  # defaults of this session
    calls: int = 0  # answers that were asked for
    running: set[Any] = field(default_factory=set)  # turns (calls/turn.py)
    turns: dict[bytes, list[Any]] = field(default_factory=dict)  # hash of a body -> its turns
    ended: bool = False

    @property
    def rewarded_count(self) -> int:
        return sum(interaction.reward is not None for interaction in self.cache.finished())

    def finished(self, interaction_id: str) -> Interaction | None:
        """The interaction with this id, if it has a reply."""
        found = self.cache.get(interaction_id)
        return found if found and found.reply else None

    def check(self, ask: AgentRequest) -> None:
        """Raise Refusal 429 if these would be too many answers at once."""
        if ask.n + sum(len(turn.ids) for turn in self.running) > ANSWERS:
            raise Refusal(f"n: {ANSWERS} answers of this session are being generated; wait", 429)


class SessionTable(dict[str, Session]):
    """The open and ended sessions, the longest idle one first, and the grants for new ones."""

    def __init__(
        self, clock: Callable[[], float], side_patterns: Collection[str] = PATTERNS
    ) -> None:
        super().__init__()
        self.clock = clock
        self._side_patterns = side_patterns
        self.capacity = 0  # unused grants

    def start(self, task_id: str, sampling: dict[str, Any] | None = None) -> Session:
        """Use a grant. `sampling` are defaults for CallParameters. Raises Refusal."""
        if strange := (sampling or {}).keys() - SAMPLING_KEYS:
            raise Refusal(f"sampling: there is no parameter {', '.join(sorted(strange))}")
        if not self.capacity:
            raise Refusal("session: none may start; POST /grant_capacity first", 429)
        self.capacity -= 1
        self.expire()
        name, cache = secrets.token_urlsafe(16), InteractionCache(self._side_patterns)
        self[name] = session = Session(name, task_id, self.clock(), cache, sampling or {})
        return session

    def find(self, session_id: str) -> Session:
        """A session, which is idle no longer. Raises Refusal 404."""
        self.expire()
        if session_id not in self:
            why = "unknown, already exported, or expired; start a new session"
            raise Refusal(f"session_id: {why}", 404)
        self.touch(self[session_id])
        return self[session_id]

    def open(self, session_id: str) -> Session:
        """A session that takes calls. Raises Refusal 404 or 410."""
        session = self.find(session_id)
        if session.ended:
            raise Refusal("session: it has ended and takes no more work; start a new one", 410)
        return session

    def touch(self, session: Session) -> None:
        """The session's idle time starts again."""
        session.last_used = self.clock()
        if self.pop(session.session_id, None):
            self[session.session_id] = session

    def end(self, session: Session) -> None:
        """Refuse new calls, and stop the running ones."""
        session.ended = True
        for turn in session.running:
            turn.fail()

    def forget(self, session: Session) -> None:
        self.end(session)
        self.pop(session.session_id, None)

    def expire(self) -> None:
        """Forget the sessions that have been idle for too long."""
        while self and self.clock() - (oldest := next(iter(self.values()))).last_used >= (
            SESSION_SECONDS
        ):
            (self.touch if oldest.running else self.forget)(oldest)
