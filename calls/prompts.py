r"""Convert messages to the tokens of a prompt, and convert the tokens of an answer to text while the tokens arrive.

Prompts. For the first turn of a conversation, `PromptBuilder` renders the messages with the chat template. The prompt
of a later turn begins with the parent's tokens, so the parent's answer is not tokenised again:

    prompt tokens of the parent + output tokens of the parent + tail

The tail is the text that the template writes between the parent's answer and the next answer. To get the tail,
`PromptBuilder` renders a short stub, [user "x", assistant SENTINEL], followed by the new messages. The tail is the text
after SENTINEL. The time to render and tokenise the tail depends only on the length of the new messages. With the
template of Qwen, for example, the three parts of a prompt are:

    parent's prompt    <|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n
    parent's output    Hi!<|im_end|>
    tail               \n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n

The template writes <|im_end|> after SENTINEL, because <|im_end|> closes an assistant's turn. If the model has already
sampled <|im_end|>, as in the example, `PromptBuilder` removes <|im_end|> from the tail. If a length limit has cut off
the answer, <|im_end|> stays in the tail and is not trained.

Many templates change earlier messages. For example, some templates remove reasoning or blanks from earlier turns. A
prompt that begins with the parent's tokens keeps every answer exactly as the model wrote it. If each prompt begins with
the parent's tokens, training can use a whole conversation as one sequence. A prompt that begins with the parent's
tokens is correct only if the tail depends on the new messages alone. To test a template, the constructor of
`PromptBuilder` renders the same message twice: after a short history and after a longer history. If the tail depends on
the history, or if chat_template_type is "hf", `PromptBuilder` renders the whole conversation for every prompt. If the
template raises an error for the stub and the new messages of a turn, the whole conversation is rendered for this turn.
If a turn's prompt does not begin with the parent's tokens, an export in style concat starts a new row at this turn.

Text. `TextReader.read` returns only text that no later token can change. `TextReader` holds back incomplete characters
and text that may be the beginning of a stop string. The text of a token may depend on the tokens before it, because
some decoders drop or insert a space. `TextReader` decodes new tokens together with a few tokens before them. Even in a
long answer, `TextReader` decodes each token only a few times.

Opening. An opening is the beginning of an answer. The prompt already contains the opening, so the model does not sample
it. Examples of openings are a <think> at the end of the prompt and the first words of a forced tool call. The text of
an answer includes the opening.

A prompt that begins with the parent's tokens keeps the full history, even if the template would shorten the history.
The module does not check whether the model works well with a history that its template would shorten.
"""

import contextlib
import copy
import functools
import hashlib
import inspect
import json
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from jinja2 import TemplateError

from cache import Interaction
from calls.messages import AgentRequest, Message, Refusal, canonical
from calls.tools import without_partial
from inference.io_struct import ModelResponse

SENTINEL = "\u27e6the assistant's text\u27e7"
STUB: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": SENTINEL}]
REFUSES = (
    TemplateError,
    LookupError,
    TypeError,
    ValueError,
    RecursionError,
)  # errors that templates raise
PART = 2**16  # number of characters in each part of a text that is much longer than the context
INCOMPLETE = 3  # an incomplete character has at most 3 bytes, so at most 3 tokens, and is decoded to at most 3 U+FFFD
WITHOUT_TEXT = (
    16  # if more than 16 tokens in a row have no text, TextReader takes them for special tokens
)


