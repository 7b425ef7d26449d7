"""One call of an agent, from its place in the tree to the last byte of the reply.

A call enters the tree, its answers are generated, they are stored in the tree, and the reply is
sent. So an agent that has read a reply can continue it, or reward it, at once.

    state      event                                          then
    running    all answers are there                          finished; stays in the tree
    running    the engine fails, or the session ends          failed; leaves the tree
    running    the last client that waits hangs up            failed; the server stops generating

**Retries.** A client repeats a request when the connection times out or the status is 5xx, with the
same body. SDKs say so in a header (x-stainless-retry-count); without it equal bodies are separate
calls. A retry belongs to a turn with the same body, the first of these that there is:

1. a failed one: nobody has read anything of it, so the retry is a new call, and the failed turn is
   not looked at again;
2. a running one: the retry joins it and gets the same reply;
3. the last finished one, whose reply was lost: it is sent again.

**Streams.** The whole reply is there before its first event is sent (calls/replies.py). While it is
generated, the client gets an event every PROGRESS_SECONDS, the first after as much time: a call
that is refused until then, such as one with too long a prompt, gets an HTTP status.

Not promised: if a client makes equal calls on purpose, and loses one before it arrives, the retry
gets the reply of another.
"""

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from enum import Enum
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse

from cache import Interaction
from calls.messages import AgentRequest, Json, Refusal
from calls.replies import Answer, Protocol, write_event
from calls.sessions import Session
from inference.io_struct import EngineError

PROGRESS_SECONDS = 5.0
State = Enum("State", "RUNNING FINISHED FAILED")


class Turn:
    """A call that is being answered. Making it enters the call in the tree and finds `parent`."""

    def __init__(self, session: Session, protocol: Protocol, ask: AgentRequest) -> None:
        self.session, self.protocol, self.ask = session, protocol, ask
        first = protocol.id_prefix + secrets.token_hex(16)
        self.ids = [first, *(f"{first}-{k}" for k in range(1, ask.n))]  # one an answer
        for name in self.ids:
            call = Interaction(ask.messages, name, ask.template_key, ask.tools, parent=ask.parent)
            self.parent = session.cache.enter(name, call).parent
        self.form: Any  # writes the reply
        self.state = State.RUNNING
        self.task: asyncio.Task[Json]  # its result is the reply
        self.listeners = 0  # connections that wait
        self.joined = 0  # retries that were sent here

    def start(self, answers: Callable[[], Awaitable[list[Answer]]], input_len: int) -> None:
        """Generate the answers. The prompt has `input_len` tokens."""
        self.form = self.protocol(self.ask, self.ids[0], input_len)
        self.task = asyncio.ensure_future(self._run(answers))
        self.session.running.add(self)
        self.task.add_done_callback(self._done)

    async def _run(self, answers: Callable[[], Awaitable[list[Answer]]]) -> Json:
        complete = await answers()
        if self.state is not State.RUNNING:  # the engine answered although it was cancelled
            raise asyncio.CancelledError
        reply = self.form.render(complete)
        for answer in complete:
            name = answer.interaction_id
            self.session.cache.finish(name, answer.response, [answer.message])
            self.session.cache[name].reply = reply
        self.state = State.FINISHED
        return reply

    def _done(self, task: asyncio.Task) -> None:
        self.session.running.discard(self)
        if self.state is State.RUNNING:
            self.fail()
        if not task.cancelled():
            task.exception()  # else asyncio logs that nobody has read it

    def fail(self) -> None:
        """Stop generating, and leave the tree."""
        if self.state is State.RUNNING:
            self.state = State.FAILED
            self.task.cancel()
        self.forget()

    def forget(self) -> None:
        """Take unfinished answers out of the tree."""
        for name in self.ids:
            self.session.cache.discard(name)

    # ---- the connections that wait

    @contextlib.asynccontextmanager
    async def _listening(self, request: Request) -> AsyncIterator[asyncio.Future]:
        """Wait with others. The future is done when this client hangs up."""
        hangup = asyncio.ensure_future(request.receive())  # only a disconnect can come
        self.listeners += 1
        try:
            yield hangup
        finally:
            self.listeners -= 1
            hangup.cancel()
            if not self.listeners and not self.task.done():
                self.fail()
                await asyncio.wait({self.task})  # until the server was told

    async def _wait(self, hangup: asyncio.Future, seconds: float | None = None) -> bool:
        """Whether the turn or the client is done after `seconds`."""
        both = {self.task, hangup}
        done, _ = await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    def result(self) -> Json:
        """The reply. Raises Refusal or EngineError if there is none."""
        if self.session.ended:
            raise Refusal("session: it ended while this call was generated", 410)
        if not self.task.done() or self.task.cancelled():
            raise Refusal("call: the caller hung up before the reply was ready", 499)
        return self.task.result()

    async def reply(self, request: Request) -> Json:
        async with self._listening(request) as hangup:
            await self._wait(hangup)
            return self.result()

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        """The events of a stream, after an empty one. Before that one it raises what goes wrong;
        later it sends it."""
        numbers = itertools.count()

        def written(*events: Json) -> bytes:
            return b"".join(write_event(event, next(numbers)) for event in events)

        async with self._listening(request) as hangup:
            if await self._wait(hangup, PROGRESS_SECONDS):
                self.result()
            yield b""
            yield written(*self.form.opening())
            try:
                while not await self._wait(hangup, PROGRESS_SECONDS):
                    yield written(self.form.progress())
                body = self.result()
                yield written(*self.form.stream(body)) + self.form.end
            except Exception as error:
                status = getattr(error, "status", None) or 500
                yield written(self.form.error(status, str(error)))
                if not isinstance(error, Refusal | EngineError):
                    raise  # our mistake also belongs into the log


def retried_turn(equal: list[Turn]) -> Turn | None:
    """The turn that answers a retry, or None for a new one. `equal` are those with its body."""
    for turn in equal:
        if turn.state is State.FAILED:
            equal.remove(turn)
            return None
    running = [turn for turn in equal if turn.state is State.RUNNING]
    # Retries of several equal turns that run go to them in turn.
    found = min(running or equal[-1:], key=lambda turn: turn.joined, default=None)
    if found:
        found.joined += 1
    return found


class EventStream(StreamingResponse):
    """Sends events. Unlike Starlette's, it lets the generator notice a hang-up by itself, and
    closes it when the sending ends for any reason."""

    media_type = "text/event-stream"
    body_iterator: AsyncGenerator[bytes, None]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with contextlib.aclosing(self.body_iterator):
            await self.stream_response(send)
