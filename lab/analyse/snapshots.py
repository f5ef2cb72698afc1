"""Reads the weights that a run kept: checkpoints (float32, any number of shards) and exported models, by step.

Every byte of a checkpoint is verified before anything is read from it. Tensors are read a few rows at a time, so that
only one piece of every snapshot is in memory.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.errors import CheckpointError, ConfigError
from shared.model import hf
from shared.progress_bar import ProgressBar
from trainer.checkpoint import reader
from trainer.checkpoint.shard_files import read_shards
from trainer.checkpoint.writer import FOLDER, folders

PIECE_NUMBERS = 1 << 23
"""number of weights, of all snapshots together, that are in memory at once: 64 MiB in float64"""
LEAST = 3
Shapes = dict[str, tuple[int, ...]]
"""name of a tensor -> its shape"""


class WeightSnapshot:
    """The weights of a run after one step, read from their files on demand."""

    def __init__(self, step: int, kind: str):
        self.step, self.kind = step, kind
        """kind: "checkpoint" or "export\""""
        self.shapes: Shapes = {}
        """Hugging Face name -> shape of the whole tensor"""
        self.parts: dict[str, list[tuple[int, Any]]] = {}
        """name -> (first row, the rows as a slice of a file), in order"""

    def add(self, name: str, first: int, rows: Any, shape: Sequence[int]) -> None:
        """Add rows of a tensor: their first, a slice of a safetensors file, and the shape of the whole."""
        self.shapes[name] = tuple(shape)
        self.parts.setdefault(name, []).append((first, rows))
        self.parts[name].sort(key=lambda stored: stored[0])

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Return [last - first, ...] float32 rows of a tensor, perhaps mapped from the file: do not write into them.

        Raises CheckpointError if they are not stored or cannot be read.
        """
        slices = []
        try:
            for begin, stored in self.parts[name]:
                start, stop = max(first - begin, 0), min(last - begin, stored.get_shape()[0])
                if start < stop:
                    slices.append(stored[start:stop].to(torch.float32))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.kind} of step {self.step}: {name} cannot be read: {error}") from error
        whole = torch.cat(slices) if len(slices) != 1 else slices[0]
        if whole.shape[0] != last - first:
            raise CheckpointError(f"{self.kind} of step {self.step} lacks rows of {name}: leave that folder out")
        return whole

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor, float32, perhaps mapped from the file."""
        return self.rows(name, 0, self.shapes[name][0])


def open_checkpoint(step: int, folder: Path) -> WeightSnapshot:
    """Open the weights of a trainers' checkpoint. Raises CheckpointError if it is not whole."""
    try:
        reader.read(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{error}: move {folder} away to analyse the run without it") from error
    snapshot = WeightSnapshot(step, "checkpoint")
    for shard in read_shards(folder):
        file = safe_open(shard.path, framework="pt")
        for name, first in shard.first_row.items():
            snapshot.add(name, first, file.get_slice(f"weight/{name}"), shard.full_shape[name])
    return snapshot


def open_export(step: int, folder: Path) -> WeightSnapshot:
    """Open the weights of a Hugging Face folder. Raises ModelError."""
    snapshot = WeightSnapshot(step, "export")
    for path, names in hf.weight_files(folder).items():
        file = safe_open(path, framework="pt")
        for name in names:
            rows = file.get_slice(name)
            snapshot.add(name, 0, rows, rows.get_shape())
    return snapshot


def find_snapshots(run_dir: Path) -> list[WeightSnapshot]:
    """Return the snapshots of a run, by step; of a step with both, the checkpoint.

    Raises ConfigError below three, CheckpointError for a checkpoint that is not whole.
    """
    snapshots: dict[int, WeightSnapshot] = {}
    for config in (run_dir / "hf").glob("step_*/config.json"):
        if match := FOLDER.fullmatch(config.parent.name):
            snapshots[int(match[1])] = open_export(int(match[1]), config.parent)
    checkpoints = folders(run_dir)
    with contextlib.closing(ProgressBar("verifying", "checkpoints verified:", 0, len(checkpoints))) as bar:
        for number, (step, folder) in enumerate(checkpoints.items(), 1):
            snapshots[step] = open_checkpoint(step, folder)
            bar.show(number)
    if len(snapshots) < LEAST:
        steps = ", ".join(map(str, sorted(snapshots))) or "none"
        raise ConfigError(
            f"{run_dir} keeps weights of {len(snapshots)} steps ({steps}), and a plane needs at least {LEAST}: train "
            "with --checkpoint.keep=100 and a small --checkpoint.every, so that checkpoints are not removed"
        )
    return [snapshots[step] for step in sorted(snapshots)]


def common_shapes(snapshots: Sequence[WeightSnapshot]) -> Shapes:
    """Return names and shapes of the tensors to compare, in the order of the first checkpoint (exports may contain a
    tied head twice). Raises ConfigError if a snapshot is of another model."""
    first = next((snapshot for snapshot in snapshots if snapshot.kind == "checkpoint"), snapshots[0])
    for snapshot in snapshots:
        for name, shape in first.shapes.items():
            if snapshot.shapes.get(name) != shape:
                raise ConfigError(
                    f"the {snapshot.kind} of step {snapshot.step} has {name} of shape {snapshot.shapes.get(name)}, "
                    f"that of step {first.step} has {shape}: they are of different models"
                )
    return dict(first.shapes)


def pieces(shapes: Shapes, snapshots: int) -> Iterator[tuple[str, int, int]]:
    """Yield (name, first row, end row) of pieces, at least a row, one of which per snapshot fits in PIECE_NUMBERS."""
    for name, shape in shapes.items():
        rows = max(1, PIECE_NUMBERS // (snapshots * math.prod(shape[1:])))
        for first in range(0, shape[0], rows):
            yield name, first, min(first + rows, shape[0])
