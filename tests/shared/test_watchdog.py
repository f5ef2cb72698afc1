"""Two real processes: a frozen one is noticed, named, shown with its stack, and killed."""

import functools
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
import torch.distributed as dist
import zmq

from shared.launch import deaths, launch_folder, watchdog
from shared.launch.ranks import Role
from shared.launch.sockets import refused
from tests.process import ENVIRONMENT, started, until

SCENE = Path(__file__).with_name("rank_scene.py")
HEARTBEAT_S = 6.0
GUARD_S = 300
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def launcher():
    """A process that has imported what ranks need, and forks them."""
    command = [sys.executable, str(SCENE), str(HEARTBEAT_S)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    yield process
    process.communicate()


class Scene:
    """A controller and a trainer, once they have met."""

    def __init__(self, launcher: subprocess.Popen[str], folder: Path) -> None:
        self.launcher, self.folder = launcher, folder
        launcher.stdin.write(f"{folder}\n")
        launcher.stdin.flush()
        self.pids = [int(pid) for pid in launcher.stdout.readline().split()]
        until(lambda: self.printed(0) == "norm 1.0\nready\n")

    def printed(self, rank: int) -> str:
        file = self.folder / f"rank{rank}.out"
        return file.read_text() if file.exists() else ""

    @functools.cached_property
    def codes(self) -> list[int]:
        """Exit codes of both, once they have ended."""
        return [int(code) for code in self.launcher.stdout.readline().split()]


@pytest.fixture
def scene(launcher, tmp_path):
    scene = Scene(launcher, tmp_path)
    yield scene
    if "codes" not in vars(scene):
        for rank in psutil.Process(launcher.pid).children():
            with suppress(psutil.NoSuchProcess):
                rank.kill()
        assert len(scene.codes) == 2


@pytest.mark.parametrize(("frozen", "named"), [(1, "trainer rank 1"), (0, "controller (rank 0)")])
def test_a_frozen_rank_is_named_shown_and_killed(scene, tmp_path, frozen, named):
    os.kill(scene.pids[frozen], signal.SIGSTOP)
    assert (scene.codes[frozen], scene.codes[1 - frozen]) == (-signal.SIGKILL, 1)
    printed = scene.printed(1 - frozen)
    assert named in printed and "phase" in printed and "stacks of all processes" in printed
    assert "waiting for the controller" in printed
    for rank in (0, 1):
        assert "Thread" in (tmp_path / f"rank{rank}.txt").read_text(), "every process wrote its stacks"


def test_the_controller_reads_of_requests_and_deaths_long_before_a_heart_is_missed(scene, tmp_path):
    """The parent of a node's ranks appends lines to a file that the controller makes."""
    os.kill(scene.pids[1], signal.SIGTERM)
    until(lambda: "\nasked SIGTERM trainer 0 (rank 1, pid" in scene.printed(0))
    reports = tmp_path / deaths.deaths_file(0)
    assert reports.read_text() == ""
    with reports.open("a") as file:
        file.write('[1, "trainer 0 was')
        file.flush()
        time.sleep(1.2)  # half a line is no report
        assert not {psutil.STATUS_ZOMBIE} & {psutil.Process(pid).status() for pid in scene.pids}
        file.write(' killed"]\n[1, "again"]\n')
    until(lambda: scene.printed(0).endswith("trainer 0 was killed\n"))


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


def test_a_process_that_hangs_in_a_library_and_one_that_moves_both_show_their_stacks_and_live_on(tmp_path, capfd):
    names = ["hangs", "moves", "moves too"]
    victims = [started(VICTIM, tmp_path, name) for name in names]
    try:
        assert [victim.stdout.readline() for victim in victims] == ["ready\n"] * 3
        host = os.uname().nodename
        peers = [watchdog.Peer(rank, "trainer", victim.pid, host, "x") for rank, victim in enumerate(victims)]
        watchdog.report_hang("a test", peers, str(tmp_path), kill=False)
        assert [victim.poll() for victim in victims] == [None] * 3
    finally:
        for victim in victims:
            victim.kill()
            victim.communicate()
    assert "most recent call first" in (tmp_path / "hangs.txt").read_text()
    assert all((tmp_path / f"{name}.txt").read_text().count("in spin") >= 4 for name in names[1:]), "every thread"
    printed = capfd.readouterr().err
    assert "stopped: a test" in printed and "stacks of all processes" in printed


def test_in_a_container_the_parent_may_be_process_1():
    """As it is where the container's command is torchrun."""
    child = "import os; from shared.launch import watchdog as w; w.die_with_parent(); print('child of', os.getppid())"
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable, "-c"]
    command.append(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])")
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S, env=ENVIRONMENT)
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(f"no process namespaces here: {done.stderr.strip()}")
    assert done.stdout == "child of 1\n", done.stderr


