"""Evaluation runs one episode per validation prompt and computes statistics of the rewards.

During training, a separate executor without the staleness gate runs the evaluation episodes with the newest weights.
The statistics of training exclude the evaluation episodes. `python train.py mode=eval model_path=DIR ...` evaluates a
model without training it.

With `evaluator.base_url=URL` the agents send their requests to this URL, and no proxy is started. With
evaluator.base_url the reward of an episode is the number that the agent returns. As in training, `rollout.openai.mode`
decides whether agents run inline or in worker processes.

The evaluation continues after an episode that fails or is rejected. The statistic `eval_rejected` counts the episodes
that fail or are rejected.
"""

import asyncio
import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any

import openai

from rollout.executor import WorkflowExecutor
from rollout.reward import parse_rewards
from rollout.workers import run_agent
from run.inputs import Inputs
from run.keys import TrainConfig
from run.load import ConfigError
from run.start import Run, start_processes, start_rollout
from run.terminal import before_results
from workflow import RolloutWorkflow, WorkflowContext, agents_pool, keep_open, workflow_context

logger = logging.getLogger("pocket_areal.evaluate")


def describe(rewards: Sequence[float | None], inputs: Inputs) -> dict[str, float | None]:
    """Return the statistics of the episodes' rewards. `rewards` holds None for an episode without a reward.

    The result has these keys:

        `eval_reward` is the mean reward, or None if there is no reward.
        `eval_reward_sem` is the standard error of the mean reward, or None if there are fewer than two rewards.
        `eval_success` is the share of successes among all episodes.
        `eval_episodes` is the number of episodes.
        `eval_rejected` is the number of episodes without a reward.
    """
    found = [reward for reward in rewards if reward is not None]
    n = len(found)
    return {
        "eval_reward": fmean(found) if n else None,
        "eval_reward_sem": stdev(found) / math.sqrt(n) if n > 1 else None,
        "eval_success": inputs.success(found) * n / len(rewards) if n else 0.0,
        "eval_episodes": len(rewards),
        "eval_rejected": len(rewards) - n,
    }


def start_evaluation(executor: WorkflowExecutor, inputs: Inputs) -> Callable[[], Any]:
    """Start one episode per validation prompt. Return a function that waits for the episodes and returns the
    statistics. `executor` must have no staleness gate.

    If an episode has several rows, the reward of the last row is the episode's reward. If an inference server died and
    was restarted, the returned function returns None. The caller must then push the current weights and call the
    function again (WorkflowExecutor.until_restart).
    """
    tasks = executor.submit_each(inputs.validation, inputs.evaluated, group_size=1, is_eval=True)
    groups: list[Any] = []

    def finish() -> dict[str, Any] | None:
        if executor.until_restart(lambda: executor.wait_for_each(tasks, groups)) is None:
            return None
        return describe(
            [None if group is None else group["rewards"][-1].item() for group in groups], inputs
        )

    return finish


def evaluate_endpoint(config: TrainConfig, inputs: Inputs) -> dict[str, float | None]:
    """Run one episode per validation prompt with agents that call evaluator.base_url, and return the statistics.

    The environment variable OPENAI_API_KEY holds the agents' API key. Raises ConfigError if the workflow is not an
    agent.
    """
    agent = inputs.workflow
    if isinstance(agent, RolloutWorkflow):
        raise ConfigError(
            "evaluator.base_url is for agents; for a RolloutWorkflow leave the key out"
        )
    where = {
        "base_url": config.evaluator.base_url,
        "api_key": os.environ.get("OPENAI_API_KEY", "DUMMY"),
    }
    places = asyncio.Semaphore(config.rollout.max_concurrent_rollouts or 1)
    options, timeout = config.rollout.openai, config.rollout.openai.episode_timeout_seconds

    async def play(sample: dict, http_client: openai.DefaultAsyncHttpxClient) -> Any:
        """Run the agent on one sample and return the agent's result."""
        if options.mode == "inline":
            async with asyncio.timeout(timeout):
                return await agent.run(sample, http_client=http_client, **where)
        pool = await agents_pool(options.subproc_max_workers, *options.subproc_prefix).get()
        async with pool.worker() as worker, asyncio.timeout(timeout):
            return await worker.call(run_agent, agent, sample, **where, ours=False)

    async def run(
        i: int, sample: dict, http_client: openai.DefaultAsyncHttpxClient
    ) -> float | None:
        """Return the reward of one episode, or None if the episode failed or has no reward."""
        workflow_context.set(WorkflowContext(is_eval=True, task_id=i))
        try:
            async with places:
                reward = parse_rewards(await play(sample, http_client))
            return list(reward.values())[-1] if isinstance(reward, dict) else reward
        except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
            raise
        except (
            BaseException
        ) as error:  # an agent may raise any exception; the episode then counts as rejected
            logger.warning("eval-rollout task %d failed: %r", i, error, exc_info=error)
            return None

    async def run_all() -> list[float | None]:
        """Return the rewards of all episodes, in the order of the prompts."""
        async with openai.DefaultAsyncHttpxClient(timeout=timeout) as http:
            http.aclose = keep_open  # type: ignore[method-assign]
            return await asyncio.gather(
                *(run(i, sample, http) for i, sample in enumerate(inputs.validation))
            )

    return describe(asyncio.run(run_all()), inputs)


def evaluate_run(run: Run) -> None:
    """Evaluate the run's model (mode=eval), write the statistics to eval.json and print them.

    Raises RuntimeError if no episode has a reward.
    """
    if run.config.evaluator.base_url:
        statistics = evaluate_endpoint(run.config, run.inputs)
    else:
        _, executor = start_rollout(run, start_processes(run))
        statistics = start_evaluation(executor, run.inputs)()
    (run.config.run_dir / "eval.json").write_text(json.dumps(statistics))
    if statistics["eval_episodes"] == statistics["eval_rejected"]:
        raise RuntimeError(
            "no episode of the evaluation has a reward: look for logged failures, or return a reward"
        )
    before_results.close()
    print("  ".join(f"{key} {value:.4g}" for key, value in statistics.items() if value is not None))
