"""Make a small base model for a task: a tiny Qwen3 with its own words and chat template, which
learns by imitation.

The result is an ordinary Hugging Face directory, so a run loads the tiny model with the same code
as a large one.

**The tokenizer** has one token per word, and spaces separate words. The chat template writes every
message as `<role> content <end>`, so the tokens of a message do not depend on other messages. The
proxy needs independent messages, because it appends new messages to the sampled tokens.

**The model** starts with random weights, and learns in seconds to imitate a weak player of the
task. Reinforcement learning needs this warm-up: with random weights, no answer has the right form,
so none earns a reward. But the imitated player makes many random moves, so only reinforcement
learning makes the model play well.

**Reproducibility.** On one machine, the same seed and number of threads give the same weights.
"""

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, UNKNOWN, END, ASSISTANT = "<pad>", "<unk>", "<end>", "<assistant>"
ROLES = ["<system>", "<user>", ASSISTANT]
ALL_MESSAGES = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
CHAT_TEMPLATE = ALL_MESSAGES + "{% if add_generation_prompt %}<assistant>{% endif %}"
NextBatch = Callable[[], list[list[int]]]  # returns a batch of conversations as token ids
IGNORED = -100  # the label of a token that is left out of the loss


def make_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerFast:
    vocab = {word: i for i, word in enumerate([PAD, UNKNOWN, END, *ROLES, *words])}
    raw = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        chat_template=CHAT_TEMPLATE,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=ROLES,
    )


def render(tokenizer: PreTrainedTokenizerFast, messages: list[dict]) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, return_dict=False))


def make_qwen3(
    tokenizer: PreTrainedTokenizerFast, layers: int, context: int, seed: int
) -> Qwen3ForCausalLM:
    """Return a tiny Qwen3 with random weights. Their standard deviation is 0.06. With the usual
    0.02, attention would be nearly uniform at this width, and training would stall."""
    config = Qwen3Config(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=context,
        initializer_range=0.06,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def answers_only(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> list[int]:
    """Return one label per token: in the assistant's messages the token itself, elsewhere
    IGNORED."""
    end, assistant = map(tokenizer.convert_tokens_to_ids, (END, ASSISTANT))
    labels = []
    inside = False
    for token in ids:
        labels.append(token if inside else IGNORED)
        inside = token == assistant or (inside and token != end)
    return labels


def imitate(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    next_batch: NextBatch,
    steps: int,
    lr: float,
) -> float:
    """Train the model with AdamW to predict the assistant's tokens. Return the loss of the last
    batch, in nats per token.

    Padding is on the right, so no real token attends to it, and no attention mask is needed.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    loss = torch.tensor(torch.nan)
    for step in range(steps):
        batch = next_batch()
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        answers = [torch.tensor(answers_only(tokenizer, ids)) for ids in batch]
        input_ids = pad_sequence([torch.tensor(ids) for ids in batch], batch_first=True)  # (B, T)
        labels = pad_sequence(answers, batch_first=True, padding_value=IGNORED)  # (B, T)
        loss = model(input_ids=input_ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def save_atomically(path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the model to `path`, unless a model is there already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        draft = Path(scratch) / path.name
        tokenizer.save_pretrained(draft)
        model.save_pretrained(draft)
        try:
            draft.replace(path)
        except OSError:  # `path` exists, perhaps because another process has written the same model
            if not (path / "config.json").is_file():
                raise
