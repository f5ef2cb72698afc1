"""Programs held apart from the tests that judge them: C++ without typed heads, Python with objects of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from shared.types import Verdict
from tests.verify import objects, untyped
from verify.code import cpp
from verify.code.runner import run_tests
from verify.code.sandbox_pool import SandboxPool
from verify.code.tests import Assertions, Limits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]
LIMITS = Limits(test_s=2.0, compile_s=30.0)
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")
UNTYPED = [*untyped.FIRST, *untyped.SECOND]


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[SandboxPool]:
    made = SandboxPool(1, shared_folder=cpp.cache_folder())
    yield made
    made.close()


def test_objects_of_the_programs_own_decide_nothing(sandboxes: SandboxPool) -> None:
    for tests, source, right in [*objects.FIRST, *objects.SECOND]:
        found = run_tests(source, "python", Assertions(tests), LIMITS, pool=sandboxes)
        assert found.verdict is (Verdict.CORRECT if right else Verdict.WRONG), (source, found)


def check(sandboxes: SandboxPool, tests: Assertions, source: str, right: bool) -> None:
    found = run_tests(source, "cpp", tests, LIMITS, pool=sandboxes)
    assert (found.verdict is Verdict.CORRECT) is right, (source, found)
    assert found.verdict.graded or "Stack" in source, (source, found)


@needs_compiler
@pytest.mark.parametrize("row", [0, 7, 8, 13, 21, 24, 27, 29, 33, 36])
def test_cpp_assertions_without_types(sandboxes: SandboxPool, row: int) -> None:
    check(sandboxes, *UNTYPED[row])


@needs_compiler
def test_tests_that_need_a_class_of_the_program_are_unverifiable(sandboxes: SandboxPool) -> None:
    tests, source, _ = untyped.SECOND[-1]
    found = run_tests(source, "cpp", tests, LIMITS, pool=sandboxes)
    assert found.verdict is Verdict.UNVERIFIABLE and "a type of the program's" in found.reason


@needs_compiler
@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_all_cpp_assertions_without_types(sandboxes: SandboxPool) -> None:
    for tests, source, right in UNTYPED:
        check(sandboxes, tests, source, right)
    print(f"{len(UNTYPED)} programs: {sum(not right for *_, right in UNTYPED)} cheat or err, none passes")
