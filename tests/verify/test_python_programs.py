"""Python programs as people write them: what right ones rely on, and what must not pass for right."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Any

import pytest

from shared.sandbox_settings import Sandbox
from shared.types import Verdict
from tests.tables import read_table
from verify.code.runner import run_tests
from verify.code.sandbox import protocol
from verify.code.sandbox.client import Pipe, SandboxHandle
from verify.code.sandbox_pool import SandboxPool
from verify.code.tests import Assertions, CallTest, Limits, ProgramVerdict, StdioTest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]
SIX = [StdioTest("3\n", "6\n")]


def program(row: dict[str, Any]) -> str:
    return str(row["program"])


@pytest.mark.parametrize("row", read_table("verify/python_programs", kind="written"), ids=program)
def test_what_was_written_counts_however_it_was_written(sandboxes: SandboxPool, row: dict[str, Any]) -> None:
    assert run_tests(row["program"], "python", SIX, pool=sandboxes) == Verdict.CORRECT


@pytest.mark.parametrize("row", read_table("verify/python_programs", kind="standard input"), ids=program)
def test_standard_input_is_a_file(sandboxes: SandboxPool, row: dict[str, Any]) -> None:
    tests = [StdioTest("1 " * 500_000, "1000000")]
    assert run_tests(row["program"], "python", tests, pool=sandboxes) == Verdict.CORRECT


@pytest.mark.parametrize("tests", [SIX, [CallTest("f", [3], 6)], "assert f(3) == 6"])
def test_annotations_are_evaluated_as_python_does(sandboxes: SandboxPool, tests: Any) -> None:
    wrong = "def f(x: List[int]) -> Foo: return 6\nprint(6)"
    assert run_tests(wrong, "python", tests, pool=sandboxes) == Verdict.WRONG
    right = f"from __future__ import annotations\n{wrong}"
    assert run_tests(right, "python", tests, pool=sandboxes) == Verdict.CORRECT


@pytest.mark.parametrize("row", read_table("verify/python_programs", kind="stored values"), ids=program)
def test_values_as_published_sets_store_them(sandboxes: SandboxPool, row: dict[str, Any]) -> None:
    assert run_tests(row["program"], "python", row["tests"], pool=sandboxes) == row["verdict"]


@pytest.mark.parametrize("row", read_table("verify/python_programs", kind="imports"), ids=program)
def test_a_function_has_the_imports_of_its_site(sandboxes: SandboxPool, row: dict[str, Any]) -> None:
    outcome = run_tests(row["program"], "python", CallTest("f", [3], 6), pool=sandboxes)
    assert outcome.verdict is (Verdict.WRONG if row["reason"] else Verdict.CORRECT) and outcome.reason == row["reason"]


@pytest.mark.parametrize("name", ["gcd", "comb", "sorted", "mean", "Solution.f", "math", "f"])
def test_what_a_site_imports_is_no_program(sandboxes: SandboxPool, name: str) -> None:
    for source in ("", "x = 3", "class Other:\n    def f(self): return 6"):
        found = run_tests(source, "python", CallTest(name, [[3]], 6), pool=sandboxes)
        assert (
            found == Verdict.WRONG
            and found.reason == f"raised NameError: name {name.partition('.')[0]!r} is not defined"
        )
    assert run_tests("from math import gcd", "python", CallTest("gcd", [4, 6], 2), pool=sandboxes) == Verdict.CORRECT


def test_imports_are_a_setting_of_calls_alone(sandboxes: SandboxPool) -> None:
    source = "def f(x): return deque([2 * x])[0]\nif __name__ == '__main__': print(f(int(input())))"
    for tests in ([CallTest("f", [3], 6)], [StdioTest("3\n", "6\n")]):
        found = run_tests(source, "python", tests, Limits(imports=()), pool=sandboxes)
        assert found == Verdict.WRONG
    assert run_tests(source, "python", SIX, pool=sandboxes) == Verdict.WRONG
    assert (
        run_tests(source, "python", [CallTest("f", [3], 6)], Limits(imports=("collections",)), pool=sandboxes).share
        == 1
    )
    assert list(Sandbox(imports=("math", "numpyy")).own_contradictions()) == [
        "reward.sandbox.imports has 'numpyy', no module of Python's standard library: leave it out"
    ]


@pytest.mark.parametrize("late", [False, True])
def test_a_program_that_raises_is_reported_though_its_end_is_seen_first(
    sandboxes: SandboxPool, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    def wait_for_the_end(pipes: dict[SandboxHandle, Pipe], deadline_s: float, stop: Callable[[], bool]) -> None:
        assert select.select([owner.ours for owner in pipes], [], [], 60)[0]

    if late:
        monkeypatch.setattr(protocol, "exchange", wait_for_the_end)
    raised = run_tests("raise NameError('x')", "python", "assert f(3) == 6", pool=sandboxes)
    assert raised == Verdict.WRONG and raised.reason == "raised NameError: x"


@pytest.mark.parametrize(
    ("source", "test", "verdict"),
    [
        ("class Solution:\n    def f(self, x): return 2 * x", CallTest("f", [3], 6), "correct"),
        ("class Solution:\n    def f(self, x): return 3 * x", CallTest("f", [3], 6), "wrong"),
        ("def turn(x): x.reverse()", CallTest("turn", [[1, 2]], [2, 1]), "correct"),
        ("def turn(x): x.sort()", CallTest("turn", [[1, 2]], [2, 1]), "wrong"),
        ("def f(): return float('nan')", CallTest("f", [], float("nan")), "correct"),
        ("def f(): return 1.0", CallTest("f", [], float("nan")), "wrong"),
    ],
)
def test_calls(sandboxes: SandboxPool, source: str, test: CallTest, verdict: str) -> None:
    assert run_tests(source, "python", [test], pool=sandboxes) == verdict


PREFIX = "import math\n\ndef help(x):\n    return x + 1\n\ndef f(x):\n"


@pytest.mark.parametrize("row", read_table("verify/python_programs", kind="assertions"), ids=program)
def test_assertions(sandboxes: SandboxPool, row: dict[str, Any]) -> None:
    outcome = run_tests(row["program"], "python", Assertions(row["tests"]), pool=sandboxes)
    assert outcome == row["verdict"] and row["words"] in outcome.reason, outcome


@pytest.mark.parametrize(
    "source",
    [
        "    return math.floor(help(x)) + 2",
        "def f(x):\n    return help(x) + 2",
        "from __future__ import annotations\ndef f(x: Never) -> Never:\n    return help(x) + 2",
    ],
)
def test_a_prefix_serves_bodies_and_whole_functions(sandboxes: SandboxPool, source: str) -> None:
    tests = Assertions("assert f(3) == 6", PREFIX, "f")
    assert run_tests(source, "python", tests, pool=sandboxes) == Verdict.CORRECT
    assert run_tests(source.replace("+ 2", "+ 3"), "python", tests, pool=sandboxes) == Verdict.WRONG


def test_several_test_codes_all_count(sandboxes: SandboxPool) -> None:
    tests = [Assertions("assert f(3) == 6"), Assertions("import no_such_module\nassert f(4) == 8")]
    assert run_tests("def f(x): return 2 * x", "python", tests, pool=sandboxes) == Verdict.UNVERIFIABLE
    tests = [Assertions("assert f(3) == 6"), Assertions("assert f(4) == 8")]
    assert run_tests("def f(x): return 2 * x", "python", tests, pool=sandboxes) == Verdict.CORRECT
    assert run_tests("def f(x): return 6", "python", tests, pool=sandboxes) == Verdict.WRONG


def test_a_program_that_talks_on_its_own_is_stopped(sandboxes: SandboxPool) -> None:
    """Answers to nothing would pile up in the grader."""
    source = (
        'import os, struct\ndef f(x):\n    body = b\'A["value", ["int", "0x6"]]\'\n'
        "    while True: os.write(4, struct.pack('<I', len(body)) + body)"
    )
    found: ProgramVerdict = run_tests(
        source, "python", "assert f(3) == 6\nassert f(4) == 8", Limits(test_s=2), pool=sandboxes
    )
    assert found == Verdict.WRONG


def test_sleep_is_not_taken_for_a_busy_host_again_and_again(sandboxes: SandboxPool) -> None:
    source = "import time\nwhile time.process_time() < 0.1: pass\ntime.sleep(0.6)\nprint(6)"
    found = run_tests(source, "python", SIX * 12, Limits(test_s=0.5), pool=sandboxes)
    assert found == Verdict.WRONG and sum(status == "passed" for status in found.statuses) <= 2
