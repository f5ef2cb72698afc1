"""The stage `programs`: vets the tests of programming problems by running every reference solution on each.

    solutions agree (--agreement), expected output is theirs     the test is kept
    solutions agree, expected output is another                  it is replaced by theirs (at least two solutions)
    solutions disagree or fail                                   the test is dropped
    same input, different expected outputs                       the one that solutions give is kept, else none
    assertions other than `f(literals) == literal`               are kept if more than half of the solutions pass
A single solution overrules nothing: if it fails a test, either of the two may be wrong, and the problem is rejected.
Solutions that fail a kept test are dropped as well. Rows of other domains pass through.
Source: Magistral (2506.10910), section 4.2.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import Any, Literal

from curate.exams import Exam, stored, vet_row
from curate.solutions import Bench, Solution, UnrunnableTests, read_solutions
from curate.stage import Command, Decision, Fields, Kept, Rejected, Show
from curate.variants import variants
from shared.errors import ConfigError, DataError
from shared.jsonl import Row, problem_of
from verify import program
from verify.code import cpp
from verify.code.exam import StdioTest, Test, read_tests
from verify.code.result import Limits
from verify.code.seats import Seats

AGREEMENT = 0.7
LEAST_TESTS = 5
COMPILE_S = 60.0
"""generous, so that a busy host does not cost a problem its only solution; the reward has a limit of its own"""


class Programs:
    """The stage that vets tests with reference solutions; the module's docstring has the rules."""

    name = "programs"

    def __init__(
        self,
        agreement: float = AGREEMENT,
        least_tests: int = LEAST_TESTS,
        test_s: float = 4.0,
        make_variants: bool = True,
        max_concurrency: int = 0,
        isolation: Literal["required", "none"] = "required",
    ):
        """`max_concurrency`: number of programs that run at once, 0 for one less than cores."""
        self.settings: dict[str, Any] = {
            "agreement": agreement, "least_tests": least_tests, "test_s": test_s, "variants": make_variants,
        }  # fmt: skip
        self.agreement, self.least_tests, self.make_variants = agreement, least_tests, make_variants
        self.limits = Limits(test_s=test_s, compile_s=COMPILE_S, max_tests=1 << 30)
        self.max_concurrency, self.unsafe = max_concurrency, isolation == "none"
        self.seats: Seats | None = None

    @property
    def under_way(self) -> int:
        """Two rows per sandbox: one runs, one waits."""
        return 2 * self.seats.size if self.seats is not None else 2

    async def prepare(self, rows: Sequence[Row], show: Show) -> None:
        """Start a sandbox. Raises SandboxRefused if the host cannot isolate programs."""
        self.seats = Seats(self.max_concurrency, unsafe=self.unsafe, shared_folder=cpp.cache_folder())
        if any(row.fields.get("domain") == "code" for row in rows):
            await asyncio.to_thread(program.isolation, self.seats)

    async def close(self) -> None:
        """Stop the sandboxes."""
        if self.seats is not None:
            await asyncio.to_thread(self.seats.close)

    async def judge(self, index: int, row: Row) -> Decision:
        """Vet one row's tests."""
        if row.fields.get("domain") != "code":
            return Kept([row.fields], {"rows of other domains": 1})
        try:
            problem = problem_of(row.fields, "the row")
            tests = read_tests(problem.tests)
        except DataError as error:
            return Rejected("tests not readable", str(error))
        solutions = read_solutions(row.fields, tests)
        assert self.seats is not None
        bench = Bench(self.seats, self.limits)
        try:
            exam = await vet_row(row.fields["tests"], tests, solutions, bench, self.agreement)
        except UnrunnableTests as error:
            return Rejected("tests cannot be run", str(error)[:200])
        return self._decide(row.fields, tests, solutions, exam)

    def _decide(self, fields: Fields, tests: list[Test], solutions: list[Solution], exam: Exam) -> Decision:
        if not exam.size:
            return Rejected("no test is left", ", ".join(f"{name}: {count}" for name, count in exam.counts.items()))
        if not solutions and exam.size < self.least_tests:
            return Rejected(f"no solution and fewer than {self.least_tests} tests", f"{exam.size} tests")
        if solutions and not any(exam.passing):
            alone = len(solutions) == 1
            return Rejected("its only solution fails its tests" if alone else "no solution passes its tests")
        counts = exam.counts
        changed = {**fields, "tests": exam.tests}
        if dropped := exam.passing.count(False):
            counts["solutions dropped"] = dropped
            kept = [one.given for one, passes in zip(solutions, exam.passing, strict=True) if passes]
            changed.pop("solution", None)
            changed["solutions"] = kept
        rows = [changed]
        if self.make_variants and all(isinstance(test, StdioTest) and not test.language for test in tests):
            rows = variants(changed, [stored(test) for test in read_tests(exam.tests)])
            counts["rows doubled for Python and C++"] = 1
        return Kept(rows, dict(counts))


EXPLANATION = """
input: rows with "domain": "code", "tests" (docs/programs.md has their shapes) and "solution" (a program) or
"solutions" (a list of programs, or of {"code", "language"}). Rows of other domains pass through.
  solutions agree, the expected output is theirs      the test stays
  solutions agree on another output (two at least)    the expected output becomes theirs
  solutions disagree, or fail                         the test goes
  one input, two expected outputs                     the one that solutions give stays, else none
  assertions other than f(literals) == literal        stay where more than half of the solutions pass
rejected: no test left; no solution and few tests; no solution passes; its only solution fails (one solution alone
overrules nothing). Solutions that fail a test that stays are left out.
A problem of standard input and output becomes two: "Write the program in Python." and the same for C++, in the language
of its statement, each taking only that language.

examples:
  python -m curate programs code.jsonl --out vetted.jsonl
  python -m curate programs code.jsonl --out vetted.jsonl --agreement=0.8 --no-variants
"""


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--agreement", type=float, default=AGREEMENT, metavar="X",
        help=f"share of the solutions that must give the same output (default {AGREEMENT})",
    )  # fmt: skip
    parser.add_argument(
        "--least-tests", type=int, default=LEAST_TESTS, metavar="N",
        help=f"tests that a problem without solutions needs (default {LEAST_TESTS})",
    )  # fmt: skip
    parser.add_argument("--no-variants", action="store_true", help="do not double problems for Python and C++")
    parser.add_argument("--test-s", type=float, default=4.0, metavar="S", help="seconds that a test may take (4)")
    parser.add_argument("--max-concurrency", type=int, default=0, metavar="N", help="programs at once (cores less one)")
    parser.add_argument(
        "--isolation", choices=["required", "none"], default="required",
        help="none: run programs even where the host cannot isolate them; for trusted ones only",
    )  # fmt: skip


def _make(options: argparse.Namespace) -> Programs:
    if not 0 < options.agreement <= 1:
        raise ConfigError(f"--agreement = {options.agreement}: must be above 0 and at most 1")
    for name, least in (("least_tests", 1), ("max_concurrency", 0)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} = {getattr(options, name)}: must be at least {least}")
    if options.test_s <= 0:
        raise ConfigError(f"--test-s = {options.test_s}: must be above 0")
    return Programs(
        options.agreement, options.least_tests, options.test_s, not options.no_variants, options.max_concurrency,
        options.isolation,
    )  # fmt: skip


COMMAND = Command("vet tests by running every reference solution on them", EXPLANATION, _add_options, _make)
