"""The recipe for GSM8K works from start to end on a CPU, with a tiny model and twelve problems.

A random model solves no problem, so most tests check what holds for any model.
"""

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT
from harness import HELLO, Harness, sdk
from runs import command, finish, metrics_of

from run.inputs import load_dataset
from tasks import gsm8k

DATA = "tests/data/gsm8k.jsonl"
SMALL = [
    *("gconfig.n_samples=2", "gconfig.max_new_tokens=12", "train_dataset.batch_size=3"),
    *("actor.dtype=float32", "server.max_total_tokens=16384", "evaluator.interval=3"),
    *("max_steps=3", "server.backend=tiny", "callbacks=[]", f"valid_dataset.path={DATA}"),
]


@pytest.fixture(autouse=True)
def without_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests use this project's own comparison of answers."""
    monkeypatch.setattr(gsm8k, "math_verify", None)


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("48 - 30 = 18, so \\boxed{18}<|im_end|>", "18", True),
        ("\\boxed{17} no, wait: \\boxed{18}", "18", True),
        ("\\boxed{18} of 48", "18", True),
        ("the answer is $1,250.", "1250", True),
        ("It is 18.0", "18", True),
        ("#### 2,750", "2750", True),
        ("It was 5, now it is -4", "-4", True),
        ("\\boxed{-4}", "4", False),
        ("\\boxed{}", "18", False),
        ("I do not know", "18", False),
        ("", "18", False),
        ("18 and then 19", "18", False),
        ("\\boxed{1e9}", "18", False),
        ("," * 50 + "." * 50, "18", False),
    ],
)
def test_only_the_final_answer_counts(completion: str, answer: str, right: bool) -> None:
    """A right number before the final answer earns nothing."""
    assert gsm8k.reward("", completion, [], [], answer=answer, messages=[]) == float(right)


def test_the_solutions_in_the_data_are_right() -> None:
    """Each problem's own solution earns the reward; that of another only if the answers agree."""
    rows = [json.loads(line) for line in (ROOT / DATA).read_text().splitlines()]
    samples = load_dataset(str(ROOT / DATA), gsm8k, "train")
    assert len(samples) == 12
    for k, (row, sample) in enumerate(zip(rows, samples)):
        assert gsm8k.is_right(row["answer"], sample["answer"])
        assert row["question"] in sample["messages"][0]["content"]
        other = samples[k - 1]["answer"] == sample["answer"]
        assert gsm8k.is_right(rows[k - 1]["answer"], sample["answer"]) == other


CHECK = """
import sys

def is_right(completion, answer):
    assert "pytest" not in sys.modules, "the event loop would stop"
    return eval(completion) == eval(answer)
"""


@pytest.mark.anyio
async def test_an_answer_that_computes_for_ever_stops_no_loop(
    start: Callable[..., Harness], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the answer 9^{9^{9^{9}}}, math-verify computes for minutes, and lets no other thread
    run. So a process checks the answers. Here the loop's clock ends the episode, which shows that
    the loop was not blocked."""
    (tmp_path / "check_by_value.py").write_text(CHECK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gsm8k, "is_right", importlib.import_module("check_by_value").is_right)
    harness = start("9**9**9**9")
    agent, data = gsm8k.MathAgent(timeout_seconds=1), {"messages": HELLO, "answer": "4"}
    async with sdk(harness, f"/{await harness.start()}/v1") as client:
        where = {"base_url": str(client.base_url), "api_key": client.api_key}
        with pytest.raises(TimeoutError, match="is_right took longer than 1 s"):
            await agent.run(data, http_client=client._client, **where)


def train(tmp_path: Path, model: Path, *words: str) -> list[dict]:
    recipe = ["--config", "gsm8k", f"model={model}", f"data={DATA}", *SMALL]
    finish(command(tmp_path, *recipe, *words))
    return metrics_of(tmp_path)


@pytest.mark.runs
def test_the_recipe(tmp_path: Path, tiny_model_dir: Path) -> None:
    """A step has three groups of two answers. The base model and the trained one answer all twelve
    problems twice, from the same prompts."""
    evaluated = ["eval_gconfig.n_samples=2", "callbacks=[extras.before_after.BeforeAfter]"]
    metrics = train(tmp_path, tiny_model_dir, *evaluated)
    assert sum(line["accepted"] for line in metrics) >= 9
    assert all(line["failed"] == 0 and 0 <= line["staleness_max"] <= 2 for line in metrics)
    asked = []
    for version, name in (("0", "eval_base"), ("3", "eval_trained")):
        files = [tmp_path / f"e/t/eval-rollout/{version}/{i}.jsonl" for i in range(24)]
        asked.append([json.loads(path.read_text())["prompt"] for path in files])
        found = json.loads((tmp_path / f"e/t/{name}.json").read_text())
        assert found["eval_episodes"] == 24
        assert found["eval_pass_at_2"] >= found["eval_success"]
    assert found.items() <= metrics[2].items()  # the trained model's
    assert asked[0] == asked[1]
    assert len({*asked[0]}) == 12
    first = next((tmp_path / "e/t").glob("rollout/*/*.jsonl")).read_text().splitlines()[0]
    assert "boxed" in json.loads(first)["prompt"]


@pytest.mark.runs
def test_the_agent_with_a_second_try(tmp_path: Path, tiny_model_dir: Path) -> None:
    """After a wrong answer the agent asks again, and both turns are in one row."""
    train(tmp_path, tiny_model_dir, "workflow=tasks.gsm8k.MathAgent", "evaluator.interval=0")
    files = (tmp_path / "e/t").glob("rollout/*/*.jsonl")
    dumps = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert dumps
    assert all("That is not right" in dump["prompt"] + dump["completion"] for dump in dumps)


@pytest.mark.runs
def test_own_data_and_an_own_reward(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A JSONL file and a reward function are named by keys."""
    prompts = ({"messages": [{"role": "user", "content": f"say {c}"}], "wanted": c} for c in "abcd")
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (tmp_path / "my_reward.py").write_text(
        "def length(prompt, completion, prompt_ids, completion_ids, wanted, **_):\n"
        "    assert f'say {wanted}' in prompt\n"
        "    return len(completion_ids) / 100\n"
    )
    monkeypatch.setitem(__import__("runs").WITH_TEST_MODULES, "PYTHONPATH", str(tmp_path))
    words = [f"model_path={tiny_model_dir}", f"train_dataset.path={tmp_path}/mine.jsonl"]
    words += ["workflow=workflow.RLVRWorkflow", "workflow_kwargs.reward_fn=my_reward.length"]
    words += ["gconfig.n_samples=2", "gconfig.max_new_tokens=8", "train_dataset.batch_size=2"]
    words += ["actor.dtype=float32", "max_steps=2", "callbacks=[]", "server.backend=tiny"]
    finish(command(tmp_path, "--config", "own", *words))
    assert all(0 < line["reward"] <= 0.08 for line in metrics_of(tmp_path))
