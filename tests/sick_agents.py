"""Agents with which a run never finishes its first step. The files tests/run/test_doctor.py and
tests/run/test_failures.py use these agents."""

import asyncio
import threading
from typing import Any

from openai import AsyncOpenAI


class BlockingAgent:
    """An agent that blocks the event loop for ever, like a synchronous call without a time limit."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        threading.Event().wait()
        return 1.0


class SilentAgent:
    """An agent that never sets a reward, so that every group is rejected."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> None:
        await asyncio.sleep(0)


class CallingAgent:
    """The base class of agents that send one request and compute the reward from the reply."""

    prompt, key = "guess a number", "secret"

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        where = {key: extra_kwargs[key] for key in ("base_url", "http_client", "api_key")}
        client = AsyncOpenAI(**where, max_retries=0)
        messages: Any = [{"role": "user", "content": self.prompt}]
        reply = await client.chat.completions.create(model="default", messages=messages)
        return self.reward(str(data[self.key]), reply.choices[0].message.content or "")

    def reward(self, answer: str, text: str) -> float:
        return float(answer in text)


class NaNAgent(CallingAgent):
    """An agent whose rewards are NaN."""

    def reward(self, answer: str, text: str) -> float:
        return float("nan")


class ColumnAgent(CallingAgent):
    """An agent that reads a column that is not in the data."""

    key = "answer"


class LongAgent(CallingAgent):
    """An agent whose prompt is longer than the context of the demo's model."""

    prompt = "guess a number " * 100


class RaisingAgent(CallingAgent):
    """An agent that raises an exception in every episode, after its request."""

    def reward(self, answer: str, text: str) -> float:
        raise OSError(f"no board {id(text)}")
