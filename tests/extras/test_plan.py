"""The plan of a run: which servers on which GPUs, and how much memory. No test needs a GPU."""

import gc
import re
import resource
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from trainers import make_batch, make_config
from transformers import AutoConfig, AutoModelForCausalLM

from extras.plan import (
    CUDA_BYTES,
    GIB,
    check_memory,
    check_update_mode,
    count_frozen,
    count_parameters,
    estimate_rank,
    estimate_server,
    main,
    print_plan,
    step_bytes,
)
from inference.process import Child
from rollout.launch import plan_servers
from run.config import ConfigError, TrainConfig, load
from training import logprobs
from training.actor import FSDPPPOActor

# Qwen2.5-1.5B, as its config.json on the hub
QWEN = {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960}
QWEN |= {"num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2}
QWEN |= {"tie_word_embeddings": True}
N = 1_543_714_304  # its parameters
Plan = Callable[..., str]


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
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    def print_it(config: TrainConfig, gpus: int, memory: float | None = None) -> str:
        assert print_plan(config, gpus, memory) == 0
        return capsys.readouterr().out

    return print_it


# ---- memory


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


SMALL = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "pad_token_id": 0}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("family", "vocabulary", "tied", "dtype", "checkpointing", "tokens", "frozen"),
    [
        ("qwen2", 2000, True, "bfloat16", False, 512, 0),  # mostly saved activations
        ("qwen2", 2000, True, "bfloat16", True, 512, 0),
        ("qwen2", 2000, True, "bfloat16", False, 2048, 1),
        ("qwen3", 2000, True, "float32", True, 256, 0),
        ("llama", 8000, False, "bfloat16", True, 128, 0),  # mostly embedding and last layer
        ("llama", 8000, False, "bfloat16", True, 128, 2),
        ("llama", 8000, True, "float32", False, 128, 0),
    ],
)
def test_memory_of_a_real_step(
    family, vocabulary, tied, dtype, checkpointing, tokens, frozen, tmp_path: Path, monkeypatch
) -> None:
    """The estimate of a step differs by at most 10 % from the peak of all tensors in a real
    step."""
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", {"cpu": 1 << 16, "cuda": 1 << 16})
    shape = AutoConfig.for_model(family, vocab_size=vocabulary, tie_word_embeddings=tied, **SMALL)
    AutoModelForCausalLM.from_config(shape, dtype=torch.float32).save_pretrained(tmp_path)
    keys: Any = {"gradient_checkpointing": checkpointing, "enable_tree_training": False}
    keys["frozen_layers"] = frozen
    config = make_config(dtype=dtype, mb_tokens=tokens, **keys)
    actor = FSDPPPOActor(config, tmp_path)
    actor.param_dtype = actor.dtype  # FSDP casts, as on a GPU
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
    always = 16 * n - 12 * count_frozen(config, shape, n)
    always += 2 * 128 * 2 * tokens * bool(frozen)  # the states after the frozen layers, in bfloat16
    estimate = step_bytes(config, shape, n, family == "qwen3")
    assert estimate == pytest.approx(measured.peak - always, rel=0.1)


def test_ranks_share_what_they_keep(tiny_model_dir: Path) -> None:
    """Four ranks keep a quarter each, a reference model adds 4 bytes a parameter, and a server
    holds weights, keys and values."""
    given = recipe(tiny_model_dir, "server.max_total_tokens=5000", "server.dtype=float32")
    shape = AutoConfig.from_pretrained(tiny_model_dir)
    n, norms = count_parameters(shape)
    assert n == AutoModelForCausalLM.from_pretrained(tiny_model_dir).num_parameters()
    alone, shared = (estimate_rank(given, shape, n, norms, k, False) * GIB for k in (1, 4))
    assert alone - shared == pytest.approx(16 * n * 3 / 4)
    given.actor.kl_ctl = 0.1
    assert estimate_rank(given, shape, n, norms, 1, False) * GIB - alone == pytest.approx(4 * n)
    server = estimate_server(given, shape, n, False) * GIB
    assert server == pytest.approx(4 * n + 2 * 4 * 2 * 16 * 2 * 5000)
    given.server.backend, given.server.dtype = "tiny", "float32"
    assert estimate_server(given, shape, n, True) * GIB == pytest.approx(server + CUDA_BYTES)


@pytest.mark.parametrize(
    ("words", "gpus", "says"),
    [
        (["server.tp_size=3"], 8, r"size=3 .* 12 .* one of \[1, 2, 4, 6, 12\]"),
        (["server.tp_size=8"], 8, "size=8 does not fit 12 query and 2 key heads"),
        (["server.tp_size=2"], 1, r"server\.tp_size=2, but there are 1 GPUs"),
        (["server.tp_size=2", "server.backend=tiny"], 8, "a small server uses one GPU"),
        (["server.device=cuda", "server.backend=tiny"], 0, r"server\.device=cuda, but no GPU"),
        ([], 0, r"1536 running episodes need 3328 open files.*1024"),
    ],
)
def test_what_a_machine_cannot_run(words, gpus, says, qwen: Path, monkeypatch) -> None:
    """The error names the cause."""
    if not gpus:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    with pytest.raises(ConfigError, match=says):
        print_plan(recipe(qwen, *words), gpus, None)


