"""Tests of the plan: which processes a run plans, and which configurations a run refuses.

The plan is a pure function of the configuration and the list of GPUs, so these tests need no GPUs.
"""

import socket
import subprocess
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from conftest import ROOT, free_port
from runs import command

from run.keys import TrainConfig
from run.launch import Planned
from run.load import ConfigError, load
from run.memory import check_memory
from run.plan import (
    check_addresses,
    check_sglang,
    check_update_mode,
    choose_update_mode,
    plan_servers,
)


def config(model: Path | str = "DIR", *words: str) -> TrainConfig:
    """Return the GSM8K recipe's configuration with this model and these key=value words."""
    return load(["--config", str(ROOT / "configs/gsm8k.yaml"), f"model_path={model}", *words])


def gpus_of(gpus: int, ranks: int, *words: str) -> list[list[str]]:
    """Return the GPUs of each planned server on a machine with this number of GPUs and ranks."""
    plan = plan_servers(
        config("DIR", "server.backend=tiny", *words), [str(k) for k in range(gpus)], ranks
    )
    return [process.gpus for process in plan]


SGLANG = [
    "server.backend=sglang",
    "server.command=sglang",
]  # the small server cannot use several GPUs


# Assignment of GPUs to processes


@pytest.mark.parametrize(
    ("gpus", "ranks", "words", "expected"),
    [
        (0, 1, [], [[]]),
        (0, 1, ["server.count=2"], [[], []]),
        (1, 1, [], [["0"]]),  # servers and trainer share the only GPU
        (2, 1, [], [["1"]]),
        (8, 4, [*SGLANG, "server.count=2", "server.tp_size=2"], [["4", "5"], ["6", "7"]]),
        (8, 4, [*SGLANG, "server.count=1", "server.tp_size=2"], [["6", "7"]]),
        (
            8,
            8,
            [*SGLANG, "server.count=4", "server.tp_size=2"],
            [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]],
        ),
        (8, 2, ["server.count=2", "server.colocate=true"], [["0"], ["1"]]),
        (1, 1, ["server.count=2"], [["0"], ["0"]]),
        (8, 8, ["rollout.server_addrs=[http://up]", "server.backend=auto"], []),
    ],
)
def test_gpus_are_split_or_shared(
    gpus: int, ranks: int, words: list[str], expected: list[list[str]]
) -> None:
    """Trainers get the first GPUs and servers get the last GPUs. If there are too few GPUs, trainers and servers share
    the GPUs."""
    assert gpus_of(gpus, ranks, *words) == expected


@pytest.mark.parametrize(
    ("gpus", "ranks", "words"),
    [(2, 1, ["server.tp_size=4"]), (4, 3, ["server.tp_size=2", "server.colocate=false"])],
)
def test_too_few_gpus_are_refused(gpus: int, ranks: int, words: list[str]) -> None:
    """If servers and ranks do not fit on the GPUs, planning raises an error."""
    with pytest.raises(ConfigError, match="do not fit on"):
        gpus_of(gpus, ranks, *words)


@pytest.mark.parametrize("words", [[], ["rollout.server_addrs=[http://up]", "server.backend=auto"]])
def test_more_ranks_than_gpus_are_refused(words: list[str]) -> None:
    """Each rank needs a GPU of its own. Four ranks on two GPUs are refused, even if the servers were started before the
    run."""
    with pytest.raises(
        ConfigError, match=r"4 trainers .* need one GPU each, but there are 2: .*--nproc-per-node=2"
    ):
        gpus_of(2, 4, *words)


def test_the_small_server_refuses_several_gpus() -> None:
    """With the small server, server.tp_size above 1 is an error, because the small server would ignore the key."""
    with pytest.raises(ConfigError, match=r"server.tp_size has no effect on the small server"):
        plan_servers(load(["server.tp_size=2", "server.backend=tiny"]), [], ranks=1)


def test_the_command_of_sglang() -> None:
    """SGLang's command begins with run/leash.py and sets version 0 and a share of the GPU memory. The arguments in
    server.args are at the end of SGLang's command."""
    given = [
        "server.backend=sglang",
        "server.command='PY -m it'",
        "server.args=[--tool-call-parser,qwen]",
    ]
    [split] = plan_servers(config("DIR", *given), ["0", "1"], 1)
    text = " ".join(split.command)
    assert "run/leash.py --api-key PY -m it --model-path DIR --weight-version 0" in text
    assert "--mem-fraction-static 0.85" in text
    assert text.endswith("--tool-call-parser qwen")
    assert "--dtype bfloat16" in text
    assert split.variables["SGLANG_LOGPROB_CHUNK_SIZE"] == "256"
    assert "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK" not in split.variables
    [shared] = plan_servers(config("DIR", *given), ["0"], 1)
    assert "--mem-fraction-static 0.6" in " ".join(shared.command)


