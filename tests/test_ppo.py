"""These tests compare the loss with a slow loop in the paper's notation, and the advantages with values computed by
hand.

The loop `paper_objective` uses no tensors. For every trained token, `paper_objective` computes the ratio u and the
behaviour weight w, and adds w min(u A, clip(u) A) to a sum. `test_the_loss_is_the_papers_objective` checks that its
inputs cover every case: each clip, the cap, both signs of the advantage, and the mask.
"""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo import aggregation_weights, compute_advantages
from ppo import ppo_actor_loss_fn as loss_of_config
from training.config import NormConfig, PPOActorConfig

NAN, INF = float("nan"), float("inf")


def ppo_actor_loss_fn(theta, prox, behav, A, mask, *, sequence_ids=None, denominator=None, **keys):
    """Compute the loss; `keys` are the configuration keys whose values differ from the defaults."""
    about: dict[str, Any] = {"sequence_ids": sequence_ids, "denominator": denominator}
    return loss_of_config(theta, prox, behav, A, mask, PPOActorConfig(**keys), **about)


# -- the loss ---------------------------------------------------------------------------------------------------------


def paper_objective(
    theta, prox, behav, A, mask, *, eps, eps_high, c, cap
) -> tuple[float, Counter[str]]:
    """Compute the paper's objective J in a loop over tokens. Return J and a count of the tokens in each case (clipped,
    dropped, masked and so on)."""
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


def random_tokens(seed: int, shape=(6, 40), spread=0.6):
    """Return random theta, prox, behav, A (float64) and mask; `spread` scales the differences between the
    policies."""
    g = torch.Generator().manual_seed(seed)
    behav = -3 * torch.rand(shape, generator=g, dtype=torch.float64)
    prox = behav + spread * torch.randn(shape, generator=g, dtype=torch.float64)
    theta = prox + spread * torch.randn(shape, generator=g, dtype=torch.float64)
    A = torch.randn(shape, generator=g, dtype=torch.float64)
    mask = (torch.rand(shape, generator=g) < 0.7).int()
    return theta, prox, behav, A, mask


@pytest.mark.parametrize("seed", range(5))
def test_the_loss_is_the_papers_objective(seed):
    """The loss equals the paper's -J. The inputs make each clip, the cap, the dual clip and the mask take effect."""
    theta, prox, behav, A, mask = random_tokens(seed)
    expected, hits = paper_objective(
        theta, prox, behav, A, mask, eps=0.2, eps_high=0.28, c=1.5, cap=2.0
    )
    branches = {
        "masked",
        "dropped",
        "clipped above",
        "clipped below",
        "outside, not clipped",
        "inside",
        "dual clip",
    }
    assert branches <= hits.keys()

    loss, stats = ppo_actor_loss_fn(
        theta,
        prox,
        behav,
        A,
        mask,
        eps_clip=0.2,
        eps_clip_higher=0.28,
        c_clip=1.5,
        behave_imp_weight_cap=2.0,
    )

    assert loss.item() == pytest.approx(-expected, rel=1e-12)
    assert stats["dropped_share"].item() == pytest.approx(hits["dropped"] / int(mask.sum()))
    clipped = hits["clipped above"] + hits["clipped below"] + hits["dual clip"]
    assert stats["clip_frac"].item() == pytest.approx(clipped / int(mask.sum())), (
        "a dropped token is not clipped"
    )


def test_standard_ppo_is_the_same_loop_with_one_old_policy():
    """Standard PPO uses one old policy in place of pi_prox and pi_behav, and does not read prox_logp."""
    theta, _, old, A, mask = random_tokens(7)
    expected, hits = paper_objective(
        theta, old, old, A, mask, eps=0.2, eps_high=0.2, c=INF, cap=5.0
    )
    assert hits["clipped above"]
    assert hits["clipped below"]

    loss, stats = ppo_actor_loss_fn(
        theta, torch.full_like(theta, NAN), old, A, mask, use_decoupled_loss=False
    )

    assert loss.item() == pytest.approx(-expected, rel=1e-12)
    assert stats["behave_weight_mean"].item() == 1


