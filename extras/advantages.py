"""Variants of the advantages for the key `actor.advantages`, and a group filter.

Each variant changes the input or the output of `base`, which is ppo.compute_advantages or another
variant:

    my_advantages = functools.partial(rloo, base=functools.partial(overlong, limit=2048))

Example: three members of a group have the final rewards (returns) 1, 0 and 2. Before the division
by std, the advantages are 0, -1 and 1 with the group's mean as baseline. With `rloo`, a member's
baseline is the mean of the other two returns, which gives 0, -1.5 and 1.5.

A turn's return already includes the rewards of later turns (cache.py). So `gae` stays within a
turn, and the return counts as the reward of the turn's last token. The KL that `kl_in_reward`
subtracts also stays within a turn: it changes no other turn's return.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ppo import compute_advantages, find_cells, log_ratio, number_turns

Batch = dict[str, Tensor]
Advantages = Callable[..., Tensor]


def rloo(
    batch: Batch,
    *,
    mean_level: str = "group",
    per_turn: bool = True,
    base: Advantages = compute_advantages,
    **keys: Any,
) -> Tensor:
    """RLOO (2402.14740): a turn's baseline is the mean return of the other turns in its cell
    (ppo.py)."""
    A = base(batch, mean_level=mean_level, per_turn=per_turn, **keys)
    if mean_level == "none":
        return A
    rows, turn_ids, turn_of = number_turns(batch)
    cell = find_cells(mean_level, batch["group_ids"][rows].long(), turn_ids * per_turn)
    n = torch.bincount(cell)[cell]  # (N,)
    # R_i - (sum R - R_i) / (n - 1) = n / (n - 1) * (R_i - mean R); a lone turn has A = 0
    A[batch["loss_mask"] > 0] *= (n / (n - 1).clamp(min=1))[turn_of]
    return A


def gae(
    batch: Batch, *, gamma_lambda: float = 0.99, base: Advantages = compute_advantages, **keys: Any
) -> Tensor:
    """GAE (1506.02438) without a critic: the earlier a token is in its turn, the closer its
    advantage is to 0."""
    A = base(batch, **keys)
    turn_of = number_turns(batch)[2]
    # A_t = (gamma lambda)^(last - t) A
    last = torch.bincount(turn_of).cumsum(0)[turn_of] - 1  # (M,)
    A[batch["loss_mask"] > 0] *= gamma_lambda ** (last - torch.arange(len(turn_of)))
    return A


def with_costs(batch: Batch, costs: Tensor, base: Advantages, **keys: Any) -> Tensor:
    """Subtract `costs` (N,) from the rewards of the N turns. Return the advantages."""
    trained = batch["loss_mask"] > 0
    rewards = batch["turn_rewards"].clone()
    rewards[trained] -= costs[number_turns(batch)[2]]
    changed = batch | {"turn_rewards": rewards}
    A = base(changed, **keys)
    batch["loss_mask"] = changed["loss_mask"]  # `base` may have masked turns in the copy
    return A


def overlong(
    batch: Batch,
    *,
    limit: int = 1024,
    margin: int = 256,
    factor: float = 1.0,
    base: Advantages = compute_advantages,
    **keys: Any,
) -> Tensor:
    """DAPO (2503.14476): over the last `margin` tokens before `limit`, the reward of a turn falls
    linearly by `factor`. Set `limit` to gconfig.max_new_tokens."""
    n = torch.bincount(number_turns(batch)[2])  # (N,)
    # r <- r - factor * clip((n - (limit - margin)) / margin, 0, 1)
    return with_costs(batch, factor * ((n - (limit - margin)) / margin).clamp(0, 1), base, **keys)


def kl_in_reward(
    batch: Batch,
    *,
    weight: float = 0.01,
    kind: str = "k1",
    reward_scaling: float = 1.0,
    base: Advantages = compute_advantages,
    **keys: Any,
) -> Tensor:
    """R <- R - weight * KL, as in AReaL. The KL is the sum of `kl_estimate` over the turn's
    tokens. Set ref.path to the reference model, and leave actor.kl_ctl at 0, or the loss adds a
    second KL penalty."""
    trained = batch["loss_mask"] > 0
    kl = kl_estimate(batch["logprobs"][trained], batch["ref_logp"][trained], kind)  # (M,)
    costs = weight / reward_scaling * torch.bincount(number_turns(batch)[2], kl)  # (N,)
    return with_costs(batch, costs.float(), base, reward_scaling=reward_scaling, **keys)


def kl_estimate(logp: Tensor, ref_logp: Tensor, kind: str) -> Tensor:
    """Return an estimate of KL(pi || pi_ref) at each token that pi sampled (Schulman).

    Of the three kinds, k1 is unbiased but can be negative, k2 is biased, and k3 is unbiased and
    never negative. We cap k3 at 10. Without the cap, k3 would be 2,972 at log (pi / pi_ref) = -8,
    so one token could change the sign of an advantage.
    """
    # k1 = x, k2 = x^2 / 2, k3 = min(exp(-x) - 1 + x, 10), with x = log (pi / pi_ref)
    x = log_ratio(logp, ref_logp)
    k3 = torch.expm1(-x.clamp(-20, 20)) + x.clamp(-20, 20)
    return {"k1": x, "k2": x.square() / 2, "k3": k3.clamp(max=10)}[kind]


def without_truncated(
    batch: Batch, *, base: Advantages = compute_advantages, **keys: Any
) -> Tensor:
    """DAPO: mask the turns that the token limit cut off, because more tokens might have let them
    succeed. A masked turn counts in no loss and no baseline."""
    last = batch["turn_ids"] == batch["turn_ids"].amax(1, keepdim=True)  # (rows, T)
    cut = last & (batch["truncated"] > 0)[:, None]
    kept = batch["loss_mask"].masked_fill(cut, 0)
    if kept.any():
        batch["loss_mask"] = kept
    return base(batch, **keys)


def row_mean(
    batch: Batch, *, length: int | None = None, base: Advantages = compute_advantages, **keys: Any
) -> Tensor:
    """Every row counts the same in the loss, as in GRPO. With `length` = L, every token counts
    1 / (rows * L), as in Dr. GRPO (2503.20783). Both ways assume actor.ppo_n_minibatches=1."""
    # The batch has M trained tokens in S rows, n of them in the token's row. The loss is a mean
    # over M tokens and proportional to A, so A <- A * M / (S n).
    A = base(batch, **keys)
    n = (batch["loss_mask"] > 0).sum(1, keepdim=True)  # (rows, 1)
    mean = n.sum() / torch.count_nonzero(n).clamp(min=1)
    return A * mean / (length or n.clamp(min=1))


def informative(trajectory: Batch) -> bool:
    """DAPO's dynamic sampling, for should_accept_fn: reject a group in which turns with the same
    number always have equal rewards, because all its advantages are 0."""
    trained = trajectory["loss_mask"] > 0
    turns = trajectory["turn_ids"][trained]
    rewards = trajectory["turn_rewards"][trained]
    return any(bool((rewards[turns == k] != rewards[turns == k][0]).any()) for k in turns.unique())
