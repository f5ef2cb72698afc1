import hashlib
import json
import os
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from shared.errors import CheckpointError
from shared.model import lora
from shared.record_file import Written
from shared.sections import Optimiser
from trainer.checkpoint import shards
from trainer.checkpoint.shards import ShardWriter, checksums, load_shards
from trainer.step.optimiser import make_optimiser, step_count, update
from trainer.step.reference import KeptAdapters


def train(model: nn.Module, optimiser: torch.optim.AdamW) -> None:
    model(torch.ones(1, 3)).sum().backward()
    update(model, optimiser, 1e-2)


def trained(rows: int = 5, adapters: bool = False) -> tuple[nn.Module, torch.optim.AdamW]:
    """A small model after one step."""
    torch.manual_seed(rows)
    model = nn.Sequential(nn.Linear(3, rows), nn.Linear(rows, 2))
    if adapters:
        lora.attach(model, 2, 4.0)
        for name, parameter in model.named_parameters():
            nn.init.normal_(parameter) if "lora" in name else None
    optimiser = make_optimiser(model, Optimiser())
    train(model, optimiser)
    return model, optimiser


def save_shard(
    folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer, rank: int, world: int, version: int = 0
) -> dict[str, Written]:
    """Write a rank's rows, and wait for them."""
    return ShardWriter(folder, model, optimiser, rank, world, version).files()


def test_a_shard_tells_its_rows_in_its_header(tmp_path):
    model, optimiser = trained()
    files = save_shard(tmp_path, model, optimiser, 0, 1, version=7)
    path = tmp_path / "trainer-0-of-1.safetensors"
    content = path.read_bytes()
    assert files == {path.name: Written(len(content), hashlib.sha256(content).hexdigest())}
    with safe_open(path, framework="pt") as file:
        index = json.loads(file.metadata()["index"])
        assert set(file.keys()) >= {"weight/0.weight", "exp_avg/0.weight", "exp_avg_sq/1.bias"}
    assert index["step"] == 1 and index["version"] == 7 and index["rows"]["0.weight"] == [0, [5, 3]]


def test_loading_restores_weights_moments_and_step(tmp_path):
    model, optimiser = trained()
    save_shard(tmp_path, model, optimiser, 0, 1)
    other, restored = trained()
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    restored.state.clear()
    assert load_shards(tmp_path, other, restored)[0] == 1 == step_count(restored)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        first, second = optimiser.state[mine], restored.state[theirs]
        assert torch.equal(mine, theirs) and all(torch.equal(first[name], second[name]) for name in shards.MOMENTS)


@given(st.tuples(*[st.integers(0, 12)] * 8))
def test_a_rank_takes_of_a_file_the_rows_and_columns_that_both_have(bounds):
    (row, end), (column, last), (first, stop), (left, right) = (sorted(bounds[n : n + 2]) for n in range(0, 8, 2))
    whole, mine = torch.arange(144.0).reshape(12, 12), torch.full((stop - first, right - left), -1.0)
    stored = mock.MagicMock()
    stored.get_slice.return_value.get_shape.return_value = [end - row, last - column]
    stored.get_slice.return_value.__getitem__.side_effect = whole[row:end, column:last].__getitem__
    rows, columns = shards.copy_overlap(stored, "x", (row, column), (first, left), {"weight": mine})
    assert set(rows) == set(range(row, end)) & set(range(first, stop))
    assert set(columns) == set(range(column, last)) & set(range(left, right))
    for here, values in enumerate(mine, first):
        for there, value in enumerate(values, left):
            assert value == (whole[here, there] if here in rows and there in columns else -1.0)


