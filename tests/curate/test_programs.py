"""The stage programs on rows of every kind, with real sandboxes."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from curate.programs import ProgramsStage, read_solutions
from curate.stage import Decision, Kept, Rejected
from tests.curate.deciding import decide_rows
from verify.code.sandbox.client import SandboxRefused
from verify.code.tests import CallTest, language_of, read_tests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]

DOUBLE = "print(2 * int(input()))"
DOUBLE_TOO = "n = int(input())\nprint(n + n)"
TRIPLE = "print(3 * int(input()))"
F = "def f(x):\n    return 2 * x"
F_TOO = "def f(x):\n    return x + x"
F_WRONG = "def f(x):\n    return 3 * x"
STDIO = [{"input": f"{n}\n", "output": f"{2 * n}\n"} for n in range(1, 6)]


def decide(rows: list[dict[str, Any]], **options: Any) -> list[Decision]:
    stage = ProgramsStage(**{"variants": False, "max_concurrency": 1, **options})
    try:
        return decide_rows(stage, [{"problem": "Do it.", "domain": "code", **fields} for fields in rows])
    except SandboxRefused as error:
        pytest.skip(str(error))


def kept(decision: Decision) -> dict[str, Any]:
    assert isinstance(decision, Kept), decision
    return decision.rows[0]


def asserts(code: str, **row: Any) -> dict[str, Any]:
    return {"tests": {"type": "asserts", "code": code, "note": "stays"}, **row}


def test_wrong_expected_outputs_are_replaced() -> None:
    wrong = [*STDIO[:4], {"input": "5\n", "output": "11\n"}]
    code = "assert f(1) == 2\nassert f(2) == 5  # wrong\nassert f(3) == 6\n"
    calls = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [2, 5]}
    found = decide([
        {"tests": wrong, "solutions": [DOUBLE, DOUBLE_TOO, DOUBLE + "\n"]},
        asserts(code, solutions=[F, F_TOO]),
        {"tests": calls, "solutions": [F, F_TOO]},
        asserts(code, solution=F),
    ])  # fmt: skip
    assert [test["output"] for test in kept(found[0])["tests"]["tests"]] == ["2\n", "4\n", "6\n", "8\n", "10\n"]
    assert kept(found[1])["tests"] == {"type": "asserts", "code": code.replace("5", "4"), "note": "stays"}
    assert [test["expected"] for test in kept(found[2])["tests"]["tests"]] == [2, 4]
    for decision in found[:3]:
        assert isinstance(decision, Kept) and decision.counts == {"expected outputs replaced": 1}
    assert isinstance(found[3], Rejected) and found[3].reason == "its only solution fails its tests"


def test_wrong_solutions_go_and_disagreement_drops_tests() -> None:
    code = "assert f(0) == 0\nassert f(2) == 4\n"
    found = decide([
        {"tests": STDIO, "solutions": [DOUBLE, TRIPLE, DOUBLE_TOO, "print(int(input()) * 2)"]},
        asserts(code, solutions=[F, F_WRONG]),
        asserts("assert f(1) == 2\nassert f(2) == 4", solutions=[F, F_WRONG]),
        {"tests": STDIO, "solution": TRIPLE},
        {"tests": STDIO, "solution": "while True: pass"},
    ], test_s=0.5)  # fmt: skip
    first = kept(found[0])
    assert first["tests"] == STDIO and first["solutions"] == [DOUBLE, DOUBLE_TOO, "print(int(input()) * 2)"]
    second = kept(found[1])
    assert second["tests"]["code"] == "assert f(0) == 0\n"  # 0 is all that they agree on
    assert [decision.reason for decision in found[2:] if isinstance(decision, Rejected)] == [
        "no test is left", "its only solution fails its tests", "its only solution fails its tests",
    ]  # fmt: skip


def test_contradictory_tests() -> None:
    both = "assert f(2) == 5\nassert f(2) == 4\nassert f(3) == 6\n"
    found = decide([
        asserts(both, solution=F),
        asserts(both, solutions=[F, F_TOO]),
        asserts(both + "\n".join(f"assert f({n}) == {2 * n}" for n in range(10, 14))),
        asserts(both),
    ])  # fmt: skip
    assert kept(found[0])["tests"]["code"] == kept(found[1])["tests"]["code"] == "assert f(2) == 4\nassert f(3) == 6\n"
    assert "f(2)" not in kept(found[2])["tests"]["code"]
    assert isinstance(found[3], Rejected) and found[3].reason == "no solution and fewer than 5 tests"


def test_assertions_that_only_hold_or_fail() -> None:
    code = "import math\nassert math.isclose(f(2), 4.0)\nassert f(1) in (7, 8)\nassert f(3) == 6\n"
    check = "def check(candidate):\n    assert candidate(2) == 4\n\ncheck(f)"
    whole = {"type": "asserts", "code": check, "prefix": 'def f(x):\n    """Doubles x."""\n'}
    found = decide([
        asserts(code, solutions=[F, F_TOO]),
        asserts(code, solution=F),
        {"tests": {**whole, "entry_point": "f"}, "solution": "    return 2 * x"},
        {"tests": whole, "solutions": ["    return 3 * x", F_WRONG]},
        {"tests": {"tests": [{**whole, "code": f"{check}\nassert f(1) in (7, 8)", "entry_point": "f"}]},
         "solutions": ["    return 2 * x", "    return x + x"]},
    ])  # fmt: skip
    assert kept(found[0])["tests"]["code"] == code.replace("assert f(1) in (7, 8)\n", "")
    assert isinstance(found[1], Rejected) and isinstance(found[3], Rejected)
    assert kept(found[2])["solution"] == "    return 2 * x" and found[3].reason == "no test is left"
    changed = kept(found[4])["tests"]
    assert "in (7, 8)" not in changed["code"] and changed["prefix"] == whole["prefix"], "programs still need it"


@pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")
def test_cpp_assertions_and_solutions() -> None:
    tests = {"type": "main", "code": "int main() { assert(f(2) == 4); assert(f(3) == 6); }", "prefix": "int f(int x) {"}
    cpp = "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << 2 * n; }"
    found = decide([
        {"tests": tests, "solution": "int f(int x) { return 2 * x; }"},
        {"tests": tests, "solution": "int f(int x) { return 3 * x; }"},
        {"tests": STDIO, "solutions": [{"language": "cpp", "code": cpp}, f"```python\n{DOUBLE}\n```", cpp + "\n"]},
    ])  # fmt: skip
    assert kept(found[0])["tests"] == tests and len(kept(found[2])["solutions"]) == 3
    assert isinstance(found[1], Rejected) and found[1].reason == "its only solution fails its tests"


def test_variants_ask_for_a_language_in_words() -> None:
    row = {"id": "x", "problem": "Удвой число.", "language": "ru", "tests": STDIO, "solution": DOUBLE}
    decision = decide([row, asserts("assert f(1) == 2", solution=F)], variants=True)
    assert isinstance(decision[0], Kept)
    python, cpp = decision[0].rows
    assert (python["id"], cpp["id"]) == ("x/python", "x/cpp")
    assert cpp["problem"] == "Удвой число.\n\nНапиши программу на языке C++."
    assert python["problem"].endswith("Python.")
    assert [language_of(read_tests(one["tests"])) for one in (python, cpp)] == ["python", "cpp"]
    assert len(read_tests(cpp["tests"])) == 5 and len(decision[1].rows) == 1  # type: ignore[union-attr]


def test_other_rows() -> None:
    rows = [{"domain": "math", "answer": "4"}, {"tests": [{"in": 1}]}, {"tests": STDIO}, {"tests": STDIO[:2]}]
    found = decide(rows)
    assert kept(found[0])["answer"] == "4" and kept(found[2])["tests"] == STDIO
    assert [decision.reason for decision in found if isinstance(decision, Rejected)] == [
        "tests not readable", "no solution and fewer than 5 tests",
    ]  # fmt: skip


def test_solutions_are_read_in_all_their_shapes() -> None:
    row = {"solutions": ["print(1)", {"source": "int main() {}"}, {"language": "C++", "code": "x"}, 7, "print(1)"],
           "solution": "```cpp\nint main() {}\n```"}  # fmt: skip
    found = read_solutions(row, read_tests(STDIO))
    assert [(one.source.strip(), one.language) for one in found] == [
        ("print(1)", "python"), ("int main() {}", "cpp"), ("x", "cpp"), ("int main() {}", "cpp"),
    ]  # fmt: skip
    tests = read_tests({"type": "main", "code": "int main() {}", "prefix": "int f() {"})
    assert read_solutions({"solution": "x"}, tests)[0].language == "cpp"


def test_missing_tests_are_made_where_solutions_agree() -> None:
    """Two of four are there, 2, 3, 4 lie between; proposed inputs only, of which one is no number; one alone."""
    lists = [{"input": "2\n3 9\n", "output": "12\n"}, {"input": "1\n5\n", "output": "5\n"}]
    total = "n = int(input())\nnumbers = list(map(int, input().split()))\nassert len(numbers) == n\nprint(sum(numbers))"
    total_too = total.replace("sum(numbers)", "sum(sorted(numbers))")
    found = decide([
        {"id": "a", "tests": [STDIO[0], STDIO[4]], "solutions": [DOUBLE, DOUBLE_TOO]},
        {"id": "b", "inputs": ["7\n", "x", "8\n", "7\n"], "solutions": [DOUBLE, DOUBLE_TOO]},
        {"id": "c", "tests": lists, "solutions": [total, total_too]},
        {"id": "d", "tests": STDIO[:2], "solution": DOUBLE},
        {"id": "e", "inputs": ["7\n"], "solutions": [DOUBLE, TRIPLE]},
    ], make_tests=4, least_tests=1)  # fmt: skip
    for decision, inputs in ((found[0], ["1\n", "5\n"]), (found[1], ["7\n", "8\n"])):
        tests = kept(decision)["tests"]["tests"]
        assert [test["input"] for test in tests][:2] == inputs
        assert all(int(test["output"]) == 2 * int(test["input"]) for test in tests)
    counted = kept(found[2])["tests"]["tests"][2:]
    for test in counted:  # a count that does not fit fails both solutions, and its test goes
        count, numbers = test["input"].splitlines()
        assert int(count) == len(numbers.split()) and int(test["output"]) == sum(map(int, numbers.split()))
    assert len(counted) >= 1 and isinstance(found[2], Kept) and found[2].counts["tests made"] == len(counted)
    assert kept(found[3])["tests"] == STDIO[:2], "one solution agrees with nobody"
    assert isinstance(found[4], Rejected) and found[4].reason == "no test is left"


def test_values_as_published_sets_store_them() -> None:
    wrapped = {"fn_name": "f", "inputs": [[1], [2], [3]], "outputs": [[2], [4], [6]]}
    objects = {"fn_name": "g", "inputs": [[{"1": 2}]], "outputs": [{"2": 1}]}
    g = "def g(d):\n    return {v: k + 0 for k, v in d.items()}"
    listed = [source.replace("return 2 * x", "return [2 * x]").replace("x + x", "[x + x]") for source in (F, F_TOO)]
    found = decide([
        {"tests": wrapped, "solution": F},
        {"tests": wrapped, "solutions": [F, F_TOO, F_WRONG]},
        {"tests": {**wrapped, "outputs": [[2], [5], [6]]}, "solutions": [F, F_TOO]},
        {"tests": {**wrapped, "outputs": [[2], [5], [6]]}, "solutions": listed},
        {"tests": {**wrapped, "inputs": [[1], [1], [3]], "outputs": [[2], [2], [6]]}},
        {"tests": objects, "solution": g},
        {"tests": {**objects, "inputs": [[{"1": 2}]] * 2, "outputs": [{"2": 1}] * 2}, "solutions": [g, g + "\n"]},
        {"tests": wrapped, "solution": F_WRONG},
    ], least_tests=2, agreement=0.6)  # fmt: skip
    assert kept(found[0])["tests"] == wrapped and kept(found[1])["tests"] == wrapped
    assert kept(found[1])["solutions"] == [F, F_TOO]
    assert [test["expected"] for test in kept(found[2])["tests"]["tests"]] == [2, 4, 6]
    assert [test["expected"] for test in kept(found[3])["tests"]["tests"]] == [[2], [4], [6]]
    repeated = kept(found[4])["tests"]
    assert repeated["tests"] == [{"function": "f", "args": [n], "output": [2 * n]} for n in (1, 3)]
    assert all(test.wrapped for test in read_tests(repeated) if isinstance(test, CallTest))
    assert kept(found[5])["tests"] == objects
    assert json.loads(json.dumps(kept(found[6])["tests"])) == {
        "tests": [{"function": "g", "args": [{"1": 2}], "expected": {"2": 1}}]
    }
    assert isinstance(found[7], Rejected)
