"""Read a request in one of three protocols, and convert the request's messages to one normal form.

The three protocols are chat completions, Responses and Anthropic's Messages. Each of `parse_chat`, `parse_responses`
and `parse_anthropic` turns the JSON body of its protocol into an `AgentRequest`. The conversation tree and the chat
template read messages only in a normal form, which `normalise` returns:

    {"role": "assistant", "content": "Let me see.", "reasoning_content": "I need the weather.",
     "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}
    {"role": "tool", "content": "21 degrees", "tool_call_id": "call_1"}

The protocols Responses and Messages split a message into items or blocks: reasoning, text and tool calls.
`parse_responses` and `parse_anthropic` join the items or blocks into one message. Each tool result becomes one message.

Comparison. An agent sends the whole history with every request. To find the parent of a request, the conversation tree
(`cache.py`) compares the history with earlier requests and replies. Clients may change a reply before they send it
back. For example, `content: null` becomes `""`, or the spaces in the JSON of a tool call change. The conversation tree
compares only four fields of a message, which the function `canonical` returns:

    `role`: the roles `developer` and `system` count as equal.
    `content`: null, "" and an absent key count as equal; a list of text parts counts as the joined text.
    `tool_calls`: id, name and arguments, in order; arguments are compared as JSON: '{"a": 2.0}' equals '{ "a":2 }'.
    `tool_call_id`: in a tool's result, the id of the tool call; some clients call this key `id`.

The comparison ignores `name`, reasoning, annotations, cache markers, message ids and all unknown keys. If a client
changes the text of an earlier message, the client's request starts a new conversation. If a message counts as equal to
the parent's answer, the prompt contains the sampled tokens, even if tokenising the message would give other tokens.

References. In place of the history, some clients send an id as `previous_response_id`, `item_reference` or Anthropic's
`thread`. The parser gets the finished interaction with this id from the function `find`, and replaces the id by
messages of the interaction. Instructions in the request replace the instructions in the history. If a request continues
a thread and has no tools, the parser uses the tools of the parent. `previous_response_id` and `thread` name the parent
of the request, even if the request and the parent have different instructions or tools.

Images and files. The model reads only text. In messages and tool results, the parser replaces every image or file with
the text PLACEHOLDER. The metric `placeholders` counts the replaced images and files.

Parameters. If a parameter can change the answer, the parser uses the parameter or raises a `Refusal` that names it.
`NEUTRAL` lists the unsupported parameters. An unsupported parameter is accepted only if its value has no effect. The
parser ignores unknown keys, such as `user` and `metadata`, and the hints `thinking`, `strict` and
`parallel_tool_calls`. The chat template receives the reasoning effort as a variable.
"""

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from inference.fields import LEVELS, NOUN, Refusal, as_object, get, read_json, write_json

Json = dict[str, Any]  # a JSON object
Message = Json  # a message of a conversation, in the form of chat completions
Find = Callable[
    [str], Any
]  # function that returns the finished interaction (cache.py) with the given id, or None
NOTHING: Find = dict[
    str, Any
]().get  # a `find` function for requests without a session: it returns None for every id
ROLES = ("system", "developer", "user", "assistant", "tool")
TEXTS = (
    "text",
    "input_text",
    "output_text",
    "reasoning_text",
    "summary_text",
)  # types of content parts that hold text
BLOCKS = (
    "text",
    "tool_result",
    "tool_use",
    "thinking",
    "redacted_thinking",
)  # accepted types of Anthropic's blocks
# types of content parts that are replaced by the text PLACEHOLDER
MEDIA = (
    "image",
    "image_url",
    "input_image",
    "document",
    "file",
    "input_file",
    "audio",
    "input_audio",
)
PLACEHOLDER = "[an image or a file, which this model cannot read]"
NEUTRAL: dict[
    str, tuple[Any, ...]
] = {  # unsupported parameters, each with the values that have no effect
    **dict.fromkeys(("functions", "mcp_servers"), ([],)),
    **dict.fromkeys(("top_logprobs", "min_p", "min_tokens"), (0,)),
    **dict.fromkeys(("ignore_eos", "continue_final_message", "background"), (False,)),
    "function_call": ("none", "auto"),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "add_generation_prompt": (True,),
    "truncation": ("disabled",),
    **dict.fromkeys(
        ("chat_template", "audio", "web_search_options", "conversation", "prompt", "container"), ()
    ),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "compaction"), ()
    ),
}
LIMITS = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
)  # names of max_new_tokens in the protocols
NUMBERS: dict[
    str, tuple[type, float, float]
] = {  # type, minimum and maximum of each numeric parameter
    "temperature": (float, 0, 2**31),
    "top_p": (float, 1e-9, 1),
    "top_k": (int, -1, 2**31 - 1),
    "frequency_penalty": (float, -2, 2),
    "presence_penalty": (float, -2, 2),
    "seed": (int, -(2**63), 2**63 - 1),
    **dict.fromkeys(LIMITS, (int, 1, 2**31 - 1)),
    "n": (int, 1, 128),  # number of answers, in chat completions only
}


