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
    tool calls      id, name, and arguments as parsed JSON (2.0 is 2, as in JavaScript), in order
    tool_call_id    of a tool's result (some clients call it `id`)

and everything else (`name`, reasoning, annotations, cache markers, ids of items, unknown keys) is ignored. The rule
is `normalise`, which makes the plain message that the chat template reads, and `canonical`, which the tree compares.
Equal in meaning is not equal in tokens: nothing here is ever tokenised again once it has been generated.

Some clients send references instead of a history (`previous_response_id`, `item_reference`, Anthropic's `thread`).
What they name is put in: `find` knows the finished interactions of the session. The caller keeps the instructions that
began the conversation, unless it sends others, and in a thread of Anthropic's its tools likewise.

What a caller asks for is honoured or refused, never silently dropped: `NEUTRAL` lists the parameters that would
change the answer and that we do not implement, with the values at which they change nothing. A refusal is a
`Refusal` that names the field (AReaL ignores most of these with a warning, and answers 500 to the others).
Keys that mean nothing to us (`user`, `metadata`, `cache_control`, ...) are accepted, and so are hints that a model may
follow or not: `thinking`, `strict`, `parallel_tool_calls`. Reasoning effort goes to the chat template,
which may know it.

It does not promise to detect a history whose texts were rewritten: such a turn starts a new conversation.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from run.fields import Refusal, as_object, get, read_json, write_json

Message = dict[str, Any]
Found = tuple[list[Message], list[dict[str, Any]]]  # a finished interaction: its messages with the output; its tools
Find = Callable[[str], Found | None]  # by its id, in the session
NOTHING: Find = dict[str, Found]().get  # where there is no session
ROLES = ("system", "developer", "user", "assistant", "tool")
TEXTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")  # types of parts that hold a text
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("functions", "mcp_servers"), ([],)),
    **dict.fromkeys(("top_logprobs", "min_p", "min_tokens"), (0,)),
    **dict.fromkeys(("ignore_eos", "continue_final_message", "background"), (False,)),
    "function_call": ("none", "auto"),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "add_generation_prompt": (True,),
    "truncation": ("disabled",),
    **dict.fromkeys(("chat_template", "audio", "web_search_options", "conversation", "prompt", "container"), ()),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "compaction"), ()),
}
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")  # three names of max_new_tokens
NUMBERS: dict[str, tuple[type, float, float]] = {  # that steer sampling: kind, least, most
    "temperature": (float, 0, 2**31),
    "top_p": (float, 1e-9, 1),
    "top_k": (int, -1, 2**31 - 1),
    "frequency_penalty": (float, -2, 2),
    "presence_penalty": (float, -2, 2),
    "seed": (int, -(2**63), 2**63 - 1),
    **dict.fromkeys(LIMITS, (int, 1, 2**31 - 1)),
    "n": (int, 1, 128),  # answers, of chat only
}


