"""Grades a program on the tests of a programming problem: it runs in a box, its outputs are compared outside of it.

`run_tests` is the blocking entry, `grade` the asynchronous one (threads wait, the event loop does not); `outputs`
returns what a program prints or returns without comparing it, to vet tests. The candidate shares no process, descriptor
or namespace with the grader; it never holds an expected output. A test may take 4 s and 300 MB, compiling 10 s; at most
20 tests are drawn by a seed of (problem, group), and a program is right when every test drawn passed.
Source: Magistral (2506.10910), section 3.2; what it leaves open (outputs compared as judges do, exit status 0
required) is settled in `output.py` and here.

Verdicts: CORRECT and WRONG grade the program, whatever it did wrong (`status` of the result says what: too slow, too
much memory, ...). SANDBOX_REFUSED, CRASH (a box was lost twice) and UNVERIFIABLE (the tests cannot be run) do not.

What a hostile program can still do: in function tests and assertions it may answer from arguments it has seen (a lookup
table is a solution); in C++ assertions see `cpp.py`. It can tell one host from another by time. Python assertions run
in a box of their own, so that exiting early, markers, patched graders and objects equal to everything come to nothing;
only objects of the program's own classes, which must stay with it, answer for their own content.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from shared.errors import DataError, RunError
from shared.types import Verdict
from verify.code import cpp
from verify.code.exam import Assertions, CallTest, StdioTest, draw, language_of, read_tests
from verify.code.result import Language, Limits, Output, Result, Status
from verify.code.sandbox.client import Lost, SandboxRefused
from verify.code.seats import Seat, Seats
from verify.code.sitting import Sitting, cpp_works

__all__ = [
    "Assertions", "CallTest", "Limits", "Output", "Result", "Status", "StdioTest", "grade", "isolation", "outputs",
    "run_outputs", "run_tests",
]  # fmt: skip

_Found = TypeVar("_Found")
MAX_SOURCE_BYTES = 1 << 20
_seats: Seats | None = None
_seats_lock = threading.Lock()


def default_seats() -> Seats:
    """Return the boxes of this process, which are made at first use and end with it."""
    global _seats
    with _seats_lock:
        if _seats is None or _seats.pid != os.getpid():
            _seats = Seats(shared_folder=cpp.cache_folder())
        return _seats


def isolation(seats: Seats | None = None) -> str:
    """Return one line that says what the boxes of this host isolate. Raises SandboxRefused."""
    with (seats or default_seats()).take() as seat:
        return seat.candidate.isolation.line()


def _read_limits(limits: Limits | Mapping[str, Any] | None) -> Limits:
    if limits is None or isinstance(limits, Limits):
        return limits or Limits()
    wrong = set(limits) - set(Limits.__struct_fields__)
    if wrong:
        raise DataError(f"unknown limit {sorted(wrong)[0]!r}: known are {', '.join(Limits.__struct_fields__)}")
    return msgspec.convert(dict(limits), Limits)


def run_tests(
    source: str,
    language: Language,
    tests: Any,
    limits: Limits | Mapping[str, Any] | None = None,
    *,
    seats: Seats | None = None,
) -> Result:
    """Run a program on tests (see `exam.read_tests` for their shapes) and return the verdict with its details.

    Blocks until done, at most about compile_s + max_timeouts * 4 * test_s on a busy host, plus the wait for a free box.
    Raises DataError when the tests are not understood, RunError when `seats` is closed.
    """
    limits = _read_limits(limits)
    _check_language(language)
    exam = draw(read_tests(tests), limits.max_tests, limits.seed)
    failed = [Status.SKIPPED] * len(exam)
    wanted = language_of(exam)
    if wanted and wanted != language:
        return Result(Verdict.WRONG, failed, f"the program is in {language}, the tests are for {wanted}")
    text = _plain(source)
    if text is None:
        return Result(Verdict.WRONG, [Status.ERROR, *failed[1:]], "the source is too long or has NUL characters")

    def sit(seat: Seat) -> Result:
        if language == "cpp" and (missing := cpp_works(seat)):
            return Result(Verdict.UNVERIFIABLE, failed, missing)
        return Sitting(seat, limits).run(text, language, exam)

    try:
        return _in_a_seat(seats, sit)
    except SandboxRefused as error:
        return Result(Verdict.SANDBOX_REFUSED, failed, str(error))
    except Lost as error:
        return Result(Verdict.CRASH, failed, str(error))


def run_outputs(
    source: str, language: Language, tests: Any, limits: Limits | None = None, *, seats: Seats | None = None
) -> list[Output]:
    """Return [tests] what a program prints or returns on the input of each test; `limits.max_tests` is ignored.

    Raises DataError when the tests are not understood or are assertions, SandboxRefused, and RunError when the host
    runs no C++ or the sandbox is lost twice.
    """
    _check_language(language)
    exam, held = read_tests(tests), _read_limits(limits)
    if any(isinstance(test, Assertions) for test in exam):
        raise DataError("assertions have no outputs: give tests of input and output, or of calls")
    text = _plain(source)
    if text is None or (language_of(exam) or language) != language:
        return [Output(Status.ERROR)] * len(exam)

    def sit(seat: Seat) -> list[Output]:
        if language == "cpp" and (missing := cpp_works(seat)):
            raise RunError(missing)
        return Sitting(seat, held).outputs(text, language, exam)

    try:
        return _in_a_seat(seats, sit)
    except Lost as error:
        raise RunError(str(error)) from error


def _check_language(language: str) -> None:
    if language not in ("python", "cpp"):
        raise DataError(f'language "{language}" is not run here: give "python" or "cpp"')


def _plain(source: str) -> str | None:
    """Return the source as a box accepts it, None when it is too long or holds NUL characters."""
    data = source.encode("utf-8", "replace")
    if len(data) > MAX_SOURCE_BYTES or b"\0" in data:
        return None
    return data.decode().removeprefix("\ufeff")


def _in_a_seat(seats: Seats | None, work: Callable[[Seat], _Found]) -> _Found:
    """Return work(seat), retried once when the box is lost. Raises SandboxRefused, and Lost the second time."""
    reason = ""
    for _ in range(2):
        try:
            with (seats or default_seats()).take() as seat:
                return work(seat)
        except Lost as error:
            reason = f"the sandbox was lost twice {error}".strip()
    raise Lost(reason)


async def grade(
    source: str, language: Language, tests: Any, limits: Limits | None = None, *, seats: Seats | None = None
) -> Result:
    """As `run_tests`, for callers with an event loop: as many at once as there are boxes, the others queue."""
    held = seats or default_seats()
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(held.threads, lambda: run_tests(source, language, tests, limits, seats=held))


async def outputs(
    source: str, language: Language, tests: Any, limits: Limits | None = None, *, seats: Seats | None = None
) -> list[Output]:
    """As `run_outputs`, for callers with an event loop."""
    held = seats or default_seats()
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(held.threads, lambda: run_outputs(source, language, tests, limits, seats=held))
