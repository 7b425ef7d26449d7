"""Variants of the advantage: length penalty, KL penalty, leave-one-out baseline, GAE, and a filter of groups.

ppo.py compares the return of a turn with the other returns of its cell. By default, a cell contains the turns of one
group that have the same turn number. Each function below implements one published variant of the computation of
advantages. Each variant has a configuration key that switches it on. `compute_advantages` in ppo.py calls four of the
functions in this order:

    `overlong_penalty`        The return of a turn near its length limit is lowered (DAPO, arXiv 2503.14476).
    `kl_estimate`             The return of a turn is lowered by the KL divergence from a reference model.
    `leave_one_out_mean`      The baseline is the mean of the other turns in the cell (RLOO, arXiv 2402.14740).
    `generalised_advantage`   A token near the end of a turn gets more of the turn's advantage (GAE, arXiv 1506.02438).

**Example.** Let a group have three members with the returns 1, 0 and 2. With the group's mean as baseline the
advantages are 0, -1 and 1. With the leave-one-out mean the advantages are 1 - 1 = 0, 0 - 1.5 = -1.5 and 2 - 0.5 = 1.5.

**One turn is one action.** A turn gets its reward at its last token. The module cache.py has already added the rewards
of later turns to earlier turns. GAE is computed within a single turn, because GAE over several turns would add the
rewards of later turns a second time.

**The bound of k3.** The estimator k3 of the KL divergence contains pi_ref / pi, which can be huge for a single token.
For a token with log (pi / pi_ref) = -8, k3 is 2,972. With kl_ctl = .001, a token with a k3 of 2,972 lowers the return
of its turn by 3, which is more than most rewards. AReaL, slime and this module bound k3 by 10. With the bound 10 and
kl_ctl = .001, a token lowers the return by at most .01. This module does not bound k1 and k2, because they grow more
slowly than k3. If k2 had a bound, a token above the bound would have no gradient.

**KL of the whole turn.** With kl_placement=reward, the KL of all tokens of a turn is subtracted from the turn's return
before the baseline is subtracted. AReaL subtracts the KL-to-go: after the baseline is subtracted, the advantage of
token t is lowered by the KL of token t and of all later tokens. In expectation, the KL of the whole turn and the
KL-to-go give the same gradient, because the KL of the tokens before t does not depend on token t. As in RLOO, this
module treats a turn as one action: with the KL of the whole turn, all tokens of a turn have the same advantage. The KL
of the whole turn is part of the return, so the baseline removes the KL that all members of a group have in common. The
KL-to-go shrinks towards the end of a turn, so it gives late tokens a higher advantage than early tokens. With the KL of
the whole turn, the advantage of a token includes the KL of earlier tokens, so the advantage is noisier than with the
KL-to-go.

**Filter.** If all members of a group earned the same reward, every advantage is 0, so training on the group changes
nothing. `informative` is a filter that rejects groups whose advantages are all 0, like the dynamic sampling of DAPO.
The key should_accept_fn sets the filter. Most rejected groups have a prompt that is too easy or too hard. If the filter
rejects every group, the run waits for ever and the metric `rejected` grows.
"""

import torch
from torch import Tensor


def overlong_penalty(lengths: Tensor, limit: int, margin: int, factor: float) -> Tensor:
    """Return the penalty (N,) of N turns, from 0 to -factor, given their `lengths` (N,) in tokens.

    Up to `limit - margin` tokens the penalty is 0. Above `limit - margin` tokens the penalty falls linearly to -factor
    at `limit` tokens.
    """
    # r_len = -factor * clip((n - (limit - margin)) / margin, 0, 1)
    return -factor * ((lengths - (limit - margin)) / margin).clamp(0, 1)


def log_ratio(logp: Tensor, other_logp: Tensor) -> Tensor:
    """Return log (p / q), given log p and log q. The ratio of two probabilities of 0 counts as 1, not as NaN."""
    both_zero = logp.isinf() & (logp == other_logp)
    return torch.where(both_zero, 0.0, logp - other_logp)


def kl_estimate(logp: Tensor, ref_logp: Tensor, kind: str) -> Tensor:
    """Return one estimate of KL(pi || pi_ref), in nats, for each token that pi sampled.

    The result has the shape of logp. `kind` is an estimator of Schulman, "Approximating KL Divergence":

        `k1`    k1 is unbiased and can be negative. In a loss, the expected gradient of k1 is 0.
        `k2`    k2 is biased and never negative. In a loss, the expected gradient of k2 is the gradient of the KL
                divergence.
        `k3`    k3 is unbiased and never negative. A k3 above 10 counts as 10, and its gradient in a loss is then 0.
    """
    # k1 = x, k2 = x^2 / 2, k3 = min(exp(-x) - 1 + x, 10), with x = log (pi / pi_ref)
    x = log_ratio(logp, ref_logp)
    if kind == "k1":
        return x
    if kind == "k2":
        return x.square() / 2
    x = x.clamp(-20, 20)  # the clamp keeps exp(-x) finite
    return (torch.expm1(-x) + x).clamp(max=10)


def leave_one_out_mean(x: Tensor, cell: Tensor) -> Tensor:
    """Return for each entry of x (N,) the mean of the other entries in its cell, (N,).

    For an entry that is alone in its cell, the result is the entry itself, so the entry's advantage becomes 0.
    """
    # b_i = (sum_j x_j - x_i) / (n - 1)
    others = torch.bincount(cell)[cell] - 1  # (N,)
    return torch.where(others > 0, (torch.bincount(cell, x)[cell] - x) / others.clamp(min=1), x)


def generalised_advantage(advantages: Tensor, turn_of: Tensor, gamma: float, lam: float) -> Tensor:
    """Spread the advantages of N turns (N,) over their M tokens and return the advantages of the tokens, (M,).

    turn_of (M,) is the index of each token's turn in `advantages`. Tokens of different turns may be interleaved.
    """
    # GAE is A_t = delta_t + gamma lambda A_(t+1). Without a critic, delta_t is A at the turn's last token and 0 at all
    # other tokens. Without a critic, A_t = (gamma lambda)^(last - t) A, where `last` is the turn's last token.
    order = torch.argsort(
        turn_of, stable=True
    )  # (M,) tokens sorted by turn; tokens of a turn keep their order
    ends = torch.bincount(turn_of, minlength=len(advantages)).cumsum(
        0
    )  # (N,) end of each turn in `order`
    to_end = torch.empty_like(turn_of)  # (M,) number of later tokens in the token's turn
    to_end[order] = ends[turn_of[order]] - 1 - torch.arange(len(turn_of))
    return advantages[turn_of] * (gamma * lam) ** to_end


def informative(trajectory: dict[str, Tensor]) -> bool:
    """Return whether two members of a group earned different rewards in trained turns with the same turn number.

    To reject groups with `informative`, set should_accept_fn=training.advantages.informative. The function reads
    loss_mask, turn_ids and turn_rewards (B, T).
    """
    trained = trajectory["loss_mask"] > 0
    turns, rewards = (
        trajectory["turn_ids"][trained],
        trajectory["turn_rewards"][trained],
    )  # (M,), (M,)
    return any(bool((rewards[turns == k] != rewards[turns == k][0]).any()) for k in turns.unique())
