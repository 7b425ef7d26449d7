"""An agent's episode has the same result inline and in a process, and leaves no process behind."""

import asyncio
import json
import os
import pickle
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import mode_agents
import pytest
import torch
from conftest import ROOT
from runs import SMALL_GUESS, assert_gone, check_metrics, start_and_wait_for_step, wait_gone

from calls.client import ProxyAddress
from engine import RemoteInfEngine
from rollout.executor import WorkflowExecutor
from rollout.workers import WorkerPool, within
from run.config import OpenAIConfig, RolloutConfig
from staleness import RolloutStat, StalenessManager
from workflow import (
    OpenAIProxyWorkflow,
    WorkflowContext,
    resolve_workflow,
    to_tensors,
    workflow_context,
)

pytestmark = pytest.mark.anyio
QUESTION = {"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}
SUBPROC = ("rollout.openai.mode=subproc", "rollout.openai.subproc_max_workers=2")
Run = Callable[..., Any]


@pytest.fixture
def run_agent(proxy: ProxyAddress, tiny_server: str) -> Iterator[Run]:
    """run_agent(agent, *samples, **openai) runs a group per sample; returns them and the counts."""
    engine = RemoteInfEngine([tiny_server])
    engine.initialize()

    def run(agent: Any, *samples: dict, group_size: int = 1, **openai: Any) -> Any:
        modes = OpenAIConfig(**{"mode": "subproc", "subproc_max_workers": 2, **openai})
        gate = StalenessManager(engine, 9, 9, 0)
        executor = WorkflowExecutor(engine, RolloutConfig(openai=modes), gate, proxy=proxy)
        try:
            tasks = [
                executor.submit(QUESTION | sample, agent, group_size=group_size)
                for sample in samples or ({},)
            ]
            return [executor.wait_for_task(task, timeout=60) for task in tasks], executor.stats
        finally:
            executor.dispatcher.destroy()

    yield run
    engine.destroy()


# ---------------------------------------------------------------- one episode in both modes


async def test_both_modes_sample_the_same_tokens(proxy: ProxyAddress) -> None:
    """With the same seed."""
    workflow_context.set(WorkflowContext(task_id=77))
    where = {"proxy_addr": proxy.proxy_addr, "admin_key": proxy.admin_key}
    options = where | {"export_style": "concat"}
    inline: Any = resolve_workflow(mode_agents.Talks, proxy=options)
    apart = replace(inline, mode="subproc")
    rows = [to_tensors(await workflow.arun_episode(None, QUESTION)) for workflow in (inline, apart)]
    assert rows[0]["input_ids"].shape[1] > 40
    for key in rows[0]:  # a cached prompt changes the order of sums
        torch.testing.assert_close(rows[0][key], rows[1][key], rtol=0, atol=1e-5)


def test_clients_made_without_arguments_find_the_session(
    run_agent: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read its URL and key from the environment, and pass by an HTTP proxy."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "somebody's own")
    groups, stats = run_agent(mode_agents.Reads, {}, {}, {}, subproc_max_workers=1)
    assert [group["rewards"].tolist() for group in groups] == [[1.0]] * 3
    assert stats == RolloutStat(withdrawn=3)


def test_an_episode_that_waits_for_a_process_holds_no_session(
    run_agent: Run, proxy: ProxyAddress
) -> None:
    """With one process, one session is open at a time."""
    samples = [{"proxy": proxy.proxy_addr}] * 4
    groups, _ = run_agent(mode_agents.CountsSessions, *samples, subproc_max_workers=1)
    assert [group["rewards"].tolist() for group in groups] == [[1.0]] * 4


# ---------------------------------------------------------------- agents that end in different ways


@pytest.mark.parametrize(
    ("then", "says"),
    [
        ("leaves_at_once", "ended with code 0"),
        ("is_killed", "ended with code -9"),
        ("exits", "SystemExit: enough"),
        ("raises", r"LookupError: no such tool"),
        ("breaks_off", r"BadRequestError.*messages"),
    ],
)
def test_a_failing_agent_is_counted_and_the_next_one_runs(
    run_agent: Run,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture,
    then: str,
    says: str,
) -> None:
    """The log has the type and the text of its exception, or how its process ended."""
    samples: list[dict] = [{"then": then}, {}, {"then": then}, {}]
    groups, stats = run_agent(mode_agents.Talks, *samples, subproc_max_workers=1)
    rewards = [None if group is None else group["rewards"].tolist() for group in groups]
    assert rewards == [None, [1.0], None, [1.0]]
    assert (stats.failed, stats.rejected) == (2, 2)
    assert re.search(says, caplog.text)
    assert "Event loop is closed" not in capfd.readouterr().err


def test_an_agent_that_exits_inline_ends_no_other_episode(
    run_agent: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """sys.exit() is a failure like any other."""
    groups, stats = run_agent(mode_agents.Talks, {"then": "exits"}, {}, mode="inline")
    assert [group is None for group in groups] == [True, False]
    assert (stats.failed, stats.rejected) == (1, 1)
    assert "SystemExit('enough')" in caplog.text


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[TextIO]:
    """The reading end of a named pipe, to which an agent writes."""
    os.mkfifo(path := tmp_path / "fifo")
    with open(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        os.set_blocking(file.fileno(), True)
        yield file


@pytest.fixture
def limit_passes(fifo: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit of 200 s passes as soon as the agent has written to the pipe."""
    timeout = asyncio.timeout

    def until_pipe(seconds: float | None) -> asyncio.Timeout:
        limit = timeout(seconds)
        if seconds == 200:
            loop = asyncio.get_running_loop()
            written: Any = loop.run_in_executor(None, select.select, [fifo], [], [], seconds)
            written.add_done_callback(lambda _: limit.reschedule(loop.time()))
        return limit

    monkeypatch.setattr(asyncio, "timeout", until_pipe)


@pytest.mark.usefixtures("limit_passes")
def test_a_timed_out_episode_has_ended(
    run_agent: Run, caplog: pytest.LogCaptureFixture, fifo: TextIO
) -> None:
    """Its process is killed with every process that the agent started."""
    hangs = {"then": "hangs", "fifo": fifo.name}
    limits = {"subproc_max_workers": 1, "episode_timeout_seconds": 200}
    groups, stats = run_agent(mode_agents.Talks, hangs, **limits)
    assert groups == [None]
    assert "took longer than 200 s (rollout.openai.episode_timeout_seconds)" in caplog.text
    assert fifo.read() == "alive"  # to its end, so no process holds it open
    assert stats.failed == 1


def test_destroy_ends_agents_that_run(
    proxy: ProxyAddress, tiny_server: str, tmp_path: Path
) -> None:
    """With every process that they started."""
    os.mkfifo(fifo := tmp_path / "fifo")
    engine = RemoteInfEngine([tiny_server])
    engine.initialize()
    config = RolloutConfig(openai=OpenAIConfig(mode="subproc"))
    executor = WorkflowExecutor(engine, config, StalenessManager(engine, 1, 1, 0), proxy=proxy)
    executor.submit(QUESTION | {"then": "hangs", "fifo": str(fifo)}, mode_agents.Talks)
    with open(fifo) as file:
        assert file.read(5) == "alive"
        executor.dispatcher.destroy()
        assert file.read() == ""
    engine.destroy()


def test_what_cannot_be_pickled_is_named_before_anything_starts() -> None:
    """By Python itself."""
    address = {"proxy_addr": "http://127.0.0.1:1", "admin_key": "k", "mode": "subproc"}

    class Local(mode_agents.Talks):
        pass

    for agent in (mode_agents.Unpicklable, Local):
        with pytest.raises((pickle.PicklingError, AttributeError, TypeError), match="pickle"):
            resolve_workflow(agent, proxy=address)
        inline = resolve_workflow(agent, proxy=address | {"mode": "inline"})
        assert isinstance(inline, OpenAIProxyWorkflow)


# ---------------------------------------------------------------- a run


@pytest.mark.runs
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_run_leaves_no_process(tmp_path: Path, end: signal.Signals) -> None:
    """After Ctrl-C or kill -9 of the trainer."""
    words = (*SMALL_GUESS, *SUBPROC, "train_dataset.batch_size=2", "max_steps=10000")
    process, pids = start_and_wait_for_step(tmp_path, *words)
    assert len([name for name in pids if "workers.serve" in name]) in (1, 2)
    process.send_signal(end)
    process.communicate(timeout=30)
    metrics = (tmp_path / "e" / "t" / "metrics.jsonl").read_text().splitlines()
    check_metrics([json.loads(metrics[0])], eta=2)
    if end is signal.SIGINT:
        assert process.returncode == 130
        assert_gone(pids)
    for pid in pids.values():
        wait_gone(pid)


# ---------------------------------------------------------------- the pool of processes


async def test_only_the_call_that_died_fails() -> None:
    """The others, also those that waited for a process, return."""

    async def use(pool: WorkerPool, function: Callable, *args: Any) -> Any:
        async with pool.worker() as call:
            return await call(function, *args)

    async with aclosing(WorkerPool(2)) as pool:
        calls: list[Any] = [(abs, -1), (os._exit, 7), (abs, -3), (abs, -4)]
        work = (use(pool, *each) for each in calls)
        results = await asyncio.gather(*work, return_exceptions=True)
    assert [results[0], *results[2:]] == [1, 3, 4]
    assert str(results[1]) == "the process that ran _exit ended with code 7"


async def test_a_function_that_a_worker_cannot_import_is_an_error_and_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next call is served."""
    (tmp_path / "only_here.py").write_text("def f():\n    return 1\n")
    async with aclosing(WorkerPool(1)) as pool:
        async with pool.worker() as call:
            first = await call(os.getpid)
        monkeypatch.syspath_prepend(tmp_path)  # too late for the running process
        with pytest.raises(RuntimeError, match="only_here"):
            async with pool.worker() as call:
                await call(__import__("only_here").f)
        async with pool.worker() as call:
            assert await call(os.getpid) != first


async def test_a_worker_gets_no_key_of_the_run_and_runs_no_code_in_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the user's other keys, and its results are no pickles."""
    monkeypatch.setenv("POCKET_AREAL_SERVER_KEY", "secret")
    monkeypatch.setenv("MY_TOOLS_KEY", "the agent's")
    async with aclosing(WorkerPool(1)) as pool:
        async with pool.worker() as call:
            assert await call(os.getenv, "POCKET_AREAL_SERVER_KEY") is None
            assert await call(os.getenv, "MY_TOOLS_KEY") == "the agent's"
        with pytest.raises(RuntimeError, match="AttributeError"):
            async with pool.worker() as call:
                await call(mode_agents.Bomb, str(tmp_path / "ran"))
    assert not (tmp_path / "ran").exists()


async def test_a_limit_tells_its_own_timeout_from_another() -> None:
    """A TimeoutError of the work is raised as it is."""

    async def fails() -> None:
        raise TimeoutError("the tool")

    with pytest.raises(TimeoutError, match="the tool"):
        await within(60, fails(), "the episode")
    with pytest.raises(TimeoutError, match="the episode"):
        await within(0, asyncio.sleep(3600), "the episode")


def test_a_loop_that_ends_takes_its_workers_along() -> None:
    """Even if nobody closes their pool."""
    script = (
        "import asyncio, os\n"
        "from rollout import reward\n"
        "async def main():\n"
        "    async with (await reward.pools(1).get()).worker() as call:\n"
        "        return await call(os.getpid)\n"
        "print(asyncio.run(main()), asyncio.run(main()))\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    first, second = map(int, done.stdout.split())
    assert first != second
    assert_gone({"first": first, "second": second})
