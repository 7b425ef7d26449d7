"""Training on a tree gives the same loss and gradients as training on its rows one by one, and computes fewer
tokens."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, free_port
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedEngine
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask, flex_attention
from torch.nn.utils.rnn import pad_sequence
from trainers import DEVICE
from transformers import Qwen3Config, Qwen3ForCausalLM

from calls.client import OpenAIProxyClient, sdk_http
from inference.io_struct import GenerationHyperparameters
from proxy import create_app
from rollout.trajectory import complete, concat_padded_tensors
from tasks import base_model, guess, maze
from training.actor import FSDPPPOActor
from training.config import OptimizerConfig, PPOActorConfig
from training.tree_attention import (
    BLOCK,
    PackedTree,
    block_mask,
    build_trees,
    cheapest_runs,
    tree_attention,
)
from workflow import RLVRWorkflow, to_tensors

Rows = list[list[int]]


def make_rows(seed: int, n: int, longest: int = 30, vocabulary: int = 40) -> Rows:
    """Make n random rows. Most rows begin with a prefix of an earlier row, some are copies, and some have a single
    token."""
    rng = random.Random(seed)
    rows: Rows = []
    for _ in range(n):
        old = rng.choice(rows) if rows and rng.random() < 0.8 else []
        fresh = rng.choice([0, 1, 2, rng.randint(1, longest)])
        row = old[: rng.randint(0, len(old))] + [rng.randrange(vocabulary) for _ in range(fresh)]
        rows.append(row or [rng.randrange(vocabulary)])
    return rows


TREES = given(st.integers(0, 10**6), st.integers(1, 12), st.integers(30, 300))


@pytest.fixture(scope="module")
def model() -> Any:
    """Return a random Qwen3 with two layers and two query heads for each key head, on the GPU if there is one."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    config = Qwen3Config(vocab_size=40, max_position_embeddings=4096, **shape, **heads)  # type: ignore[arg-type]
    made: Any = Qwen3ForCausalLM(config)
    return made.to(DEVICE)


def logp_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Return log p of each id, (n,), from logits (n, V) and ids (n,)."""
    return torch.log_softmax(logits.float(), -1).gather(1, ids[:, None])[:, 0]


def separate_logp(model: Any, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return log p of each row's tokens except the first, (length - 1,), with one forward pass per row."""
    found = []
    for row in rows:
        ids = torch.tensor(row, device=model.device)
        found.append(logp_of(model(input_ids=ids[None], use_cache=False).logits[0, :-1], ids[1:]))
    return found


def dense_mask(tree: PackedTree) -> Tensor:
    """Return the mask (N, N) bool of a tree: mask[q, k] is True if token q attends to token k."""
    k = torch.arange(len(tree.subtree_end))  # (N,)
    q = k[:, None]  # (N, 1)
    # k <= q < subtree_end[k]
    return (k <= q) & (q < tree.subtree_end)


def tree_logp(
    model: Any, rows: Sequence[Sequence[int]], max_tokens: int, dense: bool = False
) -> list[Tensor]:
    """Return log p of each row's tokens except the first, with one forward pass per tree. With `dense` the forward
    pass uses the N x N mask."""
    found: list[Tensor] = [torch.empty(0)] * len(rows)
    for tree in build_trees(rows, max_tokens):
        mask = dense_mask(tree)[None, None].to(model.device)
        how: dict[str, Any] = {"attention_mask": mask} if dense else {"tree": tree}
        input_ids, position_ids = (
            tree.input_ids.to(model.device),
            tree.position_ids.to(model.device),
        )
        model.set_attn_implementation("sdpa" if dense else "tree")
        logits = model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **how
        ).logits[0]
        model.set_attn_implementation("sdpa")
        for row, path in zip(tree.rows, tree.paths, strict=True):
            found[row] = logp_of(logits[path[:-1]], input_ids[0, path[1:]])
    return found


