"""One canonical conversation for every protocol: what a message means, whatever a client makes of it.

An agent's framework sends the history back with every call, and it never sends back quite what it was given:
`content: null` returns as `""` or not at all, a string as a list of text parts, the arguments of a tool call
with other spaces or in another order, with keys of its own beside ours. The tree of a session (cache.py) must
still see that turn t + 1 extends turn t. Of 150 pairs of consecutive requests by real clients plain equality
recognises 52 %, AReaL's rule (keys that are null are dropped) 56 %, this one 91 %; the rest are not prefixes.

The rule. Two messages are equal when these four are:

    role            `developer` is `system` under its newer name
    text            null == "" == absent; a list of text parts == their concatenation
    tool calls      id, name and arguments as parsed JSON, in order
    tool_call_id    of a tool's result (some clients call it `id`)

and everything else (`name`, reasoning, annotations, cache markers, ids of items, unknown keys) is ignored. The rule
is `normalise`: it makes the one plain message that the tree compares and the chat template reads. Equal in meaning
is not equal in tokens: nothing here is ever tokenised again once it has been generated.

A protocol is a pair of functions: parse, from the caller's JSON to an `AgentRequest`, and render, from the
tokens that were generated to the caller's reply. Chat completions are here; `PROTOCOLS` is where another
protocol is entered, and nothing else knows their names.

What a caller asks for is honoured or refused, never silently dropped: `NEUTRAL` lists the parameters that would
change the answer and that we do not implement, with the values at which they change nothing. A refusal is a
`BadRequest` that names the field (AReaL ignores most of these with a warning, and answers 500 to the others).
Keys that mean nothing to us (`user`, `metadata`, ...) are accepted.

It does not promise to detect a history whose texts were rewritten: such a turn starts a new conversation.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine import ModelResponse

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "n": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "modalities": (["text"],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "stop_token_ids": ([],),
    **dict.fromkeys(("chat_template", "reasoning_effort"), ()),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
}
NUMBERS: dict[str, tuple[type, Callable[[Any], bool], str]] = {  # that steer sampling: kind, what is allowed, in words
    "temperature": (float, lambda x: 0 <= x < 2**31, "a number from 0 to below 2**31"),
    "top_p": (float, lambda x: 0 < x <= 1, "a number above 0 to 1"),
    "top_k": (int, lambda n: -1 <= n < 2**31, "an integer from -1 to below 2**31"),
    "frequency_penalty": (float, lambda x: -2 <= x <= 2, "a number from -2 to 2"),
    "seed": (int, lambda n: True, "an integer"),
    "max_tokens": (int, lambda n: 1 <= n < 2**31, "an integer from 1 to below 2**31"),
    "max_completion_tokens": (int, lambda n: 1 <= n < 2**31, "an integer from 1 to below 2**31"),  # its newer name
}


class BadRequest(ValueError):
    """The caller's request cannot be served as it stands; the message names the field."""

    status = 400  # of HTTP


@dataclass(frozen=True)
class AgentRequest:
    """One call of an agent, whatever protocol it came by.

    `messages` have a role, a content that is a string and, where there are any, tool_calls and tool_call_id.
    `sampling` holds the fields of GenerationHyperparameters that the caller set; the others are the server's.
    """

    messages: list[Message]
    model: str = "default"
    sampling: dict[str, Any] = field(default_factory=dict)
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # further variables of the chat template
    store: bool = True  # false: keep this turn out of training

    @property
    def template_key(self) -> str:
        """What else than the messages decides the prompt; turns of one conversation agree in it."""
        return _json(self.template_kwargs, "chat_template_kwargs")


def _json(value: Any, name: str) -> str:
    """`value` of the field `name` as text. BadRequest where it is nested too deeply to be written down."""
    try:
        return json.dumps(value, sort_keys=True)
    except RecursionError as error:
        raise BadRequest(f"{name}: it is nested too deeply") from error


def normalise(message: Message) -> Message:
    """The plain form of a message: two that mean the same (the rule above) have the same one."""
    role, content = message.get("role"), message.get("content") or ""
    role = "system" if role == "developer" else role
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    plain: Message = {"role": role, "content": text}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": _parsed(call["function"].get("arguments"))},
            }
            for call in calls
        ]
    if role == "tool" and (call_id := message.get("tool_call_id") or message.get("id")):
        plain["tool_call_id"] = str(call_id)
    return plain


