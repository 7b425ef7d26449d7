"""The executor: batches in order of start, each sample with the arguments of the call that drew it,
no sample lost or repeated by a restart, and the rewards that agents may return."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import Echo, ScriptedEngine, loader

from inference.io_struct import GenerationHyperparameters
from rollout.executor import WorkflowExecutor
from run.config import RolloutConfig
from staleness import RolloutStat, StalenessManager
from workflow import RLVRWorkflow, workflow_context

Make = Callable[..., WorkflowExecutor]
SAMPLES = [{"n": n} for n in range(5)]


class Does(Echo):
    """Calls `act(engine, data, trajectory)` before it returns."""

    def __init__(self, act: Callable[[Any, dict, dict], Any]) -> None:
        super().__init__()
        self.act = act

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        traj = await super().arun_episode(engine, data)
        self.act(engine, data, traj)
        return traj


@pytest.fixture
def make(tiny_tokenizer: Any) -> Iterator[Make]:
    """make(**options) returns an executor with a ScriptedEngine."""
    made: list[WorkflowExecutor] = []

    def make(
        engine: Any = None, config: dict | None = None, batch: int = 2, eta: int = 0, **options: Any
    ) -> WorkflowExecutor:
        engine = engine or ScriptedEngine(tiny_tokenizer)
        gate = StalenessManager(engine, 100, batch, eta)
        made.append(WorkflowExecutor(engine, RolloutConfig(**(config or {})), gate, **options))
        return made[-1]

    yield make
    for executor in made:
        executor.dispatcher.destroy()


def next_version(executor: WorkflowExecutor) -> None:
    executor.engine.set_version(executor.engine.get_version() + 1)


def train(executor: WorkflowExecutor, data: Any, steps: int, workflow: Any = None) -> list[float]:
    """The rewards of `steps` batches, which are the samples' numbers."""
    seen = []
    for _ in range(steps):
        seen += executor.prepare_batch(data, workflow or Echo())["rewards"].tolist()
        next_version(executor)
    return seen


# ---------------------------------------------------------------- prepare_batch


def test_prepare_batch_cycles_the_data_in_its_own_order(make: Make) -> None:
    """Batches follow the dataloader, epoch after epoch; a task's id is its position."""
    executor, data = make(), loader(SAMPLES)
    assert train(executor, data, 5) == [0, 1, 2, 3, 4] * 2
    assert executor.prepare_batch(data, Echo())["task_ids"].tolist() == [10, 11]


def test_every_loader_goes_on_where_it_was(make: Make) -> None:
    """Two dataloaders may take turns, as in a curriculum."""
    executor, seen = make(), list[float]()
    loaders = loader(SAMPLES), loader([{"n": n} for n in range(10, 15)])
    for data in (*loaders, *loaders):
        seen += train(executor, data, 2)
    assert [n for n in seen if n < 10] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    assert [n for n in seen if n >= 10] == [10, 11, 12, 13, 14, 10]


def test_every_sample_is_served_by_the_arguments_that_drew_it(make: Make) -> None:
    """Workflow, its arguments and group size are those of the call that drew the sample."""
    executor, data = make(gconfig=GenerationHyperparameters(n_samples=9)), loader(SAMPLES)
    rows = []
    for step in range(4):
        batch = executor.prepare_batch(data, Echo, {"name": step}, group_size=1 + step)
        rows.append(batch["input_ids"].tolist())
        next_version(executor)
    assert rows[:2] == [[[1, 0, 0], [2, 0, 0]], [[3, 0, 0], [4, 0, 0]]]  # all drawn at once
    assert rows[2] == [[5, 0, 1], [5, 1, 1], [1, 0, 1], [1, 1, 1]]
    assert rows[3] == [[2, i, 2] for i in range(3)] + [[3, i, 2] for i in range(3)]


def is_not_2(traj: dict[str, torch.Tensor]) -> bool:
    return bool(traj["rewards"][0] != 2)


