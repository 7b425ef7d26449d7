"""HTTP connections that are cheap enough for hundreds of requests at once.

Every request in flight has its own connection. An idle connection stays open for four seconds, so
that another request can use it. We use aiohttp, because httpx takes more than twice the CPU time
for a request (docs/log.md, "Requests").
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import aiohttp
import orjson

KEEPALIVE = 4.0  # SGLang closes idle connections after 5 s, so we close first


def make_session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE)
    return aiohttp.ClientSession(connector=connector, json_serialize_bytes=orjson.dumps)


class PerLoop:
    """One object for each event loop. The first `get` in a loop makes the object, which is closed
    when the loop ends."""

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
