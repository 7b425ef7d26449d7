"""Ranks, the processes that train together: how they join, share data, and end together.

`torchrun --nproc-per-node=N train.py ...` starts N processes of one program, called ranks. Rank 0 also runs the
rollouts; all others only train. In a collective operation, such as a sum of gradients, every rank waits for all others.

**The problem.** If a rank dies, a rank that waits for it may hang for hours (NCCL), or until its next operation (gloo).

**The solution is a farewell.** Each rank awaits one small message in a thread: rank 0 from every other rank, and every
other rank from rank 0. A rank sends the message only when its work is over. If a connection closes before the message
has arrived, the peer has died. The waiting thread then prints a line and ends its own process.

**Example.** Rank 2 of 3 raises an error and dies. Rank 0 sees its connection close and ends within moments. Rank 1 then
sees the connection to rank 0 close, and ends too. The error that rank 2 printed is the cause.

**Not promised.** A machine that disappears from the network without closing its connections is noticed only when an
operation times out.
"""

import os
import sys
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LIFETIME = timedelta(days=365)  # the longest time to wait for a farewell: longer than any run
PATIENCE = timedelta(hours=2)  # the longest time that ranks wait in any other operation, for example for rollouts

_group: Any = None  # the process group of the farewells
_waiting: dict[int, threading.Thread] = {}  # for each peer, the thread that waits for its farewell


def join_ranks() -> bool:
    """Make the process group: all ranks of torchrun, or this process alone. Return False if there is a group already.

    A process group of one rank lives in this process and opens no port.
    """
    if dist.is_initialized():
        return False
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group(backend, timeout=PATIENCE)
        _await_farewells()
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return True


def leave_ranks() -> None:
    """Exchange farewells and end the process group. All ranks call it, and it returns when all have called it."""
    for peer in _waiting:
        dist.send(torch.zeros(1), peer, _group)
    for thread in _waiting.values():
        thread.join()
    _waiting.clear()
    dist.destroy_process_group()


def share(thing: Any) -> Any:
    """Return rank 0's `thing` on every rank. All ranks call it; it is pickled on the way."""
    if dist.get_world_size() == 1:
        return thing
    box = [thing]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _await_farewells() -> None:
    """Start one thread for each peer, which waits for the peer's farewell and ends this process if the peer dies."""
    global _group
    _group, rank = dist.new_group(backend="gloo", timeout=LIFETIME), dist.get_rank()

    def wait_for(peer: int) -> None:
        try:
            dist.recv(torch.empty(1), peer, _group)
        except RuntimeError:
            print(f"rank {rank} ends: rank {peer} has ended before it; see its error", file=sys.stderr, flush=True)
            os._exit(1)  # the main thread may hang in an operation, and an exception here would not stop it

    for peer in range(1, dist.get_world_size()) if rank == 0 else [0]:
        _waiting[peer] = threading.Thread(target=wait_for, args=(peer,), daemon=True)
        _waiting[peer].start()
