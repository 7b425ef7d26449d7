"""Two claims: consuming groups in order of start costs time if a few answers are very long, and
asynchronous training gains most on large clusters.

    python bench/clusters.py             # simulate all, write the CSV, print the tables
    python bench/clusters.py --tables    # the tables, from docs/clusters.csv

The simulation of bench/simulate.py runs the project's own staleness gate and dispatcher in virtual
time. The lengths of sequences and the times of steps are assumptions, not measurements.

**Orders.** The first simulation compares the orders in which training steps can consume groups.
Each step trains on 8 groups of one sequence. The time to generate a group is lognormal with a mean
of 2 s, and any number of groups can run at once. Training takes 0.8 s and a weight update 0.02 s.

**Clusters.** The second simulation compares clusters of 1 to 1,024 GPUs. Each step trains on 512
groups of 16 answers. Synchronous training uses every GPU first for generation and then for
training; asynchronous training uses three quarters of the GPUs for generation and the rest for
training.
"""

import csv
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from simulate import ROOT, Draw, Setup, head, row, simulate

TABLE = ROOT / "docs" / "clusters.csv"
GPUS, ETAS, SIGMAS = (1, 8, 32, 128, 512, 1024), (0, 1, 2, 4, 8, 16), (0.5, 1.0, 1.5)
ORDERS = ("wait", "window", "drop", "mask", "unbounded")
PAIR = ("wait", "mask")
# `Rows` maps the key (what, gpus or sigma, eta, order) of a row of docs/clusters.csv to the numbers
# of the row.
Rows = dict[tuple[str, ...], dict[str, float]]


# Setups


def lognormal(mean: float, sigma: float, most: float = math.inf) -> Draw:
    """Return a function that draws lognormal lengths with mean `mean`, at most `most`. `sigma` is
    the standard deviation of a length's logarithm."""
    mu = math.log(mean) - sigma**2 / 2
    return lambda rng, _: min(rng.lognormvariate(mu, sigma), most)


def small(sigma: float, eta: int, stale: str) -> Setup:
    """Return the setup for the comparison of orders. A step trains on 8 groups of one sequence, and
    any number of groups can run at once."""
    times = {"train": lambda rng, step, tokens: 0.8, "update": lambda rng, step, n: 0.02}
    return Setup(8, lognormal(2.0, sigma), **times, eta=eta, stale=stale, concurrent=10**6)


@dataclass(frozen=True)
class Model:
    """The speed of a model on a GPU with 80 GB of memory and a memory bandwidth of 3.35 TB/s."""

    parameters: float
    a: float  # seconds that a decoding step takes to read the weights, with overhead
    b: float  # seconds that a decoding step takes to read the 5,000 cached tokens of one sequence
    slots: int  # number of sequences whose KV caches fit into the GPU's memory together


SMALL, LARGE = Model(1.5e9, 4e-3, 4.2e-5, 256), Model(7e9, 8e-3, 8.5e-5, 192)
TRAIN_FLOPS, PREFILL_FLOPS = 3e14, 4e14  # useful FLOP/s of one GPU in training and in prefill


def cluster(
    gpus: int, eta: int | None, stale: str = "wait", model: Model = SMALL, interrupt: bool = True
) -> Setup:
    """Return the setup of a cluster. If eta is None, training is synchronous: every GPU first
    generates and then trains.

    After an interruption, a server recomputes the KV cache of its running sequences. At time 0 a
    run starts the groups of eta + 1 batches, and later those of one batch per step. So the first
    steps differ from later ones, and the results exclude the first 2 (eta + 1) steps, or 3 with eta
    = 0.
    """
    share = 1.0 if eta is None else 0.75
    servers, trainers = max(1, round(share * gpus)), gpus * (1 - share) or gpus
    slow = servers / (
        share * gpus
    )  # factor on the decoding times, above 1 if generation has less than one GPU
    again = (
        5000 * 2 * model.parameters / PREFILL_FLOPS
    )  # seconds to compute the KV cache of 5,000 tokens
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
        steps=max(8, 3 * ((eta or 0) + 1)),
        skipped=max(3, 2 * ((eta or 0) + 1)),
    )


