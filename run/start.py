"""Start a run, hold its parts, and end them.

`begin` reads the command line and starts the servers, which load their model while train.py imports
torch. Callbacks receive the `Run`: the configuration, the processes and the parts that train.py
adds. When the Run's `with` block ends, all its processes are ended, even after Ctrl-C, an exception
or a server's death. After a failure, `main` prints how to continue. The exit codes are:

    0  done      1  failed      2  wrong configuration      130  Ctrl-C      143  SIGTERM
"""

import fcntl
import gc
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import yaml

from inference.fields import import_name
from inference.process import Child, raise_open_files, visible_gpus
from rollout.launch import plan_servers
from run.config import ALIASES, ROOT, ConfigError, TrainConfig, load, resolve
from run.inputs import find_model


def revision() -> str:
    words = ["git", "describe", "--always", "--dirty"]
    with suppress(OSError):
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return ""


class Run:
    """The parts of a run. Every rank makes a Run, but only that of rank 0 has servers, a proxy, an
    engine and an executor."""

    # What train.py fills in:
    inputs: Any = None  # Inputs
    actor: Any = None
    ref: Any = None
    engine: Any = None
    executor: Any = None
    prints_steps = True  # unless a callback shows the steps

    def __init__(self, config: TrainConfig, force: bool = False) -> None:
        """Raises ConfigError if the run cannot start."""
        self.config = config = resolve(config)
        self.rank = int(os.environ.get("RANK", 0))
        self.callbacks: list[Any] = []  # filled by PPOTrainer
        self.step, self.last_step = 0, config.max_steps  # `step` is the last finished one
        self.history: list[dict[str, Any]] = []  # the lines of metrics.jsonl
        self.stack = ExitStack()
        self.children: list[Child] = []
        find_model(config)
        if self.rank == 0:
            self.claim(force)
        self.admin_key = secrets.token_urlsafe(16)  # for the proxy
        self.key = os.environ.get("POCKET_AREAL_SERVER_KEY", "")  # for the servers
        self.server_urls = config.rollout.server_addrs
        if not self.server_urls and self.rank == 0:
            self.key = self.key or self.admin_key
            self.server_urls = self.start(plan_servers(config, visible_gpus(), self.key))

    @property
    def run_dir(self) -> Path:
        return self.config.run_dir

    def claim(self, force: bool) -> None:
        """Name the run's folder and lock it. Raises ConfigError if another process holds the lock,
        or if the run began with other code, seed or data."""
        config = self.config
        if config.trial_name == "auto":
            # The process id distinguishes runs that start in the same second.
            config.trial_name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        # `origin` names the code, the model, and everything that determines the prompts' order.
        data = config.train_dataset
        self.origin = (
            f"# revision {revision()}, seed {config.seed}, shuffle {data.shuffle},"
            f" data {data.path or config.task}, model {config.model_path}"
        )
        record, metrics = self.run_dir / "config.yaml", self.run_dir / "metrics.jsonl"
        if record.is_file() and metrics.exists() and config.mode == "train":
            began = record.read_text(errors="replace").partition("\n")[0]
            if began != self.origin and not force:
                raise ConfigError(
                    f"{self.run_dir} was started with other code, seed or data ({began[2:]}):"
                    " go back to it, or add --force"
                )
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            lock = self.stack.enter_context((self.run_dir / "lock").open("w"))
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # children do not inherit the lock
        except OSError as error:
            raise ConfigError(
                f"{self.run_dir} cannot be written, or belongs to a running process: {error}"
            ) from error

    def record(self) -> None:
        keys = yaml.safe_dump(self.config.model_dump(mode="json", fallback=str), sort_keys=False)
        (self.run_dir / "config.yaml").write_text(f"{self.origin}\n{keys}")

    def start(self, children: list[Child]) -> list[str]:
        """Start processes that end with the run. Return their URLs without waiting for them."""
        for child in children:
            child.start(self.run_dir / "logs")
            self.stack.callback(child.end)
            print(f"starting {child.name}; its log is {child.log}", flush=True)
        self.children += children
        return [child.url for child in children]

    def wait_until_ready(self) -> None:
        """Raises ProcessDied if a process ends before it answers."""
        for child in self.children:
            child.wait_ready()

    def call(self, event: str, *args: Any) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for callback in self.callbacks:
            merged |= getattr(callback, event, lambda *_: None)(*args) or {}
        return merged

    # ---- the `with` block

    def __enter__(self) -> Self:
        from training.ranks import join_ranks, share

        join_ranks()
        self.config.trial_name = share(lambda: self.config.trial_name)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        import torch.distributed as dist

        death = None
        if error and not isinstance(error, SystemExit):
            if "LOCAL_RANK" in os.environ:
                # If another rank fails, torchrun sends SIGTERM, which must not stop the cleanup.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(0.5)  # a dying server or proxy may need this long to end
            death = next((c.death() for c in self.children if c.process.poll()), None)
        with self.stack:
            self.call("on_end", error)
        if death:
            raise death from error
        if error is None:
            dist.destroy_process_group()

    def command(self, *words: str) -> str:
        """This run's command, quoted for a shell, without trial_name and mode. `words` replace the
        command's words for the same keys."""
        keys = {"trial_name", "mode", "-u", *(word.partition("=")[0] for word in words)}
        keys |= {alias for alias in ALIASES if ALIASES[alias] in keys}
        given = [word for word in sys.orig_argv[1:] if word.partition("=")[0] not in keys]
        if ranks := os.environ.get("LOCAL_WORLD_SIZE"):
            given[:0] = "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"
        return shlex.join([sys.executable, *given, *words])


