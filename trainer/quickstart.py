"""Makes the quickstart's files in the run's folder: problems to train on and for validation, demonstrations, the tiny
model.

Each is written beside its place and renamed, and left alone when it is there and was made from the same settings, so a
resumed run goes on with exactly the files it started with.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shared.atomic_write import beside, flush
from shared.config import Config
from shared.errors import ConfigError, DataError
from shared.types import Problem
from trainer.phrases import PHRASES
from trainer.stories import Story, demonstrate, make_story
from trainer.tasks import Code, Task, demonstrate_program, make_task
from trainer.tiny_model import build

DEMONSTRATIONS_PER_PROBLEM = 3
"""different imperfect completions of each training problem"""
FOLDER = "made"
"""below the run's folder"""
Drawn = TypeVar("Drawn", Story, Task)


@dataclass(frozen=True)
class Quickstart:
    """Paths of the quickstart's files and of its model folder."""

    train: Path
    validation: Path
    demonstrations: Path
    model: Path


def prepare(config: Config) -> Quickstart:
    """Make what is missing in `config.run_dir`/made; a second call with the same settings changes nothing.

    Raises ConfigError for a language without phrases or when the run's folder holds files made from other settings,
    DataError when the disk fails, CheckpointError when the model cannot be written.
    """
    unknown = [language for language in config.stories.languages if language not in PHRASES]
    if unknown:
        raise ConfigError(f"stories.languages names {', '.join(unknown)}; known are {', '.join(PHRASES)}")
    folder = config.run_dir / FOLDER
    made = Quickstart(
        train=folder / "train.jsonl",
        validation=folder / "validation.jsonl",
        demonstrations=folder / "demonstrations.jsonl",
        model=folder / "model",
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _keep_settings(config, folder / "made_from.json")
        _write_files(config, made)
    except OSError as error:
        raise DataError(
            f"the quickstart's files cannot be written to {folder} ({error}): free disk space or set another runs_dir"
        ) from error
    if config.model.path == "tiny" and not (made.model / "config.json").is_file():
        shutil.rmtree(made.model, ignore_errors=True)
        build(made.model, config.seed, config.stories, config.model.max_tokens)
    return made


def _keep_settings(config: Config, path: Path) -> None:
    """Record what the files were made from. Raises ConfigError where they were made from other settings."""
    stories = config.stories.model_dump(mode="json")
    if not config.stories.programs:
        del stories["programs"], stories["cpp_one_in"]  # as in folders from before there were programs
    wanted = {
        "seed": config.seed,
        "stories": stories,
        "max_tokens": config.model.max_tokens,
        "evaluate.problems": config.evaluate.problems,
    }
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        changed = [key for key, value in wanted.items() if found.get(key) != value]
        if changed:
            raise ConfigError(
                f"{path.parent} was made with other settings ({', '.join(changed)} changed): give this run another "
                f"name (--name=...), or delete {path.parent.parent}"
            )
        return
    _write_lines(path, [wanted])


def _write_files(config: Config, made: Quickstart) -> None:
    train = draw(config, config.stories.problems, validation=False)
    validation = draw(config, config.evaluate.problems, validation=True)
    rng = random.Random(f"demonstrations {config.seed}")
    if not made.demonstrations.is_file():
        _write_lines(
            made.demonstrations,
            (
                {"problem": one.text, "completion": _imitable(rng, one, config.stories.languages)}
                for one in train
                for _ in range(DEMONSTRATIONS_PER_PROBLEM)
            ),
        )
    for path, name, found in ((made.train, "train", train), (made.validation, "validation", validation)):
        if not path.is_file():
            _write_lines(path, (_row(one.problem(f"{name}-{number}")) for number, one in enumerate(found)))


def _imitable(rng: random.Random, one: Story | Task, languages: list[str]) -> str:
    return demonstrate_program(rng, one) if isinstance(one, Task) else demonstrate(rng, one, languages)


def draw(config: Config, count: int, validation: bool) -> list[Story | Task]:
    """`count` different problems, `stories.programs` of them programming tasks, evenly among the stories.

    Raises ConfigError when there are not so many.
    """
    programs = round(count * config.stories.programs)
    stories = iter(tell(config, count - programs, validation))
    tasks = iter(ask(config, programs, validation))
    return [
        next(tasks) if (place + 1) * programs // count > place * programs // count else next(stories)
        for place in range(count)
    ]


def tell(config: Config, count: int, validation: bool) -> list[Story]:
    """`count` different stories, the languages taking turns. Validation ones do not depend on the seed, so that runs
    compare. Raises ConfigError when there are not so many."""
    rng = random.Random("held out" if validation else f"train {config.seed}")
    languages, operations = config.stories.languages, config.stories.operations

    def story(number: int) -> Story:
        return make_story(rng, languages[number % len(languages)], operations, validation)

    return _different(story, count, config, validation)


def ask(config: Config, count: int, validation: bool) -> list[Task]:
    """`count` different tasks, with as many steps as a story has operations; one in stories.cpp_one_in in C++.

    Validation ones do not depend on the seed. Raises ConfigError when there are not so many.
    """
    rng = random.Random("held-out tasks" if validation else f"tasks {config.seed}")
    one_in = config.stories.cpp_one_in

    def task(number: int) -> Task:
        code: Code = "cpp" if one_in and number % one_in == one_in - 1 else "python"
        return make_task(rng, code, config.stories.operations, validation)

    return _different(task, count, config, validation)


def _different(draw_one: Callable[[int], Drawn], count: int, config: Config, validation: bool) -> list[Drawn]:
    """`count` problems of different text; `draw_one` gets the number of those found so far. Raises ConfigError."""
    found: dict[str, Drawn] = {}
    for _ in range(20 * count):
        if len(found) == count:
            break
        one = draw_one(len(found))
        found.setdefault(one.text, one)
    if len(found) < count:
        setting, value = "stories.problems", config.stories.problems
        if validation:
            setting, value = "evaluate.problems", config.evaluate.problems
        raise ConfigError(
            f"{setting} = {value}, but only {len(found)} different ones were found: lower it, or raise "
            "stories.operations"
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
    with beside(path) as partial:
        with partial.open("w", encoding="utf-8") as stream:
            for row in rows:
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
        flush(partial)
