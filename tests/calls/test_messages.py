"""Messages with the same meaning have the same canonical form."""

import copy
import json
from typing import Any

import pytest
from conftest import ROOT
from harness import HELLO, said, tool
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import Interaction, InteractionCache
from calls import messages
from calls.messages import (
    AgentRequest,
    Message,
    Refusal,
    normalise,
    parse_anthropic,
    parse_chat,
    parse_responses,
)
from calls.replies import PROTOCOLS, Answer
from inference.io_struct import CallParameters, ModelResponse

# Two requests of a real client, and the reply to the first.
LINES = (ROOT / "tests/data/client_pairs.jsonl").read_text().splitlines()
PAIRS = [json.loads(line) for line in LINES]
TOOL = tool("f")
PARSERS = [parse_chat, parse_responses, parse_anthropic]


def canonical(message: Message) -> bytes:
    """What the tree compares of a message that may not be in normal form."""
    return messages.canonical(normalise(message))


def body_of(parse: Any, **fields: Any) -> dict[str, Any]:
    """Return a minimal valid request body for the protocol of `parse`, with `fields` added."""
    return {"input" if parse is parse_responses else "messages": HELLO} | fields


def read_reply(path: str, reply: Any) -> list[Message]:
    """A reply as a client sends it back, in normal form."""
    if path == "chat/completions":
        return [normalise(reply)]
    if path == "responses":
        return parse_responses({"input": reply}).messages
    echo = {"role": "assistant", "content": reply}
    return parse_anthropic({"messages": [echo, *HELLO]}).messages[:-1]


def read(pair: dict[str, Any]) -> tuple[list[Message], list[Message], list[Message]]:
    """The first request, its reply, and the second request, in normal form."""
    parse, reply = PROTOCOLS[pair["path"]].parse, read_reply(pair["path"], pair["reply"])
    return parse(pair["parent"]).messages, reply, parse(pair["child"]).messages


def begins_with(messages: list[Message], said: list[Message]) -> bool:
    """Return whether `messages` begins with the messages in `said`, compared by their canonical
    forms."""
    return list(map(canonical, messages[: len(said)])) == list(map(canonical, said))


# Equality


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair["id"])
def test_an_echoed_history_is_recognised(pair: dict[str, Any]) -> None:
    """Real clients change whitespace and JSON keys in the conversation history that they send
    back."""
    parent, output, child = read(pair)
    assert len(output) == 1  # a reply is one message, even if it has several items or blocks
    assert begins_with(child, parent + output)


def test_every_turn_finds_its_parent_among_all_conversations() -> None:
    """The recorded requests are put in one session."""
    cache = InteractionCache()
    children: dict[str, Interaction] = {}
    for k, line in zip(map(str, range(len(LINES))), LINES):
        name = json.loads(line)["id"].rpartition("#")[0]
        line = line.replace("Zürich", f"Zürich {name}").replace('"hi"', f'"hi {name}"')
        parent, output, child = read(json.loads(line))
        response = ModelResponse([1], [2], [-1.0], [0], "stop")
        finished = Interaction(parent, model_response=response, output_message_list=output)
        cache.enter(k, finished)
        children[k] = Interaction(child)
    for k, call in children.items():
        assert cache.enter(f"child of {k}", call).parent is cache[k]


