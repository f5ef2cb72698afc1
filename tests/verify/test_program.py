"""Programs right and wrong, cheats against assertions, references of the data sets, and the life of sandboxes."""

from __future__ import annotations

import ast
import asyncio
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from shared.errors import DataError, RunError
from shared.types import Verdict
from tests.tables import read_table
from tests.verify.programs import FIRST, PROGRAMS, TWICE, F
from verify.code import cpp
from verify.code.runner import describe_isolation, in_thread, run_tests
from verify.code.sandbox_pool import SandboxPool
from verify.code.tests import Assertions, CallTest, Limits, Status, StdioTest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")
ROOT = Path(__file__).resolve().parents[2]


def by_name(row: dict[str, str]) -> str:
    return row["name"]


@pytest.mark.parametrize("row", PROGRAMS, ids=lambda row: row[0][:40].replace("\n", " "))
def test_python_programs(sandboxes: SandboxPool, row: tuple[str, Any, list[str]]) -> None:
    source, tests, statuses = row
    found = run_tests(source, "python", tests, Limits(test_s=1.0 if "timeout" in statuses else 4.0), pool=sandboxes)
    if len(statuses) > len(found.statuses):
        assert found.status in statuses, found
    else:
        assert [str(status) for status in found.statuses] == statuses, found
    assert (found == Verdict.CORRECT) is (set(statuses) == {"passed"}) and found.verdict.graded
    assert found.share == statuses.count("passed") / len(found.statuses)


@pytest.mark.parametrize("row", read_table("verify/cheats", kind="python"), ids=by_name)
def test_cheats_against_assertions(sandboxes: SandboxPool, row: dict[str, str]) -> None:
    tests = Assertions(F.code + "\nassert abs(f(2) - 4) < 0.5")
    found = run_tests(row["program"], "python", tests, Limits(test_s=1.0), pool=sandboxes)
    assert found.verdict is Verdict.WRONG, found


def test_helpers_of_the_tests_cannot_be_replaced(sandboxes: SandboxPool) -> None:
    tests = Assertions(
        "def check(g):\n    assert near(g(2), 4)\ncheck(f)", "def near(a, b):\n    return a == b\ndef f(x):\n", "f"
    )
    assert run_tests("    return 2 * x", "python", tests, pool=sandboxes) == Verdict.CORRECT
    assert (
        run_tests("def near(a, b): return True\ndef f(x): return 0", "python", tests, pool=sandboxes) == Verdict.WRONG
    )


def test_arguments_changed_in_place(sandboxes: SandboxPool) -> None:
    tests = "x = [3, 1]\nf(x)\nassert x == [1, 3]"
    assert run_tests("def f(x): x.sort()", "python", tests, pool=sandboxes) == Verdict.CORRECT
    assert run_tests("def f(x): pass", "python", tests, pool=sandboxes) == Verdict.WRONG
    emptied = "x = [3, 1]\nassert f(x) == sorted(x)"
    assert run_tests("def f(x): x.clear(); return []", "python", emptied, pool=sandboxes) == Verdict.WRONG


def test_limits_by_name(sandboxes: SandboxPool) -> None:
    assert run_tests("print(2 * int(input()))", "python", TWICE, {"test_s": 2}, pool=sandboxes) == Verdict.CORRECT
    with pytest.raises(DataError, match="test_seconds"):
        run_tests("", "python", TWICE, {"test_seconds": 2}, pool=sandboxes)


BITS = "#include <bits/stdc++.h>\nusing namespace std;\n"


@needs_compiler
def test_cpp_programs(sandboxes: SandboxPool) -> None:
    good = BITS + "int main() { long x; cin >> x; cout << 2 * x << endl; }"
    assert run_tests(good, "cpp", TWICE, pool=sandboxes).statuses == [Status.PASSED] * 2
    assert run_tests(good.replace("2 *", "3 *"), "cpp", TWICE, pool=sandboxes).statuses == [Status.WRONG] * 2
    deep = (
        BITS
        + "int f(int n) { return n ? 1 + f(n - 1) : 0; }\n"
        + "int main() { thread([] { cout << f(20000) << endl; }).join(); }"
    )
    assert run_tests(deep, "cpp", [StdioTest("", "20000")], pool=sandboxes) == Verdict.CORRECT
    found = run_tests("int main() {", "cpp", TWICE, pool=sandboxes)
    assert found.statuses == [Status.COMPILE, Status.SKIPPED] and "expected" in found.reason
    assert run_tests("    return {a[0]};\n}", "cpp", FIRST, pool=sandboxes) == Verdict.CORRECT
    whole = "#include <vector>\nvector<int> first(vector<int> a, string s) {\n    return {a[0]};\n}"
    assert run_tests(whole, "cpp", FIRST, pool=sandboxes) == Verdict.CORRECT
    assert run_tests("    return a;\n}", "cpp", FIRST, pool=sandboxes) == Verdict.WRONG
    alone = Assertions("#include <assert.h>\nint main() { assert(f(2) == 4); return 0; }", "int f(int x) {")
    assert run_tests("int f(int x) { return x * x; }", "cpp", alone, pool=sandboxes) == Verdict.CORRECT
    assert run_tests("int f(int x) { __builtin_exit(0); }", "cpp", alone, pool=sandboxes) == Verdict.WRONG


