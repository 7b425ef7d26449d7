"""Agents with which a run never ends its first step (tests/run/test_doctor.py)."""

import asyncio
import threading
from typing import Any


class BlockingAgent:
    """An agent that blocks the event loop for ever, as a call of a synchronous client without a time limit does."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        threading.Event().wait()
        return 1.0


class SilentAgent:
    """An agent that never sets a reward, so that every group is rejected."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> None:
        await asyncio.sleep(0)