def faster_training(factor: float, *args: Any) -> Setup:
    """Return the setup of a cluster whose training time is multiplied by `factor`. With a small
    `factor`, generation limits the speed of the run."""
    setup = cluster(*args)
    return replace(setup, train=lambda rng, step, tokens: factor * setup.train(rng, step, tokens))


def simulate_all() -> Iterator[dict[str, Any]]:
    """Yield the rows of docs/clusters.csv: the orders of consumption, the clusters, and the
    settings of AReaL's paper."""
    for sigma in SIGMAS:
        for eta in ETAS[1:]:
            for order in ORDERS:
                found = simulate(small, sigma, eta, order, seeds=range(9))
                yield {"what": "order", "sigma": str(sigma), "eta": eta, "order": order} | found
    for gpus in GPUS:
        yield {"what": "1.5B", "gpus": gpus, "eta": "sync", "order": "wait"} | simulate(
            cluster, gpus, None
        )
        for eta in ETAS:
            for order in PAIR:
                found = simulate(cluster, gpus, eta, order)
                yield {"what": "1.5B", "gpus": gpus, "eta": eta, "order": order} | found
    yield {"what": "7B", "gpus": 192, "eta": "sync", "order": "wait"} | simulate(
        cluster, 192, None, "wait", LARGE
    )
    for order in PAIR:
        yield {"what": "7B", "gpus": 192, "eta": 4, "order": order} | simulate(
            cluster, 192, 4, order, LARGE
        )
        for name, model in (("1.5B", SMALL), ("7B", LARGE)):
            for cut in (False, True):
                found = simulate(faster_training, 0.3, 32, 4, order, model, cut)
                kind = "interrupted" if cut else "finished"
                yield {"what": f"{name} {kind}", "gpus": 32, "eta": 4, "order": order} | found


# Tables


def read_rows() -> Rows:
    """Read docs/clusters.csv. A row about an order of consumption has a sigma, and a row about a
    cluster a number of GPUs."""
    rows = {}
    for line in csv.DictReader(TABLE.read_text().splitlines()):
        key = tuple(line.pop(name) for name in ("what", "gpus", "sigma", "eta", "order"))
        rows[tuple(filter(None, key))] = {name: float(value) for name, value in line.items()}
    return rows


def order_table(rows: Rows) -> list[str]:
    """Return a table with the duration of 24 steps in seconds, for each order, sigma and eta."""
    lines = head("sigma", "eta", *ORDERS, "masked tokens", "mean lag, wait", "mean lag, mask")
    for sigma in SIGMAS:
        for eta in ETAS[1:]:
            found = {order: rows["order", str(sigma), str(eta), order] for order in ORDERS}
            cells = {order: f"{r['total_s']:.0f}" for order, r in found.items()}
            cells["drop"] += f" ({found['drop']['dropped']:.0f} dropped)"
            cells["unbounded"] += f" (lag {found['unbounded']['lag_max']:.0f})"
            lags = (f"{found[order]['lag_mean']:.1f}" for order in PAIR)
            lines.append(row(sigma, eta, *cells.values(), f"{found['mask']['masked']:.0%}", *lags))
    return lines


def speed_table(rows: Rows) -> list[str]:
    """Return a table of the speed of asynchronous training, divided by that of synchronous
    training, for each cluster and each eta. Each cell has two numbers, for rollout.stale=wait and
    for rollout.stale=mask."""
    lines = head("GPUs", "synchronous, s a step", *(f"eta {eta}" for eta in ETAS))
    for gpus in GPUS:
        sync = rows["1.5B", str(gpus), "sync", "wait"]["step_s"]
        cells = (
            [sync / rows["1.5B", str(gpus), str(eta), order]["step_s"] for order in PAIR]
            for eta in ETAS
        )
        lines.append(
            row(f"{gpus:,}", f"{sync:,.0f}", *(f"{wait:.2f} / {mask:.2f}" for wait, mask in cells))
        )
    return lines


