r"""The proxy answers agents as OpenAI or Anthropic would, and keeps sampled tokens for training.

Training needs exactly the tokens that were sampled, with their log-probabilities. But agents send
text, which does not say from which tokens it was made. The model may have sampled `Hi` and `!`
where the tokenizer makes one token `Hi!`, whose log-probability nobody knows. So the proxy keeps
the tokens of every answer, and later prompts repeat them instead of tokenising the text again.

Example: the model has answered "hello" with "Hi!", and the agent makes a second call:

    {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Hi!"},
                  {"role": "user", "content": "more"}], "temperature": 0.7}

1. calls/messages.py reads three messages and a temperature, and calls/turn.py enters the call in
   the tree of calls (cache.py), as a child of the first call.
2. calls/prompts.py keeps the tokens of the first call, and renders only what follows:
   \n<|im_start|>user\nmore<|im_end|>\n and the beginning of the next answer.
3. engine.py gets the answer's tokens, calls/tools.py finds tool calls, and calls/replies.py writes
   the reply.

**Addresses.** Every episode has a session. An agent needs either its session's URL, with or without
`/v1`, or the session's id as its API key. Paths marked (admin) need the admin key:

    POST /grant_capacity (admin)              let one more session start: the gate has admitted it
    POST /rl/start_session (admin)            {task_id, sampling, compaction}: use a grant
    POST /{id}/v1/chat/completions, /v1/responses, /v1/messages     answer a call
    GET  /{id}/v1/models                      the only model; any name will do
    POST /{id}/rl/set_reward                  {reward}: of the last call, or of `interaction_id`
    POST /{id}/rl/end_session                 no more calls; `discard`: forget the session at once
    POST /export_trajectories (admin)         {session_id, discount, style}: return and forget it
    POST /set_version (admin), GET /health    the trainer's version; sessions and grants

**Sampling.** An agent's parameters override its session's, which override the proxy's. **Errors.**
An agent's mistake gets a 4xx status, but never 409 or 429, which SDKs would retry. 502 and 503 mean
that the servers failed even after our retries. During a weight update, calls wait.
"""

import argparse
import asyncio
import os
import re
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from cache import Interaction, InteractionCache, check_style
from calls.messages import Json, Message, Refusal, check_sampling, get
from calls.prompts import PromptBuilder, read_text
from calls.replies import PROTOCOLS, Protocol, error_body
from calls.sessions import Session
from calls.tools import THINK, find_parser, opening, read_answer, split_calls
from calls.turn import EventStream, Turn
from engine import RemoteInfEngine
from inference.fields import make_named
from inference.io_struct import CallParameters, EngineError, ModelRequest, ModelResponse, call_seed
from inference.serve import bearer, check_key, listen, load_tokenizer, read_object, reply, serve

LONG = 2**14  # bytes of a session's bodies; below this, tokenising a prompt takes milliseconds


class ProxyAddress(NamedTuple):
    proxy_addr: str
    admin_key: str


