"""Compute the log-probability and the entropy of every token, without storing the logits of the whole batch.

The problem
===========
The last layer of a language model turns each token's hidden state into logits, one number per word of the vocabulary.
The logits of a batch are a matrix of shape (tokens, vocabulary). With 16,384 tokens, a vocabulary of 151,936 and
4 bytes a number, this matrix takes 9.3 GiB. Its softmax and its gradient take 9.3 GiB each. But training needs only
two numbers per token: the log-probability of the sampled token, and the entropy of the distribution.

The idea
========
In the last layer no token depends on another token, so the last layer can process a small chunk of tokens at a time.
A chunk of 220 tokens has 128 MiB of logits. The forward pass keeps the two numbers of each token and discards the
logits of the chunk. The backward pass computes these logits again. A larger batch needs no more memory for logits.

Forward pass
============
    z          = W h / tau                         h (D,): hidden state, W (V, D): last layer, tau: temperature
    log p_j    = z_j - log sum_k exp z_k           for each word j of the vocabulary, j = 1 .. V
    logp       = log p_id                          id: the sampled token
    entropy    = - sum_j p_j log p_j

Dividing by tau gives the distribution that the server sampled from. A temperature of 0 means that the server took the
likeliest token and did not sample. For such a token tau is set to 1, and the token should not be trained on.

Backward pass
=============
Let g be the gradient of the loss with respect to logp, and e the gradient with respect to entropy. Then

    d loss / d z_j = g ([j = id] - p_j)  -  e p_j (log p_j + entropy)
    d loss / d h   = W^T (d loss / d z) / tau
    d loss / d W   = sum over tokens of (d loss / d z) h^T / tau

where [j = id] is 1 for the sampled token and 0 for all other words.

Costs and limits
================
The last layer needs four matrix products instead of three, because the backward pass repeats the forward product.
With 4,096 tokens, forward and backward need 651 MiB instead of 11,740 MiB (`python bench/loss.py`).
The gradient of W is still one whole (V, D) matrix. `add_read_hidden` refuses models that scale, cap or shift logits.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method

CHUNK_ELEMENTS = 1 << 25  # the most logits that exist at one time: 128 MiB in float32

# Shapes in this file: N tokens, hidden size D, vocabulary size V, and c tokens in one chunk.


def chunks(n: int, size: int) -> list[slice]:
    """Cut the range 0..n-1 into slices of length `size`; the last slice may be shorter."""
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def chunk_log_softmax(hidden: Tensor, weight: Tensor, temperatures: Tensor) -> Tensor:
    """Return the (c, V) log-probabilities of the whole vocabulary for one chunk of c tokens.

    The matrix product is computed in the data type of the weights (often bfloat16), as on the server. The softmax is
    computed in float32.
    """
    # z = W h / tau
    z = (hidden @ weight.t()).float()  # (c, D) @ (D, V) -> (c, V)
    z.div_(temperatures[:, None])  # (c, V) / (c, 1)
    # log p_j = z_j - log sum_k exp z_k
    return torch.log_softmax(z, dim=-1)  # (c, V)


class TokenLogprobs(torch.autograd.Function):
    """Compute logp and entropy chunk by chunk; the backward pass computes each chunk's logits again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, temperatures: Tensor, chunk: int):
        logp = hidden.new_empty(len(ids), dtype=torch.float32)  # (N,)
        entropy = hidden.new_empty(len(ids), dtype=torch.float32)  # (N,)
        for part in chunks(len(ids), chunk):
            log_p = chunk_log_softmax(hidden[part], weight, temperatures[part])  # (c, V)
            # logp = log p_id
            logp[part] = log_p.gather(1, ids[part, None])[:, 0]  # (c, V) -> (c, 1) -> (c,)
            # entropy = - sum_j p_j log p_j
            entropy[part] = -(log_p.exp() * log_p).sum(-1)  # (c, V) -> (c,)
        # No saved tensor has both axes N and V, so none of them is as large as the logits of the batch.
        ctx.save_for_backward(hidden, weight, ids, temperatures, entropy)
        ctx.set_materialize_grads(False)  # a result that the loss does not use gets the gradient None
        ctx.chunk = chunk
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None):
        hidden, weight, ids, temperatures, entropy = ctx.saved_tensors  # (N, D), (V, D), (N,), (N,), (N,)
        g = torch.zeros_like(entropy) if grad_logp is None else grad_logp  # (N,)
        grad_hidden = torch.empty_like(hidden)  # (N, D)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)  # (V, D), summed over the chunks in float32
        for part in chunks(len(ids), ctx.chunk):
            log_p = chunk_log_softmax(hidden[part], weight, temperatures[part])  # (c, V)
            p = log_p.exp()  # (c, V)
            # d loss / d z_j = g ([j = id] - p_j): first -g p_j for all words, then + g at the sampled token
            grad_z = p * -g[part, None]  # (c, V)
            grad_z.scatter_add_(1, ids[part, None], g[part, None])  # (c, 1) added into (c, V)
            if grad_entropy is not None:
                # d loss / d z_j -= e p_j (log p_j + entropy), in place: log_p and p are not needed afterwards
                log_p_plus_entropy = log_p.add_(entropy[part, None])  # (c, V)
                grad_z -= p.mul_(log_p_plus_entropy).mul_(grad_entropy[part, None])  # (c, V)
            grad_z = grad_z.div_(temperatures[part, None]).to(weight.dtype)  # (c, V)
            # d loss / d h = W^T (d loss / d z) / tau
            grad_hidden[part] = grad_z @ weight  # (c, V) @ (V, D) -> (c, D)
            # d loss / d W = sum over tokens of (d loss / d z) h^T / tau
            grad_weight += grad_z.t() @ hidden[part]  # (V, c) @ (c, D) -> (V, D)
        # PyTorch expects one gradient for each argument of forward; ids, temperatures and chunk get None.
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def token_logprobs(
    hidden: Tensor, weight: Tensor, ids: Tensor, temperatures: Tensor, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities (N,) of N tokens and the entropies (N,) of their distributions, in nats.

    hidden        (N, D)  the hidden state from which the model predicts each token
    weight        (V, D)  the matrix of the last layer
    ids           (N,)    the tokens that were sampled
    temperatures  (N,)    float32, the temperature at which each token was sampled
    chunk                 number of tokens whose logits exist at one time; default: as many as fit into 128 MiB

    Both results are float32. Gradients flow to `hidden` and `weight`.
    """
    chunk = chunk or max(1, CHUNK_ELEMENTS // len(weight))
    tau = torch.where(temperatures > 0, temperatures, 1.0)  # (N,)
    return TokenLogprobs.apply(hidden, weight, ids, tau, chunk)


def read_hidden(self: Any, read: Callable[[Tensor, Tensor], Any], **inputs: Any) -> Any:
    """Run the model without its last layer and return read(hidden states, weight of the last layer).

    The hidden states have shape (b, t, D), and the weight has shape (V, D). `self` is a Hugging Face model, because
    `add_read_hidden` makes this function a method of the model.
    """
    hidden = self.base_model(**inputs, use_cache=False).last_hidden_state  # (b, t, D)
    return read(hidden, self.get_output_embeddings().weight)


def add_read_hidden(model: Any) -> None:
    """Add the method `read_hidden` to a sharded model, so that FSDP gathers the parameters before the method runs.

    Raises ValueError if the model computes its logits in any other way than hidden @ weight.T.
    """
    config = model.config.get_text_config()
    keys = """final_logit_softcapping logits_soft_cap output_logit_soft_cap logits_scaling logit_scale
    lm_head_multiplier output_multiplier logits_mup_width_multiplier"""
    more = [key for key in keys.split() if getattr(config, key, None) not in (None, 1)]
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        more.append("a bias")
    if more:
        raise ValueError(f"{type(model).__name__} has {more}, which logprobs.py cannot compute; use another model")
    model.read_hidden = MethodType(read_hidden, model)
    register_fsdp_forward_method(model, "read_hidden")
