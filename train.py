"""Train a language-model agent with asynchronous reinforcement learning. This file is the training loop.

    `python train.py` runs the demo, in which an agent learns to guess a number.
    `python train.py --config configs/maze.yaml` trains on a maze, where weight updates interrupt the long answers.
    `python train.py seed=2 rollout.max_head_offpolicyness=0` runs the demo with synchronous training.
    `python train.py mode=eval model_path=DIR` evaluates the agents without training.
    `torchrun --nproc-per-node=4 train.py ...` trains on four ranks.

A Python script trains with `PPOTrainer(config).train(workflow=MyAgent)`. The configuration comes from
`run.config.load(["--config", "configs/own.yaml", ...])`. MyAgent is defined in a separate module.

The processes. The process of train.py trains the model in its main thread and runs the agents' episodes in a second
thread. A second process, the inference server, generates tokens. The proxy, in a third process, turns the agents' HTTP
requests into prompt tokens.

The overlap. The server generates the next groups while the trainer trains. The diagram shows a run with eta = 1
(max_head_offpolicyness, the largest age of a group in versions) and B = 2 (prompt groups in a batch):

    trainer   wait | step 1: groups 1 2 | push v1 | step 2: groups 3 4 | push v2 | step 3: groups 5 6 ...
    server    groups 1 2 3 4 start at v0          | 5 6 start at v1              | 7 8 start at v2
    age            | 0                            | 1                            | 1

Step 2 trains the weights of version 1 on groups that started at version 0, so these groups have age 1. With eta = 0,
the gate (staleness.py) admits groups 3 and 4 only after the push of version 1. With eta = 0 all groups have age 0, so
training is synchronous.

Versions count from 0 and steps from 1: step s consumes a batch at version s - 1 and makes version s. A push of weights
interrupts the running generations. The interrupted generations continue under the new weights, and every token keeps
the version of the weights that computed it.

Under torchrun every rank runs this loop on the same batch, and the actor divides the work (training/actor.py). Only
rank 0 runs episodes; the other ranks have an empty rollout side (`NoRollout`). The module run/command.py reads the
command line, creates the run's folder and ends every process, and run/start.py starts the parts of a run. Appendix A.1
of the write-up (docs/companion.md) describes the parts of a step.
"""

import gc
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from run.keys import TrainConfig
from run.terminal import greet

if (
    __name__ == "__main__"
):  # `greet` answers --help before the slow imports of torch and other modules
    greet(sys.argv)

import torch

from run.command import interruptible, main, open_run, start_logger
from run.evaluate import start_evaluation
from run.inputs import make_dataloader
from run.logger import describe_batch, is_due
from run.mismatch import Canary, logp_mismatch
from run.recover import Recovery, folders_of_steps, save_model
from run.start import Run, start_processes, start_rollout, start_trainer
from run.summary import summarise
from training.ranks import share


class PPOTrainer:
    """Trains a model according to one configuration."""

    def __init__(self, config: TrainConfig) -> None:
        """Store the configuration. The method `train` starts and ends every part of the run."""
        self.config = config

    def train(self, workflow: Any = None, workflow_kwargs: dict[str, Any] | None = None) -> None:
        """Train from the start of the run to its last step. All ranks call this method.

        If `workflow` is not None, it replaces the workflow of the configuration. `workflow` is an agent or a workflow,
        in any form that `resolve_workflow` (workflow.py) accepts. `workflow_kwargs` are the arguments of the workflow's
        class. Raises ConfigError if the run cannot work.
        """
        with open_run(self.config, workflow, workflow_kwargs) as run:
            with run.trace.span("start"):
                loop = TrainingLoop(run)
            loop.train()


