"""The trainer's model computes log-probabilities, learns by PPO, and sends weights to servers.

FSDPEngine is a model that does not learn, such as the reference policy. FSDPPPOActor is the policy:
it has an optimizer, a version, and a connection to the servers. train.py shows the order of calls.

**A batch is divided twice.** First, the batch's prompt groups are dealt out to mini-batches, and
each optimizer step uses one mini-batch. Then a mini-batch is cut into pieces of at most `mb_tokens`
tokens, and each forward and backward pass uses one piece. A piece's loss is divided by the number
of trained tokens in the whole mini-batch, not in the piece. So the pieces' gradients add up to the
mini-batch's gradient, and mb_tokens affects only time and memory. Example: 64 rows of 1,000 tokens,
4 mini-batches and mb_tokens=4096 give 4 optimizer steps of 4 pieces each.

**Ranks.** Each rank (training process) holds one shard of the parameters (torch's FSDP2). Every
rank gets the whole batch, computes all advantages and makes the same mini-batches. Only the forward
and backward passes are divided among the ranks.

**Frozen layers.** With `frozen_layers` = n > 0, the first n layers and the embeddings have no
gradient or optimizer state, are not in checkpoints (recover/), and go to the servers at most once.

**Numbers.** The parameters and the optimizer's state are float32. On a GPU, FSDP casts the
parameters to `dtype` for each pass. On a CPU, only matrix products use `dtype`. All
log-probabilities of a token use the temperature at which the token was sampled.

There is no tensor, pipeline or context parallelism, no LoRA and no critic. Another number of ranks,
or another layout of the rows (layout.py), changes results only by rounding errors.
"""

import ctypes
import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import state_dict as sharded
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from inference import weights
from inference.fields import import_name
from ppo import log_ratio
from run.config import ConfigError, OptimizerConfig, PPOActorConfig
from training.layout import (
    Batch,
    Piece,
    cut_rows,
    deal,
    pick_layout,
    row_lengths,
    split_minibatches,
    take,
)
from training.logprobs import add_read_hidden, token_logprobs
from training.proximal import interpolation, loglinear
from training.ranks import join_ranks, share
from training.tree_attention import cut_trees

LOSS_KEYS = {"eps_clip", "eps_clip_higher", "c_clip", "behave_imp_weight_cap"}


def lr_factor(step: int, config: OptimizerConfig, max_steps: int) -> float:
    """The learning rate at `step`, counted from 0, as a share of its peak."""
    warmup = config.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    done = min((step - warmup) / max(max_steps - warmup, 1), 1.0)
    return 1 - (0.9 * done if config.lr_scheduler_type == "linear" else 0)


