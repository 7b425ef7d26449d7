"""No body leads to a server error, in any protocol, because an SDK would send the body again."""

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from harness import ADMIN, HELLO, Harness, tool
from hypothesis import given, settings
from hypothesis import strategies as st

PATHS = ["chat/completions", "responses", "messages"]
MANAGEMENT = ["/grant_capacity", "/rl/start_session", "/export_trajectories", "/rl/set_reward"]
TOOL = tool("f") | {"name": "f", "input_schema": {}}
GOOD: dict[str, Any] = {"messages": HELLO, "input": "hello", "max_tokens": 5, "tools": [TOOL]}

STREAMS = st.sampled_from([{}, {"stream": True}])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
WORDS = """user assistant tool system text function function_call function_call_output tool_use
tool_result thinking item_reference message reasoning required json_schema f continue"""
KEYS = """role content type text id call_id tool_calls function name arguments output input tool_use_id
tool_call_id thinking summary schema parameters previous_message_id format"""
FIELDS = """messages input model stream stream_options n tools tool_choice response_format text
temperature top_p top_k max_tokens stop stop_sequences stop_token_ids seed store system instructions
previous_response_id thread logprobs include reasoning chat_template_kwargs thinking output_config
frequency_penalty presence_penalty logit_bias metadata user"""
words, keys, fields = (st.sampled_from(names.split()) for names in (WORDS, KEYS, FIELDS))
values: Any = st.recursive(
    scalars | words,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(keys | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=20,
)
bodies = st.builds(
    lambda stream, body: GOOD | stream | body, STREAMS, st.dictionaries(fields, values, max_size=6)
)
messages = st.lists(st.dictionaries(keys, values, max_size=5), max_size=4)
conversations = st.builds(
    lambda stream, talk: GOOD | stream | {"messages": talk, "input": talk}, STREAMS, messages
)


def as_json(body: Any) -> bytes:
    """JSON of a body, whose keys need not be strings."""
    return orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)


def representable(body: Any) -> bool:
    try:
        return bool(as_json(body))
    except (TypeError, ValueError):
        return False


@st.composite
def broken(draw: Callable[..., Any]) -> bytes:
    """JSON that is whole, cut, damaged or in another encoding; or random bytes."""
    raw = as_json(draw((bodies | conversations).filter(representable)))
    kind = draw(st.integers(0, 4))
    if kind == 0:
        return raw[: draw(st.integers(0, len(raw)))]
    if kind == 1:
        at = draw(st.integers(0, len(raw) - 1))
        return raw[:at] + draw(st.binary(min_size=1, max_size=3)) + raw[at + 1 :]
    if kind == 2:
        return raw.decode().encode(draw(st.sampled_from(["utf-16", "utf-32", "utf-8-sig"])))
    return draw(st.binary(max_size=40)) if kind == 3 else raw


raws = st.one_of((bodies | conversations).filter(representable).map(as_json), broken())


async def ask(tokenizer: Any, path: str, raw: bytes) -> int:
    """The status of the reply to this body. Afterwards the session must answer a valid request."""
    harness = Harness(tokenizer)
    async with harness.http:
        session = await harness.start()
        answer = await harness.http.post(f"/{session}/v1/{path}", content=raw)
        cache = harness.proxy.find(session).cache
        assert all(interaction.complete for interaction in cache.values())
        await harness.chat(session, HELLO)
        await harness.export(session)
        assert len(harness.proxy.sessions) == 0
    if answer.status_code != 200:
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["error"]["message"]
    return answer.status_code


@settings(max_examples=80)
@given(st.sampled_from(PATHS), raws)
def test_no_body_is_a_server_error(tiny_tokenizer: Any, path: str, raw: bytes) -> None:
    """The status of the reply to any body is 200 or 4xx."""
    status = asyncio.run(ask(tiny_tokenizer, path, raw))
    assert status == 200 or (400 <= status < 500 and status not in (408, 409, 429)), raw


def nested(depth: int, wrap: str) -> bytes:
    """JSON with this many levels of lists or objects."""
    inner = (b"[" if wrap == "list" else b'{"a":') * depth
    return inner + b"1" + (b"]" if wrap == "list" else b"}") * depth


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wrap", ["list", "object"])
@pytest.mark.parametrize("depth", [150, 190, 220, 900, 100_000])
@pytest.mark.parametrize("field", ["tools", "metadata", "chat_template_kwargs", "content"])
def test_depth_is_safe(tiny_tokenizer: Any, path: str, wrap: str, depth: int, field: str) -> None:
    """A deeply nested body is served or refused, and from 900 levels on it is always refused."""
    tool = b'[{"type":"function","function":{"name":"f","parameters":{"p":%s}}}]'
    value = {"tools": tool, "chat_template_kwargs": b'{"a":%s}'}.get(field, b"%s")
    plain = b'{"messages":[{"role":"user","content":"x"}],"input":"x","%s":%s}'
    raw = plain % (field.encode(), value.replace(b"%s", nested(depth, wrap)))
    wanted = (400,) if depth >= 900 else (200, 400)  # no client could read it again
    assert asyncio.run(ask(tiny_tokenizer, path, raw)) in wanted


@pytest.mark.parametrize("path", PATHS)
def test_ten_thousand_messages(tiny_tokenizer: Any, path: str) -> None:
    """A long history is read, too."""
    talk = [{"role": ("user", "assistant")[k % 2], "content": str(k)} for k in range(10_001)]
    body = {"messages": talk, "input": talk, "max_tokens": 5}
    assert asyncio.run(ask(tiny_tokenizer, path, as_json(body))) == 200


@settings(max_examples=40)
@given(st.sampled_from(MANAGEMENT), raws)
def test_management_takes_any_body(tiny_tokenizer: Any, path: str, raw: bytes) -> None:
    """The trainer's mistakes get a 4xx, too."""

    async def call() -> int:
        harness = Harness(tiny_tokenizer)
        async with harness.http:
            session = await harness.start()
            of_session = path == "/rl/set_reward"
            where = f"/{session}{path}" if of_session else path
            answer = await harness.http.post(where, content=raw, headers=ADMIN)
            return answer.status_code

    status = asyncio.run(call())
    assert status in (200, 400, 404) or (path == "/rl/start_session" and status == 429)
