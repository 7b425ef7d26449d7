"""tests/explore runs the shipped calls, sessions and tree through every order of events in a small
system.

It finds no broken property, but it finds every error that is planted into these modules.
"""

import inspect
from types import ModuleType

import pytest
from explore import turns
from explore.planted import find_error, with_mutant
from explore.search import explore, walk
from explore.turns import TurnBounds, TurnMachine

import cache
import calls.prompts
import calls.sessions
import calls.turn
import proxy


@pytest.mark.parametrize("bounds", turns.SMALL, ids=str)
def test_every_order_of_a_calls_events_keeps_every_property(bounds: TurnBounds) -> None:
    """Whatever order calls, retries, failures and hang-ups come in, a call is trained at most once
    and a reply that was read is exported."""
    graph = explore(TurnMachine(bounds))
    assert len(graph) > 200
    reached = {name for state in graph.states for name, *_ in state.seen[2]}
    assert reached == {"running", "finished", "failed"}


def test_random_walks_far_beyond_the_bounds_keep_every_property() -> None:
    """The walks are long series of random events in larger systems."""
    for bounds in turns.FAR:
        assert len(walk(TurnMachine(bounds), 0, 100)) > 40


X, Y, WX, WX3 = (TurnBounds(*each) for each in (("x", 2), ("y", 2), ("wx", 2), ("wx", 3)))
XZ = TurnBounds("xz", 2, rewards=True)
LAST_REPLY = "return self.task.result() and self.session.cache.finished()[-1].reply"
TOO_SHORT = "return self.extend(parent.tokens, [],"
# property, bounds, module, code, planted error
MUTANTS: list[tuple[str, TurnBounds, ModuleType, str, str]] = [
    ("once", X, proxy, "session.turns.get(key) if is_retry else None", "None"),
    ("once", X, proxy, "session.turns.get(key) if is_retry else", "session.turns.get(key) or"),
    ("once", X, proxy, "if turn is None or turn.failed:", "if turn is None:"),
    ("once", WX3, proxy, "hash((protocol, raw))", "hash(protocol)"),
    ("ended", X, proxy, "session.receive(len(chunk))", "pass"),
    ("ended", X, calls.sessions, "        if self.ended:\n", "        if False:\n"),
    ("read", X, cache, "rows = self.finished() if", "rows = self.finished()[1:] if"),
    ("read", X, cache, "if interaction.complete]", "if interaction.reward]"),
    ("mixed", XZ, calls.prompts, "return self.extend(parent.tokens, new,", TOO_SHORT),
    ("mixed", WX, calls.turn, "return self.task.result()", LAST_REPLY),
    ("stopped", X, calls.turn, "        self.task.cancel()\n", ""),
    ("stopped", X, calls.turn, "if not self.listeners and", "if False and"),
    ("answered", X, calls.turn, "both = {self.task, hangup}", "both = {hangup}"),
    ("answered", Y, calls.turn, "self.listeners += 1", "self.listeners += 2"),
    ("tree", X, calls.turn, "        self.session.cache.discard(self.interaction)\n", ""),
    ("tree", X, calls.turn, "if not task.exception()", "if task.exception() or True"),
    ("rewards", XZ, cache, "+ gamma * fmean(", "+ fmean("),
    ("rewards", XZ, cache, "below[read].append", "below[call].append"),
    ("deadlock", X, proxy, "        del self.sessions[session.session_id]\n", ""),
    ("deadlock", X, calls.sessions, "        self.ended = True\n        self.turns.clear()", ""),
    ("tokens", XZ, cache, '"logprobs": response.', '"logprobs": last.'),
    ("tokens", XZ, cache, '"versions": response.', '"versions": last.'),
    ("tokens", XZ, cache, "[(self, True)]", "[(t, True) for t in (self.parent, self) if t]"),
]
PROXY = cache, calls.prompts, calls.sessions, calls.turn, proxy


@pytest.mark.runs
@pytest.mark.parametrize(("name", "bounds", "module", "line", "changed"), MUTANTS)
def test_a_planted_error_of_a_call_is_found_by_name(
    name: str, bounds: TurnBounds, module: ModuleType, line: str, changed: str
) -> None:
    """The search names the property that an error in the proxy, the turns or the tree breaks."""
    find_error(TurnMachine(bounds, with_mutant(PROXY, module, line, changed)[-1]), name)


@pytest.mark.parametrize(("module", "line"), [error[2:4] for error in MUTANTS])
def test_a_planted_error_changes_one_place(module: ModuleType, line: str) -> None:
    """The text that a planted error replaces occurs once in its module, so the slow tests above can
    plant it."""
    assert inspect.getsource(module).count(line) == 1
