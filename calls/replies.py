"""Write an answer as a reply in one of three protocols, either whole or as a stream of events.

An `Answer` holds the sampled tokens of one answer, and the text, reasoning and tool calls that the tokens contain. For
each protocol, a function `render_...` returns the body of a whole reply. A subclass of `Stream` returns the events of a
streamed reply. From the events of a stream, the official SDKs build a reply that equals the reply to a request without
a stream. The three protocols define these events, in this order:

    Chat completions: a chunk with the role; chunks with reasoning and text; a chunk for each call; a chunk with
        finish_reason; a chunk with the token counts, if the agent requested them; [DONE].
    Responses: response.created; response.in_progress; for each item output_item.added, deltas, output_item.done;
        response.completed, or response.incomplete if a length limit ended the answer.
    Messages: message_start; for each block content_block_start, deltas, content_block_stop; message_delta with
        stop_reason and usage; message_stop.

Streams. A `Stream` returns the events of one answer as bytes. `start` returns the events before the first token. While
the answer grows, `grow` receives the parts that no later token can change (`certain` in tools.py). `grow` returns the
events for the text that was added since the last call of `grow`. When the answer is complete, `finish` returns the
events that send the remaining parts of the answer, such as the tool calls. When all answers of a reply are complete,
`end` returns the reply's last events.

    start -> message_start      grow("Let") -> content_block_start, delta "Let"      grow("Let me") -> delta " me"

Ids. An agent can refer to a tool call or an item by its id. The id of a tool call or an item contains the interaction's
id. The tool calls of chatcmpl-<x> have the ids call_<x>_0 and call_<x>_1. The items of resp_<x> are rs_<x> (reasoning),
msg_<x> (text) and fc_<x>_0 (tool call).

Strict clients. A reply has the keys role, index, usage and created_at if its protocol defines them, because some
clients fail without these keys. Some clients fail if a key is null, so keys without a value are left out. Only the key
`content` of a chat message with tool calls and without text is null. Anthropic's clients need an `event:` line, so
every event of Anthropic's protocol has this line.

Annotations, citations, refusals and counts of cached tokens are not supported: these fields are empty or 0. The
signature of a reasoning block is the interaction's id.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from calls.messages import (
    AgentRequest,
    Message,
    normalise,
    parse_anthropic,
    parse_chat,
    parse_responses,
)
from calls.tools import Parsed
from inference.io_struct import ModelResponse

ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
# kind of part -> (prefix of the delta's type, key of the delta's text), both in Anthropic's protocol
BLOCK_DELTAS = {
    "reasoning": ("thinking", "thinking"),
    "text": ("text", "text"),
    "call": ("input_json", "partial_json"),
}
STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}  # finish_reason -> stop_reason
Part = tuple[str, Any]  # ("reasoning", text), ("text", text) or ("call", tool call)


@dataclass(frozen=True)
class Answer:
    """One complete answer: the sampled tokens, and the text, reasoning and tool calls that the tokens contain."""

    interaction_id: str
    response: ModelResponse
    parsed: Parsed
    token_texts: list[str] = field(
        default_factory=list
    )  # text of each sampled token, if the agent requested logprobs
    stopped_by: str = ""  # the stop string that ended the answer, or ""

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Return the tool calls in the form of chat completions, with ids. The arguments of a call are JSON text."""
        x = suffix_of(self.interaction_id)
        calls = enumerate(self.parsed.calls)
        return [
            {"id": f"call_{x}_{k}", "type": "function", "function": call._asdict()}
            for k, call in calls
        ]

    @property
    def message(self) -> Message:
        """Return the answer's message in normal form.

        The conversation tree compares the message of an answer with the messages of later requests.
        """
        said = {
            "content": self.parsed.text,
            "reasoning_content": self.parsed.reasoning,
            "tool_calls": self.tool_calls,
        }
        return normalise({"role": "assistant", **said})

    @property
    def finish_reason(self) -> str:
        """Return "length" if a limit or an abort ended the answer, "tool_calls" if there are calls, else "stop"."""
        if self.response.stop_reason in ("length", "abort"):
            return "length"
        return "tool_calls" if self.parsed.calls else "stop"

    @property
    def logprobs(self) -> list[dict[str, Any]]:
        """Return the logprobs of the sampled tokens in OpenAI's form.

        If a token is only a part of a character, the token's `bytes` are [].
        """
        entries = []
        for text, logprob in zip(self.token_texts, self.response.output_logprobs, strict=False):
            known_bytes = [] if "\ufffd" in text else list(text.encode())
            entries.append(
                {"token": text, "logprob": logprob, "bytes": known_bytes, "top_logprobs": []}
            )
        return entries

    @property
    def parts(self) -> list[Part]:
        """Return the reasoning, the text and the tool calls, in this order.

        An answer with neither text nor tool calls gets an empty text part.
        """
        empty: list[Part] = [] if self.parsed.text or self.parsed.calls else [("text", "")]
        return parts_of(self.parsed) + empty + [("call", call) for call in self.tool_calls]


