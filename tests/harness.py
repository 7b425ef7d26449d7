"""A proxy in the test's own process, with a scripted engine. Tests talk to it over HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import orjson

from calls.client import sdk_http
from calls.messages import read_request
from inference.io_struct import ModelRequest, ModelResponse
from proxy import Proxy, create_app

ADMIN = {"Authorization": "Bearer admin"}
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def response_to(request: ModelRequest, output: list[int], version: int, cut: bool) -> ModelResponse:
    """A response with these tokens, all of this version; with `cut`, the length limit ended it."""
    n, gconfig = len(output), request.gconfig
    fields: Any = {"temperature": gconfig.temperature, "trains_exactly": gconfig.trains_exactly}
    said = output, [-0.25] * n, [version] * n, "length" if cut else "stop"
    return ModelResponse(list(request.input_ids), *said, **fields)


class ScriptedEngine:
    """An engine that answers each call with the next of the given texts, and keeps the requests.

    A text that ends with "…" is cut off by length. While `hold` is an event, a generation waits for
    it.
    """

    def __init__(self, tokenizer: Any, *texts: str) -> None:
        self.tokenizer = tokenizer
        self.texts = list(texts)
        self.requests: list[Any] = []
        self.error: Exception | None = None
        self.hold: asyncio.Event | None = None
        self.started, self.cancelled = asyncio.Event(), asyncio.Event()

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Answer with the next text, or with "ok" if none is left."""
        self.requests.append(request)
        self.started.set()
        if self.error:
            raise self.error
        text = self.texts.pop(0) if self.texts else "ok"
        cut = text.endswith("…")
        output = self.tokenizer.encode(text.removesuffix("…"))
        output += [] if cut else [self.tokenizer.eos_token_id]
        if self.hold:
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        return response_to(request, output, 4, cut)


class Harness:
    """A proxy in this process, its HTTP client, and its engine, by default a scripted one."""

    def __init__(self, tokenizer: Any, *texts: str, engine: Any = None, **options: Any) -> None:
        self.engine = engine or ScriptedEngine(tokenizer, *texts)
        self.proxy = Proxy(self.engine, tokenizer, "admin", **options)
        self.app = create_app(self.proxy)
        transport = httpx.ASGITransport(self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://proxy")

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return await self.http.post(path, json={} if body is None else body, **kwargs)

    async def start(self, task_id: str = "task", **options: Any) -> str:
        """Start a session and return its id."""
        assert (await self.post("/grant_capacity", headers=ADMIN)).status_code == 200
        body = {"task_id": task_id} | options
        answer = await self.post("/rl/start_session", body, headers=ADMIN)
        assert answer.status_code == 200, answer.text
        return answer.json()["session_id"]

    async def chat(self, session: str, messages: list[dict], **body: Any) -> dict[str, Any]:
        """Return the reply to a chat completion of the session."""
        answer = await self.post(f"/{session}/v1/chat/completions", {"messages": messages, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def export(self, session: str, **body: Any) -> dict[str, Any]:
        """End the session and return its exported interactions."""
        assert (await self.post(f"/{session}/rl/end_session")).status_code == 200
        body |= {"session_id": session}
        answer = await self.post("/export_trajectories", body, headers=ADMIN)
        assert answer.status_code == 200, answer.text
        return answer.json()["interactions"]


class Connection:
    """One POST request that reaches the proxy without an HTTP client. A test can hang up early, or
    read the reply piece by piece."""

    def __init__(
        self, harness: Harness, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> None:
        self.pieces: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.gone = asyncio.Event()
        self.unread = [{"type": "http.request", "body": orjson.dumps(body), "more_body": False}]
        raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b""}
        call = harness.app(scope | {"headers": raw}, self._receive, self.pieces.put)  # type: ignore[arg-type]
        self.task = asyncio.ensure_future(call)

    async def _receive(self) -> dict[str, Any]:
        if self.unread:
            return self.unread.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def hang_up(self) -> None:
        """Close the connection and wait until the proxy has ended the request."""
        self.gone.set()
        await asyncio.wait_for(self.task, timeout=30)

    async def status(self) -> int:
        """Wait for the headers of the reply and return the reply's status."""
        return (await asyncio.wait_for(self.pieces.get(), timeout=30))["status"]

    async def read(self) -> bytes:
        """Return the next piece of the body, or b"" at the end."""
        return (await asyncio.wait_for(self.pieces.get(), timeout=30))["body"]

    async def rest(self) -> bytes:
        """Wait for the end of the reply, and return what `read` has not returned yet."""
        await asyncio.wait_for(self.task, timeout=30)
        pieces = [self.pieces.get_nowait() for _ in range(self.pieces.qsize())]
        return b"".join(piece.get("body", b"") for piece in pieces)


@asynccontextmanager
async def sdk(harness: Harness, path: str, key: str = "DUMMY") -> AsyncIterator[openai.AsyncOpenAI]:
    """An OpenAI client of this path. It never retries, and refuses a reply of the wrong type."""
    options: Any = {"base_url": f"http://proxy{path}", "max_retries": 0}
    transport = sdk_http.ASGITransport(harness.app)
    async with openai.DefaultAsyncHttpxClient(transport=transport) as http:
        options |= {"http_client": http, "_strict_response_validation": True}
        yield openai.AsyncOpenAI(api_key=key, **options)


def reply_message(completion: dict[str, Any]) -> dict[str, Any]:
    """The message of a chat completion."""
    return completion["choices"][0]["message"]


def user(text: Any = "hello") -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(
    text: str, *calls: tuple[str, dict[str, Any]], reasoning: str = "", suffix: str = "ab12"
) -> dict[str, Any]:
    """An assistant's message as the tree keeps it. Each call is a name and arguments."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    for k, (name, arguments) in enumerate(calls):
        function = {"name": name, "arguments": arguments}
        call = {"id": f"call_{suffix}_{k}", "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)
    return message


def normal(message: Any) -> dict[str, Any]:
    """A message of chat completions as the tree keeps it."""
    (read,) = read_request({"messages": [message]}, lambda _: None).messages
    return read


def tool(name: str) -> dict[str, Any]:
    """A tool in the form of chat completions."""
    function = {"name": name, "description": "", "parameters": {"type": "object"}}
    return {"type": "function", "function": function}


def with_template(tokenizer: Any, template: str) -> Any:
    """A tokenizer with the same tokens and another chat template."""
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    own = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, **ends)
    own.chat_template = template
    return own
