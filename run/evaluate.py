"""Evaluation: one episode per validation prompt, and statistics of the rewards.

During training a second executor, without the staleness gate, runs these episodes under the newest
weights. `python train.py mode=eval` evaluates a model alone; with evaluator.base_url=URL the agents
call that endpoint instead, and the reward is the number that the agent returns.
"""

import asyncio
import math
import os
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from rollout.reward import parse_rewards
from run.config import ConfigError, TrainConfig
from run.inputs import Inputs
from run.log import logger
from workflow import RolloutWorkflow, WorkflowContext, workflow_context


def evaluate(executor: Any, inputs: Inputs) -> dict[str, float | None]:
    """Run the validation prompts on an executor without a gate. The reward of an episode is that of
    its last row."""
    tasks = [
        executor.submit(sample, inputs.evaluated, group_size=1, is_eval=True)
        for sample in inputs.validation
    ]
    groups = [executor.wait_for_task(task) for task in tasks]
    return describe([None if g is None else g["rewards"][-1].item() for g in groups], inputs)


def describe(rewards: Sequence[float | None], inputs: Inputs) -> dict[str, float | None]:
    """The mean reward and its standard error, the share of successes among all episodes, and how
    many episodes there were and had no reward (None)."""
    found = [reward for reward in rewards if reward is not None]
    n = len(found)
    return {
        "eval_reward": fmean(found) if n else None,
        "eval_reward_sem": stdev(found) / math.sqrt(n) if n > 1 else None,
        "eval_success": inputs.success(found) * n / len(rewards) if n else 0.0,
        "eval_episodes": len(rewards),
        "eval_rejected": len(rewards) - n,
    }


def evaluate_endpoint(config: TrainConfig, inputs: Inputs) -> dict[str, float | None]:
    """Run the agent on every validation prompt against evaluator.base_url. OPENAI_API_KEY holds the
    key."""
    agent, url = inputs.evaluated, config.evaluator.base_url
    if isinstance(agent, RolloutWorkflow):
        raise ConfigError("evaluator.base_url is for agents, and this is a RolloutWorkflow")
    key = os.environ.setdefault("OPENAI_API_KEY", "DUMMY")
    limit = config.rollout.openai.episode_timeout_seconds

    async def play(i: int, sample: dict[str, Any], places: asyncio.Semaphore) -> float | None:
        workflow_context.set(WorkflowContext(is_eval=True, task_id=i))
        try:
            async with places, asyncio.timeout(limit):
                result = await agent.run(sample, base_url=url, api_key=key, http_client=None)
            reward = parse_rewards(result)
            return [*reward.values()][-1] if isinstance(reward, dict) else reward
        except Exception as error:  # the episode counts as rejected
            logger.warning("eval-rollout task %d failed: %r", i, error, exc_info=error)
            return None

    async def play_all() -> list[float | None]:
        places = asyncio.Semaphore(config.rollout.max_concurrent_rollouts or 1)
        plays = (play(i, sample, places) for i, sample in enumerate(inputs.validation))
        return await asyncio.gather(*plays)

    return describe(asyncio.run(play_all()), inputs)
