"""What a run starts from, and the one line that says what is wrong with it."""

import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from rollout.executor import cycle
from run.config import ConfigError, TrainConfig, load
from run.inputs import Inputs, find_model, load_inputs, make_dataloader

OWN = ["task=null", "callbacks=[]", "actor.kl_ctl=0"]


class Agent:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        return 1.0


def generated() -> Iterator[dict[str, str]]:
    yield {"question": "?"}


def quits() -> None:
    sys.exit("no data today")


def inputs_of(config: TrainConfig) -> Inputs:
    find_model(config)
    return load_inputs(config)


def test_own_data_and_an_own_agent(tmp_path: Path, tiny_model_dir: Path) -> None:
    """A JSONL file is a dataset, one sample a line, empty lines aside; so is a generator."""
    data = tmp_path / "mine.jsonl"
    data.write_text('{"question": "?"}\n\n{"question": "!"}\n')
    words = [*OWN, f"model_path={tiny_model_dir}", f"train_dataset.path={data}"]
    words += ["valid_dataset.path=test_inputs.generated", "evaluator.interval=1"]
    config, _ = load([*words, "workflow=test_inputs.Agent"])
    inputs = inputs_of(config)
    assert inputs.dataset == [{"question": "?"}, {"question": "!"}]
    assert inputs.validation == [{"question": "?"}]
    assert type(inputs.workflow).__name__ == "Agent"


@pytest.mark.parametrize(
    ("line", "words", "says"),
    [
        ("", [], "the dataset is empty"),
        ("", ["train_dataset.path=test_inputs.quits"], "SystemExit: no data today"),
        ('{"a": 1}\n\n {b\n', [], "double quotes: line 3 column 3"),
        ("\udcff", [], "mine.jsonl: UnicodeDecodeError"),
        ("{}", ["task=tasks.gsm8k"], "mine.jsonl: KeyError: 'question'"),
        ("{}", ["workflow=null"], "no workflow: set workflow=module.Class"),
        ("{}", ["workflow_kwargs.typo=1"], "typo"),
        ("{}", ["workflow=workflow.RLVRWorkflow", "workflow_kwargs.reward_fn=no.r"], "named 'no'"),
        ("{}", ["workflow=tasks.gsm8k.is_right"], "neither a RolloutWorkflow nor an agent"),
        ("{}", ["evaluator.interval=1"], "no data: set valid_dataset.path"),
        ("{}", ["tokenizer_path=/nowhere"], "tokenizer_path=/nowhere"),
        ("{}", ["model_path=/nowhere"], "no model at /nowhere"),
        ("{}", ["ref.path=/nowhere"], "no model at /nowhere"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(
    tmp_path: Path, tiny_model_dir: Path, line: str, words: list[str], says: str
) -> None:
    """The error is one line, which says what is wrong."""
    data = tmp_path / "mine.jsonl"
    data.write_text(line, errors="surrogateescape")
    given = [*OWN, f"model_path={tiny_model_dir}", f"train_dataset.path={data}"]
    config, _ = load([*given, "workflow=test_inputs.Agent", *words])
    with pytest.raises(ConfigError, match=rf"^.*{re.escape(says)}.*\Z"):
        inputs_of(config)


def test_the_order_of_the_data_is_the_seeds() -> None:
    """A restarted run draws the same prompts again. Each is drawn once per epoch, whether an epoch
    is shorter than a batch or no multiple of it."""
    data = [{"n": n} for n in range(5)]

    def drawn(*words: str, size: int = 7) -> list[int]:
        loader = make_dataloader(load([*words, f"train_dataset.batch_size={size}"])[0], data)
        return [sample["n"] for sample in islice(cycle(loader), 10)]

    assert drawn() == drawn() != drawn("seed=2")
    for size in (4, 7):
        assert sorted(drawn(size=size)[:5]) == [*range(5)]
        assert drawn("train_dataset.shuffle=false", size=size) == [*range(5), *range(5)]


def test_success_is_the_tasks() -> None:
    """Without a task, every reward above 0 is a success."""

    class Task:
        @staticmethod
        def success(reward: float) -> bool:
            return reward > 0.5

    rewards = [0.0, 0.1, 1.0, 1.0]
    assert Inputs(None, [], [], None, None, None).count_successes(rewards) == 3
    assert Inputs(Task, [], [], None, None, None).count_successes(rewards) == 2
