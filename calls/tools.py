"""What a model's text contains beside text: its reasoning and its calls of tools.

A policy model writes tokens; an agent wants a message with `tool_calls` and perhaps reasoning. The default form is
Qwen's and Hermes's:

    <think>reasoning</think>text<tool_call>{"name": "f", "arguments": {...}}</tool_call>

The rule: what is certainly a call becomes one, everything else stays text. A call that is not closed, no JSON, without
an object of arguments, or of a tool that was not offered is text like any other, so a request never fails because of
what a model wrote, and the agent (and through the reward the policy) sees it. Blank space around reasoning and before a
call belongs to the form and is dropped; that of a text without calls is kept, for it comes back in the next request.

Streaming. `certain(p)` is the part of the text that no continuation of p can change: what may be the beginning of a
mark is held back, and so is blank space, which a call may follow. So certain(p) is a prefix of parse(whole), and it
only grows with p. Calls come with the end of the text.

Reasoning that the prompt begins. Whether it does may depend on a variable of the template or on the last message, so
each call's own prompt is looked at: a <think> at its end is put before the model's text (`begun`).

Forcing a call. Without a grammar in the engine a call can be forced all the same: the first words of the call are put
before the model's own (`opening`), as part of the prompt, untrained. The model fills in the arguments, or the name too
where several tools are there. A model that then writes no valid JSON has written text.

Another form. A tokenizer with a response template (transformers) reads its model's form itself; a `tool_call_parser`
that is not one of `HERMES` names one of SGLang's, for which SGLang must be installed. Of these nothing is certain
before the end where tools are offered, and a call in them cannot be forced: `opening` refuses. A response template is
read as if each prompt ended like a first one; an end token that is not the tokenizer's belongs into stop_token_ids.

It does not promise to repair anything. AReaL takes SGLang's parser or vLLM's, else warns and parses nothing.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from run.fields import Refusal, read_json

CALL, END_OF_CALL = "<tool_call>", "</tool_call>"
THINK, END_OF_THINK = "<think>", "</think>"
HERMES = (None, "hermes", "qwen", "qwen25", "qwen3")  # names of the form above
THINKERS = (None, "qwen3", "qwen3-thinking", "deepseek-r1", "glm45")  # who writes <think> ... </think>
Tools = list[dict[str, Any]]  # in chat form


class Call(NamedTuple):
    """A call of a tool; `arguments` is a JSON object as text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Parsed:
    """A model's text, taken apart."""

    text: str
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def without_partial(text: str, marks: list[str]) -> str:
    """`text` without an end that may be the beginning of a mark (a tag, a stop string) still to be completed."""
    ends = (n for mark in marks for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n]))
    return text[: len(text) - max(ends, default=0)]


def split_thinking(text: str) -> tuple[str, str, bool]:
    """(reasoning, what follows it, whether it is over)."""
    bare = text.lstrip()
    if not bare.startswith(THINK):
        return "", text, True
    reasoning, mark, rest = bare.removeprefix(THINK).partition(END_OF_THINK)
    return reasoning.strip(), rest.lstrip(), bool(mark)


def split_calls(text: str, tools: Tools) -> tuple[str, list[Call], int]:
    """(the text beside the calls, the calls, how far `text` is read: behind the last mark that closes a call)."""
    pieces: list[str] = []
    calls: list[Call] = []
    names = frozenset(tool["function"]["name"] for tool in tools)
    begin = end = 0  # of the piece, of what is read
    while tools and (opened := text.find(CALL, end)) >= 0 and (closed := text.find(END_OF_CALL, opened)) >= 0:
        call = read_call(text[opened + len(CALL) : closed], names)
        end = closed + len(END_OF_CALL)
        if call is not None:
            pieces.append(text[begin:opened].rstrip())
            calls.append(call)
            begin = end
    pieces.append(text[begin:].rstrip() if calls else text[begin:])
    return "".join(pieces), calls, end


@functools.lru_cache(4096)
def read_call(body: str, names: frozenset[str]) -> Call | None:
    """What stands between the marks as a call of one of the tools, or None. A stream asks again at each token."""
    try:
        call = read_json(body)
        arguments = json.dumps(call["arguments"], ensure_ascii=False)
        return Call(call["name"], arguments) if call["name"] in names and isinstance(call["arguments"], dict) else None
    except (ValueError, TypeError, KeyError):
        return None


