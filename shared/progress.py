"""Console display of a run: phases, a bar inside a step, one line after it, notes. Only this file prints.

On a terminal the bar is one line that is rewritten; elsewhere (a log file, CI) it is a plain line every ten seconds,
and no control codes are written at all. No thread, no hidden cursor: a killed run leaves a clean terminal.
`keep_phases` writes the phases with their times into the run's folder too.
A display that fails (a closed pipe) is silenced and never reaches training.
"""

from __future__ import annotations

import functools
import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.control import Control
from rich.markup import escape
from rich.segment import ControlType, Segment
from rich.table import Table
from rich.text import Text

from shared.atomic_write import append_line
from shared.clean_text import clean

Arguments = ParamSpec("Arguments")

PLAIN_EVERY_S = 10.0
"""without a terminal, a bar is at most one line in this time"""
DRAW_EVERY_S = 0.1
"""on a terminal, the bar is drawn at most this often"""
BAR_WIDTH = 20
ANY_WIDTH = 10_000
LINE = 100
"""most characters of the line after a step"""
LEGEND = """(the bar: completions of the next batch that have ended; left: of this step, run: of all steps;
    oldest: since the longest completion under way began. A step's line: acc: right answers; lang:
    problem, reasoning and answer in one language; len: tokens; age: versions of the weights since
    the oldest token was sampled; kl: nats, sampling policy from the trainers'; at the end the
    slowest part of the step)"""
"""is printed once, before the first bar or step"""
SMOOTHING = 0.3
"""weight of the newest step in the mean step time"""

PARTS = {
    "time/wait_batch_s": "rollout",
    "time/train_s": "training",
    "time/wait_sync_s": "sync",
    "time/checkpoint_s": "checkpoint",
}


