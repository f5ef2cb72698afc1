"""A process of its own for work that may hang, exit or exhaust memory, and the frames in which it talks with its host.

A frame is its length, 4 bytes little-endian, and a message in msgpack.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from shared.clean_text import CleanStream
from verify.code.sandbox.syscalls import die_with_parent

if TYPE_CHECKING:
    import asyncio

HEADER = struct.Struct("<I")


class FilesRefused(msgspec.Struct, tag=True):
    """Sent when a file of the user's cannot be run, or what it defines cannot be made."""

    reason: str


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message with its length in front."""
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(len(body)) + body


def read_frames(descriptor: int) -> Iterator[bytes]:
    """Yield the bodies of frames until the file ends."""
    with open(descriptor, "rb", closefd=False) as stream:
        while len(header := stream.read(HEADER.size)) == HEADER.size:
            body = stream.read(size := HEADER.unpack(header)[0])
            if len(body) < size:
                return
            yield body


async def read_frame(stream: asyncio.StreamReader, kind: Any, most_bytes: int = 1 << 32) -> Any:
    """Return the next message, of the type `kind`. Raises EOFError at the end, and for a frame that is longer than
    `most_bytes` or holds no such message."""
    try:
        size = HEADER.unpack(await stream.readexactly(HEADER.size))[0]
        if size > most_bytes:
            raise EOFError(f"a frame of {size:,} bytes")
        return msgspec.msgpack.decode(await stream.readexactly(size), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise EOFError(str(error)) from error


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of the data."""
    while data:
        data = data[os.write(descriptor, data) :]


async def handle_frames(requests: int, handle: Callable[[bytes], None]) -> None:
    """Call `handle` in the event loop with the body of each frame until the file ends."""
    import asyncio  # the checkers' processes, which are many, need neither
    import threading

    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def listen() -> None:
        for body in read_frames(requests):
            loop.call_soon_threadsafe(handle, body)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=listen, daemon=True).start()
    await ended.wait()


def line_of(error: BaseException, files: list[str]) -> str:
    """Return "FILE:LINE in FUNCTION" of the innermost frame of an error that is in one of the files, "" for none."""
    frames = [at for at in traceback.extract_tb(error.__traceback__) if at.filename in files]
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""


def python_path() -> str:
    """Return the PYTHONPATH of a child process: this project, then what is set."""
    return os.pathsep.join([str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])


def kill_group(pid: int) -> None:
    """SIGKILL a process that leads a group of its own, and what it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def run_child(parent: int, work: Callable[[int, int], None], prints: bool = True, expendable: bool = False) -> NoReturn:
    """Do work(requests, replies) as a process of the pid `parent`, and end with it, or when that closes its end.

    requests and replies are standard input and output as they were at the start; what the work prints goes to standard
    error, clean, or nowhere. expendable: the kernel's out-of-memory killer takes this process before others.
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
    sys.stdout, sys.stderr = CleanStream(1), CleanStream(2)
    with suppress(BrokenPipeError, KeyboardInterrupt):  # the caller is gone: nobody is left to answer
        work(requests, replies)
    os._exit(0)