class OutputParser:
    """Reads the texts of one model. It holds no state of a text: a stream asks again with all there is so far.

    Raises ValueError for a parser that does not exist here.
    """

    def __init__(
        self, tokenizer: Any = None, tool_call_parser: str | None = None, reasoning_parser: str | None = None
    ) -> None:
        if reasoning_parser not in THINKERS:
            raise ValueError(f"reasoning_parser: one of {', '.join(filter(None, THINKERS))} is needed")
        self._tokenizer = tokenizer
        self._sglang = tool_call_parser not in HERMES and sglang_parser(tool_call_parser)
        template = getattr(tokenizer, "response_template", None)
        self.special_tokens = tool_call_parser is None and template is not None  # parse wants them in the text
        if self.special_tokens:  # and the end of a prompt
            talk = [{"role": "user", "content": "x"}]
            self._prompt = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)

    def foreign(self, tools: Tools) -> bool:
        """Whether the form is not ours. Its marks may be special tokens, so they must be in the text."""
        return self.special_tokens or bool(self._sglang and tools)

    def parse(self, text: str, tools: Tools) -> Parsed:
        """A whole text. Only `tools` can be called: without them nothing is a call. Never raises."""
        if self.foreign(tools):
            try:
                return self._foreign(text, tools)
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
                return Parsed(text)  # a form that is not kept: all of it is text
        reasoning, rest, _ = split_thinking(text)
        rest, calls, _ = split_calls(rest, tools)
        return Parsed(rest, reasoning, calls)

    def certain(self, text: str, tools: Tools) -> Parsed:
        """The beginnings of text and reasoning that no continuation of `text` can change; no calls."""
        text = text.rstrip("\ufffd")  # the bytes of a character that is not yet complete
        if self.foreign(tools) or THINK.startswith(text.lstrip()):
            return Parsed("")
        reasoning, rest, over = split_thinking(text)
        if not over:
            return Parsed("", split_thinking(without_partial(text, [END_OF_THINK]))[0])
        if not tools:
            return Parsed(rest, reasoning)
        read = split_calls(rest, tools)[2]
        opened = rest.find(CALL, read)
        decided = rest[:opened] if opened >= 0 else rest[:read] + without_partial(rest[read:], [CALL])
        return Parsed(split_calls(decided, tools)[0].rstrip(), reasoning)

    def begun(self, prompt: str) -> str:
        """What a prompt that ends so has begun of the answer: <think> or nothing. It belongs to what `parse` gets."""
        return THINK if prompt.rstrip().endswith(THINK) and not self.special_tokens else ""

    def opening(self, tool_choice: str, tools: Tools, begun: str) -> str:
        """The text that begins a call, to be put between what is `begun` and the model's own; "" where none is forced.

        It belongs to the text that `parse` gets. Raises Refusal for a form in which a call cannot be forced.
        """
        if tool_choice in ("auto", "none"):
            return ""
        if self.foreign(tools):
            raise Refusal("tool_choice: this model's form of tool calls cannot be forced; use auto")
        names = [tool["function"]["name"] for tool in tools] if tool_choice == "required" else [tool_choice]
        head = f"{END_OF_THINK}\n\n" * bool(begun) + f'{CALL}\n{{"name": '
        return head + (f'{json.dumps(names[0])}, "arguments": ' if len(names) == 1 else '"')

    def _foreign(self, text: str, tools: Tools) -> Parsed:
        """By SGLang's parser or the tokenizer's response template. Raises ValueError for a form that is not kept."""
        if self._sglang:
            reasoning, rest, _ = split_thinking(text)
            rest, functions = self._sglang(rest, tools)
        else:
            message = self._tokenizer.parse_response(text, prefix=self._prompt, tools=tools)
            reasoning = message.get("reasoning_content") or message.get("thinking") or ""
            rest = message.get("content") or ""
            functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
        names = frozenset(tool["function"]["name"] for tool in tools)
        calls = [read_call(json.dumps(function), names) for function in functions]
        if None in calls:
            raise ValueError("a call of no tool")
        return Parsed(rest, reasoning, [call for call in calls if call])


def sglang_parser(name: str) -> Callable[[str, Tools], tuple[str, list[dict[str, Any]]]]:
    """SGLang's parser of that name: (text, tools) -> (text beside the calls, the calls). Raises ValueError."""
    try:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
    except ImportError as error:
        ours = ", ".join(filter(None, HERMES))
        reason = "needs SGLang, which cannot be imported"
        raise ValueError(f"tool_call_parser: {name} {reason}; without it: {ours}") from error
    FunctionCallParser([], name)  # an unknown name is an error now

    def parse(text: str, tools: Tools) -> tuple[str, list[dict[str, Any]]]:
        parser = FunctionCallParser([Tool.model_validate(tool) for tool in tools], name)
        rest, calls = parser.parse_non_stream(text)
        functions = [{"name": call.name, "arguments": json.loads(call.parameters)} for call in calls]
        return rest if calls else text, functions

    return parse
