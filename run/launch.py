"""Plan, start, watch and end the server processes of a run.

**The plan.** `plan_servers` decides which inference servers to start and on which GPUs. The plan depends only on the
configuration and the GPUs. The trainer's ranks get the first GPUs and the servers get the last GPUs. Ranks and servers
share GPUs if there are too few GPUs, or if `server.colocate` is true. With 8 GPUs, 4 ranks and 2 servers of 2 GPUs
each, the ranks get GPUs 0 to 3. One server gets GPUs 4 and 5, and the other gets GPUs 6 and 7. `--dry-run` prints the
plan and starts nothing.

`plan_run` refuses a run that cannot work. The error is one line with the reason: a port is in use, a server does not
answer, the installed SGLang needs another version of torch, or the estimated memory is too large (run/memory.py).

**The processes.** train.py is the parent of the inference servers and the proxies. Each child process gets a pipe as
its standard input and ends when the pipe closes (`--exit-with-parent`). The pipe closes even after `kill -9` of the
parent, so no child stays alive. SGLang does not have this option, so SGLang runs under `leash.py`. Each child runs in
its own session, so Ctrl-C reaches only train.py, and train.py ends the children in order.

A thread waits for each child. If an inference server dies while others are running, the run logs the death and
continues with the others. If any other child dies, the run fails at once with the last lines of the child's log.
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

from run.config import ConfigError
from run.keys import ServerConfig, TrainConfig
from run.memory import GIB, describe_load, estimate_memory
from run.serve import listen, raise_open_files

logger = logging.getLogger("nano_areal.launch")

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 1800.0  # maximum time until a server's first reply; a large model may load for minutes
GRACE_SECONDS = 5.0  # time for a child to end by itself before it is killed
DEATH_SECONDS = 0.5  # a killed process closes its connections at most this long before it ends
# The environment variables of torchrun. A child with these variables would join the trainer's ranks instead of its own.
TORCHRUN = re.compile(r"TORCHELASTIC_\w+|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)")
HOLD_SECONDS = 3.0  # maximum time for a process to end; the process finishes its replies first (serve.py, 2 s)


class ProcessDied(RuntimeError):
    """A child process ended too early. The message contains the last lines of the child's log."""


@dataclass(frozen=True)
class Planned:
    """A process that `Fleet.start` will start, with `--port` added to the command."""

    name: str
    command: list[str]
    gpus: list[str] = field(default_factory=list)  # names of the process's GPUs, as in CUDA_VISIBLE_DEVICES
    port: int | None = 0  # 0: any free port; None: the process does not listen
    keys: tuple[str, ...] = ()  # secrets, one for each line of the process's standard input


@dataclass
class Child:
    """A running child process, in its own session."""

    name: str
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def last_words(self, lines: int = 5) -> str:
        """Return a message with the exit code and the last lines of the log."""
        text = self.log.read_text(errors="replace").strip().splitlines()[-lines:]
        return "\n".join([f"{self.name} ended with code {self.process.returncode}; the end of {self.log}:", *text])

    def wait_ready(self) -> str:
        """Wait until the process answers, then return its URL.

        Raises ProcessDied if the process ends before it answers, and TimeoutError after START_SECONDS.
        """
        deadline = time.monotonic() + START_SECONDS
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} did not answer within {START_SECONDS:.0f} s; see {self.log}")
            # trust_env=False ignores HTTP_PROXY: an HTTP proxy cannot reach 127.0.0.1 of this machine.
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200:
                    return self.url
            time.sleep(0.05)  # polls, because no event reports that the socket is open
        raise ProcessDied(self.last_words())

    def kill_session(self) -> None:
        """Kill the process and every process that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    """Return a port that no process uses at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


