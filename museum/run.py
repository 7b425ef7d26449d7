"""Run an exhibit of the museum: a copy of this project with one bug in it. The page museum/README.md explains the
exhibits.

    python museum/run.py areal-1569   # put the bug into a copy, run the copy for at most 60 s, print the report's path
    python museum/run.py --tests      # run each exhibit's unit test in a copy with the bug; all tests must fail
    python museum/run.py --all 20     # run every exhibit and 20 healthy runs, and write museum/results.md

The checkout itself is never changed. A copy is a temporary folder, and the run's folder is runs/museum/NAME. If --all
is stopped and started again, the script makes only the runs that have no report yet. To run all exhibits again, delete
the folder runs/museum.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 60.0  # time limit of an exhibit's run
BUSY = 240.0  # longer time limit with --all, because other programs may slow an exhibit down
NOTES = """
The doctor checked each run after its end (`python -m run.doctor runs/museum/NAME`). If the column "rule" says "none",
only the unit test finds the bug. The run of areal-1345 restarts after step 3. In these runs, an exhibit had at most
240 s instead of 60 s, because the cores were busy with other work. The healthy runs were made with doctor=strict, so an
alarm ends such a run. An alarm in the second table is a false alarm, because the runs of the second table have no bug.
"""
RUN = re.compile(r"^python train\.py(.*)$", re.MULTILINE)  # a command in exhibit.md
LEFT_OUT = shutil.ignore_patterns(
    ".*", "runs", "__pycache__", "node_modules", "*.egg-info", "*.png"
)
EXHIBITS = sorted(path.parent.name for path in ROOT.glob("museum/*/bug.patch"))
HEALTHY = (
    "",
    "--config configs/maze.yaml",
)  # maze for healthy runs 1, 3, ...; demo for healthy runs 2, 4, ...


def make_copy(name: str, folder: str) -> Path:
    """Copy the project to `folder`, apply the patch of exhibit `name`, and return the folder of the copy."""
    copy = Path(folder) / "copy"
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
    (ROOT / ".cache").mkdir(exist_ok=True)
    (copy / ".cache").symlink_to(ROOT / ".cache")  # all copies share one base model of the demo
    patch = ROOT / "museum" / name / "bug.patch"
    subprocess.run(
        ["git", "apply", "--unsafe-paths", f"--directory={copy}", patch], cwd="/", check=True
    )
    return copy


def find_in_solution(name: str, what: str) -> str:
    """Return the text after `what` in the solution of an exhibit, without quotes. `what` is "Unit test" or "Doctor"."""
    text = (ROOT / "museum" / name / "solution.md").read_text()
    return re.findall(rf"^{what}: `?([^`\n]+)`?", text, re.MULTILINE)[0]


def train(code: Path, words: str, trial: str, seconds: float, doctor: str = "off") -> None:
    """Run train.py in the folder `code`. After `seconds`, interrupt the run (Ctrl-C), so that the run writes its
    report."""
    fixed = [
        f"fileroot={ROOT / 'runs'}",
        "experiment_name=museum",
        f"trial_name={trial}",
        "logger.live=false",
        f"doctor={doctor}",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(code)}
    command = [sys.executable, "train.py", *words.split(), *fixed]
    process = subprocess.Popen(command, cwd=code, env=environment, start_new_session=True)
    try:
        process.wait(max(seconds, 1))
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.send_signal(signal.SIGINT)
        process.wait()


def show(name: str, seconds: float = SECONDS) -> Path:
    """Run all commands of an exhibit in a patched copy, for at most `seconds` in total. Return the run's folder."""
    folder, commands = (
        ROOT / "runs" / "museum" / name,
        RUN.findall((ROOT / "museum" / name / "exhibit.md").read_text()),
    )
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        code = make_copy(name, temporary)
        plan = [sys.executable, "train.py", *commands[0].split(), "--dry-run"]
        subprocess.run(
            plan, cwd=code, stdout=subprocess.DEVNULL, check=True
        )  # the dry run makes a missing base model
        end = time.monotonic() + seconds
        for words in commands:
            train(code, words, name, end - time.monotonic())
    return folder


def findings(folder: Path) -> dict[str, int]:
    """Check a run with `python -m run.doctor`. Return, for each rule that fires, the step at which the rule fires
    first."""
    done = subprocess.run(
        [sys.executable, "-m", "run.doctor", folder], cwd=ROOT, capture_output=True, text=True
    )
    return {
        rule: int(step)
        for step, rule in re.findall(r"^doctor: step (\d+), (\w+) =", done.stdout, re.MULTILINE)
    }


