"""Claim: the decoding loop of inference/tiny decodes faster than transformers' own model.generate.

    python bench/engine.py [--quick] [--models 0.13M 3.3M 15.7M]

The benchmark generates 128 new tokens for random prompts of 64 tokens, with 1, 16 and 64 concurrent requests. The unit
is tokens per second of CPU time, because other programs on the machine lengthen the wall time. The benchmark measures
four ways to generate with the same Qwen3 model, in float32 on one thread. `generate` calls model.generate on one batch
and samples at temperature 1. `engine` calls the scheduler and the slot cache in this process, and returns the
log-probability of every token. `http` sends the requests to POST /generate of a server process, and counts only the
server's CPU time. The fourth way, `--seed`, is like `engine`, but in deterministic mode. A server
with the option --seed runs in this mode.

The benchmark repeats the four ways in turn, at least three times, and prints the fastest repetition of each way. Other
programs can only make a repetition slower, never faster. The column "engine / generate" shows a ratio: the speed of
`engine` divided by the speed of `generate`. For the smallest model, "engine / generate" should be at least 1.9 with 1
and with 16 requests, and at least 1.5 with 64 requests. For the second model, "engine / generate" should be at least
1.3, and for the largest model at least 1.15.

The last column, "bits", shows whether deterministic mode works on this machine (inference/tiny/model.py, "Bits"). The
benchmark computes the logits of a prompt's last token three times: in a prefill of this prompt alone, in a prefill of a
batch, and in a decode step. The column "bits" says "yes" if the three computations give identical logits, bit for bit.
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

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from inference.tiny.model import TinyModel, run_step
from inference.tiny.scheduler import SamplingParams, Scheduler, Sequence

PROMPT, NEW = 64, 128
# MODELS maps a number of parameters to (layers, hidden size, vocabulary, heads, key heads, width of feed-forward
# layers).
MODELS = {
    "0.13M": (2, 64, 64, 4, 2, 256),
    "3.3M": (4, 256, 512, 4, 2, 736),
    "15.7M": (6, 384, 4096, 6, 3, 1440),
}
PORT = 31877


def build(
    layers: int, width: int, vocab: int, heads: int, groups: int, inner: int
) -> Qwen3ForCausalLM:
    """Return a Qwen3 model of the given sizes with random weights."""
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


def prompts(rng: random.Random, n: int, vocab: int) -> list[list[int]]:
    """Return n random prompts."""
    return [[rng.randrange(1, vocab) for _ in range(PROMPT)] for _ in range(n)]


def by_generate(model: Qwen3ForCausalLM, batch: list[list[int]], new: int) -> float:
    """Return how many tokens model.generate makes per second of CPU time."""
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
    assert out.shape == (len(batch), PROMPT + new)
    return len(batch) * new / seconds


def by_engine(tiny: TinyModel, batch: list[list[int]], new: int) -> float:
    """Return how many tokens the scheduler and the slot cache make in this process per second of CPU time."""
    scheduler = Scheduler(tiny.slots, tiny.slots * 512, "0", str)
    start = time.process_time()
    for i, prompt in enumerate(batch):
        params = SamplingParams(max_new_tokens=new, sampling_seed=i)
        scheduler.submit(Sequence(str(i), prompt, params))
    while run_step(scheduler, tiny):
        pass
    seconds = time.process_time() - start
    assert sum(len(s.logprobs) for s in scheduler.finished) == len(batch) * new
    return len(batch) * new / seconds


def by_http(url: str, batch: list[list[int]], new: int) -> float:
    """Return how many tokens the server at `url` makes per second of the server's CPU time."""

    async def ask(client: httpx.AsyncClient, prompt: list[int]) -> int:
        sampling = {"max_new_tokens": new, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        return len((await client.post("/generate", json=body)).json()["output_ids"])

    async def everything() -> float:
        async with httpx.AsyncClient(
            base_url=url, timeout=300, limits=httpx.Limits(max_connections=64)
        ) as client:
            start = (await client.get("/model_info")).json()["cpu_seconds"]
            got = await asyncio.gather(*(ask(client, prompt) for prompt in batch))
            assert sum(got) == len(batch) * new
            return (
                len(batch) * new / ((await client.get("/model_info")).json()["cpu_seconds"] - start)
            )

    return asyncio.run(everything())


def bits_agree(tiny: TinyModel, batch: list[list[int]]) -> bool:
    """Return whether prefill alone, prefill in a batch and decoding give identical logits for a prompt's last token."""
    first = batch[0]
    alone = tiny.step([first], [0])[0, -1].clone()
    among = tiny.step(batch, [0] * len(batch))[0, -1].clone()
    tiny.step([first[:-1]], [0])
    decoded = tiny.step([first[-1:]], [len(first) - 1])[0, -1]
    return torch.equal(alone, among) and torch.equal(alone, decoded)


def start_server(path: str) -> subprocess.Popen:
    """Start the small server with the model folder `path`, wait until the server answers, and return its process."""
    command = [
        sys.executable,
        "-m",
        "inference.tiny.server",
        "--model-path",
        path,
        "--port",
        str(PORT),
        "--exit-with-parent",
    ]
    root = Path(__file__).resolve().parent.parent
    process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    while True:
        try:
            httpx.get(f"http://127.0.0.1:{PORT}/health")
            return process
        except httpx.TransportError:
            assert process.poll() is None, "the server did not start"
            time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="32 new tokens, one repetition, 40 s")
    parser.add_argument(
        "--models", nargs="*", default=list(MODELS), choices=MODELS, help="the models to measure"
    )
    args = parser.parse_args()
    new, rounds = (32, 1) if args.quick else (NEW, 3)
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    print(
        f"prompt {PROMPT}, generate {new}, fp32, one thread, torch {torch.__version__}; tokens per CPU-second\n"
    )
    print(
        "| model | n | generate | engine | http | engine / generate | http / engine | --seed / generate | bits |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for shape in map(MODELS.__getitem__, args.models):
        with tempfile.TemporaryDirectory() as path:
            model = build(*shape)
            model.save_pretrained(path)
            words = Tokenizer(WordLevel({str(i): i for i in range(shape[2])}, unk_token="0"))
            PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
            tiny = TinyModel(path, 64)
            exact = TinyModel(path, 64, deterministic=True)
            server = start_server(path)
            try:
                for n in (1, 16, 64):
                    rng = random.Random(n)
                    batch = prompts(rng, n, shape[2])
                    best = [0.0, 0.0, 0.0, 0.0]
                    (
                        by_engine(tiny, batch, 4),
                        by_engine(exact, batch, 4),
                    )  # warm up without measuring
                    by_http(f"http://127.0.0.1:{PORT}", batch, 4)
                    start = time.monotonic()
                    for k in itertools.count():
                        if k >= rounds and time.monotonic() - start > rounds:
                            break
                        # Each repetition has new prompts, because the server keeps the KV cache of earlier prompts.
                        batch = prompts(rng, n, shape[2])
                        ways = (
                            by_generate(model, batch, new),
                            by_engine(tiny, batch, new),
                            by_http(f"http://127.0.0.1:{PORT}", batch, new),
                            by_engine(exact, batch, new),
                        )
                        best = [max(pair) for pair in zip(best, ways, strict=True)]
                    generate, engine, http, exactly = best
                    size = sum(p.numel() for p in model.parameters()) / 1e6
                    rates = f"{generate:,.0f} | {engine:,.0f} | {http:,.0f}"
                    ratios = f"{engine / generate:.2f} | {http / engine:.2f}"
                    bits = "yes" if bits_agree(exact, batch) else "no"
                    print(
                        f"| {size:.2f}M | {n} | {rates} | {ratios} | {exactly / generate:.2f} | {bits} |",
                        flush=True,
                    )
            finally:
                assert server.stdin is not None
                server.stdin.close()
                server.wait(timeout=20)


if __name__ == "__main__":
    main()
