"""Reads the weights that a run kept: checkpoints (float32, any number of shards) and exported models, by step.

Tensors are read a few rows at a time, so that only one piece of every snapshot is in memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.errors import CheckpointError, ConfigError
from shared.model import hf
from trainer.shard_files import read_shards

PIECE_NUMBERS = 1 << 23
"""number of weights, of all snapshots together, that are in memory at once: 64 MiB in float64"""
STEP = re.compile(r"step_(\d+)")
LEAST = 3


class Part(NamedTuple):
    """Rows `first` to `last` (exclusive) of a tensor, as stored under `key` in `file`."""

    first: int
    last: int
    key: str
    file: Any


class Snapshot:
    """The weights of a run after one step, read from their files on demand."""

    def __init__(self, step: int, kind: str, parts: dict[str, list[Part]], shapes: dict[str, tuple[int, ...]]):
        self.step, self.kind, self.parts, self.shapes = step, kind, parts, shapes
        """kind: "checkpoint" or "export"; shapes: of the whole tensors, by Hugging Face name"""

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Return [last - first, ...] float32 rows of a tensor, perhaps mapped from the file: do not write into them.

        Raises CheckpointError if they are not stored or cannot be read.
        """
        found = []
        try:
            for part in self.parts[name]:
                start, stop = max(first, part.first), min(last, part.last)
                if start < stop:
                    stored = part.file.get_slice(part.key)[start - part.first : stop - part.first]
                    found.append(stored.to(torch.float32))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.kind} of step {self.step}: {name} cannot be read: {error}") from error
        whole = torch.cat(found) if len(found) != 1 else found[0]
        if whole.shape[0] != last - first:
            raise CheckpointError(f"{self.kind} of step {self.step} lacks rows of {name}: leave that folder out")
        return whole

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor, float32, perhaps mapped from the file."""
        return self.rows(name, 0, self.shapes[name][0])


def open_checkpoint(step: int, folder: Path) -> Snapshot:
    """Open the weights of a trainers' checkpoint. Raises CheckpointError."""
    parts: dict[str, list[Part]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in read_shards(folder):
        file = safe_open(shard.path, framework="pt")
        for name, first in shard.first_row.items():
            count = file.get_slice(f"weight/{name}").get_shape()[0]
            parts.setdefault(name, []).append(Part(first, first + count, f"weight/{name}", file))
        shapes |= shard.full_shape
    for found in parts.values():
        found.sort(key=lambda part: part.first)
    return Snapshot(step, "checkpoint", parts, shapes)


def open_export(step: int, folder: Path) -> Snapshot:
    """Open the weights of a Hugging Face folder. Raises ModelError."""
    parts: dict[str, list[Part]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path, names in hf.weight_files(folder).items():
        file = safe_open(path, framework="pt")
        for name in names:
            shapes[name] = tuple(file.get_slice(name).get_shape())
            parts[name] = [Part(0, shapes[name][0], name, file)]
    return Snapshot(step, "export", parts, shapes)


def find_snapshots(run_dir: Path) -> list[Snapshot]:
    """Return the snapshots of a run, by step; of a step with both, the checkpoint. Raises ConfigError below three."""
    found: dict[int, Snapshot] = {}
    for folder, pattern, opener in (
        (run_dir / "hf", "config.json", open_export),
        (run_dir / "checkpoints", "manifest.json", open_checkpoint),
    ):
        for path in sorted(folder.glob(f"step_*/{pattern}")):
            if match := STEP.fullmatch(path.parent.name):
                step = int(match.group(1))
                found[step] = opener(step, path.parent)
    if len(found) < LEAST:
        steps = ", ".join(map(str, sorted(found))) or "none"
        raise ConfigError(
            f"{run_dir} keeps weights of {len(found)} steps ({steps}), and a plane needs at least {LEAST}: train with "
            "--checkpoint.keep=100 and a small --checkpoint.every, so that checkpoints are not removed"
        )
    return [found[step] for step in sorted(found)]


def common_shapes(snapshots: Sequence[Snapshot]) -> dict[str, tuple[int, ...]]:
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


def pieces(shapes: dict[str, tuple[int, ...]], snapshots: int) -> Iterator[tuple[str, int, int]]:
    """Yield (name, first row, end row) of pieces, at least a row, one of which per snapshot fits in PIECE_NUMBERS."""
    for name, shape in shapes.items():
        rows = max(1, PIECE_NUMBERS // (snapshots * math.prod(shape[1:])))
        for first in range(0, shape[0], rows):
            yield name, first, min(first + rows, shape[0])
