"""Write and print the results of a run: metrics.jsonl, trace.json, the token files and the live table.

The file metrics.jsonl gets one JSON object per training step (docs/metrics.md explains every metric). The file
trace.json is a Chrome trace for a trace viewer. The trace has two tracks. The track "rollout" shows every prompt group
from start to finish, with the group's rewards and versions. The track "trainer" shows the phases of the trainer and the
weight updates.

The file tokens/{step}.safetensors contains the batch of a step: token ids, versions, log-probabilities under the
behaviour, proximal and current policy, advantages, loss mask, turns, rewards and parents. The file's metadata contains
the texts of the tokens, so that a reader of the file needs no tokenizer.
"""

import importlib
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor

from run.doctor import Doctor
from run.keys import TrainConfig
from run.recover import discard
from run.replay import compare
from run.report import read_records, write_report
from run.terminal import terminal

# The columns of the live table: metric, heading, format. A narrow terminal shows only the first columns.
COLUMNS = (
    ("step", "step", "{:d}"),
    ("reward", "reward", "{:.3f}"),
    ("success", "success", "{:.3f}"),
    ("staleness_mean", "stale", "{:.2f}"),
    ("staleness_max", "max", "{:.0f}"),
    ("step_s", "time s", "{:.1f}"),
    ("rejected", "rejected", "{:d}"),
    ("failed", "failed", "{:d}"),
    ("failed_members", "members", "{:d}"),
    ("rollout_wait_s", "wait s", "{:.1f}"),
    ("mixed_version_share", "mixed", "{:.0%}"),
    ("entropy", "entropy", "{:.3f}"),
    ("clip_frac", "clipped", "{:.1%}"),
    ("logp_mismatch", "mismatch", "{:.0e}"),
    ("train_s", "train s", "{:.2f}"),
    ("sync_s", "sync s", "{:.2f}"),
)
# The executor counts groups under the first four names of COUNTS, and group members under the last name.
COUNTS = ("accepted", "rejected", "failed", "dropped", "failed_members")
NOTICES = {  # for each metric, the notice that is printed when the metric is above 0 for the first time
    "side_conversations": "side conversation, which is left out of training (rollout.openai.side_conversations)",
    "unstored": "call with `store: false`, which is trained if rollout.openai.store is ignore",
    "placeholders": "image or file, in whose place the model reads a text",
}
ROWS = 12  # number of steps that the live table shows
TRAINER, ROLLOUT = 1, 2  # ids of the two tracks in the trace
REPORT_SHARE = (
    0.02  # a report is skipped if the earlier reports took more than this share of the run's time
)
END = b"\n]\n"  # the last bytes of every trace file


def as_text(metrics: dict[str, Any], key: str, text: str) -> str:
    """Return a metric as text. A `logp_mismatch` of exactly 0 means that no token was compared, so its text is "-"."""
    return "-" if key == "logp_mismatch" and not metrics[key] else text.format(metrics[key])


