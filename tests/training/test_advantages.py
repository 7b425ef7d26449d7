"""Each test compares one variant of the advantage with a plain loop or sum that follows the equation of the variant's
paper."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ppo import config, make_batch, per_row, single

from ppo import compute_advantages
from training.advantages import (
    generalised_advantage,
    informative,
    kl_estimate,
    leave_one_out_mean,
    overlong_penalty,
)
from training.config import NormConfig, PPOActorConfig


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-3, 3)), min_size=1, max_size=15))
@settings(max_examples=100, deadline=None)
def test_leave_one_out_is_the_mean_of_the_others(entries):
    """An entry's leave-one-out baseline is the mean of the other entries in its cell. If the cell has no other entry,
    the baseline is the entry's own value."""
    cell, x = (
        torch.tensor([c for c, _ in entries]),
        torch.tensor([v for _, v in entries], dtype=torch.float64),
    )
    expected = []
    for i, (c, value) in enumerate(entries):
        others = [v for j, (d, v) in enumerate(entries) if d == c and j != i]
        expected.append(sum(others) / len(others) if others else value)
    assert leave_one_out_mean(x, cell).tolist() == pytest.approx(expected, abs=1e-9)


def test_rloo_in_a_batch_goes_by_group_id():
    """If the rows of two groups are interleaved, RLOO compares each member with the other members of its own
    group."""
    batch = single((7, 1.0), (3, 0.0), (7, 0.0), (3, 1.0), (7, 2.0), (9, 5.0))
    rloo = PPOActorConfig(adv_norm=NormConfig(std_level="none", mean_leave1out=True))
    assert per_row(compute_advantages(batch, rloo), batch) == [0.0, -1.0, -1.5, 1.0, 1.5, 0.0]


def recursion(rewards: list[float], gamma: float, lam: float) -> list[float]:
    """Compute GAE by its recursion A_t = delta_t + gamma lambda A_(t+1), where delta_t = r_t because without a critic
    all values are 0."""
    A, advantages = 0.0, []
    for r in reversed(rewards):
        A = r + gamma * lam * A
        advantages.append(A)
    return advantages[::-1]


@pytest.mark.parametrize(("gamma", "lam"), [(0.9, 0.8), (0.5, 1.0), (1.0, 0.0), (1.0, 1.0)])
def test_gae_is_the_recursion_over_a_turns_trained_tokens(gamma, lam):
    """GAE runs a separate recursion for each turn, even if the tokens of several turns are interleaved."""
    turn_of = torch.tensor([2, 2, 2, 0, 1, 1, 0, 0])
    A = torch.tensor([1.5, -2.0, 3.0])
    expected = [0.0] * 8
    for k in range(3):
        own = [i for i in range(8) if turn_of[i] == k]
        for i, value in zip(
            own, recursion([0.0] * (len(own) - 1) + [A[k].item()], gamma, lam), strict=True
        ):
            expected[i] = value
    assert generalised_advantage(A, turn_of, gamma, lam).tolist() == pytest.approx(expected)


