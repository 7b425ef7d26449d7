"""bench/gpu_check.py runs a list of cells. Each cell is a process that checks one thing on a GPU. The script lists only
the cells that can start on this machine. The script kills a cell that hangs, and continues after a cell that fails."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from runs import is_alive

from run.load import load
from run.plan import plan_run

sys.path.append(str(ROOT / "bench"))
import gpu_check as bench  # type: ignore[import-not-found]

MACHINES = {  # machines for which the tests list the cells
    "no GPU": bench.Machine(0, has_sglang=False),
    "one GPU": bench.Machine(1, has_sglang=True),
    "one GPU without SGLang": bench.Machine(1, has_sglang=False),
    "four GPUs": bench.Machine(4, has_sglang=True),
}


def cells_of(machine: str, work: Path) -> dict[str, Any]:
    """Return the cells that the script lists for MACHINES[machine], with the cells' names as keys."""
    return {cell.name: cell for cell in bench.list_cells(MACHINES[machine], work)}


@pytest.mark.parametrize("machine", MACHINES)
def test_every_run_of_the_check_has_a_plan_that_fits(
    machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each cell that runs train.py passes the checks of `--dry-run`. `--dry-run` checks that the configuration is
    valid, that the update mode fits the GPUs, and that 80 GiB of memory on each GPU are sufficient."""
    for shape in bench.SHAPES:
        bench.make_config(shape, 1, 2).save_pretrained(tmp_path / f"model-{shape}")
    gpus = MACHINES[machine].gpus
    runs = [cell for cell in cells_of(machine, tmp_path).values() if cell.words]
    assert len(runs) >= 8
    for cell in runs:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(cell.ranks))
        monkeypatch.setenv("WORLD_SIZE", str(cell.ranks))
        there = ["--dry-run", "--gpus", str(gpus), "--gpu-memory", "80"] if gpus else []
        servers, _ = plan_run(load([*cell.words, *there]))
        assert ("sglang.launch_server" in servers[0].command) == MACHINES[machine].has_sglang, (
            cell.name
        )


def test_an_impossible_cell_is_not_listed(tmp_path: Path) -> None:
    """A cell in which trainer and server communicate over NCCL is listed only if there are two GPUs. If the packages of
    train.py are not installed, only the cells that need no server are listed."""
    assert "run-distributed" not in cells_of("one GPU", tmp_path)
    assert {"run-distributed", "run-split"} <= cells_of("four GPUs", tmp_path).keys()
    bare = bench.list_cells(bench.Machine(1, has_sglang=False, missing="fastapi"), tmp_path)
    assert {cell.name.partition("-")[0] for cell in bare} == {"probe", "head", "train", "test"}


def test_the_list_starts_nothing(tmp_path: Path) -> None:
    """`--list` prints every cell with its time limit and its command, and makes no folder."""
    command = [
        sys.executable,
        "bench/gpu_check.py",
        "--list",
        "--gpus",
        "4",
        "--work",
        str(tmp_path / "work"),
    ]
    text = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert "run-torchrun (at most 600 s)" in text
    assert not (tmp_path / "work").exists()


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "a").write(f"{os.getpid()} ")
if len(sys.argv) > 2:  # make a child in a session of its own, whose parent ends at once
    parent = [sys.executable, "-c", "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"]
    subprocess.run([*parent, sys.executable, __file__, sys.argv[1]])
print("still here", flush=True)
time.sleep(600)
"""


DRIVER = """
import json, sys
from pathlib import Path
import gpu_check
gpu_check.GRACE_SECONDS = 0.5
work, cells = Path(sys.argv[1]), [gpu_check.Cell(*cell) for cell in json.loads(sys.argv[2])]
print(gpu_check.check(cells, work, float(sys.argv[3]), lambda cell: None, "Measured nowhere."))
"""


def check(work: Path, cells: list[Any], seconds: float = 600) -> tuple[int, dict[str, str]]:
    """Run cells (name, command, limit) with gpu_check.check in another process. Return how many cells failed, and the
    rows of the page gpu.md that gpu_check.check writes."""
    command = [sys.executable, "-c", DRIVER, str(work), json.dumps(cells), str(seconds)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "bench")}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=100
    )
    page = (work / "gpu.md").read_text()
    rows = {line.split(" | ")[0][2:]: line for line in page.splitlines() if line.startswith("| ")}
    return int(done.stdout.splitlines()[-1]), rows