def test_only_processes_of_the_launch_are_killed_whatever_a_heartbeat_says(monkeypatch):
    """The reporter is its own agent here; an orphan is no process of the launch."""
    monkeypatch.setattr(os, "getppid", os.getpid)
    ours = subprocess.Popen(["sleep", "600"])
    orphan = int(subprocess.check_output(["bash", "-c", "sleep 600 >&- & echo $!"]))
    try:
        peers = [watchdog.Peer(1, "engine", pid, os.uname().nodename, "x") for pid in (orphan, ours.pid)]
        watchdog.report_hang("a test", peers, "", kill=True)
        assert ours.wait(GUARD_S) == -signal.SIGKILL
        assert psutil.Process(orphan).status() != psutil.STATUS_ZOMBIE, "it lives"
    finally:
        os.kill(orphan, signal.SIGKILL)


encode = msgspec.msgpack.Encoder().encode
WORLD = 901


@pytest.fixture
def keeper():
    """The controller's, of a launch of 901 ranks."""
    folder, store = launch_folder.make(launch_folder.temporary(), "test"), dist.HashStore()
    role = Role("controller", 0, WORLD, 0, True, "", torch.device("cpu"), store, folder=folder.path)
    keeper = watchdog.PulseKeeper(role, "", heartbeat_s=3600)
    keeper.start()
    yield keeper
    keeper.leaving = keeper.closed = True
    keeper.join(GUARD_S)
    assert not keeper.is_alive()
    folder.leave()


def line_to(keeper: watchdog.PulseKeeper, identity: bytes) -> zmq.Socket[bytes]:
    line: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    line.setsockopt(zmq.IDENTITY, identity)
    line.connect(keeper.role.store.get("pulse").decode())
    return line


PEER = watchdog.Peer(1, "trainer", 4321, os.uname().nodename, "x")
STRANGE: list[tuple[bytes, list[bytes]]] = [
    (b"1:b", [encode(PEER)]),  # another connection
    (b"2:a", [encode(PEER)]),  # of another rank
    (b"901:a", [encode(msgspec.structs.replace(PEER, rank=WORLD))]),  # that there is not
    (b"0:a", [encode(msgspec.structs.replace(PEER, rank=0))]),
    (b"x", [encode(PEER)]),
    *((b"2:%d" % number, frames) for number, frames in enumerate([[b"x"], [b""], [b"1", b"2"], [b"\xc1" * 1000]])),
]


def test_a_heartbeat_is_taken_from_the_rank_that_it_names_and_from_nobody_else(keeper):
    before, ours = refused.total, line_to(keeper, b"1:a")
    ours.send(encode(PEER))
    until(lambda: 1 in keeper.heard)
    for identity, frames in STRANGE:
        line = line_to(keeper, identity)
        line.send_multipart(frames)
        line.close(linger=200_000)  # a connection takes long on a busy machine
    ours.send(encode(msgspec.structs.replace(PEER, pid=1)))  # a process id does not change
    until(lambda: refused.total == before + len(STRANGE) + 1)
    ours.close(linger=0)
    assert {rank: peer.pid for rank, (_, peer) in keeper.heard.items()} == {1: 4321} and keeper.is_alive()


def test_an_answer_is_as_long_as_a_node_has_ranks(keeper):
    lines = {rank: line_to(keeper, b"%d:a" % rank) for rank in (1, 2, 900)}
    decode = msgspec.msgpack.Decoder(watchdog.Echo).decode

    def answer(rank: int, phase: str) -> dict[int, str]:
        lines[rank].send(encode(watchdog.Peer(rank, "engine", rank, f"node {rank // 8}", phase)))
        assert lines[rank].poll(1000 * GUARD_S)
        return {peer.rank: peer.phase for peer in decode(lines[rank].recv()).peers if peer.rank}

    assert answer(1, "a") == {1: "a"} and answer(900, "b") == {900: "b"}
    assert answer(2, "c") == {1: "a", 2: "c"}, "a new rank is known to those beside it at once"
    until(lambda: answer(1, "d") == {1: "d", 2: "c"})  # made anew in every round
    until(lambda: answer(2, "e") == {1: "d", 2: "e"})
    for line in lines.values():
        line.close(linger=0)


def test_the_controllers_loop_has_longer_while_it_imports(monkeypatch):
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
