"""The rows of a command that can be stopped: a file that it appends to, and goes on from where it ended.

    with Journal(out, Answer, lambda answer: answer.id, {"model": model}, "give another --out") as journal:
        for question in questions:
            if journal.lacks(question.id):
                journal.add(Answer(question.id, await ask(question)))

One process writes at a time. A row is written whole or not at all, and a last line that a kill has cut is removed. The
identity is everything that rows depend on: a file that was made with another one is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Hashable, Mapping
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import msgspec

from shared.atomic_write import append_line, flush, open_log, write_whole
from shared.errors import ConfigError, DataError
from shared.json_reader import parse_json

Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row", bound=msgspec.Struct)
SHOWN = 80
"""characters of a setting's value that an error shows; a longer value is only named"""


class Journal(Generic[Key, Row]):
    """The rows of a command, locked by its process until it is closed."""

    def __init__(
        self, path: Path, kind: type[Row], key: Callable[[Row], Key], identity: Mapping[str, Any], repair: str, *,
        where: str = "", header: Path | None = None, grows: Collection[str] = (),
        once: Mapping[str, Any] | None = None, failed: Callable[[Row], bool] = lambda _: False, sync: bool = True,
        restart: bool = False,
    ):  # fmt: skip
        """Open or create the file, and read its rows.

        Args:
            key: Names a row; a later row replaces an earlier one with the same key.
            repair: What the user can do about a file with another identity, to end an error with.
            where: Begins an error, e.g. "--out = answers.jsonl"; the path if it is empty.
            header: File of the identity; without one it is the first line of `path`.
            grows: Tables of the identity to which later launches may add names. They need a header.
            once: Values that the first launch decides, such as a random secret.
            failed: Whether a row is a failure, which is tried again and never replaces another row.
            sync: Whether a row is on the disk when `add` returns; otherwise a power failure may lose it, a kill not.
            restart: Forget the content.

        Raises:
            ConfigError: Another process has the file, or it has another identity.
            DataError: A line cannot be read.
        """
        self.path, self.key, self.failed, self._sync = path, key, failed, sync
        self._where, self._repair = where or str(path), repair
        self._stream, lines = open_log(path, self._where, restart)
        try:
            inside = lines[: header is None]
            source = header or path
            content = header.read_bytes() if header and header.exists() and not restart else b"".join(inside)
            if lines and not content:
                raise ConfigError(f"{path} has rows, but {source} is missing: restore it, or {repair}")
            self.identity = self._join(source, content, {**(once or {}), **identity}, once or {}, grows)
            if header is not None:
                write_whole(header, json.dumps(self.identity, indent=1, sort_keys=True) + "\n")
            elif not lines:
                append_line(path, _encode(self.identity))
            self.rows = rows_of(lines, kind, path, key, failed, skip=len(inside))
        except BaseException:
            self._stream.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join(
        self, source: Path, content: bytes, identity: dict[str, Any], once: Mapping[str, Any], grows: Collection[str]
    ) -> dict[str, Any]:
        """Return the identity that rows share from now on. Raises ConfigError for another one."""
        if not content:
            return identity
        try:
            before = dict(parse_json(content))
            tables = {name: dict(before[name]) for name in grows}
            identity |= {name: before[name] for name in once}
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{source} cannot be read as the identity of a journal ({error}): {self._repair}"
            ) from error
        grown = {name: table | identity[name] for name, table in tables.items()}
        check_same({**before, **{name: grown[name] | tables[name] for name in grows}}, identity | grown, self._where,
                   self._repair)  # fmt: skip
        return identity | grown

    def lacks(self, key: Key) -> bool:
        """Whether a row is still to be made: there is none, or it failed."""
        row = self.rows.get(key)
        return row is None or self.failed(row)

    def add(self, row: Row) -> None:
        """Append a row. Raises DiskError."""
        append_line(self.path, _encode(row))
        if self._sync:
            flush(self.path)
        self.rows[self.key(row)] = row

    def close(self) -> None:
        """Release the lock."""
        self._stream.close()


def rows_of(
    lines: list[bytes], kind: type[Row], path: Path, key: Callable[[Row], Key],
    failed: Callable[[Row], bool] = lambda _: False, skip: int = 0,
) -> dict[Key, Row]:  # fmt: skip
    """Return key -> the row that counts. skip: lines at the beginning that are no rows. Raises DataError."""
    rows: dict[Key, Row] = {}
    for number, line in enumerate(lines[skip:], skip + 1):
        try:
            row = msgspec.convert(parse_json(line), kind)
        except (ValueError, msgspec.ValidationError) as error:
            raise DataError(f"{path}:{number} is no {kind.__name__} ({error}): delete that line") from error
        if not failed(row) or key(row) not in rows:
            rows[key(row)] = row
    return rows


def read_journal(
    path: Path, kind: type[Row], key: Callable[[Row], Key], failed: Callable[[Row], bool] = lambda _: False
) -> dict[Key, Row]:
    """Read a journal that has a header, also while a process writes it. Raises DataError, OSError."""
    content = path.read_bytes()
    return rows_of(content[: content.rfind(b"\n") + 1].splitlines(), kind, path, key, failed)


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], where: str, repair: str) -> None:
    """Raise ConfigError, which names the settings and the repair, if two identities differ."""
    if changed := differences(before, now):
        raise ConfigError(f"{where} was made with other settings ({'; '.join(changed)}): {repair}")


def differences(before: Mapping[str, Any], now: Mapping[str, Any], table: str = "") -> list[str]:
    """Describe every difference of two identities, e.g. ["seed = 1, now 2", "other inputs"]."""
    changed: list[str] = []
    for name in sorted(before.keys() | now.keys()):
        full = f"{table}.{name}" if table not in ("", "settings") else name
        earlier, value = before.get(name), now.get(name)
        if isinstance(earlier, dict) and isinstance(value, dict):
            changed += differences(earlier, value, full)
        elif _plain(earlier) != _plain(value):
            shown = [json.dumps(each, ensure_ascii=False) for each in (_plain(earlier), _plain(value))]
            changed.append(f"{full} = {shown[0]}, now {shown[1]}" if max(map(len, shown)) <= SHOWN else f"other {full}")
    return changed


def _plain(value: Any) -> Any:
    """Return a value as JSON gives it back."""
    return json.loads(json.dumps(msgspec.to_builtins(value)))


def _encode(value: Any) -> bytes:
    """Encode a line; characters are escaped only where there are lone surrogates, which UTF-8 cannot hold."""
    plain = msgspec.to_builtins(value)
    try:
        return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(plain, separators=(",", ":")).encode()
