"""The ranks of a run: they join, share, and end together. No concept of its own.

`torchrun --nproc-per-node=N train.py ...` starts N processes of the same program. Rank 0 also runs the rollouts; the
others only train, and meet it in every collective operation. A rank that waits in one for a rank that is dead would
wait for hours (NCCL) or until it next meets it (gloo, which sees a closed connection). So each of them also awaits a
farewell, in a thread: the others from rank 0, rank 0 from all. It is sent when everything is over. A connection that
closes before it is a death, and whoever sees one says so and ends at once: rank 0 within moments of any other, then
all. Rank 0's children end with it, because their pipe closes. What the dead rank said last is its own error.

Not promised: a machine that vanishes without closing its connections is noticed by the operation's timeout only.
"""

import os
import sys
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LIFETIME = timedelta(days=365)  # how long a farewell may be awaited
PATIENCE = timedelta(hours=2)  # how long any other operation may: rank 0 also waits for rollouts

_watch: tuple[Any, list[threading.Thread]] | None = None  # the farewells' process group, and who awaits them


def join_ranks() -> bool:
    """Join torchrun's ranks, or be a world of one that needs no port; False where there is a group already."""
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
    """Part in peace: all ranks have to call it, and it returns when they have."""
    global _watch
    if _watch is not None:
        group, threads = _watch
        for peer in _peers():
            dist.send(torch.zeros(1), peer, group)
        for thread in threads:
            thread.join()
        _watch = None
    dist.destroy_process_group()


def share(thing: Any) -> Any:
    """Rank 0's `thing`, on every rank."""
    if dist.get_world_size() == 1:
        return thing
    box = [thing]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _peers() -> list[int]:
    return list(range(1, dist.get_world_size())) if dist.get_rank() == 0 else [0]


def _await_farewells() -> None:
    global _watch
    group, rank = dist.new_group(backend="gloo", timeout=LIFETIME), dist.get_rank()

    def wait_for(peer: int) -> None:
        try:
            dist.recv(torch.empty(1), peer, group)
        except RuntimeError:
            print(f"rank {rank} ends: rank {peer} has ended before it; see what that said", file=sys.stderr, flush=True)
            os._exit(1)  # the main thread may be in an operation that nothing else interrupts

    threads = [threading.Thread(target=wait_for, args=(peer,), daemon=True) for peer in _peers()]
    for thread in threads:
        thread.start()
    _watch = group, threads
