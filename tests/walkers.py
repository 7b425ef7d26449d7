"""A workflow for runs in which a weight update certainly interrupts a completion, however fast the machine is."""

from dataclasses import dataclass
from typing import Any

from workflow import EpisodeResult, RLVRWorkflow, workflow_context


@dataclass(eq=False, repr=False)
class WalkUntilUpdated(RLVRWorkflow):
    """RLVRWorkflow with one change: an episode that the next step does not need repeats its completion.

    Step s trains on the groups (s - 1) * batch_size to s * batch_size - 1, and then updates the weights. A group with a
    larger number repeats its completion until the update is over. The last completion began before the update and
    ended after it. With eta = 0 no such group may start, so no completion is repeated.
    """

    batch_size: int

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> EpisodeResult:
        """Return the first completion that ends when the next step needs this group."""
        task_id = workflow_context.get().task_id
        assert task_id is not None
        while True:
            episode = await super().arun_episode(engine, data)
            if task_id < (engine.get_version() + 1) * self.batch_size:
                return episode
