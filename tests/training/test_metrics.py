"""The metrics of a batch: how old its tokens are, and whether server and trainer agree."""

import pytest
import torch

from training.metrics import describe_batch, logp_mismatch

BATCH = {
    "loss_mask": torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1], [0, 0, 0, 0]]),
    "versions": torch.tensor([[-1, 3, 4, -1], [-1, 2, 2, 2], [-1, 4, 4, 4]], dtype=torch.int32),
    "turn_ids": torch.tensor([[-1, 0, 0, -1], [-1, 0, 0, 0], [-1, 0, 0, 0]]),
    "logprobs": torch.tensor([[0, -1.0, -2.0, 0], [0, -1, -1, -1], [0, 0, 0, 0]]),
    "rewards": torch.tensor([1.0, 0.0, 2.0]),
    "side_conversations": torch.tensor([0, 0, 1]),
    **{name: torch.tensor([1, 0, 2]) for name in ("truncated", "masked")},
}


def test_the_lags_of_a_batch() -> None:
    """The lag of a trained token is the policy's version minus its own; untrained ones have
    none. A side conversation has no reward."""
    found = describe_batch(BATCH, version=4)
    assert found["lag_counts"] == [1, 1, 3]
    assert found["staleness_mean"] == pytest.approx((0 + 1 + 2 * 3) / 5)
    assert (found["staleness_max"], found["tokens"], found["untrained"]) == (2.0, 5, 3)
    assert found["mixed_version_share"] == 0.5
    assert (found["reward"], found["reward_std"], found["truncated"]) == (0.5, 0.5, 3)


def test_only_fresh_tokens_are_compared() -> None:
    """Server and trainer have the same weights only where a token has the trainer's version, and
    pi_theta has them only before the first optimizer step."""
    batch = BATCH | {"prox_logp": BATCH["logprobs"] + torch.tensor([[9, 9, 0.25, 9]] * 3)}
    assert logp_mismatch(batch, 4) == 0.25
    assert logp_mismatch(batch, 9) == 0.0
    first = BATCH | {"start_logp": batch["prox_logp"] * torch.tensor([[0], [1], [1]])}
    assert [logp_mismatch(first, version) for version in (4, 2)] == [0.0, 9.0]
    batch["prox_logp"] = batch["prox_logp"] * torch.nan
    assert logp_mismatch(batch, 4) == float("inf")
