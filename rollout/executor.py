"""WorkflowExecutor: from the dataloader to the batch that a training step consumes.

The rule: `prepare_batch` returns the B oldest prompt groups, by start, that were not rejected, as one padded dict of
tensors (rollout/trajectory.py), and leaves behind as many running episodes as the staleness gate allows. So the next
batches are being generated, by the weights of now, while this one is trained on.

What an episode goes through, in the event loop's thread:

    data -> workflow.arun_episode -> interactions become tensors -> check_trajectory_format -> complete
         -> should_accept_fn -> dump_to_file -> accepted

None from the workflow or False from should_accept_fn rejects the group; the next prompt of the dataloader takes its
place. An exception anywhere on the way rejects it too, and counts it as failed, unless a process of the run has died
meanwhile: then the run ends, and nothing is counted. The same trouble again and again stops the run with the first
traceback (rollout/dispatcher.py). A trajectory is dumped whether it was accepted or not: one readable line a row in
{dump_dir}/{rollout|eval-rollout}/{newest version in it}/{task_id}.jsonl, written by a thread beside the loop, because
decoding takes longer than anything else here.

The dataloader is a torch DataLoader of lists of samples (collate_fn=identity). It is cycled for ever; where it stands
is remembered between calls, and the order is its own, hence repeatable. Everything else is taken from *this* call:
another workflow or should_accept_fn serves every prompt that is drawn from now on; those that are on their way, a few
batches because that is what asynchronous means, keep theirs. A class is instantiated once a call; give an instance
where something must outlive it.

Evaluation is a sibling, `for_evaluation()`: the same engine and proxy, no staleness gate, task ids of its own.

What it does not promise: that `rollout_batch` on a gated executor ends while groups that are not yet trained on hold
all places of the gate; it would wait for a new version. Evaluate on the sibling.

How it differs from AReaL: prepare_batch there keeps the first call's arguments for ever, returns groups in random
order and in a list, and a workflow that always raises is refilled for ever.
"""

import asyncio
import copy
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from inference.io_struct import GenerationHyperparameters
from rollout.dispatcher import BatchTaskDispatcher, DispatchState, untraced
from rollout.trajectory import (
    Trajectory,
    check_trajectory_format,
    complete,
    concat_padded_tensors,
    dump_lines,
    head_version,
    tail_version,
)
from run.config import RolloutConfig
from staleness import RolloutStat, StalenessManager
from workflow import (
    GroupedRolloutWorkflow,
    RolloutWorkflow,
    WorkflowContext,
    import_string,
    resolve_workflow,
    to_tensors,
    workflow_context,
)

logger = logging.getLogger("nano_areal.executor")

NO_LIMIT = 10**12  # of evaluation: neither an age nor a row of failures ends it
AcceptFn = Callable[[Trajectory], bool]
Numbered = tuple[int, dict[str, Any]]  # task id, sample


@dataclass(frozen=True)
class ProxyAddress:
    """Where the proxy is, or the proxies are, and the key of their management endpoints."""

    proxy_addr: str | tuple[str, ...]
    admin_key: str


@dataclass(frozen=True)
class RolloutTask:
    """One prompt group to roll out."""

    task_id: int
    data: dict[str, Any]
    workflow: RolloutWorkflow
    should_accept: AcceptFn | None
    is_eval: bool


