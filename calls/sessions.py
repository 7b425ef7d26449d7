"""A session is the proxy's state of an episode.

    state      | meaning
    -----------+--------------------------------------------------------
    open       | takes calls
    ended      | takes no calls, and waits for its export
    forgotten  | exported, or discarded because its episode has failed

Sessions never expire, because the proxy ends with its trainer. The size of a session is bounded,
because the proxy keeps its calls in memory, and exports them in one reply.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cache import InteractionCache
from calls.messages import Refusal

MAX_CALLS, MAX_BYTES = 2048, 2**26  # of a session; bytes of its calls' bodies


class ProxyAddress(NamedTuple):
    """The address of the run's proxy, and its key."""

    proxy_addr: str
    admin_key: str


@dataclass(eq=False)
class Session:
    """The state of one episode."""

    session_id: str
    task_id: str
    sampling: dict[str, Any]  # its defaults for CallParameters
    cache: InteractionCache
    calls: int = 0  # calls sent to the engine
    size: int = 0  # bytes of all bodies
    running: set[Any] = field(default_factory=set)  # turns (calls/turn.py)
    turns: dict[int, Any] = field(default_factory=dict)  # hash of a body -> its newest turn
    ended: bool = False

    def check_open(self) -> None:
        if self.ended:
            raise Refusal("session: it has ended and takes no more work; start a new one", 410)

    def receive(self, size: int) -> None:
        """Count a part of a call's body. Raises Refusal if the session has ended or is full."""
        self.check_open()
        self.size += size
        if self.size > MAX_BYTES or self.calls >= MAX_CALLS:
            most = f"{MAX_CALLS} calls with {MAX_BYTES} bytes"
            raise Refusal(f"session: it takes at most {most}; end it and start a new one", 413)

    def end(self) -> None:
        """Refuse new calls, and stop the running ones."""
        self.ended = True
        self.turns.clear()  # they refer to the session, which would wait for the garbage collector
        for turn in self.running:
            turn.fail()
