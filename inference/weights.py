"""Send new weights to running servers, in one of three ways.

- **disk**: the trainer writes a Hugging Face directory, and each server reads it (POST /update_weights_from_disk). Both
  sides only need a shared file system. The directory is also a checkpoint that `from_pretrained` can read. A model of
  1.5B parameters in bf16 takes 3 GB. On one machine, /dev/shm makes this way as fast as memory.
- **distributed**: trainer and servers join one NCCL or gloo group, and the trainer broadcasts the tensors.
- **tensor**: the trainer and a server share a GPU. The trainer sends handles of its tensors (CUDA IPC), and the server
  copies the tensors. Without a GPU the request contains the tensors themselves.

**The order of an update**, as the training loop calls it:

    pause                          the servers stop generating; without a pause they would first finish every request
    label "7-incomplete"           `send` begins: from now on no engine accepts a token of these servers
    disk, distributed or tensor    every server takes the new weights and drops the KV cache of the old ones
    label "7"                      `send` ends: every server has all of version 7
    set_version(7)                 the staleness gate admits rollouts that start with version 7
    resume                         the servers go on; `destroy` does this if the trainer failed before

In pause mode in_place the servers keep the KV cache (`flush_cache` is off), because their running requests use it.

**If an update fails** half way, a server has parts of both versions, and SGLang would still report version 6. The label
"7-incomplete" prevents that: the engine cannot read it as a number, so it refuses the server's tokens.

**Files.** A directory is written under a name that no server is given, and then renamed, so no server reads half of it.
The next write deletes what a crash has left. Older versions are deleted when all servers have loaded the new one.

**Buckets.** In modes distributed and tensor, `named_buckets` gathers a sharded model in buckets of `bucket_mb` MiB. A
larger tensor is a bucket by itself. Each bucket is freed before the next is gathered, so no rank holds the whole model.

**The group** of mode distributed is made for one update and dissolved after it, so a server that dies between two
updates breaks nothing. Making it takes 20 ms over gloo on one machine.

**Not promised.** A file may be lost when the machine loses power. The trainer keeps a checkpoint of its own.
"""

import base64
import pickle
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference.group import BUCKET_TIMEOUT, join_group

if TYPE_CHECKING:
    import torch

PostAll = Callable[..., list[dict[str, Any]]]  # the type of Servers.post_all(path, body, timeout)
Bucket = list[tuple[str, "torch.Tensor"]]  # tensors with their names in the Hugging Face checkpoint

LOAD_TIMEOUT = 3600.0  # seconds that the slowest server may take to load a directory
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
PARTIAL = ".partial"  # suffix of a directory while it is being written


@dataclass(frozen=True)
class WeightUpdateMeta:
    """Which version to send, and in which way."""

    mode: str = "disk"  # disk, distributed or tensor
    path: str = ""  # the folder that holds a directory v{version} for each version (mode disk)
    version: int = 0  # policy version of the new weights
    bucket_mb: float = 512.0  # MiB to gather and send at once (modes distributed and tensor)
    address: str = "127.0.0.1"  # address of trainer rank 0 for the servers (mode distributed)
    flush_cache: bool = True  # True if servers drop the KV cache of the old weights

    def with_version(self, version: int) -> "WeightUpdateMeta":
        """Return a copy for another version."""
        return replace(self, version=version)

    @property
    def directory(self) -> Path:
        """The directory of this version's checkpoint."""
        return Path(self.path).absolute() / f"v{self.version}"


# The trainer's side: get the weights out of the sharded model.


