"""Trains the runs of an ablation one after the other, keeps their times, and shows the progress of all of them.

A run is `python -m trainer ...` in a session of its own, which dies with this process: Ctrl-C reaches only this one,
which asks the run to save and waits for it. If a run fails, that is recorded, and the others continue.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn

from lab.ablate.runs import AblationRun
from shared.atomic_write import append_line
from shared.json_reader import parse_json
from shared.progress import CleanConsole, duration
from verify.code.sandbox.syscalls import die_with_parent

TIMES = "launches.jsonl"
"""file beside the run folders: a line for each launch of a run that ended"""
LOOK_EVERY_S = 0.5
BAR_EVERY_S = 5.0
PLAIN_EVERY_S = 60.0
SAVE_DEADLINE_S = 120.0
"""seconds that the run under way may take to save after Ctrl-C"""
ERROR_LINES = 3
FIRST_UNIT_S = 1.4
"""seconds of an optimiser step of the quickstart on two cores: the estimate before the first run has ended"""


class Display:
    """Shows the current run, the overall progress and the time left: a bar on a terminal, else plain lines."""

    def __init__(self, runs: Sequence[AblationRun], clock: Callable[[], float] = time.monotonic):
        self.count, self.clock = len(runs), clock
        self.units_all = self.units_left = sum(run.units for run in runs)
        self.units_now = 0.0
        """units of the run under way"""
        self.spent_s = self.spent_units = 0.0
        self.began = self.told = clock()
        self.console = CleanConsole(stderr=True, highlight=False, soft_wrap=True)
        self.bar: Progress | None = None
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            columns = (BarColumn(), TextColumn("{task.fields[state]}"))
            # no thread that draws: a process is forked while this is shown
            self.bar = Progress(*columns, console=self.console, transient=True, auto_refresh=False)
            self.task = self.bar.add_task("", total=self.units_all, state="")
            self.bar.start()

    def begin(self, number: int, run: AblationRun) -> None:
        """Show that a run starts."""
        self.began = self.told = self.clock()
        self.units_now = run.units
        self.line(f"[{number}/{self.count}] {run.title}  (left about {duration(self.left_s())})")

    def show(self, run: AblationRun) -> None:
        """Show the progress of the run, if the last update is long enough ago."""
        now = self.clock()
        if now - self.told < (PLAIN_EVERY_S if self.bar is None else BAR_EVERY_S):
            return
        self.told = now
        state = f"{run.title}: {run.progress}, left about {duration(self.left_s())}"
        if self.bar is None:
            self.line(f"    {state}")
        else:
            done = self.units_all - self.units_left + min((now - self.began) / self.unit_s, run.units)
            self.bar.update(self.task, completed=done, state=state, refresh=True)

    def end(self, run: AblationRun, failure: str) -> None:
        """Show that the run ended ("" if well), and count its time if it succeeded."""
        took = self.clock() - self.began
        self.units_left -= run.units
        self.units_now = 0.0
        if not failure:
            self.spent_s += took
            self.spent_units += run.units
        self.line(f"    failed: {failure}" if failure else f"    finished in {duration(took)}")

    @property
    def unit_s(self) -> float:
        """Seconds per unit in the runs that finished so far; an estimate before the first."""
        return self.spent_s / self.spent_units if self.spent_units else FIRST_UNIT_S

    def left_s(self) -> float:
        """Estimate the seconds of all remaining runs; a delay of the current one does not shorten the others."""
        now = max(self.units_now * self.unit_s - (self.clock() - self.began), 0.0)
        return now + (self.units_left - self.units_now) * self.unit_s

    def line(self, text: str) -> None:
        """Print a line that remains on the terminal."""
        self.console.print(text, markup=False)

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.stop()


def run_all(runs: Sequence[AblationRun]) -> dict[Path, str]:
    """Train every run that is not finished; returns run folder -> why it failed.

    Raises KeyboardInterrupt after Ctrl-C, once the run under way has saved."""
    waiting = [run for run in runs if not run.finished]
    failures: dict[Path, str] = {}
    display = Display(waiting)
    try:
        if done := len(runs) - len(waiting):
            display.line(f"{done} of {len(runs)} runs are finished already")
        for number, run in enumerate(waiting, 1):
            display.begin(number, run)
            failure = train(run, display)
            display.end(run, failure)
            if failure:
                failures[run.run_dir] = failure
    finally:
        display.close()
    return failures


def train(run: AblationRun, display: Display) -> str:
    """Train a run to its end, and note its duration; returns why it failed, "" if it did not. Raises KeyboardInterrupt
    after Ctrl-C."""
    if run.start is not None and not run.start.finished:
        return f"its start is not there ({run.start.run_dir})"
    run.run_dir.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with run.log.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer", *run.arguments], stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
        try:
            while process.poll() is None:
                display.show(run)
                time.sleep(LOOK_EVERY_S)
        except KeyboardInterrupt:
            display.line("    stopping: the run saves a checkpoint first; the same command goes on from there")
            stop(process)
            raise
        finally:
            note_time(run.run_dir, time.monotonic() - began, process.returncode or 0)
    if run.finished:
        return ""
    return f"exit code {process.returncode}; {last_error(run.log)} (all it printed: {run.log})"


def note_time(run_dir: Path, seconds: float, code: int) -> None:
    """Append the duration of a launch and its exit code."""
    line = json.dumps({"run": run_dir.name, "seconds": round(seconds, 1), "code": code})
    append_line(run_dir.parent / TIMES, line.encode())


def wall_s(folder: Path, run: str = "") -> float:
    """Return the seconds of all launches of a folder, or of one run, interrupted and failed ones included."""
    path = folder / TIMES
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [parse_json(line) for line in lines]
    return float(sum(row["seconds"] for row in rows if run in ("", row["run"])))


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a run to save and end; kill it if it takes too long, or at a second Ctrl-C."""
    try:
        process.send_signal(signal.SIGINT)
        process.wait(SAVE_DEADLINE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


def last_error(log: Path) -> str:
    """Return why a run ended, from its log: its last lines that begin with "error", else its last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error")]
    return " / ".join(errors[-ERROR_LINES:] or lines[-1:]) or "it printed nothing"
