r"""The proxy answers agents in the protocols of OpenAI and Anthropic, and records all sampled tokens for training.

Each episode has a session at one proxy. An agent sends the id of its session in the URL or as the API key. The id is
long and random, so nobody can guess it. A request marked "admin" below needs the admin key. Clients may omit `/v1`.

    POST /grant_capacity (admin)                  let one more session start
    POST /rl/start_session (admin)                use one grant to start a session, and return the session's id; with
                                                  `grant`: first add the grant; `sampling`: default sampling parameters
    POST /{session_id}/v1/chat/completions        answer one call in the protocol of OpenAI's chat completions
    POST /{session_id}/v1/responses               answer one call in the protocol of OpenAI's Responses
    POST /{session_id}/v1/messages                answer one call in the protocol of Anthropic's Messages
    POST /{session_id}/v1/messages/count_tokens   return the number of prompt tokens for a body of /messages
    GET  /{session_id}/v1/models                  list the only model; /models/{id} returns this model
    GET  /{session_id}/v1/responses/{id}          return a finished response; with /input_items: list its input
    POST /{session_id}/rl/set_reward              set the reward of one interaction, by default of the last
    POST /{session_id}/rl/end_session             end the session: stop its running calls, refuse new calls (410)
    POST /export_trajectories (admin)             return the interactions of an ended session, then forget the session;
                                                  with `rewards`: first set these rewards and end the session
    POST /set_version (admin)                     set the version of the trainer's newest weights
    GET  /health                                  return the number of sessions and the number of unused grants

This example shows how a call becomes a prompt. The model answered "Hi!" in the first turn. The second call is:

    {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Hi!"},
                  {"role": "user", "content": "more"}], "temperature": 0.7}

    (1) calls/messages.py reads three messages and the temperature 0.7 from the body.
    (2) calls/turn.py adds the call to the conversation tree (cache.py). The second call's parent is the first turn.
    (3) calls/prompts.py adds \n<|im_start|>user\nmore<|im_end|>\n and the start of an answer to the parent's tokens.
    (4) `Proxy.gconfig` collects the sampling parameters from the body, the session and the option `sampling`.
    (5) engine.py requests the tokens from a server, and calls/replies.py writes the reply, whole or as a stream.

Sampling. The option `sampling` gives default values of the sampling parameters. An evaluation may have other default
values than training. An agent can override the default value of every parameter that the key `fixed_sampling` does not
list. If an agent sets top_p or a penalty, training cannot reproduce the probabilities, so the loss excludes the turn.

Errors. The proxy answers an agent's mistake with a 4xx status and an error in the agent's protocol. SDKs retry a
request after status 409, 429 or 500, so an agent's mistake never gets status 409 or 500. If a session asks for too many
answers at the same time (`Limits.answers`), its request gets status 429, because a later retry may succeed. Status 503
means that no inference server answered. A call that arrives during a weight update is answered after the update.
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
from dataclasses import dataclass, field
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from cache import Interaction, check_style
from calls.messages import AgentRequest, Refusal, get
from calls.prompts import PromptBuilder, TextReader
from calls.replies import PROTOCOLS, Protocol, input_items
from calls.sessions import Session, SessionTable
from calls.tools import OutputParser
from calls.turn import EventStream, Turn, earlier_turn
from engine import EngineError
from inference.fields import as_object
from inference.io_struct import SAMPLING_KEYS, GenerationHyperparameters, ModelRequest, call_seed
from inference.serve import (
    NO_TELEMETRY,
    bearer,
    check_key,
    listen,
    load_tokenizer,
    read_object,
    read_secret,
    reply,
    serve,
)
from run.keys import OpenAIConfig
from run.schedule import ScheduledEngine

LONG_BODY = (
    2**15
)  # bytes; a thread reads every longer body, because reading and tokenising a long text takes seconds


@dataclass(eq=False, repr=False)
class Proxy:
    """The endpoints of the proxy, in the order in which a session uses them, and the functions that they share."""

    engine: Any
    tokenizer: Any
    admin_key: str
    keys: OpenAIConfig = field(
        default_factory=OpenAIConfig
    )  # values of the configuration keys of rollout.openai
    seed: int | None = None  # the run's seed; with a seed the sampling of a run is repeatable
    sampling: dict[str, Any] = field(
        default_factory=dict
    )  # default values of GenerationHyperparameters
    clock: Callable[[], float] = time.monotonic  # function that returns the time in seconds

    def __post_init__(self) -> None:
        keys, context = self.keys, getattr(self.engine, "context_length", None)  # tokens
        self.prompts = PromptBuilder(self.tokenizer, keys.chat_template_type, context)
        self.parser = OutputParser(self.tokenizer, keys.tool_call_parser, keys.reasoning_parser)
        self.sessions = SessionTable(
            keys.session_timeout_seconds, self.clock, keys.side_conversations
        )
        self.sessions.limits = keys.limits
        GenerationHyperparameters(**self.sampling)  # raises TypeError for an unknown field
        if strange := set(keys.fixed_sampling) - SAMPLING_KEYS:
            raise ValueError(
                f"fixed_sampling: {', '.join(sorted(strange))} is no field of GenerationHyperparameters"
            )
        self._stop_token_ids = (
            [self.tokenizer.eos_token_id] if self.tokenizer.eos_token_id is not None else []
        )

    # Endpoints that start a session

    async def grant_capacity(self, request: Request) -> Response:
        """Add one grant, so that one more session may start. Reply with the number of unused grants."""
        check_key(request, self.admin_key)
        return reply({"capacity": self.sessions.grant()})

    async def start_session(self, request: Request) -> Response:
        """Use one grant to start a session. If the body has {"grant": true}, first add a grant. Raises Refusal 429 if
        there is no grant."""
        check_key(request, self.admin_key)
        body = await self.read_json(request)
        if not isinstance(body.get("task_id"), str | int) or body.get("api_key"):
            raise Refusal(
                "task_id: a string is needed; api_key: leave it out, the proxy replies with a key of its own"
            )
        if get(body, "grant", bool):
            self.sessions.grant()
        session = self.sessions.start(str(body["task_id"]), get(body, "sampling", dict))
        return reply({"session_id": session.session_id, "api_key": session.session_id})

    def start_own_session(self, task_id: str) -> Session:
        """Add a grant and start a session with this grant. Code in the proxy's own process calls this method."""
        self.sessions.grant()
        return self.sessions.start(task_id)

    # Endpoints that an agent calls

    async def complete(self, protocol: Protocol, request: Request) -> Response:
        """Answer one call. A new call starts a new turn. If the call is a retry, the proxy can answer with the reply of
        an earlier turn."""
        session = self.sessions.open(session_id_of(request))
        raw = await self.read_body(request)
        key = hashlib.blake2b(raw + protocol.id_prefix.encode()).digest()
        says_so = request.headers.get("x-stainless-retry-count", "0") != "0"
        async with (
            session.beginning
        ):  # this lock makes a retry wait while a thread still reads the first request
            turn = earlier_turn(session, key, says_so) or await self.begin(
                protocol, session, raw, key
            )
        if not turn.ask.stream:
            return reply(await turn.reply(request))
        frames = turn.events(request)
        await anext(
            frames
        )  # if the call failed before its first token, `anext` raises the call's error
        return EventStream(frames, headers={"cache-control": "no-store"})

    async def begin(self, protocol: Protocol, session: Session, raw: bytes, key: bytes) -> Turn:
        """Add a new turn to the conversation tree, build the turn's prompt, and start to generate the answers.

        `key` is the hash of the body `raw`. Raises Refusal if the request is not valid or the session has ended. If the
        prompt cannot be built, the turn is removed from the tree.
        """
        ask = await in_thread(raw, lambda: protocol.parse(read_object(raw), session.finished))
        self.sessions.limits.check(session, ask)
        gconfigs = [self.gconfig(ask, session, k) for k in range(ask.n)]
        names = [f"{session.task_id}.{session.calls + k}" for k in range(ask.n)]
        session.calls += ask.n
        turn = Turn(session, protocol, ask, self.parser, self.keys.store)
        try:
            prompt, opening = await in_thread(raw, lambda: self.prompt(ask, turn.parent))
            if session.ended:
                raise Refusal("session: it ended while this call was read", 410)
        except BaseException:
            turn.forget()
            raise
        calls = [
            ModelRequest(prompt, gconfig=g, session=session.session_id, call=c)
            for g, c in zip(gconfigs, names)
        ]
        marks = self.parser.foreign(ask.callable_tools)
        turn.start(
            self.engine, calls, lambda: TextReader(self.tokenizer, gconfigs[0], opening, marks)
        )
        turn.task.add_done_callback(lambda _: self.sessions.touch(session))
        session.turns[key].append(turn)
        return turn

    def prompt(self, ask: AgentRequest, parent: Interaction | None) -> tuple[list[int], str]:
        """Return the prompt tokens of a call, and the opening: the part of the answer that the prompt already contains.

        Raises Refusal if the call is not valid.
        """
        ids = self.prompts.prompt(ask, parent)
        end = ids[-16:]  # a prompt's final <think> fits in 16 tokens
        last = next(
            filter(None, map(self.prompts.bare_text, reversed(end))), ""
        )  # text of the last token with a text
        begun = self.parser.begun(self.tokenizer.decode(end)) if last.endswith(">") else ""
        opening = self.parser.opening(ask.tool_choice, ask.callable_tools, begun)
        return ids + self.prompts.encode(opening) if opening else ids, begun + opening

    def gconfig(self, ask: AgentRequest, session: Session, k: int) -> GenerationHyperparameters:
        """Return the sampling parameters of a call's k-th answer. The engine limits max_new_tokens to the context."""
        defaults = self.sampling | session.sampling
        own = {
            name: v
            for name, v in ask.sampling.items()
            if name not in defaults.keys() & self.keys.fixed_sampling
        }
        chosen = defaults | own
        chosen["stop_token_ids"] = [*self._stop_token_ids, *chosen.get("stop_token_ids", [])]
        if "seed" in own:
            chosen["seed"] += k
        elif self.seed is not None:
            chosen["seed"] = call_seed(self.seed, session.task_id, session.calls + k)
        return GenerationHyperparameters(**chosen)

    async def count_tokens(self, request: Request) -> Response:
        """Reply with the number of prompt tokens that a call with this body would have (Anthropic's protocol)."""
        session = self.sessions.open(session_id_of(request))
        raw = await self.read_body(request)
        async with session.beginning:  # with this lock, a session uses at most one thread at a time
            ask = await in_thread(
                raw, lambda: PROTOCOLS["messages"].parse(read_object(raw), session.finished)
            )
            ids, _ = await in_thread(
                raw, lambda: self.prompt(ask, session.cache.find_parent(ask.messages))
            )
        return reply({"input_tokens": len(ids)})

    async def models(self, request: Request) -> Response:
        """Return the model that the path names, or a list of models. The proxy serves one model under every name. The
        reply has the keys of both OpenAI's and Anthropic's protocol.
        """
        name = request.path_params.get("model_id", "default")
        openai = {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "pocket-areal",
            "type": "model",
        }
        anthropic = {
            "display_name": name,
            "created_at": "1970-01-01T00:00:00Z",
            "lifecycle": "active",
        }
        models = {
            "object": "list",
            "data": [openai | anthropic],
            "has_more": False,
            "first_id": name,
            "last_id": name,
        }
        return reply(openai | anthropic if "model_id" in request.path_params else models)

    async def response(self, request: Request) -> Response:
        """Return a finished reply of the session, exactly as the agent received it."""
        return reply(self.finished(request).reply)

    async def input_items(self, request: Request) -> Response:
        """List the input items of a finished response. By default, reply with the newest 20 items, newest first."""
        found, query = (
            self.finished(request),
            {"limit": "20", "order": "desc"} | dict(request.query_params),
        )
        if query["limit"] not in map(str, range(1, 101)):
            raise Refusal("limit: an integer from 1 to 100 is needed")
        items = input_items(found.messages, found.interaction_id)[
            :: 1 if query["order"] == "asc" else -1
        ]
        ids = [item["id"] for item in items]
        begin = ids.index(query["after"]) + 1 if query.get("after") in ids else 0
        end = min(begin + int(query["limit"]), len(ids))
        shown = ids[begin:end] or [None]
        page = {"first_id": shown[0], "last_id": shown[-1], "has_more": end < len(ids)}
        return reply({"object": "list", "data": items[begin:end]} | page)

    def finished(self, request: Request) -> Interaction:
        """Return the finished interaction that the path names, or raise Refusal 404."""
        found = self.sessions.open(session_id_of(request)).finished(
            request.path_params["response_id"]
        )
        if not found:
            raise Refusal("response_id: this session has no finished response with this id", 404)
        return found

    # Endpoints that set a reward, end a session and export a session

    async def set_reward(self, request: Request) -> Response:
        """Set the reward of the interaction `interaction_id`, or of the last interaction if the body has no id."""
        self.sessions.open(
            session_id_of(request)
        )  # `open` refuses unknown sessions before the body is read
        body = await self.read_json(request)
        self.reward(self.sessions.open(session_id_of(request)), body)
        return reply({"message": "ok"})

    def reward(self, session: Session, body: dict[str, Any]) -> None:
        """Set the reward that a body of /rl/set_reward contains. Raises Refusal for an unknown interaction."""
        interaction_id, reward = get(body, "interaction_id", str), body.get("reward")
        try:
            if interaction_id is None:
                session.cache.set_last_reward(reward)
            else:
                session.cache.set_reward(interaction_id, reward)
        except KeyError as error:
            raise Refusal(error.args[0]) from error

    async def end_session(self, request: Request) -> Response:
        """End a session. Ending a session twice is not an error. With {"discard": true}, also forget the session."""
        session = self.sessions.find(
            session_id_of(request)
        )  # `find` refuses unknown sessions before the body is read
        body = await self.read_json(request)
        self.sessions.end(session)
        if body.get("discard"):
            self.sessions.forget(session)
        return reply(
            {
                "interaction_count": len(session.cache.finished()),
                "rewarded_count": session.rewarded_count,
            }
        )

    async def export_trajectories(self, request: Request) -> Response:
        """Reply with the interactions of an ended session and their discounted rewards, then forget the session.

        If the body has a list `rewards`, first set these rewards and end the session. Each reward has the form of a
        body of /rl/set_reward.
        """
        check_key(request, self.admin_key)
        body = await self.read_json(request)
        session = self.sessions.find(str(body.get("session_id")))
        if (rewards := get(body, "rewards", list)) is not None:
            for one in rewards:
                self.reward(session, as_object(one, "rewards"))
            self.sessions.end(session)
        if not session.ended:
            raise Refusal(
                "session_id: the session is still open; POST /{session_id}/rl/end_session first"
            )
        style = body.get("style", "individual")
        check_style(
            style
        )  # `check_style` raises Refusal before `apply_reward_discount` changes the rewards
        rewarded = (
            session.rewarded_count
        )  # count the rewards before `apply_reward_discount` adds rewards to parents
        session.cache.apply_reward_discount(body.get("discount", 1.0))
        interactions = {
            key: exported_form(i) for key, i in session.cache.export_interactions(style).items()
        }
        self.sessions.forget(session)
        return reply({"interactions": interactions, "rewarded_count": rewarded})

    async def health(self, request: Request) -> Response:
        """Reply with the number of sessions and the number of unused grants."""
        self.sessions.expire()
        return reply(
            {"status": "ok", "sessions": len(self.sessions), "capacity": self.sessions.capacity}
        )

    async def read_body(self, request: Request) -> bytes:
        """Return the bytes of a request's body. Raises Refusal 413 if the body is too long, and Refusal 408 if the
        body arrives too slowly."""
        raw, limits = bytearray(), self.sessions.limits
        try:
            async with asyncio.timeout(limits.seconds):
                async for chunk in request.stream():
                    raw += chunk
                    if len(raw) > limits.body_bytes:
                        raise Refusal(f"body: it is longer than {limits.body_bytes} bytes", 413)
        except TimeoutError as error:
            raise Refusal("body: too slow", 408) from error
        return bytes(raw)

    async def read_json(self, request: Request) -> dict[str, Any]:
        """Return a request's body as a JSON object. Raises Refusal if the body is too long or is not a JSON object."""
        return read_object(await self.read_body(request))

    async def set_version(self, request: Request) -> Response:
        """Set the version of the trainer's newest weights.

        The proxy refuses a server's answer if the answer has tokens of a version newer than the trainer's version.
        """
        check_key(request, self.admin_key)
        self.engine.servers.limit = get(await self.read_json(request), "version", int, 0)
        return reply({})


