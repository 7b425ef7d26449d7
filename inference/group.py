"""The trainer and the small server join a process group here. Mode distributed sends new weights through it.

The trainer is rank 0 and hosts the key-value store where the ranks meet. Every GPU of every server is one more rank.
SGLang joins through torch.distributed, which puts three prefixes before each key of the store. `join_group` uses these
prefixes too, so the trainer can meet SGLang as well as the small server. The group exists beside torch's default
group, which connects the trainer's own ranks.
"""

from datetime import timedelta
from typing import Any

BUCKET_TIMEOUT = 600.0  # seconds to send one bucket, and seconds for all ranks to meet


def join_group(address: str, port: int, rank: int, world: int, name: str, backend: str) -> Any:
    """Join a new process group as rank `rank`, and return it when all `world` ranks have joined.

    Rank 0 listens at `address` and `port`. `broadcast(tensor, 0)` of the group returns a work that has `wait()`.
    Raises an error of torch if the ranks do not meet within BUCKET_TIMEOUT seconds.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=BUCKET_TIMEOUT)
    store: Any = dist.TCPStore(address, port, world, rank == 0, timeout)
    for prefix in (name, f"{name}/", "cuda/" if backend == "nccl" else "cpu/"):
        store = dist.PrefixStore(prefix, store)
    if backend == "nccl":
        return dist.ProcessGroupNCCL(store, rank, world, dist.ProcessGroupNCCL.Options())
    return dist.ProcessGroupGloo(store, rank, world, timeout)
