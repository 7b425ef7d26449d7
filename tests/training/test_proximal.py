"""The guess of pi_prox follows its formula, is exact in two cases, and is better than AReaL's."""

import math

import pytest
import torch

from ppo import ppo_actor_loss_fn
from training.proximal import guess_errors, interpolation, linear, loglinear, rollout


def test_alpha_is_where_the_version_lies():
    """(v - v_b) / (v + f - v_b), and 0 for a token that is as new as the trainer, or newer."""
    v_b = torch.tensor([7, 6, 5, 3, 9])
    for f in (0.0, 0.25, 0.75):
        expected = [0.0] + [(7 - b) / (7 + f - b) for b in (6, 5, 3)] + [0.0]
        assert interpolation(v_b, 7, f).tolist() == pytest.approx(expected)
    assert interpolation(v_b, 7, 0.0).tolist() == [0, 1, 1, 1, 0]


def test_both_ends_are_exact():
    """A stale token in the first mini-batch gets pi_theta, a fresh token always pi_behav."""
    old, theta = -3 * torch.rand(50), -3 * torch.rand(50)
    stale, fresh = torch.zeros(50, dtype=torch.int), torch.full((50,), 4)
    for guess in (loglinear, linear):
        torch.testing.assert_close(guess(old, theta, interpolation(stale, 4, 0.0)), theta)
    for guess in (loglinear, linear, rollout):
        torch.testing.assert_close(guess(old, theta, interpolation(fresh, 4, 0.5)), old)


def test_on_fresh_data_loglinear_is_standard_ppo_bit_for_bit():
    """alpha is 0, so log pi_prox is log pi_behav, and every weight 1."""
    g = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(40, generator=g)
    theta, A = old + 0.3 * torch.randn(40, generator=g), torch.randn(40, generator=g)
    prox = loglinear(old, theta, interpolation(torch.full((40,), 3), 3, 0.5))
    assert torch.equal(prox, old)
    losses = [ppo_actor_loss_fn(theta, p, old, A, torch.ones(40))[0] for p in (prox, old)]
    assert torch.equal(*losses)


def policy(version: float) -> torch.Tensor:
    """Log-probabilities (400,) of a version. They are quadratic in it, so no line is exact."""
    g = torch.Generator().manual_seed(1)
    way = torch.randn(400, generator=g)
    return -2 + 0.05 * version * way + 0.01 * version**2 * torch.randn(400, generator=g)


def areal(old, theta, v_b, v):
    """AReaL's guess: alpha = (v - 1 - v_b) / (v - v_b), with the version of the token before."""
    v_b = torch.cat([v_b[:1], v_b[:-1]])
    alpha = ((v - 1 - v_b) / (v - v_b).clamp(min=1)).clamp(0, 1)
    return old + alpha * (theta - old)


def test_the_error_falls_to_nothing_as_the_data_gets_fresh():
    """At lag 0 there is none, and at lag 1 it is less than half of AReaL's."""
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
    """Absolute and relative, of log pi_prox, w and u, by a loop."""
    g = torch.Generator().manual_seed(2)
    tensors = [-3 * torch.rand(20, generator=g, dtype=torch.float64) - 0.1 for _ in range(3)]
    alpha = torch.rand(20, generator=g, dtype=torch.float64)
    prox, old, theta = tensors
    errors = guess_errors(prox, old, theta, alpha)
    assert len(errors) == 18
    for i, (p, b, t, a) in enumerate(zip(*(x.tolist() for x in (*tensors, alpha)))):
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
                found = [errors[f"{name}_{key}_{kind}_error"][i].item() for kind in ("abs", "rel")]
                expected = [abs(mine - truth), abs((mine - truth) / truth)]
                assert found == pytest.approx(expected, abs=1e-9)
