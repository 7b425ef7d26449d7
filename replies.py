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

from messages import AgentRequest, Message, make_call, parse_anthropic, parse_chat, parse_responses

if TYPE_CHECKING:
    from engine import ModelResponse
    from tools import Parsed

STATUS_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}  # as Anthropic names them
dump: Callable[[Any], str] = json.JSONEncoder(separators=(",", ":")).encode


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
            {
                "id": f"call_{tail(interaction_id)}_{k}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for k, call in enumerate(parsed.calls)
        ]
        return cls(interaction_id, response, parsed.text, parsed.reasoning, calls, list(token_texts))

    @property
    def message(self) -> Message:
        """The canonical message: what the tree of the session keeps, and what a client will send back."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [make_call(call["id"], **call["function"]) for call in self.tool_calls]
        return message | ({"reasoning_content": self.reasoning} if self.reasoning else {})

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


def tail(interaction_id: str) -> str:
    """An id without its prefix: the x of chatcmpl-x, resp_x, msg_x."""
    return interaction_id.replace("-", "_", 1).partition("_")[2]


def event(data: dict[str, Any], name: str = "") -> bytes:
    """One server-sent event; everything is ASCII, so no line separator can hide in it."""
    return (f"event: {name}\n" if name else "").encode() + f"data: {dump(data)}\n\n".encode()


def openai_error(status: int, message: str) -> dict[str, Any]:
    kind = STATUS_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind}}


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    kinds = {413: "request_too_large", 503: "overloaded_error"} | STATUS_TYPES
    kind = kinds.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class Stream:
    """The events of one reply. `index` tells the answers to one request apart (chat's n)."""

    def __init__(self, ask: AgentRequest, interaction_id: str) -> None:
        self.ask = ask
        self.interaction_id = interaction_id
        self.created = int(time.time())
        self.sent = {index: [0, 0] for index in range(ask.n)}  # characters of text and of reasoning

    def start(self, input_len: int, index: int = 0) -> bytes:
        """What comes before the first token. `input_len`: tokens of the prompt."""
        raise NotImplementedError

    def pieces(self, text: str, reasoning: str, index: int) -> bytes:
        raise NotImplementedError

    def end(self, answer: Answer, index: int) -> bytes:
        raise NotImplementedError

    def delta(self, text: str, reasoning: str = "", index: int = 0) -> bytes:
        """New pieces of text and reasoning; b"" where there is nothing new."""
        self.sent[index][0] += len(text)
        self.sent[index][1] += len(reasoning)
        return self.pieces(text, reasoning, index) if text or reasoning else b""

    def finish(self, answer: Answer, index: int = 0) -> bytes:
        """What is left of the answer, and the end."""
        text, reasoning = self.sent[index]
        return self.delta(answer.text[text:], answer.reasoning[reasoning:], index) + self.end(answer, index)

    def error(self, status: int, message: str) -> bytes:
        """The stream breaks off."""
        return event(openai_error(status, message))


# Chat completions


def render_chat(ask: AgentRequest, answers: list[Answer]) -> dict[str, Any]:
    """The body of a chat completion."""
    return {
        "id": answers[0].interaction_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": ask.model,
        "choices": [chat_choice(answer, index) for index, answer in enumerate(answers)],
        "usage": chat_usage(answers),
    }


def chat_choice(answer: Answer, index: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or ("" if not answer.tool_calls else None)}
    message |= {"reasoning_content": answer.reasoning} if answer.reasoning else {}
    message |= {"tool_calls": answer.tool_calls} if answer.tool_calls else {}
    choice = {"index": index, "message": message, "finish_reason": answer.finish_reason}
    return choice | ({"logprobs": {"content": answer.logprobs}} if answer.token_texts else {})


def chat_usage(answers: list[Answer]) -> dict[str, int]:
    read, written = answers[0].response.input_len, sum(answer.response.output_len for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


class ChatStream(Stream):
    def __init__(self, ask: AgentRequest, interaction_id: str) -> None:
        super().__init__(ask, interaction_id)
        self.answers: list[Answer] = []

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        head = {"id": self.interaction_id, "object": "chat.completion.chunk", "created": self.created}
        return event(head | {"model": self.ask.model, "choices": choices} | more)

    def start(self, input_len: int, index: int = 0) -> bytes:
        return self.chunk([{"index": index, "delta": {"role": "assistant"}}])

    def pieces(self, text: str, reasoning: str, index: int) -> bytes:
        delta = {"reasoning_content": reasoning} if reasoning else {}
        return self.chunk([{"index": index, "delta": delta | ({"content": text} if text else {})}])

    def end(self, answer: Answer, index: int) -> bytes:
        calls = [{"index": k} | call for k, call in enumerate(answer.tool_calls)]
        delta: dict[str, Any] = {"tool_calls": calls} if calls else {} if answer.text else {"content": ""}
        last = {"index": index, "delta": delta, "finish_reason": answer.finish_reason}
        last |= {"logprobs": {"content": answer.logprobs}} if answer.token_texts else {}
        frames = self.chunk([last])
        self.answers.append(answer)
        if len(self.answers) < self.ask.n:
            return frames
        usage = self.chunk([], usage=chat_usage(self.answers)) if self.ask.stream_usage else b""
        return frames + usage + b"data: [DONE]\n\n"


# Replies in parts: Responses and Messages


class PartStream(Stream):
    """A reply that is a row of parts, one open at a time: its reasoning, its text, then each call."""

    def __init__(self, ask: AgentRequest, interaction_id: str) -> None:
        super().__init__(ask, interaction_id)
        self.part = ""  # what is open: "reasoning", "text" or nothing
        self.index = -1  # of the last part that was opened
        self.so_far = ""  # the text of the open part

    def open(self) -> bytes:
        raise NotImplementedError

    def piece(self, text: str) -> bytes:
        raise NotImplementedError

    def close(self) -> bytes:
        raise NotImplementedError

    def call(self, call: dict[str, Any], k: int) -> bytes:
        raise NotImplementedError

    def last(self, answer: Answer) -> bytes:
        raise NotImplementedError

    def turn_to(self, part: str) -> bytes:
        """Close what is open, open `part` ("": nothing)."""
        if part == self.part:
            return b""
        frames = self.close() if self.part else b""
        self.part, self.so_far = part, ""
        self.index += bool(part)
        return frames + (self.open() if part else b"")

    def pieces(self, text: str, reasoning: str, index: int) -> bytes:
        frames = b""
        for part, piece in (("reasoning", reasoning), ("text", text)):
            if piece:
                frames += self.turn_to(part) + self.piece(piece)
                self.so_far += piece
        return frames

    def end(self, answer: Answer, index: int) -> bytes:
        frames = b"" if answer.text or answer.tool_calls else self.turn_to("text")
        frames += self.turn_to("")
        for k, call in enumerate(answer.tool_calls):
            self.index += 1
            frames += self.call(call, k)
        return frames + self.last(answer)


# Responses


def render_responses(ask: AgentRequest, answers: list[Answer]) -> dict[str, Any]:
    """The body of a response."""
    (answer,) = answers
    x, cut = tail(answer.interaction_id), answer.finish_reason == "length"
    output = [response_item("reasoning", x, answer.reasoning)] if answer.reasoning else []
    if answer.text or not answer.tool_calls:
        output.append(response_item("text", x, answer.text, answer.logprobs))
    output += [response_call(x, k, call) for k, call in enumerate(answer.tool_calls)]
    read, written = answer.response.input_len, answer.response.output_len
    usage = {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + written,
    }
    cut_by = {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {}
    head = response_head(ask, answer.interaction_id, "incomplete" if cut else "completed")
    return head | {"output": output, "usage": usage} | cut_by


def response_head(ask: AgentRequest, interaction_id: str, status: str) -> dict[str, Any]:
    named = {"type": "function", "name": ask.tool_choice}
    return {
        "id": interaction_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "model": ask.model,
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": ask.tool_choice if ask.tool_choice in ("auto", "none", "required") else named,
        "tools": [{"type": "function", **tool["function"], "strict": False} for tool in ask.tools],
        "metadata": {},
    }


def response_item(part: str, x: str, text: str, logprobs: Any = ()) -> dict[str, Any]:
    if part == "reasoning":
        content: dict[str, Any] = {"type": "reasoning_text", "text": text}
        return {"id": f"rs_{x}", "type": "reasoning", "summary": [], "content": [content], "status": "completed"}
    content = {"type": "output_text", "text": text, "annotations": []} | ({"logprobs": logprobs} if logprobs else {})
    head = {"id": f"msg_{x}", "type": "message", "role": "assistant"}
    return head | {"content": [content], "status": "completed"}


def response_call(x: str, k: int, call: dict[str, Any]) -> dict[str, Any]:
    head = {"id": f"fc_{x}_{k}", "type": "function_call", "call_id": call["id"]}
    return head | call["function"] | {"status": "completed"}


class ResponsesStream(PartStream):
    def __init__(self, ask: AgentRequest, interaction_id: str) -> None:
        super().__init__(ask, interaction_id)
        self.number = 0
        self.item: dict[str, Any] = {}
        self.logprobs: list[dict[str, Any]] = []

    def say(self, kind: str, **data: Any) -> bytes:
        self.number += 1
        return event({"type": kind, "sequence_number": self.number - 1, **data}, kind)

    def of_part(self, kind: str, **data: Any) -> bytes:
        return self.say(kind, item_id=self.item["id"], output_index=self.index, content_index=0, **data)

    def start(self, input_len: int, index: int = 0) -> bytes:
        body = response_head(self.ask, self.interaction_id, "in_progress")
        return self.say("response.created", response=body) + self.say("response.in_progress", response=body)

    def open(self) -> bytes:
        self.item = response_item(self.part, tail(self.interaction_id), "")
        (content,) = self.item["content"]
        added = self.item | {"content": [], "status": "in_progress"}
        frames = self.say("response.output_item.added", output_index=self.index, item=added)
        return frames + self.of_part("response.content_part.added", part=content)

    def piece(self, text: str) -> bytes:
        if self.part == "reasoning":
            return self.of_part("response.reasoning_text.delta", delta=text)
        return self.of_part("response.output_text.delta", delta=text, logprobs=[])

    def close(self) -> bytes:
        item = response_item(self.part, tail(self.interaction_id), self.so_far, self.logprobs)
        if self.part == "reasoning":
            frames = self.of_part("response.reasoning_text.done", text=self.so_far)
        else:
            frames = self.of_part("response.output_text.done", text=self.so_far, logprobs=self.logprobs)
        frames += self.of_part("response.content_part.done", part=item["content"][0])
        return frames + self.say("response.output_item.done", output_index=self.index, item=item)

    def call(self, call: dict[str, Any], k: int) -> bytes:
        item, arguments = response_call(tail(self.interaction_id), k, call), call["function"]["arguments"]
        at = {"item_id": item["id"], "output_index": self.index}
        added = item | {"arguments": "", "status": "in_progress"}
        return (
            self.say("response.output_item.added", output_index=self.index, item=added)
            + self.say("response.function_call_arguments.delta", **at, delta=arguments)
            + self.say("response.function_call_arguments.done", **at, name=item["name"], arguments=arguments)
            + self.say("response.output_item.done", output_index=self.index, item=item)
        )

    def end(self, answer: Answer, index: int) -> bytes:
        self.logprobs = answer.logprobs
        return super().end(answer, index)

    def last(self, answer: Answer) -> bytes:
        body = render_responses(self.ask, [answer]) | {"created_at": self.created}
        return self.say(f"response.{body['status']}", response=body)

    def error(self, status: int, message: str) -> bytes:
        body = openai_error(status, message)
        return self.say("error", code=body["error"]["type"], message=message, **body)


# Messages


def render_messages(ask: AgentRequest, answers: list[Answer]) -> dict[str, Any]:
    """The body of an Anthropic message."""
    (answer,) = answers
    content = [message_block("reasoning", answer.reasoning, answer.interaction_id)] if answer.reasoning else []
    if answer.text or not answer.tool_calls:
        content.append(message_block("text", answer.text))
    content += [tool_use(call) for call in answer.tool_calls]
    return message_head(ask, answer.interaction_id, answer.response.input_len, answer.response.output_len) | {
        "content": content,
        "stop_reason": STOP_REASONS[answer.finish_reason],
    }


def message_head(ask: AgentRequest, interaction_id: str, input_len: int, output_len: int) -> dict[str, Any]:
    head = {"id": interaction_id, "type": "message", "role": "assistant", "model": ask.model, "content": []}
    return head | {"usage": {"input_tokens": input_len, "output_tokens": output_len}}


def message_block(part: str, text: str, signature: str = "") -> dict[str, Any]:
    if part == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": signature}
    return {"type": "text", "text": text}


def tool_use(call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.loads(call["function"]["arguments"])
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments}


class MessagesStream(PartStream):
    def say(self, kind: str, **data: Any) -> bytes:
        return event({"type": kind, **data}, kind)

    def block_delta(self, kind: str, **delta: Any) -> bytes:
        return self.say("content_block_delta", index=self.index, delta={"type": kind, **delta})

    def start(self, input_len: int, index: int = 0) -> bytes:
        return self.say("message_start", message=message_head(self.ask, self.interaction_id, input_len, 0))

    def open(self) -> bytes:
        return self.say("content_block_start", index=self.index, content_block=message_block(self.part, ""))

    def piece(self, text: str) -> bytes:
        if self.part == "reasoning":
            return self.block_delta("thinking_delta", thinking=text)
        return self.block_delta("text_delta", text=text)

    def close(self) -> bytes:
        signed = self.part == "reasoning"
        frames = self.block_delta("signature_delta", signature=self.interaction_id) if signed else b""
        return frames + self.say("content_block_stop", index=self.index)

    def call(self, call: dict[str, Any], k: int) -> bytes:
        block = tool_use(call) | {"input": {}}
        frames = self.say("content_block_start", index=self.index, content_block=block)
        frames += self.block_delta("input_json_delta", partial_json=call["function"]["arguments"])
        return frames + self.say("content_block_stop", index=self.index)

    def last(self, answer: Answer) -> bytes:
        body = render_messages(self.ask, [answer])
        delta = {"stop_reason": body["stop_reason"]}
        return self.say("message_delta", delta=delta, usage=body["usage"]) + self.say("message_stop")

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