@dataclass(eq=False)
class Proxy:
    """The endpoints, in the order in which a session uses them."""

    engine: Any  # has `async agenerate(ModelRequest)`
    tokenizer: Any
    admin_key: str
    seed: int | None = None  # makes the sampling of a run repeatable
    sampling: Json = field(default_factory=dict)  # defaults of CallParameters
    tool_call_parser: str | None = None

    def __post_init__(self) -> None:
        CallParameters(**self.sampling)  # raises for an unknown field
        self.prompts = PromptBuilder(self.tokenizer)
        self.parser = find_parser(self.tool_call_parser)
        self.sessions: dict[str, Session] = {}  # open and ended sessions
        self.capacity = 0  # unused grants

    # ---- start a session

    def grant_capacity(self, body: Json) -> Json:
        self.capacity += 1
        return {"capacity": self.capacity}

    def start_session(self, body: Json) -> Json:
        """Start a session, and use up a grant. A refused request uses up none."""
        if not isinstance(task_id := body.get("task_id"), str | int):
            raise Refusal("task_id: a string is needed")
        sampling = get(body, "sampling", dict, {})
        check_sampling(sampling, "sampling")
        if not self.capacity:
            raise Refusal("session: none may start; POST /grant_capacity first", 429)
        self.capacity -= 1
        session = self.start(str(task_id), sampling, body.get("compaction") != "cut")
        return {"session_id": session.session_id, "api_key": session.session_id}

    def start(self, task_id: str, sampling: Json | None = None, links: bool = True) -> Session:
        session = Session(
            secrets.token_urlsafe(16), task_id, sampling or {}, InteractionCache(), links
        )
        self.sessions[session.session_id] = session
        return session

    def find(self, session_id: Any) -> Session:
        if session_id not in self.sessions:
            raise Refusal(
                "session_id: unknown, or already exported; put its id into the path, or send it as"
                " the API key",
                404,
            )
        return self.sessions[session_id]

    def session_of(self, request: Request) -> Session:
        """Return the session named by the path, or else by the API key."""
        if "upgrade" in request.headers:  # our web server does not read the body of such a request
            raise Refusal("Upgrade: only HTTP/1.1 is spoken here; in Java, Version.HTTP_1_1")
        key = bearer(request) or request.headers.get("x-api-key")
        return self.find(request.path_params.get("session_id") or key)

    # ---- answer an agent

    async def complete(self, protocol: Protocol, request: Request) -> Response:
        """Answer a call or its retry."""
        session = self.session_of(request)
        body = bytearray()
        async for chunk in request.stream():  # ends with b""
            session.receive(len(chunk))
            body += chunk
        raw = bytes(body)
        key = hash((protocol, raw))
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        turn = session.turns.get(key) if is_retry else None
        if turn is None or turn.failed:
            ask = protocol.parse(read_object(raw), session.cache.get)
            named = re.findall(r"[^,\s]+", request.headers.get("x-pocket-areal-reads", ""))
            turn = session.turns[key] = Turn(session, protocol, ask, self.answer, named)
        if not turn.ask.stream:
            return reply(await turn.reply(request))
        frames = turn.events(request)
        await anext(frames)  # an empty frame; errors before this frame get an HTTP status
        return EventStream(frames)

    async def answer(self, turn: Turn) -> tuple[Message, ModelResponse]:
        """Make the prompt of a call, generate, and read what the model wrote."""
        ask = turn.ask
        tools = [] if ask.tool_choice == "none" else ask.tools
        # A prompt that may be long is tokenised in a thread, so that no other session waits.
        if turn.session.size > LONG:
            prompt = await asyncio.to_thread(self.prompts.prompt, turn.interaction)
        else:
            prompt = self.prompts.prompt(turn.interaction)
        # The prompt may end with the answer's beginning: a <think>, or part of a forced tool call.
        begun = THINK if self.tokenizer.decode(prompt[-16:]).rstrip().endswith(THINK) else ""
        if forced := opening(ask.tool_choice, tools, begun, self.parser):
            prompt += self.prompts.encode(forced)
            begun += forced
        turn.writer.input_len = len(prompt)
        request = self.model_request(turn, prompt)
        response = await self.engine.agenerate(request)
        # A configured parser may look for special tokens, so the text keeps them.
        tokens = response.output_tokens
        keep_special = self.parser is not split_calls
        text = read_text(self.tokenizer, tokens, request.gconfig, begun, keep_special)
        ended = response.stop_reason == "stop"
        message = read_answer(text, tools, turn.writer.suffix, self.parser, ended)
        if "tool_calls" in message and not ask.parallel_tool_calls:
            del message["tool_calls"][1:]
        if "tool_calls" in message and ended:
            response.stop_reason = "tool_calls"
        return message, response

    def model_request(self, turn: Turn, ids: list[int]) -> ModelRequest:
        session = turn.session
        chosen = self.sampling | session.sampling | turn.ask.sampling
        if "temperature" in turn.ask.sampling:
            chosen["greedy"] = False
        chosen["stop_token_ids"] = [self.tokenizer.eos_token_id, *chosen.get("stop_token_ids", [])]
        # The members of a group must differ even if all their agents send seed 42, so each call
        # gets its own seed.
        if (seed := chosen.get("seed", self.seed)) is not None:
            chosen["seed"] = call_seed(seed, session.task_id, turn.number)
        gconfig = CallParameters(**chosen)
        return ModelRequest(ids, gconfig=gconfig, call=f"{session.task_id}.{turn.number}")

    async def models(self, request: Request) -> Response:
        only = {"id": "default", "object": "model", "created": 0, "owned_by": "pocket-areal"}
        return reply({"object": "list", "data": [only]})

    # ---- reward, end and export a session

    def set_reward(self, session: Session, body: Json) -> Json:
        session.check_open()
        session.cache.set_reward(get(body, "interaction_id", str), body.get("reward"))
        return {"message": "ok"}

    def end_session(self, session: Session, body: Json) -> Json:
        session.end()
        if body.get("discard"):
            self.sessions.pop(session.session_id, None)
        rewards = [interaction.reward for interaction in session.cache.finished()]
        rewarded = len(rewards) - rewards.count(None)
        return {"interaction_count": len(rewards), "rewarded_count": rewarded}

    def export_trajectories(self, body: Json) -> dict[str, Interaction]:
        session = self.find(get(body, "session_id", str))
        if not session.ended:
            raise Refusal("session_id: it is open; POST /{session_id}/rl/end_session first")
        check_style(style := body.get("style", "individual"))
        session.cache.apply_reward_discount(body.get("discount", 1.0))
        rows = session.cache.export_interactions(style)
        del self.sessions[session.session_id]
        return rows

    def set_version(self, body: Json) -> Json:
        """Set the trainer's version. The engine refuses tokens of any newer version."""
        if (version := get(body, "version", int, 0)) < 0:
            raise Refusal(f"version: {version} is less than 0")
        self.engine.set_version(version)
        return {}

    async def health(self, request: Request) -> Response:
        return reply({"status": "ok", "sessions": len(self.sessions), "capacity": self.capacity})

    # ---- who may call these methods

    async def for_admin(
        self, method: Callable[[Json], Any], request: Request, write: Any = reply
    ) -> Response:
        check_key(request, self.admin_key)
        return write(method(read_object(await request.body())))

    async def for_agent(
        self, method: Callable[[Session, Json], Json], request: Request
    ) -> Response:
        return reply(method(self.session_of(request), read_object(await request.body())))


