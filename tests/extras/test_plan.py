"""The plan of a run: which servers on which GPUs, and how much memory. No test needs a GPU."""

import gc
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, wait_until_up
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from trainers import make_batch, make_config
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from extras.plan import (
    GIB,
    check_memory,
    check_update_mode,
    count_parameters,
    estimate_rank,
    estimate_server,
    print_plan,
    saved_bytes,
    step_bytes,
)
from run.config import ConfigError, TrainConfig, load
from run.launch import Child, plan_servers
from training import logprobs
from training.actor import FSDPPPOActor

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
QWEN = {  # the whole of Qwen2.5-1.5B, as its config.json on the hub
    "vocab_size": 151936,
    "num_hidden_layers": 28,
    "tie_word_embeddings": True,
    **LAYERS["qwen2"],
}
N = 1_543_714_304  # its parameters


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config.json of Qwen2.5-1.5B, and nothing else."""
    path = tmp_path_factory.mktemp("qwen")
    AutoConfig.for_model("qwen2", **QWEN).save_pretrained(path)
    return path


def recipe(model: Path | str, *words: str) -> TrainConfig:
    """The GSM8K recipe with a model and more words."""
    return load(["--config", "gsm8k", f"model_path={model}", *words])[0]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def print_it(config: TrainConfig, gpus: int, memory: float | None = None) -> str:
        assert print_plan(config, gpus, memory) == 0
        return capsys.readouterr().out

    return print_it


# ---- memory


def bytes_saved(config: Any, dtype: torch.dtype, tokens: int) -> int:
    """Bytes of the activations that a model's layers save in a forward pass."""
    with no_init_weights():
        how: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa"}
        model: Any = AutoModelForCausalLM.from_config(config, **how)
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage.nbytes()
        return x

    ids = torch.zeros(1, tokens, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = model.base_model(input_ids=ids, use_cache=False)
        assert output.last_hidden_state.grad_fn is not None  # `output` holds the saved tensors
    return sum(saved.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", LAYERS)
def test_saved_activations_of_a_real_layer(family: str, dtype: torch.dtype) -> None:
    """The estimate is 10 % close to what one layer more saves, in three architectures."""
    keys, tokens = {"vocab_size": 32, "pad_token_id": 0, **LAYERS[family]}, 64
    one, two = (AutoConfig.for_model(family, num_hidden_layers=layers, **keys) for layers in (1, 2))
    measured = (bytes_saved(two, dtype, tokens) - bytes_saved(one, dtype, tokens)) / tokens
    estimate = saved_bytes(one, dtype.itemsize, has_head_norms=family == "qwen3")
    assert estimate == pytest.approx(measured, rel=0.1)


class LiveBytes(TorchDispatchMode):
    """Its `peak` is the most bytes that tensors have occupied at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = weakref.WeakValueDictionary[int, torch.UntypedStorage]()
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
        ("qwen2", 2000, True, "bfloat16", False, 512),  # mostly saved activations
        ("qwen2", 2000, True, "bfloat16", True, 512),
        ("qwen3", 2000, True, "float32", True, 256),
        ("llama", 8000, False, "bfloat16", True, 128),  # mostly embedding and last layer
        ("llama", 8000, True, "float32", False, 128),
    ],
)
def test_memory_of_a_real_step(
    family: str,
    vocabulary: int,
    tied: bool,
    dtype: str,
    checkpointing: bool,
    tokens: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The estimate of a step is 10 % close to the peak of all tensors in a real one."""
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
            kept = [[*actor.model.parameters()], [*actor.optimizer.state.values()]]
            pytree.tree_map(measured.count, kept)
            actor.ppo_update(batch)
        n = sum(p.numel() for p in actor.model.parameters())
    finally:
        actor.destroy()
    estimate = step_bytes(config, shape, n, family == "qwen3")
    assert estimate == pytest.approx(measured.peak - 16 * n, rel=0.1)


def test_ranks_share_what_they_keep(tiny_model_dir: Path) -> None:
    """Four ranks keep a quarter each, a reference model adds 4 bytes, and a server holds weights,
    keys and values."""
    given = recipe(tiny_model_dir, "server.max_total_tokens=5000")
    shape = AutoConfig.from_pretrained(tiny_model_dir)
    n, norms = count_parameters(shape)
    assert n == AutoModelForCausalLM.from_pretrained(tiny_model_dir).num_parameters()
    alone, shared = (estimate_rank(given, shape, n, norms, k, False) * GIB for k in (1, 4))
    assert alone - shared == pytest.approx(16 * n * 3 / 4)
    given.actor.kl_ctl = 0.1
    assert estimate_rank(given, shape, n, norms, 1, False) * GIB - alone == pytest.approx(4 * n)
    server = estimate_server(given, shape, n, False) * GIB
    assert server == pytest.approx(4 * n + 2 * 4 * 2 * 16 * 2 * 5000)


def test_heads_limit_the_gpus_of_a_server(qwen: Path, plan: Callable[..., str]) -> None:
    """12 query and 2 key heads cannot be divided among 3 or 8 GPUs; 4 GPUs hold each key twice."""
    for size in (3, 8):
        with pytest.raises(ConfigError, match=rf"size={size} .* 12 .* one of \[1, 2, 4, 6, 12\]"):
            print_plan(recipe(qwen, f"server.tp_size={size}"), 8, None)
    text = plan(recipe(qwen, "server.tp_size=4"), 8)
    cache = 2 * 2 * 2 * 128 * 28 * 400_000
    assert re.search(rf"server-0 +4,5,6,7 +{3 + (2 * N / 4 + cache / 2) / GIB:.1f}\n", text)


# ---- the servers and their GPUs


@pytest.mark.parametrize(("gpus", "share"), [(2, "0.85"), (1, "0.6"), (0, None)])
def test_the_command_of_sglang(
    gpus: int, share: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU it computes in bfloat16 with float32 logits; server.args come last."""
    monkeypatch.setenv("POCKET_AREAL_SGLANG", "PY -m sglang.launch_server")
    given = recipe("DIR", "server.backend=sglang", "server.args=[--tool-call-parser,qwen]")
    [server] = plan_servers(given, [str(k) for k in range(gpus)])
    text = shlex.join(server.command)
    assert "inference.with_parent --api-key PY -m sglang.launch_server --model-path DIR" in text
    assert text.endswith("--tool-call-parser qwen")
    assert ("--enable-fp32-lm-head" in text) == ("--dtype bfloat16" in text) == bool(gpus)
    assert (f"--mem-fraction-static {share}" in text) == bool(gpus)
    if gpus:
        assert server.variables["SGLANG_LOGPROB_CHUNK_SIZE"] == "256"
        # With a trainer on some of its GPUs their free memory differs, at which SGLang would exit.
        assert server.variables["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "0"


@pytest.mark.parametrize(
    ("gpus", "ranks", "words", "works"),
    [
        (1, 1, [], False),  # trainer and server share the GPU
        (2, 2, ["server.count=2"], False),
        (8, 8, ["server.count=2"], False),
        (2, 1, [], True),
        (8, 4, ["server.count=2", "server.tp_size=2"], True),
        (1, 1, ["server.backend=tiny"], True),  # gloo
    ],
)
def test_a_group_for_new_weights_needs_gpus_of_its_own(
    gpus: int, ranks: int, words: list[str], works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL refuses GPUs that two processes share, and the line names `disk`."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    names = [str(k) for k in range(gpus)]
    given = recipe("DIR", "server.backend=sglang", "weight_update.mode=distributed", *words)
    refused = pytest.raises(ConfigError, match=r"share: set weight_update.mode=disk")
    with nullcontext() if works else refused:
        check_update_mode(given, plan_servers(given, names), names)


def test_too_few_gpus(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names what there is too much of."""
    with pytest.raises(ConfigError, match=r"server\.tp_size=2, but there are 1 GPUs"):
        print_plan(recipe(qwen, "server.tp_size=2"), 1, None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="nproc-per-node=2, but there are 1 GPUs"):
        print_plan(recipe(qwen), 1, None)


@pytest.mark.parametrize(
    ("server", "words", "works"),
    [
        ("http://10.0.0.5:30000", [], False),
        ("http://10.0.0.5:30000", ["weight_update.address=localhost"], False),
        ("http://10.0.0.5:30000", ["weight_update.address=10.0.0.7"], True),
        ("http://127.0.0.1:30000", [], True),
    ],
)
def test_servers_elsewhere_need_the_address_of_the_trainer(
    server: str, words: list[str], works: bool
) -> None:
    """A server on another machine would take a loopback address for itself."""
    up = f"rollout.server_addrs=['{server}']"
    given = recipe("DIR", "weight_update.mode=distributed", up, *words)
    refused = pytest.raises(ConfigError, match=r"10.0.0.5:30000 would connect to itself: set it to")
    with nullcontext() if works else refused:
        check_update_mode(given, [], [])


# ---- the plan that is printed


@pytest.mark.parametrize(
    ("gpus", "ranks", "words", "process", "gib"),
    [
        (1, 1, [], "rank 0", "a rank alone 30.6 GiB"),
        (2, 1, [], "rank 0", "a rank alone 30.6 GiB"),
        (8, 4, ["server.count=4"], "rank 3", "one of four 13.3"),
        (8, 4, ["server.count=4"], "server-3", "a server 16.6"),
    ],
)
def test_the_plan_on_the_page(
    gpus: int,
    ranks: int,
    words: list[str],
    process: str,
    gib: str,
    qwen: Path,
    plan: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """docs/gpu.md has the numbers of the GSM8K recipe, which fits into 64 GiB of each GPU."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    text = plan(recipe(qwen, *words), gpus, 64.0)
    table, _, commands = text.partition("\nthe run's commands")
    assert max(map(len, table.splitlines())) <= 100
    assert commands.count("sglang.launch_server") == max(1, 4 * len(words))
    [measured] = re.findall(rf"^{process} .* ([\d.]+)$", table, re.MULTILINE)
    assert gib.removesuffix(" GiB").split()[-1] == measured
    assert gib in " ".join((ROOT / "docs/gpu.md").read_text().split())


def test_too_little_memory_names_what_is_not_done_yet(qwen: Path) -> None:
    """The error names every key that can help, and none that is set already or is not at fault."""
    given = recipe(qwen)
    needs = [(Child("rank 0", [], ["0"]), 30.0), (Child("server-0", [], ["0", "1"]), 20.0)]
    check_memory(given, needs, ["0", "1"], 50.0)
    with pytest.raises(ConfigError, match=r"50 GiB .*\(rank 0 30.0, server-0 20.0\) and GPU 0 has"):
        check_memory(given, needs, ["0", "1"], 49.0)

    def advice(*words: str) -> str:
        with pytest.raises(ConfigError) as caught:
            check_memory(recipe(qwen, *words), needs, ["0", "1"], 49.0)
        return str(caught.value)

    assert "gradient_checkpointing" not in advice()  # the recipe sets it
    assert "gradient_checkpointing=true" in advice("actor.gradient_checkpointing=false")
    assert "actor.offload=true" in advice()
    assert "offload" not in advice("actor.offload=true")
    assert "server.count" not in advice()
    order = ["max_total_tokens", "server.count", "actor.mb_tokens", "nproc-per-node", "smaller"]
    places = [advice("server.count=2").index(word) for word in order]
    assert places == sorted(places)
    with pytest.raises(ConfigError) as caught:
        check_memory(given, needs[1:], ["0", "1"], 19.0)
    assert "actor." not in str(caught.value)


def test_a_plan_that_does_not_fit_is_shown(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table stands above the error, so that the numbers are seen."""
    with pytest.raises(ConfigError, match="about 47 GiB are needed"):
        print_plan(recipe(qwen), 1, 43.0)
    assert "server-0    0             16.6" in capsys.readouterr().out


def test_advice_of_the_plan(qwen: Path, plan: Callable[..., str], monkeypatch: Any) -> None:
    """It names idle GPUs, and counts the host memory of offload for the ranks of this machine."""
    says = "GPUs 1,2,3,4,5,6 are idle; to use them, raise server.count or torchrun --nproc-per-node"
    lines = plan(recipe(qwen), 8).splitlines()
    assert says in lines
    assert any("weight_update.mode=distributed needs no files" in line for line in lines)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    text = plan(recipe(qwen, "actor.offload=true"), 4)
    assert f"the ranks here keep {16 * N / 2 / GIB:.1f} GiB in host memory" in text


def test_a_name_is_enough_for_a_plan(plan: Callable[..., str]) -> None:
    """Of a model that is not on this machine the plan says so in one line, and leaves GiB open."""
    text = plan(recipe("nobody/nothing"), 0)
    assert "no config.json of nobody/nothing is on this machine" in text
    assert re.search(r"rank 0 +- +\?\n", text)


def test_too_few_open_files(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,536 episodes need more open files than a limit of 1,024."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    with pytest.raises(ConfigError, match=r"1536 running episodes need 3328 open files.*1024"):
        print_plan(recipe(qwen), 1, None)


def test_the_printed_commands_start_servers(tiny_model_dir: Path, plan: Callable[..., str]) -> None:
    """A command can be pasted as it stands, and starts what the run would start."""
    text = plan(recipe(tiny_model_dir, "server.max_total_tokens=4096"), 0)
    [command] = [line for line in text.splitlines() if "inference.tiny.server" in line]
    url = f"http://127.0.0.1:{command.split()[-1]}"
    process = subprocess.Popen(["bash", "-c", command], start_new_session=True)
    try:
        wait_until_up(url, process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_dry_run_starts_nothing(tmp_path: Path, tiny_model_dir: Path) -> None:
    """train.py --dry-run prints the plan, and writes no file; --gpus 1 plans for a GPU."""
    words = [f"model={tiny_model_dir}", f"fileroot={tmp_path}", "--dry-run", "--gpus", "1"]
    command = [sys.executable, "train.py", "--config", "gsm8k", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    assert names[:4] == ["process", "rank", "server-0", "proxy-0"]
    assert list(tmp_path.iterdir()) == []