class Trace:
    """Writes a Chrome trace file during the run. Times are microseconds since 1970.

    The file is valid JSON after each record, so a run that is killed leaves valid JSON. Each record overwrites the
    closing bracket of the file and writes a new closing bracket. A restarted run keeps all earlier records and appends
    new records. If the path is None, no trace is written.
    """

    def __init__(self, path: Path | None) -> None:
        self.phase = "", time.monotonic()  # the trainer's current phase, and when the phase began
        self.epoch = time.monotonic_ns() - time.time_ns()  # monotonic time minus Unix time, in ns
        self.lock = threading.Lock()
        earlier = read_records(path) if path else []
        self.file = Path(path or os.devnull).open("wb", buffering=0)  # noqa: SIM115
        self.size = self.file.write(b"[")  # number of bytes of the file without END
        for record in earlier:
            self._write(record)
        for tid, name in ((TRAINER, "trainer"), (ROLLOUT, "rollout")):
            self._write({"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}})

    def event(self, name: str, task_id: int, **args: Any) -> None:
        """Record an event of a prompt group, such as "accept". `args` are details of the event.

        A trace viewer draws each group as a bar from the event "start" to the event "finish". Every bar has the name
        "group", because a trace viewer draws bars with equal names in one track.
        """
        phase = {"start": "b", "finish": "e"}.get(name, "n")
        record = {"ph": phase, "cat": "rollout", "id": f"{os.getpid()}:{task_id}", "tid": ROLLOUT}
        self._write(
            {**record, "name": name if phase == "n" else "group", "args": {"task": task_id, **args}}
        )

    @contextmanager
    def span(self, name: str, seconds: dict[str, float] | None = None) -> Iterator[None]:
        """Record the `with` block as a phase of the trainer, and write its duration to `seconds[name + "_s"]`."""
        begin, self.phase = time.monotonic_ns(), (name, time.monotonic())
        try:
            yield
        finally:
            duration = time.monotonic_ns() - begin
            stamp = {"ts": (begin - self.epoch) / 1e3, "dur": duration / 1e3}
            self._write({"ph": "X", "cat": "trainer", "name": name, "tid": TRAINER, **stamp})
        if seconds is not None:
            seconds[f"{name}_s"] = duration / 1e9

    def mark(self, name: str, **args: Any) -> None:
        """Record an event without a duration, such as "weights" when the servers have new weights, or "end" when the
        run fails."""
        self._write(
            {"ph": "i", "s": "g", "cat": "trainer", "name": name, "tid": TRAINER, "args": args}
        )

    def _write(self, record: dict[str, Any]) -> None:
        """Write one record of the trace. If the record has no time "ts", use the current time."""
        record = {"pid": 1, "ts": (time.monotonic_ns() - self.epoch) / 1e3, **record}
        with self.lock:
            if not self.file.closed:
                line = (b",\n" if self.size > 1 else b"\n") + json.dumps(record).encode()
                os.pwrite(self.file.fileno(), line + END, self.size)
                self.size += len(line)

    def close(self) -> None:
        """Close the file of the trace. Records that come after `close` are ignored."""
        with self.lock:
            self.file.close()


def describe_batch(batch: dict[str, Tensor], version: int) -> dict[str, Any]:
    """Compute the metrics of a batch before the training step. The trainer's weights have version `version`.

    The staleness of a trained token is `version` minus the token's version. A row is mixed if its trained tokens have
    more than one version. An untrained token is a token that the model sampled and that the loss excludes.
    """
    mask = batch["loss_mask"].bool()  # (B, T)
    versions = batch["versions"]
    newest = versions.masked_fill(~mask, -1).amax(1)  # (B,)
    oldest = versions.masked_fill(~mask, torch.iinfo(versions.dtype).max).amin(1)
    trained = mask.any(1)
    lag = version - versions[mask]  # (M,) the lags of the M trained tokens
    return {
        "rows": len(mask),
        "reward": batch["rewards"].mean().item(),
        "reward_std": batch["rewards"].std(correction=0).item(),
        "staleness_mean": lag.float().mean().item() if len(lag) else 0.0,
        "staleness_max": float(lag.max()) if len(lag) else 0.0,
        "lag_counts": torch.bincount(lag.clamp(min=0)).tolist(),
        "mixed_version_share": (newest > oldest)[trained].float().mean().item()
        if trained.any()
        else 0.0,
        **{
            name: int(batch[name].sum())
            for name in ("truncated", "regenerated", "masked", *NOTICES)
        },
        "tokens": int(mask.sum()),
        "untrained": int((batch["turn_ids"] >= 0).sum()) - int(mask.sum()),
    }


def no_signal_share(batch: dict[str, Tensor]) -> float:
    """Return the share of prompt groups whose advantages all lie between -0.01 and 0.01. An advantage between -0.01 and
    0.01 is a rounding error of (R - mean) / std."""
    signal = batch["advantages"].abs().amax(1) > 1e-2  # (B,)
    groups = batch["group_ids"]
    return 1 - len(groups[signal].unique()) / len(groups.unique())


def baseline_bias(batch: dict[str, Tensor]) -> float:
    """Compute the mean advantage of each prompt group, and return the largest absolute value of these means. Each
    trained turn counts once in its group's mean."""
    turns = batch["turn_ids"].masked_fill(batch["loss_mask"] == 0, -1)  # (B, T)

    # Take the last token of each trained turn, because with GAE the earlier tokens have only a share of the turn's
    # advantage.
    ends = (turns >= 0) & (turns != turns.roll(-1, 1))
    _, group = batch["task_ids"][:, None].expand_as(turns)[ends].unique(return_inverse=True)
    return (
        (torch.bincount(group, batch["advantages"][ends]) / torch.bincount(group))
        .abs()
        .max()
        .item()
    )


def is_due(step: int, interval: int) -> bool:
    """Return whether an action that runs every `interval` steps is due after step `step`. Interval 0 means never."""
    return bool(interval) and step % interval == 0


def track(config: TrainConfig) -> Any:
    """Register the run with the experiment tracker, and return the tracker's module. After a restart of the run, the
    tracker adds the new steps to the run's earlier steps."""
    tracker = importlib.import_module(config.logger.tracker or "")
    keys = asdict(config)
    del keys["rollout"]["server_key"]  # the experiment tracker must not receive the servers' key
    tracker.init(
        project=config.experiment_name, name=config.trial_name, config=keys, resume="allow"
    )
    return tracker


class Logger:
    """Writes and prints a run's metrics.

    `log` is called once per step. The context manager `live` shows the live table.
    """

    def __init__(self, config: TrainConfig, executor: Any, trace: Trace | None = None) -> None:
        self.trace, self.config, self.executor, self.doctor = (
            trace,
            config,
            executor,
            Doctor(config),
        )
        self.path = (
            config.run_dir / "metrics.jsonl"
        )  # a restarted run appends to the lines of its earlier steps
        self.history = read_records(self.path)
        self.doctor.step = len(self.history)
        self.start = time.monotonic() - (self.history[-1]["wall_s"] if self.history else 0.0)
        self.counts = asdict(executor.stats)  # the executor's counters at the last logged step
        self.words: dict[int, str] = {}  # the text of each token id that was in a batch
        self.report_s = 0.0  # number of seconds spent on reports
        self.tracker = track(config) if config.logger.tracker else None
        self.live = (
            terminal.show(self._screen)
            if config.logger.live and terminal.is_live
            else nullcontext()
        )

    def log(self, batch: dict[str, Tensor], metrics: dict[str, Any]) -> None:
        """Write one step's batch and metrics, and print the metrics.

        Every `sample_interval` steps, `log` prints a conversation. The counters in the metrics, such as
        `accepted`, count the events since the previous step.
        """
        step, keys, counts = metrics["step"], self.config.logger, asdict(self.executor.stats)
        if is_due(step, keys.tokens_interval):
            path = self.config.run_dir / "tokens" / f"{step:05d}.safetensors"
            path.parent.mkdir(exist_ok=True)
            ids = batch["input_ids"].unique().tolist()
            self.words |= {
                i: self.executor.tokenizer.decode([i]) for i in ids if i not in self.words
            }
            words = json.dumps({i: self.words[i] for i in ids})
            save_file({k: v.contiguous() for k, v in batch.items()}, path, {"words": words})

        metrics |= {key: counts[key] - self.counts[key] for key in COUNTS}
        metrics |= {
            "no_signal_share": no_signal_share(batch),
            "baseline_bias": baseline_bias(batch),
        }
        metrics["wall_s"] = time.monotonic() - self.start
        self.counts = counts
        self.history.append(metrics)
        with self.path.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        if self.tracker:
            self.tracker.log(
                {k: v for k, v in metrics.items() if isinstance(v, int | float)}, step=step
            )

        self._report(step, metrics["wall_s"])
        if keys.keep_steps:
            discard(
                self.config.run_dir,
                step - keys.keep_steps,
                self.config.rollout.max_head_offpolicyness,
            )

        for name, notice in NOTICES.items():
            if metrics[name] and not any(line.get(name) for line in self.history[:-1]):
                example = self._text(batch, int(batch[name].argmax()))[:160]
                print(f"step {step} has the first {notice}: {example!r}", flush=True)
        if isinstance(self.live, nullcontext):
            first, *others = (
                f"{title} {as_text(metrics, key, text)}" for key, title, text in COLUMNS
            )
            print(
                f"{first} of {self.config.max_steps}", *others, self._time(), sep="  ", flush=True
            )
        if "eval_episodes" in metrics:
            found = {k: v for k, v in metrics.items() if k.startswith("eval_") and v is not None}
            print(
                f"evaluation after step {step}:",
                *(f"{k[5:]} {v:.4g}" for k, v in found.items()),
                flush=True,
            )
        if is_due(step - 1, keys.sample_interval):
            print(f"a sample, reward {batch['rewards'][0]:.2f}: {self._text(batch, 0)}", flush=True)
        self.doctor.check(self.history)
        if self.config.replay:
            compare(self.config, step)

    def _report(self, step: int, wall_s: float) -> None:
        """Write the report every `report_interval` steps. Skip a report if the earlier reports took more than
        REPORT_SHARE of the run's time."""
        begin = time.monotonic()
        if (
            is_due(step, self.config.logger.report_interval)
            and self.report_s <= REPORT_SHARE * wall_s
        ):
            write_report(self.config.run_dir)
            self.report_s += time.monotonic() - begin

    def _text(self, batch: dict[str, Tensor], row: int) -> str:
        """Return the text of a row of the batch, on one line."""
        ids = batch["input_ids"][row][batch["attention_mask"][row]]
        return " ".join(self.executor.tokenizer.decode(ids, skip_special_tokens=False).split())

    def _time(self) -> str:
        """Return the elapsed time of the run and the estimated remaining time. The estimate is the number of remaining
        steps times the mean time of the finished steps."""
        last = self.history[-1]
        left = max(self.config.max_steps - last["step"], 0) * last["wall_s"] / last["step"]
        return f"time {timedelta(seconds=round(last['wall_s']))}, {timedelta(seconds=round(left))} left"

    def _screen(self) -> Group:
        """Return what the terminal shows: the table of the last steps, a progress bar, and the run's current phase."""
        done, batch = len(self.history), self.config.train_dataset.batch_size
        table = Table(box=None, header_style="bold", pad_edge=False)
        width, shown = Console().width, []
        for key, title, text in COLUMNS:
            width -= max(len(title), len(text.format(0))) + 2
            # The table prints two spaces after each column except the last, so the last column fits if `width` is -2.
            if width >= -2:
                shown.append((key, text))
                table.add_column(title, justify="right", no_wrap=True)
        for metrics in self.history[-ROWS:]:
            table.add_row(*(as_text(metrics, key, text) for key, text in shown))
        phase, begin = self.trace.phase if self.trace else ("", self.start)
        finished = min(batch, max(0, self.executor.stats.accepted - done * batch))
        step, episodes = min(done + 1, self.config.max_steps), batch * self.config.gconfig.n_samples
        now = f"step {step}, {phase.replace('_', ' ')}, {time.monotonic() - begin:.0f} s"
        counts = f"{finished} of {batch} groups; {self.executor.ended} episodes, {episodes} a batch"
        bar = ProgressBar(total=self.config.max_steps, completed=done, width=30)
        pace = self._time() if done else "the first is running"
        return Group(
            table, bar, f" {done} of {self.config.max_steps} steps; {pace}", f"{now}; {counts}"
        )
