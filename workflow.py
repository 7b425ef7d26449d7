"""Workflows: what one episode does, and how anything that a user hands over becomes one.

The rule: a rollout is a coroutine, `arun_episode(engine, data)`, that turns one sample of the dataset into rows to
train on. It returns one of three things: a dict of tensors (see rollout/trajectory.py), a dict of interactions (calls
of an agent, with their tokens and rewards), or None, which rejects the sample. Everything else about an episode, when
it may start, how many run at once, what becomes of its result, belongs to rollout/executor.py.

Four kinds come with the project.

  RLVRWorkflow            one prompt, one answer, one verifiable reward
  MultiTurnWorkflow       answer, look at the reward, reflect, answer again
  OpenAIProxyWorkflow     any agent: an object with `async def run(self, data, **extra_kwargs)`
                          which talks to a base_url
  GroupedRolloutWorkflow  the same workflow several times for one prompt, side by side

`resolve_workflow` makes one of these of an instance, a class with its keyword arguments, a "module.Class" string, or
an agent. Code inside an episode learns what it runs in from `workflow_context`: is this an evaluation, which task,
which member of the group.

Agents. The proxy gives each episode a session of its own, and the agent gets its URL. It may return a number (int,
float, bool, numpy or torch scalar: the reward of its last completion), a dict {completion id: number}, or None when
it set its rewards by itself over HTTP; None with nothing set rejects the episode.

Where agents run. In mode inline, the default, in the event loop of all episodes: one agent object serves them all, many
at a time, so what belongs to one episode belongs into local variables of `run`, and what blocks (a synchronous client,
time.sleep) blocks everybody. In mode subproc each episode has a process for itself (rollout/workers.py): a copy of the
agent, the session's URL and key in the environment, synchronous code welcome. The price is pickling and some 50 MB a
process.

Groups. The members of a group run concurrently, each with a copy of `data` of its own. A member that returns None is
left out; one that raises, or returns what is no trajectory, is counted, logged and left out; the others are kept. Only
when every member raised does the group raise, the first exception. Which group a row belongs to is written on the row
(`group_ids`), so a group that lost a member stays a group.

Seeds. With a seed for the run, every request's sampling noise is derived from (seed, task, member, turn) and from
nothing else, so that the order in which episodes happen to run does not change what they sample.

How this differs from AReaL: there a failing member takes its whole group along; `return 1` from an agent is an error;
groups are found again by position; workflow_kwargs beside an instance are ignored with a warning.
"""

import asyncio
import copy
import functools
import importlib
import inspect
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import openai
import torch

from cache import InteractionWithTokenLogpReward
from calls.client import OpenAIProxyClient, sdk_http
from calls.messages import AgentRequest
from calls.prompts import PromptBuilder
from inference.io_struct import GenerationHyperparameters, ModelRequest, ModelResponse, call_seed
from inference.wire import PerLoop, StackTransport
from rollout.reward import AsyncRewardWrapper, parse_rewards
from rollout.trajectory import Trajectory, check_trajectory_format, concat_padded_tensors
from rollout.workers import WorkerPool, check_importable, run_agent, time_limit

logger = logging.getLogger("nano_areal.workflow")

Interactions = dict[str, InteractionWithTokenLogpReward]
EpisodeResult = Trajectory | Interactions | None


@dataclass(frozen=True)
class WorkflowContext:
    """What an episode is part of."""

    is_eval: bool = False
    task_id: int | None = None  # None outside of an executor
    sample_idx: int = 0  # which member of its group

    @property
    def name(self) -> str:
        """The episode's name within the run: its session at the proxy, the conversation at the server, its seeds."""
        return f"{'eval-' if self.is_eval else ''}{self.task_id}-{self.sample_idx}"


_context: ContextVar[WorkflowContext] = ContextVar("workflow_context", default=WorkflowContext())  # noqa: B039


class workflow_context:
    """The context of the running episode: `workflow_context.get().is_eval`. Every episode sees its own."""

    get, set = _context.get, _context.set

    @staticmethod
    def stat_scope() -> str:
        """ "rollout" or "eval-rollout": the name under which statistics and dumps of this episode go."""
        return "eval-rollout" if _context.get().is_eval else "rollout"