def use_table(rows: Rows) -> list[str]:
    """Return a table of the throughput, the utilisation and the lag of three clusters.

    If a cell has two numbers, the first is for rollout.stale=wait and the second for
    rollout.stale=mask.
    """
    lines = head(
        "GPUs",
        "eta",
        "tokens/s",
        "servers generate",
        "trainer works",
        "mean lag",
        "largest lag",
        "masked",
    )
    formats = {
        "tokens_s": "{:,.0f}",
        "servers_busy": "{:.0%}",
        "trainer_busy": "{:.0%}",
        "lag_mean": "{:.1f}",
        "lag_max": "{:.0f}",
    }
    for gpus in (8, 128, 1024):
        for eta in ("sync", *map(str, ETAS)):
            found = [
                rows["1.5B", str(gpus), eta, order]
                for order in (PAIR if eta != "sync" else PAIR[:1])
            ]
            cells = [
                " / ".join(text.format(r[name]) for r in found) for name, text in formats.items()
            ]
            lines.append(row(f"{gpus:,}", eta, *cells, f"{found[-1]['masked']:.0%}"))
    return lines


def paper_table(rows: Rows) -> list[str]:
    """Return a table with the numbers of AReaL's paper beside the simulated numbers."""
    step = {key: found["step_s"] for key, found in rows.items()}
    sync, pair = (
        step["1.5B", "128", "sync", "wait"],
        [step["1.5B", "128", "4", order] for order in PAIR],
    )
    lines = head("what", "paper", "simulated, wait", "simulated, mask")
    lines.append(
        row("1.5 B, 128 GPUs: seconds of a synchronous step", 148, f"{sync:.0f}", "same as wait")
    )
    lines.append(
        row(
            "1.5 B, 128 GPUs: seconds of an asynchronous step, eta 4",
            53,
            *(f"{s:.0f}" for s in pair),
        )
    )
    lines.append(
        row(
            "1.5 B, 128 GPUs: synchronous over asynchronous seconds, eta 4",
            "2.77",
            *(f"{sync / s:.2f}" for s in pair),
        )
    )
    large = [step["7B", "192", "sync", "wait"] / step["7B", "192", "4", order] for order in PAIR]
    lines.append(
        row(
            "7 B, 192 GPUs: synchronous over asynchronous seconds",
            "2.27",
            *(f"{x:.2f}" for x in large),
        )
    )
    for name, paper in (("1.5B", "+12%"), ("7B", "+17%")):
        times = [
            [step[f"{name} {kind}", "32", "4", order] for kind in ("finished", "interrupted")]
            for order in PAIR
        ]
        gains = (f"{whole / cut - 1:+.0%}" for whole, cut in times)
        lines.append(
            row(f"{name.replace('B', ' B')}, 32 GPUs: speed gained by interruption", paper, *gains)
        )
    gain = [step["1.5B", "128", "4", order] / step["1.5B", "512", "4", order] for order in PAIR]
    lines.append(
        row(
            "1.5 B, eta 4: speed of 512 GPUs over 128",
            "near 4 (linear)",
            *(f"{x:.1f}" for x in gain),
        )
    )
    gain = [sync / step["1.5B", "512", "sync", "wait"]]
    lines.append(
        row("1.5 B, synchronous: speed of 512 GPUs over 128", "", f"{gain[0]:.1f}", "same as wait")
    )
    return lines


def make_tables(rows: Rows) -> dict[str, list[str]]:
    """Return all tables whose data is in docs/clusters.csv."""
    tables = {"order": order_table(rows)}
    if any(key[0] == "7B" for key in rows):
        tables |= {"speed": speed_table(rows), "use": use_table(rows), "paper": paper_table(rows)}
    return tables


def main() -> None:
    if sys.argv[1:] != ["--tables"]:
        found = [
            {name: f"{v:.5g}" if isinstance(v, float) else v for name, v in r.items()}
            for r in simulate_all()
        ]
        with TABLE.open("w", newline="") as file:
            names = ["what", "gpus", "sigma", "eta", "order", *list(found[0])[4:]]
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(found)
    tables = make_tables(read_rows())
    print("\n\n".join("\n".join(lines) for lines in tables.values()))


if __name__ == "__main__":
    main()
