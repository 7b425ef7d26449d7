"""The measurements of box.sh that need Python, one command for each:

    python bench/gpu/cells.py info                  the card, versions, bandwidth, peak
    python bench/gpu/cells.py make SHAPE DIR        a model with random weights
    python bench/gpu/cells.py train DIR ...         training steps without a server
    python bench/gpu/cells.py push DIR              a push of weights through files
    python bench/gpu/cells.py decode DIR            decodes of the small server
    python bench/gpu/cells.py run FOLDER            what a run of train.py shows
    python bench/gpu/cells.py note CELL ...         the page and the JSON of all cells

Each prints JSON objects, one per line, and `note` collects them. On a CPU everything runs with tiny
sizes, and the numbers say nothing.
"""

import argparse
import json
import os
import platform
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
    "1.5b": (28, 1536, 8960, 12, 2, 128, 151936),
    "tiny": (2, 64, 128, 4, 2, 16, 512),
}
SIZES = ["num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"]
SIZES += ["num_key_value_heads", "head_dim", "vocab_size"]
GIB = 2**30


def reward(prompt, completion, prompt_ids, completion_ids, **_):
    """The share of odd tokens: with it, the samples of a prompt differ, so a gradient is not 0."""
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


def make(shape, path):
    """Write a model, and a tokenizer that knows numbers."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from tasks.base_model import make_tokenizer, save_atomically

    tokenizer = make_tokenizer(map(str, range(500)))
    config = Qwen3Config(
        **dict(zip(SIZES, SHAPES[shape])),
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32" if shape == "tiny" else "bfloat16",
    )
    torch.manual_seed(1)
    with torch.device("cuda" if on_gpu() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    save_atomically(Path(path), model, tokenizer)


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


def start(model, tree=False, eager=False, **options):
    """A trainer as train.py makes it. With `eager`, no layer is compiled."""
    import torch

    from run.config import PPOActorConfig
    from training.actor import FSDPPPOActor

    torch.compiler.set_stance("force_eager" if eager else "default")
    dtype, tree = "bfloat16" if on_gpu() else "float32", {"enable_tree_training": tree}
    actor = FSDPPPOActor(PPOActorConfig(dtype=dtype, ppo_n_minibatches=2, **tree, **options), model)
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

    begin, gpu = time.perf_counter(), on_gpu()
    keys = {"mb_tokens": args.mb_tokens, "gradient_checkpointing": not args.no_checkpointing}
    actor = start(args.model, args.tree, args.eager, **keys)
    shape, vocabulary = actor.model.config, actor.model.config.vocab_size
    wait()
    found = {"cell": args.name, "load_s": time.perf_counter() - begin}
    if args.check:
        found |= errors(actor, make_rows(8, min(args.longest, 512), vocabulary))
    if gpu:
        torch.cuda.empty_cache()
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
    for _ in range(3):
        batch, stats, parts = one_step(args.rows)
        steps.append(parts)
        print([round(x, 3) for x in parts], f"grad_norm {stats['grad_norm']:.2e}", flush=True)
    mean = [sum(x) / 2 for x in zip(*steps[1:])]  # the first compiles
    seconds, tokens = sum(mean), int(batch["attention_mask"].sum())
    found |= {"first_step_s": sum(steps[0]), "logp_s": mean[0], "update_s": mean[2]}
    found |= {"step_s": seconds, "tokens": tokens, "tokens_s": tokens / seconds}
    prompt = args.longest // 4
    n, has_head_norms = count_parameters(shape)
    answer = round(tokens / args.rows) - prompt
    work = Work(args.rows, prompt, answer, 2, args.mb_tokens, checkpointing=False)
    parts = step_parts(shape_of(shape), work)
    useful = sum(flops(p) for name, p in parts.items() if not name.startswith("generation"))
    found["useful_tflops"] = useful / seconds / 1e12  # with attention, without recomputation
    if gpu:
        found["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
    whole = TrainConfig(model_path=args.model, actor=actor.config)
    found["estimate_gib"] = estimate_rank(whole, shape, n, has_head_norms, 1, gpu)
    if args.profile:
        profile(one_step, args)
    say(**found)


def errors(actor, batch):
    """Errors of the log-probabilities of four rows, by the trainer and by transformers in the
    trainer's dtype, both against transformers in float32 with each row alone."""
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

    plain = AutoModelForCausalLM.from_pretrained(actor.model_path, dtype=dtype).to(actor.device)
    head = plain.get_output_embeddings().weight.detach().float().t()
    out = torch.zeros(batch["input_ids"].shape)
    for row in range(rows):
        ids = batch["input_ids"][row][batch["attention_mask"][row]].long().to(actor.device)
        with torch.no_grad():
            hidden = plain.base_model(ids[None], use_cache=False).last_hidden_state[0, :-1]
        logp = torch.log_softmax((hidden.float() @ head).double(), -1)
        out[row, 1 : len(ids)] = logp.gather(1, ids[1:, None])[:, 0].float().cpu()
    return out


def difference(a, b, mask):
    d = (a - b)[mask].abs()
    return {"mean": float(d.mean()), "p99": float(d.quantile(0.99)), "max": float(d.max())}


