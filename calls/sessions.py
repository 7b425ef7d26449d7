"""The proxy's sessions: one an episode, each started with one grant.

The trainer sends a grant when the dispatcher lets an episode start. A start that fails leaves the
grant for the next.

    state      | meaning
    -----------+--------------------------------------------------------
    open       | takes calls
    ended      | takes no more calls, and waits for its export
    forgotten  | exported, or discarded because its episode has failed

A session whose trainer is gone stays: the proxy ends with the trainer.
"""

import secrets
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cache import Interaction, InteractionCache
from calls.messages import Refusal
from inference.io_struct import SAMPLING_KEYS


class ProxyAddress(NamedTuple):
    """Where the proxies of a run are."""

    proxy_addr: str | tuple[str, ...]
    admin_key: str


@dataclass(eq=False)
class Session:
    """The record of one episode."""

    session_id: str
    task_id: str
    cache: InteractionCache
    sampling: dict[str, Any]  # its defaults for CallParameters
    calls: int = 0  # how many the engine got
    running: set[Any] = field(default_factory=set)  # turns (calls/turn.py)
    turns: dict[bytes, Any] = field(default_factory=dict)  # hash of a body -> its newest turn
    ended: bool = False

    @property
    def rewarded_count(self) -> int:
        return sum(interaction.reward is not None for interaction in self.cache.finished())

    def finished(self, interaction_id: str) -> Interaction | None:
        """The interaction with this id, if it has a reply."""
        found = self.cache.get(interaction_id)
        return found if found and found.reply else None

    def check_open(self) -> None:
        if self.ended:
            raise Refusal("session: it has ended and takes no more work; start a new one", 410)

    def end(self) -> None:
        """Refuse new calls, and stop the running ones."""
        self.ended = True
        for turn in self.running:
            turn.fail()


class SessionTable(dict[str, Session]):
    """The open and ended sessions, and the grants for new ones."""

    capacity = 0  # unused grants

    def start(self, task_id: str, sampling: dict[str, Any] | None = None) -> Session:
        """Use a grant. Raises Refusal."""
        if strange := (sampling or {}).keys() - SAMPLING_KEYS:
            raise Refusal(f"sampling: there is no parameter {', '.join(sorted(strange))}")
        if not self.capacity:
            raise Refusal("session: none may start; POST /grant_capacity first", 429)
        self.capacity -= 1
        session = Session(secrets.token_urlsafe(16), task_id, InteractionCache(), sampling or {})
        self[session.session_id] = session
        return session

    def find(self, session_id: str) -> Session:
        if session_id not in self:
            why = "unknown, or already exported; start a new session"
            raise Refusal(f"session_id: {why}", 404)
        return self[session_id]

    def forget(self, session: Session) -> None:
        session.end()
        self.pop(session.session_id, None)
