"""Variants of the loss, as functions that `actor.loss` names: `actor.loss=extras.losses.cispo`.

Each has the arguments of ppo.ppo_actor_loss_fn, and its own parameters as defaults. To change one,
name a function of your own: `my_loss = functools.partial(icepop, floor=0.3)`.

They answer two problems. Ratios of single tokens are noisy, so GSPO and the weights of rows take
them over a whole row. And server and trainer never agree exactly, so w is sometimes far too large
or too small: IcePop, truncation and the rejection of rows bound what such tokens do. VCPO lowers
the learning rate when few tokens carry all of the weight.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ppo import clipped_objective, prepare, reduce_loss

Result = tuple[Tensor, dict[str, Tensor]]


def over_rows(x: Tensor, mask: Tensor, sequence_ids: Tensor | None, how: str) -> Tensor:
    """For each token, the sum, mean, amax or amin of x over the trained tokens of its row; the row
    of a token is its index on the first axis unless `sequence_ids` says more."""
    ids = torch.arange(len(mask), device=mask.device)
    ids = ids.view(-1, *[1] * (mask.dim() - 1)) if sequence_ids is None else sequence_ids
    ids = ids.expand(x.shape)
    found = x.new_zeros(int(ids.max()) + 1 if ids.numel() else 0)
    return found.scatter_reduce(0, ids[mask], x[mask], how, include_self=False)[ids]


def capped(w: Tensor, mask: Tensor, cap: float | None, floor: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return w, 0 outside floor .. cap, and which trained tokens are outside."""
    outside = ((w < floor) | (w > (math.inf if cap is None else cap))) & mask
    return w.masked_fill(outside | ~mask, 0.0), outside


def gspo(
    logp: Tensor,
    prox_logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    eps_clip: float = 3e-4,
    eps_clip_higher: float | None = 4e-4,
    c_clip: float | None = None,
    behave_imp_weight_cap: float | None = None,
    sequence_ids: Tensor | None = None,
    denominator: float | Tensor | None = None,
) -> Result:
    """GSPO (2507.18071): u is the geometric mean over the row, so that a row is clipped as a whole.
    It is much closer to 1 than a token's u, and so are usual bounds."""
    mask, log_u, log_w, A = prepare(logp, prox_logp, old_logp, advantages, loss_mask)
    # log u = 1/n sum_t log u_t
    u = over_rows(log_u, mask, sequence_ids, "mean").exp()
    objective, clipped = clipped_objective(u, A, eps_clip, eps_clip_higher, c_clip)
    w, dropped = capped(log_w.exp().detach(), mask, behave_imp_weight_cap)
    return reduce_loss(w, objective, clipped, dropped, mask, logp, old_logp, denominator)


def cispo(
    logp: Tensor,
    prox_logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    eps_clip: float = 1.0,
    eps_clip_higher: float | None = 4.0,
    c_clip: float | None = None,
    behave_imp_weight_cap: float | None = None,
    sequence_ids: Tensor | None = None,
    denominator: float | Tensor | None = None,
) -> Result:
    """CISPO (2506.13585): the clipped u is a constant factor of log pi_theta, so a clipped token
    keeps its gradient, and a rare but useful word can become likelier."""
    mask, log_u, log_w, A = prepare(logp, prox_logp, old_logp, advantages, loss_mask)
    higher = eps_clip if eps_clip_higher is None else eps_clip_higher
    u = log_u.exp()
    u_clipped = u.clamp(1 - eps_clip, 1 + higher)
    # objective = stop_gradient(clip(u)) A log pi_theta
    objective = u_clipped.detach() * A * torch.where(mask, logp, 0.0)
    w, dropped = capped(log_w.exp().detach(), mask, behave_imp_weight_cap)
    return reduce_loss(w, objective, u != u_clipped, dropped, mask, logp, old_logp, denominator)


def icepop(
    logp: Tensor,
    prox_logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
    behave_imp_weight_cap: float | None = 5.0,
    sequence_ids: Tensor | None = None,
    denominator: float | Tensor | None = None,
    floor: float = 0.2,
    clamp: bool = False,
    level: str = "token",
    max_geometric_mean: float | None = None,
    max_k2: float | None = None,
    veto: float | None = None,
) -> Result:
    """IcePop (2510.18855) and its kin: w has a floor as well as a cap, because dropping only large
    weights makes their mean fall below 1.

    `clamp`: a weight out of bounds becomes the bound (truncated importance sampling).
    `level`: the weight of a token, of a row ("sequence", the product) or its geometric mean.
    The tests drop rows (verl, rollout correction): exp |mean log w| > max_geometric_mean; one token
    with (log w)^2 / 2 > max_k2; one token with w < veto.
    """
    mask, log_u, log_w, A = prepare(logp, prox_logp, old_logp, advantages, loss_mask)
    objective, clipped = clipped_objective(log_u.exp(), A, eps_clip, eps_clip_higher, c_clip)
    reject = torch.zeros_like(mask)
    if max_geometric_mean is not None:
        mean = over_rows(log_w, mask, sequence_ids, "mean")
        reject |= mean.abs() > math.log(max_geometric_mean)
    if max_k2 is not None:
        reject |= over_rows(log_w.square() / 2, mask, sequence_ids, "amax") > max_k2
    if veto is not None:
        reject |= over_rows(log_w, mask, sequence_ids, "amin") < math.log(veto)
    if level != "token":
        # sequence: log w = sum_t log w_t        geometric: log w = 1/n sum_t log w_t
        how = "sum" if level == "sequence" else "mean"
        log_w = over_rows(log_w, mask, sequence_ids, how).clamp(-20, 20)
    w, outside = capped(log_w.exp().detach(), mask, behave_imp_weight_cap, floor)
    if clamp:
        w = log_w.exp().detach().clamp(floor, behave_imp_weight_cap).masked_fill(~mask, 0.0)
    w, dropped = w.masked_fill(reject, 0.0), outside | (reject & mask)
    return reduce_loss(w, objective, clipped, dropped, mask, logp, old_logp, denominator)


class VCPO:
    """VCPO (2602.17616), a callback: lr <- lr * ESS^power with the effective sample size of w as a
    share of the tokens, (mean w)^2 / mean w^2. It scales the rate and not the gradient, because
    AdamW normalises gradients. A step takes the size of the step before it."""

    def __init__(self, config: Any, power: float = 0.5) -> None:
        self.power, self.run = power, None

    def on_start(self, run: Any) -> None:
        self.run = run

    def on_step(self, metrics: dict[str, Any]) -> None:
        self.run.actor.lr_scale = metrics["behave_ess"] ** self.power  # type: ignore[union-attr]
