"""Three protocols are read into one form, in which equal messages are equal.

A call that is misread begins another conversation, and its tokens are trained apart from those
before it. So real clients' histories must find their parents, and changed ones must not.
"""

import copy
import json
from typing import Any

import pytest
from conftest import ROOT
from harness import HELLO, normal, said, tool, user
from hypothesis import given
from hypothesis import strategies as st

from cache import Interaction, InteractionCache
from calls import messages
from calls.messages import AgentRequest, Message, Refusal, read_request
from calls.replies import PROTOCOLS
from inference.io_struct import ModelResponse

# Two requests of a real client, and the reply to the first.
LINES = (ROOT / "tests/data/client_pairs.jsonl").read_text().splitlines()
PAIRS = [json.loads(line) for line in LINES]
TOOL = tool("f")


def canonical(message: Message) -> tuple[Any, ...]:
    """What the tree compares of a message that may not be in normal form."""
    return messages.canonical(normal(message))


def ask(path: str = "chat/completions", find: Any = {}.get, **body: Any) -> AgentRequest:
    """Read a body, which says hello if it says nothing else."""
    return PROTOCOLS[path].parse({PROTOCOLS[path].history: HELLO} | body, find)


def read(pair: dict[str, Any]) -> tuple[list[Message], list[Message], list[Message]]:
    """The first request, its reply, and the second request, in normal form."""
    path, reply = pair["path"], pair["reply"]
    if path == "messages":
        reply = {"role": "assistant", "content": reply}
    items = reply if path == "responses" else [reply]
    output = read_request({"messages": items}, lambda _: None).messages
    return ask(path, **pair["parent"]).messages, output, ask(path, **pair["child"]).messages


def begins_with(messages: list[Message], said: list[Message]) -> bool:
    """Whether the canonical forms of `messages` begin with those of `said`."""
    return list(map(canonical, messages[: len(said)])) == list(map(canonical, said))


# Equality


def test_every_turn_finds_its_parent_among_all_conversations() -> None:
    """Real clients change white space and JSON keys of the history that they send back. Here their
    recorded requests are put in one session."""
    cache = InteractionCache()
    children: dict[str, Interaction] = {}
    for k, line in zip(map(str, range(len(LINES))), LINES):
        name = json.loads(line)["id"].rpartition("#")[0]
        line = line.replace("Zürich", f"Zürich {name}").replace('"hi"', f'"hi {name}"')
        # a reply is one message, even if it has several items or blocks
        parent, [output], child = read(json.loads(line))
        response = ModelResponse([1], [2], [-1.0], [0], "stop")
        cache.finish(cache.enter(Interaction(parent, k)), response, output)
        children[k] = Interaction(child, f"child of {k}")
    for k, call in children.items():
        assert cache.enter(call).parent is cache[k]


SAID = {"text", "content", "name", "arguments", "input", "id", "call_id", "tool_calls"}


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The path (keys and indices) to each text, name, id and argument in a part of a request."""
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
    """The items of the second request, and the beginning and end of those that repeat the reply."""
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
    assert not begins_with(read(pair)[2], parent + output)


@given(st.text(), st.lists(st.text(), max_size=3))
def test_null_empty_absent_and_parts_are_one_text(text: str, parts: list[str]) -> None:
    """A comparison ignores a user's name and the marks of a cache."""
    assert canonical(user(None)) == canonical(user("")) == canonical({"role": "user"})
    mark = {"type": "text", "cache_control": {"type": "ephemeral"}}
    split = user([mark | {"text": part} for part in parts])
    assert canonical(split) == canonical(user("".join(parts)))
    assert canonical(user(text) | {"name": "a"}) == canonical(user(text))


def test_a_tools_result_is_the_result_of_its_call() -> None:
    """Equal texts are different messages if they answer different calls."""
    result = {"role": "tool", "content": "2", "tool_call_id": "a"}
    assert canonical(result) == canonical({"role": "tool", "content": "2", "id": "a", "name": "f"})
    assert canonical(result) != canonical(result | {"tool_call_id": "b"})
    assert normal({"role": "tool", "content": "2", "id": "a"}) == result


def assistant(arguments: Any, call_id: str = "c") -> Message:
    """An assistant's message with one call of the tool f."""
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


EQUAL = ['{"a": 2.0, "b": [1e3]}', '{"b":[1000],"a":2}', {"a": 2.0, "b": [1000]}]


