"""Compute log-probabilities and entropies without the logits of the whole batch.

The logits of N tokens are an (N, V) matrix. With N = 16,384 and V = 151,936 it takes 9.3 GiB, and
its softmax and its gradient are as large. But training needs only two numbers per token.

The logits of one token do not depend on other tokens. So the last layer takes one chunk of tokens
after another, keeps the two numbers and forgets the logits; the backward pass computes them again.
With hidden state h, last layer W, temperature tau and the sampled token id:

    z       = W h / tau                          logp    = z_id - log sum_k exp z_k
    log p_j = z_j - log sum_k exp z_k            entropy = - sum_j p_j log p_j

With N = 4,096 the two passes take 400 MiB instead of 11,740 (`python bench/loss.py`), but need four
matrix products instead of three. Models that scale, cap or shift their logits are refused.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method

CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 26}  # most logits in a chunk

# Shapes: N tokens, hidden size D, vocabulary V, and c tokens in a chunk.


def chunks(weight: Tensor, *things: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut `things` (N, ...) into chunks of at most CHUNK_ELEMENTS logits."""
    size = max(1, CHUNK_ELEMENTS[weight.device.type] // len(weight))
    return zip(*(x.split(size) for x in things))


def chunk_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """(c, D), (V, D) -> (c, V) float32. A GPU multiplies bfloat16 numbers and adds them in float32,
    as SGLang does with --enable-fp32-lm-head."""
    if hidden.is_cuda and weight.dtype == torch.bfloat16:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return (hidden @ weight.t()).float()


def chunk_results(logits: Tensor, ids: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """logp (c,) and entropy (c,) of a chunk."""
    log_p = torch.log_softmax(logits / tau[:, None], dim=-1)  # (c, V)
    return log_p.gather(1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


class TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, *tokens: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(weight, *tokens)
        cut = chunks(weight, *tokens)
        results = [chunk_results(chunk_logits(h, weight), ids, tau) for h, ids, tau in cut]
        return tuple(map(torch.cat, zip(*results)))  # (N,), (N,)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, *tokens = ctx.saved_tensors
        learns = ctx.needs_input_grad[0]  # a frozen weight needs no gradient
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if learns else None  # (V, D)
        grad_hidden = []
        for h, ids, tau, *grads in chunks(weight, *tokens, *gradients):
            logits = chunk_logits(h, weight).requires_grad_()  # (c, V)
            with torch.enable_grad():
                results = chunk_results(logits, ids, tau)
            grad = torch.autograd.grad(results, logits, grads)[0].to(weight.dtype)  # (c, V)
            grad_hidden.append(grad @ weight)  # (c, V) @ (V, D)
            if learns:
                grad_weight += grad.t() @ h  # (V, c) @ (c, D)
            del logits, results, grad  # before the next chunk needs memory
        grad_weight = grad_weight.to(weight.dtype) if learns else None
        return grad_weight, torch.cat(grad_hidden), None, None


def token_logprobs(
    hidden: Tensor, weight: Tensor, ids: Tensor, temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities (N,) of the tokens `ids` (N,) and the entropies (N,) of their
    distributions, in nats and float32. Gradients flow to `hidden` (N, D) and `weight` (V, D).

    `temperatures` (N,) are those of the sampling; 0, greedy, counts as 1.
    """
    tau = torch.where(temperatures > 0, temperatures, 1.0)  # (N,)
    return TokenLogprobs.apply(weight, hidden, ids, tau)


def add_read_hidden(model: Any) -> None:
    """Give a model the method read_hidden(read, **inputs). It runs all layers but the last, and
    returns read(hidden states (b, t, D), weight of the last layer (V, D)). FSDP gathers the
    parameters first."""

    def read_hidden(read: Callable[[Tensor, Tensor], Any], **inputs: Any) -> Any:
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
        return read(hidden, model.get_output_embeddings().weight)

    model.read_hidden = read_hidden
    register_fsdp_forward_method(model, "read_hidden")
