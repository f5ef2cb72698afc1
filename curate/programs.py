"""The stage `programs`: checks the tests of programming problems by running every reference solution on each.

Source: Magistral (2506.10910), section 4.2.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from curate.agreement import CONTEST, KEPT, OVERRULING, PYTHON, REPLACED, ComparableTest, as_meant, check_tests, stored
from curate.assertions import Statement, edit, literal_of, read_code
from curate.stage import CurationStage, Decision, Fields, Kept, Rejected, Share, Show
from curate.statements import PHRASES
from shared.errors import DataError, RunError
from shared.jsonl import Row
from shared.types import Verdict
from verify.code import cpp, runner
from verify.code.readings import argument_readings
from verify.code.sandbox_pool import SandboxPool
from verify.code.tests import (
    Assertions,
    CallTest,
    Language,
    Limits,
    Output,
    Status,
    StdioTest,
    Test,
    language_of,
    read_tests,
)
from verify.code_block import first_program
from verify.verifiers import read_problem, verifier_of

COMPILE_S = 60.0
"""generous, so that a busy host does not cost a problem its only solution; the reward has a limit of its own"""
PASSING = 0.5
"""share of the solutions, of which more must pass an assertion that only holds or fails"""
FAILING = "assertions dropped: most solutions fail"
NUMBER = re.compile(r"(?<![\w.])-?\d{1,18}(?![\w.])")
CHANGED = 3
"""numbers of an input that a variant changes, at most"""
ATTEMPTS = 10
"""variants that are drawn for each one wanted, at most: many are alike"""
LANGUAGES = {"python": "Python", "cpp": "C++"}
_CPP = re.compile(r"^\s*#\s*include\b|\bint\s+main\s*\(|\busing\s+namespace\b", re.MULTILINE)
_NAMES: dict[str, Language] = {"python": "python", "python3": "python", "py": "python", "cpp": "cpp", "c++": "cpp"}


def _has_program(row: Row) -> bool:
    return verifier_of(row.fields.get("domain")).needs == "sandbox"


class UnrunnableTests(Exception):
    """Raised for test code that cannot be run, whatever the program."""


class ReferenceSolution(NamedTuple):
    """One reference solution."""

    source: str
    language: Language
    given: Any
    """the entry in the row, unchanged"""


class CheckedRow(NamedTuple):
    """The tests of a row after their check."""

    tests: Any
    """in stored form; the same object as in the row if nothing changed"""
    size: int
    """number of tests that are left"""
    passing: list[bool]
    """[solutions] whether each passes all tests that are left"""
    counts: Counter[str]
    """number of tests dropped and replaced, by reason"""


@dataclass
class ProgramsStage(CurationStage):
    """Check tests by running every reference solution on them.

    input: rows with "domain": "code", "tests" (docs/programs.md has their shapes) and "solution" (a program) or
    "solutions" (a list of programs, or of {"code", "language"}). Rows of other domains pass through.
      solutions agree (--agreement), the expected output is theirs   the test stays
      solutions agree on another output (two at least)               the expected output becomes theirs
      solutions disagree, or fail                                    the test goes
      one input, two expected outputs                                the one that solutions give stays, else none
      assertions other than f(literals) == literal                   stay where more than half of the solutions pass
    rejected: no test left; no solution and few tests; no solution passes; its only solution fails: a single solution
    overrules nothing, for either of the two may be wrong. Solutions that fail a test that stays are left out.
    With --make-tests N a problem of standard input and output with fewer tests gets more, where two solutions at least
    agree on an output: on the inputs that its row proposes ("inputs", texts; it may then lack "tests"), and on variants
    of its inputs with other numbers.
    A problem of standard input and output becomes two: "Write the program in Python." and the same for C++, in the
    language of its statement, each taking only that language.

    examples:
      python -m curate programs code.jsonl --out checked.jsonl
      python -m curate programs code.jsonl --out checked.jsonl --agreement=0.8 --no-variants
    """

    name = "programs"
    agreement: Share = Field(default=0.7, description="share of the solutions that must give the same output")
    least_tests: int = Field(default=5, ge=1, description="tests that a problem without solutions needs")
    make_tests: int = Field(default=0, ge=0, description="make tests up to so many of a problem; 0: none")
    test_s: float = Field(default=4.0, gt=0, description="seconds that a test may take")
    variants: bool = Field(default=True, description="double problems for Python and C++ (the default), or do not")
    max_concurrency: int = Field(default=0, ge=0, exclude=True, description="programs at once; 0: cores less one")
    isolation: Literal["required", "none"] = Field(
        default="required", exclude=True,
        description="none: run programs even where the host cannot isolate them; for trusted ones only",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        self.limits = Limits(test_s=self.test_s, compile_s=COMPILE_S, max_tests=1 << 30)
        self.pool: SandboxPool | None = None

    @property
    def concurrency(self) -> int:
        """Two rows per sandbox: one runs, one waits."""
        return 2 * self.pool.size if self.pool is not None else 2

    async def prepare(self, rows: Sequence[Row], show: Show) -> None:
        """Start a sandbox. Raises SandboxRefused if the host cannot isolate programs."""
        unsafe = self.isolation == "none"
        self.pool = SandboxPool(self.max_concurrency, unsafe=unsafe, shared_folder=cpp.cache_folder())
        if any(map(_has_program, rows)):
            await asyncio.to_thread(runner.describe_isolation, self.pool)

    async def close(self) -> None:
        """Stop the sandboxes."""
        if self.pool is not None:
            await asyncio.to_thread(self.pool.close)

    async def decide(self, index: int, row: Row) -> Decision:
        """Check one row's tests, and keep what is left of them."""
        fields = row.fields
        if not _has_program(row):
            return Kept([fields], {"rows of other domains": 1})
        inputs = given if isinstance(given := fields.get("inputs"), list) else []
        try:
            bare = bool(self.make_tests and inputs and not fields.get("tests"))
            tests = [] if bare else read_tests(read_problem(fields, "the row").tests)
        except DataError as error:
            return Rejected("tests not readable", str(error))
        solutions = read_solutions(fields, tests)
        made = await self._made(tests, inputs, solutions, str(fields.get("id", index)))
        if made:
            tests = [*tests, *made]
            fields = {**fields, "tests": {"tests": [stored(test) for test in tests if isinstance(test, StdioTest)]}}
        if not tests:
            return Rejected("no test is left", "its inputs give none on which solutions agree")
        try:
            checked = await self._check(fields["tests"], tests, solutions)
        except UnrunnableTests as error:
            return Rejected("tests cannot be run", str(error)[:200])
        if not checked.size:
            return Rejected("no test is left", ", ".join(f"{name}: {count}" for name, count in checked.counts.items()))
        if not solutions and checked.size < self.least_tests:
            return Rejected(f"no solution and fewer than {self.least_tests} tests", f"{checked.size} tests")
        if solutions and not any(checked.passing):
            alone = len(solutions) == 1
            return Rejected("its only solution fails its tests" if alone else "no solution passes its tests")
        counts = checked.counts + Counter({"tests made": len(made)})
        changed = {**fields, "tests": checked.tests}
        if dropped := checked.passing.count(False):
            counts["solutions dropped"] = dropped
            changed.pop("solution", None)
            changed["solutions"] = [one.given for one, passes in zip(solutions, checked.passing, strict=True) if passes]
        if not self.variants or not all(isinstance(test, StdioTest) and not test.language for test in tests):
            return Kept([changed], dict(counts))
        left = [stored(test) for test in read_tests(checked.tests) if not isinstance(test, Assertions)]
        return Kept(_by_language(changed, left), {**counts, "rows doubled for Python and C++": 1})

    async def _made(
        self, tests: Sequence[Test], inputs: Sequence[Any], solutions: list[ReferenceSolution], seed: str
    ) -> list[ComparableTest]:
        """New tests for a problem that has too few, as far as two solutions at least agree. Raises as `_outputs`."""
        known = [test for test in tests if isinstance(test, StdioTest)]
        missing = self.make_tests - len(tests)
        if missing <= 0 or len(known) < len(tests) or len(solutions) < OVERRULING:
            return []
        candidates: list[ComparableTest] = [*proposed(known, inputs, 2 * missing, seed)]
        checked = check_tests(candidates, await self._outputs(solutions, candidates), self.agreement, CONTEST)
        return [one.test for one in checked if one.test is not None and one.what == REPLACED][:missing]

    async def _check(self, given: Any, tests: list[Test], solutions: list[ReferenceSolution]) -> CheckedRow:
        """Check the tests `tests` that were read from `given`. Raises SandboxRefused, UnrunnableTests, RunError.

        Tests of input and output and of calls are compared by outputs; so are assertions `f(literals) == literal` of
        Python test code, which is edited. All other assertions only hold or fail: C++, and several pieces of Python.
        """
        tests = [test for test in tests if isinstance(test, Assertions) is isinstance(tests[0], Assertions)]
        codes = [test for test in tests if isinstance(test, Assertions)]
        statements = _statements(codes[0]) if len(codes) == 1 else []
        units: Sequence[ComparableTest | None] = [None if isinstance(test, Assertions) else test for test in tests]
        if statements:  # with a prefix the program is no module of its own, so its functions cannot be called
            units = [None if codes[0].prefix else one.call for one in statements]
        rule = PYTHON if statements else CONTEST
        compared = {place: test for place, test in enumerate(units) if test is not None}
        others = [place for place in range(len(units)) if place not in compared]
        if statements:
            outputs = await self._outputs(solutions, list(compared.values()))
        else:
            meant, outputs = await self._as_meant(solutions, list(compared.values()))
            compared = dict(zip(compared, meant, strict=True))
        holding = [await self._held(one, codes, len(statements) or 1) if others else [] for one in solutions]
        checked = dict(zip(compared, check_tests(list(compared.values()), outputs, self.agreement, rule), strict=True))
        failing = [place for place in others if len(holding) > 1 and _share(holding, place) <= PASSING]
        counts = Counter(done.what for done in checked.values() if done.what != KEPT)
        counts += Counter({FAILING: len(failing)})
        left: dict[int, ComparableTest | None] = {place: None for place in others if place not in failing}
        left |= {place: done.test for place, done in checked.items() if done.test is not None}
        passing = []
        for by_test, holds in zip(outputs, holding, strict=True):
            by_output = dict(zip(compared, by_test, strict=True))
            passes = (holds[at] if test is None else rule.expects(test, by_output[at]) for at, test in left.items())
            passing.append(all(passes))
        size, changed = len(left), given
        if statements:
            dropped = {place for place in range(len(units)) if place not in left}
            replaced = {place: left[place] for place, done in checked.items() if done.what == REPLACED}
            changed = _with_code(given, codes[0], edit(codes[0].code, statements, dropped, _literals(replaced)))
        elif codes:
            size = sum(max(1, codes[place].code.count("assert")) for place in left)
            changed = [_stored_code(codes[place]) for place in left]
        else:
            changed = {"tests": [stored(test) for test in left.values() if test is not None]}
        return CheckedRow(changed if counts else given, size, passing, counts)

    async def _outputs(self, solutions: Sequence[ReferenceSolution], tests: Sequence[Test]) -> list[list[Output]]:
        """Return [solutions, tests] of what each prints or returns. Raises SandboxRefused, RunError."""
        return [
            await runner.in_thread(runner.run_outputs, one.source, one.language, tests, self.limits, pool=self.pool)
            if tests
            else []
            for one in solutions
        ]

    async def _as_meant(
        self, solutions: Sequence[ReferenceSolution], tests: list[ComparableTest]
    ) -> tuple[list[ComparableTest], list[list[Output]]]:
        """Return the tests with the values that most solutions take and give, where JSON leaves that open, and
        [solutions, tests] of what each gives. Raises as `_outputs`."""
        best: tuple[int, list[ComparableTest], list[list[Output]]] = (-1, tests, [])
        for reading in argument_readings(tests):
            outputs = await self._outputs(solutions, reading)
            meant = as_meant(reading, outputs)
            right = sum(CONTEST.expects(*pair) for given in outputs for pair in zip(meant, given, strict=True))
            best = max(best, (right, meant, outputs), key=lambda candidate: candidate[0])
        return best[1:]

    async def _held(self, solution: ReferenceSolution, codes: Sequence[Assertions], assertions: int) -> list[bool]:
        """Return whether each assertion holds, for all test codes, with so many of them in each.

        Those without a status did not hold, unless the whole verdict is correct. Raises RunError, UnrunnableTests.
        """
        holding: list[bool] = []
        for code in codes:
            source, language = solution.source, solution.language
            result = await runner.in_thread(runner.run_tests, source, language, [code], self.limits, pool=self.pool)
            if result.verdict is Verdict.UNVERIFIABLE:
                raise UnrunnableTests(result.reason)
            if not result.graded and result.verdict is not Verdict.CRASH:
                raise RunError(result.reason)
            right = result.verdict is Verdict.CORRECT
            statuses = result.statuses[:assertions] if assertions > 1 else []  # a text as a whole may have many cases
            passed = [right or status is Status.PASSED for status in statuses]
            holding += passed + [right] * (assertions - len(passed))
        return holding


