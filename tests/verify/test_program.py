"""Programs and their verdicts (programs.jsonl: the program that gets each verdict on a row's tests), what they print
and return, what is told of tests that nobody can run, and attacks on the grader, after which nothing is left."""

import asyncio
import os
import select
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shared.errors import DataError
from shared.sandbox_settings import Sandbox
from shared.types import Verdict
from tests.tables import read_table
from tests.verify.conftest import opened
from verify.code import cpp
from verify.code.runner import in_thread, run_outputs, run_tests
from verify.code.sandbox import protocol
from verify.code.sandbox.client import Pipe, SandboxHandle
from verify.code.sandbox_pool import SandboxPool
from verify.code.tests import Assertions, CallTest, Limits, Status, StdioTest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")
ROWS = read_table("verify/programs")
TWICE = [StdioTest("3\n", "6\n"), StdioTest("-1\n", "-2\n")]
FIRST = Assertions(
    "#undef NDEBUG\n#include <assert.h>\nint main() {\n    vector<int> a = {1, 2};\n"
    '    assert (first(a, "xyz") == vector<int>({1}));\n    assert (first({3, 4}, "xyz") == vector<int>({3}));\n}\n',
    "#include <vector>\n#include <string>\nusing namespace std;\nbool helper(int x) { return x; }\n"
    "vector<int> first(vector<int> a, string s) {\n",
)
"""tests of the C++ rows that have none of their own"""


ASSERTIONS_IN_CPP = ("C++ cheats", "C++ patches", "C++ with closed code", "C++ heads")
"""kinds each of whose rows costs two compilations and a static link"""


def cases() -> Iterator[Any]:
    for kind in dict.fromkeys(row["kind"] for row in ROWS):
        rows, marks = [row for row in ROWS if row["kind"] == kind], [needs_compiler] * ("C++" in kind)
        if kind in ASSERTIONS_IN_CPP or kind == "C++":
            marks.append(pytest.mark.sampled(1 if kind in ASSERTIONS_IN_CPP else 3, kind))
            named = ((row, row.get("name", number)) for number, row in enumerate(rows, 1))
            yield from (pytest.param([row], id=f"{kind}: {name}", marks=marks) for row, name in named)
        elif kind.endswith(" batch"):
            yield pytest.param(rows, id=kind, marks=pytest.mark.sampled(1, "batch"))
        else:
            yield pytest.param(rows, id=kind, marks=marks)


@pytest.mark.parametrize("rows", cases())
def test_programs_get_the_verdict_of_their_row(sandboxes, rows):
    different = []
    for row in rows:
        language, tests = row.get("language", "python"), row.get("tests", FIRST)
        for verdict in row.keys() & {"correct", "wrong", "unverifiable"}:
            unhurried = {"compile_s": 90} | ({"test_s": 12} if verdict == "correct" else {})  # on a busy machine
            outcome = run_tests(row[verdict], language, tests, unhurried | row.get("limits", {}), pool=sandboxes)
            as_told = outcome == verdict and outcome.verdict.graded is (verdict != "unverifiable")
            as_told &= bool(outcome.reason) is (verdict != "correct") and row.get("reason", "") in outcome.reason
            as_told &= outcome.statuses == row.get("statuses", outcome.statuses)
            as_told &= (outcome.status is Status.COMPILE) is (row["kind"] == "C++ that does not compile")
            different += [] if as_told else [(row, outcome)]
    assert not different


def test_a_megabyte_goes_in_and_comes_out(sandboxes):
    numbers = "1 " * 500_000
    assert run_tests("print(input())", "python", [StdioTest(numbers, numbers)], pool=sandboxes) == Verdict.CORRECT
    for program in (
        "import os\nprint(os.fstat(0).st_size)",
        "import os\nprint(len(os.read(0, 10**7)))",
        "import mmap\nprint(len(mmap.mmap(0, 0, access=mmap.ACCESS_READ)))",
        "import os, sys\nx = sys.stdin.read(5)\nos.lseek(0, 0, 0)\nprint(len(os.read(0, 10**7)))",
        "import os\ntry: os.write(0, b'9')\nexcept OSError: print(1000000)",
    ):
        assert run_tests(program, "python", [StdioTest(numbers, "1000000")], pool=sandboxes) == Verdict.CORRECT, program


