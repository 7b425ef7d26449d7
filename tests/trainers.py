"""Helpers for tests of the trainer: a batch, a configuration, small models of many families, and gradients."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from training.actor import FSDPPPOActor
from training.config import NormConfig, OptimizerConfig, PPOActorConfig

DEVICE = (
    "cuda" if torch.cuda.is_available() else "cpu"
)  # the device that the actor uses on this machine


def make_batch(lengths=(9, 14, 5, 21, 12, 17, 7, 16), seed=0) -> dict[str, Tensor]:
    """Make random rows in groups of two, with three prompt tokens, rewards of 0 and 1, and different temperatures."""
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


def make_config(**changes) -> PPOActorConfig:
    """Make a configuration with one mini-batch. `changes` may contain any key of PPOActorConfig, and the optimizer's
    key `gradient_clipping`."""
    # The tests use a larger eps than AdamW's default, so that a rounding error in a gradient near 0 does not move the
    # weight by a full step.
    optimizer = OptimizerConfig(
        lr=1e-3, eps=1e-4, gradient_clipping=changes.pop("gradient_clipping", 1e9)
    )
    defaults: dict[str, Any] = {
        "compile": False,
        "ppo_n_minibatches": 1,
        "adv_norm": NormConfig(std_level="none"),
        "optimizer": optimizer,
    }
    return PPOActorConfig(**(defaults | changes))


SHAPE = {
    "vocab_size": 259,
    "hidden_size": 64,  # each head has 16 numbers, the fewest that FlexAttention's kernel accepts
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


MAMBA = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


# Model families with features that Qwen3 lacks: experts, sliding windows, capped attention, sinks, and layers without
# attention.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 64},
    "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 4},
    "mistral": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    "gemma3_text": {"sliding_window": 4, "head_dim": 8},
    "qwen3_next": EXPERTS | LINEAR | {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "falcon_h1": MAMBA,
    "gemma2": {"attn_logit_softcapping": 1.0, "final_logit_softcapping": None, "head_dim": 8},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8},
    "bloom": {"n_head": 4},
}


PLAIN = ("llama", "gpt_neox", "opt", "qwen3_moe", "mixtral")  # families with plain causal attention


NEVER = ("gemma2", "gpt_oss", "bloom")  # families that transformers cannot run with sdpa attention


def make_family(path: Path, name: str, **changes) -> Path:
    """Write a model of the family `name` with random weights, in the Hugging Face format and without a tokenizer.
    Return the directory."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SHAPE | FAMILIES.get(name, {}) | changes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def prepare(actor: FSDPPPOActor, batch: dict[str, Tensor], drift=0.3) -> dict[str, Tensor]:
    """Compute prox_logp and advantages, and set log pi_behav to log pi_prox plus Gaussian noise with standard deviation
    `drift`."""
    batch["prox_logp"] = actor.compute_logp(batch)
    noise = torch.randn(batch["prox_logp"].shape, generator=torch.Generator().manual_seed(1))
    batch["logprobs"] = (batch["prox_logp"] + drift * noise) * batch["loss_mask"]
    actor.compute_advantages(batch)
    return batch


def gradients(model) -> dict[str, Tensor]:
    """Return the full gradient of each parameter of a sharded model, on the CPU."""
    full = {name: p.grad for name, p in model.named_parameters()}
    return {
        name: (g.full_tensor() if hasattr(g, "full_tensor") else g).cpu()
        for name, g in full.items()
    }
