"""A conversation goes on until an answer has a positive reward, and becomes one row."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
from scripted import ScriptedEngine
from test_workflow import QUESTION, exact

from engine import EngineError, RemoteInfEngine
from extras.multi_turn import MultiTurnWorkflow
from inference.io_struct import GenerationHyperparameters
from rollout.trajectory import complete
from workflow import GroupedRolloutWorkflow, WorkflowContext, workflow_context

pytestmark = pytest.mark.anyio
Make = Callable[..., Any]


@pytest.fixture
def multi_turn(tiny_tokenizer: Any) -> Make:
    """multi_turn(**options) makes a MultiTurnWorkflow, which is right if it says the answer."""
    start = functools.partial(MultiTurnWorkflow, exact, tokenizer=tiny_tokenizer)
    return functools.partial(start, gconfig=GenerationHyperparameters())


async def test_multi_turn_asks_again_until_the_reward_is_positive(
    multi_turn: Make, tiny_tokenizer: Any
) -> None:
    """The k-th answer is worth turn_discount^(k-1) times its reward."""
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
    multi_turn: Make, tiny_tokenizer: Any
) -> None:
    """With an end-of-turn token that is not trained."""
    engine = ScriptedEngine(tiny_tokenizer, lambda request: "5")
    engine.cut = True
    traj: Any = await multi_turn(max_turns=2).arun_episode(engine, QUESTION)
    assert "5<|im_end|>\n<|im_start|>user\n" in tiny_tokenizer.decode(traj["input_ids"][0])
    assert tiny_tokenizer.decode(traj["input_ids"][0][traj["loss_mask"][0] == 1]) == "55"
    assert traj["truncated"].tolist() == [1]
    assert traj["rewards"].tolist() == [0.0]


async def test_a_full_context_ends_the_conversation(
    real_engine: RemoteInfEngine, multi_turn: Make
) -> None:
    """But a first prompt that does not fit is an error."""
    assert real_engine.context_length == 2048
    gconfig = GenerationHyperparameters(max_new_tokens=600)
    workflow = multi_turn(gconfig=gconfig, max_turns=100, reflection_message="no " * 100)

    async def ask(letters: int) -> Any:
        messages = [{"role": "user", "content": "x" * letters}]
        return await workflow.arun_episode(real_engine, {"messages": messages, "answer": "\0"})

    traj = await ask(900)
    turns = int(traj["turn_ids"].max()) + 1
    assert 2 <= turns < 100
    assert traj["rewards"].tolist() == [0.0]
    assert traj["input_ids"].shape[1] <= 2048
    with pytest.raises(EngineError, match="prompt is too long: 2067 tokens > 2048"):
        await ask(2048)


def test_a_template_that_rewrites_history_is_refused(tiny_tokenizer: Any) -> None:
    """Its earlier turns would not be the tokens that were sampled."""
    rewriting = copy.deepcopy(tiny_tokenizer)
    rewriting.chat_template = "{{ messages | length }} messages: {{ messages[-1]['content'] }}"
    with pytest.raises(ValueError, match="renders history anew"):
        MultiTurnWorkflow(exact, GenerationHyperparameters(), rewriting)


async def test_the_noise_of_a_request_depends_on_the_episode_and_on_nothing_else(
    multi_turn: Make, tiny_tokenizer: Any
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
