"""The reply that an official SDK rebuilds from a stream is equal to the reply without streaming. If a client sends a
reply back, the proxy converts this reply to the message that the tree has stored."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calls.client import sdk_http
from calls.messages import AgentRequest, canonical, normalise, parse_anthropic, parse_responses
from calls.replies import PROTOCOLS, Answer, parts_of
from calls.tools import Call, OutputParser, Parsed
from inference.io_struct import ModelResponse

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
NAMES = list(PROTOCOLS)
ASKED = AgentRequest(HELLO, model="m", stream_usage=True)
PARSED = Parsed("Let me see.", "hm", [Call("f", '{"a": "Zürich\u2028"}'), Call("g", "{}")])


def response_of(stop_reason: str = "stop") -> ModelResponse:
    """Return a response of the engine with two prompt tokens and three generated tokens."""
    return ModelResponse([1, 2], [3, 4, 5], [-0.5, -1.0, -1.5], [0, 0, 0], stop_reason)


def answer_of(
    name: str, parsed: Parsed = PARSED, stop_reason: str = "stop", **fields: Any
) -> Answer:
    """Return an answer in the protocol `name`. The answer's interaction id ends with ab12."""
    return Answer(PROTOCOLS[name].id_prefix + "ab12", response_of(stop_reason), parsed, **fields)


def whole(name: str, answer: Answer, ask: AgentRequest = ASKED) -> dict[str, Any]:
    """Return the body of the unstreamed reply. The body has been converted to JSON and back."""
    return json.loads(json.dumps(PROTOCOLS[name].render(ask, [answer])))


def streamed(
    name: str, answer: Answer, pieces: list[tuple[str, str]], ask: AgentRequest = ASKED
) -> bytes:
    """Return the reply as a stream of events. Each element of `pieces` is a pair: the text and the reasoning text that
    the stream appends."""
    stream, text, reasoning = PROTOCOLS[name].stream(ask, answer.interaction_id, 0), "", ""
    frames = stream.start(2)
    for more_text, more_reasoning in pieces:
        text, reasoning = text + more_text, reasoning + more_reasoning
        frames += stream.grow(parts_of(Parsed(text, reasoning)))
    return frames + stream.finish(answer) + stream.end([answer])


def frames_of(raw: bytes) -> Iterator[tuple[str, Any]]:
    """Yield the event name and the data of each frame."""
    assert raw.endswith(b"\n\n")
    for frame in raw.decode("ascii").removesuffix("\n\n").split("\n\n"):
        lines = dict(line.split(": ", 1) for line in frame.splitlines())
        assert lines.keys() <= {"event", "data"}
        yield (
            lines.get("event", ""),
            lines["data"] if lines["data"] == "[DONE]" else json.loads(lines["data"]),
        )


def client_of(name: str, content: bytes, status: int = 200) -> Any:
    """Return a client of the protocol's official SDK that gets `content` as the reply to any request."""
    kind = "text/event-stream" if status == 200 else "application/json"
    http: Any = httpx2 if name == "messages" else sdk_http
    transport = http.MockTransport(
        lambda _: http.Response(status, content=content, headers={"content-type": kind})
    )
    options: Any = {
        "api_key": "k",
        "base_url": "http://proxy",
        "http_client": http.Client(transport=transport),
    }
    return (anthropic.Anthropic if name == "messages" else openai.OpenAI)(**options, max_retries=0)


def accumulated(name: str, raw: bytes) -> dict[str, Any]:
    """Return the reply that the SDK's own stream helper builds from the stream `raw`."""
    client = client_of(name, raw)
    if name == "chat/completions":
        with client.chat.completions.stream(model="m", messages=HELLO) as stream:
            try:
                return stream.get_final_completion().to_dict()
            except openai.LengthFinishReasonError as error:  # the SDK's error for a cut-off reply
                return error.completion.to_dict()
    if name == "responses":
        with client.responses.stream(model="m", input="hello") as stream:
            return [event for event in stream if event.type.startswith("response.")][
                -1
            ].response.to_dict()
    with client.messages.stream(model="m", messages=HELLO, max_tokens=9) as stream:
        return stream.get_final_message().to_dict()


