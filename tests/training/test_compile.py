"""Compiled layers compute the same numbers as uncompiled layers, and the compiler makes a bounded number of graphs. No
test needs a GPU.

Most tests count the graphs that the compiler makes of the Python code. The graphs run with the backend "eager", which
computes every operation as uncompiled PyTorch does. For packed rows, the tests use the kernel for CPUs that
test_layout.py defines.
"""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_layout import gpu_kernel  # noqa: F401  # a fixture; the import also registers the kernel
from torch import Tensor
from torch._dynamo.utils import counters
from trainers import (
    FAMILIES,
    NEVER,
    PLAIN,
    gradients,
    make_batch,
    make_config,
    make_family,
    prepare,
)
from transformers import AutoConfig

from training import logprobs
from training.actor import FSDPPPOActor
from training.config import PPOActorConfig, can_compile
from training.layout import pick_layout

pytestmark = pytest.mark.usefixtures("forget")
COMPILE = torch.compile
HEAD_GRAPHS = (
    2  # graphs of the last layer: one for the results of a chunk, and one for the gradient of logp
)


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clear the compiler's graphs before and after a test, and let torch.compile use the backend "eager"."""
    monkeypatch.setattr(torch, "compile", partial(COMPILE, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    logprobs.fuse.cache_clear()
    yield
    torch._dynamo.reset()
    logprobs.fuse.cache_clear()


def train(path: Path, batches: list[Any], **changes: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Train an actor on the batches. Return the loss of every training step, and the gradients of the last step."""
    actor = FSDPPPOActor(make_config(mb_tokens=40, **changes), path)
    actor.create_process_group()
    actor.initialize(max_steps=10)
    losses = [actor.ppo_update(prepare(actor, dict(batch)))["loss"] for batch in batches]
    found = gradients(actor.model)
    actor.destroy()
    return losses, found


def make_batches(n: int) -> list[Any]:
    """Make n batches, each with 1 to 9 rows of at most 38 tokens. The first batch has one row."""
    draw = random.Random(0)
    sizes = [[38]] + [
        [draw.randint(4, 38) for _ in range(draw.randint(1, 9))] for _ in range(n - 1)
    ]
    return [make_batch(tuple(lengths), seed) for seed, lengths in enumerate(sizes)]


def check_same(path: Path, batches: list[Any], **changes: Any) -> int:
    """Check that compiled and uncompiled layers give the same losses and gradients. Return the number of graphs."""
    expected, plain = train(path, batches, compile=False, **changes)
    assert not counters["stats"]
    losses, found = train(path, batches, compile=True, **changes)
    assert losses == pytest.approx(expected, abs=1e-5)
    for name, gradient in plain.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4)
    return counters["stats"]["unique_graphs"] - HEAD_GRAPHS


def test_padded_rows_have_four_graphs(tiny_model_dir):
    """All layers share four graphs: for one row and for several rows, each with and without gradients. No layer has a
    graph break. Inputs with new shapes need no new graph. The number of graphs is four even with gradient checkpointing
    and with an FSDP wrapper around each layer (offload=True)."""
    assert (
        check_same(tiny_model_dir, make_batches(4), gradient_checkpointing=True, offload=True) == 4
    )
    assert not counters["graph_break"]


def test_packed_rows_have_two_graphs(gpu_kernel, tiny_model_dir):  # noqa: F811
    """With the attention kernel, all layers share two graphs, one with gradients and one without. A packed piece is
    always one row. A piece with more sequences or a longer sequence needs no new graph."""
    assert check_same(tiny_model_dir, make_batches(4), layout="packed", dtype="bfloat16") == 2
    assert not counters["graph_break"]


@pytest.mark.parametrize("changes", [{"layout": "packed"}, {"enable_tree_training": True}], ids=str)
def test_attention_outside_the_graphs(tiny_model_dir, changes):
    """For trees, and for packed rows without the kernel, the attention runs outside the compiled graphs. All parts of a
    layer except the attention are compiled to eight graphs, four with gradients and four without. If two dimensions
    have the same size in the first piece and different sizes in a later piece, the compiler makes a new graph."""
    assert 8 <= check_same(tiny_model_dir, make_batches(4), **changes) <= 12
    [reason] = counters["graph_break"]
    assert "torch.compiler.disable" in reason


CASES = [
    ({}, "cuda", ("packed", True)),
    ({}, "cpu", ("padded", False)),
    ({"layout": "padded"}, "cuda", ("padded", True)),
    ({"layout": "packed", "compile": True}, "cpu", ("packed", True)),
    ({"compile": False}, "cuda", ("packed", False)),
    ({"dtype": "float32"}, "cuda", ("padded", True)),
    ({"enable_tree_training": True}, "cuda", ("tree", False)),
    ({"enable_tree_training": True, "compile": True}, "cuda", ("tree", True)),
]


@pytest.mark.parametrize(("changes", "device", "expected"), CASES, ids=str)
def test_the_defaults_depend_on_the_device(changes, device, expected, monkeypatch):
    """On a GPU, packed rows and compiled layers are the defaults. A key that the user sets overrides its default."""
    monkeypatch.setattr("training.config.can_compile", lambda: True)
    config = PPOActorConfig(**{"dtype": "bfloat16"} | changes)
    shape = AutoConfig.for_model("qwen2", hidden_size=64, num_attention_heads=4)
    assert (pick_layout(config, device, shape)[0], config.is_compiled(device)) == expected
    monkeypatch.setattr("training.config.can_compile", lambda: False)
    assert config.is_compiled(device) == bool(config.compile), (
        "nothing is compiled on a machine that cannot compile"
    )


def test_the_actors_of_other_tests_compile_nothing(monkeypatch):
    """bench/gpu_check.py runs test files such as test_actor.py on a GPU. The actors of the tests compile no layers even
    on a GPU, because compilation takes seconds for each actor."""
    monkeypatch.setattr("training.config.can_compile", lambda: True)
    assert PPOActorConfig().is_compiled("cuda")
    assert not make_config().is_compiled("cuda")


def test_what_a_machine_needs_to_compile(tmp_path, monkeypatch):
    """To compile code for a GPU, Triton needs a C compiler and the header Python.h. Debian's package python3-dev
    contains Python.h."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    found = []
    for name in ("empty", "gcc", "Python.h"):
        (tmp_path / name).touch(mode=0o755)
        found.append(can_compile())
    assert found == [False, False, True]


@pytest.mark.parametrize("name", sorted({*FAMILIES} - {*NEVER}))
def test_the_default_layout_refuses_no_model(tmp_path, name):
    """On a GPU, a model that cannot be trained with packed rows is trained with padded rows, and `pick_layout` returns
    the reason."""
    shape = AutoConfig.from_pretrained(make_family(tmp_path, name)).get_text_config()
    layout, why = pick_layout(PPOActorConfig(dtype="bfloat16"), "cuda", shape)
    assert layout == ("packed" if name in PLAIN else "padded"), why


def test_heads_that_the_kernel_cannot_compute():
    """If no attention kernel can compute packed rows on a GPU, padded rows are the default, because packed rows would
    be slow."""
    shape = AutoConfig.for_model("qwen2", hidden_size=80, num_attention_heads=4)
    layout, why = pick_layout(PPOActorConfig(dtype="bfloat16"), "cuda", shape)
    assert (layout, why) == (
        "padded",
        "no kernel computes packed rows in bfloat16 with heads of 20 numbers",
    )
