"""The processes of a run: planned, started, watched, ended. No concept of its own.

**The plan** (`plan_servers`) is a pure function of configuration and GPUs; `--dry-run` prints it and starts nothing.
The trainer's ranks have the first GPUs, the servers the last; where there are too few for both, or by
`server.colocate`, they share. Whatever can be seen to fail is refused before anything starts, in one line: a port
that is taken, a server that does not answer, an SGLang that was built for another torch, too little memory. The
memory is an estimate; its formulas stand in `estimate_memory`.

**The processes.** train.py is the parent. Its children (inference server, proxy) get a pipe as standard input and end
when it closes (`--exit-with-parent`), so that not even `kill -9` of the parent leaves one behind. They live in sessions
of their own: Ctrl-C reaches train.py alone, which ends them in order. A child that dies is noticed by a thread that
waits for it, and the run fails with the end of the child's log instead of hanging on a request; of several servers one
may die, which is said, and the run goes on (inference/servers.py). SGLang, which knows no --exit-with-parent, runs on
a leash.
"""

import importlib.util
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import httpx
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from run.config import ConfigError, TrainConfig
from run.serve import listen

logger = logging.getLogger("nano_areal.launch")

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
START_SECONDS = 1800.0  # in which a server has to answer first; a large model may take minutes
GRACE_SECONDS = 5.0  # what a child gets to end by itself before it is killed
DEATH_SECONDS = 0.5  # between the end of a killed process's connections and its own
HOLD_SECONDS = 3.0  # the same where it ends by a signal, and first finishes what it answers (serve.py: 2 s)


class ProcessDied(RuntimeError):
    """A child ended that should not have; the message holds the end of its log."""


@dataclass(frozen=True)
class Planned:
    """A process before it is started. `--port` is added to its command."""

    name: str
    command: list[str]
    gpus: list[str] = field(default_factory=list)  # as CUDA_VISIBLE_DEVICES names them
    port: int | None = 0  # 0: any free one; None: it listens on none
    environment: dict[str, str] = field(default_factory=dict)  # beside ours


@dataclass
class Child:
    """A process of ours, in a session of its own."""

    name: str
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def last_words(self, lines: int = 5) -> str:
        text = self.log.read_text(errors="replace").strip().splitlines()[-lines:]
        return "\n".join([f"{self.name} ended with code {self.process.returncode}; the end of {self.log}:", *text])

    def wait_ready(self) -> str:
        """Its URL once it answers. ProcessDied if it ends first, TimeoutError if it does neither."""
        deadline = time.monotonic() + START_SECONDS
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} did not answer within {START_SECONDS:.0f} s; see {self.log}")
            # trust_env: a proxy of the environment is not for our own machine
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200:
                    return self.url
            time.sleep(0.05)  # a socket that is not open yet has no event to wait for
        raise ProcessDied(self.last_words())

    def kill_session(self) -> None:
        """End it, and what it leaves behind."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


class Fleet:
    """The children of this process, started by `start`, ended by `stop`."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.children: list[Child] = []
        self.stopping = False

    def start(self, planned: Planned) -> Child:
        """Start it and return at once; the child's `wait_ready` waits for its first answer."""
        port = planned.port or free_port()
        self.log_dir.mkdir(parents=True, exist_ok=True)
        log = self.log_dir / f"{planned.name}.log"
        ours = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ",".join(planned.gpus)}
        ours["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*planned.command, "--port", str(port)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **ours, **planned.environment},
            )
        self.children.append(Child(planned.name, f"http://127.0.0.1:{port}", log, process))
        return self.children[-1]

    def watch(self, on_death: list[Callable[[ProcessDied], None]]) -> None:
        """From now on tell of each child that ends by itself."""

        def wait_for(child: Child) -> None:
            child.process.wait()
            child.kill_session()
            if self.stopping:
                return
            if left := self.others(child):
                logger.error("%s\nthe run goes on with %d inference servers", child.last_words(), left)
                return
            for tell in on_death:
                tell(ProcessDied(child.last_words()))

        for child in self.children:
            threading.Thread(target=wait_for, args=(child,), name=f"watch-{child.name}", daemon=True).start()

    def others(self, child: Child) -> int:
        """How many are left to do the work of one that died: of several servers one may."""
        servers = [c for c in self.children if c.name.startswith("server")]
        return sum(c.process.poll() is None for c in servers) if child in servers else 0

    def raise_death(self, error: BaseException) -> None:
        """Raise ProcessDied from `error` if a child that is needed has ended."""
        time.sleep(DEATH_SECONDS)  # for one that is just ending
        dead = [child for child in self.children if child.process.poll() is not None]
        if lost := [child.last_words() for child in dead if not self.others(child)]:
            raise ProcessDied("\n".join(lost)) from error

    def stop(self) -> None:
        """End the children, last started first: close their pipe, wait, then kill. Idempotent."""
        self.stopping = True
        for child in reversed(self.children):
            assert child.process.stdin is not None
            child.process.stdin.close()
        deadline = time.monotonic() + GRACE_SECONDS
        for child in reversed(self.children):
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(timeout=max(0.0, deadline - time.monotonic()))
            child.kill_session()


