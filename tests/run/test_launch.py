"""Tests of the child processes: what a process inherits, how it ends, and what happens when a
process dies early.

The tests start real processes.
"""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, rest_of
from run.load import load
from runs import (
    SMALL_GUESS,
    STRADDLING_MAZE,
    assert_gone,
    check_metrics,
    is_alive,
    run,
    start_and_hold,
    wait_gone,
)

import proxy
from run.launch import Child, Fleet, Planned, ProcessDied, plan_restart
from run.plan import plan_servers
from run.start import plan_proxies


def python(code: str, *words: str) -> list[str]:
    """Return the command that runs a piece of Python code."""
    return [sys.executable, "-c", code, *words]


def test_a_child_does_not_inherit_torchruns_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun, child processes inherit all environment variables except torchrun's. The plan
    can add environment variables for a child process (Planned.variables).

    SGLang consists of several processes, which connect to each other with torch.distributed. If a
    process of SGLang inherits torchrun's variables, it waits for torchrun's store.
    """
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--no-python",
        sys.executable,
        "-c",
    ]
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    shown = subprocess.run(
        [*torchrun, show], capture_output=True, text=True, timeout=100, check=True
    )
    given = json.loads(shown.stdout) | {"LOCAL_SCRATCH": "/scratch"}
    added = given.keys() - os.environ.keys() - {"LOCAL_SCRATCH", "OMP_NUM_THREADS"}
    assert {"RANK", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"} < added
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    fleet = Fleet(tmp_path)
    child = fleet.start(Planned("server-0", python(show), variables={"LOCAL_CHECK": "0"}))
    child.process.wait(timeout=30)
    fleet.close()
    seen = json.loads(child.log.read_text())
    assert {
        name for name in added if re.search("RANK|WORLD_SIZE|ROLE|MASTER|TORCHELASTIC", name)
    } & seen.keys() == set()
    assert (seen["LOCAL_SCRATCH"], seen["LOCAL_CHECK"]) == ("/scratch", "0")


def test_a_child_reaches_this_machine_without_the_http_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child process does not use an HTTP proxy for this machine, and does not inherit settings of
    torch's allocator.

    SGLang sends a request to its own address when it starts, and ends if the request fails.
    SGLang's memory saver refuses expandable segments.
    """
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # no server listens at this port
    monkeypatch.setenv("NO_PROXY", "intern")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    bypassed = "[bool(u.proxy_bypass(host)) for host in ('127.0.0.1:1', 'intern', 'example.org')]"
    show = f"import json, os, urllib.request as u; print(json.dumps([{bypassed}, [*os.environ]]))"
    fleet = Fleet(tmp_path)
    child = fleet.start(Planned("server-0", python(show)))
    child.process.wait(timeout=30)
    fleet.close()
    bypasses, names = json.loads(child.log.read_text())
    assert bypasses == [True, True, False]
    assert "HTTP_PROXY" in names
    assert "PYTORCH_CUDA_ALLOC_CONF" not in names


