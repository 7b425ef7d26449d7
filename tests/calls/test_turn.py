"""Calls, streams and hang-ups: what is in the tree, and who gets which reply.

tests/explore/turns.py has every order of calls, retries, failures and hang-ups. Here they meet
HTTP, SDKs and a server.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anthropic
import openai
import pytest
from conftest import connections
from harness import HELLO, Connection, Harness, reply_message, sdk, tool

from calls.client import AgentsClient, OpenAIProxyClient, sdk_http
from engine import EngineError, RemoteInfEngine
from inference.servers import Servers
from proxy import ProxyAddress

pytestmark = pytest.mark.anyio

CHAT = {"messages": HELLO}
STREAM = {"messages": HELLO, "stream": True}
RETRY = {"x-stainless-retry-count": "1"}
TOOLS: Any = [tool("look"), tool("open")]
Start = Callable[..., Harness]
PATH = "v1/chat/completions"
# protocol -> a stream's events of progress, and its last event
EVENTS = {
    "chat/completions": (b'"delta": {}', b"data: [DONE]"),
    "responses": (b"event: response.in_progress", b'"response.completed"'),
    "messages": (b"event: ping", b"message_stop"),
}


def cache_of(harness: Harness, session: str) -> Any:
    """The conversation tree of a session."""
    return harness.proxy.find(session).cache


# ---- streams


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream sends events of progress without a pause."""
    monkeypatch.setattr("calls.turn.PROGRESS_SECONDS", 0.0)


