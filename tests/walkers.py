"""Workflows for tests of whole runs."""

import json
import random
from dataclasses import dataclass
from typing import Any

from tasks.maze import CELLS
from workflow import EpisodeResult, RLVRWorkflow, workflow_context


@dataclass(eq=False, repr=False)
class WalkUntilUpdated(RLVRWorkflow):
    """Repeats its completion until the next step needs its group.

    Step s trains on the groups (s - 1) * batch_size to s * batch_size - 1, and then updates the
    weights. So a group of step s + 1 that has already started is interrupted by the update. With
    eta = 0 no such group has started.
    """

    batch_size: int

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> EpisodeResult:
        task_id = workflow_context.get().task_id
        assert task_id is not None
        while True:
            episode = await super().arun_episode(engine, data)
            if task_id < (engine.get_version() + 1) * self.batch_size:
                return episode


@dataclass(eq=False, repr=False)
class Moody(RLVRWorkflow):
    """Gives each episode of task number `moody` a random prompt."""

    moody: int

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> EpisodeResult:
        if workflow_context.get().task_id == self.moody:
            prompt = f"from {random.choice([*CELLS])} to a1"
            data["messages"] = [{"role": "user", "content": prompt}]
        return await super().arun_episode(engine, data)


def has_signal(trajectory: dict[str, Any]) -> bool:
    """Whether the rewards of a group differ, because equal ones teach nothing."""
    return len(set(trajectory["rewards"].tolist())) > 1


class Events:
    """A callback that writes every event of every group, with the version, to events.jsonl."""

    def __init__(self, config: Any) -> None:
        self.path = config.run_dir / "events.jsonl"

    def on_start(self, run: Any) -> None:
        file = self.path.open("w", buffering=1)

        def write(event: str, task: int, details: dict[str, Any]) -> None:
            file.write(json.dumps([event, task, run.engine.get_version(), details]) + "\n")

        run.executor.listeners.append(write)
