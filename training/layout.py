"""A layout turns the rows of a batch into the inputs of forward passes.

A layout distributes rows over pieces. A piece has two parts: the input of one forward pass, and,
for each token, the index of the hidden state that predicts it. The actor (`actor.py`) runs the
model on the input, picks the hidden states that predict trained tokens, and computes
log-probabilities from these states.

**The rule.** In every layout a token gets the log-probability that it would get if its row went
through the model alone. The choice of layout affects only time and memory.

**padded** stacks rows of similar length and pads the shorter rows on the right. In a causal model
no token attends to the padding after it, so padded rows need no attention mask. The padded layout
is simple, and it is the fastest layout if all rows are equally long.

**packed** puts rows end to end into one long row, so that no padding is computed. On a GPU in
bfloat16, one kernel computes the attention of all sequences. If the kernel cannot be used, the
attention function computes one sequence at a time.

**tree** computes each shared prefix only once (`tree_attention.py`).

**Example.** Two rows of tokens, [a b c] and [d e], have three tokens that a model can predict: b, c
and e. A padded piece of the rows [a b c] and [d e] has 6 hidden states: 0 to 2 for a, b and c, 3
and 4 for d and e, and 5 for the padding. A packed piece of the rows [a b c] and [d e] has only the
hidden states 0 to 4, because it has no padding. In the padded and in the packed piece, hidden state
0 predicts b, hidden state 1 predicts c, and hidden state 3 predicts e.

**Why packed rows need an attention function.** In a packed row, position_ids start at 0 again in
each sequence. Some attention kernels separate the sequences by their position_ids. Kernels that
ignore position_ids let tokens attend to tokens of other sequences, and raise no error. A dense
attention mask could separate the sequences, but it would need t^2 numbers for a packed row of t
tokens. The attention function `attend_apart` needs no mask to separate the sequences.

**The kernel** torch.nn.attention.varlen requires bfloat16 or float16 inputs. The kernel needs heads
whose size is a multiple of 8 and at most 256, and a GPU of the generation Ampere or newer.

**Limits.** In packed rows and trees, the attention function is the only part of the model that
separates the sequences. Models with sliding windows, capped attention, attention sinks,
convolutions or recurrent states are refused in the layouts `packed` and `tree`. The layout `padded`
refuses models with capped attention and models for which transformers has no attention
implementation "sdpa".
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from training.config import PPOActorConfig

Batch = dict[str, Tensor]
TokenIndex = tuple[
    Tensor, Tensor
]  # rows (N,) and columns (N,) of a batch, so that batch[key][index] is (N,)

# Arguments of transformers' attention functions that ask for more than causal attention.
BEYOND_CAUSAL = ("sliding_window", "softcap", "s_aux")


class Piece(NamedTuple):
    """The input of one forward pass, and the index of its n predictable tokens.

    The first token of a row is not predictable, because no hidden state comes before it.
    """

    inputs: dict[
        str, Any
    ]  # the model's arguments: input_ids (b, t) int64, and what the attention function needs
    row: Tensor  # (n,) the row of each token in the batch
    column: Tensor  # (n,) the column of each token in the batch
    predicted_by: (
        Tensor  # (n,) the index of the hidden state that predicts each token, from 0 to b * t - 1
    )

    def select(self, mask: Tensor) -> tuple[TokenIndex, Tensor]:
        """Return the index of the N tokens whose `mask` (B, T) is set, and the hidden states that
        predict them."""
        wanted = mask[self.row, self.column] > 0  # (n,)
        return (self.row[wanted], self.column[wanted]), self.predicted_by[
            wanted
        ]  # ((N,), (N,)), (N,)


class Layout(NamedTuple):
    """A way to distribute rows over pieces, and the attention function that these pieces need."""

    attention: str  # the name of the attention function in transformers' AttentionInterface
    cut: Callable[
        [Batch, Sequence[int], int], Iterable[Piece]
    ]  # (batch, rows, mb_tokens) -> pieces


def row_lengths(batch: Batch) -> list[int]:
    """Return the number of tokens of each row. Raises ValueError if a row has padding before a
    token."""
    mask = batch["attention_mask"].bool()  # (B, T)
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise ValueError("attention_mask has a 1 after a 0: pad the rows on the right")
    return mask.sum(1).tolist()


def split_minibatches(lengths: Sequence[int], n: int) -> list[list[int]]:
    """Distribute rows over `n` mini-batches, longest row first. Each row goes to the mini-batch
    that has the fewest tokens so far.

    No mini-batch is empty, so fewer than `n` rows give fewer than `n` mini-batches.
    """
    n = min(n, len(lengths))
    parts: list[list[int]] = [[] for _ in range(n)]
    loads = [0] * n  # number of tokens in each mini-batch so far
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # If two mini-batches have the same number of tokens, the row goes to the mini-batch with
        # fewer rows.
        lightest = min(range(n), key=lambda j: (loads[j], len(parts[j])))
        parts[lightest].append(row)
        loads[lightest] += lengths[row]
    return parts


def split_microbatches(
    rows: Sequence[int], lengths: Sequence[int], mb_tokens: int
) -> list[list[int]]:
    """Distribute rows over pieces. A piece has rows of similar length, and at most `mb_tokens`
    tokens with padding.

    A row that is longer than `mb_tokens` becomes a piece of its own.
    """
    pieces: list[list[int]] = []
    for row in sorted(rows, key=lambda i: -lengths[i]):
        # The first row of a piece is the longest row, so every row of the piece is padded to that
        # length.
        if pieces and lengths[pieces[-1][0]] * (len(pieces[-1]) + 1) <= mb_tokens:
            pieces[-1].append(row)
        else:
            pieces.append([row])
    return pieces


def split_packs(rows: Sequence[int], lengths: Sequence[int], mb_tokens: int) -> list[list[int]]:
    """Distribute rows over pieces by first-fit decreasing: longest row first, each row into the
    first piece that has space.

    A piece has space for `mb_tokens` tokens. A row of more than `mb_tokens` tokens becomes a piece
    of its own.
    """
    pieces: list[list[int]] = []
    room: list[int] = []  # number of tokens that each piece can still take
    for row in sorted(rows, key=lambda i: -lengths[i]):
        fitting = [j for j, free in enumerate(room) if lengths[row] <= free]
        if fitting:
            pieces[fitting[0]].append(row)
            room[fitting[0]] -= lengths[row]
        else:
            pieces.append([row])
            room.append(mb_tokens - lengths[row])
    return pieces


def cut_padded(batch: Batch, rows: Sequence[int], mb_tokens: int) -> Iterator[Piece]:
    """Distribute rows over padded pieces. A piece has b rows, padded on the right to the length of
    the longest row."""
    for part in split_microbatches(rows, row_lengths(batch), mb_tokens):
        real = batch["attention_mask"][part].bool()  # (b, T)
        t = int(real.sum(1).max())
        row, previous = real[:, 1:t].nonzero(
            as_tuple=True
        )  # (n,), (n,): each token's row, and the previous column
        inputs = {"input_ids": batch["input_ids"][part, :t].long()}  # (b, t)
        yield Piece(inputs, torch.tensor(part)[row], previous + 1, predicted_by=row * t + previous)


def cut_packed(batch: Batch, rows: Sequence[int], mb_tokens: int) -> Iterator[Piece]:
    """Distribute rows over packed pieces. The rows of a piece lie end to end in one long row of t
    tokens, without padding."""
    for part in split_packs(rows, row_lengths(batch), mb_tokens):
        real = batch["attention_mask"][part].bool()  # (b, T)
        row, column = (
            x.clone() for x in real.nonzero(as_tuple=True)
        )  # (t,), (t,): row and column of each token
        ids = batch["input_ids"][part][real].long()[None]  # (1, t)
        lengths = real.sum(1)  # (b,)
        bounds = F.pad(
            lengths.cumsum(0), (1, 0)
        ).int()  # (b + 1,) start of each sequence, and t as last element
        inputs = {
            "input_ids": ids,
            "position_ids": column[None],
            "bounds": bounds,
            "longest": int(lengths.max()),
        }
        later = column.nonzero()[:, 0]  # (n,) positions of the predictable tokens in the long row
        yield Piece(inputs, torch.tensor(part)[row[later]], column[later], predicted_by=later - 1)


def refuse(features: Iterable[str]) -> None:
    """Raise ValueError if a model has `features` that packed rows and trees do not support."""
    names = ", ".join(sorted(features))
    if names:
        raise ValueError(
            f"packed rows and trees allow no {names}; set actor.layout=padded, enable_tree_training=false"
        )


def beyond_full_attention(shape: Any) -> set[str]:
    """Return the types of the model's layers that compute anything other than plain causal
    attention. `shape` is the model's text configuration."""
    window = ["sliding_window"] if getattr(shape, "sliding_window", None) else []
    return set(getattr(shape, "layer_types", None) or window) - {"full_attention"}