def parts_of(parsed: Parsed) -> list[Part]:
    """Return the reasoning and the text as parts, without empty parts."""
    return [part for part in (("reasoning", parsed.reasoning), ("text", parsed.text)) if part[1]]


def suffix_of(item_id: str) -> str:
    """Return an id without its prefix, such as "ab_0" for "call_ab_0", or "ab" for "chatcmpl-ab" and "resp_ab"."""
    return item_id.replace("-", "_", 1).partition("_")[2]


def without_empty(**fields: Any) -> dict[str, Any]:
    """Return the fields as a dict without empty values and None, because some clients reject keys that are null."""
    return {name: value for name, value in fields.items() if value}


def event(data: dict[str, Any]) -> bytes:
    """Return a server-sent event, such as b'event: ping\\ndata: {...}\\n\\n' if `data` has the type "ping".

    If `data` has no type, the event has no `event:` line. The JSON is ASCII, because some clients treat a character
    such as U+2028 as the end of a line.
    """
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n".encode()


class Stream:
    """Writes the events of one answer as bytes. For each part, there are events that begin the part, events with pieces
    of its text, and events that end the part.

    `index` is the answer's position among the n answers of a chat completion.
    """

    def __init__(self, ask: AgentRequest, interaction_id: str, index: int = 0) -> None:
        self.ask, self.interaction_id, self.index = ask, interaction_id, index
        self.created = int(time.time())
        # Attributes that change after `__init__`:
        self.position = 0  # index of the open part or, if no part is open, of the next part
        self.sent: str | None = None  # the sent text of the open part; None if no part is open
        self.logprobs: list[
            dict[str, Any]
        ] = []  # logprobs of the sampled tokens; set when the answer is complete

    def start(self, input_len: int) -> bytes:
        """Return the events before the first token. `input_len` is the number of tokens in the prompt."""
        raise NotImplementedError

    def grow(self, parts: list[Part], whole: bool = False) -> bytes:
        """Return the events that send the text that was added since the last call, or b"" if no text was added.

        `parts` are all parts of the answer so far, including those already sent. If the answer is complete, `whole` is
        true. If `whole` is false, the last part stays open for more text.
        """
        frames = b""
        for position in range(self.position, len(parts)):
            part, value = parts[position]
            text = value["function"]["arguments"] if part == "call" else value
            if self.sent is None:
                frames += self._open(part, value)
            if text != self.sent:
                frames += self._piece(part, value, text[len(self.sent or "") :])
                self.sent = text
            if whole or position < len(parts) - 1:
                frames += self._close(part, value)
                self.position, self.sent = position + 1, None
        return frames

    def finish(self, answer: Answer) -> bytes:
        """Return the events that send the unsent parts of a complete answer."""
        self.logprobs = answer.logprobs
        return self.grow(answer.parts, whole=True)

    def end(self, answers: list[Answer]) -> bytes:
        """Return the last events of a reply whose answers are all complete."""
        raise NotImplementedError

    def error(self, status: int, message: str) -> bytes:
        """Return the event that ends a stream with an error."""
        return event(openai_error(status, message))

    # For each protocol, a subclass defines the events of one part:

    def _open(self, part: str, value: Any) -> bytes:
        """Return the events that begin a part."""
        return b""

    def _piece(self, part: str, value: Any, piece: str) -> bytes:
        """Return the event that sends a piece of a part.

        A tool call is sent as one piece, because every client accepts a whole tool call.
        """
        raise NotImplementedError

    def _close(self, part: str, value: Any) -> bytes:
        """Return the events that end a part."""
        return b""


