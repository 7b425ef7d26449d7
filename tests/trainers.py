"""Helpers for tests of the trainer: a batch, a configuration, small models of many families."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cpu_kernel  # noqa: F401  # registers attention of packed rows
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from run.config import NormConfig, OptimizerConfig, PPOActorConfig
from training.actor import FSDPPPOActor
from training.layout import pick_layout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where the actor is
NAN, INF = math.nan, math.inf


def make_batch(lengths=(9, 14, 5, 21, 12, 17, 7, 16), seed=0) -> dict[str, Tensor]:
    """Random rows in groups of two, with three prompt tokens, rewards 0 and 1, and temperatures."""
    g = torch.Generator().manual_seed(seed)
    B, T = len(lengths), max(lengths)
    real = torch.arange(T) < torch.tensor(lengths)[:, None]  # (B, T)
    trained = real & (torch.arange(T) >= 3)
    rewards = torch.arange(B).fmod(2).float()
    return {
        "input_ids": torch.randint(0, 250, (B, T), generator=g).masked_fill(~real, 0).int(),
        "attention_mask": real,
        "loss_mask": trained.int(),
        "logprobs": torch.zeros(B, T),
        "turn_ids": trained.int() - 1,
        "turn_rewards": rewards[:, None] * trained,
        "temperatures": torch.where(trained, 0.7 + torch.rand(B, 1, generator=g), 1.0),
        "group_ids": (torch.arange(B) // 2).int(),
    }


def make_config(**changes: Any) -> PPOActorConfig:
    """A configuration with one mini-batch, no gradient clipping and no std. `changes` are keys of
    PPOActorConfig."""
    plain: dict[str, Any] = {
        "ppo_n_minibatches": 1,
        "adv_norm": NormConfig(std_level="none"),
        "optimizer": OptimizerConfig(lr=1e-3, gradient_clipping=0.0),
    }
    return PPOActorConfig(**(plain | changes))


def start_actor(path: Path, **changes: Any) -> FSDPPPOActor:
    """An initialised actor with `make_config`. Its AdamW has a large eps, so that rounding in a
    gradient near 0 does not move a weight by a whole step."""
    actor = FSDPPPOActor(make_config(**changes), path)
    actor.create_process_group()
    actor.initialize(max_steps=10)
    for group in actor.optimizer.param_groups:
        group["eps"] = 1e-4
    return actor


@pytest.fixture
def make_actor(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """make_actor(path, layout=NAME, key=value...) starts an actor of one rank; the default path is
    the tiny model's."""
    actors: list[FSDPPPOActor] = []

    def make(path: Path = tiny_model_dir, layout: str = "", **changes: Any) -> FSDPPPOActor:
        if layout == "packed" and DEVICE == "cuda" and changes.get("dtype") != "bfloat16":
            pytest.skip("the GPU's kernel takes no float32")
        with monkeypatch.context() as patch:
            if layout:
                changes["enable_tree_training"] = layout == "tree"
                picked = "training.actor.pick_layout"
                patch.setattr(picked, lambda *model: pick_layout(*model) and layout)
            actors.append(start_actor(path, **changes))
        return actors[-1]

    yield make
    for actor in reversed(actors):
        actor.destroy()


SHAPE: dict[str, Any] = {"vocab_size": 259, "hidden_size": 64, "intermediate_size": 64}
SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE |= {"max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8}
MAMBA |= {"mamba_d_state": 8, "mamba_chunk_size": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# Families with what Qwen3 lacks: experts, sliding windows, capped attention, sinks, and layers
# without attention.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "gpt_neox": {},
    "falcon": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 64},
    "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 4},
    "mistral": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    "gemma3_text": {"sliding_window": 4, "head_dim": 8},
    "qwen3_next": EXPERTS | LINEAR | {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "falcon_h1": MAMBA,
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": None, "head_dim": 8},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8},
    "bloom": {"n_head": 4},
}
PLAIN = ("llama", "gpt_neox", "opt", "qwen3_moe", "mixtral")  # plain causal attention
NEVER = ("gemma2", "gpt_oss", "bloom")  # transformers cannot run them with sdpa attention


def make_family(path: Path, name: str, **changes: Any) -> Path:
    """Write a random model of the family `name`, without a tokenizer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SHAPE | FAMILIES.get(name, {}) | changes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


class Products(TorchDispatchMode):
    """Records the results of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.mm:
            self.results.append(out)
        return out


def prepare(actor: FSDPPPOActor, batch: dict[str, Tensor], drift=0.3) -> dict[str, Tensor]:
    """Add prox_logp and advantages; log pi_behav is log pi_prox plus noise of std `drift`."""
    batch["prox_logp"] = actor.compute_logp(batch)
    noise = torch.randn(batch["prox_logp"].shape, generator=torch.Generator().manual_seed(1))
    batch["logprobs"] = (batch["prox_logp"] + drift * noise) * batch["loss_mask"]
    actor.compute_advantages(batch)
    return batch


def whole(x: Any) -> Tensor:
    """A copy of a tensor, which may be sharded, on the CPU."""
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().cpu().clone()


def parameters(actor: FSDPPPOActor) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in actor.model.named_parameters()}


def gradients(actor: FSDPPPOActor) -> dict[str, Tensor]:
    named = actor.model.named_parameters()
    return {name: whole(p.grad) for name, p in named if p.grad is not None}
