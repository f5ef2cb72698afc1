"""The child process that runs SymPy on behalf of a pool: one request in, one reply out, until its input closes.

Started as `python -m verify.checker_process PARENT_PID`. Frames on stdin and stdout: 4 bytes little-endian length, then
msgpack. First it sends a `Ready`, so that the pool's deadline never counts imports. It dies with the thread that
started it (PR_SET_PDEATHSIG), has 2 GB of address space, no core file, no file output, and nothing it prints reaches
the frames. `run_child` and the frames serve the processes of plug-ins, environments and the gateway too.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from shared.types import Verdict
from verify.code.sandbox.syscalls import die_with_parent

MAX_ADDRESS_BYTES = 2 << 30
HEADER = struct.Struct("<I")


class Request(msgspec.Struct, array_like=True):
    """One pair of answers to compare."""

    ground_truth: str
    answer: str


class Reply(msgspec.Struct, array_like=True):
    """The verdict on a pair, and how much memory the worker holds now."""

    verdict: Verdict
    rss_bytes: int


class Ready(msgspec.Struct, array_like=True):
    """Sent once, when the worker's imports are done."""

    pid: int


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message with its length in front."""
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(len(body)) + body


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_BYTES, MAX_ADDRESS_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _rss_bytes() -> int:
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def read_frames(descriptor: int) -> Iterator[bytes]:
    """Yield the bodies of frames until the file ends."""
    with open(descriptor, "rb", closefd=False) as stream:
        while len(header := stream.read(HEADER.size)) == HEADER.size:
            body = stream.read(size := HEADER.unpack(header)[0])
            if len(body) < size:
                return
            yield body


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of the data."""
    while data:
        data = data[os.write(descriptor, data) :]


async def handle_frames(requests: int, handle: Callable[[bytes], None]) -> None:
    """Call `handle` in the event loop with the body of each frame until the file ends."""
    import asyncio  # SymPy's processes, which are many, need neither
    import threading

    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def listen() -> None:
        for body in read_frames(requests):
            loop.call_soon_threadsafe(handle, body)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=listen, daemon=True).start()
    await ended.wait()


def run_child(parent: int, work: Callable[[int, int], None], prints: bool = True, expendable: bool = False) -> NoReturn:
    """Do work(requests, replies) as a process of the pid `parent`, and end with it, or when that closes its end.

    requests and replies are standard input and output as they were at the start; what the work prints goes to standard
    error, or nowhere. expendable: the kernel's out-of-memory killer takes this process before others.
    """
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if expendable:
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
    requests, replies = os.dup(0), os.dup(1)
    quiet = os.open(os.devnull, os.O_RDWR)
    os.dup2(quiet, 0)
    os.dup2(2 if prints else quiet, 1)
    with suppress(BrokenPipeError, KeyboardInterrupt):  # the caller is gone: nobody is left to answer
        work(requests, replies)
    os._exit(0)


def serve(requests: int, replies: int) -> None:
    """Answer frames from descriptor `requests` on descriptor `replies` until end of file."""
    from verify.math.algebra import equal  # mpmath: only a worker pays for it
    from verify.math.calculus import load

    equal(r"\frac{1}{2}x+\sqrt{3}", r"\sqrt{3}+\frac{x}{2}")
    load()  # SymPy takes a second: within a request it would miss the deadline
    _limit()
    write_all(replies, frame(Ready(os.getpid())))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)
    for body in read_frames(requests):
        request = msgspec.msgpack.decode(body, type=Request)
        try:
            reply = Reply(equal(request.ground_truth, request.answer), _rss_bytes())
        except Exception:  # noqa: BLE001 - SymPy raises what it likes; the pool counts it and tries once more
            reply = Reply(Verdict.CRASH, _rss_bytes())
        write_all(replies, frame(reply))


if __name__ == "__main__":
    run_child(int(sys.argv[1]), serve, prints=False)
