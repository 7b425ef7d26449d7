"""What a run starts from, and the one line that says what is wrong with it."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from runs import command, finish

from run.config import ConfigError, load
from run.inputs import Inputs, find_model, load_inputs, make_dataloader

AGENT = """
import openai
{imports}

class Agent:
    async def run(self, data, **extra_kwargs):
        client = openai.AsyncOpenAI(**extra_kwargs)
        messages = [{{"role": "user", "content": data["question"]}}]
        await client.chat.completions.create(model="default", messages=messages)
        return 1.0
"""
OWN = ["task=null", "callbacks=[]", "actor.kl_ctl=0"]


class Agent:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        return 1.0


def test_own_data_and_an_own_agent(tmp_path: Path, tiny_model_dir: Path) -> None:
    """A JSONL file is a dataset: one sample a line, empty lines aside."""
    data = tmp_path / "mine.jsonl"
    data.write_text('{"question": "?"}\n\n{"question": "!"}\n')
    words = [*OWN, f"model_path={tiny_model_dir}", f"train_dataset.path={data}"]
    config, _ = load([*words, "workflow=test_inputs.Agent"])
    find_model(config)
    inputs = load_inputs(config)
    assert inputs.dataset == [{"question": "?"}, {"question": "!"}]
    assert inputs.validation == []
    assert type(inputs.workflow).__name__ == "Agent"


@pytest.mark.parametrize(
    ("line", "words", "says"),
    [
        ("", [], "the dataset is empty"),
        ("{", [], "train_dataset.path"),
        ("{}", ["workflow=null"], "no workflow: set workflow=module.Class"),
        ("{}", ["workflow_kwargs.typo=1"], "typo"),
        ("{}", ["evaluator.interval=1"], "no data: set valid_dataset.path"),
        ("{}", ["tokenizer_path=/nowhere"], "tokenizer_path=/nowhere"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(
    tmp_path: Path, tiny_model_dir: Path, line: str, words: list[str], says: str
) -> None:
    """The line begins with the key."""
    data = tmp_path / "mine.jsonl"
    data.write_text(line)
    given = [*OWN, f"model_path={tiny_model_dir}", f"train_dataset.path={data}"]
    config, _ = load([*given, "workflow=test_inputs.Agent", *words])
    find_model(config)
    with pytest.raises(ConfigError) as error:
        load_inputs(config)
    assert says in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_the_order_of_the_data_is_the_seeds() -> None:
    """A restarted run draws the same prompts again; a short dataset is repeated."""
    data = [{"n": n} for n in range(5)]

    def drawn(*words: str) -> list[list[int]]:
        loader = make_dataloader(load([*words, "train_dataset.batch_size=7"])[0], data)
        return [[sample["n"] for sample in batch] for batch in islice(loader, 1)]

    assert drawn() == drawn()
    assert drawn() != drawn("seed=2")
    assert {len(batch) for batch in drawn()} == {7}
    assert drawn("train_dataset.shuffle=false") == [[0, 1, 2, 3, 4, 0, 1]]


def test_success_is_the_tasks() -> None:
    """Without a task, every reward above 0 is a success."""

    class Task:
        @staticmethod
        def success(reward: float) -> bool:
            return reward > 0.5

    rewards = [0.0, 0.1, 1.0, 1.0]
    assert Inputs(None, [], [], None, None, None).success(rewards) == 0.75
    assert Inputs(Task, [], [], None, None, None).success(rewards) == 0.5


@pytest.mark.runs
def test_own_modules_beside_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent's modules may be called like ours, as long as they are not in our top folder."""
    names = ["tools", "messages", "client", "config", "server", "actor"]
    for name in names:
        (tmp_path / f"{name}.py").write_text("MINE = True\n")
    imports = "\n".join(f"import {name}; assert {name}.MINE" for name in names)
    (tmp_path / "my_agent.py").write_text(AGENT.format(imports=imports))
    (tmp_path / "mine.jsonl").write_text(json.dumps({"question": "?"}) + "\n")
    monkeypatch.setattr("runs.WITH_TEST_MODULES", {"PYTHONPATH": str(tmp_path)})
    words = ["mode=eval", "workflow=my_agent.Agent", f"valid_dataset.path={tmp_path}/mine.jsonl"]
    done = finish(command(tmp_path, *words))
    assert "eval_reward 1" in done.stdout
