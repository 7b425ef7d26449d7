"""tests/explore runs the shipped sessions, calls and tree through every order of events in a small
system.

It finds no broken property, and every error that is planted into the shipped modules.
"""

import inspect
import re
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
from conftest import ROOT
from explore import sessions, turns
from explore.planted import find_error, mutant, with_mutant
from explore.search import explore, walk
from explore.sessions import SessionBounds, SessionMachine
from explore.turns import TurnBounds, TurnMachine

import cache
import calls.prompts
import calls.sessions
import calls.turn
import proxy


@pytest.mark.parametrize("bounds", sessions.SMALL, ids=str)
def test_every_order_of_the_sessions_events_keeps_every_property(bounds: SessionBounds) -> None:
    """The table has exactly the sessions that it should, and stops what ends."""
    assert len(explore(SessionMachine(bounds), keep=False)) > 1000


@pytest.mark.parametrize("bounds", turns.SMALL, ids=str)
def test_every_order_of_a_calls_events_keeps_every_property(bounds: TurnBounds) -> None:
    """Whatever order calls, retries, failures and hang-ups come in, a call is trained at most once
    and a reply that was read is exported."""
    graph = explore(TurnMachine(bounds))
    assert len(graph) > 200
    reached = {name for state in graph.states for name, *_ in state.seen[2]}
    assert reached == {"RUNNING", "FINISHED", "FAILED"}


WALKS: list[Any] = [SessionMachine(bounds) for bounds in sessions.FAR]
WALKS += [TurnMachine(bounds) for bounds in turns.FAR]


@pytest.mark.parametrize("machine", WALKS, ids=lambda machine: type(machine).__name__)
def test_random_walks_far_beyond_the_bounds_keep_every_property(machine: Any) -> None:
    """Long series of random events in larger systems."""
    assert len(walk(machine, 0, 100 if isinstance(machine, TurnMachine) else 300)) > 40


# property, code of calls/sessions.py, planted error
SESSION_MUTANTS = [
    ("grants", "        if not self.capacity:\n", "        if self.capacity < 0:\n"),
    ("grants", "        self.capacity -= 1\n", ""),
    ("expiry", "last_used >= (", "last_used > ("),
    ("expiry", "(self.touch if oldest.running else self.forget)", "self.forget"),
    ("expiry", "        if self.pop(session.session_id, None):\n", "        if False:\n"),
    ("ended", "        session.ended = True\n", ""),
    ("ended", "        if session.ended:\n", "        if session.running and session.ended:\n"),
    ("stopped", "            turn.fail()\n", "            pass\n"),
    ("stopped", "self.end(session)\n        self.pop", "session.ended = True\n        self.pop"),
    ("access", "return self[session_id]", "return next(iter(self.values()))"),
    ("access", "secrets.token_urlsafe(16), Inter", "task_id[:4], Inter"),
    ("limit", "> ANSWERS:", "> ANSWERS + ANSWERS / 2:"),
    ("limit", "sum(len(turn.ids) for turn in self.running)", "len(self.running)"),
]


@pytest.mark.parametrize(("name", "line", "changed"), SESSION_MUTANTS)
def test_a_planted_error_of_the_sessions_is_found_by_name(
    name: str, line: str, changed: str
) -> None:
    """The search names the property, and shows how it breaks."""
    find_error(SessionMachine(SessionBounds(), mutant(calls.sessions, line, changed)), name)


