"""Claim: the simulated duration of a run differs from the measured duration by at most 10 %.

    python bench/simulate.py                    # compare with the runs of docs/simulate.json
    python bench/simulate.py --check RUN ...    # compare with other finished runs of train.py
    python bench/simulate.py --record RUN ...   # first store finished runs in docs/simulate.json

This is a discrete-event simulation in virtual time. A queue holds the next event of each server and
of the trainer, and the clock jumps from event to event. Two classes are those of a real run:
StalenessManager (staleness.py) limits the number of groups that may start, and DispatchState
(rollout/dispatcher.py) chooses the groups that start, forms the batches, and decides which tokens
are too old for the loss. No model runs: answers, training steps and weight updates only take
virtual time. bench/clusters.py simulates clusters of GPUs, and compares the rules by which a
training step chooses its groups.

**Servers.** A server generates one token for each of its n running sequences in `a + b n` seconds.
At most `slots` sequences run on a server, and all other sequences wait in order of arrival. Each
sequence has a length in tokens. A group is finished when all its sequences are finished.

**Trainer.** A step waits for B groups, trains for some seconds, and updates the weights. With
`interrupt`, a weight update stops each server for `update` seconds, and then its running sequences
continue. Without `interrupt`, each server starts no new sequences, lets its running ones finish,
and then loads the weights. A step ends when the last server has loaded the weights.

**A finished run** can supply the lengths of sequences and the times of steps. Its simulation has
one sequence per group. The sequence has as many tokens as the group of the run took seconds. A
server generates one token of each sequence per second, for any number of sequences (a = 1, b = 0).
The length of group k is drawn from those of groups near k, because lengths change during a run. In
the same way, the training and update times of step k are drawn from those of steps near k.
"""

import argparse
import heapq
import json
import math
import random
import sys
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rollout.dispatcher import DispatchState  # noqa: E402
from staleness import StalenessManager  # noqa: E402

RUNS = ROOT / "docs" / "simulate.json"
Versions = Counter[int]  # for each version, the number of tokens of this version in a group
Draw = Callable[
    [random.Random, int], float
]  # function of (rng, k) that draws a value for group or step k


@dataclass(frozen=True)
class Setup:
    """The settings of a simulation. Times are seconds."""

    batch: int  # prompt groups in a batch (B)
    length: Draw  # number of tokens of a sequence in group k
    train: Callable[
        [random.Random, int, float], float
    ]  # (rng, step, tokens) -> seconds of a training step
    update: Callable[
        [random.Random, int, int], float
    ]  # (rng, step, n) -> seconds to update a server with n sequences
    rest: Draw = lambda rng, step: 0.0  # seconds between a weight update and the next step
    eta: int = 0
    members: int = 1  # sequences of a group
    servers: int = 1
    slots: float = math.inf  # largest number of sequences that run on a server at once
    a: float = 1.0  # n running sequences generate one token each in a + b n seconds
    b: float = 0.0
    stale: str = "wait"  # wait, window, drop, mask or unbounded
    interrupt: bool = True
    concurrent: int | None = None  # max_concurrent_rollouts, or None for (eta + 1) B
    steps: int = 24
    skipped: int = 0  # the results exclude this number of steps at the start of the run


class Task:
    """A simulated group: `left` counts its unfinished sequences, and `tokens` its tokens by
    version."""

    def __init__(self, task_id: int, members: int) -> None:
        self.task_id, self.left, self.tokens = task_id, members, Versions()


