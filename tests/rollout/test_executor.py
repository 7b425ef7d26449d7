"""The executor returns groups in order of start, runs each sample with the arguments of the call that drew it, and
loses no sample."""

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mode_agents import MyAgent
from openai import AsyncOpenAI, DefaultAioHttpClient
from scripted import Echo, ScriptedEngine, loader
from torch.utils.data import DataLoader

from engine import RemoteInfEngine
from inference.io_struct import GenerationHyperparameters
from rollout.dispatcher import ServerRestarted
from rollout.executor import ProxyAddress, WorkflowExecutor
from run.evaluate import start_evaluation
from run.inputs import Inputs
from run.keys import OpenAIConfig, RolloutConfig
from staleness import RolloutStat
from workflow import RLVRWorkflow, RolloutWorkflow, workflow_context

Make = Callable[..., WorkflowExecutor]


SAMPLES = [{"n": n} for n in range(5)]


class Waits(Echo):
    """A workflow whose episode of sample n waits until the event gates[n] is set."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gates = {n: asyncio.Event() for n in range(count)}
        self.started: list[int] = []
        self.loop: asyncio.AbstractEventLoop | None = None

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        self.loop = asyncio.get_running_loop()
        self.started.append(data["n"])
        await self.gates[data["n"]].wait()
        if data["n"] == 3:  # episode 3 ends first, then episodes 2, 1 and 0
            self.gates[2].set()
        elif data["n"] > 0:
            self.gates[data["n"] - 1].set()
        return await super().arun_episode(engine, data)

    def __deepcopy__(self, memo: dict) -> "Waits":
        return self


@pytest.fixture
def make(tiny_tokenizer: Any) -> Iterator[Make]:
    """Return a function make(**options) that returns an executor with a ScriptedEngine. The executor is destroyed after
    the test."""
    made: list[WorkflowExecutor] = []

    def make(
        engine: Any = None, config: dict[str, Any] | None = None, **options: Any
    ) -> WorkflowExecutor:
        settings = {"consumer_batch_size": 2, "max_head_offpolicyness": 0} | (config or {})
        engine = engine or ScriptedEngine(tiny_tokenizer)
        made.append(WorkflowExecutor(engine, RolloutConfig(**settings), **options))
        return made[-1]

    yield make
    for executor in made:
        executor.destroy()


def next_version(executor: WorkflowExecutor) -> None:
    executor.engine.set_version(executor.engine.get_version() + 1)


# ---------------------------------------------------------------- prepare_batch


def test_prepare_batch_cycles_the_data_in_its_own_order(make: Make) -> None:
    """Batches follow the order of the dataloader, epoch after epoch."""
    executor, data = make(), loader(SAMPLES)
    seen = []
    for _ in range(5):
        batch = executor.prepare_batch(data, Echo())
        seen += batch["input_ids"][:, 0].tolist()
        next_version(executor)
    assert seen == [1, 2, 3, 4, 5] * 2
    assert batch["task_ids"].tolist() == [8, 9]


def test_the_order_of_the_data_is_the_loaders_own_generator(make: Make) -> None:
    """Two runs with the same dataloader seed get the samples in the same order. Each epoch has a different order."""

    def epochs(seed: int) -> list[int]:
        executor, data, seen = make(), loader(SAMPLES, seed=seed), []
        for _ in range(5):
            seen += executor.prepare_batch(data, Echo())["input_ids"][:, 0].tolist()
            next_version(executor)
        return seen

    first = epochs(seed=1)
    assert first == epochs(seed=1)
    assert sorted(first[:5]) == sorted(first[5:]) == [1, 2, 3, 4, 5]
    assert first[:5] != first[5:]


def test_every_loader_begins_at_its_own_beginning(make: Make) -> None:
    """prepare_batch may be called alternately with two dataloaders, as in a curriculum. Each dataloader continues with
    the sample after the last sample that it has returned."""
    executor, loaders, seen = (
        make(),
        [loader(SAMPLES), loader([{"n": n} for n in range(10, 15)])],
        [],
    )
    for data in (*loaders, *loaders):
        for _ in range(2):
            seen += executor.prepare_batch(data, Echo())["rewards"].tolist()
            next_version(executor)
    assert [n for n in seen if n < 10] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    assert [n for n in seen if n >= 10] == [10, 11, 12, 13, 14, 10]


def test_a_loader_that_raises_says_so_at_every_call(make: Make) -> None:
    """If a dataloader raises an error, every call of prepare_batch raises the same error. After the data are repaired,
    the dataloader begins again with its first sample."""
    samples: list[dict] = [{"n": 0}, {}]

    def collate(batch: list[dict]) -> list[dict]:
        return [{"n": sample["n"]} for sample in batch]

    executor, data = make(), DataLoader[Any](samples, batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(KeyError, match="n"):
            executor.prepare_batch(data, Echo())
    samples[1]["n"] = 1
    assert executor.prepare_batch(data, Echo())["rewards"].tolist() == [0.0, 1.0]


def test_every_call_is_served_by_its_own_arguments(make: Make) -> None:
    """A sample runs with the workflow, the workflow's arguments and the group size of the call of prepare_batch that
    drew the sample."""
    executor, data = make(), loader(SAMPLES)
    rows = []
    for step in range(4):
        batch = executor.prepare_batch(data, Echo, {"name": step}, group_size=1 + step)
        rows.append(batch["input_ids"].tolist())
        next_version(executor)
    assert rows[0] == [[1, 0, 0], [2, 0, 0]]
    assert rows[1] == [
        [3, 0, 0],
        [4, 0, 0],
    ]  # prepare_batch took these samples from the dataloader in its first call
    assert rows[2] == [[5, 0, 1], [5, 1, 1], [1, 0, 1], [1, 1, 1]]
    assert rows[3] == [[2, i, 2] for i in range(3)] + [[3, i, 2] for i in range(3)]


def test_rows_come_in_order_of_start_and_members_in_order(make: Make) -> None:
    """The rows of a batch are in order of start, and the members of a group are adjacent, even if the last group
    finishes first."""
    executor, workflow = make(config={"consumer_batch_size": 4}), Waits(4)
    workflow.gates[3].set()
    batch = executor.prepare_batch(loader(SAMPLES[:4], batch_size=4), workflow, group_size=2)
    assert batch["input_ids"][:, :2].tolist() == [[n, i] for n in (1, 2, 3, 4) for i in (0, 1)]
    assert batch["group_ids"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_rejected_groups_are_refilled_and_failed_ones_counted(make: Make) -> None:
    """A group of the next prompt replaces a rejected or failed group. The statistics count rejected and failed
    groups."""
    executor = make()
    workflow = Echo(fails=(0,), rejects=(1,))
    batch = executor.prepare_batch(
        loader(SAMPLES), workflow, None, lambda traj: bool(traj["rewards"][0] != 2)
    )
    assert batch["rewards"].tolist() == [3.0, 4.0]
    assert replace(executor.stats, enqueued=0) == RolloutStat(accepted=2, rejected=3, failed=1)


def test_a_failing_member_is_counted_beside_the_groups(make: Make) -> None:
    """A group with a failed member is accepted, and failed_members counts the member."""

    class OneFails(Echo):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            if workflow_context.get().sample_idx == 1:
                raise ValueError("no tool")
            return await super().arun_episode(engine, data)

    executor = make()
    batch = executor.prepare_batch(loader(SAMPLES), OneFails(), group_size=3)
    assert batch["input_ids"][:, :2].tolist() == [[1, 0], [1, 2], [2, 0], [2, 2]]
    assert replace(executor.stats, enqueued=0) == RolloutStat(accepted=2, failed_members=2)


class Panic(BaseException):
    """An exception that is not a subclass of Exception. Libraries written in Rust raise exceptions that do not inherit
    from Exception."""


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize(
    "error",
    [ValueError("broken"), SystemExit("broken"), GeneratorExit("broken"), Panic("broken")],
    ids=repr,
)
def test_whatever_an_episode_raises_is_its_failure(
    make: Make, caplog: pytest.LogCaptureFixture, error: BaseException, group_size: int
) -> None:
    """If an episode raises any exception, the failure is counted and logged, and a group of the next prompt replaces
    the failed group."""

    class Raises(Echo):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            if data["n"] == 0:
                raise error
            return await super().arun_episode(engine, data)

    executor = make()
    executor.submit(SAMPLES[0], Raises(), group_size=group_size)
    executor.submit(SAMPLES[1], Raises(), group_size=group_size)
    assert executor.wait(1, timeout=30)["rewards"].tolist() == [1.0] * group_size
    assert executor.stats == RolloutStat(accepted=1, rejected=1, failed=1)
    assert re.search("rollout task 0 failed: .*broken", caplog.text)


@pytest.mark.parametrize("group_size", [1, 2])
def test_a_failure_that_a_dead_process_caused_is_nobodys(make: Make, group_size: int) -> None:
    """If the proxy's process ends, the run stops before any episode counts as failed. After the end of the run, every
    call of state_dict raises an error.

    If a failure were counted, a new prompt would replace the prompt of the failed episode, and the next checkpoint
    would not contain the replaced prompt.
    """

    class LosesItsProxy(Echo):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            if workflow_context.get().sample_idx == group_size - 1:
                raise ConnectionError("refused")
            return await super().arun_episode(engine, data)

    executor = make(hold_failures=0.5)
    threading.Timer(
        0.2, executor.fail, [RuntimeError("the proxy ended")]
    ).start()  # in a real run, a thread that watches the proxy calls fail()
    with pytest.raises(RuntimeError, match="the proxy ended"):
        executor.prepare_batch(loader(SAMPLES), LosesItsProxy(), group_size=group_size)
    with pytest.raises(RuntimeError, match="the proxy ended"):
        executor.state_dict()
    assert executor.stats.failed == 0
    assert executor.stats.accepted == 0


def test_the_same_failure_again_and_again_stops_the_run(make: Make) -> None:
    """A workflow that always raises an exception stops the run, and the first exception is the cause of the error."""
    executor = make()
    with pytest.raises(RuntimeError, match="sample 0 is broken") as stopped:
        executor.prepare_batch(loader(SAMPLES), Echo(fails=(0, 1, 2, 3, 4)))
    assert isinstance(stopped.value.__cause__, ValueError)


def test_the_loaders_batch_is_what_the_gate_counts(make: Make) -> None:
    """prepare_batch raises an error if the dataloader's batch size is not consumer_batch_size, or if the dataloader
    has no samples."""
    with pytest.raises(
        ValueError, match="consumer_batch_size=2 must equal the dataloader's batch_size=3"
    ):
        make().prepare_batch(loader(SAMPLES, batch_size=3), Echo())
    with pytest.raises(ValueError, match="no samples"):
        make().prepare_batch(loader([]), Echo())


def test_group_size_and_n_samples_are_one_number(make: Make) -> None:
    """A caller may set group_size or n_samples. If group_size and n_samples are set to different numbers, prepare_batch
    raises an error. Evaluation may use a different group size than training."""
    executor = make(gconfig=GenerationHyperparameters(n_samples=3))
    with pytest.raises(ValueError, match=r"group_size=2 and gconfig.n_samples=3 are one number"):
        executor.prepare_batch(loader(SAMPLES), Echo(), group_size=2)
    assert len(executor.prepare_batch(loader(SAMPLES), Echo())["rewards"]) == 6
    assert (
        len(make(config={"group_size": 4}).prepare_batch(loader(SAMPLES), Echo())["rewards"]) == 8
    )
    evaluation = executor.for_evaluation()
    assert (
        len(evaluation.rollout_batch(SAMPLES, Echo(), group_size=1, is_eval=True)["rewards"]) == 5
    )
    evaluation.destroy()


def test_should_accept_fn_may_be_named_and_must_be_a_function(make: Make) -> None:
    """should_accept_fn may be a function or an import path "module.function". A should_accept_fn that is neither a
    function nor an import path raises a TypeError."""
    executor = make()
    batch = executor.prepare_batch(loader(SAMPLES), Echo(), should_accept_fn=f"{__name__}.is_even")
    assert batch["rewards"].tolist() == [0.0, 2.0]
    with pytest.raises(
        TypeError, match=r"should_accept_fn must be a function or 'module.function', not 7"
    ):
        executor.submit(SAMPLES[0], Echo(), should_accept_fn=7)


def is_even(traj: dict[str, torch.Tensor]) -> bool:
    return traj["rewards"][0].item() % 2 == 0


# ---------------------------------------------------------------- submit, wait and evaluation


def test_submit_and_wait(make: Make) -> None:
    """`wait` returns the accepted groups that started first. `wait_for_task` returns one group, or None if this group
    was rejected."""
    executor = make(config={"consumer_batch_size": 8})
    workflow = Echo(rejects=(1,))
    ids = [executor.engine.executor.submit(sample, workflow) for sample in SAMPLES]
    one = executor.wait_for_task(ids[3], timeout=30)
    assert one is not None
    assert one["rewards"].tolist() == [3.0]
    assert executor.wait_for_task(ids[1], timeout=30) is None
    assert executor.wait(3, timeout=30)["rewards"].tolist() == [0.0, 2.0, 4.0]
    assert executor.stats.accepted == 3


@pytest.mark.parametrize("group_size", [1, 2])
def test_the_live_table_counts_every_episode(make: Make, group_size: int) -> None:
    """`ended` counts the episodes that have ended, whether a prompt has one episode or a group of episodes."""
    executor = make(config={"consumer_batch_size": 8})
    executor.rollout_batch(SAMPLES, Echo(rejects=(1,)), group_size=group_size)
    assert executor.ended == 5 * group_size


def test_rollout_batch_keeps_the_order_of_the_data(make: Make) -> None:
    """rollout_batch returns the accepted groups in the order of the prompts, and raises an error if no group was
    accepted."""
    executor = make(config={"consumer_batch_size": 8})
    assert executor.rollout_batch(SAMPLES, Echo(rejects=(1,)))["rewards"].tolist() == [
        0.0,
        2.0,
        3.0,
        4.0,
    ]
    with pytest.raises(RuntimeError, match="none of 5 rollouts was accepted"):
        executor.rollout_batch(SAMPLES, Echo(rejects=(0, 1, 2, 3, 4)))


def test_evaluation_needs_no_new_version_and_leaves_the_engine_alone(
    make: Make, tmp_path: Path
) -> None:
    """Evaluation has an executor of its own, which has no staleness gate. The engine keeps the executor of training."""

    class Sees(Echo):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            assert workflow_context.get().is_eval
            return await super().arun_episode(engine, data)

    executor = make()
    evaluation = executor.for_evaluation()
    many = [{"n": n} for n in range(40)]
    batch = evaluation.rollout_batch(many, Sees(), group_size=1, is_eval=True)
    assert batch["rewards"].tolist() == [float(n) for n in range(40)]
    evaluation.destroy()
    assert executor.engine.executor is executor
    assert executor.stats == RolloutStat()


def test_a_restart_of_a_server_repeats_no_episode_of_an_evaluation(make: Make) -> None:
    """If a server is restarted during an evaluation, the trainer pushes the weights, and the evaluation then waits for
    the episodes that it has already started."""
    evaluation = make().for_evaluation()
    played: list[int] = []

    class Restarts(Echo):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            played.append(data["n"])
            if data["n"] == 3:
                evaluation.dispatcher.interrupt(ServerRestarted)
            return await super().arun_episode(engine, data)

    finish = start_evaluation(
        evaluation, Inputs(None, [], [{"n": n} for n in range(6)], None, None, Restarts())
    )
    assert finish() is None
    found, left = finish(), evaluation.dispatcher.in_flight()
    evaluation.destroy()
    assert found["eval_episodes"] == 6
    assert sorted(played) == [0, 1, 2, 3, 4, 5]
    assert not left


def test_a_workflow_cannot_change_the_dataset(make: Make) -> None:
    """Each episode gets a copy of its sample, so no workflow can change the dataset."""

    class Writes(Echo):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            data["n"] += 100
            return await super().arun_episode(engine, data)

    samples = [{"n": 0}, {"n": 1}]
    make().prepare_batch(loader(samples), Writes())
    assert samples == [{"n": 0}, {"n": 1}]


def test_pause_holds_back_what_has_not_started(make: Make) -> None:
    """Between pause and resume no group starts."""
    executor = make()
    executor.pause()
    task_id = executor.submit(SAMPLES[0], Echo())
    assert executor.stats == RolloutStat(enqueued=1)
    executor.resume()
    assert executor.wait_for_task(task_id, timeout=30) is not None


def test_a_failure_outside_ends_every_call(make: Make) -> None:
    """After fail(error), every call raises an error that contains the reason."""
    executor = make()
    executor.fail(ChildProcessError("the server died"))
    with pytest.raises(RuntimeError, match="the server died"):
        executor.prepare_batch(loader(SAMPLES), Echo())


def test_destroy_may_be_repeated(make: Make) -> None:
    """A second destroy() has no effect. After destroy(), every call except destroy() raises an error."""
    executor = make()
    executor.submit(SAMPLES[0], Waits(1))
    executor.destroy()
    executor.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        executor.submit(SAMPLES[0], Echo())


# ---------------------------------------------------------------- trajectories


class Bad(RolloutWorkflow):
    """A workflow that returns data["returns"]."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        return data["returns"]


