"""A server closes a connection if a request header is too long or arrives too slowly. A server closes a connection if
the client sends a request before the server has answered the previous request."""

import http.client
import itertools
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import ROOT, server_process

SERVER = """
import asyncio, sys
from fastapi import FastAPI, Request, Response
from run import serve

async def length(request: Request) -> Response:
    return Response(str(len(await request.body())))

async def wait(request: Request) -> Response:
    await request.body()
    await request.receive()  # returns when the client has hung up
    ended.set()
    return Response()

async def when_ended(request: Request) -> Response:
    await ended.wait()
    return Response("ended")

ended = asyncio.Event()
app = FastAPI()
app.add_route("/", length, methods=["POST"])
app.add_route("/wait", wait)
app.add_route("/when-ended", when_ended)
listener = serve.listen("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
serve.serve(app, listener, exit_with_parent=True, header_seconds=float(sys.argv[1]))
"""
POST = b"POST / HTTP/1.1\r\nHost: x\r\n"
Connect = Callable[[], socket.socket]


@pytest.fixture
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
    """Yield a function that connects to a server process. The test's parameter is the time limit in seconds within
    which a request header must arrive."""
    command = [sys.executable, "-c", SERVER, str(request.param)]
    with (tmp_path / "log").open("w") as log:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=log, text=True
        )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        port = int(process.stdout.readline())
        yield lambda: socket.create_connection(("127.0.0.1", port), timeout=60)
        process.stdin.close()


def read_until(connection: socket.socket, end: bytes) -> bytes:
    """Return what the server sends until `end` arrives or the server closes the connection."""
    read = b""
    while not read.endswith(end) and (piece := connection.recv(2**16)):
        read += piece
    return read


@pytest.mark.parametrize("connect", [60], indirect=True)
@pytest.mark.parametrize(
    "start",
    [
        POST + b"X-Endless: ",  # a header that does not end
        POST
        + b"Content-Length: 1\r\n\r\nx"
        + POST
        + b"X-Endless: ",  # the second request of a connection
        POST
        + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX-Trailer: ",  # a trailer after the body
    ],
    ids=["first", "second", "trailer"],
)
def test_a_header_without_end_is_refused(connect: Connect, start: bytes) -> None:
    """In this test a client sends 32 MB of a header that does not end. The server closes the connection before the
    client has sent all 32 MB of the header."""
    with connect() as connection, pytest.raises(ConnectionError):
        connection.sendall(start + b"x" * 2**25)


@pytest.mark.parametrize("connect", [60], indirect=True)
def test_long_headers_and_long_bodies_are_served(connect: Connect) -> None:
    """A header of 60 KB and a body of 10 MB are below the limits, even if the body arrives in many chunks."""
    with connect() as connection:
        client = http.client.HTTPConnection("127.0.0.1")
        client.sock = connection
        for body in (b"x" * 10**7, itertools.repeat(b"xx", 10**5)):
            client.request("POST", "/", body, {"X-Long": "x" * 60_000}, encode_chunked=True)
            assert int(client.getresponse().read()) in (10**7, 2 * 10**5)


@pytest.mark.parametrize("connect", [1], indirect=True)
def test_a_header_that_does_not_arrive_in_time_ends_the_connection(connect: Connect) -> None:
    """If a client sends no complete request header within the time limit, the server closes the connection. The time
    limit also applies to the second request of a connection."""
    with connect() as silent, connect() as halted, connect() as second:
        second.sendall(POST + b"Content-Length: 1\r\n\r\nx")
        halted.sendall(POST)
        assert read_until(second, b"\r\n\r\n1")
        second.sendall(b"\r\n")
        assert not any(
            read_until(connection, b"nothing") for connection in (silent, halted, second)
        )


@pytest.mark.parametrize("connect", [60], indirect=True)
def test_malformed_requests_get_few_lines_in_the_log(connect: Connect, tmp_path: Path) -> None:
    """After 100 malformed requests the log has seven lines: for the requests number 1, 2, 4, ..., 64. Each line in the
    log shows the number of the malformed request."""
    for _ in range(100):
        with connect() as connection:
            connection.sendall(b"nonsense\r\n\r\n")
            assert read_until(connection, b"nothing").startswith(b"HTTP/1.1 400 ")
    lines = [
        line
        for line in (tmp_path / "log").read_text().splitlines()
        if "Invalid HTTP request" in line
    ]
    assert [line.rpartition("(")[2] for line in lines] == [f"{2**k} times)" for k in range(7)]


@pytest.mark.parametrize("connect", [60], indirect=True)
def test_a_request_that_does_not_wait_for_the_answer_ends_the_connection(connect: Connect) -> None:
    """In this test a client sends a second request before the first request is answered. The server refuses the second
    request and closes the connection. The handler of the first request gets the message that the client has
    disconnected."""
    with connect() as connection, connect() as other:
        connection.sendall(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
        assert read_until(connection, b"nothing").startswith(b"HTTP/1.1 400 ")
        other.sendall(b"GET /when-ended HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_until(other, b"ended").startswith(b"HTTP/1.1 200 ")


def test_the_keys_of_the_proxy_limit_a_header(tiny_server: str, tiny_model_dir: Path) -> None:
    """The keys rollout.openai.limits.header_bytes and header_seconds limit the length and the arrival time of a request
    header at the proxy."""
    command = [
        sys.executable,
        "proxy.py",
        "--server",
        tiny_server,
        "--model-path",
        str(tiny_model_dir),
    ]
    limits = '{"limits": {"header_bytes": 200, "header_seconds": 0.5}}'
    with server_process(
        *command, "--openai", limits, "--admin-key", "secret", out=subprocess.DEVNULL
    ) as (url, _):
        address = url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1])), timeout=60) as silent:
            assert silent.recv(1) == b""
        with socket.create_connection((address[0], int(address[1])), timeout=60) as long:
            long.sendall(b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * 300)
            assert b"The header is too long" in read_until(long, b"long.")
