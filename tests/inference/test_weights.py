"""New weights reach every server completely or not at all, and no version is deleted while a server still reads
it."""

import asyncio
import base64
import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch
from conftest import ROOT, free_port, make_byte_model, rest_of, wait_until_up
from runs import SMALL_GUESS, start_and_hold
from safetensors.torch import load_file
from torch.multiprocessing import reductions
from trainers import make_family
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from engine import RemoteInfEngine
from inference import group, weights
from inference.io_struct import GenerationHyperparameters, ModelRequest
from inference.weights import WeightUpdateMeta, named_buckets, send, write_checkpoint
from train import TrainingLoop
from training.actor import FSDPEngine, FSDPPPOActor
from training.config import PPOActorConfig


@pytest.fixture
def state(tiny_model_dir: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir).state_dict()


class Servers:
    """A fake of inference/servers.py::Servers. The method `post_all` records each call and the entries of the folder
    `root` at the time of the call."""

    def __init__(self, root: Path, error: str | None = None) -> None:
        self.root, self.error = root, error
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.on_disk: list[set[str]] = []

    def post_all(
        self, path: str, body: dict[str, Any], timeout: float = 0.0
    ) -> list[dict[str, Any]]:
        self.asked.append((path, body))
        self.on_disk.append({entry.name for entry in self.root.iterdir()})
        if self.error:
            raise RuntimeError(self.error)
        return [{"success": True}]


def test_a_checkpoint_is_a_hugging_face_directory(
    state: dict, tiny_model_dir: Path, tmp_path: Path
):
    """`from_pretrained` loads what write_checkpoint wrote: the same tensors, names and tokenizer."""
    changed = {name: tensor + 1 for name, tensor in state.items()}
    written = write_checkpoint(changed, tiny_model_dir, tmp_path / "deep" / "v3")
    loaded = AutoModelForCausalLM.from_pretrained(written).state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], changed[name]) for name in changed)
    text = "<|im_start|>Hi"
    source, copy = (AutoTokenizer.from_pretrained(path) for path in (tiny_model_dir, written))
    assert copy(text) == source(text)
    assert copy.chat_template == source.chat_template


def test_own_dtype_and_layout(tiny_model_dir: Path, tmp_path: Path):
    """A checkpoint file holds each tensor with its dtype and its values, even if the tensor is not contiguous in
    memory."""
    half = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    tensors = {"half": half, "strided": torch.arange(6.0).reshape(2, 3).T}
    written = load_file(
        write_checkpoint(tensors, tiny_model_dir, tmp_path / "v0") / "model.safetensors"
    )
    assert set(written) == {"half", "strided"}
    assert written["half"].dtype == torch.bfloat16
    assert torch.equal(written["half"], half)
    assert torch.equal(written["strided"], tensors["strided"])


@pytest.mark.parametrize("step", ["tensors", "replace"])
def test_a_crash_half_way_is_never_seen(
    state: dict, tiny_model_dir: Path, tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
):
    """If a crash interrupts the writing of version 1, the folder v1 does not exist. The next write deletes the
    unfinished folder that the crash has left."""

    def crash(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(
            *{"tensors": (safetensors.torch, "save_file"), "replace": (os, "replace")}[step], crash
        )
        with pytest.raises(KeyboardInterrupt):
            write_checkpoint(state, tiny_model_dir, tmp_path / "v1")
    assert not (tmp_path / "v1").exists()
    assert len(list(tmp_path.iterdir())) == 1
    write_checkpoint(state, tiny_model_dir, tmp_path / "v2")
    assert [entry.name for entry in tmp_path.iterdir()] == ["v2"]


def test_the_same_version_may_be_written_again(state: dict, tiny_model_dir: Path, tmp_path: Path):
    """After a recovery, a run may write its last version a second time, and the new files replace the old files."""
    write_checkpoint(state, tiny_model_dir, tmp_path / "v1")
    write_checkpoint({n: t * 0 for n, t in state.items()}, tiny_model_dir, tmp_path / "v1")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "v1")
    assert not any(parameter.any() for parameter in loaded.parameters())


