"""Claim: the proxy adds a few milliseconds to a call, and serves hundreds of calls a second on one
core.

    python bench/proxy.py [--quick] [--litellm PYTHON]   # PYTHON has litellm[proxy]

The proxy runs in a process of its own. A class that answers at once with 24 tokens replaces its
inference engine. The rest of the proxy does its full work: it parses requests, builds the tree,
renders the chat template, tokenises and replies. The tokenizer is a byte-pair encoding of 4,096
tokens, trained on the modules of this repository. Requests are sent over raw sockets, so the times
do not include a client library.

The benchmark prints a table and two lines. The rows `whole` and `streamed` show the calls per
second and the proxy's CPU time per call, for whole replies and for streamed replies. The load is
200 concurrent sessions of 10 turns, and every turn sends its whole history. The target of `whole`
is 500 calls per second on one core. The row `LiteLLM` shows the calls per second of LiteLLM's
proxy, which also runs on one core. It returns a constant text (mock_response) and does not render,
tokenise or store anything. The line `one by one` shows the median times of a single call to the
proxy and of an empty handler for a request of similar size; `added` is their difference. The line
`history` shows the times of three successive calls with 1,000 messages of 2 kB. The first call
renders and tokenises all messages, and the next calls only new ones.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import orjson

ROOT = Path(__file__).resolve().parent.parent
PERMIT = "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"  # this variable lets LiteLLM's proxy run without a key
# LITELLM_LOCAL_MODEL_COST_MAP prevents the download of a price list.
LITELLM = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", PERMIT: "true"}
ADMIN = "authorization: Bearer admin\r\n"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = "and then, what would you do about the third of them, given that the first two have already been settled?"


# The server


def make_tokenizer() -> Any:
    """Return a BPE tokenizer that is trained on the modules of this repository."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4096, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator([path.read_text() for path in sorted(ROOT.glob("*.py"))], trainer)
    special: dict[str, Any] = {
        "eos_token": "<|im_end|>",
        "additional_special_tokens": ["<|im_start|>"],
    }
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **special)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def serve_proxy(port: int) -> None:
    """Serve the proxy with an engine that answers at once. For comparison, add an empty handler at
    /empty."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    from fastapi import Request, Response

    from inference.io_struct import ModelRequest, ModelResponse
    from inference.serve import listen, serve
    from proxy import Proxy, create_app

    tokenizer = make_tokenizer()
    words = tokenizer.encode(
        "I would look at the second one again, since it decides what is left of the first and of"
    )
    output = [*words[:23], tokenizer.eos_token_id]

    class AtOnce:
        async def agenerate(self, request: ModelRequest) -> ModelResponse:
            n = len(output)
            return ModelResponse(request.input_ids, list(output), [-0.5] * n, [0] * n)

    app = create_app(Proxy(AtOnce(), tokenizer, "admin"))

    async def empty(request: Request) -> Response:
        await request.body()
        return Response(b"{}", media_type="application/json")

    async def cpu(_: Request) -> Response:
        return Response(orjson.dumps(time.process_time()), media_type="application/json")

    app.add_route("/empty", empty, methods=["POST"])
    app.add_route("/cpu", cpu, methods=["POST"])
    pin(0)
    serve(app, listen("127.0.0.1", port), exit_with_parent=True)


# The load


CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]


def pin(core: int, pid: int = 0) -> None:
    """Pin a process to one core, by default this process. If the machine has only one core, do
    nothing."""
    if CORES[1:]:
        os.sched_setaffinity(pid, {CORES[core]})


class Raw:
    """One HTTP connection over a raw socket."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def __aenter__(self) -> "Raw":
        self.reader, self.writer = await asyncio.open_connection(
            "127.0.0.1", self.port, limit=2**24
        )
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.writer.close()

    async def post(self, path: str, body: bytes, headers: str = "") -> bytes:
        """Send a request and return the whole body of the reply, even if the reply is sent in
        chunks."""
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{headers}"
        self.writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        if "content-length: " in head:
            content = await self.reader.readexactly(
                int(head.partition("content-length: ")[2].partition("\r")[0])
            )
        else:
            content = b""
            while size := int(await self.reader.readline(), 16):
                content += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readline()
        assert " 200 " in head.partition("\r")[0], content[:300]
        return content


async def start_session(raw: Raw) -> str:
    await raw.post("/grant_capacity", b"{}", ADMIN)
    return json.loads(await raw.post("/rl/start_session", b'{"task_id":"t"}', ADMIN))["session_id"]


async def talk(raw: Raw, path: str, turns: int, more: dict[str, Any]) -> list[float]:
    """Hold one conversation and return the seconds of each turn. Every request also has the fields
    of `more`."""
    messages: list[Any] = [
        {"role": "system", "content": "You are terse. " * 8},
        {"role": "user", "content": QUESTION},
    ]
    seconds = []
    for _ in range(turns):
        body = orjson.dumps({"model": "m", "messages": messages, **more})
        begin = time.perf_counter()
        content = await raw.post(path, body)
        seconds.append(time.perf_counter() - begin)
        if "stream" in more:
            chunks = [
                orjson.loads(line[6:])
                for line in content.splitlines()
                if line.startswith(b"data: {")
            ]
            said = "".join(
                c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"]
            )
        else:
            said = orjson.loads(content)["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": QUESTION}]
    return seconds