async def write_rows(rows: dict[str, Interaction]) -> AsyncIterator[bytes]:
    """Write each row and forget it, because all rows together can be a gigabyte of JSON."""
    yield b'{"interactions":{'
    for i, key in enumerate([*rows]):
        yield b"," * (i > 0) + orjson.dumps({key: rows.pop(key).export()})[1:-1]
        await asyncio.sleep(0)  # other requests are answered in between
    yield b"}}"


async def error_reply(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # there is no such path or method
        message = f"{request.method} {request.url.path}: {error.detail}"
        error = Refusal(message, error.status_code)
    return reply(error_body(error), getattr(error, "status", 500))


def create_app(proxy: Proxy) -> FastAPI:
    errors = (ValueError, EngineError, HTTPException, ClientDisconnect)
    handlers: Any = dict.fromkeys(errors, error_reply)
    app = FastAPI(openapi_url=None, exception_handlers=handlers)
    routes: Any = {name: partial(proxy.complete, PROTOCOLS[name]) for name in PROTOCOLS}
    routes |= {
        "rl/set_reward": partial(proxy.for_agent, proxy.set_reward),
        "rl/end_session": partial(proxy.for_agent, proxy.end_session),
        "rl/start_session": partial(proxy.for_admin, proxy.start_session),
        "grant_capacity": partial(proxy.for_admin, proxy.grant_capacity),
        "set_version": partial(proxy.for_admin, proxy.set_version),
        "export_trajectories": partial(
            proxy.for_admin,
            proxy.export_trajectories,
            write=lambda rows: StreamingResponse(write_rows(rows), media_type="application/json"),
        ),
    }
    # "/v1" comes before "/{session_id}", so that "v1" is never taken for an id.
    for start in ("/{session_id}/v1", "/v1", "", "/{session_id}"):
        app.add_route(f"{start}/models", proxy.models)
        app.add_route(f"{start}/health", proxy.health)
        for path, endpoint in routes.items():
            app.add_route(f"{start}/{path}", endpoint, methods=["POST"])
    return app


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal comes. If the proxy cannot start, print one line and return 2."""
    parser = argparse.ArgumentParser(description="Answer agents, and keep the tokens.")
    add = parser.add_argument
    add("--server", action="append", required=True, help="URL of an inference server; repeatable")
    add("--model-path", required=True, help="folder with the tokenizer")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8100)
    key = os.getenv("POCKET_AREAL_ADMIN_KEY")
    add("--admin-key", default=key, required=not key)
    add("--server-key", default=os.getenv("POCKET_AREAL_SERVER_KEY", ""))
    add("--seed", type=int, help="makes the sampling of a run repeatable")
    add("--sampling", type=orjson.loads, default={}, help='defaults, like {"max_new_tokens": 500}')
    add("--tool-call-parser", help="module.function, like extras.parsers.mistral")
    add("--hooks", type=orjson.loads, default={}, help="of the engine: {class path: its arguments}")
    add("--exit-with-parent", action="store_true")
    args = parser.parse_args(argv)
    try:
        with listen(args.host, args.port, args.admin_key) as listener:
            tokenizer = load_tokenizer(args.model_path)
            hooks = make_named(args.hooks)
            engine = RemoteInfEngine(args.server, key=args.server_key, hooks=hooks)
            engine.initialize()
            proxy = Proxy(
                engine,
                tokenizer,
                args.admin_key,
                seed=args.seed,
                sampling={"max_new_tokens": engine.context_length} | args.sampling,
                tool_call_parser=args.tool_call_parser,
            )
            print(f"proxy at http://{args.host}:{listener.getsockname()[1]}", flush=True)
            print("chat template:", proxy.prompts.ways, flush=True)
            serve(create_app(proxy), listener, args.exit_with_parent)
    except (OSError, ValueError, ImportError, AttributeError, TypeError, EngineError) as error:
        print("error:", " ".join(str(error).split())[:300], file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
