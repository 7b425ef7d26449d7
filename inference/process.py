"""Start, watch and end child processes, which end when this process does.

Each child runs in a Unix session of its own, so Ctrl-C reaches only train.py, which then ends the
children. Every half second, a child checks that its parent still runs. So a child ends even if
`kill -9` ended the parent. A child could instead wait until a pipe from its parent closes, but
processes that an agent forks would keep the pipe open.

SGLang has no option to end with its parent, so `python -m inference.process COMMAND ...` starts
SGLang. When this program's parent has ended or SIGTERM arrives, the program sends SIGTERM to the
command. When the command has ended, at the latest after three seconds, the program's whole process
group gets SIGKILL. So nothing else may be in this group, and the program needs a session of its
own.
"""

import os
import re
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Variables that a child does not inherit. With torchrun's variables, a child would act as a rank of
# the trainer. PYTORCH_ALLOC_CONF may ask for expandable segments, which SGLang's memory pools
# refuse.
DROPPED = re.compile(
    r"TORCHELASTIC_\w+|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|PYTORCH_(CUDA_)?ALLOC_CONF|TORCH_DIST_USE_NCCL2"
)

_given = set[int]()  # ports that free_port has returned


def free_port() -> int:
    """Return a free port. No port is returned twice, because a port still looks free until its
    process binds it. The ports are from 20000 to 31999, which outgoing connections do not use."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            if port not in _given:
                _given.add(port)
                return port


def raise_open_files() -> None:
    """Raise the limit of open files. The usual limit of 1,024 is too low for 1,000 requests in
    flight, because the proxy needs two connections for each request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2**16)), hard))


def follow_parent(act: Callable[[], None], parent: int = 0, daemon: bool = True) -> None:
    # The trainer passes its pid, because getppid returns another pid if the trainer has died.
    parent = parent or int(os.environ.get("POCKET_AREAL_PARENT", os.getppid()))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        act()

    threading.Thread(target=watch, daemon=daemon).start()


def visible_gpus() -> list[str]:
    """The GPUs that the run may use, as in CUDA_VISIBLE_DEVICES."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [gpu for gpu in named.split(",") if gpu not in ("", "-1")]
    try:
        words = "nvidia-smi", "--query-gpu=index", "--format=csv,noheader"
        return subprocess.check_output(words, stderr=subprocess.DEVNULL, text=True).split()
    except (OSError, subprocess.CalledProcessError):
        return []


def has_bfloat16() -> bool:
    info = Path("/proc/cpuinfo")  # only Linux has it
    return (info.exists() and "bf16" in info.read_text()) or bool(visible_gpus())


def bypass() -> dict[str, str]:
    """Return environment variables that keep requests to this machine away from an HTTP proxy."""
    hosts = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    if hosts != "*" and "127.0.0.1" not in hosts:
        hosts += ",127.0.0.1,localhost"
    return {"NO_PROXY": hosts, "no_proxy": hosts}


class ProcessDied(RuntimeError):
    """A process that the run needs has ended."""

    is_verdict = True  # the message says everything, so no traceback is printed


@dataclass(eq=False)
class Child:
    """A process that the run starts."""

    name: str
    command: list[str]
    gpus: list[str] = field(default_factory=list)  # as in CUDA_VISIBLE_DEVICES
    variables: dict[str, str] = field(default_factory=dict)  # besides those of `environment`

    def start(self, log_dir: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = log_dir / f"{self.name}.log"
        log_dir.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [*self.command, "--port", str(port)],
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment(self.gpus) | self.variables,
            )

    def wait_ready(self) -> str:
        """Wait until the process answers, and return its URL. Raises ProcessDied if the process
        ends first."""
        import httpx  # slow to import, and few processes need it

        with httpx.Client(timeout=5, trust_env=False) as client:
            while self.process.poll() is None:
                with suppress(httpx.TransportError):
                    if client.get(f"{self.url}/health").is_success:
                        return self.url
                time.sleep(0.05)
        raise self.death()

    def death(self) -> ProcessDied:
        """Wait for the process to end, and return an error that describes this end."""
        said = f"{self.name} ended with code {self.process.wait()}; the end of {self.log}:"
        last = self.log.read_text(errors="replace").strip().splitlines()[-5:]
        return ProcessDied("\n".join([said, *last]))

    def watch(self, on_death: Callable[[ProcessDied], None]) -> None:
        threading.Thread(target=lambda: on_death(self.death()), daemon=True).start()

    def end(self) -> None:
        """Send SIGTERM to the process, and at most 5 s later SIGKILL to its group."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def environment(gpus: list[str]) -> dict[str, str]:
    return (
        {name: value for name, value in os.environ.items() if not DROPPED.fullmatch(name)}
        | bypass()
        | {
            "HF_HUB_OFFLINE": "1",
            "POCKET_AREAL_PARENT": str(os.getpid()),
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            # SGLang runs ninja, which pip has put into Python's folder. PATH may lack this folder.
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
    )


def command(module: str, *words: Any) -> list[str]:
    return [sys.executable, "-P", "-m", module, "--exit-with-parent", *map(str, words)]


def main(words: list[str]) -> int:
    child = subprocess.Popen(words)
    ending = threading.Event()

    def end(*_: object) -> None:
        ending.set()
        child.terminate()
        threading.Timer(3.0, os.killpg, (0, signal.SIGKILL)).start()

    signal.signal(signal.SIGTERM, end)
    follow_parent(end)
    code = child.wait()
    if ending.is_set():
        os.killpg(0, signal.SIGKILL)  # the command's workers may still be running
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
