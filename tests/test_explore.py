"""tests/explore searches every order in which the events of small systems can happen: here the
sessions and a call.

The search finds no broken property in the project's modules. A mutant is a module with a planted
error, which is one changed piece of code. The search finds every planted error. For each property
there are at least two mutants that break the property.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import rollout.interaction
from conftest import ROOT
from explore import sessions, turns
from explore.planted import find_error, mutant, with_mutant
from explore.search import explore, walk
from explore.sessions import SessionBounds, SessionMachine
from explore.turns import TurnBounds, TurnMachine

import cache
import calls.sessions
import calls.turn
import proxy
import rollout.rows


@pytest.mark.parametrize("bounds", sessions.SMALL, ids=str)
def test_every_order_of_the_sessions_events_keeps_every_property(bounds: SessionBounds) -> None:
    """In every order of events, the session table keeps exactly the sessions that are not exported,
    discarded or expired. If a session ends, the session's turns are stopped."""
    assert len(explore(SessionMachine(bounds), keep=False)) > 1000


@pytest.mark.parametrize("bounds", turns.SMALL, ids=str)
def test_every_order_of_a_calls_events_keeps_every_property(bounds: TurnBounds) -> None:
    """Each call is trained at most once, in whatever order calls, retries, failures, closed
    connections and ends of sessions happen. If no client waits for a generation any more, the
    engine ends the generation."""
    graph = explore(TurnMachine(bounds))
    assert len(graph) > 300
    reached = {name for state in graph.states for name, *_ in state.seen[2]}
    assert reached >= {"RUNNING", "FINISHED", "FAILED", "ABANDONED", "REPLACED"}
    assert "UNREAD" in reached or bounds != turns.SMALL[0]


WALKS = [
    *((SessionMachine, (bounds,)) for bounds in sessions.FAR),
    *((TurnMachine, (bounds,)) for bounds in turns.FAR),
]


@pytest.mark.parametrize(("machine", "bounds"), WALKS)
def test_random_walks_far_beyond_the_bounds_keep_every_property(
    machine: Callable[..., Any], bounds: Any
) -> None:
    """Long random series of events break no property. The bounds of the random walks are larger
    than the bounds of the exhaustive search."""
    length = 100 if machine is TurnMachine else 300
    assert len(walk(machine(*bounds), 0, length)) > 50


# Each row holds the property that a mutant breaks, the original code of calls/sessions.py, and the
# changed code
SESSION_MUTANTS = [
    ("grants", "self._grants[0] <= self.clock()", "self._grants[0] < self.clock()"),
    (
        "grants",
        "        self._grants.popleft()\n        self.expire()\n",
        "        self.expire()\n",
    ),
    ("expiry", "last_used >= self.timeout", "last_used > self.timeout"),
    ("expiry", "(self.touch if oldest.running else self.forget)", "self.forget"),
    ("expiry", "            self.move_to_end(session.session_id)\n", "            pass\n"),
    ("ended", "        session.ended = True\n", ""),
    ("ended", "        if session.ended:\n", "        if session.running and session.ended:\n"),
    ("stopped", "            turn.end_with_session()\n", "            pass\n"),
    (
        "stopped",
        "        self.end(session)\n        self.pop",
        "        session.ended = True\n        self.pop",
    ),
    ("access", "self.get(session_id)", "self.get(session_id) and next(iter(self.values()))"),
    ("access", "secrets.token_urlsafe(16), task_id", "task_id[:4], task_id"),
    ("limit", "if answers > self.answers", "if answers > self.answers + 1"),
    ("limit", "sum(len(turn.ids) for turn in session.running)", "len(session.running)"),
]


@pytest.mark.parametrize(("name", "line", "changed"), SESSION_MUTANTS)
def test_a_planted_error_of_the_sessions_is_found_by_name(
    name: str, line: str, changed: str
) -> None:
    """The search finds each planted error of the session table, and names the broken property."""
    find_error(SessionMachine(SessionBounds(), mutant(calls.sessions, line, changed)), name)


