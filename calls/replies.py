"""Write an answer as a reply in one of three protocols, whole or as a stream.

`render` makes the body of the whole reply. `stream` turns this body into events, from which an SDK
rebuilds the body. A stream begins with `opening`. Until the answer is complete, `progress` is sent
every few seconds, because clients would otherwise time out. The three columns show what `opening`,
`progress` and `stream` send:

    chat completions  role | empty delta | reasoning, text and calls, finish_reason, [DONE]
    Responses         created | in_progress | items with their deltas, completed
    Messages          message_start | ping | blocks with their deltas, message_delta, message_stop

All ids of a reply share a suffix <x>. In the reply resp_<x>, the first tool call is the item
fc_<x>_0, and the text is the item msg_<x>. Only chat completions show the model's reasoning. The
other two protocols leave it out, because their vendors hide it by default.

Clients need the fields role, index, usage and created_at. They accept no null, except as `content`
beside tool calls. Anthropic's events need an `event:` line.
"""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

from calls.messages import AgentRequest, Find, Json, Message, Refusal, read_request, with_texts
from inference.io_struct import ModelResponse

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def error_body(error: Exception) -> Json:
    """Return the body of an error reply or event, in a form that all SDKs read. The inference
    server's address is hidden from the agent."""
    message = re.sub(r"https?://[^\s/]+", "the server", str(error))
    is_ours = getattr(error, "status", 500) >= 500
    code = getattr(error, "code", "")
    kind = "server_error" if is_ours else "invalid_request_error"
    about = {"message": message, "type": kind} | ({"code": code} if code else {})
    return {"type": "error", "error": about}


def split(message: Message) -> tuple[list[str], list[Json]]:
    text, calls = message["content"], message.get("tool_calls", [])
    return [text] if text or not calls else [], calls


class Reply:
    """Reads a request and writes its reply. Each protocol has a subclass."""

    id_prefix, history, end = "", "messages", b""

    def __init__(self, ask: AgentRequest, suffix: str) -> None:
        self.ask = ask
        self.suffix = suffix
        self.id = self.id_prefix + suffix
        self.created = int(time.time())
        self.input_len = 0  # tokens of the prompt

    @classmethod
    def parse(cls, body: Json, find: Find) -> AgentRequest:
        return read_request(body, find, cls.history)


class Chat(Reply):
    id_prefix, end = "chatcmpl-", b"data: [DONE]\n\n"

    def head(self, kind: str, **fields: Any) -> Json:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.ask.model}
        return head | fields

    def render(self, message: Message, response: ModelResponse) -> Json:
        message = with_texts(message)
        written = response.output_len
        if "tool_calls" in message:
            message["content"] = message["content"] or None
        choice = {"index": 0, "message": message, "finish_reason": response.stop_reason}
        usage = {
            "prompt_tokens": self.input_len,
            "completion_tokens": written,
            "total_tokens": self.input_len + written,
        }
        return self.head("chat.completion", choices=[choice], usage=usage)

    def chunk(self, delta: Json, **end: Any) -> Json:
        return self.head("chat.completion.chunk", choices=[{"index": 0, "delta": delta} | end])

    def opening(self) -> Json:
        return self.chunk({"role": "assistant"})

    def progress(self) -> Json:
        return self.chunk({})

    def stream(self, body: Json) -> Iterator[Json]:
        (choice,) = body["choices"]
        delta = {k: x for k, x in choice["message"].items() if k != "role" and x is not None}
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": k} | call for k, call in enumerate(calls)]
        yield self.chunk(delta)
        yield self.chunk({}, finish_reason=choice["finish_reason"]) | {"usage": body["usage"]}


