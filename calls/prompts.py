r"""Turn messages into prompt tokens, and output tokens into text.

If the chat template permits it, no turn is tokenised twice. The prompt of a turn with a parent is

    prompt of the parent + output of the parent + tail

where the tail is what the template writes between two answers:

    parent's output    Hi!<|im_end|>
    tail               \n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n

To find the tail, we render the stub [user "x", assistant SENTINEL] and the new messages. The tail
is the text after SENTINEL, without the answer's end mark if the output already has it, as above. No
answer is rendered again, so all turns form one sequence, and no answer loses its reasoning.

The tail may be used only if it depends on the new messages alone. `PromptBuilder` tests this with a
user's message and with a tool's result. If the user's message fails, every prompt is rendered
whole. If only the tool's result fails, prompts with new results are rendered whole. A prompt with
other tools than its parent's is always rendered whole.

A template may refuse a conversation, or drop a text. Then `stricter` offers the same texts in other
forms, such as one system message instead of two.

A tool's result that holds the text of a control token, such as <|im_end|>, could forge a message.
So `_disarm` puts BREAK into the texts of control tokens, except in what an assistant wrote.
"""

import functools
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import dropwhile
from typing import Any

import orjson

from cache import Interaction
from calls.messages import Message, Refusal, with_texts
from calls.tools import MARKS
from inference.io_struct import GenerationHyperparameters, ModelResponse

SENTINEL = "\u27e6the assistant's text\u27e7"
STUB: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": SENTINEL}]
BREAK = "\ufdd0"  # a character to which Unicode gives no meaning
CALL = {"id": "id of f", "type": "function", "function": {"name": "f", "arguments": {}}}
CALLED: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT: Message = {"role": "tool", "content": "result", "tool_call_id": "id of f"}
SPLICED = "follow the sampled tokens"


class PromptBuilder:
    """Renders messages with the tokenizer's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template: take that of a chat model")
        self._tokenizer = tokenizer
        self._ids = dict[int, int]()
        texts = special_tokens(tokenizer).values()
        controls = (orjson.dumps(text).decode()[1:-1] for text in texts)  # Gemma has a <|"|>
        self._control = re.compile("|".join(map(re.escape, controls)) or "(?!)")
        messages = self._way(STUB[1], {"role": "user", "content": "new"})
        results = self._way(CALLED, RESULT)
        self.ways = f"new messages {messages}, results of tools {results}"
        self.splices, self.splices_results = messages == SPLICED, results == SPLICED

    def _way(self, answer: Message, new: Message) -> str:
        """Say how prompts get the message `new` after `answer`. SPLICED means that the text that
        the template writes for `new` does not depend on the history."""
        try:
            whole = self._render([*STUB, STUB[0], answer, new], {})
        except Refusal as error:
            return f"are refused ({error})"
        with suppress(Refusal):
            if whole.endswith(self._tail([new], {})):
                return SPLICED
        return "are rendered with the whole history"

    def prompt(self, call: Interaction) -> list[int]:
        """Return the tokens of a call's prompt. Raises Refusal if the template refuses the
        messages."""
        variables = dict(call.template_kwargs)
        if call.tools:
            variables["tools"] = self._disarm(call.tools)
        parent = call.parent
        if parent and (parent.tools, parent.template_kwargs) == (call.tools, call.template_kwargs):
            new = call.messages[len(parent.conversation) :]
            has_results = any(message["role"] == "tool" for message in new)
            if self.splices and (self.splices_results or not has_results):
                with suppress(Refusal):
                    return self.extend(parent.tokens, new, variables)
        return self.encode(self._render(self._disarm(call.messages), variables))

    def extend(
        self, turn: ModelResponse, new: list[Message], variables: dict[str, Any]
    ) -> list[int]:
        """Return the prompt and output of `turn`, followed by the tail for the messages `new`.
        Raises Refusal if the template refuses `new` or drops a text."""
        sampled = turn.output_tokens
        tail = self.encode(self._tail(new, variables))
        decode = self._tokenizer.decode
        marks = [*dropwhile(lambda token: not decode([token]).strip(), tail)]
        for count, mark in enumerate(marks, 1):
            if sampled[-1:] == [mark] and sampled[-count:] == marks[:count]:
                return turn.input_tokens + sampled + marks[count:]
        return turn.input_tokens + sampled + tail

    def _tail(self, new: list[Message], variables: dict[str, Any]) -> str:
        new = self._disarm(new)
        _, _, tail = self._render([*STUB, *new], variables).partition(SENTINEL)
        check_texts(new, tail)
        return tail

    def _render(self, messages: list[Message], variables: dict[str, Any]) -> str:
        """Render the messages in the first form that the template accepts without dropping text."""
        fixed = {"tokenize": False, "add_generation_prompt": True, "chat_template": None}
        refusals: list[Exception] = []
        changes: Any = (dict, with_texts)  # DeepSeek's templates need arguments as text
        for form in stricter(messages):
            for change in changes:
                try:
                    changed = [*map(change, form)]
                    text = self._tokenizer.apply_chat_template(changed, **variables | fixed)
                    check_texts(messages, text)
                    return text
                except Exception as error:  # a template may raise anything
                    refusals.append(error)
        raise Refusal(f"messages: the chat template refuses them: {refusals[0]}")

    def _disarm(self, things: list[Any]) -> list[Any]:
        def broken(control: re.Match) -> str:
            return BREAK.join(re.findall(r"\\u....|\\?.", control[0]))  # between characters of JSON

        def split(thing: Any) -> Any:
            return orjson.loads(self._control.sub(broken, orjson.dumps(thing).decode()))

        return [x if x.get("role") == "assistant" else split(x) for x in things]

    def encode(self, text: str) -> list[int]:
        # Equal ids share one int object, so a token that a session keeps takes 8 bytes, not 36.
        one = self._ids.setdefault
        return [one(token, token) for part in text.split(BREAK) for token in self._encode(part)]

    def _encode(self, text: str) -> list[int]:
        # For a short text, the tokenizer's Rust part takes half the time of `encode`. We use the
        # Rust part unless the tokenizer's settings were changed.
        rust = getattr(self._tokenizer, "backend_tokenizer", None)
        if rust and not (rust.truncation or rust.padding or rust.encode_special_tokens):
            return rust.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return self._tokenizer.encode(text, add_special_tokens=False)


def stricter(messages: list[Message]) -> Iterator[list[Message]]:
    yield messages
    merged = merge(messages)
    yield merged
    yield one_call_each(merged)
    no_system = [m | {"role": "user"} if m["role"] == "system" else m for m in messages]
    single = one_call_each(merge(no_system))
    yield single
    yield short_ids(merged)
    yield short_ids(single)


def merge(messages: list[Message]) -> list[Message]:
    """Join adjacent texts of one role. A system message that is not at the beginning becomes a
    user message."""
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else message
        if message["role"] == "system" != last["role"]:
            message = message | {"role": "user"}
        joins = merged and last["role"] == message["role"] != "tool"
        if joins and "tool_calls" not in last | message:
            message = last | {"content": f"{last['content']}\n\n{message['content']}"}
            merged.pop()
        merged.append(message)
    return merged


def one_call_each(messages: list[Message]) -> list[Message]:
    """Give every tool call a message of its own, followed by the call's result."""
    single: list[Message] = []
    waiting: list[Message] = []  # calls whose results come later
    for message in messages:
        result = message.get("tool_call_id") if message["role"] == "tool" else None
        now = [m for m in waiting if result in (None, m["tool_calls"][0]["id"])]
        waiting = [m for m in waiting if m not in now]
        single += now
        calls = message.get("tool_calls", [])
        waiting += [CALLED | {"tool_calls": [call]} for call in calls]
        if message["content"] or not calls:
            single.append({key: x for key, x in message.items() if key != "tool_calls"})
    return single + waiting


