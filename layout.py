"""How a piece of a batch is laid before the model: as padded rows, as one packed row, or by a layout of your own.

The rule: whatever the layout, every token has the log-probability that it has in its own sequence alone. A layout is a
matter of time and memory, never of learning, and one can be exchanged for another in the middle of a run.

A layout answers two questions. `cut`: which rows share a forward pass? `lay`: what does the model get, and which of
its hidden states predicts each token that is wanted? The actor knows nothing else about it: it runs the model, picks
those hidden states and turns them into log-probabilities (logprobs.py). A tree of shared prefixes is a third layout
and needs no other word from the actor.

    Padded    rows of similar length, one under another, filled up on the right. A causal model sees no padding behind a
              token, so there is no mask at all. Simple, and the fastest for rows that are alike.
    Packed    rows end to end in one long row. Nothing is computed for padding. position_ids start again at 0 with each
              sequence, and each attends to itself alone: its part of q, k and v goes through attention by itself. There
              is no mask that could be forgotten, and no (T, T) matrix.

Why not a mask, or position_ids alone, for packed rows. Models read position_ids as a hint that rows are packed, some
kernels do and some do not, and with a cache none does: then neighbours leak into each other and nothing says so
(AReaL #1442). A dense mask is right, and costs T * T for work that is nearly all masked.

What a layout does not decide: which rows make an optimizer step (actor.split_minibatches), what the loss divides by.

Different from AReaL: there packed rows are the only kind, and depend on the attention kernel for being kept apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

Batch = dict[str, Tensor]
Piece = Any  # what shares a forward pass, as the layout's `cut` made it; only the layout looks inside


@dataclass(frozen=True)
class Laid:
    """A piece before the model. N tokens are wanted."""

    inputs: dict[
        str, Any
    ]  # keyword arguments of the model: input_ids (b, t) int64, and what the layout's attention reads
    predicts: Tensor  # (N,) which of the b * t hidden states, counted row by row, predicts the token
    at: tuple[Tensor, Tensor]  # (N,), (N,) the token's row and column in the batch


class Layout(Protocol):
    """`attention` names the attention function (transformers' AttentionInterface) that the model is loaded with."""

    attention: str

    def cut(self, batch: Batch, rows: Sequence[int], mb_tokens: int) -> list[Piece]:
        """The pieces in which `rows` go through the model, each of at most `mb_tokens` where a row allows it."""
        ...

    def lay(self, batch: Batch, piece: Piece, which: str) -> Laid:
        """The piece's forward pass. Wanted are its tokens where batch[which] is set; never a row's first token."""
        ...


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


class Padded:
    """Rows one under another, cut to the longest of them. A piece is a list of rows."""

    attention = "sdpa"

    def cut(self, batch: Batch, rows: Sequence[int], mb_tokens: int) -> list[Piece]:
        return split_microbatches(rows, row_lengths(batch), mb_tokens)

    def lay(self, batch: Batch, piece: Piece, which: str) -> Laid:
        longest = int(batch["attention_mask"][piece].sum(1).max())
        row, before = (batch[which][piece, 1:longest] > 0).nonzero(as_tuple=True)  # (N,), (N,)
        ids = batch["input_ids"][piece, :longest].long()  # (b, t)
        return Laid({"input_ids": ids}, row * longest + before, (torch.tensor(piece)[row], before + 1))


class Packed:
    """Rows end to end, each attending to itself. A piece is a list of rows."""

    attention = "packed"

    def cut(self, batch: Batch, rows: Sequence[int], mb_tokens: int) -> list[Piece]:
        return split_packs(rows, row_lengths(batch), mb_tokens)

    def lay(self, batch: Batch, piece: Piece, which: str) -> Laid:
        real = batch["attention_mask"][piece].bool()  # (b, T)
        row, column = real.nonzero(as_tuple=True)  # (t,), (t,): the tokens, row after row
        wanted = ((batch[which][piece][real] > 0) & (column > 0)).nonzero()[:, 0]  # (N,)
        inputs = {"input_ids": batch["input_ids"][piece][real].long()[None], "position_ids": column[None]}  # (1, t)
        at = (torch.tensor(piece)[row[wanted]], column[wanted])
        return Laid(inputs | {"sequence_lengths": real.sum(1).tolist()}, wanted - 1, at)


def attend_apart(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **kwargs: Any):
    """Causal attention within each sequence of a packed row.

    query (1, heads, t, d); key, value (1, groups, t, d); sequence_lengths add up to t. Returns (1, t, heads, d).
    """
    parts = zip(*(x.split(kwargs["sequence_lengths"], dim=2) for x in (query, key, value)))
    how: dict[str, Any] = {"is_causal": True, "scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    out = [F.scaled_dot_product_attention(q, k, v, **how) for q, k, v in parts]
    return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register("packed", attend_apart)

LAYOUTS: dict[str, type[Layout]] = {"padded": Padded, "packed": Packed}
