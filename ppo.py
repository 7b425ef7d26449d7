"""Advantages and the loss of decoupled PPO, a form of PPO with three policies.

In asynchronous training, the weights that are trained are newer than the weights that sampled the training data. Three
policies give a log-probability to every sampled token:

    `pi_behav`   the behaviour policy: the weights that sampled the token. A weight update may interrupt a completion,
                 so each token has its own version of pi_behav. The inference server reports log pi_behav.
    `pi_prox`    the proximal policy: the weights at the start of the training step. log pi_prox needs a forward pass.
    `pi_theta`   the current policy: the weights that the optimizer is changing. Only pi_theta receives a gradient.

Standard PPO uses one old policy for two purposes. First, the ratio of the current policy to the old policy corrects for
data from older weights. Second, a clip around the old policy limits how far a step moves the current policy. If the old
policy is several versions old, the clip holds the current policy close to outdated weights. Decoupled PPO (arXiv
2505.24298, equation 5) clips the ratio u = pi_theta / pi_prox, scales each term by pi_prox / pi_behav, and maximises

    J = mean over trained tokens of   pi_prox / pi_behav * min(u A, clip(u, 1 - eps, 1 + eps) A)
                                      behaviour weight     the clip, centred on pi_prox

The behaviour weight is a constant: no gradient flows through it. If pi_prox equals pi_behav, the behaviour weight is 1
and J is the objective of standard PPO. With use_decoupled_loss=false, the old policy replaces pi_prox and pi_behav.

Example: a token with the probabilities pi_behav = 0.2, pi_prox = 0.3 and pi_theta = 0.45 has the behaviour weight 1.5,
and u is also 1.5. With eps = 0.2 and A = 1, the clip lowers u to 1.2, so the token's term in J is 1.5 * 1.2 = 1.8.

Three options change the influence of a single token on the loss:
  `cap`:          By default, a token whose behaviour weight exceeds behave_imp_weight_cap counts as 0 in J, a mean over
                  all trained tokens. With behave_imp_weight_action=clamp, the token gets the cap as its weight.
  `clip higher`:  The key eps_clip_higher raises the upper bound of u, so that a step can make rare tokens likelier.
  `dual clip`:    For A < 0 the term u A has no lower bound. With c_clip = c the term u A has the lower bound c A.

By default, every trained token of a turn gets the turn's advantage. With GAE, the earlier tokens of a turn get a
smaller share of the turn's advantage. The return of a turn is computed from the turn's reward and the discounted
rewards of later turns (cache.py). By default, a turn's baseline is the mean return of the turns of its group that have
the same turn number. The tensor group_ids gives the group of each row, so the rows of a batch may be in any order.

Limits: the clip does not bound u, because the gradients of other tokens can change the probability of a clipped token.
The cap of the behaviour weight biases the gradient. The algorithm has no critic. Variants are in training/:
advantages.py, corrections.py and proximal.py. docs/algorithm.md lists each equation.

Shapes: a batch has B rows, T columns, N trained turns and M trained tokens. Column t of each tensor describes token t.
"""

import torch
from torch import Tensor

from training.advantages import (
    generalised_advantage,
    kl_estimate,
    leave_one_out_mean,
    log_ratio,
    overlong_penalty,
)
from training.config import NormConfig, PPOActorConfig
from training.corrections import (
    behaviour_weight,
    cispo_objective,
    reduce_sequence,
    rejected,
    sequence_weight,
)