class Server:
    """A simulated server with a counter `ticks` of its decoding steps. In one tick each running
    sequence generates one token."""

    def __init__(self, setup: Setup) -> None:
        self.s = setup
        self.ticks, self.since = (
            0.0,
            0.0,
        )  # the server has made `ticks` decoding steps at the time `since`
        self.running: list[
            tuple[float, int, float, Task]
        ] = []  # heap of (last tick, serial number, first tick, group)
        self.waiting: deque[tuple[int, float, Task]] = deque()  # (serial number, length, group)
        self.begins = [0.0]  # the tick at which each version begins
        self.stopped = self.draining = (
            False  # `draining`: the server finishes its sequences before it loads weights
        )
        self.busy = 0.0  # seconds in which at least one sequence ran
        self.stamp = (
            0  # increased by `plan` and `load`; the simulation ignores an event with an older stamp
        )

    def advance(self, now: float) -> None:
        """Advance the tick counter to the current virtual time."""
        if self.running and not self.stopped:
            self.ticks += (now - self.since) / (self.s.a + self.s.b * len(self.running))
            self.busy += now - self.since
        self.since = now

    def admit(self) -> float:
        """Admit waiting sequences. Return the seconds until the next sequence finishes, or infinity
        if none runs."""
        while (
            self.waiting
            and len(self.running) < self.s.slots
            and not self.stopped
            and not self.draining
        ):
            number, length, task = self.waiting.popleft()
            heapq.heappush(self.running, (self.ticks + length, number, self.ticks, task))
        if not self.running or self.stopped:
            return math.inf
        return max(0.0, self.running[0][0] - self.ticks) * (self.s.a + self.s.b * len(self.running))

    def finish(self) -> list[Task]:
        """Finish the sequences that have generated all their tokens, and return the groups whose
        last sequence has finished."""
        complete = []
        while self.running and self.running[0][0] <= self.ticks + 1e-6:  # allows for rounding
            last, _, first, task = heapq.heappop(self.running)
            v = bisect_right(self.begins, first) - 1
            while v < len(self.begins) and self.begins[v] < last:
                end = self.begins[v + 1] if v + 1 < len(self.begins) else last
                task.tokens[v] += min(end, last) - max(self.begins[v], first)  # type: ignore[assignment]
                v += 1
            task.left -= 1
            if not task.left:
                complete.append(task)
        return complete


@dataclass(eq=False)
class WindowState(DispatchState):
    """The dispatcher's state for the order `window`. A step takes the finished groups that started
    first, and leaves unfinished groups to later steps.

    The deadline of a group is the version at its start plus eta. A step at version v takes a batch
    only if later steps can consume every remaining group by its deadline. So for every D >= v, at
    most (D - v) B remaining groups may have a deadline of D or less: the steps at versions v + 1 to
    D consume no more.
    """

    slack: int = 0  # number of versions by which eta exceeds the gate's staleness limit
    deadlines: dict[int, int] = field(default_factory=dict)

    def start(self) -> list[Task]:
        started = super().start()
        deadline = self.gate.version_provider.get_version() + self.gate.max_staleness + self.slack
        self.deadlines.update((task.task_id, deadline) for task in started)
        return started

    def next_groups(self, count: int) -> dict[int, Versions]:
        finished = ((task_id, data) for task_id, data in self.order.items() if data is not None)
        batch = dict(islice(finished, count))
        left = sorted(self.deadlines[task_id] for task_id in self.order if task_id not in batch)
        v = self.gate.version_provider.get_version()
        feasible = all(k < (deadline - v) * count for k, deadline in enumerate(left))
        return batch if len(batch) == count and feasible else {}


@dataclass
class Result:
    """The measurements of a simulation."""

    # Each step has four times: when the trainer begins to wait, begins to train, begins the update,
    # and ends it.
    steps: list[list[float]] = field(default_factory=list)
    batches: list[Versions] = field(
        default_factory=list
    )  # for each step, the number of trained tokens of each version
    groups: dict[int, list[float]] = field(
        default_factory=dict
    )  # the times at which each group starts and finishes
    masked: float = 0.0  # number of tokens that `mask` excluded from the loss
    dropped: int = 0
    busy: float = 0.0  # share of the time in which a server generates, averaged over the servers

    @property
    def ends(self) -> list[float]:
        """The time at which each step ends."""
        return [times[3] for times in self.steps if len(times) == 4]

    @property
    def waited(self) -> float:
        """The seconds that the trainer waited."""
        return sum(times[1] - times[0] for times in self.steps)

    @property
    def lags(self) -> list[tuple[float, int]]:
        """The mean and the largest lag of each step's trained tokens."""
        return [
            (sum((step - v) * n for v, n in batch.items()) / sum(batch.values()), step - min(batch))
            for step, batch in enumerate(self.batches)
        ]


