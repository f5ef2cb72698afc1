"""Programs that attack the grader, in both languages: each gets the right status, and nothing is left behind.

One lease runs all attacks on one kind of isolation, half a second each: an attack that broke its sandbox would fail
those after. Time and memory are limited, and system calls filtered, alike on all kinds of isolation and in both
languages: so most attacks run with namespaces, and on the other kinds Python's that try what these hold off.
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
from tests.verify.conftest import opened
from verify.code import cpp
from verify.code.runner import run_tests
from verify.code.sandbox_pool import SandboxPool
from verify.code.tests import Limits, StdioTest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]
NAMESPACES_ONLY = ("outside", "canary", "disk", "program", "accounts", "processes", "parent's", "state", "link")
LANDLOCK_ONLY = ("outside", "kill", "fork", "exec", "ptrace", "socket", "disk", "canary", "program", "symlink")


def attacks() -> Iterator[Any]:
    """(isolation, attack); given the input "3" each must print "6", and none does so honestly."""
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
def sandboxes(request: pytest.FixtureRequest) -> Iterator[SandboxPool]:
    namespaces, landlock = request.param != "landlock only", request.param != "namespaces only"
    with tempfile.TemporaryDirectory(prefix="attacks-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        Path(folder).chmod(0o755)
        patch.setattr(tempfile, "tempdir", folder)  # sandboxes of other tests at the same time are elsewhere
        pool = opened(namespaces=namespaces, landlock=landlock, shared_folder=cpp.cache_folder())
        yield pool
        pool.close()


def traces(pool: SandboxPool) -> tuple[int, list[str]]:
    """How many processes are in and under the sandboxes, and the files beside theirs."""
    leases = [psutil.Process(lease.candidate.process.pid) for lease in pool._all]
    return sum(len(process.children(recursive=True)) for process in leases), sorted(os.listdir(tempfile.gettempdir()))


@pytest.mark.parametrize(("sandboxes", "row"), attacks(), indirect=["sandboxes"])
def test_attack(sandboxes: SandboxPool, open_folder: Path, row: dict[str, Any]) -> None:
    """{canary} stands for a file outside that any user may read and write, in a folder open to all."""
    canary = open_folder / "canary"
    canary.write_text("6\n")
    canary.chmod(0o666)
    # 64 MiB are filled in .03 s (the usual 300 MB on a busy machine in .5): so memory ends it, not time
    memory = 64 << 20 if row["language"] == "cpp" and row["name"].startswith("memory") else Limits().memory_bytes
    limits, before = Limits(test_s=0.5, compile_s=3.0, memory_bytes=memory), traces(sandboxes)
    source = row["program"].replace("{canary}", str(canary))
    outcome = run_tests(source, row["language"], [StdioTest("3\n", "6\n")], limits, pool=sandboxes)
    assert outcome.verdict is Verdict.WRONG and outcome.status in row["statuses"], outcome
    assert canary.read_text() == "6\n" and os.listdir(open_folder) == ["canary"]
    assert traces(sandboxes) == before and before[0] == 1 and sandboxes.counts["lost"] == 0
