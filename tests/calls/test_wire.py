"""Raw JSON requests in all three protocols get the replies and errors that the vendors' clients
expect, and their turns are one conversation."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from harness import Harness, user, with_template

from calls.replies import PROTOCOLS
from engine import RemoteInfEngine

pytestmark = pytest.mark.anyio

Start = Callable[..., Harness]
Items = list[dict[str, Any]]
NAMES = list(PROTOCOLS)
CALL = 'Let me see.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def offer(name: str, function: str = "f") -> dict[str, Any]:
    """A tool in the form of a protocol."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    if name == "messages":
        return {"name": function, "input_schema": schema}
    keys = {"name": function, "parameters": schema}
    return {"type": "function"} | (keys if name == "responses" else {"function": keys})


def body_of(name: str, items: Items, **fields: Any) -> dict[str, Any]:
    return {"input" if name == "responses" else "messages": items, "max_tokens": 99} | fields


async def ask(harness: Harness, session: str, name: str, items: Items, **fields: Any) -> Any:
    """The reply to a raw request."""
    answer = await harness.post(f"/{session}/v1/{name}", body_of(name, items, **fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


def echo(name: str, reply: dict[str, Any]) -> Items:
    """The items that a client adds to its next request to repeat this reply."""
    if name == "responses":
        return reply["output"]
    if name == "messages":
        return [{"role": "assistant", "content": reply["content"]}]
    return [reply["choices"][0]["message"]]


def result(name: str, reply: dict[str, Any], content: Any) -> dict[str, Any]:
    """`content` as the result of the reply's only tool call."""
    if name == "responses":
        call_id = reply["output"][-1]["call_id"]
        return {"type": "function_call_output", "call_id": call_id, "output": content}
    if name == "messages":
        call_id = reply["content"][-1]["id"]
        return user([{"type": "tool_result", "tool_use_id": call_id, "content": content}])
    call_id = echo(name, reply)[0]["tool_calls"][0]["id"]
    return {"role": "tool", "tool_call_id": call_id, "content": content}


@pytest.fixture
def tool_tokenizer(tiny_tokenizer: Any) -> Any:
    """A tokenizer whose template begins the prompt with the names of the tools."""
    names = "{% for t in tools or [] %}tool {{ t.function.name }}\n{% endfor %}"
    return with_template(tiny_tokenizer, names + tiny_tokenizer.chat_template)


# ---- the tree


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("later", ["no tools", "other tools", "other order"])
async def test_a_client_may_change_its_tools(
    start: Start, tool_tokenizer: Any, name: str, later: str
) -> None:
    """The turns are still one path of the tree, though the prompt is rendered anew."""
    harness = start(CALL, "21 degrees", "bye", tokenizer=tool_tokenizer)
    session, items = await harness.start(), [user()]
    first, second = offer(name), offer(name, "g")
    changed = {"no tools": [], "other tools": [second], "other order": [second, first]}[later]
    reply = await ask(harness, session, name, items, tools=[first, second])
    items += [*echo(name, reply), result(name, reply, "21")]
    reply = await ask(harness, session, name, items, tools=changed)
    items += [*echo(name, reply), user("thanks")]
    await ask(harness, session, name, items, tools=changed)
    await harness.post(f"/{session}/rl/set_reward", {"reward": 1.0})
    prompts = [request.input_ids for request in harness.engine.requests]
    assert prompts[2][: len(prompts[1])] == prompts[1]  # the same tools: the parent's tokens
    assert prompts[1][: len(prompts[0])] != prompts[0]
    rows = await harness.export(session, style="individual", discount=0.5)
    assert [row["parent"] for row in rows.values()] == [None, *list(rows)[:2]]
    assert [row["reward"] for row in rows.values()] == [0.25, 0.5, 1.0]
    assert all(sum(row["tensors"]["loss_mask"]) for row in rows.values())


CHANGES = [{}, {"tools": []}, {"chat_template_kwargs": {"a": 1}}, {"instructions": "Be wordy."}]


@pytest.mark.parametrize("change", CHANGES)
async def test_a_response_goes_on_from_the_one_it_names(
    start: Start, tool_tokenizer: Any, change: dict[str, Any]
) -> None:
    """The conversation of the named response comes before the new messages. If the instructions
    differ, the request begins another conversation."""
    harness = start("one", "two", tokenizer=tool_tokenizer)
    session = await harness.start()
    fields = {"instructions": "Be terse.", "tools": [offer("responses")]}
    first = await ask(harness, session, "responses", [user()], **fields)
    named = {"previous_response_id": first["id"]} | fields | change
    second = await ask(harness, session, "responses", [user("more")], **named)
    cache = harness.proxy.find(session).cache
    is_same = "instructions" not in change
    assert cache[second["id"]].parent is (cache[first["id"]] if is_same else None)
    before, after = (request.input_ids for request in harness.engine.requests)
    assert (after[: len(before)] == before) == (change in ({}, {"chat_template_kwargs": {"a": 1}}))
    talk = [{"role": "system", "content": named["instructions"]}, user()]
    talk += [{"role": "assistant", "content": "one"}, user("more")]
    assert tool_tokenizer.decode(after) == tool_tokenizer.apply_chat_template(
        talk,
        tools=[offer("chat/completions")] if named["tools"] else None,
        add_generation_prompt=True,
        tokenize=False,
    )


@pytest.mark.parametrize("name", NAMES)
async def test_an_echo_without_reasoning_is_spliced(start: Start, name: str) -> None:
    """Even so, the next prompt begins with the sampled tokens."""
    harness = start("<think>\nhm\n</think>\n\none", "two", "three")
    session, items = await harness.start(), [user()]
    for k in range(3):
        kept = echo(name, await ask(harness, session, name, items))
        kept = [item for item in kept if item.get("type") != "reasoning"]
        kept[0].pop("reasoning_content", None)
        if name == "messages":
            kept[0]["content"] = [part for part in kept[0]["content"] if part["type"] == "text"]
        items += [*kept, user(str(k))]
    prompts = [request.input_ids for request in harness.engine.requests]
    for before, after in itertools.pairwise(prompts):
        assert after[: len(before)] == before
    assert len(await harness.export(session, style="concat")) == 1


# ---- the end of an answer, and the context's length


@pytest.mark.parametrize("name", NAMES)
async def test_a_stop_string_ends_the_text(start: Start, name: str) -> None:
    """The next prompt, and so the export, has all sampled tokens."""
    harness = start("four. And five", "four")
    session, items = await harness.start(), [user()]
    reply = await ask(harness, session, name, items, stop=["x", "And"])
    assert '"four. "' in str(reply).replace("'", '"')
    await ask(harness, session, name, [*items, *echo(name, reply), user("more")])
    first, second = (request.input_ids for request in harness.engine.requests)
    tokens = harness.engine.tokenizer.encode("four. And five")
    assert second[: len(first) + len(tokens)] == first + tokens
    (row,) = (await harness.export(session, style="concat")).values()
    assert sum(row["tensors"]["loss_mask"]) == len(tokens) + 1 + len("four") + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", NAMES)
async def test_a_full_context_is_said_in_each_vendors_way(
    start: Start, real_engine: RemoteInfEngine, name: str, stream: bool
) -> None:
    """For this, OpenAI has an error code, and Anthropic a fixed beginning of the message."""
    harness = start(engine=real_engine)
    session = await harness.start()
    body = body_of(name, [user("x" * 3000)], stream=stream)
    answer = await harness.post(f"/{session}/v1/{name}", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith("prompt is too long: 3")
    assert error["message"].endswith(" tokens > 2048 maximum context length")
    assert error["code"] == "context_length_exceeded"
    assert not harness.proxy.find(session).cache
