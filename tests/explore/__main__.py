"""Run the commands that tests/explore/__init__.py lists."""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from . import dispatcher, turns, updates
from .search import explore, walk

MODES = dispatcher.MODES
CASES: list[
    tuple[str, Callable[..., Any], tuple[Any, ...]]
] = [  # cases of the search; the slowest cases come first
    *(
        ("dispatcher", dispatcher.DispatchMachine, (mode, b))
        for b in dispatcher.LARGE
        for mode in reversed(MODES)
    ),
    *(("turns", turns.TurnMachine, (b,)) for b in turns.LARGE),
    *(("updates", updates.UpdateMachine, (b,)) for b in updates.LARGE),
]
WALKS: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    *(
        ("dispatcher", dispatcher.DispatchMachine, (mode, b))
        for b in dispatcher.FAR
        for mode in MODES
    ),
    *(("turns", turns.TurnMachine, (b,)) for b in turns.FAR),
    *(("updates", updates.UpdateMachine, (b,)) for b in updates.FAR),
]
SEEDS, LENGTH = range(20), 2000  # seeds of the random walks, and number of events in each walk


def search(case: int) -> tuple[int, str]:
    """Explore one case. Return the number of states, and a line that describes the search."""
    name, machine, bounds = CASES[case]
    began = time.process_time()
    graph = explore(machine(*bounds), keep=False)
    described, seconds = ", ".join(map(str, bounds)), time.process_time() - began
    line = f"{name:<10}  {described}: {len(graph):,} states, {len(graph.sources):,} events, {seconds:.0f} s of CPU time"
    return len(graph), line


def stroll(case: int) -> tuple[int, str]:
    """Make one random walk through a state machine for each seed. Return the number of events, and
    a line that describes the walks."""
    name, machine, bounds = WALKS[case]
    began = time.monotonic()
    states = sum(len(walk(machine(*bounds), seed, LENGTH)) for seed in SEEDS)
    described = ", ".join(map(str, bounds))
    seconds = time.monotonic() - began
    events = len(SEEDS) * LENGTH
    return events, f"{name:<10}  {described}: {events:,} events, {states:,} states, {seconds:.0f} s"


def main(argv: list[str]) -> None:
    if argv not in (["--large"], ["--walk"]):
        raise SystemExit("python -m tests.explore --large or --walk")
    began, total = time.monotonic(), 0
    with ProcessPoolExecutor(2) as pool:
        jobs = (
            pool.map(search, range(len(CASES)))
            if argv == ["--large"]
            else pool.map(stroll, range(len(WALKS)))
        )
        for count, line in jobs:
            total += count
            print(line, flush=True)
    unit = "states" if argv == ["--large"] else "events"
    print(
        f"{total:,} {unit} in {time.monotonic() - began:.0f} s on two cores; every property holds"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
