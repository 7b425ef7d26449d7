"""A tree trains as its rows do one by one, and computes fewer tokens."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import trainers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trainers import DEVICE, parameters, prepare
from transformers import Qwen3Config, Qwen3ForCausalLM

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


@pytest.fixture(scope="module")
def model() -> Any:
    """A random Qwen3 with two query heads for each key head."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    config = Qwen3Config(vocab_size=40, max_position_embeddings=4096, **shape, **heads)  # type: ignore[arg-type]
    made: Any = Qwen3ForCausalLM(config)
    return made.to(DEVICE)


def build_trees(rows: Rows, max_tokens: int) -> list[PackedTree]:
    padded = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=-1)
    return module.build_trees(padded, max_tokens)


def size(tree: PackedTree) -> int:
    """Its number of tokens."""
    return tree.inputs["input_ids"].numel()


def paths_of(tree: PackedTree, rows: Rows) -> list[tuple[int, Tensor]]:
    """Each row of a tree, and where its tokens are."""
    return [(row, path[: len(rows[row])]) for row, path in zip(tree.rows, tree.states, strict=True)]


def logp_of(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), -1).gather(1, ids[:, None])[:, 0]


def separate_logp(model: Any, rows: Rows) -> list[Tensor]:
    """log p of each row's tokens but the first, by a pass for each row."""
    found = []
    for row in rows:
        ids = torch.tensor(row, device=model.device)
        found.append(logp_of(model(input_ids=ids[None], use_cache=False).logits[0, :-1], ids[1:]))
    return found


def dense_mask(tree: PackedTree) -> Tensor:
    """mask[q, k] is True if q attends to k, (N, N)."""
    end = tree.inputs["subtree_end"]
    k = torch.arange(len(end))
    return (k <= k[:, None]) & (k[:, None] < end)


def test_a_gpu_gets_the_same_mask() -> None:
    [tree] = build_trees(make_rows(5, 9, longest=2 * BLOCK), 10**6)
    q = torch.arange(len(tree.subtree_end))
    mask = block_mask(tree.subtree_end)
    zero: Any = torch.zeros((), dtype=torch.int64)
    assert mask.mask_mod(zero, zero, q[:, None], q).equal(dense_mask(tree))
    parts = F.pad(dense_mask(tree), (0, -len(q) % BLOCK, 0, -len(q) % BLOCK))
    some = parts.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).any(3).any(1)
    assert mask.to_dense()[0, 0].bool().equal(some)


def tree_logp(model: Any, rows: Rows, max_tokens: int) -> list[Tensor]:
    """log p of each row's tokens but the first, by a pass for each tree."""
    found: list[Tensor] = [torch.empty(0)] * len(rows)
    model.set_attn_implementation("tree")
    for tree in build_trees(rows, max_tokens):
        names = ("input_ids", "position_ids", "subtree_end")
        inputs = {name: tree.inputs[name].to(model.device) for name in names}
        ids, logits = inputs["input_ids"], model(**inputs, use_cache=False).logits[0]
        for row, path in paths_of(tree, rows):
            found[row] = logp_of(logits[path[:-1]], ids[0, path[1:]])
    model.set_attn_implementation("sdpa")
    return found


def learn(model: Any, logp: list[Tensor]) -> tuple[float, dict[str, Tensor]]:
    """A loss with random advantages of all tokens, and its gradients."""
    flat = torch.cat(logp).cpu()
    weights = torch.randn(len(flat), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    loss = (flat * weights).sum() / max(len(flat), 1)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), {name: g.cpu().clone() for name, g in found.items()}


def assert_same_lesson(model: Any, ours: list[Tensor], truth: list[Tensor]) -> None:
    """The losses agree to 1e-6, and the gradients to 1e-5 of their norm."""
    (loss, gradients), (expected, exact) = learn(model, ours), learn(model, truth)
    assert loss == pytest.approx(expected, abs=1e-6)
    assert gradients.keys() == exact.keys()
    largest = max(g.norm() for g in exact.values())
    for name, g in exact.items():
        assert (gradients[name] - g).norm() <= 1e-5 * max(g.norm(), 1e-2 * largest), name


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
    """Four groups of 8 rows share 200 of 250 tokens: 3,200 tokens in trees, 8,000 in AReaL's."""
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
    """As in the other layouts, actor.mb_tokens bounds pieces of several rows."""
    assert [tree.rows for tree in build_trees([[1, 2], [3, 4], [*range(9)]], 4)] == [[2], [0, 1]]


