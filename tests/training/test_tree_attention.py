"""A tree trains like its rows one by one, but computes fewer tokens."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import trainers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trainers import gradients, make_family, parameters, prepare

from training import tree_attention as module
from training.tree_attention import BLOCK, PackedTree, block_mask, tree_attention

make_actor = trainers.make_actor
Rows = list[list[int]]
SEEDS = st.integers(0, 10**6)


def make_rows(seed: int, n: int, longest: int = 30, vocabulary: int = 40) -> Rows:
    """Random rows. Most begin like an earlier one, some are copies, some have a single token."""
    rng = random.Random(seed)
    rows: Rows = []
    for _ in range(n):
        old = rng.choice(rows) if rows and rng.random() < 0.8 else []
        fresh = rng.choice([0, 1, 2, rng.randint(1, longest)])
        row = old[: rng.randint(0, len(old))] + [rng.randrange(vocabulary) for _ in range(fresh)]
        rows.append(row or [rng.randrange(vocabulary)])
    return rows


def make_conversations(style: str) -> Rows:
    """36 conversations on six prompts, with one to four short turns, exported as a row per turn
    (individual) or per conversation (concat)."""
    rng, rows = random.Random(0), []
    for game in range(36):
        row = [game % 6] * 12
        for _ in range(rng.randint(1, 4)):
            row = [*row, 30, rng.randrange(6), 31, 32, rng.randrange(10, 12), 33]
            if style == "individual":
                rows.append(row[:-3])
        rows += [row] * (style == "concat")
    return rows


def build_trees(rows: Rows, max_tokens: int) -> list[PackedTree]:
    padded = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=-1)
    return module.build_trees(padded, max_tokens)


def size(tree: PackedTree) -> int:
    """Return the tree's number of tokens."""
    return tree.inputs["input_ids"].numel()


def paths_of(tree: PackedTree, rows: Rows) -> list[tuple[int, Tensor]]:
    """Each row of a tree, and where its tokens are."""
    return [(row, path[: len(rows[row])]) for row, path in zip(tree.rows, tree.states, strict=True)]


def dense_mask(tree: PackedTree) -> Tensor:
    """mask[q, k] is True if q attends to k, (N, N)."""
    end = tree.inputs["subtree_end"]
    k = torch.arange(len(end))
    return (k <= k[:, None]) & (k[:, None] < end)


# ---- the trees


@given(SEEDS, st.integers(1, 12), st.integers(30, 300), st.randoms(use_true_random=False))
def test_every_prefix_of_a_tree_stands_in_it_once(seed, n, max_tokens, rng) -> None:
    """A token attends to its prefix and itself, and the order of the rows does not matter."""
    rows = [row[:max_tokens] for row in make_rows(seed, n)]
    trees = build_trees(rows, max_tokens)
    assert sorted(row for tree in trees for row in tree.rows) == list(range(n))
    for tree in trees:
        prefixes, sees = set(), torch.zeros_like(dense_mask(tree))
        for row, path in paths_of(tree, rows):
            assert tree.inputs["input_ids"][0, path].tolist() == rows[row]
            assert tree.inputs["position_ids"][0, path].tolist() == list(range(len(rows[row])))
            prefixes |= {tuple(rows[row][: i + 1]) for i in range(len(rows[row]))}
            for i, q in enumerate(path):
                sees[q, path[: i + 1]] = True
        assert size(tree) == len(prefixes) <= max_tokens
        assert torch.equal(dense_mask(tree), sees)
    again = build_trees(rng.sample(rows, n), max_tokens)
    contents = [[tree.inputs["input_ids"][0].tolist() for tree in made] for made in (trees, again)]
    assert contents[0] == contents[1]


