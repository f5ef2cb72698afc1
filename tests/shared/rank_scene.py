"""A two-rank scene for test_watchdog.py: `python rank_scene.py RANK FOLDER HEARTBEAT_S`.

Rank 0 plays the controller (hub, keeper, event loop), rank 1 a trainer that answers calls. Real sockets and processes.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from shared.launch import deaths, watchdog
from shared.launch.calls import call, request
from shared.launch.messages import Register
from shared.launch.ranks import Role, kind_of
from shared.launch.rpc import Hub, TrainerLink


def make_role(rank: int, folder: Path) -> Role:
    store, device = dist.FileStore(str(folder / "store"), -1), torch.device("cpu")
    return Role(kind_of(rank, 1), rank, 2, 0, True, "127.0.0.1", device, store, folder=folder)


class Doubler:
    """A rank that doubles."""

    @call("optimiser step", deadline=10)
    def step(self, learning_rate: float) -> float:
        return 2 * learning_rate

    @call("stop", deadline=10, last=True)
    def stop(self) -> None: ...


def mourn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
    os._exit(1)


async def controller(role: Role, heartbeat_s: float) -> None:
    keeper = watchdog.PulseKeeper(role, "127.0.0.1", heartbeat_s)
    keeper.on_death = mourn
    keeper.on_asked = lambda name, asked: print("asked", asked, name, flush=True)
    hub = Hub(role)
    receiving = asyncio.ensure_future(hub.receive())
    keeper.start()
    await hub.wait_for_ranks(range(1, 2), 30)
    assert isinstance(hub.registered[1], Register)
    print("norm", await hub.call(1, request(Doubler.step, 0.5), 10), flush=True)
    while 1 not in keeper.heard or keeper.heard[1][1].phase != "waiting for the controller":
        keeper.turn()
        await asyncio.sleep(0.05)
    print("ready", flush=True)
    for _ in range(600):
        keeper.turn()
        await asyncio.sleep(0.1)
    await hub.call(1, request(Doubler.stop), 10)
    receiving.cancel()


def trainer(role: Role, heartbeat_s: float) -> None:
    watchdog.Pulse(role, heartbeat_s).start()
    TrainerLink(role).serve(Doubler())


def main() -> None:
    rank, folder, heartbeat_s = int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    watchdog.die_with_parent()
    watchdog.open_stacks(folder, f"rank{rank}")
    role = make_role(rank, folder)
    if rank:
        deaths.only_note_requests()
    if rank == 0:
        asyncio.run(controller(role, heartbeat_s))
    else:
        trainer(role, heartbeat_s)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
