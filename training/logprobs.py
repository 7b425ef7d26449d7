"""Log-probabilities of N tokens without ever holding their (N, V) logits.

A language model's last layer turns a hidden state of some thousand numbers into V logits, one a word of a vocabulary
of 150,000. Of those training wants two numbers: log p of the token that came, and the entropy. Written down plainly,
the logits of 4,096 tokens are 2.5 GB in float32, and their softmax, its logarithm and the gradient of each as much
again: the last layer needs more memory than the whole model.

The rule here: logits exist for `chunk` tokens at a time, forward and backward. Forward keeps the two results of each
token and forgets the logits; backward multiplies hidden states and weights once more. That is one
more product of the last layer, a few per cent of a step, for a memory that no longer grows with N.

With z = h W^T / T (T the token's own temperature) and p = softmax(z):

    log p(id) = z_id - log sum_j exp z_j          d log p(id) / dz_j = [j = id] - p_j
    H         = -sum_j p_j log p_j                dH / dz_j          = -p_j (log p_j + H)

A temperature of 0 samples from no distribution that has a gradient; such a token is read at 1, and belongs outside the
loss. Products run in the type of the weights (as a server's do), everything behind them in float32.

Different from AReaL: there the (T, V) logits are made whole and chunked only behind, by a compiled function.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method

CHUNK_ELEMENTS = 1 << 25  # logits that exist at a time: 128 MiB in float32


class TokenLogprobs(torch.autograd.Function):
    """The equations above. N tokens, hidden size H, vocabulary V."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, temperatures: Tensor, chunk: int):
        logp, entropy = (hidden.new_empty(len(ids), dtype=torch.float32) for _ in range(2))  # (N,), (N,)
        for part in slices(len(ids), chunk):
            log_p = chunk_log_softmax(hidden[part], weight, temperatures[part])  # (c, V)
            logp[part] = log_p.gather(1, ids[part, None])[:, 0]
            entropy[part] = -(log_p.exp() * log_p).sum(-1)
        ctx.save_for_backward(hidden, weight, ids, temperatures, entropy)
        ctx.set_materialize_grads(False)
        ctx.chunk = chunk
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None):
        hidden, weight, ids, temperatures, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)  # (N, H)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)  # (V, H)
        g = torch.zeros_like(entropy) if grad_logp is None else grad_logp  # (N,)
        for part in slices(len(ids), ctx.chunk):
            log_p = chunk_log_softmax(hidden[part], weight, temperatures[part])  # (c, V)
            p = log_p.exp()
            grad_z = p * -g[part, None]  # (c, V)
            grad_z.scatter_add_(1, ids[part, None], g[part, None])
            if grad_entropy is not None:
                grad_z -= p.mul_(log_p.add_(entropy[part, None])).mul_(grad_entropy[part, None])
            grad_z = grad_z.div_(temperatures[part, None]).to(weight.dtype)
            grad_hidden[part] = grad_z @ weight
            grad_weight += grad_z.t() @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def chunk_log_softmax(hidden: Tensor, weight: Tensor, temperatures: Tensor) -> Tensor:
    """(c, H) hidden states -> (c, V) float32 log p of every token of the vocabulary, at each token's temperature."""
    return torch.log_softmax((hidden @ weight.t()).float().div_(temperatures[:, None]), dim=-1)


def slices(n: int, chunk: int) -> list[slice]:
    """0..n in stretches of `chunk`."""
    return [slice(i, min(i + chunk, n)) for i in range(0, n, chunk)]


def token_logprobs(
    hidden: Tensor, weight: Tensor, ids: Tensor, temperatures: Tensor, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """log p of each of N tokens and the entropy where it was drawn, in nats: (N,), (N,), float32, with gradients.

    hidden (N, H) predicts ids (N,), weight (V, H) is the model's last layer, temperatures (N,) float32. `chunk` is the
    number of tokens whose logits exist at a time; default: 128 MiB of them.
    """
    chunk = chunk or max(1, CHUNK_ELEMENTS // len(weight))
    return TokenLogprobs.apply(hidden, weight, ids, torch.where(temperatures > 0, temperatures, 1.0), chunk)


def read_hidden(self: Any, read: Callable[[Tensor, Tensor], Any], **inputs: Any) -> Any:
    """read(hidden states (b, t, H), weight of the last layer (V, H)): the model's forward, less its logits."""
    hidden = self.base_model(**inputs, use_cache=False).last_hidden_state
    return read(hidden, self.get_output_embeddings().weight)


def add_read_hidden(model: Any) -> None:
    """Give a sharded model that method: like forward it gathers the parameters first.

    Raises ValueError for a model that does more to its logits than multiply by one matrix.
    """
    config = model.config.get_text_config()
    bends = """final_logit_softcapping logits_soft_cap output_logit_soft_cap logits_scaling logit_scale
    lm_head_multiplier output_multiplier logits_mup_width_multiplier"""
    more = [name for name in bends.split() if getattr(config, name, None) not in (None, 1)]
    more += ["a bias"] if getattr(model.get_output_embeddings(), "bias", None) is not None else []
    if more:
        raise ValueError(
            f"{type(model).__name__} has {more}: its logits are not hidden @ weight.T; see training/logprobs.py"
        )
    model.read_hidden = MethodType(read_hidden, model)
    register_fsdp_forward_method(model, "read_hidden")