def exported_form(interaction: Interaction) -> dict[str, Any]:
    """Return an interaction as the JSON object that the trainer receives."""
    parent = interaction.parent.interaction_id if interaction.parent else None
    row = {"tensors": interaction.to_lists(), "reward": interaction.reward, "parent": parent}
    row |= {"reply": interaction.reply, "stop_reason": interaction.tokens.stop_reason}
    return row | {"messages": interaction.messages, "output": interaction.output_message_list}


def session_id_of(request: Request) -> str:
    """Return the session id in the path or, if there is none, the API key. Raises Refusal 401 if the request has no
    session id and no key."""
    named = (
        request.path_params.get("session_id") or bearer(request) or request.headers.get("x-api-key")
    )
    if not named:
        raise Refusal("api_key: the session's id is needed, as API key or in the path", 401)
    return named


async def in_thread(raw: bytes, function: Callable[[], Any]) -> Any:
    """Return the result of `function`, which reads the body `raw`. If the body is long, `function` runs in a thread."""
    return await asyncio.to_thread(function) if len(raw) > LONG_BODY else function()


async def error_reply(request: Request, error: Exception) -> Response:
    """Return a reply that reports `error`. The request's path decides whether the reply follows Anthropic's or OpenAI's
    protocol."""
    status, message = getattr(error, "status", None) or 500, str(error)
    if isinstance(
        error, HTTPException
    ):  # the web framework found no endpoint for this path and method
        status, message = error.status_code, f"{request.method} {request.url.path}: {error.detail}"
    protocol = (
        "messages"
        if request.url.path.endswith(("/messages", "/messages/count_tokens"))
        else "responses"
    )
    return reply(PROTOCOLS[protocol].error(status, message, getattr(error, "code", "")), status)


