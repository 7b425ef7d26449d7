"""Variants of the loss for the key `actor.loss`, such as `actor.loss=extras.losses.cispo`.

A variant calls a `base` loss, by default ppo.py's, with changed arguments. `gspo` changes the ratio
u, and `truncate` the weight w. To combine two variants, pass one as the `base` of the other, in a
module of your own:

    my_loss = functools.partial(gspo, base=functools.partial(icepop, floor=0.3))

Most variants solve one of two problems. First, the ratio of a single token is noisy, so `gspo` and
`row_weight` take the ratio of a whole row. Second, the log-probabilities of server and trainer
never agree exactly, so `icepop`, `truncate` and `reject` bound the effect of tokens whose w is far
from 1. `reject` also looks at whole rows: if each of a row's 100 tokens has w = 1.05, no token
looks wrong, but pi_prox generates the row 131 times as often as pi_behav.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ppo import clip, log_ratio, ppo_actor_loss_fn
from training.proximal import loglinear

Result = tuple[Tensor, dict[str, Tensor]]
Loss = Callable[..., Result]


def over_rows(x: Tensor, mask: Tensor, ids: Tensor | None, how: str) -> Tensor:
    """Give each token the sum, mean, amax or amin of x over its row's trained tokens."""
    rows = torch.arange(len(mask), device=mask.device)[:, None] if ids is None else ids
    rows = rows.expand(x.shape)
    found = x.new_zeros(int(rows.max()) + 1 if rows.numel() else 0)
    return found.scatter_reduce(0, rows[mask], x[mask], how, include_self=False)[rows]


def gspo(
    logp: Tensor,
    prox_logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    sequence_ids: Tensor | None = None,
    base: Loss = ppo_actor_loss_fn,
    **keys: Any,
) -> Result:
    """GSPO (2507.18071): the geometric mean of u over a row replaces the u of each token, so a row
    is clipped as a whole. The mean is near 1, so set actor.eps_clip=3e-4 and
    actor.eps_clip_higher=4e-4."""
    mask = loss_mask.bool()
    prox = prox_logp.detach()
    # log u = 1/n sum_t log u_t
    log_u = over_rows(log_ratio(logp, prox, mask), mask, sequence_ids, "mean")
    tensors = (prox + log_u, prox, old_logp, advantages, loss_mask)
    return base(*tensors, sequence_ids=sequence_ids, **keys)


def cispo(
    logp: Tensor,
    prox_logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_higher: float | None = None,
    base: Loss = ppo_actor_loss_fn,
    **keys: Any,
) -> Result:
    """CISPO (2506.13585): the clipped u multiplies the gradient of log pi_theta as a constant. So a
    clipped token keeps its gradient, and a rare but useful word can become likelier. The clip's
    lower bound is usually switched off (actor.eps_clip=1)."""
    mask = loss_mask.bool()
    here = logp.detach()
    prox_logp = prox_logp.detach()
    u = log_ratio(here, prox_logp, mask).exp()
    factor = clip(u, eps_clip, eps_clip_higher)
    # With pi_theta in place of pi_prox, u is 1, and its gradient is that of log pi_theta.
    old_logp = here - log_ratio(prox_logp, old_logp, mask)  # keeps w
    loss, stats = base(logp, here, old_logp, factor * advantages, loss_mask, **keys)
    stats["clip_frac"] = share_of(u != factor, mask, keys)
    return loss, stats


def share_of(chosen: Tensor, mask: Tensor, keys: dict[str, Any]) -> Tensor:
    return torch.count_nonzero(chosen & mask) / (keys.get("denominator") or mask.sum().clamp(min=1))


def leave_out(
    chosen: Tensor, base: Loss, *tensors: Tensor, loss_mask: Tensor, **keys: Any
) -> Result:
    """The loss without the `chosen` tokens. The mean's denominator still counts them."""
    mask = loss_mask.bool()
    keys["denominator"] = keys.get("denominator") or mask.sum().clamp(min=1)
    loss, stats = base(*tensors, mask & ~chosen, **keys)
    return loss, stats | {"dropped_share": stats["dropped_share"] + share_of(chosen, mask, keys)}


def icepop(
    logp: Tensor,
    prox_logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    floor: float = 0.5,
    base: Loss = ppo_actor_loss_fn,
    **keys: Any,
) -> Result:
    """IcePop (2510.18855): leave out tokens with w below `floor` or above behave_imp_weight_cap. If
    only large weights were left out, the mean of w would fall below 1."""
    low = log_ratio(prox_logp, old_logp, loss_mask.bool()).exp() < floor
    return leave_out(low, base, logp, prox_logp, old_logp, advantages, loss_mask=loss_mask, **keys)


