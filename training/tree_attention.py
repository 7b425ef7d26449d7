"""Tree attention: a prefix that several rows share goes through the model once.

Many rows begin with the same tokens. Eight answers to one prompt repeat the prompt eight times, and
a conversation exported turn by turn repeats its beginning in every row. In a causal model the
hidden state of a token depends only on the token and the tokens before it. Tree attention arranges
rows as a tree, in which each prefix occurs once.

**The tree is a list of tokens.** The rows are sorted by their tokens. Each row adds to the tree the
tokens that it does not share with the row before it. The list of all added tokens is the tree in
depth-first order. Example: the rows [a b c d], [a b e] and [a f] have 9 tokens, and their tree has
6:

    index            0   1   2   3   4   5
    token            a   b   c   d   e   f
    depth            0   1   2   3   2   1      the token's position in its row, for the rotary
    embedding
    subtree_end      6   5   4   4   5   6      the first index after all tokens that continue this
    prefix

Token q may attend to token k if k is q itself or an ancestor of q. Two comparisons decide whether q
may attend to k:

    q attends to k   if and only if   k <= q < subtree_end[k]

For example, token e (index 4) attends to a, b and e, because their subtree_end is above 4. Token e
does not attend to c and d, whose subtree_end is 4. Every token attends to itself and to the tokens
before it in its row, and to no other token. If several rows train the same token of the tree, the
gradients of the rows add up.

**Packing.** One tree holds at most `max_tokens` tokens, so the sorted rows are cut into runs:
consecutive rows that fit into one tree. Row i shares shared[i] tokens with the row before it. A cut
between row i and the row before it makes the model compute shared[i] tokens twice. The function
`cheapest_runs` cuts the rows so that the fewest tokens are computed twice. First-fit packing puts
several small runs into one tree.

**Attention.** The code never builds the attention mask of a tree as an N x N matrix, because nearly
all entries would be False. On a CPU, each block of 128 queries attends only to the keys that at
least one of these queries needs. On a GPU, FlexAttention skips each block of 128 queries and 128
keys in which no query attends to a key. The tests compare the implementations for CPUs and GPUs
with attention under a dense mask. In transformers, `tree_attention` has the name "tree". Tree
attention does not change the model's own code.

**Limits.** A forward pass over a tree adds floating-point numbers in a different order than passes
over separate rows. The losses of a tree and of separate rows agree to 1e-6 and the gradients to
1e-5, not bit for bit. The metric `tree_token_ratio` is the number of tokens in the trees divided by
the number of tokens in the rows. If the rows share few tokens, `tree_token_ratio` is near 1. Rows
of different mini-batches are never in the same tree. The last layer runs once for each trained
token of each row, even if rows share the token. Models that need more than causal attention are
refused (`layout.py`).
"""

from collections.abc import Iterator, Sequence
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

BLOCK = 128  # number of queries, or of keys, in one block of attention


@dataclass(frozen=True, eq=False)
class PackedTree:
    """A tree of rows, stored as one sequence of N tokens in depth-first order."""

    rows: list[
        int
    ]  # the tree's rows, sorted by their tokens, as indices of the argument of build_trees
    paths: list[
        Tensor
    ]  # for each row, an int64 tensor (length,): the indices of the row's tokens in the tree
    input_ids: Tensor  # (1, N) int64
    position_ids: Tensor  # (1, N) int64: the depth of each token
    subtree_end: Tensor  # (N,) int64: the first index after the token's subtree

    @cached_property
    def blocks(self) -> list[tuple[slice, Tensor, Tensor]]:
        """Return for each block of b queries the slice of the queries, the keys (m,) that at least
        one of the queries attends to, and the mask (b, m)."""
        found = []
        for start in range(0, len(self.subtree_end), BLOCK):
            stop = min(start + BLOCK, len(self.subtree_end))
            # At least one query in start..stop - 1 attends to key k if k < stop and subtree_end[k]
            # > start.
            keys = (self.subtree_end[:stop] > start).nonzero()[:, 0]  # (m,)
            q = torch.arange(start, stop)[:, None]  # (b, 1)

            # q attends to k if and only if k <= q < subtree_end[k]
            found.append((slice(start, stop), keys, (keys <= q) & (q < self.subtree_end[keys])))
        return found


