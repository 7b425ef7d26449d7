"""Raw JSON requests in all three protocols get the replies and errors that the vendors' clients
expect."""

import base64
import json
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import Message, ModelInfo, RawMessageStreamEvent
from harness import ADMIN, Harness, claude, sdk
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from calls.messages import PLACEHOLDER, parse_anthropic, parse_responses
from calls.replies import PROTOCOLS
from engine import RemoteInfEngine
from proxy import create_app

pytestmark = pytest.mark.anyio

Start = Callable[..., Harness]
Items = list[dict[str, Any]]
NAMES = list(PROTOCOLS)
CALL = 'Let me see.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
PNG = base64.b64encode(b"\x89PNG" + bytes(range(256))).decode()


def user(text: Any = "hello") -> dict[str, Any]:
    return {"role": "user", "content": text}


def offer(name: str, function: str = "f") -> dict[str, Any]:
    """Return the tool `function` in the form of the protocol `name`."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    if name == "messages":
        return {"name": function, "input_schema": schema}
    keys = {"name": function, "parameters": schema}
    return (
        {"type": "function", **keys}
        if name == "responses"
        else {"type": "function", "function": keys}
    )


def body_of(name: str, items: Items, **fields: Any) -> dict[str, Any]:
    return {"input" if name == "responses" else "messages": items, "max_tokens": 99} | fields


async def ask(
    harness: Harness, session: str, name: str, items: Items, **fields: Any
) -> dict[str, Any]:
    """Return the reply to a raw request."""
    answer = await harness.post(f"/{session}/v1/{name}", body_of(name, items, **fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(name: str, reply: dict[str, Any]) -> Items:
    """Return the items that a client adds to its next request to repeat this reply."""
    if name == "chat/completions":
        return [reply["choices"][0]["message"]]
    return (
        reply["output"]
        if name == "responses"
        else [{"role": "assistant", "content": reply["content"]}]
    )


def result(name: str, reply: dict[str, Any], content: Any) -> dict[str, Any]:
    """Return `content` as the result of the reply's only tool call, in the form of the protocol
    `name`."""
    if name == "chat/completions":
        return {
            "role": "tool",
            "tool_call_id": said(name, reply)[0]["tool_calls"][0]["id"],
            "content": content,
        }
    if name == "responses":
        return {
            "type": "function_call_output",
            "call_id": reply["output"][-1]["call_id"],
            "output": content,
        }
    return user(
        [{"type": "tool_result", "tool_use_id": reply["content"][-1]["id"], "content": content}]
    )


@pytest.fixture
def tool_tokenizer(tiny_tokenizer: Any) -> Any:
    """A tokenizer whose chat template writes the names of the tools at the beginning of the
    prompt."""
    own = type(tiny_tokenizer)(
        tokenizer_object=tiny_tokenizer.backend_tokenizer, eos_token="<|im_end|>"
    )
    names = "{% for t in tools or [] %}tool {{ t.function.name }}\n{% endfor %}"
    own.chat_template = names + tiny_tokenizer.chat_template
    return own


# The tree


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("later", ["no tools", "other tools", "other order"])
async def test_a_client_may_change_its_tools(tool_tokenizer: Any, name: str, later: str) -> None:
    """If a client changes its tools in the middle of a conversation, the turns of the conversation
    form a single path of the conversation tree."""
    harness = Harness(tool_tokenizer, CALL, "21 degrees", "bye")
    session, items = await harness.start(), [user()]
    first, second = offer(name), offer(name, "g")
    changed = {"no tools": [], "other tools": [second], "other order": [second, first]}[later]
    reply = await ask(harness, session, name, items, tools=[first, second])
    items += [*said(name, reply), result(name, reply, "21")]
    reply = await ask(harness, session, name, items, tools=changed)
    items += [*said(name, reply), user("thanks")]
    await ask(harness, session, name, items, tools=changed)
    await harness.post(f"/{session}/rl/set_reward", {"reward": 1.0})
    prompts = [request.input_ids for request in harness.engine.requests]
    assert (
        prompts[2][: len(prompts[1])] == prompts[1]
    )  # the tools are identical, so the parent's tokens are reused
    assert prompts[1][: len(prompts[0])] != prompts[0]
    rows = await harness.export(session, style="individual", discount=0.5)
    names = list(rows)
    assert [row["parent"] for row in rows.values()] == [None, *names[:2]]
    assert [row["reward"] for row in rows.values()] == [0.25, 0.5, 1.0]
    assert all(sum(row["tensors"]["loss_mask"]) for row in rows.values())
    await harness.http.aclose()


@pytest.mark.parametrize(
    "change", [{"tools": []}, {"instructions": "Be wordy."}, {"reasoning": {"effort": "high"}}]
)
async def test_a_named_response_is_the_parent(tool_tokenizer: Any, change: dict[str, Any]) -> None:
    """The response that previous_response_id names is the parent, even if the next request has
    other tools, instructions or template arguments."""
    harness = Harness(tool_tokenizer, "one", "two")
    session = await harness.start()
    fields = {"instructions": "Be terse.", "tools": [offer("responses")]}
    first = await ask(harness, session, "responses", [user()], **fields)
    named = {"previous_response_id": first["id"]} | fields | change
    second = await ask(harness, session, "responses", [user("more")], **named)
    cache = harness.sessions.find(session).cache
    assert cache[second["id"]].parent is cache[first["id"]]
    text = tool_tokenizer.decode(harness.engine.requests[1].input_ids)
    assert text == tool_tokenizer.apply_chat_template(
        [
            {"role": "system", "content": named["instructions"]},
            user(),
            {"role": "assistant", "content": "one"},
            user("more"),
        ],
        tools=[offer("chat/completions")] if named["tools"] else None,
        add_generation_prompt=True,
        tokenize=False,
    )
    await harness.http.aclose()


async def test_a_named_response_beats_its_twin(start: Start) -> None:
    """If two responses have identical messages and outputs, the next request's parent is the
    response that the client names."""
    harness = start("one", "one", "two")
    session = await harness.start()
    older, _ = [await ask(harness, session, "responses", [user()], user=str(k)) for k in range(2)]
    child = await ask(
        harness, session, "responses", [user("more")], previous_response_id=older["id"]
    )
    cache = harness.sessions.find(session).cache
    assert cache[child["id"]].parent is cache[older["id"]]


@pytest.mark.parametrize("name", NAMES)
async def test_an_echo_without_reasoning_is_spliced(start: Start, name: str) -> None:
    """If a client sends a history without the model's reasoning, the next prompt still begins with
    the sampled tokens."""
    harness = start("<think>\nhm\n</think>\n\none", "two", "three")
    session, items = await harness.start(), [user()]
    for k in range(3):
        reply = await ask(harness, session, name, items)
        kept = json.loads(json.dumps(said(name, reply)))
        if name == "chat/completions":
            kept[0].pop("reasoning_content", None)
        elif name == "responses":
            kept = [item for item in kept if item["type"] != "reasoning"]
        else:
            kept[0]["content"] = [
                block for block in kept[0]["content"] if block["type"] != "thinking"
            ]
        items += [*kept, user(str(k))]
    prompts = [request.input_ids for request in harness.engine.requests]
    assert prompts[1][: len(prompts[0])] == prompts[0]
    assert prompts[2][: len(prompts[1])] == prompts[1]
    assert len(await harness.export(session, style="concat")) == 1


# Images and files

PARTS: dict[str, Items] = {
    "chat/completions": [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        {"type": "file", "file": {"file_data": PNG, "filename": "a.pdf"}},
        {"type": "input_audio", "input_audio": {"data": PNG, "format": "wav"}},
    ],
    "responses": [
        {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}", "detail": "auto"},
        {"type": "input_file", "file_data": PNG, "filename": "a.pdf"},
    ],
    "messages": [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
        {
            "type": "document",
            "source": {"type": "base64", "media_type": "application/pdf", "data": PNG},
        },
    ],
}


@pytest.mark.parametrize(("name", "part"), [(name, part) for name in NAMES for part in PARTS[name]])
async def test_an_image_becomes_a_text(
    start: Start, tiny_tokenizer: Any, name: str, part: dict[str, Any]
) -> None:
    """An image or a file in a message or in a tool result becomes a placeholder text."""
    harness = start(CALL, "a cat")
    text = {"type": "input_text" if name == "responses" else "text", "text": "Look: "}
    session, items = await harness.start(), [user([text, part])]
    reply = await ask(harness, session, name, items, tools=[offer(name)])
    items += [*said(name, reply), result(name, reply, [part])]
    await ask(harness, session, name, items, tools=[offer(name)])
    prompt = tiny_tokenizer.decode(harness.engine.requests[1].input_ids)
    assert f"user\nLook: {PLACEHOLDER}<|im_end|>" in prompt
    assert f"tool\n{PLACEHOLDER}<|im_end|>" in prompt
    assert len(await harness.export(session, style="concat")) == 1


def test_a_message_keeps_its_blocks_beside_tool_results() -> None:
    """Calls and reasoning next to a tool_result block are kept, even if the message has no text."""
    result = {"type": "tool_result", "tool_use_id": "c", "content": "21"}
    use = {"type": "tool_use", "id": "d", "name": "f", "input": {}}
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    for blocks in ([result, use], [thought, result], [thought, use, result]):
        read = parse_anthropic(
            {"messages": [{"role": "assistant", "content": blocks}, user()]}
        ).messages
        assert [m["role"] for m in read] == ["tool", "assistant", "user"]
        assert ("tool_calls" in read[1], "reasoning_content" in read[1]) == (
            use in blocks,
            thought in blocks,
        )
    assert len(parse_anthropic({"messages": [user([result])]}).messages) == 1


# Tests of the end of an answer and of the context's length


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_sequence_is_named(start: Start, stream: bool) -> None:
    """In Anthropic's protocol, a reply names the stop sequence that ended the reply."""
    harness = start("four. And five", "four")
    session = await harness.start()
    options: Any = {
        "model": "m",
        "max_tokens": 9,
        "messages": [user()],
        "stop_sequences": ["x", "And"],
    }
    ends = []
    async with claude(harness, f"/{session}") as client:
        for _ in range(2):
            if stream:
                async with client.messages.stream(**options) as events:
                    message = await events.get_final_message()
            else:
                message = await client.messages.create(**options)
            block: Any = message.content[0]
            ends.append((block.text, message.stop_reason, message.stop_sequence))
    assert ends == [("four. ", "stop_sequence", "And"), ("four", "end_turn", None)]