SAID = {"text", "content", "name", "arguments", "input", "id", "call_id", "tool_calls"}


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The path to each text, name, id and argument in a part of a request: keys and indices."""
    if isinstance(value, list):
        return [place for i, item in enumerate(value) for place in places(item, (*path, i))]
    if not isinstance(value, dict) or value.get("type") in ("thinking", "reasoning"):
        return []
    if "call_id" in value or value.get("type") == "message":  # the tree ignores an item's id
        value = {key: item for key, item in value.items() if key != "id"}
    found = [(*path, key) for key in value if key in SAID and isinstance(value[key], str)]
    found += [(*path, "input", key) for key in value.get("input", ())]
    inner = {"content", "tool_calls", "function"} & value.keys()
    return found + [place for key in inner for place in places(value[key], (*path, key))]


def echoed(pair: dict[str, Any]) -> tuple[list, int, int]:
    """Return the items of the second request, and where those begin and end that repeat the first
    reply."""
    key = "input" if pair["path"] == "responses" else "messages"
    items, begin = pair["child"][key], len(pair["parent"][key])
    others = [item.get("role", "assistant") != "assistant" or "output" in item for item in items]
    return items, begin, others.index(True, begin + 1)


PLACES = [
    (pair, place)
    for pair in PAIRS
    for items, begin, end in [echoed(pair)]
    for place in [None, *[(i, *place) for i in range(begin, end) for place in places(items[i])]]
]


@settings(deadline=None)
@given(st.sampled_from(PLACES), st.text(min_size=1), st.integers(0, 30))
def test_a_changed_turn_is_not_recognised(mutant: tuple, extra: str, at: int) -> None:
    """A history with a changed text, name, call id or argument is a different conversation."""
    original, place = mutant
    pair = copy.deepcopy(original)
    items, begin, end = echoed(pair)
    if place is None:
        del items[begin:end]
    else:
        holder: Any = items
        for step in place[:-1]:
            holder = holder[step]
        old = holder[place[-1]]
        if place[-1] == "arguments":
            arguments = json.loads(old)
            name = sorted(arguments)[at % len(arguments)]
            holder[place[-1]] = json.dumps(arguments | {name: f"{arguments[name]}{extra}"})
        else:
            holder[place[-1]] = str(old)[:at] + extra + str(old)[at:]
    parent, output, _ = read(original)
    assert not begins_with(PROTOCOLS[pair["path"]].parse(pair["child"]).messages, parent + output)


@settings(deadline=None)
@given(st.text(), st.lists(st.text(), max_size=3))
def test_null_empty_absent_and_parts_are_one_text(text: str, parts: list[str]) -> None:
    """A name and the marks of a cache count for nothing."""
    empty: list[Any] = [
        {"role": "user", "content": None},
        {"role": "user", "content": ""},
        {"role": "user"},
    ]
    assert len({*map(canonical, empty)}) == 1
    mark = {"type": "text", "cache_control": {"type": "ephemeral"}}
    split = {"role": "user", "content": [mark | {"text": part} for part in parts]}
    assert canonical(split) == canonical({"role": "user", "content": "".join(parts)})
    plain = {"role": "user", "content": text}
    assert canonical(plain | {"name": "a"}) == canonical(plain)


def test_a_tools_result_is_the_result_of_its_call() -> None:
    """Tool results with the same text but different call ids count as different messages."""
    result = {"role": "tool", "content": "2", "tool_call_id": "a"}
    assert canonical(result) == canonical({"role": "tool", "content": "2", "id": "a", "name": "f"})
    assert canonical(result) != canonical(result | {"tool_call_id": "b"})
    assert normalise({"role": "tool", "content": "2", "id": "a"}) == result


def assistant(arguments: Any, call_id: str = "c") -> Message:
    """Return an assistant message with one call of the tool f."""
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


@pytest.mark.parametrize(
    "written", ['{"a": 2.0, "b": [1e3]}', '{"b":[1000],"a":2}', {"a": 2.0, "b": [1000]}]
)
def test_arguments_are_equal_as_javascript_has_them(written: Any) -> None:
    """The numbers 2.0 and 2 in arguments count as equal, because JavaScript writes 2 for both."""
    assert canonical(normalise(assistant(written))) == canonical(assistant('{"a": 2, "b": [1000]}'))
    assert canonical(assistant('{"a": true}')) != canonical(assistant('{"a": 1}'))
    assert canonical(assistant('{"a": "2"}')) != canonical(assistant('{"a": 2}'))
    large = '{"a": 9007199254740993}'
    assert normalise(assistant(large))["tool_calls"][0]["function"]["arguments"] == {"a": 2**53 + 1}


def test_plain_is_plain() -> None:
    """If a message is already in normal form, normalise returns an identical message."""
    for pair in PAIRS:
        for message in [part for talk in read(pair) for part in talk]:
            again = normalise(message)
            assert again == message
            assert canonical(again) == canonical(message)


# The three protocols

QUESTION = {"role": "user", "content": "How warm?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TALK: list[Message] = [
    {"role": "system", "content": "Be terse."},
    QUESTION,
    {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [CALL, CALL | {"id": "call_2"}],
        "reasoning_content": "hm",
    },
    {"role": "tool", "content": "21", "tool_call_id": "call_1"},
    {"role": "tool", "content": "22", "tool_call_id": "call_2"},
    {"role": "user", "content": "And then?"},
]


def test_three_protocols_say_one_conversation() -> None:
    """One conversation, written in each of the three protocols, becomes the same list of messages
    in normal form."""
    text = {"type": "text", "text": "Be terse."}
    called = CALL | {"function": {"name": "f", "arguments": '{"a": 1}'}}
    calls = [called, called | {"id": "call_2"}]
    chat = [
        {"role": "developer", "content": [text]},
        QUESTION,
        TALK[2] | {"tool_calls": calls},
        *TALK[3:],
    ]
    items = [
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "How warm?"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
        },
        {
            "type": "function_call",
            "call_id": "call_1",
            "name": "f",
            "arguments": '{"a":1}',
            "status": "completed",
        },
        {"type": "function_call", "call_id": "call_2", "name": "f", "arguments": '{ "a": 1 }'},
        {"type": "function_call_output", "call_id": "call_1", "output": "21"},
        {
            "type": "function_call_output",
            "call_id": "call_2",
            "output": [{"type": "input_text", "text": "22"}],
        },
        {"role": "user", "content": "And then?"},
    ]
    uses = [{"type": "tool_use", "id": f"call_{k}", "name": "f", "input": {"a": 1}} for k in (1, 2)]
    results = [
        {"type": "tool_result", "tool_use_id": "call_1", "content": "21", "is_error": False},
        {
            "type": "tool_result",
            "tool_use_id": "call_2",
            "content": [{"type": "text", "text": "22"}],
        },
    ]
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    marked = {"type": "text", "text": "And then?", "cache_control": {"type": "ephemeral"}}
    blocks = [
        {"role": "user", "content": "How warm?"},
        {
            "role": "assistant",
            "content": [thinking, {"type": "text", "text": "Let me see."}, *uses],
        },
        {"role": "user", "content": [*results, marked]},
    ]
    assert parse_chat({"messages": chat}).messages == TALK
    assert parse_responses({"input": items, "instructions": "Be terse."}).messages == TALK
    assert parse_anthropic({"messages": blocks, "system": [text]}).messages == TALK


def test_two_replies_in_a_row_stay_two() -> None:
    """In the Responses protocol; and a text may stand for a list."""
    twice = [said("a"), said("b")]
    assert parse_responses({"input": [*twice, *HELLO]}).messages == [*twice, *HELLO]
    assert parse_responses({"input": "hello"}).messages == HELLO
    assert parse_anthropic({"messages": HELLO, "system": None}).messages == HELLO


def test_blocks_beside_a_tools_result_are_kept() -> None:
    """Each result is a message, and what is next to it another."""
    result = {"type": "tool_result", "tool_use_id": "c", "content": "21"}
    text, image = {"type": "text", "text": "So?"}, {"type": "image", "source": {}}
    read = parse_anthropic({"messages": [{"role": "user", "content": [result, text, image]}]})
    tool = {"role": "tool", "content": "21", "tool_call_id": "c"}
    assert read.messages == [tool, {"role": "user", "content": f"So?{messages.PLACEHOLDER}"}]
    assert parse_anthropic({"messages": [{"role": "user", "content": [result]}]}).messages == [tool]


def test_tools_are_one_form() -> None:
    """In all three protocols; other types are ignored."""
    flat = {"name": "f", "description": "", "parameters": {"type": "object"}, "strict": True}
    search = {"type": "web_search_20250305", "name": "w"}
    other = [{"type": "web_search"}, {"type": "namespace", "tools": []}, search]
    other += [{"type": "custom", "custom": {"name": "x"}}]
    claude = {"name": "f", "input_schema": {"type": "object"}}
    forms = {parse_chat: TOOL, parse_responses: {"type": "function"} | flat}
    for parse in PARSERS:
        offered = [forms.get(parse, claude), *other]
        assert parse(body_of(parse, tools=offered)).tools == [TOOL]
    assert parse_anthropic(body_of(parse_anthropic, tools=[claude | {"type": "custom"}])).tools
    bare = {"type": "function", "function": {"name": "g"}}
    (read,) = parse_chat(body_of(parse_chat, tools=[bare])).tools
    assert read["function"]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("parse", "choice", "meaning"),
    [
        *[(parse, None, "auto") for parse in PARSERS],
        *[(parse, word, word) for parse in PARSERS for word in ("auto", "none", "required")],
        (parse_chat, {"type": "function", "function": {"name": "f"}}, "f"),
        (parse_responses, {"type": "function", "name": "f"}, "f"),
        (parse_anthropic, {"type": "tool", "name": "f", "disable_parallel_tool_use": True}, "f"),
        (parse_anthropic, {"type": "any"}, "required"),
        (parse_anthropic, {"type": "auto"}, "auto"),
        (parse_anthropic, {"type": "none"}, "none"),
    ],
)
def test_tool_choice_is_one_word(parse: Any, choice: Any, meaning: str) -> None:
    """tool_choice becomes auto, none, required or a tool's name."""
    flat = {"name": "f"} if parse is parse_anthropic else {"name": "f", "type": "function"}
    tools = [TOOL] if parse is parse_chat else [flat | {"input_schema": {}}]
    ask = parse(body_of(parse, tools=tools, tool_choice=choice))
    assert ask.tool_choice == meaning
    assert ask.callable_tools == ([] if meaning == "none" else ask.tools)
    wrong: list[Any] = [
        "g",
        {"type": "function", "function": {"name": "g"}},
        {"type": "web_search"},
    ]
    wrong += [{"type": "allowed_tools", "mode": "auto", "tools": []}, {"type": []}, [], 3]
    for other in wrong:
        with pytest.raises(Refusal, match=r"^tool_choice"):
            parse(body_of(parse, tools=tools, tool_choice=other))
    with pytest.raises(Refusal, match=r"^tool_choice"):
        parse(body_of(parse, tool_choice="required"))


SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
WRAPPED = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
FLAT = {"type": "json_schema", "name": "s", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("parse", "fields", "schema"),
    [
        (parse_chat, {"response_format": {"type": "text"}}, None),
        (parse_chat, {"response_format": {"type": "json_object"}}, {"type": "object"}),
        (parse_chat, {"response_format": WRAPPED}, SCHEMA),
        (parse_responses, {"text": {"verbosity": "low"}}, None),
        (parse_responses, {"text": {"format": {"type": "json_object"}}}, {"type": "object"}),
        (parse_responses, {"text": {"format": FLAT}}, SCHEMA),
        (parse_anthropic, {"output_config": {"format": FLAT}}, SCHEMA),
        (parse_anthropic, {"output_format": FLAT}, SCHEMA),
    ],
)
def test_structured_output_is_one_schema(parse: Any, fields: dict[str, Any], schema: Any) -> None:
    """In each protocol, the parser converts a request for structured output to one JSON schema."""
    sampling = parse(body_of(parse, **fields)).sampling
    assert sampling == (
        {} if schema is None else {"json_schema": json.dumps(schema, separators=(",", ":"))}
    )


# Sampling parameters, and parameters that the parser refuses


WRONG: dict[Any, dict[str, list[Any]]] = {
    parse_chat: {
        "n": [0, 2, 1.5],
        "stream": ["yes"],
        "tools": [{"f": 1}, ["f"], [{"type": "function"}], [{"function": {"name": 3}}]],
        "tool_choice": ["f"],
        "response_format": ["json", {"type": "grammar"}, {"type": "json_schema"}],
        "logprobs": [True],
        "top_logprobs": [5],
        "logit_bias": [{"5": 1}],
        "presence_penalty": [2.5],
        "frequency_penalty": [3],
        "chat_template": ["{{ messages }}"],
        "stop_token_ids": [["a"]],
        "guided_choice": [["a"]],
        "functions": [[{"name": "f"}]],
        "min_p": [0.1],
        "background": [True],
        "temperature": [-1, "hot", True, 10**400, float("nan")],
        "top_p": [0, 1.5],
        "top_k": [0.5, 2**63, 2**31],
        "max_tokens": [0, 2**31],
        "max_completion_tokens": [2**63, "many"],
        "seed": [1.5],
        "stop": [[""], {"a": 1}],
        "chat_template_kwargs": [[1]],
        "stream_options": [3],
        "messages": [
            *([], None, "hello", [3]),
            [{"content": "hello"}],
            [{"role": "robot", "content": "hello"}],
            [{"role": ["user"], "content": "hello"}],
            [{"role": "user", "content": 3}],
            [{"role": "user", "content": [{"type": "text", "text": 3}]}],
            [{"role": "user", "content": [{"type": "hologram", "url": "data:"}]}],
            [{"role": "assistant", "tool_calls": "f()"}],
            [{"role": "assistant", "tool_calls": [{"id": ["c"], "function": {"name": "f"}}]}],
            [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": None}}]}],
            [{"role": "assistant", "reasoning_content": 3}],
        ],
    },
    parse_responses: {
        "n": [2],
        "stream": ["yes"],
        "tool_choice": ["f"],
        "max_output_tokens": [0],
        "include": [["message.output_text.logprobs"]],
        "input": [
            *([], None, 3, [3], [{"type": "message"}], [{"type": "x"}]),
            [{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"}],
            [{"type": "function_call", "call_id": "c", "arguments": "{}"}],
        ],
        "previous_response_id": [3],
        "conversation": ["conv_1"],
        "background": [True],
        "prompt": [{"id": "p"}],
    },
    parse_anthropic: {
        "n": [2],
        "stream": ["yes"],
        "tool_choice": ["f"],
        "stop_sequences": [[3]],
        "thread": [{"type": "continue"}, {"type": "fork"}, "t"],
        "mcp_servers": [[{"url": "x"}]],
        "container": ["c"],
        "system": [3],
        "messages": [
            *([], None, "hello", [3]),
            [{"role": "user", "content": [{"type": "hologram", "source": {}}]}],
            [{"role": "user", "content": [3]}],
            [*HELLO, {"role": "assistant", "content": "The answer is ("}],
        ],
    },
}
REFUSED = [
    (parse, name, value)
    for parse, fields in WRONG.items()
    for name, values in fields.items()
    for value in values
]


@pytest.mark.parametrize(("parse", "name", "value"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(parse: Any, name: str, value: Any) -> None:
    """The proxy refuses an unsupported parameter that would change the answer, and the refusal
    names the field."""
    with pytest.raises(Refusal, match=f"^{name}"):
        parse(body_of(parse, **{name: value}))


NAMES = """messages input role content type text tool_calls function name id arguments tools tool_choice thread stop n
response_format output_config format reasoning effort include instructions system previous_response_id"""
FIELDS = st.sampled_from(NAMES.split()) | st.text(max_size=3)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.sampled_from(PARSERS), st.dictionaries(FIELDS, JUNK, max_size=6), JUNK)
def test_nothing_but_a_bad_request_is_raised(parse: Any, body: dict[str, Any], item: Any) -> None:
    """For any body, the parser either returns messages in normal form or raises Refusal."""
    for one in (body, body_of(parse) | body, {"messages": [item], "input": [item]}):
        try:
            ask = parse(one)
        except Refusal:
            continue
        assert all(isinstance(message["content"], str) for message in ask.messages)
        assert ask.template_key
        assert {canonical(message) for message in ask.messages}


def test_neutral_values_and_unknown_keys_are_accepted() -> None:
    """Frameworks send unknown keys, and the default values of unsupported parameters."""
    body: dict[str, Any] = {"stream": False, "n": 1, "tools": None, "tool_choice": "auto"}
    body |= {"response_format": {"type": "text"}, "logprobs": False, "top_logprobs": None}
    body |= {"user": "me", "metadata": {}, "stream_options": None, "parallel_tool_calls": True}
    body |= {"stop_token_ids": [], "reasoning_effort": None, "thinking": {"type": "adaptive"}}
    body |= {"context_management": {"edits": []}, "cache_control": {"type": "ephemeral"}}
    body |= {"include": ["reasoning.encrypted_content"], "truncation": "disabled"}
    for parse in PARSERS:
        assert parse(body_of(parse, **body, thread={"type": "create"})) == AgentRequest(HELLO)


def test_sampling_parameters_are_translated() -> None:
    """A parsed request contains only the sampling parameters that the agent set."""
    body = {
        "temperature": 0,
        "top_p": 0.9,
        "stop": "\n",
        "seed": 7,
        "frequency_penalty": 1,
        "stop_token_ids": [5],
    }
    asked = {"temperature": 0.0, "top_p": 0.9, "stop": ["\n"], "seed": 7, "frequency_penalty": 1.0}
    asked |= {"max_new_tokens": 5, "stop_token_ids": [5]}
    for parse in PARSERS:
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            assert parse(body_of(parse, **body, **{name: 5})).sampling == asked
    assert parse_anthropic(body_of(parse_anthropic, stop_sequences=["a", "b"])).sampling == {
        "stop": ["a", "b"]
    }
    assert set(asked) <= set(CallParameters.model_fields)
    with pytest.raises(Refusal, match="max_new_tokens"):
        parse_chat(body_of(parse_chat, max_tokens=5, max_completion_tokens=6))


def test_how_the_answer_is_wanted() -> None:
    """As a stream, and with variables of the chat template, which are a part of the prompt."""
    ask = parse_chat(body_of(parse_chat, stream=True, stream_options={"include_usage": True}))
    assert (ask.stream, ask.stream_usage, ask.sampling) == (True, True, {})
    for fields in (
        {"reasoning_effort": "high"},
        {"reasoning": {"effort": "high"}},
        {"output_config": {"effort": "high"}},
    ):
        for parse in PARSERS:
            asked = parse(body_of(parse, **fields))
            assert asked.template_kwargs == {"reasoning_effort": "high"}
            assert asked.template_key != parse(body_of(parse)).template_key
    kwargs = parse_chat(body_of(parse_chat, chat_template_kwargs={"enable_thinking": False}))
    tools = parse_chat(body_of(parse_chat, tools=[TOOL]))
    plain = parse_chat(body_of(parse_chat))
    assert len({ask.template_key for ask in (kwargs, tools, plain)}) == 3


# Broken and deeply nested JSON


NO_JSON = ['{"a": ', "[" * 100_000, '{"a": NaN}', '{"a": 1e999}', "[" * 250 + "]" * 250]
NO_JSON += ['{"a": "\\ud800"}']


@pytest.mark.parametrize("text", NO_JSON)
def test_arguments_that_are_no_json_stay_text(text: str) -> None:
    """As a model may write them, and what no client could read again."""
    message = assistant(text)
    assert normalise(message)["tool_calls"][0]["function"]["arguments"] == text
    assert canonical(message) == canonical(copy.deepcopy(message))


def test_what_is_nested_too_deeply_is_refused_by_name() -> None:
    """The parser refuses a value that is nested too deeply to be written as JSON, and the refusal
    names the field."""
    deep: Any = {}
    for _ in range(1000):
        deep = {"a": deep}
    with pytest.raises(Refusal, match=r"^messages\[0\]\.tool_calls"):
        parse_chat({"messages": [assistant(deep)]})
    with pytest.raises(Refusal, match=r"^chat_template_kwargs"):
        _ = parse_chat(body_of(parse_chat, chat_template_kwargs=deep)).template_key
    with pytest.raises(Refusal, match=r"^tools"):
        _ = parse_chat(
            body_of(parse_chat, tools=[TOOL | {"function": {"name": "f", "parameters": deep}}])
        ).template_key
    with pytest.raises(Refusal, match=r"^top_k"):
        parse_chat(body_of(parse_chat, top_k=deep))


# References


def finished(name: str, asked: list[Message], message: Message) -> Interaction:
    """A finished interaction in the protocol `name`, whose ids end with "ab"."""
    found = Interaction(asked, tools=[TOOL], output_message_list=[message])
    answer = Answer(ModelResponse([1], [2], [-1.0], [0], "stop"), message)
    found.reply = PROTOCOLS[name](AgentRequest(asked), "ab", 1).render(answer)
    return found


F = ("f", {"a": 1})
SEEN = said("Let me see.", F, F, reasoning="hm", suffix="ab")
FINISHED = {
    "resp_ab": finished("responses", TALK[:2], SEEN),
    "msg_ab": finished("messages", HELLO, said("hi")),
}


def test_a_previous_response_is_put_in() -> None:
    """For a request with previous_response_id, the parser puts the earlier conversation before the
    new messages."""
    body = {"input": "And then?", "previous_response_id": "resp_ab"}
    history = [*FINISHED["resp_ab"].conversation, TALK[-1]]
    assert parse_responses(body, FINISHED.get).messages == history
    assert parse_responses(body | {"instructions": "Be terse."}, FINISHED.get).messages == history
    other = parse_responses(body | {"instructions": "Be wordy."}, FINISHED.get).messages
    assert other == [{"role": "system", "content": "Be wordy."}, *history[1:]]
    thread = {"type": "continue", "previous_message_id": "msg_ab"}
    ask = parse_anthropic({"messages": [TALK[-1]], "system": "s", "thread": thread}, FINISHED.get)
    assert ask.messages == [
        {"role": "system", "content": "s"},
        *FINISHED["msg_ab"].conversation,
        TALK[-1],
    ]


def test_a_thread_keeps_its_tools() -> None:
    """Anthropic's tool runner sends them only once; with previous_response_id they are new."""
    thread = {"type": "continue", "previous_message_id": "msg_ab"}
    body = {"messages": [TALK[-1]], "thread": thread}
    assert parse_anthropic(body, FINISHED.get).tools == [TOOL]
    other = parse_anthropic(body | {"tools": [{"name": "g", "input_schema": {}}]}, FINISHED.get)
    assert [tool["function"]["name"] for tool in other.tools] == ["g"]
    named = body | {"tool_choice": {"type": "tool", "name": "f"}}
    assert parse_anthropic(named, FINISHED.get).tool_choice == "f"
    body = {"input": "And then?", "previous_response_id": "resp_ab"}
    assert parse_responses(body, FINISHED.get).tools == []


REFERENCES: dict[str, dict[str, Any]] = {
    "rs_ab": {"type": "reasoning", "summary": []},
    "msg_ab": {"role": "assistant", "content": "Let me see."},
    "fc_ab_0": {
        "type": "function_call",
        "call_id": "call_ab_0",
        "name": "f",
        "arguments": '{"a": 1}',
    },
}


@pytest.mark.parametrize("named", [{*REFERENCES}, *({name} for name in REFERENCES), set()])
def test_references_to_items_are_put_in(named: set[str]) -> None:
    """A client may send the id of an item of a reply instead of the item."""
    items = [
        {"type": "item_reference", "id": name} if name in named else item
        for name, item in REFERENCES.items()
    ]
    items = [QUESTION, *items, {"type": "item_reference", "id": "fc_ab_1"}]
    read = parse_responses({"input": items, "instructions": "Be terse."}, FINISHED.get).messages
    assert begins_with(read, FINISHED["resp_ab"].conversation)
    assert len(read) == 3


@pytest.mark.parametrize(
    ("name", "ask"),
    [
        ("previous_response_id", {"input": "x", "previous_response_id": "resp_no"}),
        ("previous_response_id", {"input": "x", "previous_response_id": "nonsense"}),
        *[
            ("input: item_reference", {"input": [{"type": "item_reference", "id": key}]})
            for key in ("rs_no", "msg_", "fc_ab", "fc_ab_2", "fc_ab_x", "", None, 3, "x_ab")
        ],
    ],
)
def test_what_is_not_there_is_refused_by_name(name: str, ask: dict[str, Any]) -> None:
    """The parser refuses a reference to an unknown item, because without the item a part of the
    conversation would be missing."""
    with pytest.raises(Refusal, match=f"^{name}"):
        parse_responses(ask, FINISHED.get)
    thread = {"type": "continue", "previous_message_id": "msg_no"}
    with pytest.raises(Refusal, match=r"^thread\.previous_message_id"):
        parse_anthropic({"messages": HELLO, "thread": thread}, FINISHED.get)
