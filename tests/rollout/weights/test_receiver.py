"""Which transport an engine uses, from where everybody runs; and a buffer in host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from rollout.weights import make_sender
from rollout.weights.layout import plan_layout
from rollout.weights.receiver import check_flags, choose_transport
from rollout.weights.shm import create_buffer, host_identity, open_buffer
from shared.errors import ConfigError, RunError, SyncMismatch


def transfers(transport: str, *hosts: str, kind: str = "shm") -> list[dict[str, Any]]:
    return [{"transport": transport, "kind": kind, "host": host} for host in hosts]


@pytest.mark.parametrize(
    ("asked", "hosts", "kind", "chosen"),
    [
        ("auto", ("n0", "n0"), "shm", "shm"),
        ("auto", ("n0", "n0"), "cuda_ipc", "cuda_ipc"),
        ("auto", ("n0", "n1"), "shm", "network"),
        ("network", ("n0",), "shm", "network"),
        ("shm", ("n0",), "shm", "shm"),
    ],
)
def test_an_engine_on_the_host_of_all_trainers_reads_directly(
    asked: str, hosts: tuple[str, ...], kind: str, chosen: str
) -> None:
    assert choose_transport(transfers(asked, *hosts, kind=kind), "n0") == chosen


def test_a_transport_that_cannot_reach_is_refused_with_the_repair() -> None:
    with pytest.raises(ConfigError, match=r"n1 and an engine on n0: use rollout\.transport"):
        choose_transport(transfers("shm", "n0", "n1"), "n0")
    weights = [("w", torch.nn.Parameter(torch.zeros(2, 2)))]
    with pytest.raises(ConfigError, match="cuda_ipc"):
        make_sender("cuda_ipc", weights, torch.bfloat16, rank=0, world=1, store=dist.HashStore(), engines=1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([4, 2], "engine 2 should take version 4, .* trainer 1 holds version 2"),
        ([4, 6], "trainer 1 holds version 6"),
        ([-1, 4], "trainer 0 holds nothing complete"),
    ],
    ids=["older", "written over", "half written"],
)
def test_a_part_of_another_version_is_named(flags: list[int], message: str) -> None:
    check_flags([4, 4], 4, 2)
    with pytest.raises(SyncMismatch, match=message):
        check_flags(flags, 4, 2)


def test_a_buffer_is_one_memory_under_its_path_and_a_wrong_path_is_an_error() -> None:
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


def test_the_host_identity_names_this_host() -> None:
    assert host_identity() == host_identity() and host_identity().count("/") == 2


def test_a_write_counts_its_bytes_and_replaces_every_second_version() -> None:
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