@dataclass(frozen=True)
class AgentRequest:
    """One call of an agent, whatever protocol it came by.

    `messages` are canonical: the whole conversation, whatever the caller left out because the session knows it.
    `sampling` holds the fields of GenerationHyperparameters that the caller set; the others are the server's.
    """

    messages: list[Message]
    model: str = "default"
    sampling: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)  # in chat form; of types that we do not know: dropped
    tool_choice: str = "auto"  # auto, none, required or the name of one of `tools`
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # further variables of the chat template
    n: int = 1  # answers
    logprobs: bool = False  # of the sampled tokens, in the reply
    store: bool = True  # false: keep this turn out of training
    stream: bool = False
    stream_usage: bool = False  # chat: a last chunk with the usage

    @cached_property
    def template_key(self) -> str:
        """What else than the messages decides the prompt; turns of one conversation agree in it. Raises Refusal."""
        return write_json(self.template_kwargs, "chat_template_kwargs") + write_json(self.tools, "tools")

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools that the reply may call: none of them where tool_choice is none."""
        return [] if self.tool_choice == "none" else self.tools


# Messages


def normalise(raw: Any, where: str = "message") -> Message:
    """The plain form of a message in chat form: two that mean the same (the rule above) have the same one.

    Raises Refusal, which names the field as `where` does, for what is no message.
    """
    role = as_object(raw, where).get("role")
    if role not in ROLES:
        raise Refusal(f"{where}.role: one of {', '.join(ROLES)} is needed")
    plain: Message = {"role": "system" if role == "developer" else role, "content": _text(raw, "content", where)}
    if raw.get("tool_calls"):
        calls = get(raw, "tool_calls", list, where=where)
        plain["tool_calls"] = [_call(call, f"{where}.tool_calls") for call in calls]
    if role == "tool" and (call_id := raw.get("tool_call_id") or raw.get("id")):
        plain["tool_call_id"] = str(call_id)
    name = "reasoning_content" if raw.get("reasoning_content") else "reasoning"
    if role == "assistant" and (reasoning := _text(raw, name, where)):
        plain["reasoning_content"] = reasoning
    return plain


def canonical(message: Message) -> tuple:
    """A hashable value that is equal for two messages exactly when they mean the same. Raises Refusal.

    It is made for every message of every request, so what is plain already is not made plain again.
    """
    calls = message.get("tool_calls") or ()
    plain = isinstance(message.get("content"), str) and message.get("role") != "developer"
    if not plain or any(not isinstance(call["function"].get("arguments"), dict) for call in calls):
        message = normalise(message)
    role, calls = message["role"], message.get("tool_calls")
    result_of = str(message.get("tool_call_id") or message.get("id") or "") if role == "tool" else ""
    return role, message["content"], write_json(calls, "messages.tool_calls") if calls else "", result_of


def _call(raw: Any, where: str) -> dict[str, Any]:
    """A canonical tool call, its arguments an object; what does not parse stays the text it is."""
    function = as_object(as_object(raw, where).get("function"), where)
    call_id, name, arguments = raw.get("id"), function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not isinstance(call_id, str | None):
        raise Refusal(f"{where}: a call has an id and the name of a function, both strings")
    text = arguments or "{}" if isinstance(arguments, str | None) else write_json(arguments, where)
    try:
        arguments = read_json(text)
    except ValueError:
        arguments = text
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(raw: dict[str, Any], name: str, where: str = "") -> str:
    """The field `name` as one text: null and absent are "", text parts are put together. Raises Refusal."""
    content = raw.get(name)
    if isinstance(content, str | None):
        return content or ""
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    texts: list[Any] = [part.get("text") for part in parts if part.get("type", "text") in TEXTS]
    if not isinstance(content, list) or len(texts) < len(content) or not all(isinstance(t, str) for t in texts):
        raise Refusal(f"{where}.{name}: a string, a list of text parts or null is needed".removeprefix("."))
    return "".join(texts)


# The three protocols


def parse_chat(body: dict[str, Any], find: Find = NOTHING) -> AgentRequest:
    """The body of POST /v1/chat/completions. Raises Refusal."""
    messages = [normalise(raw, f"messages[{i}]") for i, raw in enumerate(get(body, "messages", list, []))]
    own: dict[str, Any] = {"form": get(body, "response_format", dict, {}), "effort": get(body, "reasoning_effort", str)}
    return _request(body, messages, **own, logprobs=get(body, "logprobs", bool, False), most_answers=128)


def parse_responses(body: dict[str, Any], find: Find = NOTHING) -> AgentRequest:
    """The body of POST /v1/responses. Raises Refusal."""
    raw = body.get("input")
    items = [{"role": "user", "content": raw}] if isinstance(raw, str) else get(body, "input", list, [])
    messages = _merge_items(_item(item, f"input[{i}]", find) for i, item in enumerate(items))
    history, _ = _followed(get(body, "previous_response_id", str), "previous_response_id", find)
    own: dict[str, Any] = {"form": get(body, "text.format", dict, {}), "effort": get(body, "reasoning.effort", str)}
    own["logprobs"] = "message.output_text.logprobs" in get(body, "include", list, [])
    return _request(body, messages, _text(body, "instructions"), (history, []), **own)


def parse_anthropic(body: dict[str, Any], find: Find = NOTHING) -> AgentRequest:
    """The body of POST /v1/messages. Raises Refusal."""
    messages = [m for i, raw in enumerate(get(body, "messages", list, [])) for m in _blocks(raw, f"messages[{i}]")]
    if messages and messages[-1]["role"] == "assistant":
        raise Refusal("messages: the last one is the assistant's; a text that it should go on from is not supported")
    thread, previous = get(body, "thread.type", str), get(body, "thread.previous_message_id", str)
    if thread not in (None, "create", "continue") or (thread == "continue") != bool(previous):
        raise Refusal("thread: type create, or continue with a previous_message_id, is needed")
    followed = _followed(previous, "thread.previous_message_id", find)
    form = get(body, "output_config.format", dict) or get(body, "output_format", dict, {})
    own: dict[str, Any] = {"form": form, "effort": get(body, "output_config.effort", str), "kind_of_tool": "custom"}
    return _request(body, messages, _text(body, "system"), followed, **own)


def _request(
    body: dict[str, Any],
    messages: list[Message],
    system: str = "",
    previous: Found = ([], []),
    *,
    form: dict[str, Any],
    effort: str | None,
    logprobs: bool = False,
    most_answers: int = 1,
    kind_of_tool: str = "function",
) -> AgentRequest:
    """What the three have in common; what each has its own name for is given. A conversation that goes on from
    `previous` keeps its instructions and its tools, unless there are others."""
    if not messages:
        raise Refusal(f"{'input' if 'input' in body else 'messages'}: a list of at least one message is needed")
    for name, neutral in NEUTRAL.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            hint = f" or set it to {' or '.join(map(json.dumps, neutral))}" if neutral else ""
            raise Refusal(f"{name}: this server does not support it; leave it out{hint}")
    history, kept_tools = previous
    if system:
        said = history[1:] if history and history[0]["role"] == "system" else history
        history = [{"role": "system", "content": system}, *said]
    given = enumerate(get(body, "tools", list, []))
    tools = [tool for i, raw in given for tool in _tool(raw, f"tools[{i}]", kind_of_tool)] or kept_tools
    sampling = parse_sampling(body) | _schema(form)
    n = sampling.pop("n", 1)
    if n > most_answers:
        raise Refusal("n: only chat completions give more than one answer")
    kwargs = get(body, "chat_template_kwargs", dict, {})
    if effort:
        kwargs = kwargs | {"reasoning_effort": effort}
    return AgentRequest(
        messages=history + messages,
        model=str(body.get("model") or "default"),
        sampling=sampling,
        tools=tools,
        tool_choice=_tool_choice(body.get("tool_choice"), tools),
        template_kwargs=kwargs,
        n=n,
        logprobs=logprobs,
        store=get(body, "store", bool, True),
        stream=get(body, "stream", bool, False),
        stream_usage=get(body, "stream_options.include_usage", bool, False),
    )


def parse_sampling(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of GenerationHyperparameters that the body sets. Raises Refusal."""
    sampling: dict[str, Any] = {}
    for name, (kind, least, most) in NUMBERS.items():
        value: Any = body.get(name)
        if value is None:
            continue
        if type(value) not in (int, kind) or not least <= value <= most:  # True is no number
            words = "an integer" if kind is int else "a number"
            raise Refusal(f"{name}: {words} from {least} to {most} is needed, not {write_json(value, name)}")
        if sampling.setdefault("max_new_tokens" if name in LIMITS else name, kind(value)) != value:
            raise Refusal(f"max_tokens: {', '.join(LIMITS)} are names of one limit; give one of them")
    for name, kind, one in (("stop", str, "string"), ("stop_sequences", str, "string"), ("stop_token_ids", int, "id")):
        given = body.get(name) or []
        given = [given] if isinstance(given, str) else given
        if not isinstance(given, list) or not all(type(item) is kind and item != "" for item in given):
            raise Refusal(f"{name}: a list is needed, each of it {one}, none empty")
        if given:
            sampling.setdefault(name.replace("_sequences", ""), []).extend(given)
    return sampling


