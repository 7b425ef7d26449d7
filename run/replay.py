"""Replay a run: repeat it token by token and bit by bit, from its configuration and its schedule (schedule.py).

    `python train.py --replay runs/guess/20261122-130000` repeats the whole run.
    `python train.py --replay runs/guess/20261122-130000 --replay-until 7` ends after step 7.

A replay is a training run that alternates between generation and training. At each version, the replay first generates
all tokens that the recorded run generated with this version, and then trains. The diagram shows a run with eta = 1, in
which a weight update interrupts groups 3 and 4:

    recorded   trainer   wait          | step 1: groups 1 2 | push v1 | step 2: groups 3 4 ...
               server    groups 1 2 3 4 at v0 ..............          | 3 4 at v1, 5 6 at v1 ...
    replay     server    groups 1 2, and of 3 4 the tokens of v0      | 3 4 at v1, 5 6 at v1 ...
               trainer                       step 1: groups 1 2 | push v1 ...

`ScheduledEngine` generates each token with the recorded version. For example, the engine requests the first 57 tokens
of a completion at version 2, waits for version 3, and requests the next 63 tokens. At each version,
`ReplayExecutor.prepare_batch` starts the groups that the recorded run started at this version. Next, `prepare_batch`
waits until the servers have generated all tokens that the schedule records for the current version. Finally,
`prepare_batch` returns the groups of the recorded batch in their recorded order.

The result of a step depends only on the weights and the consumed groups. A replay therefore generates only the groups
that a step consumed, and leaves out, for example, rejected groups. The schedule contains the version at which each
group starts, and the groups of each batch.

**Differences.** A replay records its calls in a new schedule, and the trainer compares the new schedule with the
recorded run's schedule. The replay ends with an error if a call has another prompt than the recorded call, if a call
was not made in the recorded run, or if a recorded call is missing. A changed prompt, an additional call or a missing
call means that the agent is not deterministic.

If a call has the recorded prompt but other tokens than the recorded call, then the server has not repeated the recorded
computation bit for bit. If the tokens of a call differ, the replay generates the rest of the call's task without the
recorded versions. `compare` reports the first step whose batch or model differs, and by how much.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rollout.executor import Sample, WorkflowExecutor
from rollout.trajectory import Trajectory, concat_padded_tensors, without_older
from run.keys import TrainConfig
from run.launch import revision
from run.load import ConfigError, changed
from run.schedule import FILE, POLL, Fact, Schedule

# A replay may change the keys in FREE_KEYS, because no token and no weight depends on them.
FREE_KEYS = (
    *("replay", "trial_name=", "experiment_name=", "fileroot=", "logger.", "saver.", "doctor="),
    *("quiet=", "dry_run=", "gpus=", "gpu_memory=", "server.port="),
)


class Differs(RuntimeError):
    """The replay differs from the recorded run. The message names the first difference."""


def facts() -> Fact:
    """Return the facts, besides the configuration, on which the tokens and weights of a run depend."""
    return {
        "revision": revision(),
        "torch": torch.__version__,
        "ranks": torch.distributed.get_world_size(),
    }


def check_replay(config: TrainConfig) -> None:
    """Set the last step of a replay. Raises ConfigError if the run cannot be repeated with this code or this
    configuration."""
    path = Path(config.replay) / FILE
    recorded, now = Schedule(path if path.exists() else os.devnull).read(), facts()
    differ = {
        f"{key}={run[key]} -> {now[key]}"
        for run in recorded.runs
        for key in now
        if run[key] != now[key]
    }
    differ |= {
        change
        for change in changed(path.with_name("config.yaml"), config)
        if not change.startswith(FREE_KEYS)
    }
    if differ:
        raise ConfigError(
            f"--replay needs the code and the keys of {config.replay}: {', '.join(sorted(differ))}"
        )
    steps = sum(len(tasks) == config.train_dataset.batch_size for tasks in recorded.steps.values())
    if not steps or config.rollout.pause_mode == "in_place":
        raise ConfigError(
            f"--replay needs a finished step in {path}, and a pause_mode other than in_place"
        )
    config.replay_until = min(config.replay_until or steps, steps)


class ReplayExecutor(WorkflowExecutor):
    """An executor that returns the same batches as the recorded run. The engine of this executor is a
    ScheduledEngine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.recorded: Schedule = self.engine.recorded
        self.samples = dict[int, Sample]()  # the samples of tasks that have not started
        self.running = list[int]()  # started tasks whose groups the trainer has not consumed
        self.own = Schedule(self.engine.schedule)  # the schedule of this replay
        self.step_of = {
            task: version + 1 for version, tasks in self.recorded.steps.items() for task in tasks
        }

    def prepare_batch(self, dataloader: Any, *args: Any, **kwargs: Any) -> Trajectory:
        """Return the batch that the recorded run consumed at the current version, or raise Differs."""
        version = self.engine.get_version()

        # 1. Start the groups that the recorded run started at the current version, in the recorded order.
        due = [
            task
            for task, start in self.recorded.starts.items()
            if start == version and task in self.step_of
        ]
        drawn = self._cursor.draw(dataloader)
        while self._cursor.next_id <= max(due, default=-1):
            self.samples.update([next(drawn)])
        for task in self.make_tasks(
            [(number, self.samples.pop(number)) for number in due], *args, **kwargs
        ):
            self.dispatcher.submit_task_input(task)
        self.running += due

        # 2. Wait until all recorded tokens of the current version are generated.
        while any(
            self.missing_calls(task, version) for task in self.running if task not in self.own.ended
        ):
            self.dispatcher.check_alive()
            time.sleep(POLL)
            self.own.read()

        # 3. Return the groups in the order of the recorded run.
        return concat_padded_tensors(
            [self.take_group(task, version) for task in self.recorded.steps[version]]
        )

    def missing_calls(self, task: int, version: int) -> list[str]:
        """Return the names of the task's unfinished calls. A call is unfinished if it lacks tokens that the recorded
        run generated at `version` or before.

        Raises Differs if a call has another prompt than the recorded call, or was not made in the recorded run.
        """
        recorded, own = self.recorded.calls.get(task, {}), self.own.calls.get(task, {})
        for name, call in own.items() if recorded else ():
            if call["prompt"] != recorded.get(name, {}).get("prompt"):
                raise self.differs(
                    task, f"call {name} has another prompt, or was not made in the recorded run"
                )
            # If the server computes other tokens than recorded, the rest of the task is generated without the recorded
            # versions.
            if call["spans"] != recorded[name]["spans"][: len(call["spans"])]:
                del self.recorded.calls[task]
                return []
        done = {name: len(call["spans"]) for name, call in own.items()}
        left = {name: call["spans"][done.get(name, 0) :] for name, call in recorded.items()}
        return [
            name for name, spans in left.items() if any(needed <= version for needed, *_ in spans)
        ]

    def take_group(self, task: int, version: int) -> Trajectory:
        """Wait for the group of a task, and consume the group. Raises Differs if the group is rejected or lacks a
        recorded call."""
        group = self.wait_for_task(task)
        self.own.read()
        missing = self.missing_calls(task, version)
        group = group and without_older(
            group, self.staleness_manager.oldest_version()
        )  # mask tokens that are too old
        if missing or group is None:
            raise self.differs(
                task, f"call {missing[0]} was not made" if missing else "its group is rejected"
            )
        self.running.remove(task)
        self.trace("consume", task)
        return group

    def differs(self, task: int, why: str) -> Differs:
        """Return the error for a task whose replay differs from the recorded run. `why` describes the difference."""
        return Differs(
            f"task {task} of step {self.step_of[task]} differs: {why}; is the agent deterministic?"
        )


def compare(config: TrainConfig, step: int) -> None:
    """Compare the batch and the model of a step with those of the recorded run, if both runs saved them. Raises
    Differs."""
    for name in (f"tokens/{step:05d}.safetensors", f"checkpoints/step{step:05d}/model.safetensors"):
        paths = Path(config.replay) / name, config.run_dir / name
        if all(path.exists() for path in paths):
            before, now = [
                {k: v for k, v in load_file(path).items() if k != "regenerated"} for path in paths
            ]
            try:
                torch.testing.assert_close(now, before, rtol=0, atol=0, equal_nan=True)
            except AssertionError as error:
                raise Differs(
                    f"step {step} is the first that differs, in {name}: {error}"
                ) from None
    if step == config.replay_until:
        print(f"no batch and no model up to step {step} differs from {config.replay}", flush=True)
