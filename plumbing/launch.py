"""The processes of a run: started, watched, ended. No concept of its own.

train.py is the parent. Its children (inference server, proxy) get a pipe as standard input and end when it closes
(`--exit-with-parent`), so that not even `kill -9` of the parent leaves one behind. They live in sessions of their
own: Ctrl-C reaches train.py alone, which ends them in order. A child that dies is noticed by a thread that waits
for it, and the run fails with the end of the child's log instead of hanging on a request.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from plumbing.config import ConfigError, TrainConfig

ROOT = Path(__file__).resolve().parent.parent
PENALTIES = ("frequency_penalty", "presence_penalty")
SAMPLING = ("temperature", "top_p", "top_k", "stop", "stop_token_ids", "greedy", *PENALTIES)  # of agents, too
GRACE_SECONDS = 5.0  # what a child gets to end by itself before it is killed


class ProcessDied(RuntimeError):
    """A child ended that should not have; the message holds the end of its log."""


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
        """Run `python script arguments --port P` and return at once; `wait_ready` waits for its first answer."""
        port = free_port()
        log = self.log_dir / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, str(ROOT / script), *arguments, "--port", str(port), "--exit-with-parent"],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(environment or {})},
            )
        child = Child(name, f"http://127.0.0.1:{port}", log, process)
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
            if not self.stopping:
                for tell in on_death:
                    tell(ProcessDied(child.last_words()))

        for child in self.children:
            threading.Thread(target=wait_for, args=(child,), name=f"watch-{child.name}", daemon=True).start()

    def raise_death(self, error: Exception) -> None:
        """Raise ProcessDied from `error` if a child has ended; a moment is left to one that is just ending."""
        for child in self.children:
            try:
                child.process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                continue
            raise ProcessDied(child.last_words()) from error

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


def start_server(config: TrainConfig, fleet: Fleet) -> Child | None:
    """An inference server of our own, not waited for; None where rollout.server_addrs gives some that are up."""
    if config.rollout.server_addrs:
        return None
    if config.server.backend == "sglang":
        raise ConfigError("server.backend=sglang: start SGLang yourself for now and give rollout.server_addrs=[URL]")
    assert config.model_path is not None
    options = {
        "--model-path": config.model_path,
        "--weight-version": "0",
        "--max-running-requests": config.server.max_running_requests,
        "--max-total-tokens": config.server.max_total_tokens,
        "--seed": config.seed,
    }
    arguments = [str(word) for pair in options.items() for word in pair]
    return fleet.start("server", "tiny_server.py", *arguments)


def start_proxies(config: TrainConfig, fleet: Fleet, servers: list[str]) -> tuple[tuple[str, ...], str]:
    """Addresses of the proxies that the agents speak to, and the key of their management endpoints, new for each run."""
    openai = config.rollout.openai
    options = {
        "--model-path": config.tokenizer_path,
        "--seed": config.gconfig.seed,
        "--sampling": json.dumps({k: v for k, v in asdict(config.gconfig).items() if k in SAMPLING}),
        "--request-timeout": config.rollout.request_timeout,
        "--session-timeout-seconds": openai.session_timeout_seconds,
        "--max-new-tokens": config.gconfig.max_new_tokens,
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
