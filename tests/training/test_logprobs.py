"""Chunks of tokens give the values and gradients that all logits at once give."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from trainers import DEVICE, Products

from training.logprobs import CHUNK_ELEMENTS, chunk_logits, token_logprobs


def make(n=13, width=8, vocabulary=29, seed=0):
    """hidden (n, width), weight (vocabulary, width), ids (n,), and temperatures (n,), of which one
    is 0."""
    g = torch.Generator().manual_seed(seed)
    hidden = (2 * torch.randn(n, width, generator=g)).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=g).requires_grad_()
    temperatures = 0.5 + torch.rand(n, generator=g)
    temperatures[3] = 0.0
    return hidden, weight, torch.randint(0, vocabulary, (n,), generator=g), temperatures


def plain(hidden, weight, ids, temperatures):
    """log p and entropy with the whole (N, V) matrix, in float64."""
    T = torch.where(temperatures > 0, temperatures, 1.0).double()
    log_p = torch.log_softmax(hidden.double() @ weight.double().t() / T[:, None], -1)
    return log_p.gather(1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk", [1, 5, 13, 1000])
@pytest.mark.parametrize("uses", ["logp", "entropy", "both"])
def test_chunks_change_neither_values_nor_gradients(monkeypatch, chunk, uses):
    """Chunks of every size give the same values and gradients. This also holds if the loss uses
    only one of the two results, or if the output layer is frozen."""
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", chunk * 29)
    results = []
    for function, learns in ((plain, True), (token_logprobs, True), (token_logprobs, False)):
        hidden, weight, ids, temperatures = make()
        weight.requires_grad_(learns)
        logp, entropy = function(hidden, weight, ids, temperatures)
        factors = torch.linspace(-1, 2, len(ids))
        loss = (factors * logp).sum() * (uses != "entropy")
        (loss + (factors.flip(0) * entropy).sum() * (uses != "logp")).backward()
        results.append((logp.detach(), entropy.detach(), hidden.grad, weight.grad))
    for slow, fast, frozen in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow.float(), atol=2e-5, rtol=1e-4)
        if frozen is not None:
            torch.testing.assert_close(frozen, slow.float(), atol=2e-5, rtol=1e-4)


def test_no_tokens_are_no_gradient():
    """Empty results, and gradients of 0."""
    hidden, weight, ids, temperatures = make()
    logp, entropy = token_logprobs(hidden[:0], weight, ids[:0], temperatures[:0])
    (logp.sum() + entropy.sum()).backward()
    assert logp.shape == entropy.shape == (0,)
    assert not weight.grad.any()


def test_half_precision_weights_get_gradients_of_their_type():
    """log p is float32, and the gradient of a bfloat16 weight is bfloat16."""
    hidden, weight, ids, temperatures = make()
    expected = plain(hidden, weight, ids, temperatures)[0].float()
    halves = (x.detach().to(DEVICE, torch.bfloat16) for x in (hidden, weight))
    half_hidden, half_weight = (half.requires_grad_() for half in halves)
    logp, _ = token_logprobs(half_hidden, half_weight, ids.to(DEVICE), temperatures.to(DEVICE))
    logp.sum().backward()
    assert logp.dtype == torch.float32
    assert half_weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(logp.cpu(), expected, atol=0.3, rtol=0.05)


@pytest.mark.parametrize(("device", "logits"), [("cpu", torch.bfloat16), ("cuda", torch.float32)])
def test_a_gpu_computes_float32_logits(device, logits):
    """With bfloat16 weights, a GPU's product returns float32. The tensors have no values, so this
    needs no GPU."""
    with FakeTensorMode(), Products() as products:
        hidden, weight = (torch.empty(n, 8, device=device, dtype=torch.bfloat16) for n in (5, 29))
        z = chunk_logits(hidden, weight)
    assert (z.dtype, z.shape) == (torch.float32, (5, 29))
    assert [(out.dtype, len(out)) for out in products.results] == [(logits, 5)]


def test_a_chunk_has_at_most_the_logits_of_its_device(monkeypatch):
    """A GPU's chunk is eight times as large as a CPU's."""
    assert CHUNK_ELEMENTS["cuda"] == 8 * CHUNK_ELEMENTS["cpu"]
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 5 * 29)
    with Products() as products:
        token_logprobs(*make())
    assert [len(out) for out in products.results] == [5, 5, 3]
