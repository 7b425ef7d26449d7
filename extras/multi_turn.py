"""MultiTurnWorkflow: one prompt, and new answers until one has a positive reward.

    workflow=extras.multi_turn.MultiTurnWorkflow workflow_kwargs.reward_fn=my_module.reward

Sampled tokens are never tokenised again (calls/prompts.py).
"""

import math
from dataclasses import dataclass
from typing import Any

from calls.prompts import PromptBuilder
from inference.io_struct import ModelResponse
from workflow import EpisodeResult, RLVRWorkflow, to_row


@dataclass(eq=False)
class MultiTurnWorkflow(RLVRWorkflow):
    """Sample answers until one has a positive reward, with `reflection_message` between them.

    After k answers the reward is turn_discount^(k-1) times that of the last one. A full context
    also ends the conversation.
    """

    max_turns: int = 3
    turn_discount: float = 0.9
    reflection_message: str = "That is not right. Think about what went wrong, then answer again."

    def __post_init__(self) -> None:
        super().__post_init__()
        self.prompts = PromptBuilder(self.tokenizer)
        if not self.prompts.splices:
            raise ValueError("MultiTurnWorkflow: the chat template renders history anew each turn")

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> EpisodeResult:
        context = getattr(engine, "context_length", None) or math.inf  # tokens
        prompt_ids = self.prompt_ids(data["messages"])
        reflection = [{"role": "user", "content": self.reflection_message}]
        turns: list[ModelResponse] = []
        while not turns or len(prompt_ids) < context:
            turns.append(await self.turn(engine, prompt_ids, turn=len(turns)))
            reward = await self.reward(turns[-1], data)
            if reward > 0 or len(turns) == self.max_turns:
                break
            prompt_ids = self.prompts.extend(turns[-1], reflection, {})
        return to_row(turns, reward * self.turn_discount ** (len(turns) - 1))
