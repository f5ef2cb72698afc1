"""Checks tests against the outputs of several solutions: which are kept, wrong or contradictory.

Source: Magistral (2506.10910), section 4.2: every solution is run on every test; tests on whose output the solutions
disagree are dropped; if they agree and the expected output differs, theirs replaces it. What the paper leaves open:
solutions that fail on an input count as disagreeing; one that was too slow twice is not run further and has no vote on
the remaining tests; a single solution overrules nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from curate.assertions import literal_of
from verify.code.output import same_output
from verify.code.readings import MEANINGS, expected_values, fitting_meanings, number_keys, returned
from verify.code.tests import CallTest, Output, Status, StdioTest

ComparableTest = StdioTest | CallTest
"""a test whose expected output can be compared and replaced"""
OVERRULING = 2
"""least number of solutions that can replace an expected output"""
REPEATED = "repeated tests dropped"
CONTRADICTION = "contradictory tests dropped"
DISAGREEMENT = "tests dropped: solutions disagree"
UNWRITABLE = "tests dropped: the solutions' output cannot be stored"
REPLACED = "expected outputs replaced"
KEPT = "kept"


class CheckedTest(NamedTuple):
    """What became of one test."""

    test: ComparableTest | None
    """the test, perhaps with another expected output; None if it is dropped"""
    what: str
    """"kept", or what happened to the test, for the report"""


class ContestRule:
    """Compares outputs as programming contests do (`verify/code/output.py`), and stores them as JSON."""

    def expects(self, test: ComparableTest, output: Output) -> bool:
        """Whether an output is the one that a test expects."""
        if output.status is not Status.PASSED:
            return False
        if isinstance(test, StdioTest):
            return same_output(test.output, output.printed, test.tolerance)
        return returned(output, test.expected, test.tolerance)

    def with_output(self, test: ComparableTest, output: Output) -> ComparableTest:
        """Return the test with another expected output."""
        if isinstance(test, StdioTest):
            printed = output.printed.decode("utf-8", "replace")  # what is no UTF-8 agrees with nothing
            return StdioTest(test.input, printed, test.tolerance, test.language)
        value = output.changed[0] if _changed_in_place(test, output) else output.value
        return CallTest(test.function, test.args, value, test.kwargs, test.tolerance)

    def storable(self, test: ComparableTest) -> bool:
        """Whether a test's expected output can be written into the row."""
        expected = test.output if isinstance(test, StdioTest) else test.expected
        try:
            json.dumps(as_json(expected), ensure_ascii=False).encode()
        except (ValueError, RecursionError):  # a lone surrogate is a ValueError too
            return False
        return True


class PythonRule(ContestRule):
    """Compares as `assert f(...) == literal` does (1 equals True, a list no tuple), and stores literals."""

    def expects(self, test: ComparableTest, output: Output) -> bool:
        """Whether the value returned, which is plain, equals the literal."""
        assert isinstance(test, CallTest)
        try:
            return output.status is Status.PASSED and bool(output.value == test.expected)
        except RecursionError:
            return False

    def with_output(self, test: ComparableTest, output: Output) -> ComparableTest:
        """Return the test with another literal."""
        assert isinstance(test, CallTest)
        return CallTest(test.function, test.args, output.value, test.kwargs)

    def storable(self, test: ComparableTest) -> bool:
        """Whether the expected value has a literal."""
        assert isinstance(test, CallTest)
        return literal_of(test.expected) is not None


CONTEST, PYTHON = ContestRule(), PythonRule()


def _changed_in_place(test: CallTest, output: Output) -> bool:
    """Whether the function changed its first argument instead of returning a value."""
    return output.value is None and test.expected is not None and bool(output.changed)


def same_input(first: ComparableTest, other: ComparableTest) -> bool:
    """Whether two tests have the same input; types count (1 is not True, a tuple not a list)."""
    return _input(first) == _input(other)


def _input(test: ComparableTest) -> str:
    if isinstance(test, StdioTest):
        return test.input.rstrip()
    return f"{test.function}{_typed(test.args)}{_typed(test.kwargs)}"


def _typed(value: Any) -> str:
    """Return a text that distinguishes values and types; sets and dicts in a fixed order."""
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({','.join(map(_typed, value))})"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}({','.join(sorted(map(_typed, value)))})"
    if isinstance(value, dict):
        return f"dict({','.join(sorted(f'{_typed(key)}:{_typed(item)}' for key, item in value.items()))})"
    return f"{type(value).__name__}:{value!r}"


