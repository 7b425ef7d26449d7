"""A worker runs the user's code in a separate process, so that the trainer can kill this code.

Reward functions and agents in mode subproc are the user's code. The user's code may compute for a long time, hang, or
crash. All episodes of a run share one event loop, and the user's code must not block it. The event loop sends each call
of the user's code to a worker, and awaits the result.

    pool = WorkerPool(4)                        at most four calls at once; later calls wait in order
    async with pool.worker() as worker:         starts a process, or takes an idle one
        value = await within(15, worker.call(function, *args), "...")       the 15 seconds begin at this line

**One call at a time.** While a block `async with pool.worker()` uses a worker, no other block gets this worker. If a
cancellation or a time limit ends an `async with` block before its call has returned, the pool kills the worker. The
pool starts a new worker for a later call. If a worker crashes, only the call that ran in this worker fails.

**How a worker ends.** A worker is a pair of processes, a guard and its child. Reward functions run in the child, and
episodes in the child or in its forks. A socket connects the guard and its child with the trainer. The guard kills the
other processes of the worker when the child ends, when the trainer closes the socket, and when the trainer ends (even
by kill -9). On Linux the guard is the subreaper of all its descendants: if a descendant's parent ends, the guard
becomes the new parent. Therefore, on Linux, the guard kills even a descendant that has a process session of its own
(`setsid`). Processes that the user's code starts do not inherit the socket. When the guard and its child have ended,
the socket closes, so the trainer immediately detects the worker's end. The signal of Ctrl-C reaches only the trainer,
because each worker has its own process group.

**Messages.** A call goes through the socket as a pickle. The pickle contains the function's name and not its code, so
the worker imports the function's module. The worker does not import the main script, because the script would import
torch in every worker. Functions and classes that a call sends to a worker must not be defined in `__main__`. A result
comes back as JSON, because a pickle from an agent could run code in the trainer. A numpy or torch scalar in a result
becomes a plain number. If a function raises an exception, the caller gets a RuntimeError with the exception's type and
text. The cause of the RuntimeError contains the worker's traceback. A worker of reward functions runs many calls one
after another, so global variables keep the changes of earlier calls.

**Agents.** Each episode of an agent gets a new process. In a reused process, a thread of an earlier agent could still
run, read the key of the next session, or answer in place of the next agent. A fork takes about 20 ms, because the
worker's child has already imported the agent's module. If `can_fork` forbids a fork, each episode gets a new worker.
`run_agent` writes the URL and the key of the session to environment variables that the SDKs of OpenAI and Anthropic
read. An agent may use synchronous clients, because nothing else runs in its process.

**What is not promised.** Workers need process groups, so workers do not run on Windows. If the user's code kills its
guard, processes that this code has started may continue to run. With the option `prefix`, a worker can run inside a
container. When the container ends, all processes of the worker end (SECURITY.md).
"""

import asyncio
import ctypes
import functools
import importlib
import json
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

# ---- code of the trainer

logger = logging.getLogger("pocket_areal.workers")

ERROR_CHARACTERS = 10_000  # maximum length of an exception's text, and of its traceback
MOST_BYTES = 2**24  # maximum size of a call's result as JSON, in bytes
ABANDON_SECONDS = 10.0  # seconds that a call may take to end after its cancellation
END_SECONDS = 10.0  # seconds that a guard may take to end after its worker's socket is closed


class WorkerDied(RuntimeError):
    """The process that ran a call ended before the call returned."""


async def without_exit(work: Awaitable[Any]) -> Any:
    """Return the result of `work`. If the work calls sys.exit(), raise RuntimeError.

    In an asyncio task, a SystemExit would end the event loop and therefore every episode.
    """
    try:
        return await work
    except SystemExit as error:
        raise RuntimeError(f"the episode called sys.exit({error.code!r})") from error


