"""Finds the checkpoint that a launch goes on from: the newest that is whole, made from what this launch is given.

    no steps in the folder                  the run begins
    no step, nothing imitated, and what it was made from has changed    the run begins anew
    damaged checkpoints, a whole one before the reason of each is shown, they are set aside as step_N.damaged
    steps, but nothing that can be read     an error; nothing is touched
    settings, data or model differ          shown; refused where that changes what a step means, unless --accept-changes

Every launch leaves a line in launches.jsonl.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Sequence
from importlib.metadata import version as release
from pathlib import Path

import msgspec

from shared.atomic_write import append_line
from shared.config import Config
from shared.errors import ConfigError
from shared.metrics import read_rows
from shared.progress import Progress
from shared.settings_file import ACCEPT_CHANGES
from trainer.checkpoint import reader
from trainer.checkpoint.origin import Origin, RunChange, differences, imitated
from trainer.checkpoint.reader import VerifiedCheckpoint
from trainer.checkpoint.writer import folders
from trainer.evaluation import FILE as EVALUATIONS
from trainer.evaluation import forget_evaluations

LAUNCHES = "launches.jsonl"
DAMAGED = ".damaged"


class LaunchRecord(msgspec.Struct):
    """A line of launches.jsonl: one launch, and what it went on from."""

    time: float
    """Unix time"""
    outcome: str
    """"began", "resumed", "resumed with accepted changes", or "refused\""""
    version: int | None
    """policy version that it goes on from"""
    changed: list[str]
    """settings and contents that differ from those at that version"""
    skipped: list[str]
    """newer checkpoints that were not whole"""
    arguments: list[str]
    host: str
    pid: int
    maestrale: str
    """its release"""


def find(config: Config, now: Origin, arguments: Sequence[str], progress: Progress) -> VerifiedCheckpoint | None:
    """The checkpoint to go on from; None for a run that begins. Raises ConfigError for a run that cannot go on."""
    run_dir = config.run_dir
    if there := folders(run_dir):
        progress.phase(f"verifying the newest of {len(there)} checkpoints")
    search = reader.newest(run_dir)
    checkpoint, skipped = search.newest, list(search.skipped.values())
    if checkpoint is None:
        if left := steps_in(config):
            note(run_dir, arguments, "refused", None, [], skipped)
            raise ConfigError(unreadable(run_dir, left, search))
        note(run_dir, arguments, "began", None, [], [])
        return None
    for line in skipped:
        progress.warning(f"{line}: skipped, going on from {checkpoint.folder.name}")
    changed = differences(checkpoint.origin, now, checkpoint.manifest.version)
    texts, refused = [one.text for one in changed], [one.text for one in changed if one.counts]
    if refused and not skipped and holds_nothing(checkpoint, run_dir):
        note(run_dir, arguments, "began", None, texts, [])
        progress.note(f"{run_dir} begins anew: no step was taken, and {'; '.join(refused)}")
        shutil.rmtree(checkpoint.folder)
        forget_evaluations(run_dir, -1)
        return None
    accepted = bool(refused) and ACCEPT_CHANGES in arguments
    outcome = "resumed with accepted changes" if accepted else "refused" if refused else "resumed"
    note(run_dir, arguments, outcome, checkpoint.manifest.version, texts, skipped)
    report(changed, accepted, progress)
    if refused and not accepted:
        raise ConfigError(
            "\n".join(
                [f"{run_dir} cannot go on from {checkpoint.folder.name} like this: its steps would mean something else"]
                + [f"    {text}" for text in refused]
                + [f"set back what changed, or start another run (--name=...), or go on all the same: {ACCEPT_CHANGES}"]
            )
        )
    for folder in search.skipped:
        set_aside(folder, progress)
    return checkpoint


def holds_nothing(checkpoint: VerifiedCheckpoint, run_dir: Path) -> bool:
    """Whether a checkpoint holds no more than what its run began with: no step was taken, nothing was imitated."""
    steps = any(row["kind"] == "train" for row in read_rows(run_dir / "metrics.jsonl"))
    return checkpoint.manifest.version == 0 and not steps and not imitated(checkpoint.origin)


def report(changed: Sequence[RunChange], accepted: bool, progress: Progress) -> None:
    """Report the differences that do not stop the run."""
    for difference in changed:
        if not difference.counts:
            progress.note(f"changed: {difference.text}")
        elif accepted:
            progress.warning(f"changed, and accepted: {difference.text}")


def steps_in(config: Config) -> list[str]:
    """What a run folder holds of steps already made, as texts for people."""
    run_dir = config.run_dir
    kinds = {"train", "evaluation", *(["sft"] if config.mode == "sft" else [])}
    steps = [row["step"] for row in read_rows(run_dir / "metrics.jsonl") if row["kind"] in kinds]
    evaluated = (run_dir / EVALUATIONS).is_file() and (run_dir / EVALUATIONS).stat().st_size > 0
    counted = {
        "checkpoint": len(folders(run_dir)),
        "rollout file": len(list((run_dir / "rollouts").glob("step_*.jsonl"))),
        "export": len(list((run_dir / "hf").glob("step_*"))),
    }
    return [
        *([f"metrics up to step {max(steps)}"] if steps else []),
        *(["evaluations"] if evaluated else []),
        *(f"{count} {name}{'s' if count > 1 else ''}" for name, count in counted.items() if count),
    ]


def unreadable(run_dir: Path, left: Sequence[str], search: reader.Search) -> str:
    """The error message for a run folder whose steps cannot be resumed."""
    if search.older:
        return (
            f"{run_dir / 'checkpoints' / search.older}: go on with that version, or start another run with this one "
            "(--name=...)"
        )
    return "\n".join(
        [f"{run_dir} holds {', '.join(left)}, but no checkpoint that can be read; nothing was changed:"]
        + [f"    {line}" for line in search.skipped.values()]
        + [f"restore {run_dir / 'checkpoints'} from a copy, or start another run (--name=...), or delete {run_dir}"]
    )


def set_aside(folder: Path, progress: Progress) -> None:
    """Keep a damaged checkpoint under another name, under which it does not count; its version is made again."""
    aside = folder.with_name(folder.name + DAMAGED)
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    progress.note(f"{folder.name} is kept as {aside.name}")


def note(
    run_dir: Path, arguments: Sequence[str], outcome: str, version: int | None, changed: list[str], skipped: list[str]
) -> None:
    """Add a line to launches.jsonl. Raises RunError for a disk that does not take it."""
    where = socket.gethostname(), os.getpid(), release("maestrale")
    line = LaunchRecord(time.time(), outcome, version, changed, skipped, list(arguments), *where)
    append_line(run_dir / LAUNCHES, msgspec.json.encode(line))
