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
from typing import Any

import psutil
import pytest

from shared.types import Verdict
from tests.tables import read_table
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
ATTACKS = read_table("verify/attacks")
"""given the input "3" each must print "6", and none does so honestly; {canary} stands for a file outside"""
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")


def shown(language: str) -> list[Any]:
    """(isolation, attack), left out where another kind of isolation shows the same: time and memory are limited, and
    system calls filtered, alike with and without namespaces."""
    pairs = []
    for row in (row for row in ATTACKS if row["language"] == language):
        name, timed = row["name"], row["statuses"] == "timeout" or "bomb" in row["name"]
        kinds = ["namespaces"]
        if any(word in name for word in WITHOUT_LANDLOCK):
            kinds.append("namespaces only")
        if not timed and any(word in name for word in ALSO_WITHOUT):
            kinds.append("landlock only")
        pairs += [pytest.param(kind, row, id=f"{kind}: {name}") for kind in kinds]
    return pairs


@pytest.fixture(scope="module")
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
    assert all(sum(row["language"] == language for row in ATTACKS) >= 40 for language in ("python", "cpp"))


@pytest.mark.parametrize(("sandboxes", "row"), shown("python"), indirect=["sandboxes"])
def test_python_attack(sandboxes: SandboxPool, canary: Path, row: dict[str, str]) -> None:
    check(sandboxes, canary, "python", row["statuses"], row["program"])


@needs_compiler
@pytest.mark.parametrize(("sandboxes", "row"), shown("cpp"), indirect=["sandboxes"])
def test_cpp_attack(sandboxes: SandboxPool, canary: Path, row: dict[str, str]) -> None:
    limits = LITTLE_MEMORY if row["name"].startswith("memory") else LIMITS
    check(sandboxes, canary, "cpp", row["statuses"], row["program"], limits=limits)
