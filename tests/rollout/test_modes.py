"""An agent's episode has the same result in mode `inline` and in mode `subproc`. After an episode, no process of the
agent is left."""

import asyncio
import contextlib
import gc
import importlib
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import mode_agents
import pytest
import torch
import yaml
from conftest import ROOT
from runs import SMALL_GUESS, assert_gone, check_metrics, start_and_wait_for_step, wait_gone

from engine import RemoteInfEngine
from rollout import workers
from rollout.executor import ProxyAddress, WorkflowExecutor
from rollout.workers import WorkerDied, WorkerPool, within
from run.keys import OpenAIConfig, RolloutConfig
from staleness import RolloutStat
from workflow import (
    OpenAIProxyWorkflow,
    WorkflowContext,
    resolve_workflow,
    to_tensors,
    workflow_context,
)

QUESTION = {"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}
SUBPROC = ("rollout.openai.mode=subproc", "rollout.openai.subproc_max_workers=2")


Run = Callable[..., Any]


@pytest.fixture
def run_agent(proxy: ProxyAddress, tiny_server: str) -> Iterator[Run]:
    """Return a function run_agent(agent, *samples, **openai) that runs one group for each sample. `run_agent` returns a
    list with a group or None for each sample, and the executor's stats."""
    engine = RemoteInfEngine([tiny_server])
    engine.initialize()

    def run(agent: Any, *samples: dict, group_size: int = 1, **openai: Any) -> Any:
        config = RolloutConfig(
            consumer_batch_size=4,
            max_head_offpolicyness=9,
            openai=OpenAIConfig(**{"mode": "subproc", "subproc_max_workers": 2, **openai}),
        )
        executor = WorkflowExecutor(engine, config, proxy=proxy)
        try:
            tasks = [
                executor.submit(QUESTION | sample, agent, group_size=group_size)
                for sample in samples or ({},)
            ]
            return [executor.wait_for_task(task, timeout=60) for task in tasks], executor.stats
        finally:
            executor.destroy()

    yield run
    engine.destroy()


# ---------------------------------------------------------------- one episode in both modes


@pytest.mark.parametrize(
    ("agent", "mode"),
    [
        (mode_agents.MyAgent, "inline"),
        (mode_agents.MyAgent, "subproc"),
        (mode_agents.MySyncAgent, "subproc"),
    ],
)
def test_the_documents_agents_run_as_they_stand(run_agent: Run, agent: Any, mode: str) -> None:
    """The async example from AReaL's page Agent Workflow runs in mode `inline` and in mode `subproc`. The synchronous
    example from AReaL's page Agent Workflow runs in mode `subproc`."""
    (group,), stats = run_agent(agent, group_size=3, mode=mode)
    assert set(group["rewards"].tolist()) <= {0.5, 1.0}
    assert group["rewards"].shape == (3,)
    assert (group["loss_mask"].sum(1) >= 1).all()
    assert stats == RolloutStat(withdrawn=1)


@pytest.mark.anyio
async def test_both_modes_sample_the_same_tokens(proxy: ProxyAddress) -> None:
    """With the same seed, an episode samples the same tokens in mode `inline` and in mode `subproc`."""
    workflow_context.set(WorkflowContext(task_id=77))
    inline: Any = resolve_workflow(
        mode_agents.Talks, proxy=vars(proxy) | {"export_style": "concat"}
    )
    apart = replace(inline, mode="subproc")
    rows = [to_tensors(await workflow.arun_episode(None, QUESTION)) for workflow in (inline, apart)]
    assert rows[0]["input_ids"].shape[1] > 40
    # A cached prompt changes the order in which the server adds numbers, so log-probabilities may differ in rounding.
    for key in rows[0]:
        torch.testing.assert_close(rows[0][key], rows[1][key], rtol=0, atol=1e-5)


def test_clients_made_without_arguments_find_the_session(
    run_agent: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mode `subproc`, SDK clients made without arguments read the URL and the key of their session from the
    environment."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # no server listens at this port
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "somebody's own")
    groups, stats = run_agent(mode_agents.Reads, {}, {}, {}, subproc_max_workers=1)
    assert [group["rewards"].tolist() for group in groups] == [[1.0]] * 3
    assert stats == RolloutStat(withdrawn=3)


def test_an_episode_that_waits_for_a_process_holds_no_session(
    run_agent: Run, proxy: ProxyAddress
) -> None:
    """An episode waits for a free process before it starts a session, so with one process only one session is open at a
    time."""
    groups, _ = run_agent(
        mode_agents.CountsSessions, *[{"proxy": proxy.proxy_addr}] * 4, subproc_max_workers=1
    )
    assert [group["rewards"].tolist() for group in groups] == [[1.0]] * 4


@pytest.mark.parametrize("mode", ["inline", "subproc"])
def test_an_agent_that_sets_nothing_is_rejected(run_agent: Run, mode: str) -> None:
    """If an agent returns None and posts no reward, its episode is rejected, and does not count as failed."""
    assert run_agent(mode_agents.Talks, {"then": "is_silent"}, mode=mode) == (
        [None],
        RolloutStat(rejected=1),
    )


# ---------------------------------------------------------------- agents that end in different ways


@pytest.mark.parametrize(
    ("then", "says"),
    [
        ("leaves_at_once", "ended with code 0"),
        ("is_killed", "ended with code -9"),
        ("exits", "SystemExit: enough"),
        ("raises", r"LookupError: no such tool"),
        ("breaks_off", "BadRequestError.*messages"),
    ],
)
def test_a_failing_agent_is_counted_and_the_next_one_runs(
    run_agent: Run,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture,
    then: str,
    says: str,
) -> None:
    """If an agent raises an exception or its process ends, the failure is counted and logged, and the next episode
    runs."""
    groups, stats = run_agent(
        mode_agents.Talks, {"then": then}, {}, {"then": then}, {}, subproc_max_workers=1
    )
    assert [None if group is None else group["rewards"].tolist() for group in groups] == [
        None,
        [1.0],
        None,
        [1.0],
    ]
    assert (stats.failed, stats.rejected) == (2, 2)
    assert re.search(says, caplog.text)
    assert (
        "never retrieved" not in capfd.readouterr().err
    )  # asyncio logs this text if a client is never closed


def test_an_agent_that_exits_inline_ends_no_other_episode(
    run_agent: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """In mode `inline`, an agent that calls sys.exit() counts as failed, and the next episode runs in the same event
    loop."""
    groups, stats = run_agent(mode_agents.Talks, {"then": "exits"}, {}, mode="inline")
    assert [group is None for group in groups] == [True, False]
    assert (stats.failed, stats.rejected) == (1, 1)
    assert "the episode called sys.exit('enough')" in caplog.text


def test_every_episode_has_a_process_of_its_own(run_agent: Run) -> None:
    """In mode `subproc`, no two episodes share a process. A thread that an agent leaves running cannot read the session
    key of a later episode."""
    samples = [{"then": "process_id"}] * 3
    groups, _ = run_agent(mode_agents.Talks, *samples, subproc_max_workers=1)
    assert len({group["rewards"].item() for group in groups}) == 3


def test_an_agent_that_forks_has_one_result(run_agent: Run) -> None:
    """If an agent forks the worker process, and both processes return a reward, only the reward of the original process
    counts. The reward of the forked process is not used as the result of the next episode."""
    groups, stats = run_agent(
        mode_agents.Talks, {"then": "returns_twice"}, {}, subproc_max_workers=1
    )
    assert [group["rewards"].tolist() for group in groups] == [[1.0], [1.0]]
    assert stats == RolloutStat(withdrawn=2)


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[TextIO]:
    """The reading end of a named pipe, to which an agent writes."""
    os.mkfifo(path := tmp_path / "fifo")
    with open(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        os.set_blocking(file.fileno(), True)
        yield file


@pytest.fixture
def limit_passes(fifo: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first time limit of 200 s expire as soon as the agent has written to the named pipe."""
    wait = asyncio.wait

    async def wait_for_pipe(tasks: Any, timeout: float | None = None) -> Any:
        if timeout == 200:
            monkeypatch.setattr(asyncio, "wait", wait)
            await asyncio.to_thread(select.select, [fifo], [], [], timeout)
            timeout = 0
        return await wait(tasks, timeout=timeout)

    monkeypatch.setattr(asyncio, "wait", wait_for_pipe)


@pytest.mark.usefixtures("limit_passes")
def test_a_timed_out_episode_has_ended(
    run_agent: Run, caplog: pytest.LogCaptureFixture, fifo: TextIO
) -> None:
    """If an episode exceeds its time limit, the agent's process and every process that the agent started are ended."""
    hangs = {"then": "hangs", "fifo": fifo.name}
    groups, stats = run_agent(
        mode_agents.Talks, hangs, subproc_max_workers=1, episode_timeout_seconds=200
    )
    assert groups == [None]
    assert "took longer than 200 s (rollout.openai.episode_timeout_seconds)" in caplog.text
    assert fifo.read() == "alive"  # read() reached the end, so no process holds the named pipe open
    assert stats.failed == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
@pytest.mark.parametrize(
    "then", ["leaves_a_daemon", "leaves_a_daemon_and_hangs", "leaves_a_daemon_and_is_killed"]
)
def test_no_descendant_outlives_its_episode(
    run_agent: Run, fifo: TextIO, request: pytest.FixtureRequest, then: str
) -> None:
    """If an agent starts a process with `setsid`, the process ends when the episode ends. The episode ends when the
    agent returns, is killed, or reaches its time limit."""
    if then == "leaves_a_daemon_and_hangs":
        request.getfixturevalue("limit_passes")
    sample = {"then": then, "fifo": fifo.name}
    run_agent(mode_agents.Talks, sample, subproc_max_workers=1, episode_timeout_seconds=200)
    assert select.select([fifo], [], [], 30)[0]
    assert fifo.read(5) == "alive"
    assert select.select([fifo], [], [], 30)[0], "the process is still there"
    assert fifo.read() == ""


@pytest.mark.usefixtures("limit_passes")
def test_an_agent_that_stops_its_guard_holds_up_no_episode(
    run_agent: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fifo: TextIO
) -> None:
    """If an agent suspends its guard process (SIGSTOP), the trainer kills the guard, and the next episode runs."""
    monkeypatch.setattr(workers, "END_SECONDS", 0.1)
    samples: list[dict] = [{"then": "stops_its_guard", "fifo": fifo.name}, {}]
    groups, stats = run_agent(
        mode_agents.Talks, *samples, subproc_max_workers=1, episode_timeout_seconds=200
    )
    assert (groups[0], groups[1]["rewards"].tolist(), stats.failed) == (None, [1.0], 1)
    assert "after its socket was closed, so it is killed" in caplog.text


def test_the_recipe_of_the_security_page_contains_an_agent(run_agent: Run, tmp_path: Path) -> None:
    """SECURITY.md gives a command that runs agents in a sandbox. An agent in the sandbox of SECURITY.md can find none
    of the trainer's processes, and no file in the folder that the sandbox hides."""
    recipe = (
        (ROOT / "SECURITY.md").read_text().split("```\n")[1].replace("/path/to/runs", str(tmp_path))
    )
    prefix = yaml.safe_load(recipe)["rollout"]["openai"]["subproc_prefix"]
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("this system allows no user namespaces")
    (tmp_path / "secret").write_text("the seed of the next batch")
    data = {"then": "is_contained", "hidden": str(tmp_path)}
    for subproc_prefix, reward in (prefix, 1.0), ([], 0.0):
        groups, _ = run_agent(mode_agents.Talks, data, subproc_prefix=subproc_prefix)
        assert [group["rewards"].tolist() for group in groups] == [[reward]]


def test_destroy_ends_agents_that_run(
    proxy: ProxyAddress, tiny_server: str, tmp_path: Path
) -> None:
    """The executor's destroy() ends running agents and every process that the agents started."""
    os.mkfifo(fifo := tmp_path / "fifo")
    engine = RemoteInfEngine([tiny_server])
    engine.initialize()
    executor = WorkflowExecutor(
        engine,
        RolloutConfig(consumer_batch_size=1, openai=OpenAIConfig(mode="subproc")),
        proxy=proxy,
    )
    executor.submit(QUESTION | {"then": "hangs", "fifo": str(fifo)}, mode_agents.Talks)
    with open(fifo) as file:
        assert file.read(5) == "alive"
        executor.destroy()
        assert file.read() == ""
    engine.destroy()


def test_what_cannot_be_pickled_is_named_before_anything_starts() -> None:
    """The error for an agent that cannot be pickled names the agent's class and suggests a change."""
    address = {"proxy_addr": "http://127.0.0.1:1", "admin_key": "k", "mode": "subproc"}
    with pytest.raises(
        ValueError, match=r"agent Unpicklable .*cannot be pickled.*clients in `run`.*mode=inline"
    ):
        resolve_workflow(mode_agents.Unpicklable, proxy=address)

    class Local(mode_agents.Talks):
        pass

    with pytest.raises(ValueError, match=r"agent Local .*define its class at the top of a module"):
        resolve_workflow(Local, proxy=address)
    inline = resolve_workflow(mode_agents.Unpicklable, proxy=address | {"mode": "inline"})
    assert isinstance(inline, OpenAIProxyWorkflow)


# ---------------------------------------------------------------- a run


@pytest.mark.runs
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_run_leaves_no_process(tmp_path: Path, end: signal.Signals) -> None:
    """After Ctrl-C or kill -9 of the trainer, a run in mode `subproc` leaves no process behind."""
    words = (*SMALL_GUESS, *SUBPROC, "train_dataset.batch_size=2", "max_steps=10000")
    process, pids = start_and_wait_for_step(tmp_path, *words)
    assert len([name for name in pids if "workers.serve" in name]) in (
        1,
        2,
    )  # each episode gets a new worker
    process.send_signal(end)
    process.communicate(timeout=30)
    metrics = (tmp_path / "e" / "t" / "metrics.jsonl").read_text().splitlines()
    check_metrics([json.loads(metrics[0])], eta=2)
    if end is signal.SIGINT:
        assert process.returncode == 130
        assert_gone(pids)
    for pid in pids.values():
        wait_gone(pid)


# ---------------------------------------------------------------- the pool of worker processes


@pytest.mark.anyio
async def test_a_worker_that_dies_while_idle_is_replaced() -> None:
    """If an idle worker was killed, the next call succeeds in a new process."""
    pool = WorkerPool(1)
    async with pool.worker() as worker:
        first, guard = await worker.call(os.getpid), await worker.call(os.getppid)
    os.kill(first, signal.SIGKILL)
    wait_gone(guard)
    async with pool.worker() as worker:
        assert await worker.call(os.getpid) != first
    await pool.aclose()


@pytest.mark.anyio
async def test_only_the_call_that_died_fails() -> None:
    """If the process of one of four calls ends, the other three calls return their results."""

    async def call(pool: WorkerPool, function: Callable, *args: Any) -> Any:
        async with pool.worker() as worker:
            return await worker.call(function, *args)

    pool = WorkerPool(2)
    calls = [call(pool, abs, -1), call(pool, os._exit, 7), call(pool, abs, -3), call(pool, abs, -4)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [results[0], *results[2:]] == [1, 3, 4]
    assert isinstance(results[1], WorkerDied)
    assert str(results[1]) == "the process that ran _exit ended with code 7"
    await pool.aclose()


# Each case has a line of code, which is part of a module, and a truth value. The truth value is True if a worker can
# fork after the worker has imported this module.
AT_IMPORT = {
    "nothing": ("pass", True),
    "uses torch's threads": ("torch.set_num_threads(2); torch.rand(1000, 1000).exp()", True),
    "starts a thread": (
        "threading.Thread(target=threading.Event().wait, daemon=True).start()",
        False,
    ),
    "starts a process": ("process = subprocess.Popen(['sleep', '60'])", False),
    "ignores SIGCHLD": ("signal.signal(signal.SIGCHLD, signal.SIG_IGN)", False),
}
MODULE = """import os, random, signal, subprocess, sys, threading

import numpy, torch

if "pytest" not in sys.modules:
    {}

def places():
    return os.getpid(), os.getppid()

def draw():
    torch.rand(1000, 1000).exp()
    return random.random(), numpy.random.random(), torch.rand(()).item()
"""


async def call_twice(name: str) -> list[Any]:
    """Call a function of the module `at_import` in two episodes of one worker pool, and return the two results."""
    results, function = [], getattr(importlib.import_module("at_import"), name)
    async with contextlib.aclosing(WorkerPool(1, fresh=True)) as pool:
        for _ in range(2):
            async with pool.worker() as worker:
                results.append(await within(100, worker.call(function), "the episode hangs"))
    return results


@pytest.fixture(params=AT_IMPORT)
def is_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> bool:
    """Make the module `at_import`. The fixture's value says whether its episodes are forks of one worker."""
    line, can_fork = AT_IMPORT[request.param]
    (tmp_path / "at_import.py").write_text(MODULE.format(line))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "at_import", raising=False)
    return can_fork and sys.platform == "linux"


@pytest.mark.anyio
async def test_the_episodes_of_a_worker_are_forks_of_one_process(is_forked: bool) -> None:
    """Two episodes run in two processes. On Linux both are forks of one process, which has imported the agent's module.
    If the module has started a thread or a process, or handles SIGCHLD, each episode gets a worker of its own."""
    (first, its_parent), (second, other_parent) = await call_twice("places")
    assert first != second
    assert (its_parent == other_parent) is is_forked


@pytest.mark.anyio
async def test_two_episodes_draw_different_random_numbers(is_forked: bool) -> None:
    """The generators of random, numpy and torch have other seeds in each episode. A fork that uses torch does not wait
    for threads that only the worker has."""
    for first, second in zip(*await call_twice("draw"), strict=True):
        assert first != second


@pytest.mark.anyio
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a process to its parent")
@pytest.mark.parametrize("fresh", [False, True])
async def test_no_process_outlives_a_guard_that_is_killed(fresh: bool) -> None:
    """If the guard of a worker is killed, the worker's other processes end."""
    async with contextlib.aclosing(WorkerPool(1, fresh=fresh)) as pool, pool.worker() as worker:
        processes = {
            name: await worker.call(get)
            for name, get in (("parent", os.getppid), ("call", os.getpid))
        }
        worker._process.kill()
        for pid in processes.values():
            wait_gone(pid)


@pytest.mark.anyio
async def test_a_function_that_a_worker_cannot_import_is_an_error_and_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a worker cannot import a function, the call raises the worker's error, and the worker serves the next
    call."""
    (tmp_path / "only_here.py").write_text("def f():\n    return 1\n")
    pool = WorkerPool(1)
    async with pool.worker() as worker:
        monkeypatch.syspath_prepend(tmp_path)  # the sys.path of the running worker does not change
        module = __import__("only_here")
        with pytest.raises(RuntimeError, match="only_here") as caught:
            await worker.call(module.f)
        assert "in a worker process" in str(caught.value.__cause__)
        assert await worker.call(abs, -2) == 2
    await pool.aclose()


@pytest.mark.anyio
async def test_work_that_swallows_its_cancellation_is_abandoned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If an agent catches its cancellation and continues, the time limit still ends the episode, and the log names the
    agent."""
    monkeypatch.setattr(workers, "ABANDON_SECONDS", 0.01)
    release = asyncio.Event()

    async def swallows() -> None:
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()

    with pytest.raises(TimeoutError, match="the agent of task 7-0"):
        await within(0.01, swallows(), "the agent of task 7-0 took too long")
    assert "ignores its cancellation and still runs: the agent of task 7-0" in caplog.text
    release.set()


@pytest.mark.anyio
async def test_a_worker_gets_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's environment does not contain the keys of the run, such as POCKET_AREAL_SERVER_KEY, but contains the
    user's other keys."""
    monkeypatch.setenv("POCKET_AREAL_SERVER_KEY", "secret")
    monkeypatch.setenv("MY_TOOLS_KEY", "the agent's")
    async with contextlib.aclosing(WorkerPool(1)) as pool, pool.worker() as worker:
        assert await worker.call(os.getenv, "POCKET_AREAL_SERVER_KEY") is None
        assert await worker.call(os.getenv, "MY_TOOLS_KEY") == "the agent's"


@pytest.mark.anyio
async def test_a_result_runs_no_code_in_the_trainer(tmp_path: Path) -> None:
    """If a worker returns an object whose pickle would run code, the call raises an error, and the trainer does not run
    the code."""
    pool = WorkerPool(1)
    async with contextlib.aclosing(pool), pool.worker() as worker:
        with pytest.raises(RuntimeError, match="AttributeError"):
            await worker.call(mode_agents.Bomb, str(tmp_path / "ran"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.anyio
async def test_a_result_that_is_too_long_is_not_read() -> None:
    """The trainer refuses a worker's result that is longer than MOST_BYTES. After a refused result, the next call runs
    in a new worker process."""
    pool = WorkerPool(1)
    async with pool.worker() as worker:
        with pytest.raises(RuntimeError, match="at most 16,777,216 are allowed"):
            await worker.call(str.rjust, "x", workers.MOST_BYTES)
    async with pool.worker() as worker:
        assert await worker.call(str.upper, "x") == "X"
    await pool.aclose()


@pytest.mark.anyio
async def test_a_limit_tells_its_own_timeout_from_another() -> None:
    """If the coroutine that `within` awaits raises a TimeoutError, `within` raises this TimeoutError unchanged."""

    async def fails() -> None:
        raise TimeoutError("the tool")

    with pytest.raises(TimeoutError, match="the tool"):
        await within(60, fails(), "the episode")
    with pytest.raises(TimeoutError, match="the episode"):
        await within(0, asyncio.sleep(3600), "the episode")


@pytest.mark.anyio
async def test_an_error_that_nobody_waits_for_prints_nothing() -> None:
    """If the caller of `within` is cancelled, asyncio does not report an exception that the awaited coroutine raises
    afterwards."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))

    async def fails() -> None:
        callers[0].cancel()
        raise OSError("no board")

    callers = [asyncio.ensure_future(within(60, fails(), "the episode"))]
    await asyncio.wait(callers)
    assert callers.pop().cancelled()
    gc.collect()  # asyncio reports an unretrieved exception when the exception's task is deleted
    assert reported == []


def test_a_loop_that_ends_takes_its_workers_along() -> None:
    """The workers of an event loop end when the loop ends, even if no code closes their pool."""
    script = (
        "import asyncio, os\n"
        "from rollout import workers\n"
        "from inference.wire import PerLoop\n"
        "pool = PerLoop(lambda: workers.WorkerPool(1))\n"
        "async def main():\n"
        "    async with (await pool.get()).worker() as worker:\n"
        "        return await worker.call(os.getpid)\n"
        "print(asyncio.run(main()), asyncio.run(main()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    first, second = map(int, done.stdout.split())
    assert first != second
    assert_gone({"first": first, "second": second})
