"""A tracker is told the configuration, the numbers of each step, and the end of the run."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from extras.trackers import Tracker, Trackio, Wandb
from run.config import TrainConfig


@pytest.mark.parametrize("kind", [Wandb, Trackio])
def test_a_tracker_gets_every_step(kind: type[Tracker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rank 0 reports, only numbers are reported, and a continued run continues."""
    calls = list[tuple[str, Any, Any]]()

    def recorder(function: str) -> Any:
        return lambda *args, **kwargs: calls.append((function, args, kwargs))

    module: Any = SimpleNamespace(**{f: recorder(f) for f in ("init", "log", "finish")})
    monkeypatch.setitem(sys.modules, kind.module, module)
    for rank in (1, 0):
        tracker = kind(TrainConfig(experiment_name="e", trial_name="t"))
        tracker.on_start(SimpleNamespace(rank=rank))
        tracker.on_step({"step": 1, "reward": 0.5, "lag_counts": [3], "eval_reward": None})
        tracker.on_end(None)
    (first, _, init), log, finish = calls
    assert (first, init["project"], init["name"], init["resume"]) == ("init", "e", "t", "allow")
    assert init["config"]["rollout"]["max_head_offpolicyness"] == 2
    assert log == ("log", ({"step": 1, "reward": 0.5},), {"step": 1})
    assert finish == ("finish", (), {})
