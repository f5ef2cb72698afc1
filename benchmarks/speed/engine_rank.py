"""One rollout rank as a launch has it, in a process of its own: our worker, our engine, our end of the wire."""

from __future__ import annotations

import asyncio
import multiprocessing
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from shared.config import Config
from shared.ranks import Kind, Role
from shared.watchdog import die_with_parent

HOST = "127.0.0.1"
RANK, WORLD = 1, 2
"""rank 0 is the controller; it also holds the weights here"""


def device() -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def role(rank: int, store: dist.Store, folder: Path) -> Role:
    """Of the controller (0) or of the engine (RANK)."""
    kind: Kind = "engine" if rank == RANK else "controller"
    where = device() if rank == RANK else torch.device("cpu")
    return Role(kind, rank, WORLD, 0, rank, True, HOST, where, store, folder=folder)


def be_rank(port: int, folder: Path, settings: str, model_dir: str) -> None:
    """The process: serves until Stop."""
    die_with_parent()
    store = dist.TCPStore(HOST, port, is_master=False)
    from rollout.worker import serve  # late, as in a launch
    from shared.rpc import EngineLink

    async def work() -> None:
        link = EngineLink(role(RANK, store, folder))
        await link.register()
        await serve(link, Config.model_validate_json(settings), role(RANK, store, folder), model_dir)
        link.close()

    asyncio.run(work())


def start(port: int, folder: Path, config: Config, model_dir: str) -> BaseProcess:
    """Start the process; the launch's store listens at this port."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=be_rank, args=(port, folder, config.model_dump_json(), model_dir))
    process.start()
    return process
