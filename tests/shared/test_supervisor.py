"""What a command starts ends with it, with the process that asked for it, and with each of its two supervisors.

All processes below the command have one end of a pipe, whose other end shows when the last of them is gone.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from shared.supervisor import supervised

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 30.0
STUBBORN = "import os, signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; "
DAEMON = (  # leaves its session, its parent and all signals that can be ignored
    f"{STUBBORN}os.fork() and signal.pause(); os.setsid(); os.fork() and os._exit(0); os.write({{line}}, b'x'); "
    "time.sleep(1000)"
)
SHAPES = {
    "script": ["bash", "-c", "sleep 1000 & printf x >&{line}; sleep 1000"],
    "chain": ["bash", "-c", "bash -c 'bash -c \"printf x >&{line}; sleep 1000; true\"; true'; true"],
    "daemon": [sys.executable, "-ISc", DAEMON],
}
PARENT = (
    "import os, subprocess, signal, sys; from shared.supervisor import supervised; line, *command = sys.argv[1:]; "
    "child = subprocess.Popen(supervised(command), pass_fds=[int(line)], start_new_session=True); "
    "os.close(int(line)); print(child.pid, flush=True); signal.pause()"
)


def is_gone(line: int) -> bool:
    return bool(select.select([line], [], [], DEADLINE_S)[0]) and os.read(line, 1) == b""


@contextmanager
def started(shape: str) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process], int]]:
    """(the process that asks, its two supervisors, the pipe) once the last process of the command is there."""
    line, theirs = os.pipe()
    os.set_inheritable(theirs, True)
    command = [word.format(line=theirs) for word in SHAPES[shape]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    asking = subprocess.Popen([sys.executable, "-c", PARENT, str(theirs), *command], stdout=subprocess.PIPE,
                              text=True, pass_fds=[theirs], env=environment)  # fmt: skip
    os.close(theirs)
    try:
        assert asking.stdout is not None
        outer = psutil.Process(int(asking.stdout.readline()))
        assert os.read(line, 1) == b"x"
        yield asking, [outer, outer.children()[0]], line
    finally:
        asking.kill()
        asking.communicate()
        os.close(line)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ends", ["asking process", "outer", "inner", "command"])
def test_nothing_outlives_a_death(shape: str, ends: str) -> None:
    with started(shape) as (asking, (outer, inner), line):
        command = inner.children()[0]
        {"asking process": asking, "outer": outer, "inner": inner, "command": command}[ends].kill()
        assert is_gone(line)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_stopped_supervisor_keeps_nothing_alive(frozen: int) -> None:
    with started("daemon") as (asking, supervisors, line):
        supervisors[frozen].suspend()
        asking.kill()
        assert is_gone(line)


def end_of(*command: str, **given: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(supervised(command), input="said", capture_output=True, text=True, timeout=DEADLINE_S,
                          start_new_session=True, **given)  # type: ignore[call-overload, no-any-return]  # fmt: skip


def test_the_caller_sees_the_command_s_own_end_and_streams() -> None:
    heard = end_of("bash", "-c", "cat; echo wrong >&2; exit 3")
    assert (heard.returncode, heard.stdout, heard.stderr) == (3, "said", "wrong\n")
    assert end_of("bash", "-c", "kill -SEGV $$").returncode == -signal.SIGSEGV
    assert end_of("bash", "-c", "kill -9 $$").returncode == -signal.SIGKILL
    missing = end_of("/no/such/program")
    assert (missing.returncode, missing.stderr) == (
        127,
        "/no/such/program cannot be started: No such file or directory\n",
    )


def test_signals_reach_the_command_though_its_caller_has_them_blocked() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        script = "trap 'echo saved; exit 5' TERM; echo ready; while :; do sleep 0.01; done"
        child = subprocess.Popen(supervised(["bash", "-c", script]), stdout=subprocess.PIPE, start_new_session=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    child.terminate()
    assert child.communicate(timeout=DEADLINE_S)[0] == b"saved\n" and child.returncode == 5
