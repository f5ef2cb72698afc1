"""Options of a command that are wrong: one line with the nearest that there is."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar

from pydantic_settings import BaseSettings, SettingsError

from shared.errors import ConfigError, as_typed

S = TypeVar("S", bound=BaseSettings)


class CommandParser(argparse.ArgumentParser):
    """A parser that raises ConfigError for a mistake instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        """Raise it, with the nearest option of the command and of its subcommands."""
        inner = [each.choices.values() for each in self._actions if isinstance(each, argparse._SubParsersAction)]
        parsers = [self, *(parser for parsers in inner for parser in parsers)]
        raise option_error(message, [name for one in parsers for name in one._option_string_actions], self.prog)


def option_error(message: str, options: Iterable[str], program: str) -> ConfigError:
    """The error for what argparse says. options: those that there are. program: "python -m X"."""
    _, unknown, words = message.partition("unrecognized arguments: ")
    word = next((word.partition("=")[0] for word in words.split() if word.startswith("-")), words)
    if unknown and (near := difflib.get_close_matches(word, options, 1, 0.75)):
        return ConfigError(f"{word}: unknown option; did you mean {near[0]}?")
    return ConfigError(as_typed(f"{f'{word}: unknown option' if unknown else message} ({program} --help lists all)"))


def read_settings(kind: type[S], arguments: list[str] | None, **values: Any) -> S:
    """Settings of a command line (`cli_exit_on_error=False`). Raises ConfigError, ValidationError."""
    try:
        return kind(_cli_parse_args=arguments, **values)
    except SettingsError as error:
        options = [f"--{name.replace('_', '-')}" for name in kind.model_fields]
        message, program = str(error).removeprefix("error parsing CLI: "), str(kind.model_config.get("cli_prog_name"))
        raise option_error(message, options, program) from None
