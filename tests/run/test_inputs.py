"""A user's modules can have the names of modules in this project's packages. If a user's module has
the name of a module in this project's top folder, the run logs a warning. If the first sample of
the data does not fit the workflow, the run does not start."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from run.load import ConfigError, load

from run.inputs import load_inputs
from workflow import RLVRWorkflow

AGENT = """
{imports}

class Agent:
    async def run(self, data, **extra_kwargs):
        return 1.0
"""


def dry_run(folder: Path, model: Path, names: list[str]) -> subprocess.CompletedProcess[str]:
    """Write an agent and modules with the given names into `folder`, and run train.py --dry-run.
    The agent imports the modules from `folder`."""
    for name in names:
        (folder / f"{name}.py").write_text("MINE = True\n")
    imports = "\n".join(f"import {name}; assert {name}.MINE" for name in names)
    (folder / "my_agent.py").write_text(AGENT.format(imports=imports))
    (folder / "mine.jsonl").write_text('{"question": "?"}\n')
    words = [
        f"model_path={model}",
        "workflow=my_agent.Agent",
        f"train_dataset.path={folder}/mine.jsonl",
    ]
    command = [sys.executable, "train.py", "--config", "configs/own.yaml", "--dry-run", *words]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )


def test_own_modules_beside_an_agent(tmp_path: Path, tiny_model_dir: Path) -> None:
    """A user's modules may have the same names as modules in this project's packages, for example
    tools, messages or config."""
    done = dry_run(
        tmp_path, tiny_model_dir, ["tools", "messages", "client", "config", "server", "actor"]
    )
    assert done.returncode == 0, done.stderr
    assert "rename" not in done.stderr


@pytest.mark.parametrize("name", ["cache", "engine"])
def test_a_name_of_the_seven_is_taken(tmp_path: Path, tiny_model_dir: Path, name: str) -> None:
    """If a user's module has the name of one of the seven modules in this project's top folder,
    Python imports the project's module instead. A warning asks the user to rename the user's
    module."""
    done = dry_run(tmp_path, tiny_model_dir, [name])
    assert done.returncode == 2
    assert f"`import {name}` finds this project's module first; rename your module" in done.stderr


def needs_an_answer(
    prompt: str, completion: str, prompt_ids: list, completion_ids: list, answer: str, **_: Any
) -> int:
    return int(answer in completion)


class NarrowAgent:
    """An agent whose `run` does not accept the arguments that every agent gets."""

    async def run(self, data: dict[str, Any], base_url: str) -> float:
        return 1.0


MESSAGES = [{"role": "user", "content": "hello"}]
LONG = [{"role": "user", "content": "hello " * 10_000}]


@pytest.mark.parametrize(
    ("workflow", "sample", "problem"),
    [
        (NarrowAgent, {"messages": MESSAGES}, "unexpected keyword argument 'api_key'"),
        (RLVRWorkflow, {"messages": MESSAGES}, "missing a required argument: 'answer'"),
        (RLVRWorkflow, {"answer": "1"}, "KeyError: 'messages'"),
        (RLVRWorkflow, {"messages": LONG, "answer": "1"}, "tokens, and the context of the model"),
        (RLVRWorkflow, {"messages": MESSAGES, "answer": "1"}, None),
    ],
)
def test_the_first_sample_is_tried_before_anything_starts(
    workflow: type,
    sample: dict[str, Any],
    problem: str | None,
    tmp_path: Path,
    tiny_model_dir: Path,
) -> None:
    """Before a run starts a process, it checks the first sample. The run ends with a one-line error
    if the sample lacks a column or if the prompt is longer than the model's context. The run ends
    with a one-line error if the agent's `run` has wrong parameters."""
    data = tmp_path / "mine.jsonl"
    data.write_text(json.dumps(sample) + "\n")
    words = ["task=null", f"model_path={tiny_model_dir}", f"train_dataset.path={data}"]
    kwargs = {"reward_fn": "test_inputs.needs_an_answer"} if workflow is RLVRWorkflow else {}
    config = load([*words, "actor.kl_ctl=0"])
    if problem is None:
        assert load_inputs(config, workflow, kwargs).dataset == [sample]
        return
    with pytest.raises(ConfigError, match=problem) as caught:
        load_inputs(config, workflow, kwargs)
    remedy = (
        "must have the parameters (self, data, **extra_kwargs)"
        if workflow is NarrowAgent
        else "correct the columns"
    )
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)
