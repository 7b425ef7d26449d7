"""Which inference servers there are, which of them live, and which one takes a conversation.

The rule: **a server that is lost costs what it was computing, and nothing else.** Every request keeps what it has
received; what the lost server was generating at that moment is generated again by another one. The run goes on while
one server lives.

**Affinity.** The turns of a conversation go to one server, where their prefix is cached. Which one is a matter of
hashing (rendezvous: every conversation ranks all servers in an order of its own), so no table is kept, processes that
know nothing of each other agree, and a server that disappears moves only its own conversations.

**Lost** is a server that does not answer, or answers 5xx. Nobody announces it: each process that speaks to servers
finds out by itself, with the request that failed. That costs no protocol between trainer and proxies.

**Come back** is harder, because a server that was restarted has the weights it was started with, and says so: version
0 in the middle of version 40. It must have the current weights before its first request:

- The trainer asks its lost servers before each weight update whether they are back; those that are take part in it.
- Everyone else looks at a lost server every few seconds, and uses it again only once the version that it reports is
  not below the newest one that this process has received tokens of.
- A server can die and return while nobody looks. So each answer is checked, too: an update pauses all servers before
  it changes the first, hence a request that was *sent after* tokens of version v had come from anywhere gets no token
  below v, unless from a server that was restarted. Such tokens are thrown away, and the server is lost.
- A server can be lost and live: it obeyed, and only its answer did not arrive. Left paused, it would keep waiting all
  who have not lost it. So after an update the lost are continued, too: with the old weights their tokens are judged as
  above, and with half an update ("7-incomplete") none is taken, and another server is asked.

**Through sglang-router** generation goes to the router's address, whose own policy chooses (cache_aware does what
affinity does). The router answers 404 to abort, pause, continue and weight updates, so those go to each of its workers
(GET /workers), asked anew before each update: a worker that joins gets the weights then. (A proxy asks once: a request
that was given up at a worker which joined later is generated to its end.)

Not promised. A server cut off by the network for the length of an update, alive all the while, may still be sent
requests by a process that has not yet seen a token of the new version; those tokens bear the old version, truly. A
server that hangs with its connections open is lost only after `request_timeout`. A server that dies in the middle of an
update in mode distributed breaks the process group, and that run ends (with disk and tensor it goes on).
"""

import hashlib
import logging
import time
from typing import Any

import httpx

from inference.wire import CALL_TIMEOUT, EngineError, Wire, run_all

logger = logging.getLogger("nano_areal.servers")

LOOK_AGAIN = 2.0  # seconds between two looks at a lost server
LOOK_TIMEOUT = 2.0  # seconds that a look may take


def rank_servers(servers: list[str], key: str) -> list[str]:
    """All servers in the order in which a conversation tries them (rendezvous hashing): every conversation
    has its own fixed order, and a server that disappears moves only those that had it first."""
    return sorted(servers, key=lambda server: hashlib.blake2b(f"{key}@{server}".encode()).digest())


def read_version(label: Any) -> int:
    """The weights' version that a server reports; -1 for what is no number ("default", an unfinished update)."""
    return int(label) if str(label).isdecimal() else -1


