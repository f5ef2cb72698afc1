"""Reads a file of problems before a run: every row is checked, and all faults are reported at once, by line.

A fault that would make the run wrong is an error, with the first such lines and the count of all: a row that is not
understood, an id that occurs twice, a language that the detector does not know, a ground truth that no completion can
equal. What may be meant as it is gives a warning.
"""

from __future__ import annotations

import asyncio
import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from environments.environment import UnknownEnvironment, find
from shared.config import Config
from shared.errors import ConfigError, DataError
from shared.jsonl import all_faults, read_rows, spread
from shared.sections import Data
from shared.types import Problem, Verdict
from verify.answer_checker import AnswerChecker
from verify.ground_truth import is_doubtful, may_be_placeholder, not_an_answer
from verify.math.dress import dress_of
from verify.math.plain import decide
from verify.plugins import EVERY
from verify.published import NATIVE, renamed, to_native
from verify.verifiers import check_language, known_domains, read_problem, verifier_for

ALIKE = 0.7
"""share of letters in common from which an unknown domain is taken for a misspelt one"""
PROBE = "7919"
"""an answer that hardly any problem has"""
MOST_ASKED = 2_000
"""ground truths of one file that the verifier's processes check at most; of more, so many are checked, evenly spread"""


@dataclass
class ProblemFile:
    """The problems of a file, and what is doubtful about them."""

    path: Path
    setting: str
    problems: list[Problem] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)
    """id of a problem -> number of its line"""
    warnings: list[str] = field(default_factory=list)
    shapes: Counter[str] = field(default_factory=Counter)
    """name of a reader (`verify.published`) -> rows that it read"""

    def where(self, problem: Problem) -> str:
        """File and line of a problem."""
        return f"{self.path}:{self.lines[problem.id]}"

    @property
    def environments(self) -> list[tuple[str, str]]:
        """Where each problem is, and its environment."""
        return [(f"{self.setting}: {self.where(problem)}", problem.environment) for problem in self.problems]

    @property
    def read_as(self) -> str:
        """One line that says how many problems there are and, where not all are in our own form, how they were read."""
        shapes = ", ".join(f"{count:,} as {name}" for name, count in self.shapes.most_common())
        published = f": {shapes}" if {*self.shapes} - {NATIVE} else ""
        return f"{self.setting}: {len(self.problems):,} problems read{published}"

    def warn(self, problems: Sequence[Problem], what: str) -> None:
        """Add a warning about some problems: how many they are, what is doubtful, and where the first one is."""
        if problems:
            self.warnings.append(
                f"{self.setting}: {len(problems):,} of {len(self.problems):,} problems {what} "
                f"(first: {self.where(problems[0])})"
            )


def read_problems(
    path: Path, setting: str, data: Data | None = None, environment: str = "", kept: Mapping[str, str] | None = None
) -> ProblemFile:
    """Read a file of {"problem", "answer" or "tests", "id"?, "language"?, "domain"?, "source"?, "environment"?,
    "checker"?, "answer_form"?, "prefix"?} rows, or of a published shape (`verify.published`).

    `setting` is named in errors (e.g. "data.train"). data: its columns hold the fields, its domains and templates name
    further domains, and its `open_share` = 1 says that no answer of data.train is compared. environment: of rows that
    name none. kept: columns that rewards ask for (`plugins.ByColumns.columns`), which problems keep. Raises DataError
    with file, line numbers and repair.
    """
    data, kept = data or Data(), kept or {}
    file, faults, seen = ProblemFile(path, setting), list[str](), set[str]()
    for row in read_rows(path, setting, faults):
        try:
            seen |= row.fields.keys()
            fields, shape = to_native(renamed(row.fields, data.columns, row.where), row.where)
            fields = {"environment": environment} | fields if environment else fields
            problem = read_problem(fields, row.where)
            if kept:
                columns = {name: cell for name, cell in row.fields.items() if name in kept or EVERY in kept}
                problem = replace(problem, columns=columns)
            _check(problem, row.where, compared=data.open_share < 1 or setting != "data.train")
            if problem.id in file.lines:
                raise DataError(
                    f"{row.where}: id '{problem.id}' stands in line {file.lines[problem.id]} already: give each "
                    "problem an id of its own, or none"
                )
        except DataError as error:
            faults.append(str(error))
        else:
            file.problems.append(problem)
            file.shapes[shape] += 1
            file.lines[problem.id] = row.number
    if faults:
        raise DataError(all_faults(faults, f"{setting}: {len(faults):,} rows of {path} cannot be used:"))
    gone = [name for name in data.columns.values() if not {name, name.partition(".")[0]} & seen]
    if gone and setting == "data.train":
        shown = ", ".join(map(repr, sorted(seen)))
        raise DataError(f"data.columns names '{gone[0]}', and no row of {path} has this column: they have {shown}")
    for name, who in kept.items():
        if who and name not in seen:
            shown = ", ".join(map(repr, sorted(seen)))
            raise DataError(f"reward {who} asks for '{name}', and no row of {path} has this column: they have {shown}")
    if not file.problems:
        raise DataError(f"{setting}: {path} holds no problem")
    _doubts(file, data)
    return file


