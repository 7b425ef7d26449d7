"""What a terminal shows during a run, and the texts that are printed on the way."""

import io
import re
from collections.abc import Iterator
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from extras.table import COLUMNS, COUNTERS, Table, Terminal, as_text

TITLES = {key: title for key, title, _ in COLUMNS}


def make_table(terminal: Terminal, **counters: int) -> Table:
    """Return the table of a run of 64 steps, after the step 12."""
    line = {key: 0 if text == "{:d}" else 0.5 for key, _, text in COLUMNS}
    line |= {"step": 12, "wall_s": 60.0, **counters}
    table = Table(SimpleNamespace(train_dataset=SimpleNamespace(batch_size=6)))
    table.terminal = terminal
    executor = SimpleNamespace(listeners=[])
    table.on_start(SimpleNamespace(rank=0, executor=executor, history=[line], last_step=64))
    return table


def shown(width: int, **counters: int) -> tuple[list[str], list[str], str]:
    """Return the words of the head, the words of the row, and the whole screen."""
    terminal = Terminal(width=width, file=io.StringIO(), force_terminal=False)
    terminal.print(make_table(terminal, **counters).screen())
    text: str = terminal.file.getvalue()  # type: ignore[attr-defined]
    head, row, *_ = text.splitlines()
    return head.split(), row.split(), text


def test_a_wide_terminal_shows_every_column() -> None:
    """A row has the values under their headings, and the lines below say how far the run is."""
    head, row, text = shown(170, rejected=1, failed=2, failed_members=131, dropped=3)
    assert " ".join(head) == " ".join(TITLES.values())
    assert row[head.index("members") - 1] == "131"  # "time s" are two words
    assert " 12 of 64 steps; time 0:01:00, 0:04:20 left" in text
    assert "0 of 6 groups" in text.splitlines()[-1]


def test_eighty_columns_show_what_happens() -> None:
    """A counter takes no column before it has counted something, and no text is cut."""
    quiet, _, text = shown(80)
    assert not {TITLES[key] for key in COUNTERS} & set(quiet)
    assert {"reward", "stale", "wait", "entropy"} <= set(quiet)
    head, _, text = shown(80, failed_members=131)
    assert {"members", "reward", "stale"} <= set(head)
    assert not {"rejected", "failed", "dropped"} & set(head)
    assert "…" not in text


def test_a_mismatch_of_no_token_is_a_hyphen() -> None:
    """0e+00 would look like a perfect match."""
    assert as_text({"logp_mismatch": 0.0}, "logp_mismatch", "{:.0e}") == "-"
    assert as_text({"logp_mismatch": 3e-6}, "logp_mismatch", "{:.0e}") == "3e-06"
    assert as_text({"failed": 0}, "failed", "{:d}") == "0"


def test_the_last_line_says_what_the_trainer_does() -> None:
    """Groups count as finished until a step takes them; then the step trains, and pushes its
    weights."""
    table = make_table(Terminal(file=io.StringIO(), force_terminal=True, width=80))
    [on_event] = table.run.executor.listeners

    def now() -> str:
        *_, line = table.screen().renderables
        return str(line)

    for task in range(3):
        on_event("accept", task, {})
    assert re.fullmatch(r"step 13, waiting for groups, \d+ s; 3 of 6 groups", now())
    on_event("consume", 0, {})
    on_event("drop", 1, {})
    assert now().startswith("step 13, training, ")
    assert now().endswith("1 of 6 groups")
    table.on_batch({})
    assert "updating the weights" in now()
    table.on_end(None)


@pytest.mark.parametrize("kind", ["file", "dumb", "xterm"])
def test_only_a_terminal_gets_a_table(kind: str) -> None:
    """A file and a terminal that cannot overwrite get no control characters; a real one gets its
    cursor back at the end."""
    file = io.StringIO()
    how: Any = {"force_terminal": kind != "file", "_environ": {"TERM": kind}, "width": 80}
    make_table(Terminal(file=file, color_system=None, **how)).on_end(None)
    if kind == "xterm":
        assert "12 of 64 steps" in file.getvalue()
        assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l")
    else:
        assert file.getvalue() == ""


def test_texts_are_printed_once_and_do_not_steer_the_terminal(capsys) -> None:
    """The first side conversation is named with its key, and a sample is printed every twenty
    steps; the model's control characters are written out."""
    texts = {5: "You write titles.", 6: "\x1b[2J\nred\u202e"}
    batch = {
        "input_ids": torch.tensor([[6, 0], [5, 5]]),
        "attention_mask": torch.tensor([[True, False], [True, True]]),
        "side_conversations": torch.tensor([0, 1]),
        "rewards": torch.tensor([0.5, 0.0]),
    }
    table = make_table(Terminal(file=io.StringIO(), force_terminal=False))
    decode = lambda ids, **_: "".join(texts[i] for i in ids.tolist())  # noqa: E731
    tokenizer = SimpleNamespace(decode=decode)
    table.run.inputs, table.run.history = SimpleNamespace(tokenizer=tokenizer), []
    for step in range(20, 42):
        table.on_batch(batch)
        table.run.history.append({"step": step, "side_conversations": 1})
        table.on_step(table.run.history[-1])
    side, *samples = capsys.readouterr().out.splitlines()
    assert side.startswith("step 20 has the first side conversation")
    assert "side conversation" in side
    assert "You write titles." in side
    assert samples == ["a sample, reward 0.50: \\x1b[2J red\\u202e"] * 2


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
    """A display that grows while another thread prints is overwritten by its true height."""
    received, rows = io.StringIO(), ["row 1"]
    terminal = Terminal(file=received, force_terminal=True, width=40, color_system=None)
    refreshes = list[Thread]()

    class Line:
        def __rich_console__(self, *_: Any) -> Iterator[str]:
            # Rich has counted the lines of the old display by now.
            rows.append("row 2")
            refreshes.append(Thread(target=table.refresh))
            refreshes[0].start()
            refreshes[0].join(0.3)  # without a lock, the refresh ends within 0.3 s
            yield "a printed line"

    with terminal.show(lambda: "\n".join(rows)) as table:
        assert table._lock is terminal._lock, "a refresh and a print could wait for each other"
        table.refresh()
        assert lines_on_screen(received.getvalue()) == ["row 1"]
        terminal.print(Line())
        refreshes[0].join()
    assert lines_on_screen(received.getvalue()) == ["a printed line", "row 1", "row 2"]
