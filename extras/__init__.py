"""Optional parts of a run. The core imports a part only if a key or an option names it.

The key `callbacks` names classes such as extras.doctor.Doctor. A run creates each with
`Class(config)` and calls its methods on every rank. All methods are optional:

    hooks(run)          on rank 0 only; may return {class path of engine hooks: their arguments}
    on_start(run)
    on_batch(batch)     after the optimizer steps, before the weights are pushed; may return metrics
    on_step(metrics)    after the step's line is in metrics.jsonl; all ranks get this line
    on_end(error)       when the run ends; error is the exception that ended it, or None

The folder also has functions for other keys, such as `actor.loss`, and commands such as
extras.chat.

The helpers below read and write a run's files. They skip what they cannot read or write, so that
training continues.
"""

import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

Record = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    """Return the JSON objects of a file, one per line. A line that a kill cut off is skipped."""
    records = []
    for line in path.read_text(errors="replace").split("\n") if path.is_file() else []:
        with suppress(json.JSONDecodeError):
            records.append(json.loads(line.rstrip(", ")))  # lines of trace.json end with commas
    return [record for record in records if isinstance(record, dict)]


def read_config(folder: Path) -> Any:
    """Return a run's config.yaml as nested namespaces. The file of an old run may lack keys."""
    path = folder / "config.yaml"
    keys = {}
    if path.is_file():
        with suppress(yaml.YAMLError):
            keys = yaml.safe_load(path.read_text(errors="replace"))
    return json.loads(json.dumps(keys or {}), object_hook=lambda group: SimpleNamespace(**group))


def append_record(path: Path, record: Record) -> None:
    """Append one line, unless the disk is full. A pipe is skipped: opening it could block."""
    with suppress(OSError):
        if not path.is_fifo():
            with path.open("a") as file:
                file.write(json.dumps(record) + "\n")


def printable(text: str) -> str:
    """Return the text with control characters escaped, so that it cannot steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
