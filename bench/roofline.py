"""Claim: the time of a training step can be estimated from FLOPs and bytes alone, without a GPU (a
roofline).

    python bench/roofline.py                    # a step of gsm8k with Qwen2.5-1.5B on one H100
    python bench/roofline.py --model 7b --device h200 --answer 800
    python bench/roofline.py --model DIR --peak 800 --bandwidth 4300   # 800 TFLOP/s, 4300 GB/s
    python bench/roofline.py --measure      # a small model on this machine, against the estimate

**The estimate.** A step consists of parts, and a part consists of kernels. A kernel computes
`flops` floating-point operations and moves `bytes` between the memory and the processor. On a
device with `peak` FLOP/s and `bandwidth` bytes/s a kernel takes at least

    seconds = max(flops / peak, bytes / bandwidth)

The kernels of a part run one after another, so a part takes the sum of their times. A matrix
product of (t, i) and (i, o) has 2 t i o FLOPs and moves t i + i o + t o numbers. For a pointwise
operation, such as a norm, the estimate counts only the bytes that it reads and writes, and no
FLOPs. PyTorch runs each such operation as a kernel of its own. SGLang fuses them into other
kernels, so the estimate of generation has no pointwise kernels.

**FLOPs.** The formulas count the same FLOPs as torch.utils.flop_counter
(tests/training/test_roofline.py). For attention, it counts every pair of a query and a key. A
causal kernel computes only half of the pairs, so the time of attention is estimated from half of
the FLOPs.

**Not included.** The estimate leaves out kernel launches, the time of Python code, the network,
idle time, padding, and the overlap of generation with training. Real kernels reach only a part of
the peak, so the estimate is a lower bound of the time.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

DEVICES = {  # TFLOP/s of dense bf16 matrix products and GB/s of the memory, from the vendor's data sheets (SXM)
    "a100": (312, 2039),
    "h100": (989, 3350),
    "h200": (989, 4800),
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder-only model like Llama or Qwen."""

    layers: int
    H: int  # hidden size
    inner: int  # inner size of the MLP
    Q: int  # size of a token's queries, all heads together
    K: int  # size of a token's keys, all heads together
    V: int  # vocabulary
    tied: bool  # whether embedding and last layer share their weights

    @property
    def products(self) -> list[tuple[int, int]]:
        """The (input size, output size) of each matrix product of a layer. The last pair is the
        output projection of the MLP."""
        H, inner, Q, K = self.H, self.inner, self.Q, self.K
        return [(H, Q), (H, K), (H, K), (Q, H), (H, inner), (H, inner), (inner, H)]

    @property
    def n(self) -> int:
        """The number of parameters in weight matrices."""
        return self.layers * sum(i * o for i, o in self.products) + self.V * self.H * (
            1 if self.tied else 2
        )


SHAPES = {
    "0.6b": Shape(28, 1024, 3072, 2048, 1024, 151936, tied=True),  # Qwen3-0.6B
    "1.5b": Shape(28, 1536, 8960, 1536, 256, 151936, tied=True),  # Qwen2.5-1.5B
    "7b": Shape(28, 3584, 18944, 3584, 512, 152064, tied=False),  # Qwen2.5-7B
}


def shape_of(config: Any) -> Shape:
    """Return the sizes of a model from its configuration in transformers."""
    heads = config.num_attention_heads
    d = getattr(config, "head_dim", None) or config.hidden_size // heads
    sizes = config.num_hidden_layers, config.hidden_size, config.intermediate_size, heads * d
    return Shape(
        *sizes, config.num_key_value_heads * d, config.vocab_size, config.tie_word_embeddings
    )


@dataclass(frozen=True)
class Work:
    """The numbers that determine the work of a training step. The defaults are the values of
    configs/gsm8k.yaml and typical lengths."""

    rows: int = 512  # samples in a step
    prompt: int = 120  # tokens of a prompt
    answer: int = 300  # tokens of an answer
    minibatches: int = 4
    mb_tokens: int = 16384  # tokens of a forward pass
    b: int = 2  # bytes of a number in a forward pass
    checkpointing: bool = True
    chunk: int = 1 << 27  # number of logits in a chunk of the last layer
    slots: int = 256  # sequences that the server decodes at the same time
    ranks: int = 1
    disk: float = 2e9  # speed of writing or reading a file, in bytes/s (weight update of mode disk)

    @property
    def length(self) -> int:
        return self.prompt + self.answer

    @property
    def passes(self) -> int:
        """The number of forward passes that a step needs for all of its rows."""
        return self.minibatches * ceil(self.rows * self.length / self.minibatches / self.mb_tokens)


