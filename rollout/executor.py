"""WorkflowExecutor connects the data, the workflows, the gate and the training step.

A step consumes B prompt groups. `prepare_batch` returns the next B accepted ones as one padded dict
of tensors (trajectory.py), while groups of later batches run. With B = 4 and eta = 1, eight groups
start at version 0. The first `prepare_batch` returns four of them, and the second the other four.

Each sample of the dataloader becomes a task, whose id is the sample's position in the data, counted
over all epochs. When the gate admits the task (dispatcher.py), its episodes run as a group
(workflow.py). Then trajectory.py completes the group's tensors, and should_accept_fn may reject the
group. Unless rollout.dump_to_file=false, the text of each group goes to

    {dump_dir}/{rollout|eval-rollout}/{newest version in the group}/{task_id}.jsonl

The arguments of a `prepare_batch` call apply to the samples that this call draws, even if a later
call returns their groups.

**A restart** reads the data again from the beginning, but skips closed positions. A position is
**closed** if its group was consumed, rejected, dropped or withdrawn. For example, if positions 0 to
7 were drawn and 0 to 3 consumed, the checkpoint holds {"closed": [0, 1, 2, 3]}. The restart runs
positions 4 to 7 again, and continues with position 8.

`submit` and all dataloaders take ids from one counter. So in a run that calls `submit` or uses two
dataloaders, a restart may skip the wrong samples.

`rollout_batch` waits forever if other prompts' groups hold all places at the gate.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import workflow as workflows
from inference.fields import import_name
from inference.io_struct import GenerationHyperparameters
from rollout import trajectory
from rollout.dispatcher import BatchTaskDispatcher, DispatchState
from rollout.trajectory import Trajectory
from run.config import RolloutConfig
from staleness import RolloutStat, StalenessManager

logger = logging.getLogger("pocket_areal.executor")

ROLLOUT_METHODS = "submit", "wait", "wait_for_task", "rollout_batch", "prepare_batch"
Sample = dict[str, Any]
Kwargs = dict[str, Any] | None
Accept = Callable[[Trajectory], bool] | str | None  # a function, or its path "module.function"


class RolloutTask(NamedTuple):
    task_id: int
    data: Sample
    workflow: workflows.RolloutWorkflow
    should_accept: Any
    is_eval: bool = False


@dataclass(eq=False, repr=False)
class WorkflowExecutor:
    """Attaches the rollout methods to the engine.

    The methods take a workflow or agent in any form that `resolve_workflow` reads. `group_size` is
    the number of episodes per prompt, by default gconfig.n_samples.
    """

    engine: Any
    config: RolloutConfig
    gate: StalenessManager
    tokenizer: Any = None
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    eval_gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    seed: int | None = None
    dump_dir: Path | None = None

    def __post_init__(self) -> None:
        self.listeners: list[Callable[..., None]] = []  # called with event, task id, details
        state = DispatchState(
            self.gate,
            trajectory.head_version,
            self.config.stale,
            trajectory.without_older,
            trace=self._tell,
        )
        self.dispatcher = BatchTaskDispatcher(self._run_episode, state)
        self.wait_for_task = self.dispatcher.wait_for_task
        self._next_id = 0
        self._closed = set[int]()  # positions that were closed before a restart
        self._streams: dict[Any, Iterator[Sample]] = {}  # endless samples of each dataloader
        self.engine.dispatcher = self.dispatcher
        for method in ROLLOUT_METHODS:
            setattr(self.engine, method, getattr(self, method))

    @property
    def stats(self) -> RolloutStat:
        return self.gate.get_stats()

    # ---- rollouts

    def submit(
        self,
        data: Sample,
        workflow: Any,
        workflow_kwargs: Kwargs = None,
        should_accept_fn: Accept = None,
        group_size: int | None = None,
        is_eval: bool = False,
    ) -> int:
        """Enqueue one prompt, and return its task id for wait_for_task."""
        how = self._resolve(workflow, workflow_kwargs, should_accept_fn, group_size)
        task = RolloutTask(self._new_id(), data, *how, is_eval)
        self.dispatcher.submit_task_input(task)
        return task.task_id

    def wait(self, count: int, timeout: float | None = None) -> Trajectory:
        """Return the next `count` accepted groups as one batch. Raises TimeoutError. Without
        `timeout`, `wait` never returns if the gate cannot admit `count` groups before the next
        version."""
        return trajectory.concat_padded_tensors(self.dispatcher.wait_results(count, timeout))

    def rollout_batch(self, data: Iterable[Sample], *how: Any, **named: Any) -> Trajectory:
        """Run all prompts in `data`, and return the accepted groups as one batch, in the prompts'
        order. The other arguments are those of `submit`."""
        ids = [self.submit(sample, *how, **named) for sample in data]
        groups = [self.wait_for_task(i) for i in ids]
        return trajectory.concat_padded_tensors([x for x in groups if x is not None])

    def prepare_batch(
        self,
        dataloader: Any,
        workflow: Any,
        workflow_kwargs: Kwargs = None,
        should_accept_fn: Accept = None,
        group_size: int | None = None,
    ) -> Trajectory:
        size = dataloader.batch_size
        if size != (expected := self.gate.consumer_batch_size):
            raise ValueError(f"consumer_batch_size={expected} must equal {size}, the dataloader's")
        how = self._resolve(workflow, workflow_kwargs, should_accept_fn, group_size)
        tasks = (RolloutTask(i, sample, *how) for i, sample in self._draw(dataloader))
        return trajectory.concat_padded_tensors(self.dispatcher.active_submit_and_wait(tasks, size))

    def evaluate(self, samples: Iterable[Sample], workflow: Any) -> list[Trajectory | None]:
        """Run one episode per sample. A rejected or failed episode gives None. No step trains on
        evaluation episodes, so the gate does not count them."""
        how = self._resolve(workflow, None, None, 1, sampling=self.eval_gconfig.model_dump())
        places = asyncio.Semaphore(self.gate.max_concurrent_rollouts * self.gconfig.n_samples)

        async def play(task_id: int, sample: Sample) -> Trajectory | None:
            async with places:
                try:
                    return await self._run_episode(RolloutTask(task_id, sample, *how, True))
                except BaseException:  # already logged
                    return None

        async def play_all() -> list[Trajectory | None]:
            return await asyncio.gather(*map(play, count(), samples))

        return self.dispatcher.run(play_all())

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _draw(self, dataloader: Any) -> Iterator[tuple[int, Sample]]:
        for sample in self._streams.setdefault(dataloader, cycle(dataloader)):
            task_id = self._new_id()
            if task_id not in self._closed:
                yield task_id, sample
        raise RuntimeError("an error of the dataloader has ended its samples")

    def _resolve(
        self, workflow: Any, kwargs: Kwargs, accept: Accept, group_size: int | None, **options: Any
    ) -> tuple[workflows.RolloutWorkflow, Any]:
        openai = self.config.openai
        proxy = openai.model_dump(exclude={"turn_discount", "tool_call_parser"})
        proxy |= {"discount": openai.turn_discount} | options
        if self.engine.proxy:
            proxy |= self.engine.proxy._asdict()
        defaults = {"gconfig": self.gconfig, "tokenizer": self.tokenizer}
        one = workflows.resolve_workflow(workflow, kwargs, proxy=proxy, defaults=defaults)
        size = group_size or self.gconfig.n_samples
        group = workflows.GroupedRolloutWorkflow(one, size, self.gate.on_members_failed)
        if asyncio.iscoroutinefunction(accept := import_name(accept)):
            raise ValueError("should_accept_fn must be a plain function, not a coroutine")
        return group, accept

    # ---- restarts

    def state_dict(self) -> dict[str, Any]:
        closed = {*range(self._next_id)} - self.dispatcher.in_flight()
        return {"closed": sorted(closed | self._closed)}

    def load_state_dict(self, state: dict[str, Any], version: int) -> None:
        """Resume from a `state_dict` that was made at `version`. Call this before anything runs."""
        self._closed = {*state["closed"]}
        self.gate.on_version_recovered(version)

    # ---- in the loop

    def _tell(self, event: str, task_id: int, **details: Any) -> None:
        for listener in self.listeners:
            listener(event, task_id, details)

    async def _run_episode(self, task: RolloutTask) -> Trajectory | None:
        version = self.engine.get_version()
        context = workflows.workflow_context
        context.set(workflows.WorkflowContext(task.is_eval, task.task_id, seed=self.seed))
        try:
            result = await task.workflow.arun_episode(self.engine, task.data)
            if result is None:
                return None
            group = trajectory.complete(
                trajectory.to_tensors(result), task.task_id, version, self.gconfig.temperature
            )
            oldest, newest = trajectory.version_span(group, trajectory.generated(group))
            if not task.is_eval:
                rewards = group["rewards"][group["side_conversations"] == 0].tolist()
                self._tell("reward", task.task_id, versions=[oldest, newest], rewards=rewards)
            accepted = task.should_accept is None or task.should_accept(group)
            if self.dump_dir and self.config.dump_to_file:
                folder = self.dump_dir / context.stat_scope()
                newest = version if newest is None else newest
                await asyncio.to_thread(
                    trajectory.dump, group, task.task_id, folder, newest, self.tokenizer
                )
        except BaseException as error:
            if not self.dispatcher.stopped.done():  # episodes cancelled by a stop have not failed
                what = f"{context.stat_scope()} task {task.task_id}"
                logger.warning("%s failed: %r", what, error, exc_info=error)
            raise
        return group if accepted else None


def cycle(dataloader: Iterable[list[Sample]]) -> Iterator[Sample]:
    """Yield the samples of one epoch after another. Raises ValueError if an epoch has no sample."""
    while True:
        batch = None
        for batch in dataloader:
            yield from batch
        if not batch:
            raise ValueError("the dataloader is empty")
