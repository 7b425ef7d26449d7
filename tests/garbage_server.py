"""An inference server that answers POST /generate with garbage. Tests run the garbage server as a process beside a
healthy server.

    python tests/garbage_server.py --model-path DIR --port 30001

When an engine starts, it sends one test request to each server. The garbage server answers the first POST /generate
correctly, so that an engine can start. If a trainer and a proxy use the garbage server, start it with `--honest 2`,
because each of the two has an engine. After its correct answers, the garbage server answers POST /generate with each
entry of `KINDS` in turn, and then begins again with the first entry. A request to a path other than /generate gets a
correct answer, so a health check of this server always succeeds. The server reports the version of the last weight
update. The field `seen` of GET /server_info is the number of requests that got garbage.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

Json = dict[str, Any]
NEVER = (
    b"never"  # at this item of an answer, the server stops sending and keeps the connection open
)


def http(body: bytes, status: str = "200 OK", length: int | None = None, *headers: str) -> bytes:
    """Return an HTTP answer. `length` is the Content-Length, by default the length of `body`."""
    lines = [
        f"HTTP/1.1 {status}",
        f"content-length: {len(body) if length is None else length}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def answer(ids: list[Any], change: Callable[[Json, Json], Any] = lambda body, meta: None) -> bytes:
    """Return the body of an answer with these token ids. `change(body, meta_info)` may modify the body and its
    `meta_info`."""
    spans = [{"version": "0", "start": 0, "end": len(ids)}]
    meta: Json = {"finish_reason": {"type": "length", "length": len(ids)}, "weight_version": "0"}
    meta |= {
        "output_token_logprobs": [[-1.0, token, None] for token in ids],
        "weight_versions": spans,
    }
    body: Json = {"text": "", "output_ids": ids, "meta_info": meta}
    change(body, meta)
    return json.dumps(body).encode()


def changed(**fields: Any) -> bytes:
    """Return an HTTP answer with the token ids 1 and 2. The given fields replace fields of the answer's `meta_info`."""
    return http(answer([1, 2], lambda body, meta: meta.update(fields)))


def event(*bodies: bytes) -> bytes:
    """Return an HTTP answer with these server-sent events and no Content-Length."""
    head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\r\n"
    return head + b"".join(b"data: " + body + b"\n\n" for body in bodies)


HONEST = answer([1, 2])
KINDS: dict[
    str, bytes | list[bytes]
] = {  # the server sends the items of a list one by one, and repeats the last item for ever
    "no JSON": http(b"\xff{]"),
    "an empty body": http(b""),
    "a JSON list": http(b"[1, 2]"),
    "a JSON object of another kind": http(b'{"meta_info": []}'),
    "ids that are null": http(
        b'{"meta_info": {"finish_reason": null, "weight_version": "0"}, "output_ids": null}'
    ),
    "entries that are too short": changed(output_token_logprobs=[[-1.0], [-1.0]]),
    "an answer within a list": http(b"[" + HONEST + b"]"),
    "no HTTP": b"garbage\r\n\r\n",
    "a closed connection": b"",
    "a cut body": http(HONEST)[:-20],
    "a length that is too large": http(HONEST, length=len(HONEST) + 9),
    "a length that is too small": http(HONEST, length=len(HONEST) - 9),
    "a negative length": http(HONEST, length=-9),
    "broken chunks": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nabc",
    "broken compression": http(HONEST, "200 OK", None, "content-encoding: gzip"),
    "status 500 with HTML": http(
        b"<html>\n<h1>Oops</h1>\n</html>", "500 Internal Server Error", None
    ),
    "status 302": http(b"", "302 Found", None, "location: http://127.0.0.1:1/"),
    "a status that is no number": b"HTTP/1.1 abc OK\r\n\r\n",
    "an id outside of the vocabulary": http(answer([1, 10**6])),
    "a negative id": http(answer([1, -1])),
    "ids that are numbers with a fraction": http(answer([1.0, 2.5])),
    "more tokens than requested": http(answer([1] * 3000)),
    "no log-probabilities": changed(output_token_logprobs=None),
    "a positive log-probability": changed(output_token_logprobs=[[5.0, 1, None], [-1.0, 2, None]]),
    "a log-probability beyond float32": changed(
        output_token_logprobs=[[-1e300, 1, None], [-1.0, 2, None]]
    ),
    "other ids beside the log-probabilities": changed(
        output_token_logprobs=[[-1.0, 1, None], [-1.0, 3, None]]
    ),
    "falling versions": changed(
        weight_versions=[
            {"version": "1", "start": 0, "end": 1},
            {"version": "0", "start": 1, "end": 2},
        ]
    ),
    "a version of the future": changed(weight_versions=[{"version": "999", "start": 0, "end": 2}]),
    "a version beyond int32": changed(
        weight_versions=[{"version": str(10**30), "start": 0, "end": 2}]
    ),
    "a span without end": changed(weight_versions=[{"version": "0", "start": 0, "end": 10**12}]),
    "events that are no JSON": event(b"{]", b"[]"),
    "an event stream that is cut": event()[:-1],
    "events with an id outside of the vocabulary": event(*(answer([10**6] * n) for n in (1, 2, 3))),
    "an endless body": [http(b"", length=10**12), b"x" * 2**16],
    "an endless event": [event() + b"data: ", b"x" * 2**16],
    "an endless header": [b"HTTP/1.1 200 OK\r\nx-endless: ", b"x" * 2**16],
    "nothing": [NEVER],
}


def honest_answer(path: str, model_path: str, version: str, seen: int) -> bytes:
    """Return the answer to a request whose path is not /generate."""
    info = {
        "model_path": model_path,
        "max_req_input_len": 2048,
        "weight_version": version,
        "success": True,
    }
    return (
        http(b"", "404 Not Found")
        if path == "/workers"
        else http(json.dumps(info | {"seen": seen}).encode())
    )


async def serve(port: int, model_path: str, honest: int, names: Iterator[str]) -> None:
    """Serve until the process ends. `honest` is the number of POST /generate requests that get a correct answer before
    the first garbage. `names` yields the keys of KINDS in the order in which the server uses them."""
    requests = itertools.count()
    version, seen = "0", 0

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal version, seen
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = head.partition("content-length: ")[2].partition("\r\n")[0]
                body = json.loads(await reader.readexactly(int(length or 0)) or b"{}")
                path = head.split()[1]
                if path != "/generate":
                    version = body.get("new_version") or body.get("weight_version") or version
                    writer.write(honest_answer(path, model_path, version, seen))
                    continue
                if next(requests) < honest:
                    writer.write(http(answer([1])))
                    continue
                seen += 1
                name = next(names)
                print(name, flush=True)
                kind = KINDS[name]
                pieces = (
                    iter([kind])
                    if isinstance(kind, bytes)
                    else itertools.chain(kind, itertools.repeat(kind[-1]))
                )
                for piece in pieces:
                    if piece is NEVER:
                        await reader.read()  # read() returns when the client closes the connection
                        return
                    writer.write(piece)
                    await writer.drain()
                return

    async with await asyncio.start_server(connection, "127.0.0.1", port) as server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--honest", type=int, default=1)
    parser.add_argument(
        "--exit-with-parent", action="store_true", help="end when standard input is closed"
    )
    args = parser.parse_args()
    main_thread = threading.Thread(
        target=lambda: asyncio.run(
            serve(args.port, args.model_path, args.honest, itertools.cycle(KINDS))
        ),
        daemon=True,
    )
    main_thread.start()
    if args.exit_with_parent:
        sys.stdin.read()
    else:
        main_thread.join()


if __name__ == "__main__":
    main()
