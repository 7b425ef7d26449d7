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
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout, suppress
from pathlib import Path
from typing import Any, Self

import yaml

from inference.fields import import_name
from inference.serve import raise_open_files
from run.config import ROOT, ConfigError, TrainConfig, load
from run.inputs import Inputs, find_model, load_inputs, make_model
from run.launch import (
    Child,
    Fleet,
    Planned,
    ProcessDied,
    choose_update_mode,
    plan_proxies,
    plan_servers,
    visible_gpus,
)

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

    def __init__(self, config: TrainConfig, options: Namespace | None = None) -> None:
        """Claim the run's folder, and start servers and proxies if their model is there already.

        Raises ConfigError if the run cannot start.
        """
        options = options or load([])[1]
        self.config, self.rank = config, int(os.environ.get("RANK", 0))
        self.replaying: str = options.replay or ""  # the folder of the run that is repeated
        self.last_step: int = options.replay_until or config.max_steps
        self.key, self.admin_key = (
            secrets.token_urlsafe(16),
            secrets.token_urlsafe(16),
        )  # of the servers, and of the proxies
        if config.rollout.server_addrs:
            self.key = os.environ.get("POCKET_AREAL_SERVER_KEY", "")
        self.stack = ExitStack()
        if options.quiet:
            self.stack.enter_context(redirect_stdout(open(os.devnull, "w")))  # noqa: SIM115
        # What train.py fills in:
        self.inputs: Any = None  # Inputs
        self.tokenizer: Any = None
        self.actor: Any = None
        self.ref: Any = None
        self.engine: Any = None
        self.executor: Any = None
        self.evaluation: Any = None
        self.history: list[dict[str, Any]] = []  # the lines of metrics.jsonl
        self.step = 0  # the last finished step
        self.stopping = False  # after the first Ctrl-C
        self.servers: list[Child] = []
        self.proxies: list[Child] = []
        if self.rank == 0:
            self.claim(options.force)
        self.run_dir = config.run_dir
        self.fleet = Fleet(self.run_dir / "logs")
        if has_model := find_model(config):
            self.start_servers()  # they load while the callbacks import torch
        names = [*config.callbacks]
        names += ["extras.trace.Trace"] * config.rollout.enable_tracing
        names += ["extras.replay.Replay"] * bool(self.replaying)
        is_training = config.mode == "train"
        self.callbacks = [import_name(name)(config) for name in dict.fromkeys(names) if is_training]
        if has_model:
            self.start_proxies()

    # ---- the folder

    def claim(self, force: bool) -> None:
        """Name the run's folder and lock it. Raises ConfigError if another process has it, or if it
        holds a run that cannot go on."""
        config = self.config
        if config.trial_name == "auto" or self.replaying:
            config.trial_name = time.strftime("%Y%m%d-%H%M%S")
        try:
            config.run_dir.mkdir(parents=True, exist_ok=True)
            lock = self.stack.enter_context((config.run_dir / "lock").open("w"))
            os.register_at_fork(after_in_child=lock.close)  # agents may fork; the lock stays here
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{config.run_dir} belongs to a running process") from error
        except OSError as error:
            raise ConfigError(f"fileroot: cannot write to {config.run_dir}: {error}") from error
        if config.mode == "eval" or not (config.run_dir / "metrics.jsonl").exists():
            return
        if not config.recover_interval:
            raise ConfigError(f"{config.run_dir} holds a run without checkpoints: take a new name")
        before: Any = {}
        with suppress(OSError, yaml.YAMLError):
            before = yaml.safe_load((config.run_dir / "config.yaml").read_text())
        other = isinstance(before, dict) and before.get("code", code_digest()) != code_digest()
        if other and not force:
            raise ConfigError(
                f"{config.run_dir} was started with other code (revision {before['revision']}): go"
                " back to it, or add --force"
            )

    def record(self) -> None:
        """Write the configuration, and what the files of the folder are."""
        recorded = self.config.model_dump(mode="json")
        recorded |= {"revision": revision(), "code": code_digest()}
        name = "config.yaml" if self.config.mode == "train" else "eval.yaml"
        (self.run_dir / name).write_text(yaml.safe_dump(recorded, sort_keys=False))
        shutil.copy(ROOT / "run" / "folder.md", self.run_dir / "README.md")

    # ---- the processes

    def has_processes(self) -> bool:
        """Rank 0 has them, unless an evaluation is of another endpoint."""
        return self.rank == 0 and not (
            self.config.mode == "eval" and self.config.evaluator.base_url
        )

    def start_servers(self) -> None:
        """Start the servers, and return at once."""
        config, gpus = self.config, visible_gpus()
        if self.has_processes():
            planned = plan_servers(config, gpus, self.key)
            config.weight_update.mode = choose_update_mode(config, planned, gpus)  # type: ignore[assignment]
            self.servers = self.start(planned)

    def start_proxies(self) -> None:
        """Start the proxies, which wait for their keys, and return at once."""
        if self.has_processes():
            urls = [child.url for child in self.servers] or self.config.rollout.server_addrs
            self.proxies = self.start(plan_proxies(self.config, urls, self.hooks()))

    def start(self, planned: list[Planned]) -> list[Child]:
        for each in planned:
            print(f"starting {each.name}; its log is {self.fleet.log_dir}/{each.name}.log")
        return [self.fleet.start(each) for each in planned]

    def hooks(self) -> tuple[str, dict[str, Any]] | None:
        """The engine's hooks, which one of the callbacks may bring: class path and arguments."""
        bring = (c for c in self.callbacks if hasattr(c, "hooks"))
        return next(((c.hooks, c.hooks_args(self)) for c in bring), None)

    def make_hooks(self) -> Any:
        found = self.hooks()
        return found and import_name(found[0])(**found[1])

    def server_urls(self) -> list[str]:
        """Wait until the servers answer."""
        return [child.wait_ready() for child in self.servers] or self.config.rollout.server_addrs

    def proxy_urls(self) -> tuple[str, ...]:
        """Give the proxies their keys, now that the servers answer, and wait until they do, too."""
        for child in self.proxies:
            child.send((self.admin_key, self.key))
        return tuple(child.wait_ready() for child in self.proxies)

    # ---- the `with` block

    def __enter__(self) -> Self:
        from training.ranks import join_ranks, share

        self.stack.callback(self.fleet.close)
        join_ranks()
        self.config.trial_name = share(self.config.trial_name)
        self.run_dir = self.config.run_dir
        if not Path(str(self.config.model_path)).is_dir():
            if self.rank == 0:
                make_model(self.config)
            self.start_servers()
            self.start_proxies()
            share(None)  # the other ranks wait for the model
        self.config.weight_update.mode = share(self.config.weight_update.mode)
        return self

    def load(self, workflow: Any = None, workflow_kwargs: dict[str, Any] | None = None) -> Inputs:
        """Load task, data, tokenizer and workflow. Failures are printed and counted from now on."""
        from run.log import Failures

        if self.rank == 0:
            self.stack.callback(Failures(self.fleet.log_dir).close)
        self.inputs = load_inputs(self.config, workflow, workflow_kwargs)
        self.tokenizer = self.inputs.tokenizer
        return self.inputs

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from training.ranks import leave_ranks

        lost = None
        if isinstance(error, Exception):
            time.sleep(DEATH_SECONDS)  # a dead server or proxy is the reason, not its consequence
            lost = next((c.last_words() for c in self.fleet.children if c.process.poll()), None)
        with self.stack:
            self.call("on_end", error)
        if lost:
            raise ProcessDied(lost) from error
        if error is None:
            leave_ranks()

    def call(self, event: str, *args: Any) -> dict[str, Any]:
        """Call a method of every callback that has it. What they return are more metrics."""
        methods = (getattr(callback, event, None) for callback in self.callbacks)
        found = [method(*args) for method in methods if method]
        return {key: x for metrics in found for key, x in (metrics or {}).items()}

    # ---- how it ends

    def stop_after_step(self) -> None:
        """From now on, let the first Ctrl-C end the wait for a batch, or the run after its step."""

        def first(*_: Any) -> None:
            signal.signal(signal.SIGINT, end_at_once)
            self.stopping = True
            print("Ctrl-C: the step ends; a second Ctrl-C ends at once", flush=True)
            if self.executor:
                self.executor.interrupt(KeyboardInterrupt)

        with suppress(ValueError):  # only the main thread may handle signals
            signal.signal(signal.SIGINT, first)

    def command(self, *words: str, script: str = "train.py") -> str:
        """This run's command with other words, ready to paste."""
        given = [w for w in sys.orig_argv[1:] if not w.startswith(("trial_name=", "mode="))]
        start = given if script == "train.py" else ["-m", script]
        return shlex.join([sys.executable, *start, *words])

    def say_how_to_go_on(self) -> None:
        from run.checkpoint import checkpoints

        print(f"the run's folder is {self.run_dir}", file=sys.stderr)
        if self.config.mode == "train" and self.config.recover_interval and not self.replaying:
            step = max(checkpoints(self.run_dir), default=0)
            place = f"from the checkpoint of step {step}" if step else "from the beginning"
            words = self.command(f"trial_name={self.config.trial_name}")
            print(f"to go on {place}: {words}", file=sys.stderr)