@dataclass(frozen=True)
class AgentRequest:
    """One request of an agent, in a form that does not depend on the protocol."""

    messages: list[
        Message
    ]  # the whole conversation in normal form, including messages that the client named by id
    model: str = "default"
    sampling: Json = field(
        default_factory=dict
    )  # the fields of GenerationHyperparameters that the agent set
    tools: list[Json] = field(
        default_factory=list
    )  # the client's functions, in the form of chat completions
    tool_choice: str = "auto"  # "auto", "none", "required" or the name of one of `tools`
    callable_tools: list[Json] = field(default_factory=list)  # the tools that the reply may call
    parent: Any = None  # the interaction that the request continues, if the client gave its id
    template_kwargs: Json = field(default_factory=dict)  # additional variables of the chat template
    n: int = 1  # number of answers
    logprobs: bool = False  # whether the reply contains the logprobs of the sampled tokens
    store: bool = True  # `rollout.openai.store` decides whether a turn with store=False is trained
    stream: bool = False  # whether the reply is a stream of events
    stream_usage: bool = (
        False  # whether a stream of chat completions ends with a chunk of token counts
    )

    @cached_property
    def template_key(self) -> str:
        """Return the chat template's variables and the tools as one text.

        The messages and the template_key determine the prompt. A turn reuses its parent's tokens only if the turn and
        the parent have the same template_key. Raises Refusal if a value is nested too deeply.
        """
        return write_json(self.template_kwargs, "chat_template_kwargs") + write_json(
            self.tools, "tools"
        )


# Messages


def normalise(raw: Any, where: str = "message") -> Message:
    """Convert the message `raw`, which has the form of chat completions, to normal form.

    `where` is the path of the message in the request, such as "messages[0]". Raises a Refusal that names this path if
    the role, the text or a tool call is not valid.
    """
    role = as_object(raw, where).get("role")
    if role not in ROLES:
        raise Refusal(f"{where}.role: one of {', '.join(ROLES)} is needed")
    plain: Message = {
        "role": "system" if role == "developer" else role,
        "content": _text(raw, "content", where),
    }
    if raw.get("tool_calls"):
        calls = get(raw, "tool_calls", list, where=where)
        plain["tool_calls"] = [_tool_call(call, f"{where}.tool_calls") for call in calls]
    call_id = raw.get("tool_call_id") or raw.get("id")
    if role == "tool" and call_id:
        plain["tool_call_id"] = str(call_id)
    name = "reasoning_content" if raw.get("reasoning_content") else "reasoning"
    reasoning = _text(raw, name, where) if role == "assistant" else ""
    if reasoning:
        plain["reasoning_content"] = reasoning
    return plain