def describe_mode(config: PPOActorConfig) -> str:
    """Return one line that states the objective and the source of each policy's logprobs (write-up, section 5.2)."""
    server, forward = "the inference server", "a forward pass before the update"
    theta = "pi_theta from each training pass" + ", CISPO" * config.use_cispo_loss
    theta += ", one ratio per row (GSPO)" * (config.importance_sampling_level == "sequence")
    theta += ", truncated turns left out" * config.mask_truncated
    if not config.use_decoupled_loss:
        return (
            f"standard PPO: pi_old from {forward if config.recompute_logprob else server}, {theta}"
        )
    prox = {
        "recompute": forward,
        "loglinear": "pi_behav and pi_theta by their versions, with no forward pass",
        "metrics": f"{forward}, and the error of the guesses loglinear, linear and rollout is logged",
    }[config.prox_logp_method]
    cap = config.behave_imp_weight_cap
    bound = "no cap" if cap is None else f"{config.behave_imp_weight_action} above {cap:g}"
    bound += (
        f" and below {config.behave_imp_weight_floor:g}" if config.behave_imp_weight_floor else ""
    )
    level = {"token": "token", "sequence": "row (product)", "geometric": "row (geometric mean)"}
    weight = f"behaviour weight per {level[config.behave_imp_weight_level]}, {bound}"
    return f"decoupled PPO: pi_behav from {server}, pi_prox from {prox}, {theta}; {weight}"


def compute_cells(level: str, group_ids: Tensor, turn_ids: Tensor, per_turn: bool) -> Tensor:
    """Return the cell index of each of N turns, (N,). A turn is compared with the other turns of its cell.

    If `level` is "group", each group is a cell. For any other `level`, the whole batch is one cell. If `per_turn` is
    true, each cell is split into cells whose turns have the same turn id.
    """
    group = group_ids if level == "group" else torch.zeros_like(group_ids)
    turn = turn_ids if per_turn else torch.zeros_like(turn_ids)
    return torch.unique(torch.stack([group, turn]), dim=1, return_inverse=True)[1]


def cell_mean(x: Tensor, cell: Tensor) -> Tensor:
    """Return x (N,) with each entry replaced by the mean of its cell."""
    return (torch.bincount(cell, x) / torch.bincount(cell))[cell]


def cell_std(x: Tensor, cell: Tensor, eps: float) -> Tensor:
    """Return x (N,) with each entry replaced by the standard deviation of its cell, plus eps.

    For a cell whose entries are all equal, and for a cell with one entry, the result is 1.
    """
    # s^2 = sum (x - mean)^2 / (n - 1)
    squares = torch.bincount(cell, (x - cell_mean(x, cell)).square())  # (cells,)
    variance = (squares / (torch.bincount(cell) - 1).clamp(min=1))[cell]  # (cells,) -> (N,)
    return torch.where(variance > 0, variance.sqrt() + eps, 1.0)


def normalise(returns: Tensor, group_ids: Tensor, turn_ids: Tensor, norm: NormConfig) -> Tensor:
    """Return the advantages (N,) of N turns, given their returns (N,).

    The computation uses float64, in which the sum of a few float32 numbers is exact. If all returns of a cell are
    equal, each return minus its baseline is exactly 0.
    """
    # A = (R - b) / s, with the baseline b and the spread s of the turn's cell
    R, b, s = returns.double(), torch.zeros(()), torch.ones(())
    if norm.mean_level != "none":
        baseline = leave_one_out_mean if norm.mean_leave1out else cell_mean
        b = baseline(R, compute_cells(norm.mean_level, group_ids, turn_ids, norm.per_turn))
    if norm.std_level == "constant":
        s = torch.tensor(norm.std_constant)
    elif norm.std_level != "none":
        s = cell_std(R, compute_cells(norm.std_level, group_ids, turn_ids, norm.per_turn), norm.eps)
    return ((R - b) / s).float()


