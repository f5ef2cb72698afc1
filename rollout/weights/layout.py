"""Layout of a transfer buffer: where every tensor of the model is, and which of its rows each trainer rank owns.

All ranks and engines compute the same flat layout: tensors one after the other in `named_parameters` order, each
starting at a multiple of 64 bytes, so that q, k, v and gate, up stay neighbours, and a fused weight is read in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shared.errors import ConfigError
from shared.model.parallel import cut_of, whole_shape

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

ALIGNMENT_BYTES = 64
BUFFERS = 2
NO_VERSION = -1
"""version of an engine's weights before the first update: those of its model folder"""
FLAG_BYTES = 8
"""one int64 per trainer rank at the start of a buffer: the version that the rank wrote there"""


def align(size_bytes: int) -> int:
    """Round up to the next multiple of 64 bytes."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def buffer_of(version: int) -> int:
    """The buffer of a version: two take turns, so that training goes on while engines still read the previous one."""
    return version % BUFFERS


@dataclass(frozen=True)
class Place:
    """One tensor in the buffer: `offset` in bytes from the buffer's start, full (unsharded) `shape`."""

    offset: int
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Length of the first dimension (a scalar has one row)."""
        return self.shape[0] if self.shape else 1

    def row_bytes(self, item_bytes: int) -> int:
        """Bytes of one row of the first dimension."""
        return math.prod(self.shape[1:]) * item_bytes


@dataclass(frozen=True)
class Layout:
    """All tensors' places. Example: two ranks, one [3, 4] bfloat16 tensor: a 64-byte header, then 24 bytes at 64."""

    dtype: torch.dtype
    world: int
    places: dict[str, Place]
    size_bytes: int
    """bytes of one buffer, header included"""

    @property
    def payload_bytes(self) -> int:
        """Bytes of all tensors, without header and padding."""
        return sum(math.prod(place.shape) for place in self.places.values()) * self.dtype.itemsize

    def describe(self) -> dict[str, Any]:
        """Return a JSON-able form, which `read_layout` reads."""
        return {
            "dtype": str(self.dtype).removeprefix("torch."),
            "world": self.world,
            "size_bytes": self.size_bytes,
            "places": [[name, place.offset, list(place.shape)] for name, place in self.places.items()],
        }


def read_layout(description: dict[str, Any]) -> Layout:
    """Return the layout that `Layout.describe` described."""
    places = {name: Place(offset, tuple(shape)) for name, offset, shape in description["places"]}
    return Layout(getattr(torch, description["dtype"]), description["world"], places, description["size_bytes"])


def plan_layout(shapes: list[tuple[str, tuple[int, ...]]], dtype: torch.dtype, world: int) -> Layout:
    """Lay out tensors of the given full shapes for `world` trainer ranks."""
    places: dict[str, Place] = {}
    offset = align(FLAG_BYTES * world)
    for name, shape in shapes:
        places[name] = Place(offset, tuple(shape))
        offset += align(math.prod(shape) * dtype.itemsize)
    return Layout(dtype, world, places, offset)


Change = Callable[[torch.Tensor, int], torch.Tensor]
"""(rows of a tensor, number of the first) -> their values in the engines"""


@dataclass(frozen=True)
class Slice:
    """The rows of one tensor that this rank owns: `local` holds rows first_row .. first_row + len(local)."""

    name: str
    local: torch.Tensor
    first_row: int
    change: Change | None = None
    """computes what the engines hold; None: the local rows themselves"""

    @property
    def values(self) -> torch.Tensor:
        """What the engines are to hold of these rows: float32 until the wire rounds them."""
        return self.local if self.change is None else self.change(self.local, self.first_row)