def said(value: Any) -> Any:
    """Return a reply without the keys in which a streamed and an unstreamed reply may differ. The removed keys are
    timestamps, keys with null values, and keys for parsed values that an SDK's helper adds."""
    if isinstance(value, dict):
        added = [
            "created",
            "created_at",
            "parsed_arguments",
            "parsed",
            *["index"] * ("function" in value),
        ]
        return {
            key: said(item) for key, item in value.items() if item is not None and key not in added
        }
    return list(map(said, value)) if isinstance(value, list) else value


def nulls(value: Any, path: str = "") -> list[str]:
    """Return the paths of all null values in a reply."""
    if isinstance(value, dict | list):
        pairs = (
            value.items()
            if isinstance(value, dict)
            else ((str(i), item) for i, item in enumerate(value))
        )
        return [null for key, item in pairs for null in nulls(item, f"{path}.{key}")]
    return [path] if value is None else []


def sent_back(name: str, reply: dict[str, Any]) -> dict[str, Any]:
    """Convert a reply to a message in normal form, as if a client had sent the reply back."""
    if name == "chat/completions":
        return normalise(reply["choices"][0]["message"])
    if name == "responses":
        return parse_responses({"input": reply["output"]}).messages[0]
    return parse_anthropic(
        {"messages": [{"role": "assistant", "content": reply["content"]}, *HELLO]}
    ).messages[0]


CALLS = st.lists(
    st.builds(Call, st.sampled_from("fg"), st.dictionaries(st.text(), st.text()).map(json.dumps)),
    max_size=2,
)
PARSES = st.builds(Parsed, st.text(), st.text(), CALLS)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(NAMES),
    PARSES,
    st.sampled_from(["stop", "length"]),
    st.lists(st.integers(1, 5), max_size=4),
)
def test_a_stream_is_the_whole_reply(
    name: str, parsed: Parsed, stop_reason: str, cuts: list[int]
) -> None:
    """However a stream divides the text into pieces, the SDKs' helpers rebuild the whole reply from the events."""
    answer = answer_of(name, parsed, stop_reason)
    ends = list(itertools.accumulate(cuts, initial=0))
    pieces = [("", parsed.reasoning[a:b]) for a, b in itertools.pairwise(ends)]
    if ends[-1] >= len(parsed.reasoning):
        pieces += [(parsed.text[a:b], "") for a, b in itertools.pairwise(ends)]
    raw = streamed(name, answer, pieces)
    assert said(accumulated(name, raw)) == said(whole(name, answer))
    assert nulls([data for _, data in frames_of(raw)]) == []


@settings(deadline=None)
@given(st.sampled_from(NAMES), PARSES)
def test_a_reply_sent_back_is_the_message_that_was_kept(name: str, parsed: Parsed) -> None:
    """In every protocol, the message that a client sends back has the canonical form of the message in the conversation
    tree."""
    answer = answer_of(name, parsed)
    again = sent_back(name, whole(name, answer))
    assert canonical(again) == canonical(answer.message)
    assert again.get("reasoning_content", "") == parsed.reasoning


