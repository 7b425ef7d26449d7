"""Between messages and tokens: the prompt of a turn, and the text of an answer while its tokens come.

The rule. Tokens that were sampled are never tokenised again. The prompt of a first turn is the chat template over its
messages. The prompt of a later turn is

    parent's prompt ids + parent's output ids + the tail: what the template puts after an assistant's text

so one turn costs its own length, not the conversation's. The tail is cut from a rendering of [user, assistant:
SENTINEL] + the new messages: what stands behind the sentinel. It begins, blanks aside, with what ends an assistant's
turn: <|im_end|>, or several marks, or where nothing closes a turn, the mark of the next role. A parent that ended by
itself has sampled that, as its own last tokens; then the tail up to there is left out. A parent that was cut by length,
or ended with another of the model's end tokens, did not sample it, and there it stays, in the prompt, untrained.

Templates. Many render a history otherwise than the model wrote it: they drop the reasoning of earlier turns, strip
whitespace, add an empty <think> to the prompt. With the rule above the model keeps seeing what it wrote, and the
conversation is one sequence for training. What the rule needs is that the tail depends on the new messages only; this
is checked at the start with two histories of different length. Where it does not hold, or where a template refuses the
stub (some want to see a call before its result), the turn is rendered in full, and so it always is with
chat_template_type "hf"; concat then forks the row where the tokens differ.

An *opening* is text before the model's own, in the prompt, untrained, that belongs to the answer, so that its reader
begins with it: a <think> with which the prompt ends, and the first words of a forced tool call (tool_choice).

Text (`TextReader`). A piece of a stream is final when no later token can change it: a character whose bytes are not all
there is held back, and so is what may be the beginning of a stop string. A byte that never becomes a character is
U+FFFD by itself. Each token is decoded a bounded number of times, in a window of few tokens, so the work is linear in
the answer.

It does not promise what a model makes of a history that its template would have shortened; AReaL renders the whole
history again at every turn, and its `concat` looks for the end-of-turn token in it and gives up where there are two.
"""

import contextlib
import copy
import hashlib
import inspect
import json
import sys
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from jinja2 import TemplateError

from cache import InteractionWithTokenLogpReward
from calls.messages import AgentRequest, Message, Refusal
from calls.tools import without_partial
from inference.io_struct import GenerationHyperparameters

SENTINEL = "\u27e6the assistant's text\u27e7"
STUB: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": SENTINEL}]
REFUSES = (TemplateError, LookupError, TypeError, ValueError, RecursionError)  # how a chat template does
WINDOW = 16  # U+FFFD at the end of a text, or tokens without text, of which one no longer waits for what they become


class PromptBuilder:
    """Messages to token ids, by the tokenizer's chat template."""

    def __init__(self, tokenizer: Any, chat_template_type: str = "concat") -> None:
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template")
        self._tokenizer = tokenizer
        self._reserved = inspect.signature(tokenizer.apply_chat_template).parameters.keys()
        self.splices = chat_template_type == "concat" and self._is_local()

    def _is_local(self) -> bool:
        """Whether what follows an assistant's text depends on the new messages only."""
        new: list[Message] = [{"role": "user", "content": "c"}]
        longer: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            return self._tail(new, {}) == self._tail(new, {}, longer)
        except Refusal:
            return False

    def prompt(self, ask: AgentRequest, parent: InteractionWithTokenLogpReward | None) -> list[int]:
        """The prompt ids of a call. Raises Refusal where the template refuses the messages."""
        if taken := ask.template_kwargs.keys() & self._reserved:
            names = ", ".join(sorted(taken))
            raise Refusal(f"chat_template_kwargs: {names} cannot be set, variables of the template can")
        variables = ask.template_kwargs | ({"tools": ask.tools} if ask.tools else {})
        ids = self._spliced(ask.messages, parent, variables) if parent and self.splices else None
        return ids or self.encode(self._render(ask.messages, variables))

    def _spliced(
        self, messages: list[Message], parent: InteractionWithTokenLogpReward, variables: dict[str, Any]
    ) -> list[int] | None:
        tokens, known = parent.tokens, len(parent.messages) + len(parent.output_message_list)
        try:
            tail = self._tail(messages[known:], variables)
        except Refusal:  # of the stub; a rendering in full says whether the messages are at fault
            return None
        blanks = next((i for i, token in enumerate(tail) if self._tokenizer.decode([token]).strip()), 0)
        said, marks = tokens.output_tokens, tail[blanks:]
        sampled = next((k for k, x in enumerate(marks, 1) if [x] == said[-1:] and said[-k:] == marks[:k]), 0)
        return tokens.input_tokens + said + tail[blanks + sampled if sampled else 0 :]

    def _tail(self, new: list[Message], variables: dict[str, Any], before: Iterable[Message] = ()) -> list[int]:
        text = self._render([*before, *STUB, *new], variables)
        _, found, tail = text.partition(SENTINEL)
        if not found:
            raise Refusal("messages: the chat template leaves out what an assistant said")
        return self.encode(tail)

    def _render(self, messages: list[Message], variables: dict[str, Any]) -> str:
        options = {"tokenize": False, "add_generation_prompt": True} | variables
        try:
            return self._tokenizer.apply_chat_template(messages, **options)
        except REFUSES as error:
            for other in other_forms(messages):
                with contextlib.suppress(*REFUSES):
                    return self._tokenizer.apply_chat_template(other, **options)
            raise Refusal(f"messages: the chat template refuses them: {error}") from error

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def other_forms(messages: list[Message]) -> list[list[Message]]:
    """Calls as some templates want them: with ids of nine letters or digits (Mistral's), with arguments that are text
    (DeepSeek's). Nothing where there are none."""
    short, texts = copy.deepcopy(messages), copy.deepcopy(messages)
    ids = [(call, "id") for message in short for call in message.get("tool_calls", ())]
    for holder, key in ids + [(message, "tool_call_id") for message in short if "tool_call_id" in message]:
        holder[key] = hashlib.blake2b(str(holder[key]).encode()).hexdigest()[:9]
    for function in (call["function"] for message in texts for call in message.get("tool_calls", ())):
        if not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return [form for form in (short, texts) if form != messages]