@pytest.mark.parametrize("group_size", [1, 2])
def test_a_malformed_trajectory_is_a_failure_that_is_explained(
    make: Make, caplog: pytest.LogCaptureFixture, group_size: int
) -> None:
    """A task fails if its trajectory is malformed or has other keys than earlier trajectories. The log says why the
    task failed."""
    executor = make(config={"consumer_batch_size": 9})
    good = {"input_ids": torch.ones(1, 2), "attention_mask": torch.ones(1, 2)}
    flat = {key: value[0] for key, value in good.items()}
    for returns in (
        good,
        {"input_ids": torch.ones(2)},
        good | {"hint": torch.ones(1)},
        {},
        flat,
        1.0,
    ):
        executor.wait_for_task(
            executor.submit({"returns": returns}, Bad(), group_size=group_size), timeout=30
        )
    assert executor.stats.failed == 5
    said = [
        record.getMessage() for record in caplog.records if "rollout task" in record.getMessage()
    ]
    explained = [
        "lacks attention_mask; it has",
        r"adds \['hint'\]",
        "it has no keys",
        "its shape is",
        "not float",
    ]
    for message, words in zip(said, explained, strict=True):
        assert re.search(words, message)


def test_the_tokens_age_is_taken_from_the_trajectory(make: Make) -> None:
    """Only generated tokens determine the age of a group, so a prompt with version -1 does not make the group old."""

    class PromptIsMinusOne(Echo):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            traj = await super().arun_episode(engine, data)
            traj["versions"][:, :2] = -1
            return traj

    executor, data = make(), loader(SAMPLES)
    for version in range(3):
        batch = executor.prepare_batch(data, PromptIsMinusOne())
        assert batch["versions"][:, 2].tolist() == [version] * 2
        next_version(executor)


