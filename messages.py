"""One canonical conversation for every protocol: what a message means, whatever a client makes of it.

Agents speak three protocols: chat completions, Responses and Anthropic's Messages. Each is read here into one
`AgentRequest`, and everything behind it (the tree, the chat template, the engine) knows one form of message:

    {"role", "content": str, ["tool_calls": [{"id", "type", "function": {"name", "arguments": object}}]],
     ["tool_call_id"], ["reasoning_content"]}

What one protocol says in one message another says in several items; they are put together again: the items reasoning,
text and calls of a Responses reply, or the blocks thinking, text and tool_use of an Anthropic one, are one message of
the assistant; each tool_result is a message of its own.

An agent's framework sends the history back with every call, and it never sends back quite what it was given:
`content: null` returns as `""` or not at all, a string as a list of text parts, the arguments of a tool call
with other spaces or in another order, with keys of its own beside ours. The tree of a session (cache.py) must
still see that turn t + 1 extends turn t. Of 150 pairs of consecutive requests by real clients plain equality
recognises 52 %, AReaL's rule (keys that are null are dropped) 56 %, this one 91 %; the rest are not prefixes.

The rule. Two messages are equal when these four are:

    role            `developer` is `system` under its newer name
    text            null == "" == absent; a list of text parts == their concatenation
    tool calls      id first, then name and arguments as parsed JSON (2.0 is 2, as in JavaScript), in order
    tool_call_id    of a tool's result (some clients call it `id`)

and everything else (`name`, reasoning, annotations, cache markers, ids of items, unknown keys) is ignored. The rule
is `normalise`: it makes the one plain message that the tree compares and the chat template reads. Equal in meaning
is not equal in tokens: nothing here is ever tokenised again once it has been generated.

Some clients send references instead of a history (`previous_response_id`, `item_reference`, Anthropic's `thread`).
`resolve` puts in what they name; the caller keeps the instructions that began the conversation, unless it sends others.

What a caller asks for is honoured or refused, never silently dropped: `NEUTRAL` lists the parameters that would
change the answer and that we do not implement, with the values at which they change nothing. A refusal is a
`BadRequest` that names the field (AReaL ignores most of these with a warning, and answers 500 to the others).
Keys that mean nothing to us (`user`, `metadata`, `cache_control`, ...) are accepted, and so are hints that a model may
follow or not: `thinking`, `strict`, `parallel_tool_calls`. Reasoning effort goes to the chat template, which may know it.

It does not promise to detect a history whose texts were rewritten: such a turn starts a new conversation.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Message = dict[str, Any]
Find = Callable[[str], tuple[list[Message], list[Message]] | None]  # interaction id -> its messages and its output
ROLES = ("system", "developer", "user", "assistant", "tool")
TEXTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")  # types of parts that hold a text
LEVELS = 200  # of nesting: more than that no JSON writer promises to write down again
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "top_logprobs": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "modalities": (["text"],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "background": (False,),
    "truncation": ("disabled",),
    "mcp_servers": ([],),
    **dict.fromkeys(("chat_template", "audio", "web_search_options", "conversation", "prompt", "container"), ()),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "compaction"), ()),
}
LIMIT = (int, lambda n: 1 <= n < 2**31, "an integer from 1 to below 2**31")
PENALTY = (float, lambda x: -2 <= x <= 2, "a number from -2 to 2")
NUMBERS: dict[str, tuple[type, Callable[[Any], bool], str]] = {  # that steer sampling: kind, what is allowed, in words
    "temperature": (float, lambda x: 0 <= x < 2**31, "a number from 0 to below 2**31"),
    "top_p": (float, lambda x: 0 < x <= 1, "a number above 0 to 1"),
    "top_k": (int, lambda n: -1 <= n < 2**31, "an integer from -1 to below 2**31"),
    "frequency_penalty": PENALTY,
    "presence_penalty": PENALTY,
    "seed": (int, lambda n: True, "an integer"),
    "max_tokens": LIMIT,  # three names of max_new_tokens
    "max_completion_tokens": LIMIT,
    "max_output_tokens": LIMIT,
}


class BadRequest(ValueError):
    """The caller's request cannot be served as it stands; the message names the field."""

    status = 400  # of HTTP


