"""The search of tests/explore.py finds no broken property in the real dispatcher, and finds every planted error.

A mutant is one of the project's modules with one changed line. Each property has two mutants that break this property.
"""

import importlib.util
from pathlib import Path
from types import ModuleType

import explore
import pytest
from explore import MODES, Bounds, Broken, DispatchMachine

import rollout.dispatcher
import staleness

SMALL = (
    Bounds(eta=1, batch=1, concurrent=2, versions=3, rejections=1),
    Bounds(eta=0, batch=2, concurrent=3, versions=2, rejections=1),
    Bounds(eta=1, batch=1, concurrent=2, versions=2, rejections=0, kills=1),
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bounds", SMALL, ids=str)
def test_every_order_of_events_keeps_every_property(mode: str, bounds: Bounds) -> None:
    """In every order of events, groups keep the age bound, the counters agree, and nothing starves or hangs."""
    graph = explore.explore(DispatchMachine(mode, bounds))
    assert any(state.version == bounds.versions for state in graph.states.values())
    assert len(graph.states) > 30
    dropped = any(state.state.manager.get_stats().dropped for state in graph.states.values())
    assert dropped == (mode == "drop" and bounds.eta > 0 and not bounds.kills), "the bounds reach no dropped group"


def mutant(module: ModuleType, line: str, changed: str) -> ModuleType:
    """Return a copy of a module in which one piece of code is changed."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert source.count(line) == 1, f"{line!r} is not in {module.__name__} one time"
    spec = importlib.util.spec_from_loader(module.__name__, loader=None)
    assert spec is not None
    copy = importlib.util.module_from_spec(spec)
    exec(compile(source.replace(line, changed), module.__file__, "exec"), vars(copy))
    return copy


DISPATCHER, STALENESS = rollout.dispatcher, staleness
# property, mode, module, the code, and the changed code
MUTANTS = [
    ("starvation", "wait", STALENESS, "(self.max_staleness + version + 1) *", "(self.max_staleness + version + 2) *"),
    ("age", "drop", STALENESS, "return age <= self.max_staleness", "return age <= self.max_staleness + 1"),
    ("age", "mask", STALENESS, "get_version() - self.max_staleness\n", "get_version() - self.max_staleness - 1\n"),
    ("counters", "wait", DISPATCHER, "            self.manager.on_rollout_rejected(failed)\n", ""),
    ("counters", "drop", DISPATCHER, "                self.manager.on_rollout_dropped()\n", ""),
    ("counters", "wait", STALENESS, "consumer_batch_size + finished_untrained", "consumer_batch_size"),
    ("starvation", "wait", DISPATCHER, "islice(self.order.items(), count) if", "finished[:count] if"),
    ("starvation", "drop", DISPATCHER, "finished[:count]", "finished[-count:]"),
    ("lost", "mask", DISPATCHER, "if data is None]):", "if data != self.order[task_id]]):"),
    ("lost", "mask", STALENESS, "get_version() - self.max_staleness\n", "get_version()\n"),
    ("deadlock", "wait", STALENESS, "(self.max_staleness + version + 1) *", "(self.max_staleness + 1) *"),
    ("deadlock", "mask", STALENESS, "rollouts - stat.running\n", "rollouts - stat.running - stat.accepted\n"),
]


@pytest.mark.parametrize(("name", "mode", "module", "line", "changed"), MUTANTS)
def test_a_planted_error_is_found_by_name(name: str, mode: str, module: ModuleType, line: str, changed: str) -> None:
    """The search finds each planted error, names the broken property, and tells the events that lead to it."""
    wrong = {"dispatcher": DISPATCHER, "staleness": STALENESS}
    wrong[module.__name__.rpartition(".")[2]] = mutant(module, line, changed)
    kills = int("finished_untrained" in line)
    with pytest.raises(Broken) as caught:
        explore.explore(DispatchMachine(mode, Bounds(versions=4, rejections=1 - kills, kills=kills), **wrong))
    assert caught.value.name == name, caught.value
    assert "1. start" in str(caught.value)
    assert "in  version 0" in str(caught.value)


def test_equal_situations_are_visited_once() -> None:
    """Two orders of events that lead to the same situation end in one state. The drawing shows each state once."""
    graph = explore.explore(DispatchMachine("wait", explore.SMALLEST))
    drawn = explore.show(graph)
    assert drawn.count("fail 0 -> 3") == drawn.count("reject 0 -> 3") == 1
    assert len([line for line in drawn.splitlines() if "->" not in line]) == len(graph.states) == 10
