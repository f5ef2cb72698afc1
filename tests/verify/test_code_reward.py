"""Programs of completions, run in sandboxes: their reward, the language that tests take, the tests that a group draws,
and hosts that isolate nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import DataError
from shared.sandbox_settings import Sandbox
from shared.types import Verdict
from trainer.data.problem_file import read_problems
from verify.code import cpp
from verify.code.runner import ProgramVerifier
from verify.code.sandbox.client import SandboxRefused
from verify.code.sandbox_pool import SandboxPool
from verify.code.tests import draw, read_tests
from verify.reward import score
from verify.verifiers import read_problem

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]
ROW: dict[str, Any] = {
    "id": "double", "problem": "Write a program that reads an integer from standard input and prints its double.",
    "domain": "code", "tests": [{"input": f"{n}\n", "output": f"{2 * n}\n"} for n in range(40)],
}  # fmt: skip
HALVES = [{"input": f"{n}", "output": f"{max(2 * n, 4)}"} for n in range(4)]
CALLS = {"fn_name": "double", "inputs": [[2], [5]], "outputs": [4, 10]}
ASSERTS = {"type": "asserts", "code": "assert double(2) == 4\nassert double(5) == 10\n"}
MAIN_CODE = "#include <cassert>\nint main() { assert(twice(2) == 4); assert(twice(5) == 10); }"
MAIN = {"type": "main", "code": MAIN_CODE, "prefix": "int twice(int n) {"}
DOUBLE = "print(2 * int(input()))"
FUNCTION = "def double(x):\n    return 2 * x"
CPP_DOUBLE = "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << 2 * n; }"
CPP_TWICE = "int twice(int n) { return 2 * n; }"


@pytest.mark.parametrize(
    ("tests", "language", "source", "verdict", "reason"),
    [
        (ROW["tests"], "python", DOUBLE, "correct", ""),
        (ROW["tests"], "py", DOUBLE, "correct", ""),
        (ROW["tests"], "python", "print(3 * int(input()))", "wrong", "printed"),
        (ROW["tests"], "python", "print(2 * int(input())", "wrong", ""),
        (ROW["tests"], "ruby", "puts 2", "wrong", "ruby"),
        (HALVES, "python", DOUBLE, "wrong", "printed '0"),
        (CALLS, "python", FUNCTION, "correct", ""),
        (CALLS, "python", "def double(x):\n    return 4", "wrong", ""),
        (CALLS, "cpp", CPP_DOUBLE, "wrong", "python"),
        (ASSERTS, "python", FUNCTION, "correct", ""),
        (ASSERTS, "python", "def double(x):\n    return 2 + x", "wrong", ""),
        (MAIN, "python", "def twice(x):\n    return 2 * x", "wrong", "cpp"),
        (ROW["tests"], "c++", CPP_DOUBLE, "correct", ""),
        (MAIN, "cpp", CPP_TWICE, "correct", ""),
        (MAIN, "cpp", CPP_TWICE.replace("2 * n", "4"), "wrong", ""),
    ],
)
def test_reward_of_a_program(tests: Any, language: str, source: str, verdict: str, reason: str) -> None:
    if language in ("c++", "cpp") and not cpp.compiler():
        pytest.skip("g++ is not installed")
    text = f"<think>We read the number and print its double.</think>Here it is:\n```{language}\n{source}\n```"
    found = score(ROW | {"tests": tests}, text)
    assert (found.verdict, found.total) == (verdict, pytest.approx({"correct": 1.1, "wrong": 0.2}[verdict]))
    assert reason in found.reason and (tests is not HALVES or found.share == 0.5)


def test_a_group_sits_one_exam_and_another_group_another() -> None:
    """A program that fails a single test of forty is caught by just the groups that draw it."""
    programs = ProgramVerifier(Sandbox(max_tests=3, max_concurrency=1))
    problem = read_problem(ROW, "row")
    caught, expected = [], []
    source = "n = int(input())\nprint(2 * n if n != 7 else 0)\n"

    async def run() -> None:
        for group in range(24):
            [verdict] = {(await programs.run(problem, source, "python", group)).verdict for _ in range(2)}
            caught.append(verdict is Verdict.WRONG)
            drawn = draw(read_tests(problem.tests), 3, f"double/{group}")
            expected.append(any(getattr(test, "input", "") == "7\n" for test in drawn))
        await programs.close()

    asyncio.run(run())
    assert caught == expected and 0 < sum(caught) < 24


def test_tests_that_cannot_be_read_are_told_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for tests, told in (({"what": 1}, "a.jsonl:2"), ([], "lacks 'tests'"), (None, "lacks 'tests'")):
        path.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW | {"tests": tests}) + "\n")
        with pytest.raises(DataError, match=told):
            read_problems(path, "data.train")


def test_a_host_that_cannot_isolate_refuses_and_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: SandboxPool) -> None:
        raise SandboxRefused("sandbox refused: this host cannot isolate untrusted programs")

    monkeypatch.setattr(SandboxPool, "start_sandbox", refuse)

    async def run() -> None:
        programs = ProgramVerifier(Sandbox())
        with pytest.raises(SandboxRefused, match="reward.sandbox.isolation"):
            await programs.start()
        found = await programs.run(read_problem(ROW, "row"), DOUBLE, "python", 0)
        assert found.verdict is Verdict.SANDBOX_REFUSED and not found.graded
        await programs.close()

    asyncio.run(run())