@needs_compiler
@pytest.mark.parametrize(
    "row", [*read_table("verify/cheats", kind="cpp"), *read_table("verify/cheats", kind="patch")], ids=by_name
)
def test_cpp_cheats_against_assertions(sandboxes: SandboxPool, row: dict[str, str]) -> None:
    outcome = run_tests(row["program"], "cpp", FIRST, Limits(test_s=1.0), pool=sandboxes)
    assert outcome.verdict is Verdict.WRONG, outcome
    assert row["kind"] == "cpp" or outcome.status is not Status.COMPILE, outcome


@needs_compiler
@pytest.mark.parametrize("row", read_table("verify/cheats", kind="right"), ids=by_name)
def test_right_cpp_programs_pass_although_their_code_is_closed(sandboxes: SandboxPool, row: dict[str, str]) -> None:
    for code, verdict in ((row["test"], Verdict.CORRECT), (row["test"].replace("==", "!="), Verdict.WRONG)):
        assert run_tests(row["program"], "cpp", Assertions(code, row["prefix"]), pool=sandboxes) == verdict


@needs_compiler
def test_a_host_without_static_libraries_runs_other_cpp_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp, "missing_library", lambda: "libc.a")
    sandboxes = SandboxPool(1, shared_folder=cpp.cache_folder())
    tests, source = [StdioTest("", "6")], '#include <cstdio>\nint main() { puts("6"); }'
    assert run_tests(source, "cpp", tests, pool=sandboxes) == Verdict.CORRECT
    found = run_tests("    return {a[0]};\n}", "cpp", FIRST, pool=sandboxes)
    assert found.verdict is Verdict.UNVERIFIABLE and "libc.a is not installed" in found.reason
    sandboxes.close()


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / name
    with gzip.open(path, "rt") if name.endswith(".gz") else open(path, encoding="utf-8") as file:
        return [row for row in map(json.loads, file) if not row["meta"].get("skip")]


def break_returns(row: dict[str, Any]) -> str:
    """The solution with another value in every `return`."""
    tree = ast.parse(row["tests"].get("prefix", "") + row["solution"])
    for node in ast.walk(tree):
        if isinstance(node, ast.Return):
            node.value = ast.Constant("broken")
    return ast.unparse(tree)


# every so many-th row; with MAESTRALE_ALL_REFERENCES=1 all of them, in about a minute (C++: five)
SAMPLES = [("mbpp.jsonl.gz", 40, "python"), ("humaneval.jsonl", 16, "python"), ("humaneval_cpp.jsonl", 54, "cpp")]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "step", "language"), SAMPLES)
def test_references_pass_and_broken_ones_fail(
    sandboxes: SandboxPool, data_folder: Path, name: str, step: int, language: Any
) -> None:
    if language == "cpp" and not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    step = 1 if os.environ.get("MAESTRALE_ALL_REFERENCES") else step
    for row in rows(folder=data_folder, name=name)[::step]:
        limits = Limits(test_s=12)  # one reference works for 3.5 s even on a quiet machine
        found = run_tests(row["solution"], language, row["tests"], limits, pool=sandboxes)
        if "boost/any.hpp: No such file" in found.reason or "undefined reference to `MD5_Init'" in found.reason:
            continue  # three C++ rows need libraries that few machines have
        assert found.verdict is Verdict.CORRECT, (row["id"], found)
        if language == "python":
            found = run_tests(break_returns(row), language, row["tests"], pool=sandboxes)
            assert found == Verdict.WRONG or "return" not in row["solution"], (row["id"], found)


def test_slow_tests_are_not_all_sat(sandboxes: SandboxPool) -> None:
    found = run_tests("while 1: pass", "python", TWICE * 5, Limits(test_s=0.5), pool=sandboxes)
    assert found.statuses == [Status.TIMEOUT] * 2 + [Status.SKIPPED] * 8 and found.status is Status.TIMEOUT


