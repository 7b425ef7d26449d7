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

A `Stream` is a pure object: pieces go in, bytes come out, the proxy writes them. `delta` takes what is certain
(tools.py), `finish` the whole answer, and sends what is left of it: held-back text, calls, the reason to stop. Calls
come in one piece, which every client takes.

Ids. A reply's id is that of its interaction, and all others derive from it, so that they are unique and can be looked
up: the calls of chatcmpl-<x> are call_<x>_0, call_<x>_1, ..., the items of resp_<x> are rs_<x>, msg_<x>, fc_<x>_0, ...

It does not promise what only the provider's own models have: annotations, citations, refusals, signatures that mean
anything, cached tokens. AReaL has no events for Responses.
"""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from messages import AgentRequest, Message, normalise, parse_anthropic, parse_chat, parse_responses

if TYPE_CHECKING:
    from io_struct import ModelResponse
    from tools import Parsed

ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}  # as Anthropic names them


@dataclass(frozen=True)
class Answer:
    """What a call came to. `tool_calls` are in chat form, their arguments JSON text."""

    interaction_id: str
    response: "ModelResponse"
    text: str
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    token_texts: list[str] = field(default_factory=list)  # of the sampled tokens, only where logprobs were asked for

    @classmethod
    def of(
        cls, interaction_id: str, response: "ModelResponse", parsed: "Parsed", token_texts: Iterable[str] = ()
    ) -> "Answer":
        """The answer that `parsed` is, its calls with ids."""
        calls = [
            {"id": f"call_{tail(interaction_id)}_{k}", "type": "function", "function": call._asdict()}
            for k, call in enumerate(parsed.calls)
        ]
        return cls(interaction_id, response, parsed.text, parsed.reasoning, calls, list(token_texts))

    @property
    def message(self) -> Message:
        """The canonical message: what the tree of the session keeps, and what a client will send back."""
        said = {"content": self.text, "tool_calls": self.tool_calls, "reasoning_content": self.reasoning}
        return normalise({"role": "assistant", **said})

    @property
    def finish_reason(self) -> str:
        """stop, length or tool_calls."""
        if self.response.stop_reason in ("length", "abort"):
            return "length"
        return "tool_calls" if self.tool_calls else "stop"

    @property
    def logprobs(self) -> list[dict[str, Any]]:
        """Of the sampled tokens, in OpenAI's form."""
        pairs = zip(self.token_texts, self.response.output_logprobs, strict=False)
        return [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in pairs]

    @property
    def parts(self) -> list[tuple[str, Any]]:
        """What it consists of, in order: ("reasoning", text), ("text", text), ("call", tool call); one at least."""
        parts: list[tuple[str, Any]] = [("reasoning", self.reasoning)] if self.reasoning else []
        if self.text or not self.tool_calls:
            parts.append(("text", self.text))
        return parts + [("call", call) for call in self.tool_calls]


def tail(interaction_id: str) -> str:
    """An id without its prefix: the x of chatcmpl-x, resp_x, msg_x, call_x."""
    return interaction_id.replace("-", "_", 1).partition("_")[2]


def some(**fields: Any) -> dict[str, Any]:
    """Those of `fields` that hold something: a key is there or it is not, but never null."""
    return {name: value for name, value in fields.items() if value}


def event(data: dict[str, Any], name: str = "") -> bytes:
    """One server-sent event; all of it is ASCII, so that no line separator hides in it."""
    return (f"event: {name}\n" if name else "").encode() + f"data: {json.dumps(data)}\n\n".encode()