def test_decoupled_is_standard_bit_for_bit_when_the_data_is_fresh():
    """If pi_prox equals pi_behav, decoupled and standard PPO have the same losses and gradients, bit for bit."""
    theta, _, old, A, mask = (x.float() for x in random_tokens(3))
    losses, gradients = [], []
    for decoupled in (True, False):
        leaf = theta.clone().requires_grad_()
        loss, _ = ppo_actor_loss_fn(
            leaf, old, old, A, mask, c_clip=2.0, use_decoupled_loss=decoupled
        )
        loss.backward()
        losses.append(loss)
        gradients.append(leaf.grad)
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(gradients[0], gradients[1])


def test_the_first_step_on_fresh_data_is_the_policy_gradient():
    """If all three policies are the same, the loss has the same gradient as -mean(A log pi), the loss of REINFORCE."""
    _, _, old, A, mask = random_tokens(4)
    ours, plain = old.clone().requires_grad_(), old.clone().requires_grad_()
    ppo_actor_loss_fn(ours, old, old, A, mask, c_clip=2.0)[0].backward()
    (-(A * plain * mask).sum() / mask.sum()).backward()
    torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-12, atol=0)


def test_stale_data_is_weighted_in_the_gradient_too():
    """If pi_theta = pi_prox, the gradient of the loss for each of the n trained tokens is -(pi_prox / pi_behav) * A /
    n."""
    _, prox, behav, A, mask = random_tokens(5)
    theta = prox.clone().requires_grad_()
    ppo_actor_loss_fn(theta, prox, behav, A, mask, behave_imp_weight_cap=None)[0].backward()
    torch.testing.assert_close(theta.grad, -(prox - behav).exp() * A * mask / mask.sum())


def test_the_write_ups_surrogate_is_another_objective():
    """ppo.py computes the objective of the paper. The objective of the write-up on AReaL, min((pi_theta / pi_behav) A,
    clip(u) A), gives a different loss."""
    theta, prox, behav, A, mask = random_tokens(0)
    u = (theta - prox).exp()
    surr1, surr2 = (theta - behav).exp() * A, u.clamp(0.8, 1.2) * A
    write_up = -(torch.minimum(surr1, surr2) * mask).sum() / mask.sum()
    paper = -((prox - behav).exp() * torch.minimum(u * A, surr2) * mask).sum() / mask.sum()

    loss, _ = ppo_actor_loss_fn(theta, prox, behav, A, mask, behave_imp_weight_cap=None)

    torch.testing.assert_close(loss, paper)
    assert abs(loss - write_up) > 0.05


@pytest.mark.parametrize(
    ("theta", "prox", "behav"),
    [(-INF, -INF, -INF), (-1.0, -INF, -INF), (-INF, -INF, -1.0), (-INF, -1.0, -INF)],
)
def test_a_token_that_two_policies_exclude_gives_no_nan(theta, prox, behav):
    """If two policies give a token the probability 0, their ratio counts as 1, and the loss and the metrics are
    finite."""
    first, second, third = (torch.tensor([value, -1.0]) for value in (theta, prox, behav))
    loss, stats = ppo_actor_loss_fn(first, second, third, -torch.ones(2), torch.ones(2), c_clip=2.0)
    assert loss.isfinite()
    assert all(value.isfinite() for value in stats.values())


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_what_is_under_the_mask_cannot_leak(poison):
    """NaN or infinity at an untrained token does not change the loss, the gradients or the metrics."""
    *clean, mask = random_tokens(1)

    def run(theta, prox, behav, A):
        leaf = theta.clone().requires_grad_()
        loss, stats = ppo_actor_loss_fn(leaf, prox, behav, A, mask, c_clip=2.0)
        loss.backward()
        return torch.stack([loss.detach(), *stats.values()]), leaf.grad

    for poisoned in range(4):
        tensors = [
            x.masked_fill(mask == 0, poison) if i == poisoned else x for i, x in enumerate(clean)
        ]
        for a, b in zip(run(*clean), run(*tensors), strict=True):
            assert torch.equal(a, b)


def test_a_dropped_token_leaves_the_sum_but_not_the_count():
    """If the cap drops one of two tokens, the sum of the loss is still divided by two."""
    zero = torch.zeros(2)
    theta = zero.clone().requires_grad_()
    loss, stats = ppo_actor_loss_fn(
        theta,
        zero,
        torch.tensor([0.0, -100.0]),
        torch.ones(2),
        torch.ones(2),
        behave_imp_weight_cap=5.0,
    )
    loss.backward()
    assert loss.item() == -0.5
    assert theta.grad is not None
    assert theta.grad.tolist() == [-0.5, 0.0]
    assert stats["dropped_share"].item() == 0.5


