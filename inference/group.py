"""Build the process group in which the trainer broadcasts new weights to the servers (weights.py, mode distributed).

The members of a process group are called ranks. The trainer is rank 0 and hosts the key-value store where the ranks
find each other. Every GPU of every server is one more rank. An SGLang server joins the group through torch.distributed,
which puts three prefixes before each key of the store. `join_group` uses the same three prefixes, so the trainer and an
SGLang server find each other's keys. The small server (inference/tiny) calls `join_group` too. The new group is
separate from torch's default group, which connects the trainer's own processes.
"""

from datetime import timedelta
from typing import Any

BUCKET_TIMEOUT = (
    600.0  # longest time, in seconds, to broadcast one bucket of tensors or to wait for all ranks
)


def join_group(address: str, port: int, rank: int, world: int, name: str, backend: str) -> Any:
    """Join a new process group as rank `rank`, and return the group when all `world` ranks have joined.

    Rank 0 listens at `address` and `port`. `group.broadcast(tensor, 0)` starts to send a tensor of rank 0 to all ranks
    and returns a handle. The handle's `wait()` blocks until the transfer is done. If some ranks have not joined after
    BUCKET_TIMEOUT seconds, torch raises an error.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=BUCKET_TIMEOUT)
    store: Any = dist.TCPStore(address, port, world, rank == 0, timeout)
    for prefix in (name, f"{name}/", "cuda/" if backend == "nccl" else "cpu/"):
        store = dist.PrefixStore(prefix, store)
    if backend == "nccl":
        return dist.ProcessGroupNCCL(store, rank, world, dist.ProcessGroupNCCL.Options())
    return dist.ProcessGroupGloo(store, rank, world, timeout)