@dataclass(frozen=True)
class Kernel:
    """The counted FLOPs and the bytes of one kernel, which computes only the fraction `share` of
    these FLOPs.

    The fraction is one half for causal attention, and 1 for every other kernel.
    """

    flops: float
    bytes: float
    share: float = 1.0


Part = list[Kernel]


def seconds(part: Part, peak: float, bandwidth: float) -> float:
    """Return the least time of a part of a step on a device with `peak` FLOP/s and `bandwidth`
    bytes/s."""
    return sum(max(kernel.share * kernel.flops / peak, kernel.bytes / bandwidth) for kernel in part)


def flops(part: Part) -> float:
    return sum(kernel.flops for kernel in part)


# In the functions below, the model processes `rows` rows of `length` tokens in `passes` forward
# passes, and each number takes b bytes.


def product(t: float, i: int, o: int, b: int, times: int = 1) -> Part:
    """Return the kernel that multiplies t tokens of size i by a matrix (i, o), which it reads once
    in each of `times` passes."""
    return [Kernel(2 * t * i * o, b * (t * i + t * o + times * i * o))]


def attention(s: Shape, rows: float, length: float, b: int, products: int = 2) -> Part:
    """Return the kernel of causal attention with `products` matrix products: 2 in a forward pass, 5
    in a backward pass."""
    numbers = rows * length * (2 * s.Q + 2 * s.K) * products / 2
    return [Kernel(2 * products * s.Q * rows * length**2, b * numbers, share=0.5)]


def pointwise(s: Shape, b: int) -> float:
    """Return the bytes per token that the pointwise operations of a layer read and write.

    A layer has two norms, which compute in float32: convert, square, mean, multiply, convert back,
    multiply by the weight. The rotary embedding multiplies, negates, concatenates, multiplies and
    adds queries and keys. The MLP computes silu(gate) * up.
    """
    norms = 2 * ((4 * b + 28) if b < 4 else 36) * s.H
    return norms + b * (10 * (s.Q + s.K) + 2 * s.Q + 5 * s.inner + 6 * s.H)


def layers_forward(
    s: Shape,
    rows: float,
    length: int,
    b: int,
    passes: int,
    fused: bool = False,
    again: bool = False,
) -> Part:
    """Return the kernels of a forward pass through all layers. If `fused` is true, the list has no
    kernels of pointwise operations.

    If `again` is true, the kernels recompute the layers for gradient checkpointing, without the
    last product of each layer.
    """
    t, products = rows * length, s.products[:-1] if again else s.products
    one = [kernel for i, o in products for kernel in product(t, i, o, b, passes)] + attention(
        s, rows, length, b
    )
    return (one + ([] if fused else [Kernel(0, t * pointwise(s, b))])) * s.layers


def layers_backward(s: Shape, rows: float, length: int, b: int, passes: int) -> Part:
    """Return the kernels of a backward pass through all layers. For each matrix product of the
    forward pass it has two, and for each pointwise operation about two."""
    t = rows * length
    one = [kernel for i, o in s.products for kernel in 2 * product(t, i, o, b, passes)]
    return (
        one + attention(s, rows, length, b, products=5) + [Kernel(0, 2 * t * pointwise(s, b))]
    ) * s.layers


