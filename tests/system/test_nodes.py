"""Whole launches on two nodes (two torchrun agents), with several trainers and engines that meet in any order.

pytest --soak -n 0 tests/system/test_nodes.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.conftest import Start
from tests.system.launch import Launch, free_port

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


def two_nodes(start: Start, folder: Path, count: int, first: int = 0, **settings: float) -> list[Launch]:
    """Start `count` trainers on the first node and `count` engines on the second; or `first` ranks on the first."""
    port, agents, first = free_port(), [], first or 1 + count
    for node, ranks in enumerate((first, 1 + 2 * count - first)):
        where = [f"--node-rank={node}", f"--nproc-per-node={ranks}", f"--master-port={port}"]
        agents.append(start(
            folder, torchrun=("--nnodes=2", "--master-addr=127.0.0.1", *where), rollout__transport="network",
            placement__trainers=count, placement__engines=count, deadlines__start_s=900, **settings,
        ))  # fmt: skip
    return agents


def assert_trained(agents: list[Launch], steps: int) -> None:
    codes = [one.wait(900) for one in agents]
    assert codes == [0, 0], agents[0].output[-6000:] + agents[1].output[-3000:]
    assert agents[0].trained_prompts() == list(range(4 * steps))
    assert all(row["sync/logprob_diff_mean"] < 1e-4 for row in agents[0].metrics())


@pytest.mark.parametrize(("count", "launch"), [(2, 0), (2, 1), (2, 2), (3, 0), (3, 1)])
def test_as_many_engines_as_trainers_train_over_the_network(start: Start, tmp_path: Path, count: int, launch: int):
    """Each point at which they meet comes after a random delay of up to 0.3 s."""
    agents = two_nodes(start, tmp_path, count, steps=3, delay_s=0.3)
    assert_trained(agents, 3)
    trainers, engines = (agent.delays for agent in agents)
    assert trainers["NetworkSender.send"] >= 3 * count and engines["NetworkReceiver.wait_for"] >= 3 * count
    assert trainers["Chain._join"] and engines["Chain._join"], (trainers, engines)


def test_trainers_on_two_nodes_hold_a_replica_each_and_go_on_as_shards_of_one(start: Start, tmp_path: Path) -> None:
    agents = two_nodes(start, tmp_path, 2, first=2, steps=3)
    assert_trained(agents, 3)
    assert agents[0].told("replicas 2 of 1 trainers"), agents[0].output[-6000:]
    again = two_nodes(start, tmp_path, 2, first=2, steps=5, placement__replicas=1)
    assert_trained(again, 5)
    assert not again[0].told("replicas 2")


def test_an_engine_that_is_killed_gets_the_weights_again_while_the_others_go_on(start: Start, tmp_path: Path):
    agents = two_nodes(start, tmp_path, 2, steps=12)
    agents[0].until_step(3)
    os.kill(agents[1].engine_pid(3), signal.SIGKILL)
    assert_trained(agents, 12)
    assert agents[0].told("was started again in"), agents[0].output[-6000:]


# ---- a partition -----------------------------------------------------------------------------------------------------

NAMESPACES, LINK = ("maestrale-node0", "maestrale-node1"), "mnode"
ADDRESSES = ("10.213.72.1", "10.213.72.2")


def ip(words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words.split()], capture_output=True, text=True)


@pytest.fixture
def namespaces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two network namespaces, joined by a veth pair of which each has an end."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces are needed: run this as root")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", LINK)
    first, second = NAMESPACES
    try:
        for words in (
            f"netns add {first}", f"netns add {second}",
            f"link add {LINK} netns {first} type veth peer name {LINK} netns {second}",
            *(f"-n {NAMESPACES[node]} addr add {ADDRESSES[node]}/30 dev {LINK}" for node in (0, 1)),
            *(f"-n {name} link set {device} up" for name in NAMESPACES for device in ("lo", LINK)),
        ):  # fmt: skip
            if (done := ip(words)).returncode:
                pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
        yield
    finally:
        ip(f"netns del {first}")
        ip(f"netns del {second}")


def cut(how: str, undo: bool = False) -> None:
    """Cut the link between the nodes. "silent": packets are lost; "reset": each side answers those to the other with
    RST, since it has taken the other's address for its own."""
    for name, other in zip(NAMESPACES, reversed(ADDRESSES), strict=True):
        if how == "silent":
            done = ip(f"-n {name} link set {LINK} {'up' if undo else 'down'}")
        else:
            done = ip(f"-n {name} addr {'del' if undo else 'add'} {other}/32 dev lo")
        assert done.returncode == 0, done.stderr


def start_nodes(start: Start, folder: Path, trainers: int) -> list[Launch]:
    """The controller and a trainer on the first node, an engine and any other trainer on the second."""
    port, agents = free_port(), []
    for node, ranks in enumerate((2, trainers)):
        where = [f"--node-rank={node}", f"--nproc-per-node={ranks}", f"--master-port={port}"]
        (folder / f"node{node}").mkdir(exist_ok=True)
        agents.append(start(
            folder, torchrun=("--nnodes=2", f"--master-addr={ADDRESSES[0]}", *where), inside=NAMESPACES[node],
            log_dir=folder / f"node{node}", placement__trainers=trainers, deadlines__sync_s=SYNC_S, steps=12,
        ))  # fmt: skip
    return agents


SYNC_S = 60
"""a rank counts as hung after half of it"""


@pytest.mark.parametrize("how", ["silent", "reset"])
@pytest.mark.parametrize("trainers", [1, 2])
def test_nodes_that_lose_each_other_end_say_so_and_go_on_later(
    start: Start, tmp_path: Path, namespaces: None, trainers: int, how: str
) -> None:
    agents = start_nodes(start, tmp_path, trainers)
    agents[0].until_step(3)
    agents[1].remember_processes()
    began = time.monotonic()
    cut(how)
    codes = [agent.wait(300) for agent in agents]
    print(f"{how}, {trainers} trainers: exit codes {codes} after {time.monotonic() - began:.0f} s")
    for agent in agents:
        print("\n".join(line for line in agent.output.splitlines() if "rank" in line)[-1500:])
    assert all(codes), "both sides end with an error"
    assert [agent.survivors() for agent in agents] == [[], []]
    cut(how, undo=True)
    agents = start_nodes(start, tmp_path, trainers)
    assert [agent.wait(600) for agent in agents] == [0, 0], agents[0].output[-4000:] + agents[1].output[-2000:]
    assert agents[0].trained_prompts() == list(range(4 * 12)), "every group once"