class OneIsSlow(Echo):
    """Task 0 ends when the version is 2. The three tokens of task 0 have the versions 0, 1 and 2, and all three tokens
    are trained."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        traj = await super().arun_episode(engine, data)
        if workflow_context.get().task_id == 0:
            while engine.get_version() < 2:
                await asyncio.sleep(0.001)
            traj["loss_mask"][:] = 1
            traj["versions"] = torch.tensor([[0, 1, 2]], dtype=torch.int32)
        return traj


@pytest.mark.parametrize("stale", ["mask", "drop"])
def test_no_step_waits_for_a_slow_group(make: Make, stale: str) -> None:
    """With stale=mask, the loss excludes those tokens of a slow group that are more than eta versions old. With
    stale=drop, the whole group is dropped. With stale=mask and with stale=drop, no trained token is more than eta
    versions old."""
    executor, data, slow = (
        make(config={"max_head_offpolicyness": 1, "stale": stale}),
        loader(SAMPLES),
        list[int](),
    )
    while not slow and executor.stats.dropped == 0:
        version, batch = executor.engine.get_version(), executor.prepare_batch(data, OneIsSlow())
        assert batch["versions"][batch["loss_mask"] > 0].min() >= version - 1
        slow += [row for row, task_id in enumerate(batch["task_ids"].tolist()) if task_id == 0]
        assert not slow or version >= 2
        next_version(executor)
    if stale == "drop":
        assert (slow, executor.stats.dropped) == ([], 1)
        return
    assert executor.stats.dropped == 0
    left = [int(number >= version - 1) for number in range(3)]  # eta is 1
    assert batch["loss_mask"][slow].tolist() == [left]
    assert batch["masked"].sum() == batch["masked"][slow].sum() == 3 - sum(left) > 0


def test_a_version_that_the_trainer_has_not_made_is_a_failure(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """An episode fails if any token of its trajectory has a newer version than the trainer, even if the trajectory's
    oldest token is not too old."""

    class LastTokenIsFromTheFuture(Echo):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            traj = await super().arun_episode(engine, data)
            traj["versions"][:, -1] = 999
            return traj

    executor = make()
    assert executor.wait_for_task(executor.submit(SAMPLES[0], LastTokenIsFromTheFuture())) is None
    assert "a token has version 999, which the trainer has not made" in caplog.text


async def pays(
    prompt: str, completion: str, prompt_ids: list, completion_ids: list, **data: Any
) -> float:
    return 1.0


def test_dumps_are_the_documents_lines(make: Make, tiny_tokenizer: Any, tmp_path: Path) -> None:
    """Dumped files have the paths and the fields that AReaL's page Rollout Workflow describes (section "Trajectory
    Dumping")."""
    engine = ScriptedEngine(tiny_tokenizer, lambda request: "vier")
    executor = make(engine, tokenizer=tiny_tokenizer, dump_dir=tmp_path)
    engine.set_version(5)
    sample = {"messages": [{"role": "user", "content": "2+2?"}]}
    kwargs = {"reward_fn": pays}
    executor.wait_for_task(executor.submit(sample, RLVRWorkflow, kwargs, group_size=2), timeout=30)
    executor.wait_for_task(executor.submit(sample, RLVRWorkflow, kwargs, is_eval=True), timeout=30)
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.jsonl"))
    assert files == ["eval-rollout/5/1.jsonl", "rollout/5/0.jsonl"]
    lines = [json.loads(line) for line in (tmp_path / "rollout/5/0.jsonl").read_text().splitlines()]
    prompt = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    prompt_len = len(tiny_tokenizer.encode(prompt))
    assert lines == [
        {
            "task_id": 0,
            "sample_idx": i,
            "seqlen": prompt_len + 5,
            "prompt_len": prompt_len,
            "head_version": 5,
            "tail_version": 5,
            "reward": 1.0,
            "prompt": prompt,
            "completion": "vier<|im_end|>",
        }
        for i in range(2)
    ]


