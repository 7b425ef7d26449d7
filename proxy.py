"""The proxy: an agent talks to it as to OpenAI or Anthropic, and every token it causes is kept for training.

    agent -> POST /{session_id}/v1/chat/completions  \\
                                  /v1/responses        -> a turn -> engine.agenerate -> reply, whole or as it grows
                                  /v1/messages       /         \\_ InteractionCache of the session

Here are the addresses, and what each of them does with its parts: a request is read (calls/messages.py), becomes a turn
(calls/turn.py) with a prompt (calls/prompts.py) in the tree of its session (cache.py), and its answer a reply
(calls/replies.py).

Sessions (calls/sessions.py). An episode is a session, named by an unguessable id that is part of the URL; the same id
serves as a Bearer or x-api-key for clients that cannot take a path. `/v1` may be left out, query strings mean nothing.
Who has the admin key grants, starts and exports; who has the id calls, rewards and ends. What is exported is forgotten.

Sampling. What an agent sets holds, the rest is the recipe's (`sampling`); a recipe may keep some of it for itself
(`fixed_sampling`), since training wants the temperature that it was planned for. What changes the distribution behind
the logprobs' back (top_p, penalties, a grammar) is honoured, and such a turn is masked out of the loss (cache.py).

Errors. What a caller did wrong is a 4xx in its protocol's own form, never a 500 (which SDKs would retry, and so
generate again), nor to an agent a 409 or 429 (likewise). An engine's 4xx is passed on; 503 says that no server
answered, and to try again. A weight update is no error: paused servers hold what is asked of them, so a proxy need not
be told.

Several proxies (`proxy.workers`) share nothing: each has its sessions, and an episode keeps to one of them. What may
start is the dispatcher's decision, and a grant is how it reaches a proxy.

It does not promise repeatable tokens to an agent that calls concurrently in one session: the seed of a call comes
from the proxy's seed, the task and its place among the session's calls.

AReaL keys sessions by API key only, accepts work after the end, sweeps them by the age of the last request's
start (in the midst of a long generation, too), leaks grants, and leaves five management routes open to anybody. It
streams what it has generated before, and Responses not at all.
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
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from cache import InteractionWithTokenLogpReward, walk
from calls.messages import AgentRequest, Refusal
from calls.prompts import PromptBuilder, TextReader
from calls.replies import PROTOCOLS, Protocol
from calls.sessions import Session, SessionTable
from calls.side_conversations import PATTERNS
from calls.tools import OutputParser
from calls.turn import EventStream, Turn, retried
from engine import EngineError, RemoteInfEngine
from inference.io_struct import GenerationHyperparameters, ModelRequest, call_seed
from run.serve import listen, load_tokenizer, read_object, reply, serve

ERRORS = (Refusal, ValueError, EngineError, HTTPException, ClientDisconnect)
MAX_BODY = 64 * 2**20  # bytes of a request
LONG_BODY = 2**18  # bytes from which on a prompt is made in a thread: tokenising it may take seconds


@dataclass(eq=False, repr=False)
class Proxy:
    """The endpoints. Each takes the raw request: bodies are small, many, and not ours to type."""

    engine: Any
    tokenizer: Any
    admin_key: str
    _: KW_ONLY
    seed: int | None = None  # of all that is sampled
    sampling: dict[str, Any] = field(default_factory=dict)  # GenerationHyperparameters, for what an agent leaves open
    side_conversations: Collection[str] = PATTERNS  # calls/side_conversations.py
    fixed_sampling: Collection[str] = ()  # fields of `sampling` that hold whatever an agent asks
    session_timeout_seconds: float = 3600.0
    chat_template_type: str = "concat"  # calls/prompts.py
    tool_call_parser: str | None = None  # these two: calls/tools.py
    reasoning_parser: str | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.prompts = PromptBuilder(self.tokenizer, self.chat_template_type)
        self.parser = OutputParser(self.tokenizer, self.tool_call_parser, self.reasoning_parser)
        self.sessions = SessionTable(self.session_timeout_seconds, self.clock, self.side_conversations)
        GenerationHyperparameters(**self.sampling)  # TypeError for a field that is none
        if strange := set(self.fixed_sampling) - {f.name for f in fields(GenerationHyperparameters)}:
            raise ValueError(f"fixed_sampling: {', '.join(sorted(strange))} is no field of the sampling")
        self._fixed = {name: self.sampling[name] for name in self.fixed_sampling if name in self.sampling}
        self._stop_token_ids = [self.tokenizer.eos_token_id] if self.tokenizer.eos_token_id is not None else []

    # Questions

    def check_admin(self, request: Request) -> None:
        """Raises Refusal 401 without a key, 403 for another one."""
        key = bearer(request)
        if not key:
            raise Refusal("Authorization: `Bearer <admin key>` is needed", 401)
        if not secrets.compare_digest(key.encode(), self.admin_key.encode()):
            raise Refusal("Authorization: this is not the admin key", 403)

    def gconfig(self, ask: AgentRequest, session: Session, k: int) -> GenerationHyperparameters:
        """Of the k-th answer: what the agent set, else our defaults. The engine clips max_new_tokens to the context."""
        chosen = self.sampling | ask.sampling | self._fixed
        chosen["stop_token_ids"] = [*self._stop_token_ids, *chosen.get("stop_token_ids", [])]
        if "seed" in ask.sampling.keys() - self._fixed.keys():
            chosen["seed"] += k
        elif self.seed is not None:
            chosen["seed"] = call_seed(self.seed, session.task_id, session.calls + k)
        return GenerationHyperparameters(**chosen)

    # An agent's call

    async def complete(self, protocol: Protocol, request: Request) -> Response:
        """One call: a new turn, or for a retry the one that is there; its reply, whole or as it grows."""
        raw = await read_body(request)
        session = self.sessions.open(session_id_of(request))
        key = hashlib.blake2b(raw + protocol.id_prefix.encode()).digest()
        says_so = request.headers.get("x-stainless-retry-count", "0") != "0"
        turn = retried(session, key, says_so) or await self.begin(protocol, session, raw, key)
        if not turn.ask.stream:
            return reply(await turn.reply(request))
        frames = turn.events(request)
        await anext(frames)
        return EventStream(frames, headers={"cache-control": "no-store"})

    def prompt(self, ask: AgentRequest, parent: InteractionWithTokenLogpReward | None) -> tuple[list[int], str]:
        """The prompt ids of a call, and the text at their end that belongs to its answer. Raises Refusal."""
        ids = self.prompts.prompt(ask, parent)
        begun = self.parser.begun(self.tokenizer.decode(ids[-16:]))  # enough for <think>, if each letter is a token
        opening = self.parser.opening(ask.tool_choice, ask.tools, begun)
        return ids + self.prompts.encode(opening), begun + opening

    async def begin(self, protocol: Protocol, session: Session, raw: bytes, key: bytes) -> Turn:
        """A turn in the tree, with its prompt, on its way. Raises Refusal and leaves nothing behind but its number."""
        ask = protocol.parse(read_object(raw), session.finished)
        gconfigs = [self.gconfig(ask, session, k) for k in range(ask.n)]
        session.calls += ask.n
        turn = Turn(session, protocol, ask, self.parser)
        try:
            build = functools.partial(self.prompt, ask, turn.parent)
            prompt, opening = await asyncio.to_thread(build) if len(raw) > LONG_BODY else build()
            if session.ended:
                raise Refusal("session: it ended while this call was read", 410)
        except BaseException:
            turn.forget()
            raise
        calls = [ModelRequest(prompt, gconfig=g, session=session.session_id) for g in gconfigs]
        marks = self.parser.foreign(ask.callable_tools)
        turn.start(self.engine, calls, lambda: TextReader(self.tokenizer, gconfigs[0], opening, marks))
        turn.task.add_done_callback(lambda _: self.sessions.touch(session))
        session.turns[key].append(turn)
        return turn

    async def count_tokens(self, request: Request) -> Response:
        """Anthropic's: how long the prompt of this body would be."""
        body = await read_json(request)
        session = self.sessions.open(session_id_of(request))
        ask = PROTOCOLS["messages"].parse(body, session.finished)
        parent = session.cache.find_parent(walk(ask.template_key, ask.messages))
        return reply({"input_tokens": len(self.prompt(ask, parent)[0])})

    async def models(self, request: Request) -> Response:
        """The one model there is, in OpenAI's form and in Anthropic's; any name reaches it."""
        openai: dict[str, Any] = {"id": "default", "object": "model", "created": 0, "owned_by": "nano-areal"}
        anthropic = {"type": "model", "display_name": "default", "created_at": "1970-01-01T00:00:00Z"}
        ends = {"has_more": False, "first_id": "default", "last_id": "default"}
        return reply({"object": "list", "data": [openai | anthropic]} | ends)

    async def set_reward(self, request: Request) -> Response:
        body = await read_json(request)
        session = self.sessions.open(session_id_of(request))
        interaction_id, reward = body.get("interaction_id"), body.get("reward")
        try:
            if interaction_id is None:
                session.cache.set_last_reward(reward)
            else:
                session.cache.set_reward(str(interaction_id), reward)
        except (KeyError, ValueError) as error:
            raise Refusal(error.args[0]) from error
        return reply({"message": "ok"})

    # Management

    async def end_session(self, request: Request) -> Response:
        """May be repeated. {"discard": true} forgets the session: nobody will export it."""
        body = await read_json(request)
        session = self.sessions.find(session_id_of(request))
        self.sessions.end(session)
        if body.get("discard"):
            self.sessions.forget(session)
        finished = session.cache.finished()
        rewarded = sum(interaction.reward is not None for interaction in finished)
        return reply({"interaction_count": len(finished), "rewarded_count": rewarded})

    async def grant_capacity(self, request: Request) -> Response:
        self.check_admin(request)
        return reply({"capacity": self.sessions.grant()})

    async def start_session(self, request: Request) -> Response:
        self.check_admin(request)
        task_id = (await read_json(request)).get("task_id")
        if not isinstance(task_id, str | int):
            raise Refusal("task_id: a string is needed")
        session = self.sessions.start(str(task_id))
        return reply({"session_id": session.session_id, "api_key": session.session_id})

    async def export_trajectories(self, request: Request) -> Response:
        """The discounted interactions of a session that has ended, which is then forgotten."""
        self.check_admin(request)
        body = await read_json(request)
        session = self.sessions.find(str(body.get("session_id")))
        if not session.ended:
            raise Refusal("session_id: the session is still open; POST /{session_id}/rl/end_session first")
        try:
            exported = session.cache.export_interactions(body.get("style", "individual"))
            session.cache.apply_reward_discount(body.get("discount", 1.0))
        except ValueError as error:
            raise Refusal(str(error)) from error
        self.sessions.forget(session)
        return reply({"interactions": {key: exported_form(i) for key, i in exported.items()}})

    async def health(self, request: Request) -> Response:
        self.sessions.expire()
        return reply({"status": "ok", "sessions": len(self.sessions), "capacity": self.sessions.capacity})


