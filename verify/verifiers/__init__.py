"""Verifiers by domain: what the answers to a domain's problems are compared with, and how.

Each module of this folder registers one domain; it is loaded when a domain is first looked up, so that a new domain is
one file. Verifiers of the user's own stand in the files of `reward.plugins` and run in their process
(`verify/plugin_host.py`); docs/rewards.md shows how to write one. A domain without a verifier is checked like "math".
A row may name another verifier than its domain's as its "checker", one of reasoning-gym's kinds too.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from shared.chat import BOXED_ANSWER, AnswerFormat
from shared.errors import ConfigError, DataError
from shared.jsonl import problem_of, text_of
from shared.languages import WITH_REQUEST
from shared.types import Problem, Verdict
from verify.code_block import CodeBlock, first_program
from verify.extract import extract_answer
from verify.language import known_languages
from verify.published import lacking, to_native

GroundTruth = Literal["answer", "tests"]
"""key of a row that holds what answers are compared with"""
AnswerIn = Literal["box", "code block", "response"]
r"""where a response gives its answer: in its last \boxed{...}, in its first fenced block that names a language, or all
of it is the answer"""
Needs = Literal["", "answer checker", "sandbox"]
"""the second argument of a verifier, after the answer: nothing, an `AnswerChecker`, or a `ProgramVerifier`"""
DEFAULT = "math"
REASONING_GYM = "reasoning_gym:"
"""prefix of the names of reasoning-gym's kinds of problems, as checkers and in data.train"""
FORMS: dict[AnswerIn, AnswerFormat] = {
    "box": BOXED_ANSWER,
    "code block": AnswerFormat("the answer in a Markdown block that names its language", "the answer in such a block"),
    "response": AnswerFormat("all that the task asks for", "what the task asks for"),
}
MISSING: dict[AnswerIn, str] = {
    "box": "no balanced \\boxed{...}",
    "code block": "no closed ``` block that names a language",
    "response": "nothing",
}


class Answer(NamedTuple):
    """One answer that is to be verified."""

    problem: Problem
    text: str
    r"""the content of the box, the program, or the whole response"""
    language: str = ""
    """the word after the fence of a code block, in lower case"""
    group: int = 0
    """which draw of the problem this is: programs of one group run the same tests"""


class Finding(NamedTuple):
    """What a verifier found: the verdict, and what the verdict alone does not say."""

    verdict: Verdict
    share: float | None
    """share of a program's tests that passed; 1 or 0 for a right or wrong answer; None where nothing is compared"""
    reason: str
    """one line for a human"""


NOT_VERIFIED = Finding(Verdict.OPEN, None, "no verifier is asked: the problem is open")
Function = Callable[..., Any]
"""takes an `Answer` (and what the verifier needs); returns whether it is right, the share of it that is right in [0, 1]
or a `Finding`, or an awaitable of one of these"""
F = TypeVar("F", bound=Function)


class Verifier(NamedTuple):
    """The verifier of one domain."""

    domain: str
    function: Function
    ground_truth: GroundTruth
    answer_in: AnswerIn
    needs: Needs
    form: AnswerFormat
    validate: Callable[[Problem], object] | None
    """raises DataError for a ground truth that cannot be used; None where any will do"""
    verifies: bool
    """False where nothing is compared, so that answers are neither right nor wrong"""
    home: str
    """file that defines it"""

    def extract(self, response: str) -> CodeBlock | None:
        """Return the answer in a response (`language` only of code blocks), None when there is none."""
        if self.answer_in == "code block":
            return first_program(response)
        answer = extract_answer(response) if self.answer_in == "box" else response if response.strip() else None
        return None if answer is None else CodeBlock("", answer)

    def giving(self, form: object) -> Verifier:
        """The same for answers in another form, where `form` is one."""
        if form == self.answer_in or not isinstance(form, str) or form not in FORMS:
            return self
        return self._replace(answer_in=form, form=FORMS[form])

    @property
    def missing(self) -> str:
        """What is missing in a response from which no answer can be extracted."""
        return MISSING[self.answer_in]

    async def verify(self, answer: Answer, tools: Mapping[Needs, Any]) -> Finding:
        """Verify one answer. tools: what verifiers may need, by name. Raises what the function raises."""
        tool = tools.get(self.needs) if self.needs else None
        if self.needs and tool is None:
            return Finding(Verdict.UNVERIFIABLE, 0.0, f"no {self.needs} is at hand")
        result = self.function(answer, tool) if self.needs else self.function(answer)
        if inspect.isawaitable(result):
            result = await result
        return result if isinstance(result, Finding) else finding_of(float(result))


def finding_of(share: float) -> Finding:
    """Return what a share in [0, 1] means: CORRECT for 1, else WRONG. Raises ValueError for other numbers."""
    if not 0 <= share <= 1:
        raise ValueError(f"returned {share:g}, not a share from 0 to 1")
    right = share == 1
    return Finding(
        Verdict.CORRECT if right else Verdict.WRONG, share, "answer is right" if right else "answer is wrong"
    )


