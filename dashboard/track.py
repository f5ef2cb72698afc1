"""Send a run to an experiment tracker: `python -m dashboard.track runs/NAME wandb` (docs/trackers.md).

It reads what the run writes, follows a run that goes on, and ends when the run has ended. trackers/NAME.sent of the run
folder lists what the tracker has: the same command sends the rest. The setting `trackers` starts it with a launch.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from dashboard.growing_file import GrowingFile, lines_of, open_plain, read_small
from dashboard.run_folder import RunFolder, is_run, number
from dashboard.trackers import TRACKERS, TrackedRun, TrackedSamples, Tracker
from shared.clean_text import clean
from shared.json_reader import decode_json
from shared.launch.deaths import ENDING
from shared.metrics import decode_row
from shared.types import Group

SAMPLES, SAMPLES_EVERY, SAMPLE_CHARACTERS = 4, 10, 2000
"""completions of a table, steps between tables, characters kept of each text"""
LOOK_S = 1.0
"""between two looks at a run that goes on"""


class Follower:
    """Sends the rows and samples of a run folder that its tracker does not have yet."""

    def __init__(self, run: RunFolder, name: str, log: TextIO):
        """log: a line for each row and table that was sent."""
        self.run, self.name, self.log = run, name, log
        self.sent = set(log.read().splitlines())
        self.steps = {key.rpartition(" ")[0] for key in self.sent}
        self.metrics = GrowingFile(run.folder / "metrics.jsonl")
        self.wanted: dict[int, float] = {}
        """steps whose samples are to be sent, with their times"""
        self.tracker: Tracker | None = None
        self.refused = 0
        """rows and tables that the tracker did not take"""

    def look(self) -> None:
        """Send what is new. Raises what the tracker raises when it is opened."""
        for _, line in self.metrics.look()[1]:
            with suppress(ValueError):  # a damaged line
                self.row(decode_row(line or b""))
        for step in sorted(self.wanted.keys() & self.run.rollouts.steps()):
            self.table(step, self.wanted.pop(step))

    def row(self, row: dict[str, Any]) -> None:
        """Send a row of metrics, and note whether samples follow."""
        step, kind, when = row["step"], row["kind"], row.get("time", 0.0)
        if kind == "train" and step % SAMPLES_EVERY == 1:
            self.wanted[step] = when
        values = {
            name: value for name, value in row.items() if name not in ("step", "time") and number(value) is not None
        }
        again = kind != "evaluation" and f"{kind} {step}" in self.steps
        self.send(f"{kind} {step} {when}", lambda to: to.row(row, values, again))

    def table(self, step: int, when: float) -> None:
        """Send the samples of a step."""
        self.send(f"samples {step} {when}", lambda to: to.samples(self.samples(step, when)))

    def samples(self, step: int, when: float) -> TrackedSamples:
        """The first completions of a step. Raises OSError and ValueError."""
        with open_plain(self.run.folder / "rollouts" / f"step_{step}.jsonl") as stream:
            groups = [decode_json(line or b"", Group) for _, line in islice(lines_of(stream), SAMPLES)]
        return TrackedSamples(step, when, [sample(step, group) for group in groups])

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
        try:
            settings = tomllib.loads(read_small(self.run.folder / "config.toml").decode())
        except (ValueError, RecursionError):
            settings = {}
        return TRACKERS[self.name](TrackedRun(self.run.name, self.run.folder, settings))


def sample(step: int, group: Group) -> list[Any]:
    """[COLUMNS] the first completion of a group; texts are cut."""
    reward, text = group.rewards[0], group.texts[0] if group.texts else ""
    graded = [None] * 4 if reward is None else [reward.answer, reward.verdict.value, reward.total, reward.reason]
    row = [step, group.prompt.problem.text, text, *graded]
    return [clean(value[:SAMPLE_CHARACTERS]) if isinstance(value, str) else value for value in row]


def states(run: RunFolder) -> Iterator[str]:
    """Yield how the run stands, now and then, until it does not run any more."""
    while (state := str(run.summary()["state"])) == "running":
        yield state
        time.sleep(LOOK_S)
    yield state


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


def main(arguments: list[str]) -> int:
    """Follow a run until it has ended; returns the exit code."""
    parser = argparse.ArgumentParser("python -m dashboard.track", description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder of a run")
    parser.add_argument("tracker", choices=sorted(TRACKERS))
    parser.add_argument("--within", type=int, help="a launch started this: end so many seconds after the run")
    given = parser.parse_args(arguments)
    folder = given.folder.resolve()
    if not is_run(folder) and not (folder / "lock").is_file():
        print(f"error: {given.folder} is no folder of a run: name one, such as runs/NAME", file=sys.stderr)
        return 2
    run, state = RunFolder(folder), ""
    if given.within is not None:
        end_within(run, given.within)
    (folder / "trackers").mkdir(exist_ok=True)
    with (folder / "trackers" / f"{given.tracker}.sent").open("a+") as log:
        fcntl.flock(log, fcntl.LOCK_EX)  # the tracker of the launch before may be about to end
        log.seek(0)
        follower = Follower(run, given.tracker, log)
        try:
            for state in states(run):  # noqa: B007 - the last one is how the run ended
                follower.look()
            if follower.tracker is not None:
                follower.tracker.close(state == "finished")
        except ImportError as error:
            print(f'error: {error}: `pip install "maestrale[{given.tracker}]"`', file=sys.stderr)
            return 2
        except Exception as error:  # noqa: BLE001 - whatever the tracker's library raises
            print(f"error: {given.tracker}: {type(error).__name__}: {clean(str(error))}", file=sys.stderr)
            return 1
    if follower.refused:
        print(f"error: {follower.refused:,} rows or tables were refused: the same command sends them", file=sys.stderr)
    return 1 if follower.refused else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