def _statements(code: Assertions) -> list[Statement]:
    """Return the assertions of Python test code; [] where it cannot be taken apart."""
    try:
        return read_code(code.code) if code.language == "python" else []
    except ValueError:
        return []


def _literals(tests: Mapping[int, ComparableTest | None]) -> dict[int, str]:
    """Return the source of the expected values of calls."""
    return {place: literal_of(test.expected) or "" for place, test in tests.items() if isinstance(test, CallTest)}


def _share(passing: Sequence[Sequence[bool]], index: int) -> float:
    return sum(by_solution[index] for by_solution in passing) / len(passing)


def _stored_code(test: Assertions) -> Fields:
    kind = "main" if test.language == "cpp" else "asserts"
    return {"type": kind, "code": test.code, "prefix": test.prefix, "entry_point": test.entry_point}


def _with_code(given: Any, test: Assertions, code: str) -> Any:
    """Return the stored tests with other test code, in the form they had."""
    if isinstance(given, dict) and "code" in given:
        kept = {name: value for name, value in given.items() if name not in ("test_setup_code", "setup")}
        return {**kept, "code": code}
    return {**_stored_code(test), "code": code}


def _by_language(fields: Fields, tests: list[Fields]) -> list[Fields]:
    """Return the row once for Python and once for C++. `tests`: its stdin/stdout tests as JSON, without a language.

    The request is in the language of the statement, or in English if that has no request.
    """
    requests = PHRASES["program_in"]
    request = requests.get(str(fields.get("language", "en")), requests["en"])[0]
    rows = []
    for code, name in LANGUAGES.items():
        row = {**fields, "problem": f"{fields['problem'].rstrip()}\n\n{request.format(language=name)}"}
        if "id" in fields:
            row["id"] = f"{fields['id']}/{code}"
        row["tests"] = {"language": code, "tests": tests}
        rows.append(row)
    return rows


