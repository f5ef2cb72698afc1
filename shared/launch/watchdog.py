"""Detects and reports hangs: heartbeats between ranks, stack dumps of all processes, death with the parent.

Every worker rank runs a `Pulse` thread that tells the controller's `PulseKeeper` thread once a second that it lives and
in which phase; the keeper answers with what it knows of the ranks of that node, so that its work grows with the ranks,
not with their square. A side that hears nothing from the other for `heartbeat_s` reports the silent rank by role, phase
and peer, makes every process it can reach write its stacks, kills what hangs and exits non-zero. A process is asked by
SIGUSR1 first, which it answers between two of its own instructions; one that does not (it hangs in a library) by
SIGUSR2, which needs no GIL and can crash a process whose threads still move. A stopped process is continued for it.

Deaths are noticed by the parent of a node's ranks (node.py), which reports them to the keeper in a file. A rank that
was asked to end (SIGTERM, blocked in workers) says so in its pulse; the controller then saves and ends the launch.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec
import zmq

from shared.clean_text import clean
from shared.errors import DeadlineExceeded
from shared.launch import deaths
from shared.launch.deaths import RankFile, catches, children, deaths_file, peak_bytes
from shared.launch.ranks import Role
from shared.launch.sockets import ListeningSocket, connect, rank_of, refused

PULSE_EVERY_S = 1.0
LOST_S = 10.0
"""how long the controller's loop has to end the launch after a death"""
STACKS_VARIABLE = "MAESTRALE_STACKS"
DONE = "done"
"""phase of a rank that was asked to end and waits for no other"""
STACKS_END = "end of the stacks\n"
START, START_TIMES = "start", 4
"""the first phase, in which imports stop the controller's loop: it has so many times as long"""
_phase = START
_rank_file: RankFile | None = None
_stack_file: IO[str] | None = None


class Peer(msgspec.Struct):
    """One rank as its last pulse reported it."""

    rank: int
    role: str
    pid: int
    host: str
    phase: str
    peak_bytes: int = 0
    """largest resident memory of the rank's own process so far"""
    children_peak_bytes: int = 0
    """the same of its largest child (an engine's process)"""
    number: int = 0
    """0-based number among its kind"""
    asked: str = ""
    """name of the signal that asked this rank to end; "" for none"""

    @property
    def name(self) -> str:
        """e.g. "trainer 1 (rank 2, pid 77 on HOST)"; the controller has no number."""
        kind = self.role if self.role == "controller" else f"{self.role} {self.number}"
        return f"{kind} (rank {self.rank}, pid {self.pid} on {self.host})"


class Echo(msgspec.Struct):
    """The keeper's answer: the living ranks of the receiver's node, and whether the launch is over."""

    peers: list[Peer]
    """the controller first, wherever it is"""
    leave: bool = False
    """the launch is over: end this process"""


_decode_peer = msgspec.msgpack.Decoder(Peer).decode
_encode = msgspec.msgpack.Encoder().encode


def phase(name: str) -> None:
    """Name what this process does now; reported when it hangs or dies."""
    global _phase
    _phase = name
    if _rank_file is not None:
        _rank_file.phase = name


def keep_phases(file: RankFile) -> None:
    """Let the parent of this rank read the phases, also after the rank's death."""
    global _rank_file
    _rank_file = file
    file.phase = _phase


def current_phase() -> str:
    """Return the name that `phase` was given last."""
    return _phase


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies (Linux), so that no orphan keeps a GPU."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() == 1 and not runs_python(Path("/proc/1/cmdline")):
        os._exit(1)  # it died before that: init has adopted this process


def runs_python(command_line: Path) -> bool:
    """Whether a process is Python: in a container process 1 may be the parent of the ranks itself."""
    try:
        return b"python" in command_line.read_bytes().split(b"\0")[0]
    except OSError:
        return False


