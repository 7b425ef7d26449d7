"""Start and end a server process: it takes its port first, and it ends when its parent process dies.

The proxy and the small inference server (inference/tiny) share these functions. A server binds 127.0.0.1 by default. If
something prevents its start, the functions raise OSError or ValueError with one line that says what to do; the script
prints this line.
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
    """Return a listening socket. A server calls this before it loads anything, so a port in use is reported at once.

    Raises OSError if the port cannot be taken.
    """
    if not 0 <= port < 65536:  # create_server would raise too, but leave its socket open
        raise OSError(f"--port {port}: a number from 0 (any free port) to 65535 is needed")
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise OSError(f"--port {port}: cannot listen on {host}: {error.strerror}") from error


def serve(app: FastAPI, listener: socket.socket, exit_with_parent: bool) -> None:
    """Serve `app` until a signal. With `exit_with_parent`, also stop when standard input is closed.

    The parent holds the other end of standard input, so it closes when the parent dies.
    """
    # Clients close an idle connection long before 75 s. If the server closed it first, a request that a client is just
    # sending over this connection would fail.
    options: dict[str, Any] = {"timeout_keep_alive": 75, "timeout_graceful_shutdown": 2}  # seconds
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, **options))

    def follow_parent() -> None:
        while os.read(0, 4096):  # sys.stdin would hold a lock, at which the process would hang when it ends
            pass
        server.should_exit = True

    if exit_with_parent:
        threading.Thread(target=follow_parent, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])


def read_object(raw: bytes) -> dict[str, Any]:
    """Return a request's body as a JSON object; an empty body is {}. Ignores the content type. Raises Refusal."""
    try:
        return as_object(orjson.loads(raw or b"{}"), "body")
    except orjson.JSONDecodeError as error:
        raise Refusal(f"body: malformed JSON: {error}") from error


def reply(body: Any, status: int = 200) -> Response:
    """Return a response with `body` as JSON. For 429 and 503 it asks the client to try again after one second."""
    headers = {"retry-after": "1"} if status in (429, 503) else None
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def load_tokenizer(model_path: str) -> Any:
    """Return the tokenizer of a model folder. Raises ValueError if there is none.

    transformers imports torch if it can. That takes seconds and a tokenizer does not need it, so torch is hidden here.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        reason = str(error) if os.path.isdir(model_path) else "no such folder"
        raise ValueError(f"--model-path {model_path}: no tokenizer there: {reason}") from error
