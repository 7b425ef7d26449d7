"""How a server process of this project starts and ends: it takes its port first, and dies with its parent.

A server binds 127.0.0.1 unless told otherwise. The functions raise OSError and ValueError with one line that says
what to do; printing it is the script's business.
"""

import contextlib
import os
import socket
import sys
import threading
from typing import Any

import orjson
import uvicorn
from fastapi import FastAPI, Response

from run.fields import Refusal, as_object


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, taken before anything slow is done. Raises OSError."""
    if not 0 <= port < 65536:  # the system would leave an open socket behind
        raise OSError(f"--port {port}: a number from 0 (any free port) to 65535 is needed")
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise OSError(f"--port {port}: cannot listen on {host}: {error.strerror}") from error


def serve(app: FastAPI, listener: socket.socket, exit_with_parent: bool) -> None:
    """Serve until a signal, or until standard input is closed, which it is when the parent has died."""
    # An idle connection is closed by its client, long before the server would: who closes first while a request is on
    # its way makes it fail.
    options: dict[str, Any] = {"timeout_keep_alive": 75, "timeout_graceful_shutdown": 2}
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, **options))

    def follow_parent() -> None:
        while os.read(0, 4096):  # not sys.stdin, which would be locked when the process ends
            pass
        server.should_exit = True

    if exit_with_parent:
        threading.Thread(target=follow_parent, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])


def read_object(raw: bytes) -> dict[str, Any]:
    """A request's body as a JSON object, whatever its content type says; no body is an empty one. Raises Refusal."""
    try:
        return as_object(orjson.loads(raw or b"{}"), "body")
    except orjson.JSONDecodeError as error:
        raise Refusal(f"body: malformed JSON: {error}") from error


def reply(body: Any, status: int = 200) -> Response:
    """`body` as JSON."""
    headers = {"retry-after": "1"} if status in (429, 503) else None  # the two that say: try again
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def load_tokenizer(model_path: str) -> Any:
    """The tokenizer of a model folder. transformers would import torch, which takes seconds and serves nothing."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        reason = str(error) if os.path.isdir(model_path) else "no such folder"
        raise ValueError(f"--model-path {model_path}: no tokenizer there: {reason}") from error
