"""Calls the rewards and verifiers of plug-in files in a process of their own, and names the file, the line and the
fault.

Each set of files has one process. It may be called from any thread and any event loop: frames are written and read in
two threads. A function that does not return is found by its deadline, one that ends the process by that end: the
process is killed and replaced, that call fails with the line that ran, and calls that had not begun are repeated.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from shared.errors import ConfigError
from shared.launch import deaths
from shared.sections import RewardWeights
from shared.supervisor import supervised
from shared.types import Verdict
from verify.child_process import FilesRefused, frame, kill_group, python_path, read_frames, write_all
from verify.plugin_process import (
    Begun,
    Describe,
    Described,
    DescribedVerifier,
    Description,
    FilesRead,
    RewardCall,
    Said,
    Value,
    Verification,
)
from verify.plugins import Case, Failed
from verify.verifiers import Answer, Verifier

START_S = 60.0
"""seconds for running the files, and for making the rewards"""
SILENCE_S = 60.0
"""seconds beyond the longest deadline in which a process must send something while a call waits for its turn"""
GRACE_S = 2.0
"""seconds beyond a function's deadline, which its own process enforces where the function awaits"""
ATTEMPTS = 20
"""tries for a call that never begins because others end the process before it"""
STACK_S = 3.0
"""seconds to wait for the line that runs"""
_AT = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


Call = RewardCall | Verification


class _Lost(Exception):
    """The process has ended; the message says how."""


class _Waiting:
    """A call that was sent: futures of its beginning and of its value."""

    def __init__(self) -> None:
        self.begun: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.ended: concurrent.futures.Future[Value] = concurrent.futures.Future()


class _Process:
    """One child process, and the threads that read from it and write to it."""

    def __init__(self, files: tuple[str, ...]):
        self.files, self.stacks = files, tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self.waiting: dict[int, _Waiting] = {}
        self.told: queue.SimpleQueue[Said | None] = queue.SimpleQueue()
        """messages that do not belong to a call; None when the process has ended"""
        self.outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.lock, self.dead = threading.Lock(), False
        self.heard = time.monotonic()
        """when it last sent something"""
        self.child = self._begin()
        for work in (self._read, self._write):
            threading.Thread(target=work, name="plugin-host", daemon=True).start()

    def _begin(self) -> subprocess.Popen[bytes]:
        stack = self.stacks.fileno()
        return subprocess.Popen(
            supervised([sys.executable, "-m", "verify.plugin_process", str(stack), *self.files]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": python_path()},
            pass_fds=[stack],
            start_new_session=True,
        )

    def _read(self) -> None:
        """Handle the messages of the process until it ends."""
        assert self.child.stdout
        source = self.child.stdout.fileno()
        with contextlib.suppress(OSError, msgspec.DecodeError):
            for body in read_frames(source):
                self._take(msgspec.msgpack.decode(body, type=Said))
        expected = self.dead
        self.kill()
        code = self.child.wait()
        if not expected:
            deaths.helpers.add("the process of reward.plugins", deaths.how(code), "another takes its place")
        lost = _Lost(f"ended its process ({_how(code)})")
        with self.lock:
            self.dead = True
            left, self.waiting = self.waiting, {}
        for call in left.values():
            for future in (call.begun, call.ended):
                if not future.done() and future.set_running_or_notify_cancel():
                    future.set_exception(lost)
        self.told.put(None)
        self.outgoing.put(None)
        self.child.stdout.close()
        self.stacks.close()

    def _take(self, said: Said) -> None:
        self.heard = time.monotonic()
        if isinstance(said, Begun | Value):
            call = self.waiting.get(said.number)
            if call is not None and isinstance(said, Begun):
                if call.begun.set_running_or_notify_cancel():  # else nobody waits for it any more
                    call.begun.set_result(None)
            elif call is not None and isinstance(said, Value):
                self.waiting.pop(said.number, None)
                if call.ended.set_running_or_notify_cancel():
                    call.ended.set_result(said)
        else:
            self.told.put(said)

    def _write(self) -> None:
        assert self.child.stdin
        target = self.child.stdin.fileno()
        with contextlib.suppress(OSError):
            while (data := self.outgoing.get()) is not None:
                write_all(target, data)
        self.child.stdin.close()

    def call(self, asked: Call) -> _Waiting:
        """Send a call. Raises _Lost when the process has ended."""
        waiting = _Waiting()
        with self.lock:
            if self.dead:
                raise _Lost("has ended")
            self.waiting[asked.number] = waiting
        self.outgoing.put(frame(asked))
        return waiting

    def next_word(self, until: float) -> Said:
        """Return the next message outside calls. Raises ConfigError if it refuses or none comes, _Lost at its end."""
        names = ", ".join(self.files)
        try:
            said = self.told.get(timeout=max(until - time.monotonic(), 0.0))
        except queue.Empty:
            place = self.line()
            self.kill()
            raise ConfigError(
                f"reward.plugins: {place or names} does not come to an end: stopped after {START_S:g} s while loading"
            ) from None
        if said is None:
            raise _Lost(f"reward.plugins: {names} ended its process while loading ({_how(self.child.wait())})")
        if isinstance(said, FilesRefused):
            raise ConfigError(said.reason)
        return said

    def line(self) -> str:
        """Return "FILE:LINE in FUNCTION" of the innermost running frame that is in one of the files, "" for none."""
        text, until = "", time.monotonic() + STACK_S
        with contextlib.suppress(ProcessLookupError, ValueError):  # the process has ended
            before = os.fstat(self.stacks.fileno()).st_size
            os.kill(self.child.pid, signal.SIGUSR1)
            while not text.endswith("\n") and time.monotonic() < until:
                time.sleep(0.1)
                text = os.pread(self.stacks.fileno(), 1 << 16, before).decode("utf-8", "replace")
        found = [match for match in _AT.finditer(text) if match[1] in self.files]
        return f"{found[0][1]}:{found[0][2]} in {found[0][3]}" if found else ""

    def kill(self) -> None:
        """SIGKILL the process and what it started."""
        self.dead = True
        kill_group(self.child.pid)


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}, as when memory runs out" if -code == signal.SIGKILL else name


