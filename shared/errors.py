"""Every error that Maestrale raises on purpose, and what the process does with it.

    MaestraleError
    ├── InputError            the user can repair it: one clear line, exit code 2
    │   ├── ConfigError       a setting is unknown, out of range, or contradicts another
    │   ├── DataError         a data file or line cannot be used
    │   └── ModelError        a model folder is missing, damaged, or of a kind we refuse to load
    └── RunError              the run cannot go on: report, exit code 1, resumable from the last checkpoint
        ├── DeadlineExceeded  a named wait took longer than its deadline
        ├── SyncMismatch      an engine does not hold the weights that the trainers sent
        ├── NonFinite         a loss, gradient, log-prob or reward is not a finite number
        ├── EngineLost        a rollout engine could not start, or died more often than it may
        ├── RankLost          the process of a rank has ended
        ├── NoProgress        nothing left can produce a trainable group
        ├── TrainingDied      the weights are ruined: further steps would learn nothing
        ├── CheckpointError   a checkpoint could not be written or read
        └── DiskError         a file could not be written: disk full, read-only, not allowed

Messages say what happened, the value, and the setting to change.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import select
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from shared.clean_text import clean, clean_logs

MORE_FILES = (
    "raise the limit of open files before the start (`ulimit -n 65536`, /etc/security/limits.conf, or of a container "
    "--ulimit nofile=65536)"
)


class MaestraleError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 1


class InputError(MaestraleError):
    """Something the user gave cannot be used; the message names the repair."""

    exit_code = 2


class ConfigError(InputError):
    """A setting is unknown, out of range, or contradicts another one."""


class NotInstalled(ConfigError):
    """A package is missing; `command` installs it for this interpreter, in a checkout or beside a wheel."""

    def __init__(self, package: str, about: str = ""):
        """package: the name of its extra. about: what stands before the message."""
        self.command = install_command(package)
        super().__init__(f"{about}the package {package} is not installed: {self.command}")


class DataError(InputError):
    """A data file or one of its lines cannot be used."""


class ModelError(InputError):
    """A model folder is missing, incomplete, damaged, or in a format that is refused."""


class RunError(MaestraleError):
    """The run cannot go on."""


class DeadlineExceeded(RunError):
    """A named wait took longer than its deadline."""

    def __init__(
        self, role: str, phase: str, peer: str, deadline_s: float, setting_s: float | None = None,
        setting: str = "the matching [deadlines] setting",
    ):  # fmt: skip
        """setting_s: seconds of the setting, if the deadline was derived from what such waits took. setting: its name;
        "" for a deadline that no setting changes."""
        self.role, self.phase, self.peer, self.deadline_s = role, phase, peer, deadline_s
        why = f"raise {setting} if this is expected to take longer" if setting else "no setting changes this deadline"
        if setting_s is not None and deadline_s < setting_s:
            why = f"far longer than it ever took, and more than a tenth of the setting, {setting_s:.0f} s; {why}"
        super().__init__(f"{role} waited more than {deadline_s:.0f} s for {peer} in phase '{phase}' ({why})")


class SyncMismatch(RunError):
    """An engine does not hold the weights that the trainers sent."""


class NonFinite(RunError):
    """A loss, gradient, log-prob or reward is NaN or infinite."""


class EngineLost(RunError):
    """A rollout engine could not start, or died more often than it may."""


class RankLost(RunError):
    """The process of a rank has ended though the launch goes on."""


class NoProgress(RunError):
    """Nothing left can produce a trainable group."""


class TrainingDied(RunError):
    """The weights are ruined: further steps would learn nothing."""


class CheckpointError(RunError):
    """A checkpoint could not be written or read."""


class DiskError(RunError, OSError):
    """A file could not be written; the message names it, the free space and the repair."""


STARTED = "MAESTRALE_STARTED"
"""variable: what `maestrale` sets where it started this process or one above it, {module: its command} as JSON"""


def python() -> Path:
    """Path of this interpreter, relative to the current folder if it is inside."""
    path, here = Path(sys.executable), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def command_of(module: str) -> str:
    """How the user starts a module: "maestrale serve" where he began with `maestrale`, else "python -m serve"."""
    return json.loads(os.environ.get(STARTED, "{}")).get(module) or f"{python()} -m {module}"


def as_typed(text: str) -> str:
    """A text with each `python -m MODULE` as the user starts that module."""
    for module, typed in sorted(json.loads(os.environ.get(STARTED, "{}")).items(), reverse=True):  # longer ones first
        text = re.sub(rf"python -m {re.escape(module)}(?!\w|\.\w)", typed.replace("\\", r"\\"), text)
    return text


def install_command(extra: str) -> str:
    """The command that installs what an extra names for this interpreter, wherever the user is."""
    try:
        lines = [line.partition("; extra == ") for line in requires("maestrale") or []]
    except PackageNotFoundError:
        lines = []
    packages = [name for name, _, of in lines if of.strip("\"'").replace("-", "_") == extra] or [extra]
    pip = f"{python()} -m pip install" if importlib.util.find_spec("pip") else f"uv pip install --python {python()}"
    return " ".join([pip, *(f"'{name}'" for name in packages)])


def print_error(error: Exception) -> int:
    """Print an error, with "error: " before each of its lines; returns the exit code of the process."""
    sys.stderr.write("".join(f"error: {line}\n" for line in clean(str(error)).splitlines() or [type(error).__name__]))
    return error.exit_code if isinstance(error, MaestraleError) else 1


def run_command(command: Callable[[], int], stopped: str = "stopped") -> int:
    """Run a command; returns the exit code of the process. An error that was raised on purpose, or by the system, is
    printed, not that the reader of a pipe has gone. stopped: what is printed after Ctrl-C."""
    clean_logs()
    try:
        code = command()
    except SystemExit:  # of --help
        if _flush():
            return 1
        raise
    except KeyboardInterrupt:
        sys.stderr.write(f"{stopped}\n")
        code = 130
    except (MaestraleError, OSError) as error:
        code = 1 if isinstance(error, BrokenPipeError) and _reader_is_gone() else print_error(error)
    failed = _flush()
    return code or failed


def _reader_is_gone() -> bool:
    """Whether stdout is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))


def _flush() -> int:
    """Write what stdout holds; 1 where that fails, without a word where a pipe's reader has gone (`... | head`)."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes it once more at its end
        return 1 if isinstance(error, BrokenPipeError) else print_error(error)
    return 0


def first_cause(error: BaseException) -> BaseException:
    """The first error inside (nested) groups that is not a cancellation."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
