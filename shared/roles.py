"""Which part a rank plays, and where: the only reader of torchrun's environment variables.

rank 0 is the controller, ranks 1..T are trainers, the others are engines. On every node the trainers and engines take
the node's GPUs in order (an engine takes `tensor_parallel` of them); the controller takes none.
What it does not: start processes or process groups. Who calls this: `trainer/__main__.py`, once per rank.
"""

from __future__ import annotations

import datetime
import os
import socket
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist

from shared.config import Config
from shared.errors import ConfigError

Kind = Literal["controller", "trainer", "engine"]


@dataclass(frozen=True)
class Role:
    """One rank's part. Example: Role("trainer", rank=2, world=4, rank_in_role=1, ...) is the second trainer."""

    kind: Kind
    rank: int
    world: int
    rank_in_role: int
    """0.. among its kind"""
    local_rank: int
    one_node: bool
    """all ranks of the launch run on this node"""
    master: str
    """address of the launch's rendezvous host"""
    device: torch.device
    """where its tensors live; the controller's is always the CPU"""
    store: dist.Store = field(repr=False)
    """key-value store of this launch attempt (torchrun's TCPStore, prefixed)"""
    host: str = field(default_factory=socket.gethostname)

    @property
    def name(self) -> str:
        """e.g. "trainer 1 (rank 2)"."""
        return f"{self.kind} {self.rank_in_role} (rank {self.rank})"


def under_torchrun() -> bool:
    """True if torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def kind_of(rank: int, trainers: int) -> Kind:
    """Rank -> kind, for `trainers` trainer ranks."""
    return "controller" if rank == 0 else "trainer" if rank <= trainers else "engine"


def rank_name(rank: int, trainers: int) -> str:
    """e.g. "engine 0 (rank 2)"; the controller has no number."""
    kind = kind_of(rank, trainers)
    number = {"controller": "", "trainer": f" {rank - 1}", "engine": f" {rank - 1 - trainers}"}[kind]
    return f"{kind}{number} (rank {rank})"


def first_gpu(rank: int, local_rank: int, trainers: int, tensor_parallel: int) -> int:
    """Index of the first GPU of a rank on its node: the ranks before it on the node took theirs."""
    need = {"controller": 0, "trainer": 1, "engine": tensor_parallel}
    return sum(need[kind_of(other, trainers)] for other in range(rank - local_rank, rank))


def open_store(rank: int, deadline_s: float) -> dist.Store:
    """Connect to torchrun's store. Keys carry the run id and the restart count, so a restarted launch starts clean."""
    agent_hosts_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=not agent_hosts_it and rank == 0,
        timeout=datetime.timedelta(seconds=deadline_s),
    )
    attempt = f"{os.environ.get('TORCHELASTIC_RUN_ID', 'run')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return dist.PrefixStore(f"maestrale/{attempt}", store)


def read_role(config: Config, store: dist.Store) -> Role:
    """The part of this process. Raises ConfigError if the launch has another number of ranks than the settings."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    trainers, engines = config.placement.trainers, config.placement.engines
    if world != config.world_size:
        raise ConfigError(
            f"the launch has {world} ranks, but placement.trainers = {trainers} and placement.engines = {engines} need "
            f"{config.world_size} (1 controller + {trainers} + {engines}): use --nproc-per-node={config.world_size} on "
            "one node, or change these settings"
        )
    kind = kind_of(rank, trainers)
    device = torch.device("cpu")
    if kind != "controller" and torch.cuda.is_available():
        index = first_gpu(rank, local_rank, trainers, config.rollout.tensor_parallel)
        if index >= torch.cuda.device_count():
            raise ConfigError(
                f"{kind} rank {rank} needs GPU {index} of this node, which has {torch.cuda.device_count()}: start "
                "fewer ranks here (--nproc-per-node) or lower rollout.tensor_parallel"
            )
        device = torch.device("cuda", index)
    return Role(
        kind=kind,
        rank=rank,
        world=world,
        rank_in_role={"controller": 0, "trainer": rank - 1, "engine": rank - 1 - trainers}[kind],
        local_rank=local_rank,
        one_node=int(os.environ.get("LOCAL_WORLD_SIZE", world)) == world,
        master=os.environ["MASTER_ADDR"],
        device=device,
        store=store,
    )
