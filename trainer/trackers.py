"""Sends what a run measures to experiment trackers: W&B, TensorBoard, trackio, MLflow (docs/trackers.md).

Each tracker is a process of its own (tracker_process.py), which gets the lines of metrics.jsonl and a few completions
over a socket that never blocks the controller:

    controller --lines, samples--> [socket] --> reader thread --> [queue] --> the tracker's library
        ^---------------- how many were handled, how many failed, why -----------------|

A message that finds UNHANDLED others before it, or no room in the socket, is dropped and counted (`trackers/dropped`);
so are those that the library refuses, and all behind the death of the process. The process ends by itself END_S after
the controller at the latest, whatever its library does.
"""

from __future__ import annotations

import atexit
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import msgspec

from shared.clean_text import clean
from shared.config import Config
from shared.launch.deaths import how
from shared.types import Group

UNHANDLED = 256
"""messages that wait for a tracker at most"""
END_S = 60
"""seconds that a tracker has to write or upload the rest once the run has ended"""
SAMPLES, SAMPLES_EVERY, SAMPLE_CHARACTERS = 4, 10, 2000
"""completions of a table, steps between tables, characters kept of each text"""
COLUMNS = ("step", "problem", "completion", "answer", "verdict", "reward", "reason")
"""of a table of samples"""


class TrackedRun(msgspec.Struct, tag=True):
    """The first message: which run it is."""

    name: str
    folder: str
    """of the run; the tracker keeps its id and its log in trackers/"""
    settings: dict[str, Any]
    version: int
    """policy version that this launch goes on from; later steps are made again"""


class TrackedRow(msgspec.Struct, tag=True):
    """A line of metrics.jsonl."""

    line: msgspec.Raw


class TrackedSamples(msgspec.Struct, tag=True):
    """Some completions of a step."""

    step: int
    time: float
    """Unix time"""
    rows: list[list[Any]]
    """[SAMPLES][COLUMNS]"""


class TrackedEnd(msgspec.Struct, tag=True):
    """The last message; a run whose controller was killed sends none."""

    finished: bool
    """whether all steps were trained"""


class Handled(msgspec.Struct):
    """What a tracker's process answers after every row and table."""

    messages: int = 0
    """rows and tables so far, with those that failed"""
    failed: int = 0
    """those that the library did not take"""
    problem: str = ""
    """why, of the last one"""


Message = TrackedRun | TrackedRow | TrackedSamples | TrackedEnd


def not_installed(config: Config) -> Iterator[str]:
    """Yield a line for each tracker that is named and whose package is missing."""
    for name in config.trackers:
        try:
            distribution(name)
        except PackageNotFoundError:
            yield (
                f'trackers names "{name}", but its package is not installed: `pip install "maestrale[{name}]"` (in a '
                f'checkout `pip install -e ".[{name}]"`), or remove it from trackers'
            )


