"""Load the inputs of a run: the task module, the data, the workflow, the tokenizer and the base model.

A task is a Python module that defines `dataset` and `WORKFLOW`. The task module may also define `make_model`,
`WORKFLOW_KWARGS`, `success`, `summary` and `prepare`. `prepare` turns a line of the data into a sample. Examples of
tasks are tasks/guess.py and tasks/gsm8k.py. Configuration keys can replace the model, the data and the workflow of a
task.

The run loads all inputs before it starts a server or a proxy, and before it writes a file into the run's folder. If the
configuration is wrong, the run prints a message of one line and ends.
"""

import hashlib
import importlib
import inspect
import json
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.utils import enable_progress_bars
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoTokenizer

import workflow as workflows
from run.keys import OpenAIConfig, TrainConfig
from run.launch import ROOT
from run.load import ConfigError, one_line

logger = logging.getLogger("pocket_areal.inputs")


@dataclass
class Inputs:
    """The task module (or None), the prompts, the tokenizer, and the workflow or agent that processes each prompt."""

    task: Any
    dataset: list[dict]
    validation: list[dict]
    tokenizer: Any
    workflow: Any
    evaluated: Any = (
        None  # a second instance of the workflow, for evaluation in a separate event loop
    )
    success_above: float = 0.0  # the configuration's success_above

    def success(self, rewards: list[float]) -> float:
        """Return the share of rewards that the task's `success` accepts.

        If the task has no `success`, rewards above `success_above` count as successes.
        """
        judge = getattr(self.task, "success", lambda reward: reward > self.success_above)
        return sum(map(judge, rewards)) / len(rewards)


def load_inputs(
    config: TrainConfig, workflow: Any = None, workflow_kwargs: dict[str, Any] | None = None
) -> Inputs:
    """Load all inputs, and make the task's base model if the model is missing. Raises ConfigError if an input cannot be
    loaded.

    If the argument `workflow` is not None, it replaces the configured workflow. The argument `workflow` may have any
    form that `resolve_workflow` accepts.
    """
    warn_of_namesakes(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    with one_line(f"task={config.task}"):
        task = importlib.import_module(config.task) if config.task else None
    if config.success_above and hasattr(task, "success"):
        raise ConfigError(
            f"success_above has no effect: the task {config.task} says what success is; omit the key"
        )
    dataset = load_dataset(config.train_dataset.path, task, "train")
    validation = load_dataset(config.valid_dataset.path or config.train_dataset.path, task, "valid")
    if accept := config.should_accept_fn:
        with one_line(f"should_accept_fn={accept}"):
            if not callable(workflows.import_string(accept)):
                raise TypeError("not a function; give a function as module.function")
    if isinstance(config.workflow, str):
        with one_line(f"workflow={config.workflow}"):
            workflows.import_string(config.workflow)
    prepare_model(config, task)
    with one_line(f"tokenizer_path={config.tokenizer_path}"):
        tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_path)
    used, evaluated = (
        load_workflow(
            config,
            task,
            {"gconfig": gconfig, "tokenizer": tokenizer},
            workflow,
            workflow_kwargs or {},
        )
        for gconfig in (config.gconfig, config.evaluation_gconfig)
    )
    try_sample(config, (validation if config.mode == "eval" else dataset)[0], tokenizer, used)
    return Inputs(task, dataset, validation, tokenizer, used, evaluated, config.success_above)


def try_sample(config: TrainConfig, sample: dict[str, Any], tokenizer: Any, workflow: Any) -> None:
    """Raise ConfigError if an episode of `sample` is certain to fail. The check does not run the user's code.

    The agent's `run`, or the reward function, must accept the arguments that it gets in an episode. If the workflow
    sends the messages of the sample, these messages must fit into the model's context.
    """
    with one_line(
        "the first sample of the data does not fit: correct the columns, or the code that reads them"
    ):
        if type(workflow) in (workflows.RLVRWorkflow, workflows.MultiTurnWorkflow):
            inspect.signature(workflow.async_reward_fn.reward_fn).bind("", "", [], [], **sample)
            tokens = len(tokenizer.apply_chat_template(sample["messages"], return_dict=False))
            shape = AutoConfig.from_pretrained(str(config.model_path)).get_text_config()
            if tokens >= (context := getattr(shape, "max_position_embeddings", tokens + 1)):
                raise ValueError(
                    f"the prompt has {tokens} tokens, and the context of the model {context}"
                )
    if not isinstance(workflow, workflows.RolloutWorkflow):
        with one_line(
            f"{type(workflow).__name__}.run must have the parameters (self, data, **extra_kwargs)"
        ):
            inspect.signature(workflow.run).bind(sample, base_url="", api_key="", http_client=None)


def warn_of_namesakes(folders: list[str]) -> None:
    """Log a warning for each module in the user's `folders` that has the same name as a module of this project."""

    def modules(folder: Path) -> set[str]:
        return {
            path.stem
            for path in folder.glob("*")
            if path.suffix == ".py" or (path / "__init__.py").exists()
        }

    for folder in {Path(name).resolve() for name in folders if name} - {ROOT}:
        for name in sorted(modules(folder) & modules(ROOT)):
            logger.warning(
                "%s: `import %s` finds this project's module first; rename your module",
                folder,
                name,
            )


