"""These tests check calls, streams and retries. If the connection of a stream breaks, the conversation tree keeps the
tokens that were already sent."""

import asyncio
import gc
import json
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import openai
import pytest
from conftest import ROOT, idle_connections
from harness import ADMIN, HELLO, Clock, Connection, Harness, claude, reply_message, sdk

import proxy
from calls.prompts import TextReader
from calls.tools import OutputParser
from calls.turn import PING_SECONDS, State, match_retry
from engine import EngineError, RemoteInfEngine
from proxy import create_app
from workflow import make_agents_client

pytestmark = pytest.mark.anyio

CHAT = {"messages": HELLO}
STREAM = {"messages": HELLO, "stream": True}
RETRY = {"x-stainless-retry-count": "1"}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": name, "description": "", "parameters": {"type": "object"}},
    }
    for name in ("look", "open")
]
Start = Callable[..., Harness]
ENDS: dict[
    str, Callable[[bytes], bool]
] = {  # for each protocol, a function that detects a stream's last event
    "chat/completions": lambda piece: b"data: [DONE]" in piece,
    "responses": lambda piece: b'"response.completed"' in piece,
    "messages": lambda piece: b"message_stop" in piece,
}


def events(raw: bytes) -> list[Any]:
    """Return the data of each server-sent event in `raw`."""
    lines = [
        line.removeprefix("data: ")
        for line in raw.decode().splitlines()
        if line.startswith("data: ")
    ]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def cache_of(harness: Harness, session: str) -> Any:
    """Return the conversation tree of a session."""
    return harness.sessions.find(session).cache


# Streaming


@pytest.mark.parametrize("protocol", ["chat/completions", "responses", "messages"])
async def test_a_turn_is_in_the_tree_before_its_first_byte_and_whole_before_its_last(
    start: Start, protocol: str
) -> None:
    """Before the proxy sends the first byte of a reply, the interaction is in the tree. Before the proxy sends the last
    byte, the interaction has all its tokens."""
    harness = start("hello you")
    session = await harness.start()
    harness.engine.hold, harness.engine.held_tokens = asyncio.Event(), 5
    body = {"input": "hi", "stream": True} if protocol == "responses" else STREAM
    call = Connection(harness, f"/{session}/v1/{protocol}", body)
    assert await call.status() == 200
    first = await call.read()
    (interaction,) = cache_of(harness, session).values()
    assert interaction.interaction_id.encode() in first
    assert not interaction.complete
    harness.engine.hold.set()
    while not ENDS[protocol](piece := await call.read()):
        assert piece
    assert interaction.complete
    assert interaction.output_message_list == [{"role": "assistant", "content": "hello you"}]
    await call.task
    assert interaction.reply is not None


async def test_tokens_are_sent_while_others_are_still_sampled(start: Start) -> None:
    """A stream sends the first text while the engine is still generating."""
    harness = start("hello you")
    session = await harness.start()
    harness.engine.hold, harness.engine.held_tokens = asyncio.Event(), 5
    async with sdk(harness, f"/{session}/v1"):
        call = Connection(harness, f"/{session}/v1/chat/completions", STREAM)
        await call.status()
        text = ""
        while text != "hello":
            for event in events(await call.read()):
                text += event["choices"][0]["delta"].get("content") or ""
        harness.engine.hold.set()
        text += "".join(
            e["choices"][0]["delta"].get("content") or "" for e in events(await call.rest())
        )
    assert text == "hello you"


