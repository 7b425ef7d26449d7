"""Send JSON over HTTP to the inference servers, with little CPU time for each request.

`Wire.call` returns the parsed body of an answer. If the call fails, `Wire.call` raises an EngineError that names the
server's URL. The status of an EngineError tells the caller how to react:

    400  the request is wrong: do not send the request again
    502  the answer cannot be read
    503  no answer arrived, or the server failed: try again, perhaps at another server

**Connections.** Each request in flight has its own connection, and idle connections stay open for later requests.
`make_transport` lets httpx send its requests through aiohttp (package httpx-aiohttp). The HTTP parser of aiohttp is
written in C, and the HTTP parser of httpx is written in Python. `Wire` calls the transport directly, because httpx's
client class needs additional CPU time. The HTTP client of agents uses aiohttp too (workflow.py). The page docs/log.md
gives the measured CPU time of a request.

**Streams.** `Wire.stream` yields the server-sent events of an answer while they arrive. If several events arrive
together, `Wire.stream` parses only the newest event, because every event repeats all tokens that the server has
generated for the request.

**Errors.** `Wire` raises EngineError for every error of HTTP or JSON, for an answer that is too long, and for an answer
that does not end. After an EngineError, the engine can send the request to another server. If this process has no free
file descriptor for a connection, the request waits for a free one.

**Event loops.** A connection belongs to the event loop that opened it, and only this loop can close it. `PerLoop` gives
each event loop its own connections. A thread without an event loop calls `run_all`, which makes many calls
concurrently.
"""

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Any, Generic, TypeVar

import aiohttp
import httpx
import orjson
from httpx_aiohttp import AiohttpTransport

CALL_TIMEOUT = (
    60.0  # default timeout of a call: longest time, in seconds, in which a server may send nothing
)
CONNECT_TIMEOUT = 10.0  # timeout in seconds for opening a connection.
# An idle connection stays open for this number of seconds. A server (uvicorn) closes an idle connection after 5
# seconds, so the client closes the connection earlier.
KEEPALIVE = 4.0
MOST_BYTES = (
    2**26
)  # maximum length in bytes of an answer or of one event; a longer answer is an error
OPEN_AGAIN = 0.1  # seconds between two tries to open a connection while this process has no free file descriptor
HEADERS = {"content-type": "application/json"}
TLS = httpx.create_ssl_context()  # the TLS context is made only once, because making it takes 20 ms

logger = logging.getLogger("pocket_areal.wire")

T = TypeVar("T", bound=Any)


