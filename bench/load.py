"""Claim: with 1,000 concurrent sessions no answer is lost or mixed up, and sessions that have ended
take no memory.

    python bench/load.py                             # 1,000 sessions of 10 turns at once
    python bench/load.py --sessions 10000 --concurrent 32 --turns 1 --out docs/reliability
    python bench/load.py --sessions 100 --concurrent 20 --cut 0.02   # a bad network
    python bench/load.py --sessions 400 --concurrent 20 --garbage    # a server of garbage
    python bench/load.py --sessions 20 --concurrent 1 --flood 40     # one session floods

The benchmark starts the small server and the proxy as processes, with a random model of two layers.
Each session asks questions that contain its own number, and sends its whole history with every
call. The client does not retry calls. At its end a session is exported, and its row is checked: the
prompts must contain the questions of the session in order, and no other question, and the sampled
tokens of each turn must decode to the text that the client has read.

For every tenth session the benchmark also computes the log-probabilities with transformers, and
prints the largest difference from the exported ones.

The printed table shows how the resident memory and the number of open file descriptors of server
and proxy change. They are read from /proc, so the benchmark needs Linux.
"""

import argparse
import asyncio
import contextlib
import csv
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from conftest import free_port, make_byte_model, server_process
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from calls.client import OpenAIProxyClient
from inference.io_struct import EngineError
from inference.servers import Servers

ADMIN, COLUMNS = (
    "admin",
    ["calls", "seconds", "proxy_mb", "server_mb", "proxy_files", "server_files"],
)


@contextlib.contextmanager
def process(
    module: str, model: Path, *options: str, log: Path | None = None
) -> Iterator[tuple[str, subprocess.Popen]]:
    """Run the Python module of a server or a proxy as a process until the `with` block ends. Yields
    the URL and the Popen of the process."""
    command = [sys.executable, "-m", module, "--model-path", str(model), *options]
    with server_process(*command, log=log) as (url, child):
        yield url, child
        assert child.poll() is None, f"{module} died"


def allow_open_files() -> None:
    """Raise the limit of open files as far as it goes: each connection is one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def start_relay(url: str, cut: float) -> str:
    """Start a slow relay to a server, in a thread, and return the relay's URL.

    The relay delays every piece of data by up to 50 ms. With probability `cut` it sends only the
    beginning of a piece and then closes the connection.
    """
    rng, port, address = random.Random(1), free_port(), url.removeprefix("http://").split(":")

    async def pipe(reader: asyncio.StreamReader, *writers: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            await asyncio.sleep(rng.uniform(0, 0.05))
            if rng.random() < cut:
                writers[0].write(data[: rng.randrange(len(data))])
                break
            writers[0].write(data)
        for writer in writers:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*address)
        with contextlib.suppress(OSError):
            await asyncio.gather(
                pipe(reader, far_writer, writer), pipe(far_reader, writer, far_writer)
            )

    async def run() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", port) as server:
            await server.serve_forever()

    threading.Thread(target=asyncio.run, args=(run(),), daemon=True).start()
    return f"http://127.0.0.1:{port}"


def usage(pid: int) -> tuple[float, int]:
    """Return the resident memory in MB and the number of open descriptors of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1), len(os.listdir(f"/proc/{pid}/fd"))


async def session(
    wire: Servers, proxy: Servers, number: int, turns: int, seconds: list[float]
) -> Any:
    """Run one session. Return the session's questions, the replies that the client has read, and
    the exported row.

    The function appends the seconds of each call to `seconds`.
    """
    messages, replies = [], []
    client = OpenAIProxyClient(proxy, str(number))
    await client.grant_capacity()
    async with client:
        for turn in range(turns):
            messages.append({"role": "user", "content": f"[{number}.{turn}]"})
            body, start = {"messages": messages, "max_tokens": 8}, time.perf_counter()
            answer = await wire.call(client.session_url + "/chat/completions", body, timeout=600)
            seconds.append(time.perf_counter() - start)
            replies.append(answer["choices"][0])
            messages.append(replies[-1]["message"])
        await client.set_last_reward(1.0)
    interactions = await client.export_interactions(style="concat")
    (row,) = [interaction.to_lists() for interaction in interactions.values()]
    return [message["content"] for message in messages[::2]], replies, row


async def flood(wire: Servers, proxy: Servers, calls: int) -> None:
    """In one session, repeat 128 * `calls` concurrent calls until the task is cancelled."""

    async def ask_again_and_again(url: str, number: int) -> None:
        body = {"messages": [{"role": "user", "content": f"{number}"}], "max_tokens": 256}
        while True:
            with contextlib.suppress(EngineError):  # a server may refuse so many
                await wire.call(url + "/chat/completions", body, timeout=600)
            await asyncio.sleep(0.1)

    client = OpenAIProxyClient(proxy, "flood")
    await client.grant_capacity()
    async with client:
        await asyncio.gather(
            *(ask_again_and_again(client.session_url, number) for number in range(128 * calls))
        )


def check(tokenizer: Any, questions: list[str], replies: list[Any], row: dict[str, list]) -> None:
    """Check that a row has the questions and the answers of its own session."""
    masked = [token for token, mask in zip(row["input_ids"], row["loss_mask"]) if not mask]
    assert re.findall(r"\[\d+\.\d+\]", tokenizer.decode(masked)) == questions
    for turn, reply in enumerate(replies):
        mine = [k for k, mask in enumerate(row["loss_mask"]) if mask and row["turn_ids"][k] == turn]
        text = tokenizer.decode([row["input_ids"][k] for k in mine], skip_special_tokens=True)
        assert text == reply["message"]["content"], (text, reply)