def own_share(parameter: DTensor, rows: int, joined: bool = False) -> slice:
    """Which of the `rows` of its shard a rank saves, or with `joined` sends: all, or its part where replicas or tensor
    peers hold the same ones. Peers that have other columns of them send a part each, joined."""
    share, sharers = range(rows), list[tuple[int, int]]()
    if (cut := cut_of(parameter)) is not None:
        sharers.append((cut.peers.rank, cut.peers.size) if joined and cut.dim == 1 else (cut.copy, cut.copies))
    if parameter.device_mesh.ndim > 1:
        sharers.append((parameter.device_mesh.get_local_rank(0), parameter.device_mesh.size(0)))
    for number, count in sharers:
        share = share[len(share) * number // count : len(share) * (number + 1) // count]
    return slice(share.start, share.stop)


def own_pieces(named_parameters: list[tuple[str, torch.Tensor]], rank: int) -> list[Slice]:
    """The rows of every tensor that this rank sends: its FSDP2 shard (dimension 0), of which replicas and tensor peers
    send a part each (`own_share`), or whole plain tensors on rank 0.

    Tied parameters (the same object under a second name) come once. Raises ConfigError for another kind of sharding.
    """
    # here, since controller and engines need neither this nor the second and the 40 MB that it takes
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    pieces: list[Slice] = []
    seen: set[int] = set()
    for name, parameter in named_parameters:
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        if not isinstance(parameter, DTensor):
            if rank == 0:
                pieces.append(Slice(name, parameter.detach(), 0))
            continue
        shape, start = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        if tuple(shape[1:]) != tuple(parameter.shape[1:]):
            raise ConfigError(f"weight transfer needs shards of dimension 0 only, but {name} is {parameter.placements}")
        share, cut = own_share(parameter, shape[0], joined=True), cut_of(parameter)
        first = start[0] + share.start + (cut.first if cut is not None and cut.dim == 0 else 0)
        if math.prod(shape) and share.start < share.stop:
            pieces.append(Slice(name, parameter.to_local().detach()[share], first))
    return pieces


def unique_shapes(named_parameters: list[tuple[str, torch.Tensor]]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and full shapes in order, tied parameters once."""
    seen: dict[int, tuple[str, tuple[int, ...]]] = {}
    for name, parameter in named_parameters:
        seen.setdefault(id(parameter), (name, tuple(whole_shape(parameter))))
    return list(seen.values())


def piece_start(layout: Layout, name: str, first_row: int) -> int:
    """Offset in bytes, from the buffer's start, of a row of a tensor."""
    tensor = layout.places[name]
    return tensor.offset + first_row * tensor.row_bytes(layout.dtype.itemsize)


@dataclass(frozen=True)
class Bucket:
    """Neighbouring tensors that travel together: bytes `start` to `end` of the buffer."""

    names: list[str]
    start: int
    end: int


def plan_buckets(layout: Layout) -> list[Bucket]:
    """Divide the tensors, in order, into as few buckets as are each no longer than the largest tensor."""
    item, buckets = layout.dtype.itemsize, list[Bucket]()
    ends = {name: place.offset + align(place.rows * place.row_bytes(item)) for name, place in layout.places.items()}
    largest = max(ends[name] - place.offset for name, place in layout.places.items())
    for name, end in ends.items():
        if buckets and end - buckets[-1].start <= largest:
            buckets[-1] = Bucket([*buckets[-1].names, name], buckets[-1].start, end)
        else:
            buckets.append(Bucket([name], layout.places[name].offset, end))
    return buckets


def cut(ranges: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[list[tuple[int, int, int]]]:
    """For each span (start, end), what of the byte ranges (start, size) is in it: (number of the range, start, end).

    Both are in ascending order and do not overlap among themselves.
    """
    pieces, at = list[list[tuple[int, int, int]]](), 0
    for start, end in spans:
        pieces.append([])
        while at < len(ranges) and ranges[at][0] < end:
            first, last = ranges[at][0], sum(ranges[at])
            if max(first, start) < min(last, end):
                pieces[-1].append((at, max(first, start), min(last, end)))
            if last > end:
                break
            at += 1
    return pieces


def merge_ranges(layout: Layout, rows: list[tuple[str, int, int]]) -> list[tuple[int, int]]:
    """Byte ranges (start, size) of (name, first row, rows) parts; neighbours with only padding between become one.

    A single rank owns everything, hence one range; a shard of many has about one range per tensor.
    """
    ranges: list[tuple[int, int]] = []
    for name, first_row, count in rows:
        start = piece_start(layout, name, first_row)
        end = start + count * layout.places[name].row_bytes(layout.dtype.itemsize)
        if ranges and align(ranges[-1][0] + ranges[-1][1]) == start:
            ranges[-1] = (ranges[-1][0], end - ranges[-1][0])
        else:
            ranges.append((start, end - start))
    return ranges
