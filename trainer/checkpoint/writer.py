"""Checkpoints of a run: each is written under another name, manifest last, then renamed: the latest is always complete.

checkpoints/step_20/   trainer-*.safetensors (shards of weights and moments), ledger.msgpack (groups, data cursor),
                       engine-*.msgpack (partial completions), checksums.msgpack (of the weights of each shard, as they
                       were in memory), origin.json (settings, data and model that it comes from), manifest.json (size
                       and sha256 of every file, and of itself; written last);
                       routes/ (hard links, with router replay: those that ledger and engines name);
                       value_head.safetensors with dro, reference/ if it moves (a Hugging Face folder, float32)

A checkpoint is the state of one moment, between an optimiser step and its weight update, but is written while the run
goes on: the ledger by a thread, partial completions by the engines' ranks, shards by the trainers' (shards.py).
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import re
import shutil
import time
from collections.abc import Awaitable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rollout.client import EngineClient
from shared import route_files
from shared.atomic_write import cannot_write, flush
from shared.config import Config
from shared.errors import CheckpointError, DeadlineExceeded, DiskError, RunError
from shared.progress import Progress
from shared.record_file import Written
from shared.types import Group
from trainer.checkpoint import ledger_file
from trainer.checkpoint.origin import Origin
from trainer.client import TrainerClient
from trainer.evaluation import evaluation_due, wanted_versions
from trainer.ledger import Ledger, LedgerState
from trainer.timing import PhaseTimer

FORMAT = 4
MANIFEST, CHECKSUMS, ORIGIN = "manifest.json", "checksums.msgpack", "origin.json"
LOOK_S = 0.25
"""seconds between two questions to the trainers whether their files are written"""
FOLDER = re.compile(r"step_(\d+)")


class Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """The file manifest.json: version, training time, and size and hash of every file of a complete checkpoint."""

    format: int
    version: int
    """policy version = batches trained (sft: steps)"""
    seconds: float
    """training time so far"""
    files: dict[str, Written]
    """name in the folder -> size and checksum, for everything but the manifest itself"""
    sha256: str = ""
    """SHA-256 of this manifest with "" in this field"""

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
    matches = {path: FOLDER.fullmatch(path.name) for path in (run_dir / "checkpoints").glob("step_*") if path.is_dir()}
    return dict(sorted((int(match[1]), path) for path, match in matches.items() if match))


def begin(run_dir: Path, version: int) -> Path:
    """Make the empty folder that a checkpoint is written into; remove what an interrupted attempt left."""
    partial = folder_of(run_dir, version).with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def finish(
    partial: Path, version: int, files: Mapping[str, Written], checksums: Mapping[str, Mapping[str, int]],
    origin: Origin, seconds: float, keep: int, protected: Collection[int] = (),
) -> Path:  # fmt: skip
    """Add checksums, origin and manifest, flush and rename; then remove all checkpoints but the newest `keep` and the
    versions `protected`. Returns the folder. Raises CheckpointError for a file that has another size than was written.

    checksums: shard -> parameter -> checksum of the rank's rows in memory.
    """
    for name, written in files.items():
        if (size := (partial / name).stat().st_size) != written.bytes:
            raise CheckpointError(f"{partial / name} has {size} bytes, {written.bytes} were written")
    own = {CHECKSUMS: msgspec.msgpack.encode(checksums), ORIGIN: msgspec.json.format(msgspec.json.encode(origin))}
    for name, content in own.items():
        _write(partial / name, content)
    sealed = {name: Written(len(content), hashlib.sha256(content).hexdigest()) for name, content in own.items()}
    manifest = Manifest(FORMAT, version, seconds, {**files, **sealed})
    _write(partial / MANIFEST, manifest.content())
    flush(partial)
    run_dir = partial.parent.parent
    final = folder_of(run_dir, version)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    flush(final.parent)
    there = folders(run_dir)
    for old in list(there)[:-keep]:
        if old not in protected:
            shutil.rmtree(there[old], ignore_errors=True)
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
    why = str(error)
    if isinstance(error, OSError) and not isinstance(error, DiskError) and error.errno:
        why = cannot_write(partial, error)
    return CheckpointError(f"the checkpoint {partial.stem} could not be written: {why}")


def link(run_dir: Path, name: str, target: Path) -> None:
    """Point run_dir/name ("latest", "best") at an exported model folder."""
    partial = run_dir / f"{name}.partial"
    partial.unlink(missing_ok=True)
    partial.symlink_to(target.relative_to(run_dir))
    partial.replace(run_dir / name)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    flush(path)


def bytes_in(folder: Path) -> int:
    """Bytes of all files in a folder so far."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@dataclass
