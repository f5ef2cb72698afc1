"""Where bytes lie, and who owns them."""

from __future__ import annotations

import json

import torch

from rollout.weights.layout import (
    buffer_of,
    merge_ranges,
    own_pieces,
    piece_start,
    plan_layout,
    read_layout,
    unique_shapes,
)

SHAPES = [("a", (3, 4)), ("b", (2, 32)), ("c", (5,))]


def test_offsets_by_hand() -> None:
    layout = plan_layout(SHAPES, torch.bfloat16, world=2)
    assert [(name, place.offset) for name, place in layout.places.items()] == [("a", 64), ("b", 128), ("c", 256)]
    assert layout.size_bytes == 320 and layout.payload_bytes == 2 * (12 + 64 + 5)
    assert piece_start(layout, "b", 1) == 128 + 64


def test_many_ranks_get_a_longer_header() -> None:
    assert plan_layout(SHAPES, torch.bfloat16, world=9).places["a"].offset == 128


def test_a_layout_survives_json() -> None:
    layout = plan_layout([*SHAPES, ("scalar", ())], torch.float32, world=3)
    assert read_layout(json.loads(json.dumps(layout.describe()))) == layout


def test_neighbours_become_one_range_and_holes_split() -> None:
    layout = plan_layout(SHAPES, torch.bfloat16, world=1)
    assert merge_ranges(layout, [("a", 0, 3), ("b", 0, 2), ("c", 0, 5)]) == [(64, 202)]
    assert merge_ranges(layout, [("a", 0, 2), ("b", 1, 1), ("c", 0, 5)]) == [(64, 16), (192, 74)]


def test_tied_parameters_come_once_and_plain_tensors_belong_to_rank_0() -> None:
    tied = torch.nn.Parameter(torch.zeros(4, 2))
    named = [("embed", tied), ("norm", torch.nn.Parameter(torch.zeros(2))), ("head", tied)]
    assert unique_shapes(named) == [("embed", (4, 2)), ("norm", (2,))]
    assert [piece.name for piece in own_pieces(named, rank=0)] == ["embed", "norm"]
    assert own_pieces(named, rank=1) == []


def test_versions_take_turns_in_two_buffers() -> None:
    assert [buffer_of(version) for version in range(4)] == [0, 1, 0, 1]
