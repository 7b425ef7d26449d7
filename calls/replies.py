"""Write answers as a reply in one of three protocols, whole or as a stream.

`render` makes the body of the whole reply, and `stream` makes events from this body, so what an SDK
builds from the events equals the body. Nothing is streamed while the model writes. A reply that
takes long gets the events of `opening`, and then `progress` every few seconds, because clients time
out on silence and on comments alone:

    chat completions  role | empty delta | reasoning, text, calls, finish_reason, usage, [DONE]
    Responses         created, in_progress | in_progress | items with their deltas, completed
    Messages          message_start | ping | blocks with their deltas, message_delta, message_stop

Ids of parts are made from that of the interaction: chatcmpl-<x> has the calls call_<x>_0 and so on,
resp_<x> has the items rs_<x> (reasoning), msg_<x> (text) and fc_<x>_0.

Clients are strict: role, index, usage and created_at must be there; a key that is null must not,
except `content` beside tool calls; Anthropic's events need an `event:` line. Annotations and counts
of cached tokens are empty or 0, and the signature of reasoning is the interaction's id.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from calls.messages import (
    AgentRequest,
    Json,
    Message,
    normalise,
    parse_anthropic,
    parse_chat,
    parse_responses,
)
from calls.tools import Parsed
from inference.io_struct import ModelResponse

ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
ERRORS |= {429: "rate_limit_error"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@dataclass(frozen=True)
class Answer:
    """One complete answer: the sampled tokens, and what they say."""

    interaction_id: str
    response: ModelResponse
    parsed: Parsed
    token_texts: list[str] = field(default_factory=list)  # if the agent wants logprobs
    stopped_by: str = ""  # the stop string that ended it

    @property
    def suffix(self) -> str:
        return self.interaction_id.replace("-", "_", 1).partition("_")[2]

    @property
    def tool_calls(self) -> list[Json]:
        """The calls in the form of chat completions."""
        calls = enumerate(self.parsed.calls)
        return [
            {"id": f"call_{self.suffix}_{k}", "type": "function", "function": call._asdict()}
            for k, call in calls
        ]

    @property
    def message(self) -> Message:
        """The message that the conversation tree keeps."""
        said = {"content": self.parsed.text, "reasoning_content": self.parsed.reasoning}
        return normalise({"role": "assistant", "tool_calls": self.tool_calls} | said)

    @property
    def finish_reason(self) -> str:
        if self.response.stop_reason == "length":
            return "length"
        return "tool_calls" if self.parsed.calls else "stop"

    @property
    def logprobs(self) -> list[Json]:
        """In OpenAI's form; a token that is a part of a character has no bytes."""
        pairs = zip(self.token_texts, self.response.output_logprobs)
        return [
            {
                "token": text,
                "logprob": logprob,
                "bytes": [] if "\ufffd" in text else list(text.encode()),
                "top_logprobs": [],
            }
            for text, logprob in pairs
        ]


def without_empty(**fields: Any) -> Json:
    return {name: value for name, value in fields.items() if value}


def openai_error(status: int, message: str, code: str = "") -> Json:
    kind = ERRORS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind} | without_empty(code=code)}


class Chat:
    """`head` begins a reply, `render` makes its body; `opening`, `progress` and `stream` make the
    events of a stream."""

    error = staticmethod(openai_error)

    id_prefix = "chatcmpl-"
    end = b"data: [DONE]\n\n"
    parse = staticmethod(parse_chat)

    def __init__(self, ask: AgentRequest, interaction_id: str, input_len: int) -> None:
        self.ask = ask
        head = {"id": interaction_id, "created": int(time.time()), "model": ask.model}
        self.head = head | {"object": "chat.completion"}

    def render(self, answers: list[Answer]) -> Json:
        choices = []
        for index, answer in enumerate(answers):
            parsed, calls = answer.parsed, answer.tool_calls
            content = None if calls and not parsed.text else parsed.text
            message = {"role": "assistant", "content": content}
            message |= without_empty(reasoning_content=parsed.reasoning, tool_calls=calls)
            choice = {"index": index, "message": message, "finish_reason": answer.finish_reason}
            choices.append(choice | without_empty(logprobs=without_empty(content=answer.logprobs)))
        read = answers[0].response.input_len  # all share the prompt
        written = sum(answer.response.output_len for answer in answers)
        usage = {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
        }
        return self.head | {"choices": choices, "usage": usage}

    def chunk(self, *choices: Json, **more: Any) -> Json:
        return self.head | {"object": "chat.completion.chunk", "choices": [*choices]} | more

    def delta(self, index: int, **delta: Any) -> Json:
        return self.chunk({"index": index, "delta": delta})

    def opening(self) -> Iterator[Json]:
        for index in range(self.ask.n):
            yield self.delta(index, role="assistant")

    def progress(self) -> Json:
        return self.delta(0)

    def stream(self, body: Json) -> Iterator[Json]:
        for choice in body["choices"]:
            message, index = choice["message"], choice["index"]
            for key in ("reasoning_content", "content"):
                if message.get(key) is not None:
                    yield self.delta(index, **{key: message[key]})
            for k, call in enumerate(message.get("tool_calls", [])):
                yield self.delta(index, tool_calls=[{"index": k} | call])
            end = {key: choice[key] for key in choice if key != "message"}
            yield self.chunk({"delta": {}} | end)
        if self.ask.stream_usage:
            yield self.chunk(usage=body["usage"])


