"""The process's side of a `Child` (child_process.py): an object of one class, whose methods are called from elsewhere.

`python -m shared.served MODULE:CLASS PARENT STACKS` makes the object and runs calls until its standard input ends.
Frames: 4 bytes of length, 8 bytes of call number, msgpack (calls.py). Number 0 is an event of the process. A frame
without a message says that a call has begun.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import inspect
import itertools
import os
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from shared.clean_text import CleanStream
from shared.launch.calls import CallReply, RequestDecoder, encode
from shared.launch.messages import RankFailed, failure

if TYPE_CHECKING:
    import asyncio

HEADER = struct.Struct("<IQ")
FRAME_BYTES = 1 << 30
"""most bytes of a frame, unless the class says less (`answer_bytes`)"""


class Served:
    """What `Child` runs: a base class for its type. Its methods with `@call` may be called; `begin` is the first."""

    answer_bytes = FRAME_BYTES
    """most bytes of an answer"""
    says_begun = False
    """whether the caller learns when a call begins"""
    prints = True
    """whether what it prints goes to standard error, clean, or nowhere"""
    expendable = False
    """whether the kernel's out-of-memory killer takes this process before others"""
    events: Any = None
    """type of what `say` sends"""
    say: Callable[[msgspec.Struct], None]
    """send the caller an event; set before `begin`"""
    begin: Callable[..., Any]
    """the first call"""

    async def run(self) -> None:
        """Runs in addition to the calls; does nothing by default."""


def frames_of(descriptor: int) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of each frame until the file ends."""
    with open(descriptor, "rb", closefd=False) as stream:
        while len(header := stream.read(HEADER.size)) == HEADER.size:
            size, number = HEADER.unpack(header)
            content = stream.read(size)
            if len(content) < size:
                return
            yield number, content


class _Server:
    """The process's side: reads calls, runs them, and writes what they return."""

    def __init__(self, served: type[Served], replies: int):
        self.replies, self.target, self.decode = replies, served(), RequestDecoder(served)
        self.says_begun = served.says_begun
        self.target.say = lambda event: self.write(0, encode(event))
        self.running: set[asyncio.Task[None]] = set()

    def write(self, number: int, content: bytes) -> None:
        """Write a frame."""
        frame = HEADER.pack(len(content), number) + content
        while frame:
            frame = frame[os.write(self.replies, frame) :]

    def run(self, number: int, content: bytes) -> None:
        """Run a call that is not async, and answer it."""
        try:
            answer: CallReply[Any] | RankFailed = CallReply(self.decode(content).run(self.target))
        except Exception as error:  # noqa: BLE001 - the caller raises it
            answer = failure(error)
        self.write(number, encode(answer))

    async def handle(self, number: int, content: bytes) -> None:
        """Run a call as a task, and answer it."""
        try:
            if self.says_begun:
                self.write(number, b"")
            value = self.decode(content).run(self.target)
            answer: CallReply[Any] | RankFailed = CallReply(await value if inspect.isawaitable(value) else value)
        except Exception as error:  # noqa: BLE001 - the caller raises it
            answer = failure(error)
        self.write(number, encode(answer))

    async def serve(self, frames: Iterator[tuple[int, bytes]]) -> None:
        """Run each call in the event loop until the caller closes its end."""
        import asyncio
        import threading

        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def begin(number: int, content: bytes) -> None:
            task = loop.create_task(self.handle(number, content))
            self.running.add(task)
            task.add_done_callback(self.running.discard)

        def listen() -> None:
            for number, content in frames:
                loop.call_soon_threadsafe(begin, number, content)
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=listen, daemon=True).start()
        self.running.add(running := loop.create_task(self.target.run()))
        running.add_done_callback(end_on_error)
        await ended.wait()
        os._exit(0)  # whatever its tasks still do


def end_on_error(task: asyncio.Task[None]) -> None:
    """End the process if this task has failed."""
    if not task.cancelled() and (error := task.exception()) is not None:
        traceback.print_exception(error)
        os._exit(1)


def line_of(error: BaseException, files: Sequence[str]) -> str:
    """Return "FILE:LINE in FUNCTION" of the innermost frame of an error that is in one of the files, "" for none."""
    places = [at for at in traceback.extract_tb(error.__traceback__) if at.filename in files]
    return f"{places[-1].filename}:{places[-1].lineno} in {places[-1].name}" if places else ""


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent, or the thread that started it, ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main(name: str, parent: int, stack: int) -> NoReturn:
    """Be the process: run an object of the class MODULE:NAME for `parent` (0: whoever has started it)."""
    end_with(parent or os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    requests, replies, quiet = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDWR)
    module, _, attribute = name.partition(":")
    os.dup2(quiet, 0)
    os.dup2(2, 1)
    served: type[Served] = getattr(importlib.import_module(module), attribute)
    if served.expendable:
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
    if not served.prints:
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
    sys.stdout, sys.stderr = CleanStream(1), CleanStream(2)
    server = _Server(served, replies)
    with suppress(BrokenPipeError, KeyboardInterrupt):  # the caller is gone: nobody is left to answer
        frames = frames_of(requests)
        for number, content in itertools.islice(frames, 1):
            server.run(number, content)
        if any(inspect.iscoroutinefunction(known.method) for known in server.decode.calls.values()):
            import asyncio

            asyncio.run(server.serve(frames))
        for number, content in frames:
            server.run(number, content)
    os._exit(0)


if __name__ == "__main__":
    from shared.served import main as run  # as the module that classes import, not as __main__

    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
