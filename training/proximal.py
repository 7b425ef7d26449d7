"""pi_prox without a forward pass: how the centre of the trust region is found, and how good a guess is.

The rule. pi_prox is the policy at the start of the training step, version v. `recompute` asks it: one forward pass over
the batch before the update, a third of a step's work. `loglinear` guesses instead (A-3PO, arXiv 2512.06547): a
token was written by version v_b; pi_theta, which the training pass computes anyway, is the policy after a
fraction f of the step's minibatches, so it is version v + f. pi_prox lies between them, and log-probabilities
are interpolated in the version:

    alpha = (v - v_b) / (v + f - v_b)  in [0, 1], 0/0 is 0
    log pi_prox = log pi_behav + alpha (log pi_theta - log pi_behav)

Both ends are exact. f = 0: no step has been taken, pi_theta is pi_prox, alpha is 1. v_b = v: the token is
fresh, pi_behav is pi_prox, alpha is 0 and decoupled PPO is standard PPO, bit for bit. In between the error is
that of a straight line through log-probabilities that moved unevenly. pi_theta enters as a constant: no
gradient flows through the guess.

A token newer than the trainer (v_b > v: after a recovery from an older checkpoint) counts as fresh and is counted
(metric versions_ahead).

`metrics` trains on the recomputed truth and logs what each guess would have done: `loglinear`, `linear` (the same alpha
between probabilities) and `rollout` (pi_behav itself), each with the absolute and relative error of log pi_prox and of
the two weights that depend on it: w = pi_prox / pi_behav and u = pi_theta / pi_prox.

Different from AReaL: there v is one too low (v - 1, so that fresh tokens and tokens one version old get alpha 0),
f is 1 at every minibatch, and versions are not shifted when logprobs are, so that a token gets its neighbour's.

Shapes: N tokens.
"""

import torch
from torch import Tensor


def interpolation(versions: Tensor, version: int, fraction: float | Tensor) -> Tensor:
    """(N,) alpha: where between pi_behav (0) and pi_theta (1) pi_prox is taken to lie.

    `versions` (N,) is v_b, `version` v, `fraction` f: the minibatches of the step already done, over all of them.
    """
    # alpha = (v - v_b) / (v + f - v_b)
    lag = (version - versions).clamp(min=0).float()
    return torch.where(lag > 0, lag / (lag + fraction), 0.0)


def loglinear(old_logp: Tensor, theta_logp: Tensor, alpha: Tensor) -> Tensor:
    """log pi_prox = log pi_behav + alpha (log pi_theta - log pi_behav)"""
    return old_logp + alpha * (theta_logp - old_logp)


def linear(old_logp: Tensor, theta_logp: Tensor, alpha: Tensor) -> Tensor:
    """pi_prox = (1 - alpha) pi_behav + alpha pi_theta"""
    return torch.logaddexp(torch.log1p(-alpha) + old_logp, alpha.log() + theta_logp)


def rollout(old_logp: Tensor, theta_logp: Tensor, alpha: Tensor) -> Tensor:
    """pi_prox = pi_behav"""
    return old_logp


def guess_errors(prox_logp: Tensor, old_logp: Tensor, theta_logp: Tensor, alpha: Tensor) -> dict[str, Tensor]:
    """(N,) each: |guess - truth| and |guess - truth| / |truth| of log pi_prox, w and u, for each guess.

    Keys: {guess}_{logp | behave_weight | ratio}_{abs | rel}_error. prox_logp is the recomputed truth.
    """

    def quantities(prox: Tensor) -> dict[str, Tensor]:
        # bounded where it is exponentiated, so that one token cannot make a mean infinite
        w, u = (x.clamp(-20, 20).exp() for x in (prox - old_logp, theta_logp - prox))
        return {"logp": prox, "behave_weight": w, "ratio": u}

    truth, errors = quantities(prox_logp), {}
    for guess in (loglinear, linear, rollout):
        for key, value in quantities(guess(old_logp, theta_logp, alpha)).items():
            error = (value - truth[key]).abs()
            errors[f"{guess.__name__}_{key}_abs_error"] = error
            errors[f"{guess.__name__}_{key}_rel_error"] = error / truth[key].abs().clamp(min=1e-8)
    return errors