def test_the_old_version_outlives_the_loading(tmp_path: Path):
    """Version 1 is deleted only after every server has loaded version 2. An update deletes nothing in the folder except
    old versions."""
    for name in ("v1", "v2", "vocabulary", "notes"):
        (tmp_path / name).mkdir()
    servers = Servers(tmp_path)
    meta = WeightUpdateMeta(path=str(tmp_path)).with_version(2)
    send(meta, servers.post_all)
    disk = {"model_path": str(tmp_path / "v2"), "abort_all_requests": False, "flush_cache": True}
    disk["weight_version"] = "2"
    label = {"abort_all_requests": False}
    assert servers.asked == [
        ("/update_weight_version", label | {"new_version": "2-incomplete"}),
        ("/update_weights_from_disk", disk),
    ]
    assert "v1" in servers.on_disk[1]
    assert {entry.name for entry in tmp_path.iterdir()} == {"v2", "vocabulary", "notes"}


def test_nothing_is_deleted_when_a_server_fails(tmp_path: Path):
    """If a server fails to load the new version, the files of the old and the new version stay on disk, because a
    server may still read these files."""
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
    with pytest.raises(RuntimeError, match="b is gone"):
        send(
            WeightUpdateMeta(path=str(tmp_path), version=2), Servers(tmp_path, "b is gone").post_all
        )
    assert {entry.name for entry in tmp_path.iterdir()} == {"v1", "v2"}


@pytest.mark.parametrize("status", [200, 400])
def test_the_failing_server_is_named(tmp_path: Path, status: int):
    """If one of two servers cannot load the weights, the error contains the address and the message of the server that
    failed."""
    (tmp_path / "v1").mkdir()

    def serve(request: httpx.Request) -> httpx.Response:
        if request.url.host == "good":
            return httpx.Response(200, json={"success": True, "message": "ok"})
        return httpx.Response(status, json={"success": False, "message": "no such tensor: lm_head"})

    engine = RemoteInfEngine(["http://good", "http://bad"], transport=httpx.MockTransport(serve))
    with pytest.raises(RuntimeError, match=r"http://bad.*no such tensor: lm_head") as caught:
        engine.update_weights(WeightUpdateMeta(path=str(tmp_path), version=1))
    assert "good" not in str(caught.value)


def test_what_is_missing_is_said(tmp_path: Path):
    """An unknown mode, missing tensors or a missing directory raises an error before any request is sent to a
    server."""
    servers = Servers(tmp_path)
    with pytest.raises(ValueError, match=r"'post', but the modes are: disk, distributed, tensor"):
        send(WeightUpdateMeta(mode="post"), servers.post_all)
    with pytest.raises(ValueError, match=r"mode=tensor sends tensors, but none were given"):
        send(WeightUpdateMeta(mode="tensor"), servers.post_all)
    with pytest.raises(FileNotFoundError, match="write_checkpoint comes before"):
        send(WeightUpdateMeta(path=str(tmp_path), version=9), servers.post_all)
    assert servers.asked == []


# Buckets


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "qwen3_moe", "mixtral", "qwen3_next"])
def test_names_and_numbers_are_those_of_the_checkpoint(tmp_path: Path, name: str):
    """Weights are sent and saved under the names that they have inside the checkpoint files, although transformers
    renames and fuses some weights in memory.
    """
    path = make_family(tmp_path / "model", name)
    source = load_file(path / "model.safetensors")
    engine = FSDPEngine(PPOActorConfig(), path)
    engine.create_process_group()
    engine.initialize()
    engine.save(tmp_path / "saved")
    sent = [
        (name, tensor.clone())
        for bucket in named_buckets(engine.model, torch.float32, 0.01)
        for name, tensor in bucket
    ]
    engine.destroy()
    assert sorted(name for name, _ in sent) == sorted(source)
    for written in (load_file(tmp_path / "saved" / "model.safetensors"), dict(sent)):
        assert written.keys() == source.keys()
        assert all(torch.equal(written[name], source[name]) for name in source)