async def test_only_answers_with_new_tokens_are_read(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During a stream with several answers, the proxy decodes an answer's tokens only when the answer has new
    tokens."""
    texts = ["word " * 20, *["ok"] * 7]
    harness, read, lengths = start(*texts), TextReader.read, []

    def counted(reader: TextReader, tokens: list[int]) -> str:
        lengths.append((reader, len(tokens)))
        return read(reader, tokens)

    monkeypatch.setattr(TextReader, "read", counted)
    answer = await harness.post(f"/{await harness.start()}/v1/chat/completions", {**STREAM, "n": 8})
    assert answer.status_code == 200
    assert len(lengths) == len({*lengths}) > 20


async def test_who_hangs_up_on_a_stream_leaves_what_was_read(
    start: Start, tiny_tokenizer: Any
) -> None:
    """If a client closes a stream early, the engine stops generating. The tree keeps a finished turn with the tokens
    that the client received, and a later request can continue this turn."""
    harness = start("hello you", "more")
    session = await harness.start()
    harness.engine.hold, harness.engine.held_tokens = asyncio.Event(), 5
    call = Connection(harness, f"/{session}/v1/chat/completions", STREAM)
    await call.status()
    while b'"o"' not in await call.read():
        pass
    await call.hang_up()
    assert harness.engine.cancelled.is_set()
    (cut,) = cache_of(harness, session).values()
    assert tiny_tokenizer.decode(cut.tokens.output_tokens) == "hello"
    harness.engine.hold = None
    await harness.chat(
        session,
        [*HELLO, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "?"}],
    )
    (row,) = [i["tensors"] for i in (await harness.export(session, style="concat")).values()]
    trained = [t for t, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]
    assert trained == [
        *tiny_tokenizer.encode("hello"),
        *tiny_tokenizer.encode("more"),
        tiny_tokenizer.eos_token_id,
    ]


@pytest.mark.parametrize("pace", [0.0, PING_SECONDS])
async def test_a_stream_that_holds_back_what_comes_is_not_silent(
    start: Start, monkeypatch: pytest.MonkeyPatch, pace: float
) -> None:
    """A stream does not send a tool call before the call is complete. While the tool call is incomplete, the stream
    sends a comment as a keep-alive every PING_SECONDS."""
    harness, clock = start(CALL), Clock()
    session = await harness.start()
    monkeypatch.setattr("calls.turn.monotonic", clock)
    asked = harness.engine.agenerate

    async def at_a_pace(request: Any, on_tokens: Any = None) -> Any:
        def heard(response: Any) -> None:
            clock.now += pace
            on_tokens(response)

        return await asked(request, heard)

    harness.engine.agenerate = at_a_pace  # type: ignore[method-assign]
    answer = await harness.post(f"/{session}/v1/chat/completions", {**STREAM, "tools": TOOLS})
    assert answer.content.count(b"look") == 1
    before, _, after = answer.content.partition(b"look")
    assert (b"\n: still generating\n\n" in before) == (pace > 0)
    assert b"still generating" not in after


async def test_a_stream_without_tokens_is_not_silent(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream sends comments as keep-alives while no token arrives, for example because the server is paused."""
    monkeypatch.setattr("calls.turn.PING_SECONDS", 0.0)
    harness = start("hello")
    session = await harness.start()
    harness.engine.hold = asyncio.Event()
    call = Connection(harness, f"/{session}/v1/chat/completions", STREAM)
    await call.status()
    for _ in range(3):
        while not (await call.read()).startswith(b": still generating"):
            pass
    harness.engine.hold.set()
    rest = await call.rest()
    assert ENDS["chat/completions"](rest)


@pytest.mark.parametrize("streams", [True, False])
async def test_an_error_before_the_first_token_is_a_status(start: Start, streams: bool) -> None:
    """A call that fails before its first token gets an HTTP error status, even if the client has asked for a stream.
    The proxy sends the headers of a stream when the first token arrives, or after PING_SECONDS without a token."""
    harness = start()
    session = await harness.start()
    harness.engine.error = EngineError("the prompt is too long", 400)
    answer = await harness.post(f"/{session}/v1/messages", {**STREAM, "stream": streams})
    assert answer.status_code == 400
    error = {"type": "invalid_request_error", "message": "the prompt is too long"}
    assert answer.json() == {"type": "error", "error": error}
    assert len(cache_of(harness, session)) == 0


async def test_an_error_in_the_middle_is_an_event(start: Start) -> None:
    """If the engine fails in the middle of a stream, the stream ends with an error event, and the turn is removed
    from the tree."""
    harness = start("hello")
    session = await harness.start()
    asked = harness.engine.agenerate

    async def fail(request: Any, on_tokens: Any = None) -> Any:
        await asked(request, on_tokens)
        raise EngineError("no server answered", 503)

    harness.engine.agenerate = fail  # type: ignore[method-assign]
    answer = await harness.post(f"/{session}/v1/chat/completions", STREAM)
    assert answer.status_code == 200
    assert events(answer.content)[-1]["error"]["message"] == "no server answered"
    assert len(cache_of(harness, session)) == 0


async def test_the_end_of_a_session_ends_its_streams(start: Start) -> None:
    """If a session ends while a stream is running, the stream sends an error event, and the turn is not exported."""
    harness = start("hello you")
    session = await harness.start()
    harness.engine.hold, harness.engine.held_tokens = asyncio.Event(), 5
    call = Connection(harness, f"/{session}/v1/chat/completions", STREAM)
    await call.status()
    await call.read()
    assert await harness.export(session) == {}
    assert "ended" in events(await call.rest())[-1]["error"]["message"]


async def test_a_turn_that_never_ran_leaves_the_tree(start: Start) -> None:
    """If the session ends before the asyncio task of a turn has started, the turn is removed from the tree."""
    harness = start("hello")
    session = await harness.start()
    cache, proxy = cache_of(harness, session), harness.app.state.proxy
    begin = proxy.begin

    async def end_at_once(*args: Any) -> Any:
        turn = await begin(*args)
        assert not turn.session.cache[turn.ids[0]].complete
        harness.sessions.end(turn.session)
        return turn

    proxy.begin = end_at_once
    assert (await harness.post(f"/{session}/v1/chat/completions", CHAT)).status_code == 410
    assert not harness.engine.requests
    assert len(cache) == 0


# Tools, n, references


CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'


async def test_a_tool_call_is_parsed_and_gone_on_from(start: Start, tiny_tokenizer: Any) -> None:
    """The reply contains the parsed tool call. The next prompt begins with the first prompt and the tokens that the
    model sampled."""
    harness = start(f"so: {CALL}", "blue")
    session = await harness.start()
    completion = await harness.chat(session, HELLO, tools=TOOLS)
    message = reply_message(completion)
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "look",
        {"at": "sky"},
    )
    assert completion["choices"][0]["finish_reason"] == "tool_calls"
    result = {"role": "tool", "tool_call_id": call["id"], "content": "blue"}
    await harness.chat(session, [*HELLO, message, result], tools=TOOLS)
    first, second = (request.input_ids for request in harness.engine.requests)
    said = [*tiny_tokenizer.encode(f"so: {CALL}"), tiny_tokenizer.eos_token_id]
    assert second[: len(first) + len(said)] == first + said
    assert len(await harness.export(session, style="concat")) == 1


