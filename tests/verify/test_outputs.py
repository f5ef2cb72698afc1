"""What programs print and return, told without comparing it."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from shared.errors import DataError
from verify.code.runner import in_thread, run_outputs, run_tests
from verify.code.sandbox_pool import SandboxPool
from verify.code.tests import Assertions, CallTest, Limits, Status, StdioTest, language_of, read_tests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]


def test_printed_outputs(sandboxes: SandboxPool) -> None:
    tests = [StdioTest(f"{number}\n", "wrong\n") for number in (3, 0, 7)]
    found = run_outputs("print(12 // int(input()))", "python", tests, pool=sandboxes)
    assert [one.status for one in found] == [Status.PASSED, Status.ERROR, Status.PASSED]
    assert [one.printed for one in found if one.status is Status.PASSED] == [b"4\n", b"1\n"]


def test_returned_values(sandboxes: SandboxPool) -> None:
    source = """
class Own: pass
def f(x):
    if x == 1: return (1, {2: {3}}, 'ü', 2.5)
    if x == 2: raise ValueError
    if x == 3: return Own()
    if x == 4: exit(0)
def g(items):
    items.sort()
"""
    tests = [CallTest("f", [number], None) for number in (1, 2, 3, 4)] + [CallTest("g", [[2, 1]], None)]
    found = run_outputs(source, "python", tests, pool=sandboxes)
    assert [one.status for one in found] == [Status.PASSED, Status.ERROR, Status.WRONG, Status.ERROR, Status.PASSED]
    assert found[0].value == (1, {2: {3}}, "ü", 2.5)
    assert found[4].value is None and found[4].changed == [[1, 2]]


def test_slow_and_broken_programs(sandboxes: SandboxPool) -> None:
    tests = [StdioTest("", "")] * 4
    found = run_outputs("while True: pass", "python", tests, Limits(test_s=0.3), pool=sandboxes)
    assert [one.status for one in found] == [Status.TIMEOUT, Status.TIMEOUT, Status.SKIPPED, Status.SKIPPED]
    assert {one.status for one in run_outputs("a\0b", "python", tests, pool=sandboxes)} == {Status.ERROR}
    assert [one.status for one in run_outputs("print(", "python", tests[:1], pool=sandboxes)] == [Status.ERROR]
    with pytest.raises(DataError, match="assertions have no outputs"):
        run_outputs("x = 1", "python", [Assertions("assert x == 1", language="python")], pool=sandboxes)


@pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")
def test_cpp_outputs(sandboxes: SandboxPool) -> None:
    source = "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << 2 * n << std::endl; }"
    tests = [StdioTest("4", ""), StdioTest("5", "")]
    assert [one.printed for one in asyncio.run(in_thread(run_outputs, source, "cpp", tests, pool=sandboxes))] == [
        b"8\n",
        b"10\n",
    ]
    assert [one.status for one in run_outputs("int main() {", "cpp", tests, pool=sandboxes)] == [Status.COMPILE] * 2


def test_tests_of_one_language(sandboxes: SandboxPool) -> None:
    tests = {"language": "cpp", "tests": [{"input": "1", "output": "1"}, {"input": "2", "output": "2"}]}
    assert language_of(read_tests(tests)) == "cpp"
    assert [one.status for one in run_outputs("print(input())", "python", tests, pool=sandboxes)] == [Status.ERROR] * 2
    found = run_tests("print(input())", "python", tests, pool=sandboxes)
    assert not found.passed and "the tests are for cpp" in found.reason
    any_language = {"tests": tests["tests"]}
    assert run_tests("print(input())", "python", any_language, pool=sandboxes).share == 1
    with pytest.raises(DataError, match='"rust"'):
        read_tests({"input": "1", "output": "1", "language": "rust"})
    with pytest.raises(DataError, match="different languages"):
        read_tests([{"input": "1", "output": "1", "language": "cpp"}, {"input": "1", "output": "1"}])
