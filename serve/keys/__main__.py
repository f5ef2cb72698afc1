"""Make a key, or take one away: `python -m serve.keys keys.json --name anna`."""

from __future__ import annotations

import argparse
import secrets
import sys
from pathlib import Path

from pydantic import ValidationError

from serve.keys.ring import SCOPES, Key, KeyFile, digest_of, read, write
from shared.errors import ConfigError, InputError


def main(arguments: list[str]) -> int:
    """Add a key, or take one away; returns the exit code."""
    parser = argparse.ArgumentParser(
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
        key = Key.model_validate({
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
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(secret)
    print(f"the key of {given.name}; {given.file} holds its hash only, so keep it now", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