def short_ids(messages: list[Message]) -> list[Message]:
    """Give tool calls and their results nine-digit ids, as Mistral's templates require."""

    def shorten(item: Message, key: str) -> Message:
        return item | {key: f"{zlib.crc32(str(item.get(key)).encode()):09d}"[-9:]}

    changed = (shorten(m, "tool_call_id") if m["role"] == "tool" else m for m in messages)
    return [
        m | {"tool_calls": [shorten(call, "id") for call in m["tool_calls"]]}
        if "tool_calls" in m
        else m
        for m in changed
    ]


def check_texts(messages: Iterable[Message], rendered: str) -> None:
    """Raise Refusal unless the rendered prompt contains the text of every message. A text may be
    escaped as JSON, and an assistant's reasoning may be missing. Tool calls are not checked,
    because the template of tasks/base_model.py does not write them."""
    texts = [
        m["content"].rpartition("</think>")[2] if m["role"] == "assistant" else m["content"]
        for m in messages
    ]
    for text in sorted(map(str.strip, texts), key=len, reverse=True):
        found = text if text in rendered else json.dumps(text, ensure_ascii=False)[1:-1]
        if found not in rendered:
            raise Refusal(f"it leaves out {text[:80]!r}")
        rendered = rendered.replace(found, "\0", 1)  # two equal texts need two places


@functools.cache
def special_tokens(tokenizer: Any) -> dict[int, str]:
    added = tokenizer.added_tokens_decoder.items()
    return {number: token.content for number, token in added if token.special}


def read_text(
    tokenizer: Any,
    tokens: list[int],
    gconfig: GenerationHyperparameters,
    begun: str = "",
    keep_special: bool = False,
) -> str:
    """Return an answer's text up to its end mark or the first stop string. `begun` is the answer's
    beginning, if the prompt already holds it. Unless `keep_special` is set, special tokens other
    than MARKS are dropped."""
    if tokens and tokens[-1] in gconfig.stop_token_ids:
        tokens = tokens[:-1]
    special = {} if keep_special else special_tokens(tokenizer)
    text = tokenizer.decode([token for token in tokens if special.get(token) in (None, *MARKS)])
    for stop in gconfig.stop:
        text, _, _ = text.partition(stop)
    return begun + text
