"""Each variant of the loss is compared with one slow loop. A variant's `Row` gives the loop the w
and the u of a row."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_ppo import random_tokens
from torch import Tensor

from extras.losses import cispo, gspo, guess_errors, icepop, reject, row_weight, truncate
from ppo import ppo_actor_loss_fn

# From log w and log u of a row's n trained tokens: w, u, and which tokens are out of bounds, (n,).
Row = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def weighed(how: str = "token", low: float = 0.0, high: float = math.inf, clamp=False) -> Row:
    """w is the token's own weight, or the product or geometric mean of its row's weights. Outside
    of low .. high, w becomes 0, or with `clamp` the bound."""

    def row(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_w = {"token": x, "sum": x.sum().clamp(-20, 20), "mean": x.mean()}[how].expand(x.shape)
        w = log_w.exp()
        out = (w < low) | (w > high)
        return w.clamp(low, high) if clamp else w.masked_fill(out, 0.0), y.exp(), out

    return row


TESTS: dict[str, Any] = {"geometric_mean": 1.2, "k2": 0.7, "veto": 0.35}


def rejecting(names: list[str], how: str) -> Row:
    """A row that fails one of the named tests leaves the sum, but not the count."""

    def row(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = x.mean().exp()
        failed = {
            "geometric_mean": mean > 1.2 or mean < 1 / 1.2,
            "k2": (x * x / 2).max() > 0.7,
            "veto": x.exp().min() < 0.35,
        }
        w, u, _ = weighed(how)(x, y)
        bad = any(failed[name] for name in names)
        return w * (not bad), u, torch.full(x.shape, bad)

    return row


def whole_answer(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """GSPO: u is (pi_theta / pi_old)^(1 / n)."""
    return x.exp(), y.mean().exp().expand(y.shape), torch.zeros(x.shape)


def constant_factor(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """CISPO: the gradient for log pi_theta is -w clip(u) A / M, even where u is clipped."""
    w, _, out = weighed(high=2.0)(x, y)
    return w * y.detach().exp().clamp(0.6, 1.6), (y - y.detach()).exp(), out


WIDE = {"eps_clip": 0.4, "eps_clip_higher": 0.6, "behave_imp_weight_cap": 2.0}
CASES: list[Any] = [  # the loss, its row, its keys
    (gspo, whole_answer, {"eps_clip": 0.02, "eps_clip_higher": 0.03}),
    (cispo, constant_factor, WIDE),
]
for clamp, base in ((False, ppo_actor_loss_fn), (True, truncate)):
    with_floor = partial(truncate if clamp else icepop, floor=0.5)
    for cap in (None, 1.6):
        bound: Any = {"high": cap or math.inf, "clamp": clamp}
        keys = {"behave_imp_weight_cap": cap}
        CASES += [(base, weighed(**bound), keys), (with_floor, weighed(low=0.5, **bound), keys)]
        for how in ("sum", "mean"):
            CASES += [(partial(row_weight, how=how, base=base), weighed(how, **bound), keys)]
for names in ([*TESTS], *([name] for name in TESTS)):
    chosen: Any = {"veto": 1e-9} | {name: TESTS[name] for name in names}
    for how, base in (("token", ppo_actor_loss_fn), ("mean", row_weight)):
        CASES += [(partial(reject, base=base, **chosen), rejecting(names, how), {})]


@pytest.mark.parametrize(("loss_fn", "row", "keys"), CASES)
def test_a_variant_is_what_the_loop_adds_up(loss_fn, row, keys):
    """The sum of w min(u A, clip(u) A), with its gradient and metrics, within and out of bounds."""
    theta, prox, behav, A, mask = random_tokens(5, shape=(20, 40), spread=0.4)
    prox = prox + torch.linspace(-0.3, 0.7, 20)[:, None]
    theta = prox + 0.1 * (theta - prox) if loss_fn is gspo else theta
    mask[4] = 0
    leaf, slow_leaf = (theta.clone().requires_grad_() for _ in range(2))
    low, high = 1 - keys.get("eps_clip", 0.2), 1 + keys.get("eps_clip_higher", 0.2)
    terms, weights, out = [], [], []
    for i, trained in enumerate(mask.bool()):
        if trained.any():
            w, u, outside = row((prox - behav)[i, trained], (slow_leaf - prox)[i, trained])
            a = A[i, trained]
            terms.append(w * torch.minimum(u * a, u.clamp(low, high) * a))
            weights.append(w)
            out.append(outside)
    n = int(mask.sum())
    slow, dropped = -torch.cat(terms).sum() / n, torch.cat(out).sum().item() / n
    slow.backward()
    loss, stats = loss_fn(leaf, prox, behav, A, mask, **keys)
    loss.backward()
    assert loss.item() == pytest.approx(slow.item(), rel=1e-6)
    torch.testing.assert_close(leaf.grad, slow_leaf.grad, rtol=1e-5, atol=1e-9)
    assert stats["dropped_share"].item() == pytest.approx(dropped)
    assert dropped < 1
    assert dropped > 0 or loss_fn is gspo or keys == {"behave_imp_weight_cap": None}
    assert 0 < stats["clip_frac"].item() < 1
    if loss_fn is not cispo:
        w = torch.cat(weights)
        assert stats["behave_weight_mean"].item() == pytest.approx(w.sum().item() / n)
        assert stats["behave_weight_square"].item() == pytest.approx(w.square().sum().item() / n)


VARIANTS = [
    partial(ppo_actor_loss_fn, c_clip=2.0),
    *(cispo, gspo, truncate, row_weight, partial(icepop, floor=0.7)),
    *(partial(reject, **{name: bound}) for name, bound in TESTS.items()),
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_untrained_tokens_change_no_loss(variant, poison):
    """Not even NaN at an untrained token of any tensor leaks into loss, gradient or metrics, and a
    grid gives what flat tokens give."""
    *clean, mask = random_tokens(1)
    results: list[Any] = []
    for poisoned in [(), *((i,) for i in range(4)), range(4)]:
        given = [x.masked_fill(mask == 0, poison) for x in clean]
        tensors = [given[i] if i in poisoned else clean[i] for i in range(4)]
        leaf = tensors[0].clone().requires_grad_()
        loss, stats = variant(leaf, *tensors[1:], mask)
        loss.backward()
        results.append((torch.stack([loss, *stats.values()]).detach(), leaf.grad))
    assert all(torch.equal(x, y) for result in results for x, y in zip(results[0], result))
    on = mask > 0
    ids = torch.arange(6)[:, None].expand(mask.shape)[on]
    flat, _ = variant(*(x[on] for x in (*clean, mask)), sequence_ids=ids, denominator=int(on.sum()))
    torch.testing.assert_close(flat, results[0][0][0])


def test_the_reported_errors_are_those_of_the_definition():
    """Absolute and relative errors of log pi_prox, w and u, for each guess."""
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
