"""This module records which inference servers are alive, and chooses a server for each conversation.

**Loss of a server.** If a server is lost during a request, another server generates the missing tokens.

**Affinity.** All conversations of a prompt group go to one server, which prefills the shared prompt once and then
reuses the prompt's KV cache. `rank_servers` ranks the servers for each group, and the first living server gets the
group's requests. If a server is lost, only its groups move to other servers. All processes compute the same order of
servers. If a request has no group, the ranking depends on its session.

**Two states.** Each process keeps its own record of each server. Processes do not tell each other about lost servers.

    living -- a request got no answer, a 5xx, or tokens of old weights --> lost

    lost   -- the server answers again, and its weights may be used    --> living

A lost server may have stopped, may have restarted with its initial weights, or may still run. Three rules exclude
tokens of old weights:

- Before each weight update, the trainer calls all lost servers. Each lost server that answers also gets the update.

- Every few seconds, each process requests the version of its lost servers. A process that has received tokens of
  version 7 uses a lost server again only when this server reports version 7 or newer.

- The engine (engine.py) checks the versions of every answer, because a server may restart with version 0 between two
  requests. A weight update pauses all servers before it changes the first server, and resumes them after it has changed
  the last server. Therefore a request that is sent after tokens of version 7 have arrived must get tokens of version 7
  or newer. If an answer contains older tokens, the engine refuses the answer and marks the server as lost.

After an update, lost servers get /continue_generation too, because a lost server may be alive and paused. A server with
only a part of the weights of version 7 reports version "7-incomplete", and every engine refuses the server's tokens.

**Routers.** An address may belong to an sglang-router. Requests for tokens go to the router, which chooses a worker.
The router does not forward abort, pause, continue and weight update requests, so the engine sends them to each worker.
The trainer requests the list of workers (GET /workers) before each update, so a new worker gets the next update. A
proxy requests the list of workers only at its start, so it sends no aborts to workers that join later.

**Not promised.** If the trainer cannot reach a server during an update, the server keeps its old weights. Until a
process receives a token of the new version, it may still send requests to a server with old weights. A server with old
weights labels its tokens correctly with the old version. A server that hangs but keeps its connections open counts as
lost only after `request_timeout`. If a server fails during an update in mode distributed, the run ends.
"""

import hashlib
import logging
import math
import time
from collections import Counter
from typing import Any

import httpx

from inference.wire import CALL_TIMEOUT, EngineError, Wire, is_logged, run_all

logger = logging.getLogger("pocket_areal.servers")

LOOK_AGAIN = 2.0  # seconds between two test calls to a lost server
LOOK_TIMEOUT = 2.0  # timeout in seconds of a test call to a lost server


def rank_servers(servers: list[str], key: str) -> list[str]:
    """Return the servers in order of preference for requests with the key `key`. `servers` is the list of all servers
    of a run.

    If the key is a number n, server n mod N comes first. The order of all other servers depends on a hash (rendezvous
    hashing), so removing a server does not change the order of the remaining servers.
    """
    ranking = sorted(
        servers, key=lambda server: hashlib.blake2b(f"{key}@{server}".encode()).digest()
    )
    first = sorted(servers)[int(key) % len(servers)] if key.isdecimal() else ranking[0]
    return [first, *(server for server in ranking if server != first)]


def read_version(label: Any) -> int:
    """Return a server's version label as a number, or -1 if the label is not a number."""
    return int(label) if str(label).isdecimal() else -1


