"""FastForward is a hand-written forward pass for Llama, Qwen2 and Qwen3. FastForward computes the logits with a small
number of large tensor operations.

**The rule.** The hidden state x has one vector of D numbers for each token. Each layer adds two terms to the hidden
state x:

    q, k, v = W_q norm(x), W_k norm(x), W_v norm(x)          q and k are rotated by the token's position
    x += W_o softmax(q k' / sqrt(d)) v                       attention to the token and to all tokens before it
    x += W_down (silu(W_gate norm(x)) * W_up norm(x))        the feed-forward network

After the last layer, the logits are W_head norm(x). The equations of a layer hold for Llama, Qwen2 and Qwen3. Qwen2
adds biases to q, k and v. Qwen3 applies norm to each head of q and k before the rotation.

**Why FastForward is faster.** In a small model, each tensor operation for one token takes about a microsecond, whatever
the size of the tensors. Therefore a step with fewer operations is faster. In FastForward, one matrix product computes
q, k and v, because their weights are fused. Another matrix product computes W_gate norm(x) and W_up norm(x).
FastForward normalises q and k together, and rotates them with one multiplication of complex tensors. In a measurement
on a CPU, F.rms_norm took about twice as long as this module's `rms_norm`.

**The weights.** `fuse` joins several weight matrices of the model into one fused matrix, and the model's own weights
become views of this matrix. No weight is stored twice, and a weight update of the model also changes the fused matrix.
If a model with D = 64 has 4 query heads, 2 key heads and 2 value heads of size d = 16, the fused matrix for q, k and v
has the shape (128, 64). In this example, rows 64 to 95 of the fused matrix are the weight of k_proj.

**Not promised.** For every architecture except Llama, Qwen2 and Qwen3, `fits` returns False, and transformers computes
the logits. The logits of FastForward agree with the logits of transformers to about 1e-6, but not bit by bit. Nothing
is compiled.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FAMILIES = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


def fits(model: Any) -> bool:
    """Return whether FastForward can compute the logits of this model."""
    if type(model).__name__ not in FAMILIES:
        return False
    layer, rope = model.model.layers[0], model.model.rotary_emb
    whole = (
        rope.rope_type in {"default", "llama3"}
        and 2 * len(rope.inv_freq) == layer.self_attn.head_dim
    )
    return whole and layer.mlp.up_proj.bias is None and model.config.hidden_act == "silu"


def fuse(*parts: Any) -> Any:
    """Concatenate parameters of shape (out, in) or (out,) along `out` into one tensor. Each parameter becomes a view of
    the joined tensor.

    A fused matrix is stored in column-major order (model.py, "Bits"). If the parameters are None because the layer has
    no biases, the result is None.
    """
    if parts[0] is None:
        return None
    fused = torch.cat([part.data.t() for part in parts], dim=-1).t()
    for part, view in zip(parts, fused.split([len(part) for part in parts]), strict=True):
        part.data = view
    return fused


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """Return x / sqrt(|x|^2 / D + eps) * weight, where D is the size of the last dimension."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # |x|
    return x * torch.addcmul(eps, length, length, value=1 / x.shape[-1]).rsqrt_() * weight


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate each head (rotary embedding): return (a + ib) e^(i angle) for the head's halves a and b. Shapes: x (rows,
    heads, columns, d), rotation (rows, 1, columns, d/2).

    In the result, the rotated a[j] stands directly before the rotated b[j]. The vectors q and k use the same order of
    elements, so the product q k' does not depend on this order.
    """
    a, b = x.chunk(2, dim=-1)  # (rows, heads, columns, d/2)
    return torch.view_as_real(torch.complex(a, b) * rotation).flatten(
        -2
    )  # (rows, heads, columns, d)


class FastForward:
    """The forward pass of one model. `attention` is a function with the signature of slot_attention in model.py."""

    def __init__(self, model: Any, attention: Any) -> None:
        inner, config = model.model, model.config
        self.attention = attention
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.frequencies, self.one = inner.rotary_emb.inv_freq, torch.ones(1)  # (d/2,), (1,)
        self.eps = torch.tensor(config.rms_norm_eps)
        self.embedding, self.norm, self.head = (
            inner.embed_tokens.weight,
            inner.norm.weight,
            model.lm_head.weight,
        )
        self.of_head = torch.tensor(
            [0] * self.heads + [1] * self.groups
        )  # index of each head's row in qk_norms
        self.qk_norms = None  # norm weights of q and k in each layer: (layers, 2, 1, d)
        if hasattr(inner.layers[0].self_attn, "q_norm"):
            norms = [
                norm.weight
                for layer in inner.layers
                for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm)
            ]
            self.qk_norms = fuse(*norms).view(len(inner.layers), 2, 1, -1)
        self.layers = []
        for layer in inner.layers:
            a, mlp = layer.self_attn, layer.mlp
            w_qkv = fuse(
                a.q_proj.weight, a.k_proj.weight, a.v_proj.weight
            )  # ((heads + 2 groups) d, D)
            b_qkv = fuse(
                a.q_proj.bias, a.k_proj.bias, a.v_proj.bias
            )  # ((heads + 2 groups) d,) or None
            attention = (
                layer.input_layernorm.weight,
                w_qkv,
                b_qkv,
                a.o_proj.weight.t(),
                a.o_proj.bias,
            )
            w_gate_up = fuse(
                mlp.gate_proj.weight, mlp.up_proj.weight
            )  # (2 * width of the feed-forward network, D)
            self.layers.append(
                (
                    *attention,
                    layer.post_attention_layernorm.weight,
                    w_gate_up,
                    mlp.down_proj.weight.t(),
                )
            )

    def __call__(
        self, ids: Tensor, positions: Tensor, mask: Tensor, cache: Any, kept: int
    ) -> Tensor:
        """Return the logits (rows, kept, vocab) of the last `kept` columns. `ids` and `positions` have the shape (rows,
        columns)."""
        (rows, columns), heads, groups, d = (
            ids.shape,
            self.heads,
            self.groups,
            2 * len(self.frequencies),
        )
        # e^(i p f): (rows, 1, columns, d/2)
        rotation = torch.polar(self.one, positions[:, None, :, None] * self.frequencies)
        # qk_norms[i] has one row of norm weights for each q and k head of layer i: (heads + groups, 1, d)
        qk_norms = None if self.qk_norms is None else self.qk_norms[:, self.of_head].unbind()
        x = F.embedding(ids.view(-1), self.embedding)  # (T, D) with T = rows * columns
        for i, (norm_1, w_qkv, b_qkv, w_o, b_o, norm_2, w_gate_up, w_down) in enumerate(
            self.layers
        ):
            # 1. q, k, v = W_q norm(x), W_k norm(x), W_v norm(x); then q and k are rotated
            qkv = F.linear(rms_norm(x, norm_1, self.eps), w_qkv, b_qkv).view(rows, columns, -1, d)
            qk, v = qkv.transpose(1, 2).split(
                [heads + groups, groups], dim=1
            )  # (rows, heads or groups, columns, d)
            if qk_norms:
                qk = rms_norm(qk, qk_norms[i], self.eps)
            q, k = rotate(qk, rotation).split([heads, groups], dim=1)

            # 2. x += W_o softmax(q k' / sqrt(d)) v
            y, _ = self.attention(
                None, q, *cache.update(k, v, i), mask
            )  # (rows, columns, heads, d)
            x = torch.addmm(x if b_o is None else x + b_o, y.view(-1, heads * d), w_o)  # (T, D)

            # 3. x += W_down (silu(W_gate norm(x)) * W_up norm(x))
            gate, up = F.linear(rms_norm(x, norm_2, self.eps), w_gate_up).chunk(
                2, dim=-1
            )  # (T, width) each
            x = torch.addmm(x, F.silu(gate) * up, w_down)  # (T, D)

        # 4. logits = W_head norm(x)
        x = rms_norm(x.view(rows, columns, -1)[:, -kept:], self.norm, self.eps)  # (rows, kept, D)
        return F.linear(x, self.head)
