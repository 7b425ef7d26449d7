"""Read the command line of train.py, and start and end a run.

The function `main` reads the command line, and then trains or evaluates. `main` uses these functions and classes:

    `join_ranks` connects the ranks of torchrun. Without torchrun, this process is the only rank.
    `agree` reads the configuration on rank 0, and gives it to all ranks.
    `open_run` loads the inputs. On rank 0, `open_run` also plans the servers and locks the run's folder.
        In mode=train `PPOTrainer.train` (train.py) runs, and in mode=eval `evaluate_run` runs.
        `ExitStack` ends every part that was started, in the reverse order of the starts.
    `leave_ranks` disconnects the ranks.

The ExitStack ends every process even after Ctrl-C, an exception or the death of a server process. The exit code is 0
for success, 1 for a run that failed, 2 for a wrong configuration, and 130 for Ctrl-C. A run that was ended by `kill -9`
loses the steps since its last checkpoint (run/recover.py). If a run ends early, the last lines of its output name the
command that continues the run, unless recover=off.

If Ctrl-C arrives while the trainer waits for a batch, the wait ends at once. If Ctrl-C arrives in another part of a
step, the step runs to its end. In both cases, the run then writes a checkpoint (`interruptible`). A second Ctrl-C ends
train.py at once, and the child processes end when train.py has ended. With several ranks, Ctrl-C writes no checkpoint,
because the ranks may stop after different steps. With recover=off, no run writes checkpoints.
"""

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from transformers.utils import logging as transformers_logging

from inference.serve import collect_garbage_rarely
from ppo import describe_mode
from run.doctor import Unhealthy
from run.evaluate import evaluate_run
from run.failures import Failures, describe, report
from run.inputs import Inputs, load_inputs
from run.keys import TrainConfig
from run.launch import ROOT, Fleet, Planned, ProcessDied, revision
from run.load import ConfigError, changed, load
from run.logger import Logger, Trace
from run.plan import plan_run
from run.recover import claim, newest_checkpoint
from run.replay import Differs, check_replay
from run.report import write_report
from run.start import Run
from run.terminal import before_results, end_at_once, hush
from training.ranks import join_ranks, leave_ranks, share

FAILURES = "failures.log"  # file with the tracebacks of a run, in the run's folder logs/


def on_ctrl_c(act: Callable[..., Any]) -> None:
    """Let the next Ctrl-C call `act`, and let a second Ctrl-C end the process at once."""

    def first(*_: Any) -> None:
        signal.signal(signal.SIGINT, end_at_once)
        act(signal.SIGINT, None)

    signal.signal(signal.SIGINT, first)


@contextmanager
def interruptible(executor: Any, save: Callable[[], None] | None) -> Iterator[None]:
    """After Ctrl-C, interrupt the `with` block at its next wait for a batch, call `save`, and raise KeyboardInterrupt.
    Without checkpoints, `save` is None.

    With several ranks, or outside of the main thread, `interruptible` does not change the effect of Ctrl-C.
    """
    if dist.get_world_size() > 1 or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop() -> None:
        then = ", then a checkpoint is written" if save else ""
        print(f"Ctrl-C: the step ends{then}; a second Ctrl-C ends at once", flush=True)
        executor.dispatcher.interrupt(KeyboardInterrupt)

    # The interrupted main thread may hold a lock that `stop` needs, so another thread calls `stop`.
    on_ctrl_c(lambda *_: threading.Thread(target=stop).start())
    try:
        yield
    except KeyboardInterrupt:
        if save:
            save()
        raise
    except BaseException:  # during the clean-up, Ctrl-C raises KeyboardInterrupt again
        on_ctrl_c(signal.default_int_handler)
        raise
    on_ctrl_c(signal.default_int_handler)


