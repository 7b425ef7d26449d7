"""tests/explore searches every order in which the events of four small systems can happen: the dispatcher, the
sessions, a call and a weight update.

The search finds no broken property in the project's modules. A mutant is a module with a planted error, which is one
changed piece of code. The search finds every planted error. For each property there are at least two mutants that break
the property.
"""

import importlib.util
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import ROOT
from explore import dispatcher, sessions, turns, updates
from explore.conform import check_calls, conform, read_trace
from explore.dispatcher import MODES, Bounds, DispatchMachine
from explore.search import Broken, explore, show, walk
from explore.sessions import SessionBounds, SessionMachine
from explore.turns import TurnBounds, TurnMachine
from explore.updates import UpdateBounds, UpdateMachine
from runs import run

import cache
import calls.sessions
import calls.turn
import engine
import inference.servers
import inference.weights
import proxy
import rollout.dispatcher
import rollout.executor
import rollout.interaction
import rollout.rows
import run.start as start
import staleness
import train
from run.schedule import Schedule


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bounds", dispatcher.SMALL, ids=str)
def test_every_order_of_the_dispatchers_events_keeps_every_property(
    mode: str, bounds: Bounds
) -> None:
    """In every order of events, no group is too old, the counters agree, no task waits for ever, and the trainer does
    not wait for ever."""
    graph = explore(DispatchMachine(mode, bounds))
    assert any(state.version == bounds.versions for state in graph.states)
    assert len(graph) > 30
    dropped = any(state.state.manager.get_stats().dropped for state in graph.states)
    assert dropped == (mode == "drop" and bounds.eta > 0 and not bounds.kills), (
        "the bounds reach no dropped group"
    )


@pytest.mark.parametrize("bounds", sessions.SMALL, ids=str)
def test_every_order_of_the_sessions_events_keeps_every_property(bounds: SessionBounds) -> None:
    """In every order of events, the session table keeps exactly the sessions that are not exported, discarded or
    expired. If a session ends, the session's turns are stopped."""
    assert len(explore(SessionMachine(bounds), keep=False)) > 1000


@pytest.mark.parametrize("bounds", turns.SMALL, ids=str)
def test_every_order_of_a_calls_events_keeps_every_property(bounds: TurnBounds) -> None:
    """Each call is trained at most once, in whatever order calls, retries, failures, closed connections and ends of
    sessions happen. If no client waits for a generation any more, the engine ends the generation."""
    graph = explore(TurnMachine(bounds))
    assert len(graph) > 300
    reached = {name for state in graph.states for name, *_ in state.seen[2]}
    assert reached >= {"RUNNING", "FINISHED", "FAILED", "ABANDONED", "REPLACED"}
    assert "UNREAD" in reached or bounds != turns.SMALL[0]


@pytest.mark.parametrize("bounds", updates.SMALL, ids=str)
def test_every_order_of_an_updates_events_keeps_every_property(bounds: UpdateBounds) -> None:
    """Every request is answered in spite of weight updates and faults, and every token is labelled with the version
    that computed the token. If the trainer is killed, a new trainer uses the same servers."""
    assert len(explore(UpdateMachine(bounds), keep=False)) > (100 if bounds.deaths else 300)


def test_a_server_that_restarts_in_an_update_does_not_claim_the_new_version() -> None:
    """A server loads version 1 during an update, and restarts with version 0 before the update is over. After the
    update the server has the weights of version 0 and reports version 0."""
    on = (("trainer goes on",),)
    path = on * 5 + (("dies", 0), ("restarts", 0)) + on * 2
    state = UpdateMachine(UpdateBounds()).run(path)
    assert state.broken is None
    assert "0: weights 0, label 0" in state.text


WALKS = [
    *((DispatchMachine, (mode, bounds)) for bounds in dispatcher.FAR for mode in MODES),
    *((SessionMachine, (bounds,)) for bounds in sessions.FAR),
    *((TurnMachine, (bounds,)) for bounds in turns.FAR),
    *((UpdateMachine, (bounds,)) for bounds in updates.FAR),
]