def test_a_server_with_more_gpus_than_keys(qwen: Path, plan: Plan) -> None:
    """With 2 key heads on 4 GPUs, two GPUs hold the same head."""
    text = plan(recipe(qwen, "server.tp_size=4"), 8)
    cache = 2 * 2 * 2 * 128 * 28 * 400_000
    assert re.search(rf"server-0 +4,5,6,7 +{3 + (2 * N / 4 + cache / 2) / GIB:.1f}\n", text)


# ---- the servers and their GPUs


SHARE = r"share: set weight_update.mode=disk"
ITSELF = r"10.0.0.5:30000 would connect to itself: set it to"
THERE = "rollout.server_addrs=['http://10.0.0.5:30000']"


@pytest.mark.parametrize(
    ("gpus", "ranks", "words", "refusal"),
    [
        (1, 1, [], SHARE),  # trainer and server share the GPU
        (8, 8, ["server.count=2"], SHARE),
        (2, 1, [], ""),
        (8, 4, ["server.count=2", "server.tp_size=2"], ""),
        (0, 1, [THERE], ITSELF),
        (0, 1, [THERE, "weight_update.address=10.0.0.7"], ""),
        (0, 1, ["rollout.server_addrs=['http://127.0.0.1:30000']"], ""),
    ],
)
def test_what_a_group_for_new_weights_needs(gpus, ranks, words, refusal, monkeypatch) -> None:
    """The group needs GPUs of its own, because NCCL refuses GPUs that two processes share. The
    error suggests mode `disk`. A loopback address is refused, because a server on another machine
    would connect to itself."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    names = [str(k) for k in range(gpus)]
    given = recipe("DIR", "server.backend=sglang", "weight_update.mode=distributed", *words)
    with pytest.raises(ConfigError, match=refusal) if refusal else nullcontext():
        plan_servers(given, names, "")
        check_update_mode(given)


# ---- the plan that is printed


@pytest.mark.parametrize(
    ("gpus", "ranks", "words", "process", "gib"),
    [
        (1, 1, [], "rank 0", "a rank alone 30.6 GiB"),
        (8, 4, ["server.count=4"], "rank 3", "one of four 13.3"),
        (8, 4, ["server.count=4"], "server-3", "a server 16.6"),
    ],
)
def test_the_plan_on_the_page(
    gpus, ranks, words, process, gib, qwen: Path, plan: Plan, monkeypatch
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


def test_a_card_of_24_gb(qwen: Path, plan: Plan) -> None:
    """docs/gpu.md has the keys with which 1.5B parameters fit on it, and what the plan says."""
    page = (ROOT / "docs/gpu.md").read_text()
    [command] = re.findall(r"--config gsm8k.*frozen_layers.*\n.*", page)
    words = re.findall(r"\w+\.\w+=\d+", command)
    rows = re.findall(r"^(?:rank|server).* ([\d.]+)$", plan(recipe(qwen, *words), 1, 24.0), re.M)
    assert f"command below | {sum(map(float, rows)):.1f} |" in page
    with pytest.raises(ConfigError, match=r"too little .* raise actor\.frozen_layers"):
        plan(recipe(qwen), 1, 24.0)


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
    assert "server.count" not in advice()
    order = ["max_total_tokens", "server.count", "actor.mb_tokens", "nproc-per-node", "smaller"]
    places = [advice("server.count=2").index(word) for word in order]
    assert places == sorted(places)
    with pytest.raises(ConfigError, check=lambda error: "actor." not in str(error)):
        check_memory(given, needs[1:], ["0", "1"], 19.0)


def test_advice_of_the_plan(qwen: Path, plan: Plan) -> None:
    """The plan lists the idle GPUs, and says which weight update needs no files."""
    says = "GPUs 1,2,3,4,5,6 are idle; to use them, raise server.count or torchrun --nproc-per-node"
    lines = plan(recipe(qwen), 8).splitlines()
    assert says in lines
    assert any("weight_update.mode=distributed needs no files" in line for line in lines)
    assert "distributed" not in plan(recipe(qwen, "server.backend=tiny"), 8)


def test_a_name_is_enough_for_a_plan(plan: Plan) -> None:
    """If the model is not on this machine, one line says so, and its memory is shown as "?"."""
    text = plan(recipe("nobody/nothing"), 0)
    assert "no config.json of nobody/nothing is on this machine" in text
    assert re.search(r"rank 0 +- +\?\n", text)


def test_printed_commands_start_servers(tiny_model_dir: Path, plan: Plan, tmp_path: Path) -> None:
    """A command can be pasted as it stands, and starts what the run would start."""
    text = plan(recipe(tiny_model_dir, "server.backend=tiny", "server.max_total_tokens=4096"), 0)
    [command] = [line for line in text.splitlines() if "inference.tiny.server" in line]
    # The shell ignores the words that Child adds, and does not get its PYTHONPATH.
    child = Child("pasted", ["env", "-u", "PYTHONPATH", "bash", "-c", command])
    child.start(tmp_path)
    child.url = f"http://127.0.0.1:{command.split()[-1]}"
    try:
        child.wait_ready()
    finally:
        child.end()


def test_the_command(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan that does not fit is shown, above the line that says so."""
    words = ["--config", "gsm8k", f"model_path={qwen}", "--gpus", "1", "--gpu-memory"]
    assert main([*words, "64"]) == 0
    assert main([*words, "43"]) == 2
    said = capsys.readouterr()
    assert said.out.count("server-0    0             16.6") == 2
    assert re.fullmatch("error: .*about 47 GiB are needed.*\n", said.err)
