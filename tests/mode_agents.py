"""Agents for tests/rollout/test_modes.py. This module imports neither torch nor pytest, so that a worker process
imports it quickly."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import openai
from openai import AsyncOpenAI, OpenAI


def compute_reward(response: Any, answer: str) -> float:
    return 1.0 if response.choices[0].message.content == answer else 0.5


class MyAgent:
    """The "Proxy Approach" example from AReaL's page Agent Workflow. Unlike the page's example, this agent also limits
    the length of the answer."""

    async def run(self, data, **extra_kwargs):
        http_client = extra_kwargs.get("http_client")
        base_url = extra_kwargs.get("base_url")

        client = AsyncOpenAI(base_url=base_url, http_client=http_client, max_retries=0)

        response = await client.chat.completions.create(
            model="default", messages=data["messages"], max_completion_tokens=4
        )

        return compute_reward(response, data["answer"])


class MySyncAgent:
    """The "Subprocess Mode" example from AReaL's page Agent Workflow. Unlike the page's example, this agent also limits
    the length of the answer."""

    async def run(self, data, **extra_kwargs):
        client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL"), api_key="DUMMY")

        response = client.chat.completions.create(
            model="default", messages=data["messages"], max_completion_tokens=4
        )

        return compute_reward(response, data["answer"])


class Talks:
    """An agent that asks the model two times. If `data` has the key `then`, its value names a function, and the agent
    calls this function after the two requests."""

    async def run(self, data: dict, base_url: str, api_key: str, http_client: Any) -> Any:
        client = AsyncOpenAI(
            base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0
        )
        messages: list = list(data["messages"])
        for _ in range(2):
            reply = await client.chat.completions.create(
                model="m", messages=messages, max_completion_tokens=4
            )
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            messages.append({"role": "user", "content": "go on"})
        return globals()[data["then"]](data) if "then" in data else 1.0


class Reads:
    """An agent that makes SDK clients without arguments and checks that they use the session's URL and key."""

    async def run(self, data: dict, base_url: str, api_key: str, **extra_kwargs: Any) -> float:
        import anthropic  # a slow import that only this agent needs

        mine, theirs = OpenAI(), anthropic.Anthropic()
        assert str(mine.base_url).rstrip("/") == base_url
        assert (mine.api_key, theirs.api_key) == (api_key, api_key)
        assert str(theirs.base_url).rstrip("/") + "/v1" == base_url
        assert (
            httpx.get(base_url.rpartition("/")[0].rpartition("/")[0] + "/health").status_code == 200
        )
        mine.chat.completions.create(model="m", messages=data["messages"], max_completion_tokens=1)
        return 1.0


class CountsSessions:
    """An agent whose reward is the number of open sessions at the proxy."""

    async def run(self, data: dict, base_url: str, **extra_kwargs: Any) -> float:
        OpenAI().chat.completions.create(
            model="m", messages=data["messages"], max_completion_tokens=1
        )
        return httpx.get(data["proxy"] + "/health").json()["sessions"]


class Endpoint:
    """An agent that runs the function that `data["then"]` names.

    If `data["then"]` is "tells", the reward is 1 if OPENAI_BASE_URL equals the agent's base_url, and 0 otherwise.
    """

    async def run(self, data: dict, base_url: str, **extra_kwargs: Any) -> float:
        alone = os.environ.get("OPENAI_BASE_URL") == base_url
        return float(alone) if data["then"] == "tells" else globals()[data["then"]](data)


class Unpicklable:
    """An agent that cannot be pickled, because it holds an SDK client."""

    def __init__(self) -> None:
        self.client = openai.OpenAI(api_key="DUMMY")

    async def run(self, data: dict, **extra_kwargs: Any) -> float:
        return 1.0


class Bomb:
    """An object whose pickle creates the file `path` in the process that unpickles it."""

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
    """Make the OpenAI SDK raise an exception that cannot be unpickled."""
    OpenAI(max_retries=0).chat.completions.create(model="m", messages=[])
    return 1.0


def process_id(data: dict) -> float:
    return float(os.getpid())


def returns_twice(data: dict) -> float:
    """Fork a child. The child returns 7.0. After the child has ended, the parent returns 1.0."""
    if child := os.fork():
        os.waitpid(child, 0)
    return 1.0 if child else 7.0


def is_silent(data: dict) -> None:
    return None


def hangs(data: dict) -> float:
    """Hold the named pipe `data["fifo"]` open in this process and in a child process, and never return."""
    with open(data["fifo"], "w") as file:
        file.write("alive")
        file.flush()
        subprocess.Popen(["sleep", "3600"], stdout=file)
        while True:
            time.sleep(3600)


def leaves_a_daemon(data: dict) -> float:
    """In a new process session, start a process that holds the named pipe `data["fifo"]` open. The parent of the
    started process ends immediately."""
    if child := os.fork():
        os.waitpid(child, 0)
        return 1.0
    os.setsid()
    with open(data["fifo"], "w") as file:
        file.write("alive")
        file.flush()
        subprocess.Popen(["sleep", "3600"], stdout=file, start_new_session=True)
    os._exit(0)


def leaves_a_daemon_and_hangs(data: dict) -> float:
    leaves_a_daemon(data)
    while True:
        time.sleep(3600)


def leaves_a_daemon_and_is_killed(data: dict) -> float:
    leaves_a_daemon(data)
    return is_killed(data)


def stops_its_guard(data: dict) -> float:
    """Suspend (SIGSTOP) the parent of this process, and then the guard, which is the parent's parent. Then write to a
    named pipe."""
    parent = os.getppid()
    guard = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
    for pid in parent, guard:
        os.kill(pid, signal.SIGSTOP)
    Path(data["fifo"]).write_text("alive")
    return leaves_at_once(data)


def is_contained(data: dict) -> float:
    """Return 1 if this process can find neither the trainer's processes nor a file in the folder `data["hidden"]`."""
    hidden = data["hidden"]
    unmounted = subprocess.run(["umount", hidden], capture_output=True).returncode == 0
    others = [name for name in os.listdir("/proc") if name.isdecimal()]
    return float(not unmounted and not os.listdir(hidden) and len(others) < 10)
