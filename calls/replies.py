"""Replies, whole and as events, in the three protocols: what strict clients read, in the order in which they read it.

An `Answer` is what a call came to: tokens, and what they say as text, reasoning and tool calls. Each protocol has a way
to say it in one body and a way to say it in events, and the two are the same: the pieces of a stream, put together by
the official SDKs' helpers, are the whole reply.

    chat        chunk with the role; chunks with text; one with the calls; one with finish_reason; [usage;] [DONE]
    responses   response.created, .in_progress; for each item output_item.added, [content_part.added,] deltas, their
                end, [content_part.done,] output_item.done; response.completed, or .incomplete where a length cut it
    messages    message_start with usage; for each block content_block_start, deltas, content_block_stop; message_delta
                with stop_reason and usage; message_stop. Every event has its `event:` line, without it Anthropic's
                client hears nothing, silently

Real clients broke on each of these, on a missing role, index, usage or created_at, and on keys that are null: no key
here is, but `content` of a chat message that only calls.

A `Stream` is a pure object: what an answer consists of so far goes in, bytes come out, the proxy writes them. `grow`
takes what is certain (calls/tools.py), `finish` the whole answer, and sends what is left of it: held-back text, calls,
the reason to stop. Calls come in one piece, which every client takes.

Ids. A reply's id is that of its interaction, and all others derive from it, so that they are unique and can be looked
up: the calls of chatcmpl-<x> are call_<x>_0, call_<x>_1, ..., the items of resp_<x> are rs_<x>, msg_<x>, fc_<x>_0, ...

It does not promise what only the provider's own models have: annotations, citations, refusals, signatures that mean
anything, cached tokens. AReaL has no events for Responses.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from calls.messages import AgentRequest, Message, normalise, parse_anthropic, parse_chat, parse_responses
from calls.tools import Parsed
from inference.io_struct import ModelResponse

ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
BLOCK_DELTAS = {  # Anthropic's events within a block
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}  # as Anthropic names them
Part = tuple[str, Any]  # ("reasoning", text), ("text", text) or ("call", tool call)


@dataclass(frozen=True)
class Answer:
    """What a call came to."""

    interaction_id: str
    response: ModelResponse
    parsed: Parsed
    token_texts: list[str] = field(default_factory=list)  # of the sampled tokens, only where logprobs were asked for

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """In chat form, with ids; their arguments are JSON text."""
        x = tail(self.interaction_id)
        calls = enumerate(self.parsed.calls)
        return [{"id": f"call_{x}_{k}", "type": "function", "function": call._asdict()} for k, call in calls]

    @property
    def message(self) -> Message:
        """The canonical message: what the tree of the session keeps, and what a client will send back."""
        said = {"content": self.parsed.text, "reasoning_content": self.parsed.reasoning, "tool_calls": self.tool_calls}
        return normalise({"role": "assistant", **said})

    @property
    def finish_reason(self) -> str:
        """stop, length or tool_calls."""
        if self.response.stop_reason in ("length", "abort"):
            return "length"
        return "tool_calls" if self.parsed.calls else "stop"

    @property
    def logprobs(self) -> list[dict[str, Any]]:
        """Of the sampled tokens, in OpenAI's form; the bytes of one that is no whole character are not known."""
        pairs = zip(self.token_texts, self.response.output_logprobs, strict=False)
        known = [(text, logprob, [] if "\ufffd" in text else list(text.encode())) for text, logprob in pairs]
        return [{"token": t, "logprob": p, "bytes": raw, "top_logprobs": []} for t, p, raw in known]

    @property
    def parts(self) -> list[Part]:
        """What it consists of, in order: where there is no call, a text, if an empty one."""
        silent = not (self.parsed.text or self.parsed.calls)
        return parts_of(self.parsed) + [("text", "")] * silent + [("call", call) for call in self.tool_calls]


def parts_of(parsed: Parsed) -> list[Part]:
    """The parts of an answer before its calls."""
    return [part for part in (("reasoning", parsed.reasoning), ("text", parsed.text)) if part[1]]


