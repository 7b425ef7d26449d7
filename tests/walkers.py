"""Workflows for tests of whole runs.

With `WalkUntilUpdated` every weight update of an asynchronous run interrupts a completion. `Moody` gives the episodes
of one task random prompts. `FirstBatchAgent` plays only the games of the first batch.
"""

import asyncio
import random
from dataclasses import dataclass
from typing import Any

from tasks.guess import GuessAgent
from tasks.maze import CELLS
from workflow import EpisodeResult, RLVRWorkflow, workflow_context


@dataclass(eq=False, repr=False)
class WalkUntilUpdated(RLVRWorkflow):
    """RLVRWorkflow with one change: an episode repeats its completion until the next step needs the episode's group.

    Step s trains on the groups (s - 1) * batch_size to s * batch_size - 1, and then updates the weights. If a group of
    step s + 1 starts before the weight update of step s, the update interrupts a completion of the group. Each episode
    of the interrupted group repeats its completion until the update is over. With eta = 0 the gate admits only groups
    of the next step, so no episode repeats its completion.
    """

    batch_size: int

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> EpisodeResult:
        """Repeat the completion until the next training step needs the episode's group, and return the last
        completion."""
        task_id = workflow_context.get().task_id
        assert task_id is not None
        while True:
            episode = await super().arun_episode(engine, data)
            if task_id < (engine.get_version() + 1) * self.batch_size:
                return episode


@dataclass(eq=False, repr=False)
class Moody(RLVRWorkflow):
    """RLVRWorkflow with one change: each episode of task number `moody` gets a random prompt."""

    moody: int

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> EpisodeResult:
        if workflow_context.get().task_id == self.moody:
            data["messages"] = [
                {"role": "user", "content": f"from {random.choice([*CELLS])} to a1"}
            ]
        return await super().arun_episode(engine, data)


class FirstBatchAgent:
    """The demo's agent with one change: the games after the first batch (six groups) never end."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        if (workflow_context.get().task_id or 0) >= 6:
            await asyncio.Event().wait()
        return await GuessAgent().run(data, **extra_kwargs)


def has_signal(trajectory: dict[str, Any]) -> bool:
    """Return whether the rewards of a group differ. A group with equal rewards has no learning signal."""
    return len(set(trajectory["rewards"].tolist())) > 1
