"""Two real processes: a frozen one is noticed, named, shown with its stack, and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
import zmq

from shared.launch import deaths, launch_folder, watchdog
from shared.launch.ranks import Role
from shared.launch.sockets import refused

SCENE = Path(__file__).with_name("rank_scene.py")
ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(450)]
HEARTBEAT_S = 6.0  # well above what importing takes on a busy machine


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    command = [sys.executable, str(SCENE)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path), str(HEARTBEAT_S)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for rank in (0, 1)
    ]
    yield ranks
    for process in ranks:
        process.kill()
        process.communicate()


def wait_until_ready(controller: subprocess.Popen[str]) -> list[str]:
    lines: list[str] = []
    assert controller.stdout is not None
    while not lines or lines[-1] != "ready":
        line = controller.stdout.readline()
        assert line, controller.communicate()[1]
        lines.append(line.strip())
    return lines


@pytest.mark.parametrize(("frozen", "named"), [(1, "trainer rank 1"), (0, "controller (rank 0)")])
def test_a_frozen_rank_is_named_shown_and_killed(scene, tmp_path: Path, frozen: int, named: str):
    lines = wait_until_ready(scene[0])
    assert "norm 1.0" in lines
    assert "failed RunError trainer rank 1: negative learning rate" in lines
    time.sleep(1.5)  # one more pulse tells the phase
    scene[frozen].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    _, told = scene[1 - frozen].communicate(timeout=HEARTBEAT_S + 100)
    assert time.monotonic() - began < HEARTBEAT_S + 60
    assert scene[1 - frozen].returncode == 1
    assert named in told and "phase" in told and "stacks of all processes" in told
    assert "waiting for the controller" in told
    scene[frozen].wait(timeout=60)
    for rank in (0, 1):
        assert "Thread" in (tmp_path / f"rank{rank}.txt").read_text(), "every process wrote its stacks"


def test_the_controller_reads_of_a_death_long_before_a_heart_is_missed(scene, tmp_path: Path) -> None:
    """The parent of a node's ranks appends lines to a file that the controller makes."""
    wait_until_ready(scene[0])
    reports = tmp_path / deaths.deaths_file(0)
    assert reports.read_text() == ""
    with reports.open("a") as file:
        file.write('[1, "trainer 0 was')
        file.flush()
        time.sleep(1.2)  # half a line is no report
        assert scene[0].poll() is None
        file.write(' killed"]\n[1, "again"]\n')
    _, printed = scene[0].communicate(timeout=100)
    assert printed.splitlines()[-1] == "trainer 0 was killed"


def test_a_rank_that_is_asked_to_end_tells_the_controller_and_lives(scene):
    wait_until_ready(scene[0])
    scene[1].send_signal(signal.SIGTERM)
    assert scene[0].stdout.readline().startswith("asked SIGTERM trainer 0 (rank 1, pid")
    assert scene[1].poll() is None


VICTIM = """
import ctypes, sys, threading
from pathlib import Path
from shared.launch import watchdog
watchdog.die_with_parent()
watchdog.open_stacks(Path(sys.argv[1]), sys.argv[2])
def spin():
    while True:
        [spin_a_little(n) for n in range(20)]
def spin_a_little(n):
    return n and spin_a_little(n - 1)
if sys.argv[2] == "hangs":
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    print("ready", flush=True)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # without end, and no signal handler of Python's runs
else:
    for _ in range(3):
        threading.Thread(target=spin, daemon=True).start()
    print("ready", flush=True)
    spin()
"""
REPORTER = """
import os, subprocess, sys, time
from shared.launch import watchdog
folder = sys.argv[1]
names = ("hangs", "moves", "moves too")
victims = [
    subprocess.Popen([sys.executable, "-c", sys.argv[2], folder, name], stdout=subprocess.PIPE) for name in names
]
for victim in victims:
    assert victim.stdout.readline() == b"ready\\n"
time.sleep(0.2)
peers = [watchdog.Peer(rank, "trainer", victim.pid, os.uname().nodename, "x") for rank, victim in enumerate(victims)]
began = time.monotonic()
watchdog.report_hang("a test", peers, folder, kill=False)
print([victim.poll() for victim in victims], time.monotonic() - began < 60, flush=True)
for victim in victims:
    victim.kill()
"""


def test_a_process_that_hangs_in_a_library_and_one_that_moves_both_show_their_stacks_and_live_on(tmp_path: Path):
    reporter = subprocess.run(
        [sys.executable, "-c", REPORTER, str(tmp_path), VICTIM],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert reporter.stdout.strip() == "[None, None, None] True", reporter.stdout + reporter.stderr
    assert "most recent call first" in (tmp_path / "hangs.txt").read_text()
    for name in ("moves", "moves too"):
        assert (tmp_path / f"{name}.txt").read_text().count("in spin") >= 4, "every thread"
    assert "stopped: a test" in reporter.stderr and "stacks of all processes" in reporter.stderr


def test_a_worker_dies_with_its_parent(tmp_path: Path):
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'from shared.launch import watchdog; "
        "watchdog.die_with_parent(); import time; print(1, flush=True); time.sleep(60)'], stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True); time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()


def test_in_a_container_the_parent_may_be_process_1() -> None:
    """As it is where the container's command is torchrun."""
    child = "import os; from shared.launch import watchdog as w; w.die_with_parent(); print('child of', os.getppid())"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    found = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code],
        capture_output=True, text=True, timeout=150, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    if found.returncode and "unshare" in found.stderr:
        pytest.skip(f"no process namespaces here: {found.stderr.strip()}")
    assert found.stdout == "child of 1\n", found.stderr