@pytest.mark.parametrize("written", EQUAL)
def test_arguments_are_equal_as_javascript_has_them(written: Any) -> None:
    """JavaScript writes 2 for 2.0."""
    assert canonical(normal(assistant(written))) == canonical(assistant('{"a": 2, "b": [1000]}'))
    assert canonical(assistant('{"a": true}')) != canonical(assistant('{"a": 1}'))
    assert canonical(assistant('{"a": "2"}')) != canonical(assistant('{"a": 2}'))
    large = '{"a": 9007199254740993}'
    assert normal(assistant(large))["tool_calls"][0]["function"]["arguments"] == {"a": 2**53 + 1}


def test_plain_is_plain() -> None:
    """A message in normal form is not changed."""
    for pair in PAIRS:
        for message in [part for talk in read(pair) for part in talk]:
            again = normal(message)
            assert again == message
            assert canonical(again) == canonical(message)


def test_a_volatile_head_does_not_begin_a_new_conversation() -> None:
    """Claude Code's first block changes with every call; the prompt keeps the first value."""
    head, cache = "x-anthropic-billing-header: cc_version=2.1.9; cch={};", InteractionCache()

    def enter(name: str, turns: list[Any], *blocks: str) -> Interaction:
        system = [{"type": "text", "text": text} for text in blocks]
        messages = ask("messages", messages=turns, system=system).messages
        return cache.enter(Interaction(messages, name))

    first, more = enter("0", HELLO, head.format("36ee5"), "Be terse."), [*HELLO, said("a"), *HELLO]
    cache.finish(first, ModelResponse([1], [2], [-1.0], [0], "stop"), said("a"))
    second = enter("1", more, head.format("0a1b2"), "Be terse.")
    other = enter("2", more, head.format("36ee5"), "Be wordy.")
    assert (second.parent, second.messages[0], other.parent) == (first, first.messages[0], None)


# The three protocols

QUESTION = {"role": "user", "content": "How warm?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TALK: list[Message] = [
    {"role": "system", "content": "Be terse."},
    QUESTION,
    {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL | {"id": "call_2"}]},
    {"role": "tool", "content": "21", "tool_call_id": "call_1"},
    {"role": "tool", "content": "22", "tool_call_id": "call_2"},
    {"role": "user", "content": "And then?"},
]


def test_three_protocols_say_one_conversation() -> None:
    """Chat completions nest calls in a message, Responses lists items, Messages has blocks."""
    text, two = {"type": "text", "text": "Be terse."}, {"type": "text", "text": "22"}
    called = CALL | {"function": {"name": "f", "arguments": '{"a": 1}'}}
    reply = TALK[2] | {"tool_calls": [called, called | {"id": "call_2"}], "reasoning": "hm"}
    chat = [{"role": "developer", "content": [text]}, QUESTION, reply, *TALK[3:]]
    item = {"type": "function_call", "name": "f", "arguments": '{"a":1}'}
    output = {"type": "function_call_output"}
    items = [
        QUESTION | {"type": "message", "content": [{"type": "input_text", "text": "How warm?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        item | {"call_id": "call_1", "id": "fc_1", "status": "completed"},
        item | {"call_id": "call_2", "arguments": '{ "a": 1 }'},
        output | {"call_id": "call_1", "id": "fco_1", "output": "21"},
        output | {"call_id": "call_2", "output": [{"type": "input_text", "text": "22"}]},
        TALK[-1],
    ]
    use, result = {"type": "tool_use", "name": "f", "input": {"a": 1}}, {"type": "tool_result"}
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    said = [thinking, text | {"text": "Let me see."}, *(use | {"id": f"call_{k}"} for k in (1, 2))]
    results = [
        result | {"tool_use_id": "call_1", "content": "21", "is_error": False},
        result | {"tool_use_id": "call_2", "content": [two]},
        text | {"text": "And then?", "cache_control": {"type": "ephemeral"}},
    ]
    blocks = [QUESTION, {"role": "assistant", "content": said}, user(results)]
    assert ask(messages=chat).messages == TALK
    assert ask("responses", input=items, instructions="Be terse.").messages == TALK
    assert ask("messages", messages=blocks, system=[text]).messages == TALK


def test_two_replies_in_a_row_stay_two() -> None:
    """Every protocol keeps them apart. In Responses, a text may stand for the whole list."""
    twice = [said("a"), said("b"), *HELLO]
    for path, protocol in PROTOCOLS.items():
        assert ask(path, **{protocol.history: twice}).messages == twice
    assert ask("responses", input="hello").messages == HELLO


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}},
        {"type": "input_file", "file_data": "iVBO", "filename": "a.pdf"},
        {"type": "document", "source": {"type": "base64", "data": "iVBO"}},
        {"type": "server_tool_use", "id": "s", "name": "tool_search", "input": {"query": "f"}},
        {"type": "tool_search_tool_result", "tool_use_id": "s", "content": {"tool_references": []}},
        {"type": "tool_reference", "tool_name": "f"},
        {"type": "tool_addition", "tool": {"name": "f"}},
    ],
)
def test_what_is_no_text_becomes_one(part: dict[str, Any]) -> None:
    """An image, a file or an unknown block, in a message or in a tool's result, becomes a
    placeholder."""
    talk = [{"role": "user", "content": [{"type": "text", "text": "Look: "}, part]}]
    talk += [{"role": "tool", "tool_call_id": "c", "content": [part]}]
    texts = [message["content"] for message in ask(messages=talk).messages]
    assert texts == [f"Look: {messages.PLACEHOLDER}", messages.PLACEHOLDER]


