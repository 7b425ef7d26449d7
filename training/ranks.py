"""Ranks are the processes that train together: `torchrun --nproc-per-node=N train.py ...`.

Rank 0 runs the rollouts and trains, the others only train. In a collective operation every rank
waits for all others; if one dies, torchrun ends the rest.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = timedelta(hours=2)  # of a rank that waits, for example for a batch


def join_ranks() -> bool:
    """Make torch's default process group, of one rank without torchrun. False if there is one."""
    if dist.is_initialized():
        return False
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        # SGLang sets this to 0, and all members of an NCCL group need the same value.
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=PATIENCE)
    else:
        with on_loopback():
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return True


@contextmanager
def on_loopback() -> Iterator[None]:
    """Let gloo listen on the loopback address, not on the one of the hostname."""
    name = "GLOO_SOCKET_IFNAME"
    before = os.environ.get(name)
    os.environ[name] = "lo0" if sys.platform == "darwin" else "lo"
    yield
    del os.environ[name]
    if before is not None:
        os.environ[name] = before


def leave_ranks() -> None:
    """End the process group. A second call does nothing."""
    if dist.is_initialized():
        dist.destroy_process_group()


def share(thing: Any) -> Any:
    """Rank 0's `thing`, on every rank. All ranks call this; `thing` is pickled."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return thing
    box = [thing]
    dist.broadcast_object_list(box, src=0)
    return box[0]