@dataclass(frozen=True)
class AgentRequest:
    """One call of an agent, whatever protocol it came by.

    `messages` are canonical. Until `resolve` they may hold references, and where `previous` is set only what is new.
    `sampling` holds the fields of GenerationHyperparameters that the caller set; the others are the server's.
    """

    messages: list[Message]
    model: str = "default"
    sampling: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)  # in chat form; of types that we do not know: dropped
    tool_choice: str = "auto"  # auto, none, required or the name of one of `tools`
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # further variables of the chat template
    previous: str | None = None  # id of the interaction that this one goes on from
    n: int = 1  # answers
    logprobs: bool = False  # of the sampled tokens, in the reply
    store: bool = True  # false: keep this turn out of training
    stream: bool = False
    stream_usage: bool = False  # chat: a last chunk with the usage

    @cached_property
    def template_key(self) -> str:
        """What else than the messages decides the prompt; turns of one conversation agree in it. Raises BadRequest."""
        kwargs = _json(self.template_kwargs, "chat_template_kwargs")
        return f"{kwargs} {_json(self.tools, 'tools')}" if self.tools else kwargs

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools that the reply may call: none of them where tool_choice is none."""
        return [] if self.tool_choice == "none" else self.tools


# JSON


def read_json(text: str) -> Any:
    """JSON that every client can read and write again: no NaN, 64-bit integers, bounded depth. Raises ValueError."""
    try:
        value = json.loads(text, parse_float=_number, parse_int=_integer, parse_constant=_number)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if text.count("{") + text.count("[") > LEVELS and _is_deep(value, LEVELS):
        raise ValueError("nested too deeply")
    return value


def _number(text: str) -> float | int:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text}: a finite number is needed")
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _integer(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"{text}: a 64-bit integer is needed")
    return value


def _is_deep(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_is_deep(item, levels - 1) for item in inner)


_encode = json.JSONEncoder(sort_keys=True).encode


def _json(value: Any, name: str) -> str:
    """`value` of the field `name` as text. BadRequest where it is nested too deeply to be written down."""
    try:
        text = _encode(value)
        if text.count("{") + text.count("[") <= LEVELS or not _is_deep(value, LEVELS):
            return text
    except RecursionError:
        pass
    raise BadRequest(f"{name}: it is nested too deeply")


# Messages


def normalise(raw: Message, where: str = "message") -> Message:
    """The plain form of a message in chat form: two that mean the same (the rule above) have the same one.

    Raises BadRequest, which names the field as `where` does, for what is no message.
    """
    role = raw.get("role") if isinstance(raw, dict) else None
    if role not in ROLES:
        raise BadRequest(f"{where}.role: one of {', '.join(ROLES)} is needed")
    plain: Message = {
        "role": "system" if role == "developer" else role,
        "content": _text(raw.get("content"), f"{where}.content"),
    }
    if calls := raw.get("tool_calls"):
        plain["tool_calls"] = [_chat_call(call, f"{where}.tool_calls") for call in _list(calls, f"{where}.tool_calls")]
    if role == "tool" and (call_id := raw.get("tool_call_id") or raw.get("id")):
        plain["tool_call_id"] = str(call_id)
    if role == "assistant" and (reasoning := raw.get("reasoning_content") or raw.get("reasoning")):
        plain["reasoning_content"] = _text(reasoning, f"{where}.reasoning_content")
    return plain


def canonical(message: Message) -> tuple:
    """A hashable value that is equal for two messages exactly when they mean the same. Raises BadRequest.

    It is made for every message of every request, so what is plain already is not made plain again.
    """
    calls = message.get("tool_calls")
    plain = isinstance(message.get("content"), str) and message.get("role") != "developer"
    if not plain or (calls and any(isinstance(call["function"].get("arguments"), str | None) for call in calls)):
        message = normalise(message)
        calls = message.get("tool_calls")
    role = message["role"]
    result_of = str(message.get("tool_call_id") or message.get("id") or "") if role == "tool" else ""
    return role, message["content"], _json(calls, "messages.tool_calls") if calls else "", result_of


def _list(raw: Any, where: str) -> list:
    if not isinstance(raw, list):
        raise BadRequest(f"{where}: a list is needed")
    return raw


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(map(_is_text, content)):
        raise BadRequest(f"{where}: a string, a list of text parts or null is needed (only text is understood)")
    return "".join(part["text"] for part in content)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") in TEXTS and isinstance(part.get("text"), str)


def _chat_call(raw: Any, where: str) -> dict[str, Any]:
    function = raw.get("function") if isinstance(raw, dict) else None
    if not isinstance(function, dict):
        raise BadRequest(f"{where}: a list of calls, each with an id and a function, is needed")
    return make_call(raw.get("id"), function.get("name"), function.get("arguments"), where)


def make_call(call_id: Any, name: Any, arguments: Any, where: str = "tool_calls") -> dict[str, Any]:
    """A canonical tool call. `arguments` may be JSON text or an object; what does not parse stays the text it is."""
    if not isinstance(name, str) or not isinstance(call_id, str | None):
        raise BadRequest(f"{where}: the name of the function and the id of the call, both strings, are needed")
    text = arguments or "{}" if isinstance(arguments, str | None) else _json(arguments, where)
    try:
        parsed = read_json(text)
    except ValueError:
        parsed = text
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": parsed}}


def _join(a: Message, b: Message) -> Message:
    """Two pieces of one message."""
    whole = {"role": a["role"]}
    for key in ("content", "tool_calls", "reasoning_content"):
        parts = [piece[key] for piece in (a, b) if piece.get(key)]
        if parts or key == "content":
            whole[key] = parts[0] + parts[1] if len(parts) == 2 else parts[0] if parts else ""
    return whole


# The three protocols


def parse_chat(body: dict[str, Any]) -> AgentRequest:
    """The body of POST /v1/chat/completions. Raises BadRequest."""
    raw = _list(body.get("messages"), "messages")
    options = _object(body, "stream_options")
    return _request(
        body,
        [normalise(message, f"messages[{i}]") for i, message in enumerate(raw)],
        tools=(None, "function"),
        form=_object(body, "response_format"),
        effort=body.get("reasoning_effort"),
        n=_number_of(body, "n", (int, lambda n: 1 <= n <= 128, "an integer from 1 to 128")) or 1,
        logprobs=_flag(body, "logprobs"),
        stream_usage=_flag(options, "include_usage", where="stream_options."),
    )


def parse_responses(body: dict[str, Any]) -> AgentRequest:
    """The body of POST /v1/responses. Raises BadRequest."""
    raw = body.get("input")
    raw = [{"role": "user", "content": raw}] if isinstance(raw, str) else _list(raw, "input")
    previous = _previous(body, "previous_response_id", "resp_")
    messages = _merge_items(_item(item, f"input[{i}]") for i, item in enumerate(raw))
    return _request(
        body,
        _instructed(body, "instructions", previous) + messages,
        tools=(None, "function"),
        form=_object(_object(body, "text"), "format", "text."),
        effort=_object(body, "reasoning").get("effort"),
        previous=previous,
        logprobs="message.output_text.logprobs" in _list(body.get("include") or [], "include"),
    )


def parse_anthropic(body: dict[str, Any]) -> AgentRequest:
    """The body of POST /v1/messages. Raises BadRequest."""
    raw = _list(body.get("messages"), "messages")
    thread = _object(body, "thread")
    goes_on = thread.get("type") == "continue"
    previous = _previous(thread, "previous_message_id", "msg_", "thread.", needed=goes_on) if goes_on else None
    if thread and thread.get("type") not in ("create", "continue"):
        raise BadRequest("thread.type: create or continue is needed")
    messages = [message for i, one in enumerate(raw) for message in _blocks(one, f"messages[{i}]")]
    if messages and messages[-1]["role"] == "assistant":
        raise BadRequest("messages: the last one is the assistant's; a text that it should go on from is not supported")
    output = _object(body, "output_config")
    return _request(
        body,
        _instructed(body, "system", previous) + messages,
        tools=(None, "custom"),
        form=_object(output, "format", "output_config.") or _object(body, "output_format"),
        effort=output.get("effort"),
        previous=previous,
    )


def _request(
    body: dict[str, Any], messages: list[Message], tools: tuple, form: dict[str, Any], effort: Any, **own: Any
) -> AgentRequest:
    """What the three have in common. `tools`: the types that are functions; `form`: of the text, plain or JSON."""
    if not messages:
        raise BadRequest(f"{'input' if 'input' in body else 'messages'}: a list of at least one message is needed")
    for name, neutral in (NEUTRAL if "n" in own else NEUTRAL | {"n": (1,)}).items():
        value = body.get(name)
        if value is not None and value not in neutral:
            hint = f" or set it to {' or '.join(map(json.dumps, neutral))}" if neutral else ""
            raise BadRequest(f"{name}: this server does not support it; leave it out{hint}")
    functions = [tool for i, raw in enumerate(_list(body.get("tools") or [], "tools")) for tool in _tool(raw, i, tools)]
    return AgentRequest(
        messages=messages,
        model=str(body.get("model") or "default"),
        sampling=parse_sampling(body) | _schema(form),
        tools=functions,
        tool_choice=_tool_choice(body.get("tool_choice"), functions),
        template_kwargs=_object(body, "chat_template_kwargs") | ({"reasoning_effort": effort} if effort else {}),
        store=_flag(body, "store", default=True),
        stream=_flag(body, "stream"),
        **own,
    )


def parse_sampling(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of GenerationHyperparameters that the body sets. Raises BadRequest."""
    sampling = {name: value for name in NUMBERS if (value := _number_of(body, name, NUMBERS[name])) is not None}
    limits = {sampling.pop(name) for name, kind in NUMBERS.items() if kind is LIMIT and name in sampling}
    if len(limits) > 1:
        raise BadRequest("max_tokens: it differs from its other names (max_completion_tokens, ...); give one of them")
    if limits:
        sampling["max_new_tokens"] = limits.pop()
    for name, kind in (("stop", str), ("stop_sequences", str), ("stop_token_ids", int)):
        given = body.get(name)
        given = [given] if isinstance(given, str) else given
        if given and all(isinstance(one, kind) and one not in ("", True, False) for one in _list(given, name)):
            field_name = "stop_token_ids" if kind is int else "stop"
            sampling[field_name] = sampling.get(field_name, []) + given
        elif given not in (None, []):
            raise BadRequest(f"{name}: a list of {'ids' if kind is int else 'strings, none of them empty,'} is needed")
    return sampling


