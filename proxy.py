r"""The proxy answers agents like OpenAI or Anthropic, and keeps every sampled token for training.

An agent knows one URL, that of its session, and needs to change nothing else. `/v1` may be left
out, and so may the id in the path if it is the API key. "admin" needs the admin key:

    POST /grant_capacity (admin)                let one more session start
    POST /rl/start_session (admin)              {task_id}: start one; `grant`: grant it first;
                                                `sampling`: defaults of this session
    POST /{id}/v1/chat/completions, /v1/responses, /v1/messages     answer one call
    POST /{id}/v1/messages/count_tokens         how long its prompt would be
    GET  /{id}/v1/models                        the only model, which answers to any name
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
mistakes are 4xx, never 409 or 429, after which SDKs try again; 503 says that no server answers. A
call during a weight update waits.
"""

import argparse
import functools
import hashlib
import os
import secrets
import sys
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from cache import EXPORTED, Interaction, check_style
from calls.messages import AgentRequest, Refusal, get
from calls.prompts import PromptBuilder, read_text
from calls.replies import PROTOCOLS, Answer, Protocol
from calls.sessions import ProxyAddress as ProxyAddress
from calls.sessions import Session, SessionTable
from calls.tools import THINK, find_parser, opening, parse
from calls.turn import EventStream, Turn
from engine import RemoteInfEngine
from inference.fields import as_object, import_name
from inference.io_struct import CallParameters, EngineError, ModelRequest, call_seed
from inference.serve import bearer, check_key, listen, load_tokenizer, read_object, reply, serve


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
    ) -> None:
        self.engine, self.tokenizer, self.admin_key = engine, tokenizer, admin_key
        self.seed, self.sampling = seed, sampling or {}
        CallParameters(**self.sampling)  # raises for an unknown field
        self.prompts = PromptBuilder(tokenizer)
        self.parser = find_parser(tool_call_parser)
        self.sessions = SessionTable()

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
        session = self.sessions.find(session_id_of(request))
        raw = await request.body()
        session.check_open()
        key = hashlib.sha256(raw + protocol.id_prefix.encode()).digest()
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        turn = session.turns.get(key) if is_retry else None
        if turn is None or turn.failed:
            ask = protocol.parse(read_object(raw), session.finished)
            turn = session.turns[key] = Turn(session, protocol, ask)
            turn.start(self.answer)
        if not turn.ask.stream:
            return reply(await turn.reply(request))
        frames = turn.events(request)
        await anext(frames)  # raises what is wrong with the call
        return EventStream(frames, headers={"cache-control": "no-store"})

    async def answer(self, turn: Turn) -> Answer:
        """Make the prompt of a call, generate, and read what the model wrote."""
        ask, tools = turn.ask, turn.ask.callable_tools
        prompt, begun = self.prompt(ask, turn.interaction.parent)
        turn.form = turn.protocol(ask, turn.suffix, len(prompt))
        request = self.request(turn.session, ask, prompt)
        response = await self.engine.agenerate(request)
        # The marks of another form of calls may be special tokens.
        tokens, special = response.output_tokens, bool(self.parser and tools)
        text, stop = read_text(self.tokenizer, tokens, request.gconfig, begun, special)
        message = parse(text, tools, turn.suffix, self.parser)
        if "tool_calls" in message and response.stop_reason == "stop":
            response.stop_reason = "tool_calls"
        return Answer(response, message, stop)

    def request(self, session: Session, ask: AgentRequest, ids: list[int]) -> ModelRequest:
        number, session.calls = session.calls, session.calls + 1
        chosen = self.sampling | session.sampling | ask.sampling
        ends = [self.tokenizer.eos_token_id, *chosen.get("stop_token_ids", [])]
        chosen["stop_token_ids"] = [token for token in ends if token is not None]
        if self.seed is not None and "seed" not in ask.sampling:
            chosen["seed"] = call_seed(self.seed, session.task_id, number)
        gconfig, call = CallParameters(**chosen), f"{session.task_id}.{number}"
        return ModelRequest(ids, gconfig=gconfig, call=call)

    def prompt(self, ask: AgentRequest, parent: Interaction | None) -> tuple[list[int], str]:
        """The prompt, and the part of the answer that it contains: a <think> at its end, and the
        first words of a forced call. Raises Refusal."""
        ids = self.prompts.prompt(ask, parent)
        end = self.tokenizer.decode(ids[-16:]).rstrip()
        begun = THINK if end.endswith(THINK) else ""
        first = opening(ask.tool_choice, ask.callable_tools, begun, self.parser)
        return ids + self.prompts.encode(first) if first else ids, begun + first

    async def count_tokens(self, request: Request) -> Response:
        session = self.sessions.find(session_id_of(request))
        ask = PROTOCOLS["messages"].parse(await read_json(request), session.finished)
        ids, _ = self.prompt(ask, ask.parent or session.cache.find_parent(ask.messages)[0])
        return reply({"input_tokens": len(ids)})

    async def models(self, request: Request) -> Response:
        model = {"id": "default", "object": "model", "created": 0, "owned_by": "pocket-areal"}
        return reply({"object": "list", "data": [model]})

    # ---- reward, end and export a session

    async def set_reward(self, request: Request) -> Response:
        session = self.sessions.find(session_id_of(request))
        body = await read_json(request)
        session.check_open()
        self.reward(session, body)
        return reply({"message": "ok"})

    def reward(self, session: Session, body: dict[str, Any]) -> None:
        session.cache.set_reward(get(body, "interaction_id", str), body.get("reward"))

    async def end_session(self, request: Request) -> Response:
        session = self.sessions.find(session_id_of(request))
        body = await read_json(request)
        session.end()
        if body.get("discard"):
            self.sessions.forget(session)
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
            session.end()
        if not session.ended:
            raise Refusal("session_id: it is open; POST /{session_id}/rl/end_session first")
        rewarded = session.rewarded_count  # before the discount rewards the others
        session.cache.apply_reward_discount(body.get("discount", 1.0))
        rows = session.cache.export_interactions(style)
        self.sessions.forget(session)
        interactions = {name: export(row) for name, row in rows.items()}
        return reply({"interactions": interactions, "rewarded_count": rewarded})

    async def health(self, request: Request) -> Response:
        counts = {"sessions": len(self.sessions), "capacity": self.sessions.capacity}
        return reply({"status": "ok"} | counts)

    async def set_version(self, request: Request) -> Response:
        """Tokens of a newer version than the trainer's are refused from now on."""
        check_key(request, self.admin_key)
        self.engine.set_version(get(await read_json(request), "version", int, 0))
        return reply({})


