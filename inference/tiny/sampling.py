"""Each sequence draws its next token from its row of logits.

Every draw takes one random number, a hash of (seed of the request, position of the token). So a
request that was aborted and sent again with its partial output goes on with the same numbers, and
no neighbour in the batch changes them.

Log-probabilities are log_softmax(logits / T) after penalties but before top_p and top_k, because
that is what the trainer can compute. At T = 0 they are those of T = 1.
"""

import hashlib

import torch
from torch import Tensor

from inference.tiny.scheduler import Sequence


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1): 24 bits of a hash of seed and position."""
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=3).digest()
    return int.from_bytes(digest, "big") / 2**24


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
    t = torch.tensor([p.temperature for p in params])[:, None]  # (n, 1)
    greedy = t < 1e-6
    logprobs = torch.log_softmax(logits / torch.where(greedy, 1.0, t), dim=-1)  # (n, vocab)

    # 3. top_p and top_k
    weights = logprobs.exp()
    for i, p in enumerate(params):
        if p.top_p < 1 or p.top_k > 0:
            truncate(weights[i], p.top_p, p.top_k)

    # 4. token = min { v : sum_{w <= v} p_w > u * sum_w p_w }
    cdf = weights.cumsum(-1)
    draws = [uniform(one.params.sampling_seed, len(one.tokens)) for one in sequences]
    u = torch.tensor(draws)[:, None]  # (n, 1)
    token = torch.searchsorted(cdf, u * cdf[:, -1:], right=True).clamp_(max=vocab - 1)  # (n, 1)
    token = torch.where(greedy, logprobs.argmax(-1, keepdim=True), token)
    return token[:, 0].tolist(), logprobs.gather(1, token)[:, 0].tolist()