def exported_form(interaction: InteractionWithTokenLogpReward) -> dict[str, Any]:
    return {
        "tensors": interaction.to_lists(),
        "reward": interaction.reward,
        "parent": interaction.parent.interaction_id if interaction.parent else None,
        "messages": interaction.messages,
        "output": interaction.output_message_list,
    }


def bearer(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def session_id_of(request: Request) -> str:
    """The session that the path names, else the caller's API key. Raises Refusal 401 without either."""
    named = request.path_params.get("session_id") or bearer(request) or request.headers.get("x-api-key")
    if not named:
        raise Refusal("api_key: the session's key, or its id in the path, is needed", 401)
    return named


async def read_body(request: Request) -> bytes:
    """The bytes of the body. Raises Refusal 413 for more than MAX_BODY."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BODY:
            raise Refusal(f"body: it is longer than {MAX_BODY} bytes", 413)
    return bytes(raw)


async def read_json(request: Request) -> dict[str, Any]:
    return read_object(await read_body(request))


async def error_reply(request: Request, error: Exception) -> Response:
    """Every error that a caller can meet, in the form of the protocol that the path is of."""
    status, message = getattr(error, "status", None) or 500, str(error)
    if isinstance(error, HTTPException):  # the framework's own: no such path or method
        status, message = error.status_code, f"{request.method} {request.url.path}: {error.detail}"
    is_anthropic = request.url.path.endswith(("/messages", "/messages/count_tokens"))
    return reply(PROTOCOLS["messages" if is_anthropic else "responses"].error(status, message), status)


def create_app(engine: Any, tokenizer: Any, admin_key: str, **options: Any) -> FastAPI:
    """The application. `engine` has `async agenerate(ModelRequest)`; `options` are those of `Proxy`."""
    proxy = Proxy(engine, tokenizer, admin_key, **options)
    handlers: Any = dict.fromkeys(ERRORS, error_reply)
    app = FastAPI(title="nano-areal proxy", openapi_url=None, exception_handlers=handlers)
    app.state.proxy = proxy
    app.add_route("/health", proxy.health)
    app.add_route("/grant_capacity", proxy.grant_capacity, methods=["POST"])
    app.add_route("/rl/start_session", proxy.start_session, methods=["POST"])
    app.add_route("/export_trajectories", proxy.export_trajectories, methods=["POST"])
    # The first that fits is taken, so v1 is not mistaken for a session.
    for session in ("/{session_id}/v1", "/v1", "", "/{session_id}"):
        for name, protocol in PROTOCOLS.items():
            app.add_route(f"{session}/{name}", functools.partial(proxy.complete, protocol), methods=["POST"])
        app.add_route(f"{session}/messages/count_tokens", proxy.count_tokens, methods=["POST"])
        app.add_route(f"{session}/models", proxy.models)
        app.add_route(f"{session}/rl/set_reward", proxy.set_reward, methods=["POST"])
        app.add_route(f"{session}/rl/end_session", proxy.end_session, methods=["POST"])
    return app


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="An OpenAI server that keeps the tokens for training.")
    add = parser.add_argument
    add("--server", action="append", required=True, help="URL of an inference server; may be repeated")
    add("--model-path", required=True, help="Hugging Face folder with the tokenizer")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8100, help="port to listen on")
    given = os.environ.get("NANO_AREAL_ADMIN_KEY")
    add("--admin-key", default=given, help="default: $NANO_AREAL_ADMIN_KEY, else a new one, which is printed")
    add("--seed", type=int, help="makes the sampling of a run repeatable")
    add("--sampling", type=orjson.loads, default={}, help='JSON: other defaults, as {"max_new_tokens": 500}')
    add("--request-timeout", type=float, default=3600.0, help="seconds for one generation")
    add("--request-retries", type=int, default=3, help="tries after a connection error or a 5xx")
    add("--session-timeout-seconds", type=float, default=3600.0, help="an idle session is dropped after this")
    add("--chat-template-type", choices=["concat", "hf"], default="concat", help="hf: render turns in full")
    add(
        "--side-conversations",
        type=orjson.loads,
        default=PATTERNS,
        help="JSON list: patterns of calls without a reward",
    )
    add("--fixed-sampling", action="append", default=[], help="a field of --sampling that no agent may change")
    add("--tool-call-parser", help="form of tool calls (calls/tools.py); default: what the tokenizer says, or qwen")
    add("--reasoning-parser", help="form of its reasoning; default: <think> ... </think>")
    add("--exit-with-parent", action="store_true", help="end when standard input is closed")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Returns 2, after one line on stderr, if it cannot start."""
    args = parse_args(argv)
    key = args.admin_key or secrets.token_urlsafe(16)
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(listen(args.host, args.port))
            tokenizer = load_tokenizer(args.model_path)
            engine = RemoteInfEngine(
                args.server, request_timeout=args.request_timeout, request_retries=args.request_retries
            )
            stack.callback(engine.destroy)
            engine.initialize()
            if engine.context_length:
                args.sampling = {"max_new_tokens": engine.context_length} | args.sampling
            options = {f.name: getattr(args, f.name) for f in fields(Proxy) if f.kw_only and f.name in args}
            app = create_app(engine, tokenizer, key, **options)
        except (OSError, ValueError, TypeError, EngineError) as error:
            print("error:", " ".join(str(error).split())[:300], file=sys.stderr)
            return 2
        hint = "" if args.admin_key else f", admin key {key}"  # one that was given stays out of the logs
        url = f"http://{args.host}:{listener.getsockname()[1]}"
        print(f"proxy at {url}{hint}", flush=True)
        if not args.exit_with_parent:  # started by hand: here is a session to try an agent with
            sessions = app.state.proxy.sessions
            sessions.grant()
            session = f"{url}/{sessions.start('by hand').session_id}"
            print(f"a session: OPENAI_BASE_URL={session}/v1 ANTHROPIC_BASE_URL={session}, any key", flush=True)
        serve(app, listener, args.exit_with_parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
