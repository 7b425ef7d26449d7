"""Start the rollout side of a run: the engine, the proxies, an executor for training and an executor for evaluation.

    inference servers  <-  RemoteInfEngine  <-  proxies  <-  WorkflowExecutor (training), WorkflowExecutor (evaluation)

Each part uses the parts to its left, so the parts are started from left to right. The run's ExitStack ends the parts in
the reverse order. Only rank 0 has a rollout side; the other ranks have a `NoRollout`.

Servers that were running before the run began (rollout.server_addrs) may be paused or may have the weights of another
run. A training run therefore aborts the running generations of these servers, resumes the servers, and gives their
weights a label that no engine accepts. The trainer's first push replaces the weights and the label. Evaluation uses the
servers and their weights unchanged.
"""

import json
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inference.servers import Servers
from inference.weights import WeightUpdateMeta, label
from inference.wire import Wire
from rollout.executor import ProxyAddress, WorkflowExecutor
from rollout.trajectory import Trajectory
from run.inputs import Inputs
from run.keys import TrainConfig
from run.launch import HOLD_SECONDS, Child, Fleet, Planned, own_command
from run.logger import Trace
from run.recover import newest_checkpoint
from run.replay import ReplayExecutor, facts
from run.schedule import EVENTS, FILE, ScheduledEngine

# The keys of rollout.openai that are also command-line options of the proxy.
PROXY_KEYS = "session_timeout_seconds chat_template_type tool_call_parser reasoning_parser store fixed_sampling"

Keep = Callable[[int, Trajectory], None]  # keep(task_id, group) saves a finished group for a restart


@dataclass(frozen=True)
class Run:
    """The configuration, inputs and processes of a run, and the ExitStack that ends every part of the run."""

    config: TrainConfig
    inputs: Inputs
    servers: list[Planned]  # inference servers to start; empty on every rank except 0
    fleet: Fleet  # the child processes
    trace: Trace
    stack: ExitStack


class NoRollout:
    """The rollout side of a rank that only trains. Its methods do nothing."""

    executor: Any = None

    def pause(self) -> None: ...
    def update_weights(self, meta: WeightUpdateMeta) -> None: ...
    def resume(self) -> None: ...
    def set_version(self, version: int) -> None: ...


def start_rollout(run: Run, servers: list[Child], keep: Keep | None = None) -> tuple[ScheduledEngine, WorkflowExecutor]:
    """Start the rollout side. Return the engine (with the training executor in it) and the evaluation executor.

    `keep(task_id, group)` saves each accepted group for a restart. After the death of a child process that the run
    needs, both executors raise ProcessDied in every call that waits for an episode.
    """
    config, options, stack = run.config, run.config.rollout, run.stack
    begin = time.monotonic()
    addresses = [server.wait_ready() for server in servers] or config.rollout.server_addrs
    print(f"the inference server is up after {time.monotonic() - begin:.0f} s; logs: {run.fleet.log_dir}", flush=True)
    settings = options.pause_mode, options.request_timeout, options.request_retries, options.server_key
    rollout = ScheduledEngine(addresses, *settings, schedule=config.run_dir / FILE, replay=config.replay)
    stack.callback(rollout.destroy)
    were_up = config.mode == "train" and bool(config.rollout.server_addrs)
    if were_up:
        rollout.servers.refresh()
        label(rollout.servers.post_all, "0", abort=True)
        rollout.resume()
    rollout.initialize()
    try:
        proxy = start_proxies(config, run.fleet, addresses)
    finally:
        if were_up:
            label(rollout.servers.post_all, "0-incomplete")
    print(f"the proxy is up after {time.monotonic() - begin:.0f} s; the first episodes begin", flush=True)
    if config.mode == "train":
        rollout.proxies = Servers([*proxy.proxy_addr], Wire(key=proxy.admin_key))
        rollout.set_version(0)
        rollout.record(run=facts(), step=newest_checkpoint(config.run_dir))

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
        keep=keep,
        hold_failures=HOLD_SECONDS,
    )
    stack.callback(executor.destroy)
    evaluation = executor.for_evaluation()
    stack.callback(evaluation.destroy)
    run.fleet.watch(on_death=[executor.fail, evaluation.fail])
    return rollout, evaluation


def weights_folder(run: Run) -> str:
    """Return the folder of new weights (mode disk). A folder outside the run's folder is deleted when the run ends."""
    config = run.config
    if config.weight_update.path is None:
        return str(config.run_dir / "weights")
    folder = Path(config.weight_update.path) / config.experiment_name / config.trial_name
    run.stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return str(folder)


def start_proxies(config: TrainConfig, fleet: Fleet, servers: list[str]) -> ProxyAddress:
    """Start proxies that use these servers. Return the proxies' addresses and their admin key."""
    openai, gconfig = config.rollout.openai, config.gconfig
    options: dict[str, object] = {
        "--server": servers,
        "--admin-key": "-",
        "--server-key": "-",
        "--model-path": config.tokenizer_path,
        "--seed": gconfig.seed,
        "--sampling": json.dumps(asdict(gconfig.new(n_samples=1))),
        "--schedule": config.run_dir / FILE,
        "--replay": config.replay,
        "--limits": json.dumps(asdict(openai.limits)),
        "--side-conversations": json.dumps(openai.side_conversations),
    }
    for keys, names in ((config.rollout, "request_timeout request_retries"), (openai, PROXY_KEYS)):
        options |= {f"--{name.replace('_', '-')}": getattr(keys, name) for name in names.split()}
    command, key = own_command("proxy", options), secrets.token_urlsafe(16)  # a new key for each run
    secret_lines = key, config.rollout.server_key
    planned = [Planned(f"proxy-{k}", command, keys=secret_lines) for k in range(config.proxy.workers)]
    children = [fleet.start(proxy) for proxy in planned]
    return ProxyAddress(tuple(child.wait_ready() for child in children), key)
