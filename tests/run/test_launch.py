"""Servers and proxies: what they inherit, which GPUs they get, and how they end."""

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import SGLANG
from runs import wait_gone

from run.config import ConfigError, load
from run.launch import Child, Fleet, ProcessDied, choose_update_mode, plan_proxies, plan_servers


def python(code: str, *words: str) -> list[str]:
    return [sys.executable, "-c", code, *words]


def test_a_child_does_not_inherit_torchruns_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of several processes would wait for torchrun's store."""
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    words = ["-m", "torch.distributed.run", "--standalone", "--no-python", sys.executable, "-c"]
    shown = subprocess.run([sys.executable, *words, show], capture_output=True, text=True)
    given = json.loads(shown.stdout) | {"LOCAL_SCRATCH": "/scratch"}
    added = given.keys() - os.environ.keys()
    assert {"RANK", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"} < added
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    fleet = Fleet(tmp_path)
    child = fleet.start(Child("server-0", python(show), variables={"LOCAL_CHECK": "0"}))
    child.process.wait(timeout=30)
    fleet.close()
    seen = json.loads(child.log.read_text())
    torchruns = re.compile("RANK|WORLD_SIZE|ROLE|MASTER|TORCHELASTIC")
    assert {name for name in added if torchruns.search(name)} & seen.keys() == set()
    assert (seen["LOCAL_SCRATCH"], seen["LOCAL_CHECK"]) == ("/scratch", "0")


def test_a_child_reaches_this_machine_without_the_http_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang sends its first request to itself. Its memory saver refuses expandable segments."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "intern")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    bypassed = "[bool(u.proxy_bypass(host)) for host in ('127.0.0.1:1', 'intern', 'example.org')]"
    show = f"import json, os, urllib.request as u; print(json.dumps([{bypassed}, [*os.environ]]))"
    fleet = Fleet(tmp_path)
    child = fleet.start(Child("server-0", python(show)))
    child.process.wait(timeout=30)
    fleet.close()
    bypasses, names = json.loads(child.log.read_text())
    assert bypasses == [True, True, False]
    assert "PYTORCH_CUDA_ALLOC_CONF" not in names


def test_keys_reach_the_processes_by_a_pipe(tmp_path: Path) -> None:
    """Other users of the machine can read command lines, but no pipe."""
    config, _ = load([])
    config.model_path = config.tokenizer_path = "MODEL"
    [server], [proxy] = plan_servers(config, []), plan_proxies(config, ["URL"], {})
    options = ["--api-key -", "--admin-key - --server-key -"]
    for child, option in zip((server, proxy), options):
        assert option in " ".join(child.command)
    fleet = Fleet(tmp_path)
    child = fleet.start(Child("x", python("print(input(), input())")), "-one", "two")
    child.process.wait(timeout=30)
    fleet.close()
    assert child.log.read_text() == "-one two\n"


def test_a_process_that_ends_early_is_told(tmp_path: Path) -> None:
    """The error has its exit code and its last lines, before and after it was ready."""
    fleet, told = Fleet(tmp_path), threading.Event()
    child = fleet.start(Child("server-0", python("print('no memory'); raise SystemExit(3)")))
    with pytest.raises(ProcessDied, match="server-0 ended with code 3"):
        child.wait_ready()
    deaths: list[ProcessDied] = []

    def on_death(death: ProcessDied) -> None:
        deaths.append(death)
        told.set()

    fleet.watch(on_death)
    assert told.wait(30)
    assert "no memory" in str(deaths[0])
    fleet.close()


def test_the_end_of_a_fleet_is_no_death(tmp_path: Path) -> None:
    """close() ends also what a child has started, and reports nothing."""
    fleet = Fleet(tmp_path)
    code = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); import time; time.sleep(99)"
    child = fleet.start(Child("server-0", python(code)))
    deaths: list[ProcessDied] = []
    fleet.watch(deaths.append)
    while not child.log.read_text():
        pass
    fleet.close()
    wait_gone(int(child.log.read_text().split()[0]))
    assert deaths == []


EIGHT = list("01234567")


@pytest.mark.parametrize(
    ("gpus", "ranks", "words", "expected", "mode"),
    [
        (["0"], 1, [], ["0"], "disk"),
        (EIGHT[:2], 1, [], ["1"], "distributed"),
        (EIGHT, 4, ["server.count=2", "server.tp_size=2"], ["45", "67"], "distributed"),
        (EIGHT, 8, ["server.count=2"], ["0", "1"], "disk"),
        (EIGHT[:4], 1, ["server.count=4"], ["0", "1", "2", "3"], "disk"),
    ],
)
def test_who_gets_which_gpu(
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[str],
    ranks: int,
    words: list[str],
    expected: list[str],
    mode: str,
) -> None:
    """Ranks take the first GPUs and servers the last; where there are too few, they share. NCCL
    refuses shared GPUs, so these get files."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    config, _ = load(["server.backend=sglang", *words])
    monkeypatch.setenv("POCKET_AREAL_SGLANG", "python -m sglang.launch_server")
    planned = plan_servers(config, gpus)
    assert ["".join(server.gpus) for server in planned] == expected
    monkeypatch.delenv("POCKET_AREAL_SGLANG")
    assert choose_update_mode(config, planned, gpus) == mode
    share = "0.6" if mode == "disk" else "0.85"
    assert share in planned[0].command
    assert "--api-key" in planned[0].command


@pytest.mark.skipif(bool(SGLANG), reason="SGLang is here")
def test_sglang_is_not_installed() -> None:
    """The line says what to change."""
    with pytest.raises(ConfigError, match="sglang is not installed: pip install"):
        plan_servers(load(["server.backend=sglang"])[0], [])


def test_the_proxy_is_told_what_the_configuration_says() -> None:
    """Its options come from keys; what a key leaves open is left to the proxy."""
    config, _ = load(["gconfig.temperature=0.7"])
    config.tokenizer_path = "MODEL"
    [planned] = plan_proxies(config, ["URL"], {"extras.replay.Hooks": {"folder": "F"}})
    options: dict[str, Any] = dict(zip(planned.command, planned.command[1:]))
    assert json.loads(options["--sampling"])["temperature"] == 0.7
    assert json.loads(options["--hooks-args"]) == {"folder": "F"}
    assert "--tool-call-parser" not in planned.command