def tail(interaction_id: str) -> str:
    """An id without its prefix: the x of chatcmpl-x, resp_x, msg_x, call_x."""
    return interaction_id.replace("-", "_", 1).partition("_")[2]


def some(**fields: Any) -> dict[str, Any]:
    """Those of `fields` that hold something: a key is there or it is not, but never null."""
    return {name: value for name, value in fields.items() if value}


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event, named by its type if it has one; all of it is ASCII, so that no line separator hides in
    it."""
    name = f"event: {data['type']}\n" if "type" in data else ""
    return f"{name}data: {json.dumps(data)}\n\n".encode()


class Stream:
    """The events of one answer. Its parts come one after the other: opened, said in pieces, closed.

    `index`: which of chat's n answers it is.
    """

    def __init__(self, ask: AgentRequest, interaction_id: str, index: int = 0) -> None:
        self.ask, self.interaction_id, self.index = ask, interaction_id, index
        self.created = int(time.time())
        # All that changes:
        self.place = 0  # of the part that is open, or comes next
        self.said: str | None = None  # of that part; None: it is not open
        self.logprobs: list[dict[str, Any]] = []  # of the whole answer, when it is there

    def start(self, input_len: int) -> bytes:
        """What comes before the first token. `input_len`: tokens of the prompt."""
        raise NotImplementedError

    def grow(self, parts: list[Part], whole: bool = False) -> bytes:
        """What is new in `parts`, which the answer begins with; b"" where there is nothing new. A part is over when
        there is another one after it, or when they are the whole answer."""
        frames = b""
        for place in range(self.place, len(parts)):
            part, value = parts[place]
            text = value["function"]["arguments"] if part == "call" else value
            if self.said is None:
                frames += self._open(part, value)
            if text != self.said:
                frames += self._piece(part, value, text[len(self.said or "") :])
                self.said = text
            if whole or place < len(parts) - 1:
                frames += self._close(part, value)
                self.place, self.said = place + 1, None
        return frames

    def finish(self, answer: Answer) -> bytes:
        """What is left of the answer."""
        self.logprobs = answer.logprobs
        return self.grow(answer.parts, whole=True)

    def end(self, answers: list[Answer]) -> bytes:
        """What comes when all answers are finished."""
        raise NotImplementedError

    def error(self, status: int, message: str) -> bytes:
        """The stream breaks off."""
        return event(openai_error(status, message))

    # What a protocol says of a part, which stands at `place`

    def _open(self, part: str, value: Any) -> bytes:
        return b""

    def _piece(self, part: str, value: Any, piece: str) -> bytes:
        raise NotImplementedError

    def _close(self, part: str, value: Any) -> bytes:
        return b""


def openai_error(status: int, message: str) -> dict[str, Any]:
    kind = ERRORS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind}}


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    error = openai_error(status, message)["error"]
    return {"type": "error", "error": error | {"type": error["type"].replace("server_error", "api_error")}}


# Chat completions


def render_chat(ask: AgentRequest, answers: list[Answer]) -> dict[str, Any]:
    """The body of a chat completion."""
    choices = []
    for index, answer in enumerate(answers):
        message = {"role": "assistant", "content": answer.parsed.text or (None if answer.parsed.calls else "")}
        message |= some(reasoning_content=answer.parsed.reasoning, tool_calls=answer.tool_calls)
        choices.append({"index": index, "message": message} | chat_end(answer))
    head = {"id": answers[0].interaction_id, "object": "chat.completion", "created": int(time.time())}
    return head | {"model": ask.model, "choices": choices, "usage": chat_usage(answers)}


def chat_end(answer: Answer) -> dict[str, Any]:
    return {"finish_reason": answer.finish_reason} | some(logprobs=some(content=answer.logprobs))


def chat_usage(answers: list[Answer]) -> dict[str, int]:
    read, written = answers[0].response.input_len, sum(answer.response.output_len for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


class ChatStream(Stream):
    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        head = {"id": self.interaction_id, "object": "chat.completion.chunk", "created": self.created}
        return event(head | {"model": self.ask.model, "choices": choices} | more)

    def _delta(self, **delta: Any) -> bytes:
        return self._chunk([{"index": self.index, "delta": delta}])

    def start(self, input_len: int) -> bytes:
        return self._delta(role="assistant")

    def _piece(self, part: str, value: Any, piece: str) -> bytes:
        if part == "call":
            return self._delta(tool_calls=[{"index": int(value["id"].rpartition("_")[2])} | value])
        return self._delta(**{"content" if part == "text" else "reasoning_content": piece})

    def finish(self, answer: Answer) -> bytes:
        return super().finish(answer) + self._chunk([{"index": self.index, "delta": {}} | chat_end(answer)])

    def end(self, answers: list[Answer]) -> bytes:
        usage = self._chunk([], usage=chat_usage(answers)) if self.ask.stream_usage else b""
        return usage + b"data: [DONE]\n\n"


# Responses


def render_responses(ask: AgentRequest, answers: list[Answer]) -> dict[str, Any]:
    """The body of a response."""
    (answer,) = answers
    read, written = answer.response.input_len, answer.response.output_len
    usage = {"input_tokens": read, "output_tokens": written, "total_tokens": read + written}
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    output = [response_item(part, value, answer.interaction_id, answer.logprobs) for part, value in answer.parts]
    body = response_head(ask, answer.interaction_id, "completed") | {"output": output, "usage": usage | details}
    if answer.finish_reason == "length":
        body |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return body


def response_head(ask: AgentRequest, interaction_id: str, status: str) -> dict[str, Any]:
    choice: Any = ask.tool_choice
    if choice not in ("auto", "none", "required"):
        choice = {"type": "function", "name": choice}
    head = {"id": interaction_id, "object": "response", "created_at": int(time.time()), "status": status}
    # The tools are not said again: they may be many, and this goes out three times a stream.
    asked = {"model": ask.model, "tool_choice": choice, "tools": [], "parallel_tool_calls": True, "metadata": {}}
    return head | asked | {"output": []}


def response_item(part: str, value: Any, interaction_id: str, logprobs: Any = ()) -> dict[str, Any]:
    """A part of an answer as an item of a response's output."""
    x, done = tail(interaction_id), {"status": "completed"}
    if part == "call":
        fields = {"id": f"fc_{tail(value['id'])}", "type": "function_call", "call_id": value["id"]}
        return fields | value["function"] | done
    if part == "reasoning":
        content = [{"type": "reasoning_text", "text": value}]
        return {"id": f"rs_{x}", "type": "reasoning", "summary": [], "content": content} | done
    content = [{"type": "output_text", "text": value, "annotations": []} | some(logprobs=logprobs)]
    return {"id": f"msg_{x}", "type": "message", "role": "assistant", "content": content} | done


