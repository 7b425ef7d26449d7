"""Which server gets a request, and which of its answers are believed.

Most servers here are scripted (`Machines`). The last test kills a real one that is generating.
"""

import asyncio
import sys
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import server_process
from hypothesis import given
from hypothesis import strategies as st
from test_engine import generated

from engine import EngineError, RemoteInfEngine
from inference.io_struct import GenerationHyperparameters, ModelRequest
from inference.servers import Servers, rank_servers

A, B = "http://a", "http://b"


# The ranking


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 8))
def test_groups_are_spread_evenly(first: int, groups: int, count: int):
    """Of consecutive groups no server gets two more than another, in whatever order a process knows
    them."""
    servers = [f"http://s{k}" for k in range(count)]
    keys = [str(n) for n in range(first, first + groups)]
    counts = Counter(rank_servers(servers, key)[0] for key in keys)
    assert max(counts.values()) - min(counts[server] for server in servers) <= 1
    for key in [*keys, "a session"]:
        assert sorted(ranked := rank_servers(servers, key)) == servers
        assert rank_servers(servers[::-1], key) == ranked


# What is believed


class Machines:
    """Two scripted servers, a and b, each with the version of its weights."""

    def __init__(self, a: Any, b: Any) -> None:
        self.versions = {"a": a, "b": b}
        self.asked: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        if request.url.path != "/generate":
            return httpx.Response(500 if self.versions[host] is None else 200, json={})
        self.asked.append(host)
        return generated([7], spans=[(self.versions[host], 1)])

    def engine(self) -> RemoteInfEngine:
        async def sleep(_: float) -> None: ...

        return RemoteInfEngine([A, B], transport=httpx.MockTransport(self), sleep=sleep)


def ask(engine: RemoteInfEngine, task: str = "s") -> list[int]:
    request = ModelRequest([1], call=f"{task}.0")
    return asyncio.run(engine.agenerate(request)).output_versions


FIRST, SECOND = (url[-1] for url in rank_servers([A, B], "s"))  # in the order of session "s"


def test_a_server_that_was_restarted_is_caught_by_its_tokens() -> None:
    """It has version 0 again, so its tokens are refused, and the next server is asked."""
    machines = Machines(a=7, b=7)
    engine = machines.engine()
    assert ask(engine) == [7]
    machines.versions[FIRST] = 0
    assert ask(engine) == [7]
    assert machines.asked == [FIRST, FIRST, SECOND]


def test_a_version_above_the_trainers_is_refused() -> None:
    """After set_version(7), a token of version 8 is believed only once the trainer has 8."""
    machines = Machines(a=7, b=7)
    engine = machines.engine()
    engine.set_version(7)
    machines.versions[FIRST] = 8
    assert ask(engine) == [7]
    assert engine.servers.newest == 7
    engine.set_version(8)
    assert ask(engine) == [8]
    assert machines.asked == [FIRST, SECOND, FIRST]


def test_an_answer_from_before_an_update_is_no_restart() -> None:
    """Version 7 is right for a request that was sent before the first token of version 8 came."""
    servers = Servers([A, B])
    servers.check_versions(A, [7], sent_after=7)
    servers.check_versions(B, [7, 8], sent_after=7)
    servers.check_versions(A, [7], sent_after=7)
    servers.check_versions(A, [], sent_after=8)
    assert servers.newest == 8
    with pytest.raises(EngineError, match="version 7 instead of 8 to inf: was it restarted"):
        servers.check_versions(A, [7, 8], sent_after=8)


def test_failing_servers_are_all_named() -> None:
    """A call to all servers waits for every answer; its one error names each that failed."""

    def serve(request: httpx.Request) -> httpx.Response:
        if request.url.host == "a":
            return httpx.Response(200, json={"status": "ok"})
        return httpx.Response(500, text="boom")

    engine = RemoteInfEngine([A, B, "http://c"], transport=httpx.MockTransport(serve))
    names = r"http://b/pause_generation .*boom; http://c/pause_generation .*boom"
    with pytest.raises(EngineError, match=names) as caught:
        engine.pause()
    assert "http://a" not in str(caught.value)


# Real servers


LONG = 900  # tokens of a completion that is still running when its server is killed


@pytest.mark.runs
def test_kill_one_of_two_in_the_midst_of_generation(tiny_model_dir: Path) -> None:
    """The other server finishes every completion; the next call to all servers names the dead."""
    command = [sys.executable, "-m", "inference.tiny.server", "--model-path", str(tiny_model_dir)]
    with ExitStack() as stack:
        started = [stack.enter_context(server_process(*command)) for _ in range(2)]
        urls = [url for url, _ in started]
        engine = RemoteInfEngine(urls)
        engine.initialize()
        responses: dict[int, Any] = {}

        async def generate(k: int) -> None:
            gconfig = GenerationHyperparameters(max_new_tokens=LONG)
            request = ModelRequest([5, 6, 7], call=f"{k}-0.0", gconfig=gconfig)
            responses[k] = await engine.agenerate(request)

        async def generate_all() -> None:
            await asyncio.gather(*(generate(k) for k in range(12)))

        thread = threading.Thread(target=lambda: asyncio.run(generate_all()))
        thread.start()
        while httpx.get(urls[0] + "/model_info", trust_env=False).json()["running"] == 0:
            assert thread.is_alive()
        started[0][1].kill()
        thread.join(timeout=120)
        assert sorted(responses) == list(range(12))
        for response in responses.values():
            assert response.output_len == LONG or response.stop_reason == "stop"
        with pytest.raises(EngineError, match=urls[0]):
            engine.pause()