def test_buckets_hold_the_model_once(tmp_path: Path):
    """Every weight is in exactly one bucket, and a bucket of several tensors never exceeds the size limit. Each bucket
    is freed before the next bucket is made."""
    config = Qwen3Config(
        vocab_size=1000,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        head_dim=16,
    )
    config.tie_word_embeddings = True
    model = AutoModelForCausalLM.from_config(config)
    limit = (
        20_000 / 2**20
    )  # a bucket has at most 20,000 bytes, except the bucket of the embedding (64,000 bytes)
    sent: list[tuple[str, torch.Tensor]] = []
    lent: list[weakref.ref] = []
    buckets = 0
    for bucket in named_buckets(model, torch.bfloat16, limit):
        assert all(tensor() is None for tensor in lent)
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)
        assert 0 < size <= 20_000 or len(bucket) == 1
        sent += [(name, tensor.clone()) for name, tensor in bucket]
        lent += [weakref.ref(pair[1]) for pair in bucket]
        buckets += 1
    assert buckets > 3
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    assert [name for name, _ in sent] == list(wanted)
    for name, tensor in sent:
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, wanted[name].bfloat16())


@pytest.mark.parametrize(
    ("version", "wanted"), [("0.5.19", False), ("0.5.23.post1", True), ("0.6.0", True)]
)
def test_sessions_where_the_version_has_them(version: str, wanted: bool):
    """An update sends /begin_weight_update and /end_weight_update only to SGLang 0.5.20 and later."""
    asked: list[str] = []

    def post_all(path: str, body: Any = None, timeout: float = 0.0) -> list[dict[str, Any]]:
        asked.append(path)
        return [{"version": version, "tp_size": 2, "device": "cpu"}]

    send(WeightUpdateMeta(mode="tensor", version=4), post_all, iter([[("a", torch.ones(2))]]))
    session = ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]
    inner = session if wanted else session[1:2]
    assert asked == ["/update_weight_version", "/server_info", *inner, "/update_weight_version"]


def test_a_server_that_refuses_the_group_is_named():
    """If a server refuses to join the process group for weight updates, the error contains the server's message."""

    def post_all(path: str, body: Any = None, timeout: float = 0.0) -> list[dict[str, Any]]:
        if path == "/init_weights_update_group":
            raise RuntimeError("http://b answered 400: no group")
        return [{"version": "0.5.23", "tp_size": 1, "device": "cpu"}]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "BUCKET_TIMEOUT", 1.0)
        with pytest.raises(RuntimeError, match="http://b answered 400: no group"):
            send(WeightUpdateMeta(mode="distributed", version=1), post_all, iter(()))


