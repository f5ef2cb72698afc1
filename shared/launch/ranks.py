"""The role of each rank and its place in the launch: the only reader of torchrun's environment variables, which
`python -m trainer` sets too.

rank 0 is the controller, ranks 1..T are trainers, the others are engines. On every node the trainers and engines take
the node's GPUs in order (an engine takes `tensor_parallel` of them); the controller takes none. Where one node has too
few GPUs for that, trainers and engines share them: the trainers take the first ones, the engines the last.
"""

from __future__ import annotations

import datetime
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from shared.config import Config
from shared.errors import ConfigError
from shared.launch import launch_folder
from shared.launch.addresses import reachable_address
from shared.launch.deaths import REPORTS, deaths_file
from shared.launch.launch_folder import LaunchFolder

if TYPE_CHECKING:  # it takes seconds to import, and `python -m trainer --help` needs none of it
    import torch
    import torch.distributed as dist

Kind = Literal["controller", "trainer", "engine"]
MEETING_S = 900.0
"""seconds that a rank waits for rank 0"""
_kept: list[dist.Store] = []


@dataclass(frozen=True)
class Role:
    """A rank's role and place. Example: Role("trainer", rank=2, world=4, rank_in_role=1, ...) is the second trainer."""

    kind: Kind
    rank: int
    world: int
    rank_in_role: int
    """0-based number among its kind"""
    one_node: bool
    """all ranks of the launch run on this node"""
    master: str
    """address of the launch's rendezvous host"""
    device: torch.device
    """where its tensors live; the controller's is always the CPU"""
    store: dist.Store = field(repr=False)
    """key-value store of this launch attempt, which only its ranks can open"""
    host: str = field(default_factory=socket.gethostname)
    folder: Path = field(kw_only=True)
    """private folder where the ranks meet; on one node it holds the sockets too"""


class RankInfo(Protocol):
    """What a trainer or an engine reads of its role, also where it is the only rank (rollout/local_engine.py)."""

    @property
    def rank(self) -> int: ...
    @property
    def rank_in_role(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def store(self) -> dist.Store: ...


def under_torchrun() -> bool:
    """True if torchrun started this process or its parent."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def kind_of(rank: int, trainers: int) -> Kind:
    """Return the kind of a rank in a launch with `trainers` trainer ranks."""
    return "controller" if rank == 0 else "trainer" if rank <= trainers else "engine"


def rank_name(rank: int, trainers: int) -> str:
    """e.g. "engine 0 (rank 2)"; the controller has no number."""
    kind = kind_of(rank, trainers)
    number = {"controller": "", "trainer": f" {rank - 1}", "engine": f" {rank - 1 - trainers}"}[kind]
    return f"{kind}{number} (rank {rank})"


def count_gpus(device: Literal["auto", "cpu", "cuda"]) -> int:
    """Return how many GPUs of this node the ranks may use, 0 for the CPU. device: placement.device.

    Raises ConfigError where it cannot be had, and with "auto" where GPUs are there that cannot be used.
    """
    import torch

    if device == "cpu":
        if torch.version.cuda is not None:
            raise ConfigError(
                'placement.device = "cpu" needs the CPU builds of torch and vLLM, but CUDA builds are installed: '
                '`make install EXTRA=cpu`, or placement.device = "cuda"'
            )
        return 0
    gpus = torch.cuda.device_count()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    there = [] if gpus or hidden else [path.name for path in Path("/dev").glob("nvidia[0-9]*")]
    if not gpus and (device == "cuda" or there):
        why = "CUDA_VISIBLE_DEVICES is empty" if hidden else "no NVIDIA GPU is in /dev"
        if there:
            why = f"/dev/{there[0]} is there: " + (
                "the CPU build of torch is installed (`make install EXTRA=cuda` brings the other)"
                if torch.version.cuda is None
                else "is its driver new enough (`nvidia-smi`)?"
            )
        raise ConfigError(
            f'placement.device = "{device}", but torch can use no GPU; {why}. To compute on the CPU: '
            'placement.device = "cpu"'
        )
    return gpus


def shares_gpus(config: Config, gpus: int) -> bool:
    """Whether trainers and engines of a launch on one node with `gpus` GPUs share them: enough for either, too few for
    both."""
    needs = config.placement.trainers, config.engine_gpus
    return config.placement.colocate != "never" and max(needs) <= gpus < sum(needs)


def gpus_of(rank: int, node: range, config: Config, gpus: int) -> range:
    """Indices of a rank's GPUs on its node, which has the ranks `node`; beyond `gpus` where there are too few."""
    trainers, parallel = config.placement.trainers, config.rollout.tensor_parallel
    need = {"controller": 0, "trainer": 1, "engine": parallel}
    kind = kind_of(rank, trainers)
    first = sum(need[kind_of(other, trainers)] for other in range(node.start, rank))
    if kind == "engine" and len(node) == config.world_size and shares_gpus(config, gpus):
        first = gpus - parallel * (config.world_size - rank)
    return range(first, first + need[kind])


@dataclass(frozen=True)
class Nodes:
    """Which node of how many this is, for a launch that `python -m trainer` starts itself.

    The GPUs that the ranks need are spread evenly, in the order of the ranks; on CPUs a rank counts as a GPU.
    """

    count: int = 1
    number: int = 0
    address: str = "127.0.0.1"
    """address of node 0"""
    port: int = 29500

    def ranks(self, config: Config) -> range:
        """Return the ranks of this node. Raises ConfigError for more nodes than ranks can use."""
        needs = [0] + [1] * config.placement.trainers + [config.rollout.tensor_parallel] * config.placement.engines
        gpus = -(-sum(needs) // self.count)
        nodes = [sum(needs[:rank]) // gpus for rank in range(config.world_size)]
        if set(nodes) != set(range(self.count)):
            raise ConfigError(
                f"--nnodes={self.count}: placement.trainers = {config.placement.trainers}, placement.engines = "
                f"{config.placement.engines} and rollout.tensor_parallel = {config.rollout.tensor_parallel} fill only "
                f"{len(set(nodes))} of them, with {gpus} GPUs each: start on fewer nodes, or raise these settings"
            )
        return range(nodes.index(self.number), nodes.index(self.number) + nodes.count(self.number))

    def variables(self, config: Config) -> dict[str, str]:
        """Return the environment variables, as torchrun sets them, that all ranks of this node have in common."""
        return {
            "WORLD_SIZE": str(config.world_size), "LOCAL_WORLD_SIZE": str(len(self.ranks(config))),
            "MASTER_ADDR": self.address, "MASTER_PORT": str(self.port),
        }  # fmt: skip


def ranks_here() -> range:
    """Return the ranks of the launch on this node."""
    first = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
    return range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])))


