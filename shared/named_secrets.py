"""Secrets of servers and agents: they come from environment variables of the launch, which settings name.

A command or an address is in the list of processes, in config.toml, in checkpoints and with trackers, which others
read. So one that seems to hold a secret is refused; no message repeats it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise
from urllib.parse import parse_qsl

from shared.errors import ConfigError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"(?:-e|--env=)?(?P<name>[A-Z_][A-Z0-9_]*)=[^$].*", re.DOTALL)
_PAIR = re.compile(
    r"""(?P<name>[\w.-]*\w)["']?\s*[:=]\s*["']?(?:(?:bearer|basic|token)\s+)?(?=(?P<value>[^\s"',;&}]+))""",
    re.IGNORECASE,
)
"""a name and its value, as in NAME=VALUE, a header, the query of an address or JSON"""
_SECRET_NAME = re.compile(
    r"-{0,2}(?:[\w.-]+[-_.])?(?:(?:api|access|auth|client|private|secret|account|subscription|license)[-_.]?key|"
    r"(?:api|access|auth|client|refresh|session)?(?:token|secret)|pat|pass|passwd|pwd|password|passphrase|credentials?|"
    r"authorization|cookie|bearer|signature|sig)",
    re.IGNORECASE,
)
_LONG_KEY = 16
"""letters from which on a value that is only called "key" counts as a secret"""
_SECRET_VALUE = re.compile(
    r"\b[spr]k-[\w-]{16,}|\bgh[a-z]_\w{16,}|\bgithub_pat_\w{16,}|\bglpat-[\w-]{16,}|\bxox[a-z]-[\w-]{10,}|"
    r"\bAKIA[0-9A-Z]{12,}|\bAIza[\w-]{20,}|\bhf_\w{16,}|\beyJ[\w-]{8,}\.[\w-]{8,}|://[^/\s@]*:[^/\s$@][^/\s@]*@|"
    r"\b(?:[Bb]earer|[Bb]asic)\s+[\w.~+/=-]{6,}",
)
"""keys of known services, tokens of the web, and passwords in an address"""
_USER = re.compile(r"://(?:[^/?#@\[]*:(?!\d{1,5}[/?#])[^@$][^@]*|[^/?#@:\[]{16,})@")
"""user and password in an address, or a user who is as long as a token"""
_HARMLESS = re.compile(
    r"\$.*|-.*|\d{1,5}|(?:~|\.{1,2})?/.*|.*\.(?:pem|key|crt|json|toml|txt|env)|none|true|false", re.IGNORECASE
)
"""values that are no secret themselves: of a variable, another option, a number, a file"""


def secret_in_command(command: str) -> str:
    """Return the name of what seems to be a secret in a command, "" without one. Raises ValueError for a command that
    cannot be read."""
    words = list(_words(shlex.split(command)))
    for word in words:
        if assigned := _ASSIGNMENT.fullmatch(word):
            return assigned["name"]
    pairs = [(pair["name"], pair["value"]) for pair in _PAIR.finditer(command)]
    pairs += [(word, value) for word, value in pairwise(words) if word.startswith("-")]
    for name, value in pairs:
        if _is_secret(name, value, _LONG_KEY) and not _HARMLESS.fullmatch(value):
            return name
    return "a key or password" if _SECRET_VALUE.search(command) else ""


def complain_of_url(setting: str, url: str, variable: str = "key_variable") -> Iterator[str]:
    """Yield one line if an address seems to hold a secret. variable: the setting that names the variable of a key."""
    pairs = parse_qsl(re.sub("[?#;]", "&", url))
    secret = next((name for name, value in pairs if value[0] != "$" and _is_secret(name, value)), "")
    if _USER.search(url):
        secret = "a user's key or password"
    elif not secret and _SECRET_VALUE.search(url):
        secret = "a key"
    if secret:
        yield (
            f"{setting} holds {secret:.60}, which the run's files and trackers would show: set the key in the "
            f'environment of the launch, and name the variable in {variable} = "NAME"'
        )


def _is_secret(name: str, value: str, shortest_key: int = 1) -> bool:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)  # clientSecret
    return bool(_SECRET_NAME.fullmatch(words)) or (words.lower().strip("-") == "key" and len(value) >= shortest_key)


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
