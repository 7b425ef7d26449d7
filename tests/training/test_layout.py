"""On a GPU, one kernel computes the attention of a packed row. These tests run on a CPU.

PyTorch calls the kernel through two operators of torch.nn.attention.varlen, one for the forward pass and one for the
backward pass. PyTorch has kernels for these operators only on GPUs, so this file registers two kernels for CPUs,
written in plain PyTorch. The CPU kernels compute the numbers that the GPU kernels compute. The CPU kernel of the
forward pass refuses the inputs that the GPU kernel refuses. The operators' other code, such as checks of shapes and the
rule for gradients, is the same on a CPU and on a GPU.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode
from trainers import gradients, make_batch, make_config, prepare

from training import layout
from training.actor import FSDPPPOActor
from training.layout import attend_apart, cut_packed, has_kernel


def probabilities(q: Tensor, k: Tensor, bounds: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the probabilities (heads, t, t) of causal attention within each sequence, and the log-sum-exp (heads, t)
    of each query's scores."""
    t, sequence = (
        torch.arange(len(q)),
        torch.bucketize(torch.arange(len(q)), bounds[1:], right=True),
    )
    visible = (t[:, None] >= t) & (sequence[:, None] == sequence)  # (t, t)
    scores = torch.einsum("qhd,khd->hqk", q.float(), per_head(k, q)) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1), scores.logsumexp(-1)


def per_head(x: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values from the shape (t, groups, d) to (t, heads, d), so that each query head has its own keys or
    values."""
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], 1)


def refuse(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, others: Tensor, longest: tuple[int, int]
) -> None:
    """Raise an error for inputs that FlashAttention's kernel refuses, and for inputs that make the kernel read out of
    bounds."""
    assert {x.dtype for x in (q, k, v)} <= {torch.bfloat16} or {x.dtype for x in (q, k, v)} <= {
        torch.float16
    }
    assert all(x.dim() == 3 and x.is_contiguous() for x in (q, k, v))
    assert q.shape[-1] % 8 == 0
    assert q.shape[-1] <= 256
    assert q.shape[1] % k.shape[1] == 0
    assert k.shape == v.shape
    for x in (bounds, others):
        assert x.dtype == torch.int32, "offsets are int32"
        assert x.is_contiguous()
        assert x.device == q.device
        assert (x[0], x[-1]) == (0, len(q))
        assert (x.diff() > 0).all()
    assert longest == (bounds.diff().max(),) * 2


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    others: Tensor,
    max_q: int,
    max_k: int,
    causal: bool = False,
    scale: float = 0.0,
    window: Any = None,
    gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the attention that the operator's kernel computes on a GPU."""
    refuse(q, k, v, bounds, others, (max_q, max_k))
    assert causal
    assert window == [-1, 0]
    assert gqa == (q.shape[1] != k.shape[1])
    p, sums = probabilities(q, k, bounds, scale)
    out = torch.einsum("hqk,khd->qhd", p, per_head(v, q)).to(q.dtype)
    return out.contiguous(), sums, torch.zeros(2, dtype=torch.uint64)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    bounds: Tensor,
    *more: Any,
) -> tuple[Tensor, ...]:
    """Compute the gradients of the inputs, as the operator's backward kernel does on a GPU."""
    scale, window = more[-2:]
    assert window == [-1, 0]
    p, _ = probabilities(q, k, bounds, scale)
    grad_p = torch.einsum("qhd,khd->hqk", grad.float(), per_head(v, q))
    grad_scores = scale * p * (grad_p - (p * grad_p).sum(-1, keepdim=True))
    grad_q = torch.einsum("hqk,khd->qhd", grad_scores, per_head(k, q))
    grad_k = torch.einsum("hqk,qhd->khd", grad_scores, q.float())
    grad_v = torch.einsum("hqk,qhd->khd", p, grad.float())
    grad_k, grad_v = (
        x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (grad_k, grad_v)
    )  # sum over a group's heads
    grad_q, grad_k, grad_v = (x.to(q.dtype).contiguous() for x in (grad_q, grad_k, grad_v))
    return grad_q, grad_k, grad_v


varlen._varlen_attn.register_kernel("cpu")(forward)
varlen._varlen_attn_backward.register_kernel("cpu")(backward)


@pytest.fixture
def gpu_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layout.py use the kernel even on a CPU, for tensors in bfloat16."""
    monkeypatch.setattr(layout, "has_kernel", lambda query: query.dtype == torch.bfloat16)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each call of the operator appends the number of its sequences."""
    made: list[int] = []
    operator = layout.varlen_attn
    monkeypatch.setattr(
        layout, "varlen_attn", lambda *a, **k: made.append(len(a[3]) - 1) or operator(*a, **k)
    )  # type: ignore[func-returns-value]
    return made


