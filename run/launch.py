"""Start, watch and end the child processes of a run: the inference servers and the proxies.

train.py is the parent of the inference servers and the proxies. Each child process gets a pipe as its standard input
and ends when the pipe closes (`--exit-with-parent`). The pipes to the children close even after `kill -9` of train.py,
so every child ends. SGLang has no option `--exit-with-parent`, so SGLang runs under `leash.py`. Each child runs in a
process session of its own (setsid), so Ctrl-C reaches only train.py, and train.py ends the children in order.

For each child, one thread waits until the child ends. If an inference server dies during training, the server's thread
restarts the server on its old port, at most server.max_restarts times. The restarted server reports the version
"0-incomplete", so every engine refuses the server's tokens until the trainer has pushed the current weights. After
server.max_restarts restarts, a dead server is not started again, and the run continues with the other servers. If no
server is left, or if a proxy dies, the run fails at once and prints the last lines of the child's log.

run/plan.py decides which servers to start.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from inference.serve import free_port
from run.early import ROOT, environment, spawn, take

logger = logging.getLogger("pocket_areal.launch")

START_SECONDS = (
    1800.0  # maximum time until a server's first reply; loading a large model may take minutes
)
GRACE_SECONDS = 5.0  # time for a child to end by itself before it is killed
DEATH_SECONDS = 0.5  # a killed process ends within this time after its connections have closed
# The executor waits HOLD_SECONDS before it counts an episode as failed (rollout/executor.py). If the death of a server
# or a proxy stops the run within HOLD_SECONDS, the failed episodes are not counted. A server or a proxy ends within 2 s
# after a signal (serve.py), so HOLD_SECONDS is longer than 2 s.
HOLD_SECONDS = 3.0


class ProcessDied(RuntimeError):
    """A child process ended although the run still needed it. The message contains the last lines of the child's
    log."""


OnDeath = Callable[[ProcessDied], None]


@dataclass(frozen=True)
class Planned:
    """The plan of a process that `Fleet.start` can start. `Fleet.start` adds `--port` to the command."""

    name: str
    command: list[str]
    gpus: list[str] = field(
        default_factory=list
    )  # names of the process's GPUs, as in CUDA_VISIBLE_DEVICES
    port: int | None = 0  # 0: any free port; None: the process does not listen
    keys: tuple[
        str, ...
    ] = ()  # keys that the process reads from its standard input, one in each line
    variables: dict[str, str] = field(
        default_factory=dict
    )  # environment variables that only this process gets
    restarts: int = 0  # number of times that the process has been restarted so far


@dataclass
class Child:
    """A running child process, in a process session of its own."""

    name: str
    url: str
    log: Path
    process: subprocess.Popen[bytes]
    planned: Planned

    def send_keys(self, keys: tuple[str, ...]) -> None:
        """Write the keys to the standard input of the process, one in each line."""
        with suppress(
            BrokenPipeError
        ):  # if the process has ended, the pipe is broken; `wait_ready` raises ProcessDied
            os.write(self.process.stdin.fileno(), "".join(f"{key}\n" for key in keys).encode())  # type: ignore[union-attr]

    def last_words(self, lines: int = 5) -> str:
        """Return a message with the exit code and the last lines of the log."""
        text = self.log.read_text(errors="replace").strip().splitlines()[-lines:]
        return "\n".join(
            [
                f"{self.name} ended with code {self.process.returncode}; the end of {self.log}:",
                *text,
            ]
        )

    def wait_ready(self) -> str:
        """Wait until the process answers, then return its URL.

        Raises ProcessDied if the process ends before it answers, and TimeoutError after START_SECONDS.
        """
        deadline = time.monotonic() + START_SECONDS
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{self.name} did not answer within {START_SECONDS:.0f} s; see {self.log}"
                )
            # trust_env=False ignores HTTP_PROXY: an HTTP proxy cannot reach 127.0.0.1 of this machine.
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200:
                    return self.url
            time.sleep(
                0.05
            )  # a process does not report that its socket is open, so `wait_ready` polls
        raise ProcessDied(self.last_words())

    def kill_session(self) -> None:
        """Kill the process and every process that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Fleet:
    """Starts, watches and ends child processes. `start` starts one child, and `close` ends all children."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.children: list[Child] = []
        self.watchers: list[threading.Thread] = []
        self.stopping = False
        self.lock = (
            threading.Lock()
        )  # `restart` holds the lock during a start, so that `close` misses no process

    def start(self, planned: Planned) -> Child:
        """Start a process and return at once. The returned child's `wait_ready` waits until the process answers."""
        port = planned.port or free_port()
        self.log_dir.mkdir(parents=True, exist_ok=True)
        log = (
            self.log_dir
            / f"{planned.name}{f'-restart{planned.restarts}' if planned.restarts else ''}.log"
        )
        command = [*planned.command, "--port", str(port)]
        with log.open("wb") as out:
            early = None if planned.gpus or planned.variables else take(command, log)
            process = early or spawn(command, out, environment(planned.gpus) | planned.variables)
        self.children.append(Child(planned.name, f"http://127.0.0.1:{port}", log, process, planned))
        self.children[-1].send_keys(planned.keys)
        return self.children[-1]

    def watch(
        self, on_death: list[OnDeath], max_restarts: int, on_restart: Callable[[], None]
    ) -> None:
        """For each child, start a thread that waits until the child ends. If an inference server dies, the server's
        thread restarts it, at most `max_restarts` times.

        When a restarted server answers for the first time, the server's thread calls `on_restart`. After the death of a
        child that the run needs, the child's thread calls every function in `on_death`.
        """

        def wait_for(child: Child) -> None:
            child.process.wait()
            child.kill_session()
            while (planned := plan_restart(child, max_restarts)) and (
                again := self.restart(child, planned)
            ):
                with suppress(ProcessDied, TimeoutError):
                    again.wait_ready()
                    on_restart()
                    again.process.wait()
                (child := again).kill_session()
            if self.stopping:
                return
            if left := self.replacements(child):
                logger.error(
                    "%s\nthe run continues with %d inference servers", child.last_words(), left
                )
                return
            for tell in on_death:
                tell(ProcessDied(child.last_words()))

        self.watchers = [
            threading.Thread(target=wait_for, args=(child,), daemon=True) for child in self.children
        ]
        for watcher in self.watchers:
            watcher.start()

    def restart(self, child: Child, planned: Planned) -> Child | None:
        """Start `planned` in place of `child`, which has died. Return None if the run is ending."""
        with self.lock:
            if self.stopping:
                return None
            logger.error("%s\n%s is started again", child.last_words(), child.name)
            again = self.start(planned)
            self.children.remove(child)
            child.process.stdin.close()  # type: ignore[union-attr]
            return again

    def replacements(self, child: Child) -> int:
        """Return how many running processes can replace `child`. Only inference servers can replace each other."""
        servers = [c for c in self.children if c.name.startswith("server")]
        return sum(c.process.poll() is None for c in servers) if child in servers else 0

    def raise_death(self, error: BaseException) -> None:
        """Raise ProcessDied if the run needs a child that has ended. `error` becomes the `__cause__` of the
        ProcessDied."""
        # A killed process closes its connections at most DEATH_SECONDS before it ends, so after the wait every killed
        # process has ended.
        time.sleep(DEATH_SECONDS)
        dead = [child for child in self.children if child.process.poll() is not None]
        if lost := [child.last_words() for child in dead if not self.replacements(child)]:
            raise ProcessDied("\n".join(lost)) from error

    def close(self) -> None:
        """End the children in the reverse order of their start: close the pipes, wait, then kill. Then end the threads
        that watch the children."""
        with self.lock:
            self.stopping = True
        for child in reversed(self.children):
            assert child.process.stdin is not None
            child.process.stdin.close()
        deadline = time.monotonic() + GRACE_SECONDS
        for child in reversed(self.children):
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(timeout=max(0.0, deadline - time.monotonic()))
            child.kill_session()
        for watcher in self.watchers:
            watcher.join()


