"""Compute the log-probability and the entropy of every token, without the logits of the whole
batch.

**The problem.** The last layer of a language model turns the hidden state of each token into
logits, one number per word of the vocabulary. The logits of N tokens and a vocabulary of V words
are an (N, V) matrix. With N = 16,384, V = 151,936 and 4 bytes per number the logits take 9.3 GiB.
The softmax of the logits and the gradient of the logits take 9.3 GiB each. Training needs only two
numbers per token: the log-probability of the sampled token, and the entropy of the distribution.

**The idea.** The logits of one token do not depend on other tokens. The last layer can process one
chunk of tokens after another. The forward pass keeps the log-probability and the entropy of each
token and discards the chunk's logits. The backward pass recomputes the chunk's logits. Each pass
needs memory for the logits of only one chunk, even if the batch has many tokens.

**Forward pass.** Let h (D,) be the hidden state, W (V, D) the last layer, tau the temperature and
id the sampled token.

    z          = W h / tau
    log p_j    = z_j - log sum_k exp z_k           for each word j of the vocabulary
    logp       = log p_id
    entropy    = - sum_j p_j log p_j

The division by tau makes p the distribution that the server sampled from. At temperature 0 the
server chooses the likeliest token. A token that was chosen at temperature 0 gets tau = 1, and
should not be trained.

**Backward pass.** Let g be the gradient of the loss with respect to logp, and e the gradient with
respect to entropy. Then

    d loss / d z_j = g ([j = id] - p_j)  -  e p_j (log p_j + entropy)
    d loss / d h   = W^T (d loss / d z) / tau
    d loss / d W   = sum over tokens of (d loss / d z) h^T / tau

The symbol [j = id] is 1 for the sampled token and 0 for all other words.

**Costs and limits.** On a CPU the logits of a chunk take at most 128 MiB in float32. With V =
151,936, a chunk of 128 MiB has 220 tokens. For each chunk the backward pass reads and writes the
whole gradient of W, so a pass with fewer chunks is faster. On a GPU a chunk is four times as large
as on a CPU. The backward pass holds three matrices of the size of a chunk's logits: log p, p and
the gradient. For a bfloat16 model, the backward pass holds a copy of the gradient in bfloat16 as a
fourth matrix. A chunk needs up to 448 MiB on a CPU. The gradient of W is not cut into chunks. With
N = 4,096, the two passes need 545 MiB with chunks and 11,740 MiB without (`python bench/loss.py`).
With chunks, the last layer needs four matrix products instead of three, because the backward pass
repeats the matrix product of the forward pass. `add_read_hidden` refuses models that scale, cap or
shift their logits.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method

CHUNK_ELEMENTS = {
    "cpu": 1 << 25,
    "cuda": 1 << 27,
}  # maximum number of logits in one chunk, on each kind of device

# The keys of transformers' model configurations that cap or scale the logits.
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
SCALES = (
    "logits_scaling",
    "logit_scale",
    "lm_head_multiplier",
    "output_multiplier",
    "logits_mup_width_multiplier",
)

# Shapes in this file: N tokens, hidden size D, vocabulary size V, and c tokens in one chunk.


def chunks(n: int, size: int) -> list[slice]:
    """Cut the range 0..n-1 into slices of length `size`. The last slice may be shorter than
    `size`."""
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def chunk_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the (c, V) logits of one chunk of c tokens as float32.

    A GPU multiplies bfloat16 numbers and returns float32 logits, as SGLang does with
    --enable-fp32-lm-head. A CPU rounds the logits to the data type of the weights.
    """
    if hidden.is_cuda and weight.dtype == torch.bfloat16:
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)  # (c, D) @ (D, V) -> (c, V)
    return (hidden @ weight.t()).float()  # (c, D) @ (D, V) -> (c, V)