def sort_rows(sequences: list[np.ndarray]) -> tuple[list[int], np.ndarray]:
    """Return the order that sorts n rows by their tokens, and how many tokens each sorted row
    shares with the row before it.

    The first result lists the rows as indices of `sequences`. The second result has shape (n,) and
    starts with 0.
    """
    # Sorting rows by their big-endian bytes gives the same order as sorting them by token ids.
    order = sorted(range(len(sequences)), key=lambda row: sequences[row].astype(">u4").tobytes())
    shared = np.zeros(len(order), dtype=np.int64)  # (n,)
    for i, (before, row) in enumerate(pairwise(order), 1):
        n = min(len(sequences[before]), len(sequences[row]))
        differs = sequences[before][:n] != sequences[row][:n]  # (n,)
        shared[i] = np.append(
            differs, True
        ).argmax()  # index of the first difference, or n if all n tokens are equal
    return order, shared


def cheapest_runs(
    lengths: np.ndarray, shared: np.ndarray, max_tokens: int
) -> list[tuple[int, int, int]]:
    """Cut n sorted rows into runs of at most max_tokens tokens, so that the runs have the fewest
    tokens in total.

    Returns (first row, last row + 1, number of tokens) for each run. A run contains all tokens of
    its first row, and lengths[i] - shared[i] tokens of each later row i.
    """
    # The run i..j-1 has tokens(i, j) = shared[i] + sum over rows i..j-1 of (lengths - shared)
    # tokens. Let waste[j] be the minimum number of tokens of rows 0..j-1 that are computed twice.
    # The recursion is waste[j] = min (waste[i] + shared[i]) over all i with tokens(i, j) <=
    # max_tokens.
    added = np.concatenate([[0], np.cumsum(lengths - shared)])  # (n + 1,)
    if added[-1] <= max_tokens:  # all rows fit into one run
        return [(0, len(lengths), int(added[-1]))]
    waste = np.zeros(len(lengths) + 1)  # (n + 1,)
    start = np.zeros(
        len(lengths) + 1, dtype=np.int64
    )  # (n + 1,) start[j]: first row of the run that ends before row j
    for j in range(1, len(waste)):
        low = int(
            np.searchsorted(added, added[j] - max_tokens)
        )  # if i < low, the run i..j-1 exceeds max_tokens
        fits = shared[low:j] + added[j] - added[low:j] <= max_tokens  # (j - low,)
        costs = np.where(fits, waste[low:j] + shared[low:j], np.inf)  # (j - low,)
        start[j] = low + int(
            costs.argmin()
        )  # of several equal costs, argmin returns the one with the longest run
        waste[j] = costs.min()
    # Collect the runs from the last to the first: the run that ends before row j begins with row
    # start[j].
    runs, j = [], len(lengths)
    while j > 0:
        i = int(start[j])
        runs.append((i, j, int(shared[i] + added[j] - added[i])))
        j = i
    return runs[::-1]


def lay_out(rows: list[int], sequences: list[np.ndarray], shared: Sequence[int]) -> PackedTree:
    """Build the tree of sorted rows. rows[i] shares shared[i] tokens with the row before it, and
    shared[0] is 0."""
    size = sum(len(sequences[row]) for row in rows) - sum(shared)
    ids, depth, subtree_end = (np.empty(size, dtype=np.int64) for _ in range(3))  # (N,), (N,), (N,)
    path, paths, end = (
        np.empty(0, dtype=np.int64),
        [],
        0,
    )  # path of the latest row, paths of all rows, number of tokens
    for row, common in zip(rows, shared):
        subtree_end[path[common:]] = (
            end  # no later row contains path[common:], because the rows are sorted
        )
        fresh = np.arange(
            end, end + len(sequences[row]) - common
        )  # indices of the tokens that this row adds
        path = np.concatenate([path[:common], fresh])
        ids[fresh], depth[fresh] = sequences[row][common:], np.arange(common, len(path))
        paths.append(torch.from_numpy(path))
        end += len(fresh)
    subtree_end[path] = end
    input_ids, position_ids = (
        torch.from_numpy(ids)[None],
        torch.from_numpy(depth)[None],
    )  # (1, N), (1, N)
    return PackedTree(rows, paths, input_ids, position_ids, torch.from_numpy(subtree_end))


