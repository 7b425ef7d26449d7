"""Train a language-model agent with asynchronous reinforcement learning: the loop of AReaL, top to bottom.

    python train.py                                   the demo: an agent learns to guess a number
    python train.py --config configs/maze.yaml        long answers, generation and training overlapped
    python train.py seed=2 rollout.max_head_offpolicyness=0      the same loop, synchronous
    python train.py mode=eval model_path=DIR          the same agents, only evaluated
    torchrun --nproc-per-node=4 train.py ...          the trainer on four ranks

The processes. This one trains, and runs the agents' episodes in a thread of its own. An inference server generates
tokens in a second process, the proxy turns agents' HTTP requests into token-exact prompts in a third. While a step
is trained here, the next episodes are already being generated there, by weights that are up to
`rollout.max_head_offpolicyness` versions older.

The loop (`PPOTrainer.train`, appendix A.1 of the write-up). Each step takes a batch in the order in which its episodes
started, recomputes the log-probabilities of its tokens under the current weights (the proximal policy), makes
advantages of rewards, takes a few optimizer steps of decoupled PPO, and pushes the weights: pause, push, version + 1,
resume. Running generations are interrupted at that moment and go on afterwards; every token keeps the version of
the weights that computed it. Versions count from 0, steps from 1: step s consumes at version s - 1 and makes s.

Synchronous training is not another program: with max_head_offpolicyness=0 the gate lets the next episodes start
only when the new weights are there.

Under torchrun every rank runs this loop. Rank 0 alone has the rollout side; where the loop speaks to it, the others
have a stand-in that does nothing. All have the same batch, and divide the work on it (training/actor.py).

How it ends. Everything that is started is entered in one ExitStack and ended in reverse: the episodes, the engine's
connections, the child processes. Ctrl-C, an exception and a dead server all leave through it. What does not, kill -9,
costs the steps since the last checkpoint: the same command goes on from there (run/recover.py).
"""

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.utils import logging as transformers_logging

from engine import RemoteInfEngine
from inference.weights import WeightUpdateMeta, label
from ppo import describe_mode
from rollout.executor import ProxyAddress, WorkflowExecutor
from rollout.trajectory import Trajectory
from run.config import ConfigError, TrainConfig, changed, load
from run.evaluate import evaluate, evaluate_endpoint
from run.inputs import Inputs, load_inputs
from run.launch import HOLD_SECONDS, Child, Fleet, Planned, ProcessDied, plan_run, revision, start_proxies
from run.logger import Logger, Trace, describe_batch
from run.recover import Recovery, claim, folders_of_steps
from run.summary import summarise
from training.actor import FSDPEngine, FSDPPPOActor
from training.ranks import join_ranks, leave_ranks, share


@dataclass(frozen=True)
class Run:
    """What a run is given, and what ends it."""

    config: TrainConfig
    inputs: Inputs
    servers: list[Planned]  # to be started; none on ranks that only train
    fleet: Fleet
    trace: Trace
    stack: ExitStack  # ends in reverse all that is started


class NoRollout:
    """The rollout side, as the ranks see it that only train: it is rank 0's."""

    executor: Any = None

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def set_version(self, version: int) -> None: ...


