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
import copy
import json
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
MEDIA = ("image", "image_url", "input_image", "document", "file", "input_file", "input_audio")
PLACEHOLDER = "[an image or a file, which this model cannot read]"
UNSUPPORTED = (
    "functions function_call mcp_servers logprobs top_logprobs min_p min_tokens ignore_eos "
    "logit_bias continue_final_message background repetition_penalty modalities chat_template "
    "audio web_search_options conversation prompt container compaction guided_json guided_regex "
    "guided_choice guided_grammar"
)
NEUTRAL: Any = ("none", "auto", ["text"])  # values that change nothing, beside null and empty ones
SAMPLING = {  # the protocols' names -> fields of CallParameters
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), "max_new_tokens"),
    **dict.fromkeys(("stop", "stop_sequences"), "stop"),
    **{name: name for name in ("temperature", "top_p", "top_k", "seed", "stop_token_ids")},
    **{name: name for name in ("frequency_penalty", "presence_penalty")},
}
FORMS = ("response_format", "text.format", "output_config.format", "output_format")
EFFORTS = ("reasoning_effort", "reasoning.effort", "output_config.effort")


@dataclass(frozen=True)
class AgentRequest:
    """One call of an agent, whatever its protocol."""

    messages: list[Message]  # the whole conversation, with what the client named by id
    model: str = "default"
    sampling: Json = field(default_factory=dict)  # the fields of CallParameters that it set
    tools: list[Json] = field(default_factory=list)  # functions, in the form of chat completions
    tool_choice: str = "auto"  # auto, none, required, or the name of a tool
    parent: Any = None  # the interaction that the client named
    template_kwargs: Json = field(default_factory=dict)  # more variables of the chat template
    stream: bool = False
    stream_usage: bool = False  # whether a stream of chat completions ends with token counts

    @property
    def callable_tools(self) -> list[Json]:
        return [] if self.tool_choice == "none" else self.tools

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
    text = _text(raw.get("content"), f"{where}.content")
    plain: Message = {"role": "system" if role == "developer" else role, "content": text}
    if calls := get(raw, "tool_calls", list, where=where):
        plain["tool_calls"] = [_tool_call(call, f"{where}.tool_calls") for call in calls]
    call_id = raw.get("tool_call_id") or raw.get("id")  # some clients say id
    if role == "tool" and call_id:
        plain["tool_call_id"] = str(call_id)
    reasoning = raw.get("reasoning_content") or raw.get("reasoning")
    if role == "assistant" and (thought := _text(reasoning, f"{where}.reasoning_content")):
        plain["reasoning_content"] = thought
    return plain


def canonical(message: Message) -> bytes:
    """What of a normalised message the conversation tree compares."""
    compared = [message.get(key) for key in ("role", "content", "tool_calls", "tool_call_id")]
    return orjson.dumps(compared, option=orjson.OPT_SORT_KEYS)


def with_texts(message: Message) -> Message:
    """A copy in which the arguments of calls are text, as OpenAI writes them."""
    message = copy.deepcopy(message)
    for function in (call["function"] for call in message.get("tool_calls", ())):
        if not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return message


def _tool_call(raw: Any, where: str) -> Json:
    """A call whose arguments are decoded, unless they are no JSON, as a model may write them."""
    function = as_object(as_object(raw, where).get("function"), where)
    call_id, name, arguments = raw.get("id"), function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not isinstance(call_id, str | None):
        raise Refusal(f"{where}: a call has an id and the name of a function, both strings")
    if not isinstance(arguments, str | None):  # as text, so that `read_json` turns 2.0 into 2
        arguments = write_json(arguments, where).decode()
    with contextlib.suppress(ValueError):
        arguments = read_json(arguments or "{}")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(content: Any, where: str) -> str:
    """A string, a list of parts, or null, as one text."""
    if isinstance(content, list):
        return "".join(_text_of(part, where) for part in content)
    if not isinstance(content, str | None):
        raise Refusal(f"{where}: a string, a list of texts and images, or null is needed")
    return content or ""


def _text_of(part: Any, where: str) -> str:
    is_media = as_object(part, where).get("type") in MEDIA
    text = PLACEHOLDER if is_media else part.get("text")
    if not isinstance(text, str):
        raise Refusal(f"{where}: a part is a text, an image or a file")
    return text