class FSDPEngine:
    """A language model that only computes log-probabilities, such as the reference policy."""

    def __init__(self, config: PPOActorConfig, model_path: str | Path) -> None:
        self.config = config
        self.model_path = str(model_path)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.on_cpu = self.device.type == "cpu"
        self.param_dtype = torch.float32 if self.on_cpu else self.dtype  # during a pass
        self.model: Any = None
        self.cut: Any = None  # cut_rows or cut_trees
        self.frozen: list[Any] = []  # frozen layers of the policy

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def create_process_group(self, *_: Any, **__: Any) -> None:
        """Join the ranks' process group. Ignores AReaL's arguments."""
        join_ranks()

    def initialize(self, *_: Any, **__: Any) -> None:
        """Load the model, and keep this rank's shards. All ranks call this."""
        if self.on_cpu:
            torch.set_num_threads(self.config.threads)
        model: Any = AutoModelForCausalLM.from_pretrained(
            self.model_path, dtype=torch.float32, attn_implementation="sdpa"
        )
        name = pick_layout(self.config, self.device.type, model)
        model.set_attn_implementation("sdpa" if name == "padded" else name)
        self.cut = cut_rows if name == "padded" else partial(cut_trees, shares=name == "tree")
        layers = [m for m in model.modules() if type(m).__name__ in model._no_split_modules]
        n = self.config.frozen_layers
        if n > len(layers):
            raise ConfigError(f"actor.frozen_layers={n}, but the model has {len(layers)} layers")
        self.frozen = layers[:n]
        embeddings = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
        for module in [*embeddings, *self.frozen] if n else []:
            module.requires_grad_(False)
        # A single rank in float32 needs no FSDP, whose hooks would take a sixth of a small model's
        # step time.
        if dist.get_world_size() == 1 and self.param_dtype == torch.float32:
            model.to(self.device)
        else:
            precision = MixedPrecisionPolicy(self.param_dtype, reduce_dtype=torch.float32)
            for module in [*layers, model]:
                fully_shard(module, mp_policy=precision)
        for layer in layers:
            if name == "packed" and not self.on_cpu:  # saves a quarter of the time (docs/gpu.md)
                layer.forward = torch.compile(layer.forward, dynamic=True)
            if self.config.gradient_checkpointing:  # transformers' own switch needs training mode
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        add_read_hidden(model)
        self.model = model

    def compute_logp(self, batch: Batch) -> Tensor:
        """Return log p(token | earlier tokens) as float32 (rows, T). Untrained tokens get 0. All
        ranks call this with the same batch."""
        # With frozen layers, cut the same pieces as ppo_update, which reuses the outputs of these
        # layers.
        n = self.config.ppo_n_minibatches if self.frozen else 1
        parts = split_minibatches(batch, n)
        pieces = [piece for rows in parts for piece in self.passes(batch, rows)]
        with torch.no_grad():
            for piece in pieces:
                piece.tokens["logp"] = self.forward(piece)[0]
        return self.gather(batch, pieces, "logp")

    def gather(self, batch: Batch, pieces: list[Piece], key: str) -> Tensor:
        whole = torch.zeros(batch["input_ids"].shape, device=self.device)  # (rows, T)
        for _, tokens in pieces:
            whole[tokens["row"], tokens["column"]] = tokens[key]
        dist.all_reduce(whole)
        return whole.cpu()

    def forward(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities (N,) of a piece's trained tokens and the entropies (N,) of
        their distributions."""
        tokens = piece.tokens

        def read(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            states = hidden.flatten(0, 1)[tokens["predicted_by"]].to(self.dtype)  # (N, D)
            ids, temperatures = tokens["input_ids"].long(), tokens["temperatures"]  # (N,), (N,)
            return token_logprobs(states, weight.to(self.dtype), ids, temperatures)

        casts = self.dtype != self.param_dtype
        with torch.autocast(self.device.type, self.dtype, enabled=casts):
            return self.model.read_hidden(read, **piece.inputs)

    def passes(self, batch: Batch, rows: Sequence[int]) -> list[Piece]:
        """This rank's pieces of `rows`. FSDP needs the same number of passes on all ranks, so a
        rank with fewer pieces adds pieces that train no token."""
        part = take(batch | {"row": torch.arange(len(batch["input_ids"]))}, rows)
        shares = deal(row_lengths(part), dist.get_world_size())
        cuts = [list(self.cut(take(part, share), self.config.mb_tokens)) for share in shares]
        own = cuts[self.rank] if self.rank < len(cuts) else []
        first = cuts[0][0]
        extra = Piece(first.inputs, {key: x[:0] for key, x in first.tokens.items()})
        pieces = own + [extra] * (max(map(len, cuts)) - len(own))
        return [Piece(*map(self.move, piece)) for piece in pieces]

    def move(self, things: dict[str, Any]) -> dict[str, Any]:
        return {k: x.to(self.device) if isinstance(x, Tensor) else x for k, x in things.items()}

    def save(
        self, path: str | Path, dtype: torch.dtype = torch.float32, learning: bool = False
    ) -> None:
        """Write a Hugging Face folder. If `learning`, leave frozen weights out. All ranks call
        this."""
        # With bucket_mb=0, each bucket holds one tensor.
        buckets = weights.named_buckets(self.model, dtype, bucket_mb=0, learning=learning)
        state = {n: t.cpu() for bucket in buckets for n, t in bucket if self.rank == 0}
        if self.rank == 0:
            weights.write_checkpoint(state, self.model_path, path)
        dist.barrier()

    def destroy(self) -> None:
        self.model = None


class FSDPPPOActor(FSDPEngine):
    """The policy that learns. All ranks call each method with the same arguments."""

    def __init__(self, config: PPOActorConfig, model_path: str | Path) -> None:
        super().__init__(config, model_path)
        self.loss_fn = import_name(config.loss)
        self.advantages_fn = import_name(config.advantages)
        # What changes during a run:
        self.optimizer: Any = None
        self.steps, self.max_steps = 0, 1
        self.minibatch: dict[str, float] = {}  # metrics of the latest mini-batch
        self.version = 0
        self.rollout: Any = None  # the rollout engine, on rank 0
        self.written: int | None = None  # newest version that was written or sent
        self.outputs: dict[str, Any] = {}  # key of a piece -> output of the last frozen layer
        self.running = ""  # key of the piece that runs

    def initialize(self, *args: Any, max_steps: int = 1, **kwargs: Any) -> None:
        """Load the model, and make its optimizer. The learning rate's schedule and `anneal` end
        after `max_steps` training steps."""
        super().initialize()
        for layer in self.frozen:
            layer.forward = partial(self.run_frozen, layer is self.frozen[-1], layer.forward)
        self.max_steps = max_steps
        o = self.config.optimizer
        learning = [p for p in self.model.parameters() if p.requires_grad]
        matrices = [p for p in learning if p.dim() > 1]
        vectors = [p for p in learning if p.dim() <= 1]  # norms and biases
        groups: Any = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups, o.lr, o.betas, weight_decay=o.weight_decay, fused=True
        )

    def run_frozen(self, is_last: bool, forward: Any, *args: Any, **keys: Any) -> Any:
        """Run a frozen layer only in the first pass over a piece. In later passes, every frozen
        layer returns the stored output of the last one, which is the same in every pass."""
        if self.running in self.outputs:
            return self.outputs[self.running]
        out = forward(*args, **keys)
        if is_last:
            self.outputs[self.running] = out
        return out

    def forward(self, piece: Piece) -> tuple[Tensor, Tensor]:
        if self.frozen:
            self.running = str([x.tolist() for x in piece.inputs.values() if isinstance(x, Tensor)])
        return super().forward(piece)

    def connect_engine(self, rollout: Any, meta: weights.WeightUpdateMeta) -> None:
        """Store the rollout engine. Ignores AReaL's argument `meta`."""
        self.rollout = rollout

    def prepare_batch(self, dataloader: Any, **options: Any) -> Batch:
        return share(lambda: self.rollout.prepare_batch(dataloader, **options))

    def should_compute_prox_logp(self) -> bool:
        """Whether ppo_update reads batch["prox_logp"]."""
        c = self.config
        return c.prox_logp_method != "loglinear" if c.use_decoupled_loss else c.recompute_logprob

    def compute_advantages(self, batch: Batch) -> None:
        """Store the advantages (rows, T) in batch["advantages"]."""
        c = self.config
        options = c.adv_norm.model_dump() | {"reward_scaling": c.reward_scaling}
        batch["advantages"] = self.advantages_fn(batch, **options)

    def ppo_update(self, batch: Batch) -> dict[str, float]:
        """Make ppo_epochs * ppo_n_minibatches optimizer steps, and return their mean metrics.

        The batch gets new keys:

            theta_logp (rows, T)     log pi_theta in the last pass over each row
            step_fraction (rows,)    the share of the training step that was done before that pass
            start_logp (rows, T)     if prox_logp is absent: log pi_theta of the first
                                     mini-batch before any optimizer step; 0 elsewhere

        Raises ValueError if the batch has no trained token, or lacks logprobs that the loss needs.
        Raises FloatingPointError, before the optimizer step, if a loss or gradient is not finite.
        """
        if "logprobs" not in batch:
            if self.config.use_decoupled_loss or not self.should_compute_prox_logp():
                raise ValueError(
                    "the workflow returns no logprobs: add those of engine.agenerate's response, or"
                    " set actor.use_decoupled_loss=false"
                )
            batch["logprobs"] = batch["prox_logp"]
        batch["step_fraction"] = torch.zeros(len(batch["input_ids"]))  # (rows,)
        minibatches = []
        for rows in split_minibatches(batch, self.config.ppo_n_minibatches):
            if count := int((batch["loss_mask"][rows, 1:] > 0).sum()):  # nothing predicts token 0
                minibatches.append((rows, count, self.passes(batch, rows)))
        if not minibatches:
            raise ValueError(
                "no token of the batch is trained: did the workflow return no loss_mask, or did all"
                " calls ask for temperature 0, top_p, top_k, a penalty or a grammar? (docs/agents.md)"
            )
        updates = minibatches * self.config.ppo_epochs
        found = []
        for k, (rows, count, pieces) in enumerate(updates):
            batch["step_fraction"][rows] = k / len(updates)
            found.append(self.minibatch_step(pieces, count, k / len(updates)))
            if k == 0 and "prox_logp" not in batch:
                batch["start_logp"] = self.gather(batch, pieces, "theta_logp")

        self.outputs.clear()
        with suppress(AttributeError):  # only glibc has malloc_trim
            ctypes.CDLL(None).malloc_trim(0)  # glibc would keep more freed memory with each step
        pieces = [piece for *_, pieces in minibatches for piece in pieces]
        batch["theta_logp"] = self.gather(batch, pieces, "theta_logp")
        counts = [count for _, count, _ in updates]
        stats = {key: fmean([one[key] for one in found], counts) for key in found[0]}
        # effective sample size: (sum w)^2 / (M sum w^2) = (mean w)^2 / mean w^2
        square = stats.pop("behave_weight_square")
        stats["behave_ess"] = stats["behave_weight_mean"] ** 2 / (square or 1.0)
        return stats

    def minibatch_step(self, pieces: list[Piece], count: int, fraction: float) -> dict[str, float]:
        """Make one optimizer step, and return its metrics. `count` is the mini-batch's number of
        trained tokens on all ranks, and `pieces` are this rank's part of the mini-batch. `fraction`
        is the share of the training step that is already done."""
        o = self.config.optimizer
        found = []
        # 1. Add up the gradients of all pieces. FSDP averages gradients over the ranks, so the
        #    loss is multiplied by the number of ranks.
        self.optimizer.zero_grad()
        for piece in pieces:
            loss, stats = self.piece_loss(piece, count, fraction)
            (loss * dist.get_world_size()).backward()
            found.append(torch.stack([*stats.values()]))
        sums = torch.stack(found).sum(0)
        dist.all_reduce(sums)

        # 2. Clip and check the gradient.
        limit = o.gradient_clipping or math.inf
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        grad_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        self.minibatch = dict(zip(stats, sums.tolist())) | {"grad_norm": grad_norm}
        if not math.isfinite(grad_norm + self.minibatch["loss"]):
            raise FloatingPointError(
                f"loss or gradient of training step {self.steps + 1} is not finite: look for such"
                " logprobs or rewards, or lower actor.optimizer.lr"
            )

        # 3. Make the step. An optimizer hook may change the learning rate first (extras/vcpo.py).
        for group in self.optimizer.param_groups:
            group["lr"] = o.lr * lr_factor(self.steps, o, self.max_steps)
        self.optimizer.step()
        return self.minibatch | {"lr": group["lr"]}

    def piece_loss(
        self, piece: Piece, count: int, fraction: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a piece's loss and metrics: sums over the piece's tokens, divided by `count`, the
        mini-batch's number of trained tokens. So the pieces' values add up to the mini-batch's
        mean. Writes piece.tokens["theta_logp"] (N,)."""
        c, tokens = self.config, piece.tokens
        # 1. pi_theta, pi_prox and pi_behav
        logp, entropy = self.forward(piece)  # (N,), (N,)
        tokens["theta_logp"] = theta_logp = logp.detach()  # (N,)
        old_logp = tokens["logprobs"]
        prox_logp = tokens["prox_logp"] if self.should_compute_prox_logp() else old_logp
        if not c.use_decoupled_loss:  # standard PPO has one old policy
            old_logp = prox_logp
        # k2, an estimate of KL(pi_behav, pi_theta); the clamp keeps it finite
        kl = log_ratio(theta_logp, tokens["logprobs"]).clamp(-1e4, 1e4).square() / 2  # (N,)
        means = {"entropy": entropy, "kl": kl}
        if c.use_decoupled_loss and c.prox_logp_method != "recompute":
            alpha = interpolation(tokens["versions"], self.version, fraction)  # (N,)
            if c.prox_logp_method == "loglinear":
                prox_logp = loglinear(old_logp, theta_logp, alpha)
            else:
                guess_errors = import_name("extras.losses.guess_errors")
                means |= guess_errors(prox_logp, old_logp, theta_logp, alpha)

        # 2. loss = -J - entropy_coeff * mean entropy + kl_ctl * mean (log pi_theta / pi_ref)^2 / 2
        keys = c.model_dump(include=LOSS_KEYS)
        keys |= {"sequence_ids": tokens["row"], "denominator": count}
        A, mask = tokens["advantages"], tokens["loss_mask"]
        loss, stats = self.loss_fn(logp, prox_logp, old_logp, A, mask, **keys)
        if c.entropy_coeff:
            loss = loss - c.entropy_coeff * self.anneal * entropy.sum() / count
        if c.kl_ctl or "ref_logp" in tokens:
            means["ref_kl"] = log_ratio(logp, tokens["ref_logp"]).square() / 2  # (N,)
            loss = loss + c.kl_ctl * self.anneal * means["ref_kl"].sum() / count
        stats = {"loss": loss, **stats, **{key: x.sum() / count for key, x in means.items()}}
        return loss, {key: x.detach() for key, x in stats.items()}

    @property
    def anneal(self) -> float:
        """The factor of the entropy and KL terms. With `actor.anneal` it falls from 1 to 0."""
        return max(1 - self.steps / self.max_steps, 0) if self.config.anneal else 1.0

    def step_lr_scheduler(self) -> None:
        self.steps += 1

    # ---- checkpoints and weights

    def state(self) -> dict[str, Any]:
        found, optimizer = sharded.get_state_dict(self.model, self.optimizer)
        model = {name: found[name] for name, p in self.model.named_parameters() if p.requires_grad}
        moments = optimizer["state"]  # without lr and weight decay, which are configured
        numbers = torch.tensor([self.steps, self.config.frozen_layers])
        return {"model": model, "moments": moments, "numbers": numbers}

    def save_state(self, folder: Path) -> None:
        """Write a checkpoint. Each rank writes its own shards."""
        dcp.save(self.state(), checkpoint_id=folder)

    def load_state(self, folder: Path) -> None:
        """Read what save_state wrote, with any number of ranks. Raises ConfigError if the
        checkpoint has another number of frozen layers."""
        state = self.state()
        dcp.load({"numbers": state["numbers"]}, checkpoint_id=folder)
        self.steps, frozen = state["numbers"].tolist()
        if frozen != self.config.frozen_layers:
            raise ConfigError(f"the checkpoint was made with actor.frozen_layers={frozen}")
        dcp.load(state, checkpoint_id=folder)  # in place

    def write_weights(self, meta: weights.WeightUpdateMeta) -> None:
        """In mode disk, write the weights while the servers still generate."""
        if meta.mode == "disk":
            self.save(meta.directory, self.param_dtype, learning=self.written is not None)
            self.written = meta.version

    def update_weights(self, meta: weights.WeightUpdateMeta) -> None:
        """Send the weights as version `meta.version`, by default the next version. Call this
        between pause and resume."""
        if meta.version is None:
            meta = meta.with_version(self.version + 1)
        if self.written != meta.version:
            self.write_weights(meta)
        buckets: Any = ()
        if meta.mode != "disk":
            learning = self.written is not None
            buckets = weights.named_buckets(self.model, self.param_dtype, learning=learning)
        if self.rank == 0:
            self.rollout.update_weights(meta, buckets)
        for _ in buckets:  # all ranks gather the buckets together
            pass
        self.written = meta.version
        dist.barrier()

    def set_version(self, version: int) -> None:
        self.version = version

    def get_version(self) -> int:
        return self.version