class Watched:
    """A fake of the engine to which train.py sends new weights. Each method records which directories exist when it is
    called."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, list[tuple[str, list[str]]]()

    def record(self, call: str) -> None:
        self.calls.append((call, sorted(path.name for path in self.folder.glob("*"))))

    def pause(self) -> None:
        self.record("pause")

    def update_weights(self, meta: WeightUpdateMeta, buckets: Any) -> None:
        self.record("update_weights")

    def set_version(self, version: int) -> None: ...

    def resume(self) -> None:
        self.record("resume")


def test_files_are_written_in_the_servers_dtype_before_the_pause(
    tiny_model_dir: Path, tmp_path: Path
):
    """In mode `disk`, `push_weights` writes the new weights as bfloat16 files before it pauses the servers."""
    actor = FSDPPPOActor(PPOActorConfig(dtype="bfloat16"), tiny_model_dir)
    actor.create_process_group()
    actor.initialize(max_steps=1)
    rollout: Any = Watched(tmp_path)
    actor.connect_engine(rollout, WeightUpdateMeta(path=str(tmp_path)))
    run = SimpleNamespace(trace=SimpleNamespace(mark=lambda *_, **__: None))
    TrainingLoop.push_weights(SimpleNamespace(actor=actor, rollout=rollout, run=run), 3)  # type: ignore[arg-type]
    assert rollout.calls == [(call, ["v3"]) for call in ("pause", "update_weights", "resume")]
    assert actor.get_version() == 3
    source, written = (
        load_file(folder / "model.safetensors") for folder in (tiny_model_dir, tmp_path / "v3")
    )
    assert written.keys() == source.keys()
    assert all(torch.equal(written[name], source[name].bfloat16()) for name in source)
    size = sum(2 * tensor.numel() for tensor in source.values())
    assert size <= (tmp_path / "v3/model.safetensors").stat().st_size < 1.1 * size
    actor.destroy()


@pytest.mark.runs
def test_the_folder_of_new_weights_can_be_set(tmp_path: Path):
    """If weight_update.path is set, a run writes its new weights to a folder under this path, and deletes the folder
    when the run ends."""
    other = tmp_path / "memory/another-run"
    other.mkdir(parents=True)
    words = [*SMALL_GUESS, "max_steps=2", f"weight_update.path={tmp_path / 'memory'}"]
    held, _ = start_and_hold(tmp_path, *words)
    assert [path.name for path in (tmp_path / "memory/e/t").iterdir()] == ["v1"]
    held.send_signal(signal.SIGCONT)
    output = rest_of(held, 200)
    assert held.returncode == 0, output
    assert not (tmp_path / "memory/e/t").exists()
    assert not (tmp_path / "e/t/weights").exists()
    assert other.exists()


class Meeting:
    """A process group in which a collective operation waits until the trainer and every server have entered it, as in
    NCCL."""

    def __init__(self, servers: int) -> None:
        self.barrier = threading.Barrier(
            1 + servers, timeout=10
        )  # wait() raises an error if a group member is missing
        self.pool = ThreadPoolExecutor(servers)
        self.servers = servers
        self.done: list[
            str
        ] = []  # names of the collective operations that all members have entered

    def enter(self, name: str) -> None:
        if self.barrier.wait() == 0:  # wait() returns 0 in exactly one of the waiting threads
            self.done.append(name)

    # The trainer's side

    def join(self, *_: Any) -> "Meeting":
        self.enter("create")
        return self

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        self.enter("broadcast")
        return SimpleNamespace(wait=lambda: None)

    def shutdown(self) -> None:
        self.enter("destroy")

    # The servers' side

    def post_all(self, path: str, body: Any = None, timeout: float = 0.0) -> list[dict[str, Any]]:
        collectives = {
            "/init_weights_update_group": ["create"],
            "/update_weights_from_distributed": ["broadcast"]
            * len(body["names"] if "names" in (body or {}) else ()),
            "/destroy_weights_update_group": ["destroy"],
        }
        for name in collectives.get(path, []):
            list(self.pool.map(self.enter, [name] * self.servers))
        return [{"version": "0.5.23", "tp_size": 1, "device": "cpu"}] * self.servers


def test_collectives_that_block_until_every_side_has_entered(monkeypatch: pytest.MonkeyPatch):
    """The trainer and two servers enter each collective operation together: the creation of the process group, the
    broadcast of each tensor, and the end of the process group."""
    meeting = Meeting(servers=2)
    monkeypatch.setattr(weights, "join_group", meeting.join)
    buckets = [[("a", torch.ones(2)), ("b", torch.ones(3))], [("c", torch.ones(1))]]
    send(WeightUpdateMeta(mode="distributed", version=1), meeting.post_all, iter(buckets))
    assert meeting.done == ["create", "broadcast", "broadcast", "broadcast", "destroy"]
    meeting.pool.shutdown()


def test_handles_name_the_gpu_by_its_uuid(monkeypatch: pytest.MonkeyPatch):
    """A handle of a tensor on a GPU contains the GPU's UUID, because the server may number the GPUs differently than
    the trainer does.

    If a server runs on a CPU, the trainer sends the server the bytes of the tensor instead of a handle.
    """
    arguments = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert arguments[6] == "storage_device"
    numbered = [5 if name == "storage_device" else name for name in arguments]
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(reductions, "reduce_tensor", lambda tensor: (Rebuilt, tuple(numbered)))
    names = {5: SimpleNamespace(uuid="GPU-5-uuid")}
    monkeypatch.setattr(torch.cuda, "get_device_properties", names.__getitem__)
    [(name, handle)] = pickle.loads(
        base64.b64decode(weights.serialise([("w", torch.ones(1))], "cuda"))
    )
    named = tuple("GPU-5-uuid" if argument == 5 else argument for argument in numbered)
    assert (name, handle.arguments) == ("w", named)
    [(name, tensor)] = pickle.loads(
        base64.b64decode(weights.serialise([("w", torch.ones(1))], "cpu"))
    )
    assert torch.equal(tensor, torch.ones(1))


class Rebuilt:
    """`test_handles_name_the_gpu_by_its_uuid` unpickles an object of this class in place of a tensor on a GPU."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


