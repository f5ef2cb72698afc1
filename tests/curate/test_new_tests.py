"""Inputs of tests that are made: within the bounds and the shape of those that are there, and the same again."""

from __future__ import annotations

import re

from curate.programs import proposed, variants
from verify.code.tests import StdioTest


def test_variants_change_whole_numbers_within_the_bounds_of_all_inputs() -> None:
    inputs = ["3 x1 -2\n1.5 word\n", "9\n"]
    found = variants(inputs, 8, "p")
    assert len(set(found)) == len(found) == 8 and not set(found) & set(inputs)
    for text in found:
        assert re.fullmatch(r"-?\d+ x1 -?\d+\n1\.5 word\n|-?\d+\n", text), text
        assert all(-2 <= int(number) <= 9 for number in text.replace("x1", "").replace("1.5", "").split()[:-1])
    assert variants(inputs, 8, "p") == found != variants(inputs, 8, "q")
    assert variants(["word"], 3, "p") == [] and variants([], 3, "p") == []
    assert variants(["5\n"], 3, "p") == [], "one number alone has no other within its bounds"


def test_what_is_proposed_comes_first_and_known_inputs_do_not_come_again() -> None:
    tests = [StdioTest("1 5\n", "6\n", 1e-3, "cpp")]
    found = proposed(tests, ["2 2\n", 7, "1 5\n", "2 2\n"], 2, "p")
    assert found[0] == StdioTest("2 2\n", "", 1e-3, "cpp") and len(found) == 3
    assert {test.input for test in found}.isdisjoint({"1 5\n"})