@pytest.mark.parametrize("levels", range(193, 203))
async def test_a_call_that_is_nested_deeply_has_a_reply(start: Start, levels: int) -> None:
    """However deeply the arguments of a tool call are nested, the proxy sends a reply. The test puts deeply nested tool
    calls into a request's history and into the model's answer."""
    deep = '{"a": ' * levels + "1" + "}" * levels
    call = f'<tool_call>\n{{"name": "look", "arguments": {deep}}}\n</tool_call>'
    harness = start("one", call, "two")
    session = await harness.start()
    calls = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": deep}}]
    result = {"role": "tool", "tool_call_id": "c", "content": "blue"}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": calls * 2}, result]
    completion = await harness.chat(session, messages, tools=TOOLS, n=2)
    answer = completion["choices"][1]["message"]
    await harness.chat(session, [*messages, answer, *HELLO], tools=TOOLS)
    first, second, third = (await harness.export(session)).values()
    assert first["reply"] == second["reply"] == completion
    assert third["parent"] == f"{completion['id']}-1"


@pytest.mark.parametrize(
    ("choice", "opening"), [("required", '"'), ("look", '"look", "arguments": ')]
)
async def test_a_call_is_forced_by_its_beginning(
    start: Start, tiny_tokenizer: Any, choice: str, opening: str
) -> None:
    """The beginning of a forced call is part of the prompt and is not trained. The reply contains the whole forced
    call."""
    rest = '{"at": "sky"}}\n</tool_call>'
    harness = start(('look", "arguments": ' if choice == "required" else "") + rest)
    session = await harness.start()
    named = {"type": "function", "function": {"name": choice}}
    tool_choice = choice if choice == "required" else named
    completion = await harness.chat(session, HELLO, tools=TOOLS, tool_choice=tool_choice)
    (call,) = reply_message(completion)["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "look",
        {"at": "sky"},
    )
    prompt = tiny_tokenizer.decode(harness.engine.requests[0].input_ids)
    assert prompt.endswith(f'assistant\n<tool_call>\n{{"name": {opening}')
    (row,) = [i["tensors"] for i in (await harness.export(session)).values()]
    assert sum(row["loss_mask"]) == len(row["input_ids"]) - len(
        harness.engine.requests[0].input_ids
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_n_answers_are_n_siblings(start: Start, stream: bool) -> None:
    """If a call asks for n answers, each answer is an interaction with its own seed. The parent of the next turn is the
    answer that the agent continues."""
    harness = start("one", "two", "three", "next", seed=3)
    session = await harness.start()
    async with sdk(harness, f"/{session}/v1") as client:
        if stream:
            texts = {0: "", 1: "", 2: ""}
            async for chunk in await client.chat.completions.create(
                model="m", messages=HELLO, n=3, stream=True
            ):
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
            said = [texts[0], texts[1], texts[2]]
        else:
            completion = await client.chat.completions.create(model="m", messages=HELLO, n=3)
            said = [choice.message.content or "" for choice in completion.choices]
    assert said == ["one", "two", "three"]
    assert len({request.gconfig.seed for request in harness.engine.requests}) == 3
    await harness.chat(
        session, [*HELLO, {"role": "assistant", "content": "two"}, {"role": "user", "content": "?"}]
    )
    exported = await harness.export(session)
    parents = [i["parent"] for i in exported.values()]
    assert parents == [None, None, None, list(exported)[1]]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("end", ["the caller hangs up", "an answer fails", "the session ends"])
async def test_n_answers_are_read_together_or_not_at_all(
    start: Start, streams: bool, end: str
) -> None:
    """If a call for n answers fails or its session ends, all of its answers are removed from the tree. If the client
    hangs up, the tree keeps only the text that a stream has already sent."""
    harness = start("my", "hello you")
    session = await harness.start()
    asked = harness.engine.agenerate
    first_is_done = asyncio.Event()
    harness.engine.hold, harness.engine.held_tokens = asyncio.Event(), 5

    async def in_turn(request: Any, on_tokens: Any = None) -> Any:
        is_second = bool(harness.engine.requests)
        if is_second:
            await first_is_done.wait()
        answer = await asked(request, on_tokens or (lambda _: None))
        if is_second:
            raise EngineError("no server answered", 503)
        first_is_done.set()
        return answer

    harness.engine.agenerate = in_turn  # type: ignore[method-assign]
    body: dict[str, Any] = {**CHAT, "n": 2, "stream": streams}
    call = Connection(harness, f"/{session}/v1/chat/completions", body)
    await first_is_done.wait()
    if streams:
        await call.status()
        while b'"o"' not in await call.read():
            pass
    cache = cache_of(harness, session)
    assert not cache.finished()
    if end == "the caller hangs up":
        await call.hang_up()
    elif end == "an answer fails":
        harness.engine.hold.set()
        await call.rest()
    else:
        await harness.post(f"/{session}/rl/end_session")
        await call.rest()
    left = [i.output_message_list[0]["content"] for i in cache.values()]
    assert left == (["my", "hello"] if streams and end == "the caller hangs up" else [])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    "end", ["the answer is read", "the caller hangs up", "the answer fails", "the session ends"]
)
async def test_a_forgotten_session_leaves_no_garbage(start: Start, streams: bool, end: str) -> None:
    """When the proxy forgets a session, Python frees the session and its turns at once. Python's garbage collector runs
    rarely in the proxy, so the memory would grow if only the garbage collector freed a session."""
    harness = start("hello you")
    session = await harness.start()
    reference = weakref.ref(harness.sessions.find(session))
    asked = harness.engine.agenerate

    async def fails(request: Any, on_tokens: Any = None) -> Any:
        await asked(request, on_tokens)
        raise EngineError("no server answered", 503)

    gc.collect()
    gc.disable()
    try:
        harness.engine.hold, harness.engine.held_tokens = asyncio.Event(), 5
        if end == "the answer fails":
            harness.engine.agenerate = fails  # type: ignore[method-assign]
        call = Connection(harness, f"/{session}/v1/chat/completions", {**CHAT, "stream": streams})
        await asyncio.wait_for(harness.engine.started.wait(), timeout=30)
        if streams:
            await call.status()
            await call.read()
        if end == "the caller hangs up":
            await call.hang_up()
        elif end == "the session ends":
            await harness.post(f"/{session}/rl/end_session")
        else:
            harness.engine.hold.set()
        await call.rest()
        del call
        await harness.export(session)
        assert reference() is None
    finally:
        gc.enable()


