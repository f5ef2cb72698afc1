"""The journal of a running stage: its question, and one line for every row that is decided.

First line: the stage, its settings and the digests of its input. Each further line: {"row": index, ...} in the order
in which rows were finished. A journal of another question is refused. An incomplete last line is removed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from curate.stage import Decision, Kept, Rejected
from shared.atomic_write import open_log
from shared.errors import ConfigError

Question = dict[str, Any]
"""{"stage", "settings", "inputs": [{"file", "digest"}]}: the same question has the same result on every machine"""


def digest(path: Path) -> str:
    """Return a digest of a file's bytes, 16 hexadecimal digits. Raises ConfigError if it cannot be read."""
    made = hashlib.blake2b(digest_size=8)
    try:
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                made.update(block)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give an existing .jsonl or .jsonl.gz") from error
    return made.hexdigest()


def encode(value: Mapping[str, Any]) -> bytes:
    """Encode one JSON line; characters are escaped only in rows with lone surrogates, which UTF-8 cannot hold."""
    try:
        return json.dumps(value, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(value).encode() + b"\n"


def difference(ours: Question, theirs: Mapping[str, Any]) -> str:
    """Describe the first difference of two questions, "" if they are the same."""
    if ours["stage"] != theirs.get("stage"):
        return f"stage {theirs.get('stage')!r}, now {ours['stage']!r}"
    if ours["inputs"] != theirs.get("inputs"):
        return "other input files"
    before = theirs.get("settings")
    if not isinstance(before, dict):
        return "unreadable settings"
    for name in sorted(ours["settings"].keys() | before.keys()):
        if ours["settings"].get(name) != before.get(name):
            return f"{name} = {json.dumps(before.get(name))}, now {json.dumps(ours['settings'].get(name))}"
    return ""


class Journal:
    """Appends decisions to a file and holds those of earlier launches. Locked: a second process is refused."""

    def __init__(self, path: Path, question: Question, out: Path, restart: bool = False):
        """Open or create the file; restart: discard its contents. Raises ConfigError if another process has it, or if
        it holds another question."""
        self.path = path
        self.found: dict[int, Decision] = {}
        self._stream, lines = open_log(path, f"--out = {out}", restart)
        try:
            self._read(question, lines)
        except BaseException:
            self._stream.close()
            raise

    def _read(self, question: Question, lines: list[bytes]) -> None:
        if not lines:
            self._stream.write(encode(question))
            self._stream.flush()
            return
        repair = "give the same again, another --out, or --restart to begin anew"
        try:
            other = difference(question, json.loads(lines[0]))
            if other:
                raise ConfigError(f"{self.path} was begun with {other}: {repair}")
            for line in lines[1:]:
                entry = json.loads(line)
                self.found[entry["row"]] = _decision(entry)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{self.path} is no journal of this command: {repair}") from error

    def add(self, index: int, decision: Decision) -> None:
        """Add one row's decision; `flush` writes it to the file."""
        self.found[index] = decision
        if isinstance(decision, Kept):
            entry: dict[str, Any] = {"row": index, "kept": decision.rows}
        else:
            entry = {"row": index, "reason": decision.reason, "detail": decision.detail}
        if decision.counts:
            entry["counts"] = decision.counts
        self._stream.write(encode(entry))

    def flush(self) -> None:
        """Write what was added to the file (without fsync)."""
        self._stream.flush()

    def close(self) -> None:
        """Write what is left and release the lock."""
        self._stream.close()


def _decision(entry: Mapping[str, Any]) -> Decision:
    counts = entry.get("counts", {})
    if "kept" in entry:
        return Kept(entry["kept"], counts)
    return Rejected(entry["reason"], entry["detail"], counts)