def test_dumps_without_a_tokenizer_are_refused_at_the_start(make: Make, tmp_path: Path) -> None:
    """Constructing an executor with dump_to_file but without a tokenizer raises an error."""
    with pytest.raises(ValueError, match="set tokenizer_path"):
        make(dump_dir=tmp_path)
    make(dump_dir=tmp_path, config={"dump_to_file": False})


# ---------------------------------------------------------------- agents that call the real proxy and the real server


class Talks:
    """An agent that calls the model `turns` times in one conversation. The agent calls the function `result` with the
    ids of the completions, and returns the function's value."""

    def __init__(self, result: Callable[[list[str]], Any], turns: int = 2) -> None:
        self.result, self.turns = result, turns

    async def run(self, data: dict, base_url: str, api_key: str, http_client: Any) -> Any:
        client = AsyncOpenAI(
            base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0
        )
        messages, ids = list(data["messages"]), []
        for _ in range(self.turns):
            reply = await client.chat.completions.create(
                model="m", messages=messages, max_completion_tokens=4
            )
            ids.append(reply.id)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            messages.append({"role": "user", "content": "go on"})
        return self.result(ids)


QUESTION = {"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}


class Closes:
    """An agent that closes its SDK client, and with it the HTTP client that it was given."""

    async def run(self, data: dict, base_url: str, api_key: str, http_client: Any) -> float:
        async with AsyncOpenAI(
            base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0
        ) as client:
            await client.chat.completions.create(
                model="m", messages=data["messages"], max_completion_tokens=4
            )
        return 1.0


@pytest.fixture
def run_agent(make: Make, proxy: ProxyAddress, tiny_server: str) -> Iterator[Callable[..., Any]]:
    """Return a function run_agent(agent, **openai) that runs one group and returns (the group or None, the executor's
    stats)."""
    engine = RemoteInfEngine([tiny_server])
    engine.initialize()

    def run(agent: Any, group_size: int = 1, **openai: Any) -> Any:
        config = {"openai": OpenAIConfig(**openai)}
        executor = make(engine, config, proxy=proxy)
        task_id = executor.submit(QUESTION, agent, group_size=group_size)
        result = executor.wait_for_task(task_id, timeout=60), executor.stats
        executor.destroy()
        return result

    yield run
    engine.destroy()


def test_the_documents_agent_is_trained_on_unchanged(run_agent: Any) -> None:
    """The "Proxy Approach" example from AReaL's page Agent Workflow yields a group of rows with rewards."""
    group, stats = run_agent(MyAgent, group_size=3)
    assert group["rewards"].shape == (3,)
    assert set(group["rewards"].tolist()) <= {0.5, 1.0}
    assert (group["loss_mask"].sum(1) >= 1).all()
    assert group["group_ids"].tolist() == [0, 0, 0]
    assert stats == RolloutStat(withdrawn=1)


NUMBERS = [1, 1.0, True, np.float32(1), np.int64(1), torch.tensor(1.0), torch.tensor(True)]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: type(n).__name__)
def test_an_agent_may_return_any_number(run_agent: Any, number: Any) -> None:
    """If an agent with two completions returns a number, the number is the reward of the last completion. The first
    completion gets turn_discount times the reward of the last completion."""
    group, _ = run_agent(Talks(lambda ids: number), turn_discount=0.5, export_style="individual")
    assert group["rewards"].tolist() == [0.5, 1.0]


