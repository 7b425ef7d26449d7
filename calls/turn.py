"""Answer one call of an agent, from the call's entry in the conversation tree to the last byte of the reply.

    enter the call in the tree -> generate the answers -> store the answers in the tree -> send the reply

Order. A call's interaction enters the tree before the reply's first byte is sent. The tokens are stored in the tree
before the reply's last byte is sent. A client that has read a reply can immediately continue the conversation or set
the turn's reward.

States. Each turn runs as an asyncio task. A connection that waits for a turn's reply is a listener of this turn.

    state      | event                                       | next state
    -----------+---------------------------------------------+-----------
    running    | all answers are generated                   | finished
    running    | the engine fails, or the session ends       | failed
    running    | the last listener hangs up                  | abandoned
    finished   | the last listener hangs up                  | unread
    unread     | the client sends the request again          | finished
    failed     | the client sends the request again          | replaced
    abandoned  | the client sends the request again          | replaced

The state of a turn decides whether the turn stays in the tree. A finished or unread turn stays in the tree. A failed
turn is removed from the tree. When a turn is abandoned, the server stops generating. The tree keeps the tokens that the
proxy has received for the stream until then, because the client may have read them. A replaced turn stays in the tree
only if a later turn continues the replaced turn's conversation.

Retries. A client repeats a request if the connection times out or the reply has a 5xx status. The SDKs of OpenAI and
Anthropic mark a repeated request with the header x-stainless-retry-count. `match_retry` compares the body of a request,
byte for byte, with the bodies of the session's earlier turns. The first rule that fits the request applies:

    (1) If a turn with the same body is unread, failed or abandoned, the request is a retry of this turn.
    (2) If x-stainless-retry-count is above 0, the request is a retry of a running turn with the same body. If no such
        turn is running, the request is a retry of the last finished turn with the same body and a closed connection.
    (3) If rules 1 and 2 do not apply, the request is a new call, even if an earlier turn has the same body.

Rule 2 ignores a finished turn whose connection is still open, because a client closes its connection before it retries.
A retry gets the reply of the turn that it repeats. A failed or abandoned turn has no reply, so a new turn replaces it.

Example: an agent hangs up during a call and then repeats the request. By rule 1, the second request is a retry. The
state of the abandoned turn changes to replaced, and the proxy starts a new turn. The replaced turn is not trained.
"""

import asyncio
import contextlib
import copy
import dataclasses
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from enum import Enum
from time import monotonic
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse

from cache import Interaction
from calls.messages import AgentRequest, Refusal
from calls.prompts import TextReader
from calls.replies import Answer, Protocol, Stream, parts_of
from calls.sessions import Session
from calls.tools import OutputParser
from inference.io_struct import ModelRequest, ModelResponse
from inference.wire import EngineError

PING_SECONDS = (
    15.0  # after this many seconds without events, a stream sends a comment as a keepalive
)

# `_run` changes a turn's state to finished or failed, `end_with_session` to failed, `_abandon` to abandoned,
# `_listening` to unread, and `earlier_turn` to finished or replaced.
State = Enum("State", "RUNNING FINISHED UNREAD FAILED ABANDONED REPLACED")


