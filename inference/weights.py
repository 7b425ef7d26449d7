"""Send new weights to running servers, in one of three ways.

- **disk**: the trainer writes a Hugging Face directory, and each server reads the directory (POST
  /update_weights_from_disk). Mode disk needs only a shared file system. `from_pretrained` can also read the directory.
  If all processes run on one machine, `weight_update.path=/dev/shm/new` keeps the files in memory.

- **distributed**: the trainer and the servers join one NCCL or gloo group, and the trainer broadcasts the tensors.

- **tensor**: the trainer and a server share a GPU. The trainer sends handles of its tensors (CUDA IPC), and the server
  copies the tensors. Without a GPU the request contains the tensors themselves.

**Order.** The training loop makes an update in this order:

    write_weights                  mode disk: rank 0 writes the directory while the servers still generate
    pause                          the servers stop generating (without a pause, the update would wait for all requests)
    label "7-incomplete"           `send` begins: from now on every engine (engine.py) refuses the servers' tokens
    disk, distributed or tensor    every server loads the new weights and drops the KV cache of the old weights
    label "7"                      `send` ends: every server has all weights (in mode disk, the load sets this label)
    set_version(7)                 the staleness gate admits rollouts that start with version 7
    resume                         the servers continue (if the trainer fails earlier, `destroy` lets them continue)

In pause mode `in_place` the servers keep the KV cache, because running requests use it (`flush_cache` is off).

**If the update to version 7 fails** half way, a server may have weights of both versions. SGLang then keeps the label
6, so `send` sets the label "7-incomplete" before it sends the weights. An engine refuses a label that is not a number.

**Files.** The trainer writes a directory under a temporary name, and renames the directory when all files are complete,
so no server can read an incomplete directory. After a crash, the next write deletes the incomplete directory. After all
servers have loaded a version, the trainer deletes the directories of all other versions.

**Buckets.** In modes distributed and tensor, `named_buckets` gathers a sharded model in buckets of at most `bucket_mb`
MiB. A tensor of more than `bucket_mb` MiB has a bucket of its own. `named_buckets` frees each bucket before it gathers
the next, so no rank ever holds the whole model.

**The process group** of mode distributed exists only during one update, so the loss of a server between two updates
affects no group. Making a group with gloo takes 20 ms on one machine. With NCCL, creating the group, broadcasting and
destroying the group each block a rank until all ranks do the same. Therefore a thread sends the request to the servers
(`meanwhile`), while the trainer makes its own NCCL call.

**Not promised.** A power failure may destroy the files of mode disk. A run that recovers writes new files.
"""

import base64
import io
import pickle
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
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
WEIGHT_FILES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".index.json",
)  # endings of files with weights
PARTIAL = ".partial"  # suffix of a directory that is not complete yet


@dataclass(frozen=True)
class WeightUpdateMeta:
    """The settings of one weight update: which version to send, and in which way."""

    mode: str = "disk"  # `disk`, `distributed` or `tensor`
    path: str = ""  # folder that contains the directories v{version} (mode disk)
    version: int | None = (
        None  # policy version of the new weights; None: the next version of the trainer
    )
    bucket_mb: float = 512.0  # largest size of a bucket in MiB (modes distributed and tensor)
    address: str = (
        "127.0.0.1"  # address at which the servers reach rank 0 of the trainer (mode distributed)
    )
    flush_cache: bool = True  # True if servers drop the KV cache of the old weights

    def with_version(self, version: int) -> "WeightUpdateMeta":
        """Return a copy of these settings for version `version`."""
        return replace(self, version=version)

    @property
    def directory(self) -> Path:
        """The directory of this version's checkpoint."""
        return Path(self.path).absolute() / f"v{self.version}"


# Functions that gather the weights of the sharded model and write checkpoints


def named_buckets(model: Any, dtype: "torch.dtype", bucket_mb: float) -> Iterator[Bucket]:
    """Yield all weights of a model in buckets of at most `bucket_mb` MiB.

    Every rank must request all buckets, because all ranks together gather each sharded tensor. Floating-point tensors
    are converted to `dtype` before they are gathered. When the caller requests the next bucket, the function empties
    the previous bucket.

    The yielded tensors have the names and shapes of the checkpoint files, because a server skips unknown names. In
    memory, transformers fuses the experts of a mixture-of-experts model. `revert_weight_conversion` splits the fused
    experts. FSDPEngine refuses a model if transformers splits one tensor of the checkpoint files into several tensors.
    """
    from torch.distributed.tensor import DTensor
    from transformers.core_model_loading import revert_weight_conversion as revert

    state = model.state_dict()
    tensors = [
        *model.named_parameters(),
        *model.named_buffers(),
    ]  # a tied tensor is listed only once
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
        bucket += revert(
            model, {name: shard.full_tensor() if isinstance(shard, DTensor) else shard}
        ).items()
        size += mb
    yield bucket
    bucket.clear()


