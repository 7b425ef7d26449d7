"""Claim: the small server (inference/tiny) decodes faster than transformers' own model.generate.

    python bench/engine.py [--quick] [--models 0.13M 3.3M 15.7M]
    python bench/engine.py --quick --models smollm2 --path DIR [--dtype bfloat16] [--static]

A random Qwen3, or the pretrained model in DIR, adds 128 tokens to each of 1, 8, 32 or 64 random
prompts of 64 tokens, on one thread. The unit is tokens per second of CPU time, because other
programs lengthen the wall time. Three ways to generate are repeated in turn, and the fastest
repetition of each counts, because other programs can only slow it down:

    generate   model.generate on one batch, at temperature 1; with --static, its cache has a fixed
               length, which makes it faster on a CPU
    engine     the scheduler and the model in this process, with the logprob of every token
    http       POST /generate of a server process, whose CPU time alone counts

engine / generate should be above 1, except for one sequence of the largest model. The last column
says whether the server is deterministic on this machine (inference/tiny/model.py, "Bits"). If it
is, a prompt's last logits have the same bits whether they come from a prefill of this prompt alone,
from a prefill of a batch, or from a decode step.

Two more lines for each model have the CPU seconds of 4 groups of 8 answers to prompts of 145
tokens, as training asks for them. They compare model.generate, the engine made to compute the
prompt of every answer, and the engine as it is, which computes a group's prompt once and copies its
keys. The first line has one new token per answer, so it measures the prompts.
"""

import argparse
import asyncio
import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as transformers_logging

from inference.tiny.model import Model
from inference.tiny.sampling import SamplingParams, Sequence
from inference.tiny.scheduler import Scheduler

ROOT = Path(__file__).resolve().parent.parent
PROMPT, NEW = 64, 128
# layers, hidden size, vocabulary, heads, key heads, width of the feed-forward layers
MODELS = {
    "0.13M": (2, 64, 64, 4, 2, 256),
    "3.3M": (4, 256, 512, 4, 2, 736),
    "15.7M": (6, 384, 4096, 6, 3, 1440),
}
PORT = 31879
URL = f"http://127.0.0.1:{PORT}"


COUNTS = (1, 8, 32, 64)  # sequences at a time
GROUPS, MEMBERS, SHARED = 4, 8, 145  # groups, members of each, tokens of a prompt


def build(
    layers: int, width: int, vocab: int, heads: int, groups: int, inner: int
) -> Qwen3ForCausalLM:
    """Return a random Qwen3."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=width // heads,
        max_position_embeddings=512,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config).eval()


def prompts(rng: random.Random, n: int, vocab: int, length: int = PROMPT) -> list[list[int]]:
    return [[rng.randrange(1, vocab) for _ in range(length)] for _ in range(n)]


def by_generate(model: Qwen3ForCausalLM, batch: list[list[int]], new: int) -> float:
    """Return the CPU seconds of model.generate."""
    ids = torch.tensor(batch)
    start = time.process_time()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    seconds = time.process_time() - start
    assert out.shape == (len(batch), len(batch[0]) + new)
    return seconds


def run(model: Model, batch: list[list[int]], new: int, **changes: int) -> float:
    """Return the CPU seconds of scheduler and model in this process."""
    scheduler = Scheduler(model, "0", str)
    vars(scheduler).update(changes)
    sequences = []
    for i, prompt in enumerate(batch):
        params = SamplingParams(max_new_tokens=new, sampling_seed=i, ignore_eos=True)
        sequences.append(Sequence(str(i), prompt, params))
    start = time.process_time()
    scheduler.add(*sequences)
    while scheduler.step():
        pass
    seconds = time.process_time() - start
    assert all(len(one.logprobs) == new for one in sequences)
    return seconds


def compare_groups(model: Any, tiny: Model, vocab: int, new: int) -> None:
    """Print the seconds of groups whose members share a prompt."""
    groups = prompts(random.Random(0), GROUPS, vocab, SHARED)
    batch = [ids for ids in groups for _ in range(MEMBERS)]
    print()
    for tokens in (1, new):
        each, once = run(tiny, batch, tokens, least_shared=10**9), run(tiny, batch, tokens)
        generate = by_generate(model, batch, tokens)
        print(
            f"{GROUPS} groups of {MEMBERS}, {tokens} new tokens: generate {generate:.2f} s, engine "
            f"{each:.2f} s with each prompt, {once:.2f} s with shared ones: {generate / once:.2f}",
            flush=True,
        )
    print()


def by_http(batch: list[list[int]], new: int, pid: int) -> float:
    """Return the tokens of the server per second of its CPU time."""

    async def ask(client: httpx.AsyncClient, prompt: list[int]) -> int:
        sampling = {"max_new_tokens": new, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        return len((await client.post("/generate", json=body)).json()["output_ids"])

    def used() -> float:
        threads = Path(f"/proc/{pid}/task").glob("*/schedstat")  # nanoseconds, and more
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9

    async def everything() -> float:
        async with httpx.AsyncClient(base_url=URL, timeout=300) as client:
            start = used()
            got = await asyncio.gather(*(ask(client, prompt) for prompt in batch))
            assert sum(got) == len(batch) * new
            return len(batch) * new / (used() - start)

    return asyncio.run(everything())


def bits_agree(model: Model, batch: list[list[int]]) -> bool:
    """Return whether three ways to compute a prompt's last logits give the same bits."""
    first = batch[0]
    model.resize(len(first))
    alone = model.step([first], [0])[0].clone()
    among = model.step(batch, [0] * len(batch))[0].clone()
    model.step([first[:-1]], [0])
    decoded = model.step([first[-1:]], [len(first) - 1])[0]
    return torch.equal(alone, among) and torch.equal(alone, decoded)


