"""Training on shared prefixes: what sequences have in common is computed once.

Eight answers to one prompt repeat the prompt eight times; a conversation exported turn by turn repeats its beginning in
every row; a branch repeats all that came before it. A causal model computes the same hidden state for a token
whenever the tokens before it are the same, so all but the first of these computations are wasted. The rule here:
**every distinct prefix stands in the pass once**, and a forward and backward pass costs what the tree of the rows
costs, not what the rows cost.

**The trie needs no nodes.** Sort the rows by their tokens. Neighbours then share the longest prefixes, and what row i
adds to the tree is what it does not share with row i - 1. Written one after another these additions are the
tree's tokens in depth-first order: index in that order = time of entry. Two numbers a token are all that attention
needs to know of it:

    depth[k]   its position in its own sequences: what the rotary embedding is told
    tout[k]    the first index behind its subtree

and token q sees token k exactly when k is an ancestor of q or q itself,

    k <= q < tout[k]                                                    (tin[k] <= tin[q] < tout[k], with tin the index)

so a token sees what it would have seen alone and nothing else. Its hidden state, and the gradient that comes back to
it from all rows that pass through it, are those of the separate sequences. Nothing here recurses or links: a
conversation of 5,000 turns is a sort and a loop.

**Packing.** One pass holds at most max_tokens. Cut the sorted rows in runs: a cut before row i costs the
shared[i] tokens that must then be computed twice, and nothing else. The cheapest cuts are a shortest path (`cut`);
whole groups come out of it by themselves, because the cut between two groups is nearly free, and a group that does
not fit is cut where its members share least. Runs smaller than the budget are then put together as packed rows are
(layout.split_packs). Sorting comes first, so the order of the rows in the batch has no say in it.

**Not computing what nobody sees.** Most of the N x N mask is empty. On a CPU, queries go in blocks of 128, and each
block meets only the keys that one of its queries sees: the tokens k below its end with tout[k] beyond its start, picked
out one by one. On a GPU the same inequality gives FlexAttention's block mask: a key block is empty, full or mixed by
the largest and smallest tout in it, which takes (N / 128)^2 comparisons and no N x N tensor at any time. `mask` is the
dense definition; the tests hold both to it.

**The way into the model.** TREES is a layout (training/layout.py): its pieces are trees, each says for each token of
each row which hidden state predicts it, and the rest of the actor knows nothing of it. The model is unmodified. Its
attention function is ours, registered with transformers as "tree", and the tree reaches it as a keyword that
transformers hands through. A 4-D mask would need no function, but attention over it costs three to four times as much
(`bench/tree.py`).

What this does not promise: bits. Sums are taken in another order, so losses agree to 1e-6 and gradients to 1e-5, not
exactly. Nor a gain where little is shared: the metric `tree_token_ratio` (tokens of the trees / tokens of the rows)
says what there is to gain, and a group that is dealt over four minibatches shares a quarter as well in each. The last
layer is computed for every row's tokens, shared or not. A model that is more than causal attention is refused
(training/layout.py). A shared token that two rows train gets both gradients, as it does when they are trained apart.

Different from AReaL: it fills tries first-fit in the order of the input, so that interleaved groups share nothing
(four interleaved groups of 8 rows: 8,000 tokens, here 3,200); its compression recurses (a 1,200-turn conversation
ends in RecursionError); its block mask goes through a dense N x N one (256 MiB at 16k tokens).
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

BLOCK = 128  # queries that look for their keys together; also FlexAttention's block


@dataclass(frozen=True, eq=False)
class PackedTree:
    """Some rows of a batch as one sequence of N tokens, in depth-first order."""

    rows: list[int]  # which rows of the batch, in the order of their tokens
    paths: list[Tensor]  # per row, (length,) int64: where in the tree each of its tokens stands
    input_ids: Tensor  # (1, N) int64
    position_ids: Tensor  # (1, N) int64: depth
    tout: Tensor  # (N,) int64: the first index behind the token's subtree

    def mask(self) -> Tensor:
        """(N, N) bool, the definition: [q, k] says whether q sees k. N^2 bytes: for tests, and for other attentions."""
        k = torch.arange(len(self.tout), device=self.tout.device)
        q = k[:, None]
        # k <= q < tout[k]
        return (k <= q) & (q < self.tout)

    @cached_property
    def blocks(self) -> list[tuple[slice, Tensor, Tensor]]:
        """For each run of BLOCK queries: where it is, the keys that any of them sees (m,), and who sees whom (b, m)."""
        found = []
        for start in range(0, len(self.tout), BLOCK):
            stop = min(start + BLOCK, len(self.tout))
            keys = (self.tout[:stop] > start).nonzero()[:, 0]
            q = torch.arange(start, stop)[:, None]
            found.append((slice(start, stop), keys, (keys <= q) & (q < self.tout[keys])))
        return found


def sort_rows(sequences: list[np.ndarray]) -> tuple[list[int], np.ndarray]:
    """The rows in the order of their tokens, and (n,) how many tokens each shares with the one before it."""
    # Bytes compare as token ids do when the highest byte comes first.
    order = sorted(range(len(sequences)), key=lambda row: sequences[row].astype(">u4").tobytes())
    shared = np.zeros(len(order), dtype=np.int64)
    for i, (before, row) in enumerate(pairwise(order), 1):
        n = min(len(sequences[before]), len(sequences[row]))
        shared[i] = np.append(sequences[before][:n] != sequences[row][:n], True).argmax()
    return order, shared


def cut(lengths: np.ndarray, shared: np.ndarray, max_tokens: int) -> list[tuple[int, int, int]]:
    """Sorted rows in runs (first, behind the last, tokens), each within max_tokens, with the fewest tokens in all.

    Row i adds lengths[i] - shared[i] tokens to the run it is in; the first of a run adds all of its own.
    """
    # T(i, j) = shared[i] + sum of (lengths - shared) over rows i..j-1: tokens of a run
    # waste[j] = min over i with T(i, j) <= max_tokens of waste[i] + shared[i]
    added = np.concatenate([[0], np.cumsum(lengths - shared)])  # (n + 1,)
    waste, start = np.zeros(len(lengths) + 1), np.zeros(len(lengths) + 1, dtype=np.int64)
    for j in range(1, len(waste)):
        low = int(np.searchsorted(added, added[j] - max_tokens))
        fits = shared[low:j] + added[j] - added[low:j] <= max_tokens
        costs = np.where(fits, waste[low:j] + shared[low:j], np.inf)
        start[j] = low + int(costs.argmin())  # of equals the first: the longest run
        waste[j] = costs.min()
    runs, j = [], len(lengths)
    while j > 0:
        i = int(start[j])
        runs.append((i, j, int(shared[i] + added[j] - added[i])))
        j = i
    return runs[::-1]


def lay_out(rows: list[int], sequences: list[np.ndarray], shared: Sequence[int]) -> PackedTree:
    """The tree of sorted rows, given what each shares with the one before it; the first shares nothing."""
    size = sum(len(sequences[row]) for row in rows) - sum(shared)
    ids, depth, tout = (np.empty(size, dtype=np.int64) for _ in range(3))
    path, paths, end = np.empty(0, dtype=np.int64), [], 0
    for row, common in zip(rows, shared):
        tout[path[common:]] = end  # no later row comes through what the last one did not share
        fresh = np.arange(end, end + len(sequences[row]) - common)
        path = np.concatenate([path[:common], fresh])
        ids[fresh], depth[fresh] = sequences[row][common:], np.arange(common, len(path))
        paths.append(torch.from_numpy(path))
        end += len(fresh)
    tout[path] = end
    return PackedTree(rows, paths, torch.from_numpy(ids)[None], torch.from_numpy(depth)[None], torch.from_numpy(tout))


def build_trees(sequences: Sequence[Any], max_tokens: int) -> list[PackedTree]:
    """The rows of a batch (token ids: lists, arrays or tensors) in trees of at most `max_tokens` each.

    Every row is in one tree, whole; the order of the rows changes nothing but their numbers. Raises ValueError for a
    row that is empty or longer than the budget.
    """
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    for row, array in enumerate(arrays):
        if not 0 < len(array) <= max_tokens:
            raise ValueError(
                f"row {row} has {len(array)} tokens; a tree holds rows of 1 to actor.mb_tokens={max_tokens}. Raise "
                "actor.mb_tokens, or keep rows short: gconfig.max_new_tokens, fewer turns, rollout.openai.export_style"
            )
    order, shared = sort_rows(arrays)
    runs = cut(np.array([len(arrays[row]) for row in order]), shared, max_tokens)
    trees = []
    for members in split_packs(range(len(runs)), [size for _, _, size in runs], max_tokens):
        ranks = [i for first, last, _ in sorted(runs[m] for m in members) for i in range(first, last)]
        # What two sorted rows share is the least of what the neighbours between them share.
        common = [0] + [int(shared[a + 1 : b + 1].min()) for a, b in pairwise(ranks)]
        trees.append(lay_out([order[i] for i in ranks], arrays, common))
    return trees


def cut_trees(batch: Batch, rows: Sequence[int], mb_tokens: int) -> list[Piece]:
    """Rows as trees."""
    lengths, pieces = row_lengths(batch), []
    for tree in build_trees([batch["input_ids"][row, : lengths[row]] for row in rows], mb_tokens):
        inputs = {"input_ids": tree.input_ids, "position_ids": tree.position_ids, "tree": tree}
        row = torch.cat([torch.full((len(path) - 1,), rows[i]) for i, path in zip(tree.rows, tree.paths)])
        column = torch.cat([torch.arange(1, len(path)) for path in tree.paths])
        pieces.append(Piece(inputs, row, column, predicted_by=torch.cat([path[:-1] for path in tree.paths])))
    return pieces


@lru_cache(maxsize=1)  # all layers of a pass, and their recomputation, use the same
def block_mask(tree: PackedTree, device: torch.device) -> BlockMask:
    """FlexAttention's form of the mask: which blocks of keys are empty, full or mixed for a block of queries."""
    length = len(tree.tout)
    n = -(-length // BLOCK)
    tout = F.pad(tree.tout.to(device), (0, n * BLOCK - length))  # (n * BLOCK,); nobody sees the padding
    key = torch.arange(n, device=device)
    query = key[:, None]
    some = (key <= query) & (tout.view(n, BLOCK).amax(1) > query * BLOCK)  # (n, n)
    full = (key < query) & (tout.view(n, BLOCK).amin(1) >= (query + 1) * BLOCK)  # (n, n)

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Per block of queries how many blocks of keys, and their numbers, first."""
        order = chosen.int().argsort(dim=1, descending=True, stable=True)
        return chosen.sum(1).int()[None, None], order.int()[None, None]

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < tout[k])

    lists = (*listed(some & ~full), *listed(full))
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(length, length))


def tree_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """softmax(q k' * scaling) v over the ancestors of each token: transformers' attention function "tree".

    query (1, heads, N, d); key, value (1, groups, N, d). Returns (1, N, heads, d). Raises ValueError where the
    model did not hand the tree on, or wants an attention that is not this one.
    """
    tree: PackedTree | None = kwargs.get("tree")
    if tree is None:
        raise ValueError(f"no tree reached {type(module).__name__}: call the model with tree=PackedTree")
    refuse(name for name in BEYOND_CAUSAL if kwargs.get(name) is not None)
    if query.is_cuda:
        return flex_attention_forward(module, query, key, value, block_mask(tree, query.device), scaling=scaling)
    out = []
    for block, keys, visible in tree.blocks:
        k, v = key.index_select(2, keys), value.index_select(2, keys)
        out.append(F.scaled_dot_product_attention(query[:, :, block], k, v, visible, scale=scaling, enable_gqa=True))
    return torch.cat(out, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register("tree", tree_attention)

TREES = Layout("tree", cut_trees)
