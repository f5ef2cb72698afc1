"""Whole launches on two nodes (two torchrun agents), with several trainers and engines that meet in any order.

pytest --soak -n 0 tests/system/test_nodes.py
"""

from __future__ import annotations

import os
import signal
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
