"""Make the screenshots of the HTML report for docs/: docs/report-{wide,narrow,dark}.png and docs/timeline.png.

    python docs/screenshots.py ASYNC SYNC STRADDLING

Each argument is the folder of a run. ASYNC is a run of the demo with eta 1, and SYNC is a run of the demo with eta 0.
STRADDLING is a run in which weight updates interrupt completions (configs/maze.yaml). The command needs Chromium.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
ONLY_TIMELINE = "header, section:not(:has(#h-time)), #zoom, #h-time, #h-time + p { display: none }"
ONLY_TRAJECTORIES = "header, section:not(:has(#h-traj)) { display: none }"


def take(
    page: str, name: str, width: int, height: int, style: str = "", dark: bool = False
) -> None:
    """Write docs/{name}.png, a screenshot of the HTML page `page` in a browser window of `width` x `height` pixels.

    The function adds the CSS `style` to the page. If `dark` is true, the page shows its dark colours.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, picture = Path(folder) / "page.html", Path(folder) / "page.png"
        path.write_text(page.replace("</head>", f"<style>{style}</style></head>"), encoding="utf-8")
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--virtual-time-budget=5000",
        ]
        colours = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        size = [
            f"--window-size={width},{height}",
            f"--user-data-dir={folder}/chromium",
            f"--screenshot={picture}",
        ]
        subprocess.run(
            [CHROMIUM, *flags, colours, *size, path.as_uri()],
            check=True,
            capture_output=True,
            timeout=200,
        )
        Image.open(picture).convert("RGB").save(DOCS / f"{name}.png", optimize=True)


def main() -> None:
    from run.report import make_page

    asynchronous, synchronous, straddling = map(Path, sys.argv[1:])
    both, one, mixed = (
        make_page([asynchronous, synchronous]),
        make_page([asynchronous]),
        make_page([straddling]),
    )
    take(both, "timeline", 1000, 690, ONLY_TIMELINE)
    take(one, "report-wide", 1200, 1250)
    take(one, "report-narrow", 500, 1100, ONLY_TRAJECTORIES)
    take(mixed, "report-dark", 1000, 660, ONLY_TRAJECTORIES, dark=True)


if __name__ == "__main__":
    main()
