"""A layout turns rows of a batch into the inputs of forward passes.

It cuts rows into pieces. A piece is the input of one pass, and says for each token which hidden
state predicts it. In every layout a token gets the log-probability that it would get if its row
went through the model alone; they differ in time and memory.

    padded    rows of similar length are stacked, the shorter ones padded on the right. No token
              attends to the padding after it, so no mask is needed.
    packed    rows lie end to end in one long row. A GPU's kernel keeps them apart in bfloat16.
    tree      shared prefixes are computed once (tree_attention.py).

Example: in the rows [a b c] and [d e] a model can predict b, c and e. Padded they have 6 hidden
states, packed only the first 5; in both, hidden states 0, 1 and 3 predict b, c and e.

Packed rows need an attention function of their own. position_ids start again in every row, but
kernels that ignore them let rows see each other and raise no error, and a dense mask would need t^2
numbers. In packed rows and trees this function is all that separates rows, so these layouts refuse
models with sliding windows, convolutions or recurrent states.
"""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from run.config import PPOActorConfig

Batch = dict[str, Tensor]
TokenIndex = tuple[Tensor, Tensor]  # rows (N,) and columns (N,) of a batch

# Arguments of transformers' attention functions that ask for more than causal attention.
BEYOND_CAUSAL = ("sliding_window", "softcap", "s_aux")


class Piece(NamedTuple):
    """The input of one forward pass, and its n predictable tokens: all but the first of a row."""

    inputs: dict[str, Any]  # of the model: input_ids (b, t), and what the attention needs
    row: Tensor  # (n,) in the batch
    column: Tensor  # (n,) in the batch
    predicted_by: Tensor  # (n,) hidden state, from 0 to b * t - 1

    def select(self, mask: Tensor) -> tuple[TokenIndex, Tensor]:
        """The index of the N tokens whose `mask` (B, T) is set, and what predicts them, (N,)."""
        wanted = mask[self.row, self.column] > 0  # (n,)
        return (self.row[wanted], self.column[wanted]), self.predicted_by[wanted]


def row_lengths(batch: Batch) -> list[int]:
    mask = batch["attention_mask"].bool()  # (B, T)
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise ValueError("attention_mask has a 1 after a 0: pad the rows on the right")
    return mask.sum(1).tolist()


def split_minibatches(lengths: Sequence[int], n: int) -> list[list[int]]:
    """Distribute all rows over n mini-batches, the longest first, each to the one with the fewest
    tokens. None is empty, so few rows give few mini-batches."""
    parts: list[list[int]] = [[] for _ in range(min(n, len(lengths)))]
    loads = [0] * len(parts)
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        lightest = min(range(len(parts)), key=lambda j: (loads[j], len(parts[j])))
        parts[lightest].append(row)
        loads[lightest] += lengths[row]
    return parts


def split_microbatches(
    rows: Sequence[int], lengths: Sequence[int], mb_tokens: int, is_padded: bool
) -> list[list[int]]:
    """Cut rows into pieces of at most `mb_tokens` tokens, the longest row first. Padded rows count
    as long as the first of their piece. A row that is too long is a piece of its own."""
    pieces: list[list[int]] = []
    room = 0  # tokens that the last piece still takes
    for row in sorted(rows, key=lambda row: -lengths[row]):
        size = lengths[pieces[-1][0]] if pieces and is_padded else lengths[row]
        if not pieces or size > room:
            pieces.append([])
            room, size = mb_tokens, lengths[row]
        pieces[-1].append(row)
        room -= size
    return pieces


def cut_padded(batch: Batch, rows: Sequence[int], mb_tokens: int) -> Iterator[Piece]:
    for part in split_microbatches(rows, row_lengths(batch), mb_tokens, True):
        real = batch["attention_mask"][part].bool()  # (b, T)
        t = int(real.sum(1).max())
        row, previous = real[:, 1:t].nonzero(as_tuple=True)  # (n,), (n,)
        inputs = {"input_ids": batch["input_ids"][part, :t].long()}  # (b, t)
        yield Piece(inputs, torch.tensor(part)[row], previous + 1, predicted_by=row * t + previous)


def cut_packed(batch: Batch, rows: Sequence[int], mb_tokens: int) -> Iterator[Piece]:
    for part in split_microbatches(rows, row_lengths(batch), mb_tokens, False):
        real = batch["attention_mask"][part].bool()  # (b, T)
        row, column = real.nonzero().T.contiguous()  # (t,), (t,)
        lengths = real.sum(1)  # (b,)
        inputs = {
            "input_ids": batch["input_ids"][part][real].long()[None],  # (1, t)
            "position_ids": column[None],
            "bounds": F.pad(lengths.cumsum(0), (1, 0)).int(),  # (b + 1,) starts of the rows, and t
            "longest": int(lengths.max()),
        }
        later = column.nonzero()[:, 0]  # (n,)
        yield Piece(inputs, torch.tensor(part)[row[later]], column[later], predicted_by=later - 1)


def refuse(features: Iterable[str]) -> None:
    if names := ", ".join(sorted(features)):
        raise ValueError(
            f"packed rows and trees allow no {names}: set actor.enable_tree_training=false"
        )


def beyond_full_attention(shape: Any) -> set[str]:
    """The kinds of layers that are more than causal attention, given a model's text
    configuration."""
    window = ["sliding_window"] if getattr(shape, "sliding_window", None) else []
    return {*(getattr(shape, "layer_types", None) or window)} - {"full_attention"}


def refuse_layers(model: Any, layout: str) -> None:
    """Raise ValueError if the layout cannot compute the model's layers. Some versions of
    transformers compute capped attention (Gemma 2) without its cap."""
    shape = model.config.get_text_config()
    if not model._supports_sdpa or getattr(shape, "attn_logit_softcapping", None):
        raise ValueError(f"{type(model).__name__} has attention of its own: it cannot be trained")
    refuse(() if layout == "padded" else beyond_full_attention(shape))


def pick_layout(actor: PPOActorConfig, device: str, shape: Any) -> str:
    """The layout for a model with the text configuration `shape`. The kernel for packed rows takes
    16-bit numbers, and heads of 8 to 256 numbers."""
    if actor.enable_tree_training:
        return "tree"
    d = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    has_kernel = device == "cuda" and actor.dtype == "bfloat16" and d % 8 == 0 and d <= 256
    return "packed" if has_kernel and not beyond_full_attention(shape) else "padded"


def attend_apart(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """Causal attention within each row of a packed piece. `query` is (1, heads, t, d), `key` and
    `value` (1, groups, t, d), the output (1, t, heads, d)."""
    refuse(name for name in BEYOND_CAUSAL if kwargs.get(name) is not None)
    # torch.compile knows the strides of the output only if these are contiguous.
    q, k, v = (x.transpose(1, 2).squeeze(0).contiguous() for x in (query, key, value))
    causal: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0)}  # all before, none after
    if (copies := q.shape[1] // k.shape[1]) > 1:
        if HAS_GROUPS:
            causal["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
    bounds, longest = kwargs["bounds"], kwargs["longest"]
    out: Any = varlen_attn(q, k, v, bounds, bounds, longest, longest, **causal)  # (t, heads, d)
    return out.unsqueeze(0), None


HAS_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # not in torch 2.11
AttentionInterface.register("packed", attend_apart)
# cuDNN prepares a plan for every new shape, and nearly every batch has one.
torch.backends.cuda.enable_cudnn_sdp(False)
