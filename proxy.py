r"""The proxy answers agents like OpenAI or Anthropic, and keeps every sampled token for training.

An agent knows one URL, that of its session, and needs to change nothing else. `/v1` may be left
out, and so may the id in the path if it is the API key. "admin" needs the admin key:

    POST /grant_capacity (admin)                let one more session start
    POST /rl/start_session (admin)              {task_id}: start one; `grant`: grant it first;
                                                `sampling`: defaults of this session
    POST /{id}/v1/chat/completions, /v1/responses, /v1/messages     answer one call
    POST /{id}/v1/messages/count_tokens         how long its prompt would be
    GET  /{id}/v1/models, /v1/responses/{id}    the only model; a finished response
    POST /{id}/rl/set_reward                    {reward}: of the last call, or of `interaction_id`
    POST /{id}/rl/end_session                   no more calls; `discard`: forget it at once
    POST /export_trajectories (admin)           {session_id, discount, style}, then forget it;
                                                `rewards`: first set these and end it
    POST /set_version (admin), GET /health      the trainer's version; sessions and grants

How a call becomes a prompt, after the model has answered "hello" with "Hi!":

    {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Hi!"},
                  {"role": "user", "content": "more"}], "temperature": 0.7}

1. calls/messages.py reads three messages and a temperature.
2. calls/turn.py enters the call in the tree of cache.py, which finds the first turn as its parent.
   From here on it knows who waits for the reply, and what a retry may get.
3. calls/prompts.py takes the tokens of the first turn as they were sampled, and renders only
   \n<|im_start|>user\nmore<|im_end|>\n and the beginning of the next answer behind them.
4. engine.py gets the tokens, calls/tools.py finds calls in them, calls/replies.py writes the reply.

The agent's parameters win over the session's, and these over the proxy's. Where top_p or a penalty
was used, training cannot reproduce the probabilities, so the loss leaves the turn out. The agent's
mistakes are 4xx, never 409 or 429, after which SDKs try again; 429 says that too many answers of
the session are under way, and 503 that no server answers. A call during a weight update waits.
"""

import argparse
import asyncio
import contextlib
import functools
import hashlib
import os
import secrets
import sys
import time
from collections.abc import Callable
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from cache import PATTERNS, Interaction, check_style
from calls.messages import AgentRequest, Refusal, get
from calls.prompts import PromptBuilder, read_text, token_text
from calls.replies import PROTOCOLS, Answer, Protocol
from calls.sessions import BODY_BYTES, Session, SessionTable
from calls.sessions import ProxyAddress as ProxyAddress
from calls.tools import THINK, OutputParser
from calls.turn import EventStream, Turn, retried_turn
from engine import RemoteInfEngine
from inference.fields import as_object, import_name
from inference.io_struct import CallParameters, EngineError, ModelRequest, call_seed
from inference.serve import (
    bearer,
    check_key,
    listen,
    load_tokenizer,
    read_object,
    read_secret,
    reply,
    serve,
)


