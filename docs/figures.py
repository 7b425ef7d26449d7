"""Draw the figures of the pages, docs/*.svg, from numbers that the repository keeps.

`python docs/figures.py` draws every figure again. With an option of the list below, the script
first reads new numbers into docs/figures.json. The list also says what the numbers of each figure
are:

    front.svg        --run RUN                 times of a run's first steps
    straddle.svg     --answers RUN             answers that weight updates interrupted
    tool.svg         --tool runs/seeds/tool    the folder of bench/seeds.py
    credit.svg       --credit FOLDER           with runs called gamma0-seed1 and so on
    compare.svg                                measured by bench/compare.py
    timelines.svg                              two runs that bench/simulate.py simulates
    rewards.svg                                rewards that cache.py computes

RUN is the folder of a finished run of configs/maze.yaml.
"""

import csv
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

# Colour-blind readers can distinguish the colours of this palette by Paul Tol.
COLOURS = "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377"
STYLE = """text { font: 15px system-ui, sans-serif; fill: #1f2328 } .small { font-size: 12px } .faint { fill: #59636e }
.paper { fill: #ffffff } .box { fill: #f6f8fa; stroke: #818b98 } .line { stroke: #818b98; fill: none }
.wait { fill: none; stroke: #818b98; stroke-dasharray: 3 3 }
.tip { fill: #cc3311 } .back { stroke: #cc3311; fill: none; stroke-width: 2 } .reward { fill: #b02a0c; font-weight: 600 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .faint { fill: #9198a1 } .paper { fill: #0d1117 }
.box { fill: #151b23; stroke: #656c76 } .line, .wait { stroke: #656c76 } .reward { fill: #ff9d76 }
.tip { fill: #ff7b54 } .back { stroke: #ff7b54 } }"""
Run = dict[str, Any]  # the times of a run, as docs/figures.json stores them
Parts = list[str]  # SVG elements