class RolloutWorkflow(ABC):
    """One episode (docs/rollout_workflow.txt)."""

    @abstractmethod
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> EpisodeResult:
        """Run it. None rejects the sample; an exception rejects it and counts as failed."""


def is_interactions(result: Any) -> bool:
    """Whether an episode returned interactions rather than tensors."""
    values = result.values() if isinstance(result, dict) else ()
    return bool(values) and all(isinstance(value, InteractionWithTokenLogpReward) for value in values)


def to_tensors(result: Any) -> Trajectory:
    """An episode's result as tensors: interactions become rows, one under another, each with its parent's place."""
    if not is_interactions(result):
        return result
    places = {interaction: k for k, interaction in enumerate(result.values())}
    rows = concat_padded_tensors([interaction.to_tensor_dict() for interaction in places])
    parents = [places.get(interaction.parent, -1) for interaction in places]
    return rows | {"parents": torch.tensor(parents, dtype=torch.int32)}


def to_row(turns: list[ModelResponse], reward: float) -> Trajectory:
    """One row [1, L] of a conversation in which every prompt begins with all tokens before it.

    It is the row of an agent's conversation in export style concat (cache.py), with the same `reward` for every turn.
    """
    *earlier, last = [
        InteractionWithTokenLogpReward([], model_response=turn, reward=reward, turn=k) for k, turn in enumerate(turns)
    ]
    last.earlier = [(turn, True) for turn in earlier]
    return last.to_tensor_dict()


@dataclass(eq=False, repr=False)
class RLVRWorkflow(RolloutWorkflow):
    """`data["messages"]` (chat) -> one completion -> one reward.

    `reward_fn(prompt, completion, prompt_ids, completion_ids, **data)` is a function, a coroutine function, or
    "module.function"; it gets texts and token ids and returns a number.
    """

    reward_fn: Callable[..., Any] | str
    gconfig: GenerationHyperparameters
    tokenizer: Any

    def __post_init__(self) -> None:
        reward_fn = import_string(self.reward_fn) if isinstance(self.reward_fn, str) else self.reward_fn
        self.async_reward_fn = AsyncRewardWrapper(reward_fn)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> EpisodeResult:
        response = await self.turn(engine, self.prompt_ids(data["messages"]), turn=0)
        return to_row([response], await self.reward(response, data))

    def prompt_ids(self, messages: list[dict]) -> list[int]:
        """The chat template over the messages, ready for the assistant to speak."""
        return self.tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False
        )

    async def turn(self, engine: Any, input_ids: list[int], turn: int) -> ModelResponse:
        """One request; its noise and its server depend on the episode, not on what else is running."""
        seed = None if self.gconfig.seed is None else call_seed(self.gconfig.seed, _context.get().name, turn)
        gconfig = self.gconfig.new(n_samples=1, seed=seed)
        request = ModelRequest(input_ids, gconfig=gconfig, tokenizer=self.tokenizer, session=_context.get().name)
        return await engine.agenerate(request)

    async def reward(self, response: ModelResponse, data: dict[str, Any]) -> float:
        """The reward function's answer to this prompt and completion."""
        prompt, completion = response.input_tokens, response.output_tokens
        texts = self.tokenizer.decode(prompt), self.tokenizer.decode(completion)
        return await self.async_reward_fn(*texts, prompt, completion, **data)


@dataclass(eq=False, repr=False)
class MultiTurnWorkflow(RLVRWorkflow):
    """Try, and while the reward is not positive, be told so and try again, in one growing conversation.

    An answer found at the k-th try (k = 1, 2, ...) is worth turn_discount^(k-1) of its reward. The next prompt is the
    last one, the tokens that were sampled, and the reflection message: nothing is tokenised twice (calls/prompts.py). A
    conversation that has filled the context ends there, with the reward of its last answer.
    """

    max_turns: int = 3
    turn_discount: float = 0.9
    reflection_message: str = "That is not right. Think about what went wrong, then answer again."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, not {self.max_turns}")
        self.prompts = PromptBuilder(self.tokenizer)
        if not self.prompts.splices:
            raise ValueError("MultiTurnWorkflow: the chat template renders history anew at every turn; use an agent")

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> EpisodeResult:
        context = getattr(engine, "context_length", None) or math.inf  # tokens
        messages, prompt_ids, reward = data["messages"], self.prompt_ids(data["messages"]), 0.0
        turns: list[ModelResponse] = []
        while len(turns) < self.max_turns and reward <= 0 and (not turns or len(prompt_ids) < context):
            turns.append(await self.turn(engine, prompt_ids, turn=len(turns)))
            reward = await self.reward(turns[-1], data)
            said = [{"role": "assistant", "content": "its tokens are there"}]
            parent = InteractionWithTokenLogpReward(messages, model_response=turns[-1], output_message_list=said)
            messages = [*messages, *said, {"role": "user", "content": self.reflection_message}]
            prompt_ids = self.prompts.prompt(AgentRequest(messages), parent)
        return to_row(turns, reward * self.turn_discount ** (len(turns) - 1))


