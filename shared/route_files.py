"""Files of the routes of a mixture's completions, in `routes/` of the run's folder, which all nodes share.

    engine rank  --writes-->  routes/7/4.0.0  --reads-->  trainer rank     (group 7, completion 4, from its first token)

Through the controller only `RouteFile` travels. A file never changes: tokens that follow get another one. So a
checkpoint holds hard links, which a resume links back. A group's folder goes once the group is trained or dropped.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from shared.atomic_write import flush, write_whole, writing
from shared.errors import CheckpointError, RunError
from shared.record_file import Written
from shared.types import MicroBatch, RouteFile

FOLDER = "routes"


def write(run_dir: Path, name: str, rows: bytes, tokens: int) -> RouteFile:
    """Write the routes of `tokens` tokens, end to end. Raises DiskError."""
    path = run_dir / FOLDER / name
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, rows)
    return RouteFile(name, tokens, len(rows), hashlib.sha256(rows).hexdigest())


def read(run_dir: Path, file: RouteFile) -> list[bytes]:
    """[tokens] the routes in a file. Raises RunError where it is missing, or is not what was written."""
    path, why = run_dir / FOLDER / file.name, ""
    try:
        rows = path.read_bytes()
    except OSError as error:
        rows, why = b"", f" ({error.strerror})"
    if len(rows) != file.bytes or hashlib.sha256(rows).hexdigest() != file.sha256:
        raise RunError(
            f"the routes of group {path.parent.name}, completion {path.name.partition('.')[0]}: {path} has "
            f"{len(rows):,} bytes, not the {file.bytes:,} that were written{why}: the same command goes on from the "
            "newest checkpoint, which has its own (model.router_replay = false trains without)"
        )
    width = len(rows) // file.tokens
    return [rows[start : start + width] for start in range(0, len(rows), width)]


def read_all(run_dir: Path, micro_batches: Iterable[MicroBatch]) -> None:
    """Give the sequences the routes that their files hold. Raises as `read`."""
    for sequence in (each for batch in micro_batches for each in batch.sequences if each.route_files):
        sequence.routes = [row for file in sequence.route_files for row in read(run_dir, file)]


def save(run_dir: Path, files: Iterable[RouteFile], checkpoint: Path) -> dict[str, Written]:
    """Link the files into a checkpoint and flush them; returns what is there, by name. Raises CheckpointError."""
    saved = {f"{FOLDER}/{file.name}": Written(file.bytes, file.sha256) for file in files}
    try:
        for name in saved:
            _link(run_dir / name, checkpoint / name)
        for path in {part for name in saved for part in (checkpoint / name, (checkpoint / name).parent)}:
            flush(path)
    except OSError as error:
        raise CheckpointError(f"routes could not be linked into {checkpoint.name}: {error}") from error
    return saved


def restore(run_dir: Path, checkpoint: Path | None) -> None:
    """Make `routes/` what it was at a checkpoint; None: empty, for a run that begins. Raises DiskError."""
    with writing(run_dir / FOLDER):
        shutil.rmtree(run_dir / FOLDER, ignore_errors=True)
        for path in checkpoint.glob(f"{FOLDER}/*/*") if checkpoint else ():
            _link(path, run_dir / FOLDER / path.parent.name / path.name)


def _link(source: Path, target: Path) -> None:
    """Give a file another name, or copy it where its disk has no hard links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except FileExistsError:  # ledger and engine both name it
        return
    except OSError:
        shutil.copyfile(source, target)


def remove(run_dir: Path, groups: Iterable[int]) -> None:
    """Remove the files of groups that need them no more."""
    for group in groups:
        shutil.rmtree(run_dir / FOLDER / str(group), ignore_errors=True)