# ---------------------------------------------------------------- the plan


def visible_gpus() -> list[str]:
    """The GPUs of this machine that the run may use, as CUDA_VISIBLE_DEVICES names them."""
    numbers = [str(i) for i in range(torch.cuda.device_count())]
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",")[: len(numbers)] if named else numbers


def plan_servers(config: TrainConfig, gpus: list[str], ranks: int) -> list[Planned]:
    """The servers to launch beside `ranks` trainers: none where rollout.server_addrs names some. Raises ConfigError."""
    server = config.server
    if config.rollout.server_addrs:
        return []
    wanted, spare = server.count * server.tp_size, gpus[ranks:]
    shared = len(spare) < wanted if server.colocate is None else server.colocate
    pool = gpus * server.count if shared else spare[-wanted:]  # shared: each takes the next ones, round and round
    if gpus and len(pool) < wanted:
        need = f"server.count={server.count} with server.tp_size={server.tp_size}"
        remedy = "lower them, or set server.colocate=true"
        raise ConfigError(f"{need} and {ranks} trainers do not fit on {len(gpus)} GPUs: {remedy}")
    share = server.mem_fraction or (0.4 if shared else 0.85)
    command = server_command(config, share if gpus else None)
    return [
        Planned(
            name=f"server-{k}",
            command=command,
            gpus=pool[k * server.tp_size : (k + 1) * server.tp_size],
            port=server.port + k if server.port else 0,
        )
        for k in range(server.count)
    ]


def server_command(config: TrainConfig, mem_fraction: float | None) -> list[str]:
    """What starts a server, but for its port, on GPUs with a share of their memory; server.args come last, and win."""
    server = config.server
    options: dict[str, object] = {
        "--model-path": config.model_path,
        "--weight-version": 0,
        "--max-running-requests": server.max_running_requests,
        "--max-total-tokens": server.max_total_tokens,
    }
    installed = importlib.util.find_spec("sglang") is not None
    if server.backend == "tiny" or (server.backend == "auto" and not (mem_fraction and installed)):
        return own_command("inference.tiny.server", options | {"--seed": config.seed}, *server.args)
    if not server.command:
        check_sglang()
    command = shlex.split(server.command) or [sys.executable, "-m", "sglang.launch_server"]
    options |= {"--tp-size": server.tp_size, "--random-seed": config.seed, "--mem-fraction-static": mem_fraction}
    return [sys.executable, str(ROOT / "run" / "leash.py"), *command, *words(options), *server.args]


def own_command(module: str, options: dict[str, object], *arguments: str) -> list[str]:
    """The command that starts a server of ours, without its port. `Fleet.start` tells it where our modules are."""
    return [sys.executable, "-P", "-m", module, *words(options), *arguments, "--exit-with-parent"]


def words(options: dict[str, object]) -> list[str]:
    """Options as a command line has them: one that is None is left out, one that is a list is repeated."""
    several = {name: value if isinstance(value, list) else [value] for name, value in options.items()}
    return [str(word) for name, values in several.items() for v in values if v is not None for word in (name, v)]


def check_sglang() -> None:
    """ConfigError unless sglang is installed, with the torch that it was built for."""
    elsewhere = "or name one elsewhere: server.command='PYTHON -m sglang.launch_server' or rollout.server_addrs=[URL]"
    try:
        version, requires = metadata.version("sglang"), metadata.requires("sglang") or []
    except metadata.PackageNotFoundError as error:
        raise ConfigError(f"sglang is not installed here: pip install -e '.[gpu]', {elsewhere}") from error
    wanted = [match[1] for line in requires if (match := re.match(r"torch\s*\(?==\s*([\w.]+)", line))]
    here = metadata.version("torch").partition("+")[0]
    if wanted and here not in wanted:
        raise ConfigError(
            f"sglang {version} was built for torch {wanted[0]}, but torch {here} is installed: "
            f"pip install torch=={wanted[0]}, {elsewhere}"
        )


