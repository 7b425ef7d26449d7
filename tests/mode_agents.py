"""Agents of tests/rollout/test_modes.py. A worker imports them without torch and pytest."""

import os
import signal
import subprocess
import sys
import time
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI


class Talks:
    """Asks the model twice, and then calls the function that data["then"] names, if any."""

    async def run(self, data: dict, **extra_kwargs: Any) -> Any:
        client = AsyncOpenAI(max_retries=0, **extra_kwargs)
        messages: list = list(data["messages"])
        body: Any = {"model": "m", "messages": messages, "max_completion_tokens": 4}
        for _ in range(2):
            reply = await client.chat.completions.create(**body)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            messages.append({"role": "user", "content": "go on"})
        return globals()[data["then"]](data) if "then" in data else 1.0


class Reads:
    """Makes SDK clients without arguments; they must find the session themselves."""

    async def run(self, data: dict, base_url: str, api_key: str, **extra_kwargs: Any) -> float:
        import anthropic  # a slow import that only this agent needs

        mine, theirs = OpenAI(), anthropic.Anthropic()
        assert str(mine.base_url).rstrip("/") == base_url
        assert (mine.api_key, theirs.api_key) == (api_key, api_key)
        assert str(theirs.base_url).rstrip("/") + "/v1" == base_url
        proxy = base_url.removesuffix("/v1").rpartition("/")[0]
        assert httpx.get(proxy + "/health").status_code == 200
        mine.chat.completions.create(model="m", messages=data["messages"], max_completion_tokens=1)
        return 1.0


class CountsSessions:
    """Its reward is the number of open sessions."""

    async def run(self, data: dict, base_url: str, **extra_kwargs: Any) -> float:
        OpenAI().chat.completions.create(model="m", messages=data["messages"], max_tokens=1)
        return httpx.get(data["proxy"] + "/health").json()["sessions"]


class Bomb:
    """Its pickle creates the file `path` where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


# ---- functions that end an agent in different ways


def leaves_at_once(data: dict) -> float:
    os._exit(0)


def is_killed(data: dict) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def exits(data: dict) -> float:
    return sys.exit("enough")


def raises(data: dict) -> float:
    raise LookupError("no such tool")


def breaks_off(data: dict) -> float:
    """The SDK raises an exception that cannot be unpickled."""
    OpenAI(max_retries=0).chat.completions.create(model="m", messages=[])
    return 1.0


def hangs(data: dict) -> float:
    """Hold the named pipe open, here and in a child, and never return."""
    with open(data["fifo"], "w") as file:
        file.write("alive")
        file.flush()
        subprocess.Popen(["sleep", "3600"], stdout=file)
        while True:
            time.sleep(3600)
