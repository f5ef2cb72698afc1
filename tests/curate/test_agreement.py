"""What becomes of tests, given what solutions print and return."""

from typing import Any

import pytest

from curate.agreement import (
    CONTEST,
    CONTRADICTION,
    DISAGREEMENT,
    KEPT,
    PYTHON,
    REPEATED,
    REPLACED,
    UNWRITABLE,
    as_json,
    check_tests,
    majority_output,
    same_input,
)
from verify.code.tests import CallTest, Output, Status, StdioTest

FAILED = Output(Status.ERROR)


def call(expected: Any, *args: Any) -> CallTest:
    return CallTest("f", list(args), expected)


def gave(*values: Any) -> list[list[Output]]:
    """[solutions, 1 test]: what each solution returns; FAILED for one that fails."""
    return [[value if isinstance(value, Output) else Output(Status.PASSED, value=value)] for value in values]


SKIPPED = Output(Status.SKIPPED)


@pytest.mark.parametrize(("values", "agreement", "what"), [
    ((6, 6, 6), 0.7, KEPT), ((7, 7, 7), 0.7, REPLACED), ((7, 7, 7, 6), 0.7, REPLACED), ((7, 7, 6), 0.7, DISAGREEMENT),
    ((7, 7, FAILED, 8), 0.7, DISAGREEMENT), ((FAILED, FAILED), 0.7, DISAGREEMENT), ((7, 7), 0.7, REPLACED),
    ((7, 6), 0.7, DISAGREEMENT), ((7,), 0.7, KEPT), ((FAILED,), 0.7, KEPT), ((), 0.7, KEPT),
    ((7, 7, 7, 6), 0.75, REPLACED), ((7, 7, 7, 6), 0.76, DISAGREEMENT), ((6, 6, SKIPPED), 0.7, KEPT),
    ((7, SKIPPED), 0.7, KEPT),  # one alone overrules nothing, and one that was not run has no say
])  # fmt: skip
def test_one_test_by_what_solutions_return(values, agreement, what):
    done = check_tests([call(6, 3)], gave(*values), agreement)[0]
    assert done.what == what and (done.test is None) == (what == DISAGREEMENT)
    if what == REPLACED:
        assert isinstance(done.test, CallTest) and done.test.expected == 7


def test_shares_are_of_all_solutions():
    best, share = majority_output(call(6, 3), [outputs[0] for outputs in gave(7, 7, FAILED, 8)])
    assert best is not None and best.value == 7 and share == 0.5
    assert majority_output(call(6, 3), [FAILED]) == (None, 0.0)


def test_contradictory_tests():
    tests = [call(7, 3), call(6, 3), call(6, 3), call(8, 4)]
    outputs = [[Output(Status.PASSED, value=value) for value in (6, 6, 6, 8)]] * 2
    assert [done.what for done in check_tests(tests, outputs, 0.7)] == [CONTRADICTION, KEPT, REPEATED, KEPT]
    assert [done.what for done in check_tests(tests, outputs[:1], 0.7)] == [CONTRADICTION, KEPT, REPEATED, KEPT]
    assert [done.what for done in check_tests(tests, [], 0.7)] == [CONTRADICTION, CONTRADICTION, CONTRADICTION, KEPT]


def test_inputs_are_told_apart_by_type():
    assert same_input(call(1, [1, 2]), call(2, [1, 2])) and same_input(call(1, {1, 2}), call(2, {2, 1}))
    assert not same_input(call(1, [1, 2]), call(1, (1, 2))) and not same_input(call(1, 1), call(1, True))
    assert same_input(StdioTest("3\n", "6"), StdioTest("3", "7"))


def test_judges_compare_output_and_python_compares_values():
    printed = [[Output(Status.PASSED, b"0.3333333 \n")], [Output(Status.PASSED, b"0.3333334\n")]]
    assert check_tests([StdioTest("1", "0.333333")], printed, 0.7)[0].what == KEPT
    assert check_tests([call(True, 1)], gave(1, 1), 0.7, PYTHON)[0].what == KEPT  # as assert f(1) == True does
    assert check_tests([call(True, 1)], gave(1, 1), 0.7, CONTEST)[0].what == REPLACED
    assert check_tests([call((1, 2), 1)], gave([1, 2], [1, 2]), 0.7, PYTHON)[0].what == REPLACED
    assert check_tests([call([1, 2], 1)], gave((1, 2), (1, 2)), 0.7, CONTEST)[0].what == KEPT


def test_outputs_that_cannot_be_stored():
    assert check_tests([call(6, 3)], gave({1, 2}, {1, 2}), 0.7)[0].what == UNWRITABLE
    assert check_tests([call(6, 3)], gave({1, 2}, {1, 2}), 0.7, PYTHON)[0].what == REPLACED
    assert check_tests([StdioTest("1", "6")], [[Output(Status.PASSED, b"\xff")]] * 2, 0.7)[0].what == DISAGREEMENT
    assert as_json((1, {"a": (2.5, None)})) == [1, {"a": [2.5, None]}]
    assert as_json({1: {2.5: 3}}) == {"1": {"2.5": 3}}
    for value in ({1}, {(1,): 2}, {1: 2, "a": 3}, {1: 2, "1": 3}, {True: 1}, {b"x": 1}, float("inf"), b"x"):
        with pytest.raises(ValueError):
            as_json(value)


def test_change_in_place():
    outputs = [[Output(Status.PASSED, value=None, changed=[[1, 2]])]] * 2
    assert check_tests([call([1, 2], [2, 1])], outputs, 0.7)[0].what == KEPT
    done = check_tests([call([2, 1], [2, 1])], outputs, 0.7)[0]
    assert done.what == REPLACED and isinstance(done.test, CallTest) and done.test.expected == [1, 2]