class Servers:
    """One process's record of all servers of a run. `addresses` are the base URLs of servers or routers."""

    def __init__(self, addresses: list[str], wire: Wire) -> None:
        self.addresses = [
            address.rstrip("/") for address in addresses
        ]  # URLs to which requests for tokens go
        self._wire = wire
        # Mutable state:
        self.workers_of = {
            address: [address] for address in self.addresses
        }  # for each address, URLs of its servers
        self.newest = 0  # newest version among all tokens received so far
        self.limit = (
            math.inf
        )  # the trainer's version; infinite until this process receives the version.
        # The lost servers and routers: for each URL, why it was lost. The trainer's thread and the rollout loop both
        # change this dictionary, so code that iterates over the dictionary uses a copy.
        self.lost: dict[str, str] = {}
        self.losses: Counter[str] = Counter()  # for each URL, how often it was lost
        self._look_at: dict[
            str, float
        ] = {}  # for each lost URL, the time of its next test call (time.monotonic())

    # Methods that read the record

    @property
    def workers(self) -> list[str]:
        """The URLs of all servers. For a router, the list contains the URLs of the router's workers, not the router's
        address."""
        return [worker for workers in self.workers_of.values() for worker in workers]

    def living(self) -> list[str]:
        """Return the URLs of all servers that are not lost."""
        return [worker for worker in self.workers if worker not in self.lost]

    # Events: changes between the states living and lost

    def lose(self, url: str, why: Exception) -> None:
        """Mark server `url` as lost because of error `why`. Requests go to other servers until `find` marks this server
        as living."""
        self._look_at[url] = time.monotonic() + LOOK_AGAIN
        if url not in self.lost:
            self.lost[url] = str(why)
            self.losses[url] += 1
            counts = self.losses[url], len(self.living()), len(self.workers)
            if is_logged(self.losses[url]):
                logger.warning(
                    "lost server %s (%s); lost %d times; %d of %d left", url, why, *counts
                )

    def find(self, url: str) -> None:
        """Mark lost server `url` as living, because the server has answered again."""
        self.lost.pop(url, None)  # another thread may have removed the URL already
        if is_logged(self.losses[url]):
            logger.warning("server %s is back", url)

    def check_age(self, url: str, versions: list[int], sent_after: int) -> None:
        """Check the versions of new tokens from server `url`, and update `newest`.

        `sent_after` is the value that `newest` had when the request was sent. If a token is older than version
        `sent_after`, the server was restarted, and the method raises EngineError (503). If a token is newer than the
        trainer's version, the method raises EngineError (503), too.
        """
        if versions and versions[-1] > self.limit:
            raise EngineError(
                f"{url} sent version {versions[-1]}, but the trainer has only version {self.limit}",
                503,
            )
        if versions and min(versions) < sent_after:
            reason = "it was restarted, and waits for the next weight update"
            raise EngineError(
                f"{url} sent version {min(versions)} after version {sent_after}: {reason}", 503
            )
        self.newest = max([self.newest, *versions])

    async def choose(self, key: str) -> str:
        """Return the address for requests with `key`: the first living address in the ranking of `key`.

        If a server in the ranking is lost and its next test call is due, the method makes the call. If the test call
        shows that a lost server has current weights, the method returns this server. If all servers stay lost, the
        method returns the server whose next test call is due first.
        """
        ranking = rank_servers(self.addresses, key)
        for url in ranking:
            if url not in self.lost or await self._look(url):
                return url
        return min(ranking, key=lambda url: self._look_at[url])

    async def _look(self, url: str) -> bool:
        """Return True if a lost server answers and has current weights. The method calls each server at most once in
        LOOK_AGAIN seconds."""
        if time.monotonic() < self._look_at[url]:
            return False
        self._look_at[url] = time.monotonic() + LOOK_AGAIN
        try:
            info = await self._wire.call(url + "/model_info", timeout=LOOK_TIMEOUT)
        except EngineError:
            return False
        version = read_version(info.get("weight_version"))
        is_current = self.newest <= version <= self.limit
        if is_current:
            self.find(url)
        return is_current

    # Control: the trainer's main thread, which has no event loop, calls these methods and waits for the answers.

    def refresh(self) -> None:
        """Get each router's list of workers. If a lost server answers, mark this server as living.

        A lost server that answers may have old weights, but it gets the weight update that follows. Raises EngineError
        if a router whose workers are known does not answer.
        """
        # 1. Send all requests in parallel. A server that is not a router answers /workers with status 404.
        urls = [address + "/workers" for address in self.addresses] + [
            url + "/model_info" for url in list(self.lost)
        ]
        results = run_all(
            (self._wire.call(url, timeout=LOOK_TIMEOUT) for url in urls), return_exceptions=True
        )
        answers = {url: result for url, result in zip(urls, results) if isinstance(result, dict)}

        # 2. Store each router's list of workers.
        for address in self.addresses:
            told = answers.get(address + "/workers", {}).get("workers")
            if told is not None:
                workers = [entry["url"] if isinstance(entry, dict) else entry for entry in told]
                self.workers_of[address] = [worker.rstrip("/") for worker in workers]
            # The router at this address did not answer, so the stored list of its workers may be old.
            elif self.workers_of[address] != [address]:
                raise EngineError(f"no answer from the router {address}", 503)

        # 3. Mark as living each lost server that answered.
        for worker in self.workers:
            if worker + "/model_info" in answers:
                self.find(worker)

    def post_all(
        self, path: str, body: Any = None, timeout: float = CALL_TIMEOUT, lost: bool = False
    ) -> list[Any]:
        """Send `body` to `path` of all living servers in parallel, and return their answers in the order of `workers`.

        If `body` is a list, it has one body for each living server. If `body` is None, the call is a GET. If `lost` is
        true, lost servers get the call too, and their answers are ignored.

        A server that cannot be reached is marked as lost, and the method returns the answers of the other servers. If a
        server answers with an error, or no server is left, the method raises EngineError with the errors of all failed
        servers.
        """
        living = self.living()
        bodies = body if isinstance(body, list) else [body] * len(living)
        if len(bodies) != len(living):
            raise EngineError(
                f"a server was lost during the update: {'; '.join(self.lost.values())}", 503
            )
        calls = [
            self._wire.call(server + path, one, timeout) for server, one in zip(living, bodies)
        ]
        if lost:
            calls += [
                self._wire.call(server + path, body, LOOK_TIMEOUT) for server in list(self.lost)
            ]
        answers = dict(zip(living, run_all(calls, return_exceptions=True)))
        failed = {
            server: answer for server, answer in answers.items() if isinstance(answer, Exception)
        }
        unreachable = [
            url
            for url, error in failed.items()
            if isinstance(error.__cause__, httpx.TransportError)
        ]
        for server in unreachable:
            self.lose(server, failed[server])
        # Raise an error if a server answered with an error or if no server is left.
        if len(unreachable) < len(failed) or len(unreachable) == len(living):
            raise EngineError("; ".join(map(str, (failed or self.lost).values())), 503)
        return [answer for server, answer in answers.items() if server not in failed]
