r"""The proxy: agents talk to it like to OpenAI or Anthropic, and it keeps every token that they cause for training.

Each episode is a session with an id that nobody can guess. An agent names its session in the URL, or gives the id as
its API key. Requests marked "admin" need the admin key. `/v1` may be left out of a path.

    POST /grant_capacity (admin)                  let one more session start; the dispatcher decides when
    POST /rl/start_session (admin)                use one grant to start a session, and return its id
    POST /{session_id}/v1/chat/completions        answer one call in the protocol of OpenAI's chat completions
    POST /{session_id}/v1/responses               answer one call in the protocol of OpenAI's Responses
    POST /{session_id}/v1/messages                answer one call in the protocol of Anthropic's Messages
    POST /{session_id}/v1/messages/count_tokens   return the length of the prompt that this body would have
    GET  /{session_id}/v1/models                  list the only model
    POST /{session_id}/rl/set_reward              reward an interaction by its id, or the last interaction
    POST /{session_id}/rl/end_session             end the session: running calls are stopped, new calls are refused
    POST /export_trajectories (admin)             return the interactions of an ended session, then forget the session
    GET  /health                                  return the number of sessions and of unused grants

How a call becomes a prompt. The session already holds a turn that said "Hi!", and this body arrives:

    {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Hi!"},
                  {"role": "user", "content": "more"}], "temperature": 0.7}

    1. calls/messages.py reads the body: three messages, and temperature 0.7.
    2. calls/turn.py enters the call in the tree (cache.py). Its parent is the turn that said "Hi!".
    3. calls/prompts.py takes the tokens of the parent and adds only <|im_start|>user\nmore<|im_end|> and so on.
    4. `gconfig` completes the sampling: max_new_tokens is missing in the body, so the option `sampling` decides.
    5. engine.py generates the tokens, and calls/replies.py writes the reply, whole or as a stream.

Sampling. Options of the agent win over `sampling`, except the fields named in `fixed_sampling`. If an agent sets top_p
or a penalty, training cannot reproduce the probabilities, so the tokens of this turn do not enter the loss.

Errors. A mistake of an agent is answered with a 4xx in the form of its protocol. SDKs retry a 409, 429 or 500, so an
agent's mistake is none of these. An engine's 4xx is passed on, and 503 says that no server answered. A call that
arrives during a weight update waits and is answered after it.

Several proxies share nothing, so a session stays at one proxy. The proxy does not promise repeatable tokens to an agent
that makes several calls at once: the seed of a call depends on its place among the session's calls.
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

from cache import Interaction, walk
from calls.messages import AgentRequest, Refusal
from calls.prompts import PromptBuilder, TextReader
from calls.replies import PROTOCOLS, Protocol
from calls.sessions import Session, SessionTable
from calls.side_conversations import PATTERNS
from calls.tools import OutputParser
from calls.turn import EventStream, Turn, earlier_turn
from engine import EngineError, RemoteInfEngine
from inference.io_struct import GenerationHyperparameters, ModelRequest, call_seed
from run.serve import listen, load_tokenizer, read_object, reply, serve

ERRORS = (Refusal, ValueError, EngineError, HTTPException, ClientDisconnect)
MAX_BODY = 64 * 2**20  # bytes of the longest request body
LONG_BODY = 2**18  # bytes; the prompt of a longer body is built in a thread, because tokenising it may take seconds


@dataclass(eq=False, repr=False)
class Proxy:
    """The endpoints in the order of a session's life, and the functions that they share."""

    engine: Any
    tokenizer: Any
    admin_key: str
    _: KW_ONLY
    seed: int | None = None  # makes the sampling of a run repeatable
    sampling: dict[str, Any] = field(default_factory=dict)  # GenerationHyperparameters that an agent does not set
    side_conversations: Collection[str] = PATTERNS  # regular expressions of calls/side_conversations.py
    fixed_sampling: Collection[str] = ()  # fields of `sampling` that an agent cannot change
    session_timeout_seconds: float = 3600.0  # an idle session is forgotten after this time
    chat_template_type: str = "concat"  # or "hf", as calls/prompts.py explains
    tool_call_parser: str | None = None  # the form of tool calls, as calls/tools.py explains
    reasoning_parser: str | None = None  # the form of reasoning, as calls/tools.py explains
    clock: Callable[[], float] = time.monotonic  # the time in seconds

    def __post_init__(self) -> None:
        self.prompts = PromptBuilder(self.tokenizer, self.chat_template_type)
        self.parser = OutputParser(self.tokenizer, self.tool_call_parser, self.reasoning_parser)
        self.sessions = SessionTable(self.session_timeout_seconds, self.clock, self.side_conversations)
        GenerationHyperparameters(**self.sampling)  # raises TypeError for an unknown field
        if strange := set(self.fixed_sampling) - {f.name for f in fields(GenerationHyperparameters)}:
            raise ValueError(f"fixed_sampling: {', '.join(sorted(strange))} is no field of GenerationHyperparameters")
        self._fixed = {name: self.sampling[name] for name in self.fixed_sampling if name in self.sampling}
        self._stop_token_ids = [self.tokenizer.eos_token_id] if self.tokenizer.eos_token_id is not None else []

    # Sessions start

    async def grant_capacity(self, request: Request) -> Response:
        """Let one more session start."""
        self.check_admin(request)
        return reply({"capacity": self.sessions.grant()})

    async def start_session(self, request: Request) -> Response:
        """Start a session for one grant. Replies 429 if there is no grant."""
        self.check_admin(request)
        task_id = (await read_json(request)).get("task_id")
        if not isinstance(task_id, str | int):
            raise Refusal("task_id: a string is needed")
        session = self.sessions.start(str(task_id))
        return reply({"session_id": session.session_id, "api_key": session.session_id})

    def start_own_session(self, task_id: str) -> Session:
        """Start a session for the process that runs this proxy; nobody has to send a grant."""
        self.sessions.grant()
        return self.sessions.start(task_id)

    # An agent calls

    async def complete(self, protocol: Protocol, request: Request) -> Response:
        """Answer one call with the reply of a new turn or, for a retry, of an earlier turn."""
        raw = await read_body(request)
        session = self.sessions.open(session_id_of(request))
        key = hashlib.blake2b(raw + protocol.id_prefix.encode()).digest()
        says_so = request.headers.get("x-stainless-retry-count", "0") != "0"
        turn = earlier_turn(session, key, says_so) or await self.begin(protocol, session, raw, key)
        if not turn.ask.stream:
            return reply(await turn.reply(request))
        frames = turn.events(request)
        await anext(frames)  # an error before the first token is raised here and becomes an HTTP status
        return EventStream(frames, headers={"cache-control": "no-store"})

    async def begin(self, protocol: Protocol, session: Session, raw: bytes, key: bytes) -> Turn:
        """Enter a new turn in the tree, build its prompt and start its generation; `key` is the hash of the body.

        Raises Refusal and then removes the turn from the tree.
        """
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

    def prompt(self, ask: AgentRequest, parent: Interaction | None) -> tuple[list[int], str]:
        """Return the prompt tokens of a call, and the text at their end that belongs to the answer. Raises Refusal."""
        ids = self.prompts.prompt(ask, parent)
        begun = self.parser.begun(self.tokenizer.decode(ids[-16:]))  # 16 tokens hold <think>, even letter by letter
        opening = self.parser.opening(ask.tool_choice, ask.tools, begun)
        return ids + self.prompts.encode(opening), begun + opening

    def gconfig(self, ask: AgentRequest, session: Session, k: int) -> GenerationHyperparameters:
        """Return the sampling of the k-th answer of a call. The engine limits max_new_tokens to the context."""
        chosen = self.sampling | ask.sampling | self._fixed
        chosen["stop_token_ids"] = [*self._stop_token_ids, *chosen.get("stop_token_ids", [])]
        if "seed" in ask.sampling.keys() - self._fixed.keys():
            chosen["seed"] += k
        elif self.seed is not None:
            chosen["seed"] = call_seed(self.seed, session.task_id, session.calls + k)
        return GenerationHyperparameters(**chosen)

    async def count_tokens(self, request: Request) -> Response:
        """Reply with the length of the prompt that this body would have (Anthropic's endpoint)."""
        body = await read_json(request)
        session = self.sessions.open(session_id_of(request))
        ask = PROTOCOLS["messages"].parse(body, session.finished)
        parent = session.cache.find_parent(walk(ask.template_key, ask.messages))
        return reply({"input_tokens": len(self.prompt(ask, parent)[0])})

    async def models(self, request: Request) -> Response:
        """List the one model in the forms of OpenAI and Anthropic; a call may name any model and reaches this one."""
        openai: dict[str, Any] = {"id": "default", "object": "model", "created": 0, "owned_by": "nano-areal"}
        anthropic = {"type": "model", "display_name": "default", "created_at": "1970-01-01T00:00:00Z"}
        ends = {"has_more": False, "first_id": "default", "last_id": "default"}
        return reply({"object": "list", "data": [openai | anthropic]} | ends)

    # An episode is rewarded, ended and exported

    async def set_reward(self, request: Request) -> Response:
        """Set the reward of the interaction `interaction_id`, or of the last one if the body names none."""
        body = await read_json(request)
        session = self.sessions.open(session_id_of(request))
        interaction_id, reward = body.get("interaction_id"), body.get("reward")
        try:
            if interaction_id is None:
                session.cache.set_last_reward(reward)
            else:
                session.cache.set_reward(str(interaction_id), reward)
        except KeyError as error:
            raise Refusal(error.args[0]) from error
        return reply({"message": "ok"})

    async def end_session(self, request: Request) -> Response:
        """End a session; a second time is harmless. With {"discard": true} the session is forgotten, not exported."""
        body = await read_json(request)
        session = self.sessions.find(session_id_of(request))
        self.sessions.end(session)
        if body.get("discard"):
            self.sessions.forget(session)
        finished = session.cache.finished()
        rewarded = sum(interaction.reward is not None for interaction in finished)
        return reply({"interaction_count": len(finished), "rewarded_count": rewarded})

    async def export_trajectories(self, request: Request) -> Response:
        """Reply with the interactions of an ended session and their discounted rewards, then forget the session."""
        self.check_admin(request)
        body = await read_json(request)
        session = self.sessions.find(str(body.get("session_id")))
        if not session.ended:
            raise Refusal("session_id: the session is still open; POST /{session_id}/rl/end_session first")
        exported = session.cache.export_interactions(body.get("style", "individual"))
        session.cache.apply_reward_discount(body.get("discount", 1.0))
        self.sessions.forget(session)
        return reply({"interactions": {key: exported_form(i) for key, i in exported.items()}})

    async def health(self, request: Request) -> Response:
        """Reply with the number of sessions and of unused grants."""
        self.sessions.expire()
        return reply({"status": "ok", "sessions": len(self.sessions), "capacity": self.sessions.capacity})

    def check_admin(self, request: Request) -> None:
        """Raises Refusal 401 if the request has no key, 403 if the key is not the admin key."""
        key = bearer(request)
        if not key:
            raise Refusal("Authorization: `Bearer <admin key>` is needed", 401)
        if not secrets.compare_digest(key.encode(), self.admin_key.encode()):
            raise Refusal("Authorization: this is not the admin key", 403)


