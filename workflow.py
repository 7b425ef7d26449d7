"""A workflow turns one sample of the dataset into rows to train on.

An **episode** is one run of the workflow's `arun_episode(engine, data)`. It returns a dict of
tensors (rollout/trajectory.py), a dict of an agent's calls (cache.py), or None, which rejects the
episode. An episode that raises has failed.

    RLVRWorkflow            one prompt, one answer, and a function that computes its reward
    MultiTurnWorkflow       one prompt, and new answers until one has a positive reward
    OpenAIProxyWorkflow     an agent: anything with `async def run(self, data, **extra_kwargs)`
    GroupedRolloutWorkflow  several episodes of another workflow for one prompt

**Agents.** Each episode has a session at the proxy, and the agent gets the session's URL as
base_url. The agent returns the reward of its last completion, or {completion id: reward}, or None
if it sent its rewards over HTTP. If no completion has a reward, the episode is rejected.

**Where agents run.** In mode inline all episodes share one agent object, so `run` must keep an
episode's state in local variables. All episodes also share one event loop, so a blocking call
(time.sleep, a synchronous client) delays every episode. In mode subproc each running episode has a
process to itself, so the agent may block. The agent must be picklable, because the process gets a
copy of it.

**Groups.** The members of a group are episodes that run at the same time, each with its own copy of
the sample. Example: of four members one raises, one returns None and two make a row each, so the
group has two rows. If all members raise, the group raises.

**Seeds.** A request's sampling seed is a hash of the run's seed, the episode's name (task and
member) and the number of the call in its session. An agent's own seed replaces the run's seed in
the hash.
"""

import asyncio
import copy
import functools
import inspect
import logging
import math
import os
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cache import Interaction
from calls.client import OpenAIProxyClient, agents_client, proxy_at
from calls.prompts import PromptBuilder
from inference.fields import import_name
from inference.io_struct import GenerationHyperparameters, ModelRequest, ModelResponse, call_seed
from inference.process import bypass
from rollout.reward import AsyncRewardWrapper, pools
from rollout.trajectory import (
    Trajectory,
    check_trajectory_format,
    concat_padded_tensors,
    is_interactions,
)
from rollout.workers import run_agent, within

logger = logging.getLogger("pocket_areal.workflow")

EpisodeResult = Trajectory | dict[str, Interaction] | None


class WorkflowContext(NamedTuple):
    """Which episode is running (AReaL's page "Rollout Workflow")."""

    is_eval: bool = False
    task_id: int | None = None
    sample_idx: int = 0  # of the member in its group
    seed: int | None = None  # of the run

    @property
    def name(self) -> str:
        """The episode's name in the run, such as "7-3"."""
        return f"{'eval-' if self.is_eval else ''}{self.task_id}-{self.sample_idx}"


_context: ContextVar[WorkflowContext] = ContextVar("workflow_context", default=WorkflowContext())  # noqa: B039


class workflow_context:
    """Gives the context of the running episode, as in `workflow_context.get().is_eval`."""

    get, set = _context.get, _context.set

    @staticmethod
    def stat_scope() -> str:
        return "eval-rollout" if _context.get().is_eval else "rollout"


