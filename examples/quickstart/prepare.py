"""Makes the quickstart's files: problems to train on and for validation, demonstrations, the tiny model.

[prepare]
script = "examples/quickstart/prepare.py"
options = { problems = 4000, operations = [2, 2] }     # Options has all of them

[model]
path = "made/model"
[data]
train = "made/train.jsonl"
validation = "made/validation.jsonl"
[sft]
demonstrations = "made/demonstrations.jsonl"
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, ValidationError, model_validator

from examples.quickstart.tiny_model import VOCABULARY, build, train_tokenizer, write_lines
from examples.quickstart.toy_programs import (
    ASKING,
    NO_BLUNDERS,
    Code,
    ToyProgram,
    demonstrate_program,
    make_toy_program,
)
from examples.quickstart.word_problems import (
    NO_FLAWS,
    PHRASES,
    Flaws,
    WordProblem,
    demonstrate,
    estimate,
    make_word_problem,
)
from shared.errors import ConfigError
from shared.languages import with_request
from shared.section import Section
from shared.types import Problem

CODE_VOCABULARY = 256
"""additional tokens where there are programming problems, so that the clauses of seven languages keep their tokens"""
REQUEST_VOCABULARY = 256
"""additional tokens where problems ask for a language, for the same reason"""
SAMPLES_PER_LANGUAGE = 400
"""word problems that the tokenizer is trained on, and as many toy programs in each of their languages, if any"""
DEMONSTRATIONS_PER_PROBLEM = 3
"""different imperfect completions of each training problem"""
FLAWED = "flawed on purpose, so that reinforcement learning has something to find out"
"""of the demonstrations, for the warnings about them"""
Drawn = TypeVar("Drawn", WordProblem, ToyProgram)


class Options(Section):
    """What is made."""

    problems: int = Field(4000, ge=1)
    """training problems"""
    validation: int = Field(256, ge=1)
    """validation problems"""
    languages: list[str] = list(PHRASES)
    """languages of the word problems"""
    requests: float = Field(0.75, ge=0, le=1)
    """share of the word problems that ask for one of these languages to reason in: one half for their own, the other
    half for another one; none where there is only one language"""
    operations: tuple[int, int] = (2, 3)
    """fewest and most additions and subtractions in a word problem, and steps of a program"""
    programs: float = Field(0.0, ge=0, le=1)
    """share of the problems that ask for a small program instead of a number"""
    cpp_one_in: int = Field(8, ge=0)
    """one in so many of these programs is asked for in C++, which takes a compiler and its time; 0 for none"""
    retry: str = ""
    """demonstrations of word problems answer twice, first without calculating, and this is between the two answers;
    "" for one answer"""
    max_tokens: int = Field(512, gt=0)
    """longest sequence of the model, tokens; at least model.max_tokens"""

    @property
    def asks(self) -> float:
        """Share of the word problems that ask for a language."""
        return self.requests if len(self.languages) > 1 else 0.0

    @model_validator(mode="after")
    def refuse_contradictions(self) -> Options:
        """Raise ValueError for languages and operations that cannot be."""
        if not self.languages or len(set(self.languages)) < len(self.languages):
            raise ValueError(f"languages = {self.languages} must name at least one language, each once")
        if unknown := [language for language in self.languages if language not in PHRASES]:
            raise ValueError(f"languages names {', '.join(unknown)}; known are {', '.join(PHRASES)}")
        if not 1 <= self.operations[0] <= self.operations[1]:
            raise ValueError(f"operations = {list(self.operations)} must be [fewest, most] with 1 <= fewest <= most")
        return self


def read_options(table: Mapping[str, Any]) -> Options:
    """The options of a table. Raises ConfigError that lists all mistakes, one line each."""
    try:
        return Options.model_validate(table)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(dict(found)) for found in error.errors())) from error


def _explain(problem: dict[str, Any]) -> str:
    if not problem["loc"]:
        return f"prepare.options.{problem['ctx']['error']}"
    option = f"prepare.options.{'.'.join(map(str, problem['loc']))}"
    if problem["type"] == "extra_forbidden":
        return f"unknown setting {option}: the quickstart's options are {', '.join(Options.model_fields)}"
    return f"{option} = {problem['input']!r}: {problem['msg']}"


def prepare(folder: Path, options: Mapping[str, Any], seed: int) -> None:
    """Write train.jsonl, validation.jsonl, demonstrations.jsonl and model/ into the folder; the same seed and options
    give the same files.

    Raises ConfigError for wrong options, CheckpointError when the model cannot be written.
    """
    chosen = read_options(options)
    train, validation = draw(chosen, seed, validation=False), draw(chosen, seed, validation=True)
    rng = random.Random(f"demonstrations {seed}")
    write_lines(
        folder / "demonstrations.jsonl",
        (
            {
                "problem": one.text,
                "completion": _imitable(rng, one, chosen),
                "source": FLAWED,
                **_request(getattr(one, "asked", "")),
            }
            for one in train
            for _ in range(DEMONSTRATIONS_PER_PROBLEM)
        ),
    )
    for file, name, problems in (("train.jsonl", "train", train), ("validation.jsonl", "validation", validation)):
        write_lines(folder / file, (_row(one.problem(f"{name}-{number}")) for number, one in enumerate(problems)))
    make_tiny_model(folder / "model", chosen, seed)


def _imitable(rng: random.Random, problem: WordProblem | ToyProgram, options: Options) -> str | list[dict[str, str]]:
    """What is imitated of a problem: a completion, or with options.retry two answers and what is said between them."""

    def answer() -> str:
        if isinstance(problem, ToyProgram):
            return demonstrate_program(rng, problem)
        return demonstrate(rng, problem, options.languages)

    if not options.retry:
        return answer()
    first = answer() if isinstance(problem, ToyProgram) else estimate(rng, problem)
    turns = (("assistant", first), ("user", options.retry), ("assistant", answer()))
    return [{"role": role, "content": text} for role, text in turns]


def make_tiny_model(folder: Path, options: Options, seed: int) -> None:
    """Write the tiny model's folder. Raises CheckpointError when the disk fails."""
    vocabulary = VOCABULARY + (CODE_VOCABULARY if options.programs else 0)
    vocabulary += REQUEST_VOCABULARY if options.asks and options.programs < 1 else 0
    build(folder, seed, train_tokenizer(texts_of(options), vocabulary), options.max_tokens)


