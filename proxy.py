"""The proxy: an agent talks to it as to any OpenAI server, and every token it causes is kept for training.

    agent -> POST /{session_id}/v1/chat/completions -> prompt ids -> engine.agenerate -> reply
                                                          \\_ InteractionCache of the session

Sessions (sessions.py). An episode is a session, named by an unguessable id that is part of the URL; the same id
serves as a Bearer or x-api-key for clients that cannot take a path. Who has the admin key grants, starts and
exports; who has the id calls, rewards and ends. What is exported is forgotten.

Tokens. The prompt of a first turn is the chat template over its messages. The prompt of a later turn is

    parent's prompt ids + parent's output ids + the tail: what the template puts after an assistant's text

so the tokens that were sampled are the tokens of the next prompt, and history is never rendered again (one turn
costs its own length, not the conversation's). The tail is cut from a rendering of [user, assistant: SENTINEL] +
the new messages: what stands behind the sentinel. It begins with the end-of-turn token, which the parent usually
sampled itself and which is then dropped; a parent that was cut by length did not, and there the token stays, in
the prompt, untrained. That a template can be cut like this is checked once at the start, on a conversation of two
turns; where it cannot, every turn is rendered in full, and concat forks the row where the tokens differ.

A call is entered in the tree before it is generated, and complete before its reply leaves. If the caller hangs
up, or the session ends, the generation is cancelled and the call leaves no trace.

What a caller did wrong is a 4xx with {"error": {"message", "type"}}, never a 500 (which SDKs would retry, and so
generate again), never a 409 (likewise). An engine's 4xx is passed on; 503 says that no server answered.

It does not promise repeatable tokens to an agent that calls concurrently in one session: the seed of a call comes
from the server's seed, the task and its place among the session's calls.

AReaL keys sessions by API key only, accepts work after the end, sweeps them by the age of the last request's
start (in the midst of a long generation, too), leaks grants, and leaves five management routes open to anybody.
"""

import argparse
import asyncio
import contextlib
import functools
import hashlib
import inspect
import os
import secrets
import sys
import time
from collections.abc import Callable
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from jinja2 import TemplateError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from cache import InteractionWithTokenLogpReward
from engine import EngineError, GenerationHyperparameters, ModelRequest, ModelResponse, RemoteInfEngine
from messages import AgentRequest, BadRequest, Message
from plumbing.serve import listen, load_tokenizer, serve
from replies import PROTOCOLS, Answer, Protocol
from sessions import ProxyError, Session, SessionTable

