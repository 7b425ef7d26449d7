"""New weights into running servers: written to disk, or sent straight into their memory.

- **disk**: a Hugging Face directory that every server can read, then POST /update_weights_from_disk. Needs nothing
  but a file system, survives the death of either side, and leaves a checkpoint that `from_pretrained` reads. The
  whole model is written once and read by each server (1.5B parameters in bf16 are 3 GB; on one machine, /dev/shm
  takes them at memory speed).
- **distributed**: trainer and servers join one NCCL or gloo group, and the trainer broadcasts tensor after tensor.
  Network speed and no file.
- **tensor**: the trainer hands over its tensors' handles (CUDA IPC), and a server on the same GPUs opens them. Nothing
  is sent at all. On a CPU the request holds the tensors themselves: handles of shared memory would need torch's manager
  of it, a process that lives as long as a server remembers it, so longer than the run.

**The order**, which train.py spells out: pause -> write and push -> set_version -> resume.
- Without the pause a server finishes all that it runs before it loads (97 s were seen), or, if told to abort,
  throws requests back in the middle of the update.
- `flush_cache` is on. Otherwise a new request would reuse prompt prefixes that the old weights computed. The exception
  is pause mode in_place: what runs keeps its old keys, so SGLang cannot drop them and would fail the update.
- Set the version only when all servers have it: it opens the staleness gate to rollouts that must run on it.
- Always resume. AReaL's issue 1160 is a run that generated nothing more after its first disk update; here the
  engine that paused the servers continues them, at the latest in `destroy`.

**A server that failed an update serves nobody.** A tensor that does not fit stops an update half way: the old weights
are gone, the new ones are not there, and SGLang still tells the old version. So the label changes first, to
"7-incomplete", which no engine reads as a number (io_struct.parse_segment), and becomes "7" when all of it has arrived.
What such a server generates is an error, never a token of version 6.

**A directory is never seen half written.** It is written beside its place under a name that no server is
given, then renamed; a crash leaves only that, and the next write sweeps it away. An older version is deleted
when all servers have answered that they hold the newer one, so no server can be reading what is deleted.

**Buckets.** A sharded model is gathered a bucket at a time, `bucket_mb` or a single tensor if that is larger; the
bucket is sent and let go before the next is gathered. So a rank holds its shard and at most two buckets, never the
whole model (tests/inference/test_weights.py measures it).

**The group is made for one update and dissolved after it.** So it consists of the servers that are there, and one that
died between two updates breaks nothing; AReaL's group lives as long as the run and with all its members. It costs
20 ms over gloo on one machine. Both sides build it from torch's own groups and a key-value store at the trainer
(`join_group`); the prefixes of the keys are those that SGLang's side comes to through torch.distributed.

Not promised: durability. A machine that loses power may lose the file; the trainer's own checkpoint is
another one. Servers sharded over several GPUs get each tensor whole, as SGLang wants it.
"""

import base64
import io
import os
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

PostAll = Callable[..., list[dict[str, Any]]]  # Servers.post_all(path, body or one body a server, timeout)
Bucket = list[tuple[str, "torch.Tensor"]]  # names as in the Hugging Face checkpoint

LOAD_TIMEOUT = 3600.0  # seconds for the slowest server to load
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
PARTIAL = ".partial"  # suffix of a directory that is being written


@dataclass(frozen=True)
class WeightUpdateMeta:
    """What to send, and how."""

    mode: str = "disk"  # disk, distributed or tensor
    path: str = ""  # the directory that holds one v{version} directory (disk)
    version: int = 0
    bucket_mb: float = 512.0  # MiB gathered and sent at once (distributed, tensor)
    address: str = "127.0.0.1"  # of rank 0, as the servers reach it (distributed)
    flush_cache: bool = True  # servers forget the keys of the old weights

    def with_version(self, version: int) -> "WeightUpdateMeta":
        """The same way to send, for another version."""
        return replace(self, version=version)

    @property
    def directory(self) -> Path:
        """Where this version lies on disk."""
        return Path(self.path).absolute() / f"v{self.version}"


# the trainer's side: out of the shards


def named_buckets(model: Any, dtype: "torch.dtype", bucket_mb: float) -> Iterator[Bucket]:
    """The whole model in pieces: lists of (name, whole tensor), `bucket_mb` MiB or one tensor each, tied names once.

    Every rank iterates, to the end: a sharded tensor is gathered by all. Floating-point tensors come as `dtype`,
    converted before they are gathered. A bucket is emptied when the next one is asked for. Names and shapes are those
    of the files that the model came from: transformers fuses experts in memory, and a server skips names it does not
    know. (A model whose memory holds as several what its files hold as one is refused at the start, by the actor.)
    """
    from torch.distributed.tensor import DTensor
    from transformers.core_model_loading import revert_weight_conversion as revert

    state = model.state_dict()
    named = [*model.named_parameters(), *model.named_buffers()]  # the second of two tied names is not among them
    bucket: Bucket = []
    size = 0.0
    for name in (name for name, _ in named if name in state):
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


def write_checkpoint(
    state: Mapping[str, "torch.Tensor"], source_dir: str | os.PathLike[str], target: str | os.PathLike[str]
) -> Path:
    """Write a Hugging Face directory at `target`, all or nothing: model.safetensors from `state` (tensors in
    their own dtype, none under two names), everything but weights copied from `source_dir`."""
    from safetensors.torch import save_file

    # 1. Beside its place, from where a crash is swept away.
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

    # 2. All at once.
    if target.exists():  # the same version again, after a recovery
        shutil.rmtree(target)
    os.replace(partial, target)
    return target


