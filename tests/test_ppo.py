"""The loss is compared with a slow loop in the paper's notation, and advantages with sums by
hand."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppo import compute_advantages, ppo_actor_loss_fn

INF = float("inf")


# ---- the loss


def paper_objective(
    theta, prox, behav, A, mask, *, eps, eps_high, c, cap
) -> tuple[float, Counter[str]]:
    """J by a loop over tokens, and how many tokens were in each case."""
    theta, prox, behav, A, mask = (x.tolist() for x in (theta, prox, behav, A, mask))
    hits: Counter[str] = Counter()
    total, count = 0.0, 0
    for i in range(len(theta)):
        for t in range(len(theta[i])):
            if not mask[i][t]:
                hits["masked"] += 1
                continue
            count += 1
            u = math.exp(theta[i][t] - prox[i][t])  # pi_theta / pi_prox
            w = math.exp(prox[i][t] - behav[i][t])  # pi_prox / pi_behav
            if w > cap:
                hits["dropped"] += 1
                continue
            clip_u = min(max(u, 1 - eps), 1 + eps_high)
            term = min(u * A[i][t], clip_u * A[i][t])
            if clip_u * A[i][t] < u * A[i][t]:
                hits["clipped above" if A[i][t] > 0 else "clipped below"] += 1
            elif u != clip_u:
                hits["outside, not clipped"] += 1
            else:
                hits["inside"] += 1
            if A[i][t] < 0 and term < c * A[i][t]:
                hits["dual clip"] += 1
                term = c * A[i][t]
            total += w * term
    return total / count, hits


BRANCHES = {"masked", "dropped", "clipped above", "clipped below", "outside, not clipped"}
BRANCHES |= {"inside", "dual clip"}


def random_tokens(seed: int, shape=(6, 40), spread=0.6) -> tuple[Tensor, ...]:
    """theta, prox, behav, A (float64) and mask; `spread` scales the distance of the policies."""
    g = torch.Generator().manual_seed(seed)
    behav = -3 * torch.rand(shape, generator=g, dtype=torch.float64)
    prox = behav + spread * torch.randn(shape, generator=g, dtype=torch.float64)
    theta = prox + spread * torch.randn(shape, generator=g, dtype=torch.float64)
    A = torch.randn(shape, generator=g, dtype=torch.float64)
    mask = (torch.rand(shape, generator=g) < 0.7).int()
    return theta, prox, behav, A, mask


@pytest.mark.parametrize("is_standard", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_the_papers_objective(seed, is_standard):
    """The inputs reach every branch of the loop. Standard PPO has one old policy in both places, so
    every weight is 1."""
    theta, prox, behav, A, mask = random_tokens(seed)
    tensors = (theta, prox, prox if is_standard else behav, A, mask)
    expected, hits = paper_objective(*tensors, eps=0.2, eps_high=0.28, c=1.5, cap=2.0)
    assert BRANCHES - hits.keys() == ({"dropped"} if is_standard else set())
    keys: Any = {"eps_clip": 0.2, "eps_clip_higher": 0.28, "c_clip": 1.5}
    loss, stats = ppo_actor_loss_fn(*tensors, behave_imp_weight_cap=2.0, **keys)
    n = int(mask.sum())
    assert loss.item() == pytest.approx(-expected, rel=1e-12)
    assert stats["dropped_share"].item() == pytest.approx(hits["dropped"] / n)
    clipped = hits["clipped above"] + hits["clipped below"] + hits["dual clip"]
    assert stats["clip_frac"].item() == pytest.approx(clipped / n), "dropped is not clipped"
    assert (stats["behave_weight_mean"].item() == 1) == is_standard


def test_the_example_of_the_docstring():
    """The probabilities 0.2, 0.3 and 0.42 give w = 1.5, u = 1.4, and the term 1.8."""
    behav, prox, theta = (torch.tensor([p]).log() for p in (0.2, 0.3, 0.42))
    loss, _ = ppo_actor_loss_fn(theta, prox, behav, torch.ones(1), torch.ones(1))
    assert loss.item() == pytest.approx(-1.8)


def test_the_gradient_is_weighted_and_flows_to_pi_theta_alone():
    """Where pi_theta is pi_prox, a token's gradient is -(pi_prox / pi_behav) A / n. pi_prox and the
    weight are constants."""
    _, prox, behav, A, mask = random_tokens(5)
    leaves: Any = [x.clone().requires_grad_() for x in (prox, prox, behav)]
    theta, prox_leaf, behav_leaf = leaves
    ppo_actor_loss_fn(theta, prox_leaf, behav_leaf, A, mask)[0].backward()
    torch.testing.assert_close(leaves[0].grad, -(prox - behav).exp() * A * mask / mask.sum())
    assert leaves[1].grad is None
    assert leaves[2].grad is None


@pytest.mark.parametrize(
    ("theta", "prox", "behav"),
    [(-INF, -INF, -INF), (-1.0, -INF, -INF), (-INF, -INF, -1.0), (-INF, -1.0, -INF)],
)
def test_a_token_that_two_policies_exclude_gives_no_nan(theta, prox, behav):
    """The ratio of two probabilities of 0 counts as 1."""
    first, second, third = (torch.tensor([value, -1.0]) for value in (theta, prox, behav))
    keys: Any = {"c_clip": 2.0, "behave_imp_weight_cap": 5.0}
    loss, stats = ppo_actor_loss_fn(first, second, third, -torch.ones(2), torch.ones(2), **keys)
    assert loss.isfinite()
    assert all(value.isfinite() for value in stats.values())


@pytest.mark.parametrize("low", [0.0, 0.2])
def test_a_clip_of_0_bounds_the_ratio_at_1(low):
    """A bound of 0 neither switches the clip off, nor stands for the other bound."""
    new, old = torch.tensor([0.5, -0.5, 0.5, -0.5]), torch.zeros(4)
    A = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss, stats = ppo_actor_loss_fn(new, old, old, A, old == 0, eps_clip=low, eps_clip_higher=0.0)
    assert loss.item() == pytest.approx(-(1 + math.exp(-0.5) - math.exp(0.5) - (1 - low)) / 4)
    assert stats["clip_frac"].item() == 0.5


def test_the_pieces_of_a_batch_add_up():
    """Each piece gets the whole batch's denominator, so losses and metrics add up."""
    tensors = random_tokens(2)
    n = int(tensors[-1].sum())
    whole, stats = ppo_actor_loss_fn(*tensors)
    parts = (slice(0, 1), slice(1, 6))
    pieces = [ppo_actor_loss_fn(*[x[rows] for x in tensors], denominator=n) for rows in parts]
    torch.testing.assert_close(sum(loss for loss, _ in pieces), whole)
    for key in stats:
        torch.testing.assert_close(sum(s[key] for _, s in pieces), stats[key])