def named_buckets(model: Any, dtype: "torch.dtype", bucket_mb: float) -> Iterator[Bucket]:
    """Yield all weights of a model in buckets of at most `bucket_mb` MiB, each with its name in the checkpoint.

    All ranks iterate together to the end, because they gather each sharded tensor together. Floating-point tensors
    are converted to `dtype` before they are gathered. A bucket is emptied when the next one is asked for.

    Names and shapes are those of the checkpoint files, since a server skips names that it does not know. transformers
    fuses the experts of a mixture in memory, and `revert_weight_conversion` splits them again. FSDPEngine refuses
    models for which this is impossible.
    """
    from torch.distributed.tensor import DTensor
    from transformers.core_model_loading import revert_weight_conversion as revert

    state = model.state_dict()
    tensors = [*model.named_parameters(), *model.named_buffers()]  # lists a tied tensor once
    names = [name for name, _ in tensors if name in state]
    bucket: Bucket = []
    size = 0.0
    for name in names:
        shard = state[name].detach()
        shard = shard.to(dtype if shard.is_floating_point() else shard.dtype)
        mb = shard.numel() * shard.element_size() / 2**20
        if bucket and size + mb > bucket_mb:
            yield bucket
            bucket.clear()
            size = 0.0
        bucket += revert(model, {name: shard.full_tensor() if isinstance(shard, DTensor) else shard}).items()
        size += mb
    yield bucket
    bucket.clear()


def write_checkpoint(state: Mapping[str, "torch.Tensor"], source_dir: str | Path, target: str | Path) -> Path:
    """Write a Hugging Face directory at `target` and return its path. A reader sees all of it or nothing.

    model.safetensors holds `state`, each tensor in its own dtype and under one name. Other files, such as the
    configuration and the tokenizer, are copied from `source_dir`.
    """
    from safetensors.torch import save_file

    # 1. Write under a temporary name, after deleting what an earlier crash has left.
    target = Path(target).absolute()
    for left in target.parent.glob(f"*{PARTIAL}"):
        shutil.rmtree(left)
    partial = target.with_name(target.name + PARTIAL)
    partial.mkdir(parents=True)
    for file in Path(source_dir).iterdir():
        if file.is_file() and not file.name.endswith(WEIGHT_FILES):
            shutil.copy(file, partial)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})

    # 2. Rename.
    if target.exists():  # a recovered run writes its last version again
        shutil.rmtree(target)
    partial.replace(target)
    return target


# The servers' side: `send` is a whole update, and the three functions after it are its three ways.


def send(meta: WeightUpdateMeta, post_all: PostAll, buckets: Iterable[Bucket] | None = None) -> None:
    """Bring all servers to version `meta.version`, from disk or from `buckets`.

    Raises RuntimeError that names each server that failed. No server then bears a version until an update succeeds.
    """
    # 1. Check what can be checked before any server is asked.
    if meta.mode not in SENDERS:
        raise ValueError(f"weight_update.mode is {meta.mode!r}, but the modes are: {', '.join(SENDERS)}")
    if meta.mode == "disk" and not meta.directory.is_dir():
        raise FileNotFoundError(f"{meta.directory} is not there: write_checkpoint comes before update_weights")
    if meta.mode != "disk" and buckets is None:
        raise ValueError(f"weight_update.mode={meta.mode} sends tensors, but none were given: pass named_buckets(...)")

    # 2. Until the update is complete, no engine accepts a token.
    label(post_all, f"{meta.version}-incomplete")
    SENDERS[meta.mode](meta, post_all, buckets or ())
    label(post_all, str(meta.version))


def label(post_all: PostAll, version: str, abort: bool = False) -> None:
    """Set the version that all servers report for new tokens. With `abort` they also abort their running requests."""
    post_all("/update_weight_version", {"new_version": version, "abort_all_requests": abort})


def update_from_disk(meta: WeightUpdateMeta, post_all: PostAll, _: Iterable[Bucket]) -> None:
    """Let all servers load `meta.directory` at once, then delete the other versions.

    If a server fails, nothing is deleted, because a server may still be loading.
    """
    body = {"model_path": str(meta.directory), "abort_all_requests": False, "flush_cache": meta.flush_cache}
    post_all("/update_weights_from_disk", body, timeout=LOAD_TIMEOUT)
    for other in meta.directory.parent.glob("v*"):
        if other != meta.directory and other.name[1:].isdecimal():
            shutil.rmtree(other)


