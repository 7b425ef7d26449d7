"""Draw docs/straddle.svg, answers of a finished run that weight updates interrupted.

    python docs/figures.py RUN

RUN is the folder of a run of configs/maze.yaml. Each row of the picture is one answer, and each square is one token.
The colour of a square shows which version sampled the token. A line marks a weight update in the middle of the answer.
"""

import sys
from html import escape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from safetensors.torch import load_file  # noqa: E402

COLOURS = "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377"  # Paul Tol's colours, safe for all eyes
WIDTH, SIDE, LINE, LABEL = 720, 5, 26, 150  # pixels: the picture, a token, a row, and the labels of the rows
STYLE = """.paper { fill: #ffffff } text { font: 13px system-ui, sans-serif; fill: #1f2328 }
@media (prefers-color-scheme: dark) { .paper { fill: #0d1117 } text { fill: #e6edf3 } }"""


def answers(run: Path, count: int) -> list[tuple[int, list[int], float]]:
    """Return (step, versions of the tokens, reward) of the answers with the most versions, at most one per step."""
    found = []
    for path in sorted((run / "tokens").glob("*.safetensors")):
        batch = load_file(path)
        rows = []
        for versions, turns, reward in zip(batch["versions"], batch["turn_ids"], batch["rewards"].tolist()):
            sampled = versions[turns >= 0].tolist()
            rows.append((len(set(sampled)), -abs(len(sampled) - 90), sampled, reward))
        most, _, sampled, reward = max(rows)
        if most > 1 and len(sampled) * SIDE <= WIDTH - LABEL - 10:
            found.append((most, int(path.stem), sampled, reward))
    best = sorted(found, key=lambda item: (-item[0], item[1]))[:count]
    return [(step, sampled, reward) for _, step, sampled, reward in sorted(best, key=lambda item: item[1])]


def draw(rows: list[tuple[int, list[int], float]]) -> str:
    """Return the picture as SVG."""
    height = LINE * (len(rows) + 1) + 8
    parts: list[Any] = [f'<rect class="paper" width="{WIDTH}" height="{height}"/>']
    for k, (step, versions, reward) in enumerate(rows):
        top = 8 + LINE * k
        parts.append(f'<text x="4" y="{top + 13}">step {step}, reward {escape(f"{reward:.2f}")}</text>')
        for i, version in enumerate(versions):
            x = LABEL + SIDE * i
            if i and versions[i - 1] != version:
                parts.append(f'<text x="{x - 3}" y="{top + 24}" style="font-size: 9px">v{version}</text>')
            colour = COLOURS[version % len(COLOURS)]
            parts.append(f'<rect x="{x}" y="{top + 2}" width="{SIDE - 1}" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{LABEL - 0}" y="{top + 24}" style="font-size: 9px">v{versions[0]}</text>')
    parts.append(f'<text x="{LABEL}" y="{height - 10}">each square is one token; its colour is the version</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">'
    title = "<title>Answers of the maze, each token coloured by the version that sampled it</title>"
    return "\n".join([head, title, f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    (DOCS / "straddle.svg").write_text(draw(answers(Path(sys.argv[1]), count=8)))
