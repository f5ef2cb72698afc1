"""Programs that attack the grader, in both languages: each gets the right status, and nothing is left behind.

One lease runs all attacks on one kind of isolation, half a second each: an attack that broke its sandbox would fail
those after. Attacks on time and most of C++ are run with namespaces and Landlock only, for the time they take.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shared.types import Verdict
from tests.verify import attacks
from tests.verify.sandboxes import opened
from verify.code import cpp
from verify.code.runner import run_tests
from verify.code.sandbox_pool import SandboxPool
from verify.code.tests import Limits, StdioTest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]

TEST = [StdioTest("3\n", "6\n")]
LIMITS = Limits(test_s=0.5, compile_s=3.0)
LITTLE_MEMORY = Limits(test_s=0.5, compile_s=3.0, memory_bytes=64 << 20)
"""filled in .03 s (the usual 300 MB took .15, and on a busy machine .5): so it is memory that ends it, not time"""
WITHOUT_LANDLOCK = ("outside", "canary", "disk", "program", "accounts", "processes", "parent's", "state", "link")
ALSO_WITHOUT = ("outside", "kill", "fork", "exec", "ptrace", "socket", "disk", "canary", "program", "symlink")
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")


@pytest.fixture(scope="module", params=["namespaces", "landlock only", "namespaces only"])
def sandboxes(request: pytest.FixtureRequest) -> Iterator[SandboxPool]:
    namespaces, landlock = request.param != "landlock only", request.param != "namespaces only"
    with tempfile.TemporaryDirectory(prefix="attacks-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        Path(folder).chmod(0o755)
        patch.setattr(tempfile, "tempdir", folder)  # sandboxes of other tests at the same time are elsewhere
        held = opened(namespaces=namespaces, landlock=landlock, shared_folder=cpp.cache_folder())
        yield held
        held.close()


@pytest.fixture
def canary() -> Iterator[Path]:
    """A file that any user may read and write, in a folder open to all."""
    with tempfile.TemporaryDirectory(prefix="canary-", dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        path = Path(folder) / "canary"
        path.write_text("6\n")
        path.chmod(0o666)
        yield path


def descendants(sandboxes: SandboxPool) -> int:
    """Processes in and under the sandboxes."""
    found = 0
    for lease in sandboxes._all:
        found += len(psutil.Process(lease.candidate.process.pid).children(recursive=True))
    return found


def skip_what_another_kind_shows(sandboxes: SandboxPool, name: str, statuses: str) -> None:
    if not sandboxes.landlock and not any(word in name for word in WITHOUT_LANDLOCK):
        pytest.skip("isolated alike with and without Landlock")
    if sandboxes.namespaces:
        return
    if statuses == "timeout" or "bomb" in name:
        pytest.skip("time is limited alike with and without namespaces")
    if not any(word in name for word in ALSO_WITHOUT):
        pytest.skip("isolated by seccomp and rlimits alike with and without namespaces")


def check(
    sandboxes: SandboxPool, canary: Path, language: str, statuses: str, source: str, limits: Limits = LIMITS
) -> None:
    before, files = descendants(sandboxes), sorted(os.listdir(tempfile.gettempdir()))
    found = run_tests(source.replace("{canary}", str(canary)), language, TEST, limits, pool=sandboxes)  # type: ignore[arg-type]
    assert found.verdict is Verdict.WRONG and found.status.replace(" ", "_") in _names(statuses), found
    assert canary.read_text() == "6\n" and [path.name for path in canary.parent.iterdir()] == ["canary"]
    assert descendants(sandboxes) == before == 1
    assert sorted(os.listdir(tempfile.gettempdir())) == files
    assert sandboxes.counts["lost"] == 0


def _names(statuses: str) -> list[str]:
    return statuses.replace("output limit", "output_limit").replace("compile error", "compile_error").split()


def test_there_are_enough_attacks() -> None:
    assert len(attacks.PYTHON) >= 40 and len(attacks.CPP) >= 40


@pytest.mark.parametrize("name", attacks.PYTHON)
def test_python_attack(sandboxes: SandboxPool, canary: Path, name: str) -> None:
    skip_what_another_kind_shows(sandboxes, name, attacks.PYTHON[name][0])
    check(sandboxes, canary, "python", *attacks.PYTHON[name])


@needs_compiler
@pytest.mark.parametrize("name", attacks.CPP)
def test_cpp_attack(sandboxes: SandboxPool, canary: Path, name: str) -> None:
    skip_what_another_kind_shows(sandboxes, name, attacks.CPP[name][0])
    limits = LITTLE_MEMORY if name.startswith("memory") else LIMITS
    check(sandboxes, canary, "cpp", *attacks.CPP[name], limits=limits)