def _schema(form: dict[str, Any]) -> dict[str, str]:
    """`response_format` and its cousins as {"json_schema": text}, or nothing for plain text."""
    kind = form.get("type", "text")
    holder = get(form, "json_schema", dict, form)  # chat has it one level deeper
    schema = {"type": "object"} if kind == "json_object" else holder.get("schema")
    if kind == "text":
        return {}
    if kind not in ("json_object", "json_schema") or not isinstance(schema, dict):
        raise Refusal("response_format: type text, json_object, or json_schema with a schema is needed")
    write_json(schema, "response_format.schema")
    return {"json_schema": json.dumps(schema)}  # keys in the caller's order: a grammar generates them so


def _tool(raw: Any, where: str, kind: str) -> list[dict[str, Any]]:
    """A tool in chat form; nothing where it is none that we can offer (`web_search`, ...)."""
    if as_object(raw, where).get("type") not in (None, kind):
        return []
    function = as_object(raw.get("function", raw), where)
    name, description = function.get("name"), function.get("description") or ""
    parameters = function.get("parameters", function.get("input_schema")) or {"type": "object", "properties": {}}
    if not isinstance(name, str) or not isinstance(description, str) or not isinstance(parameters, dict):
        raise Refusal(f"{where}: a name, and if it has them a description and parameters (a JSON schema) are needed")
    return [{"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}]


def _tool_choice(raw: Any, tools: list[dict[str, Any]]) -> str:
    """auto, none, required or a name, from a string or one of the forms {"type"[, "name"]}. Raises Refusal."""
    if isinstance(raw, dict):
        named = raw["function"] if isinstance(raw.get("function"), dict) else raw
        raw = raw.get("type") if raw.get("type") in ("auto", "none", "any") else named.get("name", "")
    choice = {None: "auto", "any": "required"}.get(raw, raw) if isinstance(raw, str | None) else ""
    names = [tool["function"]["name"] for tool in tools]
    if choice not in ("auto", "none", *names, *(["required"] if names else [])):
        raise Refusal("tool_choice: auto, none, or where there are tools, required or a tool's name, is needed")
    return str(choice)


def _item(raw: Any, where: str, find: Find) -> Message:
    """One item of a Responses input as a message or a piece of one."""
    kind = (raw.get("type") or "message") if isinstance(raw, dict) else None
    if kind == "function_call":
        raw = {"role": "assistant", "tool_calls": [{"id": raw.get("call_id"), "function": raw}]}
    elif kind == "function_call_output":
        raw = {"role": "tool", "content": raw.get("output"), "tool_call_id": raw.get("call_id")}
    elif kind == "reasoning":
        raw = {"role": "assistant", "reasoning_content": raw.get("content") or raw.get("summary")}
    elif kind == "item_reference":
        return _referred(str(raw.get("id")), find)
    elif kind != "message":
        kinds = "message, function_call, function_call_output, reasoning or item_reference"
        raise Refusal(f"{where}.type: {kinds} is needed")
    return normalise(raw, where)


def _merge_items(pieces: Iterable[Message]) -> list[Message]:
    """The items of one reply, in the order reasoning, text, calls, as one message."""
    messages: list[Message] = []
    for piece in pieces:
        last = messages[-1] if messages else {"role": None}
        both = last["role"] == piece["role"] == "assistant"
        only_calls = "tool_calls" in piece and not piece["content"] and "reasoning_content" not in piece
        if both and (only_calls or not (last["content"] or "tool_calls" in last)):
            joined = {key: last[key] + piece[key] for key in last.keys() & piece.keys() - {"role"}}
            messages[-1] = last | piece | joined
        else:
            messages.append(piece)
    return messages


def _blocks(raw: Any, where: str) -> list[Message]:
    """One Anthropic message: each tool_result is a message, its text, thinking and tool_use blocks are another."""
    if not isinstance(as_object(raw, where).get("content"), list):
        return [normalise(raw, where)]
    blocks: dict[str, list] = {"text": [], "tool_result": [], "tool_use": [], "thinking": [], "redacted_thinking": []}
    for i, block in enumerate(raw["content"]):
        kind = str(as_object(block, f"{where}.content[{i}]").get("type"))
        if kind not in blocks:
            raise Refusal(f"{where}.content[{i}].type: one of {', '.join(blocks)} is needed")
        blocks[kind].append(block)
    results = [{"role": "tool", "tool_call_id": b.get("tool_use_id"), **b} for b in blocks["tool_result"]]
    calls = [{"id": b.get("id"), "function": b | {"arguments": b.get("input")}} for b in blocks["tool_use"]]
    thoughts = [{"text": b.get("thinking")} for b in blocks["thinking"]]
    rest = {"role": raw.get("role"), "content": blocks["text"], "tool_calls": calls, "reasoning_content": thoughts}
    return [normalise(m, where) for m in (results if results and not blocks["text"] else [*results, rest])]


# References


def _followed(previous: str | None, name: str, find: Find) -> Found:
    """The interaction `previous` that the field `name` says to go on from; nothing where it says none."""
    found = find(previous) if previous else ([], [])
    if found is None:
        raise Refusal(f"{name}: no finished response {previous!r} in this session")
    return found


def _referred(item_id: str, find: Find) -> Message:
    """The item that a reference names: msg_<hex>, rs_<hex> or fc_<hex>_<k> of the response resp_<hex>."""
    kind, hexadecimal, k = [*item_id.split("_"), "", ""][:3]
    found = find(f"resp_{hexadecimal}")
    output = found[0][-1] if found else {}
    key = {"msg": "content", "rs": "reasoning_content", "fc": "tool_calls"}.get(kind, "")
    value = output.get(key)
    if key == "tool_calls" and value:
        value = [call for call in value if call["id"] == f"call_{hexadecimal}_{k}"]
    if not value:
        raise Refusal(f"input: item_reference: there is no item {item_id!r} in this session")
    return {"role": "assistant", "content": "", key: value}
