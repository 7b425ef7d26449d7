"""Estimate the memory and the disk space that a run needs, before the run starts.

**The trainer.** A rank keeps a share of the model's parameters. For each parameter in its share, a rank stores four
float32 numbers: the parameter, its gradient and two AdamW moments. Each training step has the three phases `head`,
`layers` and `end`. In addition to its share of the parameters, a rank needs the bytes of the largest phase.

In the formulas below, P is the number of parameters in a decoder layer, V the vocabulary size, and H the hidden size. R
is the number of parameters in the embedding and the last layer. R is V H if the embedding and the last layer share
their weights, else 2 V H. Each number in a forward pass takes b bytes, which is 2 in bfloat16 and 4 in float32. `saved`
is the number of bytes that the forward pass keeps for the backward pass.

The phase `head` needs b R + (4 + b) V H + saved + chunk bytes. In the phase `head`, the embedding and the last layer
take b R bytes, and the last layer's gradient in float32 takes 4 V H bytes. The gradient that one chunk of tokens adds
to the last layer takes b V H bytes. The term `chunk` is the number of bytes for the logits of one chunk of tokens.

The phase `layers` needs b R + b V H + (8 + 3 b) P + saved bytes. In the phase `layers`, two whole decoder layers take 2
b P bytes. The gradient of one layer takes b P bytes. Two float32 copies of a layer's gradient, before and after the
ranks add their gradients, take 8 P bytes. The phase `end` needs max(4 b V H, 8 R) bytes: first 4 b V H bytes for the
embedding's gradient, and then 8 R bytes for copies of gradients in float32.

A single rank in float32 uses no FSDP (training/actor.py). Without FSDP, the phase `end` and all terms with R or P are
0. In the phase `layers`, a single rank in float32 also needs 2 b I bytes for each token: the gradients of two tensors
inside an MLP, with I numbers each.

**Saved activations.** For each token, a decoder layer computes Q numbers for the queries, K numbers for the keys and I
numbers inside the MLP. For the backward pass, a decoder layer keeps the following bytes for each token:

    Two norms keep 2 (4 + 2 b) H bytes: the input in float32, the normalised input, and the output of each norm.
    The norms of queries and keys, if the model has them, keep (4 + b) (Q + K) bytes.
    The queries, keys, values and the output of attention take 2 b (Q + K) bytes.
    The MLP keeps 4 b I bytes: its gate, its activated gate, its up projection, and the product of the last two.

With actor.gradient_checkpointing a layer keeps only its input (b H bytes per token), and the backward pass recomputes
one layer at a time. Example: a layer of Qwen2.5-1.5B in bfloat16 keeps 103,424 bytes for each token, which is 67 times
the hidden size H. `tests/run/test_memory.py` compares the formulas with tensors that real layers save, and with the
memory of a real step.

**Limits.** The formulas describe dense models like Llama and Qwen. The number `CUDA_BYTES` is a guess of the memory
that each process needs for the CUDA context, CUDA graphs and the gaps between tensors.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from run.keys import TrainConfig
from run.load import ConfigError
from training import logprobs
from training.config import PPOActorConfig

GIB = 2**30
# On a GPU a process needs about CUDA_BYTES for the CUDA context, CUDA graphs, workspaces and gaps between tensors.
CUDA_BYTES = 3 * GIB
# The bytes of each token in a run's folders tokens/ and rollout/: about 45 bytes in tensors and 5 bytes in text.
TOKEN_BYTES = 50


def count_heads(shape: Any) -> tuple[int, int]:
    """Return how many heads the queries of a layer have, and how many heads its keys have."""
    return shape.num_attention_heads, getattr(
        shape, "num_key_value_heads", None
    ) or shape.num_attention_heads


def attention_widths(shape: Any) -> tuple[int, int]:
    """Return how many numbers a layer computes per token for the queries of all heads, and how many for the keys of all
    heads."""
    queries, keys = count_heads(shape)
    width = getattr(shape, "head_dim", None) or shape.hidden_size // queries
    return width * queries, width * keys


def mlp_width(shape: Any) -> int:
    """Return the inner width of a layer's MLP."""
    return getattr(shape, "intermediate_size", 4 * shape.hidden_size)


def saved_bytes(shape: Any, b: int, has_head_norms: bool) -> int:
    """Return how many bytes per token a decoder layer saves for the backward pass, without gradient checkpointing."""
    qk = sum(attention_widths(shape))
    norms = 2 * (4 + 2 * b) * shape.hidden_size + (4 + b) * qk * has_head_norms
    return norms + 2 * b * qk + 4 * b * mlp_width(shape)