def learn(model: Any, logp: list[Tensor], seed: int = 0) -> tuple[float, dict[str, Tensor]]:
    """Return a loss with a random advantage for each token of each row, and the gradients of the loss."""
    flat = torch.cat(logp).cpu()
    weights = torch.randn(len(flat), generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    loss = (flat * weights).sum() / max(len(flat), 1)
    loss.backward()
    return loss.item(), {
        name: p.grad.cpu().clone() for name, p in model.named_parameters() if p.grad is not None
    }


def assert_same_lesson(
    ours: tuple[float, dict[str, Tensor]], truth: tuple[float, dict[str, Tensor]]
) -> None:
    """Assert that two losses agree to 1e-6, and their gradients to 1e-5 of the gradients' norm."""
    assert ours[0] == pytest.approx(truth[0], abs=1e-6)
    assert ours[1].keys() == truth[1].keys()
    largest = max(g.norm() for g in truth[1].values())
    for name, gradient in truth[1].items():
        assert (ours[1][name] - gradient).norm() <= 1e-5 * max(gradient.norm(), 1e-2 * largest), (
            name
        )


# The trees


@TREES
@settings(max_examples=150, deadline=None)
def test_every_prefix_of_a_tree_stands_in_it_once(seed: int, n: int, max_tokens: int) -> None:
    """A tree contains each prefix once, a token attends only to its own prefix and itself, and no tree exceeds its
    token budget."""
    rows = make_rows(seed, n)
    rows = [row[:max_tokens] for row in rows]
    trees = build_trees(rows, max_tokens)
    assert sorted(row for tree in trees for row in tree.rows) == list(range(n))
    for tree in trees:
        prefixes, sees = set(), torch.zeros_like(dense_mask(tree))
        for row, path in zip(tree.rows, tree.paths, strict=True):
            assert tree.input_ids[0, path].tolist() == rows[row]
            assert tree.position_ids[0, path].tolist() == list(range(len(rows[row])))
            prefixes |= {tuple(rows[row][: i + 1]) for i in range(len(rows[row]))}
            for i, q in enumerate(path):
                sees[q, path[: i + 1]] = True
        assert len(tree.subtree_end) == len(prefixes) <= max_tokens
        assert torch.equal(dense_mask(tree), sees)


@given(
    st.integers(0, 10**6),
    st.integers(1, 12),
    st.integers(30, 90),
    st.randoms(use_true_random=False),
)
@settings(max_examples=100, deadline=None)
def test_the_order_of_the_rows_has_no_say(
    seed: int, n: int, max_tokens: int, rng: random.Random
) -> None:
    """The order of the rows in a batch does not change the tokens of the trees."""
    rows = [row[:max_tokens] for row in make_rows(seed, n)]
    shuffled = rng.sample(range(n), n)

    def contents(trees: list[PackedTree]) -> list[list[int]]:
        return [tree.input_ids[0].tolist() for tree in trees]

    again = build_trees([rows[i] for i in shuffled], max_tokens)
    assert contents(build_trees(rows, max_tokens)) == contents(again)


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(30, 60))
@settings(max_examples=100, deadline=None)
def test_the_cuts_are_the_cheapest(seed: int, n: int, max_tokens: int) -> None:
    """cheapest_runs divides sorted rows into runs of consecutive rows, so that the runs need the fewest tokens in
    total. The test compares the runs of cheapest_runs with the best of all possible ways to cut the rows."""
    rows = sorted(row[:max_tokens] for row in make_rows(seed, n))
    shared = np.array([0] + [len(prefix(a, b)) for a, b in pairwise(rows)])
    lengths = np.array([len(row) for row in rows])

    def tokens(i: int, j: int) -> int:
        return len({tuple(row[: k + 1]) for row in rows[i:j] for k in range(len(row))})

    best = {0: 0.0}
    for j in range(1, n + 1):
        best[j] = min(
            (best[i] + tokens(i, j) for i in range(j) if tokens(i, j) <= max_tokens),
            default=float("inf"),
        )
    runs = cheapest_runs(lengths, shared, max_tokens)
    assert [size for _, _, size in runs] == [tokens(i, j) for i, j, _ in runs]
    assert [i for i, _, _ in runs] == [0, *[j for _, j, _ in runs][:-1]]
    assert sum(size for _, _, size in runs) == best[n]


