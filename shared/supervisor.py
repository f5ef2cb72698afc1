"""Runs a command so that no process that it starts outlives it, or the process that asked for it.

Started as `python -IS supervisor.py PARENT_PID COMMAND...`, which `supervised` writes. Two processes are above the
command. Each adopts what it leaves behind (a subreaper), and kills every descendant, in whatever session it is and
whatever it ignores, as soon as the command, the process that asked, or the other of the two has ended: so either of
them may be killed or stopped. A signal that asks for something (SIGTERM, SIGINT, SIGUSR1, ...) is passed on to the
command's process group; SIGKILL ends all at once. The exit status is the command's, and a pipe on its standard output
ends when nothing of it is left. Neither root nor namespaces are needed.

Two things are out of its reach: what is left when both are killed in the same instant (the command itself ends then
all the same), and what a daemon of the machine starts for the command (Docker, systemd, cron): that is no descendant.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
KILL_S = 5.0
"""seconds for killed processes to end; those of another user, and those that the kernel holds, are left then"""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def supervised(command: Sequence[str]) -> list[str]:
    """The command line that runs a command under supervision, for a child of this process in a session of its own."""
    return [sys.executable, "-IS", os.path.abspath(__file__), str(os.getpid()), *command]


def descendants() -> list[int]:
    """Pids of all processes below this one, the oldest first."""
    below: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
            below.setdefault(int(stat.read().rpartition(b")")[2].split()[1]), []).append(int(name))
    pids = [os.getpid()]
    for pid in pids:
        pids += below.get(pid, [])
    return pids[1:]


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends (a subreaper), so that `end_all` reaches it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_all() -> None:
    """SIGKILL all descendants until none is left."""
    until = time.monotonic() + KILL_S
    while time.monotonic() < until:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return  # none is left
        for number in (signal.SIGSTOP, signal.SIGKILL):  # a stopped process starts nothing more
            for pid in descendants():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
        time.sleep(0.002)


def supervise(start: Callable[[], NoReturn], watched: Sequence[int]) -> int | None:
    """Run `start` in a child; returns its wait status when it has ended, None when one of the processes with the
    pidfds `watched` has. All descendants are gone then."""
    adopt_orphans()
    signals, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    for passed in (*PASSED_ON, signal.SIGCHLD):
        signal.signal(passed, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        start()
    with suppress(OSError):
        os.setpgid(child, child)  # both do it, so that it is done before anything is passed on
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 2):  # standard output is held open: whoever reads sees its end when all have ended
        os.dup2(null, descriptor)
    kept = sorted({2, signals, wake, *watched})
    for low, up in zip(kept, [*kept[1:], 1 << 16], strict=True):  # pipes of the command are not held open here
        os.closerange(low + 1, up)
    while not set(ready := select.select([signals, *watched], [], [])[0]) - {signals}:
        for number in os.read(ready[0], 256):
            if number != signal.SIGCHLD:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(child, number)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    end_all()
                    return ended[1]
    end_all()
    return None


def leave(status: int | None) -> NoReturn:
    """End this process as the one with this wait status has ended."""
    code = 1 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def run(command: list[str]) -> NoReturn:
    """Become the command, which ends with its parent."""
    for number in (*PASSED_ON, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be started: {error.strerror}\n".encode())
        os._exit(127)


def main() -> NoReturn:
    """The two processes, one below the other."""
    parent = int(sys.argv[1])
    try:
        watched = [os.pidfd_open(parent)]
    except ProcessLookupError:
        os._exit(1)
    if os.getppid() != parent:
        os._exit(1)
    ours = os.getpid()

    def inner() -> NoReturn:
        status = supervise(lambda: run(sys.argv[2:]), [*watched, os.pidfd_open(ours)])
        if status is None and os.getppid() == ours:
            os.kill(ours, signal.SIGKILL)  # it may be stopped
        leave(status)

    leave(supervise(inner, watched))


if __name__ == "__main__":
    main()
