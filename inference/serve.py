"""Start and end a server process. The proxy and the small inference server (inference/tiny) use this module.

A server opens its port before it loads a model or tokenizer, and ends when its parent process dies. A server listens on
127.0.0.1 by default, and needs a key to listen on any other address. If a server cannot start, the functions of this
module raise OSError or ValueError. The error message says in one line what to do, and the server's script prints this
message.
"""

import asyncio
import collections
import contextlib
import functools
import gc
import logging
import os
import resource
import secrets
import socket
import sys
import threading
from typing import Any, ClassVar

import orjson
import uvicorn
from fastapi import FastAPI, Request, Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from inference.fields import Refusal, as_object

FREE_SHARE = 0.2  # share of the file descriptors that is kept free of client connections
# Options that switch FastAPI's telemetry off. With telemetry, FastAPI would look for OpenTelemetry in every request.
NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False}


def read_secret(word: str) -> str:
    """Return the key that a command-line argument contains. If the argument is "-", read the key from the next line of
    standard input.

    No other process can read the standard input of this process. Every process on the machine can read this process's
    arguments, and other processes of the user can read its environment variables.
    """
    return sys.stdin.readline().strip() if word == "-" else word


def raise_open_files() -> int:
    """Raise this process's soft limit of open files and return the limit. Child processes inherit the limit of open
    files.

    Each connection counts as an open file. Many systems set the soft limit to 1,024 and the hard limit much higher.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = (
        10240 if hard == resource.RLIM_INFINITY else min(hard, 2**16)
    )  # 10,240 is the maximum on macOS
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft := most, hard))
    return soft if soft != resource.RLIM_INFINITY else most


def collect_garbage_rarely() -> None:
    """Tell Python's garbage collector to run less often, and to ignore all objects that exist at this moment.

    The garbage collector frees objects that refer to each other. By default, it runs each time that 700 more objects
    were made than freed. In a process with many conversations, it would take up to half of the CPU time.
    """
    if (
        gc.get_freeze_count()
    ):  # an earlier run of this process may have left garbage, which `freeze` would keep
        gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 10)
    gc.enable()  # it is off while train.py and the early processes import their modules


def free_port() -> int:
    """Return a port from 20000 to 31999 that no process uses at this moment.

    Linux and macOS use only higher ports for outgoing connections. So no outgoing connection can take the port before a
    server listens at it.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def listen(host: str, port: int, key: str | None = None) -> socket.socket:
    """Return a listening socket. A server calls `listen` first, so that a port in use is reported at once.

    Raises OSError if the port is invalid or in use, or if other machines could reach a server without a key.
    """
    if not key and host not in ("127.0.0.1", "::1", "localhost"):
        raise OSError(
            f"--host {host}: other machines can reach this address, so give the server a key (see --help)"
        )
    if (
        not 0 <= port < 65536
    ):  # for a wrong port, create_server raises an error and leaves a socket open
        raise OSError(f"--port {port}: a number from 0 (any free port) to 65535 is needed")
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise OSError(f"--port {port}: cannot listen on {host}: {error.strerror}") from error


class BoundedProtocol(HttpToolsProtocol):
    """An HTTP connection with two limits: the length of a request header, and the time until the header is complete.
    The class HttpToolsProtocol of uvicorn limits neither the length nor the time of a header.

    A BoundedProtocol refuses a request that arrives before the previous request is answered, but HttpToolsProtocol
    accepts the request. If a client with several unanswered requests disconnects, HttpToolsProtocol informs only the
    handler of the newest request, so the server still generates answers to the older requests.
    """

    header_bytes: ClassVar[int]  # `serve` sets both limits of the class
    header_seconds: ClassVar[float]

    timer: Any = None  # timer that closes the connection if a request header does not arrive completely in time
    unparsed = (
        0  # number of bytes received since the last complete header or the last part of a body
    )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["transport"] = self.transport  # type: ignore[typeddict-unknown-key]  # for calls/turn.py

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.timer = self.loop.call_later(self.header_seconds, transport.close)

    def data_received(self, data: bytes) -> None:
        self.unparsed += len(data)
        super().data_received(data)
        if self.timer is None and (self.cycle is None or self.cycle.response_complete):
            self.timer = self.loop.call_later(self.header_seconds, self.transport.close)
        if self.unparsed > self.header_bytes and not self.transport.is_closing():
            self.send_400_response("The header is too long.")

    def on_headers_complete(self) -> None:
        self.unparsed = 0
        self.stop_timer()
        if self.cycle and not self.cycle.response_complete:
            # uvicorn answers a request with status 400 if this method raises an error.
            raise ValueError("this request arrived before the previous one was answered")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.unparsed = 0
        super().on_body(body)

    def stop_timer(self) -> None:
        if self.timer:
            self.timer.cancel()
        self.timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        self.stop_timer()
        super().connection_lost(exc)


