"""Tests of rewards: a reward is a finite number, and a reward function that hangs, crashes or is slow does not harm
other episodes."""

import asyncio
import importlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT

from rollout import workers
from rollout.reward import AsyncRewardWrapper, parse_rewards
from rollout.workers import WorkerDied, WorkerPool

REWARDS = '''
import os, signal, sys

def equals(prompt, completion, prompt_ids, completion_ids, answer, **data):
    return completion == answer

def nothing(*args):
    return None

def broken(*args):
    raise KeyError("no answer in the data")

def process_id(*args):
    return os.getpid()

def columns(*args, function, self):
    return function + self

class NoText(Exception):
    def __str__(self):
        raise ValueError

def fails_without_a_text(*args):
    raise NoText

def fails_with_a_long_text(*args):
    raise KeyError("x" * 10_000_000)

def torch_is_there(*args):
    return "torch" in sys.modules

def hang(fifo):
    """Holds the fifo open, and never returns."""
    with open(fifo, "w") as file:
        file.write("alive")
        file.flush()
        while True:
            signal.pause()

def hang_in_a_daemon(fifo):
    """Holds the fifo open in a process session of its own, and never returns."""
    if not os.fork():
        os.setsid()
        os._exit(0) if os.fork() else hang(fifo)
    while True:
        signal.pause()

def compute(fifo):
    """Holds the fifo open, and computes for ever."""
    with open(fifo, "w") as file:
        file.write("alive")
        file.flush()
        while True:
            pass

def forks_and_dies(fifo, generations):
    """Ends its process at once; a forked child or grandchild lives on and holds the fifo open."""
    for _ in range(generations):
        if os.fork():
            os._exit(7)
    hang(fifo)
'''


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """A module of reward functions that worker processes can import."""
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "some_rewards.py").write_text(REWARDS)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("some_rewards")
    sys.path.remove(str(folder))


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    """The path of a named pipe. A reader reaches the pipe's end when no process holds the pipe open."""
    os.mkfifo(tmp_path / "fifo")
    return str(tmp_path / "fifo")


def read_until_gone(fifo: str | int) -> str:
    with open(fifo) as file:
        return file.read()


NUMBERS = [
    *(1, 1.0, True, np.float32(1), np.float64(1), np.int64(1), np.bool_(True), np.array(1.0)),
    *(
        torch.tensor(1),
        torch.tensor(1.0),
        torch.tensor(True),
        torch.tensor(1.0, dtype=torch.bfloat16),
    ),
]


@pytest.mark.parametrize(
    "value", NUMBERS, ids=lambda v: f"{type(v).__name__} {getattr(v, 'dtype', '')}"
)
def test_every_kind_of_number_is_a_reward(value: Any) -> None:
    """Numbers and bools of Python are valid rewards, and so are scalars of numpy and torch."""
    assert parse_rewards(value) == 1.0
    assert type(parse_rewards(value)) is float
    assert parse_rewards({"chatcmpl-1": value, "chatcmpl-2": 0}) == {
        "chatcmpl-1": 1.0,
        "chatcmpl-2": 0.0,
    }


def test_none_says_that_the_agent_set_its_rewards_itself() -> None:
    """A return value of None means that the agent has posted its rewards to the proxy. A return value of None does not
    stand for a reward of 0."""
    assert parse_rewards(None) is None


@pytest.mark.parametrize(
    "value",
    ["1", [1.0], (1.0,), torch.ones(2), np.ones(1), 1j, object(), {"a": None}, Decimal(1)],
    ids=lambda v: type(v).__name__,
)
def test_what_is_no_number_is_named(value: Any) -> None:
    """A value that is not a number raises an error that names the value's type and describes the allowed values."""
    with pytest.raises(
        TypeError,
        match=r"a reward is a number, not (str|list|tuple|Tensor|ndarray|complex|obj|None|Dec)",
    ):
        parse_rewards(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), torch.tensor(float("nan"))])
def test_a_reward_is_finite(value: Any) -> None:
    """A reward of nan or inf raises an error, because one nan would make every weight of the model nan."""
    with pytest.raises(ValueError, match="finite"):
        parse_rewards(value)


