"""The parent of a node's ranks: starts them, waits until they have ended, and says who died, how and in which phase.

Exit codes come from waiting, phases from a file that each rank maps (`RankFile`). While the controller listens, a death
is reported to it in a file of the folder where the ranks meet, and it ends the launch; else this process ends it. A
signal that asks for the end is passed on to the first rank here. When this process ends, all that is below it ends.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shared.atomic_write import append_line
from shared.clean_text import clean
from shared.launch import deaths, launch_folder
from shared.launch.deaths import REPORTS, RankFile
from shared.supervisor import adopt_orphans, end_all

SAVING_S = 600.0
"""seconds that the ranks have to save and end after a signal or a death"""
LEAVE_S = 10.0
"""seconds that the other ranks of a node have to end after the controller"""


@dataclass
class RankProcess:
    """A rank of this node."""

    rank: int
    pid: int
    file: RankFile
    running: bool = True
    code: int = 0
    """exit code, or minus the signal that killed it"""
    peak_bytes: int = 0
    """largest resident memory, known once it has ended"""

    @property
    def kind(self) -> str:
        """ "controller", "trainer" or "engine"."""
        return self.name.partition(" ")[0]

    @property
    def name(self) -> str:
        """e.g. "trainer 1 (rank 2)"."""
        kind = "controller" if self.rank == 0 else "trainer or engine"  # it has not read the settings yet
        return self.file.about[0] or f"{kind} (rank {self.rank})"


def run_ranks(ranks: range, command: list[str], environment: Mapping[str, str]) -> int:
    """Start the ranks of this node with one command, and wait until all have ended. Must be called in the main thread.

    environment: variables for all of them, in which the size of the launch and the address of node 0 are set.

    Returns 128 + the signal if one killed a rank, else the exit code of the controller, else the first that is not 0.
    Raises ConfigError if the node's folder of temporary files cannot be written.
    """
    folder = launch_folder.make(launch_folder.temporary(), launch_folder.name_of(os.getpid()))
    try:
        return _Node(folder.path, ranks).run(command, environment)
    finally:
        folder.leave()


class _Node:
    def __init__(self, folder: Path, ranks: range):
        self.folder, self.files = folder, {rank: RankFile(folder / f"rank{rank}") for rank in ranks}
        self.ranks: dict[int, RankProcess] = {}
        """pid -> rank"""
        self.ended: list[RankProcess] = []
        """in the order of their ends"""
        self.deadline, self.reason = float("inf"), ""
        """when the ranks that are left are killed, and why they should have ended; "" for no reason to report"""
        self.kills_before = deaths.memory_kills()
        self.signals, line = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in (*deaths.ENDING, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(line, warn_on_full_buffer=False)

    @property
    def running(self) -> list[RankProcess]:
        return sorted((rank for rank in self.ranks.values() if rank.running), key=lambda each: each.rank)

    def run(self, command: list[str], environment: Mapping[str, str]) -> int:
        adopt_orphans()  # what a rank leaves running ends with this process
        try:
            for local, (rank, file) in enumerate(self.files.items()):
                variables = {"RANK": str(rank), "LOCAL_RANK": str(local), "TMPDIR": str(self.folder)}
                # a signal that asks for the end waits until the rank can handle it
                pid = os.posix_spawn(
                    command[0], command, {**environment, **variables}, setsigmask=deaths.ENDING, setsid=True
                )
                self.ranks[pid] = RankProcess(rank, pid, file)
            while self.running:
                self._wait()
        finally:
            end_all()
            signal.set_wakeup_fd(-1)
        return self._exit_code()

    def _wait(self) -> None:
        """Wait for the next signal or end of a rank, and handle it."""
        if (left := self.deadline - time.monotonic()) <= 0:
            self._kill_rest()
            return
        select.select([self.signals], [], [], min(left, 3600.0))
        for number in _bytes_of(self.signals):
            if number in deaths.ENDING:
                os.kill(self.running[0].pid, number)
                self._end_within(SAVING_S, f"{signal.Signals(number).name} came")
        while self.running:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid in self.ranks:  # else it belonged to a rank that has ended
                rank = self.ranks[pid]
                rank.running, rank.peak_bytes = False, 1024 * used.ru_maxrss
                rank.code = os.waitstatus_to_exitcode(status)
                self._note_end(rank)

    def _end_within(self, seconds: float, reason: str) -> None:
        if (deadline := time.monotonic() + seconds) < self.deadline:
            self.deadline, self.reason = deadline, reason

    def _note_end(self, rank: RankProcess) -> None:
        """Report a death, and see that the rest of the launch ends."""
        self.ended.append(rank)
        if rank.rank == 0:
            if rank.code < 0:
                self._explain(rank)
            self.deadline, self.reason = time.monotonic() + (LEAVE_S if rank.code >= 0 else 0.0), ""
        elif rank.code:
            controller = next((each for each in self.running if each.rank == 0), None)
            listens = self._tell_controller(rank)
            if controller is None or not listens:
                self._explain(rank)
            if listens:
                self._end_within(SAVING_S, f"{rank.name} has ended")
            elif controller is not None:
                os.kill(controller.pid, signal.SIGTERM)
                self._end_within(LEAVE_S, f"{rank.name} has ended")
            else:
                self._end_within(0.0, "")

    def _tell_controller(self, rank: RankProcess) -> bool:
        """Write a death where the controller reads it; False if it reads nothing yet."""
        reports = self.folder / REPORTS
        if not reports.exists():
            return False
        append_line(reports.resolve(), msgspec.json.encode((rank.rank, self._story(rank))))
        return True

    def _explain(self, rank: RankProcess) -> None:
        """Print why the launch ends, unless a rank of this node has done so."""
        if not any(each.file.explained for each in self.ranks.values()):
            rank.file.explain()
            print(f"error: {clean(self._story(rank))}", file=sys.stderr, flush=True)  # noqa: T201

    def _story(self, rank: RankProcess) -> str:
        """Who ended, how, in which phase, and what to do."""
        _, run_dir = rank.file.about
        who = f"{rank.name[:-1]}, pid {rank.pid} on {os.uname().nodename})"
        hint = deaths.advice(rank.code, rank.kind, rank.peak_bytes, self.kills_before)
        phase = f", in phase '{rank.file.phase or 'start'}'"
        return f"{who} {deaths.how(rank.code)}{phase}{hint}." + (f" {deaths.again(Path(run_dir))}" if run_dir else "")

    def _kill_rest(self) -> None:
        """Kill the ranks that are left; say so if they should have ended by themselves."""
        if self.reason:
            names = ", ".join(rank.name for rank in self.running)
            print(f"error: {names} did not end in time after this: {self.reason}", file=sys.stderr)  # noqa: T201
        for rank in self.running:
            os.kill(rank.pid, signal.SIGKILL)
            rank.running = False
        self.deadline = float("inf")

    def _exit_code(self) -> int:
        first = next((rank for rank in self.ended if rank.code < 0), None)
        if first is not None:
            controller = next((rank for rank in self.ended if rank.rank == 0), None)
            if controller is None or controller.code not in (1, 2):
                self._explain(first)
            return 128 - first.code
        codes = [rank.code for rank in sorted(self.ended, key=lambda each: each.rank != 0) if rank.code]
        return codes[0] if codes else 0


def _bytes_of(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except BlockingIOError:
        return b""