@pytest.mark.parametrize("protocol", EVENTS)
@pytest.mark.usefixtures("at_once")
async def test_a_turn_is_in_the_tree_before_its_first_byte_and_whole_before_its_last(
    start: Start, protocol: str
) -> None:
    """While the answer is generated, the client gets events that its SDK counts as progress."""
    harness, (progress, end) = start("hello you"), EVENTS[protocol]
    session = await harness.start()
    harness.engine.hold = asyncio.Event()
    body = {"input": "hi", "stream": True} if protocol == "responses" else STREAM
    call = Connection(harness, f"/{session}/v1/{protocol}", body)
    assert await call.status() == 200
    first = await call.read() or await call.read()
    (interaction,) = cache_of(harness, session).values()
    assert interaction.interaction_id.encode() in first
    assert not interaction.complete
    for _ in range(3):
        assert progress in await call.read()
    harness.engine.hold.set()
    while end not in (piece := await call.read()):
        assert piece
    assert interaction.output_message_list == [{"role": "assistant", "content": "hello you"}]
    assert interaction.reply is not None
    await call.task


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("end", ["the engine fails", "the session ends", "we fail"])
async def test_an_error_in_the_middle_is_an_event(
    start: Start, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The client gets the error as an event, and the turn leaves the tree."""
    harness = start("hello")
    session = await harness.start()
    cache, hold = cache_of(harness, session), asyncio.Event()

    async def fail(request: Any) -> Any:
        await hold.wait()
        raise EngineError("no server answered", 503) if end == "the engine fails" else KeyError("?")

    harness.engine.agenerate = fail  # type: ignore[method-assign]
    call = Connection(harness, f"/{session}/{PATH}", STREAM)
    await call.status()
    await call.read()
    if end == "the session ends":
        assert await harness.export(session) == {}
    hold.set()
    await asyncio.wait({call.task}, timeout=30)
    assert isinstance(call.task.exception(), KeyError if end == "we fail" else type(None))
    pieces = [call.pieces.get_nowait() for _ in range(call.pieces.qsize())]
    last = next(piece["body"] for piece in reversed(pieces) if piece.get("body"))
    words = {"the engine fails": "no server", "the session ends": "ended", "we fail": "?"}
    assert words[end] in json.loads(last.partition(b"data: ")[2])["error"]["message"]
    assert len(cache) == 0


# ---- tools


@pytest.mark.parametrize("levels", range(200, 208))
async def test_a_call_that_is_nested_deeply_has_a_reply(start: Start, levels: int) -> None:
    """However deeply the arguments of a tool call are nested, the proxy sends a reply."""
    deep = '{"a": ' * levels + "1" + "}" * levels
    harness = start(f'<tool_call>\n{{"name": "look", "arguments": {deep}}}\n</tool_call>', "two")
    session = await harness.start()
    calls = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": deep}}]
    result = {"role": "tool", "tool_call_id": "c", "content": "blue"}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": calls * 2}, result]
    first = await harness.chat(session, messages, tools=TOOLS)
    await harness.chat(session, [*messages, reply_message(first), *HELLO], tools=TOOLS)
    parent, child = (await harness.export(session)).values()
    assert parent["reply"] == first
    assert child["parent"] == first["id"]


FORCED = [("required", '"'), ("look", '"look", "arguments": ')]


@pytest.mark.parametrize(("choice", "opening"), FORCED)
async def test_a_call_is_forced_by_its_beginning(
    start: Start, tiny_tokenizer: Any, choice: str, opening: str
) -> None:
    """The beginning of a forced call is part of the prompt and is not trained."""
    rest = '{"at": "sky"}}\n</tool_call>'
    harness = start(('look", "arguments": ' if choice == "required" else "") + rest)
    session = await harness.start()
    named = {"type": "function", "function": {"name": choice}}
    tool_choice = choice if choice == "required" else named
    completion = await harness.chat(session, HELLO, tools=TOOLS, tool_choice=tool_choice)
    [called] = [call["function"] for call in reply_message(completion)["tool_calls"]]
    assert (called["name"], json.loads(called["arguments"])) == ("look", {"at": "sky"})
    prompt = harness.engine.requests[0].input_ids
    assert tiny_tokenizer.decode(prompt).endswith(f'assistant\n<tool_call>\n{{"name": {opening}')
    (row,) = [i["tensors"] for i in (await harness.export(session)).values()]
    assert sum(row["loss_mask"]) == len(row["input_ids"]) - len(prompt)


async def test_the_model_is_listed(start: Start) -> None:
    """Some clients ask for it before they call."""
    harness = start()
    async with sdk(harness, f"/{await harness.start()}/v1") as client:
        assert [model.id async for model in client.models.list()] == ["default"]


# ---- retries


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.usefixtures("at_once")
async def test_what_nobody_waits_for_leaves_the_tree(start: Start, streams: bool) -> None:
    """A client hangs up and asks again while the engine still aborts: only the second call is in
    the tree, although the engine answers the first in spite of the cancellation."""
    harness = start()
    session, hold, aborted = await harness.start(), asyncio.Event(), asyncio.Event()
    asked = harness.engine.agenerate

    async def slow_to_abort(request: Any) -> Any:
        if not harness.engine.requests:
            harness.engine.requests.append(request)
            with suppress(asyncio.CancelledError):
                await hold.wait()
            await aborted.wait()
        return await asked(request)

    harness.engine.agenerate = slow_to_abort  # type: ignore[method-assign]
    path, body = f"/{session}/{PATH}", STREAM if streams else CHAT
    first = Connection(harness, path, body)
    while not harness.engine.requests:
        await asyncio.sleep(0)
    if streams:
        await first.status()
    first.gone.set()
    while cache_of(harness, session):
        await asyncio.sleep(0)
    assert (await harness.post(path, body, headers=RETRY)).status_code == 200
    aborted.set()
    await first.rest()
    assert len(await harness.export(session)) == 1


# A real server


async def test_a_hang_up_frees_the_server(start: Start, real_engine: RemoteInfEngine) -> None:
    """The engine tells the server to stop."""
    real = start(engine=real_engine)
    session = await real.start()
    body = {**CHAT, "max_tokens": 1500, "seed": 3}  # 446 tokens
    call, servers = Connection(real, f"/{session}/{PATH}", body), real_engine.servers
    while (await asyncio.to_thread(servers.post_all, "/model_info"))[0]["running"] != 1:
        assert not call.task.done(), "the call ended before its client could hang up"
    await call.hang_up()
    [info] = servers.post_all("/model_info")  # works in a running event loop, as in a notebook
    assert info["running"] == 0


@pytest.mark.parametrize("protocol", ["chat", "messages"])
async def test_a_stream_through_processes_and_the_agents_own_transport(
    proxy: ProxyAddress, protocol: str
) -> None:
    """Events pass through a proxy process to the agent's client, whose connection is then free
    again."""
    request: Any = {"model": "m", "messages": HELLO, "max_tokens": 30, "stream": True}
    session = OpenAIProxyClient(Servers(*proxy), "task")
    await session.grant_capacity()
    async with session, AgentsClient() as http:
        options: Any = {"api_key": "DUMMY", "http_client": http}
        if protocol == "chat":
            sdk = openai.AsyncOpenAI(base_url=session.session_url, **options)
            create: Any = sdk.chat.completions
        elif sdk_http.__name__ == "httpx2":
            url = session.session_url.removesuffix("/v1")
            create = anthropic.AsyncAnthropic(base_url=url, **options).messages
        else:
            pytest.skip("openai before 3.0 uses httpx, and anthropic refuses its clients")
        for _ in range(3):
            assert len([event async for event in await create.create(**request)]) >= 3
        in_use, idle = connections(http._transport)
        assert in_use == 0
        assert idle == 1 or sdk_http.__name__ == "httpx"  # openai before 3.0 may close it
