"""Claim: one session's long requests do not hold up the short ones of another session.

    python bench/fairness.py [--seconds 20] [--total 16384]

The small server has a random model of two layers, a context of 16,384 tokens and a cache of
`--total` tokens. A short request has a prompt of 20 tokens and gets 16 new ones. Short requests
follow one another, at most a hundred a second, first alone and then beside a session that has sent

    eight calls    of 16,000 new tokens each
    four prompts   of 15,000 tokens each

Each line shows the median and the worst wait of the short requests in ms, and the worst wait
divided by that of the short requests alone. The target for this ratio is at most 5.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx
from conftest import make_byte_model, server_process

CONTEXT = 16384
ATTACKS = {"alone": [], "eight calls": [(20, 16000)] * 8, "four prompts": [(15000, 16)] * 4}


async def generate(client: httpx.AsyncClient, rid: str, prompt: int, new: int) -> None:
    """Ask for `new` tokens after `prompt` tokens."""
    ids = [(7 * k + hash(rid)) % 250 for k in range(prompt)]
    params = {"max_new_tokens": new, "ignore_eos": True}
    body = {"rid": rid, "input_ids": ids, "sampling_params": params}
    (await client.post("/generate", json=body)).raise_for_status()


async def measure(
    url: str, attack: list[tuple[int, int]], seconds: float
) -> tuple[list[float], int]:
    """Return the waits of short requests beside an attack, in ms and in order of length, and how
    many requests of the attack ended."""
    waits: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        long = [
            asyncio.create_task(generate(client, f"long/{i}", *sizes))
            for i, sizes in enumerate(attack)
        ]
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            await asyncio.sleep(0.01)
            asked = time.perf_counter()
            await generate(client, f"short/{len(waits)}", 20, 16)
            waits.append(1e3 * (time.perf_counter() - asked))
        ended = sum(task.done() for task in long)
        for i in range(len(long)):
            await client.post("/abort_request", json={"rid": f"long/{i}"})
        await asyncio.gather(*long)
    return sorted(waits), ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--total", type=int, default=CONTEXT, help="tokens of the cache")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = make_byte_model(Path(folder))
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
        words = ["--model-path", str(path), "--max-total-tokens", str(args.total)]
        with server_process(sys.executable, "-m", "inference.tiny.server", *words) as (url, _):
            asyncio.run(measure(url, [], 1))
            alone = None
            for name, attack in ATTACKS.items():
                waits, ended = asyncio.run(measure(url, attack, args.seconds))
                alone = alone or waits[-1]
                print(
                    f"{name:14} n {len(waits)}, median {waits[len(waits) // 2]:.0f} ms, "
                    f"worst {waits[-1]:.0f} ms, {waits[-1] / alone:.1f} times alone; "
                    f"{ended} of {len(attack)} long ones ended",
                    flush=True,
                )


if __name__ == "__main__":
    main()