# Each row holds the property that a mutant breaks, the bounds, the module, the original code, and
# the changed code
X, Y, WX = TurnBounds("x", 2, 0), TurnBounds("y", 2, 0), TurnBounds("wx", 2, 0)
EXPORT = 'return reply({"interactions"'
XZ, LONG = TurnBounds("xz", 2, 0, rewards=True), TurnBounds("x", 2, 0, threads=True)
TURN_MUTANTS = [
    ("once", X, calls.turn, "if not equal or not says_so:", "if not equal or says_so:"),
    ("once", LONG, proxy, "async with session.beginning:  # this lock", "if True:  #"),
    (
        "read",
        X,
        calls.turn,
        "            self.state = State.FINISHED\n            return",
        "            return",
    ),
    ("read", X, calls.turn, "cache.discard(name)", "cache._interactions.pop(name, None)"),
    ("mixed", WX, proxy, "hashlib.blake2b(raw + ", "hashlib.blake2b("),
    (
        "mixed",
        WX,
        calls.turn,
        "setdefault(body, [])",
        "setdefault(body, []) or sum(session.turns.values(), [])",
    ),
    ("stopped", X, calls.turn, "runs = self.task.cancel()", "runs = False"),
    ("stopped", X, calls.turn, "= State.FAILED\n        self.task.cancel()", "= State.FAILED"),
    ("answered", X, calls.turn, "asyncio.wait({self.task, hangup}", "asyncio.wait({hangup}"),
    ("answered", Y, calls.turn, "asyncio.wait({self.task, *others}", "asyncio.wait({*others}"),
    ("tree", X, calls.turn, "        self.forget()\n", ""),
    ("tree", LONG, proxy, "            turn.forget()\n", ""),
    ("rewards", XZ, cache, "own[turn] + gamma * fmean(child_", "own[turn] + fmean(child_"),
    ("rewards", XZ, cache, "child_rewards[turn.parent].append", "child_rewards[turn].append"),
    ("deadlock", X, proxy, f"self.sessions.forget(session)\n        {EXPORT}", EXPORT),
    ("deadlock", X, calls.sessions, "        session.ended = True\n", ""),
    (
        "tokens",
        XZ,
        rollout.rows,
        "[span] = turn.tokens.output_logprobs",
        "[span] = last.output_logprobs",
    ),
    (
        "tokens",
        XZ,
        rollout.rows,
        "[span] = turn.tokens.output_versions",
        "[span] = last.output_versions",
    ),
    (
        "tokens",
        XZ,
        rollout.interaction,
        "or [(self, True)]",
        "or [(turn, True) for turn in (self.parent, self) if turn]",
    ),
]


PROXY = rollout.rows, rollout.interaction, cache, calls.sessions, calls.turn, proxy


@pytest.mark.runs
@pytest.mark.parametrize(("name", "bounds", "module", "line", "changed"), TURN_MUTANTS)
def test_a_planted_error_of_a_call_is_found_by_name(
    name: str, bounds: TurnBounds, module: ModuleType, line: str, changed: str
) -> None:
    """The search finds each error that is planted in the proxy, its turns or its conversation tree,
    and names the broken property."""
    find_error(TurnMachine(bounds, with_mutant(PROXY, module, line, changed)[-1]), name)


@pytest.mark.parametrize(("module", "line"), [error[2:4] for error in TURN_MUTANTS])
def test_a_planted_error_changes_one_place(module: ModuleType, line: str) -> None:
    """The slow tests plant an error by replacing a piece of code. This quick test checks that each
    piece of code to be replaced occurs in its module exactly once."""
    assert inspect.getsource(module).count(line) == 1


def test_each_property_has_two_mutants() -> None:
    """docs/protocol.md names every property that a state machine of tests/explore can report as
    broken. Each property has at least two mutants."""
    mutants = Counter(f"sessions: {name}" for name, *_ in SESSION_MUTANTS)
    mutants += Counter(f"turns: {name}" for name, *_ in TURN_MUTANTS)
    table = re.findall(
        r"\| (\w+): ([\w, ]+) \|$", (ROOT / "docs/protocol.md").read_text(), re.MULTILINE
    )
    named = {
        f"{machine}: {name}"
        for machine, names in table
        for name in names.split(", ")
        if machine in ("sessions", "turns")
    }
    assert named == mutants.keys()
    assert min(mutants.values()) >= 2
    for machine in (sessions, turns):
        kind, source = machine.__name__.rpartition(".")[2], inspect.getsource(machine)
        reported = set(re.findall(r"(?:Broken\(|self\.fail\()\"(\w+)\"", source))
        assert {f"{kind}: {name}" for name in reported} <= named
