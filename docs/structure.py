"""Draw docs/structure.svg, the picture of the imports between the modules (`make structure`).

The picture has a box for each row of the table in docs/structure.md. The left column has the seven top-level files. The
right column has the folders, with the names of their modules. An arrow from box A to box B stands for all import
statements in A's modules that name a module of B. An arrow between the columns crosses the middle of the picture. An
arrow inside a column runs along the outer side of the column. In a browser, a tooltip of each arrow lists the imports.

The style sheet of the picture contains a second set of colours, for browsers in dark mode.
"""

import ast
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDTH, LINE, GAP = (
    704,
    20,
    14,
)  # pixels: width of the picture, height of a line of text, space between two folders
# Boxes of the left column, in pixels: x coordinate, width, height, and the space between two boxes.
FILE_X, FILE_WIDTH, FILE_HEIGHT, FILE_GAP = 60, 124, 84, 43
# Boxes of the right column, in pixels: x coordinate, width, and the width of a module's name.
FOLDER_X, FOLDER_WIDTH, MODULE_WIDTH = 344, 290, 128
STYLE = """.paper, .box { fill: #ffffff } .box { stroke: #8c959f } text { font: 15px system-ui, sans-serif; fill: #1f2328 }
.name { font-weight: 600 } path { fill: none; stroke-width: 1.4 } path:hover { stroke-width: 4 }
.file { stroke: #0969da } .folder { stroke: #bc4c00 } @media (prefers-color-scheme: dark) { text { fill: #e6edf3 }
.paper, .box { fill: #0d1117 } .file { stroke: #58a6ff } .folder { stroke: #f0883e } }"""
Arrow = tuple[str, str]  # (name of the importing box, name of the imported box)


@dataclass
class Box:
    """The box of a top-level file or of a folder."""

    name: str  # name in the table of docs/structure.md, such as "cache.py" or "inference/tiny"
    modules: list[str]  # dotted names of the modules, such as "cache" or "inference.tiny.model"
    is_folder: bool
    top: int  # pixels
    height: int  # pixels


def place_boxes() -> dict[str, Box]:
    """Return the boxes by name: one box for each row of the table in docs/structure.md."""
    boxes = {}
    # The key True of `tops` is the column of folders, and the key False is the column of files.
    tops = {True: GAP, False: GAP}  # y coordinate of the next box in each column
    for name in re.findall(
        r"^\| `([\w/.]+)` \|", (ROOT / "docs/structure.md").read_text(), re.MULTILINE
    ):
        is_folder = not name.endswith(".py")
        paths = ROOT.glob(f"{name}/[!_]*.py" if is_folder else name)
        modules = sorted(
            str(path.relative_to(ROOT).with_suffix("")).replace("/", ".") for path in paths
        )
        height = LINE * (2 + (len(modules) + 1) // 2) if is_folder else FILE_HEIGHT
        boxes[name] = Box(name, modules, is_folder, tops[is_folder], height)
        tops[is_folder] += height + (GAP if is_folder else FILE_GAP)
    return boxes


def read_imports(module: str) -> set[str]:
    """Return the dotted names of all imports of a module, including imports inside functions."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            package = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            found |= {*package, *(".".join([*package, alias.name]) for alias in node.names)}
    return found


def find_arrows(boxes: dict[str, Box]) -> dict[Arrow, list[str]]:
    """Return each arrow with its imports, such as {("engine.py", "inference"): ["engine -> inference.wire"]}."""
    home = {module: box.name for box in boxes.values() for module in box.modules}
    arrows: dict[Arrow, list[str]] = {}
    for module, box in home.items():
        for imported in sorted(read_imports(module) & home.keys()):
            if home[imported] != box:
                arrows.setdefault((box, home[imported]), []).append(f"{module} -> {imported}")
    return arrows


def place_ends(
    boxes: dict[str, Box], arrows: dict[Arrow, list[str]]
) -> dict[tuple[str, Arrow], int]:
    """Return the y coordinates of both ends of each arrow. A key is a pair: the name of a box, and an arrow that
    begins or ends at this box.

    The arrows at one side of a box are evenly spaced. From top to bottom, they have the order of the boxes at their
    other ends.
    """
    sides: dict[tuple[str, bool], list[tuple[int, Arrow]]] = {}
    for arrow in arrows:
        for here, there in (arrow, arrow[::-1]):
            crosses = boxes[here].is_folder != boxes[there].is_folder
            sides.setdefault((here, crosses), []).append((boxes[there].top, arrow))
    ends = {}
    for (name, _), found in sides.items():
        for k, (_, arrow) in enumerate(sorted(found), 1):
            ends[name, arrow] = boxes[name].top + boxes[name].height * k // (len(found) + 1)
    return ends


def draw_arrow(source: Box, target: Box, start: int, end: int, imports: list[str]) -> str:
    """Return the SVG of an arrow from y coordinate `start` to y coordinate `end`. The tooltip lists the imports."""
    if source.is_folder != target.is_folder:
        x1, x2 = (
            (FOLDER_X, FILE_X + FILE_WIDTH) if source.is_folder else (FILE_X + FILE_WIDTH, FOLDER_X)
        )
        bend = (x1 + x2) // 2
    else:
        x1 = x2 = FOLDER_X + FOLDER_WIDTH if source.is_folder else FILE_X
        bend = x1 + (14 + abs(end - start) // 10) * (1 if source.is_folder else -1)
    back = (
        x2 - 8 if bend < x2 else x2 + 8
    )  # x coordinate at which the two strokes of the arrow's head begin
    line = f"M{x1} {start}C{bend} {start} {bend} {end} {x2} {end}M{back} {end - 4}L{x2} {end}L{back} {end + 4}"
    title = f"{source.name} imports from {target.name}, {len(imports)} in all:\n" + "\n".join(
        imports
    )
    return f'<path class="{"folder" if source.is_folder else "file"}" d="{line}"><title>{escape(title)}</title></path>'


def draw_box(box: Box) -> str:
    """Return the SVG of a box with its name. The box of a folder also shows its modules in two columns."""
    x, width = (FOLDER_X, FOLDER_WIDTH) if box.is_folder else (FILE_X, FILE_WIDTH)
    y = box.top + (23 if box.is_folder else FILE_HEIGHT // 2 + 5)
    out = [
        f'<rect class="box" x="{x}" y="{box.top}" width="{width}" height="{box.height}" rx="6"/>'
    ]
    out.append(
        f'<text class="name" x="{x + 10}" y="{y}">{box.name}{"/" if box.is_folder else ""}</text>'
    )
    for k, module in enumerate(box.modules if box.is_folder else []):
        right, down = MODULE_WIDTH * (k % 2), LINE * (1 + k // 2)
        out.append(f'<text x="{x + 10 + right}" y="{y + down}">{module.rpartition(".")[2]}</text>')
    return "\n".join(out)


def draw() -> str:
    """Return the whole picture as SVG text: the background, the arrows, and the boxes on top of the arrows."""
    boxes = place_boxes()
    arrows = find_arrows(boxes)
    ends = place_ends(boxes, arrows)
    height = max(box.top + box.height for box in boxes.values()) + GAP
    curves = [
        draw_arrow(boxes[a], boxes[b], ends[a, (a, b)], ends[b, (a, b)], arrows[a, b])
        for a, b in arrows
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">\n<style>{STYLE}</style>'
    paper = '<rect class="paper" width="100%" height="100%"/>'
    return "\n".join([head, paper, *curves, *map(draw_box, boxes.values()), "</svg>\n"])


if __name__ == "__main__":
    (ROOT / "docs/structure.svg").write_text(draw())
