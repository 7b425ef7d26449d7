"""The log-probability and the entropy of tokens, without the logits of the whole batch.

The logits of N tokens are an (N, V) matrix. With N = 16,384 and V = 151,936 it takes 9.3 GiB, and
its softmax and its gradient take as much again. But training needs two numbers of each token.

The logits of one token do not depend on other tokens. So the last layer takes one chunk of tokens
after another, keeps the two numbers and forgets the logits; the backward pass computes them again.
With hidden state h, last layer W, temperature tau and the sampled token id:

    z       = W h / tau                          logp    = z_id - log sum_k exp z_k
    log p_j = z_j - log sum_k exp z_k            entropy = - sum_j p_j log p_j

Let g and e be the gradients of the loss with respect to logp and entropy. Then

    d loss / d z_j = g ([j = id] - p_j)  -  e p_j (log p_j + entropy)
    d loss / d h   = W^T (d loss / d z) / tau
    d loss / d W   = sum over tokens of (d loss / d z) h^T / tau

With N = 4,096 the two passes take 545 MiB instead of 11,740 (`python bench/loss.py`), for four
matrix products instead of three. Models that scale, cap or shift their logits are refused.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method

CHUNK_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 27}  # most logits in a chunk

# Keys of transformers' configurations that cap or scale the logits.
CHANGES = ["final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"]
CHANGES += ["logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier"]
CHANGES += ["logits_mup_width_multiplier"]

# Shapes: N tokens, hidden size D, vocabulary V, and c tokens in a chunk.


def chunk_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """(c, D), (V, D) -> (c, V) float32. A GPU multiplies bfloat16 numbers and adds them in float32,
    as SGLang does with --enable-fp32-lm-head."""
    if hidden.is_cuda and weight.dtype == torch.bfloat16:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return (hidden @ weight.t()).float()


def chunk_results(logits: Tensor, ids: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """logp (c,) and entropy (c,) of a chunk."""
    log_p = torch.log_softmax(logits / tau[:, None], dim=-1)  # (c, V)
    del logits  # before the next matrix needs memory
    return log_p.gather(1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def chunk_gradient(
    logits: Tensor,
    ids: Tensor,
    tau: Tensor,
    entropy: Tensor,
    g: Tensor,
    e: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of the loss with respect to the logits, (c, V)."""
    log_p = torch.log_softmax(logits / tau[:, None], dim=-1)  # (c, V)
    del logits
    p = log_p.exp()  # (c, V)
    # g ([j = id] - p_j)
    grad_z = p * -g[:, None]  # (c, V)
    grad_z.scatter_add_(1, ids[:, None], g[:, None])
    if e is not None:
        # - e p_j (log p_j + entropy), in place
        log_p += entropy[:, None]
        grad_z -= p.mul_(log_p).mul_(e[:, None])
    return grad_z.div_(tau[:, None]).to(dtype)


@cache
def fuse(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled: it reads and writes the logits fewer times."""
    return torch.compile(function, dynamic=True)


class TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        tau: Tensor,
        chunk: int,
        compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        results = fuse(chunk_results) if compiled else chunk_results
        logp, entropy = (torch.empty_like(tau) for _ in range(2))  # (N,), (N,)
        for start in range(0, len(ids), chunk):
            c = slice(start, start + chunk)
            logp[c], entropy[c] = results(chunk_logits(hidden[c], weight), ids[c], tau[c])
        ctx.save_for_backward(hidden, weight, ids, tau, entropy)
        ctx.set_materialize_grads(False)  # None for a result that the loss does not use
        ctx.chunk, ctx.gradient = chunk, fuse(chunk_gradient) if compiled else chunk_gradient
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, e: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, tau, entropy = ctx.saved_tensors
        g = torch.zeros_like(entropy) if g is None else g  # (N,)
        grad_hidden = torch.empty_like(hidden)  # (N, D)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)  # (V, D)
        for start in range(0, len(ids), ctx.chunk):
            c = slice(start, start + ctx.chunk)
            ends = (entropy[c], g[c], None if e is None else e[c], weight.dtype)
            grad_z = ctx.gradient(chunk_logits(hidden[c], weight), ids[c], tau[c], *ends)  # (c, V)
            grad_hidden[c] = grad_z @ weight  # (c, V) @ (V, D)
            grad_weight += grad_z.t() @ hidden[c]  # (V, c) @ (c, D)
            del grad_z
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    temperatures: Tensor,
    chunk: int | None = None,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities (N,) of the tokens `ids` (N,) and the entropies (N,) of their
    distributions, in nats and float32. Gradients flow to `hidden` (N, D) and `weight` (V, D).

    `temperatures` (N,) are those of the sampling; 0, greedy, counts as 1. `chunk` is a number of
    tokens.
    """
    chunk = chunk or max(1, CHUNK_ELEMENTS[hidden.device.type] // len(weight))
    tau = torch.where(temperatures > 0, temperatures, 1.0)  # (N,)
    return TokenLogprobs.apply(hidden, weight, ids, tau, chunk, compiled)


def read_hidden(model: Any, read: Callable[[Tensor, Tensor], Any], **inputs: Any) -> Any:
    """Run a model without its last layer, and return read(hidden states (b, t, D), weight of the
    last layer (V, D))."""
    hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
    return read(hidden, model.get_output_embeddings().weight)


def add_read_hidden(model: Any) -> None:
    """Give a sharded model the method `read_hidden`, before which FSDP gathers its parameters.
    Raises ValueError if the logits are more than hidden @ weight.T."""
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    changes = [key for key in CHANGES if getattr(config, key, None) not in (None, 1)]
    changes += ["a bias"] * (getattr(head, "bias", None) is not None)
    if changes:
        raise ValueError(f"{type(model).__name__} has {changes}: logprobs.py cannot compute it")
    model.read_hidden = partial(read_hidden, model)
    register_fsdp_forward_method(model, "read_hidden")
