"""Tree attention: a prefix that several rows share goes through the model once.

Eight answers to one prompt repeat it eight times, and a conversation exported turn by turn repeats
its beginning in every row. In a causal model the hidden state of a token depends on the tokens
before it alone, so a prefix needs to be computed only once.

The rows are sorted by their tokens. Each adds what it does not share with the row before it, and
the list of what was added is the tree, depth first. The rows [a b c d], [a b e] and [a f] have 9
tokens, their tree 6:

    index            0   1   2   3   4   5
    token            a   b   c   d   e   f
    depth            0   1   2   3   2   1      the token's position, for the rotary embedding
    subtree_end      6   5   4   4   5   6      the first index after its continuations

    q attends to k   if and only if   k <= q < subtree_end[k]

So e (4) attends to a, b and itself, but not to c and d, whose subtrees end at 4. Where several rows
train a token of the tree, their gradients add up.

On a CPU each block of 128 queries takes only the keys that one of them needs; on a GPU
FlexAttention skips blocks in which nothing is seen. Loss and gradients are those of
separate rows to 1e-6 and 1e-5, not bit for bit. The metric tree_token_ratio is the tree's tokens
divided by the rows'; rows of different mini-batches never share a tree.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward

from training.layout import BEYOND_CAUSAL, Batch, Piece, refuse, row_lengths

BLOCK = 128  # queries, or keys, in a block of attention


@dataclass(frozen=True, eq=False)
class PackedTree:
    """A tree of rows, as one sequence of N tokens, depth first."""

    rows: list[int]  # sorted by their tokens
    paths: list[Tensor]  # for each row, the indices of its tokens, (length,) int64
    input_ids: Tensor  # (1, N) int64
    position_ids: Tensor  # (1, N) int64, the depths
    subtree_end: Tensor  # (N,) int64

    @cached_property
    def blocks(self) -> list[tuple[slice, Tensor, Tensor]]:
        """For each block of b queries: its slice, the keys (m,) that one of them attends to, and
        the mask (b, m)."""
        found, n = [], len(self.subtree_end)
        for start in range(0, n, BLOCK):
            stop = min(start + BLOCK, n)
            keys = (self.subtree_end[:stop] > start).nonzero()[:, 0]  # (m,)
            q = torch.arange(start, stop)[:, None]  # (b, 1)
            # k <= q < subtree_end[k]
            found.append((slice(start, stop), keys, (keys <= q) & (q < self.subtree_end[keys])))
        return found


def count_shared(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two rows share at their beginning."""
    n = min(len(one), len(other))
    return int(np.append(one[:n] != other[:n], True).argmax())  # the first difference, or n


def lay_out(rows: list[int], arrays: list[np.ndarray]) -> PackedTree:
    """Build the tree of sorted rows."""
    size = 0
    before = path = np.empty(0, dtype=np.int64)
    paths, ids, depths, ended = [], [], [], []
    for row in rows:
        common = count_shared(before, arrays[row])
        before = arrays[row]
        ended.append((path[common:], size))  # no later row has these tokens
        fresh = np.arange(common, len(before))  # depths of what the row adds
        path = np.concatenate([path[:common], size + fresh - common])
        paths.append(torch.from_numpy(path))
        ids.append(before[common:])
        depths.append(fresh)
        size += len(fresh)
    subtree_end = np.full(size, size)
    for tokens, end in ended:
        subtree_end[tokens] = end
    input_ids, position_ids = (torch.from_numpy(np.concatenate(x))[None] for x in (ids, depths))
    return PackedTree(rows, paths, input_ids, position_ids, torch.from_numpy(subtree_end))


def build_trees(sequences: Sequence[Any], max_tokens: int) -> list[PackedTree]:
    """Lay out rows of token ids as trees of at most `max_tokens` tokens; each row is in one tree.
    Raises ValueError for a row that is empty or too long."""
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    for row, array in enumerate(arrays):
        if not 0 < len(array) <= max_tokens:
            raise ValueError(
                f"row {row} has {len(array)} tokens, not 1 to actor.mb_tokens={max_tokens}:"
                " raise it, or keep rows short (gconfig.max_new_tokens, fewer turns)"
            )
    # Big-endian bytes sort like the numbers, so rows with a common beginning are neighbours.
    order = sorted(range(len(arrays)), key=lambda row: arrays[row].astype(">u4").tobytes())
    parts: list[list[int]] = []
    room = 0  # what the last tree still takes
    before = np.empty(0, dtype=np.int64)  # its last row
    for row in order:
        added = len(arrays[row]) - count_shared(before, arrays[row])
        if not parts or added > room:
            parts.append([])
            room, added = max_tokens, len(arrays[row])
        parts[-1].append(row)
        room, before = room - added, arrays[row]
    return [lay_out(part, arrays) for part in parts]


def cut_trees(batch: Batch, rows: Sequence[int], mb_tokens: int) -> Iterator[Piece]:
    lengths, ids = row_lengths(batch), batch["input_ids"].numpy()  # (B,), (B, T)
    for tree in build_trees([ids[row, : lengths[row]] for row in rows], mb_tokens):
        inputs = {"input_ids": tree.input_ids, "position_ids": tree.position_ids, "tree": tree}
        counts = torch.tensor([len(path) - 1 for path in tree.paths])
        row = torch.tensor([rows[i] for i in tree.rows]).repeat_interleave(counts)  # (n,)
        column = tree.position_ids[0, torch.cat([path[1:] for path in tree.paths])]  # (n,)
        yield Piece(inputs, row, column, predicted_by=torch.cat([path[:-1] for path in tree.paths]))


@lru_cache(maxsize=1)  # all layers of a pass use the same
def block_mask(tree: PackedTree, device: torch.device) -> BlockMask:
    """FlexAttention's mask: which blocks of queries see which blocks of keys, wholly or in part."""
    n = len(tree.subtree_end)
    end = F.pad(tree.subtree_end.to(device), (0, -n % BLOCK))  # no query sees the padding

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < end[k])

    return create_block_mask(visible, None, None, n, n, device=str(device), BLOCK_SIZE=BLOCK)


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float | None = None,
    *,
    tree: PackedTree,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """softmax(q k' * scaling) v, where each token attends to its ancestors and itself. `query` is
    (1, heads, N, d), `key` and `value` (1, groups, N, d), the output (1, N, heads, d)."""
    refuse(name for name in BEYOND_CAUSAL if kwargs.get(name) is not None)
    if query.is_cuda:
        blocks = block_mask(tree, query.device)
        return flex_attention_forward(module, query, key, value, blocks, scaling=scaling)
    out = []
    for block, keys, visible in tree.blocks:
        q = query[:, :, block]  # (1, heads, b, d)
        k, v = key.index_select(2, keys), value.index_select(2, keys)  # (1, groups, m, d)
        out.append(F.scaled_dot_product_attention(q, k, v, visible, scale=scaling, enable_gqa=True))
    return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None


# A compiled layer would compile this again for every tree.
AttentionInterface.register("tree", torch.compiler.disable(tree_attention))
