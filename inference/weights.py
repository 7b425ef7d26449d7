"""Send new weights to running servers.

In mode `disk` the trainer writes a Hugging Face folder to a shared file system, such as /dev/shm,
and every server reads this folder. In mode `distributed` trainer and servers join an NCCL or gloo
process group, and the trainer broadcasts its tensors (SGLang >= 0.5.20). An update to version 7 has
these steps:

    write_weights              mode disk: while the servers still generate
    pause                      the servers stop generating
    label "7-incomplete"       from now on all engines refuse the servers' tokens
    disk or distributed        every server loads the weights and drops its old KV cache
    label "7"                  mode distributed; in mode disk, loading sets this label
    set_version(7), resume     the gate admits new groups, and the servers continue

If the update fails halfway, the servers that have not finished it keep the label "7-incomplete",
and the run ends. In mode disk, a folder gets its final name only when it is complete. In mode
distributed, each update makes a new process group, so a server may restart between updates. In
NCCL, a rank that joins, broadcasts or leaves waits until all ranks do. The servers answer a request
to take part only then, so a second thread of the trainer sends this request (`meanwhile`).
"""

import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

PostAll = Callable[..., list[dict[str, Any]]]  # Servers.post_all(path, body, timeout)
Bucket = list[tuple[str, Any]]  # tensors with their names in the checkpoint files

UPDATE_TIMEOUT = 3600.0  # seconds for the slowest server to load a folder or a bucket
JOIN_TIMEOUT = 300.0  # seconds until all servers have joined the process group
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


@dataclass(frozen=True)
class WeightUpdateMeta:
    """One update of the weights: how to send them, and their version."""

    mode: str = "disk"  # or `distributed`
    path: str = ""  # mode disk: parent of the folders v{version}
    version: int | None = None
    address: str = "127.0.0.1"  # mode distributed: where the servers reach rank 0

    def with_version(self, version: int) -> "WeightUpdateMeta":
        return replace(self, version=version)

    @property
    def directory(self) -> Path:
        return Path(self.path).absolute() / f"v{self.version}"


# ---- the trainer's side


def named_buckets(
    model: Any, dtype: Any, bucket_mb: float = 512.0, *, learning: bool = False
) -> Iterator[Bucket]:
    """Yield the weights in buckets of about `bucket_mb` MiB, so that no rank holds the whole model.

    All ranks must take all buckets, because the ranks gather each tensor together. Taking a bucket
    empties the previous one. With `learning`, frozen weights are left out. Names and shapes are
    those of the checkpoint files. In memory, transformers fuses the weights of experts under other
    names, which the servers would skip.
    """
    from torch.distributed.tensor import DTensor
    from transformers.core_model_loading import revert_weight_conversion as revert

    state = model.state_dict()
    bucket = list[Any]()
    size = 0.0
    # named_parameters lists a tied tensor only once, unlike state_dict
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in state or (learning and not tensor.requires_grad):
            continue
        shard = state[name].detach()
        shard = shard.to(dtype) if shard.is_floating_point() else shard
        whole = shard.full_tensor() if isinstance(shard, DTensor) else shard
        bucket += revert(model, {name: whole}).items()
        size += whole.numel() * whole.element_size() / 2**20
        if size >= bucket_mb:
            yield bucket
            bucket.clear()
            size = 0.0
    if bucket:
        yield bucket


def write_checkpoint(state: Mapping[str, Any], source_dir: str | Path, target: str | Path) -> Path:
    """Write a Hugging Face folder with the weights `state` and the other files of `source_dir`."""
    from safetensors.torch import save_file

    target = Path(target).absolute()
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed run
    partial.mkdir(parents=True)
    for file in Path(source_dir).iterdir():
        if file.is_file() and not file.name.endswith(WEIGHT_FILES):
            shutil.copy(file, partial)
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(target, ignore_errors=True)
    partial.replace(target)
    return target


# ---- to the servers


def send(meta: WeightUpdateMeta, post_all: PostAll, buckets: Iterable[Bucket] = ()) -> None:
    """Send the weights to all servers: `meta.directory` in mode disk, `buckets` in mode
    distributed."""
    label(post_all, f"{meta.version}-incomplete")
    if meta.mode == "distributed":
        update_from_distributed(meta, post_all, buckets)
        label(post_all, str(meta.version))
        return
    body: dict[str, Any] = {"flush_cache": True, "abort_all_requests": False}
    body |= {"model_path": str(meta.directory), "weight_version": str(meta.version)}
    post_all("/update_weights_from_disk", body, timeout=UPDATE_TIMEOUT)
    shutil.rmtree(meta.with_version((meta.version or 0) - 1).directory, ignore_errors=True)


def label(post_all: PostAll, version: str, abort: bool = False) -> None:
    """Set the version that the servers report from now on. If `abort`, also end all requests."""
    post_all("/update_weight_version", {"new_version": version, "abort_all_requests": abort})


def update_from_distributed(
    meta: WeightUpdateMeta, post_all: PostAll, buckets: Iterable[Bucket]
) -> None:
    """Broadcast the weights from this process, rank 0, to all GPUs of the servers."""
    import torch

    sizes = [info["tp_size"] for info in post_all("/server_info")]
    *offsets, world = accumulate(sizes, initial=1)  # each server's first rank; number of ranks
    backend, device = ("nccl", "cuda") if torch.cuda.is_available() else ("gloo", "cpu")
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    name = f"weights-{meta.version}-{port}"
    meeting = {"master_address": meta.address, "master_port": port, "group_name": name}
    meeting |= {"world_size": world, "backend": backend}
    bodies = [meeting | {"rank_offset": offset} for offset in offsets]
    with meanwhile(post_all, "/init_weights_update_group", bodies):
        group = join_group(meta.address, port, 0, world, name, backend)

    body = {"group_name": name, "flush_cache": True}
    post_all("/begin_weight_update", {})
    try:
        for bucket in buckets:
            broadcast(group, [(n, tensor.to(device)) for n, tensor in bucket], body, post_all)
    finally:
        post_all("/end_weight_update", {})
    with meanwhile(post_all, "/destroy_weights_update_group", {"group_name": name}):
        group.shutdown()


@contextmanager
def meanwhile(post_all: PostAll, path: str, body: Any) -> Iterator[None]:
    """Run the block while a thread sends a request to all servers. If both fail, raise the
    request's error, because it may have caused the block's error."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post_all, path, body, timeout=UPDATE_TIMEOUT)
        try:
            yield
        finally:
            asked.result()


def broadcast(group: Any, bucket: Bucket, body: dict[str, Any], post_all: PostAll) -> None:
    described = {
        "names": [name for name, _ in bucket],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
    }
    with meanwhile(post_all, "/update_weights_from_distributed", body | described):
        for work in [group.broadcast(tensor.contiguous(), 0) for _, tensor in bucket]:
            work.wait()


def join_group(address: str, port: int, rank: int, world: int, name: str, backend: str) -> Any:
    """Join a process group other than torch's default one. Rank 0 listens at `address` and `port`.

    Trainer and servers find each other through keys in a TCPStore. SGLang's keys have three
    prefixes, so ours need the same.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=JOIN_TIMEOUT)
    store: Any = dist.TCPStore(address, port, world, rank == 0, timeout)
    for prefix in (name, f"{name}/", "cuda/" if backend == "nccl" else "cpu/"):
        store = dist.PrefixStore(prefix, store)
    if backend == "nccl":
        return dist.ProcessGroupNCCL(store, rank, world, dist.ProcessGroupNCCL.Options())
    return dist.ProcessGroupGloo(store, rank, world, timeout)