class Checkpointer:
    """Saves a run: takes its state between an optimiser step and its weight update, when no rank changes anything, and
    writes it while the run goes on. One is written at a time."""

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
    unneeded: set[int] = field(default_factory=set)
    """groups whose routes can be removed once no checkpoint is being written"""
    writing: asyncio.Task[None] | None = None
    shards: asyncio.Future[dict[str, Written]] = field(init=False)
    """files that the trainers have written for the checkpoint under way"""

    async def forget_routes(self, groups: Iterable[Group] = ()) -> None:
        """Remove the routes of groups that were trained or dropped, once no checkpoint that may name them is being
        written."""
        self.unneeded |= {group.prompt.index for group in groups if any(one.routes for one in group.completions)}
        if self.unneeded and self.writing is None:
            unneeded, self.unneeded = self.unneeded, set()
            await asyncio.to_thread(route_files.remove, self.config.run_dir, unneeded)

    async def save_if_due(self, after: Awaitable[None] | None = None) -> None:
        """Save every `checkpoint.every` versions, the last one, and each that is to be evaluated (it may be best)."""
        if self.writing is not None:
            await self._look()  # the trainers have just made a step, and answer at once
            if self.writing.done():
                await self.finish()
        every, version = self.config.checkpoint.every, self.ledger.version
        due = bool(every) and version % every == 0 or evaluation_due(self.config, version)
        if version == self.config.last_version or due:
            await self.save(after)

    async def save(self, after: Awaitable[None] | None = None) -> None:
        """Save now; returns when the state is taken, and `finish` when it is on the disk. A failure stops the run or is
        only reported, as checkpoint.on_error says.

        after: the writing of the rollouts up to here, awaited first, since a resume does not train them again.
        """
        version = self.ledger.version
        await self.finish()
        await self.forget_routes()
        if version == self.saved:
            return
        if after is not None:
            await self.clock("rollouts to disk", after, self.config.deadlines.step_s)
        partial = await asyncio.to_thread(begin, self.config.run_dir, version)
        unfinished = asyncio.ensure_future(self.engines.snapshot(partial))  # before they are sent other weights
        try:
            sums = await self.trainers.save(partial, version)
        except BaseException as error:
            unfinished.cancel()
            if not isinstance(error, OSError | RunError):
                raise
            await self._give_up(partial, error)
            return
        self.shards = asyncio.get_running_loop().create_future()
        written = self._write(partial, self.ledger.state(), unfinished, sums, self.clock.total_s)
        self.writing = asyncio.create_task(written, name="checkpoint")

    async def finish(self) -> None:
        """Wait until the checkpoint that is being written is on the disk. Raises as `save`."""
        if (writing := self.writing) is None:
            return
        try:
            await self.clock("writing of the checkpoint", asyncio.shield(writing))
        finally:
            if writing.done():
                self.writing = None

    async def rescue(self, background: Iterable[asyncio.Future[None]]) -> None:
        """After an error: let a checkpoint under way become whole, unless the background ends too (a rank has died)."""
        if self.writing is not None and not self.writing.done():
            self.progress.note("the run ends with an error: the checkpoint under way is written first")
            await asyncio.wait([self.writing, *background], return_when=asyncio.FIRST_COMPLETED)

    async def _write(
        self, partial: Path, state: LedgerState, unfinished: asyncio.Future[dict[str, Written]],
        sums: list[dict[str, int]], seconds: float,
    ) -> None:  # fmt: skip
        config, world = self.config, len(sums)
        checksums = {f"trainer-{rank}-of-{world}.safetensors": found for rank, found in enumerate(sums)}
        ledger_work = asyncio.ensure_future(asyncio.to_thread(ledger_file.write, partial, state))
        shard_work = asyncio.ensure_future(self._written(partial, state.version))
        named = [file for group in state.groups for one in group.completions for file in one.routes]
        route_work = asyncio.ensure_future(asyncio.to_thread(route_files.save, config.run_dir, named, partial))
        try:
            ledger, engines, shards, routes = await asyncio.gather(ledger_work, unfinished, shard_work, route_work)
            files, protected = {ledger_file.LEDGER: ledger, **engines, **shards, **routes}, wanted_versions(config)
            rest = self.origin, seconds, config.checkpoint.keep, protected
            await asyncio.to_thread(finish, partial, state.version, files, checksums, *rest)
            self.saved = state.version
        except (OSError, RunError) as error:
            await self._give_up(partial, error)
        finally:
            for work in (ledger_work, unfinished, shard_work, route_work):
                work.cancel()

    async def _look(self) -> None:
        """Ask the trainers whether their files are written, unless they have reported it."""
        if self.shards.done():
            return
        try:
            if (written := await self.trainers.saved()) is not None and not self.shards.done():
                self.shards.set_result(written)
        except (OSError, RunError) as error:
            if not self.shards.done():
                self.shards.set_exception(error)

    async def _written(self, partial: Path, version: int) -> dict[str, Written]:
        """Wait for the trainers' files. Raises DeadlineExceeded once the folder has not grown for deadlines.step_s
        though no trainer works on anything else: however large a checkpoint is, a disk that takes it is waited for."""
        size, since, limit_s = -1, time.monotonic(), self.config.deadlines.step_s
        while True:
            await self._look()
            await asyncio.wait([self.shards], timeout=LOOK_S)
            if self.shards.done():
                return self.shards.result()
            busy = self.trainers.under_way > 0
            now_bytes = size if busy else await asyncio.to_thread(bytes_in, partial)
            if busy or now_bytes != size:
                size, since = now_bytes, time.monotonic()
            elif time.monotonic() - since > limit_s:
                what = f"the trainers' files, of which nothing came after the first {size:,} bytes,"
                phase = f"writing of the checkpoint of version {version}"
                raise DeadlineExceeded("controller", phase, what, limit_s, setting="deadlines.step_s")

    async def _give_up(self, partial: Path, error: Exception) -> None:
        report = await asyncio.to_thread(abandon, partial, error)
        if self.config.checkpoint.on_error == "stop":
            raise report from error
        self.failures += 1
        self.progress.warning(str(report))
