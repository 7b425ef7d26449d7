"""Send random requests to every endpoint of the proxy and of the small server; both must survive.

    python bench/fuzz.py                            # 200,000 requests, seed 1 (`make soak`)
    python bench/fuzz.py --requests 5000 --seed 7   # send fewer requests, with another seed
    python bench/fuzz.py --only 4711                # send only request 4711 of seed 1

A random request is a valid one with random changes. Its body may have wrong types, deeply nested
lists, huge strings, missing or repeated fields, or damaged bytes. Its headers, method, path or key
may be wrong. Its sender may be slow, or close one half of the connection.

A complete request must get a reply with a status below 500 within 60 seconds. An incomplete request
may also get a closed connection. Meanwhile valid sessions run, and `check` of bench/load.py checks
their tokens. In the end the server must still have its first version, run nothing, and give the
same answer to one prompt as at the start. Requests that may change a server's state go to a second
server and proxy.
"""

import argparse
import asyncio
import collections
import contextlib
import copy
import itertools
import json
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastapi.routing import APIRoute
from load import ADMIN, allow_open_files, check, make_byte_model, process, session
from transformers import AutoTokenizer

from calls.client import OpenAIProxyClient
from inference.io_struct import EngineError
from inference.servers import Servers
from inference.tiny.server import create_app as create_server
from proxy import Proxy, create_app

NO_SCHEDULER: Any = SimpleNamespace(model=SimpleNamespace())  # only the routes are looked at
KEY, SECONDS, WORKERS = "key", 60, 24
TOOL = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CHAT = {
    "max_tokens": 4,
    "temperature": 1.0,
    "top_p": 0.9,
    "stream": False,
    "stop": ["x"],
    "metadata": {},
}
HONEST: dict[
    str, Any
] = {  # maps the last part of a URL path to a valid request body; unlisted paths get {}
    "completions": {
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "21"}]},
        ],
        **{"tools": [{"type": "function", "function": TOOL}], "tool_choice": "auto", "n": 1},
        **{
            "seed": 1,
            "response_format": {"type": "text"},
            "stream_options": {"include_usage": True},
        },
        **CHAT,
    },
    "responses": {
        "input": [
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "hello"}],
            },
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "21"},
        ],
        **{
            "instructions": "Be brief.",
            "max_output_tokens": 4,
            "tools": [{"type": "function"} | TOOL],
            "include": [],
        },
        **{
            "previous_response_id": None,
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "text"}},
        },
        **{"stream": False, "temperature": 1.0},
    },
    "messages": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": "21"}],
            },
        ],
        **{
            "system": "Be brief.",
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "stop_sequences": [],
        },
        **{"tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}, "top_k": 5},
        **CHAT,
    },
    "set_reward": {"reward": 1.0, "interaction_id": None},
    "end_session": {"discard": False},
    "export_trajectories": {"session_id": "@session", "style": "concat", "discount": 0.9},
    "start_session": {"task_id": "t"},
    "set_version": {"version": 0},
    "generate": {
        "sampling_params": {
            **{
                "max_new_tokens": 4,
                "temperature": 1.0,
                "top_p": 0.9,
                "top_k": 5,
                "stop": ["ab"],
                "n": 1,
            },
            **{
                "stop_token_ids": [7],
                "sampling_seed": 1,
                "ignore_eos": False,
                "frequency_penalty": 0.5,
            },
        },
        **{"input_ids": [1, 2, 3], "return_logprob": True, "rid": "r"},
    },
    "abort_request": {"rid": "r"},
    "pause_generation": {"mode": "retract"},
    "update_weights_from_disk": {"model_path": "none", "weight_version": "9"},
    "update_weight_version": {"new_version": "9", "abort_all_requests": True},
}
SAFE = (
    "generate",
    "abort_request",
    "server_info",
    "model_info",
    "health",
)  # endpoints that change no state
ODD = [
    None,
    True,
    False,
    0,
    -1,
    1.5,
    1e308,
    -1e-320,
    2**31,
    2**63,
    10**400,
    float("nan"),
    float("inf"),
]
ODD += [
    "",
    "x",
    "0",
    "\ud800",
    "\0",
    "\N{SNOWMAN}" * 9,
    "user",
    "tool",
    "function",
    "system",
    "required",
    "resp_1",
]
ODD += [
    [],
    {},
    [[]],
    [{}],
    {"": None},
    {"type": "text"},
    {"type": "json_schema"},
    {"role": "user"},
    ["a", 1, None],
]
HEADERS = [
    *(
        "Content-Type: application/xml",
        "Expect: 100-continue",
        "Connection: upgrade\r\nUpgrade: websocket",
    ),
    *(
        "Content-Length: 1",
        "Content-Length: -1",
        "Content-Length: 9e9",
        "Transfer-Encoding: chunked",
        "Host: \xff\0",
    ),
    *(
        "x-stainless-retry-count: \xff",
        "x-stainless-retry-count: 1",
        "x-api-key: \xe4",
        "Cookie: " + "c" * 9000,
    ),
    *(
        "Authorization: Basic x",
        "Authorization: Bearer \xff\xfe",
        "Authorization",
        ": empty",
        " folded: line",
    ),
    *(
        "Accept-Encoding: " + ", ".join(["gzip"] * 500),
        "\r\n".join(f"h{k}: v" for k in range(300)),
        "Range: bytes=5-2",
    ),
]
PATHS = [
    "/",
    "//",
    "/../..",
    "/%00",
    "/%ff%fe",
    "/" + "a" * 5000,
    "/v1",
    "/{}/v1",
    "/?a=%zz",
    "*",
    "http://[/",
    "no slash",
]


