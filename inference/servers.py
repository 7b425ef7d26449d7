"""This module knows which inference servers are alive, and it chooses one for each conversation.

The rule: **losing a server costs only what it was computing.** A request keeps the tokens that it has received, and
another server generates what is missing. The run goes on while one server lives.

**Affinity.** All turns of a conversation go to one server, because their prefix is cached there. Each conversation
ranks the servers in an order of its own (rendezvous hashing). So no table is needed, all processes agree on the order,
and the loss of a server moves only the conversations that it had.

**Two states.** Each process keeps its own record of each server, and nobody announces a loss:

    living -- a request got no answer, a 5xx, or tokens of old weights --> lost
    lost   -- the server answers again, and its weights may be used    --> living

A lost server may be dead, restarted, or alive with only its answer lost. Three rules keep old weights out:

- The trainer looks at its lost servers before each update. A server that answers takes part, whatever weights it has.
- Any other process looks at a lost server every few seconds. It uses the server again when the server's version is at
  least the newest version of which this process has received tokens.
- A server may restart while nobody looks, and then it is back at version 0. Therefore every answer is checked. An
  update pauses all servers before it changes the first. So a request that is sent after tokens of version 7 have
  arrived must get tokens of version 7 or newer. Older tokens are thrown away, and their server is lost.

After an update the trainer also continues the lost servers. A lost server that is alive would otherwise stay paused,
and processes that still use it would wait. If that server has old weights, the check of its answers finds them. If it
has half an update, it bears the version "7-incomplete", which no engine accepts.

**Routers.** An address may belong to an sglang-router. Requests for tokens go to the router, which chooses a worker.
The router does not pass on abort, pause, continue and weight updates, so these calls go to each of its workers. The
trainer asks for the list of workers (GET /workers) before each update, so a worker that joins gets the weights then.
A proxy asks once, at its start. It does not abort requests at a worker that joins later.

**Not promised.** A server that misses an update because the network cuts it off may still be used by a process that
has seen no token of the new version. Its tokens bear their true, older version. A server that hangs with open
connections is lost only after `request_timeout`. If a server dies during an update in mode distributed, the run ends.
"""

import hashlib
import logging
import time
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from inference.wire import CALL_TIMEOUT, EngineError, Wire, run_all

logger = logging.getLogger("nano_areal.servers")

LOOK_AGAIN = 2.0  # seconds between two looks at a lost server
LOOK_TIMEOUT = 2.0  # seconds that a lost server has to answer a look


def rank_servers(servers: list[str], key: str) -> list[str]:
    """Return the servers in the order in which conversation `key` tries them.

    This is rendezvous hashing: without one of the servers, the order of the others stays as it is.
    """
    return sorted(servers, key=lambda server: hashlib.blake2b(f"{key}@{server}".encode()).digest())


def read_version(label: Any) -> int:
    """Return the policy version that a server reports, or -1 if its label is not a number."""
    return int(label) if str(label).isdecimal() else -1


@dataclass
class Server:
    """What this process knows about one server or router."""

    state: Literal["living", "lost"] = "living"
    reason: str = ""  # why it was lost
    look_at: float = 0.0  # when to look at it again while it is lost, in seconds of time.monotonic()


