"""The command line of train.py.

`main` reads the configuration, locks the run's folder, trains or evaluates, and ends every process.

    main
      join_ranks           connect the ranks of torchrun; without torchrun this process is rank 0 of 1
      agree_on_run         rank 0 reads the configuration and locks the run's folder; all ranks get the configuration
      start_run            write config.yaml, then train (train.py) or evaluate
      ExitStack            end every part that was started, in the reverse order
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
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from transformers.utils import logging as transformers_logging

from run.config import ConfigError, TrainConfig, changed, load
from run.evaluate import evaluate_run
from run.inputs import Inputs, load_inputs
from run.launch import Fleet, Planned, ProcessDied, plan_run, revision
from run.logger import Trace
from run.recover import claim
from run.report import write_report
from run.start import Run
from training.ranks import join_ranks, leave_ranks, share

Train = Callable[[Run], None]  # the function that trains, which train.py passes to `main`


def read_run(argv: list[str], stack: ExitStack) -> tuple[TrainConfig, Inputs, list[Planned]]:
    """Return the configuration, the inputs and the servers to start. `stack` holds the lock of the run's folder."""
    config = load(argv)
    if config.trial_name == "auto":
        config.trial_name = time.strftime("%Y%m%d-%H%M%S")
    can_continue = config.mode == "eval" or (config.recover == "auto" and (config.run_dir / "recover").exists())
    if (config.run_dir / "metrics.jsonl").exists() and not can_continue:
        raise ConfigError(f"{config.run_dir} holds a run that recover=off cannot continue; give another trial_name")
    inputs = load_inputs(config)
    servers, plan = plan_run(config)
    if config.dry_run:
        print(plan)
    else:
        stack.enter_context(claim(config.run_dir))
    return config, inputs, servers


def agree_on_run(argv: list[str], stack: ExitStack) -> tuple[TrainConfig, Inputs, list[Planned]]:
    """Call `read_run` on rank 0 and send the configuration to all ranks.

    If the configuration is wrong, rank 0 raises ConfigError and every other rank ends.
    """
    if dist.get_rank() == 0:
        try:
            config, inputs, servers = read_run(argv, stack)
        except (ConfigError, SystemExit) as error:
            share(error)
            leave_ranks()
            raise
        share(config)
        return config, inputs, servers
    answer = share(None)
    if isinstance(answer, BaseException):
        leave_ranks()
        raise SystemExit(getattr(answer, "code", 2))
    return answer, load_inputs(answer), []


def start_run(config: TrainConfig, inputs: Inputs, servers: list[Planned], stack: ExitStack, train: Train) -> None:
    """Write the resolved configuration, then train or evaluate. `stack` ends every part that the run starts."""
    run_dir, is_first, training = config.run_dir, dist.get_rank() == 0, config.mode == "train"
    if config.actor.offload:  # the optimizer runs on the CPU: the ranks of a machine share the cores
        torch.set_num_threads(max((os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1))
    fleet = Fleet(run_dir / "logs")
    if is_first and training:
        stack.callback(write_report, run_dir)  # called last, when the trace is closed; also after a failure
    stack.callback(fleet.stop)
    trace = Trace(run_dir / "trace.json" if is_first and training and config.rollout.enable_tracing else None)
    stack.callback(trace.close)
    if is_first:
        path = run_dir / ("config.yaml" if training else "eval.yaml")
        if training and (changes := changed(path, config)):
            print(f"the configuration of this run changes: {', '.join(changes)}")
        keys = asdict(config)
        del keys["rollout"]["server_key"]  # no file of the run shows the servers' key
        OmegaConf.save({**keys, "revision": revision()}, path)
    run = Run(config, inputs, servers, fleet, trace, stack)
    try:
        if training:
            train(run)
        elif is_first:
            evaluate_run(run)
    except BaseException as error:
        trace.mark("end", error=repr(error))
        if isinstance(error, Exception):
            fleet.raise_death(error)  # a refused connection may come from the death of a server process
        raise


def main(train: Train, argv: list[str] | None = None) -> int:
    """Run train.py with the arguments `argv` and return the exit code. In mode=train, `main` calls `train`.

    The default of `argv` is the command line of this process.
    """
    torch.set_num_threads(1)  # small models on shared cores are slower with more threads
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else a shell's background job ignores Ctrl-C
    if os.environ.get("RANK", "0") == "0":  # other ranks start no processes: SIGTERM may kill them at once
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as stack:  # the block prints an error before the stack ends the processes
        try:
            join_ranks()
            config, inputs, servers = agree_on_run(sys.argv[1:] if argv is None else argv, stack)
            if not config.dry_run:
                start_run(config, inputs, servers, stack, train)
        except (ConfigError, ProcessDied) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2 if isinstance(error, ConfigError) else 1
        except KeyboardInterrupt:
            print("interrupted; ending every process of the run", file=sys.stderr)
            return 130
        except Exception:  # any other failure of the run: print the traceback and end with code 1
            traceback.print_exc()
            return 1
    leave_ranks()
    return 0