class Fleet:
    """The child processes of this process. `start` starts one child, `stop` ends all children."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.children: list[Child] = []
        self.stopping = False

    def start(self, planned: Planned) -> Child:
        """Start a process and return at once. The returned child's `wait_ready` waits until the process answers."""
        port = planned.port or free_port()
        self.log_dir.mkdir(parents=True, exist_ok=True)
        log = self.log_dir / f"{planned.name}.log"
        inherited = {name: value for name, value in os.environ.items() if not TORCHRUN.fullmatch(name)}
        ours = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ",".join(planned.gpus)}
        ours["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*planned.command, "--port", str(port)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**inherited, **ours},
            )
        os.write(process.stdin.fileno(), "".join(f"{key}\n" for key in planned.keys).encode())  # type: ignore
        self.children.append(Child(planned.name, f"http://127.0.0.1:{port}", log, process))
        return self.children[-1]

    def watch(self, on_death: list[Callable[[ProcessDied], None]]) -> None:
        """Start threads that watch the children.

        If a child that the run needs dies, the thread of this child calls every function of `on_death`.
        """

        def wait_for(child: Child) -> None:
            child.process.wait()
            child.kill_session()
            if self.stopping:
                return
            if left := self.replacements(child):
                logger.error("%s\nthe run continues with %d inference servers", child.last_words(), left)
                return
            for tell in on_death:
                tell(ProcessDied(child.last_words()))

        for child in self.children:
            threading.Thread(target=wait_for, args=(child,), name=f"watch-{child.name}", daemon=True).start()

    def replacements(self, child: Child) -> int:
        """Return how many running processes can replace `child`. Only inference servers can replace each other."""
        servers = [c for c in self.children if c.name.startswith("server")]
        return sum(c.process.poll() is None for c in servers) if child in servers else 0

    def raise_death(self, error: BaseException) -> None:
        """Raise ProcessDied if a child that the run needs has ended. The exception `error` becomes the cause."""
        time.sleep(DEATH_SECONDS)  # waits, because a dying process closes its connections before it ends
        dead = [child for child in self.children if child.process.poll() is not None]
        if lost := [child.last_words() for child in dead if not self.replacements(child)]:
            raise ProcessDied("\n".join(lost)) from error

    def stop(self) -> None:
        """End the children in the reverse order of their start: close the pipes, wait, then kill."""
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
    """Return the names of the GPUs that the run may use, as in CUDA_VISIBLE_DEVICES."""
    numbers = [str(i) for i in range(torch.cuda.device_count())]
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",")[: len(numbers)] if named else numbers