class Servers:
    """All servers of a run, as one process sees them. `addresses` are the base URLs of servers or routers."""

    def __init__(self, addresses: list[str], wire: Wire) -> None:
        self.addresses = [address.rstrip("/") for address in addresses]  # requests for tokens go here
        self._wire = wire
        # Everything that changes:
        self.workers_of = {address: [address] for address in self.addresses}  # the URLs for control calls, by address
        self.newest = 0  # the newest version of which tokens have come
        self._records = {address: Server() for address in self.addresses}  # of every address and every worker, by URL

    # Questions

    @property
    def workers(self) -> list[str]:
        """The URLs of all servers: an address itself, or the workers behind it if it is a router."""
        return [worker for workers in self.workers_of.values() for worker in workers]

    def living(self) -> list[str]:
        """Return the workers that are not lost."""
        return [worker for worker in self.workers if self._records[worker].state == "living"]

    @property
    def lost(self) -> dict[str, str]:
        """The URL of each lost server or router, with the reason."""
        return {url: record.reason for url, record in self._records.items() if record.state == "lost"}

    # Events: what moves a server from one state to the other

    def lose(self, url: str, why: Exception) -> None:
        """Record that a request to `url` failed. The server gets no request until it is found again."""
        record = self._records[url]
        record.look_at = time.monotonic() + LOOK_AGAIN
        if record.state == "living":
            record.state, record.reason = "lost", str(why)
            logger.warning("lost server %s (%s); %d of %d left", url, why, len(self.living()), len(self.workers))

    def find(self, url: str) -> None:
        """Record that lost server `url` answers and that its weights may be used."""
        self._records[url].state = "living"
        logger.warning("server %s is back", url)

    def check_age(self, url: str, versions: list[int], sent_after: int) -> None:
        """Check the versions of new tokens. `sent_after` is what `newest` was when their request was sent.

        Raises EngineError (503) if a token is older, because then the server was restarted with old weights.
        """
        if versions and min(versions) < sent_after:
            reason = "it was restarted, and waits for the next weight update"
            raise EngineError(f"{url} sent version {min(versions)} after version {sent_after}: {reason}", 503)
        self.newest = max([self.newest, *versions])

    async def choose(self, key: str) -> str:
        """Return the address for conversation `key`: the first in its order that lives or has just come back.

        If all are lost, return the one whose next look is due first.
        """
        ranking = rank_servers(self.addresses, key)
        for url in ranking:
            if self._records[url].state == "living" or await self._look(url):
                return url
        return min(ranking, key=lambda url: self._records[url].look_at)

    async def _look(self, url: str) -> bool:
        """Return whether a lost server is back with current weights. Ask it at most once every LOOK_AGAIN seconds."""
        record = self._records[url]
        if time.monotonic() < record.look_at:
            return False
        record.look_at = time.monotonic() + LOOK_AGAIN
        try:
            info = await self._wire.call(url + "/model_info", timeout=LOOK_TIMEOUT)
        except EngineError:
            return False
        is_current = read_version(info.get("weight_version")) >= self.newest
        if is_current:
            self.find(url)
        return is_current

    # Control: the trainer's main thread makes these calls and waits for them. It has no event loop.

    def refresh(self) -> None:
        """Ask routers for their workers, and find the lost servers that answer again.

        The weights of a server that is found do not matter here, because a weight update follows.
        Raises EngineError if a router no longer answers.
        """
        # 1. Ask everything at once. A server has no /workers and answers 404.
        urls = [address + "/workers" for address in self.addresses] + [url + "/model_info" for url in self.lost]
        results = run_all((self._wire.call(url, timeout=LOOK_TIMEOUT) for url in urls), return_exceptions=True)
        answers = {url: result for url, result in zip(urls, results) if isinstance(result, dict)}

        # 2. Take over each router's list of workers.
        for address in self.addresses:
            told = answers.get(address + "/workers", {}).get("workers")
            if told is not None:
                workers = [(entry["url"] if isinstance(entry, dict) else entry).rstrip("/") for entry in told]
                self._records = {url: Server() for url in workers} | self._records  # first: requests run meanwhile
                self.workers_of[address] = workers
            elif self.workers_of[address] != [address]:  # this address was a router until now
                raise EngineError(f"no answer from the router {address}", 503)

        # 3. Find the lost servers that answered.
        for worker in self.workers:
            if worker + "/model_info" in answers:
                self.find(worker)

    def post_all(self, path: str, body: Any = None, timeout: float = CALL_TIMEOUT, lost: bool = False) -> list[Any]:
        """Send `body` to every living server at once, wait for all, and return their answers in the order of `workers`.

        A list of bodies holds one for each server. Without a body the call is a GET. With `lost`, lost servers are
        told too, and their answers are ignored.

        A server that cannot be reached is lost, and the others' answers count. Raises EngineError, which names every
        server that failed and why, if a server answers with an error or if no server is left.
        """
        living = self.living()
        bodies = body if isinstance(body, list) else [body] * len(living)
        if len(bodies) != len(living):
            raise EngineError(f"a server was lost meanwhile: {'; '.join(self.lost.values())}", 503)
        calls = [self._wire.call(server + path, one, timeout) for server, one in zip(living, bodies)]
        if lost:
            calls += [self._wire.call(server + path, body, LOOK_TIMEOUT) for server in self.lost]
        answers = dict(zip(living, run_all(calls, return_exceptions=True)))
        failed = {server: answer for server, answer in answers.items() if isinstance(answer, Exception)}
        unreachable = [url for url, error in failed.items() if isinstance(error.__cause__, httpx.TransportError)]
        if len(unreachable) < len(failed) or len(unreachable) == len(living):  # an error was answered, or none is left
            raise EngineError("; ".join(map(str, (failed or self.lost).values())), 503)
        for server in unreachable:
            self.lose(server, failed[server])
        return [answer for server, answer in answers.items() if server not in failed]
