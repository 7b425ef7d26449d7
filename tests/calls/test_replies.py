"""What an SDK builds from a stream is the whole reply, and a reply sent back is the message that
the tree keeps."""

import json
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from anthropic.types import RawMessageStreamEvent
from harness import HELLO, normal, said
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from calls.client import sdk_http
from calls.messages import AgentRequest, Message, canonical, read_request
from calls.replies import PROTOCOLS, error_body, write_event
from inference.io_struct import EngineError, ModelResponse

NAMES = list(PROTOCOLS)
CALLS: Any = (("f", {"a": "Zürich\u2028"}), ("g", {}))
MESSAGE = said("Let me see.", *CALLS, reasoning="hm")


def form_of(name: str) -> Any:
    """The form that writes the reply to a prompt of two tokens."""
    form = PROTOCOLS[name](AgentRequest(HELLO, model="m"), "ab12")
    form.input_len = 2
    return form


def rendered(form: Any, message: Message, reason: str) -> dict[str, Any]:
    """The body of a reply of three tokens."""
    reason = "tool_calls" if "tool_calls" in message and reason == "stop" else reason
    return form.render(message, ModelResponse([1, 2], [3, 4, 5], [-0.5] * 3, [0] * 3, reason))


def whole(name: str, message: Message = MESSAGE, reason: str = "stop") -> dict[str, Any]:
    """The body of the reply, as JSON and back."""
    return json.loads(json.dumps(rendered(form_of(name), message, reason)))


def streamed(name: str, message: Message = MESSAGE, why: str = "stop", progress: int = 2) -> bytes:
    """The reply as a stream, with this many events of progress."""
    form = form_of(name)
    waited = [form.progress() for _ in range(progress)]
    events = [form.opening(), *waited, *form.stream(rendered(form, message, why))]
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
    """A client of the protocol's official SDK, which gets `content` as every reply."""
    kind = "text/event-stream" if status == 200 else "application/json"
    http: Any = httpx2 if name == "messages" else sdk_http
    how: Any = {"content": content, "headers": {"content-type": kind}}
    transport = http.MockTransport(lambda _: http.Response(status, **how))
    options: Any = {"api_key": "k", "base_url": "http://proxy", "max_retries": 0}
    sdk: Any = anthropic.Anthropic if name == "messages" else openai.OpenAI
    return sdk(http_client=http.Client(transport=transport), **options)


def accumulated(name: str, raw: bytes) -> dict[str, Any]:
    """The reply that the SDK's own stream helper builds from a stream."""
    client = client_of(name, raw)
    if name == "chat/completions":
        with client.chat.completions.stream(model="m", messages=HELLO) as stream:
            try:
                return stream.get_final_completion().to_dict()
            except openai.LengthFinishReasonError as error:  # the SDK's error for a cut-off reply
                return error.completion.to_dict()
    if name == "responses":
        with client.responses.stream(model="m", input="hello") as stream:
            *_, last = (event for event in stream if event.type.startswith("response."))
            return last.response.to_dict()
    with client.messages.stream(model="m", messages=HELLO, max_tokens=9) as stream:
        return stream.get_final_message().to_dict()


ADDED = {"created", "created_at", "parsed_arguments", "parsed"}


def bare(value: Any) -> Any:
    """A reply without the parts that may differ in a stream: times, nulls, and what a helper
    adds."""
    if isinstance(value, dict):
        added = ADDED | ({"index"} if "function" in value else set())
        return {k: bare(v) for k, v in value.items() if v is not None and k not in added}
    return list(map(bare, value)) if isinstance(value, list) else value


def nulls(value: Any, path: str = "") -> list[str]:
    """The paths of all nulls in a reply."""
    if not isinstance(value, dict | list):
        return [path] if value is None else []
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return [null for key, item in pairs for null in nulls(item, f"{path}.{key}")]


def sent_back(name: str, reply: dict[str, Any]) -> Message:
    """A reply in normal form, after a client has sent it back."""
    if name == "chat/completions":
        return normal(reply["choices"][0]["message"])
    if name == "responses":
        return read_request({"messages": reply["output"]}, lambda _: None).messages[0]
    return normal({"role": "assistant", "content": reply["content"]})