def svg(width: int, height: float, title: str, parts: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" width="{width}" role="img">'
    paper = f'<rect class="paper" width="{width}" height="{height:g}"/>'
    return (
        "\n".join(
            [
                head,
                f"<title>{escape(title)}</title>",
                f"<style>{STYLE}</style>",
                paper,
                *parts,
                "</svg>",
            ]
        )
        + "\n"
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def bar(x: float, y: float, width: float, height: float, look: str, hint: str = "") -> str:
    title = f"<title>{escape(hint)}</title>" if hint else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:g}" {look}>{title}</rect>'


def colour(version: int) -> str:
    return f'fill="{COLOURS[version % len(COLOURS)]}"'


# ---------------------------------------------------------------- finished runs


def read_answers(run: Path, count: int) -> list[list[Any]]:
    """Return the answers whose tokens have the most versions: `count` answers, at most one per
    step. Each is [step, [[version, number of tokens], ...], reward]."""
    from safetensors.torch import load_file

    found = []
    for path in sorted((run / "tokens").glob("*.safetensors")):
        batch = load_file(path)
        rows = []
        for versions, turns, reward in zip(
            batch["versions"], batch["turn_ids"], batch["rewards"].tolist()
        ):
            sampled = versions[turns >= 0].tolist()
            rows.append((len(set(sampled)), -abs(len(sampled) - 90), sampled, reward))
        most, _, sampled, reward = max(rows)
        if most > 1 and len(sampled) <= 110:
            pieces = [[version, len(list(tokens))] for version, tokens in groupby(sampled)]
            found.append((most, [int(path.stem), pieces, round(reward, 2)]))
    best = sorted(found, key=lambda item: (-item[0], item[1][0]))[:count]
    return sorted(row for _, row in best)


def read_run(run: Path, steps: int) -> Run:
    """Return the times of a finished run's first steps, in seconds after the first group's start.

    groups: [begin, end] of each prompt group
    waits, trains, updates: [begin, end] of each step's wait, training and weight update
    trained: {version: number of sampled tokens} of each step's batch
    """
    from safetensors.torch import load_file

    from extras import read_records

    trace = read_records(run / "trace.json")
    zero = min(event["ts"] for event in trace if event["ph"] == "b")

    def seconds(ts: float) -> float:
        return round((ts - zero) / 1e6, 3)

    spans = {
        name: [
            [seconds(e["ts"]), seconds(e["ts"] + e["dur"])] for e in trace if e.get("name") == name
        ][:steps]
        for name in ("rollout_wait", "train", "sync")
    }
    groups: dict[str, list[float]] = {}
    for event in trace:
        if event["ph"] in ("b", "e"):
            groups.setdefault(event["id"], []).append(seconds(event["ts"]))
    end = spans["sync"][-1][1]
    trained = []
    for step in range(1, steps + 1):
        batch = load_file(next((run / "tokens").glob(f"{step:05}.safetensors")))
        trained.append(dict(Counter(batch["versions"][batch["turn_ids"] >= 0].tolist())))
    return {
        "groups": sorted(times for times in groups.values() if len(times) == 2 and times[0] < end),
        "waits": spans["rollout_wait"],
        "trains": spans["train"],
        "updates": spans["sync"],
        "trained": trained,
    }


# ---------------------------------------------------------------- timelines


def lanes(groups: list[list[float]]) -> list[tuple[int, float, float]]:
    """Return (lane, begin, end) of each group. The groups of one lane do not overlap in time."""
    free: list[float] = []  # the end of each lane's last group
    placed = []
    for begin, end in groups:
        lane = next((k for k, last in enumerate(free) if last <= begin + 1e-3), len(free))
        free[lane:] = [end, *free[lane + 1 :]]
        placed.append((lane, begin, end))
    return placed


def draw_panel(
    run: Run, top: float, scale: Callable[[float], float], until: float
) -> tuple[Parts, float]:
    """Draw a run's groups, and the trainer below them, from the y coordinate `top` downwards.
    Return the SVG elements and the y coordinate of their lower end."""
    parts: Parts = []
    placed = [item for item in lanes(run["groups"]) if item[1] < until]
    count = 1 + max(lane for lane, _, _ in placed)
    line = min(22, 176 // count)  # height of a lane
    base = top + line * count + 8  # y coordinate of the trainer's bars
    starts = [0.0, *(end for _, end in run["updates"])]  # the time at which each version begins
    for lane, begin, end in placed:
        for version, (since, to) in enumerate(zip(starts, [*starts[1:], math.inf])):
            if since < min(end, until) and to > begin:
                a, b = scale(max(since, begin)), scale(min(to, end, until))
                gap = 1.5 if to >= end else 0  # before the lane's next group
                where = a, top + line * lane, b - a - gap, line * 0.86
                parts.append(bar(*where, colour(version), f"version {version}"))
    parts.append(text(4, top + 14, "groups", "small"))
    parts.append(text(4, base + 22, "trainer", "small"))
    for begin, end in run["waits"]:
        if begin < until:
            a, b = scale(max(begin, 0.0)), scale(min(end, until))
            parts.append(bar(a, base + 3, b - a, 30, 'class="wait"', "the trainer waits"))
    for step, (begin, end) in enumerate(run["trains"]):
        total, low = sum(run["trained"][step].values()), base + 36.0
        for version, tokens in sorted(run["trained"][step].items(), key=lambda item: int(item[0])):
            if begin >= until:
                break
            height = 36 * tokens / total
            low -= height
            a, b = scale(begin), scale(min(end, until))
            hint = f"step {step + 1} trains {tokens} tokens of version {version}"
            parts.append(bar(a, low, b - a, round(height, 1), colour(int(version)), hint))
    for version, (_, end) in enumerate(run["updates"], 1):
        if end < until:
            x = scale(end)
            parts.append(f'<path class="line" d="M{x:.1f} {top - 3:g}V{base + 39:g}"/>')
            parts.append(text(x, base + 52, f"v{version}", "small faint", "middle"))
    return parts, base + 58


def draw_axis(top: float, scale: Callable[[float], float], until: float) -> Parts:
    ticks = range(0, int(until) + 1, max(1, round(until / 6)))
    anchors = [
        "start",
        *["middle"] * (len(ticks) - 2),
        "end" if scale(ticks[-1]) > 615 else "middle",
    ]
    return [text(scale(s), top + 14, f"{s} s", "small faint", a) for s, a in zip(ticks, anchors)]


def draw_front(data: dict[str, Any]) -> str:
    run, until = data["run"], data["run"]["updates"][5][1]  # six versions, each with its own colour
    scale = lambda s: 64 + (640 - 72) * s / until  # noqa: E731
    parts, bottom = draw_panel(run, 44, scale, until)
    words = "A bar is a prompt group. Its colour is the policy version that samples."
    more = "A training step has the colours of its 8 groups' tokens. Dashed: the trainer waits."
    title = "The first steps of an asynchronous run of the maze, coloured by policy version"
    head = [text(4, 16, words, "small"), text(4, 33, more, "small")]
    return svg(640, bottom + 20, title, [*head, *parts, *draw_axis(bottom, scale, until)])


def simulate_run(eta: int) -> Run:
    """Simulate the first steps of the maze with the times of a finished run."""
    from bench.simulate import RUNS, Simulation, replay

    recorded = next(run for run in json.loads(RUNS.read_text()) if run["name"].startswith("maze"))
    found = Simulation(replace(replay(recorded), eta=eta, steps=12)).run()
    steps = [times for times in found.steps if len(times) == 4]
    groups = [[*times, math.inf][:2] for times in found.groups.values()]
    return {
        "groups": sorted(groups),
        "waits": [[idle, begin] for idle, begin, _, _ in steps],
        "trains": [[begin, end] for _, begin, end, _ in steps],
        "updates": [[begin, end] for _, _, begin, end in steps],
        "trained": found.batches,
    }


def draw_timelines() -> str:
    runs = [("asynchronous, eta 2", simulate_run(2)), ("synchronous, eta 0", simulate_run(0))]
    until = runs[1][1]["updates"][4][1] + 0.2
    scale = lambda s: 64 + (640 - 72) * s / until  # noqa: E731
    parts, bottom = [], 0.0
    for words, run in runs:
        done = sum(end <= until for _, end in run["updates"])
        parts.append(text(4, bottom + 18, f"{words}: {done} steps in {until:.0f} s"))
        panel, bottom = draw_panel(run, bottom + 30, scale, until)
        parts += panel
    title = "An asynchronous and a synchronous run of the maze beside each other"
    return svg(640, bottom + 20, title, [*parts, *draw_axis(bottom, scale, until)])


def compared(fast: dict[str, Any], slow: dict[str, Any]) -> str:
    return (
        f"asynchronous: {slow['seconds'] / fast['seconds']:.2f} times as fast; held-out success"
        f" {fast['held_out']['eval_success']:.2f} and"
        f" {slow['held_out']['eval_success']:.2f}; the trainer waited (dashed)"
        f" {fast['waiting']:.0%} of the time instead of {slow['waiting']:.0%}"
    )


def draw_compare(data: dict[str, Any]) -> str:
    """Draw the first steps of both runs of bench/compare.py, and their success below."""
    runs = {name: data["compare"][name] for name in ("asynchronous", "synchronous")}
    until = runs["asynchronous"]["run"]["updates"][-1][1] + 1
    scale = lambda s: 64 + (640 - 72) * s / until  # noqa: E731
    words = compared(*runs.values())
    key = "A bar is a group of two attempts; its colour is the policy version that samples."
    more = "A training step has the colours of its tokens. v1, v2, ...: new weights."
    parts, bottom = [text(4, 18, words.partition("; ")[0])], 64.0
    for height, what in zip((36, 54, 70), (words.partition("; ")[2], key, more)):
        parts += [text(4, height, what, "small faint")]
    for name, one in runs.items():
        done = sum(end <= until for _, end in one["run"]["updates"])
        parts.append(text(4, bottom + 32, f"{name}: {done} steps in {until:.0f} s", "small"))
        panel, bottom = draw_panel(one["run"], bottom + 42, scale, until)
        parts += [*panel, *draw_axis(bottom, scale, until)]
        bottom += 14

    roof, floor = bottom + 60, bottom + 220
    last = max(one["seconds"] for one in runs.values())
    x = lambda s: 64 + (640 - 72 - 110) * s / last  # noqa: E731
    y = lambda success: floor - (floor - roof) * success  # noqa: E731
    parts.append(
        text(4, roof - 16, "success of the training episodes, mean of three steps", "small")
    )
    for share in (0, 0.5, 1):
        line = f'd="M64 {y(share):.1f}H{x(last):.1f}" style="opacity: 0.35"'
        parts += [f'<path class="line" {line}/>']
        parts += [text(58, y(share) + 4, f"{share:g}", "small faint", "end")]
    ticks = range(0, int(last) + 1, max(60, round(last / 5 / 60) * 60))
    parts += [text(x(s), floor + 18, f"{s} s", "small faint", "middle") for s in ticks]
    for name, one in runs.items():
        curve = one["curve"]
        near = [curve[max(0, k - 1) : k + 2] for k in range(len(curve))]
        points = [(s, sum(v for _, v in c) / len(c)) for (s, _), c in zip(curve, near)]
        path = "M" + "L".join(f"{x(s):.1f} {y(v):.1f}" for s, v in points)
        look = "" if name == "asynchronous" else ' stroke-dasharray="5 4"'
        parts.append(f'<path d="{path}" fill="none" stroke="#818b98" stroke-width="3"{look}/>')
        k, dx, anchor = (-1, 6, "start") if look else (2 * len(points) // 3, -10, "end")
        parts.append(text(x(points[k][0]) + dx, y(points[k][1]) + 4, name, "small", anchor))
    title = "Asynchronous and synchronous training of a pretrained model on the same problems"
    return svg(640, floor + 30, title, parts)


def read_curves(folder: Path, metric: str = "eval_success") -> dict[str, dict[str, float]]:
    """Return {run: {step: value}} of a metric, for all runs in a folder."""
    files = sorted(folder.glob("*/metrics.jsonl"))
    lines = {file: map(json.loads, file.read_text().splitlines()) for file in files}
    return {
        file.parent.name: {x["step"]: x[metric] for x in lines[file] if metric in x}
        for file in files
    }


def average(curves: list[list[float]]) -> list[float]:
    return [sum(column) / len(curves) for column in zip(*curves, strict=True)]


def draw_tool(data: dict[str, Any]) -> str:
    runs = data["tool"].values()
    steps = [*next(iter(runs))]
    curves = [[data["base"], *run.values()] for run in runs]
    names = ["one run", *[""] * (len(curves) - 1)]
    lines = [(name, "#a8c0d8", False, curve) for name, curve in zip(names, curves)]
    lines.append((f"mean of {len(curves)}", COLOURS[0], False, average(curves)))
    title = "SmolLM2-135M learns to call a calculator"
    return draw_chart(
        title, ["0", *steps], lines, 1.0, "training step", "success on held-out problems"
    )


def draw_credit(data: dict[str, Any]) -> str:
    lines: list[Line] = []
    gammas = {"1": "#a8c0d8", "0.9": "#f6c3c9", "0": "#bcdcc0"}
    for colour, (gamma, light) in zip(COLOURS, gammas.items()):
        runs = [run for name, run in data["credit"].items() if name.startswith(f"gamma{gamma}-")]
        curves = [[*run.values()] for run in runs]
        lines = [*[("", light, True, curve) for curve in curves], *lines]
        lines.append((f"gamma {gamma}", colour, False, average(curves)))
    ticks = [*runs[0]]
    title = "The reward of the answer goes back to the call, or does not"
    return draw_chart(title, ticks, lines, 1.0, "training step", "success of training episodes")


def draw_straddle(data: dict[str, Any]) -> str:
    side, line, label, rows = 4.5, 40, 140, data["answers"]
    parts = [
        text(4, 18, "A square is a token; its colour is the version that sampled it.", "small")
    ]
    for k, (step, pieces, reward) in enumerate(rows):
        top, x = 34 + line * k, float(label)
        parts.append(text(4, top + 11, f"step {step}, reward {reward:.2f}", "small"))
        for version, tokens in pieces:
            parts.append(text(x, top + 25, f"v{version}", "small faint"))
            for _ in range(tokens):
                parts.append(bar(x, top, side - 0.8, 12, colour(version)))
                x += side
    title = "Answers of the maze, each token coloured by the version that sampled it"
    return svg(640, 34 + line * len(rows), title, parts)


# ---------------------------------------------------------------- the tree

GAMMA = 0.5
CALLS = {  # name: (parent, the new message, the answer, the turn's own reward, x, y)
    "A": ("", "user: who wrote it?", "I will search", 0.0, 240, 40),
    "B": ("A", "tool: page 1", "it was Ada", 0.0, 160, 170),
    "C": ("A", "tool: page 2", "I do not know", 0.5, 380, 170),
    "D": ("B", "user: check it", "yes, it was Ada", 1.0, 82, 300),
    "E": ("B", "user: give the page", "page 9", 0.0, 246, 300),
}


def compute_rewards() -> dict[str, float]:
    from cache import InteractionCache, InteractionWithTokenLogpReward
    from inference.io_struct import ModelResponse

    cache, conversations = InteractionCache(), {"": list[dict[str, Any]]()}
    for name, (parent, message, answer, _, _, _) in CALLS.items():
        role, _, content = message.partition(": ")
        messages = [*conversations[parent], {"role": role, "content": content}]
        output = {"role": "assistant", "content": answer}
        conversations[name] = [*messages, output]
        response = ModelResponse([1], [2], [-0.5], [0], "stop")
        call = cache.enter(InteractionWithTokenLogpReward(messages, name))
        cache.finish(call, response, output)
        assert (call.parent.interaction_id if call.parent else "") == parent
    for name, (_, _, _, own, _, _) in CALLS.items():
        cache.set_reward(name, own)
    cache.apply_reward_discount(GAMMA)
    return {name: cache[name].reward or 0.0 for name in CALLS}


def draw_tree() -> str:
    parts = [
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="4" orient="auto" markerUnits="userSpaceOnUse">'
    ]
    parts.append('<path d="M0 0L8 4L0 8z" class="tip"/></marker></defs>')
    final = compute_rewards()
    for name, (parent, message, answer, own, x, y) in CALLS.items():
        if parent:
            up, down = (
                CALLS[parent][4] + (34 if x > CALLS[parent][4] else -34),
                CALLS[parent][5] + 64,
            )
            parts.append(f'<path class="line" d="M{up - 7} {down}L{x - 7} {y}"/>')
            parts.append(
                f'<path class="back" d="M{x + 7} {y - 1}L{up + 7} {down + 5}" marker-end="url(#tip)"/>'
            )
        parts.append(bar(x - 76, y, 152, 64, 'class="box" rx="6"'))
        parts.append(text(x, y + 17, message, "small faint", "middle"))
        parts.append(text(x, y + 36, f"{name}: {answer}", "", "middle"))
        parts.append(text(x, y + 55, f"r = {own:g}, R = {final[name]:g}", "small reward", "middle"))
    parts.append(text(240, 22, f"R = r + {GAMMA:g} x mean of the children's R", "", "middle"))
    return svg(480, 376, "A conversation tree; rewards flow from the leaves to the root", parts)


# ---------------------------------------------------------------- charts

Line = tuple[str, str, bool, list[float]]  # (name, colour, whether the line is dashed, values)


def draw_chart(
    title: str, ticks: list[str], lines: list[Line], top: float, below: str, beside: str
) -> str:
    """Draw a line chart. Each line has one value per tick of the horizontal axis.

    Values above `top` are drawn at `top`. `below` labels the horizontal axis, `beside` the vertical
    axis.
    """
    width, height, left, roof = 640, 380, 44, 52
    right, floor = width - 150, height - 52
    x = lambda k: left + 14 + (right - left - 28) * k / (len(ticks) - 1)  # noqa: E731
    y = lambda value: floor - (floor - roof) * min(value, top) / top  # noqa: E731
    parts = [text(4, 18, title), text(4, 38, beside, "small faint")]
    for k in range(5):
        value = top * k / 4
        parts.append(
            f'<path class="line" d="M{left} {y(value):.1f}H{right}" style="opacity: 0.35"/>'
        )
        parts.append(text(left - 6, y(value) + 4, f"{value:g}", "small faint", "end"))
    parts += [text(x(k), floor + 18, tick, "small", "middle") for k, tick in enumerate(ticks)]
    parts.append(text((left + right) / 2, height - 12, below, "small faint", "middle"))
    labels: list[tuple[float, str, str]] = []
    for name, tint, dashed, values in lines:
        path = "M" + "L".join(f"{x(k):.1f} {y(value):.1f}" for k, value in enumerate(values))
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        parts.append(f'<path d="{path}" fill="none" stroke="{tint}" stroke-width="2.5"{dash}/>')
        labels.append((y(values[-1]) + 4, name, tint))
    last = -math.inf
    for at, name, tint in sorted(label for label in labels if label[1]):
        last = max(at, last + 15)
        parts.append(bar(right + 4, last - 9, 10, 10, f'fill="{tint}"'))
        parts.append(text(right + 19, last, name, "small"))
    return svg(width, height, title, parts)


def read_clusters() -> dict[tuple[str, str, str, str], dict[str, str]]:
    """Return the rows of docs/clusters.csv as {(what, gpus or sigma, eta, order): row}."""
    lines = csv.DictReader((DOCS / "clusters.csv").read_text().splitlines())
    return {(r["what"], r["gpus"] or r["sigma"], r["eta"], r["order"]): r for r in lines}


# ---------------------------------------------------------------- the command


def draw_all() -> dict[str, str]:
    data = json.loads((DOCS / "figures.json").read_text())
    return {
        "front.svg": draw_front(data),
        "timelines.svg": draw_timelines(),
        "straddle.svg": draw_straddle(data),
        "rewards.svg": draw_tree(),
        "compare.svg": draw_compare(data),
        "tool.svg": draw_tool(data),
        "credit.svg": draw_credit(data),
    }


def keep(**numbers: Any) -> None:
    kept = DOCS / "figures.json"
    data = json.loads(kept.read_text()) | numbers
    kept.write_text(
        "{" + ",\n".join(f"{json.dumps(name)}: {json.dumps(data[name])}" for name in data) + "}\n"
    )
    for name, picture in draw_all().items():
        (DOCS / name).write_text(picture)


def main(words: list[str]) -> None:
    if words[:1] == ["--run"]:
        keep(run=read_run(Path(words[1]), 12))
    elif words[:1] == ["--tool"]:
        keep(tool=read_curves(Path(words[1])))
    elif words[:1] == ["--credit"]:
        keep(credit=read_curves(Path(words[1]), "success"))
    elif words[:1] == ["--answers"]:
        keep(answers=read_answers(Path(words[1]), 8))
    else:
        keep()


if __name__ == "__main__":
    main(sys.argv[1:])