def test_a_heartbeat_is_taken_from_the_rank_that_it_names_and_from_nobody_else() -> None:
    folder, store = launch_folder.make(launch_folder.temporary(), "test"), dist.HashStore()
    role = Role("controller", 0, 3, 0, True, "", torch.device("cpu"), store, folder=folder.path)
    keeper = watchdog.PulseKeeper(role, "", heartbeat_s=60)
    keeper.start()
    encode, before = msgspec.msgpack.Encoder().encode, refused.total

    def say(identity: bytes, *frames: bytes) -> None:
        line = zmq.Context.instance().socket(zmq.DEALER)
        line.setsockopt(zmq.IDENTITY, identity)
        line.connect(store.get("pulse").decode())
        line.send_multipart(frames)
        line.close(linger=20_000)  # a connection takes long on a busy machine

    def wait(expected: int, heard: dict[int, int]) -> None:
        end = time.monotonic() + 20
        while (refused.total - before, {rank: peer.pid for rank, (_, peer) in keeper.heard.items()}) != (
            expected, heard,
        ):  # fmt: skip
            assert time.monotonic() < end, (refused.total - before, keeper.heard)
            time.sleep(0.01)

    peer = watchdog.Peer(1, "trainer", 4321, os.uname().nodename, "x")
    say(b"1:a", encode(peer))
    wait(0, {1: 4321})
    say(b"1:b", encode(peer))  # another connection
    say(b"2:a", encode(peer))  # of another rank
    say(b"3:a", encode(msgspec.structs.replace(peer, rank=3)))  # that there is not
    say(b"0:a", encode(msgspec.structs.replace(peer, rank=0)))
    say(b"x", encode(peer))
    say(b"2:c", b"garbage")
    say(b"2:d", b"")
    say(b"2:e", b"one", b"two")
    say(b"2:f", os.urandom(1000))
    wait(9, {1: 4321})
    say(b"1:a", encode(msgspec.structs.replace(peer, pid=1)))  # a process id does not change
    wait(10, {1: 4321})
    assert keeper.is_alive()
    keeper.leaving = True
    folder.leave()


def test_an_answer_is_as_long_as_a_node_has_ranks_and_made_once_for_all_of_them() -> None:
    folder, store = launch_folder.make(launch_folder.temporary(), "test"), dist.HashStore()
    role = Role("controller", 0, 901, 0, True, "", torch.device("cpu"), store, folder=folder.path)
    keeper = watchdog.PulseKeeper(role, "", heartbeat_s=60)
    keeper.start()
    lines = {rank: zmq.Context.instance().socket(zmq.DEALER) for rank in (1, 2, 900)}
    encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(watchdog.Echo).decode

    def answer(rank: int, phase: str) -> dict[int, str]:
        lines[rank].send(encode(watchdog.Peer(rank, "engine", rank, f"node {rank // 8}", phase)))
        assert lines[rank].poll(20_000)
        return {peer.rank: peer.phase for peer in decode(lines[rank].recv()).peers if peer.rank}

    for rank, line in lines.items():
        line.setsockopt(zmq.IDENTITY, b"%d:a" % rank)
        line.connect(store.get("pulse").decode())
    assert answer(1, "a") == {1: "a"}
    assert answer(900, "b") == {900: "b"}
    assert answer(2, "c") == {1: "a", 2: "c"}, "a new rank is known to those beside it at once"
    time.sleep(1.2)
    assert answer(1, "d")[2] == "c"
    time.sleep(1.2)
    assert answer(2, "e") == {1: "d", 2: "e"}, "made anew in every round"
    keeper.leaving = keeper.closed = True
    keeper.join(20)
    assert not keeper.is_alive()
    folder.leave()


KILLER = """
import os, subprocess, sys
from shared.launch import watchdog
own = subprocess.Popen(["sleep", "600"])
host = os.uname().nodename
peers = [watchdog.Peer(n, "engine", pid, host, "x") for n, pid in enumerate([int(sys.argv[1]), own.pid], 1)]
watchdog.report_hang("a test", peers, "", kill=True)
print(own.wait(), flush=True)
"""


def test_only_processes_of_the_launch_are_killed_whatever_a_heartbeat_says() -> None:
    """The reporter's parent is the launch's agent; the victim is a process beside it."""
    agent = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', *sys.argv[1:]]))"
    victim = subprocess.Popen(["sleep", "600"])
    try:
        done = subprocess.run(
            [sys.executable, "-c", agent, KILLER, str(victim.pid)],
            capture_output=True, text=True, timeout=150, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.stdout.strip() == str(-signal.SIGKILL), done.stdout + done.stderr
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_the_controllers_loop_has_longer_while_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []
    keeper = watchdog.PulseKeeper.__new__(watchdog.PulseKeeper)
    keeper.heard, keeper.lost, keeper.heartbeat_s, keeper.loop_turned = {}, None, 10.0, 0.0
    monkeypatch.setattr(keeper, "stop", stopped.append)
    for phase, last, late in ((watchdog.START, 39, 41), ("a full batch", 9, 11)):
        monkeypatch.setattr(watchdog, "_phase", phase)
        keeper._judge(last)
        assert stopped == []
        keeper._judge(late)
        assert "its own event loop, which does not turn" in stopped.pop() and not stopped
