"""What may come between a reward and an advantage: penalties, other baselines, credit over tokens, a filter of groups.

ppo.py compares a turn with its group and stops there. Each function here is one well-known variation, switched on by
one configuration key and independent of the others; compute_advantages calls them in this order:

    overlong_penalty      a turn that comes near its length limit pays, before it runs into it (DAPO, arXiv 2503.14476)
    kl_estimate           a turn pays for its distance from a reference model (k1, k2, k3)
    leave_one_out_mean    the baseline is the mean of the others: unbiased, where the group's own mean is not (RLOO)
    generalised_advantage the turn's advantage reaches its earlier tokens weakened by gamma * lambda each (GAE)

Mean only, without a spread (Dr. GRPO, arXiv 2503.20783), needs no function: adv_norm.std_level=none and
loss_aggregation=constant. Batch spread, group spread and a constant are in ppo.normalise.

A turn is one action here, the reward of the whole turn arrives at its last token, and rewards have already travelled
from later turns to earlier ones along the conversation's tree (cache.py). So GAE runs inside a turn and never across
a border: running on would count the later turns' reward twice. Tokens that are not trained do not exist for it.

`informative` is for should_accept_fn: a group whose members all earned the same has advantage 0 everywhere and costs
a training step's place (DAPO's dynamic sampling). Rejecting it lets the next prompt take that place. What that does
not promise: batches that are representative of the data (easy and impossible prompts leave), or an end, when nothing
is left to learn; watch `rejected`.

Different from AReaL: its overlong penalty, KL and reward sit at one place of a row, found by position, and are lost
when that place is masked; its GAE runs over the whole row; its leave-one-out goes by blocks of rows.
"""

import torch
from torch import Tensor


def overlong_penalty(lengths: Tensor, limit: int, margin: int, factor: float) -> Tensor:
    """(N,) what each of N turns of `lengths` tokens pays, 0 to -factor: nothing up to `margin` tokens from `limit`."""
    # r_len = -factor * clip((n - (limit - margin)) / margin, 0, 1)
    return -factor * ((lengths - (limit - margin)) / margin).clamp(0, 1)


def kl_estimate(logp: Tensor, ref_logp: Tensor, kind: str) -> Tensor:
    """Of each token drawn from pi, an estimate of KL(pi || pi_ref) in nats, the shape of logp
    (J. Schulman's k1, k2, k3).

    k1 is unbiased and of either sign; as a loss its gradient is 0 on average. k2 is never negative and biased; as a
    loss its gradient is the KL's. k3 is unbiased and never negative.
    """
    x = logp - ref_logp  # log (pi / pi_ref)
    if kind == "k1":
        return x
    if kind == "k2":
        return x.square() / 2
    # k3 = pi_ref / pi - 1 - log (pi_ref / pi); bounded where it is exponentiated
    x = x.clamp(-20, 20)
    return torch.expm1(-x) + x


def leave_one_out_mean(x: Tensor, cell: Tensor) -> Tensor:
    """(N,) the mean of the others in each entry's cell; an entry that is alone is compared with itself."""
    # b_i = (sum_j x_j - x_i) / (n - 1)
    others = torch.bincount(cell)[cell] - 1
    return torch.where(others > 0, (torch.bincount(cell, x)[cell] - x) / others.clamp(min=1), x)


def generalised_advantage(advantages: Tensor, turn_of: Tensor, gamma: float, lam: float) -> Tensor:
    """(N,) advantages of turns -> (M,) of their tokens, in the tokens' order; turn_of (M,) is the turn of each token.

    Without a critic all values are 0, the reward is the only delta, and the recursion has a closed form.
    """
    # A_t = delta_t + gamma lambda A_(t+1), delta = A at the turn's last token, else 0:
    # A_t = (gamma lambda)^(last - t) A
    order = torch.argsort(turn_of, stable=True)  # (M,) turn after turn, each in the order of its tokens
    ends = torch.bincount(turn_of, minlength=len(advantages)).cumsum(0)  # (N,)
    to_end = torch.empty_like(turn_of)
    to_end[order] = ends[turn_of[order]] - 1 - torch.arange(len(turn_of))
    return advantages[turn_of] * (gamma * lam) ** to_end


def informative(trajectory: dict[str, Tensor]) -> bool:
    """Whether a group can teach anything: some trained turn earned something else than the same turn of another member.

    For the configuration: should_accept_fn=advantages.informative. Reads loss_mask, turn_ids, turn_rewards (B, L).
    """
    trained = trajectory["loss_mask"] > 0
    turns, rewards = trajectory["turn_ids"][trained], trajectory["turn_rewards"][trained]  # (M,), (M,)
    return any(bool((rewards[turns == k] != rewards[turns == k][0]).any()) for k in turns.unique())