class PPOTrainer:
    """The policy, its reference, the rollout side and the data, all running, at the step of the newest checkpoint."""

    def __init__(self, run: Run) -> None:
        """Start everything; `run.stack` ends it in reverse."""
        self.run, config, stack = run, run.config, run.stack
        # 1. The inference servers start while the trainer's model is loaded.
        self.recovery = Recovery(config.run_dir, config.recover)
        servers = [run.fleet.start(planned) for planned in run.servers]
        assert config.model_path is not None
        self.actor = actor = FSDPPPOActor(config.actor, config.model_path)
        stack.callback(actor.destroy)
        actor.create_process_group()
        actor.initialize(max_steps=config.max_steps)
        self.ref = None
        if config.ref.path is not None:
            self.ref = FSDPEngine(config.actor, config.ref.path)
            stack.callback(self.ref.destroy)
            self.ref.initialize()

        # 2. The rollout side, and what it rolls out.
        self.rollout: RemoteInfEngine | NoRollout = NoRollout()
        self.evaluation: WorkflowExecutor | None = None
        if actor.rank == 0:
            keep = self.recovery.groups.write if self.recovery.groups else None
            self.rollout, self.evaluation = start_rollout(run, servers, keep)
        path = str(config.run_dir / "weights")
        actor.connect_engine(self.rollout, WeightUpdateMeta(path=path, **asdict(config.weight_update)))
        self.train_dataloader: DataLoader = DataLoader(
            run.inputs.dataset,  # type: ignore[arg-type]
            batch_size=config.train_dataset.batch_size,
            shuffle=config.train_dataset.shuffle,
            generator=torch.Generator().manual_seed(config.seed),
            collate_fn=list,
        )

        # 3. Where the run was when it was killed; the servers, too, and those that were up before it began.
        self.step = self.recovery.load(actor, self.rollout.executor)
        if self.step or config.rollout.server_addrs:
            self.push_weights(self.step)

    def train(self, logger: Logger | None) -> None:
        """Appendix A.1. Rank 0 alone has a logger."""
        config, inputs, trace = self.run.config, self.run.inputs, self.run.trace
        actor, ref, rollout = self.actor, self.ref, self.rollout
        for step in range(self.step + 1, config.max_steps + 1):
            begin, seconds = time.monotonic(), dict[str, float]()

            # 1. A batch, in the order of start: at most eta versions old, or an error says so.
            with trace.span("rollout_wait", seconds):
                batch = actor.prepare_batch(
                    self.train_dataloader,
                    workflow=inputs.workflow,
                    should_accept_fn=config.should_accept_fn,
                    group_size=config.rollout.group_size,
                )
            version = actor.get_version()
            metrics: dict[str, Any] = {"step": step, "version": version, **describe_batch(batch, version)}

            with trace.span("train", seconds):
                # 2. pi_prox: the policy at the start of this step, the centre of the clip.
                if actor.should_compute_prox_logp():
                    batch["prox_logp"] = actor.compute_logp(batch)
                # 3. The reference policy of the KL penalty.
                if ref is not None:
                    batch["ref_logp"] = ref.compute_logp(batch)
                metrics["logp_mismatch"] = logp_mismatch(batch, actor, rollout)
                # 4. and 5. Advantages, then a few optimizer steps.
                actor.compute_advantages(batch)
                metrics |= actor.ppo_update(batch)
                actor.step_lr_scheduler()

            # 6. New weights for the servers: pause, push, version, resume.
            with trace.span("sync", seconds):
                self.push_weights(step)

            # 7. Evaluate, save, report; then the checkpoint that a restart goes on from.
            last = step == config.max_steps
            if self.evaluation and config.evaluator.interval and step % config.evaluator.interval == 0:
                metrics |= evaluate(self.evaluation, inputs)
            if last or (config.saver.interval and step % config.saver.interval == 0):
                save(actor, config.run_dir / "checkpoints", step, config.saver.keep)
            if logger:
                metrics |= {"success": inputs.success(batch["rewards"].tolist()), **seconds}
                logger.log(batch, metrics | {"step_s": time.monotonic() - begin})
            if self.recovery.on and (last or step % config.recover_interval == 0):
                self.recovery.save(step, actor, rollout.executor)

    def push_weights(self, version: int) -> None:
        """Pause, push, version, resume: what is being generated goes on under the new weights, token by token."""
        self.rollout.pause()
        self.actor.update_weights(self.actor.weight_update_meta.with_version(version))
        self.actor.set_version(version)
        self.rollout.set_version(version)
        self.rollout.resume()


def logp_mismatch(batch: dict[str, Tensor], actor: FSDPPPOActor, rollout: RemoteInfEngine | NoRollout) -> float:
    """max |log p_server - log p_trainer| over tokens that both computed with the same weights.

    Those are the batch's own tokens of the current version, and, since an asynchronous batch may hold none, a row
    or two of it that the server scores now.
    """
    differences = [torch.zeros(1)]
    if "prox_logp" in batch:
        own = batch["loss_mask"].bool() & (batch["versions"] == actor.get_version())
        differences.append((batch["logprobs"] - batch["prox_logp"])[own])
    rows = {k: v[:2] for k, v in batch.items()}
    rows["temperatures"] = torch.ones_like(rows["temperatures"])
    trainer = actor.compute_logp(rows)  # (2, T)
    if isinstance(rollout, RemoteInfEngine):
        ids = [row[mask].tolist() for row, mask in zip(rows["input_ids"], rows["attention_mask"], strict=True)]
        for mine, theirs in zip(trainer, rollout.score(ids), strict=True):
            differences.append(mine[1 : len(theirs)] - torch.tensor(theirs[1:]))
    return torch.cat(differences).abs().nan_to_num(torch.inf).max().item()


def save(actor: FSDPPPOActor, folder: Path, step: int, keep: int) -> None:
    """A Hugging Face directory `step00040`; the newest `keep` stay, and none of a lineage that a restart has cut."""
    actor.save(folder / f"step{step:05d}")
    if actor.rank == 0:
        steps = folders_of_steps(folder)
        ours = sorted(k for k in steps if k <= step)[-keep:]
        for old in steps.keys() - set(ours):
            shutil.rmtree(steps[old])


def start_rollout(
    run: Run, servers: list[Child], keep: Callable[[int, Trajectory], None] | None = None
) -> tuple[RemoteInfEngine, WorkflowExecutor]:
    """The engine speaks to the servers, the proxy to the agents, the executor runs the episodes, its sibling evaluates.
    A process that dies fails the run wherever it is waiting."""
    config, fleet, stack = run.config, run.fleet, run.stack
    addresses = [server.wait_ready() for server in servers] or config.rollout.server_addrs
    rollout = RemoteInfEngine(
        addresses,
        pause_mode=config.rollout.pause_mode,
        request_timeout=config.rollout.request_timeout,
        request_retries=config.rollout.request_retries,
    )
    stack.callback(rollout.destroy)
    found = config.mode == "train" and config.rollout.server_addrs
    if found:  # an earlier run may have died in an update
        rollout.servers.refresh()
        label(rollout.servers.post_all, "0", abort=True)
        rollout.resume()
    rollout.initialize()
    try:
        proxy = ProxyAddress(*start_proxies(config, fleet, addresses))
    finally:
        if found:  # until they get ours
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
    fleet.watch(on_death=[executor.fail, evaluation.fail])
    return rollout, evaluation


