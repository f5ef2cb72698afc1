"""A controller and a trainer for test_watchdog.py, over real sockets: `rank_scene.py HEARTBEAT_S` reads folders, forks
both ranks for each, and prints their process ids and, when they have ended, their exit codes."""

import asyncio
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from shared.launch import deaths, watchdog
from shared.launch.calls import call, request
from shared.launch.ranks import Role, kind_of
from shared.launch.rpc import Hub, TrainerLink


class Doubler:
    """A rank that doubles."""

    @call("optimiser step", deadline=10)
    def step(self, learning_rate: float) -> float:
        return 2 * learning_rate


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
    print("norm", await hub.call(1, request(Doubler.step, 0.5), 10), flush=True)
    while 1 not in keeper.heard or keeper.heard[1][1].phase != "waiting for the controller":
        keeper.turn()
        await asyncio.sleep(0.05)
    print("ready", flush=True)
    while not receiving.done():
        keeper.turn()
        await asyncio.sleep(0.1)


def run(rank: int, folder: Path, heartbeat_s: float) -> None:
    output = os.open(folder / f"rank{rank}.out", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    watchdog.die_with_parent()
    watchdog.open_stacks(folder, f"rank{rank}")
    store, device = dist.FileStore(str(folder / "store"), -1), torch.device("cpu")
    role = Role(kind_of(rank, 1), rank, 2, 0, True, "127.0.0.1", device, store, folder=folder)
    if rank:
        deaths.only_note_requests()
        watchdog.Pulse(role, heartbeat_s).start()
        TrainerLink(role).serve(Doubler())
    else:
        asyncio.run(controller(role, heartbeat_s))


if __name__ == "__main__":
    for line in sys.stdin:
        pids: list[int] = []
        while len(pids) < 2:
            if (pid := os.fork()) == 0:
                run(len(pids), Path(line.strip()), float(sys.argv[1]))
                os._exit(0)
            pids.append(pid)
        print(*pids, flush=True)
        print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids), flush=True)
