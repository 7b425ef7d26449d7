"""Print docs/lifecycle.md with the numbers of a new run. With --write, write the page instead.

docs/tour.py makes the run. The functions in MAKERS make the page's ```text blocks, in order. The
page states the hash of the base model, because another base model gives other numbers.
"""

import os
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from hashlib import blake2b
from math import exp
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.markdown import Markdown  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

PAGE = ROOT / "docs" / "lifecycle.md"
BLOCK = re.compile(r"```text\n.*?```", re.DOTALL)
EPS, EPS_HIGHER, C_CLIP, SCALE = 0.2, 0.28, 2.0, 2.5  # from configs/demo.yaml
POLICIES = {"pi_behav": "logprobs", "pi_prox": "prox_logp", "pi_theta": "theta_logp"}
Tour = dict[str, Any]  # what docs/tour.py returns


def line(name: str, values: list) -> str:
    return f"{name:10}" + "".join(
        f"{v:9.3f}" if isinstance(v, float) else f"{v:>9}" for v in values
    )


def tokens(tour: Tour) -> str:
    return line("token", [tour["words"][i] for i in tour["game"]["input_ids"].tolist()])


def gate(tour: Tour) -> list[str]:
    states = zip(("at first", "started", "updated"), tour["gates"])
    return [
        line("", list(tour["gates"][0])),
        *(line(when, list(state.values())) for when, state in states),
    ]


def request(tour: Tour) -> list[str]:
    group, k = tour["group"], tour["longest"]
    words, turns = (
        [tour["words"][i] for i in group["input_ids"][k].tolist()],
        group["turn_ids"][k].tolist(),
    )
    begin = {turn: turns.index(turn) for turn in range(max(turns) + 1)}
    end = {turn: begin[turn] + turns.count(turn) for turn in begin}
    last = max(turns)
    parts = {
        "the parent's prompt": words[: begin[last - 1]],
        "the parent's output": words[begin[last - 1] : end[last - 1]],
        "the new messages": words[end[last - 1] : begin[last]],
        "the model's answer": words[begin[last] : end[last]],
    }
    return [text for name, part in parts.items() for text in (f"{name}:", "  " + " ".join(part))]


def versions(tour: Tour) -> list[str]:
    game = tour["game"]
    return [
        tokens(tour),
        line("version", game["versions"].tolist()),
        line("log p", game["logprobs"].tolist()),
    ]


def returns(tour: Tour) -> list[list[float]]:
    """The final reward R of each turn of each game."""
    group = tour["group"]
    rows = zip(group["turn_ids"], group["turn_rewards"])
    return [[float(R[turns == t][0]) for t in range(int(turns.max()) + 1)] for turns, R in rows]


def tree(tour: Tour) -> list[str]:
    """Draw the four games as one tree, with own rewards r and final rewards R."""
    group, lines = tour["group"], ["guess a number"]
    for k, R in enumerate(returns(tour)):
        turns, ids = group["turn_ids"][k].tolist(), group["input_ids"][k].tolist()
        said = [tour["words"][ids[turns.index(t)]] for t in range(len(R))]
        heard = ["", *(tour["words"][ids[turns.index(t) - 3]] for t in range(1, len(R)))]
        for t, (word, reply, final) in enumerate(zip(said, heard, R)):
            own = float(group["rewards"][k]) if t == len(R) - 1 else 0.0
            branch = "└── " if k == len(group["rewards"]) - 1 else "├── "
            stem = "    " if k == len(group["rewards"]) - 1 else "│   "
            text = (
                (branch if t == 0 else stem + "    " * (t - 1) + "└── ")
                + (reply and reply + ": ")
                + word
            )
            lines.append(f"{text:32} r {own:.2f}   R {final:.2f}")
    return lines


def age(tour: Tour) -> list[str]:
    head, version = int(tour["game"]["versions"].min()), tour["gates"][2]["version"]
    return [
        f"head version {head}, consumed at version {version}: age {version - head}, at most eta = 1"
    ]


def policies(tour: Tour) -> list[str]:
    return [
        tokens(tour),
        *(line(name, tour["game"][key].exp().tolist()) for name, key in POLICIES.items()),
    ]


def advantages(tour: Tour) -> list[str]:
    lines, every, k = list[str](), returns(tour), tour["longest"]
    code = tour["game"]["advantages"].tolist()
    for t, own in enumerate(every[k]):
        played = [R[t] for R in every if len(R) > t]
        mean = sum(played) / len(played)
        R = ", ".join(f"{x:g}" for x in played)
        A = (own - mean) * SCALE
        lines.append(
            f"turn {t}   R: {R}".ljust(36) + f"A = ({own:g} - {mean:g}) * {SCALE} = {A:.4f}"
        )
    lines.append(line("the code", code))
    return lines


def loss(tour: Tour) -> list[str]:
    behav, prox, theta, advantages = (
        tour["game"][key].tolist() for key in (*POLICIES.values(), "advantages")
    )
    rows = list[tuple[float, float, float, float]]()
    for b, p, t, A in zip(behav, prox, theta, advantages):
        w, u = exp(p - b), exp(t - p)
        J = min(u * A, min(max(u, 1 - EPS), 1 + EPS_HIGHER) * A)
        if A < 0:
            J = max(J, C_CLIP * A)
        rows.append((w, u, A, -w * J))
    lines = [line(name, list(values)) for name, values in zip(("w", "u", "A", "loss"), zip(*rows))]
    hand = sum(row[-1] for row in rows) / len(rows)
    return [
        tokens(tour),
        *lines,
        f"the mean by hand: {hand:.5f}",
        f"the code's loss:  {tour['loss']:.5f}",
    ]


MAKERS: list[Callable[[Tour], list[str]]] = [
    gate,
    request,
    versions,
    tree,
    age,
    policies,
    advantages,
    loss,
]


def fill(page: str, tour: Tour) -> str:
    blocks = ("\n".join(["```text", *make(tour), "```"]) for make in MAKERS)
    weights = (ROOT / tour["model_path"] / "model.safetensors").read_bytes()
    page = re.sub(r"(?<=has the hash\s`)\w*", blake2b(weights, digest_size=4).hexdigest(), page)
    return BLOCK.sub(lambda _: next(blocks), page)


def main() -> None:
    from tour import take_tour

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    os.chdir(ROOT)
    with redirect_stdout(sys.stderr):
        page = fill(PAGE.read_text(), take_tour())
    if "--write" in sys.argv:
        PAGE.write_text(page)
    elif sys.stdout.isatty():
        Console(highlight=False).print(Markdown(page))
    else:
        print(page, end="")


if __name__ == "__main__":
    main()