@pytest.mark.parametrize("seed", range(5))
def test_interleaved_groups_find_each_other(seed: int) -> None:
    """In four groups of 8 rows, a group's rows share 200 of their 250 tokens. The trees have at
    most 3,200 tokens together. AReaL's have 8,000."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(1000) for _ in range(200)] for _ in range(4)]
    rows = [prompts[i % 4] + [rng.randrange(1000) for _ in range(50)] for i in range(32)]
    if seed:
        rng.shuffle(rows)
    trees = build_trees(rows, 512)
    assert max(size(tree) for tree in trees) <= 512
    assert sum(size(tree) for tree in trees) <= 3200


def test_a_conversation_of_1500_turns_with_a_branch_each() -> None:
    """Deep trees need no recursion."""
    trunk = [i % 1000 for i in range(1500)]
    [tree] = build_trees([[*trunk[: i + 1], 1000] for i in range(1500)], 3_000)
    assert size(tree) == 3_000


def test_small_things_share_a_tree() -> None:
    """Rows without a common prefix fill a tree up, too."""
    rows = [[i] * 30 for i in range(10)]
    assert sorted(size(tree) for tree in build_trees(rows, 100)) == [30, 90, 90, 90]


def test_a_row_that_is_too_long_is_a_tree_of_its_own() -> None:
    """As in the other layouts, actor.mb_tokens bounds only pieces of several rows."""
    assert [tree.rows for tree in build_trees([[1, 2], [3, 4], [*range(9)]], 4)] == [[2], [0, 1]]


# ---- the attention


@pytest.mark.parametrize("heads", [4, 6])
def test_output_and_gradients_are_those_of_the_dense_mask(heads: int) -> None:
    """Output and gradients are the same if several heads share keys, and in trees of many
    blocks."""
    [tree] = build_trees(make_rows(3, 10, longest=5 * BLOCK), 10**6)
    assert size(tree) > 4 * BLOCK
    N, g = size(tree), torch.Generator().manual_seed(0)
    made = [torch.randn(1, n, N, 16, generator=g, dtype=torch.float64) for n in (heads, 2, 2)]
    results = []
    for dense in (False, True):
        leaves: list[Any] = [x.clone().requires_grad_() for x in made]
        if dense:
            how: Any = {"attn_mask": dense_mask(tree), "scale": 0.3, "enable_gqa": True}
            out = F.scaled_dot_product_attention(*leaves, **how).transpose(1, 2)
        else:
            q, k, v = leaves
            ends = {"subtree_end": tree.inputs["subtree_end"]}
            out, _ = tree_attention(None, q, k, v, None, 0.3, **ends)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-9, rtol=1e-9)


def test_a_gpu_gets_the_same_mask() -> None:
    """The kernel of a GPU skips the blocks in which no query attends to a key."""
    [tree] = build_trees(make_rows(5, 9, longest=2 * BLOCK), 10**6)
    q, mask = torch.arange(size(tree)), block_mask(tree.inputs["subtree_end"])
    zero: Any = torch.zeros((), dtype=torch.int64)
    assert mask.mask_mod(zero, zero, q[:, None], q).equal(dense_mask(tree))
    b, _ = mask.BLOCK_SIZE
    parts = F.pad(dense_mask(tree), (0, -len(q) % b, 0, -len(q) % b))
    some = parts.unflatten(0, (-1, b)).unflatten(2, (-1, b)).any(3).any(1)
    assert mask.to_dense()[0, 0].bool().equal(some)


# ---- the actor


def make_batch(rows: Rows) -> dict[str, Tensor]:
    """These rows, of which all but the first three tokens are trained."""
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    return trainers.make_batch(tuple(map(len, rows))) | {"input_ids": ids.int()}


KINDS: dict[str, Rows] = {style: make_conversations(style) for style in ("individual", "concat")}
KINDS |= {"random": make_rows(0, 12), "of many blocks": make_rows(3, 10, longest=3 * BLOCK)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_trains_as_its_rows_do(make_actor: Any, tmp_path: Path, kind: str) -> None:
    """The losses agree to 1e-6, the gradients to 1e-5 of their norm, and the weights up to
    rounding, even with gradient checkpointing. The trees of conversations have less than 0.6 of the
    tokens of their rows."""
    rows = KINDS[kind]
    tokens = sum(map(size, build_trees(rows, 1024)))
    assert tokens < (0.6 if kind in ("individual", "concat") else 1) * sum(map(len, rows))
    path = make_family(tmp_path, "qwen3", max_position_embeddings=4096, head_dim=16)
    results: list[Any] = []
    tree = {"layout": "tree"}
    for changes in ({"layout": "padded"}, tree, tree | {"gradient_checkpointing": True}):
        actor = make_actor(path, mb_tokens=1024, entropy_coeff=0.1, **changes)
        stats = actor.ppo_update(batch := prepare(actor, make_batch(rows)))
        stats["logp"] = float(batch["prox_logp"].mean())
        results.append((stats, gradients(actor), parameters(actor)))
    (expected, exact, after), *others = results
    largest = max(g.norm() for g in exact.values())
    for stats, found, weights in others:
        assert stats["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert stats == pytest.approx(expected, rel=1e-4, abs=1e-6)
        for name, g in exact.items():
            assert (found[name] - g).norm() <= 1e-5 * max(g.norm(), 1e-2 * largest), name
            torch.testing.assert_close(weights[name], after[name], atol=1e-5, rtol=0)
