"""The configuration keys of the trainer: objective, advantages and optimizer.

run/config.py explains how keys are set and checked. The trainer's keys are in a separate module, because training/ and
ppo.py need no other keys of a run's configuration. The full name of a key begins with `actor`, for example
actor.eps_clip or actor.adv_norm.per_turn. docs/algorithm.md gives the equation that each key changes.
"""

import os
import shutil
import sysconfig
from dataclasses import dataclass, field
from typing import Annotated, Literal

from inference.fields import Count, CountOrZero, NonNegative, Positive, Share


def can_compile() -> bool:
    """Return whether torch.compile can compile for a GPU. Compiling needs a C compiler and Python's header files."""
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    return os.path.exists(header) and any(map(shutil.which, (os.environ.get("CC", "gcc"), "clang")))


@dataclass
class NormConfig:
    """The mean and the standard deviation in the advantage A = (R - mean) / std of a return R (AReaL's NormConfig)."""

    mean_level: Literal["group", "batch", "none"] = "group"  # turns whose mean return is the baseline; none: baseline 0
    std_level: Literal["group", "batch", "constant", "none"] = "group"  # divisor: std of returns in the group or batch
    mean_leave1out: bool = False  # true: a turn's baseline does not include the turn itself (RLOO)
    std_constant: Positive = 1.0  # divisor of the advantages if std_level=constant
    per_turn: bool = True  # true: compare turn k of a conversation only with other turns that have number k
    eps: NonNegative = 1e-5  # number that is added to the standard deviation to avoid division by 0; 0: no addition


@dataclass
class OptimizerConfig:
    """AdamW and its learning rate schedule."""

    lr: NonNegative = 1e-5  # maximum learning rate; 0: the weights never change
    beta1: Annotated[float, "[0, 1)"] = 0.9  # decay rate of AdamW's running mean of gradients; 0: no averaging
    beta2: Annotated[float, "[0, 1)"] = 0.95  # decay rate of AdamW's mean of squared gradients; 0: no averaging
    eps: Positive = 1e-8  # number that is added to AdamW's divisor to avoid division by 0
    weight_decay: NonNegative = 0.01  # weight decay of AdamW; 0: no decay
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"  # curve of the learning rate after warm-up
    warmup_steps: CountOrZero = 0  # number of training steps in which the learning rate rises from 0 to lr; 0: no rise
    min_lr_ratio: Share = 0.0  # learning rate at the end of the schedule, divided by lr; 0: the learning rate ends at 0
    gradient_clipping: NonNegative = 1.0  # maximum norm of a gradient; larger gradients are scaled down; 0: no clipping


