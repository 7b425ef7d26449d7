"""Bring requests of three protocols into one form.

`read_request` turns a JSON body into an AgentRequest. Its messages have the form that chat
templates and the tree of calls (cache.py) read:

    {"role": "assistant", "content": "Let me see.", "tool_calls":
     [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}
    {"role": "tool", "content": "21 degrees", "tool_call_id": "call_1"}

**Three protocols.** A conversation is a list of messages, whose content is a text or a list of
blocks. In the Responses protocol, the list also holds each tool call and each result as an item of
its own. Each block or item is read as a small message, and small messages that belong together are
joined. Reasoning is dropped, except `reasoning_content`, which templates may read.

**Equal messages.** A client repeats an earlier reply in its next call, but may write null for "", a
list of parts for a string, or other white space in a tool call's JSON. So the tree compares only
role, text, tool calls (id, name, arguments) and a result's id (`canonical`). In a system message,
text that matches VOLATILE is ignored, because some clients change it with every call.

**References.** A call may send an id in place of the history (`previous_response_id`) or in place
of an item (`item_reference`). The argument `find` looks the id up in the session.

**Parameters** in UNSUPPORTED are refused, and unknown ones are ignored. Images, files and unknown
blocks become PLACEHOLDER. A refusal of such a block would end the chat, because clients repeat it
in every call.
"""

import contextlib
import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
from pydantic import ValidationError

from inference.fields import Refusal, as_object, get, read_json, write_json
from inference.io_struct import CallParameters

Json = dict[str, Any]
Message = Json
Find = Callable[[str], Any]  # the session's interaction with this id, or None
ROLES = ("system", "developer", "user", "assistant")
PLACEHOLDER = "[something that is no text, so this model cannot read it]"
UNSUPPORTED = (
    "functions function_call mcp_servers logprobs top_logprobs min_p min_tokens ignore_eos "
    "logit_bias continue_final_message background repetition_penalty modalities chat_template "
    "audio web_search_options conversation prompt container compaction guided_json guided_regex "
    "guided_choice guided_grammar thread"
)
ALSO_READ = ("name", "reasoning_content")  # what templates may read, but the tree does not compare
# Claude Code's fingerprint of a call: "x-anthropic-billing-header: cc_version=2.1; cch=36ee5;"
VOLATILE = re.compile(r"x-anthropic-billing-header:(?: *\w+=[^;\s]*;)+")
# An unsupported parameter that is empty or has one of these values is accepted, because it has no
# effect.
NEUTRAL: Any = ("none", "auto", ["text"], {"type": "create"})
SAME = "temperature top_p top_k seed stop stop_token_ids frequency_penalty presence_penalty"
# the protocols' names -> fields of CallParameters
SAMPLING = {name: name for name in SAME.split()} | {"stop_sequences": "stop"}
SAMPLING |= dict.fromkeys(
    ("max_tokens", "max_completion_tokens", "max_output_tokens"), "max_new_tokens"
)
FORMS = ("response_format", "text.format", "output_config.format", "output_format")


@dataclass(frozen=True)
class AgentRequest:
    """An agent's call, in the same form for all protocols."""

    messages: list[Message]  # the whole conversation, with references resolved
    model: str = "default"
    sampling: Json = field(default_factory=dict)  # fields of CallParameters that the call set
    tools: list[Json] = field(default_factory=list)  # functions, in the form of chat completions
    tool_choice: str = "auto"  # auto, none, required, or the name of a tool
    template_kwargs: Json = field(default_factory=dict)  # extra variables for the chat template
    stream: bool = False
    parallel_tool_calls: bool = True  # whether a reply may have several calls


