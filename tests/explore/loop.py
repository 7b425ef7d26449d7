"""StillLoop is an asyncio event loop without sockets, threads and real waiting. A state machine
(search.py) decides the order of the events.

`run` calls callbacks that are ready until none is left. Time stands still until `pass_time`, which
fires the timers that are due.
"""

import asyncio
from asyncio import events
from typing import Any


class StillLoop(asyncio.BaseEventLoop):
    """An event loop whose callbacks run only when a state machine calls `run`."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = self
        self.now = 0.0

    def select(self, timeout: float | None) -> list[Any]:
        return []

    def _process_events(self, event_list: list[Any]) -> None: ...

    def _write_to_self(self) -> None: ...

    def time(self) -> float:
        return self.now

    def pass_time(self, seconds: float) -> None:
        """Let time pass. The timers that are due fire in the next `run`."""
        self.now += seconds
        self.call_soon(lambda: None)

    def run(self) -> None:
        """Call ready callbacks until none is left."""
        outer = events._get_running_loop()
        events._set_running_loop(self)
        try:
            while self._ready:  # type: ignore[attr-defined]
                self._run_once()  # type: ignore[attr-defined]
        finally:
            events._set_running_loop(outer)

    def end(self) -> None:
        """Cancel all tasks and close the loop."""
        while tasks := asyncio.all_tasks(self):
            for task in tasks:
                task.cancel()
            self.run()
        self.close()
