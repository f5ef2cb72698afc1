"""The child process alone: its frames, its limits, its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from shared.types import Verdict
from verify.worker import HEADER, Ready, Reply, Request, frame

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def run_worker(data: bytes, parent: int) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "verify.worker", str(parent)]
    return subprocess.run(command, cwd=ROOT, input=data, capture_output=True, timeout=50)


def read_frames(data: bytes) -> list[bytes]:
    frames = []
    while data:
        end = HEADER.size + HEADER.unpack_from(data)[0]
        frames.append(data[HEADER.size : end])
        data = data[end:]
    return frames


def test_ready_then_one_reply_a_request_and_exit_at_end_of_input() -> None:
    pairs = [("\\sqrt{8}", "2\\sqrt{2}"), ("x", "y"), ("\\foo{", "x"), ("(", "x"), ("x", "\\frac{1}")]
    done = run_worker(b"".join(frame(Request(gold, answer)) for gold, answer in pairs), os.getpid())
    assert done.returncode == 0
    first, *rest = read_frames(done.stdout)
    assert msgspec.msgpack.decode(first, type=Ready).pid > 0
    replies = [msgspec.msgpack.decode(body, type=Reply) for body in rest]
    assert [reply.verdict for reply in replies] == [
        Verdict.CORRECT,
        Verdict.WRONG,
        Verdict.UNVERIFIABLE,
        Verdict.UNVERIFIABLE,
        Verdict.WRONG,
    ]
    assert all(10 << 20 < reply.rss_bytes < 1 << 30 for reply in replies)


def test_cut_frame_ends_it_quietly() -> None:
    assert run_worker(frame(Request("x", "y"))[:-1], os.getpid()).returncode == 0


def test_other_parent_than_announced_ends_it_at_once() -> None:
    done = run_worker(b"", 1)
    assert done.returncode == 1 and done.stdout == b""


def test_memory_is_limited() -> None:
    program = (
        "from verify.worker import _limit\n_limit()\n"
        "try:\n    bytearray(3 << 30)\nexcept MemoryError:\n    raise SystemExit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 7
