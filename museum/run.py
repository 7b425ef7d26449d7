"""Run an exhibit of the museum: a copy of this project with one bug in it (museum/README.md).

    python museum/run.py areal-1569   # train the copy until the doctor finds something
    python museum/run.py --tests      # each exhibit's unit test in its copy: all must fail
    python museum/run.py --all 20     # every exhibit and 20 healthy runs, for museum/results.md

The checkout is never changed: a copy is a temporary folder. A run writes to runs/museum/NAME of the
checkout. --all makes only runs that have no report yet, so delete runs/museum to make all runs
again.
"""

import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "museum"
FIXED = [
    f"fileroot={RUNS.parent}",
    f"experiment_name={RUNS.name}",
    "callbacks=[extras.report.Report, extras.doctor.Strict]",
]
LEFT_OUT = shutil.ignore_patterns(".*", "runs", "__pycache__", "node_modules", "*.egg-info")
EXHIBITS = sorted(path.parent.name for path in ROOT.glob("museum/*/bug.patch"))
HEALTHY = ("seed={}", "--config maze seed={}")
HEAD = """# Results

`python museum/run.py --all {}` wrote this page. The doctor ends a run at its first finding; a
finding in the second table would be a false alarm.

"""


def make_copy(name: str, folder: str) -> Path:
    copy = Path(folder) / "copy"
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
    (ROOT / ".cache").mkdir(exist_ok=True)
    (copy / ".cache").symlink_to(ROOT / ".cache")  # base models
    patch = ROOT / "museum" / name / "bug.patch"
    apply = ["git", "apply", "--unsafe-paths", f"--directory={copy}", patch]
    subprocess.run(apply, cwd="/", check=True)
    return copy


def in_solution(name: str, what: str) -> str:
    """Return the code after "Unit test:" or "Doctor:" in a solution."""
    text = (ROOT / "museum" / name / "solution.md").read_text()
    return re.findall(rf"^{what}: `([^`\n]+)`", text, re.MULTILINE)[0]


def commands(name: str) -> list[str]:
    page = (ROOT / "museum" / name / "exhibit.md").read_text()
    return re.findall(r"^python train\.py(.*)$", page, re.MULTILINE)


def train(code: Path, words: str, trial: str) -> None:
    command = [sys.executable, "train.py", *words.split(), *FIXED, f"trial_name={trial}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(code)}
    done = subprocess.run(command, cwd=code, env=environment, stderr=subprocess.PIPE, text=True)
    if done.returncode and not finding(trial):
        sys.exit(done.stderr)


def finding(trial: str) -> dict:
    """Return the doctor's first finding in a run (step, rule and text), or {} if it found
    nothing."""
    path = RUNS / trial / "doctor.jsonl"
    return json.loads(path.read_text().splitlines()[0]) if path.exists() else {}


def make_run(trial: str) -> dict:
    """Make the run of an exhibit, or of the healthy project ("healthy-3"); return its finding."""
    shutil.rmtree(RUNS / trial, ignore_errors=True)
    if trial not in EXHIBITS:
        train(ROOT, healthy_words(trial), trial)
        return finding(trial)
    with tempfile.TemporaryDirectory() as folder:
        code = make_copy(trial, folder)
        for words in commands(trial):
            train(code, words, trial)
    return finding(trial)


def healthy_words(trial: str) -> str:
    number = int(trial.rpartition("-")[2])
    return HEALTHY[number % len(HEALTHY)].format(number) + " max_steps=12"


def run_unit_tests() -> dict[str, int]:
    """Return pytest's exit code for each exhibit: 1 if its test fails in the copy.

    The large packages are imported only once, because each test runs in a fork of this process.
    """
    import aiohttp  # noqa: F401
    import fastapi  # noqa: F401
    import hypothesis.strategies  # noqa: F401
    import openai.types.chat  # noqa: F401
    import pytest
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp  # noqa: F401
    import uvicorn  # noqa: F401
    from transformers import AutoTokenizer, Qwen3ForCausalLM  # noqa: F401

    gc.collect()
    gc.freeze()  # a fork's garbage collections skip these packages
    codes = {}
    for name in EXHIBITS:
        with tempfile.TemporaryDirectory() as folder, (RUNS / f"{name}.log").open("w") as log:
            code = make_copy(name, folder)
            if (child := os.fork()) == 0:
                os.chdir(code)
                os.dup2(log.fileno(), 1)
                sys.path[0], status = str(code), -1
                quiet = ["-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-W"]
                quiet.append("ignore::pytest.PytestAssertRewriteWarning")
                try:
                    status = pytest.main([*quiet, in_solution(name, "Unit test")])
                finally:
                    os._exit(status)
            codes[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return codes


def write_results(healthy: int) -> None:

    def found(trial: str) -> dict:
        return finding(trial) if (RUNS / trial / "report.html").exists() else make_run(trial)

    codes = run_unit_tests()
    rows = ["| exhibit | the doctor's rule | at step | unit test |", "|---|---|---|---|"]
    for name in EXHIBITS:
        said, test = found(name), "fails" if codes[name] == 1 else "**passes**"
        rows.append(f"| {name} | {said.get('rule')} | {said.get('step')} | {test} |")
    rows += ["", "| healthy run | finding |", "|---|---|"]
    for k in range(1, healthy + 1):
        said = found(f"healthy-{k}").get("rule", "none")
        rows.append(f"| `python train.py {healthy_words(f'healthy-{k}')}` | {said} |")
    page = HEAD.format(healthy) + "\n".join(rows) + "\n"
    (ROOT / "museum" / "results.md").write_text(page)


def main(words: list[str]) -> int:
    RUNS.mkdir(parents=True, exist_ok=True)
    if words == ["--tests"]:
        print(json.dumps(codes := run_unit_tests()))
        return int({*codes.values()} != {1})
    if words[:1] == ["--all"]:
        write_results(int(words[1]) if len(words) > 1 else 0)
        return 0
    if len(words) != 1 or words[0] not in EXHIBITS:
        print(f"make museum BUG=NAME, one of {' '.join(EXHIBITS)}", file=sys.stderr)
        return 2
    said = make_run(words[0])
    print(f"\nThe doctor has ended the run:\n{said.get('text', 'it found nothing')}")
    print(f"The questions: museum/{words[0]}/exhibit.md")
    print(f"The report: {RUNS / words[0] / 'report.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