def write_checkpoint(
    state: Mapping[str, "torch.Tensor"], source_dir: str | Path, target: str | Path
) -> Path:
    """Write a Hugging Face directory at `target` and return its path. The directory appears only when it is complete.

    The file model.safetensors contains the tensors of `state`, each with its own name and dtype. The function copies
    all files without weights, such as the configuration and the tokenizer, from `source_dir`.
    """
    from safetensors.torch import save_file

    # 1. Delete incomplete directories that a crash has left, and write the new directory under a temporary name.
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

    # 2. Rename the directory.
    if target.exists():  # a recovered run writes its last version a second time
        shutil.rmtree(target)
    partial.replace(target)
    return target


# Functions that send the weights to the servers: `send` calls one of the three update_from_* functions.


def send(
    meta: WeightUpdateMeta, post_all: PostAll, buckets: Iterable[Bucket] | None = None
) -> None:
    """Send version `meta.version` to all servers, from disk or from `buckets`.

    Raises RuntimeError with the errors of all failed servers. If an update fails, the engines refuse the tokens of all
    servers until a later update succeeds.
    """
    # 1. Check the arguments before any server is called.
    if meta.mode not in SENDERS:
        raise ValueError(
            f"weight_update.mode is {meta.mode!r}, but the modes are: {', '.join(SENDERS)}"
        )
    if meta.mode == "disk" and not meta.directory.is_dir():
        raise FileNotFoundError(
            f"{meta.directory} is not there: write_checkpoint comes before update_weights"
        )
    if meta.mode != "disk" and buckets is None:
        raise ValueError(
            f"weight_update.mode={meta.mode} sends tensors, but none were given: pass named_buckets(...)"
        )

    # 2. Send the weights. While the label of a server ends in "-incomplete", every engine refuses the server's tokens.
    label(post_all, f"{meta.version}-incomplete")
    SENDERS[meta.mode](meta, post_all, buckets or ())
    if (
        meta.mode != "disk"
    ):  # in mode disk, the request that loads the weights has already set the label
        label(post_all, str(meta.version))


def label(post_all: PostAll, version: str, abort: bool = False) -> None:
    """Set the version that all servers report for new tokens. If `abort` is true, abort all requests of the servers."""
    post_all("/update_weight_version", {"new_version": version, "abort_all_requests": abort})


def update_from_disk(meta: WeightUpdateMeta, post_all: PostAll, _: Iterable[Bucket]) -> None:
    """Let all servers load `meta.directory` in parallel, then delete the directories of all other versions.

    If a server fails, no directory is deleted, because another server may still be loading.
    """
    body = {
        "model_path": str(meta.directory),
        "abort_all_requests": False,
        "flush_cache": meta.flush_cache,
    }
    # One request changes the weights and the label of a server, so the label changes exactly when the weights change.
    body["weight_version"] = str(meta.version)
    post_all("/update_weights_from_disk", body, timeout=LOAD_TIMEOUT)
    for other in meta.directory.parent.glob("v*"):
        if other != meta.directory and other.name[1:].isdecimal():
            shutil.rmtree(other)


def update_from_distributed(
    meta: WeightUpdateMeta, post_all: PostAll, buckets: Iterable[Bucket]
) -> None:
    """Make one new process group of this process (rank 0) and all GPUs of all servers, and broadcast all buckets."""
    import torch

    # 1. Plan the group. The trainer has rank 0 in the group. The ranks of a server begin at the server's rank_offset.
    infos = post_all("/server_info")
    sizes = [info["tp_size"] for info in infos]
    on_gpus = torch.cuda.is_available() and all(info["device"] == "cuda" for info in infos)
    backend, device = ("nccl", "cuda") if on_gpus else ("gloo", "cpu")
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    group_name, world = f"weights-{meta.version}-{port}", 1 + sum(sizes)
    meeting = {
        "master_address": meta.address,
        "master_port": port,
        "world_size": world,
        "group_name": group_name,
    }
    bodies = [
        {**meeting, "backend": backend, "rank_offset": 1 + sum(sizes[:i])}
        for i in range(len(sizes))
    ]

    # 2. Join the group, broadcast the buckets, and end the group.
    with meanwhile(post_all, "/init_weights_update_group", bodies):
        group = join_group(meta.address, port, 0, world, group_name, backend)
    body = {"group_name": group_name, "flush_cache": meta.flush_cache}
    with update_session(infos, post_all):
        for bucket in buckets:
            broadcast(group, [(name, tensor.to(device)) for name, tensor in bucket], body, post_all)
    with meanwhile(post_all, "/destroy_weights_update_group", {"group_name": group_name}):
        group.shutdown()


