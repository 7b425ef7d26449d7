"""New weights reach every server wholly or not at all, and no version is deleted while a server may
read it."""

import os
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from trainers import make_family
from transformers import AutoModelForCausalLM, AutoTokenizer

from inference import weights
from inference.weights import WeightUpdateMeta, named_buckets, send, write_checkpoint
from run.config import PPOActorConfig
from training.actor import FSDPEngine, FSDPPPOActor


@pytest.fixture
def state(tiny_model_dir: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir).state_dict()


# The folder


def test_a_checkpoint_is_a_hugging_face_folder(state: dict, tiny_model_dir: Path, tmp_path: Path):
    """`from_pretrained` reads the tensors, names and tokenizer that write_checkpoint wrote."""
    changed = {name: tensor + 1 for name, tensor in state.items()}
    changed["lm_head.weight"] = changed["lm_head.weight"].t().contiguous().t()  # another layout
    written = write_checkpoint(changed, tiny_model_dir, tmp_path / "deep" / "v3")
    loaded = AutoModelForCausalLM.from_pretrained(written).state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], changed[name]) for name in changed)
    text = "<|im_start|>Hi"
    source, copy = (AutoTokenizer.from_pretrained(path) for path in (tiny_model_dir, written))
    assert copy(text) == source(text)
    assert copy.chat_template == source.chat_template