def refuse_layers(model: Any, layout: Layout) -> None:
    """Raise ValueError at the start of a run if the model has layers that the layout cannot
    compute.

    Some versions of transformers, such as 5.19, compute capped attention (Gemma 2) without its cap.
    The attention function of packed rows and trees cannot detect convolutions and recurrent states,
    because such layers do not call the attention function.
    """
    shape = model.config.get_text_config()
    if not model._supports_sdpa or getattr(shape, "attn_logit_softcapping", None):
        raise ValueError(
            f"{type(model).__name__} has attention of its own, so no layout here can train it"
        )
    refuse(() if layout is LAYOUTS["padded"] else beyond_full_attention(shape))


def fits_kernel(device: str, dtype: torch.dtype, d: int) -> bool:
    """Return whether torch.nn.attention.varlen supports heads of `d` numbers of type `dtype` on
    this type of device."""
    return device == "cuda" and dtype in (torch.bfloat16, torch.float16) and d % 8 == 0 and d <= 256


def has_kernel(query: Tensor) -> bool:
    """Return whether torch.nn.attention.varlen can compute the attention of `query` (1, heads, t,
    d)."""
    return fits_kernel(query.device.type, query.dtype, query.shape[-1])


def pick_layout(actor: PPOActorConfig, device: str, shape: Any) -> tuple[str, str]:
    """Return the name of the trainer's layout, and the reason why this layout is used. By default
    the layout depends on the type of `device`.

    `shape` is the model's text configuration. The default layout always supports the model.
    """
    if actor.enable_tree_training:
        return "tree", "actor.enable_tree_training is set"
    if actor.layout != "auto":
        return actor.layout, "the configuration sets it"
    if device != "cuda":
        return "padded", "the trainer has no GPU"
    if layers := beyond_full_attention(shape):
        return "padded", f"the model has {', '.join(sorted(layers))}"
    d = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    if not fits_kernel(device, getattr(torch, actor.dtype), d):
        return (
            "padded",
            f"no kernel computes packed rows in {actor.dtype} with heads of {d} numbers",
        )
    return "packed", "one kernel computes all sequences, and no padding is computed"


