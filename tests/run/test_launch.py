"""Servers and proxies: what they inherit, which GPUs they get, and how they end."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from runs import wait_gone

from inference.process import Child, ProcessDied
from rollout.launch import plan_proxy, plan_servers
from run.config import load

Start = Callable[..., Child]


@pytest.fixture
def child_of(tmp_path: Path) -> Iterator[Start]:
    """A function that starts a child with Python code, which ends with the test."""
    started = list[Child]()

    def start(code: str) -> Child:
        child = Child("server-0", [sys.executable, "-uc", code], variables={"LOCAL_CHECK": "0"})
        child.start(tmp_path)
        started.append(child)
        return child

    yield start
    for child in started:
        child.end()


def test_a_child_does_not_inherit_torchruns_variables(child_of: Start, monkeypatch) -> None:
    """With these variables, a server of several processes would wait for torchrun's store. PATH
    begins with python's folder, because SGLang compiles kernels with the ninja that pip has put
    there."""
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    words = ["-m", "torch.distributed.run", "--standalone", "--no-python", sys.executable, "-c"]
    shown = subprocess.run([sys.executable, *words, show], capture_output=True, text=True)
    given = json.loads(shown.stdout) | {"LOCAL_SCRATCH": "/scratch"}
    added = given.keys() - os.environ.keys()
    assert {"RANK", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"} < added
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    child = child_of(show)
    child.process.wait(timeout=30)
    seen = json.loads(child.log.read_text())
    torchruns = re.compile("RANK|WORLD_SIZE|ROLE|MASTER|TORCHELASTIC")
    assert {name for name in added if torchruns.search(name)} & seen.keys() == set()
    assert (seen["LOCAL_SCRATCH"], seen["LOCAL_CHECK"]) == ("/scratch", "0")
    assert seen["PATH"].startswith(os.path.dirname(sys.executable))


def test_a_child_reaches_this_machine_without_the_http_proxy(child_of: Start, monkeypatch) -> None:
    """SGLang sends its first request to itself, so it would not start with HTTP_PROXY set. The
    allocator's settings are not inherited, because SGLang's memory saver refuses expandable
    segments."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "intern")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    bypassed = "[bool(u.proxy_bypass(host)) for host in ('127.0.0.1:1', 'intern', 'example.org')]"
    show = f"import json, os, urllib.request as u; print(json.dumps([{bypassed}, [*os.environ]]))"
    child = child_of(show)
    child.process.wait(timeout=30)
    bypasses, names = json.loads(child.log.read_text())
    assert bypasses == [True, True, False]
    assert "PYTORCH_CUDA_ALLOC_CONF" not in names


def test_a_process_that_ends_early_is_told(child_of: Start) -> None:
    """The error has the exit code and the last lines of the process, even if the process ends while
    the run watches it."""
    child, deaths = child_of("print('no memory'); raise SystemExit(3)"), Queue[ProcessDied]()
    with pytest.raises(ProcessDied, match="server-0 ended with code 3"):
        child.wait_ready()
    child.watch(deaths.put)
    assert "no memory" in str(deaths.get(timeout=30))


def test_an_end_ends_also_what_a_child_has_started(child_of: Start) -> None:
    """A server's workers belong to its process group, which is killed as a whole."""
    sleep = "subprocess.Popen(['sleep', '1000']).pid"
    child = child_of(f"import subprocess, time; print({sleep}); time.sleep(99)")
    while not child.log.read_text():
        pass
    child.end()
    wait_gone(int(child.log.read_text()))


EIGHT, TINY = list("01234567"), ["server.backend=tiny", "server.device=auto"]


@pytest.mark.parametrize(
    ("gpus", "ranks", "words", "expected", "told"),
    [
        (["0"], 1, [], ["0"], "--mem-fraction-static 0.6"),
        (EIGHT[:2], 1, [], ["1"], "--mem-fraction-static 0.85"),
        (EIGHT, 4, ["server.count=2", "server.tp_size=2"], ["45", "67"], "--tp-size 2"),
        (EIGHT, 8, ["server.count=2"], ["0", "1"], "--mem-fraction-static 0.6"),
        (EIGHT[:4], 1, ["server.count=4"], [*"0123"], "--api-key=-key"),  # it may begin with "-"
        (EIGHT[:2], 1, ["server.dtype=auto", *TINY], ["1"], "bfloat16 --device cuda"),
        (EIGHT[:2], 1, ["server.count=2", *TINY], ["0", "1"], "float32 --device cuda"),
        (EIGHT[:2], 1, TINY[:1], [""], "float32 --device cpu"),  # the demo's choice
        ([], 1, TINY, [""], "float32 --device cpu"),
    ],
)
def test_who_gets_which_gpu(monkeypatch, gpus, ranks, words, expected, told) -> None:
    """Ranks take the first GPUs and servers the last; where there are too few, they share."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(gpus))
    planned = plan_servers(load(["server.backend=sglang", *words])[0], gpus, "-key")
    assert ["".join(server.gpus) for server in planned] == expected
    assert told in " ".join(planned[0].command)


def test_our_own_processes_are_told_what_the_configuration_says() -> None:
    """Options come from keys; what a key leaves open is left to the process. Other users of the
    machine can read command lines, so the API keys are not there."""
    config, _ = load(["gconfig.temperature=0.7"])
    config.model_path, config.tokenizer_path = "MODEL", "WORDS"
    hooks: dict[str, Any] = {"extras.replay.Hooks": {"folder": "F"}}
    [server] = plan_servers(config, [], "k3y")
    proxy = plan_proxy(config, ["URL"], "k3y", "adm1n", hooks)
    options: dict[str, Any] = dict(zip(proxy.command, proxy.command[1:]))
    assert json.loads(options["--sampling"])["temperature"] == 0.7
    assert json.loads(options["--hooks"]) == hooks
    assert "--tool-call-parser" not in proxy.command
    assert "--max-total-tokens 16384 --seed" in " ".join(server.command)
    assert " ".join(server.command).count("--tokenizer-path WORDS") == 1
    assert not re.search("k3y|adm1n", " ".join(server.command + proxy.command))
    assert {*server.variables.values()} < {*proxy.variables.values()} == {"k3y", "adm1n"}
