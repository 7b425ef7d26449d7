"""Read a request in one of three protocols into one form.

`parse_chat`, `parse_responses` and `parse_anthropic` turn a JSON body into an AgentRequest, whose
messages have the form that chat templates and the conversation tree read:

    {"role": "assistant", "content": "Let me see.", "reasoning_content": "I need the weather.",
     "tool_calls": [{"id": "call_1", "type": "function",
                     "function": {"name": "f", "arguments": {"a": 1}}}]}
    {"role": "tool", "content": "21 degrees", "tool_call_id": "call_1"}

**Equal messages.** An agent sends the whole history with every call, and a client may write a reply
down differently: null for "", parts for a string, other white space in a call's JSON. So the tree
compares only `canonical`: role, text, calls (id, name, arguments as JSON) and the id of a result.
What else a message has (name, reasoning, cache marks, annotations) counts for nothing. A changed
text begins another conversation.

**References.** Some clients send an id instead of the history: `previous_response_id`,
`item_reference`, or Anthropic's `thread`. The messages that it stands for are taken from the
session (`find`), and the first and the last of the three name the parent.

**Parameters** that could change the answer are used or refused, never dropped. Everything else is
ignored. Images and files become a placeholder, because the policy reads only text.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import orjson
from pydantic import ValidationError

from inference.fields import Refusal, as_object, get, read_json, write_json
from inference.io_struct import CallParameters

Json = dict[str, Any]
Message = Json
Find = Callable[[str], Any]  # the finished interaction with this id, or None
NOTHING: Find = dict[str, Any]().get
ROLES = ("system", "developer", "user", "assistant", "tool")
TEXTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
BLOCKS = ("text", "tool_result", "tool_use", "thinking", "redacted_thinking")
MEDIA = ("image", "image_url", "input_image", "document", "file", "input_file", "input_audio")
PLACEHOLDER = "[an image or a file, which this model cannot read]"
UNSUPPORTED = (
    "functions function_call mcp_servers top_logprobs min_p min_tokens ignore_eos logit_bias "
    "continue_final_message background repetition_penalty modalities chat_template "
    "audio web_search_options conversation prompt container compaction guided_json guided_regex "
    "guided_choice guided_grammar"
)
NEUTRAL: Any = (None, [], {}, "none", "auto", ["text"])  # values that change nothing
SAMPLING = {  # the protocols' names -> fields of CallParameters
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), "max_new_tokens"),
    **dict.fromkeys(("stop", "stop_sequences"), "stop"),
    **{name: name for name in ("temperature", "top_p", "top_k", "seed", "stop_token_ids")},
    **{name: name for name in ("frequency_penalty", "presence_penalty")},
}


@dataclass(frozen=True)
class AgentRequest:
    """One call of an agent, whatever its protocol."""

    messages: list[Message]  # the whole conversation, with what the client named by id
    model: str = "default"
    sampling: Json = field(default_factory=dict)  # the fields of CallParameters that it set
    tools: list[Json] = field(default_factory=list)  # functions, in the form of chat completions
    tool_choice: str = "auto"  # auto, none, required, or the name of a tool
    callable_tools: list[Json] = field(default_factory=list)  # those that the reply may call
    parent: Any = None  # the interaction that the client named
    template_kwargs: Json = field(default_factory=dict)  # more variables of the chat template
    n: int = 1
    logprobs: bool = False
    stream: bool = False
    stream_usage: bool = False  # whether a stream of chat completions ends with token counts

    @cached_property
    def template_key(self) -> bytes:
        """All that the prompt depends on beside the messages."""
        kwargs = write_json(self.template_kwargs, "chat_template_kwargs")
        return kwargs + write_json(self.tools, "tools")


# ---- messages


def normalise(raw: Any, where: str = "message") -> Message:
    """A message of chat completions in the form above. `where` is its path, such as "messages[0]".
    Raises Refusal."""
    role = as_object(raw, where).get("role")
    if role not in ROLES:
        raise Refusal(f"{where}.role: one of {', '.join(ROLES)} is needed")
    text = _text(raw, "content", where)
    plain: Message = {"role": "system" if role == "developer" else role, "content": text}
    if raw.get("tool_calls"):
        calls = get(raw, "tool_calls", list, where=where)
        plain["tool_calls"] = [_tool_call(call, f"{where}.tool_calls") for call in calls]
    call_id = raw.get("tool_call_id") or raw.get("id")  # some clients say id
    if role == "tool" and call_id:
        plain["tool_call_id"] = str(call_id)
    name = "reasoning_content" if raw.get("reasoning_content") else "reasoning"
    if role == "assistant" and (reasoning := _text(raw, name, where)):
        plain["reasoning_content"] = reasoning
    return plain


def canonical(message: Message) -> bytes:
    """What of a normalised message the conversation tree compares."""
    compared = [message.get(key) for key in ("role", "content", "tool_calls", "tool_call_id")]
    return orjson.dumps(compared, option=orjson.OPT_SORT_KEYS)


def _tool_call(raw: Any, where: str) -> Json:
    """A call whose arguments are decoded, unless they are no JSON, as a model may write them."""
    function = as_object(as_object(raw, where).get("function"), where)
    call_id, name, arguments = raw.get("id"), function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not isinstance(call_id, str | None):
        raise Refusal(f"{where}: a call has an id and the name of a function, both strings")
    if arguments is None or arguments == "":
        arguments = "{}"
    elif not isinstance(arguments, str):  # as text, so that `read_json` turns 2.0 into 2
        arguments = write_json(arguments, where).decode()
    with contextlib.suppress(ValueError):
        arguments = read_json(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(raw: Json, name: str, where: str = "") -> str:
    """A field that is a string, a list of parts, null or absent, as one text."""
    content = raw.get(name)
    if isinstance(content, str | None):
        return content or ""
    texts = [_text_of(part) for part in content] if isinstance(content, list) else [None]
    if None in texts:
        what = "a string, a list of texts and images, or null is needed"
        raise Refusal(f"{where}.{name}: {what}".removeprefix("."))
    return "".join(filter(None, texts))


def _text_of(part: Any) -> str | None:
    kind = part.get("type", "text") if isinstance(part, dict) else ""
    text = PLACEHOLDER if kind in MEDIA else part.get("text") if kind in TEXTS else None
    return text if isinstance(text, str) else None


def _objects(body: Json, name: str) -> list[tuple[Json, str]]:
    """The objects of a list, each with its path."""
    listed = enumerate(get(body, name, list, []))
    return [(as_object(raw, f"{name}[{i}]"), f"{name}[{i}]") for i, raw in listed]


# ---- the three protocols; each raises Refusal


def parse_chat(body: Json, find: Find = NOTHING) -> AgentRequest:
    """Read the body of POST /v1/chat/completions."""
    messages = [normalise(raw, where) for raw, where in _objects(body, "messages")]
    form, effort = get(body, "response_format", dict, {}), get(body, "reasoning_effort", str)
    shared = _shared(body, _tools(body, "function"), form, effort, most_answers=128)
    logprobs = get(body, "logprobs", bool, False)
    return AgentRequest(_conversation("messages", messages), logprobs=logprobs, **shared)


def parse_responses(body: Json, find: Find = NOTHING) -> AgentRequest:
    """Read the body of POST /v1/responses."""
    if isinstance(body.get("input"), str):
        body = body | {"input": [{"role": "user", "content": body["input"]}]}
    new = _join_items([_item(raw, where, find) for raw, where in _objects(body, "input")])
    parent = _look_up(get(body, "previous_response_id", str), "previous_response_id", find)
    messages = _conversation("input", new, _text(body, "instructions"), parent)
    form, effort = get(body, "text.format", dict, {}), get(body, "reasoning.effort", str)
    logprobs = "message.output_text.logprobs" in get(body, "include", list, [])
    shared = _shared(body, _tools(body, "function"), form, effort)
    return AgentRequest(messages, logprobs=logprobs, parent=parent, **shared)


def parse_anthropic(body: Json, find: Find = NOTHING) -> AgentRequest:
    """Read the body of POST /v1/messages."""
    raws = _objects(body, "messages")
    new = [message for raw, where in raws for message in _split_blocks(raw, where)]
    if new and new[-1]["role"] == "assistant":
        raise Refusal("messages: the last one is the assistant's; prefilling is not supported")
    thread, previous = get(body, "thread.type", str), get(body, "thread.previous_message_id", str)
    if thread not in (None, "create", "continue") or (thread == "continue") != bool(previous):
        raise Refusal("thread: type create, or continue with a previous_message_id, is needed")
    parent = _look_up(previous, "thread.previous_message_id", find)
    messages = _conversation("messages", new, _text(body, "system"), parent)
    form = get(body, "output_config.format", dict) or get(body, "output_format", dict, {})
    tools = _tools(body, "custom") or getattr(parent, "tools", [])
    effort = get(body, "output_config.effort", str)
    return AgentRequest(messages, parent=parent, **_shared(body, tools, form, effort))


def _conversation(
    name: str, new: list[Message], system: str = "", parent: Any = None
) -> list[Message]:
    """The instructions, the parent's conversation without its own, and the new messages."""
    if not new:
        raise Refusal(f"{name}: a list of at least one message is needed")
    messages = [*parent.conversation, *new] if parent else new
    if system and messages[0]["role"] == "system" and parent:
        messages = messages[1:]
    return [{"role": "system", "content": system}, *messages] if system else messages


