"""Each variant of the advantages is compared with a plain loop or sum in its paper's notation."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_ppo import make_batch, per_row, single

from extras.advantages import (
    gae,
    informative,
    kl_estimate,
    kl_in_reward,
    overlong,
    rloo,
    row_mean,
    without_truncated,
)
from ppo import compute_advantages

PLAIN: dict[str, Any] = {"mean_level": "none", "std_level": "none"}  # A is the return


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-3, 3, width=16)), min_size=1, max_size=15))
def test_rloo_leaves_the_turn_itself_out_of_its_baseline(entries):
    """The baseline is the mean of the others of the group; a turn without others gets 0."""
    expected = []
    for i, (group, value) in enumerate(entries):
        others = [v for j, (g, v) in enumerate(entries) if g == group and j != i]
        expected.append(value - sum(others) / len(others) if others else 0.0)
    batch = single(*entries)
    A = rloo(batch, mean_level="group", std_level="none")
    assert per_row(A, batch) == pytest.approx(expected, abs=1e-5)


def recursion(rewards: list[float], gamma_lambda: float) -> list[float]:
    """A_t = delta_t + gamma lambda A_(t+1), where delta_t = r_t because there is no critic."""
    A, advantages = 0.0, []
    for r in reversed(rewards):
        A = r + gamma_lambda * A
        advantages.append(A)
    return advantages[::-1]


@pytest.mark.parametrize("gamma_lambda", [0.72, 0.5, 0.0, 1.0])
def test_gae_is_the_recursion_over_a_turns_trained_tokens(gamma_lambda):
    """The recursion skips prompts and untrained turns, and does not go on from one turn into the
    next."""
    first = [(1.5, 3, True), (9.0, 4, False), (-2.0, 2, True)]
    batch = make_batch((0, first), (1, [(3.0, 4, True)]))
    A = gae(batch, gamma_lambda=gamma_lambda, **PLAIN)
    turns = ((1.5, 3), (-2.0, 2), (3.0, 4))
    slow = [a for r, n in turns for a in recursion([0.0] * (n - 1) + [r], gamma_lambda)]
    assert A[batch["loss_mask"] > 0].tolist() == pytest.approx(slow)
    assert not A[batch["loss_mask"] == 0].any()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_kl_estimates_and_what_they_estimate(kind):
    """The mean of k1 and of k3 under the policy is the KL divergence."""
    g = torch.Generator().manual_seed(0)
    p, q = (torch.randn(7, generator=g, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    slow = []
    for a, b in zip(p.tolist(), q.tolist(), strict=True):
        r = math.exp(b - a)  # pi_ref / pi
        all_kinds = {"k1": -math.log(r), "k2": math.log(r) ** 2 / 2, "k3": r - 1 - math.log(r)}
        slow.append(all_kinds[kind])
    k = kl_estimate(p, q, kind)
    assert k.tolist() == pytest.approx(slow)
    if kind != "k2":
        torch.testing.assert_close((p.exp() * k).sum(), (p.exp() * (p - q)).sum())
    if kind != "k1":
        assert (k >= 0).all()
    zero = torch.tensor([-math.inf])
    assert kl_estimate(zero, zero, kind).item() == 0, "two probabilities of 0 are not apart"


def test_k3_counts_as_at_most_10():
    """With this limit no token can invert an advantage: at log (pi / pi_ref) = -8 and weight .001,
    a return of 1 falls by .01."""
    x = torch.tensor([-500.0, -8.0, -2.7, -2.5, 0.0, 2.0, 500.0])
    slow = [min(math.exp(-max(d, -20)) - 1 + d, 10) for d in x.tolist()]
    assert slow.count(10) == 4
    assert kl_estimate(x, torch.zeros(7), "k3").tolist() == pytest.approx(slow, rel=1e-5)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("scaling", [1.0, 2.5])
def test_each_kl_in_the_reward_is_charged_to_its_turn(kind, scaling):
    """The scaled return of a turn falls by the weight times the sum of the KL over its own
    tokens."""
    batch = make_batch((0, [(1.0, 2, True), (1.0, 3, True)]))
    batch["logprobs"] = torch.where(batch["loss_mask"] > 0, -1.0, math.nan)
    batch["ref_logp"] = torch.where(batch["turn_ids"] == 1, -3.0, -1.0)
    per_token = {"k1": 2.0, "k2": 2.0, "k3": math.exp(-2) + 1}[kind]
    A = kl_in_reward(batch, weight=0.1, kind=kind, reward_scaling=scaling, **PLAIN)
    assert A[0, batch["turn_ids"][0] == 0].tolist() == pytest.approx([scaling] * 2)
    expected = scaling - 0.1 * 3 * per_token
    assert A[0, batch["turn_ids"][0] == 1].tolist() == pytest.approx([expected] * 3)


def test_the_overlong_penalty_is_a_ramp():
    """The penalty is 0 up to limit - margin, -factor at the limit, and linear between them."""
    batch = make_batch(*((0, [(1.0, n, True)]) for n in (1, 6, 7, 8, 10, 12)))
    A = overlong(batch, limit=10, margin=4, factor=0.5, **PLAIN)
    assert per_row(A, batch) == [1 + x for x in (0, 0, -0.125, -0.25, -0.5, -0.5)]


def test_a_truncated_turn_is_neither_trained_nor_compared():
    """The last turn of a truncated row leaves the mask and the baseline; other turns stay."""
    batch = make_batch(
        (0, [(1.0, 3, True)]),
        (0, [(0.0, 5, True)]),
        (0, [(0.5, 2, True), (0.0, 4, True)]),
        (0, [(0.0, 2, True), (1.0, 3, True)]),
    )
    batch["truncated"] = torch.tensor([0, 1, 1, 0], dtype=torch.int32)
    trained = batch["loss_mask"]
    before = compute_advantages(batch, std_level="none")
    after = without_truncated(batch, std_level="none")
    assert (trained - batch["loss_mask"]).sum(1).tolist() == [0, 5, 4, 0]
    assert (trained - batch["loss_mask"])[2, batch["turn_ids"][2] == 1].all()
    assert before[0, 2].item() == pytest.approx(1 - 1.5 / 4)
    assert after[0, 2].item() == pytest.approx(1 - 1.5 / 3)
    assert not after[1].any()


@pytest.mark.parametrize("length", [None, 50])
def test_rows_count_the_same_or_tokens_count_the_same(length):
    """The mean over tokens of the weighted advantages is 1/S sum_i 1/n_i sum_t A, or with L in the
    place of n_i."""
    batch = make_batch((0, [(1.0, 3, True)]), (1, [(2.0, 9, True)]), (2, [(5.0, 4, False)]))
    A = row_mean(batch, length=length, **PLAIN)
    slow = (1.0 * 3 / (length or 3) + 2.0 * 9 / (length or 9)) / 2
    assert (A.sum() / 12).item() == pytest.approx(slow)


def test_variants_combine():
    """The ramp comes first, and then the mean of the others."""
    batch = make_batch((0, [(1.0, 10, True)]), (0, [(0.0, 1, True)]), (0, [(2.0, 1, True)]))
    A = rloo(batch, std_level="none", base=partial(overlong, limit=10, margin=4, factor=0.5))
    assert per_row(A, batch) == pytest.approx([0.5 - 1, 0 - 1.25, 2 - 0.25])


def test_an_uninformative_group_is_one_without_an_advantage():
    """`informative` is True exactly where some advantage is not 0."""
    one, two, other = (1.0, 3, True), (0.5, 2, True), (0.2, 1, True)
    unseen = [(reward, 3, False) for reward in (1.0, 0.0)]
    groups = {
        "equal": [[one], [(1.0, 2, True)]],
        "different": [[one], [two]],
        "different turns, each equal": [[one, two], [(1.0, 2, True), (0.5, 1, True)]],
        "only the second turn differs": [[one, two], [one, other]],
        "one member": [[one]],
        "differs where nothing is trained": [[one, unseen[1]], [one]],
        "nothing trained": [[unseen[0]], [unseen[1]]],
    }
    found = []
    for name, members in groups.items():
        batch = make_batch(*((0, turns) for turns in members))
        assert informative(batch) == bool(compute_advantages(batch).any()), name
        found += [name] * informative(batch)
    assert found == ["different", "only the second turn differs"]
