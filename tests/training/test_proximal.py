"""The guess of pi_prox (training/proximal.py) follows its formula, is exact in two cases, and has a smaller error than
AReaL's guess."""

import math

import pytest
import torch

from ppo import ppo_actor_loss_fn
from training.config import PPOActorConfig
from training.proximal import guess_errors, interpolation, linear, loglinear, rollout


def test_alpha_is_where_the_version_lies():
    """alpha is (v - v_b) / (v + f - v_b), where v is the trainer's version, v_b the token's version, and f the share of
    the step that is done. For a token whose version is the trainer's version or newer, alpha is 0."""
    v_b = torch.tensor([7, 6, 5, 3, 9])
    for f in (0.0, 0.25, 0.75):
        expected = [0.0] + [(7 - b) / (7 + f - b) for b in (6, 5, 3)] + [0.0]
        assert interpolation(v_b, 7, f).tolist() == pytest.approx(expected)
    assert interpolation(v_b, 7, 0.0).tolist() == [0, 1, 1, 1, 0]


def test_both_ends_are_exact():
    """In the first mini-batch, the guess of pi_prox for a stale token is pi_theta. For a fresh token the guess is
    always pi_behav."""
    old, theta = -3 * torch.rand(50), -3 * torch.rand(50)
    stale, fresh = torch.zeros(50, dtype=torch.int), torch.full((50,), 4)
    torch.testing.assert_close(loglinear(old, theta, interpolation(stale, 4, 0.0)), theta)
    for guess in (loglinear, rollout):
        assert torch.equal(guess(old, theta, interpolation(fresh, 4, 0.5)), old)
    torch.testing.assert_close(linear(old, theta, interpolation(fresh, 4, 0.5)), old)
    torch.testing.assert_close(linear(old, theta, interpolation(stale, 4, 0.0)), theta)


def test_on_fresh_data_loglinear_is_standard_ppo_bit_for_bit():
    """For fresh tokens alpha is 0, and with prox_logp_method=loglinear the loss is bitwise the same as the loss of
    standard PPO."""
    g = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(40, generator=g)
    theta, A, mask = (
        old + 0.3 * torch.randn(40, generator=g),
        torch.randn(40, generator=g),
        torch.ones(40),
    )
    prox = loglinear(old, theta, interpolation(torch.full((40,), 3), 3, 0.5))
    ours, _ = ppo_actor_loss_fn(theta, prox, old, A, mask, PPOActorConfig())
    standard, _ = ppo_actor_loss_fn(
        theta, prox, old, A, mask, PPOActorConfig(use_decoupled_loss=False)
    )
    assert torch.equal(ours, standard)


def policy(version: float) -> torch.Tensor:
    """Return the log-probabilities (400,) of one version of a policy. The log-probabilities are a quadratic function of
    the version, so linear interpolation between two versions has an error."""
    g = torch.Generator().manual_seed(1)
    way = torch.randn(400, generator=g)
    return -2 + 0.05 * version * way + 0.01 * version**2 * torch.randn(400, generator=g)


def areal(old, theta, v_b, v):
    """Return AReaL's guess of log pi_prox, with alpha = (v - 1 - v_b) / (v - v_b). AReaL's guess for token t uses the
    version of token t - 1 as v_b."""
    v_b = torch.cat([v_b[:1], v_b[:-1]])
    alpha = ((v - 1 - v_b) / (v - v_b).clamp(min=1)).clamp(0, 1)
    return old + alpha * (theta - old)


def test_the_error_falls_to_nothing_as_the_data_gets_fresh():
    """The smaller the lag, the smaller the mean error of the guess. At lag 0 the guess has no error. At lag 1 the guess
    of this project has less than half the error of AReaL's guess."""
    v, f = 9, 0.5
    theta, truth = policy(v + f), policy(v)
    errors, theirs = [], []
    for lag in (8, 4, 2, 1, 0):
        v_b, old = torch.full((400,), v - lag), policy(v - lag)
        errors.append((loglinear(old, theta, interpolation(v_b, v, f)) - truth).abs().mean().item())
        theirs.append((areal(old, theta, v_b, v) - truth).abs().mean().item())
    assert errors[-1] == 0.0
    assert errors == sorted(errors, reverse=True)
    assert errors[3] < theirs[3] / 2, "at lag 1"


def test_the_reported_errors_are_those_of_the_definition():
    """For log pi_prox, pi_prox / pi_behav and pi_theta / pi_prox, guess_errors returns the same errors as a plain
    loop."""
    g = torch.Generator().manual_seed(2)
    prox, old, theta = (
        -3 * torch.rand(20, generator=g, dtype=torch.float64) - 0.1 for _ in range(3)
    )
    alpha = torch.rand(20, generator=g, dtype=torch.float64)
    errors = guess_errors(prox, old, theta, alpha)
    assert len(errors) == 18
    for i in range(20):
        p, b, t, a = prox[i].item(), old[i].item(), theta[i].item(), alpha[i].item()
        guesses = {
            "loglinear": b + a * (t - b),
            "linear": math.log((1 - a) * math.exp(b) + a * math.exp(t)),
            "rollout": b,
        }
        for name, guess in guesses.items():
            pairs = {
                "logp": (guess, p),
                "behave_weight": (math.exp(guess - b), math.exp(p - b)),
                "ratio": (math.exp(t - guess), math.exp(t - p)),
            }
            for key, (mine, truth) in pairs.items():
                assert errors[f"{name}_{key}_abs_error"][i].item() == pytest.approx(
                    abs(mine - truth), abs=1e-9
                )
                assert errors[f"{name}_{key}_rel_error"][i].item() == pytest.approx(
                    abs((mine - truth) / truth), abs=1e-9
                )
