"""Compiled layers compute the same numbers, from a bounded number of graphs. The graphs run with
the backend "eager", which computes what uncompiled PyTorch does, so no test needs a GPU."""

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import trainers
from torch._dynamo.utils import counters
from trainers import gradients, make_batch, prepare

from training import logprobs
from training.actor import should_compile

make_actor = trainers.make_actor
pytestmark = pytest.mark.usefixtures("forget")
COMPILE = torch.compile
HEAD_GRAPHS = 2  # of the last layer: results of a chunk, and the gradient of logp


def reset() -> None:
    torch._dynamo.reset()
    counters.clear()
    logprobs.fuse.cache_clear()


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin and end without graphs."""
    monkeypatch.setattr(torch, "compile", partial(COMPILE, backend="eager"))
    reset()
    yield
    reset()


def make_batches(n: int) -> list[Any]:
    """Batches of 1 to 9 rows with at most 38 tokens. The first has one row."""
    draw = random.Random(0)
    sizes = [[38]]
    for _ in range(n - 1):
        sizes.append([draw.randint(4, 38) for _ in range(draw.randint(1, 9))])
    return [make_batch(tuple(lengths), seed) for seed, lengths in enumerate(sizes)]


@pytest.mark.parametrize(
    ("changes", "least", "most"),
    [
        # One row or several, with gradients or without.
        ({"gradient_checkpointing": True, "offload": True}, 4, 4),
        # A packed piece is always one row.
        ({"layout": "packed", "dtype": "bfloat16"}, 2, 2),
    ],
)
def test_new_shapes_need_no_new_graph(make_actor, changes, least, most):
    """All layers share the graphs, and losses and gradients are those of uncompiled layers."""
    results = []
    for compiled in (False, True):
        assert not counters["stats"]
        actor = make_actor(mb_tokens=40, compiled=compiled, **changes)
        batches = [prepare(actor, dict(batch)) for batch in make_batches(4)]
        losses = [actor.ppo_update(batch)["loss"] for batch in batches]
        results.append((losses, gradients(actor)))
    (expected, plain), (losses, found) = results
    assert losses == pytest.approx(expected, abs=1e-5)
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4)
    assert least <= counters["stats"]["unique_graphs"] - HEAD_GRAPHS <= most
    assert not counters["graph_break"]


def test_large_models_are_compiled_on_a_gpu():
    """For a model below 100M parameters, compiling takes longer than it saves."""
    assert should_compile("cuda", 500_000_000)
    assert not should_compile("cuda", 50_000_000)
    assert not should_compile("cpu", 500_000_000)