def test_an_agent_may_close_its_client(run_agent: Any) -> None:
    """Many agents share one HTTP client. If an agent closes its SDK client, the agents after it can still send
    requests."""
    group, stats = run_agent(Closes(), group_size=3)
    assert group["rewards"].tolist() == [1.0, 1.0, 1.0]
    assert stats.failed_members == 0


def test_a_conversation_is_one_row_in_style_concat(run_agent: Any) -> None:
    """With export style concat, two turns become one row. The tokens of each turn have the turn's own discounted
    reward."""
    group, _ = run_agent(Talks(lambda ids: 1), turn_discount=0.5, export_style="concat")
    assert group["rewards"].tolist() == [1.0]
    first, second = (group["turn_rewards"][group["turn_ids"] == k] for k in (0, 1))
    assert set(first.tolist()) == {0.5}
    assert set(second.tolist()) == {1.0}


def test_a_dict_rewards_the_completions_it_names(run_agent: Any) -> None:
    """An agent may return a dict that maps completion ids to rewards. An episode fails if its agent returns a dict with
    an unknown completion id."""
    group, _ = run_agent(
        Talks(lambda ids: {ids[0]: 3, ids[1]: np.float32(1)}), export_style="individual"
    )
    assert group["rewards"].tolist() == [4.0, 1.0]
    assert run_agent(Talks(lambda ids: {"nobody": 1.0})) == (
        None,
        RolloutStat(rejected=1, failed=1),
    )


