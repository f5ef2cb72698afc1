"""The process of the answer checker alone: what it has loaded, its limits."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shared.child_process import Child
from shared.types import Verdict
from verify.checker_process import CheckerProcess

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAIRS = [
    ("\\sqrt{8}", "2\\sqrt{2}", Verdict.CORRECT),
    ("x", "y", Verdict.WRONG),
    ("\\foo{", "x", Verdict.UNVERIFIABLE),
    ("(", "x", Verdict.UNVERIFIABLE),
    ("x", "\\frac{1}", Verdict.WRONG),
]
CALCULUS = [
    ("\\frac{1}{3}", "\\int_0^1 x^2 dx"),
    ("\\frac{n(n+1)}{2}", "\\sum_{k=1}^{n} k"),
    ("1", "\\lim_{x\\to 0} \\frac{\\sin x}{x}"),
]


def test_pairs_are_compared_and_sympy_is_loaded_before() -> None:
    """The deadline begins at the request: an import that falls into it makes the first integrals time out."""

    async def work() -> None:
        child = Child(CheckerProcess, "a verifier process", "", supervise=False)
        first = await child.start()
        assert first.verdict is Verdict.CORRECT and 10 << 20 < first.rss_bytes < 1 << 30
        for ground_truth, answer, verdict in PAIRS:
            assert (await child.call(CheckerProcess.compare, ground_truth, answer)).verdict is verdict
        process = psutil.Process(child.pid)
        before = sum(process.cpu_times()[:2])
        for ground_truth, answer in CALCULUS:
            reply = await child.call(CheckerProcess.compare, ground_truth, answer)
            assert reply.verdict is Verdict.CORRECT
        used = sum(process.cpu_times()[:2]) - before
        await child.end()
        assert used < 0.5, f"{used:.2f} s of CPU for three short questions: SymPy was loaded within them"

    asyncio.run(work())


def test_other_parent_than_announced_ends_it_at_once() -> None:
    name = "verify.checker_process:CheckerProcess"
    command = [sys.executable, "-m", "shared.served", name, str(os.getppid()), "2"]
    done = subprocess.run(command, cwd=ROOT, input=b"", capture_output=True, timeout=50)
    assert done.returncode == 1 and done.stdout == b""


def test_memory_is_limited() -> None:
    program = (
        "from verify.checker_process import limit_memory\nlimit_memory()\n"
        "try:\n    bytearray(3 << 30)\nexcept MemoryError:\n    raise SystemExit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 7
