"""Advantages, and the loss of three policies.

A language model that learns while it generates is never quite the policy that wrote its training data. Three
policies take part in one update, and each gives a log-probability to every token that was sampled:

    pi_behav   wrote the token. Its logprob came back from the inference server with the token. One trajectory may
               have had several: weights may change in the middle of a sentence, and every token keeps its own.
    pi_prox    the weights at the start of this training step, by one forward pass. The trust region lies round it.
    pi_theta   the weights now. They move with every minibatch, and only they receive a gradient.

PPO uses one old policy for two jobs: to correct for data from elsewhere and to say how far a step may go. When the
data is several versions old, a trust region round the policy that wrote it drags the new policy back to the past.
Decoupled PPO (arXiv 2505.24298, equation 5) gives each job its policy. With u = pi_theta / pi_prox,

    J = mean over tokens of   pi_prox / pi_behav * min(u A, clip(u, 1 - eps, 1 + eps) A)
                              -- correction --      ---------- trust region ----------

The correction is a constant in this step. Where pi_prox is pi_behav it is one and the formula is PPO; so standard
PPO is the same code with the old policy in both places, and not a second branch.

Three guards, each met by a token in every second run:
  cap         a token that pi_prox finds far likelier than pi_behav did (by more than behave_imp_weight_cap) would
              outvote a thousand others. It leaves the loss. The mean still divides by the tokens that were there,
              so a batch of outliers takes a small step, not a normal step in the direction of what is left.
  clip higher the upper bound may be wider than the lower (eps_clip_higher): unlikely tokens may grow.
  dual clip   for A < 0, u A has no lower bound, and one token that became likely can wreck a policy in one step.
              No token costs more than c |A|. The tail of a converged policy needs it: P(end of turn) = .999 with one
              rare failure is such a token.

An advantage belongs to a turn, the stretch of tokens that one request to the model generated, and every trained
token of the turn gets it. A turn's return is its reward after the tree has passed rewards back to parents (cache.py),
and it is compared with turns of the same group, found by id. Nothing here is a position: groups may lose members,
come interleaved or have one member, and a reward cannot be lost because the row ends in a tool's answer.

Everything is aligned with tokens: column t of any tensor speaks of token t, nothing is ever rolled.

What this does not promise: the clip is a heuristic, and pi_theta may leave the trust region on tokens whose gradient
is already zero. The cap makes the correction biased. There is no critic.

What may vary is elsewhere, one small function a variation: other baselines, penalties and credit over tokens in
training/advantages.py, pi_prox without a forward pass in training/proximal.py. docs/algorithm.md has every equation
beside its line.

Different from AReaL: the correction is on, as in the paper (there `rejection_sampling`, off); the write-up of its
documents puts pi_theta / pi_behav in the unclipped branch, which is not the paper's objective; groups go by id, not
by blocks of rows; a cell of one, or of equal returns, gives 0 and not 100,000; the KL penalty needs reference
logprobs, and without them there is none.

Shapes: B rows (sequences), T tokens; of the whole batch N turns and M tokens that are trained.
"""

import torch
from torch import Tensor

from run.config import NormConfig, PPOActorConfig
from training.advantages import generalised_advantage, kl_estimate, leave_one_out_mean, overlong_penalty

Batch = dict[str, Tensor]


def describe_mode(config: PPOActorConfig) -> str:
    """The objective in words: where the logprobs of each policy come from (section 5.2)."""
    server, forward = "the inference server", "a forward pass before the update"
    theta = "pi_theta from each training pass"
    if not config.use_decoupled_loss:
        return f"standard PPO: pi_old from {forward if config.recompute_logprob else server}, {theta}"
    prox = {
        "recompute": forward,
        "loglinear": "pi_behav and pi_theta by their versions, no forward pass",
        "metrics": f"{forward}, and what loglinear, linear and rollout would have said is logged",
    }[config.prox_logp_method]
    cap = config.behave_imp_weight_cap
    bound = "no cap" if cap is None else f"{config.behave_imp_weight_action} above {cap:g}"
    weight = f"behaviour weight per {config.behave_imp_weight_level}, {bound}"
    return f"decoupled PPO: pi_behav from {server}, pi_prox from {prox}, {theta}; {weight}"


def compute_cells(level: str, group_ids: Tensor, turn_ids: Tensor, per_turn: bool) -> Tensor:
    """(N,) the number of the cell within which a turn is compared:
    its group or the batch, its place in the row or any."""
    group = group_ids if level == "group" else torch.zeros_like(group_ids)
    turn = turn_ids if per_turn else torch.zeros_like(turn_ids)
    return torch.unique(torch.stack([group, turn]), dim=1, return_inverse=True)[1]


def cell_mean(x: Tensor, cell: Tensor) -> Tensor:
    """(N,) the mean of x over each entry's cell."""
    return (torch.bincount(cell, x) / torch.bincount(cell))[cell]


