"""Planted faults: does a test fail when the product is wrong? `make mutants` plants each fault and writes the page.

A line of tests/planted_faults/ROOM.jsonl is one fault: in `file`, the text `right` (which stands there once) becomes
`wrong`, and `tests` (files or tests, as pytest takes them) must fail. `soak` marks tests that only `make soak` runs.
Where no test finds a fault, `reason` says why that is right.

    python -m tests.mutants                       all rooms; writes docs/results/mutants.md
    python -m tests.mutants trainer verify        these rooms; prints only
    python -m tests.mutants trainer --only loss   the faults whose file or text has "loss"
"""

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import psutil

from benchmarks.figures import describe_machine

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).with_name("planted_faults")
PAGE = ROOT / "docs" / "results" / "mutants.md"
LIMIT_S = 400.0
"""seconds after which the tests of one fault are ended: they hang, so the fault is seen"""
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "transformers", "sympy", "fastapi", "hypothesis", "pytest"])


ALL_S = 7200.0
"""seconds for all tests without a fault"""


class Fault(NamedTuple):
    """One wrong line, and the tests that must fail with it."""

    room: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]
    soak: bool = False
    reason: str = ""

    @property
    def name(self) -> str:
        return f"{self.file}: `{' '.join(self.right.split())}` becomes `{' '.join(self.wrong.split())}`"


class Outcome(NamedTuple):
    """What the tests said of one fault."""

    fault: Fault
    caught: bool
    seconds: float


def planted(rooms: Iterable[str] = ()) -> list[Fault]:
    """The faults of these rooms, of all where none is named."""
    files = [FOLDER / f"{room}.jsonl" for room in rooms] or sorted(FOLDER.glob("*.jsonl"))
    lines = [(file.stem, json.loads(line)) for file in files for line in file.read_text("utf-8").splitlines()]
    return [Fault(room, **{**fields, "tests": tuple(fields["tests"])}) for room, fields in lines]


def wrong_text(fault: Fault, root: Path = ROOT) -> str:
    """The file with its fault. ValueError where the right text does not stand there exactly once."""
    text = (root / fault.file).read_text(encoding="utf-8")
    if (count := text.count(fault.right)) != 1:
        raise ValueError(f"{fault.file}: {fault.right!r} stands there {count} times, not once")
    changed = text.replace(fault.right, fault.wrong)
    if fault.file.endswith(".py"):
        compile(changed, fault.file, "exec")
    return changed


def copy_checkout(folder: Path) -> Path:
    """Copy what git tracks, so that a fault never touches the checkout. Returns the folder."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (source := ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
    return folder


def run_pytest(root: Path, arguments: list[str], output: Path) -> None:
    """In a process of its own: end with pytest's exit code. The packages of this checkout make room for the copy's."""
    os.setsid()
    with output.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    for name in list(sys.modules):
        if (ROOT / name.partition(".")[0]).is_dir():
            del sys.modules[name]
    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root)
    sys.path[:] = [str(root), *(path for path in sys.path if path not in ("", str(ROOT)))]
    sys.dont_write_bytecode = True
    import pytest

    sys.exit(pytest.main(arguments))


def passes(tests: Sequence[str], soak: bool, root: Path, workers: int = 0, limit_s: float = LIMIT_S) -> bool:
    """Whether pytest ends with success there. What is slow to import is imported once, by multiprocessing's server."""
    arguments = ["-n", str(workers), "-x", "-q", "-p", "no:cacheprovider", *["--soak"] * soak, *tests]
    output = root.with_name("output.txt")
    process = PROCESSES.Process(target=run_pytest, args=(root, arguments, output))
    process.start()
    process.join(limit_s)
    if process.exitcode is None:
        for child in psutil.Process(process.pid).children(recursive=True):  # launches have sessions of their own
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        process.join()
        return False
    if process.exitcode > 2:
        raise ValueError(f"pytest {' '.join(tests)} ends with {process.exitcode}:\n{output.read_text()[-2000:]}")
    return process.exitcode == 0


