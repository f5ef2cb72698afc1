"""Makes the quickstart's files: problems to train on and held out, demonstrations, the tiny model.

[prepare]
script = "examples/quickstart/prepare.py"
options = { problems = 4000, operations = [2, 2] }     # options.py has all of them

[model]
path = "made/model"
[data]
train = "made/train.jsonl"
held_out = "made/held_out.jsonl"
[cold_start]
demonstrations = "made/demonstrations.jsonl"
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from examples.quickstart.options import Options, read_options
from examples.quickstart.tiny_model import build
from examples.quickstart.toy_programs import Code, ToyProgram, demonstrate_program, make_toy_program
from examples.quickstart.word_problems import WordProblem, demonstrate, make_word_problem
from shared.errors import ConfigError
from shared.types import Problem

DEMONSTRATIONS_PER_PROBLEM = 3
"""different imperfect completions of each training problem"""
Drawn = TypeVar("Drawn", WordProblem, ToyProgram)


def prepare(folder: Path, options: Mapping[str, Any], seed: int) -> None:
    """Write train.jsonl, held_out.jsonl, demonstrations.jsonl and model/ into the folder; the same seed and options
    give the same files.

    Raises ConfigError for wrong options, CheckpointError when the model cannot be written.
    """
    wanted = read_options(options)
    train, held_out = draw(wanted, seed, held_out=False), draw(wanted, seed, held_out=True)
    rng = random.Random(f"demonstrations {seed}")
    _write_lines(
        folder / "demonstrations.jsonl",
        (
            {"problem": one.text, "completion": _imitable(rng, one, wanted.languages)}
            for one in train
            for _ in range(DEMONSTRATIONS_PER_PROBLEM)
        ),
    )
    for file, name, found in (("train.jsonl", "train", train), ("held_out.jsonl", "held-out", held_out)):
        _write_lines(folder / file, (_row(one.problem(f"{name}-{number}")) for number, one in enumerate(found)))
    build(folder / "model", seed, wanted)


def _imitable(rng: random.Random, one: WordProblem | ToyProgram, languages: list[str]) -> str:
    return demonstrate_program(rng, one) if isinstance(one, ToyProgram) else demonstrate(rng, one, languages)


def draw(options: Options, seed: int, held_out: bool) -> list[WordProblem | ToyProgram]:
    """All different problems of one half, `options.programs` of them toy programs, evenly among the word problems.

    Held-out ones do not depend on the seed, so that runs compare. Raises ConfigError when there are not so many.
    """
    count = options.held_out if held_out else options.problems
    programs = round(count * options.programs)
    words = iter(draw_word_problems(options, seed, count - programs, held_out))
    toys = iter(draw_toy_programs(options, seed, programs, held_out))
    return [
        next(toys) if (place + 1) * programs // count > place * programs // count else next(words)
        for place in range(count)
    ]


def draw_word_problems(options: Options, seed: int, count: int, held_out: bool) -> list[WordProblem]:
    """`count` different word problems, the languages taking turns. Raises ConfigError when there are not so many."""
    rng = random.Random("held out" if held_out else f"train {seed}")

    def word_problem(number: int) -> WordProblem:
        language = options.languages[number % len(options.languages)]
        return make_word_problem(rng, language, options.operations, held_out)

    return _different(word_problem, count, "held_out" if held_out else "problems")


def draw_toy_programs(options: Options, seed: int, count: int, held_out: bool) -> list[ToyProgram]:
    """`count` different toy programs, with as many steps as a word problem has operations; one in options.cpp_one_in
    in C++. Raises ConfigError when there are not so many."""
    rng = random.Random("held-out tasks" if held_out else f"tasks {seed}")
    one_in = options.cpp_one_in

    def toy_program(number: int) -> ToyProgram:
        code: Code = "cpp" if one_in and number % one_in == one_in - 1 else "python"
        return make_toy_program(rng, code, options.operations, held_out)

    return _different(toy_program, count, "held_out" if held_out else "problems")


def _different(draw_one: Callable[[int], Drawn], count: int, option: str) -> list[Drawn]:
    """`count` problems of different text; `draw_one` gets the number of those found so far. Raises ConfigError."""
    found: dict[str, Drawn] = {}
    for _ in range(20 * count):
        if len(found) == count:
            break
        one = draw_one(len(found))
        found.setdefault(one.text, one)
    if len(found) < count:
        raise ConfigError(
            f"prepare.options.{option} asks for {count} problems of a kind, but only {len(found)} different ones were "
            "found: lower it, or raise prepare.options.operations"
        )
    return list(found.values())


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
    }


def _write_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    with path.open("w", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
