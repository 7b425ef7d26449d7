"""What an SDK builds from a stream is the whole reply, and a reply sent back is the message that
the tree keeps."""

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
from calls.replies import PROTOCOLS, Answer, write_event
from calls.tools import Call, Parsed
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
    return json.loads(json.dumps(form_of(name, answer, ask).render([answer])))


def form_of(name: str, answer: Answer, ask: AgentRequest = ASKED) -> Any:
    """What writes the reply. The prompt has two tokens."""
    return PROTOCOLS[name](ask, answer.interaction_id, 2)


def streamed(name: str, *answers: Answer, ask: AgentRequest = ASKED, progress: int = 2) -> bytes:
    """The reply as a stream, with so many events of progress."""
    form = form_of(name, answers[0], ask)
    waited = [form.progress() for _ in range(progress)]
    events = [*form.opening(), *waited, *form.stream(form.render([*answers]))]
    return b"".join(write_event(data, n) for n, data in enumerate(events)) + form.end


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
    """Return a client of the protocol's official SDK that gets `content` as the reply to any
    request."""
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
    """Return a reply without the keys in which a streamed and an unstreamed reply may differ. The
    removed keys are timestamps, keys with null values, and keys for parsed values that an SDK's
    helper adds."""
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
@given(st.sampled_from(NAMES), PARSES, st.sampled_from(["stop", "length"]), st.integers(0, 3))
def test_a_stream_is_the_whole_reply(
    name: str, parsed: Parsed, stop_reason: str, progress: int
) -> None:
    """The SDKs' helpers build the whole reply, however long it took."""
    answer = answer_of(name, parsed, stop_reason)
    raw = streamed(name, answer, progress=progress)
    assert said(accumulated(name, raw)) == said(whole(name, answer))
    assert nulls([data for _, data in frames_of(raw)]) == []


@settings(deadline=None)
@given(st.sampled_from(NAMES), PARSES)
def test_a_reply_sent_back_is_the_message_that_was_kept(name: str, parsed: Parsed) -> None:
    """In every protocol, the message that a client sends back has the canonical form of the message
    in the conversation tree."""
    answer = answer_of(name, parsed)
    again = sent_back(name, whole(name, answer))
    assert canonical(again) == canonical(answer.message)
    assert again.get("reasoning_content", "") == parsed.reasoning


# Tests of the keys and events that strict clients read


def test_a_chat_completion_has_all_that_strict_clients_read() -> None:
    """A chat completion has `id`, `model`, `object`, `index` and `usage`, and only its `content`
    may be null."""
    reply = whole("chat/completions", answer_of("chat/completions", Parsed("hi"), "length"))
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
    """A reply in OpenAI's Responses protocol has `created_at`, `status` and `usage`."""
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
    named = whole("responses", answer_of("responses"), AgentRequest(HELLO, tool_choice="f"))
    assert named["tool_choice"] == {"type": "function", "name": "f"}


def test_a_message_has_all_that_strict_clients_read() -> None:
    """A reply in Anthropic's Messages protocol has `role`, `type`, `id`, `usage` and
    `stop_reason`."""
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
    """The stream of a chat completion begins with the role, and ends with finish_reason and
    [DONE]."""
    answer = answer_of("chat/completions")
    frames = list(frames_of(streamed("chat/completions", answer)))
    assert {event for event, _ in frames} == {""}
    *chunks, usage, done = [data for _, data in frames]
    assert done == "[DONE]"
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 5)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    keys = ["role", None, None, "reasoning_content", "content", "tool_calls", "tool_calls"]
    assert [next(iter(delta), None) for delta in deltas] == [*keys, None]
    assert [call["index"] for delta in deltas for call in delta.get("tool_calls", ())] == [0, 1]
    assert [chunk["choices"][0].get("finish_reason") for chunk in chunks] == [None] * 7 + [
        "tool_calls"
    ]
    assert {(chunk["id"], chunk["object"], chunk["choices"][0]["index"]) for chunk in chunks} == {
        ("chatcmpl-ab12", "chat.completion.chunk", 0)
    }
    plain = frames_of(streamed("chat/completions", answer, ask=AgentRequest(HELLO)))
    assert all(data == "[DONE]" or data["choices"] for _, data in plain)


def test_the_events_of_a_response() -> None:
    """In the Responses protocol, the events of a stream are numbered without gaps."""
    frames = list(frames_of(streamed("responses", answer_of("responses"))))
    part = ["output_item.added", "content_part.added"]
    end = ["content_part.done", "output_item.done"]
    arguments = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert [event.removeprefix("response.") for event, _ in frames] == [
        *["created", "in_progress", "in_progress", "in_progress"],
        *[*part, "reasoning_text.delta", "reasoning_text.done", *end],
        *[*part, "output_text.delta", "output_text.done", *end],
        *["output_item.added", *arguments, "output_item.done"] * 2,
        "completed",
    ]
    assert all(data["type"] == event for event, data in frames)
    assert [data["sequence_number"] for _, data in frames] == list(range(len(frames)))
    places = {data["item"]["id"]: data["output_index"] for _, data in frames if "item" in data}
    assert places == {"rs_ab12": 0, "msg_ab12": 1, "fc_ab12_0": 2, "fc_ab12_1": 3}


