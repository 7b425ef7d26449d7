"""Choose an inference server for each request, control all servers, and check their versions.

All conversations of a prompt group go to one server, which computes the shared prompt once.
`rank_servers` gives a group the same order of servers in every process. If a server fails, the
request goes to the next server in this order.

We check the versions of every answer, because a server may have missed an update, or been restarted
with its first weights. No token may be newer than the trainer's version (`trainer_version`). An
update changes all servers before any of them continues. So once this process knows of version 6
(`newest`), its later requests may not get tokens of version 5.

Every request in flight has its own connection. We use aiohttp, because httpx takes more than twice
the CPU time for a request (docs/log.md, "Requests").
"""

import asyncio
import math
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import orjson

from inference.io_struct import EngineError

KEEPALIVE = 4.0  # SGLang closes idle connections after 5 s, so we close first
CALL_TIMEOUT = 60.0  # seconds for a request that generates nothing


def make_session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE)
    return aiohttp.ClientSession(connector=connector, json_serialize_bytes=orjson.dumps)


class PerLoop:
    """One object for each event loop. The first `get` in a loop makes the object, and the end of
    the loop closes the object."""

    def __init__(self, make: Callable[[], Any], close: Callable[[Any], Awaitable[None]]) -> None:
        self._make = make
        self._close = close
        self._keepers: dict[asyncio.AbstractEventLoop, AsyncGenerator[Any, None]] = {}

    async def get(self) -> Any:
        loop = asyncio.get_running_loop()
        if loop not in self._keepers:
            self._keepers[loop] = self._keep(loop)
        return await anext(self._keepers[loop])

    async def _keep(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[Any, None]:
        # When an event loop ends, it closes its async generators, and the `finally` closes `thing`.
        thing = self._make()
        try:
            while True:
                yield thing
        finally:
            del self._keepers[loop]
            await self._close(thing)


def rank_servers(servers: list[str], group: str) -> list[str]:
    """Return the servers in the order in which the group's requests try them. Of N servers, group n
    tries number n mod N first. If the group is not a number, n is a hash of its name."""
    number = int(group) if group.isdecimal() else zlib.crc32(group.encode())
    first = number % len(servers)
    ranking = sorted(servers)
    return ranking[first:] + ranking[:first]


class Servers:
    """A client of the servers at `addresses`. All servers have the API key `key`."""

    def __init__(self, addresses: str | Iterable[str], key: str = "", session: Any = None) -> None:
        addresses = [addresses] if isinstance(addresses, str) else addresses
        self.addresses = [address.rstrip("/") for address in addresses]
        self.newest = 0  # newest version known
        self.trainer_version = math.inf  # until this process knows it
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._session = PerLoop(lambda: session or make_session(), lambda made: made.close())

    async def call(
        self, url: str, body: Any = None, timeout: float = CALL_TIMEOUT
    ) -> dict[str, Any]:
        """POST `body`, or GET if `body` is None, and return the answer. Raises EngineError if the
        answer takes longer than `timeout` seconds, or is an error."""
        session = await self._session.get()
        method = "GET" if body is None else "POST"
        limits = aiohttp.ClientTimeout(timeout, sock_connect=10.0)
        options = {"headers": self._headers, "timeout": limits, "allow_redirects": False}
        try:
            async with session.request(method, url, json=body, **options) as response:
                content, status = await response.read(), response.status
        except (aiohttp.ClientError, TimeoutError) as error:
            words = f"{type(error).__name__} {error}".split()
            raise EngineError(f"{url} gave no answer: {' '.join(words)[:300]}", 503) from error
        try:
            answer = orjson.loads(content or b"{}") or {}  # SGLang may answer null
        except ValueError:
            answer = None
        if status == 200 and isinstance(answer, dict) and answer.get("success", True):
            return answer
        said = " ".join(content.decode(errors="replace").split())[:500]
        raise EngineError(f"{url} answered {status}: {said}", 400 if 400 <= status < 500 else 503)

    def post_all(self, path: str, body: Any = None, timeout: float = CALL_TIMEOUT) -> list[Any]:
        """Send `body` to all servers at once, and return their answers in order.

        `body` may also be a list with one body for each server, or None for a GET. Raises
        EngineError with the message of every server that failed.
        """
        bodies = body if isinstance(body, list) else [body] * len(self.addresses)
        pairs = zip(self.addresses, bodies, strict=True)
        answers = run_all(self.call(url + path, one, timeout) for url, one in pairs)
        if failed := [answer for answer in answers if isinstance(answer, BaseException)]:
            raise EngineError("; ".join(map(str, failed)), 503) from failed[0]
        return answers

    def check_versions(self, url: str, versions: list[int], at_least: int) -> None:
        """Check the versions of an answer, and update `newest`. `at_least` is the value of `newest`
        when the request was sent. Raises EngineError (503) for an older version, or for one newer
        than the trainer's."""
        if wrong := [v for v in versions if not at_least <= v <= self.trainer_version]:
            why = f"version {wrong[0]} instead of {at_least} to {self.trainer_version}"
            raise EngineError(f"{url} sent {why}: was it restarted?", 503)
        self.newest = max([self.newest, *versions])


def run_all(calls: Iterable[Any]) -> list[Any]:
    """Run all coroutines at once in a new event loop. Return their results or exceptions."""

    async def gather() -> list[Any]:
        return await asyncio.gather(*calls, return_exceptions=True)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(gather())
    # This thread already runs an event loop, as in a notebook, so another thread runs the new loop.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, gather()).result()
