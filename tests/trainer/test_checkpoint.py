"""Checkpoints: a half-written or damaged one is never taken, old ones go, a full disk leaves the earlier ones alone.

Damages through real resumes: tests/system/test_checkpoint_damage.py.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollout.weights.checksum import checksum_rows
from shared import settings_file
from shared.config import Config
from shared.errors import CheckpointError
from shared.record_file import Written
from tests.trainer.damages import CHANGED, DAMAGES, Damage, flip, swap_ranks, zero
from tests.trainer.test_shards import save_shard, train, trained
from trainer.checkpoint import ledger_file, reader, safetensors_file, writer
from trainer.checkpoint.ledger_file import LEDGER
from trainer.checkpoint.origin import Origin
from trainer.checkpoint.shards import load_shards, named_state
from trainer.export import export_checkpoint, main
from trainer.ledger import LedgerState
from trainer.run_log import forget_after

ORIGIN = Origin({"seed": 0}, {"data.train": {"content": "1 lines"}})
BESIDE = {
    "bit in the value head": Damage(flip("value_head.safetensors", 0.5, 0), CHANGED),
    "zeroed file of the reference": Damage(zero("reference/config.json"), CHANGED),
}
ROWS = {"0.weight": 3, "0.bias": 3, "1.weight": 1, "1.bias": 1}
"""of each of two ranks"""
Tensors = dict[str, Tensor]


def state(version: int) -> LedgerState:
    return LedgerState(version, version * 4, version * 4, 0, 0, [], [])


def save(run_dir: Path, version: int, keep: int = 9, weight: float | None = None) -> Path:
    """A checkpoint with a shard of a small model, and two files that another objective has."""
    partial = writer.begin(run_dir, version)
    model, optimiser = trained()
    with torch.no_grad():
        next(model.parameters()).fill_(version if weight is None else weight)
    files = save_shard(partial, model, optimiser, 0, 1, version)
    for name in ("value_head.safetensors", "reference/config.json"):
        (partial / name).parent.mkdir(exist_ok=True)
        (partial / name).write_text(f"{name} of version {version}")
        files[name] = written(partial / name)
    return finish(partial, version, files, keep)


def finish(partial: Path, version: int, files: dict[str, Written], keep: int = 9) -> Path:
    """The rest of a checkpoint."""
    files[LEDGER] = ledger_file.write(partial, state(version))
    return writer.finish(partial, version, files, {}, ORIGIN, 1.5, keep)


def written(path: Path) -> Written:
    return Written(path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())


def test_the_newest_complete_one_is_found_and_old_ones_are_removed(tmp_path):
    for version in (2, 4, 10):
        save(tmp_path, version, keep=2)
    (tmp_path / "checkpoints" / "step_4.mine").mkdir()
    save(tmp_path, 11, keep=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_10", "step_11", "step_4.mine"]
    search = reader.newest(tmp_path)
    assert search.newest is not None and search.newest.folder.name == "step_11" and not search.skipped
    manifest = search.newest.manifest
    assert manifest.version == search.newest.state.version == 11 and manifest.seconds == 1.5
    assert search.newest.origin == ORIGIN


def test_an_interrupted_writer_leaves_nothing_that_counts(tmp_path):
    save(tmp_path, 1)
    (writer.begin(tmp_path, 2) / "trainer-0.safetensors").write_bytes(b"x")
    search = reader.newest(tmp_path)
    assert search.newest is not None and search.newest.folder.name == "step_1" and not search.skipped
    assert list(writer.begin(tmp_path, 2).iterdir()) == []


def test_a_disk_that_takes_nothing_is_told_with_the_repair_and_cleaned_up(tmp_path):
    save(tmp_path, 1)
    for number, repair in (
        (errno.ENOSPC, "checkpoint.keep"), (errno.EIO, "repair the disk"), (errno.EROFS, "make it writable"),
        (errno.EMFILE, "ulimit"),
    ):  # fmt: skip
        partial = writer.begin(tmp_path, 2)
        error = writer.abandon(partial, OSError(number, os.strerror(number)))
        reason = "disk is full" if number == errno.ENOSPC else f"{partial} cannot be written ({os.strerror(number)}"
        assert isinstance(error, CheckpointError) and reason in str(error) and repair in str(error)
        assert not partial.exists() and reader.newest(tmp_path).newest is not None


def test_a_shard_of_another_size_than_told_is_refused(tmp_path):
    partial = writer.begin(tmp_path, 1)
    (partial / "trainer-0.safetensors").write_bytes(b"x" * 99)
    with pytest.raises(CheckpointError, match="99 bytes, 100 were written"):
        finish(partial, 1, {"trainer-0.safetensors": Written(100, "")})


def test_latest_points_at_the_export(tmp_path):
    for version in (1, 2):
        export = tmp_path / "hf" / f"step_{version}"
        export.mkdir(parents=True)
        writer.link(tmp_path, "latest", export)
    assert (tmp_path / "latest").resolve() == tmp_path / "hf" / "step_2"


def test_a_file_is_hashed_as_it_is_written_and_the_library_reads_it(tmp_path):
    tensors = {
        "wide": torch.arange(6).reshape(2, 3), "empty": torch.zeros(0, 4), "one": torch.tensor(2.5),
        "slice": torch.arange(12.0).reshape(3, 4)[:, 1:3],
    }  # fmt: skip
    path = tmp_path / "some.safetensors"
    assert safetensors_file.write(path, tensors, {"index": "é"}) == written(path) == safetensors_file.written(path)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"index": "é"} and set(file.keys()) == tensors.keys()
    assert all(torch.equal(read, tensors[name]) for name, read in load_file(path).items())
    with pytest.raises(KeyError):
        safetensors_file.write(path, {"half": torch.ones(2, dtype=torch.float16)})


@pytest.fixture
def config(tmp_path):
    """Of a run, with the folder of its model."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    save_file({}, model / "model.safetensors")
    (model / "tokenizer.json").write_text("{}")
    return Config.model_validate({"runs_dir": str(tmp_path), "model": {"path": str(model), "dtype": "float32"}})