class Responses:
    id_prefix = "resp_"
    end = b""
    parse = staticmethod(parse_responses)

    def __init__(self, ask: AgentRequest, interaction_id: str, input_len: int) -> None:
        self.ask = ask
        choice: Any = ask.tool_choice
        if choice not in ("auto", "none", "required"):
            choice = {"type": "function", "name": choice}
        self.head: Json = {
            "id": interaction_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": ask.model,
            "tool_choice": choice,
            "tools": [],
            "parallel_tool_calls": True,
            "metadata": {},
            "output": [],
        }

    def render(self, answers: list[Answer]) -> Json:
        (answer,) = answers
        parsed, output = answer.parsed, list[Json]()
        if parsed.reasoning:
            content: Json = {"type": "reasoning_text", "text": parsed.reasoning}
            output.append({"id": "rs_", "type": "reasoning", "summary": [], "content": [content]})
        if parsed.text or not parsed.calls:
            content = {"type": "output_text", "text": parsed.text, "annotations": []}
            content |= without_empty(logprobs=answer.logprobs)
            output.append(
                {"id": "msg_", "type": "message", "role": "assistant", "content": [content]}
            )
        for item in output:
            item["id"] += answer.suffix
        for call in answer.tool_calls:
            item = {"id": f"fc_{call['id'][5:]}", "type": "function_call", "call_id": call["id"]}
            output.append(item | call["function"])
        read, written = answer.response.input_len, answer.response.output_len
        usage: Json = {
            "input_tokens": read,
            "output_tokens": written,
            "total_tokens": read + written,
        }
        usage |= {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}
        usage |= {"output_tokens_details": {"reasoning_tokens": 0}}
        done = [item | {"status": "completed"} for item in output]
        body = self.head | {"status": "completed", "output": done, "usage": usage}
        if answer.finish_reason == "length":
            body |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return body

    def opening(self) -> Iterator[Json]:
        yield {"type": "response.created", "response": self.head}
        yield self.progress()

    def progress(self) -> Json:
        return {"type": "response.in_progress", "response": self.head}

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
                at["content_index"] = 0
                kind, logprobs = f"response.{part['type']}", part.get("logprobs", [])
                empty = {key: part[key] for key in part if key != "logprobs"} | {"text": ""}
                yield added | {"item": begun | {"content": []}}
                yield {"type": "response.content_part.added", "part": empty} | at
                yield {"type": f"{kind}.delta", "delta": part["text"], "logprobs": []} | at
                yield {"type": f"{kind}.done", "text": part["text"], "logprobs": logprobs} | at
                yield {"type": "response.content_part.done", "part": part} | at
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
        yield {"type": f"response.{body['status']}", "response": body}

    @staticmethod
    def error(status: int, message: str, code: str = "") -> Json:
        event = {"type": "error", "code": str(status), "message": message}
        return event | openai_error(status, message, code)


def anthropic_error(status: int, message: str, code: str = "") -> Json:
    error = openai_error(status, message)["error"]
    kind = error["type"].replace("server_error", "api_error")
    return {"type": "error", "error": error | {"type": kind}}


class Messages:
    id_prefix = "msg_"
    end = b""
    parse = staticmethod(parse_anthropic)
    error = staticmethod(anthropic_error)

    def __init__(self, ask: AgentRequest, interaction_id: str, input_len: int) -> None:
        self.ask = ask
        self.head: Json = {"id": interaction_id, "type": "message", "role": "assistant"}
        usage = {"input_tokens": input_len, "output_tokens": 0}
        self.head |= {"content": [], "model": ask.model, "usage": usage}

    def render(self, answers: list[Answer]) -> Json:
        (answer,) = answers
        parsed, content = answer.parsed, list[Json]()
        if parsed.reasoning:
            thought = {"type": "thinking", "thinking": parsed.reasoning}
            content.append(thought | {"signature": answer.interaction_id})
        if parsed.text or not parsed.calls:
            content.append({"type": "text", "text": parsed.text})
        for call in answer.tool_calls:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            content.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
        stop = answer.stopped_by if answer.finish_reason == "stop" else ""
        reason = "stop_sequence" if stop else STOP_REASONS[answer.finish_reason]
        usage = self.head["usage"] | {"output_tokens": answer.response.output_len}
        end = {"stop_reason": reason} | without_empty(stop_sequence=stop)
        return self.head | {"content": content, "usage": usage} | end

    def opening(self) -> Iterator[Json]:
        yield {"type": "message_start", "message": self.head}

    def progress(self) -> Json:
        return {"type": "ping"}

    def stream(self, body: Json) -> Iterator[Json]:
        for index, block in enumerate(body["content"]):
            if block["type"] == "tool_use":
                empty: Json = {"input": {}}
                deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
            elif block["type"] == "thinking":
                empty = {"thinking": "", "signature": ""}
                deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
                deltas += [{"type": "signature_delta", "signature": block["signature"]}]
            else:
                empty, deltas = {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
            yield {"type": "content_block_start", "index": index, "content_block": block | empty}
            for delta in deltas:
                yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        end = {key: body[key] for key in ("stop_reason", "stop_sequence") if key in body}
        yield {"type": "message_delta", "delta": end, "usage": body["usage"]}
        yield {"type": "message_stop"}


Protocol = type[Chat] | type[Responses] | type[Messages]
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
