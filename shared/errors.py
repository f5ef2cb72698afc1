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
        ├── EngineLost        a rollout engine died more often than it may
        ├── NoProgress        nothing left can produce a trainable group
        ├── CheckpointError   a checkpoint could not be written or read
        └── DiskError         a file could not be written: disk full, read-only, not allowed

Messages say what happened, the value, and the setting to change. Who calls this: everybody.
"""

from __future__ import annotations


class MaestraleError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 1


class InputError(MaestraleError):
    """Something the user gave cannot be used; the message names the repair."""

    exit_code = 2


class ConfigError(InputError):
    """A setting is unknown, out of range, or contradicts another one."""


class DataError(InputError):
    """A data file or one of its lines cannot be used."""


class ModelError(InputError):
    """A model folder is missing, incomplete, damaged, or in a format that is refused."""


class RunError(MaestraleError):
    """The run cannot go on."""


class DeadlineExceeded(RunError):
    """A named wait took longer than its deadline."""

    def __init__(self, role: str, phase: str, peer: str, deadline_s: float):
        self.role, self.phase, self.peer, self.deadline_s = role, phase, peer, deadline_s
        super().__init__(
            f"{role} waited more than {deadline_s:.0f} s for {peer} in phase '{phase}' "
            f"(raise the matching [deadlines] setting if this is expected to take longer)"
        )


class SyncMismatch(RunError):
    """An engine does not hold the weights that the trainers sent."""


class NonFinite(RunError):
    """A loss, gradient, log-prob or reward is NaN or infinite."""


class EngineLost(RunError):
    """A rollout engine died more often than it may."""


class NoProgress(RunError):
    """Nothing left can produce a trainable group."""


class CheckpointError(RunError):
    """A checkpoint could not be written or read."""


class DiskError(RunError, OSError):
    """A file could not be written; the message names it, the free space and the repair."""
