"""One rank that plays the weight transfer alone: trainers and engines that meet anew, again and again.

Usage: RANK=N python chain_rank.py FOLDER PLAYS: the fields of each `Play` as JSON; all have as many trainers. Ranks
below `trainers` train, the others are engines; each comes to every point of every meeting after a random delay. An
engine reads the slots as an engine process does, and compares what it read with the trainers' checksums. What a rank
measured it prints as one JSON line.
"""

import faulthandler
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rollout.weights import make_sender
from rollout.weights.checksum import add_parts, checksum_rows
from rollout.weights.layout import buffer_of
from rollout.weights.proof import compare_checksums
from rollout.weights.receiver import WeightReceiver

SMALL = [("embed", (37, 16)), ("q", (8, 16)), ("k", (3, 16)), ("norm", (5,)), ("single", (1, 4))]
LARGE = [("embed", (65536, 256)), *((f"layer{n}", (2048, 1024)) for n in range(16)), ("norm", (1024,))]
"""about 100 MB in bfloat16, a third of them in one tensor"""
DEADLINE_S = 400.0


@dataclass
class Play:
    """What the ranks play."""

    trainers: int
    engines: int
    meetings: int = 1
    versions: int = 2
    delay_s: float = 0.0
    large: bool = False
    transport: str = "network"
    die: Sequence[int] = ()
    """(engine, version, tensors): its process dies after so many tensors of that version, and another one comes"""

    def dawdle(self) -> None:
        """Come late by a random time."""
        time.sleep(random.uniform(0, self.delay_s))


def resident_bytes(name: str) -> int:
    """A field of /proc/self/status, e.g. VmHWM: the highest resident memory since it was reset."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


def full_weights(version: int) -> dict[str, torch.Tensor]:
    """What all trainers together hold at a version of SMALL."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SMALL}


def train(play: Play, store: dist.Store, rank: int) -> dict[str, object]:
    """Publish all versions, each once every engine has taken the one before."""
    mesh, shapes = init_device_mesh("cpu", (play.trainers,)), LARGE if play.large else SMALL
    whole = {name: torch.zeros(shape) for name, shape in shapes}
    parameters = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in whole.items()}
    play.dawdle()
    sender = make_sender(
        play.transport, list(parameters.items()), torch.bfloat16, rank=rank, world=play.trainers, store=store,
        engines=play.engines,
    )  # fmt: skip
    store.set(f"description/{rank}", json.dumps(sender.describe()))
    own = 0
    for version in range(play.versions):
        values = {} if play.large else full_weights(version)
        for name, parameter in parameters.items():
            local = parameter.to_local()
            local.copy_(distribute_tensor(values[name], mesh, [Shard(0)]).to_local()) if values else local.normal_()
        play.dawdle()
        own, _ = sender.write(version)
        store.set(f"written/{version}/{rank}", json.dumps(sender.checksums()))
        store.wait([f"taken/{version}/{engine}" for engine in range(play.engines)], timedelta(seconds=DEADLINE_S))
    sender.close()
    if play.transport != "network":
        return {"own": own}
    assert sender.network is not None and sender.network.chain is not None and sender.network.error is None
    return {"own": own, "sent": sender.network.chain.sent_bytes}


def taken(receiver: WeightReceiver, version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a version, as an engine's process reads them."""
    if receiver.slots is not None:
        yield from receiver.slots.tensors(version, receiver.engine)
        return
    assert receiver.memory is not None
    for name in receiver.layout.places:
        yield name, receiver.memory.tensor(buffer_of(version), name)


def sample(play: Play, store: dist.Store, engine: int) -> dict[str, object]:
    """Take every version and compare it. Returns the growth of this rank's memory."""
    play.dawdle()
    transfers = [json.loads(store.get(f"description/{rank}")) for rank in range(play.trainers)]
    play.dawdle()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = resident_bytes("VmRSS")
    receiver = WeightReceiver(transfers, engine, store, torch.device("cpu"))
    dying = list(play.die)
    for version in range(play.versions):
        keys = [f"written/{version}/{rank}" for rank in range(play.trainers)]
        store.wait(keys, timedelta(seconds=DEADLINE_S))
        truth = add_parts(json.loads(store.get(key)) for key in keys)
        play.dawdle()
        sums = dict[str, int]()
        while len(sums) < len(receiver.layout.places):
            receiver.wait_for(version, DEADLINE_S)
            for name, tensor in taken(receiver, version):
                assert play.large or torch.equal(tensor, full_weights(version)[name].to(torch.bfloat16)), name
                sums[name] = checksum_rows(tensor, 0, torch.bfloat16)
                if dying == [engine, version, len(sums)]:
                    receiver.engine_lost()
                    play.dawdle()
                    receiver.engine_back()
                    dying, sums = [], {}
                    break
        compare_checksums(truth, sums, engine)
        store.set(f"taken/{version}/{engine}", "1")
    grown = resident_bytes("VmHWM") - before
    report = {"grown": grown, "transport": receiver.transport}
    if receiver.network is None:
        receiver.close()
        return {**report, "payload": receiver.layout.payload_bytes}
    while not receiver.network.stopped:
        time.sleep(0.01)
    receiver.close()
    assert receiver.network.chain is not None and receiver.network.error is None
    return {**report, "sent": receiver.network.chain.sent_bytes}


def main(folder: str, plays: list[Play]) -> None:
    """Play one rank of every meeting."""
    rank, trainers = int(os.environ["RANK"]), plays[0].trainers
    store = dist.FileStore(f"{folder}/store", -1)
    store.set_timeout(timedelta(seconds=DEADLINE_S))
    torch.set_num_threads(1)
    if rank < trainers:
        dist.init_process_group("gloo", store=dist.PrefixStore("trainers", store), rank=rank, world_size=trainers)
    for act, play in enumerate(plays):
        for number in range(play.meetings if rank < trainers + play.engines else 0):
            faulthandler.dump_traceback_later(DEADLINE_S - 10)  # a rank that hangs says where
            random.seed(f"{number} {rank}")
            torch.manual_seed(1000 * number + rank)
            meeting = dist.PrefixStore(f"{act}/{number}", store)
            report = train(play, meeting, rank) if rank < trainers else sample(play, meeting, rank - trainers)
            sys.stdout.write(json.dumps({"rank": rank, "play": act, "meeting": number, **report}) + "\n")
            sys.stdout.flush()


def command(folder: Path, *plays: Play) -> list[str]:
    """What starts a rank."""
    return [sys.executable, __file__, str(folder), json.dumps([asdict(play) for play in plays])]


if __name__ == "__main__":
    main(sys.argv[1], [Play(**play) for play in json.loads(sys.argv[2])])
