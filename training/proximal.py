"""Guess pi_prox, the policy at the start of the training step, without a forward pass.

Decoupled PPO (ppo.py) needs log pi_prox of every token. With prox_logp_method=recompute one forward pass over the batch
computes log pi_prox before the update. The forward pass for log pi_prox adds about a third to the work of the update.
With prox_logp_method=loglinear this module guesses log pi_prox from two known log-probabilities (A-3PO, arXiv
2512.06547).

**The idea.** Let v be the version at the start of the step. The behaviour policy pi_behav, which sampled the token, is
version v_b. Each training pass computes log pi_theta with the current weights. After a fraction f of the step's
mini-batches, pi_theta is roughly version v + f. The proximal policy is version v, which lies between v_b and v + f. The
guess of log pi_prox is an interpolation:

    alpha       = (v - v_b) / (v + f - v_b)
    log pi_prox = log pi_behav + alpha (log pi_theta - log pi_behav)

The interpolation weight alpha is between 0 and 1. If v = v_b, alpha is 0.

**Example.** The step starts at version v = 7, version v_b = 5 sampled the token, and half of the mini-batches are done
(f = 0.5). The weight of pi_theta in the interpolation is alpha = 2 / 2.5 = 0.8. With log pi_behav = -2.0 and log
pi_theta = -1.5 the guess is -2.0 + 0.8 * 0.5 = -1.6.

**The guess is exact in two cases.** First, for a stale token in the first mini-batch, f = 0 gives alpha = 1. The guess
is then pi_theta, which is still equal to pi_prox. Second, for a fresh token, v_b = v gives alpha = 0. The guess is then
pi_behav, which is pi_prox, so the objective for fresh tokens equals that of standard PPO. For a stale token in a later
mini-batch, the interpolated log pi_prox is only approximate. The guessed log pi_prox is a constant: no gradient flows
through it. After a recovery from an older checkpoint a token can be newer than the trainer (v_b > v). A token that is
newer than the trainer is treated as fresh, and the metric versions_ahead counts these tokens.

**Comparison.** prox_logp_method=metrics trains with the recomputed pi_prox and logs the errors of three guesses. The
guess `loglinear` interpolates log-probabilities, the guess `linear` interpolates probabilities, and the guess `rollout`
is pi_behav.

**Limit.** The guess can be poor for tokens of old versions. If v_b is far below v, alpha is close to 1, so the guess is
close to pi_theta.
"""

import torch
from torch import Tensor


def interpolation(versions: Tensor, version: int, fraction: float | Tensor) -> Tensor:
    """Return alpha (N,), the position of pi_prox between pi_behav (0) and pi_theta (1).

    `versions` (N,) is v_b, `version` is v, and `fraction` is f, the share of the step's mini-batches that are done.
    """
    # alpha = (v - v_b) / (v + f - v_b)
    lag = (
        (version - versions).clamp(min=0).float()
    )  # (N,) v - v_b; a token newer than the trainer has lag 0
    return torch.where(lag > 0, lag / (lag + fraction), 0.0)


def loglinear(old_logp: Tensor, theta_logp: Tensor, alpha: Tensor) -> Tensor:
    """Guess log pi_prox by interpolating log-probabilities; all arguments and the result have shape (N,)."""
    # log pi_prox = log pi_behav + alpha (log pi_theta - log pi_behav)
    return old_logp + alpha * (theta_logp - old_logp)


def linear(old_logp: Tensor, theta_logp: Tensor, alpha: Tensor) -> Tensor:
    """Guess log pi_prox by interpolating probabilities; all arguments and the result have shape (N,)."""
    # pi_prox = (1 - alpha) pi_behav + alpha pi_theta
    return torch.logaddexp(torch.log1p(-alpha) + old_logp, alpha.log() + theta_logp)


def rollout(old_logp: Tensor, theta_logp: Tensor, alpha: Tensor) -> Tensor:
    """Guess that pi_prox is pi_behav, as in standard PPO. The function ignores theta_logp and alpha."""
    # pi_prox = pi_behav
    return old_logp


def guess_errors(
    prox_logp: Tensor, old_logp: Tensor, theta_logp: Tensor, alpha: Tensor
) -> dict[str, Tensor]:
    """Return for each guess the absolute and the relative errors (N,) of log pi_prox, w and u.

    prox_logp (N,) is the recomputed log pi_prox. The behaviour weight is w = pi_prox / pi_behav, and the ratio is
    u = pi_theta / pi_prox. The keys of the result are {guess}_{logp | behave_weight | ratio}_{abs | rel}_error.
    """

    def quantities(prox: Tensor) -> dict[str, Tensor]:
        """Return log pi_prox, w and u for a value of log pi_prox. The clamp keeps w and u finite."""
        w, u = (x.clamp(-20, 20).exp() for x in (prox - old_logp, theta_logp - prox))
        return {"logp": prox, "behave_weight": w, "ratio": u}

    truth, errors = quantities(prox_logp), {}
    for guess in (loglinear, linear, rollout):
        for key, value in quantities(guess(old_logp, theta_logp, alpha)).items():
            error = (value - truth[key]).abs()  # (N,)
            errors[f"{guess.__name__}_{key}_abs_error"] = error
            errors[f"{guess.__name__}_{key}_rel_error"] = error / truth[key].abs().clamp(min=1e-8)
    return errors
