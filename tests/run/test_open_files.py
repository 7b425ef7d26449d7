"""Thousands of connections: a run, its proxy and its server raise the limit of open files, which is
often 1,024, and lose no request."""

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from conftest import server_process

from inference.io_struct import EngineError
from inference.process import raise_open_files
from inference.servers import Servers

pytestmark = pytest.mark.runs

REQUESTS, SESSIONS = 2000, 80


@pytest.fixture
def addresses(tiny_model_dir: Path) -> Iterator[tuple[str, str]]:
    """The URLs of a small server and of its proxy, which start with a limit of 1,024 open files."""
    limited = ["bash", "-c", 'ulimit -Sn 1024; exec "$@"', "bash", sys.executable, "-m"]
    model = ["--model-path", str(tiny_model_dir)]
    with server_process(*limited, "inference.tiny.server", *model) as (server, _):
        words = ["proxy", "--server", server, "--admin-key", "secret", *model]
        with server_process(*limited, *words) as (proxy, _):
            yield server, proxy


def test_2000_requests_in_flight_lose_none(addresses: tuple[str, str]) -> None:
    """All of them wait in the proxy and in the paused server, and each gets its answer."""
    server, proxy = addresses
    raise_open_files()
    admin, sessions = {"authorization": "Bearer secret"}, []
    for number in range(SESSIONS):
        httpx.post(proxy + "/grant_capacity", headers=admin).raise_for_status()
        body = {"task_id": str(number)}
        start = httpx.post(proxy + "/rl/start_session", json=body, headers=admin)
        sessions.append(start.json()["session_id"])
    servers = Servers(server)

    async def ask(number: int) -> int:
        messages = [{"role": "user", "content": f"question {number}"}]
        body = {"model": "default", "messages": messages, "max_tokens": 1}
        url = f"{proxy}/{sessions[number % SESSIONS]}/v1/chat/completions"
        return (await servers.call(url, body, timeout=200))["usage"]["completion_tokens"]

    async def ask_all() -> list[int]:
        asked = asyncio.gather(*map(ask, range(REQUESTS)))
        deadline, waiting = time.monotonic() + 150, 0
        while waiting != REQUESTS:
            assert time.monotonic() < deadline, f"only {waiting} requests reach the server"
            await asyncio.sleep(0.2)
            with suppress(EngineError):  # a busy server answers late
                waiting = (await servers.call(server + "/server_info"))["waiting"]
        await servers.call(server + "/continue_generation", {})
        return await asked

    httpx.post(server + "/pause_generation", json={"mode": "retract"}).raise_for_status()
    assert asyncio.run(ask_all()) == [1] * REQUESTS