@pytest.mark.parametrize("late", [False, True])
def test_a_program_that_raises_is_reported_though_its_end_is_seen_first(sandboxes, monkeypatch, late):
    def wait_for_the_end(pipes: dict[SandboxHandle, Pipe], deadline_s: float, stop: Callable[[], bool]) -> None:
        assert select.select([owner.ours for owner in pipes], [], [], 60)[0]

    if late:
        monkeypatch.setattr(protocol, "exchange", wait_for_the_end)
    raised = run_tests("raise NameError('x')", "python", "assert f(3) == 6", pool=sandboxes)
    assert raised == Verdict.WRONG and raised.reason == "raised NameError: x"


def test_sleep_is_not_taken_for_a_busy_host_again_and_again(sandboxes):
    source = "import time\nwhile time.process_time() < 0.1: pass\ntime.sleep(0.6)\nprint(6)"
    outcome = run_tests(source, "python", TWICE[:1] * 6, Limits(test_s=0.5), pool=sandboxes)
    assert outcome == Verdict.WRONG and outcome.statuses.count(Status.PASSED) <= 2


def test_what_cannot_be_run_is_told(sandboxes):
    with pytest.raises(DataError, match="test_seconds"):
        run_tests("", "python", TWICE, {"test_seconds": 2}, pool=sandboxes)
    with pytest.raises(DataError, match="rust"):
        run_tests("", "rust", TWICE, pool=sandboxes)  # type: ignore[arg-type]
    for head in ("template<class T> T f(T x)", "auto f(int x)"):
        with pytest.raises(DataError, match="head of the function"):
            run_tests("", "cpp", Assertions("int main() { assert(f(2) == 4); }", f"{head} {{\n"), pool=sandboxes)
    for tests, language in (
        ([CallTest("f", [], 1)], "python"),
        ({"language": "cpp", "input": "1", "output": "1"}, "cpp"),
    ):
        other = run_tests("", {"python": "cpp", "cpp": "python"}[language], tests, pool=sandboxes)  # type: ignore[arg-type]
        assert other == Verdict.WRONG and f"tests are for {language}" in other.reason
    assert run_tests("x" * (1 << 21), "python", TWICE, pool=sandboxes) == Verdict.WRONG
    for code in ("x = 1", "assert f("):  # as no data set may have them
        assert run_tests("def f(x): return 6", "python", Assertions(code), pool=sandboxes) == Verdict.UNVERIFIABLE
    assert [*Sandbox(imports=("math", "numpyy")).own_contradictions()] == [
        "reward.sandbox.imports has 'numpyy', no module of Python's standard library: leave it out"
    ]


def test_outputs_of_python_programs(sandboxes):
    """What is printed or returned, without comparing it."""

    def outputs(source: str, *tests: Any, **limits: float) -> list[Any]:
        return run_outputs(source, "python", list(tests), Limits(**limits), pool=sandboxes)  # type: ignore[arg-type]

    printed = outputs("print(12 // int(input()))", *(StdioTest(f"{number}\n", "wrong\n") for number in (3, 0, 7)))
    assert [(output.status, output.printed) for output in printed[::2]] == [("passed", b"4\n"), ("passed", b"1\n")]
    assert printed[1].status is Status.ERROR
    source = (
        "class Own: pass\ndef f(x):\n    if x == 1: return (1, {2: {3}}, 'ü', 2.5)\n    if x == 2: raise ValueError\n"
        "    if x == 3: return Own()\n    if x == 4: exit(0)\ndef g(items):\n    items.sort()"
    )
    results = outputs(
        source, *(CallTest("f", [number], None) for number in (1, 2, 3, 4)), CallTest("g", [[2, 1]], None)
    )
    assert [output.status for output in results] == ["passed", "error", "wrong", "error", "passed"]
    assert results[0].value == (1, {2: {3}}, "ü", 2.5) and (results[4].value, results[4].changed) == (None, [[1, 2]])
    slow = outputs("while True: pass", *[StdioTest("", "")] * 4, test_s=0.3)
    assert [output.status for output in slow] == ["timeout", "timeout", "not run", "not run"]
    for source in ("a\0b", "print("):
        assert [output.status for output in outputs(source, StdioTest("", ""))] == ["error"]
    only_cpp = [StdioTest("1", "1", language="cpp")] * 2
    assert [output.status for output in outputs("print(input())", *only_cpp)] == ["error"] * 2
    with pytest.raises(DataError, match="assertions"):
        outputs("x = 1", "assert x == 1")


@needs_compiler
def test_outputs_of_cpp_programs(sandboxes):
    source = "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << 2 * n << std::endl; }"
    tests = [StdioTest("4", ""), StdioTest("5", "")]
    results = asyncio.run(in_thread(run_outputs, source, "cpp", tests, pool=sandboxes))
    assert [output.printed for output in results] == [b"8\n", b"10\n"]
    assert [output.status for output in run_outputs("int main() {", "cpp", tests, pool=sandboxes)] == [
        "compile error"
    ] * 2


