"""Workflows define what one episode does and what it returns.

An **episode** is one run of `arun_episode(engine, data)`, a coroutine that turns one sample of the dataset into rows to
train on. The executor decides when an episode starts and what happens to its result (rollout/executor.py).

**Results.** A workflow returns one of three results (AReaL's document Rollout Workflow, "Return Types"). A dict of
tensors is a trajectory (rollout/trajectory.py). A dict of interactions has the calls of an agent, with their tokens and
rewards (cache.py). If the result is None, the sample is rejected. If the workflow of a sample raises an exception, the
sample's group is rejected and also counted as failed.

**The workflows here:**

    RLVRWorkflow            one prompt, one answer, one reward that a function computes
    MultiTurnWorkflow       one prompt, and new answers until the reward of an answer is positive
    OpenAIProxyWorkflow     an agent: an object with `async def run(self, data, **extra_kwargs)`
    GroupedRolloutWorkflow  several episodes of another workflow for one prompt

`resolve_workflow` makes a workflow from a workflow object, a class with its arguments, an import path, or an agent.

**Agents.** The proxy opens a session for each episode, and the agent gets the session's URL as base_url. The agent
returns a number (the reward of its last completion) or a dict {completion id: reward}. An agent that has sent its
rewards to the proxy over HTTP returns None. If no completion of an episode gets a reward, the episode is rejected.

**Where agents run** (AReaL's document Agent Workflow, "Execution Modes"). In mode inline all agents run in one event
loop. One agent object serves many episodes at the same time, so `run` must keep the state of an episode in local
variables. In mode inline a blocking call (a synchronous client, time.sleep) delays every episode. In mode subproc each
episode runs alone in a worker process (rollout/workers.py), so an agent may use synchronous code. Each worker process
has its own copy of the agent, so the agent must be picklable. A worker process takes about 50 MB of memory.

**Groups** (Rollout Workflow, "Grouped Rollout"). The members of a group run concurrently, each with its own copy of
`data`. If a member returns None or raises an exception, the group continues without this member. Example: of four
members, one raises an exception, one returns None, and two make one row each, so the group has two rows. If all members
raise exceptions, the group raises the exception of its first member.

**Seeds.** In a run with a seed, the sampling seed of each request depends only on (seed, task, member, turn). Episodes
that run at the same time do not change each other's seeds.
"""

import asyncio
import copy
import functools
import importlib
import inspect
import logging
import math
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import openai
import torch

from cache import Interaction
from calls.client import OpenAIProxyClient, sdk_http
from calls.prompts import PromptBuilder
from inference.io_struct import GenerationHyperparameters, ModelRequest, ModelResponse, call_seed
from inference.wire import PerLoop, make_transport, many_connections
from rollout.reward import AsyncRewardWrapper, parse_rewards
from rollout.rows import make_row, row_to_tensors
from rollout.trajectory import Trajectory, check_trajectory_format, concat_padded_tensors
from rollout.workers import WorkerPool, check_importable, run_agent, within, without_exit

logger = logging.getLogger("pocket_areal.workflow")

EpisodeResult = Trajectory | dict[str, Interaction] | None


class WorkflowContext(NamedTuple):
    """The task and the member that an episode belongs to (Rollout Workflow, "Workflow Context")."""

    is_eval: bool = False  # whether the episode belongs to an evaluation
    task_id: int | None = (
        None  # the id of the dispatcher's task; None if no executor runs the episode
    )
    sample_idx: int = 0  # the index of the episode in its group

    @property
    def name(self) -> str:
        """The episode's name in the run. The sampling seeds of the episode depend on this name."""
        return f"{'eval-' if self.is_eval else ''}{self.task_id}-{self.sample_idx}"


_context: ContextVar[WorkflowContext] = ContextVar("workflow_context", default=WorkflowContext())  # noqa: B039


class workflow_context:
    """Gives access to the context of the running episode, for example `workflow_context.get().is_eval`."""

    get, set = _context.get, _context.set

    @staticmethod
    def stat_scope() -> str:
        """Return the name of the running episode's dump folder: "rollout" or, in an evaluation, "eval-rollout"."""
        return "eval-rollout" if _context.get().is_eval else "rollout"