def test_a_weight_at_the_cap_stays():
    """A token is dropped if its behaviour weight is above the cap, and is used if its weight equals the cap."""
    zero = torch.zeros(1)
    assert (
        ppo_actor_loss_fn(zero, zero, zero, -zero + 3, zero + 1, behave_imp_weight_cap=1.0)[
            0
        ].item()
        == -3
    )


def test_dual_clip_bounds_what_one_token_can_do():
    """With dual clip, a token with A < 0 adds at most c |A| to the loss. If the dual clip limits a token's loss, the
    token's gradient is 0."""
    theta = torch.tensor([-0.001], requires_grad=True)
    old, A, one = torch.tensor([-8.0]), torch.tensor([-2.3]), torch.ones(1)
    assert ppo_actor_loss_fn(theta, old, old, A, one)[0].item() > 1000
    loss, _ = ppo_actor_loss_fn(theta, old, old, A, one, c_clip=2.0)
    loss.backward()
    assert loss.item() == pytest.approx(2 * 2.3)
    assert theta.grad is not None
    assert theta.grad.item() == 0


def test_a_clip_of_0_bounds_the_ratio_at_1():
    """With eps_clip=0 and eps_clip_higher=0, the ratio of a token counts as at most 1 if A > 0, and as at least 1 if A
    < 0."""
    theta, old = torch.tensor([0.5, -0.5, 0.5, -0.5]), torch.zeros(4)
    A = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss, stats = ppo_actor_loss_fn(
        theta, old, old, A, torch.ones(4), eps_clip=0.0, eps_clip_higher=0.0
    )
    expected = [1.0, math.exp(-0.5), -math.exp(0.5), -1.0]
    assert loss.item() == pytest.approx(-sum(expected) / 4)
    assert stats["clip_frac"].item() == 0.5


def test_the_pieces_of_a_batch_add_up():
    """A batch may be split into pieces. If every piece divides by the denominator of the whole batch, the pieces'
    losses and metrics add up to those of the whole batch."""
    tensors = random_tokens(2)
    n = int(tensors[-1].sum())
    whole, stats = ppo_actor_loss_fn(*tensors)
    pieces = [
        ppo_actor_loss_fn(*[x[rows] for x in tensors], denominator=n)
        for rows in (slice(0, 1), slice(1, 6))
    ]
    torch.testing.assert_close(sum(loss for loss, _ in pieces), whole)
    for key in stats:
        torch.testing.assert_close(sum(s[key] for _, s in pieces), stats[key])


def test_no_trained_token_is_no_loss():
    """If no token is trained, the loss, the metrics and the gradients are 0."""
    theta, prox, behav, A, _ = random_tokens(0)
    theta.requires_grad_()
    loss, stats = ppo_actor_loss_fn(theta, prox, behav, A, torch.zeros_like(A))
    loss.backward()
    assert loss.item() == 0
    assert not theta.grad.any()
    assert all(s.item() == 0 for s in stats.values())


def test_the_kl_statistic_is_k2_and_never_negative():
    """The metric kl is the mean of (log r)^2 / 2 with r = pi_theta / pi_behav, and it is always finite."""
    theta, prox, behav, A, mask = random_tokens(6)
    kl = ppo_actor_loss_fn(theta, prox, behav, A, mask)[1]["kl"]
    torch.testing.assert_close(kl, ((theta - behav)[mask > 0] ** 2).mean() / 2)
    assert ppo_actor_loss_fn(behav, behav, behav, A, mask)[1]["kl"].item() == 0
    assert ppo_actor_loss_fn(theta, prox, behav - 1e20, A, mask)[1]["kl"].isfinite()


# -- advantages -------------------------------------------------------------------------------------------------------


def make_batch(*rows: tuple[int, list[tuple[float, int, bool]]]) -> dict[str, torch.Tensor]:
    """Make a batch from rows, each given as a pair (group id, turns). A turn is given as a triple (reward, number of
    tokens, true if the turn is trained). Two prompt tokens precede each turn."""
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


def single(*rows: tuple[int, float]) -> dict[str, torch.Tensor]:
    """Make a batch from pairs (group id, reward). Each pair becomes a row with one trained turn of three tokens."""
    return make_batch(*((group, [(reward, 3, True)]) for group, reward in rows))