async def test_an_agents_seed_gives_n_different_answers(start: Start) -> None:
    """With seed=5 and n=2 the two answers have the seeds 5 and 6. If the agent repeats a request with seed=5 and n=2,
    the second request uses the seeds 5 and 6, like the first request."""
    harness = start()
    session = await harness.start()
    for _ in range(2):
        await harness.chat(session, HELLO, n=2, seed=5)
    assert [request.gconfig.seed for request in harness.engine.requests] == [5, 6, 5, 6]


async def test_a_response_goes_on_from_the_one_it_names(start: Start, tiny_tokenizer: Any) -> None:
    """If a client sends previous_response_id and only the new messages, the prompt begins with the earlier prompt's
    tokens."""
    harness = start("one", "two")
    session = await harness.start()
    async with sdk(harness, f"/{session}/v1") as client:
        first = await client.responses.create(model="m", input="hello", instructions="Be brief.")
        second = await client.responses.create(
            model="m", input="more", previous_response_id=first.id
        )
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.create(model="m", input="more", previous_response_id="resp_00")
    prompts = [request.input_ids for request in harness.engine.requests]
    assert prompts[1][: len(prompts[0])] == prompts[0]
    (row,) = (await harness.export(session, style="concat")).values()
    assert row["messages"][0] == {"role": "system", "content": "Be brief."}
    assert second.output_text == "two"


async def test_what_is_not_stored_is_answered_and_not_trained(start: Start) -> None:
    """With rollout.openai.store=honour, a turn with store=false is not trained, but the prompts of later turns contain
    the turn."""
    harness = start(store="honour")
    session = await harness.start()
    message = reply_message(await harness.chat(session, HELLO, store=False))
    await harness.chat(session, [*HELLO, message, {"role": "user", "content": "?"}])
    (row,) = [i["tensors"] for i in (await harness.export(session, style="concat")).values()]
    assert [
        sum(m for m, t in zip(row["loss_mask"], row["turn_ids"], strict=True) if t == turn)
        for turn in (0, 1)
    ] == [0, 3]


async def test_a_recipe_may_fix_the_sampling(start: Start) -> None:
    """An agent cannot change the sampling fields that fixed_sampling lists, but can change all other sampling
    fields."""
    harness = start(
        sampling={"temperature": 0.7, "top_p": 0.9}, fixed_sampling=["temperature", "stop"]
    )
    session = await harness.start()
    await harness.chat(session, HELLO, temperature=0.1, top_p=0.5, stop=["x"])
    gconfig = harness.engine.requests[0].gconfig
    assert (gconfig.temperature, gconfig.top_p, gconfig.stop) == (0.7, 0.5, ["x"])


async def test_logprobs_are_those_of_the_sampled_tokens(start: Start) -> None:
    """The reply has the log-probability of each sampled token, in OpenAI's form."""
    harness = start("ok")
    session = await harness.start()
    completion = await harness.chat(session, HELLO, logprobs=True)
    content = completion["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["logprob"]) for entry in content] == [
        ("o", -0.25),
        ("k", -0.25),
        ("<|im_end|>", -0.25),
    ]


async def test_tokens_can_be_counted_beforehand(start: Start) -> None:
    """Anthropic's count_tokens returns the number of tokens that a turn's prompt would have, for the first turn and for
    later turns."""
    harness = start("one")
    session = await harness.start()
    messages: list[Any] = list(HELLO)
    async with claude(harness, f"/{session}") as client:
        for _ in range(2):
            counted = await client.messages.count_tokens(
                model="m", messages=messages, system="Be brief."
            )
            message = await client.messages.create(
                model="m", messages=messages, system="Be brief.", max_tokens=9
            )
            assert (
                counted.input_tokens
                == message.usage.input_tokens
                == len(harness.engine.requests[-1].input_ids)
            )
            messages += [
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": "?"},
            ]
    assert len(await harness.export(session, style="concat")) == 1


