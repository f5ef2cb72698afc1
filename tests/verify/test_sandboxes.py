"""The life of sandboxes (lost, stopped, closed, killed with their owner), and hosts that are not as one would wish: old
kernels, root without namespaces, broken compilers, full disks."""

import asyncio
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from shared.errors import RunError
from shared.types import Verdict
from tests.verify.conftest import opened
from verify.code import cpp, program_run, sandbox_pool
from verify.code.program_run import cpp_works
from verify.code.runner import describe_isolation, in_thread, run_tests
from verify.code.sandbox import isolation
from verify.code.sandbox.client import Isolation, SandboxHandle, SandboxRefused
from verify.code.sandbox_pool import SandboxPool
from verify.code.tests import Limits, ProgramVerdict, StdioTest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandboxes change their user")
DOUBLE = "print(2 * int(input()))"
TWICE = [StdioTest("3\n", "6\n"), StdioTest("-1\n", "-2\n")]


@pytest.fixture
def pool(request):
    made = opened(shared_folder=cpp.cache_folder(), **getattr(request, "param", {}))
    yield made
    made.close()


def doubled(pool: SandboxPool, **limits: float) -> ProgramVerdict:
    return run_tests(DOUBLE, "python", TWICE, limits, pool=pool)


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def test_a_killed_or_stopped_box_is_replaced_and_counted(pool):
    for lost, stop in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
        with pool.acquire() as lease:
            box = psutil.Process(lease.candidate.process.pid)
        victim = box if stop is signal.SIGKILL else box.children()[0]
        victim.send_signal(stop)
        assert doubled(pool, test_s=4 if stop is signal.SIGKILL else 0.5) == Verdict.CORRECT
        assert (pool.counts["lost"], pool.counts["started"]) == (lost, lost + 1) and not victim.is_running()


def test_threads_and_an_event_loop_share_boxes_and_nothing_is_left():
    before = children()

    async def use(pool: SandboxPool) -> None:
        slow = f"import time\ntime.sleep(0.5)\n{DOUBLE}"
        runs = asyncio.gather(*(in_thread(run_tests, slow, "python", TWICE, pool=pool) for _ in range(2)))
        turns = 0
        while not runs.done():
            await asyncio.sleep(0.01)
            turns += 1
        assert await runs == [Verdict.CORRECT] * 2 and turns > 3, "the loop goes on"

    pool = SandboxPool(2)
    asyncio.run(use(pool))
    with ThreadPoolExecutor(16) as threads:
        assert [*threads.map(lambda _: doubled(pool), range(16))] == [Verdict.CORRECT] * 16
    pool.close()
    assert children() <= before


def test_close_ends_who_runs_and_who_waits(pool):
    """And whoever comes later; in threads and in an event loop."""

    def run(source: str) -> asyncio.Task[ProgramVerdict]:
        return asyncio.create_task(in_thread(run_tests, source, "python", TWICE, Limits(test_s=60), pool=pool))

    async def use() -> list[Any]:
        with pool.acquire() as lease:
            box = psutil.Process(lease.candidate.process.pid)
        work: list[Any] = [run("while 1: pass")]
        while len(box.children(recursive=True)) < 2:  # the program runs
            await asyncio.sleep(0.01)
        work += [run(DOUBLE), run(DOUBLE), *(asyncio.create_task(asyncio.to_thread(doubled, pool)) for _ in range(3))]
        await asyncio.sleep(0.1)  # the threads wait
        await asyncio.to_thread(pool.close)
        return await asyncio.gather(*work, run(DOUBLE), return_exceptions=True)

    ends = asyncio.run(use())
    assert len(ends) == 7 and all(isinstance(end, RunError) and "closed" in str(end) for end in ends), ends
    assert pool.counts["started"] == 1 and not pool._all


@pytest.mark.parametrize("namespaces", [True, False])
def test_boxes_die_with_a_killed_owner(namespaces, tmp_path, root):
    program = (
        "from verify.code.runner import *; from verify.code.tests import *\n"
        "import verify.code.runner as p, psutil, threading, time\n"
        f"p._sandboxes = p.SandboxPool(1, namespaces={namespaces})\n"
        "threading.Thread(target=run_tests, args=('while 1: pass', 'python', [StdioTest('', '')], Limits(test_s=60)),"
        " daemon=True).start()\n"
        "while len(below := psutil.Process().children(recursive=True)) < 3: time.sleep(0.05)\n"
        "print(*[process.pid for process in below], flush=True)\ntime.sleep(60)"
    )
    variables = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True, env=variables) as owner:
        assert owner.stdout
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        owner.kill()
    assert len(pids) == 3
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        time.sleep(0.05)
    while list(tmp_path.iterdir()):  # the folders of the boxes
        time.sleep(0.05)


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


def test_a_failed_start_does_not_weaken_the_boxes_after_it(pool, monkeypatch):
    monkeypatch.setattr(sandbox_pool, "SandboxHandle", Refusing)
    monkeypatch.setattr(Refusing, "asked", [])
    with pytest.raises(SandboxRefused, match="did not start"):
        pool.start_sandbox()
    assert Refusing.asked == [True, True] and pool.namespaces
    monkeypatch.setattr(Refusing, "good_after", 1)
    for fresh in (pool, SandboxPool(1)):
        monkeypatch.setattr(Refusing, "asked", [])
        sandbox = fresh.start_sandbox()
        assert sandbox.isolation.namespaces and Refusing.asked == [True, True]
        sandbox.kill()
        fresh.close()