@pytest.mark.parametrize("step", ["tensors", "replace"])
def test_a_crash_half_way_is_never_seen(
    state: dict, tiny_model_dir: Path, tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
):
    """There is no v1 until it is complete, and the next write deletes what the crash left."""

    def crash(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    place = {"tensors": (safetensors.torch, "save_file"), "replace": (os, "replace")}[step]
    with monkeypatch.context() as patch:
        patch.setattr(*place, crash)
        with pytest.raises(KeyboardInterrupt):
            write_checkpoint(state, tiny_model_dir, tmp_path / "v1")
    assert not (tmp_path / "v1").exists()
    assert len(list(tmp_path.iterdir())) == 1
    write_checkpoint(state, tiny_model_dir, tmp_path / "v1")
    write_checkpoint({n: t * 0 for n, t in state.items()}, tiny_model_dir, tmp_path / "v1")
    assert [entry.name for entry in tmp_path.iterdir()] == ["v1"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "v1")
    assert not any(parameter.any() for parameter in loaded.parameters())  # the second replaced it


def test_the_old_version_outlives_the_loading(tmp_path: Path):
    """Version 1 is deleted only when every server has version 2, because a server that failed may
    still be reading either version. Nothing but old versions is deleted."""
    for name in ("v1", "v2", "vocabulary"):
        (tmp_path / name).mkdir()
    meta, on_disk = WeightUpdateMeta(path=str(tmp_path)).with_version(2), {"v2", "vocabulary"}
    asked: list[tuple[str, dict[str, Any]]] = []

    def post_all(path: str, body: dict[str, Any], timeout: float = 0.0) -> list[dict]:
        assert {entry.name for entry in tmp_path.iterdir()} == {"v1", *on_disk}
        asked.append((path, body))
        if len(asked) == 2:
            raise RuntimeError("b is gone")
        return []

    with pytest.raises(RuntimeError, match="b is gone"):
        send(meta, post_all)
    assert {entry.name for entry in tmp_path.iterdir()} == {"v1", *on_disk}
    send(meta, post_all)
    assert {entry.name for entry in tmp_path.iterdir()} == on_disk
    disk = {"model_path": str(tmp_path / "v2"), "abort_all_requests": False, "flush_cache": True}
    label = {"new_version": "2-incomplete", "abort_all_requests": False}
    update = [
        ("/update_weight_version", label),
        ("/update_weights_from_disk", disk | {"weight_version": "2"}),
    ]
    assert asked == update * 2


class Watched:
    """An engine that records which folders exist at each call."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, list[tuple[str, list[str]]]()

    def __getattr__(self, name: str) -> Any:
        found = sorted(path.name for path in self.folder.glob("*"))
        return lambda *_: self.calls.append((name, found))


def test_files_are_written_in_the_dtype_of_the_passes_before_the_pause(
    tiny_model_dir: Path, tmp_path: Path
):
    """In mode disk the servers generate while the trainer writes. On a CPU, bfloat16 is used only
    in products, so the files are float32."""
    from train import PPOTrainer

    actor = FSDPPPOActor(PPOActorConfig(dtype="bfloat16"), tiny_model_dir)
    actor.create_process_group()
    actor.initialize(max_steps=1)
    rollout: Any = Watched(tmp_path)
    meta = WeightUpdateMeta(path=str(tmp_path))
    actor.connect_engine(rollout, meta)
    trainer: Any = SimpleNamespace(run=SimpleNamespace(actor=actor, engine=rollout), meta=meta)
    PPOTrainer.push(trainer, 3)
    order = ("pause", "update_weights", "set_version", "resume")
    assert rollout.calls == [(call, ["v3"]) for call in order]
    assert actor.get_version() == 3
    folders = tiny_model_dir, tmp_path / "v3"
    source, written = (load_file(folder / "model.safetensors") for folder in folders)
    assert written.keys() == source.keys()
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    assert all(torch.equal(written[name], source[name].to(dtype)) for name in source)
    actor.destroy()


# Buckets


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "qwen3_moe", "mixtral", "qwen3_next"])
def test_names_and_numbers_are_those_of_the_checkpoint(tmp_path: Path, name: str):
    """Weights are sent and saved under the names of the checkpoint files, although transformers
    renames and fuses some of them in memory. Buckets hold each weight once, and exceed the limit by
    at most one weight."""
    path = make_family(tmp_path / "model", name)
    source = load_file(path / "model.safetensors")
    engine = FSDPEngine(PPOActorConfig(), path)
    engine.create_process_group()
    engine.initialize()
    engine.save(tmp_path / "saved")
    sent: list[tuple[str, torch.Tensor]] = []
    lent: list[weakref.ref] = []
    most = 10_000 + max(4 * weight.numel() for weight in engine.model.parameters())
    for bucket in named_buckets(engine.model, torch.float32, 10_000 / 2**20):
        assert all(tensor() is None for tensor in lent), "a bucket is freed before the next"
        assert sum(4 * tensor.numel() for _, tensor in bucket) <= most
        sent += [(name, tensor.clone()) for name, tensor in bucket]
        lent += [weakref.ref(tensor) for _, tensor in bucket]
    engine.destroy()
    assert sorted(name for name, _ in sent) == sorted(source)
    for written in (load_file(tmp_path / "saved" / "model.safetensors"), dict(sent)):
        assert written.keys() == source.keys()
        assert all(torch.equal(written[name], source[name]) for name in source)


# Mode distributed


class Meeting:
    """A process group in which every collective operation waits, as in NCCL, until the trainer and
    the servers have entered it."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=10)  # wait() raises if one side is missing
        self.done: list[str] = []  # what both have entered
        self.asked: list[str] = []

    def enter(self, name: str) -> None:
        if self.barrier.wait() == 0:  # true in exactly one of the two threads
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
        self.asked.append(path)
        if path == "/init_weights_update_group":
            self.enter("create")
        elif path == "/update_weights_from_distributed":
            for _ in body["names"]:
                self.enter("broadcast")
        elif path == "/destroy_weights_update_group":
            self.enter("destroy")
        return [{"tp_size": 1, "device": "cpu"}] * 2


def test_collectives_that_block_until_every_side_has_entered(monkeypatch: pytest.MonkeyPatch):
    """Trainer and servers enter each collective operation together. The broadcasts happen between
    /begin_weight_update and /end_weight_update."""
    meeting = Meeting()
    monkeypatch.setattr(weights, "join_group", meeting.join)
    buckets = [[("a", torch.ones(2)), ("b", torch.ones(3))], [("c", torch.ones(1))]]
    send(WeightUpdateMeta(mode="distributed", version=1), meeting.post_all, iter(buckets))
    assert meeting.done == ["create", "broadcast", "broadcast", "broadcast", "destroy"]
    join = ["/update_weight_version", "/server_info", "/init_weights_update_group"]
    update = ["/begin_weight_update", *["/update_weights_from_distributed"] * 2]
    end = ["/end_weight_update", "/destroy_weights_update_group", "/update_weight_version"]
    assert meeting.asked == join + update + end


def test_a_server_that_refuses_the_group_is_named(monkeypatch: pytest.MonkeyPatch):
    """The error has the server's words, and is not a timeout of the trainer."""

    def post_all(path: str, body: Any = None, timeout: float = 0.0) -> list[dict[str, Any]]:
        if path == "/init_weights_update_group":
            raise RuntimeError("http://b answered 400: no group")
        return [{"tp_size": 1, "device": "cpu"}]

    monkeypatch.setattr(weights, "JOIN_TIMEOUT", 1.0)
    with pytest.raises(RuntimeError, match="http://b answered 400: no group"):
        send(WeightUpdateMeta(mode="distributed", version=1), post_all, iter(()))