class ResponsesStream(Stream):
    number = 0  # of the next event

    def _say(self, kind: str, **data: Any) -> bytes:
        self.number += 1
        return event({"type": kind, "sequence_number": self.number - 1, **data})

    def _within(self, item: dict[str, Any], kind: str, **data: Any) -> bytes:
        at = {"item_id": item["id"], "output_index": self.place} | ({"content_index": 0} if "content" in item else {})
        return self._say(f"response.{kind}", **at, **data)

    def start(self, input_len: int) -> bytes:
        body = response_head(self.ask, self.interaction_id, "in_progress")
        return self._say("response.created", response=body) + self._say("response.in_progress", response=body)

    def _open(self, part: str, value: Any) -> bytes:
        item = response_item(part, value if part == "call" else "", self.interaction_id)
        empty: dict[str, Any] = {"arguments": ""} if part == "call" else {"content": []}
        begun = item | empty | {"status": "in_progress"}
        frames = self._say("response.output_item.added", output_index=self.place, item=begun)
        return frames if part == "call" else frames + self._within(item, "content_part.added", part=item["content"][0])

    def _piece(self, part: str, value: Any, piece: str) -> bytes:
        item = response_item(part, value, self.interaction_id)
        if part == "call":
            return self._within(item, "function_call_arguments.delta", delta=piece)
        return self._within(item, f"{item['content'][0]['type']}.delta", delta=piece, logprobs=[])

    def _close(self, part: str, value: Any) -> bytes:
        item = response_item(part, value, self.interaction_id, self.logprobs)
        if part == "call":
            frames = self._within(item, "function_call_arguments.done", **value["function"])
        else:
            (content,) = item["content"]
            frames = self._within(item, f"{content['type']}.done", text=value, logprobs=self.logprobs)
            frames += self._within(item, "content_part.done", part=content)
        return frames + self._say("response.output_item.done", output_index=self.place, item=item)

    def end(self, answers: list[Answer]) -> bytes:
        body = render_responses(self.ask, answers) | {"created_at": self.created}
        return self._say(f"response.{body['status']}", response=body)

    def error(self, status: int, message: str) -> bytes:
        return self._say("error", code=str(status), message=message, **openai_error(status, message))


