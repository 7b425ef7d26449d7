"""The process group through which new weights reach the servers, as both ends build it.

The trainer is rank 0 and hosts the key-value store where the ranks meet; every GPU of every server is one more rank.
SGLang builds its end through torch.distributed, which puts three prefixes before each key of the store. `join_group`
uses the same prefixes, so the trainer meets SGLang and the small server alike. The group lives beside torch's default
group, which belongs to the trainer's own ranks.
"""

from datetime import timedelta
from typing import Any

BUCKET_TIMEOUT = 600.0  # seconds for a bucket, and for a group to come together


def join_group(address: str, port: int, rank: int, world: int, name: str, backend: str) -> Any:
    """A process group beside the default one, rank 0 its meeting place; returns when all `world` ranks are there.

    `.broadcast(tensor, root)` gives a work to wait for. Rank 0 is the trainer, the rest are servers.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=BUCKET_TIMEOUT)
    store: Any = dist.TCPStore(address, port, world, rank == 0, timeout)
    for prefix in (name, f"{name}/", "cuda/" if backend == "nccl" else "cpu/"):
        store = dist.PrefixStore(prefix, store)
    if backend == "nccl":
        return dist.ProcessGroupNCCL(store, rank, world, dist.ProcessGroupNCCL.Options())
    return dist.ProcessGroupGloo(store, rank, world, timeout)
