"""Damages of a checkpoint, each planted into real shards: every one is noticed, and the checkpoint before it is taken."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.trainer.test_checkpoint import state
from tests.trainer.test_shards import trained
from trainer import checkpoint
from trainer.shards import save_shard

SHARD = "trainer-0-of-1.safetensors"


def save(run_dir: Path, version: int) -> Path:
    """A checkpoint with a shard of a small model."""
    partial = checkpoint.begin(run_dir, version)
    model, optimiser = trained()
    with torch.no_grad():
        next(model.parameters()).fill_(version)
    return checkpoint.finish(partial, state(version), save_shard(partial, model, optimiser, 0, 1), 1.0, 9)


def flip(path: Path, place: int, bit: int = 6) -> None:
    """Turn one bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def flip_exponent(last: Path) -> None:
    flip(last / SHARD, -1)


def flip_header(last: Path) -> None:
    flip(last / SHARD, 30, 0)


def swap(last: Path) -> None:
    shutil.copyfile(last.with_name("step_1") / SHARD, last / SHARD)


def other_version(last: Path) -> None:
    path = last / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"version": 2', b'"version": 7'))


def other_format(last: Path) -> None:
    path = last / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"format": 1', b'"format": 9').replace(b'"format": 2', b'"format": 9'))


@pytest.mark.parametrize("damage", [flip_exponent, flip_header, swap, other_version, other_format])
def test_every_damage_is_noticed_and_the_checkpoint_before_is_taken(tmp_path: Path, damage: Callable[[Path], None]):
    save(tmp_path, 1)
    damage(save(tmp_path, 2))
    newest, skipped = checkpoint.newest(tmp_path)
    assert newest is not None and newest.name == "step_1"
    assert len(skipped) == 1 and "step_2 is skipped" in skipped[0] and "\n" not in skipped[0]
