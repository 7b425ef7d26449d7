"""Plan the processes of a run: the inference servers and the proxy.

The processes get their API keys in environment variables. Only SGLang gets its key on the command
line, which other users of the machine can read.

The trainer's ranks take the first GPUs of the machine, and the servers take the last. With 8 GPUs,
4 ranks and 2 servers of 2 GPUs each, the first server gets GPUs 4 and 5, and the second 6 and 7. If
there are too few GPUs, the servers share the ranks' GPUs, from the first on: with only 4 GPUs, the
first server gets GPUs 0 and 1, and the second 2 and 3.
"""

import json
import os
import shlex
import sys
from typing import Any

from inference.process import Child, command
from run.config import ConfigError, TrainConfig

SGLANG_VARIABLES = {
    # Compute log-probabilities of 256 tokens at a time, so the logits take less than half a GiB.
    "SGLANG_LOGPROB_CHUNK_SIZE": "256",
    # Accept that a GPU shared with a rank has less free memory than the server's other GPUs.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
}


def plan_servers(config: TrainConfig, gpus: list[str], key: str) -> list[Child]:
    """Return one process per server. Raises ConfigError if the GPUs do not suffice for
    server.device or weight_update.mode."""
    server = config.server
    size = server.tp_size
    if server.backend == "tiny":
        if server.device == "auto":
            server.device = "cuda" if gpus else "cpu"
        if server.device == "cuda" and not gpus:
            raise ConfigError("server.device=cuda, but no GPU is visible")
        gpus = gpus if server.device == "cuda" else []
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    wanted = server.count * size
    is_shared = len(gpus) - ranks < wanted
    if gpus and is_shared and config.weight_update.mode == "distributed":
        raise ConfigError(
            "weight_update.mode=distributed: NCCL refuses GPUs that two processes share:"
            " set weight_update.mode=disk"
        )
    pool = gpus * server.count if is_shared else gpus[-wanted:]
    words: list[Any] = ["--model-path", config.model_path, "--weight-version", 0]
    words += ["--tokenizer-path", config.tokenizer_path]
    words += ["--max-running-requests", server.max_running_requests]
    words += ["--max-total-tokens", server.max_total_tokens]
    if server.backend == "tiny":
        words += ["--seed", config.seed, "--threads", server.threads]
        words += ["--dtype", server.dtype, "--device", server.device]
        whole = command("inference.tiny.server", *words, *server.args)
        variables = {"POCKET_AREAL_SERVER_KEY": key}
    else:
        words += [f"--api-key={key}", "--random-seed", config.seed, "--tp-size", size]
        # Without --dtype, SGLang would run float32 models in float16. --enable-fp32-lm-head
        # computes the logits in float32, as the trainer does.
        if gpus:
            words += ["--dtype", "bfloat16", "--enable-fp32-lm-head"]
            words += ["--mem-fraction-static", 0.6 if is_shared else 0.85]
        # POCKET_AREAL_SGLANG can name another command that starts SGLang.
        sglang = os.environ.get("POCKET_AREAL_SGLANG", f"{sys.executable} -m sglang.launch_server")
        start = [sys.executable, "-P", "-m", "inference.process", *shlex.split(sglang)]
        whole = [*start, *map(str, words), *server.args]
        variables = SGLANG_VARIABLES
    return [
        Child(f"server-{k}", whole, pool[k * size : (k + 1) * size], variables)
        for k in range(server.count)
    ]


def plan_proxy(
    config: TrainConfig, servers: list[str], key: str, admin_key: str, hooks: dict[str, Any]
) -> Child:
    """Return the proxy's process. `hooks` maps the class path of each of the engine's hooks to the
    arguments of that class."""
    words: list[Any] = ["--model-path", config.tokenizer_path, "--seed", config.seed]
    words += ["--sampling", json.dumps(config.gconfig.model_dump())]
    words += ["--hooks", json.dumps(hooks)]
    for url in servers:
        words += ["--server", url]
    if parser := config.rollout.openai.tool_call_parser:
        words += ["--tool-call-parser", parser]
    keys = {"POCKET_AREAL_ADMIN_KEY": admin_key, "POCKET_AREAL_SERVER_KEY": key}
    return Child("proxy", command("proxy", *words), variables=keys)