def test_gae_in_a_batch_does_not_decay_over_what_is_not_trained():
    """GAE skips prompt tokens and untrained turns, and its recursion does not continue from one turn into the
    next."""
    batch = make_batch((0, [(1.0, 3, True), (9.0, 4, False), (2.0, 2, True)]))
    A = compute_advantages(batch, config("none", gamma=0.5, gae_lambda=0.5))
    assert A[0, batch["loss_mask"][0] > 0].tolist() == pytest.approx([1 / 16, 1 / 4, 1.0, 0.5, 2.0])
    assert not A[0, batch["loss_mask"][0] == 0].any()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_kl_estimates_and_what_they_estimate(kind):
    """For k1, k2 and k3, kl_estimate agrees with the estimator's formula. The expectation of k1 and of k3 under the
    policy is the KL divergence, if no token exceeds the bound of k3."""
    g = torch.Generator().manual_seed(0)
    p, q = (torch.randn(7, generator=g, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    slow = []
    for a, b in zip(p.tolist(), q.tolist(), strict=True):
        r = math.exp(b - a)  # pi_ref / pi
        slow.append(
            {"k1": -math.log(r), "k2": math.log(r) ** 2 / 2, "k3": r - 1 - math.log(r)}[kind]
        )
    k = kl_estimate(p, q, kind)
    assert k.tolist() == pytest.approx(slow)
    if kind != "k2":
        torch.testing.assert_close((p.exp() * k).sum(), (p.exp() * (p - q)).sum())
    if kind != "k1":
        assert (k >= 0).all()


def test_k3_counts_as_at_most_10():
    """k3 is min(exp(-x) - 1 + x, 10) with x = log (pi / pi_ref). The upper bound of 10 changes only the estimates of
    tokens whose probabilities under pi and pi_ref differ much."""
    x = torch.tensor([-500.0, -8.0, -2.7, -2.5, 0.0, 2.0, 500.0])
    slow = [min(math.exp(-max(d, -20)) - 1 + d, 10) for d in x.tolist()]
    assert slow.count(10) == 4
    assert kl_estimate(x, torch.zeros(7), "k3").tolist() == pytest.approx(slow, rel=1e-5)
    leaf = x.clone().requires_grad_()
    kl_estimate(leaf, torch.zeros(7), "k3").sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == pytest.approx(
        [0, 0, 0, *(1 - math.exp(-d) for d in (-2.5, 0.0, 2.0)), 0], abs=1e-5
    )


def test_one_token_cannot_invert_an_advantage_through_k3():
    """A token with log (pi / pi_ref) = -8 lowers a return of 1 by at most 10 kl_ctl. With kl_ctl = 0.001, a turn with
    the return 1 keeps a positive advantage."""
    batch = single((0, 1.0), (0, 0.0))
    batch["ref_logp"] = torch.zeros_like(batch["logprobs"])
    batch["logprobs"][0, 2] = -8.0
    A = compute_advantages(batch, config(kl_ctl=0.001, kl_estimator="k3"))
    assert A[0, 2].item() == pytest.approx((1 - 0.01) / 2)


def test_two_probabilities_of_zero_have_no_distance():
    """If the policy and the reference both give a token the probability 0, each KL estimate is 0 and not NaN."""
    for kind in ("k1", "k2", "k3"):
        assert kl_estimate(torch.tensor([-math.inf]), torch.tensor([-math.inf]), kind).item() == 0


def test_the_turns_kl_and_the_kl_to_go_have_one_gradient():
    """The KL penalty of a token is either the KL of the whole turn, or the KL from this token to the turn's end. Both
    forms of the KL penalty give the same expected policy gradient. The test computes the exact expectation over all
    turns of two tokens."""
    g = torch.Generator().manual_seed(3)
    first = torch.randn(3, generator=g, dtype=torch.float64, requires_grad=True)
    second = torch.randn(3, 3, generator=g, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(2, 3, generator=g, dtype=torch.float64).log_softmax(-1)
    gradients = []
    for to_go in (False, True):
        surrogate = torch.zeros((), dtype=torch.float64)
        for a in range(3):
            for b in range(3):
                logp = torch.stack([first.log_softmax(-1)[a], second.log_softmax(-1)[a, b]])
                kl = kl_estimate(logp, torch.stack([ref[0, a], ref[1, b]]), "k1").detach()
                cost = torch.stack([kl.sum(), kl[1]]) if to_go else kl.sum().expand(2)
                surrogate = surrogate + logp.sum().exp().detach() * (cost * logp).sum()
        gradients.append(
            torch.cat([x.flatten() for x in torch.autograd.grad(surrogate, (first, second))])
        )
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 0.01


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_each_kl_in_the_reward_is_charged_to_its_turn(kind):
    """Each turn's reward is reduced by kl_ctl times the sum of the KL estimates of its own tokens."""
    batch = make_batch((0, [(1.0, 2, True), (1.0, 3, True)]))
    batch["logprobs"] = torch.where(batch["loss_mask"] > 0, -1.0, math.nan)
    batch["ref_logp"] = torch.where(batch["turn_ids"] == 1, -3.0, -1.0)
    per_token = {"k1": 2.0, "k2": 2.0, "k3": math.exp(-2) + 1}[kind]
    A = compute_advantages(batch, config("none", kl_ctl=0.1, kl_estimator=kind))
    assert A[0, batch["turn_ids"][0] == 0].tolist() == pytest.approx([1.0] * 2)
    assert A[0, batch["turn_ids"][0] == 1].tolist() == pytest.approx([1 - 0.1 * 3 * per_token] * 3)
    in_loss = config("none", kl_ctl=0.1, kl_placement="loss")
    assert compute_advantages(batch, in_loss)[0].max().item() == 1.0, (
        "with kl_placement=loss the reward is unchanged"
    )


def test_the_overlong_penalty_is_a_ramp():
    """The overlong penalty is 0 up to `limit - margin` tokens, falls linearly to -factor at the limit, and is -factor
    above the limit."""
    lengths = torch.tensor([1, 6, 7, 8, 10, 12])
    assert overlong_penalty(lengths, 10, 4, 0.5).tolist() == [0, 0, -0.125, -0.25, -0.5, -0.5]
    batch = make_batch((0, [(1.0, 3, True), (1.0, 8, True)]))
    A = compute_advantages(
        batch, config("none", overlong_tokens=4, max_new_tokens=10, overlong_penalty_factor=0.5)
    )
    assert A[0, batch["turn_ids"][0] == 0].tolist() == [1.0] * 3
    assert A[0, batch["turn_ids"][0] == 1].tolist() == [0.75] * 8


def test_an_uninformative_group_is_one_without_an_advantage():
    """`informative` returns True if and only if the group has an advantage that is not 0."""
    groups = {
        "equal": [(0, [(1.0, 3, True)]), (0, [(1.0, 2, True)])],
        "different": [(0, [(1.0, 3, True)]), (0, [(0.0, 2, True)])],
        "different turns, each equal": [
            (0, [(1.0, 3, True), (0.5, 2, True)]),
            (0, [(1.0, 2, True), (0.5, 1, True)]),
        ],
        "only the second turn differs": [
            (0, [(1.0, 3, True), (0.5, 2, True)]),
            (0, [(1.0, 2, True), (0.2, 1, True)]),
        ],
        "one member": [(0, [(1.0, 3, True)])],
        "differs where nothing is trained": [
            (0, [(1.0, 3, True), (5.0, 2, False)]),
            (0, [(1.0, 3, True)]),
        ],
        "nothing trained": [(0, [(1.0, 3, False)]), (0, [(0.0, 3, False)])],
    }
    for name, rows in groups.items():
        batch = make_batch(*rows)
        assert informative(batch) == bool(compute_advantages(batch, config()).any()), name
    assert [name for name, rows in groups.items() if informative(make_batch(*rows))] == [
        "different",
        "only the second turn differs",
    ]


def test_an_empty_batch_has_no_advantages():
    """A batch without rows gives an empty tensor of advantages and no error."""
    batch = {key: value[:0] for key, value in single((0, 1.0)).items()}
    assert compute_advantages(batch, config(std="group")).shape[0] == 0
