"""Begin a run, hold its parts, and end all of them.

`begin` reads the command line and starts servers and proxies without torch, so they load while
train.py imports it. `Run` is what callbacks see: configuration, processes, and the parts that
train.py puts into it. Its `with` block ends everything that was started, also after Ctrl-C, an
exception or the death of a server; `main` turns the end into an exit code and a last line.

    0  done      1  failed      2  wrong configuration      130  Ctrl-C      143  SIGTERM

The first Ctrl-C lets the running step end and writes a checkpoint, the second ends at once.
"""

import fcntl
import hashlib
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, Self

import yaml

from inference.fields import import_name
from inference.serve import raise_open_files
from run.config import ROOT, ConfigError, TrainConfig, load
from run.inputs import find_model
from run.launch import Child, plan_proxies, plan_servers, visible_gpus

DEATH_SECONDS = 0.5  # a killed process closes its connections at most this long before it ends


def revision() -> str:
    """The git commit of this checkout, or ""."""
    words = ["git", "describe", "--always", "--dirty"]
    with suppress(OSError):
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return ""


def code_digest() -> str:
    """A hash of the project's modules: a run goes on only under the code that it began with."""
    rooms = ("calls", "inference", "rollout", "training", "run", "tasks", "extras")
    files = [*ROOT.glob("*.py"), *(f for room in rooms for f in (ROOT / room).rglob("*.py"))]
    content = b"".join(file.read_bytes() for file in sorted(files))
    return hashlib.blake2b(content, digest_size=6).hexdigest()


class Run:
    """One run. All ranks make one; only rank 0 has processes, an engine and executors."""

    # What train.py fills in:
    inputs: Any = None  # Inputs
    actor: Any = None
    ref: Any = None
    engine: Any = None
    executor: Any = None
    prints_steps = True  # a line a step, unless a callback shows them

    def __init__(
        self,
        config: TrainConfig,
        force: bool = False,
        replaying: str | None = None,
        last_step: int | None = None,
    ) -> None:
        """Claim the run's folder, find its model, and start servers, callbacks and proxies.

        `force` continues a run of other code, `replaying` is the folder of a run to repeat. Raises
        ConfigError if the run cannot start.
        """
        self.config, self.rank = config, int(os.environ.get("RANK", 0))
        self.replaying, self.last_step = replaying, last_step or config.max_steps
        self.step = 0  # the last finished step
        self.stopping = False  # after the first Ctrl-C
        self.history: list[dict[str, Any]] = []  # the lines of metrics.jsonl
        self.stack = ExitStack()
        if self.rank == 0:
            self.claim(force)
        self.run_dir = config.run_dir
        find_model(config)
        self.admin_key = secrets.token_urlsafe(16)  # of the proxies
        self.key = self.admin_key  # of the servers
        if config.rollout.server_addrs:
            self.key = os.environ.get("POCKET_AREAL_SERVER_KEY", "")
        self.children: list[Child] = []
        self.servers = self.start(plan_servers(config, visible_gpus()), self.key)
        self.server_urls = [child.url for child in self.servers] or config.rollout.server_addrs
        names = [*config.callbacks]  # the servers load while these import torch
        names += ["extras.trace.Trace"] * config.rollout.enable_tracing
        names += ["extras.replay.Replay"] * bool(self.replaying)
        kinds = map(import_name, dict.fromkeys(names))
        is_eval = config.mode == "eval"
        self.callbacks = [c(config) for c in kinds if not is_eval or hasattr(c, "also_evaluates")]
        self.hooks = self.call("hooks", self)  # of the engine: {class path: its arguments}
        self.proxies = self.start(plan_proxies(config, self.server_urls, self.hooks))

    def claim(self, force: bool) -> None:
        """Name the run's folder and lock it. Raises ConfigError if another process has it, or if it
        holds a run of other code."""
        config = self.config
        if config.trial_name == "auto" or self.replaying:
            config.trial_name = time.strftime("%Y%m%d-%H%M%S")
        if config.mode == "train" and (config.run_dir / "metrics.jsonl").exists() and not force:
            about = (config.run_dir / "config.yaml").read_text().partition("\n")[0]
            if not about.endswith(f"code {code_digest()}"):
                raise ConfigError(
                    f"{config.run_dir} was started with other code ({about.strip('# ')}): go back"
                    " to it, or add --force"
                )
        try:
            config.run_dir.mkdir(parents=True, exist_ok=True)
            lock = self.stack.enter_context((config.run_dir / "lock").open("w"))
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # what agents fork does not hold it
        except OSError as error:
            reason = "cannot be written, or belongs to a running process"
            raise ConfigError(f"{config.run_dir} {reason}: {error}") from error

    def record(self) -> None:
        """Write the configuration, and what the files of the folder are."""
        name = "config.yaml" if self.config.mode == "train" else "eval.yaml"
        keys = yaml.safe_dump(self.config.model_dump(mode="json"), sort_keys=False)
        about = f"# revision {revision()}, code {code_digest()}\n"
        (self.run_dir / name).write_text(about + keys)
        shutil.copy(ROOT / "run" / "folder.md", self.run_dir / "README.md")

    def start(self, children: list[Child], *keys: str) -> list[Child]:
        """Start processes, and return at once. Only rank 0 has any."""
        if self.rank > 0:
            return []
        for child in children:
            child.start(self.run_dir / "logs", *keys)
            self.stack.callback(child.end)
            print(f"starting {child.name}; its log is {child.log}")
        self.children += children
        return children

    def wait_for_servers(self) -> None:
        for child in self.servers:
            child.wait_ready()

    def wait_for_proxies(self) -> None:
        """Give the proxies their keys, and wait until they answer. They ask the servers for a
        token, so none may be paused."""
        for child in self.proxies:
            child.send(self.admin_key, self.key)
        for child in self.proxies:
            child.wait_ready()

    def call(self, event: str, *args: Any) -> dict[str, Any]:
        """Call a method of every callback that has it, and merge the dicts that they return."""
        methods = (getattr(callback, event, None) for callback in self.callbacks)
        found = [method(*args) for method in methods if method]
        return {key: x for returned in found for key, x in (returned or {}).items()}

    # ---- the `with` block

    def __enter__(self) -> Self:
        from training.ranks import join_ranks, share

        join_ranks()
        self.config.trial_name = share(self.config.trial_name)
        self.run_dir = self.config.run_dir
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from training.ranks import leave_ranks

        death = None
        if isinstance(error, Exception):
            time.sleep(DEATH_SECONDS)  # a dead server or proxy is the reason, not its consequence
            death = next((c.death() for c in self.children if c.process.poll()), None)
        with self.stack:
            self.call("on_end", error)
        if death:
            raise death from error
        if error is None:
            leave_ranks()

    # ---- how it ends

    def stop_after_step(self) -> None:
        """From now on, let the first Ctrl-C end the wait for a batch, or the run after its step."""

        def first(*_: Any) -> None:
            signal.signal(signal.SIGINT, end_at_once)
            self.stopping = True
            print("Ctrl-C: the step ends; a second Ctrl-C ends at once", flush=True)
            if self.executor:
                self.executor.dispatcher.interrupt()

        signal.signal(signal.SIGINT, first)

    def command(self, *words: str, script: str = "train.py") -> str:
        """This run's command with other words, ready to paste."""
        given = [w for w in sys.orig_argv[1:] if not w.startswith(("trial_name=", "mode="))]
        start = given if script == "train.py" else ["-m", script]
        return shlex.join([sys.executable, *start, *words])

    def say_how_to_go_on(self) -> None:
        print(f"the run's folder is {self.run_dir}", file=sys.stderr)
        if self.config.mode == "train" and self.config.recover_interval and not self.replaying:
            words = self.command(f"trial_name={self.config.trial_name}")
            print(f"to go on from the last checkpoint: {words}", file=sys.stderr)


