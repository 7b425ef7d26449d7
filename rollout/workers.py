"""Workers: code that is not ours, in processes that can be ended.

Two kinds of code come from the user and may compute for long, hang, or die: reward functions, and agents in mode
subproc. All episodes of a run share one event loop, so such code gets a process of its own there and is awaited here.

The rule: whoever enters `pool.worker()` has the worker alone, and it is free again only when its call has come back. A
block that is left while the worker still computes (cancelled, out of time) ends the worker, and with it what it was
computing; the next one starts afresh. A worker that dies by itself fails the call it was running, and only that one.

    pool = WorkerPool(4)                        at most four at a time; the others wait, first come first served
    async with pool.worker() as worker:         starts a process, or takes an idle one
        async with time_limit(15, "..."):       so waiting for a worker costs nobody their time
            value = await worker.call(function, *args)

How a worker ends. Its parent holds the other end of a socket, and the worker has a thread that reads it: at its end
it kills its whole process group, itself included. So a worker is gone when its parent is, however that ended (kill -9
too) and whatever the worker computes, together with all processes that its code has started. None of these holds the
worker's end, so its parent sees it die, too. A group of its own also keeps Ctrl-C away from it: the parent decides.

What crosses the socket is pickled: the function by its name, arguments and result by value. An exception comes back
as itself with the worker's traceback as a note, or as a RuntimeError with its text where it cannot be pickled. A worker
imports the module of the function and never the script that was started, which would load torch in each of them: so
keep heavy imports out of such modules, and the functions and classes out of `__main__`. It serves many calls, one
after another; what a call leaves in the globals of its module, or in the environment, the next one finds.

An agent in a worker (`run_agent`) finds its session in the environment, where the SDKs look for it, so that a client
made without arguments is the right one, and synchronous clients are welcome: nothing else runs in that process.

Why not an executor of the standard library, as AReaL has it: it cannot end what it runs, one dead process breaks it
for all, and an exception that does not unpickle (those of the openai SDK do not) breaks it as well.

It promises nothing on systems without process groups (Windows), and a worker whose code holds the interpreter's lock
for ever outlives a parent that was killed.
"""

import asyncio
import functools
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

# ---- in the parent


class WorkerDied(RuntimeError):
    """The process of a call ended before the call did."""


@asynccontextmanager
async def time_limit(seconds: float, words: str) -> AsyncIterator[None]:
    """Cancels its block after `seconds` and raises TimeoutError(words); one that the block itself raises passes."""
    try:
        async with asyncio.timeout(seconds) as clock:
            yield
    except TimeoutError as error:
        if clock.expired():
            raise TimeoutError(words) from error
        raise


def check_importable(thing: Any, name: str, remedy: str) -> None:
    """Raises ValueError, with the remedy, for a function or object that a worker could not be given."""
    try:
        pickle.dumps(thing)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(f"{name} runs in another process and cannot be pickled: {remedy} ({error})") from error
    if getattr(thing, "__module__", None) == "__main__":
        raise ValueError(f"{name} is defined in the script itself, which workers do not run; give it a module")