def test_the_events_of_a_message() -> None:
    """Every event has an `event:` line, which Anthropic's client needs, and only one content block
    is open at a time."""
    frames = list(frames_of(streamed("messages", answer_of("messages"))))
    assert all(data["type"] == event for event, data in frames)
    deltas = [data["delta"].get("type") for event, data in frames if event == "content_block_delta"]
    assert deltas == ["thinking_delta", "signature_delta", "text_delta", *["input_json_delta"] * 2]
    others = [event for event, _ in frames if event != "content_block_delta"]
    blocks = ["content_block_start", "content_block_stop"] * 4
    assert others == ["message_start", "ping", "ping", *blocks, "message_delta", "message_stop"]
    assert [data["index"] for event, data in frames if event == "content_block_start"] == [
        0,
        1,
        2,
        3,
    ]
    assert frames[0][1]["message"]["usage"] == {"input_tokens": 2, "output_tokens": 0}


# Several answers, logprobs, errors


def test_several_answers_share_a_chat_completion() -> None:
    """With n = 2 a stream interleaves the chunks of both answers, and each chunk has the index of
    its answer."""
    ask = AgentRequest(HELLO, model="m", n=2, stream_usage=True)
    one = Answer("chatcmpl-ab12", response_of(), Parsed("first", "hm"))
    two = Answer(
        "chatcmpl-ab12-1", response_of("length"), Parsed("second", calls=[Call("f", "{}")])
    )
    raw = streamed("chat/completions", one, two, ask=ask)
    assert raw.count(b"[DONE]") == raw.count(b"usage") == 1
    both = json.loads(json.dumps(form_of("chat/completions", one, ask).render([one, two])))
    assert said(accumulated("chat/completions", raw)) == said(both)
    assert both["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    assert both["choices"][1]["message"]["tool_calls"][0]["id"] == "call_ab12-1_0"


def test_logprobs_of_the_sampled_tokens() -> None:
    """A reply contains the logprobs of the sampled tokens in OpenAI's format, with and without
    streaming."""
    chat = answer_of("chat/completions", Parsed("hi"), token_texts=["h", "i", "<|im_end|>"])
    content = whole("chat/completions", chat)["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["logprob"]) for entry in content] == [
        ("h", -0.5),
        ("i", -1.0),
        ("<|im_end|>", -1.5),
    ]
    assert content[0] == {"token": "h", "logprob": -0.5, "bytes": [104], "top_logprobs": []}
    assert said(accumulated("chat/completions", streamed("chat/completions", chat))) == said(
        whole("chat/completions", chat)
    )
    halves = answer_of("chat/completions", Parsed("é"), token_texts=["\ufffd", "\ufffd"])
    assert [entry["bytes"] for entry in halves.logprobs] == [
        [],
        [],
    ]  # the decoder turns half of é into U+FFFD, so the token's bytes are unknown
    response = answer_of("responses", Parsed("hi"), token_texts=["h", "i", ""])
    assert whole("responses", response)["output"][0]["content"][0]["logprobs"][0] == content[0]
    assert said(accumulated("responses", streamed("responses", response))) == said(
        whole("responses", response)
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("status", "error"),
    [(400, "BadRequestError"), (401, "AuthenticationError"), (404, "NotFoundError")],
)
def test_an_error_has_the_shape_of_its_protocol(name: str, status: int, error: str) -> None:
    """For an error status, each protocol's SDK raises the exception class for this status, with the
    proxy's message."""
    body = PROTOCOLS[name].error(status, "stop: a string is needed")
    assert body["error"]["message"] == "stop: a string is needed"
    assert ("type" in body) == (name != "chat/completions")
    library: Any = anthropic if name == "messages" else openai
    with pytest.raises(getattr(library, error), match="stop: a string is needed"):
        accumulated_error(name, json.dumps(body).encode(), status)


def accumulated_error(name: str, raw: bytes, status: int) -> None:
    """Send a request with a client of the SDK. The client gets the reply `raw`, and raises the
    error that is in the reply."""
    client = client_of(name, raw, status)
    if name == "chat/completions":
        client.chat.completions.create(model="m", messages=HELLO)
    elif name == "responses":
        client.responses.create(model="m", input="hello")
    else:
        client.messages.create(model="m", messages=HELLO, max_tokens=9)


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_that_breaks_off_is_an_error(name: str) -> None:
    """If an error occurs after the first bytes of a stream, the stream sends the error as an event,
    and the SDK raises the error."""
    form = form_of(name, answer_of(name))
    events = [*form.opening(), form.progress(), form.error(503, "no server answers")]
    raw = b"".join(write_event(data, n) for n, data in enumerate(events))
    library: Any = anthropic if name == "messages" else openai
    with pytest.raises(library.APIError, match="no server answers"):
        accumulated(name, raw)
