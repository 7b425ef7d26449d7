"""Thousands of connections: a run, its proxy and its server raise the limit of open files, which is
often 1,024, and lose no request."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from conftest import ROOT, free_port, wait_until_up

from inference.io_struct import EngineError
from inference.serve import raise_open_files
from inference.servers import Servers

pytestmark = pytest.mark.runs

REQUESTS, SESSIONS = 2000, 80


def limited(files: int, command: list[str]) -> list[str]:
    """The command, with a soft limit of open files."""
    return ["bash", "-c", f'ulimit -Sn {files}; exec "$@"', "bash", *command]


@pytest.fixture
def addresses(tiny_model_dir: Path) -> Iterator[tuple[str, str]]:
    """The URLs of a small server and of its proxy, which begin with 1,024 open files."""
    ports = [free_port(), free_port()]
    server, proxy = (f"http://127.0.0.1:{port}" for port in ports)
    modules = ["inference.tiny.server"], ["proxy", "--server", server, "--admin-key", "secret"]
    with ExitStack() as stack:
        for port, (module, *options) in zip(ports, modules):
            words = ["-m", module, "--model-path", str(tiny_model_dir), "--port", str(port)]
            whole = limited(1024, [sys.executable, *words, *options])
            process = stack.enter_context(subprocess.Popen(whole, cwd=ROOT))
            stack.callback(process.terminate)
            wait_until_up(f"http://127.0.0.1:{port}", process)
        yield server, proxy


def test_2000_requests_in_flight_lose_none(addresses: tuple[str, str]) -> None:
    """All of them wait in the proxy and in the paused server, and each gets its answer."""
    server, proxy = addresses
    raise_open_files()
    admin = {"authorization": "Bearer secret"}
    sessions = []
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
        answer = await servers.call(url, body, timeout=200)
        return answer["usage"]["completion_tokens"]

    async def ask_all() -> list[int]:
        asked = asyncio.gather(*map(ask, range(REQUESTS)))
        deadline, state = time.monotonic() + 150, ""
        while f"waiting={REQUESTS}" not in state:
            assert time.monotonic() < deadline, f"some requests do not reach the server: {state}"
            await asyncio.sleep(0.2)
            with suppress(EngineError):  # a busy server answers late
                state = (await servers.call(server + "/server_info"))["state"]
        await servers.call(server + "/continue_generation", {})
        return await asked

    httpx.post(server + "/pause_generation", json={"mode": "retract"}).raise_for_status()
    assert asyncio.run(ask_all()) == [1] * REQUESTS