class TrainingLoop:
    """The parts of a training run, and the loop over the run's steps. `train_step` runs one step."""

    def __init__(self, run: Run) -> None:
        """Start every part of the run. `run.stack` ends the parts in the reverse order of their start."""
        self.run, config = run, run.config
        # 1. Start the inference servers, the proxies and the trainer, which load at the same time.
        keys = start_processes(run)
        self.actor, self.ref = start_trainer(run)
        # 2. Start the rest of the rollout side: the engine, and the executors that run the episodes.
        self.recovery = Recovery(config.run_dir, config.recover)
        run.stack.callback(self.recovery.close)
        self.rollout, self.evaluation = start_rollout(run, keys, self.recovery.groups)
        self.actor.connect_engine(self.rollout, run.weight_update_meta())
        self.canary = Canary(self.actor, self.rollout, run.trace)
        # 3. Make the data loader, which yields batches of prompts in an order that depends on the seed.
        self.train_dataloader = make_dataloader(config, run.inputs.dataset)
        # 4. Load the newest checkpoint of this run, if there is one. A server that this run has started holds the
        #    weights of model_path. Push the trainer's weights if the run continues from a checkpoint, or if the servers
        #    were running before this run.
        self.step = self.recovery.load(self.actor, self.rollout.executor)  # the last finished step
        if self.step or config.rollout.server_addrs:
            self.push_weights(self.step)
        # 5. Start the logger, which writes the results. The logger is None on every rank except 0.
        self.last_step = config.replay_until or config.max_steps
        self.models = config.run_dir / "checkpoints"  # folder of the saved models
        self.logger = start_logger(run, self.rollout.executor, self.step)

    def train(self) -> None:
        """Run the remaining steps of the run, and then print a summary."""
        save = self.save if self.recovery.on else None
        with (
            self.logger.live if self.logger else nullcontext(),
            interruptible(self.rollout.executor, save),
        ):
            if self.step >= self.last_step and self.step not in share(
                folders_of_steps(self.models)
            ):
                self.save_model(
                    self.step
                )  # an earlier start of the run has ended before it saved the model
            for step in range(self.step + 1, self.last_step + 1):
                self.train_step(step)
                self.step = step
        if self.logger:
            with self.run.trace.span("end"):
                summarise(self.logger, self.run.inputs.task)

    def train_step(self, step: int) -> None:
        """Run one training step: consume a batch of prompt groups, and push the weights of version `step`."""
        config, inputs, trace, actor = self.run.config, self.run.inputs, self.run.trace, self.actor
        begin, seconds = time.monotonic(), dict[str, float]()
        version, is_last = actor.get_version(), step == self.last_step

        # 1. Wait for a batch: the next B prompt groups, as N rows. No trained token is more than eta versions old. The
        #    tensors input_ids, loss_mask, versions and logprobs (log pi_behav) are (N, T), and the tensor rewards is
        #    (N,).
        with trace.span("rollout_wait", seconds):
            batch = self.wait_for_batch()
        metrics: dict[str, Any] = {
            "step": step,
            "version": version,
            **describe_batch(batch, version),
        }
        if config.server.release_memory:  # the servers generate nothing until the push of this step
            metrics |= self.canary.finish()
            self.rollout.release_memory()

        with trace.span("train", seconds):
            # 2. Compute log pi_prox, (N, T). The loss clips the ratio pi_theta / pi_prox, where pi_prox is the policy
            #    before this step.
            if actor.should_compute_prox_logp():
                batch["prox_logp"] = actor.compute_logp(batch)
            # 3. Compute log pi_ref, (N, T). The KL penalty keeps the policy close to pi_ref.
            if self.ref is not None:
                batch["ref_logp"] = self.ref.compute_logp(batch)
            metrics["logp_mismatch"] = logp_mismatch(batch, version)
            # 4. Compute the advantages A = (R - mean) / std, (N, T). By default, the mean and std of the returns R are
            #    those of the turns at the same position in all conversations of the group.
            actor.compute_advantages(batch)
            # 5. Minimise the mean of -pi_prox / pi_behav * min(u A, clip(u) A), where u = pi_theta / pi_prox.
            metrics |= actor.ppo_update(batch)
            actor.step_lr_scheduler()

        # 6. Push the new weights into the servers. After the push, the canary (run/mismatch.py) asks the servers for
        #    log-probabilities, which show whether the servers have the new weights. The next step reads the
        #    canary's log-probabilities before it pushes weights.
        metrics |= self.canary.finish()
        with trace.span("sync", seconds):
            if config.server.release_memory:
                torch.cuda.empty_cache()  # `empty_cache` frees GPU memory for the servers
            self.push_weights(step)
        self.canary.start(batch)

        # 7. Evaluate: run one episode for each validation prompt.
        if is_due(step, config.evaluator.interval):
            with trace.span("evaluate"):
                metrics |= self.evaluate()
        # 8. Save the model as a Hugging Face directory.
        if is_last or is_due(step, config.saver.interval):
            with trace.span("save"):
                self.save_model(step, metrics)
        # 9. Write the step's line of metrics.jsonl, then the checkpoint from which a killed run continues.
        if is_last:  # no later step will read the canary's scores, so this step reads them
            metrics |= self.canary.finish(**metrics)
        if self.logger:
            metrics |= {"success": inputs.success(batch["rewards"].tolist())} | actor.speed(
                batch, seconds["train_s"]
            )
            with trace.span("log"):
                self.logger.log(batch, metrics | seconds | {"step_s": time.monotonic() - begin})
        if is_last or is_due(step, config.recover_interval):
            self.save(step)
        # Free the objects of finished episodes that refer to each other. The garbage collector itself runs rarely
        # (inference/serve.py).
        gc.collect()

    def wait_for_batch(self) -> dict[str, Any]:
        """Wait for the next batch, and return it on every rank."""
        config, workflow = self.run.config, self.run.inputs.workflow
        options = {
            "should_accept_fn": config.should_accept_fn,
            "group_size": config.rollout.group_size,
        }
        return self.until_done(
            lambda: self.actor.prepare_batch(self.train_dataloader, workflow=workflow, **options)
        )

    def evaluate(self) -> dict[str, Any]:
        """Run one episode for each validation prompt, and return the statistics on every rank."""
        # Only rank 0 has an executor. The other ranks get its statistics by `share`.
        finish = (
            start_evaluation(self.evaluation, self.run.inputs) if self.evaluation else lambda: None
        )
        return self.until_done(lambda: share(finish()))

    def until_done(self, wait: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
        """Call `wait` until its result is not None, and return this result. If `wait` returns None, a restarted server
        lacks the trainer's weights, so push the weights before the next call."""
        while (result := wait()) is None:
            self.push_weights(self.actor.get_version())
        return result

    def save_model(self, step: int, *metrics: dict[str, Any]) -> None:
        """Save the model of `step`. `metrics` are the metrics of this step, if the logger does not have them yet."""
        lines = [*self.logger.history, *metrics] if self.logger else []
        save_model(self.actor, self.models, step, self.run.config.saver.keep, lines)

    def save(self, step: int | None = None) -> None:
        """Write a checkpoint of `step` (None: of the last finished step), from which a killed run can continue."""
        with self.run.trace.span("save"):
            self.recovery.save(step or self.step, self.actor, self.rollout.executor)

    def push_weights(self, version: int) -> None:
        """Push the trainer's weights into the servers, as policy version `version`."""
        meta = self.actor.weight_update_meta.with_version(version)
        self.actor.write_weights(
            meta
        )  # in mode disk, write the files while the servers still generate
        self.rollout.pause()  # running generations stop, and their tokens are kept
        self.actor.update_weights(meta)
        self.actor.set_version(version)
        self.rollout.set_version(version)  # after `resume`, the staleness gate admits more groups
        self.run.trace.mark("weights", version=version)
        self.rollout.resume()  # the interrupted generations continue under the new weights


if __name__ == "__main__":
    sys.exit(main(lambda config: PPOTrainer(config).train()))