async def test_one_count_of_a_session_at_a_time(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a session sends many count_tokens requests at the same time, the proxy processes them one after the other. The
    proxy parses each request body of more than 32 KB in a separate thread."""
    harness, in_thread, open_reads, most, threads = start(), proxy.in_thread, 0, 0, set()
    build = harness.app.state.proxy.prompts.prompt

    async def counted(raw: bytes, function: Callable[[], Any]) -> Any:
        nonlocal open_reads, most
        open_reads += 1
        most = max(most, open_reads)
        await asyncio.sleep(0)
        result = await in_thread(raw, function)
        open_reads -= 1
        return result

    def noted(*args: Any) -> list[int]:
        threads.add(threading.current_thread())
        return build(*args)

    monkeypatch.setattr(proxy, "in_thread", counted)
    harness.app.state.proxy.prompts.prompt = noted
    path = f"/{await harness.start()}/v1/messages/count_tokens"
    body = {"messages": [{"role": "user", "content": "x" * 2**15}]}
    answers = await asyncio.gather(*(harness.post(path, body) for _ in range(6)))
    assert [answer.status_code for answer in answers] == [200] * 6
    assert most == 1
    assert threading.main_thread() not in threads


async def test_models_are_listed(start: Start) -> None:
    """OpenAI's and Anthropic's SDKs each get a list of exactly one model."""
    harness = start()
    session = await harness.start()
    async with sdk(harness, f"/{session}/v1") as client, claude(harness, f"/{session}") as other:
        assert [model.id async for model in client.models.list()] == ["default"]
        assert [model.id async for model in other.models.list()] == ["default"]


# Retries


@pytest.mark.parametrize(
    ("states", "says_so", "match"),
    [
        ("", True, None),
        ("finished", False, None),
        ("running", False, None),
        ("finished finished", True, 1),
        ("finished read", True, 0),
        ("read", True, None),
        ("running finished", True, 0),
        ("finished unread", False, 1),
        ("running failed", True, 1),
        ("running abandoned failed", False, 1),
    ],
)
def test_which_turn_a_retry_belongs_to(states: str, says_so: bool, match: int | None) -> None:
    """A request is a retry if an identical earlier request has a turn in the state UNREAD, FAILED or ABANDONED. A
    request with a retry header is also a retry of an identical request that is still running. If no identical request
    is running, a request with a retry header is a retry of the newest identical request whose connection is closed. In
    this test the state "read" means a finished turn whose connection is open."""
    turns: list[Any] = []
    for name in states.split():
        transport = SimpleNamespace(is_closing=lambda name=name: name != "read")
        state = State.FINISHED if name == "read" else State[name.upper()]
        turns.append(SimpleNamespace(state=state, retries=0, transport=transport))
    assert match_retry(turns, says_so) is (None if match is None else turns[match])


async def test_a_retry_is_answered_by_the_turn_in_flight(start: Start) -> None:
    """If a client repeats its request while the first generation runs, the proxy answers the second request with the
    result of the first generation."""
    harness = start("one", "two")
    session = await harness.start()
    harness.engine.hold = asyncio.Event()
    path = f"/{session}/v1/chat/completions"
    first = Connection(harness, path, CHAT)
    await harness.engine.started.wait()
    second = Connection(harness, path, CHAT, RETRY)
    await asyncio.sleep(0)
    await first.hang_up()
    harness.engine.hold.set()
    assert await second.status() == 200
    assert b'"one"' in await second.rest()
    assert len(harness.engine.requests) == 1
    assert len(await harness.export(session)) == 1


async def test_a_retry_of_a_call_that_a_thread_reads_gets_the_same_turn(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy parses a long request body in a second thread. If a retry arrives while the second thread is still
    parsing the first request, both requests get the same turn."""
    monkeypatch.setattr(proxy, "LONG_BODY", 0)
    harness = start("one", "two")
    session = await harness.start()
    path = f"/{session}/v1/chat/completions"
    first, second = await asyncio.gather(
        harness.post(path, CHAT), harness.post(path, CHAT, headers=RETRY)
    )
    assert first.json() == second.json()
    assert len(await harness.export(session)) == 1


async def test_a_retry_whose_reply_was_lost_gets_the_same_reply(start: Start) -> None:
    """If the reply of a finished turn is lost, the retry gets the same reply, and the engine does not generate
    again."""
    harness = start("one", "two")
    session = await harness.start()
    path = f"/{session}/v1/chat/completions"
    lost = await harness.post(path, CHAT)
    again = await harness.post(path, CHAT, headers=RETRY)
    assert again.json() == lost.json()
    assert len(await harness.export(session)) == 1


@pytest.mark.parametrize("is_read", [True, False])
def test_a_retry_whose_first_try_never_arrived_gets_its_own_answer(
    proxy: Any, is_read: bool
) -> None:
    """In this test, a retry arrives after the session has finished an identical call. If the connection of the finished
    call is still open, the client has read the reply, so the retry counts as a new call. If the connection of the
    finished call is closed, the reply may have been lost, so the retry gets the reply of the finished call."""
    admin, body = (
        {"authorization": f"Bearer {proxy.admin_key}"},
        json.dumps(CHAT | {"max_tokens": 4}),
    )
    started = httpx.post(
        f"{proxy.proxy_addr}/rl/start_session", headers=admin, json={"task_id": "t", "grant": True}
    )
    path, host = (
        f"/{started.json()['session_id']}/v1/chat/completions",
        httpx.URL(proxy.proxy_addr).netloc.decode(),
    )
    with (
        closing(HTTPConnection(host, timeout=60)) as first,
        closing(HTTPConnection(host, timeout=60)) as second,
    ):
        first.request("POST", path, body)
        reply = json.loads(first.getresponse().read())
        if not is_read:
            first.close()
        second.request("POST", path, body, RETRY)
        again = json.loads(second.getresponse().read())
    assert (again["id"] != reply["id"]) is is_read
    httpx.post(proxy.proxy_addr + path.replace("v1/chat/completions", "rl/end_session"))


@pytest.mark.parametrize("says_so", [True, False])
@pytest.mark.parametrize("streams", [True, False])
async def test_an_orphan_is_dropped(start: Start, says_so: bool, streams: bool) -> None:
    """If a client hangs up during a generation and then repeats the request, the proxy starts a new turn and removes
    the abandoned turn."""
    harness = start("hello you", "hello me")
    session = await harness.start()
    harness.engine.hold, harness.engine.held_tokens = asyncio.Event(), 5
    path, body = f"/{session}/v1/chat/completions", STREAM if streams else CHAT
    first = Connection(harness, path, body)
    await harness.engine.started.wait()
    if streams:
        await first.status()
    await first.hang_up()
    assert len(cache_of(harness, session)) == streams
    harness.engine.hold = None
    answer = await harness.post(path, body, headers=RETRY if says_so else {})
    assert answer.status_code == 200
    (only,) = (await harness.export(session)).values()
    assert only["output"] == [{"role": "assistant", "content": "hello me"}]


def make_slow_to_abort(harness: Harness) -> asyncio.Event:
    """Change the harness's engine, so that a cancelled generation ends only after the returned event is set."""
    asked, aborted = harness.engine.agenerate, asyncio.Event()

    async def slow_to_abort(request: Any, on_tokens: Any = None) -> Any:
        try:
            return await asked(request, on_tokens)
        except asyncio.CancelledError:
            await aborted.wait()
            raise

    harness.engine.agenerate = slow_to_abort  # type: ignore[method-assign]
    return aborted


async def test_what_was_read_is_stored_before_the_abort_is_done(
    start: Start, tiny_tokenizer: Any
) -> None:
    """A client closes a stream early, and continues the conversation before the engine has ended the generation. The
    next turn continues the tokens that the client has received, and the conversation is one row."""
    harness = start("hello you", "more")
    session, aborted = await harness.start(), make_slow_to_abort(harness)
    harness.engine.hold, harness.engine.held_tokens = asyncio.Event(), 5
    first = Connection(harness, f"/{session}/v1/chat/completions", STREAM)
    await first.status()
    while b'"o"' not in await first.read():
        pass
    first.gone.set()
    await harness.engine.cancelled.wait()
    harness.engine.hold = None
    await harness.chat(
        session,
        [*HELLO, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "?"}],
    )
    rewards = [{"reward": 1.0}]
    answer = await harness.post(
        "/export_trajectories",
        {"session_id": session, "style": "concat", "rewards": rewards},
        headers=ADMIN,
    )
    aborted.set()
    await first.rest()
    (row,) = answer.json()["interactions"].values()
    tensors = row["tensors"]
    trained = [
        t for t, mask in zip(tensors["input_ids"], tensors["loss_mask"], strict=True) if mask
    ]
    assert trained == [
        *tiny_tokenizer.encode("hello"),
        *tiny_tokenizer.encode("more"),
        tiny_tokenizer.eos_token_id,
    ]
    assert row["reward"] == 1.0