def load_workflow(
    config: TrainConfig, task: Any, defaults: dict, workflow: Any, kwargs: dict[str, Any]
) -> Any:
    """Return the workflow or agent that runs every episode of the run. Raises ConfigError if there is no workflow. If
    `workflow` is None, return the workflow of the configuration, or of the task if the configuration has none.
    """
    if workflow is None:
        workflow, kwargs = config.workflow, {**config.workflow_kwargs, **kwargs}
    if workflow is None:
        workflow, kwargs = (
            getattr(task, "WORKFLOW", None),
            {**getattr(task, "WORKFLOW_KWARGS", {}), **kwargs},
        )
    if workflow is None:
        raise ConfigError(
            "no workflow: set workflow to module.Class, an agent with async run() or a RolloutWorkflow"
        )
    # The executor sets the proxy's address and key later.
    nowhere = {"proxy_addr": "", "admin_key": "", "mode": config.rollout.openai.mode}
    with one_line(f"workflow={workflow}, workflow_kwargs={kwargs}"):
        resolved = workflows.resolve_workflow(workflow, kwargs, proxy=nowhere, defaults=defaults)
    if isinstance(resolved, workflows.OpenAIProxyWorkflow):
        return resolved.agent
    if config.rollout.openai != OpenAIConfig():
        raise ConfigError(
            "rollout.openai has no effect: the workflow is a RolloutWorkflow, not an agent; omit it"
        )
    return resolved


def load_dataset(path: str | None, task: Any, split: str) -> list[dict]:
    """Return the samples from a JSONL file, from a function named as "module.function", or from the task.

    Raises ConfigError if the samples cannot be read, or if there are no samples.
    """
    if path is None and not hasattr(task, "dataset"):
        raise ConfigError("no data: set train_dataset.path to a JSONL file or to module.function")
    where = path or task.__name__
    if where.endswith(".jsonl"):
        samples = read_jsonl(Path(where))
    elif "/" in where:
        raise ConfigError(
            f"the dataset {where}: the path of a .jsonl file, or module.function, is needed"
        )
    else:
        with one_line(f"the dataset of {where}"):
            samples = workflows.import_string(path)() if path else task.dataset(split)
    if not samples:
        raise ConfigError(f"no samples in {where}: the dataset is empty")
    if not hasattr(task, "prepare"):
        return samples
    prepared = []
    for number, sample in enumerate(samples, 1):
        with one_line(f"{where}, sample {number}, as {task.__name__} reads it"):
            prepared.append(task.prepare(sample))
    return prepared


def read_jsonl(path: Path) -> list[dict]:
    """Return the JSON objects of a file with one object per line. Raises ConfigError if a line is not a JSON object."""
    samples = []
    with one_line(f"no dataset at {path}; correct the dataset's path"):
        lines = (
            path.read_bytes().splitlines()
        )  # str.splitlines would also split at characters such as U+2028
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        with one_line(f"{path}, line {number}: not JSON"):
            samples.append(json.loads(line))
        if not isinstance(samples[-1], dict):
            raise ConfigError(
                f"{path}, line {number}: an object is needed, not {samples[-1]!r:.40}"
            )
    return samples


def make_dataloader(config: TrainConfig, dataset: Any) -> DataLoader:
    """Return a DataLoader whose batches are lists of prompts. The order of the prompts depends on the run's seed."""
    batch_size, shuffle = config.train_dataset.batch_size, config.train_dataset.shuffle
    generator = torch.Generator().manual_seed(config.seed)
    return DataLoader(dataset, batch_size, shuffle, generator=generator, collate_fn=list)


def prepare_model(config: TrainConfig, task: Any) -> None:
    """Set the keys model_path, tokenizer_path and ref.path. Fetch models from the hub, or make the task's base model.

    The base models of tasks are cached under .cache/, one for each seed. The name of a base model's folder contains a
    hash of the task's source files. If the source files change, a new base model is made. Raises ConfigError if there
    is no usable model.
    """
    if config.model_path is None:
        if not hasattr(task, "make_model"):
            raise ConfigError(
                "no model: set model_path to a Hugging Face folder, or task to a module that makes one"
            )
        sources = b"".join(
            file.read_bytes() for file in sorted(Path(task.__file__).parent.glob("*.py"))
        )
        path = (
            Path(".cache")
            / f"{config.task}-{config.seed}-{hashlib.blake2b(sources, digest_size=4).hexdigest()}"
        )
        if not path.is_dir():
            print(f"making the base model {path} (once)", flush=True)
            task.make_model(path, config.seed)
        config.model_path = str(path)
    config.model_path, config.model_revision = fetch(config.model_path, config.model_revision)
    folder = Path(config.model_path)
    if (
        not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
        or not (folder / "config.json").is_file()
    ):
        raise ConfigError(
            f"no model at model_path={folder}: config.json and *.safetensors or *.bin are needed there"
        )
    config.tokenizer_path = config.tokenizer_path or config.model_path
    if config.actor.kl_ctl > 0:
        config.ref.path, _ = fetch(config.ref.path or config.model_path)


def fetch(name: str, revision: str | None = None) -> tuple[str, str | None]:
    """Return a model's folder, and the model's revision on the hub.

    A model with a name like owner/model is fetched unless it is cached. The library huggingface_hub reads the
    environment variables HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE. Raises ConfigError if the fetch fails.
    """
    if Path(name).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return name, revision
    enable_progress_bars()
    remedy = "check the name, the network and HF_TOKEN; HF_HUB_OFFLINE=1 finds only models that are in HF_HOME"
    with one_line(
        f"model {name}: no such folder, and the hub does not give it ({remedy})", longest=300
    ):
        folder = snapshot_download(
            name, revision=revision, ignore_patterns=["*.pth", "*.gguf", "*.onnx", "*.h5"]
        )
    return folder, Path(folder).name
