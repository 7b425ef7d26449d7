"""Print a first message at the start of a run, show a clock, and suppress the run's output with `--quiet`.

Importing modules, loading models and starting servers take seconds or minutes. On a terminal, a clock shows the seconds
since the start of train.py. The clock is shown from the first message until the results are printed. During training
the live table (run/logger.py) is below the clock. While the clock is shown, the library rich prints every line of
output and wraps long lines. The clock is removed before the results are printed, so that rich does not wrap the
commands in the results. If the output goes to a file, no clock is shown, and each startup event and each training step
is one line of the file.

With `--quiet` a run prints only warnings, errors and its results at the end. Warnings and errors go to the standard
error. A quiet run discards its standard output until it prints the results.

train.py imports this module before torch, so this module imports only modules that load fast.
"""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console
from rich.live import Live

from run.early import prepare
from run.load import ConfigError, load

BEGIN = monotonic()


class Terminal(Console):
    """A rich console with live displays. Only one thread at a time may print a line or refresh a display.

    To print a line, rich computes the height of the live display and then overwrites the display. If a second thread
    changes the display after rich has computed the height, rich overwrites too many or too few screen lines.
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
        """Return a live display that calls `content` twice a second and shows the returned text."""
        live = Live(console=self, get_renderable=content, refresh_per_second=2, transient=transient)
        live._lock = (
            self._lock
        )  # the display and the console share a lock, because two locks could cause a deadlock
        return live

    @property
    def is_live(self) -> bool:
        """Whether the output goes to a terminal that can overwrite its lines."""
        return self.is_terminal and not self.is_dumb_terminal


terminal = Terminal()
clock = terminal.show(lambda: f"{monotonic() - BEGIN:.0f} s since start", transient=True)
before_results = ExitStack()  # closing this stack ends the clock and lets the run print its output


def end_at_once(*_: Any) -> None:
    """End this process at once, without a traceback and without any clean-up."""
    os.write(
        2, b"\x1b[?25h\n" if os.isatty(2) else b"\n"
    )  # show the cursor, which the live table hides
    os._exit(130)


def greet(words: list[str]) -> None:
    """Print the first message and start the clock. With `--help`, print only the help. `words` is the command line.
    During the imports, Ctrl-C ends this process at once.

    If `load` accepts the command line, start the early processes (run/early.py). If `load` refuses the command line,
    print the error and end this process. Under torchrun, train.py does so later, together on all ranks.
    """
    signal.signal(
        signal.SIGINT, end_at_once
    )  # run/command.py replaces this handler after the imports
    gc.disable()  # else garbage collection takes a fifth of the imports' time; run/command.py turns it on again
    is_first = os.environ.get("RANK", "0") == "0"
    if {"-h", "--help"} & {*words}:
        if is_first:
            load(["--help"])  # `load` prints the keys and ends this process
        sys.exit()
    if is_first:
        try:
            prepare(load(words[1:]))
        except ConfigError as error:
            if "RANK" not in os.environ:  # under torchrun, `agree` (run/command.py) ends all ranks
                print(f"error: {error}", file=sys.stderr)
                sys.exit(2)
    if not is_first or {"--quiet", "quiet=true"} & {*words}:
        return
    if "--dry-run" not in words:
        print("pocket-areal: importing torch and transformers", flush=True)
    if terminal.is_live:
        clock.start()
        before_results.callback(clock.stop)  # `clock.stop` removes the clock and shows the cursor
        atexit.register(
            before_results.close
        )  # `close` removes the clock if an error ends the process


def hush() -> None:
    """Discard everything that is printed on the standard output, until `before_results` is closed."""
    before_results.enter_context(
        redirect_stdout(before_results.enter_context(Path(os.devnull).open("w")))
    )  # noqa: SIM115