def per_row(advantages: torch.Tensor, batch) -> list[float]:
    """Return each row's advantage. Check that all trained tokens of a row have one advantage, and that all untrained
    tokens have the advantage 0."""
    values = []
    for row, mask in zip(advantages, batch["loss_mask"].bool(), strict=True):
        assert len(set(row[mask].tolist())) == 1
        assert not row[~mask].any()
        values.append(row[mask][0].item())
    return values


def config(mean="group", std="none", **changes) -> PPOActorConfig:
    """Make a configuration with mean_level=`mean` and std_level=`std`; `changes` sets other keys."""
    norm = {k: changes.pop(k) for k in ("per_turn", "std_constant") if k in changes}
    return PPOActorConfig(adv_norm=NormConfig(mean_level=mean, std_level=std, **norm), **changes)


def test_a_group_is_its_id_wherever_its_rows_are():
    """If the rows of two groups are interleaved, each row is still compared with the mean of its own group."""
    batch = single((7, 1.0), (3, 0.0), (7, 0.0), (3, 1.0), (7, 2.0))
    assert per_row(compute_advantages(batch, config()), batch) == [0.0, -0.5, -1.0, 0.5, 1.0]


def test_a_lost_member_does_not_move_the_others():
    """If a group has lost all members except one, the remaining member has the advantage 0. A group's lost members do
    not change the advantages of other groups."""
    batch = single((0, 1.0), (0, 0.0), (0, 1.0), (0, 0.0), (1, 1.0))
    advantages = per_row(compute_advantages(batch, config(std="group")), batch)
    assert advantages == pytest.approx([0.866, -0.866, 0.866, -0.866, 0.0], abs=1e-3)


@given(
    rewards=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.3, 1.0, -2.0])),
        min_size=1,
        max_size=12,
    ),
    order=st.randoms(use_true_random=False),
    levels=st.tuples(
        st.sampled_from(["group", "batch", "none"]), st.sampled_from(["group", "batch", "none"])
    ),
)
@settings(max_examples=60, deadline=None)
def test_the_order_of_rows_means_nothing(rewards, order, levels):
    """The order of the rows in a batch does not change any row's advantage."""
    shuffled = list(range(len(rewards)))
    order.shuffle(shuffled)
    a, b = single(*rewards), single(*(rewards[i] for i in shuffled))
    before = per_row(compute_advantages(a, config(*levels)), a)
    after = per_row(compute_advantages(b, config(*levels)), b)
    assert after == pytest.approx([before[i] for i in shuffled], abs=1e-6)


@pytest.mark.parametrize("std", ["group", "batch", "constant", "none"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.7, 1 / 3])
def test_equal_rewards_teach_nothing(reward, std):
    """If all rewards of a group are the same, its advantages are exactly 0, for every std_level."""
    batch = single(*[(0, reward)] * 7)
    assert per_row(compute_advantages(batch, config(std=std)), batch) == [0.0] * 7


@pytest.mark.parametrize("std", ["group", "batch"])
def test_a_group_of_one_teaches_nothing(std):
    """A group with one member has advantage 0."""
    batch = single((5, 3.0))
    assert per_row(compute_advantages(batch, config(std=std)), batch) == [0.0]


def test_without_a_baseline_one_rollout_keeps_its_reward():
    """Without a baseline, the advantage of a group's only member is its reward: the standard deviation of a single
    reward counts as 1."""
    batch = single((0, 3.0), (1, -1.0))
    assert per_row(compute_advantages(batch, config("none", "none")), batch) == [3.0, -1.0]
    assert per_row(compute_advantages(batch, config("none", "group")), batch) == [3.0, -1.0]


def test_the_spread_of_the_batch_and_a_constant_spread():
    """Advantages may be divided by the standard deviation of the batch or by a constant."""
    rewards = [1.0, 0.0, 4.0, 2.0]
    batch = single((0, rewards[0]), (0, rewards[1]), (1, rewards[2]), (1, rewards[3]))
    s = torch.tensor(rewards).std().item()
    expected = [0.5 / s, -0.5 / s, 1 / s, -1 / s]
    assert per_row(compute_advantages(batch, config(std="batch")), batch) == pytest.approx(
        expected, rel=1e-4
    )
    constant = config(std="constant", std_constant=0.4)
    assert per_row(compute_advantages(batch, constant), batch) == pytest.approx(
        [1.25, -1.25, 2.5, -2.5]
    )