def worst_logprob(model: Any, row: dict[str, list]) -> float:
    """Return the largest difference, over the trained tokens, between the row's log-probabilities
    and those of a forward pass."""
    ids, mask = torch.tensor(row["input_ids"]), torch.tensor(row["loss_mask"][1:], dtype=torch.bool)
    with torch.no_grad():
        logprobs = model(ids[None, :-1]).logits[0].float().log_softmax(-1)
    logprobs = logprobs.gather(-1, ids[1:, None])[:, 0]
    return float((logprobs - torch.tensor(row["logprobs"][1:]))[mask].abs().max())


async def load(
    args: argparse.Namespace, proxy: Servers, pids: list[int], tokenizer: Any, model: Any
) -> Any:
    """Run all sessions. Return the seconds that each call took, the measurements of memory and
    descriptors, and the largest error of a log-probability."""
    wire, places = Servers(""), asyncio.Semaphore(args.concurrent)
    calls, seconds, samples, worst, start = (
        args.sessions * args.turns,
        [],
        [],
        [0.0],
        time.monotonic(),
    )

    async def one(number: int) -> None:
        async with places:
            done = await session(wire, proxy, number, args.turns, seconds)
        check(tokenizer, *done)
        if number % args.forward == 0:
            worst.append(worst_logprob(model, done[-1]))

    async def sample() -> None:
        for k in range(args.samples + 1):
            while len(seconds) < calls * k // args.samples:
                await asyncio.sleep(0.2)
            (proxy_mb, proxy_files), (server_mb, server_files) = map(usage, pids)
            now = round(time.monotonic() - start, 1)
            samples.append([len(seconds), now, proxy_mb, server_mb, proxy_files, server_files])

    flooding = asyncio.create_task(flood(wire, proxy, args.flood))
    await asyncio.gather(sample(), *map(one, range(args.sessions)))
    assert not flooding.done() or not args.flood, flooding
    flooding.cancel()
    await asyncio.gather(flooding, return_exceptions=True)
    return sorted(seconds), samples, max(worst)


def write_usage(path: Path, columns: list[str], samples: list[list[float]]) -> None:
    """Write the samples to a table (.csv), and plot memory and descriptors against the first column
    of the table (.svg)."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with path.with_suffix(".csv").open("w", newline="") as table:
        csv.writer(table, lineterminator="\n").writerows([columns, *samples])
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained")
    for axis, title, unit in zip(
        axes, ("resident memory, MB", "open descriptors"), ("_mb", "_files")
    ):
        for name, values in zip(columns, zip(*samples)):
            if name.endswith(unit):
                axis.plot([row[0] for row in samples], values, label=name.removesuffix(unit))
        axis.set(title=title, xlabel=columns[0], ylim=(0, None))
        axis.legend(frameon=False)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--concurrent", type=int, default=1000, help="sessions at the same time")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument(
        "--cut",
        type=float,
        default=0.0,
        help="probability that a slow relay cuts a connection (per piece)",
    )
    parser.add_argument(
        "--samples", type=int, default=10, help="number of intervals between samples of memory"
    )
    parser.add_argument(
        "--forward", type=int, default=10, help="compute every n-th session with transformers, too"
    )
    parser.add_argument(
        "--garbage", action="store_true", help="a second server answers with garbage"
    )
    parser.add_argument(
        "--flood", type=int, default=0, help="number of calls with 128 answers of one more session"
    )
    parser.add_argument("--out", type=Path, help="path without suffix for a .csv and a .svg")
    args = parser.parse_args()
    allow_open_files()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        path = make_byte_model(Path(folder))
        tokenizer, model = (
            AutoTokenizer.from_pretrained(path),
            AutoModelForCausalLM.from_pretrained(path),
        )
        with contextlib.ExitStack() as stack:
            server, first = stack.enter_context(process("inference.tiny.server", path))
            address = start_relay(server, args.cut) if args.cut else server
            words = ["--server", address, "--admin-key", ADMIN]
            log = Path(folder) / "proxy.log"
            if args.garbage:
                garbage, _ = stack.enter_context(process("tests.garbage_server", path))
                words += ["--server", garbage]
            url, second = stack.enter_context(process("proxy", path, *words, log=log))
            proxy = Servers(url, ADMIN)
            proxy.post_all("/set_version", {"version": 0})
            seconds, samples, worst = asyncio.run(
                load(args, proxy, [second.pid, first.pid], tokenizer, model)
            )
            if args.garbage:
                seen = Servers(garbage).post_all("/server_info")[0]["seen"]
                print(f"{seen} requests got garbage; the log of the proxy:\n{log.read_text()}")
    p50, p99 = seconds[len(seconds) // 2], seconds[len(seconds) * 99 // 100]
    print(
        f"{args.sessions} sessions, {args.concurrent} at once, {args.turns} turns: {len(seconds)} calls answered,"
    )
    print(
        f"none lost, none mixed; latency p50 {p50:.2f} s, p99 {p99:.2f} s; {len(seconds) / samples[-1][1]:.0f} calls/s"
    )
    print(f"largest difference of a log-probability from transformers: {worst:.1e}")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for row in samples:
        print(f"| {' | '.join(map(str, row))} |")
    if args.out:
        write_usage(args.out, COLUMNS, samples)


if __name__ == "__main__":
    main()
