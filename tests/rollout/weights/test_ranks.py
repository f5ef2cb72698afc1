"""Two true trainer ranks with sharded weights, unevenly, to one engine: shared memory and network alike."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rollout.weights.checksum import add_parts, checksum_rows
from rollout.weights.layout import buffer_of
from rollout.weights.proof import compare_checksums
from rollout.weights.receiver import WeightReceiver
from shared.errors import SyncMismatch
from tests.rollout.weights.sender_rank import VERSIONS, full_weights

WORLD = 2
pytestmark = [pytest.mark.slow, pytest.mark.timeout(360)]


@contextmanager
def sender_ranks(transport: str) -> Iterator[dist.Store]:
    """Two processes; the store they talk through."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=150), wait_for_workers=False)
    script = Path(__file__).with_name("sender_rank.py")
    processes = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(WORLD), str(store.port), transport])
        for rank in range(WORLD)
    ]
    try:
        yield store
        assert [process.wait(60) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("transport", ["auto", "network"])
def test_two_ranks_deliver_every_version_without_a_gather(transport: str) -> None:
    with sender_ranks(transport) as store:
        transfers = [json.loads(store.get(f"description/{rank}")) for rank in range(WORLD)]
        receiver = WeightReceiver(transfers, 0, store, torch.device("cpu"))
        assert receiver.transport == ("network" if transport == "network" else "shm")
        for version in range(VERSIONS):
            told = [json.loads(store.get(f"written/{version}/{rank}")) for rank in range(WORLD)]
            receiver.wait_for(version, 90)
            if receiver.slots is not None:
                views = {name: tensor.clone() for name, tensor in receiver.slots.tensors(version, 0)}
            else:
                assert receiver.memory is not None
                views = {name: receiver.memory.tensor(buffer_of(version), name) for name in receiver.layout.places}
            for name, value in full_weights(version).items():
                assert torch.equal(views[name], value.to(torch.bfloat16)), name
            sums = {name: checksum_rows(view, 0, torch.bfloat16) for name, view in views.items()}
            compare_checksums(add_parts(part["checksums"] for part in told), sums, 0)
            assert sum(part["bytes"] for part in told) == receiver.layout.payload_bytes
            assert all(part["bytes"] < receiver.layout.payload_bytes for part in told)
            if transport != "network":
                with pytest.raises(SyncMismatch, match=f"take version {version + 2}, .* trainer 0 holds version"):
                    receiver.wait_for(version + 2, 1)
            store.set(f"taken/{version}", "1")
    receiver.close()