@pytest.mark.parametrize("accept", [is_not_2, f"{__name__}.is_not_2"])
def test_rejected_groups_are_refilled_and_every_event_is_told(make: Make, accept: Any) -> None:
    """A listener hears of each event, and of the versions and rewards of a group."""
    executor, heard = make(), list[Any]()
    executor.listeners.append(lambda *event: heard.append(event))
    batch = executor.prepare_batch(loader(SAMPLES), Echo(fails=(0,), rejects=(1,)), None, accept)
    assert batch["rewards"].tolist() == [3.0, 4.0]
    assert replace(executor.stats, enqueued=0) == RolloutStat(accepted=2, rejected=3, failed=1)
    lives = [[event for event, i, _ in heard if i == task] for task in range(4)]
    assert lives == [
        ["submit", "start", "finish", "fail", "reject"],
        ["submit", "start", "finish", "reject"],
        ["submit", "start", "reward", "finish", "reject"],
        ["submit", "start", "reward", "finish", "accept", "consume"],
    ]
    assert ("reward", 3, {"versions": [0, 0], "rewards": [3.0]}) in heard


def test_the_reward_of_a_side_conversation_is_not_told(make: Make) -> None:
    """It is 0, and would lower the mean of the group in a report."""
    aside = Does(lambda engine, data, traj: traj.update(side_conversations=torch.ones(1)))
    executor, heard = make(), list[Any]()
    executor.listeners.append(lambda *event: heard.append(event))
    executor.wait_for_task(executor.submit(SAMPLES[1], aside))
    assert ("reward", 0, {"versions": [0, 0], "rewards": []}) in heard


def test_a_failing_member_is_counted_beside_the_groups(make: Make) -> None:
    """The group is accepted without the failed member. Here gconfig.n_samples is the size of a
    group."""

    def fail(engine: Any, data: dict, traj: dict) -> None:
        if workflow_context.get().sample_idx == 1:
            raise ValueError("no tool")

    executor = make(gconfig=GenerationHyperparameters(n_samples=3))
    batch = executor.prepare_batch(loader(SAMPLES), Does(fail))
    assert batch["input_ids"][:, :2].tolist() == [[1, 0], [1, 2], [2, 0], [2, 2]]
    assert replace(executor.stats, enqueued=0) == RolloutStat(accepted=2, failed_members=2)


def test_a_dataloader_has_samples_and_the_batch_that_the_gate_counts(make: Make) -> None:
    """A dataloader of another batch size is an error. So are an empty one, in which the executor
    would search for a sample for ever, a second call after an error, and a coroutine as filter."""
    with pytest.raises(ValueError, match="consumer_batch_size=2 must equal 3"):
        make().prepare_batch(loader(SAMPLES, batch_size=3), Echo())
    with pytest.raises(ValueError, match="the dataloader is empty"):
        make().prepare_batch(loader([]), Echo())
    with pytest.raises(ValueError, match="must be a plain function"):
        make().prepare_batch(loader(SAMPLES), Echo(), None, "asyncio.sleep")
    executor, broken = make(), loader(SAMPLES)
    broken.collate_fn = int
    for error, message in ((TypeError, r"int\(\)"), (RuntimeError, "error of the dataloader")):
        with pytest.raises(error, match=message):
            executor.prepare_batch(broken, Echo())


# ---------------------------------------------------------------- restarts


def test_a_restart_skips_no_prompt_and_repeats_none(make: Make) -> None:
    """The data are drawn again, without the consumed and rejected positions."""
    samples = [{"n": n} for n in range(40)]
    first, rejects = make(eta=1), Echo(rejects=(1, 4))
    order = [sample["n"] for batch in loader(samples, seed=3) for sample in batch]
    refuses = Echo(rejects=(order[1], order[4]))
    assert train(first, loader(samples, seed=3), 2, refuses) == [order[i] for i in (0, 2, 3, 5)]
    first.dispatcher.pause()
    saved = json.loads(json.dumps(first.state_dict()))
    assert saved == {"closed": [*range(6)]}

    second = make(eta=1)
    second.load_state_dict(saved, version=2)
    second.engine.version = 2
    assert second.state_dict() == saved
    assert second.gate.get_capacity() == 4  # (eta + 1) B, as ever
    assert train(second, loader(samples, seed=3), 4, rejects) == order[6:14]


# ---------------------------------------------------------------- submit, wait and evaluation


