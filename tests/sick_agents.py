"""Agents with which a run never finishes its first step, and one that leaves a process behind."""

import asyncio
import itertools
import os
import subprocess
import threading
from typing import Any

from tasks.guess import GuessAgent


class BlockingAgent:
    """Blocks the event loop for ever, like a synchronous call without a time limit."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        threading.Event().wait()
        return 1.0


class NoneAgent:
    """Never sets a reward, so every group is rejected."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> None:
        await asyncio.sleep(0)


groups = itertools.count()


def accept_once(_: Any) -> bool:
    """Accepts the first group that ends, so a step waits for ever for a second one."""
    return next(groups) == 0


class FailsOnRank1:
    """A callback that fails on rank 1."""

    def __init__(self, config: Any) -> None: ...

    def on_step(self, metrics: Any) -> None:
        assert os.environ["RANK"] == "0"


class RaisingAgent(GuessAgent):
    """Raises after its game, each time with other digits in the message."""

    async def run(self, *args: Any, **extra_kwargs: Any) -> float:
        await super().run(*args, **extra_kwargs)
        raise OSError(f"no board {id(args)}")


class ForkingAgent(GuessAgent):
    """Leaves a process and a thread that hangs; neither may hold the lock of the run's folder."""

    async def run(self, *args: Any, **extra_kwargs: Any) -> float:
        subprocess.Popen(["sleep", "20"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        threading.Thread(target=threading.Event().wait).start()
        return await super().run(*args, **extra_kwargs)
