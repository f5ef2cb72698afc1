"""Programs of completions, run in sandboxes: their reward, the language that tests take, and hosts that isolate
nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import DataError
from shared.sandbox_settings import Sandbox
from shared.types import Problem, Verdict
from trainer.data.problem_file import read_problems
from verify.__main__ import main as verify
from verify.code import cpp
from verify.code.runner import ProgramVerifier
from verify.code.sandbox.client import SandboxRefused
from verify.code.sandbox_pool import SandboxPool
from verify.code.tests import draw, read_tests
from verify.reward import score
from verify.verifiers import read_problem

pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]

TASK = "Write a program that reads an integer from standard input and prints its double."
ROW: dict[str, Any] = {
    "id": "double", "problem": TASK, "domain": "code", "language": "en",
    "tests": [{"input": f"{n}\n", "output": f"{2 * n}\n"} for n in range(40)],
}  # fmt: skip
CALLS = ROW | {"tests": {"fn_name": "double", "inputs": [[2], [5]], "outputs": [4, 10]}}
ASSERTS = ROW | {"tests": {"type": "asserts", "code": "assert double(2) == 4\nassert double(5) == 10\n"}}
MAIN_CODE = "#include <cassert>\nint main() { assert(twice(2) == 4); assert(twice(5) == 10); }"
MAIN = ROW | {"tests": {"type": "main", "code": MAIN_CODE, "prefix": "int twice(int n) {"}}
needs_compiler = pytest.mark.skipif(not cpp.compiler(), reason="g++ is not installed")


def response(source: str, language: str = "python") -> str:
    return f"<think>We read the number and print it twice as large.</think>Here it is:\n```{language}\n{source}\n```"


DOUBLE = "print(2 * int(input()))"
CPP_DOUBLE = "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << 2 * n; }"


@pytest.mark.parametrize(
    ("row", "text", "verdict", "total"),
    [
        (ROW, response(DOUBLE), Verdict.CORRECT, 1.1),
        (ROW, response(DOUBLE, "py"), Verdict.CORRECT, 1.1),
        (ROW, response("print(3 * int(input()))"), Verdict.WRONG, 0.2),
        (ROW, response("print(2 * int(input())"), Verdict.WRONG, 0.2),
        (ROW, response("raise SystemExit"), Verdict.WRONG, 0.2),
        (ROW, response("puts 2", "ruby"), Verdict.WRONG, 0.2),
        (ROW, "<think>Easy.</think>Just double it.", Verdict.NO_ANSWER, 0.0),
        (CALLS, response("def double(x):\n    return 2 * x"), Verdict.CORRECT, 1.1),
        (CALLS, response("def double(x):\n    return 4"), Verdict.WRONG, 0.2),
        (CALLS, response(CPP_DOUBLE, "cpp"), Verdict.WRONG, 0.2),
        (ASSERTS, response("def double(x):\n    return 2 * x"), Verdict.CORRECT, 1.1),
        (ASSERTS, response("def double(x):\n    return 2 + x"), Verdict.WRONG, 0.2),
        (ASSERTS, response(CPP_DOUBLE, "cpp"), Verdict.WRONG, 0.2),
        (MAIN, response("def twice(x):\n    return 2 * x"), Verdict.WRONG, 0.2),
        pytest.param(ROW, response(CPP_DOUBLE, "c++"), Verdict.CORRECT, 1.1, marks=needs_compiler),
        pytest.param(MAIN, response("int twice(int n) { return 2 * n; }", "cpp"), Verdict.CORRECT, 1.1,
                     marks=needs_compiler),
        pytest.param(MAIN, response("int twice(int n) { return 4; }", "cpp"), Verdict.WRONG, 0.2, marks=needs_compiler),
    ],
)  # fmt: skip
def test_reward_of_a_program(row: dict[str, Any], text: str, verdict: Verdict, total: float) -> None:
    found = score(row, text)
    assert (found.verdict, found.total) == (verdict, pytest.approx(total)), found.reason


def test_the_share_of_passed_tests_stands_beside_the_verdict_and_says_what_failed() -> None:
    halves = ROW | {"tests": [{"input": f"{n}", "output": f"{max(2 * n, 4)}"} for n in range(4)]}
    found = score(halves, response(DOUBLE))
    assert (found.verdict, found.share, found.correctness) == (Verdict.WRONG, 0.5, 0.0)
    assert "printed '0" in found.reason


def test_a_group_sits_one_exam_and_another_group_another() -> None:
    """A program that fails a single test of forty is caught by just the groups that draw it."""
    programs = ProgramVerifier(Sandbox(max_tests=3, max_concurrency=1))
    problem = read_problem(ROW, "row")
    caught, expected = [], []
    source = "n = int(input())\nprint(2 * n if n != 7 else 0)\n"

    async def run() -> None:
        for group in range(24):
            verdicts = {(await programs.run(problem, source, "python", group)).verdict for _ in range(2)}
            assert len(verdicts) == 1
            caught.append(verdicts.pop() is Verdict.WRONG)
            drawn = draw(read_tests(problem.tests), 3, f"double/{group}")
            expected.append(any(getattr(test, "input", "") == "7\n" for test in drawn))
        await programs.close()

    asyncio.run(run())
    assert caught == expected
    assert 0 < sum(caught) < 24


def test_tests_that_cannot_be_read_are_told_with_their_line(tmp_path: Path) -> None:
    for tests, told in (({"what": 1}, "a.jsonl:2"), ([], "lacks 'tests'"), (None, "lacks 'tests'")):
        path = tmp_path / "a.jsonl"
        path.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW | {"tests": tests}) + "\n")
        with pytest.raises(DataError, match=told):
            read_problems(path, "data.train")
    (tmp_path / "a.jsonl").write_text(json.dumps(ROW) + "\n")
    assert read_problems(tmp_path / "a.jsonl", "data.train").problems[0].tests == ROW["tests"]


def test_a_host_that_cannot_isolate_refuses_and_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: SandboxPool) -> None:
        raise SandboxRefused("sandbox refused: this host cannot isolate untrusted programs")

    monkeypatch.setattr(SandboxPool, "start_sandbox", refuse)

    async def run() -> None:
        programs = ProgramVerifier(Sandbox())
        with pytest.raises(SandboxRefused, match="reward.sandbox.isolation"):
            await programs.start()
        found = await programs.run(Problem("1", TASK, "", domain="code", tests=ROW["tests"]), DOUBLE, "python", 0)
        assert found.verdict is Verdict.SANDBOX_REFUSED and not found.graded
        await programs.close()

    asyncio.run(run())


def test_command_grades_programs_beside_answers(tmp_path: Path) -> None:
    math = {"problem": "Tom has 5 apples and buys 3. How many has he?", "answer": "8"}
    answer = "<think>Tom starts with 5 apples and buys 3 more.</think>The answer is \\boxed{8}."
    rows = [ROW | {"response": response(DOUBLE)}, ROW | {"response": response("print(0)")}, math | {"response": answer}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert verify([str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl")]) == 0
    written = [json.loads(line)["reward"]["verdict"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert written == ["correct", "wrong", "correct"]
