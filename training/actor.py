"""The trainer's model: sharded over the ranks, asked for logprobs, moved by PPO, copied to the servers.

One step, as the loop of train.py drives it:

    batch = actor.prepare_batch(...)                    trajectories, from the rollout side
    batch["prox_logp"] = actor.compute_logp(batch)      pi_prox: the weights as they are now
    batch["ref_logp"] = ref.compute_logp(batch)         a frozen copy, where there is a KL penalty
    actor.compute_advantages(batch)                     ppo.py
    actor.ppo_update(batch)                             a few optimizer steps
    actor.update_weights(meta)                          the servers follow

Two classes. FSDPEngine is a frozen model that can be asked for logprobs: the reference model is one, laid out, sharded
and rounded as the policy is. FSDPPPOActor adds what moves: optimizer, schedule, version, and the way to the servers.

**Cutting a batch.** A batch is B rows of different lengths. It is cut twice, and both cuts are plain functions of the
lengths, so a run repeats. *Minibatches* are optimizer steps: rows are dealt out, longest first, each to the minibatch
with the fewest tokens, so that no step rests on a handful of tokens. Only the learning sees this cut. *Micro-batches*
are forward passes: rows of similar length together, at most mb_tokens with the padding, and the gradients add up.
Only memory and time see this one: the loss divides by the trained tokens of the whole minibatch, over all ranks, and
never by those of a piece.

**How rows meet the model** is a layout's business (training/layout.py): padded, packed, or sharing their prefixes in a
tree. No logits are made beside those of a chunk of tokens (training/logprobs.py).

**One rank is not a special case.** The model is sharded with FSDP2 over a mesh of however many ranks there are. Without
torchrun that is one, on a process group that lives in this process and opens no port. A parameter is then its own
shard, and the hooks cost 5 to 8 ms an optimizer step: a quarter of the smallest model's, nothing to a large one.

**What ranks share, and what they divide.** Every rank holds the whole batch and none holds the whole model. Rank 0 gets
the batch from the rollout side and hands it to all; advantages, minibatches and statistics are then the same plain
functions of the same rows everywhere, and N ranks take the steps that one would take. What is divided is the work:
of each minibatch a rank passes its own rows through the model, dealt out by tokens, and logprobs are summed into their
places. A batch is small beside a model (32 bytes a token); handing out rows instead would tear groups apart before
their baseline is known. Rank 0 alone reads the model's files and hands out the shards, one tensor at a time.

**Temperature.** A token's logprob is that of the distribution it was sampled from: softmax of the logits divided by the
token's own temperature. So pi_theta, pi_prox and pi_behav speak of the same thing. A token with temperature 0 was not
sampled from any distribution that has a gradient; it is read at 1 and belongs outside the loss.

Different from AReaL: padded rows are the default and packed ones attend apart, without a mask (training/layout.py);
logprobs are where their tokens are, with nothing rolled; a batch with nothing to train on and a loss that is not a
number are errors, before the optimizer is touched. Not here: tensor, pipeline and context parallelism, LoRA, critics.
"""

import math
import os
from collections.abc import Sequence
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
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from inference import weights
from inference.weights import WeightUpdateMeta
from ppo import aggregation_weights, compute_advantages, ppo_actor_loss_fn
from run.config import OptimizerConfig, PPOActorConfig
from training.advantages import kl_estimate
from training.layout import LAYOUTS, Batch, Piece, Places, refuse_layers, row_lengths, split_minibatches
from training.logprobs import add_read_hidden, token_logprobs
from training.proximal import guess_errors, interpolation, loglinear
from training.ranks import join_ranks, leave_ranks, share
from training.tree_attention import TREES


