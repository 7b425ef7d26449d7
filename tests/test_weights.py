"""New weights reach every server whole or not at all, and what is deleted is no longer read."""

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine import GenerationHyperparameters, ModelRequest, RemoteInfEngine
from weights import WeightUpdateMeta, send, write_checkpoint


@pytest.fixture
def state(tiny_model_dir: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir).state_dict()


class Servers:
    """Stands for engine.post_all: notes what was asked, and what the disk held at that moment."""

    def __init__(self, root: Path, error: str | None = None) -> None:
        self.root, self.error = root, error
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.on_disk: list[set[str]] = []

    def post_all(self, path: str, body: dict[str, Any], timeout: float = 0.0) -> list[dict[str, Any]]:
        self.asked.append((path, body))
        self.on_disk.append({entry.name for entry in self.root.iterdir()})
        if self.error:
            raise RuntimeError(self.error)
        return [{"success": True}]


def test_a_checkpoint_is_a_hugging_face_directory(state: dict, tiny_model_dir: Path, tmp_path: Path):
    """What servers load is what from_pretrained loads: the same tensors, configuration and tokenizer."""
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
    """Tensors keep their dtype, strided ones are written row by row."""
    half = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    tensors = {"half": half, "strided": torch.arange(6.0).reshape(2, 3).T}
    written = load_file(write_checkpoint(tensors, tiny_model_dir, tmp_path / "v0") / "model.safetensors")
    assert set(written) == {"half", "strided"}
    assert written["half"].dtype == torch.bfloat16
    assert torch.equal(written["half"], half)
    assert torch.equal(written["strided"], tensors["strided"])


@pytest.mark.parametrize("step", ["tensors", "replace"])
def test_a_crash_half_way_is_never_seen(
    state: dict, tiny_model_dir: Path, tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
):
    """Until the last moment v1 does not exist under its name, and the next write sweeps the remains away."""

    def crash(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*{"tensors": (safetensors.torch, "save_file"), "replace": (os, "replace")}[step], crash)
        with pytest.raises(KeyboardInterrupt):
            write_checkpoint(state, tiny_model_dir, tmp_path / "v1")
    assert not (tmp_path / "v1").exists()
    assert len(list(tmp_path.iterdir())) == 1
    write_checkpoint(state, tiny_model_dir, tmp_path / "v2")
    assert [entry.name for entry in tmp_path.iterdir()] == ["v2"]


def test_the_same_version_may_be_written_again(state: dict, tiny_model_dir: Path, tmp_path: Path):
    """A run that recovers writes the version it died with once more; the last one written holds."""
    write_checkpoint(state, tiny_model_dir, tmp_path / "v1")
    write_checkpoint({n: t * 0 for n, t in state.items()}, tiny_model_dir, tmp_path / "v1")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "v1")
    assert not any(parameter.any() for parameter in loaded.parameters())


def test_the_old_version_outlives_the_loading(tmp_path: Path):
    """v1 is deleted after every server has answered that it holds v2; other things in the folder are not
    ours."""
    for name in ("v1", "v2", "vocabulary", "notes"):
        (tmp_path / name).mkdir()
    servers = Servers(tmp_path)
    meta = WeightUpdateMeta(path=str(tmp_path)).with_version(2)
    send(meta, servers.post_all)
    body = {"model_path": str(tmp_path / "v2"), "weight_version": "2"}
    assert servers.asked == [("/update_weights_from_disk", body | {"abort_all_requests": False, "flush_cache": True})]
    assert "v1" in servers.on_disk[0]
    assert {entry.name for entry in tmp_path.iterdir()} == {"v2", "vocabulary", "notes"}


def test_nothing_is_deleted_when_a_server_fails(tmp_path: Path):
    """A server that did not answer may still be reading, so both versions stay and the error goes on."""
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
    with pytest.raises(RuntimeError, match="b is gone"):
        send(WeightUpdateMeta(path=str(tmp_path), version=2), Servers(tmp_path, "b is gone").post_all)
    assert {entry.name for entry in tmp_path.iterdir()} == {"v1", "v2"}


@pytest.mark.parametrize("status", [200, 400])
def test_the_failing_server_is_named(tmp_path: Path, status: int):
    """Of two servers one cannot load: the error names it, with its own reason, whatever the status."""
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
    """A mode that is not there, or a version that was never written, fails before any server is asked."""
    servers = Servers(tmp_path)
    with pytest.raises(ValueError, match=r"'distributed', but the modes are: disk"):
        send(WeightUpdateMeta(mode="distributed"), servers.post_all)
    with pytest.raises(FileNotFoundError, match="write_checkpoint comes before"):
        send(WeightUpdateMeta(path=str(tmp_path), version=9), servers.post_all)
    assert servers.asked == []


def test_a_real_server_serves_what_was_written(tiny_server: str, state: dict, tiny_model_dir: Path, tmp_path: Path):
    """After pause, push, version, resume a real server answers with the new weights and labels them so."""
    engine = RemoteInfEngine([tiny_server])
    engine.initialize()
    before = engine.score([[5, 6, 7, 8]])
    meta = WeightUpdateMeta(path=str(tmp_path))
    tokens = []
    for version, change in ((1, 0.5), (0, 1.0)):  # and back, for the tests that share the server
        scaled = {name: tensor * change for name, tensor in state.items()}
        engine.pause()
        write_checkpoint(scaled, tiny_model_dir, meta.with_version(version).directory)
        engine.update_weights(meta.with_version(version))
        engine.set_version(version)
        engine.resume()
        request = ModelRequest([5, 6], gconfig=GenerationHyperparameters(max_new_tokens=2))
        response = asyncio.run(engine.agenerate(request))
        tokens.append((response.output_versions[0], engine.score([[5, 6, 7, 8]]) == before))
    assert tokens == [(1, False), (0, True)]
    engine.destroy()