async def test_an_answer_after_a_hangup_is_not_stored(start: Start, tiny_tokenizer: Any) -> None:
    """A client closes a stream early, and the engine returns the whole answer in spite of the cancellation. The tree
    keeps only the tokens that the client has received."""
    harness = start("hello you")
    session = await harness.start()
    asked = harness.engine.agenerate
    harness.engine.hold, harness.engine.held_tokens = asyncio.Event(), 5

    async def ignores_the_cancellation(request: Any, on_tokens: Any = None) -> Any:
        try:
            return await asked(request, on_tokens)
        except asyncio.CancelledError:
            harness.engine.hold, harness.engine.texts = None, ["hello you"]
            return await asked(request)

    harness.engine.agenerate = ignores_the_cancellation  # type: ignore[method-assign]
    call = Connection(harness, f"/{session}/v1/chat/completions", STREAM)
    await call.status()
    while b'"o"' not in await call.read():
        pass
    await call.hang_up()
    (cut,) = cache_of(harness, session).values()
    assert tiny_tokenizer.decode(cut.tokens.output_tokens) == "hello"


async def test_an_orphan_is_dropped_while_it_is_aborted(start: Start) -> None:
    """If a retry arrives while the engine aborts the first try's generation, the turn of the first try is removed from
    the tree."""
    harness = start("hello you", "hello me")
    session, aborted = await harness.start(), make_slow_to_abort(harness)
    harness.engine.hold, harness.engine.held_tokens = asyncio.Event(), 5
    path = f"/{session}/v1/chat/completions"
    first = Connection(harness, path, STREAM)
    await first.status()
    first.gone.set()
    await harness.engine.cancelled.wait()
    harness.engine.hold = None
    assert (await harness.post(path, STREAM)).status_code == 200
    aborted.set()
    await first.rest()
    (only,) = (await harness.export(session)).values()
    assert only["output"] == [{"role": "assistant", "content": "hello me"}]


async def test_a_retry_after_a_failure_is_a_new_turn(start: Start) -> None:
    """If a call failed with a 503, its retry starts a new turn, and the failed turn is not in the tree."""
    harness = start("one")
    session = await harness.start()
    path = f"/{session}/v1/chat/completions"
    harness.engine.error = EngineError("no server answered", 503)
    answer = await harness.post(path, CHAT)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    harness.engine.error = None
    assert (await harness.post(path, CHAT, headers=RETRY)).status_code == 200
    assert len(await harness.export(session)) == 1


