r"""Messages become the tokens of a prompt, and the tokens of an answer become text while they arrive.

Prompts. A sampled token is never tokenised a second time. The prompt of a first turn is the chat template, rendered
over the messages. The prompt of a later turn is

    prompt tokens of the parent + output tokens of the parent + tail

The tail is the text that the template puts behind the parent's answer. `PromptBuilder` renders a stub, [user "x",
assistant SENTINEL], with the new messages behind it, and takes everything behind SENTINEL. So a turn costs its own
length, not the length of the conversation. An example with the template of Qwen:

    parent's prompt    <|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n
    parent's output    Hi!<|im_end|>
    tail               \n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n

The rendered tail begins with the marks that close an assistant's turn, here <|im_end|>. If the model has sampled these
marks, the tail continues behind them. If a length limit cut the answer, the marks stay in the tail. They are then part
of the prompt and are not trained.

Many templates change the history: they remove old reasoning or strip blanks. With this rule the model keeps seeing what
it wrote, and one conversation is one sequence for training. The rule needs a tail that depends on the new messages
only. `PromptBuilder` checks this once, with two histories of different length. If the check fails, all turns are
rendered in full, as they are with the option chat_template_type "hf". If the template refuses one stub, only that turn
is rendered in full. The tokens of such a turn may differ from its parent's, and then a concat export starts a new row.

Text. `TextReader.read` returns only text that no later token can change. It holds back a character of which some bytes
are missing, and the possible beginning of a stop string. Some decoders look at neighbours: they drop the space of the
first token of a text, or put a space between two words. Therefore new tokens are decoded together with a few tokens
before them. Each token is decoded a bounded number of times.

An opening is text of the answer that stands in the prompt and is not sampled: a <think> with which the prompt ends, or
the first words of a forced tool call. The text of an answer begins with its opening.

The module does not promise that a model copes with a history that its template would have shortened.
"""

import contextlib
import copy
import hashlib
import inspect
import json
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from jinja2 import TemplateError

from cache import Interaction
from calls.messages import AgentRequest, Message, Refusal
from calls.tools import without_partial
from inference.io_struct import GenerationHyperparameters

SENTINEL = "\u27e6the assistant's text\u27e7"
STUB: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": SENTINEL}]
REFUSES = (TemplateError, LookupError, TypeError, ValueError, RecursionError)  # what a template raises for bad messages
INCOMPLETE = 3  # an incomplete character has at most 3 bytes, so it has at most 3 tokens and is decoded as 3 U+FFFD
WITHOUT_TEXT = 16  # more pending tokens than this that have no text are taken for special tokens