def test_a_server_may_share_only_some_of_its_gpus() -> None:
    """If the trainer uses one of a server's two GPUs, the server's GPUs have different amounts of free memory. SGLang
    0.5.23 exits if its GPUs differ in free memory (srt/distributed/bootstrap.py). For this server, the plan sets the
    environment variable that turns this check off."""
    [server] = plan_servers(config("DIR", *SGLANG, "server.tp_size=2"), ["0", "1"], 1)
    assert server.gpus == ["0", "1"]
    assert server.variables["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "0"


def test_a_server_that_releases_its_memory() -> None:
    """With server.release_memory, SGLang gets the option --enable-memory-saver.

    The key server.release_memory cannot be combined with rollout.pause_mode=in_place, because a server that is paused
    in this mode keeps its KV cache. The key server.release_memory cannot be combined with server.max_restarts, because
    a restarted server could need memory that the trainer is using. If no server shares a GPU with the trainer,
    server.release_memory is refused, because the trainer cannot use the memory that the server releases.
    """
    given = ["server.backend=sglang", "server.command=sglang", "server.release_memory=true"]
    [process] = plan_servers(config("DIR", *given), ["0"], 1)
    assert "--enable-memory-saver" in process.command
    with pytest.raises(ConfigError, match="only costs time if no server shares a GPU"):
        plan_servers(config("DIR", *given), ["0", "1"], 1)
    for word, need in (
        ("rollout.pause_mode=in_place", "retract"),
        ("server.max_restarts=2", "release_memory=false"),
    ):
        with pytest.raises(ConfigError, match=need):
            config("DIR", *given, word)


def test_sglang_on_a_gpu_computes_float32_logits() -> None:
    """On a GPU, SGLang gets --enable-fp32-lm-head, because the trainer computes float32 logits on a GPU. SGLang does
    not get --enable-fp32-lm-head on a CPU or with server.fp32_head=false."""
    given = ["server.backend=sglang", "server.command=sglang"]
    for gpus, words, has_flag in (
        (["0"], [], True),
        (["0"], ["server.fp32_head=false"], False),
        ([], [], False),
    ):
        [process] = plan_servers(config("DIR", *given, *words), gpus, 1)
        assert ("--enable-fp32-lm-head" in process.command) == has_flag


def test_the_recipe_for_ones_own_model_fits_gpus() -> None:
    """configs/own.yaml sets the same answer length and the same server keys as configs/gsm8k.yaml, and turns on
    gradient checkpointing. Both recipes raise server.max_total_tokens, because with the default of 16,384 a server
    decodes only about 14 answers of the maximum length at a time."""
    own = load(
        ["--config", "own", "model_path=DIR", "train_dataset.path=DATA", "workflow=MODULE.AGENT"]
    )
    assert own.gconfig.max_new_tokens == config().gconfig.max_new_tokens
    assert own.server == config().server
    assert own.actor.gradient_checkpointing


# Refused configurations


def make_python(folder: Path, nccl: str) -> str:
    """Write a program that the tests use instead of the server's Python, and return the program's path. The program
    prints the NCCL version `nccl`."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho '{nccl}'\n")
    path.chmod(0o755)
    return str(path)


SGLANG_WORDS = ("server.backend=sglang", "server.command='PY -m sglang.launch_server'")


@pytest.mark.parametrize(
    ("gpus", "ranks", "words", "says"),
    [
        (
            1,
            1,
            ["weight_update.mode=distributed"],
            "share: set weight_update.mode=tensor, or server.colocate=false",
        ),
        (
            2,
            2,
            ["weight_update.mode=distributed", "server.count=2"],
            "share: set weight_update.mode=disk",
        ),
        (
            2,
            1,
            ["weight_update.mode=tensor"],
            "server-0 does not use GPU 0, as rank 0 does: .*mode=distributed",
        ),
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
        # The small server uses gloo instead of NCCL.
        (
            1,
            1,
            ["weight_update.mode=distributed", "server.backend=tiny", "server.command=''"],
            None,
        ),
        (0, 1, ["weight_update.mode=distributed"], None),
    ],
)
def test_a_mode_of_the_update_that_the_gpus_rule_out_is_refused(
    gpus: int,
    ranks: int,
    words: list[str],
    says: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The update mode distributed is refused if two processes share a GPU, because NCCL does not support shared GPUs.
    The mode tensor is refused if a server does not use rank 0's GPU. If check_update_mode refuses an update mode, the
    error suggests an update mode that works."""
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    names, given = (
        [str(k) for k in range(gpus)],
        config("DIR", *SGLANG_WORDS[: 2 if gpus else 0], *words),
    )
    given.server.command = given.server.command.replace("PY", make_python(tmp_path, "(2, 27, 5)"))
    with pytest.raises(ConfigError, match=says) if says else nullcontext():
        check_update_mode(given, plan_servers(given, names, ranks), names)


@pytest.mark.parametrize("mode", ["tensor", "disk"])
def test_a_server_cannot_read_expandable_segments(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mode tensor, a server opens memory of the trainer. If the allocator uses expandable segments, the kernel often
    forbids this, because the server is a child process of the trainer. With such an allocator, the plan refuses the
    mode tensor."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    given = config("DIR", *SGLANG, f"weight_update.mode={mode}")
    refused = pytest.raises(ConfigError, match="unset PYTORCH_CUDA_ALLOC_CONF")
    with refused if mode == "tensor" else nullcontext():
        check_update_mode(given, plan_servers(given, ["0"], 1), ["0"])


@pytest.mark.parametrize(
    ("server", "words", "works"),
    [
        ("http://10.0.0.5:30000", [], False),
        ("http://10.0.0.5:30000", ["weight_update.address=localhost"], False),
        ("http://10.0.0.5:30000", ["weight_update.address=10.0.0.7"], True),
        ("http://127.0.0.1:30000", [], True),
    ],
)
def test_servers_elsewhere_need_the_address_of_the_trainer(
    server: str, words: list[str], works: bool
) -> None:
    """In the update mode distributed, a server on another machine connects to weight_update.address. If a server is on
    another machine, the plan refuses a loopback address as weight_update.address, because the server would connect to
    itself."""
    given = config(
        "DIR", "weight_update.mode=distributed", f"rollout.server_addrs=['{server}']", *words
    )
    refused = pytest.raises(
        ConfigError, match=r"10.0.0.5:30000 would connect to itself: set weight_update.address to"
    )
    with nullcontext() if works else refused:
        check_update_mode(given, [], [])


@pytest.mark.parametrize(
    ("gpus", "ranks", "words", "mode"),
    [
        (1, 1, [], "tensor"),  # trainer and server share the GPU
        (1, 1, ["server.count=2"], "tensor"),
        (2, 1, [], "distributed"),
        (8, 4, ["server.count=2", "server.tp_size=2"], "distributed"),
        (
            8,
            4,
            ["server.count=2", "server.colocate=true"],
            "disk",
        ),  # one server uses GPU 0, and the other uses GPU 1
        (8, 8, ["server.count=2"], "disk"),
        (1, 1, ["weight_update.path=/dev/shm/new"], "disk"),
        (2, 1, ["server.command=another"], "disk"),
        (1, 1, ["server.backend=tiny"], "disk"),
        (0, 1, ["server.backend=auto"], "disk"),
        (1, 1, ["weight_update.mode=disk"], "disk"),
        (1, 1, ["rollout.server_addrs=[http://up]", "server.backend=auto"], "disk"),
    ],
)
def test_the_plan_chooses_how_new_weights_are_sent(
    gpus: int, ranks: int, words: list[str], mode: str
) -> None:
    """If every server uses the trainer's first GPU, the plan chooses mode tensor. If no server shares a GPU with the
    trainer, the plan chooses mode distributed. In every other case, for example on a CPU, the plan chooses mode disk.
    `check_update_mode` accepts every mode that the plan chooses."""
    names = [str(k) for k in range(gpus)]
    given = config("DIR", "dry_run=true", f"gpus={max(gpus, 1)}", "server.backend=sglang", *words)
    planned = plan_servers(given, names, ranks)
    given.weight_update.mode, _ = choose_update_mode(given, planned, names)
    assert given.weight_update.mode == mode
    check_update_mode(given, planned, names)


def test_another_version_of_nccl_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server runs in another Python environment with another version of NCCL, the update mode distributed is
    refused, and the mode disk is accepted."""
    python = make_python(tmp_path, "(2, 30, 1)")
    for version in ((2, 30, 1), (2, 27, 5)):
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda version=version: version)
        for mode in ("disk", "distributed"):
            command = f"server.command='{python} -m sglang.launch_server'"
            given = config("DIR", "server.backend=sglang", command, f"weight_update.mode={mode}")
            refused = pytest.raises(
                ConfigError, match=r"NCCL \(2, 27, 5\) here, \(2, 30, 1\) in the server"
            )
            with refused if mode == "distributed" and version[1] == 27 else nullcontext():
                check_update_mode(given, plan_servers(given, ["0", "1"], 1), ["0", "1"])


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, requires: str) -> None:
    """Write the metadata of an sglang package that requires `requires` into `folder`, and put `folder` on sys.path."""
    info = folder / "sglang-0.5.23.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\nRequires-Dist: {requires}\n"
    )
    monkeypatch.syspath_prepend(folder)


def test_an_sglang_for_another_torch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If SGLang needs another version of torch than the installed version, an error names both versions."""
    install(tmp_path, monkeypatch, "torch==1.0.1")
    with pytest.raises(
        ConfigError,
        match=r"sglang 0.5.23 was built for torch 1.0.1, but torch .* pip install torch==1.0.1",
    ):
        check_sglang()


def test_an_sglang_for_this_torch_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An SGLang that was built for the installed torch is accepted."""
    install(tmp_path, monkeypatch, f"torch=={torch.__version__.partition('+')[0]}")
    check_sglang()


def test_without_sglang_the_ways_to_it_are_named() -> None:
    """If SGLang is not installed, the error message says how to install SGLang and how to use another installation or a
    running server."""
    with pytest.raises(
        ConfigError,
        match=r"not installed here: pip install .* server.command=.* rollout.server_addrs",
    ):
        check_sglang()


def test_a_port_that_is_taken_is_refused() -> None:
    """A port in use is reported before any process starts."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"server.port: {port} cannot be used .*in use"):
            check_addresses(config(), [Planned("server", [], [], port)])


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "no-scheme:1", "http://nowhere.invalid:1"])
def test_a_server_that_does_not_answer_is_refused(url: str) -> None:
    """Each address in rollout.server_addrs must answer before the run begins."""
    with pytest.raises(ConfigError, match=f"rollout.server_addrs: {url} cannot be reached"):
        check_addresses(
            config("DIR", f"rollout.server_addrs=['{url}']", "rollout.server_key=k"), []
        )


