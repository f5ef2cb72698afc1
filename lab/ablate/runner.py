"""Trains the runs of an ablation one after the other, keeps their times, and shows their progress.

A run is `python -m trainer ...` in a session of its own, which dies with this process: Ctrl-C reaches only this one,
which asks the run to save and waits for it. If a run fails, that is recorded, and the others continue.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lab.ablate.runs import AblationRun
from shared.atomic_write import append_line
from shared.clean_text import clean
from shared.json_reader import parse_json
from shared.progress import duration
from shared.progress_bar import ProgressBar
from verify.code.sandbox.syscalls import die_with_parent

TIMES = "launches.jsonl"
"""file next to the run folders, with a line for each launch of a run that ended"""
LOOK_EVERY_S = 5.0
"""seconds between two readings of the metrics of the run under way"""
SAVE_DEADLINE_S = 120.0
"""seconds that the run under way may take to save after Ctrl-C"""
ERROR_LINES = 3


def run_all(runs: Sequence[AblationRun]) -> dict[Path, str]:
    """Train every run that is not finished; returns run folder -> why it failed.

    Raises KeyboardInterrupt after Ctrl-C, once the run under way has saved."""
    waiting = [run for run in runs if not run.finished]
    failures: dict[Path, str] = {}
    if done := len(runs) - len(waiting):
        say(f"{done} of {len(runs)} runs are finished already")
    for number, run in enumerate(waiting, 1):
        say(f"[{number}/{len(waiting)}] {run.title}")
        began = time.monotonic()
        if failure := train(run):
            failures[run.run_dir] = failure
        say(f"    failed: {failure}" if failure else f"    finished in {duration(time.monotonic() - began)}")
    return failures


def say(text: str) -> None:
    """Print a line on the error stream."""
    sys.stderr.write(f"{clean(text)}\n")
    sys.stderr.flush()


def train(run: AblationRun) -> str:
    """Train a run to its end, and note its duration; returns why it failed, "" if it did not. Raises KeyboardInterrupt
    after Ctrl-C."""
    if run.start is not None and not run.start.finished:
        return f"its start is not there ({run.start.run_dir})"
    run.run_dir.parent.mkdir(parents=True, exist_ok=True)
    began, total = time.monotonic(), run.config.sft.steps + run.config.steps
    with run.log.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer", *run.arguments], stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
        try:
            with contextlib.closing(ProgressBar("steps", f"    {run.title}:", sum(run.steps_made), total)) as bar:
                while not ended(process):
                    bar.show(sum(run.steps_made))
        except KeyboardInterrupt:
            say("    stopping: the run saves a checkpoint first; the same command goes on from there")
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


def ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has ended, after at most LOOK_EVERY_S."""
    try:
        process.wait(LOOK_EVERY_S)
    except subprocess.TimeoutExpired:
        return False
    return True


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
