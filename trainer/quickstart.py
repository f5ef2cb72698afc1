"""The quickstart's files in the run's folder: problems to train on and held out, demonstrations, the tiny model.

Each is written beside its place and renamed, and left alone when it is there and was made from the same settings, so a
resumed run goes on with exactly the files it started with. What it does not: decide which of them a run uses
(sources.py). Who calls this: sources.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.config import Config
from shared.errors import ConfigError, DataError
from trainer.phrases import PHRASES
from trainer.stories import Story, demonstrate, make_story
from trainer.tiny_model import build

DEMONSTRATIONS_PER_PROBLEM = 3
"""different imperfect completions of each training problem"""
FOLDER = "made"
"""below the run's folder"""


@dataclass(frozen=True)
class Quickstart:
    """Where everything lies."""

    train: Path
    held_out: Path
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
        held_out=folder / "held_out.jsonl",
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
    """Remember what the files were made from; refuse to mix files of different settings."""
    wanted = {
        "seed": config.seed,
        "stories": config.stories.model_dump(mode="json"),
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
    train = tell(config, config.stories.problems, held_out=False)
    held_out = tell(config, config.evaluate.problems, held_out=True)
    rng = random.Random(f"demonstrations {config.seed}")
    if not made.demonstrations.is_file():
        _write_lines(
            made.demonstrations,
            (
                {"problem": story.text, "completion": demonstrate(rng, story, config.stories.languages)}
                for story in train
                for _ in range(DEMONSTRATIONS_PER_PROBLEM)
            ),
        )
    for path, name, stories in ((made.train, "train", train), (made.held_out, "held-out", held_out)):
        if not path.is_file():
            _write_lines(path, (_row(story, f"{name}-{number}") for number, story in enumerate(stories)))


def tell(config: Config, count: int, held_out: bool) -> list[Story]:
    """`count` different stories, the languages taking turns. Held-out ones do not depend on the seed, so that runs
    compare. Raises ConfigError when there are not so many."""
    rng = random.Random("held out" if held_out else f"train {config.seed}")
    languages = config.stories.languages
    found: dict[str, Story] = {}
    for _ in range(20 * count):
        if len(found) == count:
            break
        story = make_story(rng, languages[len(found) % len(languages)], config.stories.operations, held_out)
        found.setdefault(story.text, story)
    if len(found) < count:
        setting = "evaluate.problems" if held_out else "stories.problems"
        raise ConfigError(
            f"{setting} = {count}, but only {len(found)} different stories were found: lower it, or raise "
            "stories.operations"
        )
    return list(found.values())


def _row(story: Story, identifier: str) -> dict[str, str]:
    problem = story.problem(identifier)
    return {
        "id": problem.id,
        "problem": problem.text,
        "answer": problem.answer,
        "language": problem.language,
        "domain": problem.domain,
        "source": problem.source,
    }


def _write_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)
