"""Vets the tests of one row, in whatever form they are stored, and stores them in a form that can be read again.

Tests of input and output and of calls are compared by outputs (`vetting.py`); so are assertions `f(literals) ==
literal`, whose text is edited. All other assertions only hold or fail: they are kept if more than half of the solutions
pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from curate import vetting
from curate.asserts import Statement, edit, literal_of, read_code
from curate.solutions import Bench, Solution
from curate.stage import Fields
from curate.vetting import Checked, vet
from verify.code.exam import Assertions, CallTest, StdioTest, Test

PASSING = 0.5
"""share of the solutions, of which more must pass an assertion that only holds or fails"""
OPAQUE = "assertions dropped: most solutions fail"


class Exam(NamedTuple):
    """The tests of a row after vetting."""

    tests: Any
    """in stored form; the same object as in the row if nothing changed"""
    size: int
    """number of tests that are left"""
    passing: list[bool]
    """[solutions] whether each passes all tests that are left"""
    counts: Counter[str]
    """number of tests dropped and replaced, by reason"""


async def vet_row(given: Any, tests: list[Test], solutions: list[Solution], bench: Bench, agreement: float) -> Exam:
    """Vet the tests `tests` that were read from `given`. Raises UnrunnableTests, RunError."""
    first = tests[0]
    if not isinstance(first, Assertions):
        checked = [test for test in tests if not isinstance(test, Assertions)]
        return await _vet_checked(given, checked, solutions, bench, agreement)
    if len(tests) == 1 and first.language == "python":
        try:
            statements = read_code(first.code)
        except ValueError:
            statements = []
        if statements:
            return await _vet_statements(given, first, statements, solutions, bench, agreement)
    return await _vet_opaque(given, [test for test in tests if isinstance(test, Assertions)], solutions, bench)


async def _vet_checked(
    given: Any, tests: list[Checked], solutions: list[Solution], bench: Bench, agreement: float
) -> Exam:
    """Vet tests of input and output, or of calls."""
    outputs = await bench.outputs(solutions, tests)
    vetted = vet(tests, outputs, agreement)
    counts = Counter(done.what for done in vetted if done.what != vetting.KEPT)
    left = [(number, done.test) for number, done in enumerate(vetted) if done.test is not None]
    passing = [all(vetting.JUDGE.expects(test, found[number]) for number, test in left) for found in outputs]
    return Exam({"tests": [stored(test) for _, test in left]} if counts else given, len(left), passing, counts)


async def _vet_statements(
    given: Any, test: Assertions, statements: list[Statement], solutions: list[Solution], bench: Bench, agreement: float
) -> Exam:
    """Vet Python test code. With a prefix the program is not a module of its own, so its functions cannot be called."""
    calls = {place: one.call for place, one in enumerate(statements) if one.call is not None and not test.prefix}
    opaque = [place for place in range(len(statements)) if place not in calls]
    outputs = await bench.outputs(solutions, list(calls.values())) if calls else [[] for _ in solutions]
    held = await bench.passes(solutions, test, len(statements)) if opaque else []
    vetted = dict(zip(calls, vet(list(calls.values()), outputs, agreement, vetting.PYTHON), strict=True))
    counts = Counter(done.what for done in vetted.values() if done.what != vetting.KEPT)
    failing = {place for place in opaque if len(held) > 1 and _share(held, place) <= PASSING}
    counts[OPAQUE] += len(failing)
    dropped = failing | {place for place, done in vetted.items() if done.test is None}
    replaced = {place: _literal(done.test) for place, done in vetted.items() if done.what == vetting.REPLACED}
    passing = []
    for number in range(len(solutions)):
        kept = [
            vetting.PYTHON.expects(done.test, output)
            for done, output in zip(vetted.values(), outputs[number], strict=True)
            if done.test is not None
        ]
        passing.append(all(kept) and all(held[number][place] for place in opaque if place not in dropped))
    changed = _with_code(given, test, edit(test.code, statements, dropped, replaced)) if dropped or replaced else given
    return Exam(changed, len(statements) - len(dropped), passing, +counts)


async def _vet_opaque(given: Any, codes: list[Assertions], solutions: list[Solution], bench: Bench) -> Exam:
    """Vet test code that is run as a whole: C++, or several pieces of Python."""
    held = [await bench.passes(solutions, test, 1) for test in codes]
    left = [number for number, by_solution in enumerate(held) if len(solutions) < 2 or _share(by_solution, 0) > PASSING]
    passing = [all(held[number][solution][0] for number in left) for solution in range(len(solutions))]
    counts = +Counter({OPAQUE: len(codes) - len(left)})
    changed = [_code_row(codes[number]) for number in left] if counts else given
    return Exam(changed, sum(_count_assertions(codes[number]) for number in left), passing, counts)


def _share(held: Sequence[Sequence[bool]], place: int) -> float:
    return sum(by_solution[place] for by_solution in held) / len(held)


def _count_assertions(test: Assertions) -> int:
    return max(1, test.code.count("assert"))


def _literal(test: Checked | None) -> str:
    assert isinstance(test, CallTest)
    return literal_of(test.expected) or ""


def _code_row(test: Assertions) -> Fields:
    kind = "main" if test.language == "cpp" else "asserts"
    return {"type": kind, "code": test.code, "prefix": test.prefix, "entry_point": test.entry_point}


def _with_code(given: Any, test: Assertions, code: str) -> Any:
    """Return the stored tests with other test code, in the form they had."""
    if isinstance(given, dict) and "code" in given:
        kept = {name: value for name, value in given.items() if name not in ("test_setup_code", "setup")}
        return {**kept, "code": code}
    return {**_code_row(test), "code": code}


def stored(test: Test) -> Fields:
    """Return a test as JSON, in a form that `read_tests` accepts."""
    if isinstance(test, StdioTest):
        found: Fields = {"input": test.input, "output": test.output}
        if test.language:
            found["language"] = test.language
    else:
        assert isinstance(test, CallTest)
        found = {"function": test.function, "args": test.args, "expected": vetting.as_json(test.expected)}
        if test.kwargs:
            found["kwargs"] = test.kwargs
    return found if test.tolerance is None else {**found, "tolerance": test.tolerance}
