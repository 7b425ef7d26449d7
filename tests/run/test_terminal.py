"""Tests of run/terminal.py. Before the first training step, a terminal shows a first message and a clock. With --quiet,
a terminal shows no first message and no clock."""

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
from conftest import ROOT

from run.terminal import Terminal

SHOW = """
import sys
from run.terminal import before_results, greet, terminal
greet(sys.argv[1:])
print("a model is made", flush=True)
with terminal.show(lambda: "the table"):
    print("a step", flush=True)
print("the end", flush=True)
before_results.close()
print("the results " * 10, flush=True)
"""


def on_a_terminal(*words: str, kind: str = "xterm") -> str:
    """Return the characters that a terminal receives from a process that prints the first message, shows a table and
    ends."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.execve(
            sys.executable, [sys.executable, "-c", SHOW, *words], {**os.environ, "TERM": kind}
        )
    received = b""
    while True:
        try:
            received += os.read(terminal, 65536)
        except OSError:  # the process has ended
            break
    os.close(terminal)
    assert os.waitpid(child, 0)[1] == 0
    return received.decode()


def test_a_clock_counts_before_and_after_the_table() -> None:
    """On a terminal, a clock is shown below the first message, and later above the live table. Before the results are
    printed, the clock is deleted and the cursor becomes visible. Long lines of the results are not wrapped."""
    whole = on_a_terminal()
    before, table, after = whole.replace("a step", "CUT").replace("the end", "CUT").split("CUT")
    assert (
        before.index("importing torch")
        < before.index("a model is made")
        < before.index("s since start")
    )
    assert table.index("s since start") < table.index("the table")
    assert "s since start" in after
    assert "the table" not in after
    assert after.rindex("\x1b[2K") > after.rindex("s since start")
    assert whole.rindex("\x1b[?25h") > whole.rindex("\x1b[?25l")
    assert after.endswith("the results " * 10 + "\r\n")


def lines_on_screen(received: str) -> list[str]:
    """Return the lines that a terminal shows after it has received these characters."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[\??\d*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", received):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part[0] not in "\x1b\r":
            lines[row] = part + lines[row][len(part) :]
    return [line for line in map(str.rstrip, lines) if line]


def test_a_refresh_and_a_print_leave_both_on_the_screen() -> None:
    """If a table grows and is refreshed while another thread prints a line, the screen afterwards shows the line and
    the whole table once each."""
    received, rows = io.StringIO(), ["row 1"]
    terminal = Terminal(file=received, force_terminal=True, width=40, color_system=None)
    refreshes = list[Thread]()

    class Line:
        def __rich_console__(self, *_: Any) -> Iterator[str]:
            # Rich calls `__rich_console__` after it has counted the lines of the old table that it will erase.
            rows.append("row 2")
            refreshes.append(Thread(target=table.refresh))
            refreshes[0].start()
            refreshes[0].join(0.3)  # if the terminal has no lock, the refresh ends within 0.3 s
            yield "a printed line"

    with terminal.show(lambda: "\n".join(rows)) as table:
        table.refresh()
        assert lines_on_screen(received.getvalue()) == ["row 1"]
        terminal.print(Line())
        refreshes[0].join()
    assert lines_on_screen(received.getvalue()) == ["a printed line", "row 1", "row 2"]


def test_a_file_gets_no_clock() -> None:
    """If the output goes to a file, the file contains only whole lines and no control characters."""
    done = subprocess.run(
        [sys.executable, "-c", SHOW], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    first, *others = done.stdout.splitlines()
    assert first == "pocket-areal: importing torch and transformers"
    assert others[:2] == ["a model is made", "a step"]
    assert "\x1b" not in done.stdout
    assert "since start" not in done.stdout


def test_a_dumb_terminal_gets_no_clock() -> None:
    """A terminal that cannot overwrite its lines (TERM=dumb) shows only whole lines, like a file."""
    assert "since start" not in on_a_terminal(kind="dumb")
    assert Terminal(force_terminal=True, _environ={"TERM": "xterm"}).is_live
    assert not Terminal(force_terminal=True, _environ={"TERM": "dumb"}).is_live


def test_quiet_starts_without_a_word() -> None:
    """With --quiet, a run shows neither the first message nor a clock."""
    assert on_a_terminal("--quiet").splitlines()[0] == "a model is made"


def test_a_ready_part_names_the_time_of_the_clock(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """When a server is ready, train.py prints a line with the seconds since the start of train.py. The seconds since
    the start of train.py include the time for imports."""
    from run import start

    monkeypatch.setattr(start, "BEGIN", start.time.monotonic() - 100)
    start.say_ready("server-0")
    assert capsys.readouterr().out == "server-0 is ready after 100 s\n"


def test_silence_ends_with_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    """A quiet run discards its standard output until the results are printed. A quiet run prints a warning at once."""
    from run.terminal import before_results, hush

    hush()
    print("a step")
    print("a warning", file=sys.stderr)
    before_results.close()
    print("the results")
    assert capsys.readouterr() == ("the results\n", "a warning\n")
