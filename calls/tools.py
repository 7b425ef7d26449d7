"""Split the text of a model into reasoning, text for the user, and tool calls.

A model writes reasoning, text and tool calls as one text. An agent needs a message with separate reasoning, text and
`tool_calls`. By default, the parser expects a text in the form of Qwen and Hermes:

    <think>reasoning</think>text<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>

Tool calls. The parser reads the JSON between <tool_call> and the next </tool_call>. The JSON is a call if it contains
the name of an offered tool and if the arguments are an object. A call stays in the text in three cases: its JSON is
broken, its end mark is missing, or its tool is unknown. If the model writes a wrong call, the request still succeeds,
and the agent receives the call as text. The parser drops white space around the reasoning and before a call. A text
without calls is returned unchanged, so that the proxy recognises the text in the agent's next request.

Streams. `certain` returns the part of an unfinished text that no continuation can change:

    "1 <tools"      -> "1 <tools"
    "1 <tool"       -> "1"          <tool may become <tool_call>, and the blank before a call is dropped
    "Hello \\n"      -> "Hello"      a call may follow
    "<think>so </t" -> reasoning "so"

If a text ends with the beginning of a mark, `certain` leaves out this beginning, even if there are no tools. With every
new token, the result of `certain` stays unchanged or grows. This result is always the beginning of the text that
`parse` returns for the whole answer. A stream sends the calls when the answer is complete.

Reasoning. Some chat templates end the prompt with <think>. If the prompt ends with <think>, `begun` returns <think>,
and the caller must put <think> before the model's text.

Forced calls. If tool_choice demands a call, `opening` returns the first words of a call. The prompt ends with the first
words of the call, so these words are not trained. The caller must put the result of `opening` before the model's text.
The model writes the arguments of the forced call and, if it may choose between several tools, also the tool's name. The
proxy does not constrain sampling with a grammar, so the model may still write broken JSON.

Other forms. If the tokenizer has a response template (a feature of transformers), this template parses the text. If
`tool_call_parser` is not in `HERMES`, it is the name of a parser of SGLang, and SGLang must be installed. SGLang's
parser is used only if the agent offers tools. With a response template or SGLang's parser, a call cannot be forced, and
`certain` returns an empty text. A response template parses the text together with the end of a prompt. In place of the
real prompt, the template always gets the prompt of a conversation with one message. If the model ends its turn with a
token that is not the tokenizer's eos_token, stop_token_ids must contain this token.

The parser does not repair mistakes in a model's text.
"""

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from inference.fields import Refusal, read_json

CALL, END_OF_CALL = "<tool_call>", "</tool_call>"
PAIR = re.compile(f"{CALL}(.*?){END_OF_CALL}", re.DOTALL)
THINK, END_OF_THINK = "<think>", "</think>"
HERMES = (
    None,
    "hermes",
    "qwen",
    "qwen25",
    "qwen3",
)  # values of tool_call_parser that select the default form
THINKERS = (
    None,
    "qwen3",
    "qwen3-thinking",
    "deepseek-r1",
    "glm45",
)  # reasoning parsers for <think> ... </think>
Form = str | None  # name of a parser, or None for the default form
Tools = list[dict[str, Any]]  # the offered tools, in the form of chat completions


class Call(NamedTuple):
    """A tool call. `arguments` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Parsed:
    """The parts of a model's text."""

    text: str
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def without_partial(text: str, marks: list[str], certain: int = 0) -> str:
    """Return `text` without an incomplete mark at its end: if "<tool>" is a mark, "1 <to" becomes "1 ".

    The search for an incomplete mark begins after the first `certain` characters. If a caller's text grows, the caller
    passes the length of the previous result as `certain`. The argument `certain` saves time and does not change the
    result.
    """
    longest = max(map(len, marks), default=1)
    for begin in range(max(certain, len(text) - longest + 1), len(text)):
        end = text[begin:]
        if any(mark.startswith(end) and mark != end for mark in marks):
            return text[:begin]
    return text