def build_trees(sequences: Sequence[Any], max_tokens: int) -> list[PackedTree]:
    """Lay out rows of token ids (lists, arrays or tensors) as trees of at most `max_tokens` tokens
    each.

    Every row is in exactly one tree. Raises ValueError if a row is empty or has more than
    `max_tokens` tokens.
    """
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    for row, array in enumerate(arrays):
        if not 0 < len(array) <= max_tokens:
            hint = "raise it, or keep rows short: gconfig.max_new_tokens, fewer turns, rollout.openai.export_style"
            raise ValueError(
                f"row {row} has {len(array)} tokens, not 1 to actor.mb_tokens={max_tokens}: {hint}"
            )
    order, shared = sort_rows(arrays)
    runs = cheapest_runs(np.array([len(arrays[row]) for row in order]), shared, max_tokens)
    trees = []
    for part in split_packs(range(len(runs)), [size for _, _, size in runs], max_tokens):
        places = [i for first, last, _ in sorted(runs[k] for k in part) for i in range(first, last)]
        # For a < b, the sorted rows a and b share their first min(shared[a + 1], ..., shared[b])
        # tokens.
        common = [0] + [int(shared[a + 1 : b + 1].min()) for a, b in pairwise(places)]
        trees.append(lay_out([order[i] for i in places], arrays, common))
    return trees


def cut_trees(batch: Batch, rows: Sequence[int], mb_tokens: int) -> Iterator[Piece]:
    """Distribute rows over pieces, each of which is one tree. A token is predicted from the hidden
    state of the token before it in its row."""
    lengths, ids = row_lengths(batch), batch["input_ids"].numpy()  # (B,), (B, T)
    for tree in build_trees([ids[row, : lengths[row]] for row in rows], mb_tokens):
        inputs = {"input_ids": tree.input_ids, "position_ids": tree.position_ids, "tree": tree}
        counts = torch.tensor(
            [len(path) - 1 for path in tree.paths]
        )  # number of predicted tokens of each row
        row = torch.tensor([rows[i] for i in tree.rows]).repeat_interleave(counts)  # (n,)
        column = tree.position_ids[0, torch.cat([path[1:] for path in tree.paths])]  # (n,)
        yield Piece(inputs, row, column, predicted_by=torch.cat([path[:-1] for path in tree.paths]))


@lru_cache(maxsize=1)  # all layers of a pass use the same mask
def block_mask(tree: PackedTree, device: torch.device) -> BlockMask:
    """Return FlexAttention's mask: for each block of queries, the blocks of keys that it attends to
    fully or in part."""
    length = len(tree.subtree_end)
    n = -(-length // BLOCK)  # number of blocks, rounded up
    # No query attends to the padding at the end, because the padding's subtree_end is 0.
    end = F.pad(tree.subtree_end.to(device), (0, n * BLOCK - length))  # (n * BLOCK,)
    key = torch.arange(n, device=device)  # (n,) indices of the blocks of keys
    query = key[:, None]  # (n, 1) indices of the blocks of queries
    # `some` is True if at least one query of the query block attends to a key of the key block.
    # `full` is True if every query of the query block attends to every key of the key block.
    some = (key <= query) & (end.view(n, BLOCK).amax(1) > query * BLOCK)  # (n, n)
    full = (key < query) & (end.view(n, BLOCK).amin(1) >= (query + 1) * BLOCK)  # (n, n)

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return two results for each query block: how many key blocks are chosen, and the list of
        all key blocks, in which the chosen blocks come first."""
        order = chosen.int().argsort(dim=1, descending=True, stable=True)  # (n, n)
        return chosen.sum(1).int()[None, None], order.int()[None, None]  # (1, 1, n), (1, 1, n, n)

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < end[k])

    lists = (*listed(some & ~full), *listed(full))
    return BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(length, length)
    )


def tree_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute softmax(q k' * scaling) v, where each token attends only to its ancestors and itself.

    `query` is (1, heads, N, d), and `key` and `value` are (1, groups, N, d). Returns the output (1,
    N, heads, d), and None in place of the attention weights. Raises ValueError if `tree` is missing
    or if the model needs more than causal attention.
    """
    tree: PackedTree | None = kwargs.get("tree")
    if tree is None:
        raise ValueError(
            f"no tree reached {type(module).__name__}: call the model with tree=PackedTree"
        )
    refuse(name for name in BEYOND_CAUSAL if kwargs.get(name) is not None)
    if query.is_cuda:
        return flex_attention_forward(
            module, query, key, value, block_mask(tree, query.device), scaling=scaling
        )
    out = []
    for block, keys, visible in tree.blocks:
        q = query[:, :, block]  # (1, heads, b, d)
        k, v = key.index_select(2, keys), value.index_select(2, keys)  # (1, groups, m, d)
        out.append(F.scaled_dot_product_attention(q, k, v, visible, scale=scaling, enable_gqa=True))
    return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None  # (1, N, heads, d)


# torch.compile would recompile this function for every tree, so a compiled layer calls
# tree_attention outside of the compiled graph.
AttentionInterface.register("tree", torch.compiler.disable(tree_attention))

TREES = Layout("tree", cut_trees)
