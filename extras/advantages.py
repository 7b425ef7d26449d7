"""Variants of the advantages, as functions that `actor.advantages` names, and a filter of groups.

Each has the arguments of ppo.compute_advantages, and its own parameters as defaults. Example: three
members have the returns 1, 0 and 2. With the group's mean as baseline their advantages are 0, -1
and 1; leaving out the member itself (RLOO), 0, -1.5 and 1.5.

One turn is one action: its reward comes at its last token, and cache.py has already added the
rewards of later turns. So GAE stays within a turn, and the KL of a turn is part of its return.
"""

import torch
from torch import Tensor

from ppo import Turns, cell_std, log_ratio, normalise


def rloo(
    batch: dict[str, Tensor],
    *,
    mean_level: str = "group",
    std_level: str = "none",
    per_turn: bool = True,
    reward_scaling: float = 1.0,
) -> Tensor:
    """RLOO (2402.14740): the baseline is the mean of the other turns of the cell. A turn that is
    alone gets 0."""
    turns = Turns(batch)
    R, cell = turns.rewards.double() * reward_scaling, turns.cells(mean_level, per_turn)
    # b_i = (sum_j R_j - R_i) / (n - 1)
    others = torch.bincount(cell)[cell] - 1  # (N,)
    b = torch.where(others > 0, (torch.bincount(cell, R)[cell] - R) / others.clamp(min=1), R)
    s = torch.ones(()) if std_level == "none" else cell_std(R, turns.cells(std_level, per_turn))
    return turns.spread((R - b) / s)


def gae(
    batch: dict[str, Tensor],
    *,
    mean_level: str = "group",
    std_level: str = "group",
    per_turn: bool = True,
    reward_scaling: float = 1.0,
    gamma_lambda: float = 0.99,
) -> Tensor:
    """GAE (1506.02438) without a critic: A_t = (gamma lambda)^(last - t) A, so that earlier tokens
    of a turn get a smaller share."""
    turns = Turns(batch)
    A = normalise(turns.rewards * reward_scaling, turns, mean_level, std_level, per_turn)
    n = torch.bincount(turns.turn_of)  # (N,) tokens of each turn, which are consecutive
    to_end = (n.cumsum(0)[turns.turn_of] - 1) - torch.arange(len(turns.turn_of))  # (M,)
    advantages = turns.spread(A)
    advantages[turns.trained] *= gamma_lambda**to_end
    return advantages


def dapo(
    batch: dict[str, Tensor],
    *,
    mean_level: str = "group",
    std_level: str = "group",
    per_turn: bool = True,
    reward_scaling: float = 1.0,
    limit: int = 1024,
    margin: int = 256,
    factor: float = 1.0,
    mask_truncated: bool = False,
) -> Tensor:
    """DAPO (2503.14476): the reward of a turn falls linearly by `factor` over the last `margin`
    tokens before `limit`. `mask_truncated` takes turns that were cut out of the loss and of every
    baseline, because their reward is unknown; it changes batch["loss_mask"]."""
    if mask_truncated:
        last = batch["turn_ids"] == batch["turn_ids"].amax(1, keepdim=True)  # (B, T)
        cut = last & (batch["truncated"] > 0)[:, None]
        batch["loss_mask"] = batch["loss_mask"].masked_fill(cut, 0)
    turns = Turns(batch)
    n = torch.bincount(turns.turn_of)  # (N,)
    # r <- r - factor * clip((n - (limit - margin)) / margin, 0, 1)
    rewards = turns.rewards - factor * ((n - (limit - margin)) / margin).clamp(0, 1)
    return turns.spread(normalise(rewards * reward_scaling, turns, mean_level, std_level, per_turn))


def kl_in_reward(
    batch: dict[str, Tensor],
    *,
    mean_level: str = "group",
    std_level: str = "group",
    per_turn: bool = True,
    reward_scaling: float = 1.0,
    beta: float = 0.01,
    kind: str = "k1",
) -> Tensor:
    """R <- R - beta * sum over the turn's tokens of the KL to pi_ref, AReaL's default place for it.
    The batch has ref_logp (B, T), so set a small actor.kl_ctl or ref.path, too."""
    turns = Turns(batch)
    kl = kl_estimate(batch["logprobs"][turns.trained], batch["ref_logp"][turns.trained], kind)
    returns = (turns.rewards * reward_scaling).index_add(0, turns.turn_of, kl, alpha=-beta)
    return turns.spread(normalise(returns, turns, mean_level, std_level, per_turn))


def kl_estimate(logp: Tensor, ref_logp: Tensor, kind: str) -> Tensor:
    """An estimate of KL(pi || pi_ref) at each token that pi sampled, in nats (Schulman).

    k1 is unbiased and may be negative; k2 is biased and has the right gradient in a loss; k3 is
    unbiased and never negative, and here at most 10: at log (pi / pi_ref) = -8 it would be 2,972.
    """
    # k1 = x, k2 = x^2 / 2, k3 = min(exp(-x) - 1 + x, 10), with x = log (pi / pi_ref)
    x = log_ratio(logp, ref_logp)
    if kind == "k1":
        return x
    if kind == "k2":
        return x.square() / 2
    x = x.clamp(-20, 20)
    return (torch.expm1(-x) + x).clamp(max=10)


def informative(trajectory: dict[str, Tensor]) -> bool:
    """Whether two members of a group earned different rewards in turns of one number, as a
    should_accept_fn (DAPO's dynamic sampling). Rejected groups are prompts that are too easy or
    hard."""
    trained = trajectory["loss_mask"] > 0
    turns, rewards = trajectory["turn_ids"][trained], trajectory["turn_rewards"][trained]
    return any(bool((rewards[turns == k] != rewards[turns == k][0]).any()) for k in turns.unique())