def lr_factor(step: int, config: OptimizerConfig, max_steps: int) -> float:
    """The share of the peak learning rate that training step `step` (from 0) uses.

    It climbs by equal parts and is 1 from the last step of the warm-up on; linear and cosine then fall, and would be
    at min_lr_ratio in step max_steps.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = min((step - config.warmup_steps) / max(max_steps - config.warmup_steps, 1), 1.0)
    fallen = {"constant": 0.0, "linear": done, "cosine": (1 - math.cos(math.pi * done)) / 2}
    return 1 - (1 - config.min_lr_ratio) * fallen[config.lr_scheduler_type]


class FSDPEngine:
    """A causal language model, sharded over the ranks and frozen."""

    def __init__(self, config: PPOActorConfig, model_path: str | Path) -> None:
        self.config, self.model_path = config, str(model_path)
        self.layout = TREES if config.enable_tree_training else LAYOUTS[config.layout]
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        # All mutable state: the model, and whether this object made the process group and therefore ends it.
        self.model: Any = None
        self.owns_process_group = False

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def device(self) -> torch.device:
        return torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")

    def create_process_group(self) -> None:
        """Join torchrun's ranks, or be a world of one that needs no port. Does nothing where a group exists."""
        self.owns_process_group = join_ranks() or self.owns_process_group

    def initialize(self) -> None:
        """Load the model sharded: each decoder layer, then what is left. Only rank 0 reads it, into host memory."""
        # 1. The structure without a number in it, cut for the ranks.
        config = AutoConfig.from_pretrained(self.model_path)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=self.layout.attention
            )
        if self.layout is not LAYOUTS["padded"]:
            refuse_layers(model)
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        on_host = self.config.offload
        offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if on_host else OffloadPolicy()
        layers = [m for m in model.modules() if type(m).__name__ in model._no_split_modules]
        for module in [*layers, model]:
            fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)

        # 2. The numbers, from rank 0 to all. Buffers that no file holds, such as rotary frequencies, come the same way.
        state, buffers = {}, {}
        if self.rank == 0:
            whole: Any = AutoModelForCausalLM.from_pretrained(self.model_path, dtype=torch.float32)
            state, buffers = whole.state_dict(), dict(whole.named_buffers())
            model._weight_conversions = (
                whole._weight_conversions
            )  # how the files name what memory holds (inference/weights.py)
            if any(len(conversion.target_patterns) > 1 for conversion in whole._weight_conversions):
                raise ValueError(
                    f"{type(model).__name__} splits tensors of its files, which cannot be undone one by one"
                )
        model.to_empty(device="cpu" if on_host else self.device)
        everything = sharded.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=on_host)
        sharded.set_model_state_dict(model, state, options=everything)
        buffers = share(buffers)
        for name, buffer in model.named_buffers():
            buffer.data = buffers[name].to(self.device)

        # 3. What it does: predict, and keep only the input of a layer where the backward pass is to compute the rest
        # again. transformers' own switch needs layers in training mode, in which some drop out.
        model.eval()
        if self.config.gradient_checkpointing:
            for layer in layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        add_read_hidden(model)
        self.model = model

    def compute_logp(self, batch: Batch) -> Tensor:
        """(B, T) float32: log p(token t | tokens before t) at each token's temperature; 0 at position 0 and padding.

        All ranks call it with the same batch, and all have the whole answer.
        """
        logp = torch.zeros(batch["input_ids"].shape)
        with torch.no_grad():
            for piece in self.passes(batch, range(len(logp))):
                at, found, _ = self.forward(batch, piece, "attention_mask")
                logp[at] = found.cpu()
        return self.all_reduce(logp)

    def forward(self, batch: Batch, piece: Piece, which: str) -> tuple[Places, Tensor, Tensor]:
        """One forward pass, read at the piece's N tokens where batch[which] is set.

        Returns where those are in the batch, so that batch[key][at] is (N,), log p of each of them (N,), and the
        entropy of the distribution that it was drawn from (N,).
        """
        at, before = piece.read(batch[which])
        inputs = {k: x.to(self.device) if isinstance(x, Tensor) else x for k, x in piece.inputs.items()}
        ids, temperatures = (batch[key][at].to(self.device) for key in ("input_ids", "temperatures"))  # (N,)
        before = before.to(self.device)

        def read(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return token_logprobs(hidden.flatten(0, 1)[before], weight, ids.long(), temperatures)

        return at, *self.model.read_hidden(read, **inputs)

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """The sum (or the maximum) of `x` over the ranks, in place."""
        if dist.get_world_size() > 1:
            dist.all_reduce(x, op)
        return x

    def passes(self, batch: Batch, rows: Sequence[int]) -> list[Piece]:
        """This rank's forward passes over its share of `rows`, which are dealt out by tokens.

        FSDP's ranks gather each layer together: one that makes fewer passes leaves the others waiting. So the list is
        filled up until all ranks have equally many, with passes of which nothing is read. A share may be empty.
        """
        lengths = row_lengths(batch)
        shares = split_minibatches([lengths[row] for row in rows], dist.get_world_size())
        own = [rows[i] for i in shares[self.rank]] if self.rank < len(shares) else []
        pieces = self.layout.cut(batch, own or rows[:1], self.config.mb_tokens)
        count = len(pieces) if own else 0
        most = int(self.all_reduce(torch.tensor(count), dist.ReduceOp.MAX))
        nothing = torch.empty(0, dtype=torch.int64)
        return pieces[:count] + [Piece(pieces[0].inputs, nothing, nothing, nothing)] * (most - count)

    def full_state(self) -> dict[str, Tensor]:
        """The whole model on the CPU of rank 0, empty on the other ranks; all ranks call it. Tied names once."""
        alone = weights.named_buckets(self.model, torch.float32, bucket_mb=0)  # one tensor at a time
        return {name: tensor.cpu() for bucket in alone for name, tensor in bucket if self.rank == 0}

    def save(self, path: str | Path) -> None:
        """A directory that `from_pretrained` reads: safetensors, configuration and tokenizer. All ranks call it."""
        state = self.full_state()
        if self.rank == 0:
            weights.write_checkpoint(state, self.model_path, path)
        dist.barrier()

    def destroy(self) -> None:
        """Let the model go, and end the process group if it was made here. Idempotent."""
        self.model = None
        if self.owns_process_group:
            leave_ranks()
            self.owns_process_group = False


class FSDPPPOActor(FSDPEngine):
    """The policy: the model above with an optimizer, a version, and a way to the servers.

    Under several ranks all calls are made on all ranks, with the same arguments.
    """

    def __init__(self, config: PPOActorConfig, model_path: str | Path) -> None:
        super().__init__(config, model_path)
        # All mutable state beside the model: the optimizer, how far the schedule is, the version, the rollout side.
        self.optimizer: Any = None
        self.steps, self.max_steps = 0, 1
        self.version = 0
        self.rollout: Any = None
        self.weight_update_meta = WeightUpdateMeta()

    def initialize(self, max_steps: int) -> None:  # type: ignore[override]
        """Load and shard the model; `max_steps` is the length of the schedules, in training steps."""
        super().initialize()
        self.max_steps = max_steps
        o = self.config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), o.lr, (o.beta1, o.beta2), o.eps, o.weight_decay, fused=True
        )

    def connect_engine(self, rollout: Any, meta: WeightUpdateMeta) -> None:
        """Name the rollout engine that batches come from and weights go to."""
        self.rollout, self.weight_update_meta = rollout, meta

    def prepare_batch(self, *args: Any, **kwargs: Any) -> Batch:
        """The engine's prepare_batch on rank 0; every rank returns that batch, whole."""
        return share(self.rollout.prepare_batch(*args, **kwargs) if self.rank == 0 else None)

    def policies(self) -> tuple[str, str]:
        """The keys under which the batch has the logprobs of pi_prox and of pi_behav; in standard PPO both are pi_old.

        Where pi_prox is guessed from the two others (loglinear) the batch has none, and the first key is pi_behav's.
        """
        c = self.config
        recompute = c.prox_logp_method != "loglinear" if c.use_decoupled_loss else c.recompute_logprob
        prox = "prox_logp" if recompute else "logprobs"
        return prox, "logprobs" if c.use_decoupled_loss else prox

    def should_compute_prox_logp(self) -> bool:
        """Whether ppo_update reads batch["prox_logp"]: as pi_prox, or as the recomputed pi_old of standard PPO."""
        return "prox_logp" in self.policies()

    @property
    def guesses(self) -> bool:
        """Whether pi_prox is guessed from versions, to be used or to be compared (training/proximal.py)."""
        return self.config.use_decoupled_loss and self.config.prox_logp_method != "recompute"

    def compute_advantages(self, batch: Batch) -> None:
        """Write batch["advantages"] (B, T)."""
        batch["advantages"] = compute_advantages(batch, replace(self.config, kl_ctl=self.annealed(self.config.kl_ctl)))

    def ppo_update(self, batch: Batch) -> dict[str, float]:
        """ppo_epochs times ppo_n_minibatches optimizer steps; returns means over the trained tokens of all of them.

        Writes batch["theta_logp"] (B, T): log pi_theta of each trained token as its last training forward pass saw it,
        and batch["step_fraction"] (B,): how much of the step lay before that pass.
        Raises ValueError if something is missing or no token is trained, FloatingPointError before an optimizer step
        whose loss or gradient is not finite. A minibatch without a trained token is no step.
        """
        needed = {"advantages", self.policies()[0]} | ({"versions"} if self.guesses else set())
        needed |= {"ref_logp"} if self.config.kl_ctl > 0 and self.config.kl_placement == "loss" else set()
        if missing := needed - batch.keys():
            raise ValueError(f"the batch lacks {sorted(missing)}; compute_logp and compute_advantages come first")
        lengths = row_lengths(batch)
        batch["theta_logp"] = torch.zeros(batch["input_ids"].shape)
        batch["step_fraction"] = torch.zeros(len(lengths))
        lr = self.config.optimizer.lr * lr_factor(self.steps, self.config.optimizer, self.max_steps)
        self.optimizer.param_groups[0]["lr"] = lr  # it has one group

        parts = split_minibatches(lengths, self.config.ppo_n_minibatches) * self.config.ppo_epochs
        steps = [self.minibatch_step(batch, rows, k / len(parts)) for k, rows in enumerate(parts)]
        stats = [step for step in steps if step]
        self.all_reduce(batch["theta_logp"])
        if not stats:
            hint = "requests that say store: false, or sample with top_p, penalties or temperature 0, are not trained"
            raise ValueError(f"no token of the batch is trained: loss_mask is 0 everywhere; {hint} (docs/agents.md)")
        tokens = sum(s["tokens"] for s in stats)
        mean = {key: sum(s[key] * s["tokens"] for s in stats) / tokens for key in stats[0] if key != "tokens"}
        # effective sample size = (sum w)^2 / (n sum w^2)
        square = mean.pop("behave_weight_square")
        mean["behave_ess"] = mean["behave_weight_mean"] ** 2 / square if square > 0 else 0.0
        if self.guesses:
            ahead = (batch["loss_mask"] > 0) & (batch["versions"] > self.version)  # (B, T)
            mean["versions_ahead"] = int(ahead.sum())
        return mean | {"lr": lr}

    def minibatch_step(self, batch: Batch, rows: list[int], fraction: float) -> dict[str, float]:
        """One optimizer step on `rows`, gradients accumulated over micro-batches; empty if no token is trained.

        `fraction` of the training step's minibatches are done.
        """
        trained = torch.zeros(len(batch["loss_mask"]), dtype=torch.int64)  # (B,) tokens of each row of this minibatch
        trained[rows] = (batch["loss_mask"][rows, 1:] > 0).sum(1)
        tokens, c = int(trained.sum()), self.config
        if tokens == 0:
            return {}
        batch["step_fraction"][rows] = fraction
        shares = aggregation_weights(trained, c.loss_aggregation, c.max_new_tokens)  # (B,)

        # 1. Gradients. FSDP averages them over the ranks where the loss wants a sum.
        self.optimizer.zero_grad()
        parts = []
        for piece in self.passes(batch, rows):
            loss, part = self.piece_loss(batch, piece, tokens, shares)
            (loss * dist.get_world_size()).backward()
            if c.enable_tree_training:
                tree = piece.inputs["input_ids"].numel() if len(piece.row) else 0
                part["tree_token_ratio"] = tree / batch["attention_mask"][rows].sum()
            parts.append(part)

        # 2. Clip, check, step.
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), c.optimizer.gradient_clipping or math.inf)
        grad_norm = float(norm.full_tensor())
        stats = {key: float(self.all_reduce(torch.stack([p[key] for p in parts]).sum())) for key in parts[0]}
        if not (math.isfinite(grad_norm) and math.isfinite(stats["loss"])):
            raise FloatingPointError(
                f"loss {stats['loss']}, gradient norm {grad_norm} in training step {self.steps + 1}; the weights were "
                "not touched by it. Look for a logprob or a reward that is not finite, or lower actor.optimizer.lr"
            )
        self.optimizer.step()
        return stats | {"grad_norm": grad_norm, "tokens": tokens}

    def piece_loss(self, batch: Batch, piece: Piece, tokens: int, shares: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The share of the minibatch's loss that a piece bears, with its graph, and the statistics' shares.

        The minibatch has `tokens` trained tokens; `shares` (B,) says what one of each row counts.
        """
        c = self.config
        at, logp, entropy = self.forward(batch, piece, "loss_mask")  # (N,), (N,)
        theta_logp, rows = logp.detach(), at[0]
        batch["theta_logp"][at] = theta_logp.cpu()
        prox_logp, old_logp = (batch[key][at].to(self.device) for key in self.policies())
        A = (batch["advantages"][at] * shares[rows]).to(self.device)
        means = {"entropy": entropy}  # over tokens
        if self.guesses:
            alpha = interpolation(batch["versions"][at], self.version, batch["step_fraction"][rows]).to(self.device)
            if c.prox_logp_method == "loglinear":
                prox_logp = loglinear(old_logp, theta_logp, alpha)
            else:
                means |= guess_errors(prox_logp, old_logp, theta_logp, alpha)
        mask, rows = torch.ones_like(logp), rows.to(self.device)
        loss, stats = ppo_actor_loss_fn(logp, prox_logp, old_logp, A, mask, c, sequence_ids=rows, denominator=tokens)
        if c.entropy_coeff:
            loss = loss - self.annealed(c.entropy_coeff) * entropy.sum() / tokens
        if "ref_logp" in batch:
            ref_logp = batch["ref_logp"][at].to(self.device)
            means["ref_kl"] = kl_estimate(theta_logp, ref_logp, "k3")
            if c.kl_ctl > 0 and c.kl_placement == "loss":
                loss = loss + self.annealed(c.kl_ctl) * kl_estimate(logp, ref_logp, c.kl_estimator).sum() / tokens
        return loss, stats | {"loss": loss.detach()} | {key: x.detach().sum() / tokens for key, x in means.items()}

    def annealed(self, coefficient: float) -> float:
        """What is left of the weight of entropy or KL in this training step."""
        return coefficient * (max(1 - self.steps / self.max_steps, 0) if self.config.anneal else 1)

    def step_lr_scheduler(self) -> None:
        """A training step is over: the schedules of learning rate, entropy bonus and KL penalty move on."""
        self.steps += 1

    def save_state(self, path: Path) -> None:
        """Model and optimizer, each rank its shards, as torch.distributed.checkpoint writes them."""
        model, optimizer = sharded.get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)

    def load_state(self, path: Path) -> None:
        """The reverse; the number of ranks may be another one, and the optimizer's keys are those of this run."""
        model, optimizer = sharded.get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": {"state": optimizer["state"]}}, checkpoint_id=path)
        sharded.set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        """Bring the servers to these weights, as version meta.version; between rollout.pause and rollout.resume.

        Raises RuntimeError on rank 0 as weights.send does; the other ranks, which wait for tensors, end with it.
        """
        if meta.mode == "disk":
            self.save(meta.directory)
        buckets = () if meta.mode == "disk" else weights.named_buckets(self.model, self.dtype, meta.bucket_mb)
        if self.rank == 0:
            self.rollout.update_weights(meta, buckets)
        for _ in buckets:  # whoever sends nothing gathers along
            pass
        dist.barrier()

    def set_version(self, version: int) -> None:
        self.version = version

    def get_version(self) -> int:
        return self.version
