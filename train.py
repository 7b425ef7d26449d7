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

The loop (`train`, appendix A.1 of the write-up). Each step takes a batch in the order in which its episodes
started, recomputes the log-probabilities of its tokens under the current weights (the proximal policy), makes
advantages of rewards, takes a few optimizer steps of decoupled PPO, and pushes the weights: pause, push, version + 1,
resume. Running generations are interrupted at that moment and go on afterwards; every token keeps the version of
the weights that computed it. Versions count from 0, steps from 1: step s consumes at version s - 1 and makes s.

Synchronous training is not another program: with max_head_offpolicyness=0 the gate lets the next episodes start
only when the new weights are there.

Under torchrun every rank runs this loop. Rank 0 alone has the rollout side; where the loop speaks to it, the others
have a stand-in that does nothing. All have the same batch, and divide the work on it (actor.py).

How it ends. Everything that is started is entered in one ExitStack and ended in reverse: the episodes, the engine's
connections, the child processes. Ctrl-C, an exception and a dead server all leave through it. What does not, kill -9,
costs the steps since the last checkpoint: the same command goes on from there (plumbing/recover.py).
"""

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from actor import FSDPEngine, FSDPPPOActor
from engine import RemoteInfEngine
from executor import ProxyAddress, WorkflowExecutor
from plumbing.config import ConfigError, TrainConfig, load
from plumbing.evaluate import evaluate, evaluate_endpoint
from plumbing.inputs import Inputs, load_inputs
from plumbing.launch import HOLD_SECONDS, Child, Fleet, ProcessDied, plan_run, revision, start_proxies, start_servers
from plumbing.logger import Logger, Trace, describe_batch
from plumbing.ranks import join_ranks, leave_ranks, share
from plumbing.recover import Recovery
from plumbing.report import summarise
from ppo import describe_mode
from trajectory import Trajectory
from weights import WeightUpdateMeta


class NoRollout:
    """The rollout side, as the ranks see it that only train: it is rank 0's."""

    executor: Any = None

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def set_version(self, version: int) -> None: ...


@dataclass
class Parts:
    """What the loop works with, all of it running."""

    inputs: Inputs
    actor: FSDPPPOActor
    ref: FSDPEngine | None
    rollout: RemoteInfEngine | NoRollout
    evaluation: WorkflowExecutor | None
    train_dataloader: DataLoader
    recovery: Recovery