def canonical(message: Message) -> tuple:
    """Return the four fields of a message that the conversation tree compares, as a hashable tuple.

    To save time, `canonical` does not normalise a message that is already in normal form. Raises Refusal if the role,
    text or tool calls are not valid.
    """
    calls = message.get("tool_calls") or ()
    has_objects = all(isinstance(call["function"].get("arguments"), dict) for call in calls)
    if (
        not has_objects
        or not isinstance(message.get("content"), str)
        or message.get("role") == "developer"
    ):
        message = normalise(message)
    role, calls = message["role"], message.get("tool_calls")
    calls_text = write_json(calls, "messages.tool_calls") if calls else ""
    result_of = (
        str(message.get("tool_call_id") or message.get("id") or "") if role == "tool" else ""
    )
    return role, message["content"], calls_text, result_of


def _tool_call(raw: Any, where: str) -> Json:
    """Return a tool call in normal form. Arguments that are valid JSON are decoded, and all other arguments stay text.

    Arguments also stay text if their JSON is nested too deeply for `write_json`.
    Raises Refusal if the name of the function is missing or the call's id is not a string.
    """
    function = as_object(as_object(raw, where).get("function"), where)
    call_id, name, arguments = raw.get("id"), function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not isinstance(call_id, str | None):
        raise Refusal(f"{where}: a call has an id and the name of a function, both strings")
    if arguments is None or arguments == "":
        arguments = "{}"
    elif not isinstance(
        arguments, str
    ):  # an object becomes text for `read_json`, which turns 2.0 into 2
        arguments = write_json(arguments, where)
    with contextlib.suppress(ValueError):  # a model may write arguments that are not JSON
        # A message has at most LEVELS levels of nesting. The list of tool calls adds 3 levels around the arguments.
        # `write_json` may count one level too many, so the arguments may have at most LEVELS - 4 levels.
        arguments = read_json(arguments, LEVELS - 4)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(raw: Json, name: str, where: str = "") -> str:
    """Return the field `name` as one text.

    A null or absent field gives "". If the field is a list of text parts, the function joins the texts of the parts.
    Raises Refusal if the field holds a value of a different type.
    """
    content = raw.get(name)
    if isinstance(content, str | None):
        return content or ""
    if isinstance(content, list):
        content = [
            {"text": PLACEHOLDER} if isinstance(p, dict) and p.get("type") in MEDIA else p
            for p in content
        ]
    if not isinstance(content, list) or not all(map(_is_text_part, content)):
        raise Refusal(
            f"{where}.{name}: a string, a list of texts and images, or null is needed".removeprefix(
                "."
            )
        )
    return "".join(part["text"] for part in content)


def _is_text_part(part: Any) -> bool:
    """Return whether an element of a content list is a text part: its `type` is absent or in TEXTS, and its `text` is a
    string."""
    return (
        isinstance(part, dict)
        and part.get("type", "text") in TEXTS
        and isinstance(part.get("text"), str)
    )


def _objects(body: Json, name: str) -> list[tuple[Json, str]]:
    """Return a pair (object, path) for each object in the body's list `name`. An example of a path is "messages[0]".

    Raises Refusal if the field `name` is not a list of objects.
    """
    return [
        (as_object(raw, f"{name}[{i}]"), f"{name}[{i}]")
        for i, raw in enumerate(get(body, name, list, []))
    ]


# The three protocols


def parse_chat(body: Json, find: Find = NOTHING) -> AgentRequest:
    """Read the body of POST /v1/chat/completions. Raises Refusal if the body is not valid.

    `find` is not used, because a request for a chat completion contains the whole history.
    """
    messages = [normalise(raw, where) for raw, where in _objects(body, "messages")]
    form, effort = get(body, "response_format", dict, {}), get(body, "reasoning_effort", str)
    shared = _shared(body, _tools(body, "function"), form, effort, most_answers=128)
    return AgentRequest(
        _conversation("messages", messages), logprobs=get(body, "logprobs", bool, False), **shared
    )


