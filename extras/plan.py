"""Print what a run would start and need. The arguments are those of train.py and two more:

    python -m extras.plan --config gsm8k model_path=DIR --gpus 8 --gpu-memory 80

A plan needs no data, no weights and no GPUs, only the model's config.json. As in a run,
rollout/launch.py chooses the servers and their GPUs.

The ranks together keep 16 bytes per parameter: the parameter, its gradient and AdamW's two moments,
each in float32. A frozen parameter takes 4 bytes, and a reference model adds 4 bytes per parameter.
A step has three phases (`step_bytes`). Each phase frees its memory at its end, so only the largest
counts. A server keeps the weights, and the keys and values of server.max_total_tokens tokens.

Example: training Qwen2.5-1.5B in bfloat16 on one GPU needs 30.6 GiB with gradient checkpointing.
The 16 bytes per parameter make 23.0 GiB, a step adds 4.6 and CUDA 3. Without checkpointing, a step
adds 47 GiB.

The formulas hold for dense models like Llama and Qwen. tests/extras/test_plan.py compares them with
real layers and a real step, and allows a difference of 10 %. CUDA_BYTES is a guess.
"""

import argparse
import importlib
import os
import resource
import shlex
import subprocess
import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from inference.process import Child, free_port, visible_gpus
from rollout.launch import plan_proxy, plan_servers
from run.config import ROOT, ConfigError, PPOActorConfig, TrainConfig, load
from run.inputs import base_model_path, fetch
from training import logprobs

GIB = 2**30
CUDA_BYTES = 3 * GIB  # per process: context, CUDA graphs, workspaces, gaps between tensors
TOKEN_BYTES = 50  # per token, in the files of a step
PROXY_GIB = 0.3
ASSUMED_GIB = 80.0  # per GPU, if --gpus is given without --gpu-memory
LOOPBACK = ("127.0.0.1", "::1", "localhost")


# ---- memory


def number_bytes(actor: PPOActorConfig) -> int:
    return getattr(torch, actor.dtype).itemsize


def count_heads(shape: Any) -> tuple[int, int]:
    queries = shape.num_attention_heads
    return queries, getattr(shape, "num_key_value_heads", None) or queries


def attention_widths(shape: Any) -> tuple[int, int]:
    """Return (Q, K): how many numbers a layer computes per token for queries and for keys."""
    queries, keys = count_heads(shape)
    width = getattr(shape, "head_dim", None) or shape.hidden_size // queries
    return width * queries, width * keys


def mlp_width(shape: Any) -> int:
    return getattr(shape, "intermediate_size", 4 * shape.hidden_size)


def count_parameters(shape: Any) -> tuple[int, bool]:
    """The number of parameters, and whether the layers normalise queries and keys."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(shape)
    names = [name for name, _ in model.named_parameters()]
    return sum(p.numel() for p in model.parameters()), any("q_norm" in name for name in names)


def split_parameters(shape: Any, n: int) -> tuple[int, int, int]:
    """Count the parameters of the output layer (V H), of embedding and output layer together (R),
    and of one layer between them (P). V is the vocabulary's size, H the hidden size."""
    last = shape.vocab_size * shape.hidden_size
    root = last if shape.tie_word_embeddings else 2 * last
    return last, root, (n - root) // shape.num_hidden_layers


def count_frozen(actor: PPOActorConfig, shape: Any, n: int) -> int:
    last, _, layer = split_parameters(shape, n)
    return actor.frozen_layers * layer + last if actor.frozen_layers else 0


def saved_bytes(shape: Any, b: int, has_head_norms: bool) -> int:
    """The bytes per token that a layer keeps for the backward pass, with `b` bytes per number.

    H is the hidden size, I the width of the MLP, and `attention_widths` counts Q and K.
    """
    # Two norms: the input in float32, the normalised input, the output.   2 (4 + 2 b) H
    # Norms of queries and keys, if there are any.                         (4 + b) (Q + K)
    # Queries, keys, values, and the output of attention.                  2 b (Q + K)
    # The MLP: gate, activated gate, up projection, their product.         4 b I
    qk = sum(attention_widths(shape))
    norms = 2 * (4 + 2 * b) * shape.hidden_size + (4 + b) * qk * has_head_norms
    return norms + 2 * b * qk + 4 * b * mlp_width(shape)