class Worker:
    """One process, and the socket to it; `start` makes it."""

    def __init__(self, process: subprocess.Popen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self._busy = False  # a call was sent and has not come back

    @classmethod
    async def start(cls) -> "Worker":
        ours, theirs = socket.socketpair()
        with theirs:
            streams = await asyncio.open_unix_connection(sock=ours)
            fd = theirs.fileno()
            paths = [path for path in sys.path if isinstance(path, str)]  # import passes over what is none
            code = f"import sys; sys.path[:] = {paths}; from rollout import workers; workers.serve({fd})"
            process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=[fd], stdin=subprocess.DEVNULL, start_new_session=True
            )
        return cls(process, *streams)

    @property
    def free(self) -> bool:
        """Whether it can take a call."""
        return not self._busy and self._process.poll() is None

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`function(*args, **kwargs)` over there. Raises what it raises, and WorkerDied if the process ends."""
        payload = pickle.dumps((function, args, kwargs))
        self._busy = True
        try:
            self._writer.write(len(payload).to_bytes(8, "big") + payload)
            await self._writer.drain()
            size = int.from_bytes(await self._reader.readexactly(8), "big")
            outcome = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            with suppress(subprocess.TimeoutExpired):  # its socket is closed: it has ended, or is about to
                await asyncio.to_thread(self._process.wait, timeout=1)
            name, code = getattr(function, "__qualname__", function), self._process.returncode
            raise WorkerDied(f"the process that ran {name} ended with code {code}") from error
        self._busy = False
        succeeded, value = pickle.loads(outcome)
        if not succeeded:
            raise value
        return value

    async def end(self) -> None:
        """Kill it and what it has started."""
        with suppress(ProcessLookupError, PermissionError):  # macOS: no permission to kill the dead
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


class WorkerPool:
    """At most `size` workers of one event loop, started when they are needed and kept. `aclose` ends the idle ones;
    the others end with the calls they run, which a loop that ends cancels first (inference/wire.py, PerLoop)."""

    def __init__(self, size: int) -> None:
        self._places = asyncio.Semaphore(size)
        self._idle: list[Worker] = []  # used last last

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[Worker]:
        """A free worker for the block alone."""
        async with self._places:
            worker = self._idle.pop() if self._idle else await Worker.start()
            if not worker.free:  # it died while it was idle
                await worker.end()
                worker = await Worker.start()
            try:
                yield worker
            finally:
                if worker.free:
                    self._idle.append(worker)
                else:
                    await worker.end()

    async def aclose(self) -> None:
        while self._idle:
            await self._idle.pop().end()


# ---- in the worker


def serve(fd: int) -> None:
    """A worker's life: calls come in by the socket `fd`, outcomes go out in the same order, until it is closed."""
    channel = socket.socket(fileno=fd)
    channel.set_inheritable(False)
    # A child that holds the socket would hide our death. (The close() of socket.socket waits for the listener's file.)
    os.register_at_fork(after_in_child=functools.partial(socket.SocketType.close, channel))
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        with channel.makefile("rb") as stream, suppress(ConnectionError):
            while head := stream.read(8):
                calls.put(stream.read(int.from_bytes(head, "big")))
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=listen, name="parent", daemon=True).start()
    while True:
        outcome = outcome_of(calls.get())
        channel.sendall(len(outcome).to_bytes(8, "big") + outcome)


def outcome_of(payload: bytes) -> bytes:
    """Run a pickled call; (True, its result) or (False, its exception), pickled."""
    try:
        function, args, kwargs = pickle.loads(payload)
        return pickle.dumps((True, function(*args, **kwargs)))
    except BaseException as error:  # the one place that answers for the caller's code, sys.exit() included
        note = "in a worker process:\n" + "".join(traceback.format_exception(error))
        if isinstance(error, Exception):
            error.add_note(note)
            with suppress(Exception):  # there are many ways not to be picklable
                outcome = pickle.dumps((False, error))
                pickle.loads(outcome)
                return outcome
        substitute = RuntimeError(f"{type(error).__name__}: {error}")
        substitute.add_note(note)
        return pickle.dumps((False, substitute))


@functools.cache
def _runner() -> asyncio.Runner:
    """One event loop for a worker's life: an SDK's client of the last episode may be collected,
    and closed, in the next."""
    return asyncio.Runner()


async def _alone(episode: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await episode
    finally:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


def run_agent(agent: Any, data: dict[str, Any], base_url: str, api_key: str, ours: bool = True) -> Any:
    """An agent's episode in a worker: what `agent.run` returns, with the session in the environment of the SDKs. For a
    server of `ours` an HTTP proxy of the environment is not used."""
    direct = {*os.environ.get("NO_PROXY", "").split(","), urlsplit(base_url).hostname if ours else None}
    no_proxy = ",".join(filter(None, direct))
    os.environ |= {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),  # that SDK appends /v1/messages
        "ANTHROPIC_API_KEY": api_key,
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }
    return _runner().run(_alone(agent.run(data, base_url=base_url, api_key=api_key, http_client=None)))