def _number_of(body: dict[str, Any], name: str, rule: tuple[type, Callable[[Any], bool], str]) -> Any:
    value, (kind, allowed, words) = body.get(name), rule
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or not allowed(value):
        raise BadRequest(f"{name}: {words} is needed, not {_json(value, name)}")
    return kind(value)


def _flag(body: dict[str, Any], name: str, default: bool = False, where: str = "") -> bool:
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise BadRequest(f"{where}{name}: true or false is needed")
    return default if value is None else value


def _object(body: dict[str, Any], name: str, where: str = "") -> dict[str, Any]:
    value = body.get(name)
    if not isinstance(value, dict | None):
        raise BadRequest(f"{where}{name}: an object is needed")
    return value or {}


def _previous(body: dict[str, Any], name: str, prefix: str, where: str = "", needed: bool = False) -> str | None:
    value = body.get(name)
    if (value is None and not needed) or (isinstance(value, str) and value.startswith(prefix)):
        return value
    raise BadRequest(f"{where}{name}: an id that begins with {prefix} is needed")


def _instructed(body: dict[str, Any], name: str, previous: str | None) -> list[Message]:
    """The system prompt as a message; before a history that is still to be found it may replace the one there."""
    text = _text(body.get(name), name)
    return [{"role": "instructions" if previous else "system", "content": text}] if text else []


