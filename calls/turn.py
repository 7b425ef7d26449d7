"""A turn: one call of an agent, from its place in the tree to the last byte of its reply.

    entered in the tree -> generated (n times, where n answers were asked for) -> finished in the tree -> rendered

The rule of order: an interaction is in the tree before the first byte of its reply leaves, and complete (tokens,
logprobs, versions, message) before the last. So whatever a client does with what it reads, the tree knows it already.

A turn is not a connection. It runs as a task of its own, and connections listen: usually one, two after a retry. When
the last listener hangs up the generation is aborted. What had not been read is forgotten, and so is one of n answers
that waits for the others; of a stream somebody has read the beginning, so it stays in the tree as a turn that ended
there: its tokens were sampled like any other.

Retries. An SDK that times out, or gets a 5xx, sends the same body again, and says so (x-stainless-retry-count). Without
care the first generation becomes a sibling that nobody reads and that is trained all the same. The rule (`retried`),
for a body that equals an earlier one of the session byte by byte:

    1. an equal turn has lost its listener, or has failed   -> its reply, if it got to one; else a new turn, and what
                                                               the first had left in the tree is dropped
    2. it says that it is a retry                           -> the equal turn that is in flight, else the last one
    3. otherwise                                            -> a new turn: best of n, asked n times on purpose, is n

Streaming is real: the tokens come from the server as they are sampled, become text (calls/prompts.py), and of the text
what is certain (calls/tools.py) is sent on; while nothing is, a comment now and then. Streamed or not, the reply is
made of the same answer.

It does not promise that a turn survives its session: at the end of that everything in flight is given up.
"""

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from time import monotonic
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse

from cache import InteractionWithTokenLogpReward
from calls.messages import AgentRequest, Refusal
from calls.prompts import TextReader
from calls.replies import Answer, Protocol, parts_of
from calls.sessions import Session
from calls.tools import OutputParser
from inference.io_struct import ModelRequest, ModelResponse
from inference.wire import EngineError

PING_SECONDS = 15.0  # a stream that has said nothing for so long sends a comment: clients do not give up on it