def train(config: TrainConfig, parts: Parts, run_dir: Path, logger: Logger | None, trace: Trace) -> None:
    """Appendix A.1, from the step after the one that was recovered."""
    inputs, actor, ref, rollout = parts.inputs, parts.actor, parts.ref, parts.rollout
    first = recover(parts) + 1
    if logger:
        logger.count(rollout.executor)
    for step in range(first, config.max_steps + 1):
        begin, seconds = time.monotonic(), dict[str, float]()

        # 1. A batch, in the order of start: at most eta versions old, or an error says so.
        with trace.span("rollout_wait", seconds):
            batch = actor.prepare_batch(
                parts.train_dataloader,
                group_size=config.rollout.group_size,
                workflow=inputs.workflow,
                workflow_kwargs=inputs.workflow_kwargs,
                should_accept_fn=config.should_accept_fn,
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
            push_weights(parts, step)

        # 7. Evaluate, save, report; then the checkpoint that a restart goes on from.
        last = step == config.max_steps
        if parts.evaluation and config.evaluator.interval and step % config.evaluator.interval == 0:
            metrics |= evaluate(parts.evaluation, inputs)
        if last or (config.saver.interval and step % config.saver.interval == 0):
            save(actor, run_dir / "checkpoints", step, config.saver.keep)
        if logger:
            metrics |= {"success": inputs.success(batch["rewards"].tolist()), **seconds}
            logger.tokens(step, batch)
            logger.log(metrics | {"step_s": time.monotonic() - begin}, rollout.executor)
            if config.logger.sample_interval and (step - 1) % config.logger.sample_interval == 0:
                logger.sample(batch, rollout.executor.tokenizer)
        if parts.recovery.on and (last or step % config.recover_interval == 0):
            parts.recovery.save(step, actor, rollout.executor)


def recover(parts: Parts) -> int:
    """Go back to the newest checkpoint, the servers too; its step, 0 if there is none."""
    actor, rollout = parts.actor, parts.rollout
    step = parts.recovery.load(actor, rollout.executor)
    if step:
        push_weights(parts, step)
    return step


def push_weights(parts: Parts, version: int) -> None:
    """Pause, push, version, resume: what is being generated goes on under the new weights, token by token."""
    actor, rollout = parts.actor, parts.rollout
    rollout.pause()
    actor.update_weights(actor.weight_update_meta.with_version(version))
    actor.set_version(version)
    rollout.set_version(version)
    rollout.resume()


def logp_mismatch(batch: dict[str, Tensor], actor: FSDPPPOActor, rollout: RemoteInfEngine | NoRollout) -> float:
    """max |log p_server - log p_trainer| over tokens that both computed with the same weights.

    Those are the batch's own tokens of the current version, and, since an asynchronous batch may hold none, a row
    or two of it that the server scores now.
    """
    worst = 0.0
    if "prox_logp" in batch:
        own = batch["loss_mask"].bool() & (batch["versions"] == actor.get_version())
        worst = (batch["logprobs"] - batch["prox_logp"])[own].abs().max().item() if own.any() else 0.0
    rows = {k: v[:2] for k, v in batch.items()}
    rows["temperatures"] = torch.ones_like(rows["temperatures"])
    trainer = actor.compute_logp(rows)  # (2, T)
    if isinstance(rollout, NoRollout):
        return worst
    ids = [row[mask].tolist() for row, mask in zip(rows["input_ids"], rows["attention_mask"], strict=True)]
    for mine, theirs in zip(trainer, rollout.score(ids), strict=True):
        difference = mine[1 : len(theirs)] - torch.tensor(theirs[1:])
        worst = max(worst, difference.nan_to_num(torch.inf).abs().max().item())
    return worst


def save(actor: FSDPPPOActor, folder: Path, step: int, keep: int) -> None:
    """A Hugging Face directory `step00040`; only the newest `keep` stay."""
    actor.save(folder / f"step{step:05d}")
    if actor.rank == 0:
        steps = {int(path.name.removeprefix("step")): path for path in folder.glob("step*")}
        dead = [k for k in steps if k > step]  # of a lineage that a restart has cut
        for old in dead + sorted(steps.keys() - set(dead))[:-keep]:
            shutil.rmtree(steps[old])


def build(
    config: TrainConfig, inputs: Inputs, run_dir: Path, fleet: Fleet, trace: Trace, recovery: Recovery, stack: ExitStack
) -> Parts:
    """Start everything; `stack` ends it in reverse."""
    # 1. The inference servers start while the trainer's model is loaded.
    servers = start_servers(config, fleet) if dist.get_rank() == 0 else []
    assert config.model_path is not None
    actor = FSDPPPOActor(config.actor, config.model_path)
    stack.callback(actor.destroy)
    actor.create_process_group()
    actor.initialize(max_steps=config.max_steps)
    ref = None
    if config.ref.path is not None:
        ref = FSDPEngine(config.actor, config.ref.path)
        stack.callback(ref.destroy)
        ref.initialize()

    # 2. The rollout side. Each knows of the other; a process that dies fails the run wherever the loop is waiting.
    rollout: RemoteInfEngine | NoRollout = NoRollout()
    evaluation = None
    if actor.rank == 0:
        keep = recovery.groups.write if recovery.groups else None
        rollout, evaluation = build_rollout(config, run_dir, fleet, servers, trace, stack, keep)
    actor.connect_engine(rollout, WeightUpdateMeta(path=str(run_dir / "weights"), **asdict(config.weight_update)))
    loader: DataLoader = DataLoader(
        inputs.dataset,  # type: ignore[arg-type]
        batch_size=config.train_dataset.batch_size,
        shuffle=config.train_dataset.shuffle,
        generator=torch.Generator().manual_seed(config.seed),
        collate_fn=list,
    )
    return Parts(inputs, actor, ref, rollout, evaluation, loader, recovery)


def build_rollout(
    config: TrainConfig,
    run_dir: Path,
    fleet: Fleet,
    servers: list[Child],
    trace: Trace,
    stack: ExitStack,
    keep: Callable[[int, Trajectory], None] | None = None,
) -> tuple[RemoteInfEngine, WorkflowExecutor]:
    """The engine speaks to the servers, the proxy to the agents, the executor runs the episodes,
    its sibling evaluates."""
    addresses = [fleet.wait_ready(server) for server in servers] or config.rollout.server_addrs
    rollout = RemoteInfEngine(
        addresses,
        pause_mode=config.rollout.pause_mode,
        request_timeout=config.rollout.request_timeout,
        request_retries=config.rollout.request_retries,
    )
    stack.callback(rollout.destroy)
    rollout.initialize()
    executor = WorkflowExecutor(
        rollout,
        config.rollout,
        tokenizer=AutoTokenizer.from_pretrained(config.tokenizer_path),
        gconfig=config.gconfig,
        proxy=ProxyAddress(*start_proxies(config, fleet, addresses)),
        dump_dir=run_dir,
        trace=trace.event,
        keep=keep,
        hold_failures=HOLD_SECONDS,
    )
    stack.callback(executor.destroy)
    evaluation = executor.for_evaluation()
    stack.callback(evaluation.destroy)
    fleet.watch(on_death=[executor.fail, evaluation.fail])
    return rollout, evaluation


def configure(argv: list[str]) -> tuple[TrainConfig, Inputs]:
    """The configuration and what it names. Rank 0 reads it, names the run and makes the base model; all ranks agree,
    and where it cannot run they end together."""
    config: Any
    inputs, first = None, dist.get_rank() == 0
    try:
        config, inputs = read(argv) if first else (None, None)
    except (ConfigError, SystemExit) as error:
        config = error
    config = share(config)
    if isinstance(config, BaseException):
        leave_ranks()
        raise config if first else SystemExit(getattr(config, "code", 2))  # rank 0 alone says why
    return config, inputs or load_inputs(config)


def read(argv: list[str]) -> tuple[TrainConfig, Inputs]:
    """What `configure` promises, on rank 0."""
    config = load(argv)
    if config.trial_name == "auto":
        config.trial_name = time.strftime("%Y%m%d-%H%M%S")
    run_dir = run_folder(config)
    can_go_on = config.mode == "eval" or (config.recover == "auto" and (run_dir / "recover").exists())
    if (run_dir / "metrics.jsonl").exists() and not can_go_on:
        reason = "holds a run that cannot be gone on with (recover=off)"
        raise ConfigError(f"{run_dir} {reason}; give another trial_name")
    inputs, plan = load_inputs(config), plan_run(config)
    if config.dry_run:
        print(plan)
    return config, inputs


def run_folder(config: TrainConfig) -> Path:
    return Path(config.fileroot) / config.experiment_name / config.trial_name


def run(config: TrainConfig, inputs: Inputs, stack: ExitStack) -> None:
    """One run, from the configuration to the summary; `stack` ends what it starts."""
    run_dir = run_folder(config)
    run_dir.mkdir(parents=True, exist_ok=True)
    fleet = Fleet(run_dir / "logs")
    stack.callback(fleet.stop)
    trace, training = None, config.mode == "train"
    if dist.get_rank() == 0:
        resolved = OmegaConf.create({**asdict(config), "revision": revision()})
        OmegaConf.save(resolved, run_dir / f"{'config' if training else 'eval'}.yaml")
        trace = Trace(run_dir / "trace.json") if training and config.rollout.enable_tracing else None
    trace = trace or Trace(None)
    stack.callback(trace.close)
    try:
        if not training:
            return report_evaluation(config, inputs, run_dir, fleet, trace, stack)
        recovery = Recovery(run_dir, config.recover)
        if dist.get_rank():
            parts = build(config, inputs, run_dir, fleet, trace, recovery, stack)
            return train(config, parts, run_dir, None, trace)
        logger = Logger(run_dir, config.max_steps, config.logger)
        stack.callback(logger.close)
        logger.say(f"{describe_mode(config.actor)}\nstarting the inference server and the proxy")
        if recovery.step:
            logger.say(f"going on after step {recovery.step} of {run_dir}")
        parts = build(config, inputs, run_dir, fleet, trace, recovery, stack)
        assert isinstance(parts.rollout, RemoteInfEngine)
        with logger:
            train(config, parts, run_dir, logger, trace)
        summarise(logger, parts.rollout, inputs.task, run_dir)
    except Exception as error:
        fleet.raise_death(error)  # the reason behind a refused connection
        raise


def report_evaluation(
    config: TrainConfig, inputs: Inputs, run_dir: Path, fleet: Fleet, trace: Trace, stack: ExitStack
) -> None:
    """mode=eval: print the statistics and write them to eval.json. Rank 0 does it."""
    if dist.get_rank():
        return
    if config.evaluator.base_url:
        found = evaluate_endpoint(config, inputs)
    else:
        _, executor = build_rollout(config, run_dir, fleet, start_servers(config, fleet), trace, stack)
        found = evaluate(executor, inputs)
    (run_dir / "eval.json").write_text(json.dumps(found))
    if found["eval_episodes"] == found["eval_rejected"]:
        raise RuntimeError("no episode of the evaluation brought a reward: each failed (said above) or set none")
    print("  ".join(f"{key} {value:.4g}" for key, value in found.items() if value is not None))


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
            config, inputs = configure(sys.argv[1:] if argv is None else argv)
            if not config.dry_run:
                run(config, inputs, stack)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except ProcessDied as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
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