def test_unknown_language_and_kind_are_clear_errors(sandboxes: SandboxPool) -> None:
    with pytest.raises(DataError, match="rust"):
        run_tests("", "rust", TWICE, pool=sandboxes)  # type: ignore[arg-type]
    other = run_tests("", "cpp", [CallTest("f", [], 1)], pool=sandboxes)
    assert other == Verdict.WRONG and "tests are for python" in other.reason
    assert run_tests("x" * (1 << 21), "python", TWICE, pool=sandboxes) == Verdict.WRONG
    assert run_tests("a\0b", "python", TWICE, pool=sandboxes) == Verdict.WRONG


def test_host_that_cannot_isolate_refuses_unless_told_otherwise() -> None:
    bare = SandboxPool(1, namespaces=False, landlock=False)
    found = run_tests("print(2 * int(input()))", "python", TWICE, pool=bare)
    assert found.verdict is Verdict.SANDBOX_REFUSED and not found.graded and "neither" in found.reason
    bare.close()
    unsafe = SandboxPool(1, namespaces=False, landlock=False, unsafe=True)
    assert run_tests("print(2 * int(input()))", "python", TWICE, pool=unsafe) == Verdict.CORRECT
    assert "namespaces none, Landlock none" in describe_isolation(unsafe)
    unsafe.close()


def test_killed_box_is_replaced_and_counted() -> None:
    sandboxes = SandboxPool(1)
    with sandboxes.acquire() as lease:
        victim = lease.candidate.process
    os.killpg(victim.pid, signal.SIGKILL)
    assert run_tests("print(2 * int(input()))", "python", TWICE, pool=sandboxes) == Verdict.CORRECT
    assert sandboxes.counts["lost"] == 1 and sandboxes.counts["started"] == 2
    sandboxes.close()
    assert not psutil.pid_exists(victim.pid)


def test_stopped_box_is_replaced_at_the_deadline() -> None:
    sandboxes = SandboxPool(1)
    with sandboxes.acquire() as lease:
        inner = psutil.Process(lease.candidate.process.pid).children()
    inner[0].suspend()
    assert run_tests("print(2 * int(input()))", "python", TWICE, Limits(test_s=0.5), pool=sandboxes) == Verdict.CORRECT
    assert sandboxes.counts["lost"] == 1 and not inner[0].is_running()
    sandboxes.close()


def test_event_loop_goes_on_while_programs_run_and_nothing_is_left() -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}

    async def use() -> int:
        sandboxes, turns = SandboxPool(2), 0
        slow = "import time\ntime.sleep(0.5)\nprint(2 * int(input()))"
        runs = asyncio.gather(*(in_thread(run_tests, slow, "python", TWICE, pool=sandboxes) for _ in range(2)))
        while not runs.done():
            await asyncio.sleep(0.01)
            turns += 1
        assert [result.verdict for result in await runs] == [Verdict.CORRECT] * 2
        sandboxes.close()
        return turns

    assert asyncio.run(use()) > 5
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


def test_close_during_a_run_ends_it() -> None:
    sandboxes, found = SandboxPool(1), []

    def use() -> None:
        try:
            run_tests("while 1: pass", "python", TWICE, Limits(test_s=30), pool=sandboxes)
        except RunError as error:
            found.append(str(error))

    thread = threading.Thread(target=use)
    thread.start()
    while not sandboxes._all:
        time.sleep(0.01)
    sandboxes.close()
    thread.join()
    assert "closed" in found[0] and not sandboxes._all


def test_many_threads_share_the_boxes(sandboxes: SandboxPool) -> None:
    found: list[bool] = []

    def use(n: int) -> None:
        test = [StdioTest(f"{n}\n", f"{2 * n}\n")]
        found.append(run_tests("print(2 * int(input()))", "python", test, pool=sandboxes) == Verdict.CORRECT)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 16


@pytest.mark.parametrize("namespaces", [True, False])
def test_boxes_die_with_a_killed_owner(namespaces: bool, tmp_path: Path) -> None:
    program = (
        "from verify.code.runner import *; from verify.code.tests import *\n"
        "import verify.code.runner as p, psutil, threading, time\n"
        f"p._sandboxes = p.SandboxPool(1, namespaces={namespaces})\n"
        "threading.Thread(target=run_tests, args=('while 1: pass', 'python', [StdioTest('', '')], Limits(test_s=60)),"
        " daemon=True).start()\n"
        "while len(below := psutil.Process().children(recursive=True)) < 3: time.sleep(0.05)\n"
        "print(*[process.pid for process in below], flush=True)\ntime.sleep(60)"
    )
    variables = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT) + ":" + os.environ.get("PYTHONPATH", "")}
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=variables
    ) as owner:
        assert owner.stdout
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        owner.kill()
    assert len(pids) == 3
    limit = time.perf_counter() + 120
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.perf_counter() < limit, "a sandbox outlived its owner"
        time.sleep(0.05)
    while list(tmp_path.iterdir()):
        assert time.perf_counter() < limit, "a sandbox left its folder"
        time.sleep(0.05)
