"""Notices the death of a process at once and reports it with its cause in one line.

A process is watched through a pidfd, which the kernel makes readable the moment it ends, whoever its parent is. Its
exit status is in /proc until its parent has waited for it, and behind the pidfd after that (Linux 6.15 and newer).
Kills by the kernel's out-of-memory killer are known from the kernel's own counters, which are compared with those of
the launch's start.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shared.errors import MORE_FILES

if TYPE_CHECKING:
    import zmq

    from shared.launch.ranks import Role
    from shared.launch.watchdog import Peer

ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""signals that ask a launch to end: Ctrl-C, what a cluster sends before it takes a machine, a lost terminal"""
LOWER = {
    "controller": "rollout.prompts_per_step or reward.workers",
    "trainer": "optimiser.micro_batch_tokens, or use more placement.trainers",
    "engine": "rollout.cache_bytes or rollout.max_sequences",
    "server's engine": "cache_bytes or max_sequences",
    "plug-in": "the memory that the functions of reward.plugins need",
    "agent": "the memory that it needs, or rollout.max_sequences (episodes at once)",
}
"""kind of process -> settings that reduce its memory"""
TOLD_EACH = 10
"""ends of helpers of one kind that are told each time"""
_requests = -1
_asked = ""
_PIDFD_GET_INFO = 0xC040FF0B
_PIDFD_INFO_EXIT = 1 << 3
_EXIT_CODE_OFFSET = 60


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def parent_of(pid: int) -> int:
    """Pid of the parent; 0 if there is no such process."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def children(pid: int) -> list[int]:
    """Pids of the processes that a process and its children have started and that are left."""
    try:
        lines = [Path(f"/proc/{pid}/task/{task}/children").read_text() for task in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []
    direct = [int(child) for line in lines for child in line.split()]
    return direct + [pid for child in direct for pid in children(child)]


def _status(pid: int, name: str) -> str:
    """First word of a line of /proc/PID/status; "0" if there is no such process or line."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "0"
    return next((line.split()[1] for line in lines if line.startswith(f"{name}:")), "0")


def catches(pid: int, number: signal.Signals) -> bool:
    """True if the process lives and handles the signal (one without a handler would die of it and report nothing)."""
    return bool(int(_status(pid, "SigCgt"), 16) >> (number - 1) & 1)


def peak_bytes(pid: int) -> int:
    """Largest resident memory of a process so far (VmHWM), 0 if it is gone."""
    return int(_status(pid, "VmHWM")) * 1024


class Watched:
    """Watches a process for its end. `fileno` is for poll: readable once the process has ended."""

    def __init__(self, pid: int):
        """Raises ProcessLookupError if it has ended and its parent has waited for it."""
        self.pid = pid
        self.descriptor = os.pidfd_open(pid)

    def fileno(self) -> int:
        """Return the descriptor, for poll and select."""
        return self.descriptor

    def ended(self) -> bool:
        """Whether the process has ended."""
        poll = select.poll()  # select.select takes no descriptor from 1024 on
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def status(self) -> int | None:
        """Return its exit code, or minus the signal that killed it, as `subprocess` does; None if unknown."""
        for _ in range(20):  # between the parent's question and the end of its bookkeeping lie microseconds
            fields = _stat(self.pid)
            if fields and fields[0] == "Z":
                return os.waitstatus_to_exitcode(int(fields[49]))
            info = bytearray(64)
            struct.pack_into("Q", info, 0, _PIDFD_INFO_EXIT)
            try:
                fcntl.ioctl(self.descriptor, _PIDFD_GET_INFO, info)
            except OSError:
                return None  # an older kernel
            if struct.unpack_from("Q", info)[0] & _PIDFD_INFO_EXIT:
                return os.waitstatus_to_exitcode(struct.unpack_from("i", info, _EXIT_CODE_OFFSET)[0])
            time.sleep(0.005)
        return None

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)


def memory_kills() -> int:
    """Count the processes that the kernel has killed for lack of memory, on this host and in this control group."""
    found = 0
    for path in (Path("/proc/vmstat"), *_group_files()):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        found += sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return found