def _schema(form: dict[str, Any]) -> dict[str, str]:
    """`response_format` and its cousins as a JSON schema: {"json_schema": text}, or nothing for plain text."""
    kind, schema = form.get("type", "text"), form.get("json_schema", form)
    if kind == "text":
        return {}
    schema = {"type": "object"} if kind == "json_object" else schema.get("schema") if isinstance(schema, dict) else None
    if kind not in ("json_object", "json_schema") or not isinstance(schema, dict):
        raise BadRequest("response_format: type text, json_object, or json_schema with a schema is needed")
    _json(schema, "response_format.schema")
    return {"json_schema": json.dumps(schema)}  # keys in the caller's order: a grammar generates them so


def _tool(raw: Any, i: int, kinds: tuple) -> list[dict[str, Any]]:
    """A tool in chat form; nothing where it is none that we can offer (`web_search`, ...)."""
    if isinstance(raw, dict) and raw.get("type") not in kinds:
        return []
    function = raw.get("function", raw) if isinstance(raw, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"tools[{i}].function: an object with a name is needed")
    parameters = function.get("parameters", function.get("input_schema")) or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise BadRequest(f"tools[{i}].function.parameters: a JSON schema is needed")
    description = str(function.get("description") or "")
    return [
        {
            "type": "function",
            "function": {"name": function["name"], "description": description, "parameters": parameters},
        }
    ]


def _tool_choice(raw: Any, tools: list[dict[str, Any]]) -> str:
    if isinstance(raw, dict):
        named = raw.get("function", raw)
        kinds = {"auto": "auto", "none": "none", "any": "required"}
        raw = kinds.get(str(raw.get("type"))) or (named.get("name") if isinstance(named, dict) else None) or raw
    choice = {None: "auto", "any": "required"}.get(raw, raw) if isinstance(raw, str | None) else None
    names = [tool["function"]["name"] for tool in tools]
    if choice in ("auto", "none") or (choice == "required" and names) or choice in names:
        return str(choice)
    raise BadRequest("tool_choice: auto, none, or with such a tool in tools, required or the tool's name, is needed")


