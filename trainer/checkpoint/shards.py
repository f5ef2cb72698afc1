"""Checkpoints of the sharded trainers in safetensors: no pickle, any number of ranks reads what any other number wrote.

Each rank writes its own file, in a thread, and flushes it to the disk; reading copies just the rows a rank holds, so
resuming on one, two or eight ranks is bitwise the same (what is in a file: shard_files.py).
"""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rollout.weights.checksum import checksum_rows
from shared.atomic_write import cannot_write, flush
from shared.errors import CheckpointError
from shared.model.parallel import whole_shape
from shared.record_file import Written
from trainer.checkpoint import safetensors_file
from trainer.checkpoint.shard_files import FORMAT, read_shards
from trainer.step.fsdp import columns_of, compare_replicas, local, own_rows, reshard, rows_of, trained
from trainer.step.optimiser import reset, step_count

MOMENTS = ("exp_avg", "exp_avg_sq")
ROOM_SHARE = 0.5
"""share of the host's free memory that the copies of all trainers of a node may take"""


def named_state(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """parameter name -> {"weight", "exp_avg", "exp_avg_sq"} -> the part that this rank holds, sharing memory."""
    return {
        name: {
            "weight": local(parameter.detach()),
            **{moment: local(optimiser.state[parameter][moment]) for moment in MOMENTS},
        }
        for name, parameter in trained(model)
    }


@torch.no_grad()
def checksums(model: nn.Module) -> dict[str, int]:
    """Checksum of the float32 rows of every weight of which this rank saves some, or some columns of them."""
    own = [(name, parameter, *own_rows(parameter)) for name, parameter in trained(model)]
    return {name: checksum(one, local(one)[share], rows.start) for name, one, rows, share in own if rows}


def checksum(parameter: Tensor, rows: Tensor, first: int) -> int:
    """Part of the checksum of a parameter for rows from `first` on, or for columns of them."""
    of_bytes = rows.element_size() * whole_shape(parameter)[1:].numel()
    return checksum_rows(rows, first, torch.float32, of_bytes)


class ShardWriter(threading.Thread):
    """Writes this rank's rows of a policy version (`own_rows`) while training goes on.

    It reads the live tensors, one after the other: between two optimiser steps they do not change. `settle`, which
    comes before each change, copies those that were not read yet, so that the file holds this version and no other. A
    disk that takes everything during the next forward and backward costs the memory of one tensor; a slower one up to
    12 bytes a parameter of the rank, in the memory of the host; where that is not free, training waits.
    """

    def __init__(
        self, folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer, rank: int, world: int, version: int = 0
    ):
        """folder: must exist."""
        super().__init__(name="shard writer", daemon=True)
        rows: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        parameters = dict(trained(model))
        for name, parts in named_state(model, optimiser).items():
            own, share = own_rows(parameters[name])
            if own:
                columns, shape = columns_of(parameters[name]), list(whole_shape(parameters[name]))
                rows[name] = [own.start, shape, *([columns.start] if [len(columns)] != shape[1:2] else [])]
                self.tensors |= {f"{part}/{name}": tensor[share] for part, tensor in parts.items()}
        self.index: dict[str, Any] = {
            "format": FORMAT, "version": version, "rank": rank, "world": world, "step": step_count(optimiser),
            "rows": rows,
        }  # fmt: skip
        self.path = folder / f"trainer-{rank}-of-{world}.safetensors"
        self.waiting = dict(self.tensors)
        """those that are not written yet; copies once `settle` made them"""
        self.settled = False
        self.lock = threading.Lock()
        self.outcome: Future[Written] = Future()
        device = next((tensor.device for tensor in self.tensors.values()), torch.device("cpu"))
        self.aside: AbstractContextManager[object] = nullcontext()
        if device.type == "cuda":  # copies during the kernels of training, after those of the step that has just been
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            self.aside = torch.cuda.stream(stream)
        self.start()

    def run(self) -> None:
        """Write the file, and keep what was written, or the error."""
        try:
            written = safetensors_file.write(self.path, self.tensors, {"index": json.dumps(self.index)}, self._take)
            flush(self.path.parent)
            self.outcome.set_result(written)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            self.outcome.set_exception(CheckpointError(cannot_write(self.path, error)))
        except Exception as error:  # noqa: BLE001  (`files` raises it)
            self.outcome.set_exception(error)
        finally:
            with self.lock:
                self.waiting.clear()

    def _take(self, name: str) -> Tensor:
        with self.lock, self.aside:
            tensor = self.waiting.pop(name)
            return tensor if self.settled else _copy(tensor)

    def settle(self) -> None:
        """Return when the live tensors may change, be moved or be freed: copy what is not written yet, or wait."""
        with self.lock:
            if self.settled or not self.waiting:
                return
            size = sum(tensor.nbytes for tensor in self.waiting.values())
            sharers = min(self.index["world"], int(os.environ.get("LOCAL_WORLD_SIZE", self.index["world"])))
            if size * sharers <= ROOM_SHARE * free_bytes():
                self.settled = True
                self.waiting = {name: _copy(tensor) for name, tensor in self.waiting.items()}
                return
        self.join()

    def files(self) -> dict[str, Written]:
        """Wait for the file, and return its name, size and hash. Raises CheckpointError if the disk did not take it."""
        return {self.path.name: self.outcome.result()}


def _copy(tensor: Tensor) -> Tensor:
    """A copy in the memory of the host; on CPUs without torch, whose threads belong to training."""
    return tensor.cpu() if tensor.device.type != "cpu" else torch.from_numpy(tensor.detach().numpy().copy())


def free_bytes() -> int:
    """Memory of this host, or of the control group (version 2) that this process is in, which nobody uses."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = [1024 * int(lines["MemAvailable"].split()[0])]
    group = Path("/sys/fs/cgroup", Path("/proc/self/cgroup").read_text().strip().rpartition("::/")[2])
    for folder in (group, Path("/sys/fs/cgroup")):
        try:
            limit, used = ((folder / f"memory.{name}").read_text().strip() for name in ("max", "current"))
            kept = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free.append(int(limit) - int(used) + int(kept["inactive_file"]))  # files that are only cached
        except (OSError, ValueError, KeyError):
            continue  # no such group, or "max": no limit
    return min(free)


@torch.no_grad()
def load_shards(
    folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer
) -> tuple[int, dict[str, dict[str, int]]]:
    """Copy this rank's rows of weights and moments from a checkpoint written by any number of ranks.

    Returns its step, and of every file (name -> parameter -> checksum) the weights that this rank took from it and
    would save, as they are in the model afterwards: added up over the ranks, they are what `checksums` was for the rank
    that wrote it.
    Raises CheckpointError if the checkpoint is damaged, incomplete, or of another model.
    """
    shards = read_shards(folder)
    shapes = {name: shape for shard in shards for name, shape in shard.full_shape.items()}
    parameters = dict(trained(model))
    for name, parameter in parameters.items():
        if shapes.get(name) != (shape := tuple(whole_shape(parameter))):
            raise CheckpointError(
                f"{folder}: {name} has shape {shapes.get(name, 'none')}, the model's is {shape}: "
                "model.path is not the model that this run was started with"
            )
    if extra := sorted(shapes.keys() - parameters.keys()):
        raise CheckpointError(f"{folder} holds {extra[0]}, which the model lacks: model.path is another model")
    reset(optimiser, shards[0].step)
    missing = {name: len(rows_of(parameter)) * len(columns_of(parameter)) for name, parameter in parameters.items()}
    state = named_state(model, optimiser)
    taken: dict[str, dict[str, int]] = {}
    for shard in shards:
        sums = taken[shard.path.name] = {}
        try:
            with safe_open(shard.path, framework="pt") as file:
                for name, first in shard.first_row.items():
                    parameter, parts = parameters[name], state[name]
                    own_first, columns = rows_of(parameter).start, columns_of(parameter)
                    place, here = (first, shard.first_column.get(name, 0)), (own_first, columns.start)
                    rows, columns = copy_overlap(file, name, place, here, parts)
                    if rows and columns:
                        missing[name] -= len(rows) * len(columns)
                        own, _ = own_rows(parameter)
                        start, stop = max(rows.start, own.start), min(rows.stop, own.stop)
                        if start < stop:
                            values = parts["weight"][start - own_first : stop - own_first]
                            if values.ndim > 1:
                                values = values[:, columns.start - here[1] : columns.stop - here[1]]
                            sums[name] = checksum(parameter, values, start)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{shard.path} is damaged ({error}): use an earlier checkpoint") from error
    for name, count in missing.items():
        if count:
            raise CheckpointError(f"{folder} lacks rows of {name}: use an earlier checkpoint")
    reshard(model)
    compare_replicas(model, f"after the load of {folder}")
    return shards[0].step, taken


def copy_overlap(
    file: Any, name: str, place: tuple[int, int], here: tuple[int, int], parts: dict[str, Tensor]
) -> tuple[range, range]:
    """Copy the rows and columns of parameter `name` that both the file and this rank hold; returns which (of a vector,
    column 0). place, here: first row and column of the file's part and of this rank's."""
    theirs, ours = [*file.get_slice(f"weight/{name}").get_shape(), 1], [*parts["weight"].shape, 1]
    rows, columns = (range(max(place[n], here[n]), min(place[n] + theirs[n], here[n] + ours[n])) for n in (0, 1))
    for state, held in parts.items() if rows and columns else ():
        stored = file.get_slice(f"{state}/{name}")[rows.start - place[0] : rows.stop - place[0]]
        target = held[rows.start - here[0] : rows.stop - here[0]]
        if held.ndim > 1:
            stored = stored[:, columns.start - place[1] : columns.stop - place[1]]
            target = target[:, columns.start - here[1] : columns.stop - here[1]]
        target.copy_(stored)
    return rows, columns