def create_app(engine: Any, tokenizer: Any, admin_key: str, **options: Any) -> FastAPI:
    """Return the web application.

    `engine` must have the method `async agenerate(ModelRequest)`. `options` are keys of rollout.openai and fields of
    `Proxy`.
    """
    keys = OpenAIConfig(
        **{name: options.pop(name) for name in vars(OpenAIConfig()) if name in options}
    )
    proxy = Proxy(engine, tokenizer, admin_key, keys, **options)
    handlers: Any = dict.fromkeys(
        (ValueError, EngineError, HTTPException, ClientDisconnect), error_reply
    )
    app = FastAPI(
        title="pocket-areal proxy",
        openapi_url=None,
        exception_handlers=handlers,
        telemetry=NO_TELEMETRY,
    )
    app.state.proxy = proxy
    # The web framework takes the first matching route. The route "/v1" stands before the route "/{session_id}", so "v1"
    # is never taken for a session id.
    # A path contains "//" if a client appends "/v1" or "/messages" to a URL that ends with a slash.
    for session in (
        "/{session_id}/v1",
        "/v1",
        "",
        "/{session_id}",
        "/{session_id}//v1",
        "//v1",
        "/{session_id}/v1/",
    ):
        for name, protocol in PROTOCOLS.items():
            app.add_route(
                f"{session}/{name}", functools.partial(proxy.complete, protocol), methods=["POST"]
            )
        app.add_route(f"{session}/messages/count_tokens", proxy.count_tokens, methods=["POST"])
        app.add_route(f"{session}/models", proxy.models)
        app.add_route(f"{session}/models/{{model_id:path}}", proxy.models)
        app.add_route(f"{session}/responses/{{response_id}}", proxy.response)
        app.add_route(f"{session}/responses/{{response_id}}/input_items", proxy.input_items)
        app.add_route(f"{session}/rl/set_reward", proxy.set_reward, methods=["POST"])
        app.add_route(f"{session}/rl/end_session", proxy.end_session, methods=["POST"])
    app.add_route("/health", proxy.health)
    app.add_route("/grant_capacity", proxy.grant_capacity, methods=["POST"])
    app.add_route("/rl/start_session", proxy.start_session, methods=["POST"])
    app.add_route("/set_version", proxy.set_version, methods=["POST"])
    app.add_route("/export_trajectories", proxy.export_trajectories, methods=["POST"])
    return app


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Answer the calls of agents, and keep the tokens for training."
    )
    add = parser.add_argument
    add(
        "--server",
        action="append",
        required=True,
        help="URL of an inference server; may be repeated",
    )
    add("--model-path", required=True, help="Hugging Face folder with the tokenizer")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8100, help="port to listen on")
    add(
        "--admin-key",
        type=read_secret,
        default=os.getenv("POCKET_AREAL_ADMIN_KEY"),
        help="-: stdin; default: a new key",
    )
    add(
        "--server-key",
        type=read_secret,
        default=os.getenv("POCKET_AREAL_SERVER_KEY", ""),
        help="-: from stdin",
    )
    add("--seed", type=int, help="an integer makes the sampling of a run repeatable")
    add(
        "--sampling",
        type=orjson.loads,
        default={},
        help='default parameters as JSON, like {"max_new_tokens": 500}',
    )
    add(
        "--request-timeout", type=float, default=3600.0, help="seconds that one generation may take"
    )
    add(
        "--request-retries",
        type=int,
        default=3,
        help="number of retries after a connection error or a 5xx status",
    )
    add(
        "--wait-for-servers",
        action="store_true",
        help="lost servers are started again: requests wait for them",
    )
    add(
        "--openai",
        type=orjson.loads,
        default={},
        help='keys of rollout.openai as JSON, like {"store": "honour"}',
    )
    add(
        "--schedule",
        default=os.devnull,
        help="file to which each call is recorded (run/schedule.py)",
    )
    add("--replay", default="", help="folder of the run whose calls are repeated (run/replay.py)")
    add("--exit-with-parent", action="store_true", help="exit when standard input is closed")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the proxy until a signal stops the process. If the proxy cannot start, print one line and return 2."""
    args = parse_args(argv)
    key = args.admin_key or secrets.token_urlsafe(16)
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(listen(args.host, args.port, args.admin_key))
            tokenizer = load_tokenizer(args.model_path)
            keys = ("request_timeout", "request_retries", "wait_for_servers", "schedule", "replay")
            engine = ScheduledEngine(
                args.server, key=args.server_key, **{name: getattr(args, name) for name in keys}
            )
            stack.callback(engine.destroy)
            engine.initialize()
            if engine.context_length:
                args.sampling = {"max_new_tokens": engine.context_length} | args.sampling
            given = vars(OpenAIConfig(**args.openai))  # raises TypeError for an unknown key
            openai = TypeAdapter(OpenAIConfig).validate_python(
                given
            )  # raises ValueError for a wrong value
            app = create_app(
                engine, tokenizer, key, seed=args.seed, sampling=args.sampling, **vars(openai)
            )
        except (OSError, ValueError, TypeError, EngineError) as error:
            print("error:", " ".join(str(error).split())[:300], file=sys.stderr)
            return 2
        hint = (
            "" if args.admin_key else f", admin key {key}"
        )  # print only a new key, never a key that the user set
        url = f"http://{args.host}:{listener.getsockname()[1]}"
        print(f"proxy at {url}{hint}", flush=True)
        if (
            not args.exit_with_parent
        ):  # a person who starts the proxy by hand gets a session to try an agent
            session = f"{url}/{app.state.proxy.start_own_session('by hand').session_id}"
            print(
                f"a session: OPENAI_BASE_URL={session}/v1 ANTHROPIC_BASE_URL={session}, any key",
                flush=True,
            )
        serve(
            app,
            listener,
            args.exit_with_parent,
            openai.limits.header_bytes,
            openai.limits.header_seconds,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
