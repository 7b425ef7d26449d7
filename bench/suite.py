"""Compare how long the tests of `make test` take, in an earlier revision and in this checkout.

    python bench/suite.py --against 39d5181

First the script runs the tests of the earlier revision, in the way of `make test`: two processes, without the tests
with the mark `runs`. Then it runs the tests with these names in this checkout twice. The first time, it runs all of
them, even the tests that were moved to `make test-runs` (mark `runs`). The second time, it runs only the tests that
`make test` still runs. For each run the script prints the seconds, the ratio to the seconds of the earlier revision,
and the last line of pytest.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.speedrun import extract  # noqa: E402

# A plugin of pytest that keeps only the tests with the names in the file $NAMES.
PLUGIN = """
import os, pathlib

def pytest_collection_modifyitems(config, items):
    names = set(pathlib.Path(os.environ["NAMES"]).read_text().split())
    config.hook.pytest_deselected(items=[item for item in items if item.originalname not in names])
    items[:] = [item for item in items if item.originalname in names]
"""


def pytest(tree: Path, *words: str, **variables: str) -> tuple[float, list[str]]:
    """Run pytest in a source tree. Return the seconds and the lines of the output."""
    begin = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "pytest", *words]
    done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode > 1:  # 1: a test failed
        raise SystemExit(
            f"{' '.join(command)}: ended with code {done.returncode}\n{done.stdout[-2000:]}"
        )
    return time.monotonic() - begin, done.stdout.splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", required=True, help="the earlier revision")
    args = parser.parse_args()
    two = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    with tempfile.TemporaryDirectory() as scratch:
        earlier, names = Path(scratch) / "earlier", Path(scratch) / "names"
        extract(args.against, earlier)
        (ROOT / ".cache").mkdir(exist_ok=True)
        (earlier / ".cache").symlink_to(
            ROOT / ".cache"
        )  # both revisions keep their base models in one folder
        (Path(scratch) / "only_named.py").write_text(PLUGIN)
        _, found = pytest(earlier, "-m", "not runs", "--collect-only", PYTHONPATH=str(earlier))
        names.write_text(
            "\n".join(line.split("::")[-1].split("[")[0] for line in found if "::" in line)
        )
        paths = f"{scratch}{os.pathsep}{ROOT}"
        before, old = pytest(earlier, *two, "-m", "not runs", PYTHONPATH=str(earlier))
        print(f"{args.against}: {before:.0f} s: {old[-1]}", flush=True)
        for what, words in {"now": (), "now, in make test": ("-m", "not runs")}.items():
            now, new = pytest(
                ROOT, *two, "-p", "only_named", *words, PYTHONPATH=paths, NAMES=str(names)
            )
            print(f"{what}: {now:.0f} s, ratio {now / before:.2f}: {new[-1]}", flush=True)


if __name__ == "__main__":
    main()
