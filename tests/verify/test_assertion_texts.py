"""Python test code as data sets have it: unittest, pytest, check(candidate), swallowed failures, objects, streams."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import DataError
from shared.types import Verdict
from tests.tables import read_table
from verify.code.assertion_text import check_assertion_text
from verify.code.runner import run_tests
from verify.code.sandbox_pool import SandboxPool
from verify.code.tests import Limits, read_tests

ROWS = read_table("verify/assertion_texts")
"""of most kinds, a program that is right and one that is wrong; cheats pass nowhere, and nobody can check some"""
KINDS = list(dict.fromkeys(row["kind"] for row in ROWS if "right" in row))


@pytest.mark.slow
@pytest.mark.timeout(360)
@pytest.mark.parametrize("kind", KINDS)
def test_right_programs_pass_and_wrong_ones_fail(sandboxes: SandboxPool, kind: str) -> None:
    for row in (row for row in ROWS if row["kind"] == kind):
        right = run_tests(row["right"], "python", row["tests"], pool=sandboxes)
        assert right.verdict is Verdict.CORRECT, (row, right)
        wrong = run_tests(row["wrong"], "python", row["tests"], pool=sandboxes)
        assert wrong.verdict is Verdict.WRONG and wrong.reason, (row, wrong)


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_no_cheat_passes(sandboxes: SandboxPool) -> None:
    for row in (row for row in ROWS if row["kind"] == "cheat"):
        outcome = run_tests(row["program"], "python", row["tests"], Limits(test_s=1.0), pool=sandboxes)
        assert outcome.verdict in (Verdict.WRONG, Verdict.UNVERIFIABLE), (row, outcome)


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_what_nobody_can_check_is_unverifiable(sandboxes: SandboxPool) -> None:
    for row in (row for row in ROWS if row["kind"] == "unverifiable"):
        outcome = run_tests(row["program"], "python", row["tests"], pool=sandboxes)
        assert outcome.verdict is Verdict.UNVERIFIABLE and outcome.reason, (row, outcome)


@pytest.mark.parametrize("row", [row for row in ROWS if row["kind"] == "refused"])
def test_tests_that_grade_no_program_are_refused_when_read(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=row["words"]):
        read_tests(row["tests"])


def test_no_row_of_public_sets_is_refused(data_folder: Path) -> None:
    for name in ("mbpp.jsonl.gz", "humaneval.jsonl"):
        path = data_folder / name
        with gzip.open(path, "rt") if name.endswith(".gz") else path.open() as lines:
            for row in map(json.loads, lines):
                check_assertion_text(row["tests"]["code"], row["tests"].get("entry_point", ""))


@pytest.mark.slow
def test_the_share_of_tests_counts_each_case(sandboxes: SandboxPool) -> None:
    case = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(0), 0)\n"
    tests = f"{case}    def test_b(self): self.assertEqual(f(3), 6)\nif __name__ == '__main__':\n    unittest.main()"
    found = run_tests("def f(x): return x", "python", tests, pool=sandboxes)
    assert found.share == 0.5 and "3 != 6" in found.reason
    tests = "import pytest\n@pytest.mark.parametrize('x', range(4))\ndef test_a(x):\n    assert f(x) == 2 * x"
    assert run_tests("def f(x): return min(4, 2 * x)", "python", tests, pool=sandboxes).share == 0.75