def attend_apart(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **kwargs: Any
):
    """Compute causal attention within each sequence of a packed row. In transformers, attend_apart
    has the name "packed".

    `query` is (1, heads, t, d), and `key` and `value` are (1, groups, t, d). cut_packed makes
    `bounds` and `longest`. Returns the output (1, t, heads, d), and None in place of the attention
    weights.
    """
    refuse(name for name in BEYOND_CAUSAL if kwargs.get(name) is not None)
    bounds, longest, gqa = kwargs["bounds"], kwargs["longest"], query.shape[1] != key.shape[1]
    if has_kernel(query):
        # q is (t, heads, d); k and v are (t, groups, d). torch.compile knows the output's strides
        # only if q, k and v are contiguous.
        q, k, v = (x.transpose(1, 2).squeeze(0).contiguous() for x in (query, key, value))
        # The window (-1, 0) lets a token attend to all tokens before it and to no token after it.
        causal: dict[str, Any] = {"scale": scaling, "window_size": (-1, 0), "enable_gqa": gqa}
        out: Any = varlen_attn(q, k, v, bounds, bounds, longest, longest, **causal)  # (t, heads, d)
        return out.unsqueeze(0), None  # (1, t, heads, d)
    return attend_one_by_one(query, key, value, bounds, scaling, gqa), None


@torch.compiler.disable  # torch.compile would recompile this function for every number of sequences
def attend_one_by_one(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scaling: float, gqa: bool
) -> Tensor:
    """Compute the attention of attend_apart with one call of scaled_dot_product_attention for each
    sequence."""
    lengths, parts = bounds.diff().tolist(), []
    how: dict[str, Any] = {"is_causal": True, "scale": scaling, "enable_gqa": gqa}
    for q, k, v in zip(
        query.split(lengths, dim=2), key.split(lengths, dim=2), value.split(lengths, dim=2)
    ):
        parts.append(F.scaled_dot_product_attention(q, k, v, **how))  # (1, heads, length, d)
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()  # (1, t, heads, d)


AttentionInterface.register("packed", attend_apart)
# Switch off cuDNN's attention. For every new shape cuDNN prepares an execution plan, which takes
# time. Nearly every batch has a new shape.
torch.backends.cuda.enable_cudnn_sdp(False)

LAYOUTS = {"padded": Layout("sdpa", cut_padded), "packed": Layout("packed", cut_packed)}