def start_server(path: str, dtype: str) -> subprocess.Popen:
    """Return the process of a server that answers."""
    command = [sys.executable, "-m", "inference.tiny.server", "--model-path", path]
    command += ["--dtype", dtype]
    process = subprocess.Popen([*command, "--port", str(PORT), "--exit-with-parent"], cwd=ROOT)
    while True:
        try:
            httpx.get(f"{URL}/health")
            return process
        except httpx.TransportError:
            assert process.poll() is None, "the server did not start"
            time.sleep(0.1)


def compare(model: Any, path: str, dtype: str, new: int, rounds: int) -> None:
    """Print the rows of one model, which also lies in the folder `path`."""
    vocab = model.config.vocab_size
    tiny = Model(path, max(COUNTS), dtype=dtype)
    server = start_server(path, dtype)
    try:
        for n in COUNTS:
            rng = random.Random(n)
            batch = prompts(rng, n, vocab)
            run(tiny, batch, 4)
            by_http(batch, 4, server.pid)
            best, start = [0.0] * 3, time.monotonic()
            for k in itertools.count():
                if k >= rounds and time.monotonic() - start > rounds:
                    break
                # New prompts each time, because the server keeps the keys of earlier ones.
                batch = prompts(rng, n, vocab)
                ways = (
                    n * new / by_generate(model, batch, new),
                    n * new / run(tiny, batch, new),
                    by_http(batch, new, server.pid),
                )
                best = [max(pair) for pair in zip(best, ways, strict=True)]
            generate, engine, http = best
            size = sum(p.numel() for p in model.parameters()) / 1e6
            bits = "yes" if bits_agree(tiny, batch) else "no"
            print(
                f"| {size:.2f}M | {n} | {generate:,.0f} | {engine:,.0f} | {http:,.0f} "
                f"| {engine / generate:.2f} | {http / engine:.2f} | {bits} |",
                flush=True,
            )
        compare_groups(model, tiny, vocab, new)
    finally:
        server.terminate()
        server.wait(timeout=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="32 new tokens, one repetition, 40 s")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=[*MODELS, "smollm2"])
    parser.add_argument("--path", help="folder of smollm2")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--static", action="store_true", help="generate has a static cache")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    new, rounds = (32, 1) if args.quick else (NEW, 3)
    print(
        f"prompt {PROMPT}, generate {new}, {args.dtype}, one thread, torch {torch.__version__}",
        end="",
    )
    print("; tokens per CPU-second\n")
    print("| model | n | generate | engine | http | engine / generate | http / engine ", end="")
    print("| bits |\n|---|---|---|---|---|---|---|---|")
    dtype, cache = getattr(torch, args.dtype), "static" if args.static else None
    for name in args.models:
        if name == "smollm2":
            model = AutoModelForCausalLM.from_pretrained(args.path, dtype=dtype).eval()
            model.generation_config.cache_implementation = cache
            compare(model, args.path, args.dtype, new, rounds)
            continue
        with tempfile.TemporaryDirectory() as path:
            model = build(*MODELS[name]).to(dtype)
            model.save_pretrained(path)
            model.generation_config.cache_implementation = cache
            words = Tokenizer(WordLevel({str(i): i for i in range(MODELS[name][2])}, unk_token="0"))
            PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
            compare(model, path, args.dtype, new, rounds)


if __name__ == "__main__":
    main()
