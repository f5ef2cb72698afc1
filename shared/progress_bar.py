"""A progress bar for work on rows of a file, on the error stream: rows done, rate, time left."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from shared.progress import PLAIN_EVERY_S, duration


class ProgressBar:
    """A bar with the time left on a terminal, a plain line every ten seconds elsewhere; on the error stream."""

    def __init__(self, doing: str, did: str, done: int, total: int):
        """`doing`, `did`: words before the bar and in plain lines, e.g. "grading", "graded"; `done`: done before."""
        self.did, self.total, self.began_with = did, total, done
        self.started = self.told = time.monotonic()
        console = Console(stderr=True)
        self.bar: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
            self.bar = Progress(
                *columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console
            )
            self.task = self.bar.add_task("", total=total, completed=done, rate="")
            self.bar.start()

    def show(self, done: int) -> None:
        """Show that `done` rows are done, the earlier ones included."""
        now = time.monotonic()
        rate = (done - self.began_with) / max(now - self.started, 1e-6)
        if self.bar is not None:
            self.bar.update(self.task, completed=done, rate=f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s")
        elif now - self.told >= PLAIN_EVERY_S:
            self.told = now
            left = duration((self.total - done) / rate) if rate else "?"
            speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
            sys.stderr.write(f"{self.did} {done} of {self.total}, {speed}/s, left {left}\n")
            sys.stderr.flush()

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.stop()