def run_unit_tests(names: list[str]) -> dict[str, int]:
    """Run the unit test of each exhibit in a patched copy. Return pytest's exit code for each test. The exit code 1
    means that the test fails.

    This process imports the large packages once. Each test runs in a fork of this process.
    """
    import openai.types.chat  # noqa: F401
    import pytest
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp  # noqa: F401
    from transformers import AutoTokenizer, Qwen3ForCausalLM  # noqa: F401

    codes = {}
    for name in names:
        with tempfile.TemporaryDirectory() as temporary:
            code = make_copy(name, temporary)
            if (child := os.fork()) == 0:
                os.chdir(code)
                sys.path[0], exit_code = str(code), -1
                quiet = [
                    "-q",
                    "-p",
                    "no:cacheprovider",
                    "-W",
                    "ignore::pytest.PytestAssertRewriteWarning",
                ]
                try:
                    with (ROOT / "runs" / "museum" / f"{name}.log").open("w") as log:
                        os.dup2(log.fileno(), 1)
                        exit_code = pytest.main([*quiet, find_in_solution(name, "Unit test")])
                finally:
                    os._exit(exit_code)
            codes[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return codes


def is_made(folder: Path) -> bool:
    """Return whether a run has written its report."""
    return (folder / "report.html").exists()


def describe(name: str, code: int) -> str:
    """Return an exhibit's row of the table. If the exhibit's run has no report yet, run the exhibit first.
    `code` is the exit code of pytest for the exhibit's unit test."""
    folder, rule = ROOT / "runs" / "museum" / name, find_in_solution(name, "Doctor")
    steps = findings(folder if is_made(folder) else show(name, BUSY))
    others = ", ".join(f"{other} {step}" for other, step in steps.items() if other != rule) or "-"
    test = "fails" if code == 1 else "**passes**"
    return f"| `make museum BUG={name}` | {rule} | {steps.get(rule, '-')} | {others} | {test} |"


def describe_healthy(number: int) -> str:
    """Return the table row of healthy run `number`. If the run has no report yet, first make the run with
    doctor=strict."""
    words = f"{HEALTHY[number % len(HEALTHY)]} seed={number} max_steps=12 doctor=strict".strip()
    folder = ROOT / "runs" / "museum" / f"healthy-{number}"
    if not is_made(folder):
        shutil.rmtree(folder, ignore_errors=True)
        train(ROOT, words.removesuffix("doctor=strict"), folder.name, BUSY, doctor="strict")
    steps = len((folder / "metrics.jsonl").read_text().splitlines())
    alarms = ", ".join(f"{rule} {step}" for rule, step in findings(folder).items()) or "none"
    return f"| `python train.py {words}` | {steps} | {alarms} |"


def write_table(healthy: int) -> None:
    """Run every exhibit and `healthy` healthy runs, and write museum/results.md."""
    lines = [
        "# Results",
        "",
        f"The command `python museum/run.py --all {healthy}` wrote this page.",
        "",
    ]
    lines += [
        "| exhibit | rule | at step | other alarms, with step | unit test |",
        "|---|---|---|---|---|",
    ]
    codes = run_unit_tests(EXHIBITS)
    lines += [describe(name, codes[name]) for name in EXHIBITS]
    lines += [
        "",
        "| healthy run | steps | alarms, with step |",
        "|---|---|---|",
        *map(describe_healthy, range(1, healthy + 1)),
    ]
    (ROOT / "museum" / "results.md").write_text("\n".join(lines) + "\n" + NOTES)


def main(words: list[str]) -> int:
    """Execute the command line, and return the exit code."""
    (ROOT / "runs" / "museum").mkdir(parents=True, exist_ok=True)
    if words == ["--tests"]:
        codes = run_unit_tests(EXHIBITS)
        print(json.dumps(codes))
        return int(set(codes.values()) != {1})
    if words[:1] == ["--all"]:
        write_table(int(words[1]) if len(words) > 1 else 0)
    elif len(words) == 1 and words[0] in EXHIBITS:
        folder = show(words[0])
        print(
            f"\nThe exhibit: museum/{words[0]}/exhibit.md. What do you see, what would you check?"
        )
        print(f"The report: {folder / 'report.html'}")
    else:
        print(
            f"the exhibits are {' '.join(EXHIBITS)}; the command is make museum BUG=NAME",
            file=sys.stderr,
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