@dataclass(eq=False, repr=False)
class WorkflowExecutor:
    """The rollout methods of an engine: submit, wait, wait_for_task, rollout_batch, prepare_batch.

    gconfig and tokenizer are what classes of RolloutWorkflow get by default; gconfig's seed is the run's. trace(event,
    task_id) hears of every submit, start, finish, accept, reject. keep(task_id, group) is called in a thread before a
    group counts as accepted, to write it where it outlives the process. hold_failures: seconds that a failure waits
    before it counts, so that whoever watches the processes of the run can call `fail` first. The executor attaches
    itself to the engine; the one that `for_evaluation` makes does not.
    """

    engine: Any
    config: RolloutConfig
    tokenizer: Any = None
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    proxy: ProxyAddress | None = None  # needed for agents
    dump_dir: Path | None = None  # the run's folder; None dumps nothing
    trace: Callable[[str, int], None] = untraced
    keep: Callable[[int, Trajectory], None] | None = None
    hold_failures: float = 0.0
    evaluation: bool = False

    def __post_init__(self) -> None:
        config = self.config
        self.dump_dir = self.dump_dir if config.dump_to_file else None
        if self.dump_dir is not None and self.tokenizer is None:
            raise ValueError("rollout.dump_to_file writes text and needs a tokenizer: set tokenizer_path")
        batch, eta = config.consumer_batch_size or 1, config.max_head_offpolicyness
        concurrent = config.max_concurrent_rollouts or (eta + 1) * batch
        self.staleness_manager = StalenessManager(self.engine, concurrent, batch, NO_LIMIT if self.evaluation else eta)
        decisions: DispatchState[RolloutTask, Trajectory] = DispatchState(
            self.staleness_manager,
            head_version,
            max_queue_size=config.queue_size or 16 * concurrent,
            drop_stale=config.drop_stale,
            max_failures=NO_LIMIT if self.evaluation else 0,
            trace=self.trace,
        )
        self.dispatcher = BatchTaskDispatcher(self._run_episode, decisions)
        # All mutable state of this object:
        self._next_id = 0
        self._streams: dict[Any, Iterator[Numbered]] = {}  # where each dataloader stands
        self._drawn = 0  # samples taken from them
        self._skip = 0  # samples that an earlier process has drawn
        self._open: dict[int, dict] = {}  # sample by task id: drawn, and not yet seen to be consumed or rejected
        self._reopened: list[int] = []  # those of them that a recovery has still to start again
        self._keys: dict[type, frozenset[str]] = {}  # what each kind of workflow returned first

        if not self.evaluation:
            self.engine.executor = self

    def for_evaluation(self) -> "WorkflowExecutor":
        """A sibling without a staleness gate, for rollouts that are not trained on. Destroy it before this one."""
        return replace(self, trace=untraced, keep=None, evaluation=True)

    @property
    def stats(self) -> RolloutStat:
        """A snapshot of the counts."""
        return self.staleness_manager.get_stats()

    # ---- rollouts

    def submit(
        self,
        data: dict[str, Any],
        workflow: Any,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: AcceptFn | str | None = None,
        group_size: int | None = None,
        is_eval: bool = False,
    ) -> int:
        """Enqueue one prompt; it starts when the gate allows. Its task id, for wait_for_task."""
        [task] = self._tasks(self._number([data]), workflow, workflow_kwargs, should_accept_fn, group_size, is_eval)
        self.dispatcher.submit_task_input(task)
        return task.task_id

    def wait(self, count: int, timeout: float | None = None) -> Trajectory:
        """The `count` oldest groups that were not rejected, concatenated. TimeoutError after `timeout` seconds."""
        return concat_padded_tensors(self.dispatcher.wait_results(count, timeout))

    def wait_for_task(self, task_id: int, timeout: float | None = None) -> Trajectory | None:
        """One task's group, None if it was rejected. It no longer comes with wait or prepare_batch."""
        return self.dispatcher.wait_for_task(task_id, timeout)

    def rollout_batch(self, data: Iterable[dict[str, Any]], *args: Any, **kwargs: Any) -> Trajectory:
        """The accepted groups of `rollout_each`, concatenated. RuntimeError when there is none."""
        results = self.rollout_each(data, *args, **kwargs)
        groups = [group for group in results if group is not None]
        if not groups:
            raise RuntimeError(f"none of {len(results)} rollouts was accepted: {self.stats}")
        return concat_padded_tensors(groups)

    def rollout_each(self, data: Iterable[dict[str, Any]], *args: Any, **kwargs: Any) -> list[Trajectory | None]:
        """Roll out every prompt of `data` and wait for all: a group for each in the order of `data`, None if rejected.

        The other arguments are those of `submit`.
        """
        tasks = list(self._tasks(self._number(data), *args, **kwargs))
        for task in tasks:
            self.dispatcher.submit_task_input(task)
        return [self.wait_for_task(task.task_id) for task in tasks]

    def prepare_batch(
        self,
        dataloader: Any,
        workflow: Any,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: AcceptFn | str | None = None,
        group_size: int | None = None,
    ) -> Trajectory:
        """The next training batch: dataloader.batch_size groups, rows in order of start, members in order.

        ValueError when the dataloader's batch is not what the gate counts per version.
        """
        batch, counted = dataloader.batch_size, self.staleness_manager.consumer_batch_size
        if batch != counted:
            raise ValueError(
                f"rollout.consumer_batch_size={counted} must equal the dataloader's batch_size={batch}: the gate admits "
                "that many groups per version, so another batch would let groups pile up or grow old"
            )
        stream = self._streams.setdefault(dataloader, self._stream(dataloader))
        tasks = self._tasks(stream, workflow, workflow_kwargs, should_accept_fn, group_size)
        groups = self.dispatcher.active_submit_and_wait(tasks, batch)
        self._forget_consumed()
        return concat_padded_tensors(groups)

    def _stream(self, dataloader: Any) -> Iterator[Numbered]:
        """Task ids and samples: what a recovery reopened, then the dataloader, epoch after epoch, the first one from
        where it stood. After an error of the dataloader the next stream begins anew."""
        while self._reopened:
            task_id = self._reopened.pop(0)
            yield task_id, self._open[task_id]
        skip, self._skip = self._skip, 0
        try:
            for task_id, sample in self._number(itertools.islice(cycle(dataloader), skip, None)):
                self._drawn += 1
                self._open[task_id] = sample
                yield task_id, sample
        finally:
            self._streams.pop(dataloader, None)

    def _number(self, samples: Iterable[dict[str, Any]]) -> Iterator[Numbered]:
        for sample in samples:
            self._next_id += 1
            yield self._next_id - 1, sample

    def _forget_consumed(self) -> None:
        still = self.dispatcher.in_flight() | set(self._reopened)
        self._open = {task_id: sample for task_id, sample in self._open.items() if task_id in still}

    # ---- recovery (run/recover.py); from the thread that calls prepare_batch

    def state_dict(self) -> dict[str, Any]:
        """Where the data order stands: the next task's id, the samples drawn, and those of the open tasks, by id.

        RuntimeError once the run has failed: what was open then is no longer known.
        """
        self._forget_consumed()
        return {"next_id": self._next_id, "drawn": self._drawn, "open": dict(self._open)}

    def load_state_dict(self, state: dict[str, Any], finished: dict[int, Trajectory], version: int) -> None:
        """Go on from `state`, of a step that made `version`; `finished`: groups of its open tasks that are to be kept.

        The other open tasks start again, under their ids and before new ones; so do groups that would be too old when
        their turn comes, where eta or the batch is smaller now. One dataloader, and nothing submitted yet.
        """
        gate, kept = self.staleness_manager, dict[int, Trajectory]()
        for task_id, group in finished.items():
            head, turn = head_version(group), version + len(kept) // gate.consumer_batch_size
            if head is None or turn - head <= gate.max_staleness:
                kept[task_id] = group
        self._next_id, self._open = state["next_id"], dict(state["open"])
        self._drawn = self._skip = state["drawn"]
        self._reopened = [task_id for task_id in self._open if task_id not in kept]
        gate.on_version_recovered(version, len(kept))
        self.dispatcher.restore(kept)

    def _tasks(
        self,
        samples: Iterable[Numbered],
        workflow: Any,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: AcceptFn | str | None = None,
        group_size: int | None = None,
        is_eval: bool = False,
    ) -> Iterator[RolloutTask]:
        """A task for every sample, all with one workflow object, which gets what this run provides."""
        n_samples = self.gconfig.n_samples
        group_size = group_size or self.config.group_size or n_samples
        if not is_eval and n_samples not in (1, group_size):
            raise ValueError(f"{group_size=} and gconfig.n_samples={n_samples} are one number; give one of them")
        resolved = resolve_workflow(
            workflow,
            workflow_kwargs,
            group_size,
            proxy=self._proxy_options(),
            defaults={"gconfig": self.gconfig, "tokenizer": self.tokenizer},
            on_failures=self._count_members,
        )
        accept = import_string(should_accept_fn) if isinstance(should_accept_fn, str) else should_accept_fn
        if accept is not None and not callable(accept):
            raise TypeError(f"should_accept_fn must be a function or 'module.function', not {accept!r}")
        return (RolloutTask(task_id, sample, resolved, accept, is_eval) for task_id, sample in samples)

    def _proxy_options(self) -> dict[str, Any] | None:
        """How agents reach the policy: arguments of OpenAIProxyWorkflow."""
        if self.proxy is None:
            return None
        openai = self.config.openai
        return {
            **asdict(self.proxy),
            "mode": openai.mode,
            "subproc_max_workers": openai.subproc_max_workers,
            "discount": openai.turn_discount,
            "export_style": openai.export_style,
            "episode_timeout": openai.episode_timeout_seconds,
        }

    # ---- events

    def pause(self) -> None:
        """Start nothing more; what runs goes on."""
        self.dispatcher.pause()

    def resume(self) -> None:
        self.dispatcher.resume()

    def on_new_version(self) -> None:
        """The engine's version rose, and with it the gate."""
        self.dispatcher.on_new_version()

    def fail(self, error: BaseException) -> None:
        """Something outside died: every waiting and later call raises."""
        self.dispatcher.fail(error)

    def destroy(self) -> None:
        """Cancel what runs, join the thread; the run's own executor also detaches from the engine. May be repeated."""
        self.dispatcher.destroy()
        if self.engine.executor is self:
            self.engine.executor = None

    # ---- one episode, in the event loop's thread

    async def _run_episode(self, task: RolloutTask) -> Trajectory | None:
        version = self.engine.get_version()
        workflow_context.set(WorkflowContext(task.is_eval, task.task_id))
        try:
            result = await task.workflow.arun_episode(self.engine, copy.deepcopy(task.data))
            if result is None:
                return None
            trajectory = to_tensors(result)
            if self.config.check_trajectory_format:
                self._check(trajectory, task.workflow)
            trajectory = complete(trajectory, task.task_id, version)
            accepted = task.should_accept is None or task.should_accept(trajectory)
            if self.dump_dir is not None:
                folder = self.dump_dir / workflow_context.stat_scope()
                await asyncio.to_thread(self._dump, trajectory, task.task_id, folder, version)
            if accepted and self.keep is not None:
                await asyncio.to_thread(self.keep, task.task_id, trajectory)
        except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            await self._hold()
            logger.warning("%s task %d failed: %r", workflow_context.stat_scope(), task.task_id, error)
            raise
        return trajectory if accepted else None

    def _check(self, trajectory: Trajectory, workflow: RolloutWorkflow) -> None:
        kind = type(workflow.workflow if isinstance(workflow, GroupedRolloutWorkflow) else workflow)
        check_trajectory_format(trajectory, self._keys.get(kind))
        if kind not in self._keys and "loss_mask" in trajectory and "logprobs" not in trajectory:
            logger.warning("%s returns no logprobs; decoupled PPO cannot train on its tokens", kind.__name__)
        self._keys.setdefault(kind, frozenset(trajectory))

    def _dump(self, trajectory: Trajectory, task_id: int, folder: Path, version: int) -> None:
        tail = tail_version(trajectory)
        folder = folder / str(version if tail is None else tail)
        folder.mkdir(parents=True, exist_ok=True)
        lines = dump_lines(trajectory, task_id, self.tokenizer)
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / f"{task_id}.jsonl").write_text(text, encoding="utf-8")

    async def _count_members(self, failed: int) -> None:
        """So many members of a group raised, and the rest did not."""
        await self._hold()
        self.staleness_manager.on_members_failed(failed)

    async def _hold(self) -> None:
        """Before a failure counts and another prompt takes its place: where it was the first sign of a process of the
        run that died, `fail` is called meanwhile, and this raises."""
        await asyncio.sleep(self.hold_failures)
        self.dispatcher.check_alive()


def cycle(dataloader: Iterable[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """The samples of the dataloader's batches, epoch after epoch."""
    while True:
        batch = None
        for batch in dataloader:
            yield from batch
        if batch is None:
            raise ValueError("the dataloader has no samples")
