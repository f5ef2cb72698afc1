"""What a command starts ends with it, with the process that asked for it, and with each of its two supervisors.

All processes below the command have one end of a pipe, whose other end shows when the last of them is gone.
"""

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

DEADLINE_S = 30.0
DAEMON = (  # leaves its session, its parent and all signals that can be ignored
    "import os, signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; os.fork() and signal.pause(); "
    "os.setsid(); os.fork() and os._exit(0); os.write({line}, b'x'); time.sleep(1000)"
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


@contextmanager
def started(shape: str) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """(the process that asks, its two supervisors) once the last process of the command is there; all end."""
    line, theirs = os.pipe()
    os.set_inheritable(theirs, True)
    command = [sys.executable, "-c", PARENT, str(theirs), *(word.format(line=theirs) for word in SHAPES[shape])]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    asking = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[theirs], env=environment)
    os.close(theirs)
    try:
        outer = psutil.Process(int(asking.stdout.readline()))
        assert os.read(line, 1) == b"x"
        yield asking, [outer, outer.children()[0]]
        assert select.select([line], [], [], DEADLINE_S)[0] and os.read(line, 1) == b""
    finally:
        asking.kill()
        asking.communicate()
        os.close(line)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ends", ["asking process", "outer", "inner", "command"])
def test_nothing_outlives_a_death(shape, ends):
    with started(shape) as (asking, (outer, inner)):
        command = inner.children()[0]
        {"asking process": asking, "outer": outer, "inner": inner, "command": command}[ends].kill()


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_stopped_supervisor_keeps_nothing_alive(frozen):
    with started("daemon") as (asking, supervisors):
        supervisors[frozen].suspend()
        asking.kill()


@pytest.mark.parametrize(("command", "end"), [
    (["bash", "-c", "cat; echo wrong >&2; exit 3"], (3, "said", "wrong\n")),
    (["bash", "-c", "kill -SEGV $$"], (-signal.SIGSEGV, "", "")),
    (["bash", "-c", "kill -9 $$"], (-signal.SIGKILL, "", "")),
    (["/no/such/program"], (127, "", "/no/such/program cannot be started: No such file or directory\n")),
])  # fmt: skip
def test_the_caller_sees_the_command_s_own_end_and_streams(command, end):
    done = subprocess.run(supervised(command), input="said", capture_output=True, text=True, timeout=DEADLINE_S,
                          start_new_session=True)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == end


def test_signals_reach_the_command_though_its_caller_has_them_blocked():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        script = "trap 'echo saved; exit 5' TERM; echo ready; while :; do sleep 0.01; done"
        child = subprocess.Popen(supervised(["bash", "-c", script]), stdout=subprocess.PIPE, start_new_session=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert child.stdout.readline() == b"ready\n"
    child.terminate()
    assert child.communicate(timeout=DEADLINE_S)[0] == b"saved\n" and child.returncode == 5
