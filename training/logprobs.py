"""Compute log-probabilities and entropies without the logits of the whole batch.

The logits of N tokens over a vocabulary of V are an (N, V) matrix. With N = 16,384 and V = 151,936
the logits take 9.3 GiB, and so do their softmax and their gradient. But training needs only two
numbers per token, the log-probability and the entropy.

A token's logits depend only on one hidden state, so we compute the logits chunk by chunk, and keep
only the two numbers per token. The backward pass recomputes the logits. With the hidden state h,
the output layer W, the temperature tau and the sampled token's index id:

    z       = W h / tau                          logp    = z_id - log sum_k exp z_k
    log p_j = z_j - log sum_k exp z_k            entropy = - sum_j p_j log p_j

With N = 4,096, forward and backward pass together take 289 MiB. Without chunks they would take
11,733 MiB (`python bench/loss.py`). The price is to compute the logits twice, a fourth matrix
product beside the usual three. If a model scales, caps or shifts its logits, z is not W h / tau, so
training/layout.py refuses such models.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method

CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 26}  # logits of a chunk, at most

# Shapes: N tokens, hidden size D, vocabulary V, and c tokens in a chunk.


def chunks(weight: Tensor, *things: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut `things` (N, ...) into chunks of tokens with at most CHUNK_ELEMENTS logits each."""
    size = max(1, CHUNK_ELEMENTS[weight.device.type] // len(weight))
    return zip(*(x.split(size) for x in things))


def chunk_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """(c, D), (V, D) -> (c, V) float32. On a GPU, the product of bfloat16 matrices stays float32,
    as in SGLang with --enable-fp32-lm-head."""
    if hidden.is_cuda and weight.dtype == torch.bfloat16:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    return (hidden @ weight.t()).float()


def chunk_log_p(hidden: Tensor, weight: Tensor, tau: Tensor) -> Tensor:
    """The log-probabilities (c, V) of all tokens of the vocabulary."""
    return torch.log_softmax(chunk_logits(hidden, weight).div_(tau[:, None]), dim=-1)


def chunk_results(log_p: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """logp (c,) and entropy (c,) of a chunk."""
    return log_p.gather(1, ids[:, None])[:, 0], -torch.linalg.vecdot(log_p.exp(), log_p)


def chunk_gradient(log_p: Tensor, ids: Tensor, g: Tensor, e: Tensor) -> Tensor:
    """The gradient (c, V) of sum(g logp + e entropy) with respect to z. The factors `g` and `e`
    have the shape (c,). To save memory, the function may overwrite `log_p`."""
    # d logp / d z_j = [j = id] - p_j             d entropy / d z_j = -p_j (log p_j + entropy)
    p, g = log_p.exp(), g[:, None]
    if e.any():
        entropy = -torch.linalg.vecdot(p, log_p)[:, None]  # (c, 1)
        grad = log_p.add_(entropy).mul_(e[:, None]).add_(g).mul_(p).neg_()
    else:
        grad = p.mul_(-g)
    return grad.scatter_add_(1, ids[:, None], g)


class TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, *tokens: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(weight, *tokens)
        parts = chunks(weight, *tokens)
        results = (chunk_results(chunk_log_p(h, weight, tau), ids) for h, ids, tau in parts)
        return tuple(map(torch.cat, zip(*results)))  # (N,), (N,)

    @staticmethod
    def backward(ctx: Any, g: Tensor, e: Tensor) -> tuple[Tensor | None, ...]:
        weight, *tokens = ctx.saved_tensors
        learns = ctx.needs_input_grad[0]
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if learns else None  # (V, D)
        grad_hidden = []
        for h, ids, tau, g_c, e_c in chunks(weight, *tokens, g, e):
            log_p = chunk_log_p(h, weight, tau)  # (c, V)
            grad = chunk_gradient(log_p, ids, g_c / tau, e_c / tau).to(weight.dtype)  # (c, V)
            grad_hidden.append(grad @ weight)  # (c, V) @ (V, D)
            if grad_weight is not None:
                grad_weight += grad.t() @ h  # (V, c) @ (c, D)
            del log_p, grad  # before the next chunk needs memory
        return grad_weight, torch.cat(grad_hidden), None, None  # autograd casts to the input dtypes


def token_logprobs(
    hidden: Tensor, weight: Tensor, ids: Tensor, temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities (N,) of the tokens `ids` (N,) and the entropies (N,) of their
    distributions, in nats and float32. Gradients flow to `hidden` (N, D) and `weight` (V, D).

    Temperature 0 (greedy) counts as 1.
    """
    tau = torch.where(temperatures > 0, temperatures, 1.0)  # (N,)
    return TokenLogprobs.apply(weight, hidden, ids, tau)


def add_read_hidden(model: Any) -> None:
    """Give a model the method read_hidden(read, **inputs). The method runs the model without its
    output layer, and returns read(hidden, weight), with the hidden states (b, t, D) and the output
    layer's weight (V, D). FSDP gathers the parameters first."""

    def read_hidden(read: Callable[[Tensor, Tensor], Any], **inputs: Any) -> Any:
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
        return read(hidden, model.get_output_embeddings().weight)

    model.read_hidden = read_hidden
    register_fsdp_forward_method(model, "read_hidden")
