"""Print each kind of failed episode once: `callbacks: [extras.failures.Failures]`.

Without this callback, logging prints every failure with its traceback, so one mistake in an agent
fills the screen. Failures of one kind have the same exception type and place. The first failure of
a kind is printed, and its traceback goes to logs/failures.log. Later failures of this kind are only
counted, and the count is printed at the run's end:

    task 0 failed: OSError('no board'), in run (agent.py:7); traceback: runs/.../logs/failures.log
    failed 38 times: task 0 failed: OSError('no board'), in run (agent.py:7)
"""

import logging
import sys
import sysconfig
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from extras import printable

logger = logging.getLogger("pocket_areal")  # the parent of all the project's loggers
LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")


def place_of(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if not f.filename.startswith(LIBRARIES)]
    return "".join(f", in {f.name} ({Path(f.filename).name}:{f.lineno})" for f in ours[-1:])


def describe(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return printable(text) + place_of(error)


class Failures(logging.Handler):
    """Handles the project's log until the run ends."""

    def __init__(self, config: Any) -> None:
        super().__init__(logging.WARNING)
        self.path = config.run_dir / "logs" / "failures.log"
        self.counts = Counter[Any]()
        self.first = dict[Any, str]()
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            print(record.getMessage(), file=sys.stderr, flush=True)
            return
        kind = type(error), place_of(error)
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            self.first[kind] = text = f"{record.getMessage()}{place_of(error)}"
            print(f"{text}; traceback: {self.path}", file=sys.stderr, flush=True)
            with suppress(OSError):  # the disk may be full
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a", errors="backslashreplace") as file:
                    print("".join(traceback.format_exception(error)), file=file)

    def on_end(self, error: BaseException | None) -> None:
        logger.removeHandler(self)
        for kind, count in self.counts.most_common(5):
            if count > 1:
                print(f"failed {count} times: {self.first[kind]}", file=sys.stderr, flush=True)
