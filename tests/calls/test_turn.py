"""Calls, streams and retries: what is in the tree, and who gets which reply."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest
from conftest import ROOT, idle_connections
from harness import HELLO, Connection, Harness, ScriptedEngine, claude, reply_message, sdk

from calls.turn import State, retried_turn
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


# ---- streams


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream sends progress without waiting for it."""
    monkeypatch.setattr("calls.turn.PROGRESS_SECONDS", 0.0)


PROGRESS = {
    "chat/completions": b'"delta": {}',
    "responses": b"event: response.in_progress",
    "messages": b"event: ping",
}


@pytest.mark.parametrize("protocol", ENDS)
@pytest.mark.usefixtures("at_once")
async def test_a_turn_is_in_the_tree_before_its_first_byte_and_whole_before_its_last(
    start: Start, protocol: str
) -> None:
    """While the answer is generated, the client gets events that its SDK counts as progress."""
    harness = start("hello you")
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
        assert PROGRESS[protocol] in await call.read()
    harness.engine.hold.set()
    while not ENDS[protocol](piece := await call.read()):
        assert piece
    assert interaction.output_message_list == [{"role": "assistant", "content": "hello you"}]
    assert interaction.reply is not None
    await call.task


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("end", ["the engine fails", "the session ends", "we fail"])
async def test_an_error_in_the_middle_is_an_event(
    start: Start, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """And the turn leaves the tree."""
    harness = start("hello")
    session = await harness.start()
    cache, hold = cache_of(harness, session), asyncio.Event()

    async def fail(request: Any) -> Any:
        await hold.wait()
        raise EngineError("no server answered", 503) if end == "the engine fails" else KeyError("?")

    harness.engine.agenerate = fail  # type: ignore[method-assign]
    call = Connection(harness, f"/{session}/v1/chat/completions", STREAM)
    await call.status()
    await call.read()
    if end == "the session ends":
        assert await harness.export(session) == {}
    hold.set()
    await asyncio.wait({call.task}, timeout=30)
    assert isinstance(call.task.exception(), KeyError if end == "we fail" else type(None))
    pieces = [call.pieces.get_nowait() for _ in range(call.pieces.qsize())]
    said = events(b"".join(piece.get("body", b"") for piece in pieces))[-1]["error"]["message"]
    words = {"the engine fails": "no server", "the session ends": "ended", "we fail": "?"}
    assert words[end] in said
    assert len(cache) == 0


@pytest.mark.parametrize("streams", [True, False])
async def test_an_error_before_the_first_token_is_a_status(start: Start, streams: bool) -> None:
    """A call that is refused at once gets an HTTP status, also if it asked for a stream."""
    harness = start()
    session = await harness.start()
    harness.engine.error = EngineError("the prompt is too long", 400)
    answer = await harness.post(f"/{session}/v1/messages", {**STREAM, "stream": streams})
    assert answer.status_code == 400
    error = {"type": "invalid_request_error", "message": "the prompt is too long"}
    assert answer.json() == {"type": "error", "error": error}
    assert len(cache_of(harness, session)) == 0


async def test_a_turn_that_never_ran_leaves_the_tree(start: Start) -> None:
    """If the session ends before the asyncio task of a turn has started, the turn is removed from
    the tree."""
    harness = start("hello")
    session = await harness.start()
    cache, proxy = cache_of(harness, session), harness.app.state.proxy
    begin = proxy.begin

    def end_at_once(*args: Any) -> Any:
        turn = begin(*args)
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
    """The reply contains the parsed tool call."""
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


@pytest.mark.parametrize("levels", range(200, 208))
async def test_a_call_that_is_nested_deeply_has_a_reply(start: Start, levels: int) -> None:
    """However deeply the arguments of a tool call are nested, the proxy sends a reply."""
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
    """The beginning of a forced call is part of the prompt and is not trained."""
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
    """If a call asks for n answers, each answer is an interaction with its own seed."""
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


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("end", ["the caller hangs up", "an answer fails", "the session ends"])
async def test_n_answers_are_read_together_or_not_at_all(
    start: Start, streams: bool, end: str
) -> None:
    """Whatever ends a call early, none of its answers stays in the tree, and all are stopped."""
    harness = start()
    session = await harness.start()
    hold, done = asyncio.Event(), []

    async def second_waits(request: Any) -> Any:
        harness.engine.requests.append(request)
        if len(harness.engine.requests) == 1:
            return await ScriptedEngine(harness.engine.tokenizer).agenerate(request)
        try:
            await hold.wait()
            raise EngineError("no server answered", 503)
        finally:
            done.append(request)

    harness.engine.agenerate = second_waits  # type: ignore[method-assign]
    body: dict[str, Any] = {**CHAT, "n": 2, "stream": streams}
    call = Connection(harness, f"/{session}/v1/chat/completions", body)
    while len(harness.engine.requests) < 2:
        await asyncio.sleep(0)
    if streams:
        await call.status()
    cache = cache_of(harness, session)
    if end == "the caller hangs up":
        call.gone.set()
    elif end == "an answer fails":
        hold.set()
    else:
        await harness.post(f"/{session}/rl/end_session")
    await call.rest()
    assert len(done) == 1
    assert not cache


async def test_an_agents_seed_gives_n_different_answers(start: Start) -> None:
    """With seed=5 and n=2 the two answers have the seeds 5 and 6."""
    harness = start()
    session = await harness.start()
    for _ in range(2):
        await harness.chat(session, HELLO, n=2, seed=5)
    assert [request.gconfig.seed for request in harness.engine.requests] == [5, 6, 5, 6]


async def test_a_response_goes_on_from_the_one_it_names(start: Start, tiny_tokenizer: Any) -> None:
    """If a client sends previous_response_id and only the new messages, the prompt begins with the
    earlier prompt's tokens."""
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
    """Anthropic's count_tokens returns the number of tokens that a turn's prompt would have, for
    the first turn and for later turns."""
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


async def test_models_are_listed(start: Start) -> None:
    """OpenAI's and Anthropic's SDKs each get a list of exactly one model."""
    harness = start()
    session = await harness.start()
    async with sdk(harness, f"/{session}/v1") as client, claude(harness, f"/{session}") as other:
        assert [model.id async for model in client.models.list()] == ["default"]
        assert [model.id async for model in other.models.list()] == ["default"]


# ---- retries


@pytest.mark.parametrize(
    ("states", "match", "left"),
    [
        ("", None, 0),
        ("finished", 0, 1),
        ("finished finished", 1, 2),
        ("running finished", 0, 2),
        ("running failed", None, 1),
        ("failed finished failed", None, 2),
    ],
)
def test_which_turn_a_retry_belongs_to(states: str, match: int | None, left: int) -> None:
    """A failed one, which is then forgotten; else a running one; else the last that finished."""
    turns: list[Any] = [
        SimpleNamespace(state=State[name.upper()], joined=0) for name in states.split()
    ]
    equal = [*turns]
    assert retried_turn(equal) is (None if match is None else turns[match])
    assert len(equal) == left


async def test_a_retry_is_answered_by_the_turn_in_flight(start: Start) -> None:
    """If a client repeats its request while the first generation runs, the proxy answers the second
    request with the result of the first generation."""
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


async def test_a_retry_whose_reply_was_lost_gets_the_same_reply(start: Start) -> None:
    """If the reply of a finished turn is lost, the retry gets the same reply, and the engine does
    not generate again."""
    harness = start("one", "two")
    session = await harness.start()
    path = f"/{session}/v1/chat/completions"
    lost = await harness.post(path, CHAT)
    again = await harness.post(path, CHAT, headers=RETRY)
    assert again.json() == lost.json()
    assert len(await harness.export(session)) == 1


async def test_a_retry_after_a_failure_is_a_new_turn(start: Start) -> None:
    """If a call failed with a 503, its retry starts a new turn, and the failed turn is not in the
    tree."""
    harness = start("one")
    session = await harness.start()
    path = f"/{session}/v1/chat/completions"
    harness.engine.error = EngineError("no server answered", 503)
    answer = await harness.post(path, CHAT)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    harness.engine.error = None
    assert (await harness.post(path, CHAT, headers=RETRY)).status_code == 200
    assert len(await harness.export(session)) == 1


@pytest.mark.parametrize("says_so", [True, False])
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("obeys", [True, False])
@pytest.mark.usefixtures("at_once")
async def test_what_nobody_waits_for_leaves_the_tree(
    start: Start, says_so: bool, streams: bool, obeys: bool
) -> None:
    """A client hangs up and asks again while the engine still aborts: only the second call is in
    the tree, even if the engine answers the first in spite of the cancellation."""
    harness = start()
    session, hold, aborted = await harness.start(), asyncio.Event(), asyncio.Event()
    asked = harness.engine.agenerate

    async def slow_to_abort(request: Any) -> Any:
        if not harness.engine.requests:
            harness.engine.requests.append(request)
            try:
                await hold.wait()
            except asyncio.CancelledError:
                await aborted.wait()
                if obeys:
                    raise
        return await asked(request)

    harness.engine.agenerate = slow_to_abort  # type: ignore[method-assign]
    path, body = f"/{session}/v1/chat/completions", STREAM if streams else CHAT
    first = Connection(harness, path, body)
    while not harness.engine.requests:
        await asyncio.sleep(0)
    if streams:
        await first.status()
    first.gone.set()
    while cache_of(harness, session):
        await asyncio.sleep(0)
    answer = await harness.post(path, body, headers=RETRY if says_so else {})
    assert answer.status_code == 200
    aborted.set()
    await first.rest()
    assert len(await harness.export(session)) == 1


@pytest.mark.parametrize("together", [True, False])
async def test_two_equal_requests_on_purpose_stay_two(start: Start, together: bool) -> None:
    """Two identical requests without a retry header make two turns."""
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
    """After a 503 the official SDK asks again, and the tree has one turn."""
    harness = start("one")
    session = await harness.start()
    asked, failures = harness.engine.agenerate, [EngineError("no server answered", 503)]

    async def fails_once(request: Any) -> Any:
        if failures:
            raise failures.pop()
        return await asked(request)

    harness.engine.agenerate = fails_once  # type: ignore[method-assign]
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
    """If opencode requests a title while the agent's turn runs, only the agent's turn gets the
    reward."""
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
    """Check that two sessions export the same rows. The last bits of the log-probabilities may
    differ, because rounding depends on the other requests in the server's batch."""
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
    """If a call arrives while the server is paused for a weight update, the call waits and is
    answered after the pause."""
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


async def test_a_hang_up_frees_the_server(real: Harness) -> None:
    """The engine tells the server to stop."""
    session = await real.start()
    body = {**CHAT, "max_tokens": 1500, "seed": 1}
    call = Connection(real, f"/{session}/v1/chat/completions", body)
    servers = real.app.state.proxy.engine.servers
    while "running=1" not in (await asyncio.to_thread(servers.post_all, "/model_info"))[0]["state"]:
        pass
    await call.hang_up()
    [info] = await asyncio.to_thread(servers.post_all, "/model_info")
    assert "running=0" in info["state"]


@pytest.mark.parametrize("protocol", ["chat", "messages"])
async def test_a_stream_through_processes_and_the_agents_own_transport(
    tiny_model_dir: Any, tiny_server: str, protocol: str
) -> None:
    """Events pass through a proxy process to the agent's client, whose connection is free again
    after them."""
    command = [sys.executable, "proxy.py", "--server", tiny_server, "--port", "0"]
    command += ["--model-path", str(tiny_model_dir)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        said = process.stdout.readline() + process.stdout.readline()
        found = re.search(r"OPENAI_BASE_URL=(\S+) ANTHROPIC_BASE_URL=(\S+),", said)
        assert found is not None
        request: Any = {"model": "m", "messages": HELLO, "max_tokens": 30, "stream": True}
        async with make_agents_client() as http:
            chat = openai.AsyncOpenAI(base_url=found[1], api_key="DUMMY", http_client=http)
            other = anthropic.AsyncAnthropic(base_url=found[2], api_key="DUMMY", http_client=http)
            for _ in range(3):
                create: Any = chat.chat.completions if protocol == "chat" else other.messages
                assert len([event async for event in await create.create(**request)]) >= 3
            assert idle_connections(http._transport) == 1
    finally:
        process.terminate()
        process.wait(timeout=60)
        process.stdout.close()