def texts_of(options: Options) -> Iterator[str]:
    """Problems and completions that the tokenizer is trained on."""
    rng = random.Random("tokenizer")
    for language in options.languages if options.programs < 1 else []:
        for _ in range(SAMPLES_PER_LANGUAGE):
            problem = make_word_problem(rng, language, options.operations)
            yield with_request(problem.text, language if options.asks else "")
            for flaws in (NO_FLAWS, Flaws(guess=1.0)):
                yield demonstrate(rng, problem, [language], flaws)
    for code in ASKING if options.programs else []:
        for _ in range(SAMPLES_PER_LANGUAGE):
            program = make_toy_program(rng, code, options.operations)
            yield program.text
            yield demonstrate_program(rng, program, NO_BLUNDERS)


def draw(options: Options, seed: int, validation: bool) -> list[WordProblem | ToyProgram]:
    """All different problems of one half, `options.programs` of them toy programs, evenly among the word problems.

    Validation problems do not depend on the seed, so that runs compare. Raises ConfigError when there are not so many.
    """
    count = options.validation if validation else options.problems
    programs = round(count * options.programs)
    words = iter(draw_word_problems(options, seed, count - programs, validation))
    toys = iter(draw_toy_programs(options, seed, programs, validation))
    return [
        next(toys) if (place + 1) * programs // count > place * programs // count else next(words)
        for place in range(count)
    ]


def draw_word_problems(options: Options, seed: int, count: int, validation: bool) -> list[WordProblem]:
    """`count` different word problems, the languages taking turns, and so do those that each asks for. Raises
    ConfigError when there are not so many."""
    rng, languages = random.Random("held out" if validation else f"train {seed}"), options.languages

    def word_problem(number: int) -> WordProblem:
        turn, index = divmod(number, len(languages))
        problem = make_word_problem(rng, languages[index], options.operations, validation)
        before, after = int(turn * options.asks), int((turn + 1) * options.asks)
        if before == after:
            return problem
        other = before // 2 % (len(languages) - 1) + 1 if before % 2 else 0
        return replace(problem, asked=languages[(index + other) % len(languages)])

    return _different(word_problem, count, "validation" if validation else "problems")


def draw_toy_programs(options: Options, seed: int, count: int, validation: bool) -> list[ToyProgram]:
    """`count` different toy programs, with as many steps as a word problem has operations; one in options.cpp_one_in
    in C++. Raises ConfigError when there are not so many."""
    rng = random.Random("held-out tasks" if validation else f"tasks {seed}")
    one_in = options.cpp_one_in

    def toy_program(number: int) -> ToyProgram:
        code: Code = "cpp" if one_in and number % one_in == one_in - 1 else "python"
        return make_toy_program(rng, code, options.operations, validation)

    return _different(toy_program, count, "validation" if validation else "problems")


def _different(draw_one: Callable[[int], Drawn], count: int, option: str) -> list[Drawn]:
    """`count` problems of different text; `draw_one` gets the number of those found so far. Raises ConfigError."""
    drawn: dict[str, Drawn] = {}
    for _ in range(20 * count):
        if len(drawn) == count:
            break
        problem = draw_one(len(drawn))
        drawn.setdefault(problem.text, problem)
    if len(drawn) < count:
        raise ConfigError(
            f"prepare.options.{option} asks for {count} problems of a kind, but only {len(drawn)} different ones were "
            "found: lower it, or raise prepare.options.operations"
        )
    return list(drawn.values())


def _row(problem: Problem) -> dict[str, object]:
    """A line of a data file (docs/programs.md): `tests` in place of `answer` for a program."""
    graded: dict[str, object] = {"answer": problem.answer} if problem.tests is None else {"tests": problem.tests}
    return {
        "id": problem.id,
        "problem": problem.text,
        **graded,
        "language": problem.language,
        "domain": problem.domain,
        "source": problem.source,
        **_request(problem.reasoning_language),
    }


def _request(asked: str) -> dict[str, str]:
    """The column of a row that asks for a language to reason in."""
    return {"reasoning_language": asked} if asked else {}
