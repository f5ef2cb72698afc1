"""Which transport an engine uses, from where everybody runs, and where bytes lie: in host memory, in the two slots
through which a model streams, and in a GPU's shard (checked on the CPU; true IPC needs a GPU)."""

import multiprocessing
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rollout.weights import make_sender, slots
from rollout.weights.cuda_ipc import DeviceShard, create_shard, part_bytes
from rollout.weights.layout import BUFFERS, plan_layout
from rollout.weights.receiver import check_flags, choose_transport
from rollout.weights.shm import create_buffer, export_handle, host_identity, import_handle, open_buffer
from rollout.weights.slots import WeightSlots
from shared.errors import ConfigError, DeadlineExceeded, RunError, SyncMismatch


def transfers(transport: str, *hosts: str, kind: str = "shm") -> list[dict[str, Any]]:
    return [{"transport": transport, "kind": kind, "host": host} for host in hosts]


@pytest.mark.parametrize(("asked", "hosts", "kind", "chosen"), [
    ("auto", ("n0", "n0"), "shm", "shm"), ("auto", ("n0", "n0"), "cuda_ipc", "cuda_ipc"),
    ("auto", ("n0", "n1"), "shm", "network"), ("network", ("n0",), "shm", "network"), ("shm", ("n0",), "shm", "shm"),
])  # fmt: skip
def test_an_engine_on_the_host_of_all_trainers_reads_directly(asked, hosts, kind, chosen):
    assert choose_transport(transfers(asked, *hosts, kind=kind), "n0") == chosen


def test_a_transport_that_cannot_reach_is_refused_with_the_repair():
    with pytest.raises(ConfigError, match=r"n1 and an engine on n0: use rollout\.transport"):
        choose_transport(transfers("shm", "n0", "n1"), "n0")
    weights = [("w", torch.nn.Parameter(torch.zeros(2, 2)))]
    with pytest.raises(ConfigError, match="cuda_ipc"):
        make_sender("cuda_ipc", weights, torch.bfloat16, rank=0, world=1, store=dist.HashStore(), engines=1)


@pytest.mark.parametrize(("flags", "message"), [
    ([4, 2], "engine 2 should take version 4, .* trainer 1 holds version 2"), ([4, 6], "trainer 1 holds version 6"),
    ([-1, 4], "trainer 0 holds nothing complete"),
])  # fmt: skip
def test_a_part_of_another_version_is_named(flags, message):
    check_flags([4, 4], 4, 2)
    with pytest.raises(SyncMismatch, match=message):
        check_flags(flags, 4, 2)


def test_a_buffer_is_one_memory_under_its_path_and_a_wrong_path_is_an_error():
    layout = plan_layout([("w", (4, 3))], torch.float32, world=1)
    ours = create_buffer(layout)
    theirs = open_buffer(ours.path, layout)
    ours.tensor(1, "w").copy_(torch.arange(12.0).view(4, 3))
    assert torch.equal(theirs.tensor(1, "w"), torch.arange(12.0).view(4, 3))
    assert theirs.version_flags(0) == [-1] and not theirs.tensor(0, "w").any()
    theirs.close()
    ours.close()
    with pytest.raises(RunError, match="its owner died, or runs elsewhere"):
        open_buffer("/proc/1/fd/99999", layout)


def test_the_host_identity_names_this_host():
    assert host_identity() == host_identity() and host_identity().count("/") == 2


def test_a_write_counts_its_bytes_and_replaces_every_second_version():
    weight = torch.nn.Parameter(torch.ones(4, 3))
    sender = make_sender("shm", [("w", weight)], torch.bfloat16, rank=0, world=1, store=dist.HashStore(), engines=1)
    memory = open_buffer(sender.describe()["path"], sender.layout)
    for version in range(3):
        with torch.no_grad():
            weight.fill_(version)
        assert sender.write(version)[0] == 24
    assert [memory.tensor(buffer, "w")[0, 0].item() for buffer in (0, 1)] == [2, 1]
    assert [memory.version_flags(buffer)[0] for buffer in (0, 1)] == [2, 1]
    memory.close()
    sender.close()


BUCKETS = plan_layout([("a", (4, 16)), ("b", (2, 16)), ("c", (2, 16)), ("d", (4, 16))], torch.float32, world=1)
"""three: a; b and c; d"""


def test_each_bucket_is_read_once_it_is_complete_and_is_free_once_every_worker_has_it(monkeypatch):
    monkeypatch.setattr(slots, "DELIVERY_DEADLINE_S", 0.0)
    rank = WeightSlots.create(BUCKETS, 2, torch.device("cpu"))
    workers = [WeightSlots.open(BUCKETS, **rank.describe()) for _ in range(2)]
    rank.begin(7)
    values = {
        name: torch.full(place.shape, float(number)) for number, (name, place) in enumerate(BUCKETS.places.items())
    }
    for number in (0, 1):
        names = rank.buckets[number].names
        rank.slot(number).copy_(torch.cat([values[name].flatten() for name in names]).view(torch.uint8))
        rank.fill(number)
    for reader, worker in enumerate(workers):
        assert rank.taken == 0, "the other worker has not read the first bucket"
        stream = worker.tensors(7, engine=3, reader=reader)
        for name in ("a", "b", "c"):
            received, tensor = next(stream)
            assert received == name and torch.equal(tensor, values[name])
        with pytest.raises(DeadlineExceeded, match="engine process 3"):
            next(stream)  # the third bucket is not complete
    assert (rank.filled, rank.taken) == (2, 2)
    with pytest.raises(DeadlineExceeded):
        next(workers[0].tensors(6, engine=3))
    rank.begin(8)
    assert (rank.filled, rank.taken) == (0, 0)
    for side in (rank, *workers):
        side.close()


SHARDED = plan_layout([("a", (3, 4)), ("b", (4, 32)), ("c", (5,))], torch.bfloat16, world=2)
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


def test_parts_of_a_shard_do_not_overlap():
    shard = DeviceShard(SHARDED, ROWS, torch.zeros(BUFFERS * part_bytes(SHARDED, ROWS), dtype=torch.uint8))
    assert shard.part_bytes == part_bytes(SHARDED, ROWS)
    fill(shard)
    check(shard)
    sent = sum(shard.range_view(0, number).numel() for number in range(len(shard.ranges)))
    assert 2 * (4 + 64 + 2) <= sent < shard.part_bytes


def read_elsewhere(handle: dict[str, Any]) -> None:
    """The engine's process."""
    check(DeviceShard(SHARDED, ROWS, import_handle(handle)))


@pytest.mark.gpu
def test_another_process_reads_the_same_gpu_memory():
    shard = create_shard(SHARDED, ROWS, torch.device("cuda", 0))
    fill(shard)
    torch.cuda.synchronize()
    process = multiprocessing.get_context("spawn").Process(target=read_elsewhere, args=(export_handle(shard.memory),))
    process.start()
    process.join(300)
    assert process.exitcode == 0
