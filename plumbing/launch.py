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
may die, which is said, and the run goes on (servers.py). SGLang, which knows no --exit-with-parent, runs on a leash.
"""

import importlib.util
import json
import logging
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import httpx

from plumbing.config import ConfigError, TrainConfig

logger = logging.getLogger("nano_areal.launch")

ROOT = Path(__file__).resolve().parent.parent
PENALTIES = ("frequency_penalty", "presence_penalty")
# Of agents, too:
SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k", "stop", "stop_token_ids", "greedy", *PENALTIES)
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
    gpus: list[str]  # as CUDA_VISIBLE_DEVICES names them
    port: int = 0  # 0: any free one


@dataclass
class Child:
    name: str
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def last_words(self, lines: int = 5) -> str:
        text = self.log.read_text(errors="replace").strip().splitlines()[-lines:]
        return "\n".join([f"{self.name} ended with code {self.process.returncode}; the end of {self.log}:", *text])


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Fleet:
    """The children of this process, started by `start`, ended by `stop`."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.children: list[Child] = []
        self.stopping = False

    def __repr__(self) -> str:
        return f"Fleet({', '.join(f'{c.name} pid={c.process.pid} code={c.process.poll()}' for c in self.children)})"

    def start(self, name: str, script: str, *arguments: str, environment: dict[str, str] | None = None) -> Child:
        """Start a script of ours, which gets no GPU."""
        return self.launch(Planned(name, own_command(script, *arguments), []), environment)

    def launch(self, planned: Planned, environment: dict[str, str] | None = None) -> Child:
        """Start it and return at once; `wait_ready` waits for its first answer."""
        port = planned.port or free_port()
        log = self.log_dir / f"{planned.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(planned.gpus)}
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*planned.command, "--port", str(port)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **gpus, **(environment or {})},
            )
        child = Child(planned.name, f"http://127.0.0.1:{port}", log, process)
        self.children.append(child)
        return child

    def wait_ready(self, child: Child, seconds: float = 600.0) -> str:
        """The child's URL once it answers; ProcessDied if it ends first."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if child.process.poll() is not None:
                raise ProcessDied(child.last_words())
            try:
                # trust_env: a proxy of the environment is not for our own machine
                if httpx.get(f"{child.url}/health", timeout=5, trust_env=False).status_code == 200:
                    return child.url
            except httpx.TransportError:
                pass
            time.sleep(0.05)  # a socket that is not open yet has no event to wait for
        raise TimeoutError(f"{child.name} did not answer within {seconds:.0f} s; see {child.log}")

    def watch(self, on_death: list[Callable[[ProcessDied], None]]) -> None:
        """From now on tell of each child that ends by itself."""

        def wait_for(child: Child) -> None:
            child.process.wait()
            kill_group(child)
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
        return sum(c.process.poll() is None for c in self.children if is_server(c)) if is_server(child) else 0

    def raise_death(self, error: BaseException) -> None:
        """Raise ProcessDied from `error` if a child that is needed has ended;
        a moment is left to one that is just ending."""
        deadline = time.monotonic() + DEATH_SECONDS
        while True:
            lost = [child for child in self.children if child.process.poll() is not None and not self.others(child)]
            if lost:
                raise ProcessDied("\n".join(child.last_words() for child in lost)) from error
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)

    def stop(self) -> None:
        """End the children, last started first: close their pipe, wait, then kill. Idempotent."""
        self.stopping = True
        for child in reversed(self.children):
            assert child.process.stdin is not None
            child.process.stdin.close()
        deadline = time.monotonic() + GRACE_SECONDS
        for child in reversed(self.children):
            try:
                child.process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            kill_group(child)


def is_server(child: Child) -> bool:
    return child.name.startswith("server")


def kill_group(child: Child) -> None:
    """End what a dead child has left behind."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, signal.SIGKILL)


# ---------------------------------------------------------------- the plan


