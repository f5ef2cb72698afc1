r"""Finds the plane in which a run moved most: the first two principal directions of its snapshots.

With T snapshots of W weights stacked in rows, less their mean, as D [T, W], the principal directions are the leading
eigenvectors of the covariance D^T D [W, W]. The paper finds them by Lanczos-Arnoldi iteration, which needs D^T D only
as a product with vectors. The small matrix gives the same: G = D D^T [T, T] has the same nonzero eigenvalues, and if
G u = s u with |u| = 1,

    D^T D (D^T u) = D^T (G u) = s (D^T u),    |D^T u|^2 = u^T G u = s,    so    c = D^T u / sqrt(s)

is the normalised principal direction, up to its sign, and row t of D lies at D_t . c = sqrt(s) u_t along it. T is some
tens, so G is exact and cheap: each tensor is read twice, piece by piece, and summed in float64. The T x W numbers are
never in memory together.

The sign is chosen so that the last snapshot lies further along c than the first.
Source: Magistral (2506.10910), section 7.1.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lab.analyse.snapshots import WeightSnapshot, common_shapes, pieces
from shared.errors import ConfigError
from shared.progress_bar import ProgressBar

DIRECTIONS = 2
FLAT = 1e-10
"""a variance below this share of the first counts as rounding error"""


class Plane(NamedTuple):
    """Two directions in weight space, and the coordinates of the snapshots along them."""

    steps: list[int]
    explained: list[float]
    """share of the variance along each principal direction, largest first; they add up to 1"""
    path: NDArray[np.float64]
    """[snapshots, 2] coordinates, relative to the last snapshot"""
    directions: tuple[dict[str, Tensor], dict[str, Tensor]]
    """each of length 1 over all tensors together, float32, by name"""


def principal(gram: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return variances [T], largest first, and eigenvectors [T, T] in columns, with the signs of the module header.

    Raises ConfigError if the snapshots lie in one point or on one line.
    """
    values, vectors = np.linalg.eigh(gram)
    values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
    if values[1] <= FLAT * values[0] or values[0] == 0:
        where = "equal" if values[0] == 0 else "on one line"
        raise ConfigError(f"the weights of all {len(values)} snapshots are {where}: there is no plane to draw")
    signs = np.where(vectors[-1] < vectors[0], -1.0, 1.0)
    return values, vectors * signs


def find_plane(snapshots: Sequence[WeightSnapshot]) -> Plane:
    """Return the plane of the snapshots; coordinates are relative to the last one (its own are 0, 0).

    Reads all weights twice, with a bar on the error stream. Raises ConfigError, CheckpointError.
    """
    shapes, count = common_shapes(snapshots), len(snapshots)
    all_pieces = list(pieces(shapes, count))
    gram = np.zeros((count, count))  # products of the snapshots less their mean, summed over all weights
    directions = tuple({name: torch.empty(shape) for name, shape in shapes.items()} for _ in range(DIRECTIONS))
    with contextlib.closing(ProgressBar("reading", "pieces of weights read:", 0, 2 * len(all_pieces))) as bar:
        for number, (name, first, last) in enumerate(all_pieces, 1):
            centred = _centred(snapshots, name, first, last)
            gram += centred @ centred.T
            bar.show(number)
        values, vectors = principal(gram)
        scaled = vectors[:, :DIRECTIONS] / np.sqrt(values[:DIRECTIONS])
        for number, (name, first, last) in enumerate(all_pieces, len(all_pieces) + 1):
            rows = scaled.T @ _centred(snapshots, name, first, last)
            for direction, row in zip(directions, rows, strict=True):
                piece = direction[name][first:last]
                piece.copy_(torch.from_numpy(row.reshape(piece.shape)))
            bar.show(number)
    coordinates = vectors[:, :DIRECTIONS] * np.sqrt(values[:DIRECTIONS])
    return Plane(
        steps=[snapshot.step for snapshot in snapshots],
        explained=(values / values.sum()).tolist(),
        path=coordinates - coordinates[-1],
        directions=(directions[0], directions[1]),
    )


def _centred(snapshots: Sequence[WeightSnapshot], name: str, first: int, last: int) -> NDArray[np.float64]:
    """Return the [T, weights] of a piece, less their mean over the snapshots."""
    rows: NDArray[np.float64] = np.empty((len(snapshots), math.prod(snapshots[0].shapes[name][1:]) * (last - first)))
    for row, snapshot in zip(rows, snapshots, strict=True):
        row[:] = snapshot.rows(name, first, last).numpy().ravel()
    rows -= rows.mean(axis=0)
    return rows