class EngineError(RuntimeError):
    """The error of a failed request. The module's docstring explains the values of `status`: 400, 502 and 503."""

    def __init__(self, message: str, status: int | None = None, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code  # code: OpenAI's name of the error, or ""


def is_logged(count: int) -> bool:
    """Return True for the counts 1, 2, 4, 8, ..., so that a frequent event is logged only a few times."""
    return not count & (count - 1)


def read_answer(url: str, status: int, content: bytes | bytearray) -> dict[str, Any]:
    """Return the parsed body of a successful answer, or raise EngineError with the server's error message.

    SGLang and FastAPI use several forms of error bodies. If an error occurs in the middle of a stream, the HTTP status
    is 200, and the field `code` of the error contains the real status.
    """
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
    """Return the options of a transport or client that gives each request in flight its own connection.

    `http` is the module httpx, or httpx2 for newer openai SDKs.
    """
    return {"limits": http.Limits(max_connections=2**16, keepalive_expiry=KEEPALIVE), "verify": TLS}


def make_transport() -> httpx.AsyncBaseTransport:
    """Return a transport for httpx. The transport uses aiohttp, whose HTTP parser is written in C."""
    return AiohttpTransport(**many_connections())


class PerLoop(Generic[T]):
    """Keep one object for each event loop. The first `get` in a loop makes the loop's object. When a loop ends, `close`
    closes its object."""

    def __init__(
        self,
        make: Callable[[], T],
        close: Callable[[T], Awaitable[None]] = lambda thing: thing.aclose(),
    ) -> None:
        self._make, self._close = make, close
        # Each event loop has one generator, made by `_keep`. The generator makes, yields and closes the loop's object.
        self._keepers: dict[asyncio.AbstractEventLoop, AsyncGenerator[T, None]] = {}

    async def get(self) -> T:
        """Return the object of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._keepers:
            self._keepers[loop] = self._keep(loop)
        return await anext(self._keepers[loop])

    async def _keep(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[T, None]:
        # When an event loop ends, asyncio ends the loop's tasks first, and then closes the loop's generators. Closing
        # the generator `_keep` closes the loop's object.
        try:
            thing = self._make()
            try:
                while True:
                    yield thing
            finally:
                await self._close(thing)
        finally:
            del self._keepers[loop]


def run_all(calls: Iterable[Awaitable[Any]], return_exceptions: bool = False) -> list[Any]:
    """Make all calls concurrently in a new event loop, and return their results in the order of the calls.

    The calling thread must not run an event loop. With `return_exceptions`, the result of a failed call is its
    exception.
    """

    async def gather() -> list[Any]:
        return await asyncio.gather(*calls, return_exceptions=return_exceptions)

    return asyncio.run(gather())


class Wire:
    """A client that sends requests to any number of servers. Each request carries the API key `key`.

    A test may pass a `transport` that replaces the network.
    """

    def __init__(self, transport: httpx.MockTransport | None = None, key: str = "") -> None:
        self._headers = HEADERS | ({"authorization": f"Bearer {key}"} if key else {})
        self._transports: PerLoop[httpx.AsyncBaseTransport] = PerLoop(
            lambda: transport or make_transport()
        )
        self._short = 0  # how often a request has found no free file descriptor

    async def call(
        self, url: str, body: Any = None, timeout: float = CALL_TIMEOUT
    ) -> dict[str, Any]:
        """Send `body` by POST, or send a GET if `body` is None. Return the parsed answer. Raises EngineError."""
        async with contextlib.aclosing(self.stream(url, body, timeout)) as events:
            return [event async for event in events][
                -1
            ]  # `stream` yields one event for an answer that is not a stream

    async def stream(
        self, url: str, body: Any, timeout: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Send `body` by POST, or a GET if `body` is None. Yield the parsed events of the answer while they arrive.

        If several events arrive together, only the newest event is yielded. An answer that is not a stream is yielded
        as one event. Raises EngineError if the server is silent for `timeout` seconds, cannot be reached, or reports an
        error. The method also raises EngineError if one event takes more than `timeout` seconds or has more than
        MOST_BYTES bytes.
        """
        method, content = ("GET", None) if body is None else ("POST", orjson.dumps(body))
        timeouts = httpx.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT)).as_dict()
        request = httpx.Request(
            method, url, content=content, headers=self._headers, extensions={"timeout": timeouts}
        )
        try:
            response = await self._open(request, timeout)
            streams = response.headers.get("content-type", "").startswith("text/event-stream")
            streams, deadline, unread = (
                streams and response.status_code == 200,
                time.monotonic() + timeout,
                bytearray(),
            )
            async with contextlib.aclosing(response):
                async for chunk in response.aiter_bytes():
                    unread += chunk
                    if len(unread) > MOST_BYTES or time.monotonic() > deadline:
                        raise EngineError(f"{url} sent {len(unread)} bytes without an end", 503)
                    if not streams or b"\n\n" not in unread[-len(chunk) - 1 :]:
                        continue
                    *events, unread = unread.split(b"\n\n")
                    events = [
                        event for event in events if event.strip() and not event.endswith(b"[DONE]")
                    ]
                    if events:
                        deadline = time.monotonic() + timeout
                        yield read_answer(url, 200, events[-1].removeprefix(b"data:"))
                if not streams:
                    yield read_answer(url, response.status_code, unread)
        except httpx.ReadTimeout as error:
            raise EngineError(
                f"{url} was silent for {timeout} s (is it dead, or was it left paused?)", 503
            ) from error
        except (httpx.RequestError, aiohttp.ClientError) as error:
            # httpx-aiohttp reports most errors as ConnectTimeout, so the message contains aiohttp's own error.
            why = " ".join(str(error.__cause__ or error).split())[:300]
            raise EngineError(f"{url} cannot be reached: {why}", 503) from error

    async def _open(self, request: httpx.Request, timeout: float) -> httpx.Response:
        """Send a request, and return the response when its headers have arrived.

        If this process has no free file descriptor, the server has not failed, so the method waits up to `timeout`
        seconds for a free one.
        """
        transport, deadline = await self._transports.get(), time.monotonic() + timeout
        while True:
            try:
                return await transport.handle_async_request(request)
            except httpx.TransportError as error:
                if (
                    getattr(error.__cause__, "errno", None) != errno.EMFILE
                    or time.monotonic() > deadline
                ):
                    raise
            self._short += 1
            if is_logged(self._short):
                logger.warning(
                    "no file descriptor is free (raise ulimit -n): requests waited %d times",
                    self._short,
                )
            await asyncio.sleep(OPEN_AGAIN)
