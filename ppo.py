"""The objective of decoupled PPO, and the advantages of turns.

    J = mean over trained tokens of   w min(u A, clip(u, 1 - eps, 1 + eps_higher) A)

    u = pi_theta / pi_prox     how far pi_theta has moved from pi_prox, the policy before the step
    w = pi_prox / pi_behav     how far pi_prox is from pi_behav, the policy that sampled the token

Here pi_theta is the policy that the optimizer changes, and A is the advantage of the token's turn.
Textbook PPO has only one old policy: it clips around the policy that sampled the data. If the data
is stale, this policy is several versions old, but the clip still keeps pi_theta close to it.
Decoupled PPO (arXiv 2110.00641; AReaL, 2505.24298) clips around pi_prox instead. The weight w,
which has no gradient, corrects for the fact that pi_behav sampled the token, not pi_prox. Where
data is fresh, pi_prox is pi_behav, w is 1, and J is the objective of textbook PPO. The key
`actor.use_decoupled_loss=false` sets w to 1 always (`describe_mode`).

Example: a token with pi_behav = 0.2, pi_prox = 0.3 and pi_theta = 0.42 has w = 1.5 and u = 1.4.
With eps = 0.2 and A = 1 the clip lowers u to 1.2, so the token's term in J is 1.5 * 1.2 = 1.8.

If a token's w exceeds `behave_imp_weight_cap`, its term in J is 0, but the mean still counts the
token. This cap limits the variance of the gradient, but adds a bias. The clip limits how far a
token's term can rise, but not how far it can fall. If A < 0 and u is large, the minimum in J is
u A, so one token can dominate the step. With `c_clip` (dual clip), the minimum is at least
c_clip A.

The advantage of a turn with final reward R is A = (R - mean) / std. By default, mean and std are
taken over the turn's **cell**: the turns of its group that have the same turn_id. For example, the
second turns of a group's episodes form a cell. All tokens of a turn get its A. There is no critic.

The keys `actor.loss` and `actor.advantages` may name other functions with the same arguments
(extras/losses.py, extras/advantages.py).

Shapes: a batch has padded rows of T tokens, N trained turns and M trained tokens.
"""

from typing import Any

import torch
from torch import Tensor


def log_ratio(logp: Tensor, other_logp: Tensor, mask: Tensor | bool = True) -> Tensor:
    """Return logp - other_logp, or 0 where `mask` is not set or both are -inf."""
    both_zero = logp.isinf() & (logp == other_logp)
    return torch.where(mask & ~both_zero, logp - other_logp, 0.0)


def clip(u: Tensor, eps_clip: float, eps_clip_higher: float | None) -> Tensor:
    return u.clamp(1 - eps_clip, 1 + (eps_clip if eps_clip_higher is None else eps_clip_higher))


