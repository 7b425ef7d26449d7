"""The trainer's model computes log-probabilities, learns by PPO, and gives its weights away.

FSDPEngine is a frozen model, such as the reference policy. FSDPPPOActor is the policy: it has an
optimizer, a version, and a connection to the servers. train.py shows the order of the calls.

**A batch is divided twice.** Its rows go into mini-batches, one for each optimizer step, with about
the same number of tokens each. The rows of a mini-batch go into pieces of at most `mb_tokens`
tokens, one forward and backward pass each. The loss of a piece is divided by the trained tokens of
its mini-batch, over all ranks, so the gradients of the pieces add up to that of the mini-batch, and
their size costs only time and memory. Example: 64 rows of 1,000 tokens, 4 mini-batches and
mb_tokens=4096 give 4 optimizer steps of 4 pieces each.

**Ranks.** FSDP2 shards the model. Every rank gets the whole batch, computes all advantages and
makes the same mini-batches; only the passes are divided. The ranks' gradients add up to the one
that a single rank would compute.

**Temperature.** The log-probability of a token is taken at the temperature that it was sampled at,
so that the three policies are comparable.

Not here: tensor, pipeline and context parallelism, LoRA, critics. With another layout or number of
ranks, results are equal up to rounding, not bit for bit.
"""

import math
import os
from collections.abc import Sequence
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
from transformers import AutoModelForCausalLM

from inference import weights
from inference.fields import import_name
from ppo import log_ratio
from run.config import OptimizerConfig, PPOActorConfig
from training.layout import Batch, Piece, cut_rows, pick_layout, row_lengths, split_minibatches
from training.logprobs import add_read_hidden, token_logprobs
from training.proximal import interpolation, loglinear
from training.ranks import join_ranks, leave_ranks, share
from training.tree_attention import cut_trees

LOSS_KEYS = {"eps_clip", "eps_clip_higher", "c_clip", "behave_imp_weight_cap"}
LR_FLOOR = 0.1  # where linear and cosine schedules end, as a share of the peak