class Host:
    """Runs the rewards of a set of plug-in files in one child process."""

    def __init__(self, files: tuple[str, ...]):
        """Start the process. Raises ConfigError, with the line, for a file that cannot be run, exits or hangs."""
        self.files, self._numbers, self._lock = files, itertools.count(), threading.Lock()
        self._longest_s = 0.0
        """longest deadline of a function that was called"""
        self._process = self._start()

    def _start(self) -> _Process:
        process = _Process(self.files)
        try:
            said = process.next_word(time.monotonic() + START_S)
        except _Lost as error:
            raise ConfigError(str(error)) from error
        assert isinstance(said, FilesRead)
        return process

    def close(self) -> None:
        """End the process."""
        self._process.kill()

    def describe(self, settings: RewardWeights) -> Description:
        """Return what the files define. Raises ConfigError when a reward cannot be made under these settings."""
        for last in (False, True):  # a call may just have ended the process
            process = self._living()
            process.outgoing.put(frame(Describe(settings.model_dump_json())))
            try:
                said = process.next_word(time.monotonic() + START_S)
            except _Lost as error:
                if last:
                    raise ConfigError(str(error)) from error
            else:
                assert isinstance(said, Description)
                return said
        raise AssertionError

    def _living(self) -> _Process:
        with self._lock:
            if self._process.dead:
                self._process = self._start()
            return self._process

    async def value(self, known: Described, case: Case) -> float:
        """Return the value of one case. Raises Failed when there is none."""
        return (await self.values(known, [case]))[0]

    async def values(self, known: Described, cases: Sequence[Case]) -> list[float]:
        """Return [completions] the values of the cases of a group. Raises Failed when there are none."""
        text, what = cases[0].settings.model_dump_json(), f"reward {known.name} ({known.place})"
        fields = [(*case[:7], case.group) for case in cases]
        made = functools.partial(RewardCall, settings=text, name=known.name, cases=fields)
        return await self._call(made, known.deadline_s, what)

    def verifier(self, known: DescribedVerifier, settings: RewardWeights) -> Verifier:
        """Return the verifier that asks this process."""
        function = functools.partial(self.verify, known, settings)
        form, verifies, home = known.form, known.verifies, known.home
        return Verifier(known.domain, function, known.ground_truth, known.answer_in, "", form, None, verifies, home)

    async def verify(self, known: DescribedVerifier, settings: RewardWeights, answer: Answer) -> float:
        """Return the share of an answer that is right, in [0, 1]. Raises Failed when there is none."""
        text, what = settings.model_dump_json(), f"verifier of {known.domain} ({known.place})"
        made = functools.partial(Verification, settings=text, domain=known.domain, answer=answer)
        (share,) = await self._call(made, settings.deadline_s, what)
        if not 0 <= share <= 1:
            raise Failed(Verdict.CRASH, f"{what}: returned {share:g}, not a share from 0 to 1")
        return share

    async def _begun(self, process: _Process, waiting: _Waiting, deadline_s: float) -> None:
        """Wait for a call's turn. A process that is silent for longer than any function may run is killed."""
        self._longest_s = max(self._longest_s, deadline_s)
        begun, asked = asyncio.wrap_future(waiting.begun), time.monotonic()
        try:
            while not (await asyncio.wait([begun], timeout=SILENCE_S / 4))[0]:
                if time.monotonic() - max(process.heard, asked) > self._longest_s + SILENCE_S:
                    process.kill()
            begun.result()
        finally:
            begun.cancel()  # nobody waits for it any more

    async def _call(self, make: Callable[[int], Call], deadline_s: float, what: str) -> list[float]:
        attempts = ATTEMPTS
        while True:
            call, attempts = make(next(self._numbers)), attempts - 1
            try:
                process = await asyncio.to_thread(self._living) if self._process.dead else self._process
                waiting = process.call(call)
                await self._begun(process, waiting, deadline_s)
            except ConfigError as error:
                raise Failed(Verdict.CRASH, f"{what}: {error}") from error
            except _Lost as error:
                if attempts:
                    continue  # another call's fault: this one had not begun
                raise Failed(Verdict.CRASH, f"{what}: {error}") from error
            try:
                found = await asyncio.wait_for(asyncio.wrap_future(waiting.ended), deadline_s + GRACE_S)
            except TimeoutError as error:
                place = await asyncio.to_thread(process.line)
                process.kill()
                at = f", it was at {place}" if place else ""
                said = f"no value after {deadline_s:g} s{at}"
                raise Failed(Verdict.TIMEOUT, f"{what}: {said}") from error
            except _Lost as error:
                raise Failed(Verdict.CRASH, f"{what}: {error}") from error
            if found.values is None:
                raise Failed(found.verdict, f"{what}: {found.reason}")
            return found.values


def close_hosts() -> None:
    """End the processes of all hosts; a host that is used again starts a new one."""
    for host in _hosts.values():
        host.close()


_hosts: dict[tuple[str, ...], Host] = {}
"""files -> their host"""


def host_of(files: tuple[str, ...]) -> Host:
    """Return the host of these files (absolute paths), of which this process has one. Raises ConfigError."""
    if files not in _hosts:
        _hosts[files] = Host(files)
    return _hosts[files]