def test_no_trained_token_is_no_loss():
    """Loss, metrics and gradients are 0, not 0 / 0."""
    theta, prox, behav, A, _ = random_tokens(0)
    leaf: Any = theta.clone().requires_grad_()
    loss, stats = ppo_actor_loss_fn(leaf, prox, behav, A, torch.zeros_like(A))
    loss.backward()
    assert loss.item() == 0
    assert not leaf.grad.any()
    assert all(s.item() == 0 for s in stats.values())


# ---- advantages


def make_batch(*rows: tuple[int, list[tuple[float, int, bool]]]) -> dict[str, Tensor]:
    """Rows are (group id, turns), and a turn is (reward, tokens, whether it is trained). Two prompt
    tokens precede each turn."""
    width = max(sum(2 + n for _, n, _ in turns) for _, turns in rows) + 2
    shape = (len(rows), width)
    batch = {
        "loss_mask": torch.zeros(shape, dtype=torch.int32),
        "turn_ids": torch.full(shape, -1, dtype=torch.int32),
        "turn_rewards": torch.zeros(shape),
        "logprobs": torch.zeros(shape),
        "group_ids": torch.tensor([group for group, _ in rows], dtype=torch.int32),
    }
    for i, (_, turns) in enumerate(rows):
        at = 0
        for k, (reward, n, trained) in enumerate(turns):
            span = slice(at + 2, at + 2 + n)
            batch["loss_mask"][i, span] = int(trained)
            batch["turn_ids"][i, span] = k
            batch["turn_rewards"][i, span] = reward
            at += 2 + n
    return batch


def single(*rows: tuple[int, float]) -> dict[str, Tensor]:
    """Pairs (group id, reward) become rows with one trained turn of three tokens."""
    return make_batch(*((group, [(reward, 3, True)]) for group, reward in rows))


def per_row(advantages: Tensor, batch: dict[str, Tensor]) -> list[float]:
    """The one advantage of each row's trained tokens. All other tokens have 0."""
    values = []
    for row, mask in zip(advantages, batch["loss_mask"].bool(), strict=True):
        assert len(set(row[mask].tolist())) == 1
        assert not row[~mask].any()
        values.append(row[mask][0].item())
    return values


def advantages_of(batch: dict[str, Tensor], mean="group", std="none", **keys: Any) -> Tensor:
    return compute_advantages(batch, mean_level=mean, std_level=std, **keys)


def by_row(batch: dict[str, Tensor], *levels: str, **keys: Any) -> list[float]:
    return per_row(advantages_of(batch, *levels, **keys), batch)


LEVELS = st.sampled_from(["group", "batch", "none"])
REWARDS = st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.3, 1.0, -2.0]))