def parse_responses(body: Json, find: Find = NOTHING) -> AgentRequest:
    """Read the body of POST /v1/responses. Raises Refusal if the body is not valid."""
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
    """Read the body of POST /v1/messages. Raises Refusal if the body is not valid."""
    new = [
        message
        for raw, where in _objects(body, "messages")
        for message in _split_blocks(raw, where)
    ]
    if new and new[-1]["role"] == "assistant":
        raise Refusal(
            "messages: the last message must not be the assistant's; prefilled answers are not supported"
        )
    thread, previous = get(body, "thread.type", str), get(body, "thread.previous_message_id", str)
    if thread not in (None, "create", "continue") or (thread == "continue") != bool(previous):
        raise Refusal("thread: type create, or continue with a previous_message_id, is needed")
    parent = _look_up(previous, "thread.previous_message_id", find)
    messages = _conversation("messages", new, _text(body, "system"), parent)
    form = get(body, "output_config.format", dict) or get(body, "output_format", dict, {})
    tools, effort = (
        _tools(body, "custom") or getattr(parent, "tools", []),
        get(body, "output_config.effort", str),
    )
    return AgentRequest(messages, parent=parent, **_shared(body, tools, form, effort))


def _conversation(
    name: str, new: list[Message], system: str = "", parent: Any = None
) -> list[Message]:
    """Return the instructions, the conversation of the parent and the new messages as one list.

    `system` contains the request's instructions, which replace the first message of the parent's conversation if that
    is a system message. If `system` is empty, the result keeps the parent's instructions.
    `name` is the name of the field that holds the new messages. Raises Refusal if there are no new messages.
    """
    if not new:
        raise Refusal(f"{name}: a list of at least one message is needed")
    messages = [*parent.conversation, *new] if parent else new
    if system and messages[0]["role"] == "system" and parent:
        messages = messages[1:]
    return [{"role": "system", "content": system}, *messages] if system else messages


def _shared(
    body: Json, tools: list[Json], form: Json, effort: str | None, most_answers: int = 1
) -> Json:
    """Return those fields of an AgentRequest that are read in the same way in all protocols.

    `form` is the requested structured output, and `effort` is the reasoning effort. The caller reads `form` and
    `effort` from the body, because their keys differ between protocols. Raises Refusal for a parameter that is not
    valid or not supported.
    """
    for name, neutral in NEUTRAL.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            hint = f" or set it to {' or '.join(map(json.dumps, neutral))}" if neutral else ""
            raise Refusal(f"{name}: this server does not support it; leave it out{hint}")
    sampling = _sampling(body) | _schema(form)
    n = sampling.pop("n", 1)
    if n > most_answers:
        raise Refusal("n: only chat completions give more than one answer")
    tool_choice, callable_tools = _tool_choice(body.get("tool_choice"), tools)
    effort_kwargs = {"reasoning_effort": effort} if effort else {}
    return {
        "model": get(body, "model", str) or "default",
        "sampling": sampling,
        "tools": tools,
        "tool_choice": tool_choice,
        "callable_tools": callable_tools,
        "template_kwargs": get(body, "chat_template_kwargs", dict, {}) | effort_kwargs,
        "n": n,
        "store": get(body, "store", bool, True),
        "stream": get(body, "stream", bool, False),
        "stream_usage": get(body, "stream_options.include_usage", bool, False),
    }