class TextReader:
    """The text of one answer.
    `read` takes all tokens so far and says what is final of their text; `whole` takes all."""

    def __init__(
        self, tokenizer: Any, gconfig: GenerationHyperparameters, opening: str = "", special_tokens: bool = False
    ) -> None:
        self._tokenizer, self._opening, self._skips = tokenizer, opening, not special_tokens
        self._stop, self._stop_ids = gconfig.stop, frozenset(gconfig.stop_token_ids)
        # All that changes:
        self._text = opening  # of the tokens before `_read`, which is final
        self._cut = sys.maxsize  # characters before the first stop string
        self._read = 0  # tokens
        # The last of those that had text. They are decoded again before the next ones, for a decoder may drop or add a
        # space at the beginning.
        self._context: list[int] = []

    def whole(self, tokens: list[int]) -> str:
        """Without the end-of-turn token, and without a stop string and what follows it."""
        text = self._opening + self._decode(self._own(tokens))
        return text[: self._end(text, len(self._opening))]

    def read(self, tokens: list[int]) -> str:
        """As `whole` of the tokens so far, as far as no later token changes it. Call it with ever more tokens."""
        tokens, before = self._own(tokens)[self._read :], self._decode(self._context)
        fresh = self._decode(self._context + tokens)[len(before) :]
        complete = fresh.rstrip("\ufffd")
        if len(fresh) - len(complete) > WINDOW:  # a character has four bytes: all but the last three never become one
            tokens = tokens[:-3]
            complete = fresh = self._decode(self._context + tokens)[len(before) :]
        text = self._text + complete
        if complete == fresh and (fresh or len(tokens) > WINDOW):  # so many tokens without text are special ones
            self._text, self._read = text, self._read + len(tokens)
            self._context = tokens if fresh else self._context
        longest = max(map(len, self._stop), default=0)
        found = self._end(text, max(len(self._opening), len(text) - len(fresh) - longest))
        self._cut = min(self._cut, found) if found < len(text) else self._cut
        return without_partial(text, self._stop)[: self._cut]

    def token(self, token: int) -> str:
        """The text of one token, with the space that the first token of a text would lose."""
        return self._tokenizer.decode([token, token])[len(self._tokenizer.decode([token])) :]

    def _own(self, tokens: list[int]) -> list[int]:
        return tokens[:-1] if tokens and tokens[-1] in self._stop_ids else tokens

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=self._skips)
        if "\ufffd" in text and (mended := spoiling_no_other(self._tokenizer, tokens)) != tokens:
            text = self._tokenizer.decode(mended, skip_special_tokens=self._skips)
        return text

    def _end(self, text: str, start: int) -> int:
        """Where the first stop string begins, from `start` on; else the length of the text."""
        return min((i for stop in self._stop if (i := text.find(stop, start)) >= 0), default=len(text))


def spoiling_no_other(tokenizer: Any, tokens: list[int]) -> list[int]:
    """Tokens for bytes (<0x0A>) in a row are decoded as one text or not at all. Here those that are no character are
    replaced by those of U+FFFD, so that they spoil no other."""
    pieces: list[str] = []
    known = filter(None, tokenizer.convert_ids_to_tokens(tokens))
    for is_byte, run in groupby(known, lambda piece: len(piece) == 6 and piece.startswith("<0x")):
        if is_byte:
            text = bytes(int(piece[3:5], 16) for piece in run).decode(errors="replace")
            run = (f"<0x{byte:02X}>" for byte in text.encode())
        pieces.extend(run)
    return tokenizer.convert_tokens_to_ids(pieces)
