"""Guess the log-probabilities of pi_prox (ppo.py), the policy at the start of the step.

A forward pass that computes log pi_prox adds a third to the work of an update. To save this pass,
prox_logp_method=loglinear (A-3PO, arXiv 2512.06547) interpolates between log pi_behav and log
pi_theta, which are known anyway. A step leads from version v to v + 1, and version v_b sampled the
token. When a fraction f of the step's mini-batches is done, pi_theta is roughly version v + f:

    alpha       = (v - v_b) / (v + f - v_b)
    log pi_prox = log pi_behav + alpha (log pi_theta - log pi_behav)

Example: v = 7, v_b = 5 and f = 0.5 give alpha = 2 / 2.5 = 0.8. For a fresh token (v_b = v), alpha
is 0 and the guess is pi_behav, which equals pi_prox. In the first mini-batch f = 0, so for a stale
token alpha is 1 and the guess is pi_theta, which still equals pi_prox. Other guesses are
approximate. For large lags, alpha is near 1 and the guess near pi_theta, so the clip of pi_theta /
pi_prox hardly acts (docs/staleness.md). No gradient flows through the guess.
"""

import torch
from torch import Tensor


def interpolation(versions: Tensor, version: int, fraction: float | Tensor) -> Tensor:
    """Return alpha (N,) for tokens of versions v_b (N,), at version v and fraction f."""
    # alpha = (v - v_b) / (v + f - v_b); if v_b > v, the token counts as fresh
    lag = (version - versions).clamp(min=0).float()  # (N,)
    return torch.where(lag > 0, lag / (lag + fraction), 0.0)


def loglinear(old_logp: Tensor, theta_logp: Tensor, alpha: Tensor) -> Tensor:
    # log pi_prox = log pi_behav + alpha (log pi_theta - log pi_behav)
    return old_logp + alpha * (theta_logp - old_logp)
