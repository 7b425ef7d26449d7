"""Each sequence draws its next token from its row of logits.

Every draw takes one random number, a hash of (seed of the request, position of the token). So a
request that was aborted and sent again with its partial output goes on with the same numbers, and
no neighbour in the batch changes them.

Log-probabilities are log_softmax(logits / T) after penalties but before top_p and top_k, because
that is what the trainer can compute. At T = 0 they are those of T = 1.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from inference.tiny.scheduler import Sequence


def uniforms(seeds: list[int], positions: list[int]) -> Tensor:
    """Return n numbers in [0, 1): 23 bits of the splitmix64 hash of each (seed, position)."""
    x: Any = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)
    for word in (np.array(positions, dtype=np.uint64), 0):
        x = (x ^ word) + 0x9E3779B97F4A7C15
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB
        x = x ^ (x >> 31)
    return torch.from_numpy((x >> 41).astype(np.float32) * np.float32(2**-23))


def truncate(weights: Tensor, top_p: float, top_k: int) -> None:
    """Set the weights (vocab,) that top_p or top_k excludes to 0. The largest always stays."""
    ranked, order = weights.sort(descending=True)
    excluded = ranked.cumsum(0) - ranked >= (top_p if top_p < 1 else torch.inf)
    excluded[0] = False
    if top_k > 0:
        excluded[top_k:] = True
    weights[order[excluded]] = 0


def sample(logits: Tensor, sequences: list[Sequence]) -> tuple[list[int], list[float]]:
    """Return the next token of each sequence, and its logprob. `logits` (n, vocab)."""
    params = [sequence.params for sequence in sequences]
    vocab = logits.shape[1]

    # 1. logit_v -= penalty * (how often token v was generated)
    for i, sequence in enumerate(sequences):
        if penalty := params[i].frequency_penalty:
            output = torch.tensor(sequence.output, dtype=torch.int)
            logits[i] -= penalty * torch.bincount(output, minlength=vocab)

    # 2. log_softmax(logits / T); a temperature below 1e-6 is greedy, as in SGLang
    greedy, temperatures = None, [p.temperature for p in params]
    if set(temperatures) != {1.0}:
        t = torch.tensor(temperatures)[:, None]  # (n, 1)
        greedy = t < 1e-6
        logits = logits / torch.where(greedy, 1.0, t)
    logprobs = torch.log_softmax(logits, dim=-1)  # (n, vocab)

    # 3. top_p and top_k
    weights = logprobs.exp()
    for i, p in enumerate(params):
        if p.top_p < 1 or p.top_k > 0:
            truncate(weights[i], p.top_p, p.top_k)

    # 4. token = min { v : sum_{w <= v} p_w > u * sum_w p_w }
    cdf = weights.cumsum(-1)
    positions = [len(sequence.tokens) for sequence in sequences]
    u = uniforms([p.sampling_seed for p in params], positions)[:, None]  # (n, 1)
    token = torch.searchsorted(cdf, u * cdf[:, -1:], right=True).clamp_(max=vocab - 1)  # (n, 1)
    if greedy is not None:
        token = torch.where(greedy, logprobs.argmax(-1, keepdim=True), token)
    return token[:, 0].tolist(), logprobs.gather(1, token)[:, 0].tolist()
