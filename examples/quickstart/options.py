"""The options of the quickstart's script, in the settings file `[prepare] options`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError, model_validator

from examples.quickstart.word_problems import PHRASES
from shared.errors import ConfigError
from shared.section import Section


class Options(Section):
    """What is made."""

    problems: int = Field(4000, ge=1)
    """training problems"""
    held_out: int = Field(256, ge=1)
    """held-out problems"""
    languages: list[str] = list(PHRASES)
    """languages of the word problems"""
    operations: tuple[int, int] = (2, 3)
    """fewest and most additions and subtractions in a word problem, and steps of a program"""
    programs: float = Field(0.0, ge=0, le=1)
    """share of the problems that ask for a small program instead of a number"""
    cpp_one_in: int = Field(8, ge=0)
    """one in so many of these programs is asked for in C++, which takes a compiler and its time; 0 for none"""
    max_tokens: int = Field(512, gt=0)
    """longest sequence of the model, tokens; at least model.max_tokens"""

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


def _explain(found: dict[str, Any]) -> str:
    if not found["loc"]:
        return f"prepare.options.{found['ctx']['error']}"
    option = f"prepare.options.{'.'.join(map(str, found['loc']))}"
    if found["type"] == "extra_forbidden":
        return f"unknown setting {option}: the quickstart's options are {', '.join(Options.model_fields)}"
    return f"{option} = {found['input']!r}: {found['msg']}"
