"""The parameters of a request, and the sampling of its next token.

Every draw uses one random number: a hash of the request's seed and the token's position. So other
requests do not change the draw. If an aborted request is sent again with its seed and partial
output, its next tokens get the same random numbers as without the abort.

At temperature T, log-probabilities are log_softmax(logits / T), after penalties but before top_p
and top_k. Greedy requests (T = 0) use T = 1 in this formula.
"""

import asyncio
import hashlib
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from inference.io_struct import Sampling


class SamplingParams(Sampling, strict=True):
    """SGLang's sampling_params. The last three fields are not implemented, so they accept only
    their defaults."""

    ignore_eos: bool = False  # no token ends the output, not even one of stop_token_ids
    sampling_seed: int = Field(default_factory=lambda: random.getrandbits(64))
    min_p: float = Field(0.0, ge=0, le=0)
    presence_penalty: float = Field(0.0, ge=0, le=0)
    repetition_penalty: float = Field(1.0, ge=1, le=1)


@dataclass(eq=False)
class Sequence:
    """The prompt of one POST /generate, and its output so far."""

    rid: str  # the request's id "SESSION/...", for /abort_request
    prompt: list[int]
    params: SamplingParams

    session: str = field(init=False)
    tokens: list[int] = field(init=False)  # prompt and output
    logprobs: list[float] = field(default_factory=list)  # one for each output token
    spans: list[dict[str, Any]] = field(default_factory=list)  # SGLang's weight_versions
    finish: str = ""  # why it has ended: stop, length or abort
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    cached: int = 0  # how many leading tokens have keys in the slot
    used: int = 0  # the last step that fed this sequence; at first the step of its arrival
    awaits: Any = None, 0  # a running sequence, and how many keys to copy from it

    def __post_init__(self) -> None:
        self.session = self.rid.partition("/")[0]
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    def append(self, token: int, logprob: float, version: str) -> None:
        if not self.spans or self.spans[-1]["version"] != version:
            self.spans.append({"version": version, "start": len(self.logprobs)})
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.spans[-1]["end"] = len(self.logprobs)

    def end(self, reason: str) -> None:
        self.finish = reason
        self.ended.set()


def uniform(seed: int, position: int) -> float:
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=3).digest()
    return int.from_bytes(digest, "big") / 2**24


def truncate(weights: Tensor, top_p: float, top_k: int) -> None:
    """Set the probabilities `weights` (vocab,) to 0 where top_p or top_k excludes the token."""
    ranked, order = weights.sort(descending=True)
    excluded = ranked.cumsum(0) - ranked >= (top_p if top_p < 1 else torch.inf)
    excluded[0] = False
    if top_k > 0:
        excluded[top_k:] = True
    weights.scatter_(0, order, ranked.masked_fill_(excluded, 0))


@torch.inference_mode()
def sample(logits: Tensor, sequences: list[Sequence]) -> tuple[list[int], list[float]]:
    """Return each sequence's next token and the token's logprob. `logits` (n, vocab) are
    overwritten, because allocating memory in every step would take longer than the computation. On
    a GPU, the CPU waits only in `tolist`."""
    params = [sequence.params for sequence in sequences]
    vocab = logits.shape[1]
    draws = [uniform(one.params.sampling_seed, len(one.tokens)) for one in sequences]
    numbers = torch.tensor([[p.temperature for p in params], draws])
    t, u = numbers.to(logits.device, non_blocking=logits.is_cuda)[:, :, None]  # (n, 1) each

    # 1. logit_v -= penalty * (how often token v was generated)
    for row, sequence in zip(logits, sequences, strict=True):
        if penalty := sequence.params.frequency_penalty:
            counts = torch.bincount(torch.tensor(sequence.output, dtype=torch.int), minlength=vocab)
            row -= penalty * counts.to(row.device, non_blocking=row.is_cuda)

    # 2. log_softmax(logits / T); a temperature below 1e-6 is greedy, as in SGLang
    greedy = t < 1e-6
    logprobs = torch.log_softmax(logits.div_(torch.where(greedy, 1.0, t)), dim=-1)  # (n, vocab)

    # 3. top_p and top_k
    weights = torch.exp(logprobs, out=logits)
    for row, p in zip(weights, params, strict=True):
        if p.top_p < 1 or p.top_k > 0:
            truncate(row, p.top_p, p.top_k)

    # 4. token = min { v : sum_{w <= v} p_w > u * sum_w p_w }
    cdf = weights.cumsum_(-1)
    token = torch.searchsorted(cdf, u * cdf[:, -1:], right=True).clamp_(max=vocab - 1)  # (n, 1)
    if any(p.temperature < 1e-6 for p in params):
        token = torch.where(greedy, logprobs.argmax(-1, keepdim=True), token)
    both = torch.cat((token, logprobs.gather(1, token)), dim=1)  # float32 holds ids below 2^24
    tokens, chosen = both.T.tolist()
    return [int(token) for token in tokens], chosen
