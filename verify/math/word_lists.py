"""Reads the words that answers are written with (word_lists.toml)."""

from __future__ import annotations

import tomllib
from pathlib import Path

LISTS: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("word_lists.toml").read_text(encoding="utf-8")
)


def words_in(table: str, name: str) -> list[str]:
    """Return the words of a list that are separated by spaces."""
    return LISTS[table][name].split()


def pattern_of(table: str, name: str) -> str:
    """Return a list of patterns as one pattern."""
    return "|".join(LISTS[table][name].strip("\n").split("\n"))
