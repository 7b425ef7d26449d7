"""What a run can do without. Each file here plugs in at one door; the core imports none of them.

Door 1, the key `callbacks`, names classes such as extras.doctor.Doctor. A run makes each as
`Class(config)` and calls those of these methods that it has, on every rank: on_start(run),
on_batch(batch) after the optimizer steps and before the push of the weights, which may return more
metrics, on_step(metrics) after the step's line of metrics.jsonl is written, and on_end(error). Door
2 are the engine's hooks, and door 3 are functions that a key names.

The helpers below read and write a run's folder for display. They never stop training: what cannot
be read is skipped, and what cannot be written is left out.
"""

import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

Record = dict[str, Any]


def read_records(path: Path) -> list[Record]:
    """The JSON objects of a file with one object a line; a trace's lines may end with a comma.

    A line that a kill has cut is skipped. No file, or no regular file (a pipe): no records.
    """
    records = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        with suppress(json.JSONDecodeError):
            records.append(json.loads(line.rstrip(", ")))
    return [record for record in records if isinstance(record, dict)]


def read_config(folder: Path) -> Any:
    """The recorded configuration as nested namespaces. An older run may lack keys of today."""
    path = folder / "config.yaml"
    keys = yaml.safe_load(path.read_text()) if path.is_file() else {}
    return json.loads(json.dumps(keys or {}), object_hook=lambda group: SimpleNamespace(**group))


def append_record(path: Path, record: Record) -> None:
    """Append one line. To open a pipe could wait for ever, and a disk may be full."""
    with suppress(OSError):
        if not path.is_fifo():
            with path.open("a") as file:
                file.write(json.dumps(record) + "\n")


def printable(text: str) -> str:
    """The text with its control characters written out: recorded text must not steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