def test_a_cell_that_hangs_is_ended_with_its_processes(tmp_path: Path) -> None:
    """A cell that exceeds its time limit is killed with all its processes. The script also kills the orphaned processes
    that the cell has started in other process sessions. On the page of results, the row of a killed cell names the time
    limit. After a cell that fails or cannot start, the next cell still runs. When the time limit for all cells is
    reached, each remaining cell gets a row with the words "not started". A second run of the script repeats only the
    cells that have not succeeded."""
    script, pids = tmp_path / "stubborn.py", tmp_path / "pids"
    script.write_text(STUBBORN)
    count = f"open({str(tmp_path / 'count')!r}, 'a').write('x'); print('fine')"
    cells = [
        ("hangs", [sys.executable, str(script), str(pids), "parent"], 3),
        ("fails", [sys.executable, "-c", "raise RuntimeError('out of luck | again')"], 60),
        ("works", [sys.executable, "-c", count], 60),
        ("cannot", [str(tmp_path / "no-such-program")], 60),
    ]
    failed, rows = check(tmp_path, cells)
    assert failed == 3
    assert "ended after the time limit of 3 s, at: still here" in rows["hangs"]
    assert "failed with code 1: RuntimeError: out of luck / again" in rows["fails"]
    assert "| works | ok |" in rows["works"]
    assert "failed with code 1: FileNotFoundError" in rows["cannot"]
    assert {line.count("|") for line in rows.values()} == {9}
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2
    assert not any(is_alive(pid) for pid in started)

    failed, rows = check(tmp_path, cells[2:], seconds=0)
    assert failed == 1
    assert (tmp_path / "count").read_text() == "x"
    assert "| cannot | not started: the time was over |" in rows["cannot"]


def test_an_interrupted_check_ends_its_cell(tmp_path: Path) -> None:
    """If the script gets SIGTERM, it ends the running cell before it ends itself."""
    command = [
        sys.executable,
        "bench/gpu_check.py",
        "--cells",
        "test-actor",
        "--work",
        str(tmp_path),
    ]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    deadline = time.monotonic() + 120
    while not (started := bench_children(process.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    assert process.wait(timeout=60) == 143
    assert not any(is_alive(pid) for pid in started)


def bench_children(pid: int) -> list[int]:
    """Return the ids of the pytest processes that process `pid` has started."""
    text = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(None, 2) for line in text.splitlines()]
    return [int(row[0]) for row in rows if int(row[1]) == pid and "pytest" in row[2]]


@pytest.mark.runs
def test_the_script_goes_through_all_its_cells(tmp_path: Path) -> None:
    """On a machine without a GPU, every listed cell runs to its end, and each cell that trains gets a row with its
    measurements. This test skips the cells that start pytest."""
    names = [name for name in cells_of("no GPU", tmp_path) if not name.startswith("test")]
    command = [
        sys.executable,
        "bench/gpu_check.py",
        "--work",
        str(tmp_path),
        "--minutes",
        "20",
        "--cells",
        *names,
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "gpu.md").read_text()
    assert "no GPU" in page
    rows = [
        line.split(" | ") for line in page.splitlines() if line.startswith(("| run", "| train"))
    ]
    assert len(rows) == len(names) - 2
    assert all(row[1].startswith("ok") and float(row[3]) > 0 for row in rows), page


def test_the_page_claims_nothing_that_was_not_measured() -> None:
    """docs/gpu.md either states that nothing has been measured on a GPU, or names the GPU of its measurements."""
    page = (ROOT / "docs/gpu.md").read_text()
    assert "Nothing has been measured" in page or "every number was measured on: " in page
    assert "a check of the script, not a result" not in page