def step_bytes(
    actor: PPOActorConfig,
    shape: Any,
    n: int,
    has_head_norms: bool,
    device: str = "cpu",
    ranks: int = 1,
) -> int:
    """The bytes that a step needs beyond those that a rank always keeps.

    V is the vocabulary's size, H the hidden size. `split_parameters` counts R and P. If layers are
    frozen, the embedding is frozen, too, and so is an output layer tied to it.
    """
    b = number_bytes(actor)
    tokens = actor.mb_tokens
    frozen = actor.frozen_layers
    layers = shape.num_hidden_layers - frozen  # trainable ones
    last, root, layer = split_parameters(shape, n)
    learning = root - last if frozen else root
    one = tokens * saved_bytes(shape, b, has_head_norms)
    # With gradient checkpointing a layer keeps only its input. Layers are recomputed one by one.
    is_kept = not actor.gradient_checkpointing
    saved = layers * (one if is_kept else tokens * b * shape.hidden_size)
    # The first phase computes the loss and the output layer's gradient. It needs the sum of
    #        b R         embedding and output layer
    #      + 4 V H       the output layer's gradient in float32
    #      + b V H       what one chunk of tokens adds to this gradient
    #      + saved       what all layers saved
    #      + chunk       the chunk's logits
    head = (4 + b) * min(last, learning) + saved + 24 * logprobs.CHUNK_ELEMENTS[device]
    # The second phase goes back through the layers. It needs b R + b V H + saved + (8 + 3 b) P. In
    # the last term, 2 b P is for the parameters of two layers, b P for the gradient of one, and 8 P
    # for this gradient's float32 copies before and after the sum over ranks.
    middle = b * min(last, learning) + saved + (0 if is_kept else one)
    if ranks == 1 and actor.dtype == "float32":  # no FSDP
        return max(head, middle + 2 * b * tokens * mlp_width(shape))
    # The third phase ends the backward pass. It needs max(4 b V H, 8 R): first the embedding's
    # gradient, then the float32 copies of the gradients of embedding and output layer.
    end = max(0 if frozen else 4 * b * last, 8 * learning)
    return max(b * root + head, b * root + middle + (8 + 3 * b) * layer, end)


def kept_bytes(config: TrainConfig) -> int:
    return 20 if config.actor.kl_ctl > 0 or config.ref.path else 16


def estimate_rank(
    config: TrainConfig, shape: Any, n: int, has_head_norms: bool, ranks: int, on_gpu: bool
) -> float:
    """GiB that each of `ranks` ranks needs."""
    actor = config.actor
    kept = kept_bytes(config) * n - 12 * count_frozen(actor, shape, n)
    if actor.frozen_layers:  # a rank keeps the last frozen layer's output for a step's tokens
        kept += step_tokens(config) * number_bytes(actor) * shape.hidden_size
    device = "cuda" if on_gpu else "cpu"
    step = step_bytes(actor, shape, n, has_head_norms, device, ranks)
    return (kept / ranks + step + CUDA_BYTES * on_gpu) / GIB


def estimate_server(config: TrainConfig, shape: Any, n: int, on_gpu: bool) -> float:
    """GiB that a server needs on each of its GPUs.

    With more GPUs than key heads, several GPUs keep the same head. Raises ConfigError if SGLang
    cannot divide the heads among the GPUs (srt/models/qwen2.py).
    """
    tp = config.server.tp_size
    heads, keys = count_heads(shape)
    fits = [k for k in range(1, heads + 1) if heads % k == 0 and max(k, keys) % min(k, keys) == 0]
    if tp not in fits:
        message = f"{tp} does not fit {heads} query and {keys} key heads: use one of {fits}"
        raise ConfigError(f"server.tp_size={message}")
    numbers = 2 * attention_widths(shape)[1] * shape.num_hidden_layers
    cache = numbers * config.server.max_total_tokens / min(tp, keys)
    dtype = "bfloat16" if on_gpu and config.server.backend == "sglang" else config.server.dtype
    width = 2 if dtype == "bfloat16" else 4  # bytes of a number
    return (width * (n / tp + cache) + CUDA_BYTES * on_gpu) / GIB


# ---- whether it fits