def visible_gpus() -> list[str]:
    """The GPUs of this machine that the run may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    numbers = [str(i) for i in range(torch.cuda.device_count())]
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",")[: len(numbers)] if named else numbers


def plan_servers(config: TrainConfig, gpus: list[str], ranks: int) -> list[Planned]:
    """The servers to launch beside `ranks` trainers: none where rollout.server_addrs names some. Raises ConfigError."""
    server = config.server
    if config.rollout.server_addrs:
        return []
    by_sglang = server.backend == "sglang" or (
        server.backend == "auto" and bool(gpus) and importlib.util.find_spec("sglang") is not None
    )
    wanted, spare = server.count * server.tp_size, gpus[ranks:]
    shared = len(spare) < wanted if server.colocate is None else server.colocate
    pool = gpus * server.count if shared else spare[-wanted:]  # shared: each takes the next ones, round and round
    if gpus and (server.tp_size > len(gpus) or len(pool) < wanted):
        need = f"server.count={server.count} with server.tp_size={server.tp_size}"
        remedy = "lower them, or set server.colocate=true"
        raise ConfigError(f"{need} and {ranks} trainers do not fit on {len(gpus)} GPUs: {remedy}")
    share = server.mem_fraction or (0.4 if shared else 0.85)
    command = server_command(config, by_sglang, share if gpus else None)
    names = ["server"] if server.count == 1 else [f"server-{k}" for k in range(server.count)]
    mine = [pool[k * server.tp_size : (k + 1) * server.tp_size] for k in range(server.count)]
    ports = [server.port + k if server.port else 0 for k in range(server.count)]
    return [Planned(*fields) for fields in zip(names, [command] * server.count, mine, ports)]


def own_command(script: str, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / script), *arguments, "--exit-with-parent"]


def server_command(config: TrainConfig, by_sglang: bool, mem_fraction: float | None) -> list[str]:
    """What starts a server, but for its port; server.args come last, and win."""
    server = config.server
    options: dict[str, object] = {"--model-path": config.model_path, "--weight-version": 0}
    options |= {"--max-running-requests": server.max_running_requests, "--max-total-tokens": server.max_total_tokens}
    if by_sglang:
        options |= {"--tp-size": server.tp_size, "--random-seed": config.seed}
        options |= {"--mem-fraction-static": mem_fraction} if mem_fraction else {}
    else:
        options |= {"--seed": config.seed}
    arguments = [*(str(word) for pair in options.items() for word in pair), *server.args]
    if not by_sglang:
        return own_command("tiny_server.py", *arguments)
    if not server.command:
        check_sglang()
    command = shlex.split(server.command) or [sys.executable, "-m", "sglang.launch_server"]
    return [sys.executable, str(ROOT / "plumbing" / "leash.py"), *command, *arguments]


def check_sglang() -> None:
    """ConfigError unless sglang is installed, with the torch that it was built for."""
    elsewhere = "or name one elsewhere: server.command='PYTHON -m sglang.launch_server' or rollout.server_addrs=[URL]"
    try:
        version, requires = metadata.version("sglang"), metadata.requires("sglang") or []
    except metadata.PackageNotFoundError as error:
        raise ConfigError(f"sglang is not installed here: pip install -e '.[gpu]', {elsewhere}") from error
    wanted = [match[1] for line in requires if (match := re.match(r"torch\s*\(?==\s*([\w.]+)", line))]
    torch = metadata.version("torch").partition("+")[0]
    if wanted and torch not in wanted:
        raise ConfigError(
            f"sglang {version} was built for torch {wanted[0]}, but torch {torch} is installed: "
            f"pip install torch=={wanted[0]}, {elsewhere}"
        )


def check_addresses(config: TrainConfig, planned: list[Planned]) -> None:
    """ConfigError for a server that does not answer, and for a port that is taken."""
    for url in config.rollout.server_addrs:
        try:
            httpx.get(f"{url}/model_info", timeout=10, trust_env=False)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            reason = f"{url} cannot be reached ({error}): is it up, is it right?"
            raise ConfigError(f"rollout.server_addrs: {reason}") from error
    for process in planned:
        try:
            socket.create_server(("127.0.0.1", process.port)).close()
        except (OSError, OverflowError) as error:
            raise ConfigError(f"server.port: {process.port} cannot be used ({error}); 0 takes any free port") from error


@dataclass(frozen=True)
class Memory:
    """GiB, estimated."""

    trainer: float  # of one rank
    server: float  # of one GPU of one server, or of one server on a CPU
    parameters: int


def estimate_memory(config: TrainConfig, ranks: int, on_gpus: bool) -> Memory:
    """What a rank and a server need. Of n parameters, T = actor.mb_tokens, L layers of width H, vocabulary V:

    trainer = 16 n / ranks   float32 parameter, gradient, two AdamW moments; a reference model is 4 n / ranks more
                             (with actor.offload they are in host memory)
            + 32 T L H       activations of a pass, 16 values of 2 bytes a layer and token;
                             with gradient_checkpointing 1
            + 0.5 GiB        a chunk of logits at a time (logprobs.py), forward and backward
    server  = b n / tp + 2 b K D L max_total_tokens / tp    weights, and K key-value heads of D numbers; b bytes each
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    assert config.model_path is not None
    shape = AutoConfig.from_pretrained(config.model_path)
    with torch.device("meta"):
        n = sum(p.numel() for p in AutoModelForCausalLM.from_config(shape).parameters())
    tokens, width, layers = config.actor.mb_tokens, shape.hidden_size, shape.num_hidden_layers
    kept = (16 if config.ref.path is None else 20) * n / ranks
    activations = (2 if config.actor.gradient_checkpointing else 32) * tokens * layers * width
    trainer = (0 if config.actor.offload and on_gpus else kept) + activations + 2**29
    head = getattr(shape, "head_dim", None) or width // shape.num_attention_heads
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    size = 2 if on_gpus else 4
    cache = 2 * size * heads * head * layers * config.server.max_total_tokens
    return Memory(trainer / 2**30, (size * n + cache) / config.server.tp_size / 2**30, n)


