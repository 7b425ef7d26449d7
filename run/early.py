"""Start child processes early: a server and a proxy import their modules while train.py imports torch.

train.py, the small server and the proxy each spend seconds on imports. An ordinary child process starts its imports
only after train.py has imported torch and read the configuration. An early process is a Python process that imports one
module, and then waits for an order on its standard input. The order is one line of JSON: a list with the path of the
log file and the arguments of the module's command line. After it has read the order, the early process does what
`python -m MODULE WORDS` does.

`prepare` starts the early processes. When run/launch.py starts a child, it calls `take`, which sends the order to the
module's early process. If there is no early process, run/launch.py starts an ordinary process. Without an order, an
early process ends when its standard input is closed, at the latest when train.py ends.

train.py imports this module before torch, so this module imports only modules that load fast.
"""

import atexit
import gc
import importlib
import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollout.workers import bypass_http_proxy
from run.keys import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
# A child process does not inherit these environment variables. With those of torchrun, it would behave like a rank of
# the trainer. The others may break SGLang: its memory saver refuses the allocator's option expandable_segments, and
# TORCH_DIST_USE_NCCL2 chooses another implementation of NCCL's process groups than inference/group.py.
DROPPED = re.compile(
    r"TORCHELASTIC_\w+|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|PYTORCH_(CUDA_)?ALLOC_CONF|TORCH_DIST_USE_NCCL2"
)
waiting: dict[
    str, subprocess.Popen[bytes]
] = {}  # for each module, the early process that waits for an order


def environment(gpus: list[str]) -> dict[str, str]:
    """Return the environment variables of a child process that uses the GPUs `gpus`."""
    inherited = {name: value for name, value in os.environ.items() if not DROPPED.fullmatch(name)}
    ours = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    ours["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return (
        inherited | ours | bypass_http_proxy("127.0.0.1", "localhost")
    )  # SGLang sends a request to itself


def spawn(command: list[str], output: Any, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a child process in a process session of its own. Its standard input is a pipe from this process, and
    `output` gets its standard output and its standard error."""
    files: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": output,
        "stderr": subprocess.STDOUT,
    }
    return subprocess.Popen(command, **files, start_new_session=True, env=variables)


def prepare(config: TrainConfig) -> None:
    """Start an early process for a proxy. If the run needs small servers, also start an early process for one of
    them."""
    has_server = config.server.backend == "tiny" and not config.rollout.server_addrs
    for module in [] if config.dry_run else ["inference.tiny.server"] * has_server + ["proxy"]:
        start(module)


def start(module: str) -> None:
    """Start an early process that imports `module`."""
    waiting[module] = spawn(
        [sys.executable, "-P", "-m", "run.early", module], subprocess.DEVNULL, environment([])
    )


@atexit.register
def kill_waiting() -> None:
    """Kill the early processes that got no order."""
    for process in waiting.values():
        process.kill()
        process.communicate()  # `communicate` waits for the end of the process, and closes its pipe


def take(command: list[str], log: Path) -> subprocess.Popen[bytes] | None:
    """Make an early process run `command`, and redirect the process's output to the file `log`. Return the process.

    Return None if no early process has imported the command's module, or if the module's early process has already
    ended.
    """
    module = command[3] if command[1:3] == ["-P", "-m"] else ""
    process = waiting.pop(module, None)
    if process is None or process.poll() is not None:
        return None
    with suppress(BrokenPipeError):
        os.write(process.stdin.fileno(), json.dumps([str(log), *command[4:]]).encode() + b"\n")  # type: ignore[union-attr]
    return process


def main(module: str) -> int:
    """Import `module`, wait for the order, and run the module's `main`. If standard input closes before an order
    arrives, return 0."""
    gc.disable()  # else garbage collection takes a fifth of the imports' time
    run, serve = importlib.import_module(module).main, importlib.import_module("inference.serve")
    serve.import_tokenizers()
    serve.collect_garbage_rarely()
    order = sys.stdin.readline()
    if not order:
        return 0
    log, *sys.argv[1:] = json.loads(order)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