def test_none_means_what_the_agent_set_itself(run_agent: Any) -> None:
    """If an agent posts no reward and returns None, its episode is rejected. If an agent posts a reward of 0, its
    episode is accepted."""
    assert run_agent(Talks(lambda ids: None)) == (None, RolloutStat(rejected=1))

    class SetsItself(Talks):
        async def run(self, data: dict, base_url: str, api_key: str, http_client: Any) -> None:
            await super().run(data, base_url, api_key, http_client)
            answer = await http_client.post(
                base_url.removesuffix("/v1") + "/rl/set_reward", json={"reward": 0.0}
            )
            assert answer.status_code == 200

    group, stats = run_agent(SetsItself(lambda ids: None))
    assert group["rewards"].tolist() == [0.0]
    assert stats == RolloutStat(withdrawn=1)


def test_what_is_no_reward_fails_the_episode_and_is_named(
    run_agent: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """An episode fails if the agent returns a string, returns a reward without a completion, or raises an exception.
    The log says why the episode failed."""
    failed = (None, RolloutStat(rejected=1, failed=1))
    assert run_agent(Talks(lambda ids: "1.0")) == failed
    assert "a reward is a number, not str" in caplog.text
    assert run_agent(Talks(lambda ids: 1.0, turns=0)) == failed
    assert run_agent(Talks(lambda ids: 1 / 0)) == failed
    assert "ZeroDivisionError" in caplog.text


def test_an_episode_that_takes_too_long_is_cancelled(
    run_agent: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """An agent that exceeds the time limit is cancelled and counted as failed."""
    cancelled = threading.Event()

    class Hangs:
        async def run(self, data: dict, **extra_kwargs: Any) -> float:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise
            return 1.0

    assert run_agent(Hangs(), episode_timeout_seconds=0.2) == (
        None,
        RolloutStat(rejected=1, failed=1),
    )
    assert cancelled.is_set()
    assert "took longer than 0.2 s (rollout.openai.episode_timeout_seconds)" in caplog.text


def test_agents_get_the_http_client_that_their_sdk_runs_on(run_agent: Any) -> None:
    """All agents in an event loop share one HTTP client, which is an object of the openai SDK's class
    DefaultAioHttpClient. `executor.destroy` closes the client."""
    clients = []

    class Keeps:
        async def run(self, data: dict, http_client: Any, **extra_kwargs: Any) -> None:
            clients.append(http_client)

    run_agent(Keeps(), group_size=3)
    assert len(set(map(id, clients))) == 1
    assert isinstance(clients[0], DefaultAioHttpClient)
    assert clients[0].is_closed
