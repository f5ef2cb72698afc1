"""Reads the files of a checkpoint of sharded trainers, without a process group or an optimiser.

trainer-0-of-2.safetensors     weight/NAME, exp_avg/NAME, exp_avg_sq/NAME: a rank's rows, float32
                               header "index": JSON {format, version, rank, world, step, rows: {NAME: [first
                               row, full shape]}}; of a part of the rows' columns, also the first column
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.errors import CheckpointError
from shared.json_reader import parse_json

FORMAT = 2
FILE_NAME = re.compile(r"trainer-\d+-of-\d+\.safetensors")


@dataclass(frozen=True)
class Shard:
    """One file of a checkpoint: its version, and which rows of which parameters it holds."""

    path: Path
    version: int
    """policy version"""
    step: int
    """optimiser steps since the moments were zero"""
    first_row: dict[str, int]
    full_shape: dict[str, tuple[int, ...]]
    first_column: dict[str, int]
    """of those of which it holds some columns"""


def read_shards(folder: Path) -> list[Shard]:
    """The files of a checkpoint, all ranks present and of one step. Raises CheckpointError otherwise."""
    paths = sorted(path for path in folder.glob("*") if FILE_NAME.fullmatch(path.name))
    if not paths:
        raise CheckpointError(f"{folder} holds no trainer-*.safetensors: it is not a checkpoint of the trainers")
    shards: list[Shard] = []
    worlds: set[int] = set()
    for path in paths:
        index = read_index(path)
        worlds.add(index["world"])
        if path.name != f"trainer-{index['rank']}-of-{index['world']}.safetensors":
            raise CheckpointError(f"{path} holds {described(index)}: use an earlier checkpoint")
        shards.append(
            Shard(
                path,
                index["version"],
                index["step"],
                {name: first for name, (first, *_) in index["rows"].items()},
                {name: tuple(shape) for name, (_, shape, *_) in index["rows"].items()},
                {name: column for name, (_, _, *columns) in index["rows"].items() for column in columns},
            )  # fmt: skip
        )
    if len(worlds) != 1 or len(shards) != min(worlds) or len({(shard.version, shard.step) for shard in shards}) != 1:
        names = ", ".join(path.name for path in paths)
        raise CheckpointError(f"{folder} is incomplete or mixed: found {names}; use an earlier checkpoint")
    return shards


def read_index(path: Path) -> dict[str, Any]:
    """The index of one file. Raises CheckpointError for a damaged file or an unknown format."""
    try:
        with safe_open(path, framework="pt") as file:
            index: dict[str, Any] = parse_json((file.metadata() or {})["index"])
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): use an earlier checkpoint") from error
    if index.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {index.get('format')}, this version reads {FORMAT}")
    if missing := {"version", "rank", "world", "step", "rows"} - index.keys():
        raise CheckpointError(f"{path} is damaged (its index lacks {min(missing)}): use an earlier checkpoint")
    return index


def described(index: dict[str, Any]) -> str:
    """Text that says which rank wrote a shard and at which version, for messages."""
    return f"what rank {index['rank']} of {index['world']} wrote at version {index['version']}"


def iterate_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every (name, whole float32 weight) of a checkpoint, one at a time; ranks and moments are not needed.

    Raises CheckpointError if the checkpoint is damaged or incomplete.
    """
    shards = read_shards(folder)
    shapes = {name: shape for shard in shards for name, shape in shard.full_shape.items()}
    for name, shape in shapes.items():
        whole, missing = torch.empty(shape), math.prod(shape)
        for shard in shards:
            if name in shard.first_row:
                try:
                    with safe_open(shard.path, framework="pt") as file:
                        piece = file.get_tensor(f"weight/{name}")
                except (OSError, SafetensorError) as error:
                    raise CheckpointError(f"{shard.path} is damaged ({error}): use an earlier checkpoint") from error
                rows = whole[shard.first_row[name] :][: len(piece)]
                column = shard.first_column.get(name, 0)
                (rows if piece.ndim < 2 else rows[:, column : column + piece.shape[1]]).copy_(piece)
                missing -= piece.numel()
        if missing:
            raise CheckpointError(f"{folder} lacks rows of {name}: use an earlier checkpoint")
        yield name, whole
