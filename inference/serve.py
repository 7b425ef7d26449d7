"""Serve a web application (the proxy or the small inference server) from its own process.

The port is opened before a model is loaded, so that a port in use is reported at once. A server
binds 127.0.0.1 by default.
"""

import gc
import os
import secrets
import socket
import sys
from contextlib import suppress
from typing import Any

import orjson
import uvicorn
from fastapi import FastAPI, Request, Response

from inference.fields import Refusal, as_object
from inference.process import follow_parent, raise_open_files


def listen(host: str, port: int, key: str | None = None) -> socket.socket:
    """Open the port, and return its socket. Raises OSError if the port is in use, or if there is no
    key and other machines can reach `host`."""
    if not key and host not in ("127.0.0.1", "localhost"):
        raise OSError(f"--host {host}: others can reach this address, so a key is needed (--help)")
    return socket.create_server((host, port), backlog=4096)


def serve(app: FastAPI, listener: socket.socket, exit_with_parent: bool) -> None:
    # We keep idle connections for 75 s, longer than clients do. So no client sends a request on a
    # connection that we are closing.
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
    given = bearer(request)
    if not secrets.compare_digest(given.encode(), key.encode()):
        raise Refusal("Authorization: `Bearer <key>` is needed", 403 if given else 401)


def read_object(raw: bytes) -> dict[str, Any]:
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