def check_memory(
    config: TrainConfig, needs: list[tuple[Child, float]], gpus: list[str], have: float
) -> None:
    """Raise ConfigError if the processes on one GPU need more than `have` GiB."""
    actor = config.actor
    on_ranks = {
        "lower actor.mb_tokens": True,
        "set actor.gradient_checkpointing=true": not actor.gradient_checkpointing,
        "set actor.dtype=bfloat16": actor.dtype == "float32",
        "raise actor.frozen_layers": True,
        "raise torchrun --nproc-per-node": sum(p.name[:4] == "rank" for p, _ in needs) < len(gpus),
    }
    on_servers = {
        "lower server.max_total_tokens": True,
        "lower server.count": config.server.count > 1,
        "raise server.tp_size": config.server.tp_size < len(gpus),
    }
    for gpu in gpus or [""]:
        here = {each.name: gib for each, gib in needs if gpu in each.gpus or not gpus}
        if sum(here.values()) <= have:
            continue
        remedies = on_servers if any(name.startswith("server") for name in here) else {}
        remedies |= on_ranks if any(name.startswith("rank") for name in here) else {}
        helps = [remedy for remedy, is_open in remedies.items() if is_open]
        place = f"GPU {gpu}" if gpus else "this machine"
        parts = ", ".join(f"{name} {gib:.1f}" for name, gib in here.items())
        raise ConfigError(
            f"too little memory: about {sum(here.values()):.0f} GiB are needed ({parts}) and"
            f" {place} has {have:.0f}. To need less, {', '.join(helps)}, or take a smaller model"
        )


def check_gpus(config: TrainConfig, gpus: list[str], ranks: int) -> None:
    """Raise ConfigError if the ranks, or one server, need more GPUs than there are."""
    needs = {"torchrun --nproc-per-node": ranks, "server.tp_size": config.server.tp_size}
    for key, wanted in needs.items():
        if gpus and wanted > len(gpus):
            raise ConfigError(f"{key}={wanted}, but there are {len(gpus)} GPUs")


def has_own_gpus(servers: list[Child], gpus: list[str]) -> bool:
    """Whether no server shares a GPU with another server or with the first rank."""
    used = [gpu for server in servers for gpu in server.gpus]
    return len({*gpus[:1], *used}) == 1 + len(used)


def check_update_mode(config: TrainConfig) -> None:
    """Raise ConfigError if servers cannot reach the trainer for weight_update.mode=distributed."""
    update = config.weight_update
    if update.mode != "distributed":
        return
    urls = config.rollout.server_addrs
    away = [url for url in urls if not any(f"//{name}" in url for name in LOOPBACK)]
    if away and update.address in LOOPBACK:
        raise ConfigError(
            f"weight_update.address={update.address}: {away[0]} would connect to itself: set it to"
            " this machine's address in their network, or weight_update.mode=disk"
        )