async def within(seconds: float, work: Coroutine[Any, Any, Any], words: str) -> Any:
    """Return the result of `work`. If the work takes longer than `seconds`, cancel it and raise TimeoutError(words).

    If the work ignores its cancellation for ABANDON_SECONDS, the function logs an error and stops waiting for the work.
    """
    task = asyncio.ensure_future(without_exit(work))
    # If `work` raises an exception after the caller was cancelled, only this callback reads the exception. The library
    # asyncio prints the traceback of an exception that no code reads.
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        if not (await asyncio.wait({task}, timeout=seconds))[0]:
            raise TimeoutError(words)
        return task.result()
    finally:
        if not task.done() and not (
            task.cancel() and (await asyncio.wait({task}, timeout=ABANDON_SECONDS))[0]
        ):
            logger.error("abandoned, because it ignores its cancellation and still runs: %s", words)


def check_importable(thing: Any, name: str, remedy: str) -> None:
    """Raise ValueError if `thing` cannot be sent to a worker. If `thing` cannot be pickled, the error's message
    contains `remedy`."""
    try:
        pickle.dumps(thing)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{name} runs in another process and cannot be pickled: {remedy} ({error})"
        ) from error
    if getattr(thing, "__module__", None) == "__main__":
        raise ValueError(
            f"{name} is defined in the script itself, which workers do not run; move it to a module"
        )


