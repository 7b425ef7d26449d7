"""What a run is given: a task or its parts, the data, the workflow, the base model. No concept of its own.

A task is a module with make_model, dataset and WORKFLOW, and if it likes WORKFLOW_KWARGS, success and summary
(tasks/guess.py). Each part may instead be named by a configuration key. Everything is looked at before anything is
started or written, so that a mistake is one line.
"""

import hashlib
import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plumbing.config import ConfigError, TrainConfig
from workflow import import_string


@dataclass
class Inputs:
    """The task module (or None), its data, and the workflow that a prompt is given to."""

    task: Any
    dataset: list[dict]
    validation: list[dict]
    workflow: Any
    workflow_kwargs: dict[str, Any]

    def success(self, rewards: list[float]) -> float:
        """The share of rewards that the task calls a success; without a task's word, the positive ones."""
        judge = getattr(self.task, "success", lambda reward: reward > 0)
        return sum(map(judge, rewards)) / len(rewards)


def load_inputs(config: TrainConfig) -> Inputs:
    """Task, data and workflow as configured, and the base model made if need be. Raises ConfigError."""
    try:
        task = importlib.import_module(config.task) if config.task else None
        dataset = load_dataset(config.train_dataset.path, task, "train")
        validation = load_dataset(config.valid_dataset.path or config.train_dataset.path, task, "valid")
        workflow = import_string(config.workflow) if config.workflow else getattr(task, "WORKFLOW", None)
    except ImportError as error:
        raise ConfigError(str(error)) from error
    if workflow is None:
        raise ConfigError("no workflow: set workflow to module.Class, an agent with async run() or a RolloutWorkflow")
    prepare_model(config, task)
    kwargs = {**getattr(task, "WORKFLOW_KWARGS", {}), **config.workflow_kwargs}
    return Inputs(task, dataset, validation, workflow, kwargs)


def load_dataset(path: str | None, task: Any, split: str) -> list[dict]:
    """Samples from a JSONL file, from a "module.function", or from the task."""
    if path is None:
        if not hasattr(task, "dataset"):
            raise ConfigError("no data: set train_dataset.path to a JSONL file or to module.function")
        return task.dataset(split)
    if not path.endswith(".jsonl"):
        return import_string(path)()
    if not Path(path).is_file():
        raise ConfigError(f"no dataset at {path}")
    return [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]


def prepare_model(config: TrainConfig, task: Any) -> None:
    """Fill in model_path and tokenizer_path; the task's base model is made once a seed and kept under .cache/, as long
    as the task's folder stays as it is."""
    if config.model_path is None:
        if not hasattr(task, "make_model"):
            raise ConfigError(
                "no model: set model_path to a Hugging Face directory, or task to a module that makes one"
            )
        sources = b"".join(file.read_bytes() for file in sorted(Path(task.__file__).parent.glob("*.py")))
        path = Path(".cache") / f"{config.task}-{config.seed}-{hashlib.blake2b(sources, digest_size=4).hexdigest()}"
        if not path.is_dir():
            print(f"making the base model {path} (once)", flush=True)
            task.make_model(path, config.seed)
        config.model_path = str(path)
    if not (Path(config.model_path) / "config.json").is_file():
        raise ConfigError(
            f"no model at model_path={config.model_path}: a directory with config.json and weights is needed"
        )
    config.tokenizer_path = config.tokenizer_path or config.model_path