def prefix(a: list[int], b: list[int]) -> list[int]:
    """Return the longest common prefix of two rows."""
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:n]


@pytest.mark.parametrize("seed", range(5))
def test_interleaved_groups_find_each_other(seed: int) -> None:
    """Four groups of 8 rows become trees of at most 3,200 tokens in total, for any order of the rows. The rows of a
    group share 200 tokens, and each row has 50 tokens of its own. AReaL's trees of the four groups have 8,000
    tokens."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(1000) for _ in range(200)] for _ in range(4)]
    rows = [prompts[i % 4] + [rng.randrange(1000) for _ in range(50)] for i in range(32)]
    if seed:
        rng.shuffle(rows)
    trees = build_trees(rows, 512)
    assert max(len(tree.subtree_end) for tree in trees) <= 512
    assert sum(len(tree.subtree_end) for tree in trees) <= 3200


def test_a_conversation_of_5000_turns_with_a_branch_each() -> None:
    """The function build_trees builds one tree of 10,000 tokens from 5,000 rows, and needs no recursion. Each row
    branches off one token later than the previous row."""
    trunk = np.arange(5000) % 1000
    rows = [np.append(trunk[: i + 1], 1000) for i in range(5000)]
    [tree] = build_trees(rows, 10_000)
    assert len(tree.subtree_end) == 10_000
    assert [len(path) for path in tree.paths] == [len(rows[row]) for row in tree.rows]


def test_small_things_share_a_tree() -> None:
    """Rows without a common prefix are put into the same tree as long as the tree stays within its token budget."""
    rows = [[i] * 30 for i in range(10)]
    assert sorted(len(tree.subtree_end) for tree in build_trees(rows, 100)) == [30, 90, 90, 90]


def test_a_row_that_cannot_be_in_any_tree_is_an_error() -> None:
    """An empty or too long row raises an error that contains the row's number. For a row that is too long, the error
    names the configuration key to change."""
    with pytest.raises(ValueError, match=r"row 1 has 9 tokens.*actor.mb_tokens=8"):
        build_trees([[1, 2], list(range(9))], 8)
    with pytest.raises(ValueError, match="row 0 has 0 tokens"):
        build_trees([[]], 8)


# The attention


@TREES
@settings(max_examples=40, deadline=None)
def test_a_tree_trains_as_its_rows_do(model: Any, seed: int, n: int, max_tokens: int) -> None:
    """The loss of trees agrees with the loss of the separate rows to 1e-6, and the gradients agree to 1e-5."""
    rows = [row[:max_tokens] for row in make_rows(seed, n)] + [
        [1, 2, 3]
    ]  # at least one row has predictable tokens
    assert_same_lesson(
        learn(model, tree_logp(model, rows, max_tokens)), learn(model, separate_logp(model, rows))
    )


def test_long_rows_cross_many_blocks(model: Any) -> None:
    """Rows longer than a block of 128 queries have the same gradients in a tree as in separate passes, with and without
    the dense mask."""
    rows = make_rows(3, 10, longest=3 * BLOCK)
    trees = build_trees(rows, 8192)
    assert len(trees) == 1
    assert len(trees[0].blocks) > 4
    assert (
        sum(len(keys) for _, keys, _ in trees[0].blocks)
        < len(trees[0].subtree_end) * len(trees[0].blocks) / 1.5
    )
    truth = learn(model, separate_logp(model, rows))
    assert_same_lesson(learn(model, tree_logp(model, rows, 8192)), truth)
    assert_same_lesson(learn(model, tree_logp(model, rows, 8192, dense=True)), truth)


@given(st.integers(0, 10**6), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_the_block_mask_is_the_mask(seed: int, n: int) -> None:
    """The block mask lists a block if and only if at least one query of the block attends to at least one key of the
    block. In a block that the mask lists as full, every query attends to every key."""
    [tree] = build_trees(make_rows(seed, n, longest=2 * BLOCK), 10**6)
    mask, N = dense_mask(tree), len(tree.subtree_end)
    blocks = -(-N // BLOCK)
    padded = torch.zeros(blocks * BLOCK, blocks * BLOCK, dtype=torch.bool)
    padded[:N, :N] = mask
    tiles = padded.view(blocks, BLOCK, blocks, BLOCK)
    found = block_mask(tree, torch.device("cpu"))
    some, full = (
        listed(found.kv_num_blocks, found.kv_indices),
        listed(found.full_kv_num_blocks, found.full_kv_indices),
    )
    assert torch.equal(some | full, tiles.any(3).any(1))
    assert not (some & full).any()
    assert not (full & ~tiles.all(3).all(1)).any()
    assert torch.equal(create_mask(found.mask_mod, None, None, N, N, device="cpu")[0, 0], mask)


def listed(counts: Tensor | None, numbers: Tensor | None) -> Tensor:
    """Convert the lists of key blocks to a bool matrix of shape (query blocks, key blocks)."""
    assert counts is not None
    assert numbers is not None
    chosen = torch.zeros(numbers.shape[-2:], dtype=torch.bool)
    for row, (count, order) in enumerate(zip(counts[0, 0], numbers[0, 0], strict=True)):
        chosen[row, order[:count]] = True
    return chosen


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_sees_what_the_blocks_see() -> None:
    """On a CPU, FlexAttention runs without its GPU kernel. With the block mask, FlexAttention gives the same output as
    tree_attention."""
    [tree] = build_trees(make_rows(5, 9, longest=2 * BLOCK), 10**6)
    N = len(tree.subtree_end)
    q, k, v = (
        torch.randn(1, heads, N, 16, generator=torch.Generator().manual_seed(heads))
        for heads in (4, 2, 2)
    )
    flex: Any = flex_attention(
        q, k, v, block_mask=block_mask(tree, torch.device("cpu")), enable_gqa=True, scale=0.3
    )
    ours, _ = tree_attention(None, q, k, v, None, scaling=0.3, tree=tree)
    torch.testing.assert_close(ours.transpose(1, 2), flex, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    "heads", [4, 6]
)  # if the number of heads is not a power of two, transformers repeats the keys
def test_output_and_gradients_are_those_of_the_dense_mask(heads: int) -> None:
    """tree_attention has the same output and gradients as attention with the N x N mask. On a GPU, tree_attention runs
    FlexAttention's kernel."""
    [tree] = build_trees(make_rows(5, 9, longest=2 * BLOCK), 10**6)
    made = [
        torch.randn(1, n, len(tree.subtree_end), 16, generator=torch.Generator().manual_seed(n))
        for n in (heads, 2)
    ]
    results = []
    for dense in (False, True):
        q, k = (
            x.detach().to("cpu" if dense else DEVICE, torch.float64 if dense else torch.float32)
            for x in made
        )
        leaves: list[Any] = [x.requires_grad_() for x in (q, k, k.detach().flip(2))]
        q, k, v = leaves
        if dense:
            out = F.scaled_dot_product_attention(
                q, k, v, dense_mask(tree), scale=0.3, enable_gqa=True
            ).transpose(1, 2)
        else:
            out, _ = tree_attention(torch.nn.Module().eval(), q, k, v, None, scaling=0.3, tree=tree)
        (
            out * torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
        ).sum().backward()
        results.append([x.detach().cpu().float() for x in (out, *(leaf.grad for leaf in leaves))])
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, atol=2e-5, rtol=1e-5)