def reject(
    logp: Tensor,
    prox_logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    geometric_mean: float = math.inf,
    k2: float = math.inf,
    veto: float = 1e-4,
    sequence_ids: Tensor | None = None,
    base: Loss = ppo_actor_loss_fn,
    **keys: Any,
) -> Result:
    """Leave out a row if one token has w < veto or (log w)^2 / 2 > k2 (verl, rollout correction).
    Also leave out a row whose geometric mean of w is outside 1/c to c, where c is `geometric_mean`.
    This mean is near 1 even in long rows, so choose for example c = 1.01."""
    mask = loss_mask.bool()
    log_w = log_ratio(prox_logp, old_logp, mask)
    bad = over_rows(log_w, mask, sequence_ids, "mean").abs() > math.log(geometric_mean)
    bad |= over_rows(log_w.square() / 2, mask, sequence_ids, "amax") > k2
    bad |= over_rows(log_w, mask, sequence_ids, "amin").exp() < veto
    tensors = (logp, prox_logp, old_logp, advantages)
    return leave_out(bad, base, *tensors, loss_mask=mask, sequence_ids=sequence_ids, **keys)


def truncate(
    logp: Tensor,
    prox_logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    floor: float = 0.0,
    behave_imp_weight_cap: float | None = None,
    base: Loss = ppo_actor_loss_fn,
    **keys: Any,
) -> Result:
    """Truncated importance sampling: w is clamped to `floor` .. behave_imp_weight_cap."""
    mask = loss_mask.bool()
    prox = prox_logp.detach()
    w = log_ratio(prox, old_logp, mask).exp()
    bounded = w.clamp(floor, behave_imp_weight_cap)
    loss, stats = base(logp, prox, prox - bounded.log(), advantages, loss_mask, **keys)
    return loss, stats | {"dropped_share": share_of(w != bounded, mask, keys)}


def row_weight(
    logp: Tensor,
    prox_logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    how: str = "mean",
    sequence_ids: Tensor | None = None,
    base: Loss = ppo_actor_loss_fn,
    **keys: Any,
) -> Result:
    """All tokens of a row get the same weight: the geometric mean of their w (how="mean"), which
    stays near 1, or the product (how="sum"). The product is the exact ratio of the row's
    probabilities, but often far from 1 in a long row."""
    mask = loss_mask.bool()
    prox = prox_logp.detach()
    # log w = 1/n sum_t log w_t, or the sum itself
    log_w = over_rows(log_ratio(prox, old_logp, mask), mask, sequence_ids, how).clamp(-20, 20)
    tensors = (logp, prox, prox - log_w, advantages, loss_mask)
    return base(*tensors, sequence_ids=sequence_ids, **keys)


def guesses(old_logp: Tensor, theta_logp: Tensor, alpha: Tensor) -> dict[str, Tensor]:
    """Return three guesses of log pi_prox (N,). `loglinear` interpolates between log pi_behav and
    log pi_theta, with weight alpha for log pi_theta (training/proximal.py). `linear` interpolates
    between the probabilities, and `rollout` takes pi_behav."""
    # linear: pi_prox = (1 - alpha) pi_behav + alpha pi_theta
    linear = torch.logaddexp(torch.log1p(-alpha) + old_logp, alpha.log() + theta_logp)
    between = loglinear(old_logp, theta_logp, alpha)
    return {"loglinear": between, "linear": linear, "rollout": old_logp}


def guess_errors(
    prox_logp: Tensor, old_logp: Tensor, theta_logp: Tensor, alpha: Tensor
) -> dict[str, Tensor]:
    """Return the absolute and relative errors (N,) of each guess of log pi_prox, and of the weight
    w and the ratio u that follow from the guess. A run with actor.prox_logp_method=metrics logs
    them."""

    def quantities(prox: Tensor) -> dict[str, Tensor]:
        w, u = (x.clamp(-20, 20).exp() for x in (prox - old_logp, theta_logp - prox))
        return {"logp": prox, "behave_weight": w, "ratio": u}

    truth = quantities(prox_logp)
    errors = {}
    for name, guess in guesses(old_logp, theta_logp, alpha).items():
        for key, value in quantities(guess).items():
            error = (value - truth[key]).abs()
            errors[f"{name}_{key}_abs_error"] = error
            errors[f"{name}_{key}_rel_error"] = error / truth[key].abs().clamp(min=1e-8)
    return errors