def read_solutions(fields: Fields, tests: Sequence[Test]) -> list[ReferenceSolution]:
    """Read the programs of "solutions" (a list) and "solution": texts, or objects with "code" and perhaps "language".

    A Markdown block is unwrapped. Without a stated language, that of the tests is assumed, else C++ if the text looks
    like it, else Python.
    """
    given = fields.get("solutions")
    listed = list(given) if isinstance(given, list) else []
    if isinstance(fields.get("solution"), (str, dict)):
        listed.append(fields["solution"])
    solutions: list[ReferenceSolution] = []
    for item in listed:
        source, named = _read_item(item)
        if source.strip() and all(source != other.source for other in solutions):
            taken = language_of(list(tests)) if tests else ""
            guessed = _NAMES[taken] if taken else "cpp" if _CPP.search(source) else "python"
            solutions.append(ReferenceSolution(source, named or guessed, item))
    return solutions


def _read_item(item: Any) -> tuple[str, Language | None]:
    named: Language | None = None
    if isinstance(item, Mapping):
        named = _NAMES.get(str(item.get("language", "")).lower())
        item = next((item[name] for name in ("code", "source", "solution", "program") if name in item), "")
    if not isinstance(item, str):
        return "", None
    fenced = first_program(item) if "```" in item else None
    if fenced is not None:
        return fenced.source, named or _NAMES.get(fenced.language)
    return item, named


