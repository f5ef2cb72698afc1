"""Growth of weight updates: sizes, and what the ratios are made of."""

from __future__ import annotations

import pytest

from benchmarks.llama import SMOLLM2_135M, Shape
from benchmarks.weight_growth import SIZES, Size, growth, needed_bytes, of_size
from benchmarks.weight_update import MEMCPY_BYTES, Times, parts, time_memcpy

SMALL = Shape(hidden=512, layers=2, heads=8, kv_heads=4, inner=640, vocabulary=1024)


def test_sizes_are_what_they_are_called() -> None:
    named = {"10 MB": 10e6, "50 MB": 50e6, "270 MB": 270e6, "1 GB": 1e9, "2 GB": 2e9}
    assert {size.name for size in SIZES} == named.keys()
    assert all(abs(size.bytes / named[size.name] - 1) < 0.1 for size in SIZES)
    sizes = [size.bytes for size in SIZES]
    assert sizes == sorted(sizes)


def times(scale: float) -> Times:
    return {"memcpy": [0.01 * scale], "write": [0.02 * scale], "update": [0.2 * scale], "stall": [1.5]}


def test_ratios_by_hand() -> None:
    size = Size("s", SMALL, tokens=10)
    rows = {row.name: row for row in of_size(size, 2, {"at rest": times(1.0), "decoding": times(9.0)})}
    write = rows["s, 2 engines: bandwidth of the write, bytes read and written"]
    assert write.values == pytest.approx([0.75]), "twice as long as the copy, and half as much again is moved"
    assert write.met is True
    assert rows["s, 2 engines: write and update of the slowest engine"].values == pytest.approx([200.0])
    assert rows["s, 2 engines: write"].values == pytest.approx([2e-9 * SMALL.parameters / 0.02])
    assert rows["s, 2 engines: stall of running requests"].met is True


def test_growth_is_of_the_time_of_a_byte_and_of_one_engine() -> None:
    small, large = Size("small", SMALL, 10), Size("large", SMALL._replace(layers=20), 10)
    bytes_ratio = large.bytes / small.bytes
    found = {(small, 1): times(1.0), (large, 1): times(3.0 * bytes_ratio), (large, 2): times(6.0 * bytes_ratio)}
    assert {row.name: row.values for row in growth(found)} == {
        "time of each byte (write and update), large": pytest.approx([3.0]),
        "large: update of 2 engines at once": pytest.approx([2.0]),
    }


def test_memory_is_asked_for_before() -> None:
    size = Size("s", SMOLLM2_135M, 10)
    assert needed_bytes(size, 2) - needed_bytes(size, 1) == 3 * size.bytes


def test_a_large_copy_is_made_of_whole_parts_and_a_rest() -> None:
    assert parts(SIZES[2].bytes) == [SIZES[2].bytes], "that of 270 MB is one"
    assert parts(2 * MEMCPY_BYTES + 5) == [MEMCPY_BYTES, MEMCPY_BYTES, 5]
    assert parts(2 * MEMCPY_BYTES) == [MEMCPY_BYTES, MEMCPY_BYTES]
    assert len(time_memcpy(1 << 20, rounds=2)) == 2
