"""Start the parts of a run: the trainer's models, and the rollout side.

The rollout side is the engine, the proxies, an executor for training and an executor for evaluation:

    inference servers  <-  RemoteInfEngine  <-  proxies  <-  WorkflowExecutor (training), WorkflowExecutor (evaluation)

In the diagram each part uses the parts to its left. The processes of the servers and the proxies start at the same
time, and some of them import their modules even earlier (early.py). A proxy imports its modules, and then waits for its
keys. The run sends each proxy its keys as soon as all servers answer requests. The run's ExitStack ends the parts of
the diagram from right to left. Only rank 0 has a rollout side; the other ranks have a `NoRollout`.

Servers that were running before the run began (rollout.server_addrs) may be paused or may have the weights of another
run. A training run resumes the servers in rollout.server_addrs, aborts their running generations, and gives their
weights a label that no engine accepts. The trainer's first push gives the servers the trainer's weights and a valid
version. An evaluation changes neither the servers nor their weights.
"""

import json
import secrets
import shutil
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from inference.servers import Servers
from inference.weights import WeightUpdateMeta, label
from inference.wire import EngineError, Wire
from rollout.dispatcher import ServerRestarted
from rollout.executor import ProxyAddress, WorkflowExecutor
from run.inputs import Inputs
from run.keys import TrainConfig
from run.launch import HOLD_SECONDS, Fleet, Planned, own_command
from run.logger import Trace
from run.recover import GroupLog, newest_checkpoint
from run.replay import ReplayExecutor, facts
from run.schedule import EVENTS, FILE, ScheduledEngine
from run.terminal import BEGIN
from training.actor import FSDPEngine, FSDPPPOActor

Keys = tuple[str, ...]  # the admin key of the proxies, and the key of the servers


@dataclass(frozen=True)
class Run:
    """The configuration, inputs and processes of a run, and the ExitStack that ends every part of the run."""

    config: TrainConfig
    inputs: Inputs
    servers: list[Planned]  # inference servers to start; empty on every rank except 0
    fleet: Fleet  # the child processes
    trace: Trace
    stack: ExitStack

    def weight_update_meta(self) -> WeightUpdateMeta:
        """Return the settings of the weight updates. A folder of new weights outside the run's folder is deleted when
        the run ends."""
        config, folder = self.config, self.config.run_dir / "weights"
        if config.weight_update.path is not None:
            folder = Path(config.weight_update.path) / config.experiment_name / config.trial_name
            self.stack.callback(shutil.rmtree, folder, ignore_errors=True)
        return WeightUpdateMeta(**asdict(config.weight_update) | {"path": str(folder)})


class NoRollout:
    """The rollout side of a rank that only trains. The methods of this class do nothing."""

    executor: Any = None

    def pause(self) -> None: ...
    def release_memory(self) -> None: ...
    def resume(self) -> None: ...
    def set_version(self, version: int) -> None: ...


def say_ready(what: str) -> None:
    """Print that a part of the run is ready, and how many seconds have passed since the start of the command."""
    print(f"{what} is ready after {time.monotonic() - BEGIN:.0f} s", flush=True)


def max_restarts(run: Run) -> int:
    """Return how often each server may be started again: 0 in an evaluation, in a replay and with release_memory."""
    config = run.config
    may_restart = (
        run.servers
        and config.mode == "train"
        and not (config.replay or config.server.release_memory)
    )
    return config.server.max_restarts if may_restart else 0


def start_processes(run: Run) -> Keys:
    """Start the inference servers and the proxies, and return at once. Return the keys that the proxies wait for.

    Only rank 0 starts processes. On every rank except 0 the result is ().
    """
    if dist.get_rank() > 0:
        return ()
    servers = [run.fleet.start(planned).url for planned in run.servers]
    proxies = plan_proxies(
        run.config, servers or run.config.rollout.server_addrs, max_restarts(run) > 0
    )
    names = [run.fleet.start(replace(proxy, keys=())).name for proxy in proxies]
    print(
        f"starting {', '.join([*(p.name for p in run.servers), *names])}; logs: {run.fleet.log_dir}",
        flush=True,
    )
    return proxies[0].keys


def start_trainer(run: Run) -> tuple[FSDPPPOActor, FSDPEngine | None]:
    """Load the policy and, if the run has one, the reference model. All ranks call this function."""
    config, ref = run.config, None
    assert config.model_path is not None
    actor = FSDPPPOActor(config.actor, config.model_path)
    run.stack.callback(actor.destroy)
    actor.create_process_group()
    actor.initialize(max_steps=config.max_steps)
    if config.ref.path is not None:
        ref = FSDPEngine(config.actor, config.ref.path)
        run.stack.callback(ref.destroy)
        ref.initialize()
    if dist.get_rank() == 0:
        say_ready("the trainer's model")
    return actor, ref


