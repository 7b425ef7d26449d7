"""Rewards are finite numbers; a function that hangs, crashes or is slow harms no other."""

import asyncio
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mode_agents
import pytest
from conftest import ROOT

from rollout.reward import AsyncRewardWrapper

pytestmark = pytest.mark.anyio
REWARDS = '''
import os, subprocess, sys, time
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
def leaves(path):
    if child := os.fork():
        open(path, "w").write(str(child))
        os._exit(3)
    os.setsid()
    time.sleep(60)
def compute(fifo, busy):
    """Starts a process that holds the fifo open, and may compute for ever."""
    with open(fifo, "w") as file:
        file.write("alive")
        file.flush()
        subprocess.Popen(["sleep", "3600"], stdout=file)
        while busy == "yes":
            pass
        return 1
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


async def test_a_plain_function_runs_in_another_process(rewards: ModuleType) -> None:
    """What the function prints does not mix with its result, and a column of the data may have any
    name."""
    equals = AsyncRewardWrapper(rewards.equals)
    assert await equals("2+2?", "4", [1], [2], answer="4", extra=None) == 1.0
    assert await AsyncRewardWrapper(rewards.process_id)() != os.getpid()
    assert await AsyncRewardWrapper(rewards.columns)("", "", [], [], function=1, self=2) == 3.0


async def test_a_reward_that_fails_is_an_error_and_not_zero(rewards: Any, monkeypatch: Any) -> None:
    """The error has the exception's type and text, or names the function."""
    with pytest.raises(RuntimeError, match=r"KeyError: .no answer in the data"):
        await AsyncRewardWrapper(rewards.broken)()
    with pytest.raises(RuntimeError, match="FileNotFoundError"):  # a call that cannot be read
        await AsyncRewardWrapper(rewards.equals)(mode_agents.Bomb("/nowhere/x"), "4" * 2**20)
    for function, said in ((rewards.nothing, "None"), (rewards.undefined, "nan")):
        with pytest.raises(ValueError, match=f"a finite number .* is needed, not {said}"):
            await AsyncRewardWrapper(function)()
    monkeypatch.setattr(rewards.equals, "__module__", "__main__")
    with pytest.raises(ValueError, match=r"move .function equals at \w+. to a module"):
        await AsyncRewardWrapper(rewards.equals)()


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
    """Workers import the module of the function, and nothing slow."""
    words, env = command(rewards, tmp_path / "script.py", SCRIPT)
    ended = subprocess.run(words, env=env, capture_output=True)
    assert ended.stdout.decode().splitlines() == ["the script runs", "0.0"], ended.stderr.decode()


async def test_a_coroutine_function_is_awaited_where_it_is() -> None:
    """A coroutine function stays in the trainer's process, because it may hold network connections.
    It also has a time limit there."""

    async def judge(prompt: str) -> int:
        return os.getpid()

    async def hangs() -> None:
        await asyncio.Event().wait()

    assert await AsyncRewardWrapper(judge)("x") == os.getpid()
    with pytest.raises(TimeoutError, match=r"hangs took longer than 0.01 s"):
        await AsyncRewardWrapper(hangs, timeout_seconds=0.01)()


async def test_hanging_rewards_leave_the_pool_free(rewards: ModuleType) -> None:
    """More calls hang than there are processes. Each is ended, and the next call is served."""
    hang = AsyncRewardWrapper(time.sleep, timeout_seconds=0.1)
    results = await asyncio.gather(*(hang(3600) for _ in range(6)), return_exceptions=True)
    words = "reward function sleep took longer than 0.1 s and was ended"
    assert {str(result) for result in results} == {words}
    assert await AsyncRewardWrapper(rewards.equals)("", "4", [], [], answer="4") == 1.0


async def test_a_daemon_of_a_dead_worker_is_not_waited_for(rewards: Any, tmp_path: Path) -> None:
    """The daemon has left the worker's process group, so it is still there."""
    with pytest.raises(RuntimeError, match="ended with code 3"):
        await AsyncRewardWrapper(rewards.leaves)(tmp_path / "pid")
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


TRAINER = """
import asyncio, sys, some_rewards
from rollout import reward
async def main():
    await reward.AsyncRewardWrapper(some_rewards.compute, 600)(*sys.argv[1:])
    await asyncio.sleep(600)
if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("busy", ["yes", "no"])
def test_a_worker_does_not_outlive_a_killed_trainer(
    rewards: ModuleType, tmp_path: Path, fifo: str, busy: str
) -> None:
    """After kill -9 of the trainer, the worker ends even while it computes, and so do the processes
    that it has started."""
    words, env = command(rewards, tmp_path / "trainer.py", TRAINER, fifo, busy)
    with subprocess.Popen(words, env=env, stderr=subprocess.DEVNULL) as trainer, open(fifo) as file:
        assert file.read(5) == "alive"
        trainer.kill()
        assert file.read() == ""
