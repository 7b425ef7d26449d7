"""Attention of packed rows on a CPU.

PyTorch calls its kernel through two operators of torch.nn.attention.varlen, which have kernels only
for GPUs. This module registers two kernels for CPUs, in plain PyTorch. They refuse what the GPU's
kernel refuses, but accept float32. The operators themselves check shapes and define gradients.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen


def probabilities(q: Tensor, k: Tensor, bounds: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The probabilities (heads, t, t) of causal attention within each row, and the log-sum-exp
    (heads, t) of the scores."""
    t = torch.arange(len(q))
    row = torch.bucketize(t, bounds[1:], right=True)
    visible = (t[:, None] >= t) & (row[:, None] == row)  # (t, t)
    scores = torch.einsum("qhd,khd->hqk", q.float(), for_each_head(k, q)) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1), scores.logsumexp(-1)


def for_each_head(x: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values (t, groups, d) for all heads (t, heads, d)."""
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], 1)


def refuse(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, others: Tensor, longest: tuple[int, int]
) -> None:
    assert len({x.dtype for x in (q, k, v)}) == 1
    assert all(x.dim() == 3 and x.stride(-1) == 1 for x in (q, k, v))
    assert q.shape[-1] % 8 == 0
    assert q.shape[-1] <= 256
    assert q.shape[::2] == k.shape[::2] == v.shape[::2]
    assert k.shape == v.shape
    assert q.shape[1] % k.shape[1] == 0
    for x in (bounds, others):
        assert x.dtype == torch.int32, "offsets are int32"
        assert x.is_contiguous()
        assert x.device == q.device
        assert (x[0], x[-1]) == (0, len(q))
        assert (x.diff() > 0).all()
    assert longest == (bounds.diff().max(),) * 2


def forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, others: Tensor, *more: Any
) -> tuple[Tensor, Tensor, Tensor]:
    max_q, max_k, causal, scale, window, *_ = more
    refuse(q, k, v, bounds, others, (max_q, max_k))
    assert causal
    assert window == [-1, 0]
    p, sums = probabilities(q, k, bounds, scale)
    out = torch.einsum("hqk,khd->qhd", p, for_each_head(v, q)).to(q.dtype)
    return out.contiguous(), sums, torch.zeros(2, dtype=torch.uint64)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *more: Any
) -> tuple[Tensor, ...]:
    bounds, *_, scale, window = more
    assert window == [-1, 0]
    p, _ = probabilities(q, k, bounds, scale)
    grad_p = torch.einsum("qhd,khd->hqk", grad.float(), for_each_head(v, q))
    grad_scores = scale * p * (grad_p - (p * grad_p).sum(-1, keepdim=True))
    grad_q = torch.einsum("hqk,khd->qhd", grad_scores, for_each_head(k, q))
    grad_k = torch.einsum("hqk,qhd->khd", grad_scores, q.float())
    grad_v = torch.einsum("hqk,qhd->khd", p, grad.float())
    grad_k, grad_v = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (grad_k, grad_v))
    grad_q, grad_k, grad_v = (x.to(q.dtype).contiguous() for x in (grad_q, grad_k, grad_v))
    return grad_q, grad_k, grad_v


varlen._varlen_attn.register_kernel("cpu")(forward)
varlen._varlen_attn_backward.register_kernel("cpu")(backward)