class Responses(Reply):
    id_prefix, history = "resp_", "input"

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

    def render(self, message: Message, response: ModelResponse) -> Json:
        texts, calls = split(with_texts(message))
        output: list[Json] = []
        for text in texts:
            part = {"type": "output_text", "text": text, "annotations": []}
            item = {"id": f"msg_{self.suffix}", "type": "message", "role": "assistant"}
            output.append(item | {"content": [part]})
        for k, call in enumerate(calls):
            item = {"id": f"fc_{self.suffix}_{k}", "type": "function_call", "call_id": call["id"]}
            output.append(item | call["function"])
        usage: Json = {
            "input_tokens": self.input_len,
            "output_tokens": response.output_len,
            "total_tokens": self.input_len + response.output_len,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        done = [item | {"status": "completed"} for item in output]
        if response.stop_reason == "length":
            why = {"reason": "max_output_tokens"}
            return self.body("incomplete", done, usage=usage, incomplete_details=why)
        return self.body("completed", done, usage=usage)

    def opening(self) -> Json:
        return self.progress() | {"type": "response.created"}

    def progress(self) -> Json:
        return {"type": "response.in_progress", "response": self.body("in_progress", [])}

    def stream(self, body: Json) -> Iterator[Json]:
        for index, item in enumerate(body["output"]):
            at: Json = {"item_id": item["id"], "output_index": index}
            begun = item | {"status": "in_progress"}
            added = {"type": "response.output_item.added", "output_index": index}
            if item["type"] == "function_call":
                yield added | {"item": begun | {"arguments": ""}}
                kind, text = "response.function_call_arguments.delta", item["arguments"]
                yield {"type": kind, "delta": text} | at
            else:
                (part,) = item["content"]
                at |= {"content_index": 0}
                kind, text = "response.output_text.delta", part["text"]
                yield added | {"item": begun | {"content": []}}
                yield {"type": "response.content_part.added", "part": part | {"text": ""}} | at
                yield {"type": kind, "delta": text, "logprobs": []} | at
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
        yield {"type": f"response.{body['status']}", "response": body}


class Messages(Reply):
    id_prefix = "msg_"

    @classmethod
    def parse(cls, body: Json, find: Find) -> AgentRequest:
        ask = super().parse(body, find)
        if ask.messages[-1]["role"] == "assistant":
            raise Refusal("messages: the last is the assistant's; prefilling is not supported")
        return ask

    def body(self, content: list[Json], output_len: int, **fields: Any) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.ask.model,
            "usage": {"input_tokens": self.input_len, "output_tokens": output_len},
        } | fields

    def render(self, message: Message, response: ModelResponse) -> Json:
        texts, calls = split(message)
        content: list[Json] = [{"type": "text", "text": text} for text in texts]
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            content.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
        reason = STOP_REASONS[response.stop_reason]
        return self.body(content, response.output_len, stop_reason=reason)

    def opening(self) -> Json:
        return {"type": "message_start", "message": self.body([], 0)}

    def progress(self) -> Json:
        return {"type": "ping"}

    def stream(self, body: Json) -> Iterator[Json]:
        for index, block in enumerate(body["content"]):
            empty: Json = {"text": ""}
            delta = {"type": "text_delta", "text": block.get("text")}
            if block["type"] == "tool_use":
                empty = {"input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield {"type": "content_block_start", "index": index, "content_block": block | empty}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        end = {"stop_reason": body["stop_reason"]}
        yield {"type": "message_delta", "delta": end, "usage": body["usage"]}
        yield {"type": "message_stop"}


Protocol = type[Chat | Responses | Messages]
# path after /v1/ -> protocol
PROTOCOLS: dict[str, Protocol] = {
    "chat/completions": Chat,
    "responses": Responses,
    "messages": Messages,
}


def write_event(data: Json, number: int) -> bytes:
    """Encode an event as ASCII, because some clients take U+2028 for the end of a line."""
    kind = data.get("type", "")
    numbered = {"sequence_number": number} if kind.startswith("response.") else {}
    name = f"event: {kind}\n" if kind else ""
    return f"{name}data: {json.dumps(data | numbered)}\n\n".encode()
