"""Checkpoints of a run: each is written under another name, manifest last, then renamed: the latest is always complete.

checkpoints/step_20/   trainer-*.safetensors (shards of weights and moments), ledger.json (groups, partial
                       completions, data cursor), origin.json (settings, data and model that it comes from),
                       manifest.json (size and sha256 of every file, and of itself; written last);
                       value_head.safetensors with dro, reference/ if it moves (a Hugging Face folder, float32)
"""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
from collections.abc import Awaitable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollout.client import EngineClient
from shared.atomic_write import flush
from shared.config import Config
from shared.errors import CheckpointError, RunError
from shared.progress import Progress
from trainer.client import TrainerClient
from trainer.evaluation import evaluation_due, wanted_versions
from trainer.ledger import Ledger, LedgerState
from trainer.origin import Origin
from trainer.safetensors_file import Written
from trainer.timing import PhaseTimer

FORMAT = 3
MANIFEST, LEDGER, ORIGIN = "manifest.json", "ledger.json", "origin.json"
FOLDER = re.compile(r"step_(\d+)")


class Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """The file manifest.json: version, training time, and size and hash of every file of a complete checkpoint."""

    format: int
    version: int
    """policy version = batches trained (sft: steps)"""
    seconds: float
    """training time so far"""
    files: dict[str, Written]
    """by name in the folder: everything but the manifest itself"""
    sha256: str = ""
    """of this manifest with "" in this field"""

    def content(self) -> bytes:
        """Set `sha256` and return the bytes of the file."""
        sealed = msgspec.structs.replace(self, sha256="")
        self.sha256 = hashlib.sha256(msgspec.json.encode(sealed)).hexdigest()
        return msgspec.json.format(msgspec.json.encode(self))


def folder_of(run_dir: Path, version: int) -> Path:
    """The folder of a version's checkpoint."""
    return run_dir / "checkpoints" / f"step_{version}"


def folders(run_dir: Path) -> dict[int, Path]:
    """Version -> folder of every checkpoint that was finished, oldest first; whether it is whole is not checked."""
    found = {path: FOLDER.fullmatch(path.name) for path in (run_dir / "checkpoints").glob("step_*") if path.is_dir()}
    return dict(sorted((int(match[1]), path) for path, match in found.items() if match))


def begin(run_dir: Path, version: int) -> Path:
    """Make the empty folder that a checkpoint is written into; remove what an interrupted attempt left."""
    partial = folder_of(run_dir, version).with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def finish(
    partial: Path,
    state: LedgerState,
    files: Mapping[str, Written],
    origin: Origin,
    seconds: float,
    keep: int,
    wanted: Collection[int] = (),
) -> Path:
    """Add ledger, origin and manifest, flush and rename; then remove all checkpoints but the newest `keep` and the
    versions `wanted`. Returns the folder. Raises CheckpointError for a file that has another size than was written."""
    for name, written in files.items():
        if (found := (partial / name).stat().st_size) != written.bytes:
            raise CheckpointError(f"{partial / name} has {found} bytes, {written.bytes} were written")
    own = {LEDGER: msgspec.json.encode(state), ORIGIN: msgspec.json.format(msgspec.json.encode(origin))}
    for name, content in own.items():
        _write(partial / name, content)
    sealed = {name: Written(len(content), hashlib.sha256(content).hexdigest()) for name, content in own.items()}
    manifest = Manifest(FORMAT, state.version, seconds, {**files, **sealed})
    _write(partial / MANIFEST, manifest.content())
    flush(partial)
    run_dir = partial.parent.parent
    final = folder_of(run_dir, state.version)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    flush(final.parent)
    there = folders(run_dir)
    for version in list(there)[:-keep]:
        if version not in wanted:
            shutil.rmtree(there[version], ignore_errors=True)
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


def link(run_dir: Path, name: str, target: Path) -> None:
    """Point run_dir/name ("latest", "best") at an exported model folder."""
    partial = run_dir / f"{name}.partial"
    partial.unlink(missing_ok=True)
    partial.symlink_to(target.relative_to(run_dir))
    partial.replace(run_dir / name)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    flush(path)


@dataclass
class Checkpointer:
    """Saves a run between an optimiser step and its weight update, when no rank changes anything."""

    config: Config
    ledger: Ledger
    engines: EngineClient
    trainers: TrainerClient
    clock: PhaseTimer
    progress: Progress
    origin: Origin
    saved: int = -1
    """newest version on disk"""
    failures: int = 0

    async def save_if_due(self, after: Awaitable[None] | None = None) -> None:
        """Save every `checkpoint.every` versions, the last one, and each that is to be evaluated (it may be best)."""
        every, version = self.config.checkpoint.every, self.ledger.version
        due = bool(every) and version % every == 0 or evaluation_due(self.config, version)
        if version == self.config.last_version or due:
            await self.save(after)

    async def save(self, after: Awaitable[None] | None = None) -> None:
        """Save now. A failure stops the run or is only reported, as checkpoint.on_error says.

        after: the writing of the rollouts up to here, awaited first, since a resume does not train them again.
        """
        version = self.ledger.version
        if version == self.saved:
            return
        if after is not None:
            await self.clock("rollouts to disk", after, self.config.deadlines.step_s)
        partial = begin(self.config.run_dir, version)
        try:
            partial_completions = await self.engines.snapshot()
            files = await self.trainers.save(partial, version)
            state = self.ledger.state(partial_completions)
            wanted = wanted_versions(self.config)
            finish(partial, state, files, self.origin, self.clock.total_s, self.config.checkpoint.keep, wanted)
            self.saved = version
        except (OSError, RunError) as error:
            report = abandon(partial, error)
            if self.config.checkpoint.on_error == "stop":
                raise report from error
            self.failures += 1
            self.progress.warning(str(report))
