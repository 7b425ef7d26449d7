"""Run the commands that tests/explore/__init__.py lists."""

import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from . import dispatcher, turns, updates
from .search import explore, walk

COMMANDS = {"--large": "LARGE", "--walk": "FAR"}  # each command and its bounds
SEEDS, LENGTH = range(20), 2000  # seeds of the random walks, and number of events in each walk
Case = tuple[str, Any, tuple[Any, ...]]  # command, state machine, its arguments


def cases(command: str) -> list[Case]:
    """All cases of a command. The slowest come first."""
    modules = dispatcher, turns, updates
    of_dispatcher, of_turns, of_updates = (getattr(m, COMMANDS[command]) for m in modules)
    modes = [(mode, bounds) for bounds in of_dispatcher for mode in reversed(dispatcher.MODES)]
    return [
        *((command, dispatcher.DispatchMachine, each) for each in modes),
        *((command, turns.TurnMachine, (bounds,)) for bounds in of_turns),
        *((command, updates.UpdateMachine, (bounds,)) for bounds in of_updates),
    ]


def run(case: Case) -> tuple[int, str]:
    """Explore one case, or make its random walks. Return the number of states or events, and a line
    that describes the search."""
    command, machine, bounds = case
    began = time.process_time()
    if command == "--large":
        graph = explore(machine(*bounds), keep=False)
        states, events = len(graph), len(graph.sources)
    else:
        states = sum(len(walk(machine(*bounds), seed, LENGTH)) for seed in SEEDS)
        events = len(SEEDS) * LENGTH
    seconds, described = time.process_time() - began, ", ".join(map(str, bounds))
    line = f"{machine.__name__}, {described}: {states:,} states, {events:,} events, {seconds:.0f} s"
    return states if command == "--large" else events, line


def main(argv: list[str]) -> None:
    if len(argv) != 1 or argv[0] not in COMMANDS:
        raise SystemExit("python -m tests.explore --large or --walk")
    began, total = time.monotonic(), 0
    with ProcessPoolExecutor(2) as pool:
        for count, line in pool.map(run, cases(argv[0])):
            total += count
            print(line, flush=True)
    unit, seconds = "states" if argv == ["--large"] else "events", time.monotonic() - began
    print(f"{total:,} {unit} in {seconds:.0f} s on two cores; every property holds")


if __name__ == "__main__":
    main(sys.argv[1:])