TYPES: dict[str, tuple[TypeAdapter, TypeAdapter]] = {
    "chat/completions": (TypeAdapter(ChatCompletion), TypeAdapter(ChatCompletionChunk)),
    "responses": (TypeAdapter(Response), TypeAdapter(ResponseStreamEvent)),
    "messages": (TypeAdapter(anthropic.types.Message), TypeAdapter(RawMessageStreamEvent)),
}
ARGUMENTS = st.dictionaries(st.text(), st.text())
MESSAGES = st.builds(
    lambda text, reasoning, calls: said(text, *calls, reasoning=reasoning),
    st.text(),
    st.text(),
    st.lists(st.tuples(st.sampled_from("fg"), ARGUMENTS), max_size=2),
)


@settings(max_examples=40)
@given(st.sampled_from(NAMES), MESSAGES, st.sampled_from(["stop", "length"]), st.integers(0, 3))
def test_a_stream_is_the_whole_reply(
    name: str, message: dict[str, Any], stop_reason: str, progress: int
) -> None:
    """From a stream, the SDKs' helpers build the whole reply, however many events of progress it
    has. Reply and events have all fields that the types of the installed SDKs require."""
    raw, reply = streamed(name, message, stop_reason, progress), whole(name, message, stop_reason)
    assert bare(accumulated(name, raw)) == bare(reply)
    # The SDKs have no types for these two.
    events = [data for _, data in frames_of(raw) if data not in ("[DONE]", {"type": "ping"})]
    assert nulls(events) == []
    complete, event = TYPES[name]
    complete.validate_python(reply)
    for data in events:
        event.validate_python(data)


@given(st.sampled_from(NAMES), MESSAGES)
def test_a_reply_sent_back_is_the_message_that_was_kept(name: str, message: dict[str, Any]) -> None:
    """In every protocol, a client that sends a reply back sends the message that the tree keeps."""
    assert canonical(sent_back(name, whole(name, message))) == canonical(message)


# ---- the keys and events that strict clients read


def test_a_chat_completion_has_all_that_strict_clients_read() -> None:
    """A chat completion has `id`, `model`, `object`, `index` and `usage`, and only its `content`
    may be null."""
    reply = whole("chat/completions", said("hi"), "length")
    assert reply.pop("created") > 0
    head = {"id": "chatcmpl-ab12", "object": "chat.completion", "model": "m"}
    message = {"role": "assistant", "content": "hi"}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert reply == head | {"choices": [choice], "usage": usage}
    only_calls = whole("chat/completions", said("", *CALLS))
    assert nulls(only_calls) == [".choices.0.message.content"]
    assert only_calls["choices"][0]["finish_reason"] == "tool_calls"


def test_a_response_has_all_that_strict_clients_read() -> None:
    """A reply in OpenAI's Responses protocol has `created_at`, `status` and `usage`."""
    reply = whole("responses")
    assert reply["created_at"] > 0
    ids = [(item["id"], item.get("call_id")) for item in reply["output"]]
    calls = [("fc_ab12_0", "call_ab12_0"), ("fc_ab12_1", "call_ab12_1")]
    assert ids == [("msg_ab12", None), *calls]
    assert (reply["status"], reply["usage"]["output_tokens"]) == ("completed", 3)
    assert nulls(reply) == []
    cut = whole("responses", said("hi"), "length")
    assert cut["status"] == "incomplete"
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_message_has_all_that_strict_clients_read() -> None:
    """A reply in Anthropic's Messages protocol has `role`, `type`, `id`, `usage` and
    `stop_reason`."""
    head = {"id": "msg_ab12", "type": "message", "role": "assistant", "model": "m"}
    use = {"type": "tool_use", "id": "call_ab12_0", "name": "f", "input": {"a": "Zürich\u2028"}}
    uses = [use, use | {"id": "call_ab12_1", "name": "g", "input": {}}]
    content = [{"type": "text", "text": "Let me see."}, *uses]
    end = {"usage": {"input_tokens": 2, "output_tokens": 3}, "stop_reason": "tool_use"}
    assert whole("messages") == head | {"content": content} | end
    reasons = [whole("messages", said("hi"), end)["stop_reason"] for end in ("stop", "length")]
    assert reasons == ["end_turn", "max_tokens"]