@contextmanager
def meanwhile(post_all: PostAll, path: str, body: Any) -> Iterator[None]:
    """Send `body` to all servers in a thread while the `with` block runs. At the end of the `with` block, wait for the
    servers' answers.

    If a server refuses the request, the `with` block may fail, too, because it waits for the server's ranks. If both
    fail, the caller gets the error of the request.
    """
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post_all, path, body, timeout=BUCKET_TIMEOUT)
        try:
            yield
        finally:
            asked.result()


def broadcast(group: Any, bucket: Bucket, body: dict[str, Any], post_all: PostAll) -> None:
    """Send the servers the names, dtypes and shapes of a bucket's tensors, and broadcast the tensors at the same
    time."""
    described = {
        "names": [name for name, _ in bucket],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
    }
    with meanwhile(post_all, "/update_weights_from_distributed", body | described):
        sent = [group.broadcast(tensor.contiguous(), 0) for _, tensor in bucket]
    for work in sent:
        work.wait()


def update_from_tensor(
    meta: WeightUpdateMeta, post_all: PostAll, buckets: Iterable[Bucket]
) -> None:
    """Send every bucket to all servers. The servers copy the tensors.

    Each GPU of each server gets its own handles, because torch expects exactly one receiver for each handle.
    """
    infos = post_all("/server_info")
    with update_session(infos, post_all):
        for bucket in buckets:
            handles = [
                [serialise(bucket, info["device"]) for _ in range(info["tp_size"])]
                for info in infos
            ]
            bodies = [
                {"serialized_named_tensors": own, "flush_cache": meta.flush_cache}
                for own in handles
            ]
            post_all("/update_weights_from_tensor", bodies, timeout=BUCKET_TIMEOUT)


SENDERS = {
    "disk": update_from_disk,
    "distributed": update_from_distributed,
    "tensor": update_from_tensor,
}


def update_session(infos: list[dict[str, Any]], post_all: PostAll) -> ExitStack:
    """Tell the servers that an update begins. Return a context manager that tells them at its exit that the update has
    ended. If a server's SGLang is older than 0.5.20, which introduced the two routes, tell the servers nothing."""
    session = ExitStack()
    if all(
        tuple(map(int, re.findall(r"\d+", info["version"])[:3])) >= (0, 5, 20) for info in infos
    ):
        post_all("/begin_weight_update", {})
        session.callback(post_all, "/end_weight_update", {})
    return session


def serialise(bucket: Bucket, device: str = "cpu") -> str:
    """Return a bucket as base64 text in the format of SGLang's MultiprocessingSerializer.

    If the server has device "cuda", the text contains a handle of each tensor on a GPU. For any other tensor, the text
    contains the tensor's bytes.
    """
    if device == "cuda" and any(tensor.is_cuda for _, tensor in bucket):
        import torch
        from torch.multiprocessing.reductions import reduce_tensor

        def by_uuid(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
            """Make a handle that names the tensor's GPU by UUID. A server may number the GPUs differently than the
            trainer."""
            rebuild, arguments = reduce_tensor(
                tensor
            )  # argument 6 of `rebuild_cuda_tensor` is the GPU's number.
            # SGLang accepts a UUID in place of the GPU's number.
            uuid = str(torch.cuda.get_device_properties(arguments[6]).uuid)
            return rebuild, (*arguments[:6], uuid, *arguments[7:])

        stream = io.BytesIO()
        pickler: Any = ForkingPickler(stream)
        pickler.dispatch_table = {**pickler.dispatch_table, torch.Tensor: by_uuid}
        pickler.dump(bucket)
        pickled = stream.getvalue()
    else:  # a pickled view contains the view's whole storage, so each tensor is copied before it is pickled
        pickled = pickle.dumps([(name, tensor.cpu().clone()) for name, tensor in bucket])
    return base64.b64encode(pickled).decode()
