"""Ranks are the processes that train together. This module lets ranks join, share data, and end together.

`torchrun --nproc-per-node=N train.py ...` starts N ranks, each of which runs the same program. Rank 0 runs the rollouts
and trains, and all other ranks only train. In a collective operation, such as a sum of gradients, every rank waits for
all other ranks.

**The problem.** If a rank dies, the ranks that wait for the dead rank may hang. With NCCL the waiting ranks may hang
for hours. With gloo, a rank gets an error only at its next collective operation.

**The solution.** When a rank's work is over, the rank sends its peers a small message, called a farewell. The peers of
rank 0 are all other ranks. Each rank except rank 0 has only one peer, which is rank 0. For each peer, a rank has one
thread that waits for the peer's farewell. If the connection to a peer closes before the peer's farewell has arrived,
the peer has died. The thread that waits for the farewell of a dead peer prints a line and ends its own rank.

**Example.** If rank 2 of 3 ranks raises an error and dies, its connection to rank 0 closes, and rank 0 ends within
moments. When rank 0 ends, its connection to rank 1 closes, so rank 1 ends too. The error that rank 2 printed shows why
the run ended.

**Not promised** is a quick end in one case. If a machine disappears from the network without closing its connections,
the other ranks end only when an operation times out.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LIFETIME = timedelta(days=365)  # how long a rank waits for a peer's farewell: longer than any run
PATIENCE = timedelta(
    hours=2
)  # timeout of every other operation, for example of sending a batch to all ranks

_group: Any = None  # the process group for the farewell messages
_waiting: dict[int, threading.Thread] = {}  # for each peer, the thread that waits for its farewell


def join_ranks() -> bool:
    """Make torch's default process group of all ranks. Return False if the process group exists already.

    Without torchrun this process is the only rank, and its process group listens on the loopback address only.
    """
    if dist.is_initialized():
        return False
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        # SGLang sets NCCL_CUMEM_ENABLE to 0 in its own processes. All members of an NCCL group need the same value of
        # NCCL_CUMEM_ENABLE.
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
        # If no device is set, init_device_mesh prints a warning. The plan (run/plan.py) refuses a run with more ranks
        # than GPUs.
        torch.cuda.set_device(
            min(int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count() - 1)
        )
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=PATIENCE)
        _await_farewells()
    else:
        with on_loopback():
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return True


@contextmanager
def on_loopback() -> Iterator[None]:
    """Let gloo listen on the loopback address. By default gloo listens on the address that the hostname resolves to."""
    name = "GLOO_SOCKET_IFNAME"
    before = os.environ.get(name)
    os.environ[name] = "lo0" if sys.platform == "darwin" else "lo"
    yield
    del os.environ[name]
    if before is not None:
        os.environ[name] = before


def second_group() -> Any:
    """Make one more process group of all ranks, so that a thread can communicate while the main thread communicates in
    the default group."""
    with on_loopback() if dist.get_world_size() == 1 else nullcontext():
        return dist.new_group(backend="gloo", timeout=PATIENCE)


def leave_ranks() -> None:
    """Exchange farewells with all peers, then end the process group. Every rank must call this function.

    The function returns when all peers have called the function too.
    """
    global _group
    for peer in _waiting:
        dist.send(torch.zeros(1), peer, _group)
    for thread in _waiting.values():
        thread.join()
    _waiting.clear()
    # `_group = None` removes the last reference to the process group, so the threads of the process group end before
    # the interpreter shuts down.
    _group = None
    dist.destroy_process_group()


def share(thing: Any) -> Any:
    """Return rank 0's `thing` on every rank. Every rank must call this function. `thing` must be picklable."""
    if dist.get_world_size() == 1:
        return thing
    box = [thing]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _await_farewells() -> None:
    """Start a thread for each peer. The thread waits for the peer's farewell and ends this process if the peer dies."""
    global _group
    _group, rank = dist.new_group(backend="gloo", timeout=LIFETIME), dist.get_rank()

    def wait_for(peer: int) -> None:
        try:
            dist.recv(torch.empty(1), peer, _group)
        except RuntimeError:
            print(
                f"rank {rank} ends: rank {peer} has ended before it; see its error",
                file=sys.stderr,
                flush=True,
            )
            # `os._exit` ends the whole process, even if the main thread hangs in a collective operation.
            os._exit(1)

    for peer in range(1, dist.get_world_size()) if rank == 0 else [0]:
        _waiting[peer] = threading.Thread(target=wait_for, args=(peer,), daemon=True)
        _waiting[peer].start()
