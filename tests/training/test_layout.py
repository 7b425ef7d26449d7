"""One call of a kernel computes the attention of a packed row. These tests use a kernel for CPUs
(cpu_kernel.py)."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import trainers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from trainers import DEVICE, gradients, make_batch, prepare

from training import layout
from training.layout import packed_attention
from training.tree_attention import cut_trees

make_actor = trainers.make_actor


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows in each call of the kernel."""
    made: list[int] = []
    kernel = layout.varlen_attn

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(len(args[3]) - 1)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(layout, "varlen_attn", counted)
    return made


def one_by_one(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scaling: float) -> Tensor:
    """The attention of packed_attention, by a call for each row."""
    parts = zip(*(x.split(bounds.diff().tolist(), dim=2) for x in (q, k, v)))
    how: dict[str, Any] = {"is_causal": True, "scale": scaling, "enable_gqa": True}
    out = [F.scaled_dot_product_attention(*part, **how) for part in parts]
    return torch.cat(out, dim=2).transpose(1, 2)


@pytest.mark.skipif(DEVICE == "cuda", reason="the GPU's kernel takes no float32")
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_one_kernel_computes_what_the_rows_alone_give(calls: list[int], groups: int) -> None:
    """Output and gradients are the same, even where heads share keys."""
    [piece] = cut_trees(make_batch((3, 1, 7)) | {"row": torch.arange(3)}, 100, shares=False)
    g = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, 11, heads, 16, generator=g) for heads in (4, groups, groups)]
    results = []
    for is_packed in (True, False):
        inputs = [x.clone().requires_grad_() for x in leaves]
        q, k, v = (x.transpose(1, 2) for x in inputs)  # as transformers passes them
        if is_packed:
            out, _ = packed_attention(None, q, k, v, None, 0.3, **piece.inputs)
        else:
            out = one_by_one(q, k, v, piece.inputs["bounds"], 0.3)
        (out * torch.linspace(-1, 1, 16)).sum().backward()
        results.append((out, *(x.grad for x in inputs)))
    assert calls == [3]
    for one, many in zip(*results, strict=True):
        torch.testing.assert_close(one, many, atol=1e-5, rtol=1e-5)


def test_an_actor_trains_through_the_kernel(calls: list[int], make_actor: Any) -> None:
    """Packed and padded rows agree up to the rounding of bfloat16, and only packed rows call the
    kernel."""
    dtype = "bfloat16" if DEVICE == "cuda" else "float32"  # what the kernel takes
    found, keys = [], {"dtype": dtype, "mb_tokens": 40, "gradient_checkpointing": True}
    for name in ("padded", "packed"):
        assert not calls
        actor = make_actor(layout=name, **keys)
        actor.ppo_update(batch := prepare(actor, make_batch(), drift=0.0))
        flat = torch.cat([*map(Tensor.flatten, gradients(actor).values())])
        found.append((batch["prox_logp"], flat))
    # For log pi_prox, for log pi_theta, and again in the backward pass.
    assert sum(calls) == 3 * actor.model.config.num_hidden_layers * 8
    for one, two, bound in zip(*found, (0.01, 0.05), strict=True):
        assert (one - two).norm() < bound * two.norm()


def test_the_kernel_of_a_gpu_takes_what_it_gets() -> None:
    """Shape, type and device of the output are right. These tensors have no values, so this needs
    no GPU."""
    with FakeTensorMode():
        made = [torch.empty(1, 10, h, 128, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2)]
        q, k, v = (x.transpose(1, 2) for x in made)
        bounds = torch.empty(3, device="cuda", dtype=torch.int32)
        out, _ = packed_attention(None, q, k, v, None, 0.3, bounds=bounds, longest=7)
        assert (out.shape, out.dtype, out.device) == ((1, 10, 4, 128), torch.bfloat16, q.device)
