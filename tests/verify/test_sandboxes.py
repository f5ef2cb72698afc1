"""Sandboxes on hosts that are not as one would wish: old kernels, root without namespaces, broken compilers, full
disks."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.errors import DataError, RunError
from shared.types import Verdict
from tests.verify.programs import FIRST, TWICE
from tests.verify.sandboxes import opened
from verify.code import cpp, program_run, sandbox_pool
from verify.code.program_run import cpp_works
from verify.code.runner import describe_isolation, in_thread, run_tests
from verify.code.sandbox import isolation
from verify.code.sandbox.client import Isolation, SandboxHandle, SandboxRefused
from verify.code.sandbox_pool import SandboxPool
from verify.code.tests import Assertions, StdioTest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandboxes change their user")
DOUBLE = "print(2 * int(input()))"


@pytest.fixture(scope="module")
def held() -> Iterator[SandboxPool]:
    held = opened(shared_folder=cpp.cache_folder())
    yield held
    held.close()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may write."""
    with tempfile.TemporaryDirectory(prefix="open-", dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@pytest.mark.parametrize("abi", [1, 2, 7])
def test_readable_files_cannot_be_emptied(open_folder: Path, abi: int) -> None:
    """Landlock sees this only from ABI 3; a file that a program may read is then kept by the filter."""
    held, kept = opened(namespaces=False, landlock=abi, shared_folder=str(open_folder)), open_folder / "kept"
    kept.write_text("kept")
    kept.chmod(0o666)
    source = f"""
import ctypes, os
path, call = {str(kept)!r}, ctypes.CDLL(None).syscall
print(open(path).read())
for attempt in (
    lambda: os.truncate(path, 0), lambda: os.open(path, os.O_RDONLY | os.O_TRUNC), lambda: open(path, 'w'),
    lambda: os.open(path, 3 | os.O_TRUNC), lambda: call(76, path.encode(), 0), lambda: call(85, path.encode(), 0),
    lambda: call(2, path.encode(), 3 | os.O_TRUNC, 0),
    lambda: call(437, -100, path.encode(), ctypes.byref((ctypes.c_uint64 * 3)(os.O_TRUNC)), 24),
):
    try: attempt()
    except OSError: pass
"""
    found = run_tests(source, "python", [StdioTest("", "kept")], pool=held)
    landlock = held.isolation.landlock
    held.close()
    assert found == Verdict.CORRECT and kept.read_text() == "kept" and landlock <= abi, found


@needs_root
def test_root_changes_its_user_without_namespaces(tmp_path: Path) -> None:
    """Whatever cannot be reached by that user is left out, and modules are found all the same."""
    tmp_path.chmod(0o700)
    (tmp_path / "header").mkdir()
    held = opened(namespaces=False, shared_folder=str(tmp_path / "header"))
    assert held.isolation.user >= 61184
    source = "import os, sqlite3, xml.dom.minidom, encodings.cp850, lzma\nprint(os.getuid() > 0, os.geteuid() > 0)"
    found = run_tests(source, "python", [StdioTest("", "True True")], pool=held)
    held.close()
    assert found == Verdict.CORRECT, found


@needs_root
def test_root_whose_interpreter_is_closed_is_refused_without_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as closed:
        monkeypatch.setattr("sys.base_prefix", closed)
        held = SandboxPool(1, namespaces=False)
        with pytest.raises(SandboxRefused, match="closed to other users"):
            describe_isolation(held)
        held.close()


@needs_root
def test_folder_of_a_box_can_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = isolation.make_folder()
    assert isolation.is_open(str(Path(made).parent)) and not Path(made).is_relative_to(tmp_path)
    isolation.remove_folder(made)
    assert not os.path.exists(made)


def test_folders_are_emptied_whatever_is_in_them(tmp_path: Path) -> None:
    (tmp_path / "closed" / "inner").mkdir(parents=True)
    (tmp_path / "closed" / "inner" / "file").write_text("x")
    for closed in (tmp_path / "closed" / "inner", tmp_path / "closed"):
        closed.chmod(0)
    outside = tmp_path.parent / "outside"
    outside.mkdir()
    (outside / "file").write_text("x")
    (tmp_path / "link").symlink_to(outside)
    at = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("nested" * 20, dir_fd=at)
        inner = os.open("nested" * 20, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inner
    os.close(at)
    isolation.empty_folder(str(tmp_path))
    assert not list(tmp_path.iterdir()) and (outside / "file").exists()


@needs_compiler
@pytest.mark.parametrize("settings", [{}, {"namespaces": False}], ids=["namespaces", "landlock only"])
def test_compiler_is_tried_once(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    held = opened(**settings)
    with held.acquire() as lease:
        assert cpp_works(lease) == "" and held.compiles
        monkeypatch.setattr(cpp, "assertion_program", None)
        assert cpp_works(lease) == ""
        assert not lease.candidate.folder or not os.listdir(f"{lease.candidate.work}/build")
    held.close()


@needs_compiler
def test_compiler_outside_of_the_box_is_told(
    held: SandboxPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "g++").symlink_to(cpp.compiler())
    monkeypatch.setattr(held, "compiles", False)
    with held.acquire() as lease, monkeypatch.context() as patch:
        patch.setattr(cpp, "compiler", lambda: str(tmp_path / "g++"))
        assert "does not work in a sandbox" in cpp_works(lease)
        patch.setattr(cpp, "missing_tool", lambda: "objcopy")
        assert "objcopy is not installed" in cpp_works(lease)
        patch.undo()
        assert cpp_works(lease) == ""


@needs_compiler
def test_programs_that_may_not_be_executed_are_told(held: SandboxPool, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = cpp.assertion_program
    monkeypatch.setattr(held, "compiles", False)
    monkeypatch.setattr(
        cpp, "assertion_program", lambda *what: [*steps(*what), cpp.CompilerStep(["/bin/chmod", "a-x", "program"])]
    )
    with held.acquire() as lease:
        assert "noexec" in cpp_works(lease)


def test_full_disk_is_told_and_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    held = opened(namespaces=False)
    monkeypatch.setattr(cpp, "missing_tool", lambda: "")
    monkeypatch.setattr(program_run, "ROOM_BYTES", 1 << 60)
    with held.acquire() as lease:
        assert "make room" in cpp_works(lease)
    held.close()

    def full(**_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    refused = SandboxPool(1, namespaces=False)
    found = run_tests(DOUBLE, "python", TWICE, pool=refused)
    refused.close()
    assert found.verdict is Verdict.SANDBOX_REFUSED and "No space left" in found.reason


class Refusing(SandboxHandle):
    """A sandbox that does not come up; `asked` gathers whether each was to have namespaces; after `good_after` they
    do."""

    asked: list[bool] = []
    good_after = 99

    def __init__(self, namespaces: bool = True, *others: Any) -> None:
        super().__init__(namespaces, *others)
        self.asked.append(namespaces)
        if len(self.asked) <= self.good_after:
            self.isolation = Isolation(refused="no memory")


def test_a_failed_start_does_not_weaken_the_boxes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    held = opened()
    monkeypatch.setattr(Refusing, "asked", [])
    monkeypatch.setattr(sandbox_pool, "SandboxHandle", Refusing)
    with pytest.raises(SandboxRefused, match="did not start"):
        held.start_sandbox()
    assert Refusing.asked == [True, True] and held.namespaces
    monkeypatch.setattr(Refusing, "asked", [])
    monkeypatch.setattr(Refusing, "good_after", 1)
    sandbox = held.start_sandbox()
    assert sandbox.isolation.namespaces and Refusing.asked == [True, True]
    sandbox.kill()
    held.close()
    monkeypatch.setattr(Refusing, "asked", [])
    fresh = SandboxPool(1)
    assert "namespaces (" in describe_isolation(fresh) and Refusing.asked == [True, True]
    fresh.close()


def test_who_waits_for_a_closed_sandbox_is_told() -> None:
    held, found = opened(), []

    def wait() -> None:
        try:
            run_tests(DOUBLE, "python", TWICE, pool=held)
        except RunError as error:
            found.append(str(error))

    with pytest.raises(RunError, match="closed"), held.acquire():
        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        held.close()
        held._check_open()
    for thread in threads:
        thread.join(10)
    assert len(found) == 3 and all("closed" in reason for reason in found)
    assert held.counts["started"] == 1 and not held._all


def test_grading_after_the_end_and_in_the_queue_is_told() -> None:
    async def use() -> list[Any]:
        held = opened()
        slow = "import time\ntime.sleep(3)\nprint(2 * int(input()))"
        jobs = [asyncio.create_task(in_thread(run_tests, slow, "python", TWICE, pool=held)) for _ in range(3)]
        await asyncio.sleep(0.5)
        await asyncio.to_thread(held.close)
        with pytest.raises(RunError, match="closed"):
            await in_thread(run_tests, DOUBLE, "python", TWICE, pool=held)
        return await asyncio.gather(*jobs, return_exceptions=True)

    assert [type(found) for found in asyncio.run(use())] == [RunError] * 3


@needs_compiler
def test_a_held_lock_ends_the_wait_for_the_header(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And no file below the folder that sandboxes read is locked."""
    folder = tmp_path / "header"
    folder.mkdir()
    monkeypatch.setattr(cpp, "cache_folder", lambda: str(folder))
    monkeypatch.setattr(cpp, "LOCK_S", 0.3)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not cpp.precompile.__wrapped__()
    assert not [path for path in folder.rglob("*") if path.is_file()]


def test_as_many_boxes_as_processors_given_to_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 4, 5})
    assert SandboxPool().size == 2


HEADS = {
    "references": "vector<int> first(const vector<int>& a, const string& s) { return {a[0]}; }",
    "reference": "vector<int> first(vector<int>& a, string s) { return {a[0]}; }",
    "static": "static vector<int> first(vector<int> a, string s) { return {a[0]}; }",
    "inline, overloaded": "inline vector<int> first(vector<int> a) { return {a[0]}; }\n"
    "inline vector<int> first(vector<int> a, string s) { return first(a); }",
    "template": "template<class T> vector<T> first(vector<T> a, string s) { return {a[0]}; }",
    "namespace": "namespace {\nvector<int> first(vector<int> a, string s = {}) { return {a[0]}; }\n}",
}


@needs_compiler
@pytest.mark.parametrize("name", HEADS)
def test_head_of_a_function_need_not_be_that_of_the_tests(held: SandboxPool, name: str) -> None:
    assert run_tests(HEADS[name], "cpp", FIRST, pool=held) == Verdict.CORRECT
    if name == "references":
        wrong = HEADS[name].replace("{a[0]}", "a")
        assert run_tests(wrong, "cpp", FIRST, pool=held) == Verdict.WRONG


@needs_compiler
def test_a_head_without_linkage_is_called(held: SandboxPool) -> None:
    head = "using namespace std;\nstatic int f(int x = 3) {\n"
    tests = Assertions("int main() { assert(f(2) == 4); assert(f(3) == 9); }", head)
    assert run_tests("return x * x; }", "cpp", tests, pool=held) == Verdict.CORRECT
    assert run_tests("return x + x; }", "cpp", tests, pool=held) == Verdict.WRONG


@pytest.mark.parametrize("head", ["template<class T> T f(T x)", "auto f(int x)"])
def test_a_head_without_types_is_refused(held: SandboxPool, head: str) -> None:
    with pytest.raises(DataError, match="needs the head of the function that it calls, with its types"):
        run_tests("return x * x; }", "cpp", Assertions("int main() { assert(f(2) == 4); }", f"{head} {{\n"), pool=held)


FILES = "import os\nprint(os.listdir())\nopen('seen', 'w')"
LARGE = """
import os
file, written = os.open('large', os.O_CREAT | os.O_WRONLY), 0
try:
    while written < 20 << 20: written += os.write(file, bytes(1 << 20))
except OSError: print(written >> 20)
"""


@pytest.mark.parametrize(("source", "printed"), [(FILES, "[]"), (LARGE, "16")], ids=["left behind", "size"])
def test_files_are_limited_and_gone_before_the_next_test(held: SandboxPool, source: str, printed: str) -> None:
    outcome = run_tests(source, "python", [StdioTest("", printed)] * 2, pool=held)
    assert outcome == Verdict.CORRECT, outcome


def test_a_stack_larger_than_the_memory_is_cut(held: SandboxPool) -> None:
    source = (
        "import sys, threading\nthreading.stack_size(1 << 29)\nsys.setrecursionlimit(10**6)\n"
        "def f(n): return 0 if n == 0 else 1 + f(n - 1)\n"
        "def main(): print(2 * int(input()) + f(50000) - 50000)\nthreading.Thread(target=main).start()"
    )
    found = run_tests(source, "python", TWICE, pool=held)
    assert found == Verdict.CORRECT, found
