"""Vets tests against the outputs of several solutions: which are kept, wrong or contradictory.

Source: Magistral (2506.10910), section 4.2: every solution is run on every test; tests on whose output the solutions
disagree are dropped; if they agree and the expected output differs, theirs replaces it. What the paper leaves open:
solutions that fail on an input count as disagreeing; one that was too slow twice is not run further and has no vote on
the remaining tests; a single solution overrules nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from curate.asserts import literal_of
from verify.code.exam import CallTest, StdioTest
from verify.code.output import same_output, same_value
from verify.code.result import Output, Status

Checked = StdioTest | CallTest
"""a test whose expected output can be compared and replaced"""
OVERRULING = 2
"""least number of solutions that can replace an expected output"""


class Vetted(NamedTuple):
    """The result of vetting one test."""

    test: Checked | None
    """the test, perhaps with another expected output; None if it is dropped"""
    what: str
    """"kept", or what happened to the test, for the report"""


class Rule(NamedTuple):
    """The functions that compare and store the outputs of one kind of test."""

    expects: Callable[[Checked, Output], bool]
    """whether an output is the one that a test expects"""
    with_output: Callable[[Checked, Output], Checked]
    """returns the test with another expected output"""
    storable: Callable[[Checked], bool]
    """whether a test's expected output can be written into the row"""


def _judge_expects(test: Checked, output: Output) -> bool:
    """Whether the output is the expected one, compared as online judges do (`verify/code/output.py`)."""
    if output.status is not Status.PASSED:
        return False
    if isinstance(test, StdioTest):
        return same_output(test.output, output.printed, test.tolerance)
    if same_value(test.expected, output.value, test.tolerance):
        return True
    return _in_place(test, output) and same_value(test.expected, output.changed[0], test.tolerance)


def _in_place(test: CallTest, output: Output) -> bool:
    """Whether the function changed its first argument instead of returning a value."""
    return output.value is None and test.expected is not None and bool(output.changed)


def _judge_with_output(test: Checked, output: Output) -> Checked:
    if isinstance(test, StdioTest):
        printed = output.printed.decode("utf-8", "replace")  # what is no UTF-8 agrees with nothing
        return StdioTest(test.input, printed, test.tolerance, test.language)
    value = output.changed[0] if _in_place(test, output) else output.value
    return CallTest(test.function, test.args, value, test.kwargs, test.tolerance)


def _python_expects(test: Checked, output: Output) -> bool:
    """Compare as `assert f(...) == literal` does: 1 equals True, a list no tuple. Both sides are plain values."""
    assert isinstance(test, CallTest)
    try:
        return output.status is Status.PASSED and bool(output.value == test.expected)
    except RecursionError:
        return False


def _python_with_output(test: Checked, output: Output) -> Checked:
    assert isinstance(test, CallTest)
    return CallTest(test.function, test.args, output.value, test.kwargs)


def _is_literal(test: Checked) -> bool:
    assert isinstance(test, CallTest)
    return literal_of(test.expected) is not None


def _is_json(test: Checked) -> bool:
    try:
        json.dumps(as_json(test.expected) if isinstance(test, CallTest) else test.output, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # a lone surrogate is a ValueError too
        return False
    return True


JUDGE = Rule(_judge_expects, _judge_with_output, _is_json)
PYTHON = Rule(_python_expects, _python_with_output, _is_literal)


def same_input(one: Checked, other: Checked) -> bool:
    """Whether two tests have the same input; types count (1 is not True, a tuple not a list)."""
    return _input(one) == _input(other)


def _input(test: Checked) -> str:
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


def _as_output(test: Checked) -> Output:
    """Return the output of a program for which the test's expected output is right."""
    if isinstance(test, StdioTest):
        return Output(Status.PASSED, test.output.encode("utf-8", "replace"))
    return Output(Status.PASSED, value=test.expected)


def majority(test: Checked, outputs: Sequence[Output], rule: Rule = JUDGE) -> tuple[Output | None, float]:
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


def vet(
    tests: Sequence[Checked], outputs: Sequence[Sequence[Output]], agreement: float, rule: Rule = JUDGE
) -> list[Vetted]:
    """Vet all tests; returns [tests] of results. `outputs`: [solutions, tests]."""
    found: list[Vetted] = []
    for number, test in enumerate(tests):
        kept = next((done.test for done in found if done.test is not None and same_input(done.test, test)), None)
        if kept is not None:
            found.append(Vetted(None, REPEATED if rule.expects(kept, _as_output(test)) else CONTRADICTION))
            continue
        contradicted = any(same_input(other, test) and not rule.expects(other, _as_output(test)) for other in tests)
        given = [found[number] for found in outputs if found[number].status is not Status.SKIPPED]
        found.append(_vet_one(test, given, agreement, contradicted, rule))
    return found


REPEATED = "repeated tests dropped"
CONTRADICTION = "contradictory tests dropped"
DISAGREEMENT = "tests dropped: solutions disagree"
UNWRITABLE = "tests dropped: the solutions' output cannot be stored"
REPLACED = "expected outputs replaced"
KEPT = "kept"


def _vet_one(test: Checked, given: Sequence[Output], agreement: float, contradicted: bool, rule: Rule) -> Vetted:
    """Vet one test that is the first with its input, or whose predecessors were dropped."""
    if not given:
        return Vetted(None, CONTRADICTION) if contradicted else Vetted(test, KEPT)
    best, share = majority(test, given, rule)
    if len(given) < OVERRULING:
        right = best is not None and rule.expects(test, best)
        return Vetted(None, CONTRADICTION) if contradicted and not right else Vetted(test, KEPT)
    if best is None or share < agreement:
        return Vetted(None, DISAGREEMENT)
    if rule.expects(test, best):
        return Vetted(test, KEPT)
    if contradicted:
        return Vetted(None, CONTRADICTION)  # its rival may be the right one, and stays; else none does
    changed = rule.with_output(test, best)
    return Vetted(changed, REPLACED) if rule.storable(changed) else Vetted(None, UNWRITABLE)


def as_json(value: Any) -> Any:
    """Return the value as JSON would restore it: tuples as lists. Raises ValueError if JSON cannot represent it."""
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("keys that are no text")
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number that is not finite")
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise ValueError(f"a value of type {type(value).__name__}")