def _shared(
    body: Json, tools: list[Json], form: Json, effort: str | None, most_answers: int = 1
) -> Json:
    """The fields of AgentRequest that all protocols spell alike. `form` asks for structured output,
    `effort` is that of reasoning."""
    for name in UNSUPPORTED.split():
        if body.get(name) and body[name] not in NEUTRAL:
            raise Refusal(f"{name}: this server does not support it; leave it out")
    n = get(body, "n", int, 1)
    if type(n) is not int or not 1 <= n <= most_answers:
        raise Refusal(f"n: a number from 1 to {most_answers} is needed in this protocol")
    tool_choice, callable_tools = _tool_choice(body.get("tool_choice"), tools)
    effort_kwargs = {"reasoning_effort": effort} if effort else {}
    return {
        "model": get(body, "model", str) or "default",
        "sampling": _sampling(body) | _schema(form),
        "tools": tools,
        "tool_choice": tool_choice,
        "callable_tools": callable_tools,
        "template_kwargs": get(body, "chat_template_kwargs", dict, {}) | effort_kwargs,
        "n": n,
        "stream": get(body, "stream", bool, False),
        "stream_usage": get(body, "stream_options.include_usage", bool, False),
    }


def _sampling(body: Json) -> Json:
    """The body's sampling parameters as fields of CallParameters, which checks them."""
    sampling: Json = {}
    for name, key in SAMPLING.items():
        value = body.get(name)
        if value in (None, "", []):
            continue
        value = [value] if key == "stop" and isinstance(value, str) else value
        try:
            CallParameters.model_validate({key: value}, strict=True)
        except ValidationError as error:
            raise Refusal(f"{name}: {error.errors()[0]['msg']}") from error
        is_large = isinstance(value, int) and key != "seed" and value >= 2**31  # for SGLang
        if is_large or (key == "stop" and "" in value):
            raise Refusal(f"{name}: no string may be empty, and no number so large")
        if sampling.setdefault(key, value) != value:
            raise Refusal(f"{name}: another parameter says something else about {key}")
    return sampling