def cell_std(x: Tensor, cell: Tensor, eps: float) -> Tensor:
    """(N,) eps + the standard deviation of x in each entry's cell; 1 where a cell has no spread to divide by."""
    # s^2 = sum (x - mean)^2 / (n - 1)
    squares = torch.bincount(cell, (x - cell_mean(x, cell)).square())
    variance = (squares / (torch.bincount(cell) - 1).clamp(min=1))[cell]
    return torch.where(variance > 0, variance.sqrt() + eps, 1.0)


def normalise(returns: Tensor, group_ids: Tensor, turn_ids: Tensor, norm: NormConfig) -> Tensor:
    """(N,) returns of turns -> advantages.

    In float64, so that equal returns give exactly 0: a sum of a few float32 numbers has no rounding there.
    """
    # A = (R - b) / s
    R, b, s = returns.double(), torch.zeros(()), torch.ones(())
    if norm.mean_level != "none":
        baseline = leave_one_out_mean if norm.mean_leave1out else cell_mean
        b = baseline(R, compute_cells(norm.mean_level, group_ids, turn_ids, norm.per_turn))
    if norm.std_level == "constant":
        s = torch.tensor(norm.std_constant)
    elif norm.std_level != "none":
        s = cell_std(R, compute_cells(norm.std_level, group_ids, turn_ids, norm.per_turn), norm.eps)
    return ((R - b) / s).float()


def compute_advantages(batch: Batch, config: PPOActorConfig) -> Tensor:
    """(B, T) float32: each trained token gets the advantage of its turn, all others 0.

    Reads loss_mask, turn_ids, turn_rewards (B, T) and group_ids (B,); with kl_ctl also logprobs and ref_logp (B, T).
    With gamma * gae_lambda below 1 the earlier tokens of a turn get less of it.
    Turns that are not trained (a prefix that another row trains, sampling that cannot be corrected) take no part,
    not in the baseline either. Raises ValueError for a trained token outside any turn and for a reward that is not
    a finite number.
    """
    trained = batch["loss_mask"] > 0  # (B, T)
    at = trained.flatten().nonzero()[:, 0]  # (M,) where the trained tokens are, row after row
    turn_ids, rewards = batch["turn_ids"].flatten()[at].long(), batch["turn_rewards"].flatten()[at].float()  # (M,)
    if bool((turn_ids < 0).any()):
        raise ValueError("loss_mask is 1 on a token whose turn_ids is -1; every trained token belongs to a turn")
    if not bool(rewards.isfinite().all()):
        raise ValueError("turn_rewards is not finite on a trained token; check what the reward function returns")

    # The N trained turns, and for each of the M trained tokens the number of its turn. A turn's tokens stand together.
    row, starts = at // max(trained.shape[1], 1), torch.ones(len(at), dtype=torch.bool)  # (M,), (M,)
    starts[1:] = (row[1:] != row[:-1]) | (turn_ids[1:] != turn_ids[:-1])
    turn_of = starts.cumsum(0) - 1  # (M,)
    row, turn, returns = row[starts], turn_ids[starts], rewards[starts]  # (N,), (N,), (N,)

    # R = clip((r + overlong penalty + bias) * scaling, -c, c), r the reward that all tokens of the turn carry
    if config.overlong_tokens and config.max_new_tokens:
        limit, margin = config.max_new_tokens, config.overlong_tokens
        returns += overlong_penalty(torch.bincount(turn_of), limit, margin, config.overlong_penalty_factor)
    returns = (returns + config.reward_bias) * config.reward_scaling
    returns = returns.clamp(-config.reward_clip, config.reward_clip)

    # R <- R - beta * sum over the turn of KL(pi_behav, pi_ref); k1: log pi_behav - log pi_ref
    if config.kl_ctl > 0 and config.kl_placement == "reward" and "ref_logp" in batch:
        logp, ref_logp = batch["logprobs"].flatten()[at], batch["ref_logp"].flatten()[at]  # (M,)
        kl = kl_estimate(logp, ref_logp, config.kl_estimator)  # (M,)
        returns.index_add_(0, turn_of, kl, alpha=-config.kl_ctl)

    A = normalise(returns, batch["group_ids"][row].long(), turn, config.adv_norm)  # (N,)
    credit = A[turn_of]  # (M,)
    if config.gamma * config.gae_lambda != 1:
        credit = generalised_advantage(A, turn_of, config.gamma, config.gae_lambda)
    return torch.zeros(trained.numel()).index_copy_(0, at, credit).view(trained.shape)  # (B, T)