def test_the_events_of_a_chat_completion() -> None:
    """The stream begins with the role, and ends with finish_reason, usage and [DONE]."""
    frames = list(frames_of(streamed("chat/completions")))
    assert {event for event, _ in frames} == {""}
    *chunks, done = [data for _, data in frames]
    assert done == "[DONE]"
    assert chunks[-1]["usage"]["total_tokens"] == 5
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    content = ["content", "reasoning_content", "tool_calls"]
    assert [sorted(delta) for delta in deltas] == [["role"], [], [], content, []]
    assert [call["index"] for call in deltas[3]["tool_calls"]] == [0, 1]
    ends = [chunk["choices"][0].get("finish_reason") for chunk in chunks]
    assert ends == [None] * 4 + ["tool_calls"]
    heads = {(chunk["id"], chunk["object"], chunk["choices"][0]["index"]) for chunk in chunks}
    assert heads == {("chatcmpl-ab12", "chat.completion.chunk", 0)}


def test_the_events_of_a_response() -> None:
    """Each item is added, gets its text, and is done. The events are numbered."""
    frames = list(frames_of(streamed("responses")))
    added = ["output_item.added", "content_part.added"]
    assert [event.removeprefix("response.") for event, _ in frames] == [
        *["created", "in_progress", "in_progress"],
        *[*added, "output_text.delta", "output_item.done"],
        *["output_item.added", "function_call_arguments.delta", "output_item.done"] * 2,
        "completed",
    ]
    assert all(data["type"] == event for event, data in frames)
    assert [data["sequence_number"] for _, data in frames] == list(range(len(frames)))
    places = {data["item"]["id"]: data["output_index"] for _, data in frames if "item" in data}
    assert places == {"msg_ab12": 0, "fc_ab12_0": 1, "fc_ab12_1": 2}


def test_the_events_of_a_message() -> None:
    """Every event has an `event:` line, which Anthropic's client needs, and only one content block
    is open at a time."""
    frames = list(frames_of(streamed("messages")))
    assert all(data["type"] == event for event, data in frames)
    events = [data.get("delta", data).get("type", event) for event, data in frames]
    begin, end = "content_block_start", "content_block_stop"
    kinds = ["text_delta", *["input_json_delta"] * 2]
    blocks = [event for kind in kinds for event in (begin, kind, end)]
    assert events == ["message_start", "ping", "ping", *blocks, "message_delta", "message_stop"]
    assert [data["index"] for event, data in frames if event == begin] == [0, 1, 2]
    assert frames[0][1]["message"]["usage"] == {"input_tokens": 2, "output_tokens": 0}


# ---- errors


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("status", "error"),
    [(400, "BadRequestError"), (401, "AuthenticationError"), (404, "NotFoundError")],
)
def test_an_error_is_raised_by_every_sdk(name: str, status: int, error: str) -> None:
    """One form serves all: each SDK raises the exception of the status, with the message."""
    body = error_body(EngineError("stop: a string is needed", status))
    library: Any = anthropic if name == "messages" else openai
    client = client_of(name, json.dumps(body).encode(), status)
    holders = {"chat/completions": "chat.completions", "responses": "responses"}
    create = attrgetter(holders.get(name, "messages"))(client).create
    fields = {"input": "hello"} if name == "responses" else {"messages": HELLO, "max_tokens": 9}
    with pytest.raises(getattr(library, error), match="stop: a string is needed"):
        create(model="m", **fields)


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_that_breaks_off_is_an_error(name: str) -> None:
    """An error after the first byte is an event, which the SDK raises."""
    form = form_of(name)
    events = [form.opening(), form.progress(), error_body(EngineError("no server answers", 503))]
    raw = b"".join(write_event(data, n) for n, data in enumerate(events))
    library: Any = anthropic if name == "messages" else openai
    with pytest.raises(library.APIError, match="no server answers"):
        accumulated(name, raw)