def head_forward(s: Shape, n: float, b: int, chunk: int) -> Part:
    """Return the kernels of the last layer for n tokens (training/logprobs.py): logits, softmax and
    entropy in float32."""
    chunks = ceil(n / max(1, chunk // s.V))
    # `softmax` is a sum of bytes per logit: write logits of 4 bytes instead of b bytes, divide (8),
    # log_softmax, which reads twice (12), exp (8), multiply (12), sum (4).
    softmax = (4 - b + 8 + 12 + 8 + 12 + 4) * n * s.V
    return [*product(n, s.H, s.V, b, chunks), Kernel(0, softmax)]


def head_backward(s: Shape, n: float, b: int, chunk: int) -> Part:
    """Return the kernels that recompute the logits, and compute the gradients of the hidden states
    and of the last layer."""
    chunks = ceil(n / max(1, chunk // s.V))
    # `softmax` is a sum of bytes per logit: write logits of 4 bytes instead of b bytes, divide (8),
    # log_softmax (12), exp (8), multiply by -g (8), divide (8), and convert if b < 4 (b + 4).
    softmax = (4 - b + 8 + 12 + 8 + 8 + 8 + (b + 4) * (b < 4)) * n * s.V
    added = (
        (b + 8) * chunks * s.V * s.H
    )  # bytes moved to add the gradient of every chunk to a float32 sum
    return [*(3 * product(n, s.H, s.V, b, chunks)), Kernel(0, softmax + added)]


# The parts of a step


def step_parts(s: Shape, w: Work) -> dict[str, Part]:
    """Return the parts of a step in the order in which they run."""
    b, m, tokens = w.b, w.passes, w.rows * w.length
    args = s, w.rows, w.length, b, m
    context, steps = w.prompt + w.answer / 2, ceil(w.rows * w.answer / w.slots)
    decode = layers_forward(s, w.slots, 1, b, 1, fused=True) + product(w.slots, s.H, s.V, b)
    decode.append(
        Kernel(4 * s.layers * s.Q * w.slots * context, 2 * b * s.layers * s.K * w.slots * context)
    )
    own = s.n / w.ranks  # number of parameters that a rank keeps
    gather = Kernel(
        0, m * (4 + b) * s.n
    )  # in each pass, FSDP converts every parameter from 4 to b bytes
    parts = {
        "generation: prefill": layers_forward(
            s, w.rows, w.prompt, b, ceil(tokens / 16384), fused=True
        ),
        "generation: decode": [Kernel(steps * k.flops, steps * k.bytes, k.share) for k in decode],
        "pi_prox: layers": [*layers_forward(*args), gather],
        "pi_prox: last layer": head_forward(s, w.rows * w.answer, b, w.chunk),
        "forward: layers": [*layers_forward(*args), gather],
        "forward: last layer": head_forward(s, w.rows * w.answer, b, w.chunk),
        "recomputation": layers_forward(*args, again=True) if w.checkpointing else [],
        # The gradient of each pass is converted to float32 and added to the sum of the gradients.
        "backward: layers": [*layers_backward(*args), gather, Kernel(0, m * (b + 16) * own)],
        "backward: last layer": head_backward(s, w.rows * w.answer, b, w.chunk),
        # Each optimizer step computes the gradient's norm, scales the gradient, and updates the
        # parameters with AdamW.
        "optimizer": [Kernel(0, w.minibatches * (4 + 8 + 28) * own)],
    }
    training = ("pi_prox", "forward", "recomputation", "backward")
    return {
        k: divide(part, w.ranks) if k.startswith(training) else part for k, part in parts.items()
    }


def divide(part: Part, ranks: int) -> Part:
    """Return the kernels of one rank, if `ranks` ranks share the work of `part` equally."""
    return [Kernel(kernel.flops / ranks, kernel.bytes / ranks, kernel.share) for kernel in part]


def table(rows: list[list[str]]) -> str:
    """Return a Markdown table. The first row has the column names."""
    return "\n".join(
        "| " + " | ".join(row) + " |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    )


def describe(s: Shape, w: Work, peak: float, bandwidth: float) -> str:
    """Return the table of a step's parts, followed by the total times of generation and
    training."""
    rows = [["part", "TFLOP", "GB", "s", "limited by"]]
    parts = step_parts(s, w)
    times = {name: seconds(part, peak, bandwidth) for name, part in parts.items()}
    for name, part in parts.items():
        moved = sum(kernel.bytes for kernel in part)
        computing = sum(kernel.share * kernel.flops for kernel in part) / peak
        limit = "-" if not part else "FLOP/s" if computing > times[name] / 2 else "memory"
        rows.append(
            [name, f"{flops(part) / 1e12:,.0f}", f"{moved / 1e9:,.0f}", f"{times[name]:.2f}", limit]
        )
    training = sum(t for name, t in times.items() if not name.startswith(("generation", "new")))
    useful = 6 * s.n * w.rows * w.length / w.ranks
    generation = times["generation: prefill"] + times["generation: decode"]
    file = 2 * w.b * s.n / w.disk
    return (
        f"{table(rows)}\n\n"
        f"generation {generation:.2f} s, training {training:.2f} s; with weight_update.mode=disk the new weights are "
        f"written and read in {file:.1f} s at {w.disk / 1e9:.0f} GB/s\n"
        f"training: {w.rows * w.length / training:,.0f} tokens/s, {1e6 * training / (w.rows * w.length):.0f} us a token, "
        f"{useful / training / peak:.0%} of the peak (6 FLOPs a parameter and token)"
    )


# Comparison with measurements


def least(actions: dict[str, Callable[[], Any]], rounds: int = 12) -> dict[str, float]:
    """Call every action once in each round, and return the shortest time of each in seconds,
    because other programs on the machine can only make an action slower."""
    import torch

    found: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds + 1):
        for name, act in actions.items():
            begin = time.perf_counter()
            act()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            found[name].append(time.perf_counter() - begin)
    return {
        name: min(times[1:]) for name, times in found.items()
    }  # the first round is slower and does not count


def make_models(
    layers: int, width: int, vocabulary: int, dtype: Any, folder: Path
) -> tuple[Any, Any, Any]:
    """Make a small random model. Return its configuration, an actor that trains it, and a model of
    transformers with the same configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from run.config import PPOActorConfig
    from training.actor import FSDPPPOActor

    heads = {"num_attention_heads": width // 64, "num_key_value_heads": max(1, width // 256)}
    keys = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
    }
    config = AutoConfig.for_model(
        "qwen2", **keys, **heads, tie_word_embeddings=True, pad_token_id=0
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "model")
    actor = FSDPPPOActor(PPOActorConfig(dtype=str(dtype).removeprefix("torch.")), folder / "model")
    actor.create_process_group()
    actor.initialize(max_steps=10)
    plain: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).to(actor.device)
    return config, actor, plain


def measure(layers: int, width: int, vocabulary: int, rows: int, length: int, folder: Path) -> str:
    """Measure each part of a small model's step on this machine. Return a table of estimates and
    measurements."""
    import torch
    from transformers import DynamicCache

    from inference.weights import named_buckets, write_checkpoint
    from training.logprobs import token_logprobs

    torch.set_num_threads(1)  # as train.py does
    on_gpu = torch.cuda.is_available()
    device, b, dtype = ("cuda", 2, torch.bfloat16) if on_gpu else ("cpu", 4, torch.float32)
    size, big = (8192, 2**30) if on_gpu else (1024, 2**27)
    a, x = (
        torch.randn(size, size, device=device, dtype=dtype),
        torch.zeros(big, device=device, dtype=torch.uint8),
    )
    y, matrix = (
        torch.zeros_like(x),
        torch.randn(big // 2**12 // b, 2**12, device=device, dtype=dtype),
    )
    vectors = torch.randn(rows, 2**12, device=device, dtype=dtype)

    # 1. Make a small model, and the inputs for measuring each part.
    config, actor, plain = make_models(layers, width, vocabulary, dtype, folder)
    s, w = (
        shape_of(config),
        Work(rows, length // 4, length - length // 4, 1, rows * length, b, False, slots=rows),
    )
    ids = torch.randint(0, vocabulary, (rows, length), device=device)
    trained, tau = ids[:, w.prompt :].flatten(), torch.ones(rows * w.answer, device=device)
    weight = (torch.randn(vocabulary, width, device=device) / width**0.5).to(dtype).requires_grad_()
    states = torch.randn(len(trained), width, device=device).to(dtype).requires_grad_()
    cache = DynamicCache(config=config)
    with torch.no_grad():
        plain(ids[:, : int(w.prompt + w.answer / 2)], past_key_values=cache)

    # 2. Measure. A backward pass is measured together with its forward pass.
    def layers_alone() -> Any:
        return actor.model.read_hidden(lambda h, _: h, input_ids=ids)

    def head() -> Any:
        return token_logprobs(states, weight, trained, tau)[0].sum()

    def optimize() -> None:
        torch.nn.utils.clip_grad_norm_(actor.model.parameters(), 1.0)
        actor.optimizer.step()

    @torch.no_grad()
    def decode() -> None:
        plain(ids[:, :1], past_key_values=cache)
        cache.crop(-1)

    buckets = named_buckets(actor.model, dtype, bucket_mb=0)
    state, content = {name: x for bucket in buckets for name, x in bucket}, bytes(b * s.n)
    actions: dict[str, Callable[[], Any]] = {
        "product": lambda: a @ a,
        "copy": lambda: y.copy_(x),
        "few rows": lambda: torch.nn.functional.linear(vectors, matrix),
        "generation: prefill": torch.no_grad()(
            lambda: plain.base_model(ids[:, : w.prompt], use_cache=False)
        ),
        "generation: decode": decode,
        "pi_prox: layers": torch.no_grad()(layers_alone),
        "forward: layers": layers_alone,
        "forward: last layer": head,
        "backward: layers": lambda: layers_alone().sum().backward(),
        "backward: last layer": lambda: head().backward(),
        "optimizer": optimize,
        "file": lambda: (folder / "file").write_bytes(content),
        "new weights: disk": lambda: write_checkpoint(state, folder / "model", folder / "new"),
    }
    found = least(actions)
    actor.destroy()
    for name in ("layers", "last layer"):
        found[f"backward: {name}"] -= found[f"forward: {name}"]
    peak, bandwidth, few = (
        2 * size**3 / found.pop("product"),
        2 * big / found.pop("copy"),
        big / found.pop("few rows"),
    )
    return compare(s, w, found, peak, bandwidth, few, b * s.n / found.pop("file"))


def compare(
    s: Shape,
    w: Work,
    found: dict[str, float],
    peak: float,
    bandwidth: float,
    few: float,
    disk: float,
) -> str:
    """Return a table of the estimated and the measured seconds of each part.

    Generation is measured with transformers, which does not fuse kernels. `peak` is in FLOP/s, and
    `bandwidth`, `few` and `disk` are in bytes per second. `few` is the measured speed of reading a
    large matrix to multiply it by a few rows, as a decode step does. On a CPU, `few` is below
    `bandwidth`, because the CPU's library rearranges the matrix before the product.
    """
    b, rows = w.b, w.rows
    parts = step_parts(s, w) | {"new weights: disk": [Kernel(0, b * s.n)]}
    parts["generation: decode"] = divide(
        parts["generation: decode"], w.answer
    )  # only one decode step is measured
    for name, t in {"generation: prefill": rows * w.prompt, "generation: decode": rows}.items():
        parts[name] = [*parts[name], Kernel(0, t * s.layers * pointwise(s, b))]
    lines = [["part", "GFLOP", "GB", "estimate ms", "measured ms", "measured / estimate"]]
    for name, taken in found.items():
        rate = {"new weights: disk": disk, "generation: decode": few}.get(name, bandwidth)
        estimate = seconds(parts[name], peak, rate)
        moved = sum(kernel.bytes for kernel in parts[name]) / 1e9
        numbers = [
            f"{flops(parts[name]) / 1e9:.1f}",
            f"{moved:.2f}",
            f"{1e3 * estimate:.1f}",
            f"{1e3 * taken:.1f}",
        ]
        lines.append([name, *numbers, f"{taken / estimate:.2f}"])
    where = f"{peak / 1e9:,.0f} GFLOP/s, memory {bandwidth / 1e9:.1f} GB/s, products of few rows {few / 1e9:.1f} GB/s"
    where += f", files {disk / 1e9:.1f} GB/s"
    size_of = f"{s.n:,} parameters, {rows} rows of {w.length} tokens"
    return f"measured on this machine: {where}; {size_of}\n\n{table(lines)}"


def main() -> None:
    """Print the table of a step, or compare estimates with measurements."""
    import tempfile

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="1.5b", help=f"{', '.join(SHAPES)}, or a model's folder")
    parser.add_argument("--device", choices=[*DEVICES], default="h100")
    parser.add_argument("--peak", type=float, help="TFLOP/s of the device")
    parser.add_argument("--bandwidth", type=float, help="GB/s of the device's memory")
    parser.add_argument("--measure", action="store_true")
    for name in ("rows", "prompt", "answer", "minibatches", "mb_tokens", "chunk", "slots", "ranks"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Work(), name))
    args = parser.parse_args()
    if args.measure:
        import torch

        sizes = (16, 2048, 32768, 16, 1024) if torch.cuda.is_available() else (2, 512, 8192, 2, 256)
        with tempfile.TemporaryDirectory() as folder:
            print(measure(*sizes, Path(folder)))
        return
    if args.model in SHAPES:
        s = SHAPES[args.model]
    else:
        from transformers import AutoConfig

        s = shape_of(AutoConfig.from_pretrained(args.model).get_text_config())
    given = {name: value for name, value in vars(args).items() if name in Work.__dataclass_fields__}
    default = DEVICES[args.device]
    peak, bandwidth = 1e12 * (args.peak or default[0]), 1e9 * (args.bandwidth or default[1])
    print(
        f"{args.model} on {args.device}: {s.n:,} parameters, {peak / 1e12:.0f} TFLOP/s, {bandwidth / 1e9:.0f} GB/s\n"
    )
    print(describe(s, Work(**given), peak, bandwidth))


if __name__ == "__main__":
    main()
