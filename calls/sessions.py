"""A session is the proxy's state of an episode.

    state      | meaning
    -----------+--------------------------------------------------------
    open       | takes calls
    ended      | takes no calls, and waits for its export
    forgotten  | exported, or discarded because its episode has failed

No session expires, because the proxy ends with its trainer.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cache import InteractionCache
from calls.messages import Refusal


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
    running: set[Any] = field(default_factory=set)  # turns (calls/turn.py)
    turns: dict[int, Any] = field(default_factory=dict)  # hash of a body -> its newest turn
    ended: bool = False

    def check_open(self) -> None:
        if self.ended:
            raise Refusal("session: it has ended and takes no more work; start a new one", 410)

    def end(self) -> None:
        """Refuse new calls, and stop the running ones."""
        self.ended = True
        for turn in self.running:
            turn.fail()