def odd(rng: random.Random) -> Any:
    """Return a value that the body of a valid request rarely contains. "@deep900" stands for 900
    nested lists."""
    if rng.random() < 0.03:
        return f"@deep{rng.choice([50, 220, 900, 100_000])}"
    return (
        "y" * 10 ** rng.choice([2, 3, 4, 6])
        if rng.random() < 0.01
        else copy.deepcopy(rng.choice(ODD))
    )


def mutate(rng: random.Random, value: Any) -> Any:
    """Return a JSON value with one random change."""
    if not (value and isinstance(value, dict | list)) or rng.random() < 0.05:
        return odd(rng)
    key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    what = rng.random()
    if what < 0.6:
        value[key] = mutate(rng, value[key])
    elif what < 0.75:
        del value[key]
    elif isinstance(value, list):
        value.insert(key, copy.deepcopy(rng.choice([value[key], odd(rng)])))
    else:
        value[rng.choice(["type", "content", "name", "stream", "n", "id", "\0"])] = odd(rng)
    return value


def body_of(rng: random.Random, name: str, session_id: str) -> bytes:
    """Return the random body of a request to the endpoint `name`."""
    body = copy.deepcopy(HONEST.get(name, {}))
    for _ in range(rng.choice([0, 1, 1, 2, 5])):
        body = mutate(rng, body)
    raw = re.sub(r'"@deep(\d+)"', lambda m: "[" * int(m[1]) + "]" * int(m[1]), json.dumps(body))
    raw = raw.replace("@session", session_id).encode()
    kind = rng.randrange(12)
    if kind == 0:
        return raw[: rng.randrange(len(raw) + 1)]
    if kind == 1:
        at = rng.randrange(len(raw) + 1)
        return raw[:at] + rng.randbytes(rng.randint(1, 3)) + raw[at + 1 :]
    if kind == 2:
        return raw.decode().encode(rng.choice(["utf-16", "utf-32", "utf-8-sig"]))
    return rng.randbytes(rng.randrange(40)) if kind == 3 else raw


