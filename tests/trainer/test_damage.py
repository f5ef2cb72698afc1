"""Damages planted into checkpoints of real shards: every one is noticed, and the checkpoint before it is taken.

Through real resumes: tests/system/test_checkpoint_damage.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import CheckpointError
from tests.trainer.damages import CHANGED, DAMAGES, Damage, flip, swap_ranks, zero
from tests.trainer.test_checkpoint import ORIGIN, save, state
from tests.trainer.test_shards import trained
from trainer import checkpoint, checkpoint_reader
from trainer.shards import save_shard

BESIDE = {
    "bit in the value head": Damage(flip("value_head.safetensors", 0.5, 0), CHANGED),
    "zeroed file of the reference": Damage(zero("reference/config.json"), CHANGED),
}


@pytest.mark.parametrize("name", [*DAMAGES, *BESIDE])
def test_every_damage_is_noticed_and_the_checkpoint_before_is_taken(tmp_path: Path, name: str):
    save(tmp_path, 1)
    last = save(tmp_path, 2)
    damage = {**DAMAGES, **BESIDE}[name]
    damage.spoil(last)
    search = checkpoint_reader.newest(tmp_path)
    assert search.newest is not None and search.newest.folder.name == "step_1"
    (line,) = search.skipped.values()
    assert line.startswith("step_2") and damage.told in line and "\n" not in line, line
    with pytest.raises(CheckpointError):
        checkpoint_reader.read(last)


def two_ranks(run_dir: Path) -> Path:
    """A checkpoint that two trainers wrote."""
    partial = checkpoint.begin(run_dir, 2)
    model, optimiser = trained()
    files = save_shard(partial, model, optimiser, 0, 2, 2) | save_shard(partial, model, optimiser, 1, 2, 2)
    return checkpoint.finish(partial, state(2), files, ORIGIN, 1.5, 9)


def test_shards_of_two_ranks_in_each_others_place_are_told_apart(tmp_path: Path):
    last = two_ranks(tmp_path)
    checkpoint_reader.read(last)
    swap_ranks(last)
    with pytest.raises(CheckpointError, match=r"trainer-0-of-2.*it holds what rank 1 of 2 wrote at version 2"):
        checkpoint_reader.read(last)


def test_a_checkpoint_that_fits_together_but_is_of_another_version_is_refused(tmp_path: Path):
    """Every hash is right: only the shard's own header tells."""
    partial = checkpoint.begin(tmp_path, 3)
    files = save_shard(partial, *trained(), 0, 1, version=2)
    last = checkpoint.finish(partial, state(3), files, ORIGIN, 1.5, 9)
    with pytest.raises(CheckpointError, match=r"trainer-0-of-1.safetensors is of version 2, the manifest of 3"):
        checkpoint_reader.read(last)


@pytest.mark.parametrize("bit", range(8))
def test_no_bit_of_a_manifest_may_be_another(tmp_path: Path, bit: int):
    """Blanks and line ends too: what is there is compared with what would be written."""
    path = save(tmp_path, 1) / "manifest.json"
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        spoiled = bytearray(content)
        spoiled[place] ^= 1 << bit
        path.write_bytes(spoiled)
        search = checkpoint_reader.newest(tmp_path)
        assert search.newest is None, (place, content[place : place + 1], spoiled[place])
        assert "manifest.json" in search.skipped[path.parent] or "older version" in search.skipped[path.parent]
    path.write_bytes(content)
    assert checkpoint_reader.newest(tmp_path).newest is not None