def split_thinking(text: str) -> tuple[str, str]:
    """Return the reasoning, and the text after the reasoning."""
    bare = text.lstrip()
    if not bare.startswith(THINK):
        return "", text
    reasoning, _, rest = bare.removeprefix(THINK).partition(END_OF_THINK)
    return reasoning.strip(), rest.lstrip()


def split_calls(text: str, tools: Tools) -> tuple[str, list[Call]]:
    """Return the text outside the calls, and the calls."""
    names = frozenset(tool["function"]["name"] for tool in tools)
    pieces: list[str] = []
    calls: list[Call] = []
    piece_begin = 0  # index at which the next piece of text begins

    # Every call ends with </tool_call>. To save time if many calls have no end mark, the search ends at the last
    # </tool_call>.
    last = text.rfind(END_OF_CALL) + len(END_OF_CALL)
    for pair in PAIR.finditer(text, 0, last):
        call = read_call(pair[1], names)
        if call is not None:
            pieces.append(text[piece_begin : pair.start()].rstrip())
            calls.append(call)
            piece_begin = pair.end()
    pieces.append(text[piece_begin:].rstrip() if calls else text[piece_begin:])
    return "".join(pieces), calls


# After each new token, a stream parses its whole text. With the cache, the JSON of a call is decoded only once.
@functools.lru_cache(4096)
def read_call(body: str, names: frozenset[str]) -> Call | None:
    """Return the call that `body` contains, or None if `body` is not a valid call of a tool in `names`."""
    try:
        call = read_json(body)
        name, arguments = call["name"], call["arguments"]
        if name not in names or not isinstance(arguments, dict):
            return None
        return Call(name, json.dumps(arguments, ensure_ascii=False))
    except (ValueError, TypeError, KeyError):
        return None


