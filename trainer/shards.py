"""Checkpoints of the sharded trainers in safetensors: no pickle, any number of ranks reads what any other number wrote.

Each rank writes its own file and flushes it to the disk; reading copies just the rows a rank holds, so resuming on
one, two or eight ranks is bitwise the same (what is in a file: shard_files.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shared.atomic_write import flush
from shared.errors import CheckpointError
from trainer import safetensors_file
from trainer.fsdp import local, reshard, rows_of
from trainer.optimiser import reset, step_count
from trainer.safetensors_file import Written
from trainer.shard_files import FORMAT, read_shards

MOMENTS = ("exp_avg", "exp_avg_sq")


def named_state(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """parameter name -> {"weight", "exp_avg", "exp_avg_sq"} -> this rank's rows, sharing memory with the originals."""
    return {
        name: {
            "weight": local(parameter.detach()),
            **{moment: local(optimiser.state[parameter][moment]) for moment in MOMENTS},
        }
        for name, parameter in model.named_parameters()
    }


def save_shard(
    folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer, rank: int, world: int, version: int = 0
) -> dict[str, Written]:
    """Write this rank's rows of a policy version into `folder` (which must exist); returns what was written, by name.

    Raises CheckpointError if the disk does not take it; what was written of the file is removed.
    """
    rows: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    parameters = dict(model.named_parameters())
    for name, parts in named_state(model, optimiser).items():
        held = rows_of(parameters[name])
        if held.count:
            rows[name] = [held.first, list(parameters[name].shape)]
            tensors |= {f"{part}/{name}": tensor for part, tensor in parts.items()}
    index = {
        "format": FORMAT, "version": version, "rank": rank, "world": world, "step": step_count(optimiser), "rows": rows
    }  # fmt: skip
    path = folder / f"trainer-{rank}-of-{world}.safetensors"
    try:
        written = safetensors_file.write(path, tensors, {"index": json.dumps(index)})
        flush(folder)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path} could not be written ({error}): free disk space, or set runs_dir to a larger disk"
        ) from error
    return {path.name: written}


@torch.no_grad()
def load_shards(folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> int:
    """Copy this rank's rows of weights and moments from a checkpoint written by any number of ranks; returns its step.

    Raises CheckpointError if the checkpoint is damaged, incomplete, or of another model.
    """
    shards = read_shards(folder)
    shapes = {name: shape for shard in shards for name, shape in shard.full_shape.items()}
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if shapes.get(name) != tuple(parameter.shape):
            raise CheckpointError(
                f"{folder}: {name} has shape {shapes.get(name, 'none')}, the model's is {tuple(parameter.shape)}: "
                "model.path is not the model that this run was started with"
            )
    if extra := sorted(shapes.keys() - parameters.keys()):
        raise CheckpointError(f"{folder} holds {extra[0]}, which the model lacks: model.path is another model")
    reset(optimiser, shards[0].step)
    missing = {name: rows_of(parameter).count for name, parameter in parameters.items()}
    state = named_state(model, optimiser)
    for shard in shards:
        try:
            with safe_open(shard.path, framework="pt") as file:
                for name, first in shard.first_row.items():
                    missing[name] -= copy_overlap(file, name, first, rows_of(parameters[name]).first, state[name])
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{shard.path} is damaged ({error}): use an earlier checkpoint") from error
    for name, count in missing.items():
        if count:
            raise CheckpointError(f"{folder} lacks {count} rows of {name}: use an earlier checkpoint")
    reshard(model)
    return shards[0].step


def copy_overlap(file: Any, name: str, file_first: int, own_first: int, parts: dict[str, Tensor]) -> int:
    """Copy the rows of parameter `name` that both the file and this rank hold; returns how many."""
    own_rows = parts["weight"].shape[0]
    file_rows = file.get_slice(f"weight/{name}").get_shape()[0]
    start, stop = max(file_first, own_first), min(file_first + file_rows, own_first + own_rows)
    if stop <= start:
        return 0
    for part, rows in parts.items():
        stored = file.get_slice(f"{part}/{name}")[start - file_first : stop - file_first]
        rows[start - own_first : stop - own_first].copy_(stored)
    return int(stop - start)