def compute_advantages(batch: dict[str, Tensor], config: PPOActorConfig) -> Tensor:
    """Return the advantages (B, T) float32: each trained token has the advantage of its turn, all other tokens have 0.

    The batch must contain loss_mask, turn_ids and turn_rewards (B, T) and group_ids (B,). If the KL penalty is part of
    the reward, the batch must also contain logprobs and ref_logp (B, T). If gamma * gae_lambda is below 1, earlier
    tokens of a turn get a smaller share of the turn's advantage. A turn without trained tokens gets no advantage and
    does not count in a baseline. Raises ValueError if a trained token belongs to no turn, or to a turn whose reward is
    not finite.
    """
    trained = batch["loss_mask"] > 0  # (B, T)
    turn_ids = batch["turn_ids"][trained].long()  # (M,)
    rewards = batch["turn_rewards"][trained].float()  # (M,) the final reward of each token's turn
    if bool((turn_ids < 0).any()):
        raise ValueError(
            "loss_mask is 1 on a token whose turn_ids is -1; every trained token must belong to a turn"
        )
    if not bool(rewards.isfinite().all()):
        raise ValueError(
            "turn_rewards is not finite on a trained token; check what the reward function returns"
        )

    # 1. Number the N trained turns. The M trained tokens are in the order of the batch, row after row. A turn starts
    #    where the row or the turn id changes.
    rows = trained.nonzero()[:, 0]  # (M,) the row of each trained token
    starts = torch.ones(
        len(rows), dtype=torch.bool
    )  # (M,) whether each token is the first token of its turn
    starts[1:] = (rows[1:] != rows[:-1]) | (turn_ids[1:] != turn_ids[:-1])
    turn_of = starts.cumsum(0) - 1  # (M,) the number of each token's turn, from 0 to N - 1
    returns = rewards[starts]  # (N,)

    # 2. R = clip((r + overlong penalty + bias) * scaling, -c, c), where r is the turn's reward and c is reward_clip
    if config.overlong_tokens and config.max_new_tokens:
        n = torch.bincount(turn_of)  # (N,) number of trained tokens in each turn
        returns += overlong_penalty(
            n, config.max_new_tokens, config.overlong_tokens, config.overlong_penalty_factor
        )
    returns = (returns + config.reward_bias) * config.reward_scaling
    returns = returns.clamp(-config.reward_clip, config.reward_clip)

    # 3. R <- R - kl_ctl * sum over the turn's tokens of the estimated KL(pi_behav, pi_ref)
    if config.kl_ctl > 0 and config.kl_placement == "reward" and "ref_logp" in batch:
        kl = kl_estimate(
            batch["logprobs"][trained], batch["ref_logp"][trained], config.kl_estimator
        )  # (M,)
        returns.index_add_(0, turn_of, kl, alpha=-config.kl_ctl)

    # 4. A = (R - b) / s. Each token of the turn gets A, or a share of A with GAE.
    A = normalise(
        returns, batch["group_ids"][rows[starts]].long(), turn_ids[starts], config.adv_norm
    )  # (N,)
    advantages = torch.zeros(trained.shape)  # (B, T)
    advantages[trained] = generalised_advantage(A, turn_of, config.gamma, config.gae_lambda)  # (M,)
    return advantages


def aggregation_weights(lengths: Tensor, how: str, constant: int | None) -> Tensor:
    """Return the weight of each sequence in the loss, (B,). L_it is the loss of token t of sequence i.

        `how="token"`       sum_i sum_t L_it / sum_i n_i:      every token counts equally.
        `how="sequence"`    1/S sum_i (1/n_i) sum_t L_it:      every sequence counts equally, as in GRPO.
        `how="constant"`    1/S sum_i (1/C) sum_t L_it:        every token counts 1/(S C) (arXiv 2503.20783).

    `lengths` (B,) holds n_i, the number of trained tokens of sequence i. `lengths` holds all sequences of the
    mini-batch, including those of other ranks. S is the number of sequences with n_i > 0, and C is `constant`. The loss
    of a token is proportional to its advantage, so the caller multiplies each advantage by the weight of the token's
    sequence.
    """
    if how == "token":
        return torch.ones(lengths.shape)
    per_sequence = lengths.sum() / torch.count_nonzero(lengths)  # the scalar sum_i n_i / S
    if how == "sequence":
        return per_sequence / lengths.clamp(min=1)
    if not constant:
        raise ValueError(
            "actor.loss_aggregation=constant divides by actor.max_new_tokens, which is not set"
        )
    return (per_sequence / constant).expand(lengths.shape)