@pytest.mark.parametrize("name", NAMES)
def test_what_a_parser_is_sure_of_makes_a_stream(name: str) -> None:
    """Before its last events, a stream sends only text that OutputParser.certain returned. All events of a stream
    together contain the whole reply."""
    parser, tools = OutputParser(), [{"type": "function", "function": {"name": "f"}}]
    text = '<think>\nhm, "<"\n</think>\n\nLet me see: 1 < 2 \n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    pieces, before = [], Parsed("")
    for end in range(len(text)):
        sure = parser.certain(text[:end], tools)
        pieces.append((sure.text[len(before.text) :], sure.reasoning[len(before.reasoning) :]))
        before = sure
    answer = answer_of(name, parser.parse(text, tools))
    assert (answer.parsed.text, answer.parsed.reasoning) == ("Let me see: 1 < 2", 'hm, "<"')
    assert len(answer.tool_calls) == 1
    raw = streamed(name, answer, pieces)
    assert said(accumulated(name, raw)) == said(whole(name, answer))
    assert sum(b"1" in frame or b"2" in frame for frame in raw.split(b"\n\n")) > 1
    assert PROTOCOLS[name].stream(ASKED, "x", 0).grow([]) == b""


# Tests of the keys and events that strict clients read


def test_a_chat_completion_has_all_that_strict_clients_read() -> None:
    """A chat completion has `id`, `model`, `object`, `index` and `usage`, and only its `content` may be null."""
    reply = whole("chat/completions", answer_of("chat/completions", Parsed("hi"), "abort"))
    assert reply.pop("created") > 0
    assert reply == {
        "id": "chatcmpl-ab12",
        "object": "chat.completion",
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hi"},
                "finish_reason": "length",
            }
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
    }
    only_calls = whole(
        "chat/completions", answer_of("chat/completions", Parsed("", calls=PARSED.calls))
    )
    assert nulls(only_calls) == [".choices.0.message.content"]
    assert only_calls["choices"][0]["finish_reason"] == "tool_calls"


def test_a_response_has_all_that_strict_clients_read() -> None:
    """A reply in OpenAI's Responses protocol has `created_at`, `status` and `usage`. The ids of the response's items
    are derived from the response's id."""
    reply = whole("responses", answer_of("responses"))
    assert reply["created_at"] > 0
    assert [item["id"] for item in reply["output"]] == [
        "rs_ab12",
        "msg_ab12",
        "fc_ab12_0",
        "fc_ab12_1",
    ]
    assert [item.get("call_id") for item in reply["output"]] == [
        None,
        None,
        "call_ab12_0",
        "call_ab12_1",
    ]
    assert (reply["status"], reply["usage"]["output_tokens"]) == ("completed", 3)
    assert nulls(reply) == []
    cut = whole("responses", answer_of("responses", Parsed("hi"), "length"))
    assert (cut["status"], cut["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    named = PROTOCOLS["responses"].render(
        AgentRequest(HELLO, tool_choice="f"), [answer_of("responses")]
    )
    assert named["tool_choice"] == {"type": "function", "name": "f"}


def test_a_message_has_all_that_strict_clients_read() -> None:
    """A reply in Anthropic's Messages protocol has `role`, `type`, `id`, `usage` and `stop_reason`. No text block has
    `citations` with the value null, because Vercel's client rejects that value."""
    reply = whole("messages", answer_of("messages"))
    assert reply == {
        "id": "msg_ab12",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "msg_ab12"},
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "call_ab12_0", "name": "f", "input": {"a": "Zürich\u2028"}},
            {"type": "tool_use", "id": "call_ab12_1", "name": "g", "input": {}},
        ],
        "usage": {"input_tokens": 2, "output_tokens": 3},
        "stop_reason": "tool_use",
    }
    reasons = [
        whole("messages", answer_of("messages", Parsed("hi"), stop))["stop_reason"]
        for stop in ("stop", "length")
    ]
    assert reasons == ["end_turn", "max_tokens"]


