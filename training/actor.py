"""The trainer's model computes log-probabilities, learns by PPO, and sends its weights to the servers.

In each training step train.py calls the actor in this order:

    `batch = actor.prepare_batch(...)`                  gets trajectories that the rollout side has finished.
    `batch["prox_logp"] = actor.compute_logp(batch)`    computes log pi_prox with the weights at the start of the step.
    `batch["ref_logp"] = ref.compute_logp(batch)`       computes log pi_ref with a frozen model, for a KL penalty.
    `actor.compute_advantages(batch)`                   computes the advantages (ppo.py).
    `actor.ppo_update(batch)`                           makes a few optimizer steps.
    `actor.update_weights(meta)`                        sends the new weights to the servers.

FSDPEngine is a frozen model that computes log-probabilities. The reference model `ref` is an FSDPEngine. FSDPPPOActor
is the policy: an FSDPEngine that also has an optimizer, a learning rate schedule, a policy version, and a connection to
the servers.

**A batch is divided twice.** First the B rows of the batch are distributed over mini-batches, one for each optimizer
step. Rows are distributed by length, so that all mini-batches have about the same number of tokens. Second, the rows of
a mini-batch are distributed over pieces of at most `mb_tokens` tokens, and each piece goes through one forward and one
backward pass. The loss of each piece is divided by the mini-batch's number of trained tokens, counted over all ranks.
The gradients of the pieces add up to the gradient of the mini-batch. The size of the pieces affects only time and
memory. Example: 64 rows of 1,000 tokens, 4 mini-batches and mb_tokens=4096 give 4 optimizer steps, each with 16 rows in
4 pieces.

**Layouts and logits.** A layout arranges the rows of a piece as padded rows, as one long row, or as a tree
(`layout.py`). Log-probabilities are computed from hidden states, a chunk of tokens at a time (`logprobs.py`).

**Ranks.** FSDP2 shards the model over all ranks. Without torchrun there is only one rank. Rank 0 gets each batch from
the rollout side and sends the whole batch to every rank. Each rank computes all advantages and divides the whole batch
into mini-batches, so all ranks have the same mini-batches. Only the forward and backward passes are divided: each rank
passes its own rows of a mini-batch through the model. The gradients of the ranks add up to the gradient that one rank
alone would compute.

**Temperature.** A token's log-probability is computed at the temperature that the token was sampled at, so that
pi_theta, pi_prox and pi_behav are comparable.

**Not supported:** tensor, pipeline and context parallelism, LoRA, critics. With a different layout or number of ranks,
results are equal up to rounding, not bit for bit.
"""

import math
import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import state_dict as sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from inference import weights
from ppo import aggregation_weights, compute_advantages, ppo_actor_loss_fn
from training.advantages import kl_estimate
from training.config import OptimizerConfig, PPOActorConfig
from training.corrections import effective_sample_size, without_truncated
from training.layout import (
    LAYOUTS,
    Batch,
    Piece,
    pick_layout,
    refuse_layers,
    row_lengths,
    split_minibatches,
)
from training.logprobs import add_read_hidden, token_logprobs
from training.optimizer import ShardAdamW, own_shard
from training.proximal import guess_errors, interpolation, loglinear
from training.ranks import join_ranks, leave_ranks, share
from training.tree_attention import TREES

# TFLOP/s of dense matrix products in bfloat16, from NVIDIA's data sheets. A GPU gets the value of the first key that
# occurs in the GPU's name.
PEAK_TFLOPS = {"A100": 312.0, "H100 PCIe": 756.0, "H100": 989.0, "H200": 989.0, "B200": 2250.0}


def share_of_peak(gpu: str, tflops: float) -> dict[str, float]:
    """Return the metric peak_share, which is `tflops` divided by the GPU's peak in bfloat16. For a GPU that is not in
    PEAK_TFLOPS, return {}."""
    peaks = [peak for name, peak in PEAK_TFLOPS.items() if name in gpu]
    return {"peak_share": tflops / peaks[0]} if peaks else {}


