"""A base model made on the spot: a word list, a chat template, a tiny Qwen3, and a warm-up by imitation.

The rule: what this file writes is an ordinary Hugging Face directory. Everything else in the project loads it
through `AutoModelForCausalLM` and `AutoTokenizer` and cannot tell it from a download, so what is learnt on the tiny
model about the loop holds for a large one.

**The tokenizer** is WordLevel: one word, one token, words parted by blanks. A sampled sequence can therefore be
read with the naked eye. The chat template writes every message as `<role> content <end>` and nothing between
messages, so a conversation's rendering is the concatenation of its messages' renderings. That is the property the
proxy needs: the parent's prompt ids, the ids the model sampled (their last one is `<end>`), and the rendered tail
are together the rendering of the whole conversation.

**The model** is random but for its warm-up: supervised imitation of somebody who plays badly. Reinforcement learning
needs a policy that answers in the right form and now and then succeeds; a pretrained model brings that along, a
random one has to be given it. The warm-up is seconds, and its player is no better than chance, so all skill that a
run shows at the end is the run's own.

**What it does not promise**: the same bits on different machines. The same seed on the same machine with the same
number of threads gives the same weights.
"""

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, UNKNOWN, END, ASSISTANT = "<pad>", "<unk>", "<end>", "<assistant>"
MARKERS = (PAD, UNKNOWN, END, "<system>", "<user>", ASSISTANT)
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NextBatch = Callable[[], list[list[int]]]  # conversations as token ids
IGNORED = -100  # the label of a token that the loss leaves out


def make_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """One token a word; six markers come first."""
    vocab = {word: i for i, word in enumerate([*MARKERS, *words])}
    raw = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=["<system>", "<user>", ASSISTANT],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def render(tokenizer: PreTrainedTokenizerFast, messages: list[dict]) -> list[int]:
    """The ids of a whole conversation."""
    return list(tokenizer.apply_chat_template(messages, return_dict=False))


def make_qwen3(tokenizer: PreTrainedTokenizerFast, layers: int, context: int, seed: int) -> Qwen3ForCausalLM:
    """A random Qwen3 of width 64. The spread of its initial weights is three times the usual 0.02: with so
    narrow a model the usual one leaves the attention flat, and training with it stalls."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=context,
        initializer_range=0.06,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def answers_only(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> list[int]:
    """Labels: the assistant's words and the end token that closes them; every other token is ignored."""
    end, assistant = map(tokenizer.convert_tokens_to_ids, (END, ASSISTANT))
    labels, inside = [], False
    for token in ids:
        labels.append(token if inside else IGNORED)
        inside = token == assistant or (inside and token != end)
    return labels


def imitate(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, next_batch: NextBatch, steps: int, lr: float
) -> None:
    """Supervised learning of the assistant's tokens: AdamW, lr falling linearly to 0.

    No attention mask: padding is on the right, where causal attention never looks, and its labels are ignored."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(steps):
        batch = next_batch()
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        answers = [torch.tensor(answers_only(tokenizer, ids)) for ids in batch]
        input_ids = pad_sequence([torch.tensor(ids) for ids in batch], batch_first=True)  # (B, T)
        labels = pad_sequence(answers, batch_first=True, padding_value=IGNORED)  # (B, T)
        model(input_ids=input_ids, labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def save_atomically(path: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """The directory appears whole or not at all. Of several processes the first wins; the others' copies equal it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        draft = Path(scratch) / path.name
        tokenizer.save_pretrained(draft)
        model.save_pretrained(draft)
        try:
            draft.replace(path)
        except OSError:  # `path` is a directory that holds something: fine if it is another's copy
            if not (path / "config.json").is_file():
                raise
