"""Processes for the user's code: agents in mode subproc, and plain reward functions.

Such code may compute for minutes, hang or crash, and all episodes share one event loop. So a pool
runs each call in a process that can be killed:

    pool = WorkerPool(4)                         at most four calls at once; others wait
    async with pool.worker() as worker:
        value = await within(15, worker.call(function, *args), "...")       15 s from this line

A call that does not return, because of the time limit or a cancellation, ends with its process and
the whole process group. A process that has returned serves the next call, so global variables stay.

A call travels as a pickle, by the function's name: the process imports the function's module, not
the main script. A result comes back as JSON, because a pickle from an agent could run code in the
trainer. What the code prints goes to the run's standard error. Processes end with the trainer, and
get none of its keys.

**Not promised**: the end of a process that has left the group (setsid), or anything on Windows.
"""

import asyncio
import functools
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

logger = logging.getLogger("pocket_areal.workers")

ABANDON_SECONDS = 10.0  # for a cancelled call to end
MOST_BYTES = 2**24  # of a result as JSON
ERROR_CHARACTERS = 10_000


class WorkerDied(RuntimeError):
    """The process of a call ended before the call returned."""


async def without_exit(work: Awaitable[Any]) -> Any:
    """Await `work`, and turn a sys.exit() into RuntimeError: it would end the event loop."""
    try:
        return await work
    except SystemExit as error:
        raise RuntimeError(f"the episode called sys.exit({error.code!r})") from error


async def within(seconds: float, work: Awaitable[Any], words: str) -> Any:
    """Await `work`. After `seconds` it is cancelled, and TimeoutError(words) is raised, even if it
    ignores the cancellation and goes on."""
    task = asyncio.ensure_future(without_exit(work))
    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # counts as read
    try:
        if not (await asyncio.wait({task}, timeout=seconds))[0]:
            raise TimeoutError(words)
        return task.result()
    finally:
        if task.cancel() and not (await asyncio.wait({task}, timeout=ABANDON_SECONDS))[0]:
            logger.error("abandoned, because it ignores its cancellation: %s", words)


def check_importable(thing: Any, name: str, remedy: str) -> None:
    """Raise ValueError if `thing` cannot be sent to a worker."""
    try:
        pickle.dumps(thing)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"{name} runs in a process and cannot be pickled: {remedy}") from error


class Worker:
    """A process that runs one call after another."""

    def __init__(self) -> None:
        code = f"import sys; sys.path[:] = {sys.path}; from rollout import workers; workers.serve()"
        env = {k: v for k, v in os.environ.items() if not k.startswith("POCKET_AREAL_")}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = sys.executable, "-u", "-c", code
        self.process: Any = subprocess.Popen(command, start_new_session=True, env=env, **pipes)
        self._thread, self.busy = ThreadPoolExecutor(1), False

    async def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The result of `function(*args, **kwargs)`.

        Raises RuntimeError with the type and the text of its exception, and WorkerDied.
        """
        self.busy = True
        # Two pickles, so that one whose module is missing is read to its end.
        call = pickle.dumps(pickle.dumps((function, args, kwargs)))
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(self._thread, self._exchange, call)
        if len(answer) == MOST_BYTES:
            raise ValueError(f"a result is longer than the limit of {MOST_BYTES} bytes")
        if not answer:
            name = getattr(function, "__qualname__", function)
            raise WorkerDied(f"the process that ran {name} ended with code {self.process.wait()}")
        self.busy = False
        outcome = json.loads(answer)
        if "error" in outcome:
            raise RuntimeError(outcome["error"]) from RuntimeError(outcome["trace"])
        return outcome["value"]

    def _exchange(self, call: bytes) -> bytes:
        """Blocks its thread until the process answers, or is gone."""
        with suppress(BrokenPipeError):
            self.process.stdin.write(call)
            self.process.stdin.flush()
        return self.process.stdout.readline(MOST_BYTES)

    def kill(self) -> None:
        """End the process and its group."""
        with suppress(ProcessLookupError, PermissionError):  # an empty group, on Linux and macOS
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(BrokenPipeError), self.process:  # closes its pipes, and waits for its end
            self._thread.shutdown()


class WorkerPool:
    """At most `size` processes for one event loop, started when they are needed."""

    def __init__(self, size: int) -> None:
        self._places = asyncio.Semaphore(size)
        self._idle: list[Worker] = []

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[Worker]:
        """A process for the `with` block alone."""
        async with self._places:
            worker = self._idle.pop() if self._idle else Worker()
            if worker.process.poll() is not None:  # it died while it was idle
                worker.kill()
                worker = Worker()
            try:
                yield worker
            finally:
                if worker.busy:
                    worker.kill()
                else:
                    self._idle.append(worker)

    async def aclose(self) -> None:
        while self._idle:
            self._idle.pop().kill()


# ---- in the process


def serve() -> None:
    """Run calls until the trainer is gone."""
    parent, calls, answers = os.getppid(), os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the user's code prints is no answer
    # A process that the code forks must not answer, nor keep the pipes open.
    for pipe in (calls, answers):
        os.register_at_fork(after_in_child=functools.partial(os.close, pipe))

    def follow_trainer() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=follow_trainer, daemon=True).start()
    with open(calls, "rb") as stream, suppress(EOFError):
        while True:
            outcome = outcome_of(pickle.load(stream)) + b"\n"
            while outcome:
                outcome = outcome[os.write(answers, outcome) :]


def outcome_of(call: bytes) -> bytes:
    """Run a pickled call, and return its outcome as JSON."""
    try:
        function, args, kwargs = pickle.loads(call)
        value = {"value": function(*args, **kwargs)}
        return json.dumps(value, default=lambda scalar: scalar.item()).encode()
    except BaseException as error:  # also sys.exit()
        text = f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS]
        trace = "".join(traceback.format_exception(error))[-ERROR_CHARACTERS:]
        return json.dumps({"error": text, "trace": f"in a worker process:\n{trace}"}).encode()


# A process has one loop for all its episodes, because clients that an agent leaves open would
# complain about a closed one.
_runner = functools.cache(asyncio.Runner)


async def _alone(episode: Awaitable[Any]) -> Any:
    """Await an episode, and cancel the tasks that it leaves behind."""
    try:
        return await episode
    finally:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


def run_agent(agent: Any, data: dict[str, Any], base_url: str, api_key: str) -> Any:
    """Run an agent's episode. Clients that it makes without arguments find the session in the
    environment, and pass by an HTTP proxy."""
    known = filter(None, [os.environ.get("NO_PROXY"), urlsplit(base_url).hostname])
    os.environ |= {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),  # its SDK appends /v1/messages
        "ANTHROPIC_API_KEY": api_key,
        "NO_PROXY": ",".join(known),
    }
    return _runner().run(
        _alone(agent.run(data, base_url=base_url, api_key=api_key, http_client=None))
    )