def request_of(
    rng: random.Random, method: str, path: str, key: str, session_id: str
) -> tuple[bytes, bool]:
    """Return the bytes of a random request, and whether they are a complete and valid HTTP request.

    `method` is the endpoint's HTTP method.
    """
    name = path.rpartition("/")[2]
    session_id = (
        session_id if rng.random() < 0.95 else rng.choice(["x", "%00", "..", "v1", "a" * 3000])
    )
    path = re.sub(r"\{session_id\}", session_id, path)
    path = re.sub(
        r"\{\w+(:path)?\}", rng.choice(["resp_1", "%2e%2e", "chatcmpl-" + "0" * 32]), path
    )
    path, valid = (path, True) if rng.random() < 0.95 else (rng.choice(PATHS), False)
    raw = body_of(rng, name, session_id)
    method = (
        method
        if rng.random() < 0.9
        else rng.choice(["GET", "PUT", "HEAD", "OPTIONS", "DELETE", "FOO", ""])
    )
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: x",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(raw)}",
    ]
    lines += [
        f"Authorization: Bearer {key if rng.random() < 0.9 else rng.choice(['wrong', ADMIN * 99])}"
    ]
    if rng.random() < 0.1:
        lines.insert(rng.randint(1, len(lines)), rng.choice(HEADERS))
        valid = False
    if rng.random() < 0.02:
        lines[0] = rng.choice(
            [f"{method} {path}", f"{method} {path} HTTP/1.0", f"{method}  {path} HTTP/9.9", "\0"]
        )
        valid = False
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + raw, valid and method not in (
        "FOO",
        "",
    )


