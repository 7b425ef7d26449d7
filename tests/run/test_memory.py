"""These tests compare the estimates of run/memory.py with three things: the tensors that real layers save, the memory
of a real training step, and the plans in docs/gpu.md."""

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from trainers import make_batch, make_config
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from run.load import ConfigError, load
from run.memory import GIB, describe_load, estimate_memory, saved_bytes, step_bytes
from run.plan import plan_run
from training import logprobs
from training.actor import FSDPPPOActor

# The shapes of the decoder layers of three models.
LAYERS: dict[str, dict[str, Any]] = {
    "qwen2": {  # Qwen2.5-1.5B
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "qwen3": {  # Qwen3-1.7B, whose queries and keys are normalised
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "llama": {  # Llama-3.2-1B
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
}


def bytes_saved(config: Any, dtype: torch.dtype, tokens: int) -> int:
    """Return how many bytes of activations the decoder layers of a model save in a forward pass."""
    with no_init_weights():  # the numbers of bytes do not depend on the weights
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = model.base_model(
            input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False
        )
        assert (
            output.last_hidden_state.grad_fn is not None
        )  # `output` keeps the graph and its saved tensors in memory
    return sum(saved.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", LAYERS)
def test_the_estimate_of_saved_activations(family: str, dtype: torch.dtype) -> None:
    """In three architectures, the estimated bytes of a layer differ by at most 10 % from the bytes of the tensors that
    a real layer saves.

    To measure one layer, the test subtracts the bytes of a model with one layer from the bytes of a model with two
    layers.
    """
    keys, tokens = {"vocab_size": 32, "pad_token_id": 0, **LAYERS[family]}, 64
    one, two = (AutoConfig.for_model(family, num_hidden_layers=layers, **keys) for layers in (1, 2))
    measured = (bytes_saved(two, dtype, tokens) - bytes_saved(one, dtype, tokens)) / tokens
    assert saved_bytes(one, dtype.itemsize, has_head_norms=family == "qwen3") == pytest.approx(
        measured, rel=0.1
    )


class LiveBytes(TorchDispatchMode):
    """A context manager whose `peak` is the largest number of bytes that tensors have occupied at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.live: weakref.WeakValueDictionary[int, torch.UntypedStorage] = (
            weakref.WeakValueDictionary()
        )
        self.peak = 0

    def count(self, x: Any) -> None:
        if isinstance(x, torch.Tensor):
            storage = getattr(x, "_local_tensor", x).untyped_storage()
            self.live[storage._cdata] = storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        pytree.tree_map(self.count, (args, kwargs, out))
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.live.values()))
        return out


SMALL = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("family", "vocabulary", "tied", "dtype", "checkpointing", "tokens"),
    [
        ("qwen2", 2000, True, "bfloat16", False, 512),  # saved activations take most of the memory
        ("qwen2", 2000, True, "bfloat16", True, 512),
        ("qwen3", 2000, True, "float32", True, 256),
        (
            "llama",
            8000,
            False,
            "bfloat16",
            True,
            128,
        ),  # the embedding and the last layer take most of the memory
        ("llama", 8000, True, "float32", False, 128),
    ],
)
def test_the_estimate_of_a_training_step(
    family: str,
    vocabulary: int,
    tied: bool,
    dtype: str,
    checkpointing: bool,
    tokens: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A training step with two forward passes needs memory in addition to the parameters, gradients and moments. The
    estimate of the additional memory differs by at most 10 % from the additional memory of a real step."""
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", {"cpu": 1 << 16, "cuda": 1 << 16})
    shape = AutoConfig.for_model(family, vocab_size=vocabulary, tie_word_embeddings=tied, **SMALL)
    AutoModelForCausalLM.from_config(shape, dtype=torch.float32).save_pretrained(tmp_path)
    config = make_config(dtype=dtype, gradient_checkpointing=checkpointing, mb_tokens=tokens)
    actor = FSDPPPOActor(config, tmp_path)
    actor.create_process_group()
    try:
        actor.initialize(max_steps=1)
        small, batch = make_batch((32,) * 2), make_batch((32,) * (2 * tokens // 32))
        for rows in (small, batch):
            rows["prox_logp"] = torch.zeros(rows["input_ids"].shape)
            actor.compute_advantages(rows)
        actor.ppo_update(small)  # the first update makes the moments of AdamW
        gc.collect()
        with LiveBytes() as measured:
            pytree.tree_map(
                measured.count, [[*actor.model.parameters()], [*actor.optimizer.state.values()]]
            )
            actor.ppo_update(batch)
        n = sum(p.numel() for p in actor.model.parameters())
    finally:
        actor.destroy()
    kept = 16 * n  # parameters, gradients and moments
    assert step_bytes(config, shape, n, family == "qwen3") == pytest.approx(
        measured.peak - kept, rel=0.1
    )


# Qwen2.5-1.5B, with the values of its config.json on the hub
QWEN = {
    "vocab_size": 151936,
    "num_hidden_layers": 28,
    "tie_word_embeddings": True,
    **LAYERS["qwen2"],
}


@pytest.mark.parametrize(
    ("gpus", "ranks", "words"), [(1, 1, []), (2, 1, []), (8, 4, ["server.count=4"])]
)
def test_the_plan_on_the_page(
    gpus: int, ranks: int, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/gpu.md shows the plans of configs/gsm8k.yaml for 1, 2 and 8 GPUs of 80 GiB. Each plan uses at most 64 GiB of
    each GPU."""
    AutoConfig.for_model("qwen2", **QWEN).save_pretrained(tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr("training.config.can_compile", lambda: True)
    given = [
        "--config",
        "gsm8k",
        f"model_path={tmp_path}",
        *words,
        "--dry-run",
        "--gpus",
        str(gpus),
    ]
    servers, text = plan_run(load([*given, "--gpu-memory", "64"]))
    assert all("sglang.launch_server" in server.command for server in servers)
    # docs/gpu.md shows the plan without the column of commands.
    shown = re.sub(r"(?m)^(?=process|rank|server|proxy)(.{34}).*", r"\1", text)
    print(shown)  # if docs/gpu.md is out of date, copy this text to the page
    assert shown in (ROOT / "docs/gpu.md").read_text()


def test_the_heads_of_the_model_limit_the_gpus_of_a_server(tmp_path: Path) -> None:
    """Qwen2.5-1.5B has 12 query heads and 2 key heads, so SGLang cannot use 3 or 8 GPUs for this model. With 4 GPUs,
    SGLang copies each of the 2 key heads to 2 GPUs, so each GPU has half of the keys and values."""
    AutoConfig.for_model("qwen2", **QWEN).save_pretrained(tmp_path)
    given = ["--config", "gsm8k", f"model_path={tmp_path}", "--dry-run", "--gpus", "8"]
    for size in (3, 8):
        with pytest.raises(
            ConfigError,
            match=rf"server.tp_size={size} does not fit 12 .* one of \[1, 2, 4, 6, 12\]",
        ):
            plan_run(load([*given, f"server.tp_size={size}"]))
    _, text = plan_run(load([*given, "server.tp_size=4"]))
    weights, cache = 2 * 1_543_714_304, 2 * 2 * 2 * 128 * 28 * 400_000
    assert re.search(rf"server-0  4,5,6,7 any +{3 + (weights / 4 + cache / 2) / GIB:.1f} ", text)


def test_the_plan_names_idle_gpus(tmp_path: Path) -> None:
    """With 8 GPUs, configs/gsm8k.yaml uses the first GPU and the last GPU. The plan names the idle GPUs, and the
    settings that a user must raise to use these GPUs."""
    AutoConfig.for_model("qwen2", **QWEN).save_pretrained(tmp_path)
    _, text = plan_run(
        load(["--config", "gsm8k", f"model_path={tmp_path}", "--dry-run", "--gpus", "8"])
    )
    says = "GPUs 1,2,3,4,5,6 are idle; to use them, raise server.count or torchrun --nproc-per-node"
    assert says in text.splitlines()


def test_the_plan_counts_the_host_memory_of_offload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With actor.offload, each parameter needs 16 bytes of host memory. While a checkpoint is written, each parameter
    needs 12 more bytes of host memory. A machine that runs 2 of 4 ranks needs half of the memory that 4 ranks need."""
    AutoConfig.for_model("qwen2", **QWEN).save_pretrained(tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    given = [
        "--config",
        "gsm8k",
        f"model_path={tmp_path}",
        "--dry-run",
        "--gpus",
        "4",
        "actor.offload=true",
    ]
    _, text = plan_run(load(given))
    host, more = (size * 1_543_714_304 / 2 / GIB for size in (16, 12))
    assert (
        f"actor.offload: the ranks of this machine need host memory, {host:.1f} GiB, and {more:.1f} more"
        in text
    )


def test_a_released_server_is_counted_between_the_steps(tmp_path: Path) -> None:
    """The plan of configs/gsm8k.yaml needs 47 GiB on one GPU. With server.release_memory, the plan of
    configs/gsm8k.yaml needs at most 43 GiB, because most of the server's memory and the trainer's activations are
    needed at different times."""
    AutoConfig.for_model("qwen2", **QWEN).save_pretrained(tmp_path)
    given = [
        "--config",
        "gsm8k",
        f"model_path={tmp_path}",
        "--dry-run",
        "--gpus",
        "1",
        "--gpu-memory",
        "43",
    ]
    with pytest.raises(ConfigError, match="about 47 GiB are needed"):
        plan_run(load(given))
    _, text = plan_run(load([*given, "server.release_memory=true"]))
    assert (
        "server.release_memory: in a step, a server needs 3.0; between steps, a rank 26.0" in text
    )


def test_the_plan_says_how_many_steps_stay_on_the_disk(tiny_model_dir: Path) -> None:
    """With logger.keep_steps, the plan's line about the disk says for how many steps the files stay."""
    for words, end in (
        (["logger.keep_steps=100"], "one step a minute), kept for 100 steps"),
        ([], "one step a minute)"),
    ):
        assert describe_load(load([f"model_path={tiny_model_dir}", *words]), 1000).endswith(end)


def test_ranks_share_what_they_keep(tiny_model_dir: Path) -> None:
    """Each of four ranks keeps a quarter of the parameters, gradients and moments. The estimate for a server is the sum
    of the weights and the KV cache."""
    given = load(
        ["--config", "gsm8k", f"model_path={tiny_model_dir}", "server.max_total_tokens=5000"]
    )
    n = AutoModelForCausalLM.from_pretrained(tiny_model_dir).num_parameters()
    shape = AutoConfig.from_pretrained(tiny_model_dir).get_text_config()
    (alone, kept, server, counted), (shared, *_) = (
        estimate_memory(given, shape, k, on_gpus=False) for k in (1, 4)
    )
    assert counted == n
    assert kept * GIB == pytest.approx(16 * n)
    assert (alone - shared) * GIB == pytest.approx(16 * n * 3 / 4)
    assert server * GIB == pytest.approx(4 * n + 2 * 4 * 2 * 16 * 2 * 5000)


def test_gpus_that_are_not_there_need_a_dry_run() -> None:
    """The option `--gpus` needs `--dry-run`, because a run cannot start on GPUs that do not exist. If `--gpus` is given
    without `--dry-run`, the error names `dry_run=true`."""
    with pytest.raises(
        ConfigError, match="gpus=8 has no effect here: omit it, or set dry_run=true"
    ):
        load(["--gpus", "8"])