def end_at_once(*_: Any) -> None:
    os.write(2, b"\x1b[?25h" * os.isatty(2))  # a live table hides the cursor
    os._exit(130)


def begin(argv: list[str]) -> Run:
    """Read the command line and start the run's processes, before torch is imported.

    What needs no run ends here: --help, --dry-run and the evaluation of another endpoint. An error
    ends the process with one line and code 2.
    """
    raise_open_files()
    signal.signal(signal.SIGINT, end_at_once)  # until `main`; the children end with their parent
    try:
        config, options = load(argv)
        if options.dry_run:
            plan = import_name("extras.plan.print_plan")
            sys.exit(plan(config, options.gpus, options.gpu_memory))
        if config.mode == "eval" and config.evaluator.base_url:
            sys.exit(import_name("extras.endpoint.main")(config))
        if options.replay:
            import_name("extras.replay.check")(config, options.replay)
        if options.quiet:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return Run(config, options.force, options.replay, options.replay_until)
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def main(run: Run, train: Callable[[Run], None]) -> Any:
    """Train, or evaluate in mode=eval, and return the exit code."""
    import torch
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(1)  # with shared cores, one thread is faster for a small model
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code: Any = 1
    try:
        train(run)
        return 0
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; every process of the run has ended", file=sys.stderr)
        code = 130
    except SystemExit as error:
        code = error.code
    except Exception as error:
        if hasattr(error, "is_verdict"):
            print(f"error: {error}", file=sys.stderr)
        else:
            traceback.print_exception(error)
    if run.rank == 0:
        run.say_how_to_go_on()
    return code
