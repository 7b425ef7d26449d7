"""The metric logp_mismatch compares the log-probabilities of the inference server with those of the trainer.

The server and the trainer have the same weights but run different programs, so their results differ by rounding (about
1e-6 in float32, 0.05 in bfloat16). If the difference is larger, the server and the trainer use different weights or
masks, and every importance weight of the run is wrong.
"""

import torch
from torch import Tensor

from engine import RemoteInfEngine
from run.start import NoRollout
from training.actor import FSDPPPOActor


def logp_mismatch(batch: dict[str, Tensor], actor: FSDPPPOActor, rollout: RemoteInfEngine | NoRollout) -> float:
    """Return max |log p_server - log p_trainer| in nats, over tokens that both computed with the same weights.

    The maximum includes the tokens of the batch that were sampled at the current version. An asynchronous batch may
    have no such token, so the server also scores the batch's first two rows with the current weights.
    """
    differences = [torch.zeros(1)]
    if "prox_logp" in batch:
        current = batch["loss_mask"].bool() & (batch["versions"] == actor.get_version())  # (B, T)
        differences.append((batch["logprobs"] - batch["prox_logp"])[current])
    rows = {key: value[:2] for key, value in batch.items()}
    rows["temperatures"] = torch.ones_like(rows["temperatures"])
    trainer = actor.compute_logp(rows)  # (2, T), at temperature 1, as in the server's score
    if isinstance(rollout, RemoteInfEngine):
        ids = [row[mask].tolist() for row, mask in zip(rows["input_ids"], rows["attention_mask"], strict=True)]
        for ours, theirs in zip(trainer, rollout.score(ids), strict=True):
            differences.append(ours[1 : len(theirs)] - torch.tensor(theirs[1:]))
    return torch.cat(differences).abs().nan_to_num(torch.inf).max().item()