@dataclass
class PPOActorConfig:
    """The trainer: forward passes, the decoupled PPO objective and the optimizer (AReaL's PPOActorConfig)."""

    dtype: Literal["float32", "bfloat16"] = "float32"  # number format of forward passes; parameters are float32
    ppo_n_minibatches: Count = 4  # number of optimizer steps in each pass over the batch
    ppo_epochs: Count = 1  # number of passes over the batch in a training step
    mb_tokens: Count = 16384  # maximum number of tokens in a forward pass, with padding; larger mini-batches are split
    layout: Literal["auto", "padded", "packed"] = "auto"  # padded: one row per sequence; packed: sequences end to end
    compile: bool | None = None  # true: torch.compile fuses the operations of each layer; default: true on a GPU
    gradient_checkpointing: bool = False  # true: recompute layers in the backward pass, which saves memory
    enable_tree_training: bool = False  # true: compute the shared beginning of several rows only once
    offload: bool = False  # true: keep parameters, gradients and optimizer in host memory, which is slow (docs/gpu.md)
    use_decoupled_loss: bool = True  # true: decoupled PPO, which corrects for stale data; false: standard PPO
    recompute_logprob: bool = True  # true: standard PPO recomputes the old logprobs; false: it uses the server's
    prox_logp_method: Literal["recompute", "loglinear", "metrics"] = "recompute"  # how the trainer computes pi_prox
    eps_clip: Share = 0.2  # clip ratios pi_theta / pi_prox below 1 - eps_clip; 0: below 1
    eps_clip_higher: NonNegative | None = None  # clip ratios above 1 + eps_clip_higher; 0: above 1; default: eps_clip
    c_clip: Annotated[float, "(1, inf)"] | None = None  # if A < 0, the loss is at most c_clip * |A|; null: no dual clip
    importance_sampling_level: Literal["token", "sequence"] = "token"  # clip the ratio of a token, or of a row (GSPO)
    use_cispo_loss: bool = False  # true: a clipped token keeps its gradient (CISPO, training/corrections.py)
    behave_imp_weight_cap: Annotated[float, "[1, inf)"] | None = 5.0  # maximum weight pi_prox / pi_behav; null: no cap
    behave_imp_weight_floor: Annotated[float, "(0, 1]"] | None = None  # least behaviour weight (IcePop); null: no limit
    # A row's weight is the product of its tokens' weights (sequence) or the geometric mean of the weights (geometric).
    behave_imp_weight_level: Literal["token", "sequence", "geometric"] = "token"  # behaviour weight of a token or a row
    behave_imp_weight_action: Literal["mask", "clamp"] = "mask"  # weights out of bounds become 0 (mask) or the bound
    reject_geometric_mean: Annotated[float, "(1, inf)"] | None = None  # c: drop rows with a mean weight not in [1/c, c]
    reject_max_k2: Positive | None = None  # drop a row if a token's (log behaviour weight)^2 / 2 is above this number
    reject_veto: Annotated[float, "(0, 1)"] | None = None  # drop rows in which a behaviour weight is below this number
    ess_lr_power: NonNegative = 0.0  # lr is multiplied by behave_ess^ess_lr_power (VCPO: 0.5 for AdamW); 0: no change
    mask_truncated: bool = False  # true: do not train on a row's last turn if it reached its token limit
    loss_aggregation: Literal["token", "sequence", "constant"] = "token"  # how the loss averages over tokens (ppo.py)
    max_new_tokens: Count | None = None  # token limit that loss and length penalty use; default: gconfig.max_new_tokens
    entropy_coeff: NonNegative = 0.0  # weight of the entropy bonus in the loss; 0: no bonus
    kl_ctl: NonNegative = 0.0  # weight of the KL penalty towards the reference model; 0: no reference model
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"  # formula for the KL of one token (training/advantages.py)
    kl_placement: Literal["reward", "loss"] = "reward"  # subtract KL from the rewards, or add KL (k2, k3) to the loss
    anneal: bool = False  # true: entropy_coeff and kl_ctl fall linearly to 0 over max_steps
    overlong_tokens: Count | None = None  # the length penalty begins so many tokens before the limit; null: no penalty
    overlong_penalty_factor: NonNegative = 1.0  # length penalty of a turn with max_new_tokens tokens; 0: no penalty
    gamma: Annotated[float, "(0, 1]"] = 1.0  # discount of the advantage per token of distance from the turn's end
    gae_lambda: Share = 1.0  # the advantage is discounted by gamma * gae_lambda per token; 0: a turn's last token only
    reward_bias: Annotated[float, "(-inf, inf)"] = 0.0  # number that is added to every reward; 0: nothing is added
    reward_scaling: Positive = 1.0  # factor that multiplies every reward after the bias is added
    reward_clip: Positive = 20.0  # scaled rewards are clipped to the range from -reward_clip to reward_clip
    adv_norm: NormConfig = field(default_factory=NormConfig)  # baseline and divisor of the advantages
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)  # AdamW and the learning rate schedule

    def is_sharded(self, ranks: int) -> bool:
        """Return whether FSDP2 shards the model: with several ranks, with a dtype other than float32, or with
        `offload`."""
        return ranks > 1 or self.dtype != "float32" or self.offload

    def is_compiled(self, device: str) -> bool:
        """Return whether torch.compile fuses the operations of each layer.

        The default is True on a GPU, except with enable_tree_training or on a machine that cannot compile.
        """
        default = device == "cuda" and not self.enable_tree_training and can_compile()
        return default if self.compile is None else self.compile