def openai_error(status: int, message: str, code: str = "") -> dict[str, Any]:
    """Return the body of an error in OpenAI's protocols. `code` is OpenAI's code for the error, or ""."""
    kind = ERRORS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind} | without_empty(code=code)}


def anthropic_error(status: int, message: str, code: str = "") -> dict[str, Any]:
    """Return the body of an error in Anthropic's protocol, which has no codes."""
    error = openai_error(status, message)["error"]
    return {
        "type": "error",
        "error": error | {"type": error["type"].replace("server_error", "api_error")},
    }


# Chat completions


def render_chat(ask: AgentRequest, answers: list[Answer]) -> dict[str, Any]:
    """Return the body of a chat completion, with one choice for each answer."""
    choices = []
    for index, answer in enumerate(answers):
        content = None if answer.parsed.calls and not answer.parsed.text else answer.parsed.text
        message = {"role": "assistant", "content": content}
        message |= without_empty(
            reasoning_content=answer.parsed.reasoning, tool_calls=answer.tool_calls
        )
        choices.append({"index": index, "message": message} | chat_end(answer))
    head = {
        "id": answers[0].interaction_id,
        "object": "chat.completion",
        "created": int(time.time()),
    }
    return head | {"model": ask.model, "choices": choices, "usage": chat_usage(answers)}


def chat_end(answer: Answer) -> dict[str, Any]:
    """Return the last keys of a choice: finish_reason and, if the agent requested them, the logprobs."""
    return {"finish_reason": answer.finish_reason} | without_empty(
        logprobs=without_empty(content=answer.logprobs)
    )


def chat_usage(answers: list[Answer]) -> dict[str, int]:
    """Return the token counts of a chat completion. All answers share one prompt, so the prompt's tokens are counted
    once."""
    read, written = (
        answers[0].response.input_len,
        sum(answer.response.output_len for answer in answers),
    )
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


class ChatStream(Stream):
    """Writes the chunks of a chat completion."""

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        head = {
            "id": self.interaction_id,
            "object": "chat.completion.chunk",
            "created": self.created,
        }
        return event(head | {"model": self.ask.model, "choices": choices} | more)

    def _delta(self, **delta: Any) -> bytes:
        return self._chunk([{"index": self.index, "delta": delta}])

    def start(self, input_len: int) -> bytes:
        return self._delta(role="assistant")

    def _piece(self, part: str, value: Any, piece: str) -> bytes:
        if part == "call":
            k = int(
                value["id"].rpartition("_")[2]
            )  # the number at the end of the call's id: 1 for call_ab12_1
            return self._delta(tool_calls=[{"index": k} | value])
        return (
            self._delta(content=piece) if part == "text" else self._delta(reasoning_content=piece)
        )

    def finish(self, answer: Answer) -> bytes:
        return super().finish(answer) + self._chunk(
            [{"index": self.index, "delta": {}} | chat_end(answer)]
        )

    def end(self, answers: list[Answer]) -> bytes:
        usage = self._chunk([], usage=chat_usage(answers)) if self.ask.stream_usage else b""
        return usage + b"data: [DONE]\n\n"


# Responses


def render_responses(ask: AgentRequest, answers: list[Answer]) -> dict[str, Any]:
    """Return the body of a whole reply in the Responses protocol. The reply has exactly one answer."""
    (answer,) = answers
    read, written = answer.response.input_len, answer.response.output_len
    usage = {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}
    cached = {"cached_tokens": 0, "cache_write_tokens": 0}
    details = {"input_tokens_details": cached, "output_tokens_details": {"reasoning_tokens": 0}}
    output = [
        response_item(part, value, answer.interaction_id, answer.logprobs)
        for part, value in answer.parts
    ]
    body = response_head(ask, answer.interaction_id, "completed") | {
        "output": output,
        "usage": usage | details,
    }
    if answer.finish_reason == "length":
        body |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return body


def response_head(ask: AgentRequest, interaction_id: str, status: str) -> dict[str, Any]:
    """Return the body of a response with an empty output.

    A stream sends the body three times. To keep the body short, the field `tools` stays empty.
    """
    function = {"type": "function", "name": ask.tool_choice}
    choice: Any = ask.tool_choice if ask.tool_choice in ("auto", "none", "required") else function
    head = {
        "id": interaction_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
    }
    asked = {
        "model": ask.model,
        "tool_choice": choice,
        "tools": [],
        "parallel_tool_calls": True,
        "metadata": {},
    }
    return head | asked | {"output": []}


