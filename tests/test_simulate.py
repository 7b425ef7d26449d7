"""These tests check bench/simulate.py and bench/clusters.py: the simulated clock, the gate's
decisions, the agreement with real runs, and the table."""

import json
import math
import sys
from dataclasses import replace

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import clusters  # type: ignore[import-not-found]
import simulate  # type: ignore[import-not-found]

from staleness import StalenessError, StalenessManager

RUNS = json.loads((ROOT / "docs" / "simulate.json").read_text())


def constant(eta: int, **changes: object) -> simulate.Setup:
    """Return a setup with four groups per step, 2 s of generation, 1 s of training and 0.5 s of
    update."""
    times = lambda rng, k: 2.0, lambda rng, k, n: 1.0, lambda rng, k, n: 0.5
    return replace(simulate.Setup(4, *times, eta=eta, steps=10), **changes)


def test_synchronous_steps_take_the_sum_of_their_parts() -> None:
    """With eta = 0 a step takes as long as generation, training and update together, and no token
    has a lag."""
    result = simulate.Simulation(constant(0)).run()
    assert result.ends == pytest.approx([3.5 * k for k in range(1, 11)])
    assert set(result.lags) == {(0.0, 0)}


def test_asynchronous_training_hides_generation() -> None:
    """With eta = 2 the trainer waits only for the first batch."""
    result = simulate.Simulation(constant(2)).run()
    assert result.ends == pytest.approx([2 + 1.5 * k for k in range(1, 11)])
    assert result.waited == pytest.approx(2.0)


def test_a_server_shares_its_time() -> None:
    """A server with n running sequences needs a + b n seconds to generate one token for each
    sequence. Four sequences of two tokens need 2 (a + 4 b) seconds together, and 4 (a + 2 b)
    seconds if the server runs two sequences at a time."""
    for slots, seconds in ((math.inf, 2 * (1 + 4 * 0.5)), (2, 4 * (1 + 2 * 0.5))):
        result = simulate.Simulation(constant(0, a=1.0, b=0.5, slots=slots, steps=1)).run()
        assert result.ends == pytest.approx([seconds + 1.5])


def test_an_update_without_interruption_waits_for_the_longest_answer() -> None:
    """If a weight update waits for running completions instead of interrupting them, the steps take
    longer."""
    lengths = lambda rng, k: rng.choice([1.0, 9.0])  # noqa: E731
    setups = (constant(2, length=lengths, interrupt=i) for i in (True, False))
    cut, whole = (simulate.Simulation(setup).run() for setup in setups)
    assert whole.ends[-1] > cut.ends[-1]


@pytest.mark.parametrize("order", ["wait", "window", "drop", "mask"])
def test_the_bound_holds_for_every_order(order: str) -> None:
    """With each of the four orders in which the trainer may consume groups, no trained token is
    more than eta versions old. With the order "unbounded", some are."""
    eta, orders = 2, (order, "unbounded")
    found = (simulate.simulate(clusters.small, 1.0, eta, o, seeds=range(3)) for o in orders)
    bounded, unbounded = found
    assert bounded["lag_max"] <= eta < unbounded["lag_max"]
    assert bounded["total_s"] >= unbounded["total_s"] * 0.99


def test_the_gate_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation uses the gate of staleness.py. If the gate is changed so that it admits too
    many groups, the simulation raises StalenessError."""
    shipped = StalenessManager.get_capacity
    monkeypatch.setattr(StalenessManager, "get_capacity", lambda self: shipped(self) + 16)
    with pytest.raises(StalenessError):
        simulate.Simulation(clusters.small(1.0, 1, "wait")).run()


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["name"])
def test_the_simulation_agrees_with_real_runs(run: dict) -> None:
    """Given the measured times of a finished run, the simulation predicts the run's largest lag
    exactly, its mean lag to within 0.2 versions, and its duration to within 10 %."""
    found = simulate.simulate(simulate.replay, run, seeds=range(9))
    assert found["total_s"] == pytest.approx(run["seconds"], rel=0.1)
    assert found["lag_mean"] == pytest.approx(run["lag_mean"], abs=0.2)
    assert found["lag_max"] == run["lag_max"]


def test_the_table_is_what_the_simulation_finds() -> None:
    """docs/clusters.csv holds the numbers that the simulation computes."""
    found = simulate.simulate(clusters.small, 1.0, 4, "wait", seeds=range(9))
    assert clusters.read_rows()["order", "1.0", "4", "wait"] == pytest.approx(found, rel=1e-3)


def test_a_wait_for_a_long_answer_costs_less_with_mask() -> None:
    """If a few episodes are very long, a run with stale=mask excludes the oldest tokens from the
    loss, and takes less time than a run with stale=wait."""
    wait, mask = (simulate.simulate(clusters.small, 1.5, 4, order) for order in ("wait", "mask"))
    assert mask["total_s"] < wait["total_s"] / 2
    assert wait["masked"] == 0 < mask["masked"]