async def send(rng: random.Random, port: int, raw: bytes, complete: bool) -> bytes | None:
    """Send a request, sometimes slowly or only in part. Return the reply, or None if this function
    closed the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    try:
        cut = rng.random() < 0.05
        raw = raw[: rng.randrange(len(raw))] if cut else raw
        pieces = [raw] if rng.random() < 0.97 else [raw[:5], raw[5:40], raw[40:]]
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02 * (len(pieces) > 1))
        if cut and rng.random() < 0.5:
            return None
        if cut or not complete or rng.random() < 0.03:
            complete = False
            writer.write_eof()
        reply = await reader.read()
    except OSError:
        reply = b""
    finally:
        writer.close()
    # If a server refuses a long request before it has read the whole body, the reply may be lost.
    if complete and not reply and len(raw) < 2**16:
        raise AssertionError("the connection was closed without a reply")
    return reply


def status_of(reply: bytes | None) -> str:
    """Return the status of a reply as text. A stream that contains a server error counts as status
    500."""
    found = re.match(rb"HTTP/1\.1 (?:100 [^\r]*\r\n\r\nHTTP/1\.1 )?(\d{3})", reply or b"")
    error = b'"server_error"' in (reply or b"")
    return (
        "hung up" if reply is None else "500" if error else found[1].decode() if found else "closed"
    )


class Fuzz:
    """Send random requests to the processes, and count the replies of each endpoint by status."""

    def __init__(self, seed: int, addresses: dict[str, str], tokenizer: Any) -> None:
        self.seed, self.addresses, self.tokenizer = seed, addresses, tokenizer
        self.wire, self.proxy, self.honest = Servers(""), Servers(addresses["proxy"], ADMIN), 0
        self.targets = []
        for app in (create_app(Proxy(None, tokenizer, "")), create_server(NO_SCHEDULER)):
            for route in app.routes:
                method, name = min(route.methods - {"HEAD"}), route.path[1:]
                if isinstance(route, APIRoute):  # the server's, four times: it gets more requests
                    where, key, count = "server" if name in SAFE else "control server", KEY, 4
                else:
                    where, key, count = "proxy", ADMIN, 1
                    where = "control proxy" if name == "set_version" else where
                self.targets += [(where, key, method, route.path)] * count
        self.counts: dict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )

    async def one(self, number: int, session_id: str, other_id: str) -> None:
        """Send request `number`. Raises SystemExit if the reply breaks a rule of the module's
        docstring.

        Requests that may end a session go to the session `other_id`.
        """
        rng = random.Random(f"{self.seed}.{number}")
        where, key, method, path = rng.choice(self.targets)
        chosen = other_id if path.endswith(("end_session", "export_trajectories")) else session_id
        raw, complete = request_of(rng, method, path, key, chosen)
        begin = time.monotonic()
        try:
            async with asyncio.timeout(SECONDS):
                reply = await send(
                    rng, int(self.addresses[where].rpartition(":")[2]), raw, complete
                )
            status = status_of(reply)
        except (TimeoutError, AssertionError, OSError) as error:
            reply, status = (
                b"",
                f"{type(error).__name__} {error} after {time.monotonic() - begin:.0f} s",
            )
        self.counts[f"{where} {path.rpartition('/')[2]}"][status] += 1
        if status not in ("closed", "hung up") and not "100" <= status < "500":
            raise SystemExit(
                f"seed {self.seed}, request {number}: {status}\n{raw[:3000]!r}\n{reply!r}"
            )

    async def work(self, numbers: Any) -> None:
        """Send the requests whose numbers come from the iterator `numbers`, which all workers
        share. Start two new sessions for every hundred requests."""
        while batch := list(itertools.islice(numbers, 100)):
            with contextlib.suppress(
                EngineError
            ):  # a random request may already have exported the session of `other`
                async with await self.client() as client, await self.client() as other:
                    for number in batch:
                        await self.one(number, client.session_id, other.session_id)

    async def client(self) -> OpenAIProxyClient:
        """The client of a new session. Random requests take grants, too, so it sends several."""
        client = OpenAIProxyClient(self.proxy, "fuzz")
        for _ in range(10):
            await client.grant_capacity()
        return client

    async def stay_honest(self, done: asyncio.Event) -> None:
        """Run valid sessions one after another until `done` is set, and then one more valid
        session."""
        last = False
        while not last:
            last = done.is_set()
            number = 10**6 + self.honest
            row = await session(self.wire, self.proxy, number, 3, [])
            check(self.tokenizer, *row)
            self.honest += 1

    async def state(self) -> Any:
        """Wait until the server has no request. Return its version, and its greedy answer to a
        prompt."""
        server, wire = self.addresses["server"], Servers("", KEY)
        async with asyncio.timeout(SECONDS):
            while True:
                info = await wire.call(server + "/server_info")
                if info["running"] == info["waiting"] == 0:
                    break
                await asyncio.sleep(0.2)
        body = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 9}}
        return info["weight_version"], (await wire.call(server + "/generate", body))["output_ids"]

    async def run(self, requests: int, only: int | None) -> None:
        """Send all random requests, or only request number `only`. Check the valid sessions and the
        server's state."""
        before, done = await self.state(), asyncio.Event()
        numbers = iter(range(requests) if only is None else [only])
        honest = asyncio.ensure_future(self.stay_honest(done))
        try:
            await asyncio.gather(*(self.work(numbers) for _ in range(WORKERS)))
        finally:
            done.set()
        await honest
        assert (after := await self.state()) == before, (before, after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="send only the request with this number")
    args, start = parser.parse_args(), time.monotonic()
    allow_open_files()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = make_byte_model(Path(folder) / "model")
        addresses, logs = {}, [Path(folder) / f"{k}.log" for k in range(4)]
        for name, one, other in (("", *logs[:2]), ("control ", *logs[2:])):
            server, _ = stack.enter_context(
                process("inference.tiny.server", path, "--api-key", KEY, log=one)
            )
            words = ["--server", server, "--server-key", KEY, "--admin-key", ADMIN]
            proxy, _ = stack.enter_context(process("proxy", path, *words, log=other))
            addresses |= {f"{name}server": server, f"{name}proxy": proxy}
        fuzz = Fuzz(args.seed, addresses, AutoTokenizer.from_pretrained(path))
        try:
            asyncio.run(fuzz.run(args.requests, args.only))
        finally:
            logged = "".join(log.read_text() for log in logs)
            print(
                logged[logged.find("Traceback") :][:6000] if "Traceback" in logged else "",
                file=sys.stderr,
            )
        assert "Traceback" not in logged, "a process has logged an error"
    statuses = sorted({status for counts in fuzz.counts.values() for status in counts})
    print(f"| endpoint | {' | '.join(statuses)} |\n|{'---|' * (len(statuses) + 1)}")
    for endpoint, counts in sorted(fuzz.counts.items()):
        print(f"| {endpoint} | {' | '.join(str(counts[status]) for status in statuses)} |")
    sent = sum(counts.total() for counts in fuzz.counts.values())
    print(
        f"seed {args.seed}: {sent} requests in {time.monotonic() - start:.0f} s, none without an answer, no status 5xx"
    )
    print(
        f"{fuzz.honest} honest sessions beside them; the server's version, state and answer are unchanged"
    )


if __name__ == "__main__":
    main()