class RolloutWorkflow:
    """A subclass overrides `arun_episode`, or its older form `_run_one_episode`."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> EpisodeResult:
        result = await self._run_one_episode(engine, data, _context.get().name)
        return result[0] if isinstance(result, tuple) else result

    async def _run_one_episode(self, engine: Any, data: dict[str, Any], rid: str) -> Any:
        """The older form of `arun_episode`, which may return a tuple (result, ...)."""
        raise NotImplementedError(f"{type(self).__name__} lacks arun_episode(self, engine, data)")


def to_row(turns: list[ModelResponse], reward: float) -> Trajectory:
    """Join the turns of a conversation in one row (1, T) of T tokens. Each turn's prompt must begin
    with the prompt and answer of the turn before. Every turn gets `reward`."""
    calls = [
        Interaction([], model_response=x, reward=reward, turn_id=k) for k, x in enumerate(turns)
    ]
    calls[-1].row_turns = [(call, True) for call in calls]
    return calls[-1].to_tensor_dict()


@dataclass(eq=False)
class RLVRWorkflow(RolloutWorkflow):
    """Sample one completion for the chat data["messages"].

    The reward is `reward_fn(prompt, completion, prompt_ids, completion_ids, **data)`, where
    `reward_fn` is a function, a coroutine function or "module.function".
    """

    reward_fn: Callable[..., Any] | str
    gconfig: GenerationHyperparameters
    tokenizer: Any

    def __post_init__(self) -> None:
        self.async_reward_fn = AsyncRewardWrapper(import_name(self.reward_fn))
        self.prompts = PromptBuilder(self.tokenizer)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> EpisodeResult:
        prompt_ids = self.prompts.prompt(Interaction(data["messages"]))
        response = await self.sample(engine, prompt_ids, number=0)
        return to_row([response], await self.reward(response, data))

    async def sample(self, engine: Any, input_ids: list[int], number: int) -> ModelResponse:
        context = _context.get()
        seed = None if context.seed is None else call_seed(context.seed, context.name, number)
        gconfig = self.gconfig.for_call(n_samples=1, seed=seed)
        request = ModelRequest(input_ids, gconfig=gconfig, call=f"{context.name}.{number}")
        return await engine.agenerate(request)

    async def reward(self, response: ModelResponse, data: dict[str, Any]) -> float:
        ids = response.input_tokens, response.output_tokens
        return await self.async_reward_fn(*map(self.tokenizer.decode, ids), *ids, **data)


@dataclass(eq=False)
class MultiTurnWorkflow(RLVRWorkflow):
    """Sample answers until one has a positive reward. Between two answers, the user says
    `reflection_message`.

    The conversation also ends after `max_turns` answers, or when the context is full. If it ends
    after k answers, every turn gets the reward of the last answer, times turn_discount^(k-1). (The
    key rollout.openai.turn_discount is another discount, which only agents use.)
    """

    max_turns: int = 3
    turn_discount: float = 0.9
    reflection_message: str = "That is not right. Think about what went wrong, then answer again."

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompts.splices:
            raise ValueError("MultiTurnWorkflow: the chat template renders history anew each turn")

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> EpisodeResult:
        most_tokens = getattr(engine, "context_length", math.inf)
        prompt_ids = self.prompts.prompt(Interaction(data["messages"]))
        reflection = [{"role": "user", "content": self.reflection_message}]
        turns: list[ModelResponse] = []
        while not turns or len(prompt_ids) < most_tokens:
            turns.append(await self.sample(engine, prompt_ids, number=len(turns)))
            reward = await self.reward(turns[-1], data)
            if reward > 0 or len(turns) == self.max_turns:
                break
            prompt_ids = self.prompts.extend(turns[-1], reflection, {})
        return to_row(turns, reward * self.turn_discount ** (len(turns) - 1))


@dataclass(eq=False)
class OpenAIProxyWorkflow(RolloutWorkflow):
    """Run an agent in a session of the proxy, set the rewards that it returns, and export the
    interactions."""

    agent: Any
    proxy_addr: str
    admin_key: str
    mode: str = "inline"  # or subproc
    subproc_max_workers: int = 4
    discount: float = 1.0  # gamma in R = r + gamma * mean R(calls that read it)
    compaction: str = "link"  # or cut; says which answers a call has read (run/config.py)
    export_style: str = "individual"  # AReaL's default; a run sets rollout.openai.export_style
    episode_timeout_seconds: float = 3600.0
    sampling: dict[str, Any] = field(default_factory=dict)  # the session's defaults

    def __post_init__(self) -> None:
        # OpenAI's SDK demands a key. Any key will do, because the session's URL names the session.
        os.environ.setdefault("OPENAI_API_KEY", "DUMMY")
        os.environ |= bypass()  # the agent's own HTTP clients reach the proxy directly

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> EpisodeResult:
        if self.mode == "inline":
            client = await agents_client.get()
            return await self._episode(functools.partial(self.agent.run, data, http_client=client))
        pool = await pools("agents", self.subproc_max_workers).get()
        async with pool.worker() as call:  # a session starts only when a process is free
            return await self._episode(functools.partial(call, run_agent, self.agent, data))

    async def _episode(self, run: Callable[..., Awaitable[Any]]) -> EpisodeResult:
        context = _context.get()
        proxy = proxy_at(self.proxy_addr, self.admin_key)
        client = OpenAIProxyClient(
            proxy, context.name, sampling=self.sampling, compaction=self.compaction
        )
        seconds = self.episode_timeout_seconds
        words = (
            f"agent {type(self.agent).__name__} in task {context.name} took longer than"
            f" {seconds:g} s (rollout.openai.episode_timeout_seconds)"
        )
        await client.grant_capacity()
        async with client:
            work = run(base_url=client.session_url, api_key=client.api_key)
            rewards = await within(seconds, work, words)
            if isinstance(rewards, dict):
                for interaction_id, reward in rewards.items():
                    await client.set_reward(interaction_id, reward)
            elif rewards is not None:
                await client.set_last_reward(rewards)
        interactions = await client.export_interactions(self.discount, self.export_style)
        # rollout/evaluate.py takes the episode's reward from the last row, so side conversations,
        # which have no reward, come first.
        side = {key: value for key, value in interactions.items() if value.reward is None}
        return side | interactions if client.rewarded_count else None


@dataclass(eq=False)
class GroupedRolloutWorkflow(RolloutWorkflow):
    """Run `group_size` episodes of a workflow for one prompt, and merge their results."""

    workflow: RolloutWorkflow
    group_size: int
    on_failures: Callable[[int], None] = lambda count: None  # gets the number of failed members

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> EpisodeResult:
        members = (self._run_member(i, engine, data) for i in range(self.group_size))
        results = await asyncio.gather(*members)
        failures = [x for x in results if isinstance(x, BaseException)]
        if len(failures) == self.group_size:
            raise failures[0]
        for failure in failures:
            logger.warning(
                "a member of task %s failed: %r", _context.get().task_id, failure, exc_info=failure
            )
        self.on_failures(len(failures))
        episodes = [x for x in results if not isinstance(x, BaseException | None)]
        if not episodes:
            return None
        if is_interactions(episodes[0]):
            return {key: value for episode in episodes for key, value in episode.items()}
        return concat_padded_tensors(episodes)

    async def _run_member(self, i: int, engine: Any, data: dict[str, Any]) -> Any:
        """Return a member's result or its exception. Even SystemExit is returned, because raising
        it would end the event loop."""
        workflow_context.set(_context.get()._replace(sample_idx=i))
        try:
            result = await self.workflow.arun_episode(engine, copy.deepcopy(data))
            if result is not None and not is_interactions(result):
                check_trajectory_format(result)
            return result
        except BaseException as error:
            return error


def resolve_workflow(
    workflow: Any,
    workflow_kwargs: dict[str, Any] | None = None,
    *,
    proxy: dict[str, Any] | None = None,
    defaults: dict[str, Any] | None = None,
) -> Any:
    """Make a workflow from an agent or a workflow, given as an object, a class or a path.

    `proxy` holds the arguments of OpenAIProxyWorkflow. Without `proxy` an agent is returned as it
    is. `defaults` holds gconfig and tokenizer, for a workflow class that takes them.
    """
    resolved = import_name(workflow)
    kwargs = workflow_kwargs or {}
    if inspect.isclass(resolved) and issubclass(resolved, RolloutWorkflow):
        takes = inspect.signature(resolved).parameters
        kwargs = {k: x for k, x in (defaults or {}).items() if k in takes} | kwargs
    if inspect.isclass(resolved) or kwargs:
        resolved = resolved(**kwargs)
    if not isinstance(resolved, RolloutWorkflow):
        if not inspect.iscoroutinefunction(getattr(resolved, "run", None)):
            agent = "an agent, which has `async def run(self, data, **extra_kwargs)`"
            raise TypeError(f"{workflow!r} is neither a RolloutWorkflow nor {agent}")
        if proxy is not None:
            resolved = OpenAIProxyWorkflow(resolved, **proxy)
    return resolved