class Proxy:
    """The endpoints, in the order in which a session uses them."""

    def __init__(
        self,
        engine: Any,  # has `async agenerate(ModelRequest)`
        tokenizer: Any,
        admin_key: str,
        *,
        seed: int | None = None,  # makes the sampling of a run repeatable
        sampling: dict[str, Any] | None = None,  # defaults of CallParameters
        tool_call_parser: str | None = None,
        side_conversations: list[str] | None = None,  # patterns; None: those of cache.py
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine, self.tokenizer, self.admin_key = engine, tokenizer, admin_key
        self.seed, self.sampling = seed, sampling or {}
        CallParameters(**self.sampling)  # raises for an unknown field
        self.prompts = PromptBuilder(tokenizer)
        self.parser = OutputParser(tool_call_parser)
        patterns = PATTERNS if side_conversations is None else side_conversations
        self.sessions = SessionTable(clock, patterns)

    # ---- start a session

    async def grant_capacity(self, request: Request) -> Response:
        check_key(request, self.admin_key)
        self.sessions.capacity += 1
        return reply({"capacity": self.sessions.capacity})

    async def start_session(self, request: Request) -> Response:
        check_key(request, self.admin_key)
        body = await read_json(request)
        if not isinstance(body.get("task_id"), str | int) or body.get("api_key"):
            raise Refusal("task_id: a string is needed; api_key: the proxy makes one, leave it out")
        if get(body, "grant", bool):
            self.sessions.capacity += 1
        session = self.sessions.start(str(body["task_id"]), get(body, "sampling", dict))
        return reply({"session_id": session.session_id, "api_key": session.session_id})

    def start_own_session(self, task_id: str) -> Session:
        self.sessions.capacity += 1
        return self.sessions.start(task_id)

    # ---- answer an agent

    async def complete(self, protocol: Protocol, request: Request) -> Response:
        """Answer one call, or a retry of one."""
        session = self.sessions.open(session_id_of(request))
        raw = await read_body(request)
        key = hashlib.sha256(raw + protocol.id_prefix.encode()).digest()
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        equal = session.turns.setdefault(key, [])
        turn = retried_turn(equal) if is_retry else None
        if turn is None:
            turn = self.begin(protocol, session, raw)
            equal.append(turn)
        if not turn.ask.stream:
            return reply(await turn.reply(request))
        frames = turn.events(request)
        await anext(frames)  # raises what is wrong with the call
        return EventStream(frames, headers={"cache-control": "no-store"})

    def begin(self, protocol: Protocol, session: Session, raw: bytes) -> Turn:
        """Read a call, enter it in the tree, make its prompt and start its answers."""
        ask = protocol.parse(read_object(raw), session.finished)
        session.check(ask)
        turn = Turn(session, protocol, ask)
        try:
            prompt, opening = self.prompt(ask, turn.parent)
            requests = [self.request(session, ask, prompt, k) for k in range(ask.n)]
        except BaseException:
            turn.forget()
            raise
        turn.start(lambda: self.generate(turn, requests, opening), len(prompt))
        turn.task.add_done_callback(lambda _: self.sessions.touch(session))
        return turn

    def request(self, session: Session, ask: AgentRequest, ids: list[int], k: int) -> ModelRequest:
        """The request for the k-th answer of a call."""
        number, session.calls = session.calls, session.calls + 1
        chosen = self.sampling | session.sampling | ask.sampling
        ends = [self.tokenizer.eos_token_id, *chosen.get("stop_token_ids", [])]
        chosen["stop_token_ids"] = [token for token in ends if token is not None]
        if "seed" in ask.sampling:
            chosen["seed"] += k
        elif self.seed is not None:
            chosen["seed"] = call_seed(self.seed, session.task_id, number)
        call = f"{session.task_id}.{number}"
        gconfig = CallParameters(**chosen)
        return ModelRequest(ids, gconfig=gconfig, session=session.session_id, call=call)

    async def generate(
        self, turn: Turn, requests: list[ModelRequest], opening: str
    ) -> list[Answer]:
        """All answers of a call. If one fails, so does the call."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.engine.agenerate(one)) for one in requests]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        tools, answers = turn.ask.callable_tools, []
        for name, request, task in zip(turn.ids, requests, tasks):
            response = task.result()
            tokens, foreign = response.output_tokens, self.parser.foreign(tools)
            text, stop = read_text(self.tokenizer, tokens, request.gconfig, opening, foreign)
            parsed = self.parser.parse(text, tools)
            if parsed.calls and response.stop_reason == "stop":
                response.stop_reason = "tool_calls"
            shown = tokens if turn.ask.logprobs else []
            texts = [token_text(self.tokenizer, token) for token in shown]
            answers.append(Answer(name, response, parsed, texts, stop))
        return answers

    def prompt(self, ask: AgentRequest, parent: Interaction | None) -> tuple[list[int], str]:
        """The prompt, and the part of the answer that it contains: a <think> at its end, and the
        first words of a forced call. Raises Refusal."""
        ids = self.prompts.prompt(ask, parent)
        end = self.tokenizer.decode(ids[-16:]).rstrip()
        begun = THINK if end.endswith(THINK) else ""
        opening = self.parser.opening(ask.tool_choice, ask.callable_tools, begun)
        return ids + self.prompts.encode(opening) if opening else ids, begun + opening

    async def count_tokens(self, request: Request) -> Response:
        session = self.sessions.open(session_id_of(request))
        body = await read_json(request)
        ask = PROTOCOLS["messages"].parse(body, session.finished)
        ids, _ = self.prompt(ask, session.cache.find_parent(ask.messages))
        return reply({"input_tokens": len(ids)})

    async def models(self, request: Request) -> Response:
        """The model under any name, or a list with it, for the SDKs of both vendors."""
        name = request.path_params.get("model_id", "default")
        model = {"id": name, "object": "model", "created": 0, "owned_by": "pocket-areal"}
        model |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        model |= {"lifecycle": "active"}
        listed = {"object": "list", "data": [model], "has_more": False}
        listed |= {"first_id": name, "last_id": name}
        return reply(model if "model_id" in request.path_params else listed)

    async def response(self, request: Request) -> Response:
        session = self.sessions.open(session_id_of(request))
        found = session.finished(request.path_params["response_id"])
        if not found:
            raise Refusal("response_id: this session has no finished response with this id", 404)
        return reply(found.reply)

    # ---- reward, end and export a session

    async def set_reward(self, request: Request) -> Response:
        self.sessions.open(session_id_of(request))  # a stranger's body is not read
        body = await read_json(request)
        self.reward(self.sessions.open(session_id_of(request)), body)
        return reply({"message": "ok"})

    def reward(self, session: Session, body: dict[str, Any]) -> None:
        interaction_id, reward = get(body, "interaction_id", str), body.get("reward")
        try:
            if interaction_id is None:
                session.cache.set_last_reward(reward)
            else:
                session.cache.set_reward(interaction_id, reward)
        except KeyError as error:
            raise Refusal(error.args[0]) from error

    async def end_session(self, request: Request) -> Response:
        session = self.sessions.find(session_id_of(request))
        body = await read_json(request)
        (self.sessions.forget if body.get("discard") else self.sessions.end)(session)
        counts = {"interaction_count": len(session.cache.finished())}
        return reply(counts | {"rewarded_count": session.rewarded_count})

    async def export_trajectories(self, request: Request) -> Response:
        check_key(request, self.admin_key)
        body = await read_json(request)
        session = self.sessions.find(str(body.get("session_id")))
        check_style(style := body.get("style", "individual"))
        if (rewards := get(body, "rewards", list)) is not None:
            for one in rewards:
                self.reward(session, as_object(one, "rewards"))
            self.sessions.end(session)
        if not session.ended:
            raise Refusal("session_id: it is open; POST /{session_id}/rl/end_session first")
        rewarded = session.rewarded_count  # before the discount rewards the others
        session.cache.apply_reward_discount(body.get("discount", 1.0))
        rows = session.cache.export_interactions(style)
        self.sessions.forget(session)
        interactions = {name: export(row) for name, row in rows.items()}
        return reply({"interactions": interactions, "rewarded_count": rewarded})

    async def health(self, request: Request) -> Response:
        self.sessions.expire()
        counts = {"sessions": len(self.sessions), "capacity": self.sessions.capacity}
        return reply({"status": "ok"} | counts)

    async def set_version(self, request: Request) -> Response:
        """Tokens of a newer version than the trainer's are refused from now on."""
        check_key(request, self.admin_key)
        self.engine.set_version(get(await read_json(request), "version", int, 0))
        return reply({})


def export(interaction: Interaction) -> dict[str, Any]:
    """An interaction as calls/client.py reads it."""
    return {
        "tensors": interaction.to_lists(),
        "reward": interaction.reward,
        "parent": interaction.parent and interaction.parent.interaction_id,
        "messages": interaction.messages,
        "output": interaction.output_message_list,
        "reply": interaction.reply,
        "stop_reason": interaction.tokens.stop_reason,
    }


async def read_body(request: Request) -> bytes:
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > BODY_BYTES:
            raise Refusal(f"body: it is longer than {BODY_BYTES} bytes", 413)
    return bytes(raw)


async def read_json(request: Request) -> dict[str, Any]:
    return read_object(await read_body(request))


def session_id_of(request: Request) -> str:
    """The id in the path or, without one, the API key."""
    key = bearer(request) or request.headers.get("x-api-key")
    if not (named := request.path_params.get("session_id") or key):
        raise Refusal("api_key: the session's id is needed, as API key or in the path", 401)
    return named


async def error_reply(request: Request, error: Exception) -> Response:
    status, message = getattr(error, "status", None) or 500, str(error)
    if isinstance(error, HTTPException):  # there is no such path or method
        status, message = error.status_code, f"{request.method} {request.url.path}: {error.detail}"
    is_anthropic = request.url.path.endswith(("/messages", "/messages/count_tokens"))
    protocol = PROTOCOLS["messages" if is_anthropic else "chat/completions"]
    return reply(protocol.error(status, message, getattr(error, "code", "")), status)


def create_app(engine: Any, tokenizer: Any, admin_key: str, **options: Any) -> FastAPI:
    """The web application. `options` are those of Proxy."""
    proxy = Proxy(engine, tokenizer, admin_key, **options)
    errors = (ValueError, EngineError, HTTPException, ClientDisconnect)
    handlers: Any = dict.fromkeys(errors, error_reply)
    app = FastAPI(openapi_url=None, exception_handlers=handlers)
    app.state.proxy = proxy
    # "/v1" comes before "/{session_id}", so that it is never taken for one. A client that appends
    # a path to a URL with a slash at its end makes two of it.
    reads: Any = {"models": proxy.models, "models/{model_id:path}": proxy.models}
    reads |= {"responses/{response_id}": proxy.response, "health": proxy.health}
    writes: Any = {name: functools.partial(proxy.complete, PROTOCOLS[name]) for name in PROTOCOLS}
    writes |= {
        "messages/count_tokens": proxy.count_tokens,
        "rl/set_reward": proxy.set_reward,
        "rl/end_session": proxy.end_session,
        "rl/start_session": proxy.start_session,
        "grant_capacity": proxy.grant_capacity,
        "set_version": proxy.set_version,
        "export_trajectories": proxy.export_trajectories,
    }
    one = "/{session_id}"
    for start in (f"{one}/v1", "/v1", "", one, f"{one}//v1", "//v1", f"{one}/v1/"):
        for path, endpoint in reads.items():
            app.add_route(f"{start}/{path}", endpoint)
        for path, endpoint in writes.items():
            app.add_route(f"{start}/{path}", endpoint, methods=["POST"])
    return app


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Answer agents, and keep the tokens.")
    add, env, json = parser.add_argument, os.getenv, orjson.loads
    add("--server", action="append", required=True, help="URL of an inference server; repeatable")
    add("--model-path", required=True, help="folder with the tokenizer")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8100)
    add("--admin-key", type=read_secret, default=env("POCKET_AREAL_ADMIN_KEY"), help="-: stdin")
    add("--server-key", type=read_secret, default=env("POCKET_AREAL_SERVER_KEY", ""))
    add("--seed", type=int, help="makes the sampling of a run repeatable")
    add("--sampling", type=json, default={}, help='defaults, like {"max_new_tokens": 500}')
    add("--tool-call-parser", help="hermes, a parser of SGLang, or module.function")
    add("--side-conversations", type=json, help="JSON list of patterns (cache.py)")
    add("--request-timeout", type=float, default=3600.0, help="seconds of one generation")
    add("--hooks", help="module.Class: hooks of the engine (engine.py)")
    add("--hooks-args", type=json, default={}, help="its arguments as JSON")
    add("--exit-with-parent", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal. What cannot start prints one line and returns 2."""
    args = parse_args(argv)
    key = args.admin_key or secrets.token_urlsafe(16)
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(listen(args.host, args.port, args.admin_key))
            tokenizer = load_tokenizer(args.model_path)
            hooks = args.hooks and import_name(args.hooks)(**args.hooks_args)
            timeout = args.request_timeout
            engine = RemoteInfEngine(
                args.server, request_timeout=timeout, key=args.server_key, hooks=hooks
            )
            stack.callback(engine.destroy)
            engine.initialize()
            if engine.context_length:
                args.sampling = {"max_new_tokens": engine.context_length} | args.sampling
            names = ("seed", "sampling", "tool_call_parser", "side_conversations")
            app = create_app(
                engine, tokenizer, key, **{name: getattr(args, name) for name in names}
            )
        except (OSError, ValueError, ImportError, TypeError, EngineError) as error:
            print("error:", " ".join(str(error).split())[:300], file=sys.stderr)
            return 2
        url = f"http://{args.host}:{listener.getsockname()[1]}"
        # Only a key that was made here is printed.
        print(f"proxy at {url}" + ("" if args.admin_key else f", admin key {key}"), flush=True)
        if not args.exit_with_parent:  # started by hand: offer a session to try an agent
            session = f"{url}/{app.state.proxy.start_own_session('by hand').session_id}"
            urls = f"OPENAI_BASE_URL={session}/v1 ANTHROPIC_BASE_URL={session}"
            print(f"a session: {urls}, any key", flush=True)
        serve(app, listener, args.exit_with_parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