def check_memory(need: Memory, have: float, trainers: int, servers: int, where: str) -> None:
    """ConfigError where `trainers` and `servers` do not fit into `have` GiB together."""
    total = trainers * need.trainer + servers * need.server
    if total > have:
        raise ConfigError(
            f"too little memory: about {total:.0f} GiB are needed and {where} has {have:.0f} "
            f"({trainers} trainers of {need.trainer:.1f}, {servers} servers of {need.server:.1f}). "
            "Turn down, in this order: server.max_total_tokens, actor.mb_tokens, server.count; or set "
            "actor.gradient_checkpointing=true; "
            "then take more ranks (torchrun --nproc-per-node), or a smaller model"
        )


def plan_run(config: TrainConfig) -> str:
    """The plan as `--dry-run` prints it, after all that can be checked was found right. Raises ConfigError."""
    gpus, ranks = visible_gpus(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # which torchrun sets
    planned = plan_servers(config, gpus, ranks)
    check_addresses(config, planned)
    need = estimate_memory(config, int(os.environ.get("WORLD_SIZE", 1)), bool(gpus))
    if gpus:
        import torch

        size = torch.cuda.mem_get_info()[1] / 2**30
        for k, gpu in enumerate(gpus):
            check_memory(need, size, int(k < ranks), sum(gpu in p.gpus for p in planned), f"GPU {gpu}")
    else:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        check_memory(need, size, ranks, len(planned), "this machine")
    table = [("process", "GPUs", "port", "GiB", "command")]
    for k in range(ranks):
        table.append((f"rank {k}", gpus[k] if k < len(gpus) else "-", "-", f"{need.trainer:.1f}", "train.py"))
    for p in planned:
        gpu, port = ",".join(p.gpus) or "-", str(p.port or "any")
        table.append((p.name, gpu, port, f"{need.server:.1f}", shlex.join(p.command)))
    table += [("(is up)", "", "", "", url) for url in config.rollout.server_addrs]
    table.append(("proxy", "-", "any", "0.3", "proxy.py"))
    lines = ["{:10}{:8}{:10}{:>6}  {}".format(*row) for row in table]
    lines.append(f"{need.parameters:,} parameters; GiB for each rank, and for each GPU of a server, are estimates")
    return "\n".join(lines)


# ---------------------------------------------------------------- what a run starts


def start_servers(config: TrainConfig, fleet: Fleet) -> list[Child]:
    """Inference servers of our own, not waited for; none where rollout.server_addrs gives some that are up."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return [fleet.launch(planned) for planned in plan_servers(config, visible_gpus(), ranks)]


def start_proxies(config: TrainConfig, fleet: Fleet, servers: list[str]) -> tuple[tuple[str, ...], str]:
    """Addresses of the proxies that the agents speak to,
    and the key of their management endpoints, new for each run."""
    openai = config.rollout.openai
    options = {
        "--model-path": config.tokenizer_path,
        "--seed": config.gconfig.seed,
        "--sampling": json.dumps({k: v for k, v in asdict(config.gconfig).items() if k in SAMPLING}),
        "--request-timeout": config.rollout.request_timeout,
        "--session-timeout-seconds": openai.session_timeout_seconds,
        "--chat-template-type": openai.chat_template_type,
        "--tool-call-parser": openai.tool_call_parser,
        "--reasoning-parser": openai.reasoning_parser,
    }
    pairs = [*options.items(), *(("--server", url) for url in servers)]
    pairs += [("--fixed-sampling", name) for name in openai.fixed_sampling]
    arguments = [str(word) for pair in pairs if pair[1] is not None for word in pair]
    admin_key = secrets.token_urlsafe(16)
    names = [f"proxy-{k}" if k else "proxy" for k in range(config.proxy.workers)]
    environment = {"NANO_AREAL_ADMIN_KEY": admin_key}
    children = [fleet.start(name, "proxy.py", *arguments, environment=environment) for name in names]
    return tuple(map(fleet.wait_ready, children)), admin_key


def revision() -> str:
    """The commit of this checkout, or unknown."""
    found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"