def _sampling(body: Json) -> Json:
    """Return the body's sampling parameters as fields of GenerationHyperparameters. The key `n` is the number of
    answers.

    Raises Refusal if a parameter is not valid.
    """
    sampling: Json = {}
    for name, (kind, least, most) in NUMBERS.items():
        value: Any = body.get(name)
        if value is None:
            continue
        if (
            type(value) not in (int, kind) or not least <= value <= most
        ):  # isinstance would accept True as an int
            raise Refusal(
                f"{name}: {NOUN[kind]} from {least} to {most} is needed, not {write_json(value, name)}"
            )
        if sampling.setdefault("max_new_tokens" if name in LIMITS else name, kind(value)) != value:
            raise Refusal(
                f"max_tokens: {', '.join(LIMITS)} set the same limit; give only one of them"
            )
    for name, kind, word in (
        ("stop", str, "string"),
        ("stop_sequences", str, "string"),
        ("stop_token_ids", int, "id"),
    ):
        given = body.get(name) or []
        given = [given] if isinstance(given, str) else given
        if not isinstance(given, list) or not all(
            type(item) is kind and item != "" for item in given
        ):
            raise Refusal(f"{name}: a list of {word}s is needed, and no {word} may be empty")
        if given:
            sampling.setdefault(name.removesuffix("_sequences"), []).extend(given)
    return sampling


def _schema(form: Json) -> dict[str, str]:
    """Return the requested form of structured output as {"json_schema": text}, or {} for plain text."""
    kind = form.get("type", "text")
    if kind == "text":
        return {}
    holder = get(
        form, "json_schema", dict, form
    )  # in chat completions, `json_schema` contains the schema
    schema = {"type": "object"} if kind == "json_object" else holder.get("schema")
    if kind not in ("json_object", "json_schema") or not isinstance(schema, dict):
        raise Refusal(
            "response_format: type text, json_object, or json_schema with a schema is needed"
        )
    write_json(
        schema, "response_format.schema"
    )  # `write_json` raises Refusal if the schema is nested too deeply
    # `json.dumps` keeps the order of the schema's keys, which the model's JSON must follow. `write_json` sorts keys.
    return {"json_schema": json.dumps(schema)}


def _tools(body: Json, tool_type: str) -> list[Json]:
    """Return the body's tools that are functions, in the form of chat completions.

    A tool is a function if its key `type` is absent or equals `tool_type`, which is "function" or "custom". In
    Responses and Messages, the keys of a function, such as `name`, are in the tool itself. In chat completions, the
    keys of a function are one level deeper, in {"function": {...}}. Raises Refusal if a tool has no name.
    """
    tools = []
    for raw, where in _objects(body, "tools"):
        if raw.get("type") not in (None, tool_type):
            continue  # tools that are not functions, such as `web_search`, are ignored
        given = as_object(raw.get("function", raw), where)
        name, description = given.get("name"), given.get("description") or ""
        parameters = given.get("parameters", given.get("input_schema")) or {
            "type": "object",
            "properties": {},
        }
        if (
            not isinstance(name, str)
            or not isinstance(description, str)
            or not isinstance(parameters, dict)
        ):
            raise Refusal(
                f"{where}: a name is needed; its description is a string, its parameters a JSON schema"
            )
        function = {"name": name, "description": description, "parameters": parameters}
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(raw: Any, tools: list[Json]) -> tuple[str, list[Json]]:
    """Return the tool choice ("auto", "none", "required" or a tool's name), and the tools that the reply may call.

    Raises Refusal if a chosen tool is not in `tools`. Examples of `raw`:

        "auto"   {"type": "any"}   {"type": "tool", "name": "f"}   {"type": "function", "function": {"name": "f"}}
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
    """
    choice = "auto" if raw is None else raw
    if isinstance(raw, dict) and raw.get("type") in ("auto", "none", "any"):
        choice = raw["type"]
    elif isinstance(raw, dict) and raw.get("type") == "allowed_tools":
        # In chat completions, the list of allowed tools is one level deeper, in the key `allowed_tools`.
        raw = get(raw, "allowed_tools", dict, raw, "tool_choice")
        allowed = [tool["function"]["name"] for tool in _tools(raw, "function")]
        choice, tools = (
            raw.get("mode"),
            [tool for tool in tools if tool["function"]["name"] in allowed],
        )
    elif isinstance(raw, dict):
        choice = get(raw, "function", dict, raw, "tool_choice").get("name")
    names = [tool["function"]["name"] for tool in tools]
    if choice not in ("auto", "none", *names) and not (choice in ("required", "any") and names):
        raise Refusal(
            "tool_choice: auto or none is needed or, if there are tools, required or a tool's name"
        )
    # In Anthropic's protocol the choice "required" is called "any".
    return "required" if choice == "any" else choice, tools if choice != "none" else []


