"""The guess of pi_prox follows its formula, and is exact in two cases."""

import pytest
import torch

from ppo import ppo_actor_loss_fn
from training.proximal import interpolation, loglinear


def test_alpha_is_where_the_version_lies():
    """(v - v_b) / (v + f - v_b), and 0 for a token that is as new as the trainer, or newer."""
    v_b = torch.tensor([7, 6, 5, 3, 9])
    for f in (0.0, 0.25, 0.75):
        expected = [0.0] + [(7 - b) / (7 + f - b) for b in (6, 5, 3)] + [0.0]
        assert interpolation(v_b, 7, f).tolist() == pytest.approx(expected)
    assert interpolation(v_b, 7, 0.0).tolist() == [0, 1, 1, 1, 0]


def test_on_fresh_data_loglinear_is_standard_ppo_bit_for_bit():
    """alpha is 0, so log pi_prox is log pi_behav, and every weight is 1."""
    g = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(40, generator=g)
    theta, A = old + 0.3 * torch.randn(40, generator=g), torch.randn(40, generator=g)
    prox = loglinear(old, theta, interpolation(torch.full((40,), 3), 3, 0.5))
    assert torch.equal(prox, old)
    losses = [ppo_actor_loss_fn(theta, p, old, A, torch.ones(40))[0] for p in (prox, old)]
    assert torch.equal(*losses)


def policy(version: float) -> torch.Tensor:
    """Log-probabilities (400,) of a version. They are quadratic in the version, so no line is
    exact."""
    g = torch.Generator().manual_seed(1)
    way = torch.randn(400, generator=g)
    return -2 + 0.05 * version * way + 0.01 * version**2 * torch.randn(400, generator=g)


def test_the_error_falls_to_nothing_as_the_data_gets_fresh():
    """At lag 0 there is no error."""
    v, f = 9, 0.5
    theta, truth = policy(v + f), policy(v)
    errors = []
    for lag in (8, 4, 2, 1, 0):
        v_b, old = torch.full((400,), v - lag), policy(v - lag)
        errors.append((loglinear(old, theta, interpolation(v_b, v, f)) - truth).abs().mean().item())
    assert errors[-1] == 0.0
    assert errors == sorted(errors, reverse=True)