def one_node() -> bool:
    """Whether all ranks of the launch run on this node."""
    world = os.environ["WORLD_SIZE"]
    return os.environ.get("LOCAL_WORLD_SIZE", world) == world


def join_node() -> LaunchFolder:
    """Enter this node's private folder, which the parent of its ranks has made. It is the folder of temporary files."""
    path = Path(os.environ["TMPDIR"])
    if not path.name.startswith(f"{launch_folder.PREFIX}{launch_folder.name_of(os.getppid())}."):
        os._exit(1)  # the parent has died, and another process has adopted this one
    if one_node():  # gloo and NCCL listen where no other host gets
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return launch_folder.enter(path)


def open_meeting(node: LaunchFolder, run_dir: Path) -> LaunchFolder:
    """Rank 0: make the folder where all ranks meet. On several nodes `invite` announces it once it holds something."""
    folder = node if one_node() else launch_folder.make(run_dir)
    (node.path / REPORTS).symlink_to(folder.path / deaths_file(0))  # the controller makes it when it listens
    if not one_node():
        from shared.launch.meeting_store import MeetingServer

        MeetingServer(folder.path, reachable_address(False, os.environ["MASTER_ADDR"])).start()
    open_store(folder).set("launch", _attempt())
    return folder


def invite(folder: LaunchFolder | None) -> None:
    """Rank 0, once: tell the other nodes where the ranks meet, or with None that the launch ends.

    Anyone can read and change what is in torchrun's store, so it is no more than a path, which the others accept only
    if the folder is private and was made for this launch.
    """
    if not one_node():
        _torchruns_store().set("folder", str(folder.path) if folder else "")


