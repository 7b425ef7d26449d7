"""Run the user's code in processes: agents in mode subproc, and plain reward functions.

User code may compute for minutes, hang or crash. In the episodes' shared event loop it would stop
every episode. So a pool runs each function call in a process that can be killed:

    async with pool.worker() as call:                       at most `size` at once; others wait
        value = await within(15, call(function, *args), "...")       15 s from this line

After a successful `with` block, the process serves later blocks, and global variables keep their
values. After an exception, a timeout or a cancellation, the process and its whole process group are
killed.

A call is sent as a pickle that names the function. The process imports the function's module, but
not the main script, so code defined there is refused. A result comes back as JSON, because an
agent's pickle could run code in the trainer. Printed output and tracebacks go to the run's standard
error. Worker processes end with the trainer, and none gets the trainer's keys for servers and
proxy.

A child process that has left the process group (setsid) is not killed. An inline agent or a
coroutine reward function is only cancelled, and keeps running if it ignores the cancellation.
Windows is not supported.
"""

import asyncio
import functools
import json
import os
import pickle
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from subprocess import PIPE, Popen
from typing import Any

from inference.process import follow_parent

CODE = "import sys; sys.path[:] = {}; from rollout import workers; workers.serve({})"


async def within(seconds: float, work: Awaitable[Any], words: str) -> Any:
    """Await `work`. After `seconds`, cancel it and raise TimeoutError(words)."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work
    except TimeoutError as error:
        if limit.expired():
            raise TimeoutError(words) from error
        raise


class Worker:
    """A process that runs one call after another, and a thread that waits for the answers. We do
    not use uvloop's subprocesses, because they would outlive the event loop."""

    def __init__(self) -> None:
        words = sys.executable, "-u", "-c", CODE.format(sys.path, os.getpid())
        env = {k: v for k, v in os.environ.items() if not k.startswith("POCKET_AREAL_")}
        self.process: Any = Popen(words, stdin=PIPE, stdout=PIPE, start_new_session=True, env=env)
        self._thread = ThreadPoolExecutor(1)

    async def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a function in the process, and return its result. Raises RuntimeError with the reason
        if the function raises or the process ends."""
        for code in (function, *args):
            if getattr(code, "__module__", "") == "__main__":
                raise ValueError(f"move {code} to a module, which another process can import")
        call = pickle.dumps((function, args, kwargs))
        loop = asyncio.get_running_loop()
        try:
            answer = await loop.run_in_executor(self._thread, self._exchange, call)
        except asyncio.CancelledError:
            self.kill()  # at once, so that the agent makes no call to an ended session
            raise
        if not answer:
            code = self.process.wait()
            name = getattr(function, "__qualname__", function)
            raise RuntimeError(f"the process that ran {name} ended with code {code}")
        value, error = json.loads(answer)
        if error:
            raise RuntimeError(error)
        return value

    def _exchange(self, call: bytes) -> bytes:
        with suppress(BrokenPipeError):
            self.process.stdin.write(b"%d\n%s" % (len(call), call))
            self.process.stdin.flush()
        return self.process.stdout.readline()

    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # raised if the process group is empty
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(BrokenPipeError), self.process:  # closes the pipes, and waits for the end
            self._thread.shutdown()


class WorkerPool:
    """A pool of at most `size` processes for one event loop."""

    def __init__(self, size: int) -> None:
        self._places = asyncio.Semaphore(size)
        self._idle: list[Worker] = []

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
        """Reserve a process for the `with` block, and yield `call`, which runs a function there."""
        async with self._places:
            worker = self._idle.pop() if self._idle else Worker()
            try:
                yield worker.call
            except BaseException:
                worker.kill()
                raise
            self._idle.append(worker)

    async def aclose(self) -> None:
        while self._idle:
            self._idle.pop().kill()


# ---- in the process


def serve(trainer: int) -> None:
    """Run the calls that arrive on stdin, until the process with the id `trainer` is gone."""
    calls, answers = os.dup(0), os.dup(1)
    # A child that outlives this process must not keep the pipe open, or the trainer would wait for
    # an answer.
    os.register_at_fork(after_in_child=lambda: os.close(answers))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the user's code prints must not look like an answer

    # Python waits for the watching thread, which is no daemon. So this process ends only when the
    # thread kills the process group, with all processes that agents have left running.
    follow_parent(lambda: os.killpg(0, signal.SIGKILL), trainer, daemon=False)
    with open(calls, "rb") as stream, open(answers, "wb") as out:
        while size := stream.readline():
            out.write(outcome_of(stream.read(int(size))) + b"\n")
            out.flush()


def outcome_of(call: bytes) -> bytes:
    try:
        function, args, kwargs = pickle.loads(call)
        outcome = function(*args, **kwargs), None
        return json.dumps(outcome, default=lambda scalar: scalar.item()).encode()
    except BaseException as error:  # also sys.exit()
        traceback.print_exc()
        return json.dumps([None, f"{type(error).__name__}: {error}"]).encode()


# A worker process has one event loop for all its episodes. If each episode closed a loop of its
# own, the clients that an agent leaves open would report "Event loop is closed".
_runner = functools.cache(asyncio.Runner)


def run_agent(agent: Any, data: dict[str, Any], base_url: str, api_key: str) -> Any:
    """Run an episode in a worker process, and return what the agent returns. SDK clients that the
    agent makes without arguments find the session's URL and key in environment variables."""
    os.environ |= {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),  # Anthropic's SDK appends /v1/messages
        "ANTHROPIC_API_KEY": api_key,
    }
    return _runner().run(agent.run(data, base_url=base_url, api_key=api_key, http_client=None))