RANKS = """
import gc, sys, torch
from pathlib import Path
from training.actor import FSDPPPOActor
from engine import RemoteInfEngine
from training.config import PPOActorConfig
from inference.weights import WeightUpdateMeta

url, model_path, mode, bucket_mb, folder = sys.argv[1:]
torch.set_num_threads(1)
trainer = FSDPPPOActor(PPOActorConfig(), model_path)
trainer.create_process_group()
trainer.initialize(max_steps=1)
with torch.no_grad():
    for parameter in trainer.model.parameters():
        parameter.mul_(0.5)
engine = RemoteInfEngine([url]) if trainer.rank == 0 else None
meta = WeightUpdateMeta(mode=mode, bucket_mb=float(bucket_mb))
trainer.connect_engine(engine, meta)

def memory(key):
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(key))

for version in (1, 2):  # the first update also loads libraries and starts threads
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")  # reset the peak of memory use
    before = memory("VmRSS")
    if engine:
        engine.pause()
    trainer.update_weights(meta.with_version(version))
    if engine:
        engine.resume()
Path(folder, f"growth-{trainer.rank}").write_text(str(memory("VmHWM") - before))
trainer.destroy()
"""


@pytest.mark.runs
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_two_ranks_send_a_model_that_neither_holds(tmp_path: Path):
    """If two ranks send a model of 100 MiB in buckets of 8 MiB, no rank's memory grows by more than two buckets."""
    path = make_byte_model(tmp_path / "model", layers=16, width=512)
    (tmp_path / "ranks.py").write_text(RANKS)
    port = str(free_port())
    command = [
        sys.executable,
        "-m",
        "inference.tiny.server",
        "--model-path",
        str(path),
        "--port",
        port,
        "--exit-with-parent",
    ]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as server:
        url = f"http://127.0.0.1:{port}"
        wait_until_up(url, server)
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
        ]
        # With this value of MALLOC_MMAP_THRESHOLD_, glibc returns the memory of freed tensors to the system.
        environment = os.environ | {"PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "65536"}
        words = [str(tmp_path / "ranks.py"), url, str(path), "distributed", "8", str(tmp_path)]
        ranks = subprocess.run(
            [*torchrun, *words],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert ranks.returncode == 0, ranks.stderr[-3000:]
        growth = [float((tmp_path / f"growth-{rank}").read_text()) for rank in range(2)]
        assert max(growth) < 2 * 8, growth

        model = AutoModelForCausalLM.from_pretrained(path)
        size = sum(p.numel() * 4 for p in model.parameters()) / 2**20
        assert size > 90
        ids = [5, 6, 7, 8, 9]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
            scores = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, :-1], -1)
        expected = scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        engine = RemoteInfEngine([url])
        engine.initialize()
        assert engine.score(ids)[0][1:] == pytest.approx(expected, abs=1e-4)
        assert httpx.get(url + "/model_info").json()["weight_version"] == "2"


def test_a_real_server_serves_what_was_written(
    tiny_server: str, state: dict, tiny_model_dir: Path, tmp_path: Path
):
    """After an update a real server generates with the new weights and reports the new version."""
    before = RemoteInfEngine([tiny_server]).score([5, 6, 7, 8])
    meta = WeightUpdateMeta(path=str(tmp_path))
    tokens = []
    for version, change in (
        (1, 0.5),
        (0, 1.0),
    ):  # the update to version 0 restores the original weights
        scaled = {name: tensor * change for name, tensor in state.items()}
        engine = RemoteInfEngine([tiny_server])  # an engine refuses a version below its own
        engine.initialize()
        engine.pause()
        write_checkpoint(scaled, tiny_model_dir, meta.with_version(version).directory)
        engine.update_weights(meta.with_version(version))
        engine.set_version(version)
        engine.resume()
        request = ModelRequest([5, 6], gconfig=GenerationHyperparameters(max_new_tokens=2))
        response = asyncio.run(engine.agenerate(request))
        tokens.append((response.output_versions[0], engine.score([5, 6, 7, 8]) == before))
        engine.destroy()
    assert tokens == [(1, False), (0, True)]
