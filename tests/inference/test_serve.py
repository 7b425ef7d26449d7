"""A server process: who may reach it, what it refuses, and that it ends with its parent."""

import http.client
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from conftest import ROOT
from fastapi import Request

from inference.fields import Refusal
from inference.serve import bearer, check_key, listen

SERVER = """
from fastapi import FastAPI, Request, Response
from inference import serve

async def length(request: Request) -> Response:
    return Response(str(len(await request.body())))

app = FastAPI()
app.add_route("/", length, methods=["POST"])
listener = serve.listen("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
serve.serve(app, listener, exit_with_parent=True)
"""
PARENT = """
import os, subprocess, sys, time
if os.fork() == 0:  # as an agent may do; it has all open files
    time.sleep(60)
    os._exit(0)
subprocess.Popen(sys.argv[1:], stdout=sys.stdout)
time.sleep(60)
"""


@pytest.fixture
def parent() -> Iterator[Any]:
    """A function that starts a process with a command as its child, and returns the process."""
    started: list[subprocess.Popen] = []

    def start(*command: str) -> subprocess.Popen:
        words = [sys.executable, "-c", PARENT, *command]
        pipe: Any = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
        started.append(subprocess.Popen(words, cwd=ROOT, **pipe))
        return started[-1]

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        with process:
            pass


def test_a_server_serves_long_bodies_and_ends_with_its_parent(parent: Any) -> None:
    """The server ends even if a forked child of the killed parent keeps every file open."""
    process = parent(sys.executable, "-c", SERVER)
    port = int(process.stdout.readline())
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    client.request("POST", "/", b"x" * 10**7, {"X-Long": "x" * 60_000})
    assert int(client.getresponse().read()) == 10**7
    process.kill()
    client.close()
    with suppress(ConnectionError):
        while True:
            socket.create_connection(("127.0.0.1", port), timeout=60).close()


def test_a_server_whose_parent_is_gone_already_ends() -> None:
    """The parent was killed while its child was still importing."""
    variables = os.environ | {"POCKET_AREAL_PARENT": "0"}
    subprocess.run([sys.executable, "-c", SERVER], cwd=ROOT, env=variables, timeout=100, check=True)


def test_a_command_ends_with_its_parent(parent: Any) -> None:
    """inference/process.py ends a command that knows nothing of this, such as SGLang."""
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    process = parent(sys.executable, "-m", "inference.process", sys.executable, "-c", code)
    child = int(process.stdout.readline())
    process.kill()
    with suppress(ProcessLookupError):
        while True:
            os.kill(child, 0)


@pytest.mark.parametrize("ending", ["exit", "SIGTERM"])
def test_the_code_of_a_command_comes_back(ending: str) -> None:
    """It exits with the code of its command. SIGTERM ends the whole process group."""
    code = "import sys, time; print(1, flush=True); 'exit' in sys.argv and sys.exit(3);"
    code += "time.sleep(60)"
    words = [sys.executable, "-m", "inference.process", sys.executable, "-c", code, ending]
    pipe: Any = {"stdout": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen(words, cwd=ROOT, **pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        if ending == "SIGTERM":
            process.terminate()
        assert process.wait(60) == (3 if ending == "exit" else -signal.SIGKILL)


@pytest.mark.parametrize(
    ("host", "port", "why"),
    [
        ("0.0.0.0", 0, "--host 0.0.0.0: others can reach this address, so a key is needed"),
        ("127.0.0.1", None, "in use"),
    ],
)
def test_where_a_server_may_not_listen(host: str, port: int | None, why: str) -> None:
    """An address that others reach needs a key, and a port must be free."""
    with listen("127.0.0.1", 0) as taken, pytest.raises(OSError, match=why):
        listen(host, taken.getsockname()[1] if port is None else port)
    listen("0.0.0.0", 0, "key").close()


def asked(*authorization: str) -> Request:
    headers = [(b"authorization", word.encode()) for word in authorization]
    return Request({"type": "http", "headers": headers})


def test_a_key_is_asked_for() -> None:
    """401 says that a key is missing, and 403 that it is wrong."""
    check_key(asked("Bearer k3y"), "k3y")
    assert bearer(asked("bearer  k3y ")) == "k3y"
    for request, status in ((asked(), 401), (asked("Basic k3y"), 401), (asked("Bearer é"), 403)):
        with pytest.raises(Refusal, check=lambda it, s=status: it.status == s):  # type: ignore[misc]
            check_key(request, "k3y")