X, X3 = TurnBounds("x", 2), TurnBounds("x", 3)
WX, WX3 = TurnBounds("wx", 2), TurnBounds("wx", 3)
Y, XZ = TurnBounds("y", 2), TurnBounds("xz", 2, rewards=True)
LAST_REPLY = "return self.task.result() and self.session.cache.finished()[-1].reply"
TOO_SHORT = "return self.extend(parent.tokens, [],"
FORGETS = "        self.sessions.forget(session)\n        interactions"
# property, bounds, module, code, planted error
TURN_MUTANTS: list[tuple[str, TurnBounds, ModuleType, str, str]] = [
    ("once", X, proxy, "retried_turn(equal) if is_retry else None", "None"),
    ("once", X, proxy, "retried_turn(equal) if is_retry else", "retried_turn(equal) or"),
    ("once", X3, calls.turn, "            equal.remove(turn)\n", ""),
    ("once", X, calls.turn, "if turn.state is State.FAILED:", "if False:"),
    ("read", X, cache, "rows = self.finished() if", "rows = self.finished()[1:] if"),
    ("read", X, cache, "if interaction.complete]", "if interaction.reward]"),
    ("once", WX3, proxy, "sha256(raw + ", "sha256("),
    ("mixed", XZ, calls.prompts, "return self.extend(parent.tokens, new,", TOO_SHORT),
    ("mixed", WX, calls.turn, "return self.task.result()", LAST_REPLY),
    ("stopped", X, calls.turn, "            self.task.cancel()\n", ""),
    ("stopped", X, calls.turn, "if not self.listeners and", "if False and"),
    ("answered", X, calls.turn, "both = {self.task, hangup}", "both = {hangup}"),
    ("answered", Y, calls.turn, "self.listeners += 1", "self.listeners += 2"),
    ("tree", X, calls.turn, "        self.forget()\n", ""),
    (
        "tree",
        X,
        calls.turn,
        "            self.fail()\n        if not",
        "            pass\n        if not",
    ),
    ("rewards", XZ, cache, "+ gamma * fmean(", "+ fmean("),
    ("rewards", XZ, cache, "below[turn.parent].append", "below[turn].append"),
    ("deadlock", X, proxy, FORGETS, "        interactions"),
    ("deadlock", X, calls.sessions, "        session.ended = True\n", ""),
    ("tokens", XZ, cache, '["logprobs"][span] = said.', '["logprobs"][span] = last.'),
    ("tokens", XZ, cache, '["versions"][span] = said.', '["versions"][span] = last.'),
    ("tokens", XZ, cache, "[(self, True)]", "[(t, True) for t in (self.parent, self) if t]"),
]
PROXY = cache, calls.prompts, calls.sessions, calls.turn, proxy


@pytest.mark.runs
@pytest.mark.parametrize(("name", "bounds", "module", "line", "changed"), TURN_MUTANTS)
def test_a_planted_error_of_a_call_is_found_by_name(
    name: str, bounds: TurnBounds, module: ModuleType, line: str, changed: str
) -> None:
    """The same for the proxy, its turns and its tree."""
    find_error(TurnMachine(bounds, with_mutant(PROXY, module, line, changed)[-1]), name)


@pytest.mark.parametrize(("module", "line"), [error[2:4] for error in TURN_MUTANTS])
def test_a_planted_error_changes_one_place(module: ModuleType, line: str) -> None:
    """A quick look at what the slow tests change."""
    assert inspect.getsource(module).count(line) == 1


def test_each_property_has_two_planted_errors() -> None:
    """And those that docs/protocol.md promises are among them."""
    planted = Counter(f"sessions: {name}" for name, *_ in SESSION_MUTANTS)
    planted += Counter(f"turns: {name}" for name, *_ in TURN_MUTANTS)
    assert min(planted.values()) >= 2
    page = (ROOT / "docs/protocol.md").read_text()
    rows = re.findall(r"\| (sessions|turns): ([\w, ]+) \|$", page, re.MULTILINE)
    assert {f"{kind}: {name}" for kind, names in rows for name in names.split(", ")} <= {*planted}
    for machine in (sessions, turns):
        kind, source = machine.__name__.rpartition(".")[2], inspect.getsource(machine)
        for name in re.findall(r"Broken\(\s*\"(\w+)\"", source):
            assert f"{kind}: {name}" in planted
