"""An experiment tracker with the interface that wandb and trackio share. The functions `init`, `log` and `finish` each
add a line to the file tracked.jsonl in the folder of all runs."""

import json
from pathlib import Path
from typing import Any

CALLS = "tracked.jsonl"  # file in the folder `fileroot` of the run's configuration
path = Path()


def _write(*call: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(call) + "\n")


def init(project: str, name: str, config: dict[str, Any], resume: str) -> None:
    """Start a run."""
    global path
    path = Path(config["fileroot"]) / CALLS
    _write("init", project, name, resume, config)


def log(metrics: dict[str, Any], step: int) -> None:
    """Record the metrics of a step."""
    _write("log", step, metrics)


def finish() -> None:
    """End the run."""
    _write("finish")