def test_what_tree_attention_cannot_do_is_refused(model: Any) -> None:
    """Tree attention raises an error if the forward pass has no tree, or if the layer has a sliding window."""
    q = torch.randn(1, 2, 3, 8)
    [tree] = build_trees([[1, 2, 3]], 8)
    model.set_attn_implementation("tree")
    with pytest.raises(ValueError, match="no tree reached Qwen3Attention"):
        model(input_ids=tree.input_ids.to(DEVICE), use_cache=False)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="no sliding_window"):
        tree_attention(None, q, q, q, None, tree=tree, sliding_window=2)


# Rows from episodes of the tasks `guess` and `maze`


async def guess_batch(style: str) -> dict[str, Tensor]:
    """Play 36 guessing games through the proxy, six for each secret, and export the games as in a training run."""
    tokenizer, rng = base_model.make_tokenizer(guess.WORDS), random.Random(0)
    engine = ScriptedEngine(tokenizer, lambda request: str(rng.choice(guess.SECRETS)))
    app = create_app(engine, tokenizer, "admin")
    rows = []
    async with sdk_http.AsyncClient(transport=sdk_http.ASGITransport(app)) as http:
        for game in range(36):
            client = OpenAIProxyClient(
                httpx.ASGITransport(app), "http://proxy/", "admin", f"{game}"
            )
            await client.grant_capacity()
            async with client:
                data = {"secret": guess.SECRETS[game % 6]}
                reward = await guess.GuessAgent().run(
                    data, base_url=client.session_url, http_client=http, api_key=client.api_key
                )
                await client.set_last_reward(reward)
            rows.append(
                complete(to_tensors(await client.export_interactions(style=style)), game % 6)
            )
    return concat_padded_tensors(rows)


