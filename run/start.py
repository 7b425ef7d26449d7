"""The rollout side of a run: the engine, the proxies and the executors, each started on what stands before it.

    inference servers  <-  RemoteInfEngine  <-  proxies  <-  WorkflowExecutor (training), its sibling (evaluation)

Every started thing is entered in the run's ExitStack, which ends them in the reverse order. Rank 0 alone has a rollout
side; the other ranks have `NoRollout` in its place.

Servers that were up before the run began (rollout.server_addrs) may hold the weights of another run, and may have been
left paused. Training therefore takes them over: it ends what they generate, resumes them, and gives their weights a
label that no engine accepts, until the trainer's first push brings its own weights. Evaluation takes the servers and
their weights as they are.
"""

import json
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from engine import RemoteInfEngine
from inference.weights import label
from rollout.executor import ProxyAddress, WorkflowExecutor
from rollout.trajectory import Trajectory
from run.config import TrainConfig
from run.inputs import Inputs
from run.launch import HOLD_SECONDS, Child, Fleet, Planned, own_command
from run.logger import Trace

# The keys of rollout.openai that the proxy has as options of the same names.
PROXY_KEYS = "session_timeout_seconds chat_template_type tool_call_parser reasoning_parser fixed_sampling"


@dataclass(frozen=True)
class Run:
    """What a run was given, and the stack that ends whatever it starts."""

    config: TrainConfig
    inputs: Inputs
    servers: list[Planned]  # inference servers to start; empty on every rank but 0
    fleet: Fleet  # the child processes
    trace: Trace
    stack: ExitStack


class NoRollout:
    """The rollout side of a rank that only trains: it does nothing."""

    executor: Any = None

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def set_version(self, version: int) -> None: ...


def start_rollout(
    run: Run, servers: list[Child], keep: Callable[[int, Trajectory], None] | None = None
) -> tuple[RemoteInfEngine, WorkflowExecutor]:
    """Start the rollout side; return the engine, which holds the executor, and the executor for evaluation.

    `keep(task_id, group)` writes each accepted group to where a restart finds it. From now on the death of a child
    process fails whoever waits for an episode.
    """
    config, stack = run.config, run.stack
    addresses = [server.wait_ready() for server in servers] or config.rollout.server_addrs
    rollout = RemoteInfEngine(
        addresses,
        pause_mode=config.rollout.pause_mode,
        request_timeout=config.rollout.request_timeout,
        request_retries=config.rollout.request_retries,
    )
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
    executor = WorkflowExecutor(
        rollout,
        config.rollout,
        tokenizer=run.inputs.tokenizer,
        gconfig=config.gconfig,
        proxy=proxy,
        dump_dir=config.run_dir,
        trace=run.trace.event,
        keep=keep,
        hold_failures=HOLD_SECONDS,
    )
    stack.callback(executor.destroy)
    evaluation = executor.for_evaluation()
    stack.callback(evaluation.destroy)
    run.fleet.watch(on_death=[executor.fail, evaluation.fail])
    return rollout, evaluation


def start_proxies(config: TrainConfig, fleet: Fleet, servers: list[str]) -> ProxyAddress:
    """Start the proxies over these servers; return their addresses and the key of their management endpoints."""
    openai, gconfig = config.rollout.openai, config.gconfig
    options: dict[str, object] = {
        "--server": servers,
        "--model-path": config.tokenizer_path,
        "--seed": gconfig.seed,
        "--sampling": json.dumps(asdict(gconfig.new(n_samples=1))),
        "--side-conversations": json.dumps(openai.side_conversations),
    }
    for keys, names in ((config.rollout, "request_timeout request_retries"), (openai, PROXY_KEYS)):
        options |= {f"--{name.replace('_', '-')}": getattr(keys, name) for name in names.split()}
    command, key = own_command("proxy", options), secrets.token_urlsafe(16)  # a new key for each run
    environment = {"NANO_AREAL_ADMIN_KEY": key}
    planned = [Planned(f"proxy-{k}", command, environment=environment) for k in range(config.proxy.workers)]
    children = [fleet.start(proxy) for proxy in planned]
    return ProxyAddress(tuple(child.wait_ready() for child in children), key)
