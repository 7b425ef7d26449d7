"""Ranks are the processes that train together: `torchrun --nproc-per-node=N train.py ...`.

Rank 0 runs the rollouts and trains; the others only train. In a collective operation, every rank
waits for all others. If one rank dies, the others would wait in vain, so torchrun ends them.
"""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def join_ranks() -> None:
    """Make torch's default process group. Without torchrun, the group has one rank."""
    if dist.is_initialized():
        return
    backend = "gloo"
    alone = dict[str, Any]()
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        # All members of an NCCL group need the same NCCL_CUMEM_ENABLE, and SGLang sets it to 0.
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" not in os.environ:
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        # Gloo must listen on the loopback interface, not on the hostname's address.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    # A rank may wait for a batch for hours.
    dist.init_process_group(backend, timeout=timedelta(hours=2), **alone)


def share(make: Callable[[], Any]) -> Any:
    """Call `make` on rank 0, and give its result to all ranks. All ranks call this."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    box = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]