def update_from_distributed(meta: WeightUpdateMeta, post_all: PostAll, buckets: Iterable[Bucket]) -> None:
    """Join a group with all GPUs of all servers, and broadcast every bucket. This process is rank 0."""
    import torch

    # 1. Plan the group. The trainer has rank 0, and the ranks of each server start at its rank_offset.
    infos = post_all("/server_info")
    sizes = [info["tp_size"] for info in infos]
    on_gpus = torch.cuda.is_available() and all(info["device"] == "cuda" for info in infos)
    backend, device = ("nccl", "cuda") if on_gpus else ("gloo", "cpu")
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    group_name, world = f"weights-{meta.version}-{port}", 1 + sum(sizes)
    meeting = {"master_address": meta.address, "master_port": port, "world_size": world, "group_name": group_name}
    bodies = [{**meeting, "backend": backend, "rank_offset": 1 + sum(sizes[:i])} for i in range(len(sizes))]

    # 2. Join it. The servers are asked in a thread, because neither side returns before all ranks have joined.
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post_all, "/init_weights_update_group", bodies, timeout=BUCKET_TIMEOUT)
        try:
            group = join_group(meta.address, port, 0, world, group_name, backend)
        finally:
            asked.result()  # if a server refused, its own error is raised instead of the timeout of join_group

    # 3. Broadcast the buckets, and dissolve the group.
    body = {"group_name": group_name, "flush_cache": meta.flush_cache}
    with update_session(infos, post_all):
        for bucket in buckets:
            broadcast(group, [(name, tensor.to(device)) for name, tensor in bucket], body, post_all)
    post_all("/destroy_weights_update_group", {"group_name": group_name})


def broadcast(group: Any, bucket: Bucket, body: dict[str, Any], post_all: PostAll) -> None:
    """Broadcast one bucket, and meanwhile tell the servers the names, dtypes and shapes of its tensors."""
    described = {
        "names": [name for name, _ in bucket],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
    }
    sent = [group.broadcast(tensor.contiguous(), 0) for _, tensor in bucket]
    post_all("/update_weights_from_distributed", body | described, timeout=BUCKET_TIMEOUT)
    for work in sent:
        work.wait()


def update_from_tensor(meta: WeightUpdateMeta, post_all: PostAll, buckets: Iterable[Bucket]) -> None:
    """Send every bucket to all servers, which copy its tensors.

    Each GPU of each server gets handles of its own, because CUDA counts how often a handle is opened.
    """
    infos = post_all("/server_info")
    with update_session(infos, post_all):
        for bucket in buckets:
            handles = [[serialise(bucket) for _ in range(info["tp_size"])] for info in infos]
            bodies = [{"serialized_named_tensors": own, "flush_cache": meta.flush_cache} for own in handles]
            post_all("/update_weights_from_tensor", bodies, timeout=BUCKET_TIMEOUT)


SENDERS = {"disk": update_from_disk, "distributed": update_from_distributed, "tensor": update_from_tensor}


@contextmanager
def update_session(infos: list[dict[str, Any]], post_all: PostAll) -> Iterator[None]:
    """Tell the servers where an update begins and ends. SGLang has routes for it since version 0.5.20."""
    wanted = all(tuple(map(int, re.findall(r"\d+", info["version"])[:3])) >= (0, 5, 20) for info in infos)
    if wanted:
        post_all("/begin_weight_update", {})
    try:
        yield
    finally:
        if wanted:
            post_all("/end_weight_update", {})


def serialise(bucket: Bucket) -> str:
    """Return names and tensors in base64, as SGLang's MultiprocessingSerializer writes them.

    The text holds handles of tensors on a GPU, and the bytes of tensors on a CPU.
    """
    if any(tensor.is_cuda for _, tensor in bucket):
        pickled = bytes(ForkingPickler.dumps(bucket))
    else:  # pickling a view would also pickle the storage behind it, so each tensor is copied
        pickled = pickle.dumps([(name, tensor.clone()) for name, tensor in bucket])
    return base64.b64encode(pickled).decode()
