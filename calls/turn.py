"""Answer an agent's call, from its entry into the tree (cache.py) to the last byte of the reply.

A call enters the tree, its answer is generated and stored there, and only then is the reply sent.
So an agent can continue or reward the call as soon as the reply arrives.

    state      event                                          then
    running    the answer arrives                             finished; stays in the tree
    running    the engine fails, or the session ends          failed; leaves the tree
    running    the last waiting client hangs up               failed; the server stops generating

**Retries.** If the connection times out or the status is 5xx, a client sends the same body again.
SDKs count retries in the header x-stainless-retry-count. Without this header, or with 0 in it, a
request is always a new call. A retry is matched with the newest call that has the same body. While
that call runs, both requests wait for its reply. If that call has finished, its reply is sent
again. If that call has failed, the retry becomes a new call. If a client makes several equal calls,
a retry may get the reply of the wrong one.

**Streams.** The text is sent only when the reply is complete (calls/replies.py). Until then, the
client gets an event every PROGRESS_SECONDS. The HTTP status is sent with the first event, so a call
that fails earlier gets an error status.
"""

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse

from cache import Interaction
from calls.messages import AgentRequest, Json, Message, Refusal
from calls.replies import Protocol, error_body, write_event
from calls.sessions import Session
from inference.io_struct import EngineError, ModelResponse

PROGRESS_SECONDS = 5.0
Answer = Callable[["Turn"], Awaitable[tuple[Message, ModelResponse]]]


class Turn:
    """A call and the work of answering it. The constructor enters the call in the tree and starts
    to generate."""

    def __init__(
        self,
        session: Session,
        protocol: Protocol,
        ask: AgentRequest,
        answer: Answer,
        named: Iterable[str],
    ) -> None:
        self.session = session
        self.ask = ask
        self.writer = protocol(ask, secrets.token_hex(16))
        self.interaction = Interaction(ask.messages, self.writer.id, ask.tools, ask.template_kwargs)
        session.enter(self.interaction, named)
        self.number = session.calls
        session.calls += 1
        self.listeners = 0  # connections that wait
        self.task = asyncio.ensure_future(self._run(answer))  # its result is the reply
        self.task.add_done_callback(self._done)
        session.running.add(self)

    @property
    def failed(self) -> bool:
        return self.interaction.interaction_id not in self.session.cache

    async def _run(self, answer: Answer) -> Json:
        message, response = await answer(self)
        if self.failed:  # the engine answered although the task was cancelled
            raise asyncio.CancelledError
        reply = self.writer.render(message, response)
        self.session.finish(self.interaction, response, message)
        self.interaction.reply = reply
        return reply

    def _done(self, task: asyncio.Task) -> None:
        self.session.running.discard(self)
        # An unread exception would keep this turn and its session in memory.
        with contextlib.suppress(asyncio.CancelledError):
            if not task.exception():
                return
        self.fail()

    def fail(self) -> None:
        """Unless the call has finished, stop generating and remove it from the tree."""
        self.task.cancel()
        self.session.cache.discard(self.interaction)

    # ---- the connections that wait

    @contextlib.asynccontextmanager
    async def _listening(self, request: Request) -> AsyncIterator[asyncio.Future]:
        """Yield a future that is done when the client hangs up."""
        hangup = asyncio.ensure_future(request.receive())  # only a hang-up can come after the body
        self.listeners += 1
        try:
            yield hangup
        finally:
            self.listeners -= 1
            hangup.cancel()
            if not self.listeners and not self.task.done():
                self.fail()
                await asyncio.wait({self.task})  # the task tells the server to stop

    async def _wait(self, hangup: asyncio.Future, seconds: float | None = None) -> bool:
        """Wait until the turn is done or the client hangs up. Return False after `seconds`."""
        both = {self.task, hangup}
        done, _ = await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    def result(self) -> Json:
        """Return the reply. Raises Refusal or EngineError if there is none."""
        if self.session.ended or self.task.cancelled() or not self.task.done():
            raise Refusal("call: its session has ended, or its caller has hung up", 410)
        return self.task.result()

    async def reply(self, request: Request) -> Json:
        async with self._listening(request) as hangup:
            await self._wait(hangup)
            return self.result()

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Yield b"" as soon as the answer is there or PROGRESS_SECONDS have passed, and then the
        events. An error before b"" is raised, and gets an HTTP status. A later error is sent as an
        event."""
        numbers = itertools.count()

        def written(*events: Json) -> bytes:
            return b"".join(write_event(event, next(numbers)) for event in events)

        async with self._listening(request) as hangup:
            if await self._wait(hangup, PROGRESS_SECONDS):
                self.result()
            yield b""
            yield written(self.writer.opening())
            try:
                while not await self._wait(hangup, PROGRESS_SECONDS):
                    yield written(self.writer.progress())
                yield written(*self.writer.stream(self.result())) + self.writer.end
            except Exception as error:
                yield written(error_body(error))
                if not isinstance(error, Refusal | EngineError):
                    raise  # an internal error belongs in the log, too
                error.__traceback__ = None  # frees this turn


class EventStream(StreamingResponse):
    """Unlike Starlette's response, this one lets the generator notice a hang-up, and closes the
    generator when sending ends."""

    media_type = "text/event-stream"
    body_iterator: AsyncGenerator[bytes, None]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with contextlib.aclosing(self.body_iterator):
            await self.stream_response(send)
