"""Makes the files of the example "guess": rows that name the environment, demonstrations that guess at random whatever
they read after each guess, and a tiny model that knows the words.

[prepare]
script = "examples/guess/prepare.py"
options = { numbers = 16, guesses = 5 }
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from examples.quickstart.tiny_model import build, train_tokenizer, write_lines
from shared.errors import ConfigError
from shared.section import Section

VOCABULARY = 300
DEMONSTRATIONS = 512


class GuessFiles(Section):
    """What is made."""

    numbers: int = Field(16, ge=2)
    """the number is from 1 to this; environment.options.guess.numbers must be the same"""
    guesses: int = Field(5, ge=1)
    """guesses of a demonstration; environment.options.guess.guesses should be the same"""
    problems: int = Field(256, ge=1)
    """rows to train on: all say the same, the number that is to be found comes from the seed of the group"""
    validation: int = Field(256, ge=1)
    max_tokens: int = Field(128, ge=1)
    """longest sequence of the model, tokens"""


def prepare(folder: Path, options: Mapping[str, Any], seed: int) -> None:
    """Write train.jsonl, validation.jsonl, demonstrations.jsonl and model/ into the folder. Raises ConfigError."""
    try:
        files = GuessFiles.model_validate(options)
    except ValidationError as error:
        raise ConfigError(f"prepare.options: {error}") from error
    text = f"Find the number from 1 to {files.numbers}."
    rng = random.Random(f"guesses {seed}")
    games = (_play_at_random(rng, files) for _ in range(DEMONSTRATIONS))
    write_lines(folder / "demonstrations.jsonl", ({"problem": text, "completion": game} for game in games))
    for name, count in (("train", files.problems), ("validation", files.validation)):
        rows = ({"id": f"{name}-{number}", "problem": text, "environment": "guess"} for number in range(count))
        write_lines(folder / f"{name}.jsonl", rows)
    words = [text, "higher", "lower", "Name a number.", *map(str, range(1, files.numbers + 1))]
    build(folder / "model", seed, train_tokenizer(words * 20, VOCABULARY), files.max_tokens)


def _play_at_random(rng: random.Random, options: GuessFiles) -> list[dict[str, str]]:
    """A game as messages: guesses at random between what the environment answers, until the number is found."""
    number, messages = rng.randint(1, options.numbers), list[dict[str, str]]()
    for left in reversed(range(options.guesses)):
        guess = rng.randint(1, options.numbers)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == number or not left:
            break
        messages.append({"role": "user", "content": "higher" if guess < number else "lower"})
    return messages
