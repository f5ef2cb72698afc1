"""Programs held apart from the tests that judge them: Python with objects of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shared.types import Verdict
from tests.tables import read_table
from verify.code import cpp
from verify.code.runner import run_tests
from verify.code.sandbox_pool import SandboxPool
from verify.code.tests import Assertions, Limits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]
LIMITS = Limits(test_s=2.0, compile_s=30.0)


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[SandboxPool]:
    made = SandboxPool(1, shared_folder=cpp.cache_folder())
    yield made
    made.close()


def test_objects_of_the_programs_own_decide_nothing(sandboxes: SandboxPool) -> None:
    for row in read_table("verify/objects"):
        outcome = run_tests(row["program"], "python", Assertions(row["tests"]), LIMITS, pool=sandboxes)
        assert outcome.verdict is (Verdict.CORRECT if row["right"] else Verdict.WRONG), (row, outcome)