def read_request(body: Json, find: Find, history: str = "messages") -> AgentRequest:
    """Return the call that `body` describes. `history` is the field of `body` that holds the
    conversation. Raises Refusal for a wrong body."""
    write_json(body, "body")  # refuses a body that is nested too deeply
    for name in UNSUPPORTED.split():
        if body.get(name) and body[name] not in NEUTRAL:
            raise Refusal(f"{name}: this server does not support it; leave it out")
    if body.get("n") not in (None, 1):
        raise Refusal("n: a call has one answer; make several calls")
    if isinstance(body.get("input"), str):
        body = body | {"input": [{"role": "user", "content": body["input"]}]}
    if isinstance(choice := body.get("tool_choice"), dict):  # Anthropic's parallel_tool_calls
        body = {"parallel_tool_calls": not choice.get("disable_parallel_tool_use")} | body
    messages, tools = _messages(body, history, find), _tools(body)
    if previous := get(body, "previous_response_id", str):
        found = find(previous)
        if not (found and found.reply):
            raise Refusal(f"previous_response_id: this session has no finished {previous!r}")
        messages = [*found.conversation, *messages]
    if system := _text(body.get("system") or body.get("instructions"), "system or instructions"):
        inherited = messages[0]["role"] == "system" and previous
        messages = [{"role": "system", "content": system}, *messages[1 if inherited else 0 :]]
    choice = _tool_choice(body.get("tool_choice"), tools)
    form = _schema(_first(body, FORMS) or {})
    return AgentRequest(
        messages,
        model=get(body, "model", str) or "default",
        # With tools, a schema is ignored, because its grammar would rule out tool calls.
        sampling=_sampling(body) | (form if not tools or choice == "none" else {}),
        tools=tools,
        tool_choice=choice,
        template_kwargs=get(body, "chat_template_kwargs", dict, {}),
        stream=get(body, "stream", bool, False),
        parallel_tool_calls=get(body, "parallel_tool_calls", bool, True),
    )


def _first(body: Json, paths: tuple[str, ...]) -> Json | None:
    return next(filter(None, (get(body, path, dict) for path in paths)), None)


def _objects(body: Json, name: str) -> Iterator[tuple[Json, str]]:
    for i, raw in enumerate(get(body, name, list, [])):
        where = f"{name}[{i}]"
        yield as_object(raw, where), where


# ---- messages


def canonical(message: Message) -> tuple[Any, ...]:
    text, calls = message.get("content"), message.get("tool_calls")
    if message["role"] == "system":
        text = VOLATILE.sub("", message["content"])
    written = orjson.dumps(calls, option=orjson.OPT_SORT_KEYS) if calls else None
    return message["role"], text, message.get("tool_call_id"), written


def with_texts(message: Message) -> Message:
    """Return a copy in which the arguments of tool calls are text, as in OpenAI's API."""
    message = copy.deepcopy(message)
    for function in (call["function"] for call in message.get("tool_calls", ())):
        if not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return message


def _messages(body: Json, name: str, find: Find) -> list[Message]:
    messages: list[Message] = []
    for item, where in _objects(body, name):
        if item.get("type") == "item_reference":
            item = _referred(item, find)
        for k, piece in enumerate(_pieces(item, where)):
            last: Message = messages[-1] if messages else {"role": ""}
            # Join the pieces of one item if they have the same role, except results of tools. Join
            # two adjacent items of the assistant if the second is a tool call, or if the first is
            # empty (as when its reasoning was dropped).
            is_more = "tool_calls" in piece or not (last.get("content") or "tool_calls" in last)
            may_join = k > 0 or (is_more and piece["role"] == "assistant")
            if may_join and last["role"] == piece["role"] != "tool":
                for key in piece.keys() - {"role"}:  # lists of texts or of calls
                    last.setdefault(key, []).extend(piece[key])
            else:
                sent = item.items() if "role" in item else ()
                also = {k: x for k, x in sent if k in ALSO_READ and isinstance(x, str)}
                messages.append(piece | also)
    if not messages:
        raise Refusal(f"{name}: a list of at least one message is needed")
    return [message | {"content": "".join(message["content"])} for message in messages]


def _pieces(item: Json, where: str) -> Iterator[Message]:
    """Yield a small message for each block and tool call of an item. The content of a small message
    is a list of at most one text."""
    role, content = item.get("role"), item.get("content") or item.get("refusal") or ""
    if role not in ROLES:
        yield _piece(item | {"type": "tool_result"} if role == "tool" else item, "", where)
        return
    for block in content if isinstance(content, list) else [{"text": content}]:
        yield _piece(block, "system" if role == "developer" else role, where)
    for call in get(item, "tool_calls", list, [], where):
        yield _call(call, where)


def _piece(block: Any, role: str, where: str) -> Message:
    kind = as_object(block, where).get("type")
    if kind in ("function_call", "tool_use"):
        return _call(block, where)
    if kind in ("function_call_output", "tool_result"):
        names = ("tool_call_id", "call_id", "tool_use_id", "id")  # some chat clients say id
        call_id = next((str(block[name]) for name in names if block.get(name)), None)
        text = _text(block.get("output") or block.get("content"), where)
        return {"role": "tool", "content": [text], "tool_call_id": call_id}
    if kind in ("reasoning", "thinking", "redacted_thinking"):
        return {"role": "assistant", "content": []}
    if not role and kind in (None, "message"):
        raise Refusal(f"{where}.role: {', '.join(ROLES)} or tool is needed")
    text = _text([block], where)
    return {"role": role or "user", "content": [text] if text else []}


