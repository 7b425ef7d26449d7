"""Split what a model wrote into reasoning, text and tool calls.

By default the model must write as Qwen and Hermes do:

    <think>reasoning</think>text<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>

The text between the <tool_call> marks is a call if it is JSON that names an offered tool. The JSON
is decoded from its beginning, so a mark inside one of its strings does not end the call. Everything
else stays text, so the agent sees a wrong call as the model wrote it.

**Forced calls.** If tool_choice demands a call, the prompt ends with the call's first words
(`opening`), which are not trained. The model writes the rest, and may still write broken JSON.

**Other forms.** For other models, the key `tool_call_parser` names a function of (text, tools). The
function returns the text outside the calls, and the calls as {"name", "arguments"}. A call in
another form cannot be forced.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from calls.messages import Json, Message, names_of
from inference.fields import Refusal, import_name, read_json

OPEN, CLOSE = re.compile(r"<tool_call>\s*"), re.compile(r"\s*</tool_call>")
THINK, END_OF_THINK = "<think>", "</think>"
MARKS = (THINK, END_OF_THINK, "<tool_call>", "</tool_call>")
HERMES = (None, "hermes", "qwen", "qwen25", "qwen3")
Tools = list[Json]  # in the form of chat completions
Parser = Callable[[str, Tools], tuple[str, list[Json]]]


def find_calls(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield (begin, end, JSON) for each JSON value between marks. text[begin:end] includes the
    marks."""
    at = 0
    last = text.rfind("</tool_call>")
    while begin := OPEN.search(text, at, last):
        at = begin.end()
        with suppress(ValueError, RecursionError):
            _, stop = json.JSONDecoder().raw_decode(text, at)
            if end := CLOSE.match(text, stop):
                yield begin.start(), end.end(), text[at:stop]
                at = end.end()


def split_thinking(text: str, ended: bool) -> tuple[str, str]:
    """Return the reasoning and the text after it. Without </think>, an answer that has `ended` by
    itself is all text (the model skipped the reasoning), and one cut at a token limit is all
    reasoning."""
    bare = text.lstrip()
    if not bare.startswith(THINK):
        return "", text
    ends = bare.find(END_OF_THINK)
    for begin, end, _ in find_calls(bare):
        if begin < ends < end:  # inside a call's JSON
            ends = bare.find(END_OF_THINK, end)
    if ends < 0 and ended:
        return "", bare.removeprefix(THINK).lstrip()
    ends = ends if ends >= 0 else len(bare)
    return bare[len(THINK) : ends].strip(), bare[ends + len(END_OF_THINK) :].lstrip()


def split_calls(text: str, tools: Tools) -> tuple[str, list[Json]]:
    pieces, calls, rest = [], [], 0
    for begin, end, body in find_calls(text):
        with suppress(ValueError, TypeError, KeyError):
            calls.append(read_call(body, tools))
            pieces.append(text[rest:begin].rstrip())
            rest = end
    pieces.append(text[rest:].rstrip() if calls else text)
    return "".join(pieces), calls


def read_call(body: str, tools: Tools) -> Json:
    """Return the call {"name", "arguments"} in the JSON text `body`. Raises ValueError, TypeError
    or KeyError if the text does not call one of `tools`."""
    call = read_json(body)
    name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
    if name not in names_of(tools) or not isinstance(arguments, dict):
        raise ValueError(f"no call: {body}")
    return {"name": name, "arguments": arguments}


def read_answer(
    text: str, tools: Tools, suffix: str, parser: Parser = split_calls, ended: bool = False
) -> Message:
    (reasoning, rest), calls = split_thinking(text, ended), list[Any]()
    if tools:
        try:
            rest, found = parser(rest, tools)
            calls = [read_call(json.dumps(call), tools) for call in found]
        except Exception:  # a parser may raise anything on a broken call
            reasoning, rest, calls = "", text, []
    message: Message = {"role": "assistant", "content": rest}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{suffix}_{k}", "type": "function", "function": call}
            for k, call in enumerate(calls)
        ]
    return message


def opening(tool_choice: str, tools: Tools, begun: str, parser: Parser = split_calls) -> str:
    """Return the first words of a forced call, or "" if no call is forced. For a tool f, the words
    are '<tool_call>\\n{"name": "f", "arguments": '. If several tools are allowed, the words end
    before the tool's name. If the prompt ends with <think> (`begun`), the words begin with
    </think>."""
    if tool_choice in ("auto", "none"):
        return ""
    if parser is not split_calls:
        raise Refusal("tool_choice: this model's form of tool calls cannot be forced; use auto")
    names = names_of(tools) if tool_choice == "required" else [tool_choice]
    name = f'{json.dumps(names[0])}, "arguments": ' if len(names) == 1 else '"'
    end = f"{END_OF_THINK}\n\n" if begun else ""
    return f'{end}<tool_call>\n{{"name": {name}'


def find_parser(name: str | None) -> Parser:
    return split_calls if name in HERMES else import_name(name)