def open_stacks(folder: Path, name: str) -> Path:
    """Write this process's stacks into folder/name.txt on SIGUSR1 and SIGUSR2; children know the folder by variable.
    Must be called in the main thread."""
    global _stack_file
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[STACKS_VARIABLE] = str(folder.resolve())
    path = folder / f"{name}.txt"
    _stack_file = path.open("w")
    _stack_file.write(f"{name}, pid {os.getpid()}\n")
    _stack_file.flush()
    signal.signal(signal.SIGUSR1, lambda *_: _write_own_stacks())
    faulthandler.register(signal.SIGUSR2, file=_stack_file, all_threads=True)
    faulthandler.enable(file=_stack_file)
    return path


def _write_own_stacks() -> None:
    if _stack_file is not None:
        faulthandler.dump_traceback(file=_stack_file, all_threads=True)
        _stack_file.write(STACKS_END)
        _stack_file.flush()


def _have_not_answered(pids: list[int], folder: str) -> list[int]:
    """Those of the processes whose file of stacks, with the pid in its first line, has no end yet."""
    texts = [path.read_text(errors="replace") for path in Path(folder).glob("*.txt")] if folder else []
    waiting = {text.split("\n", 1)[0].rpartition(" ")[2] for text in texts if not text.endswith(STACKS_END)}
    return [pid for pid in pids if str(pid) in waiting]


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it ended meanwhile, which is what the caller wants


def report_hang(reason: str, peers: list[Peer], folder: str, kill: bool) -> None:
    """Print why, make all local processes write their stacks, and optionally kill them. Returns after 2 s at most."""
    if _rank_file is not None:
        _rank_file.explain()
    host = os.uname().nodename
    ours = children(os.getppid())  # whatever a message says: nothing else is ever signalled
    local = [peer for peer in peers if peer.host == host and peer.pid in ours and peer.pid != os.getpid()]
    print(f"\n[maestrale] stopped: {clean(reason)}", file=sys.stderr)  # noqa: T201 - the last words of a dying launch
    for peer in peers:
        line = f"[maestrale]   {peer.role} rank {peer.rank}: phase '{clean(peer.phase)}', pid {peer.pid} on {peer.host}"
        print(line, file=sys.stderr)  # noqa: T201
    _write_own_stacks()
    asked = [pid for peer in local for pid in (peer.pid, *children(peer.pid))]
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        for pid in asked:
            if catches(pid, number):
                _signal(pid, number)
                _signal(pid, signal.SIGCONT)
        end = time.monotonic() + 1.0
        while time.monotonic() < end and _have_not_answered(asked, folder):
            time.sleep(0.05)
        asked = _have_not_answered(asked, folder)
    print(f"[maestrale] stacks of all processes: {folder}", file=sys.stderr, flush=True)  # noqa: T201
    if kill:
        for peer in local:
            for pid in (*children(peer.pid), peer.pid):
                if pid in children(os.getppid()):
                    _signal(pid, signal.SIGKILL)


def describe_self(role: Role) -> Peer:
    """Return the present state of this rank."""
    pid = os.getpid()
    largest_child = max((peak_bytes(child) for child in children(pid)), default=0)
    asked, peak, number = deaths.requested(), peak_bytes(pid), role.rank_in_role
    return Peer(role.rank, role.kind, pid, role.host, _phase, peak, largest_child, number, asked)


class Pulse(threading.Thread):
    """A worker's heartbeat. Ends the process when the controller is silent for `heartbeat_s`."""

    def __init__(self, role: Role, heartbeat_s: float):
        super().__init__(name="pulse", daemon=True)
        self.role, self.heartbeat_s = role, heartbeat_s
        self.me = f"{role.kind} rank {role.rank}"
        host, pid = role.store.get("controller").decode().rsplit(" ", 1)
        self.peers: list[Peer] = [Peer(0, "controller", int(pid), host, START)]
        line: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket = connect(line, role, "pulse")

    def run(self) -> None:
        """Send a pulse, read the echo, and check for silence, once a second."""
        socket = self.socket
        socket.setsockopt(zmq.LINGER, 0)
        decode = msgspec.msgpack.Decoder(Echo).decode
        heard = checked = time.monotonic()
        while True:
            before = time.monotonic()
            socket.send(_encode(describe_self(self.role)))
            if socket.poll(int(1000 * PULSE_EVERY_S)):
                echo = decode(socket.recv())
                heard = time.monotonic()
                self.peers = echo.peers
                if echo.leave:
                    os._exit(0)  # the controller says how the launch ended
            now = time.monotonic()
            if now - checked > 3 * PULSE_EVERY_S + 2:
                heard = now  # this process itself was stopped; the silence was not the controller's
            checked = now
            if now - heard > self.heartbeat_s:
                reason = DeadlineExceeded(self.me, _phase, "controller (rank 0), which is silent", self.heartbeat_s)
                report_hang(str(reason), self.peers, os.environ.get(STACKS_VARIABLE, ""), kill=True)
                os._exit(1)
            time.sleep(max(0.0, before + PULSE_EVERY_S - time.monotonic()))