# the servers' side: three ways in


def update_from_disk(meta: WeightUpdateMeta, post_all: PostAll, _: Iterable[Bucket]) -> None:
    """Have all servers load `meta.directory`, all at once; then delete older versions.

    After a failure nothing is deleted, as a server may still be loading.
    """
    body = {"model_path": str(meta.directory), "abort_all_requests": False, "flush_cache": meta.flush_cache}
    post_all("/update_weights_from_disk", body, timeout=LOAD_TIMEOUT)
    for other in meta.directory.parent.glob("v*"):
        if other != meta.directory and other.name[1:].isdecimal():
            shutil.rmtree(other)


def update_from_distributed(meta: WeightUpdateMeta, post_all: PostAll, buckets: Iterable[Bucket]) -> None:
    """Broadcast every bucket from here, rank 0 of a group with all ranks of all servers."""
    import torch

    infos = post_all("/server_info")
    ranks = [info["tp_size"] for info in infos]
    on_gpus = torch.cuda.is_available() and all(info["device"] == "cuda" for info in infos)
    backend, device = ("nccl", "cuda") if on_gpus else ("gloo", "cpu")
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    name, world = f"weights-{meta.version}-{port}", 1 + sum(ranks)
    meeting = {"master_address": meta.address, "master_port": port, "world_size": world, "group_name": name}
    bodies = [{**meeting, "backend": backend, "rank_offset": 1 + sum(ranks[:i])} for i in range(len(ranks))]
    body = {"group_name": name, "flush_cache": meta.flush_cache}

    # 1. All sides meet at the same moment.
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post_all, "/init_weights_update_group", bodies, timeout=BUCKET_TIMEOUT)
        try:
            group = join_group(meta.address, port, 0, world, name, backend)
        finally:
            asked.result()  # a server's own reason comes before ours

    # 2. Bucket by bucket.
    with update_session(infos, post_all):
        for bucket in buckets:
            broadcast(group, [(name, tensor.to(device)) for name, tensor in bucket], body, post_all)
    post_all("/destroy_weights_update_group", {"group_name": name})


def broadcast(group: Any, bucket: Bucket, body: dict[str, Any], post_all: PostAll) -> None:
    """Send one bucket; the servers are told what comes while it is on its way."""
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
    """Hand every bucket to all servers; each copies it. Each rank of each server gets handles of its own: they are
    counted."""
    infos = post_all("/server_info")
    with update_session(infos, post_all):
        for bucket in buckets:
            handles = [[serialise(bucket) for _ in range(info["tp_size"])] for info in infos]
            bodies = [{"serialized_named_tensors": own, "flush_cache": meta.flush_cache} for own in handles]
            post_all("/update_weights_from_tensor", bodies, timeout=BUCKET_TIMEOUT)


SENDERS = {"disk": update_from_disk, "distributed": update_from_distributed, "tensor": update_from_tensor}


def send(meta: WeightUpdateMeta, post_all: PostAll, buckets: Iterable[Bucket] | None = None) -> None:
    """Bring all servers to version `meta.version` by `meta.mode`; `buckets` is the model (but for mode disk).

    Raises RuntimeError that names each server that failed; until a later update succeeds, no server says that it has
    a version.
    """
    if meta.mode not in SENDERS:
        raise ValueError(f"weight_update.mode is {meta.mode!r}, but the modes are: {', '.join(SENDERS)}")
    if meta.mode == "disk" and not meta.directory.is_dir():
        raise FileNotFoundError(f"{meta.directory} is not there: write_checkpoint comes before update_weights")
    if meta.mode != "disk" and buckets is None:
        raise ValueError(f"weight_update.mode={meta.mode} sends tensors, but none were given: named_buckets")
    label(post_all, f"{meta.version}-incomplete")
    SENDERS[meta.mode](meta, post_all, buckets or ())
    label(post_all, str(meta.version))


def label(post_all: PostAll, version: str, abort: bool = False) -> None:
    """Name the weights that the servers have; what they generate from now on bears it. `abort` what they generate."""
    post_all("/update_weight_version", {"new_version": version, "abort_all_requests": abort})


@contextmanager
def update_session(infos: list[dict[str, Any]], post_all: PostAll) -> Iterator[None]:
    """SGLang since 0.5.20 wants to know where an update begins and ends (0.5.16 to 0.5.19 have no such routes)."""
    wanted = all(tuple(map(int, re.findall(r"\d+", info["version"])[:3])) >= (0, 5, 20) for info in infos)
    if wanted:
        post_all("/begin_weight_update", {})
    try:
        yield
    finally:
        if wanted:
            post_all("/end_weight_update", {})


def serialise(bucket: Bucket) -> str:
    """Names and tensors as SGLang's MultiprocessingSerializer writes them, in base64: on a GPU their handles, on a CPU
    their bytes."""
    buffer = io.BytesIO()
    on_gpu = any(tensor.is_cuda for _, tensor in bucket)
    own = [(name, tensor if on_gpu else tensor.clone()) for name, tensor in bucket]  # a view would bring all it views
    (ForkingPickler if on_gpu else pickle.Pickler)(buffer).dump(own)
    return base64.b64encode(buffer.getvalue()).decode()
