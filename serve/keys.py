"""API keys, with their scopes, limits and default languages; `python -m serve.keys` makes them.

Only the SHA-256 of a key is stored (keys are random, so they cannot be guessed from it), in a JSON file:

    {"keys": [{"name": "anna", "sha256": "...", "scopes": ["chat"], "completions": 8, "requests_per_minute": 60}]}

A single key may instead be in the environment variable MAESTRALE_API_KEY.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serve.errors import ApiError
from serve.reasoning_language import OptionalLanguageTag
from shared.atomic_write import beside
from shared.command_line import CommandParser
from shared.errors import ConfigError, InputError, print_error, run_command

KEY_VARIABLE = "MAESTRALE_API_KEY"
LEAST_LETTERS = 16
"""smallest length of a key that users choose themselves"""
MINUTE_S = 60.0
Scope = Literal["chat", "raw", "metrics"]
SCOPES: dict[Scope, str] = {
    "chat": "chats, responses, counting tokens",
    "raw": "prompts that are given to the model as they are, without the server's system prompt",
    "metrics": "figures of the server",
}


class ApiKey(BaseModel):
    """The record of one key: its hash, scopes and limits, without the key itself."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,40}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    scopes: set[Scope] = {"chat"}
    reasoning_language: OptionalLanguageTag = ""
    """auto, off, or a BCP 47 code, where the request names none; empty for the server's"""
    completions: int = Field(0, ge=0)
    """at a time; 0 for no bound of its own"""
    requests_per_minute: int = Field(0, ge=0)
    """0 for no bound"""


class KeyFile(BaseModel):
    """The contents of the file of keys."""

    model_config = ConfigDict(extra="forbid")

    keys: list[ApiKey] = []


class Client:
    """The sender of requests under one key: its permissions, and its current use of the server."""

    def __init__(self, key: ApiKey | None):
        """key: None for any client of a server that has no keys."""
        self.key = key
        self.name = key.name if key else ""
        self.admitted = 0
        """number of completions that are admitted and have not ended"""
        self._begun: deque[float] = deque()
        """arrival times of the requests of the last minute"""

    def may(self, scope: Scope) -> bool:
        """Whether the client has a scope."""
        return self.key is None or scope in self.key.scopes

    @property
    def language(self) -> str:
        """The language to reason in if a request names none, "" for the server's default."""
        return self.key.reasoning_language if self.key else ""

    def check(self, count: int, now_s: float | None = None) -> None:
        """Count a request of `count` completions. Raises ApiError: 429 beyond what the key allows at the moment, 400
        beyond what it can ever have."""
        if self.key is None:
            return
        if (most := self.key.completions) and count > most:
            raise ApiError(400, f"{count} completions in one request, of {most} that this key may have",
                           code="too_many", param="n")  # fmt: skip
        if most and self.admitted + count > most:
            raise ApiError(
                429, f"this key has {self.admitted} completions under way of {most} that it may have: wait for them",
                code="rate_limit_exceeded", retry_after_s=1,
            )  # fmt: skip
        if most := self.key.requests_per_minute:
            now_s = time.monotonic() if now_s is None else now_s
            while self._begun and self._begun[0] <= now_s - MINUTE_S:
                self._begun.popleft()
            if len(self._begun) >= most:
                raise ApiError(
                    429, f"this key may send {most} requests a minute", code="rate_limit_exceeded",
                    retry_after_s=self._begun[0] + MINUTE_S - now_s,
                )  # fmt: skip
            self._begun.append(now_s)


class ApiKeys:
    """All keys of a server, with a client for each."""

    def __init__(self, keys: list[ApiKey]):
        self.clients = [Client(key) for key in keys]
        self._anybody = Client(None)

    @property
    def open(self) -> bool:
        """Whether there are no keys, so that any client that reaches the server may use it."""
        return not self.clients

    def find(self, authorization: str) -> Client | None:
        """Return the client of a header "Bearer KEY", None without a valid key. Takes equally long for all keys."""
        if self.open:
            return self._anybody
        kind, _, key = authorization.partition(" ")
        digest = digest_of(key.strip())
        match = None
        for client in self.clients:
            if client.key and hmac.compare_digest(client.key.sha256, digest) and kind.lower() == "bearer":
                match = client
        return match


