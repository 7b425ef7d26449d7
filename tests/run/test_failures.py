"""For each failure, a run prints one line on the terminal and writes one traceback into a log."""

import logging
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT
from runs import SMALL_GUESS, WITH_TEST_MODULES, command

from run.failures import Failures, report


def raised(error: Exception) -> Exception:
    """Raise `error`, so that Python adds a traceback, and return `error`."""
    try:
        raise error
    except Exception as caught:
        return caught


def test_one_line_for_each_distinct_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Failures that differ only in numbers and ids count as one failure. For each distinct failure, the run prints one
    line and writes one traceback. At its end, the run prints how often each failure occurred."""
    logger, log = logging.getLogger("pocket_areal.test"), tmp_path / "logs" / "failures.log"
    failures = Failures(log)
    for k in range(5):
        logger.warning("task %d", k, exc_info=raised(OSError(f"no board {k}")))
    logger.warning("task 5", exc_info=raised(KeyError("answer")))
    for name in ("TZy4bq_8UvwXyZ-aBcDeFg", "HkLmN0pQ_rStUvWxYz-AbC"):
        logger.warning("task 6", exc_info=raised(LookupError(f"/{name}/v2: not found")))
    logger.warning("a server is slow")
    failures.close()
    lines = capsys.readouterr().err.splitlines()
    place = f"in raised (test_failures.py:{raised.__code__.co_firstlineno + 3})"
    assert lines[:2] == [
        f"failed: OSError: no board 0, {place}; traceback: {log}",
        f"failed: KeyError: 'answer', {place}; traceback: {log}",
    ]
    assert lines[2].startswith("failed: LookupError: /TZy4bq_8UvwXyZ-aBcDeFg/v2: not found")
    assert lines[3] == "a server is slow"
    assert lines[4].startswith("failed 5 times: OSError: no board N")
    assert lines[5].startswith("failed 2 times: LookupError: /N/vN: not found")
    assert len(lines) == 6
    assert log.read_text().count("Traceback") == 3


def test_a_text_that_is_no_unicode_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text of an exception may contain a lone surrogate (a half of a UTF-16 pair). The terminal and the log show
    the surrogate as an escape sequence, and the report of the failure raises no exception. The escape sequence is
    necessary, because pytest's output capture and a terminal with the live table accept only valid UTF-8."""
    monkeypatch.setattr(
        logging.getLogger("pocket_areal"), "propagate", False
    )  # pytest-xdist cannot send a surrogate
    logger, log = logging.getLogger("pocket_areal.test"), tmp_path / "logs" / "failures.log"
    failures, error = Failures(log), raised(ValueError("bad \ud800 name"))
    logger.warning("a member failed", exc_info=error)
    failures.close()
    print(report(error, log))
    shown = capsys.readouterr()
    for text in (shown.err, shown.out, log.read_text(encoding="utf-8")):
        assert "ValueError: bad \\ud800 name" in text


@pytest.mark.runs
@pytest.mark.parametrize(
    ("agent", "reason", "remedy"),
    [
        (
            "NaNAgent",
            "a finite number",
            "make the agent or the reward function return a finite number",
        ),
        ("RaisingAgent", "OSError: no board", "correct the named line"),
        (
            "ColumnAgent",
            "KeyError: 'answer', in run (sick_agents.py:",
            "add the column to the data",
        ),
        ("LongAgent", "prompt is too long", "shorten the prompts"),
    ],
)
def test_a_failing_run_says_what_to_do(
    tmp_path: Path, agent: str, reason: str, remedy: str
) -> None:
    """If all episodes of a run fail, the run prints at most 15 lines, without a traceback. The last lines of the output
    say how to correct the failure."""
    words = command(tmp_path, *SMALL_GUESS, f"workflow=sick_agents.{agent}")
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=WITH_TEST_MODULES,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert len(lines) <= 15, done.stdout
    assert "Traceback" not in done.stdout
    assert any(line.startswith("failed: ") and reason in line for line in lines)
    what, folder, again = lines[-3:]
    assert what.startswith("what to do: ")
    assert remedy in what
    assert folder == f"the run's folder is {tmp_path}/e/t"
    assert again.startswith("to go on from the beginning")
    assert (tmp_path / "e/t/logs/failures.log").read_text().count("Traceback") <= 20


def test_a_log_that_cannot_be_written_hides_no_reason(tmp_path: Path) -> None:
    """If the disk is full, the traceback cannot be written into the log. Even if the log cannot be written, the
    terminal shows the reason of the failure and the remedy. In this test the path of the log's folder is a file, so the
    log cannot be written."""
    (tmp_path / "logs").write_text("")
    text = report(OSError(28, "No space left on device"), tmp_path / "logs" / "failures.log")
    assert "No space left on device" in text
    assert "what to do: make room on the disk" in text


@pytest.mark.runs
def test_a_full_disk_ends_the_run_with_the_remedy(tmp_path: Path) -> None:
    """If a run cannot write a checkpoint, it ends with an error that names the reason and the remedy. In this case,
    torch raises CheckpointException, which is no subclass of Exception. The test sets a maximum file size (ulimit -f)
    between the model's size and the checkpoint's size."""
    words = command(tmp_path, *SMALL_GUESS, "max_steps=3", "recover_interval=1")
    limited = ["bash", "-c", 'ulimit -f 1000; exec "$@"', "bash", *words]
    done = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-4000:]
    assert "Traceback" not in done.stdout + done.stderr
    assert "error: the checkpoint" in done.stderr
    assert "what to do: make room on the disk" in done.stderr