def test_the_events_of_a_chat_completion() -> None:
    """The stream of a chat completion begins with the role, and ends with finish_reason and [DONE]. The stream contains
    token usage only if the client asks for it."""
    frames = list(
        frames_of(streamed("chat/completions", answer_of("chat/completions"), [("Let", "hm")]))
    )
    assert {event for event, _ in frames} == {""}
    *chunks, usage, done = [data for _, data in frames]
    assert done == "[DONE]"
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 5)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    keys = ["role", "reasoning_content", "content", "content", "tool_calls", "tool_calls"]
    assert [next(iter(delta), None) for delta in deltas] == [*keys, None]
    assert [call["index"] for delta in deltas for call in delta.get("tool_calls", ())] == [0, 1]
    assert [chunk["choices"][0].get("finish_reason") for chunk in chunks] == [None] * 6 + [
        "tool_calls"
    ]
    assert {(chunk["id"], chunk["object"], chunk["choices"][0]["index"]) for chunk in chunks} == {
        ("chatcmpl-ab12", "chat.completion.chunk", 0)
    }
    plain = list(
        frames_of(
            streamed("chat/completions", answer_of("chat/completions"), [], AgentRequest(HELLO))
        )
    )
    assert all(data == "[DONE]" or data["choices"] for _, data in plain)


def test_the_events_of_a_response() -> None:
    """In the Responses protocol, the events of a stream are numbered without gaps. The event that adds an item comes
    before the item's deltas."""
    frames = list(
        frames_of(streamed("responses", answer_of("responses"), [("", "hm"), ("Let ", "")]))
    )
    part = ["output_item.added", "content_part.added"]
    end = ["content_part.done", "output_item.done"]
    arguments = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert [event.removeprefix("response.") for event, _ in frames] == [
        *["created", "in_progress"],
        *[*part, "reasoning_text.delta", "reasoning_text.done", *end],
        *[*part, "output_text.delta", "output_text.delta", "output_text.done", *end],
        *["output_item.added", *arguments, "output_item.done"] * 2,
        "completed",
    ]
    assert all(data["type"] == event for event, data in frames)
    assert [data["sequence_number"] for _, data in frames] == list(range(len(frames)))
    places = {data["item"]["id"]: data["output_index"] for _, data in frames if "item" in data}
    assert places == {"rs_ab12": 0, "msg_ab12": 1, "fc_ab12_0": 2, "fc_ab12_1": 3}


def test_the_events_of_a_message() -> None:
    """Every event has an `event:` line, which Anthropic's client needs, and only one content block is open at a
    time."""
    frames = list(
        frames_of(streamed("messages", answer_of("messages"), [("", "hm"), ("Let ", "")]))
    )
    assert all(data["type"] == event for event, data in frames)
    deltas = [data["delta"].get("type") for event, data in frames if event == "content_block_delta"]
    assert deltas == [
        "thinking_delta",
        "signature_delta",
        "text_delta",
        "text_delta",
        *["input_json_delta"] * 2,
    ]
    others = [event for event, _ in frames if event != "content_block_delta"]
    blocks = ["content_block_start", "content_block_stop"] * 4
    assert others == ["message_start", *blocks, "message_delta", "message_stop"]
    assert [data["index"] for event, data in frames if event == "content_block_start"] == [
        0,
        1,
        2,
        3,
    ]
    assert frames[0][1]["message"]["usage"] == {"input_tokens": 2, "output_tokens": 0}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_said_after_the_last_token_only(name: str) -> None:
    """The SDK rebuilds the reply even if a stream sends the whole answer only at its end. The SDK also rebuilds an
    empty answer, and an answer with only tool calls or only reasoning."""
    for parsed in (Parsed(""), Parsed("", calls=PARSED.calls), Parsed("", "hm")):
        answer = answer_of(name, parsed)
        raw = streamed(name, answer, [])
        assert said(accumulated(name, raw)) == said(whole(name, answer))


# Several answers, logprobs, errors