SENTINEL = "\u27e6the assistant's text\u27e7"
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class PromptBuilder:
    """Messages to token ids, by the tokenizer's chat template (the second part of the essay)."""

    def __init__(self, tokenizer: Any, chat_template_type: str = "concat") -> None:
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template")
        self._tokenizer = tokenizer
        self.splices = chat_template_type == "concat" and self._is_local()

    def _is_local(self) -> bool:
        """Whether a two-turn conversation, spliced, is the very sequence that its full rendering is."""
        talk = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
        try:
            spliced = self._encode(self._render(talk[:1], {})) + self._encode("b") + self._tail(talk[2:], {})
            return spliced == self._encode(self._render(talk, {}))
        except BadRequest:
            return False

    def prompt(
        self, messages: list[Message], parent: InteractionWithTokenLogpReward | None, kwargs: dict[str, Any]
    ) -> list[int]:
        """The prompt ids of a call. Raises BadRequest where the template refuses the messages."""
        if parent is None or not self.splices:
            return self._encode(self._render(messages, kwargs))
        known = len(parent.messages) + len(parent.output_message_list)
        tail, tokens = self._tail(messages[known:], kwargs), parent.tokens
        ended_itself = tokens.output_tokens[-1:] == tail[:1]
        return tokens.input_tokens + tokens.output_tokens + tail[ended_itself:]

    def text(self, response: ModelResponse, stop: list[str]) -> str:
        """What the agent reads: without the end-of-turn token, and without a stop string and what follows it."""
        text = self._tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        return text[: min((i for s in stop if (i := text.find(s)) >= 0), default=None)]

    def _tail(self, new_messages: list[Message], kwargs: dict[str, Any]) -> list[int]:
        stub = [{"role": "user", "content": "x"}, {"role": "assistant", "content": SENTINEL}]
        return self._encode(self._render(stub + new_messages, kwargs).partition(SENTINEL)[2])

    def _render(self, messages: list[Message], kwargs: dict[str, Any]) -> str:
        render = self._tokenizer.apply_chat_template
        if taken := kwargs.keys() & inspect.signature(render).parameters.keys():
            raise BadRequest(
                f"chat_template_kwargs: {', '.join(sorted(taken))} cannot be set, variables of the template can"
            )
        try:
            return render(messages, add_generation_prompt=True, tokenize=False, **kwargs)
        except (TemplateError, TypeError, ValueError, RecursionError) as error:
            raise BadRequest(f"messages: the chat template refuses them: {error}") from error

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def call_seed(seed: int, task_id: str, call: int) -> int:
    """The seed of a session's k-th call: the same run asks for the same noise, whatever else is going on."""
    digest = hashlib.blake2b(f"{seed}/{task_id}/{call}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1  # below 2^31


class Proxy:
    """The endpoints. Each takes the raw request: bodies are small, many, and not ours to type."""

    def __init__(
        self,
        engine: Any,
        tokenizer: Any,
        admin_key: str,
        *,
        seed: int | None = None,
        sampling: dict[str, Any] | None = None,
        max_new_tokens: int | None = None,
        session_timeout_seconds: float = 3600.0,
        chat_template_type: str = "concat",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.prompts = PromptBuilder(tokenizer, chat_template_type)
        self.sessions = SessionTable(session_timeout_seconds, clock)
        self._admin_key = admin_key
        self._seed = seed
        self._max_new_tokens = max_new_tokens
        self._sampling = sampling or {}
        self._stop_token_ids = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []

    # Questions

    def check_admin(self, request: Request) -> None:
        """Raises ProxyError 401 without a key, 403 for another one."""
        key = bearer(request)
        if not key:
            raise ProxyError(401, "Authorization: `Bearer <admin key>` is needed")
        if not secrets.compare_digest(key.encode(), self._admin_key.encode()):
            raise ProxyError(403, "Authorization: this is not the admin key")

    def sampling(self, ask: AgentRequest, session: Session) -> GenerationHyperparameters:
        """What the agent set, else our defaults. The engine clips max_new_tokens to what the context leaves."""
        ours = self._sampling | {"stop_token_ids": self._stop_token_ids + self._sampling.get("stop_token_ids", [])}
        if self._max_new_tokens is not None:
            ours["max_new_tokens"] = self._max_new_tokens
        if self._seed is not None:
            ours["seed"] = call_seed(self._seed, session.task_id, session.calls)
        return GenerationHyperparameters(**(ours | ask.sampling))

    # An agent's call

    async def complete(self, protocol: Protocol, request: Request) -> Response:
        """One call: parse, enter in the tree, generate, finish, render."""
        body = await read_json(request)
        session, ask = self.sessions.open(session_id_of(request)), protocol.parse(body)
        for name in ("stream", "tools", "logprobs", "previous"):
            if getattr(ask, name) or ask.n > 1:
                raise BadRequest(f"{name}: this server does not support it; leave it out")
        interaction_id = protocol.id_prefix + secrets.token_hex(16)
        interaction = InteractionWithTokenLogpReward(ask.messages, template_key=ask.template_key, trainable=ask.store)
        session.cache[interaction_id] = interaction
        try:
            prompt = self.prompts.prompt(ask.messages, interaction.parent, ask.template_kwargs)
            gconfig = self.sampling(ask, session)
            session.calls += 1
            call = ModelRequest(prompt, gconfig=gconfig, session=session.session_id)
            response = await self.generate(session, call, request)
            text = self.prompts.text(response, gconfig.stop)
            answer = Answer(interaction_id, response, text)
            interaction.completion = protocol.render(ask, [answer])
            session.cache.finish(interaction_id, response, [answer.message])
        finally:
            session.cache.discard(interaction_id)  # which does nothing to a finished one
        return reply(interaction.completion)

    async def generate(self, session: Session, call: ModelRequest, request: Request) -> ModelResponse:
        """The engine's answer, unless the caller hangs up or the session ends first."""
        generation = asyncio.ensure_future(self.engine.agenerate(call))
        hangup = asyncio.ensure_future(request.receive())  # the body is read: what comes next is the end
        session.running.add(generation)
        try:
            await asyncio.wait((generation, hangup), return_when=asyncio.FIRST_COMPLETED)
            if session.ended:
                raise ProxyError(410, "session: it ended while this call was generated")
            if not generation.done():
                raise ProxyError(499, "the caller hung up")
            return generation.result()
        finally:
            hangup.cancel()
            if generation.cancel():  # it tells the server before it is gone
                await asyncio.gather(generation, return_exceptions=True)
            session.running.discard(generation)
            session.last_used = self.sessions.clock()

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
            raise BadRequest(error.args[0]) from error
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
            raise BadRequest("task_id: a string is needed")
        session = self.sessions.start(str(task_id))
        return reply({"session_id": session.session_id, "api_key": session.session_id})

    async def export_trajectories(self, request: Request) -> Response:
        """The discounted interactions of a session that has ended, which is then forgotten."""
        self.check_admin(request)
        body = await read_json(request)
        session = self.sessions.find(str(body.get("session_id")))
        if not session.ended:
            raise BadRequest("session_id: the session is still open; POST /{session_id}/rl/end_session first")
        try:
            exported = session.cache.export_interactions(body.get("style", "individual"))
            session.cache.apply_reward_discount(body.get("discount", 1.0))
        except ValueError as error:
            raise BadRequest(str(error)) from error
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
    """The session that the path names, else the caller's API key. Raises ProxyError 401 without either."""
    named = request.path_params.get("session_id") or bearer(request) or request.headers.get("x-api-key")
    if not named:
        raise ProxyError(401, "api_key: the session's key, or its id in the path, is needed")
    return named


async def read_json(request: Request) -> dict[str, Any]:
    """The body as an object, whatever its content type says; no body is an empty one. Raises BadRequest."""
    raw = await request.body()
    try:
        body = orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"body: malformed JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("body: a JSON object is needed")
    return body


def reply(body: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


async def error_reply(request: Request, error: Exception) -> Response:
    """Every error that a caller can meet, in OpenAI's form."""
    status, message = getattr(error, "status", None) or 500, str(error)
    if isinstance(error, HTTPException):  # the framework's own: no such path or method
        status, message = error.status_code, f"{request.method} {request.url.path}: {error.detail}"
    kind = ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return reply({"error": {"message": message, "type": kind}}, status)


def create_app(engine: Any, tokenizer: Any, admin_key: str, **options: Any) -> FastAPI:
    """The application. `engine` has `async agenerate(ModelRequest)`; `options` are those of `Proxy`."""
    proxy = Proxy(engine, tokenizer, admin_key, **options)
    of_session: dict[str, Callable] = {"/rl/set_reward": proxy.set_reward, "/rl/end_session": proxy.end_session}
    for name, protocol in PROTOCOLS.items():
        of_session["/v1/" + name] = of_session["/" + name] = functools.partial(proxy.complete, protocol)
    posts = {  # the first that fits is taken, so /v1 is not mistaken for a session
        "/grant_capacity": proxy.grant_capacity,
        "/rl/start_session": proxy.start_session,
        "/export_trajectories": proxy.export_trajectories,
        **of_session,
        **{"/{session_id}" + path: endpoint for path, endpoint in of_session.items()},
    }
    app = FastAPI(title="nano-areal proxy", openapi_url=None)
    app.state.proxy = proxy
    app.add_route("/health", proxy.health)
    for path, endpoint in posts.items():
        app.add_route(path, endpoint, methods=["POST"])
    for error in (ProxyError, BadRequest, EngineError, HTTPException, ClientDisconnect):
        app.add_exception_handler(error, error_reply)
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
    add("--sampling", type=orjson.loads, default={}, help='JSON: other defaults, as {"temperature": 0.7}')
    add("--max-new-tokens", type=int, help="for calls that name no limit; default: what the context leaves")
    add("--request-timeout", type=float, default=3600.0, help="seconds for one generation")
    add("--session-timeout-seconds", type=float, default=3600.0, help="an idle session is dropped after this")
    add("--chat-template-type", choices=["concat", "hf"], default="concat", help="hf: render turns in full")
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
            engine = RemoteInfEngine(args.server, request_timeout=args.request_timeout)
            stack.callback(engine.destroy)
            engine.initialize()
            app = create_app(
                engine,
                tokenizer,
                key,
                seed=args.seed,
                sampling=args.sampling,
                max_new_tokens=args.max_new_tokens or engine.context_length,
                session_timeout_seconds=args.session_timeout_seconds,
                chat_template_type=args.chat_template_type,
            )
        except (OSError, ValueError, EngineError) as error:
            print("error:", " ".join(str(error).split())[:300], file=sys.stderr)
            return 2
        hint = "" if args.admin_key else f", admin key {key}"  # one that was given stays out of the logs
        print(f"proxy at http://{args.host}:{listener.getsockname()[1]}{hint}", flush=True)
        serve(app, listener, args.exit_with_parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