def _as_output(test: ComparableTest) -> Output:
    """Return the output of a program for which the test's expected output is right."""
    if isinstance(test, StdioTest):
        return Output(Status.PASSED, test.output.encode("utf-8", "replace"))
    return Output(Status.PASSED, value=test.expected)


def majority_output(
    test: ComparableTest, outputs: Sequence[Output], rule: ContestRule = CONTEST
) -> tuple[Output | None, float]:
    """Return the output that most solutions give, and their share of all; (None, 0) if every one fails."""
    groups = [[output for output in outputs if rule.expects(test, output)]]  # small differences do not add up
    for output in outputs:
        if output.status is not Status.PASSED or rule.expects(test, output):
            continue
        for group in groups:
            if group and rule.expects(rule.with_output(test, group[0]), output):
                group.append(output)
                break
        else:
            groups.append([output])
    largest = max(groups, key=len)
    return (largest[0], len(largest) / len(outputs)) if largest else (None, 0.0)


def as_meant(tests: Sequence[ComparableTest], outputs: Sequence[Sequence[Output]]) -> list[ComparableTest]:
    """Return the tests with the meaning of their expected values that most outputs have (`verify/code/readings.py`);
    as they are where no output has any. `outputs`: [solutions, tests]."""
    counts = [0] * MEANINGS
    for by_test in outputs:
        for test, output in zip(tests, by_test, strict=True):
            if isinstance(test, CallTest) and output.status is Status.PASSED:
                for meaning in fitting_meanings(test, output):
                    counts[meaning] += 1
    if not any(counts):
        return list(tests)
    meaning = counts.index(max(counts))
    return [
        msgspec.structs.replace(test, expected=expected_values(test)[meaning], wrapped=False)
        if isinstance(test, CallTest)
        else test
        for test in tests
    ]


def check_tests(
    tests: Sequence[ComparableTest], outputs: Sequence[Sequence[Output]], agreement: float, rule: ContestRule = CONTEST
) -> list[CheckedTest]:
    """Check all tests; returns [tests] of results. `outputs`: [solutions, tests]; agreement: share of the solutions."""
    results: list[CheckedTest] = []
    for number, test in enumerate(tests):
        kept = next((done.test for done in results if done.test is not None and same_input(done.test, test)), None)
        if kept is not None:
            results.append(CheckedTest(None, REPEATED if rule.expects(kept, _as_output(test)) else CONTRADICTION))
            continue
        contradicted = any(same_input(other, test) and not rule.expects(other, _as_output(test)) for other in tests)
        given = [by_test[number] for by_test in outputs if by_test[number].status is not Status.SKIPPED]
        results.append(_check_first(test, given, agreement, contradicted, rule))
    return results


def _check_first(
    test: ComparableTest, given: Sequence[Output], agreement: float, contradicted: bool, rule: ContestRule
) -> CheckedTest:
    """Check a test that is the first with its input, or whose predecessors were dropped."""
    best, share = majority_output(test, given, rule) if given else (None, 0.0)
    right = best is not None and rule.expects(test, best)
    if len(given) < OVERRULING:
        return CheckedTest(None, CONTRADICTION) if contradicted and not right else CheckedTest(test, KEPT)
    if best is None or share < agreement:
        return CheckedTest(None, DISAGREEMENT)
    if right:
        return CheckedTest(test, KEPT)
    if contradicted:
        return CheckedTest(None, CONTRADICTION)  # its rival may be the right one, and stays; else none does
    changed = rule.with_output(test, best)
    return CheckedTest(changed, REPLACED) if rule.storable(changed) else CheckedTest(None, UNWRITABLE)


def stored(test: ComparableTest) -> dict[str, Any]:
    """Return a test as JSON, in a form that `read_tests` accepts."""
    fields: dict[str, Any]
    if isinstance(test, StdioTest):
        fields = {"input": test.input, "output": test.output}
        if test.language:
            fields["language"] = test.language
    else:
        name = "output" if test.wrapped else "expected"
        fields = {"function": test.function, "args": test.args, name: as_json(test.expected)}
        if test.kwargs:
            fields["kwargs"] = test.kwargs
    return fields if test.tolerance is None else {**fields, "tolerance": test.tolerance}


def as_json(value: Any) -> Any:
    """Return the value as `read_tests` restores it from JSON: tuples as lists, numbers for keys as text. Raises
    ValueError if JSON cannot represent it."""
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        texts = {json.dumps(key) if type(key) in (int, float) else key: as_json(item) for key, item in value.items()}
        if not all(isinstance(key, str) for key in value) and number_keys(texts) != list(value):
            raise ValueError("keys that JSON does not give back")
        return texts
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number that is not finite")
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise ValueError(f"a value of type {type(value).__name__}")
