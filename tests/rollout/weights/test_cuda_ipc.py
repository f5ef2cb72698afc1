"""GPU buffers: where rows lie in a shard (checked on the CPU), and true IPC between two processes (needs a GPU)."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch

from rollout.weights.cuda_ipc import DeviceShard, create_shard, part_bytes
from rollout.weights.layout import BUFFERS, plan_layout
from rollout.weights.shm import export_handle, import_handle

LAYOUT = plan_layout([("a", (3, 4)), ("b", (4, 32)), ("c", (5,))], torch.bfloat16, world=2)
ROWS = [("a", 2, 1), ("b", 2, 2), ("c", 3, 2)]


def fill(shard: DeviceShard) -> None:
    """Other values in each part of each buffer."""
    for buffer in range(BUFFERS):
        shard.version_flag(buffer).fill_(40 + buffer)
        for number in range(len(ROWS)):
            shard.rows_view(buffer, number).fill_(100 * buffer + number)


def check(shard: DeviceShard) -> None:
    """They are all there, with their shapes."""
    for buffer in range(BUFFERS):
        assert shard.version_flag(buffer).item() == 40 + buffer
        views = [shard.rows_view(buffer, number) for number in range(len(ROWS))]
        assert [tuple(view.shape) for view in views] == [(1, 4), (2, 32), (2,)]
        for number, view in enumerate(views):
            assert (view == 100 * buffer + number).all()


def test_parts_of_a_shard_do_not_overlap() -> None:
    shard = DeviceShard(LAYOUT, ROWS, torch.zeros(BUFFERS * part_bytes(LAYOUT, ROWS), dtype=torch.uint8))
    assert shard.part_bytes == part_bytes(LAYOUT, ROWS)
    fill(shard)
    check(shard)
    sent = sum(shard.range_view(0, number).numel() for number in range(len(shard.ranges)))
    assert 2 * (4 + 64 + 2) <= sent < shard.part_bytes


def read_elsewhere(handle: dict[str, Any]) -> None:
    """The engine's process."""
    check(DeviceShard(LAYOUT, ROWS, import_handle(handle)))


@pytest.mark.gpu
def test_another_process_reads_the_same_gpu_memory() -> None:
    shard = create_shard(LAYOUT, ROWS, torch.device("cuda", 0))
    fill(shard)
    torch.cuda.synchronize()
    process = multiprocessing.get_context("spawn").Process(target=read_elsewhere, args=(export_handle(shard.memory),))
    process.start()
    process.join(50)
    assert process.exitcode == 0
