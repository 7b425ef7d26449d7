r"""The objective of decoupled PPO, and the advantages that it weighs.

    J = mean over trained tokens of   w min(u A, clip(u, 1 - eps, 1 + eps_higher) A)

    u = pi_theta / pi_prox     how far this update has moved from the policy at the start of the
    step
    w = pi_prox / pi_behav     how far that policy is from the one that sampled the token

Standard PPO has one old policy for both purposes: the clip is around the policy that sampled. With
stale data that policy is several versions old, so the clip would hold the new policy back there.
Decoupled PPO (arXiv 2110.00641, AReaL 2505.24298) clips around the newest policy, pi_prox, and
corrects for the one that sampled by the weight w, which has no gradient. Where data is fresh,
pi_prox is pi_behav, w is 1, and J is the objective of standard PPO.

Example: a token with pi_behav = 0.2, pi_prox = 0.3 and pi_theta = 0.45 has w = 1.5 and u = 1.5.
With eps = 0.2 and A = 1 the clip lowers u to 1.2, so the token's term in J is 1.5 * 1.2 = 1.8.

A token whose w exceeds the cap counts 0 in J, but still counts in the mean. For A < 0 the term u A
has no lower bound; dual clip gives it the bound c A.

The **advantage** of a turn is its return minus the mean of its cell, divided by the cell's spread:
A = (R - mean) / std. A cell holds the turns with the same number in all conversations of a group,
so the k-th turn is compared with the k-th turns. All tokens of a turn get its advantage.

Not promised: the clip does not bound u, because other tokens' gradients move a clipped token, too.
The cap biases the gradient. There is no critic. Variants are functions with these signatures, which
a key names (extras/losses.py, extras/advantages.py); docs/algorithm.md has every equation.

Shapes: a batch has B rows and T columns, N trained turns and M trained tokens.
"""

from typing import Any

import torch
from torch import Tensor


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
    """Return the loss -J and its metrics. All tensors are (B, T), or (N,) for N flat tokens.

    `logp`, `prox_logp`, `old_logp` are log pi_theta, with a gradient, log pi_prox and log pi_behav.
    Values where `loss_mask` is 0 are ignored, even NaN. `denominator` divides the sums; by default
    it is the number of trained tokens, and for a piece that of its whole mini-batch.
    `sequence_ids`, the row of each token, is for variants.
    """
    mask, log_u, log_w, A = prepare(logp, prox_logp, old_logp, advantages, loss_mask)
    objective, clipped = clipped_objective(log_u.exp(), A, eps_clip, eps_clip_higher, c_clip)
    # w = pi_prox / pi_behav, without a gradient; above the cap, the token counts 0
    w = log_w.exp().detach()
    dropped = w > (torch.inf if behave_imp_weight_cap is None else behave_imp_weight_cap)
    w = w.masked_fill(dropped | ~mask, 0.0)
    return reduce_loss(w, objective, clipped, dropped & mask, mask, logp, old_logp, denominator)