# Messages


def render_messages(ask: AgentRequest, answers: list[Answer]) -> dict[str, Any]:
    """The body of an Anthropic message."""
    (answer,) = answers
    content = [message_block(part, value, answer.interaction_id) for part, value in answer.parts]
    body = message_head(ask, answer.interaction_id, answer.response.input_len, answer.response.output_len)
    return body | {"content": content, "stop_reason": STOP_REASONS[answer.finish_reason]}


def message_head(ask: AgentRequest, interaction_id: str, read: int, written: int) -> dict[str, Any]:
    head = {"id": interaction_id, "type": "message", "role": "assistant", "model": ask.model, "content": []}
    return head | {"usage": {"input_tokens": read, "output_tokens": written}}


def message_block(part: str, value: Any, signature: str = "") -> dict[str, Any]:
    """A part of an answer as a block of a message's content. A signature must be there; it is checked by nobody."""
    if part == "call":
        name, arguments = value["function"]["name"], json.loads(value["function"]["arguments"])
        return {"type": "tool_use", "id": value["id"], "name": name, "input": arguments}
    if part == "reasoning":
        return {"type": "thinking", "thinking": value, "signature": signature}
    return {"type": "text", "text": value}


class MessagesStream(Stream):
    def _block(self, moment: str, **data: Any) -> bytes:
        return event({"type": f"content_block_{moment}", "index": self.place, **data})

    def start(self, input_len: int) -> bytes:
        return event({"type": "message_start", "message": message_head(self.ask, self.interaction_id, input_len, 0)})

    def _open(self, part: str, value: Any) -> bytes:
        block = message_block(part, value) | {"input": {}} if part == "call" else message_block(part, "")
        return self._block("start", content_block=block)

    def _piece(self, part: str, value: Any, piece: str) -> bytes:
        kind, key = BLOCK_DELTAS[part]
        return self._block("delta", delta={"type": kind, key: piece})

    def _close(self, part: str, value: Any) -> bytes:
        signature = {"type": "signature_delta", "signature": self.interaction_id}
        signed = self._block("delta", delta=signature) if part == "reasoning" else b""
        return signed + self._block("stop")

    def end(self, answers: list[Answer]) -> bytes:
        body = render_messages(self.ask, answers)
        delta = {"type": "message_delta", "delta": {"stop_reason": body["stop_reason"]}, "usage": body["usage"]}
        return event(delta) + event({"type": "message_stop"})

    def error(self, status: int, message: str) -> bytes:
        return event(anthropic_error(status, message))


@dataclass(frozen=True)
class Protocol:
    """How one API speaks: how its ids begin, how its requests are read and its replies and errors written."""

    id_prefix: str
    parse: Callable[..., AgentRequest]  # (body, find)
    render: Callable[[AgentRequest, list[Answer]], dict[str, Any]]
    stream: Callable[[AgentRequest, str, int], Stream]
    error: Callable[[int, str], dict[str, Any]]


PROTOCOLS = {  # by the path under /v1/
    "chat/completions": Protocol("chatcmpl-", parse_chat, render_chat, ChatStream, openai_error),
    "responses": Protocol("resp_", parse_responses, render_responses, ResponsesStream, openai_error),
    "messages": Protocol("msg_", parse_anthropic, render_messages, MessagesStream, anthropic_error),
}