class _Link:
    """One tracker, seen from the controller. Nothing here waits, but for `wait`."""

    def __init__(self, name: str, run: TrackedRun, warn: Callable[[str], None]):
        self.name, self.warn = name, warn
        self.sent, self.refused, self.handled = 0, 0, Handled()
        self.ended = False
        self.told: set[str] = set()
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.setblocking(False)
        self.child: subprocess.Popen[bytes] | None = None
        folder = Path(run.folder, "trackers")
        command = [sys.executable, "-m", "trainer.tracker_process", name, str(theirs.fileno())]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with theirs, (folder / f"{name}.log").open("wb") as log:
                self.child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )  # fmt: skip
            self.ours.send(msgspec.json.encode(run))
        except (OSError, ValueError, TypeError) as error:
            self.ended = True
            self.warn(f"tracker {name} did not start ({error}); metrics.jsonl has everything")

    @property
    def dropped(self) -> int:
        """Rows and tables that the tracker does not have, and will not get."""
        return self.refused + self.handled.failed + (self.sent - self.handled.messages if self.ended else 0)

    def send(self, message: TrackedRow | TrackedSamples) -> None:
        """Hand a message over, or drop it."""
        self.hear()
        full = self.sent - self.handled.messages >= UNHANDLED
        if not self.ended and not full:
            try:
                self.ours.send(msgspec.json.encode(message))
                self.sent += 1
                return
            except BlockingIOError:
                full = True
            except (OSError, ValueError, TypeError) as error:  # too large, no text, or its end is noticed only now
                self._tell("message", f"was not given a message ({error})")
        self.refused += 1
        if full:
            self._tell("full", f"does not keep up: {self.sent - self.handled.messages:,} messages wait for it")

    def hear(self) -> None:
        """Take what the process has answered, and notice its end."""
        while not self.ended:
            try:
                if answer := self.ours.recv(1 << 16):
                    self.handled = msgspec.json.decode(answer, type=Handled)
            except BlockingIOError:
                return
            except (ConnectionResetError, msgspec.MsgspecError):
                continue  # it has ended with messages unread; what it had answered is still to be read
            if answer:
                if self.handled.problem:
                    self._tell("failure", f"failed ({self.handled.problem})")
            else:
                self.ended = True
                code = self.child.poll() if self.child else None
                self._tell("end", how(code) if code is not None and code < 0 else "has ended")

    def _tell(self, kind: str, what: str) -> None:
        """Warn once of each kind of trouble."""
        if kind not in self.told:
            self.told.add(kind)
            self.warn(
                f"tracker {self.name} {what}; trackers/dropped counts what it lacks, metrics.jsonl has it, and its own "
                f"messages are in trackers/{self.name}.log of the run"
            )

    def end(self, finished: bool) -> None:
        """Say that nothing comes any more."""
        with suppress(OSError):
            self.ours.send(msgspec.json.encode(TrackedEnd(finished)))
        with suppress(OSError):
            self.ours.shutdown(socket.SHUT_WR)

    def wait(self, until: float) -> None:
        """Wait for the end of the process, and kill it where it does not come. until: on the monotonic clock."""
        if self.child is None:
            return
        try:
            self.child.wait(max(until - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            self.child.kill()
            with suppress(subprocess.TimeoutExpired):
                self.child.wait(1.0)
        self.told.add("end")  # it was told to
        self.hear()
        self.ended, self.child = True, None
        self.ours.close()


class Trackers:
    """The trackers of a launch; none without the setting `trackers`. Nothing here raises, or waits before `wait`."""

    def __init__(self, config: Config, version: int, warn: Callable[[str], None]):
        """Start them. version: that this launch goes on from. warn: shows a line to the user."""
        self.links: list[_Link] = []
        if config.trackers:
            run = TrackedRun(config.name, str(config.run_dir.absolute()), config.model_dump(mode="json"), version)
            self.links = [_Link(name, run, warn) for name in dict.fromkeys(config.trackers)]
            atexit.register(self.wait)

    @property
    def dropped(self) -> int:
        """Rows and tables that trackers do not have, all trackers together."""
        return sum(link.dropped for link in self.links)

    def row(self, line: bytes) -> None:
        """Hand over a line of metrics.jsonl."""
        for link in self.links:
            link.send(TrackedRow(msgspec.Raw(line)))

    def samples(self, step: int, groups: Sequence[Group]) -> None:
        """Hand over the first completion of the first groups, with every SAMPLES_EVERY-th step from the first on."""
        if self.links and step % SAMPLES_EVERY == 1:
            message = TrackedSamples(step, time.time(), [sample(step, group) for group in groups[:SAMPLES]])
            for link in self.links:
                link.send(message)

    def end(self, finished: bool) -> None:
        """Say that nothing comes any more; they end meanwhile, and the process waits for them last of all."""
        for link in self.links:
            link.end(finished)

    def wait(self) -> None:
        """Wait for END_S at most, for all of them together, until they have ended."""
        until = time.monotonic() + END_S
        for link in self.links:
            link.end(False)  # counts where no other end was told
            link.wait(until)


def sample(step: int, group: Group) -> list[Any]:
    """[COLUMNS] the first completion of a group; texts are cut."""
    reward, text = group.rewards[0], group.texts[0] if group.texts else ""
    graded = [None] * 4 if reward is None else [reward.answer, reward.verdict.value, reward.total, reward.reason]
    row = [step, group.prompt.problem.text, text, *graded]
    return [clean(value[:SAMPLE_CHARACTERS]) if isinstance(value, str) else value for value in row]
