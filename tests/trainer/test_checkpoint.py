"""Checkpoints: a half-written one is never taken, old ones go, a full disk leaves the earlier ones alone.

Damaged ones: test_damage.py.
"""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path

import pytest
import torch

from shared.errors import CheckpointError
from shared.messages import Written
from tests.trainer.test_shards import trained
from trainer import checkpoint, verified
from trainer.ledger import LedgerState
from trainer.origin import Origin
from trainer.shards import save_shard

ORIGIN = Origin({"seed": 0}, {"data.train": {"content": "1 lines"}})


def state(version: int) -> LedgerState:
    return LedgerState(version, version * 4, version * 4, 0, 0, [], [])


def save(run_dir: Path, version: int, keep: int = 9) -> Path:
    """A checkpoint with a shard of a small model, and two files that another objective has."""
    partial = checkpoint.begin(run_dir, version)
    model, optimiser = trained()
    with torch.no_grad():
        next(model.parameters()).fill_(version)
    files = save_shard(partial, model, optimiser, 0, 1, version)
    for name in ("value_head.safetensors", "reference/config.json"):
        (partial / name).parent.mkdir(exist_ok=True)
        (partial / name).write_text(f"{name} of version {version}")
        files[name] = Written((partial / name).stat().st_size, digest(partial / name))
    return checkpoint.finish(partial, state(version), files, ORIGIN, 1.5, keep)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_newest_complete_one_is_found_and_old_ones_are_removed(tmp_path: Path):
    for version in (2, 4, 10):
        save(tmp_path, version, keep=2)
    (tmp_path / "checkpoints" / "step_4.mine").mkdir()
    save(tmp_path, 11, keep=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_10", "step_11", "step_4.mine"]
    search = verified.newest(tmp_path)
    assert search.newest is not None and search.newest.folder.name == "step_11" and not search.skipped
    manifest = search.newest.manifest
    assert manifest.version == search.newest.state.version == 11 and manifest.seconds == 1.5
    assert search.newest.origin == ORIGIN


def test_an_interrupted_writer_leaves_nothing_that_counts(tmp_path: Path):
    save(tmp_path, 1)
    partial = checkpoint.begin(tmp_path, 2)
    (partial / "trainer-0.safetensors").write_bytes(b"x")
    search = verified.newest(tmp_path)
    assert search.newest is not None and search.newest.folder.name == "step_1" and not search.skipped
    again = checkpoint.begin(tmp_path, 2)
    assert list(again.iterdir()) == []


def test_a_full_disk_is_told_with_the_repair_and_cleaned_up(tmp_path: Path):
    save(tmp_path, 1)
    partial = checkpoint.begin(tmp_path, 2)
    error = checkpoint.abandon(partial, OSError(errno.ENOSPC, "No space left on device"))
    assert isinstance(error, CheckpointError)
    assert "disk is full" in str(error) and "checkpoint.keep" in str(error)
    assert not partial.exists() and verified.newest(tmp_path).newest is not None


def test_a_shard_of_another_size_than_told_is_refused(tmp_path: Path):
    partial = checkpoint.begin(tmp_path, 1)
    (partial / "trainer-0.safetensors").write_bytes(b"x" * 99)
    with pytest.raises(CheckpointError, match="99 bytes, 100 were written"):
        checkpoint.finish(partial, state(1), {"trainer-0.safetensors": Written(100, "")}, ORIGIN, 0.0, 2)


def test_latest_points_at_the_export(tmp_path: Path):
    for version in (1, 2):
        export = tmp_path / "hf" / f"step_{version}"
        export.mkdir(parents=True)
        checkpoint.link(tmp_path, "latest", export)
    assert (tmp_path / "latest").resolve() == tmp_path / "hf" / "step_2"
