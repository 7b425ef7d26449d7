"""Each test compares a correction with a slow loop in the notation of the correction's paper. The test inputs exercise
every branch of each slow loop."""

import math
from collections import Counter

import pytest
import torch
from test_ppo import make_batch, ppo_actor_loss_fn, random_tokens
from trainers import make_config

from ppo import aggregation_weights, compute_advantages
from training.config import NormConfig, PPOActorConfig
from training.corrections import behaviour_weight, rejected, sequence_weight, without_truncated

LOOSE = {"behave_imp_weight_cap": None}  # no bound on the behaviour weight


def rows_of(mask: torch.Tensor) -> list[list[int]]:
    """Return for each row the columns of its trained tokens."""
    return [[t for t in range(mask.shape[1]) if mask[i, t]] for i in range(len(mask))]


@pytest.mark.parametrize("action", ["mask", "clamp"])
@pytest.mark.parametrize(("floor", "cap"), [(0.5, 2.0), (0.5, None), (None, 2.0), (None, None)])
def test_icepop_bounds_the_weight_on_both_sides(action, floor, cap):
    """With the action `mask`, a behaviour weight outside floor .. cap becomes 0. With the action `clamp`, a behaviour
    weight outside floor .. cap becomes the nearest bound."""
    log_w = torch.linspace(-1.5, 1.5, 61, dtype=torch.float64)
    hits: Counter[str] = Counter()
    slow = []
    for x in log_w.tolist():
        w = math.exp(x)
        side = "below" if floor and w < floor else "above" if cap and w > cap else "inside"
        hits[side] += 1
        if side != "inside":
            w = 0.0 if action == "mask" else (floor if side == "below" else cap)
        slow.append(w)
    config = PPOActorConfig(
        behave_imp_weight_floor=floor, behave_imp_weight_cap=cap, behave_imp_weight_action=action
    )
    weight, outside = behaviour_weight(log_w, config)
    assert weight.tolist() == pytest.approx(slow)
    assert int(outside.sum()) == hits["below"] + hits["above"]
    assert (hits["below"] > 0, hits["above"] > 0) == (floor is not None, cap is not None)


def test_icepop_drops_a_token_that_the_trainer_finds_impossible():
    """If the behaviour weight has a floor, a token with pi_prox / pi_behav = e^-8 has the gradient 0 and counts as
    dropped."""
    theta = torch.tensor([-8.5, -1.0], requires_grad=True)
    prox, behav, one = torch.tensor([-8.5, -1.0]), torch.tensor([-0.5, -1.0]), torch.ones(2)
    loss, stats = ppo_actor_loss_fn(theta, prox, behav, one, one, behave_imp_weight_floor=0.5)
    loss.backward()
    assert theta.grad is not None
    assert theta.grad.tolist() == [0.0, -0.5]
    assert stats["dropped_share"].item() == 0.5


def test_a_sequences_weight_is_the_product_or_the_geometric_mean():
    """The product of a row's weights w is exp(sum log w), clipped to e^-20 .. e^20. The geometric mean of the weights
    is exp(mean log w)."""
    _, prox, behav, _, mask = random_tokens(1)
    log_w = prox - behav + torch.linspace(-2, 2, 6, dtype=torch.float64)[:, None]
    mask[3] = 0
    ids, bounded = torch.arange(6)[:, None], 0
    for level in ("token", "sequence", "geometric"):
        fast = sequence_weight(log_w, mask > 0, ids, level)
        for i, trained in enumerate(rows_of(mask)):
            total = sum(log_w[i, t].item() for t in trained)
            bounded += level == "sequence" and abs(total) > 20
            for t in trained:
                own = {
                    "token": log_w[i, t].item(),
                    "sequence": total,
                    "geometric": total / len(trained),
                }[level]
                assert fast[i, t].item() == pytest.approx(max(-20, min(20, own)))
    assert 0 < bounded < 5


def test_the_product_of_a_long_row_meets_the_cap_and_the_geometric_mean_does_not():
    """In a row of 100 tokens with w = 1.05, the product of all w is 131, so a cap of 5 on the product drops the row.
    The geometric mean of all w is 1.05, so a cap of 5 on the geometric mean keeps the row."""
    log_w, on = torch.full((1, 100), math.log(1.05)), torch.ones(1, 100)
    zero = torch.zeros(1, 100)
    shares = {}
    for level in ("token", "sequence", "geometric"):
        _, stats = ppo_actor_loss_fn(zero, log_w, zero, on, on, behave_imp_weight_level=level)
        shares[level] = stats["dropped_share"].item()
    assert shares == {"token": 0, "sequence": 1, "geometric": 0}