@dataclass(eq=False, repr=False)
class GroupedRolloutWorkflow(RolloutWorkflow):
    """`group_size` episodes of one workflow for one prompt; `on_failures` hears how many of them raised, if not all."""

    workflow: RolloutWorkflow
    group_size: int
    on_failures: Callable[[int], Awaitable[None]] | None = None

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> EpisodeResult:
        members = (self._run_member(i, engine, data) for i in range(self.group_size))
        results = await asyncio.gather(*members, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in failures:
            logger.warning("task %s: a member of the group failed", _context.get().task_id, exc_info=failure)
        if len(failures) == self.group_size:
            raise failures[0]
        if failures and self.on_failures:
            await self.on_failures(len(failures))
        episodes: list[Any] = [r for r in results if r is not None and not isinstance(r, BaseException)]
        if not episodes:
            return None
        if not all(map(is_interactions, episodes)):
            rows = [to_tensors(episode) for episode in episodes]
            return concat_padded_tensors([{k: x for k, x in row.items() if k != "parents"} for row in rows])
        merged = dict(item for episode in episodes for item in episode.items())
        if len(merged) < sum(map(len, episodes)):
            raise ValueError(
                f"two members returned the same interaction ids: {[list(episode) for episode in episodes]}"
            )
        return merged

    async def _run_member(self, i: int, engine: Any, data: dict[str, Any]) -> EpisodeResult:
        workflow_context.set(replace(_context.get(), sample_idx=i))
        try:
            result = await self.workflow.arun_episode(engine, copy.deepcopy(data))
        except SystemExit as error:  # a task of ours that raised it would end the event loop, and every episode
            raise RuntimeError(f"the episode called sys.exit({error.code!r})") from error
        if result is not None and not is_interactions(result):
            check_trajectory_format(result)
        return result


def make_agents_client() -> Any:
    """An HTTP client of the kind that the installed openai SDK runs on. No request has a limit: its episode has one."""
    transport: Any = StackTransport(sdk_http)
    return openai.DefaultAsyncHttpxClient(transport=transport, timeout=None, trust_env=False)


# What episodes on one event loop share: a way to the proxy's /rl calls, the agents' client, their processes.
_rl_transport = PerLoop(StackTransport)
_agents_client = PerLoop(make_agents_client)


@functools.cache
def agents_pool(size: int) -> PerLoop[WorkerPool]:
    """The processes of mode subproc, at most `size`."""
    return PerLoop(lambda: WorkerPool(size))


@dataclass(eq=False, repr=False)
class OpenAIProxyWorkflow(RolloutWorkflow):
    """An agent's episode: a session at the proxy, `agent.run` with the session's URL, its rewards, the export."""

    agent: Any
    proxy_addr: str | tuple[str, ...]  # several: an episode keeps to one
    admin_key: str
    mode: str = "inline"  # or subproc
    subproc_max_workers: int = 4
    discount: float = 1.0  # gamma by which a turn's reward reaches the turn before it
    export_style: str = "individual"  # or concat
    episode_timeout: float = 3600.0  # seconds; an episode that takes longer is cancelled and has failed

    def __post_init__(self) -> None:
        if self.mode == "subproc":
            remedy = (
                "define its class at the top of a module, make clients and locks inside `run`, "
                "or set rollout.openai.mode=inline"
            )
            check_importable(self.agent, f"agent {type(self.agent).__name__}", remedy)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> EpisodeResult:
        if self.mode == "inline":
            http_client = await _agents_client.get()
            return await self._episode(functools.partial(self.agent.run, data, http_client=http_client))
        pool = await agents_pool(self.subproc_max_workers).get()
        async with pool.worker() as worker:  # first the process: an episode that waits for one holds no session
            return await self._episode(functools.partial(worker.call, run_agent, self.agent, data))

    async def _episode(self, run: Callable[..., Awaitable[Any]]) -> EpisodeResult:
        transport = await _rl_transport.get()
        client = OpenAIProxyClient(transport, self._choose_proxy(), self.admin_key, _context.get().name)
        limit = f"{self.episode_timeout:g} s (rollout.openai.episode_timeout_seconds)"
        async with time_limit(self.episode_timeout, f"the episode took longer than {limit} and was cancelled"):
            await client.grant_capacity()
            async with client:
                rewards = parse_rewards(await run(base_url=client.session_url, api_key=client.api_key))
                if isinstance(rewards, dict):
                    for interaction_id, reward in rewards.items():
                        await client.set_reward(interaction_id, reward)
                elif rewards is not None:
                    await client.set_last_reward(rewards)
        interactions = await client.export_interactions(discount=self.discount, style=self.export_style)
        # What nobody rewarded, a side conversation (cache.py), comes first: the last row's reward is the episode's.
        ordered = dict(sorted(interactions.items(), key=lambda item: item[1].reward is not None))
        return ordered if client.rewarded_count else None

    def _choose_proxy(self) -> str:
        addresses = (self.proxy_addr,) if isinstance(self.proxy_addr, str) else self.proxy_addr
        context = _context.get()
        return addresses[((context.task_id or 0) + context.sample_idx) % len(addresses)]


def import_string(path: str) -> Any:
    """The object named "module.Name". Raises ImportError that says which part of the path is missing."""
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise ImportError(f"{path!r}: a path like 'my_module.MyClass' is needed")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there and lacks one of its own imports
        raise ImportError(f"{path!r}: there is no module {error.name!r} on the Python path") from error
    if not hasattr(module, name):
        raise ImportError(f"{path!r}: module {module_name!r} has no {name!r}")
    return getattr(module, name)


def _instantiate(cls: type, kwargs: dict[str, Any], defaults: dict[str, Any]) -> Any:
    signature = inspect.signature(cls)
    kwargs = {key: value for key, value in defaults.items() if key in signature.parameters} | kwargs
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        raise TypeError(f"{cls.__name__}{signature}: {error}; its arguments come from workflow_kwargs") from error
    return cls(**kwargs)


def resolve_workflow(
    workflow: Any,
    workflow_kwargs: dict[str, Any] | None = None,
    group_size: int = 1,
    *,
    proxy: dict[str, Any] | None = None,
    defaults: dict[str, Any] | None = None,
    on_failures: Callable[[int], Awaitable[None]] | None = None,
) -> RolloutWorkflow:
    """A RolloutWorkflow from what the user gave: an instance, a class, "module.Name" of either, or an agent.

    proxy: keyword arguments of OpenAIProxyWorkflow (proxy_addr, admin_key, ...), needed for agents. defaults: arguments
    (gconfig, tokenizer) that a RolloutWorkflow's class gets when its __init__ names them and workflow_kwargs do not.
    Raises ImportError, TypeError or ValueError; each says what to change.
    """
    resolved = import_string(workflow) if isinstance(workflow, str) else workflow
    cls = resolved if inspect.isclass(resolved) else type(resolved)
    is_workflow = issubclass(cls, RolloutWorkflow)
    if not is_workflow and not inspect.iscoroutinefunction(getattr(resolved, "run", None)):
        agent = "an agent, which has `async def run(self, data, **extra_kwargs)`"
        raise TypeError(f"{workflow!r} is neither a RolloutWorkflow nor {agent}")
    if resolved is cls:
        resolved = _instantiate(cls, workflow_kwargs or {}, (defaults or {}) if is_workflow else {})
    elif workflow_kwargs:
        raise ValueError(f"workflow_kwargs were given, but {workflow!r} is an object already; give its class instead")
    if not is_workflow:
        if proxy is None:
            raise ValueError(f"{cls.__name__} is an agent, and agents need a proxy: none was given")
        resolved = OpenAIProxyWorkflow(resolved, **proxy)
    return GroupedRolloutWorkflow(resolved, group_size, on_failures) if group_size > 1 else resolved
