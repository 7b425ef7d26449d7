"""Report each distinct failure in one line: print it once, write its traceback once, and count how often it occurs.

Hundreds of episodes may fail for the same reason. During a run, a logging handler receives every warning of the
project's loggers. A warning that has no exception attached is always printed. An exception is described by its type,
its text and its place:

    failed: KeyError: 'answer', in run (my_agent.py:12); traceback: runs/guess/one/logs/failures.log

Two exceptions count as one failure if their descriptions differ only in numbers and ids. At the end of the run, one
line for each of the five most frequent failures says how often the failure occurred.
"""

import contextlib
import logging
import re
import sys
import traceback
from collections import Counter
from pathlib import Path

from rollout.runner import own_frames

LOGGER = logging.getLogger("pocket_areal")  # the parent of the loggers of all modules
DISK = "make room on the disk, raise the limit of file sizes (ulimit -f), or take another disk with fileroot=FOLDER"
NUMBERS = re.compile(
    r"(?<=/)[\w-]{20,}(?=/)|[0-9a-f]{16,}|\d+"
)  # the ids of sessions and calls, and all numbers
ADVICE = (  # in each row: a text that a failure's description may contain, and the advice for the user
    ("finite", "make the agent or the reward function return a finite number for every answer"),
    ("too long", "shorten the prompts, or take a model with a longer context"),
    # If the disk is full, the error of a checkpoint says only "was not written", because torch hides the disk's error.
    *((words, DISK) for words in ("No space left", "File too large", "was not written")),
    (
        "KeyError",
        "if this key is a column of the data, add the column to the data, or correct the named line",
    ),
    (
        "",
        "correct the named line, or the code that gave it its values; the traceback shows how the program got there",
    ),
)


def describe(error: BaseException) -> str:
    """Describe an exception in one line: its type, its text, and the innermost function of its traceback that is not
    from an installed package.

    Lone surrogates in the text are written as `\\ud800`, because UTF-8 cannot encode them.
    """
    text = (
        " ".join(f"{type(error).__name__}: {error}".split())[:200]
        .encode(errors="backslashreplace")
        .decode()
    )
    frames = own_frames(traceback.extract_tb(error.__traceback__))
    return text + "".join(
        f", in {f.name} ({Path(f.filename).name}:{f.lineno})" for f in frames[-1:]
    )


def record_traceback(error: BaseException, log: Path) -> None:
    """Append the traceback of an exception to the log. If the disk is full, write nothing."""
    with contextlib.suppress(OSError):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write("".join(traceback.format_exception(error)) + "\n")


class Failures(logging.Handler):
    """Prints, counts and records the failures that the project's loggers report, until `close` is called."""

    def __init__(self, log: Path) -> None:
        super().__init__(logging.WARNING)
        self.log = log
        LOGGER.addHandler(self)
        self.counts = Counter[
            str
        ]()  # number of failures per description; N replaces every number in a description

    def emit(self, record: logging.LogRecord) -> None:
        """If a warning has no exception attached, print the warning. If an exception occurs for the first time, print
        the exception and write its traceback to the log."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            print(record.getMessage(), file=sys.stderr, flush=True)
            return
        kind = NUMBERS.sub("N", describe(error))
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            record_traceback(error, self.log)
            print(f"failed: {describe(error)}; traceback: {self.log}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Stop handling warnings, and print the five most frequent failures with their counts. Do not print a failure
        that occurred once."""
        LOGGER.removeHandler(self)
        for kind, count in self.counts.most_common(5):
            if count > 1:
                print(f"failed {count} times: {kind}", file=sys.stderr, flush=True)
        super().close()


def report(error: BaseException, log: Path) -> str:
    """Write to `log` the traceback of the exception that ended a run. Return the lines to show on the terminal."""
    record_traceback(error, log)
    cause = error.__cause__ or error
    whole = describe(error) if cause is error else f"{error}\nthe first failure: {describe(cause)}"
    remedy = next(words for pattern, words in ADVICE if pattern in whole)
    return f"{whole}\nthe traceback is in {log}\nwhat to do: {remedy}"
