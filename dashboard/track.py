"""Send a run to an experiment tracker: `python -m dashboard.track runs/NAME wandb` (docs/trackers.md).

It reads what a run writes, until the run has ended. trackers/NAME.sent lists what the tracker has, and "closed" once it
has written or uploaded all of it: the same command does the rest. The setting `trackers` starts it with a launch.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from dashboard.growing_file import GrowingFile, lines_of, open_plain
from dashboard.run_folder import RunFolder, is_run, number
from dashboard.trackers import TRACKERS, Rows, TrackedRun, Tracker
from shared.clean_text import clean
from shared.command_line import CommandParser
from shared.errors import ConfigError, NotInstalled, RunError, run_command
from shared.json_reader import decode_json
from shared.launch.deaths import ENDING
from shared.metrics import decode_row
from shared.types import Group

SAMPLES, SAMPLES_EVERY, SAMPLE_CHARACTERS = 4, 10, 2000
"""completions of a table, steps between tables, characters kept of each text"""
LOOK_S = 1.0
"""between two looks at a run that goes on"""
CLOSED, STOPPED = "closed", "stopped; the same command sends the rest"


class Follower:
    """Sends the rows and samples of a run folder that its tracker does not have yet."""

    def __init__(self, run: RunFolder, name: str, log: TextIO):
        """log: a line for each row and table that was sent."""
        self.run, self.name, self.log = run, name, log
        lines = log.read().splitlines()
        self.sent, self.closed = set(lines), not lines or lines[-1] == CLOSED
        self.steps = {key.rpartition(" ")[0] for key in self.sent}
        self.metrics = GrowingFile(run.folder / "metrics.jsonl")
        self.due: dict[int, float] = {}
        """steps whose samples are to be sent, with their times"""
        self.tracker: Tracker | None = None
        self.refused = 0
        """rows and tables that the tracker did not take"""

    def look(self) -> None:
        """Send what is new. Raises what the tracker raises when it is opened."""
        for _, line in self.metrics.look()[1]:
            with suppress(ValueError):  # a damaged line
                self.row(decode_row(line or b""))
        for step in sorted(self.due.keys() & self.run.rollouts.steps()):
            self.table(step, self.due.pop(step))

    def row(self, row: dict[str, Any]) -> None:
        """Send a row of metrics, and note whether samples follow."""
        step, kind, when = row["step"], row["kind"], row.get("time", 0.0)
        if kind == "train" and step % SAMPLES_EVERY == 1:
            self.due[step] = when
        values = {name: v for name, v in row.items() if name not in ("step", "time") and number(v) is not None}
        again = kind != "evaluation" and f"{kind} {step}" in self.steps
        self.send(f"{kind} {step} {when}", lambda to: to.row(row, values, again))

    def table(self, step: int, when: float) -> None:
        """Send the first completions of a step."""

        def rows() -> Rows:
            with open_plain(self.run.folder / "rollouts" / f"step_{step}.jsonl") as stream:
                return [sample(step, decode_json(line or b"", Group)) for _, line in islice(lines_of(stream), SAMPLES)]

        self.send(f"samples {step} {when}", lambda to: to.samples(step, when, rows()))

    def send(self, key: str, hand_over: Callable[[Tracker], None]) -> None:
        """Hand over what the tracker does not have. What it refuses is counted, and left to the next start."""
        if key in self.sent:
            return
        self.tracker = self.tracker or self.open()
        try:
            hand_over(self.tracker)
        except Exception as error:  # noqa: BLE001 - the next row may be taken
            self.refused += 1
            print(f"{key}: {type(error).__name__}: {clean(str(error))[:500]}", file=sys.stderr)
            return
        self.sent.add(key)
        self.steps.add(key.rpartition(" ")[0])
        print(key, file=self.log, flush=True)

    def open(self) -> Tracker:
        """Open the tracker, once there is something to send: config.toml is of this launch then."""
        return TRACKERS[self.name](TrackedRun(self.run.name, self.run.folder, self.run.config()))

    def close(self, finished: bool) -> None:
        """Let the tracker write or upload what is left, of an earlier launch too. Raises what the tracker raises."""
        if self.tracker is not None or not self.closed:
            (self.tracker or self.open()).close(finished)
            print(CLOSED, file=self.log, flush=True)


def sample(step: int, group: Group) -> list[Any]:
    """[COLUMNS] the first completion of a group; texts are cut."""
    reward, text = group.rewards[0], group.texts[0] if group.texts else ""
    graded = [None] * 4 if reward is None else [reward.answer, reward.verdict.value, reward.total, reward.reason]
    row = [step, group.prompt.problem.text, text, *graded]
    return [clean(value[:SAMPLE_CHARACTERS]) if isinstance(value, str) else value for value in row]


def states(run: RunFolder) -> Iterator[str]:
    """Yield the run's state, now and then, until it has ended. One that is silent, on another machine, may go on."""
    before = ""
    while (state := (summary := run.summary())["state"]) in ("running", "silent"):
        if before != state == "silent":
            print(f"{clean(summary['story'])}: still followed, Ctrl-C ends this", file=sys.stderr)
        yield (before := state)
        time.sleep(LOOK_S)
    yield str(state)


def end_within(run: RunFolder, seconds: int) -> None:
    """Be a process that a launch has started: ignore the signals that end it, step back where the machine is short of
    processors or memory, and end so long after the run, whatever the tracker's library does."""
    for request in ENDING:
        signal.signal(request, signal.SIG_IGN)  # the run goes on until the controller has saved
    os.nice(10)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")

    def wait() -> None:
        for _ in states(run):
            pass
        signal.alarm(seconds)  # nothing handles it: the kernel ends the process

    threading.Thread(target=wait, daemon=True).start()


def follow(run: RunFolder, name: str) -> int:
    """Send what the tracker lacks until the run has ended; returns how many rows and tables it refused. Raises
    ConfigError for a tracker that is not installed, RunError for whatever its library raises."""
    (run.folder / "trackers").mkdir(exist_ok=True)
    with (run.folder / "trackers" / f"{name}.sent").open("a+") as log:
        fcntl.flock(log, fcntl.LOCK_EX)  # the tracker of the launch before may be about to end
        log.seek(0)
        follower, state = Follower(run, name, log), ""
        try:
            try:
                for state in states(run):  # noqa: B007 - the last one is how the run ended
                    follower.look()
            except KeyboardInterrupt:
                if follower.tracker is not None:
                    follower.close(False)
                raise
            follower.close(state == "finished")
        except ImportError as error:
            raise NotInstalled(name, f"{error}: ") from error
        except Exception as error:
            raise RunError(f"{name}: {type(error).__name__}: {error}") from error
    return follower.refused


def main(arguments: list[str]) -> int:
    """Follow a run until it has ended; returns the exit code."""
    parser = CommandParser("python -m dashboard.track", description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder of a run")
    parser.add_argument("tracker", choices=sorted(TRACKERS))
    parser.add_argument("--within", type=int, help="a launch started this: end so many seconds after the run")
    given = parser.parse_args(arguments)
    folder = given.folder.resolve()

    def run() -> int:
        if not is_run(folder) and not (folder / "lock").is_file():
            raise ConfigError(f"{given.folder} is no folder of a run: name one, such as runs/NAME")
        if given.within is not None:
            end_within(RunFolder(folder), given.within)
        if refused := follow(RunFolder(folder), given.tracker):
            raise RunError(f"{refused:,} rows or tables were refused: the same command sends them")
        return 0

    return run_command(run, STOPPED)


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
