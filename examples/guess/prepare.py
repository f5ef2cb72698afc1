"""Makes the files of the example "guess": rows that name the environment, demonstrations that guess at random, and a
tiny model that knows the words.

[prepare]
script = "examples/guess/prepare.py"
options = { numbers = 16 }
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from examples.quickstart.tiny_model import build, train_tokenizer
from shared.errors import ConfigError
from shared.section import Section

VOCABULARY = 300
DEMONSTRATIONS = 256


class GuessFiles(Section):
    """What is made."""

    numbers: int = Field(16, ge=2)
    """the number lies from 1 to this; environment.options.guess.numbers must be the same"""
    problems: int = Field(256, ge=1)
    """rows to train on: all say the same, the number that is to be found comes from the seed of the group"""
    validation: int = Field(256, ge=1)
    max_tokens: int = Field(128, ge=1)
    """longest sequence of the model, tokens"""


def prepare(folder: Path, options: Mapping[str, Any], seed: int) -> None:
    """Write train.jsonl, validation.jsonl, demonstrations.jsonl and model/ into the folder. Raises ConfigError."""
    try:
        wanted = GuessFiles.model_validate(options)
    except ValidationError as error:
        raise ConfigError(f"prepare.options: {error}") from error
    text = f"Find the number from 1 to {wanted.numbers}."
    rng = random.Random(f"guesses {seed}")
    guesses = [str(rng.randint(1, wanted.numbers)) for _ in range(DEMONSTRATIONS)]
    _write(folder / "demonstrations.jsonl", ({"problem": text, "completion": guess} for guess in guesses))
    for name, count in (("train", wanted.problems), ("validation", wanted.validation)):
        rows = ({"id": f"{name}-{number}", "problem": text, "environment": "guess"} for number in range(count))
        _write(folder / f"{name}.jsonl", rows)
    words = [text, "higher", "lower", "Name a number.", *map(str, range(1, wanted.numbers + 1))]
    build(folder / "model", seed, train_tokenizer(words * 20, VOCABULARY), wanted.max_tokens)


def _write(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