class PromptBuilder:
    """Converts messages to prompt tokens with the chat template of the tokenizer."""

    def __init__(
        self, tokenizer: Any, chat_template_type: str = "concat", context_length: int | None = None
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template; use the tokenizer of a chat model"
            )
        self._tokenizer, self._context_length = tokenizer, context_length
        self._rust = getattr(
            tokenizer, "backend_tokenizer", None
        )  # None for a tokenizer that is written in Python
        # Function that returns the text of a token, without blanks at its ends
        self.bare_text = functools.lru_cache(1000)(lambda token: tokenizer.decode([token]).strip())
        self._reserved = inspect.signature(tokenizer.apply_chat_template).parameters.keys()
        self.splices = (
            chat_template_type == "concat" and self._is_local()
        )  # whether prompts reuse the parent's tokens

    def _is_local(self) -> bool:
        """Return whether the tail depends only on the new messages, and not on the earlier conversation."""
        new: list[Message] = [{"role": "user", "content": "c"}]
        longer: list[Message] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
        ]
        with contextlib.suppress(Refusal):
            return self._tail(new, {}) == self._tail(new, {}, longer)
        return False

    def prompt(self, ask: AgentRequest, parent: Interaction | None) -> list[int]:
        """Return the prompt tokens of a call. Raises Refusal if the chat template refuses the messages."""
        if taken := ask.template_kwargs.keys() & self._reserved:
            names = ", ".join(sorted(taken))
            raise Refusal(
                f"chat_template_kwargs: {names} cannot be set; only variables of the template can"
            )
        variables = ask.template_kwargs | ({"tools": ask.tools} if ask.tools else {})
        # If the client named the parent by id, the call's first message may differ from the parent's first message.
        same_start = parent and canonical(parent.messages[0]) == canonical(ask.messages[0])
        if parent and same_start and self.splices and parent.template_key == ask.template_key:
            known = len(parent.conversation)
            with contextlib.suppress(
                Refusal
            ):  # if the template refuses the stub, the method renders all messages
                return self.extend(parent.tokens, ask.messages[known:], variables)
        return self.encode(self._render(ask.messages, variables))

    def _tail(
        self, new: list[Message], variables: dict[str, Any], before: Iterable[Message] = ()
    ) -> list[int]:
        """Return the tokens that the template writes between an assistant's answer and the next answer.

        `new` holds the messages between the two answers, and `before` holds messages to render before the stub. Raises
        Refusal if the template does not accept the messages.
        """
        _, found, tail = self._render([*before, *STUB, *new], variables).partition(SENTINEL)
        if not found:
            raise Refusal("messages: the chat template leaves out what an assistant said")
        return self.encode(tail)

    def extend(
        self, turn: ModelResponse, new: list[Message], variables: dict[str, Any]
    ) -> list[int]:
        """Return the prompt tokens of a call that continues `turn`: the turn's prompt and output tokens, then the tail
        for the messages `new`.

        The tail begins with marks that close the answer. `extend` leaves out those marks that the output already
        contains. MultiTurnWorkflow (workflow.py) also calls this method. Raises Refusal if the template does not accept
        the messages.
        """
        said, tail = turn.output_tokens, self._tail(new, variables)
        blanks = next((i for i, token in enumerate(tail) if self.bare_text(token)), 0)
        marks = tail[blanks:]
        for count, mark in enumerate(marks, 1):
            if said[-1:] == [mark] and said[-count:] == marks[:count]:
                tail = marks[count:]
                break
        return turn.input_tokens + said + tail

    def _render(self, messages: list[Message], variables: dict[str, Any]) -> str:
        """Return the text that the template makes from the messages.

        Raises Refusal if the template refuses the messages and each form that `other_forms` returns.
        """
        options = {"tokenize": False, "add_generation_prompt": True} | variables
        try:
            return self._tokenizer.apply_chat_template(messages, **options)
        except REFUSES as error:
            for other in other_forms(messages):
                with contextlib.suppress(*REFUSES):
                    return self._tokenizer.apply_chat_template(other, **options)
            raise Refusal(f"messages: the chat template refuses them: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without the special token that some tokenizers put at the beginning.

        A text that probably exceeds the context is tokenised in parts. Tokenisation stops when the number of tokens
        exceeds twice the context length. The engine refuses a prompt that exceeds the context.
        """
        context, tokens = self._context_length or len(text), []
        for begin in range(0, len(text), PART) if len(text) > 4 * context else ():
            tokens += self._encode(text[begin : begin + PART])
            # Cutting a text into parts adds fewer than half of the tokens. If the parts have more than 2 * context
            # tokens, the uncut text has more than `context` tokens.
            if len(tokens) > 2 * context:
                return tokens
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        """Return the tokens of a text.

        For a short text, the tokenizer's Rust object needs only half as much time as the tokenizer. The method uses the
        Rust object only if other code of this process has not changed the settings of the tokenizer.
        """
        rust = self._rust
        splits = rust and (rust.encode_special_tokens or self._tokenizer.split_special_tokens)
        if rust and not (splits or rust.truncation or rust.padding):
            return rust.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return self._tokenizer.encode(text, add_special_tokens=False)


def other_forms(messages: list[Message]) -> list[list[Message]]:
    """Return copies of `messages`, with the tool calls in forms that some templates need.

    Mistral's templates need ids of nine letters or digits. DeepSeek's templates need arguments as text, not as an
    object. A copy that equals `messages` is left out.
    """
    short, texts = copy.deepcopy(messages), copy.deepcopy(messages)
    ids = [(call, "id") for message in short for call in message.get("tool_calls", ())]
    for holder, key in ids + [
        (message, "tool_call_id") for message in short if "tool_call_id" in message
    ]:
        holder[key] = hashlib.blake2b(str(holder[key]).encode()).hexdigest()[:9]
    for function in (
        call["function"] for message in texts for call in message.get("tool_calls", ())
    ):
        if not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return [form for form in (short, texts) if form != messages]


class TextReader:
    """Converts the tokens of one answer to text. Call `read` while tokens arrive, and `whole` when all tokens have
    arrived.

        tokens      a  b  c | d  e  f | g  h
                      context         ^ settled

    The text of the tokens before the position `settled` can no longer change. The tokens after `settled` are pending.
    If no later token can change the text of a block of pending tokens, `read` settles the block: it moves `settled` to
    the end of the block. The context is the last settled block that has text. Every `read` decodes the context and the
    pending tokens together. The decoder writes U+FFFD for the bytes of an incomplete character.
    """

    def __init__(
        self, tokenizer: Any, gconfig: Any, opening: str = "", special_tokens: bool = False
    ) -> None:
        self._tokenizer, self._opening, self._skips = tokenizer, opening, not special_tokens
        self._stop, self._stop_ids = gconfig.stop, frozenset(gconfig.stop_token_ids)
        # Attributes that change after `__init__`:
        self.tokens_read = -1  # number of tokens that the last `read` received
        self._certain = 0  # number of characters that the last `read` returned
        self.stopped_by = ""  # the stop string that ended the complete answer, or ""
        self._settled = 0  # number of tokens whose text is in `_text`
        self._text = opening  # the opening and the text of the settled tokens
        self._context: list[
            int
        ] = []  # settled tokens that `read` decodes together with the pending tokens

    def whole(self, tokens: list[int]) -> str:
        """Return the text of a complete answer, up to the end-of-turn token or the first stop string."""
        text = self._opening + self._decode(self._without_end(tokens))
        end = self._stop_at(text)
        self.stopped_by = next((stop for stop in self._stop if text.startswith(stop, end)), "")
        return text[:end]

    def read(self, tokens: list[int]) -> str:
        """Decode `tokens`, and return the part of the text that no later token can change.

        `tokens` must contain all tokens of the answer so far: the tokens of the previous call, then the new tokens.
        """
        text = self._text_so_far(self._without_end(tokens))
        text = without_partial(text, self._stop, self._certain)[: self._stop_at(text)]
        self.tokens_read, self._certain = len(tokens), len(text)
        return text

    def _text_so_far(self, tokens: list[int]) -> str:
        """Return the opening and the text of `tokens`, without an incomplete character at the end.

        If no later token can change the text of the pending tokens, the method settles them.
        """
        pending = tokens[self._settled :]
        fresh = self._text_behind_context(pending)
        held_back = min(len(fresh) - len(fresh.rstrip("\ufffd")), INCOMPLETE)
        certain = fresh[: len(fresh) - held_back]
        text = self._text + certain
        if held_back:  # an incomplete character may begin in any of the last three tokens, so these three stay pending
            pending = pending[:-INCOMPLETE]
            fresh = self._text_behind_context(pending)
        # Settle the pending tokens only if no later token can change their text. If the pending tokens end inside a
        # character, a later token changes their text.
        if certain.startswith(fresh) and (fresh or len(pending) > WITHOUT_TEXT):
            self._text += fresh
            self._settled += len(pending)
            self._context = pending if fresh else self._context
        return text

    def token(self, token: int) -> str:
        """Return the text of one token, including a space that the decoder drops at the beginning of a text."""
        return self._tokenizer.decode([token, token])[len(self._tokenizer.decode([token])) :]

    def _without_end(self, tokens: list[int]) -> list[int]:
        """Return the tokens, without the last token if it is an end-of-turn token."""
        return tokens[:-1] if tokens and tokens[-1] in self._stop_ids else tokens

    def _text_behind_context(self, tokens: list[int]) -> str:
        """Return the text that `tokens` add to the text of the context."""
        return self._decode(self._context + tokens)[len(self._decode(self._context)) :]

    def _decode(self, tokens: list[int]) -> str:
        """Return the text of some tokens, with U+FFFD in place of bytes that are not valid UTF-8."""
        text = self._tokenizer.decode(tokens, skip_special_tokens=self._skips)
        if "\ufffd" in text:
            text = self._tokenizer.decode(
                mend_byte_tokens(self._tokenizer, tokens), skip_special_tokens=self._skips
            )
        return text

    def _stop_at(self, text: str) -> int:
        """Return the position of the first stop string after the opening, or the length of the text if there is no stop
        string.
        """
        found = [text.find(stop, len(self._opening)) for stop in self._stop]
        return min((at for at in found if at >= 0), default=len(text))


def mend_byte_tokens(tokenizer: Any, tokens: list[int]) -> list[int]:
    """Replace every byte token that is not valid UTF-8 with the byte tokens of U+FFFD.

    Some tokenizers have a token for each byte, like <0x0A>, and decode consecutive byte tokens as one text. If one of
    several consecutive byte tokens is invalid, the text of all these byte tokens is unreadable.
    """
    pieces: list[str] = []
    known = filter(None, tokenizer.convert_ids_to_tokens(tokens))
    for is_byte, run in groupby(known, lambda piece: len(piece) == 6 and piece.startswith("<0x")):
        if is_byte:
            text = bytes(int(piece[3:5], 16) for piece in run).decode(errors="replace")
            run = (f"<0x{byte:02X}>" for byte in text.encode())
        pieces.extend(run)
    return tokenizer.convert_tokens_to_ids(pieces)