def join_meeting(node: LaunchFolder) -> LaunchFolder | None:
    """Other ranks: wait for rank 0; None if it could not begin. Raises ConfigError for a folder of another launch."""
    if one_node():
        return node
    if not (path := _torchruns_store().get("folder").decode()):
        return None
    try:
        folder = launch_folder.enter(Path(path))
        store = open_store(folder)
        if store.check(["launch"]) and store.get("launch").decode() == _attempt():
            if os.environ["LOCAL_RANK"] == "0":
                reports = folder.path / deaths_file(os.environ["RANK"])
                reports.touch()
                (node.path / REPORTS).symlink_to(reports)
            return folder
        folder.leave()
    except FileNotFoundError:
        pass
    raise ConfigError(
        f"rank 0 says that the ranks of this launch meet in {path}, but this node sees nothing there that was made for "
        "it: the run's folder (runs_dir) must be on a file system that all nodes see, under the same path"
    )


def open_store(folder: LaunchFolder) -> dist.Store:
    """Open the key-value store of this launch attempt: a file in a private folder; on several nodes that of rank 0."""
    if not one_node():
        from shared.launch.meeting_store import MeetingStore

        return MeetingStore(folder.path)
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    import torch.distributed as dist

    store = dist.FileStore(str(folder.path / f"store{count}"), -1)
    store.set_timeout(datetime.timedelta(seconds=MEETING_S))
    return store


def _torchruns_store() -> dist.Store:
    import torch.distributed as dist

    agent_hosts_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    hosts = not agent_hosts_it and os.environ["RANK"] == "0"
    timeout = datetime.timedelta(seconds=MEETING_S)
    try:
        store = dist.TCPStore(address, port, is_master=hosts, timeout=timeout, wait_for_workers=False)
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        does = f"cannot listen on port {port}" if hosts else f"cannot reach node 0 at {address}:{port}"
        raise ConfigError(f"this node {does} ({reason}): choose another --master-port or --master-addr") from error
    _kept.append(store)  # where rank 0 hosts it, it lasts as long as the process
    return dist.PrefixStore(f"maestrale/{_attempt()}", store)


def _attempt() -> str:
    """Return a name of this launch attempt, unique among those that run at the same time."""
    run, count = os.environ.get("TORCHELASTIC_RUN_ID", "run"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"{run}/{count}/{os.environ['MASTER_PORT']}"


def too_few_gpus(rank: int, own: range, config: Config, gpus: int) -> str:
    """What to tell the user where the GPUs `own` of a rank are not all there."""
    repair = "start on more nodes (--nnodes; torchrun: --nproc-per-node), or lower rollout.tensor_parallel"
    if one_node():
        parallel, placement = config.rollout.tensor_parallel, config.placement
        repair = (
            f"placement.trainers = {placement.trainers} and placement.engines x rollout.tensor_parallel = "
            f"{placement.engines * parallel} may each be at most {gpus}, so that they can share the GPUs "
            '(placement.colocate other than "never"); lower them, or start on several nodes'
        )
    kind = kind_of(rank, config.placement.trainers)
    return f"{kind} rank {rank} needs GPU {own.stop - 1} of this node, which has {gpus} (0 to {gpus - 1}): {repair}"


def read_role(config: Config, store: dist.Store, folder: Path) -> Role:
    """Read this process's role. Raises ConfigError if the launch has another number of ranks than the settings, or if
    this node has too few GPUs for its ranks."""
    import torch

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    trainers, engines = config.placement.trainers, config.placement.engines
    if world != config.world_size:
        raise ConfigError(
            f"the launch has {world} ranks, but placement.trainers = {trainers} and placement.engines = {engines} need "
            f"{config.world_size} (1 controller + {trainers} + {engines}): use --nproc-per-node={config.world_size} on "
            "one node, or change these settings"
        )
    kind = kind_of(rank, trainers)
    device, gpus = torch.device("cpu"), count_gpus(config.placement.device)
    if gpus:
        for other in ranks_here():
            if (own := gpus_of(other, ranks_here(), config, gpus)) and own.stop > gpus:
                raise ConfigError(too_few_gpus(other, own, config, gpus))
        if kind != "controller":
            device = torch.device("cuda", gpus_of(rank, ranks_here(), config, gpus).start)
    return Role(
        kind=kind, rank=rank, world=world,
        rank_in_role={"controller": 0, "trainer": rank - 1, "engine": rank - 1 - trainers}[kind], one_node=one_node(),
        master=os.environ["MASTER_ADDR"], device=device, store=store, folder=folder,
    )  # fmt: skip
