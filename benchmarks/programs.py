r"""Programs in sandboxes beside the bare processes that they cost without one: verdicts a second, and what a test adds.

    python -m benchmarks.programs [--seconds 6] [--no-write]

As many sandboxes as cores, as many bare processes at once. Python: one program with one test against `python -c pass`
(and `python -I -S -c pass`, which skips the user's set-up as a sandbox does), then one program with twenty tests. C++:
compile and run once, against plain g++ with the same flags and a run of the binary; then twenty tests of one program,
against the bare binary started as often. Writes the table of docs/programs.md.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.section import ROOT, describe_machine, write
from shared.types import Verdict
from verify.code import cpp
from verify.code.runner import run_tests
from verify.code.sandbox_pool import SandboxPool
from verify.code.tests import StdioTest

DOUBLE = "print(2 * int(input()))"
CPP_DOUBLE = "#include <bits/stdc++.h>\nint main() {{ int n; std::cin >> n; std::cout << 2 * n; }} // {}\n"
TESTS = [StdioTest(f"{n}\n", f"{2 * n}\n") for n in range(20)]
CORES = len(os.sched_getaffinity(0))


def rate(work: Callable[[int], None], seconds: float) -> float:
    """Calls of `work` a second, as many at once as there are cores; each call gets a number of its own."""
    numbers = itertools.count()
    for number in range(CORES):
        work(-1 - number)  # start what is started once
    begin = time.perf_counter()
    end = begin + seconds

    def go_on(_: int) -> int:
        done = 0
        while time.perf_counter() < end:
            work(next(numbers))
            done += 1
        return done

    with ThreadPoolExecutor(CORES) as threads:
        done = sum(threads.map(go_on, range(CORES)))
    return done / (time.perf_counter() - begin)


def bare(*argv: str) -> Callable[[int], None]:
    """A process without a sandbox."""

    def work(_: int) -> None:
        subprocess.run(argv, input=b"7\n", stdout=subprocess.DEVNULL, check=True)

    return work


def in_sandbox(sandboxes: SandboxPool, source: str, language: str, tests: list[StdioTest]) -> Callable[[int], None]:
    """A right program in a sandbox; `{}` in a C++ source becomes the number, so that each is compiled anew."""

    def work(number: int) -> None:
        text = source.format(number) if language == "cpp" else source
        found = run_tests(text, language, tests, pool=sandboxes)  # type: ignore[arg-type]
        assert found.verdict is Verdict.CORRECT, found

    return work


def bare_compile(folder: Path) -> Callable[[int], None]:
    """g++ as a user would call it, and one run of the binary."""

    def work(number: int) -> None:
        source, binary = folder / f"{number}.cpp", folder / f"{number}"
        source.write_text(CPP_DOUBLE.format(number))
        subprocess.run(["g++", *cpp.FLAGS, "-o", str(binary), str(source)], check=True)
        subprocess.run([str(binary)], input=b"7\n", stdout=subprocess.DEVNULL, check=True)

    return work


def measure(seconds: float) -> list[str]:
    """The table."""
    sandboxes = SandboxPool(CORES, shared_folder=cpp.cache_folder())
    lines = ["| what | in a sandbox, a second | bare, a second | ratio |", "|---|---|---|---|"]

    def row(name: str, ours: float, theirs: float, unit: str) -> None:
        lines.append(f"| {name} | {ours:.1f} {unit} | {theirs:.1f} | {ours / theirs:.2f} |")
        print(lines[-1], flush=True)

    pythons = rate(bare(sys.executable, "-c", "pass"), seconds)
    lean = rate(bare(sys.executable, "-I", "-S", "-c", "pass"), seconds)
    one = rate(in_sandbox(sandboxes, DOUBLE, "python", TESTS[:1]), seconds)
    row("Python, one test; `python -c pass`", one, pythons, "programs")
    row("the same; `python -I -S -c pass`", one, lean, "programs")
    twenty = 20 * rate(in_sandbox(sandboxes, DOUBLE, "python", TESTS), seconds)
    row("Python, twenty tests; `python -I -S -c pass`", twenty, lean,
        "tests")  # fmt: skip
    if cpp.compiler():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            compiled = rate(bare_compile(folder), 2 * seconds)
            tested = rate(in_sandbox(sandboxes, CPP_DOUBLE, "cpp", TESTS[:1]), 2 * seconds)
            row("C++, compile and one test; `g++`, run", tested, compiled, "programs")
            binary = rate(bare(str(folder / "0")), seconds)
            many = _tests_of_one_program(sandboxes, seconds)
            row("C++, a test of a compiled program; the bare binary", many, binary, "tests")
    sandboxes.close()
    return lines


def _tests_of_one_program(sandboxes: SandboxPool, seconds: float) -> float:
    """Tests a second once a program is compiled: twenty tests less one, over the time that they add."""
    took = {}
    for count in (1, 20):
        took[count] = CORES / rate(in_sandbox(sandboxes, CPP_DOUBLE, "cpp", TESTS[:count]), 2 * seconds)
    return CORES * 19 / max(took[20] - took[1], 1e-9)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="length of one measurement")
    parser.add_argument("--no-write", action="store_true", help="print the table only")
    options = parser.parse_args()
    head = (
        f"Measured on {datetime.date.today()} with `python -m benchmarks.programs` on {describe_machine()}; "
        f"{CORES} at once.\n\n"
    )
    table = "\n".join(measure(options.seconds)) + "\n"
    if not options.no_write:
        write(head + table, ROOT / "docs" / "programs.md")


if __name__ == "__main__":
    main()