def test_damaged_foreign_or_absent_checkpoints_are_named(tmp_path):
    model, optimiser = trained()
    with pytest.raises(CheckpointError, match="runs_dir"):
        save_shard(tmp_path / "absent", model, optimiser, 0, 1)
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        load_shards(tmp_path, model, optimiser)
    save_shard(tmp_path, model, optimiser, 0, 1)
    with pytest.raises(CheckpointError, match=r"0.weight has shape \(5, 3\), the model's is \(6, 3\).*model.path"):
        load_shards(tmp_path, *trained(6))
    path = tmp_path / "trainer-0-of-1.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"trainer-0-of-1.safetensors is damaged"):
        load_shards(tmp_path, model, optimiser)


class SlowDisk:
    """Takes so many tensors of a shard, begins one more, and goes on when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at_once: int):
        self.left, self.told, self.waits = at_once, threading.Event(), threading.Event()
        take = ShardWriter._take

        def slow(writer: ShardWriter, name: str) -> Tensor:
            tensor = take(writer, name)
            if self.left == 0:
                self.waits.set()
                assert self.told.wait(600)
            self.left = max(self.left - 1, 0)
            return tensor

        monkeypatch.setattr(ShardWriter, "_take", slow)


@pytest.mark.parametrize("at_once", [0, 1, 5, 10])
def test_what_is_written_beside_training_is_bit_for_bit_the_state_of_its_step(tmp_path, monkeypatch, at_once):
    for name in ("before", "beside", "spoiled"):
        (tmp_path / name).mkdir()
    model, optimiser = trained()
    at_the_step = save_shard(tmp_path / "before", model, optimiser, 0, 1, 7)
    sums, disk = checksums(model), SlowDisk(monkeypatch, at_once)
    writer = ShardWriter(tmp_path / "beside", model, optimiser, 0, 1, 7)
    assert disk.waits.wait(600) and not writer.outcome.done()
    writer.settle()
    train(model, optimiser)
    writer.settle()
    train(model, optimiser)
    disk.told.set()
    assert writer.files() == at_the_step, "the very same bytes"
    assert load_shards(tmp_path / "beside", *trained())[1] == {"trainer-0-of-1.safetensors": sums}
    before = save_shard(tmp_path / "before", model, optimiser, 0, 1, 7)
    disk.left, disk.told = at_once, threading.Event()
    spoiled = ShardWriter(tmp_path / "spoiled", model, optimiser, 0, 1, 7)
    train(model, optimiser)  # without a word to the writer: this test would notice
    disk.told.set()
    assert spoiled.files() != before


def test_where_memory_is_short_training_waits_for_the_disk(tmp_path, monkeypatch):
    assert 0 < shards.free_bytes() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setattr(shards, "free_bytes", lambda: 0)
    model, optimiser = trained()
    expected, disk = save_shard(tmp_path, model, optimiser, 0, 1), SlowDisk(monkeypatch, 3)
    writer = ShardWriter(tmp_path, model, optimiser, 0, 1)
    training = threading.Thread(target=lambda: (writer.settle(), train(model, optimiser)))
    training.start()
    training.join(0.3)
    assert training.is_alive() and not writer.settled
    disk.told.set()
    training.join(600)
    assert writer.files() == expected and step_count(optimiser) == 2


@pytest.mark.parametrize("settles", [True, False])
def test_a_checkpoint_of_adapters_holds_the_policy_while_the_reference_is_in_force(tmp_path, monkeypatch, settles):
    """The adapters of the reference take the policy's place while it scores, and a slow disk may read then. Without
    `settle` the file would hold the reference: that is seen."""
    model, optimiser = trained(adapters=True)
    disk = SlowDisk(monkeypatch, 0)
    reference = KeptAdapters(model, lambda: writer.settle() if settles else None)
    for kept in reference.kept.values():
        kept.add_(1.0)
    expected = {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}
    writer = ShardWriter(tmp_path, model, optimiser, 0, 1)
    with reference.in_force():
        disk.told.set()
        writer.join()
    [file] = writer.files()
    stored = load_file(tmp_path / file)
    assert len(expected) == 4
    for name, each in expected.items():
        assert torch.equal(each, dict(model.named_parameters())[name])
        assert torch.equal(stored[f"weight/{name}"], each if settles else each + 1.0)