@pytest.mark.parametrize("together", [True, False])
async def test_two_equal_requests_on_purpose_stay_two(start: Start, together: bool) -> None:
    """Two identical requests without a retry header make two turns. If a client retries two identical requests, the two
    retries get the replies of two different turns."""
    harness = start("one", "two")
    session = await harness.start()
    path = f"/{session}/v1/chat/completions"
    if together:
        harness.engine.hold = asyncio.Event()
        calls = [Connection(harness, path, CHAT) for _ in range(2)]
        while len(harness.engine.requests) < 2:
            await asyncio.sleep(0)
        calls += [Connection(harness, path, CHAT, RETRY) for _ in range(2)]
        await asyncio.sleep(0)
        harness.engine.hold.set()
        bodies = [await call.rest() for call in calls]
        assert bodies[0] == bodies[2]
        assert bodies[1] == bodies[3]
    else:
        bodies = [(await harness.post(path, CHAT)).content for _ in range(2)]
    assert bodies[0] != bodies[1]
    exported = await harness.export(session)
    assert [i["output"][0]["content"] for i in exported.values()] == ["one", "two"]


async def test_the_sdk_retries_by_itself(start: Start) -> None:
    """If the first attempt of a request fails, the official SDK retries automatically, and the tree contains a single
    turn."""
    harness = start("one")
    session = await harness.start()
    harness.engine.error = EngineError("no server answered", 503)
    asked = harness.engine.agenerate

    async def mended(request: Any, on_tokens: Any = None) -> Any:
        try:
            return await asked(request, on_tokens)
        finally:
            harness.engine.error = None

    harness.engine.agenerate = mended  # type: ignore[method-assign]
    async with sdk(harness, f"/{session}/v1") as client:
        completion = await client.with_options(max_retries=1).chat.completions.create(
            model="m", messages=HELLO
        )
    assert list(await harness.export(session)) == [completion.id]


async def test_a_session_frees_its_turns(start: Start) -> None:
    """After an export the session is deleted, and none of its turns is running."""
    harness = start()
    session = await harness.start()
    await harness.chat(session, HELLO)
    table = harness.sessions
    kept = table.find(session)
    await harness.export(session)
    assert len(table) == 0
    assert not kept.running


async def test_a_concurrent_title_call_takes_no_reward(start: Start) -> None:
    """If opencode requests a title while the agent's turn runs, only the agent's turn gets the reward."""
    harness = start("a title", "done")
    session = await harness.start()
    harness.engine.hold = asyncio.Event()
    path = f"/{session}/v1/chat/completions"
    title = {
        "stream": True,
        "messages": [{"role": "system", "content": "You write titles."}, *HELLO],
    }
    main = {
        "stream": True,
        "messages": [{"role": "system", "content": "You code."}, *HELLO],
        "tools": TOOLS,
    }
    calls = [Connection(harness, path, title), Connection(harness, path, main)]
    while len(harness.engine.requests) < 2:
        await asyncio.sleep(0)
    harness.engine.hold.set()
    for call in calls:
        await call.rest()
    assert (await harness.post(f"/{session}/rl/set_reward", {"reward": 1.0})).status_code == 200
    exported = {
        i["output"][0]["content"]: i
        for i in (await harness.export(session, style="concat")).values()
    }
    assert {said: i["reward"] for said, i in exported.items()} == {"a title": None, "done": 1.0}
    assert sum(exported["a title"]["tensors"]["loss_mask"]) == 0


# A real server


@pytest.fixture
async def real(tiny_tokenizer: Any, tiny_server: str) -> AsyncIterator[Harness]:
    """Yield a Harness whose engine uses a real server process."""
    engine = RemoteInfEngine([tiny_server])
    await asyncio.to_thread(engine.initialize)
    harness = Harness(tiny_tokenizer)
    harness.app = create_app(engine, tiny_tokenizer, "admin", sampling={"max_new_tokens": 600})
    harness.http._transport = type(harness.http._transport)(harness.app)  # type: ignore[call-arg]
    yield harness
    await harness.http.aclose()
    await asyncio.to_thread(engine.destroy)


async def assert_equal_rows(harness: Harness, sessions: list[str]) -> None:
    """Check that two sessions export the same rows. The last bits of the log-probabilities may differ, because rounding
    depends on the other requests in the server's batch."""
    one, other = [i["tensors"] for s in sessions for i in (await harness.export(s)).values()]
    assert one.pop("logprobs") == pytest.approx(other.pop("logprobs"), abs=1e-4)
    assert one == other


@pytest.mark.parametrize("seed", range(4))
async def test_streaming_is_not_streaming_chat(real: Harness, seed: int) -> None:
    """A streamed chat completion has the same text and tokens as an unstreamed chat completion."""
    sessions = [await real.start() for _ in range(2)]
    request: Any = {"model": "m", "messages": HELLO, "seed": seed, "tools": TOOLS, "max_tokens": 60}
    async with sdk(real, f"/{sessions[0]}/v1") as client:
        whole = await client.chat.completions.create(**request)
    async with sdk(real, f"/{sessions[1]}/v1") as client:
        options: Any = {"stream_options": {"include_usage": True}}
        async with client.chat.completions.stream(**request, **options) as stream:
            async for _ in stream:
                pass
            streamed = (
                stream.current_completion_snapshot
            )  # get_final_completion raises an error for a truncated text
    assert streamed.choices[0].message.content == whole.choices[0].message.content
    assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason
    assert streamed.usage == whole.usage
    await assert_equal_rows(real, sessions)


@pytest.mark.parametrize("seed", range(4))
async def test_streaming_is_not_streaming_responses(real: Harness, seed: int) -> None:
    """A streamed response has the same text and tokens as an unstreamed response."""
    sessions = [await real.start() for _ in range(2)]
    stops = {
        "seed": seed,
        "stop_token_ids": list(range(100, 104)),
    }  # the answer ends before its length limit
    request: Any = {"model": "m", "input": "hello", "extra_body": stops}
    async with sdk(real, f"/{sessions[0]}/v1") as client:
        whole = await client.responses.create(**request)
    async with (
        sdk(real, f"/{sessions[1]}/v1") as client,
        client.responses.stream(**request) as stream,
    ):
        async for _ in stream:
            pass
        streamed = await stream.get_final_response()
    assert streamed.output_text == whole.output_text
    assert (streamed.status, streamed.usage) == (whole.status, whole.usage)
    await assert_equal_rows(real, sessions)


