"""Tests of the launcher: which processes a run plans, which configurations a run refuses, and what happens when a
process ends.

The plan is a pure function of the configuration and the list of GPUs, so the tests of the plan need no GPUs. The tests
of processes start real processes.
"""

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from conftest import ROOT, free_port, rest_of
from runs import SMALL_GUESS, assert_gone, command, is_alive, start_and_hold, wait_gone

import proxy
from run.config import ConfigError, load
from run.keys import TrainConfig
from run.launch import (
    Child,
    Fleet,
    Planned,
    ProcessDied,
    check_addresses,
    check_memory,
    check_sglang,
    check_update_mode,
    plan_servers,
)
from run.start import start_proxies


def config(model: Path | str = "DIR", *words: str) -> TrainConfig:
    """Return the GSM8K recipe's configuration with this model and these key=value words."""
    return load(["--config", str(ROOT / "configs/gsm8k.yaml"), f"model_path={model}", *words])


def gpus_of(gpus: int, ranks: int, *words: str) -> list[list[str]]:
    """Return which GPUs each planned server gets, for this number of GPUs and ranks."""
    plan = plan_servers(config("DIR", "server.backend=tiny", *words), [str(k) for k in range(gpus)], ranks)
    return [process.gpus for process in plan]


SGLANG = ["server.backend=sglang", "server.command=sglang"]  # the small server cannot use several GPUs


# Which process gets which GPU


@pytest.mark.parametrize(
    ("gpus", "ranks", "words", "expected"),
    [
        (0, 1, [], [[]]),
        (0, 1, ["server.count=2"], [[], []]),
        (1, 1, [], [["0"]]),  # colocated, because there is only one GPU
        (2, 1, [], [["1"]]),
        (8, 4, [*SGLANG, "server.count=2", "server.tp_size=2"], [["4", "5"], ["6", "7"]]),
        (8, 4, [*SGLANG, "server.count=1", "server.tp_size=2"], [["6", "7"]]),
        (8, 8, [*SGLANG, "server.count=4", "server.tp_size=2"], [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]),
        (8, 2, ["server.count=2", "server.colocate=true"], [["0"], ["1"]]),
        (1, 1, ["server.count=2"], [["0"], ["0"]]),
        (8, 8, ["rollout.server_addrs=[http://up]", "server.backend=auto"], []),
    ],
)
def test_gpus_are_split_or_shared(gpus: int, ranks: int, words: list[str], expected: list[list[str]]) -> None:
    """Trainers get the first GPUs and servers get the last GPUs. If there are too few GPUs, trainers and servers
    share them."""
    assert gpus_of(gpus, ranks, *words) == expected


@pytest.mark.parametrize(
    ("gpus", "ranks", "words"), [(2, 1, ["server.tp_size=4"]), (4, 3, ["server.tp_size=2", "server.colocate=false"])]
)
def test_too_few_gpus_are_refused(gpus: int, ranks: int, words: list[str]) -> None:
    """If servers and ranks do not fit on the GPUs, planning raises an error."""
    with pytest.raises(ConfigError, match="do not fit on"):
        gpus_of(gpus, ranks, *words)


def test_the_small_server_refuses_several_gpus() -> None:
    """server.tp_size above 1 is an error if the small server would ignore the key."""
    with pytest.raises(ConfigError, match=r"server.tp_size has no effect on the small server"):
        plan_servers(load(["server.tp_size=2", "server.backend=tiny"]), [], ranks=1)


def test_the_command_of_sglang() -> None:
    """SGLang's command begins with run/leash.py and sets version 0 and a share of the memory. The user's arguments
    come last."""
    given = ["server.backend=sglang", "server.command='PY -m it'", "server.args=[--tool-call-parser,qwen]"]
    [split] = plan_servers(config("DIR", *given), ["0", "1"], 1)
    text = " ".join(split.command)
    assert "run/leash.py --api-key PY -m it --model-path DIR --weight-version 0" in text
    assert "--mem-fraction-static 0.85" in text
    assert text.endswith("--tool-call-parser qwen")
    [shared] = plan_servers(config("DIR", *given), ["0"], 1)
    assert "--mem-fraction-static 0.6" in " ".join(shared.command)