VERIFIERS: dict[str, Verifier] = {}
"""domain -> verifier, of the modules loaded so far"""
FAMILIES: dict[str, Callable[[], Mapping[str, Verifier]]] = {}
"""beginning of the names of checkers that are made when a row first names one -> what makes them all"""
_domains_of_user: set[str] = set()


def register(verifier: Verifier) -> None:
    """Register a verifier. Raises ConfigError when the domain has one from another file."""
    known = VERIFIERS.get(verifier.domain)
    if known is not None and known.home != verifier.home:
        raise ConfigError(
            f"{verifier.home}: the domain '{verifier.domain}' has a verifier already (defined in {known.home}): choose "
            "another name"
        )
    VERIFIERS[verifier.domain] = verifier


def register_of_user(verifiers: Sequence[Verifier]) -> None:
    """Register the verifiers of the user's files, in place of those that were registered so before."""
    for domain in _domains_of_user:
        VERIFIERS.pop(domain, None)
    _domains_of_user.clear()
    for verifier in verifiers:
        register(verifier)
        _domains_of_user.add(verifier.domain)


def verifier(
    domain: str,
    *,
    ground_truth: GroundTruth = "answer",
    answer_in: AnswerIn = "box",
    needs: Needs = "",
    form: AnswerFormat = BOXED_ANSWER,
    validate: Callable[[Problem], object] | None = None,
    verifies: bool = True,
) -> Callable[[F], F]:
    """Decorator: register a function as the verifier of a domain. The arguments are the fields of `Verifier`."""

    def known(function: F) -> F:
        home = inspect.getsourcefile(function) or "?"
        register(Verifier(domain, function, ground_truth, answer_in, needs, form, validate, verifies, home))
        return function

    return known


@functools.cache
def _load() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


def known_domains() -> list[str]:
    """Return the domains that have a verifier, sorted."""
    _load()
    return sorted(name for name in VERIFIERS if not name.startswith(REASONING_GYM))


def verifier_of(domain: object) -> Verifier:
    """Return the verifier of a domain; that of "math" where there is none, or where a row gives none (None)."""
    _load()
    return VERIFIERS.get(str(domain)) or VERIFIERS[DEFAULT]


def verifier_for(problem: Problem) -> Verifier:
    """Return the verifier of a problem: its checker, else that of its domain, for the form of its answer. Raises
    DataError for a checker that is not there, ConfigError where reasoning-gym cannot be used."""
    verifier = checker_named(problem.checker) if problem.checker else verifier_of(problem.domain)
    return verifier.giving(problem.answer_form)


def checker_named(name: str) -> Verifier:
    """Return the verifier that a row's "checker" names. Raises as `verifier_for`."""
    _load()
    if name.startswith(REASONING_GYM) and name not in VERIFIERS:
        VERIFIERS.update(FAMILIES[REASONING_GYM]())
    if name not in VERIFIERS:
        near = difflib.get_close_matches(name, VERIFIERS, n=1, cutoff=0)[0]
        raise DataError(f"the checker '{name}' is not there: is '{near}' meant? reward.plugins names files with others")
    return VERIFIERS[name]


def without_environment(problem: Problem, where: str, what: str) -> Problem:
    """The problem, for what knows single completions only. Raises DataError if it has an environment. what: the verb,
    for example "python -m verify grades"."""
    if problem.environment:
        raise DataError(
            f"{where}: the problem has the environment '{problem.environment}', and {what} single completions only: "
            'leave such rows out; where one completion is meant, delete "environment"'
        )
    return problem


def read_problem(row: Mapping[str, Any], where: str) -> Problem:
    """Make the problem of a row, of a published shape too (`verify.published`), and check that its verifier can use its
    ground truth. Raises DataError with `where`."""
    row, _ = to_native(row, where)
    if row.get("problem") in (None, "") and (why := lacking(row)):
        raise DataError(f"{where} lacks 'problem'{why}")
    checker, domain = text_of(row, "checker", where, ""), text_of(row, "domain", where, DEFAULT)
    try:
        verifier = checker_named(checker) if checker else verifier_of(domain)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    problem = problem_of(row, where, verifier.ground_truth, hidden=not verifier.verifies)
    if problem.reasoning_language:
        check_language(problem.reasoning_language, "reasoning_language", where)
    if verifier.validate is not None:
        try:
            verifier.validate(problem)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
    return problem


def check_language(code: str, key: str, where: str) -> None:
    """Raise DataError unless the language detector knows the code in column `key` of a row."""
    if code not in known_languages():
        raise DataError(f"{where}: {key} '{code}' is no code that the language detector knows{_language_hint(code)}")


def _language_hint(language: str) -> str:
    short = language.casefold().replace("_", "-").partition("-")[0]
    if short in known_languages():
        return f": write '{short}'"
    names = {name.casefold(): code for code, of in WITH_REQUEST.items() for name in (of.english, of.native, code)}
    near = difflib.get_close_matches(language.casefold(), names, n=1, cutoff=0.5)
    return f": is '{names[near[0]]}' meant?" if near else ' (two letters for most, as "en")'
