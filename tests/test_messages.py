"""Messages are equal when they mean the same, and what a caller asks for is honoured or refused by name."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import ModelResponse
from messages import BadRequest, canonical, parse_chat

PAIRS = [json.loads(line) for line in (Path(__file__).parent / "data/chat_pairs.jsonl").read_text().splitlines()]
HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair["id"])
def test_an_echoed_history_is_recognised(pair: dict[str, Any]) -> None:
    """Real clients re-serialise, drop and add keys; what they send back still begins with what was said."""
    said = [canonical(message) for message in [*pair["parent"], pair["reply"]]]
    assert [canonical(message) for message in pair["child"]][: len(said)] == said


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair["id"])
def test_a_changed_reply_is_not_recognised(pair: dict[str, Any]) -> None:
    """Another text, call name, call id or argument is another message."""
    reply = pair["reply"]
    mutants = [reply | {"content": (reply.get("content") or "") + "!"}, reply | {"role": "user"}]
    for i in range(len(reply.get("tool_calls") or ())):
        for change in ({"name": "other"}, {"arguments": '{"days": 3, "city": "Zürich"}'}):
            mutant = copy.deepcopy(reply)
            mutant["tool_calls"][i]["function"] |= change
            mutants.append(mutant)
        mutant = copy.deepcopy(reply)
        mutant["tool_calls"][i]["id"] = "call_other"
        mutants += [mutant, reply | {"tool_calls": reply["tool_calls"][:i]}]
    assert canonical(reply) not in [canonical(mutant) for mutant in mutants]


@given(st.text(), st.lists(st.text(), max_size=3))
def test_null_empty_absent_and_parts_are_one_text(text: str, parts: list[str]) -> None:
    """content null == "" == absent, and text parts == their concatenation."""
    assert (
        canonical({"role": "user", "content": None})
        == canonical({"role": "user", "content": ""})
        == canonical({"role": "user"})
    )
    as_parts = [{"type": "text", "text": part, "cache_control": {"type": "ephemeral"}} for part in parts]
    assert canonical({"role": "user", "content": as_parts}) == canonical({"role": "user", "content": "".join(parts)})
    assert canonical({"role": "user", "content": text, "name": "a"}) == canonical({"role": "user", "content": text})


def test_a_tools_result_is_the_result_of_its_call() -> None:
    """The same text for another call is another message; one client calls the call's id just `id`."""
    result = {"role": "tool", "content": "2", "tool_call_id": "a"}
    assert canonical(result) == canonical({"role": "tool", "content": "2", "id": "a", "name": "f"})
    assert canonical(result) != canonical(result | {"tool_call_id": "b"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream", True),
        ("n", 2),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("logprobs", True),
        ("logit_bias", {"5": 1}),
        ("presence_penalty", 0.5),
        ("chat_template", "{{ messages }}"),
        ("stop_token_ids", [5]),
        ("reasoning_effort", "high"),
        ("guided_json", {}),
        ("guided_choice", ["a"]),
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 0.5),
        ("top_k", 2**63),
        ("top_k", 2**31),
        ("temperature", 10**400),
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("max_completion_tokens", 2**63),
        ("max_completion_tokens", "many"),
        ("frequency_penalty", 3),
        ("seed", 1.5),
        ("stop", [""]),
        ("stop", {"a": 1}),
        ("chat_template_kwargs", [1]),
        ("messages", []),
        ("messages", None),
        ("messages", "hello"),
        ("messages", ["hello"]),
        ("messages", [{"content": "hello"}]),
        ("messages", [{"role": "robot", "content": "hello"}]),
        ("messages", [{"role": ["user"], "content": "hello"}]),
        ("messages", [{"role": "user", "content": 3}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]),
        ("messages", [{"role": "assistant", "tool_calls": "f()"}]),
        ("messages", [{"role": "assistant", "tool_calls": [{"id": ["c"], "function": {"name": "f"}}]}]),
        ("messages", [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": None}}]}]),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(name: str, value: Any) -> None:
    """A parameter that would change the answer is never dropped in silence: the refusal names the field."""
    with pytest.raises(BadRequest, match=f"^{name}"):
        parse_chat({"messages": HELLO, name: value})


def test_neutral_values_and_unknown_keys_are_accepted() -> None:
    """Frameworks send the defaults of what they do not use, and keys that mean nothing here."""
    body: dict[str, Any] = {
        "stream": False,
        "n": 1,
        "tools": None,
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "logprobs": None,
        "presence_penalty": 0.0,
        "user": "me",
        "metadata": {},
        "stream_options": None,
        "parallel_tool_calls": True,
        "stop_token_ids": [],
        "reasoning_effort": None,
    }
    assert parse_chat({"messages": HELLO, **body}).sampling == {}


def test_sampling_parameters_are_translated() -> None:
    """Only what the agent set is set; max_tokens is the older name of max_completion_tokens."""
    body = {"messages": HELLO, "temperature": 0, "top_p": 0.9, "max_tokens": 5, "stop": "\n", "seed": 7}
    asked = {"temperature": 0.0, "top_p": 0.9, "max_new_tokens": 5, "stop": ["\n"], "seed": 7}
    assert parse_chat(body).sampling == asked
    assert parse_chat(body | {"max_completion_tokens": 5}).sampling == asked
    with pytest.raises(BadRequest, match="max_tokens"):
        parse_chat(body | {"max_completion_tokens": 6})


def test_a_template_reads_plain_messages() -> None:
    """Parts become text, developer becomes system, arguments become objects, a tool's `id` its tool_call_id."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    raw = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "terse"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "id": "c1", "content": "2"},
    ]
    arguments = call | {"function": {"name": "f", "arguments": {"a": 1}}}
    assert parse_chat({"messages": raw}).messages == [
        {"role": "system", "content": "be terse"},
        {"role": "assistant", "content": "", "tool_calls": [arguments]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]


def test_arguments_that_are_no_json_stay_text() -> None:
    """A model may write broken JSON, however deep; the history that quotes it is still recognised."""
    for arguments in ('{"a": ', "[" * 100_000):
        message = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}]}
        assert canonical(message) == canonical(copy.deepcopy(message))
        assert parse_chat({"messages": [message]}).messages[0]["tool_calls"][0]["function"]["arguments"] == arguments


def test_what_is_nested_too_deeply_is_refused_by_name() -> None:
    """The body's parser takes a thousand levels, more than can be written down again: the caller is told."""
    deep: Any = {}
    for _ in range(1000):
        deep = {"a": deep}
    call = {"id": "c", "function": {"name": "f", "arguments": deep}}
    asked = parse_chat({"messages": [{"role": "assistant", "tool_calls": [call]}], "chat_template_kwargs": deep})
    with pytest.raises(BadRequest, match=r"^messages\.tool_calls"):
        canonical(asked.messages[0])
    with pytest.raises(BadRequest, match=r"^chat_template_kwargs"):
        _ = asked.template_key
    with pytest.raises(BadRequest, match=r"^top_k"):
        parse_chat({"messages": HELLO, "top_k": deep})


@pytest.mark.parametrize(("stop_reason", "finish"), [("stop", "stop"), ("length", "length"), ("abort", "length")])
def test_a_reply_has_all_that_strict_clients_read(stop_reason: str, finish: str) -> None:
    """id, model, object, index and usage are there, and no key is null (Vercel's client rejects nulls)."""
    response = ModelResponse([1, 2], [3], [-0.5], [0], stop_reason)
    reply = render_chat(parse_chat({"messages": HELLO, "model": "m"}), "chatcmpl-1", "hi", response)
    assert reply.pop("created") > 0
    assert reply == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": finish}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3},
    }