def response_item(part: str, value: Any, interaction_id: str, logprobs: Any = ()) -> dict[str, Any]:
    """Convert one part of an answer (reasoning, text or call) into an item of the Responses protocol."""
    x, done = suffix_of(interaction_id), {"status": "completed"}
    if part == "call":
        fields = {
            "id": f"fc_{suffix_of(value['id'])}",
            "type": "function_call",
            "call_id": value["id"],
        }
        return fields | value["function"] | done
    if part == "reasoning":
        content = [{"type": "reasoning_text", "text": value}]
        return {"id": f"rs_{x}", "type": "reasoning", "summary": [], "content": content} | done
    content = [
        {"type": "output_text", "text": value, "annotations": []} | without_empty(logprobs=logprobs)
    ]
    return {"id": f"msg_{x}", "type": "message", "role": "assistant", "content": content} | done


def input_items(messages: list[Message], interaction_id: str) -> list[dict[str, Any]]:
    """Return the input messages of a response, including the instructions, as items with their own ids."""
    items: list[dict[str, Any]] = []
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "tool":
            items.append(
                {
                    "type": "function_call_output",
                    "call_id": message.get("tool_call_id", ""),
                    "output": text,
                }
            )
        elif role != "assistant":
            items.append(
                {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}
            )
        else:
            parts = parts_of(Parsed(text, message.get("reasoning_content", "")))
            for call in message.get("tool_calls", []):
                name, arguments = call["function"].values()
                arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
                parts.append(
                    (
                        "call",
                        {
                            "id": call["id"] or "",
                            "function": {"name": name, "arguments": arguments},
                        },
                    )
                )
            items += [response_item(part, value, interaction_id) for part, value in parts]
    ids = (f"in_{suffix_of(interaction_id)}_{n}" for n in range(len(items)))
    return [item | {"id": name, "status": "completed"} for name, item in zip(ids, items)]


class ResponsesStream(Stream):
    """Writes the events of a response. Each event has a sequence_number."""

    number = 0  # sequence_number of the next event

    def _event(self, kind: str, **data: Any) -> bytes:
        self.number += 1
        return event({"type": kind, "sequence_number": self.number - 1, **data})

    def _item_event(self, item: dict[str, Any], kind: str, **data: Any) -> bytes:
        """Return an event about an item of the output. If the item has content, the event has a content_index."""
        content_index = {"content_index": 0} if "content" in item else {}
        return self._event(
            f"response.{kind}",
            item_id=item["id"],
            output_index=self.position,
            **content_index,
            **data,
        )

    def start(self, input_len: int) -> bytes:
        body = response_head(self.ask, self.interaction_id, "in_progress")
        return self._event("response.created", response=body) + self._event(
            "response.in_progress", response=body
        )

    def _open(self, part: str, value: Any) -> bytes:
        item = response_item(part, value if part == "call" else "", self.interaction_id)
        empty: dict[str, Any] = {"arguments": ""} if part == "call" else {"content": []}
        begun = item | empty | {"status": "in_progress"}
        frames = self._event("response.output_item.added", output_index=self.position, item=begun)
        if part != "call":
            frames += self._item_event(item, "content_part.added", part=item["content"][0])
        return frames

    def _piece(self, part: str, value: Any, piece: str) -> bytes:
        item = response_item(part, value, self.interaction_id)
        if part == "call":
            return self._item_event(item, "function_call_arguments.delta", delta=piece)
        return self._item_event(
            item, f"{item['content'][0]['type']}.delta", delta=piece, logprobs=[]
        )

    def _close(self, part: str, value: Any) -> bytes:
        item = response_item(part, value, self.interaction_id, self.logprobs)
        if part == "call":
            frames = self._item_event(item, "function_call_arguments.done", **value["function"])
        else:
            (content,) = item["content"]
            frames = self._item_event(
                item, f"{content['type']}.done", text=value, logprobs=self.logprobs
            )
            frames += self._item_event(item, "content_part.done", part=content)
        return frames + self._event(
            "response.output_item.done", output_index=self.position, item=item
        )

    def end(self, answers: list[Answer]) -> bytes:
        body = render_responses(self.ask, answers) | {"created_at": self.created}
        return self._event(f"response.{body['status']}", response=body)

    def error(self, status: int, message: str) -> bytes:
        return self._event(
            "error", code=str(status), message=message, **openai_error(status, message)
        )


