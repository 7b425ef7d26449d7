"""What a run writes and prints: metrics.jsonl, trace.json, tokens/, the live table. No concept of its own.

One object a step goes to metrics.jsonl. trace.json is a Chrome trace (open it in a trace viewer): one row per
prompt group from start to finish, one row for the trainer's phases. tokens/{step}.safetensors holds, for every
sequence that was trained on, its ids, versions, the three log-probabilities, mask, turn and reward.
"""

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor

from run.config import TrainConfig

# The columns of the live table: metric, heading, format.
COLUMNS = (
    ("step", "step", "{:d}"),
    ("reward", "reward", "{:.3f}"),
    ("success", "success", "{:.3f}"),
    ("staleness_mean", "staleness", "{:.2f}"),
    ("staleness_max", "max", "{:.0f}"),
    ("mixed_version_share", "mixed", "{:.0%}"),
    ("entropy", "entropy", "{:.3f}"),
    ("clip_frac", "clipped", "{:.1%}"),
    ("logp_mismatch", "mismatch", "{:.0e}"),
    ("rollout_wait_s", "wait s", "{:.2f}"),
    ("train_s", "train s", "{:.2f}"),
    ("sync_s", "sync s", "{:.2f}"),
)
COUNTS = ("accepted", "rejected", "failed", "dropped", "failed_members")  # prompt groups, members of groups
ROWS = 12  # steps that the live table shows
TRAINER, ROLLOUT = 1, 2  # rows of the trace
END = "{}]\n"  # of its file