# What is refused


SGLANG_WORDS = ("server.backend=sglang", "server.command='PY -m sglang.launch_server'")


@pytest.mark.parametrize(
    ("gpus", "ranks", "words", "says"),
    [
        (1, 1, ["weight_update.mode=distributed"], "share: set weight_update.mode=tensor, or server.colocate=false"),
        (2, 2, ["weight_update.mode=distributed", "server.count=2"], "share: set weight_update.mode=disk"),
        (2, 1, ["weight_update.mode=tensor"], "server-0 does not use GPU 0, as rank 0 does: .*mode=distributed"),
        (
            2,
            2,
            ["weight_update.mode=tensor", "server.count=2"],
            "server-1 does not use GPU 0.* weight_update.mode=disk",
        ),
        (1, 1, ["weight_update.mode=tensor"], None),
        (2, 2, ["weight_update.mode=tensor", "server.tp_size=2"], None),
        (2, 1, ["weight_update.mode=distributed"], None),
        (1, 1, ["weight_update.mode=disk"], None),
        # The small server uses gloo.
        (1, 1, ["weight_update.mode=distributed", "server.backend=tiny", "server.command=''"], None),
        (0, 1, ["weight_update.mode=distributed"], None),
    ],
)
def test_a_mode_of_the_update_that_the_gpus_rule_out_is_refused(
    gpus: int, ranks: int, words: list[str], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update mode distributed is refused if two processes share a GPU, because NCCL refuses this. The mode tensor
    is refused if a server does not use rank 0's GPU. The error names a mode that works."""
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    names, given = [str(k) for k in range(gpus)], config("DIR", *SGLANG_WORDS[: 2 if gpus else 0], *words)
    given.server.command = given.server.command.replace("PY", sys.executable)
    with pytest.raises(ConfigError, match=says) if says else nullcontext():
        check_update_mode(given, plan_servers(given, names, ranks), names)


def test_another_version_of_nccl_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the server's own Python environment has another version of NCCL, the update mode distributed is refused, but
    the mode disk is accepted."""
    (tmp_path / "python").write_text("#!/bin/sh\necho '(2, 30, 1)'\n")
    (tmp_path / "python").chmod(0o755)
    for version in ((2, 30, 1), (2, 27, 5)):
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda version=version: version)
        for mode in ("disk", "distributed"):
            command = f"server.command='{tmp_path}/python -m sglang.launch_server'"
            given = config("DIR", "server.backend=sglang", command, f"weight_update.mode={mode}")
            refused = pytest.raises(ConfigError, match=r"NCCL \(2, 27, 5\) here, \(2, 30, 1\) in the server")
            with refused if mode == "distributed" and version[1] == 27 else nullcontext():
                check_update_mode(given, plan_servers(given, ["0", "1"], 1), ["0", "1"])


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, requires: str) -> None:
    """Write the metadata of an sglang package that has this requirement into a folder, and put the folder on
    sys.path."""
    info = folder / "sglang-0.5.23.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\nRequires-Dist: {requires}\n")
    monkeypatch.syspath_prepend(folder)


def test_an_sglang_for_another_torch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If SGLang needs another version of torch than the installed version, an error names both versions."""
    install(tmp_path, monkeypatch, "torch==1.0.1")
    with pytest.raises(
        ConfigError, match=r"sglang 0.5.23 was built for torch 1.0.1, but torch .* pip install torch==1.0.1"
    ):
        check_sglang()


def test_an_sglang_for_this_torch_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An SGLang that was built for the installed torch is accepted."""
    install(tmp_path, monkeypatch, f"torch=={torch.__version__.partition('+')[0]}")
    check_sglang()


def test_without_sglang_the_ways_to_it_are_named() -> None:
    """If SGLang is missing, the message describes how to install SGLang and how to use SGLang from elsewhere."""
    with pytest.raises(ConfigError, match=r"not installed here: pip install .* server.command=.* rollout.server_addrs"):
        check_sglang()


def test_a_port_that_is_taken_is_refused() -> None:
    """A port that is in use is reported before any process starts."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"server.port: {port} cannot be used .*in use"):
            check_addresses(config(), [Planned("server", [], [], port)])


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "no-scheme:1", "http://nowhere.invalid:1"])
def test_a_server_that_does_not_answer_is_refused(url: str) -> None:
    """Each address in rollout.server_addrs must answer before the run begins."""
    with pytest.raises(ConfigError, match=f"rollout.server_addrs: {url} cannot be reached"):
        check_addresses(config("DIR", f"rollout.server_addrs=['{url}']", "rollout.server_key=k"), [])


