"""The small server on a GPU draws the tokens that it draws on a CPU, and waits for the GPU once per
step. On a machine without a GPU, tests/fake_gpu.py stands in."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from fake_gpu import FakeGPU
from test_tiny_server import PROMPT, sequence

from inference.tiny.graphs import Graphs
from inference.tiny.model import Model, read_weights
from inference.tiny.sampling import Sequence
from inference.tiny.scheduler import Scheduler


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGPU | None]:
    """The fake GPU; None if there is a real one."""
    with nullcontext() if torch.cuda.is_available() else FakeGPU(monkeypatch) as fake:
        yield fake


def play(model: Model, other: Path, gpu: FakeGPU | None = None) -> list[Sequence]:
    """Prompts in pieces, a shared prefix, slots that grow and shrink, sequences that make room for
    others, new weights, and each way to sample."""
    ways = [("top_p", 1), ("top_p", 0.5), ("top_k", 3), ("temperature", 0), ("temperature", 0.7)]
    group = [sequence(f"a/{i}", PROMPT * 7, 60, i, **dict([way])) for i, way in enumerate(ways)]
    long = [sequence(f"b/{i}", [i, *PROMPT * 20], 30, seed=i) for i in range(3)]
    short = sequence("c/0", [1, 2, 3], 20, frequency_penalty=0.5)
    scheduler, counted = Scheduler(model, "0", str), set()
    scheduler.add(*group)
    _ = gpu and gpu.count()
    while scheduler.step():
        counted.add(gpu and gpu.count())
        if scheduler.steps == 40:
            scheduler.add(*long, short)
        if scheduler.steps == 70:
            model.replace_weights(read_weights(str(other)))
            scheduler.retract()
            _ = gpu and gpu.count()
    # A step sends the tokens, random numbers to draw the next ones, and for a penalty the counts.
    # It waits once.
    assert counted == ({(2, 1), (3, 1)} if gpu else {None})
    return [*group, *long, short]


def test_the_same_tokens_as_on_a_cpu(
    tiny_model_dir: Path, other_model_dir: Path, gpu: FakeGPU | None
) -> None:
    """The tokens are the same whatever a step consists of, and whether its graph is there or has to
    be captured again."""
    expected = play(Model(str(tiny_model_dir), 4, 2048), other_model_dir)
    model = Model(str(tiny_model_dir), 4, 2048, device="cuda")
    assert model.graphs is not None
    model.graphs.most = 3  # of five
    model.chunk, model.prefill = 128, 512  # so that the new weights come after the same tokens
    for one, wanted in zip(play(model, other_model_dir, gpu), expected, strict=True):
        assert one.tokens == wanted.tokens
        assert one.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
    assert len(model.graphs.captured) == 3


def test_bfloat16_adds_in_float32(tiny_model_dir: Path, gpu: FakeGPU | None) -> None:
    """The logits have more digits than a bfloat16 number, and are near those of float32."""
    exact = Model(str(tiny_model_dir), 2).step([PROMPT], [0])
    model = Model(str(tiny_model_dir), 2, dtype="bfloat16", device="cuda")
    for feed, cached in ((PROMPT, 0), (PROMPT[-1:], len(PROMPT) - 1)):
        logits = model.step([feed], [cached]).cpu()
        assert (logits - logits.bfloat16()).abs().max() > 0
        assert 1e-4 < (logits - exact).abs().max() < 0.2


def test_what_a_graph_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a replay, a Python number is what it was when the graph was captured. Sending to the GPU,
    or waiting for it, is an error during a capture. So a step that does either fails in the test
    above."""
    with FakeGPU(monkeypatch):
        graphs, x, factor = Graphs(), torch.ones(3), [2.0]
        for scale in (1, 5):
            assert graphs.run("x", lambda x: x * factor[0], scale * x).tolist() == [2 * scale] * 3
            factor[0] = 3.0
        with pytest.raises(RuntimeError, match="item: not permitted"):
            graphs.run("waits", lambda x: x * x.sum().item(), x)
        with pytest.raises(RuntimeError, match="to: not permitted"):
            graphs.run("sends", lambda x: x + torch.ones(3).to("cuda"), x)