def end_at_once(*_: Any) -> None:
    os.write(2, b"\x1b[?25h" * os.isatty(2))  # a live table hides the cursor
    os._exit(130)


def begin(argv: list[str]) -> Run:
    """Read the command line and start the run's processes, before torch is imported.

    --help and --dry-run end here. An error ends the process with one line and code 2.
    """
    raise_open_files()
    signal.signal(signal.SIGINT, end_at_once)  # until `main`; the children end with their parent
    try:
        config, options = load(argv)
        if options.dry_run:
            plan = import_name("extras.plan.print_plan")
            sys.exit(plan(config, options.gpus, options.gpu_memory))
        if options.replay:
            import_name("extras.replay.check")(config, options.replay)
        return Run(config, options)
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def main(run: Run, train: Callable[[Run], None]) -> int:
    """Train, or evaluate in mode=eval, and return the exit code."""
    import torch
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(1)  # with shared cores, one thread is faster for a small model
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code: Any = 0
    try:
        train(run)
    except KeyboardInterrupt:
        print("interrupted; every process of the run has ended", file=sys.stderr)
        code = 130
    except SystemExit as error:
        code = error.code
    except Exception as error:
        code = 2 if isinstance(error, ConfigError) else 1
        print(f"error: {reason(run, error)}", file=sys.stderr)
    if code not in (0, 2) and run.rank == 0:
        run.say_how_to_go_on()
    return code


def reason(run: Run, error: Exception) -> str:
    """Why the run ends: the message, if it says everything, else where the traceback is."""
    from run.log import describe

    for known in (error, error.__cause__):
        if isinstance(known, ConfigError | ProcessDied) or hasattr(known, "is_verdict"):
            return str(known)
    path = run.fleet.log_dir / "error.log"
    path.write_text("".join(traceback.format_exception(error)))
    cause = f"\nthe first failure: {describe(error.__cause__)}" if error.__cause__ else ""
    return f"{describe(error)}{cause}\nthe traceback is in {path}"