def start_rollout(run: Run, keys: Keys, groups: GroupLog | None = None) -> tuple[Any, Any]:
    """Start the rollout side. Return the engine and the evaluation executor. The engine's attribute `executor` is the
    training executor. On every rank except 0 the result is (NoRollout(), None).

    The argument `keys` is the result of `start_processes`. `groups` saves each accepted group for a restart. After the
    death of a child process that the run needs, both executors raise ProcessDied in every call that waits for an
    episode.
    """
    if not keys:
        return NoRollout(), None
    config, options, stack = run.config, run.config.rollout, run.stack
    servers, proxies = (
        run.fleet.children[: len(run.servers)],
        run.fleet.children[len(run.servers) :],
    )
    for server in servers:
        server.wait_ready()
        say_ready(server.name)
    addresses = [server.url for server in servers] or config.rollout.server_addrs
    settings = (
        options.pause_mode,
        options.request_timeout,
        options.request_retries,
        options.server_key,
    )
    is_patient = max_restarts(run) > 0
    rollout = ScheduledEngine(
        addresses, *settings, is_patient, schedule=config.run_dir / FILE, replay=config.replay
    )
    rollout.recorded.cut(
        config.replay_until or config.max_steps
    )  # ignore recorded steps after the last step
    stack.callback(rollout.destroy)
    were_up = config.mode == "train" and bool(config.rollout.server_addrs)
    if were_up:
        take_over(rollout)
    rollout.initialize()
    try:
        for child in proxies:
            child.send_keys(keys)
        proxy = ProxyAddress(tuple(child.wait_ready() for child in proxies), keys[0])
    finally:
        if were_up:
            label(rollout.servers.post_all, "0-incomplete")
    say_ready("the proxy")
    if config.mode == "train":
        rollout.proxies = Servers([*proxy.proxy_addr], Wire(key=proxy.admin_key))
        rollout.set_version(0)
        rollout.record_run(facts(), newest_checkpoint(config.run_dir))

    def trace(event: str, task_id: int, **args: Any) -> None:
        run.trace.event(event, task_id, **args)
        if event in EVENTS:
            rollout.record(**{event: task_id, "version": rollout.get_version()})

    executor = (ReplayExecutor if config.replay else WorkflowExecutor)(
        rollout,
        config.rollout,
        tokenizer=run.inputs.tokenizer,
        gconfig=config.gconfig,
        proxy=proxy,
        dump_dir=config.run_dir,
        trace=trace,
        keep=groups.write if groups else None,
        hold_failures=HOLD_SECONDS,
    )
    stack.callback(executor.destroy)
    evaluation = executor.for_evaluation(config.evaluation_gconfig)
    stack.callback(evaluation.destroy)

    def on_restart() -> None:
        for waiting in (executor, evaluation):
            waiting.dispatcher.interrupt(ServerRestarted)

    run.fleet.watch([executor.fail, evaluation.fail], max_restarts(run), on_restart)
    return rollout, evaluation


def take_over(rollout: ScheduledEngine) -> None:
    """Prepare servers that were running before this run, for example servers that a killed run has left paused.

    Resume the servers, end a weight update that a killed run has left open, abort the running generations, and give the
    servers a version that `initialize` can read. `take_over` resumes the servers first, so no server stays paused if
    this run cannot start.
    """
    rollout.servers.refresh()
    rollout.resume()
    with suppress(EngineError):  # a server answers with an error if no update is open
        rollout.servers.post_all("/end_weight_update", {})
    label(rollout.servers.post_all, "0", abort=True)


def plan_proxies(config: TrainConfig, servers: list[str], wait_for_servers: bool) -> list[Planned]:
    """Return the proxies to start for the inference servers `servers`. A new admin key is made for each run.

    With `wait_for_servers`, an agent's request waits while no server is available.
    """
    rollout, gconfig = config.rollout, config.gconfig
    options: dict[str, object] = {
        "--server": servers,
        "--admin-key": "-",
        "--server-key": "-",
        "--model-path": config.tokenizer_path,
        "--seed": gconfig.seed,
        "--sampling": json.dumps(asdict(gconfig.new(n_samples=1))),
        "--schedule": config.run_dir / FILE,
        "--replay": config.replay,
        "--openai": json.dumps(asdict(rollout.openai)),
        "--request-timeout": rollout.request_timeout,
        "--request-retries": rollout.request_retries,
    }
    command = own_command("proxy", options, *["--wait-for-servers"] * wait_for_servers)
    keys = secrets.token_urlsafe(16), rollout.server_key
    return [Planned(f"proxy-{k}", command, keys=keys) for k in range(config.proxy.workers)]
