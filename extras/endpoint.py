"""Evaluate an agent on any OpenAI endpoint, without a model of our own.

    OPENAI_API_KEY=KEY python train.py mode=eval evaluator.base_url=https://api.openai.com/v1

The agent runs on every validation prompt as in training, but its base_url is the endpoint, and no
tokens are recorded. The reward is the number that the agent returns or, if it returns a dict, the
dict's last value. An episode that raises or returns None counts as rejected.
"""

import asyncio
import copy
import os
import time
from itertools import count
from typing import Any

from extras.failures import Failures, logger
from inference.fields import finite
from rollout.evaluate import Evaluation, conclude, describe
from run.config import ConfigError, TrainConfig
from run.inputs import Inputs, load_inputs
from workflow import RolloutWorkflow, WorkflowContext, workflow_context


def evaluate_endpoint(config: TrainConfig, inputs: Inputs) -> Evaluation:
    """Run the agent on all validation prompts, and return the evaluation. Raises ConfigError for a
    RolloutWorkflow, which needs an engine."""
    agent = inputs.eval_workflow
    url = config.evaluator.base_url
    if isinstance(agent, RolloutWorkflow):
        raise ConfigError("evaluator.base_url is for agents, and this is a RolloutWorkflow")
    key = os.environ.setdefault("OPENAI_API_KEY", "DUMMY")
    os.environ["OPENAI_BASE_URL"] = str(url)  # for clients that an agent makes without arguments
    limit = config.rollout.openai.episode_timeout_seconds
    places = asyncio.Semaphore(config.concurrent_groups)

    async def play(i: int, sample: dict[str, Any]) -> float | None:
        workflow_context.set(WorkflowContext(is_eval=True, task_id=i))
        try:
            async with places, asyncio.timeout(limit):
                own = copy.deepcopy(sample)
                result = await agent.run(own, base_url=url, api_key=key, http_client=None)
            reward = [*result.values()][-1] if isinstance(result, dict) else result
            return None if reward is None else finite(reward)
        except (Exception, SystemExit) as error:  # the episode counts as rejected
            logger.warning("eval-rollout task %d failed: %r", i, error, exc_info=error)
            return None

    async def play_all() -> list[float | None]:
        samples = inputs.validation * config.evaluation_gconfig.n_samples
        return await asyncio.gather(*map(play, count(), samples))

    return describe(asyncio.run(play_all()), inputs)


def main(config: TrainConfig) -> int:
    """Evaluate and write eval.json. Raises ConfigError."""
    if config.trial_name == "auto":
        config.trial_name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    inputs = load_inputs(config)
    failures = Failures(config)
    found = evaluate_endpoint(config, inputs)
    failures.on_end(None)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    conclude(config.run_dir, found)
    return 0
