"""Corrections of the two ratios: what to do with a token or a sequence that the weights describe badly.

ppo.py multiplies each token's objective by the behaviour weight w = pi_prox / pi_behav, and clips the ratio
u = pi_theta / pi_prox. Both are ratios of probabilities of one token. Each function here answers a case in which one
token's ratio is the wrong thing to look at.

**Why a weight has two bounds.** With w the expected gradient is right, whatever policy sampled the token. But a few
huge weights then decide the whole step, so weights above a cap are dropped (or set to the cap). A tiny weight is a
warning, too: pi_behav found the token likely, pi_prox finds it nearly impossible. Among 10,000 tokens such a token is
rarely old data. Most often the server and the trainer disagree, for example about an expert of a mixture of experts,
and then pi_prox is wrong for this token. Its w is near 0, but its u is not: the gradient of log pi_theta at an
impossible token is large. IcePop therefore drops the token on both sides (`behaviour_weight`).

**Why a whole sequence may go.** The reward judges a sequence, not a token. If w is 1.05 at each of 100 tokens, no token
looks strange, yet pi_prox writes this sequence 1.05^100 = 131 times as often as pi_behav. Three tests find a sequence
that pi_prox would not have written. They look only at w, so they work with every kind of token weight:

    geometric mean   exp(mean log w) is outside 1/c .. c: the whole sequence has drifted. The mean does not grow with
                     the length, so c must be close to 1, such as 1.01. A cap of 5 would never drop a sequence.
    max k2           (log w)^2 / 2 of one token exceeds a bound: one token comes from another policy.
    veto             w of one token is below a bound such as 1e-4: pi_prox could not have written this sequence.

**Which weight a sequence has.** The product of all w is the exact weight of the sequence, but it grows with the length:
1.05^100 = 131, and a cap of 5 drops it. The geometric mean, 1.05, is a weight that sequences of all lengths can share,
and it is biased. `behave_imp_weight_level=sequence` is the product, and `geometric` is the geometric mean.

**Why u may belong to a sequence, too.** PPO clips each token by itself, so a clip keeps some tokens of an answer and
silences others, although all of them have one advantage. GSPO clips the geometric mean of u: an answer is kept or
silenced as a whole, and the noise of single tokens averages out. One u then moves much less than a token's u. GSPO uses
eps = 3e-4 below and 4e-4 above.

**Why a clip may keep its gradient.** Where PPO clips a token, the token has no gradient. The clipped tokens are often
the rare and decisive ones, such as "however", and they never become likelier. CISPO clips u only as a weight: the
gradient of log pi_theta remains, multiplied by at most 1 + eps_higher. There is usually no lower bound (eps_clip=1).

**Truncated answers.** An answer that hits its token limit has an unknown reward: it may have been about to succeed. A
reward of 0 teaches the model that thinking is wrong. `without_truncated` leaves these turns out of loss and baseline.

Sources: IcePop (arXiv 2510.18855), verl's documents on rollout correction, GSPO (arXiv 2507.18071), CISPO (arXiv
2506.13585), and DAPO (arXiv 2503.14476) for truncated answers.
"""

import math

import torch
from torch import Tensor

from training.config import PPOActorConfig


def reduce_sequence(x: Tensor, mask: Tensor, sequence_ids: Tensor, how: str) -> Tensor:
    """Return for each entry of x the sum, mean, amax or amin of x over the trained tokens of the entry's sequence.

    The result is 0 for a sequence without trained tokens.
    """
    ids = sequence_ids.expand(x.shape)  # the sequence of each token
    reduced = x.new_zeros(int(ids.max()) + 1 if ids.numel() else 0)  # one number for each sequence
    return reduced.scatter_reduce(0, ids[mask], x[mask], how, include_self=False)[ids]


def sequence_weight(log_weight: Tensor, mask: Tensor, sequence_ids: Tensor, level: str) -> Tensor:
    """Return log w of each token: its own (level "token"), or one for its sequence ("sequence", "geometric")."""
    if level == "token":
        return log_weight
    # sequence: log w = sum_t log w_t          geometric: log w = 1/n sum_t log w_t
    how = "sum" if level == "sequence" else "mean"
    return reduce_sequence(log_weight, mask, sequence_ids, how).clamp(-20, 20)  # so that w stays finite


def behaviour_weight(log_weight: Tensor, config: PPOActorConfig) -> tuple[Tensor, Tensor]:
    """Return w = exp(log_weight) without a gradient, and a mask of the weights outside floor .. cap.

    A weight outside becomes 0 (action "mask") or the nearest bound (action "clamp").
    """
    # IcePop: w <- w if floor <= w <= cap, else 0
    weight = torch.exp(log_weight).detach()
    low = config.behave_imp_weight_floor or 0.0
    high = torch.inf if config.behave_imp_weight_cap is None else config.behave_imp_weight_cap
    outside = (weight < low) | (weight > high)
    clamped = weight.clamp(low, high)
    return clamped if config.behave_imp_weight_action == "clamp" else torch.where(outside, 0.0, weight), outside


def has_drifted(log_weight: Tensor, mask: Tensor, sequence_ids: Tensor, cap: float) -> Tensor:
    """Return a mask of the tokens whose sequence has a geometric mean of w outside 1/cap .. cap."""
    # |1/n sum_t log w_t| > log c
    return reduce_sequence(log_weight, mask, sequence_ids, "mean").abs() > math.log(cap)


def has_strange_token(log_weight: Tensor, mask: Tensor, sequence_ids: Tensor, bound: float) -> Tensor:
    """Return a mask of the tokens whose sequence has a token with k2 above the bound."""
    # max_t (log w_t)^2 / 2 > bound
    return reduce_sequence(log_weight.square() / 2, mask, sequence_ids, "amax") > bound


def has_impossible_token(log_weight: Tensor, mask: Tensor, sequence_ids: Tensor, bound: float) -> Tensor:
    """Return a mask of the tokens whose sequence has a token with w below the bound."""
    # min_t w_t < bound
    return reduce_sequence(log_weight, mask, sequence_ids, "amin") < math.log(bound)


def rejected(log_weight: Tensor, mask: Tensor, sequence_ids: Tensor, config: PPOActorConfig) -> Tensor:
    """Return a mask of the tokens whose sequence fails one of the tests that the configuration sets."""
    tests = {
        has_drifted: config.reject_geometric_mean,
        has_strange_token: config.reject_max_k2,
        has_impossible_token: config.reject_veto,
    }
    result = torch.zeros_like(mask)
    for test, bound in tests.items():
        if bound is not None:
            result |= test(log_weight, mask, sequence_ids, bound)
    return result


def cispo_objective(logp: Tensor, u: Tensor, u_clipped: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """Return the objective of CISPO for each token, and a mask of the tokens whose u is clipped."""
    # objective = stop_gradient(clip(u)) A log pi_theta
    return u_clipped.detach() * A * logp, u != u_clipped


def without_truncated(batch: dict[str, Tensor]) -> Tensor:
    """Return loss_mask (B, T) with 0 in the last turn of each row that ended because of its token limit."""
    last = batch["turn_ids"] == batch["turn_ids"].amax(1, keepdim=True)  # (B, T) the tokens of the row's last turn
    return batch["loss_mask"].masked_fill(last & (batch["truncated"] > 0)[:, None], 0)
