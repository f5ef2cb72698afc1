"""What the processes of test_child_process.py run."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import msgspec

from shared.errors import ConfigError
from shared.launch.calls import call
from shared.served import Served


class Said(msgspec.Struct):
    """An event."""

    text: str


class Async(Served):
    """Does what a test asks for."""

    says_begun, answer_bytes, events = True, 1 << 16, Said

    @call("start", deadline=60.0)
    def begin(self, fault: str = "") -> int:
        """Start, or fail in the way that is named."""
        if fault == "exit":
            os._exit(7)
        if fault == "refuse":
            raise ConfigError("the file is wrong")
        if fault == "raise":
            raise KeyError("nothing")
        if fault == "hang":
            time.sleep(600)
        print("printed", flush=True)
        return os.getpid()

    @call("square", deadline=60.0)
    async def square(self, number: int) -> int:
        return number * number

    @call("say", deadline=60.0)
    async def speak(self, text: str) -> None:
        self.say(Said(text))

    @call("wait", deadline=600.0)
    async def wait(self, seconds: float) -> str:
        """Wait, and let other calls go on."""
        await asyncio.sleep(seconds)
        return "waited"

    @call("block", deadline=600.0)
    async def block(self, seconds: float) -> str:
        """Wait, and let no other call begin."""
        time.sleep(seconds)
        return "blocked"

    @call("harm", deadline=60.0)
    async def harm(self, kind: str) -> str:
        """Answer more than may be, or another type, or raise, or write what is no frame."""
        if kind == "flood":
            return "x" * (1 << 20)
        if kind == "lie":
            return 3  # type: ignore[return-value]
        if kind == "fail":
            raise ValueError("it went wrong")
        for descriptor in range(3, 30):
            try:
                os.write(descriptor, b"\xff" * 4096)
            except OSError:
                continue
        return ""

    @call("leave", deadline=60.0)
    async def leave(self, number: int) -> None:
        """End the process by a signal, or with an exit code from 0 on."""
        if number < 0:
            os.kill(os.getpid(), -number)
        sys.exit(number)

    @call("start a process", deadline=60.0)
    async def grandchild(self) -> int:
        """Start a process in a session of its own, which ignores SIGTERM."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid


class Plain(Served):
    """Has no async method: one call after the other."""

    prints = False

    @call("start", deadline=60.0)
    def begin(self) -> None:
        self.calls = 0

    @call("count", deadline=60.0)
    def count(self) -> int:
        self.calls += 1
        print("nobody sees this")
        return self.calls

    @call("leave", deadline=60.0)
    def leave(self) -> None:
        os._exit(3)
