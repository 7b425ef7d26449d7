"""Show a live table of the last steps, the run's progress, and what the run is doing.

The table needs a terminal that can overwrite its lines. Elsewhere the run prints a line per step. A
narrow terminal shows only the first columns. Every SAMPLE_INTERVAL steps the run prints the end of
a conversation. The first side conversation (calls/sessions.py) is printed, too.
"""

import time
from datetime import timedelta
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table as Grid
from torch import Tensor

from extras import Record, printable

# Metric, heading, format.
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
    ("dropped", "dropped", "{:d}"),
    ("rollout_wait_s", "wait s", "{:.1f}"),
    ("mixed_version_share", "mixed", "{:.0%}"),
    ("entropy", "entropy", "{:.3f}"),
    ("clip_frac", "clipped", "{:.1%}"),
    ("logp_mismatch", "mismatch", "{:.0e}"),
    ("train_s", "train s", "{:.2f}"),
    ("sync_s", "sync s", "{:.2f}"),
)
COUNTERS = {"rejected", "failed", "failed_members", "dropped"}
ROWS = 12  # steps that the table shows
SAMPLE_INTERVAL = 20
SAMPLE_LENGTH = 400  # characters at the end of a conversation


def as_text(metrics: Record, key: str, text: str) -> str:
    """Format a metric. A logp_mismatch of exactly 0 becomes "-": no token was compared."""
    return "-" if key == "logp_mismatch" and not metrics[key] else text.format(metrics[key])


class Terminal(Console):
    """A console on which one thread at a time prints a line or refreshes the live display.

    To print, rich computes how high the display is and overwrites it. If another thread changed the
    display in between, rich would overwrite too many lines or too few.
    """

    def __enter__(self) -> Console:
        self._lock.acquire()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._lock.release()

    def show(self, content: Any) -> Live:
        """Show `content()` twice a second. The display uses the console's lock instead of its own,
        because two locks could deadlock."""
        live = Live(console=self, get_renderable=content, refresh_per_second=2)
        live._lock = self._lock
        return live


class Table:
    def __init__(self, config: Any) -> None:
        self.config = config
        self.terminal = Terminal()
        self.live: Live | None = None
        self.enter("waiting for groups")
        self.finished = 0  # groups that wait for a step

    def on_start(self, run: Any) -> None:
        self.run = run
        if run.rank == 0 and self.terminal.is_terminal and not self.terminal.is_dumb_terminal:
            run.executor.listeners.append(self.on_event)
            run.prints_steps = False
            self.live = self.terminal.show(self.screen)
            self.live.start()

    def on_event(self, name: str, task_id: int, details: Record) -> None:
        self.finished += {"accept": 1, "consume": -1, "drop": -1}.get(name, 0)
        if name == "consume":
            self.enter("training")

    def on_batch(self, batch: dict[str, Tensor]) -> None:
        self.batch = batch
        self.enter("updating the weights")

    def on_step(self, metrics: Record) -> None:
        if self.run.rank:
            return
        self.enter("waiting for groups")
        step = metrics["step"]
        earlier = self.run.history[:-1]
        if metrics["side_conversations"] and not any(m["side_conversations"] for m in earlier):
            example = self.text(int(self.batch["side_conversations"].argmax()))[:160]
            which = "side conversation, left out of training (calls/sessions.py)"
            print(f"step {step} has the first {which}: {example!r}", flush=True)
        if (step - 1) % SAMPLE_INTERVAL == 0:
            reward = self.batch["rewards"][0]
            text = self.text(0)
            if len(text) > SAMPLE_LENGTH:
                text = f"... {text[-SAMPLE_LENGTH:]}"
            print(f"a sample, reward {reward:.2f}: {printable(text)}", flush=True)

    def on_end(self, error: BaseException | None) -> None:
        if self.live:
            self.enter("ended")
            self.live.stop()

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.since = time.monotonic()

    def text(self, row: int) -> str:
        ids = self.batch["input_ids"][row][self.batch["attention_mask"][row]]
        return " ".join(self.run.inputs.tokenizer.decode(ids, skip_special_tokens=False).split())

    def screen(self) -> Group:
        history = self.run.history
        steps = self.run.last_step
        width = self.terminal.width
        table = Grid(box=None, header_style="bold", pad_edge=False)
        shown = []
        for key, title, text in COLUMNS:
            if key in COUNTERS and not any(metrics[key] for metrics in history):
                continue
            width -= max(len(title), len(text.format(0))) + 2
            if width >= -2:  # the last column needs no two spaces after it
                shown.append((key, text))
                table.add_column(title, justify="right", no_wrap=True)
        for metrics in history[-ROWS:]:
            table.add_row(*(as_text(metrics, key, text) for key, text in shown))
        done = 0
        pace = "the first is running"
        if history:
            done = history[-1]["step"]
            past = timedelta(seconds=round(history[-1]["wall_s"]))
            left = timedelta(seconds=round(max(steps - done, 0) * history[-1]["wall_s"] / done))
            pace = f"time {past}, {left} left"
        bar = ProgressBar(total=steps, completed=done, width=30)
        now = f"step {min(done + 1, steps)}, {self.phase}, {time.monotonic() - self.since:.0f} s"
        batch = self.config.train_dataset.batch_size
        groups = f"{min(max(self.finished, 0), batch)} of {batch} groups"
        return Group(table, bar, f" {done} of {steps} steps; {pace}", f"{now}; {groups}")
