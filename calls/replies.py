"""Write an answer as a reply in one of three protocols, whole or as a stream.

`render` makes the body of the whole reply, and `stream` makes events from this body, so what an SDK
builds from the events equals the body. Nothing is streamed while the model writes. A reply that
takes long gets the events of `opening`, and then `progress` every few seconds, because clients time
out on silence and on comments alone:

    chat completions  role | empty delta | reasoning, text, calls, finish_reason, usage, [DONE]
    Responses         created, in_progress | in_progress | items with their deltas, completed
    Messages          message_start | ping | blocks with their deltas, message_delta, message_stop

All ids of a reply have one suffix: chatcmpl-<x> has the calls call_<x>_0 and so on, resp_<x> has
the items rs_<x> (reasoning), msg_<x> (text) and fc_<x>_0.

Clients are strict: role, index, usage and created_at must be there; a key that is null must not,
except `content` beside tool calls; Anthropic's events need an `event:` line. Annotations and counts
of cached tokens are empty or 0, and the signature of reasoning is the reply's id.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from calls.messages import (
    AgentRequest,
    Json,
    Message,
    parse_anthropic,
    parse_chat,
    parse_responses,
    with_texts,
)
from inference.io_struct import ModelResponse

ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
ERRORS |= {429: "rate_limit_error"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@dataclass(frozen=True)
class Answer:
    """A complete answer: the sampled tokens, and the message that they are."""

    response: ModelResponse
    message: Message
    stopped_by: str = ""  # the stop string that ended it


def openai_error(status: int, message: str, code: str = "") -> Json:
    kind = ERRORS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind} | ({"code": code} if code else {})}


class Reply:
    """What writes a reply: `render` makes its body, and `opening`, `progress` and `stream` make the
    events of a stream."""

    id_prefix, end = "", b""
    error = staticmethod(openai_error)

    def __init__(self, ask: AgentRequest, suffix: str, input_len: int) -> None:
        self.ask, self.suffix, self.input_len = ask, suffix, input_len
        self.id, self.created = self.id_prefix + suffix, int(time.time())


class Chat(Reply):
    id_prefix, end = "chatcmpl-", b"data: [DONE]\n\n"
    parse = staticmethod(parse_chat)

    def head(self, kind: str, **fields: Any) -> Json:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.ask.model}
        return head | fields

    def render(self, answer: Answer) -> Json:
        message, written = with_texts(answer.message), answer.response.output_len
        if "tool_calls" in message:
            message["content"] = message["content"] or None
        choice = {"index": 0, "message": message, "finish_reason": answer.response.stop_reason}
        usage = {
            "prompt_tokens": self.input_len,
            "completion_tokens": written,
            "total_tokens": self.input_len + written,
        }
        return self.head("chat.completion", choices=[choice], usage=usage)

    def delta(self, delta: Json, **end: Any) -> Json:
        choice = {"index": 0, "delta": delta} | end
        return self.head("chat.completion.chunk", choices=[choice])

    def opening(self) -> Iterator[Json]:
        yield self.delta({"role": "assistant"})

    def progress(self) -> Json:
        return self.delta({})

    def stream(self, body: Json) -> Iterator[Json]:
        (choice,) = body["choices"]
        message = choice["message"]
        for key in ("reasoning_content", "content"):
            if message.get(key) is not None:
                yield self.delta({key: message[key]})
        for k, call in enumerate(message.get("tool_calls", [])):
            yield self.delta({"tool_calls": [{"index": k} | call]})
        yield self.delta({}, finish_reason=choice["finish_reason"])
        if self.ask.stream_usage:
            yield self.head("chat.completion.chunk", choices=[], usage=body["usage"])


class Responses(Reply):
    id_prefix = "resp_"
    parse = staticmethod(parse_responses)

    def body(self, status: str, output: list[Json], **fields: Any) -> Json:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "model": self.ask.model,
            "tool_choice": "auto",
            "tools": [],
            "parallel_tool_calls": True,
            "output": output,
        } | fields

    def render(self, answer: Answer) -> Json:
        said, output = with_texts(answer.message), list[Json]()
        calls = said.get("tool_calls", [])
        if thought := said.get("reasoning_content"):
            part: Json = {"type": "reasoning_text", "text": thought}
            item: Json = {"type": "reasoning", "summary": [], "content": [part]}
            output.append({"id": f"rs_{self.suffix}"} | item)
        if said["content"] or not calls:
            part = {"type": "output_text", "text": said["content"], "annotations": []}
            item = {"type": "message", "role": "assistant", "content": [part]}
            output.append({"id": f"msg_{self.suffix}"} | item)
        for k, call in enumerate(calls):
            item = {"type": "function_call", "call_id": call["id"]} | call["function"]
            output.append({"id": f"fc_{self.suffix}_{k}"} | item)
        written = answer.response.output_len
        usage: Json = {
            "input_tokens": self.input_len,
            "output_tokens": written,
            "total_tokens": self.input_len + written,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        done = [item | {"status": "completed"} for item in output]
        if answer.response.stop_reason == "length":
            why = {"reason": "max_output_tokens"}
            return self.body("incomplete", done, usage=usage, incomplete_details=why)
        return self.body("completed", done, usage=usage)

    def opening(self) -> Iterator[Json]:
        yield {"type": "response.created", "response": self.body("in_progress", [])}
        yield self.progress()

    def progress(self) -> Json:
        return {"type": "response.in_progress", "response": self.body("in_progress", [])}

    def stream(self, body: Json) -> Iterator[Json]:
        for index, item in enumerate(body["output"]):
            begun = item | {"status": "in_progress"}
            at: Json = {"item_id": item["id"], "output_index": index}
            added = {"type": "response.output_item.added", "output_index": index}
            if item["type"] == "function_call":
                yield added | {"item": begun | {"arguments": ""}}
                arguments, kind = item["arguments"], "response.function_call_arguments"
                yield {"type": f"{kind}.delta", "delta": arguments} | at
                yield {"type": f"{kind}.done", "arguments": arguments, "name": item["name"]} | at
            else:
                (part,) = item["content"]
                at |= {"content_index": 0}
                kind, text = f"response.{part['type']}", part["text"]
                yield added | {"item": begun | {"content": []}}
                yield {"type": "response.content_part.added", "part": part | {"text": ""}} | at
                yield {"type": f"{kind}.delta", "delta": text, "logprobs": []} | at
                yield {"type": f"{kind}.done", "text": text, "logprobs": []} | at
                yield {"type": "response.content_part.done", "part": part} | at
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
        yield {"type": f"response.{body['status']}", "response": body}

    @staticmethod
    def error(status: int, message: str, code: str = "") -> Json:
        event = {"type": "error", "code": str(status), "message": message}
        return event | openai_error(status, message, code)


class Messages(Reply):
    id_prefix = "msg_"
    parse = staticmethod(parse_anthropic)

    def body(self, content: list[Json], output_len: int, **fields: Any) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.ask.model,
            "usage": {"input_tokens": self.input_len, "output_tokens": output_len},
        } | fields

    def render(self, answer: Answer) -> Json:
        said, response, content = answer.message, answer.response, list[Json]()
        calls = said.get("tool_calls", [])
        if thought := said.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": thought, "signature": self.id})
        if said["content"] or not calls:
            content.append({"type": "text", "text": said["content"]})
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            content.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
        end = {"stop_reason": STOP_REASONS[response.stop_reason]}
        if answer.stopped_by and response.stop_reason == "stop":
            end = {"stop_reason": "stop_sequence", "stop_sequence": answer.stopped_by}
        return self.body(content, response.output_len, **end)

    def opening(self) -> Iterator[Json]:
        yield {"type": "message_start", "message": self.body([], 0)}

    def progress(self) -> Json:
        return {"type": "ping"}

    def stream(self, body: Json) -> Iterator[Json]:
        for index, block in enumerate(body["content"]):
            texts = [key for key in ("thinking", "signature", "text") if key in block]
            empty: Json = dict.fromkeys(texts, "")
            deltas = [{"type": f"{key}_delta", key: block[key]} for key in texts]
            if block["type"] == "tool_use":
                empty = {"input": {}}
                deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
            yield {"type": "content_block_start", "index": index, "content_block": block | empty}
            for delta in deltas:
                yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        end = {key: body[key] for key in ("stop_reason", "stop_sequence") if key in body}
        yield {"type": "message_delta", "delta": end, "usage": body["usage"]}
        yield {"type": "message_stop"}

    @staticmethod
    def error(status: int, message: str, code: str = "") -> Json:
        error = openai_error(status, message)["error"]
        kind = error["type"].replace("server_error", "api_error")
        return {"type": "error", "error": error | {"type": kind}}


Protocol = type[Chat | Responses | Messages]
# path after /v1/ -> protocol
PROTOCOLS: dict[str, Protocol] = {
    "chat/completions": Chat,
    "responses": Responses,
    "messages": Messages,
}


def write_event(data: Json, number: int) -> bytes:
    """A server-sent event, in ASCII: to some clients U+2028 ends a line."""
    kind = data.get("type", "")
    numbered = {"sequence_number": number} if kind.startswith(("response.", "error")) else {}
    name = f"event: {kind}\n" if kind else ""
    return f"{name}data: {json.dumps(data | numbered)}\n\n".encode()
