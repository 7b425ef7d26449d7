"""Send metrics to an experiment tracker: `callbacks=[extras.trackers.Wandb]`, or Trackio.

The module trackio has wandb's interface. A subclass of Tracker can name another such module. After
a restart, Trackio continues the run's record, but wandb begins a new record.
"""

import importlib
from typing import Any


class Tracker:
    """Rank 0 reports the numbers of each step."""

    module = ""  # what to import; it has init, log and finish

    def __init__(self, config: Any) -> None:
        self.config = config
        self.tracker: Any = None

    def on_start(self, run: Any) -> None:
        if run.rank == 0:
            self.tracker = tracker = importlib.import_module(self.module)
            tracker.init(
                project=self.config.experiment_name,
                name=self.config.trial_name,
                config=self.config.model_dump(mode="json", fallback=str),
                resume="allow",
            )

    def on_step(self, metrics: dict[str, Any]) -> None:
        if self.tracker:
            numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
            self.tracker.log(numbers, step=metrics["step"])

    def on_end(self, error: BaseException | None) -> None:
        if self.tracker:
            self.tracker.finish()


class Wandb(Tracker):
    module = "wandb"


class Trackio(Tracker):
    module = "trackio"
