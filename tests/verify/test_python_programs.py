"""Python programs as people write them: what right ones rely on, and what must not pass for right."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shared.sandbox_settings import Sandbox
from shared.types import Verdict
from verify.code.runner import run_tests
from verify.code.sandbox import protocol
from verify.code.sandbox.client import Pipe, SandboxHandle
from verify.code.sandbox_pool import SandboxPool
from verify.code.tests import Assertions, CallTest, Limits, ProgramVerdict, StdioTest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]
SIX = [StdioTest("3\n", "6\n")]


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[SandboxPool]:
    made = SandboxPool(1)
    yield made
    made.close()


@pytest.mark.parametrize(
    "source",
    [
        "out = open(1, 'w')\nout.write('6\\n')",
        "import os\nf = os.fdopen(1, 'w')\nf.write('6\\n')",
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nprint(6)",
        "import sys\nsys.__stdout__.write('6\\n')",
        "class A:\n    def __del__(self): print(6)\na = A()",
        "def g():\n    try: yield\n    finally: print(6)\nx = g(); next(x)",
        "import sys\nprint(6)\nsys.stdout.close()",
        "import threading\nthreading.Timer(0.05, lambda: print(6)).start()",
        "import atexit\natexit.register(lambda: print(6))",
    ],
)
def test_what_was_written_counts_however_it_was_written(sandboxes: SandboxPool, source: str) -> None:
    assert run_tests(source, "python", SIX, pool=sandboxes) == Verdict.CORRECT


@pytest.mark.parametrize("tests", [SIX, [CallTest("f", [3], 6)], "assert f(3) == 6"])
def test_annotations_are_evaluated_as_python_does(sandboxes: SandboxPool, tests: Any) -> None:
    wrong = "def f(x: List[int]) -> Foo: return 6\nprint(6)"
    assert run_tests(wrong, "python", tests, pool=sandboxes) == Verdict.WRONG
    right = f"from __future__ import annotations\n{wrong}"
    assert run_tests(right, "python", tests, pool=sandboxes) == Verdict.CORRECT


WRAPPED = {"fn_name": "f", "inputs": [[3], [4]], "outputs": [[6], [8]]}
TEXTS = {"fn_name": "f", "inputs": ["3", "4"], "outputs": ["[6]", "[8]"]}
OBJECTS = {"fn_name": "f", "inputs": [[{"1": 2}], [{"5": 6}]], "outputs": [{"2": 1}, {"6": 5}]}
LISTS = {"fn_name": "f", "inputs": [[[1, 2]], [[3, 4]]], "outputs": [[[2, 1]], [[4, 3]]]}
NESTED = {"fn_name": "f", "inputs": [[1]], "outputs": [[{"1": [{"-2": {"0.5": None}}]}]]}


@pytest.mark.parametrize(
    ("source", "tests", "verdict"),
    [
        ("def f(x): return 2 * x", WRAPPED, "correct"),
        ("def f(x): return [2 * x]", WRAPPED, "correct"),
        ("def f(x): return (2 * x,)", WRAPPED, "correct"),
        ("def f(x): return [2 * x] if x == 3 else 2 * x", WRAPPED, "wrong"),
        ("def f(x): return [[2 * x]]", WRAPPED, "wrong"),
        ("def f(x): return str(2 * x)", WRAPPED, "wrong"),
        ("def f(x): return {2 * x}", WRAPPED, "wrong"),
        ("def f(x): return 2 * x", {**WRAPPED, "outputs": [[6], 8]}, "wrong"),
        ("def f(x): return x", {**WRAPPED, "outputs": [[3, 0], [4, 0]]}, "wrong"),
        ("def f(x): return None", {**WRAPPED, "outputs": [[], []]}, "wrong"),
        ("def f(x): return None", {**WRAPPED, "outputs": [[None], [None]]}, "correct"),
        ("def f(x): return 1", {**WRAPPED, "outputs": [[True], [True]]}, "wrong"),
        ("def f(x): return 0.1 + 0.2", {**WRAPPED, "outputs": [[0.3], [0.3]]}, "correct"),
        ("class Solution:\n    def f(self, x): return 2 * x", TEXTS, "correct"),
        ("class L(list):\n    __eq__ = lambda self, other: True\ndef f(x): return L([0])", WRAPPED, "wrong"),
        ("class K(int):\n    __eq__ = lambda self, other: True\ndef f(x): return [K(2 * x)]", WRAPPED, "wrong"),
        ("def f(a): return a[::-1]", LISTS, "correct"),
        ("def f(a): a.reverse()", LISTS, "correct"),
        ("def f(a): return a[:1]", LISTS, "wrong"),
        ("def f(d): return {v: k for k, v in d.items()}", OBJECTS, "correct"),
        ("def f(d): return {str(v): int(k) for k, v in d.items()}", OBJECTS, "correct"),
        ("def f(d): return {str(v) if v == 2 else v: int(k) for k, v in d.items()}", OBJECTS, "wrong"),
        ("def f(d): return d", OBJECTS, "wrong"),
        ("def f(d): return {int(v): k for k, v in d.items()}", OBJECTS | {"inputs": [[{"1": 2}], [{"x": 6}]]}, "wrong"),
        ("def f(x): return {1: [{-2: {0.5: None}}]}", NESTED, "correct"),
        ("def f(x): return [{1: [{-2: {0.5: None}}]}]", NESTED, "correct"),
        ("def f(x): return {1: [{-2: {0.25: None}}]}", NESTED, "wrong"),
        ("def f(x): return {1: 3}", {"function": "f", "args": [1], "expected": {"1": 2}}, "wrong"),
    ],
)  # fmt: skip
def test_values_as_published_sets_store_them(
    sandboxes: SandboxPool, source: str, tests: dict[str, Any], verdict: str
) -> None:
    assert run_tests(source, "python", tests, pool=sandboxes) == verdict


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("class Solution:\n    def f(self, a: Optional[List[int]]) -> 'Dict': return 6", ""),
        ("def f(x):\n    d = defaultdict(int); q = deque([x]); d[x] += 2 * q[0]\n    return Counter(d)[x]", ""),
        ("@lru_cache(None)\ndef g(n): return 2 * n\ndef f(x): return reduce(add, accumulate([g(x)]))", ""),
        ("def f(x): h = []; heappush(h, 2 * x); return heapq.heappop(h) if inf > math.pi else 0", ""),
        ("def f(x): return 6 if bisect.bisect([1], 1) == bisect_left([1], 2) and datetime.datetime else 0", ""),
        ("def f(x): return pow(2, x, 5) * 2 if open.__module__ == 'io' and abs(-1) == 1 else 0", ""),
        ("def gcd(a, b): return 6\ndef f(x): return gcd(4, 6)", ""),
        ("def f(x): return 6 if x == 3 else f(x)\nlist = None\nTuple = int\nassert Tuple('6') == 6", ""),
        ("def f(x, depth=0): return 6 if depth == 20_000 else f(x, depth + 1)", ""),
        ("def f(x): return Foo(x)", "raised NameError: name 'Foo' is not defined"),
        ("def f(x: Lists): return 6", "raised NameError: name 'Lists' is not defined"),
        ("def f(x): return 6\nraise ValueError('two\\nlines')", "raised ValueError: two lines"),
        ("def f(x) return 6", "raised SyntaxError: expected ':' (solution.py, line 1)"),
        ("import sys\nsys.exit('now')", "exit status 1"),
        ("class Solution: pass", "raised AttributeError: 'Solution' object has no attribute 'f'"),
        ("class E(KeyError): pass\ndef f(x): raise E", "raised KeyError"),
    ],
)  # fmt: skip
def test_a_function_has_the_imports_of_its_site(sandboxes: SandboxPool, source: str, reason: str) -> None:
    found = run_tests(source, "python", CallTest("f", [3], 6), pool=sandboxes)
    assert (found.verdict, found.reason) == (Verdict.WRONG if reason else Verdict.CORRECT, reason)


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


@pytest.mark.parametrize(
    ("source", "code", "verdict", "said"),
    [
        ("pass", '"""only words"""\nprint("start")', Verdict.UNVERIFIABLE, "nothing"),
        ("def f(x): return 6", '"""a docstring"""\nassert f(3) == 6', Verdict.CORRECT, ""),
        ("def f(x): return 7", '"""a docstring"""\nassert f(3) == 6', Verdict.WRONG, ""),
        ("def f(x): return 6", "import no_such_module\nassert f(3) == 6", Verdict.UNVERIFIABLE, "no_such_module"),
        ("def f(x): return 6", "from solution import f\nassert f(3) == 6", Verdict.CORRECT, ""),
        ("def f(x): return 6", "assert f(3 == 6", Verdict.UNVERIFIABLE, "cannot be run"),
        ("def select(x): return 6", "assert select(3) == 6", Verdict.CORRECT, ""),
        ("def copy(x): return list(x)", "assert copy([1]) == [1]", Verdict.CORRECT, ""),
        ("import math\ndef f(x): return x * math.pi", "assert abs(f(2) - 2 * math.pi) < 1e-9", Verdict.CORRECT, ""),
        ("class Node:\n    def __init__(s, n=None): s.n = n",
         "node, count = Node(Node()), 0\nwhile node:\n    node, count = node.n, count + 1\nassert count == 2",
         Verdict.CORRECT, ""),
        ("class P:\n    def __init__(s, x): s.x = x\n    def __eq__(s, o): return s.x == o.x",
         "assert P(1) == P(1)\nassert not P(1) == P(2)", Verdict.CORRECT, ""),
        ("class P:\n    def __init__(s, x): s.x = x\n    def __str__(s): return f'<{s.x}>'",
         "assert str(P(1)) == '<1>'", Verdict.CORRECT, ""),
        ("def g(n):\n    yield from range(n)", "it = g(3)\nassert next(it) == 0\nassert list(it) == [1, 2]",
         Verdict.CORRECT, ""),
        ("class Any:\n    def __eq__(s, o): return True\ndef f(x): return Any()", "assert f(3) == 6",
         Verdict.WRONG, ""),
        ("def f(x): return 6\nif __name__ == '__main__':\n    print(f(int(input())))", "assert f(3) == 6",
         Verdict.CORRECT, ""),
    ],
)  # fmt: skip
def test_assertions(sandboxes: SandboxPool, source: str, code: str, verdict: Verdict, said: str) -> None:
    found = run_tests(source, "python", Assertions(code), pool=sandboxes)
    assert found == verdict and said in found.reason, found


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