def digest_of(key: str) -> str:
    """Return the SHA-256 of a key, which is what is stored of it."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def load(path: str, environment: Mapping[str, str] = os.environ) -> ApiKeys:
    """Load the keys of a file ("" for none) and of the environment. Raises ConfigError."""
    keys = read(Path(path)).keys if path else []
    if secret := environment.get(KEY_VARIABLE, ""):
        if len(secret) < LEAST_LETTERS:
            raise ConfigError(f"{KEY_VARIABLE}: give a key of at least {LEAST_LETTERS} letters, such as one that "
                              "`python -m serve.keys` makes")  # fmt: skip
        keys = [*keys, ApiKey(name="environment", sha256=digest_of(secret), scopes=set(SCOPES))]
    if path and not keys:
        raise ConfigError(f"keys = {path}: it holds no key; make one with `python -m serve.keys {path} --name NAME`")
    return ApiKeys(keys)


def read(path: Path) -> KeyFile:
    """Read a file of keys. Raises ConfigError."""
    try:
        return KeyFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"keys = {path}: {error.strerror}; make it with `python -m serve.keys {path} --name NAME`"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"keys = {path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def write(path: Path, file: KeyFile) -> None:
    """Write a file of keys that only its owner can read (mode 0600)."""
    text = json.dumps(file.model_dump(mode="json", exclude_defaults=True), indent=2) + "\n"
    with beside(path) as partial:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)


def main(arguments: list[str]) -> int:
    """Add a key, or take one away; returns the exit code."""
    parser = CommandParser(
        prog="python -m serve.keys", description="Make a key for `python -m serve --keys FILE`; it is shown once.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="scopes:\n" + "\n".join(f"  {name:8} {text}" for name, text in SCOPES.items()),
    )  # fmt: skip
    parser.add_argument("file", type=Path, help="JSON file of keys; it is made if it is not there")
    parser.add_argument("--name", required=True, help="whose key it is, for logs and metrics")
    parser.add_argument("--scopes", default="chat", help="with commas between them (default: chat)")
    parser.add_argument("--reasoning-language", default="", help="auto, off or a code, where requests name none")
    parser.add_argument("--completions", type=int, default=0, help="at a time (default: no bound)")
    parser.add_argument("--requests-per-minute", type=int, default=0, help="(default: no bound)")
    parser.add_argument("--revoke", action="store_true", help="take the key of this name away")
    given = parser.parse_args(arguments)
    try:
        file = read(given.file) if given.file.exists() else KeyFile()
        others = [key for key in file.keys if key.name != given.name]
        if given.revoke:
            if len(others) == len(file.keys):
                raise ConfigError(f"--name {given.name}: {given.file} has no such key")
            write(given.file, KeyFile(keys=others))
            print(f"{given.name} is revoked as soon as the server is started again")
            return 0
        if len(others) < len(file.keys):
            raise ConfigError(f"--name {given.name}: there is one already; take it away first (--revoke)")
        secret = f"mk-{secrets.token_urlsafe(32)}"
        key = ApiKey.model_validate({
            "name": given.name, "sha256": digest_of(secret), "scopes": given.scopes.split(","),
            "reasoning_language": given.reasoning_language, "completions": given.completions,
            "requests_per_minute": given.requests_per_minute,
        })  # fmt: skip
        write(given.file, KeyFile(keys=[*others, key]))
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0]).replace("_", "-")
        print(f"error: --{option} {first['input']}: {first['msg'].removeprefix('Value error, ')}", file=sys.stderr)
        return ConfigError.exit_code
    except InputError as error:
        return print_error(error)
    print(secret)
    print(f"the key of {given.name}; {given.file} holds its hash only, so keep it now", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