def test_agents_requests_are_as_patient_as_configured(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy's command line contains three settings for the proxy's engine:
    rollout.request_timeout, rollout.request_retries, and whether servers are started again."""
    given = {}

    class Recorder:
        def __init__(self, addresses: list[str], **options: object) -> None:
            given.update(options)
            raise ValueError("that is all")

    monkeypatch.setattr(proxy, "ScheduledEngine", Recorder)
    words = [
        "rollout.request_timeout=7",
        "rollout.request_retries=5",
        "rollout.server_key=the server's",
        f"tokenizer_path={tiny_model_dir}",
    ]
    [planned] = plan_proxies(
        load(["--config", str(ROOT / "configs/gsm8k.yaml"), "model_path=DIR", *words]),
        ["http://up"],
        wait_for_servers=True,
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(planned.keys)))
    assert proxy.main([*planned.command[4:], "--port", "0"]) == 2
    patience = {"request_timeout": 7.0, "request_retries": 5, "wait_for_servers": True}
    assert given == {
        **patience,
        "key": "the server's",
        "schedule": "runs/gsm8k/auto/schedule.jsonl",
        "replay": "",
    }


def test_keys_reach_the_processes_by_a_pipe() -> None:
    """No command line and no environment variable of a server or proxy contains a key, because
    other processes can read both. A server or proxy reads its keys from standard input."""
    config = load(
        [
            "--config",
            str(ROOT / "configs/demo.yaml"),
            "rollout.server_key=very-secret",
            "tokenizer_path=DIR",
        ]
    )
    [server], [front] = (
        plan_servers(config, [], ranks=1),
        plan_proxies(config, ["http://up"], wait_for_servers=True),
    )
    assert server.keys == ("very-secret",)
    admin_key, server_key = front.keys
    assert server_key == "very-secret"
    for planned in (server, front):
        told = " ".join([*planned.command, *planned.variables.values()])
        assert "very-secret" not in told
        assert admin_key not in told


def test_a_leash_passes_a_key_that_begins_with_a_hyphen() -> None:
    """run/leash.py reads the server's key from its standard input, and passes the key to the server
    even if the key begins with "-".

    One random key in 64 begins with "-". The script run/leash.py writes --api-key and the key into
    one argument, because argparse reads a separate argument that begins with "-" as an option.
    """
    parse = "import argparse; p = argparse.ArgumentParser(); p.add_argument('--api-key'); print(p.parse_args().api_key)"
    command = [sys.executable, "run/leash.py", "--api-key", *python(parse)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as leash:
        assert leash.stdin is not None
        assert leash.stdout is not None
        leash.stdin.write("-key\n")
        leash.stdin.flush()
        assert leash.stdout.readline() == "-key\n"


def test_a_leash_ends_all_that_the_command_started(tmp_path: Path) -> None:
    """When the pipe from the parent closes, run/leash.py ends its command and the command's
    children, even if the command ignores SIGTERM."""
    child = "import time; time.sleep(1000)"
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}]); print(p.pid, flush=True); time.sleep(1000)"
    )
    leash = subprocess.Popen(
        [sys.executable, "run/leash.py", *python(code)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert leash.stdin is not None
    assert leash.stdout is not None
    grandchild = int(leash.stdout.readline())
    assert is_alive(grandchild)
    leash.stdin.close()
    assert leash.wait(timeout=30) == -signal.SIGKILL
    wait_gone(grandchild)
    leash.stdout.close()


def test_a_leash_hands_on_the_exit_code() -> None:
    """run/leash.py exits with the exit code of its command."""
    command = [sys.executable, "run/leash.py", *python("import sys; sys.exit(7)")]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True
    ) as leash:
        assert leash.wait(timeout=60) == 7


def test_one_of_several_servers_may_die(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If one of two servers dies and restarts are forbidden, the log shows the dead server's last
    output. If both servers of a run have died, the run ends."""
    fleet = Fleet(tmp_path)
    speak = "import sys; print('my last words', flush=True); sys.stdin.read()"
    first, second = (fleet.start(Planned(f"server-{k}", python(speak))) for k in (0, 1))
    deaths: list[ProcessDied] = []
    told = threading.Event()
    fleet.watch([deaths.append, lambda _: told.set()], 0, told.set)
    first.process.stdin.close()  # type: ignore[union-attr]
    first.process.wait(timeout=30)
    fleet.raise_death(ValueError("of an episode whose server died: another one will do"))
    deadline = time.monotonic() + 30
    while (
        "continues with 1" not in caplog.text
    ):  # this line is logged by the thread that watches the server
        assert not told.wait(0.01)
        assert time.monotonic() < deadline
    second.process.stdin.close()  # type: ignore[union-attr]
    assert told.wait(30)
    assert "server-1 ended with code 0" in str(deaths[0])
    assert [
        r
        for r in caplog.messages
        if "server-0" in r and "my last words" in r and "continues with 1" in r
    ]
    with pytest.raises(ProcessDied, match="server-1"):
        fleet.raise_death(ValueError("something else"))
    fleet.close()
    assert [watcher.is_alive() for watcher in fleet.watchers] == [False, False]


def test_which_process_is_started_again(tmp_path: Path) -> None:
    """A dead inference server is started again on its old port, at most `max_restarts` times. A
    server that is started again has the version label "0-incomplete". A proxy is never started
    again, because a new proxy would not have the dead proxy's sessions."""

    def dead(name: str, restarts: int) -> Child:
        planned = Planned(
            name, ["serve", "--weight-version", "0"], ["3"], keys=("secret",), restarts=restarts
        )
        return Child(name, "http://127.0.0.1:4321", tmp_path, None, planned)  # type: ignore[arg-type]

    again = plan_restart(dead("server-0", 1), 2)
    assert again is not None
    assert again.command == ["serve", "--weight-version", "0", "--weight-version", "0-incomplete"]
    assert (again.port, again.gpus, again.keys, again.restarts) == (4321, ["3"], ("secret",), 2)
    assert plan_restart(dead("server-0", 2), 2) is None
    assert plan_restart(dead("proxy-0", 0), 2) is None


SERVES = """import sys; from http.server import *
class Handler(BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200); self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()"""


def test_a_dead_server_is_started_again(tmp_path: Path) -> None:
    """If a run's single server dies, the server is started again at the same address, and the log
    of the first process is kept. If the server dies a second time, the run ends, because
    max_restarts is 1. While a run is ending, no server is started again."""
    fleet, restarted, deaths = Fleet(tmp_path), threading.Event(), list[ProcessDied]()
    died = threading.Event()
    first = fleet.start(Planned("server-0", python(SERVES)))
    url = first.wait_ready()
    fleet.watch([deaths.append, lambda _: died.set()], max_restarts=1, on_restart=restarted.set)
    first.process.kill()
    assert restarted.wait(60)
    [second] = fleet.children
    assert (second.url, second.process.args[-4:-1]) == (
        url,
        ["--weight-version", "0-incomplete", "--port"],
    )  # type: ignore
    assert second.log != first.log
    assert not died.is_set()
    second.process.kill()
    assert died.wait(60)
    assert "server-0 ended with code -9" in str(deaths[0])
    fleet.close()
    assert fleet.restart(second, second.planned) is None


def kill_a_server(folder: Path, *words: str) -> tuple[str, list[dict[str, Any]]]:
    """Train in `folder`, and kill an inference server after the first step. Return the run's output
    and metrics.

    The run must succeed, and all its processes must end.
    """
    process, pids = start_and_hold(folder, *SMALL_GUESS, *words)
    os.kill(pids["inference.tiny.server"], signal.SIGKILL)
    process.send_signal(signal.SIGCONT)
    output = rest_of(process, 200)
    assert process.returncode == 0, output[-3000:]
    assert_gone(pids)
    return output, [
        json.loads(line) for line in (folder / "e/t/metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.runs
@pytest.mark.parametrize("mode", ["disk", "distributed"])
def test_a_run_starts_its_only_server_again(tmp_path: Path, mode: str) -> None:
    """A run with a single server continues to its last step although the server is killed after the
    first weight update. The run starts the server again and pushes the weights of the first step to
    the new process. No request fails, and the log-probabilities of the trainer and of the new
    server agree."""
    words = ["max_steps=4", f"weight_update.mode={mode}", "evaluator.interval=2"]
    output, metrics = kill_a_server(tmp_path, *words)
    assert "server-0 is started again" in output
    assert len(metrics) == 4
    check_metrics(metrics, eta=1)
    assert metrics[3]["eval_rejected"] == 0


@pytest.mark.runs
@pytest.mark.parametrize("mode", ["disk", "tensor"])
def test_a_run_releases_the_servers_memory(tmp_path: Path, mode: str) -> None:
    """With server.release_memory the server loses its weights in every training step. In this test,
    training steps interrupt the long answers of the maze task. The run loses no token, and the
    trainer's log-probabilities agree with the server's."""
    words = [
        *STRADDLING_MAZE,
        "max_steps=3",
        "server.release_memory=true",
        f"weight_update.mode={mode}",
    ]
    metrics = run(tmp_path, *words)
    check_metrics(metrics, eta=1)
    assert any(line["mixed_version_share"] > 0 for line in metrics)


@pytest.mark.runs
def test_a_run_outlives_one_of_its_two_servers(tmp_path: Path) -> None:
    """If one of two servers is killed after the first step and restarts are forbidden, the run
    reports the death and continues to its last step."""
    words = ["server.count=2", "server.max_restarts=0", "max_steps=6"]
    output, metrics = kill_a_server(tmp_path, *words)
    assert "ended with code -9" in output
    assert "continues with 1 inference servers" in output
    assert len(metrics) == 6
