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

and everything else (`name`, reasoning, annotations, cache markers, ids of items, unknown keys) is ignored.
Equal in meaning is not equal in tokens: nothing here is ever tokenised again once it has been generated.

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
import math
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
    "chat_template": (),
}


class BadRequest(ValueError):
    """The caller's request cannot be served as it stands; the message names the field. HTTP 400."""


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
        return json.dumps(self.template_kwargs, sort_keys=True) if self.template_kwargs else ""


def canonical(message: Message) -> tuple:
    """A hashable value that is equal for two messages exactly when they mean the same (the rule above)."""
    role, content = message.get("role"), message.get("content")
    role = "system" if role == "developer" else role
    text = content if type(content) is str else _text(content)
    calls = message.get("tool_calls")
    if calls or role == "tool":
        call_id = message.get("tool_call_id") or message.get("id") if role == "tool" else None
        return role, text, tuple(map(_canonical_call, calls or ())), call_id
    return role, text


def _text(content: Any) -> str:
    """The text of a content: null and absent are empty, parts are concatenated, other parts stay themselves."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return json.dumps(content, sort_keys=True)
    return "".join(part["text"] if _is_text(part) else json.dumps(part, sort_keys=True) for part in content)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _canonical_call(call: Message) -> tuple:
    function = call.get("function") or {}
    arguments = _parsed(function.get("arguments"))
    return call.get("id"), function.get("name"), json.dumps(arguments, sort_keys=True)


def _parsed(arguments: Any) -> Any:
    """A call's arguments as JSON; what does not parse is kept as the text it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def parse_messages(raw: Any) -> list[Message]:
    """The caller's `messages`, checked and normalised to what a chat template reads. Raises BadRequest."""
    if not isinstance(raw, list) or not raw:
        raise BadRequest("messages: a list of at least one message is needed")
    return [_parse_message(message, f"messages[{i}]") for i, message in enumerate(raw)]


def _parse_message(raw: Any, where: str) -> Message:
    if not isinstance(raw, dict) or raw.get("role") not in ROLES:
        raise BadRequest(f"{where}.role: one of {', '.join(ROLES)} is needed")
    content = raw.get("content")
    if isinstance(content, list) and not all(map(_is_text, content)):
        raise BadRequest(f"{where}.content: only parts of type text are understood")
    if not isinstance(content, str | list | None):
        raise BadRequest(f"{where}.content: a string, a list of text parts or null is needed")
    role = "system" if raw["role"] == "developer" else raw["role"]
    message: Message = {"role": role, "content": _text(content) if type(content) is not str else content}
    if calls := raw.get("tool_calls"):
        message["tool_calls"] = _parse_calls(calls, f"{where}.tool_calls")
    if role == "tool" and (call_id := raw.get("tool_call_id") or raw.get("id")):
        message["tool_call_id"] = str(call_id)
    return message


def _parse_calls(calls: Any, where: str) -> list[Message]:
    """Tool calls of the history; arguments become objects, as chat templates want them."""
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        raise BadRequest(f"{where}: a list of calls, each with an id and a function with a name, is needed")
    return [
        {
            "id": call.get("id"),
            "type": "function",
            "function": {"name": call["function"]["name"], "arguments": _parsed(call["function"].get("arguments"))},
        }
        for call in calls
    ]


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(function, dict) and isinstance(function.get("name"), str) and isinstance(call.get("id"), str | None)
    )


def parse_chat(body: dict[str, Any]) -> AgentRequest:
    """The body of POST /v1/chat/completions. Raises BadRequest."""
    for name, neutral in NEUTRAL.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            hint = f" or set it to {' or '.join(map(json.dumps, neutral))}" if neutral else ""
            raise BadRequest(f"{name}: this server does not support it; leave it out{hint}")
    sampling = {
        "max_new_tokens": _max_tokens(body),
        "temperature": _number(body, "temperature", low=0.0),
        "top_p": _number(body, "top_p", low=0.0, high=1.0, above_low=True),
        "top_k": _integer(body, "top_k", low=-1),
        "frequency_penalty": _number(body, "frequency_penalty", low=-2.0, high=2.0),
        "stop": _stop(body.get("stop")),
        "seed": _integer(body, "seed"),
    }
    kwargs = body.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise BadRequest("chat_template_kwargs: an object is needed")
    return AgentRequest(
        messages=parse_messages(body.get("messages")),
        model=str(body.get("model") or "default"),
        sampling={name: value for name, value in sampling.items() if value is not None},
        template_kwargs=kwargs,
        store=body.get("store") is not False,
    )


def _number(
    body: dict[str, Any], name: str, low: float, high: float = math.inf, above_low: bool = False
) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (above_low and value == low):
        bounds = f"{'above' if above_low else 'from'} {low:g}" + (f" to {high:g}" if high < math.inf else "")
        raise BadRequest(f"{name}: a number {bounds} is needed, not {json.dumps(value)}")
    return float(value)


def _integer(body: dict[str, Any], name: str, low: float = -math.inf) -> int | None:
    value = body.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < low):
        at_least = f" of at least {low:g}" if low > -math.inf else ""
        raise BadRequest(f"{name}: an integer{at_least} is needed, not {json.dumps(value)}")
    return value


def _max_tokens(body: dict[str, Any]) -> int | None:
    """max_tokens is max_completion_tokens under its older name; both are fine while they agree."""
    old, new = _integer(body, "max_tokens", low=1), _integer(body, "max_completion_tokens", low=1)
    if old is not None and new is not None and old != new:
        raise BadRequest("max_tokens: it differs from max_completion_tokens; give one of them")
    return old if new is None else new


def _stop(value: Any) -> list[str] | None:
    stop = [value] if isinstance(value, str) else value
    if stop is not None and not (isinstance(stop, list) and all(isinstance(s, str) and s for s in stop)):
        raise BadRequest("stop: a string or a list of strings, none of them empty, is needed")
    return stop


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