class PulseKeeper(threading.Thread):
    """The controller's side: checks every rank's last pulse, and that the controller's event loop still runs."""

    def __init__(self, role: Role, address: str, heartbeat_s: float):
        super().__init__(name="pulse keeper", daemon=True)
        self.heartbeat_s = heartbeat_s
        self.door = ListeningSocket(role, "pulse", address)
        self.socket = self.door.socket
        self.socket.setsockopt(zmq.LINGER, 0)
        role.store.set("controller", f"{role.host} {os.getpid()}")
        self.role = role
        self.heard: dict[int, tuple[float, Peer]] = {}
        self._known: dict[int, tuple[bytes, int, str]] = {}
        """rank -> identity, pid and host of its first pulse, which do not change"""
        self._nodes: dict[str, list[int]] = {}
        """host -> the ranks that have been heard from there"""
        self._own = describe_self(role)
        self._echoes: dict[tuple[str, bool], bytes] = {}
        """(host, whether the launch is over) -> the answer of this round, encoded"""
        self.leaving = False
        self.ending = False
        """the work is done: ranks are asked to end, and may"""
        self.dismissed: set[int] | None = None
        self.closed = False
        """the thread is to end, and to free its socket"""
        self.loop_turned = time.monotonic()
        self._deaths: dict[Path, int] = {}
        """file in which a node's parent reports deaths -> bytes that were read"""
        self.lost: tuple[float, str] | None = None
        """when a rank's death was noticed, and its report"""
        self.on_stop: Callable[[str], None] = lambda reason: None
        """called before `stop` ends this process"""
        self.asked = False
        self.on_death: Callable[[str], None] = lambda text: None
        """called once, in this thread, with the report of the first rank that died"""
        self.on_asked: Callable[[str, str], None] = lambda name, asked: None
        """called once, in this thread, with the first rank that was asked to end and its signal"""

    def turn(self) -> None:
        """Record that the controller's loop runs (called once a second from inside it)."""
        self.loop_turned = time.monotonic()

    def peers(self) -> list[Peer]:
        """Return all ranks as last heard, the controller first."""
        return [describe_self(self.role), *(peer for _, (_, peer) in sorted(self.heard.items()))]

    def run(self) -> None:
        """Echo pulses; report the first rank (or the own loop) that is silent too long."""
        checked = time.monotonic()
        (self.role.folder / deaths_file(0)).touch()  # from now on the parent of this node reports deaths here
        while not self.closed:
            round_ends, self._own = time.monotonic() + PULSE_EVERY_S / 2, describe_self(self.role)
            self._echoes.clear()
            while (left := round_ends - time.monotonic()) > 0 and self.socket.poll(int(1000 * left)):
                self._answer()
            now = time.monotonic()
            if now - checked > 3 * PULSE_EVERY_S + 2:  # this process itself was stopped: give everybody a new chance
                self.heard = {rank: (now, peer) for rank, (_, peer) in self.heard.items()}
                self.loop_turned = now
            checked = now
            self._take_news()
            if not self.leaving:
                self._judge(now)
        self.door.close()

    def _answer(self) -> None:
        """Answer the pulses that are there, at most one of every rank."""
        for _ in range(self.role.world):
            try:
                identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if (peer := self._recognised(identity, frames)) is None:
                refused.add("a heartbeat that is of no rank of this launch")
                continue
            self.heard[peer.rank] = (time.monotonic(), peer)
            dismissed = self.dismissed
            self.socket.send_multipart([identity, self._echo(peer.host, dismissed is not None)])
            if dismissed is not None:
                dismissed.add(peer.rank)

    def _echo(self, host: str, over: bool) -> bytes:
        """The answer to the ranks of a node, made once a round."""
        if (host, over) not in self._echoes:
            here = [self.heard[rank][1] for rank in sorted(self._nodes[host]) if rank in self.heard]
            self._echoes[host, over] = _encode(Echo([self._own, *here], over))
        return self._echoes[host, over]

    def _recognised(self, identity: bytes, frames: list[bytes]) -> Peer | None:
        """Return the pulse of a rank of this launch; None unless it is from the connection and process of its first."""
        try:
            peer = _decode_peer(frames[0])
        except (msgspec.DecodeError, IndexError):
            return None
        if len(frames) > 1 or rank_of(identity, self.role.world) != peer.rank:
            return None
        whole = identity, peer.pid, peer.host
        if peer.rank not in self._known:
            self._known[peer.rank] = whole
            self._nodes.setdefault(peer.host, []).append(peer.rank)
            self._echoes.clear()  # those beside a new rank know it at once
        return peer if self._known[peer.rank] == whole else None

    def _take_news(self) -> None:
        """Report the first death (`on_death`), and the first rank asked to end while all live (`on_asked`)."""
        for rank, text in self._new_deaths():
            self.heard.pop(rank, None)
            if self.lost is None and not (self.leaving or self.ending):
                self.lost = time.monotonic(), text
                self.on_death(text)
        if self.ending:
            return
        asked = next((peer for _, peer in self.heard.values() if peer.asked), None)
        if asked is not None and not (self.lost or self.leaving or self.asked):
            self.asked = True
            self.on_asked(asked.name, asked.asked)

    def _new_deaths(self) -> Iterator[tuple[int, str]]:
        """Yield (rank, text) of each death that a node's parent has reported since the last call."""
        for path in self.role.folder.glob(deaths_file("*")):
            with suppress(OSError):  # a shared file system may fail for a moment; the next round reads again
                lines = path.read_bytes()[self._deaths.get(path, 0) :].splitlines(keepends=True)
                for line in lines:
                    if line.endswith(b"\n"):
                        self._deaths[path] = self._deaths.get(path, 0) + len(line)
                        yield msgspec.json.decode(line, type=tuple[int, str])

    def dismiss(self, within_s: float = 3.0) -> None:
        """End all other ranks that are still there; returns when all have heard, at the latest after `within_s`."""
        self.leaving = True
        self.dismissed = set()
        end = time.monotonic() + within_s
        while time.monotonic() < end and not set(self.heard) <= self.dismissed:
            time.sleep(0.05)

    def _judge(self, now: float) -> None:
        silent = [peer for heard, peer in self.heard.values() if now - heard > self.heartbeat_s]
        if self.lost is not None and now - self.lost[0] > LOST_S:
            self.stop(self.lost[1])  # the loop should have ended the launch long ago
        if silent:
            peer = silent[0]
            who = f"{peer.role} rank {peer.rank} (pid {peer.pid} on {peer.host}), silent in phase '{clean(peer.phase)}'"
            self.stop(str(DeadlineExceeded("controller", _phase, who, self.heartbeat_s)))
        loop_s = self.heartbeat_s * (START_TIMES if _phase == START else 1)
        if now - self.loop_turned > loop_s:
            who = "its own event loop, which does not turn"
            self.stop(str(DeadlineExceeded("controller", _phase, who, loop_s)))

    def stop(self, reason: str) -> None:
        """Report with all stacks, kill what is on this node, end this process with code 1."""
        report_hang(reason, self.peers(), os.environ.get(STACKS_VARIABLE, ""), kill=True)
        self.on_stop(reason)
        os._exit(1)
