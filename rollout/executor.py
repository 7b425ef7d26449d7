"""WorkflowExecutor connects the dataloader, the workflows, the staleness gate and the training step.

`prepare_batch` returns the next B accepted prompt groups as one padded dict of tensors (trajectory.py). The dispatcher
decides which groups come next. With rollout.stale=wait, prepare_batch returns the accepted groups of a run in the order
in which they started. While the trainer trains on one batch, groups of later batches run. The staleness gate limits how
many groups run. Example: with B = 4 and eta = 1, eight groups start at version 0. The first call of prepare_batch
returns four of the eight groups, and the other four groups are left for later calls.

Each prompt group goes through these steps:

 (1) A sample is drawn from the dataloader and gets a task id (DataCursor).
 (2) The dispatcher starts the task when the gate allows it (dispatcher.py).
 (3) `workflow.arun_episode(engine, data)` runs all members of the group in the event loop's thread (workflow.py).
 (4) Interactions become tensors, and check_trajectory_format checks these tensors.
 (5) `complete` adds the tensors that the workflow left out.
 (6) should_accept_fn accepts or rejects the group.
 (7) With dump_to_file, each row of an accepted or rejected group becomes one line of this file:
     {dump_dir}/{rollout|eval-rollout}/{newest version in the group}/{task_id}.jsonl
 (8) `keep` writes an accepted group to a file for recovery. The group counts as accepted when `keep` has returned.
 (9) If the group is not too old, prepare_batch returns a batch that contains the group.

If a workflow returns None, its group is rejected, and another sample is drawn instead. If one of the steps 3 to 8
raises an exception, the group is rejected and also counted as failed. Many consecutive failures stop the run
(dispatcher.py).

**Arguments.** Each call of prepare_batch draws new samples. A sample runs with the workflow and the should_accept_fn of
the call that drew the sample, even if later calls pass other arguments. If the workflow is a class, every call of
prepare_batch makes a new instance of this class. To keep a workflow's state between calls, pass an instance instead of
a class.

**Recovery.** A task is open until its group is consumed or rejected. A checkpoint holds the open tasks. When a run
continues after a crash, the open tasks without a finished group start again under their old ids (DataCursor,
run/recover.py).

**Evaluation.** `for_evaluation()` makes a second executor that uses the same engine and proxy. The second executor
has no staleness gate (its gate is so wide that it never closes), counts its task ids from 0, and may sample differently
than training, for example greedily.

**What is not promised.** On an executor with a gate, rollout_batch can wait for ever: if groups of earlier calls hold
all places at the gate, no further group starts. For an evaluation, use the executor that for_evaluation() returns.
"""

import asyncio
import copy
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import workflow as workflows
from inference.io_struct import GenerationHyperparameters
from rollout import trajectory
from rollout.dispatcher import BatchTaskDispatcher, DispatchState, ServerRestarted, untraced
from rollout.trajectory import Trajectory
from run.keys import RolloutConfig
from staleness import RolloutStat, StalenessError, StalenessManager

logger = logging.getLogger("pocket_areal.executor")

NO_LIMIT = (
    10**12
)  # an evaluation's maximum age and maximum number of consecutive failures, too large to be reached
AcceptFn = Callable[[Trajectory], bool]
Sample = dict[str, Any]
T = TypeVar("T")
NumberedSample = tuple[int, Sample]  # (task id, sample)


@dataclass(frozen=True)
class ProxyAddress:
    """The URLs and the admin key of the proxies. Agents reach the policy through a proxy."""

    proxy_addr: str | tuple[str, ...]  # the URL of each proxy
    admin_key: str  # key of the proxies' management endpoints


class RolloutTask(NamedTuple):
    """One prompt group to roll out."""

    task_id: int
    data: Sample
    workflow: workflows.RolloutWorkflow
    should_accept: AcceptFn | None
    is_eval: bool