@pytest.fixture
def make_actor(tiny_model_dir: Path) -> Iterator[Any]:
    with ExitStack() as stack:

        def make(**changes: Any) -> FSDPPPOActor:
            actor = FSDPPPOActor(
                make_config(**{"dtype": "bfloat16", "mb_tokens": 40} | changes), tiny_model_dir
            )
            stack.callback(actor.destroy)
            actor.create_process_group()
            actor.initialize(max_steps=10)
            return actor

        yield make


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_one_kernel_computes_what_the_sequences_alone_give(
    calls: list[int], groups: int, monkeypatch: Any
) -> None:
    """One call of the kernel gives the same output and gradients as a separate attention for each sequence, even if
    several heads share their keys."""
    batch = make_batch((3, 1, 7))
    [piece] = cut_packed(batch, range(3), 100)
    g = torch.Generator().manual_seed(0)
    shapes = [(1, 11, heads, 16) for heads in (4, groups, groups)]
    results = []
    leaves = [torch.randn(shape, generator=g).bfloat16() for shape in shapes]
    for of_gpu in (True, False):
        monkeypatch.setattr(layout, "has_kernel", lambda _, of_gpu=of_gpu: of_gpu)
        inputs = [x.clone().requires_grad_() for x in leaves]
        q, k, v = (
            x.transpose(1, 2) for x in inputs
        )  # transformers passes transposed views to attend_apart
        out, _ = attend_apart(None, q, k, v, None, 0.3, **piece.inputs)
        (out.float() * torch.linspace(-1, 1, 16)).sum().backward()
        results.append((out, *(x.grad for x in inputs)))
    assert calls == [3]
    for one, many in zip(*results, strict=True):
        assert one is not None
        torch.testing.assert_close(one, many, atol=0.03, rtol=0.03)


def test_an_actor_trains_through_the_kernel(
    gpu_kernel: None, calls: list[int], make_actor: Any
) -> None:
    """With packed rows, every layer of every pass calls the kernel once. Packed and padded rows give the same
    log-probabilities and gradients up to the rounding of bfloat16. The test compares the norm of all errors with the
    norm of all values, because the largest error of a single number depends on the CPU."""
    found = {}
    for name in ("packed", "padded"):
        actor = make_actor(layout=name, gradient_checkpointing=True)
        batch = prepare(actor, make_batch(), drift=0.0)
        passes = len(actor.passes(batch, range(8)))
        actor.ppo_update(batch)
        found[name] = batch["prox_logp"], gradients(actor.model)
        if name == "packed":
            layers = actor.model.config.num_hidden_layers
            # Each layer runs three times: for log pi_prox, for log pi_theta, and once more in the backward pass.
            assert len(calls) == 3 * passes * layers
            assert sum(calls) == 3 * layers * 8
            calls.clear()
    assert calls == []  # padded rows do not need the kernel
    logps = [logp for logp, _ in found.values()]
    grads = [torch.cat([x.flatten() for x in of_layer.values()]) for _, of_layer in found.values()]
    for (one, two), bound in ((logps, 0.01), (grads, 0.05)):
        assert (one - two).norm() < bound * two.norm()


@pytest.mark.parametrize(
    ("device", "dtype", "d", "expected"),
    [
        ("cuda", torch.bfloat16, 128, True),
        ("cuda", torch.float16, 256, True),
        ("cuda", torch.float32, 128, False),
        ("cuda", torch.bfloat16, 20, False),
        ("cuda", torch.bfloat16, 512, False),
        ("cpu", torch.bfloat16, 128, False),
    ],
)
def test_the_kernel_gets_only_what_it_can_compute(
    device: str, dtype: torch.dtype, d: int, expected: bool
) -> None:
    """The attention kernel is used only for 16-bit numbers on a GPU, and only if a head's width is a multiple of 8 and
    at most 256.

    The test needs no GPU, because its tensors have a shape, a data type and a device, but no values (FakeTensorMode).
    If the kernel is used, the output has the right shape, data type and device.
    """
    with FakeTensorMode():
        made = [torch.empty(1, 10, heads, d, device=device, dtype=dtype) for heads in (4, 2, 2)]
        q, k, v = (x.transpose(1, 2) for x in made)
        assert has_kernel(q) is expected
        if expected:
            bounds = torch.empty(3, device=device, dtype=torch.int32)
            out, _ = attend_apart(None, q, k, v, None, 0.3, bounds=bounds, longest=7)
            assert (out.shape, out.dtype, out.device) == ((1, 10, 4, d), dtype, q.device)


@pytest.mark.parametrize("name", ["padded", "packed"])
def test_cudnn_computes_no_attention(make_actor: Any, name: str) -> None:
    """In each call of scaled_dot_product_attention, cuDNN's attention is switched off."""
    allowed = []

    class Calls(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.nn.functional.scaled_dot_product_attention:
                allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
            return func(*args, **(kwargs or {}))

    actor = make_actor(layout=name, dtype="float32")
    with Calls():
        actor.compute_logp(make_batch())
    assert allowed
    assert not any(allowed)