async def load(
    port: int, sessions: int, turns: int, more: dict[str, Any], ours: bool = True
) -> tuple[float, float]:
    """Run all sessions concurrently. Return the calls per second and the proxy's CPU milliseconds
    per call, or 0 for LiteLLM's proxy, whose CPU time is not measured."""

    async def one(gate: asyncio.Event) -> None:
        async with Raw(port) as raw:
            path = (
                f"/{await start_session(raw)}/v1/chat/completions"
                if ours
                else "/v1/chat/completions"
            )
            ready.append(1)
            await gate.wait()
            await talk(raw, path, turns, more)

    ready: list[int] = []
    gate = asyncio.Event()
    tasks = [asyncio.ensure_future(one(gate)) for _ in range(sessions)]
    while len(ready) < sessions:
        await asyncio.sleep(0.01)
    async with Raw(port) as control:
        before = json.loads(await control.post("/cpu", b"")) if ours else 0.0
        begin = time.perf_counter()
        gate.set()
        await asyncio.gather(*tasks)
        seconds = time.perf_counter() - begin
        cpu = json.loads(await control.post("/cpu", b"")) - before if ours else 0.0
    calls = sessions * turns
    return calls / seconds, 1e3 * cpu / calls


async def one_by_one(port: int, rounds: int) -> tuple[float, float]:
    """Return the median milliseconds of a call to the proxy, and of a call to the empty handler."""
    async with Raw(port) as raw:
        called, nothing = [], []
        for _ in range(rounds):
            called += await talk(raw, f"/{await start_session(raw)}/v1/chat/completions", 10, {})
            body = orjson.dumps({"messages": [{"role": "user", "content": QUESTION}] * 10})
            for _ in range(10):
                begin = time.perf_counter()
                await raw.post("/empty", body)
                nothing.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(called), 1e3 * statistics.median(nothing)


async def long_history(port: int) -> tuple[float, list[float]]:
    """Send a long history in three successive calls. Return the megabytes of the history and the
    milliseconds of each call."""
    messages = [
        {"role": ("user", "assistant")[k % 2], "content": f"{k} " + QUESTION * 20}
        for k in range(999)
    ]
    milliseconds = []
    async with Raw(port) as raw:
        path = f"/{await start_session(raw)}/v1/chat/completions"
        for _ in range(3):
            body = orjson.dumps({"messages": messages})
            begin = time.perf_counter()
            reply = orjson.loads(await raw.post(path, body))
            milliseconds.append(1e3 * (time.perf_counter() - begin))
            messages += [reply["choices"][0]["message"], {"role": "user", "content": QUESTION}]
    return len(body) / 1e6, milliseconds


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(port: int, process: subprocess.Popen) -> None:
    """Wait until the process listens on the port."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            assert process.poll() is None, "the server did not start"
            time.sleep(0.1)


def bench_peer(python: str, sessions: int, turns: int) -> str:
    """Return how many calls LiteLLM's proxy serves per second, or a message if LiteLLM is not
    installed."""
    if subprocess.run(
        [python, "-c", "import litellm"], capture_output=True, env=LITELLM
    ).returncode:
        return "peer absent: litellm is not installed"
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        model = {
            "model": "openai/m",
            "api_key": "k",
            "mock_response": "I would look at the second one again",
        }
        config.write_text(
            json.dumps({"model_list": [{"model_name": "m", "litellm_params": model}]})
        )
        command = [
            python,
            "-m",
            "litellm.proxy.proxy_cli",
            "--config",
            str(config),
            "--port",
            str(port),
        ]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=LITELLM
        )
        pin(0, process.pid)
        try:
            wait_for(port, process)
            asyncio.run(load(port, 20, 3, {}, ours=False))  # warm up
            rate, _ = asyncio.run(load(port, sessions, turns, {}, ours=False))
        finally:
            process.terminate()
            process.wait(timeout=20)
    return f"{rate:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="4 turns a session instead of 10; takes 15 s"
    )
    parser.add_argument(
        "--litellm", default=sys.executable, help="a Python interpreter that has litellm[proxy]"
    )
    parser.add_argument(
        "--serve", type=int, help="(internal) serve the proxy under test on this port"
    )
    args = parser.parse_args()
    if args.serve:
        serve_proxy(args.serve)
        return
    port, (sessions, turns) = free_port(), (200, 4 if args.quick else 10)
    process = subprocess.Popen([sys.executable, __file__, "--serve", str(port)])
    try:
        wait_for(port, process)
        pin(1)
        asyncio.run(load(port, 20, 3, {}))  # warm up
        rate, cpu = asyncio.run(load(port, sessions, turns, {}))
        streamed, streamed_cpu = asyncio.run(load(port, sessions, turns, {"stream": True}))
        call, nothing = asyncio.run(one_by_one(port, 10))
        megabytes, (first, *later) = asyncio.run(long_history(port))
    finally:
        process.terminate()
        process.wait(timeout=20)
    print(f"{sessions} sessions at once, {turns} turns each")
    print("| | calls/s | CPU ms a call | calls/s of one core |\n|---|---|---|---|")
    print(f"| whole | {rate:,.0f} | {cpu:.2f} | {1e3 / cpu:,.0f} |")
    print(f"| streamed | {streamed:,.0f} | {streamed_cpu:.2f} | {1e3 / streamed_cpu:,.0f} |")
    print(
        f"| LiteLLM, which answers a constant | {bench_peer(args.litellm, sessions, turns)} | | |"
    )
    print(
        f"\none by one, p50: {call:.2f} ms, empty handler {nothing:.2f} ms, added {call - nothing:.2f} ms"
    )
    again = ", ".join(f"{ms:.0f}" for ms in later)
    print(f"history of {megabytes:.1f} MB: first call {first:.0f} ms, the next ones {again} ms")


if __name__ == "__main__":
    main()