@pytest.fixture
async def limited(real_engine: RemoteInfEngine, tiny_tokenizer: Any) -> Any:
    """Yield a proxy that runs in the process of the test. The proxy's engine uses a real server
    whose context has 2,048 tokens."""
    harness = Harness(tiny_tokenizer)
    harness.app = create_app(real_engine, tiny_tokenizer, "admin")
    harness.http._transport.app = harness.app  # type: ignore[attr-defined]
    yield harness
    await harness.http.aclose()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", NAMES)
async def test_a_full_context_is_said_in_each_vendors_way(
    limited: Harness, name: str, stream: bool
) -> None:
    """A prompt that fills the context gets status 400 with OpenAI's error code or with Anthropic's
    error message."""
    session = await limited.start()
    answer = await limited.post(
        f"/{session}/v1/{name}", body_of(name, [user("x" * 3000)], stream=stream)
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith("prompt is too long: 3")
    assert error["message"].endswith(" tokens > 2048 maximum context length")
    assert error.get("code") == (None if name == "messages" else "context_length_exceeded")
    assert not limited.sessions.find(session).cache
    if name == "messages":
        async with claude(limited, f"/{session}") as client:
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                await client.messages.create(model="m", max_tokens=9, messages=[user("x" * 3000)])  # type: ignore[list-item]
    else:
        async with sdk(limited, f"/{session}/v1") as other:
            with pytest.raises(openai.BadRequestError) as raised:
                await other.responses.create(model="m", input="x" * 3000)
            assert raised.value.code == "context_length_exceeded"


# Tools that the reply may call


@pytest.mark.parametrize("name", ["chat/completions", "responses"])
@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_are_called(tool_tokenizer: Any, name: str, mode: str) -> None:
    """With allowed_tools the prompt contains all tools, and only an allowed tool can be called."""
    texts = [CALL] if mode == "auto" else ['{"a": 1}}</tool_call>']
    harness = Harness(tool_tokenizer, *texts)
    session = await harness.start()
    listed = {
        "mode": mode,
        "tools": [{key: value for key, value in offer(name, "g").items() if key != "parameters"}],
    }
    choice = {"type": "allowed_tools"} | (
        listed if name == "responses" else {"allowed_tools": listed}
    )
    reply = await ask(
        harness, session, name, [user()], tools=[offer(name), offer(name, "g")], tool_choice=choice
    )
    prompt = tool_tokenizer.decode(harness.engine.requests[0].input_ids)
    assert prompt.startswith("tool f\ntool g\n")
    calls = [
        item
        for item in said(name, reply)
        if item.get("tool_calls") or item.get("type") == "function_call"
    ]
    if mode == "auto":  # the model called f, which is not allowed, so the call stays text
        assert not calls
        assert "tool_call" in json.dumps(reply)
    else:  # g is the only allowed tool, so the prompt ends with the beginning of a call of g
        assert prompt.endswith('<tool_call>\n{"name": "g", "arguments": ')
        assert len(calls) == 1
    await harness.http.aclose()


@pytest.mark.parametrize("tools", [[], [{"type": "function", "name": "h"}], [{"name": 3}], "f"])
def test_allowed_tools_are_offered_tools(tools: Any) -> None:
    """The parser refuses a request that requires a tool call if the request's `tools` contain none
    of the allowed tools."""
    choice = {"type": "allowed_tools", "mode": "required", "tools": tools}
    with pytest.raises(ValueError, match="tool"):
        parse_responses({"input": "hello", "tools": [offer("responses")], "tool_choice": choice})


# Other endpoints


@pytest.mark.parametrize("path", ["/{}/v1", "/{}", "/{}//v1", "/{}/v1/", "//v1"])
@pytest.mark.parametrize("name", NAMES)
async def test_a_double_slash_is_a_slash(start: Start, name: str, path: str) -> None:
    """A client reaches the proxy even if the client's URL contains two consecutive slashes."""
    harness = start("one")
    session = await harness.start()
    key = {"Authorization": f"Bearer {session}"}
    answer = await harness.post(
        f"{path.format(session)}/{name}", body_of(name, [user()]), headers=key
    )
    assert answer.status_code == 200, answer.text


async def test_a_model_can_be_asked_for(start: Start) -> None:
    """Both SDKs can look up the model by any name, even by a name with a slash."""
    harness = start()
    session = await harness.start()
    answer = await harness.http.get(f"/{session}/v1/models/Qwen/Qwen3-0.6B")
    assert answer.json()["id"] == "Qwen/Qwen3-0.6B"
    (listed,) = (await harness.http.get(f"/{session}/v1/models")).json()["data"]
    for body in (answer.json(), listed):
        Model.model_validate(body)
        ModelInfo.model_validate(body)
    async with sdk(harness, f"/{session}/v1") as client, claude(harness, f"/{session}") as other:
        assert (await client.models.retrieve("gpt-5")).id == "gpt-5"
        assert (await other.models.retrieve("claude")).display_name == "claude"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_can_be_fetched(start: Start, stream: bool) -> None:
    """GET /v1/responses/{id} returns a finished response, or status 404 for an unknown id."""
    harness = start("one")
    session = await harness.start()
    async with sdk(harness, f"/{session}/v1") as client:
        async with client.responses.stream(model="m", input="hello") as events:
            response = await events.get_final_response()
        again = await client.responses.retrieve(response.id)
        assert (again.id, again.output_text, again.status) == (response.id, "one", "completed")
        with pytest.raises(openai.NotFoundError, match="response_id"):
            await client.responses.retrieve("resp_no")


async def test_management_names_the_wrong_field(start: Start) -> None:
    """The proxy refuses to start a session if the caller chooses the session's API key."""
    harness = start()
    await harness.post("/grant_capacity", headers=ADMIN)
    answer = await harness.post(
        "/rl/start_session", {"task_id": "t", "api_key": "sk-mine"}, headers=ADMIN
    )
    assert answer.status_code == 400
    assert "api_key" in answer.text
    assert (
        await harness.post("/rl/start_session", {"task_id": "t"}, headers=ADMIN)
    ).status_code == 200
    answer = await harness.post("/export_trajectories", {}, headers=ADMIN)
    assert answer.status_code == 404
    assert "session_id" in answer.text


# Strict validation

MODELS: dict[str, Any] = {
    "chat/completions": (ChatCompletion, ChatCompletionChunk),
    "responses": (Response, ResponseStreamEvent),
    "messages": (Message, RawMessageStreamEvent),
}


@pytest.mark.parametrize("name", NAMES)
async def test_replies_and_events_are_valid_for_the_sdks(start: Start, name: str) -> None:
    """Every reply and every event of a stream is valid for the installed SDKs' types, and has all
    fields that the types require."""
    text = f"<think>hm</think>{CALL}"
    harness = start(text, text, "cut…")
    session = await harness.start()
    whole, event = MODELS[name]
    fields: Any = {"tools": [offer(name)], "stream_options": {"include_usage": True}}
    fields |= {"logprobs": True, "include": ["message.output_text.logprobs"]}
    TypeAdapter(whole).validate_python(await ask(harness, session, name, [user()], **fields))
    for _ in range(2):
        answer = await harness.post(
            f"/{session}/v1/{name}", body_of(name, [user()], stream=True, **fields)
        )
        lines = [
            line.removeprefix("data: ")
            for line in answer.text.splitlines()
            if line.startswith("data: ")
        ]
        assert len(lines) >= 5
        for line in lines:
            if line != "[DONE]":
                TypeAdapter(event).validate_python(json.loads(line))
