"""Whole launches on two nodes, with trainers and engines that meet in any order, deaths and partitions between them.

pytest --soak -n 0 tests/system/test_nodes.py
"""

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.system.conftest import Start
from tests.system.launch import Launch, free_port

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


def start_nodes(
    start: Start, folder: Path, ranks: Sequence[int], trainers: int, engines: int, address: str = "127.0.0.1",
    command: str = "torchrun", spaces: Sequence[str] = ("", ""), **settings: Any,
) -> list[Launch]:  # fmt: skip
    """ranks: on each of the two nodes. spaces: their network namespaces."""
    port, agents = free_port(), []
    for node, count in enumerate(ranks):
        where = ("--nnodes=2", f"--node-rank={node}", f"--master-addr={address}", f"--master-port={port}")
        command_line = (
            {"options": where} if command == "trainer" else {"torchrun": (*where, f"--nproc-per-node={count}")}
        )
        agents.append(start(
            folder, command=command, log_dir=folder / f"node{node}", inside=spaces[node], deadlines__start_s=900,
            placement__trainers=trainers, placement__engines=engines, **command_line, **settings,
        ))  # fmt: skip
    return agents


def assert_trained(agents: list[Launch], steps: int) -> None:
    assert [one.wait() for one in agents] == [0, 0], agents[0].output[-6000:] + agents[1].output[-3000:]
    assert agents[0].trained_prompts() == list(range(4 * steps)), "every group once"
    assert all(row["sync/logprob_diff_mean"] < 1e-4 for row in agents[0].metrics())


@pytest.mark.parametrize(("count", "launch"), [(2, 0), (2, 1), (2, 2), (3, 0), (3, 1)])
def test_as_many_engines_as_trainers_train_over_the_network(start, tmp_path, count, launch):
    """Each point at which they meet comes after a random delay of up to 0.3 s."""
    over = {"rollout__transport": "network", "steps": 3, "delay_s": 0.3}
    agents = start_nodes(start, tmp_path, (1 + count, count), count, count, **over)
    assert_trained(agents, 3)
    trainers, engines = (agent.delays for agent in agents)
    assert trainers["NetworkSender.send"] >= 3 * count and engines["NetworkReceiver.wait_for"] >= 3 * count
    assert trainers["Chain._join"] and engines["Chain._join"], (trainers, engines)


def test_trainers_on_two_nodes_hold_a_replica_each_and_go_on_as_shards_of_one(start, tmp_path):
    agents = start_nodes(start, tmp_path, (2, 3), 2, 2, rollout__transport="network", steps=3)
    assert_trained(agents, 3)
    assert agents[0].told("replicas 2 of 1 trainers"), agents[0].output[-6000:]
    again = start_nodes(start, tmp_path, (2, 3), 2, 2, rollout__transport="network", steps=5, placement__replicas=1)
    assert_trained(again, 5)
    assert not again[0].told("replicas 2")


def test_an_engine_that_is_killed_gets_the_weights_again_while_the_others_go_on(start, tmp_path):
    agents = start_nodes(start, tmp_path, (3, 2), 2, 2, rollout__transport="network", steps=12)
    agents[0].until_step(3)
    os.kill(agents[1].engine_pid(3), signal.SIGKILL)
    assert_trained(agents, 12)
    assert agents[0].told("was started again in"), agents[0].output[-6000:]


@pytest.mark.parametrize("command", ["trainer", "torchrun"])
def test_the_death_of_the_only_rank_of_another_node_is_named_on_both(start, tmp_path, command):
    """Its parent there reports it in the folder where the ranks meet."""
    over = {"command": command, "rollout__transport": "network", "deadlines__sync_s": 120, "steps": 10_000}
    agents = start_nodes(start, tmp_path, (2, 1), 1, 1, **over)
    agents[0].until_step(2)
    agents[0].remember_processes()
    victim = agents[1].signal_rank(2, signal.SIGKILL)
    codes = [agent.wait() for agent in agents]
    assert codes == [1, 137] if command == "trainer" else 0 not in codes
    words = ("engine 0 (rank 2", f"pid {victim}", "killed by signal 9 (SIGKILL)", "goes on from step")
    assert all(agent.told(*words) for agent in agents), agents[0].output[-3000:] + agents[1].output[-2000:]
    assert [agent.survivors() for agent in agents] == [[], []]


NAMESPACES, LINK = ("maestrale-node0", "maestrale-node1"), "mnode"
ADDRESSES = ("10.213.72.1", "10.213.72.2")


def ip(words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words.split()], capture_output=True, text=True)


@pytest.fixture
def namespaces(monkeypatch):
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


@pytest.mark.parametrize("how", ["silent", "reset"])
@pytest.mark.parametrize("trainers", [1, 2])
def test_nodes_that_lose_each_other_end_say_so_and_go_on_later(start, tmp_path, namespaces, trainers, how):
    """A trainer beside the controller, the engine and any other trainer elsewhere; a rank counts as hung after 30 s."""
    there: dict[str, Any] = {"address": ADDRESSES[0], "spaces": NAMESPACES, "deadlines__sync_s": 60, "steps": 12}
    agents = start_nodes(start, tmp_path, (2, trainers), trainers, 1, **there)
    agents[0].until_step(3)
    agents[1].remember_processes()
    cut(how)
    assert 0 not in [agent.wait() for agent in agents], "both sides end with an error"
    print("\n".join(line for agent in agents for line in agent.output.splitlines() if "rank" in line)[-3000:])
    assert [agent.survivors() for agent in agents] == [[], []]
    cut(how, undo=True)
    assert_trained(start_nodes(start, tmp_path, (2, trainers), trainers, 1, **there), 12)