def token_objectives(
    logp: Tensor,
    prox_logp: Tensor,
    old_logp: Tensor,
    A: Tensor,
    mask: Tensor,
    config: PPOActorConfig,
    ids: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four tensors: each token's weight w and objective, a mask of the clipped tokens and a mask of the dropped
    tokens.

    `mask` is True for trained tokens, and `A` holds the advantages. `ids` gives each token the number of its
    sequence. The docstring of ppo_actor_loss_fn explains the other arguments. Each result has the shape of `mask`. A
    token counts as clipped if the clip changed the token's objective and the token's weight w is above 0. A token
    counts as dropped if its behaviour weight is outside the range from floor to cap, or if its row was rejected.
    """
    prox_logp = prox_logp if config.use_decoupled_loss else old_logp
    log_u = torch.where(mask, log_ratio(logp, prox_logp.detach()), 0.0)  # log (pi_theta / pi_prox)
    log_weight = torch.where(mask, log_ratio(prox_logp, old_logp), 0.0)  # log (pi_prox / pi_behav)
    A = torch.where(mask, A, 0.0)

    # u = pi_theta / pi_prox of the token, or the geometric mean of u over its sequence
    if config.importance_sampling_level == "sequence":
        log_u = reduce_sequence(log_u, mask, ids, "mean")
    u = torch.exp(log_u)
    higher = config.eps_clip if config.eps_clip_higher is None else config.eps_clip_higher
    u_clipped = u.clamp(1 - config.eps_clip, 1 + higher)

    # objective = min(u A, clip(u, 1 - eps, 1 + eps_higher) A), and for A < 0 at least c A
    uA = u * A
    objective = torch.minimum(uA, u_clipped * A)
    if config.c_clip is not None:
        objective = torch.where(A < 0, torch.maximum(objective, config.c_clip * A), objective)

    clipped = objective != uA
    if config.use_cispo_loss:
        objective, clipped = cispo_objective(torch.where(mask, logp, 0.0), u, u_clipped, A)

    # w = pi_prox / pi_behav of the token or of its sequence, with a floor and a cap; in a rejected sequence w is 0
    sequence_log_weight = sequence_weight(log_weight, mask, ids, config.behave_imp_weight_level)
    weight, dropped = behaviour_weight(sequence_log_weight, config)
    reject = rejected(log_weight, mask, ids, config)
    weight, dropped = weight.masked_fill(reject | ~mask, 0.0), (dropped | reject) & mask
    return (
        weight,
        objective,
        clipped & (weight > 0),
        dropped,
    )  # a token with weight 0 does not count as clipped


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
    """Return the loss, which is -J, and its metrics. All tensors have the shape (B, T), or (N,) for N flat tokens.

    `logp`:          log pi_theta, with a gradient.
    `prox_logp`:     log pi_prox. Standard PPO (use_decoupled_loss=false) does not use prox_logp.
    `old_logp`:      log pi_behav. In standard PPO, old_logp is the log-probability under the old policy.
    `loss_mask`:     1 for trained tokens. Values at untrained tokens are ignored, even NaN and infinity.
    `sequence_ids`:  the row of each token, for ratios of a whole sequence.
                     By default, the row of a token is its index on the first axis.
    `denominator`:   the number that divides the loss and the metrics.
                     By default, the denominator is the number of trained tokens in loss_mask. If a mini-batch is
                     divided into pieces, pass the number of trained tokens of the whole mini-batch, so that the sum of
                     the pieces' losses is the mini-batch's loss.
    """
    mask = loss_mask.bool()
    denominator = mask.sum().clamp(min=1) if denominator is None else denominator
    ids = (
        torch.arange(len(mask), device=mask.device)[:, None]
        if sequence_ids is None
        else sequence_ids
    )
    terms = token_objectives(logp, prox_logp, old_logp, advantages, mask, config, ids)
    weight, objective, clipped, dropped = terms

    # loss = - sum over trained tokens of w * objective / denominator; other tokens have A = 0 and add nothing
    loss = -(weight * objective).sum() / denominator

    with torch.no_grad():
        sums = {
            "clip_frac": torch.count_nonzero(clipped),
            "behave_weight_mean": weight.sum(),
            "behave_weight_square": weight.square().sum(),
            "dropped_share": torch.count_nonzero(dropped),
            # k2, an estimate of the KL divergence between pi_theta and pi_behav; the clamp keeps the sum finite
            "kl": torch.where(mask, log_ratio(logp, old_logp), 0.0).clamp(-1e4, 1e4).square().sum()
            / 2,
        }
        stats = {name: x / denominator for name, x in sums.items()}
    return loss, stats
