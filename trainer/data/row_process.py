"""Rows of a data file that a process of its own makes, with a large library or from afar."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from shared.atomic_write import beside
from shared.errors import ConfigError, DataError
from shared.row_files import plain
from shared.supervisor import supervised


class NoRowCame(DataError):
    """The process took too long for a row."""


def write_rows(path: Path, lines: Iterator[bytes]) -> None:
    """Write lines to a partial file next to `path` that is then renamed. Raises DataError when the disk fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside(path) as partial, partial.open("wb") as stream:
            stream.writelines(lines)
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error}): free disk space, or set another runs_dir") from error


def send_rows(rows: Iterable[dict[str, Any]]) -> None:
    """In the process: write each row as it comes, one JSON object a line. What libraries print goes to stderr."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for row in rows:
        stream.write(json.dumps(row, ensure_ascii=False, default=plain) + "\n")
        stream.flush()


def rows_of_process(module: str, argument: str, setting: str, deadline_s: float) -> Iterator[bytes]:
    """Yield the lines that a module run with this argument writes; it is killed where one takes longer than
    `deadline_s`. Raises ConfigError and DataError with the last line that it said, by its exit code."""
    command = supervised([sys.executable, "-m", module, argument])
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
    late = threading.Event()

    def end() -> None:
        late.set()
        child.kill()

    assert child.stdout is not None
    try:
        while True:
            watch = threading.Timer(deadline_s, end)
            watch.start()
            line = child.stdout.readline()
            watch.cancel()
            if not line:
                break
            yield line
        child.wait()
        errors.seek(0)
        reason = errors.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
        if late.is_set():
            raise NoRowCame(
                f"{setting}: no row came for {deadline_s:g} s: choose easier options, or raise deadlines.start_s"
            )
        if child.returncode:
            raise (ConfigError if child.returncode == ConfigError.exit_code else DataError)(f"{setting}: {reason}")
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        errors.close()
