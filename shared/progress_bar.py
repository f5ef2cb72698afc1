"""A progress bar for work on rows of a file, on the error stream: rows done, rate, time left."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from shared.progress import PLAIN_EVERY_S, duration


class ProgressBar:
    """A bar with the time left on a terminal, a plain line every ten seconds elsewhere; on the error stream."""

    def __init__(self, doing: str, did: str, done: int, total: int):
        """`doing`, `did`: words before the bar and in plain lines, e.g. "grading", "graded"; `done`: done before."""
        self.did, self.total, self.began_with, self.done = did, total, done, done
        self.started = self.reported = time.monotonic()
        self.note = ""
        """what else a line says, e.g. the tokens so far"""
        self.row_s = 0.0
        """mean seconds of a row, where several are under way at a time: the last ones take that long"""
        console = Console(stderr=True)
        self.bar: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), _Forecast(self), TimeElapsedColumn())
            self.bar = Progress(*columns, console=console)
            self.task = self.bar.add_task("", total=total, completed=done)
            self.bar.start()

    def forecast(self) -> str:
        """Return the rate of this launch, the time left at that rate, and the note: "0.5/s, left 3:20 min, 80 tokens".
        The rate falls while nothing is done."""
        rate = (self.done - self.began_with) / max(time.monotonic() - self.started, 1e-6)
        speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        left = max((self.total - self.done) / rate, self.row_s if self.done < self.total else 0.0) if rate else -1.0
        return ", ".join(filter(None, (f"{speed}/s", f"left {duration(left)}", self.note)))

    def show(self, done: int) -> None:
        """Show that `done` rows are done, the earlier ones included."""
        self.done, now = done, time.monotonic()
        if self.bar is not None:
            self.bar.update(self.task, completed=done)
        elif now - self.reported >= PLAIN_EVERY_S:
            self.reported = now
            sys.stderr.write(f"{self.did} {done} of {self.total}, {self.forecast()}\n")
            sys.stderr.flush()

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.stop()


class _Forecast(ProgressColumn):
    """The rate and the time left, as of now."""

    def __init__(self, bar: ProgressBar):
        super().__init__()
        self.of = bar

    def render(self, task: Task) -> Text:
        return Text(self.of.forecast())