class Simulation:
    """A simulated run in virtual time. The gate reads its version with `get_version`."""

    def __init__(self, setup: Setup, seed: int = 0) -> None:
        self.s, self.rng, self.now, self.version = setup, random.Random(seed), 0.0, 0
        self.gate, self.state = self.make_gate(setup)
        self.servers = [Server(setup) for _ in range(setup.servers)]
        self.next_server = cycle(self.servers)
        self.numbers, self.task_ids = count(), count()
        self.events: list[
            tuple[float, int, Any, int]
        ] = []  # (time, serial number, server or action, stamp)
        self.outdated: set[Server] = set()  # servers without the newest weights
        self.training, self.changed = False, False
        self.result = Result(steps=[[0.0]])

    def make_gate(self, s: Setup) -> tuple[StalenessManager, DispatchState]:
        """Return the gate (a StalenessManager) and the dispatcher's state (a DispatchState, or in
        mode window a WindowState).

        In mode unbounded, a group may have any age.
        """
        slack = s.eta // 2 if s.stale == "window" else 0
        concurrent = s.concurrent or (s.eta + 1) * s.batch
        gate = StalenessManager(self, concurrent, s.batch, s.eta - slack)

        def head_version(tokens: Versions) -> int | None:
            return None if s.stale == "unbounded" else min(min(tokens) + slack, self.version)

        def without_older(tokens: Versions, oldest: int) -> Versions | None:
            kept = Versions({v: n for v, n in tokens.items() if v >= oldest})
            self.result.masked += sum(tokens.values()) - sum(kept.values())
            return kept or None

        def trace(event: str, task_id: int) -> None:
            if event in ("start", "finish"):
                self.result.groups.setdefault(task_id, []).append(self.now)

        options: dict[str, Any] = {
            "max_failures": 10**9,
            "without_older": without_older,
            "trace": trace,
        }
        if s.stale == "window":
            return gate, WindowState(gate, head_version, stale="wait", slack=slack, **options)
        stale: Any = "drop" if s.stale == "unbounded" else s.stale
        return gate, DispatchState(gate, head_version, stale=stale, **options)

    def get_version(self) -> int:
        return self.version

    # ---- Groups and steps

    def start_groups(self) -> None:
        """Start the groups that the gate admits. The sequences are assigned to the servers in
        round-robin order."""
        touched = dict[Server, None]()
        for _ in range(self.gate.get_pending_limit() - len(self.state.pending)):
            self.state.enqueue(Task(next(self.task_ids), self.s.members))
        for task in self.state.start():
            for server in islice(self.next_server, self.s.members):
                server.waiting.append(
                    (next(self.numbers), self.s.length(self.rng, task.task_id), task)
                )
                touched[server] = None
        for server in touched:
            self.plan(server)

    def take_batch(self) -> None:
        """If a batch is ready, start a training step.

        `take` is slow, so it is called only if a batch may be ready.
        """
        finished = self.gate.get_stats().accepted - self.version * self.s.batch
        head = next(iter(self.state.order.values()), None)
        if finished < self.s.batch or (self.s.stale == "wait" and head is None):
            return
        if taken := self.state.take(self.s.batch):
            batch = sum(taken, Versions())
            self.result.batches.append(batch)
            self.result.steps[-1].append(self.now)
            self.training = True
            self.at(self.s.train(self.rng, self.version, sum(batch.values())), self.end_training)

    def end_training(self) -> None:
        """Begin the weight update: stop all servers, or let the running sequences of each server
        finish."""
        self.result.steps[-1].append(self.now)
        self.outdated = set(self.servers)
        for server in self.servers:
            server.draining = True
            if self.s.interrupt or not server.running:
                self.load(server)

    def load(self, server: Server) -> None:
        """Stop a server, and let it load the new weights."""
        server.advance(self.now)
        server.draining, server.stopped = False, True
        server.stamp += (
            1  # cancels the next event: no sequence finishes while the server is stopped
        )
        self.at(
            self.s.update(self.rng, self.version, len(server.running)), lambda: self.loaded(server)
        )

    def loaded(self, server: Server) -> None:
        """Let one server continue with the new weights. The step ends when the last server
        continues, and then more groups may start."""
        server.advance(self.now)
        server.stopped = False
        server.begins.append(server.ticks)
        self.plan(server)
        self.outdated.discard(server)
        if not self.outdated:
            self.version += 1
            self.changed = True
            self.result.steps[-1].append(self.now)
            self.at(self.s.rest(self.rng, self.version), self.end_rest)

    def end_rest(self) -> None:
        """Let the trainer wait for the next batch."""
        self.training, self.changed = False, True
        self.result.steps.append([self.now])

    # ---- Scheduling of events

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule an action for `seconds` after the present virtual time."""
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), action, 0))

    def plan(self, server: Server) -> None:
        """Admit waiting sequences, and schedule the event at which the server's next sequence
        finishes."""
        server.advance(self.now)
        server.stamp += 1
        if (seconds := server.admit()) < math.inf:
            heapq.heappush(
                self.events, (self.now + seconds, next(self.numbers), server, server.stamp)
            )

    def finish_sequences(self, server: Server) -> None:
        """Finish the sequences of a server that have generated all their tokens."""
        server.advance(self.now)
        for task in server.finish():
            self.state.finish(task.task_id, task.tokens)
            self.changed = True
        if server.draining and not server.running:
            self.load(server)
        else:
            self.plan(server)

    def run(self) -> Result:
        self.start_groups()
        while self.version < self.s.steps:
            self.now, _, subject, stamp = heapq.heappop(self.events)
            if not isinstance(subject, Server):
                subject()
            elif stamp == subject.stamp:
                self.finish_sequences(subject)
            if self.changed:  # a group or a step has just ended
                self.changed = False
                if not self.training:
                    self.take_batch()
                self.start_groups()
        for server in self.servers:
            server.advance(self.now)
        self.result.busy = fmean(server.busy for server in self.servers) / self.now
        self.result.dropped = self.gate.get_stats().dropped
        return self.result


def simulate(
    make: Callable[..., Setup], *args: Any, seeds: Iterable[int] = (0,)
) -> dict[str, float]:
    """Simulate the setup `make(*args)` with each seed, and return medians over the seeds.

    The returned dictionary has these keys:

        `step_s` and `total_s` are the seconds of one step and of all steps. `tokens_s` is the
        number of trained tokens per second. `servers_busy` is the share of the time in which a
        server generates, averaged over the servers. `trainer_busy` is the share of the time in
        which the trainer does not wait for a batch. `lag_mean` and `lag_max` are the mean and the
        largest lag of the trained tokens. `masked` is the share of the tokens that `mask` excludes
        from the loss. `dropped` is the number of dropped groups.
    """
    setup = make(*args)
    results = [Simulation(make(*args), seed).run() for seed in seeds]
    begins = [r.ends[setup.skipped - 1] if setup.skipped else 0.0 for r in results]
    counted = setup.steps - setup.skipped
    step_s = median((r.ends[-1] - begin) / counted for r, begin in zip(results, begins))
    trained = [sum(sum(batch.values()) for batch in r.batches) for r in results]
    return {
        "step_s": step_s,
        "total_s": median(r.ends[-1] for r in results),
        "tokens_s": median(trained) / setup.steps / step_s,
        "servers_busy": median(r.busy for r in results),
        "trainer_busy": median(1 - r.waited / r.ends[-1] for r in results),
        "lag_mean": median(fmean(mean for mean, _ in r.lags[setup.skipped :]) for r in results),
        "lag_max": max(largest for r in results for _, largest in r.lags),
        "masked": median(r.masked / (r.masked + all_) for r, all_ in zip(results, trained)),
        "dropped": median(r.dropped for r in results),
    }


# ---------------------------------------------------------------- finished runs


def record(folder: Path) -> dict[str, Any]:
    """Read a finished run. Return its settings, and the seconds of its groups and of the parts of
    its steps."""
    import yaml

    from extras import read_records

    config = yaml.safe_load((folder / "config.yaml").read_text())
    trace, lines = read_records(folder / "trace.json"), read_records(folder / "metrics.jsonl")
    spans = {name: [s for s in trace if s.get("name") == name] for name in ("rollout_wait", "sync")}
    ends = {name: [(s["ts"] + s["dur"]) / 1e6 for s in found] for name, found in spans.items()}
    begins = {name: [s["ts"] / 1e6 for s in found] for name, found in spans.items()}
    groups: dict[str, list[float]] = {}
    for event in trace:
        if event.get("ph") in ("b", "e"):
            groups.setdefault(event["id"], []).append(event["ts"] / 1e6)
    pauses = list(zip(begins["sync"], ends["sync"]))

    def worked(begin: float, end: float) -> float:
        """Return the seconds from `begin` to `end`, without the weight updates between them."""
        return end - begin - sum(max(0.0, min(end, b) - max(begin, a)) for a, b in pauses)

    return {
        "name": f"{config['experiment_name']}, eta {config['rollout']['max_head_offpolicyness']}",
        "eta": config["rollout"]["max_head_offpolicyness"],
        "batch": config["train_dataset"]["batch_size"],
        "members": config["gconfig"]["n_samples"],
        "concurrent": config["rollout"]["max_concurrent_rollouts"],
        "groups": [round(worked(*times), 3) for times in groups.values() if len(times) == 2],
        "train": [round(b - a, 3) for a, b in zip(ends["rollout_wait"], begins["sync"])],
        "update": [round(b - a, 3) for a, b in pauses],
        "rest": [round(b - a, 3) for a, b in zip(ends["sync"], begins["rollout_wait"][1:])],
        "seconds": round(ends["sync"][-1] - begins["rollout_wait"][0], 3),
        "lag_mean": round(fmean(line["staleness_mean"] for line in lines), 3),
        "lag_max": int(max(line["staleness_max"] for line in lines)),
        "waited": round(sum(s["dur"] for s in spans["rollout_wait"]) / 1e6, 3),
    }


def blocks(values: list[float], size: int, width: int = 2) -> Draw:
    """Return a function that draws a value for group or step k from `values` by a block bootstrap.

    A block has `size` successive values. The bootstrap replaces each block by a random block that
    is at most `width` blocks away. The groups of one batch run at the same time on the same
    machine, so their times are similar. Independent draws would make the longest time of a
    simulated batch too long, so the times of a block stay together.
    """
    shifts: dict[int, int] = {}
    most = max(0, len(values) // size - 1)  # index of the last complete block of values

    def draw(rng: random.Random, k: int) -> float:
        block = k // size
        shift = shifts.setdefault(block, rng.randint(-width, width))
        return values[min(most, max(0, block + shift)) * size + k % size]

    return draw


def replay(run: dict[str, Any]) -> Setup:
    """Return a setup that draws its lengths and times from those of a finished run."""
    train, update = blocks(run["train"], 1), blocks(run["update"], 1)
    return Setup(
        batch=run["batch"],
        length=blocks(run["groups"], run["batch"]),
        train=lambda rng, step, tokens: train(rng, step),
        update=lambda rng, step, n: update(rng, step),
        rest=blocks(run["rest"], 1),
        eta=run["eta"],
        concurrent=run["concurrent"],
        steps=len(run["update"]),
    )


def row(*cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("%", " %") for cell in cells) + " |"


def head(*cells: Any) -> list[str]:
    """Return the first two lines of a Markdown table."""
    return [row(*cells), "|---" * len(cells) + "|"]


def check(runs: list[dict[str, Any]]) -> list[str]:
    """Return a table that compares the simulation with finished runs."""
    lines = head(
        "run", "steps", "", "samples/s", "waiting of the trainer", "mean lag", "largest lag"
    )
    for run in runs:
        found, steps = simulate(replay, run, seeds=range(9)), len(run["update"])
        samples = steps * run["batch"] * run["members"]
        real = (
            samples / run["seconds"],
            run["waited"] / run["seconds"],
            run["lag_mean"],
            run["lag_max"],
        )
        ours = (
            samples / found["total_s"],
            1 - found["trainer_busy"],
            found["lag_mean"],
            found["lag_max"],
        )
        for who, (rate, waiting, mean, most) in (("measured", real), ("simulated", ours)):
            name = (run["name"], steps) if who == "measured" else ("", "")
            lines.append(
                row(*name, who, f"{rate:.2f}", f"{waiting:.0%}", f"{mean:.2f}", f"{most:.0f}")
            )
        lines.append(
            row("", "", "ratio", f"{ours[0] / real[0]:.3f}", "", f"{ours[2] - real[2]:+.2f}", "")
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", type=Path, nargs="+", metavar="RUN", help="compare with these finished runs"
    )
    parser.add_argument(
        "--record",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="keep the times of these finished runs",
    )
    args = parser.parse_args()
    if args.record:
        RUNS.write_text(
            "[\n" + ",\n".join(json.dumps(record(folder)) for folder in args.record) + "\n]\n"
        )
    runs = [record(folder) for folder in args.check] if args.check else json.loads(RUNS.read_text())
    table = check(runs)
    print("\n".join(table))


if __name__ == "__main__":
    main()