def _item(raw: Any, where: str) -> Message:
    """One item of a Responses input as a message or a piece of one."""
    kind = raw.get("type") or "message" if isinstance(raw, dict) else None
    if kind == "message":
        return normalise(raw, where)
    if kind == "function_call":
        call = make_call(raw.get("call_id"), raw.get("name"), raw.get("arguments"), where)
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        result = _text(raw.get("output"), f"{where}.output")
        return normalise({"role": "tool", "content": result, "tool_call_id": raw.get("call_id")}, where)
    if kind == "reasoning":
        thought = _text(raw.get("content") or raw.get("summary"), f"{where}.content")
        return {"role": "assistant", "content": "", "reasoning_content": thought}
    if kind == "item_reference":
        return {"role": "reference", "content": str(raw.get("id"))}
    raise BadRequest(
        f"{where}.type: message, function_call, function_call_output, reasoning or item_reference is needed"
    )


def _merge_items(pieces: Iterable[Message]) -> list[Message]:
    """The items of one reply, in the order reasoning, text, calls, as one message."""
    messages: list[Message] = []
    for piece in pieces:
        last = messages[-1] if messages else {"role": None}
        both = last["role"] == piece["role"] == "assistant"
        only_calls = "tool_calls" in piece and not piece["content"] and "reasoning_content" not in piece
        if both and (only_calls or not (last["content"] or last.get("tool_calls"))):
            messages[-1] = _join(last, piece)
        else:
            messages.append(piece)
    return messages


def _blocks(raw: Any, where: str) -> list[Message]:
    """One Anthropic message: its text, thinking and tool_use blocks are one message, each tool_result another."""
    if not isinstance(raw, dict) or not isinstance(raw.get("content"), list) or not raw["content"]:
        return [normalise(raw, where)]
    role = raw.get("role")
    messages: list[Message] = []
    for i, block in enumerate(raw["content"]):
        kind, at = block.get("type") if isinstance(block, dict) else None, f"{where}.content[{i}]"
        if kind == "tool_use" and role == "assistant":
            call = make_call(block.get("id"), block.get("name"), block.get("input"), at)
            piece = {"role": role, "content": "", "tool_calls": [call]}
        elif kind == "tool_result" and role == "user":
            result = _text(block.get("content"), f"{at}.content")
            piece = normalise({"role": "tool", "content": result, "tool_call_id": block.get("tool_use_id")}, at)
        elif kind in ("thinking", "redacted_thinking") and role == "assistant":
            thought = _text(block.get("thinking"), f"{at}.thinking")
            piece = {"role": role, "content": "", "reasoning_content": thought}
        else:
            piece = normalise({"role": role, "content": [block]}, at)
        if messages and messages[-1]["role"] == piece["role"] != "tool":
            messages[-1] = _join(messages[-1], piece)
        else:
            messages.append(piece)
    return messages


# References


def resolve(ask: AgentRequest, find: Find) -> AgentRequest:
    """`ask` with what it refers to: `find` knows the finished interactions of the session. Raises BadRequest."""
    messages = ask.messages
    if any(message["role"] == "reference" for message in messages):
        messages = _merge_items(_referred(message, find) for message in messages)
    if ask.previous is not None:
        name = "previous_response_id" if ask.previous.startswith("resp_") else "thread.previous_message_id"
        if (found := find(ask.previous)) is None:
            raise BadRequest(f"{name}: no finished response {ask.previous!r} in this session")
        history = [*found[0], *found[1]]
        if messages[0]["role"] == "instructions":
            instructions, *messages = messages
            history = [instructions | {"role": "system"}, *history[history[0]["role"] == "system" :]]
        messages = history + messages
    return dataclasses.replace(ask, messages=messages, previous=None)


def _referred(message: Message, find: Find) -> Message:
    """The item that a reference names: msg_<hex>, rs_<hex> or fc_<hex>_<k> of the response resp_<hex>."""
    if message["role"] != "reference":
        return message
    kind, _, rest = message["content"].partition("_")
    hexadecimal, _, k = rest.partition("_")
    found = find(f"resp_{hexadecimal}")
    output = found[1][0] if found and found[1] else {}
    piece: Message = {"role": "assistant", "content": ""}
    if kind == "msg" and output:
        return piece | {"content": output["content"]}
    if kind == "rs" and "reasoning_content" in output:
        return piece | {"reasoning_content": output["reasoning_content"]}
    if kind == "fc" and k.isdecimal() and int(k) < len(output.get("tool_calls", ())):
        return piece | {"tool_calls": [output["tool_calls"][int(k)]]}
    raise BadRequest(f"input: item_reference: there is no item {message['content']!r} in this session")