class Trace:
    """A Chrome trace, written as it happens; a killed run leaves a readable file (the format allows a missing end).

    A run that goes on appends to its trace; without a path nothing is kept. Times are microseconds since 1970.
    """

    def __init__(self, path: Path | None) -> None:
        self.epoch = time.monotonic_ns() - time.time_ns()  # 1970, by the monotonic clock
        self.lock = threading.Lock()
        if path and path.exists():  # without its end, and without a line that was being written
            os.truncate(path, path.read_bytes().removesuffix(END.encode()).rfind(b"\n") + 1)
        self.file = Path(path or os.devnull).open("a", buffering=1)  # noqa: SIM115
        if not self.file.tell():
            self.file.write("[\n")
        for tid, name in ((TRAINER, "trainer"), (ROLLOUT, "rollout")):
            self._write({"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}})

    def event(self, name: str, task_id: int) -> None:
        """submit, start, finish, accept, reject ... of one task; start and finish open and close its span."""
        phase = {"start": "b", "finish": "e"}.get(name, "n")
        title = f"group {task_id}" if phase in "be" else name
        self._write({"ph": phase, "cat": "rollout", "id": f"{os.getpid()}:{task_id}", "name": title, "tid": ROLLOUT})

    @contextmanager
    def span(self, name: str, seconds: dict[str, float]) -> Iterator[None]:
        """Time a phase of the trainer; `seconds[name + "_s"]` is what it took."""
        begin = time.monotonic_ns()
        yield
        duration = time.monotonic_ns() - begin
        seconds[f"{name}_s"] = duration / 1e9
        stamp = {"ts": (begin - self.epoch) / 1e3, "dur": duration / 1e3}
        self._write({"ph": "X", "cat": "trainer", "name": name, "tid": TRAINER, **stamp})

    def _write(self, record: dict[str, Any]) -> None:
        record = {"pid": 1, "ts": (time.monotonic_ns() - self.epoch) / 1e3, **record}
        with self.lock:
            if not self.file.closed:
                self.file.write(json.dumps(record) + ",\n")

    def close(self) -> None:
        with self.lock:
            self.file.write(END)
            self.file.close()


def describe_batch(batch: dict[str, Tensor], version: int) -> dict[str, float]:
    """What a batch says about itself at the moment it is consumed by a trainer that holds `version`.

    staleness = version - versions over the trained tokens; mixed_version_share = the share of trained rows with
    tokens of more than one version; tokens = the number of trained tokens;
    untrained = sampled ones that are not trained.
    """
    mask = batch["loss_mask"].bool()  # (B, T)
    versions = batch["versions"]
    newest = versions.masked_fill(~mask, -1).amax(1)  # (B,)
    oldest = versions.masked_fill(~mask, torch.iinfo(versions.dtype).max).amin(1)
    trained = mask.any(1)
    lag = (version - versions[mask]).float()
    return {
        "reward": batch["rewards"].mean().item(),
        "staleness_mean": lag.mean().item() if len(lag) else 0.0,
        "staleness_max": lag.max().item() if len(lag) else 0.0,
        "mixed_version_share": (newest > oldest)[trained].float().mean().item() if trained.any() else 0.0,
        "truncated": int(batch["truncated"].sum()),
        "regenerated": int(batch["regenerated"].sum()),
        "side_conversations": int(batch["side_conversations"].sum()),
        "tokens": int(mask.sum()),
        "untrained": int((batch["turn_ids"] >= 0).sum()) - int(mask.sum()),
    }


class Logger:
    """Everything a run reports goes through `log`, once a step. `live`: the table, to be entered while it is shown."""

    def __init__(self, config: TrainConfig, executor: Any) -> None:
        self.config, self.executor = config, executor
        self.path = config.run_dir / "metrics.jsonl"  # of a run that goes on, the steps before
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.history: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.start = time.monotonic() - (self.history[-1]["wall_s"] if self.history else 0.0)
        self.counts = asdict(executor.stats)  # when the last step was logged
        self.lag_counts = Counter[int]()  # trained tokens by version lag
        console = Console()
        self.live = Live(console=console, auto_refresh=False) if config.logger.live and console.is_terminal else None

    def log(self, batch: dict[str, Tensor], metrics: dict[str, Any]) -> None:
        """Write one step: its tokens, and its line of metrics.jsonl with what was counted since the one before; show
        the line, and now and then a sample."""
        step, config, counts = metrics["step"], self.config.logger, asdict(self.executor.stats)
        lags = metrics["version"] - batch["versions"][batch["loss_mask"].bool()]
        self.lag_counts.update(lags.tolist())
        if config.tokens_interval and step % config.tokens_interval == 0:
            path = self.config.run_dir / "tokens" / f"{step:05d}.safetensors"
            path.parent.mkdir(exist_ok=True)
            save_file({k: v.contiguous() for k, v in batch.items()}, path)

        said_before = any(line.get("side_conversations") for line in self.history)
        if metrics["side_conversations"] and not said_before:
            row = batch["side_conversations"].argmax()
            text = self.executor.tokenizer.decode(batch["input_ids"][row][batch["attention_mask"][row]])
            print(
                f"{metrics['side_conversations']} side conversations were left out of training in step {step}, such as: "
                f"{' '.join(text.split())[:160]!r}. The key rollout.openai.side_conversations holds their patterns; "
                "an empty list trains every call",
                flush=True,
            )

        metrics |= {key: counts[key] - self.counts[key] for key in COUNTS}
        metrics["wall_s"] = time.monotonic() - self.start
        self.counts = counts
        self.history.append(metrics)
        with self.path.open("a") as file:
            file.write(json.dumps(metrics) + "\n")

        if self.live:
            self.live.update(self._table(), refresh=True)
        else:
            print("  ".join(f"{title} {text.format(metrics[key])}" for key, title, text in COLUMNS), flush=True)
        if config.sample_interval and (step - 1) % config.sample_interval == 0:
            ids = batch["input_ids"][0][batch["attention_mask"][0]]
            said = self.executor.tokenizer.decode(ids, skip_special_tokens=False)
            print(f"a sample, reward {batch['rewards'][0]:.2f}: {' '.join(said.split())}", flush=True)

    def _table(self) -> Table:
        steps = f"{len(self.history)} of {self.config.max_steps} steps"
        table = Table(box=None, header_style="bold", pad_edge=False, caption=steps, caption_justify="left")
        for _, title, _ in COLUMNS:
            table.add_column(title, justify="right")
        for metrics in self.history[-ROWS:]:
            table.add_row(*(text.format(metrics[key]) for key, _, text in COLUMNS))
        return table