def say_how_to_go_on(config: TrainConfig) -> None:
    """Print the folder of a run that ended early, and print the command that continues the run."""
    print(f"the run's folder is {config.run_dir}", file=sys.stderr)
    if config.mode == "train" and config.recover == "off":
        print(
            "the run has no checkpoints, because recover=off was set, so it cannot continue",
            file=sys.stderr,
        )
        return
    words = [word for word in sys.orig_argv if not word.startswith("trial_name=")]
    step = newest_checkpoint(config.run_dir) if config.mode == "train" else 0
    place = (
        f"from the checkpoint of step {step}"
        if step
        else "from the beginning, because there is no checkpoint"
    )
    print(
        f"to go on {place}: {shlex.join([*words, f'trial_name={config.trial_name}'])}",
        file=sys.stderr,
    )


def agree(read: Callable[[], Any]) -> Any:
    """Call `read` on rank 0, and return the result of this call on every rank.

    If rank 0 refuses the configuration, every rank ends.
    """
    is_first, answer = dist.get_rank() == 0, None
    if is_first:
        try:
            answer = read()
        except (ConfigError, SystemExit) as error:
            answer = error
    answer = share(answer)
    if isinstance(answer, BaseException):
        leave_ranks()
        raise answer if is_first else SystemExit(getattr(answer, "code", 2))
    return answer


def read_run(config: TrainConfig, *agent: Any) -> tuple[Inputs, list[Planned], str]:
    """Set the run's name if it is not set, and check the run's folder. Return the inputs, the servers to start, and the
    plan as text.

    If `agent` holds a workflow and arguments, they replace the workflow and the arguments of the configuration. Raises
    ConfigError.
    """
    # A replay is a new run with a folder of its own.
    if config.trial_name == "auto" or (config.replay and config.run_dir.exists()):
        config.trial_name = time.strftime("%Y%m%d-%H%M%S")
    if config.replay:
        check_replay(config)
    can_continue = config.mode == "eval" or (
        config.recover == "auto" and (config.run_dir / "recover").exists()
    )
    if (config.run_dir / "metrics.jsonl").exists() and not can_continue:
        raise ConfigError(
            f"{config.run_dir} holds a run that recover=off cannot continue; give another trial_name"
        )
    return load_inputs(config, *agent), *plan_run(config)


