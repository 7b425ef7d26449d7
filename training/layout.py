"""How a piece of a batch is laid before the model: as padded rows, as one packed row, or by a layout of your own.

The rule: whatever the layout, every token has the log-probability that it has in its own sequence alone. A layout is a
matter of time and memory, never of learning, and one can be exchanged for another in the middle of a run.

A layout is one function, which cuts rows into pieces, and the attention that its pieces need. A piece is a forward
pass: what the model gets, and which of its hidden states predicts each of the rows' tokens. The actor knows nothing
else about it: it runs the model, picks the hidden states of the tokens that are wanted and turns them into
log-probabilities (training/logprobs.py). A tree of shared prefixes is a third layout and needs no other word from the
actor.

    padded    rows of similar length, one under another, filled up on the right. A causal model sees no padding behind a
              token, so there is no mask at all. Simple, and the fastest for rows that are alike.
    packed    rows end to end in one long row. Nothing is computed for padding. position_ids start again at 0 with each
              sequence, and each attends to itself alone: its part of q, k and v goes through attention by itself. There
              is no mask that could be forgotten, and no (T, T) matrix.

Why not a mask, or position_ids alone, for packed rows. Models read position_ids as a hint that rows are packed, some
kernels do and some do not, and with a cache none does: then neighbours leak into each other and nothing says so
(AReaL #1442). A dense mask is right, and costs T * T for work that is nearly all masked.

What keeps rows apart in a packed row or a tree is the attention function, so causal attention has to be all by which
tokens see one another. A model with sliding windows, capped attention, attention sinks, convolutions or recurrent
states is refused there; padded rows go through any model that transformers runs with sdpa.

What a layout does not decide: which rows make an optimizer step (split_minibatches), what the loss divides by.

Different from AReaL: there packed rows are the only kind, and depend on the attention kernel for being kept apart.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

Batch = dict[str, Tensor]
BEYOND = ("sliding_window", "softcap", "s_aux")  # what transformers may ask of an attention function beside causality
Places = tuple[Tensor, Tensor]  # rows (N,) and columns (N,) of a batch: batch[key][places] is (N,)


@dataclass(frozen=True)
class Piece:
    """One forward pass over some rows of a batch, of which n tokens can be read: all but the first of each row."""

    inputs: dict[str, Any]  # the model's: input_ids (b, t) int64, and what the layout's attention reads
    row: Tensor  # (n,) where in the batch a token is
    column: Tensor  # (n,)
    before: Tensor  # (n,) which of the b * t hidden states, counted row by row, predicts it

    def read(self, which: Tensor) -> tuple[Places, Tensor]:
        """The N tokens that can be read and where `which` (B, T) is set: their places, and `before` of each."""
        wanted = which[self.row, self.column] > 0  # (n,)
        return (self.row[wanted], self.column[wanted]), self.before[wanted]


class Layout(NamedTuple):
    """How rows meet the model."""

    attention: str  # the attention function (transformers' AttentionInterface) that the model is loaded with
    cut: Callable[[Batch, Sequence[int], int], list[Piece]]  # (batch, rows, mb_tokens); a longer row is its own piece


def row_lengths(batch: Batch) -> list[int]:
    """Tokens of each row. Raises ValueError if padding is anywhere but on the right."""
    mask = batch["attention_mask"].bool()  # (B, T)
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise ValueError("rows must be padded on the right: attention_mask has a 1 after a 0")
    return mask.sum(1).tolist()


def split_minibatches(lengths: Sequence[int], n: int) -> list[list[int]]:
    """Rows dealt to `n` minibatches: longest first, each to the one with the fewest tokens. No minibatch is empty."""
    n = min(n, len(lengths))
    parts: list[list[int]] = [[] for _ in range(n)]
    loads = [0] * n
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        lightest = min(range(n), key=lambda j: (loads[j], len(parts[j])))
        parts[lightest].append(row)
        loads[lightest] += lengths[row]
    return parts


def split_microbatches(rows: Sequence[int], lengths: Sequence[int], mb_tokens: int) -> list[list[int]]:
    """Rows in pieces of similar length, each at most `mb_tokens` when padded to its longest row.

    A single row that is longer is a piece of its own.
    """
    pieces: list[list[int]] = []
    for row in sorted(rows, key=lambda i: -lengths[i]):
        if pieces and lengths[pieces[-1][0]] * (len(pieces[-1]) + 1) <= mb_tokens:
            pieces[-1].append(row)
        else:
            pieces.append([row])
    return pieces


def split_packs(rows: Sequence[int], lengths: Sequence[int], mb_tokens: int) -> list[list[int]]:
    """First-fit decreasing: longest row first, each into the first piece that stays within `mb_tokens`."""
    pieces: list[list[int]] = []
    room: list[int] = []
    for row in sorted(rows, key=lambda i: -lengths[i]):
        j = next((j for j, free in enumerate(room) if lengths[row] <= free), len(pieces))
        if j == len(pieces):
            pieces.append([])
            room.append(mb_tokens)
        pieces[j].append(row)
        room[j] -= lengths[row]
    return pieces


def cut_padded(batch: Batch, rows: Sequence[int], mb_tokens: int) -> list[Piece]:
    """Rows one under another, cut to the longest of them."""
    pieces = []
    for members in split_microbatches(rows, row_lengths(batch), mb_tokens):
        real = batch["attention_mask"][members].bool()  # (b, T)
        longest = int(real.sum(1).max())
        row, before = real[:, 1:longest].nonzero(as_tuple=True)  # (n,), (n,)
        ids = batch["input_ids"][members, :longest].long()  # (b, t)
        pieces.append(Piece({"input_ids": ids}, torch.tensor(members)[row], before + 1, row * longest + before))
    return pieces


def cut_packed(batch: Batch, rows: Sequence[int], mb_tokens: int) -> list[Piece]:
    """Rows end to end, each attending to itself."""
    pieces = []
    for members in split_packs(rows, row_lengths(batch), mb_tokens):
        real = batch["attention_mask"][members].bool()  # (b, T)
        row, column = real.nonzero(as_tuple=True)  # (t,), (t,): the tokens, row after row
        inputs: dict[str, Any] = {"input_ids": batch["input_ids"][members][real].long()[None]}  # (1, t)
        inputs |= {"position_ids": column[None], "sequence_lengths": real.sum(1).tolist()}
        later = column.nonzero()[:, 0]  # (n,)
        pieces.append(Piece(inputs, torch.tensor(members)[row[later]], column[later], later - 1))
    return pieces


def refuse(more: Iterable[str]) -> None:
    """Raise ValueError where a model has `more` than causal attention: packed rows and trees would get it wrong."""
    if names := ", ".join(sorted(more)):
        raise ValueError(f"packed rows and trees have no {names}; set actor.layout=padded, enable_tree_training=false")


def refuse_layers(model: Any) -> None:
    """The same at the start, also for what an attention function never sees: convolutions, recurrent states."""
    if not model._supports_sdpa:
        raise ValueError(f"{type(model).__name__} has attention of its own, which no layout of rows fits")
    config = model.config.get_text_config()
    window = ["sliding_window"] if getattr(config, "sliding_window", None) else []
    refuse({*(getattr(config, "layer_types", None) or window)} - {"full_attention"})


def attend_apart(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **kwargs: Any):
    """Causal attention within each sequence of a packed row.

    query (1, heads, t, d); key, value (1, groups, t, d); sequence_lengths add up to t. Returns (1, t, heads, d).
    """
    refuse(name for name in BEYOND if kwargs.get(name) is not None)
    parts = zip(*(x.split(kwargs["sequence_lengths"], dim=2) for x in (query, key, value)))
    how: dict[str, Any] = {"is_causal": True, "scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    out = [F.scaled_dot_product_attention(q, k, v, **how) for q, k, v in parts]
    return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register("packed", attend_apart)

LAYOUTS = {"padded": Layout("sdpa", cut_padded), "packed": Layout("packed", cut_packed)}
