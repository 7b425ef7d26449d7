"""Each variant of the loss against a slow loop in its paper's notation, which reaches every
branch."""

import math
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from test_ppo import random_tokens

from extras.losses import cispo, gspo, guess_errors, icepop, reject, row_weight, truncate
from ppo import ppo_actor_loss_fn


def rows_of(mask: torch.Tensor) -> list[list[int]]:
    """For each row, the columns of its trained tokens."""
    return [[t for t in range(mask.shape[1]) if mask[i, t]] for i in range(len(mask))]


def clip_term(u: float, a: float) -> float:
    return min(u * a, min(max(u, 0.8), 1.2) * a)


@pytest.mark.parametrize("how", ["token", "sum", "mean"])
@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("cap", [1.6, None])
def test_weights_of_rows_and_truncation_by_the_loop(how, clamp, cap):
    """w is a token's, the product over its row or their geometric mean; at the cap it is dropped or
    becomes the cap."""
    theta, prox, behav, A, mask = random_tokens(11, spread=0.5)
    prox = prox + torch.linspace(-0.6, 0.9, 6)[:, None]
    mask[2] = 0
    total, capped, n, weights = 0.0, 0, int(mask.sum()), []
    for i, trained in enumerate(rows_of(mask)):
        logs = [(prox[i, t] - behav[i, t]).item() for t in trained]
        for t, own in zip(trained, logs):
            row = sum(logs) / (1 if how == "sum" else len(logs))
            w = math.exp(own if how == "token" else max(-20, min(20, row)))
            if cap is not None and w > cap:
                capped, w = capped + 1, cap if clamp else 0.0
            weights.append(w)
            total += w * clip_term(math.exp(theta[i, t] - prox[i, t]), A[i, t].item())
    assert (capped > 0) == (cap is not None)
    loss_fn = truncate if clamp else ppo_actor_loss_fn
    if how != "token":
        loss_fn = partial(row_weight, how=how, base=loss_fn)
    loss, stats = loss_fn(theta, prox, behav, A, mask, behave_imp_weight_cap=cap)
    assert loss.item() == pytest.approx(-total / n, rel=1e-5)
    assert stats["dropped_share"].item() == pytest.approx(capped / n)
    assert stats["behave_weight_mean"].item() == pytest.approx(sum(weights) / n)
    assert stats["behave_weight_square"].item() == pytest.approx(sum(w * w for w in weights) / n)


@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("cap", [2.0, None])
def test_icepop_bounds_the_weight_on_both_sides(clamp, cap):
    """A weight below the floor is left out, or with `truncate` becomes the floor."""
    log_w = torch.linspace(-1.5, 1.5, 61, dtype=torch.float64)
    zero, hits = torch.zeros_like(log_w), Counter[str]()
    slow = []
    for x in log_w.tolist():
        w = math.exp(x)
        side = "below" if w < 0.5 else "above" if cap and w > cap else "inside"
        hits[side] += 1
        bound = 0.5 if side == "below" else cap
        slow.append(w if side == "inside" else bound if clamp else 0.0)
    assert (hits["below"] > 0, hits["above"] > 0) == (True, cap is not None)
    theta = zero.clone().requires_grad_()
    loss_fn = partial(truncate if clamp else icepop, floor=0.5)
    one = torch.ones_like(zero)
    loss, stats = loss_fn(theta, zero, -log_w, one, one, behave_imp_weight_cap=cap)
    loss.backward()
    assert theta.grad is not None
    assert (-61 * theta.grad).tolist() == pytest.approx(slow)
    assert stats["dropped_share"].item() == pytest.approx((61 - hits["inside"]) / 61)


TESTS: dict[str, Any] = {"geometric_mean": 1.2, "k2": 0.7, "veto": 0.35}


@pytest.mark.parametrize("names", [[name] for name in TESTS] + [list(TESTS)], ids=str)
@pytest.mark.parametrize("is_row_weight", [False, True])
def test_a_rejected_row_leaves_the_sum_whatever_weight_its_tokens_have(names, is_row_weight):
    """Rows that fail a test leave the sum but not the count; the others keep their weights."""
    theta, prox, behav, A, mask = random_tokens(5, shape=(20, 40), spread=0.45)
    prox = prox + torch.linspace(-0.3, 0.3, 20, dtype=torch.float64)[:, None]
    mask[4] = 0
    hits: Counter[str] = Counter()
    total, left_out = 0.0, 0
    for i, trained in enumerate(rows_of(mask)):
        if not trained:
            continue
        x = [(prox[i, t] - behav[i, t]).item() for t in trained]  # log w
        mean = math.exp(sum(x) / len(x))
        failed = {
            "geometric_mean": mean > 1.2 or mean < 1 / 1.2,
            "k2": max(d * d / 2 for d in x) > 0.7,
            "veto": min(math.exp(d) for d in x) < 0.35,
        }
        hits.update(name for name in names if failed[name])
        if any(failed[name] for name in names):
            left_out += len(trained)
            continue
        hits["kept"] += 1
        for t, d in zip(trained, x):
            w = mean if is_row_weight else math.exp(d)
            total += w * clip_term(math.exp(theta[i, t] - prox[i, t]), A[i, t].item())
    assert all(hits[name] for name in [*names, "kept"])
    base = row_weight if is_row_weight else ppo_actor_loss_fn
    chosen: Any = {"veto": 1e-9} | {name: TESTS[name] for name in names}
    loss, stats = reject(theta, prox, behav, A, mask, base=base, **chosen)
    assert loss.item() == pytest.approx(-total / int(mask.sum()))
    assert stats["dropped_share"].item() == pytest.approx(left_out / int(mask.sum()))


