"""The owner's side of a sandbox: starts it, gives it programs, exchanges bytes, kills it when it does not answer.

`SandboxHandle` starts one sandbox and serves one thread at a time; every wait has a deadline. What a host allows is
found by starting a sandbox: with namespaces, else without; one that can neither hide files (namespaces or Landlock) nor
filter calls is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgspec

from shared.errors import RunError
from verify.code.sandbox import isolation
from verify.code.sandbox.codec import HEADER

START_DEADLINE_S = 30.0
GRACE_S = 3.0
FIRST_USER = 61184
_CHUNK = 1 << 16
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_next_user = iter(range(1 << 62))
_lock = threading.Lock()


class SandboxRefused(RunError):
    """The host cannot isolate untrusted programs, and the settings do not say to run them all the same."""


class Lost(Exception):
    """The sandbox died or does not answer."""


class Ended(msgspec.Struct, frozen=True):
    """How a child of a sandbox ended."""

    timed_out: bool = False
    status: int = 0
    """exit status, or minus the signal"""
    cpu_s: float = 0.0
    memory_bytes: int = 0


class Isolation(msgspec.Struct, frozen=True):
    """What a sandbox was able to isolate."""

    namespaces: bool = False
    user_namespace: bool = False
    landlock: int = 0
    """ABI version, 0 for none"""
    filtered: bool = False
    """system calls are filtered (seccomp)"""
    user: int = 0
    refused: str = ""

    def line(self) -> str:
        """Return one line for the log of a run."""
        spaces = "pid, mount, net, ipc, uts, cgroup" + (", user" if self.user_namespace else "")
        return (
            f"sandbox: namespaces {f'({spaces})' if self.namespaces else 'none'}, "
            f"Landlock {f'ABI {self.landlock}' if self.landlock else 'none'}, "
            f"seccomp{'' if self.filtered else ' none'}, rlimits, user {self.user}"
        )


class Pipe:
    """Carries bytes to and from a child; what it writes is gathered in `got`.

    `send` is all that it reads, as a file (so that its size can be asked for, or all of it read at once); None: a pipe,
    to which `out` is sent as the child reads.
    """

    def __init__(self, send: bytes | None = None, most_bytes: int = 4 << 20) -> None:
        self.write = -1
        if send is None:
            self.child_read, self.write = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(self.write, False)
        else:
            self.child_read = _make_file(send)
        self.read, self.child_write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.read, False)
        self.out, self.got, self.most_bytes = bytearray(), bytearray(), most_bytes
        self.flooded = self.finished = False
        self.close_when_sent = True

    def drain(self) -> None:
        """Read all that is there now."""
        while not (self.finished or self.flooded) and _readable(self.read):
            self.pull()

    def close_child_ends(self) -> None:
        """Close our copies of the child's ends."""
        for file in (self.child_read, self.child_write):
            os.close(file)

    def push(self) -> None:
        """Send what fits. A child that stopped reading is not an error."""
        try:
            del self.out[: os.write(self.write, self.out[:_CHUNK])]
        except BlockingIOError:
            pass  # the pipe is full; the next call sends on
        except OSError:
            self.out.clear()

    def pull(self) -> None:
        """Read what is there."""
        try:
            chunk = os.read(self.read, _CHUNK)
        except BlockingIOError:
            return
        self.got += chunk
        self.finished = self.finished or not chunk
        self.flooded = len(self.got) > self.most_bytes

    def close_write(self) -> None:
        """Tell the child that no more comes."""
        if self.write >= 0:
            os.close(self.write)
            self.write = -1

    def close(self) -> None:
        """Close both of our ends."""
        self.close_write()
        os.close(self.read)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SandboxHandle:
    """Starts, uses and ends one sandbox. Not for two threads at once."""

    def __init__(
        self, namespaces: bool = True, landlock: bool | int = True, unsafe: bool = False, shared_folder: str = ""
    ) -> None:
        """Start the sandbox and wait until it is ready; `isolation` says what was reached, or why it was refused.

        `landlock`: a number is the newest ABI to use.
        """
        with _lock:
            user = FIRST_USER + (os.getpid() * 8 + next(_next_user)) % 4000
        try:
            self.folder = "" if namespaces else isolation.make_folder()
        except OSError as error:
            raise SandboxRefused(
                f"no folder for a sandbox of programs: {error}. Make room there, or set TMPDIR"
            ) from error
        self.work = f"{self.folder}/own" if self.folder else "/box"
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        root = Path(__file__).resolve().parents[3]
        prefix = os.path.realpath(sys.base_prefix)
        settings: dict[str, object] = {
            "work": self.work,
            "prefix": prefix,
            "readable": [path for path in ("/usr", prefix, shared_folder) if path and not path.startswith("/usr/")],
            "folder": self.folder,
            "namespaces": namespaces,
            "landlock": landlock,
            "unsafe": unsafe,
            "user": user,
        }
        program = (
            f"import json, sys; sys.path.insert(0, {str(root)!r}); from verify.code.sandbox import server; "
            f"sys.path.pop(0); server.main({theirs.fileno()}, json.loads(sys.argv[1]))"
        )
        interpreter = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        with tempfile.TemporaryFile() as errors:
            self.process = subprocess.Popen(
                [interpreter, "-S", "-P", "-s", "-c", program, json.dumps(settings)], stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=errors, pass_fds=[theirs.fileno()],
                env={"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8"}, cwd="/",
                start_new_session=True,
            )  # fmt: skip
            theirs.close()
            self.buffer = b""
            try:
                answer = self._answer(START_DEADLINE_S)
            except Lost:
                self.kill()
                errors.seek(0)
                messages = errors.read(1 << 16).decode("utf-8", "replace").strip().splitlines()
                answer = {
                    "refused": f"the sandbox ended while it started ({messages[-1] if messages else 'without a word'})"
                }
        self.isolation = msgspec.convert(answer, Isolation)

    def ask(self, request: dict[str, Any], files: tuple[int, ...] = ()) -> None:
        """Send a request. Raises Lost."""
        body = json.dumps(request).encode()
        try:
            self.ours.settimeout(GRACE_S)
            if files:
                socket.send_fds(self.ours, [HEADER.pack(len(body))], list(files))
                self.ours.sendall(body)
            else:
                self.ours.sendall(HEADER.pack(len(body)) + body)
        except OSError as error:
            raise Lost from error

    def _answer(self, deadline_s: float) -> dict[str, Any]:
        """Wait for the sandbox's next line. Raises Lost."""
        end = time.monotonic() + deadline_s
        while b"\n" not in self.buffer:
            try:
                self.ours.settimeout(max(0.001, end - time.monotonic()))
                chunk = self.ours.recv(_CHUNK)
            except OSError as error:
                raise Lost from error
            if not chunk:
                raise Lost
            self.buffer += chunk
        line, self.buffer = self.buffer.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tell(self, **request: Any) -> None:
        """Send a request that needs no child and wait until it is done. Raises Lost."""
        self.ask(request)
        self._answer(GRACE_S)

    def begin(self, pipe: Pipe, targets: tuple[int, int], wall_s: float, cpu_s: float, **request: Any) -> None:
        """Start a child that reads and writes `pipe` at the two descriptors `targets`. Raises Lost."""
        try:
            files = (pipe.child_read, pipe.child_write)
            self.ask({"targets": targets, "wall_s": wall_s, "cpu_s": cpu_s, **request}, files)
        finally:
            pipe.close_child_ends()

    def cancel(self) -> None:
        """Kill the running child; its end is still to be read. Raises Lost."""
        self.ask({"do": "kill"})

    def has_answer(self) -> bool:
        """Return whether the child has ended (or the sandbox has)."""
        return b"\n" in self.buffer or _readable(self.ours.fileno())

    def ended(self, deadline_s: float = GRACE_S) -> Ended:
        """Wait for the end of the child. Raises Lost."""
        return msgspec.convert(self._answer(deadline_s), Ended)

    def run(self, pipe: Pipe, targets: tuple[int, int], wall_s: float, cpu_s: float, **request: Any) -> Ended:
        """Run a child to its end, sending and gathering bytes meanwhile. Raises Lost."""
        self.begin(pipe, targets, wall_s, cpu_s, **request)
        exchange({self: pipe}, wall_s + GRACE_S, lambda: pipe.flooded)
        if pipe.flooded:
            self.cancel()
        ended = self.ended()
        pipe.drain()
        return ended

    def kill(self) -> None:
        """End the sandbox and all in it, and remove its folder."""
        with contextlib.suppress(OSError):
            self.ours.shutdown(socket.SHUT_RDWR)  # a thread that waits for an answer sees the end
        for word in (None, signal.SIGTERM, signal.SIGKILL):  # asked, told (it kills and reaps all it has), forced
            with contextlib.suppress(ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
                if word is not None:
                    os.killpg(self.process.pid, word) if word == signal.SIGKILL else self.process.send_signal(word)
                self.process.wait(1.0)
                break
        self.process.wait()
        self.ours.close()
        if self.folder:
            isolation.remove_folder(self.folder)


def _make_file(content: bytes) -> int:
    """Return a descriptor to read `content` from the beginning: a file in memory that can no longer be changed."""
    file = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(file, view) :]
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
        return os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(file)


