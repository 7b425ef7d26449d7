"""Corrections for tokens and rows with extreme probability ratios, and for truncated answers.

ppo.py multiplies each token's objective by the behaviour weight w = pi_prox / pi_behav, and clips u = pi_theta /
pi_prox. Except for the cap of w, all corrections are off by default.

**The weight w needs two bounds.** Server and trainer never agree exactly on pi_behav, so log w is sometimes too large
and sometimes too small. If only tokens with a large w are dropped, the mean of w falls below 1 and the gradient is
biased. IcePop drops the tokens whose w is too large or too small.

**Tests of whole rows.** A bound on w tests each token separately. A row of 100 tokens that all have w = 1.05 exceeds no
usual bound on w, but pi_prox would generate the row 1.05^100 = 131 times as often as pi_behav. Three tests drop the
rows on which pi_prox and pi_behav differ too much:

    `geometric mean`   exp(mean log w) of the row is outside 1/c .. c. The geometric mean does not grow with the length
                       of the row, so the bound c must be close to 1, such as 1.01. A bound c of 5 drops almost no row.
    `max k2`           For at least one token, (log w)^2 / 2 is above a bound: pi_prox and pi_behav differ much.
    `veto`             One token has w below a bound such as 1e-4: this token is very unlikely under pi_prox.

**A row's weight.** The exact weight of a row is the product of its tokens' w. The product has one factor per token, so
it is often far from 1 in a long row. A cap on the product therefore drops mostly long rows. The geometric mean of all w
stays near 1 in long rows, but it is not the exact weight. The key `behave_imp_weight_level` chooses the kind of weight.

**A row's ratio.** PPO clips the ratio u of each token separately. GSPO clips the geometric mean of u, so all tokens of
an answer keep or lose their gradient together. The geometric mean of u is much closer to 1 than the u of a single
token, so GSPO's bounds are close to 1: 3e-4 below 1 and 4e-4 above 1.

**A clip that keeps the gradient.** A token that PPO clips has no gradient, so a rare but useful word may never become
likelier. CISPO uses the clipped u only as a constant factor of log pi_theta. In CISPO a clipped token keeps its
gradient, and the factor u of the gradient is at most 1 + eps_higher. CISPO is usually run without a lower bound of u.

**Effective sample size.** If the weight w of a few tokens is much too large, the gradient is as noisy as the gradient
of a small batch. The effective sample size (ESS) is (sum w)^2 / sum w^2. The gradient of a batch is as noisy as the
gradient of ESS tokens with equal weights. VCPO (`ess_lr_power=0.5`) multiplies AdamW's learning rate by sqrt(ESS / M),
where M is the number of tokens. VCPO scales the learning rate and not the gradient, because AdamW normalises gradients.

**Truncated answers.** An answer that was cut at its token limit might have succeeded with more tokens, so its reward is
unknown. `without_truncated` removes a row's last turn, if it was cut, from the loss and from every baseline.

Sources: IcePop (arXiv 2510.18855), GSPO (2507.18071), CISPO (2506.13585), VCPO (2602.17616, with one weight for each
row), DAPO (2503.14476, for truncated answers), and verl's pages on rollout correction for the tests that reject rows.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from training.config import PPOActorConfig


def reduce_sequence(x: Tensor, mask: Tensor, sequence_ids: Tensor, how: str) -> Tensor:
    """For each entry, return the sum, mean, amax or amin of x over the trained tokens of the entry's sequence.

    The result is 0 for a sequence without trained tokens.
    """
    ids = sequence_ids.expand(x.shape)  # the index of each token's sequence
    reduced = x.new_zeros(int(ids.max()) + 1 if ids.numel() else 0)  # one result for each sequence
    return reduced.scatter_reduce(0, ids[mask], x[mask], how, include_self=False)[ids]


def sequence_weight(log_weight: Tensor, mask: Tensor, sequence_ids: Tensor, level: str) -> Tensor:
    """Return log w of each token: w is the token's own weight (level "token") or the weight of its sequence
    ("sequence", "geometric")."""
    if level == "token":
        return log_weight
    # sequence: log w = sum_t log w_t          geometric: log w = 1/n sum_t log w_t
    how = "sum" if level == "sequence" else "mean"
    return reduce_sequence(log_weight, mask, sequence_ids, how).clamp(
        -20, 20
    )  # the clamp keeps w finite


def behaviour_weight(log_weight: Tensor, config: PPOActorConfig) -> tuple[Tensor, Tensor]:
    """Return w = exp(log_weight) without a gradient, and a mask of the weights outside floor .. cap.

    A weight outside floor .. cap becomes 0 (action "mask") or the nearest bound (action "clamp").
    """
    # IcePop: w <- w if floor <= w <= cap, else 0
    weight = torch.exp(log_weight).detach()
    low = config.behave_imp_weight_floor or 0.0
    high = torch.inf if config.behave_imp_weight_cap is None else config.behave_imp_weight_cap
    outside = (weight < low) | (weight > high)
    clamped = weight.clamp(low, high)
    return clamped if config.behave_imp_weight_action == "clamp" else torch.where(
        outside, 0.0, weight
    ), outside


def rejected(
    log_weight: Tensor, mask: Tensor, sequence_ids: Tensor, config: PPOActorConfig
) -> Tensor:
    """Return a mask of the tokens whose sequence fails at least one of the tests that the configuration turns on."""
    result = torch.zeros_like(mask)
    # geometric mean: |1/n sum_t log w_t| > log c
    if config.reject_geometric_mean is not None:
        mean = reduce_sequence(log_weight, mask, sequence_ids, "mean")
        result |= mean.abs() > math.log(config.reject_geometric_mean)
    # max k2: max_t (log w_t)^2 / 2 > c
    if config.reject_max_k2 is not None:
        result |= (
            reduce_sequence(log_weight.square() / 2, mask, sequence_ids, "amax")
            > config.reject_max_k2
        )
    # veto: min_t w_t < c
    if config.reject_veto is not None:
        result |= reduce_sequence(log_weight, mask, sequence_ids, "amin") < math.log(
            config.reject_veto
        )
    return result


def effective_sample_size(stats: Mapping[str, float]) -> float:
    """Return the effective sample size of the weights w, divided by the number of weights."""
    # (sum w)^2 / (n sum w^2) = (mean w)^2 / mean of w^2
    square = stats["behave_weight_square"]
    return stats["behave_weight_mean"] ** 2 / square if square > 0 else 0.0


def cispo_objective(logp: Tensor, u: Tensor, u_clipped: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """Return the objective of CISPO for each token, and a mask of the tokens whose u is clipped."""
    # objective = stop_gradient(clip(u)) A log pi_theta
    return u_clipped.detach() * A * logp, u != u_clipped


def without_truncated(batch: dict[str, Tensor]) -> Tensor:
    """Return loss_mask (B, T), with 0 for the last turn of each row if that turn was cut at its token limit."""
    last = batch["turn_ids"] == batch["turn_ids"].amax(
        1, keepdim=True
    )  # (B, T) the tokens of the row's last turn
    return batch["loss_mask"].masked_fill(last & (batch["truncated"] > 0)[:, None], 0)