def _call(raw: Any, where: str) -> Message:
    """Return a small message that holds one tool call. Arguments that are not JSON stay text."""
    function = as_object(as_object(raw, where).get("function", raw), where)
    call_id, name = raw.get("call_id", raw.get("id")), function.get("name")
    arguments = function.get("arguments", function.get("input"))
    if not isinstance(name, str) or not isinstance(call_id, str | None):
        raise Refusal(f"{where}: a call has an id and the name of a function, both strings")
    if not isinstance(arguments, str | None):  # as text, so that `read_json` turns 2.0 into 2
        arguments = orjson.dumps(arguments).decode()
    with contextlib.suppress(ValueError):
        arguments = read_json(arguments or "{}")
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": [], "tool_calls": [call]}


def _text(content: Any, where: str) -> str:
    text = ""
    for part in content if isinstance(content, list) else [{"text": content or ""}]:
        found = as_object(part, where)
        said = found.get("text", found.get("refusal", PLACEHOLDER))
        if isinstance(found.get("content"), list):  # a search result
            said = _text(found["content"], where)
        if not isinstance(said, str):
            raise Refusal(f"{where}: a text, or a list of parts, is needed")
        text += said
    return text


def _referred(reference: Json, find: Find) -> Json:
    """Return the item that a reference names. The item fc_<x>_0, for example, is in the reply
    resp_<x>."""
    item_id = str(reference.get("id"))
    found = find("resp_" + item_id.partition("_")[2].partition("_")[0])
    items = {item["id"]: item for item in found.reply["output"]} if found and found.reply else {}
    if item_id not in items:
        raise Refusal(f"input: item_reference: this session has no item {item_id!r}")
    return items[item_id]


# ---- other fields


def _sampling(body: Json) -> Json:
    sampling: Json = {}
    for name, key in SAMPLING.items():
        value = body.get(name)
        if value in (None, "", []):
            continue
        value = [value] if key == "stop" and isinstance(value, str) else value
        value = -1 if key == "top_k" and value == 0 else value  # 0 and -1 both turn top_k off
        check_sampling({key: value}, name)
        sampling[key] = value
    return sampling


def check_sampling(fields: Json, where: str) -> None:
    try:
        CallParameters.model_validate(fields, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise Refusal(f"{where}: {first['loc'][0]}: {first['msg']}") from error


def _schema(form: Json) -> Json:
    if form.get("type", "text") == "text":
        return {}
    is_free = form["type"] == "json_object"
    schema = {"type": "object"} if is_free else get(form, "json_schema", dict, form).get("schema")
    if not isinstance(schema, dict):
        raise Refusal(
            "response_format: type text, json_object, or json_schema with a schema is needed"
        )
    return {"json_schema": orjson.dumps(schema).decode()}


def _tools(body: Json) -> list[Json]:
    """Return the tools that are functions. Others, such as web_search, are ignored."""
    tools = []
    for raw, where in _objects(body, "tools"):
        if raw.get("type") not in (None, "function") and "input_schema" not in raw:
            continue
        given = as_object(raw.get("function", raw), where)  # chat completions wrap the function
        if not (name := get(given, "name", str, where=where)):
            raise Refusal(f"{where}: a name is needed")
        function = {
            "name": name,
            "description": get(given, "description", str, "", where),
            "parameters": _first(given, ("parameters", "input_schema"))
            or {"type": "object", "properties": {}},
        }
        tools.append({"type": "function", "function": function})
    return tools


def names_of(tools: list[Json]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def _tool_choice(raw: Any, tools: list[Json]) -> str:
    """Return auto, none, required or a tool's name. `raw` is a word, or a dict such as {"type":
    "any"}, {"type": "tool", "name": "f"} or {"type": "function", "function": {"name": "f"}}."""
    choice = "auto" if raw is None else raw
    if isinstance(raw, dict):
        choice = get(raw, "function", dict, raw, "tool_choice").get("name") or raw.get("type")
    choice = "required" if choice == "any" else choice  # Anthropic's word
    names = names_of(tools)
    if choice not in ("auto", "none", *(names and ["required"]), *names):
        raise Refusal("tool_choice: auto, none or, with tools, required or a tool's name is needed")
    return choice
