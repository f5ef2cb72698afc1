"""Damages planted into checkpoints of real shards: every one is noticed, and the checkpoint before it is taken.

Through real resumes: tests/system/test_checkpoint_damage.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollout.weights.checksum import checksum_rows
from shared.errors import CheckpointError
from tests.trainer.damages import CHANGED, DAMAGES, Damage, flip, swap_ranks, zero
from tests.trainer.test_checkpoint import ORIGIN, finish, save, state
from tests.trainer.test_shards import save_shard, train, trained
from trainer.checkpoint import ledger_file, reader, safetensors_file, writer
from trainer.checkpoint.ledger_file import LEDGER
from trainer.checkpoint.shards import load_shards, named_state

BESIDE = {
    "bit in the value head": Damage(flip("value_head.safetensors", 0.5, 0), CHANGED),
    "zeroed file of the reference": Damage(zero("reference/config.json"), CHANGED),
}


@pytest.mark.parametrize("damage", (DAMAGES | BESIDE).values(), ids=DAMAGES | BESIDE)
def test_every_damage_is_noticed_and_the_checkpoint_before_is_taken(tmp_path: Path, damage: Damage):
    save(tmp_path, 1)
    last = save(tmp_path, 2)
    damage.spoil(last)
    search = reader.newest(tmp_path)
    assert search.newest is not None and search.newest.folder.name == "step_1"
    (line,) = search.skipped.values()
    assert line.startswith("step_2") and damage.told in line and "\n" not in line, line
    with pytest.raises(CheckpointError):
        reader.read(last)


def test_shards_of_two_ranks_in_each_others_place_are_told_apart(tmp_path: Path):
    partial = writer.begin(tmp_path, 2)
    model, optimiser = trained()
    files = save_shard(partial, model, optimiser, 0, 2, 2) | save_shard(partial, model, optimiser, 1, 2, 2)
    last = finish(partial, 2, files)
    reader.read(last)
    swap_ranks(last)
    with pytest.raises(CheckpointError, match=r"trainer-0-of-2.*it holds what rank 1 of 2 wrote at version 2"):
        reader.read(last)


def test_a_checkpoint_that_fits_together_but_is_of_another_version_is_refused(tmp_path: Path):
    """Every hash is right: only the shard's own header tells."""
    partial = writer.begin(tmp_path, 3)
    last = finish(partial, 3, save_shard(partial, *trained(), 0, 1, version=2))
    with pytest.raises(CheckpointError, match=r"trainer-0-of-1.safetensors is of version 2, the manifest of 3"):
        reader.read(last)


@pytest.mark.parametrize("bit", range(8))
def test_no_bit_of_a_manifest_may_be_another(tmp_path: Path, bit: int):
    """Blanks and line ends too: what is there is compared with what would be written."""
    path = save(tmp_path, 1) / "manifest.json"
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
        search = reader.newest(tmp_path)
        assert search.newest is None, (place, content[place : place + 1])
        assert "manifest.json" in search.skipped[path.parent] or "older version" in search.skipped[path.parent]
    path.write_bytes(content)
    assert reader.newest(tmp_path).newest is not None


ROWS = {"0.weight": 3, "0.bias": 3, "1.weight": 1, "1.bias": 1}
"""of each of two ranks"""
Tensors = dict[str, Tensor]


def shares(step: int) -> list[Tensors]:
    """What two ranks hold after so many steps: weights and moments of half the rows."""
    model, optimiser = trained(rows=6)
    for _ in range(step):
        train(model, optimiser)
    state = named_state(model, optimiser)
    return [
        {f"{part}/{name}": tensor[rank * ROWS[name] :][: ROWS[name]].clone()
         for name, parts in state.items() for part, tensor in parts.items()}
        for rank in (0, 1)
    ]  # fmt: skip


def resume(run_dir: Path, saved: list[Tensors], live: list[Tensors], rows: Sequence[int] = (0, 1)) -> None:
    """What a launch does, read, load, compare, with a checkpoint of step 2 in which every hash, header and version is
    right. rows: whose rows a header tells."""
    partial, files, sums = writer.begin(run_dir, 2), {}, {}
    for rank, tensors in enumerate(saved):
        shapes = {name: [2 * len(tensors[f"weight/{name}"]), *tensors[f"weight/{name}"].shape[1:]] for name in ROWS}
        index = {"format": 2, "version": 2, "rank": rank, "world": 2, "step": 1,
                 "rows": {name: [rows[rank] * ROWS[name], shapes[name]] for name in ROWS}}  # fmt: skip
        path = partial / f"trainer-{rank}-of-2.safetensors"
        files[path.name] = safetensors_file.write(path, tensors, {"index": json.dumps(index)})
        sums[path.name] = {
            name: checksum_rows(live[rank][f"weight/{name}"], rank * count, torch.float32)
            for name, count in ROWS.items()
        }
    files[LEDGER] = ledger_file.write(partial, state(2))
    folder = writer.finish(partial, 2, files, sums, ORIGIN, 1.5, 9)
    reader.compare_weights(reader.read(folder), [load_shards(folder, *trained(rows=6))[1]])


def test_weights_that_were_not_live_are_refused_by_name_though_every_hash_is_right(tmp_path: Path) -> None:
    earlier, live = shares(1), shares(2)
    resume(tmp_path, live, live)
    first, last = "trainer-0-of-2.safetensors (0.bias and 3 more)", "trainer-1-of-2.safetensors (0.bias and 3 more)"

    def refusal(saved: list[Tensors], rows: Sequence[int] = (0, 1)) -> str:
        with pytest.raises(CheckpointError) as refused:
            resume(tmp_path, saved, live, rows)
        assert "step_2 does not hold the weights that were live at step 2" in str(refused.value)
        return str(refused.value)

    stale = refusal([earlier[0], live[1]])
    assert first in stale and "trainer-1" not in stale
    swapped, renamed = refusal(live[::-1]), refusal(live[::-1], rows=(1, 0))
    assert all(name in text for name in (first, last) for text in (swapped, renamed))
    live[1]["weight/1.bias"].view(torch.int32)[0] ^= 1
    assert "trainer-1-of-2.safetensors (1.bias)." in refusal(shares(2))
