"""The child process alone: its frames, its limits, its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from shared.types import Verdict
from verify.checker_process import Reply, Request
from verify.child_process import HEADER, frame

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

CALCULUS = [
    ("\\frac{1}{3}", "\\int_0^1 x^2 dx"),
    ("\\frac{n(n+1)}{2}", "\\sum_{k=1}^{n} k"),
    ("1", "\\lim_{x\\to 0} \\frac{\\sin x}{x}"),
]


def run_worker(data: bytes, parent: int) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "verify.checker_process", str(parent)]
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
    done = run_worker(b"".join(frame(Request(ground_truth, answer)) for ground_truth, answer in pairs), os.getpid())
    assert done.returncode == 0
    first, *rest = read_frames(done.stdout)
    assert msgspec.msgpack.decode(first, type=Reply).verdict is Verdict.CORRECT  # of its own pair
    replies = [msgspec.msgpack.decode(body, type=Reply) for body in rest]
    assert [reply.verdict for reply in replies] == [
        Verdict.CORRECT,
        Verdict.WRONG,
        Verdict.UNVERIFIABLE,
        Verdict.UNVERIFIABLE,
        Verdict.WRONG,
    ]
    assert all(10 << 20 < reply.rss_bytes < 1 << 30 for reply in replies)


def test_sympy_is_loaded_before_ready() -> None:
    """The deadline begins at the request: an import that falls into it makes the first integrals time out."""
    command = [sys.executable, "-m", "verify.checker_process", str(os.getpid())]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdout.read(HEADER.unpack(worker.stdout.read(HEADER.size))[0])
        process = psutil.Process(worker.pid)
        before = sum(process.cpu_times()[:2])
        for ground_truth, answer in CALCULUS:
            worker.stdin.write(frame(Request(ground_truth, answer)))
            worker.stdin.flush()
            reply = worker.stdout.read(HEADER.unpack(worker.stdout.read(HEADER.size))[0])
            assert msgspec.msgpack.decode(reply, type=Reply).verdict is Verdict.CORRECT
        used = sum(process.cpu_times()[:2]) - before
        worker.stdin.close()
    assert used < 0.5, f"{used:.2f} s of CPU for three short questions: SymPy was loaded within them"


def test_cut_frame_ends_it_quietly() -> None:
    assert run_worker(frame(Request("x", "y"))[:-1], os.getpid()).returncode == 0


def test_other_parent_than_announced_ends_it_at_once() -> None:
    done = run_worker(b"", 1)
    assert done.returncode == 1 and done.stdout == b""


def test_memory_is_limited() -> None:
    program = (
        "from verify.checker_process import _limit\n_limit()\n"
        "try:\n    bytearray(3 << 30)\nexcept MemoryError:\n    raise SystemExit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 7