def lr_factor(step: int, config: OptimizerConfig, max_steps: int) -> float:
    """The learning rate of training step `step`, counted from 0, as a share of the peak: a linear
    warm-up, then constant, or down to a tenth at max_steps."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = min((step - config.warmup_steps) / max(max_steps - config.warmup_steps, 1), 1.0)
    fallen = {"constant": 0.0, "linear": done, "cosine": (1 - math.cos(math.pi * done)) / 2}
    return 1 - (1 - LR_FLOOR) * fallen[config.lr_scheduler_type]


def sum_over_ranks(x: Tensor) -> Tensor:
    """Replace `x` by its sum over the ranks, and return it."""
    dist.all_reduce(x)
    return x


class FSDPEngine:
    """A frozen causal language model, sharded over the ranks."""

    def __init__(self, config: PPOActorConfig, model_path: str | Path) -> None:
        self.config, self.model_path = config, str(model_path)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        has_gpu = torch.cuda.is_available()
        self.device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if has_gpu else "cpu")
        self.model: Any = None
        self.cut: Any = None  # of the layout
        self.owns_process_group = False

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def create_process_group(self, *_: Any, **__: Any) -> None:
        """Join the ranks of torchrun, or be the only one. The arguments of AReaL's are ignored."""
        self.owns_process_group |= join_ranks()

    def initialize(self, *_: Any, **__: Any) -> None:
        """Load the model, and keep this rank's shards of it. All ranks call this."""
        model: Any = AutoModelForCausalLM.from_pretrained(
            self.model_path, dtype=torch.float32, attn_implementation="sdpa"
        )
        name = pick_layout(self.config, self.device.type, model)
        model.set_attn_implementation("sdpa" if name == "padded" else name)
        self.cut = cut_trees if name == "tree" else partial(cut_rows, is_packed=name == "packed")
        layers = [m for m in model.modules() if type(m).__name__ in model._no_split_modules]
        self.shard(model, layers)
        if self.config.gradient_checkpointing:  # transformers' own switch needs training mode
            for layer in layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        add_read_hidden(model)
        self.model = model

    def shard(self, model: Any, layers: list[Any]) -> None:
        """Shard each layer, then the rest. A single rank in float32 needs no FSDP, whose hooks take
        a sixth of a small model's step."""
        c = self.config
        if dist.get_world_size() == 1 and c.dtype == "float32" and not c.offload:
            model.to(self.device)
            return
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
        precision = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        pinned = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        policy = pinned if c.offload else OffloadPolicy()
        for module in [*layers, model]:
            fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=policy)

    def compute_logp(self, batch: Batch) -> Tensor:
        """log p(token | tokens before it), (B, T) float32, of the trained tokens; 0 elsewhere. All
        ranks call this with the same batch, and get the same result."""
        logp = torch.zeros(batch["input_ids"].shape)  # (B, T)
        with torch.no_grad():
            for piece in self.passes(batch, range(len(logp))):
                logp[piece.index] = self.forward(batch, piece)[0].cpu()
        return sum_over_ranks(logp)

    def forward(self, batch: Batch, piece: Piece) -> tuple[Tensor, Tensor]:
        """Run a piece, and return the log-probabilities (N,) of its trained tokens and the
        entropies (N,) of the distributions that they were sampled from."""
        ids = batch["input_ids"][piece.index].to(self.device).long()  # (N,)
        temperatures = batch["temperatures"][piece.index].to(self.device)  # (N,)

        def read(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            states = hidden.flatten(0, 1)[piece.predicted_by.to(self.device)]  # (N, D)
            return token_logprobs(states, weight, ids, temperatures)

        inputs = piece.inputs.items()
        on_device = {k: x.to(self.device) if isinstance(x, Tensor) else x for k, x in inputs}
        return self.model.read_hidden(read, **on_device)

    def passes(self, batch: Batch, rows: Sequence[int]) -> list[Piece]:
        """This rank's pieces of `rows`. With FSDP all ranks make the same number of passes, so a
        rank may make extra ones, in which no token is trained."""
        lengths = row_lengths(batch)
        shares = split_minibatches([lengths[row] for row in rows], dist.get_world_size())
        cuts = [
            list(self.cut(batch, [rows[i] for i in share], self.config.mb_tokens))
            for share in shares
        ]
        own = cuts[self.rank] if self.rank < len(cuts) else []
        nothing = torch.empty(0, dtype=torch.int64)
        extra = Piece(cuts[0][0].inputs, (nothing, nothing), nothing)
        return own + [extra] * (max(map(len, cuts)) - len(own))

    def save(self, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write a Hugging Face folder. All ranks call this."""
        buckets = weights.named_buckets(self.model, dtype, bucket_mb=0)  # one tensor a bucket
        state = {n: t.cpu() for bucket in buckets for n, t in bucket if self.rank == 0}
        if self.rank == 0:
            weights.write_checkpoint(state, self.model_path, path)
        dist.barrier()

    def destroy(self) -> None:
        """Release the model, and leave the ranks if this object has joined them."""
        self.model = None
        if self.owns_process_group:
            leave_ranks()


class FSDPPPOActor(FSDPEngine):
    """The policy that learns. All ranks call each method with the same arguments."""

    def __init__(self, config: PPOActorConfig, model_path: str | Path) -> None:
        super().__init__(config, model_path)
        self.loss_fn = import_name(config.loss)
        self.advantages_fn = import_name(config.advantages)
        # All that changes:
        self.optimizer: Any = None
        self.steps, self.max_steps = 0, 1
        self.minibatch: dict[str, float] = {}  # metrics of the latest mini-batch
        self.version = 0
        self.rollout: Any = None  # the rollout engine, on rank 0
        self.weight_update_meta = weights.WeightUpdateMeta()
        self.written: int | None = None  # newest version in files (mode disk)

    def initialize(self, *args: Any, max_steps: int = 1, **kwargs: Any) -> None:
        """Load the model and make the optimizer; schedules end after `max_steps` training steps."""
        super().initialize()
        self.max_steps = max_steps
        o = self.config.optimizer
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]  # norms and biases
        groups: Any = [
            {"params": matrices, "weight_decay": o.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, o.lr, (0.9, o.beta2), fused=True)

    def connect_engine(self, rollout: Any, meta: weights.WeightUpdateMeta) -> None:
        """Set the engine that makes batches and gets new weights."""
        self.rollout, self.weight_update_meta = rollout, meta

    def prepare_batch(self, dataloader: Any, **options: Any) -> Batch:
        """The next batch, on every rank. Rank 0 gets it from the rollout side."""
        return share(self.rollout.prepare_batch(dataloader, **options) if self.rank == 0 else None)

    def policies(self) -> tuple[str, str]:
        """The keys of the batch with log pi_prox and log pi_behav. Standard PPO has one old policy.
        With loglinear there is no pi_prox yet, and the first key stands for it."""
        if self.config.use_decoupled_loss:
            known = self.config.prox_logp_method != "loglinear"
            return "prox_logp" if known else "logprobs", "logprobs"
        old = "prox_logp" if self.config.recompute_logprob else "logprobs"
        return old, old

    def should_compute_prox_logp(self) -> bool:
        """Whether ppo_update reads batch["prox_logp"], the result of compute_logp."""
        return "prox_logp" in self.policies()

    def compute_advantages(self, batch: Batch) -> None:
        """Store the advantages (B, T) in batch["advantages"]."""
        c = self.config
        options = c.adv_norm.model_dump() | {"reward_scaling": c.reward_scaling}
        batch["advantages"] = self.advantages_fn(batch, **options)

    def ppo_update(self, batch: Batch) -> dict[str, float]:
        """Make ppo_epochs * ppo_n_minibatches optimizer steps, and return their mean metrics.

        Writes batch["theta_logp"] (B, T), log pi_theta in the last pass over each row, and
        batch["step_fraction"] (B,), the share of the step that was done before it. Raises
        ValueError if nothing is trained, and FloatingPointError before the optimizer step of a
        mini-batch whose loss or gradient is not finite.
        """
        c = self.config
        batch["theta_logp"] = torch.zeros(batch["input_ids"].shape)  # (B, T)
        batch["step_fraction"] = torch.zeros(len(batch["input_ids"]))  # (B,)
        # All epochs have the same mini-batches, so each is cut into pieces once.
        minibatches = split_minibatches(row_lengths(batch), c.ppo_n_minibatches)
        cuts = [(rows, self.passes(batch, rows)) for rows in minibatches]
        steps, parts = len(cuts) * c.ppo_epochs, []
        for k in range(steps):
            rows, pieces = cuts[k % len(cuts)]
            batch["step_fraction"][rows] = k / steps
            if tokens := int((batch["loss_mask"][rows, 1:] > 0).sum()):
                parts.append((tokens, self.minibatch_step(batch, pieces, tokens)))
        if not parts:
            raise ValueError("no token of the batch is trained (docs/agents.md)")
        sum_over_ranks(batch["theta_logp"])
        total = sum(tokens for tokens, _ in parts)
        stats = {key: sum(n * part[key] for n, part in parts) / total for key in parts[0][1]}
        # effective sample size: (sum w)^2 / (M sum w^2) = (mean w)^2 / mean w^2
        square = stats.pop("behave_weight_square")
        stats["behave_ess"] = stats["behave_weight_mean"] ** 2 / square if square else 0.0
        return stats

    def minibatch_step(self, batch: Batch, pieces: list[Piece], tokens: int) -> dict[str, float]:
        """One optimizer step on a mini-batch with so many trained tokens on all ranks. `pieces` are
        this rank's."""
        o = self.config.optimizer
        # 1. Add up the gradients of all pieces. FSDP averages over the ranks, and we want the sum.
        self.optimizer.zero_grad()
        sums: dict[str, Any] = {}
        for piece in pieces:
            loss, stats = self.piece_loss(batch, piece, tokens)
            (loss * dist.get_world_size()).backward()
            sums = {key: x + sums.get(key, 0.0) for key, x in stats.items()}
        found = sum_over_ranks(torch.stack([*sums.values()])).tolist()

        # 2. Clip the gradient, and check that everything is finite.
        limit = o.gradient_clipping or math.inf
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        grad_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        self.minibatch = {**dict(zip(sums, found)), "grad_norm": grad_norm}
        if not math.isfinite(grad_norm + self.minibatch["loss"]):
            raise FloatingPointError(
                f"loss {self.minibatch['loss']}, gradient norm {grad_norm} in training step"
                f" {self.steps + 1}: look for logprobs or rewards that are not finite, or lower"
                " actor.optimizer.lr"
            )

        # 3. The optimizer step, before which a hook of the optimizer may change the rate.
        for group in self.optimizer.param_groups:
            group["lr"] = o.lr * lr_factor(self.steps, o, self.max_steps)
        self.optimizer.step()
        return self.minibatch | {"lr": group["lr"]}

    def piece_loss(
        self, batch: Batch, piece: Piece, tokens: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a piece, and its metrics, both divided by `tokens`, the trained tokens of the
        whole mini-batch, so that the sums over all pieces are its means."""
        c = self.config

        def pick(key: str) -> Tensor:  # (B, T) -> (N,)
            return batch[key][piece.index].to(self.device)

        # 1. pi_theta, pi_prox and pi_behav
        logp, entropy = self.forward(batch, piece)  # (N,), (N,)
        theta_logp = logp.detach()  # (N,)
        batch["theta_logp"][piece.index] = theta_logp.cpu()
        prox_logp, old_logp = map(pick, self.policies())
        # k2, an estimate of KL(pi_theta, pi_behav); the clamp keeps it finite
        kl = log_ratio(theta_logp, old_logp).clamp(-1e4, 1e4).square() / 2  # (N,)
        means = {"entropy": entropy, "kl": kl}
        rows = piece.index[0]  # (N,)
        if c.use_decoupled_loss and c.prox_logp_method != "recompute":
            fraction = batch["step_fraction"][rows].to(self.device)
            alpha = interpolation(pick("versions"), self.version, fraction)  # (N,)
            if c.prox_logp_method == "loglinear":
                prox_logp = loglinear(old_logp, theta_logp, alpha)
            else:
                guess_errors = import_name("extras.losses.guess_errors")
                means |= guess_errors(prox_logp, old_logp, theta_logp, alpha)

        # 2. loss = -J - entropy_coeff * mean entropy + kl_ctl * mean (log pi_theta / pi_ref)^2 / 2
        keys = c.model_dump(include=LOSS_KEYS)
        keys |= {"sequence_ids": rows.to(self.device), "denominator": tokens}
        mask = torch.ones_like(logp)
        loss, stats = self.loss_fn(logp, prox_logp, old_logp, pick("advantages"), mask, **keys)
        if c.entropy_coeff:
            loss = loss - self.annealed(c.entropy_coeff) * entropy.sum() / tokens
        if c.kl_ctl or "ref_logp" in batch:
            means["ref_kl"] = log_ratio(logp, pick("ref_logp")).square() / 2  # (N,)
            loss = loss + self.annealed(c.kl_ctl) * means["ref_kl"].sum() / tokens
        stats = {"loss": loss, **stats, **{key: x.sum() / tokens for key, x in means.items()}}
        return loss, {key: x.detach() for key, x in stats.items()}

    def annealed(self, coefficient: float) -> float:
        """The coefficient in this step: with `actor.anneal` it falls linearly to 0."""
        return coefficient * (max(1 - self.steps / self.max_steps, 0) if self.config.anneal else 1)

    def step_lr_scheduler(self) -> None:
        """End a training step: the schedules go on by one."""
        self.steps += 1

    # ---- checkpoints and weights

    def state(self) -> dict[str, Any]:
        model, optimizer = sharded.get_state_dict(self.model, self.optimizer)
        moments = optimizer["state"]  # without lr and weight decay, which the keys set
        return {"model": model, "moments": moments, "steps": torch.tensor(self.steps)}

    def save_state(self, folder: Path) -> None:
        """Write model, optimizer and number of steps. Each rank writes its shards."""
        dcp.save(self.state(), checkpoint_id=folder)

    def load_state(self, folder: Path) -> None:
        """Read what save_state wrote, perhaps with another number of ranks."""
        state = self.state()
        dcp.load(state, checkpoint_id=folder)  # into the tensors of model and optimizer
        self.steps = int(state["steps"])

    def write_weights(self, meta: weights.WeightUpdateMeta) -> None:
        """Mode disk: write the files, while the servers still generate."""
        if meta.mode == "disk":
            self.save(meta.directory, self.dtype)
            self.written = meta.version

    def update_weights(self, meta: weights.WeightUpdateMeta) -> None:
        """Send the weights as `meta.version`, by default the next one. Call it between pause and
        resume."""
        meta = meta if meta.version is not None else meta.with_version(self.version + 1)
        if self.written != meta.version:
            self.write_weights(meta)
        is_disk = meta.mode == "disk"
        buckets = () if is_disk else weights.named_buckets(self.model, self.dtype)
        if self.rank == 0:
            self.rollout.update_weights(meta, buckets)
        for _ in buckets:  # all ranks gather the buckets together
            pass
        dist.barrier()

    def set_version(self, version: int) -> None:
        self.version = version

    def get_version(self) -> int:
        return self.version
