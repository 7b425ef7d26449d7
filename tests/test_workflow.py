"""These tests check which results a workflow may return, how the results of a group's members are merged, and how
resolve_workflow makes workflows."""

import asyncio
import copy
import sys
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scripted import ScriptedEngine

from cache import InteractionWithTokenLogpReward
from engine import EngineError, RemoteInfEngine
from inference.io_struct import GenerationHyperparameters, ModelRequest, ModelResponse
from rollout.reward import AsyncRewardWrapper
from rollout.trajectory import check_trajectory_format, complete
from workflow import (
    GroupedRolloutWorkflow,
    MultiTurnWorkflow,
    OpenAIProxyWorkflow,
    RLVRWorkflow,
    RolloutWorkflow,
    WorkflowContext,
    import_string,
    resolve_workflow,
    to_tensors,
    workflow_context,
)

QUESTION = {"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}
PROXY = {"proxy_addr": "http://127.0.0.1:1", "admin_key": "k"}


def row(*ids: int, rewards: float = 0.0) -> dict[str, torch.Tensor]:
    """Return the smallest valid trajectory of a workflow: token ids, an attention mask and a reward."""
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
    """A workflow whose episode returns the value of `function` for the episode's workflow context and sample."""

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


async def exact(
    prompt: str, completion: str, prompt_ids: list, completion_ids: list, answer: str, **_: Any
) -> bool:
    return completion.startswith(answer)


# ---------------------------------------------------------------- the documents' examples


class MyWorkflow(RolloutWorkflow):
    """The example from AReaL's page Rollout Workflow, section "Implementing Custom Workflows"."""

    def __init__(self, tokenizer: Any, gconfig: GenerationHyperparameters, **kwargs: Any) -> None:
        self.tokenizer = tokenizer
        self.gconfig = gconfig

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        input_ids = self.tokenizer.encode(data["prompt"])
        req = ModelRequest(
            rid=uuid.uuid4().hex,
            input_ids=input_ids,
            gconfig=self.gconfig,
            tokenizer=self.tokenizer,
        )
        resp = await engine.agenerate(req)
        reward = self.compute_reward(resp, data)
        if reward < 0:
            return None
        return self.build_tensor_dict(resp, reward)

    def compute_reward(self, resp: ModelResponse, data: dict[str, Any]) -> float:
        return data["reward"]

    def build_tensor_dict(self, resp: ModelResponse, reward: float) -> dict[str, torch.Tensor]:
        seq = resp.input_tokens + resp.output_tokens
        return {
            "input_ids": torch.tensor([seq], dtype=torch.int32),
            "attention_mask": torch.ones(1, len(seq), dtype=torch.bool),
            "loss_mask": torch.tensor(
                [[0] * resp.input_len + [1] * resp.output_len], dtype=torch.int32
            ),
            "logprobs": torch.tensor(
                [[0.0] * resp.input_len + resp.output_logprobs], dtype=torch.float32
            ),
            "rewards": torch.tensor([reward], dtype=torch.float32),
            "versions": torch.tensor(
                [[-1] * resp.input_len + resp.output_versions], dtype=torch.int32
            ),
        }


class CustomWorkflow(RolloutWorkflow):
    """The example from appendix A.2 of the write-up on AReaL."""

    def __init__(self, gconfig: GenerationHyperparameters, tokenizer: Any) -> None:
        self.gconfig = gconfig
        self.tokenizer = tokenizer
        self.async_reward_fn = AsyncRewardWrapper(self.reward_fn)

    @staticmethod
    async def reward_fn(prompt: str, completion: str, messages: list, answer: str) -> float:
        return float(completion.startswith(answer))

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        input_ids = self.tokenizer.apply_chat_template(
            data["messages"], tokenize=True, add_generation_prompt=True, return_dict=False
        )
        req = ModelRequest(
            rid=uuid.uuid4().hex,
            input_ids=input_ids,
            gconfig=self.gconfig,
            tokenizer=self.tokenizer,
        )
        resp = await engine.agenerate(req)
        prompt_str = self.tokenizer.decode(resp.input_tokens)
        completion_str = self.tokenizer.decode(resp.output_tokens)
        reward = await self.async_reward_fn(prompt_str, completion_str, **data)
        seq = resp.input_tokens + resp.output_tokens
        logprobs = [0.0] * resp.input_len + resp.output_logprobs
        loss_mask = [0] * resp.input_len + [1] * resp.output_len
        versions = [-1] * resp.input_len + resp.output_versions
        return {
            "input_ids": torch.tensor(seq, dtype=torch.int32).unsqueeze(0),
            "logprobs": torch.tensor(logprobs, dtype=torch.float32).unsqueeze(0),
            "loss_mask": torch.tensor(loss_mask, dtype=torch.int32).unsqueeze(0),
            "versions": torch.tensor(versions, dtype=torch.int32).unsqueeze(0),
            "rewards": torch.tensor(reward, dtype=torch.float32).unsqueeze(0),
            "attention_mask": torch.ones(len(seq), dtype=torch.bool).unsqueeze(0),
        }


@pytest.mark.anyio
async def test_the_custom_workflow_of_rollout_workflow_runs(tiny_tokenizer: Any) -> None:
    """The class MyWorkflow from AReaL's documentation runs unchanged, and resolve_workflow makes an instance of it."""
    engine, defaults = (
        ScriptedEngine(tiny_tokenizer),
        {"tokenizer": tiny_tokenizer, "gconfig": GenerationHyperparameters()},
    )
    workflow = resolve_workflow(MyWorkflow, {"unused": 1}, defaults=defaults)
    traj: Any = await workflow.arun_episode(engine, {"prompt": "hi", "reward": 1.0})
    check_trajectory_format(traj)
    assert tiny_tokenizer.decode(traj["input_ids"][0]) == "hiok<|im_end|>"
    assert await workflow.arun_episode(engine, {"prompt": "hi", "reward": -1.0}) is None


@pytest.mark.anyio
async def test_the_custom_workflow_of_the_write_up_runs(tiny_tokenizer: Any) -> None:
    """The workflow from the write-up on AReaL runs with the additional argument `return_dict=False`, which newer
    versions of transformers need."""
    engine = ScriptedEngine(tiny_tokenizer, lambda request: "4")
    engine.version = 3
    workflow = CustomWorkflow(GenerationHyperparameters(), tiny_tokenizer)
    traj: Any = await workflow.arun_episode(engine, QUESTION)
    check_trajectory_format(traj)
    assert traj["rewards"].tolist() == [1.0]
    assert traj["versions"][0][-2:].tolist() == [3, 3]


# ---------------------------------------------------------------- episodes of one turn and of several turns


@pytest.mark.anyio
async def test_rlvr_is_one_row_with_the_sampling_it_was_made_with(tiny_tokenizer: Any) -> None:
    """RLVRWorkflow returns one row, and each generated token of the row has the request's temperature and the episode's
    reward."""
    engine = ScriptedEngine(tiny_tokenizer, lambda request: "4")
    workflow = RLVRWorkflow(
        exact, GenerationHyperparameters(temperature=0.5, n_samples=4), tiny_tokenizer
    )
    traj = complete(await workflow.arun_episode(engine, QUESTION), task_id=0)  # type: ignore[arg-type]
    assert engine.requests[0].gconfig.n_samples == 1
    assert (
        tiny_tokenizer.decode(traj["input_ids"][0])
        == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>"
    )
    assert traj["loss_mask"][0].tolist() == [0] * (traj["input_ids"].shape[1] - 2) + [1, 1]
    assert traj["temperatures"][0][-3:].tolist() == [1.0, 0.5, 0.5]
    assert traj["turn_rewards"][0][-3:].tolist() == [0.0, 1.0, 1.0]


@pytest.mark.anyio
async def test_sampling_that_training_cannot_reproduce_stays_out_of_the_loss(
    tiny_tokenizer: Any,
) -> None:
    """A turn that was sampled with top_p is returned but not trained, because its logprobs are not the policy's
    logprobs."""
    workflow = RLVRWorkflow(exact, GenerationHyperparameters(top_p=0.9), tiny_tokenizer)
    traj: Any = await workflow.arun_episode(ScriptedEngine(tiny_tokenizer), QUESTION)
    assert traj["loss_mask"].sum() == 0
    assert traj["turn_ids"].max() == 0


@pytest.mark.anyio
async def test_multi_turn_asks_again_until_the_reward_is_positive(tiny_tokenizer: Any) -> None:
    """MultiTurnWorkflow generates answers until an answer gets a positive reward. The reward of the k-th answer is
    multiplied by turn_discount^(k-1)."""
    answers = iter(["5", "3", "4"])
    engine = ScriptedEngine(tiny_tokenizer, lambda request: next(answers))
    workflow = MultiTurnWorkflow(
        exact,
        GenerationHyperparameters(),
        tiny_tokenizer,
        max_turns=5,
        turn_discount=0.5,
        reflection_message="no",
    )
    traj = complete(await workflow.arun_episode(engine, QUESTION), task_id=0)  # type: ignore[arg-type]
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


@pytest.mark.anyio
async def test_a_turn_cut_by_length_is_closed_in_the_prompt_and_counted(
    tiny_tokenizer: Any,
) -> None:
    """If the token limit cuts off a turn, the next prompt contains an untrained end-of-turn token, and `truncated` is
    1."""
    engine = ScriptedEngine(tiny_tokenizer, lambda request: "5")
    engine.cut = True
    workflow = MultiTurnWorkflow(exact, GenerationHyperparameters(), tiny_tokenizer, max_turns=2)
    traj: Any = await workflow.arun_episode(engine, QUESTION)
    assert "5<|im_end|>\n<|im_start|>user\n" in tiny_tokenizer.decode(traj["input_ids"][0])
    assert tiny_tokenizer.decode(traj["input_ids"][0][traj["loss_mask"][0] == 1]) == "55"
    assert traj["truncated"].tolist() == [1]
    assert traj["rewards"].tolist() == [0.0]


@pytest.mark.anyio
async def test_a_full_context_ends_the_conversation(
    real_engine: RemoteInfEngine, tiny_tokenizer: Any
) -> None:
    """A conversation ends when the model's context is full. A first prompt that does not fit into the context raises an
    error."""
    assert real_engine.context_length == 2048
    gconfig = GenerationHyperparameters(max_new_tokens=600, seed=1)
    never = {"answer": "\0"}
    workflow = MultiTurnWorkflow(
        exact, gconfig, tiny_tokenizer, max_turns=100, reflection_message="no " * 100
    )
    traj: Any = await workflow.arun_episode(
        real_engine, never | {"messages": [{"role": "user", "content": "x" * 900}]}
    )
    turns = int(traj["turn_ids"].max()) + 1
    assert 2 <= turns < 100
    assert traj["rewards"].tolist() == [0.0]
    assert traj["input_ids"].shape[1] <= 2048
    with pytest.raises(EngineError, match="prompt is too long: 2067 tokens > 2048"):
        await workflow.arun_episode(
            real_engine, never | {"messages": [{"role": "user", "content": "x" * 2048}]}
        )


def test_a_template_that_rewrites_history_is_refused(tiny_tokenizer: Any) -> None:
    """MultiTurnWorkflow refuses a chat template that renders earlier messages differently in a later turn."""
    rewriting = copy.deepcopy(tiny_tokenizer)
    rewriting.chat_template = (
        "{{ messages | length }} messages, the last: {{ messages[-1]['content'] }}"
    )
    with pytest.raises(ValueError, match="renders history anew"):
        MultiTurnWorkflow(exact, GenerationHyperparameters(), rewriting)


@pytest.mark.anyio
async def test_the_noise_of_a_request_depends_on_the_episode_and_on_nothing_else(
    tiny_tokenizer: Any,
) -> None:
    """Each turn of each member of each task has its own sampling seed. Two runs with the same run seed have the same
    sampling seeds."""

    async def seeds(task_id: int, run_seed: int | None) -> list[int | None]:
        engine = ScriptedEngine(tiny_tokenizer)
        gconfig = GenerationHyperparameters(seed=run_seed)
        workflow_context.set(WorkflowContext(task_id=task_id))
        workflow = MultiTurnWorkflow(exact, gconfig, tiny_tokenizer, max_turns=2)
        await GroupedRolloutWorkflow(workflow, 3).arun_episode(engine, QUESTION)
        return [request.gconfig.seed for request in engine.requests]

    first, again = await seeds(0, run_seed=1), await seeds(0, run_seed=1)
    assert sorted(first) == sorted(again)  # type: ignore[type-var]
    everything = {*first, *await seeds(1, run_seed=1), *await seeds(0, run_seed=2)}
    assert len(everything) == 18
    assert await seeds(0, run_seed=None) == [None] * 6


# ---------------------------------------------------------------- groups


@pytest.mark.anyio
async def test_one_failing_member_does_not_take_its_group_along(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If one of four members raises an exception, the failure is counted and logged. The group contains the rows of the
    three successful members in the order of their indices. All four episodes count as ended."""
    failed: list[int] = []

    async def on_failures(count: int) -> None:
        failed.append(count)

    def member(context: WorkflowContext, data: dict) -> Any:
        if context.sample_idx == 1:
            raise ConnectionError("the tool is down")
        return row(*range(context.sample_idx + 1), rewards=context.sample_idx)

    ended: list[None] = []
    workflow = GroupedRolloutWorkflow(Function(member), 4, on_failures, lambda: ended.append(None))
    traj: Any = await workflow.arun_episode(None, {})
    assert traj["rewards"].tolist() == [0.0, 2.0, 3.0]
    assert traj["attention_mask"].sum(1).tolist() == [1, 3, 4]
    assert failed == [1]
    assert len(ended) == 4
    assert "the tool is down" in caplog.text


@pytest.mark.anyio
@pytest.mark.parametrize(
    "bad", [1.0, {}, [1], row(), {"input_ids": torch.ones(3), "attention_mask": torch.ones(3)}]
)
async def test_a_member_that_returns_no_trajectory_is_a_failed_member(
    bad: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """If a member returns something that is not a trajectory, the member counts as failed. The log says why the member
    failed, and the group keeps its other members."""

    def member(context: WorkflowContext, data: dict) -> Any:
        return [row(1, 2), bad, row(3)][context.sample_idx]

    traj: Any = await GroupedRolloutWorkflow(Function(member), 3).arun_episode(None, {})
    assert traj["input_ids"].tolist() == [[1, 2], [3, 0]]
    assert "ValueError: " in caplog.text
    assert "traj" in caplog.text


def test_a_member_that_exits_is_a_failed_member(caplog: pytest.LogCaptureFixture) -> None:
    """If a member calls sys.exit(), the member counts as failed, and the other members and the event loop continue."""

    def member(context: WorkflowContext, data: dict) -> Any:
        return sys.exit(3) if context.sample_idx == 1 else row(1)

    async def episode() -> Any:
        return await GroupedRolloutWorkflow(Function(member), 3).arun_episode(None, {})

    assert (
        len(asyncio.run(episode())["rewards"]) == 2
    )  # an uncaught SystemExit would end asyncio.run
    assert "RuntimeError: the episode called sys.exit(3)" in caplog.text


@pytest.mark.anyio
async def test_a_ragged_group_is_still_one_group() -> None:
    """Each row contains its group's id. If a group loses a member, the group's id still shows which rows belong
    together."""

    def member(context: WorkflowContext, data: dict) -> Any:
        return None if context.sample_idx == data["loses"] else row(1, 2)

    workflow = GroupedRolloutWorkflow(Function(member), 3)
    groups = [
        complete(await workflow.arun_episode(None, {"loses": loses}), task_id)  # type: ignore[arg-type]
        for task_id, loses in enumerate([1, None])
    ]
    assert [group["group_ids"].tolist() for group in groups] == [[0, 0], [1, 1, 1]]


@pytest.mark.anyio
async def test_a_group_of_nothing_is_rejected_and_a_group_of_errors_raises_the_first() -> None:
    """If some members of a group raise an exception and all others return None, the group is rejected. If every member
    raises an exception, the group raises the first of these exceptions.

    GroupedRolloutWorkflow calls on_failures if some members raised an exception and others did not.
    """
    failed: list[int] = []

    async def on_failures(count: int) -> None:
        failed.append(count)

    def errors(context: WorkflowContext, data: dict) -> Any:
        if context.sample_idx in data["none"]:
            return None
        raise ValueError(f"member {context.sample_idx}")

    workflow = GroupedRolloutWorkflow(Function(errors), 3, on_failures)
    assert await workflow.arun_episode(None, {"none": [0, 1, 2]}) is None
    assert await workflow.arun_episode(None, {"none": [2]}) is None
    with pytest.raises(ValueError, match="member 0"):
        await workflow.arun_episode(None, {"none": []})
    assert failed == [2]


@pytest.mark.anyio
async def test_members_run_at_the_same_time_and_each_in_its_own_context() -> None:
    """Members run concurrently. Each member reads its own index and the task's id from its workflow context."""
    barrier = asyncio.Barrier(4)

    class Meets(RolloutWorkflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            await barrier.wait()
            context = workflow_context.get()
            assert (context.task_id, context.is_eval) == (9, True)
            return row(1, rewards=context.sample_idx)

    workflow_context.set(WorkflowContext(is_eval=True, task_id=9))
    traj: Any = await GroupedRolloutWorkflow(Meets(), 4).arun_episode(None, {})
    assert traj["rewards"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert workflow_context.get().sample_idx == 0


@pytest.mark.anyio
async def test_members_do_not_write_into_each_others_sample() -> None:
    """Each member gets its own copy of the sample, so one member's changes to the sample do not reach the other
    members."""

    def talk(context: WorkflowContext, data: dict) -> Any:
        data["messages"].append("hello")
        return row(*range(len(data["messages"])))

    sample: dict[str, list] = {"messages": []}
    traj: Any = await GroupedRolloutWorkflow(Function(talk), 3).arun_episode(None, sample)
    assert traj["input_ids"].shape == (3, 1)
    assert sample == {"messages": []}


@pytest.mark.anyio
async def test_groups_of_interactions_are_merged_and_mixed_groups_become_rows() -> None:
    """The interactions of all members are merged. If one member returned tensors, the interactions of the other members
    are converted to tensors. If two members have the same interaction id, an error is raised."""

    def calls(context: WorkflowContext, data: dict) -> Any:
        name = data["names"][context.sample_idx]
        return {name: interaction(3, 4)} if name else interaction(7).to_tensor_dict()

    workflow = GroupedRolloutWorkflow(Function(calls), 2)
    merged: Any = await workflow.arun_episode(None, {"names": ["a", "b"]})
    assert list(merged) == ["a", "b"]
    merged["c"] = interaction(5)
    merged["c"].parent = merged["b"]
    assert to_tensors(merged)["parents"].tolist() == [-1, -1, 1], (
        "parents are not the row indices of the parents"
    )
    mixed: Any = await workflow.arun_episode(None, {"names": ["a", None]})
    assert mixed["input_ids"].tolist() == [[1, 2, 3, 4], [1, 2, 7, 0]]
    with pytest.raises(ValueError, match="same interaction ids"):
        await workflow.arun_episode(None, {"names": ["a", "a"]})


@pytest.mark.anyio
async def test_the_last_row_of_an_episode_is_of_the_conversation_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An episode's result lists the rows of side conversations first, so its last row always belongs to the main
    conversation."""

    class Client:
        rewarded_count, session_url, api_key = 1, "", ""

        def __init__(self, *args: Any, grant: bool, sampling: dict) -> None: ...

        async def __aenter__(self) -> None: ...

        async def __aexit__(self, *args: Any) -> None: ...

        async def finish(self, *args: Any, **options: Any) -> dict[str, Any]:
            turns = {
                "first": interaction(3, reward=0.5),
                "last": interaction(3, reward=0.0),
                "title": interaction(3),
            }
            turns["title"].reward = None
            return turns

    monkeypatch.setattr("workflow.OpenAIProxyClient", Client)
    episode: Any = await resolve_workflow(Agent, proxy=PROXY).arun_episode(None, {})
    assert list(episode) == ["title", "first", "last"]


# ---------------------------------------------------------------- resolution


def test_a_workflow_is_found_in_whatever_the_user_gives() -> None:
    """resolve_workflow turns a workflow, a class with arguments, an import path, or an agent into a
    RolloutWorkflow."""
    instance = Function(lambda context, data: None)
    assert resolve_workflow(instance) is instance
    made: Any = resolve_workflow(Function, {"function": len})
    assert made.function is len
    by_name: Any = resolve_workflow(f"{__name__}.Function", {"function": len})
    assert isinstance(by_name, Function)
    for agent, kwargs in (
        (Agent, {"answer": 0.5}),
        (f"{__name__}.Agent", {"answer": 0.5}),
        (Agent(0.5), None),
    ):
        wrapped: Any = resolve_workflow(agent, kwargs, proxy=PROXY)
        assert isinstance(wrapped, OpenAIProxyWorkflow)
        assert wrapped.agent.answer == 0.5
    grouped: Any = resolve_workflow(instance, group_size=4)
    assert (grouped.workflow, grouped.group_size) == (instance, 4)


def test_a_workflows_class_gets_the_runs_sampling_and_tokenizer() -> None:
    """If a workflow class has the __init__ parameters gconfig or tokenizer, it gets the run's values, unless the user
    sets them."""
    defaults = {"gconfig": GenerationHyperparameters(top_k=5), "tokenizer": "tokenizer"}
    made: Any = resolve_workflow(
        RLVRWorkflow, {"reward_fn": f"{__name__}.exact"}, defaults=defaults
    )
    assert (made.gconfig.top_k, made.tokenizer) == (5, "tokenizer")
    assert made.async_reward_fn.reward_fn is exact
    own: Any = resolve_workflow(
        RLVRWorkflow, {"reward_fn": exact, "tokenizer": "mine"}, defaults=defaults
    )
    assert own.tokenizer == "mine"
    assert isinstance(
        resolve_workflow(Agent, {}, proxy=PROXY, defaults=defaults), OpenAIProxyWorkflow
    )


@pytest.mark.parametrize(
    ("error", "message", "workflow", "kwargs", "proxy"),
    [
        (ImportError, "there is no module 'nowhere'", "nowhere.Workflow", {}, None),
        (ImportError, "module 'workflow' has no 'Nothing'", "workflow.Nothing", {}, None),
        (ImportError, "a path like 'my_module.MyClass' is needed", "Workflow", {}, None),
        (TypeError, "missing a required argument: 'function'.*workflow_kwargs", Function, {}, None),
        (
            TypeError,
            "unexpected keyword argument 'typo'",
            Function,
            {"function": len, "typo": 1},
            None,
        ),
        (TypeError, "neither a RolloutWorkflow nor an agent", dict, {}, None),
        (
            TypeError,
            "SyncAgent.* is neither .* nor an agent, which has `async def run",
            SyncAgent,
            {},
            PROXY,
        ),
        (ValueError, "Agent is an agent, and agents need a proxy", Agent, {}, None),
        (ValueError, "is an object already; give its class", Agent(), {"answer": 1.0}, PROXY),
    ],
)
def test_what_cannot_be_resolved_says_what_is_missing(
    error: type[Exception], message: str, workflow: Any, kwargs: dict, proxy: Any
) -> None:
    """If a workflow's configuration is wrong, resolve_workflow raises an error that says what is wrong."""
    with pytest.raises(error, match=message):
        resolve_workflow(workflow, kwargs, proxy=proxy)


def test_a_missing_import_inside_a_module_is_not_taken_for_a_missing_module(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the user's module imports a missing package, the error names the missing package and not the user's
    module."""
    (tmp_path / "needs_something.py").write_text("import something_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'something_not_installed'$"):
        import_string("needs_something.Workflow")
    assert "needs_something" not in sys.modules


def test_the_scope_of_statistics_follows_the_context() -> None:
    """stat_scope() returns "rollout" in training and "eval-rollout" in evaluation."""
    workflow_context.set(WorkflowContext())
    assert workflow_context.stat_scope() == "rollout"
    workflow_context.set(WorkflowContext(is_eval=True, task_id=3))
    assert workflow_context.stat_scope() == "eval-rollout"
    assert workflow_context.get().task_id == 3
    workflow_context.set(WorkflowContext())


def test_an_episode_keeps_to_one_proxy() -> None:
    """If there are several proxies, each episode uses one proxy, and every proxy gets the same number of episodes."""
    workflow = OpenAIProxyWorkflow(Agent(), ("http://a", "http://b", "http://c"), "k")
    chosen = []
    for task in range(3):
        for member in range(3):
            workflow_context.set(WorkflowContext(task_id=task, sample_idx=member))
            chosen.append(workflow._choose_proxy())
            assert workflow._choose_proxy() == chosen[-1]
    workflow_context.set(WorkflowContext())
    assert sorted(chosen) == sorted(3 * ["http://a", "http://b", "http://c"])