class OutputParser:
    """Parses the texts of one model. A parser stores no text, so a stream passes its whole text each time it calls the
    parser.

    Raises ValueError if there is no parser with the given name.
    """

    def __init__(
        self, tokenizer: Any = None, tool_call_parser: Form = None, reasoning_parser: Form = None
    ) -> None:
        if reasoning_parser not in THINKERS:
            raise ValueError(
                f"reasoning_parser: one of {', '.join(filter(None, THINKERS))} is needed"
            )
        self._tokenizer = tokenizer
        self._sglang = None if tool_call_parser in HERMES else sglang_parser(str(tool_call_parser))
        # If the tokenizer's response template parses the texts, the texts must contain the special tokens.
        self.special_tokens = (
            tool_call_parser is None and getattr(tokenizer, "response_template", None) is not None
        )
        if self.special_tokens:  # a response template also reads the marks at the end of a prompt
            talk = [{"role": "user", "content": "x"}]
            self._prompt = tokenizer.apply_chat_template(
                talk, add_generation_prompt=True, tokenize=False
            )

    def foreign(self, tools: Tools) -> bool:
        """Return whether the model's text has a form other than the default form of Qwen and Hermes. A text that is not
        in the default form must contain the special tokens."""
        return self.special_tokens or (self._sglang is not None and bool(tools))

    def parse(self, text: str, tools: Tools) -> Parsed:
        """Return the parts of a complete text. A call of a tool that is not in `tools` stays text. Never raises."""
        if self.foreign(tools):
            try:
                return self._parse_foreign(text, tools)
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
                return Parsed(text)  # the text does not have the form that the parser expects
        reasoning, rest = split_thinking(text)
        rest, calls = split_calls(rest, tools)
        return Parsed(rest, reasoning, calls)

    def certain(self, text: str, tools: Tools) -> Parsed:
        """Return the text and the reasoning that no continuation of `text` can change. The result has no calls.

        If `text` ends with the beginning of a mark, such as "<", the method leaves out this beginning. It does so even
        if the complete mark would have no effect, such as <tool_call> without tools.
        """
        text = text.rstrip(
            "\ufffd"
        )  # a decoder writes U+FFFD for the bytes of an incomplete character
        if self.foreign(tools) or THINK.startswith(text.lstrip()):
            return Parsed("")
        reasoning, rest = split_thinking(without_partial(text, [END_OF_THINK, CALL]))
        if not tools:
            return Parsed(rest, reasoning)
        opened = rest.find(CALL, rest.rfind(END_OF_CALL) + 1)  # index of a call without an end mark
        beside_calls, _ = split_calls(rest[:opened] if opened >= 0 else rest, tools)
        return Parsed(beside_calls.rstrip(), reasoning)

    def begun(self, prompt: str) -> str:
        """Return <think> if the prompt ends with <think>, else "".

        The text for `parse` must begin with the text that `begun` returns.
        """
        return THINK if prompt.rstrip().endswith(THINK) and not self.special_tokens else ""

    def opening(self, tool_choice: str, tools: Tools, begun: str) -> str:
        """Return the first words of a forced call, or "" if tool_choice forces no call.

        Example of the first words, for a tool with the name f:

            '<tool_call>\\n{"name": "f", "arguments": '

        The text for `parse` consists of the text that `begun` returns, the opening and the model's text, in this order.
        Raises Refusal if a tool call cannot be forced in the form that this model uses.
        """
        if tool_choice in ("auto", "none"):
            return ""
        if self.foreign(tools):
            raise Refusal("tool_choice: this model's form of tool calls cannot be forced; use auto")
        names = (
            [tool["function"]["name"] for tool in tools]
            if tool_choice == "required"
            else [tool_choice]
        )
        end_of_reasoning = f"{END_OF_THINK}\n\n" if begun else ""
        # If only one tool can be called, the opening contains the tool's name. With several tools, the model writes the
        # tool's name.
        name = f'{json.dumps(names[0])}, "arguments": ' if len(names) == 1 else '"'
        return f'{end_of_reasoning}{CALL}\n{{"name": {name}'

    def _parse_foreign(self, text: str, tools: Tools) -> Parsed:
        """Parse a text with SGLang's parser or the tokenizer's response template. Raises ValueError for an unknown
        tool."""
        if self._sglang:
            reasoning, rest = split_thinking(text)
            rest, functions = self._sglang(rest, tools)
        else:
            message = self._tokenizer.parse_response(text, prefix=self._prompt, tools=tools)
            reasoning = message.get("reasoning_content") or message.get("thinking") or ""
            rest = message.get("content") or ""
            functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
        names = frozenset(tool["function"]["name"] for tool in tools)
        calls = [read_call(json.dumps(function), names) for function in functions]
        if None in calls:
            raise ValueError("the text contains a call of a tool that was not offered")
        return Parsed(rest, reasoning, [call for call in calls if call])


def sglang_parser(name: str) -> Callable[[str, Tools], tuple[str, list[dict[str, Any]]]]:
    """Return SGLang's parser with the given name, as a function of a text and the tools.

    The function returns the text outside the calls, and the calls as {"name": ..., "arguments": ...}. Raises ValueError
    if SGLang is not installed or has no parser with this name.
    """
    try:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
    except ImportError as error:
        ours = ", ".join(filter(None, HERMES))
        raise ValueError(
            f"tool_call_parser: {name} needs SGLang; install it, or use one of {ours}"
        ) from error
    FunctionCallParser([], name)  # an unknown name raises ValueError here, before the first request

    def parse(text: str, tools: Tools) -> tuple[str, list[dict[str, Any]]]:
        parser = FunctionCallParser([Tool.model_validate(tool) for tool in tools], name)
        rest, calls = parser.parse_non_stream(text)
        functions = [
            {"name": call.name, "arguments": json.loads(call.parameters)} for call in calls
        ]
        return rest if calls else text, functions

    return parse
