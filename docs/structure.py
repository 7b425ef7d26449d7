"""Draw docs/structure.svg, the picture of what imports what (`make structure`).

The rows of the table in docs/structure.md say which boxes there are. The seven top-level files stand in the left column
and the rooms, with the names of their modules, in the right one. Every import statement of a module belongs to one
arrow, from the importing box to the imported box. An arrow between the columns crosses the middle. An arrow inside a
column runs along its outer side. In a browser, pointing at an arrow of the picture shows its imports and their number.

The picture has a background of its own and a second set of colours for dark screens.
"""

import ast
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDTH, LINE, GAP = 704, 20, 14  # pixels: the picture, a line of text, the space between two rooms
FILE_X, FILE_WIDTH, FILE_HEIGHT, FILE_GAP = 60, 124, 84, 43  # pixels: the left column
ROOM_X, ROOM_WIDTH, MODULE_WIDTH = 344, 290, 128  # pixels: the right column
STYLE = """.paper, .box { fill: #ffffff } .box { stroke: #8c959f } text { font: 15px system-ui, sans-serif; fill: #1f2328 }
.name { font-weight: 600 } path { fill: none; stroke-width: 1.4 } path:hover { stroke-width: 4 }
.file { stroke: #0969da } .room { stroke: #bc4c00 } @media (prefers-color-scheme: dark) { text { fill: #e6edf3 }
.paper, .box { fill: #0d1117 } .file { stroke: #58a6ff } .room { stroke: #f0883e } }"""
Arrow = tuple[str, str]  # the names of the importing box and of the imported box


@dataclass
class Box:
    """One of the seven files, or a room."""

    name: str  # as the table has it: "cache.py", "inference/tiny"
    modules: list[str]  # dotted names: "cache", "inference.tiny.model"
    is_room: bool
    top: int  # pixels
    height: int  # pixels


def place_boxes() -> dict[str, Box]:
    """Return a box for each row of the table in docs/structure.md, by name."""
    boxes = {}
    tops = {True: GAP, False: GAP}  # where the next box of each column begins: of the rooms, of the files
    for name in re.findall(r"^\| `([\w/.]+)` \|", (ROOT / "docs/structure.md").read_text(), re.MULTILINE):
        is_room = not name.endswith(".py")
        paths = ROOT.glob(f"{name}/[!_]*.py" if is_room else name)
        modules = sorted(str(path.relative_to(ROOT).with_suffix("")).replace("/", ".") for path in paths)
        height = LINE * (2 + (len(modules) + 1) // 2) if is_room else FILE_HEIGHT
        boxes[name] = Box(name, modules, is_room, tops[is_room], height)
        tops[is_room] += height + (GAP if is_room else FILE_GAP)
    return boxes


def read_imports(module: str) -> set[str]:
    """Return the dotted name of everything that the module imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            package = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            found |= {*package, *(".".join([*package, alias.name]) for alias in node.names)}
    return found


def find_arrows(boxes: dict[str, Box]) -> dict[Arrow, list[str]]:
    """Return the imports of each arrow: {("engine.py", "inference"): ["engine -> inference.wire", ...], ...}."""
    home = {module: box.name for box in boxes.values() for module in box.modules}
    arrows: dict[Arrow, list[str]] = {}
    for module, box in home.items():
        for imported in sorted(read_imports(module) & home.keys()):
            if home[imported] != box:
                arrows.setdefault((box, home[imported]), []).append(f"{module} -> {imported}")
    return arrows


def place_ends(boxes: dict[str, Box], arrows: dict[Arrow, list[str]]) -> dict[tuple[str, Arrow], int]:
    """Return the height at which each arrow meets each of its boxes.

    The arrows at one side of a box keep equal distances, in the order of the boxes at their other ends.
    """
    sides: dict[tuple[str, bool], list[tuple[int, Arrow]]] = {}
    for arrow in arrows:
        for here, there in (arrow, arrow[::-1]):
            crosses = boxes[here].is_room != boxes[there].is_room
            sides.setdefault((here, crosses), []).append((boxes[there].top, arrow))
    ends = {}
    for (name, _), found in sides.items():
        for k, (_, arrow) in enumerate(sorted(found), 1):
            ends[name, arrow] = boxes[name].top + boxes[name].height * k // (len(found) + 1)
    return ends


def draw_arrow(source: Box, target: Box, start: int, end: int, imports: list[str]) -> str:
    """Return an arrow that begins at height `start` and ends at height `end`; its title names the imports."""
    if source.is_room != target.is_room:
        x1, x2 = (ROOM_X, FILE_X + FILE_WIDTH) if source.is_room else (FILE_X + FILE_WIDTH, ROOM_X)
        bend = (x1 + x2) // 2
    else:
        x1 = x2 = ROOM_X + ROOM_WIDTH if source.is_room else FILE_X
        bend = x1 + (14 + abs(end - start) // 10) * (1 if source.is_room else -1)
    back = x2 - 8 if bend < x2 else x2 + 8  # where the two strokes of the arrow's head begin
    line = f"M{x1} {start}C{bend} {start} {bend} {end} {x2} {end}M{back} {end - 4}L{x2} {end}L{back} {end + 4}"
    title = f"{source.name} imports from {target.name}, {len(imports)} in all:\n" + "\n".join(imports)
    return f'<path class="{"room" if source.is_room else "file"}" d="{line}"><title>{escape(title)}</title></path>'


def draw_box(box: Box) -> str:
    """Return a box with its name and, for a room, the names of its modules in two columns."""
    x, width = (ROOM_X, ROOM_WIDTH) if box.is_room else (FILE_X, FILE_WIDTH)
    y = box.top + (23 if box.is_room else FILE_HEIGHT // 2 + 5)
    out = [f'<rect class="box" x="{x}" y="{box.top}" width="{width}" height="{box.height}" rx="6"/>']
    out.append(f'<text class="name" x="{x + 10}" y="{y}">{box.name}{"/" if box.is_room else ""}</text>')
    for k, module in enumerate(box.modules if box.is_room else []):
        right, down = MODULE_WIDTH * (k % 2), LINE * (1 + k // 2)
        out.append(f'<text x="{x + 10 + right}" y="{y + down}">{module.rpartition(".")[2]}</text>')
    return "\n".join(out)


def draw() -> str:
    """Return the picture as SVG text: the background, the arrows, and above them the boxes."""
    boxes = place_boxes()
    arrows = find_arrows(boxes)
    ends = place_ends(boxes, arrows)
    height = max(box.top + box.height for box in boxes.values()) + GAP
    curves = [draw_arrow(boxes[a], boxes[b], ends[a, (a, b)], ends[b, (a, b)], arrows[a, b]) for a, b in arrows]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">\n<style>{STYLE}</style>'
    paper = '<rect class="paper" width="100%" height="100%"/>'
    return "\n".join([head, paper, *curves, *map(draw_box, boxes.values()), "</svg>\n"])


if __name__ == "__main__":
    (ROOT / "docs/structure.svg").write_text(draw())