class Turn:
    """A call that the proxy is answering. The constructor enters the call in the tree and sets the turn's `parent`."""

    def __init__(
        self, session: Session, kind: Protocol, ask: AgentRequest, parser: OutputParser, store: str
    ) -> None:
        self.session, self.protocol, self._parser = session, kind, parser
        first = kind.id_prefix + secrets.token_hex(16)
        self.ids = [first, *(f"{first}-{k}" for k in range(1, ask.n))]  # one id for each answer
        store = "" if ask.store else store
        for name in self.ids:
            interaction = Interaction(
                ask.messages, name, ask.template_key, store, ask.tools, parent=ask.parent
            )
            self.parent = session.cache.enter(
                name, interaction
            ).parent  # all answers of a turn have the same parent
        self.ask = dataclasses.replace(
            ask, messages=[]
        )  # the turn keeps no messages, because the tree stores them

        # Attributes that change after `__init__`:
        self.state = State.RUNNING
        self.task: asyncio.Task[
            tuple[dict[str, Any], list[Answer]]
        ]  # the task returns the reply and the answers
        self.so_far: list[ModelResponse | None] = [None] * ask.n  # the streamed part of each answer
        # When tokens arrive, the future `news` is done, and a new future replaces it.
        self.news = asyncio.get_running_loop().create_future()
        self.listeners = 0  # number of connections that wait for the reply
        self.retries = 0  # number of requests that repeated this turn
        self.transport: Any = (
            None  # connection of the last listener; None if unknown (inference/serve.py)
        )

    # Events

    def start(
        self, engine: Any, calls: list[ModelRequest], reader: Callable[[], TextReader]
    ) -> None:
        """Start to generate one answer for each request in `calls`. `reader` returns a new TextReader for an answer."""
        self._reader, self.input_len = (
            reader,
            len(calls[0].input_ids),
        )  # input_len: number of prompt tokens
        self.task = asyncio.ensure_future(self._run(engine, calls))
        self.session.running.add(self)
        self.task.add_done_callback(self._clean_up)

    def end_with_session(self) -> None:
        """Stop the generation of a turn whose session ends. The turn's unfinished interactions leave the tree."""
        if self.state is State.RUNNING:
            self.state = State.FAILED
        self.task.cancel()

    def forget(self) -> None:
        """Remove the unfinished interactions of this turn from the tree."""
        for name in self.ids:
            self.session.cache.discard(name)

    def _clean_up(self, task: asyncio.Task) -> None:
        """Remove the turn from the session's running turns, and remove the turn's unfinished interactions from the
        tree.

        asyncio calls this method when the task is done, even if the task was cancelled before its first step.
        """
        self.session.running.discard(self)
        self.forget()
        # The exception is read, so that asyncio logs no warning about it. On a cancelled task, `exception` raises the
        # task's CancelledError and removes it from the task. Otherwise the task, the error's traceback and the turn
        # would refer to each other.
        with contextlib.suppress(asyncio.CancelledError):
            task.exception()

    # Generation

    async def _run(
        self, engine: Any, calls: list[ModelRequest]
    ) -> tuple[dict[str, Any], list[Answer]]:
        """Generate all answers.

        Return the reply and the answers. If the generation of an answer fails, the method raises the error.
        """
        try:
            responses = await together(
                [self._generate(engine, k, call) for k, call in enumerate(calls)]
            )
            if (
                self.state is not State.RUNNING
            ):  # the engine has answered in spite of the cancellation
                raise asyncio.CancelledError
            answers = [self._finish(k, response) for k, response in enumerate(responses)]
            reply = self.protocol.render(self.ask, answers)
            for answer in answers:
                self.session.cache[answer.interaction_id].reply = reply
            self.state = State.FINISHED
            return reply, answers
        except BaseException:
            if self.state is State.RUNNING:
                self.state = State.FAILED
            raise

    async def _generate(self, engine: Any, k: int, call: ModelRequest) -> ModelResponse:
        """Return the engine's k-th answer.

        For a stream, `on_tokens` stores the answer so far in `so_far` and completes the future `news`.
        """

        def on_tokens(response: ModelResponse) -> None:
            self.so_far[k] = response
            news, self.news = self.news, asyncio.get_running_loop().create_future()
            news.set_result(None)

        async with self.session.places:
            return await (
                engine.agenerate(call, on_tokens) if self.ask.stream else engine.agenerate(call)
            )

    def _finish(self, k: int, response: ModelResponse) -> Answer:
        """Parse the k-th answer, and finish its interaction by storing the answer in the tree."""
        reader = self._reader()
        parsed = self._parser.parse(reader.whole(response.output_tokens), self.ask.callable_tools)
        if parsed.calls and response.stop_reason == "stop":
            response.stop_reason = "tool_calls"
        texts = (
            [reader.token(token) for token in response.output_tokens] if self.ask.logprobs else []
        )
        answer = Answer(self.ids[k], response, parsed, texts, reader.stopped_by)
        self.session.cache.finish(self.ids[k], response, [answer.message])
        return answer

    # Listening

    @contextlib.asynccontextmanager
    async def _listening(self, request: Request) -> AsyncIterator[asyncio.Future]:
        """Count the caller as a listener, and yield a future that is done when the caller hangs up.

        If the last listener leaves while the turn is running, the turn becomes abandoned and the generation stops. If
        the last listener hangs up after the turn has finished, the turn becomes unread.
        """
        hangup = asyncio.ensure_future(
            request.receive()
        )  # after the request's body, only a disconnect can arrive
        self.listeners, self.transport = self.listeners + 1, request.scope.get("transport")
        try:
            yield hangup
        finally:
            self.listeners -= 1
            if not self.listeners:
                runs = self.task.cancel()  # `cancel` returns False if the task is done
                if self.state is State.RUNNING:
                    self._abandon()
                elif self.state is State.FINISHED and hangup.done():
                    self.state = State.UNREAD
                if runs:
                    await asyncio.wait(
                        {self.task}
                    )  # wait until the engine has told the server to abort
            hangup.cancel()

    def _abandon(self) -> None:
        """Store the streamed tokens. The client may have read them, and may continue from them before the server has
        stopped."""
        self.state = State.ABANDONED
        for k, streamed in enumerate(
            copy.deepcopy(self.so_far)
        ):  # the engine may still change its own objects
            if streamed:
                streamed.stop_reason = streamed.stop_reason or "abort"
                self._finish(k, streamed)

    def result(self) -> tuple[dict[str, Any], list[Answer]]:
        """Return the reply and its answers. Raises Refusal or EngineError if there is no reply."""
        if self.session.ended:
            raise Refusal("session: it ended while this call was generated", 410)
        if not self.task.done() or self.task.cancelled():
            raise Refusal("call: the caller hung up before the reply was ready", 499)
        return self.task.result()

    async def reply(self, request: Request) -> dict[str, Any]:
        """Wait for the whole reply and return it. Raises Refusal or EngineError if there is no reply."""
        async with self._listening(request) as hangup:
            await asyncio.wait({self.task, hangup}, return_when=asyncio.FIRST_COMPLETED)
            return self.result()[0]

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Yield the events of the reply while the answers are being generated. The first item of the generator is b"".

        If the call fails before the first item, the generator raises the error, and the proxy can reply with an HTTP
        error status. If the call fails later, the generator yields the error as an event.
        """
        streams = [self.protocol.stream(self.ask, self.ids[0], k) for k in range(len(self.ids))]
        readers = [self._reader() for _ in streams]
        async with self._listening(request) as hangup:
            await self._wait(PING_SECONDS, hangup, self.news)
            if self.task.done() or hangup.done():
                self.result()
            yield b""
            yield b"".join(stream.start(self.input_len) for stream in streams)
            due = monotonic() + PING_SECONDS
            try:
                while not self.task.done() and not hangup.done():
                    news, frames = self.news, self._new_events(streams, readers)
                    if frames or monotonic() >= due:
                        yield frames or b": still generating\n\n"
                        due = monotonic() + PING_SECONDS
                    await self._wait(due - monotonic(), hangup, news)
                _, answers = self.result()
                frames = b"".join(stream.finish(answer) for stream, answer in zip(streams, answers))
                yield frames + streams[0].end(answers)
            except Exception as error:
                yield streams[0].error(getattr(error, "status", None) or 500, str(error))
                if not isinstance(error, Refusal | EngineError):
                    raise  # an unexpected error also goes to the log of the proxy
                error.__traceback__ = None  # the traceback refers to this turn, and the turn's task refers to the error

    def _new_events(self, streams: list[Stream], readers: list[TextReader]) -> bytes:
        """Return the events that send new text, or b"" if there is no new text. The events leave out text that a later
        token can change."""
        frames = b""
        for stream, reader, response in zip(streams, readers, self.so_far):
            if response is not None and response.output_len != reader.tokens_read:
                text = reader.read(response.output_tokens)
                frames += stream.grow(parts_of(self._parser.certain(text, self.ask.callable_tools)))
        return frames

    async def _wait(self, seconds: float, *others: asyncio.Future) -> None:
        """Wait until the task or one of `others` is done, but no longer than `seconds`."""
        await asyncio.wait(
            {self.task, *others}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )


async def together(coroutines: list[Coroutine[Any, Any, ModelResponse]]) -> list[ModelResponse]:
    """Run the coroutines at the same time, and return their results.

    If a coroutine raises an error, the function cancels the other coroutines, waits until they have ended, and raises
    the error. If the caller is cancelled, the function cancels all coroutines and waits until they have ended.
    """
    if len(coroutines) == 1:  # a coroutine alone needs no task of its own, and a task takes time
        return [await coroutines[0]]
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise


def match_retry(equal: list[Turn], says_so: bool) -> Turn | None:
    """Return the turn that a request retries, or None for a new call.

    The function applies the three rules of the section "Retries" at the top of this file. `equal` contains the
    session's earlier turns with the same body. `says_so` is true if the request's header marks a retry.
    """
    for turn in equal:
        if turn.state in (State.UNREAD, State.FAILED, State.ABANDONED):
            return turn
    if not equal or not says_so:
        return None
    # If two turns with the same body are running, the retries go to the two turns alternately.
    running = [turn for turn in equal if turn.state is State.RUNNING]
    closed = [turn for turn in equal if not turn.transport or turn.transport.is_closing()]
    return min(running or closed[-1:], key=lambda turn: turn.retries, default=None)


def earlier_turn(session: Session, body: bytes, says_so: bool) -> Turn | None:
    """Return the earlier turn whose reply answers the request, or None if a new turn must answer the request.

    `body` is the hash of the request's body.
    """
    equal: list[Turn] = session.turns.setdefault(body, [])
    turn = match_retry(equal, says_so)
    if turn is None:
        return None
    turn.retries += 1
    if turn.state is State.UNREAD:
        turn.state = State.FINISHED
    elif turn.state in (State.FAILED, State.ABANDONED):
        turn.state = State.REPLACED
        equal.remove(turn)
        for name in turn.ids:
            session.cache.drop_orphan(name)
        return None
    return turn


class EventStream(StreamingResponse):
    """Sends server-sent events. When sending ends for any reason, `EventStream` closes the generator of the events.

    Starlette's StreamingResponse cancels the generator when the client hangs up. `EventStream` does not cancel the
    generator, because `Turn.events` detects that the client has hung up and ends by itself.
    """

    media_type = "text/event-stream"
    body_iterator: AsyncGenerator[bytes, None]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with contextlib.aclosing(self.body_iterator):
            await self.stream_response(send)
