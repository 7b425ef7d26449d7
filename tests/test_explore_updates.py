"""tests/explore runs the shipped engine through every order of events around a weight update.

It finds no broken property, but it finds every error that is planted into these modules.
"""

from types import ModuleType

import pytest
from explore import updates
from explore.planted import find_error, with_mutant
from explore.search import explore, walk
from explore.updates import UpdateBounds, UpdateMachine

import engine as ENGINE
import inference.servers as SERVERS
import inference.weights as WEIGHTS
import train as TRAIN


@pytest.mark.parametrize("bounds", updates.SMALL, ids=str)
def test_every_order_of_events_keeps_every_property(bounds: UpdateBounds) -> None:
    """Servers may die, connections may break, and answers may be lost."""
    assert len(explore(UpdateMachine(bounds), keep=False)) > 250


@pytest.mark.parametrize("bounds", updates.FAR, ids=str)
def test_random_walks_far_beyond_the_bounds_keep_every_property(bounds: UpdateBounds) -> None:
    """The walks have three servers and four updates."""
    assert len(walk(UpdateMachine(bounds), 0, 100)) > 50


ONE, ABORT = UpdateBounds(tokens=1), UpdateBounds(pause_mode="abort")
TWO = UpdateBounds(1, 2, 2, 1, "abort")
SEGMENT = "segment = parse_segment(answer)"
ALL_ZERO = "segment.output_versions = [0] * segment.output_len"
TELLS_THE_PROXY = 'Servers(*self.proxy).post_all("/set_version", {"version": version})'
NEVER = "await asyncio.Event().wait()"
MUTANTS = [  # property, bounds, module, code, changed code
    ("label", ONE, ENGINE, SEGMENT, f"{SEGMENT}; {ALL_ZERO}"),
    ("label", ONE, SERVERS, "<= v <= self.trainer_version", "<= v"),
    ("falls", TWO, ENGINE, "at_least = self.servers.newest", "at_least = 0"),
    ("falls", TWO, SERVERS, "not at_least <= v", "not 0 <= v"),
    ("lost", ABORT, ENGINE, 'if response.stop_reason != "abort" or', "if True or"),
    ("lost", ONE, ENGINE, "failures > self.request_retries", "failures >= self.request_retries"),
    ("lost", ONE, ENGINE, "failures > self.request_retries", "failures > 9"),
    ("lost", ONE, ENGINE, TELLS_THE_PROXY, "pass"),
    ("has", ONE, WEIGHTS, 'f"{meta.version}-incomplete"', "str(meta.version)"),
    ("has", ONE, WEIGHTS, '"weight_version": str(meta.version)', '"weight_version": ""'),
    ("has", ONE, SERVERS, "if failed := [", "if failed := [][:0] and ["),
    ("has", ONE, TRAIN, "        actor.update_weights(meta)\n", ""),
    ("paused", ONE, ENGINE, 'post_all("/continue_generation", {}, timeout=5.0)', "addresses"),
    ("paused", ONE, ENGINE, "self._paused = True", "pass"),
    ("deadlock", ABORT, ENGINE, "await self.sleep(0.5)", NEVER),
    ("deadlock", ONE, ENGINE, "await self.sleep(failures * random.uniform(0.5, 1.0))", NEVER),
]


@pytest.mark.parametrize(("name", "bounds", "module", "line", "changed"), MUTANTS)
def test_a_planted_error_is_found_by_name(
    name: str, bounds: UpdateBounds, module: ModuleType, line: str, changed: str
) -> None:
    """The search names the broken property, and lists the events that break it."""
    copies = with_mutant((SERVERS, WEIGHTS, ENGINE, TRAIN), module, line, changed)
    servers, _, engine, train = copies
    find_error(UpdateMachine(bounds, {"servers": servers, "engine": engine, "train": train}), name)