@pytest.mark.parametrize(("machine", "bounds"), WALKS)
def test_random_walks_far_beyond_the_bounds_keep_every_property(
    machine: Callable[..., Any], bounds: Any
) -> None:
    """Long random series of events break no property. The bounds of the random walks are larger than the bounds of the
    exhaustive search."""
    length = 100 if machine in (TurnMachine, UpdateMachine) else 300
    assert len(walk(machine(*bounds), 0, length)) > 50


@pytest.mark.parametrize(
    "bounds", [bounds for bounds in dispatcher.FAR if bounds.rejections < 10**6], ids=str
)
def test_random_walks_mask_tokens_and_drop_groups(bounds: Bounds) -> None:
    """In the random walks, some groups become too old. With stale=mask the old tokens are masked, and with stale=drop
    the old groups are dropped."""
    masked = [world.masked for world in walk(DispatchMachine("mask", bounds), 0, 1000)]
    dropped = [
        world.state.manager.get_stats().dropped
        for world in walk(DispatchMachine("drop", bounds), 0, 1000)
    ]
    assert min(max(masked), max(dropped)) > 3


def mutant(module: ModuleType, line: str = "", changed: str = "") -> ModuleType:
    """Return a copy of a module in which one piece of code is changed."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert not line or source.count(line) == 1, f"{line!r} is not in {module.__name__} one time"
    spec = importlib.util.spec_from_loader(module.__name__, loader=None)
    assert spec is not None
    copy = importlib.util.module_from_spec(spec)
    exec(compile(source.replace(line, changed), module.__file__, "exec"), vars(copy))
    return copy


def find_error(machine: Any, name: str) -> str:
    """Explore a state machine whose modules have a planted error, and return the list of events that leads to the
    error. The planted error must break the property `name`."""
    with pytest.raises(Broken) as caught:
        explore(machine, keep=False)
    assert caught.value.name == name, caught.value
    assert "\n   1. " in str(caught.value)
    return str(caught.value)


DISPATCHER, STALENESS, EXECUTOR = rollout.dispatcher, staleness, rollout.executor
# Each row holds the property that a mutant breaks, the mode (rollout.stale), the module, the original code, and the
# changed code
MUTANTS = [
    (
        "gate",
        "wait",
        STALENESS,
        "(self.max_staleness + version + 1) *",
        "(self.max_staleness + version + 2) *",
    ),
    (
        "gate",
        "mask",
        STALENESS,
        "places - (stat.accepted + stat.running)",
        "places - stat.accepted",
    ),
    (
        "age",
        "drop",
        STALENESS,
        "return age <= self.max_staleness",
        "return age <= self.max_staleness + 1",
    ),
    (
        "age",
        "mask",
        STALENESS,
        "get_version() - self.max_staleness\n",
        "get_version() - self.max_staleness - 1\n",
    ),
    ("counters", "wait", DISPATCHER, "            self.manager.on_rollout_rejected(failed)\n", ""),
    ("counters", "drop", DISPATCHER, "                self.manager.on_rollout_dropped()\n", ""),
    (
        "counters",
        "wait",
        STALENESS,
        "consumer_batch_size + finished_untrained",
        "consumer_batch_size",
    ),
    (
        "counters",
        "wait",
        EXECUTOR,
        "on_version_recovered(version, len(kept))",
        "on_version_recovered(version)",
    ),
    ("counters", "drop", EXECUTOR, "self.dispatcher.restore(kept)", "pass"),
    ("counters", "wait", DISPATCHER, "self.manager.on_rollout_withdrawn()", "pass"),
    (
        "starvation",
        "wait",
        DISPATCHER,
        "islice(self.order.items(), count) if",
        "finished[:count] if",
    ),
    ("starvation", "drop", DISPATCHER, "finished[:count]", "finished[-count:]"),
    ("lost", "mask", DISPATCHER, "if data is None]):", "if data != self.order[task_id]]):"),
    ("lost", "mask", STALENESS, "get_version() - self.max_staleness\n", "get_version()\n"),
    (
        "deadlock",
        "wait",
        STALENESS,
        "(self.max_staleness + version + 1) *",
        "(self.max_staleness + 1) *",
    ),
    (
        "deadlock",
        "mask",
        STALENESS,
        "rollouts - stat.running\n",
        "rollouts - stat.running - stat.accepted\n",
    ),
]


@pytest.mark.parametrize(("name", "mode", "module", "line", "changed"), MUTANTS)
def test_a_planted_error_of_the_dispatcher_is_found_by_name(
    name: str, mode: str, module: ModuleType, line: str, changed: str
) -> None:
    """For each planted error, the search names the broken property and lists the events after which the property is
    broken."""
    wrong = {"dispatcher": DISPATCHER, "staleness": STALENESS, "executor": EXECUTOR}
    wrong[module.__name__.rpartition(".")[2]] = mutant(module, line, changed)
    kills = int("finished_untrained" in line or module is EXECUTOR)
    bounds = Bounds(
        versions=4, rejections=1 - kills, kills=kills, withdrawals=int("withdrawn" in line)
    )
    story = find_error(DispatchMachine(mode, bounds, **wrong), name)
    assert "1. start" in story
    assert "in  version 0" in story


# Each row holds the property that a mutant breaks, the original code of calls/sessions.py, and the changed code
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


# Each row holds the property that a mutant breaks, the bounds, the module, the original code, and the changed code
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
UPDATE = inference.servers, inference.weights, engine, start, train


def with_mutant(
    modules: Iterable[ModuleType], module: ModuleType, line: str, changed: str
) -> list[ModuleType]:
    """Copy the modules, and plant an error in the copy of `module`. Each copy uses the other copies in place of the
    original modules. In the list `modules`, each module must come after all modules that it imports."""
    copies: dict[ModuleType, ModuleType] = {}
    for original in modules:
        copies[original] = copy = (
            mutant(original, line, changed) if original is module else mutant(original)
        )
        for before, twin in copies.items():
            for name in vars(copy).keys() & vars(before).keys():
                if vars(copy)[name] is vars(before)[name]:
                    setattr(copy, name, vars(twin)[name])
        for name, value in list(vars(copy).items()):
            if isinstance(value, ModuleType) and value in copies:
                setattr(copy, name, copies[value])
    return list(copies.values())


@pytest.mark.runs
@pytest.mark.parametrize(("name", "bounds", "module", "line", "changed"), TURN_MUTANTS)
def test_a_planted_error_of_a_call_is_found_by_name(
    name: str, bounds: TurnBounds, module: ModuleType, line: str, changed: str
) -> None:
    """The search finds each error that is planted in the proxy, its turns or its conversation tree, and names the
    broken property."""
    find_error(TurnMachine(bounds, with_mutant(PROXY, module, line, changed)[-1]), name)


# Each row holds the property that a mutant breaks, the bounds, the module, the original code, and the changed code
SEGMENT = "segment = parse_segment(event, self.vocab_size)"
ONE, TWO, ABORT = (
    UpdateBounds(),
    UpdateBounds(servers=2, tokens=1),
    UpdateBounds(pause_mode="abort"),
)
NEVER = "await asyncio.Event().wait()"
UPDATE_MUTANTS = [
    (
        "label",
        ONE,
        engine,
        SEGMENT,
        f"{SEGMENT}; segment.output_versions = [0] * segment.output_len",
    ),
    (
        "label",
        ONE,
        engine,
        SEGMENT,
        f"{SEGMENT}; segment.output_versions = [oldest_allowed] * segment.output_len",
    ),
    ("falls", ONE, engine, "oldest_allowed = self.servers.newest", "oldest_allowed = 0"),
    ("falls", ONE, inference.servers, "min(versions) < sent_after", "max(versions) < 0"),
    (
        "kept",
        ONE,
        engine,
        SEGMENT,
        f"{SEGMENT}; segment.output_versions[:-1] = segment.output_versions[1:]",
    ),
    (
        "kept",
        ABORT,
        engine,
        "response.replace_from(start, segment)",
        "response.replace_from(start, segment); response.output_versions[:start] = segment.output_versions[:1] * start",
    ),
    (
        "lost",
        ABORT,
        engine,
        'interrupted = response.stop_reason == "abort" and',
        "interrupted = False and",
    ),
    (
        "lost",
        ABORT,
        engine,
        "response.replace_from(start, segment)",
        "response.replace_from(0, segment)",
    ),
    ("lost", ONE, engine, 'self.proxies.post_all("/set_version", {"version": version})', "pass"),
    ("has", ONE, inference.weights, 'f"{meta.version}-incomplete"', "str(meta.version)"),
    (
        "has",
        ONE,
        inference.weights,
        'body["weight_version"] = str(meta.version)',
        'body["weight_version"] = ""',
    ),
    ("has", ONE, train, "        self.actor.update_weights(meta)\n", ""),
    ("paused", TWO, engine, "{}, lost=True)\n        self._servers", "{})\n        self._servers"),
    (
        "paused",
        ONE,
        engine,
        'self.servers.post_all("/continue_generation", {}, timeout=5.0, lost=True)',
        "pass",
    ),
    (
        "paused",
        UpdateBounds(tokens=1, deaths=1),
        start,
        "    rollout.resume()\n    with suppress",
        "    with suppress",
    ),
    (
        "deadlock",
        UpdateBounds(tokens=1, pause_mode="abort"),
        engine,
        "await self.sleep(backoff(empty_aborts, *EMPTY_ABORT_WAIT))",
        NEVER,
    ),
    (
        "deadlock",
        UpdateBounds(tokens=1),
        engine,
        "await self.sleep(backoff(failures, *FAILURE_WAIT) * random.uniform(0.5, 1.0))",
        NEVER,
    ),
]


@pytest.mark.runs
@pytest.mark.parametrize(("name", "bounds", "module", "line", "changed"), UPDATE_MUTANTS)
def test_a_planted_error_of_an_update_is_found_by_name(
    name: str, bounds: UpdateBounds, module: ModuleType, line: str, changed: str
) -> None:
    """The search finds each error that is planted in the engine, in the list of servers or in the order of the calls of
    a weight update. For each planted error the search names the broken property."""
    servers, _, wrong_engine, wrong_start, wrong_train = with_mutant(UPDATE, module, line, changed)
    modules = {
        "servers": servers,
        "engine": wrong_engine,
        "start": wrong_start,
        "train": wrong_train,
    }
    find_error(UpdateMachine(bounds, modules), name)


@pytest.mark.parametrize(
    ("module", "line"), [error[2:4] for error in TURN_MUTANTS + UPDATE_MUTANTS]
)
def test_a_planted_error_changes_one_place(module: ModuleType, line: str) -> None:
    """The slow tests plant an error by replacing a piece of code. This quick test checks that each piece of code to be
    replaced occurs in its module exactly once."""
    assert inspect.getsource(module).count(line) == 1


def test_each_property_has_two_mutants() -> None:
    """docs/protocol.md names every property that a state machine of tests/explore can report as broken. Each property
    has at least two mutants."""
    mutants = Counter(f"dispatcher: {name}" for name, *_ in MUTANTS)
    mutants += Counter(f"sessions: {name}" for name, *_ in SESSION_MUTANTS)
    mutants += Counter(f"turns: {name}" for name, *_ in TURN_MUTANTS)
    mutants += Counter(f"updates: {name}" for name, *_ in UPDATE_MUTANTS)
    table = re.findall(
        r"\| (\w+): ([\w, ]+) \|$", (ROOT / "docs/protocol.md").read_text(), re.MULTILINE
    )
    named = {f"{machine}: {name}" for machine, names in table for name in names.split(", ")}
    assert named == mutants.keys()
    assert min(mutants.values()) >= 2
    for machine in (dispatcher, sessions, turns, updates):
        kind, source = machine.__name__.rpartition(".")[2], inspect.getsource(machine)
        reported = set(re.findall(r"(?:Broken\(|self\.fail\()\"(\w+)\"", source))
        assert {f"{kind}: {name}" for name in reported} <= named


def test_equal_situations_are_visited_once() -> None:
    """If two orders of events lead to one state, `show` draws the state only once."""
    graph = explore(DispatchMachine("wait", dispatcher.SMALLEST))
    drawn = show(graph)
    assert drawn.count("fail 0 -> 3") == drawn.count("reject 0 -> 3") == 1
    assert "take -> 1" not in drawn, "an event that changes nothing is drawn"
    assert all(show(explore(DispatchMachine(mode, dispatcher.SMALLEST))) == drawn for mode in MODES)
    assert len([line for line in drawn.splitlines() if "->" not in line]) == len(graph) == 10


# ---- the traces of real runs


def swapped(events: list[Any], first: int, second: int) -> list[Any]:
    """Return the events of a trace, with two events swapped."""
    changed = [*events]
    changed[first], changed[second] = events[second], events[first]
    return changed


@pytest.mark.runs
@pytest.mark.parametrize(("mode", "batch"), [("wait", 3), ("drop", 1), ("mask", 1)])
def test_the_trace_of_a_run_is_a_walk_of_the_machine(tmp_path: Path, mode: str, batch: int) -> None:
    """The dispatcher's state machine can repeat each event in the trace of a real run, and each event has the result
    that the trace records. `conform` detects four planted changes of the trace: two groups consumed in the opposite
    order, a group that starts before the gate opens, a group that is consumed twice, and a lost event."""
    words = [
        "--config",
        "configs/maze.yaml",
        f"rollout.stale={mode}",
        f"train_dataset.batch_size={batch}",
    ]
    words += [
        "gconfig.n_samples=2",
        "gconfig.max_new_tokens=100",
        "actor.ppo_n_minibatches=1",
        "max_steps=8",
    ]
    words += ["rollout.max_head_offpolicyness=1", "should_accept_fn=walkers.has_signal"]
    run(tmp_path, *words)
    folder = tmp_path / "e" / "t"
    assert conform(folder) > 8 * batch * 4
    events, groups = read_trace(folder)
    consumed = [k for k, (name, _) in enumerate(events) if name == "consume"]
    starts = [k for k, (name, _) in enumerate(events) if name == "start"]
    accepted = events.index(("accept", events[consumed[0]][1]))
    early = [
        *events[: starts[1]],
        events[starts[-1]],
        *events[starts[1] : starts[-1]],
        *events[starts[-1] + 1 :],
    ]
    planted = [
        swapped(events, consumed[0], consumed[-1]),
        early,
        [*events[: consumed[-1]], events[consumed[0]], *events[consumed[-1] :]],
        events[:accepted] + events[accepted + 1 :],
    ]
    for trace in planted:
        with pytest.raises(Broken):
            conform(folder, (trace, groups))


def test_a_falling_version_is_found_in_a_schedule() -> None:
    """The versions of a call never fall, and they lie between the version at the start of its group and the version at
    which the group is consumed. `check_calls` raises Broken if the versions of a call fall, or if a version of a call
    is outside the range of the call's group."""
    for spans, begin, consumed in (
        ([[2, 5, ""], [1, 9, ""]], 0, 3),
        ([[1, 5, ""]], 2, 3),
        ([[4, 5, ""]], 2, 3),
    ):
        schedule = Schedule("", starts={7: begin}, calls={7: {"7-0.0": {"spans": spans}}})
        with pytest.raises(Broken, match="is consumed in"):
            check_calls(schedule, {7: consumed})
    check_calls(
        Schedule("", starts={7: 1}, calls={7: {"7-0.0": {"spans": [[1, 5, ""], [3, 9, ""]]}}}),
        {7: 3},
    )