@dataclass
class DataCursor:
    """The position of the run in its data: the drawn samples, their task ids, and the open tasks.

    A checkpoint saves the fields `next_id`, `drawn` and `open`. After a crash, the open tasks that were not finished
    start again under their old ids. The continued run skips all samples of the dataloader that were drawn before the
    checkpoint. New samples get the ids `next_id`, `next_id` + 1, and so on.

    Example: the samples of tasks 0 to 7 were drawn, tasks 0 to 3 were trained on, and task 5 is finished. The
    checkpoint holds next_id = 8, drawn = 8 and the samples of tasks 4 to 7. After a crash tasks 4, 6 and 7 start again,
    followed by the ninth sample of the dataloader as task 8.
    """

    next_id: int = 0  # the task id of the next new sample
    drawn: int = 0  # how many samples were drawn from dataloaders
    open: dict[int, Sample] = field(default_factory=dict)  # task id -> sample of each open task
    restart: list[int] = field(
        default_factory=list
    )  # open tasks that must start again after a crash, oldest first
    skip: int = 0  # number of the dataloader's samples to skip when a run continues after a crash
    streams: dict[Any, Iterator[Sample]] = field(
        default_factory=dict
    )  # dataloader -> iterator over its samples

    def number(self, samples: Iterable[Sample]) -> Iterator[NumberedSample]:
        """Yield each sample with a new task id."""
        for sample in samples:
            task_id, self.next_id = self.next_id, self.next_id + 1
            yield task_id, sample

    def draw(self, dataloader: Any) -> Iterator[NumberedSample]:
        """Yield samples without end: first the samples of the tasks that start again, then new samples of
        `dataloader`."""
        while self.restart:
            task_id = self.restart.pop(0)
            yield task_id, self.open[task_id]
        if dataloader not in self.streams:
            self.streams[dataloader] = itertools.islice(cycle(dataloader), self.skip, None)
            self.skip = 0
        try:
            for task_id, sample in self.number(self.streams[dataloader]):
                self.drawn += 1
                self.open[task_id] = sample
                yield task_id, sample
        except (
            Exception,
            KeyboardInterrupt,
        ):  # the iterator has ended, so the next `draw` makes a new one
            del self.streams[dataloader]
            raise

    def forget_closed(self, in_flight: set[int]) -> None:
        """Keep only the samples of the tasks that are in flight or must start again."""
        still_open = in_flight.union(self.restart)
        self.open = {
            task_id: sample for task_id, sample in self.open.items() if task_id in still_open
        }