class RolloutWorkflow:
    """The interface of every workflow (Rollout Workflow, "Interface"). A subclass overrides `arun_episode` or
    `_run_one_episode`."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> EpisodeResult:
        """Run one episode on one sample. Return a trajectory, interactions, or None to reject the sample."""
        result = await self._run_one_episode(engine, data, _context.get().name)
        return result[0] if isinstance(result, tuple) else result

    async def _run_one_episode(self, engine: Any, data: dict[str, Any], rid: str) -> Any:
        """Run the episode with the name `rid`. This older form of `arun_episode` may return the result, or a tuple
        whose first element is the result."""
        raise NotImplementedError(
            f"{type(self).__name__} has no method arun_episode(self, engine, data)"
        )


def is_interactions(result: Any) -> bool:
    """Return whether the result of an episode is a dict of interactions instead of tensors."""
    values = result.values() if isinstance(result, dict) else ()
    return bool(values) and all(isinstance(value, Interaction) for value in values)


def to_tensors(result: Any) -> Trajectory:
    """Return an episode's result as tensors, with one row per interaction. `parents[i]` is the index of the row that
    row i continues, or -1 if row i continues no row."""
    if not is_interactions(result):
        return result
    places = {interaction: k for k, interaction in enumerate(result.values())}
    rows = concat_padded_tensors([interaction.to_tensor_dict() for interaction in places])
    parents = [places.get(interaction.parent, -1) for interaction in places]
    return rows | {"parents": torch.tensor(parents, dtype=torch.int32)}


def to_row(turns: list[ModelResponse], reward: float) -> Trajectory:
    """Return one row [1, L] for a conversation in which each prompt begins with all tokens of the earlier turns.

    `reward` is the reward of every turn. The row has the same form as a row that export style concat makes for an agent
    (cache.py).
    """
    calls = [
        Interaction([], model_response=turn, reward=reward, turn=k) for k, turn in enumerate(turns)
    ]
    return row_to_tensors(make_row([(call, True) for call in calls]))


@dataclass(eq=False, repr=False)
class RLVRWorkflow(RolloutWorkflow):
    """Sample one completion for the chat `data["messages"]`, and compute its reward.

    `reward_fn(prompt, completion, prompt_ids, completion_ids, **data)` returns a number. `prompt` and `completion` are
    texts. `reward_fn` may be a function, a coroutine function, or a string "module.function".
    """

    reward_fn: Callable[..., Any] | str
    gconfig: GenerationHyperparameters
    tokenizer: Any

    def __post_init__(self) -> None:
        reward_fn = (
            import_string(self.reward_fn) if isinstance(self.reward_fn, str) else self.reward_fn
        )
        self.async_reward_fn = AsyncRewardWrapper(reward_fn)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> EpisodeResult:
        response = await self.turn(engine, self.prompt_ids(data["messages"]), turn=0)
        return to_row([response], await self.reward(response, data))

    def prompt_ids(self, messages: list[dict]) -> list[int]:
        """Return the token ids of the rendered messages, up to the start of the assistant's answer."""
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )

    async def turn(self, engine: Any, input_ids: list[int], turn: int) -> ModelResponse:
        """Send one request. The request's sampling seed depends only on the episode and the turn."""
        name = _context.get().name
        seed = None if self.gconfig.seed is None else call_seed(self.gconfig.seed, name, turn)
        gconfig = self.gconfig.new(n_samples=1, seed=seed)
        names = {"session": name, "call": f"{name}.{turn}"}
        return await engine.agenerate(
            ModelRequest(input_ids, gconfig=gconfig, tokenizer=self.tokenizer, **names)
        )

    async def reward(self, response: ModelResponse, data: dict[str, Any]) -> float:
        """Return the reward of a completion."""
        prompt, completion = response.input_tokens, response.output_tokens
        texts = self.tokenizer.decode(prompt), self.tokenizer.decode(completion)
        return await self.async_reward_fn(*texts, prompt, completion, **data)


@dataclass(eq=False, repr=False)
class MultiTurnWorkflow(RLVRWorkflow):
    """Sample an answer. While the reward is not positive, add `reflection_message` and sample another answer.

    After k answers the episode's reward is turn_discount^(k-1) times the reward of the last answer. Each new prompt
    consists of the previous prompt, the tokens of the last answer, and the reflection message. Sampled tokens are not
    tokenised again (calls/prompts.py). A conversation also ends when it fills the context window.
    """

    max_turns: int = 3  # the largest number of answers in one conversation
    turn_discount: float = 0.9  # each answer after the first multiplies the reward by this factor
    reflection_message: str = "That is not right. Think about what went wrong, then answer again."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, not {self.max_turns}")
        self.prompts = PromptBuilder(self.tokenizer)
        if not self.prompts.splices:
            raise ValueError(
                "MultiTurnWorkflow: the chat template renders history anew at every turn; use an agent"
            )

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> EpisodeResult:
        context = getattr(engine, "context_length", None) or math.inf  # tokens
        prompt_ids = self.prompt_ids(data["messages"])
        reflection = [{"role": "user", "content": self.reflection_message}]
        turns: list[ModelResponse] = []
        # The workflow sends the first prompt even if the prompt fills the context; in this case the engine raises an
        # error.
        while not turns or len(prompt_ids) < context:
            turns.append(await self.turn(engine, prompt_ids, turn=len(turns)))
            reward = await self.reward(turns[-1], data)
            if reward > 0 or len(turns) == self.max_turns:
                break
            prompt_ids = self.prompts.extend(turns[-1], reflection, {})
        return to_row(turns, reward * self.turn_discount ** (len(turns) - 1))


