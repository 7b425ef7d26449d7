"""Train a language-model agent with asynchronous reinforcement learning: the loop of AReaL, top to bottom.

    python train.py                                   the demo: an agent learns to guess a number
    python train.py --config configs/maze.yaml        long answers, generation and training overlapped
    python train.py seed=2 rollout.max_head_offpolicyness=0      the same loop, synchronous
    python train.py mode=eval model_path=DIR          the agents are evaluated and not trained
    torchrun --nproc-per-node=4 train.py ...          the trainer on four ranks

The processes. This process trains, and it runs the agents' episodes in a second thread. An inference server generates
tokens in a second process. The proxy, in a third process, turns the agents' HTTP requests into token-exact prompts.
While this process trains a step, the server already generates the episodes of the next steps. Their weights are up to
`rollout.max_head_offpolicyness` versions older than the trainer's.

The loop (`PPOTrainer.train`; write-up, appendix A.1). Versions count from 0 and steps from 1: step s consumes a batch
at version s - 1 and makes version s. A weight update interrupts the generations that run at that moment. They continue
under the new weights, and every token keeps the version of the weights that computed it.

Synchronous training is the same program. With max_head_offpolicyness=0 the gate (staleness.py) starts the next episodes
only when the new weights are there.

Under torchrun every rank runs this loop on the same batch, and the actor divides the work (training/actor.py). Rank 0
alone has a rollout side; the other ranks have one that does nothing.

The command line, the run's folder and the ending of every process are in run/command.py.
"""

import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from engine import RemoteInfEngine
from inference.weights import WeightUpdateMeta
from ppo import describe_mode
from rollout.executor import WorkflowExecutor
from run.command import main
from run.evaluate import evaluate
from run.logger import Logger, describe_batch
from run.mismatch import logp_mismatch
from run.recover import Recovery, save_model
from run.start import NoRollout, Run, start_rollout
from run.summary import summarise
from training.actor import FSDPEngine, FSDPPPOActor


class PPOTrainer:
    """Everything that training needs, running, at the step of the newest checkpoint."""

    def __init__(self, run: Run) -> None:
        """Start the parts of the trainer; `run.stack` ends them in the reverse order."""
        self.run, config, stack = run, run.config, run.stack

        # 1. The inference servers load the model while the trainer loads it, too.
        servers = [run.fleet.start(planned) for planned in run.servers]
        assert config.model_path is not None
        self.actor = FSDPPPOActor(config.actor, config.model_path)
        stack.callback(self.actor.destroy)
        self.actor.create_process_group()
        self.actor.initialize(max_steps=config.max_steps)
        self.ref = None
        if config.ref.path is not None:
            self.ref = FSDPEngine(config.actor, config.ref.path)
            stack.callback(self.ref.destroy)
            self.ref.initialize()

        # 2. Rank 0 starts the rollout side.
        self.recovery = Recovery(config.run_dir, config.recover)
        self.rollout: RemoteInfEngine | NoRollout = NoRollout()
        self.evaluation: WorkflowExecutor | None = None
        if self.actor.rank == 0:
            keep = self.recovery.groups.write if self.recovery.groups else None
            self.rollout, self.evaluation = start_rollout(run, servers, keep)
        path = str(config.run_dir / "weights")
        self.actor.connect_engine(self.rollout, WeightUpdateMeta(path=path, **asdict(config.weight_update)))

        # 3. The prompts.
        self.train_dataloader: DataLoader = DataLoader(
            run.inputs.dataset,  # type: ignore[arg-type]
            batch_size=config.train_dataset.batch_size,
            shuffle=config.train_dataset.shuffle,
            generator=torch.Generator().manual_seed(config.seed),
            collate_fn=list,
        )

        # 4. The state of the newest checkpoint. Servers that did not start with these weights get them now.
        self.step = self.recovery.load(self.actor, self.rollout.executor)
        if self.step or config.rollout.server_addrs:
            self.push_weights(self.step)

    def train(self, logger: Logger | None) -> None:
        """Run the remaining steps. Only rank 0 has a logger."""
        config, inputs, trace = self.run.config, self.run.inputs, self.run.trace
        actor, ref, rollout = self.actor, self.ref, self.rollout
        for step in range(self.step + 1, config.max_steps + 1):
            begin, seconds = time.monotonic(), dict[str, float]()
            is_last = step == config.max_steps

            # 1. The oldest B groups by start, none older than eta versions.
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
                # 4. Advantages from rewards.
                actor.compute_advantages(batch)
                # 5. A few optimizer steps of decoupled PPO.
                metrics |= actor.ppo_update(batch)
                actor.step_lr_scheduler()

            # 6. New weights for the servers.
            with trace.span("sync", seconds):
                self.push_weights(step)

            # 7. Evaluate, and 8. save the model, when it is time.
            if self.evaluation and is_due(step, config.evaluator.interval):
                metrics |= evaluate(self.evaluation, inputs)
            if is_last or is_due(step, config.saver.interval):
                save_model(actor, config.run_dir / "checkpoints", step, config.saver.keep)

            # 9. Report the step, then write the checkpoint that a restart continues from.
            if logger:
                metrics |= {"success": inputs.success(batch["rewards"].tolist()), **seconds}
                logger.log(batch, metrics | {"step_s": time.monotonic() - begin})
            if self.recovery.on and (is_last or is_due(step, config.recover_interval)):
                self.recovery.save(step, actor, rollout.executor)

    def push_weights(self, version: int) -> None:
        """Pause, push, set the version, resume: running generations continue under the new weights."""
        self.rollout.pause()
        self.actor.update_weights(self.actor.weight_update_meta.with_version(version))
        self.actor.set_version(version)
        self.rollout.set_version(version)
        self.rollout.resume()


def is_due(step: int, interval: int) -> bool:
    """Return whether something that happens every `interval` steps (0: never) happens after this step."""
    return bool(interval) and step % interval == 0


def train(run: Run) -> None:
    """Train from the first word to the summary."""
    if dist.get_rank() != 0:
        return PPOTrainer(run).train(None)
    print(f"{describe_mode(run.config.actor)}\nstarting the inference server and the proxy", flush=True)
    trainer = PPOTrainer(run)
    if trainer.step:
        print(f"continuing after step {trainer.step} of {run.config.run_dir}", flush=True)
    logger = Logger(run.config, trainer.rollout.executor)
    with logger.live or nullcontext():
        trainer.train(logger)
    summarise(logger, run.inputs.task)


if __name__ == "__main__":
    sys.exit(main(train))