def test_a_server_elsewhere_needs_a_key() -> None:
    """If the address of a server is on another machine, rollout.server_key must be set, because other people may be
    able to reach this server."""
    with pytest.raises(ConfigError, match=r"is not this machine: set rollout.server_key"):
        check_addresses(config("DIR", "rollout.server_addrs=['http://gpu:1']"), [])


@pytest.mark.parametrize(
    ("routes", "end", "fits"),
    [
        (set(), "", False),
        ({"/health"}, "", False),
        ({"/model_info"}, "", True),
        ({"/workers"}, "/", True),
    ],
)
def test_a_server_of_another_kind_is_refused(routes: set[str], end: str, fits: bool) -> None:
    """A URL in rollout.server_addrs is refused if the server at this URL is not an inference server. A router's URL in
    rollout.server_addrs is accepted, because a router answers GET /workers."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in routes else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}{end}"
        refused = pytest.raises(
            ConfigError,
            match=f"server_addrs: {url} is no inference server of this key .status 404.",
        )
        try:
            with nullcontext() if fits else refused:
                check_addresses(config("DIR", f"rollout.server_addrs=[{url}]"), [])
        finally:
            server.shutdown()


def test_too_little_memory_says_what_to_turn_down() -> None:
    """If the memory is too small, the error message lists what to reduce, and the key server.max_total_tokens comes
    first."""
    needs = [(Planned("rank 0", [], ["0"]), 30.0), (Planned("server-0", [], ["0", "1"]), 20.0)]
    check_memory(needs, ["0", "1"], 50.0)
    with pytest.raises(
        ConfigError, match=r"50 GiB are needed \(rank 0 30.0, server-0 20.0\) and GPU 0 has 49"
    ) as caught:
        check_memory(needs, ["0", "1"], 49.0)
    order = [
        "server.max_total_tokens",
        "actor.mb_tokens",
        "server.count",
        "nproc-per-node",
        "smaller model",
    ]
    places = [str(caught.value).index(word) for word in order]
    assert places == sorted(places)


def test_dry_run_starts_nothing(tmp_path: Path, tiny_model_dir: Path) -> None:
    """With --dry-run train.py prints processes, ports and memory, starts no process and writes no file."""
    given = [
        f"model={tiny_model_dir}",
        "data=tests/data/gsm8k.jsonl",
        f"server.port={(port := free_port())}",
    ]
    whole = command(
        tmp_path,
        "--config",
        "configs/gsm8k.yaml",
        "--dry-run",
        *given,
        "server.max_total_tokens=4096",
    )
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