def _schema(form: Json) -> Json:
    """The requested structured output as {"json_schema": text}."""
    kind = form.get("type", "text")
    if kind == "text":
        return {}
    holder = get(form, "json_schema", dict, form)  # chat completions wrap it
    schema = {"type": "object"} if kind == "json_object" else holder.get("schema")
    if kind not in ("json_object", "json_schema") or not isinstance(schema, dict):
        what = "type text, json_object, or json_schema with a schema is needed"
        raise Refusal(f"response_format: {what}")
    write_json(schema, "response_format.schema")
    return {"json_schema": orjson.dumps(schema).decode()}  # not sorted: the answer has its order


def _tools(body: Json, tool_type: str) -> list[Json]:
    """The body's functions. Their type is `tool_type` or absent; others, like web_search, are
    ignored."""
    tools = []
    for raw, where in _objects(body, "tools"):
        if raw.get("type") not in (None, tool_type):
            continue
        given = as_object(raw.get("function", raw), where)  # chat completions wrap it
        name = get(given, "name", str, where=where)
        parameters = given.get("parameters", given.get("input_schema"))
        if name is None or not isinstance(parameters, dict | None):
            raise Refusal(f"{where}: a name is needed, and parameters are a JSON schema")
        function = {
            "name": name,
            "description": get(given, "description", str, "", where),
            "parameters": parameters or {"type": "object", "properties": {}},
        }
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(raw: Any, tools: list[Json]) -> tuple[str, list[Json]]:
    """The choice, and the tools that the reply may call. `raw` is one of

    "auto"   {"type": "any"}   {"type": "tool", "name": "f"}
    {"type": "function", "function": {"name": "f"}}
    {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    """
    choice = "auto" if raw is None else raw
    if isinstance(raw, dict) and raw.get("type") in ("auto", "none", "any"):
        choice = raw["type"]
    elif isinstance(raw, dict) and raw.get("type") == "allowed_tools":
        raw = get(raw, "allowed_tools", dict, raw, "tool_choice")  # chat completions wrap it
        allowed = [tool["function"]["name"] for tool in _tools(raw, "function")]
        choice = raw.get("mode")
        tools = [tool for tool in tools if tool["function"]["name"] in allowed]
    elif isinstance(raw, dict):
        choice = get(raw, "function", dict, raw, "tool_choice").get("name")
    choice = "required" if choice == "any" else choice  # Anthropic's word
    names = [tool["function"]["name"] for tool in tools]
    if choice not in ("auto", "none", *names) and not (choice == "required" and names):
        raise Refusal("tool_choice: auto, none or, with tools, required or a tool's name is needed")
    return choice, tools if choice != "none" else []


