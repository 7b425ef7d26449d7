"""If a run needs more connections than the soft limit of open files allows, the run raises the limit and loses no
request.

Many systems set the soft limit to 1,024 files for each process. Each connection is an open file.
"""

import asyncio
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from conftest import ROOT, free_port, server_process, wait_until_up
from runs import SMALL_GUESS, command

from inference.serve import raise_open_files
from inference.wire import EngineError, Wire

REQUESTS, SESSIONS = 2000, 80  # 25 requests for each session, fewer than `Limits.running` (32)


def limited(flag: str, files: int, command: list[str]) -> list[str]:
    """Return a command that runs `command` with a limit of `files` open files. The argument `flag` is a flag of
    `ulimit`: -Sn sets the soft limit, and -Hn sets the soft and the hard limit."""
    lower = f'ulimit -Sn {files}; ulimit {flag} {files}; exec "$@"'
    return ["bash", "-c", lower, "bash", *command]


@pytest.fixture
def addresses(tiny_model_dir: Path) -> Iterator[tuple[str, str]]:
    """Yield the URLs of a small server and of its proxy. The server and the proxy start with a soft limit of 1,024 open
    files each."""
    ports = [free_port(), free_port()]
    server, proxy = (f"http://127.0.0.1:{port}" for port in ports)
    modules = ["inference.tiny.server"], ["proxy", "--server", server, "--admin-key", "secret"]
    with ExitStack() as stack:
        for port, (module, *options) in zip(ports, modules):
            words = [
                "--model-path",
                str(tiny_model_dir),
                "--port",
                str(port),
                "--exit-with-parent",
                *options,
            ]
            whole = limited("-Sn", 1024, [sys.executable, "-m", module, *words])
            process = stack.enter_context(subprocess.Popen(whole, cwd=ROOT, stdin=subprocess.PIPE))
            wait_until_up(f"http://127.0.0.1:{port}", process)
        yield server, proxy


@pytest.mark.runs
def test_2000_requests_in_flight_lose_none(addresses: tuple[str, str]) -> None:
    """2,000 calls of agents wait in the proxy and in the server at the same time, and every call gets an answer."""
    server, proxy = addresses
    assert raise_open_files() > REQUESTS + 100
    admin = {"authorization": "Bearer secret"}
    sessions = []
    for number in range(SESSIONS):
        httpx.post(proxy + "/grant_capacity", headers=admin).raise_for_status()
        start = httpx.post(
            proxy + "/rl/start_session", json={"task_id": str(number)}, headers=admin
        )
        sessions.append(start.json()["session_id"])
    wire = Wire()

    async def ask(number: int) -> int:
        messages = [{"role": "user", "content": f"question {number}"}]
        body = {"model": "default", "messages": messages, "max_tokens": 1}
        answer = await wire.call(
            f"{proxy}/{sessions[number % SESSIONS]}/v1/chat/completions", body, timeout=200
        )
        return answer["usage"]["completion_tokens"]

    async def ask_all() -> list[int]:
        asked = asyncio.gather(*map(ask, range(REQUESTS)))
        deadline = time.monotonic() + 150
        state = ""
        while f"waiting={REQUESTS}" not in state:
            assert time.monotonic() < deadline, "some requests do not reach the server"
            await asyncio.sleep(0.2)
            with suppress(EngineError):  # on a busy machine the server sometimes answers too late
                state = (await wire.call(server + "/server_info"))["state"]
        await wire.call(server + "/continue_generation", {})
        return await asked

    httpx.post(server + "/pause_generation", json={"mode": "retract"}).raise_for_status()
    assert asyncio.run(ask_all()) == [1] * REQUESTS


@pytest.fixture
def logged(tiny_model_dir: Path, tmp_path: Path) -> Iterator[tuple[str, str, list[int], Path]]:
    """Start a small server and its proxy. Yield the URL of each process, the list of the process ids, and the file of
    the common log."""
    log = tmp_path / "log"
    words = ["--model-path", str(tiny_model_dir)]
    with log.open("a") as out, ExitStack() as stack:
        command = [sys.executable, "-m", "inference.tiny.server", *words]
        server, first = stack.enter_context(server_process(*command, out=out))
        command = [
            sys.executable,
            "-m",
            "proxy",
            *words,
            "--server",
            server,
            "--admin-key",
            "secret",
        ]
        proxy, second = stack.enter_context(server_process(*command, out=out))
        yield server, proxy, [first.pid, second.pid], log