def profile(one_step, args):
    """Write a table of kernels of one step, and print the GPU's busy share."""
    import torch
    from torch.profiler import ProfilerActivity

    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu()
    with torch.profiler.profile(activities=kinds) as p:
        begin = time.perf_counter()
        one_step(max(2, args.rows // 4))
        wall = time.perf_counter() - begin
    events = p.key_averages()
    key = "self_cuda_time_total" if on_gpu() else "self_cpu_time_total"
    table = events.table(sort_by=key, row_limit=60, max_name_column_width=100)
    (Path(os.environ.get("OUT", ".")) / f"profile-{args.name}.txt").write_text(table)
    kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(e.self_device_time_total for e in kernels) / 1e6
    say(profiled_step_s=wall, busy_share=busy / wall)


def push(model):
    """Time how long the trainer takes to write its weights to files, and a server to read them."""
    from safetensors.torch import load_file

    from inference.weights import WeightUpdateMeta

    actor, found = start(model), {"cell": "push"}
    for folder in ("/dev/shm", os.environ.get("WORK", "/tmp")):
        meta = WeightUpdateMeta(mode="disk", path=f"{folder}/push-cell", address="").with_version(1)
        begin = time.perf_counter()
        actor.write_weights(meta)
        found[f"write {folder}"] = time.perf_counter() - begin
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
    """Tokens a second of the small server, which draws a token for each of its full slots, once
    started kernel by kernel, and once as a CUDA graph. A step reads all weights and all keys."""
    from inference.tiny.model import Model
    from inference.tiny.sampling import SamplingParams, Sequence, sample

    numbers, device = ("bfloat16", "cuda") if on_gpu() else ("float32", "cpu")
    model = Model(path, rows, rows * context, numbers, device)
    model.resize(context)
    sequences = [Sequence("", [k], SamplingParams(sampling_seed=k)) for k in range(rows)]
    feeds, cached = [[k] for k in range(rows)], [context - 1] * rows
    count = sum(shape.numel() for shape in model.shapes.values())
    read = model.cache.nbytes + count * model.cache.element_size()
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
    times = ("step_s", "rollout_wait_s", "train_s", "sync_s")
    for key in (*times, "tokens", "staleness_mean", "mixed_version_share", "reward"):
        with suppress(KeyError, ZeroDivisionError):
            found[key] = sum(line[key] for line in warm) / len(warm)
    with suppress(KeyError, ValueError, IndexError):
        found["wall_s"] = lines[-1]["wall_s"]
        found["max logp_mismatch"] = max(line["logp_mismatch"] for line in lines)
        found["success first"] = lines[0]["success"]
        found["success last five"] = sum(line["success"] for line in lines[-5:]) / len(lines[-5:])
    say(**found)


def note(cell, *numbers):
    """Add a cell to $WORK/cells.jsonl, and write all cells to $OUT: as JSON, and as a page."""
    work, out = Path(os.environ["WORK"]), Path(os.environ["OUT"])
    said = (work / f"logs/{cell}.log").read_text(errors="replace").splitlines()
    figures = [json.loads(line) for line in said if line.startswith('{"')]
    tests = [x for x in said if x.startswith(("FAILED", "ERROR")) or " passed" in x]
    keys = {"cell": cell, **dict(zip(("rc", "seconds", "limit"), map(int, numbers)))}
    last = said[-14:] if keys["rc"] else []
    with (work / "cells.jsonl").open("a") as file:
        file.write(json.dumps(keys | {"figures": figures, "tests": tests, "last": last}) + "\n")
    cells = [json.loads(line) for line in (work / "cells.jsonl").read_text().splitlines()]
    title = os.environ["TITLE"]  # the card, the date, the revision
    (out / "summary.json").write_text(json.dumps({"title": title, "cells": cells}, indent=1))
    page = [f"# {title}", "", "| cell | rc | s | figures |", "|---|---|---|---|"]
    for c in cells:
        text = "<br>".join([", ".join(f"{k} {x}" for k, x in f.items()) for f in c["figures"]])
        page.append(f"| {c['cell']} | {c['rc']} | {c['seconds']} of {c['limit']} | {text} |")
    for c in cells:
        if lines := [x[:300] for x in c["tests"][-30:] + c["last"]]:
            page += ["", f"## {c['cell']}", "", "```", *lines, "```"]
    (out / "summary.md").write_text("\n".join(page) + "\n")
    print(keys, *figures, *tests, *last, sep="\n")


def main():
    simple = {"info": info, "make": make, "push": push, "run": run, "note": note}
    if len(sys.argv) > 1 and sys.argv[1] in simple:
        return simple[sys.argv[1]](*sys.argv[2:])
    parser = argparse.ArgumentParser(usage=__doc__)
    sub = parser.add_subparsers(dest="part", required=True)
    p = sub.add_parser("decode")
    p.add_argument("model")
    p.add_argument("--batches", type=int, nargs="+", default=[64, 256])
    p.add_argument("--context", type=int, default=1024)
    p = sub.add_parser("train")
    p.add_argument("model")
    p.add_argument("--name", default="train")
    for name in ("tree", "eager", "profile", "check", "no-checkpointing"):
        p.add_argument(f"--{name}", action="store_true")
    p.add_argument("--rows", type=int, default=32)
    p.add_argument("--longest", type=int, default=2048)
    p.add_argument("--mb-tokens", type=int, default=16384)
    args = parser.parse_args()
    if args.part == "train":
        train(args)
    else:
        for rows in args.batches:
            decode(args.model, rows, args.context)


if __name__ == "__main__":
    main()
