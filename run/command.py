"""Read the command line of train.py, and start and end a run.

`open_run` starts a run on every rank, and at the end stops every part of the run. `main` reads the command line, then
trains or evaluates.

    main
      join_ranks           connect the ranks of torchrun; without torchrun this process is rank 0 of 1
      agree                rank 0 reads the configuration, and all ranks get it
      open_run             rank 0 loads the inputs, plans the servers and locks the run's folder
        PPOTrainer.train   train (train.py); or evaluate_run: evaluate
        ExitStack          end every part that was started, in the reverse order
      leave_ranks          disconnect the ranks

After Ctrl-C, an exception or the death of a server process, the ExitStack also ends every process. The exit code is 0
for success, 1 for a run that failed, 2 for a wrong configuration, and 130 for Ctrl-C. A run that was ended by `kill -9`
loses the steps since its last checkpoint. The same command continues the run from its last checkpoint (run/recover.py).
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from transformers.utils import logging as transformers_logging

from run.config import ConfigError, TrainConfig, changed, load
from run.doctor import Unhealthy
from run.evaluate import evaluate_run
from run.inputs import Inputs, load_inputs
from run.launch import Fleet, Planned, ProcessDied, plan_run, revision
from run.logger import Trace
from run.recover import claim
from run.report import write_report
from run.start import Run
from training.ranks import join_ranks, leave_ranks, share


def agree(read: Callable[[], Any]) -> Any:
    """Call `read` on rank 0, and return its result on every rank.

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
    """Name the run and check its folder. Return the inputs, the servers to start, and the plan as text.

    `agent` may be a workflow and its arguments, which then replace those of the configuration. Raises ConfigError.
    """
    if config.trial_name == "auto":
        config.trial_name = time.strftime("%Y%m%d-%H%M%S")
    can_continue = config.mode == "eval" or (config.recover == "auto" and (config.run_dir / "recover").exists())
    if (config.run_dir / "metrics.jsonl").exists() and not can_continue:
        raise ConfigError(f"{config.run_dir} holds a run that recover=off cannot continue; give another trial_name")
    return load_inputs(config, *agent), *plan_run(config)


@contextmanager
def open_run(config: TrainConfig, *agent: Any) -> Iterator[Run]:
    """Start a run on every rank. When the block ends, end every part that the run has started.

    `agent` may be a workflow and its arguments, which then replace those of the configuration. Raises ConfigError.
    """
    joined = join_ranks()
    with ExitStack() as stack:
        loaded: list[Any] = []  # on rank 0: the inputs, the servers to start and the plan

        def read() -> TrainConfig:
            loaded.append(read_run(config, *agent))
            stack.enter_context(claim(config.run_dir))
            return config

        config = agree(read)
        inputs, servers, _ = loaded[0] if loaded else (load_inputs(config, *agent), [], "")
        if config.actor.offload:  # the optimizer runs on the CPU: the ranks of a machine share the cores
            torch.set_num_threads(max((os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1))
        fleet = Fleet(config.run_dir / "logs")
        if loaded and config.mode == "train":
            stack.callback(write_report, config.run_dir)  # runs last, after the trace is closed; also on failure
        stack.callback(fleet.stop)
        traced = loaded and config.mode == "train" and config.rollout.enable_tracing
        trace = Trace(config.run_dir / "trace.json" if traced else None)
        stack.callback(trace.close)
        try:
            yield Run(config, inputs, servers, fleet, trace, stack)
        except BaseException as error:
            trace.mark("end", error=repr(error))
            if isinstance(error.__cause__, Unhealthy):  # the doctor's thread has stopped the rollout
                raise error.__cause__ from None
            if isinstance(error, Exception):
                fleet.raise_death(error)  # the death of a server process may have caused the error
            raise
    if joined:
        leave_ranks()


def record(config: TrainConfig) -> None:
    """Write the resolved configuration to the run's folder, and print what has changed since the run's last start."""
    path = config.run_dir / ("config.yaml" if config.mode == "train" else "eval.yaml")
    if config.mode == "train" and (changes := changed(path, config)):
        print(f"the configuration of this run changes: {', '.join(changes)}")
    keys = asdict(config)
    del keys["rollout"]["server_key"]  # the key must not be in any file of the run
    OmegaConf.save({**keys, "revision": revision()}, path)


def main(train: Callable[[TrainConfig], None], argv: list[str] | None = None) -> int:
    """Run train.py with the arguments `argv` and return the exit code. In mode=train, `main` calls `train`.

    The default of `argv` is the command line of this process.
    """
    torch.set_num_threads(1)  # small models on shared cores are slower with more threads
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # without this, a shell's background job ignores Ctrl-C
    if os.environ.get("RANK", "0") == "0":  # other ranks start no processes: SIGTERM may kill them at once
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
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
    except (ConfigError, ProcessDied, Unhealthy) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("interrupted; every process of the run has ended", file=sys.stderr)
        return 130
    except Exception:  # any other failure of the run: print the traceback and end with code 1
        traceback.print_exc()
        return 1
    leave_ranks()
    return 0
