"""Evaluation: episodes on the validation prompts, under a sampling of its own."""

import json
from itertools import combinations
from pathlib import Path

import pytest
from runs import command, finish

from rollout.evaluate import describe, pass_at, wilson
from run.config import load
from run.inputs import Inputs, find_model, load_inputs


def test_an_evaluation_without_a_reward_has_none() -> None:
    """Without rewards there is no mean reward, because 0 would be a result."""
    found = describe([None, None], Inputs(None, [], [{}, {}], None, None, None))
    assert (found["eval_reward"], found["eval_success"], found["eval_rejected"]) == (None, 0.0, 2)


def test_pass_at_k_is_the_share_of_k_answers_with_a_right_one() -> None:
    """The share is over all choices of k from six answers, two of which are right."""
    for k in range(1, 7):
        chosen = [*combinations([1, 1, 0, 0, 0, 0], k)]
        assert pass_at(k, 6, 2) == pytest.approx(sum(map(max, chosen)) / len(chosen))


def test_several_episodes_of_a_prompt() -> None:
    """Answers of prompts a, b, c, in this order, twice: a is right once, b twice, and c's second
    episode has failed. The interval counts three prompts, and not six independent episodes."""
    inputs = Inputs(None, [], [{}, {}, {}], None, None, None)
    found = describe([1.0, 1.0, 0.0, 0.0, 1.0, None], inputs)
    assert (found["eval_success"], found["eval_pass_at_2"]) == (0.5, pytest.approx(2 / 3))
    assert (found["eval_success_low"], found["eval_success_high"]) == wilson(0.5, 3)
    assert (found["eval_reward"], found["eval_reward_sem"]) == (0.5, pytest.approx(1 / 12**0.5))
    assert (found["eval_episodes"], found["eval_rejected"]) == (6, 1)


def test_a_workflow_is_evaluated_with_another_sampling(tiny_model_dir: Path) -> None:
    """Training and evaluation have instances of their own. eval_gconfig overrides gconfig."""
    words = ["--config", "maze", f"model_path={tiny_model_dir}", "evaluator.interval=1"]
    words += ["callbacks=[]", "gconfig.temperature=0.9", "eval_gconfig.greedy=true"]
    config, _ = load([*words, "eval_gconfig.top_k=3"])
    find_model(config)
    inputs = load_inputs(config)
    trained, evaluated = inputs.workflow.gconfig, inputs.eval_workflow.gconfig
    assert (trained.greedy, trained.top_k) == (False, -1)
    assert evaluated == trained.new(greedy=True, top_k=3, n_samples=1)


@pytest.mark.runs
def test_evaluation_by_itself(tmp_path: Path) -> None:
    """mode=eval runs the validation prompts and writes eval.json."""
    done = finish(command(tmp_path, "mode=eval"))
    found = json.loads((tmp_path / "e/t/eval.json").read_text())
    assert (found["eval_episodes"], found["eval_rejected"]) == (6, 0)
    assert f"eval_reward {found['eval_reward']:.4g}" in done.stdout
    assert list((tmp_path / "e/t").glob("eval-rollout/0/*.jsonl"))
