"""New weights into running servers: written to disk, or sent straight into their memory.

- **disk**: a Hugging Face directory that every server can read, then POST /update_weights_from_disk. The
  whole model is written once and read by each server (1.5B parameters in bf16 are 3 GB; on one machine,
  /dev/shm takes them at memory speed).
- **distributed**: trainer and servers join one NCCL or gloo group, and the trainer broadcasts tensor after
  tensor. Network speed and no file, but a group that must be formed first and that a dying member breaks.
- **tensor**: the trainer hands over its tensors' handles, and a server on the same device opens them. Costs
  next to nothing, and works only where both share a GPU.

`disk` is here: it needs nothing but a file system, survives the death of either side, works with any server,
and leaves a checkpoint that `from_pretrained` reads. The other two have their place in `SENDERS`.

**The order**, which train.py spells out: pause -> write and push -> set_version -> resume.
- Without the pause a server finishes all that it runs before it loads (97 s were seen), or, if told to abort,
  throws requests back in the middle of the update.
- The servers label their tokens by `weight_version`, which travels with the weights: a label and what it
  stands for cannot come apart.
- `flush_cache` is on. Otherwise a new request would reuse prompt prefixes that the old weights computed.
- Set the version only when all servers have it: it opens the staleness gate to rollouts that must run on it.
- Always resume. AReaL's issue 1160 is a run that generated nothing more after its first disk update; here the
  engine that paused the servers continues them, at the latest in `destroy`.

**A directory is never seen half written.** It is written beside its place under a name that no server is
given, then renamed; a crash leaves only that, and the next write sweeps it away. An older version is deleted
when all servers have answered that they hold the newer one, so no server can be reading what is deleted.

Not promised: durability. A machine that loses power may lose the file; the trainer's own checkpoint is
another one.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PostAll = Callable[..., list[dict[str, Any]]]  # engine.post_all(path, body, timeout)

LOAD_TIMEOUT = 3600.0  # seconds for the slowest server to load
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
PARTIAL = ".partial"  # suffix of a directory that is being written


@dataclass(frozen=True)
class WeightUpdateMeta:
    """What to send, and how: `path` is the directory that holds one v{version} directory (mode disk)."""

    mode: str = "disk"
    path: str = ""
    version: int = 0

    def with_version(self, version: int) -> "WeightUpdateMeta":
        """The same way to send, for another version."""
        return replace(self, version=version)

    @property
    def directory(self) -> Path:
        """Where this version lies on disk."""
        return Path(self.path).absolute() / f"v{self.version}"


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


def update_from_disk(meta: WeightUpdateMeta, post_all: PostAll) -> None:
    """Have all servers load `meta.directory`, all at once; then delete older versions.

    Raises RuntimeError that names each server that failed; then nothing is deleted, as one may still be
    loading.
    """
    if not meta.directory.is_dir():
        raise FileNotFoundError(f"{meta.directory} is not there: write_checkpoint comes before update_weights")
    body = {
        "model_path": str(meta.directory),
        "weight_version": str(meta.version),
        "abort_all_requests": False,
        "flush_cache": True,
    }
    post_all("/update_weights_from_disk", body, timeout=LOAD_TIMEOUT)
    for other in meta.directory.parent.glob("v*"):
        if other != meta.directory and other.name[1:].isdecimal():
            shutil.rmtree(other)


SENDERS: dict[str, Callable[[WeightUpdateMeta, PostAll], None]] = {"disk": update_from_disk}


def send(meta: WeightUpdateMeta, post_all: PostAll) -> None:
    """Send by `meta.mode`."""
    if meta.mode not in SENDERS:
        raise ValueError(f"weight_update.mode is {meta.mode!r}, but the modes are: {', '.join(SENDERS)}")
    SENDERS[meta.mode](meta, post_all)