@dataclass(eq=False, repr=False)
class GroupedRolloutWorkflow(RolloutWorkflow):
    """Run `group_size` episodes of one workflow for one prompt, and merge their results."""

    workflow: RolloutWorkflow
    group_size: int
    # If some but not all members fail, `on_failures` is called with the number of failed members.
    on_failures: Callable[[int], Awaitable[None]] | None = None
    on_end: Callable[[], None] = lambda: (
        None
    )  # function that is called each time the episode of a member has ended

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> EpisodeResult:
        members = (self._run_member(i, engine, data) for i in range(self.group_size))
        results = await asyncio.gather(*members, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        all_failed = len(failures) == self.group_size
        for failure in (
            failures[1:] if all_failed else failures
        ):  # if all failed, the first failure is raised below
            logger.warning(
                "task %s: a member of the group failed", _context.get().task_id, exc_info=failure
            )
        if all_failed:
            raise failures[0]
        if failures and self.on_failures:
            await self.on_failures(len(failures))
        episodes: list[Any] = [
            r for r in results if r is not None and not isinstance(r, BaseException)
        ]
        if not episodes:
            return None
        if not all(map(is_interactions, episodes)):
            rows = [to_tensors(episode) for episode in episodes]
            # `parents` is left out, because its row indices refer to the rows of one member, not to the rows of the
            # group.
            return concat_padded_tensors(
                [{k: x for k, x in row.items() if k != "parents"} for row in rows]
            )
        merged = {key: value for episode in episodes for key, value in episode.items()}
        if len(merged) < sum(map(len, episodes)):
            raise ValueError(
                f"two members returned the same interaction ids: {[list(e) for e in episodes]}"
            )
        return merged

    async def _run_member(self, i: int, engine: Any, data: dict[str, Any]) -> EpisodeResult:
        """Run the i-th member, with its own context and copy of `data`. Raises ValueError for a malformed result."""
        workflow_context.set(_context.get()._replace(sample_idx=i))
        try:
            result = await without_exit(self.workflow.arun_episode(engine, copy.deepcopy(data)))
        finally:
            self.on_end()
        if result is not None and not is_interactions(result):
            check_trajectory_format(result)
        return result


async def keep_open() -> None:
    """Do nothing. An agent that closes its SDK client closes the HTTP client, too. `keep_open` replaces the method
    `aclose` of an HTTP client that many agents share."""


def make_agents_client() -> Any:
    """Return an HTTP client without a timeout, for agents that use the openai SDK. Agents cannot close it."""
    client = openai.DefaultAioHttpClient(
        timeout=None, trust_env=False, **many_connections(sdk_http)
    )
    client.aclose = keep_open  # type: ignore[method-assign]
    return client


# The episodes of one event loop share three things: a transport for the proxy's /rl endpoints, the agents' HTTP client,
# and the worker processes of mode subproc.
_rl_transport = PerLoop(make_transport)
_agents_client = PerLoop(make_agents_client, openai.DefaultAioHttpClient.aclose)


@functools.cache
def agents_pool(size: int, *prefix: str) -> PerLoop[WorkerPool]:
    """Return the worker pools of mode subproc. Each event loop has one pool of at most `size` workers. The command
    `prefix` starts each worker (WorkerPool)."""
    return PerLoop(lambda: WorkerPool(size, fresh=True, prefix=prefix))


@dataclass(eq=False, repr=False)
class OpenAIProxyWorkflow(RolloutWorkflow):
    """Run an agent in a session of the proxy, set the rewards that the agent returns, and export the interactions."""

    agent: Any
    proxy_addr: str | tuple[str, ...]  # with several proxies, each episode uses one of them
    admin_key: str  # key of the proxy's management endpoints
    mode: str = "inline"  # where agents run: `inline` or `subproc`
    subproc_max_workers: int = (
        4  # the largest number of agents that run at the same time in mode subproc
    )
    subproc_prefix: Sequence[str] = ()  # a command that starts each worker of mode subproc
    discount: float = (
        1.0  # gamma in the final reward of a turn: R = r + gamma * mean R(children), see cache.py
    )
    export_style: str = (
        "individual"  # `individual` makes one row per turn, and `concat` makes one row per leaf
    )
    episode_timeout: float = (
        3600.0  # limit in seconds; an episode that takes longer is cancelled and counted as failed
    )
    sampling: dict[str, Any] = field(
        default_factory=dict
    )  # the session's default sampling parameters

    def __post_init__(self) -> None:
        remedy = "define its class at the top of a module and make clients in `run`, or set rollout.openai.mode=inline"
        if self.mode == "subproc":
            check_importable(self.agent, f"agent {type(self.agent).__name__}", remedy)
        # OpenAI's SDK needs a key to make a client. The proxy identifies a session by its URL, so any key works.
        os.environ.setdefault("OPENAI_API_KEY", "DUMMY")

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> EpisodeResult:
        if self.mode == "inline":
            http_client = await _agents_client.get()
            return await self._episode(
                functools.partial(self.agent.run, data, http_client=http_client)
            )
        pool = await agents_pool(self.subproc_max_workers, *self.subproc_prefix).get()
        async with pool.worker() as worker:  # the session starts only after the agent has a worker
            return await self._episode(functools.partial(worker.call, run_agent, self.agent, data))

    async def _episode(self, run: Callable[..., Coroutine[Any, Any, Any]]) -> EpisodeResult:
        """Open a session, call `run(base_url=..., api_key=...)`, set the rewards that `run` returns, and export the
        interactions."""
        transport = await _rl_transport.get()
        where = transport, self._choose_proxy(), self.admin_key, _context.get().name
        client = OpenAIProxyClient(*where, grant=True, sampling=self.sampling)
        limit = f"{self.episode_timeout:g} s (rollout.openai.episode_timeout_seconds)"
        words = (
            f"the agent of task {_context.get().name} took longer than {limit} and was cancelled"
        )
        async with client:
            work = run(base_url=client.session_url, api_key=client.api_key)
            rewards = parse_rewards(await within(self.episode_timeout, work, words))
            interactions = await client.finish(
                rewards, discount=self.discount, style=self.export_style
            )
        # Interactions without a reward are side conversations (calls/side_conversations.py). The side conversations
        # come first in the result, so that the reward of the episode is in the last row.
        side = {key: value for key, value in interactions.items() if value.reward is None}
        return side | interactions if client.rewarded_count else None

    def _choose_proxy(self) -> str:
        """Return the URL of this episode's proxy. The sum of task id and member index chooses the proxy, so that every
        proxy gets about equally many episodes."""
        addresses = (self.proxy_addr,) if isinstance(self.proxy_addr, str) else self.proxy_addr
        context = _context.get()
        return addresses[((context.task_id or 0) + context.sample_idx) % len(addresses)]


def import_string(path: str) -> Any:
    """Return the object at the import path "module.Name". Raises an ImportError that names the missing part."""
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise ImportError(f"{path!r}: a path like 'my_module.MyClass' is needed")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but it imports a module that is missing
        raise ImportError(
            f"{path!r}: there is no module {error.name!r} on the Python path"
        ) from error
    if not hasattr(module, name):
        raise ImportError(f"{path!r}: module {module_name!r} has no {name!r}")
    return getattr(module, name)


def _instantiate(cls: type, kwargs: dict[str, Any], defaults: dict[str, Any]) -> Any:
    """Return `cls(**kwargs)`. If the class accepts an argument that `kwargs` lacks, the argument comes from
    `defaults`."""
    signature = inspect.signature(cls)
    kwargs = {key: value for key, value in defaults.items() if key in signature.parameters} | kwargs
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        raise TypeError(
            f"{cls.__name__}{signature}: {error}; its arguments come from workflow_kwargs"
        ) from error
    return cls(**kwargs)


def resolve_workflow(
    workflow: Any,
    workflow_kwargs: dict[str, Any] | None = None,
    group_size: int = 1,
    *,
    proxy: dict[str, Any] | None = None,
    defaults: dict[str, Any] | None = None,
) -> RolloutWorkflow:
    """Return the RolloutWorkflow that runs the given workflow or agent (Rollout Workflow, "Workflow Resolution").

    `workflow`: a workflow or an agent, given as an object, a class, or the import path "module.Name" of one of these.
    `workflow_kwargs`: the arguments of a class.
    `group_size`: the number of episodes per prompt. If this number is above 1, a GroupedRolloutWorkflow is returned.
    `proxy`: the arguments of OpenAIProxyWorkflow (proxy_addr, admin_key, ...). Only agents need these arguments.
    `defaults`: values of gconfig and tokenizer for a workflow class, used if workflow_kwargs lacks these arguments.
    Raises ImportError, TypeError or ValueError with a message that says what to change.
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
        raise ValueError(
            f"workflow_kwargs were given, but {workflow!r} is an object already; give its class instead"
        )
    if not is_workflow:
        if proxy is None:
            raise ValueError(
                f"{cls.__name__} is an agent, and agents need a proxy: give the executor a ProxyAddress"
            )
        resolved = OpenAIProxyWorkflow(resolved, **proxy)
    return GroupedRolloutWorkflow(resolved, group_size) if group_size > 1 else resolved
