"""A reward is a number, and computing it can hang, crash or take too long without harm to the other episodes."""

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

from rollout.reward import AsyncRewardWrapper, parse_rewards
from rollout.workers import WorkerDied, WorkerPool, time_limit

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

def torch_is_there(*args):
    return "torch" in sys.modules

def hang(fifo):
    """Says that it is alive by holding the fifo open, and never returns."""
    with open(fifo, "w") as file:
        file.write("alive")
        file.flush()
        while True:
            signal.pause()

def compute(fifo):
    """The same, but busy."""
    with open(fifo, "w") as file:
        file.write("alive")
        file.flush()
        while True:
            pass

def forks_and_dies(fifo, generations):
    """Its process is gone at once; one that it has forked, or the child of that one, lives on."""
    for _ in range(generations):
        if os.fork():
            os._exit(7)
    hang(fifo)
'''


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """A module of reward functions, as a user would write it, that worker processes can import."""
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "some_rewards.py").write_text(REWARDS)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("some_rewards")
    sys.path.remove(str(folder))


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    """A pipe that reads to its end when the process that holds it is gone."""
    os.mkfifo(tmp_path / "fifo")
    return str(tmp_path / "fifo")


def read_until_gone(fifo: str | int) -> str:
    with open(fifo) as file:
        return file.read()


NUMBERS = [
    *(1, 1.0, True, np.float32(1), np.float64(1), np.int64(1), np.bool_(True), np.array(1.0)),
    *(torch.tensor(1), torch.tensor(1.0), torch.tensor(True), torch.tensor(1.0, dtype=torch.bfloat16)),
]


@pytest.mark.parametrize("value", NUMBERS, ids=lambda v: f"{type(v).__name__} {getattr(v, 'dtype', '')}")
def test_every_kind_of_number_is_a_reward(value: Any) -> None:
    """`return 1` from an agent is a reward of 1.0, as are True and the scalars of numpy and torch."""
    assert parse_rewards(value) == 1.0
    assert type(parse_rewards(value)) is float
    assert parse_rewards({"chatcmpl-1": value, "chatcmpl-2": 0}) == {"chatcmpl-1": 1.0, "chatcmpl-2": 0.0}


def test_none_says_that_the_agent_set_its_rewards_itself() -> None:
    """None is no reward of 0."""
    assert parse_rewards(None) is None


@pytest.mark.parametrize(
    "value",
    ["1", [1.0], (1.0,), torch.ones(2), np.ones(1), 1j, object(), {"a": None}, Decimal(1)],
    ids=lambda v: type(v).__name__,
)
def test_what_is_no_number_is_named(value: Any) -> None:
    """An agent that returns something else learns what it returned and what it may return."""
    with pytest.raises(
        TypeError, match=r"a reward is a number, not (str|list|tuple|Tensor|ndarray|complex|obj|None|Dec)"
    ):
        parse_rewards(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), torch.tensor(float("nan"))])
def test_a_reward_is_finite(value: Any) -> None:
    """One nan would make a nan of every weight."""
    with pytest.raises(ValueError, match="finite"):
        parse_rewards(value)


@pytest.mark.anyio
async def test_a_plain_function_runs_in_another_process(rewards: ModuleType) -> None:
    """A reward function gets prompt, completion, their ids and the sample, and cannot block the event loop."""
    assert await AsyncRewardWrapper(rewards.equals)("2+2?", "4", [1], [2], answer="4", extra=None) == 1.0
    assert await AsyncRewardWrapper(rewards.process_id)() != os.getpid()


SCRIPT = """
print("the script runs")
import asyncio, some_rewards, reward
if __name__ == "__main__":
    print(asyncio.run(reward.AsyncRewardWrapper(some_rewards.torch_is_there)()))
"""


def test_workers_do_not_run_the_trainers_script(rewards: ModuleType, tmp_path: Path) -> None:
    """A worker imports the reward's own module and not the script that was started, which would import torch."""
    (tmp_path / "script.py").write_text(SCRIPT)
    paths = os.pathsep.join([str(ROOT), str(Path(rewards.__file__ or "").parent)])
    ended = subprocess.run(
        [sys.executable, tmp_path / "script.py"], env=os.environ | {"PYTHONPATH": paths}, capture_output=True
    )
    assert ended.stdout.decode().splitlines() == ["the script runs", "0.0"], ended.stderr.decode()


@pytest.mark.anyio
async def test_a_coroutine_function_is_awaited_where_it_is() -> None:
    """An async reward may hold connections, so it stays in the process and the loop that it was written for."""

    async def judge(prompt: str) -> int:
        return os.getpid()

    assert await AsyncRewardWrapper(judge)("x") == os.getpid()


@pytest.mark.anyio
async def test_a_timed_out_reward_has_ended(rewards: ModuleType, fifo: str) -> None:
    """The time limit ends the process, it does not merely stop waiting; the error names function and seconds."""
    gone = asyncio.create_task(asyncio.to_thread(read_until_gone, fifo))
    with pytest.raises(TimeoutError, match="hang took longer than 1 s"):
        await AsyncRewardWrapper(rewards.hang, timeout_seconds=1)(fifo)
    assert await asyncio.wait_for(gone, 30) == "alive"


@pytest.mark.anyio
async def test_hanging_rewards_leave_the_pool_free(rewards: ModuleType) -> None:
    """More hanging calls than there are workers, and the next call is still served (AReaL's queue behind them)."""
    hang = AsyncRewardWrapper(time.sleep, timeout_seconds=0.1)
    results = await asyncio.gather(*(hang(3600) for _ in range(6)), return_exceptions=True)
    assert {type(result) for result in results} == {TimeoutError}
    assert await AsyncRewardWrapper(rewards.equals)("", "4", [], [], answer="4") == 1.0


@pytest.mark.anyio
async def test_a_cancelled_episode_takes_its_reward_with_it(rewards: ModuleType, fifo: str) -> None:
    """Work that nobody waits for any more does not occupy a worker."""
    running = asyncio.create_task(AsyncRewardWrapper(rewards.hang, timeout_seconds=60)(fifo))
    with await asyncio.to_thread(open, fifo) as file:  # opens when the worker has opened its end
        assert await asyncio.to_thread(file.read, 5) == "alive"
        running.cancel()
        assert await asyncio.wait_for(asyncio.to_thread(file.read), 30) == ""
    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.anyio
@pytest.mark.parametrize("generations", [1, 2])
async def test_a_death_is_noticed_whoever_lives_on(rewards: ModuleType, fifo: str, generations: int) -> None:
    """A process that the worker forked does not hold its socket, and is ended with it."""
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(WorkerDied, match="forks_and_dies ended with code 7"):
        await AsyncRewardWrapper(rewards.forks_and_dies, timeout_seconds=60)(fifo, generations)
    os.set_blocking(reader, True)
    assert await asyncio.wait_for(asyncio.to_thread(read_until_gone, reader), 30) in ("", "alive")


@pytest.mark.anyio
async def test_what_is_no_text_in_sys_path_is_passed_over(
    rewards: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python's own import passes over it."""
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path])
    async with time_limit(60, "no worker came up"):
        async with (pool := WorkerPool(1)).worker() as worker:
            assert await worker.call(rewards.equals, "", "4", [], [], answer="4")
        await pool.aclose()


TRAINER = """
import asyncio, sys, some_rewards, reward
if __name__ == "__main__":
    asyncio.run(reward.AsyncRewardWrapper(getattr(some_rewards, sys.argv[1]), 600)(sys.argv[2]))
"""


@pytest.mark.parametrize("busy", ["hang", "compute"])
def test_a_worker_does_not_outlive_a_killed_trainer(rewards: ModuleType, tmp_path: Path, fifo: str, busy: str) -> None:
    """kill -9 gives the trainer no chance to end its workers; they notice by themselves, even while they compute."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    paths = os.pathsep.join([str(ROOT), str(Path(rewards.__file__ or "").parent)])
    command = [sys.executable, str(tmp_path / "trainer.py"), busy, fifo]
    env, quiet = os.environ | {"PYTHONPATH": paths}, subprocess.DEVNULL  # Python speaks of leaked semaphores
    with subprocess.Popen(command, env=env, stderr=quiet) as trainer, open(fifo) as file:
        assert file.read(5) == "alive"
        trainer.kill()
        assert select.select([file], [], [], 30)[0], "the worker lives on"  # readable: it is at its end
        assert file.read() == ""


@pytest.mark.anyio
async def test_a_reward_that_raises_is_an_error_and_not_zero(rewards: ModuleType) -> None:
    """A bug in a reward function is a failure with its own traceback, never a lesson for the policy."""
    with pytest.raises(KeyError, match="no answer in the data"):
        await AsyncRewardWrapper(rewards.broken)()
    with pytest.raises(TypeError, match="a reward is a number, not NoneType"):
        await AsyncRewardWrapper(rewards.nothing)()


def test_a_function_that_no_process_can_import_is_refused_at_once() -> None:
    """A lambda fails when the workflow is built, with the remedy in the message, and not in every episode."""
    with pytest.raises(ValueError, match="define it with `def` at the top of a module"):
        AsyncRewardWrapper(lambda *args: 1.0)