def test_gspo_clips_the_geometric_mean_of_a_whole_answer():
    """J = 1/M sum_i |y_i| min(s_i A_i, clip(s_i) A_i), s_i = (pi_theta / pi_old)^(1 / |y_i|)."""
    theta, old, _, A, mask = random_tokens(8, shape=(40, 30), spread=0.2)
    A = A[:, :1].expand(A.shape)  # one advantage for each answer
    mask[7] = 0
    leaf, slow_leaf = theta.clone().requires_grad_(), theta.clone().requires_grad_()
    hits: Counter[str] = Counter()
    terms = []
    for i, trained in enumerate(rows_of(mask)):
        if not trained:
            continue
        s = (slow_leaf - old)[i, trained].mean().exp()
        a = A[i, 0]
        clipped = s.clamp(0.98, 1.03)
        terms.append(len(trained) * torch.minimum(s * a, clipped * a))
        side = "inside" if bool(clipped == s) else "above" if s > 1 else "below"
        hits[side + ", clipped" * bool(clipped * a < s * a)] += 1
    assert len(hits) == 5
    slow = -torch.stack(terms).sum() / mask.sum()
    slow.backward()
    loss, stats = gspo(leaf, old, old, A, mask, eps_clip=0.02, eps_clip_higher=0.03)
    loss.backward()
    assert loss.item() == pytest.approx(slow.item(), rel=1e-6)
    torch.testing.assert_close(leaf.grad, slow_leaf.grad, rtol=1e-5, atol=1e-9)
    assert 0 < stats["clip_frac"].item() < 1


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    """The gradient for log pi_theta is -w clip(u) A / n, even where u is clipped."""
    theta, prox, behav, A, mask = random_tokens(9)
    gradient, hits, n = torch.zeros_like(theta), Counter[str](), int(mask.sum())
    for i, trained in enumerate(rows_of(mask)):
        for t in trained:
            u, w = math.exp(theta[i, t] - prox[i, t]), math.exp(prox[i, t] - behav[i, t])
            clipped, a = min(max(u, 0.6), 1.6), A[i, t].item()
            side = "below" if u < clipped else "above" if u > clipped else "inside"
            hits[side + " +-"[int(math.copysign(1, a))]] += 1
            hits["dropped"] += w > 2.0
            hits["clipped"] += u != clipped
            gradient[i, t] = -(0.0 if w > 2.0 else w) * clipped * a / n
    assert len(hits) == 8
    leaf = theta.clone().requires_grad_()
    keys: dict[str, Any] = {"eps_clip": 0.4, "eps_clip_higher": 0.6, "behave_imp_weight_cap": 2.0}
    loss, stats = cispo(leaf, prox, behav, A, mask, **keys)
    loss.backward()
    torch.testing.assert_close(leaf.grad, gradient)
    assert stats["clip_frac"].item() == pytest.approx(hits["clipped"] / n)
    assert stats["dropped_share"].item() == pytest.approx(hits["dropped"] / n)


VARIANTS = [
    *(cispo, gspo, truncate, row_weight, partial(icepop, floor=0.7)),
    *(partial(reject, **{name: bound}) for name, bound in TESTS.items()),
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_untrained_tokens_change_no_variant(variant, poison):
    """Not even NaN at an untrained token leaks, and a grid gives what flat tokens give."""
    *clean, mask = random_tokens(1)
    results = []
    for tensors in (clean, [x.masked_fill(mask == 0, poison) for x in clean]):
        leaf = tensors[0].clone().requires_grad_()
        loss, stats = variant(leaf, *tensors[1:], mask)
        loss.backward()
        results.append((torch.stack([loss, *stats.values()]).detach(), leaf.grad))
    assert all(map(torch.equal, *results))
    on = mask > 0
    ids = torch.arange(6)[:, None].expand(mask.shape)[on]
    flat, _ = variant(*(x[on] for x in (*clean, mask)), sequence_ids=ids, denominator=int(on.sum()))
    torch.testing.assert_close(flat, results[0][0][0])


def test_the_reported_errors_are_those_of_the_definition():
    """Absolute and relative, of log pi_prox, w and u, for each guess."""
    g = torch.Generator().manual_seed(2)
    prox, old, theta = (-3 * torch.rand(20, generator=g, dtype=torch.float64) - 0.1 for _ in "pbt")
    a = torch.rand(20, generator=g, dtype=torch.float64)
    errors = guess_errors(prox, old, theta, a)
    assert len(errors) == 18
    guesses = {
        "loglinear": old + a * (theta - old),
        "linear": ((1 - a) * old.exp() + a * theta.exp()).log(),
        "rollout": old,
    }
    for name, guess in guesses.items():
        pairs = {
            "logp": (guess, prox),
            "behave_weight": ((guess - old).exp(), (prox - old).exp()),
            "ratio": ((theta - guess).exp(), (theta - prox).exp()),
        }
        for key, (mine, truth) in pairs.items():
            error = (mine - truth).abs()
            torch.testing.assert_close(errors[f"{name}_{key}_abs_error"], error)
            torch.testing.assert_close(errors[f"{name}_{key}_rel_error"], error / truth.abs())