def lr_factor(step: int, config: OptimizerConfig, max_steps: int) -> float:
    """Return the learning rate of training step `step`, counted from 0, as a share of the peak learning rate.

    During the warm-up the learning rate rises linearly to the peak. After the warm-up, the schedule "constant" keeps
    the learning rate at the peak. The schedules "linear" and "cosine" lower the learning rate to min_lr_ratio times the
    peak at step max_steps.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = min((step - config.warmup_steps) / max(max_steps - config.warmup_steps, 1), 1.0)
    fallen = {"constant": 0.0, "linear": done, "cosine": (1 - math.cos(math.pi * done)) / 2}
    return 1 - (1 - config.min_lr_ratio) * fallen[config.lr_scheduler_type]


def step_means(parts: list[dict[str, float]]) -> dict[str, float]:
    """Return a training step's metrics: means over the mini-batches, weighted by their numbers of trained tokens."""
    tokens = sum(part["tokens"] for part in parts)
    mean = {
        key: sum(part[key] * part["tokens"] for part in parts) / tokens
        for key in parts[0]
        if key != "tokens"
    }
    mean["behave_ess"] = effective_sample_size(mean)
    del mean["behave_weight_square"]
    return mean


class FSDPEngine:
    """A frozen causal language model, sharded over the ranks."""

    def __init__(self, config: PPOActorConfig, model_path: str | Path) -> None:
        self.config, self.model_path = config, str(model_path)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.device = torch.device(
            f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
        )
        self.is_compiled = config.is_compiled(self.device.type)
        # All mutable state: the model, its layout, and whether `destroy` must end the process group.
        self.model: Any = None
        self.layout = LAYOUTS["padded"]  # `initialize` sets the layout of this run (pick_layout)
        self.owns_process_group = False

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def create_process_group(self) -> None:
        """Join the ranks of torchrun, or make a process group of one rank. If a process group exists already, keep the
        existing group."""
        self.owns_process_group = join_ranks() or self.owns_process_group

    def initialize(self) -> None:
        """Make the sharded model and load its weights. All ranks call this method; only rank 0 reads the files."""
        config = AutoConfig.from_pretrained(self.model_path)
        name, _ = pick_layout(self.config, self.device.type, config.get_text_config())
        self.layout = (LAYOUTS | {"tree": TREES})[name]
        attention = self.layout.attention
        with torch.device("meta"):  # tensors on the device "meta" have shapes but no values
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attention
            )
        refuse_layers(model, self.layout)
        layers = [
            module for module in model.modules() if type(module).__name__ in model._no_split_modules
        ]
        self.shard(model, layers)
        self.load(model)
        model.eval()  # no dropout
        for layer in layers:
            if self.is_compiled:
                # Only `forward` is compiled. FSDP's hooks and gradient checkpointing stay outside of the compiled
                # graph.
                layer.forward = torch.compile(layer.forward, dynamic=True)
            if self.config.gradient_checkpointing:
                # transformers' own switch for gradient checkpointing works only in training mode, in which some models
                # apply dropout.
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        add_read_hidden(model)
        self.model = model

    def shard(self, model: Any, layers: list[Any]) -> None:
        """Shard each decoder layer of the model, and then the rest of the model, over all ranks.

        A single rank uses FSDP only if the configuration requires it. For a small model, FSDP's hooks take a sixth of a
        step's time (docs/log.md).
        """
        if not self.config.is_sharded(dist.get_world_size()):
            return
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
        precision = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        offload = (
            CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
            if self.config.offload
            else OffloadPolicy()
        )
        for module in [*layers, model]:
            fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)

    def load(self, model: Any) -> None:
        """Read the weights on rank 0, into host memory, and send every rank its shards."""
        state, buffers = {}, {}
        if self.rank == 0:
            whole: Any = AutoModelForCausalLM.from_pretrained(self.model_path, dtype=torch.float32)
            state, buffers = whole.state_dict(), dict(whole.named_buffers())
            # When transformers loads some models, it converts the tensors of the files. The weight update
            # (inference/weights.py) undoes the conversion of one tensor after another, so it cannot undo a conversion
            # that splits one tensor of the files into several.
            model._weight_conversions = whole._weight_conversions
            if any(len(conversion.target_patterns) > 1 for conversion in whole._weight_conversions):
                raise ValueError(
                    f"{type(model).__name__} splits its files' tensors, which cannot be undone"
                )
        offload = self.config.offload
        # Without FSDP, `to_empty` gives tied layers separate tensors. Then `tie_weights` makes the layers share one
        # tensor again.
        model.to_empty(device="cpu" if offload else self.device).tie_weights()
        options = sharded.StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=True, cpu_offload=offload
        )
        sharded.set_model_state_dict(model, state, options=options)
        # Some buffers, such as the rotary frequencies, are not in the files, so rank 0 sends all its buffers to the
        # other ranks.
        buffers = share(buffers)
        for name, buffer in model.named_buffers():
            buffer.data = buffers[name].to(self.device)

    def compute_logp(self, batch: Batch) -> Tensor:
        """Return log p(token t | tokens before t), (B, T) float32, at each token's temperature.

        The method computes log-probabilities only for tokens whose loss_mask is set, because the last layer is
        expensive. A token whose loss_mask is not set has the value 0. All ranks call this method with the same batch
        and get the same result.
        """
        logp = torch.zeros(batch["input_ids"].shape)  # (B, T)
        with torch.no_grad():
            for piece in self.passes(batch, range(len(logp))):
                index, piece_logp, _ = self.forward(batch, piece, batch["loss_mask"])
                logp[index] = piece_logp.cpu()  # (N,)
        return self.all_reduce(
            logp
        )  # the rank that computed a token has the token's value, and all other ranks have 0

    def forward(
        self, batch: Batch, piece: Piece, mask: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        """Run the model on a piece and compute log p and entropy of N tokens: the tokens whose `mask` (B, T) is set.

        Returns the index of the N tokens in the batch, their log-probabilities (N,), and the entropies (N,) of the
        distributions that the tokens were sampled from.
        """
        index, predicted_by = piece.select(mask)  # ((N,), (N,)), (N,)
        ids = batch["input_ids"][index].to(self.device).long()  # (N,)
        temperatures = batch["temperatures"][index].to(self.device)  # (N,)

        def read(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            states = hidden.flatten(0, 1)[
                predicted_by.to(self.device)
            ]  # (b, t, D) -> (b * t, D) -> (N, D)
            return token_logprobs(states, weight, ids, temperatures, compiled=self.is_compiled)

        inputs = {
            key: x.to(self.device) if isinstance(x, Tensor) else x
            for key, x in piece.inputs.items()
        }
        return index, *self.model.read_hidden(read, **inputs)  # ((N,), (N,)), (N,), (N,)

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Replace `x` by its sum over the ranks, or by the result of another `op`, and return `x`."""
        if dist.get_world_size() > 1:
            dist.all_reduce(x, op)
        return x

    def passes(self, batch: Batch, rows: Sequence[int]) -> list[Piece]:
        """Distribute `rows` over the ranks, with about the same number of tokens for each rank. Return the pieces of
        this rank.

        In FSDP all ranks take part in gathering each layer, so all ranks must make the same number of forward passes. A
        rank with fewer pieces than other ranks makes extra forward passes and does not use their results.
        """
        lengths = row_lengths(batch)
        shares = split_minibatches([lengths[row] for row in rows], dist.get_world_size())
        own = [rows[i] for i in shares[self.rank]] if self.rank < len(shares) else []
        pieces = list(self.layout.cut(batch, own or rows[:1], self.config.mb_tokens))
        count = len(pieces) if own else 0
        most = int(self.all_reduce(torch.tensor(count), dist.ReduceOp.MAX))
        nothing = torch.empty(0, dtype=torch.int64)
        extra = Piece(pieces[0].inputs, row=nothing, column=nothing, predicted_by=nothing)
        return pieces[:count] + [extra] * (most - count)

    def full_state(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Return the whole model on the CPU of rank 0, and {} on all other ranks. All ranks call this method."""
        buckets = weights.named_buckets(
            self.model, dtype, bucket_mb=0
        )  # with bucket_mb=0 each bucket has one tensor
        return {
            name: tensor.cpu() for bucket in buckets for name, tensor in bucket if self.rank == 0
        }

    def save(self, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write model, configuration and tokenizer as a Hugging Face directory. All ranks call this method."""
        state = self.full_state(dtype)
        if self.rank == 0:
            weights.write_checkpoint(state, self.model_path, path)
        dist.barrier()

    def destroy(self) -> None:
        """Release the model, and end the process group if this object made it. A second call of `destroy` does
        nothing."""
        self.model = None
        if self.owns_process_group:
            leave_ranks()
            self.owns_process_group = False


class FSDPPPOActor(FSDPEngine):
    """The policy that learns. All ranks must call each method with the same arguments."""

    def __init__(self, config: PPOActorConfig, model_path: str | Path) -> None:
        super().__init__(config, model_path)
        # True if the actor guesses pi_prox from the tokens' versions (`proximal.py`), for the loss or only for the
        # metrics.
        self.guesses = config.use_decoupled_loss and config.prox_logp_method != "recompute"
        # All mutable state that FSDPPPOActor adds to the state of FSDPEngine.
        self.optimizer: Any = None
        self.steps, self.max_steps = (
            0,
            1,
        )  # number of finished training steps, number of training steps of the run
        self.version = 0
        self.rollout: Any = None  # the rollout engine, which only rank 0 uses
        self.weight_update_meta = weights.WeightUpdateMeta()
        self.written: int | None = (
            None  # newest version whose weights were written to disk (mode="disk")
        )

    def initialize(self, max_steps: int) -> None:  # type: ignore[override]
        """Load the model and make the optimizer. The learning rate schedule and `anneal` end after `max_steps` training
        steps."""
        super().initialize()
        self.max_steps = max_steps
        o = self.config.optimizer
        betas = (o.beta1, o.beta2)
        self.optimizer = ShardAdamW(
            self.model.parameters(), o.lr, betas, o.eps, o.weight_decay, fused=True
        )

    def connect_engine(self, rollout: Any, meta: weights.WeightUpdateMeta) -> None:
        """Set the rollout engine, which makes the batches and receives new weights."""
        self.rollout, self.weight_update_meta = rollout, meta

    def prepare_batch(self, *args: Any, **kwargs: Any) -> Batch:
        """Call the rollout engine's prepare_batch on rank 0 and return its batch on every rank."""
        return share(self.rollout.prepare_batch(*args, **kwargs) if self.rank == 0 else None)

    def policies(self) -> tuple[str, str]:
        """Return the keys of the batch that hold log pi_prox and log pi_behav.

        In standard PPO one old policy is both pi_prox and pi_behav, so the key of its log-probabilities is returned
        twice. With prox_logp_method=loglinear the batch does not contain log pi_prox, because `piece_loss` guesses it.
        In place of the missing key, the key of log pi_behav is returned, and `piece_loss` does not use its values.
        """
        if self.config.use_decoupled_loss:
            return (
                "logprobs" if self.config.prox_logp_method == "loglinear" else "prox_logp",
                "logprobs",
            )
        old = "prox_logp" if self.config.recompute_logprob else "logprobs"
        return old, old

    def should_compute_prox_logp(self) -> bool:
        """Return whether ppo_update reads batch["prox_logp"]. If the result is True, the caller must store the result
        of compute_logp in batch["prox_logp"] before ppo_update."""
        return "prox_logp" in self.policies()

    def compute_advantages(self, batch: Batch) -> None:
        """Compute the advantages (B, T) with the KL coefficient of this training step, and store them in
        batch["advantages"]."""
        config = replace(self.config, kl_ctl=self.annealed(self.config.kl_ctl))
        if config.mask_truncated:
            batch["loss_mask"] = without_truncated(batch)
        batch["advantages"] = compute_advantages(batch, config)

    def ppo_update(self, batch: Batch) -> dict[str, float]:
        """Make ppo_epochs * ppo_n_minibatches optimizer steps and return the metrics of the training step.

        Writes batch["theta_logp"] (B, T): log pi_theta of each trained token, from the last training pass over the
        token's row. Writes batch["step_fraction"] (B,): the share of the step's mini-batches that were done before the
        row's last training pass. Raises ValueError if the batch lacks a key or has no trained token. Raises
        FloatingPointError before the optimizer step of a mini-batch whose loss or gradient is not finite.
        """
        needed = {"advantages", *self.policies()}
        if self.guesses:
            needed.add("versions")
        if self.config.kl_ctl > 0 and self.config.kl_placement == "loss":
            needed.add("ref_logp")
        if missing := sorted(needed - batch.keys()):
            raise ValueError(
                f"the batch lacks {missing}; call compute_logp and compute_advantages first"
            )
        lengths = row_lengths(batch)
        batch["theta_logp"] = torch.zeros(batch["input_ids"].shape)  # (B, T)
        batch["step_fraction"] = torch.zeros(len(lengths))  # (B,)

        # All epochs (passes over the batch) have the same mini-batches, so each mini-batch is divided into pieces only
        # once.
        cuts = [
            (rows, self.passes(batch, rows))
            for rows in split_minibatches(lengths, self.config.ppo_n_minibatches)
        ]
        steps = len(cuts) * self.config.ppo_epochs
        parts = [self.minibatch_step(batch, *cuts[k % len(cuts)], k / steps) for k in range(steps)]
        parts = [
            part for part in parts if part
        ]  # a mini-batch without a trained token has no optimizer step
        self.all_reduce(batch["theta_logp"])
        if not parts:
            hint = "requests that say store: false, or sample with top_p, penalties or temperature 0, are not trained, "
            hint += "and neither are truncated turns if actor.mask_truncated is set"
            raise ValueError(
                f"no token of the batch is trained: loss_mask is 0 everywhere; {hint} (docs/agents.md)"
            )
        stats = step_means(parts)
        if self.guesses:
            ahead = (batch["loss_mask"] > 0) & (batch["versions"] > self.version)  # (B, T)
            stats["versions_ahead"] = int(ahead.sum())
        return stats

    def minibatch_step(
        self, batch: Batch, rows: list[int], pieces: list[Piece], fraction: float
    ) -> dict[str, float]:
        """Make one optimizer step on `rows` and return the step's metrics. Return {} if no token of the rows is
        trained.

        `pieces` are the pieces of `rows` that this rank computes. `fraction` is the share of this training step's
        mini-batches that are already done. `lr` is the learning rate.
        """
        c = self.config
        # The number of trained tokens of each row in `rows`, and 0 for all other rows.
        trained = torch.zeros(len(batch["loss_mask"]), dtype=torch.int64)  # (B,)
        trained[rows] = (batch["loss_mask"][rows, 1:] > 0).sum(1)
        tokens = int(trained.sum())
        if tokens == 0:
            return {}
        batch["step_fraction"][rows] = fraction
        shares = aggregation_weights(trained, c.loss_aggregation, c.max_new_tokens)  # (B,)

        # 1. Add up the gradients of all pieces. FSDP averages the gradients over the ranks, so the loss is
        #    multiplied by the number of ranks to get the sum of the gradients.
        self.optimizer.zero_grad()
        parts = []
        for piece in pieces:
            loss, part = self.piece_loss(batch, piece, tokens, shares)
            (loss * dist.get_world_size()).backward()
            if c.enable_tree_training:
                computed = piece.inputs["input_ids"].numel() if len(piece.row) else 0
                part["tree_token_ratio"] = loss.new_tensor(
                    computed / int(batch["attention_mask"][rows].sum())
                )
            parts.append(part)

        # 2. Clip the gradient, and check that loss and gradient are finite.
        shards = [own_shard(p.grad) for p in self.model.parameters() if p.grad is not None]
        grad_norm = math.sqrt(self.all_reduce(torch.nn.utils.get_total_norm(shards).square()))
        sums = torch.stack([torch.stack([*part.values()]) for part in parts]).sum(
            0
        )  # (number of metrics,)
        stats = dict(zip(parts[0], self.all_reduce(sums).tolist()))
        if not (math.isfinite(grad_norm) and math.isfinite(stats["loss"])):
            problem = (
                f"loss {stats['loss']}, gradient norm {grad_norm} in training step {self.steps + 1}"
            )
            hint = "check that all logprobs and rewards are finite, or lower actor.optimizer.lr"
            raise FloatingPointError(
                f"{problem}; only earlier mini-batches of this step changed the weights; {hint}"
            )
        if 0 < c.optimizer.gradient_clipping < grad_norm:
            torch._foreach_mul_(shards, c.optimizer.gradient_clipping / (grad_norm + 1e-6))
        # 3. Make the optimizer step. VCPO (corrections.py): lr <- lr * (effective sample size / number of tokens)^p
        #    with p = ess_lr_power.
        lr = c.optimizer.lr * lr_factor(self.steps, c.optimizer, self.max_steps)
        lr *= effective_sample_size(stats) ** c.ess_lr_power
        self.optimizer.param_groups[0]["lr"] = lr  # the optimizer has a single parameter group
        self.optimizer.step()
        return stats | {"grad_norm": grad_norm, "lr": lr, "tokens": tokens}

    def piece_loss(
        self, batch: Batch, piece: Piece, tokens: int, shares: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a piece, with a graph for the backward pass, and the metrics of the piece.

        `tokens` is the number of trained tokens in the whole mini-batch, and N is the number of trained tokens in the
        piece. `shares` (B,) are the aggregation weights of the rows. The loss and the metrics are divided by `tokens`,
        so that their sums over all pieces are means over the mini-batch.
        """
        c = self.config
        # 1. pi_theta
        index, logp, entropy = self.forward(
            batch, piece, batch["loss_mask"]
        )  # ((N,), (N,)), (N,), (N,)
        theta_logp, rows = logp.detach(), index[0]  # (N,), (N,)
        batch["theta_logp"][index] = theta_logp.cpu()
        means = {"entropy": entropy}  # metrics that are reported as means over the trained tokens

        # 2. pi_prox and pi_behav
        prox_logp, old_logp = (
            batch[key][index].to(self.device) for key in self.policies()
        )  # (N,), (N,)
        if self.guesses:
            versions, fraction = (
                batch["versions"][index],
                batch["step_fraction"][rows],
            )  # (N,), (N,)
            alpha = interpolation(versions, self.version, fraction).to(self.device)  # (N,)
            if c.prox_logp_method == "loglinear":
                prox_logp = loglinear(old_logp, theta_logp, alpha)
            else:
                means |= guess_errors(prox_logp, old_logp, theta_logp, alpha)

        # 3. loss = - J - entropy_coeff * mean entropy + kl_ctl * mean KL(pi_theta, pi_ref)
        A = (batch["advantages"][index] * shares[rows]).to(self.device)  # (N,)
        mask, ids = torch.ones_like(logp), rows.to(self.device)  # (N,), (N,)
        loss, stats = ppo_actor_loss_fn(
            logp, prox_logp, old_logp, A, mask, c, sequence_ids=ids, denominator=tokens
        )
        if c.entropy_coeff:
            loss = loss - self.annealed(c.entropy_coeff) * entropy.sum() / tokens
        if "ref_logp" in batch:
            ref_logp = batch["ref_logp"][index].to(self.device)  # (N,)
            means["ref_kl"] = kl_estimate(theta_logp, ref_logp, "k3")
            if c.kl_ctl > 0 and c.kl_placement == "loss":
                loss = (
                    loss
                    + self.annealed(c.kl_ctl)
                    * kl_estimate(logp, ref_logp, c.kl_estimator).sum()
                    / tokens
                )
        return loss, stats | {"loss": loss.detach()} | {
            key: x.detach().sum() / tokens for key, x in means.items()
        }

    def annealed(self, coefficient: float) -> float:
        """Return the value of `coefficient` in this training step. With `actor.anneal` the coefficient falls linearly
        to 0."""
        return coefficient * (max(1 - self.steps / self.max_steps, 0) if self.config.anneal else 1)

    def speed(self, batch: Batch, seconds: float) -> dict[str, float]:
        """Return the speed metrics of a training step that took `seconds`: tokens/s of all ranks, and TFLOP/s of this
        rank."""
        tokens = int(batch["attention_mask"].sum())
        # For each parameter and token, a forward pass has 2 FLOPs and a backward pass has 4 FLOPs.
        per_parameter = 6 * self.config.ppo_epochs + 2 * self.should_compute_prox_logp()
        flops = per_parameter * sum(p.numel() for p in self.model.parameters()) * tokens
        found = {
            "train_tokens_s": tokens / seconds,
            "train_tflops": flops / dist.get_world_size() / seconds / 1e12,
        }
        if self.device.type == "cuda":
            found["peak_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
            found |= share_of_peak(torch.cuda.get_device_name(self.device), found["train_tflops"])
        return found

    def step_lr_scheduler(self) -> None:
        """End a training step: advance the schedules of the learning rate, the entropy bonus and the KL penalty by one
        step."""
        self.steps += 1

    def save_state(self, path: Path, group: Any = None) -> Future[Any]:
        """Copy model and optimizer to host memory, and start a thread that writes the copy to `path` with
        torch.distributed.checkpoint.

        Each rank writes its own shards. The ranks communicate in the process group `group`. The returned future is done
        when all ranks have written their shards.
        """
        model, optimizer = sharded.get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        return dcp.async_save(state, checkpoint_id=path, process_group=group)  # type: ignore[return-value]

    def load_state(self, path: Path) -> None:
        """Load a checkpoint that save_state wrote. The run that wrote the checkpoint may have had more or fewer ranks
        than this run.

        Learning rate, betas, eps and weight decay come from this run's configuration, not from the checkpoint.
        """
        model, optimizer = sharded.get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": {"state": optimizer["state"]}}, checkpoint_id=path)
        sharded.set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )

    def write_weights(self, meta: weights.WeightUpdateMeta) -> None:
        """If meta.mode is "disk", write the files that the servers will load. The servers can generate while the files
        are written."""
        if meta.mode == "disk":
            self.save(meta.directory, self.dtype)
            self.written = meta.version

    def update_weights(self, meta: weights.WeightUpdateMeta) -> None:
        """Send the weights to the servers as version meta.version. Call update_weights between rollout.pause and
        rollout.resume.

        If meta.version is None, the new version is the current version plus 1. If the update fails, rank 0 raises
        RuntimeError, and all ranks end (ranks.py).
        """
        meta = meta.with_version(self.version + 1) if meta.version is None else meta
        if self.written != meta.version:
            self.write_weights(meta)
        buckets = (
            ()
            if meta.mode == "disk"
            else weights.named_buckets(self.model, self.dtype, meta.bucket_mb)
        )
        if self.rank == 0:
            self.rollout.update_weights(meta, buckets)
        for _ in (
            buckets
        ):  # all ranks take part in gathering a bucket, so every rank iterates over the buckets
            pass
        dist.barrier()

    def set_version(self, version: int) -> None:
        self.version = version

    def get_version(self) -> int:
        return self.version