# ---- the attention


@given(SEEDS, st.integers(1, 12), st.integers(30, 300))
@settings(max_examples=40)
def test_a_tree_trains_as_its_rows_do(model: Any, seed: int, n: int, max_tokens: int) -> None:
    """Loss and gradients are those of separate rows."""
    rows = [row[:max_tokens] for row in make_rows(seed, n)] + [[1, 2, 3]]
    assert_same_lesson(model, tree_logp(model, rows, max_tokens), separate_logp(model, rows))


@pytest.mark.parametrize("style", ["individual", "concat"])
def test_conversations_train_as_their_rows_do(model: Any, style: str) -> None:
    """They share prompts and turns, so trees have less than 0.6 of their tokens."""
    rows = make_conversations(style)
    trees = build_trees(rows, 1024)
    assert sum(size(tree) for tree in trees) < 0.6 * sum(map(len, rows))
    assert_same_lesson(model, tree_logp(model, rows, 1024), separate_logp(model, rows))


def test_long_rows_cross_many_blocks(model: Any) -> None:
    """A block of queries skips keys that none of them sees."""
    rows = make_rows(3, 10, longest=3 * BLOCK)
    [tree] = build_trees(rows, 8192)
    assert size(tree) > 4 * BLOCK
    assert_same_lesson(model, tree_logp(model, rows, 8192), separate_logp(model, rows))


@pytest.mark.parametrize("heads", [4, 6])
def test_output_and_gradients_are_those_of_the_dense_mask(heads: int) -> None:
    """Also where several heads share keys."""
    [tree] = build_trees(make_rows(5, 9, longest=2 * BLOCK), 10**6)
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
            out, _ = tree_attention(
                None, q, k, v, None, 0.3, subtree_end=tree.inputs["subtree_end"]
            )
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-9, rtol=1e-9)


# ---- the actor


def make_batch() -> dict[str, Tensor]:
    """Eight rows that share prefixes. The second half of each is trained."""
    rows = [row * 2 for row in make_rows(0, 8)]
    lengths = torch.tensor([len(row) for row in rows])
    real = torch.arange(int(lengths.max())) < lengths[:, None]  # (B, T)
    trained = real & (torch.arange(int(lengths.max())) >= lengths[:, None] // 2)
    g = torch.Generator().manual_seed(0)
    return {
        "input_ids": pad_sequence([torch.tensor(row) for row in rows], batch_first=True).int(),
        "attention_mask": real,
        "loss_mask": trained.int(),
        "turn_ids": trained.int() - 1,
        "turn_rewards": torch.randn(8, 1, generator=g) * trained,
        "temperatures": torch.where(trained, 0.7 + torch.rand(8, 1, generator=g), 1.0),
        "group_ids": torch.zeros(8, dtype=torch.int32),
    }


def test_the_actor_makes_the_same_step_with_trees(make_actor: Any, model: Any, tmp_path) -> None:
    """Metrics and weights agree up to rounding."""
    model.save_pretrained(tmp_path)
    results = []
    for changes in ({}, {"layout": "tree"}, {"layout": "tree", "gradient_checkpointing": True}):
        actor = make_actor(tmp_path, mb_tokens=128, entropy_coeff=0.1, **changes)
        batch = prepare(actor, make_batch())
        stats = actor.ppo_update(batch) | {"logp": float(batch["prox_logp"].sum())}
        results.append((stats, parameters(actor)))
    (expected, exact), *others = results
    for stats, weights in others:
        assert stats == pytest.approx(expected, rel=1e-4, abs=1e-6)
        for name, tensor in exact.items():
            torch.testing.assert_close(weights[name], tensor, atol=1e-5, rtol=0)
