"""Checkpoints of a run: written beside, manifest last, renamed; so a half-written one is never taken for the latest.

    checkpoints/step_20/   trainer-*.safetensors (shards of weights and moments), ledger.json (groups, partial
                           completions, data cursor), manifest.json (file sizes, ledger hash; written last);
                           value_head.safetensors of dro, reference/ where that moves (a Hugging Face folder, float32)

What it does not: shard or reshard tensors (shards.py). Who calls this: controller, session.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Awaitable, Collection
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shared.config import Config
from shared.disk import flush
from shared.errors import CheckpointError, RunError
from shared.progress import Progress
from trainer.clock import Clock
from trainer.engines import Engines
from trainer.evaluations import evaluation_due, wanted_versions
from trainer.ledger import Ledger, LedgerState
from trainer.trainers import Trainers


class Manifest(msgspec.Struct):
    """What a complete checkpoint consists of."""

    version: int
    """policy version = batches trained (supervised: steps)"""
    files: dict[str, int]
    """name -> bytes, of everything but the manifest itself"""
    ledger_sha256: str
    seconds: float = 0.0
    """training time so far"""
    format: int = 1


def folder_of(run_dir: Path, version: int) -> Path:
    """Where the checkpoint of a version lies."""
    return run_dir / "checkpoints" / f"step_{version}"


def begin(run_dir: Path, version: int) -> Path:
    """An empty folder to write into; rests of an interrupted attempt are removed."""
    partial = folder_of(run_dir, version).with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def finish(
    partial: Path, state: LedgerState, files: dict[str, int], seconds: float, keep: int, wanted: Collection[int] = ()
) -> Path:
    """Add ledger and manifest, make it durable, rename it, remove all but the newest `keep` and the versions `wanted`.
    Returns the folder."""
    ledger = msgspec.json.encode(state)
    _write(partial / "ledger.json", ledger)
    for name, size in files.items():
        if (found := (partial / name).stat().st_size) != size:
            raise CheckpointError(f"{partial / name} has {found} bytes, {size} were written")
    manifest = Manifest(
        state.version, {**files, "ledger.json": len(ledger)}, hashlib.sha256(ledger).hexdigest(), seconds
    )
    _write(partial / "manifest.json", msgspec.json.format(msgspec.json.encode(manifest)))
    final = folder_of(partial.parent.parent, state.version)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    flush(final.parent)
    for old in sorted(final.parent.glob("step_*"), key=_version_of)[:-keep]:
        if old.is_dir() and old.suffix != ".partial" and _version_of(old) not in wanted:
            shutil.rmtree(old, ignore_errors=True)
    return final


def abandon(partial: Path, error: BaseException) -> CheckpointError:
    """Remove a checkpoint that could not be written; returns the error to raise or to report."""
    shutil.rmtree(partial, ignore_errors=True)
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
    if full:
        free = shutil.disk_usage(partial.parent).free
        return CheckpointError(
            f"the disk is full ({free / 1e9:.2f} GB free in {partial.parent}): free some space, lower checkpoint.keep, "
            'or set runs_dir to a larger disk; earlier checkpoints are intact (checkpoint.on_error = "continue" goes '
            "on without)"
        )
    return CheckpointError(f"the checkpoint {partial.stem} could not be written: {error}")


def newest(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint, and a line for every newer one that was skipped."""
    skipped: list[str] = []
    folders = sorted((run_dir / "checkpoints").glob("step_*"), key=_version_of, reverse=True)
    for folder in folders:
        if folder.suffix == ".partial":
            continue
        try:
            read(folder)
        except CheckpointError as error:
            skipped.append(str(error))
        else:
            return folder, skipped
    return None, skipped


def read(folder: Path) -> tuple[Manifest, LedgerState]:
    """Manifest and ledger of a complete checkpoint. Raises CheckpointError saying what is wrong with it."""
    try:
        manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)
        for name, size in manifest.files.items():
            if (found := (folder / name).stat().st_size) != size:
                raise CheckpointError(f"{folder.name} is skipped: {name} has {found} bytes instead of {size}")
        ledger = (folder / "ledger.json").read_bytes()
        if hashlib.sha256(ledger).hexdigest() != manifest.ledger_sha256:
            raise CheckpointError(f"{folder.name} is skipped: ledger.json was changed after it was written")
        return manifest, msgspec.json.decode(ledger, type=LedgerState)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{folder.name} is skipped: {error}") from error


def link(run_dir: Path, name: str, target: Path) -> None:
    """Point run_dir/name ("latest", "best") at an exported model folder."""
    partial = run_dir / f"{name}.partial"
    partial.unlink(missing_ok=True)
    partial.symlink_to(target.relative_to(run_dir))
    partial.replace(run_dir / name)


def _version_of(folder: Path) -> int:
    digits = folder.stem.removeprefix("step_")
    return int(digits) if digits.isdigit() else -1


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    flush(path)


@dataclass
class Checkpointer:
    """Saves a run between an optimiser step and its weight update, when no rank changes anything."""

    config: Config
    ledger: Ledger
    engines: Engines
    trainers: Trainers
    clock: Clock
    progress: Progress
    saved: int = -1
    """newest version on disk"""
    failures: int = 0

    async def save_if_due(self, after: Awaitable[None] | None = None) -> None:
        """Save every `checkpoint.every` versions, after the last one, and what is to be evaluated (it may be best)."""
        every, version = self.config.checkpoint.every, self.ledger.version
        due = bool(every) and version % every == 0 or evaluation_due(self.config, version)
        if version == self.config.last_version or due:
            await self.save(after)

    async def save(self, after: Awaitable[None] | None = None) -> None:
        """Save now. A failure stops the run or is only reported, as checkpoint.on_error says.

        after: the writing of the rollouts up to here, which is waited for: a resume does not train them again.
        """
        version = self.ledger.version
        if version == self.saved:
            return
        if after is not None:
            await self.clock("rollouts to disk", after, self.config.deadlines.step_s)
        partial = begin(self.config.run_dir, version)
        try:
            partial_completions = await self.engines.snapshot()
            files = await self.trainers.save(partial)
            state = self.ledger.state(partial_completions)
            wanted = wanted_versions(self.config)
            finish(partial, state, files, self.clock.total_s, self.config.checkpoint.keep, wanted)
            self.saved = version
        except (OSError, RunError) as error:
            report = abandon(partial, error)
            if self.config.checkpoint.on_error == "stop":
                raise report from error
            self.failures += 1
            self.progress.warning(str(report))
