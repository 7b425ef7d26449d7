"""JSON over HTTP to the inference servers, cheap at hundreds of requests a second; errors name the server.

`Wire.call` answers with the parsed body or raises EngineError, whose status sorts what went wrong by what the caller
can do about it. It serves generation (hundreds of calls a second, each open for seconds or minutes) and control alike.

Each request in flight has a connection pool to itself, taken from a stack of idle ones (`StackTransport`): a shared
pool looks at all its connections at every request. `call` also skips httpx's client above it. With 64 requests in
flight this costs 0.4 ms of CPU a request instead of 1.4. What agents and sessions use to reach the proxy is built on
the same stack (workflow.py).

An answer in server-sent events is handed on while it comes: `Wire.stream` yields its events, as parsed
JSON. An inference server repeats in every event all that was generated so far, so of the events that have
arrived only the newest is read.

Connections belong to an event loop and can only be closed on it, so each loop gets its own (`PerLoop`). A thread that
has no loop makes its calls in one of their own, all at once (`run_all`).
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Any, Generic, TypeVar

import httpx
import orjson

CALL_TIMEOUT = 60.0  # seconds for a call that says nothing else
CONNECT_TIMEOUT = 10.0  # seconds
CONNECT_RETRIES = 2  # at once, then after 0.5 s; a request that was sent is not sent again
KEEPALIVE = 4.0  # seconds an idle connection is kept: a server that closes first (uvicorn: 5) fails a request
HEADERS = {"content-type": "application/json"}
TLS = httpx.create_ssl_context()  # 20 ms to make, so once

T = TypeVar("T", bound=Any)


class EngineError(RuntimeError):
    """A request that cannot be served. `status` is the HTTP status that tells the caller why: 400 the request
    is wrong (never retried), 503 no server answered (trying again may help), 502 an answer that makes no
    sense."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def read_answer(url: str, status: int, content: bytes) -> dict[str, Any]:
    """The body of a successful answer; EngineError with the server's own words, in any of the shapes that
    SGLang and FastAPI give to an error. A stream's status is out before its error, which so has a `code`."""
    try:
        body = orjson.loads(content or b"{}")
    except ValueError:
        body = content.decode(errors="replace")[:500]
    fields = body if isinstance(body, dict) else {}
    error = fields.get("error") or fields
    if status == 200 and error is body and fields.get("success") is not False:
        return fields
    if isinstance(error, dict):
        if isinstance(code := error.get("code"), int):
            status = code
        error = error.get("message") or error.get("detail") or body
    raise EngineError(f"{url} answered {status}: {error}", 400 if 400 <= status < 500 else 503)


class StackTransport(httpx.AsyncBaseTransport):
    """A connection of its own for each request in flight, the one used last first. It is free when its answer is
    closed, as an answer is that was read to its end. `http`: httpx, or httpx2 for the clients of newer openai SDKs."""

    def __init__(self, http: Any = httpx) -> None:
        self.http = http
        self.idle: list[Any] = []  # connections, used last last

    async def handle_async_request(self, request: Any) -> Any:
        connection = self.idle.pop() if self.idle else self._connection()
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            await connection.aclose()
            raise
        stream = response.stream

        async def close_and_free() -> None:
            del stream.aclose  # from here on its own
            await stream.aclose()
            self.idle.append(connection)

        stream.aclose = close_and_free
        return response

    def _connection(self) -> Any:
        limits = self.http.Limits(keepalive_expiry=KEEPALIVE)
        return self.http.AsyncHTTPTransport(verify=TLS, limits=limits, retries=CONNECT_RETRIES)

    async def aclose(self) -> None:
        while self.idle:
            await self.idle.pop().aclose()


class PerLoop(Generic[T]):
    """What `make` makes, once for each event loop: at the first `get` there, closed (`aclose`) when the loop ends."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        # All that changes: for each loop the generator that makes its thing, gives it, and closes it.
        self._keepers: dict[asyncio.AbstractEventLoop, AsyncGenerator[T, None]] = {}

    async def get(self) -> T:
        """The running loop's."""
        loop = asyncio.get_running_loop()
        if loop not in self._keepers:
            self._keepers[loop] = self._keep(loop)
        return await anext(self._keepers[loop])

    async def _keep(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[T, None]:
        # A generator, because a loop that ends cancels its tasks, waits for them, and then closes its generators.
        try:
            async with contextlib.aclosing(self._make()) as thing:
                while True:
                    yield thing
        finally:
            del self._keepers[loop]


def run_all(calls: Iterable[Awaitable[Any]], return_exceptions: bool = False) -> list[Any]:
    """The results of all calls, made at once in an event loop of their own: for a thread that has none."""

    async def gather() -> list[Any]:
        return await asyncio.gather(*calls, return_exceptions=return_exceptions)

    return asyncio.run(gather())


class Wire:
    """Connections to any number of servers. `transport` stands in for the network in tests."""

    def __init__(self, transport: httpx.MockTransport | None = None) -> None:
        self._transports: PerLoop[httpx.AsyncBaseTransport] = PerLoop(lambda: transport or StackTransport())

    async def call(self, url: str, body: Any = None, timeout: float = CALL_TIMEOUT) -> dict[str, Any]:
        """POST `body`, or GET without one."""
        async with contextlib.aclosing(self.stream(url, body, timeout)) as events:
            return [event async for event in events][-1]

    async def stream(self, url: str, body: Any, timeout: float) -> AsyncGenerator[dict[str, Any], None]:
        """The same for an answer in events: it yields them, of those that came together the newest. An answer that is
        none is the only event. `timeout`: seconds of silence."""
        method, content = ("GET", None) if body is None else ("POST", orjson.dumps(body))
        timeouts = httpx.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT)).as_dict()
        request = httpx.Request(method, url, content=content, headers=HEADERS, extensions={"timeout": timeouts})
        transport = await self._transports.get()
        try:
            response = await transport.handle_async_request(request)
            kind = response.headers.get("content-type", "")
            async with contextlib.aclosing(response):
                if response.status_code != 200 or not kind.startswith("text/event-stream"):
                    yield read_answer(url, response.status_code, await response.aread())
                    return
                rest = b""
                async for chunk in response.aiter_raw():
                    *events, rest = (rest + chunk).split(b"\n\n")
                    told = [event.removeprefix(b"data:").strip() for event in events]
                    if told := [data for data in told if data not in (b"", b"[DONE]")]:
                        yield read_answer(url, 200, told[-1])
        except httpx.TimeoutException as error:
            reason = f"did not answer within {timeout} s (is it dead, or was it left paused?)"
            raise EngineError(f"{url} {reason}", 503) from error
        except httpx.TransportError as error:
            raise EngineError(f"{url} cannot be reached: {error!r}", 503) from error