class Turn:
    """A call that is being answered. Entering it in the tree finds its `parent`."""

    def __init__(self, session: Session, protocol: Protocol, ask: AgentRequest, parser: OutputParser) -> None:
        self.session, self.protocol, self._parser = session, protocol, parser
        first = protocol.id_prefix + secrets.token_hex(16)
        self.ids = [first, *(f"{first}-{k}" for k in range(1, ask.n))]  # of its interactions
        for name in self.ids:
            session.cache.enter(
                name,
                InteractionWithTokenLogpReward(
                    ask.messages, template_key=ask.template_key, trainable=ask.store, tools=ask.tools
                ),
            )
        self.parent = session.cache[first].parent
        self.ask = dataclasses.replace(ask, messages=[])  # the tree has them now
        # All that changes:
        self.task: asyncio.Task[tuple[dict[str, Any], list[Answer]]]  # since start; the reply, and what it is made of
        self.input_len = 0  # tokens
        self.so_far: list[ModelResponse | None] = [None] * ask.n  # what has been streamed
        self.news = asyncio.get_running_loop().create_future()  # done, and replaced, when a stream has grown
        self.listeners = self.claims = 0  # connections that wait; retries that were sent here
        self.gone = False  # it failed, or somebody hung up on it

    # Generation

    def start(self, engine: Any, calls: list[ModelRequest], reader: Callable[[], TextReader]) -> None:
        """Generate, one answer a call; each is read by a new `reader`."""
        self._reader, self.input_len = reader, len(calls[0].input_ids)
        self.task = asyncio.ensure_future(self._run(engine, calls))
        self.session.running.add(self.task)
        self.task.add_done_callback(self.session.running.discard)
        self.task.add_done_callback(lambda _: self.forget())  # also where it was cancelled before its first step
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # somebody may have read it

    def forget(self) -> None:
        """Nothing came of it: what is unfinished leaves the tree."""
        for name in self.ids:
            self.session.cache.discard(name)

    async def _run(self, engine: Any, calls: list[ModelRequest]) -> tuple[dict[str, Any], list[Answer]]:
        tasks = [asyncio.ensure_future(self._generate(engine, k, call)) for k, call in enumerate(calls)]
        try:
            answers = [self._finish(k, response) for k, response in enumerate(await asyncio.gather(*tasks))]
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if self.gone and not self.session.ended:  # the caller hung up, and has not asked anew
                for k, streamed in enumerate(self.so_far):
                    if streamed:
                        streamed.stop_reason = streamed.stop_reason or "abort"
                        self._finish(k, streamed)
            self.gone = True
            raise
        reply = self.protocol.render(self.ask, answers)
        for answer in answers:
            self.session.cache[answer.interaction_id].completion = reply
        return reply, answers

    async def _generate(self, engine: Any, k: int, call: ModelRequest) -> ModelResponse:
        def on_tokens(response: ModelResponse) -> None:
            self.so_far[k] = response
            news, self.news = self.news, asyncio.get_running_loop().create_future()
            news.set_result(None)

        return await (engine.agenerate(call, on_tokens) if self.ask.stream else engine.agenerate(call))

    def _finish(self, k: int, response: ModelResponse) -> Answer:
        reader = self._reader()
        parsed = self._parser.parse(reader.whole(response.output_tokens), self.ask.callable_tools)
        if parsed.calls and response.stop_reason == "stop":
            response.stop_reason = "tool_calls"
        texts = [reader.token(token) for token in response.output_tokens] if self.ask.logprobs else []
        answer = Answer(self.ids[k], response, parsed, texts)
        self.session.cache.finish(self.ids[k], response, [answer.message])
        return answer

    # Listening

    @contextlib.asynccontextmanager
    async def _listening(self, request: Request) -> AsyncIterator[asyncio.Future]:
        """A future that is done when the caller hangs up. The last listener that leaves too early aborts the turn."""
        hangup = asyncio.ensure_future(request.receive())  # the body is read: what comes next is the end
        self.listeners += 1
        try:
            yield hangup
        finally:
            self.listeners -= 1
            if not self.listeners:
                self.gone = self.gone or hangup.done() or not self.task.done()
                if self.task.cancel():
                    await asyncio.wait({self.task})  # it tells the server before it is gone
            hangup.cancel()

    def result(self) -> tuple[dict[str, Any], list[Answer]]:
        """The reply, and its answers. Raises Refusal or EngineError where there is none."""
        if self.session.ended:
            raise Refusal("session: it ended while this call was generated", 410)
        if not self.task.done() or self.task.cancelled():
            raise Refusal("the caller hung up", 499)
        return self.task.result()

    async def reply(self, request: Request) -> dict[str, Any]:
        """The whole reply, when it is there."""
        async with self._listening(request) as hangup:
            await asyncio.wait({self.task, hangup}, return_when=asyncio.FIRST_COMPLETED)
            return self.result()[0]

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        """The reply as it grows. Nothing (b"") comes first: what fails before is raised, later it is an event."""
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
                    news, frames = self.news, b""
                    for stream, reader, response in zip(streams, readers, self.so_far):
                        if response is not None:
                            text = reader.read(response.output_tokens)
                            frames += stream.grow(parts_of(self._parser.certain(text, self.ask.callable_tools)))
                    if frames or monotonic() >= due:
                        yield frames or b": still generating\n\n"
                        due = monotonic() + PING_SECONDS
                    await self._wait(due - monotonic(), hangup, news)
                _, answers = self.result()
                frames = b"".join(stream.finish(answer) for stream, answer in zip(streams, answers))
                yield frames + streams[0].end(answers)
            except Exception as error:  # the client is told; what nobody expected goes on to the log
                yield streams[0].error(getattr(error, "status", None) or 500, str(error))
                if not isinstance(error, Refusal | EngineError):
                    raise

    async def _wait(self, seconds: float, *others: asyncio.Future) -> None:
        """Until the turn or one of the others is done, but so long at most."""
        await asyncio.wait({self.task, *others}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)


def retried(session: Session, body: bytes, says_so: bool) -> Turn | None:
    """The turn that answers a body that was sent before, if it is a retry: the rule above."""
    turns: list[Turn] = session.turns.setdefault(body, [])
    if gone := next((turn for turn in turns if turn.gone), None):
        gone.gone = False
        if gone.task.done() and not gone.task.cancelled() and not gone.task.exception():
            return gone
        turns.remove(gone)
        for name in gone.ids:
            session.cache.drop_orphan(name)
    elif says_so and turns:
        candidates = [turn for turn in turns if not turn.task.done()] or turns[-1:]
        turn = min(candidates, key=lambda turn: turn.claims)  # each retry to another, where several are equal
        turn.claims += 1
        return turn
    return None


class EventStream(StreamingResponse):
    """Server-sent events. However the connection ends, the generator behind them is closed, and in peace: the one who
    listens for a hang-up is the turn, not Starlette, which would cancel it."""

    media_type = "text/event-stream"
    body_iterator: AsyncGenerator[bytes, None]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with contextlib.aclosing(self.body_iterator):
            await self.stream_response(send)