def begin(walk: list[str], rng: random.Random) -> Callable[[Any], str]:
    """Return a model whose answer is the beginning of `walk`, cut at a random place."""
    return lambda request: " ".join(walk[: rng.randint(1, len(walk))])


async def maze_batch() -> dict[str, Tensor]:
    """Make 24 walks through the maze: 6 walks for each of 4 prompts, many of them with a common beginning."""
    tokenizer, rng = base_model.make_tokenizer(["from", "to", *maze.CELLS]), random.Random(0)

    async def reward(*args: Any, **data: Any) -> float:
        return maze.reward(*args, **data)

    rows = []
    for task_id, data in enumerate(maze.dataset()[:4]):
        walk = [maze.name(cell) for cell in maze.stagger(rng, data["start"], data["home"])]
        engine = ScriptedEngine(tokenizer, begin(walk, rng))
        workflow = RLVRWorkflow(reward, GenerationHyperparameters(max_new_tokens=240), tokenizer)
        for _ in range(6):
            rows.append(complete(to_tensors(await workflow.arun_episode(engine, data)), task_id))
    return concat_padded_tensors(rows)


@pytest.mark.anyio
@pytest.mark.parametrize("export", ["guess individual", "guess concat", "maze"])
async def test_real_exports_train_as_their_rows_do(export: str) -> None:
    """For rows from episodes of the tasks `guess` and `maze`, trees give the same loss and gradients as the separate
    rows."""
    task, _, style = export.partition(" ")
    batch = await (guess_batch(style) if style else maze_batch())
    words = guess.WORDS if task == "guess" else ["from", "to", *maze.CELLS]
    model = base_model.make_qwen3(base_model.make_tokenizer(words), layers=2, context=256, seed=0)
    rows = [
        ids[real].tolist()
        for ids, real in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    trees = build_trees(rows, 1024)
    assert sum(len(tree.subtree_end) for tree in trees) < 0.6 * sum(map(len, rows))
    assert_same_lesson(
        learn(model, tree_logp(model, rows, 1024)), learn(model, separate_logp(model, rows))
    )


# The actor


def make_batch(seed: int = 0) -> dict[str, Tensor]:
    """Make a batch of eight rows that share prefixes. The loss covers the second half of each row."""
    rows = [row * 2 for row in make_rows(seed, 8)]
    lengths = torch.tensor([len(row) for row in rows])
    real = torch.arange(int(lengths.max())) < lengths[:, None]  # (B, T)
    trained = real & (torch.arange(int(lengths.max())) >= lengths[:, None] // 2)
    g = torch.Generator().manual_seed(seed)
    batch = {
        "input_ids": pad_sequence([torch.tensor(row) for row in rows], batch_first=True).int(),
        "attention_mask": real,
        "loss_mask": trained.int(),
        "logprobs": -3 * torch.rand(real.shape, generator=g),
        "turn_ids": trained.int() - 1,
        "turn_rewards": torch.randn(8, 1, generator=g) * trained,
        "temperatures": torch.where(trained, 0.7 + torch.rand(8, 1, generator=g), 1.0),
    }
    return complete(batch, 0)


def one_update(
    path: Path, trees: bool, **changes: Any
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return the metrics and the weights after one training step with pieces of 128 tokens. Only rank 0 returns
    weights."""
    optimizer = OptimizerConfig(lr=1e-3, eps=1e-4)
    config = PPOActorConfig(
        enable_tree_training=trees,
        compile=False,
        mb_tokens=128,
        ppo_n_minibatches=1,
        entropy_coeff=0.1,
        optimizer=optimizer,
        **changes,
    )
    actor = FSDPPPOActor(config, path)
    actor.create_process_group()
    actor.initialize(max_steps=10)
    batch = make_batch()
    batch["prox_logp"] = actor.compute_logp(batch)
    batch["logprobs"] = batch["prox_logp"] + 0.1 * batch["logprobs"]
    actor.compute_advantages(batch)
    stats = actor.ppo_update(batch)
    weights = actor.full_state()
    torch.distributed.barrier()  # all ranks wait for each other, because the first rank to end closes its connections
    actor.destroy()
    return stats | {"logp": float(batch["prox_logp"].sum())}, weights


def assert_same_update(one: Any, other: Any) -> None:
    """Assert that two results of one_update agree up to rounding, except for tree_token_ratio."""
    for key in one[0].keys() - {"tree_token_ratio"}:
        assert other[0][key] == pytest.approx(one[0][key], rel=1e-4, abs=1e-6), key
    for name, tensor in one[1].items():
        torch.testing.assert_close(other[1][name], tensor, atol=1e-5, rtol=0)


def test_the_actor_makes_the_same_step_with_trees(model: Any, tmp_path: Path) -> None:
    """With or without enable_tree_training, a training step has the same logprobs, metrics and weights. The metric
    tree_token_ratio is below 1, because trees have fewer tokens than their rows."""
    model.save_pretrained(tmp_path)
    padded, trees = one_update(tmp_path, trees=False), one_update(tmp_path, trees=True)
    assert_same_update(padded, trees)
    assert_same_update(padded, one_update(tmp_path, trees=True, gradient_checkpointing=True))
    assert "tree_token_ratio" not in padded[0]
    assert trees[0]["tree_token_ratio"] < 0.9


@pytest.mark.runs
def test_two_ranks_train_trees(model: Any, tmp_path: Path) -> None:
    """Two ranks with different numbers of trees compute the same weights as one rank."""
    model.save_pretrained(tmp_path / "model")
    world = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    command = [sys.executable, __file__, str(tmp_path)]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **world, "RANK": str(r)}) for r in range(2)
    ]
    alone = one_update(tmp_path / "model", trees=True)
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    together = torch.load(tmp_path / "step.pt")
    for name, tensor in alone[1].items():
        torch.testing.assert_close(together[1][name], tensor, atol=1e-5, rtol=0)


if __name__ == "__main__":  # program of each rank in test_two_ranks_train_trees
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    step = one_update(folder / "model", trees=True)
    if rank == 0:
        torch.save(step, folder / "step.pt")
