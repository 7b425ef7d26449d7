"""JSON over HTTP to the inference servers, cheap at hundreds of requests a second; errors name the server.

Two ways in, for the two kinds of caller. `post` is for generation: from coroutines, hundreds a second, each
open for seconds or minutes. `call` is for control: synchronous, a few a step. Both answer with the parsed
body or raise EngineError, whose status sorts what went wrong by what the caller can do about it.

Each request in flight has a connection pool to itself, taken from a stack of idle ones (`stack_transport`): a shared
pool looks at all its connections at every request. `post` also skips httpx's client above it. With 64 requests in
flight this costs 0.4 ms of CPU a request instead of 1.4. The clients that agents and sessions use to reach the proxy
are built on the same stack (workflow.py).
"""

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import orjson

CALL_TIMEOUT = 60.0  # seconds for a control call that says nothing else
CONNECT_TIMEOUT = 10.0  # seconds
KEEPALIVE = 4.0  # seconds an idle connection is kept: a server that closes first (uvicorn: 5) fails a request
Kept = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[AsyncIterator, httpx.AsyncBaseTransport]]
HEADERS = {"content-type": "application/json"}


class EngineError(RuntimeError):
    """A request that cannot be served. `status` is the HTTP status that tells the caller why: 400 the request
    is wrong (never retried), 503 no server answered (trying again may help), 502 an answer that makes no
    sense."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def read_answer(url: str, status: int, content: bytes) -> dict[str, Any]:
    """The body of a successful answer; EngineError with the server's own words, in any of the shapes that
    SGLang and FastAPI give to an error."""
    try:
        body = orjson.loads(content or b"{}")
    except ValueError:
        body = content.decode(errors="replace")[:500]
    fields = body if isinstance(body, dict) else {}
    if status == 200 and isinstance(body, dict) and fields.get("success") is not False:
        return fields
    error = fields.get("error") or fields
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or body
    raise EngineError(f"{url} answered {status}: {error}", 400 if 400 <= status < 500 else 503)


def unreachable(url: str, error: httpx.TransportError, timeout: float) -> EngineError:
    """What a connection that failed means to the caller."""
    if isinstance(error, httpx.TimeoutException):
        return EngineError(f"{url} did not answer within {timeout} s (is it dead, or was it left paused?)", 503)
    return EngineError(f"{url} cannot be reached: {error!r}", 503)


def stack_transport(http: Any, verify: Any = False) -> Any:
    """A transport for AsyncClient of `http` (httpx, or httpx2 for newer openai SDKs): a connection of its own for each
    request in flight, the one used last first."""

    class Body(http.AsyncByteStream):
        """A response's stream that says when it is done with the connection."""

        def __init__(self, stream: Any, done: Callable[[], None]) -> None:
            self.stream, self.done = stream, done

        def __aiter__(self) -> AsyncIterator[bytes]:
            return self.stream.__aiter__()

        async def aclose(self) -> None:
            await self.stream.aclose()
            self.done()

    class Stack(http.AsyncBaseTransport):
        def __init__(self) -> None:
            self.idle: list[Any] = []  # connections, used last last

        async def handle_async_request(self, request: Any) -> Any:
            limits = http.Limits(keepalive_expiry=KEEPALIVE)
            connection = self.idle.pop() if self.idle else http.AsyncHTTPTransport(verify=verify, limits=limits)
            try:
                response = await connection.handle_async_request(request)
            except BaseException:
                await connection.aclose()
                raise
            response.stream = Body(response.stream, lambda: self.idle.append(connection))
            return response

        async def aclose(self) -> None:
            while self.idle:
                await self.idle.pop().aclose()

    return Stack()


async def keep_open(transport: httpx.AsyncBaseTransport) -> AsyncIterator[None]:
    """Closes the transport with its event loop. A generator, because an event loop closes its async generators
    before it ends, and only on it can connections be closed."""
    try:
        yield
    finally:
        await transport.aclose()


class Wire:
    """Connections to any number of servers. `transport` stands in for the network in tests."""

    def __init__(self, tls: bool, connect_retries: int, transport: httpx.MockTransport | None = None) -> None:
        self._transport = transport
        self._verify = httpx.create_ssl_context() if tls else False  # 20 ms to make: once, and only for https
        network = transport or httpx.HTTPTransport(verify=self._verify, retries=connect_retries)
        self._client = httpx.Client(transport=network)
        # All that changes: each event loop's transport for generation, with the generator that keeps it open.
        self._kept: Kept = weakref.WeakKeyDictionary()

    def call(self, url: str, body: Any = None, timeout: float = CALL_TIMEOUT) -> dict[str, Any]:
        """POST `body`, or GET without one; from any thread. Connecting is tried again, a request is not."""
        method, content = ("GET", None) if body is None else ("POST", orjson.dumps(body))
        try:
            response = self._client.request(method, url, content=content, headers=HEADERS, timeout=timeout)
        except httpx.TransportError as error:
            raise unreachable(url, error, timeout) from error
        return read_answer(url, response.status_code, response.content)

    async def post(self, url: str, body: Any, timeout: float) -> dict[str, Any]:
        """POST `body` from the running event loop."""
        timeouts = {"connect": min(timeout, CONNECT_TIMEOUT), "read": timeout, "write": timeout, "pool": None}
        options: dict[str, Any] = {"headers": HEADERS, "extensions": {"timeout": timeouts}}
        request = httpx.Request("POST", url, content=orjson.dumps(body), **options)
        try:
            transport = self._transport or await self._transport_of_loop()
            response = await transport.handle_async_request(request)
            content = await response.aread()
        except httpx.TransportError as error:
            raise unreachable(url, error, timeout) from error
        return read_answer(url, response.status_code, content)

    async def _transport_of_loop(self) -> httpx.AsyncBaseTransport:
        loop = asyncio.get_running_loop()
        if loop not in self._kept:
            transport = stack_transport(httpx, self._verify)
            keeper = keep_open(transport)
            await anext(keeper)
            self._kept[loop] = keeper, transport
        return self._kept[loop][1]

    def close(self) -> None:
        """End the control connections; those for generation end with their event loop."""
        self._client.close()