def test_a_server_elsewhere_needs_a_key() -> None:
    """An address of another machine is refused without rollout.server_key, because others may reach the server too."""
    with pytest.raises(ConfigError, match=r"is not this machine: set rollout.server_key"):
        check_addresses(config("DIR", "rollout.server_addrs=['http://gpu:1']"), [])


@pytest.mark.parametrize(
    ("routes", "end", "fits"),
    [(set(), "", False), ({"/health"}, "", False), ({"/model_info"}, "", True), ({"/workers"}, "/", True)],
)
def test_a_server_of_another_kind_is_refused(routes: set[str], end: str, fits: bool) -> None:
    """A server that is not an inference server is refused. A router is accepted, because a router answers GET
    /workers."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in routes else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}{end}"
        refused = pytest.raises(
            ConfigError, match=f"server_addrs: {url} is no inference server of this key: it answered 404"
        )
        try:
            with nullcontext() if fits else refused:
                check_addresses(config("DIR", f"rollout.server_addrs=[{url}]"), [])
        finally:
            server.shutdown()


def test_too_little_memory_says_what_to_turn_down() -> None:
    """If the memory is too small, the message lists the keys to reduce, with the best key first."""
    needs = [(Planned("rank 0", [], ["0"]), 30.0), (Planned("server-0", [], ["0", "1"]), 20.0)]
    check_memory(needs, ["0", "1"], 50.0)
    with pytest.raises(
        ConfigError, match=r"50 GiB are needed \(rank 0 30.0, server-0 20.0\) and GPU 0 has 49"
    ) as caught:
        check_memory(needs, ["0", "1"], 49.0)
    order = ["server.max_total_tokens", "actor.mb_tokens", "server.count", "nproc-per-node", "smaller model"]
    places = [str(caught.value).index(word) for word in order]
    assert places == sorted(places)


def test_dry_run_starts_nothing(tmp_path: Path, tiny_model_dir: Path) -> None:
    """With --dry-run train.py prints processes, ports and memory, starts no process and writes no file."""
    given = [f"model={tiny_model_dir}", "data=tests/data/gsm8k.jsonl", f"server.port={(port := free_port())}"]
    whole = command(tmp_path, "--config", "configs/gsm8k.yaml", "--dry-run", *given, "server.max_total_tokens=4096")
    done = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names[:4] == ["process", "rank", "server-0", "proxy-0"]
    assert f" {port} " in done.stdout
    assert "inference.tiny.server" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_an_unreachable_server_is_one_line(tmp_path: Path, tiny_model_dir: Path) -> None:
    """If no server answers at an address, train.py refuses the run with a one-line error and writes no file."""
    whole = command(tmp_path, "rollout.server_addrs=[http://127.0.0.1:9]")
    done = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: rollout.server_addrs: http://127.0.0.1:9 cannot be reached")
    assert list(tmp_path.iterdir()) == []


# What happens when a process ends


def python(code: str, *words: str) -> list[str]:
    """Return the command that runs a piece of Python code."""
    return [sys.executable, "-c", code, *words]


def test_a_child_does_not_inherit_torchruns_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun, a process starts its children without torchrun's variables, but with all other variables.

    SGLang connects its own processes to each other. With torchrun's variables SGLang would wait for torchrun's store.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", sys.executable, "-c"]
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    shown = subprocess.run([*torchrun, show], capture_output=True, text=True, timeout=100, check=True)
    given = json.loads(shown.stdout) | {"LOCAL_SCRATCH": "/scratch"}
    added = given.keys() - os.environ.keys() - {"LOCAL_SCRATCH", "OMP_NUM_THREADS"}
    assert {"RANK", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"} < added
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    fleet = Fleet(tmp_path)
    child = fleet.start(Planned("server-0", python(show)))
    child.process.wait(timeout=30)
    fleet.stop()
    seen = json.loads(child.log.read_text())
    assert {
        name for name in added if re.search("RANK|WORLD_SIZE|ROLE|MASTER|TORCHELASTIC", name)
    } & seen.keys() == set()
    assert seen["LOCAL_SCRATCH"] == "/scratch"


def test_agents_requests_are_as_patient_as_configured(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy's command line passes rollout.request_timeout and rollout.request_retries to the proxy's engine."""
    planned, given = list[Planned](), {}

    class Recorder:
        def __init__(self, addresses: list[str], **options: object) -> None:
            given.update(options)
            raise ValueError("that is all")

    def start(self: Fleet, process: Planned) -> Child:
        planned.append(process)
        return Child(process.name, "", tmp_path, None)  # type: ignore[arg-type]

    monkeypatch.setattr(Fleet, "start", start)
    monkeypatch.setattr(Child, "wait_ready", lambda child: child.url)
    monkeypatch.setattr(proxy, "ScheduledEngine", Recorder)
    words = [
        "rollout.request_timeout=7",
        "rollout.request_retries=5",
        "rollout.server_key=the server's",
        f"tokenizer_path={tiny_model_dir}",
    ]
    start_proxies(config("DIR", *words), Fleet(tmp_path), ["http://up"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(planned[0].keys)))
    assert proxy.main([*planned[0].command[4:], "--port", "0"]) == 2
    patience = {"request_timeout": 7.0, "request_retries": 5}
    assert given == {**patience, "key": "the server's", "schedule": "runs/gsm8k/auto/schedule.jsonl", "replay": ""}


