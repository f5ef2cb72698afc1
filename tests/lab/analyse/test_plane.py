"""Hand-made checkpoints that lie in a known plane: it is found, in pieces, over shards, and points are put into it."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from lab.analyse import snapshots
from lab.analyse.plane import Plane, find_plane
from lab.analyse.snapshots import find_snapshots
from lab.analyse.surface import grid, put
from shared.errors import CheckpointError, ConfigError
from tests.lab.analyse.known_plane import (
    FIRST,
    SECOND,
    SHAPES,
    basis,
    flatten,
    unflatten,
    write_checkpoint,
    write_export,
)


@pytest.fixture
def run_dir(tmp_path):
    """Four snapshots of the known plane, steps 0, 5, 10, 20."""
    centre, first, second = basis()
    for step, x, y in zip((0, 5, 10, 20), FIRST, SECOND, strict=True):
        write_checkpoint(tmp_path, step, unflatten(centre + x * first + y * second))
    return tmp_path


def plane_of(run_dir: Path) -> Plane:
    return find_plane(find_snapshots(run_dir))


@pytest.mark.parametrize("numbers", [1, 40, 1 << 23])
def test_the_known_plane_is_found_whatever_the_size_of_the_pieces(run_dir, numbers, monkeypatch):
    monkeypatch.setattr(snapshots, "PIECE_NUMBERS", numbers)
    plane = plane_of(run_dir)
    _, first, second = basis()
    assert plane.steps == [0, 5, 10, 20]
    assert plane.explained == pytest.approx([0.8, 0.2, 0, 0], abs=1e-6)
    assert torch.allclose(flatten(plane.directions[0]), first, atol=1e-6)
    assert torch.allclose(flatten(plane.directions[1]), second, atol=1e-6)
    expected = np.array([FIRST, SECOND]).T - [FIRST[-1], SECOND[-1]]
    assert np.allclose(plane.path, expected, atol=1e-5)


def test_it_is_what_a_singular_value_decomposition_of_all_weights_gives(tmp_path):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(6, 27, generator=generator)
    for step, flat in enumerate(weights):
        write_checkpoint(tmp_path, step, unflatten(flat), world=3)
    plane = plane_of(tmp_path)
    centred = weights.double() - weights.double().mean(0)
    left, values, right = torch.linalg.svd(centred, full_matrices=False)
    assert plane.explained[:5] == pytest.approx((values**2 / (values**2).sum()).tolist()[:5])
    for number, direction in enumerate(map(flatten, plane.directions)):
        assert direction.norm().item() == pytest.approx(1, abs=1e-6)
        assert abs((direction @ right[number]).item()) == pytest.approx(1, abs=1e-6)
        assert np.allclose(plane.path[:, number], ((centred - centred[-1]) @ direction).numpy(), atol=1e-5)
        assert plane.path[-1, number] > plane.path[0, number]


def test_putting_a_point_leaves_the_snapshots_as_they_are(run_dir):
    found = find_snapshots(run_dir)
    plane = find_plane(found)
    centre, first, second = basis()
    weights = {name: torch.nn.Parameter(torch.empty(shape)) for name, shape in SHAPES.items()}
    for alpha in ((0.5, -2.0), (1.0, 1.0), (0.5, -2.0), (0.0, 0.0)):
        put(weights, found[3], plane, alpha)
        expected = centre + (FIRST[3] + alpha[0]) * first + (SECOND[3] + alpha[1]) * second
        assert torch.allclose(flatten({name: value.detach() for name, value in weights.items()}), expected, atol=1e-5)


def test_checkpoints_and_exports_together_make_a_path(run_dir):
    centre, first, _ = basis()
    write_export(run_dir, 15, {**unflatten(centre + 4 * first), "lm_head.weight": torch.zeros(2, 2)})
    write_export(run_dir, 20, unflatten(centre * 0))  # of a step with a checkpoint the checkpoint counts
    found = find_snapshots(run_dir)
    assert [(snapshot.step, snapshot.kind) for snapshot in found] == [
        (0, "checkpoint"), (5, "checkpoint"), (10, "checkpoint"), (15, "export"), (20, "checkpoint"),
    ]  # fmt: skip
    plane = plane_of(run_dir)
    assert sum(plane.explained) == pytest.approx(1) and plane.explained[2] < 0.05
    assert math.dist(plane.path[4], (0, 0)) == 0


def test_too_few_snapshots_and_other_models_are_refused_by_name(run_dir, tmp_path):
    lonely = tmp_path / "lonely"
    write_checkpoint(lonely, 7, unflatten(basis()[0]))
    with pytest.raises(ConfigError, match=r"keeps weights of 1 steps \(7\).*--checkpoint.keep=100"):
        find_snapshots(lonely)
    write_export(run_dir, 30, {"big.weight": torch.zeros(5, 4), "small.weight": torch.zeros(3)})
    with pytest.raises(ConfigError, match=r"export of step 30 has big.weight of shape \(5, 4\)"):
        plane_of(run_dir)


def test_snapshots_on_a_line_have_no_plane(tmp_path):
    centre, first, _ = basis()
    for step in range(4):
        write_checkpoint(tmp_path, step, unflatten(centre + step * first))
    with pytest.raises(ConfigError, match="on one line"):
        plane_of(tmp_path)


def test_missing_rows_are_told(run_dir):
    found = find_snapshots(run_dir)
    found[1].parts["big.weight"].pop()
    with pytest.raises(CheckpointError, match="step 5 lacks rows of big.weight"):
        found[1].tensor("big.weight")


def test_a_checkpoint_is_read_only_after_every_byte_of_it_was_verified(run_dir):
    shard = run_dir / "checkpoints" / "step_5" / "trainer-1-of-2.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1  # the last moment: the weights are what they were
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="step_5: trainer-1-of-2.safetensors was changed after.*step_5 away to"):
        find_snapshots(run_dir)
    (shard.parent / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"step_5: manifest.json is missing, so it was not finished"):
        find_snapshots(run_dir)


def test_the_grid_goes_beyond_the_path_by_its_margin():
    path = np.array([[-4.0, 0.0], [0.0, 2.0]])
    assert grid(path, 5, 0.25) == ([-5.0, -3.5, -2.0, -0.5, 1.0], [-0.5, 0.25, 1.0, 1.75, 2.5])