def exported_form(interaction: Interaction) -> dict[str, Any]:
    """Return an interaction as JSON for the trainer."""
    parent = interaction.parent.interaction_id if interaction.parent else None
    row = {"tensors": interaction.to_lists(), "reward": interaction.reward, "parent": parent}
    return row | {"messages": interaction.messages, "output": interaction.output_message_list}


def bearer(request: Request) -> str:
    """Return the key of the header `Authorization: Bearer <key>`, or "" if there is none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def session_id_of(request: Request) -> str:
    """Return the session id of the path, else the caller's API key. Raises Refusal 401 if the request has neither."""
    named = request.path_params.get("session_id") or bearer(request) or request.headers.get("x-api-key")
    if not named:
        raise Refusal("api_key: the session's id is needed, as API key or in the path", 401)
    return named


async def read_body(request: Request) -> bytes:
    """Return the bytes of the body. Raises Refusal 413 if the body is longer than MAX_BODY."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BODY:
            raise Refusal(f"body: it is longer than {MAX_BODY} bytes", 413)
    return bytes(raw)


async def read_json(request: Request) -> dict[str, Any]:
    """Return the body as a JSON object. Raises Refusal."""
    return read_object(await read_body(request))


async def error_reply(request: Request, error: Exception) -> Response:
    """Turn an error into a reply in the form of the protocol that the path belongs to."""
    status, message = getattr(error, "status", None) or 500, str(error)
    if isinstance(error, HTTPException):  # the web framework knows no such path or method
        status, message = error.status_code, f"{request.method} {request.url.path}: {error.detail}"
    is_anthropic = request.url.path.endswith(("/messages", "/messages/count_tokens"))
    return reply(PROTOCOLS["messages" if is_anthropic else "responses"].error(status, message), status)


def create_app(engine: Any, tokenizer: Any, admin_key: str, **options: Any) -> FastAPI:
    """Return the web application. `engine` has `async agenerate(ModelRequest)`; `options` are fields of `Proxy`."""
    proxy = Proxy(engine, tokenizer, admin_key, **options)
    handlers: Any = dict.fromkeys(ERRORS, error_reply)
    app = FastAPI(title="nano-areal proxy", openapi_url=None, exception_handlers=handlers)
    app.state.proxy = proxy
    app.add_route("/health", proxy.health)
    app.add_route("/grant_capacity", proxy.grant_capacity, methods=["POST"])
    app.add_route("/rl/start_session", proxy.start_session, methods=["POST"])
    app.add_route("/export_trajectories", proxy.export_trajectories, methods=["POST"])
    # The web framework takes the first route that fits, so "v1" is not read as the id of a session.
    for session in ("/{session_id}/v1", "/v1", "", "/{session_id}"):
        for name, protocol in PROTOCOLS.items():
            app.add_route(f"{session}/{name}", functools.partial(proxy.complete, protocol), methods=["POST"])
        app.add_route(f"{session}/messages/count_tokens", proxy.count_tokens, methods=["POST"])
        app.add_route(f"{session}/models", proxy.models)
        app.add_route(f"{session}/rl/set_reward", proxy.set_reward, methods=["POST"])
        app.add_route(f"{session}/rl/end_session", proxy.end_session, methods=["POST"])
    return app


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A server for agents that keeps their tokens for training.")
    add = parser.add_argument
    add("--server", action="append", required=True, help="URL of an inference server; may be repeated")
    add("--model-path", required=True, help="Hugging Face folder with the tokenizer")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8100, help="port to listen on")
    given = os.environ.get("NANO_AREAL_ADMIN_KEY")
    add("--admin-key", default=given, help="default: $NANO_AREAL_ADMIN_KEY, else a new key, which is printed")
    add("--seed", type=int, help="makes the sampling of a run repeatable")
    add("--sampling", type=orjson.loads, default={}, help='JSON: default sampling, like {"max_new_tokens": 500}')
    add("--request-timeout", type=float, default=3600.0, help="seconds for one generation")
    add("--request-retries", type=int, default=3, help="tries after a connection error or a 5xx")
    add("--session-timeout-seconds", type=float, default=3600.0, help="an idle session is forgotten after this")
    add("--chat-template-type", choices=["concat", "hf"], default="concat", help="hf: render every turn in full")
    add("--side-conversations", type=orjson.loads, default=PATTERNS, help="JSON list of patterns of unrewarded calls")
    add("--fixed-sampling", action="append", default=[], help="a field of --sampling that agents cannot change")
    add("--tool-call-parser", help="form of tool calls (calls/tools.py); default: the tokenizer's, or qwen")
    add("--reasoning-parser", help="form of the reasoning; default: <think> ... </think>")
    add("--exit-with-parent", action="store_true", help="exit when standard input is closed")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal. Returns 2 and prints one line on stderr if the proxy cannot start."""
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
        hint = "" if args.admin_key else f", admin key {key}"  # a key that was given must not reach a log
        url = f"http://{args.host}:{listener.getsockname()[1]}"
        print(f"proxy at {url}{hint}", flush=True)
        if not args.exit_with_parent:  # a person started the proxy and gets a session to try an agent
            session = f"{url}/{app.state.proxy.start_own_session('by hand').session_id}"
            print(f"a session: OPENAI_BASE_URL={session}/v1 ANTHROPIC_BASE_URL={session}, any key", flush=True)
        serve(app, listener, args.exit_with_parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