def check_open_files(config: TrainConfig) -> None:
    """Raise ConfigError if a process may need more open files than this machine allows.

    Proxy and trainer each have two connections per running episode.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    needed = 2 * count_episodes(config) + 256
    if needed > limit:
        raise ConfigError(
            f"{count_episodes(config)} running episodes need {needed} open files, but the limit is"
            f" {limit}: raise it (ulimit -Hn), or lower rollout.max_concurrent_rollouts or"
            " gconfig.n_samples"
        )


def count_episodes(config: TrainConfig) -> int:
    return config.concurrent_groups * config.gconfig.n_samples


def step_tokens(config: TrainConfig) -> int:
    """The number of tokens that a step has if every answer has max_new_tokens."""
    keys = config.gconfig
    return config.train_dataset.batch_size * keys.n_samples * keys.max_new_tokens


# ---- the plan


def find_shape(path: str) -> Any:
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
    except (OSError, ValueError):
        print(f"no config.json of {path} is on this machine, so no memory is estimated")
        print(f"for a model of the hub, first: hf download {path} config.json")
        return None


def memory_of_each(gpus: list[str]) -> float:
    """GiB of the smallest GPU or, without GPUs, of this machine."""
    if not gpus:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    found = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return min(map(float, found.split())) / 1024


def paste(planned: Child, port: int) -> str:
    """The shell command that starts a process by hand."""
    variables = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ",".join(planned.gpus)}
    pairs = [f"{k}={v}" for k, v in (variables | planned.variables).items()]
    return shlex.join(["env", *pairs, *planned.command, "--port", str(port)])


def describe_load(config: TrainConfig) -> str:
    running = config.server.count * config.server.max_running_requests
    samples = config.train_dataset.batch_size * config.gconfig.n_samples
    step = step_tokens(config) * TOKEN_BYTES
    return (
        f"{config.max_steps} steps of {samples} samples; {count_episodes(config)} episodes run at a"
        f" time, the servers decode {running}\ndisk: {step / 1e6:.1f} MB a step for turns of"
        f" max_new_tokens ({step * 1440 / 1e9:.1f} GB a day at one step a minute)"
    )


def weights_on_disk(config: TrainConfig, n: int) -> int:
    """The most bytes that weights take on the disk: all saved models, two versions for the servers,
    and three checkpoints with parameters and moments, one of them unfinished."""
    interval = config.saver.interval or config.max_steps
    models = -(-config.max_steps // interval)
    return (4 * models + 12 * 3 + 2 * number_bytes(config.actor)) * n


def print_plan(config: TrainConfig, gpus: int | None, gpu_memory: float | None) -> int:
    """Print the plan for this machine, or for `gpus` GPUs of `gpu_memory` GiB.

    Raises ConfigError for a run that cannot work.
    """
    names = visible_gpus() if gpus is None else [str(k) for k in range(gpus)]
    task = importlib.import_module(config.task) if config.task else None
    if not (config.model_path or hasattr(task, "make_model")):
        raise ConfigError("no model: set model_path to a Hugging Face folder or a hub name")
    config.model_path = config.model_path or base_model_path(config)
    if config.model_path == "smollm2":  # small enough to be made for a plan
        config.model_path = fetch(config.model_path)
    config.tokenizer_path = config.tokenizer_path or config.model_path
    running = config.rollout.server_addrs
    servers = [] if running else plan_servers(config, names, "KEY")
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    check_gpus(config, names, ranks_here)
    check_update_mode(config)
    check_open_files(config)
    trainers = [Child(f"rank {k}", [], names[k : k + 1]) for k in range(ranks_here)]
    ports = [free_port() for _ in servers]
    urls = [f"http://127.0.0.1:{port}" for port in ports] or running
    proxy = plan_proxy(config, urls, "KEY", "KEY", {})
    needs = [(proxy, PROXY_GIB)]
    if shape := find_shape(config.model_path):
        n, has_head_norms = count_parameters(shape)
        rank = estimate_rank(config, shape, n, has_head_norms, ranks, bool(names))
        needs += [(each, rank) for each in trainers]
        needs += [(each, estimate_server(config, shape, n, bool(each.gpus))) for each in servers]
    known = {each.name: f"{gib:.1f}" for each, gib in needs}
    print(f"{'process':12}{'GPUs':12}{'GiB':>6}")
    for each in [*trainers, *servers, proxy]:
        print(f"{each.name:12}{','.join(each.gpus) or '-':12}{known.get(each.name, '?'):>6}")
    for url in running:
        print(f"{'(running)':12}{url}")
    if unused := [gpu for gpu in names if not any(gpu in p.gpus for p in trainers + servers)]:
        keys = "server.count or " * bool(servers) + "torchrun --nproc-per-node"
        print(f"GPUs {','.join(unused)} are idle; to use them, raise {keys}")
    is_apart = servers and config.server.backend == "sglang" and has_own_gpus(servers, names)
    if config.weight_update.mode == "disk" and is_apart:
        print("the servers have GPUs of their own: weight_update.mode=distributed needs no files")
    print(describe_load(config))
    if shape:
        weights = weights_on_disk(config, n) / 1e9
        print(f"{n:,} parameters, at most {weights:.1f} GB of weights on the disk")
        print("GiB for each rank, and for each GPU of a server, are estimates")
        have = gpu_memory or (ASSUMED_GIB if gpus else memory_of_each(names))
        check_memory(config, needs, names, have)
    print("\nthe run's commands, with its keys as KEY and free ports:")
    for each, port in zip([*servers, proxy], [*ports, free_port()]):
        print(paste(each, port))
    return 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m extras.plan", allow_abbrev=False)
    parser.add_argument("--gpus", type=int, metavar="N", help="plan for this many GPUs")
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help="the memory of each")
    options, words = parser.parse_known_args(argv)
    if options.gpus is not None:  # for dtype=auto, `load` looks at the visible GPUs
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(options.gpus)))
    try:
        return print_plan(load(words)[0], options.gpus, options.gpu_memory)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
