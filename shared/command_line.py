"""Options of a command that are wrong: one line with the nearest that there is, exit code 2."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from typing import Any, NoReturn, TypeVar

from pydantic_settings import BaseSettings, SettingsError

from shared.errors import ConfigError, as_typed, print_error

S = TypeVar("S", bound=BaseSettings)
CLI = "error parsing CLI: "
"""with which pydantic begins what argparse says"""


class CommandParser(argparse.ArgumentParser):
    """A parser whose mistakes are one line each, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake, and exit."""
        self.exit(print_error(option_error(message, self.options(), self.prog)))

    def options(self) -> list[str]:
        """The options of the command and of its subcommands."""
        inner = [each.choices.values() for each in self._actions if isinstance(each, argparse._SubParsersAction)]
        return [*self._option_string_actions, *(name for parsers in inner for one in parsers for name in one.options())]


def option_error(message: str, options: Iterable[str], program: str) -> ConfigError:
    """The error for what argparse says of a command line. options: those that there are. program: "python -m X"."""
    _, unknown, words = message.partition("unrecognized arguments: ")
    word = next((word.partition("=")[0] for word in words.split() if word.startswith("-")), words)
    near = difflib.get_close_matches(word, options, 1)
    if unknown and near:
        return ConfigError(f"{word}: unknown option; did you mean {near[0]}?")
    what = f"{word}: unknown option" if unknown else message
    return ConfigError(as_typed(f"{what} ({program} --help lists the options)"))


def read_settings(kind: type[S], arguments: list[str] | None, **values: Any) -> S:
    """Settings with `cli_exit_on_error=False`, of a command line. Raises ConfigError for one that is wrong, pydantic's
    ValidationError for values."""
    try:
        return kind(_cli_parse_args=arguments, **values)
    except SettingsError as error:
        if not str(error).startswith(CLI):
            raise
        options = [f"--{name.replace('_', '-')}" for name in kind.model_fields]
        program = str(kind.model_config.get("cli_prog_name"))
        raise option_error(str(error).removeprefix(CLI), options, program) from None
