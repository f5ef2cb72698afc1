"""Secrets of servers and agents: they come from environment variables of the launch, which settings name.

A command or an address stands in the list of processes, in config.toml, in checkpoints and with trackers, which others
read. So one that seems to hold a secret is refused; no message repeats it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise
from urllib.parse import parse_qsl, urlsplit

from shared.errors import ConfigError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"(?:-e|--env=)?(?P<name>[A-Z_][A-Z0-9_]*)=[^$].*", re.DOTALL)
_SECRET_NAME = re.compile(
    r"-{0,2}(?:[\w.-]+[-_.])?(?:api-?key|access-?key|key|token|pat|secret|pass|passwd|password|passphrase|credentials?|"
    r"auth|authorization|bearer|signature|sig)",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"\b[a-z]{2}-[\w-]{16,}|\bgh[a-z]_\w{16,}|\bgithub_pat_\w{16,}|\bglpat-[\w-]{16,}|\bxox[a-z]-[\w-]{10,}|"
    r"\bAKIA[0-9A-Z]{12,}|\bAIza[\w-]{20,}|\bhf_\w{16,}|\beyJ[\w-]{8,}\.[\w-]{8,}|://[^/\s@]*:[^/\s$@][^/\s@]*@|"
    r"\b(?:[Bb]earer|[Bb]asic)\s+[\w.~+/=-]{6,}",
)
"""keys of known services, tokens of the web, and passwords in an address"""
_HARMLESS = re.compile(
    r"\$.*|-.*|\d{1,5}|(?:~|\.{1,2})?/.*|.*\.(?:pem|key|crt|json|toml|txt|env)|none|true|false", re.I
)
"""values that are no secret themselves: of a variable, another option, a number, a file"""


def secret_in_command(command: str) -> str:
    """Return the name of what seems to be a secret in a command, "" without one. Raises ValueError for a command that
    cannot be read."""
    for word, following in pairwise([*_words(shlex.split(command)), "-"]):
        if assigned := _ASSIGNMENT.fullmatch(word):
            return assigned["name"]
        name, equals, value = re.sub(r"^(?:-H|--header)=?", "", word).replace(":", "=", 1).partition("=")
        if not equals and word.startswith("-"):
            equals, value = "=", following
        if equals and _SECRET_NAME.fullmatch(name.strip()) and not _HARMLESS.fullmatch(value.strip()):
            return name.strip()
        if _SECRET_VALUE.search(word):
            return "a key or password"
    return ""


def secret_in_url(url: str) -> str:
    """Return the name of what seems to be a secret in an address, "" without one."""
    split = urlsplit(url)
    if "@" in split.netloc:
        return "user or password"
    names = (name for name, _ in parse_qsl(split.query) if _SECRET_NAME.fullmatch(name))
    return next(names, "a key" if _SECRET_VALUE.search(url) else "")


def _words(words: Sequence[str], depth: int = 2) -> Iterator[str]:
    """The words of a command, and those within a word, as in `sh -c "..."`."""
    for word in words:
        yield word
        if depth and re.search(r"\s", word):
            try:
                yield from _words(shlex.split(word), depth - 1)
            except ValueError:
                yield from _words(word.split(), depth - 1)


def values_of(names: Sequence[str], setting: str) -> dict[str, str]:
    """Return variables of this process by their names. Raises ConfigError for one that is not set."""
    if missing := [name for name in names if not os.environ.get(name)]:
        raise ConfigError(f'{setting} names "{missing[0]}": that environment variable is not set')
    return {name: os.environ[name] for name in names}