class PromptBuilder:
    """Turns messages into prompt tokens with the chat template of the tokenizer."""

    def __init__(self, tokenizer: Any, chat_template_type: str = "concat") -> None:
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; use the tokenizer of a chat model")
        self._tokenizer = tokenizer
        self._reserved = inspect.signature(tokenizer.apply_chat_template).parameters.keys()
        self.splices = chat_template_type == "concat" and self._is_local()  # whether a child begins with its parent

    def _is_local(self) -> bool:
        """Return whether the text behind an assistant's answer depends on the new messages only."""
        new: list[Message] = [{"role": "user", "content": "c"}]
        longer: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        with contextlib.suppress(Refusal):
            return self._tail(new, {}) == self._tail(new, {}, longer)
        return False

    def prompt(self, ask: AgentRequest, parent: Interaction | None) -> list[int]:
        """Return the prompt tokens of a call. Raises Refusal if the chat template refuses the messages."""
        if taken := ask.template_kwargs.keys() & self._reserved:
            names = ", ".join(sorted(taken))
            raise Refusal(f"chat_template_kwargs: {names} cannot be set; only variables of the template can")
        variables = ask.template_kwargs | ({"tools": ask.tools} if ask.tools else {})
        if parent and self.splices:
            known = len(parent.messages) + len(parent.output_message_list)
            with contextlib.suppress(Refusal):  # perhaps of the stub only; the full rendering tells
                tail = self._tail(ask.messages[known:], variables)
                said = parent.tokens.output_tokens
                return parent.tokens.input_tokens + said + self._without_sampled_marks(tail, said)
        return self.encode(self._render(ask.messages, variables))

    def _tail(self, new: list[Message], variables: dict[str, Any], before: Iterable[Message] = ()) -> list[int]:
        """Return the tokens that the template puts behind an assistant's answer that `new` follows."""
        _, found, tail = self._render([*before, *STUB, *new], variables).partition(SENTINEL)
        if not found:
            raise Refusal("messages: the chat template leaves out what an assistant said")
        return self.encode(tail)

    def _without_sampled_marks(self, tail: list[int], said: list[int]) -> list[int]:
        """Return the tail without the marks at its beginning with which the model has ended its answer itself."""
        blanks = next((i for i, token in enumerate(tail) if self._tokenizer.decode([token]).strip()), 0)
        marks = tail[blanks:]
        for count, mark in enumerate(marks, 1):
            if said[-1:] == [mark] and said[-count:] == marks[:count]:
                return marks[count:]
        return tail

    def _render(self, messages: list[Message], variables: dict[str, Any]) -> str:
        """Return the text of the messages. Raises Refusal if the template accepts no form of their tool calls."""
        options = {"tokenize": False, "add_generation_prompt": True} | variables
        try:
            return self._tokenizer.apply_chat_template(messages, **options)
        except REFUSES as error:
            for other in other_forms(messages):
                with contextlib.suppress(*REFUSES):
                    return self._tokenizer.apply_chat_template(other, **options)
            raise Refusal(f"messages: the chat template refuses them: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without a token that begins a text."""
        return self._tokenizer.encode(text, add_special_tokens=False)


def other_forms(messages: list[Message]) -> list[list[Message]]:
    """Return copies of the messages with tool calls as some templates want them; none if there are no tool calls.

    Mistral's templates want ids of nine letters or digits. DeepSeek's want arguments as text and not as an object.
    """
    short, texts = copy.deepcopy(messages), copy.deepcopy(messages)
    ids = [(call, "id") for message in short for call in message.get("tool_calls", ())]
    for holder, key in ids + [(message, "tool_call_id") for message in short if "tool_call_id" in message]:
        holder[key] = hashlib.blake2b(str(holder[key]).encode()).hexdigest()[:9]
    for function in (call["function"] for message in texts for call in message.get("tool_calls", ())):
        if not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return [form for form in (short, texts) if form != messages]


class TextReader:
    """Turns the tokens of one answer into text: `read` while they arrive, `whole` at the end.

        tokens      a  b  c | d  e  f | g  h
                      context         ^ settled

    The text of all tokens before `settled` is known for good. The tokens from `settled` on are pending: every `read`
    decodes them together with `context`, the last settled tokens that have text. A text that is not yet a whole
    character is decoded as U+FFFD.
    """

    def __init__(
        self, tokenizer: Any, gconfig: GenerationHyperparameters, opening: str = "", special_tokens: bool = False
    ) -> None:
        self._tokenizer, self._opening, self._skips = tokenizer, opening, not special_tokens
        self._stop, self._stop_ids = gconfig.stop, frozenset(gconfig.stop_token_ids)
        # All that changes:
        self._settled = 0  # number of tokens whose text is in `_text`
        self._text = opening  # the opening and the text of the settled tokens
        self._context: list[int] = []  # settled tokens that are decoded again before the pending ones

    def whole(self, tokens: list[int]) -> str:
        """Return the text of a complete answer, up to its end-of-turn token or its first stop string."""
        text = self._opening + self._decode(self._without_end(tokens))
        return text[: self._stop_at(text)]

    def read(self, tokens: list[int]) -> str:
        """Return the text of all tokens so far that no later token can change. `tokens` only grows between calls."""
        pending = self._without_end(tokens)[self._settled :]
        fresh = self._text_behind_context(pending)
        held_back = min(len(fresh) - len(fresh.rstrip("\ufffd")), INCOMPLETE)
        certain = fresh[: len(fresh) - held_back]
        text = self._text + certain
        if held_back:  # the incomplete character may begin in any of the last three tokens, so they stay pending
            pending = pending[:-INCOMPLETE]
            fresh = self._text_behind_context(pending)
        # The text is not certain if the last of these tokens is the beginning of a character.
        if certain.startswith(fresh) and (fresh or len(pending) > WITHOUT_TEXT):
            self._text += fresh
            self._settled += len(pending)
            if fresh:
                self._context = pending
        return without_partial(text, self._stop)[: self._stop_at(text)]

    def token(self, token: int) -> str:
        """Return the text of one token, with the space that a decoder drops from the first token of a text."""
        return self._tokenizer.decode([token, token])[len(self._tokenizer.decode([token])) :]

    def _without_end(self, tokens: list[int]) -> list[int]:
        """Return the tokens, but not an end-of-turn token at their end."""
        return tokens[:-1] if tokens and tokens[-1] in self._stop_ids else tokens

    def _text_behind_context(self, tokens: list[int]) -> str:
        """Return the text that `tokens` add to the text of the context."""
        return self._decode(self._context + tokens)[len(self._decode(self._context)) :]

    def _decode(self, tokens: list[int]) -> str:
        """Return the text of some tokens; a byte that belongs to no character is one U+FFFD."""
        text = self._tokenizer.decode(tokens, skip_special_tokens=self._skips)
        if "\ufffd" in text:
            text = self._tokenizer.decode(mend_byte_tokens(self._tokenizer, tokens), skip_special_tokens=self._skips)
        return text

    def _stop_at(self, text: str) -> int:
        """Return where the first stop string begins behind the opening, or the length of the text if there is none."""
        found = [text.find(stop, len(self._opening)) for stop in self._stop]
        return min((at for at in found if at >= 0), default=len(text))


def mend_byte_tokens(tokenizer: Any, tokens: list[int]) -> list[int]:
    """Return the tokens with bad bytes replaced by the bytes of U+FFFD.

    Some tokenizers have a token for each byte, like <0x0A>. Their decoder reads a run of such tokens as one text, and
    a single bad byte spoils the whole run. After the replacement every run is a valid text.
    """
    pieces: list[str] = []
    known = filter(None, tokenizer.convert_ids_to_tokens(tokens))
    for is_byte, run in groupby(known, lambda piece: len(piece) == 6 and piece.startswith("<0x")):
        if is_byte:
            text = bytes(int(piece[3:5], 16) for piece in run).decode(errors="replace")
            run = (f"<0x{byte:02X}>" for byte in text.encode())
        pieces.extend(run)
    return tokenizer.convert_tokens_to_ids(pieces)