@pytest.mark.anyio
async def test_a_plain_function_runs_in_another_process(rewards: ModuleType) -> None:
    """A plain reward function runs in a worker process. The function's arguments are the texts, the token ids and the
    sample."""
    assert (
        await AsyncRewardWrapper(rewards.equals)("2+2?", "4", [1], [2], answer="4", extra=None)
        == 1.0
    )
    assert await AsyncRewardWrapper(rewards.process_id)() != os.getpid()


@pytest.mark.anyio
async def test_a_column_of_the_data_may_have_any_name(rewards: ModuleType) -> None:
    """A column of the data may have the name of a parameter of this project's functions."""
    assert await AsyncRewardWrapper(rewards.columns)("", "", [], [], function=1, self=2) == 3.0


@pytest.mark.anyio
async def test_every_exception_is_reported(rewards: ModuleType) -> None:
    """If a function in a worker raises an exception, the caller's error names the exception's type, even if the text of
    the exception is long or cannot be made."""
    with pytest.raises(RuntimeError, match="NoText: its text cannot be made: ValueError"):
        await AsyncRewardWrapper(rewards.fails_without_a_text)()
    with pytest.raises(RuntimeError, match="KeyError: 'xxx") as error:
        await AsyncRewardWrapper(rewards.fails_with_a_long_text)()
    assert len(str(error.value)) < 20_000


@pytest.mark.anyio
async def test_a_worker_that_reads_nothing_is_killed(
    rewards: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a worker's process never reads its call, the time limit still ends the call, even if the call is larger than
    the buffer of the socket."""
    monkeypatch.setattr(workers, "END_SECONDS", 0.2)
    pool = workers.WorkerPool(1, prefix=["sh", "-c", "exec sleep 1000"])
    async with asyncio.timeout(60):
        for _ in range(2):  # the second call needs the place of the first
            with pytest.raises(TimeoutError):
                async with pool.worker() as worker:
                    await workers.within(
                        0.2, worker.call(rewards.equals, b"x" * 10_000_000), "the call"
                    )


SCRIPT = """
print("the script runs")
import asyncio, some_rewards
from rollout import reward
if __name__ == "__main__":
    print(asyncio.run(reward.AsyncRewardWrapper(some_rewards.torch_is_there)()))
"""


def test_workers_do_not_run_the_trainers_script(rewards: ModuleType, tmp_path: Path) -> None:
    """A worker imports the module of the reward function, and does not run the trainer's script."""
    (tmp_path / "script.py").write_text(SCRIPT)
    paths = os.pathsep.join([str(ROOT), str(Path(rewards.__file__ or "").parent)])
    ended = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
    )
    assert ended.stdout.decode().splitlines() == ["the script runs", "0.0"], ended.stderr.decode()


@pytest.mark.anyio
async def test_a_coroutine_function_is_awaited_where_it_is() -> None:
    """A reward function that is a coroutine function runs in the caller's event loop, because it may hold network
    connections."""

    async def judge(prompt: str) -> int:
        return os.getpid()

    assert await AsyncRewardWrapper(judge)("x") == os.getpid()


@pytest.mark.anyio
async def test_a_timed_out_reward_has_ended(rewards: ModuleType, fifo: str) -> None:
    """If a reward function exceeds its time limit, the worker process that runs it is ended. The error names the
    function and the limit in seconds."""
    gone = asyncio.create_task(asyncio.to_thread(read_until_gone, fifo))
    with pytest.raises(TimeoutError, match="hang took longer than 1 s"):
        await AsyncRewardWrapper(rewards.hang, timeout_seconds=1)(fifo)
    assert await asyncio.wait_for(gone, 30) == "alive"


@pytest.mark.anyio
async def test_hanging_rewards_leave_the_pool_free(rewards: ModuleType) -> None:
    """If more calls hang than the pool has workers, the pool still serves the next call."""
    hang = AsyncRewardWrapper(time.sleep, timeout_seconds=0.1)
    results = await asyncio.gather(*(hang(3600) for _ in range(6)), return_exceptions=True)
    assert {type(result) for result in results} == {TimeoutError}
    assert await AsyncRewardWrapper(rewards.equals)("", "4", [], [], answer="4") == 1.0