class Stream:
    """The events of one reply: parts, of which one is open at a time. `index`: which of chat's n answers."""

    def __init__(self, ask: AgentRequest, interaction_id: str) -> None:
        self.ask, self.interaction_id = ask, interaction_id
        self.created = int(time.time())
        self.part = ""  # what is open: reasoning, text or nothing
        self.place = -1  # of the last part among the parts
        self.said: dict[tuple[int, str], str] = {}  # (index, part) -> its text so far
        self.answers: list[Answer] = []  # the finished ones

    def start(self, input_len: int, index: int = 0) -> bytes:
        """What comes before the first token. `input_len`: tokens of the prompt."""
        raise NotImplementedError

    def delta(self, text: str, reasoning: str = "", index: int = 0) -> bytes:
        """New pieces of text and reasoning; b"" where there is nothing new."""
        frames = self._add("reasoning", reasoning, index) if reasoning else b""
        return frames + (self._add("text", text, index) if text else b"")

    def finish(self, answer: Answer, index: int = 0) -> bytes:
        """What is left of the answer, and the end."""
        self.answers.append(answer)
        frames = b""
        for part, value in answer.parts:
            said = self.said.get((index, part))
            if part == "call":
                frames += self._turn_to("") + self._call(value, index)
            elif said is None or said != value:
                frames += self._add(part, value[len(said or "") :], index)
        return frames + self._turn_to("") + self._end(answer, index)

    def error(self, status: int, message: str) -> bytes:
        """The stream breaks off."""
        return event(openai_error(status, message))

    def _add(self, part: str, piece: str, index: int) -> bytes:
        frames = self._turn_to(part)
        self.said[index, part] = self.said.get((index, part), "") + piece
        return frames + self._piece(part, piece, index)

    def _turn_to(self, part: str) -> bytes:
        """Close what is open, open `part`."""
        if part == self.part:
            return b""
        frames = self._close(self.part) if self.part else b""
        self.part = part
        self.place += bool(part)
        return frames + (self._open(part) if part else b"")

    # What a protocol says at each of these moments

    def _open(self, part: str) -> bytes:
        return b""

    def _close(self, part: str) -> bytes:
        return b""

    def _piece(self, part: str, piece: str, index: int) -> bytes:
        raise NotImplementedError

    def _call(self, call: dict[str, Any], index: int) -> bytes:
        raise NotImplementedError

    def _end(self, answer: Answer, index: int) -> bytes:
        raise NotImplementedError


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
        message = {"role": "assistant", "content": answer.text or (None if answer.tool_calls else "")}
        message |= some(reasoning_content=answer.reasoning, tool_calls=answer.tool_calls)
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

    def _delta(self, index: int, **delta: Any) -> bytes:
        return self._chunk([{"index": index, "delta": delta}])

    def start(self, input_len: int, index: int = 0) -> bytes:
        return self._delta(index, role="assistant")

    def _piece(self, part: str, piece: str, index: int) -> bytes:
        return self._delta(index, **{"content" if part == "text" else "reasoning_content": piece})

    def _call(self, call: dict[str, Any], index: int) -> bytes:
        k = self.answers[-1].tool_calls.index(call)
        return self._delta(index, tool_calls=[{"index": k} | call])

    def _end(self, answer: Answer, index: int) -> bytes:
        frames = self._chunk([{"index": index, "delta": {}} | chat_end(answer)])
        if len(self.answers) < self.ask.n:
            return frames
        usage = self._chunk([], usage=chat_usage(self.answers)) if self.ask.stream_usage else b""
        return frames + usage + b"data: [DONE]\n\n"


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
        return event({"type": kind, "sequence_number": self.number - 1, **data}, kind)

    def _within(self, open_part: str, kind: str, **data: Any) -> bytes:
        item = response_item(open_part, "", self.interaction_id)
        kind = kind.replace("TEXT", item["content"][0]["type"])
        return self._say(kind, item_id=item["id"], output_index=self.place, content_index=0, **data)

    def start(self, input_len: int, index: int = 0) -> bytes:
        body = response_head(self.ask, self.interaction_id, "in_progress")
        return self._say("response.created", response=body) + self._say("response.in_progress", response=body)

    def _open(self, part: str) -> bytes:
        item = response_item(part, "", self.interaction_id)
        begun = item | {"content": [], "status": "in_progress"}
        frames = self._say("response.output_item.added", output_index=self.place, item=begun)
        return frames + self._within(part, "response.content_part.added", part=item["content"][0])

    def _piece(self, part: str, piece: str, index: int) -> bytes:
        return self._within(part, "response.TEXT.delta", delta=piece, logprobs=[])

    def _close(self, part: str) -> bytes:
        text, logprobs = self.said[0, part], self.answers[0].logprobs if self.answers else []
        item = response_item(part, text, self.interaction_id, logprobs)
        return (
            self._within(part, "response.TEXT.done", text=text, logprobs=logprobs)
            + self._within(part, "response.content_part.done", part=item["content"][0])
            + self._say("response.output_item.done", output_index=self.place, item=item)
        )

    def _call(self, call: dict[str, Any], index: int) -> bytes:
        self.place += 1
        item = response_item("call", call, self.interaction_id)
        at = {"output_index": self.place}
        arguments = {"item_id": item["id"], **at}
        begun = item | {"arguments": "", "status": "in_progress"}
        return (
            self._say("response.output_item.added", **at, item=begun)
            + self._say("response.function_call_arguments.delta", **arguments, delta=item["arguments"])
            + self._say("response.function_call_arguments.done", **arguments, **call["function"])
            + self._say("response.output_item.done", **at, item=item)
        )

    def _end(self, answer: Answer, index: int) -> bytes:
        body = render_responses(self.ask, [answer]) | {"created_at": self.created}
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
    def _say(self, kind: str, **data: Any) -> bytes:
        return event({"type": kind, **data}, kind)

    def _delta(self, kind: str, **delta: str) -> bytes:
        return self._say("content_block_delta", index=self.place, delta={"type": kind, **delta})

    def start(self, input_len: int, index: int = 0) -> bytes:
        return self._say("message_start", message=message_head(self.ask, self.interaction_id, input_len, 0))

    def _open(self, part: str) -> bytes:
        return self._say("content_block_start", index=self.place, content_block=message_block(part, ""))

    def _piece(self, part: str, piece: str, index: int) -> bytes:
        if part == "reasoning":
            return self._delta("thinking_delta", thinking=piece)
        return self._delta("text_delta", text=piece)

    def _close(self, part: str) -> bytes:
        signed = part == "reasoning"
        frames = self._delta("signature_delta", signature=self.interaction_id) if signed else b""
        return frames + self._say("content_block_stop", index=self.place)

    def _call(self, call: dict[str, Any], index: int) -> bytes:
        self.place += 1
        frames = self._say(
            "content_block_start", index=self.place, content_block=message_block("call", call) | {"input": {}}
        )
        frames += self._delta("input_json_delta", partial_json=call["function"]["arguments"])
        return frames + self._say("content_block_stop", index=self.place)

    def _end(self, answer: Answer, index: int) -> bytes:
        body = render_messages(self.ask, [answer])
        frames = self._say("message_delta", delta={"stop_reason": body["stop_reason"]}, usage=body["usage"])
        return frames + self._say("message_stop")

    def error(self, status: int, message: str) -> bytes:
        return event(anthropic_error(status, message), "error")


@dataclass(frozen=True)
class Protocol:
    """How one API speaks: how its ids begin, how its requests are read and its replies and errors written."""

    id_prefix: str
    parse: Callable[[dict[str, Any]], AgentRequest]
    render: Callable[[AgentRequest, list[Answer]], dict[str, Any]]
    stream: Callable[[AgentRequest, str], Stream]
    error: Callable[[int, str], dict[str, Any]]


PROTOCOLS = {  # by the path under /v1/
    "chat/completions": Protocol("chatcmpl-", parse_chat, render_chat, ChatStream, openai_error),
    "responses": Protocol("resp_", parse_responses, render_responses, ResponsesStream, openai_error),
    "messages": Protocol("msg_", parse_anthropic, render_messages, MessagesStream, anthropic_error),
}
