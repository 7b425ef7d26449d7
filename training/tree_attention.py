"""Tree attention: a prefix that several rows share goes through the model once.

Rows often begin alike. Eight answers to one prompt repeat the prompt eight times, and a conversation exported turn by
turn repeats its beginning in every row. A causal model computes the same hidden state for a token whenever the tokens
before it are the same. So this module lays rows out as a tree of prefixes, in which each distinct prefix stands once.

**The tree needs no nodes.** Sort the rows by their tokens. Each row then adds to the tree the tokens that it does not
share with the row before it. Written one after another, these additions are the tree in depth-first order. The rows
[a b c d], [a b e] and [a f] become a tree of 6 tokens instead of 9:

    index            0   1   2   3   4   5
    token            a   b   c   d   e   f
    depth            0   1   2   3   2   1      the token's position in its row, for the rotary embedding
    subtree_end      6   5   4   4   5   6      the first index after all tokens that continue this prefix

Token q may attend to token k if k is q itself or one of its ancestors, and two numbers decide that:

    q sees k   if and only if   k <= q < subtree_end[k]

For example, e (q = 4) sees a (4 < 6), b (4 < 5) and itself, but not c and d (4 < 4 is false). So every token sees
what it sees in its own row. A token that several rows train gets the gradients of all these rows.

**Packing.** One tree holds at most `max_tokens` tokens, so the sorted rows are cut into runs that fit. A cut before
row i costs shared[i] tokens, which are then computed twice. `cheapest_runs` finds the cuts that cost least. Several
small runs then go into one tree by first-fit. The order of the rows in the batch has no influence.

**Attention.** The N x N mask is nearly empty, so it is never built. On a CPU 128 queries at a time attend to only
those keys that one of them sees. On a GPU FlexAttention skips whole blocks of 128 x 128. The tests compare both ways
with the dense mask. transformers calls `tree_attention` by the name "tree", so the model's own code is unchanged.

**Limits.** Sums are taken in another order, so losses agree to 1e-6 and gradients to 1e-5, not bit for bit. Rows that
share little gain little; the metric `tree_token_ratio` (tokens of the trees / tokens of the rows) shows the gain. Rows
of one group that are dealt to different mini-batches do not share a tree. The last layer still runs once per trained
token of each row. Models with more than causal attention are refused (`layout.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward

from training.layout import BEYOND_CAUSAL, Batch, Layout, Piece, refuse, row_lengths, split_packs

BLOCK = 128  # queries that are computed together, and the block size of FlexAttention


@dataclass(frozen=True, eq=False)
class PackedTree:
    """Some rows of a batch as one sequence of N tokens, in depth-first order of their tree."""

    rows: list[int]  # the numbers of the rows in the batch, in sorted order
    paths: list[Tensor]  # for each row the indices of its tokens in the tree, (length,) int64
    input_ids: Tensor  # (1, N) int64
    position_ids: Tensor  # (1, N) int64: the depth of each token
    subtree_end: Tensor  # (N,) int64: the first index after the token's subtree

    @cached_property
    def blocks(self) -> list[tuple[slice, Tensor, Tensor]]:
        """For each block of b queries: its slice, the m keys that some query sees (m,), and the mask (b, m) bool."""
        found = []
        for start in range(0, len(self.subtree_end), BLOCK):
            stop = min(start + BLOCK, len(self.subtree_end))
            # Some query in start..stop - 1 sees key k if k < stop and subtree_end[k] > start.
            keys = (self.subtree_end[:stop] > start).nonzero()[:, 0]  # (m,)
            q = torch.arange(start, stop)[:, None]  # (b, 1)
            # q sees k if and only if k <= q < subtree_end[k]
            found.append((slice(start, stop), keys, (keys <= q) & (q < self.subtree_end[keys])))
        return found


def sort_rows(sequences: list[np.ndarray]) -> tuple[list[int], np.ndarray]:
    """Sort rows by their tokens. Return the order of the n rows, and how many tokens each shares with the one before.

    The second result has shape (n,) and starts with 0.
    """
    # Big-endian bytes sort as the token ids do.
    order = sorted(range(len(sequences)), key=lambda row: sequences[row].astype(">u4").tobytes())
    shared = np.zeros(len(order), dtype=np.int64)  # (n,)
    for i, (before, row) in enumerate(pairwise(order), 1):
        n = min(len(sequences[before]), len(sequences[row]))
        differs = sequences[before][:n] != sequences[row][:n]  # (n,)
        shared[i] = np.append(differs, True).argmax()  # the first difference, or n if there is none
    return order, shared


def cheapest_runs(lengths: np.ndarray, shared: np.ndarray, max_tokens: int) -> list[tuple[int, int, int]]:
    """Cut n sorted rows into runs of at most max_tokens tree tokens, with the fewest tokens in all runs together.

    Returns (first row, row after the last, tokens) for each run. Row i adds lengths[i] - shared[i] tokens to its run;
    the first row of a run adds all of its tokens.
    """
    # tokens(i, j) = shared[i] + sum over rows i..j-1 of (lengths - shared)          tokens of the run i..j-1
    # waste[j]     = min over i with tokens(i, j) <= max_tokens of waste[i] + shared[i]
    added = np.concatenate([[0], np.cumsum(lengths - shared)])  # (n + 1,)
    waste = np.zeros(len(lengths) + 1)  # (n + 1,) the fewest tokens computed twice in rows 0..j-1
    start = np.zeros(len(lengths) + 1, dtype=np.int64)  # (n + 1,) the first row of the run that ends before row j
    for j in range(1, len(waste)):
        low = int(np.searchsorted(added, added[j] - max_tokens))  # a run that starts before `low` is too large
        fits = shared[low:j] + added[j] - added[low:j] <= max_tokens  # (j - low,)
        costs = np.where(fits, waste[low:j] + shared[low:j], np.inf)  # (j - low,)
        start[j] = low + int(costs.argmin())  # of equal costs the first, which is the longest run
        waste[j] = costs.min()
    # Read the cuts from the end to the beginning.
    runs, j = [], len(lengths)
    while j > 0:
        i = int(start[j])
        runs.append((i, j, int(shared[i] + added[j] - added[i])))
        j = i
    return runs[::-1]


def lay_out(rows: list[int], sequences: list[np.ndarray], shared: Sequence[int]) -> PackedTree:
    """Build the tree of sorted rows; shared[i] is what rows[i] shares with the row before it, and shared[0] is 0."""
    size = sum(len(sequences[row]) for row in rows) - sum(shared)
    ids, depth, subtree_end = (np.empty(size, dtype=np.int64) for _ in range(3))  # (N,), (N,), (N,)
    path, paths, end = np.empty(0, dtype=np.int64), [], 0  # the path of the last row; all paths; tokens so far
    for row, common in zip(rows, shared):
        subtree_end[path[common:]] = end  # sorted rows never come back to a prefix that this row leaves
        fresh = np.arange(end, end + len(sequences[row]) - common)  # indices of the tokens that this row adds
        path = np.concatenate([path[:common], fresh])
        ids[fresh], depth[fresh] = sequences[row][common:], np.arange(common, len(path))
        paths.append(torch.from_numpy(path))
        end += len(fresh)
    subtree_end[path] = end
    input_ids, position_ids = torch.from_numpy(ids)[None], torch.from_numpy(depth)[None]  # (1, N), (1, N)
    return PackedTree(rows, paths, input_ids, position_ids, torch.from_numpy(subtree_end))


def build_trees(sequences: Sequence[Any], max_tokens: int) -> list[PackedTree]:
    """Lay out rows of token ids (lists, arrays or tensors) as trees of at most `max_tokens` tokens each.

    Every row is in exactly one tree. Raises ValueError if a row is empty or has more than `max_tokens` tokens.
    """
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    for row, array in enumerate(arrays):
        if not 0 < len(array) <= max_tokens:
            hint = "raise it, or keep rows short: gconfig.max_new_tokens, fewer turns, rollout.openai.export_style"
            raise ValueError(f"row {row} has {len(array)} tokens, not 1 to actor.mb_tokens={max_tokens}: {hint}")
    order, shared = sort_rows(arrays)
    runs = cheapest_runs(np.array([len(arrays[row]) for row in order]), shared, max_tokens)
    trees = []
    for part in split_packs(range(len(runs)), [size for _, _, size in runs], max_tokens):
        places = [i for first, last, _ in sorted(runs[k] for k in part) for i in range(first, last)]
        # Two rows that are not neighbours in sorted order share the least of what the neighbours between them share.
        common = [0] + [int(shared[a + 1 : b + 1].min()) for a, b in pairwise(places)]
        trees.append(lay_out([order[i] for i in places], arrays, common))
    return trees


def cut_trees(batch: Batch, rows: Sequence[int], mb_tokens: int) -> list[Piece]:
    """Cut rows into pieces of which each is one tree; the hidden state of a token's parent predicts the token."""
    lengths, pieces = row_lengths(batch), []
    for tree in build_trees([batch["input_ids"][row, : lengths[row]] for row in rows], mb_tokens):
        inputs = {"input_ids": tree.input_ids, "position_ids": tree.position_ids, "tree": tree}
        row = torch.cat([torch.full((len(path) - 1,), rows[i]) for i, path in zip(tree.rows, tree.paths)])  # (n,)
        column = torch.cat([torch.arange(1, len(path)) for path in tree.paths])  # (n,)
        pieces.append(Piece(inputs, row, column, predicted_by=torch.cat([path[:-1] for path in tree.paths])))
    return pieces


