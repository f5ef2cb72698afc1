"""Where bytes lie, who owns them, and in which pieces they travel."""

import json

import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.weights.layout import (
    Layout,
    buffer_of,
    cut,
    merge_ranges,
    own_pieces,
    piece_start,
    plan_buckets,
    plan_layout,
    read_layout,
    unique_shapes,
)

SHAPES = [("a", (3, 4)), ("b", (2, 32)), ("c", (5,))]
DTYPES = (torch.bfloat16, torch.float32)
Ranges = list[tuple[int, int]]
sizes = st.lists(st.integers(1, 9), max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shapes = draw(st.lists(sizes, min_size=1, max_size=8))
    named = [(f"t{number}", shape) for number, shape in enumerate(shapes)]
    return plan_layout(named, draw(st.sampled_from(DTYPES)), draw(st.integers(1, 20)))


@st.composite
def ranges(draw: st.DrawFn) -> Ranges:
    """Ranges (start, end), ascending, with gaps between some."""
    borders = sorted(draw(st.sets(st.integers(0, 60), max_size=12)))
    return [(start, end) for start, end in zip(borders, borders[1:], strict=False) if draw(st.booleans())]


def test_offsets_by_hand():
    layout = plan_layout(SHAPES, torch.bfloat16, world=2)
    assert [(name, place.offset) for name, place in layout.places.items()] == [("a", 64), ("b", 128), ("c", 256)]
    assert layout.size_bytes == 320 and layout.payload_bytes == 2 * (12 + 64 + 5)
    assert piece_start(layout, "b", 1) == 128 + 64


@given(layouts())
def test_tensors_are_aligned_behind_the_flags_of_all_ranks_and_the_layout_survives_json(layout):
    end = 8 * layout.world
    for place in layout.places.values():
        assert place.offset % 64 == 0 and end <= place.offset < end + 64
        end = place.offset + place.rows * place.row_bytes(layout.dtype.itemsize)
    assert end <= layout.size_bytes < end + 64
    assert read_layout(json.loads(json.dumps(layout.describe()))) == layout


def test_neighbours_become_one_range_and_holes_split():
    layout = plan_layout(SHAPES, torch.bfloat16, world=1)
    assert merge_ranges(layout, [("a", 0, 3), ("b", 0, 2), ("c", 0, 5)]) == [(64, 202)]
    assert merge_ranges(layout, [("a", 0, 2), ("b", 1, 1), ("c", 0, 5)]) == [(64, 16), (192, 74)]


@given(layouts())
def test_buckets_have_every_tensor_in_order_and_are_as_few_as_the_largest_allows(layout):
    buckets = plan_buckets(layout)
    assert [name for bucket in buckets for name in bucket.names] == list(layout.places)
    starts = [layout.places[bucket.names[0]].offset for bucket in buckets]
    assert [bucket.start for bucket in buckets] == starts
    assert [bucket.end for bucket in buckets] == [*starts[1:], layout.size_bytes]
    offsets = [*(place.offset for place in layout.places.values()), layout.size_bytes]
    largest = max(after - before for before, after in zip(offsets, offsets[1:], strict=False))
    assert all(bucket.end - bucket.start <= largest for bucket in buckets)
    ends = dict(zip(layout.places, offsets[1:], strict=True))
    for bucket, after in zip(buckets, buckets[1:], strict=False):
        assert ends[after.names[0]] - bucket.start > largest, "its first tensor fits no more"


@given(ranges(), ranges())
def test_what_is_cut_into_spans_are_the_bytes_that_both_have(whole, spans):
    pieces = cut([(start, end - start) for start, end in whole], spans)
    assert len(pieces) == len(spans)
    for (start, end), parts in zip(spans, pieces, strict=True):
        assert all(first < last for _, first, last in parts)
        cells = [(number, byte) for number, first, last in parts for byte in range(first, last)]
        expected = [(n, b) for n, (first, last) in enumerate(whole) for b in range(first, last) if start <= b < end]
        assert cells == expected


def test_tied_parameters_come_once_and_plain_tensors_belong_to_rank_0():
    tied = torch.nn.Parameter(torch.zeros(4, 2))
    named = [("embed", tied), ("norm", torch.nn.Parameter(torch.zeros(2))), ("head", tied)]
    assert unique_shapes(named) == [("embed", (4, 2)), ("norm", (2,))]
    assert [piece.name for piece in own_pieces(named, rank=0)] == ["embed", "norm"]
    assert own_pieces(named, rank=1) == []


def test_versions_take_turns_in_two_buffers():
    assert [buffer_of(version) for version in range(4)] == [0, 1, 0, 1]