def plant(fault: Fault, root: Path) -> Outcome:
    """Run the tests of a fault with the fault in place."""
    file, start = root / fault.file, time.monotonic()
    right = file.read_text(encoding="utf-8")
    file.write_text(wrong_text(fault, root), encoding="utf-8")
    try:
        return Outcome(fault, not passes(fault.tests, fault.soak, root), time.monotonic() - start)
    finally:
        file.write_text(right, encoding="utf-8")


def try_all(faults: Sequence[Fault], processes: int) -> list[Outcome]:
    """Plant each fault in turn, in as many copies of the checkout as processes. ValueError where tests fail already."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary, ThreadPoolExecutor(processes) as threads:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(processes):
            copies.put(copy_checkout(Path(temporary, str(number), "checkout")))

        @contextmanager
        def free_copy() -> Iterator[Path]:
            root = copies.get()
            try:
                yield root
            finally:
                copies.put(root)

        def outcome(fault: Fault) -> Outcome:
            with free_copy() as root:
                result = plant(fault, root)
            print(f"{'found   ' if result.caught else 'SURVIVES'} {result.seconds:5.1f} s  {fault.name}", flush=True)
            return result

        for soak in sorted({fault.soak for fault in faults}):
            tests = sorted({test for fault in faults if fault.soak == soak for test in fault.tests})
            with free_copy() as root:
                if not passes(tests, soak, root, processes, ALL_S):
                    text = root.with_name("output.txt").read_text(encoding="utf-8")
                    raise ValueError(f"a test fails without any fault:\n{text[-3000:]}")
        return list(threads.map(outcome, faults))


def page(outcomes: Sequence[Outcome]) -> str:
    """The page in docs/results: shares by room, survivors, and every fault with its result."""
    lines = [
        "# Planted faults\n",
        "`make mutants` plants one fault at a time into a copy of the checkout and runs tests that should notice it.\n",
        f"Made on {date.today()} with `make mutants` on {describe_machine()}.\n",
        "| room | faults | found by `make test` | found with `make soak` |",
        "|---|---|---|---|",
    ]
    for room in (*sorted({outcome.fault.room for outcome in outcomes}), ""):
        rows = [outcome for outcome in outcomes if room in ("", outcome.fault.room)]
        quick = sum(outcome.caught and not outcome.fault.soak for outcome in rows)
        caught = sum(outcome.caught for outcome in rows)
        shares = (f"{count} ({count / len(rows):.3f})" for count in (quick, caught))
        lines.append(f"| {room or 'all'} | {len(rows)} | {' | '.join(shares)} |")
    lines.append("\n## Not found\n")
    lines += [f"- {outcome.fault.name}: {outcome.fault.reason}" for outcome in outcomes if not outcome.caught] or [
        "None."
    ]
    lines += ["\n## All\n", "| fault | tests | result | seconds |", "|---|---|---|---|"]
    for fault, caught, seconds in outcomes:
        name = fault.name.replace("|", "\\|")
        lines.append(f"| {name} | `{' '.join(fault.tests)}` | {'found' if caught else 'not found'} | {seconds:.0f} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Exit code 1 where a fault that has no reason is not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("rooms", nargs="*", help="files of tests/planted_faults, without .jsonl")
    parser.add_argument("--only", default="", help="a part of a fault's file or text")
    parser.add_argument("--processes", type=int, default=2, help="copies of the checkout that are tried at a time")
    given = parser.parse_args(arguments)
    faults = [fault for fault in planted(given.rooms) if given.only in fault.name]
    outcomes = try_all(faults, given.processes)
    if not given.rooms and not given.only:
        PAGE.write_text(page(outcomes), encoding="utf-8")
    caught = sum(outcome.caught for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} planted faults are found")
    return int(any(not outcome.caught and not outcome.fault.reason for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
