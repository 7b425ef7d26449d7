"""Evaluation: one episode per validation prompt, under a sampling of its own."""

import json
from pathlib import Path

import pytest
from runs import command, finish

from run.config import load
from run.evaluate import describe
from run.inputs import Inputs, find_model, load_inputs


def test_an_evaluation_without_a_reward_has_none() -> None:
    """It is not 0, which would be a result."""
    found = describe([None, None], Inputs(None, [], [], None, None, None))
    assert (found["eval_reward"], found["eval_success"], found["eval_rejected"]) == (None, 0.0, 2)


def test_a_workflow_is_evaluated_with_another_sampling(tiny_model_dir: Path) -> None:
    """Training and evaluation have instances of their own. eval_gconfig lies over gconfig."""
    words = ["--config", "maze", f"model_path={tiny_model_dir}", "evaluator.interval=1"]
    words += ["callbacks=[]", "gconfig.temperature=0.9", "eval_gconfig.greedy=true"]
    config, _ = load([*words, "eval_gconfig.top_k=3"])
    find_model(config)
    inputs = load_inputs(config)
    trained, evaluated = inputs.workflow.gconfig, inputs.evaluated.gconfig
    assert (trained.greedy, trained.top_k) == (False, -1)
    assert evaluated == trained.new(greedy=True, top_k=3)


@pytest.mark.runs
def test_evaluation_by_itself(tmp_path: Path) -> None:
    """mode=eval runs the validation prompts and writes eval.json."""
    done = finish(command(tmp_path, "mode=eval"))
    found = json.loads((tmp_path / "e/t/eval.json").read_text())
    assert (found["eval_episodes"], found["eval_rejected"]) == (6, 0)
    assert f"eval_reward {found['eval_reward']:.4g}" in done.stdout
    assert list((tmp_path / "e/t").glob("eval-rollout/0/*.jsonl"))