def plan_restart(child: Child, max_restarts: int) -> Planned | None:
    """Return the process to start in place of a child that has ended, or None if the child must not be restarted. Only
    inference servers are restarted, at most `max_restarts` times.

    The new process listens on the child's port, so that clients need no new address. Until the trainer has pushed the
    current weights, the new process reports a version label that is not a number. If a server's version label is not a
    number, every engine discards the server's tokens.
    """
    planned = child.planned
    if not child.name.startswith("server") or planned.restarts >= max_restarts:
        return None
    command, port = (
        [*planned.command, "--weight-version", "0-incomplete"],
        int(child.url.rpartition(":")[2]),
    )
    return replace(planned, command=command, port=port, restarts=planned.restarts + 1)


def own_command(module: str, options: dict[str, object], *arguments: str) -> list[str]:
    """Return the command that starts a server of this project (a Python module), without the port."""
    return [sys.executable, "-P", "-m", module, *words(options), *arguments, "--exit-with-parent"]


def words(options: dict[str, object]) -> list[str]:
    """Turn options into the words of a command line.

    An option with the value None is left out. If the value of an option is a list, the option is repeated for each item
    of the list.
    """
    several = {
        name: value if isinstance(value, list) else [value] for name, value in options.items()
    }
    return [
        str(word)
        for name, values in several.items()
        for v in values
        if v is not None
        for word in (name, v)
    ]


def revision() -> str:
    """Return the git commit of this checkout, or "unknown"."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"
