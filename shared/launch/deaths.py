"""Says how a process ended, why that may be, and what to do about it.

Kills by the out-of-memory killer are known from the kernel's counters, compared with those of the launch's start.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
from pathlib import Path

import msgspec

from shared.atomic_write import cannot_write
from shared.errors import MORE_FILES, ConfigError

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
EACH_UP_TO = 10
"""ends of helpers of one kind that are reported each time"""
_requests = -1
_asked = ""


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


REPORTS = "deaths"
"""link in a node's folder to the file of that node that the controller reads deaths from"""


def deaths_file(rank: int | str) -> str:
    """Name of the file in which the parent of a node's ranks, the first of which is `rank`, reports their deaths."""
    return f"deaths-{rank}"


class RankFile:
    """What the parent of a rank reads when the rank has died: its name, its run's folder and its last phase.

    Both map the same file, so naming a phase costs a copy of its letters, and any kind of death leaves it readable.
    """

    PHASE_BYTES, ABOUT_BYTES = 1024, 15 * 1024
    """the first byte of the rest says whether the rank has explained why the launch ends"""

    def __init__(self, path: Path):
        """Open the file, or make it. Raises ConfigError if it cannot be written."""
        size = self.PHASE_BYTES + self.ABOUT_BYTES
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, size)  # a mapped file without space would kill whoever writes to it
                self._map = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ConfigError(f"TMPDIR: {cannot_write(path, error)}") from error

    @property
    def phase(self) -> str:
        """Name of what the rank did last; "" before it has named anything."""
        return self._map[: self.PHASE_BYTES].rstrip(b"\0").decode(errors="replace")

    @phase.setter
    def phase(self, name: str) -> None:
        self._map[: self.PHASE_BYTES] = name.encode()[: self.PHASE_BYTES].ljust(self.PHASE_BYTES, b"\0")

    @property
    def explained(self) -> bool:
        """Whether the rank has printed why the launch ends."""
        return self._map[self.PHASE_BYTES] != 0

    def explain(self) -> None:
        """Say that this rank prints why the launch ends, so that its parent adds nothing."""
        self._map[self.PHASE_BYTES] = 1

    @property
    def about(self) -> tuple[str, str]:
        """Name of the rank, e.g. "trainer 1", and folder of its run; both "" before it knows them."""
        content = self._map[self.PHASE_BYTES + 1 :].rstrip(b"\0")
        return msgspec.json.decode(content, type=tuple[str, str]) if content else ("", "")

    @about.setter
    def about(self, name_and_folder: tuple[str, str]) -> None:
        content = msgspec.json.encode(name_and_folder)
        self._map[self.PHASE_BYTES + 1 : self.PHASE_BYTES + 1 + len(content)] = content


def memory_kills() -> int:
    """Count the processes that the kernel has killed for lack of memory, on this host and in this control group."""
    kills = 0
    for path in (Path("/proc/vmstat"), *_group_files()):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        kills += sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return kills


def _group_files() -> list[Path]:
    """Return the files where the control group counts these processes (version 2, version 1)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            files.append(Path("/sys/fs/cgroup", path.lstrip("/"), "memory.events"))
        elif "memory" in kinds.split(","):
            files += [Path("/sys/fs/cgroup/memory", group, "memory.oom_control") for group in (path.lstrip("/"), "")]
    return files


def how(status: int | None, words: str = "") -> str:
    """Describe an exit status, e.g. "was killed by signal 9 (SIGKILL)" or "ended with exit code 1". words: of its last
    error, where they are known."""
    if status is None:
        return "ended, and its parent did not say how"
    if status >= 0:
        return f"ended with exit code {status}" + (f": {words}" if words else "; its messages are above")
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
        repair = f": if it was this one, lower {LOWER[kind]}" if kind in LOWER else ""
        return f". The kernel's out-of-memory killer has ended a process since then (`dmesg` tells which){had}{repair}"
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
        """(who, how, what happens now) -> how often, and how often when it was reported last"""

    def add(self, who: str, how: str, then: str) -> None:
        """Count one end, e.g. ("a verifier", "was killed by signal 9 (SIGKILL)", "another takes its place")."""
        count, reported = self._ends.get((who, how, then), (0, 0))
        self._ends[who, how, then] = count + 1, reported

    def news(self) -> list[str]:
        """One line for each kind of end that came since the last call; from EACH_UP_TO on, only when it is so many
        times as frequent as when it was reported last."""
        lines = []
        for (who, how, then), (count, reported) in list(self._ends.items()):
            if count > reported and (count <= EACH_UP_TO or count >= EACH_UP_TO * reported):
                self._ends[who, how, then] = count, count
                lines.append(f"{who} {how} ({count:,} so far): {then}")
        return lines


helpers = HelperEnds()
"""counts the ends of this process's helpers"""


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