def begin(argv: list[str], make: Callable[..., Run] = Run) -> Run:
    """Read the command line, start the run's servers before torch is imported, and return the Run.
    If the configuration is wrong, the program prints one line and exits with code 2."""
    raise_open_files()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an ignored SIGCHLD would hide exit codes
    for caught in (signal.SIGINT, signal.SIGTERM):
        signal.signal(caught, lambda number, _: sys.exit(128 + number))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # faster for a small model on shared cores
    # By default, oneDNN keeps code for 1,024 shapes: .7 GB for a model of 135M parameters.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
    try:
        config, options = load(argv)
        if config.mode == "eval" and config.evaluator.base_url:
            sys.exit(import_name("extras.endpoint.main")(config))
        return make(config, force=options.force)
    except ConfigError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(60)  # rank 0 prints the error, and torchrun then ends this rank
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def main(run: Run, train: Callable[[Run], None]) -> Any:
    """Train, or evaluate if mode=eval, and return the exit code."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # Without gc.freeze, garbage collection would scan all imported objects, and take a tenth of the
    # demo's CPU time.
    gc.freeze()
    code: Any = 0
    try:
        train(run)
    except SystemExit as error:
        code = error.code
    except BaseException as error:  # also CheckpointException of torch
        code = 2 if isinstance(error, ConfigError) else 1
        if hasattr(error, "is_verdict"):
            print(f"error: {error}", file=sys.stderr)
        else:
            traceback.print_exception(error)
    if code not in (0, 2) and run.rank == 0:
        print(f"the run's folder is {run.run_dir}", file=sys.stderr)
        if run.config.mode == "train" and run.config.recover_interval:
            words = run.command(f"trial_name={run.config.trial_name}")
            print(f"to go on from the last checkpoint: {words}", file=sys.stderr)
    status = code if isinstance(code, int) else 1
    if run.rank > 0:  # else a gloo thread that still holds a tensor aborts the rank
        os._exit(status)
    # Python waits for threads that are not daemons before it exits. An agent's thread may hang, so
    # an alarm ends the process after ten seconds.
    signal.signal(signal.SIGALRM, lambda *_: os._exit(status))
    signal.alarm(10)
    return code
