"""What a run is given: a task or its parts, the data, the workflow, the base model. No concept of its own.

A task is a module with make_model, dataset and WORKFLOW, and if it likes WORKFLOW_KWARGS, prepare (which reads the
lines of a JSONL file), success and summary (tasks/guess.py, tasks/gsm8k.py). Each part may instead be named by a
configuration key. Everything is looked at before anything is started or written, functions named by their path
included, so that a mistake is one line.
"""

import hashlib
import importlib
import inspect
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
        workflow = config.workflow or getattr(task, "WORKFLOW", None)
        workflow = find(workflow, "workflow") if isinstance(workflow, str) else workflow
    except ImportError as error:
        raise ConfigError(str(error)) from error
    if workflow is None:
        raise ConfigError("no workflow: set workflow to module.Class, an agent with async run() or a RolloutWorkflow")
    defaults = {} if config.workflow else getattr(task, "WORKFLOW_KWARGS", {})
    kwargs = {**defaults, **config.workflow_kwargs}
    functions = {"should_accept_fn": config.should_accept_fn, "workflow_kwargs.reward_fn": kwargs.get("reward_fn")}
    for key, path in functions.items():
        if isinstance(path, str) and not callable(find(path, key)):
            raise ConfigError(f"{key}={path} is no function")
    if inspect.isclass(workflow):
        try:
            inspect.signature(workflow).bind_partial(**kwargs)
        except TypeError as error:
            raise ConfigError(f"workflow_kwargs: {workflow.__name__} takes other arguments: {error}") from error
    prepare_model(config, task)
    return Inputs(task, dataset, validation, workflow, kwargs)


def find(path: str, key: str) -> Any:
    """The object that `key` names as module.Name; ConfigError that says what is missing, or what its module raised."""
    try:
        return import_string(path)
    except Exception as error:  # whatever the top of a user's module does
        raise ConfigError(f"{key}={path}: {type(error).__name__}: {error}") from error


def load_dataset(path: str | None, task: Any, split: str) -> list[dict]:
    """Samples from a JSONL file, from a "module.function", or from the task."""
    if path is None:
        if not hasattr(task, "dataset"):
            raise ConfigError("no data: set train_dataset.path to a JSONL file or to module.function")
        samples = task.dataset(split)
    elif path.endswith(".jsonl"):
        samples = read_jsonl(Path(path))
    else:
        samples = find(path, "train_dataset.path")()
    if not samples:
        raise ConfigError(f"no samples in {path or task.__name__}: the dataset is empty")
    if not hasattr(task, "prepare"):
        return samples
    try:
        return [task.prepare(sample) for sample in samples]
    except KeyError as error:
        where = path or task.__name__
        number = next(k for k, sample in enumerate(samples, 1) if error.args[0] not in sample)
        raise ConfigError(f"{where}, sample {number}: no key {error} (task={task.__name__} needs it)") from error


def read_jsonl(path: Path) -> list[dict]:
    """One JSON object a line; ConfigError names the line that is none."""
    samples = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"no dataset at {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                samples.append(json.loads(line))
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: not JSON: {error}") from error
            if not isinstance(samples[-1], dict):
                raise ConfigError(f"{path}, line {number}: an object is needed, not {line.strip()[:40]!r}")
    return samples


def prepare_model(config: TrainConfig, task: Any) -> None:
    """Fill in model_path and tokenizer_path; the task's base model is made once a seed and kept under .cache/, as long
    as the task's folder stays as it is."""
    if config.model_path is None:
        if not hasattr(task, "make_model"):
            raise ConfigError("no model: set model_path to a Hugging Face folder, or task to a module that makes one")
        sources = b"".join(file.read_bytes() for file in sorted(Path(task.__file__).parent.glob("*.py")))
        path = Path(".cache") / f"{config.task}-{config.seed}-{hashlib.blake2b(sources, digest_size=4).hexdigest()}"
        if not path.is_dir():
            print(f"making the base model {path} (once)", flush=True)
            task.make_model(path, config.seed)
        config.model_path = str(path)
    if not (Path(config.model_path) / "config.json").is_file():
        raise ConfigError(
            f"no model at model_path={config.model_path}: a folder with config.json and weights is needed"
        )
    if not any(Path(config.model_path).glob("*.safetensors")) and not any(Path(config.model_path).glob("*.bin")):
        raise ConfigError(f"no weights in model_path={config.model_path}: *.safetensors or *.bin are needed")
    config.tokenizer_path = config.tokenizer_path or config.model_path