@pytest.mark.parametrize("seed", range(4))
async def test_streaming_is_not_streaming_messages(real: Harness, seed: int) -> None:
    """A streamed Anthropic message has the same content and tokens as an unstreamed message."""
    sessions = [await real.start() for _ in range(2)]
    request: Any = {"model": "m", "messages": HELLO, "max_tokens": 50, "extra_body": {"seed": seed}}
    async with claude(real, f"/{sessions[0]}") as client:
        whole = await client.messages.create(**request)
    async with (
        claude(real, f"/{sessions[1]}") as client,
        client.messages.stream(**request) as stream,
    ):
        streamed = await stream.get_final_message()
    assert [block.model_dump() for block in streamed.content] == [
        block.model_dump() for block in whole.content
    ]
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (
        whole.stop_reason,
        whole.usage.output_tokens,
    )
    await assert_equal_rows(real, sessions)


async def test_a_paused_server_holds_requests(real: Harness, tiny_server: str) -> None:
    """If a call arrives while the server is paused for a weight update, the call waits and is answered after the
    pause."""
    engine = real.app.state.proxy.engine
    session = await real.start()
    await asyncio.to_thread(engine.pause)
    calls = [
        Connection(
            real, f"/{session}/v1/chat/completions", {**CHAT, "stream": streams, "max_tokens": 5}
        )
        for streams in (True, False)
    ]
    while (
        "waiting=2"
        not in (await asyncio.to_thread(engine.servers.post_all, "/model_info"))[0]["state"]
    ):
        pass
    assert not any(call.task.done() for call in calls)
    await asyncio.to_thread(engine.resume)
    assert [await call.status() for call in calls] == [200, 200]
    for call in calls:
        await call.rest()
    assert len(await real.export(session)) == 2


async def test_a_hang_up_frees_the_server(real: Harness, tiny_server: str) -> None:
    """If a client hangs up, the engine sends /abort_request, and the server stops generating."""
    session = await real.start()
    body = {**STREAM, "max_tokens": 1500, "seed": 1}
    call = Connection(real, f"/{session}/v1/chat/completions", body)
    assert await call.status() == 200
    await call.read()
    await call.hang_up()
    [info] = await asyncio.to_thread(real.app.state.proxy.engine.servers.post_all, "/model_info")
    assert "running=0" in info["state"]
    assert (await real.http.get("/health")).json()["sessions"] == 1
    assert (await real.post("/grant_capacity", headers=ADMIN)).status_code == 200


@pytest.mark.parametrize("protocol", ["chat", "messages"])
async def test_a_stream_through_processes_and_the_agents_own_transport(
    tiny_model_dir: Any, tiny_server: str, protocol: str
) -> None:
    """Tokens stream from a server process through a proxy process to the agent's client. If the agent closes a stream
    early, the server stops generating. After a finished stream, the client's connection is free for the next
    request."""
    command = [
        sys.executable,
        "proxy.py",
        "--server",
        tiny_server,
        "--model-path",
        str(tiny_model_dir),
        "--port",
        "0",
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        said = process.stdout.readline() + process.stdout.readline()
        found = re.search(r"OPENAI_BASE_URL=(\S+) ANTHROPIC_BASE_URL=(\S+),", said)
        assert found is not None
        request: Any = {"model": "m", "messages": HELLO, "extra_body": {"seed": 3}}
        async with make_agents_client() as http:
            chat = openai.AsyncOpenAI(base_url=found[1], api_key="DUMMY", http_client=http)
            other = anthropic.AsyncAnthropic(base_url=found[2], api_key="DUMMY", http_client=http)
            for _ in range(3):
                if protocol == "chat":
                    events: Any = await chat.chat.completions.create(
                        **request, max_tokens=300, stream=True
                    )
                else:
                    events = await other.messages.create(**request, max_tokens=300, stream=True)
                assert len([event async for event in events]) > 5
            assert idle_connections(http._transport) == 1
            if protocol == "chat":
                events = await chat.chat.completions.create(**request, max_tokens=1800, stream=True)
            else:
                events = await other.messages.create(**request, max_tokens=1800, stream=True)
            async for _ in events:
                break
            await events.close()
            while "running=0" not in (await http.get(tiny_server + "/model_info")).json()["state"]:
                pass
    finally:
        process.terminate()
        process.wait(timeout=20)
        process.stdout.close()


@pytest.mark.parametrize("where", ["parse", "certain"])
async def test_a_mistake_of_ours_is_an_event_too(
    start: Start, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """If an unexpected error occurs in the middle of a stream, the client gets the error as an event. After the proxy
    has sent an unexpected error as an event, the proxy raises the error, so that the log shows the error."""

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("our mistake")

    harness = start("hello")
    session = await harness.start()
    monkeypatch.setattr(OutputParser, where, broken)
    call = Connection(harness, f"/{session}/v1/chat/completions", STREAM)
    await asyncio.wait({call.task}, timeout=30)
    assert isinstance(call.task.exception(), ZeroDivisionError)
    pieces = [call.pieces.get_nowait() for _ in range(call.pieces.qsize())]
    assert b"our mistake" in pieces[-1]["body"]