class Worker:
    """A worker: the guard, its child, and the socket that connects the trainer with them."""

    def __init__(
        self, process: subprocess.Popen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        # Whether the worker must get no further call, because its last call has not returned, or was its last one.
        self._busy = False

    @classmethod
    async def start(cls, prefix: Sequence[str] = (), fork: bool = False) -> "Worker":
        """Start a process that runs `serve(fd, fork)`. The process's command line begins with the words of `prefix`,
        such as "env"."""
        ours, theirs = socket.socketpair()
        with theirs:
            streams = await asyncio.open_unix_connection(sock=ours)
            fd = theirs.fileno()
            # Python ignores entries of sys.path that are not strings.
            paths = [path for path in sys.path if isinstance(path, str)]
            code = f"import sys; sys.path[:] = {paths}; from rollout import workers; workers.serve({fd}, {fork})"
            command = [*prefix, sys.executable, "-c", code]
            env = {
                name: value
                for name, value in os.environ.items()
                if not name.startswith("POCKET_AREAL_")
            }
            env["PYTHONUNBUFFERED"] = (
                "1"  # a worker may be killed at any time, and its printed text must not be lost
            )
            process = subprocess.Popen(
                command, pass_fds=[fd], stdin=subprocess.DEVNULL, start_new_session=True, env=env
            )
        return cls(process, *streams)

    @property
    def free(self) -> bool:
        """Return whether the worker's process runs and can take a call."""
        return not self._busy and self._process.poll() is None

    async def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run `function(*args, **kwargs)` in the worker and return the result.

        Raises RuntimeError if the function raises an exception or its result is too large. Raises WorkerDied if the
        worker's process ends before the call has returned.
        """
        names = {getattr(thing, "__module__", None) or "builtins" for thing in (function, *args)}
        payload = pickle.dumps((sorted(names), pickle.dumps((function, args, kwargs))))
        self._busy = True
        try:
            self._writer.write(len(payload).to_bytes(8, "big") + payload)
            await self._writer.drain()
            size = int.from_bytes(await self._reader.readexactly(8), "big")
            if size > MOST_BYTES:
                raise RuntimeError(
                    f"the result of a call has {size:,} bytes, but at most {MOST_BYTES:,} are allowed"
                )
            outcome = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            with suppress(
                subprocess.TimeoutExpired
            ):  # the socket is closed, so the worker's processes end soon
                await asyncio.to_thread(self._process.wait, timeout=1)
            name, code = getattr(function, "__qualname__", function), self._process.returncode
            raise WorkerDied(f"the process that ran {name} ended with code {code}") from error
        answer = json.loads(outcome)
        self._busy = answer["last"]
        if "error" in answer:
            raise RuntimeError(answer["error"]) from RuntimeError(answer["note"])
        return answer["value"]

    async def end(self) -> None:
        """End the worker's processes and every process that they have started."""
        self._writer.transport.abort()  # `close` would wait until the worker has read all that was sent to it
        with suppress(ConnectionError):
            await self._writer.wait_closed()
        try:
            await asyncio.to_thread(self._process.wait, END_SECONDS)
        except subprocess.TimeoutExpired:  # the user's code may have suspended the guard (SIGSTOP)
            logger.error(
                "a worker has not ended %g s after its socket was closed, so it is killed",
                END_SECONDS,
            )
            self._process.kill()
            self._process.wait()


class WorkerPool:
    """A pool of at most `size` workers for one event loop. Each worker starts only when a call needs it.

    If `fresh` is false, later `async with` blocks use the same workers. If `fresh` is true, each call gets a fork of a
    worker. Where forks are impossible (on macOS, with a `prefix`, or because of `can_fork`), each block gets a new
    worker instead. `prefix` is passed to Worker.start.
    """

    def __init__(self, size: int, fresh: bool = False, prefix: Sequence[str] = ()) -> None:
        self._places = asyncio.Semaphore(size)
        fork = fresh and not prefix and sys.platform == "linux"
        self._reuse, self._start = fork or not fresh, functools.partial(Worker.start, prefix, fork)
        self._idle: list[Worker] = []  # the most recently used worker is the last one

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[Worker]:
        """Wait for a free worker and yield it to the `with` block."""
        async with self._places:
            worker = self._idle.pop() if self._idle else await self._start()
            if not worker.free:  # the worker's process ended while it was idle
                await worker.end()
                worker = await self._start()
            try:
                yield worker
            finally:
                if worker.free and self._reuse:
                    self._idle.append(worker)
                else:
                    await worker.end()

    async def aclose(self) -> None:
        """End the idle workers. A busy worker ends when the event loop cancels the worker's call."""
        while self._idle:
            await self._idle.pop().end()


# ---- code of the worker

# Two properties of a process on Linux (man 2 prctl):
PR_SET_PDEATHSIG = 1  # the signal that the process gets when its parent ends
PR_SET_CHILD_SUBREAPER = (
    36  # 1: the process becomes the new parent of a descendant whose parent has ended
)


def guard(channel: socket.socket) -> None:
    """Fork this process. The parent becomes the guard, and only the child returns from this function."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if not child:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setpgid(
            0, 0
        )  # the child gets its own process group, so a signal to this group does not reach the guard
        return

    def follow_trainer() -> None:
        (hangup := select.poll()).register(channel, 0)
        hangup.poll()
        os.kill(child, signal.SIGKILL)

    threading.Thread(target=follow_trainer, daemon=True).start()
    end_like(wait_for(child))


def prctl(option: int, value: int) -> None:
    """Set a property of this process, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def wait_for(child: int) -> int:
    """Wait until the process `child` ends, kill its process group and all other children of this process, and return
    the exit code of `child`."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    # If the group is empty, `killpg` raises ProcessLookupError or, on macOS, PermissionError.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    while left := children_of(os.getpid()):
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(left[0], 0)
    return code


def children_of(parent: int) -> list[int]:
    """Return the ids of a process's children. On a system without /proc, return an empty list."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process may have ended since `glob` found its path
            if int(path.read_bytes().rpartition(b")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found


def end_like(code: int) -> NoReturn:
    """End this process with the exit code of another process. If a signal has ended the other process, the same signal
    ends this process."""
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(fd: int, fork: bool) -> NoReturn:
    """Read calls from the socket `fd`, run them in order, and write their outcomes, until the trainer closes the
    socket.

    If `fork` is true, this process imports the modules of a call. Then the call runs in a fork of this process, which
    need not import the modules again.
    """
    channel = socket.socket(fileno=fd)
    channel.set_inheritable(False)
    guard(channel)
    # A process that the user's code forks must close its copy of the socket. As long as one copy of the socket is open,
    # the trainer cannot detect the end of the worker. `socket.socket.close` leaves the socket open while `stream`
    # exists, so the forked process calls `SocketType.close`.
    os.register_at_fork(after_in_child=functools.partial(socket.SocketType.close, channel))
    if fork:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    with channel.makefile("rb") as stream, suppress(ConnectionError):
        while head := stream.read(8):
            modules, call = pickle.loads(stream.read(int.from_bytes(head, "big")))
            if fork:
                import_all(modules)
            # If a fork is impossible, this process runs the call itself, and gets no further call.
            outcome = run_in_fork(call) if fork and can_fork() else outcome_of(call, last=fork)
            channel.sendall(len(outcome).to_bytes(8, "big") + outcome)
    os._exit(0)


def import_all(modules: list[str]) -> None:
    """Import modules. If an import fails, the call imports the module again and reports the error."""
    for module in modules:
        with suppress(BaseException):
            importlib.import_module(module)


def can_fork() -> bool:
    """Return whether an episode can run in a fork of this process.

    A fork would lack the threads that an imported module has started. A fork could not wait for the processes that a
    module has started. If a module handles SIGCHLD, this process might not see the end of the fork.
    """
    alone = threading.active_count() == 1 and not children_of(os.getpid())
    return alone and signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL


def run_in_fork(call: bytes) -> bytes:
    """Run a pickled call in a fork of this process. Return the call's outcome after the fork and its descendants have
    ended. If the fork ends without an outcome, this process ends in the same way."""
    with open(os.memfd_create("outcome"), "w+b") as file:
        if not (child := os.fork()):
            code = 1
            try:
                prepare_fork()
                me, outcome = os.getpid(), outcome_of(call)
                if (
                    os.getpid() == me
                ):  # if the agent has forked this process, only the first process may answer
                    file.write(outcome)
                    file.flush()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        code = wait_for(child)
        file.seek(0)
        outcome = file.read()
    return outcome if outcome and code == 0 else end_like(code)


def prepare_fork() -> None:
    """Give a fork its own process group and its own random seeds, and let it end when the worker ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpgid(0, 0)
    # Without new seeds, all episodes of a worker would draw the same random numbers. Python's module `random` gets a
    # new seed in every fork.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.seed()
        torch.set_num_threads(
            1
        )  # a fork has no copies of torch's threads, and would wait for them for ever


def outcome_of(call: bytes, last: bool = False) -> bytes:
    """Run a pickled call, and return the call's outcome as JSON. Unlike a pickle, JSON cannot run code in the trainer.

    `last` says whether this process must not run a further call.
    """
    try:
        function, args, kwargs = pickle.loads(call)
        answer = {"value": function(*args, **kwargs), "last": last}
        return json.dumps(answer, default=lambda scalar: scalar.item()).encode()
    except (
        BaseException
    ) as error:  # BaseException includes the SystemExit of sys.exit() in user code
        try:
            text = str(error)[:ERROR_CHARACTERS]
        except Exception as second:
            text = f"its text cannot be made: {type(second).__name__}"
        note = (
            "in a worker process:\n"
            + "".join(traceback.format_exception(error))[-ERROR_CHARACTERS:]
        )
        return json.dumps(
            {"error": f"{type(error).__name__}: {text}", "note": note, "last": last}
        ).encode()


# `_runner()` returns the Runner of this worker's only event loop. The loop is never closed, because `Runner.close`
# waits for tasks even if they ignore their cancellation. When the worker's process ends, the loop's tasks end as well.
_runner = functools.cache(asyncio.Runner)


async def _alone(episode: Coroutine[Any, Any, Any]) -> Any:
    """Wait until an episode has ended, then cancel the asyncio tasks that are still running."""
    try:
        return await episode
    finally:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


def bypass_http_proxy(*hosts: str) -> dict[str, str]:
    """Return the environment variables with which requests to `hosts` bypass any HTTP proxy that the environment
    sets."""
    listed = [
        *hosts,
        *os.environ.get("NO_PROXY", "").split(","),
        *os.environ.get("no_proxy", "").split(","),
    ]
    names = (
        ["*"] if "*" in listed else filter(None, dict.fromkeys(listed))
    )  # "*" means all hosts, and stands alone
    return dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(names))


def run_agent(
    agent: Any, data: dict[str, Any], base_url: str, api_key: str, ours: bool = True
) -> Any:
    """Run `agent.run` in a worker, with the session's URL and key in the environment. Return the rewards.

    If `ours` is true, the host of base_url belongs to this run, and requests to this host bypass any HTTP proxy that
    environment variables set.
    """
    host = urlsplit(base_url).hostname or ""
    os.environ |= {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix(
            "/v1"
        ),  # the Anthropic SDK appends /v1/messages to this URL
        "ANTHROPIC_API_KEY": api_key,
        **bypass_http_proxy(*[host] * ours),
    }
    return _runner().run(
        _alone(agent.run(data, base_url=base_url, api_key=api_key, http_client=None))
    )