@lru_cache(maxsize=1)  # all layers of a pass use the same mask, also when checkpointing computes them again
def block_mask(tree: PackedTree, device: torch.device) -> BlockMask:
    """Return FlexAttention's form of the mask: for each block of queries the empty, full and mixed blocks of keys."""
    length = len(tree.subtree_end)
    n = -(-length // BLOCK)  # blocks, rounded up
    # No query sees the padding at the end, because its subtree_end is 0.
    end = F.pad(tree.subtree_end.to(device), (0, n * BLOCK - length))  # (n * BLOCK,)
    key = torch.arange(n, device=device)  # (n,) blocks of keys
    query = key[:, None]  # (n, 1) blocks of queries
    # A key block has a key that some query sees if its largest subtree_end lies behind the query block's start, and
    # all its keys are seen by all queries if its smallest subtree_end lies behind the query block's end.
    some = (key <= query) & (end.view(n, BLOCK).amax(1) > query * BLOCK)  # (n, n)
    full = (key < query) & (end.view(n, BLOCK).amin(1) >= (query + 1) * BLOCK)  # (n, n)

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each block of queries the number of chosen key blocks, and all key blocks, chosen ones first."""
        order = chosen.int().argsort(dim=1, descending=True, stable=True)  # (n, n)
        return chosen.sum(1).int()[None, None], order.int()[None, None]  # (1, 1, n), (1, 1, n, n)

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < end[k])

    lists = (*listed(some & ~full), *listed(full))
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(length, length))


def tree_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute softmax(q k' * scaling) v over each token's ancestors and itself: the attention function "tree".

    query (1, heads, N, d); key and value (1, groups, N, d). Returns the output (1, N, heads, d), and None in place of
    the attention weights. Raises ValueError if no tree was passed or if the model asks for more than causal attention.
    """
    tree: PackedTree | None = kwargs.get("tree")
    if tree is None:
        raise ValueError(f"no tree reached {type(module).__name__}: call the model with tree=PackedTree")
    refuse(name for name in BEYOND_CAUSAL if kwargs.get(name) is not None)
    if query.is_cuda:
        return flex_attention_forward(module, query, key, value, block_mask(tree, query.device), scaling=scaling)
    out = []
    for block, keys, visible in tree.blocks:
        q = query[:, :, block]  # (1, heads, b, d)
        k, v = key.index_select(2, keys), value.index_select(2, keys)  # (1, groups, m, d)
        out.append(F.scaled_dot_product_attention(q, k, v, visible, scale=scaling, enable_gqa=True))
    return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None  # (1, N, heads, d)


AttentionInterface.register("tree", tree_attention)

TREES = Layout("tree", cut_trees)