# Messages


def render_messages(ask: AgentRequest, answers: list[Answer]) -> dict[str, Any]:
    """Return the body of an Anthropic message, which has one answer."""
    (answer,) = answers
    content = [message_block(part, value, answer.interaction_id) for part, value in answer.parts]
    body = message_head(
        ask, answer.interaction_id, answer.response.input_len, answer.response.output_len
    )
    stop = answer.stopped_by if answer.finish_reason == "stop" else ""
    reason = "stop_sequence" if stop else STOP_REASONS[answer.finish_reason]
    return body | {"content": content, "stop_reason": reason} | without_empty(stop_sequence=stop)


def message_head(ask: AgentRequest, interaction_id: str, read: int, written: int) -> dict[str, Any]:
    """Return an Anthropic message without content. `read` and `written` are the numbers of input and output tokens."""
    head = {
        "id": interaction_id,
        "type": "message",
        "role": "assistant",
        "model": ask.model,
        "content": [],
    }
    return head | {"usage": {"input_tokens": read, "output_tokens": written}}


def message_block(part: str, value: Any, signature: str = "") -> dict[str, Any]:
    """Convert one part of an answer (reasoning, text or call) into a block of Anthropic's protocol.

    `signature` is the signature of a reasoning block.
    """
    if part == "call":
        name, arguments = value["function"]["name"], json.loads(value["function"]["arguments"])
        return {"type": "tool_use", "id": value["id"], "name": name, "input": arguments}
    if part == "reasoning":
        return {"type": "thinking", "thinking": value, "signature": signature}
    return {"type": "text", "text": value}


class MessagesStream(Stream):
    """Writes the events of an Anthropic message."""

    def _block_event(self, moment: str, **data: Any) -> bytes:
        return event({"type": f"content_block_{moment}", "index": self.position, **data})

    def start(self, input_len: int) -> bytes:
        return event(
            {
                "type": "message_start",
                "message": message_head(self.ask, self.interaction_id, input_len, 0),
            }
        )

    def _open(self, part: str, value: Any) -> bytes:
        block = (
            message_block(part, value) | {"input": {}}
            if part == "call"
            else message_block(part, "")
        )
        return self._block_event("start", content_block=block)

    def _piece(self, part: str, value: Any, piece: str) -> bytes:
        kind, key = BLOCK_DELTAS[part]
        return self._block_event("delta", delta={"type": f"{kind}_delta", key: piece})

    def _close(self, part: str, value: Any) -> bytes:
        signature = {"type": "signature_delta", "signature": self.interaction_id}
        signed = self._block_event("delta", delta=signature) if part == "reasoning" else b""
        return signed + self._block_event("stop")

    def end(self, answers: list[Answer]) -> bytes:
        body = render_messages(self.ask, answers)
        ends = {key: body[key] for key in ("stop_reason", "stop_sequence") if key in body}
        delta = {"type": "message_delta", "delta": ends, "usage": body["usage"]}
        return event(delta) + event({"type": "message_stop"})

    def error(self, status: int, message: str) -> bytes:
        return event(anthropic_error(status, message))


@dataclass(frozen=True)
class Protocol:
    """The functions that read the requests and write the replies of one protocol."""

    id_prefix: str  # the prefix of each interaction's id, such as "chatcmpl-"
    parse: Callable[..., AgentRequest]  # function of (body, find) that returns the request
    render: Callable[
        [AgentRequest, list[Answer]], dict[str, Any]
    ]  # function that returns the body of a whole reply
    # function of (request, interaction's id, index of the answer) that returns the answer's stream
    stream: Callable[[AgentRequest, str, int], Stream]
    error: Callable[
        ..., dict[str, Any]
    ]  # function of (status, message, code) that returns the body of an error


PROTOCOLS = {  # each key is the part of the URL path after /v1/
    "chat/completions": Protocol("chatcmpl-", parse_chat, render_chat, ChatStream, openai_error),
    "responses": Protocol(
        "resp_", parse_responses, render_responses, ResponsesStream, openai_error
    ),
    "messages": Protocol("msg_", parse_anthropic, render_messages, MessagesStream, anthropic_error),
}