def _as_message(part: Json, role: Any = None) -> Json:
    """An item of the Responses protocol, or a block of Anthropic's in a message of this role, as a
    message of chat completions."""
    kind = part.get("type")
    if kind in ("function_call", "tool_use"):
        function = part | {"arguments": part.get("arguments", part.get("input"))}
        call = {"id": part.get("call_id", part.get("id")), "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind in ("function_call_output", "tool_result"):
        call_id, result = part.get("call_id", part.get("tool_use_id")), part.get("output")
        return {"role": "tool", "content": result or part.get("content"), "tool_call_id": call_id}
    if kind in ("reasoning", "thinking", "redacted_thinking"):
        thought = part.get("content") or part.get("summary") or part.get("thinking")
        return {"role": "assistant", "reasoning_content": thought}
    return {"role": role, "content": [part]} if role else part


def _join(name: str, body: Json, find: Find) -> list[Message]:
    """The messages that a list of items, or of messages with blocks, is."""
    messages: list[Message] = []
    for raw, where in _objects(body, name, least=1):
        item = _referred(raw, find) if raw.get("type") == "item_reference" else raw
        content, role = item.get("content"), item.get("role")
        blocks = content if role and isinstance(content, list) and content else [item]
        for k, block in enumerate(blocks):
            part = _as_message(as_object(block, where), role if blocks is content else None)
            piece, last = normalise(part, where), messages[-1] if messages else {"role": ""}
            # A reply is reasoning, then a text, then calls; blocks come in any order.
            is_more = "tool_calls" in piece or not (last.get("content") or "tool_calls" in last)
            may_join = k > 0 or (is_more and piece["role"] == "assistant")
            if may_join and last["role"] == piece["role"] != "tool":
                for key in piece.keys() - {"role"}:  # texts, or lists of calls
                    last[key] = last[key] + piece[key] if key in last else piece[key]
            else:
                messages.append(piece)
    return messages


# ---- the three protocols; each raises Refusal


def parse_chat(body: Json, find: Find = NOTHING) -> AgentRequest:
    """Read the body of POST /v1/chat/completions."""
    messages = [normalise(raw, where) for raw, where in _objects(body, "messages", least=1)]
    return _request(body, messages, _tools(body))


def parse_responses(body: Json, find: Find = NOTHING) -> AgentRequest:
    """Read the body of POST /v1/responses."""
    if isinstance(body.get("input"), str):
        body = body | {"input": [{"role": "user", "content": body["input"]}]}
    new = _join("input", body, find)
    parent = _look_up(body, "previous_response_id", find)
    instructions = _text(body.get("instructions"), "instructions")
    return _request(body, new, _tools(body), instructions, parent)


def parse_anthropic(body: Json, find: Find = NOTHING) -> AgentRequest:
    """Read the body of POST /v1/messages."""
    new = _join("messages", body, find)
    if new[-1]["role"] == "assistant":
        raise Refusal("messages: the last one is the assistant's; prefilling is not supported")
    parent = _look_up(body, "thread.previous_message_id", find)
    thread = get(body, "thread.type", str)
    if thread not in (None, "create", "continue") or (thread == "continue") != bool(parent):
        raise Refusal("thread: type create, or continue with a previous_message_id, is needed")
    tools = _tools(body) or getattr(parent, "tools", [])  # those of a thread come only once
    return _request(body, new, tools, _text(body.get("system"), "system"), parent)


def _request(
    body: Json, new: list[Message], tools: list[Json], system: str = "", parent: Any = None
) -> AgentRequest:
    """The new messages behind those of the parent, and the fields that need no protocol. `system`
    replaces the parent's."""
    for name in UNSUPPORTED.split():
        if body.get(name) and body[name] not in NEUTRAL:
            raise Refusal(f"{name}: this server does not support it; leave it out")
    if body.get("n") not in (None, 1):
        raise Refusal("n: a call has one answer; make several calls")
    if "message.output_text.logprobs" in get(body, "include", list, []):
        raise Refusal("include: this server returns no log-probabilities")
    messages = [*parent.conversation, *new] if parent else new
    if system and parent and messages[0]["role"] == "system":
        messages = messages[1:]
    form, effort = _first(body, FORMS, dict), _first(body, EFFORTS, str)
    return AgentRequest(
        [{"role": "system", "content": system}, *messages] if system else messages,
        model=get(body, "model", str) or "default",
        sampling=_sampling(body) | _schema(form or {}),
        tools=tools,
        tool_choice=_tool_choice(body.get("tool_choice"), tools),
        parent=parent,
        template_kwargs=get(body, "chat_template_kwargs", dict, {})
        | ({"reasoning_effort": effort} if effort else {}),
        stream=get(body, "stream", bool, False),
        stream_usage=get(body, "stream_options.include_usage", bool, False),
    )


def _first(body: Json, paths: tuple[str, ...], kind: type) -> Any:
    """The field that the protocols spell differently, or None."""
    return next(filter(None, (get(body, path, kind) for path in paths)), None)


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
        if sampling.setdefault(key, value) != value:
            raise Refusal(f"{name}: another parameter says something else about {key}")
    return sampling


def _schema(form: Json) -> Json:
    """The requested structured output as {"json_schema": text}."""
    kind = form.get("type", "text")
    schema = get(form, "json_schema", dict, form).get("schema")  # chat completions wrap it
    if kind == "text":
        return {}
    if kind == "json_object":
        schema = {"type": "object"}
    elif kind != "json_schema" or not isinstance(schema, dict):
        what = "type text, json_object, or json_schema with a schema is needed"
        raise Refusal(f"response_format: {what}")
    write_json(schema, "response_format.schema")
    return {"json_schema": orjson.dumps(schema).decode()}  # not sorted: the answer has its order


def _tools(body: Json) -> list[Json]:
    """The body's functions. Tools of other types, like web_search, are ignored."""
    tools = []
    for raw, where in _objects(body, "tools"):
        if raw.get("type") not in (None, "function") and "input_schema" not in raw:
            continue
        given = as_object(raw.get("function", raw), where)  # chat completions wrap it
        if not (name := get(given, "name", str, where=where)):
            raise Refusal(f"{where}: a name is needed")
        schema = get(given, "parameters", dict, where=where) or get(given, "input_schema", dict)
        function = {
            "name": name,
            "description": get(given, "description", str, "", where),
            "parameters": schema or {"type": "object", "properties": {}},
        }
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(raw: Any, tools: list[Json]) -> str:
    """The choice in one word. `raw` is a word, {"type": "any"}, {"type": "tool", "name": "f"}, or
    {"type": "function", "function": {"name": "f"}}."""
    choice = "auto" if raw is None else raw
    if isinstance(raw, dict):
        choice = get(raw, "function", dict, raw, "tool_choice").get("name") or raw.get("type")
    choice = "required" if choice == "any" else choice  # Anthropic's word
    names = [tool["function"]["name"] for tool in tools]
    if choice not in ("auto", "none", *names) and not (choice == "required" and names):
        raise Refusal("tool_choice: auto, none or, with tools, required or a tool's name is needed")
    return choice


def _objects(body: Json, name: str, least: int = 0) -> list[tuple[Json, str]]:
    """The objects of a list, each with its path."""
    listed = get(body, name, list, [])
    if len(listed) < least:
        raise Refusal(f"{name}: a list of at least one message is needed")
    return [(as_object(raw, f"{name}[{i}]"), f"{name}[{i}]") for i, raw in enumerate(listed)]


# ---- references


def _look_up(body: Json, path: str, find: Find) -> Any:
    """The interaction whose id stands at this path, if there is one."""
    previous = get(body, path, str, "")
    found = find(previous)
    if previous and not found:
        raise Refusal(f"{path}: this session has no finished response {previous!r}")
    return found


def _referred(reference: Json, find: Find) -> Json:
    """The item of an earlier reply. resp_<x> has the items rs_<x>, msg_<x> and fc_<x>_<k>."""
    item_id = str(reference.get("id"))
    found = find("resp_" + item_id.partition("_")[2].partition("_")[0])
    items = {item["id"]: item for item in found.reply["output"]} if found else {}
    if item_id not in items:
        raise Refusal(f"input: item_reference: this session has no item {item_id!r}")
    return items[item_id]