def _group_files() -> list[Path]:
    """Return the files where the control group counts these processes (version 2, version 1)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            found.append(Path("/sys/fs/cgroup", path.lstrip("/"), "memory.events"))
        elif "memory" in kinds.split(","):
            found += [Path("/sys/fs/cgroup/memory", part, "memory.oom_control") for part in (path.lstrip("/"), "")]
    return found


def how(status: int | None, words: str = "") -> str:
    """Describe an exit status, e.g. "was killed by signal 9 (SIGKILL)" or "ended with exit code 1". words: of its last
    error, where they are known."""
    if status is None:
        return "ended (torchrun's own messages say how)"
    if status >= 0:
        return f"ended with exit code {status}" + (f": {words}" if words else "; its own messages stand above")
    try:
        return f"was killed by signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"was killed by signal {-status}"


def advice(status: int | None, kind: str, peak_bytes: int, kills_before: int) -> str:
    """What a death by SIGKILL may mean and what to do about it; "" for any other."""
    if status not in (None, -signal.SIGKILL):
        return ""
    had = f"; the most memory it had was {peak_bytes / 2**30:.1f} GiB" if peak_bytes else ""
    if memory_kills() > kills_before:
        return (
            f". The kernel's out-of-memory killer has ended a process since then (`dmesg` tells which){had}: "
            f"if it was this one, lower {LOWER[kind]}"
        )
    return f". The kernel counted no out-of-memory kill here, so somebody sent it{had}"


def lacking(text: str) -> str:
    """What to do about an error that says that the system gave no more memory or files; "" for any other. text: of the
    error, with the kind of the rank it came from."""
    if "Too many open files" in text and MORE_FILES not in text:
        return f". {MORE_FILES[0].upper()}{MORE_FILES[1:]}"
    if any(words in text for words in ("allocate memory", "MemoryError", "bad_alloc")):
        kind = next((kind for kind in LOWER if f"{kind} rank" in text), "controller")
        return f". Memory ran out: lower {LOWER[kind]}"
    return ""


def newest_step(run_dir: Path) -> int | None:
    """Step of the newest complete checkpoint by name; None without any."""
    steps = [path.parent.name.removeprefix("step_") for path in run_dir.glob("checkpoints/step_*/manifest.json")]
    return max((int(step) for step in steps if step.isdigit()), default=None)


def again(run_dir: Path) -> str:
    """Say what the same command would do now: start anew, or continue from the newest checkpoint."""
    step = newest_step(run_dir)
    return "The same command " + ("starts anew" if step is None else f"goes on from step {step}")


class HelperEnds:
    """Counts the ends of processes that others take the place of: verifiers', plug-ins', MCP servers'."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, str, str], tuple[int, int]] = {}
        """(who, how, what happens now) -> how often, and how often when it was told last"""

    def add(self, who: str, how: str, then: str) -> None:
        """Count one end, e.g. ("a verifier", "was killed by signal 9 (SIGKILL)", "another takes its place")."""
        count, told = self._ends.get((who, how, then), (0, 0))
        self._ends[who, how, then] = count + 1, told

    def news(self) -> list[str]:
        """One line for each kind of end that came since the last call; from TOLD_EACH on, only when it is so many times
        as frequent as when it was told last."""
        lines = []
        for (who, how, then), (count, told) in list(self._ends.items()):
            if count > told and (count <= TOLD_EACH or count >= TOLD_EACH * told):
                self._ends[who, how, then] = count, count
                lines.append(f"{who} {how} ({count:,} so far): {then}")
        return lines


helpers = HelperEnds()
"""of this process"""


class Death(msgspec.Struct):
    """A rank whose process has ended though the launch goes on."""

    rank: int
    text: str
    """who, how, and what to do"""


class Siblings:
    """Watches the other ranks of this node (children of the same torchrun) for their end."""

    def __init__(self, role: Role):
        self.role, self.kills_before = role, memory_kills()
        self.watched: dict[int, tuple[Watched, Peer]] = {}
        self.seen: list[Death] = []
        self._known: set[int] = set()

    def know(self, peers: Sequence[Peer]) -> None:
        """Watch those that are new; keep the last phase and the peak memory of the others."""
        for peer in peers:
            if peer.rank in self.watched:
                self.watched[peer.rank] = self.watched[peer.rank][0], peer
            elif peer.rank not in self._known and peer.rank != self.role.rank and peer.host == self.role.host:
                self._known.add(peer.rank)
                if parent_of(peer.pid) == os.getppid():  # else another container's, or gone already
                    self.watched[peer.rank] = Watched(peer.pid), peer

    def poll(self, socket: zmq.Socket[bytes], seconds: float) -> bool:
        """Wait for a message or a death. Returns whether there is a message."""
        import zmq  # the answer checker, which others use alone, needs none

        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        for watched, _ in self.watched.values():
            poller.register(watched.descriptor, zmq.POLLIN)
        return any(ready is socket for ready, _ in poller.poll(int(max(seconds, 0) * 1000)))

    def any_ended(self) -> bool:
        """Whether one of these processes has ended, reported or not."""
        return bool(self.seen) or any(watched.ended() for watched, _ in list(self.watched.values()))

    def deaths(self, run_dir: Path) -> list[Death]:
        """Return the deaths since the last call. run_dir: where a resume finds its checkpoint."""
        ended = [(rank, *pair) for rank, pair in self.watched.items() if pair[0].ended()]
        found = []
        for rank, watched, peer in ended:
            status = watched.status()
            del self.watched[rank]
            watched.close()
            if status == 0:
                continue  # it was told to end
            had = max(peer.peak_bytes, peer.children_peak_bytes)
            hint = advice(status, peer.role, had, self.kills_before)
            text = f"{peer.name} {how(status)}, in phase '{peer.phase}'{hint}. {again(run_dir)}"
            found.append(Death(rank, text))
        self.seen += found
        return found


def only_note_requests() -> None:
    """Make signals of ENDING only be reported by the pulse, in this process and those that it starts.

    They are blocked, because vLLM's processes inherit the mask but set handlers of their own. They also have a handler
    and a pipe to the pulse, because a library may have begun a thread before, in which nothing is blocked, while the
    main thread waits in another. Must be called in the main thread.
    """
    global _requests
    for number in ENDING:
        signal.signal(number, lambda *_: None)
    _requests, line = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(line)
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def requested() -> str:
    """Return the name of the signal that asked this process to end; "" for none."""
    global _asked
    numbers = {int(number) for number in signal.sigpending()}
    if _requests >= 0 and select.select([_requests], [], [], 0)[0]:
        numbers |= set(os.read(_requests, 256))
    _asked = next((number.name for number in ENDING if number in numbers), _asked)
    return _asked