def export(interaction: Interaction) -> dict[str, Any]:
    """An interaction as calls/client.py reads it."""
    return {name: getattr(interaction, name) for name in EXPORTED} | {
        "tensors": interaction.to_lists(),
        "parent": interaction.parent and interaction.parent.interaction_id,
        "model_response": vars(interaction.tokens),
    }


async def read_json(request: Request) -> dict[str, Any]:
    return read_object(await request.body())


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
    routes: Any = {name: functools.partial(proxy.complete, PROTOCOLS[name]) for name in PROTOCOLS}
    routes |= {
        "messages/count_tokens": proxy.count_tokens,
        "rl/set_reward": proxy.set_reward,
        "rl/end_session": proxy.end_session,
        "rl/start_session": proxy.start_session,
        "grant_capacity": proxy.grant_capacity,
        "set_version": proxy.set_version,
        "export_trajectories": proxy.export_trajectories,
    }
    # "/v1" comes before "/{session_id}", so that it is never taken for one.
    for start in ("/{session_id}/v1", "/v1", "", "/{session_id}"):
        app.add_route(f"{start}/models", proxy.models)
        app.add_route(f"{start}/health", proxy.health)
        for path, endpoint in routes.items():
            app.add_route(f"{start}/{path}", endpoint, methods=["POST"])
    return app


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Answer agents, and keep the tokens.")
    add, env, json = parser.add_argument, os.getenv, orjson.loads
    add("--server", action="append", required=True, help="URL of an inference server; repeatable")
    add("--model-path", required=True, help="folder with the tokenizer")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8100)
    add("--admin-key", default=env("POCKET_AREAL_ADMIN_KEY"))
    add("--server-key", default=env("POCKET_AREAL_SERVER_KEY", ""))
    add("--seed", type=int, help="makes the sampling of a run repeatable")
    add("--sampling", type=json, default={}, help='defaults, like {"max_new_tokens": 500}')
    add("--tool-call-parser", help="hermes, a parser of SGLang, or module.function")
    add("--hooks", help="module.Class: hooks of the engine (engine.py)")
    add("--hooks-args", type=json, default={}, help="its arguments as JSON")
    add("--exit-with-parent", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal. What cannot start prints one line and returns 2."""
    args = parse_args(argv)
    key = args.admin_key or secrets.token_urlsafe(16)
    try:
        with listen(args.host, args.port, args.admin_key) as listener:
            tokenizer = load_tokenizer(args.model_path)
            hooks = args.hooks and import_name(args.hooks)(**args.hooks_args)
            engine = RemoteInfEngine(args.server, key=args.server_key, hooks=hooks)
            engine.initialize()
            if engine.context_length:
                args.sampling = {"max_new_tokens": engine.context_length} | args.sampling
            options = {"sampling": args.sampling, "tool_call_parser": args.tool_call_parser}
            app = create_app(engine, tokenizer, key, seed=args.seed, **options)
            url = f"http://{args.host}:{listener.getsockname()[1]}"
            # Only a key that was made here is printed.
            print(f"proxy at {url}" + ("" if args.admin_key else f", admin key {key}"), flush=True)
            if not args.exit_with_parent:  # started by hand: offer a session to try an agent
                session = f"{url}/{app.state.proxy.start_own_session('by hand').session_id}"
                urls = f"OPENAI_BASE_URL={session}/v1 ANTHROPIC_BASE_URL={session}"
                print(f"a session: {urls}, any key", flush=True)
            serve(app, listener, args.exit_with_parent)
    except (OSError, ValueError, ImportError, TypeError, EngineError) as error:
        print("error:", " ".join(str(error).split())[:300], file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