@pytest.mark.parametrize(
    ("rewards", "keys", "expected"),
    [
        ([(0, 1.0), (0, 0.0), (0, 2.0)], {"mean_leave1out": True}, [0.0, -1.5, 1.5]),
        (
            [(0, 1.0), (0, 0.0), (1, 5.0), (1, 7.0)],
            {"std_level": "batch"},
            [0.1513, -0.1513, -0.3027, 0.3027],
        ),
        ([(0, 1.0), (0, 0.0), (0, 2.0)], {"mean_level": "none"}, [1.0, 0.0, 2.0]),
    ],
)
def test_the_spread_is_around_the_plain_mean_of_its_cell(rewards, keys, expected):
    """A cell is a set of turns whose rewards are compared with each other. The standard deviation of the rewards in a
    cell is computed around the cell's mean, whatever baseline is subtracted. In the three cases of this test, AReaL
    computes the standard deviation around the baseline (docs/differences.md)."""
    batch = single(*rewards)
    advantages = compute_advantages(batch, PPOActorConfig(adv_norm=NormConfig(**keys)))
    assert per_row(advantages, batch) == pytest.approx(expected, abs=1e-4)


def test_turns_are_compared_with_the_same_turn():
    """With per_turn=True, first turns are compared only with other first turns. With per_turn=False, all turns of a
    group share one mean."""
    batch = make_batch((0, [(1.0, 2, True), (1.0, 2, True)]), (0, [(0.0, 2, True)]))
    first, second = batch["turn_ids"][0] == 0, batch["turn_ids"][0] == 1
    A = compute_advantages(batch, config())
    assert (A[0, first][0].item(), A[0, second][0].item(), A[1, first][0].item()) == (
        0.5,
        0.0,
        -0.5,
    )
    A = compute_advantages(batch, config(per_turn=False))
    assert A[0, first][0].item() == A[0, second][0].item() == pytest.approx(1 / 3)


def test_a_score_is_not_lost_behind_a_masked_tail():
    """The trained turns of a row get their advantages even if the last turn of the row is not trained."""
    batch = make_batch((0, [(1.0, 3, True), (5.0, 2, False)]), (0, [(0.0, 3, True)]))
    assert not batch["loss_mask"][0, -2:].any()
    assert per_row(compute_advantages(batch, config()), batch) == [0.5, -0.5]


def test_a_turn_that_is_not_trained_has_no_say_in_the_baseline():
    """A turn that is not trained does not change the baseline of the trained turns."""
    rows = [(0, [(1.0, 3, True)]), (0, [(0.0, 3, True)])]
    batch = make_batch(*rows, (0, [(9.0, 3, False)]))
    assert per_row(
        compute_advantages({k: v[:2] for k, v in batch.items()}, config()), make_batch(*rows)
    ) == [0.5, -0.5]
    A = compute_advantages(batch, config())
    assert A.max().item() == 0.5
    assert not A[2].any()


def test_rewards_are_shifted_scaled_and_clipped_in_that_order():
    """A reward r becomes clip((r + bias) * scaling, -c, c)."""
    batch = single((0, 0.5), (0, 4.0), (0, -9.0))
    shaped = config("none", reward_bias=-0.5, reward_scaling=2.0, reward_clip=6.0)
    assert per_row(compute_advantages(batch, shaped), batch) == [0.0, 6.0, -6.0]


def test_the_kl_penalty_needs_a_reference():
    """Without ref_logp, kl_ctl has no effect. With ref_logp, each turn's reward is reduced by kl_ctl times the turn's
    KL distance from the reference policy."""
    batch = make_batch((0, [(1.0, 2, True), (1.0, 3, True)]))
    batch["logprobs"] = torch.where(batch["loss_mask"] > 0, -1.0, NAN)
    penalised = config("none", kl_ctl=0.1)
    assert per_row(compute_advantages(batch, penalised), batch) == [1.0]
    batch["ref_logp"] = torch.where(batch["turn_ids"] == 1, -3.0, -1.0)
    A = compute_advantages(batch, penalised)
    assert A[0, batch["turn_ids"][0] == 0].tolist() == pytest.approx([1.0, 1.0])
    assert A[0, batch["turn_ids"][0] == 1].tolist() == pytest.approx([1 - 0.1 * 3 * 2] * 3)


