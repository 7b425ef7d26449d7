"""Print the first words of a run's output, show a clock, and make a run silent with `--quiet`.

Imports, models and servers take seconds or minutes. On a terminal, a clock therefore counts the seconds since the
start. The clock is shown from the first words until the results are printed. During training the live table
(run/logger.py) is below the clock. While there is a clock, rich prints every line and breaks long lines. The results
contain commands, which must not be broken, so the clock ends before the results. If the output goes to a file, there is
no clock: each event of the start and each training step is one line.

With `--quiet` a run prints only warnings, errors and its results at the end. Warnings and errors go to the standard
error. The run redirects its standard output until the results are there.

train.py imports this module before torch, so this module imports nothing that takes long.
"""

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout, suppress
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console
from rich.live import Live

from run.config import ConfigError, load
from run.early import prepare

BEGIN = monotonic()


class Terminal(Console):
    """A console with displays, which one thread at a time prints on or refreshes.

    rich first computes how many lines of the displays a print replaces, and writes the print later. After a refresh in
    between, the number may be wrong: then a printed line would be lost, or a part of an old display would remain.
    """

    def __enter__(self) -> Console:
        self._lock.acquire()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._lock.release()

    def show(self, content: Callable[[], Any], transient: bool = False) -> Live:
        """Return a display of what `content` returns, twice a second."""
        live = Live(console=self, get_renderable=content, refresh_per_second=2, transient=transient)
        live._lock = self._lock  # two threads that take two locks in different orders would wait for ever
        return live


terminal = Terminal()
clock = terminal.show(lambda: f"{monotonic() - BEGIN:.0f} s since start", transient=True)
before_results = ExitStack()  # closing it ends the clock, and the silence of a quiet run


def greet(words: list[str]) -> None:
    """Print the first words of the output and start the clock, or print the help. `words` is the command line.

    Also start the early processes (run/early.py), unless the configuration is wrong.
    """
    is_first = os.environ.get("RANK", "0") == "0"
    if {"-h", "--help"} & {*words}:
        if is_first:
            load(["--help"])  # prints the keys and ends this process
        sys.exit()
    if is_first:
        with suppress(ConfigError, SystemExit):  # the run itself reports the mistake
            prepare(load(words[1:]))
    if not is_first or {"--quiet", "quiet=true"} & {*words}:
        return
    if "--dry-run" not in words:
        print("nano-areal: importing torch and transformers", flush=True)
    if terminal.is_terminal:
        clock.start()
        before_results.callback(clock.stop)  # also shows the cursor again
        atexit.register(before_results.close)  # ends the clock after an error, too


def hush() -> None:
    """Discard everything that is printed on the standard output, until `before_results` is closed."""
    before_results.enter_context(redirect_stdout(before_results.enter_context(Path(os.devnull).open("w"))))  # noqa: SIM115