def _check(problem: Problem, where: str, compared: bool) -> None:
    """Raise DataError for a problem that would silently be graded wrongly."""
    known = known_domains()
    near = difflib.get_close_matches(problem.domain.casefold(), known, n=1, cutoff=ALIKE)
    if problem.domain not in known and near and not problem.checker:
        raise DataError(f"{where}: domain '{problem.domain}' is not known: is '{near[0]}' meant?")
    check_language(problem.language, "language", where)
    if compared and _compared([problem]) and (what := not_an_answer(problem.answer)):
        shown = problem.answer if len(problem.answer) <= 60 else f"{problem.answer[:60]}..."
        raise DataError(
            f"{where}: the answer '{shown}' is {what}: every completion would be wrong. Give the value itself, set "
            '"domain": "open" (nothing is compared), or delete the line'
        )


def _doubts(file: ProblemFile, data: Data) -> None:
    named = {*known_domains(), *data.domains, *data.templates}
    for domain, _ in Counter(one.domain for one in file.problems if not one.checker).most_common():
        if domain not in named:
            unknown = [one for one in file.problems if one.domain == domain and not one.checker]
            file.warn(unknown, f"are of domain '{domain}', whose answers are compared like those of \"math\"")
    compared = _compared(file.problems)
    dressed: dict[str, list[Problem]] = {}
    for problem in compared:
        if dress := dress_of(problem.answer):
            dressed.setdefault(dress, []).append(problem)
    for dress, problems in dressed.items():
        file.warn(problems, f"have an answer with {dress}, which is read without: write the value alone")
    stand_ins = [problem for problem in compared if may_be_placeholder(problem.answer)]
    file.warn(stand_ins, 'have an answer such as "None" or "unknown", which may mean no answer at all')
    words = [problem for problem in compared if is_doubtful(problem.answer)]
    file.warn(words, "have an answer of several words, which only a completion with the same words equals")


def _compared(problems: Iterable[Problem]) -> list[Problem]:
    return [
        one
        for one in problems
        if one.verified and verifier_for(one).needs == "answer checker" and (one.answer or not one.environment)
    ]


async def check_answers(file: ProblemFile, problems: Sequence[Problem], checker: AnswerChecker, config: Config) -> None:
    """Ask the verifier whether it understands the ground truth of these problems of `file`, which gets the warnings.

    Where it does not, no completion of the problem is graded or trained on. Raises DataError when those are more than
    reward.max_failure_share, with which the run would end later on.
    """
    asked = _compared(problems)
    cheap = await asyncio.to_thread(lambda: [decide(problem.answer, PROBE) for problem in asked])
    dark = [problem for problem, verdict in zip(asked, cheap, strict=True) if verdict is Verdict.UNVERIFIABLE]
    slow = [problem for problem, verdict in zip(asked, cheap, strict=True) if verdict is None]
    looked = spread(slow, MOST_ASKED) if slow else []
    verdicts = await asyncio.gather(*(checker.check(problem.answer, PROBE) for problem in looked))
    dark += [problem for problem, verdict in zip(looked, verdicts, strict=True) if not verdict.graded]
    count = len(asked) - len(slow) + len(looked)
    if not dark:
        return
    limit = config.reward.max_failure_share
    if len(dark) > limit * count:
        shown = [f"{file.where(problem)}: '{problem.answer[:60]}'" for problem in dark]
        what = (
            f"{file.setting}: the verifier does not understand {len(dark):,} of {count:,} ground truths, more than "
            f'reward.max_failure_share = {limit:g}. Correct these rows, delete them, or set "domain": "open":'
        )
        raise DataError(what + f" {shown[0]}" if len(shown) == 1 else all_faults(shown, what))
    file.warn(dark, "have a ground truth that the verifier does not understand: no completion of them is trained on")


def refuse_prose(file: ProblemFile) -> None:
    """Raise DataError for rows whose answer is in no box, or whose response is begun: not for an objective that
    puts the ground truth into the box of a whole response."""
    if faults := [file.where(one) for one in file.problems if one.prefix]:
        raise DataError(
            f"{file.setting}: {len(faults):,} rows have a prefix, and the objective learns from whole responses: "
            f"leave them out (first: {faults[0]})"
        )
    if faults := [file.where(one) for one in file.problems if one.answer_form == "response" and not one.verified]:
        raise DataError(
            f'{file.setting}: {len(faults):,} rows have the answer_form "response", and the objective learns from the '
            f"content of a box: leave them out (first: {faults[0]})"
        )


def check_environments(rows: Iterable[tuple[str, str]], others: Mapping[str, object], default: str) -> None:
    """Raise DataError for rows with an environment that is not there; ConfigError where that is environment.name.

    rows: (where, environment). others: those of environment.plugins. default: environment.name.
    """
    rows, unknown = list(rows), dict[str, str]()
    for name in {name for _, name in rows if name}:
        try:
            find(name, others)
        except UnknownEnvironment as error:
            if name == default:
                raise ConfigError(f"environment.name: {error}") from error
            unknown[name] = str(error)
    if faults := [f"{where}: {unknown[name]}" for where, name in rows if name in unknown]:
        raise DataError(all_faults(faults, f"{len(faults):,} rows name environments that are not there:"))


def without_long(file: ProblemFile, problems: Sequence[Problem], long: Sequence[Problem], bound: str) -> list[Problem]:
    """The problems without those whose prompts are too long; `file` gets the warning. Raises DataError if none is
    left. bound: what they are longer than, and the repair (`DataSource.room_in_words`)."""
    if long and len(long) == len(problems):
        raise DataError(f"{file.setting}: every problem of {file.path} is {bound}")
    file.warn(long, f"are left out ({len(long) / max(len(problems), 1):.1%}): each is {bound}")
    left = {problem.id for problem in long}
    return [problem for problem in problems if problem.id not in left]