def test_host_that_cannot_isolate_refuses_unless_told_otherwise():
    bare = SandboxPool(1, namespaces=False, landlock=False)
    outcome = doubled(bare)
    bare.close()
    assert outcome.verdict is Verdict.SANDBOX_REFUSED and not outcome.graded and "neither" in outcome.reason
    unsafe = SandboxPool(1, namespaces=False, landlock=False, unsafe=True)
    assert doubled(unsafe) == Verdict.CORRECT
    assert "namespaces none, Landlock none" in describe_isolation(unsafe)
    unsafe.close()


def test_as_many_boxes_as_processors_given_to_this_process(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 4, 5})
    assert SandboxPool().size == 2


@pytest.mark.parametrize("abi", [1, 2, 7])
def test_readable_files_cannot_be_emptied(open_folder, abi):
    """Landlock sees this only from ABI 3; a file that a program may read is then kept by the filter."""
    pool, kept = opened(namespaces=False, landlock=abi, shared_folder=str(open_folder)), open_folder / "kept"
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
    outcome, landlock = run_tests(source, "python", [StdioTest("", "kept")], pool=pool), pool.isolation.landlock
    pool.close()
    assert outcome == Verdict.CORRECT and kept.read_text() == "kept" and landlock <= abi, outcome


@needs_root
def test_root_changes_its_user_without_namespaces(tmp_path):
    """Whatever cannot be reached by that user is left out, and modules are found all the same."""
    tmp_path.chmod(0o700)
    (tmp_path / "header").mkdir()
    pool = opened(namespaces=False, shared_folder=str(tmp_path / "header"))
    source = "import os, sqlite3, xml.dom.minidom, encodings.cp850, lzma\nprint(os.getuid() > 0, os.geteuid() > 0)"
    outcome = run_tests(source, "python", [StdioTest("", "True True")], pool=pool)
    pool.close()
    assert outcome == Verdict.CORRECT and pool.isolation.user >= 61184, outcome


@needs_root
def test_root_whose_interpreter_is_closed_is_refused_without_namespaces(monkeypatch):
    with tempfile.TemporaryDirectory() as closed:
        monkeypatch.setattr("sys.base_prefix", closed)
        pool = SandboxPool(1, namespaces=False)
        with pytest.raises(SandboxRefused, match="closed to other users"):
            describe_isolation(pool)
        pool.close()


@needs_root
def test_folder_of_a_box_can_be_reached(monkeypatch, tmp_path):
    tmp_path.chmod(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = Path(isolation.make_folder())
    assert isolation.is_open(str(made.parent)) and not made.is_relative_to(tmp_path)
    isolation.remove_folder(str(made))
    assert not made.exists()


def test_folders_are_emptied_whatever_is_in_them(tmp_path):
    """Closed ones, links out of them, and more in each other than a path or Python's stack can be long."""
    box, inner, outside = tmp_path / "box", tmp_path / "box" / "closed" / "inner", tmp_path / "outside"
    for folder in (inner, outside):
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")
    for closed in (inner, inner.parent):
        closed.chmod(0)
    (box / "link").symlink_to(outside)
    at = os.open(box, os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("nested" * 20, dir_fd=at)
        at, above = os.open("nested" * 20, os.O_RDONLY, dir_fd=at), at
        os.close(above)
    os.close(at)
    isolation.empty_folder(str(box))
    assert not list(box.iterdir()) and (outside / "file").exists()


@needs_compiler
@pytest.mark.parametrize("pool", [{"namespaces": False}], indirect=True)
def test_compiler_is_tried_once(pool, monkeypatch):
    with pool.acquire() as lease:
        assert cpp_works(lease) == "" and pool.compiles
        monkeypatch.setattr(cpp, "assertion_program", None)
        assert cpp_works(lease) == "" and not os.listdir(f"{lease.candidate.work}/build")


@needs_compiler
@pytest.mark.soak  # in make test: one that does not compile, one that is missing
def test_a_compiler_that_does_not_serve_is_told(pool, monkeypatch, tmp_path):
    """Outside of the box, without its tools, and where what it writes may not be executed."""
    (tmp_path / "g++").symlink_to(cpp.compiler())
    steps = cpp.assertion_program

    def closed(*what: Any) -> list[Any]:
        return [*steps(*what), cpp.CompilerStep(["/bin/chmod", "a-x", "program"])]

    for name, value, reason in (
        ("compiler", lambda: str(tmp_path / "g++"), "does not work in a sandbox"),
        ("missing_tool", lambda: "objcopy", "objcopy is not installed"),
        ("assertion_program", closed, "noexec"),
    ):
        with pool.acquire() as lease, monkeypatch.context() as patch:
            patch.setattr(cpp, name, value)
            assert reason in cpp_works(lease)
    with pool.acquire() as lease:
        assert cpp_works(lease) == ""


@pytest.mark.parametrize("pool", [{"namespaces": False}], indirect=True)
def test_full_disk_is_told_and_is_no_crash(pool, monkeypatch):
    monkeypatch.setattr(cpp, "missing_tool", lambda: "")
    monkeypatch.setattr(program_run, "ROOM_BYTES", 1 << 60)
    with pool.acquire() as lease:
        assert "make room" in cpp_works(lease)

    def full(**_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    refused = SandboxPool(1, namespaces=False)
    outcome = doubled(refused)
    refused.close()
    assert outcome.verdict is Verdict.SANDBOX_REFUSED and "No space left" in outcome.reason


@needs_compiler
def test_a_held_lock_ends_the_wait_for_the_header(monkeypatch, tmp_path):
    """And no file below the folder that sandboxes read is locked."""
    folder = tmp_path / "header"
    folder.mkdir()
    monkeypatch.setattr(cpp, "cache_folder", lambda: str(folder))
    monkeypatch.setattr(cpp, "LOCK_S", 0.3)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not cpp.precompile.__wrapped__()
    assert not [path for path in folder.rglob("*") if path.is_file()]