@pytest.mark.anyio
async def test_a_cancelled_episode_takes_its_reward_with_it(rewards: ModuleType, fifo: str) -> None:
    """If an episode is cancelled, the worker that computes the episode's reward is ended."""
    running = asyncio.create_task(AsyncRewardWrapper(rewards.hang, timeout_seconds=60)(fifo))
    with await asyncio.to_thread(
        open, fifo
    ) as file:  # open() returns as soon as the worker opens the pipe
        assert await asyncio.to_thread(file.read, 5) == "alive"
        running.cancel()
        assert await asyncio.wait_for(asyncio.to_thread(file.read), 30) == ""
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.anyio
@pytest.mark.parametrize("generations", [1, 2])
async def test_a_death_is_noticed_whoever_lives_on(
    rewards: ModuleType, fifo: str, generations: int
) -> None:
    """If a worker ends, its call raises WorkerDied, even if a process that the worker forked is still running. After a
    worker's end, every process that the worker forked is ended."""
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(WorkerDied, match="forks_and_dies ended with code 7"):
        await AsyncRewardWrapper(rewards.forks_and_dies, timeout_seconds=60)(fifo, generations)
    os.set_blocking(reader, True)
    assert await asyncio.wait_for(asyncio.to_thread(read_until_gone, reader), 30) in ("", "alive")


@pytest.mark.anyio
async def test_what_is_no_text_in_sys_path_is_passed_over(
    rewards: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker starts even if sys.path contains an entry that is not a string. Python's import system ignores entries
    of sys.path that are not strings."""
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path])
    async with asyncio.timeout(60):
        async with (pool := WorkerPool(1)).worker() as worker:
            assert await worker.call(rewards.equals, "", "4", [], [], answer="4")
        await pool.aclose()


TRAINER = """
import asyncio, sys, some_rewards
from rollout import reward
if __name__ == "__main__":
    asyncio.run(reward.AsyncRewardWrapper(getattr(some_rewards, sys.argv[1]), 600)(sys.argv[2]))
"""


@pytest.mark.parametrize("busy", ["hang", "compute", "hang_in_a_daemon"])
def test_a_worker_does_not_outlive_a_killed_trainer(
    rewards: ModuleType, tmp_path: Path, fifo: str, busy: str
) -> None:
    """If the trainer is killed (kill -9), the trainer's workers end by themselves, even during a computation. All
    processes that the workers have started end as well, including processes started with `setsid`."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    paths = os.pathsep.join([str(ROOT), str(Path(rewards.__file__ or "").parent)])
    command = [sys.executable, str(tmp_path / "trainer.py"), busy, fifo]
    env, quiet = os.environ | {"PYTHONPATH": paths}, subprocess.DEVNULL
    with subprocess.Popen(command, env=env, stderr=quiet) as trainer, open(fifo) as file:
        assert file.read(5) == "alive"
        trainer.kill()
        assert select.select([file], [], [], 30)[0], (
            "the worker lives on"
        )  # no process holds the pipe open
        assert file.read() == ""


@pytest.mark.anyio
async def test_a_reward_that_raises_is_an_error_and_not_zero(rewards: ModuleType) -> None:
    """If a reward function raises an exception, the caller gets an error instead of a reward of 0."""
    with pytest.raises(RuntimeError, match=r"KeyError: .no answer in the data"):
        await AsyncRewardWrapper(rewards.broken)()
    with pytest.raises(TypeError, match="a reward is a number, not NoneType"):
        await AsyncRewardWrapper(rewards.nothing)()


def test_a_function_that_no_process_can_import_is_refused_at_once() -> None:
    """The constructor of AsyncRewardWrapper refuses a lambda, and the message suggests a `def` at the top of a
    module."""
    with pytest.raises(ValueError, match="define it with `def` at the top of a module"):
        AsyncRewardWrapper(lambda *args: 1.0)