def variants(inputs: Sequence[str], count: int, seed: str) -> list[str]:
    """Up to `count` new inputs: one of `inputs` with one to CHANGED of its whole numbers drawn anew, between the least
    and the greatest of all inputs, so that the bounds of the problem hold; words, and how many there are, stay."""
    numbers = [int(number) for text in inputs for number in NUMBER.findall(text)]
    if not numbers:
        return []
    chance, drawn = random.Random(f"variants {seed}"), dict.fromkeys(inputs)
    for _ in range(ATTEMPTS * count):
        text = chance.choice(inputs)
        places = list(NUMBER.finditer(text))
        for number in sorted(
            chance.sample(places, min(chance.randint(1, CHANGED), len(places))), key=lambda m: -m.start()
        ):
            text = f"{text[: number.start()]}{chance.randint(min(numbers), max(numbers))}{text[number.end() :]}"
        drawn[text] = None
        if len(drawn) == len(set(inputs)) + count:
            break
    return list(drawn)[len(set(inputs)) :]


def proposed(tests: Sequence[StdioTest], inputs: Iterable[object], count: int, seed: str) -> list[StdioTest]:
    """Tests without an output: the texts among `inputs`, which somebody proposes, that no test has, then `count`
    variants."""
    known = [test.input for test in tests]
    own = [text for text in dict.fromkeys(one for one in inputs if isinstance(one, str)) if text not in known]
    like = tests[0] if tests else StdioTest("", "")
    return [StdioTest(text, "", like.tolerance, like.language) for text in own + variants(known + own, count, seed)]