@needs_compiler
def test_a_host_without_static_libraries_runs_other_cpp_programs(monkeypatch):
    monkeypatch.setattr(cpp, "missing_library", lambda: "libc.a")
    pool = SandboxPool(1, shared_folder=cpp.cache_folder())
    source = '#include <cstdio>\nint main() { puts("6"); }'
    assert run_tests(source, "cpp", [StdioTest("", "6")], pool=pool) == Verdict.CORRECT
    outcome = run_tests("    return {a[0]};\n}", "cpp", FIRST, pool=pool)
    pool.close()
    assert outcome.verdict is Verdict.UNVERIFIABLE and "libc.a is not installed" in outcome.reason


NAMESPACES_ONLY = ("outside", "canary", "disk", "program", "accounts", "processes", "parent's", "state", "link")
LANDLOCK_ONLY = ("outside", "kill", "fork", "exec", "ptrace", "socket", "disk", "canary", "program", "symlink")


def attacks() -> Iterator[Any]:
    """(isolation, attack); given the input "3" each must print "6", and none does so honestly.

    Time and memory are limited, and system calls filtered, alike on all kinds of isolation and in both languages: so
    most attacks run with namespaces, and on the other kinds Python's that try what these hold off.
    """
    for row in read_table("verify/attacks"):
        name, timed = row["name"], row["statuses"] == ["timeout"] or "bomb" in row["name"]
        others = row["language"] == "python" or "parent" in name
        kinds = ["namespaces"]
        kinds += ["namespaces only"] * (others and any(word in name for word in NAMESPACES_ONLY))
        kinds += ["landlock only"] * (others and not timed and any(word in name for word in LANDLOCK_ONLY))
        marks = [pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")] * (
            row["language"] == "cpp"
        )
        yield from (pytest.param(kind, row, id=f"{row['language']}, {kind}: {name}", marks=marks) for kind in kinds)


@pytest.fixture(scope="module")
def walls():
    """One lease runs all attacks on one kind of isolation: one that broke its sandbox would fail those after."""
    with tempfile.TemporaryDirectory(prefix="attacks-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        pools: dict[str, SandboxPool] = {}

        def opened_once(kind: str) -> tuple[SandboxPool, str]:
            if kind not in pools:
                isolation = {"namespaces": kind != "landlock only", "landlock": kind != "namespaces only"}
                with pytest.MonkeyPatch.context() as patch:  # sandboxes of other tests are elsewhere
                    patch.setattr(tempfile, "tempdir", folder)
                    pools[kind] = opened(**isolation, shared_folder=cpp.cache_folder())
            return pools[kind], folder

        yield opened_once
        for pool in pools.values():
            pool.close()


def traces(pool: SandboxPool, folder: str) -> tuple[int, list[str]]:
    """How many processes are in and under the sandboxes, and the files beside theirs."""
    leases = [psutil.Process(lease.candidate.process.pid) for lease in pool._all]
    return sum(len(process.children(recursive=True)) for process in leases), sorted(os.listdir(folder))


@pytest.mark.sampled(50)
@pytest.mark.parametrize(("kind", "row"), attacks())
def test_attack(walls, open_folder, kind, row):
    """{canary} stands for a file outside that any user may read and write, in a folder open to all."""
    canary = open_folder / "canary"
    canary.write_text("6\n")
    canary.chmod(0o666)
    # 64 MiB are filled in .03 s (the usual 300 MB on a busy machine in .5): so memory ends it, not time
    memory = 64 << 20 if row["language"] == "cpp" and row["name"].startswith("memory") else Limits().memory_bytes
    test_s = 0.5 if "timeout" in row["statuses"] else 4.0
    compile_s = 1.0 if "bomb" in row["name"] else 60.0
    limits, (pool, folder) = Limits(test_s=test_s, compile_s=compile_s, memory_bytes=memory), walls(kind)
    before = traces(pool, folder)
    source = row["program"].replace("{canary}", str(canary))
    outcome = run_tests(source, row["language"], [StdioTest("3\n", "6\n")], limits, pool=pool)
    assert outcome.verdict is Verdict.WRONG and outcome.status in row["statuses"], outcome
    assert canary.read_text() == "6\n" and os.listdir(open_folder) == ["canary"]
    assert traces(pool, folder) == before and before[0] == 1 and pool.counts["lost"] == 0
