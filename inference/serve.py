"""Serve a web application (the proxy or the small inference server) from its own process.

The port is opened before a model is loaded, so that a port in use is reported at once. A server
binds 127.0.0.1 by default. Without a key, it refuses an address that other machines can reach. With
--exit-with-parent, it ends when its parent's id changes, which it checks every half second. A pipe
that closes when the parent ends would not do, because children that an agent forks would inherit it
and keep it open.
"""

import gc
import os
import resource
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import orjson
import uvicorn
from fastapi import FastAPI, Request, Response

from inference.fields import Refusal, as_object

_given = set[int]()  # ports that free_port has returned


def free_port() -> int:
    """Return a free port from 20000 to 31999, a range that outgoing connections do not use. No port
    is returned twice, because the process that gets it binds it only later."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            if port not in _given:
                _given.add(port)
                return port


def listen(host: str, port: int, key: str | None = None) -> socket.socket:
    """Return a listening socket. Raises OSError if the port is in use, or if `host` is public and
    there is no key."""
    if not key and host not in ("127.0.0.1", "localhost"):
        raise OSError(f"--host {host}: others can reach this address, so a key is needed (--help)")
    return socket.create_server((host, port), backlog=4096)


def raise_open_files() -> None:
    """Raise the limit on open files for this process and its children. The usual limit of
    1,024 is too low for 1,000 requests in flight, because the proxy needs two connections for each
    request: to the agent and to the server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2**16)), hard))


def follow_parent(act: Callable[[], None]) -> None:
    """Start a thread that calls `act` when the parent process has ended."""
    # If the trainer is killed before this line, getppid returns another process's pid, so the
    # trainer passes its own.
    parent = int(os.environ.get("POCKET_AREAL_PARENT", os.getppid()))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        act()

    threading.Thread(target=watch, daemon=True).start()


def serve(app: FastAPI, listener: socket.socket, exit_with_parent: bool) -> None:
    """Serve until a signal comes or, with `exit_with_parent`, the parent ends."""
    # We close idle connections after 75 s. Clients close them earlier, so they never send a request
    # on a connection that we are closing.
    config = uvicorn.Config(
        app, log_level="warning", timeout_keep_alive=75, timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(config)
    raise_open_files()
    # A garbage collection of old objects would visit every token of every session, which can take a
    # second. So the collector visits only young objects.
    gc.set_threshold(gc.get_threshold()[0], 1, 10**9)
    if exit_with_parent:
        follow_parent(lambda: setattr(server, "should_exit", True))
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listener])


def bearer(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def check_key(request: Request, key: str) -> None:
    """Raise Refusal with status 401 for a missing key, 403 for a wrong one."""
    given = bearer(request)
    if not secrets.compare_digest(given.encode(), key.encode()):
        raise Refusal("Authorization: `Bearer <key>` is needed", 403 if given else 401)


def read_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a body, or {} if the body is empty."""
    try:
        return as_object(orjson.loads(raw or b"{}"), "body")
    except orjson.JSONDecodeError as error:
        raise Refusal(f"body: malformed JSON: {error}") from error


def reply(body: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def load_tokenizer(model_path: str) -> Any:
    """Load a model folder's tokenizer without importing torch, which would take seconds."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model-path {model_path}: no tokenizer there: {error}") from error
