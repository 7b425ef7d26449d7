"""Evaluation: one episode per validation prompt, under a sampling of its own."""

import json
from pathlib import Path

import httpx
import mode_agents
import pytest
from runs import command, finish

from run.config import load
from run.evaluate import describe, evaluate_endpoint
from run.inputs import Inputs, find_model, load_inputs


def inputs_of(agent: object, samples: list[dict]) -> Inputs:
    return Inputs(None, [], samples, None, None, agent)


def test_statistics_of_an_evaluation() -> None:
    """An agent's last reward counts. An exception or no reward counts as rejected."""

    class Agent:
        async def run(self, data, **where):
            if data["returns"] == "raises":
                raise ValueError("of an agent")
            return data["returns"]

    returned = (1.0, {"first": 1.0, "last": 0.0}, "raises", None)
    config, _ = load(["mode=eval", "evaluator.base_url=http://nowhere/v1"])
    found = evaluate_endpoint(config, inputs_of(Agent(), [{"returns": x} for x in returned]))
    assert found == {
        "eval_reward": 0.5,
        "eval_reward_sem": 0.5,
        "eval_success": 0.25,
        "eval_episodes": 4,
        "eval_rejected": 2,
    }


def test_an_evaluation_without_a_reward_has_none() -> None:
    """It is not 0, which would be a result."""
    found = describe([None, None], inputs_of(None, []))
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
def test_agents_are_evaluated_on_any_endpoint(tmp_path: Path, proxy) -> None:
    """evaluator.base_url may be any OpenAI endpoint; here it is a session of a proxy."""
    key = {"Authorization": f"Bearer {proxy.admin_key}"}
    httpx.post(f"{proxy.proxy_addr}/grant_capacity", headers=key)
    started = httpx.post(
        f"{proxy.proxy_addr}/rl/start_session", headers=key, json={"task_id": "t"}
    ).json()
    url = f"evaluator.base_url={proxy.proxy_addr}/{started['session_id']}/v1"
    finish(command(tmp_path, "mode=eval", url))
    found = json.loads((tmp_path / "e/t/eval.json").read_text())
    assert (found["eval_episodes"], found["eval_rejected"]) == (6, 0)


@pytest.mark.runs
def test_an_evaluation_that_nobody_answers_has_failed(tmp_path: Path) -> None:
    """The exit code says so, and eval.json counts the rejected episodes."""
    words = ["mode=eval", "evaluator.base_url=http://127.0.0.1:9/v1"]
    done = finish(command(tmp_path, *words), code=1)
    assert "no episode of the evaluation has a reward" in done.stderr
    assert json.loads((tmp_path / "e/t/eval.json").read_text())["eval_rejected"] == 6


def test_the_agent_of_the_tests_tells_its_endpoint() -> None:
    """An agent that leaves with an exception is one failed episode."""
    config, _ = load(["mode=eval", "evaluator.base_url=http://nowhere/v1"])
    samples = [{"then": "tells"}, {"then": "raises"}]
    found = evaluate_endpoint(config, inputs_of(mode_agents.Endpoint(), samples))
    assert (found["eval_episodes"], found["eval_rejected"]) == (2, 1)
