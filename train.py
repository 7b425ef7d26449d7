"""Train a language-model agent with asynchronous reinforcement learning.

    python train.py                                    the demo: an agent learns to guess a number
    python train.py --config gsm8k model_path=DIR      a real model, on a GPU box
    python train.py seed=2 rollout.max_head_offpolicyness=0     the demo, synchronously
    python train.py mode=eval model_path=DIR           evaluate an agent, without training
    torchrun --nproc-per-node=4 train.py ...           train on four GPUs

`start_rollout` makes the parts that generate: engine, proxy, gate and executor. `train_step` shows
the batch and its shapes, the three policies, the update and the push of the weights. The object
`run` (run/start.py) holds the configuration, inputs and processes, and what this file makes:
engine, executor, actor and ref. Callbacks (extras/) observe the run: `run.call("on_step", metrics)`
calls the method `on_step` of every callback. Your own script can call
`PPOTrainer(config).train(workflow=MyAgent)`.

The servers generate while the trainer trains. In the following example a batch has B = 2 prompt
groups, and eta = 1 (max_head_offpolicyness), so a trained token is at most one version old:

    trainer   wait | step 1: groups 1 2 | push v1 | step 2: groups 3 4 | push v2 | step 3: 5 6 ...
    server    groups 1 2 3 4 start at v0          | 5 6 start at v1              | 7 8 start at v2
    age            | 0                            | 1                            | 1

Step 2 trains version 1 on groups that started at version 0, so the groups have age 1. With eta = 0
the gate would admit groups 3 and 4 only after the push of version 1, so training would be
synchronous. Versions count from 0 and steps from 1, so step s takes a batch at version s - 1 and
makes version s. A push interrupts running generations, which then continue under the new weights.
Each token keeps the version that sampled it.

Under torchrun all ranks train on the same batch and share the work (training/actor.py). Only rank 0
runs rollouts.
"""

import sys

if __name__ == "__main__":  # the servers load their model while we import torch
    from run.start import begin

    this_run = begin(sys.argv[1:])

import shutil
import zlib
from pathlib import Path
from time import monotonic
from typing import Any

from torch import Tensor

from cache import Interaction
from engine import RemoteInfEngine
from inference.fields import import_name, make_named
from inference.weights import WeightUpdateMeta
from ppo import describe_mode
from proxy import ProxyAddress
from rollout.evaluate import conclude, evaluate
from rollout.executor import WorkflowExecutor
from rollout.launch import plan_proxy
from run.checkpoint import load_checkpoint, save_checkpoint
from run.config import TrainConfig
from run.inputs import load_inputs, make_dataloader
from run.log import Log
from run.start import Run, main
from staleness import StalenessManager
from training.actor import FSDPEngine, FSDPPPOActor
from training.metrics import describe_batch, logp_mismatch
from training.ranks import share
from workflow import RolloutWorkflow

# An episode returns tensors by name, an agent's calls by completion id, or None (workflow.py).
Episode = dict[str, Tensor | Interaction] | None


def start_rollout(run: Run) -> None:
    """Make and connect all parts that generate. Only rank 0 calls this."""
    config, rollout = run.config, run.config.rollout

    # 1. The engine asks the inference servers for tokens, and gives them new weights.
    run.wait_until_ready()
    named = run.call("hooks", run)  # class paths of the callbacks' hooks -> their arguments
    hooks = make_named(named)
    engine = RemoteInfEngine(run.server_urls, rollout.pause_mode, key=run.key, hooks=hooks)
    if rollout.server_addrs and config.mode == "train":
        engine.take_over()
    engine.initialize()

    # 2. The proxy answers agents over HTTP: it gets tokens from the inference servers, and keeps
    #    them (cache.py). The proxy process starts while the trainer loads its model.
    [url] = run.start([plan_proxy(config, run.server_urls, run.key, run.admin_key, named)])
    engine.proxy = ProxyAddress(url, run.admin_key)
    run.stack.callback(engine.destroy)

    # 3. The gate says how many prompt groups may start at the engine's version.
    batch, eta = config.train_dataset.batch_size, rollout.max_head_offpolicyness
    gate = StalenessManager(engine, config.concurrent_groups, batch, eta)

    # 4. The executor runs the workflow or agent on each prompt that the gate admits. It gives the
    #    engine AReaL's methods submit, wait, wait_for_task, rollout_batch and prepare_batch.
    run.executor = WorkflowExecutor(
        engine,
        rollout,
        gate,
        tokenizer=run.inputs.tokenizer,
        gconfig=config.gconfig,
        eval_gconfig=config.evaluation_gconfig,
        seed=config.seed,
        dump_dir=run.run_dir,
    )
    for child in run.children:
        child.watch(run.executor.dispatcher.fail)
    run.engine = engine


def start_trainer(run: Run) -> None:
    """Load the policy and the reference model. All ranks call this."""
    config = run.config
    run.actor = FSDPPPOActor(config.actor, str(config.model_path))
    run.stack.callback(run.actor.destroy)
    run.actor.initialize(max_steps=config.max_steps)
    if config.ref.path is not None:
        run.ref = FSDPEngine(config.actor, config.ref.path)
        run.ref.initialize()


