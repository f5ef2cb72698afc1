"""Programs in sandboxes beside the bare processes that they cost without one: verdicts a second, and what a test adds.

As many sandboxes as cores, as many bare processes at once. Python: one program with one test against `python -c pass`
(and `python -I -S -c pass`, which skips the user's set-up as a sandbox does), then one program with twenty tests. C++:
compile and run once, against plain g++ with the same flags and a run of the binary; then twenty tests of one program,
against the bare binary started as often. `seconds` is the length of one measurement.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.figures import Section, benchmark, measured_with
from benchmarks.report import table
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
    """Return the calls of `work` a second, as many at once as there are cores; each call gets a number of its own."""
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
    """Return the work of a process without a sandbox."""

    def work(_: int) -> None:
        subprocess.run(argv, input=b"7\n", stdout=subprocess.DEVNULL, check=True)

    return work


def in_sandbox(sandboxes: SandboxPool, source: str, language: str, tests: list[StdioTest]) -> Callable[[int], None]:
    """Return the work of a right program in a sandbox. `{}` in a C++ source becomes a number: each is compiled anew."""

    def work(number: int) -> None:
        text = source.format(number) if language == "cpp" else source
        found = run_tests(text, language, tests, pool=sandboxes)  # type: ignore[arg-type]
        assert found.verdict is Verdict.CORRECT, found

    return work


def bare_compile(folder: Path) -> Callable[[int], None]:
    """Return the work of g++ as a user would call it, and one run of the binary."""

    def work(number: int) -> None:
        source, binary = folder / f"{number}.cpp", folder / f"{number}"
        source.write_text(CPP_DOUBLE.format(number))
        subprocess.run(["g++", *cpp.FLAGS, "-o", str(binary), str(source)], check=True)
        subprocess.run([str(binary)], input=b"7\n", stdout=subprocess.DEVNULL, check=True)

    return work


def measure(seconds: float) -> Iterator[list[str]]:
    """Yield the rows of the table."""
    sandboxes = SandboxPool(CORES, shared_folder=cpp.cache_folder())

    def row(name: str, ours: float, theirs: float, unit: str) -> list[str]:
        print(f"{name}: {ours:.1f} {unit}, bare {theirs:.1f}", flush=True)
        return [name, f"{ours:.1f} {unit}", f"{theirs:.1f}", f"{ours / theirs:.2f}"]

    lean = rate(bare(sys.executable, "-I", "-S", "-c", "pass"), seconds)
    one = rate(in_sandbox(sandboxes, DOUBLE, "python", TESTS[:1]), seconds)
    yield row("Python, one test; `python -c pass`", one, rate(bare(sys.executable, "-c", "pass"), seconds), "programs")
    yield row("the same; `python -I -S -c pass`", one, lean, "programs")
    many = 20 * rate(in_sandbox(sandboxes, DOUBLE, "python", TESTS), seconds)
    yield row("Python, twenty tests; `python -I -S -c pass`", many, lean, "tests")
    if cpp.compiler():
        with tempfile.TemporaryDirectory() as name:
            compiled = rate(bare_compile(Path(name)), 2 * seconds)
            ours = rate(in_sandbox(sandboxes, CPP_DOUBLE, "cpp", TESTS[:1]), 2 * seconds)
            yield row("C++, compile and one test; `g++`, run", ours, compiled, "programs")
            binary = rate(bare(str(Path(name) / "0")), seconds)
            tests = _tests_of_one_program(sandboxes, seconds)
            yield row("C++, a test of a compiled program; the bare binary", tests, binary, "tests")
    sandboxes.close()


def _tests_of_one_program(sandboxes: SandboxPool, seconds: float) -> float:
    """Return the tests a second once a program is compiled: twenty tests less one, over the time that they add."""
    took = {}
    for count in (1, 20):
        took[count] = CORES / rate(in_sandbox(sandboxes, CPP_DOUBLE, "cpp", TESTS[:count]), 2 * seconds)
    return CORES * 19 / max(took[20] - took[1], 1e-9)


@benchmark(page="docs/programs.md")
def programs(quick: bool, seconds: float = 6.0) -> Iterator[Section]:
    """Measure all rows, one after the other."""
    head = ("what", "in a sandbox, a second", "bare, a second", "ratio")
    rows = table(head, *measure(min(seconds, 0.5) if quick else seconds))
    yield Section(f"{measured_with('programs')}; {CORES} at once.\n\n{rows}", mark="results")
