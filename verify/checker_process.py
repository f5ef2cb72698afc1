"""The child process that runs SymPy on behalf of a pool: one request in, one reply out, until its input closes.

Started as `python -m verify.checker_process PARENT_PID`. Frames as in `child_process.py`. First it
sends the `Reply` to a pair of its own, so that the pool's deadline never counts imports. It dies with the thread that
started it (PR_SET_PDEATHSIG), has 2 GB of address space, no core file, no file output, and nothing it prints reaches
the frames.
"""

from __future__ import annotations

import os
import resource
import sys

import msgspec

from shared.types import Verdict
from verify.child_process import frame, read_frames, run_child, write_all

MAX_ADDRESS_BYTES = 2 << 30


class Request(msgspec.Struct, array_like=True):
    """One pair of answers to compare."""

    ground_truth: str
    answer: str


class Reply(msgspec.Struct, array_like=True):
    """The verdict on a pair, and how much memory the worker holds now."""

    verdict: Verdict
    rss_bytes: int


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_BYTES, MAX_ADDRESS_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _rss_bytes() -> int:
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def serve(requests: int, replies: int) -> None:
    """Answer frames from descriptor `requests` on descriptor `replies` until end of file."""
    from verify.math.algebra import equal  # mpmath: only a worker pays for it
    from verify.math.calculus import load

    verdict = equal(r"\frac{1}{2}x+\sqrt{3}", r"\sqrt{3}+\frac{x}{2}")
    load()  # SymPy takes a second: within a request it would miss the deadline
    _limit()
    write_all(replies, frame(Reply(verdict, _rss_bytes())))
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
