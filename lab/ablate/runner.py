"""Runs launches one after the other and shows the progress of all of them on the error stream.

A launch is `python -m trainer ...` in a session of its own, which dies with this process: Ctrl-C reaches only this one,
which asks the launch to save and waits for it. If a launch fails, that is recorded, and the others continue.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from lab.ablate import times
from lab.ablate.launch import Launch
from shared.progress import duration

LOOK_EVERY_S = 0.5
BAR_EVERY_S = 5.0
PLAIN_EVERY_S = 60.0
SAVE_DEADLINE_S = 120.0
"""seconds that the launch under way may take to save after Ctrl-C"""
ERROR_LINES = 3
LIBC = ctypes.CDLL(None)  # loaded here: nothing is to be loaded between fork and exec
DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG"""
FIRST_UNIT_S = 1.4
"""seconds of an optimiser step of the quickstart on two cores: the estimate before the first launch has ended"""


@dataclass(frozen=True)
class Failure:
    """A launch that did not finish."""

    title: str
    why: str


class Display:
    """Shows the current launch, the overall progress and the time left: a bar on a terminal, else plain lines."""

    def __init__(self, launches: Sequence[Launch], clock: Callable[[], float] = time.monotonic):
        self.launches, self.clock = launches, clock
        self.units_left = sum(launch.units for launch in launches)
        self.units_all = self.units_left
        self.units_now = 0.0
        """units of the launch under way"""
        self.spent_s = self.spent_units = 0.0
        self.began = self.told = clock()
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.bar: Progress | None = None
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            columns = (BarColumn(), TextColumn("{task.fields[state]}"))
            # no thread that draws: a process is forked while this is shown
            self.bar = Progress(*columns, console=self.console, transient=True, auto_refresh=False)
            self.task = self.bar.add_task("", total=self.units_all, state="")
            self.bar.start()

    def begin(self, number: int, launch: Launch) -> None:
        """Show that a launch starts."""
        self.began = self.told = self.clock()
        self.units_now = launch.units
        self.line(f"[{number}/{len(self.launches)}] {launch.title}  (left about {duration(self.left_s())})")

    def show(self, launch: Launch) -> None:
        """Show the progress of the launch, if the last update is long enough ago."""
        now = self.clock()
        if now - self.told < (PLAIN_EVERY_S if self.bar is None else BAR_EVERY_S):
            return
        self.told = now
        state = f"{launch.title}: {launch.progress}, left about {duration(self.left_s())}"
        if self.bar is None:
            self.line(f"    {state}")
        else:
            done = self.units_all - self.units_left + min((now - self.began) / self.unit_s, launch.units)
            self.bar.update(self.task, completed=done, state=state, refresh=True)

    def end(self, launch: Launch, failure: Failure | None) -> None:
        """Show that the launch ended, and count its time if it succeeded."""
        took = self.clock() - self.began
        self.units_left -= launch.units
        self.units_now = 0.0
        if failure is None:
            self.spent_s += took
            self.spent_units += launch.units
        self.line(f"    finished in {duration(took)}" if failure is None else f"    failed: {failure.why}")

    @property
    def unit_s(self) -> float:
        """Seconds per unit in the launches that finished so far; an estimate before the first."""
        return self.spent_s / self.spent_units if self.spent_units else FIRST_UNIT_S

    def left_s(self) -> float:
        """Estimate the seconds of all remaining launches; a delay of the current one does not shorten the others."""
        now = max(self.units_now * self.unit_s - (self.clock() - self.began), 0.0)
        return now + (self.units_left - self.units_now) * self.unit_s

    def line(self, text: str) -> None:
        """Print a line that remains on the terminal."""
        self.console.print(text, markup=False)

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.stop()


def run_all(launches: Sequence[Launch]) -> list[Failure]:
    """Run every launch that is not finished; returns the failures. Raises KeyboardInterrupt after Ctrl-C, once the
    launch under way has saved."""
    waiting = [launch for launch in launches if not launch.finished]
    failures: list[Failure] = []
    display = Display(waiting)
    try:
        if done := len(launches) - len(waiting):
            display.line(f"{done} of {len(launches)} runs are finished already")
        for number, launch in enumerate(waiting, 1):
            display.begin(number, launch)
            failure = run_one(launch, display)
            display.end(launch, failure)
            if failure is not None:
                failures.append(failure)
    finally:
        display.close()
    return failures


def run_one(launch: Launch, display: Display) -> Failure | None:
    """Run one launch to its end, and record its duration. Raises KeyboardInterrupt after Ctrl-C."""
    if launch.start is not None and not launch.start.finished:
        return Failure(launch.title, f"its start is not there ({launch.start.run_dir})")
    launch.run_dir.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    code = 0
    with launch.log.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer", *launch.arguments], stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=die_with_us,
        )  # fmt: skip
        try:
            while (found := process.poll()) is None:
                display.show(launch)
                time.sleep(LOOK_EVERY_S)
            code = found
        except KeyboardInterrupt:
            display.line("    stopping: the run saves a checkpoint first; the same command goes on from there")
            stop(process)
            code = process.returncode
            raise
        finally:
            times.note(launch.run_dir, time.monotonic() - began, code)
    if launch.finished:
        return None
    return Failure(launch.title, f"exit code {code}; {last_error(launch.log)} (all it printed: {launch.log})")


def die_with_us() -> None:
    """Make the new process end when its parent ends. (shared/watchdog.py has the same for ranks, and loads torch.)"""
    LIBC.prctl(DIE_WITH_PARENT, signal.SIGKILL)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a launch to save and end; kill it if it takes too long, or at a second Ctrl-C."""
    try:
        process.send_signal(signal.SIGINT)
        process.wait(SAVE_DEADLINE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


def last_error(log: Path) -> str:
    """Return why a launch ended, from its log: its last lines that begin with "error", else its last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error")]
    return " / ".join(errors[-ERROR_LINES:] or lines[-1:]) or "it printed nothing"