def behaviour_weight(log_weight: Tensor, cap: float | None, action: str) -> tuple[Tensor, Tensor]:
    """pi_prox / pi_behav as a constant, and where it exceeds the cap: there it is 0 (mask) or the cap (clamp)."""
    weight, cap = torch.exp(log_weight).detach(), torch.inf if cap is None else cap
    above = weight > cap
    return weight.clamp(max=cap) if action == "clamp" else torch.where(above, 0.0, weight), above


def sequence_mean(x: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """The mean of x over the trained tokens of each token's sequence, in x's shape; 0 where a sequence has none.

    Of log weights: the log of the geometric mean of a sequence's weights, the same for all its tokens (as GSPO has it).
    """
    ids = sequence_ids.expand(x.shape)
    total = x.new_zeros(int(ids.max()) + 1 if ids.numel() else 0).index_add_(0, ids[mask], x[mask])
    count = torch.bincount(ids[mask], minlength=len(total)).clamp(min=1)
    return (total / count)[ids]


def aggregation_weights(lengths: Tensor, how: str, constant: int | None) -> Tensor:
    """(B,) what a token of each sequence counts in the mean over tokens, so that the loss is one of

        token       sum_i sum_t L_it / sum_i n_i              every token counts the same
        sequence    1/S sum_i (1/n_i) sum_t L_it              every sequence counts the same (GRPO)
        constant    1/S sum_i (1/C) sum_t L_it                no length in it: long failures are not cheap (Dr. GRPO)

    `lengths` (B,) are the trained tokens n_i, S is the number of those above 0: of the whole minibatch, on all ranks.
    The weights are positive, and the objective is linear in the advantages, so that they are factors of those.
    """
    if how == "token":
        return torch.ones(lengths.shape)
    per_sequence = lengths.sum() / torch.count_nonzero(lengths)
    if how == "sequence":
        return per_sequence / lengths.clamp(min=1)
    if not constant:
        raise ValueError("loss_aggregation=constant divides by max_new_tokens, which is not set")
    return (per_sequence / constant).expand(lengths.shape)


def ppo_actor_loss_fn(
    logp: Tensor,
    prox_logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    config: PPOActorConfig,
    *,
    sequence_ids: Tensor | None = None,
    denominator: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The negated objective (to be minimised) and its statistics; all tensors of one shape, usually (B, T).

    logp is pi_theta's and carries the gradient; prox_logp is pi_prox's; old_logp is pi_behav's. Standard PPO
    (use_decoupled_loss false) has one old policy, old_logp, and does not read prox_logp. What stands under a zero of
    loss_mask is never used, NaN and infinities included.

    `sequence_ids`, the row of each token, is read where the behaviour weight is a sequence's; default: the first axis.
    `denominator` is the number of trained tokens that the mean is over; default: those given. Loss and statistics are
    sums divided by it, so the parts of a batch that is cut in pieces add up.
    """
    mask = loss_mask.bool()
    denominator = mask.sum().clamp(min=1) if denominator is None else denominator
    prox_logp = prox_logp if config.use_decoupled_loss else old_logp
    differences = logp - prox_logp.detach(), prox_logp - old_logp, advantages
    log_u, log_weight, A = (torch.where(mask, x, 0.0) for x in differences)

    # u = pi_theta / pi_prox
    u = torch.exp(log_u)
    higher = config.eps_clip if config.eps_clip_higher is None else config.eps_clip_higher
    u_clipped = u.clamp(1 - config.eps_clip, 1 + higher)

    # objective = min(u A, clip(u) A), and for A < 0 at least c A
    uA = u * A
    objective = torch.minimum(uA, u_clipped * A)
    if config.c_clip is not None:
        objective = torch.where(A < 0, torch.maximum(objective, config.c_clip * A), objective)

    # w = pi_prox / pi_behav, of the token or of its sequence; above the cap 0, or the cap
    log_ratio = log_u.detach() + log_weight  # of pi_theta / pi_behav
    if config.behave_imp_weight_level == "sequence":
        ids = torch.arange(len(mask), device=mask.device)[:, None] if sequence_ids is None else sequence_ids
        log_weight = sequence_mean(log_weight, mask, ids)
    weight, above_cap = behaviour_weight(log_weight, config.behave_imp_weight_cap, config.behave_imp_weight_action)

    # L = - sum over trained tokens of w * objective / denominator; under the mask A, and so the objective, is 0
    loss = -(weight * objective).sum() / denominator

    with torch.no_grad():
        weight = torch.where(mask, weight, 0.0)
        sums = {
            "clip_frac": torch.count_nonzero(objective != uA),
            "behave_weight_mean": weight.sum(),
            "behave_weight_square": weight.square().sum(),
            "dropped_share": torch.count_nonzero(above_cap & mask),
            "kl": log_ratio.clamp(-1e4, 1e4).square().sum() / 2,  # k2, bounded
        }
        stats = {name: x / denominator for name, x in sums.items()}
    return loss, stats
