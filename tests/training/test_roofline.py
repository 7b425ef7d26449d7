"""bench/roofline.py counts the FLOPs that PyTorch counts in a real training step."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from trainers import make_batch, start_actor
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.append(str(ROOT / "bench"))
import roofline  # type: ignore[import-not-found]

SHAPE = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 32}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "pad_token_id": 0}
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
# PyTorch counts its attention on GPUs; this table counts it on CPUs, too.
ON_A_CPU = {
    ATTENTION: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: (
        sdpa_backward_flop_count(grad, q, k, v)
    ),
}


def test_the_table_on_the_page() -> None:
    """docs/gpu.md has the numbers that it computes for the recipe gsm8k on one H100."""
    peak, bandwidth = roofline.DEVICES["h100"]
    text = roofline.describe(roofline.SHAPES["1.5b"], roofline.Work(), 1e12 * peak, 1e9 * bandwidth)
    page = (ROOT / "docs/gpu.md").read_text()
    pattern = r"generation ([\d.]+) s, training ([\d.]+) s.*?(\d+)% of the peak"
    found = re.search(pattern, text, re.S)
    assert found
    generation, training, share = found.groups()
    said = f"{float(generation):.1f} s of generation and {float(training):.1f} s of training"
    assert f"{said}, at {share} % of the peak" in " ".join(page.split())


@pytest.mark.skipif(torch.__version__ < "2.13", reason="older ones count no grouped heads")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_flops_of_a_step_are_what_pytorch_counts(checkpointing: bool, tmp_path: Path) -> None:
    """compute_logp and ppo_update are counted, with two mini-batches."""
    config = AutoConfig.for_model("qwen3", **SHAPE)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    rows, length, prompt = 8, 40, 3
    keys: Any = {"gradient_checkpointing": checkpointing, "enable_tree_training": False}
    actor = start_actor(tmp_path, ppo_n_minibatches=2, **keys)
    try:
        batch = make_batch((length,) * rows)
        with FlopCounterMode(display=False, custom_mapping=ON_A_CPU) as prox:
            batch["prox_logp"] = actor.compute_logp(batch)
        actor.compute_advantages(batch)
        with FlopCounterMode(display=False, custom_mapping=ON_A_CPU) as update:
            actor.ppo_update(batch)
    finally:
        actor.destroy()
    work = roofline.Work(rows, prompt, length - prompt, minibatches=2, checkpointing=checkpointing)
    parts = roofline.step_parts(roofline.shape_of(config), work)

    def ours(*names: str) -> float:
        return sum(roofline.flops(part) for name, part in parts.items() if name.startswith(names))

    assert ours("pi_prox") == prox.get_total_flops()
    assert ours("forward", "recomputation", "backward") == update.get_total_flops()