def step_bytes(
    actor: PPOActorConfig,
    shape: Any,
    n: int,
    has_head_norms: bool,
    device: str = "cpu",
    ranks: int = 1,
) -> int:
    """Return how many bytes a step needs in addition to the parameters, gradients and moments that a rank keeps."""
    b, tokens, layers = (
        getattr(torch, actor.dtype).itemsize,
        actor.mb_tokens,
        shape.num_hidden_layers,
    )
    last = shape.vocab_size * shape.hidden_size  # V H
    root = last if shape.tie_word_embeddings else 2 * last  # R
    layer = (n - root) // layers  # P
    one = tokens * saved_bytes(shape, b, has_head_norms)
    is_kept = not actor.gradient_checkpointing
    saved = layers * (one if is_kept else tokens * b * shape.hidden_size)
    head = (4 + b) * last + saved + (12 + b) * logprobs.CHUNK_ELEMENTS[device]
    middle = b * last + saved + (0 if is_kept else one)
    if not actor.is_sharded(ranks):
        return max(head, middle + 2 * b * tokens * mlp_width(shape))
    return max(b * root + head, b * root + middle + (8 + 3 * b) * layer, 4 * b * last, 8 * root)


def estimate_memory(
    config: TrainConfig, shape: Any, ranks: int, on_gpus: bool
) -> tuple[float, float, float, int]:
    """Return three estimates of memory in GiB, and the number n of the model's parameters. The first estimate
    is for a rank in a step, the second for a rank between two steps, and the third for a server on one of its GPUs.

    `shape` is the model's text configuration. With actor.offload and a GPU, the estimates for a rank do not count the
    parameters, gradients and moments, because they are in host memory. The parameters of a reference model take 4 n
    bytes. A server stores the weights, and the keys and values of max_total_tokens tokens. A server stores each number
    in 2 bytes on a GPU, and in 4 bytes on a CPU. The weights, keys and values of a server are divided among its tp_size
    GPUs. If the keys have fewer heads than the server has GPUs, several GPUs keep a copy of the same head. Raises
    ConfigError if SGLang cannot divide the heads evenly among tp_size GPUs (SGLang checks this in srt/models/qwen2.py).
    """
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(shape)
    n = sum(p.numel() for p in model.parameters())
    has_head_norms = any("q_norm" in name for name, _ in model.named_parameters())
    kept = (
        0
        if config.actor.offload and on_gpus
        else (16 if config.ref.path is None else 20) * n / ranks
    )
    trainer = kept + step_bytes(
        config.actor, shape, n, has_head_norms, "cuda" if on_gpus else "cpu", ranks
    )
    cache = (
        2 * attention_widths(shape)[1] * shape.num_hidden_layers * config.server.max_total_tokens
    )  # in numbers
    tp, (heads, keys) = config.server.tp_size, count_heads(shape)
    fits = [k for k in range(1, heads + 1) if heads % k == 0 and max(k, keys) % min(k, keys) == 0]
    if tp not in fits:
        raise ConfigError(
            f"server.tp_size={tp} does not fit {heads} query and {keys} key heads: use one of {fits}"
        )
    server = (2 if on_gpus else 4) * (n / tp + cache / min(tp, keys))
    context = CUDA_BYTES if on_gpus else 0
    return (trainer + context) / GIB, (kept + context) / GIB, (server + context) / GIB, n


def check_memory(needs: list[tuple[Any, float]], gpus: list[str], have: float) -> None:
    """Raise ConfigError if the processes of one GPU together need more than `have` GiB.

    `needs` lists each planned process with the GiB that it needs. Without GPUs, `have` is the memory of the machine,
    and all processes share this memory.
    """
    for gpu in gpus or [""]:
        here = {planned.name: gib for planned, gib in needs if gpu in planned.gpus or not gpus}
        if sum(here.values()) > have:
            each = ", ".join(f"{name} {gib:.1f}" for name, gib in here.items())
            raise ConfigError(
                f"too little memory: about {sum(here.values()):.0f} GiB are needed ({each}) and "
                f"{f'GPU {gpu}' if gpus else 'this machine'} has {have:.0f}. Lower server.max_total_tokens, actor.mb_tokens "
                "or server.count, set actor.gradient_checkpointing=true, raise --nproc-per-node, or take a smaller model"
            )


def describe_load(config: TrainConfig, n: int) -> str:
    """Return the plan's lines about the work of a step and the disk space of a run. The model has n parameters."""
    samples = config.train_dataset.batch_size * config.gconfig.n_samples
    running = (config.rollout.max_concurrent_rollouts or 1) * config.gconfig.n_samples
    slots = config.server.count * config.server.max_running_requests
    step = samples * config.gconfig.max_new_tokens * TOKEN_BYTES
    # The disk holds the newest models, the best model, and two recovery checkpoints (parameters and two moments), all
    # in float32. The disk also holds two versions of the weights that the servers read.
    models = config.saver.keep + bool(config.evaluator.interval)
    kept = (4 * models + 2 * 12 + 2 * getattr(torch, config.actor.dtype).itemsize) * n
    newest = f", kept for {config.logger.keep_steps} steps" if config.logger.keep_steps else ""
    return (
        f"{config.max_steps} steps of {samples} samples; {running} episodes run at a time, the servers decode {slots}\n"
        f"disk: at most {kept / 1e9:.1f} GB of weights, and {step / 1e6:.1f} MB a step for turns of max_new_tokens"
        f" ({step * 1440 / 1e9:.1f} GB a day at one step a minute){newest}"
    )
