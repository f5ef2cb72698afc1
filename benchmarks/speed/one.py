"""One benchmark in a process of its own: fresh memory, its own order of imports, and a crash ends nothing else.

    python -m benchmarks.speed.one MODULE PIPE PARENT quick|full

The child writes lines of JSON to a pipe: `Told` how far it is, at last `Found` or `Absent`. What it prints goes to a
log, whose end is shown when it fails.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.speed.rows import NotMeasured, Row, Task
from shared.errors import RunError
from verify.code.sandbox.syscalls import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
END_S = 60.0
"""a child that told its result has so long to end"""
LOG_CHARACTERS = 2000


class Told(msgspec.Struct, tag=True):
    """So many parts are done."""

    done: int
    total: int


class Found(msgspec.Struct, tag=True):
    """The figures."""

    rows: list[Row]


class Absent(msgspec.Struct, tag=True):
    """Nothing can be measured here."""

    reason: str


def measure(module: str, quick: bool, tell: Callable[[int, int], None]) -> list[Row]:
    """The rows of one benchmark. Raises NotMeasured, or RunError with the end of its log when it fails."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.speed.one", module, str(writing), str(os.getpid()),
             "quick" if quick else "full"],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, pass_fds=[writing],
        )  # fmt: skip
        os.close(writing)
        try:
            last = _follow(reading, tell)
            process.wait(END_S if last else None)
        except BaseException:
            process.kill()
            process.wait()
            raise
        if isinstance(last, Found):
            return last.rows
        if isinstance(last, Absent):
            raise NotMeasured(last.reason)
        log.seek(0)
        raise RunError(f"{module} ended with code {process.returncode}:\n{log.read()[-LOG_CHARACTERS:].strip()}")


def _follow(reading: int, tell: Callable[[int, int], None]) -> Found | Absent | None:
    """Pass on what the child tells until its result; None if it ends without."""
    decoder: msgspec.json.Decoder[Told | Found | Absent] = msgspec.json.Decoder(Told | Found | Absent)
    with os.fdopen(reading, "rb") as stream:
        for line in stream:
            message = decoder.decode(line)
            if not isinstance(message, Told):
                return message
            tell(message.done, message.total)
    return None


def main(module: str, pipe: int, quick: bool) -> None:
    """Measure in this process and tell the pipe."""
    os.set_inheritable(pipe, False)
    with os.fdopen(pipe, "wb", buffering=0) as stream:

        def say(message: msgspec.Struct) -> None:
            stream.write(msgspec.json.encode(message) + b"\n")

        try:
            rows = importlib.import_module(module).rows(Task(quick, lambda done, total: say(Told(done, total))))
        except NotMeasured as absent:
            say(Absent(str(absent)))
        except ModuleNotFoundError as missing:
            if (missing.name or "").split(".")[0] in {path.name for path in ROOT.iterdir()}:
                raise  # our own
            say(Absent(f"the package {missing.name} is not installed"))
        else:
            say(Found(rows))


if __name__ == "__main__":
    die_with_parent(int(sys.argv[3]))
    main(sys.argv[1], int(sys.argv[2]), quick=sys.argv[4] == "quick")
