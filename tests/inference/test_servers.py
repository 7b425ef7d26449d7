"""Which server gets a request, and which of its answers are believed.

Servers that restart, or run ahead of the trainer, are in tests/explore/updates.py. The last test
kills a real server that is generating.
"""

import asyncio
import signal
import sys
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import Session, server_process
from hypothesis import given
from hypothesis import strategies as st

from engine import EngineError, RemoteInfEngine
from inference.io_struct import GenerationHyperparameters, ModelRequest
from inference.servers import Servers, rank_servers, run_all

A, B = "http://a", "http://b"


# The ranking


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 8))
def test_groups_are_spread_evenly(first: int, groups: int, count: int):
    """Of consecutive groups, no server gets two more than another server. The order in which a
    process lists the servers does not matter."""
    servers = [f"http://s{k}" for k in range(count)]
    keys = [str(n) for n in range(first, first + groups)]
    counts = Counter(rank_servers(servers, key)[0] for key in keys)
    assert max(counts.values()) - min(counts[server] for server in servers) <= 1
    for key in [*keys, "a session"]:
        assert sorted(ranked := rank_servers(servers, key)) == servers
        assert rank_servers(servers[::-1], key) == ranked


# What is believed


def test_an_answer_from_before_an_update_is_no_restart() -> None:
    """Version 7 is right for a request that was sent before the first token of version 8 came."""
    servers = Servers([A, B])
    servers.check_versions(A, [7], at_least=7)
    servers.check_versions(B, [7, 8], at_least=7)
    servers.check_versions(A, [7], at_least=7)
    servers.check_versions(A, [], at_least=8)
    assert servers.newest == 8
    with pytest.raises(EngineError, match="version 7 instead of 8 to inf: was it restarted"):
        servers.check_versions(A, [7, 8], at_least=8)


def test_ctrl_c_does_not_wait_for_the_servers() -> None:
    """A server may take an hour to load new weights."""
    answers = list[bool]()

    async def call() -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(5)
        answers.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_all([call()])
    assert not answers


def test_failing_servers_are_all_named() -> None:
    """A call to all servers waits for every answer; its one error names each server that failed."""

    def serve(request: httpx.Request) -> httpx.Response:
        if request.url.host == "a":
            return httpx.Response(200, json={"status": "ok"})
        return httpx.Response(500, text="boom")

    engine = RemoteInfEngine([A, B, "http://c"], session=Session(httpx.MockTransport(serve)))
    names = r"http://b/pause_generation .*boom; http://c/pause_generation .*boom"
    with pytest.raises(EngineError, match=names, check=lambda it: "http://a" not in str(it)):
        engine.pause()


# Real servers


LONG = 900  # tokens of a completion that is still running when its server is killed


HALF, REDIRECT = b"200 OK\r\ncontent-length: 9", b"302 Found\r\nlocation: /\r\ncontent-length: 0"


@pytest.mark.parametrize("head", [HALF, REDIRECT])
def test_a_strange_answer_is_an_engine_error(head: bytes) -> None:
    """Half an answer is not waited for, and a redirect is not followed."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            await reader.readuntil(b"{}")
            writer.write(b"HTTP/1.1 " + head + b"\r\n\r\n")
            await reader.read()

    async def ask() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            with pytest.raises(EngineError, match=f"^{url} "):
                await Servers(url).call(url, {}, timeout=1.0)

    asyncio.run(ask())


@pytest.mark.runs
def test_kill_one_of_two_in_the_midst_of_generation(tiny_model_dir: Path) -> None:
    """The other server finishes every completion. The next call to all servers raises an error that
    names the dead one."""
    command = [sys.executable, "-m", "inference.tiny.server", "--model-path", str(tiny_model_dir)]
    with ExitStack() as stack:
        started = [stack.enter_context(server_process(*command)) for _ in range(2)]
        urls = [url for url, _ in started]
        engine = RemoteInfEngine(urls)
        engine.initialize()
        gconfig = GenerationHyperparameters(max_new_tokens=LONG)
        requests = [ModelRequest([5, 6, 7], call=f"{k}-0.0", gconfig=gconfig) for k in range(12)]

        async def kill_in_the_midst() -> list[Any]:
            answers = asyncio.gather(*map(engine.agenerate, requests))
            while not (await engine.servers.call(urls[0] + "/model_info"))["running"]:
                assert not answers.done()
            started[0][1].kill()
            return await answers

        for response in asyncio.run(kill_in_the_midst()):
            assert response.output_len == LONG or response.stop_reason == "stop"
        with pytest.raises(EngineError, match=urls[0]):
            engine.pause()
