r"""Turn messages into prompt tokens, and output tokens into text.

If the template permits, no turn is tokenised twice. The prompt of a later turn is

    prompt of the parent + output of the parent + tail

where the tail is what the chat template writes between the parent's answer and the next one:

    parent's prompt    <|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n
    parent's output    Hi!<|im_end|>
    tail               \n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n

To get the tail, we render a stub, [user "x", assistant SENTINEL], and the new messages. The tail is
the text after SENTINEL, without the end mark that the model has sampled already. So only new
messages are tokenised, and an answer stays as it was sampled, even if the template would strip its
reasoning or a blank. The whole conversation is then one sequence to train on.

This is right only if the tail depends on nothing but the new messages. `PromptBuilder` tries two
histories. If the tails differ, every prompt is rendered anew. So is the prompt of a turn whose
tools differ from its parent's. Style concat then begins a new row.

The model may do worse with a history that its template would have shortened.
"""

import contextlib
from collections.abc import Iterable
from typing import Any

from cache import Interaction
from calls.messages import Message, Refusal, with_texts
from inference.io_struct import GenerationHyperparameters, ModelResponse

SENTINEL = "\u27e6the assistant's text\u27e7"
STUB: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": SENTINEL}]


class PromptBuilder:
    """Renders messages with the tokenizer's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template: take that of a chat model")
        self._tokenizer = tokenizer
        self.splices = self._is_local()  # whether prompts begin with the parent's tokens

    def _is_local(self) -> bool:
        new: list[Message] = [{"role": "user", "content": "c"}]
        before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        with contextlib.suppress(Refusal):
            return self._tail(new, {}) == self._tail(new, {}, before)
        return False

    def prompt(self, call: Interaction) -> list[int]:
        """Return the prompt of a call. Raises Refusal if the template refuses the messages."""
        variables = call.template_kwargs | ({"tools": call.tools} if call.tools else {})
        parent = call.parent if self.splices else None
        if parent and (parent.tools, parent.template_kwargs) == (call.tools, call.template_kwargs):
            with contextlib.suppress(Refusal):  # it refuses the stub
                new = call.messages[len(parent.conversation) :]
                return self.extend(parent.tokens, new, variables)
        return self.encode(self._render(call.messages, variables))

    def extend(
        self, turn: ModelResponse, new: list[Message], variables: dict[str, Any]
    ) -> list[int]:
        """The prompt that continues `turn` with the messages `new`: the turn's prompt and output,
        and the tail without end marks that the output has already. Raises Refusal."""
        said, tail = turn.output_tokens, self._tail(new, variables)
        texts = enumerate(self._tokenizer.decode([token]) for token in tail)
        blanks = next((i for i, text in texts if text.strip()), 0)
        marks = tail[blanks:]
        for count in range(1, len(marks) + 1):
            if said[-count:] == marks[:count]:
                return turn.input_tokens + said + marks[count:]
        return turn.input_tokens + said + tail

    def _tail(
        self, new: list[Message], variables: dict[str, Any], before: Iterable[Message] = ()
    ) -> list[int]:
        _, found, tail = self._render([*before, *STUB, *new], variables).partition(SENTINEL)
        if not found:
            raise Refusal("messages: the chat template leaves out what an assistant said")
        return self.encode(tail)

    def _render(self, messages: list[Message], variables: dict[str, Any]) -> str:
        options = variables | {"tokenize": False, "add_generation_prompt": True}
        render = self._tokenizer.apply_chat_template
        try:
            return render(messages, **options)
        except Exception as error:  # a template may raise anything
            with contextlib.suppress(Exception):  # DeepSeek's templates need arguments as text
                return render([*map(with_texts, messages)], **options)
            raise Refusal(f"messages: the chat template refuses them: {error}") from error

    def encode(self, text: str) -> list[int]:
        # The Rust tokenizer takes half the time, if nobody has changed its settings.
        rust = getattr(self._tokenizer, "backend_tokenizer", None)
        if rust and not (rust.truncation or rust.padding or rust.encode_special_tokens):
            return rust.encode(text, add_special_tokens=False).ids
        return self._tokenizer.encode(text, add_special_tokens=False)


def read_text(
    tokenizer: Any,
    tokens: list[int],
    gconfig: GenerationHyperparameters,
    opening: str = "",
    special_tokens: bool = False,
) -> str:
    """Return an answer's text up to its end mark or the first stop string. It begins with
    `opening`, which is in the prompt."""
    if tokens and tokens[-1] in gconfig.stop_token_ids:
        tokens = tokens[:-1]
    said = tokenizer.decode(tokens, skip_special_tokens=not special_tokens)
    for stop in gconfig.stop:
        said, _, _ = said.partition(stop)
    return opening + said