# Items of the Responses protocol


def _item(raw: Json, where: str, find: Find) -> Message:
    """Return one item from the input of a Responses request as a message. Raises Refusal for an unknown type of item.

    If an assistant's message was split into several items, `_join_items` joins these items into one message.
    """
    kind = raw.get("type") or "message"
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


def _join_items(pieces: list[Message]) -> list[Message]:
    """Join the items of each reply (reasoning, then text, then tool calls) into one message.

    Two consecutive items of the assistant become one message if the first contains only reasoning, or if the second
    contains only tool calls.
    """
    messages: list[Message] = []
    for piece in pieces:
        last = messages[-1] if messages else {"role": ""}
        only_adds_calls = (
            "tool_calls" in piece and not piece["content"] and "reasoning_content" not in piece
        )
        only_reasoning_so_far = not last.get("content") and "tool_calls" not in last
        if last["role"] == piece["role"] == "assistant" and (
            only_adds_calls or only_reasoning_so_far
        ):
            for key in piece.keys() - {"role"}:  # `piece[key]` is a text or a list of tool calls
                last[key] = last[key] + piece[key] if key in last else piece[key]
        else:
            messages.append(piece)
    return messages


# Blocks of Anthropic's Messages protocol


def _split_blocks(raw: Json, where: str) -> list[Message]:
    """Return one message for each tool_result block of an Anthropic message, and one message for all other blocks."""
    if not isinstance(raw.get("content"), list):
        return [normalise(raw, where)]
    # A redacted_thinking block is encrypted, so its content is left out.
    blocks: dict[Any, list[Json]] = {kind: [] for kind in BLOCKS}
    for i, block in enumerate(raw["content"]):
        kind = as_object(block, f"{where}.content[{i}]").get("type")
        if kind not in BLOCKS + MEDIA:
            raise Refusal(
                f"{where}.content[{i}].type: one of {', '.join(BLOCKS + MEDIA)} is needed"
            )
        blocks["text" if kind in MEDIA else kind].append(block)
    results = [
        block | {"role": "tool", "tool_call_id": block.get("tool_use_id")}
        for block in blocks["tool_result"]
    ]
    calls = [
        {"id": b.get("id"), "function": b | {"arguments": b.get("input")}}
        for b in blocks["tool_use"]
    ]
    thoughts = [{"text": block.get("thinking")} for block in blocks["thinking"]]
    others = {
        "role": raw.get("role"),
        "content": blocks["text"],
        "tool_calls": calls,
        "reasoning_content": thoughts,
    }
    # If a message contains only tool results, `others` is empty and is left out.
    messages = [*results, others] if blocks["text"] or calls or thoughts or not results else results
    return [normalise(message, where) for message in messages]


# References to earlier messages


def _look_up(previous: str | None, name: str, find: Find) -> Any:
    """Return the interaction whose id is `previous`, or None if `previous` is None or empty.

    Raises a Refusal that names the field `name` if the session has no finished interaction with this id.
    """
    found = find(previous) if previous else None
    if previous and not found:
        raise Refusal(f"{name}: this session has no finished response {previous!r}")
    return found


def _referred(item_id: str, find: Find) -> Message:
    """Return the item with the id `item_id` from an earlier reply, as a message. Raises Refusal for an unknown id.

    The reply with the id resp_<x> has items with the ids rs_<x> (reasoning), msg_<x> (text) and fc_<x>_<k> (the k-th
    tool call).
    """
    found = find("resp_" + item_id.partition("_")[2].partition("_")[0])
    items = [item for item in found.reply["output"] if item["id"] == item_id] if found else []
    if not items:
        raise Refusal(f"input: item_reference: this session has no item {item_id!r}")
    return _item(items[0], "input", find)