FOUND = {"type": "search_result", "source": "s", "content": [{"type": "text", "text": "21"}]}


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"role": "assistant", "content": None, "refusal": "No."}, "No."),
        ({"role": "user", "reasoning": {}, "content": [FOUND]}, "21"),
        ({"type": "web_search_call", "id": "ws_1", "status": "completed"}, messages.PLACEHOLDER),
        ({"type": "custom_tool_call", "call_id": "c", "input": "x"}, messages.PLACEHOLDER),
    ],
)
def test_a_history_with_an_unusual_item_is_read(item: dict[str, Any], text: str) -> None:
    """The item comes again with every later call, so refusing it would end the session."""
    assert [message["content"] for message in ask(messages=[QUESTION, item]).messages][1] == text


def test_what_a_template_may_read_reaches_it() -> None:
    """For example, a tool's result may have a name, which does not count when histories are
    compared."""
    sent = [TALK[3] | {"name": "f"}, said("a", reasoning="hm"), QUESTION | {"name": {}}]
    read = ask(messages=sent).messages
    assert read == [*sent[:2], QUESTION]
    assert canonical(read[0]) == canonical(TALK[3])


def test_blocks_beside_a_tools_result_are_kept() -> None:
    """Each result is a message, and what stands beside it is another."""
    result = {"type": "tool_result", "tool_use_id": "c", "content": "21"}
    text, image = {"type": "text", "text": "So?"}, {"type": "image", "source": {}}
    tool = {"role": "tool", "content": "21", "tool_call_id": "c"}
    beside = {"role": "user", "content": f"So?{messages.PLACEHOLDER}"}
    for blocks, read in (([result], [tool]), ([result, text, image], [tool, beside])):
        assert ask("messages", messages=[{"role": "user", "content": blocks}]).messages == read


def test_tools_are_one_form() -> None:
    """All three protocols give functions in one form. Tools of other types are ignored."""
    claude = {"name": "f", "input_schema": {"type": "object"}}
    flat = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    search = {"type": "web_search_20250305", "name": "w"}
    other = [{"type": "web_search"}, {"type": "namespace", "tools": []}, search]
    other += [{"type": "custom", "custom": {"name": "x"}}]
    for form in (TOOL, flat, claude, claude | {"type": "custom"}):
        assert ask(tools=[form, *other]).tools == [TOOL]
    (read,) = ask(tools=[{"type": "function", "function": {"name": "g"}}]).tools
    assert read["function"]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("choice", "meaning"),
    [
        (None, "auto"),
        *[(word, word) for word in ("auto", "none", "required")],
        ({"type": "function", "function": {"name": "f"}}, "f"),
        ({"type": "function", "name": "f"}, "f"),
        ({"type": "tool", "name": "f", "disable_parallel_tool_use": True}, "f"),
        *[({"type": word}, word) for word in ("auto", "none")],
        ({"type": "any"}, "required"),
    ],
)
def test_tool_choice_is_one_word(choice: Any, meaning: str) -> None:
    """The tool_choice of every protocol becomes auto, none, required or a tool's name."""
    assert ask(tools=[TOOL], tool_choice=choice).tool_choice == meaning


SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
WRAPPED = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
FLAT = {"type": "json_schema", "name": "s", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("fields", "schema"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
        ({"response_format": WRAPPED}, SCHEMA),
        ({"text": {"verbosity": "low"}}, None),
        ({"text": {"format": FLAT}}, SCHEMA),
        ({"output_config": {"format": FLAT}}, SCHEMA),
        ({"output_format": FLAT}, SCHEMA),
    ],
)
def test_structured_output_is_one_schema(fields: dict[str, Any], schema: Any) -> None:
    """The schema keeps its fields in order, because the answer should have that order. With tools
    there is no schema, because a grammar would allow no call."""
    text = json.dumps(schema, separators=(",", ":"))
    assert ask(**fields).sampling == ({} if schema is None else {"json_schema": text})
    assert ask(**fields, tools=[TOOL]).sampling == {}
    assert ask(**fields, tools=[TOOL], tool_choice="none").sampling == ask(**fields).sampling


# What is refused, used or ignored

WRONG: dict[str, list[Any]] = {"n": [0, 2, 1.5], "stream": ["yes"], "seed": [1.5], "system": [3]}
WRONG |= {"temperature": [-1, "hot", True], "top_p": [0, 1.5], "top_k": [0.5, 2**63, 2**31]}
WRONG |= {"presence_penalty": [2.5], "frequency_penalty": [3], "min_p": [0.1]}
WRONG |= {"max_tokens": [0, 2**31], "max_completion_tokens": [2**63, "many"]}
WRONG |= {"max_output_tokens": [0], "stop": [[""], {"a": 1}], "stop_sequences": [[3]]}
WRONG |= {"stop_token_ids": [["a"]], "guided_choice": [["a"]], "logit_bias": [{"5": 1}]}
WRONG |= {"logprobs": [True], "top_logprobs": [5], "background": [True], "container": ["c"]}
WRONG |= {"chat_template": ["{{ messages }}"], "chat_template_kwargs": [[1]]}
WRONG |= {"functions": [[{"name": "f"}]], "mcp_servers": [[{"url": "x"}]]}
WRONG |= {"previous_response_id": [3, "resp_no", "nonsense"], "conversation": ["conv_1"]}
WRONG |= {"response_format": ["json", {"type": "grammar"}, {"type": "json_schema"}]}
WRONG |= {
    "tools": [{"f": 1}, ["f"], [{"type": "function"}], [{"function": {"name": 3}}]],
    "prompt": [{"id": "p"}],
    "thread": [{"type": "continue", "previous_message_id": "msg_ab"}, {"type": "fork"}, "t"],
    "tool_choice": [
        *("f", "required", {"type": "function", "function": {"name": "g"}}, {"type": []}, [], 3),
        *({"type": "web_search"}, {"type": "allowed_tools", "mode": "auto", "tools": []}),
    ],
    "messages": [
        *([], None, "hello", [3]),
        [{"content": "hello"}],
        [{"type": "message"}],
        [{"role": "robot", "content": "hello"}],
        [{"role": ["user"], "content": "hello"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [3]}],
        [{"role": "user", "content": [{"type": "text", "text": 3}]}],
        [{"role": "assistant", "tool_calls": "f()"}],
        [{"role": "assistant", "tool_calls": [{"id": ["c"], "function": {"name": "f"}}]}],
        [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": None}}]}],
        [{"type": "function_call", "call_id": "c", "arguments": "{}"}],
    ],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_what_cannot_be_honoured_is_refused_by_name(name: str, value: Any) -> None:
    """What would change the answer is used or refused, and the refusal names the field."""
    tools = [] if value in ("f", "required") else [TOOL]
    with pytest.raises(Refusal, match=f"^{name}"):
        ask(**{"tools": tools, name: value})


def test_a_prefilled_answer_is_refused() -> None:
    """In Anthropic's protocol, such an answer orders the model to go on with it."""
    talk = [*HELLO, said("The answer is (")]
    assert ask(messages=talk).messages == talk
    with pytest.raises(Refusal, match=r"^messages: .*prefilling"):
        ask("messages", messages=talk)


def test_neutral_values_and_unknown_keys_are_accepted() -> None:
    """Frameworks send unknown keys, and the default values of unsupported parameters."""
    body: dict[str, Any] = {"stream": False, "n": 1, "tools": None, "tool_choice": "auto"}
    body |= {"response_format": {"type": "text"}, "logprobs": False, "top_logprobs": None}
    body |= {"user": "me", "metadata": {}, "stream_options": None, "parallel_tool_calls": True}
    body |= {"stop_token_ids": [], "reasoning_effort": None, "thinking": {"type": "adaptive"}}
    body |= {"context_management": {"edits": []}, "cache_control": {"type": "ephemeral"}}
    body |= {"include": ["reasoning.encrypted_content"], "truncation": "disabled"}
    body |= {"thread": {"type": "create"}, "reasoning": {"effort": "high"}, "system": None}
    for path in PROTOCOLS:
        assert ask(path, **body) == AgentRequest(HELLO)


def test_sampling_parameters_are_translated() -> None:
    """A parsed request contains only the sampling parameters that the agent set."""
    body: Any = {"temperature": 0, "top_p": 0.9, "stop": "\n", "seed": 7, "stop_token_ids": [5]}
    read = ask(**body, frequency_penalty=1).sampling
    assert read == body | {"stop": ["\n"], "frequency_penalty": 1}
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        asked: Any = {name: 5}
        assert ask(**asked).sampling == {"max_new_tokens": 5}
    assert ask(stop_sequences=["a", "b"]).sampling == {"stop": ["a", "b"]}
    assert ask(top_k=0).sampling == {"top_k": -1}
    other = ask(stream=True, chat_template_kwargs={"enable_thinking": False})
    assert (other.stream, other.template_kwargs) == (True, {"enable_thinking": False})


# Broken and deeply nested JSON


NO_JSON = ['{"a": ', "[" * 100_000, '{"a": NaN}', '{"a": 1e999}', "[" * 250 + "]" * 250]
NO_JSON += ['{"a": "\\ud800"}']


@pytest.mark.parametrize("text", NO_JSON)
def test_arguments_that_are_no_json_stay_text(text: str) -> None:
    """A model may write broken JSON, or JSON that no client could read again."""
    message = assistant(text)
    assert normal(message)["tool_calls"][0]["function"]["arguments"] == text
    assert canonical(message) == canonical(copy.deepcopy(message))


# References

F = ("f", {"a": 1})
FINISHED = Interaction(TALK[:2])
FINISHED.output_message_list = [said("Let me see.", F, F, suffix="ab")]
WRITER = PROTOCOLS["responses"](AgentRequest([]), "ab")
FINISHED.reply = WRITER.render(FINISHED.output_message_list[0], ModelResponse())
FIND = {"resp_ab": FINISHED, "resp_cd": Interaction(HELLO)}.get


def test_a_previous_response_is_put_in() -> None:
    """The conversation of the response comes before the new messages. New instructions replace the
    old ones."""
    body = {"input": "And then?", "previous_response_id": "resp_ab"}
    history = [*FINISHED.conversation, TALK[-1]]
    assert ask("responses", FIND, **body).messages == history
    for instructions in ("Be terse.", "Be wordy."):
        read = ask("responses", FIND, **body, instructions=instructions)
        assert read.messages == [{"role": "system", "content": instructions}, *history[1:]]
    with pytest.raises(Refusal, match=r"^previous_response_id"):  # it has no answer yet
        ask("responses", FIND, previous_response_id="resp_cd")


CALLED = {"type": "function_call", "call_id": "call_ab_0", "name": "f", "arguments": '{"a": 1}'}
REFERENCES: dict[str, Any] = {"msg_ab": said("Let me see."), "fc_ab_0": CALLED}


@pytest.mark.parametrize("named", [{*REFERENCES}, *({name} for name in REFERENCES), set()])
def test_references_to_items_are_put_in(named: set[str]) -> None:
    """A client may send the id of an item of a reply instead of the item."""
    references = [{"type": "item_reference", "id": name} for name in (*REFERENCES, "fc_ab_1")]
    items = [r if r["id"] in named else REFERENCES.get(r["id"], r) for r in references]
    read = ask("responses", FIND, input=[QUESTION, *items], instructions="Be terse.").messages
    assert begins_with(read, FINISHED.conversation)
    assert len(read) == 3


NAMES = ["msg_no", "msg_", "fc_ab", "fc_ab_2", "msg_cd", "", None, 3, "x_ab"]


@pytest.mark.parametrize("name", NAMES)
def test_an_item_that_is_not_there_is_refused(name: Any) -> None:
    """Without it a part of the conversation would be missing."""
    with pytest.raises(Refusal, match=r"^input: item_reference"):
        ask("responses", FIND, input=[{"type": "item_reference", "id": name}])
