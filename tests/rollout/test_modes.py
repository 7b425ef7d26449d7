"""What an agent may return, and how its episode ends. The result is the same inline and in a
process, and a process serves the next episode only after a success."""

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import mode_agents
import numpy as np
import pytest
import torch
from conftest import ROOT
from openai import AsyncOpenAI, DefaultAioHttpClient
from runs import assert_gone

from engine import RemoteInfEngine
from proxy import ProxyAddress
from rollout.executor import WorkflowExecutor
from rollout.trajectory import to_tensors
from rollout.workers import WorkerPool, within
from run.config import OpenAIConfig, RolloutConfig
from staleness import RolloutStat, StalenessManager
from workflow import WorkflowContext, resolve_workflow, workflow_context

pytestmark = pytest.mark.anyio
QUESTION = {"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}
ONE: dict[str, Any] = {"mode": "subproc", "subproc_max_workers": 1}
FAILED = [None], RolloutStat(rejected=1, failed=1)
Run = Callable[..., Any]


def exits() -> Any:
    """A future whose exception is read. Otherwise asyncio would log it during a later test."""
    return asyncio.gather(asyncio.to_thread(sys.exit), return_exceptions=True)


@pytest.fixture
def run_agent(proxy: ProxyAddress, tiny_server: str) -> Iterator[Run]:
    """run_agent(agent, *samples, **openai) runs a group per sample; it returns groups and
    counts."""
    engine = RemoteInfEngine([tiny_server])
    engine.initialize()
    engine.proxy = proxy

    def run(agent: Any, *samples: dict, group_size: int = 1, **openai: Any) -> Any:
        config = RolloutConfig(openai=OpenAIConfig(**openai))
        executor = WorkflowExecutor(engine, config, StalenessManager(engine, 9, 9, 0))
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


# ---------------------------------------------------------------- what an agent returns


class Asks:
    """Calls the model `turns` times in one conversation, and returns `result(ids)`."""

    def __init__(self, result: Callable[[list[str]], Any], turns: int = 2) -> None:
        self.result, self.turns = result, turns

    async def run(self, data: dict, **client: Any) -> Any:
        messages, ids = list(data["messages"]), []
        completions = AsyncOpenAI(**client, max_retries=0).chat.completions
        for _ in range(self.turns):
            reply = await completions.create(model="m", messages=messages, max_tokens=4)
            ids.append(reply.id)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            messages.append({"role": "user", "content": "go on"})
        return self.result(ids)


def test_an_agent_may_return_a_number(run_agent: Run) -> None:
    """The number is the reward of the last completion. An earlier completion gets turn_discount
    times the reward of the next one."""
    agent = Asks(lambda ids: np.float32(1), turns=3)
    [group], _ = run_agent(agent, turn_discount=0.5, export_style="individual")
    assert group["rewards"].tolist() == [0.25, 0.5, 1.0]
    [row], _ = run_agent(agent, turn_discount=0.5, export_style="concat")
    trained = row["loss_mask"] > 0
    assert row["turn_ids"][trained].unique().tolist() == [0, 1, 2]
    assert row["turn_rewards"][trained].unique().tolist() == [0.25, 0.5, 1.0]
    assert row["versions"][trained].unique().tolist() == [0]
    assert (row["logprobs"][trained] < 0).all()
    assert row["logprobs"].isfinite().all()


class Own(Asks):
    async def run(self, data: dict, **client: Any) -> Any:
        async with DefaultAioHttpClient() as client["http_client"]:
            return await super().run(data, **client)


def test_an_agent_may_make_its_own_client(run_agent: Run, monkeypatch) -> None:
    """The client does not send its requests to an HTTP proxy."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.org")
    assert run_agent(Own(lambda ids: 1.0))[0][0]["rewards"].tolist() == [1.0]


def test_an_agent_may_close_its_client(run_agent: Run) -> None:
    """All agents share one HTTP client of the SDK's own class. It is closed only when the executor
    ends."""
    clients = []

    class Closes(Asks):
        async def run(self, data: dict, **client: Any) -> Any:
            clients.append(client["http_client"])
            reward = await super().run(data, **client)
            await AsyncOpenAI(**client).close()
            return reward

    [group], stats = run_agent(Closes(lambda ids: 1.0), group_size=3)
    assert group["rewards"].tolist() == [1.0, 1.0, 1.0]
    assert stats.failed_members == 0
    assert len({*map(id, clients)}) == 1
    assert isinstance(clients[0], DefaultAioHttpClient)
    assert clients[0].is_closed


def test_the_last_row_of_an_episode_is_of_the_conversation_itself(run_agent: Run) -> None:
    """Side conversations, which have no reward, come first."""

    class AsksForATitle(Asks):
        async def run(self, data: dict, **client: Any) -> Any:
            title = [{"role": "system", "content": "You write titles."}, *data["messages"]]
            reward = await super().run(data, **client)
            await super().run({"messages": title}, **client)
            return reward

    [group], _ = run_agent(AsksForATitle(lambda ids: 1.0, turns=1), export_style="individual")
    assert group["side_conversations"].tolist() == [1, 0]
    assert group["rewards"].tolist() == [0.0, 1.0]


def test_a_dict_rewards_the_completions_it_names(run_agent: Run) -> None:
    """An id that nobody knows fails the episode."""
    agent = Asks(lambda ids: {ids[0]: 3, ids[1]: np.float32(1)})
    [group], _ = run_agent(agent, export_style="individual")
    assert group["rewards"].tolist() == [4.0, 1.0]
    assert run_agent(Asks(lambda ids: {"nobody": 1.0})) == FAILED


def test_none_means_what_the_agent_set_itself(run_agent: Run) -> None:
    """If the agent has set no reward, the episode is rejected. If it has set a reward of 0, the
    episode is accepted."""
    assert run_agent(Asks(lambda ids: None)) == ([None], RolloutStat(rejected=1))

    class SetsItself(Asks):
        async def run(self, data: dict, **client: Any) -> None:
            await super().run(data, **client)
            url = client["base_url"].removesuffix("/v1") + "/rl/set_reward"
            assert (await client["http_client"].post(url, json={"reward": 0.0})).status_code == 200

    [group], stats = run_agent(SetsItself(lambda ids: None))
    assert group["rewards"].tolist() == [0.0]
    assert stats == RolloutStat(withdrawn=1)


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        (Asks(lambda ids: "1.0"), "is needed, not '1.0'"),
        (Asks(lambda ids: float("nan")), "is needed, not nan"),
        (Asks(lambda ids: 1.0, turns=0), "rollout task 0 failed"),
        (Asks(lambda ids: 1 / 0), "ZeroDivisionError"),
        (Asks(lambda ids: sys.exit("enough")), "SystemExit('enough')"),
        (Asks(lambda ids: exits()), "is needed, not <_GatheringFuture"),
    ],
)
def test_what_is_no_reward_is_named(run_agent: Run, caplog: Any, agent: Any, said: str) -> None:
    """The episode fails, and the log says why."""
    assert run_agent(agent) == FAILED
    assert said in caplog.text


def test_an_episode_that_takes_too_long_is_cancelled(
    run_agent: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """The cancelled episode counts as failed."""
    cancelled = threading.Event()

    class Hangs:
        async def run(self, data: dict, **extra_kwargs: Any) -> float:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            return 1.0

    assert run_agent(Hangs(), episode_timeout_seconds=0.2) == FAILED
    assert cancelled.is_set()
    assert "took longer than 0.2 s (rollout.openai.episode_timeout_seconds)" in caplog.text


# ---------------------------------------------------------------- one episode in both modes


async def test_both_modes_sample_the_same_tokens(proxy: ProxyAddress) -> None:
    """An episode has the same seed in both modes."""
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
    """The clients read the session's URL and key from the environment, and bypass an HTTP proxy."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "somebody's own")
    groups, stats = run_agent(mode_agents.Reads, {}, {}, {}, **ONE)
    assert [group["rewards"].tolist() for group in groups] == [[1.0]] * 3
    assert stats == RolloutStat(withdrawn=3)


def test_a_waiting_episode_holds_no_session(run_agent: Run, proxy: ProxyAddress) -> None:
    """With one process, one session is open at a time."""
    groups, _ = run_agent(mode_agents.CountsSessions, *[{"proxy": proxy.proxy_addr}] * 4, **ONE)
    assert [group["rewards"].tolist() for group in groups] == [[1.0]] * 4


# ---------------------------------------------------------------- agents that end in different ways


ENDS = {
    "leaves_at_once": "ended with code 0",
    "is_killed": "ended with code -9",
    "exits": "SystemExit: enough",
    "raises": r"LookupError: no such tool",
    "breaks_off": r"BadRequestError.*messages",
}


def test_a_failing_agent_is_counted_and_the_next_one_runs(
    run_agent: Run, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture
) -> None:
    """The log has the type and the text of its exception, or how its process ended."""
    samples: list[dict] = [sample for then in ENDS for sample in ({"then": then}, {})]
    groups, stats = run_agent(mode_agents.Talks, *samples, **ONE)
    rewards = [None if group is None else group["rewards"].tolist() for group in groups]
    assert rewards == [None, [1.0]] * len(ENDS)
    assert (stats.failed, stats.rejected) == (len(ENDS), len(ENDS))
    assert [says for says in ENDS.values() if not re.search(says, caplog.text)] == []
    assert "Event loop is closed" not in capfd.readouterr().err


def test_destroy_ends_running_agents(proxy: ProxyAddress, tiny_server: str, tmp_path: Path) -> None:
    """Every process that they started ends, too."""
    os.mkfifo(fifo := tmp_path / "fifo")
    engine = RemoteInfEngine([tiny_server])
    engine.initialize()
    engine.proxy = proxy
    config = RolloutConfig(openai=OpenAIConfig(mode="subproc"))
    executor = WorkflowExecutor(engine, config, StalenessManager(engine, 1, 1, 0))
    executor.submit(QUESTION | {"then": "hangs", "fifo": str(fifo)}, mode_agents.Talks)
    with open(fifo) as file:
        assert file.read(5) == "alive"
        executor.dispatcher.destroy()
        assert file.read() == ""
    engine.destroy()


# ---------------------------------------------------------------- the pool of processes


async def test_only_the_call_that_died_fails() -> None:
    """The others return, even those that waited for a process."""

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
    """The next call is served."""
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
    """A worker gets the user's other keys. The trainer does not unpickle the worker's results."""
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
    """The workers end even if nobody closes their pool."""
    script = (
        "import asyncio, os\n"
        "from rollout import reward\n"
        "async def main():\n"
        "    async with (await reward.pools('agents', 1).get()).worker() as call:\n"
        "        return await call(os.getpid)\n"
        "print(asyncio.run(main()), asyncio.run(main()))\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    first, second = map(int, done.stdout.split())
    assert first != second
    assert_gone({"first": first, "second": second})
