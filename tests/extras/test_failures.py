"""Failures of one kind are printed once, as they are, and counted."""

import logging
from pathlib import Path
from types import SimpleNamespace

from extras.failures import Failures, describe


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_the_first_failure_is_shown_as_it_is(tmp_path: Path, capsys, monkeypatch) -> None:
    """Failures of one type at one place are one kind: the first is printed word for word, with its
    numbers, the others are counted, and one traceback is kept."""
    monkeypatch.setattr(logging.getLogger("pocket_areal"), "propagate", False)
    logger, path = logging.getLogger("pocket_areal.test"), tmp_path / "logs/failures.log"
    failures = Failures(SimpleNamespace(run_dir=tmp_path))
    for k in range(38):
        error = raised(OSError(f"no board {k} \ud800"))
        logger.warning("task %d failed: %r", k, error, exc_info=error)
    logger.warning("a server is slow")
    failures.on_end(None)
    first, slow, counted = capsys.readouterr().err.splitlines()
    assert first.startswith("task 0 failed: OSError('no board 0")
    assert f"in raised (test_failures.py:{raised.__code__.co_firstlineno + 2})" in first
    assert slow == "a server is slow"
    assert counted.startswith("failed 38 times: task 0 failed: OSError('no board 0")
    assert path.read_text().count("Traceback") == 1


def test_an_exception_in_one_line() -> None:
    """The line has type, text and place, and nothing that would break the line or steer a
    terminal."""
    text = describe(raised(ValueError("two\nlines\x1b[2J")))
    assert text.startswith(r"ValueError: two lines\x1b[2J, in raised (test_failures.py:")
