"""Keep the table of a proxy's sessions: start sessions, find sessions by id, and forget old sessions.

Each episode has one session, and each session needs one grant to start. When the dispatcher lets an episode start, the
trainer sends a grant to the proxy. If a session fails to start, its grant stays valid for the next attempt. An unused
grant lapses after GRANT_SECONDS.

    state      | meaning
    -----------+-----------------------------------------------------------------------------
    open       | the session takes calls
    ended      | the session takes no more calls and waits for its export
    forgotten  | the session was exported, was discarded at its end, or was idle for too long

A session is idle while it generates no answer and receives no request. For example, with a timeout of 3600 seconds, a
session that becomes idle at 12:00 expires at 13:00. A session that has ended but was never exported also expires. The
proxy looks for expired sessions when a session starts, at each request with a session id, and at GET /health. When the
proxy forgets a session, the session's conversation tree is lost.

A session also stores its earlier turns by the hash of the request's body, so that turn.py can recognise a client's
retry.

The methods of `SessionTable` do no input or output, and get the time from the function `clock`.
"""

import asyncio
import operator
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from cache import Interaction, InteractionCache
from calls.messages import AgentRequest, Refusal
from inference.io_struct import SAMPLING_KEYS
from inference.fields import Count, Positive

GRANT_SECONDS = 60.0  # seconds until an unused grant lapses


@dataclass
class Limits:
    """Limits on the requests and answers of one session (SECURITY.md). If a session requests more answers than
    `running`, the surplus answers wait. A well-behaved agent reaches only the limit `running`."""

    running: Count = 32  # maximum number of a session's answers that are generated at the same time; others wait
    answers: Count = 2048  # maximum number of a session's running and waiting answers; a further call gets status 429
    messages: Count = 20_000  # maximum number of messages or items in one request
    body_bytes: Count = 2**24  # maximum length of a request's body, in bytes
    stop_strings: Count = 64  # maximum number of stop strings, and of stop token ids, in one request
    stop_length: Count = 1000  # maximum number of characters in a stop string
    seconds: Positive = 120.0  # seconds within which the body of a request must arrive
    header_bytes: Count = 2**16  # maximum length of a request's header, in bytes
    header_seconds: Positive = 60.0  # seconds within which the next request's header must arrive on a connection

    def check(self, session: "Session", ask: AgentRequest) -> None:
        """Raise Refusal if a request exceeds one of the limits."""
        stops, answers = ask.sampling.get("stop", []), ask.n + sum(len(turn.ids) for turn in session.running)
        count = max(len(stops), len(ask.sampling.get("stop_token_ids", [])))
        sizes = len(ask.messages), count, max(map(len, stops), default=0)
        if any(map(operator.gt, sizes, (self.messages, self.stop_strings, self.stop_length))):
            raise Refusal(f"messages, stop, stop_token_ids: the request is larger than {self}")
        if answers > self.answers:
            raise Refusal(f"n: {self.answers} answers of this session are being generated; wait for them", 429)


@dataclass(eq=False)
class Session:
    """The proxy's record of one episode."""

    session_id: str
    task_id: str
    last_used: float  # value of `clock` when the session's timeout last started
    cache: InteractionCache
    places: asyncio.Semaphore  # one place for each answer that may be generated at the same time (`Limits.running`)
    sampling: dict[str, Any] = field(default_factory=dict)  # default sampling parameters of this session
    calls: int = 0  # number of answers that the agent has requested
    running: set[Any] = field(default_factory=set)  # turns (turn.py) that are being generated
    turns: dict[bytes, list[Any]] = field(default_factory=dict)  # hash of a request's body -> turns with this body
    ended: bool = False  # whether the session has ended and refuses new calls
    beginning: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while a request finds or starts a turn

    @property
    def rewarded_count(self) -> int:
        """Return how many finished interactions have a reward."""
        return sum(interaction.reward is not None for interaction in self.cache.finished())

    def finished(self, interaction_id: str) -> Interaction | None:
        """Return the interaction with this id if its reply is complete, and None otherwise."""
        found = self.cache.get(interaction_id)
        return found if found and found.reply else None


class SessionTable(OrderedDict[str, Session]):
    """The open and ended sessions by id, and the grants for new sessions.

    In this table, the least recently used session comes first.
    """

    def __init__(self, timeout: float, clock: Callable[[], float], side_patterns: Collection[str] = ()) -> None:
        super().__init__()
        self.timeout = timeout
        self.clock = clock
        self.side_patterns = side_patterns
        self.limits = Limits()  # the limits of each session
        self._grants: deque[float] = deque()  # the time at which each unused grant lapses, earliest first

    @property
    def capacity(self) -> int:
        """Return how many sessions may start now."""
        while self._grants and self._grants[0] <= self.clock():
            self._grants.popleft()
        return len(self._grants)

    def find(self, session_id: str) -> Session:
        """Return a session and restart its timeout.

        Raises Refusal with status 404 if the session is unknown, exported or expired.
        """
        self.expire()
        session = self.get(session_id)
        if session is None:
            raise Refusal("session_id: unknown, already exported, or expired; start a new session", 404)
        self.touch(session)
        return session

    def open(self, session_id: str) -> Session:
        """Return an open session.

        Raises Refusal with status 404 if the session is unknown, and with status 410 if the session has ended.
        """
        session = self.find(session_id)
        if session.ended:
            raise Refusal("session: it has ended and takes no more work; start a new one", 410)
        return session

    def grant(self) -> int:
        """Add one grant, so that one more session may start. Return how many sessions may start now."""
        self._grants.append(self.clock() + GRANT_SECONDS)
        return self.capacity

    def start(self, task_id: str, sampling: dict[str, Any] | None = None) -> Session:
        """Use one grant and return a new session. Raises Refusal with status 429 if there is no grant.

        `sampling` holds this session's default values for the fields of GenerationHyperparameters.
        """
        if strange := (sampling or {}).keys() - SAMPLING_KEYS:
            raise Refusal(f"sampling: there is no parameter {', '.join(sorted(strange))}")
        if not self.capacity:
            raise Refusal("session: none may start; POST /grant_capacity first", 429)
        self._grants.popleft()
        self.expire()
        cache, places = InteractionCache(self.side_patterns), asyncio.Semaphore(self.limits.running)
        session = Session(secrets.token_urlsafe(16), task_id, self.clock(), cache, places, sampling or {})
        self[session.session_id] = session
        return session

    def touch(self, session: Session) -> None:
        """Restart the timeout of a session."""
        session.last_used = self.clock()
        if session.session_id in self:
            self.move_to_end(session.session_id)

    def end(self, session: Session) -> None:
        """End a session: stop its running turns and refuse new calls."""
        session.ended = True
        for turn in session.running:
            turn.end_with_session()

    def forget(self, session: Session) -> None:
        """End a session, and remove the session and its conversation tree from the table."""
        self.end(session)
        self.pop(session.session_id, None)
        session.turns.clear()  # a turn and its session refer to each other; this line breaks the reference cycle

    def expire(self) -> None:
        """Forget every session that has been idle for at least the timeout."""
        while self and self.clock() - (oldest := next(iter(self.values()))).last_used >= self.timeout:
            (self.touch if oldest.running else self.forget)(oldest)