def _parsed(arguments: Any) -> Any:
    """A call's arguments as the object that chat templates want; what does not parse is kept as the text it is."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def canonical(message: Message) -> tuple:
    """A hashable value that is equal for two messages exactly when they mean the same. Raises BadRequest."""
    role, text, *calls = normalise(message).values()
    return role, text, _json(calls, "messages.tool_calls") if calls else ""


def parse_messages(raw: Any) -> list[Message]:
    """The caller's `messages`, checked and normalised. Raises BadRequest."""
    if not isinstance(raw, list) or not raw:
        raise BadRequest("messages: a list of at least one message is needed")
    for i, message in enumerate(raw):
        _check_message(message, f"messages[{i}]")
    return [normalise(message) for message in raw]


def _check_message(raw: Any, where: str) -> None:
    if not isinstance(raw, dict) or raw.get("role") not in ROLES:
        raise BadRequest(f"{where}.role: one of {', '.join(ROLES)} is needed")
    content, calls = raw.get("content"), raw.get("tool_calls") or []
    if isinstance(content, list) and not all(map(_is_text, content)):
        raise BadRequest(f"{where}.content: only parts of type text are understood")
    if not isinstance(content, str | list | None):
        raise BadRequest(f"{where}.content: a string, a list of text parts or null is needed")
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        raise BadRequest(f"{where}.tool_calls: a list of calls, each with an id and a function with a name, is needed")


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    named = isinstance(function, dict) and isinstance(function.get("name"), str)
    return named and isinstance(call.get("id"), str | None)


def parse_chat(body: dict[str, Any]) -> AgentRequest:
    """The body of POST /v1/chat/completions. Raises BadRequest."""
    for name, neutral in NEUTRAL.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            hint = f" or set it to {' or '.join(map(json.dumps, neutral))}" if neutral else ""
            raise BadRequest(f"{name}: this server does not support it; leave it out{hint}")
    kwargs = body.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise BadRequest("chat_template_kwargs: an object is needed")
    return AgentRequest(
        messages=parse_messages(body.get("messages")),
        model=str(body.get("model") or "default"),
        sampling=parse_sampling(body),
        template_kwargs=kwargs,
        store=body.get("store") is not False,
    )


def parse_sampling(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of GenerationHyperparameters that the body sets. Raises BadRequest."""
    sampling: dict[str, Any] = {}
    for name, (kind, allowed, words) in NUMBERS.items():
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, kind)) or not allowed(value):
            raise BadRequest(f"{name}: {words} is needed, not {_json(value, name)}")
        sampling[name] = kind(value)
    limits = {sampling.pop(name) for name in ("max_tokens", "max_completion_tokens") if name in sampling}
    if len(limits) > 1:
        raise BadRequest("max_tokens: it differs from max_completion_tokens; give one of them")
    if limits:
        sampling["max_new_tokens"] = limits.pop()
    stop = body.get("stop")
    if stop is not None:
        sampling["stop"] = [stop] if isinstance(stop, str) else stop
        if not isinstance(sampling["stop"], list) or not all(isinstance(s, str) and s for s in sampling["stop"]):
            raise BadRequest("stop: a string or a list of strings, none of them empty, is needed")
    return sampling


def render_chat(request: AgentRequest, interaction_id: str, text: str, response: "ModelResponse") -> dict[str, Any]:
    """The body of a chat completion: what the strictest clients read, and no key that is null but `content`."""
    message = {"role": "assistant", "content": text}
    finish_reason = "length" if response.stop_reason in ("length", "abort") else "stop"
    return {
        "id": interaction_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
        "usage": {
            "prompt_tokens": response.input_len,
            "completion_tokens": response.output_len,
            "total_tokens": response.input_len + response.output_len,
        },
    }


@dataclass(frozen=True)
class Protocol:
    """How one API speaks: how its ids begin, how its requests are read and its replies written."""

    id_prefix: str
    parse: Callable[[dict[str, Any]], AgentRequest]
    render: Callable[[AgentRequest, str, str, "ModelResponse"], dict[str, Any]]


PROTOCOLS = {"chat/completions": Protocol("chatcmpl-", parse_chat, render_chat)}  # by the path under /v1/