TESTS = {"reject_geometric_mean": 1.2, "reject_max_k2": 0.7, "reject_veto": 0.35}


@pytest.mark.parametrize("keys", [[name] for name in TESTS] + [list(TESTS)])
@pytest.mark.parametrize("level", ["token", "geometric"])
def test_a_rejected_row_leaves_the_sum_whatever_weight_its_tokens_have(keys, level):
    """A row is left out of the loss if the geometric mean of its weights, its largest k2 or its smallest weight fails
    the configured test. A row that passes the configured tests keeps its weights."""
    theta, prox, behav, A, mask = random_tokens(5, shape=(20, 40), spread=0.45)
    prox = prox + torch.linspace(-0.3, 0.3, 20, dtype=torch.float64)[:, None]
    mask[4] = 0
    hits: Counter[str] = Counter()
    total = 0.0
    for i, trained in enumerate(rows_of(mask)):
        if not trained:
            continue
        x = [(prox[i, t] - behav[i, t]).item() for t in trained]  # log w of each token
        mean = math.exp(sum(x) / len(x))
        failed = {
            "reject_geometric_mean": mean > 1.2 or mean < 1 / 1.2,
            "reject_max_k2": max(d * d / 2 for d in x) > 0.7,
            "reject_veto": min(math.exp(d) for d in x) < 0.35,
        }
        hits.update(name for name in keys if failed[name])
        if any(failed[name] for name in keys):
            hits["rows left out"] += 1
            hits["tokens left out"] += len(trained)
            continue
        hits["kept"] += 1
        for t, d in zip(trained, x):
            u, a = math.exp(theta[i, t] - prox[i, t]), A[i, t].item()
            w = math.exp(d) if level == "token" else mean
            total += w * min(u * a, min(max(u, 0.8), 1.2) * a)
    assert all(hits[name] for name in keys)
    assert hits["kept"]
    chosen = {name: TESTS[name] for name in keys}
    loss, stats = ppo_actor_loss_fn(
        theta, prox, behav, A, mask, behave_imp_weight_level=level, **LOOSE, **chosen
    )
    assert loss.item() == pytest.approx(-total / int(mask.sum()))
    assert stats["dropped_share"].item() == pytest.approx(hits["tokens left out"] / int(mask.sum()))


def test_tests_of_a_sequence_read_trained_tokens_only():
    """An untrained token never causes the rejection of its row. Flat tokens with sequence_ids give the same result as a
    (B, T) grid."""
    log_w = torch.tensor([[-9.0, 0.0, 0.1], [0.0, 0.0, -9.0]])
    mask = torch.tensor([[False, True, True], [True, True, True]])
    config = PPOActorConfig(reject_veto=0.01)
    ids = torch.tensor([[0], [1]])
    assert rejected(log_w, mask, ids, config).tolist() == [[False] * 3, [True] * 3]
    flat = rejected(log_w[mask], mask[mask], ids.expand(2, 3)[mask], config)
    assert flat.tolist() == [False, False, True, True, True]
    assert not rejected(log_w, mask, ids, PPOActorConfig()).any()


