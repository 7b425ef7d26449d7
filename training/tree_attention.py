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
FlexAttention skips blocks in which nothing is seen. Loss and gradients are those of separate rows
to 1e-6 and 1e-5, not bit for bit. Rows of different mini-batches never share a tree.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward

from training.layout import Batch, Piece, fill_pieces, make_piece, row_lengths

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


def count_shared(one: list[int], other: list[int]) -> int:
    """How many tokens two rows share at their beginning."""
    for i, (a, b) in enumerate(zip(one, other)):
        if a != b:
            return i
    return min(len(one), len(other))


def build_trees(rows: Sequence[list[int]], max_tokens: int) -> list[PackedTree]:
    """Lay out rows of token ids as trees of at most `max_tokens` tokens; each row is in one tree.
    Raises ValueError for a row that is too long."""
    if (longest := max(map(len, rows))) > max_tokens:
        raise ValueError(
            f"a row has {longest} tokens, and actor.mb_tokens is {max_tokens}: raise it, or keep"
            " rows short (gconfig.max_new_tokens, fewer turns)"
        )

    def added(row: int, part: list[int]) -> int:
        return len(rows[row]) - (count_shared(rows[part[-1]], rows[row]) if part else 0)

    order = sorted(range(len(rows)), key=rows.__getitem__)  # neighbours share most
    return [lay_out(part, rows) for part in fill_pieces(order, added, max_tokens)]


def lay_out(part: list[int], rows: Sequence[list[int]]) -> PackedTree:
    """Build the tree of the rows `part`, which are sorted."""
    ids: list[int] = []
    depths: list[int] = []
    paths, ended = [], []
    before, path = list[int](), torch.empty(0, dtype=torch.int64)
    for row in part:
        common, start = count_shared(before, rows[row]), len(ids)
        before = rows[row]
        ids += before[common:]
        depths += range(common, len(before))
        ended.append((path[common:], start))  # no later row has these tokens
        path = torch.cat([path[:common], torch.arange(start, len(ids))])
        paths.append(path)
    subtree_end = torch.full((len(ids),), len(ids))
    for tokens, end in ended:
        subtree_end[tokens] = end
    return PackedTree(part, paths, torch.tensor([ids]), torch.tensor([depths]), subtree_end)


def cut_trees(batch: Batch, rows: Sequence[int], mb_tokens: int) -> Iterator[Piece]:
    lengths = row_lengths(batch)
    tokens = [batch["input_ids"][row, : lengths[row]].tolist() for row in rows]
    for tree in build_trees(tokens, mb_tokens):
        inputs = {"input_ids": tree.input_ids, "position_ids": tree.position_ids, "tree": tree}
        states = pad_sequence(tree.paths, batch_first=True)  # (R, t)
        yield make_piece(batch, [rows[i] for i in tree.rows], states, inputs)


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
    if query.is_cuda:
        blocks = block_mask(tree, query.device)
        return flex_attention_forward(module, query, key, value, blocks, scaling=scaling)
    out = []
    for block, keys, visible in tree.blocks:
        q = query[:, :, block]  # (1, heads, b, d)
        k, v = key.index_select(2, keys), value.index_select(2, keys)  # (1, groups, m, d)
        out.append(F.scaled_dot_product_attention(q, k, v, visible, scale=scaling, enable_gqa=True))
    return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register("tree", tree_attention)