def prepare(
    logp: Tensor, prox_logp: Tensor, old_logp: Tensor, advantages: Tensor, loss_mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the mask, log u, log w and A, with 0 where nothing is trained."""
    mask = loss_mask.bool()
    log_u = torch.where(mask, log_ratio(logp, prox_logp.detach()), 0.0)
    log_w = torch.where(mask, log_ratio(prox_logp.detach(), old_logp), 0.0)
    return mask, log_u, log_w, torch.where(mask, advantages, 0.0)


def log_ratio(logp: Tensor, other_logp: Tensor) -> Tensor:
    """log (p / q); 0 for two probabilities of 0, not NaN."""
    both_zero = logp.isinf() & (logp == other_logp)
    return torch.where(both_zero, 0.0, logp - other_logp)


def clipped_objective(
    u: Tensor, A: Tensor, eps_clip: float, eps_clip_higher: float | None, c_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return each token's objective, and whether a clip has changed it."""
    higher = eps_clip if eps_clip_higher is None else eps_clip_higher
    # min(u A, clip(u, 1 - eps, 1 + eps_higher) A), and for A < 0 at least c A
    objective = torch.minimum(u * A, u.clamp(1 - eps_clip, 1 + higher) * A)
    if c_clip is not None:
        objective = torch.where(A < 0, torch.maximum(objective, c_clip * A), objective)
    return objective, objective != u * A


def reduce_loss(
    w: Tensor,
    objective: Tensor,
    clipped: Tensor,
    dropped: Tensor,
    mask: Tensor,
    logp: Tensor,
    old_logp: Tensor,
    denominator: float | Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -sum(w * objective) / denominator, and the metrics of the loss."""
    denominator = mask.sum().clamp(min=1) if denominator is None else denominator
    loss = -(w * objective).sum() / denominator
    with torch.no_grad():
        # k2, an estimate of the KL between pi_theta and pi_behav; the clamp keeps the sum finite
        k2 = torch.where(mask, log_ratio(logp, old_logp), 0.0).clamp(-1e4, 1e4).square() / 2
        sums = {
            "clip_frac": torch.count_nonzero(clipped & (w > 0)),
            "behave_weight_mean": w.sum(),
            "behave_weight_square": w.square().sum(),
            "dropped_share": torch.count_nonzero(dropped),
            "kl": k2.sum(),
        }
    return loss, {name: x / denominator for name, x in sums.items()}


# ---- advantages


def compute_advantages(
    batch: dict[str, Tensor],
    *,
    mean_level: str = "group",
    std_level: str = "group",
    per_turn: bool = True,
    reward_scaling: float = 1.0,
) -> Tensor:
    """Return the advantages (B, T) float32, 0 where nothing is trained.

    The batch has loss_mask, turn_ids, turn_rewards (B, T) and group_ids (B,). Raises ValueError if
    a trained token belongs to no turn, or its reward is not finite.
    """
    turns = Turns(batch)
    returns = turns.rewards * reward_scaling  # (N,)
    return turns.spread(normalise(returns, turns, mean_level, std_level, per_turn))


class Turns:
    """The N trained turns of a batch, and the tokens that belong to them."""

    def __init__(self, batch: dict[str, Tensor]) -> None:
        self.trained = batch["loss_mask"] > 0  # (B, T)
        turn_ids = batch["turn_ids"][self.trained].long()  # (M,)
        rewards = batch["turn_rewards"][self.trained].float()  # (M,)
        if bool((turn_ids < 0).any()):
            raise ValueError("loss_mask is 1 on a token whose turn_ids is -1")
        if not bool(rewards.isfinite().all()):
            raise ValueError("turn_rewards is not finite on a trained token: look at the reward")
        # A turn starts where the row or the turn id changes.
        rows = self.trained.nonzero()[:, 0]  # (M,)
        starts = torch.ones(len(rows), dtype=torch.bool)  # (M,)
        starts[1:] = (rows[1:] != rows[:-1]) | (turn_ids[1:] != turn_ids[:-1])
        self.turn_of = starts.cumsum(0) - 1  # (M,) from 0 to N - 1
        self.rewards = rewards[starts]  # (N,) the final reward of each turn
        self.ids = turn_ids[starts]  # (N,) its number in its conversation
        self.groups = batch["group_ids"][rows[starts]].long()  # (N,)

    def cells(self, level: str, per_turn: bool) -> Tensor:
        """The number of each turn's cell, (N,): turns of a cell are compared with each other."""
        group = self.groups if level == "group" else torch.zeros_like(self.groups)
        turn = self.ids if per_turn else torch.zeros_like(self.ids)
        return torch.unique(torch.stack([group, turn]), dim=1, return_inverse=True)[1]

    def spread(self, A: Tensor) -> Tensor:
        """Give every token of a turn its advantage: (N,) -> (B, T)."""
        advantages = torch.zeros(self.trained.shape)
        advantages[self.trained] = A.float()[self.turn_of]
        return advantages


def normalise(
    returns: Tensor, turns: Turns, mean_level: str, std_level: str, per_turn: bool
) -> Tensor:
    """Return A (N,). In float64, turns of equal returns get exactly 0."""
    # A = (R - b) / s, with mean b and standard deviation s of the turn's cell
    R, b, s = returns.double(), torch.zeros(()), torch.ones(())
    if mean_level != "none":
        b = cell_mean(R, turns.cells(mean_level, per_turn))
    if std_level != "none":
        s = cell_std(R, turns.cells(std_level, per_turn))
    return (R - b) / s


def cell_mean(x: Tensor, cell: Tensor) -> Tensor:
    """Replace each entry of x (N,) by the mean of its cell."""
    return (torch.bincount(cell, x) / torch.bincount(cell))[cell]


def cell_std(x: Tensor, cell: Tensor, eps: float = 1e-5) -> Tensor:
    """Replace each entry of x (N,) by the standard deviation of its cell plus eps; 1 where all
    entries are equal."""
    # s^2 = sum (x - mean)^2 / (n - 1)
    squares = torch.bincount(cell, (x - cell_mean(x, cell)).square())  # (cells,)
    variance = (squares / (torch.bincount(cell) - 1).clamp(min=1))[cell]  # (N,)
    return torch.where(variance > 0, variance.sqrt() + eps, 1.0)


def describe_mode(config: Any) -> str:
    """One line that says where each policy's log-probabilities come from (keys of `actor`)."""
    server, forward = "the inference server", "a forward pass before the update"
    if not config.use_decoupled_loss:
        return f"standard PPO: pi_old from {forward if config.recompute_logprob else server}"
    prox = forward
    if config.prox_logp_method == "loglinear":
        prox = "pi_behav and pi_theta by their versions, without a forward pass"
    cap = config.behave_imp_weight_cap
    weight = "no cap" if cap is None else f"tokens above {cap:g} left out"
    return f"decoupled PPO: pi_behav from {server}, pi_prox from {prox}; weight: {weight}"
