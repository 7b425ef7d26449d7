"""Tree attention: a prefix that several rows share goes through the model once.

Eight rows with answers to one prompt contain the prompt eight times. If a conversation is exported
turn by turn, every row repeats the earlier turns. In a causal model a token's hidden state depends
only on that token and those before it, so one computation of a shared prefix is enough.

The rows are sorted by their tokens, so that rows with a common prefix are neighbours. Each row adds
to the tree only the tokens after the prefix that it shares with the row before. The added tokens,
row after row, are the tree in depth-first order. The rows [a b c d], [a b e] and [a f] have 9
tokens, but their tree has 6:

    index            0   1   2   3   4   5
    token            a   b   c   d   e   f
    depth            0   1   2   3   2   1      the token's position, for the rotary embedding
    subtree_end      6   5   4   4   5   6      the first index after the token's subtree

    q attends to k   if and only if   k <= q < subtree_end[k]

So e (index 4) attends to a, b and itself, but not to c and d, whose subtrees end at 4. If several
rows train a token of the tree, their gradients add up.

Attention is computed for blocks of 256 queries. A block reads only the keys that at least one of
its queries attends to. In bfloat16 on a GPU, FlexAttention computes several blocks in one kernel,
so a training step takes 2.59 s instead of 17.5 s (docs/gpu.md). In float32, trees and separate rows
give the same loss up to 1e-6, and the same gradients up to 1e-5.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward

from training.layout import Batch, Piece, make_piece, take

BLOCK = 256  # queries that attend together


class PackedTree(NamedTuple):
    """A tree of R rows, as one sequence of N tokens, depth first."""

    rows: list[int]  # sorted by their tokens
    states: Tensor  # (R, T) int64, each token's index in the tree
    # For the model: input_ids and position_ids (the depths), (1, N) int64; subtree_end (N,) int64.
    # For packed rows: bounds (R + 1,) int32, and longest, the longest row's length. Row r has the
    # tokens bounds[r] to bounds[r + 1] - 1.
    inputs: dict[str, Any]


def build_trees(ids: Tensor, max_tokens: int, shares: bool = True) -> list[PackedTree]:
    """Lay out rows as trees of at most `max_tokens` tokens. A longer row is a tree of its own.
    `ids` (rows, T) has -1 after a row's end."""
    order = sorted(range(len(ids)), key=ids.tolist().__getitem__)  # neighbours share most
    ids = ids[order].long()
    same = (ids[1:] == ids[:-1]) & (ids[1:] >= 0) & shares  # (rows - 1, T)
    shared = F.pad(same.int().cumprod(1).sum(1), (1, 0))  # (rows,) shared with the row before

    lengths = (ids >= 0).sum(1).tolist()
    parts: list[list[int]] = []
    room = -1  # tokens that still fit into the last tree
    for row, prefix in enumerate(shared.tolist()):
        if lengths[row] - prefix > room:
            prefix, room = 0, max_tokens
            parts.append([])
        shared[row] = prefix
        room -= lengths[row] - prefix
        parts[-1].append(row)
    return [lay_out([order[row] for row in p], ids[p], shared[p]) for p in parts]


def lay_out(rows: list[int], ids: Tensor, shared: Tensor) -> PackedTree:
    """Build the tree of the sorted `rows` with tokens `ids` (R, T). `shared` (R,) is the number of
    tokens that each row shares with the row before."""
    column = torch.arange(ids.shape[1])
    is_new = (ids >= 0) & (column >= shared[:, None])  # (R, T)
    row, depth = is_new.nonzero(as_tuple=True)  # (N,), (N,)
    # Where a row adds no token, it has the token that an earlier row added last in that column.
    index = is_new.flatten().cumsum(0).view(is_new.shape) - 1  # (R, T)
    states = index.where(is_new, 0).cummax(0).values  # (R, T)
    # A token's subtree ends where the first later row without this token begins, or at the end.
    bounds = F.pad(is_new.sum(1).cumsum(0), (1, 0))  # (R + 1,)
    later = torch.arange(len(bounds)) > row[:, None]  # (N, R + 1)
    ends = later & (F.pad(shared, (0, 1)) <= depth[:, None])  # (N, R + 1)
    inputs = {
        "input_ids": ids[is_new][None],
        "position_ids": depth[None],
        "subtree_end": bounds[ends.int().argmax(1)],
        "bounds": bounds.int(),
        "longest": int(bounds.diff().max()),
    }
    return PackedTree(rows, states, inputs)


def cut_trees(batch: Batch, mb_tokens: int, shares: bool) -> Iterator[Piece]:
    """Cut a batch into pieces: trees, or packed rows if shares=False."""
    padding = ~batch["attention_mask"].bool()
    for tree in build_trees(batch["input_ids"].masked_fill(padding, -1), mb_tokens, shares):
        yield make_piece(take(batch, tree.rows), tree.states, tree.inputs)


@lru_cache(maxsize=1)  # all layers of a pass share one tree
def block_mask(subtree_end: Tensor) -> BlockMask:
    """The (128, 128) blocks of queries and keys in which some query attends to a key."""

    def attends(row: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < subtree_end[k])

    n = len(subtree_end)
    return create_block_mask(attends, None, None, n, n, subtree_end.device)


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float,
    *,
    subtree_end: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """softmax(q k' * scaling) v, where each token attends to its ancestors and itself. `query` has
    the shape (1, heads, N, d), `key` and `value` (1, key_heads, N, d), and the output (1, N, heads,
    d)."""
    if query.is_cuda and query.dtype == torch.bfloat16 and len(subtree_end) > BLOCK:
        tree = block_mask(subtree_end)
        return flex_attention_forward(module, query, key, value, tree, scaling=scaling)[0], None
    index = torch.arange(len(subtree_end), device=query.device)
    out = []
    for q in index.split(BLOCK):  # (b,)
        keys = index[: q[-1] + 1][subtree_end[: q[-1] + 1] > q[0]]  # (m,) that a query attends to
        visible = (keys <= q[:, None]) & (q[:, None] < subtree_end[keys])  # (b, m)
        k, v = key[:, :, keys], value[:, :, keys]
        options: Any = {"attn_mask": visible, "scale": scaling, "enable_gqa": True}
        out.append(F.scaled_dot_product_attention(query[:, :, q], k, v, **options))
    return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register("tree", tree_attention)