class Repeats(logging.Filter):
    """A log filter for repeated warnings. Of the warnings of one kind, only the warnings number 1, 2, 4, 8, ... reach
    the log. The filter adds the number to the warning's text."""

    counts: ClassVar[collections.Counter[str]] = collections.Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        self.counts[record.msg] += 1
        count = self.counts[record.msg]
        record.msg += f" ({count} times)"
        return not count & (count - 1)


class PatientServer(uvicorn.Server):
    """A uvicorn server that lets new connections wait in the listen queue while few file descriptors are free.

    In a plain uvicorn server, uvloop closes new connections when no file descriptor is free. A PatientServer reads the
    limit of file descriptors before each connection, because the limit may change at any time.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self.accepting = [
            asyncio.ensure_future(self.accept(listener)) for listener in sockets or []
        ]

    async def accept(self, listener: socket.socket) -> None:
        """Accept connections until the task is cancelled."""
        loop, state = (
            asyncio.get_running_loop(),
            (self.config, self.server_state, self.lifespan.state),
        )
        protocol = functools.partial(BoundedProtocol, *state)
        listener.listen(self.config.backlog)
        listener.setblocking(False)
        while True:
            try:
                with listener.dup() as lowest_free:
                    if lowest_free.fileno() > resource.getrlimit(resource.RLIMIT_NOFILE)[0] * (
                        1 - FREE_SHARE
                    ):
                        raise OSError("few file descriptors are free")
                connection, _ = await loop.sock_accept(listener)
                await loop.connect_accepted_socket(protocol, connection)
            except OSError:
                logging.getLogger("uvicorn.error").warning(
                    "few file descriptors are free, so new connections wait"
                )
                await asyncio.sleep(0.1)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self.accepting:
            task.cancel()
        await super().shutdown(sockets)


def serve(
    app: FastAPI,
    listener: socket.socket,
    exit_with_parent: bool,
    header_bytes: int = 2**16,
    header_seconds: float = 60,
) -> None:
    """Serve `app` until the process receives a signal or, with `exit_with_parent`, until standard input closes.

    The standard input of a child process is a pipe from its parent, so standard input closes when the parent dies. The
    header of a request may have at most `header_bytes` bytes, and must arrive within `header_seconds` seconds.
    """
    BoundedProtocol.header_bytes, BoundedProtocol.header_seconds = header_bytes, header_seconds
    raise_open_files()
    collect_garbage_rarely()
    # If a server closes an idle connection while the client sends a request, the request fails. This server keeps an
    # idle connection open for 75 s, so a client usually closes the connection first.
    timeouts: dict[str, Any] = {"timeout_keep_alive": 75, "timeout_graceful_shutdown": 2}  # seconds
    options = {"log_level": "warning", "access_log": False, "proxy_headers": False, **timeouts}
    server = PatientServer(uvicorn.Config(app, **options))
    logging.getLogger("uvicorn.error").addFilter(Repeats())

    def follow_parent() -> None:
        while os.read(
            0, 4096
        ):  # a thread in sys.stdin.read holds a lock that the process needs at exit
            pass
        server.should_exit = True

    if exit_with_parent:
        threading.Thread(target=follow_parent, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])


def check_key(request: Request, key: str) -> None:
    """Check that a request has the bearer key `key` in its header Authorization.

    Raises Refusal with status 401 if the request has no key, and with status 403 if its key is wrong.
    """
    given = bearer(request)
    if not secrets.compare_digest(given.encode(), key.encode()):
        raise Refusal(
            "Authorization: `Bearer <key>` with the right key is needed", 403 if given else 401
        )


def bearer(request: Request) -> str:
    """Return the bearer key in the header Authorization of a request, or "" if the request has no bearer key."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def read_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in a request's body, or {} for an empty body. Raises Refusal if the body is not empty and
    is not a JSON object."""
    try:
        return as_object(orjson.loads(raw or b"{}"), "body")
    except orjson.JSONDecodeError as error:
        raise Refusal(f"body: malformed JSON: {error}") from error


def reply(body: Any, status: int = 200) -> Response:
    """Return a response with `body` as JSON. With status 429 or 503, a header tells the client to retry after 1 s."""
    headers = {"retry-after": "1"} if status in (429, 503) else None
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def import_tokenizers() -> Any:
    """Return the class AutoTokenizer of transformers.

    A tokenizer does not need torch, but transformers imports torch if torch is installed. Importing torch takes
    seconds, so this function hides torch from transformers, unless the process has already imported torch.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    return AutoTokenizer


def load_tokenizer(model_path: str) -> Any:
    """Return the tokenizer of a model folder. Raises ValueError if the folder has no tokenizer."""
    try:
        return import_tokenizers().from_pretrained(model_path)
    except (OSError, ValueError) as error:
        reason = str(error) if os.path.isdir(model_path) else "no such folder"
        raise ValueError(f"--model-path {model_path}: no tokenizer there: {reason}") from error
