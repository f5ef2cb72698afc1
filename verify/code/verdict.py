"""The result of a program: the status of each test, the verdict, and the limits it ran under."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

import msgspec

from shared.types import Verdict

Language = Literal["python", "cpp"]


class Status(StrEnum):
    """How one test ended."""

    PASSED = "passed"
    WRONG = "wrong"
    ERROR = "error"
    """the program raised, or left with a status other than 0"""
    CRASH = "crash"
    """killed by a signal of its own"""
    TIMEOUT = "timeout"
    MEMORY = "memory"
    FLOOD = "output limit"
    COMPILE = "compile error"
    SKIPPED = "not run"
    """others before it took all their time, or the program does not compile"""


class Limits(msgspec.Struct, frozen=True):
    """What a program may use; the defaults are the paper's."""

    test_s: float = 4.0
    """per test, processor seconds and wall seconds alike"""
    memory_bytes: int = 300 << 20
    """address space of a test"""
    compile_s: float = 10.0
    """of each command of the compiler: one for a program with its own `main`; for C++ assertions two that compile (each
    once more with another reading where the first fails) and five that link, which take a fraction of a second"""
    max_tests: int = 20
    seed: str = ""
    """of (problem, group), e.g. "lcb-12/7": the same seed draws the same tests"""
    output_bytes: int = 4 << 20
    """a test may print so much, or four times what is expected where that is more"""
    max_timeouts: int = 2
    """after so many tests that took all their time the others are not run"""


class Output(msgspec.Struct, frozen=True, eq=False):
    """What a program did with one test's input; data of an untrusted program, in plain values."""

    status: Status
    """PASSED: it ended well, whatever it printed or returned"""
    printed: bytes = b""
    value: Any = None
    """what the function returned"""
    changed: list[Any] = []
    """its arguments afterwards, where it returned None"""


class ProgramVerdict(msgspec.Struct, frozen=True, eq=False):
    """The result of a program. Equals its Verdict, so `run_tests(...) == Verdict.CORRECT` reads as it should."""

    verdict: Verdict
    statuses: list[Status]
    """[tests drawn]"""
    reason: str = ""
    """one line for a human"""
    compile_s: float = 0.0
    cpu_s: float = 0.0
    """of all tests together"""

    @property
    def passed(self) -> int:
        """Number of tests passed."""
        return self.statuses.count(Status.PASSED)

    @property
    def share(self) -> float:
        """Share of the tests drawn that passed, 0 when there are none."""
        return self.passed / len(self.statuses) if self.statuses else 0.0

    @property
    def status(self) -> Status:
        """PASSED, or how the first test that failed ended."""
        return next((status for status in self.statuses if status is not Status.PASSED), Status.PASSED)

    @property
    def graded(self) -> bool:
        """True when the verdict says something about the program."""
        return self.verdict.graded

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return bool(self.verdict == other)
        if isinstance(other, ProgramVerdict):
            return msgspec.structs.astuple(self) == msgspec.structs.astuple(other)
        return NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.verdict)