def wait_for(log: Path, words: str) -> None:
    """Wait until a log contains `words`."""
    deadline = time.monotonic() + 100
    while words not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="prlimit is a call of Linux")
def test_without_free_descriptors_no_call_is_lost(logged: tuple[str, str, list[int], Path]) -> None:
    """In the first part of the test, the connections of an attacker use nearly all file descriptors of the server and
    of the proxy. In the second part of the test, the proxy's limit of open files is lowered, so that the proxy has no
    free file descriptor. While a process has no free file descriptor, the agents' calls wait. All calls are answered as
    soon as file descriptors are free again. Even without free file descriptors, the proxy does not count the server as
    lost."""
    server, proxy, pids, log = logged
    admin = {"authorization": "Bearer secret"}
    body = {"task_id": "1", "grant": True}
    session = httpx.post(proxy + "/rl/start_session", json=body, headers=admin).json()["session_id"]

    def ask(number: int) -> int:
        with openai.OpenAI(base_url=f"{proxy}/{session}/v1", api_key="DUMMY") as client:
            messages: Any = [{"role": "user", "content": f"question {number}"}]
            reply = client.chat.completions.create(
                model="m", messages=messages, max_completion_tokens=4, n=2
            )
            return len(reply.choices)

    with ThreadPoolExecutor(5) as pool, ExitStack() as attack:
        assert ask(-1) == 2
        limits = [resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in pids]
        for pid, (_, hard) in zip(pids, limits):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (100, hard))
        for url in (server, proxy) * 150:
            address = url.removeprefix("http://").split(":")
            attack.enter_context(
                socket.create_connection((address[0], int(address[1])), timeout=60)
            )
        calls = [pool.submit(ask, number) for number in range(5)]
        wait_for(log, "few file descriptors are free, so new connections wait (8 times)")
        attack.close()
        assert [call.result(timeout=200) for call in calls] == [2] * 5

        with httpx.Client(base_url=proxy, timeout=200) as client:
            assert client.get("/health").status_code == 200  # this connection stays open
            # The proxy requests at most 32 of the 128 answers at the same time. The proxy keeps at most 10 idle
            # connections to the server.
            resource.prlimit(pids[1], resource.RLIMIT_NOFILE, (12, limits[1][1]))
            path, messages = (
                f"/{session}/v1/chat/completions",
                [{"role": "user", "content": "last"}],
            )
            last = pool.submit(
                client.post, path, json={"messages": messages, "max_tokens": 4, "n": 128}
            )
            wait_for(log, "no file descriptor is free")
            resource.prlimit(pids[1], resource.RLIMIT_NOFILE, limits[1])
            assert len(last.result(timeout=200).json()["choices"]) == 128
        assert ask(11) == 2
    lines = log.read_text().splitlines()
    assert [line for line in lines if "lost server" in line or "Traceback" in line] == []
    assert len(lines) < 40


@pytest.mark.runs
def test_a_run_raises_its_soft_limit(tmp_path: Path) -> None:
    """A run with 240 concurrent episodes completes its step, although it starts with a soft limit of 200 open files."""
    words = ["gconfig.n_samples=40", "max_steps=1", "rollout.max_head_offpolicyness=0"]
    whole = limited("-Sn", 200, command(tmp_path, *SMALL_GUESS, *words))
    done = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "Too many open files" not in "".join(
        log.read_text() for log in tmp_path.glob("e/t/logs/*")
    )


def test_a_hard_limit_that_is_too_low_is_one_line(tmp_path: Path, tiny_model_dir: Path) -> None:
    """If the hard limit is too low for the recipe, train.py starts nothing, and says which limit to raise or which key
    to lower."""
    words = [
        "--config",
        "configs/gsm8k.yaml",
        f"model={tiny_model_dir}",
        "data=tests/data/gsm8k.jsonl",
    ]
    whole = limited("-Hn", 1024, command(tmp_path, *words))
    done = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(
        "error: 1536 running episodes need 3328 open files, but the limit is 1024: raise it"
    )
    assert "rollout.max_concurrent_rollouts" in line
    assert list(tmp_path.iterdir()) == []


def test_the_limit_is_never_lowered() -> None:
    """`raise_open_files` returns the new soft limit, and a second call changes nothing."""
    limit = raise_open_files()
    assert limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == raise_open_files()