class PPOTrainer:
    def __init__(self, config: TrainConfig, run: Run | None = None) -> None:
        self.run = run or Run(config)
        self.config = self.run.config

    def train(
        self, workflow: RolloutWorkflow | Any = None, workflow_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Train to the last step. All ranks call this.

        `workflow` replaces the configuration's agent or workflow. It is an object, a class or a
        path (`resolve_workflow`). Raises ConfigError if the inputs or the checkpoints cannot be
        used.
        """
        with self.run as run:
            self.start(workflow, workflow_kwargs)
            for step in range(run.step + 1, run.last_step + 1):
                self.train_step(step)
                run.step = step
            if run.rank == 0:
                print(f"{run.step} steps; everything is in {run.run_dir}", flush=True)

    def start(self, workflow: Any, workflow_kwargs: dict[str, Any] | None) -> None:
        """Start the rollout and the trainer, and restore the newest checkpoint if there is one."""
        run, config = self.run, self.config
        names = config.callbacks + (["extras.trace.Trace"] if config.rollout.enable_tracing else [])
        run.callbacks += [import_name(name)(config) for name in names]
        run.inputs = load_inputs(config, workflow, workflow_kwargs)
        self.dataloader = make_dataloader(config, run.inputs.dataset)
        if run.rank == 0:
            start_rollout(run)
        start_trainer(run)
        run.wait_until_ready()
        update = config.weight_update
        # Several runs may share update.path, so each gets a folder of its own.
        name = f"weights-{zlib.crc32(bytes(run.run_dir.absolute()))}"
        folder = Path(update.path or run.run_dir, name)
        run.stack.callback(shutil.rmtree, folder, ignore_errors=True)
        self.meta = WeightUpdateMeta(mode=update.mode, path=str(folder), address=update.address)
        run.actor.connect_engine(run.engine, self.meta)
        run.step = load_checkpoint(run.run_dir, run.actor, run.executor)
        if run.step or config.rollout.server_addrs:  # the servers may have other weights
            self.push(run.step)
        else:
            run.actor.written = 0  # the servers have this model, so pushes omit frozen weights
        if run.rank == 0:
            if run.step < run.last_step:  # the record of a finished run stays as it was
                run.record()
            self.log = Log(run)
            print(f"the run's folder is {run.run_dir}\n{describe_mode(config.actor)}", flush=True)
        run.call("on_start", run)

    def train_step(self, step: int) -> None:
        """Consume a batch of prompt groups, and make the weights of version `step`."""
        run, config, actor, ref = self.run, self.config, self.run.actor, self.run.ref
        version = step - 1
        begun = monotonic()

        # 1. Rank 0 waits for the next B prompt groups, and gives their rows to all ranks. Its
        #    request passes through actor, engine, executor (rollout/executor.py) and dispatcher.
        #    No trained token is more than eta versions old. The shapes:
        #        input_ids, loss_mask, versions, turn_ids               (rows, T) int32
        #        logprobs (log pi_behav), turn_rewards, temperatures    (rows, T) float32
        #        rewards, group_ids                                     (rows,)
        batch = actor.prepare_batch(
            self.dataloader,
            workflow=run.inputs.workflow,
            group_size=config.gconfig.n_samples,
            should_accept_fn=config.should_accept_fn,
        )
        metrics = {"step": step, "version": version, **describe_batch(batch, version)}
        waited = monotonic()

        # 2. Compute log pi_prox (rows, T): pi_prox is the policy before this step. The loss clips
        #    pi_theta / pi_prox, and weights each token by pi_prox / pi_behav.
        if actor.should_compute_prox_logp():
            batch["prox_logp"] = actor.compute_logp(batch)
        # 3. Compute log pi_ref (rows, T). A KL penalty keeps the policy close to pi_ref.
        if ref is not None:
            batch["ref_logp"] = ref.compute_logp(batch)
        # 4. Compute A (rows, T), the advantage of each token's turn within the group.
        actor.compute_advantages(batch)
        # 5. With u = pi_theta / pi_prox and w = pi_prox / pi_behav, minimise the mean of
        #    -w min(u A, clip(u) A).
        metrics |= actor.ppo_update(batch)
        metrics["logp_mismatch"] = logp_mismatch(batch, version)
        actor.step_lr_scheduler()
        trained = monotonic()
        metrics |= run.call("on_batch", batch)

        # 6. Push the new weights to the servers, which then continue the interrupted generations.
        self.push(step)
        pushed = monotonic()

        # 7. Evaluate, and save the model as a Hugging Face folder.
        is_last = step == run.last_step
        if is_due(step, config.evaluator.interval):
            metrics |= share(lambda: evaluate(run.executor, run.inputs))
        if is_last or is_due(step, config.saver.interval):
            actor.save(run.run_dir / "checkpoints" / f"step{step:05d}")

        # 8. Write the step's metrics, and the checkpoint from which a killed run resumes.
        metrics |= {"rollout_wait_s": waited - begun, "train_s": trained - waited}
        metrics |= {"sync_s": pushed - trained, "step_s": monotonic() - begun}
        metrics = share(lambda: self.log.write(batch, metrics))
        run.call("on_step", metrics)
        if is_last or is_due(step, config.recover_interval):
            save_checkpoint(run.run_dir, step, actor, run.executor)

    def push(self, version: int) -> None:
        """Give the servers the trainer's weights as `version`. No generated token is lost."""
        actor, engine = self.run.actor, self.run.engine
        meta = self.meta.with_version(version)
        actor.write_weights(meta)  # mode disk writes files while the servers still generate
        if engine:
            engine.pause()
        actor.update_weights(meta)
        actor.set_version(version)
        if engine:
            engine.set_version(version)  # the gate has B more places
            engine.resume()


def is_due(step: int, interval: int) -> bool:
    return bool(interval) and step % interval == 0


def train_or_evaluate(run: Run) -> None:
    """Train. With mode=eval, run the validation prompts instead, and write eval.json."""
    if run.config.mode == "train":
        PPOTrainer(run.config, run).train()
        return
    with run:
        if run.rank == 0:
            run.inputs = load_inputs(run.config)
            start_rollout(run)
            run.wait_until_ready()
            conclude(run.run_dir, evaluate(run.executor, run.inputs))


if __name__ == "__main__":
    sys.exit(main(this_run, train_or_evaluate))