def run_training(run: Run) -> None:
    """mode=train, from the first word to the summary."""
    if dist.get_rank():
        return PPOTrainer(run).train(None)
    print(f"{describe_mode(run.config.actor)}\nstarting the inference server and the proxy", flush=True)
    trainer = PPOTrainer(run)
    if trainer.step:
        print(f"going on after step {trainer.step} of {run.config.run_dir}", flush=True)
    logger = Logger(run.config, trainer.rollout.executor)
    with logger.live or nullcontext():
        trainer.train(logger)
    summarise(logger, run.inputs.task)


def run_evaluation(run: Run) -> None:
    """mode=eval: print the statistics and write them to eval.json. Rank 0 does it."""
    if dist.get_rank():
        return
    if run.config.evaluator.base_url:
        found = evaluate_endpoint(run.config, run.inputs)
    else:
        _, executor = start_rollout(run, [run.fleet.start(planned) for planned in run.servers])
        found = evaluate(executor, run.inputs)
    (run.config.run_dir / "eval.json").write_text(json.dumps(found))
    if found["eval_episodes"] == found["eval_rejected"]:
        raise RuntimeError("no episode of the evaluation brought a reward: each failed (said above) or set none")
    print("  ".join(f"{key} {value:.4g}" for key, value in found.items() if value is not None))


def configure(argv: list[str], stack: ExitStack) -> tuple[TrainConfig, Inputs, list[Planned]]:
    """The configuration, what it names, and the servers to start. Rank 0 reads it, names the run and makes the base
    model; all ranks agree, and where it cannot run they end together."""
    config: Any
    first = dist.get_rank() == 0
    inputs, servers = None, list[Planned]()
    try:
        config, inputs, servers = read(argv, stack) if first else (None, None, [])
    except (ConfigError, SystemExit) as error:
        config = error
    config = share(config)
    if isinstance(config, BaseException):
        leave_ranks()
        raise config if first else SystemExit(getattr(config, "code", 2))  # rank 0 alone says why
    return config, inputs or load_inputs(config), servers


def read(argv: list[str], stack: ExitStack) -> tuple[TrainConfig, Inputs, list[Planned]]:
    """What `configure` promises, on rank 0; until `stack` ends, the run's folder is this process's own."""
    config = load(argv)
    if config.trial_name == "auto":
        config.trial_name = time.strftime("%Y%m%d-%H%M%S")
    can_go_on = config.mode == "eval" or (config.recover == "auto" and (config.run_dir / "recover").exists())
    if (config.run_dir / "metrics.jsonl").exists() and not can_go_on:
        reason = "holds a run that cannot be gone on with (recover=off)"
        raise ConfigError(f"{config.run_dir} {reason}; give another trial_name")
    inputs = load_inputs(config)
    servers, plan = plan_run(config)
    if config.dry_run:
        print(plan)
    else:
        stack.enter_context(claim(config.run_dir))
    return config, inputs, servers


def start(config: TrainConfig, inputs: Inputs, servers: list[Planned], stack: ExitStack) -> None:
    """One run; `stack` ends what it starts."""
    run_dir, first, training = config.run_dir, dist.get_rank() == 0, config.mode == "train"
    fleet = Fleet(run_dir / "logs")
    stack.callback(fleet.stop)
    trace = Trace(run_dir / "trace.json" if first and training and config.rollout.enable_tracing else None)
    stack.callback(trace.close)
    if first:
        path = run_dir / ("config.yaml" if training else "eval.yaml")
        if training and (changes := changed(path, config)):
            print(f"the configuration of this run changes: {', '.join(changes)}")
        OmegaConf.save({**asdict(config), "revision": revision()}, path)
    run = Run(config, inputs, servers, fleet, trace, stack)
    try:
        run_training(run) if training else run_evaluation(run)
    except Exception as error:
        fleet.raise_death(error)  # the reason behind a refused connection
        raise


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0; 1 for a run that failed, 2 for a configuration that cannot run, 130 for Ctrl-C."""
    torch.set_num_threads(1)  # small models: more threads on shared cores are slower
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    if os.environ.get("RANK", "0") == "0":  # the others have nothing to end, and may be where no handler runs
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as stack:  # an error is told first, and what was started is ended after it
        try:
            join_ranks()
            config, inputs, servers = configure(sys.argv[1:] if argv is None else argv, stack)
            if not config.dry_run:
                start(config, inputs, servers, stack)
        except (ConfigError, ProcessDied) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2 if isinstance(error, ConfigError) else 1
        except KeyboardInterrupt:
            print("interrupted; ending every process of the run", file=sys.stderr)
            return 130
        except Exception:  # the one place that ends a failed run
            traceback.print_exc()
            return 1
    leave_ranks()
    return 0


if __name__ == "__main__":
    sys.exit(main())