def test_gspo_clips_the_geometric_mean_of_a_whole_answer():
    """The loss and its gradient are those of -J, where J = 1/G sum_i min(s_i A_i, clip(s_i) A_i) is GSPO's objective
    for G answers y_i, with s_i = (pi_theta(y_i) / pi_old(y_i))^(1/|y_i|)."""
    theta, old, _, A, mask = random_tokens(8, shape=(40, 30), spread=0.2)
    A = A[:, :1].expand(A.shape)  # one advantage for each answer
    mask[7] = 0
    eps, higher = 0.02, 0.03
    leaf, slow_leaf = theta.clone().requires_grad_(), theta.clone().requires_grad_()
    hits: Counter[str] = Counter()
    terms = []
    for i, trained in enumerate(rows_of(mask)):
        if not trained:
            continue
        s = torch.exp(sum(slow_leaf[i, t] - old[i, t] for t in trained) / len(trained))
        a = A[i, 0]
        clipped = s.clamp(1 - eps, 1 + higher)
        terms.append(torch.minimum(s * a, clipped * a))
        if bool(clipped == s):
            hits["inside"] += 1
        else:
            hits[
                f"{'above' if s > 1 else 'below'}, {'clipped' if clipped * a < s * a else 'not clipped'}"
            ] += 1
    assert len(hits) == 5
    slow = -torch.stack(terms).mean()
    slow.backward()

    shares = aggregation_weights(mask.sum(1), "sequence", None)
    keys = {"eps_clip": eps, "eps_clip_higher": higher, "importance_sampling_level": "sequence"}
    loss, stats = ppo_actor_loss_fn(leaf, old, old, A * shares[:, None], mask, **keys)
    loss.backward()
    assert loss.item() == pytest.approx(slow.item(), rel=1e-6)
    torch.testing.assert_close(leaf.grad, slow_leaf.grad, rtol=1e-5, atol=1e-9)
    assert 0 < stats["clip_frac"].item() < 1


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    """CISPO's objective, with the behaviour weight w, is J = mean(w * stop_gradient(clip(u)) * A * log pi_theta). In a
    batch of n tokens, the gradient of J with respect to a token's log pi_theta is w clip(u) A / n, even if u is
    clipped."""
    theta, prox, behav, A, mask = random_tokens(9)
    eps, higher = 0.4, 0.6
    total, gradient, hits = 0.0, torch.zeros_like(theta), Counter[str]()
    n = int(mask.sum())
    for i, trained in enumerate(rows_of(mask)):
        for t in trained:
            u, w, a = (
                math.exp(theta[i, t] - prox[i, t]),
                math.exp(prox[i, t] - behav[i, t]),
                A[i, t].item(),
            )
            clipped = min(max(u, 1 - eps), 1 + higher)
            hits[
                ("below" if u < clipped else "above" if u > clipped else "inside")
                + " +-"[int(math.copysign(1, a))]
            ] += 1
            w = 0.0 if w > 2.0 else w
            hits["dropped"] += w == 0
            hits["clipped"] += w > 0 and u != clipped
            total += w * clipped * a * theta[i, t].item()
            gradient[i, t] = -w * clipped * a / n
    assert len(hits) == 8
    leaf = theta.clone().requires_grad_()
    keys = {"eps_clip": eps, "eps_clip_higher": higher, "behave_imp_weight_cap": 2.0}
    loss, stats = ppo_actor_loss_fn(leaf, prox, behav, A, mask, use_cispo_loss=True, **keys)
    loss.backward()
    assert loss.item() == pytest.approx(-total / n)
    torch.testing.assert_close(leaf.grad, gradient)
    assert stats["clip_frac"].item() == pytest.approx(hits["clipped"] / n)


@pytest.mark.parametrize(
    "keys", [{"use_cispo_loss": True}, {"importance_sampling_level": "sequence"}, TESTS]
)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_untrained_tokens_change_no_correction(keys, poison):
    """With every correction, NaN or infinity at untrained tokens changes neither the loss nor the gradient."""
    *clean, mask = random_tokens(1)
    results = []
    for tensors in (clean, [x.masked_fill(mask == 0, poison) for x in clean]):
        theta, prox, behav, A = tensors
        leaf = theta.clone().requires_grad_()
        loss, stats = ppo_actor_loss_fn(leaf, prox, behav, A, mask, **keys)
        loss.backward()
        results.append((torch.stack([loss.detach(), *stats.values()]), leaf.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def truncated_batch() -> dict[str, torch.Tensor]:
    """Return four rows of one group. The second row and the last turn of the third row are truncated."""
    batch = make_batch(
        (0, [(1.0, 3, True)]),
        (0, [(0.0, 5, True)]),
        (0, [(0.5, 2, True), (0.0, 4, True)]),
        (0, [(0.0, 2, True), (1.0, 3, True)]),
    )
    return batch | {"truncated": torch.tensor([0, 1, 1, 0], dtype=torch.int32)}


def test_a_truncated_turn_is_not_trained():
    """The last turn of each truncated row is removed from the loss mask. All other turns of the batch stay in the loss
    mask."""
    batch = truncated_batch()
    slow = batch["loss_mask"].clone()
    for i in range(4):
        last = max(batch["turn_ids"][i].tolist())
        for t in range(slow.shape[1]):
            if batch["truncated"][i] and batch["turn_ids"][i, t] == last:
                slow[i, t] = 0
    assert torch.equal(without_truncated(batch), slow)
    assert (batch["loss_mask"].sum(1) - slow.sum(1)).tolist() == [0, 5, 4, 0]


def test_a_truncated_turn_has_no_say_in_the_baseline():
    """`without_truncated` removes a truncated turn from the baseline. In a group of four rows with one truncated first
    turn, the baseline of the first turns is the mean over the other three rows."""
    batch = truncated_batch()
    config = make_config(adv_norm=NormConfig(std_level="none"))
    before = compute_advantages(batch, config)
    after = compute_advantages(batch | {"loss_mask": without_truncated(batch)}, config)
    assert before[0, 2].item() == pytest.approx(1 - 1.5 / 4)
    assert after[0, 2].item() == pytest.approx(1 - 1.5 / 3)
    assert not after[1].any()