def test_a_leash_ends_all_that_the_command_started(tmp_path: Path) -> None:
    """When the pipe from the parent closes, run/leash.py ends its command and the command's children, even if the
    command ignores SIGTERM."""
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
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True) as leash:
        assert leash.wait(timeout=60) == 7


def test_one_of_several_servers_may_die(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If one of two servers dies, the log shows its last output. If the second server dies too, the run ends."""
    fleet = Fleet(tmp_path)
    speak = "import sys; print('my last words', flush=True); sys.stdin.read()"
    first, second = (fleet.start(Planned(f"server-{k}", python(speak))) for k in (0, 1))
    deaths: list[ProcessDied] = []
    told = threading.Event()
    fleet.watch([deaths.append, lambda _: told.set()])
    first.process.stdin.close()  # type: ignore[union-attr]
    first.process.wait(timeout=30)
    fleet.raise_death(ValueError("of an episode whose server died: another one will do"))
    deadline = time.monotonic() + 30
    while "continues with 1" not in caplog.text:  # logged by the thread that watches the server
        assert not told.wait(0.01)
        assert time.monotonic() < deadline
    second.process.stdin.close()  # type: ignore[union-attr]
    assert told.wait(30)
    assert "server-1 ended with code 0" in str(deaths[0])
    assert [r for r in caplog.messages if "server-0" in r and "my last words" in r and "continues with 1" in r]
    with pytest.raises(ProcessDied, match="server-1"):
        fleet.raise_death(ValueError("something else"))
    fleet.stop()


@pytest.mark.runs
def test_a_run_outlives_one_of_its_two_servers(tmp_path: Path) -> None:
    """If one of two servers is killed after the first step, the run reports the death and continues to its last
    step."""
    process, pids = start_and_hold(tmp_path, *SMALL_GUESS, "server.count=2", "max_steps=6")
    os.kill(pids["inference.tiny.server"], signal.SIGKILL)
    process.send_signal(signal.SIGCONT)
    output = rest_of(process, 200)
    assert process.returncode == 0, output[-3000:]
    assert "ended with code -9" in output
    assert "continues with 1 inference servers" in output
    assert len((tmp_path / "e/t/metrics.jsonl").read_text().splitlines()) == 6
    assert_gone(pids)