def test_several_answers_share_a_chat_completion() -> None:
    """With n = 2 a stream interleaves the chunks of both answers, and each chunk has the index of its answer. The
    stream sends token usage and [DONE] only once, at its end."""
    ask = AgentRequest(HELLO, model="m", n=2, stream_usage=True)
    one = Answer("chatcmpl-ab12", response_of(), Parsed("first", "hm"))
    two = Answer(
        "chatcmpl-ab12-1", response_of("length"), Parsed("second", calls=[Call("f", "{}")])
    )
    first, second = (
        PROTOCOLS["chat/completions"].stream(ask, "chatcmpl-ab12", k) for k in range(2)
    )
    raw = (
        first.start(2)
        + second.start(2)
        + second.grow([("text", "sec")])
        + first.grow([("reasoning", "h")])
    )
    raw += second.grow([("text", "second")]) + second.finish(two) + first.finish(one)
    assert b"[DONE]" not in raw
    raw += first.end([one, two])
    both = json.loads(json.dumps(PROTOCOLS["chat/completions"].render(ask, [one, two])))
    assert said(accumulated("chat/completions", raw)) == said(both)
    assert both["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    assert both["choices"][1]["message"]["tool_calls"][0]["id"] == "call_ab12-1_0"


def test_logprobs_of_the_sampled_tokens() -> None:
    """A reply contains the logprobs of the sampled tokens in OpenAI's format, with and without streaming."""
    chat = answer_of("chat/completions", Parsed("hi"), token_texts=["h", "i", "<|im_end|>"])
    content = whole("chat/completions", chat)["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["logprob"]) for entry in content] == [
        ("h", -0.5),
        ("i", -1.0),
        ("<|im_end|>", -1.5),
    ]
    assert content[0] == {"token": "h", "logprob": -0.5, "bytes": [104], "top_logprobs": []}
    assert said(accumulated("chat/completions", streamed("chat/completions", chat, []))) == said(
        whole("chat/completions", chat)
    )
    halves = answer_of("chat/completions", Parsed("é"), token_texts=["\ufffd", "\ufffd"])
    assert [entry["bytes"] for entry in halves.logprobs] == [
        [],
        [],
    ]  # the decoder turns half of é into U+FFFD, so the token's bytes are unknown
    response = answer_of("responses", Parsed("hi"), token_texts=["h", "i", ""])
    assert whole("responses", response)["output"][0]["content"][0]["logprobs"][0] == content[0]
    assert said(accumulated("responses", streamed("responses", response, []))) == said(
        whole("responses", response)
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("status", "error"),
    [(400, "BadRequestError"), (401, "AuthenticationError"), (404, "NotFoundError")],
)
def test_an_error_has_the_shape_of_its_protocol(name: str, status: int, error: str) -> None:
    """For an error status, each protocol's SDK raises the exception class for this status, with the proxy's message."""
    body = PROTOCOLS[name].error(status, "stop: a string is needed")
    assert body["error"]["message"] == "stop: a string is needed"
    assert ("type" in body) == (name == "messages")
    library: Any = anthropic if name == "messages" else openai
    with pytest.raises(getattr(library, error), match="stop: a string is needed"):
        accumulated_error(name, json.dumps(body).encode(), status)


def accumulated_error(name: str, raw: bytes, status: int) -> None:
    """Send a request with a client of the SDK. The client gets the reply `raw`, and raises the error that is in the
    reply."""
    client = client_of(name, raw, status)
    if name == "chat/completions":
        client.chat.completions.create(model="m", messages=HELLO)
    elif name == "responses":
        client.responses.create(model="m", input="hello")
    else:
        client.messages.create(model="m", messages=HELLO, max_tokens=9)


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_that_breaks_off_is_an_error(name: str) -> None:
    """If an error occurs after the first bytes of a stream, the stream sends the error as an event, and the SDK raises
    the error."""
    stream = PROTOCOLS[name].stream(ASKED, PROTOCOLS[name].id_prefix + "ab", 0)
    raw = stream.start(2) + stream.grow([("text", "Let")]) + stream.error(503, "no server answers")
    library: Any = anthropic if name == "messages" else openai
    with pytest.raises(library.APIError, match="no server answers"):
        accumulated(name, raw)
