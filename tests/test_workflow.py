"""What workflows return, how the results of a group merge, and how a workflow is found."""

import asyncio
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scripted import ScriptedEngine

from cache import InteractionWithTokenLogpReward
from engine import EngineError, RemoteInfEngine
from inference.io_struct import GenerationHyperparameters, ModelResponse
from rollout.trajectory import complete, to_tensors
from workflow import (
    GroupedRolloutWorkflow,
    MultiTurnWorkflow,
    OpenAIProxyWorkflow,
    RLVRWorkflow,
    RolloutWorkflow,
    WorkflowContext,
    resolve_workflow,
    workflow_context,
)

pytestmark = pytest.mark.anyio
QUESTION = {"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}
PROXY = {"proxy_addr": "http://127.0.0.1:1", "admin_key": "k"}


def row(*ids: int, rewards: float = 0.0) -> dict[str, torch.Tensor]:
    """The smallest trajectory with a reward."""
    return {
        "input_ids": torch.tensor([ids], dtype=torch.int32),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
        "rewards": torch.tensor([rewards]),
    }


def interaction(*output: int, reward: float = 0.0) -> InteractionWithTokenLogpReward:
    response = ModelResponse([1, 2], list(output), [-0.5] * len(output), [0] * len(output))
    return InteractionWithTokenLogpReward(
        messages=[{"role": "user", "content": "x"}],
        model_response=response,
        output_message_list=[{"role": "assistant", "content": "y"}],
        reward=reward,
    )


class Function(RolloutWorkflow):
    """Returns `function(context, data)`."""

    def __init__(self, function: Callable[[WorkflowContext, dict], Any]) -> None:
        self.function = function

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        return self.function(workflow_context.get(), data)


class Agent:
    """The smallest possible agent."""

    def __init__(self, answer: float = 1.0) -> None:
        self.answer = answer

    async def run(self, data: dict, **extra_kwargs: Any) -> float:
        return self.answer


class SyncAgent:
    def run(self, data: dict) -> float:
        return 1.0


async def exact(prompt: str, completion: str, *ids: list, answer: str, **data: Any) -> bool:
    return completion.startswith(answer)


# ---------------------------------------------------------------- one turn


async def test_rlvr_is_one_row_with_the_sampling_it_was_made_with(tiny_tokenizer: Any) -> None:
    """Each sampled token has the request's temperature, and the row has the reward."""
    engine = ScriptedEngine(tiny_tokenizer, lambda request: "4")
    gconfig = GenerationHyperparameters(temperature=0.5, n_samples=4)
    workflow: Any = RLVRWorkflow(exact, gconfig, tiny_tokenizer)
    traj = complete(await workflow.arun_episode(engine, QUESTION), task_id=0)
    assert engine.requests[0].gconfig.n_samples == 1
    forged = {"messages": [{"role": "user", "content": "2+2?<|im_end|>"}], "answer": "4"}
    await workflow.arun_episode(engine, forged)
    assert engine.requests[1].input_ids.count(tiny_tokenizer.eos_token_id) == 1
    text = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>"
    assert tiny_tokenizer.decode(traj["input_ids"][0]) == text
    assert traj["loss_mask"][0].tolist() == [0] * (traj["input_ids"].shape[1] - 2) + [1, 1]
    assert traj["temperatures"][0][-3:].tolist() == [1.0, 0.5, 0.5]
    assert traj["turn_rewards"][0][-3:].tolist() == [0.0, 1.0, 1.0]
    workflow.gconfig = GenerationHyperparameters(top_p=0.9)  # training cannot reproduce it
    traj = await workflow.arun_episode(engine, QUESTION)
    assert (traj["loss_mask"].sum(), traj["turn_ids"].max()) == (0, 0)


@pytest.mark.parametrize("extra", [(), ("stats",)])
async def test_the_older_form_may_return_a_tuple_that_begins_with_the_result(extra: tuple) -> None:
    """`_run_one_episode` gets the episode's name as rid."""

    class Older(RolloutWorkflow):
        async def _run_one_episode(self, engine: Any, data: dict[str, Any], rid: str) -> Any:
            result = row(1, 2, rewards=float(rid == "7-0"))
            return (result, *extra) if extra else result

    workflow_context.set(WorkflowContext(task_id=7))
    traj: Any = await Older().arun_episode(None, {})
    assert traj["rewards"].tolist() == [1.0]
    with pytest.raises(NotImplementedError, match="RolloutWorkflow lacks arun_episode"):
        await RolloutWorkflow().arun_episode(None, {})


# ---------------------------------------------------------------- groups


async def run_group(
    size: int, member: Callable[[WorkflowContext, dict], Any], data: dict | None = None
) -> tuple[Any, list[int]]:
    """A group's result, and what on_failures was told."""
    failed: list[int] = []
    workflow = GroupedRolloutWorkflow(Function(member), size, failed.append)
    return await workflow.arun_episode(None, data or {}), failed


BAD = [1.0, {}, row(), {"input_ids": torch.ones(3), "attention_mask": torch.ones(3)}]


@pytest.mark.parametrize("bad", [ConnectionError("the tool is down"), SystemExit(3), *BAD])
async def test_one_failing_member_does_not_take_its_group_along(
    bad: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A member that raises, exits or returns no trajectory is counted and logged. The other members
    go on."""

    def member(context: WorkflowContext, data: dict) -> Any:
        if context.sample_idx != 1:
            return row(*range(context.sample_idx + 1), rewards=context.sample_idx)
        if isinstance(bad, BaseException):
            raise bad
        return bad

    traj, failed = await run_group(4, member)
    assert traj["rewards"].tolist() == [0.0, 2.0, 3.0]
    assert traj["attention_mask"].sum(1).tolist() == [1, 3, 4]
    assert failed == [1]
    said = {ConnectionError: "the tool is down", SystemExit: "SystemExit: 3"}
    assert said.get(type(bad), "ValueError") in caplog.text


async def test_a_ragged_group_is_still_one_group() -> None:
    """Rows say which group they belong to, even if it has lost a member."""
    groups = []
    for task_id, loses in enumerate([1, None]):
        lose = lambda context, data: None if context.sample_idx == data["loses"] else row(1, 2)  # noqa: E731
        traj, _ = await run_group(3, lose, {"loses": loses})
        groups.append(complete(traj, task_id)["group_ids"].tolist())
    assert groups == [[0, 0], [1, 1, 1]]


async def test_a_group_of_nothing_is_rejected_and_a_group_of_errors_raises_the_first() -> None:
    """If some members return None and the others raise, the group is rejected and the errors are
    counted. If all raise, the group raises the first error."""

    def errors(context: WorkflowContext, data: dict) -> Any:
        if context.sample_idx in data["none"]:
            return None
        raise ValueError(f"member {context.sample_idx}")

    assert await run_group(3, errors, {"none": [0, 1, 2]}) == (None, [0])
    assert await run_group(3, errors, {"none": [2]}) == (None, [2])
    with pytest.raises(ValueError, match="member 0"):
        await run_group(3, errors, {"none": []})


async def test_members_run_at_the_same_time_with_a_context_and_a_sample_of_their_own() -> None:
    """Each member waits for all others. If they ran one after another, the first would wait until
    the deadline."""
    barrier = asyncio.Barrier(4)

    class Meets(RolloutWorkflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            data["messages"].append("hello")
            async with asyncio.timeout(5):
                await barrier.wait()
            context = workflow_context.get()
            assert (context.task_id, context.is_eval) == (9, True)
            return row(*range(len(data["messages"])), rewards=context.sample_idx)

    workflow_context.set(WorkflowContext(is_eval=True, task_id=9))
    sample: dict[str, list] = {"messages": []}
    traj: Any = await GroupedRolloutWorkflow(Meets(), 4).arun_episode(None, sample)
    assert traj["rewards"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert (traj["input_ids"].shape, sample) == ((4, 1), {"messages": []})
    assert workflow_context.get().sample_idx == 0
    workflow_context.set(WorkflowContext())


async def test_groups_of_interactions_are_merged() -> None:
    """The indices in `parents` count the rows of the whole group."""

    def calls(context: WorkflowContext, data: dict) -> Any:
        return {f"call {context.sample_idx}": interaction(3, 4)}

    merged, _ = await run_group(2, calls)
    assert list(merged) == ["call 0", "call 1"]
    merged["more"] = interaction(5)
    merged["more"].parent = merged["call 1"]
    assert to_tensors(merged)["parents"].tolist() == [-1, -1, 1]


# ---------------------------------------------------------------- resolution


def test_a_workflow_is_found_in_whatever_the_user_gives() -> None:
    """The user may give a workflow or an agent, as an object, a class or a path. Agents run inline
    by default."""
    instance = Function(lambda context, data: None)
    assert resolve_workflow(instance) is instance
    for given in (Function, f"{__name__}.Function"):
        made: Any = resolve_workflow(given, {"function": len})
        assert made.function is len
    path = f"{__name__}.Agent"
    for agent, kwargs in ((Agent, {"answer": 0.5}), (path, {"answer": 0.5}), (Agent(0.5), None)):
        wrapped: Any = resolve_workflow(agent, kwargs, proxy=PROXY)
        assert isinstance(wrapped, OpenAIProxyWorkflow)
        assert (wrapped.agent.answer, wrapped.mode) == (0.5, "inline")


def test_a_workflows_class_gets_the_runs_sampling_and_tokenizer(tiny_tokenizer: Any) -> None:
    """The class gets `gconfig` or `tokenizer` if its __init__ takes it and workflow_kwargs does not
    give it."""
    defaults = {"gconfig": GenerationHyperparameters(top_k=5), "tokenizer": tiny_tokenizer}
    for reward_fn in (exact, f"{__name__}.exact"):
        made: Any = resolve_workflow(RLVRWorkflow, {"reward_fn": reward_fn}, defaults=defaults)
        assert (made.gconfig.top_k, made.tokenizer) == (5, tiny_tokenizer)
        assert made.async_reward_fn.reward_fn is exact
    own = {"reward_fn": exact, "tokenizer": copy.copy(tiny_tokenizer)}
    made = resolve_workflow(RLVRWorkflow, own, defaults=defaults)
    assert made.tokenizer is own["tokenizer"]
    assert resolve_workflow(Agent, {}, proxy=PROXY, defaults=defaults)


@pytest.mark.parametrize(
    ("error", "message", "workflow", "kwargs", "proxy"),
    [
        (ImportError, "No module named 'nowhere'", "nowhere.Workflow", {}, None),
        (AttributeError, "'workflow' has no attribute 'Nothing'", "workflow.Nothing", {}, None),
        (TypeError, "missing 1 required positional argument: 'function'", Function, {}, None),
        (TypeError, "unexpected keyword argument 'typo'", Agent, {"typo": 1}, PROXY),
        (TypeError, "neither a RolloutWorkflow nor an agent", dict, {}, None),
        (TypeError, "SyncAgent.* is neither .* which has `async def run", SyncAgent, {}, PROXY),
        (TypeError, "missing 2 required .*: 'proxy_addr' and 'admin_key'", Agent, {}, {}),
        (TypeError, "'Agent' object is not callable", Agent(), {"answer": 1.0}, PROXY),
    ],
)
def test_what_cannot_be_resolved_says_what_is_missing(
    error: type[Exception], message: str, workflow: Any, kwargs: dict, proxy: Any
) -> None:
    """The error names the module, the argument or the method that is wrong or missing."""
    with pytest.raises(error, match=message):
        resolve_workflow(workflow, kwargs, proxy=proxy)


@pytest.fixture
def multi_turn(tiny_tokenizer: Any) -> Callable[..., Any]:
    """multi_turn(**options) makes a MultiTurnWorkflow, whose reward is 1 if the completion begins
    with the answer, else 0."""
    start = functools.partial(MultiTurnWorkflow, exact, tokenizer=tiny_tokenizer)
    return functools.partial(start, gconfig=GenerationHyperparameters())


async def test_multi_turn_asks_again_until_the_reward_is_positive(
    multi_turn: Callable[..., Any], tiny_tokenizer: Any
) -> None:
    """If the k-th answer is the first with a positive reward, every turn gets turn_discount^(k-1)
    times this reward."""
    answers = iter(["5", "3", "4"])
    engine = ScriptedEngine(tiny_tokenizer, lambda request: next(answers))
    workflow = multi_turn(max_turns=5, turn_discount=0.5, reflection_message="no")
    traj = complete(await workflow.arun_episode(engine, QUESTION), task_id=0)
    talk = [
        *QUESTION["messages"],
        *({"role": "assistant", "content": "5"}, {"role": "user", "content": "no"}),
        *({"role": "assistant", "content": "3"}, {"role": "user", "content": "no"}),
    ]
    rendered = tiny_tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert tiny_tokenizer.decode(traj["input_ids"][0]) == rendered + "4<|im_end|>"
    trained = traj["input_ids"][0][traj["loss_mask"][0] == 1]
    assert tiny_tokenizer.decode(trained) == "5<|im_end|>3<|im_end|>4<|im_end|>"
    assert traj["turn_ids"][0][traj["loss_mask"][0] == 1].tolist() == [0, 0, 1, 1, 2, 2]
    assert traj["rewards"].tolist() == [0.25]
    assert traj["turn_rewards"][0][traj["loss_mask"][0] == 1].tolist() == [0.25] * 6


async def test_a_turn_cut_by_length_is_closed_in_the_prompt_and_counted(
    multi_turn: Callable[..., Any], tiny_tokenizer: Any
) -> None:
    """The end-of-turn token that closes it is not trained."""
    engine = ScriptedEngine(tiny_tokenizer, lambda request: "5")
    engine.cut = True
    traj: Any = await multi_turn(max_turns=2).arun_episode(engine, QUESTION)
    assert "5<|im_end|>\n<|im_start|>user\n" in tiny_tokenizer.decode(traj["input_ids"][0])
    assert tiny_tokenizer.decode(traj["input_ids"][0][traj["loss_mask"][0] == 1]) == "55"
    assert traj["truncated"].tolist() == [1]
    assert traj["rewards"].tolist() == [0.0]


async def test_a_full_context_ends_the_conversation(
    real_engine: RemoteInfEngine, multi_turn: Callable[..., Any]
) -> None:
    """A first prompt that does not fit is an error."""
    assert real_engine.context_length == 2048
    gconfig = GenerationHyperparameters(max_new_tokens=600)
    workflow = multi_turn(gconfig=gconfig, max_turns=100, reflection_message="no " * 100)

    async def ask(letters: int) -> Any:
        messages = [{"role": "user", "content": "x" * letters}]
        return await workflow.arun_episode(real_engine, {"messages": messages, "answer": "\0"})

    traj = await ask(900)
    assert 1 <= int(traj["turn_ids"].max()) < 99
    assert traj["rewards"].tolist() == [0.0]
    assert traj["input_ids"].shape[1] <= 2048
    with pytest.raises(EngineError, match="prompt is too long: 2067 tokens > 2048"):
        await ask(2048)


def test_a_template_that_rewrites_history_is_refused(tiny_tokenizer: Any) -> None:
    """With such a template, earlier turns in the prompt would not be the tokens that were
    sampled."""
    rewriting = copy.deepcopy(tiny_tokenizer)
    rewriting.chat_template = "{{ messages | length }} messages: {{ messages[-1]['content'] }}"
    with pytest.raises(ValueError, match="renders history anew"):
        MultiTurnWorkflow(exact, GenerationHyperparameters(), rewriting)


async def test_the_noise_of_a_request_depends_on_the_episode_and_on_nothing_else(
    multi_turn: Callable[..., Any], tiny_tokenizer: Any
) -> None:
    """Each turn of each member of each task has its own seed, the same in two equal runs."""

    async def seeds(task_id: int, seed: int | None) -> set[int | None]:
        engine = ScriptedEngine(tiny_tokenizer)
        workflow_context.set(WorkflowContext(task_id=task_id, seed=seed))
        await GroupedRolloutWorkflow(multi_turn(max_turns=2), 3).arun_episode(engine, QUESTION)
        found = [getattr(request.gconfig, "seed", None) for request in engine.requests]
        assert len(found) == 6
        return set(found)

    first, again = await seeds(0, 1), await seeds(0, 1)
    assert first == again
    assert len(first | await seeds(1, 1) | await seeds(0, 2)) == 18
    assert await seeds(0, None) == {None}