def chunk_results(logits: Tensor, ids: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """Return logp (c,) and entropy (c,) of one chunk of c tokens with logits (c, V)."""
    # z = W h / tau,  log p_j = z_j - log sum_k exp z_k
    log_p = torch.log_softmax(logits / tau[:, None], dim=-1)  # (c, V) / (c, 1) -> (c, V)
    del logits  # free the logits before the next matrices need memory

    # logp = log p_id
    logp = log_p.gather(1, ids[:, None])[:, 0]  # (c, V) -> (c, 1) -> (c,)

    # entropy = - sum_j p_j log p_j
    return logp, -(log_p.exp() * log_p).sum(-1)  # (c,), (c, V) -> (c,)


def chunk_gradient(
    logits: Tensor,
    ids: Tensor,
    tau: Tensor,
    entropy: Tensor,
    g: Tensor,
    e: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of the loss with respect to the logits (c, V) of one chunk, as numbers of
    type `dtype`."""
    log_p = torch.log_softmax(logits / tau[:, None], dim=-1)  # (c, V)
    del logits  # free the logits before the next matrices need memory
    p = log_p.exp()  # (c, V)

    # d loss / d z_j = g ([j = id] - p_j): -g p_j for all words, and + g for the sampled token
    grad_z = p * -g[:, None]  # (c, V)
    grad_z.scatter_add_(1, ids[:, None], g[:, None])  # (c, 1) added into (c, V)
    if e is not None:
        # d loss / d z_j -= e p_j (log p_j + entropy), computed in place to save memory
        log_p += entropy[:, None]  # (c, V)
        grad_z -= p.mul_(log_p).mul_(e[:, None])  # (c, V)
    return grad_z.div_(tau[:, None]).to(dtype)  # (c, V)


@cache
def fuse(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` compiled. A compiled function reads and writes a chunk's logits fewer times
    than the uncompiled function."""
    return torch.compile(function, dynamic=True)


class TokenLogprobs(torch.autograd.Function):
    """Compute logp and entropy chunk by chunk. The backward pass recomputes each chunk's logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        tau: Tensor,
        chunk: int,
        compiled: bool,
    ):
        results = fuse(chunk_results) if compiled else chunk_results
        logp = hidden.new_empty(len(ids), dtype=torch.float32)  # (N,)
        entropy = hidden.new_empty(len(ids), dtype=torch.float32)  # (N,)
        for part in chunks(len(ids), chunk):
            logp[part], entropy[part] = results(
                chunk_logits(hidden[part], weight), ids[part], tau[part]
            )  # (c,), (c,)

        # No saved tensor has the size of the logits, (N, V).
        ctx.save_for_backward(hidden, weight, ids, tau, entropy)
        ctx.set_materialize_grads(
            False
        )  # a result that the loss does not use has the gradient None
        ctx.chunk, ctx.gradient = chunk, fuse(chunk_gradient) if compiled else chunk_gradient
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, e: Tensor | None):
        hidden, weight, ids, tau, entropy = ctx.saved_tensors  # (N, D), (V, D), (N,), (N,), (N,)
        g = torch.zeros_like(entropy) if g is None else g  # (N,)
        grad_hidden = torch.empty_like(hidden)  # (N, D)
        grad_weight = torch.zeros_like(
            weight, dtype=torch.float32
        )  # (V, D), summed over the chunks in float32
        for part in chunks(len(ids), ctx.chunk):
            entropy_c, g_c, e_c = (
                entropy[part],
                g[part],
                None if e is None else e[part],
            )  # (c,), (c,), (c,)
            grad_z = ctx.gradient(
                chunk_logits(hidden[part], weight),
                ids[part],
                tau[part],
                entropy_c,
                g_c,
                e_c,
                weight.dtype,
            )  # (c, V)

            # d loss / d h = W^T (d loss / d z) / tau
            grad_hidden[part] = grad_z @ weight  # (c, V) @ (V, D) -> (c, D)

            # d loss / d W = sum over tokens of (d loss / d z) h^T / tau
            grad_weight += grad_z.t() @ hidden[part]  # (V, c) @ (c, D) -> (V, D)
            del grad_z  # free this matrix before the next chunk needs memory
        # PyTorch expects one gradient for each argument of forward, and None for an argument
        # without a gradient.
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    temperatures: Tensor,
    chunk: int | None = None,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities (N,) of N tokens and the entropies (N,) of their distributions,
    in nats.

        `hidden`        (N, D)  the hidden state from which the model predicts each token.
        `weight`        (V, D)  the matrix of the last layer.
        `ids`           (N,)    the tokens that were sampled.
        `temperatures`  (N,)    float32, the temperature at which each token was sampled.
        `chunk`                 the number of tokens in a chunk. By default a chunk has at most
        CHUNK_ELEMENTS logits.
        `compiled`              whether torch.compile fuses the pointwise operations of a chunk.

    Both results are float32. Gradients flow to `hidden` and `weight`.
    """
    chunk = chunk or max(1, CHUNK_ELEMENTS[hidden.device.type] // len(weight))
    tau = torch.where(temperatures > 0, temperatures, 1.0)  # (N,)
    return TokenLogprobs.apply(hidden, weight, ids, tau, chunk, compiled)


def read_hidden(model: Any, read: Callable[[Tensor, Tensor], Any], **inputs: Any) -> Any:
    """Run a Hugging Face model without its last layer and return read(hidden states, weight of the
    last layer).

    The hidden states have shape (b, t, D), and the weight has shape (V, D).
    """
    hidden = model.base_model(**inputs, use_cache=False).last_hidden_state  # (b, t, D)
    return read(hidden, model.get_output_embeddings().weight)


def logit_changes(model: Any) -> list[str]:
    """Return what makes a model's logits differ from hidden @ weight.T: names of configuration
    keys, or "a bias"."""
    config, bias = (
        model.config.get_text_config(),
        getattr(model.get_output_embeddings(), "bias", None),
    )
    changes = [key for key in CAPS + SCALES if getattr(config, key, None) not in (None, 1)]
    return changes if bias is None else [*changes, "a bias"]


def add_read_hidden(model: Any) -> None:
    """Give a sharded model the method `read_hidden`. FSDP gathers the model's parameters before the
    method runs.

    Raises ValueError if the model computes its logits in any other way than hidden @ weight.T.
    """
    if changes := logit_changes(model):
        raise ValueError(
            f"{type(model).__name__} has {changes}, which logprobs.py cannot compute; use another model"
        )
    model.read_hidden = partial(read_hidden, model)
    register_fsdp_forward_method(model, "read_hidden")
