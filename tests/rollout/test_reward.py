"""Rewards are finite numbers; a function that hangs, crashes or is slow harms no other."""

import asyncio
import importlib
import os
import pickle
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

REWARDS = '''
import os, signal, sys

def equals(prompt, completion, prompt_ids, completion_ids, answer, **data):
    return completion == answer

def nothing(*args):
    return None

def undefined(*args):
    return float("nan")

def broken(*args):
    raise KeyError("no answer in the data")

def process_id(*args):
    print("printed text is no result")
    return os.getpid()

def columns(*args, function, self):
    return function + self

def torch_is_there(*args):
    return "torch" in sys.modules

def hang(fifo):
    """Holds the fifo open, and never returns."""
    with open(fifo, "w") as file:
        file.write("alive")
        file.flush()
        while True:
            signal.pause()

def compute(fifo):
    """Holds the fifo open, and computes for ever."""
    with open(fifo, "w") as file:
        file.write("alive")
        file.flush()
        while True:
            pass

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
    """A named pipe. A reader reaches its end when no process holds it open."""
    os.mkfifo(tmp_path / "fifo")
    return str(tmp_path / "fifo")


def read_until_gone(fifo: str | int) -> str:
    with open(fifo) as file:
        return file.read()


TORCH = [torch.tensor(x) for x in (1, 1.0, True)] + [torch.tensor(1.0, dtype=torch.bfloat16)]
NUMPY = [np.float32(1), np.float64(1), np.int64(1), np.bool_(True), np.array(1.0)]


@pytest.mark.parametrize("value", [1, 1.0, True, *NUMPY, *TORCH], ids=repr)
def test_every_kind_of_number_is_a_reward(value: Any) -> None:
    """Of Python, numpy and torch; None is no reward of 0, but none at all."""
    assert parse_rewards(value) == 1.0
    assert type(parse_rewards(value)) is float
    assert parse_rewards({"chatcmpl-1": value, "b": 0}) == {"chatcmpl-1": 1.0, "b": 0.0}
    assert parse_rewards(None) is None


NO_NUMBERS = ["1", [1.0], torch.ones(2), np.ones(1), 1j, {"a": None}, Decimal(1)]
NO_NUMBERS += [float("nan"), float("inf"), {"chatcmpl-1": torch.tensor(float("nan"))}]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda v: type(v).__name__)
def test_what_is_no_number_is_named(value: Any) -> None:
    """With whose it is. One NaN would make every weight of the model NaN."""
    with pytest.raises(ValueError, match=r"agent A returned .*; a reward is a finite number"):
        parse_rewards(value, "agent A")


@pytest.mark.anyio
async def test_a_plain_function_runs_in_another_process(rewards: ModuleType) -> None:
    """What it prints is no result, and a column of the data may have any name."""
    equals = AsyncRewardWrapper(rewards.equals)
    assert await equals("2+2?", "4", [1], [2], answer="4", extra=None) == 1.0
    assert await AsyncRewardWrapper(rewards.process_id)() != os.getpid()
    assert await AsyncRewardWrapper(rewards.columns)("", "", [], [], function=1, self=2) == 3.0


@pytest.mark.anyio
async def test_a_reward_that_fails_is_an_error_and_not_zero(rewards: ModuleType) -> None:
    """The error has the exception's type and text, or names the function."""
    with pytest.raises(RuntimeError, match=r"KeyError: .no answer in the data"):
        await AsyncRewardWrapper(rewards.broken)()
    for function, said in ((rewards.nothing, "nothing returned None"), (rewards.undefined, "nan")):
        with pytest.raises(ValueError, match=f"reward function .*{said}"):
            await AsyncRewardWrapper(function)()


SCRIPT = """
print("the script runs")
import asyncio, some_rewards
from rollout import reward
if __name__ == "__main__":
    print(asyncio.run(reward.AsyncRewardWrapper(some_rewards.torch_is_there)()))
"""


def command(rewards: ModuleType, path: Path, script: str, *words: str) -> tuple[list, dict]:
    path.write_text(script)
    paths = os.pathsep.join([str(ROOT), str(Path(rewards.__file__ or "").parent)])
    return [sys.executable, str(path), *words], os.environ | {"PYTHONPATH": paths}


def test_workers_do_not_run_the_trainers_script(rewards: ModuleType, tmp_path: Path) -> None:
    """They import the module of the function, and nothing slow."""
    words, env = command(rewards, tmp_path / "script.py", SCRIPT)
    ended = subprocess.run(words, env=env, capture_output=True)
    assert ended.stdout.decode().splitlines() == ["the script runs", "0.0"], ended.stderr.decode()


@pytest.mark.anyio
async def test_a_coroutine_function_is_awaited_where_it_is() -> None:
    """It may hold network connections. Its time limit holds, too."""

    async def judge(prompt: str) -> int:
        return os.getpid()

    async def hangs() -> None:
        await asyncio.Event().wait()

    assert await AsyncRewardWrapper(judge)("x") == os.getpid()
    with pytest.raises(TimeoutError, match=r"hangs took longer than 0.01 s"):
        await AsyncRewardWrapper(hangs, timeout_seconds=0.01)()


@pytest.mark.anyio
async def test_a_timed_out_reward_has_ended(rewards: ModuleType, fifo: str) -> None:
    """The process is killed. The error names the function and the limit."""
    gone = asyncio.create_task(asyncio.to_thread(read_until_gone, fifo))
    with pytest.raises(TimeoutError, match="hang took longer than 1 s"):
        await AsyncRewardWrapper(rewards.hang, timeout_seconds=1)(fifo)
    assert await asyncio.wait_for(gone, 30) == "alive"


@pytest.mark.anyio
async def test_hanging_rewards_leave_the_pool_free(rewards: ModuleType) -> None:
    """More calls hang than there are processes, and the next call is served."""
    hang = AsyncRewardWrapper(time.sleep, timeout_seconds=0.1)
    results = await asyncio.gather(*(hang(3600) for _ in range(6)), return_exceptions=True)
    assert {type(result) for result in results} == {TimeoutError}
    assert await AsyncRewardWrapper(rewards.equals)("", "4", [], [], answer="4") == 1.0


@pytest.mark.anyio
async def test_a_cancelled_episode_takes_its_reward_with_it(rewards: ModuleType, fifo: str) -> None:
    """The process that computes it is killed."""
    running = asyncio.create_task(AsyncRewardWrapper(rewards.hang, timeout_seconds=60)(fifo))
    with await asyncio.to_thread(open, fifo) as file:
        assert await asyncio.to_thread(file.read, 5) == "alive"
        running.cancel()
        assert await asyncio.wait_for(asyncio.to_thread(file.read), 30) == ""
    with pytest.raises(asyncio.CancelledError):
        await running


TRAINER = """
import asyncio, sys, some_rewards
from rollout import reward
if __name__ == "__main__":
    asyncio.run(reward.AsyncRewardWrapper(getattr(some_rewards, sys.argv[1]), 600)(sys.argv[2]))
"""


@pytest.mark.parametrize("busy", ["hang", "compute"])
def test_a_worker_does_not_outlive_a_killed_trainer(
    rewards: ModuleType, tmp_path: Path, fifo: str, busy: str
) -> None:
    """kill -9 of the trainer ends it, even while it computes."""
    words, env = command(rewards, tmp_path / "trainer.py", TRAINER, busy, fifo)
    with subprocess.Popen(words, env=env, stderr=subprocess.DEVNULL) as trainer, open(fifo) as file:
        assert file.read(5) == "alive"
        trainer.kill()
        assert file.read() == ""


def test_a_function_that_no_process_can_import_is_refused_at_once() -> None:
    """Such as a lambda."""
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        AsyncRewardWrapper(lambda *args: 1.0)