class Servers:
    """The servers of a run as one process sees them. `addresses`: base URLs, of servers or of routers."""

    def __init__(self, addresses: list[str], wire: Wire) -> None:
        self.addresses = [address.rstrip("/") for address in addresses]  # where generation goes
        self._wire = wire
        # All that changes:
        self.workers = self.addresses  # where control goes: behind a router, its workers
        self.lost: dict[str, str] = {}  # server -> why
        self.newest = 0  # the newest version of which tokens have come
        self._look_at: dict[str, float] = {}  # when to look at a lost server again, in time.monotonic()'s seconds

    def living(self) -> list[str]:
        """Those of `workers` that are not lost."""
        return [server for server in self.workers if server not in self.lost]

    def lose(self, server: str, why: Exception) -> None:
        """From now on `server` gets no request, until it is found again."""
        self._look_at[server] = time.monotonic() + LOOK_AGAIN
        if server not in self.lost:
            self.lost[server] = str(why)
            logger.warning("lost server %s (%s); %d of %d left", server, why, len(self.living()), len(self.workers))

    def find(self, server: str) -> None:
        """`server` is back, with weights that may be used."""
        if self.lost.pop(server, None) is not None:
            logger.warning("server %s is back", server)

    def check_age(self, server: str, versions: list[int], sent_after: int) -> None:
        """Take note of the tokens that came. EngineError (503) if they are older than `newest` was at their
        request: then the server was restarted."""
        if versions and min(versions) < sent_after:
            reason = f"{server} answered with weights of version {min(versions)} after version {sent_after} was out"
            raise EngineError(f"{reason}: it was restarted, and waits for the next weight update", 503)
        self.newest = max([self.newest, *versions])

    async def choose(self, key: str) -> str:
        """The server for a conversation. Where none is known to live, the one lost or looked at longest ago."""
        ranking = rank_servers(self.addresses, key)
        for server in ranking:
            if server not in self.lost or await self._look(server):
                return server
        return min(ranking, key=self._look_at.__getitem__)

    async def _look(self, server: str) -> bool:
        """Whether a lost server is back with the current weights; asked of it every LOOK_AGAIN seconds only."""
        if time.monotonic() < self._look_at[server]:
            return False
        self._look_at[server] = time.monotonic() + LOOK_AGAIN
        try:
            info = await self._wire.call(server + "/model_info", timeout=LOOK_TIMEOUT)
        except EngineError:
            return False
        if read_version(info.get("weight_version")) < self.newest:
            return False
        self.find(server)
        return True

    # Control: from the trainer's main thread, in event loops of its own

    def refresh(self) -> None:
        """At the start and before each update: a router's workers of now (a server answers 404 there), and the lost
        servers that answer again (with what weights does not matter: they are about to get new ones). EngineError
        where a router no longer answers."""
        urls = [address + "/workers" for address in self.addresses]
        urls += [server + "/model_info" for server in list(self.lost)]
        results = run_all((self._wire.call(url, timeout=LOOK_TIMEOUT) for url in urls), return_exceptions=True)
        answers = {url: result for url, result in zip(urls, results) if isinstance(result, dict)}
        told = {a: answers.get(a + "/workers", {}).get("workers") for a in self.addresses}
        if gone := [a for a, behind in told.items() if behind is None and a not in self.workers]:  # routers until now
            raise EngineError(f"no answer from the router {', '.join(gone)}", 503)
        workers = [w for a, behind in told.items() for w in ([a] if behind is None else behind)]
        self.workers = [(w["url"] if isinstance(w, dict) else w).rstrip("/") for w in workers]
        for server in self.workers:
            if server + "/model_info" in answers:
                self.find(server)

    def post_all(self, path: str, body: Any = None, timeout: float = CALL_TIMEOUT, lost: bool = False) -> list[Any]:
        """POST (without a body: GET) to all living servers at once, a list of bodies one to each; the answers of those
        that still live, in the order of `workers`. Waits for all. `lost`: the lost are told, too, for some may live;
        what they answer does not matter.

        EngineError names every server that failed, with its reason: when none is left, or when one answered with an
        error, which is nobody's death.
        """
        living = self.living()
        bodies = body if isinstance(body, list) else [body] * len(living)
        if len(bodies) != len(living):
            raise EngineError(f"a server was lost meanwhile: {'; '.join(self.lost.values())}", 503)
        calls = [self._wire.call(server + path, one, timeout) for server, one in zip(living, bodies)]
        calls += [self._wire.call(server + path, body, LOOK_TIMEOUT) for server in list(self.lost) if lost]
        answers = dict(zip(living, run_all(calls, return_exceptions=True)))
        failed = {server: answer for server, answer in answers.items() if isinstance(answer, Exception)}
        dead = [s for s, error in failed.items() if isinstance(error.__cause__, httpx.TransportError)]
        if len(dead) < len(failed) or len(dead) == len(living):
            raise EngineError("; ".join(map(str, (failed or self.lost).values())), 503)
        for server in dead:
            self.lose(server, failed[server])
        return [answer for server, answer in answers.items() if server not in failed]