def check_addresses(config: TrainConfig, planned: list[Planned]) -> None:
    """ConfigError for a server that does not answer as an inference server or a router does, and for a port that is
    taken."""
    for url in config.rollout.server_addrs:
        try:
            urls = [url.rstrip("/") + path for path in ("/model_info", "/workers")]
            status = [httpx.get(each, timeout=10, trust_env=False).status_code for each in urls]
        except (httpx.TransportError, httpx.InvalidURL) as error:
            reason = f"{url} cannot be reached ({error}): is it up, is it right?"
            raise ConfigError(f"rollout.server_addrs: {reason}") from error
        if 200 not in status:
            raise ConfigError(f"rollout.server_addrs: {url} is no inference server: it answered {status[0]}")
    for process in planned:
        try:
            listen("127.0.0.1", process.port or 0).close()
        except OSError as error:
            raise ConfigError(f"server.port: {process.port} cannot be used ({error}); 0 takes any free port") from error


def estimate_memory(config: TrainConfig, ranks: int, on_gpus: bool) -> tuple[float, float, int]:
    """What a rank needs and what a server needs on each of its GPUs (GiB), and the number of parameters n.

    With T = actor.mb_tokens, L layers of width H, vocabulary V:

    trainer = 16 n / ranks   float32 parameter, gradient, two AdamW moments; a reference model is 4 n / ranks more
                             (with actor.offload they are in host memory)
            + 32 T L H       activations of a pass, 16 values of 2 bytes a layer and token;
                             with gradient_checkpointing 1
            + 0.5 GiB        a chunk of logits at a time (training/logprobs.py), forward and backward
    server  = b n / tp + 2 b K D L max_total_tokens / tp    weights, and K key-value heads of D numbers; b bytes each
    """
    assert config.model_path is not None
    shape = AutoConfig.from_pretrained(config.model_path)
    with torch.device("meta"):
        n = sum(p.numel() for p in AutoModelForCausalLM.from_config(shape).parameters())
    tokens, width, layers = config.actor.mb_tokens, shape.hidden_size, shape.num_hidden_layers
    kept = (16 if config.ref.path is None else 20) * n / ranks
    activations = (2 if config.actor.gradient_checkpointing else 32) * tokens * layers * width
    trainer = (0 if config.actor.offload and on_gpus else kept) + activations + GIB / 2
    head = getattr(shape, "head_dim", None) or width // shape.num_attention_heads
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    size = 2 if on_gpus else 4
    cache = 2 * size * heads * head * layers * config.server.max_total_tokens
    return trainer / GIB, (size * n + cache) / config.server.tp_size / GIB, n


def check_memory(needs: list[tuple[Planned, float]], gpus: list[str], have: float) -> None:
    """ConfigError where processes that need so many GiB do not fit together on a GPU, or without GPUs in the machine,
    of `have` GiB."""
    for gpu in gpus or [""]:
        here = {planned.name: gib for planned, gib in needs if gpu in planned.gpus or not gpus}
        if sum(here.values()) > have:
            each = ", ".join(f"{name} {gib:.1f}" for name, gib in here.items())
            raise ConfigError(
                f"too little memory: about {sum(here.values()):.0f} GiB are needed ({each}) and "
                f"{f'GPU {gpu}' if gpus else 'this machine'} has {have:.0f}. Turn down, in this order: "
                "server.max_total_tokens, actor.mb_tokens, server.count; or set actor.gradient_checkpointing=true; "
                "then take more ranks (torchrun --nproc-per-node), or a smaller model"
            )


def plan_run(config: TrainConfig) -> tuple[list[Planned], str]:
    """The servers to launch, and the plan as `--dry-run` prints it, after all that can be checked was found right.
    Raises ConfigError."""
    gpus, ranks = visible_gpus(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # which torchrun sets
    servers = plan_servers(config, gpus, ranks)
    check_addresses(config, servers)
    trainer, server, parameters = estimate_memory(config, int(os.environ.get("WORLD_SIZE", 1)), bool(gpus))
    needs = [(Planned(f"rank {k}", ["train.py"], gpus[k : k + 1], port=None), trainer) for k in range(ranks)]
    needs += [(planned, server) for planned in servers]
    needs += [(Planned(f"proxy-{k}", ["proxy.py"]), 0.3) for k in range(config.proxy.workers)]
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    check_memory(needs, gpus, (torch.cuda.mem_get_info()[1] if gpus else machine) / GIB)
    rows = [("process", "GPUs", "port", "GiB", "command")]
    for p, gib in needs:
        port = {0: "any", None: "-"}.get(p.port, str(p.port))
        rows.append((p.name, ",".join(p.gpus) or "-", port, f"{gib:.1f}", shlex.join(p.command)))
    rows += [("(is up)", "", "", "", url) for url in config.rollout.server_addrs]
    lines = ["{:10}{:8}{:10}{:>6}  {}".format(*row) for row in rows]
    lines.append(f"{parameters:,} parameters; GiB for each rank, and for each GPU of a server, are estimates")
    return servers, "\n".join(lines)


def revision() -> str:
    """The commit of this checkout, or unknown."""
    found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"
