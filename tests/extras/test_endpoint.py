"""An agent is evaluated on any OpenAI endpoint: mode=eval evaluator.base_url=URL."""

import json
from pathlib import Path

import httpx
import pytest
from runs import command, finish

from extras.endpoint import evaluate_endpoint
from run.config import load
from run.inputs import Inputs
from run.start import begin


class Agent:
    async def run(self, data, **where):
        assert where["base_url"] == "http://nowhere/v1"
        if data["returns"] == "raises":
            raise ValueError("of an agent")
        return data["returns"]


def test_statistics_of_an_evaluation() -> None:
    """An agent's last reward counts. An exception or no reward counts as rejected."""
    returned = (1.0, {"first": 1.0, "last": 0.0}, "raises", None)
    config, _ = load(["mode=eval", "evaluator.base_url=http://nowhere/v1"])
    inputs = Inputs(None, [], [{"returns": x} for x in returned], None, None, Agent())
    found = evaluate_endpoint(config, inputs)
    low, high = found.pop("eval_success_low"), found.pop("eval_success_high")
    assert (low, high) == pytest.approx((0.0456, 0.6994), abs=1e-4)  # Wilson, 1 of 4
    means = {"eval_reward": 0.5, "eval_reward_sem": 0.5, "eval_success": 0.25}
    assert found == means | {"eval_episodes": 4, "eval_rejected": 2}


@pytest.mark.runs
def test_agents_are_evaluated_on_any_endpoint(tmp_path: Path, proxy) -> None:
    """Here the endpoint is a session of a proxy."""
    key = {"Authorization": f"Bearer {proxy.admin_key}"}
    httpx.post(f"{proxy.proxy_addr}/grant_capacity", headers=key)
    start = f"{proxy.proxy_addr}/rl/start_session"
    session = httpx.post(start, headers=key, json={"task_id": "t"}).json()["session_id"]
    finish(command(tmp_path, "mode=eval", f"evaluator.base_url={proxy.proxy_addr}/{session}/v1"))
    found = json.loads((tmp_path / "e/t/eval.json").read_text())
    assert (found["eval_episodes"], found["eval_rejected"]) == (6, 0)


def test_an_evaluation_that_nobody_answers_has_failed(tmp_path: Path, capsys) -> None:
    """The exit code says so, eval.json counts the rejected episodes, and the failure is shown."""
    words = command(tmp_path, "mode=eval", "evaluator.base_url=http://127.0.0.1:9/v1")
    with pytest.raises(SystemExit, match=r"^error: no episode of the evaluation has a reward$"):
        begin(words[words.index("train.py") + 1 :])  # Python prints this text, and exits with 1
    said = "failed 6 times: eval-rollout task 0 failed: APIConnectionError"
    assert said in capsys.readouterr().err
    assert json.loads((tmp_path / "e/t/eval.json").read_text())["eval_rejected"] == 6