def _readable(file: int) -> bool:
    with selectors.PollSelector() as selector:
        selector.register(file, selectors.EVENT_READ)
        return bool(selector.select(0))


def exchange(pipes: dict[SandboxHandle, Pipe], deadline_s: float, stop: Callable[[], bool]) -> None:
    """Move bytes until `stop()` or until a sandbox speaks (its child ended). Raises Lost at the deadline."""
    end = time.monotonic() + deadline_s
    while not stop() and not any(b"\n" in owner.buffer for owner in pipes):
        try:
            spoke = _move(pipes, max(0.0, end - time.monotonic()))
        except (OSError, ValueError) as error:  # closed by another thread
            raise Lost from error
        if spoke:
            return


def _move(pipes: dict[SandboxHandle, Pipe], wait_s: float) -> bool:
    """Wait once and move what can be moved; True when a sandbox speaks. Raises Lost when nothing can in time."""
    with selectors.PollSelector() as selector:
        for owner, pipe in pipes.items():
            selector.register(owner.ours, selectors.EVENT_READ, None)
            if not pipe.finished:
                selector.register(pipe.read, selectors.EVENT_READ, pipe.pull)
            if pipe.write >= 0 and pipe.out:
                selector.register(pipe.write, selectors.EVENT_WRITE, pipe.push)
            elif pipe.close_when_sent:
                pipe.close_write()
        ready = selector.select(wait_s)
    if not ready:
        raise Lost
    for key, _ in ready:
        if key.data is None:
            return True
        key.data()
    return False
