"""The measurements of box.sh that need Python, each a part of this command:

    python bench/gpu/cells.py info                  the card, versions, bandwidth, peak
    python bench/gpu/cells.py make SHAPE DIR        a model with random weights
    python bench/gpu/cells.py train DIR SHAPE ...   training steps without a server
    python bench/gpu/cells.py push DIR SHAPE        a push of weights through files
    python bench/gpu/cells.py decode DIR            decodes of the small server
    python bench/gpu/cells.py run FOLDER            what a run of train.py shows

The last line of each is one JSON object. On a CPU everything runs with tiny sizes and says nothing.
"""

import argparse
import copy
import cProfile
import gzip
import json
import os
import platform
import pstats
import shutil
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SHAPES = {  # layers, hidden size, MLP, heads, key-value heads, head size, vocabulary
    "135m": (30, 576, 1536, 9, 3, 64, 49152),
    "0.5b": (24, 896, 4864, 14, 2, 64, 151936),
    "1.5b": (28, 1536, 8960, 12, 2, 128, 151936),
    "tiny": (2, 64, 128, 4, 2, 16, 512),
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GIB = 2**30


def reward(prompt, completion, prompt_ids, completion_ids, **_):
    """The share of odd tokens, so that the samples of a prompt differ and a gradient is not 0."""
    return sum(i % 2 for i in completion_ids) / max(1, len(completion_ids))


def short(value):
    if isinstance(value, dict):
        return {k: short(v) for k, v in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def say(**found):
    print(json.dumps(short(found)), flush=True)


def on_gpu():
    import torch

    return torch.cuda.is_available()


def wait():
    import torch

    if on_gpu():
        torch.cuda.synchronize()


def clock(act, repeat=10, warm=3):
    """The median seconds of `act`."""
    times = []
    for k in range(warm + repeat):
        wait()
        begin = time.perf_counter()
        act()
        wait()
        times += [time.perf_counter() - begin] * (k >= warm)
    return sorted(times)[len(times) // 2]


def info():
    import torch
    import transformers

    found = {"torch": torch.__version__, "transformers": transformers.__version__}
    found |= {"python": platform.python_version(), "cores": os.cpu_count()}
    found["shm_gib"] = shutil.disk_usage("/dev/shm").free / GIB if os.path.isdir("/dev/shm") else 0
    if on_gpu():
        card = torch.cuda.get_device_properties(0)
        found |= {"gpu": card.name, "gib": card.total_memory / GIB}
        found |= {"nccl": str(torch.cuda.nccl.version())}
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        found["matmul_tflops"] = 2 * 8192**3 / clock(lambda: a @ b) / 1e12
        x = torch.empty(2**31, device="cuda", dtype=torch.uint8).random_()
        y = torch.empty_like(x)
        found["copy_gb_s"] = 2 * x.numel() / clock(lambda: y.copy_(x)) / 1e9
    say(**found)


def make_config(shape):
    from transformers import Qwen3Config

    layers, width, inner, heads, kv_heads, head, vocabulary = SHAPES[shape]
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        bos_token_id=None,
        dtype="float32" if shape == "tiny" else "bfloat16",
    )


def make(shape, path):
    """Write a model, and a tokenizer that makes each byte a token."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    path = Path(path)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    marks = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    marks["additional_special_tokens"] = ["<|im_start|>"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **marks)
    tokenizer.chat_template = TEMPLATE
    config = make_config(shape)
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    torch.manual_seed(1)
    with torch.device("cuda" if on_gpu() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    partial = path.with_name(path.name + ".partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.replace(path)
    say(made=str(path))


def make_rows(n, longest, vocabulary):
    """n random rows in groups of 8, which share a prompt of a quarter of the longest row."""
    import torch

    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(longest // 2, longest + 1, (n,), generator=g)
    lengths[0] = longest
    real = torch.arange(longest) < lengths[:, None]  # (n, longest)
    trained = real & (torch.arange(longest) >= longest // 4)
    ids = torch.randint(0, vocabulary, (n, longest), generator=g)
    ids[:, : longest // 4] = ids[torch.arange(n) // 8 * 8, : longest // 4]
    return {
        "input_ids": ids.masked_fill(~real, 0).int(),
        "attention_mask": real,
        "loss_mask": trained.int(),
        "logprobs": torch.zeros(n, longest),
        "turn_ids": trained.int() - 1,
        "turn_rewards": torch.rand(n, 1, generator=g) * trained,
        "temperatures": torch.ones(n, longest),
        "group_ids": (torch.arange(n) // 8).int(),
    }


def start(args):
    """A trainer as train.py makes it. With --layout padded, rows are padded even where the kernel
    for packed rows would take them; with --eager, no layer is compiled."""
    import torch

    import training.actor as trainer
    from run.config import PPOActorConfig

    torch.compiler.set_stance("force_eager" if args.eager else "default")
    config = PPOActorConfig(
        dtype="bfloat16" if on_gpu() else "float32",
        mb_tokens=args.mb_tokens,
        enable_tree_training=args.layout == "tree",
        gradient_checkpointing=not args.no_checkpointing,
        ppo_n_minibatches=2,
    )
    if args.layout == "padded":
        trainer.pick_layout = lambda *_: "padded"
    actor = trainer.FSDPPPOActor(config, args.model)
    actor.create_process_group()
    actor.initialize(max_steps=10)
    return actor


def train(args):
    """Time training steps: tokens a second, share of the peak, memory beside its estimate, and the
    errors of log-probabilities in bfloat16."""
    import torch
    from roofline import Work, flops, shape_of, step_parts

    from extras.plan import count_parameters, estimate_rank
    from run.config import TrainConfig

    begin, gpu, vocabulary = time.perf_counter(), on_gpu(), SHAPES[args.shape][-1]
    actor = start(args)
    wait()
    found = {"cell": args.name, "load_s": time.perf_counter() - begin}
    if gpu:
        torch.cuda.reset_peak_memory_stats()

    def one_step(n):
        batch, times = make_rows(n, args.longest, vocabulary), [time.perf_counter()]
        batch["prox_logp"] = actor.compute_logp(batch)
        batch["logprobs"] = batch["prox_logp"] * batch["loss_mask"]
        times.append(time.perf_counter())
        actor.compute_advantages(batch)
        times.append(time.perf_counter())
        stats = actor.ppo_update(batch)
        wait()
        times.append(time.perf_counter())
        return batch, stats, [b - a for a, b in pairwise(times)]

    steps = []
    for _ in range(args.steps):
        batch, stats, parts = one_step(args.rows)
        steps.append(parts)
        print([round(x, 3) for x in parts], f"grad_norm {stats['grad_norm']:.2e}", flush=True)
    mean = [sum(x) / len(steps[1:] or steps) for x in zip(*(steps[1:] or steps))]
    seconds, tokens = sum(mean), int(batch["attention_mask"].sum())
    found |= {"first_step_s": sum(steps[0]), "logp_s": mean[0], "update_s": mean[2]}
    found |= {"step_s": seconds, "tokens": tokens, "tokens_s": tokens / seconds}
    prompt, shape = args.longest // 4, make_config(args.shape)
    n, has_head_norms = count_parameters(shape)
    found["tflops_8n"] = 8 * n * tokens / seconds / 1e12  # 2 of log pi_prox, 6 of the update
    work = Work(
        args.rows,
        prompt,
        round(tokens / args.rows) - prompt,
        2,
        args.mb_tokens,
        checkpointing=False,
    )
    parts = step_parts(shape_of(shape), work)
    useful = sum(flops(p) for name, p in parts.items() if not name.startswith("generation"))
    found["useful_tflops"] = useful / seconds / 1e12  # with attention, without recomputation
    if gpu:
        found["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
        found["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    whole = TrainConfig(model_path=args.model, actor=actor.config)
    found["estimate_gib"] = estimate_rank(whole, shape, n, has_head_norms, 1, gpu)
    if args.profile:
        profile(one_step, args)
    if args.check:
        found |= errors(actor, make_rows(8, min(args.longest, 512), vocabulary))
    say(**found)


def errors(actor, batch):
    """Errors of the trainer's log-probabilities of four rows against transformers in float32, each
    row alone, and beside them those of transformers in the trainer's numbers."""
    import torch

    mask = batch["loss_mask"].bool().clone()
    mask[4:] = False
    mine, again = actor.compute_logp(batch), actor.compute_logp(batch)
    exact = reference(actor, batch, torch.float32)
    found = {
        "trainer_vs_fp32": difference(mine, exact, mask),
        "same_bits_twice": bool((mine == again).all()),
    }
    if actor.dtype != torch.float32:
        found["hf_vs_fp32"] = difference(reference(actor, batch, actor.dtype), exact, mask)
    return found


def reference(actor, batch, dtype, rows=4):
    import torch
    from transformers import AutoModelForCausalLM

    named = actor.model.named_parameters()
    state = {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach() for n, p in named}
    with torch.device(actor.device):
        config = copy.deepcopy(actor.model.config)  # the new model sets its attention
        plain = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    plain.load_state_dict({n: x.to(dtype) for n, x in state.items()}, strict=False)
    for (_, mine), (_, theirs) in zip(plain.named_buffers(), actor.model.named_buffers()):
        mine.copy_(theirs)
    out = torch.zeros(batch["input_ids"].shape)
    head = plain.get_output_embeddings().weight.detach().float().t()
    with torch.no_grad():
        for row in range(rows):
            ids = (
                batch["input_ids"][row][batch["attention_mask"][row].bool()].long().to(actor.device)
            )
            hidden = plain.base_model(ids[None], use_cache=False).last_hidden_state[0, :-1]
            logp = torch.log_softmax((hidden.float() @ head).double(), -1)
            out[row, 1 : len(ids)] = logp.gather(1, ids[1:, None])[:, 0].float().cpu()
    return out


def difference(a, b, mask):
    d = (a - b)[mask].abs()
    return {"mean": float(d.mean()), "p99": float(d.quantile(0.99)), "max": float(d.max())}


KINDS = {  # words in a kernel's name, and its kind
    "attention": ("flash", "fmha", "attention"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk"),
    "optimizer and norms": ("adam", "multi_tensor", "foreach", "norm_kernel"),
    "compiled pointwise": ("triton",),
    "softmax": ("softmax",),
    "copies": ("memcpy", "memset", "copy", "cat"),
    "pointwise": ("elementwise", "vectorized", "reduce", "index", "scatter", "gather"),
}


def profile(one_step, args):
    """Write a table of kernels and a trace of one step, and print the GPU's busy share."""
    import torch
    from torch.profiler import ProfilerActivity

    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu()
    with torch.profiler.profile(activities=kinds) as p:
        begin = time.perf_counter()
        one_step(max(2, args.rows // 4))
        wall = time.perf_counter() - begin
    out = Path(os.environ.get("OUT", "."))
    key = "self_cuda_time_total" if on_gpu() else "self_cpu_time_total"
    events = p.key_averages()
    table = events.table(sort_by=key, row_limit=60, max_name_column_width=100)
    (out / f"profile-{args.name}.txt").write_text(table)
    by_kind = {}
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA and event.self_device_time_total:
            words = KINDS.items()
            kind = next((k for k, w in words if any(x in event.key.lower() for x in w)), "other")
            by_kind[kind] = by_kind.get(kind, 0.0) + event.self_device_time_total / 1e6
    busy = sum(by_kind.values())
    say(
        profiled_step_s=wall, busy_share=busy / wall, **{f"s of {k}": v for k, v in by_kind.items()}
    )
    trace = out / f"trace-{args.name}.json"
    p.export_chrome_trace(str(trace))
    data = gzip.compress(trace.read_bytes(), 6)
    trace.unlink()
    if len(data) < 15 * 2**20:
        trace.with_suffix(".json.gz").write_bytes(data)


def push(args):
    """Time how long the trainer writes its weights to files, and how long a server reads them."""
    from safetensors.torch import load_file

    from inference.weights import WeightUpdateMeta

    actor, found = start(args), {"cell": "push"}
    for folder in ("/dev/shm", os.environ.get("WORK", "/tmp")):
        meta = WeightUpdateMeta(mode="disk", path=f"{folder}/push-cell", address="").with_version(1)
        begin = time.perf_counter()
        with cProfile.Profile() as calls:
            actor.write_weights(meta)
        found[f"write {folder}"] = time.perf_counter() - begin
        pstats.Stats(calls).sort_stats("tottime").print_stats(6)
        files = list(Path(f"{folder}/push-cell").rglob("*.safetensors"))
        begin = time.perf_counter()
        found["gb"] = sum(f.stat().st_size for f in files) / 1e9
        for file in files:
            load_file(file, device=str(actor.device))
        wait()
        found[f"read {folder}"] = time.perf_counter() - begin
        shutil.rmtree(f"{folder}/push-cell", ignore_errors=True)
    say(**found)


def decode(path, rows, context):
    """Tokens a second of the small server, which draws a token for each of its full slots: started
    kernel by kernel, and as a CUDA graph. A step reads all weights and all keys."""
    from inference.tiny.model import Model
    from inference.tiny.sampling import SamplingParams, Sequence, sample

    numbers, device = ("bfloat16", "cuda") if on_gpu() else ("float32", "cpu")
    model = Model(path, rows, rows * context, numbers, device)
    model.resize(context)
    sequences = [Sequence("", [k], SamplingParams(sampling_seed=k)) for k in range(rows)]
    feeds, cached = [[k] for k in range(rows)], [context - 1] * rows
    read = model.cache.nbytes + sum(weight.nbytes for weight in model.weights.values())
    found = {"cell": "decode", "model": Path(path).name, "rows": rows, "context": context}
    graphs = model.graphs
    for way in ("eager", "graph")[: 1 + on_gpu()]:
        model.graphs = graphs if way == "graph" else None
        seconds = clock(lambda: sample(model.step(feeds, cached), sequences))
        found |= {f"{way}_ms": seconds * 1e3, f"{way}_tokens_s": rows / seconds}
        found[f"{way}_gb_s"] = read / seconds / 1e9
    say(**found)


def run(folder):
    """All steps of a run after the first two."""
    file = Path(folder) / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    found = {"run": Path(folder).name, "steps": len(lines)}
    warm = lines[2:] or lines
    for key in (
        "step_s",
        "rollout_wait_s",
        "train_s",
        "sync_s",
        "tokens",
        "staleness_mean",
        "mixed_version_share",
        "reward",
    ):
        with suppress(KeyError, ZeroDivisionError):
            found[key] = sum(line[key] for line in warm) / len(warm)
    with suppress(KeyError, ValueError, IndexError):
        found["wall_s"] = lines[-1]["wall_s"]
        found["max logp_mismatch"] = max(line["logp_mismatch"] for line in lines)
        found["success first"] = lines[0]["success"]
        found["success last five"] = sum(line["success"] for line in lines[-5:]) / len(lines[-5:])
    say(**found)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    sub = parser.add_subparsers(dest="part", required=True)
    sub.add_parser("info")
    p = sub.add_parser("make")
    p.add_argument("shape", choices=SHAPES), p.add_argument("path")
    p = sub.add_parser("run")
    p.add_argument("folder")
    p = sub.add_parser("decode")
    p.add_argument("model")
    p.add_argument("--batches", type=int, nargs="+", default=[64, 256])
    p.add_argument("--context", type=int, default=1024)
    for part in ("train", "push"):
        p = sub.add_parser(part)
        p.add_argument("model"), p.add_argument("shape", choices=SHAPES)
        p.add_argument("--name", default=part)
        p.add_argument("--layout", choices=["packed", "padded", "tree"], default="packed")
        for name in ("eager", "profile", "check", "no-checkpointing"):
            p.add_argument(f"--{name}", action="store_true")
        p.add_argument("--rows", type=int, default=32)
        p.add_argument("--longest", type=int, default=2048)
        p.add_argument("--steps", type=int, default=3)
        p.add_argument("--mb-tokens", type=int, default=16384)
    args = parser.parse_args()
    parts = {"info": info, "make": lambda: make(args.shape, args.path)}
    parts |= {"run": lambda: run(args.folder)}
    parts["decode"] = lambda: [decode(args.model, rows, args.context) for rows in args.batches]
    parts |= {"train": lambda: train(args), "push": lambda: push(args)}
    parts[args.part]()


if __name__ == "__main__":
    main()