def test_an_export_of_a_version_that_was_made_again_is_written_again(config):
    def exported() -> float:
        folder = export_checkpoint(config, Path(config.model.path), 2)
        return float(load_file(folder / "model.safetensors")["0.weight"][0, 0])

    folder = save(config.run_dir, 2)
    assert exported() == 2 == exported()
    shutil.rmtree(folder)
    assert exported() == 2, "the checkpoint is gone, the export is not"
    trained_again = save(config.run_dir, 2, weight=5)
    assert exported() == 5
    (trained_again / LEDGER).write_bytes(b"{}")
    (config.run_dir / "hf" / "step_2" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"step_2: ledger\.msgpack"):
        exported()


def test_the_command_exports_the_newest_that_is_whole(config, capsys):
    save(config.run_dir, 1)
    (save(config.run_dir, 2) / "manifest.json").unlink()
    settings_file.write(config, config.run_dir / "config.toml")
    assert main([str(config.run_dir)]) == 0
    assert "step_2: manifest.json is missing" in " ".join(capsys.readouterr().out.split())
    assert (config.run_dir / "hf" / "step_1").is_dir()


def test_what_came_after_a_checkpoint_is_forgotten_and_damaged_lines_with_it(tmp_path):
    (tmp_path / "rollouts").mkdir()
    for step in (1, 2, 3):
        (tmp_path / "rollouts" / f"step_{step}.jsonl").touch()
    lines = [b'{"stage": 0}\n', b'{"stage": 1}\n', b'{"stage": "\xff"}\n', b'{"other": 1}\n', b'{"stage": 0}']
    (tmp_path / "stages.jsonl").write_bytes(b"".join(lines))
    (tmp_path / "evaluations.jsonl").write_bytes(b'{"version": 1, "\xff\n')
    forget_after(tmp_path, 2, 0)
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["step_1.jsonl", "step_2.jsonl"]
    assert (tmp_path / "stages.jsonl").read_bytes() == lines[0]
    assert (tmp_path / "evaluations.jsonl").read_bytes() == b""


@pytest.mark.parametrize("damage", (DAMAGES | BESIDE).values(), ids=DAMAGES | BESIDE)
def test_every_damage_is_noticed_and_the_checkpoint_before_is_taken(tmp_path, damage):
    save(tmp_path, 1)
    last = save(tmp_path, 2)
    damage.spoil(last)
    search = reader.newest(tmp_path)
    assert search.newest is not None and search.newest.folder.name == "step_1"
    (line,) = search.skipped.values()
    assert line.startswith("step_2") and damage.told in line and "\n" not in line, line
    with pytest.raises(CheckpointError):
        reader.read(last)


def test_shards_of_two_ranks_in_each_others_place_are_told_apart(tmp_path):
    partial = writer.begin(tmp_path, 2)
    model, optimiser = trained()
    files = save_shard(partial, model, optimiser, 0, 2, 2) | save_shard(partial, model, optimiser, 1, 2, 2)
    last = finish(partial, 2, files)
    reader.read(last)
    swap_ranks(last)
    with pytest.raises(CheckpointError, match=r"trainer-0-of-2.*it holds what rank 1 of 2 wrote at version 2"):
        reader.read(last)


def test_a_checkpoint_that_fits_together_but_is_of_another_version_is_refused(tmp_path):
    """Every hash is right: only the shard's own header tells."""
    partial = writer.begin(tmp_path, 3)
    last = finish(partial, 3, save_shard(partial, *trained(), 0, 1, version=2))
    with pytest.raises(CheckpointError, match=r"trainer-0-of-1.safetensors is of version 2, the manifest of 3"):
        reader.read(last)


@pytest.mark.parametrize("bit", range(8))
def test_no_bit_of_a_manifest_may_be_another(tmp_path, bit):
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


def test_weights_that_were_not_live_are_refused_by_name_though_every_hash_is_right(tmp_path):
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
