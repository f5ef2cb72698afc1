"""One trainer rank with FSDP2-like shards, as its own process: publishes versions 0, 1, 2 and tells its checksums.

Usage: python sender_rank.py RANK WORLD PORT TRANSPORT.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rollout.weights import make_sender

SHAPES = [("embed", (37, 16)), ("q", (8, 16)), ("k", (3, 16)), ("norm", (5,)), ("single", (1, 4))]
VERSIONS = 3


def full_weights(version: int) -> dict[str, torch.Tensor]:
    """What all ranks together hold at a version, float32."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES}


def main(rank: int, world: int, port: int, transport: str) -> None:
    """Play one rank."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=150))
    dist.init_process_group("gloo", store=dist.PrefixStore("trainers", store), rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    parameters = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in full_weights(0).items()}
    sender = make_sender(
        transport, list(parameters.items()), torch.bfloat16, rank=rank, world=world, store=store, engines=1
    )
    store.set(f"description/{rank}", json.dumps(sender.describe()))
    for version in range(VERSIONS):
        for name, value in full_weights(version).items():
            parameters[name].to_local().copy_(distribute_tensor(value, mesh, [Shard(0)]).to_local())
        size_bytes, _ = sender.write(version)
        told = {"bytes": size_bytes, "checksums": sender.checksums()}
        store.set(f"written/{version}/{rank}", json.dumps(told))
        store.get(f"taken/{version}")
    sender.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
