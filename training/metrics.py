"""The metrics of a batch: how old its tokens are, and whether server and trainer give them the same
log-probabilities."""

from typing import Any

import torch
from torch import Tensor


def describe_batch(batch: dict[str, Tensor], version: int) -> dict[str, Any]:
    """Return the metrics of a batch that is consumed at `version`. The lag of a trained token is
    `version` minus the token's version. A row is mixed if its trained tokens have more than one
    version."""
    mask, versions = batch["loss_mask"].bool(), batch["versions"]  # (rows, T)
    newest = versions.masked_fill(~mask, -1).amax(1, keepdim=True)  # (rows, 1)
    mixed = (mask & (versions < newest)).any(1)[mask.any(1)]  # of the rows with trained tokens
    lag = version - versions[mask]  # (M,)
    rewards = batch["rewards"][batch["side_conversations"] == 0]
    return {
        "rows": len(mask),
        "reward": rewards.mean().item(),
        "reward_std": rewards.std(correction=0).item(),
        "staleness_mean": lag.float().mean().item() if len(lag) else 0.0,
        "staleness_max": float(lag.max()) if len(lag) else 0.0,
        "lag_counts": torch.bincount(lag.clamp(min=0)).tolist(),
        "mixed_version_share": mixed.float().mean().item() if len(mixed) else 0.0,
        **{name: int(batch[name].sum()) for name in ("truncated", "masked", "side_conversations")},
        "tokens": int(mask.sum()),
        "untrained": int((batch["turn_ids"] >= 0).sum()) - int(mask.sum()),
    }


def logp_mismatch(batch: dict[str, Tensor], version: int) -> float:
    """max |log p_server - log p_trainer| in nats, over the tokens that the current weights sampled.

    For these tokens, server and trainer have the same weights, so their log-probabilities differ
    only by rounding, about 1e-6 in float32. log p_trainer is log pi_prox. If no pass has computed
    log pi_prox, log p_trainer is log pi_theta of the first mini-batch, before any optimizer step.
    """
    fresh = batch["loss_mask"].bool() & (batch["versions"] == version)  # (rows, T)
    key = "prox_logp" if "prox_logp" in batch else "start_logp"
    if key == "start_logp":
        fresh &= batch[key] != 0
    apart = (batch["logprobs"] - batch[key])[fresh]
    return torch.cat([torch.zeros(1), apart]).abs().nan_to_num(torch.inf).max().item()