@dataclass(eq=False, repr=False)
class WorkflowExecutor:
    """Provides the rollout methods of an engine: submit, wait, wait_for_task, rollout_batch, prepare_batch.

    An executor for training stores itself in `engine.executor`.
    """

    engine: Any
    config: RolloutConfig
    tokenizer: Any = None  # tokenizer for dumps, and for workflow classes that accept a tokenizer
    gconfig: GenerationHyperparameters = field(
        default_factory=GenerationHyperparameters
    )  # sampling options and seed
    proxy: ProxyAddress | None = None  # needed for agents
    dump_dir: Path | None = None  # the run's folder for dumps; None means no dumps
    trace: Callable[..., None] = (
        untraced  # function of (event, task_id); the event "reward" has more arguments
    )
    keep: Callable[[int, Trajectory], None] | None = (
        None  # saves a group before the group counts as accepted
    )
    hold_failures: float = (
        0.0  # seconds between a task's exception and the moment when the task counts as failed
    )
    evaluation: bool = False  # whether to run without a staleness gate

    def __post_init__(self) -> None:
        config = self.config
        self.dump_dir = self.dump_dir if config.dump_to_file else None
        if self.dump_dir is not None and self.tokenizer is None:
            raise ValueError(
                "rollout.dump_to_file writes text and needs a tokenizer: set tokenizer_path"
            )
        batch, eta = config.consumer_batch_size or 1, config.max_head_offpolicyness
        concurrent = config.max_concurrent_rollouts or (eta + 1) * batch
        max_age, max_failures = (NO_LIMIT, NO_LIMIT) if self.evaluation else (eta, 0)
        self.staleness_manager = gate = StalenessManager(self.engine, concurrent, batch, max_age)
        max_queue = config.queue_size or 16 * concurrent
        oldest = trajectory.oldest_trained if config.stale == "mask" else trajectory.head_version
        state = DispatchState[RolloutTask, Trajectory](
            gate,
            oldest,
            max_queue,
            config.stale,
            trajectory.without_older,
            max_failures,
            self.trace,
        )
        self.dispatcher = BatchTaskDispatcher(self._run_episode, state)
        # The engine calls `pause`, `resume` and `on_new_version`. `Fleet.watch` (run/launch.py) and
        # the doctor (run/doctor.py) call `fail`.
        self.pause, self.resume = self.dispatcher.pause, self.dispatcher.resume
        self.on_new_version, self.fail = self.dispatcher.on_new_version, self.dispatcher.fail
        # Mutable state of this object, besides the state of the dispatcher and of the staleness manager:
        self._cursor = DataCursor()
        self.ended = 0  # number of episodes that have ended, for the live table
        self._keys: dict[
            type, frozenset[str]
        ] = {}  # workflow class -> the keys of its first trajectory
        if not self.evaluation:
            self.engine.executor = self

    def for_evaluation(
        self, gconfig: GenerationHyperparameters | None = None
    ) -> "WorkflowExecutor":
        """Return a second executor, without a staleness gate. The caller must destroy the second executor before the
        first executor.

        The second executor samples with `gconfig`. If `gconfig` is None, the second executor uses the sampling
        parameters of this executor.
        """
        return replace(
            self, gconfig=gconfig or self.gconfig, trace=untraced, keep=None, evaluation=True
        )

    @property
    def stats(self) -> RolloutStat:
        """A copy of the staleness manager's counters."""
        return self.staleness_manager.get_stats()

    # ---- rollouts

    def submit(self, data: Sample, *args: Any, **kwargs: Any) -> int:
        """Enqueue one prompt, and return its task id for wait_for_task. The task starts when the gate admits it.

        The arguments after `data` are passed to `make_tasks`: workflow, workflow_kwargs, should_accept_fn, group_size
        and is_eval.
        """
        [task_id] = self.submit_each([data], *args, **kwargs)
        return task_id

    def wait(self, count: int, timeout: float | None = None) -> Trajectory:
        """Return the next `count` accepted groups as one batch.

        Raises TimeoutError after `timeout` seconds; None means no limit.
        """
        return trajectory.concat_padded_tensors(self.dispatcher.wait_results(count, timeout))

    def wait_for_task(self, task_id: int, timeout: float | None = None) -> Trajectory | None:
        """Wait for one task. Return the task's group, or None if the task was rejected. No batch contains the returned
        group."""
        return self.dispatcher.wait_for_task(task_id, timeout)

    def rollout_batch(self, data: Iterable[Sample], *args: Any, **kwargs: Any) -> Trajectory:
        """Run all prompts with `rollout_each`, and return the accepted groups as one batch. Raises RuntimeError if no
        group was accepted."""
        results = self.rollout_each(data, *args, **kwargs)
        groups = [group for group in results if group is not None]
        if not groups:
            raise RuntimeError(f"none of {len(results)} rollouts was accepted: {self.stats}")
        return trajectory.concat_padded_tensors(groups)

    def rollout_each(
        self, data: Iterable[Sample], *args: Any, **kwargs: Any
    ) -> list[Trajectory | None]:
        """Run all prompts of `data`. Return a list with one entry for each prompt: the prompt's group, or None if the
        group was rejected.

        The arguments after `data` are passed to `make_tasks`.
        """
        return self.wait_for_each(self.submit_each(data, *args, **kwargs), [])

    def submit_each(self, data: Iterable[Sample], *args: Any, **kwargs: Any) -> list[int]:
        """Enqueue all prompts of `data`, and return their task ids. The arguments are those of `rollout_each`."""
        tasks = list(self.make_tasks(self._cursor.number(data), *args, **kwargs))
        for task in tasks:
            self.dispatcher.submit_task_input(task)
        return [task.task_id for task in tasks]

    def wait_for_each(
        self, task_ids: list[int], groups: list[Trajectory | None]
    ) -> list[Trajectory | None]:
        """Wait for the tasks one after another, append each task's group, or None, to the list `groups`, and return
        `groups`. After an interruption, a call with the same two lists waits for the other tasks."""
        for task_id in task_ids[len(groups) :]:
            groups.append(self.wait_for_task(task_id))
        return groups

    def prepare_batch(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the next training batch, or None if a server was restarted (`until_restart`).

        The batch has dataloader.batch_size groups. All arguments after `dataloader` are passed to `make_tasks`. Raises
        ValueError if the dataloader's batch size is not the gate's consumer_batch_size.
        """
        size, gate_size = dataloader.batch_size, self.staleness_manager.consumer_batch_size
        if size != gate_size:
            raise ValueError(
                f"rollout.consumer_batch_size={gate_size} must equal the dataloader's batch_size={size}"
            )
        tasks = self.make_tasks(self._cursor.draw(dataloader), *args, **kwargs)
        groups = self.until_restart(lambda: self.dispatcher.active_submit_and_wait(tasks, size))
        if groups is None:
            return None
        self._cursor.forget_closed(self.dispatcher.in_flight())
        return trajectory.concat_padded_tensors(groups)

    def until_restart(self, wait: Callable[[], T]) -> T | None:
        """Return the result of `wait`, or None if an inference server was restarted during the wait.

        If the result is None, the caller must push the current weights, and then call this method again.
        """
        try:
            return wait()
        except ServerRestarted:
            self.engine.forget_sent()
            return None

    # ---- recovery (run/recover.py): methods for the thread that calls prepare_batch

    def state_dict(self) -> dict[str, Any]:
        """Return how far the run has read its data: the fields `next_id`, `drawn` and `open` of DataCursor.

        Raises RuntimeError if the run has stopped, because the open tasks of a stopped run are not known.
        """
        self._cursor.forget_closed(self.dispatcher.in_flight())
        return {
            "next_id": self._cursor.next_id,
            "drawn": self._cursor.drawn,
            "open": dict(self._cursor.open),
        }

    def load_state_dict(
        self, state: dict[str, Any], finished: dict[int, Trajectory], version: int
    ) -> None:
        """Continue a run from a saved result of `state_dict`. Call `load_state_dict` before `submit`.

        `version` is the policy version at which `state` was saved. `finished` maps ids of open tasks to the groups that
        an earlier process had finished. The finished groups are consumed first, and all other open tasks start again
        under their ids. If a finished group will be too old for its step, the group is discarded and its task starts
        again. A finished group can be too old if eta or the batch size is smaller than before the crash. Recovery
        supports only one dataloader.
        """
        gate, kept = self.staleness_manager, dict[int, Trajectory]()
        for task_id, group in finished.items():
            head = (
                trajectory.tail_version(group)
                if self.config.stale == "mask"
                else trajectory.head_version(group)
            )
            consumed_at = (
                version + len(kept) // gate.consumer_batch_size
            )  # version at which a step consumes `group`
            if head is None or consumed_at - head <= gate.max_staleness:
                kept[task_id] = group
        restart = [task_id for task_id in state["open"] if task_id not in kept]
        self._cursor = DataCursor(
            state["next_id"], state["drawn"], dict(state["open"]), restart, skip=state["drawn"]
        )
        gate.on_version_recovered(version, len(kept))
        self.dispatcher.restore(kept)

    def make_tasks(
        self,
        samples: Iterable[NumberedSample],
        workflow: Any,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: AcceptFn | str | None = None,
        group_size: int | None = None,
        is_eval: bool = False,
    ) -> Iterator[RolloutTask]:
        """Return a task for each sample. All tasks share one workflow object.

        `workflow` and `workflow_kwargs` describe the workflow or agent, in any form that `resolve_workflow`
        (workflow.py) accepts. `should_accept_fn` is a function of a group, or the function's import path. If
        `should_accept_fn` returns False, the group is rejected. `group_size` is the number of episodes of each sample.
        The default of `group_size` is rollout.group_size or, if this key is not set, gconfig.n_samples. If `is_eval` is
        true, the episodes are named, counted and dumped as those of an evaluation.
        """
        n_samples = self.gconfig.n_samples
        group_size = group_size or self.config.group_size or n_samples
        if not is_eval and n_samples not in (1, group_size):
            raise ValueError(
                f"{group_size=} and gconfig.n_samples={n_samples} are one number; give one of them"
            )
        proxy, defaults = (
            self._proxy_options(),
            {"gconfig": self.gconfig, "tokenizer": self.tokenizer},
        )
        run: Any = workflows.resolve_workflow(
            workflow, workflow_kwargs, group_size, proxy=proxy, defaults=defaults
        )
        if group_size > 1:  # `run` is a new GroupedRolloutWorkflow
            run.on_failures, run.on_end = self._count_members, self._count_end
        accept = (
            workflows.import_string(should_accept_fn)
            if isinstance(should_accept_fn, str)
            else should_accept_fn
        )
        if accept is not None and not callable(accept):
            raise TypeError(
                f"should_accept_fn must be a function or 'module.function', not {accept!r}"
            )
        return (RolloutTask(task_id, sample, run, accept, is_eval) for task_id, sample in samples)

    def _proxy_options(self) -> dict[str, Any] | None:
        """Return the arguments of OpenAIProxyWorkflow, or None if there is no proxy."""
        if self.proxy is None:
            return None
        openai = self.config.openai
        return asdict(self.proxy) | {
            "mode": openai.mode,
            "subproc_max_workers": openai.subproc_max_workers,
            "subproc_prefix": openai.subproc_prefix,
            "discount": openai.turn_discount,
            "export_style": openai.export_style,
            "episode_timeout": openai.episode_timeout_seconds,
            "sampling": asdict(self.gconfig.new(n_samples=1)) if self.evaluation else {},
        }

    # ---- the end

    def destroy(self) -> None:
        """Cancel the running groups, join the thread, and detach from the engine. A second call of `destroy` does
        nothing."""
        self.dispatcher.destroy()
        if self.engine.executor is self:
            self.engine.executor = None

    # ---- code that runs one prompt group, in the event loop's thread

    async def _run_episode(self, task: RolloutTask) -> Trajectory | None:
        """Run steps 3 to 8 of the list at the top of this file for one task.

        Return the task's group, or None to reject the task.
        """
        version = self.engine.get_version()
        workflows.workflow_context.set(workflows.WorkflowContext(task.is_eval, task.task_id))
        try:
            result = await task.workflow.arun_episode(self.engine, copy.deepcopy(task.data))
            if result is None:
                return None
            group = workflows.to_tensors(result)
            if self.config.check_trajectory_format:
                self._check(group, task.workflow)
            group = trajectory.complete(group, task.task_id, version)
            if (
                not self.evaluation
                and (newest := int(group["versions"].max())) > self.engine.get_version()
            ):
                raise StalenessError(
                    f"a token has version {newest}, which the trainer has not made"
                )
            versions = [trajectory.head_version(group), trajectory.tail_version(group)]
            self.trace("reward", task.task_id, versions=versions, rewards=group["rewards"].tolist())
            accepted = task.should_accept is None or task.should_accept(group)
            if (
                self.dump_dir is not None
            ):  # `dump` runs in a thread, because decoding the tokens is slow
                folder = self.dump_dir / workflows.workflow_context.stat_scope()
                await asyncio.to_thread(
                    trajectory.dump, group, task.task_id, folder, version, self.tokenizer
                )
            if accepted and self.keep is not None:
                await asyncio.to_thread(self.keep, task.task_id, group)
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as error:
            await self._hold_failure()
            scope = workflows.workflow_context.stat_scope()
            logger.warning("%s task %d failed: %r", scope, task.task_id, error, exc_info=error)
            raise
        finally:
            if not isinstance(
                task.workflow, workflows.GroupedRolloutWorkflow
            ):  # a group counts its members itself
                self._count_end()
        return group if accepted else None

    def _check(self, group: Trajectory, workflow: workflows.RolloutWorkflow) -> None:
        """Raise ValueError if a group is malformed, or if its keys differ from the keys of the workflow's earlier
        groups."""
        kind = type(
            workflow.workflow
            if isinstance(workflow, workflows.GroupedRolloutWorkflow)
            else workflow
        )
        trajectory.check_trajectory_format(group, self._keys.get(kind))
        if kind not in self._keys and "loss_mask" in group and "logprobs" not in group:
            logger.warning(
                "%s returns no logprobs; decoupled PPO cannot train on its tokens", kind.__name__
            )
        self._keys.setdefault(kind, frozenset(group))

    async def _count_members(self, failed: int) -> None:
        """Add `failed` to the number of failed members. The group continues with its other members."""
        await self._hold_failure()
        self.staleness_manager.on_members_failed(failed)

    def _count_end(self) -> None:
        """Add 1 to the number of episodes that have ended."""
        self.ended += 1

    async def _hold_failure(self) -> None:
        """Wait `hold_failures` seconds before a failure is counted. Raises RuntimeError if the run has stopped during
        the wait.

        If the proxy or a server crashes, all running episodes fail. During the wait, `Fleet.watch` (run/launch.py) can
        stop the run. Once the run has stopped, no failure is counted and no new sample starts.
        """
        await asyncio.sleep(self.hold_failures)
        self.dispatcher.check_alive()


def cycle(dataloader: Iterable[list[Sample]]) -> Iterator[Sample]:
    """Yield the samples of the dataloader's batches, epoch after epoch. Raises ValueError if there is no sample."""
    while True:
        batch = None
        for batch in dataloader:
            yield from batch
        if batch is None:
            raise ValueError("the dataloader has no samples")
