"""Reads checkpoints: nothing is loaded before every byte of it is verified to be what was written.

The controller reads the whole checkpoint once, several files at a time, while the other ranks still import: of a large
one each byte is read twice in all (here and by the rank that loads it), whatever the number of ranks and nodes.
Manifest, folder name, ledger and shards must have the same version and format, and no file may be missing or too many.
Once the trainers have loaded their rows, these are compared with the weights that were live then (`compare_weights`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from rollout.weights.checksum import add_parts
from shared.errors import CheckpointError
from shared.json_reader import decode_json
from shared.record_file import Written, sha256_of
from trainer.checkpoint import ledger_file
from trainer.checkpoint.origin import Origin
from trainer.checkpoint.shard_files import FILE_NAME, described, read_index, read_shards
from trainer.checkpoint.writer import CHECKSUMS, FORMAT, MANIFEST, ORIGIN, Manifest, folder_of, folders
from trainer.ledger import LedgerState

Kind = TypeVar("Kind")
THREADS = 8
"""files that are read at a time"""


class OlderFormat(CheckpointError):
    """The checkpoint was written by an older version of Maestrale."""


class _Head(msgspec.Struct):
    format: int = 1


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint that is whole: every file was verified."""

    folder: Path
    manifest: Manifest
    state: LedgerState
    origin: Origin
    checksums: dict[str, dict[str, int]]
    """shard -> parameter -> checksum of the rows that its rank had in memory when it was written"""


@dataclass
class Search:
    """The result of looking for the newest whole checkpoint in a run folder."""

    newest: VerifiedCheckpoint | None = None
    """the newest that is whole"""
    skipped: dict[Path, str] = field(default_factory=dict)
    """folder of every newer one -> what is wrong with it"""
    older: str = ""
    """error message of the newest of them that has an older format; "" if none has"""


def newest(run_dir: Path) -> Search:
    """The newest checkpoint that is whole, and why newer ones are not."""
    search = Search()
    for folder in reversed(folders(run_dir).values()):
        try:
            search.newest = read(folder)
            break
        except CheckpointError as error:
            search.skipped[folder] = str(error)
            if isinstance(error, OlderFormat) and not search.older:
                search.older = str(error)
    return search


def read(folder: Path) -> VerifiedCheckpoint:
    """Read a checkpoint and verify every file. Raises CheckpointError saying what is wrong with it, in one line."""
    try:
        manifest = read_manifest(folder)
        check_names(folder, manifest.files)
        check_contents(folder, manifest.files)
        state = read_ledger(folder)
        origin = decode(folder / ORIGIN, Origin)
        checksums = decode(folder / CHECKSUMS, dict[str, dict[str, int]])
        shards = read_shards(folder)
    except OSError as error:
        raise CheckpointError(f"{folder.name}: {error}") from error
    versions = {ledger_file.LEDGER: state.version} | {shard.path.name: shard.version for shard in shards}
    for name, version in versions.items():
        if version != manifest.version:
            raise CheckpointError(f"{folder.name}: {name} is of version {version}, the manifest of {manifest.version}")
    return VerifiedCheckpoint(folder, manifest, state, origin, checksums)


def decode(path: Path, kind: type[Kind]) -> Kind:
    """What a JSON or msgpack file of a checkpoint holds. Raises CheckpointError, and OSError."""
    try:
        if path.suffix == ".msgpack":
            return msgspec.msgpack.decode(path.read_bytes(), type=kind)
        return decode_json(path.read_bytes(), kind)
    except ValueError as error:  # not of this form, not of this kind, or not UTF-8
        raise CheckpointError(f"{path.parent.name}: {path.name} is damaged ({error})") from error


def read_ledger(folder: Path) -> LedgerState:
    """The ledger, with what the engines had of unfinished completions. Raises CheckpointError, and OSError."""
    try:
        return ledger_file.read(folder)
    except ValueError as error:
        raise CheckpointError(
            f"{folder.name}: {ledger_file.LEDGER} or an engine's file is damaged ({error})"
        ) from error


def compare_weights(checkpoint: VerifiedCheckpoint, loaded: Sequence[dict[str, dict[str, int]]]) -> None:
    """Raise CheckpointError if the weights that the trainers have loaded are not those that were live when the
    checkpoint was taken, naming the shards and parameters: a shard may be whole and yet of another step or rank.

    loaded: of each rank, file -> parameter -> checksum of what it took from there (`load_shards`).
    """
    wrong = []
    for name in sorted(checkpoint.checksums.keys() | {name for part in loaded for name in part}):
        sums, live = add_parts(part.get(name, {}) for part in loaded), checkpoint.checksums.get(name, {})
        if parameters := [each for each in sorted(live.keys() | sums.keys()) if live.get(each) != sums.get(each)]:
            wrong.append(f"{name} ({parameters[0]}" + (f" and {more} more)" if (more := len(parameters) - 1) else ")"))
    if wrong:
        raise CheckpointError(
            f"{checkpoint.folder.name} does not hold the weights that were live at step {checkpoint.manifest.version}: "
            f"{', '.join(wrong)}. Every byte is as it was written, so these are of another step or rank: move "
            f"{checkpoint.folder} away to go on from the checkpoint before, or start another run (--name=...)"
        )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, unchanged since it was written. Raises CheckpointError, and OSError."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder.name}: {MANIFEST} is missing, so it was not finished or is not whole")
    form = decode(path, _Head).format
    if form < FORMAT:
        raise OlderFormat(
            f"{folder.name} was written by an older version of Maestrale (format {form}, this one reads {FORMAT})"
        )
    if form > FORMAT:
        raise CheckpointError(f"{folder.name}: {MANIFEST} has format {form}, this version of Maestrale reads {FORMAT}")
    manifest = decode(path, Manifest)
    if msgspec.structs.replace(manifest).content() != path.read_bytes():
        raise CheckpointError(f"{folder.name}: {MANIFEST} was changed after it was written")
    if folder_of(folder.parent.parent, manifest.version).name != folder.name:
        raise CheckpointError(f"{folder.name}: it is the checkpoint of version {manifest.version}, under another name")
    return manifest


def check_names(folder: Path, files: Mapping[str, Written]) -> None:
    """Raise CheckpointError for a file that is missing, was not written with the others, or has another size."""
    there = {str(path.relative_to(folder)): path for path in folder.rglob("*") if not path.is_dir()}
    for name in sorted(files.keys() - there.keys()):
        raise CheckpointError(f"{folder.name}: {name} is missing")
    for name in sorted(there.keys() - files.keys() - {MANIFEST}):
        raise CheckpointError(f"{folder.name}: {name} was not written with it (remove that file to use it)")
    for name, written in files.items():
        if (size := there[name].stat().st_size) != written.bytes:
            raise CheckpointError(f"{folder.name}: {name} has {size} bytes instead of {written.bytes}")


def check_contents(folder: Path, files: Mapping[str, Written]) -> None:
    """Read every file; raise CheckpointError for the first that is not what was written."""
    with ThreadPoolExecutor(THREADS) as readers:
        for name, digest in zip(files, readers.map(sha256_of, map(folder.joinpath, files)), strict=True):
            if digest != files[name].sha256:
                raise CheckpointError(f"{folder.name}: {name} was changed after it was written{_other(folder / name)}")


def _other(path: Path) -> str:
    """Text that says whose shard is in the place of another, as far as its header can be read."""
    if not FILE_NAME.fullmatch(path.name):
        return ""
    try:
        return f" (it holds {described(read_index(path))})"
    except CheckpointError:
        return " (its header is damaged)"