def test_submit_and_wait(make: Make) -> None:
    """The engine also has both methods."""
    executor = make(batch=8)
    engine, workflow = executor.engine, Echo(rejects=(1,))
    ids = [engine.submit(sample, workflow) for sample in SAMPLES]
    assert engine.wait_for_task(ids[3], timeout=30)["rewards"].tolist() == [3.0]
    assert engine.wait_for_task(ids[1], timeout=30) is None
    assert engine.wait(3, timeout=30)["rewards"].tolist() == [0.0, 2.0, 4.0]
    assert executor.stats.accepted == 3


def test_rollout_batch_keeps_the_order_of_the_data(make: Make) -> None:
    """rollout_batch returns the accepted groups, and raises an error if there is none."""
    executor = make(batch=8)
    batch = executor.rollout_batch(SAMPLES, Echo(rejects=(1,)))
    assert batch["rewards"].tolist() == [0.0, 2.0, 3.0, 4.0]
    with pytest.raises(ValueError, match="there is no trajectory"):
        executor.rollout_batch(SAMPLES, Echo(rejects=(0, 1, 2, 3, 4)))


def test_evaluation_needs_no_new_version_and_leaves_the_engine_alone(make: Make) -> None:
    """An evaluation bypasses the gate, runs one episode per sample, and continues after any number
    of failures."""
    evaluated: list[Any] = []
    look = lambda *args: evaluated.append(workflow_context.get()[:3])  # noqa: E731
    executor, heard = make(gconfig=GenerationHyperparameters(n_samples=4)), list[Any]()
    executor.listeners.append(lambda *event: heard.append(event))
    many = [{"n": n} for n in range(40)]
    found: list[Any] = executor.evaluate(many, Does(look))
    assert [group["rewards"].tolist() for group in found] == [[n] for n in range(40)]
    assert sorted(evaluated) == [(True, n, 0) for n in range(40)]
    groups = executor.evaluate(many, Echo(fails=tuple(range(20)), rejects=tuple(range(20, 30))))
    assert [group is None for group in groups] == [True] * 30 + [False] * 10
    assert (executor.stats, heard) == (RolloutStat(), [])


# ---------------------------------------------------------------- trajectories


class OneIsSlow(Echo):
    """Task 0 ends at version 2, with trained tokens of the versions 0, 1 and 2."""

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
    """`mask` leaves the slow group's old tokens out of the loss, and `drop` discards the group."""
    executor = make(config={"stale": stale}, eta=1)
    data, slow = loader(SAMPLES), list[int]()
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
    left = [int(number >= version - 1) for number in range(3)]
    assert batch["loss_mask"][slow].tolist() == [left]
    assert batch["masked"].sum() == batch["masked"][slow].sum() == 3 - sum(left) > 0


async def pays(*texts: Any, **data: Any) -> float:
    return 1.0


def test_every_group_is_dumped(make: Make, tiny_tokenizer: Any, tmp_path: Path) -> None:
    """The folder is named after the newest version in the group (Rollout Workflow, "Trajectory
    Dumping")."""

    def answer(request: Any) -> str:
        if request.call == "0-1.0":  # the second member of task 0 comes after an update
            engine.version = 6
        return "vier"

    engine = ScriptedEngine(tiny_tokenizer, answer)
    executor = make(engine, tokenizer=tiny_tokenizer, dump_dir=tmp_path)
    engine.set_version(5)
    sample, kwargs = {"messages": [{"role": "user", "content": "2+2?"}]}, {"reward_fn": pays}
    executor.wait_for_task(executor.submit(sample, RLVRWorkflow, kwargs, group_size=2), timeout=30)
    executor.wait_for_task(executor.submit(sample, RLVRWorkflow, kwargs, is_eval=True), timeout=30)
    quiet = make(engine, {"dump_to_file": False}, tokenizer=tiny_tokenizer, dump_dir=tmp_path)
    quiet.wait_for_task(quiet.submit(sample, RLVRWorkflow, kwargs), timeout=30)
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.jsonl"))
    assert files == ["eval-rollout/6/1.jsonl", "rollout/6/0.jsonl"]
    lines = [json.loads(line) for line in (tmp_path / "rollout/6/0.jsonl").read_text().splitlines()]
    found = [(x["sample_idx"], x["head_version"], x["completion"]) for x in lines]
    assert found == [(i, 5 + i, "vier<|im_end|>") for i in range(2)]