def harmless(
    method: Callable[Concatenate[Progress, Arguments], None],
) -> Callable[Concatenate[Progress, Arguments], None]:
    """Turn any error of a display method into a count: a closed terminal must not end a run of days."""

    @functools.wraps(method)
    def guarded(self: Progress, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception:  # noqa: BLE001  (see above; counted)
            self.failures += 1

    return guarded


def duration(seconds: float) -> str:
    """9.4 -> "9.4 s", 75 -> "1:15 min", 4000 -> "1:06 h"; a negative or unknown time is "?"."""
    if not 0 <= seconds < 1e9:
        return "?"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, left = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{left:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d} h"


def bottleneck(metrics: Mapping[str, float]) -> str:
    """The part of the step that took longest, e.g. "rollout 71 %"; "" when no time was reported."""
    parts = {name: metrics[key] for key, name in PARTS.items() if key in metrics}
    total = metrics.get("time/step_s", 0.0)
    if not parts or total <= 0:
        return ""
    name = max(parts, key=lambda phase: parts[phase])
    return f"{name} {min(parts[name] / total, 1):.0%}"


def blocks(stream: TextIO) -> tuple[str, str]:
    """Return the characters of a bar that `stream` can encode; make it replace what it cannot encode, not refuse it."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    try:
        "█░".encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return "#", "-"
    return "█", "░"


class CleanConsole(Console):
    """rich's console, which shows texts of others `clean`."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the parts of what is shown."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=clean(segment.text))

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; tables in a file or a pipe are as wide as they need, so that no number is cut."""
        usual, roomy = self._width, self.options.update_width(ANY_WIDTH)
        if not self.is_terminal:
            tables = (each for each in objects if isinstance(each, Table | Group))
            self.width = max([self.width, *(self.measure(each, options=roomy).maximum for each in tables)])
        try:
            super().print(*objects, **options)
        finally:
            self._width = usual


class PatientConsole(CleanConsole):
    """The same, without rich's habit of ending the process when the reader of a pipe has gone."""

    def on_broken_pipe(self) -> None:
        """Stop printing."""
        self.quiet = True


class Progress:
    """The display of one launch. Example: `progress.phase("loading the model")`, `progress.step_line(3, metrics)`."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self.stream = stream or sys.stdout
        terminal = self.stream.isatty()
        self.console = PatientConsole(
            file=self.stream, force_terminal=terminal, no_color=not terminal, highlight=False, soft_wrap=not terminal,
            force_jupyter=False,
        )  # fmt: skip
        self.terminal = terminal and not self.console.is_dumb_terminal
        self.full, self.empty = blocks(self.stream)
        self.clock = clock
        self.failures, self.last_error = 0, ""
        self.started = self.drawn = clock()
        self.step_started = self.started
        self.step_s = 0.0
        """smoothed seconds of a step; 0 until the first has ended"""
        self.steps = 0
        """steps of the whole run; known from the first bar"""
        self._bar_shown = self._explained = False
        self._counted_since = self.started
        """when the first completion of a phase that only samples had ended"""
        self._phases: list[dict[str, float | str]] = []
        """phases that have begun and are not yet in a file"""
        self._phases_file: Path | None = None

    # ---- lines that stay -------------------------------------------------------------------------------------

    @harmless
    def phase(self, text: str) -> None:
        """Print that a part of the run begins, e.g. "starting engines"."""
        self.step_started = self.clock()
        self._phases.append({"time": round(time.time(), 3), "phase": text})
        self._write_phases()
        self._line(f"[bold cyan]==>[/] [bold]{escape(text)}[/]  [dim]({duration(self.clock() - self.started)})[/]")

    def keep_phases(self, path: Path) -> None:
        """Write each phase that begins, and those before, into a file that exists or whose folder does: a line of JSON
        each, {"time": Unix time in s, "phase": the text}."""
        self._phases_file = path
        self._write_phases()

    @harmless
    def _write_phases(self) -> None:
        path = self._phases_file
        try:
            while path is not None and self._phases:
                append_line(path, json.dumps(self._phases[0]).encode())
                self._phases.pop(0)
        except OSError as error:
            self._phases_file = None
            self.failures += 1
            self.warning(f"{error} (the run goes on; its phases are kept no more)")

    @harmless
    def note(self, text: str) -> None:
        """Print something worth knowing."""
        self._line(f"    {escape(text)}")

    @harmless
    def warning(self, text: str) -> None:
        """Print something that may need a repair; the run goes on."""
        self._line(f"[yellow]warning:[/] {escape(text)}")

    @harmless
    def error(self, text: str) -> None:
        """Print why the run ends, and keep it in `last_error`."""
        self.last_error = text
        self._line(f"[bold red]error:[/] {escape(text)}")

    @harmless
    def show(self, renderable: RenderableType) -> None:
        """Print a table or panel, e.g. at the end."""
        self._erase()
        self.console.print(renderable, soft_wrap=False)  # else the texts of a panel would be cut

    @harmless
    def step_line(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the one line after a step; metrics by the names of shared/metrics.py, missing ones are left out."""
        now = self.clock()
        took = metrics.get("time/step_s", now - self.step_started)
        self.step_s = took if not self.step_s else (1 - SMOOTHING) * self.step_s + SMOOTHING * took
        self.step_started = now
        if "staleness/max" in metrics:
            self._explain()
        self._line(self._step_text(step, metrics, took))

    def _explain(self) -> None:
        if not self._explained:
            self._explained = True
            self.note(LEGEND)

    def _step_text(self, step: int, metrics: Mapping[str, float], took: float) -> str:
        columns = [
            ("reward", "reward/mean", "{:.3f}"), ("acc", "accuracy", "{:.0%}"), ("lang", "consistency", "{:.0%}"),
            ("len", "length/mean", "{:.0f}"), ("age", "staleness/max", "{:.0f}"), ("kl", "kl/k3", "{:.0e}"),
        ]  # fmt: skip
        total = f"/{self.steps}" if self.steps else ""
        cells = [f"[bold]step {step}{total}[/]"]
        cells += [f"[dim]{label}[/] {form.format(metrics[key])}" for label, key, form in columns if key in metrics]
        last = [duration(took)]
        if self.steps > step:
            last.append(f"[dim]left[/] {duration((self.steps - step) * self.step_s)}")
        slow = [f"[dim]{name}[/]"] if (name := bottleneck(metrics)) else []
        lines = ["  ".join(parts) for parts in ([*cells, *last, *slow], [*cells, *last], [*cells[:-1], *last])]
        return next((line for line in lines if Text.from_markup(line).cell_len <= LINE), lines[-1])

    # ---- the line that moves ---------------------------------------------------------------------------------

    @harmless
    def batch(
        self, done: int, needed: int, in_flight: int, tokens_per_s: float, oldest_wait_s: float, step: int, steps: int,
        waiting: int = 0, filtered: str = "",
    ) -> None:  # fmt: skip
        """Draw a step's bar: `done` of `needed` completions of the next batch, and how fast. To be called often.
        waiting: episodes that wait for their environment. filtered: about the groups that this step cannot use."""
        self.steps = steps
        if not self._due():
            return
        self._explain()
        done, step = min(done, needed), min(step, steps)  # of later batches some have ended, too; after the last step
        elapsed, share = self.clock() - self.step_started, min(done / max(needed, 1), 1.0)
        of_step = elapsed / share if share > 0.05 else max(self.step_s, elapsed)
        mean, known = self.step_s or of_step, share > 0.05 or self.step_s > 0
        left = max(mean - elapsed, 0.0) + mean * (steps - step)
        self._draw(
            f"step {step}/{steps} {self._bar(share)} {done}/{needed}  "
            f"left {duration(max(of_step - elapsed, 0.0)) if known else '?'}, run {duration(left) if known else '?'}  "
            + (f"{filtered}  " if filtered else "")
            + f"{tokens_per_s:,.0f} tokens/s  {in_flight} in flight  oldest {duration(oldest_wait_s)}"
            + (f"  {waiting} wait for environments" if waiting else "")
        )

    @harmless
    def sft(self, step: int, steps: int, loss: float, tokens_per_s: float) -> None:
        """Draw the bar of SFT, and print a line that stays at its end."""
        now, figures = self.clock(), f"loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s"
        if step <= 1:  # the first step may compile kernels: the time left is estimated from the later ones
            self._counted_since = now
        if step >= steps:
            self._line(f"    SFT: {steps} steps, {figures}, {duration(now - self.step_started)}")
            self.step_started = now
        elif self._due():
            left = duration((now - self._counted_since) / (step - 1) * (steps - step)) if step > 1 else "?"
            self._draw(f"SFT {step}/{steps} {self._bar(step / steps)}  left {left}  {figures}")

    @harmless
    def sampled(self, done: int, total: int) -> None:
        """Draw the bar of a phase that only samples: its completions, of which the first gives 1."""
        if done <= 1:
            self._counted_since = self.clock()
        elif self._due():
            each = (self.clock() - self._counted_since) / (done - 1)
            self._draw(
                f"{done}/{total} completions {self._bar(done / max(total, 1))}  left {duration(each * (total - done))}"
            )

    @harmless
    def close(self) -> None:
        """Remove the bar and flush. May be called more than once."""
        self._erase()
        self.stream.flush()

    def _due(self) -> bool:
        now = self.clock()
        if now - self.drawn < (DRAW_EVERY_S if self.terminal else PLAIN_EVERY_S):
            return False
        self.drawn = now
        return True

    def _draw(self, text: str) -> None:
        if not self.terminal:
            self._line(f"    {escape(text)}")
            return
        self._erase()
        line = Text(text, style="dim", no_wrap=True, overflow="ellipsis")
        line.truncate(self.console.width - 1, overflow="ellipsis")  # a full last column would wrap
        self.console.print(line, end="", soft_wrap=True)
        self.stream.flush()
        self._bar_shown = True

    def _bar(self, share: float) -> str:
        filled = round(min(max(share, 0.0), 1.0) * BAR_WIDTH)
        return self.full * filled + self.empty * (BAR_WIDTH - filled)

    def _erase(self) -> None:
        if self._bar_shown:
            self.console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))
            self._bar_shown = False

    def _line(self, markup: str) -> None:
        self._erase()
        self.console.print(markup, soft_wrap=True)
        self.stream.flush()


def plain(renderable: Any, width: int = 100) -> str:
    """Return a table or panel as text without control codes, for files and tests."""
    console = CleanConsole(width=width, no_color=True, force_terminal=False, highlight=False)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()