@given(
    st.lists(REWARDS, min_size=1, max_size=12),
    st.randoms(use_true_random=False),
    st.tuples(LEVELS, LEVELS),
)
def test_the_order_of_rows_means_nothing(rewards, order, levels):
    """A row keeps its advantage when the batch is shuffled."""
    shuffled = list(range(len(rewards)))
    order.shuffle(shuffled)
    a, b = single(*rewards), single(*(rewards[i] for i in shuffled))
    before = by_row(a, *levels)
    assert by_row(b, *levels) == pytest.approx([before[i] for i in shuffled], abs=1e-6)


@pytest.mark.parametrize("std", ["group", "batch", "none"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.7, 1 / 3])
def test_equal_rewards_teach_nothing(reward, std):
    """Their advantages are exactly 0, even in a group of one."""
    for size in (1, 7):
        assert by_row(single(*[(0, reward)] * size), "group", std) == [0.0] * size


G, T, B = ("group", "none"), ("group", "group"), ("group", "batch")
CELLS: list[Any] = [
    # Rows with the same id are a group, wherever they are in the batch.
    ([(7, 1.0), (3, 0.0), (7, 0.0), (3, 1.0), (7, 2.0)], G, [0.0, -0.5, -1.0, 0.5, 1.0]),
    # A row that is alone in its group has advantage 0, and other groups are not affected.
    ([(0, 1.0), (0, 0.0), (0, 1.0), (0, 0.0), (1, 1.0)], T, [0.866, -0.866, 0.866, -0.866, 0.0]),
    # The standard deviation of a single return counts as 1.
    ([(0, 3.0), (1, -1.0)], ("none", "none"), [3.0, -1.0]),
    ([(0, 3.0), (1, -1.0)], ("none", "group"), [3.0, -1.0]),
    # The standard deviation is around the mean of its own cell, whatever baseline is subtracted
    # (docs/differences.md).
    ([(0, 1.0), (0, 0.0), (1, 5.0), (1, 7.0)], B, [0.1513, -0.1513, -0.3027, 0.3027]),
    ([(0, 1.0), (0, 0.0), (0, 2.0)], ("none", "group"), [1.0, 0.0, 2.0]),
]


@pytest.mark.parametrize(("rewards", "levels", "expected"), CELLS)
def test_an_advantage_compares_with_its_cell(rewards, levels, expected):
    """A = (R - mean) / std, with mean and std over a group or the batch."""
    assert by_row(single(*rewards), *levels) == pytest.approx(expected, abs=1e-3)


def test_turns_are_compared_with_the_same_turn():
    """Without per_turn, all turns of a group share one mean. The number of a turn may exceed the
    width of its row, which can happen after a link."""
    batch = make_batch((0, [(1.0, 2, True), (1.0, 2, True)]), (0, [(0.0, 2, True)]))
    first, second = batch["turn_ids"][0] == 0, batch["turn_ids"][0] == 1
    A = advantages_of(batch)
    found = (A[0, first][0].item(), A[0, second][0].item(), A[1, first][0].item())
    assert found == (0.5, 0.0, -0.5)
    assert torch.equal(advantages_of(batch | {"turn_ids": batch["turn_ids"] * A.shape[1]}), A)
    A = advantages_of(batch, per_turn=False)
    assert A[0, first][0].item() == A[0, second][0].item() == pytest.approx(1 / 3)


def test_a_turn_that_is_not_trained_has_no_say_in_the_baseline():
    """The last turn of one row is not trained, and another row has no trained turn. The rewards of
    these turns change no advantage of the other turns."""
    tail = (0, [(1.0, 3, True), (5.0, 2, False)])
    A = advantages_of(make_batch(tail, (0, [(0.0, 3, True)]), (0, [(9.0, 3, False)])))
    assert A.amax(1).tolist() == [0.5, 0.0, 0.0]
    assert A.amin(1).tolist() == [0.0, -0.5, 0.0]


def test_rewards_are_scaled():
    """reward_scaling multiplies the returns. So it multiplies the advantages, too, unless they are
    divided by a std."""
    batch = single((0, 0.5), (0, 4.0), (0, 0.0))
    assert by_row(batch, reward_scaling=2.0) == [-2.0, 5.0, -3.0]
    scaled = by_row(batch, "group", "group", reward_scaling=2.0)
    assert scaled == pytest.approx(by_row(batch, "group", "group"), abs=1e-4)
    equal = by_row(single(*[(0, 1.0)] * 3), "none", "group", reward_scaling=0.1)
    assert equal == pytest.approx([0.1] * 3), "equal returns have no std, even after rounding"


def test_nothing_to_train_is_defined():
    """All advantages are 0, even without any row."""
    batch = make_batch((0, [(1.0, 3, False)]), (1, [(2.0, 3, False)]))
    assert not advantages_of(batch, "group", "group").any()
    batch = {key: value[:0] for key, value in batch.items()}
    assert advantages_of(batch, "group", "group").shape[0] == 0
