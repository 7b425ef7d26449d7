"""Claim: the simulation agrees with finished runs within 10 %; if a few groups are very long, order of start is costly.

    python bench/simulate.py                        the tables of docs/simulate.md
    python bench/simulate.py --cluster              tables and a figure (simulate.png) of clusters, in some minutes
    python bench/simulate.py --check RUN ...        compare the simulation with finished runs of train.py
    python bench/simulate.py --record RUN ...       keep the times of finished runs in docs/simulate.json, then compare

This is a discrete-event simulation in virtual time. A queue holds the next event of each server and of the trainer, and
the clock jumps from event to event. The shipped classes make all decisions. StalenessManager (staleness.py) says how
many groups may start. DispatchState (rollout/dispatcher.py) chooses the groups that start, forms the batches and
decides about old tokens. Only time is simulated. docs/simulate.md explains the results.

**Servers.** A server generates one token for each of its n running sequences in `a + b n` seconds. At most `slots`
sequences run on a server, and the other sequences wait in order of arrival. A sequence has a length in tokens. A group
is finished when all its sequences are finished.

**Trainer.** A step waits for B groups, trains for some seconds, and updates the weights. With `interrupt`, the update
stops all servers for `update` seconds, and each running sequence then goes on. Without `interrupt`, each server lets
its running sequences finish, starts no new ones, and then loads the weights.

**A finished run** gives its own distributions. A server then has a = 1, b = 0 and no limit, so a length is a number of
seconds. The length of group k is drawn from the lengths of groups near k, because lengths change during a run. The same
holds for the training times and for the times of the weight updates.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rollout.dispatcher import DispatchState  # noqa: E402
from rollout.runner import TimedResult  # noqa: E402
from staleness import StalenessManager  # noqa: E402

PAGE, RUNS, FIGURE = ROOT / "docs" / "simulate.md", ROOT / "docs" / "simulate.json", ROOT / "runs" / "simulate.png"
Versions = Counter[int]  # version -> tokens of a finished group


@dataclass(frozen=True)
class Setup:
    """Everything that a simulation needs. Times are seconds."""

    batch: int  # prompt groups in a batch (B)
    length: Callable[[random.Random, int], float]  # tokens of a sequence of group k
    train: Callable[[random.Random, int, float], float]  # seconds to train in step k on so many tokens
    update: Callable[
        [random.Random, int, int], float
    ]  # seconds to update, in step k, a server with n running sequences
    rest: Callable[[random.Random, int], float] = lambda rng, step: 0.0  # seconds between an update and the next step
    eta: int = 0
    members: int = 1  # sequences of a group
    servers: int = 1
    slots: float = math.inf  # sequences that run on a server at once
    a: float = 1.0  # seconds for a token of one sequence; each further running sequence adds b
    b: float = 0.0
    stale: str = "wait"  # wait, mask, drop; also unbounded (finished first) and window (start order with slack)
    interrupt: bool = True
    concurrent: int | None = None  # max_concurrent_rollouts; None: (eta + 1) B
    steps: int = 24
    skipped: int = 0  # steps at the beginning that the results leave out


class Task:
    """A group: its sequences that are not finished, and the tokens of each version."""

    def __init__(self, task_id: int, members: int) -> None:
        self.task_id, self.left, self.tokens = task_id, members, Versions()


class Server:
    """A server. `ticks` counts the tokens that each running sequence has generated since the beginning."""

    def __init__(self) -> None:
        self.ticks, self.since = 0.0, 0.0  # ticks at the time `since`
        self.running: list[tuple[float, int, float, Task]] = []  # heap: (last tick, number, first tick, group)
        self.waiting: deque[tuple[Task, float]] = deque()  # (group, length)
        self.updates: list[tuple[float, int]] = [(0.0, 0)]  # (tick, version) of each weight update
        self.stopped = self.draining = False
        self.busy = 0.0  # seconds with a running sequence
        self.stamp = 0  # number of the last planned event; older events are ignored


class WindowState(DispatchState[Task, Versions]):
    """Order of start with slack: a group that has not finished may be overtaken, as long as its deadline allows it.

    The deadline of a group is the version at its start plus eta. A step takes the finished groups that started first.
    It may take them only if, for each D, at most (D - v) B groups with a deadline up to D are left afterwards.
    """

    deadlines: dict[int, int]
    window_version: Callable[[], int]

    def next_groups(self, count: int) -> dict[int, Versions]:
        finished = {task_id: data for task_id, data in self.order.items() if data is not None}
        batch = dict(list(finished.items())[:count])
        left = sorted(self.deadlines[task_id] for task_id in self.order if task_id not in batch)
        v = self.window_version()
        feasible = all(k < (deadline - v) * count for k, deadline in enumerate(left))
        return batch if len(batch) == count and feasible else {}


@dataclass
class Result:
    """What a simulation measures."""

    step_ends: list[float] = field(default_factory=list)  # time of each step's end
    lags: list[tuple[float, int]] = field(default_factory=list)  # mean and largest lag of each step's trained tokens
    waited: float = 0.0  # seconds that the trainer waited
    trained: float = 0.0  # tokens trained
    made: float = 0.0  # tokens generated in consumed and dropped groups
    dropped: int = 0
    busy: float = 0.0  # mean share of the time in which a server generates

    def seconds(self, skipped: int = 0) -> float:
        """Return the seconds of the steps after the first `skipped` steps."""
        return self.step_ends[-1] - (self.step_ends[skipped - 1] if skipped else 0.0)


class Simulation:
    """A run in virtual time. `get_version` makes this object the version provider of the staleness gate."""

    def __init__(self, setup: Setup, seed: int = 0) -> None:
        self.s, self.rng, self.now, self.version = setup, random.Random(seed), 0.0, 0
        s, w = setup, setup.eta // 2 if setup.stale == "window" else 0
        concurrent = s.concurrent or (s.eta + 1) * s.batch
        self.manager = StalenessManager(self, concurrent, s.batch, s.eta - w)
        options: dict[str, Any] = {"stale": {"unbounded": "drop", "window": "wait"}.get(s.stale, s.stale)}
        kind: Any = WindowState if s.stale == "window" else DispatchState
        self.state: DispatchState[Task, Versions] = kind(
            self.manager,
            lambda tokens: None if s.stale == "unbounded" else min(min(tokens) + w, self.version),
            16 * concurrent,
            without_older=lambda tokens, oldest: Versions({v: n for v, n in tokens.items() if v >= oldest}) or None,
            **options,
        )
        if isinstance(self.state, WindowState):
            self.state.deadlines, self.state.window_version = {}, self.get_version
        self.servers = [Server() for _ in range(s.servers)]
        self.tasks: dict[int, Task] = {}
        self.events: list[tuple[float, int, Any, int]] = []  # (time, number, server or action, stamp)
        self.numbers = iter(range(10**12))
        self.next_task, self.sequences, self.training, self.changed, self.idle_since = 0, 0, False, False, 0.0
        self.outdated: set[int] = set()
        self.result = Result()

    def get_version(self) -> int:
        return self.version

    # ---- servers

    def advance(self, server: Server) -> None:
        """Move a server's tick counter to the present."""
        n = len(server.running)
        if n and not server.stopped:
            server.ticks += (self.now - server.since) / (self.s.a + self.s.b * n)
            server.busy += self.now - server.since
        server.since = self.now

    def plan(self, server: Server) -> None:
        """Admit waiting sequences, and plan the event at which the server's next sequence finishes."""
        while server.waiting and len(server.running) < self.s.slots and not server.stopped and not server.draining:
            task, length = server.waiting.popleft()
            item = (server.ticks + length, next(self.numbers), server.ticks, task)
            heapq.heappush(server.running, item)
        server.stamp += 1
        if server.running and not server.stopped:
            pace = self.s.a + self.s.b * len(server.running)
            at = self.now + max(0.0, server.running[0][0] - server.ticks) * pace
            heapq.heappush(self.events, (at, next(self.numbers), server, server.stamp))

    def finish_sequences(self, server: Server) -> None:
        """Finish the sequences that have reached their last tick, and the groups that are then complete."""
        while server.running and server.running[0][0] <= server.ticks + 1e-6:  # for rounding
            last, _, first, task = heapq.heappop(server.running)
            k = bisect_right(server.updates, first, key=lambda update: update[0]) - 1
            while first < last:
                end = server.updates[k + 1][0] if k + 1 < len(server.updates) else last
                task.tokens[server.updates[k][1]] += min(end, last) - first  # type: ignore[assignment]
                first, k = max(first, min(end, last)), k + 1
                if k == len(server.updates):
                    break
            task.left -= 1
            if not task.left:
                self.state.finish(TimedResult(task.task_id, 0, task.tokens))
                self.changed = True

    # ---- groups and steps

    def start_groups(self) -> None:
        """Start the groups that the gate admits. Successive sequences go to successive servers."""
        s, touched = self.s, dict[int, Server]()
        for _ in range(self.manager.get_pending_limit() - len(self.state.pending)):
            self.state.enqueue(Task(self.next_task, s.members))
            self.next_task += 1
        for task in self.state.start():
            if isinstance(self.state, WindowState):
                self.state.deadlines[task.task_id] = self.version + s.eta
            for _ in range(s.members):
                server = self.servers[self.sequences % s.servers]
                self.sequences += 1
                self.advance(server)
                server.waiting.append((task, s.length(self.rng, task.task_id)))
                touched[id(server)] = server
        for server in touched.values():
            self.plan(server)

    def take_batch(self) -> None:
        """If a batch is ready, start a training step.

        The first lines only save time. If fewer than B groups have finished, or if the group that wait needs has not
        finished, `take` would return no batch anyway.
        """
        finished = self.manager.get_stats().accepted - self.version * self.s.batch
        first = next(iter(self.state.order.values()), None)
        if finished < self.s.batch or (self.s.stale == "wait" and first is None):
            return
        taken = self.state.take(self.s.batch)
        if not taken:
            return
        trained = Versions()
        for tokens in taken:
            trained.update(tokens)
        total = sum(trained.values())
        mean = sum((self.version - v) * n for v, n in trained.items()) / total
        self.result.lags.append((mean, self.version - min(trained)))
        self.result.trained += total
        self.result.waited += self.now - self.idle_since
        self.training = True
        self.at(self.s.train(self.rng, self.version, total), self.end_training)

    def end_training(self) -> None:
        """Begin the weight update: stop all servers, or let the running sequences of each server finish."""
        self.outdated = set(map(id, self.servers))
        for server in self.servers:
            self.advance(server)
            server.draining = not self.s.interrupt
            server.stopped = self.s.interrupt
            self.plan(server)
        if self.s.interrupt:
            most = max(len(server.running) for server in self.servers)
            self.at(self.s.update(self.rng, self.version, most), self.end_update)
        else:
            self.load_drained()

    def load_drained(self) -> None:
        """Without interruption: let each server without running sequences load the new weights."""
        for server in self.servers:
            if server.draining and not server.running:
                server.draining, server.stopped = False, True
                self.at(self.s.update(self.rng, self.version, 0), lambda server=server: self.loaded(server))

    def loaded(self, server: Server) -> None:
        """Let one server go on with the new weights. After the last server the update has ended."""
        self.advance(server)
        server.stopped = False
        server.updates.append((server.ticks, self.version + 1))
        self.plan(server)
        self.outdated.discard(id(server))
        if not self.outdated:
            self.end_step()

    def end_update(self) -> None:
        """Let all servers go on with the new weights."""
        for server in self.servers:
            self.advance(server)
            server.stopped = False
            server.updates.append((server.ticks, self.version + 1))
            self.plan(server)
        self.end_step()

    def end_step(self) -> None:
        """Count the version, which may open the gate. The trainer still has to write its logs."""
        self.version += 1
        self.changed = True
        self.result.step_ends.append(self.now)
        self.at(self.s.rest(self.rng, self.version), self.end_rest)

    def end_rest(self) -> None:
        """Let the trainer wait for the next batch."""
        self.training, self.changed, self.idle_since = False, True, self.now

    # ---- the clock

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Plan an action of the trainer."""
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), action, 0))

    def run(self) -> Result:
        """Simulate all steps."""
        self.start_groups()
        while self.version < self.s.steps:
            self.now, _, subject, stamp = heapq.heappop(self.events)
            if not isinstance(subject, Server):
                subject()
            elif stamp == subject.stamp:
                self.advance(subject)
                self.finish_sequences(subject)
                self.plan(subject)
                if subject.draining:
                    self.load_drained()
            if self.changed:  # a group or a step has ended
                self.changed = False
                if not self.training:
                    self.take_batch()
                self.start_groups()
        for server in self.servers:
            self.advance(server)
        self.result.busy = fmean(server.busy for server in self.servers) / self.now
        self.result.dropped = self.manager.get_stats().dropped
        return self.result


# ---------------------------------------------------------------- setups


def lognormal(mean: float, sigma: float, most: float = math.inf) -> Callable[[random.Random, int], float]:
    """Return a function that draws lengths: lognormal with this mean and this sigma of the logarithm, cut at `most`."""
    mu = math.log(mean) - sigma**2 / 2
    return lambda rng, _: min(rng.lognormvariate(mu, sigma), most)


def small(sigma: float, eta: int, stale: str) -> Setup:
    """Return the setup of the table about the order: 8 groups of one sequence, and no limit of concurrency."""
    times = {"train": lambda rng, step, tokens: 0.8, "update": lambda rng, step, n: 0.02}
    return Setup(8, lognormal(2.0, sigma), **times, eta=eta, stale=stale, concurrent=10**6)


@dataclass(frozen=True)
class Model:
    """A model on a GPU with 80 GB and 3.35 TB/s. docs/simulate.md derives the numbers."""

    parameters: float
    a: float  # seconds of a decoding step: reading the weights, and overhead
    b: float  # seconds that each running sequence adds: reading 5,000 tokens of KV cache
    slots: int  # sequences whose KV cache fits into the memory


SMALL, LARGE = Model(1.5e9, 4e-3, 4.2e-5, 256), Model(7e9, 8e-3, 8.5e-5, 192)
TRAIN_FLOPS, PREFILL_FLOPS = 3e14, 4e14  # useful operations in a second on one GPU, of training and of prefill


def cluster(gpus: int, eta: int | None, stale: str = "wait", model: Model = SMALL, interrupt: bool = True) -> Setup:
    """Return the setup of a cluster. eta None is synchronous training: every GPU first generates, then trains.

    Asynchronous training has three quarters of the GPUs for generation, and one quarter for training. After an
    interruption, a server computes the KV cache of its running sequences again.
    """
    share = 1.0 if eta is None else 0.75
    servers, trainers = max(1, round(share * gpus)), gpus * (1 - share) or gpus
    slow = servers / (share * gpus)  # above 1 if generation has only a part of one GPU
    again = 5000 * 2 * model.parameters / PREFILL_FLOPS  # seconds for the KV cache of one sequence
    return Setup(
        batch=512,
        members=16,
        length=lognormal(6000, 1.0, most=27_000),
        train=lambda rng, step, tokens: 8 * model.parameters * tokens / (TRAIN_FLOPS * trainers),
        update=lambda rng, step, n: 1.0 + n * again,
        eta=eta or 0,
        servers=servers,
        slots=model.slots,
        a=model.a * slow,
        b=model.b * slow,
        stale=stale,
        interrupt=interrupt,
        steps=(eta or 0) + 8,
        skipped=(eta or 0) + 3,
    )


def simulate(make: Callable[..., Setup], *args: Any, seeds: Iterable[int] = (0,)) -> dict[str, float]:
    """Simulate the setup `make(*args)` with each seed, and return medians over the seeds.

    step_s, total_s: seconds of a step, and of all steps; servers_busy, trainer_waits: shares of the time; lag_mean,
    lag_max: of the trained tokens; dropped: groups; tokens: trained tokens.
    """
    setup = make(*args)
    results = [Simulation(make(*args), seed).run() for seed in seeds]
    counted = setup.steps - setup.skipped
    return {
        "step_s": median(r.seconds(setup.skipped) / counted for r in results),
        "total_s": median(r.seconds() for r in results),
        "servers_busy": median(r.busy for r in results),
        "trainer_waits": median(r.waited / r.step_ends[-1] for r in results),
        "lag_mean": median(fmean(mean for mean, _ in r.lags[setup.skipped :]) for r in results),
        "lag_max": max(largest for r in results for _, largest in r.lags),
        "dropped": median(r.dropped for r in results),
        "tokens": median(r.trained for r in results),
    }


# ---------------------------------------------------------------- finished runs


def record(folder: Path) -> dict[str, Any]:
    """Return the times of a finished run in seconds: the times of its groups, in order of start, and of its steps."""
    import yaml

    from run.report import read_records

    config = yaml.safe_load((folder / "config.yaml").read_text())
    trace, lines = read_records(folder / "trace.json"), read_records(folder / "metrics.jsonl")
    spans = {name: [s for s in trace if s.get("name") == name] for name in ("rollout_wait", "train", "sync")}
    ends = {name: [(s["ts"] + s["dur"]) / 1e6 for s in found] for name, found in spans.items()}
    begins = {name: [s["ts"] / 1e6 for s in found] for name, found in spans.items()}
    groups: dict[str, list[float]] = {}
    for event in trace:
        if event.get("ph") in ("b", "e"):
            groups.setdefault(event["id"], []).append(event["ts"] / 1e6)
    pauses = list(zip(begins["sync"], ends["sync"]))

    def worked(begin: float, end: float) -> float:
        """Return the seconds between two times, minus the seconds of the weight updates."""
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


def blocks(values: list[float], size: int, width: int = 2) -> Callable[[random.Random, int], float]:
    """Return a function that draws whole blocks of `size` values, each from at most `width` blocks away.

    The groups of one batch run at the same time on the same machine, so their times are alike. The slowest of B
    independent draws would be slower than the slowest of B such groups. A block bootstrap keeps the times within a
    block alike.
    """
    shifts: dict[int, int] = {}
    most = max(0, len(values) // size - 1)  # number of the last whole block

    def draw(rng: random.Random, k: int) -> float:
        block = k // size
        shift = shifts.setdefault(block, rng.randint(-width, width))
        return values[min(most, max(0, block + shift)) * size + k % size]

    return draw


def replay(run: dict[str, Any], eta: int | None = None, stale: str = "wait") -> Setup:
    """Return the setup with the distributions of a finished run."""
    train, update = blocks(run["train"], 1), blocks(run["update"], 1)
    return Setup(
        batch=run["batch"],
        length=blocks(run["groups"], run["batch"]),
        train=lambda rng, step, tokens: train(rng, step),
        update=lambda rng, step, n: update(rng, step),
        rest=blocks(run["rest"], 1),
        eta=run["eta"] if eta is None else eta,
        concurrent=run["concurrent"] if eta is None else None,
        stale=stale,
        steps=len(run["update"]),
    )


def check(runs: list[dict[str, Any]]) -> list[str]:
    """Return a table that compares the simulation with finished runs."""
    lines = [
        "| run | steps | | samples/s | waiting of the trainer | mean lag | largest lag |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        found, steps = simulate(replay, run, seeds=range(9)), len(run["update"])
        samples = steps * run["batch"] * run["members"]
        real = samples / run["seconds"], run["waited"] / run["seconds"], run["lag_mean"], run["lag_max"]
        ours = samples / found["total_s"], found["trainer_waits"], found["lag_mean"], found["lag_max"]
        for who, (rate, waiting, mean, most) in (("measured", real), ("simulated", ours)):
            name = f"{run['name']} | {steps}" if who == "measured" else " | "
            lines.append(
                f"| {name} | {who} | {rate:.2f} | {waiting:.0%} | {mean:.2f} | {most:.0f} |".replace("%", " %")
            )
        lines.append(f"| | | ratio | {ours[0] / real[0]:.3f} | | {ours[2] - real[2]:+.2f} | |")
    return lines


# ---------------------------------------------------------------- tables and figure

GPUS, ETAS = (1, 8, 32, 128, 512, 1024), (0, 1, 2, 4, 8, 16)
ORDERS = ("wait", "window", "drop", "mask", "unbounded")
Table = list[str]


def row(*cells: Any) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def head(*cells: Any) -> Table:
    """Return the first two lines of a Markdown table."""
    return [row(*cells), "|---" * len(cells) + "|"]


def order_table() -> Table:
    """Return the seconds of 24 steps for each order, tail and eta. The ideal is 20 s."""
    lines = head("sigma", "eta", *ORDERS, "mean lag, wait", "mean lag, mask")
    for sigma in (0.5, 1.0, 1.5):
        for eta in ETAS[1:]:
            found = {order: simulate(small, sigma, eta, order, seeds=range(9)) for order in ORDERS}
            cells = [f"{r['total_s']:.0f}" for r in found.values()]
            cells[2] += f" ({found['drop']['dropped']:.0f} dropped)"
            cells[4] += f" (lag {found['unbounded']['lag_max']:.0f})"
            lines.append(row(sigma, eta, *cells, *(f"{found[o]['lag_mean']:.1f}" for o in ("wait", "mask"))))
    return lines


def cluster_runs() -> dict[tuple[int, int | None, str], dict[str, float]]:
    """Simulate every size of the cluster: synchronous, and asynchronous with each eta and two orders."""
    found = {}
    for gpus in GPUS:
        found[gpus, None, "wait"] = simulate(cluster, gpus, None)
        for eta in ETAS:
            for stale in ("wait", "mask"):
                found[gpus, eta, stale] = simulate(cluster, gpus, eta, stale)
        print(f"{gpus} GPUs", file=sys.stderr, flush=True)
    return found


def cluster_tables(found: dict[tuple[int, int | None, str], dict[str, float]]) -> dict[str, Table]:
    """Return the tables of the speed, and of the utilisation and the lag."""
    speed = head("GPUs", "synchronous, s a step", *(f"eta {eta}" for eta in ETAS))
    for gpus in GPUS:
        sync = found[gpus, None, "wait"]["step_s"]
        ratios = [" / ".join(f"{sync / found[gpus, eta, o]['step_s']:.2f}" for o in ("wait", "mask")) for eta in ETAS]
        speed.append(row(f"{gpus:,}", f"{sync:,.0f}", *ratios))
    use = head("GPUs", "eta", "servers generate", "trainer trains or updates", "mean lag", "largest lag")
    for gpus in (32, 128, 512):
        for eta in ETAS:
            pair = [found[gpus, eta, order] for order in ("wait", "mask")]
            shares = [[f"{r['servers_busy']:.0%}", f"{1 - r['trainer_waits']:.0%}"] for r in pair]
            lags = [[f"{r['lag_mean']:.1f}", f"{r['lag_max']:.0f}"] for r in pair]
            cells = [" / ".join(column).replace("%", " %") for column in zip(*map(list.__add__, shares, lags))]
            use.append(row(gpus, eta, *cells))
    return {"speed": speed, "use": use}


def faster_training(factor: float, *args: Any) -> Setup:
    """Return a cluster whose training takes `factor` times as long, so that generation limits the run."""
    setup = cluster(*args)
    return replace(setup, train=lambda rng, step, tokens: factor * setup.train(rng, step, tokens))


def paper_table(found: dict[tuple[int, int | None, str], dict[str, float]]) -> Table:
    """Return the paper's figures beside the simulation's."""
    lines = head("what", "paper", "simulated, wait", "simulated, mask")
    sync, pair = found[128, None, "wait"], [found[128, 4, order] for order in ("wait", "mask")]
    lines.append(row("1.5 B, 128 GPUs: seconds of a synchronous step", 148, f"{sync['step_s']:.0f}", "as wait"))
    lines.append(row("asynchronous step, eta 4", 53, *(f"{r['step_s']:.0f}" for r in pair)))
    lines.append(row("ratio", 2.77, *(f"{sync['step_s'] / r['step_s']:.2f}" for r in pair)))
    sync = simulate(cluster, 192, None, "wait", LARGE)
    pair = [simulate(cluster, 192, 4, order, LARGE) for order in ("wait", "mask")]
    lines.append(row("7 B, 192 GPUs: ratio", 2.27, *(f"{sync['step_s'] / r['step_s']:.2f}" for r in pair)))
    for name, model, paper in (("1.5 B", SMALL, "+12 %"), ("7 B", LARGE, "+17 %")):
        cells = []
        for order in ("wait", "mask"):
            runs = [simulate(faster_training, 0.3, 32, 4, order, model, cut)["step_s"] for cut in (False, True)]
            cells.append(f"{runs[0] / runs[1] - 1:+.0%}".replace("%", " %"))
        lines.append(row(f"{name}, 32 GPUs: generation with interruption", paper, *cells))
    gain = [found[128, 4, order]["step_s"] / found[512, 4, order]["step_s"] for order in ("wait", "mask")]
    lines.append(row("1.5 B, eta 4: 512 GPUs over 128", "near linear (4)", *(f"{x:.1f}" for x in gain)))
    gain = found[128, None, "wait"]["step_s"] / found[512, None, "wait"]["step_s"]
    lines.append(row("the same, synchronous", "", f"{gain:.1f}", "as wait"))
    return lines


def draw(found: dict[tuple[int, int | None, str], dict[str, float]]) -> None:
    """Draw the cost of the order (left), and for each number of GPUs the gain over synchronous training (right)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    colors = dict(zip(ORDERS, ("tab:blue", "tab:cyan", "tab:red", "tab:green", "tab:gray")))
    labels = {"wait": "wait: order of start", "window": "order of start with slack", "drop": "drop", "mask": "mask"}
    for order, color in colors.items():
        seconds = [simulate(small, 1.0, eta, order, seeds=range(9))["total_s"] for eta in ETAS[1:]]
        dashed = "--" if order in ("window", "unbounded") else "-"
        left.plot(
            ETAS[1:], seconds, dashed, marker=".", color=color, label=labels.get(order, "finished first, no bound")
        )
    left.axhline(24 * 0.82, color="black", linewidth=0.8)
    left.annotate("the trainer never waits", (1, 24 * 0.82 - 1), va="top", fontsize=8)
    left.set_xscale("log", base=2)
    left.set(xlabel="eta", ylabel="seconds of 24 steps", title="8 groups a step, lognormal lengths, sigma 1", ylim=0)
    left.set_xticks(ETAS[1:], [str(eta) for eta in ETAS[1:]])
    for eta, color in zip((1, 2, 4, 16), ("tab:olive", "tab:orange", "tab:red", "tab:purple")):
        for order, dashed in (("wait", "-"), ("mask", "--")):
            speed = [found[g, None, "wait"]["step_s"] / found[g, eta, order]["step_s"] for g in GPUS]
            right.plot(GPUS, speed, dashed, marker=".", color=color, label=f"eta {eta}, {order}")
    right.plot([128], [2.77], "k*", markersize=10, label="paper, 1.5 B")
    right.axhline(1, color="black", linewidth=0.8)
    right.set_xscale("log", base=2)
    right.set_xticks(GPUS, [str(g) for g in GPUS], fontsize=8)
    right.set(
        xlabel="GPUs", ylabel="asynchronous over synchronous", title="1.5 B parameters, 8,192 answers a step", ylim=0
    )
    for axes in (left, right):
        axes.legend(fontsize=8, ncols=2)
        axes.grid(alpha=0.3)
    FIGURE.parent.mkdir(exist_ok=True)
    figure.savefig(FIGURE, dpi=110)