# ---- items of the Responses protocol


def _item(raw: Json, where: str, find: Find) -> Message:
    """One item of the input as a message."""
    kind = raw.get("type") or "message"
    if kind == "function_call":
        raw = {"role": "assistant", "tool_calls": [{"id": raw.get("call_id"), "function": raw}]}
    elif kind == "function_call_output":
        raw = {"role": "tool", "content": raw.get("output"), "tool_call_id": raw.get("call_id")}
    elif kind == "reasoning":
        raw = {"role": "assistant", "reasoning_content": raw.get("content") or raw.get("summary")}
    elif kind == "item_reference":
        return _item(_referred(str(raw.get("id")), find), where, find)
    elif kind != "message":
        kinds = "message, function_call, function_call_output, reasoning or item_reference"
        raise Refusal(f"{where}.type: {kinds} is needed")
    return normalise(raw, where)


def _join_items(pieces: list[Message]) -> list[Message]:
    """Join the items of one reply: reasoning, then text, then calls."""
    messages: list[Message] = []
    for piece in pieces:
        last = messages[-1] if messages else {"role": ""}
        only_calls = piece.keys() == {"role", "content", "tool_calls"} and not piece["content"]
        only_reasoning = not last.get("content") and "tool_calls" not in last
        if last["role"] == piece["role"] == "assistant" and (only_calls or only_reasoning):
            for key in piece.keys() - {"role"}:  # texts, or lists of calls
                last[key] = last[key] + piece[key] if key in last else piece[key]
        else:
            messages.append(piece)
    return messages


# ---- blocks of Anthropic's protocol


def _split_blocks(raw: Json, where: str) -> list[Message]:
    """One message for each tool result, and one for all other blocks."""
    if not isinstance(raw.get("content"), list):
        return [normalise(raw, where)]
    blocks: dict[Any, list[Json]] = {kind: [] for kind in BLOCKS}
    for i, block in enumerate(raw["content"]):
        kind = as_object(block, f"{where}.content[{i}]").get("type")
        if kind not in BLOCKS + MEDIA:
            kinds = ", ".join(BLOCKS + MEDIA)
            raise Refusal(f"{where}.content[{i}].type: one of {kinds} is needed")
        blocks["text" if kind in MEDIA else kind].append(block)
    results = [
        b | {"role": "tool", "tool_call_id": b.get("tool_use_id")} for b in blocks["tool_result"]
    ]
    uses = blocks["tool_use"]
    calls = [{"id": b.get("id"), "function": b | {"arguments": b.get("input")}} for b in uses]
    thoughts = [{"text": block.get("thinking")} for block in blocks["thinking"]]
    said = {"role": raw.get("role"), "content": blocks["text"]}
    said |= {"tool_calls": calls, "reasoning_content": thoughts}
    is_empty = results and not (blocks["text"] or calls or thoughts)
    return [normalise(m, where) for m in (results if is_empty else [*results, said])]


# ---- references


def _look_up(previous: str | None, name: str, find: Find) -> Any:
    found = find(previous) if previous else None
    if previous and not found:
        raise Refusal(f"{name}: this session has no finished response {previous!r}")
    return found


def _referred(item_id: str, find: Find) -> Json:
    """The item of an earlier reply. resp_<x> has the items rs_<x>, msg_<x> and fc_<x>_<k>."""
    found = find("resp_" + item_id.partition("_")[2].partition("_")[0])
    items = found.reply["output"] if found else []
    for item in items:
        if item["id"] == item_id:
            return item
    raise Refusal(f"input: item_reference: this session has no item {item_id!r}")