def ppo_actor_loss_fn(
    logp: Tensor,
    prox_logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
    behave_imp_weight_cap: float | None = None,
    sequence_ids: Tensor | None = None,
    denominator: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss -J and its metrics. All per-token tensors have one shape, (rows, T) or flat.

    `logp`, `prox_logp` and `old_logp` are log pi_theta, log pi_prox and log pi_behav. In standard
    PPO, `prox_logp` and `old_logp` are equal. Values outside `loss_mask` are ignored, even NaN. The
    tensors hold one piece of a mini-batch. `denominator` is the number of trained tokens in the
    whole mini-batch, so the losses of the pieces add up to the mini-batch's loss. `sequence_ids`,
    the row of each token, is for the variants in extras/losses.py.
    """
    mask = loss_mask.bool()
    A = torch.where(mask, advantages, 0.0)
    u = log_ratio(logp, prox_logp.detach(), mask).exp()
    w = log_ratio(prox_logp, old_logp, mask).detach().exp()

    # min(u A, clip(u, 1 - eps, 1 + eps_higher) A), and for A < 0 at least c_clip A
    objective = torch.minimum(u * A, clip(u, eps_clip, eps_clip_higher) * A)
    if c_clip is not None:
        objective = torch.where(A < 0, torch.maximum(objective, c_clip * A), objective)

    # w = 0 above the cap
    dropped = mask & (w > (torch.inf if behave_imp_weight_cap is None else behave_imp_weight_cap))
    w = w.masked_fill(dropped | ~mask, 0.0)

    # loss = -sum w objective / M
    denominator = mask.sum().clamp(min=1) if denominator is None else denominator
    loss = -(w * objective).sum() / denominator
    sums = {
        "clip_frac": torch.count_nonzero((objective != u * A) & (w > 0)),
        "behave_weight_mean": w.sum(),
        "behave_weight_square": w.square().sum(),
        "dropped_share": torch.count_nonzero(dropped),
    }
    return loss, {name: x / denominator for name, x in sums.items()}


def number_turns(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors: the row (N,) and the turn id (N,) of each trained turn, and the index
    (M,) of each trained token's turn. Tokens are in the order of the batch, row after row."""
    trained = batch["loss_mask"] > 0  # (rows, T)
    key = trained.nonzero()[:, 0] * 2**32 + batch["turn_ids"][trained]  # (M,)
    turns, turn_of = torch.unique_consecutive(key, return_inverse=True)
    return turns // 2**32, turns % 2**32, turn_of


def find_cells(level: str, groups: Tensor, turn_ids: Tensor) -> Tensor:
    """Return the index of each turn's cell, (N,). With level "batch", a cell spans all groups."""
    group = groups if level == "group" else torch.zeros_like(groups)
    return torch.unique(torch.stack([group, turn_ids]), dim=1, return_inverse=True)[1]


def cell_mean(x: Tensor, cell: Tensor) -> Tensor:
    """Replace each entry of x (N,) by the mean of its cell."""
    return (torch.bincount(cell, x) / torch.bincount(cell))[cell]


def cell_std(x: Tensor, cell: Tensor) -> Tensor:
    """Replace each entry of x (N,) by its cell's std + 1e-5, or by 1 if the std is 0."""
    # s^2 = sum (x - mean)^2 / (n - 1)
    squares = torch.bincount(cell, (x - cell_mean(x, cell)).square())  # (cells,)
    variance = (squares / (torch.bincount(cell) - 1).clamp(min=1))[cell]  # (N,)
    return torch.where(variance > 0, variance.sqrt() + 1e-5, 1.0)


def compute_advantages(
    batch: dict[str, Tensor],
    *,
    mean_level: str = "group",
    std_level: str = "group",
    per_turn: bool = True,
    reward_scaling: float = 1.0,
) -> Tensor:
    """Return the advantages as float32 (rows, T), with 0 where nothing is trained.

    The batch has loss_mask, turn_ids, turn_rewards (rows, T) and group_ids (rows,). Untrained turns
    do not count towards the mean and std.
    """
    trained = batch["loss_mask"] > 0  # (rows, T)
    # A sum of equal float32 numbers is exact in float64, so equal rewards give A = 0.
    rewards = (batch["turn_rewards"][trained] * reward_scaling).double()  # (M,)
    rows, turn_ids, turn_of = number_turns(batch)
    R = rewards.new_zeros(len(rows)).scatter(0, turn_of, rewards)  # (N,)

    A = R
    # A = (R - mean) / std
    groups = batch["group_ids"][rows].long()
    if not per_turn:  # all turns get the number 0, so that all turns of a group are compared
        turn_ids = torch.zeros_like(turn_ids)
    if mean_level != "none":
        A = R - cell_mean(R, find_cells(mean_level, groups, turn_ids))
    if std_level != "none":
        A = A / cell_std(R, find_cells(std_level, groups, turn_ids))
    advantages = torch.zeros(trained.shape)
    advantages[trained] = A.float()[turn_of]
    return advantages


def describe_mode(config: Any) -> str:
    """Say which objective the keys of `actor` choose, and where each policy's log-probabilities
    come from."""
    server, forward = "the inference server", "a forward pass before the update"
    if not config.use_decoupled_loss:
        return f"standard PPO: pi_old from {forward if config.recompute_logprob else server}"
    prox = {
        "recompute": forward,
        "loglinear": "pi_behav and pi_theta by their versions, with no forward pass",
        "metrics": f"{forward}, and the error of three guesses is logged",
    }[config.prox_logp_method]
    return f"decoupled PPO: pi_behav from {server},\npi_prox from {prox}"
