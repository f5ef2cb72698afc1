"""Checkpoints: a half-written or damaged one is never taken, a full disk leaves the earlier ones alone."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from shared.errors import CheckpointError
from trainer import checkpoint
from trainer.ledger import LedgerState


def state(version: int) -> LedgerState:
    return LedgerState(version, version * 4, version * 4, 0, 0, [], [])


def save(run_dir: Path, version: int, keep: int = 5) -> Path:
    partial = checkpoint.begin(run_dir, version)
    (partial / "trainer-0.safetensors").write_bytes(b"x" * 100)
    return checkpoint.finish(partial, state(version), {"trainer-0.safetensors": 100}, 1.5, keep)


def test_the_newest_complete_one_is_found_and_old_ones_are_removed(tmp_path: Path):
    for version in (2, 4, 10):
        save(tmp_path, version, keep=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_10", "step_4"]
    newest, skipped = checkpoint.newest(tmp_path)
    assert newest is not None and newest.name == "step_10" and not skipped
    manifest, ledger = checkpoint.read(newest)
    assert manifest.version == ledger.version == 10 and manifest.seconds == 1.5


@pytest.mark.parametrize("damage", ["truncate shard", "remove manifest", "change ledger", "half manifest", "no shard"])
def test_a_damaged_one_is_skipped_with_the_reason(tmp_path: Path, damage: str):
    save(tmp_path, 1)
    last = save(tmp_path, 2)
    if damage == "truncate shard":
        (last / "trainer-0.safetensors").write_bytes(b"x" * 50)
    elif damage == "remove manifest":
        (last / "manifest.json").unlink()
    elif damage == "half manifest":
        (last / "manifest.json").write_bytes((last / "manifest.json").read_bytes()[:30])
    elif damage == "change ledger":
        content = (last / "ledger.json").read_bytes()
        (last / "ledger.json").write_bytes(content.replace(b'"next_index":8', b'"next_index":9'))
    else:
        (last / "trainer-0.safetensors").unlink()
    newest, skipped = checkpoint.newest(tmp_path)
    assert newest is not None and newest.name == "step_1"
    assert len(skipped) == 1 and "step_2 is skipped" in skipped[0]


def test_an_interrupted_writer_leaves_nothing_that_counts(tmp_path: Path):
    save(tmp_path, 1)
    partial = checkpoint.begin(tmp_path, 2)
    (partial / "trainer-0.safetensors").write_bytes(b"x")
    newest, skipped = checkpoint.newest(tmp_path)
    assert newest is not None and newest.name == "step_1" and skipped == []
    again = checkpoint.begin(tmp_path, 2)
    assert list(again.iterdir()) == []


def test_a_full_disk_is_told_with_the_repair_and_cleaned_up(tmp_path: Path):
    save(tmp_path, 1)
    partial = checkpoint.begin(tmp_path, 2)
    error = checkpoint.abandon(partial, OSError(errno.ENOSPC, "No space left on device"))
    assert isinstance(error, CheckpointError)
    assert "disk is full" in str(error) and "checkpoint.keep" in str(error)
    assert not partial.exists() and checkpoint.newest(tmp_path)[0] is not None


def test_a_shard_of_another_size_than_told_is_refused(tmp_path: Path):
    partial = checkpoint.begin(tmp_path, 1)
    (partial / "trainer-0.safetensors").write_bytes(b"x" * 99)
    with pytest.raises(CheckpointError, match="99 bytes, 100 were written"):
        checkpoint.finish(partial, state(1), {"trainer-0.safetensors": 100}, 0.0, 2)


def test_latest_points_at_the_export(tmp_path: Path):
    for version in (1, 2):
        export = tmp_path / "hf" / f"step_{version}"
        export.mkdir(parents=True)
        checkpoint.link(tmp_path, "latest", export)
    assert (tmp_path / "latest").resolve() == tmp_path / "hf" / "step_2"
