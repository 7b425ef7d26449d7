"""Plan the inference servers of a run, and refuse a run that cannot work.

`plan_servers` decides which inference servers to start and on which GPUs. The plan depends only on the configuration
and the GPUs. The trainer's ranks get the first GPUs and the servers get the last GPUs. For example, if a machine with 8
GPUs runs 4 ranks and 2 servers of 2 GPUs each, the ranks get GPUs 0 to 3, the first server gets GPUs 4 and 5, and the
second server gets GPUs 6 and 7. Ranks and servers share GPUs if there are too few GPUs, or if `server.colocate` is
true. `--dry-run` prints the plan and starts nothing.

`plan_run` refuses a run that cannot work, and the error message names the reason in one line. A run cannot work, for
example, if a port is in use, if the installed SGLang needs another version of torch, or if the memory is too small
(run/memory.py). The module run/launch.py starts the planned servers.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from importlib import metadata
from typing import Any

import httpx
import torch
from transformers import AutoConfig

from inference.serve import listen, raise_open_files
from run.keys import ServerConfig, TrainConfig
from run.launch import ROOT, Planned, own_command, words
from run.load import ConfigError, one_line
from run.memory import CUDA_BYTES, GIB, check_memory, describe_load, estimate_memory
from training.layout import pick_layout

LOOPBACK = ("127.0.0.1", "::1", "localhost")  # addresses by which a machine reaches only itself


def visible_gpus() -> list[str]:
    """Return the names of the GPUs that the run may use, as in CUDA_VISIBLE_DEVICES."""
    numbers = [str(i) for i in range(torch.cuda.device_count())]
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",")[: len(numbers)] if named else numbers


def plan_servers(config: TrainConfig, gpus: list[str], ranks: int) -> list[Planned]:
    """Return the servers to start on the GPUs `gpus`. The machine with the GPUs `gpus` also runs `ranks` trainer
    processes.

    Return an empty list if rollout.server_addrs is set. Raises ConfigError if there are too few GPUs.
    """
    server = config.server
    if gpus and ranks > len(gpus):
        remedy = f"torchrun --nproc-per-node={len(gpus)}"
        raise ConfigError(
            f"{ranks} trainers (LOCAL_WORLD_SIZE) need one GPU each, but there are {len(gpus)}: {remedy}"
        )
    if config.rollout.server_addrs:
        return []
    tp, spare = server.tp_size, gpus[ranks:]
    wanted = server.count * tp
    shared = len(spare) < wanted if server.colocate is None else server.colocate
    # If servers share GPUs with the ranks, they get all GPUs in turn, and after the last GPU the first GPU again.
    pool = gpus * server.count if shared else spare[-wanted:]
    if gpus and len(pool) < wanted:
        need = f"server.count={server.count} with server.tp_size={tp}"
        remedy = "lower them, or set server.colocate=true"
        raise ConfigError(f"{need} and {ranks} trainers do not fit on {len(gpus)} GPUs: {remedy}")
    if gpus and server.release_memory and not shared:
        raise ConfigError(
            "server.release_memory only costs time if no server shares a GPU with the trainer: omit it"
        )
    share = server.mem_fraction or (0.6 if shared else 0.85)
    command, keys = server_command(config, share if gpus else None), (config.rollout.server_key,)
    # SGLang computes the logprobs of a prompt or of an interrupted answer in chunks. Each chunk takes up to three
    # float32 matrices of (tokens, vocabulary), which are 3.5 GiB for the default of 2,048 tokens and a model of Qwen.
    # Older versions of SGLang know only the names with LOGITS_PROCESSER.
    chunks = {"SGLANG_LOGPROB_CHUNK_SIZE": "256", "SGLANG_LOGITS_PROCESSER_CHUNK_SIZE": "256"}
    variables = chunks | {"SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK": "1"} if gpus else {}
    # By default SGLang exits if one of its GPUs has much less free memory than another of its GPUs.
    variables |= {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"} if gpus and shared else {}
    ports = [server.port + k if server.port else 0 for k in range(server.count)]
    return [
        Planned(f"server-{k}", command, pool[k * tp : (k + 1) * tp], port, keys, variables)
        for k, port in enumerate(ports)
    ]


def server_command(config: TrainConfig, mem_fraction: float | None) -> list[str]:
    """Return the command that starts an inference server, without the port.

    `mem_fraction` is the server's share of the memory of each GPU, or None without GPUs. The user's `server.args` come
    last, so they override earlier options.
    """
    server = config.server
    options: dict[str, object] = {
        "--model-path": config.model_path,
        "--weight-version": 0,
        "--max-running-requests": server.max_running_requests,
        "--max-total-tokens": server.max_total_tokens,
    }
    installed = config.gpus or importlib.util.find_spec("sglang") is not None
    if server.backend == "tiny" or (server.backend == "auto" and not (mem_fraction and installed)):
        for name in ("tp_size", "mem_fraction", "fp32_head", "command"):
            if getattr(server, name) != getattr(ServerConfig(), name):
                raise ConfigError(
                    f"server.{name} has no effect on the small server: omit it, or use SGLang"
                )
        return own_command(
            "inference.tiny.server",
            options | {"--seed": config.seed, "--api-key": "-"},
            *server.args,
        )
    if not server.command and not config.gpus:
        check_sglang()
    command = shlex.split(server.command) or [sys.executable, "-m", "sglang.launch_server"]
    options |= {
        "--tp-size": server.tp_size,
        "--random-seed": config.seed,
        "--mem-fraction-static": mem_fraction,
    }
    # By default SGLang computes a float32 model in float16, whose numbers are at most 65,504.
    options["--dtype"] = "bfloat16" if mem_fraction else None
    flags = {
        "--enable-fp32-lm-head": server.fp32_head,
        "--enable-memory-saver": server.release_memory,
    }
    leash = [sys.executable, str(ROOT / "run" / "leash.py"), "--api-key"]
    return [
        *leash,
        *command,
        *words(options),
        *[f for f, on in flags.items() if on and mem_fraction],
        *server.args,
    ]


def check_sglang() -> None:
    """Raise ConfigError if sglang is missing, or if sglang needs a version of torch that is not installed."""
    elsewhere = "or use SGLang elsewhere: server.command='PYTHON -m sglang.launch_server' or rollout.server_addrs=[URL]"
    with one_line(f"sglang is not installed here: pip install -e '.[gpu]', {elsewhere}"):
        version, requires = metadata.version("sglang"), metadata.requires("sglang") or []
    wanted = [
        match[1] for line in requires if (match := re.match(r"torch\s*\(?==\s*([\w.]+)", line))
    ]
    here = metadata.version("torch").partition("+")[0]
    if wanted and here not in wanted:
        remedy = f"pip install torch=={wanted[0]}, {elsewhere}"
        raise ConfigError(
            f"sglang {version} was built for torch {wanted[0]}, but torch {here} is installed: {remedy}"
        )


def check_addresses(config: TrainConfig, planned: list[Planned]) -> None:
    """Raise ConfigError if a planned port is in use or if an address in rollout.server_addrs does not answer.

    An inference server answers GET /model_info. A router answers GET /workers.
    """
    for url in config.rollout.server_addrs:
        try:
            if not config.rollout.server_key and httpx.URL(url).host not in LOOPBACK:
                raise ConfigError(
                    f"rollout.server_addrs: {url} is not this machine: set rollout.server_key"
                )
            urls = [url.rstrip("/") + path for path in ("/model_info", "/workers")]
            headers = {"authorization": f"Bearer {config.rollout.server_key or 'none'}"}
            status = [
                httpx.get(each, headers=headers, timeout=10, trust_env=False).status_code
                for each in urls
            ]
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise ConfigError(
                f"rollout.server_addrs: {url} cannot be reached ({error}); is it running?"
            ) from error
        if 200 not in status:
            raise ConfigError(
                f"rollout.server_addrs: {url} is no inference server of this key (status {status[0]})"
            )
    for process in planned:
        with one_line(f"server.port: {process.port} cannot be used (0 takes any free port)"):
            listen("127.0.0.1", process.port or 0).close()


def check_open_files(config: TrainConfig, limit: int) -> None:
    """Raise ConfigError if a process may need more than `limit` open files. Each connection counts as an open file.

    For each call of an agent, the proxy has two connections: one to the agent, and one to an inference server. For each
    episode, the trainer has two connections: one for the agent, and one to start and end the agent's session.
    """
    episodes = (config.rollout.max_concurrent_rollouts or 1) * config.gconfig.n_samples
    if (needed := 2 * episodes + 256) > limit:
        remedy = (
            "raise it (ulimit -Hn), or lower rollout.max_concurrent_rollouts or gconfig.n_samples"
        )
        raise ConfigError(
            f"{episodes} running episodes need {needed} open files, but the limit is {limit}: {remedy}"
        )


def servers_on_gpus(planned: list[Planned]) -> list[Planned]:
    """Return the servers that compute on GPUs. The small server uses the CPU even if the plan gives it a GPU."""
    return [
        process
        for process in planned
        if process.gpus and "inference.tiny.server" not in process.command
    ]


def choose_update_mode(
    config: TrainConfig, planned: list[Planned], gpus: list[str]
) -> tuple[Any, str]:
    """Return the mode of the weight updates, and the reason for this mode. The mode "auto" becomes the fastest mode
    that can work."""
    mode, used = (
        config.weight_update.mode,
        [gpu for p in servers_on_gpus(planned) for gpu in p.gpus],
    )
    if mode != "auto":
        return mode, "the configuration sets it"
    if config.weight_update.path:
        return "disk", "weight_update.path is set"
    if not used or config.server.command:
        return "disk", "no server of this environment uses a GPU"
    if all(gpus[0] in process.gpus for process in planned):
        return "tensor", "every server uses the trainer's first GPU"
    if len({gpus[0], *used}) == 1 + len(used):
        return "distributed", "no server shares a GPU with the trainer's first rank"
    return "disk", "some servers share GPUs with each other or with the trainer's first rank"


def check_update_mode(config: TrainConfig, planned: list[Planned], gpus: list[str]) -> None:
    """Raise ConfigError if weight_update.mode cannot work on the GPUs `gpus`. Rank 0 sends the weights from its GPU,
    the first GPU in `gpus`.

    In mode "distributed", NCCL refuses two processes on one GPU, and all processes need the same version of NCCL. In
    mode "tensor", a server reads the weights from the memory of rank 0's GPU. The GPU checks do not concern the small
    server, because the small server computes on the CPU.
    """
    mode, on_gpus = config.weight_update.mode, servers_on_gpus(planned)
    others = [url for url in config.rollout.server_addrs if httpx.URL(url).host not in LOOPBACK]
    if mode == "distributed" and others and (own := config.weight_update.address) in LOOPBACK:
        remedy = "set weight_update.address to this machine's address in their network, or weight_update.mode=disk"
        raise ConfigError(
            f"weight_update.address={own}: {others[0]} would connect to itself: {remedy}"
        )
    used = [*gpus[:1], *(gpu for p in on_gpus for gpu in p.gpus)]
    away = [p.name for p in on_gpus if gpus[0] not in p.gpus]
    is_shared = len(set(used)) < len(used)
    if mode == "distributed" and is_shared:
        remedy = f"set weight_update.mode={'disk' if away else 'tensor'}, or server.colocate=false"
        raise ConfigError(
            f"weight_update.mode=distributed: NCCL refuses GPUs that two processes share: {remedy}"
        )
    if mode == "tensor" and away:
        remedy = f"set weight_update.mode={'disk' if is_shared else 'distributed'}"
        raise ConfigError(
            f"weight_update.mode=tensor: {away[0]} does not use GPU {gpus[0]}, as rank 0 does: {remedy}"
        )
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get(
        "PYTORCH_ALLOC_CONF", ""
    )
    if mode == "tensor" and on_gpus and "expandable_segments:true" in allocator.lower():
        remedy = (
            "unset PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF, or set weight_update.mode=disk"
        )
        raise ConfigError(
            f"weight_update.mode=tensor: a server may not read memory of expandable segments: {remedy}"
        )
    if mode == "distributed" and on_gpus and config.server.command:
        show = [
            shlex.split(config.server.command)[0],
            "-c",
            "import torch; print(torch.cuda.nccl.version())",
        ]
        theirs = subprocess.run(show, capture_output=True, text=True).stdout.strip()
        if theirs.startswith("(") and theirs != str(ours := torch.cuda.nccl.version()):
            remedy = f"install the torch of {show[0]} here, or set weight_update.mode=disk"
            raise ConfigError(
                f"weight_update.mode=distributed: NCCL {ours} here, {theirs} in the server: {remedy}"
            )


def plan_run(config: TrainConfig) -> tuple[list[Planned], str]:
    """Check the whole plan, then return the servers to start and the text that `--dry-run` prints.

    Raises ConfigError for a run that cannot work.
    """
    gpus, ranks = (
        visible_gpus(),
        int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    )  # torchrun sets LOCAL_WORLD_SIZE
    machine = (
        torch.cuda.mem_get_info()[1]
        if gpus
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ) / GIB
    if config.gpus:  # the plan is for `config.gpus` GPUs, which this machine may lack
        gpus, machine = [str(k) for k in range(config.gpus)], config.gpu_memory
    servers = plan_servers(config, gpus, ranks)
    check_open_files(config, raise_open_files())
    check_addresses(config, servers)
    config.weight_update.mode, why = choose_update_mode(config, servers, gpus)
    check_update_mode(config, servers, gpus)
    shape = AutoConfig.from_pretrained(str(config.model_path)).get_text_config()
    step, kept, server, parameters = estimate_memory(
        config, shape, int(os.environ.get("WORLD_SIZE", 1)), bool(gpus)
    )
    trainers = [
        Planned(f"rank {k}", ["train.py"], gpus[k : k + 1], port=None) for k in range(ranks)
    ]
    proxies = [Planned(f"proxy-{k}", ["proxy.py"]) for k in range(config.proxy.workers)]

    def needs(rank: float, server: float) -> list[tuple[Planned, float]]:
        return [
            *((p, rank) for p in trainers),
            *((p, server) for p in servers),
            *((p, 0.3) for p in proxies),
        ]

    is_released, idle = bool(gpus) and config.server.release_memory, CUDA_BYTES / GIB
    for phase in ((step, idle), (kept, server)) if is_released else ((step, server),):
        check_memory(needs(*phase), gpus, machine)
    rows = [("process", "GPUs", "port", "GiB", "command")]
    for p, gib in needs(step, server):
        port = {0: "any", None: "-"}.get(p.port, str(p.port))
        rows.append((p.name, ",".join(p.gpus) or "-", port, f"{gib:.1f}", shlex.join(p.command)))
    rows += [("(is up)", "", "", "", url) for url in config.rollout.server_addrs]
    lines = ["{:10}{:8}{:10}{:>6}  {}".format(*row) for row in rows]
    lines.append(
        f"{parameters:,} parameters; GiB for each rank, and for each GPU of a server, are estimates"
    )
    if is_released:
        lines.append(
            f"server.release_memory: in a step, a server needs {idle:.1f}; between steps, a rank {kept:.1f}"
        )
    if unused := [gpu for gpu in gpus if not any(gpu in p.gpus for p in [*trainers, *servers])]:
        keys = "server.count or " * (not config.rollout.server_addrs) + "torchrun --nproc-per-node"
        lines.append(f"GPUs {','.join(unused)} are idle; to use them, raise {keys}")
    if (
        config.actor.offload and gpus
    ):  # a checkpoint copies the parameters and both moments to host memory
        here = parameters * ranks / int(os.environ.get("WORLD_SIZE", 1)) / GIB
        host = f"{(16 if config.ref.path is None else 20) * here:.1f} GiB, and {12 * here:.1f} more during a checkpoint"
        lines.append(f"actor.offload: the ranks of this machine need host memory, {host}")
    lines.append(f"weight_update.mode={config.weight_update.mode}: {why}")
    device = "cuda" if gpus else "cpu"
    compiled, (layout, reason) = (
        config.actor.is_compiled(device),
        pick_layout(config.actor, device, shape),
    )
    lines.append(
        f"trainer: {layout} rows ({reason}); layers are {'' if compiled else 'not '}compiled"
    )
    lines.append(describe_load(config, parameters))
    return servers, "\n".join(lines)
