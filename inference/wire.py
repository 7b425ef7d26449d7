"""JSON over HTTP to the inference servers, cheap enough for hundreds of requests at once.

Every request in flight has a connection of its own, and idle ones stay open for a moment. httpx
sends through aiohttp, whose parser is written in C, and `Wire` calls that transport directly: the
client class of httpx needs a third more CPU time (docs/log.md).
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Any, Generic, TypeVar

import aiohttp
import httpx
import orjson
from httpx_aiohttp import AiohttpTransport

from inference.io_struct import EngineError

CALL_TIMEOUT = 60.0  # seconds for a call that generates nothing
CONNECT_TIMEOUT = 10.0
KEEPALIVE = 4.0  # uvicorn closes idle connections after 5 s, so we are first
MOST_BYTES = 2**26  # of an answer

T = TypeVar("T", bound=Any)


def read_answer(url: str, status: int, content: bytes) -> dict[str, Any]:
    """The parsed body of a good answer. Raises EngineError with the server's own words; SGLang and
    FastAPI use several forms of errors."""
    try:
        body = orjson.loads(content or b"{}") or {}  # SGLang answers some requests with null
    except ValueError:
        body = content.decode(errors="replace")[:500]
    fields = body if isinstance(body, dict) else {}
    failed = bool(fields.get("error")) or fields.get("success") is False
    if status == 200 and isinstance(body, dict) and not failed:
        return fields
    error = fields.get("error") or fields
    if isinstance(error, dict):
        code = error.get("code")
        status = code if isinstance(code, int) else status
        error = error.get("message") or error.get("detail") or body
    words = " ".join(str(error).split())[:500]
    raise EngineError(f"{url} answered {status}: {words}", 400 if 400 <= status < 500 else 503)


def many_connections(http: Any = httpx) -> dict[str, Any]:
    """Options that give every request in flight its own connection. `http` is httpx, or the module
    that the installed openai SDK uses instead."""
    return {"limits": http.Limits(max_connections=2**16, keepalive_expiry=KEEPALIVE)}


def make_transport() -> httpx.AsyncBaseTransport:
    return AiohttpTransport(**many_connections())


class PerLoop(Generic[T]):
    """One object for each event loop, made by its first `get` and closed when the loop ends."""

    def __init__(
        self,
        make: Callable[[], T],
        close: Callable[[T], Awaitable[None]] = lambda thing: thing.aclose(),
    ) -> None:
        self._make, self._close = make, close
        self._keepers: dict[asyncio.AbstractEventLoop, AsyncGenerator[T, None]] = {}

    async def get(self) -> T:
        loop = asyncio.get_running_loop()
        if loop not in self._keepers:
            self._keepers[loop] = self._keep(loop)
        return await anext(self._keepers[loop])

    async def _keep(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[T, None]:
        # A loop closes its generators when it ends, and so this one closes the object.
        thing = self._make()
        try:
            while True:
                yield thing
        finally:
            del self._keepers[loop]
            await self._close(thing)


def run_all(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Make all calls at once in a loop of their own, and return results and exceptions in order."""

    async def gather() -> list[Any]:
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(gather())


class Wire:
    """Sends requests with an API key to any server. A test may replace the network."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None, key: str = "") -> None:
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._transports: PerLoop[httpx.AsyncBaseTransport] = PerLoop(
            lambda: transport or make_transport()
        )

    async def call(
        self, url: str, body: Any = None, timeout: float = CALL_TIMEOUT
    ) -> dict[str, Any]:
        """POST `body`, or GET if it is None, and return the parsed answer.

        Raises EngineError if the answer is an error, too long or not there after `timeout` seconds.
        """
        method, content = ("GET", None) if body is None else ("POST", orjson.dumps(body))
        timeouts = httpx.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT)).as_dict()
        request = httpx.Request(
            method, url, content=content, headers=self._headers, extensions={"timeout": timeouts}
        )
        transport, content = await self._transports.get(), bytearray()
        try:
            async with asyncio.timeout(timeout):
                response = await transport.handle_async_request(request)
                try:
                    async for chunk in response.aiter_bytes():
                        content += chunk
                        if len(content) > MOST_BYTES:
                            raise EngineError(f"{url} sent more than {MOST_BYTES} bytes", 503)
                finally:
                    await response.aclose()
        except (TimeoutError, httpx.ReadTimeout) as error:
            raise EngineError(f"{url} gave no answer within {timeout:g} s", 503) from error
        except (httpx.RequestError, aiohttp.ClientError) as error:
            why = " ".join(str(error.__cause__ or error).split())[:300]
            raise EngineError(f"{url} cannot be reached: {why}", 503) from error
        return read_answer(url, response.status_code, bytes(content))
