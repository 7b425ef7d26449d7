"""Visit every state of a state machine, and check each state.

A **state machine**, or machine for short, describes a system: its initial states, the events that
are possible in a state, and the properties that every state must have. `explore` visits all states,
breadth first. States with the same key count as one, so if two orders of events lead to the same
key, the search continues from only one of the two states. If a state violates a property, the error
shows the shortest series of events that leads to such a state. After the search, `explore` checks
that a goal can be reached from every state. A state from which no goal can be reached is a
deadlock, or belongs to a set of states that no event leaves.

`walk` follows random events and checks each state that it reaches. It also works with systems that
have too many states for `explore`.
"""

import random
from array import array
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

S = TypeVar("S")
Event = tuple[Any, ...]  # the name of an event and its arguments
# The number of a state, and an event that happens in it; None for an initial state.
Way = tuple[int, Event] | None


class Machine(Protocol[S]):
    """The methods that `explore` and `walk` need from a state machine."""

    def initial(self) -> Iterable[S]: ...

    def events(self, state: S) -> Iterable[Event]:
        """Return the events that are possible in this state."""
        ...

    def apply(self, state: S, event: Event) -> S:
        """Return the state after an event, without changing `state`. May raise Broken."""
        ...

    def key(self, state: S) -> Hashable:
        """Return a value that distinguishes this state from other states."""
        ...

    def check(self, state: S) -> None:
        """Raise Broken if the state violates a property."""
        ...

    def is_goal(self, state: S) -> bool:
        """Return whether this state is a goal. The system must be able to reach a goal from every
        state."""
        ...


class Broken(AssertionError):
    """Raised if a state violates the property `name`."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.name, self.why = name, why


class State(NamedTuple):
    """A state of a PathMachine: the events that lead to it, and the values that `run` computed for
    it."""

    path: tuple[Event, ...]
    seen: Hashable
    possible: tuple[Event, ...]
    broken: Broken | None
    is_goal: bool
    text: str

    def __str__(self) -> str:
        return self.text


class PathMachine:
    """A state machine whose state contains coroutines, which cannot be copied.

    To reach a state, `run` repeats all events that lead to it.
    """

    def run(self, path: tuple[Event, ...]) -> State:
        """Replay all events of a path in a newly created world, and return the resulting state."""
        raise NotImplementedError

    def initial(self) -> Iterable[State]:
        return [self.run(())]

    def events(self, state: State) -> Iterable[Event]:
        return state.possible

    def apply(self, state: State, event: Event) -> State:
        return self.run((*state.path, event))

    def key(self, state: State) -> Hashable:
        return state.seen

    def check(self, state: State) -> None:
        if state.broken:
            raise state.broken

    def is_goal(self, state: State) -> bool:
        return state.is_goal


@dataclass
class Graph:
    """All states that the search reached, numbered in its order, and the transitions between them.

    If the search does not keep the states, `states` is empty.
    """

    states: list[Any] = field(default_factory=list)  # the first state with each key
    # of each state, the last event that leads there
    came_by: list[Way] = field(default_factory=list)
    # numbers of the states before and after each transition
    sources: array = field(default_factory=lambda: array("I"))
    targets: array = field(default_factory=lambda: array("I"))
    goals: bytearray = field(default_factory=bytearray)  # of each state, 1 for a goal, else 0

    def __len__(self) -> int:
        return len(self.came_by)


def explore(machine: Machine[S], keep: bool = True) -> Graph:
    """Visit all states of a state machine. If a state violates a property, raise Broken with the
    shortest series of events that leads to such a state."""
    graph = Graph()
    numbers: dict[Hashable, int] = {}  # for each key, the number of its state
    queue: deque[tuple[int, S]] = deque()

    def visit(state: S, way: Way) -> int:
        key = machine.key(state)
        if key not in numbers:
            number = numbers[key] = len(numbers)
            graph.came_by.append(way)
            machine.check(state)
            graph.goals.append(machine.is_goal(state))
            queue.append((number, state))
            if keep:
                graph.states.append(state)
        return numbers[key]

    way: Way = None
    try:
        for first in machine.initial():
            visit(first, None)
        while queue:
            here, state = queue.popleft()
            for event in machine.events(state):
                way = here, event
                graph.targets.append(visit(machine.apply(state, event), way))
                graph.sources.append(here)
    except Broken as broken:
        told = story(machine, events_to(graph, way))
        raise Broken(broken.name, f"{broken.why}\n{told}") from broken
    if lost := stuck(graph):
        moves = {source for source, target in zip(graph.sources, graph.targets) if source != target}
        ends = [number for number in lost if number not in moves]  # no event leads away
        told = story(machine, events_to(graph, graph.came_by[(ends or lost)[0]]))
        raise Broken("deadlock", f"no goal can be reached after these events:\n{told}")
    return graph


def stuck(graph: Graph) -> list[int]:
    """Return the states from which no goal can be reached, in the order of the search."""
    alive, before = bytearray(graph.goals), -1
    while before != (before := sum(alive)):
        # The loop goes from the last transition to the first, because this order needs fewer
        # rounds: most transitions lead to a state with a higher number.
        for k in range(len(graph.sources) - 1, -1, -1):
            if alive[graph.targets[k]]:
                alive[graph.sources[k]] = 1
    return [number for number in range(len(graph)) if not alive[number]]


def events_to(graph: Graph, way: Way) -> list[Event]:
    """Return all events of the path that begins at an initial state and ends with `way`."""
    events: list[Event] = []
    while way is not None:
        events.append(way[1])
        way = graph.came_by[way[0]]
    return events[::-1]


def story(machine: Machine[Any], events: Sequence[Event]) -> str:
    """Return the events as text, one on each line, with the state before each event.

    If the state machine has several initial states, the text begins with the first of them.
    """
    state, lines = next(iter(machine.initial())), []
    for number, event in enumerate(events, start=1):
        lines.append(f"{number:>4}. {' '.join(map(str, event)):<24} in  {state}")
        try:
            state = machine.apply(state, event)
        except Broken:
            break
    return "\n".join(lines)


def walk(machine: Machine[S], seed: int, length: int) -> list[S]:
    """Follow `length` random events, check each state, and return the distinct states.

    If no event is possible in a state, the walk restarts from an initial state. If a property does
    not hold, raise Broken with the events since the walk last restarted.
    """
    rng, seen = random.Random(seed), dict[Hashable, S]()
    state, events = next(iter(machine.initial())), list[Event]()
    try:
        for _ in range(length):
            if not (possible := list(machine.events(state))):
                state, events = next(iter(machine.initial())), []
                possible = list(machine.events(state))
            events.append(rng.choice(possible))
            state = machine.apply(state, events[-1])
            machine.check(state)
            seen.setdefault(machine.key(state), state)
    except Broken as broken:
        told = story(machine, events)
        raise Broken(broken.name, f"{broken.why}, seed {seed}\n{told}") from broken
    return [*seen.values()]