@contextmanager
def open_run(config: TrainConfig, *agent: Any) -> Iterator[Run]:
    """Start a run on every rank. When the `with` block ends, end every part that the run has started.

    If `agent` holds a workflow and arguments, they replace the workflow and the arguments of the configuration. Raises
    ConfigError.
    """
    joined = join_ranks()
    with ExitStack() as stack:
        stack.callback(before_results.close)
        if config.quiet:
            hush()
        loaded: list[Any] = []  # on rank 0, this list holds the result of `read_run`

        def read() -> TrainConfig:
            is_named = config.trial_name != "auto"
            loaded.append(read_run(config, *agent))
            try:
                stack.enter_context(claim(config.run_dir))
            except ConfigError:
                if is_named:
                    raise
                config.trial_name += f"-{os.getpid()}"  # another run has started in the same second
                stack.enter_context(claim(config.run_dir))
            return config

        config = agree(read)
        inputs, servers, _ = loaded[0] if loaded else (load_inputs(config, *agent), [], "")
        # With actor.offload the optimizer runs on the CPU, so each rank gets an equal share of the machine's CPU cores.
        if config.actor.offload:
            torch.set_num_threads(
                max((os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1)
            )
        fleet = Fleet(config.run_dir / "logs")
        stack.callback(Failures(fleet.log_dir / FAILURES).close)
        is_training = bool(loaded) and config.mode == "train"
        if is_training:
            print(
                f"the run's folder is {config.run_dir}\n{describe_mode(config.actor)}", flush=True
            )
            # The report is written last, after the trace is closed, even if the run fails.
            stack.callback(write_report, config.run_dir)
        stack.callback(fleet.close)
        trace = Trace(
            config.run_dir / "trace.json" if is_training and config.rollout.enable_tracing else None
        )
        stack.callback(trace.close)
        collect_garbage_rarely()
        try:
            yield Run(config, inputs, servers, fleet, trace, stack)
        except BaseException as error:
            if not isinstance(error, ConfigError):  # the report of an earlier start keeps its end
                trace.mark("end", error=repr(error))
            # If the doctor's thread has stopped the rollout, `error.__cause__` is an Unhealthy.
            if isinstance(error.__cause__, Unhealthy):
                raise error.__cause__ from None
            if isinstance(error, Exception):
                fleet.raise_death(
                    error
                )  # if a dead server or proxy caused the error, raise ProcessDied
            raise
    if joined:
        leave_ranks()


def record(config: TrainConfig) -> None:
    """Write the resolved configuration to the run's folder, and print the keys that have changed since the run's last
    start."""
    path = config.run_dir / ("config.yaml" if config.mode == "train" else "eval.yaml")
    if config.mode == "train" and (changes := changed(path, config)):
        print(f"the configuration of this run changes: {', '.join(changes)}")
    keys = asdict(config)
    del keys["rollout"]["server_key"]  # the servers' key must not be written to a file
    OmegaConf.save({**keys, "revision": revision()}, path)
    (config.run_dir / "README.md").write_text((ROOT / "run" / "folder.md").read_text())


def start_logger(run: Run, executor: Any, step: int) -> Logger | None:
    """Write the run's configuration, and return a logger for the steps after step `step`. On every rank except 0 the
    result is None."""
    if dist.get_rank() > 0:
        return None
    logger = Logger(run.config, executor, run.trace)
    logger.doctor.watch(executor, run.stack)
    if logger.tracker:
        run.stack.callback(logger.tracker.finish)
    if step >= (last := run.config.replay_until or run.config.max_steps):
        print(
            f"nothing is left to train: step {step} is done, and the last step is {last}; raise max_steps",
            flush=True,
        )
        return logger
    record(run.config)
    if step:
        print(f"continuing after step {step} of {run.config.run_dir}\n", flush=True)
    return logger


def main(train: Callable[[TrainConfig], None], argv: list[str] | None = None) -> int:
    """Run train.py with the arguments `argv` and return the exit code. In mode=train, `main` calls `train`.

    The default of `argv` is the command line of this process.
    """
    collect_garbage_rarely()
    torch.set_num_threads(
        1
    )  # on shared cores, a small model is faster with one thread than with several
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # After SIGTERM, rank 0 ends the processes that it has started. The other ranks start no processes, so SIGTERM may
    # kill these ranks at once.
    if os.environ.get("RANK", "0") == "0":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # If a shell starts a process in the background, the process ignores SIGINT until it sets a handler for SIGINT.
    on_ctrl_c(signal.default_int_handler)
    config: TrainConfig | None = None
    code: Any = 0
    try:
        join_ranks()
        config = agree(lambda: load(sys.argv[1:] if argv is None else argv))
        if config.dry_run:
            agree(lambda: print(read_run(config)[2]))
        elif config.mode == "train":
            train(config)
        else:
            with open_run(config) as run:
                if dist.get_rank() == 0:
                    record(config)
                    evaluate_run(run)
        leave_ranks()
    except KeyboardInterrupt:
        print("interrupted; every process of the run has ended", file=sys.stderr)
        code = 130
    except SystemExit as error:  # after SIGTERM, or if `agree` ends this rank
        code = error.code
    except Exception as error:
        is_known = isinstance(error, (ConfigError, Differs, ProcessDied, Unhealthy))
        text = str(error) if is_known else describe(error)
        if config and not (is_known or config.dry_run):  # a dry run has no folder for the traceback
            text = report(error, config.run_dir / "logs" / FAILURES)
        print(f"error: {text}", file=sys.stderr)
        code = 2 if isinstance(error, ConfigError) else 1
    has_failed = code not in (0, 2) and os.environ.get("RANK", "0") == "0"
    if has_failed and config and not (config.replay or config.dry_run):
        say_how_to_go_on(config)
    return code