def write(tables: dict[str, Table]) -> None:
    """Replace the tables of docs/simulate.md, each of which follows a comment with its name."""
    page = PAGE.read_text()
    for name, lines in tables.items():
        before, mark, rest = page.partition(f"<!-- {name} -->\n")
        page = before + mark + "\n".join(lines) + "\n\n" + rest.partition("\n\n")[2]
    PAGE.write_text(page.rstrip() + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", type=Path, nargs="+", metavar="RUN", help="only compare with these finished runs")
    parser.add_argument("--record", type=Path, nargs="+", metavar="RUN", help="keep the times of these finished runs")
    parser.add_argument("--cluster", action="store_true", help="only simulate clusters, and draw FIGURE")
    args = parser.parse_args()
    if args.check:
        print("\n".join(check([record(folder) for folder in args.check])))
        return
    if args.record:
        RUNS.write_text("[\n" + ",\n".join(json.dumps(record(folder)) for folder in args.record) + "\n]\n")
    tables = {"check": check(json.loads(RUNS.read_text()))}
    if args.cluster:
        found = cluster_runs()
        tables = {"paper": paper_table(found), **cluster_tables(found)}
        draw(found)
    else:
        tables["order"] = order_table()
        write(tables)
    print("\n\n".join("\n".join(lines) for lines in tables.values()))


if __name__ == "__main__":
    main()