def test_nothing_to_train_is_defined():
    """If no token of a batch is trained, all advantages of the batch are 0."""
    batch = make_batch((0, [(1.0, 3, False)]), (1, [(2.0, 3, False)]))
    assert not compute_advantages(batch, config(std="group")).any()


def test_a_broken_trajectory_says_what_is_wrong():
    """compute_advantages raises an error if a trained token belongs to no turn or if a reward is not finite."""
    outside = single((0, 1.0))
    outside["turn_ids"][:] = -1
    with pytest.raises(ValueError, match="turn_ids is -1"):
        compute_advantages(outside, config())
    with pytest.raises(ValueError, match="not finite"):
        compute_advantages(single((0, NAN), (0, 1.0)), config())


# -- variations of the loss -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("action", ["mask", "clamp"])
@pytest.mark.parametrize("cap", [1.6, None])
@pytest.mark.parametrize("how", ["token", "sequence", "constant"])
def test_weights_and_aggregation_by_the_loop(level, action, cap, how):
    """A loop over rows and tokens computes the same loss as ppo_actor_loss_fn, for all settings of the behaviour weight
    (level, action, cap) and of the aggregation."""
    theta, prox, behav, A, mask = random_tokens(11, spread=0.5)
    prox = (
        prox + torch.linspace(-0.6, 0.9, 6)[:, None]
    )  # the shifts put some behaviour weights above the cap
    eps, C = 0.2, 50
    mask[2] = 0  # a row without trained tokens
    total, capped, n_tokens, n_rows, weights = 0.0, 0, int(mask.sum()), 0, []
    for i in range(len(mask)):
        trained = [t for t in range(mask.shape[1]) if mask[i, t]]
        if not trained:
            continue
        n_rows += 1
        sum_log = sum((prox[i, t] - behav[i, t]).item() for t in trained)
        row_log = max(-20, min(20, sum_log if level == "sequence" else sum_log / len(trained)))
        row = 0.0
        for t in trained:
            u = math.exp(theta[i, t] - prox[i, t])
            w = math.exp(prox[i, t] - behav[i, t] if level == "token" else row_log)
            if cap is not None and w > cap:
                capped, w = capped + 1, cap if action == "clamp" else 0.0
            weights.append(w)
            a = A[i, t].item()
            row += w * min(u * a, min(max(u, 1 - eps), 1 + eps) * a)
        total += row / {"token": 1, "sequence": len(trained), "constant": C}[how]
    expected = total / (n_tokens if how == "token" else n_rows)
    assert (capped > 0) == (cap is not None)
    assert capped < n_tokens

    lengths = mask.sum(1)
    shares = aggregation_weights(lengths, how, C)
    loss, stats = ppo_actor_loss_fn(
        theta,
        prox,
        behav,
        A * shares[:, None],
        mask,
        behave_imp_weight_cap=cap,
        behave_imp_weight_level=level,
        behave_imp_weight_action=action,
    )
    assert loss.item() == pytest.approx(-expected, rel=1e-5)
    assert stats["dropped_share"].item() == pytest.approx(capped / n_tokens)
    assert stats["behave_weight_mean"].item() == pytest.approx(sum(weights) / n_tokens)
    assert stats["behave_weight_square"].item() == pytest.approx(
        sum(w * w for w in weights) / n_tokens
    )


def test_a_sequences_weight_does_not_read_what_is_masked():
    """The behaviour weight of a sequence ignores masked values. The loss is the same for a (B, T) grid of tokens and
    for a flat list of tokens with sequence_ids."""
    theta, prox, behav, A, mask = random_tokens(12)
    keys: dict[str, Any] = {"behave_imp_weight_level": "sequence"}
    clean, _ = ppo_actor_loss_fn(theta, prox, behav, A, mask, **keys)
    dirty, _ = ppo_actor_loss_fn(theta, prox.masked_fill(mask == 0, NAN), behav, A, mask, **keys)
    on = mask > 0
    ids = torch.arange(6)[:, None].expand(mask.shape)[on]
    flat, _ = ppo_actor_loss_fn(
        *(x[on] for x in (theta, prox, behav, A, mask)), sequence_ids=ids, **keys
    )
    assert torch.equal(clean, dirty)
    torch.testing.assert_close(flat, clean)


def test_aggregation_says_what_is_missing():
    """The setting loss_aggregation=constant without max_new_tokens raises an error."""
    with pytest.raises(ValueError, match="max_new_tokens"):
        aggregation_weights(torch.tensor([1]), "constant", None)