def plan_servers(config: TrainConfig, gpus: list[str], ranks: int) -> list[Planned]:
    """Return the servers to start on the GPUs `gpus`. The same machine runs `ranks` trainer processes.

    If rollout.server_addrs is set, the list is empty. Raises ConfigError if there are too few GPUs.
    """
    server = config.server
    if config.rollout.server_addrs:
        return []
    tp, spare = server.tp_size, gpus[ranks:]
    wanted = server.count * tp
    shared = len(spare) < wanted if server.colocate is None else server.colocate
    pool = gpus * server.count if shared else spare[-wanted:]  # shared GPUs: servers are spread over all GPUs
    if gpus and len(pool) < wanted:
        need = f"server.count={server.count} with server.tp_size={tp}"
        remedy = "lower them, or set server.colocate=true"
        raise ConfigError(f"{need} and {ranks} trainers do not fit on {len(gpus)} GPUs: {remedy}")
    share = server.mem_fraction or (0.6 if shared else 0.85)
    command, keys = server_command(config, share if gpus else None), (config.rollout.server_key,)
    return [
        Planned(f"server-{k}", command, pool[k * tp : (k + 1) * tp], server.port + k if server.port else 0, keys)
        for k in range(server.count)
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
        for name in ("tp_size", "mem_fraction", "command"):
            if getattr(server, name) != getattr(ServerConfig(), name):
                raise ConfigError(f"server.{name} has no effect on the small server: omit it, or use SGLang")
        return own_command("inference.tiny.server", options | {"--seed": config.seed, "--api-key": "-"}, *server.args)
    if not server.command and not config.gpus:
        check_sglang()
    command = shlex.split(server.command) or [sys.executable, "-m", "sglang.launch_server"]
    options |= {"--tp-size": server.tp_size, "--random-seed": config.seed, "--mem-fraction-static": mem_fraction}
    return [sys.executable, str(ROOT / "run" / "leash.py"), "--api-key", *command, *words(options), *server.args]


def own_command(module: str, options: dict[str, object], *arguments: str) -> list[str]:
    """Return the command that starts a server of this project (a Python module), without the port."""
    return [sys.executable, "-P", "-m", module, *words(options), *arguments, "--exit-with-parent"]


def words(options: dict[str, object]) -> list[str]:
    """Turn options into the words of a command line.

    An option with the value None is left out. An option with a list is repeated for each item.
    """
    several = {name: value if isinstance(value, list) else [value] for name, value in options.items()}
    return [str(word) for name, values in several.items() for v in values if v is not None for word in (name, v)]


def check_sglang() -> None:
    """Raise ConfigError if sglang is missing, or if sglang needs a version of torch that is not installed."""
    elsewhere = "or use SGLang elsewhere: server.command='PYTHON -m sglang.launch_server' or rollout.server_addrs=[URL]"
    try:
        version, requires = metadata.version("sglang"), metadata.requires("sglang") or []
    except metadata.PackageNotFoundError as error:
        raise ConfigError(f"sglang is not installed here: pip install -e '.[gpu]', {elsewhere}") from error
    wanted = [match[1] for line in requires if (match := re.match(r"torch\s*\(?==\s*([\w.]+)", line))]
    here = metadata.version("torch").partition("+")[0]
    if wanted and here not in wanted:
        remedy = f"pip install torch=={wanted[0]}, {elsewhere}"
        raise ConfigError(f"sglang {version} was built for torch {wanted[0]}, but torch {here} is installed: {remedy}")


def check_addresses(config: TrainConfig, planned: list[Planned]) -> None:
    """Raise ConfigError if a planned port is in use or if an address in rollout.server_addrs does not answer.

    An inference server answers GET /model_info. A router answers GET /workers.
    """
    for url in config.rollout.server_addrs:
        try:
            if not config.rollout.server_key and httpx.URL(url).host not in ("127.0.0.1", "::1", "localhost"):
                raise ConfigError(f"rollout.server_addrs: {url} is not this machine: set rollout.server_key")
            urls = [url.rstrip("/") + path for path in ("/model_info", "/workers")]
            headers = {"authorization": f"Bearer {config.rollout.server_key or 'none'}"}
            status = [httpx.get(each, headers=headers, timeout=10, trust_env=False).status_code for each in urls]
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise ConfigError(f"rollout.server_addrs: {url} cannot be reached ({error}); is it running?") from error
        if 200 not in status:
            raise ConfigError(
                f"rollout.server_addrs: {url} is no inference server of this key: it answered {status[0]}"
            )
    for process in planned:
        try:
            listen("127.0.0.1", process.port or 0).close()
        except OSError as error:
            raise ConfigError(f"server.port: {process.port} cannot be used ({error}); 0 takes any free port") from error


def check_open_files(config: TrainConfig, limit: int) -> None:
    """Raise ConfigError if a process may need more than `limit` open files. Each connection is an open file.

    The proxy has two connections for a call of an agent, one to the agent and one to an inference server. The trainer
    has two connections for an episode: one for the agent, and one to start and end the agent's session.
    """
    episodes = (config.rollout.max_concurrent_rollouts or 1) * config.gconfig.n_samples
    if (needed := 2 * episodes + 256) > limit:
        remedy = "raise it (ulimit -Hn), or lower rollout.max_concurrent_rollouts or gconfig.n_samples"
        raise ConfigError(f"{episodes} running episodes need {needed} open files, but the limit is {limit}: {remedy}")


def check_update_mode(config: TrainConfig, planned: list[Planned], gpus: list[str]) -> None:
    """Raise ConfigError if weight_update.mode cannot work on these GPUs. Rank 0 sends the weights from the first GPU.

    In mode distributed NCCL refuses two processes on one GPU, and all processes need the same version of NCCL. In mode
    tensor a server reads the weights from the memory of rank 0's GPU. The small server computes on the CPU, so it has
    none of these limits.
    """
    mode = config.weight_update.mode
    on_gpus = [p for p in planned if p.gpus and "inference.tiny.server" not in p.command]
    used = [*gpus[:1], *(gpu for p in on_gpus for gpu in p.gpus)]
    away = [p.name for p in on_gpus if gpus[0] not in p.gpus]
    is_shared = len(set(used)) < len(used)
    if mode == "distributed" and is_shared:
        remedy = f"set weight_update.mode={'disk' if away else 'tensor'}, or server.colocate=false"
        raise ConfigError(f"weight_update.mode=distributed: NCCL refuses GPUs that two processes share: {remedy}")
    if mode == "tensor" and away:
        remedy = f"set weight_update.mode={'disk' if is_shared else 'distributed'}"
        raise ConfigError(f"weight_update.mode=tensor: {away[0]} does not use GPU {gpus[0]}, as rank 0 does: {remedy}")
    if mode == "distributed" and on_gpus and config.server.command:
        show = [shlex.split(config.server.command)[0], "-c", "import torch; print(torch.cuda.nccl.version())"]
        theirs = subprocess.run(show, capture_output=True, text=True).stdout.strip()
        if theirs.startswith("(") and theirs != str(ours := torch.cuda.nccl.version()):
            remedy = f"install the torch of {show[0]} here, or set weight_update.mode=disk"
            raise ConfigError(f"weight_update.mode=distributed: NCCL {ours} here, {theirs} in the server: {remedy}")


def check_memory(needs: list[tuple[Planned, float]], gpus: list[str], have: float) -> None:
    """Raise ConfigError if the processes of one GPU together need more than `have` GiB.

    `needs` lists each process with the GiB that it needs. Without GPUs, `have` is the memory of the machine, and all
    processes share this memory.
    """
    for gpu in gpus or [""]:
        here = {planned.name: gib for planned, gib in needs if gpu in planned.gpus or not gpus}
        if sum(here.values()) > have:
            each = ", ".join(f"{name} {gib:.1f}" for name, gib in here.items())
            raise ConfigError(
                f"too little memory: about {sum(here.values()):.0f} GiB are needed ({each}) and "
                f"{f'GPU {gpu}' if gpus else 'this machine'} has {have:.0f}. Lower server.max_total_tokens, actor.mb_tokens "
                "or server.count, set actor.gradient_checkpointing=true, raise --nproc-per-node, or take a smaller model"
            )


def plan_run(config: TrainConfig) -> tuple[list[Planned], str]:
    """Check the whole plan, then return the servers to start and the text that `--dry-run` prints.

    Raises ConfigError for a run that cannot work.
    """
    gpus, ranks = visible_gpus(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun sets LOCAL_WORLD_SIZE
    machine = (torch.cuda.mem_get_info()[1] if gpus else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / GIB
    if config.gpus:  # plan as if this machine had these GPUs
        gpus, machine = [str(k) for k in range(config.gpus)], config.gpu_memory
    servers = plan_servers(config, gpus, ranks)
    check_open_files(config, raise_open_files())
    check_addresses(config, servers)
    check_update_mode(config, servers, gpus)
    trainer, server, parameters = estimate_memory(config, int(os.environ.get("WORLD_SIZE", 1)), bool(gpus))
    needs = [(Planned(f"rank {k}", ["train.py"], gpus[k : k + 1], port=None), trainer) for k in range(ranks)]
    needs += [(planned, server) for planned in servers]
    needs += [(Planned(f"proxy-{k}", ["proxy.py"]), 0.3) for k in range(config.proxy.workers)]
    check_memory(needs, gpus, machine)
    rows = [("process", "GPUs", "port", "GiB", "command")]
    for p, gib in needs:
        port = {0: "any", None: "-"}.get(p.port, str(p.port))
        rows.append((p.name, ",".join(p.gpus) or "-", port, f"{gib:.1f}", shlex.join(p.command)))
    rows += [("(is up)", "", "", "", url) for url in config.rollout.server_addrs]
    lines = ["{:10}{:8}{:10}{:>6}  {}".format(*row) for row in rows]
    lines.append(f"{parameters:,} parameters; GiB for each rank, and for each GPU of a server, are estimates")
    lines.append(describe_load(config, parameters))
    return servers, "\n".join(lines)


def revision() -> str:
    """Return the git commit of this checkout, or "unknown"."""
    found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"
