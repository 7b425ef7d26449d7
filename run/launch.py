"""Start, watch and end the processes of a run: inference servers and proxies.

They start before train.py imports torch, because all of them take seconds to load. Each has a
process session of its own, so Ctrl-C reaches train.py alone, which then ends them in order. A
process ends by itself when its parent is gone, even after `kill -9`.

The trainer's ranks take the first GPUs of the machine, the servers the last. With 8 GPUs, 4 ranks
and 2 servers of 2 GPUs each, the servers get GPUs 4, 5 and 6, 7. Where there are too few GPUs, the
servers share those of the ranks.

A run that loses a server or a proxy ends at once, with the last lines of its log; it goes on from
its last checkpoint.
"""

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from inference.serve import free_port
from run.config import ROOT, TrainConfig

GRACE_SECONDS = 5.0  # from SIGTERM to SIGKILL

# A child of torchrun's rank 0 must not take itself for a rank. SGLang's memory pools refuse the
# allocator's expandable segments.
DROPPED = re.compile(
    r"TORCHELASTIC_\w+|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|PYTORCH_(CUDA_)?ALLOC_CONF|TORCH_DIST_USE_NCCL2"
)


class ProcessDied(RuntimeError):
    """A process that the run needs has ended. The message has the last lines of its log."""

    is_verdict = True  # the message says everything: no traceback


@dataclass(eq=False)
class Child:
    """A process of the run, planned or started. `--port` is added to its command."""

    name: str
    command: list[str]
    gpus: list[str] = field(default_factory=list)  # as in CUDA_VISIBLE_DEVICES
    variables: dict[str, str] = field(default_factory=dict)
    is_ending = False

    def start(self, log_dir: Path, *keys: str) -> None:
        """Start the process and return at once. It gets its keys, if they are known already."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = log_dir / f"{self.name}.log"
        log_dir.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [*self.command, "--port", str(port)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment(self.gpus) | self.variables,
                text=True,
            )
        if keys:
            self.send(*keys)

    def send(self, *keys: str) -> None:
        """Write secrets to its standard input, which other users cannot read, and close it."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as pipe:  # it may have ended
            pipe.writelines(f"{key}\n" for key in keys)

    def wait_ready(self) -> str:
        """Wait until the process answers, and return its URL. Raises ProcessDied."""
        with httpx.Client(timeout=5, trust_env=False) as client:
            while self.process.poll() is None:
                with suppress(httpx.TransportError):
                    if client.get(f"{self.url}/health").is_success:
                        return self.url
                time.sleep(0.05)
        raise self.death()

    def death(self) -> ProcessDied:
        last = self.log.read_text(errors="replace").strip().splitlines()[-5:]
        said = f"{self.name} ended with code {self.process.wait()}; the end of {self.log}:"
        return ProcessDied("\n".join([said, *last]))

    def watch(self, on_death: Callable[[ProcessDied], None]) -> None:
        """Call `on_death` in a thread if the process ends before `end`."""

        def wait() -> None:
            self.process.wait()
            if not self.is_ending:
                on_death(self.death())

        threading.Thread(target=wait, daemon=True).start()

    def end(self) -> None:
        """End the process and what it has started: SIGTERM, and then SIGKILL for the session."""
        self.is_ending = True
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_SECONDS)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()  # waits, and closes its standard input


def environment(gpus: list[str]) -> dict[str, str]:
    """The environment of a child that uses these GPUs."""
    kept = {name: value for name, value in os.environ.items() if not DROPPED.fullmatch(name)}
    direct = os.environ.get("NO_PROXY", "") + ",127.0.0.1,localhost"
    return kept | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "NO_PROXY": direct,
        "no_proxy": direct,
    }


def command(module: str, options: dict[str, Any]) -> list[str]:
    """The command that starts a server of this project."""
    start = [sys.executable, "-P", "-m", module, "--exit-with-parent"]
    return [*start, *to_words(options)]


def to_words(options: dict[str, Any]) -> list[str]:
    """Options as words of a command line: None leaves an option out, a list repeats it."""
    pairs = [(k, x) for k, v in options.items() for x in (v if isinstance(v, list) else [v])]
    return [str(word) for k, x in pairs if x is not None for word in (k, x)]


# ---- what to start


def visible_gpus() -> list[str]:
    """The GPUs that the run may use, as in CUDA_VISIBLE_DEVICES."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [gpu for gpu in named.split(",") if gpu not in ("", "-1")]
    try:
        words = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return []


def uses_sglang(config: TrainConfig, gpus: list[str]) -> bool:
    if config.server.backend != "auto":
        return config.server.backend == "sglang"
    return bool(gpus) and importlib.util.find_spec("sglang") is not None


def plan_servers(config: TrainConfig, gpus: list[str]) -> list[Child]:
    """The inference servers to start; none if rollout.server_addrs names running ones."""
    server, ranks = config.server, int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if config.rollout.server_addrs:
        return []
    options: dict[str, Any] = {
        "--model-path": config.model_path,
        "--weight-version": 0,
        "--max-running-requests": server.max_running_requests,
        "--max-total-tokens": server.max_total_tokens,
    }
    if not uses_sglang(config, gpus):
        options |= {"--seed": config.seed, "--api-key": "-"}
        words = [*command("inference.tiny.server", options), *server.args]
        return [Child(f"server-{k}", words) for k in range(server.count)]

    size, wanted, spare = server.tp_size, server.count * server.tp_size, gpus[ranks:]
    is_shared = len(spare) < wanted
    pool = gpus * server.count if is_shared else spare[-wanted:]
    options |= {"--random-seed": config.seed, "--tp-size": size}
    flags = []
    if gpus:  # float32 logits, as the trainer has; SGLang would serve float32 models in float16
        options |= {"--dtype": "bfloat16", "--mem-fraction-static": 0.6 if is_shared else 0.85}
        flags = ["--enable-fp32-lm-head"]
    words = [*sglang(), *to_words(options), *flags, *server.args]
    return [
        Child(f"server-{k}", words, pool[k * size : (k + 1) * size], SGLANG_VARIABLES)
        for k in range(server.count)
    ]


SGLANG_VARIABLES = {
    # Log-probabilities in chunks of 256 tokens, whose float32 logits stay below half a GiB.
    "SGLANG_LOGPROB_CHUNK_SIZE": "256",
    "SGLANG_LOGITS_PROCESSER_CHUNK_SIZE": "256",
    "SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK": "1",
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",  # a GPU that a rank shares has less memory free
}


def sglang() -> list[str]:
    """The words that start SGLang. POCKET_AREAL_SGLANG may be another command that does."""
    words = os.environ.get("POCKET_AREAL_SGLANG", f"{sys.executable} -m sglang.launch_server")
    return [sys.executable, "-P", "-m", "inference.with_parent", "--api-key", *shlex.split(words)]


def plan_proxies(config: TrainConfig, servers: list[str], hooks: dict[str, Any]) -> list[Child]:
    """The proxies. Each waits for its admin key and the servers' key, which it gets when the
    servers answer. `hooks` are the engine's: {class path: its arguments}, or {}."""
    options = {
        "--server": servers,
        "--admin-key": "-",
        "--server-key": "-",
        "--model-path": config.tokenizer_path,
        "--seed": config.seed,
        "--sampling": json.dumps(config.gconfig.new(n_samples=1).model_dump()),
        "--tool-call-parser": config.rollout.openai.tool_call_parser,
        "--hooks": [*hooks],
        "--hooks-args": [json.dumps(arguments) for arguments in hooks.values()],
    }
    return [Child(f"proxy-{k}", command("proxy", options)) for k in range(config.proxy.workers)]
