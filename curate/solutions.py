"""Reads the reference solutions of a programming problem's row, and runs them on the row's tests."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from curate.stage import Fields
from shared.errors import RunError
from shared.types import Verdict
from verify import program
from verify.code.exam import Assertions, Test, language_of
from verify.code.result import Language, Limits, Output, Result, Status
from verify.code.seats import Seats
from verify.fence import first_program

_CPP = re.compile(r"^\s*#\s*include\b|\bint\s+main\s*\(|\busing\s+namespace\b", re.MULTILINE)
_NAMES: dict[str, Language] = {"python": "python", "python3": "python", "py": "python", "cpp": "cpp", "c++": "cpp"}


class Solution(NamedTuple):
    """One reference solution."""

    source: str
    language: Language
    given: Any
    """the entry in the row, unchanged"""


def read_solutions(fields: Fields, exam: Sequence[Test]) -> list[Solution]:
    """Read the programs of "solutions" (a list) and "solution": texts, or objects with "code" and perhaps "language".

    A Markdown block is unwrapped. Without a stated language, that of the tests is assumed, else C++ if the text looks
    like it, else Python.
    """
    given = fields.get("solutions")
    listed = list(given) if isinstance(given, list) else []
    if isinstance(fields.get("solution"), (str, dict)):
        listed.append(fields["solution"])
    found: list[Solution] = []
    for item in listed:
        source, named = _read_item(item)
        if source.strip() and all(source != other.source for other in found):
            found.append(Solution(source, named or _guess(source, exam), item))
    return found


def _read_item(item: Any) -> tuple[str, Language | None]:
    named: Language | None = None
    if isinstance(item, Mapping):
        named = _NAMES.get(str(item.get("language", "")).lower())
        item = next((item[name] for name in ("code", "source", "solution", "program") if name in item), "")
    if not isinstance(item, str):
        return "", None
    fenced = first_program(item) if "```" in item else None
    if fenced is not None:
        return fenced.source, named or _NAMES.get(fenced.language)
    return item, named


def _guess(source: str, exam: Sequence[Test]) -> Language:
    taken = language_of(list(exam))
    return _NAMES[taken] if taken else "cpp" if _CPP.search(source) else "python"


class Bench:
    """Runs solutions in sandboxes."""

    def __init__(self, seats: Seats, limits: Limits) -> None:
        self.seats, self.limits = seats, limits

    async def outputs(self, solutions: Sequence[Solution], tests: Sequence[Test]) -> list[list[Output]]:
        """Return [solutions, tests] of what each prints or returns. Raises SandboxRefused, RunError."""
        return [
            await program.outputs(one.source, one.language, list(tests), self.limits, seats=self.seats)
            for one in solutions
        ]

    async def passes(self, solutions: Sequence[Solution], test: Assertions, units: int) -> list[list[bool]]:
        """Return [solutions, units] whether each assertion of a test code holds. Raises RunError, UnrunnableTests."""
        found: list[list[bool]] = []
        for one in solutions:
            result = await program.grade(one.source, one.language, [test], self.limits, seats=self.seats)
            if result.verdict is Verdict.UNVERIFIABLE:
                raise UnrunnableTests(result.reason)
            if not result.graded and result.verdict is not Verdict.CRASH:
                raise RunError(result.reason)
            found.append(_units(result, units))
        return found


class UnrunnableTests(Exception):
    """Raised for test code that cannot be run, whatever the program."""


def _units(result: Result, units: int) -> list[bool]:
    """Return [units] whether each held; those without a status did not, unless the whole verdict is correct."""
    if result.verdict is Verdict.CORRECT:
        return [True] * units
    held = [status is Status.PASSED for status in result.statuses]
    return [position < len(held) and held[position] for position in range(units)]
