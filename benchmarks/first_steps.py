"""A stranger's path, from a clone to a model of their own data: each step's command and its time.

The checkout's last commit is cloned into an empty folder, and every command runs there as README and examples have it.
Pages are asked for until they are shown.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from urllib.error import HTTPError

from benchmarks import report
from benchmarks.figures import ROOT, Section, benchmark, measured_with
from shared.errors import RunError
from shared.progress import duration

TRAINING = ".venv/bin/maestrale train examples/own/settings.toml"


class Step(NamedTuple):
    """A step of the path."""

    about: str
    command: str
    shown_at: str = ""
    """address of a page that the command serves: the step ends when the page is shown, the command with the path"""


STEPS = (
    Step("set-up", "make install"),
    Step("a trained tiny model", "make train"),
    Step("its dashboard", ".venv/bin/maestrale dashboard runs/ --port 8790", "http://127.0.0.1:8790/"),
    Step("the chat page", ".venv/bin/maestrale serve --model runs/quickstart/latest", "http://127.0.0.1:8000/ready"),
    Step(
        "an evaluation",
        ".venv/bin/maestrale evaluate runs/quickstart/made/validation.jsonl --no-ask-form --max-tokens 64",
    ),
    Step("your own reward and your own data", TRAINING),
)
QUICK = {
    "make train": " ARGS='--steps=2 --sft.steps=20 --evaluate.problems=16'",
    TRAINING: " --steps=2",
    STEPS[4].command: " --limit 8",
}
"""command -> what a quick try adds to it"""


def shown(address: str) -> bool:
    """Whether a page is there, or the question for its token."""
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError as error:
        return isinstance(error, HTTPError) and error.code == 401


def take(command: str, folder: Path, shown_at: str, deadline_s: float) -> tuple[float, subprocess.Popen[bytes]]:
    """Run a command until it ends, or until the page at shown_at is there; returns the seconds and the process.

    Raises RunError where it fails or takes longer than the deadline."""
    began = time.monotonic()
    process = subprocess.Popen(["bash", "-c", command], cwd=folder, start_new_session=True)
    while not (shown(shown_at) if shown_at else process.poll() is not None):
        if time.monotonic() - began > deadline_s or (shown_at and process.poll() is not None):
            end(process)
            raise RunError(f"{command} in {folder}: no success in {time.monotonic() - began:.0f} s")
        time.sleep(0.2)
    if process.returncode:
        raise RunError(f"{command} in {folder} ended with code {process.returncode}")
    return time.monotonic() - began, process


def end(process: subprocess.Popen[bytes]) -> None:
    """End a command and its children, and wait for it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    process.wait(60)


@benchmark(page="examples/README.md")
def first_steps(quick: bool, deadline_s: float = 7200.0) -> Iterator[Section]:
    """Go the path. deadline_s: for each step; quick: a few training steps only."""
    rows, serving = list[list[str]](), list[subprocess.Popen[bytes]]()
    with TemporaryDirectory() as name:
        folder = Path(name) / "maestrale"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
        try:
            for step in STEPS:
                command = step.command + (QUICK.get(step.command, "") if quick else "")
                seconds, process = take(command, folder, step.shown_at, deadline_s)
                rows.append([step.about, f"`{command}`", duration(seconds)])
                if step.shown_at:
                    serving.append(process)
                if step.command == STEPS[4].command:
                    end(serving.pop())  # the server: its memory and its share of the cores are wanted
        finally:
            for process in serving:
                end(process)
    yield Section(
        f"{measured_with('first_steps')}. Pages: until they are shown. Packages come from pip's and uv's caches where "
        f"they are there.\n\n{report.table(['step', 'command', 'time'], *rows)}", mark="first steps",
    )  # fmt: skip
